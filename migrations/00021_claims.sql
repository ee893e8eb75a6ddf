-- Claims in several namespaces do not wait for one another's keys, nor does a namespace that is asked for twice count twice. Limits are set by
-- transactions that see what they waited for. Namespaces are looked up one by one, also by a plan from when there were none.

-- +goose Up

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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     -- Each is looked up (OFFSET): a planner that believes that there are none would walk over all of them.
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name OFFSET 0)
     LIMIT max_namespaces() + 1;
    IF FOUND THEN -- which few enqueues come to
        PERFORM check_namespaces();
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
CREATE OR REPLACE FUNCTION served(p_queue text, p_namespaces text[])
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

    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::smallint, CASE WHEN v_claims = 0 AND v_buried >= v_buried_limit THEN v_buried END, NULL::text, NULL::json,
        NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::jsonb, NULL::text, v_holds::integer, NULL::timestamptz, NULL::timestamptz,
        v_until, v_earliest, clock_timestamp(), NULL::uuid;
    IF p_number IS NOT NULL AND (p_disarm OR v_claims = 0) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'worker', p_number, v_claims = 0, p_namespaces, p_tags, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name)
     LIMIT max_namespaces() + 1;
    IF FOUND THEN -- which few enqueues come to
        PERFORM check_namespaces();
    END IF;
END
$$;
-- +goose StatementEnd
