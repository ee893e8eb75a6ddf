-- What is asked of one namespace, or of few, is looked up for those alone, also by a plan from when the tables were empty: then a walk over the limits of
-- all namespaces was as good, and over those once more for each of them. A table that is emptied again and again is analyzed while it is, as a rule. So what is to
-- be looked up is LATERAL with a LIMIT, or in EXISTS with an OFFSET, and in no join; and each column of an index is equal to one value: for a list of
-- them, but for the first column, all the others would be read. Namespaces are counted once by whoever asks for those that are new.
--
-- Nobody is claimed from, held or told of in another way than before.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION check_namespaces() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_top bigint;
BEGIN
    -- Ids are given once and ascend, and those of transactions that are open are given too: so while they are few nothing need be counted.
    IF (SELECT n.id FROM namespaces n ORDER BY n.id DESC LIMIT 1) > max_namespaces() THEN
        IF (SELECT count(*) FROM namespaces) > max_namespaces() THEN
            RAISE EXCEPTION 'there are % namespaces, and no more can be added', max_namespaces() USING ERRCODE = 'PW008';
        END IF;
        -- What others add and have not committed was not counted, and nobody waits for them: each adds a few at most. What is seen and is in
        -- progress is of this transaction, its subtransactions included; xmin has the lower 32 bits of which.
        v_top := pg_current_xact_id()::text::bigint;
        IF (SELECT count(*)
              FROM namespaces n
             WHERE n.id > max_namespaces()
               AND CASE WHEN n.created_at >= transaction_timestamp() THEN -- for of an older one nobody could tell the other 32 bits
                   pg_xact_status((v_top + (n.xmin::text::bigint - v_top % 4294967296 + 6442450944) % 4294967296 - 2147483648)::text::xid8) = 'in progress'
                   END) > 1000 THEN
            RAISE EXCEPTION 'a transaction adds at most 1000 namespaces once % were to be added, by whomever, also if they are gone, or never came', max_namespaces()
                USING ERRCODE = 'PW008', HINT = 'Add them in several transactions.';
        END IF;
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
-- 00006_management.sql:773
CREATE OR REPLACE FUNCTION new_namespaces(p_known bigint)
RETURNS TABLE (name text, known bigint)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    WITH c AS MATERIALIZED (SELECT count(*) AS known FROM namespaces) -- once, and not for each of them
    SELECT DISTINCT n.name, c.known FROM c JOIN namespaces n ON c.known <> p_known ORDER BY n.name
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION due_lists(p_queue text, p_namespaces text[], p_labels text[])
RETURNS TABLE (namespace text, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    IF p_queue = 'worker' THEN
        RETURN QUERY
        SELECT list.namespace, list.tag FROM work_lists(p_namespaces, p_labels) AS list
         WHERE NOT EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = list.namespace AND l.paused OFFSET 0)
           AND NOT EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = '*' AND l.paused OFFSET 0)
           AND EXISTS (SELECT FROM generate_series(0, 9) AS level (priority) CROSS JOIN LATERAL (
                   SELECT FROM worker_queue q
                    WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority
                      AND q.session_id IS NULL AND q.visible_at <= v_now
                    LIMIT 1) due);
    ELSE
        RETURN QUERY
        SELECT list.namespace, list.queue FROM message_lists(p_namespaces, p_labels, 0, 0) AS list
         WHERE EXISTS (SELECT FROM generate_series(0, 9) AS level (priority) CROSS JOIN LATERAL (
                   SELECT FROM orchestrator_queue q
                    WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = 0 AND q.priority = level.priority
                      AND q.visible_at <= v_now
                    LIMIT 1) due);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION served(p_queue text, p_namespaces text[])
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused) THEN
        RETURN CASE WHEN p_namespaces IS NOT NULL THEN ARRAY(SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)) END; -- or an item would be there twice
    ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused AND l.namespace = '*') THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT s.name
          FROM (SELECT n.name FROM unnest(p_namespaces) AS n (name)
                UNION SELECT n.name FROM namespaces n WHERE p_namespaces IS NULL
                UNION SELECT w.namespace FROM work_lists(NULL, NULL) AS w WHERE p_namespaces IS NULL AND p_queue = 'worker'
                UNION SELECT m.namespace FROM message_lists(NULL, NULL, NULL, NULL) AS m WHERE p_namespaces IS NULL AND p_queue = 'orchestrator') AS s
         WHERE NOT EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused AND l.namespace = s.name OFFSET 0)
         ORDER BY s.name);
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
    IF NOT reads_committed() THEN
        RAISE EXCEPTION 'limits are set in a READ COMMITTED transaction: another one does not see what was claimed while it waited' USING ERRCODE = 'PW003';
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
             UNION ALL -- some are there twice; or they would be found in the order of their ids
            SELECT q.id FROM worker_queue q WHERE v_paid AND q.namespace = p_namespace AND q.session_id IS NULL AND q.charged);
        -- In order, so that nobody who locks several items can deadlock.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR NO KEY UPDATE);
    END IF;
    v_now := clock_timestamp();
    IF v_held THEN
        -- The next claims hold again what is too much.
        UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL
         WHERE q.id = ANY (v_ids) AND CASE WHEN q.held_due IS NOT NULL THEN true END; -- or the index of all that is held would do as well
        DELETE FROM releases r WHERE r.namespace = p_namespace;
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    END IF;
    IF v_paid THEN
        -- They pay anew. One that was given back in a transaction while the rate was lifted is charged without any, and whoever claims it then
        -- leaves that as it is: if it is at work, its lease stays.
        UPDATE worker_queue q
           SET visible_at = CASE WHEN q.held_due IS NULL AND q.lock_token IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.id = ANY (v_ids) AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pause(p_queue text, p_namespaces text[] DEFAULT NULL, p_paused boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text;
BEGIN
    IF coalesce(p_queue NOT IN ('worker', 'orchestrator'), true) THEN
        RAISE EXCEPTION 'a queue must be worker or orchestrator' USING ERRCODE = 'PW003';
    ELSIF p_paused IS NULL OR p_namespaces = '{}' OR array_position(p_namespaces, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'it is not said what is to be paused, or resumed' USING ERRCODE = 'PW003';
    END IF;
    PERFORM check_options(p_namespaces, NULL, NULL, NULL);
    IF p_paused THEN
        INSERT INTO limits AS l (queue, namespace, paused)
        SELECT p_queue, n.name, true FROM (SELECT DISTINCT unnest(coalesce(p_namespaces, ARRAY['*'])) ORDER BY 1) AS n (name)
        ON CONFLICT (queue, namespace) DO UPDATE SET paused = true;
        RETURN;
    END IF;
    FOREACH v_namespace IN ARRAY ARRAY(SELECT DISTINCT unnest(coalesce(p_namespaces, ARRAY['*'])) ORDER BY 1) LOOP
        UPDATE limits l SET paused = false WHERE l.queue = p_queue AND l.namespace = v_namespace AND l.paused;
        DELETE FROM limits l WHERE l.queue = p_queue AND l.namespace = v_namespace AND NOT l.holds AND l.weight = 1;
    END LOOP;
    PERFORM notify_queue(p_queue, 1, NULL, CASE WHEN cardinality(p_namespaces) = 1 THEN p_namespaces[1] END);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION earliest_of_lists(p_namespaces text[], p_tags text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_earliest timestamptz;
BEGIN
    SELECT min(greatest(head.visible_at, least(full_until.visible_at, unmarked.next_look))) INTO v_earliest
      FROM unnest(p_namespaces, p_tags) AS list (namespace, tag)
     CROSS JOIN LATERAL (
           SELECT min(h.visible_at) AS visible_at
             FROM generate_series(0, 9) AS level (priority)
            CROSS JOIN LATERAL (
                  SELECT q.visible_at FROM worker_queue q
                   WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority AND q.session_id IS NULL
                   ORDER BY q.visible_at LIMIT 1) h) head
      LEFT JOIN LATERAL (
           SELECT r.visible_at
             FROM (SELECT o.namespace, o.max_running FROM limits o
                    WHERE o.queue = 'worker' AND o.namespace = list.namespace AND o.max_running IS NOT NULL LIMIT 1) AS l
            CROSS JOIN LATERAL (
                  SELECT q.visible_at FROM worker_queue q
                   WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = l.namespace AND q.visible_at > v_now
                   ORDER BY q.visible_at DESC OFFSET l.max_running - 1 LIMIT 1) r) full_until ON true
      LEFT JOIN LATERAL (
           SELECT v_now + interval '0.1 s' AS next_look FROM marking m -- their acks tell nobody
            WHERE m.namespace = list.namespace AND m.items <> '{}' LIMIT 1) unmarked ON true;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION earliest_limited(p_namespaces text[], p_tags text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    -- Before the items are read: whoever takes one up, for whichever tag, makes an item due instead in the same commit.
    v_released boolean := EXISTS (
        SELECT FROM (SELECT l.namespace
                       FROM (SELECT a.namespace FROM limits a
                              WHERE p_namespaces IS NULL AND a.queue = 'worker' AND a.max_running_per_key IS NOT NULL AND NOT a.paused
                             UNION ALL
                             SELECT o.namespace FROM unnest(p_namespaces) AS n (name) CROSS JOIN LATERAL (
                                    SELECT one.namespace FROM limits one
                                     WHERE one.queue = 'worker' AND one.namespace = n.name AND one.max_running_per_key IS NOT NULL AND NOT one.paused
                                     LIMIT 1) o) AS l
                      CROSS JOIN LATERAL (
                            SELECT FROM releases r WHERE r.namespace = l.namespace AND (p_tags IS NULL OR r.tag = ANY (p_tags)) LIMIT 1) free OFFSET 0) AS free
         WHERE EXISTS (SELECT FROM work_lists(ARRAY[free.namespace], p_tags))); -- or nothing is held, and nobody takes it up
    v_earliest timestamptz;
BEGIN
    SELECT earliest_of_lists(array_agg(list.namespace), array_agg(list.tag)) INTO v_earliest FROM work_lists(p_namespaces, p_tags) AS list;
    IF v_released THEN
        v_earliest := least(v_earliest, clock_timestamp());
    END IF;
    RETURN v_earliest;
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
          LEFT JOIN LATERAL (
               SELECT o.max_running, o.max_running_per_key FROM limits o
                WHERE o.queue = 'worker' AND o.namespace = q.namespace AND q.session_id IS NULL LIMIT 1) l ON true
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
         CROSS JOIN LATERAL (SELECT o.rate_interval, o.rate_burst FROM limits o WHERE o.queue = 'worker' AND o.namespace = q.namespace LIMIT 1) l
          JOIN rates r ON r.namespace = ANY (ARRAY[q.namespace]) AND r.tag = q.tag AND r.key = q.key
         WHERE NOT q.charged AND l.rate_interval IS NOT NULL AND r.tat > p_now + (l.rate_burst - 1) * l.rate_interval
         ORDER BY c.ord);

    -- Of each key the first of these that have not paid, in order, take the next shares that it has (GCRA): the last was
    -- taken for tat, one more is there each rate_interval, and rate_burst of them may be there at once. Who has taken one that is
    -- still to come is due then. If nobody claims at that time, too many are due at once after it. So the clock of a key, by which
    -- shares are there (share_at), is behind by lag: by as much as the first of these is late, beyond a burst, once that is half an
    -- interval more than it is behind. All shares of the key, taken or not, are later by that, in their order. As others may have
    -- locked an item while those behind it go, what begins is counted too (begun), and may be half an interval early.
    IF EXISTS (SELECT FROM worker_queue q
                CROSS JOIN LATERAL (SELECT o.rate_interval FROM limits o WHERE o.queue = 'worker' AND o.namespace = q.namespace LIMIT 1) l
                WHERE q.id = ANY (v_chosen) AND q.key IS NOT NULL AND (NOT q.charged OR q.share_at IS NOT NULL) AND l.rate_interval IS NOT NULL) THEN
        -- One that was moved on is due later than others whose shares come after its own. Of those that are due, the oldest shares
        -- go first: as many of each key as there are here, and so they can take the places of these.
        WITH place AS MATERIALIZED (
            SELECT q.namespace, q.tag, q.key, c.ord
              FROM unnest(v_chosen) WITH ORDINALITY AS c (id, ord)
             CROSS JOIN LATERAL (SELECT w.* FROM worker_queue w WHERE w.id = c.id LIMIT 1) q -- or that of all shares would do as well
             CROSS JOIN LATERAL (SELECT o.rate_interval FROM limits o WHERE o.queue = 'worker' AND o.namespace = q.namespace LIMIT 1) l
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
             CROSS JOIN LATERAL (SELECT o.rate_interval, o.rate_burst FROM limits o WHERE o.queue = 'worker' AND o.namespace = q.namespace LIMIT 1) l
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
    END IF;
    UPDATE worker_queue q SET held_due = q.visible_at, visible_at = '9999-12-31 00:00:00+00', lock_token = NULL, slot = false, key_slot = false
     WHERE q.id = ANY (moved);
    picked := v_chosen;
    moved := moved || v_late;
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
      FROM (SELECT l.namespace, l.max_running
              FROM (SELECT a.namespace, a.max_running FROM limits a WHERE p_namespaces IS NULL AND a.queue = 'worker' AND a.holds AND NOT a.paused
                    UNION ALL
                    SELECT o.* FROM (SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)) AS served CROSS JOIN LATERAL (
                           SELECT one.namespace, one.max_running FROM limits one
                            WHERE one.queue = 'worker' AND one.namespace = served.name AND one.holds AND NOT one.paused LIMIT 1) o) AS l
             WHERE EXISTS (SELECT FROM work_lists(ARRAY[l.namespace], p_tags))) AS c;
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
        v_holding := ARRAY(SELECT l.namespace FROM unnest(v_locked) AS own (name) CROSS JOIN LATERAL (
                                  SELECT o.namespace FROM limits o
                                   WHERE o.queue = 'worker' AND o.namespace = own.name AND o.holding_since IS NOT NULL LIMIT 1) l
                            WHERE keep_releasing(l.namespace));
        v_taken := v_taken + cardinality(v_locked) + cardinality(v_holding);
        v_keyed := EXISTS (SELECT FROM unnest(v_locked) AS own (name) CROSS JOIN LATERAL (
                                  SELECT FROM limits o
                                   WHERE o.queue = 'worker' AND o.namespace = own.name
                                     AND (o.max_running_per_key IS NOT NULL OR o.rate_interval IS NOT NULL) LIMIT 1) l);
        v_unmarked := ARRAY(SELECT unnest(m.items) FROM marking m CROSS JOIN LATERAL (
                                   SELECT FROM limits o
                                    WHERE o.queue = 'worker' AND o.namespace = m.namespace AND o.max_running_per_key IS NOT NULL LIMIT 1) l
                             WHERE m.namespace = ANY (v_locked));
        v_want := CASE WHEN v_keyed THEN greatest(p_limit, 10) ELSE p_limit END;

        v_spare := 32;
        LOOP
            v_moved := '{}';
            v_unheld := '{}';
            -- Where limits hold nothing is claimed but under the lock. It may be with others, or the first items may have come just now.
            WITH list AS MATERIALIZED (
                SELECT w.namespace, w.tag, coalesce(l.weight, 1) AS weight
                  FROM work_lists(p_namespaces, p_tags) AS w
                  LEFT JOIN LATERAL (SELECT o.weight, o.holds FROM limits o WHERE o.queue = 'worker' AND o.namespace = w.namespace LIMIT 1) l ON true
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
                  LEFT JOIN LATERAL (SELECT o.weight FROM limits o WHERE o.queue = 'worker' AND o.namespace = h.namespace LIMIT 1) l ON true
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mark_running(p_namespace text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before marking;
    v_left   text[];
    v_items  bigint[];
    v_free   bigint[];
    v_all    boolean; -- have a slot, and those that have a key one of that
    v_keyed  boolean;
BEGIN
    SELECT * INTO v_before FROM marking m WHERE m.namespace = p_namespace;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT l.max_running IS NOT NULL, l.max_running_per_key IS NOT NULL INTO v_all, v_keyed
      FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    v_items := v_before.items;
    v_left := ARRAY(
        SELECT DISTINCT l.virtualtransaction FROM pg_locks l
         WHERE l.locktype = 'relation' AND l.relation = 'limits'::regclass AND l.mode = 'AccessShareLock' AND l.pid IS DISTINCT FROM pg_backend_pid()
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND coalesce(l.virtualtransaction = ANY (v_before.transactions), true) ORDER BY 1);
    IF v_left IS DISTINCT FROM v_before.transactions THEN
        -- In a snapshot that is taken after those have ended that are not left. It walks over all that is not due.
        v_items := ARRAY(
            SELECT leased.id FROM work_lists(ARRAY[p_namespace], NULL) AS list
             CROSS JOIN generate_series(0, 9) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id FROM worker_queue q
                    WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority AND q.session_id IS NULL
                      AND q.visible_at > p_now AND q.lock_token IS NOT NULL
                      AND (v_all AND NOT q.slot OR v_keyed AND q.key IS NOT NULL AND NOT q.key_slot)
                   OFFSET 0) leased)
            || v_items;
    END IF;
    IF v_before.transactions IS NULL THEN -- those with a place may be about to leave it, and to bring nothing back
        v_items := v_items || ARRAY(
            SELECT q.id FROM worker_queue q WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace
             UNION ALL -- as in set_limits
            SELECT q.id FROM worker_queue q WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace);
    END IF;
    v_free := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_items) AND q.lock_token IS NOT NULL ORDER BY q.id FOR UPDATE SKIP LOCKED);
    UPDATE worker_queue q SET slot = v_all, key_slot = v_keyed AND q.key IS NOT NULL
     WHERE q.id = ANY (v_free) AND q.visible_at > p_now AND (v_all AND NOT q.slot OR v_keyed AND q.key IS NOT NULL AND NOT q.key_slot);
    -- The lease of one that somebody has locked may have been renewed in time, as in at_work.
    v_items := ARRAY(
        SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_items) AND q.id <> ALL (v_free) AND q.lock_token IS NOT NULL ORDER BY q.id);
    IF v_left = '{}' AND v_items = '{}' THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    ELSIF v_left IS DISTINCT FROM v_before.transactions OR v_items <> v_before.items THEN
        UPDATE marking m SET transactions = v_left, items = v_items WHERE m.namespace = p_namespace;
    END IF;
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
    v_over text[]; -- namespaces where nothing is held any more
    v_namespace text;
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
    v_over := ARRAY(
        SELECT o.namespace FROM (SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name) ORDER BY n.name) AS own CROSS JOIN LATERAL (
               SELECT l.namespace FROM limits l
                WHERE l.queue = 'worker' AND l.namespace = own.name AND l.holding_since < clock_timestamp() - interval '10 s'
                  AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.namespace = own.name AND q.held_due IS NOT NULL OFFSET 0)
                  FOR UPDATE SKIP LOCKED) o);
    FOREACH v_namespace IN ARRAY v_over LOOP
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = v_namespace;
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
    v_locks     integer := 0; -- that this may have taken: they are few on a server
