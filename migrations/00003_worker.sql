-- The verbs of the worker queue.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION enqueue_work_many(
    p_names text[], p_inputs text[], p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_instances text[] DEFAULT NULL, p_executions bigint[] DEFAULT NULL, p_activities bigint[] DEFAULT NULL,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before text;
    v_ids    bigint[] := ARRAY(SELECT nextval('worker_queue_id_seq') FROM generate_series(1, cardinality(p_names)));
BEGIN
    IF interval '0' > ANY (p_delays) THEN
        RAISE EXCEPTION 'a delay is negative' USING ERRCODE = 'PW003';
    END IF;
    PERFORM register_namespaces(p_namespaces);
    v_before := quiet(p_quiet);
    INSERT INTO worker_queue (id, name, input, namespace, priority, visible_at, dedup_key,
                              instance_id, execution_id, activity_id)
    SELECT i.id, i.name, i.input::json, coalesce(i.namespace, 'default'), coalesce(i.priority, 0),
           coalesce(i.visible_at, v_now + i.delay, v_now), i.dedup_key, i.instance_id, i.execution_id, i.activity_id
      FROM unnest(v_ids, p_names, p_inputs, p_namespaces, p_priorities, p_delays, p_visible_ats, p_dedup_keys,
                  p_instances, p_executions, p_activities) WITH ORDINALITY
           AS i (id, name, input, namespace, priority, delay, visible_at, dedup_key,
                 instance_id, execution_id, activity_id, ord)
     ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
    PERFORM set_config('pgwake.notify', v_before, true);

    -- In a second statement, whose snapshot shows the row that a conflict was waited for.
    RETURN QUERY
    SELECT coalesce(added.id, queued.id), added.id IS NULL, coalesce(added.visible_at, queued.visible_at), v_now
      FROM unnest(v_ids, p_namespaces, p_dedup_keys) WITH ORDINALITY AS i (id, namespace, dedup_key, ord)
      LEFT JOIN worker_queue added ON added.id = i.id
      LEFT JOIN worker_queue queued ON added.id IS NULL
            AND queued.namespace = coalesce(i.namespace, 'default') AND queued.dedup_key = i.dedup_key
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_work_many IS 'Adds work items, one per array element, and returns a row for each in the same order. An item whose dedup key is already queued adds nothing and returns the id and due time of the queued one, or null if that was finished at this very moment. p_quiet leaves the notification to the caller.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_work(
    p_name text, p_input json DEFAULT NULL, p_namespace text DEFAULT NULL, p_priority integer DEFAULT 0,
    p_delay interval DEFAULT NULL, p_visible_at timestamptz DEFAULT NULL, p_dedup_key text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (SELECT item_id FROM enqueue_work_many(
        ARRAY[p_name], ARRAY[p_input::text], ARRAY[p_namespace], ARRAY[p_priority::smallint],
        ARRAY[p_delay], ARRAY[p_visible_at], ARRAY[p_dedup_key]));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_work IS 'Adds one work item and returns its id: SELECT enqueue_work(''email.send'', ''{"to":"ada"}'').';

-- +goose StatementBegin
CREATE FUNCTION fetch_work(
    p_token uuid, p_lock_timeout interval, p_limit integer DEFAULT 1,
    p_namespaces text[] DEFAULT NULL, p_announce boolean DEFAULT false)
RETURNS TABLE (
    item_id bigint, namespace text, priority smallint, attempt_count integer, name text, input json,
    instance_id text, execution_id bigint, activity_id bigint, enqueued_at timestamptz,
    locked_until timestamptz, earliest_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_until timestamptz := v_now + p_lock_timeout;
    v_picked bigint[];
    v_spare integer := 32;
BEGIN
    IF p_limit < 1 OR p_lock_timeout <= interval '0' OR p_token IS NULL THEN
        RAISE EXCEPTION 'fetch_work needs a token, a limit of at least 1 and a positive lock timeout' USING ERRCODE = 'PW003';
    END IF;

    IF p_namespaces IS NULL THEN
        v_picked := ARRAY(
            SELECT head.id
              FROM generate_series(9, 0, -1) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id FROM worker_queue q
                    WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                    ORDER BY q.visible_at, q.id
                    LIMIT p_limit FOR UPDATE SKIP LOCKED) head
             LIMIT p_limit);
    ELSE
        -- The order runs across the namespaces, but rows can be locked lazily only along one index.
        -- So candidates are read without locks, some to spare, merged, and then locked in order; if
        -- others hold so many of them that too few remain, there is another round with more to spare.
        LOOP
            DECLARE
                v_candidates bigint[];
                v_cut        boolean;
            BEGIN
                SELECT array_agg(c.id), coalesce(bool_or(c.place = p_limit + v_spare), false)
                  INTO v_candidates, v_cut
                  FROM unnest(p_namespaces) AS served (namespace)
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE q.namespace = served.namespace AND q.priority = level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT p_limit + v_spare) c;
                v_picked := ARRAY(
                    SELECT q.id FROM worker_queue q
                     WHERE q.id = ANY (v_candidates) AND q.visible_at <= v_now
                     ORDER BY q.priority DESC, q.visible_at, q.id
                     LIMIT p_limit FOR UPDATE SKIP LOCKED);
                EXIT WHEN NOT v_cut OR cardinality(v_picked) = p_limit;
                v_spare := v_spare * 8;
            END;
        END LOOP;
    END IF;

    IF cardinality(v_picked) > 0 THEN
        RETURN QUERY
        WITH claimed AS (
            UPDATE worker_queue q
               SET visible_at = v_until, lock_token = p_token, attempt_count = q.attempt_count + 1
              FROM unnest(v_picked) WITH ORDINALITY AS picked (id, place)
             WHERE q.id = picked.id
            RETURNING q.*, picked.place
        )
        SELECT c.id, c.namespace, c.priority, c.attempt_count, c.name, c.input, c.instance_id, c.execution_id,
               c.activity_id, c.created_at, v_until, NULL::timestamptz, NULL::timestamptz
          FROM claimed c
         ORDER BY c.place;
        IF p_announce THEN
            PERFORM notify_queue('worker', 0, v_until);
        END IF;
    END IF;

    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::smallint, NULL::integer, NULL::text, NULL::json,
        NULL::text, NULL::bigint, NULL::bigint, NULL::timestamptz, v_until, earliest_work(p_namespaces), clock_timestamp();
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION fetch_work IS 'Claims up to p_limit due items under p_token: by priority, then visible_at, then id. The last row has no item: it carries the earliest visible_at that is left (see earliest_work) and the clock. p_announce tells the other nodes when the lease ends.';

