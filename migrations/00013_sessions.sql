-- Who renews leases and sessions waits for nobody's sessions. Whoever gives back a claim, or sets limits, locks items in the order of their ids. An enqueue
-- that has waited for another one of the same key goes by what that keeps.

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
    IF v_kept THEN
        PERFORM keep_dedup_keys(v_ids, p_namespaces, p_dedup_keys, p_dedup_fors, v_now);
    END IF;
    v_before := quiet(p_quiet);
    LOOP
        IF v_keyed THEN -- each time: whoever was waited for may have kept the key
            v_taken := ARRAY(
                SELECT i.id FROM unnest(v_ids, p_namespaces, p_dedup_keys) AS i (id, namespace, dedup_key)
                 CROSS JOIN LATERAL (
                       SELECT d.kept_until, d.item_id FROM dedup_keys d
                        WHERE d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key = i.dedup_key LIMIT 1) k
                 WHERE k.kept_until > v_now AND k.item_id <> i.id);
        END IF;
        IF v_waiting THEN
            -- In order, so that nobody who locks several items can deadlock.
            FOR v_holder IN
                -- Whoever is seen here is seen with what he keeps, which may not have been there a statement ago.
                SELECT holder.id, holder.dedup_key, bool_or(i.id <> ALL (v_taken) AND (k.kept_until > v_now AND k.item_id <> i.id) IS NOT TRUE) AS in_the_way
                  FROM unnest(v_ids, p_namespaces, p_dedup_keys, p_dedup_scopes) AS i (id, namespace, dedup_key, scope)
                 CROSS JOIN LATERAL (
                       SELECT w.id, w.dedup_key FROM worker_queue w
                        WHERE w.namespace = coalesce(i.namespace, 'default') AND w.dedup_key BETWEEN i.dedup_key AND i.dedup_key
                        ORDER BY w.dedup_key LIMIT 1) holder
                  LEFT JOIN LATERAL (
                       SELECT d.kept_until, d.item_id FROM dedup_keys d
                        WHERE d.namespace = coalesce(i.namespace, 'default') AND d.dedup_key = i.dedup_key LIMIT 1) k ON true
                 WHERE i.scope = 'waiting' AND i.id <> ALL (v_settled)
                 GROUP BY holder.id, holder.dedup_key ORDER BY holder.id
            LOOP
                -- Whoever waits is not claimed until this transaction has ended: he is to see what it has done.
                PERFORM FROM worker_queue q
                  WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND NOT (q.lock_token IS NOT NULL AND q.visible_at > clock_timestamp())
                    FOR KEY SHARE;
                IF FOUND THEN
                    v_held := v_held || v_holder.id;
                ELSIF v_holder.in_the_way THEN -- no longer, if he is at work
                    UPDATE worker_queue q SET dedup_key = NULL
                     WHERE q.id = v_holder.id AND q.dedup_key IS NOT DISTINCT FROM v_holder.dedup_key AND q.lock_token IS NOT NULL AND q.visible_at > clock_timestamp();
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
    IF v_keyed THEN
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
                WHEN i.dedup_key IS NOT NULL THEN dedup_holder(i.namespace, i.dedup_key, i.scope, v_now) END,
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
        -- As touch_sessions, but no session is waited for, which would cost all of these their leases: whoever has it locked fetches from it or
        -- acknowledges an item of it, which is activity as well, or the next renewal notes it.
        UPDATE sessions s SET last_activity_at = clock_timestamp()
          FROM (SELECT free.session_id FROM sessions free WHERE free.session_id = ANY (v_sessions) ORDER BY free.session_id FOR UPDATE SKIP LOCKED) AS touched
         WHERE s.session_id = ANY (ARRAY[touched.session_id]); -- as in ack_work_many
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
COMMENT ON FUNCTION renew_work IS 'Makes the leases that still hold end p_lock_timeout from now, and returns them. The others are left as they are. One item is waited for if another transaction has locked it; of several, such an item is not, and is returned without an end: its lease holds as it is, for now. Sessions are not waited for: activity is noted in those that nobody has locked.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION renew_sessions(p_owners text[], p_extend interval, p_idle interval)
RETURNS TABLE (renewed bigint, locked_until timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_owned   text[] := ARRAY(SELECT s.session_id FROM sessions s WHERE s.owner = ANY (p_owners) AND s.locked_until > clock_timestamp());
    v_held    text[];
    v_until   timestamptz;
    v_renewed bigint;
    v_sooner  boolean;
BEGIN
    DECLARE
        v_before text := current_setting('lock_timeout');
    BEGIN
        -- Whoever claims from a session, or acknowledges an item of it, has it for moments. To wait for longer would cost the others their ends.
        PERFORM set_config('lock_timeout', '20ms', true);
        v_held := ARRAY(
            SELECT r.session_id FROM sessions r
             WHERE r.session_id = ANY (v_owned) AND r.owner = ANY (p_owners) AND r.locked_until > clock_timestamp() AND r.last_activity_at > clock_timestamp() - p_idle
             ORDER BY r.session_id FOR UPDATE);
        PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available THEN
        v_held := ARRAY(
            SELECT r.session_id FROM sessions r
             WHERE r.session_id = ANY (v_owned) AND r.owner = ANY (p_owners) AND r.locked_until > clock_timestamp() AND r.last_activity_at > clock_timestamp() - p_idle
             ORDER BY r.session_id FOR UPDATE SKIP LOCKED);
    END;
    v_until := clock_timestamp() + p_extend; -- not before whoever had them locked is done
    WITH renewed AS (
        UPDATE sessions s SET locked_until = v_until
          FROM sessions before
         WHERE s.session_id = ANY (v_held) AND before.session_id = ANY (ARRAY[s.session_id])
        RETURNING before.locked_until > v_until AS sooner
    )
    SELECT count(*), bool_or(r.sooner) INTO v_renewed, v_sooner FROM renewed r;
    IF v_sooner THEN -- earlier than anybody knows
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    RETURN QUERY SELECT v_renewed, v_until;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION renew_sessions IS 'Makes the sessions of these owners end p_extend from now, but for those that have ended and those without activity for p_idle. Returns how many, and that instant. Those that another transaction has locked for longer than a moment are left as they are, for now, and not counted.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION undo_work_claim(p_token uuid, p_lock_timeout interval)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_ids      bigint[];
    v_undone   bigint;
    v_sessions text[];
    v_spaces   text[]; -- of places that become free
    v_tags     text[];
    v_keys     text[];
BEGIN
    v_ids := ARRAY(
        SELECT held.id FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT h.id FROM worker_queue h
                WHERE -h.priority = -level.priority AND h.tag = '' AND h.session_id IS NULL
                  AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held
        UNION ALL
        SELECT held.id FROM asked_lists(NULL, NULL) AS list
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT h.id FROM worker_queue h
                WHERE h.namespace = list.namespace AND h.tag = list.tag AND h.priority = level.priority AND h.session_id IS NULL
                  AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held
        UNION ALL
        SELECT held.id FROM session_lists('', v_now) AS list
         CROSS JOIN LATERAL (
               SELECT h.id FROM worker_queue h
                WHERE h.session_id = list.session_id
                  AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held);
    -- In order, so that nobody who locks several items can deadlock.
    v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) AND q.lock_token = p_token ORDER BY q.id FOR NO KEY UPDATE);
    v_now := clock_timestamp(); -- not before whoever had them locked is done
    WITH undone AS (
        UPDATE worker_queue q
           SET visible_at = v_now, lock_token = NULL, attempt_count = greatest(q.attempt_count - 1, 0),
               charged = q.key IS NOT NULL AND has_rate(q.namespace), share_at = NULL
         WHERE q.id = ANY (v_ids)
        RETURNING q.session_id, q.slot OR q.key_slot AS placed, q.namespace, q.tag, q.key
    )
    SELECT count(*), array_agg(DISTINCT u.session_id) FILTER (WHERE u.session_id IS NOT NULL),
           array_agg(u.namespace) FILTER (WHERE u.placed), array_agg(u.tag) FILTER (WHERE u.placed), array_agg(u.key) FILTER (WHERE u.placed)
      INTO v_undone, v_sessions, v_spaces, v_tags, v_keys FROM undone u;
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
    IF v_undone > 0 THEN
        UPDATE sessions s SET locked_until = v_now
          FROM (SELECT t.session_id FROM sessions t
                 WHERE t.session_id = ANY (v_sessions) AND t.taken_by = p_token AND t.locked_until > v_now
                 ORDER BY t.session_id FOR UPDATE) AS taken
         WHERE s.session_id = ANY (ARRAY[taken.session_id]); -- as in ack_work_many
        PERFORM notify_queue('worker', v_undone, NULL);
    END IF;
    RETURN v_undone;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_limits(
    p_namespace text, p_weight integer DEFAULT 1, p_max_running integer DEFAULT NULL, p_max_running_per_key integer DEFAULT NULL,
    p_rate_interval interval DEFAULT NULL, p_rate_burst integer DEFAULT 1)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before limits;
    v_now    timestamptz;
    v_ids    bigint[]; -- of items that are to be changed
    v_held   boolean;  -- those that are held
    v_paid   boolean;  -- and those that have paid, or wait for their share