BEGIN
    FOR v_namespace, v_holding IN
        SELECT l.* FROM (SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name) ORDER BY n.name) AS freed CROSS JOIN LATERAL (
               SELECT o.namespace, o.holding_since IS NOT NULL FROM limits o
                WHERE o.queue = 'worker' AND o.namespace = freed.name AND o.max_running_per_key IS NOT NULL LIMIT 1) l
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
    RETURN EXISTS (SELECT FROM (SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)) AS freed CROSS JOIN LATERAL (
                          SELECT FROM limits o WHERE o.queue = 'worker' AND o.namespace = freed.name AND o.max_running IS NOT NULL LIMIT 1) l);
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
                          FROM batch b CROSS JOIN LATERAL (
                               SELECT o.max_running_per_key FROM limits o WHERE o.queue = 'worker' AND o.namespace = b.namespace LIMIT 1) l) AS noted
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
               AND NOT EXISTS (SELECT FROM limits p WHERE p.queue = 'worker' AND p.paused AND p.namespace = k.namespace OFFSET 0)
               AND NOT EXISTS (SELECT FROM limits p WHERE p.queue = 'worker' AND p.paused AND p.namespace = '*' OFFSET 0)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fetch_work(
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
    v_buried integer := 0;
    v_buried_limit CONSTANT integer := 100; -- each look walks over what this one has buried
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
            v_buried := v_buried + cardinality(v_poison);
            v_picked := ARRAY(SELECT p.id FROM unnest(v_picked) WITH ORDINALITY AS p (id, place) WHERE p.id <> ALL (v_poison) ORDER BY p.place);
            EXIT WHEN cardinality(v_picked) > 0 OR v_buried >= v_buried_limit;
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
                          LEFT JOIN LATERAL (
                               SELECT o.max_running, o.max_running_per_key FROM limits o
                                WHERE v_limited AND before.session_id IS NULL AND o.queue = 'worker' AND o.namespace = before.namespace
                                LIMIT 1) l ON true) AS own
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

    -- Last of all: those of any namespace, which others may be about to pay in. Whoever pays after this might wait for them, and they for him.
    IF v_holds AND v_claims > 0 AND (
           v_sole IS NOT NULL AND v_rated OR v_sole IS NULL AND (
               EXISTS (SELECT FROM limits l WHERE v_served IS NULL AND l.queue = 'worker' AND l.rate_interval IS NOT NULL)
               OR EXISTS (SELECT FROM unnest(v_served) AS n (name) CROSS JOIN LATERAL (
                                 SELECT FROM limits o WHERE o.queue = 'worker' AND o.namespace = n.name AND o.rate_interval IS NOT NULL LIMIT 1) l))) THEN
        PERFORM forget_rates(2 * v_claims::integer, v_now);
    END IF;

    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::smallint, CASE WHEN v_claims = 0 AND v_buried >= v_buried_limit THEN v_buried END, NULL::text, NULL::json,
        NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::jsonb, NULL::text, v_holds::integer, NULL::timestamptz, NULL::timestamptz,
        v_until, v_earliest, clock_timestamp(), NULL::uuid;
    IF p_number IS NOT NULL AND (p_disarm OR v_claims = 0) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'worker', p_number, v_claims = 0, p_namespaces, p_tags, p_fanout, p_places);
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
CREATE OR REPLACE FUNCTION check_namespaces() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_top bigint;
BEGIN
    -- Ids are given once and ascend, and those of transactions that are open are given too: so while they are few nothing need be counted.
    IF (SELECT max(n.id) FROM namespaces n) > max_namespaces() THEN
        IF (SELECT count(*) FROM namespaces) > max_namespaces() THEN
            RAISE EXCEPTION 'there are % namespaces, and no more can be added', max_namespaces() USING ERRCODE = 'PW008';
        END IF;
        -- What others add and have not committed was not counted, and nobody waits for them: each adds a few at most. What is seen and is in
        -- progress is of this transaction, its subtransactions included; xmin has the lower 32 bits of which.
        v_top := pg_current_xact_id()::text::bigint;
        IF (SELECT count(*)
              FROM namespaces n
             WHERE n.id > max_namespaces()
               AND CASE WHEN n.created_at >= transaction_timestamp() THEN -- for of an older one nobody could tell the other 32 bits
                   pg_xact_status((v_top + (n.xmin::text::bigint - v_top % 4294967296 + 6442450944) % 4294967296 - 2147483648)::text::xid8) = 'in progress'
                   END) > 1000 THEN
            RAISE EXCEPTION 'a transaction adds at most 1000 namespaces once % were to be added, by whomever, also if they are gone, or never came', max_namespaces()
                USING ERRCODE = 'PW008', HINT = 'Add them in several transactions.';
        END IF;
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
-- 00006_management.sql:773
CREATE OR REPLACE FUNCTION new_namespaces(p_known bigint)
RETURNS TABLE (name text, known bigint)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT DISTINCT n.name, c.known FROM (SELECT count(*) AS known FROM namespaces) AS c JOIN namespaces n ON c.known <> p_known ORDER BY n.name
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION due_lists(p_queue text, p_namespaces text[], p_labels text[])
RETURNS TABLE (namespace text, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    IF p_queue = 'worker' THEN
        RETURN QUERY
        SELECT list.namespace, list.tag FROM work_lists(p_namespaces, p_labels) AS list
         WHERE NOT EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace IN (list.namespace, '*') AND l.paused)
           AND EXISTS (SELECT FROM generate_series(0, 9) AS level (priority) CROSS JOIN LATERAL (
                   SELECT FROM worker_queue q
                    WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority
                      AND q.session_id IS NULL AND q.visible_at <= v_now
                    LIMIT 1) due);
    ELSE
        RETURN QUERY
        SELECT list.namespace, list.queue FROM message_lists(p_namespaces, p_labels, 0, 0) AS list
         WHERE EXISTS (SELECT FROM generate_series(0, 9) AS level (priority) CROSS JOIN LATERAL (
                   SELECT FROM orchestrator_queue q
                    WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = 0 AND q.priority = level.priority
                      AND q.visible_at <= v_now
                    LIMIT 1) due);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION served(p_queue text, p_namespaces text[])
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused) THEN
        RETURN CASE WHEN p_namespaces IS NOT NULL THEN ARRAY(SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)) END; -- or an item would be there twice
    ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused AND l.namespace = '*') THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT s.name
          FROM (SELECT n.name FROM unnest(p_namespaces) AS n (name)
                UNION SELECT n.name FROM namespaces n WHERE p_namespaces IS NULL
                UNION SELECT w.namespace FROM work_lists(NULL, NULL) AS w WHERE p_namespaces IS NULL AND p_queue = 'worker'
                UNION SELECT m.namespace FROM message_lists(NULL, NULL, NULL, NULL) AS m WHERE p_namespaces IS NULL AND p_queue = 'orchestrator') AS s
         WHERE NOT EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused AND l.namespace = s.name)
         ORDER BY s.name);
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
    IF NOT reads_committed() THEN
        RAISE EXCEPTION 'limits are set in a READ COMMITTED transaction: another one does not see what was claimed while it waited' USING ERRCODE = 'PW003';
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
        -- They pay anew. One that was given back in a transaction while the rate was lifted is charged without any, and whoever claims it then
        -- leaves that as it is: if it is at work, its lease stays.
        UPDATE worker_queue q
           SET visible_at = CASE WHEN q.held_due IS NULL AND q.lock_token IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.id = ANY (v_ids) AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pause(p_queue text, p_namespaces text[] DEFAULT NULL, p_paused boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF coalesce(p_queue NOT IN ('worker', 'orchestrator'), true) THEN
        RAISE EXCEPTION 'a queue must be worker or orchestrator' USING ERRCODE = 'PW003';
    ELSIF p_paused IS NULL OR p_namespaces = '{}' OR array_position(p_namespaces, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'it is not said what is to be paused, or resumed' USING ERRCODE = 'PW003';
    END IF;
    PERFORM check_options(p_namespaces, NULL, NULL, NULL);
    IF p_paused THEN
        INSERT INTO limits AS l (queue, namespace, paused)
        SELECT p_queue, n.name, true FROM (SELECT DISTINCT unnest(coalesce(p_namespaces, ARRAY['*'])) ORDER BY 1) AS n (name)
        ON CONFLICT (queue, namespace) DO UPDATE SET paused = true;
        RETURN;
    END IF;
    UPDATE limits l SET paused = false
      FROM (SELECT p.namespace FROM limits p
             WHERE p.queue = p_queue AND p.paused AND (p.namespace = ANY (p_namespaces) OR p_namespaces IS NULL AND p.namespace = '*')
             ORDER BY p.namespace FOR UPDATE) AS resumed
     WHERE l.queue = p_queue AND l.namespace = resumed.namespace;
    DELETE FROM limits l
     WHERE l.queue = p_queue AND NOT l.holds AND l.weight = 1 AND (l.namespace = ANY (p_namespaces) OR p_namespaces IS NULL AND l.namespace = '*');
    PERFORM notify_queue(p_queue, 1, NULL, CASE WHEN cardinality(p_namespaces) = 1 THEN p_namespaces[1] END);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION earliest_of_lists(p_namespaces text[], p_tags text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_earliest timestamptz;
BEGIN
    SELECT min(greatest(head.visible_at, least(full_until.visible_at, unmarked.next_look))) INTO v_earliest
      FROM unnest(p_namespaces, p_tags) AS list (namespace, tag)
     CROSS JOIN LATERAL (
           SELECT min(h.visible_at) AS visible_at
             FROM generate_series(0, 9) AS level (priority)
            CROSS JOIN LATERAL (
                  SELECT q.visible_at FROM worker_queue q
                   WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority AND q.session_id IS NULL
                   ORDER BY q.visible_at LIMIT 1) h) head
      LEFT JOIN LATERAL (
           SELECT r.visible_at FROM limits l
            CROSS JOIN LATERAL (
                  SELECT q.visible_at FROM worker_queue q
                   WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = l.namespace AND q.visible_at > v_now
                   ORDER BY q.visible_at DESC OFFSET l.max_running - 1 LIMIT 1) r
            WHERE l.queue = 'worker' AND l.namespace = list.namespace AND l.max_running IS NOT NULL) full_until ON true
      LEFT JOIN LATERAL (
           SELECT v_now + interval '0.1 s' AS next_look FROM marking m -- their acks tell nobody
            WHERE m.namespace = list.namespace AND m.items <> '{}') unmarked ON true;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION earliest_limited(p_namespaces text[], p_tags text[])
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    -- Before the items are read: whoever takes one up, for whichever tag, makes an item due instead in the same commit.
    v_released boolean := EXISTS (
        SELECT FROM (SELECT l.namespace FROM limits l CROSS JOIN LATERAL (SELECT FROM releases r WHERE r.namespace = l.namespace AND (p_tags IS NULL OR r.tag = ANY (p_tags)) LIMIT 1) free
                      WHERE l.queue = 'worker' AND l.max_running_per_key IS NOT NULL AND NOT l.paused AND (p_namespaces IS NULL OR l.namespace = ANY (p_namespaces)) OFFSET 0) AS free
         WHERE EXISTS (SELECT FROM work_lists(ARRAY[free.namespace], p_tags))); -- or nothing is held, and nobody takes it up
    v_earliest timestamptz;
BEGIN
    SELECT earliest_of_lists(array_agg(list.namespace), array_agg(list.tag)) INTO v_earliest FROM work_lists(p_namespaces, p_tags) AS list;
    IF v_released THEN
        v_earliest := least(v_earliest, clock_timestamp());
    END IF;
    RETURN v_earliest;
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
    END IF;
    UPDATE worker_queue q SET held_due = q.visible_at, visible_at = '9999-12-31 00:00:00+00', lock_token = NULL, slot = false, key_slot = false
     WHERE q.id = ANY (moved);
    picked := v_chosen;
    moved := moved || v_late;
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION mark_running(p_namespace text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before marking;
    v_left   text[];
    v_items  bigint[];
    v_free   bigint[];
    v_all    boolean; -- have a slot, and those that have a key one of that
    v_keyed  boolean;
BEGIN
    SELECT * INTO v_before FROM marking m WHERE m.namespace = p_namespace;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT l.max_running IS NOT NULL, l.max_running_per_key IS NOT NULL INTO v_all, v_keyed
      FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    v_items := v_before.items;
    v_left := ARRAY(
        SELECT DISTINCT l.virtualtransaction FROM pg_locks l
         WHERE l.locktype = 'relation' AND l.relation = 'limits'::regclass AND l.mode = 'AccessShareLock' AND l.pid IS DISTINCT FROM pg_backend_pid()
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND coalesce(l.virtualtransaction = ANY (v_before.transactions), true) ORDER BY 1);
    IF v_left IS DISTINCT FROM v_before.transactions THEN
        -- In a snapshot that is taken after those have ended that are not left. It walks over all that is not due.
        v_items := ARRAY(
            SELECT leased.id FROM work_lists(ARRAY[p_namespace], NULL) AS list
             CROSS JOIN generate_series(0, 9) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id FROM worker_queue q
                    WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority AND q.session_id IS NULL
                      AND q.visible_at > p_now AND q.lock_token IS NOT NULL
                      AND (v_all AND NOT q.slot OR v_keyed AND q.key IS NOT NULL AND NOT q.key_slot)) leased)
            || v_items;
    END IF;
    IF v_before.transactions IS NULL THEN -- those with a place may be about to leave it, and to bring nothing back
        v_items := v_items || ARRAY(
            SELECT q.id FROM worker_queue q WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace
             UNION
            SELECT q.id FROM worker_queue q WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace);
    END IF;
    v_free := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_items) AND q.lock_token IS NOT NULL ORDER BY q.id FOR UPDATE SKIP LOCKED);
    UPDATE worker_queue q SET slot = v_all, key_slot = v_keyed AND q.key IS NOT NULL
     WHERE q.id = ANY (v_free) AND q.visible_at > p_now AND (v_all AND NOT q.slot OR v_keyed AND q.key IS NOT NULL AND NOT q.key_slot);
    -- The lease of one that somebody has locked may have been renewed in time, as in at_work.
    v_items := ARRAY(
        SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_items) AND q.id <> ALL (v_free) AND q.lock_token IS NOT NULL ORDER BY q.id);
    IF v_left = '{}' AND v_items = '{}' THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    ELSIF v_left IS DISTINCT FROM v_before.transactions OR v_items <> v_before.items THEN
        UPDATE marking m SET transactions = v_left, items = v_items WHERE m.namespace = p_namespace;
    END IF;
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fetch_work(
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
    v_buried integer := 0;
    v_buried_limit CONSTANT integer := 100; -- each look walks over what this one has buried
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
            v_buried := v_buried + cardinality(v_poison);
            v_picked := ARRAY(SELECT p.id FROM unnest(v_picked) WITH ORDINALITY AS p (id, place) WHERE p.id <> ALL (v_poison) ORDER BY p.place);
            EXIT WHEN cardinality(v_picked) > 0 OR v_buried >= v_buried_limit;
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

    -- Last of all: those of any namespace, which others may be about to pay in. Whoever pays after this might wait for them, and they for him.
    IF v_holds AND v_claims > 0 AND (
           v_sole IS NOT NULL AND v_rated OR v_sole IS NULL AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.rate_interval IS NOT NULL
                                                                      AND (v_served IS NULL OR l.namespace = ANY (v_served)))) THEN
        PERFORM forget_rates(2 * v_claims::integer, v_now);
    END IF;

    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::smallint, CASE WHEN v_claims = 0 AND v_buried >= v_buried_limit THEN v_buried END, NULL::text, NULL::json,
        NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::jsonb, NULL::text, v_holds::integer, NULL::timestamptz, NULL::timestamptz,
        v_until, v_earliest, clock_timestamp(), NULL::uuid;
    IF p_number IS NOT NULL AND (p_disarm OR v_claims = 0) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'worker', p_number, v_claims = 0, p_namespaces, p_tags, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd
