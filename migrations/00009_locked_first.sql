-- A work item that stands in the way of a DedupWaiting one is locked whenever it came, the end of a lease is computed once the item is locked, and what a
-- node brings back in its periodic statement is in the answer.

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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION renew_work(p_ids bigint[], p_tokens uuid[], p_lock_timeout interval)
RETURNS TABLE (item_id bigint, lock_token uuid, locked_until timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz;
    v_ids    bigint[];
    v_tokens uuid[];
    v_sooner boolean;
    v_sessions text[];
    v_free_ids    bigint[] := p_ids;
    v_free_tokens uuid[] := p_tokens;
BEGIN
    IF cardinality(p_ids) > 1 THEN -- waiting for one of them would cost the others their leases
        SELECT array_agg(free.id), array_agg(free.token) INTO v_free_ids, v_free_tokens
          FROM (SELECT asked.id, asked.token FROM unnest(p_ids, p_tokens) AS asked (id, token)
                  JOIN worker_queue q ON q.id = ANY (ARRAY[asked.id]) -- as in ack_work_many
                 WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp()
                 ORDER BY asked.id FOR UPDATE OF q SKIP LOCKED) AS free;
    ELSE
        PERFORM FROM worker_queue q WHERE q.id = p_ids[1] AND q.lock_token = p_tokens[1] FOR NO KEY UPDATE;
    END IF;
    v_until := clock_timestamp() + p_lock_timeout; -- not before whoever had the item locked is done
    WITH renewed AS (
        UPDATE worker_queue q
           SET visible_at = v_until
          FROM (SELECT t.id, t.token FROM unnest(v_free_ids, v_free_tokens) AS t (id, token)
                 ORDER BY t.id) AS held, -- in order, so that two batches cannot deadlock
               worker_queue before
         WHERE q.id = ANY (ARRAY[held.id]) -- as in ack_work_many
           AND q.lock_token = held.token AND q.visible_at > clock_timestamp() AND before.id = ANY (ARRAY[held.id])
        RETURNING q.id, q.lock_token, q.session_id, before.visible_at > v_until AS sooner
    )
    SELECT array_agg(r.id), array_agg(r.lock_token), bool_or(r.sooner), array_agg(r.session_id) FILTER (WHERE r.session_id IS NOT NULL)
      INTO v_ids, v_tokens, v_sooner, v_sessions FROM renewed r;
    IF v_sessions IS NOT NULL THEN
        PERFORM touch_sessions(v_sessions);
    END IF;
    IF v_sooner THEN -- earlier than anybody knows
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    RETURN QUERY SELECT held.id, held.token, v_until FROM unnest(v_ids, v_tokens) AS held (id, token);
    IF cardinality(v_free_ids) IS DISTINCT FROM cardinality(p_ids) THEN
        RETURN QUERY
        SELECT asked.id, asked.token, NULL::timestamptz
          FROM (SELECT a.id, a.token FROM unnest(p_ids, p_tokens) AS a (id, token)
                EXCEPT SELECT free.id, free.token FROM unnest(v_free_ids, v_free_tokens) AS free (id, token)) AS asked
          JOIN worker_queue q ON q.id = ANY (ARRAY[asked.id])
         WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp();
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION look(p_queues text[], p_filters text[], p_node integer, p_lanes integer[], p_newest integer,
    p_beats text[] DEFAULT '{}', p_abouts text[] DEFAULT '{}')
RETURNS TABLE (lane integer, earliest_at timestamptz, now_at timestamptz, alone boolean, dead text[], known bigint, news boolean[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    -- First, for the node does not hear what its own statements say.
    IF has_table_privilege('worker_queue', 'UPDATE') AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds) THEN
        PERFORM bring_back_left();
    END IF;
    RETURN QUERY SELECT e.lane, e.earliest_at, e.now_at, NULL::boolean, NULL::text[], NULL::bigint, NULL::boolean[] FROM earliest_of_lanes(p_queues, p_filters) AS e;
    IF has_table_privilege('waiters', 'DELETE') THEN
        -- A lane that is newer than the list may have its row already, and count on it.
        DELETE FROM waiters w WHERE w.node = p_node AND w.lane BETWEEN 1 AND p_newest AND w.lane <> ALL (p_lanes);
    END IF;
    RETURN QUERY SELECT 0, NULL::timestamptz, clock_timestamp(), NOT EXISTS (SELECT FROM waiters w WHERE w.node NOT IN (p_node, 0)), dead_queues(p_node),
           (SELECT count(*) FROM namespaces),
           ARRAY(SELECT call_beat(b.beat, p_node, b.about) FROM unnest(p_beats, p_abouts) WITH ORDINALITY AS b (beat, about, ord) ORDER BY b.ord);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION look(p_queues text[], p_filters text[], p_node integer, p_lanes integer[], p_newest integer,
    p_beats text[] DEFAULT '{}', p_abouts text[] DEFAULT '{}')
RETURNS TABLE (lane integer, earliest_at timestamptz, now_at timestamptz, alone boolean, dead text[], known bigint, news boolean[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT e.lane, e.earliest_at, e.now_at, NULL::boolean, NULL::text[], NULL::bigint, NULL::boolean[] FROM earliest_of_lanes(p_queues, p_filters) AS e;
    IF has_table_privilege('waiters', 'DELETE') THEN
        -- A lane that is newer than the list may have its row already, and count on it.
        DELETE FROM waiters w WHERE w.node = p_node AND w.lane BETWEEN 1 AND p_newest AND w.lane <> ALL (p_lanes);
    END IF;
    IF has_table_privilege('worker_queue', 'UPDATE') AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds) THEN
        PERFORM bring_back_left();
    END IF;
    RETURN QUERY SELECT 0, NULL::timestamptz, clock_timestamp(), NOT EXISTS (SELECT FROM waiters w WHERE w.node NOT IN (p_node, 0)), dead_queues(p_node),
           (SELECT count(*) FROM namespaces),
           ARRAY(SELECT call_beat(b.beat, p_node, b.about) FROM unnest(p_beats, p_abouts) WITH ORDINALITY AS b (beat, about, ord) ORDER BY b.ord);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION renew_work(p_ids bigint[], p_tokens uuid[], p_lock_timeout interval)
RETURNS TABLE (item_id bigint, lock_token uuid, locked_until timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz := clock_timestamp() + p_lock_timeout;
    v_ids    bigint[];
    v_tokens uuid[];
    v_sooner boolean;
    v_sessions text[];
    v_free_ids    bigint[] := p_ids;
    v_free_tokens uuid[] := p_tokens;
BEGIN
    IF cardinality(p_ids) > 1 THEN -- waiting for one of them would cost the others their leases
        SELECT array_agg(free.id), array_agg(free.token) INTO v_free_ids, v_free_tokens
          FROM (SELECT asked.id, asked.token FROM unnest(p_ids, p_tokens) AS asked (id, token)
                  JOIN worker_queue q ON q.id = ANY (ARRAY[asked.id]) -- as in ack_work_many
                 WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp()
                 ORDER BY asked.id FOR UPDATE OF q SKIP LOCKED) AS free;
    END IF;
    WITH renewed AS (
        UPDATE worker_queue q
           SET visible_at = v_until
          FROM (SELECT t.id, t.token FROM unnest(v_free_ids, v_free_tokens) AS t (id, token)
                 ORDER BY t.id) AS held, -- in order, so that two batches cannot deadlock
               worker_queue before
         WHERE q.id = ANY (ARRAY[held.id]) -- as in ack_work_many
           AND q.lock_token = held.token AND q.visible_at > clock_timestamp() AND before.id = ANY (ARRAY[held.id])
        RETURNING q.id, q.lock_token, q.session_id, before.visible_at > v_until AS sooner
    )
    SELECT array_agg(r.id), array_agg(r.lock_token), bool_or(r.sooner), array_agg(r.session_id) FILTER (WHERE r.session_id IS NOT NULL)
      INTO v_ids, v_tokens, v_sooner, v_sessions FROM renewed r;
    IF v_sessions IS NOT NULL THEN
        PERFORM touch_sessions(v_sessions);
    END IF;
    IF v_sooner THEN -- earlier than anybody knows
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    RETURN QUERY SELECT held.id, held.token, v_until FROM unnest(v_ids, v_tokens) AS held (id, token);
    IF cardinality(v_free_ids) IS DISTINCT FROM cardinality(p_ids) THEN
        RETURN QUERY
        SELECT asked.id, asked.token, NULL::timestamptz
          FROM (SELECT a.id, a.token FROM unnest(p_ids, p_tokens) AS a (id, token)
                EXCEPT SELECT free.id, free.token FROM unnest(v_free_ids, v_free_tokens) AS free (id, token)) AS asked
          JOIN worker_queue q ON q.id = ANY (ARRAY[asked.id])
         WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp();
    END IF;
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
        IF 'waiting' = ANY (p_dedup_scopes) THEN
            -- Whoever waits is not claimed until this transaction has ended: he is to see what it has done.
            PERFORM FROM unnest(p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (namespace, dedup_key, scope)
              CROSS JOIN LATERAL (
                    SELECT w.id FROM worker_queue w
                     WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                       AND NOT (w.lock_token IS NOT NULL AND w.visible_at > v_now)
                     ORDER BY w.dedup_key LIMIT 1 FOR KEY SHARE) holder
              WHERE i.scope = 'waiting';
            -- Whoever is at work stands in the way no longer.
            UPDATE worker_queue q SET dedup_key = NULL
              FROM (SELECT holder.id, holder.dedup_key
                      FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
                     CROSS JOIN LATERAL (
                           SELECT w.id, w.namespace, w.dedup_key FROM worker_queue w
                            WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                            ORDER BY w.dedup_key LIMIT 1) holder
                     WHERE i.scope = 'waiting' AND i.id <> ALL (v_taken) ORDER BY holder.namespace, holder.dedup_key) AS free
             WHERE q.id = ANY (ARRAY[free.id]) AND q.dedup_key IS NOT DISTINCT FROM free.dedup_key AND q.lock_token IS NOT NULL AND q.visible_at > v_now;
        END IF;
    END IF;
    v_before := quiet(p_quiet);
    INSERT INTO worker_queue (id, name, input, namespace, priority, visible_at, dedup_key,
                              instance_id, execution_id, activity_id, tag, session_id, headers, key, created_at)
    SELECT i.id, i.name, i.input::json, coalesce(i.namespace, 'default'), coalesce(i.priority, 0),
           coalesce(i.visible_at, v_now + i.delay, v_now), i.dedup_key, i.instance_id, i.execution_id, i.activity_id,
           coalesce(i.tag, ''), i.session_id, i.headers::jsonb, i.key, v_now
      FROM unnest(v_ids, p_names, p_inputs, p_namespaces, p_priorities, p_delays, p_visible_ats, p_dedup_keys,
                  p_instances, p_executions, p_activities, p_tags, p_sessions, p_headers, p_keys) WITH ORDINALITY
           AS i (id, name, input, namespace, priority, delay, visible_at, dedup_key,
                 instance_id, execution_id, activity_id, tag, session_id, headers, key, ord)
     WHERE i.id <> ALL (v_taken)
     ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
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