BEGIN
    PERFORM check_options(ARRAY[p_namespace], NULL, NULL, NULL);
    IF p_namespace IS NULL OR coalesce(p_weight NOT BETWEEN 1 AND 1000, true) OR 1 > p_max_running OR 1 > p_max_running_per_key
       OR interval '0' >= p_rate_interval OR coalesce(p_rate_burst < 1, true)
       OR extract(epoch FROM p_rate_interval) * p_rate_burst > extract(epoch FROM interval '36500 days') THEN
        RAISE EXCEPTION 'a weight must be 1 to 1000, every other limit positive, and a burst of a rate take at most 100 years' USING ERRCODE = 'PW003';
    END IF;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    PERFORM take_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace), 'the limits of ' || p_namespace);
    SELECT * INTO v_before FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    INSERT INTO limits AS l (queue, namespace, weight, max_running, max_running_per_key, rate_interval, rate_burst, over)
    VALUES ('worker', p_namespace, p_weight, p_max_running, p_max_running_per_key, p_rate_interval, p_rate_burst, p_max_running IS NOT NULL)
    ON CONFLICT (queue, namespace) DO UPDATE
       SET weight = p_weight, max_running = p_max_running, max_running_per_key = p_max_running_per_key,
           rate_interval = p_rate_interval, rate_burst = p_rate_burst, over = excluded.over;
    DELETE FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND NOT l.holds AND l.weight = 1;

    -- What is at work by now counts. What has a place already keeps it, and tells somebody in vain at most.
    IF p_max_running IS NOT NULL AND v_before.max_running IS NULL
       OR p_max_running_per_key IS NOT NULL AND v_before.max_running_per_key IS NULL THEN
        INSERT INTO marking (namespace) VALUES (p_namespace) ON CONFLICT (namespace) DO UPDATE SET transactions = NULL;
    ELSIF coalesce(p_max_running, p_max_running_per_key) IS NULL THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    END IF;
    v_held := p_max_running_per_key IS DISTINCT FROM v_before.max_running_per_key;
    v_paid := p_rate_interval IS DISTINCT FROM v_before.rate_interval OR p_rate_burst IS DISTINCT FROM v_before.rate_burst;
    IF v_held OR v_paid THEN
        v_ids := ARRAY(
            SELECT q.id FROM worker_queue q WHERE v_held AND q.namespace = p_namespace AND q.held_due IS NOT NULL
             UNION
            SELECT q.id FROM worker_queue q WHERE v_paid AND q.namespace = p_namespace AND q.session_id IS NULL AND q.charged);
        -- In order, so that nobody who locks several items can deadlock.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR NO KEY UPDATE);
    END IF;
    v_now := clock_timestamp();
    IF v_held THEN
        -- The next claims hold again what is too much.
        UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL WHERE q.id = ANY (v_ids) AND q.held_due IS NOT NULL;
        DELETE FROM releases r WHERE r.namespace = p_namespace;
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    END IF;
    IF v_paid THEN
        -- They pay anew.
        UPDATE worker_queue q SET visible_at = CASE WHEN q.held_due IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.id = ANY (v_ids) AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_limits(
    p_namespace text, p_weight integer DEFAULT 1, p_max_running integer DEFAULT NULL, p_max_running_per_key integer DEFAULT NULL,
    p_rate_interval interval DEFAULT NULL, p_rate_burst integer DEFAULT 1)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before limits;
    v_now    timestamptz;
