-- As published: a notification for each row, with its due time in milliseconds. %[1]s is the channel.
CREATE FUNCTION notify_work() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(%[1]s, (EXTRACT(EPOCH FROM NEW.visible_at) * 1000)::BIGINT::TEXT);
    RETURN NEW;
END
$$;
CREATE TRIGGER notify_work AFTER INSERT ON queue FOR EACH ROW EXECUTE FUNCTION notify_work();
