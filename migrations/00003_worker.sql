-- The verbs of the worker queue.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION check_texts(p_what text, p_texts text[], p_least integer DEFAULT 1, p_required boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(p_texts) AS t (text) WHERE coalesce(octet_length(t.text) NOT BETWEEN p_least AND 255, p_required)) THEN
        RAISE EXCEPTION '% must have % to 255 bytes', p_what, p_least USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_texts IS 'Internal: PW003 unless each of these texts has p_least to 255 bytes; null has none, and is fine unless p_required.';

-- +goose StatementBegin
CREATE FUNCTION check_options(p_namespaces text[], p_priorities smallint[], p_delays interval[], p_visible_ats timestamptz[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text;
BEGIN
    SELECT n.name INTO v_namespace FROM unnest(p_namespaces) AS n (name) WHERE n.name !~ '^[a-z][a-z0-9_-]{0,39}$' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a namespace must have 1 to 40 lower-case letters, digits, _ and -, a letter first: not %', quote_literal(v_namespace) USING ERRCODE = 'PW003';
    ELSIF 0 > ANY (p_priorities) OR 9 < ANY (p_priorities) THEN
        RAISE EXCEPTION 'a priority must be 0 to 9' USING ERRCODE = 'PW003';
    ELSIF interval '0' > ANY (p_delays) THEN
        RAISE EXCEPTION 'a delay is negative' USING ERRCODE = 'PW003';
    ELSIF EXISTS (SELECT FROM unnest(p_visible_ats) AS i (at) WHERE NOT isfinite(i.at)) THEN
        RAISE EXCEPTION 'a due time must be finite' USING ERRCODE = 'PW003';
    ELSIF EXISTS (SELECT FROM unnest(p_delays, p_visible_ats) AS i (delay, at) WHERE i.delay IS NOT NULL AND i.at IS NOT NULL) THEN
        RAISE EXCEPTION 'both a delay and a due time are given' USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_options IS 'Internal: PW003 unless these options of an enqueue are good.';

-- +goose StatementBegin
CREATE FUNCTION check_headers(p_headers text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(p_headers) AS h (object) WHERE jsonb_typeof(h.object::jsonb) <> 'object') THEN
        RAISE EXCEPTION 'headers must be a JSON object' USING ERRCODE = 'PW003';
    ELSIF EXISTS (SELECT FROM unnest(p_headers) AS h (object)
                   WHERE EXISTS (SELECT FROM jsonb_each(h.object::jsonb) AS e
                                  WHERE jsonb_typeof(e.value) <> 'string' OR octet_length(e.key) NOT BETWEEN 1 AND 255)
                      OR (SELECT sum(octet_length(e.key) + octet_length(e.value)) FROM jsonb_each_text(h.object::jsonb) AS e) > 8192) THEN
        RAISE EXCEPTION 'headers must be strings under names of 1 to 255 bytes, of 8192 bytes together' USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_headers IS 'Internal: PW003 unless each of these, or null, is a JSON object of strings that may be headers.';

-- +goose StatementBegin
CREATE FUNCTION check_dedup(p_dedup_keys text[], p_dedup_fors interval[], p_dedup_scopes text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(p_dedup_keys, p_dedup_fors, p_dedup_scopes) AS i (dedup_key, dedup_for, scope)
                WHERE i.dedup_key IS NULL AND (i.dedup_for IS NOT NULL OR i.scope IS NOT NULL)) THEN
        RAISE EXCEPTION 'for how long, or until when, a dedup key counts is said without one' USING ERRCODE = 'PW003';
    ELSIF interval '0' >= ANY (p_dedup_fors) OR interval '36500 days' < ANY (p_dedup_fors) THEN
        RAISE EXCEPTION 'a dedup key is kept for more than no time, and at most 100 years' USING ERRCODE = 'PW003';
    ELSIF array_remove(p_dedup_scopes, NULL) <> '{}' AND NOT array_remove(p_dedup_scopes, NULL) <@ ARRAY['waiting', 'queued', 'dead'] THEN
        RAISE EXCEPTION 'the scope of a dedup key must be waiting, queued or dead' USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_dedup IS 'Internal: PW003 unless these options of an enqueue are good.';

-- +goose StatementBegin
CREATE FUNCTION keep_dedup_keys(p_ids bigint[], p_namespaces text[], p_dedup_keys text[], p_dedup_fors interval[], p_now timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO dedup_keys AS k (namespace, dedup_key, item_id, kept_until)
    SELECT DISTINCT ON (1, 2) coalesce(i.namespace, 'default'), i.dedup_key, i.id, p_now + i.dedup_for
      FROM unnest(p_ids, p_namespaces, p_dedup_keys, p_dedup_fors) WITH ORDINALITY AS i (id, namespace, dedup_key, dedup_for, ord)
     WHERE i.dedup_for IS NOT NULL
     ORDER BY 1, 2, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) DO UPDATE SET item_id = excluded.item_id, kept_until = excluded.kept_until
     WHERE k.kept_until <= p_now;
    -- Whoever adds keys removes twice as many whose time is over, as archive_work does.
    DELETE FROM dedup_keys k
     USING (SELECT old.namespace, old.dedup_key FROM dedup_keys old
             WHERE old.kept_until <= p_now
             ORDER BY old.kept_until
             LIMIT 2 * cardinality(p_ids) + 10 FOR UPDATE SKIP LOCKED) AS over
     WHERE k.namespace = ANY (ARRAY[over.namespace]) AND k.dedup_key = over.dedup_key;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION keep_dedup_keys IS 'Internal: takes the keys of these items for as long as p_dedup_fors says (null: not at all), unless another item has the key.';

-- +goose StatementBegin
CREATE FUNCTION dedup_holder(p_namespace text, p_dedup_key text, p_scope text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_item bigint;
BEGIN
    SELECT k.item_id INTO v_item FROM dedup_keys k
     WHERE k.namespace = coalesce(p_namespace, 'default') AND k.dedup_key = p_dedup_key AND (k.kept_until > p_now) IS TRUE; -- which no index serves
    IF v_item IS NULL AND p_scope = 'dead' THEN -- not for a producer who may not read them
        SELECT d.item_id INTO v_item FROM dead_letters d
         WHERE d.queue = 'worker' AND d.namespace = coalesce(p_namespace, 'default') AND d.dedup_key BETWEEN p_dedup_key AND p_dedup_key
         ORDER BY d.dedup_key LIMIT 1;
    END IF;
    RETURN v_item;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION dedup_holder IS 'Internal: which item has a dedup key although it is not queued any more; null: none.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_work_many(
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
COMMENT ON FUNCTION enqueue_work_many IS 'Adds work items, one per array element, and returns a row for each in the same order; see enqueue_work. An array that is null, or has a null, means the default. An item whose dedup key is already queued adds nothing and returns the id and due time of the queued one, or null if that was finished at this very moment. p_dedup_fors and p_dedup_scopes as in enqueue_work: then it may be the id of an item that is no longer queued, without a due time. p_instances, p_executions and p_activities say what scheduled an item; p_headers are JSON objects of strings. p_quiet leaves the notification to the caller. PW003 if an argument breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_work_item(
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
CREATE FUNCTION enqueue_work(
    p_name text, p_input json DEFAULT NULL, p_namespace text DEFAULT NULL, p_priority integer DEFAULT 0,
    p_delay interval DEFAULT NULL, p_visible_at timestamptz DEFAULT NULL, p_dedup_key text DEFAULT NULL,
    p_tag text DEFAULT NULL, p_session text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_dedup_for interval DEFAULT NULL, p_dedup_scope text DEFAULT NULL, p_key text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF coalesce(p_dedup_key, p_dedup_scope, p_key) IS NULL AND p_dedup_for IS NULL AND octet_length(p_name) BETWEEN 1 AND 255 AND (p_priority BETWEEN 0 AND 9)
       AND coalesce(p_namespace = 'default', true) AND p_delay IS NULL AND p_visible_at IS NULL AND p_tag IS NULL AND p_session IS NULL AND p_headers IS NULL THEN
        RETURN (enqueue_work_item(p_name, p_input::text, NULL, p_priority::smallint, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false)).item_id;
    END IF;
    RETURN (SELECT item_id FROM enqueue_work_many(ARRAY[p_name], ARRAY[p_input::text], ARRAY[p_namespace], ARRAY[least(greatest(coalesce(p_priority, 0), -1), 10)::smallint],
        ARRAY[p_delay], ARRAY[p_visible_at], ARRAY[p_dedup_key], p_tags => ARRAY[p_tag], p_sessions => ARRAY[p_session], p_headers => ARRAY[p_headers::text],
        p_dedup_fors => ARRAY[p_dedup_for], p_dedup_scopes => ARRAY[p_dedup_scope], p_keys => ARRAY[p_key]));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_work IS 'Adds one work item, due at p_visible_at, or after p_delay, or now, and returns its id: SELECT enqueue_work(''email.send'', ''{"to":"ada"}''). If an item with the same p_dedup_key is queued in the namespace, claimed or not, it adds nothing and returns the id of that one; p_dedup_scope ''waiting'' counts only those that are not claimed, and ''dead'' dead letters as well; with p_dedup_for the key is taken for so long from now on, whatever becomes of the item. p_priority is 0 to 9, the highest first. The first item of a namespace creates it; by default it is ''default''. p_tag is what a fetch can ask for or leave out; the items of a p_session go to one owner at a time; those with the same p_key share limits; p_headers, an object of strings of at most 8 KiB, travels with the item. PW003 if an argument breaks a rule: names, keys and sessions have 1 to 255 bytes, a tag at most 255; p_delay is not negative, and not together with p_visible_at.';

-- +goose StatementBegin
CREATE FUNCTION lock_session(p_session text, p_owner text, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_session sessions;
BEGIN
    SELECT * INTO v_session FROM sessions s WHERE s.session_id = p_session FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN v_session.owner = p_owner OR v_session.locked_until <= p_now;
    END IF;
    -- Either there is none, or somebody is about to change it or to add it; an insert would wait for them.
    IF EXISTS (SELECT FROM sessions s WHERE s.session_id = p_session)
       OR NOT pg_try_advisory_xact_lock(hashtext('pgwake sessions of ' || current_schema()), hashtext(p_session)) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM sessions s WHERE s.session_id = p_session); -- added by who had the lock before
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_session IS 'Internal: locks a session that is free, or p_owner''s already, to the end of the transaction, for claim_sessions; never waits. False if another holds it, or is about to.';

-- +goose StatementBegin
CREATE FUNCTION claim_sessions(p_items bigint[], p_owner text, p_token uuid, p_now timestamptz, p_until timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO sessions AS s (session_id, owner, locked_until, last_activity_at, taken_by)
    SELECT DISTINCT q.session_id, p_owner, p_until, p_now, p_token FROM worker_queue q
     WHERE q.id = ANY (p_items) AND coalesce(q.session_id, '') <> '' -- for which no partial index will do
    ON CONFLICT (session_id) DO UPDATE
       SET owner = p_owner, last_activity_at = p_now,
           locked_until = CASE WHEN s.owner = p_owner THEN greatest(s.locked_until, p_until) ELSE p_until END,
           taken_by = CASE WHEN s.owner <> p_owner OR s.locked_until <= p_now THEN p_token END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION claim_sessions IS 'Internal: makes p_owner the owner of the sessions of these items, which lock_session has locked.';

-- +goose StatementBegin
CREATE FUNCTION touch_sessions(p_sessions text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    UPDATE sessions s SET last_activity_at = clock_timestamp()
      FROM (SELECT DISTINCT t.id FROM unnest(p_sessions) AS t (id) ORDER BY t.id) AS touched -- so that two batches cannot deadlock
     WHERE s.session_id = ANY (ARRAY[touched.id]); -- as in ack_work_many
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION touch_sessions IS 'Internal: notes that there was activity in these sessions.';

-- +goose StatementBegin
CREATE FUNCTION lock_items(p_ids bigint[], p_sessions text[], p_limit integer, p_owner text, p_now timestamptz)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_got     bigint[] := '{}';
    v_locked  text[] := '{}';
    v_refused text[] := '{}';
BEGIN
    FOR i IN 1 .. coalesce(cardinality(p_ids), 0) LOOP
        EXIT WHEN cardinality(v_got) >= p_limit;
        CONTINUE WHEN p_sessions[i] = ANY (v_refused);
        IF p_sessions[i] IS NOT NULL AND p_sessions[i] <> ALL (v_locked) THEN
            IF NOT lock_session(p_sessions[i], p_owner, p_now) THEN
                v_refused := v_refused || p_sessions[i];
                CONTINUE;
            END IF;
            v_locked := v_locked || p_sessions[i];
        END IF;
        PERFORM FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            v_got := v_got || p_ids[i];
        END IF;
    END LOOP;
    RETURN v_got;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_items IS 'Internal: locks the first p_limit of these items that are due and that p_owner may claim, in order, and their sessions.';

-- +goose StatementBegin
CREATE FUNCTION pick_work(
    p_now timestamptz, p_limit integer, p_namespaces text[], p_tags text[], p_owner text)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_picked     bigint[] := '{}';
    v_candidates bigint[];
    v_sessions   text[];
    v_cut        boolean;
    v_spare      integer := 32;
BEGIN
    IF p_namespaces IS NULL AND p_tags = ARRAY[''] AND p_owner IS NULL THEN
        RETURN ARRAY(
            SELECT head.id
              FROM generate_series(9, 0, -1) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id FROM worker_queue q
                    WHERE -q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now
                    ORDER BY q.visible_at, q.id
                    LIMIT p_limit FOR UPDATE SKIP LOCKED) head
             LIMIT p_limit);
    END IF;

    -- The order runs across several lists, but rows can be locked lazily only along one index. So candidates are
    -- read without locks, some to spare, merged, and then locked in order; if others hold so many of them that too
    -- few remain, there is another round with more to spare.
    LOOP
        SELECT array_agg(c.id ORDER BY c.priority DESC, c.visible_at, c.id),
               array_agg(c.session_id ORDER BY c.priority DESC, c.visible_at, c.id),
               coalesce(bool_or(c.place = p_limit + v_spare), false)
          INTO v_candidates, v_sessions, v_cut
          FROM (SELECT head.* FROM generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.priority, q.visible_at, q.session_id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE -q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now
                        ORDER BY q.visible_at, q.id
                        LIMIT p_limit + v_spare) head
                 WHERE p_namespaces IS NULL AND (p_tags IS NULL OR '' = ANY (p_tags))
                UNION ALL
                SELECT head.* FROM asked_lists(p_namespaces, p_tags) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.priority, q.visible_at, q.session_id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority
                          AND q.session_id IS NULL AND q.visible_at <= p_now
                        ORDER BY q.visible_at, q.id
                        LIMIT p_limit + v_spare) head
                UNION ALL
                SELECT head.* FROM session_lists(p_owner, p_now) AS list
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.priority, q.visible_at, q.session_id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE q.session_id = list.session_id AND q.visible_at <= p_now
                          AND (p_namespaces IS NULL OR q.namespace = ANY (p_namespaces))
                          AND (p_tags IS NULL OR q.tag = ANY (p_tags))
                        ORDER BY q.visible_at, q.id
                        LIMIT p_limit + v_spare) head
                 WHERE p_owner IS NOT NULL AND list.free_at IS NULL) AS c;
        IF p_owner IS NULL THEN
            v_picked := ARRAY(
                SELECT q.id FROM worker_queue q
                 WHERE q.id = ANY (v_candidates) AND q.visible_at <= p_now
                 ORDER BY q.priority DESC, q.visible_at, q.id
                 LIMIT p_limit FOR UPDATE SKIP LOCKED);
        ELSE
            v_picked := lock_items(v_candidates, v_sessions, p_limit, p_owner, p_now);
        END IF;
        EXIT WHEN NOT v_cut OR cardinality(v_picked) = p_limit;
        v_spare := v_spare * 8;
    END LOOP;
    RETURN v_picked;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pick_work IS 'Internal: locks up to p_limit due items that a fetch may claim, in order, and their sessions.';

-- +goose StatementBegin
CREATE FUNCTION fetch_work(
    p_token uuid, p_lock_timeout interval, p_limit integer DEFAULT 1,
    p_namespaces text[] DEFAULT NULL, p_announce boolean DEFAULT false,
    p_tags text[] DEFAULT ARRAY[''], p_owner text DEFAULT NULL, p_session_timeout interval DEFAULT '30 s',
    p_max_attempts integer DEFAULT 0, p_ack_ids bigint[] DEFAULT NULL, p_ack_tokens uuid[] DEFAULT NULL,
    p_archive_for interval DEFAULT NULL, p_node integer DEFAULT NULL, p_lane integer DEFAULT NULL, p_number bigint DEFAULT NULL,
    p_disarm boolean DEFAULT false, p_listener integer DEFAULT NULL, p_fanout integer DEFAULT 0, p_places integer DEFAULT 1,
    p_fair boolean DEFAULT false)
RETURNS TABLE (
    item_id bigint, namespace text, priority smallint, attempt_count integer, name text, input json,
    instance_id text, execution_id bigint, activity_id bigint, tag text, session_id text, last_error text,
    headers jsonb, key text, places integer, enqueued_at timestamptz, due_at timestamptz,
    locked_until timestamptz, earliest_at timestamptz, now_at timestamptz, lost uuid)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz;
    v_until  timestamptz;
    v_holds  boolean := EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds);
    v_limited boolean := p_fair OR v_holds;
    v_simple boolean := NOT v_limited AND p_namespaces IS NULL AND p_tags IS NOT DISTINCT FROM ARRAY[''] AND p_owner IS NULL AND p_max_attempts <= 0;
    v_served text[] := p_namespaces;
    v_picked bigint[] := '{}';
    v_poison bigint[];
    v_done   bigint[];
    v_tokens uuid[];
    v_sessions text[];
    v_earliest timestamptz;
    v_claims bigint := 0;
    v_moving xid[] := '{}'; -- transactions whose rows are not to be tried
    v_spaces text[]; -- of places that become free
    v_tags   text[];
    v_keys   text[];
    v_awaited  boolean := false; -- by anybody
    v_lists    integer; -- that it can be from; two: or more
    v_list     text; -- the one list that it can be from, if it is one
    v_list_tag text;
    v_sole     text; -- that namespace, if nothing there is to be held or moved
    v_free     integer; -- how many may be claimed there
    v_places   integer; -- of how many they have one then; null: of any number
    v_key_places integer; -- and those that have a key, of that
    v_rated    boolean;
    v_again    boolean := false;
BEGIN
    IF p_limit < 1 OR p_lock_timeout <= interval '0' OR p_token IS NULL THEN
        RAISE EXCEPTION 'fetch_work needs a token, a limit of at least 1 and a positive lock timeout' USING ERRCODE = 'PW003';
    END IF;
    IF v_limited THEN
        v_served := served('worker', p_namespaces);
        IF NOT p_fair AND p_owner IS NULL AND p_max_attempts <= 0 THEN -- before the acks, or it would walk over what they remove
            SELECT count(*), min(l.namespace), min(l.tag) INTO v_lists, v_list, v_list_tag FROM (SELECT w.* FROM work_lists(v_served, p_tags) AS w LIMIT 2) AS l;
        END IF;
    END IF;
    IF p_ack_ids IS NOT NULL AND p_archive_for IS NULL THEN
        WITH removed AS ( -- as in ack_work_many, which would cost a third more
            DELETE FROM worker_queue q
             USING (SELECT t.id, t.token FROM unnest(p_ack_ids, p_ack_tokens) AS t (id, token) ORDER BY t.id) AS done
             WHERE q.id = ANY (ARRAY[done.id]) AND q.lock_token = done.token AND q.visible_at > clock_timestamp()
            RETURNING q.id, q.lock_token, q.session_id, q.slot OR q.key_slot AS placed, q.namespace, q.tag, q.key
        )
        SELECT array_agg(r.id), array_agg(r.lock_token), array_agg(r.session_id) FILTER (WHERE r.session_id IS NOT NULL),
               array_agg(r.namespace) FILTER (WHERE r.placed), array_agg(r.tag) FILTER (WHERE r.placed), array_agg(r.key) FILTER (WHERE r.placed)
          INTO v_done, v_tokens, v_sessions, v_spaces, v_tags, v_keys FROM removed r;
        v_awaited := v_spaces IS NOT NULL AND note_releases(v_spaces, v_tags, v_keys);
        IF v_sessions IS NOT NULL THEN
            PERFORM touch_sessions(v_sessions);
        END IF;
    ELSIF p_ack_ids IS NOT NULL THEN
        SELECT array_agg(done.item_id), array_agg(done.lock_token) INTO v_done, v_tokens
          FROM ack_work_many(p_ack_ids, p_ack_tokens, p_archive_for) AS done;
    END IF;
    IF cardinality(v_done) IS DISTINCT FROM cardinality(p_ack_ids) THEN
        RETURN QUERY
        SELECT asked.id, NULL::text, NULL::smallint, NULL::integer, NULL::text, NULL::json, NULL::text, NULL::bigint, NULL::bigint,
               NULL::text, NULL::text, NULL::text, NULL::jsonb, NULL::text, NULL::integer, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz,
               NULL::timestamptz, asked.token
          FROM (SELECT a.id, a.token FROM unnest(p_ack_ids, p_ack_tokens) AS a (id, token)
                EXCEPT SELECT done.id, done.token FROM unnest(v_done, v_tokens) AS done (id, token)) AS asked;
        GET DIAGNOSTICS v_claims = ROW_COUNT;
        IF v_claims > 0 THEN
            IF v_awaited THEN
                PERFORM tell_of_places(v_spaces, v_tags, v_keys);
            END IF;
            RETURN; -- whoever asked wants to know first
        END IF;
    END IF;

    v_now := clock_timestamp();
    v_until := v_now + p_lock_timeout;
    IF v_lists IS NOT NULL THEN
        SELECT * INTO v_sole, v_free, v_places, v_key_places, v_rated FROM sole_list(v_lists, p_limit, v_spaces, v_now, v_list);
    END IF;
    IF p_limit >= 10 AND (v_simple OR v_sole IS NOT NULL) THEN
        -- What others are claiming at this moment is skipped either way. To learn of a row that it is locked costs as much
        -- as to lock it, and with eight batches at a time there are seven such rows for each that is taken. So those of
        -- transactions that are under way now, or begin next, are not tried. They may have ended by the time: then
        -- the row is claimed, or it is still due, and whoever looks for what is left sees it.
        v_moving := ARRAY(
            SELECT t.xid::xid FROM pg_snapshot_xip(pg_current_snapshot()) AS t (xid)
            UNION ALL
            SELECT (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + n.next)::text::xid8::xid FROM generate_series(0, 31) AS n (next));
    END IF;
    IF v_sole IS NOT NULL THEN
        -- As below, along one list. What is too much of a key is found out when the claim is there for all that look later: so
        -- nobody waits for another but for the moment that it takes to look.
        RETURN QUERY
        WITH claimed AS (
            UPDATE worker_queue q
               SET visible_at = v_until, lock_token = p_token, attempt_count = q.attempt_count + 1, charged = false,
                   slot = v_places IS NOT NULL, key_slot = v_key_places IS NOT NULL AND q.key IS NOT NULL
              FROM (SELECT head.ctid, head.visible_at, head.charged
                      FROM generate_series(9, 0, -1) AS level (priority)
                     CROSS JOIN LATERAL (
                           SELECT d.ctid, d.visible_at, d.charged FROM worker_queue d
                            WHERE d.namespace = v_sole AND d.tag = v_list_tag AND d.priority = level.priority AND d.session_id IS NULL
                              AND d.visible_at <= v_now AND (d.xmax = 0 OR d.xmax <> ALL (v_moving))
                            ORDER BY d.visible_at, d.id
                            LIMIT v_free FOR UPDATE SKIP LOCKED) head
                     LIMIT v_free) AS picked
             WHERE q.ctid = picked.ctid
            RETURNING q.*, picked.visible_at AS was_due, picked.charged AS paid
        ), listed AS (
            SELECT array_agg(s.id) AS ids, array_agg(s.key) AS keys, array_agg(s.was_due) AS dues
              FROM (SELECT c.id, c.key, c.was_due FROM claimed c WHERE c.key IS NOT NULL AND (v_key_places IS NOT NULL OR v_rated AND NOT c.paid)
                     ORDER BY c.priority DESC, c.was_due, c.id) AS s
        ), refused AS MATERIALIZED (
            SELECT CASE WHEN v_rated THEN pay_shares(v_sole, v_list_tag, l.ids, l.keys, l.dues, v_now)
                        ELSE too_many(v_sole, v_list_tag, l.ids, l.keys, l.dues, v_now) END AS ids FROM listed l WHERE l.ids IS NOT NULL
        )
        SELECT c.id, c.namespace, c.priority, c.attempt_count, c.name, c.input, c.instance_id, c.execution_id,
               c.activity_id, c.tag, c.session_id, c.last_error, c.headers, c.key,
               least(v_places, CASE WHEN c.key IS NOT NULL THEN v_key_places END), c.created_at, c.was_due, v_until, NULL::timestamptz, NULL::timestamptz, NULL::uuid
          FROM claimed c
         WHERE v_key_places IS NULL AND NOT v_rated OR c.id <> ALL (coalesce((SELECT r.ids FROM refused r), '{}'))
         ORDER BY c.priority DESC, c.was_due, c.id;
        GET DIAGNOSTICS v_claims = ROW_COUNT;
        -- Was there nothing but what may not begin? It is out of the way now, or to be held, and others are behind it.
        v_again := v_claims = 0 AND (v_key_places IS NOT NULL OR v_rated) AND NOT nothing_waits(v_sole);
    ELSIF v_simple THEN
        -- pick_work, the claim and earliest_work for what nearly all fetches ask for, in one statement each. The rows that
        -- were locked are there by their place: to look each up by its id would cost as much as to find it.
        RETURN QUERY
        WITH claimed AS (
            UPDATE worker_queue q
               SET visible_at = v_until, lock_token = p_token, attempt_count = q.attempt_count + 1, slot = false, key_slot = false
              FROM (SELECT head.ctid, head.visible_at
                      FROM generate_series(9, 0, -1) AS level (priority)
                     CROSS JOIN LATERAL (
                           SELECT d.ctid, d.visible_at FROM worker_queue d
                            WHERE -d.priority = -level.priority AND d.tag = '' AND d.session_id IS NULL AND d.visible_at <= v_now
                              AND (d.xmax = 0 OR d.xmax <> ALL (v_moving))
                            ORDER BY d.visible_at, d.id
                            LIMIT p_limit FOR UPDATE SKIP LOCKED) head
                     LIMIT p_limit) AS picked
             WHERE q.ctid = picked.ctid
            RETURNING q.*, picked.visible_at AS was_due
        )
        SELECT c.id, c.namespace, c.priority, c.attempt_count, c.name, c.input, c.instance_id, c.execution_id,
               c.activity_id, c.tag, c.session_id, c.last_error, c.headers, c.key, NULL::integer, c.created_at, c.was_due, v_until, NULL::timestamptz, NULL::timestamptz, NULL::uuid
          FROM claimed c
         ORDER BY c.priority DESC, c.was_due, c.id;
        GET DIAGNOSTICS v_claims = ROW_COUNT;
    END IF;
    IF v_again OR NOT v_simple AND v_sole IS NULL THEN
        LOOP
            IF v_limited THEN
                v_picked := pick_limited(v_now, p_limit, v_served, p_tags, p_owner, p_fair);
            ELSE
                v_picked := pick_work(v_now, p_limit, p_namespaces, p_tags, p_owner);
            END IF;
            EXIT WHEN p_max_attempts <= 0 OR cardinality(v_picked) = 0;
            v_poison := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_picked) AND q.attempt_count >= p_max_attempts);
            EXIT WHEN cardinality(v_poison) = 0;
            PERFORM bury_work(v_poison, 'max attempts', NULL);
            v_picked := ARRAY(SELECT p.id FROM unnest(v_picked) WITH ORDINALITY AS p (id, place) WHERE p.id <> ALL (v_poison) ORDER BY p.place);
            EXIT WHEN cardinality(v_picked) > 0;
        END LOOP;

        IF cardinality(v_picked) > 0 THEN
            IF p_owner IS NOT NULL THEN
                PERFORM claim_sessions(v_picked, p_owner, p_token, v_now, v_now + p_session_timeout);
            END IF;
            RETURN QUERY
            WITH claimed AS (
                UPDATE worker_queue q
                   SET visible_at = v_until, lock_token = p_token, attempt_count = q.attempt_count + 1, charged = false,
                       slot = own.places IS NOT NULL, key_slot = own.key_places IS NOT NULL
                  FROM (SELECT before.ctid, before.visible_at, picked.place,
                               l.max_running AS places, CASE WHEN before.key IS NOT NULL THEN l.max_running_per_key END AS key_places
                          FROM unnest(v_picked) WITH ORDINALITY AS picked (id, place)
                          JOIN worker_queue before ON before.id = ANY (ARRAY[picked.id]) -- as in ack_work_many
                          LEFT JOIN limits l ON v_limited AND before.session_id IS NULL AND l.queue = 'worker' AND l.namespace = ANY (ARRAY[before.namespace])) AS own
                 WHERE q.ctid = own.ctid -- they are locked
                RETURNING q.*, own.visible_at AS was_due, own.place, least(own.places, own.key_places) AS places
            )
            SELECT c.id, c.namespace, c.priority, c.attempt_count, c.name, c.input, c.instance_id, c.execution_id,
                   c.activity_id, c.tag, c.session_id, c.last_error, c.headers, c.key, c.places, c.created_at, c.was_due, v_until, NULL::timestamptz, NULL::timestamptz, NULL::uuid
              FROM claimed c
             ORDER BY c.place;
            v_claims := cardinality(v_picked);
        END IF;
    END IF;
    IF v_claims = p_limit AND p_limit >= 10 THEN
        -- There may be more. To know it is to walk over what was just claimed, which is a third of the cost of a batch; and if
        -- there is none, that is one look too many in as many items.
        v_earliest := v_now;
    ELSIF v_simple THEN
        SELECT min(head.visible_at) INTO v_earliest
          FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE -q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL
                ORDER BY q.visible_at LIMIT 1) head;
    ELSIF v_sole IS NOT NULL AND v_claims > 0 AND NOT v_again THEN
        -- What is in another list has been added since this began. It is for whoever it was told to or, if nobody waited, for the
        -- next look: as if it had come just after this. A fetch that finds nothing, and says that somebody waits, has to see it.
        v_earliest := earliest_of_lists(ARRAY[v_sole], ARRAY[v_list_tag]);
    ELSE
        v_earliest := earliest_work(p_namespaces, p_tags, p_owner);
    END IF;
    IF v_claims > 0 AND p_announce THEN
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    -- This claim may have taken the places itself. Those of keys it has if nothing that it may claim is left: for whatever it had
    -- brought back is due.
    IF v_awaited AND (v_lists = 1 AND v_list = ALL (v_spaces) AND v_claims >= cardinality(v_spaces)
                      AND (v_key_places IS NULL OR v_list_tag = ALL (v_tags) AND coalesce(v_earliest > v_now, true))) IS NOT TRUE THEN
        PERFORM tell_of_places(v_spaces, v_tags, v_keys);
    END IF;

    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::smallint, NULL::integer, NULL::text, NULL::json,
        NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::jsonb, NULL::text, v_holds::integer, NULL::timestamptz, NULL::timestamptz,
        v_until, v_earliest, clock_timestamp(), NULL::uuid;
    IF p_number IS NOT NULL AND (p_disarm OR v_claims = 0) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'worker', p_number, v_claims = 0, p_namespaces, p_tags, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION fetch_work IS 'Claims up to p_limit due items under p_token: by priority, then visible_at, then id; those of these namespaces and tags (null: all), and with p_owner also those of sessions that are its own or free. The last row has no item: it carries the earliest visible_at that is left (see earliest_work), or now if all of a p_limit of 10 or more was claimed and there may be more, the clock, and in places whether any limits hold (1 or 0). p_announce tells the other nodes when the lease ends. An item that was claimed p_max_attempts times becomes a dead letter instead. With p_fair the namespaces that have something due take turns by their weight, and the order is that within each. p_ack_ids are acknowledged first; if the lock of one was lost, there is a row with it for each such, and no claim. With p_number, it writes to the row of the lane, of the node, that it is armed if nothing was found; if something was, and p_disarm, that it is not.';