BEGIN
    PERFORM check_options(ARRAY[p_namespace], NULL, NULL, NULL);
    IF p_namespace IS NULL OR coalesce(p_weight NOT BETWEEN 1 AND 1000, true) OR 1 > p_max_running OR 1 > p_max_running_per_key
       OR interval '0' >= p_rate_interval OR coalesce(p_rate_burst < 1, true)
       OR extract(epoch FROM p_rate_interval) * p_rate_burst > extract(epoch FROM interval '36500 days') THEN
        RAISE EXCEPTION 'a weight must be 1 to 1000, every other limit positive, and a burst of a rate take at most 100 years' USING ERRCODE = 'PW003';
    END IF;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    PERFORM take_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace), 'the limits of ' || p_namespace);
    SELECT * INTO v_before FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    INSERT INTO limits AS l (queue, namespace, weight, max_running, max_running_per_key, rate_interval, rate_burst, over)
    VALUES ('worker', p_namespace, p_weight, p_max_running, p_max_running_per_key, p_rate_interval, p_rate_burst, p_max_running IS NOT NULL)
    ON CONFLICT (queue, namespace) DO UPDATE
       SET weight = p_weight, max_running = p_max_running, max_running_per_key = p_max_running_per_key,
           rate_interval = p_rate_interval, rate_burst = p_rate_burst, over = excluded.over;
    DELETE FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND NOT l.holds AND l.weight = 1;

    v_now := clock_timestamp();
    -- What is at work by now counts. What has a place already keeps it, and tells somebody in vain at most.
    IF p_max_running IS NOT NULL AND v_before.max_running IS NULL
       OR p_max_running_per_key IS NOT NULL AND v_before.max_running_per_key IS NULL THEN
        INSERT INTO marking (namespace) VALUES (p_namespace) ON CONFLICT (namespace) DO UPDATE SET transactions = NULL;
    ELSIF coalesce(p_max_running, p_max_running_per_key) IS NULL THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    END IF;
    IF p_max_running_per_key IS DISTINCT FROM v_before.max_running_per_key THEN
        -- The next claims hold again what is too much.
        UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL WHERE q.namespace = p_namespace AND q.held_due IS NOT NULL;
        DELETE FROM releases r WHERE r.namespace = p_namespace;
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    END IF;
    IF p_rate_interval IS DISTINCT FROM v_before.rate_interval OR p_rate_burst IS DISTINCT FROM v_before.rate_burst THEN
        -- They pay anew.
        UPDATE worker_queue q SET visible_at = CASE WHEN q.held_due IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.namespace = p_namespace AND q.session_id IS NULL AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION undo_work_claim(p_token uuid, p_lock_timeout interval)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_undone   bigint;
    v_sessions text[];
    v_spaces   text[]; -- of places that become free
    v_tags     text[];
    v_keys     text[];
