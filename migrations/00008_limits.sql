-- Limits: what of a queue is paused, and how much of a namespace may be at work at one time, or how often.
--
-- An item that was claimed under a limit has its place (slot, key_slot) for as long as its lease holds: how many are at work is counted,
-- and nothing has to be given back by a process that died. So that none can be exceeded, whoever claims from a namespace with limits
-- counts while he has it for himself (lock_namespace), until he commits: those before him are there to be counted, and those after him
-- count what he has taken. Most count before they take. If no item of the namespace is held or moved (nothing_waits), claims of keys take
-- first (too_many, pay_shares), so that they wait for each other but for the moment that it takes to count. And those that
-- take no more places of the namespace than they leave by their own acks (sole_list) do without: until they commit, all others count the
-- old ones, and then the new ones.
--
-- An item that a claim meets and may not take stays out of the way of those behind it:
--   (1) its namespace is full, or paused: no claim looks there, and earliest_work says when a lease ends;
--   (2) its key is full: it is held, which is to be due in 9999, and each place of that key that becomes free brings one back;
--   (3) its key has had its share: it is due when that is (charged), and then its share is paid. It is moved on once more if nobody
--       claims for so long that too many of the key are due.
--
-- Whatever ends a lease with a place says so (release_places) as whoever enqueues does: lanes that are armed are told, and one
-- that is not looks once that transaction has ended. For a key it adds a row to releases, which is there to be seen by whoever may
-- claim next exactly when the place is free. So no claim can hold an item of which nobody knows that it could go. As long as no
-- key is full, nobody adds such rows: an ack that adds none has the lock of keep_releasing with others like it until it ends, and a
-- claim that is to hold an item has it alone, before it counts, and until it ends. What it has written to holding_since by then
-- is seen by the acks that come after.
--
-- What is at work when limits are set has no place. Whoever sets them may keep his transaction open for long, so it is the claims
-- after it that mark those items (mark_running), and skip what others have locked. From the commit of set_limits on, whatever of
-- the namespace is at work
--   (1) has its slots; or
--   (2) is among marking.items, since somebody has locked it: it counts, and its key is left alone. Nothing of that may be held, for
--       who has locked the item may be about to leave its place and, not having seen the limits, to bring nothing back; or
--   (3) was claimed by one of marking.transactions, of which nobody can see it yet. Whoever claims has read limits before, and so
--       has a lock on that table: of those who have not seen the new ones none is missing when the first claim looks who has one.
--       When one of them has ended, the next claim marks what it has left.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION served(p_queue text, p_namespaces text[])
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM limits l WHERE l.queue = p_queue AND l.paused) THEN
        RETURN p_namespaces;
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
COMMENT ON FUNCTION served IS 'Internal: these namespaces (null: all) without those that are paused; null as long as none is.';

-- +goose StatementBegin
CREATE FUNCTION lock_namespace(p_namespace text, p_wait text DEFAULT '20ms')
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_before text;
BEGIN
    IF pg_try_advisory_xact_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace)) THEN
        RETURN true;
    ELSIF p_wait = '0' THEN
        RETURN false;
    END IF;
    v_before := current_setting('lock_timeout');
    BEGIN
        PERFORM set_config('lock_timeout', p_wait, true);
        PERFORM pg_advisory_xact_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace));
        PERFORM set_config('lock_timeout', v_before, true);
        RETURN true;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_namespace IS 'Internal: keeps other claims of a namespace that has limits waiting until the transaction ends. A claim takes moments, but one whose client the network has lost may be stuck while it sends its rows: so false after p_wait, 0: at once.';

-- +goose StatementBegin
CREATE FUNCTION at_work(p_namespace text, p_most integer, p_now timestamptz)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_count bigint;
BEGIN
    -- A lease that has ended and whose row is locked may be about to be renewed, or its place about to be handed on, by a
    -- transaction that came in time. One statement sees either what was before that or what is then.
    WITH ended AS MATERIALIZED (
        SELECT q.id FROM worker_queue q
         WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace AND q.visible_at <= p_now
         ORDER BY q.visible_at DESC LIMIT p_most
    ), free AS MATERIALIZED (
        SELECT q.id FROM ended e JOIN worker_queue q ON q.id = ANY (ARRAY[e.id]) WHERE q.slot AND q.visible_at <= p_now FOR UPDATE OF q SKIP LOCKED
    ), running AS (
        SELECT FROM worker_queue q
         WHERE q.slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace AND q.visible_at > p_now LIMIT p_most
    )
    SELECT (SELECT count(*) FROM running) + (SELECT count(*) FROM ended) - (SELECT count(*) FROM free)
           + (SELECT count(*) FROM worker_queue q
               WHERE q.id = ANY (ARRAY(SELECT unnest(m.items) FROM marking m WHERE m.namespace = p_namespace)) AND NOT q.slot) INTO v_count;
    RETURN least(v_count, p_most);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION at_work IS 'Internal: how many items of a namespace have a place, counted up to p_most.';

