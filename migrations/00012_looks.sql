-- A look for work makes a hundred items dead letters at most, and says so if it has come no further. Of a session nothing is claimed past an item that
-- somebody has locked. Where there are limits, or namespaces take turns, the cost of a look grows with the number of namespaces, and not with its
-- square.

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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pick_work(
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
                        LIMIT p_limit + 32) head -- no more in later rounds: where one may not be claimed, none of its session that is behind it is
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
COMMENT ON FUNCTION fetch_work IS 'Claims up to p_limit due items under p_token: by priority, then visible_at, then id; those of these namespaces and tags (null: all), and with p_owner also those of sessions that are its own or free. The last row has no item: it carries the earliest visible_at that is left (see earliest_work), or now if all of a p_limit of 10 or more was claimed and there may be more, the clock, in places whether any limits hold (1 or 0), and in attempt_count, if it is unfinished, how many items the look made dead letters before it ended among them: the next gets further. p_announce tells the other nodes when the lease ends. An item that was claimed p_max_attempts times becomes a dead letter instead; after a hundred of them a look ends. With p_fair the namespaces that have something due take turns by their weight, and the order is that within each. p_ack_ids are acknowledged first; if the lock of one was lost, there is a row with it for each such, and no claim. With p_number, it writes to the row of the lane, of the node, that it is armed if nothing was found; if something was, and p_disarm, that it is not.';

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

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

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
        END IF;
    END LOOP;
    RETURN v_got;
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION pick_work(
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
