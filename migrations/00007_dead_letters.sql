-- Dead letters, and the archive of what was acknowledged.
--
-- What moves between a queue and dead_letters is written and deleted in one statement, and by it alone: a row is
-- always in one of the two, and never in both.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION bury_work(p_ids bigint[], p_reason text, p_error text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_spaces text[]; -- of places that become free
    v_tags   text[];
    v_keys   text[];
BEGIN
    WITH dead AS (
        DELETE FROM worker_queue q
         USING (SELECT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) AS given -- in order, so that two cannot deadlock
         WHERE q.id = ANY (ARRAY[given.id])
        RETURNING q.*
    ), letters AS (
    INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, data, instance_id, execution_id,
                              activity_id, dedup_key, tag, session_id, headers, key, enqueued_at, reason, error)
    SELECT 'worker', d.id, d.namespace, d.priority, d.attempt_count, d.name, d.input, d.instance_id, d.execution_id,
           d.activity_id, d.dedup_key, d.tag, d.session_id, d.headers, d.key, d.created_at, p_reason, coalesce(p_error, d.last_error)
      FROM dead d
     ORDER BY d.id
    )
    SELECT array_agg(d.namespace), array_agg(d.tag), array_agg(d.key) INTO v_spaces, v_tags, v_keys
      FROM dead d WHERE (d.slot OR d.key_slot) AND d.lock_token IS NOT NULL;
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bury_work IS 'Internal: moves work items into dead_letters, with the error of their latest attempt unless p_error is given. It asks for no token: the caller holds the rows.';

-- +goose StatementBegin
CREATE FUNCTION dead_letter_work(p_id bigint, p_token uuid, p_reason text, p_error text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM FROM worker_queue q
      WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > clock_timestamp()
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    PERFORM bury_work(ARRAY[p_id], p_reason, p_error);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION dead_letter_work IS 'Makes a claimed work item a dead letter. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION bury_turn(p_instance text, p_token uuid, p_reason text, p_error text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    WITH dead AS (
        DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.lock_token = p_token RETURNING q.*
    )
    INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, kind, version, data, instance_id,
                              execution_id, dedup_key, tag, headers, enqueued_at, reason, error)
    SELECT 'orchestrator', d.id, d.namespace, d.priority, d.attempt_count, d.name, d.kind, d.version, d.data, d.instance_id,
           d.execution_id, d.dedup_key, d.queue, d.headers, d.created_at, p_reason, p_error
      FROM dead d
     ORDER BY d.id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bury_turn IS 'Internal: moves the messages of a turn into dead_letters. The instance stays locked; the caller holds the lock row.';

