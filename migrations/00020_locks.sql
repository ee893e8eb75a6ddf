-- A transaction takes about a thousand advisory locks of a kind at most. All that are held at one time have to fit into the server's table of locks, which has
-- 64 of them for each connection that may be, and whoever needs one more fails, also those who have none.
--
-- Where limits hold in more than a thousand namespaces, a look is at a hundred of them. Nothing is claimed there but under their locks, so
-- the others are as if somebody else was claiming there: what is due stays due, and earliest_limited says so.
--
-- Literals are read alike in all sessions.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lock_items(p_ids bigint[], p_sessions text[], p_limit integer, p_owner text, p_now timestamptz)
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
    v_new     boolean;
    v_vain    integer := 0; -- how many were locked, and had nothing to be got
BEGIN
    FOR i IN 1 .. coalesce(cardinality(p_ids), 0) LOOP
        EXIT WHEN cardinality(v_got) >= p_limit;
        CONTINUE WHEN p_sessions[i] = ANY (v_refused) OR p_sessions[i] IS NOT NULL AND cardinality(v_locked) >= 1000; -- the next look begins after these
        v_new := p_sessions[i] IS NOT NULL AND p_sessions[i] <> ALL (v_locked);
        IF v_new THEN
            IF v_vain >= 100 THEN -- somebody has very many items locked: first the item, or those sessions were all that this looks at
                PERFORM FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now FOR UPDATE SKIP LOCKED;
                IF NOT FOUND THEN
                    IF EXISTS (SELECT FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now) THEN
                        v_refused := v_refused || p_sessions[i];
                    END IF;
                    CONTINUE;
                END IF;
            END IF;
            IF NOT lock_session(p_sessions[i], p_owner, p_now) THEN
                v_refused := v_refused || p_sessions[i];
                CONTINUE;
            END IF;
            v_locked := v_locked || p_sessions[i];
        END IF;
        PERFORM FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            v_got := v_got || p_ids[i];
        ELSIF p_sessions[i] IS NOT NULL THEN
            IF EXISTS (SELECT FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now) THEN
                v_refused := v_refused || p_sessions[i]; -- somebody has it locked, and what comes after it is not to be before it
            END IF;
            v_vain := v_vain + v_new::integer;
        END IF;
    END LOOP;
    RETURN v_got;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_items IS 'Internal: locks the first p_limit of these items that are due and that p_owner may claim, in order, and their sessions: those of a thousand sessions at most.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pick_limited(
    p_now timestamptz, p_limit integer, p_namespaces text[], p_tags text[], p_owner text, p_fair boolean)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_picked     bigint[] := '{}';
    v_namespace  text;
    v_spaces     text[];    -- namespaces with limits in which something is
    v_maxes      integer[]; -- of those
    v_count      integer;
    v_many       boolean;
    v_seen       integer := 0;
    v_refused    integer := 0;
    v_taken      integer := 0; -- locks
    v_locked     text[]; -- namespaces with limits
    v_full       text[]; -- of those
    v_holding    text[] := '{}'; -- those whose items may be held
    v_unheld     text[]; -- and those where one would be, if it might
    v_unmarked   bigint[]; -- items whose keys are left alone
    v_begun      boolean;
    v_keyed      boolean;
    v_want       integer;
    v_candidates bigint[];
    v_sessions   text[]; -- of those
    v_got        bigint[];
    v_moved      bigint[];
    v_cut        boolean;
    v_spare      integer;
    v_moves      integer := 0;
    v_max        integer;
