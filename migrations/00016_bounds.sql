-- What one producer or one turn can make large stops nobody else: the key-value pairs of an instance are bounded, a slow rate counts no further than
-- there is time, and notes whose instances are locked let others pass.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION apply_kv(p_instance text, p_execution bigint, p_ops text[], p_keys text[], p_values text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_cleared integer := coalesce((SELECT max(u.ord) FROM unnest(p_ops) WITH ORDINALITY AS u (op, ord) WHERE u.op = 'clear_all'), 0);
BEGIN
    IF cardinality(p_ops) > 0 AND NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'instance % is unknown and can have no key-value pairs', p_instance USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(p_ops, p_keys, p_values) AS u (op, key, value)
         WHERE CASE u.op WHEN 'clear_all' THEN false
                         WHEN 'clear' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255
                         WHEN 'set' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255 OR u.value IS NULL
                         ELSE true END) THEN
        RAISE EXCEPTION 'a key-value update of instance % is neither set, with a key and a value, nor clear, with a key, nor clear_all', p_instance
            USING ERRCODE = 'PW003';
    END IF;

    -- Of the updates after the last clear_all, the last one of each key counts.
    IF v_cleared > 0 THEN
        DELETE FROM kv_delta d WHERE d.instance_id = p_instance;
        INSERT INTO kv_delta (instance_id, key, value, execution_id)
        SELECT s.instance_id, s.key, NULL, p_execution FROM kv_store s WHERE s.instance_id = p_instance;
    END IF;
    INSERT INTO kv_delta (instance_id, key, value, execution_id)
    SELECT DISTINCT ON (u.key) p_instance, u.key, CASE u.op WHEN 'set' THEN u.value END, p_execution
      FROM unnest(p_ops, p_keys, p_values) WITH ORDINALITY AS u (op, key, value, ord)
     WHERE u.ord > v_cleared
     ORDER BY u.key, u.ord DESC
    ON CONFLICT (instance_id, key) DO UPDATE SET value = excluded.value, execution_id = excluded.execution_id;

    -- All that an instance has is one value in each claim of a turn of it, and a value that the server cannot make stops the claims of all. A byte may
    -- become six there, and there are nine more around a pair: so these are less than 1 GB with attributes of 128 MiB. No value is read for its length.
    IF 'set' = ANY (p_ops) AND (
        SELECT sum(octet_length(k.key) + octet_length(k.value) + 2) > 134217728
          FROM (SELECT d.key, d.value FROM kv_delta d WHERE d.instance_id = p_instance AND d.value IS NOT NULL
                 UNION ALL
                SELECT s.key, s.value FROM kv_store s
                 WHERE s.instance_id = p_instance
                   AND NOT EXISTS (SELECT FROM kv_delta d WHERE d.instance_id = p_instance AND d.key = s.key OFFSET 0)) AS k) THEN
        RAISE EXCEPTION 'the key-value pairs of instance % would come to more than 128 MiB', p_instance USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION allot(p_ids bigint[], p_limit integer, p_holding text[], p_now timestamptz, OUT picked bigint[], OUT moved bigint[], OUT unheld text[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_never  CONSTANT timestamptz := '9999-12-30 00:00:00+00'; -- or a few thousand items of a slow key would leave the range of the type
    v_chosen bigint[];
    v_late   bigint[];
    v_ats    timestamptz[];
    v_shares timestamptz[];
    v_ords   bigint[];
    v_oldest bigint[];
BEGIN
    WITH item AS (
        SELECT q.id, q.namespace, q.tag, q.key, g.ord, l.max_running, CASE WHEN q.key IS NOT NULL THEN l.max_running_per_key END AS per_key,
               row_number() OVER (PARTITION BY q.namespace, q.tag, q.key ORDER BY g.ord) AS of_key
          FROM unnest(p_ids) WITH ORDINALITY AS g (id, ord)
          JOIN worker_queue q ON q.id = ANY (ARRAY[g.id])
          LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace]) AND q.session_id IS NULL
    ), counted AS MATERIALIZED ( -- once for each key, at its first item
        SELECT i.*, coalesce(i.of_key <= max(i.per_key - CASE WHEN taken.ended THEN at_work_of_key(i.namespace, i.tag, i.key, i.per_key, p_now) ELSE taken.places END)
                                         OVER (PARTITION BY i.namespace, i.tag, i.key), true) AS may
          FROM item i
          LEFT JOIN LATERAL (
               SELECT count(*) AS places, coalesce(bool_or(w.visible_at <= p_now), false) AS ended
                 FROM (SELECT q.visible_at FROM worker_queue q
                        WHERE i.of_key = 1 AND i.per_key IS NOT NULL
                          AND q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = i.namespace AND q.tag = i.tag AND q.key = i.key
                        ORDER BY q.visible_at DESC LIMIT i.per_key) AS w
                HAVING i.of_key = 1) AS taken ON true
    ), namespace AS MATERIALIZED (
        SELECT n.*, n.max_running - at_work(n.namespace, n.max_running, p_now) AS free
          FROM (SELECT DISTINCT i.namespace, i.max_running FROM counted i WHERE i.max_running IS NOT NULL) AS n
    ), of_namespace AS (
        SELECT i.*, i.may AND coalesce(row_number() OVER (PARTITION BY i.namespace, i.max_running, i.may ORDER BY i.ord) <= n.free, true) AS can
          FROM counted i LEFT JOIN namespace n ON n.namespace = i.namespace AND n.max_running = i.max_running
    )
    SELECT coalesce(array_agg(i.id ORDER BY i.ord) FILTER (WHERE i.can), '{}'),
           coalesce(array_agg(i.id ORDER BY i.ord) FILTER (WHERE NOT i.may AND i.namespace = ANY (p_holding)), '{}'),
           coalesce(array_agg(DISTINCT i.namespace) FILTER (WHERE NOT i.may AND i.namespace <> ALL (p_holding)), '{}')
      INTO v_chosen, moved, unheld FROM of_namespace i;
    -- With the first p_limit of them, all of the others whose key has had its share, or each would be found by a look of its own.
    v_chosen := v_chosen[:p_limit] || ARRAY(
        SELECT q.id FROM unnest(v_chosen[p_limit + 1:]) WITH ORDINALITY AS c (id, ord)
          JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
          JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
          JOIN rates r ON r.namespace = ANY (ARRAY[q.namespace]) AND r.tag = q.tag AND r.key = q.key
         WHERE NOT q.charged AND l.rate_interval IS NOT NULL AND r.tat > p_now + (l.rate_burst - 1) * l.rate_interval
         ORDER BY c.ord);

    -- Of each key the first of these that have not paid, in order, take the next shares that it has (GCRA): the last was
    -- taken for tat, one more is there each rate_interval, and rate_burst of them may be there at once. Who has taken one that is
    -- still to come is due then. If nobody claims at that time, too many are due at once after it. So the clock of a key, by which
    -- shares are there (share_at), is behind by lag: by as much as the first of these is late, beyond a burst, once that is half an
    -- interval more than it is behind. All shares of the key, taken or not, are later by that, in their order. As others may have
    -- locked an item while those behind it go, what begins is counted too (begun), and may be half an interval early.
    IF EXISTS (SELECT FROM worker_queue q JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
                WHERE q.id = ANY (v_chosen) AND q.key IS NOT NULL AND (NOT q.charged OR q.share_at IS NOT NULL) AND l.rate_interval IS NOT NULL) THEN
        -- One that was moved on is due later than others whose shares come after its own. Of those that are due, the oldest shares
        -- go first: as many of each key as there are here, and so they can take the places of these.
        WITH place AS MATERIALIZED (
            SELECT q.namespace, q.tag, q.key, c.ord
              FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord)
              JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
              JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
             WHERE q.key IS NOT NULL AND q.charged AND q.share_at IS NOT NULL AND l.rate_interval IS NOT NULL
        ), oldest AS MATERIALIZED (
            SELECT k.namespace, k.tag, k.key, o.id, o.share_at
              FROM (SELECT p.namespace, p.tag, p.key, count(*) AS places FROM place p GROUP BY p.namespace, p.tag, p.key) AS k
             CROSS JOIN LATERAL (
                   SELECT w.id, w.share_at FROM worker_queue w
                    WHERE w.namespace = k.namespace AND w.tag = k.tag AND w.key = k.key AND w.charged AND w.share_at IS NOT NULL AND w.visible_at <= p_now
                    ORDER BY w.share_at LIMIT k.places FOR UPDATE SKIP LOCKED) o
        )
        SELECT (SELECT array_agg(p.ord ORDER BY p.namespace, p.tag, p.key, p.ord) FROM place p),
               (SELECT array_agg(o.id ORDER BY o.namespace, o.tag, o.key, o.share_at, o.id) FROM oldest o)
          INTO v_ords, v_oldest;
        FOR i IN 1 .. coalesce(cardinality(v_ords), 0) LOOP
            v_chosen[v_ords[i]] := v_oldest[i];
        END LOOP;
        moved := ARRAY(SELECT m.id FROM unnest(moved) AS m (id) WHERE m.id <> ALL (v_chosen)); -- another is in its place: it is due still

        WITH due AS MATERIALIZED (
            SELECT q.id, q.namespace, q.tag, q.key, c.ord, q.charged, q.share_at, l.rate_interval AS step, l.rate_burst AS burst,
                   r.tat, r.begun, coalesce(r.lag, '0') AS lag,
                   row_number() OVER (PARTITION BY q.namespace, q.tag, q.key, q.charged ORDER BY c.ord) AS n,
                   -- so many shares on, a key is past the last instant that one is given for
                   l.rate_burst + (extract(epoch FROM v_never - p_now) / greatest(extract(epoch FROM l.rate_interval), 0.000001))::bigint + 1 AS most,
                   p_now - (min(q.share_at) FILTER (WHERE q.charged) OVER (PARTITION BY q.namespace, q.tag, q.key) + (l.rate_burst - 1) * l.rate_interval) AS late
              FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord)
              JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
              JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
              LEFT JOIN rates r ON r.namespace = ANY (ARRAY[q.namespace]) AND r.tag = q.tag AND r.key = q.key
             WHERE q.key IS NOT NULL AND (NOT q.charged OR q.share_at IS NOT NULL) AND l.rate_interval IS NOT NULL
        ), clock AS MATERIALIZED (
            SELECT d.id, d.namespace, d.tag, d.key, d.ord, d.charged, d.share_at, d.step, d.burst, d.begun, d.most, least(d.n, d.most) AS n, new.lag,
                   greatest(coalesce(d.tat - d.lag, (
                       SELECT w.share_at FROM worker_queue w -- rates has forgotten it, but not all that had a share have begun
                        WHERE w.namespace = d.namespace AND w.tag = d.tag AND w.key = d.key AND w.charged AND w.share_at IS NOT NULL
                        ORDER BY w.share_at DESC LIMIT 1) + d.burst * d.step) + new.lag, p_now) AS tat
              FROM due d
             CROSS JOIN LATERAL ( -- in seconds: a day is not always as long as another
                   SELECT CASE WHEN d.late > d.lag + d.step / 2 THEN make_interval(secs => extract(epoch FROM d.late)::float8) ELSE d.lag END AS lag) AS new
        ), share AS MATERIALIZED (
            SELECT c.*, least(CASE WHEN c.charged THEN c.share_at + c.lag ELSE c.tat + (c.n - c.burst) * c.step END, v_never) AS at FROM clock c
        ), start AS MATERIALIZED (
            SELECT s.*, greatest(s.begun, p_now)
                        + (least(row_number() OVER (PARTITION BY s.namespace, s.tag, s.key, s.at <= p_now ORDER BY s.ord), s.most) - s.burst) * s.step AS next
              FROM share s
        ), paid AS (
            INSERT INTO rates AS r (namespace, tag, key, tat, lag, begun, forget_at)
            SELECT p.*, date_bin('1 min', p.tat, 'epoch') + interval '2 min'
              FROM (SELECT s.namespace, s.tag, s.key, least(max(s.tat + CASE WHEN s.charged THEN 0 ELSE s.n END * s.step), v_never) AS tat, max(s.lag),
                           coalesce(max(s.next + s.burst * s.step) FILTER (WHERE s.at <= p_now AND s.next <= p_now + s.step / 2), max(s.begun))
                      FROM start s GROUP BY s.namespace, s.tag, s.key) AS p ORDER BY 1, 2, 3
            ON CONFLICT (namespace, tag, key) DO UPDATE SET tat = excluded.tat, lag = excluded.lag, begun = excluded.begun, forget_at = excluded.forget_at
        )
        SELECT array_agg(s.id), array_agg(CASE WHEN s.at <= p_now THEN s.next ELSE s.at END), array_agg(s.at - s.lag) INTO v_late, v_ats, v_shares
          FROM start s WHERE s.at > p_now OR s.next > p_now + s.step / 2;
        UPDATE worker_queue q SET visible_at = late.at, charged = true, share_at = late.share_at, lock_token = NULL, slot = false, key_slot = false
          FROM unnest(v_late, v_ats, v_shares) AS late (id, at, share_at) WHERE q.id = ANY (ARRAY[late.id]);
        v_chosen := ARRAY(SELECT c.id FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord) WHERE c.id <> ALL (coalesce(v_late, '{}')) ORDER BY c.ord);
        PERFORM forget_rates(2 * cardinality(p_ids), p_now);
    END IF;
    UPDATE worker_queue q SET held_due = q.visible_at, visible_at = '9999-12-31 00:00:00+00', lock_token = NULL, slot = false, key_slot = false
     WHERE q.id = ANY (moved);
    picked := v_chosen;
    moved := moved || v_late;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pay_shares(p_namespace text, p_tag text, p_ids bigint[], p_keys text[], p_dues timestamptz[], p_now timestamptz)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now    timestamptz;
    v_late   bigint[];
    v_begins bigint[];