-- +goose StatementBegin
CREATE FUNCTION flush()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'pgwake', ''); -- a commit is flushed if its transaction wrote something
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION flush IS 'Once this has committed, everything is on disk, and with the standbys that synchronous_commit asks for, that was committed before it began, asynchronously too.';

-- +goose StatementBegin
CREATE FUNCTION remove_work(p_ids bigint[])
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_removed bigint;
    v_spaces  text[]; -- of places that become free
    v_tags    text[];
    v_keys    text[];
BEGIN
    WITH removed AS (
        DELETE FROM worker_queue q WHERE q.id = ANY (p_ids) RETURNING (q.slot OR q.key_slot) AND q.lock_token IS NOT NULL AS placed, q.namespace, q.tag, q.key
    )
    SELECT count(*), array_agg(r.namespace) FILTER (WHERE r.placed), array_agg(r.tag) FILTER (WHERE r.placed), array_agg(r.key) FILTER (WHERE r.placed)
      INTO v_removed, v_spaces, v_tags, v_keys FROM removed r;
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
    RETURN v_removed;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION remove_work IS 'Internal: removes work items, claimed or not, that the caller has locked, and returns how many.';

-- +goose StatementBegin
CREATE FUNCTION ack_work_many(p_ids bigint[], p_tokens uuid[], p_archive_for interval DEFAULT NULL)
RETURNS TABLE (item_id bigint, lock_token uuid)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_archived bigint[];
    v_ids      bigint[];
    v_tokens   uuid[];
    v_sessions text[];
    v_spaces   text[]; -- of places that become free
    v_tags     text[];
    v_keys     text[];