BEGIN
    SELECT coalesce(array_agg(c.namespace ORDER BY c.namespace), '{}'), array_agg(c.max_running ORDER BY c.namespace) INTO v_spaces, v_maxes
      FROM (SELECT l.namespace, l.max_running FROM limits l
             WHERE l.queue = 'worker' AND l.holds AND NOT l.paused AND (p_namespaces IS NULL OR l.namespace = ANY (p_namespaces))
               AND EXISTS (SELECT FROM work_lists(ARRAY[l.namespace], p_tags))) AS c;
    v_count := cardinality(v_spaces);
    -- Locks are few on a server. Of very many a look takes a hundred that may have something for it, and that are free, and the next hundred only
    -- if it got nothing. It has them in any order, so that each has the same chance: and in the same if it is the same look, of which p_now is the
    -- instant, and which is here once more after it has made dead letters.
    v_many := v_count > 1000;
    IF v_many THEN
        SELECT array_agg(s.namespace ORDER BY s.lot, s.namespace), array_agg(s.max_running ORDER BY s.lot, s.namespace) INTO v_spaces, v_maxes
          FROM (SELECT c.*, hashtextextended(c.namespace, (extract(epoch FROM p_now) * 1000000)::bigint) AS lot
                  FROM unnest(v_spaces, v_maxes) AS c (namespace, max_running)) AS s;
    END IF;

    LOOP
        v_locked := '{}';
        v_full := '{}';
        WHILE v_seen < v_count AND (NOT v_many OR cardinality(v_locked) < 100) LOOP -- in order unless they are many, so that two claims cannot deadlock
            v_seen := v_seen + 1;
            v_namespace := v_spaces[v_seen];
            v_max := v_maxes[v_seen];
            IF v_many THEN
                -- As earliest_limited sees it. Where items are marked, who has the lock finds out how many there are at work.
                CONTINUE WHEN NOT EXISTS (SELECT FROM releases r WHERE r.namespace = v_namespace)
                    AND NOT EXISTS (
                        SELECT FROM work_lists(ARRAY[v_namespace], p_tags) AS w CROSS JOIN generate_series(0, 9) AS level (priority)
                         CROSS JOIN LATERAL (
                               SELECT FROM worker_queue q
                                WHERE q.namespace = w.namespace AND q.tag = w.tag AND q.priority = level.priority
                                  AND q.session_id IS NULL AND q.visible_at <= p_now
                                ORDER BY q.visible_at LIMIT 1) head
                         WHERE v_max IS NULL OR EXISTS (SELECT FROM marking m WHERE m.namespace = v_namespace) OR NOT EXISTS (
                               SELECT FROM worker_queue q
                                WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = v_namespace AND q.visible_at > p_now OFFSET v_max - 1));
                CONTINUE WHEN NOT lock_namespace(v_namespace, '0'); -- nobody waits, or the order would matter
            ELSE
                -- Nor for many of them, each for a while: they may all be with one who does not come to his end.
                IF NOT lock_namespace(v_namespace, CASE WHEN v_refused < 2 THEN '20ms' ELSE '0' END) THEN
                    v_refused := v_refused + 1;
                    CONTINUE;
                END IF;
            END IF;
            v_locked := v_locked || v_namespace;
            IF EXISTS (SELECT FROM marking m WHERE m.namespace = v_namespace) THEN
                PERFORM mark_running(v_namespace, p_now);
            END IF;
            IF v_max IS NOT NULL AND at_work(v_namespace, v_max, p_now) >= v_max THEN
                v_full := v_full || v_namespace;
            END IF;
        END LOOP;
        IF EXISTS (SELECT FROM releases r WHERE r.namespace = ANY (v_locked)) THEN
            PERFORM take_up_releases(v_locked);
        END IF;
        v_holding := ARRAY(SELECT l.namespace FROM limits l
                            WHERE l.queue = 'worker' AND l.namespace = ANY (v_locked) AND l.holding_since IS NOT NULL AND keep_releasing(l.namespace));
        v_taken := v_taken + cardinality(v_locked) + cardinality(v_holding);
        v_keyed := EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = ANY (v_locked)
                              AND (l.max_running_per_key IS NOT NULL OR l.rate_interval IS NOT NULL));
        v_unmarked := ARRAY(SELECT unnest(m.items) FROM marking m JOIN limits l ON l.queue = 'worker' AND l.namespace = m.namespace
                             WHERE m.namespace = ANY (v_locked) AND l.max_running_per_key IS NOT NULL);
        v_want := CASE WHEN v_keyed THEN greatest(p_limit, 10) ELSE p_limit END;

        v_spare := 32;
        LOOP
            v_moved := '{}';
            v_unheld := '{}';
            -- Where limits hold nothing is claimed but under the lock. It may be with others, or the first items may have come just now.
            WITH list AS MATERIALIZED (
                SELECT w.namespace, w.tag, coalesce(l.weight, 1) AS weight
                  FROM work_lists(p_namespaces, p_tags) AS w
                  LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[w.namespace])
                 WHERE w.namespace <> ALL (v_full) AND (w.namespace = ANY (v_locked) OR l.holds IS NOT TRUE)
            ), head AS MATERIALIZED (
                SELECT h.id, h.priority, h.visible_at, h.namespace, l.weight, h.place, NULL::text AS session_id
                  FROM list l
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.namespace, q.priority, q.visible_at, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE q.namespace = l.namespace AND q.tag = l.tag AND q.priority = level.priority
                          AND q.session_id IS NULL AND q.visible_at <= p_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_want + v_spare) h
                UNION ALL -- no limit holds for those, nor does it matter that others have locked their namespace
                SELECT h.id, h.priority, h.visible_at, h.namespace, coalesce(l.weight, 1), h.place, h.session_id
                  FROM session_lists(p_owner, p_now) AS list
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.namespace, q.priority, q.visible_at, q.session_id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                         FROM worker_queue q
                        WHERE q.session_id = list.session_id AND q.visible_at <= p_now
                          AND (p_namespaces IS NULL OR q.namespace = ANY (p_namespaces)) AND (p_tags IS NULL OR q.tag = ANY (p_tags))
                        ORDER BY q.visible_at, q.id
                        LIMIT v_want + 32) h -- as in pick_work
                  LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[h.namespace])
                 WHERE p_owner IS NOT NULL AND list.free_at IS NULL
            ), draw AS MATERIALIZED ( -- of a lottery, in which each namespace has chances by its weight: the lot of its first item counts
                SELECT h.*, CASE WHEN p_fair THEN -ln(1 - random()) / h.weight END AS lot FROM head h
            ), line AS (
                SELECT d.*, CASE WHEN p_fair THEN first_value(d.lot) OVER own + (row_number() OVER own - 1) / d.weight::float8 ELSE 0 END AS turn
                  FROM draw d
                WINDOW own AS (PARTITION BY d.namespace ORDER BY d.priority DESC, d.visible_at, d.id)
            )
            SELECT array_agg(l.id ORDER BY l.turn, l.priority DESC, l.visible_at, l.id),
                   array_agg(l.session_id ORDER BY l.turn, l.priority DESC, l.visible_at, l.id), coalesce(bool_or(l.place = v_want + v_spare), false)
              INTO v_candidates, v_sessions, v_cut FROM line l;
            IF v_unmarked <> '{}' THEN
                SELECT array_agg(c.id ORDER BY c.ord), array_agg(c.session_id ORDER BY c.ord) INTO v_candidates, v_sessions
                  FROM unnest(v_candidates, v_sessions) WITH ORDINALITY AS c (id, session_id, ord)
                  JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
                 WHERE NOT EXISTS (SELECT FROM worker_queue w WHERE w.id = ANY (v_unmarked) AND w.namespace = q.namespace AND w.tag = q.tag AND w.key = q.key);
            END IF;
            IF array_remove(v_sessions, NULL) <> '{}' THEN
                v_got := lock_items(v_candidates, v_sessions, v_want, p_owner, p_now);
            ELSE
                v_got := ARRAY(
                    SELECT q.id FROM unnest(v_candidates) WITH ORDINALITY AS c (id, ord)
                      JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
                     WHERE q.visible_at <= p_now
                     ORDER BY c.ord LIMIT v_want FOR UPDATE OF q SKIP LOCKED);
            END IF;
            IF cardinality(v_locked) = 0 THEN
                v_picked := v_got;
            ELSE
                SELECT * INTO v_picked, v_moved, v_unheld FROM allot(v_got, p_limit, v_holding, p_now);
                v_moves := v_moves + cardinality(v_moved);
            END IF;
            v_begun := false;
            FOREACH v_namespace IN ARRAY v_unheld LOOP
                IF begin_holding(v_namespace) THEN
                    v_holding := v_holding || v_namespace;
                    v_begun := true;
                END IF;
            END LOOP;
            CONTINUE WHEN v_begun AND cardinality(v_picked) = 0;
            IF cardinality(v_picked) = 0 AND cardinality(v_unheld) > 0 AND cardinality(v_got) >= v_want AND v_want < 100 THEN
                v_want := 100; -- past those of full keys that nobody may hold at this moment
                CONTINUE;
            END IF;
            EXIT WHEN cardinality(v_picked) > 0 OR cardinality(v_unheld) > 0 OR (NOT v_cut AND cardinality(v_moved) = 0) OR v_moves >= 1000;
            IF cardinality(v_moved) > 0 THEN
                v_want := greatest(v_want, 100);
            ELSE
                v_spare := v_spare * 8;
            END IF;
        END LOOP;
        EXIT WHEN cardinality(v_picked) > 0 OR v_seen = v_count OR v_moves >= 1000 OR v_taken >= 1000;
    END LOOP;
    RETURN v_picked;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pick_limited IS 'Internal: pick_work where there are limits, or where namespaces take turns (p_fair). Of those that others have locked, or are claiming, nothing is said: they are due still. Nor of those that it has not come to: where more than a thousand namespaces with limits have items, it is about a hundred of them that may have one to claim, from any on, and about a thousand if it gets nothing.';

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
    v_locks     integer := 0; -- that this may have taken: they are few on a server