-- +goose StatementBegin
CREATE FUNCTION dead_letter_orchestration(
    p_instance text, p_token uuid, p_reason text, p_error text DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (scope text, due boolean, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_scope text;
    v_due   boolean;
BEGIN
    PERFORM hold_instance_lock(p_instance, p_token);
    PERFORM bury_turn(p_instance, p_token, p_reason, p_error);
    v_due := release_instance(p_instance);
    v_scope := instance_scope(p_instance);
    -- As in ack_orchestration: whoever asked for quiet looks once more after its commit; for any other, a message
    -- may commit between this snapshot and the commit, which is out of sight. So always notify.
    IF NOT p_quiet THEN
        PERFORM notify_queue('orchestrator', 1, NULL, v_scope);
    END IF;
    RETURN QUERY SELECT v_scope, v_due, clock_timestamp();
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION dead_letter_orchestration IS 'Makes the messages of a turn dead letters and releases the instance. Returns the namespace of the instance (null: any) and whether it has a due message now: what a caller that asked for quiet has to tell. PW001 if the token no longer holds.';

-- The functions that take a filter plan anew for each call: which of its conditions are given decides which
-- index is good.

-- +goose StatementBegin
CREATE FUNCTION list_dead_letters(
    p_queue text DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_died_before timestamptz DEFAULT NULL, p_ids bigint[] DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit integer DEFAULT 100, p_before bigint DEFAULT NULL, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (id bigint, queue text, item_id bigint, namespace text, priority smallint, attempt_count integer, name text, kind text, version text, data json,
    instance_id text, execution_id bigint, activity_id bigint, dedup_key text, tag text, session_id text, enqueued_at timestamptz, died_at timestamptz,
    reason text, error text, headers jsonb, key text, data_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT d.id, d.queue, d.item_id, d.namespace, d.priority, d.attempt_count, d.name, d.kind, d.version, CASE WHEN d.data_cut IS NULL THEN d.data END,
           d.instance_id, d.execution_id, d.activity_id, d.dedup_key, d.tag, d.session_id, d.enqueued_at, d.died_at, d.reason, d.error, d.headers, d.key, d.data_cut
      FROM (SELECT of.*, cut_of(of.data, p_payload_bytes) AS data_cut
              FROM (SELECT d.* FROM dead_letters d
                     WHERE d.id > p_after AND (p_before IS NULL OR d.id < p_before) AND (p_ids IS NULL OR d.id = ANY (p_ids))
                       AND (p_queue IS NULL OR d.queue = p_queue) AND (p_namespace IS NULL OR d.namespace = p_namespace)
                       AND (p_name IS NULL OR d.name = p_name) AND (p_instance IS NULL OR d.instance_id = p_instance)
                       AND (p_reason IS NULL OR d.reason = p_reason) AND (p_died_before IS NULL OR d.died_at < p_died_before)
                     ORDER BY CASE WHEN p_before IS NULL THEN d.id END, CASE WHEN p_before IS NOT NULL THEN d.id END DESC -- of which the plan has one
                     LIMIT p_limit) AS of
            OFFSET 0) AS d;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_dead_letters IS 'Dead letters by id, p_limit of them after p_after, for which all conditions hold that are not null. With p_before those before it, the latest first. With p_payload_bytes data is null where it is longer, and data_cut an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION count_dead_letters(
    p_queue text DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_died_before timestamptz DEFAULT NULL, p_ids bigint[] DEFAULT NULL, p_after bigint DEFAULT 0)
RETURNS TABLE (queue text, namespace text, letters bigint, last_id bigint)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT d.queue, d.namespace, count(*), max(d.id) FROM dead_letters d
     WHERE d.id > p_after AND (p_ids IS NULL OR d.id = ANY (p_ids))
       AND (p_queue IS NULL OR d.queue = p_queue) AND (p_namespace IS NULL OR d.namespace = p_namespace)
       AND (p_name IS NULL OR d.name = p_name) AND (p_instance IS NULL OR d.instance_id = p_instance)
       AND (p_reason IS NULL OR d.reason = p_reason) AND (p_died_before IS NULL OR d.died_at < p_died_before)
     GROUP BY d.queue, d.namespace
     ORDER BY d.queue, d.namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION count_dead_letters IS 'How many letters list_dead_letters would return without a limit, by queue and namespace, with the last of their ids.';

-- +goose StatementBegin
CREATE FUNCTION is_queued(p_queue text, p_namespace text, p_instance text, p_kind text, p_dedup_key text)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
BEGIN
    IF p_queue = 'worker' THEN
        RETURN EXISTS (SELECT FROM worker_queue q WHERE q.namespace = p_namespace AND q.dedup_key = p_dedup_key);
    END IF;
    v_namespace := coalesce(
        (SELECT i.namespace FROM instances i WHERE i.instance_id = p_instance),
        CASE WHEN p_kind IN ('start', 'continue_as_new') THEN p_namespace END,
        (SELECT q.namespace FROM orchestrator_queue q WHERE q.instance_id = p_instance ORDER BY q.id LIMIT 1),
        p_namespace);
    RETURN EXISTS (SELECT FROM orchestrator_queue q WHERE q.namespace = v_namespace AND q.dedup_key = p_dedup_key);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION is_queued IS 'Internal: whether the dedup key of a dead letter is queued where the letter would go, see redrive_dead_letters.';

-- +goose StatementBegin
CREATE FUNCTION pick_dead_letters(
    p_queue text, p_namespace text, p_name text, p_instance text, p_reason text, p_died_before timestamptz,
    p_ids bigint[], p_after bigint, p_limit integer, p_redrive boolean)
RETURNS TABLE (id bigint, queue text, item_id bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT d.id, d.queue, d.item_id FROM dead_letters d
     WHERE d.id > p_after AND (p_ids IS NULL OR d.id = ANY (p_ids))
       AND (p_queue IS NULL OR d.queue = p_queue) AND (p_namespace IS NULL OR d.namespace = p_namespace)
       AND (p_name IS NULL OR d.name = p_name) AND (p_instance IS NULL OR d.instance_id = p_instance)
       AND (p_reason IS NULL OR d.reason = p_reason) AND (p_died_before IS NULL OR d.died_at < p_died_before)
       -- Those that cannot go must not fill the batch, or no later one ever would.
       AND (NOT p_redrive OR d.dedup_key IS NULL OR NOT is_queued(d.queue, d.namespace, d.instance_id, d.kind, d.dedup_key))
     ORDER BY d.id
     LIMIT p_limit FOR UPDATE SKIP LOCKED;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pick_dead_letters IS 'Internal: as list_dead_letters, and locks them; those that somebody else has locked are left to him. With p_redrive, those whose dedup key is queued are left out.';

-- +goose StatementBegin
CREATE FUNCTION redrive_dead_letters(
    p_queue text DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_died_before timestamptz DEFAULT NULL, p_ids bigint[] DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit integer DEFAULT 1000, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_queue text, item_namespace text, redriven bigint, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before text;
    v_instances text[];
    v_unsure text[];
    -- One letter per item: the items' ids tell below which letters went.
    v_ids    bigint[] := ARRAY(
        SELECT DISTINCT ON (d.queue, d.item_id) d.id
          FROM pick_dead_letters(p_queue, p_namespace, p_name, p_instance, p_reason, p_died_before, p_ids, p_after, p_limit, true) d
         ORDER BY d.queue, d.item_id, d.id);
BEGIN
    v_before := quiet(p_quiet);
    -- The items keep their ids, and so the messages of a turn their order. A letter whose dedup key was queued
    -- meanwhile adds nothing, and stays.
    RETURN QUERY
    WITH added AS (
        INSERT INTO worker_queue AS q (id, namespace, priority, visible_at, name, input, instance_id, execution_id,
                                       activity_id, dedup_key, tag, session_id, last_error, headers, key, created_at)
        SELECT d.item_id, d.namespace, d.priority, v_now, d.name, d.data, d.instance_id, d.execution_id,
               d.activity_id, d.dedup_key, d.tag, d.session_id, d.error, d.headers, d.key, d.enqueued_at
          FROM dead_letters d
         WHERE d.id = ANY (v_ids) AND (d.queue = 'worker') IS TRUE -- which no index serves
         ORDER BY d.namespace, d.dedup_key, d.id -- so that it cannot deadlock with an enqueue of the same keys
        ON CONFLICT DO NOTHING
        RETURNING q.id, q.namespace
    ), gone AS (
        DELETE FROM dead_letters d
         WHERE d.id = ANY (v_ids) AND (d.queue = 'worker') IS TRUE -- which no index serves
           AND (d.item_id IN (SELECT a.id FROM added a)) IS TRUE -- IS TRUE keeps it a hash table, where a join would be a loop
    )
    SELECT 'worker', a.namespace, count(*), v_now FROM added a GROUP BY a.namespace;

    -- A message goes to where its instance is now, as in enqueue_message_many. If that is not known, one that opens it says so, and what was queued for it
    -- meanwhile only guessed.
    v_instances := ARRAY(SELECT DISTINCT d.instance_id FROM dead_letters d WHERE d.id = ANY (v_ids) AND (d.queue = 'orchestrator') IS TRUE);
    v_unsure := share_homes(v_instances);
    RETURN QUERY
    WITH added AS (
        INSERT INTO orchestrator_queue AS q (id, instance_id, namespace, priority, visible_at, kind, name, version,
                                             execution_id, data, dedup_key, queue, pin, headers, created_at)
        SELECT m.* FROM (
            SELECT d.item_id, d.instance_id,
                   coalesce(known.namespace, first_value(CASE WHEN opens THEN d.namespace END) OVER same, queued.namespace,
                            first_value(d.namespace) OVER same) AS namespace,
                   d.priority, v_now, d.kind, d.name, d.version, d.execution_id, d.data, d.dedup_key,
                   coalesce(known.queue, first_value(CASE WHEN opens THEN d.tag END) OVER same, queued.queue, first_value(d.tag) OVER same),
                   coalesce(known.pin, queued.pin, 0), d.headers, d.enqueued_at
              FROM dead_letters d
             CROSS JOIN LATERAL (SELECT d.kind IN ('start', 'continue_as_new') AS opens) AS of
              LEFT JOIN LATERAL (
                   SELECT i.namespace, i.queue, x.pin FROM instances i
                     LEFT JOIN executions x ON x.instance_id = ANY (ARRAY[i.instance_id]) AND x.execution_id = i.current_execution
                    WHERE i.instance_id = ANY (ARRAY[d.instance_id])) known ON true
              LEFT JOIN LATERAL (
                   SELECT w.namespace, w.queue, w.pin FROM orchestrator_queue w
                    WHERE known.namespace IS NULL AND w.instance_id BETWEEN d.instance_id AND d.instance_id
                    ORDER BY w.instance_id, w.id LIMIT 1) queued ON true
             WHERE d.id = ANY (v_ids) AND (d.queue = 'orchestrator') IS TRUE
            WINDOW same AS (PARTITION BY d.instance_id ORDER BY opens DESC, d.item_id)) m
         ORDER BY m.namespace, m.dedup_key, m.item_id
        ON CONFLICT DO NOTHING
        RETURNING q.id, q.namespace, q.instance_id
    ), noted AS (
        INSERT INTO realignments (instance_id)
        SELECT DISTINCT a.instance_id FROM added a
         WHERE a.instance_id = ANY (v_unsure)
            OR NOT EXISTS (SELECT FROM instances known WHERE known.instance_id = a.instance_id OFFSET 0) -- then its place is a guess
    ), gone AS (
        DELETE FROM dead_letters d
         WHERE d.id = ANY (v_ids) AND (d.queue = 'orchestrator') IS TRUE AND (d.item_id IN (SELECT a.id FROM added a)) IS TRUE
    )
    SELECT 'orchestrator', a.namespace, count(*), v_now FROM added a GROUP BY a.namespace;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF EXISTS (SELECT FROM realignments r WHERE r.instance_id = ANY (v_instances)) THEN
        PERFORM notify_queue('orchestrator', 1, NULL); -- wherever they belong
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION redrive_dead_letters IS 'Puts the first p_limit letters that list_dead_letters would return, and that can go, back into their queues: under their old ids, never attempted, due now. One whose dedup key is queued stays. Returns how many went, by queue and namespace. p_quiet leaves the notification to the caller.';

-- +goose StatementBegin
CREATE FUNCTION purge_dead_letters(
    p_queue text DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_reason text DEFAULT NULL, p_died_before timestamptz DEFAULT NULL, p_ids bigint[] DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit integer DEFAULT 1000)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_purged bigint;
BEGIN
    DELETE FROM dead_letters d
     USING pick_dead_letters(p_queue, p_namespace, p_name, p_instance, p_reason, p_died_before, p_ids, p_after, p_limit, false) picked
     WHERE d.id = ANY (ARRAY[picked.id]);
    GET DIAGNOSTICS v_purged = ROW_COUNT;
    RETURN v_purged;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION purge_dead_letters IS 'Removes the first p_limit letters that list_dead_letters would return, and returns how many.';

-- +goose StatementBegin
CREATE FUNCTION archive_work(p_ids bigint[], p_for interval)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO archive (item_id, namespace, priority, attempt_count, name, input, instance_id, execution_id,
                         activity_id, dedup_key, tag, session_id, headers, key, enqueued_at, finished_at)
    SELECT q.id, q.namespace, q.priority, q.attempt_count, q.name, q.input, q.instance_id, q.execution_id,
           q.activity_id, q.dedup_key, q.tag, q.session_id, q.headers, q.key, q.created_at, v_now
      FROM unnest(p_ids) AS given (id)
      JOIN worker_queue q ON q.id = ANY (ARRAY[given.id]); -- as in ack_work_many

    -- Retention needs no background job: whoever adds rows removes twice as many, and a few more, of those that
    -- have been kept long enough, if there are any. So the archive shrinks to what is to be kept, however many rows
    -- there were when that was made shorter, and no ack does more than its share. Rows that another ack is
    -- removing are skipped: acks never wait for one another here.
    DELETE FROM archive a
     USING (SELECT old.id FROM archive old
             WHERE old.finished_at < v_now - p_for
             ORDER BY old.finished_at
             LIMIT 2 * cardinality(p_ids) + 10 FOR UPDATE SKIP LOCKED) AS expired
     WHERE a.id = ANY (ARRAY[expired.id]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION archive_work IS 'Internal: copies work items into the archive and removes at most 2 * cardinality(p_ids) + 10 rows that are older than p_for. The caller holds the rows of the items and deletes them in the same transaction. If nodes differ in p_for, the shortest counts.';

-- +goose StatementBegin
CREATE FUNCTION list_archive(
    p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit integer DEFAULT 100, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (id bigint, item_id bigint, namespace text, priority smallint, attempt_count integer, name text, input json, instance_id text, execution_id bigint,
    activity_id bigint, dedup_key text, tag text, session_id text, enqueued_at timestamptz, finished_at timestamptz, headers jsonb, key text, input_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT a.id, a.item_id, a.namespace, a.priority, a.attempt_count, a.name, CASE WHEN a.input_cut IS NULL THEN a.input END, a.instance_id, a.execution_id,
           a.activity_id, a.dedup_key, a.tag, a.session_id, a.enqueued_at, a.finished_at, a.headers, a.key, a.input_cut
      FROM (SELECT of.*, cut_of(of.input, p_payload_bytes) AS input_cut
              FROM (SELECT a.* FROM archive a
                     WHERE a.id > p_after
                       AND (p_namespace IS NULL OR a.namespace = p_namespace) AND (p_name IS NULL OR a.name = p_name)
                       AND (p_instance IS NULL OR a.instance_id = p_instance)
                     ORDER BY a.id
                     LIMIT p_limit) AS of
            OFFSET 0) AS a;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_archive IS 'Archived work items by id, p_limit of them after p_after, for which all conditions hold that are not null. With p_payload_bytes input is null where it is longer, and input_cut an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION purge_archive(p_before timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_purged bigint;
BEGIN
    DELETE FROM archive a WHERE a.finished_at < p_before;
    GET DIAGNOSTICS v_purged = ROW_COUNT;
    RETURN v_purged;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION purge_archive IS 'Removes what was archived before p_before, and returns how many rows that was.';

-- +goose Down

DROP FUNCTION purge_archive, list_archive, archive_work, purge_dead_letters, redrive_dead_letters, pick_dead_letters, is_queued,
    count_dead_letters, list_dead_letters, dead_letter_orchestration, bury_turn, dead_letter_work, bury_work;