BEGIN
    IF p_archive_for IS NOT NULL THEN
        v_archived := ARRAY(
            SELECT q.id FROM worker_queue q
              JOIN (SELECT DISTINCT u.id, u.token FROM unnest(p_ids, p_tokens) AS u (id, token)) AS t ON q.id = ANY (ARRAY[t.id])
             WHERE q.lock_token = t.token AND q.visible_at > clock_timestamp()
             ORDER BY t.id FOR UPDATE OF q);
        PERFORM archive_work(v_archived, p_archive_for);
    END IF;
    WITH removed AS (
        DELETE FROM worker_queue q
         USING (SELECT t.id, t.token FROM unnest(p_ids, p_tokens) AS t (id, token)
                 ORDER BY t.id) AS done -- in order, so that two batches cannot deadlock
         WHERE q.id = ANY (ARRAY[done.id]) -- if believed empty, the table would be as good to walk over for an equality
           AND q.lock_token = done.token
           -- What was archived goes, even if its lease has ended in the meantime: nobody could claim it.
           AND (q.visible_at > clock_timestamp() AND v_archived IS NULL OR q.id = ANY (v_archived))
        RETURNING q.id, q.lock_token, q.session_id, q.slot OR q.key_slot AS placed, q.namespace, q.tag, q.key
    )
    SELECT array_agg(r.id), array_agg(r.lock_token), array_agg(r.session_id) FILTER (WHERE r.session_id IS NOT NULL),
           array_agg(r.namespace) FILTER (WHERE r.placed), array_agg(r.tag) FILTER (WHERE r.placed), array_agg(r.key) FILTER (WHERE r.placed)
      INTO v_ids, v_tokens, v_sessions, v_spaces, v_tags, v_keys FROM removed r;
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
    IF v_sessions IS NOT NULL THEN
        PERFORM touch_sessions(v_sessions);
    END IF;
    RETURN QUERY SELECT done.id, done.token FROM unnest(v_ids, v_tokens) AS done (id, token);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_work_many IS 'Removes the items whose token still holds, and returns them. The others are left as they are. With p_archive_for, a copy is kept for so long.';