BEGIN
    IF NOT lock_namespace(p_namespace, '200ms') THEN -- as in too_many
        PERFORM unclaim(p_ids, p_dues, p_ids);
        RETURN p_ids;
    END IF;
    -- Others have paid while this waited for the lock. By an instant before theirs these would be too early, and have to wait.
    v_now := greatest(p_now, clock_timestamp());
    -- What allot does, for keys of which all may begin at once and none waits. One more than a burst is too many, however many more they are.
    WITH of_key AS MATERIALIZED (
        SELECT i.key, count(*) AS n, array_agg(i.id ORDER BY i.ord) AS ids FROM unnest(p_ids, p_keys) WITH ORDINALITY AS i (id, key, ord) GROUP BY i.key
    ), clock AS MATERIALIZED (
        SELECT k.*, l.rate_interval AS step, greatest(r.tat, v_now) AS tat, greatest(r.begun, v_now) AS begun, coalesce(r.lag, '0') AS lag,
               greatest(r.tat, v_now) + least(k.n - l.rate_burst, 1) * l.rate_interval <= v_now
               AND greatest(r.begun, v_now) + least(k.n - l.rate_burst, 1) * l.rate_interval <= v_now + l.rate_interval / 2 AS may
          FROM of_key k
          JOIN limits l ON l.queue = 'worker' AND l.namespace = p_namespace
          LEFT JOIN LATERAL (
               SELECT o.tat, o.begun, o.lag FROM rates o WHERE o.namespace = p_namespace AND o.tag = p_tag AND o.key = k.key LIMIT 1) AS r ON true
    ), paid AS (
        INSERT INTO rates AS r (namespace, tag, key, tat, lag, begun, forget_at)
        SELECT p_namespace, p_tag, c.key, c.tat + c.n * c.step, c.lag, c.begun + c.n * c.step, date_bin('1 min', c.tat + c.n * c.step, 'epoch') + interval '2 min'
          FROM clock c WHERE c.may ORDER BY c.key
        ON CONFLICT (namespace, tag, key) DO UPDATE SET tat = excluded.tat, begun = excluded.begun, forget_at = excluded.forget_at
    )
    SELECT array_agg(late.id) INTO v_late FROM clock c CROSS JOIN unnest(c.ids) AS late (id) WHERE NOT c.may;
    PERFORM forget_rates(2 * cardinality(p_ids), v_now);
    IF v_late IS NULL THEN
        RETURN '{}';
    END IF;
    SELECT a.picked INTO v_begins FROM allot(v_late, cardinality(v_late), '{}', v_now) AS a;
    v_late := ARRAY(SELECT late.id FROM unnest(v_late) AS late (id) WHERE late.id <> ALL (v_begins));
    UPDATE worker_queue q SET attempt_count = q.attempt_count - 1 WHERE q.id = ANY (v_late);
    RETURN v_late;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION realign_messages()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_note    realignments;
    v_done    boolean;
    v_alone   boolean;
    v_aligned record;
    v_moved   boolean := false;