BEGIN
    FOR v_namespace, v_holding IN
        SELECT l.namespace, l.holding_since IS NOT NULL FROM limits l
         WHERE l.queue = 'worker' AND l.max_running_per_key IS NOT NULL AND l.namespace = ANY (p_namespaces)
    LOOP
        -- A transaction with other statements, or one that removes very much, may stay open for long, and have those look again and again who
        -- cannot hold an item. Where items are held already nobody needs to be kept from it: a row too many does no harm.
        v_locks := v_locks + 1;
        IF v_holding OR v_locks > 1000 OR statement_timestamp() > transaction_timestamp() + interval '2 ms' OR NOT reads_committed()
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
    v_last      text;   -- a namespace whose lock this has
    v_locks     integer := 0;
    v_vain      integer := 0; -- locks that somebody else has
    v_first     text := ''; -- the namespace to begin with
    v_from      text;
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
    -- Of very many a look is at a thousand, from any on: where nobody claims, what is left stays for long.
    IF EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' OFFSET 1000) THEN
        v_first := coalesce((SELECT l.namespace FROM limits l WHERE l.queue = 'worker' AND l.max_running_per_key IS NOT NULL ORDER BY random() LIMIT 1), '');
    END IF;
    FOREACH v_from IN ARRAY CASE v_first WHEN '' THEN ARRAY[''] ELSE ARRAY[v_first, ''] END LOOP
        FOR v_key IN
            WITH RECURSIVE held AS (
                (SELECT q.namespace, q.tag, q.key FROM worker_queue q WHERE q.held_due IS NOT NULL AND q.namespace >= v_from
                  ORDER BY q.namespace, q.tag, q.key LIMIT 1)
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
            EXIT WHEN v_from < v_first AND v_key.namespace >= v_first;
            CONTINUE WHEN v_key.namespace = v_refused;
            IF v_key.namespace IS DISTINCT FROM v_last THEN
                EXIT WHEN v_locks >= 1000;
                v_locks := v_locks + 1;
                v_last := v_key.namespace;
            END IF;
            IF NOT lock_namespace(v_key.namespace, CASE WHEN v_vain < 2 THEN '20ms' ELSE '0' END) THEN -- as in pick_limited
                v_refused := v_key.namespace; -- or this waited for it once for each of its keys
                v_vain := v_vain + 1;
            ELSIF at_work_of_key(v_key.namespace, v_key.tag, v_key.key, v_key.places, clock_timestamp()) < v_key.places THEN
                -- One each time: of those that are due, and that a place is for, nobody knows without a walk over all that waits.
                PERFORM bring_back(v_key.namespace, v_key.tag, v_key.key, 1), notify_queue('worker', 1, NULL, v_key.namespace);
            END IF;
        END LOOP;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- With standard_conforming_strings off a backslash in a literal is something else. What is read by those that a role has set so stays what it is.
ALTER FUNCTION enqueue_work_many SET standard_conforming_strings = on;
ALTER FUNCTION enqueue_message_many SET standard_conforming_strings = on;

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

ALTER FUNCTION enqueue_message_many RESET standard_conforming_strings;
ALTER FUNCTION enqueue_work_many RESET standard_conforming_strings;

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
CREATE OR REPLACE FUNCTION pick_limited(
    p_now timestamptz, p_limit integer, p_namespaces text[], p_tags text[], p_owner text, p_fair boolean)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_picked     bigint[] := '{}';
    v_namespace  text;
    v_locked     text[] := '{}'; -- namespaces with limits
    v_full       text[] := '{}'; -- of those
    v_holding    text[] := '{}'; -- those whose items may be held
    v_unheld     text[]; -- and those where one would be, if it might
    v_unmarked   bigint[]; -- items whose keys are left alone
    v_begun      boolean;
    v_keyed      boolean;
    v_want       integer;
    v_candidates bigint[];
    v_sessions   text[]; -- of those
    v_got        bigint[];
    v_moved      bigint[];
    v_cut        boolean;
    v_spare      integer := 32;
    v_moves      integer := 0;
    v_max        integer;
BEGIN
    FOR v_namespace, v_max IN
        SELECT l.namespace, l.max_running FROM limits l
         WHERE l.queue = 'worker' AND l.holds AND NOT l.paused AND (p_namespaces IS NULL OR l.namespace = ANY (p_namespaces))
           AND EXISTS (SELECT FROM work_lists(ARRAY[l.namespace], p_tags))
         ORDER BY l.namespace -- so that two claims cannot deadlock
    LOOP
        CONTINUE WHEN NOT lock_namespace(v_namespace);
        v_locked := v_locked || v_namespace;
        IF EXISTS (SELECT FROM marking m WHERE m.namespace = v_namespace) THEN
            PERFORM mark_running(v_namespace, p_now);
        END IF;
        IF v_max IS NOT NULL AND at_work(v_namespace, v_max, p_now) >= v_max THEN
            v_full := v_full || v_namespace;
        END IF;
    END LOOP;
    IF EXISTS (SELECT FROM releases r WHERE r.namespace = ANY (v_locked)) THEN
        PERFORM take_up_releases(v_locked);
    END IF;
    v_holding := ARRAY(SELECT l.namespace FROM limits l
                        WHERE l.queue = 'worker' AND l.namespace = ANY (v_locked) AND l.holding_since IS NOT NULL AND keep_releasing(l.namespace));
    v_keyed := EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = ANY (v_locked)
                          AND (l.max_running_per_key IS NOT NULL OR l.rate_interval IS NOT NULL));
    v_unmarked := ARRAY(SELECT unnest(m.items) FROM marking m JOIN limits l ON l.queue = 'worker' AND l.namespace = m.namespace
                         WHERE m.namespace = ANY (v_locked) AND l.max_running_per_key IS NOT NULL);
    v_want := CASE WHEN v_keyed THEN greatest(p_limit, 10) ELSE p_limit END;

    LOOP
        v_moved := '{}';
        v_unheld := '{}';
        -- Where limits hold nothing is claimed but under the lock. It may be with others, or the first items may have come just now.
        WITH list AS MATERIALIZED (
            SELECT w.namespace, w.tag, coalesce(l.weight, 1) AS weight
              FROM work_lists(p_namespaces, p_tags) AS w
              LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[w.namespace])
             WHERE w.namespace <> ALL (v_full) AND (w.namespace = ANY (v_locked) OR l.holds IS NOT TRUE)
        ), head AS MATERIALIZED (
            SELECT h.id, h.priority, h.visible_at, h.namespace, l.weight, h.place, NULL::text AS session_id
              FROM list l
             CROSS JOIN generate_series(0, 9) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id, q.namespace, q.priority, q.visible_at, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                     FROM worker_queue q
                    WHERE q.namespace = l.namespace AND q.tag = l.tag AND q.priority = level.priority
                      AND q.session_id IS NULL AND q.visible_at <= p_now
                    ORDER BY q.visible_at, q.id
                    LIMIT v_want + v_spare) h
            UNION ALL -- no limit holds for those, nor does it matter that others have locked their namespace
            SELECT h.id, h.priority, h.visible_at, h.namespace, coalesce(l.weight, 1), h.place, h.session_id
              FROM session_lists(p_owner, p_now) AS list
             CROSS JOIN LATERAL (
                   SELECT q.id, q.namespace, q.priority, q.visible_at, q.session_id, row_number() OVER (ORDER BY q.visible_at, q.id) AS place
                     FROM worker_queue q
                    WHERE q.session_id = list.session_id AND q.visible_at <= p_now
                      AND (p_namespaces IS NULL OR q.namespace = ANY (p_namespaces)) AND (p_tags IS NULL OR q.tag = ANY (p_tags))
                    ORDER BY q.visible_at, q.id
                    LIMIT v_want + 32) h -- as in pick_work
              LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[h.namespace])
             WHERE p_owner IS NOT NULL AND list.free_at IS NULL
        ), draw AS MATERIALIZED ( -- of a lottery, in which each namespace has chances by its weight: the lot of its first item counts
            SELECT h.*, CASE WHEN p_fair THEN -ln(1 - random()) / h.weight END AS lot FROM head h
        ), line AS (
            SELECT d.*, CASE WHEN p_fair THEN first_value(d.lot) OVER own + (row_number() OVER own - 1) / d.weight::float8 ELSE 0 END AS turn
              FROM draw d
            WINDOW own AS (PARTITION BY d.namespace ORDER BY d.priority DESC, d.visible_at, d.id)
        )
        SELECT array_agg(l.id ORDER BY l.turn, l.priority DESC, l.visible_at, l.id),
               array_agg(l.session_id ORDER BY l.turn, l.priority DESC, l.visible_at, l.id), coalesce(bool_or(l.place = v_want + v_spare), false)
          INTO v_candidates, v_sessions, v_cut FROM line l;
        IF v_unmarked <> '{}' THEN
            SELECT array_agg(c.id ORDER BY c.ord), array_agg(c.session_id ORDER BY c.ord) INTO v_candidates, v_sessions
              FROM unnest(v_candidates, v_sessions) WITH ORDINALITY AS c (id, session_id, ord)
              JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
             WHERE NOT EXISTS (SELECT FROM worker_queue w WHERE w.id = ANY (v_unmarked) AND w.namespace = q.namespace AND w.tag = q.tag AND w.key = q.key);
        END IF;
        IF array_remove(v_sessions, NULL) <> '{}' THEN
            v_got := lock_items(v_candidates, v_sessions, v_want, p_owner, p_now);
        ELSE
            v_got := ARRAY(
                SELECT q.id FROM unnest(v_candidates) WITH ORDINALITY AS c (id, ord)
                  JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
                 WHERE q.visible_at <= p_now
                 ORDER BY c.ord LIMIT v_want FOR UPDATE OF q SKIP LOCKED);
        END IF;
        IF cardinality(v_locked) = 0 THEN
            v_picked := v_got;
        ELSE
            SELECT * INTO v_picked, v_moved, v_unheld FROM allot(v_got, p_limit, v_holding, p_now);
            v_moves := v_moves + cardinality(v_moved);
        END IF;
        v_begun := false;
        FOREACH v_namespace IN ARRAY v_unheld LOOP
            IF begin_holding(v_namespace) THEN
                v_holding := v_holding || v_namespace;
                v_begun := true;
            END IF;
        END LOOP;
        CONTINUE WHEN v_begun AND cardinality(v_picked) = 0;
        EXIT WHEN cardinality(v_picked) > 0 OR cardinality(v_unheld) > 0 OR (NOT v_cut AND cardinality(v_moved) = 0) OR v_moves >= 1000;
        IF cardinality(v_moved) > 0 THEN
            v_want := greatest(v_want, 100);
        ELSE
            v_spare := v_spare * 8;
        END IF;
    END LOOP;
    RETURN v_picked;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pick_limited IS 'Internal: pick_work where there are limits, or where namespaces take turns (p_fair). Of those that others have locked, or are claiming, nothing is said: they are due still.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lock_items(p_ids bigint[], p_sessions text[], p_limit integer, p_owner text, p_now timestamptz)
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
        ELSIF p_sessions[i] IS NOT NULL AND EXISTS (SELECT FROM worker_queue q WHERE q.id = p_ids[i] AND q.visible_at <= p_now) THEN
            v_refused := v_refused || p_sessions[i]; -- somebody has it locked, and what comes after it is not to be before it
        END IF;
    END LOOP;
    RETURN v_got;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_items IS 'Internal: locks the first p_limit of these items that are due and that p_owner may claim, in order, and their sessions.';
