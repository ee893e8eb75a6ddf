-- Whatever a producer passes in, it stops nobody: one item is checked as many are, the queues hold no instant that cannot be told, and a clock
-- that is set back leaves no turn without its messages.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION notify_queue(p_queue text, p_due bigint, p_next timestamptz, p_namespace text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- "<due> <next, microseconds since 1970, 0 = none> <namespace, * = any> <sent>". The same for all of a transaction, of which
        -- equal notifications are one: so it was sent when that began. An instant that is too late for that number is told as the last that is not.
        PERFORM pg_notify(channel(p_queue), concat_ws(' ',
            p_due, least(coalesce(extract(epoch FROM p_next) * 1000000, 0), 9223372036854775807)::bigint, coalesce(p_namespace, '*'),
            (extract(epoch FROM transaction_timestamp()) * 1000000)::bigint));
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_work_item(
    p_name text, p_input text, p_namespace text, p_priority smallint, p_delay interval, p_visible_at timestamptz,
    p_instance text, p_execution bigint, p_activity bigint, p_tag text, p_session text, p_headers text, p_key text, p_quiet boolean,
    OUT item_id bigint, OUT duplicate boolean, OUT due_at timestamptz, OUT now_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off -- no more than it needs: each costs as much as a statement
AS $$
DECLARE
    v_off text;
BEGIN
    now_at := clock_timestamp();
    duplicate := false;
    -- As in enqueue_work_many: cheap tests, which nothing bad passes.
    IF p_name IS NULL OR '' IN (p_name, p_instance, p_session, p_key) OR octet_length(concat(p_name, p_instance, p_tag, p_session, p_key)) > 255
       OR p_namespace <> 'default' AND p_namespace !~ '^[a-z][a-z0-9_-]{0,39}$' OR p_priority NOT BETWEEN 0 AND 9
       OR p_delay < interval '0' OR p_delay IS NOT NULL AND p_visible_at IS NOT NULL OR NOT isfinite(p_visible_at) THEN
        PERFORM check_texts('a name', ARRAY[p_name], p_required => true), check_texts('an instance id', ARRAY[p_instance]);
        PERFORM check_texts('a tag', ARRAY[p_tag], 0), check_texts('a session', ARRAY[p_session]), check_texts('a key', ARRAY[p_key]);
        PERFORM check_options(ARRAY[p_namespace], ARRAY[p_priority], ARRAY[p_delay], ARRAY[p_visible_at]);
    END IF;
    IF p_headers IS NOT NULL THEN
        PERFORM check_headers(ARRAY[p_headers]);
    END IF;
    IF p_key IS NOT NULL AND p_session IS NOT NULL THEN
        RAISE EXCEPTION 'an item has a key or a session, not both' USING ERRCODE = 'PW003';
    END IF;
    IF p_namespace IS NOT NULL THEN
        PERFORM register_namespaces(ARRAY[p_namespace]);
    END IF;
    IF p_quiet THEN
        v_off := set_config('pgwake.notify', 'off', true);
    END IF;
    INSERT INTO worker_queue (name, input, namespace, priority, visible_at, instance_id, execution_id, activity_id, tag, session_id, headers, key, created_at)
    VALUES (p_name, p_input::json, coalesce(p_namespace, 'default'), coalesce(p_priority, 0), coalesce(p_visible_at, now_at + p_delay, now_at),
            p_instance, p_execution, p_activity, coalesce(p_tag, ''), p_session, p_headers::jsonb, p_key, now_at)
    RETURNING id, visible_at INTO item_id, due_at;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_work_item IS 'Internal: enqueue_work_many for one item without a dedup key at a fraction of the cost. With p_quiet the rest of the transaction is silent, too.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fetch_orchestration(
    p_token uuid, p_lock_timeout interval, p_namespaces text[] DEFAULT NULL, p_announce boolean DEFAULT false,
    p_queues text[] DEFAULT NULL, p_min_pin bigint DEFAULT NULL, p_max_pin bigint DEFAULT NULL, p_history boolean DEFAULT true,
    p_owner text DEFAULT NULL, p_node integer DEFAULT NULL, p_lane integer DEFAULT NULL, p_number bigint DEFAULT NULL,
    p_disarm boolean DEFAULT false, p_listener integer DEFAULT NULL, p_fanout integer DEFAULT 0, p_places integer DEFAULT 1)
RETURNS TABLE (
    part text, id bigint, type text, data json, name text, version text, execution_id bigint,
    attempt_count integer, headers jsonb, created_at timestamptz, instance_id text, namespace text,
    locked_until timestamptz, earliest_at timestamptz, now_at timestamptz, unfinished boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_until     timestamptz := v_now + p_lock_timeout;
    v_served    text[] := served('orchestrator', p_namespaces);
    v_selects   boolean := v_served IS NOT NULL OR p_queues IS NOT NULL OR p_min_pin IS NOT NULL;
    v_instance  text;
    v_candidate record;
    v_spare     integer := 32;
    v_read      integer;
    v_locked    boolean;
    v_refused   text[] := '{}'; -- instances whose lock somebody is changing
    v_moved     integer := 0;
    v_moved_limit   CONSTANT integer := 1000; -- what is moved out of the way so far stays so; the next look goes on from there
    v_refused_limit CONSTANT integer := 10000; -- for those, each of which the next look would meet again
    v_known     instances;
    v_opening   orchestrator_queue;
    v_execution bigint;
    v_run       executions;
BEGIN
    IF p_lock_timeout <= interval '0' OR p_token IS NULL THEN
        RAISE EXCEPTION 'fetch_orchestration needs a token and a positive lock timeout' USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (SELECT FROM realignments) THEN
        PERFORM realign_messages();
        v_now := clock_timestamp();
        v_until := v_now + p_lock_timeout;
    END IF;

    -- The first candidate, in order, whose instance can be locked. These are loops and no WHERE clause:
    -- the planner is free to evaluate a function with side effects for rows that it then discards.
    IF NOT v_selects AND p_owner IS NULL THEN
        FOR v_candidate IN
            SELECT head.id, head.instance_id
              FROM generate_series(9, 0, -1) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id, q.instance_id FROM orchestrator_queue q
                    WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                    ORDER BY q.visible_at, q.id) head
        LOOP
            CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
            v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until, NULL, NULL, NULL, NULL, NULL);
            IF v_locked THEN
                v_instance := v_candidate.instance_id;
            ELSIF NOT v_locked THEN
                v_refused := v_refused || v_candidate.instance_id;
            ELSE
                v_moved := v_moved + 1;
            END IF;
            EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
        END LOOP;
    ELSE
        -- Several lists have to be merged, so a few candidates of each are read at a time. A round
        -- that locks none has held all that are leased; the next reads further, past those in motion.
        LOOP
            v_read := 0;
            FOR v_candidate IN
                SELECT c.*
                  FROM message_lists(v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE v_selects
                UNION ALL
                SELECT c.*
                  FROM generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE NOT v_selects
                UNION ALL
                SELECT c.*
                  FROM sticky_lists(p_owner, v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.sticky_due FROM orchestrator_queue q
                        WHERE q.sticky_owner = p_owner AND q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.sticky_due <= v_now
                        ORDER BY q.sticky_due, q.id
                        LIMIT v_spare) c
                 WHERE p_owner IS NOT NULL
                 ORDER BY priority DESC, visible_at, id
            LOOP
                v_read := v_read + 1;
                CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
                v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until,
                                              v_served, p_queues, p_min_pin, p_max_pin, p_owner);
                IF v_locked THEN
                    v_instance := v_candidate.instance_id;
                ELSIF NOT v_locked THEN
                    v_refused := v_refused || v_candidate.instance_id;
                ELSE
                    v_moved := v_moved + 1;
                END IF;
                EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            END LOOP;
            EXIT WHEN v_instance IS NOT NULL OR v_read < v_spare OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            v_spare := v_spare * 8;
        END LOOP;
    END IF;

    IF v_instance IS NOT NULL THEN
        -- What was held behind the lock came back with the release of that, perhaps after this began, and is older than what
        -- was not. Never as of an instant before the one at which the lock was taken for a message that was due: a clock may be set back.
        v_now := greatest(v_now, clock_timestamp());
        UPDATE orchestrator_queue q
           SET lock_token = p_token, visible_at = v_until, held = false, sticky_owner = NULL, sticky_due = NULL,
               attempt_count = q.attempt_count + 1
         WHERE q.instance_id = v_instance AND coalesce(q.sticky_due, q.visible_at) <= v_now;

        SELECT * INTO v_known FROM instances i WHERE i.instance_id = v_instance;
        -- In the order of their ids. If it were an equality, a walk along the primary key, over the messages of all
        -- instances, would give that order as well, and do for a planner that believes the table to be empty.
        SELECT * INTO v_opening FROM orchestrator_queue q
         WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token AND q.kind IN ('start', 'continue_as_new')
         ORDER BY q.instance_id, q.id LIMIT 1;
        v_execution := v_opening.execution_id;
        IF v_opening.id IS NOT NULL AND v_known.instance_id IS NOT NULL THEN -- for which a start opens nothing
            SELECT max(q.execution_id) INTO v_execution FROM orchestrator_queue q
             WHERE q.instance_id = v_instance AND q.lock_token = p_token AND q.kind = 'continue_as_new';
        END IF;
        v_execution := coalesce(greatest(v_known.current_execution, v_execution), 1);
        SELECT * INTO v_run FROM executions x WHERE x.instance_id = v_instance AND x.execution_id = v_execution;

        RETURN QUERY
        SELECT 'item', NULL::bigint, NULL::text,
               json_build_object(
                   'queue', coalesce(v_known.queue, (array_agg(q.queue ORDER BY q.instance_id, q.id))[1]), 'parent', v_known.parent_id,
                   'attributes', v_known.attributes, 'pin', v_run.pin,
                   'last_event', coalesce(v_run.last_event, (SELECT max(h.event_id) FROM history h
                                                              WHERE h.instance_id = v_instance AND h.execution_id = v_execution)),
                   'event_count', v_run.event_count, 'appended_at', v_run.appended_at, 'started_at', v_run.started_at, 'kv', kv_snapshot(v_instance)),
               coalesce(v_known.name, v_opening.name), coalesce(v_known.version, v_opening.version), v_execution,
               max(q.attempt_count), NULL::jsonb, min(q.created_at), v_instance, coalesce(v_known.namespace, (array_agg(q.namespace ORDER BY q.instance_id, q.id))[1]),
               v_until, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM (SELECT m.* FROM orchestrator_queue m WHERE m.instance_id BETWEEN v_instance AND v_instance AND m.lock_token = p_token
                 ORDER BY m.instance_id, m.id OFFSET 0) q;
        RETURN QUERY
        SELECT 'message', q.id, q.kind, q.data, q.name, q.version, q.execution_id, q.attempt_count, q.headers, q.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM orchestrator_queue q WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token ORDER BY q.instance_id, q.id;
        RETURN QUERY
        SELECT 'event', h.event_id, h.type, h.data, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb, h.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM history h WHERE p_history AND h.instance_id = v_instance AND h.execution_id = v_execution ORDER BY h.event_id;
        IF p_announce THEN
            PERFORM notify_queue('orchestrator', 0, v_until);
        END IF;
    END IF;

    RETURN QUERY
    SELECT 'outlook', NULL::bigint, NULL::text, NULL::json, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb,
           NULL::timestamptz, NULL::text, NULL::text, v_until, earliest_message(p_namespaces, p_queues, p_min_pin, p_max_pin, p_owner), clock_timestamp(),
           v_instance IS NULL AND v_moved = v_moved_limit;
    IF p_number IS NOT NULL AND (p_disarm OR v_instance IS NULL) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'orchestrator', p_number, v_instance IS NULL, p_namespaces, p_queues, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fetch_orchestration(
    p_token uuid, p_lock_timeout interval, p_namespaces text[] DEFAULT NULL, p_announce boolean DEFAULT false,
    p_queues text[] DEFAULT NULL, p_min_pin bigint DEFAULT NULL, p_max_pin bigint DEFAULT NULL, p_history boolean DEFAULT true,
    p_owner text DEFAULT NULL, p_node integer DEFAULT NULL, p_lane integer DEFAULT NULL, p_number bigint DEFAULT NULL,
    p_disarm boolean DEFAULT false, p_listener integer DEFAULT NULL, p_fanout integer DEFAULT 0, p_places integer DEFAULT 1)
