-- A place of a key is nobody's any more when the item that it is for is removed before anybody claims it: it is released then.
--
-- Invariant: of a key of which items are held, as many as may be at work are at work, or are not held, or are in releases.
--   (1) A claim holds only what is more than that: those that may begin and that it does not take stay as they are, for the next.
--   (2) Whoever leaves a place in which he was at work adds a row to releases, if items are held or are about to be.
--   (3) So does whoever removes an item that nobody is at work with and that is not held, whenever it is due: it may be one of those that the
--       others are held for. Whether it is nobody knows, and too many rows do no harm: what they bring back the next claim holds again, and they
--       bring back no more than the key has places.
-- Where only the namespace has a limit nothing is held, and whoever claims next counts: there such an item stands for no place.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION bury_work(p_ids bigint[], p_reason text, p_error text)
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
      FROM dead d
     WHERE (d.slot OR d.key_slot) AND d.lock_token IS NOT NULL
        OR d.key IS NOT NULL AND d.held_due IS NULL AND d.session_id IS NULL -- see the invariant
           AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = d.namespace AND l.max_running_per_key IS NOT NULL OFFSET 0);
    IF v_spaces IS NOT NULL THEN
        PERFORM release_places(v_spaces, v_tags, v_keys);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_work(p_ids bigint[])
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
        DELETE FROM worker_queue q WHERE q.id = ANY (p_ids)
        RETURNING (q.slot OR q.key_slot) AND q.lock_token IS NOT NULL
                  OR q.key IS NOT NULL AND q.held_due IS NULL AND q.session_id IS NULL -- see the invariant
                     AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = q.namespace AND l.max_running_per_key IS NOT NULL OFFSET 0) AS placed,
                  q.namespace, q.tag, q.key
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_up_releases(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_free record;
    v_most bigint; -- are of use
    v_back bigint;
    v_gone bigint[] := '{}';
BEGIN
    FOR v_free IN
        SELECT f.namespace, f.tag, f.key, array_agg(f.id) AS ids,
               (SELECT l.max_running_per_key FROM limits l WHERE l.queue = 'worker' AND l.namespace = f.namespace) AS places
          FROM (SELECT r.* FROM releases r
                 WHERE r.namespace = ANY (p_namespaces) -- of any tag: nobody may ask for that of some any more
                 ORDER BY r.namespace, r.id LIMIT 1000 FOR UPDATE SKIP LOCKED) AS f
         GROUP BY f.namespace, f.tag, f.key
    LOOP
        v_most := least(cardinality(v_free.ids), v_free.places); -- more than all places are not free, however many were noted
        v_back := bring_back(v_free.namespace, v_free.tag, v_free.key, v_most);
        -- For what is held still since somebody has locked it, the place stays free: it may not be removed after all.
        v_gone := v_gone || CASE WHEN v_back < v_most AND EXISTS (
                SELECT FROM worker_queue q WHERE q.held_due IS NOT NULL AND q.namespace = v_free.namespace AND q.tag = v_free.tag AND q.key = v_free.key)
            THEN v_free.ids[v_most - v_back + 1:] ELSE v_free.ids END;
    END LOOP;
    DELETE FROM releases r WHERE r.id = ANY (v_gone);
    -- As long as that costs less than to begin again.
    UPDATE limits l SET holding_since = NULL
      FROM (SELECT o.namespace FROM limits o
             WHERE o.queue = 'worker' AND o.namespace = ANY (p_namespaces) AND o.holding_since < clock_timestamp() - interval '10 s'
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.namespace = o.namespace AND q.held_due IS NOT NULL OFFSET 0)
             ORDER BY o.namespace FOR UPDATE SKIP LOCKED) AS over
     WHERE l.queue = 'worker' AND l.namespace = over.namespace;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION bring_back_left()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_key     record;
    v_refused text; -- a namespace whose lock somebody else has
