-- Batches of work items take dedup keys in one order, also where one names the default namespace and another does not. Who has held an advisory
-- lock for too long is looked for in this database alone.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_work_many(
    p_names text[], p_inputs text[], p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_instances text[] DEFAULT NULL, p_executions bigint[] DEFAULT NULL, p_activities bigint[] DEFAULT NULL,
    p_tags text[] DEFAULT NULL, p_sessions text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_dedup_fors interval[] DEFAULT NULL, p_dedup_scopes text[] DEFAULT NULL, p_keys text[] DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before text;
    v_ids    bigint[] := ARRAY(SELECT nextval('worker_queue_id_seq') FROM generate_series(1, cardinality(p_names)));
    v_texts  text := concat(p_names, p_dedup_keys, p_instances, p_tags, p_sessions, p_keys);
    v_keyed  boolean := array_remove(p_dedup_keys, NULL) <> '{}';
    v_kept   boolean := array_remove(p_dedup_fors, NULL) <> '{}';
    v_taken  bigint[] := '{}'; -- of v_ids, those whose key another item has
    v_waiting boolean := v_keyed AND 'waiting' = ANY (p_dedup_scopes);
    v_holder  record;
    v_held    bigint[] := '{}'; -- items that wait, and do so until the transaction ends
    v_open    bigint[];         -- of v_ids, those that are to be tried again, and the others
    v_settled bigint[] := '{}';
BEGIN
    -- Cheap tests, which nothing bad passes and all that is usual does; a batch does not. What is bad, if anything is, the
    -- functions tell.
    IF octet_length(v_texts) > 255 OR strpos(v_texts, '""') > 0 OR array_position(p_names, NULL) IS NOT NULL
       OR octet_length(p_namespaces::text) > 42 OR p_namespaces::text !~ '^\{(NULL|[a-z][a-z0-9_-]*)}$' OR 0 > ANY (p_priorities) OR 9 < ANY (p_priorities)
       OR interval '0' > ANY (p_delays) OR 'infinity' = ANY (p_visible_ats) OR '-infinity' = ANY (p_visible_ats)
       OR array_remove(p_delays, NULL) <> '{}' AND array_remove(p_visible_ats, NULL) <> '{}' THEN
        PERFORM check_texts('a name', p_names, p_required => true);
        PERFORM check_texts('a dedup key', p_dedup_keys), check_texts('an instance id', p_instances);
        PERFORM check_texts('a tag', p_tags, 0), check_texts('a session', p_sessions), check_texts('a key', p_keys);
        PERFORM check_options(p_namespaces, p_priorities, p_delays, p_visible_ats);
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    IF array_remove(p_keys, NULL) <> '{}' AND EXISTS (SELECT FROM unnest(p_keys, p_sessions) AS i (key, session) WHERE i.key IS NOT NULL AND i.session IS NOT NULL) THEN
        RAISE EXCEPTION 'an item has a key or a session, not both' USING ERRCODE = 'PW003';
    END IF;
    IF v_kept OR array_remove(p_dedup_scopes, NULL) <> '{}' THEN
        PERFORM check_dedup(p_dedup_keys, p_dedup_fors, p_dedup_scopes);
    END IF;
    IF array_remove(array_remove(p_namespaces, NULL), 'default') <> '{}' THEN
        PERFORM register_namespaces(p_namespaces);
    END IF;
    IF v_keyed THEN
        IF v_kept THEN
            PERFORM keep_dedup_keys(v_ids, p_namespaces, p_dedup_keys, p_dedup_fors, v_now);
        END IF;
        v_taken := ARRAY(
            SELECT i.id FROM unnest(v_ids, p_namespaces, p_dedup_keys) AS i (id, namespace, dedup_key)
             CROSS JOIN LATERAL (
                   SELECT d.kept_until, d.item_id FROM dedup_keys d
                    WHERE d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key = i.dedup_key LIMIT 1) k
             WHERE k.kept_until > v_now AND k.item_id <> i.id);
    END IF;
    v_before := quiet(p_quiet);
    LOOP
        IF v_waiting THEN
            -- In order, so that nobody who locks several items can deadlock.
            FOR v_holder IN
                SELECT holder.id, holder.dedup_key, bool_or(i.id <> ALL (v_taken)) AS in_the_way
                  FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
                 CROSS JOIN LATERAL (
                       SELECT w.id, w.dedup_key FROM worker_queue w
                        WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                        ORDER BY w.dedup_key LIMIT 1) holder
                 WHERE i.scope = 'waiting' AND i.id <> ALL (v_settled)
                 GROUP BY holder.id, holder.dedup_key ORDER BY holder.id
            LOOP
                -- Whoever waits is not claimed until this transaction has ended: he is to see what it has done.
                PERFORM FROM worker_queue q
                  WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND NOT (q.lock_token IS NOT NULL AND q.visible_at > v_now)
                    FOR KEY SHARE;
                IF FOUND THEN
                    v_held := v_held || v_holder.id;
                ELSIF v_holder.in_the_way THEN -- no longer, if he is at work
                    UPDATE worker_queue q SET dedup_key = NULL
                     WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND q.lock_token IS NOT NULL AND q.visible_at > v_now;
                END IF;
            END LOOP;
        END IF;
        INSERT INTO worker_queue (id, name, input, namespace, priority, visible_at, dedup_key,
                                  instance_id, execution_id, activity_id, tag, session_id, headers, key, created_at)
        SELECT i.id, i.name, i.input::json, coalesce(i.namespace, 'default'), coalesce(i.priority, 0),
               coalesce(i.visible_at, v_now + i.delay, v_now), i.dedup_key, i.instance_id, i.execution_id, i.activity_id,
               coalesce(i.tag, ''), i.session_id, i.headers::jsonb, i.key, v_now
          FROM unnest(v_ids, p_names, p_inputs, p_namespaces, p_priorities, p_delays, p_visible_ats, p_dedup_keys,
                      p_instances, p_executions, p_activities, p_tags, p_sessions, p_headers, p_keys) WITH ORDINALITY
               AS i (id, name, input, namespace, priority, delay, visible_at, dedup_key,
                     instance_id, execution_id, activity_id, tag, session_id, headers, key, ord)
         WHERE i.id <> ALL (v_taken) AND i.id <> ALL (v_settled)
         ORDER BY coalesce(i.namespace, 'default'), i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
        ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
        EXIT WHEN NOT v_waiting;
        -- The insert may have met an item that nobody saw before, or that was given back or finished since: again, until each
        -- was added, or has whoever stands in its way locked.
        v_open := ARRAY(
            SELECT i.id FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
              LEFT JOIN LATERAL (
                   SELECT w.id FROM worker_queue w
                    WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                    ORDER BY w.dedup_key LIMIT 1) holder ON true
             WHERE i.scope = 'waiting' AND i.id <> ALL (v_taken) AND coalesce(holder.id <> ALL (v_ids || v_held), true));
        EXIT WHEN v_open = '{}';
        v_settled := ARRAY(SELECT i.id FROM unnest(v_ids) AS i (id) WHERE i.id <> ALL (v_open));
    END LOOP;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF v_kept OR 'dead' = ANY (p_dedup_scopes) THEN
        -- The insert may have waited for whoever had the key. By now he keeps it, or his item is a dead letter, or neither.
        DELETE FROM worker_queue q
         USING unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
         WHERE q.id = ANY (ARRAY[i.id]) -- as in ack_work_many
           AND (EXISTS (SELECT FROM dedup_keys k
                         WHERE k.namespace = coalesce(i.namespace, 'default') AND k.dedup_key = i.dedup_key AND (k.kept_until > v_now) IS TRUE AND k.item_id <> i.id)
                OR i.scope = 'dead' AND EXISTS (
                       SELECT FROM dead_letters d
                        WHERE d.queue = 'worker' AND d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                        ORDER BY d.dedup_key OFFSET 0));
    END IF;
    IF v_kept THEN -- what was not added keeps no key
        DELETE FROM dedup_keys k USING unnest(v_ids, p_namespaces, p_dedup_keys) AS i (id, namespace, dedup_key)
         WHERE k.namespace = ANY (ARRAY[coalesce(i.namespace, 'default')]) AND k.dedup_key = i.dedup_key AND k.item_id = i.id
           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = i.id OFFSET 0);
    END IF;

    -- In a second statement, whose snapshot shows the row that a conflict was waited for. The limits keep the planner from
    -- a join by walking over the whole table, which is as good to it if it believes the table to be empty.
    RETURN QUERY
    SELECT CASE WHEN coalesce(added.id, queued.id) IS NOT NULL THEN coalesce(added.id, queued.id)
                WHEN i.id = ANY (v_taken) OR i.scope = 'dead' THEN dedup_holder(i.namespace, i.dedup_key, i.scope, v_now) END,
           added.id IS NULL, coalesce(added.visible_at, queued.visible_at), v_now
      FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) WITH ORDINALITY AS i (id, namespace, dedup_key, scope, ord)
      LEFT JOIN LATERAL (SELECT q.* FROM worker_queue q WHERE q.id = i.id LIMIT 1) added ON true
      LEFT JOIN LATERAL (
           SELECT q.* FROM worker_queue q
            WHERE added.id IS NULL AND q.namespace = coalesce(i.namespace, 'default') AND q.dedup_key BETWEEN i.dedup_key AND i.dedup_key
            ORDER BY q.dedup_key LIMIT 1) queued ON true
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_lock(p_class integer, p_key integer, p_what text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_holder integer;
BEGIN
    IF pg_try_advisory_xact_lock(p_class, p_key) THEN
        RETURN;
    END IF;
    DECLARE
        v_before text := current_setting('lock_timeout');
    BEGIN
        IF v_before = '0' THEN
            PERFORM set_config('lock_timeout', lock_patience(), true);
        END IF;
        PERFORM pg_advisory_xact_lock(p_class, p_key);
        PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available THEN
        SELECT l.pid INTO v_holder FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.classid = p_class::oid AND l.objid = p_key::oid AND l.objsubid = 2 AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()) LIMIT 1;
        RAISE EXCEPTION 'another session (pid %) has held the advisory lock (%, %) for too long, which is that of %', v_holder, p_class, p_key, p_what
            USING ERRCODE = 'lock_not_available', HINT = 'It is a transaction that stays open, or a stranger''s lock with the same key: see pg_locks.';
    END;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_lock(p_class integer, p_key integer, p_what text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_holder integer;
BEGIN
    IF pg_try_advisory_xact_lock(p_class, p_key) THEN
        RETURN;
    END IF;
    DECLARE
        v_before text := current_setting('lock_timeout');
    BEGIN
        IF v_before = '0' THEN
            PERFORM set_config('lock_timeout', lock_patience(), true);
        END IF;
        PERFORM pg_advisory_xact_lock(p_class, p_key);
        PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available THEN
        SELECT l.pid INTO v_holder FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.classid = p_class::oid AND l.objid = p_key::oid AND l.objsubid = 2 AND l.granted LIMIT 1;
        RAISE EXCEPTION 'another session (pid %) has held the advisory lock (%, %) for too long, which is that of %', v_holder, p_class, p_key, p_what
            USING ERRCODE = 'lock_not_available', HINT = 'It is a transaction that stays open, or a stranger''s lock with the same key: see pg_locks.';
    END;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_work_many(
    p_names text[], p_inputs text[], p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_instances text[] DEFAULT NULL, p_executions bigint[] DEFAULT NULL, p_activities bigint[] DEFAULT NULL,
    p_tags text[] DEFAULT NULL, p_sessions text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_dedup_fors interval[] DEFAULT NULL, p_dedup_scopes text[] DEFAULT NULL, p_keys text[] DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before text;
    v_ids    bigint[] := ARRAY(SELECT nextval('worker_queue_id_seq') FROM generate_series(1, cardinality(p_names)));
    v_texts  text := concat(p_names, p_dedup_keys, p_instances, p_tags, p_sessions, p_keys);
    v_keyed  boolean := array_remove(p_dedup_keys, NULL) <> '{}';
    v_kept   boolean := array_remove(p_dedup_fors, NULL) <> '{}';
    v_taken  bigint[] := '{}'; -- of v_ids, those whose key another item has
    v_waiting boolean := v_keyed AND 'waiting' = ANY (p_dedup_scopes);
    v_holder  record;
    v_held    bigint[] := '{}'; -- items that wait, and do so until the transaction ends
    v_open    bigint[];         -- of v_ids, those that are to be tried again, and the others
    v_settled bigint[] := '{}';
BEGIN
    -- Cheap tests, which nothing bad passes and all that is usual does; a batch does not. What is bad, if anything is, the
    -- functions tell.
    IF octet_length(v_texts) > 255 OR strpos(v_texts, '""') > 0 OR array_position(p_names, NULL) IS NOT NULL
       OR octet_length(p_namespaces::text) > 42 OR p_namespaces::text !~ '^\{(NULL|[a-z][a-z0-9_-]*)}$' OR 0 > ANY (p_priorities) OR 9 < ANY (p_priorities)
       OR interval '0' > ANY (p_delays) OR 'infinity' = ANY (p_visible_ats) OR '-infinity' = ANY (p_visible_ats)
       OR array_remove(p_delays, NULL) <> '{}' AND array_remove(p_visible_ats, NULL) <> '{}' THEN
        PERFORM check_texts('a name', p_names, p_required => true);
        PERFORM check_texts('a dedup key', p_dedup_keys), check_texts('an instance id', p_instances);
        PERFORM check_texts('a tag', p_tags, 0), check_texts('a session', p_sessions), check_texts('a key', p_keys);
        PERFORM check_options(p_namespaces, p_priorities, p_delays, p_visible_ats);
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    IF array_remove(p_keys, NULL) <> '{}' AND EXISTS (SELECT FROM unnest(p_keys, p_sessions) AS i (key, session) WHERE i.key IS NOT NULL AND i.session IS NOT NULL) THEN
        RAISE EXCEPTION 'an item has a key or a session, not both' USING ERRCODE = 'PW003';
    END IF;
    IF v_kept OR array_remove(p_dedup_scopes, NULL) <> '{}' THEN
        PERFORM check_dedup(p_dedup_keys, p_dedup_fors, p_dedup_scopes);
    END IF;
    IF array_remove(array_remove(p_namespaces, NULL), 'default') <> '{}' THEN
        PERFORM register_namespaces(p_namespaces);
    END IF;
    IF v_keyed THEN
        IF v_kept THEN
            PERFORM keep_dedup_keys(v_ids, p_namespaces, p_dedup_keys, p_dedup_fors, v_now);
        END IF;
        v_taken := ARRAY(
            SELECT i.id FROM unnest(v_ids, p_namespaces, p_dedup_keys) AS i (id, namespace, dedup_key)
             CROSS JOIN LATERAL (
                   SELECT d.kept_until, d.item_id FROM dedup_keys d
                    WHERE d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key = i.dedup_key LIMIT 1) k
             WHERE k.kept_until > v_now AND k.item_id <> i.id);
    END IF;
    v_before := quiet(p_quiet);
    LOOP
        IF v_waiting THEN
            -- In order, so that nobody who locks several items can deadlock.
            FOR v_holder IN
                SELECT holder.id, holder.dedup_key, bool_or(i.id <> ALL (v_taken)) AS in_the_way
                  FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
                 CROSS JOIN LATERAL (
                       SELECT w.id, w.dedup_key FROM worker_queue w
                        WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                        ORDER BY w.dedup_key LIMIT 1) holder
                 WHERE i.scope = 'waiting' AND i.id <> ALL (v_settled)
                 GROUP BY holder.id, holder.dedup_key ORDER BY holder.id
            LOOP
                -- Whoever waits is not claimed until this transaction has ended: he is to see what it has done.
                PERFORM FROM worker_queue q
                  WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND NOT (q.lock_token IS NOT NULL AND q.visible_at > v_now)
                    FOR KEY SHARE;
                IF FOUND THEN
                    v_held := v_held || v_holder.id;
                ELSIF v_holder.in_the_way THEN -- no longer, if he is at work
                    UPDATE worker_queue q SET dedup_key = NULL
                     WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND q.lock_token IS NOT NULL AND q.visible_at > v_now;
                END IF;
            END LOOP;
        END IF;
        INSERT INTO worker_queue (id, name, input, namespace, priority, visible_at, dedup_key,
                                  instance_id, execution_id, activity_id, tag, session_id, headers, key, created_at)
        SELECT i.id, i.name, i.input::json, coalesce(i.namespace, 'default'), coalesce(i.priority, 0),
               coalesce(i.visible_at, v_now + i.delay, v_now), i.dedup_key, i.instance_id, i.execution_id, i.activity_id,
               coalesce(i.tag, ''), i.session_id, i.headers::jsonb, i.key, v_now
          FROM unnest(v_ids, p_names, p_inputs, p_namespaces, p_priorities, p_delays, p_visible_ats, p_dedup_keys,
                      p_instances, p_executions, p_activities, p_tags, p_sessions, p_headers, p_keys) WITH ORDINALITY
               AS i (id, name, input, namespace, priority, delay, visible_at, dedup_key,
                     instance_id, execution_id, activity_id, tag, session_id, headers, key, ord)
         WHERE i.id <> ALL (v_taken) AND i.id <> ALL (v_settled)
         ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
        ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
        EXIT WHEN NOT v_waiting;
        -- The insert may have met an item that nobody saw before, or that was given back or finished since: again, until each
        -- was added, or has whoever stands in its way locked.
        v_open := ARRAY(
            SELECT i.id FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
              LEFT JOIN LATERAL (
                   SELECT w.id FROM worker_queue w
                    WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                    ORDER BY w.dedup_key LIMIT 1) holder ON true
             WHERE i.scope = 'waiting' AND i.id <> ALL (v_taken) AND coalesce(holder.id <> ALL (v_ids || v_held), true));
        EXIT WHEN v_open = '{}';
        v_settled := ARRAY(SELECT i.id FROM unnest(v_ids) AS i (id) WHERE i.id <> ALL (v_open));
    END LOOP;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF v_kept OR 'dead' = ANY (p_dedup_scopes) THEN
        -- The insert may have waited for whoever had the key. By now he keeps it, or his item is a dead letter, or neither.
        DELETE FROM worker_queue q
         USING unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
         WHERE q.id = ANY (ARRAY[i.id]) -- as in ack_work_many
           AND (EXISTS (SELECT FROM dedup_keys k
                         WHERE k.namespace = coalesce(i.namespace, 'default') AND k.dedup_key = i.dedup_key AND (k.kept_until > v_now) IS TRUE AND k.item_id <> i.id)
                OR i.scope = 'dead' AND EXISTS (
                       SELECT FROM dead_letters d
                        WHERE d.queue = 'worker' AND d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                        ORDER BY d.dedup_key OFFSET 0));
    END IF;
    IF v_kept THEN -- what was not added keeps no key
        DELETE FROM dedup_keys k USING unnest(v_ids, p_namespaces, p_dedup_keys) AS i (id, namespace, dedup_key)
         WHERE k.namespace = ANY (ARRAY[coalesce(i.namespace, 'default')]) AND k.dedup_key = i.dedup_key AND k.item_id = i.id
           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = i.id OFFSET 0);
    END IF;

    -- In a second statement, whose snapshot shows the row that a conflict was waited for. The limits keep the planner from
    -- a join by walking over the whole table, which is as good to it if it believes the table to be empty.
    RETURN QUERY
    SELECT CASE WHEN coalesce(added.id, queued.id) IS NOT NULL THEN coalesce(added.id, queued.id)
                WHEN i.id = ANY (v_taken) OR i.scope = 'dead' THEN dedup_holder(i.namespace, i.dedup_key, i.scope, v_now) END,
           added.id IS NULL, coalesce(added.visible_at, queued.visible_at), v_now
      FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) WITH ORDINALITY AS i (id, namespace, dedup_key, scope, ord)
      LEFT JOIN LATERAL (SELECT q.* FROM worker_queue q WHERE q.id = i.id LIMIT 1) added ON true
      LEFT JOIN LATERAL (
           SELECT q.* FROM worker_queue q
            WHERE added.id IS NULL AND q.namespace = coalesce(i.namespace, 'default') AND q.dedup_key BETWEEN i.dedup_key AND i.dedup_key
            ORDER BY q.dedup_key LIMIT 1) queued ON true
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