RETURNS TABLE (
    part text, id bigint, type text, data json, name text, version text, execution_id bigint,
    attempt_count integer, headers jsonb, created_at timestamptz, instance_id text, namespace text,
    locked_until timestamptz, earliest_at timestamptz, now_at timestamptz, unfinished boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_until     timestamptz := v_now + p_lock_timeout;
    v_served    text[] := served('orchestrator', p_namespaces);
    v_selects   boolean := v_served IS NOT NULL OR p_queues IS NOT NULL OR p_min_pin IS NOT NULL;
    v_instance  text;
    v_candidate record;
    v_spare     integer := 32;
    v_read      integer;
    v_locked    boolean;
    v_refused   text[] := '{}'; -- instances whose lock somebody is changing
    v_moved     integer := 0;
    v_moved_limit   CONSTANT integer := 1000; -- what is moved out of the way so far stays so; the next look goes on from there
    v_refused_limit CONSTANT integer := 10000; -- for those, each of which the next look would meet again
    v_known     instances;
    v_opening   orchestrator_queue;
    v_execution bigint;
    v_run       executions;
BEGIN
    IF p_lock_timeout <= interval '0' OR p_token IS NULL THEN
        RAISE EXCEPTION 'fetch_orchestration needs a token and a positive lock timeout' USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (SELECT FROM realignments) THEN
        PERFORM realign_messages();
        v_now := clock_timestamp();
        v_until := v_now + p_lock_timeout;
    END IF;

    -- The first candidate, in order, whose instance can be locked. These are loops and no WHERE clause:
    -- the planner is free to evaluate a function with side effects for rows that it then discards.
    IF NOT v_selects AND p_owner IS NULL THEN
        FOR v_candidate IN
            SELECT head.id, head.instance_id
              FROM generate_series(9, 0, -1) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id, q.instance_id FROM orchestrator_queue q
                    WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                    ORDER BY q.visible_at, q.id) head
        LOOP
            CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
            v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until, NULL, NULL, NULL, NULL, NULL);
            IF v_locked THEN
                v_instance := v_candidate.instance_id;
            ELSIF NOT v_locked THEN
                v_refused := v_refused || v_candidate.instance_id;
            ELSE
                v_moved := v_moved + 1;
            END IF;
            EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
        END LOOP;
    ELSE
        -- Several lists have to be merged, so a few candidates of each are read at a time. A round
        -- that locks none has held all that are leased; the next reads further, past those in motion.
        LOOP
            v_read := 0;
            FOR v_candidate IN
                SELECT c.*
                  FROM message_lists(v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE v_selects
                UNION ALL
                SELECT c.*
                  FROM generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE NOT v_selects
                UNION ALL
                SELECT c.*
                  FROM sticky_lists(p_owner, v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.sticky_due FROM orchestrator_queue q
                        WHERE q.sticky_owner = p_owner AND q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.sticky_due <= v_now
                        ORDER BY q.sticky_due, q.id
                        LIMIT v_spare) c
                 WHERE p_owner IS NOT NULL
                 ORDER BY priority DESC, visible_at, id
            LOOP
                v_read := v_read + 1;
                CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
                v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until,
                                              v_served, p_queues, p_min_pin, p_max_pin, p_owner);
                IF v_locked THEN
                    v_instance := v_candidate.instance_id;
                ELSIF NOT v_locked THEN
                    v_refused := v_refused || v_candidate.instance_id;
                ELSE
                    v_moved := v_moved + 1;
                END IF;
                EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            END LOOP;
            EXIT WHEN v_instance IS NOT NULL OR v_read < v_spare OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            v_spare := v_spare * 8;
        END LOOP;
    END IF;

    IF v_instance IS NOT NULL THEN
        -- What was held behind the lock came back with the release of that, perhaps after this began, and is older than what
        -- was not.
        v_now := clock_timestamp();
        UPDATE orchestrator_queue q
           SET lock_token = p_token, visible_at = v_until, held = false, sticky_owner = NULL, sticky_due = NULL,
               attempt_count = q.attempt_count + 1
         WHERE q.instance_id = v_instance AND coalesce(q.sticky_due, q.visible_at) <= v_now;

        SELECT * INTO v_known FROM instances i WHERE i.instance_id = v_instance;
        -- In the order of their ids. If it were an equality, a walk along the primary key, over the messages of all
        -- instances, would give that order as well, and do for a planner that believes the table to be empty.
        SELECT * INTO v_opening FROM orchestrator_queue q
         WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token AND q.kind IN ('start', 'continue_as_new')
         ORDER BY q.instance_id, q.id LIMIT 1;
        v_execution := v_opening.execution_id;
        IF v_opening.id IS NOT NULL AND v_known.instance_id IS NOT NULL THEN -- for which a start opens nothing
            SELECT max(q.execution_id) INTO v_execution FROM orchestrator_queue q
             WHERE q.instance_id = v_instance AND q.lock_token = p_token AND q.kind = 'continue_as_new';
        END IF;
        v_execution := coalesce(greatest(v_known.current_execution, v_execution), 1);
        SELECT * INTO v_run FROM executions x WHERE x.instance_id = v_instance AND x.execution_id = v_execution;

        RETURN QUERY
        SELECT 'item', NULL::bigint, NULL::text,
               json_build_object(
                   'queue', coalesce(v_known.queue, (array_agg(q.queue ORDER BY q.instance_id, q.id))[1]), 'parent', v_known.parent_id,
                   'attributes', v_known.attributes, 'pin', v_run.pin,
                   'last_event', coalesce(v_run.last_event, (SELECT max(h.event_id) FROM history h
                                                              WHERE h.instance_id = v_instance AND h.execution_id = v_execution)),
                   'event_count', v_run.event_count, 'appended_at', v_run.appended_at, 'started_at', v_run.started_at, 'kv', kv_snapshot(v_instance)),
               coalesce(v_known.name, v_opening.name), coalesce(v_known.version, v_opening.version), v_execution,
               max(q.attempt_count), NULL::jsonb, min(q.created_at), v_instance, coalesce(v_known.namespace, (array_agg(q.namespace ORDER BY q.instance_id, q.id))[1]),
               v_until, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM (SELECT m.* FROM orchestrator_queue m WHERE m.instance_id BETWEEN v_instance AND v_instance AND m.lock_token = p_token
                 ORDER BY m.instance_id, m.id OFFSET 0) q;
        RETURN QUERY
        SELECT 'message', q.id, q.kind, q.data, q.name, q.version, q.execution_id, q.attempt_count, q.headers, q.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM orchestrator_queue q WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token ORDER BY q.instance_id, q.id;
        RETURN QUERY
        SELECT 'event', h.event_id, h.type, h.data, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb, h.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM history h WHERE p_history AND h.instance_id = v_instance AND h.execution_id = v_execution ORDER BY h.event_id;
        IF p_announce THEN
            PERFORM notify_queue('orchestrator', 0, v_until);
        END IF;
    END IF;

    RETURN QUERY
    SELECT 'outlook', NULL::bigint, NULL::text, NULL::json, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb,
           NULL::timestamptz, NULL::text, NULL::text, v_until, earliest_message(p_namespaces, p_queues, p_min_pin, p_max_pin, p_owner), clock_timestamp(),
           v_instance IS NULL AND v_moved = v_moved_limit;
    IF p_number IS NOT NULL AND (p_disarm OR v_instance IS NULL) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'orchestrator', p_number, v_instance IS NULL, p_namespaces, p_queues, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_work_item(
    p_name text, p_input text, p_namespace text, p_priority smallint, p_delay interval, p_visible_at timestamptz,
    p_instance text, p_execution bigint, p_activity bigint, p_tag text, p_session text, p_headers text, p_key text, p_quiet boolean,
    OUT item_id bigint, OUT duplicate boolean, OUT due_at timestamptz, OUT now_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off -- no more than it needs: each costs as much as a statement
AS $$
DECLARE
    v_off text;
BEGIN
    now_at := clock_timestamp();
    duplicate := false;
    IF p_namespace IS NOT NULL THEN
        PERFORM register_namespaces(ARRAY[p_namespace]);
    END IF;
    IF p_quiet THEN
        v_off := set_config('pgwake.notify', 'off', true);
    END IF;
    INSERT INTO worker_queue (name, input, namespace, priority, visible_at, instance_id, execution_id, activity_id, tag, session_id, headers, key, created_at)
    VALUES (p_name, p_input::json, coalesce(p_namespace, 'default'), p_priority, coalesce(p_visible_at, now_at + p_delay, now_at),
            p_instance, p_execution, p_activity, coalesce(p_tag, ''), p_session, p_headers::jsonb, p_key, now_at)
    RETURNING id, visible_at INTO item_id, due_at;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_work_item IS 'Internal: enqueue_work_many for one item without a dedup key, whose arguments were checked before, at a fraction of the cost. With p_quiet the rest of the transaction is silent, too.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION notify_queue(p_queue text, p_due bigint, p_next timestamptz, p_namespace text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- "<due> <next, microseconds since 1970, 0 = none> <namespace, * = any> <sent>". The same for all of a transaction, of which
        -- equal notifications are one: so it was sent when that began.
        PERFORM pg_notify(channel(p_queue), concat_ws(' ',
            p_due, coalesce((extract(epoch FROM p_next) * 1000000)::bigint, 0), coalesce(p_namespace, '*'),
            (extract(epoch FROM transaction_timestamp()) * 1000000)::bigint));
    END IF;
END
$$;
-- +goose StatementEnd