-- +goose StatementBegin
CREATE FUNCTION at_work_of_key(p_namespace text, p_tag text, p_key text, p_most integer, p_now timestamptz)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_count bigint;
BEGIN
    WITH ended AS MATERIALIZED ( -- as in at_work
        SELECT q.id FROM worker_queue q
         WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace AND q.tag = p_tag AND q.key = p_key AND q.visible_at <= p_now
         ORDER BY q.visible_at DESC LIMIT p_most
    ), free AS MATERIALIZED (
        SELECT q.id FROM ended e JOIN worker_queue q ON q.id = ANY (ARRAY[e.id]) WHERE q.key_slot AND q.visible_at <= p_now FOR UPDATE OF q SKIP LOCKED
    ), running AS (
        SELECT FROM worker_queue q
         WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace AND q.tag = p_tag AND q.key = p_key AND q.visible_at > p_now LIMIT p_most
    )
    SELECT (SELECT count(*) FROM running) + (SELECT count(*) FROM ended) - (SELECT count(*) FROM free) INTO v_count;
    RETURN least(v_count, p_most);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION at_work_of_key IS 'Internal: how many items of a key have a place, counted up to p_most.';

-- +goose StatementBegin
CREATE FUNCTION mark_running(p_namespace text, p_now timestamptz)
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
COMMENT ON FUNCTION mark_running IS 'Internal: gives what of a namespace was claimed without having seen its limits a place, or notes it in marking if somebody has locked it. The caller has locked the namespace.';

-- +goose StatementBegin
CREATE FUNCTION bring_back(p_namespace text, p_tag text, p_key text, p_count bigint)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_count bigint;
BEGIN
    UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL
      FROM (SELECT h.id FROM worker_queue h
             WHERE h.namespace = p_namespace AND h.tag = p_tag AND h.key = p_key AND h.held_due IS NOT NULL
             ORDER BY -h.priority, h.held_due, h.id LIMIT p_count FOR UPDATE SKIP LOCKED) AS head
     WHERE q.id = ANY (ARRAY[head.id]); -- as in ack_work_many
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bring_back IS 'Internal: makes the first p_count items of a key that are held due again, as they were, and returns how many that was.';

-- +goose StatementBegin
CREATE FUNCTION take_up_releases(p_namespaces text[])
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
COMMENT ON FUNCTION take_up_releases IS 'Internal: brings back an item for each place that became free for a key, and notes where none is held any more. The caller has locked the namespaces: nobody is holding items there now.';

-- +goose StatementBegin
CREATE FUNCTION has_rate(p_namespace text)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND l.rate_interval IS NOT NULL);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION has_rate IS 'Internal: whether the keys of a namespace have a rate. An item that is given back unbegun has paid for its next claim then.';

