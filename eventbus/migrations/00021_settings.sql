-- A node that was stopped stays so, whatever it has said before and is heard of only now; and how a session reads literals does not matter.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
    v_stopped  timestamptz := (SELECT n.stopped_at FROM event_nodes n WHERE n.node_id = p_node_id);
BEGIN
    PERFORM remove_strays();
    v_patterns := ARRAY(SELECT p.pattern FROM list_patterns(p_namespace, p_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
    -- What a node says itself counts, whoever has said before that it has stopped; who says so from then on has the last word, for nobody may be
    -- waiting for this any more. The row is looked at once more when it is locked.
    UPDATE event_nodes n
       SET last_heartbeat = clock_timestamp(), heartbeats = p_heartbeats, stopped_at = NULL, patterns = v_patterns,
           waiter = CASE WHEN node_listens(p_waiter) THEN p_waiter END
     WHERE n.node_id = p_node_id AND (n.stopped_at IS NULL OR n.stopped_at = v_stopped);
    RETURN v_patterns;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stop_node(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_stopped timestamptz;
BEGIN
    SELECT n.stopped_at INTO v_stopped FROM event_nodes n WHERE n.node_id = p_node_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- One that was gone already is so by another time: a beat that began since then knows by that that it was stopped once more.
    UPDATE event_nodes n SET stopped_at = coalesce(v_stopped + interval '1 us', clock_timestamp()), waiter = NULL WHERE n.node_id = p_node_id;
    RETURN v_stopped IS NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION stop_node IS 'Marks a node as gone, and returns whether it was not yet. A heartbeat that is under way does not change that.';

-- With standard_conforming_strings off a backslash in a literal is something else. What is read by those that a role has set so stays what it is.
ALTER FUNCTION pattern_regex SET standard_conforming_strings = on;
ALTER FUNCTION subscribe SET standard_conforming_strings = on;
ALTER FUNCTION partman_schema SET standard_conforming_strings = on;
ALTER FUNCTION parse_cron SET standard_conforming_strings = on;
ALTER FUNCTION next_occurrence SET standard_conforming_strings = on;
ALTER FUNCTION pg_cron_schedule SET standard_conforming_strings = on;
ALTER FUNCTION schedule_task SET standard_conforming_strings = on;
UPDATE event_subscriptions s SET regex = pattern_regex(s.pattern) WHERE s.regex IS NOT NULL AND s.regex <> pattern_regex(s.pattern);

-- Whoever migrated so has a log that takes more types than there are. If there are events of such, it goes on to do so.
-- +goose StatementBegin
DO $$
DECLARE
    v_partition regclass;
BEGIN
    IF EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = 'event_log'::regclass AND c.conname = 'event_log_event_type_check' AND strpos(pg_get_constraintdef(c.oid), chr(92)) = 0)
       AND NOT EXISTS (SELECT FROM event_log e WHERE e.event_type !~ E'^[^.*#|[:space:][:cntrl:]]+(\\.[^.*#|[:space:][:cntrl:]]+)*$') THEN
        ALTER TABLE event_log DROP CONSTRAINT event_log_event_type_check;
        FOR v_partition IN SELECT c.conrelid::regclass FROM pg_constraint c JOIN pg_inherits i ON i.inhrelid = c.conrelid
                            WHERE i.inhparent = 'event_log'::regclass AND c.conname = 'event_log_event_type_check' LOOP
            EXECUTE format('ALTER TABLE %s DROP CONSTRAINT event_log_event_type_check', v_partition); -- those that were made by themselves, and then attached, have their own
        END LOOP;
        ALTER TABLE event_log ADD CONSTRAINT event_log_event_type_check
            CHECK (octet_length(event_type) <= 180 AND event_type ~ E'^[^.*#|[:space:][:cntrl:]]+(\\.[^.*#|[:space:][:cntrl:]]+)*$');
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet.
LOCK TABLE scheduled_tasks, event_log, event_groups, event_nodes, event_dedup_keys IN ACCESS EXCLUSIVE MODE;
SELECT require_no_events();
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM scheduled_tasks) THEN
        RAISE EXCEPTION 'schema % still holds schedules; remove them before migrating down', current_schema() USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd

ALTER FUNCTION schedule_task RESET standard_conforming_strings;
ALTER FUNCTION pg_cron_schedule RESET standard_conforming_strings;
ALTER FUNCTION next_occurrence RESET standard_conforming_strings;
ALTER FUNCTION parse_cron RESET standard_conforming_strings;
ALTER FUNCTION partman_schema RESET standard_conforming_strings;
ALTER FUNCTION subscribe RESET standard_conforming_strings;
ALTER FUNCTION pattern_regex RESET standard_conforming_strings;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stop_node(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE event_nodes n SET stopped_at = clock_timestamp(), waiter = NULL WHERE n.node_id = p_node_id AND n.stopped_at IS NULL;
    RETURN FOUND;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION stop_node IS 'Marks a node as gone, and returns whether it was not yet.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
BEGIN
    PERFORM remove_strays();
    v_patterns := ARRAY(SELECT p.pattern FROM list_patterns(p_namespace, p_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
    -- What a node says itself counts, whoever has said before that it has stopped.
    UPDATE event_nodes n
       SET last_heartbeat = clock_timestamp(), heartbeats = p_heartbeats, stopped_at = NULL, patterns = v_patterns,
           waiter = CASE WHEN node_listens(p_waiter) THEN p_waiter END
     WHERE n.node_id = p_node_id;
    RETURN v_patterns;
END
$$;
-- +goose StatementEnd