BEGIN
    -- One at a time: two that then hold messages of what the other has aligned would wait for each other.
    IF NOT pg_try_advisory_xact_lock(hashtext('pgwake realignments of ' || current_schema()), 0) THEN
        RETURN;
    END IF;
    -- Whatever next_at says, for those that can be done with: the fetch may have been woken for this very message.
    FOR v_note IN SELECT * FROM realignments r ORDER BY r.next_at LIMIT 20 FOR UPDATE SKIP LOCKED LOOP
        -- Messages are changed under the lock row of their instance alone, like everywhere.
        PERFORM FROM instance_locks l WHERE l.instance_id = v_note.instance_id FOR UPDATE SKIP LOCKED;
        v_done := FOUND OR NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = v_note.instance_id)
                           AND pg_try_advisory_xact_lock(hashtext(current_schema()::text), hashtext(v_note.instance_id));
        IF v_done THEN
            v_alone := lock_home(v_note.instance_id);
            CONTINUE WHEN NOT v_alone AND v_note.next_at > clock_timestamp(); -- it would have to be done again
            SELECT * INTO v_aligned FROM align_messages(v_note.instance_id);
            v_moved := v_moved OR v_aligned.moved;
            v_done := v_alone AND NOT v_aligned.remains;
        END IF;
        IF v_done THEN
            DELETE FROM realignments r WHERE r.id = v_note.id;
        ELSIF v_note.next_at <= clock_timestamp() THEN -- later than those that wait behind it
            UPDATE realignments r
               SET next_at = clock_timestamp() + least(interval '2 s', interval '50 ms' * 2 ^ least(v_note.tries, 10)), tries = v_note.tries + 1
             WHERE r.id = v_note.id;
        END IF;
    END LOOP;
    IF v_moved THEN
        PERFORM notify_queue('orchestrator', 1, NULL);
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
CREATE OR REPLACE FUNCTION realign_messages()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_note    realignments;
    v_alone   boolean;
    v_aligned record;
    v_moved   boolean := false;