-- +goose StatementBegin
CREATE FUNCTION forget_rates(p_most integer, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    DELETE FROM rates r
     USING (SELECT old.namespace, old.tag, old.key FROM rates old
             WHERE old.forget_at <= p_now ORDER BY old.forget_at LIMIT p_most FOR UPDATE SKIP LOCKED) AS over
     WHERE r.namespace = ANY (ARRAY[over.namespace]) AND r.tag = over.tag AND r.key = over.key;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION forget_rates IS 'Internal: removes up to p_most rows of rates that have said nothing for a while.';

-- +goose StatementBegin
CREATE FUNCTION allot(p_ids bigint[], p_limit integer, p_holding text[], p_now timestamptz, OUT picked bigint[], OUT moved bigint[], OUT unheld text[])
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
COMMENT ON FUNCTION allot IS 'Internal: which of these items, that the caller has locked, may be claimed, p_limit of them in order. Those whose key is full are held, in the namespaces of p_holding, and those whose key has had its share are due when it has one for them: all that moved are returned too, and in which other namespaces an item would have been held. The caller has locked the namespaces.';

-- +goose StatementBegin
CREATE FUNCTION keep_releasing(p_namespace text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN pg_try_advisory_xact_lock(hashtext('pgwake releases of ' || current_schema()), hashtext(p_namespace));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION keep_releasing IS 'Internal: has every place of a key of the namespace that becomes free until the transaction ends leave a row in releases; false if there may be one under way that does not.';

-- +goose StatementBegin
CREATE FUNCTION begin_holding(p_namespace text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    UPDATE limits l SET holding_since = clock_timestamp()
      FROM (SELECT FROM limits o WHERE o.queue = 'worker' AND o.namespace = p_namespace FOR UPDATE SKIP LOCKED) AS own
     WHERE l.queue = 'worker' AND l.namespace = p_namespace AND l.holding_since IS NULL;
    RETURN FOUND AND keep_releasing(p_namespace);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION begin_holding IS 'Internal: has places of keys that become free leave a row in releases from the end of the transaction on, and reports whether they all do so already.';

-- +goose StatementBegin
CREATE FUNCTION pick_limited(
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
                    LIMIT v_want + v_spare) h
              LEFT JOIN limits l ON l.queue = 'worker' AND l.namespace = ANY (ARRAY[h.namespace])
             WHERE p_owner IS NOT NULL AND list.free_at IS NULL
        ), draw AS MATERIALIZED ( -- of a lottery, in which each has chances by its weight
            SELECT d.namespace, CASE WHEN p_fair THEN -ln(1 - random()) / d.weight ELSE 0 END AS first FROM (SELECT DISTINCT h.namespace, h.weight FROM head h) AS d
        ), line AS (
            SELECT h.*, d.first + CASE WHEN p_fair THEN (row_number() OVER (PARTITION BY h.namespace ORDER BY h.priority DESC, h.visible_at, h.id) - 1)
                                                        / h.weight::float8 ELSE 0 END AS turn
              FROM head h JOIN draw d ON d.namespace = h.namespace
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
CREATE FUNCTION nothing_waits(p_namespace text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND l.holding_since IS NOT NULL)
       AND NOT EXISTS (SELECT FROM marking m WHERE m.namespace = p_namespace)
       AND NOT EXISTS (SELECT FROM releases r WHERE r.namespace = p_namespace) -- which pick_limited takes up
       AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.charged AND q.share_at IS NOT NULL AND q.namespace = p_namespace);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION nothing_waits IS 'Internal: is no item of the namespace held, or about to be, nor moved to when it has a share, nor is a place of a key released?';

-- +goose StatementBegin
CREATE FUNCTION sole_list(
    p_lists integer, p_limit integer, p_left text[], p_now timestamptz,
    INOUT sole text, OUT free integer, OUT places integer, OUT key_places integer, OUT rated boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit   limits;
    v_left    integer;
    v_at_work integer;
BEGIN
    SELECT * INTO v_limit FROM limits l WHERE l.queue = 'worker' AND l.namespace = sole;
    free := p_limit;
    places := v_limit.max_running;
    key_places := v_limit.max_running_per_key;
    rated := v_limit.rate_interval IS NOT NULL;
    IF p_lists <> 1 OR rated AND coalesce(places, key_places) IS NOT NULL OR (rated OR key_places IS NOT NULL) AND NOT nothing_waits(sole) THEN
        sole := NULL;
    ELSIF places IS NOT NULL THEN
        v_left := CASE WHEN v_limit.over THEN 0 ELSE coalesce(cardinality(array_positions(p_left, sole)), 0) END;
        IF v_left >= p_limit THEN
            NULL; -- Others count the places that it leaves until they count those that it takes.
        ELSIF lock_namespace(sole, CASE v_left WHEN 0 THEN '20ms' ELSE '0' END) THEN
            IF v_limit.over THEN
                PERFORM mark_running(sole, p_now);
            END IF;
            v_at_work := at_work(sole, places, p_now);
            free := greatest(least(p_limit, places - v_at_work), 0);
            IF v_limit.over AND v_at_work < places AND NOT EXISTS (SELECT FROM marking m WHERE m.namespace = sole) THEN
                UPDATE limits l SET over = false
                  FROM (SELECT FROM limits o WHERE o.queue = 'worker' AND o.namespace = sole FOR UPDATE SKIP LOCKED) AS own
                 WHERE l.queue = 'worker' AND l.namespace = sole;
            END IF;
        ELSE
            free := v_left;
        END IF;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION sole_list IS 'Internal: what a fetch may claim from one list. sole, its namespace, becomes null if p_lists is not 1, or if an item is to be held or moved there. free is how many may be claimed, and places and key_places how many may be at work, of the namespace and of a key; rated: keys have a rate. p_left has the namespace of each place that the fetch leaves by its acks. Where it may claim more than those, the namespace is locked then.';

-- +goose StatementBegin
CREATE FUNCTION unclaim(p_ids bigint[], p_dues timestamptz[], p_over bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    UPDATE worker_queue q SET visible_at = claimed.due, lock_token = NULL, slot = false, key_slot = false, attempt_count = q.attempt_count - 1
      FROM unnest(p_ids, p_dues) AS claimed (id, due)
     WHERE q.id = ANY (ARRAY[claimed.id]) AND claimed.id = ANY (p_over);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION unclaim IS 'Internal: makes those of p_over, which the caller has claimed just now, due as they were. Part of too_many and pay_shares.';

-- +goose StatementBegin
CREATE FUNCTION too_many(p_namespace text, p_tag text, p_ids bigint[], p_keys text[], p_dues timestamptz[], p_now timestamptz)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_most integer;
    v_over bigint[];
BEGIN
    IF NOT lock_namespace(p_namespace, '200ms') THEN -- there is nothing else to do, and what was done is to be undone
        v_over := p_ids;
    ELSE
        SELECT l.max_running_per_key INTO v_most FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
        v_over := ARRAY(
            WITH of_key AS MATERIALIZED (
                SELECT i.key, array_agg(i.id ORDER BY i.ord) AS ids FROM unnest(p_ids, p_keys) WITH ORDINALITY AS i (id, key, ord) GROUP BY i.key
            ), suspect AS MATERIALIZED ( -- all of their leases included, also those that have ended
                SELECT k.key, k.ids FROM of_key k
                 WHERE EXISTS (SELECT FROM worker_queue q
                                WHERE q.key_slot AND q.lock_token IS NOT NULL AND q.namespace = p_namespace AND q.tag = p_tag AND q.key = k.key
                               OFFSET v_most)
            )
            SELECT unnest(s.ids[cardinality(s.ids) + 1 - (at_work_of_key(p_namespace, p_tag, s.key, v_most + cardinality(s.ids), p_now) - v_most):])
              FROM suspect s);
        IF v_over = '{}' THEN
            RETURN v_over;
        END IF;
        PERFORM begin_holding(p_namespace);
    END IF;
    PERFORM unclaim(p_ids, p_dues, v_over);
    RETURN v_over;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION too_many IS 'Internal: which of these items of a list, that have keys and that the caller has claimed just now, are more of a key than may be at work. They are due again as they were, and the next claims hold what is too much. What the caller has claimed is there to be counted for all claims that are counted after this one: the namespace is locked from here on.';

-- +goose StatementBegin
CREATE FUNCTION pay_shares(p_namespace text, p_tag text, p_ids bigint[], p_keys text[], p_dues timestamptz[], p_now timestamptz)
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
COMMENT ON FUNCTION pay_shares IS 'Internal: which of these items of a list, that have keys and that the caller has claimed just now, may not begin yet by the rate of their key. They are due when they may; the others have paid. As too_many, it locks the namespace.';

-- +goose StatementBegin
CREATE FUNCTION earliest_of_lists(p_namespaces text[], p_tags text[])
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
COMMENT ON FUNCTION earliest_of_lists IS 'Internal: when an item of these pairs of namespace and tag can be taken, sessions left out: not before a lease ends if its namespace is full.';

-- +goose StatementBegin
CREATE FUNCTION earliest_limited(p_namespaces text[], p_tags text[])
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
COMMENT ON FUNCTION earliest_limited IS 'Internal: earliest_work where there are limits, sessions left out: when it can be taken counts.';

-- +goose StatementBegin
CREATE FUNCTION note_releases(p_namespaces text[], p_tags text[], p_keys text[])
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
COMMENT ON FUNCTION note_releases IS 'Internal: has a held item brought back for each place of a key that these leave, where items are held, or may be before the transaction ends, and returns whether anybody may wait for one of these places. Part of release_places.';

-- +goose StatementBegin
CREATE FUNCTION tell_of_places(p_namespaces text[], p_tags text[], p_keys text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS NOT DISTINCT FROM 'off' THEN
        RETURN;
    END IF;
    -- As notify_inserted does, and for its reasons.
    IF pg_try_advisory_xact_lock_shared(hashtext('pgwake producers'), 'worker_queue'::regclass::oid::integer) AND reads_committed() THEN
        IF somebody_waits('worker') THEN
            PERFORM wake('worker', told.namespace, told.tag, told.places)
               FROM (SELECT r.namespace, r.tag, count(*) AS places FROM unnest(p_namespaces, p_tags, p_keys) AS r (namespace, tag, key)
                      WHERE r.key IS NOT NULL GROUP BY r.namespace, r.tag
                     UNION
                     SELECT due.namespace, due.label, 1
                       FROM (SELECT DISTINCT r.namespace FROM unnest(p_namespaces) AS r (namespace)) AS freed
                      CROSS JOIN LATERAL due_lists('worker', ARRAY[freed.namespace], NULL) AS due) AS told;
        END IF;
    ELSE
        PERFORM notify_queue('worker', cardinality(p_namespaces), NULL, CASE WHEN p_namespaces[1] = ALL (p_namespaces) THEN p_namespaces[1] END);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION tell_of_places IS 'Internal: tells those who wait for a place that these leave theirs. Part of release_places.';

-- +goose StatementBegin
CREATE FUNCTION release_places(p_namespaces text[], p_tags text[], p_keys text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF note_releases(p_namespaces, p_tags, p_keys) THEN
        PERFORM tell_of_places(p_namespaces, p_tags, p_keys);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION release_places IS 'Internal: says that items with these namespaces, tags and keys (null: none) leave their places: those who wait for one are told, as by an insert.';

-- +goose StatementBegin
CREATE FUNCTION bring_back_left()
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
CREATE FUNCTION set_limits(
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
COMMENT ON FUNCTION set_limits IS 'Sets what of a namespace may be at work, for all nodes, from the next claim on: p_max_running items at one time, p_max_running_per_key with the same key, and of each key one in p_rate_interval, p_rate_burst of them at once; null: any number. p_weight are its chances where namespaces take turns. Items of sessions do not count. It rewrites what is held, or waits for its share, so with many of those it takes its time. PW003 if an argument breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION list_limits()
RETURNS TABLE (namespace text, weight integer, max_running integer, max_running_per_key integer, rate_interval interval, rate_burst integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT l.namespace, l.weight, l.max_running, l.max_running_per_key, l.rate_interval, l.rate_burst FROM limits l
     WHERE l.queue = 'worker' AND (l.weight <> 1 OR coalesce(l.max_running, l.max_running_per_key) IS NOT NULL OR l.rate_interval IS NOT NULL)
     ORDER BY l.namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_limits IS 'The limits of each namespace that has any, as set_limits takes them.';

-- +goose StatementBegin
CREATE FUNCTION list_paused(p_queue text)
RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT l.namespace FROM limits l WHERE l.queue = p_queue AND l.paused ORDER BY l.namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_paused IS 'The namespaces of a queue that are paused; * is the whole queue.';

-- +goose StatementBegin
CREATE FUNCTION pause(p_queue text, p_namespaces text[] DEFAULT NULL, p_paused boolean DEFAULT true)
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
COMMENT ON FUNCTION pause IS 'Has nobody claim from these namespaces of a queue (worker or orchestrator; null: from any namespace) from now on, or with p_paused false has everybody do so again. What is at work goes on. A queue that is paused as a whole is resumed as a whole; a namespace that is paused by itself remains so. PW003 if an argument breaks a rule.';

SELECT revoke_from_public();

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();
DROP FUNCTION pause, list_paused, list_limits, set_limits, bring_back_left, release_places, tell_of_places, note_releases, earliest_limited, earliest_of_lists, pay_shares, too_many, unclaim, sole_list, nothing_waits, pick_limited, begin_holding, keep_releasing, allot, forget_rates, has_rate, take_up_releases, bring_back, mark_running,
    at_work_of_key, at_work, lock_namespace, served;