BEGIN
    WITH undone AS (
        UPDATE worker_queue q
           SET visible_at = v_now, lock_token = NULL, attempt_count = greatest(q.attempt_count - 1, 0),
               charged = q.key IS NOT NULL AND has_rate(q.namespace), share_at = NULL
          FROM (SELECT held.id FROM generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT h.id FROM worker_queue h
                        WHERE -h.priority = -level.priority AND h.tag = '' AND h.session_id IS NULL
                          AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held
                UNION ALL
                SELECT held.id FROM asked_lists(NULL, NULL) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT h.id FROM worker_queue h
                        WHERE h.namespace = list.namespace AND h.tag = list.tag AND h.priority = level.priority AND h.session_id IS NULL
                          AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held
                UNION ALL
                SELECT held.id FROM session_lists('', v_now) AS list
                 CROSS JOIN LATERAL (
                       SELECT h.id FROM worker_queue h
                        WHERE h.session_id = list.session_id
                          AND h.visible_at > v_now AND h.visible_at <= v_now + p_lock_timeout AND h.lock_token = p_token) held) AS leased
         WHERE q.id = ANY (ARRAY[leased.id]) AND q.lock_token = p_token
        RETURNING q.session_id, q.slot OR q.key_slot AS placed, q.namespace, q.tag, q.key
    )
    SELECT count(*), array_agg(DISTINCT u.session_id) FILTER (WHERE u.session_id IS NOT NULL),
           array_agg(u.namespace) FILTER (WHERE u.placed), array_agg(u.tag) FILTER (WHERE u.placed), array_agg(u.key) FILTER (WHERE u.placed)
      INTO v_undone, v_sessions, v_spaces, v_tags, v_keys FROM undone u;
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
    IF v_undone > 0 THEN
        UPDATE sessions s SET locked_until = v_now
         WHERE s.session_id = ANY (v_sessions) AND s.taken_by = p_token AND s.locked_until > v_now;
        PERFORM notify_queue('worker', v_undone, NULL);
    END IF;
    RETURN v_undone;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION renew_sessions(p_owners text[], p_extend interval, p_idle interval)
RETURNS TABLE (renewed bigint, locked_until timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_until   timestamptz := v_now + p_extend;
    v_owned   text[] := ARRAY(SELECT s.session_id FROM sessions s WHERE s.owner = ANY (p_owners) AND s.locked_until > v_now);
    v_renewed bigint;
    v_sooner  boolean;
BEGIN
    WITH renewed AS (
        UPDATE sessions s SET locked_until = v_until
          FROM (SELECT r.session_id, r.locked_until FROM sessions r
                 WHERE r.session_id = ANY (v_owned) AND r.owner = ANY (p_owners) AND r.locked_until > v_now AND r.last_activity_at > v_now - p_idle
                 ORDER BY r.session_id FOR UPDATE) AS active
         WHERE s.session_id = ANY (ARRAY[active.session_id])
        RETURNING active.locked_until > v_until AS sooner
    )
    SELECT count(*), bool_or(r.sooner) INTO v_renewed, v_sooner FROM renewed r;
    IF v_sooner THEN -- earlier than anybody knows
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    RETURN QUERY SELECT v_renewed, v_until;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION renew_sessions IS 'Makes the sessions of these owners end p_extend from now, but for those that have ended and those without activity for p_idle. Returns how many, and that instant.';

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
COMMENT ON FUNCTION renew_work IS 'Makes the leases that still hold end p_lock_timeout from now, and returns them. The others are left as they are. One item is waited for if another transaction has locked it; of several, such an item is not, and is returned without an end: its lease holds as it is, for now.';

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