BEGIN
    -- One at a time: two that then hold messages of what the other has aligned would wait for each other.
    IF NOT pg_try_advisory_xact_lock(hashtext('pgwake realignments of ' || current_schema()), 0) THEN
        RETURN;
    END IF;
    -- Whatever next_at says, for those that can be done with: the fetch may have been woken for this very message.
    FOR v_note IN SELECT * FROM realignments r ORDER BY r.next_at LIMIT 20 FOR UPDATE SKIP LOCKED LOOP
        -- Messages are changed under the lock row of their instance alone, like everywhere.
        PERFORM FROM instance_locks l WHERE l.instance_id = v_note.instance_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND
             AND (EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = v_note.instance_id)
                  OR NOT pg_try_advisory_xact_lock(hashtext(current_schema()::text), hashtext(v_note.instance_id)));
        v_alone := lock_home(v_note.instance_id);
        CONTINUE WHEN NOT v_alone AND v_note.next_at > clock_timestamp(); -- it would have to be done again
        SELECT * INTO v_aligned FROM align_messages(v_note.instance_id);
        v_moved := v_moved OR v_aligned.moved;
        IF v_alone AND NOT v_aligned.remains THEN
            DELETE FROM realignments r WHERE r.id = v_note.id;
        ELSIF v_note.next_at <= clock_timestamp() THEN
            UPDATE realignments r
               SET next_at = clock_timestamp() + least(interval '2 s', interval '50 ms' * 2 ^ least(v_note.tries, 10)), tries = v_note.tries + 1
             WHERE r.id = v_note.id;
        END IF;
    END LOOP;
    IF v_moved THEN
        PERFORM notify_queue('orchestrator', 1, NULL);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pay_shares(p_namespace text, p_tag text, p_ids bigint[], p_keys text[], p_dues timestamptz[], p_now timestamptz)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now    timestamptz;
    v_late   bigint[];
    v_begins bigint[];