-- +goose StatementBegin
CREATE FUNCTION ack_work_group(
    p_ids bigint[], p_tokens uuid[], p_instances text[], p_kinds text[], p_datas text[], p_names text[], p_versions text[],
    p_executions bigint[], p_queues text[], p_headers text[] DEFAULT NULL, p_quiet boolean DEFAULT false, p_archive_for interval DEFAULT NULL)
RETURNS TABLE (item_id bigint, lock_token uuid, message_namespace text, busy boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off -- but hash joins: each is looked up among up to a thousand others
AS $$
#variable_conflict use_column
DECLARE
    v_free_ids    bigint[];
    v_free_tokens uuid[];
    v_sessions    text[]; -- of those items
    v_locked      text[]; -- and of these, what somebody else has locked
    v_held        boolean[];
    v_sends       bigint[]; -- places of those that send a message
    v_instances   text[];
    v_kinds       text[];
    v_datas       text[];
    v_names       text[];
    v_versions    text[];
    v_executions  bigint[];
    v_queues      text[];
    v_headers     text[];
BEGIN
    -- Waiting for one item, or for the session of one, would cost the others their leases.
    SELECT array_agg(free.id), array_agg(free.token), array_agg(free.session_id) FILTER (WHERE free.session_id IS NOT NULL)
      INTO v_free_ids, v_free_tokens, v_sessions
      FROM (SELECT asked.id, asked.token, q.session_id FROM unnest(p_ids, p_tokens) AS asked (id, token)
              JOIN worker_queue q ON q.id = ANY (ARRAY[asked.id]) -- as in ack_work_many
             WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp()
             ORDER BY asked.id FOR UPDATE OF q SKIP LOCKED) AS free;
    IF v_sessions IS NOT NULL THEN
        v_locked := ARRAY(
            SELECT s.session_id FROM sessions s WHERE s.session_id = ANY (v_sessions)
            EXCEPT
            SELECT got.session_id FROM (SELECT s.session_id FROM sessions s WHERE s.session_id = ANY (v_sessions)
                                         ORDER BY s.session_id FOR UPDATE SKIP LOCKED) AS got);
        IF v_locked <> '{}' THEN
            SELECT array_agg(free.id), array_agg(free.token) INTO v_free_ids, v_free_tokens
              FROM unnest(v_free_ids, v_free_tokens) AS free (id, token)
              JOIN worker_queue q ON q.id = ANY (ARRAY[free.id])
             WHERE q.session_id IS NULL OR q.session_id <> ALL (v_locked);
        END IF;
    END IF;
    SELECT array_agg(done.item_id IS NOT NULL ORDER BY asked.place) INTO v_held
      FROM unnest(p_ids, p_tokens) WITH ORDINALITY AS asked (id, token, place)
      LEFT JOIN ack_work_many(v_free_ids, v_free_tokens, p_archive_for) AS done ON done.item_id = asked.id AND done.lock_token = asked.token;
    SELECT array_agg(m.place), array_agg(m.instance), array_agg(m.kind), array_agg(m.data), array_agg(m.name), array_agg(m.version),
           array_agg(m.execution), array_agg(m.queue), array_agg(m.headers)
      INTO v_sends, v_instances, v_kinds, v_datas, v_names, v_versions, v_executions, v_queues, v_headers
      FROM unnest(v_held, p_instances, p_kinds, p_datas, p_names, p_versions, p_executions, p_queues, p_headers) WITH ORDINALITY
           AS m (held, instance, kind, data, name, version, execution, queue, headers, place)
     WHERE m.held AND m.instance IS NOT NULL;
    RETURN QUERY
    WITH sent AS (
        SELECT m.item_namespace, v_sends[m.ord] AS place
          FROM enqueue_message_many(v_instances, v_kinds, v_datas, v_names, v_versions, v_executions,
                                    p_queues => v_queues, p_headers => v_headers, p_quiet => p_quiet)
               WITH ORDINALITY AS m (item_id, duplicate, due_at, now_at, item_namespace, item_label, ord)
         WHERE v_sends IS NOT NULL
    )
    SELECT asked.id, asked.token, sent.item_namespace, NOT asked.held
      FROM unnest(p_ids, p_tokens, v_held) WITH ORDINALITY AS asked (id, token, held, place)
      LEFT JOIN sent ON sent.place = asked.place
     WHERE asked.held
        OR EXISTS (SELECT FROM worker_queue q
                    WHERE q.id = ANY (ARRAY[asked.id]) AND q.lock_token = asked.token AND q.visible_at > clock_timestamp());
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_work_group IS 'ack_work for several at once, each with a message or without (p_instances null). Returns those whose token held, with the namespace of their message. Those that another transaction has locked, or their session, are not waited for: if their token holds still they are returned as busy, which is to be acknowledged by itself. These and all others are left as they are, and send nothing.';

-- +goose StatementBegin
CREATE FUNCTION ack_work(
    p_id bigint, p_token uuid, p_instance text DEFAULT NULL, p_kind text DEFAULT NULL, p_data text DEFAULT NULL,
    p_name text DEFAULT NULL, p_version text DEFAULT NULL, p_execution bigint DEFAULT NULL, p_queue text DEFAULT NULL,
    p_headers text DEFAULT NULL, p_quiet boolean DEFAULT false, p_archive_for interval DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
BEGIN
    IF NOT EXISTS (SELECT FROM ack_work_many(ARRAY[p_id], ARRAY[p_token], p_archive_for)) THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF p_instance IS NOT NULL THEN
        SELECT sent.item_namespace INTO v_namespace
          FROM enqueue_message_many(ARRAY[p_instance], ARRAY[p_kind], ARRAY[p_data], ARRAY[p_name], ARRAY[p_version],
                                    ARRAY[p_execution], p_queues => ARRAY[p_queue], p_headers => ARRAY[p_headers], p_quiet => p_quiet) AS sent;
    END IF;
    RETURN v_namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_work IS 'Removes an item and, if p_instance is given, sends that instance a message, in one transaction. Returns the namespace of that message. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION abandon_work(
    p_id bigint, p_token uuid, p_delay interval DEFAULT '0', p_ignore_attempt boolean DEFAULT false,
    p_error text DEFAULT NULL, p_quiet boolean DEFAULT false, p_due_at timestamptz DEFAULT NULL)
RETURNS TABLE (item_namespace text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_namespace text;
    v_tag       text;
    v_key       text;
    v_placed    boolean;
BEGIN
    UPDATE worker_queue q
       -- By an instant of the past the clock of a key would seem to be that late.
       SET visible_at = CASE WHEN p_due_at < v_now AND NOT (q.key IS NOT NULL AND has_rate(q.namespace)) THEN p_due_at ELSE v_now + p_delay END,
           lock_token = NULL, last_error = coalesce(p_error, q.last_error),
           attempt_count = greatest(q.attempt_count - p_ignore_attempt::integer, 0),
           charged = p_ignore_attempt AND p_delay <= interval '0' AND q.key IS NOT NULL AND has_rate(q.namespace), share_at = NULL
     WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > v_now
    RETURNING q.namespace, q.tag, q.key, q.slot OR q.key_slot INTO v_namespace, v_tag, v_key, v_placed;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF v_placed THEN
        PERFORM release_places(ARRAY[v_namespace], ARRAY[v_tag], ARRAY[v_key]);
    END IF;
    IF NOT p_quiet THEN
        PERFORM notify_queue('worker', (p_delay <= interval '0')::integer,
                             CASE WHEN p_delay > interval '0' THEN v_now + p_delay END, v_namespace);
    END IF;
    RETURN QUERY SELECT v_namespace, v_now + p_delay, v_now;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION abandon_work IS 'Gives an item back, due again after p_delay, and returns where and when. With p_due_at, an instant of the past, it has its place as of then, unless its key has a rate. p_ignore_attempt undoes the count of this attempt; p_error is kept as last_error. p_quiet leaves the notification to the caller. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION renew_work(p_ids bigint[], p_tokens uuid[], p_lock_timeout interval)
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
COMMENT ON FUNCTION renew_work IS 'Makes the leases that still hold end p_lock_timeout from now, and returns them. The others are left as they are. One item is waited for if another transaction has locked it; of several, such an item is not, and is returned without an end: its lease holds as it is, for now.';

-- +goose StatementBegin
CREATE FUNCTION undo_work_claim(p_token uuid, p_lock_timeout interval)
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
COMMENT ON FUNCTION undo_work_claim IS 'Gives back whatever p_token claimed, as if it had never been fetched, and returns how many items that was. For a fetch whose outcome is unknown: it finds the items by the end of their lease. Sessions that the claim created or took over are free again; those that its owner had before stay his.';

-- +goose StatementBegin
CREATE FUNCTION renew_sessions(p_owners text[], p_extend interval, p_idle interval)
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
CREATE FUNCTION release_sessions(p_owners text[])
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_owned    text[] := ARRAY(SELECT s.session_id FROM sessions s WHERE s.owner = ANY (p_owners) AND s.locked_until > v_now);
    v_idle     text[];
    v_released bigint;
BEGIN
    -- What is at work is not waited for.
    v_idle := ARRAY(
        SELECT s.session_id FROM sessions s
         WHERE s.session_id = ANY (v_owned) AND s.owner = ANY (p_owners) AND s.locked_until > v_now
           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = s.session_id AND q.visible_at > v_now AND q.lock_token IS NOT NULL OFFSET 0)
         ORDER BY s.session_id FOR UPDATE);
    -- In a second statement, whose snapshot shows what was claimed before the session was locked. Without the row, a renewal that
    -- is on its way revives nothing.
    DELETE FROM sessions s
     WHERE s.session_id = ANY (v_idle)
       AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = s.session_id AND q.visible_at > v_now AND q.lock_token IS NOT NULL OFFSET 0);
    GET DIAGNOSTICS v_released = ROW_COUNT;
    IF v_released > 0 THEN -- also of a session without items: one may be committed that met the lock
        PERFORM notify_queue('worker', v_released, NULL);
    END IF;
    RETURN v_released;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION release_sessions IS 'Ends the sessions of these owners now, but for those of which an item is leased: anybody may claim their items. Returns how many.';

-- +goose StatementBegin
CREATE FUNCTION cleanup_sessions()
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_removed bigint;
BEGIN
    DELETE FROM sessions s
     USING (SELECT r.session_id FROM sessions r
             WHERE r.locked_until <= clock_timestamp()
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = r.session_id OFFSET 0)
             ORDER BY r.session_id FOR UPDATE SKIP LOCKED) AS ended
     WHERE s.session_id = ANY (ARRAY[ended.session_id]);
    GET DIAGNOSTICS v_removed = ROW_COUNT;
    RETURN v_removed;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cleanup_sessions IS 'Removes the sessions that have ended and have no items. Returns how many.';

-- +goose Down

DROP FUNCTION cleanup_sessions, release_sessions, renew_sessions, undo_work_claim, renew_work, abandon_work, ack_work, ack_work_group, ack_work_many, remove_work, flush, fetch_work, pick_work, lock_items,
    touch_sessions, claim_sessions, lock_session, enqueue_work, enqueue_work_item, enqueue_work_many,
    dedup_holder, keep_dedup_keys, check_dedup, check_headers, check_options, check_texts;