-- +goose StatementBegin
CREATE FUNCTION ack_work_many(p_ids bigint[], p_tokens uuid[])
RETURNS TABLE (item_id bigint, lock_token uuid)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    DELETE FROM worker_queue q
     USING (SELECT t.id, t.token FROM unnest(p_ids, p_tokens) AS t (id, token)
             ORDER BY t.id) AS done -- in order, so that two batches cannot deadlock
     WHERE q.id = done.id AND q.lock_token = done.token AND q.visible_at > clock_timestamp()
    RETURNING q.id, q.lock_token;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_work_many IS 'Removes the items whose token still holds, and returns them. The others are left as they are.';

-- +goose StatementBegin
CREATE FUNCTION ack_work(
    p_id bigint, p_token uuid, p_instance text DEFAULT NULL, p_kind text DEFAULT NULL, p_data text DEFAULT NULL,
    p_name text DEFAULT NULL, p_version text DEFAULT NULL, p_execution bigint DEFAULT NULL,
    p_quiet boolean DEFAULT false)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
BEGIN
    IF NOT EXISTS (SELECT FROM ack_work_many(ARRAY[p_id], ARRAY[p_token])) THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF p_instance IS NOT NULL THEN
        SELECT sent.item_namespace INTO v_namespace
          FROM enqueue_message_many(ARRAY[p_instance], ARRAY[p_kind], ARRAY[p_data], ARRAY[p_name], ARRAY[p_version],
                                    ARRAY[p_execution], p_quiet => p_quiet) AS sent;
    END IF;
    RETURN v_namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_work IS 'Removes an item and, if p_instance is given, sends that instance a message, in one transaction. Returns the namespace of that message. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION abandon_work(
    p_id bigint, p_token uuid, p_delay interval DEFAULT '0', p_ignore_attempt boolean DEFAULT false,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (item_namespace text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_namespace text;
BEGIN
    UPDATE worker_queue q
       SET visible_at = v_now + p_delay, lock_token = NULL,
           attempt_count = greatest(q.attempt_count - p_ignore_attempt::integer, 0)
     WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > v_now
    RETURNING q.namespace INTO v_namespace;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF NOT p_quiet THEN
        PERFORM notify_queue('worker', (p_delay <= interval '0')::integer,
                             CASE WHEN p_delay > interval '0' THEN v_now + p_delay END, v_namespace);
    END IF;
    RETURN QUERY SELECT v_namespace, v_now + p_delay, v_now;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION abandon_work IS 'Gives an item back, due again after p_delay, and returns where and when. p_ignore_attempt undoes the count of this attempt. p_quiet leaves the notification to the caller. PW001 if the token no longer holds.';

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
BEGIN
    WITH renewed AS (
        UPDATE worker_queue q
           SET visible_at = v_until
          FROM (SELECT t.id, t.token FROM unnest(p_ids, p_tokens) AS t (id, token)
                 ORDER BY t.id) AS held, -- in order, so that two batches cannot deadlock
               worker_queue before
         WHERE q.id = held.id AND q.lock_token = held.token AND q.visible_at > clock_timestamp() AND before.id = q.id
        RETURNING q.id, q.lock_token, before.visible_at > v_until AS sooner
    )
    SELECT array_agg(r.id), array_agg(r.lock_token), bool_or(r.sooner) INTO v_ids, v_tokens, v_sooner FROM renewed r;
    IF v_sooner THEN -- earlier than anybody knows
        PERFORM notify_queue('worker', 0, v_until);
    END IF;
    RETURN QUERY SELECT held.id, held.token, v_until FROM unnest(v_ids, v_tokens) AS held (id, token);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION renew_work IS 'Makes the leases that still hold end p_lock_timeout from now, and returns them. The others are left as they are.';

-- +goose StatementBegin
CREATE FUNCTION undo_work_claim(p_token uuid, p_lock_timeout interval)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_undone bigint;
BEGIN
    UPDATE worker_queue q
       SET visible_at = v_now, lock_token = NULL, attempt_count = greatest(q.attempt_count - 1, 0)
      FROM generate_series(0, 9) AS level (priority)
     CROSS JOIN LATERAL (
           SELECT held.id FROM worker_queue held
            WHERE -held.priority = -level.priority AND held.visible_at > v_now
              AND held.visible_at <= v_now + p_lock_timeout AND held.lock_token = p_token) leased
     WHERE q.id = leased.id AND q.lock_token = p_token;
    GET DIAGNOSTICS v_undone = ROW_COUNT;
    IF v_undone > 0 THEN
        PERFORM notify_queue('worker', v_undone, NULL);
    END IF;
    RETURN v_undone;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION undo_work_claim IS 'Gives back whatever p_token claimed, as if it had never been fetched, and returns how many items that was. For a fetch whose outcome is unknown: it finds the items by the end of their lease.';

-- +goose Down

DROP FUNCTION undo_work_claim, renew_work, abandon_work, ack_work, ack_work_many, fetch_work, enqueue_work, enqueue_work_many;
