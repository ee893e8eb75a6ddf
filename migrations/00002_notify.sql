-- The notifications, and the functions that both queues share.
--
-- Every function pins its search_path to the schema that it was created in (FROM CURRENT). Those on
-- the hot path pin the shape of their plans as well: the statistics of a queue table are wrong most of
-- the time (empty when analyzed, a million rows a minute later, or the other way round), and each of
-- their queries has exactly one good plan, the walk along the index made for it.
--
-- SQLSTATEs raised here: PW001 the lock token is unknown or expired, PW002 not found,
-- PW003 invalid argument, PW006 rows would be lost.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION channel(p_queue text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN 'pgwake_' || substr(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 1, 16) || '_' || p_queue;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION channel IS 'Notification channel of a queue (orchestrator or worker). A hash, since LISTEN silently truncates names at 63 bytes.';

-- +goose StatementBegin
CREATE FUNCTION notify_queue(p_queue text, p_due bigint, p_next timestamptz, p_namespace text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- "<due> <next, microseconds since 1970, 0 = none> <namespace, * = any>"
        PERFORM pg_notify(channel(p_queue), concat_ws(' ',
            p_due, coalesce((extract(epoch FROM p_next) * 1000000)::bigint, 0), coalesce(p_namespace, '*')));
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_queue IS 'Tells the nodes that p_due items are due and that another becomes due at p_next (either may be absent), in one namespace or, if null, in any. Silent while the setting pgwake.notify is off.';

-- +goose StatementBegin
CREATE FUNCTION notify_inserted()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_rows  bigint;
    v_due   bigint;
    v_next  timestamptz;
    v_first text;
    v_last  text;
BEGIN
    SELECT count(*), count(*) FILTER (WHERE visible_at <= v_now), min(visible_at) FILTER (WHERE visible_at > v_now),
           min(namespace), max(namespace)
      INTO v_rows, v_due, v_next, v_first, v_last
      FROM inserted;
    IF v_rows > 0 THEN
        PERFORM notify_queue(TG_ARGV[0], v_due, v_next, CASE WHEN v_first = v_last THEN v_first END);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_inserted IS 'Sends one notification for all rows of an INSERT: how many are due, and when the next one will be.';

CREATE TRIGGER worker_queue_notify AFTER INSERT ON worker_queue
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
    WHEN (current_setting('pgwake.notify', true) IS DISTINCT FROM 'off')
    EXECUTE FUNCTION notify_inserted('worker');
CREATE TRIGGER orchestrator_queue_notify AFTER INSERT ON orchestrator_queue
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
    WHEN (current_setting('pgwake.notify', true) IS DISTINCT FROM 'off')
    EXECUTE FUNCTION notify_inserted('orchestrator');

-- +goose StatementBegin
CREATE FUNCTION quiet(p_quiet boolean)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_before text := current_setting('pgwake.notify', true);
BEGIN
    IF p_quiet THEN
        PERFORM set_config('pgwake.notify', 'off', true);
    END IF;
    RETURN coalesce(v_before, '');
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION quiet IS 'With true, silences the notifications of this transaction. Returns the setting to go back to.';

-- +goose StatementBegin
CREATE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name)
       -- Whoever is about to add it holds this; waiting for that transaction would be waiting for a stranger.
       AND pg_try_advisory_xact_lock(hashtext('pgwake namespaces of ' || current_schema()), hashtext(n.name))
     ORDER BY n.name
    ON CONFLICT DO NOTHING;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_namespaces IS 'Adds the namespaces that the registry lacks, in the transaction of their first items; never waits. If another transaction is adding one at this moment, that one does, or else the next.';

-- +goose StatementBegin
CREATE FUNCTION earliest_work(p_namespaces text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_earliest timestamptz;
BEGIN
    IF p_namespaces IS NULL THEN
        SELECT min(head.visible_at) INTO v_earliest
          FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE -q.priority = -level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    ELSE
        SELECT min(head.visible_at) INTO v_earliest
          FROM unnest(p_namespaces) AS served (namespace)
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE q.namespace = served.namespace AND q.priority = level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION earliest_work IS 'Earliest visible_at among the work items of these namespaces (null: all). If it has passed, something is due; if not, that is when something next will be, ends of leases included; null means none at all.';

-- +goose StatementBegin
CREATE FUNCTION earliest_message(p_namespaces text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_earliest timestamptz;
BEGIN
    IF p_namespaces IS NULL THEN
        SELECT min(head.visible_at) INTO v_earliest
          FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM orchestrator_queue q
                WHERE -q.priority = -level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    ELSE
        SELECT min(head.visible_at) INTO v_earliest
          FROM unnest(p_namespaces) AS served (namespace)
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM orchestrator_queue q
                WHERE q.namespace = served.namespace AND q.priority = level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION earliest_message IS 'Earliest visible_at among the messages of these namespaces (null: all). If it has passed, something is due; if not, that is when something next will be, ends of leases included; null means none at all.';

-- +goose StatementBegin
CREATE FUNCTION look(p_queues text[], p_namespaces text[])
RETURNS TABLE (lane integer, earliest_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT asked.ord::integer,
           CASE asked.queue WHEN 'worker' THEN earliest_work(string_to_array(asked.namespaces, ','))
                            ELSE earliest_message(string_to_array(asked.namespaces, ',')) END,
           clock_timestamp()
      FROM unnest(p_queues, p_namespaces) WITH ORDINALITY AS asked (queue, namespaces, ord);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION look IS 'For each lane of a node, a queue and a comma-separated list of namespaces (null: all), the earliest visible_at. The one statement a minute of an idle node.';

-- +goose StatementBegin
CREATE FUNCTION notify_queues(p_queues text[], p_due bigint[], p_next timestamptz[], p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM notify_queue(told.queue, told.due, told.next, told.namespace)
       FROM unnest(p_queues, p_due, p_next, p_namespaces) AS told (queue, due, next, namespace);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_queues IS 'Several calls of notify_queue in one round trip, for the nodes'' own notifications.';

-- +goose StatementBegin
CREATE FUNCTION listen_session()
RETURNS TABLE (backend_pid integer, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- The backend of a node that died without a word ends within 25 s.
    PERFORM set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
            set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '25000', false);
    -- It is idle for a minute at a time.
    PERFORM set_config('idle_session_timeout', '0', false);
    -- What a node says on its own account must not wait for the disk, and nothing here changes a row.
    PERFORM set_config('synchronous_commit', 'off', false);
    -- The protocol counts on a new snapshot for each statement; the role's default may differ.
    PERFORM set_config('default_transaction_isolation', 'read committed', false);
    RETURN QUERY SELECT pg_backend_pid(), clock_timestamp();
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION listen_session IS 'Configures the session of a node''s LISTEN connection, which must not be one that a pooler shares.';

-- +goose Down

DROP TRIGGER worker_queue_notify ON worker_queue;
DROP TRIGGER orchestrator_queue_notify ON orchestrator_queue;
DROP FUNCTION listen_session, notify_queues, look, earliest_work, earliest_message, register_namespaces, quiet, notify_inserted, notify_queue, channel;
