-- Places of keys where nobody claims, since the namespace is paused: looks remove what is noted of them and is of no use, and bring back nothing
-- there. Who notes them keeps nobody from holding items where some are held.

-- +goose Up

-- bring_back_left, for each key of which items are held
CREATE INDEX releases_key_idx ON releases (namespace, tag, key) WHERE namespace IS NOT NULL; -- as releases_namespace_idx

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION note_releases(p_namespaces text[], p_tags text[], p_keys text[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
    v_holding   boolean;
    v_needed    text[] := '{}';
BEGIN
    FOR v_namespace, v_holding IN
        SELECT l.namespace, l.holding_since IS NOT NULL FROM limits l
         WHERE l.queue = 'worker' AND l.max_running_per_key IS NOT NULL AND l.namespace = ANY (p_namespaces)
    LOOP
        -- A transaction with other statements, or one that removes very much, may stay open for long, and have those look again and again who
        -- cannot hold an item. Where items are held already nobody needs to be kept from it: a row too many does no harm.
        IF v_holding OR statement_timestamp() > transaction_timestamp() + interval '2 ms' OR NOT reads_committed()
           OR NOT pg_try_advisory_xact_lock_shared(hashtext('pgwake releases of ' || current_schema()), hashtext(v_namespace)) THEN
            v_needed := v_needed || v_namespace;
        -- Only what is seen now, with the lock, is good until the end.
        ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = v_namespace AND l.holding_since IS NOT NULL) THEN
            v_needed := v_needed || v_namespace;
        END IF;
    END LOOP;
    IF v_needed <> '{}' THEN
        INSERT INTO releases (namespace, tag, key)
        SELECT r.namespace, r.tag, r.key FROM unnest(p_namespaces, p_tags, p_keys) AS r (namespace, tag, key)
         WHERE r.key IS NOT NULL AND r.namespace = ANY (v_needed);
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    RETURN EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.max_running IS NOT NULL AND l.namespace = ANY (p_namespaces));
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
    v_key       record;
    v_namespace text;
    v_refused   text;   -- a namespace whose lock somebody else has
    v_after     bigint; -- is what is left of those up to here
BEGIN
    -- Where more are noted than one claim takes up, nobody claims: or they became ever more, with whatever is enqueued and removed there.
    FOR v_namespace IN
        SELECT l.namespace FROM limits l WHERE l.queue = 'worker' AND EXISTS (SELECT FROM releases r WHERE r.namespace = l.namespace OFFSET 1000)
    LOOP
        v_after := 0;
        WHILE v_after IS NOT NULL AND clock_timestamp() < statement_timestamp() + interval '500 ms' AND lock_namespace(v_namespace) LOOP
            -- Nobody holds items meanwhile. So of no use is what is for a key of which none is held, and more than there are places.
            WITH batch AS (
                SELECT r.* FROM releases r WHERE r.namespace = v_namespace AND r.id > v_after ORDER BY r.id LIMIT 1000 FOR UPDATE SKIP LOCKED
            ), useless AS (
                DELETE FROM releases r
                 USING (SELECT b.*, row_number() OVER (PARTITION BY b.tag, b.key) > l.max_running_per_key AS many
                          FROM batch b JOIN limits l ON l.queue = 'worker' AND l.namespace = b.namespace) AS noted
                 WHERE r.id = ANY (ARRAY[noted.id])
                   AND (noted.many OR NOT EXISTS (SELECT FROM worker_queue q WHERE q.held_due IS NOT NULL AND q.namespace = noted.namespace
                                                                               AND q.tag = noted.tag AND q.key = noted.key OFFSET 0))
            )
            SELECT max(b.id) INTO v_after FROM batch b;
        END LOOP;
    END LOOP;
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
           -- What is paused stays as it is, or each look brought back another: whose places they are is seen when it is resumed.
           AND NOT EXISTS (SELECT FROM limits p WHERE p.queue = 'worker' AND p.paused AND p.namespace IN (k.namespace, '*') OFFSET 0)
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
COMMENT ON FUNCTION bring_back_left IS 'Internal: brings back an item of each key of which items are held, and fewer are at work, or have been, than may be: somebody has removed rows of the queue by other means than the functions. It may also be one too many, which the next claim holds again. Of namespaces that are not paused. Part of look.';

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

DROP INDEX releases_key_idx;

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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION note_releases(p_namespaces text[], p_tags text[], p_keys text[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
    v_needed    text[] := '{}';
BEGIN
    FOR v_namespace IN
        SELECT l.namespace FROM limits l
         WHERE l.queue = 'worker' AND l.max_running_per_key IS NOT NULL AND l.namespace = ANY (p_namespaces)
    LOOP
        -- A transaction with other statements may stay open for long, and have those look again and again who cannot hold an item.
        IF statement_timestamp() > transaction_timestamp() + interval '2 ms' OR NOT reads_committed()
           OR NOT pg_try_advisory_xact_lock_shared(hashtext('pgwake releases of ' || current_schema()), hashtext(v_namespace)) THEN
            v_needed := v_needed || v_namespace;
        -- Only what is seen now, with the lock, is good until the end.
        ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = v_namespace AND l.holding_since IS NOT NULL) THEN
            v_needed := v_needed || v_namespace;
        END IF;
    END LOOP;
    IF v_needed <> '{}' THEN
        INSERT INTO releases (namespace, tag, key)
        SELECT r.namespace, r.tag, r.key FROM unnest(p_namespaces, p_tags, p_keys) AS r (namespace, tag, key)
         WHERE r.key IS NOT NULL AND r.namespace = ANY (v_needed);
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    RETURN EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.max_running IS NOT NULL AND l.namespace = ANY (p_namespaces));
END
$$;
-- +goose StatementEnd