BEGIN
    IF NOT lock_namespace(p_namespace, '200ms') THEN -- as in too_many
        PERFORM unclaim(p_ids, p_dues, p_ids);
        RETURN p_ids;
    END IF;
    -- Others have paid while this waited for the lock. By an instant before theirs these would be too early, and have to wait.
    v_now := greatest(p_now, clock_timestamp());
    -- What allot does, for keys of which all may begin at once and none waits.
    WITH of_key AS MATERIALIZED (
        SELECT i.key, count(*) AS n, array_agg(i.id ORDER BY i.ord) AS ids FROM unnest(p_ids, p_keys) WITH ORDINALITY AS i (id, key, ord) GROUP BY i.key
    ), clock AS MATERIALIZED (
        SELECT k.*, l.rate_interval AS step, greatest(r.tat, v_now) AS tat, greatest(r.begun, v_now) AS begun, coalesce(r.lag, '0') AS lag,
               greatest(r.tat, v_now) + (k.n - l.rate_burst) * l.rate_interval <= v_now
               AND greatest(r.begun, v_now) + (k.n - l.rate_burst) * l.rate_interval <= v_now + l.rate_interval / 2 AS may
          FROM of_key k
          JOIN limits l ON l.queue = 'worker' AND l.namespace = p_namespace
          LEFT JOIN LATERAL (
               SELECT o.tat, o.begun, o.lag FROM rates o WHERE o.namespace = p_namespace AND o.tag = p_tag AND o.key = k.key LIMIT 1) AS r ON true
    ), paid AS (
        INSERT INTO rates AS r (namespace, tag, key, tat, lag, begun, forget_at)
        SELECT p_namespace, p_tag, c.key, c.tat + c.n * c.step, c.lag, c.begun + c.n * c.step, date_bin('1 min', c.tat + c.n * c.step, 'epoch') + interval '2 min'
          FROM clock c WHERE c.may ORDER BY c.key
        ON CONFLICT (namespace, tag, key) DO UPDATE SET tat = excluded.tat, begun = excluded.begun, forget_at = excluded.forget_at
    )
    SELECT array_agg(late.id) INTO v_late FROM clock c CROSS JOIN unnest(c.ids) AS late (id) WHERE NOT c.may;
    PERFORM forget_rates(2 * cardinality(p_ids), v_now);
    IF v_late IS NULL THEN
        RETURN '{}';
    END IF;
    SELECT a.picked INTO v_begins FROM allot(v_late, cardinality(v_late), '{}', v_now) AS a;
    v_late := ARRAY(SELECT late.id FROM unnest(v_late) AS late (id) WHERE late.id <> ALL (v_begins));
    UPDATE worker_queue q SET attempt_count = q.attempt_count - 1 WHERE q.id = ANY (v_late);
    RETURN v_late;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION allot(p_ids bigint[], p_limit integer, p_holding text[], p_now timestamptz, OUT picked bigint[], OUT moved bigint[], OUT unheld text[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_never  CONSTANT timestamptz := '9999-12-30 00:00:00+00'; -- or a few thousand items of a slow key would leave the range of the type
    v_chosen bigint[];
    v_late   bigint[];
    v_ats    timestamptz[];
    v_shares timestamptz[];
    v_ords   bigint[];
    v_oldest bigint[];
BEGIN
    WITH item AS (
        SELECT q.id, q.namespace, q.tag, q.key, g.ord, l.max_running, CASE WHEN q.key IS NOT NULL THEN l.max_running_per_key END AS per_key,
               row_number() OVER (PARTITION BY q.namespace, q.tag, q.key ORDER BY g.ord) AS of_key
          FROM unnest(p_ids) WITH ORDINALITY AS g (id, ord)
          JOIN worker_queue q ON q.id = ANY (ARRAY[g.id])
          LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace]) AND q.session_id IS NULL
    ), counted AS MATERIALIZED ( -- once for each key, at its first item
        SELECT i.*, coalesce(i.of_key <= max(i.per_key - CASE WHEN taken.ended THEN at_work_of_key(i.namespace, i.tag, i.key, i.per_key, p_now) ELSE taken.places END)
                                         OVER (PARTITION BY i.namespace, i.tag, i.key), true) AS may
          FROM item i
          LEFT JOIN LATERAL (
               SELECT count(*) AS places, coalesce(bool_or(w.visible_at <= p_now), false) AS ended
                 FROM (SELECT q.visible_at FROM worker_queue q
                        WHERE i.of_key = 1 AND i.per_key IS NOT NULL
                          AND q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = i.namespace AND q.tag = i.tag AND q.key = i.key
                        ORDER BY q.visible_at DESC LIMIT i.per_key) AS w
                HAVING i.of_key = 1) AS taken ON true
    ), namespace AS MATERIALIZED (
        SELECT n.*, n.max_running - at_work(n.namespace, n.max_running, p_now) AS free
          FROM (SELECT DISTINCT i.namespace, i.max_running FROM counted i WHERE i.max_running IS NOT NULL) AS n
    ), of_namespace AS (
        SELECT i.*, i.may AND coalesce(row_number() OVER (PARTITION BY i.namespace, i.max_running, i.may ORDER BY i.ord) <= n.free, true) AS can
          FROM counted i LEFT JOIN namespace n ON n.namespace = i.namespace AND n.max_running = i.max_running
    )
    SELECT coalesce(array_agg(i.id ORDER BY i.ord) FILTER (WHERE i.can), '{}'),
           coalesce(array_agg(i.id ORDER BY i.ord) FILTER (WHERE NOT i.may AND i.namespace = ANY (p_holding)), '{}'),
           coalesce(array_agg(DISTINCT i.namespace) FILTER (WHERE NOT i.may AND i.namespace <> ALL (p_holding)), '{}')
      INTO v_chosen, moved, unheld FROM of_namespace i;
    -- With the first p_limit of them, all of the others whose key has had its share, or each would be found by a look of its own.
    v_chosen := v_chosen[:p_limit] || ARRAY(
        SELECT q.id FROM unnest(v_chosen[p_limit + 1:]) WITH ORDINALITY AS c (id, ord)
          JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
          JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
          JOIN rates r ON r.namespace = ANY (ARRAY[q.namespace]) AND r.tag = q.tag AND r.key = q.key
         WHERE NOT q.charged AND l.rate_interval IS NOT NULL AND r.tat > p_now + (l.rate_burst - 1) * l.rate_interval
         ORDER BY c.ord);

    -- Of each key the first of these that have not paid, in order, take the next shares that it has (GCRA): the last was
    -- taken for tat, one more is there each rate_interval, and rate_burst of them may be there at once. Who has taken one that is
    -- still to come is due then. If nobody claims at that time, too many are due at once after it. So the clock of a key, by which
    -- shares are there (share_at), is behind by lag: by as much as the first of these is late, beyond a burst, once that is half an
    -- interval more than it is behind. All shares of the key, taken or not, are later by that, in their order. As others may have
    -- locked an item while those behind it go, what begins is counted too (begun), and may be half an interval early.
    IF EXISTS (SELECT FROM worker_queue q JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
                WHERE q.id = ANY (v_chosen) AND q.key IS NOT NULL AND (NOT q.charged OR q.share_at IS NOT NULL) AND l.rate_interval IS NOT NULL) THEN
        -- One that was moved on is due later than others whose shares come after its own. Of those that are due, the oldest shares
        -- go first: as many of each key as there are here, and so they can take the places of these.
        WITH place AS MATERIALIZED (
            SELECT q.namespace, q.tag, q.key, c.ord
              FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord)
              JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
              JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
             WHERE q.key IS NOT NULL AND q.charged AND q.share_at IS NOT NULL AND l.rate_interval IS NOT NULL
        ), oldest AS MATERIALIZED (
            SELECT k.namespace, k.tag, k.key, o.id, o.share_at
              FROM (SELECT p.namespace, p.tag, p.key, count(*) AS places FROM place p GROUP BY p.namespace, p.tag, p.key) AS k
             CROSS JOIN LATERAL (
                   SELECT w.id, w.share_at FROM worker_queue w
                    WHERE w.namespace = k.namespace AND w.tag = k.tag AND w.key = k.key AND w.charged AND w.share_at IS NOT NULL AND w.visible_at <= p_now
                    ORDER BY w.share_at LIMIT k.places FOR UPDATE SKIP LOCKED) o
        )
        SELECT (SELECT array_agg(p.ord ORDER BY p.namespace, p.tag, p.key, p.ord) FROM place p),
               (SELECT array_agg(o.id ORDER BY o.namespace, o.tag, o.key, o.share_at, o.id) FROM oldest o)
          INTO v_ords, v_oldest;
        FOR i IN 1 .. coalesce(cardinality(v_ords), 0) LOOP
            v_chosen[v_ords[i]] := v_oldest[i];
        END LOOP;
        moved := ARRAY(SELECT m.id FROM unnest(moved) AS m (id) WHERE m.id <> ALL (v_chosen)); -- another is in its place: it is due still

        WITH due AS MATERIALIZED (
            SELECT q.id, q.namespace, q.tag, q.key, c.ord, q.charged, q.share_at, l.rate_interval AS step, l.rate_burst AS burst,
                   r.tat, r.begun, coalesce(r.lag, '0') AS lag,
                   row_number() OVER (PARTITION BY q.namespace, q.tag, q.key, q.charged ORDER BY c.ord) AS n,
                   p_now - (min(q.share_at) FILTER (WHERE q.charged) OVER (PARTITION BY q.namespace, q.tag, q.key) + (l.rate_burst - 1) * l.rate_interval) AS late
              FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord)
              JOIN worker_queue q ON q.id = ANY (ARRAY[c.id])
              JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[q.namespace])
              LEFT JOIN rates r ON r.namespace = ANY (ARRAY[q.namespace]) AND r.tag = q.tag AND r.key = q.key
             WHERE q.key IS NOT NULL AND (NOT q.charged OR q.share_at IS NOT NULL) AND l.rate_interval IS NOT NULL
        ), clock AS MATERIALIZED (
            SELECT d.id, d.namespace, d.tag, d.key, d.ord, d.charged, d.share_at, d.step, d.burst, d.begun, d.n, new.lag,
                   greatest(coalesce(d.tat - d.lag, (
                       SELECT w.share_at FROM worker_queue w -- rates has forgotten it, but not all that had a share have begun
                        WHERE w.namespace = d.namespace AND w.tag = d.tag AND w.key = d.key AND w.charged AND w.share_at IS NOT NULL
                        ORDER BY w.share_at DESC LIMIT 1) + d.burst * d.step) + new.lag, p_now) AS tat
              FROM due d
             CROSS JOIN LATERAL ( -- in seconds: a day is not always as long as another
                   SELECT CASE WHEN d.late > d.lag + d.step / 2 THEN make_interval(secs => extract(epoch FROM d.late)::float8) ELSE d.lag END AS lag) AS new
        ), share AS MATERIALIZED (
            SELECT c.*, least(CASE WHEN c.charged THEN c.share_at + c.lag ELSE c.tat + (c.n - c.burst) * c.step END, v_never) AS at FROM clock c
        ), start AS MATERIALIZED (
            SELECT s.*, greatest(s.begun, p_now)
                        + (row_number() OVER (PARTITION BY s.namespace, s.tag, s.key, s.at <= p_now ORDER BY s.ord) - s.burst) * s.step AS next
              FROM share s
        ), paid AS (
            INSERT INTO rates AS r (namespace, tag, key, tat, lag, begun, forget_at)
            SELECT p.*, date_bin('1 min', p.tat, 'epoch') + interval '2 min'
              FROM (SELECT s.namespace, s.tag, s.key, least(max(s.tat + CASE WHEN s.charged THEN 0 ELSE s.n END * s.step), v_never) AS tat, max(s.lag),
                           coalesce(max(s.next + s.burst * s.step) FILTER (WHERE s.at <= p_now AND s.next <= p_now + s.step / 2), max(s.begun))
                      FROM start s GROUP BY s.namespace, s.tag, s.key) AS p ORDER BY 1, 2, 3
            ON CONFLICT (namespace, tag, key) DO UPDATE SET tat = excluded.tat, lag = excluded.lag, begun = excluded.begun, forget_at = excluded.forget_at
        )
        SELECT array_agg(s.id), array_agg(CASE WHEN s.at <= p_now THEN s.next ELSE s.at END), array_agg(s.at - s.lag) INTO v_late, v_ats, v_shares
          FROM start s WHERE s.at > p_now OR s.next > p_now + s.step / 2;
        UPDATE worker_queue q SET visible_at = late.at, charged = true, share_at = late.share_at, lock_token = NULL, slot = false, key_slot = false
          FROM unnest(v_late, v_ats, v_shares) AS late (id, at, share_at) WHERE q.id = ANY (ARRAY[late.id]);
        v_chosen := ARRAY(SELECT c.id FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord) WHERE c.id <> ALL (coalesce(v_late, '{}')) ORDER BY c.ord);
        PERFORM forget_rates(2 * cardinality(p_ids), p_now);
    END IF;
    UPDATE worker_queue q SET held_due = q.visible_at, visible_at = '9999-12-31 00:00:00+00', lock_token = NULL, slot = false, key_slot = false
     WHERE q.id = ANY (moved);
    picked := v_chosen;
    moved := moved || v_late;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION apply_kv(p_instance text, p_execution bigint, p_ops text[], p_keys text[], p_values text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_cleared integer := coalesce((SELECT max(u.ord) FROM unnest(p_ops) WITH ORDINALITY AS u (op, ord) WHERE u.op = 'clear_all'), 0);
BEGIN
    IF cardinality(p_ops) > 0 AND NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'instance % is unknown and can have no key-value pairs', p_instance USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(p_ops, p_keys, p_values) AS u (op, key, value)
         WHERE CASE u.op WHEN 'clear_all' THEN false
                         WHEN 'clear' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255
                         WHEN 'set' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255 OR u.value IS NULL
                         ELSE true END) THEN
        RAISE EXCEPTION 'a key-value update of instance % is neither set, with a key and a value, nor clear, with a key, nor clear_all', p_instance
            USING ERRCODE = 'PW003';
    END IF;

    -- Of the updates after the last clear_all, the last one of each key counts.
    IF v_cleared > 0 THEN
        DELETE FROM kv_delta d WHERE d.instance_id = p_instance;
        INSERT INTO kv_delta (instance_id, key, value, execution_id)
        SELECT s.instance_id, s.key, NULL, p_execution FROM kv_store s WHERE s.instance_id = p_instance;
    END IF;
    INSERT INTO kv_delta (instance_id, key, value, execution_id)
    SELECT DISTINCT ON (u.key) p_instance, u.key, CASE u.op WHEN 'set' THEN u.value END, p_execution
      FROM unnest(p_ops, p_keys, p_values) WITH ORDINALITY AS u (op, key, value, ord)
     WHERE u.ord > v_cleared
     ORDER BY u.key, u.ord DESC
    ON CONFLICT (instance_id, key) DO UPDATE SET value = excluded.value, execution_id = excluded.execution_id;
END
$$;
-- +goose StatementEnd