BEGIN
    FOR v_key IN
        WITH RECURSIVE held AS (
            (SELECT q.namespace, q.tag, q.key FROM worker_queue q WHERE q.held_due IS NOT NULL ORDER BY q.namespace, q.tag, q.key LIMIT 1)
            UNION ALL
            SELECT next.* FROM held h CROSS JOIN LATERAL (
                SELECT q.namespace, q.tag, q.key FROM worker_queue q
                 WHERE q.held_due IS NOT NULL AND (q.namespace, q.tag, q.key) > (h.namespace, h.tag, h.key)
                 ORDER BY q.namespace, q.tag, q.key LIMIT 1) next
        )
        SELECT k.* FROM (
            SELECT h.*, coalesce((SELECT l.max_running_per_key FROM limits l WHERE l.queue = 'worker' AND l.namespace = h.namespace), 1) AS places
              FROM held h OFFSET 0) AS k
         WHERE (SELECT count(*) FROM (SELECT FROM worker_queue q -- those whose leases have ended as well: they bring back others when they are done
                                       WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = k.namespace AND q.tag = k.tag AND q.key = k.key
                                      UNION ALL
                                      SELECT FROM releases r WHERE r.namespace = k.namespace AND r.tag = k.tag AND r.key = k.key
                                       LIMIT k.places) AS taken) < k.places
    LOOP
        CONTINUE WHEN v_key.namespace = v_refused;
        IF NOT lock_namespace(v_key.namespace) THEN
            v_refused := v_key.namespace; -- or this waited for it once for each of its keys
        ELSIF at_work_of_key(v_key.namespace, v_key.tag, v_key.key, v_key.places, clock_timestamp()) < v_key.places THEN
            -- One each time: of those that are due, and that a place is for, nobody knows without a walk over all that waits.
            PERFORM bring_back(v_key.namespace, v_key.tag, v_key.key, 1), notify_queue('worker', 1, NULL, v_key.namespace);
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bring_back_left IS 'Internal: brings back an item of each key of which items are held, and fewer are at work, or have been, than may be: somebody has removed rows of the queue by other means than the functions. It may also be one too many, which the next claim holds again. Part of look.';

SELECT bring_back_left(); -- of keys that stand still since before this

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION bring_back_left()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_key record;
BEGIN
    FOR v_key IN
        WITH RECURSIVE held AS (
            (SELECT q.namespace, q.tag, q.key FROM worker_queue q WHERE q.held_due IS NOT NULL ORDER BY q.namespace, q.tag, q.key LIMIT 1)
            UNION ALL
            SELECT next.* FROM held h CROSS JOIN LATERAL (
                SELECT q.namespace, q.tag, q.key FROM worker_queue q
                 WHERE q.held_due IS NOT NULL AND (q.namespace, q.tag, q.key) > (h.namespace, h.tag, h.key)
                 ORDER BY q.namespace, q.tag, q.key LIMIT 1) next
        )
        SELECT h.* FROM held h
         WHERE at_work_of_key(h.namespace, h.tag, h.key, 1, clock_timestamp()) = 0
           AND NOT EXISTS (SELECT FROM releases r WHERE r.namespace = h.namespace AND r.tag = h.tag AND r.key = h.key)
           AND NOT EXISTS (SELECT FROM worker_queue q
                            WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = h.namespace AND q.tag = h.tag AND q.key = h.key)
    LOOP
        -- Not even the item whose lease has ended is there, which would bring back others when it is done.
        IF lock_namespace(v_key.namespace) AND at_work_of_key(v_key.namespace, v_key.tag, v_key.key, 1, clock_timestamp()) = 0 THEN
            PERFORM bring_back(v_key.namespace, v_key.tag, v_key.key, 1), notify_queue('worker', 1, NULL, v_key.namespace);
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bring_back_left IS 'Internal: brings back an item of each key of which items are held, and none is at work or has been: somebody has removed rows of the queue by other means than the functions. Part of look.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_up_releases(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_free record;
    v_back bigint;
    v_gone bigint[] := '{}';
BEGIN
    FOR v_free IN
        SELECT f.namespace, f.tag, f.key, array_agg(f.id) AS ids
          FROM (SELECT r.* FROM releases r
                 WHERE r.namespace = ANY (p_namespaces) -- of any tag: nobody may ask for that of some any more
                 ORDER BY r.namespace, r.id LIMIT 1000 FOR UPDATE SKIP LOCKED) AS f
         GROUP BY f.namespace, f.tag, f.key
    LOOP
        v_back := bring_back(v_free.namespace, v_free.tag, v_free.key, cardinality(v_free.ids));
        -- For what is held still since somebody has locked it, the place stays free: it may not be removed after all.
        v_gone := v_gone || CASE WHEN v_back < cardinality(v_free.ids) AND EXISTS (
                SELECT FROM worker_queue q WHERE q.held_due IS NOT NULL AND q.namespace = v_free.namespace AND q.tag = v_free.tag AND q.key = v_free.key)
            THEN v_free.ids[:v_back] ELSE v_free.ids END;
    END LOOP;
    DELETE FROM releases r WHERE r.id = ANY (v_gone);
    -- As long as that costs less than to begin again.
    UPDATE limits l SET holding_since = NULL
      FROM (SELECT o.namespace FROM limits o
             WHERE o.queue = 'worker' AND o.namespace = ANY (p_namespaces) AND o.holding_since < clock_timestamp() - interval '10 s'
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.namespace = o.namespace AND q.held_due IS NOT NULL OFFSET 0)
             ORDER BY o.namespace FOR UPDATE SKIP LOCKED) AS over
     WHERE l.queue = 'worker' AND l.namespace = over.namespace;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_work(p_ids bigint[])
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION bury_work(p_ids bigint[], p_reason text, p_error text)
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
