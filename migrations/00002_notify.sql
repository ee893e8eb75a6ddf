-- The notifications, and the functions that both queues share.
--
-- Every function pins its search_path to the schema that it was created in (FROM CURRENT). Those on
-- the hot path pin the shape of their plans as well: the statistics of a queue table are wrong most of
-- the time (empty when analyzed, a million rows a minute later, or the other way round), and each of
-- their queries has exactly one good plan, the walk along the index made for it.
--
-- SQLSTATEs raised here: PW001 the lock token is unknown or expired, PW002 not found, PW003 invalid argument,
-- PW004 the instance is running, PW005 it has a parent or children, PW006 rows would be lost, PW008 too many namespaces.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION channel(p_queue text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN 'pgwake_' || substr(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 1, 16) || '_' || p_queue;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION channel IS 'Notification channel of a queue (orchestrator or worker), or of changes to instances (instance). A hash, since LISTEN silently truncates names at 63 bytes.';

-- +goose StatementBegin
CREATE FUNCTION node_channel(p_queue text, p_node integer)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN channel(p_queue) || '_' || p_node;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION node_channel IS 'Internal: notification channel of a queue that one node alone listens on.';

-- +goose StatementBegin
CREATE FUNCTION notify_queue(p_queue text, p_due bigint, p_next timestamptz, p_namespace text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- "<due> <next, microseconds since 1970, 0 = none> <namespace, * = any> <sent>". The same for all of a transaction, of which
        -- equal notifications are one: so it was sent when that began.
        PERFORM pg_notify(channel(p_queue), concat_ws(' ',
            p_due, coalesce((extract(epoch FROM p_next) * 1000000)::bigint, 0), coalesce(p_namespace, '*'),
            (extract(epoch FROM transaction_timestamp()) * 1000000)::bigint));
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_queue IS 'Internal: tells the nodes that p_due items are due and that another becomes due at p_next (either may be absent), in one namespace or, if null, in any. Silent while the setting pgwake.notify is off.';

-- +goose StatementBegin
CREATE FUNCTION somebody_waits(p_queue text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM waiters w WHERE w.queue = p_queue AND w.armed);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION somebody_waits IS 'Internal: whether a lane of the queue is armed.';

-- +goose StatementBegin
CREATE FUNCTION wake(p_queue text, p_namespace text, p_label text, p_due bigint, p_hop integer DEFAULT 0,
    p_but_node integer DEFAULT NULL, p_but_lane integer DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_waiter record;
    v_needed integer := 1; -- for the items; others stand by
    v_wanted integer := 1;
    v_told   integer[] := '{}';
    v_all    boolean := false;
BEGIN
    FOR v_waiter IN
        SELECT w.node, w.lane, w.listener, w.fanout, w.places FROM waiters w
         WHERE w.queue = p_queue AND w.armed AND w.namespace = ANY (ARRAY[p_namespace, '*'])
           AND (w.namespaces IS NULL OR p_namespace = ANY (w.namespaces)) AND (w.labels IS NULL OR p_label = ANY (w.labels))
           AND (w.node IS DISTINCT FROM p_but_node OR w.lane <> p_but_lane)
         ORDER BY w.fanout > 0, random()
    LOOP
        -- Whoever can have its lock knows that the connection has ended; a node knows that its own has not.
        CONTINUE WHEN v_waiter.node = ANY (v_told) OR v_waiter.node IS DISTINCT FROM p_but_node
            AND pg_try_advisory_xact_lock_shared(hashtext('pgwake nodes of ' || current_schema()), v_waiter.listener);
        IF v_waiter.fanout = 0 THEN -- that node, or observer, wants to hear of everything
            PERFORM notify_queue(p_queue, p_due, NULL, p_namespace);
            EXIT WHEN p_but_lane IS NULL;
            v_all := true;
            CONTINUE;
        END IF;
        CONTINUE WHEN v_all AND v_waiter.node <> p_but_node; -- which alone does not hear what it says to all
        IF p_hop = 0 THEN
            v_needed := greatest(v_needed, (p_due + v_waiter.places - 1) / v_waiter.places);
            v_wanted := greatest(v_wanted, v_needed, v_waiter.fanout);
        END IF;
        -- "<lane> <how often it was passed on> <1: stand by> <namespace> <sent>"
        PERFORM pg_notify(node_channel(p_queue, v_waiter.node), concat_ws(' ',
            v_waiter.lane, p_hop, (cardinality(v_told) >= v_needed)::integer, p_namespace,
            (extract(epoch FROM transaction_timestamp()) * 1000000)::bigint));
        v_told := v_told || v_waiter.node;
        EXIT WHEN cardinality(v_told) >= v_wanted;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION wake IS 'Internal: notifies some lane that is armed and takes p_due items of this namespace and label (tag of a work item, queue name of an instance) with no session, pinned version or sticky owner: enough for all of the items, and as many as its fanout says, on a node each. Those that are not needed look a moment later. Not the lane p_but_lane of p_but_node, which calls this; null: none of that node. p_hop is how often they were passed on; then one is told.';

-- A lane that is not armed is one of which nobody waits, or else one that has a look to come which sees whatever a
-- producer adds that read it as not armed: the node waits (wait_for_producers) until every such producer has ended, and
-- looks after that. So a producer may tell those alone that it sees as armed, provided that
--   (1) it held the lock that they share before it read who is armed, which keeps the node waiting; without it
--       somebody may be waiting for those that hold it, and will not wait for this one;
--   (2) it read in a snapshot taken after that, and after its rows were written.
-- A producer that is not sure tells all. So it does with what not every dispatcher of a lane can take, since whoever is told
-- alone may have to be the one who takes it.

-- +goose StatementBegin
DO $do$
BEGIN
    -- It pins no settings, which would cost a producer twice what all else here does. So all its names are in full, operators
    -- and types among them, since it runs on the path of whoever inserts; and its plans are what the planner likes: the table is small.
    EXECUTE format($create$
CREATE FUNCTION %1$I.notify_inserted()
RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    v_now   pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    v_fanout smallint := 0; -- all are told
    v_due   bigint;
    v_any   bigint; -- those of them that any dispatcher of a lane can take
    v_next  pg_catalog.timestamptz;
    v_first pg_catalog.text;
    v_last  pg_catalog.text;
    v_kinds integer;
    v_namespaces pg_catalog.text[];
    v_labels     pg_catalog.text[];
    v_counts     bigint[];
BEGIN
    -- Each busy producer comes this far. What could be a function of its own is not: calling one costs as much as all
    -- of this, for the settings that it pins.
    IF pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtext('pgwake producers'), TG_RELID::integer)
       AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) ANY (ARRAY['read committed', 'read uncommitted']) THEN
        -- In a statement of its own, and so in a snapshot of its own.
        IF NOT EXISTS (SELECT FROM %1$I.waiters w WHERE w.queue OPERATOR(pg_catalog.=) TG_ARGV[0] AND w.armed) THEN
            RETURN NULL;
        END IF;
        SELECT pg_catalog.min(w.fanout) INTO v_fanout FROM %1$I.waiters w WHERE w.queue OPERATOR(pg_catalog.=) TG_ARGV[0] AND w.armed; -- null, if none is by now: all are told
    END IF;
    IF TG_ARGV[0] OPERATOR(pg_catalog.=) 'worker' THEN
        SELECT pg_catalog.sum(k.due), pg_catalog.sum(k.any), pg_catalog.min(k.next), pg_catalog.min(k.namespace), pg_catalog.max(k.namespace), pg_catalog.count(*),
               pg_catalog.array_agg(k.namespace), pg_catalog.array_agg(k.tag), pg_catalog.array_agg(k.any)
          INTO v_due, v_any, v_next, v_first, v_last, v_kinds, v_namespaces, v_labels, v_counts
          FROM (SELECT i.namespace, i.tag, pg_catalog.count(*) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.<=) v_now) AS due,
                       pg_catalog.count(*) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.<=) v_now AND i.session_id IS NULL) AS any,
                       pg_catalog.min(i.visible_at) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.>) v_now) AS next
                  FROM inserted i GROUP BY i.namespace, i.tag) AS k;
    ELSE
        SELECT pg_catalog.sum(k.due), pg_catalog.sum(k.any), pg_catalog.min(k.next), pg_catalog.min(k.namespace), pg_catalog.max(k.namespace), pg_catalog.count(*),
               pg_catalog.array_agg(k.namespace), pg_catalog.array_agg(k.queue), pg_catalog.array_agg(k.any)
          INTO v_due, v_any, v_next, v_first, v_last, v_kinds, v_namespaces, v_labels, v_counts
          FROM (SELECT i.namespace, i.queue, pg_catalog.count(*) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.<=) v_now) AS due,
                       pg_catalog.count(*) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.<=) v_now AND i.pin OPERATOR(pg_catalog.=) 0) AS any,
                       pg_catalog.min(i.visible_at) FILTER (WHERE i.visible_at OPERATOR(pg_catalog.>) v_now) AS next
                  FROM inserted i GROUP BY i.namespace, i.queue) AS k;
    END IF;
    IF v_fanout OPERATOR(pg_catalog.>) 0 AND v_kinds OPERATOR(pg_catalog.<=) 16 THEN -- of more kinds all are told: each costs a search of those who wait, in the producer's commit
        PERFORM %1$I.wake(TG_ARGV[0], k.namespace, k.label, k.due)
           FROM unnest(v_namespaces, v_labels, v_counts) AS k (namespace, label, due) WHERE k.due OPERATOR(pg_catalog.>) 0; -- of several arrays: that is pg_catalog's
        v_due := v_due OPERATOR(pg_catalog.-) v_any;
    END IF;
    IF v_due OPERATOR(pg_catalog.>) 0 OR v_next IS NOT NULL THEN
        PERFORM %1$I.notify_queue(TG_ARGV[0], v_due, v_next, CASE WHEN v_first OPERATOR(pg_catalog.=) v_last THEN v_first END);
    END IF;
    RETURN NULL;
END
$$;
$create$, current_schema());
END
$do$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_inserted IS 'Internal: notifies, of all rows of an INSERT, how many are due and when the next one will be, unless nobody waits for them: some lanes that are armed if any of them will do, or else everybody.';

CREATE TRIGGER worker_queue_notify AFTER INSERT ON worker_queue
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
    WHEN (current_setting('pgwake.notify', true) IS DISTINCT FROM 'off')
    EXECUTE FUNCTION notify_inserted('worker');
CREATE TRIGGER orchestrator_queue_notify AFTER INSERT ON orchestrator_queue
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
    WHEN (current_setting('pgwake.notify', true) IS DISTINCT FROM 'off')
    EXECUTE FUNCTION notify_inserted('orchestrator');

-- +goose StatementBegin
CREATE FUNCTION quiet(p_quiet boolean)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_before text := current_setting('pgwake.notify', true);
BEGIN
    IF p_quiet THEN
        PERFORM set_config('pgwake.notify', 'off', true);
    END IF;
    RETURN coalesce(v_before, '');
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION quiet IS 'Internal: with true, silences the notifications of this transaction. Returns the setting to go back to.';

-- +goose StatementBegin
CREATE FUNCTION reads_committed()
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION reads_committed IS 'Internal: whether each statement of the transaction sees what was committed before it.';

-- +goose StatementBegin
CREATE FUNCTION lock_patience() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$ SELECT '60s' $$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_patience IS 'Internal: how long to wait for an advisory lock at most, unless lock_timeout is set.';

-- +goose StatementBegin
CREATE FUNCTION take_lock(p_class integer, p_key integer, p_what text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_holder integer;
BEGIN
    IF pg_try_advisory_xact_lock(p_class, p_key) THEN
        RETURN;
    END IF;
    DECLARE
        v_before text := current_setting('lock_timeout');
    BEGIN
        IF v_before = '0' THEN
            PERFORM set_config('lock_timeout', lock_patience(), true);
        END IF;
        PERFORM pg_advisory_xact_lock(p_class, p_key);
        PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available THEN
        SELECT l.pid INTO v_holder FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.classid = p_class::oid AND l.objid = p_key::oid AND l.objsubid = 2 AND l.granted LIMIT 1;
        RAISE EXCEPTION 'another session (pid %) has held the advisory lock (%, %) for too long, which is that of %', v_holder, p_class, p_key, p_what
            USING ERRCODE = 'lock_not_available', HINT = 'It is a transaction that stays open, or a stranger''s lock with the same key: see pg_locks.';
    END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION take_lock IS 'Internal: takes an advisory lock for the transaction; 55P03 if others hold it for too long. Any session of the database can: locks have no owner.';

-- +goose StatementBegin
CREATE FUNCTION max_namespaces() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$ SELECT 100000 $$;
-- +goose StatementEnd
COMMENT ON FUNCTION max_namespaces IS 'How many namespaces there may be. One more is refused with PW008; but transactions that each add one at the same time do not wait for each other, and so there may be as many more as they are.';

-- +goose StatementBegin
CREATE FUNCTION check_namespaces() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    -- Ids are given once and ascend, so while they are few nothing need be counted.
    IF (SELECT max(n.id) FROM namespaces n) > max_namespaces() AND (SELECT count(*) FROM namespaces) > max_namespaces() THEN
        RAISE EXCEPTION 'there are % namespaces, and no more can be added', max_namespaces() USING ERRCODE = 'PW008';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_namespaces IS 'Internal: PW008 if there are more namespaces than there may be.';

-- +goose StatementBegin
CREATE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name);
    IF FOUND THEN -- which few enqueues come to
        PERFORM check_namespaces();
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_namespaces IS 'Internal: adds the namespaces that the registry lacks, in the transaction of their first items; never waits. PW008 if they are too many. To be called before quiet: whoever leaves the notification of items to the caller does not leave that of a namespace, which happens once.';

-- +goose StatementBegin
CREATE FUNCTION notify_namespaces()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- The empty id is no instance's: this is its hash, as notify_instance has them.
        PERFORM pg_notify(channel('instance'), 'e3b0c44298fc1c14');
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_namespaces IS 'Internal: tells the nodes that there is another namespace, whoever adds it. Silent while the setting pgwake.notify is off, but not by p_quiet, which has no say yet when a verb registers its namespaces.';

-- For each row: as a statement's it would be called at every enqueue, which tries to add none.
CREATE TRIGGER namespaces_notify AFTER INSERT ON namespaces FOR EACH ROW EXECUTE FUNCTION notify_namespaces();

-- +goose StatementBegin
CREATE FUNCTION work_lists(p_namespaces text[], p_tags text[])
RETURNS TABLE (namespace text, tag text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    -- From each pair to the one before it along the index, past all their rows. What was claimed last is at the end of a pair; at
    -- its beginning there may be many entries of what is gone.
    IF p_namespaces IS NULL THEN
        RETURN QUERY
        WITH RECURSIVE list AS (
            (SELECT q.namespace, q.tag FROM worker_queue q WHERE q.session_id IS NULL
              ORDER BY q.namespace DESC, q.tag DESC, q.priority DESC, q.visible_at DESC LIMIT 1)
            UNION ALL
            SELECT next.* FROM list l CROSS JOIN LATERAL (
                SELECT q.namespace, q.tag FROM worker_queue q
                 WHERE (q.namespace, q.tag) < (l.namespace, l.tag) AND q.session_id IS NULL
                 ORDER BY q.namespace DESC, q.tag DESC, q.priority DESC, q.visible_at DESC LIMIT 1) next
        )
        SELECT l.* FROM list l WHERE p_tags IS NULL OR l.tag = ANY (p_tags);
    ELSE
        RETURN QUERY
        WITH RECURSIVE list AS (
            SELECT head.* FROM unnest(p_namespaces) AS served (name) CROSS JOIN LATERAL (
                SELECT q.namespace, q.tag FROM worker_queue q
                 WHERE q.namespace = served.name AND q.session_id IS NULL
                 ORDER BY q.namespace DESC, q.tag DESC, q.priority DESC, q.visible_at DESC LIMIT 1) head
            UNION ALL
            SELECT next.* FROM list l CROSS JOIN LATERAL (
                SELECT q.namespace, q.tag FROM worker_queue q
                 WHERE q.namespace = l.namespace AND (q.tag) < (l.tag) AND q.session_id IS NULL
                 ORDER BY q.namespace DESC, q.tag DESC, q.priority DESC, q.visible_at DESC LIMIT 1) next
        )
        SELECT l.* FROM list l WHERE p_tags IS NULL OR l.tag = ANY (p_tags);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION work_lists IS 'Internal: which pairs of namespace and tag there are in the worker queue, sessions left out, of these namespaces and tags (null: all).';

-- +goose StatementBegin
CREATE FUNCTION asked_lists(p_namespaces text[], p_tags text[])
RETURNS TABLE (namespace text, tag text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    IF p_namespaces IS NOT NULL AND p_tags IS NOT NULL THEN
        RETURN QUERY SELECT n.name, t.name FROM unnest(p_namespaces) AS n (name) CROSS JOIN unnest(p_tags) AS t (name);
    ELSIF p_namespaces IS NOT NULL THEN
        RETURN QUERY SELECT l.namespace, l.tag FROM work_lists(p_namespaces, p_tags) AS l;
    ELSIF p_tags IS NULL THEN -- the index of what has no tag serves that over all namespaces
        RETURN QUERY SELECT l.namespace, l.tag FROM work_lists(NULL, NULL) AS l WHERE l.tag <> '';
    ELSIF p_tags <> ARRAY[''] THEN -- from each namespace to the next, past all tags
        RETURN QUERY
        WITH RECURSIVE space AS (
            (SELECT q.namespace FROM worker_queue q WHERE q.session_id IS NULL ORDER BY q.namespace, q.tag LIMIT 1)
            UNION ALL
            SELECT next.namespace FROM space s CROSS JOIN LATERAL (
                SELECT q.namespace FROM worker_queue q
                 WHERE q.namespace > s.namespace AND q.session_id IS NULL
                 ORDER BY q.namespace, q.tag LIMIT 1) next
        )
        SELECT s.namespace, t.name FROM space s CROSS JOIN unnest(p_tags) AS t (name) WHERE t.name <> '';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION asked_lists IS 'Internal: the lists, each a namespace and a tag, that a query for work has to merge.';

-- +goose StatementBegin
CREATE FUNCTION session_lists(p_owner text, p_now timestamptz)
RETURNS TABLE (session_id text, free_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE list AS (
        (SELECT q.session_id FROM worker_queue q WHERE q.session_id IS NOT NULL ORDER BY q.session_id LIMIT 1)
        UNION ALL
        SELECT next.session_id FROM list l CROSS JOIN LATERAL (
            SELECT q.session_id FROM worker_queue q
             WHERE q.session_id IS NOT NULL AND q.session_id > l.session_id
             ORDER BY q.session_id LIMIT 1) next
    )
    SELECT l.session_id, CASE WHEN s.owner <> p_owner AND s.locked_until > p_now THEN s.locked_until END
      FROM list l LEFT JOIN sessions s ON s.session_id = ANY (ARRAY[l.session_id]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION session_lists IS 'Internal: which sessions there are in the worker queue, and when those that another owner holds are free.';

-- +goose StatementBegin
CREATE FUNCTION earliest_work(p_namespaces text[], p_tags text[] DEFAULT ARRAY[''], p_owner text DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_served   text[] := p_namespaces;
    v_limited  boolean := EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds);
    v_earliest timestamptz;
BEGIN
    IF v_limited THEN
        v_served := served('worker', p_namespaces);
        v_earliest := earliest_limited(v_served, p_tags);
    ELSIF p_namespaces IS NULL AND (p_tags IS NULL OR '' = ANY (p_tags)) THEN
        SELECT min(head.visible_at) INTO v_earliest
          FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE -q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    IF NOT v_limited AND (p_namespaces IS NOT NULL OR p_tags IS NULL OR p_tags <> ARRAY['']) THEN
        SELECT least(v_earliest, min(head.visible_at)) INTO v_earliest
          FROM asked_lists(p_namespaces, p_tags) AS list
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE q.namespace = list.namespace AND q.tag = list.tag AND q.priority = level.priority AND q.session_id IS NULL
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    IF p_owner IS NOT NULL THEN
        SELECT least(v_earliest, min(greatest(head.visible_at, list.free_at))) INTO v_earliest
          FROM session_lists(p_owner, v_now) AS list
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM worker_queue q
                WHERE q.session_id = list.session_id AND (v_served IS NULL OR q.namespace = ANY (v_served))
                  AND (p_tags IS NULL OR q.tag = ANY (p_tags))
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION earliest_work IS 'Earliest visible_at among the work items of these namespaces and tags (null: all), and with p_owner those of sessions that this owner may claim. If it has passed, something is due; if not, that is when something next will be, ends of leases included; null means none at all. Of what is paused, and what a limit keeps back, that counts when it can be taken.';

-- +goose StatementBegin
CREATE FUNCTION message_lists(p_namespaces text[], p_queues text[], p_min_pin bigint, p_max_pin bigint)
RETURNS TABLE (namespace text, queue text, pin bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    IF p_queues IS NOT NULL THEN
        -- From each namespace to the next, past all queue names, and from each version to the next in those asked for.
        RETURN QUERY
        WITH RECURSIVE space AS (
            (SELECT q.namespace FROM orchestrator_queue q WHERE p_namespaces IS NULL ORDER BY q.namespace, q.queue LIMIT 1)
            UNION ALL
            SELECT next.namespace FROM space s CROSS JOIN LATERAL (
                SELECT q.namespace FROM orchestrator_queue q WHERE q.namespace > s.namespace ORDER BY q.namespace, q.queue LIMIT 1) next
        ), list AS (
            SELECT head.* FROM (SELECT s.namespace FROM space s UNION ALL SELECT n.name FROM unnest(p_namespaces) AS n (name)) AS served
             CROSS JOIN unnest(p_queues) AS asked (name) CROSS JOIN LATERAL (
                SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
                 WHERE q.namespace = served.namespace AND q.queue = asked.name
                 ORDER BY q.pin LIMIT 1) head
            UNION ALL
            SELECT next.* FROM list l CROSS JOIN LATERAL (
                SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
                 WHERE q.namespace = l.namespace AND q.queue = l.queue AND q.pin > l.pin
                 ORDER BY q.pin LIMIT 1) next
        )
        SELECT l.* FROM list l WHERE p_min_pin IS NULL OR l.pin = 0 OR l.pin BETWEEN p_min_pin AND p_max_pin;
        RETURN;
    END IF;
    -- From each pair to the next along the index, past all their rows.
    IF p_namespaces IS NULL THEN
        RETURN QUERY
        WITH RECURSIVE list AS (
            (SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q ORDER BY q.namespace, q.queue, q.pin LIMIT 1)
            UNION ALL
            SELECT next.* FROM list l CROSS JOIN LATERAL (
                SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
                 WHERE (q.namespace, q.queue, q.pin) > (l.namespace, l.queue, l.pin)
                 ORDER BY q.namespace, q.queue, q.pin LIMIT 1) next
        )
        SELECT l.* FROM list l WHERE p_min_pin IS NULL OR l.pin = 0 OR l.pin BETWEEN p_min_pin AND p_max_pin;
    ELSE
        RETURN QUERY
        WITH RECURSIVE list AS (
            SELECT head.* FROM unnest(p_namespaces) AS served (name) CROSS JOIN LATERAL (
                SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
                 WHERE q.namespace = served.name
                 ORDER BY q.namespace, q.queue, q.pin LIMIT 1) head
            UNION ALL
            SELECT next.* FROM list l CROSS JOIN LATERAL (
                SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
                 WHERE q.namespace = l.namespace AND (q.queue, q.pin) > (l.queue, l.pin)
                 ORDER BY q.namespace, q.queue, q.pin LIMIT 1) next
        )
        SELECT l.* FROM list l WHERE p_min_pin IS NULL OR l.pin = 0 OR l.pin BETWEEN p_min_pin AND p_max_pin;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION message_lists IS 'Internal: which namespaces, queue names and pinned versions there are in the orchestrator queue, of those asked for (null: all). Rows without a version count as of any.';

-- +goose StatementBegin
CREATE FUNCTION sticky_lists(p_owner text, p_namespaces text[], p_queues text[], p_min_pin bigint, p_max_pin bigint)
RETURNS TABLE (namespace text, queue text, pin bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE list AS (
        (SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q WHERE q.sticky_owner = p_owner
          ORDER BY q.namespace, q.queue, q.pin LIMIT 1)
        UNION ALL
        SELECT next.* FROM list l CROSS JOIN LATERAL (
            SELECT q.namespace, q.queue, q.pin FROM orchestrator_queue q
             WHERE q.sticky_owner = p_owner AND (q.namespace, q.queue, q.pin) > (l.namespace, l.queue, l.pin)
             ORDER BY q.namespace, q.queue, q.pin LIMIT 1) next
    )
    SELECT l.* FROM list l WHERE (p_namespaces IS NULL OR l.namespace = ANY (p_namespaces)) AND (p_queues IS NULL OR l.queue = ANY (p_queues))
       AND (p_min_pin IS NULL OR l.pin = 0 OR l.pin BETWEEN p_min_pin AND p_max_pin);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION sticky_lists IS 'Internal: message_lists for what is sticky to p_owner.';

-- +goose StatementBegin
CREATE FUNCTION earliest_message(
    p_namespaces text[], p_queues text[] DEFAULT NULL, p_min_pin bigint DEFAULT NULL, p_max_pin bigint DEFAULT NULL,
    p_owner text DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_served   text[] := served('orchestrator', p_namespaces);
    v_earliest timestamptz;
BEGIN
    IF v_served IS NULL AND p_queues IS NULL AND p_min_pin IS NULL THEN
        SELECT min(head.visible_at) INTO v_earliest
          FROM generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM orchestrator_queue q
                WHERE -q.priority = -level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    ELSE
        SELECT min(head.visible_at) INTO v_earliest
          FROM message_lists(v_served, p_queues, p_min_pin, p_max_pin) AS list
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.visible_at FROM orchestrator_queue q
                WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin AND q.priority = level.priority
                ORDER BY q.visible_at LIMIT 1) head;
    END IF;
    SELECT least(v_earliest, min(r.next_at)) INTO v_earliest FROM realignments r;
    IF p_owner IS NOT NULL THEN
        SELECT least(v_earliest, min(head.sticky_due)) INTO v_earliest
          FROM sticky_lists(p_owner, v_served, p_queues, p_min_pin, p_max_pin) AS list
         CROSS JOIN generate_series(0, 9) AS level (priority)
         CROSS JOIN LATERAL (
               SELECT q.sticky_due FROM orchestrator_queue q
                WHERE q.sticky_owner = p_owner AND q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                  AND q.priority = level.priority
                ORDER BY q.sticky_due LIMIT 1) head;
    END IF;
    RETURN v_earliest;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION earliest_message IS 'Earliest visible_at among the messages of these namespaces and queue names (null: all) that a node of these versions may take, and for p_owner earliest sticky_due among those that are sticky to it. If it has passed, something is due, or may be; if not, that is when something next will be, ends of leases included; null means none at all.';

-- +goose StatementBegin
CREATE FUNCTION texts(p_array jsonb)
RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
RETURN CASE WHEN p_array IS NOT NULL THEN ARRAY(SELECT e.value FROM jsonb_array_elements_text(p_array) AS e (value)) END;
-- +goose StatementEnd
COMMENT ON FUNCTION texts IS 'Internal: a JSON array of strings as an array; null for null.';

-- +goose StatementBegin
CREATE FUNCTION due_lists(p_queue text, p_namespaces text[], p_labels text[])
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
COMMENT ON FUNCTION due_lists IS 'Internal: in which of these namespaces and labels (null: all) something is due that any dispatcher can take who serves them.';

-- +goose StatementBegin
CREATE FUNCTION pass_on(p_queue text, p_namespaces text[], p_labels text[], p_due bigint, p_hop integer,
    p_but_node integer DEFAULT NULL, p_but_lane integer DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF somebody_waits(p_queue) THEN -- or what is due need not be looked for
        PERFORM wake(p_queue, list.namespace, list.label, p_due, p_hop, p_but_node, p_but_lane)
           FROM due_lists(p_queue, p_namespaces, p_labels) AS list;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pass_on IS 'Internal: wake for each namespace and label, of these (null: all), in which something is due, p_due items in each for all that is known.';

-- +goose StatementBegin
CREATE FUNCTION wait_for_producers(p_queue text, p_patience interval)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM set_config('lock_timeout', (extract(epoch FROM p_patience) * 1000)::bigint::text, true);
    PERFORM pg_advisory_xact_lock(hashtext('pgwake producers'), (p_queue || '_queue')::regclass::oid::integer);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION wait_for_producers IS 'Internal: waits, for at most p_patience (0: for ever), until every transaction has ended that added to the queue without a notification before this was called. False if it takes longer. Meanwhile nobody is silent. To be the only statement of its transaction, which keeps them from being silent until it ends.';

-- +goose StatementBegin
CREATE FUNCTION producers(p_queue text, p_waiter integer)
RETURNS integer[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.pid = p_waiter AND NOT l.granted) THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(
        SELECT coalesce(l.pid, 0) FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.mode = 'ShareLock' AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND l.classid = (hashtext('pgwake producers')::bigint & 4294967295)::oid AND l.objid = (p_queue || '_queue')::regclass::oid
         ORDER BY l.pid);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION producers IS 'Internal: process ids of the sessions whose open transaction has added to the queue, and may have been silent: those for which the session p_waiter waits, in wait_for_producers. Null if it does not: later ones may have come before it. Of a prepared transaction it is 0.';

-- +goose StatementBegin
CREATE FUNCTION arm(p_node integer, p_lane integer, p_listener integer, p_queue text, p_number bigint, p_armed boolean,
    p_namespaces text[], p_labels text[], p_fanout integer, p_places integer)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO waiters AS w (node, lane, listener, queue, number, armed, namespace, namespaces, labels, fanout, places)
    VALUES (p_node, p_lane, p_listener, p_queue, p_number, p_armed, CASE WHEN cardinality(p_namespaces) = 1 THEN p_namespaces[1] ELSE '*' END,
            p_namespaces, p_labels, p_fanout, p_places)
    ON CONFLICT (node, lane) DO UPDATE SET armed = p_armed, number = p_number, listener = p_listener, places = p_places
     WHERE w.number < p_number;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION arm IS 'Internal: writes whether a lane is armed, unless the row has a newer number.';

-- +goose StatementBegin
CREATE FUNCTION disarm_node(p_node integer)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_queues text[];
BEGIN
    IF has_table_privilege('waiters', 'UPDATE') THEN
        -- The newest number: a fetch that was cut short may still be under way on the server.
        WITH disarmed AS (UPDATE waiters w SET armed = false, number = 9223372036854775807 WHERE w.node = p_node RETURNING w.queue)
        SELECT array_agg(DISTINCT d.queue) INTO v_queues FROM disarmed d;
    END IF;
    RETURN coalesce(v_queues, '{}');
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION disarm_node IS 'Internal: disarms all lanes of a node that is about to leave, and will not arm any again. Returns their queues.';

-- +goose StatementBegin
CREATE FUNCTION dead_queues(p_node integer)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN ARRAY(
        SELECT DISTINCT dead.queue
          FROM (SELECT w.queue, w.listener FROM waiters w WHERE w.node <> p_node OFFSET 0) AS dead
         WHERE pg_try_advisory_xact_lock_shared(hashtext('pgwake nodes of ' || current_schema()), dead.listener)); -- shared, as in wake
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION dead_queues IS 'Internal: for which queues there are rows of other nodes than p_node whose connection has ended: see remove_waiters.';

-- +goose StatementBegin
CREATE FUNCTION remove_waiters(p_queue text, p_node integer, p_own boolean, p_patience interval)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_row waiters;
BEGIN
    IF NOT has_table_privilege('waiters', 'DELETE') THEN -- the node of a role that may only add to the queues
        RETURN true;
    END IF;
    -- In this transaction: who dies after the wait may have been chosen since. What they have left is not to be seen in an
    -- old snapshot.
    IF NOT reads_committed() OR NOT wait_for_producers(p_queue, p_patience) THEN
        RETURN false;
    END IF;
    FOR v_row IN SELECT w.* FROM waiters w WHERE w.queue = p_queue AND (w.node = p_node) = p_own ORDER BY w.node, w.lane LOOP
        -- Shared: if it were not, a producer would take the dead for living.
        CONTINUE WHEN NOT p_own AND NOT pg_try_advisory_xact_lock_shared(hashtext('pgwake nodes of ' || current_schema()), v_row.listener);
        DELETE FROM waiters w WHERE w.node = v_row.node AND w.lane = v_row.lane AND w.listener = v_row.listener;
        IF FOUND AND v_row.lane > 0 THEN
            PERFORM pass_on(p_queue, v_row.namespaces, v_row.labels, 1, 0, p_node, CASE WHEN NOT p_own THEN 0 END);
        END IF;
    END LOOP;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION remove_waiters IS 'Internal: removes the rows of a node that is about to leave, see disarm_node, or with p_own false those of all others whose connection has ended, and passes on what is due for their lanes: whoever has chosen one of them, and told nobody else, has ended by then, since it waits for all producers. False if that takes longer than p_patience, or the transaction is not READ COMMITTED; then nothing is removed.';

-- +goose StatementBegin
CREATE FUNCTION earliest_of_lanes(p_queues text[], p_filters text[])
RETURNS TABLE (lane integer, earliest_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_sessions boolean := EXISTS (SELECT FROM worker_queue q WHERE q.session_id IS NOT NULL);
    v_notes    boolean := false;
BEGIN
    IF 'orchestrator' = ANY (p_queues) THEN -- or the role may only add to the queues, and not read that
        v_notes := EXISTS (SELECT FROM realignments);
    END IF;
    -- A node may serve a thousand namespaces, most of which have no row at all: that is seen at the price of one probe of an
    -- index each, where the functions cost as much as a statement. Whatever could make them see something has them asked.
    RETURN QUERY
    SELECT asked.ord::integer,
           CASE
               WHEN asked.queue = 'worker' THEN CASE
                   WHEN NOT asked.filter ? 'namespaces' OR v_sessions AND asked.filter ? 'owner'
                        OR EXISTS (SELECT FROM jsonb_array_elements_text(asked.filter -> 'namespaces') AS n (name)
                                    CROSS JOIN LATERAL (SELECT FROM worker_queue q WHERE q.namespace = n.name AND q.session_id IS NULL LIMIT 1) AS a_row)
                   THEN earliest_work(texts(asked.filter -> 'namespaces'), texts(asked.filter -> 'labels'), asked.filter ->> 'owner') END
               WHEN NOT asked.filter ? 'namespaces' OR v_notes
                    OR EXISTS (SELECT FROM jsonb_array_elements_text(asked.filter -> 'namespaces') AS n (name)
                                CROSS JOIN LATERAL (SELECT FROM orchestrator_queue q WHERE q.namespace = n.name LIMIT 1) AS a_row)
               THEN earliest_message(texts(asked.filter -> 'namespaces'), texts(asked.filter -> 'labels'),
                                     (asked.filter ->> 'min')::bigint, (asked.filter ->> 'max')::bigint, asked.filter ->> 'owner')
           END,
           clock_timestamp()
      FROM (SELECT f.queue, f.filter::jsonb, f.ord
              FROM unnest(p_queues, p_filters) WITH ORDINALITY AS f (queue, filter, ord)) AS asked;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION earliest_of_lanes IS 'Internal: for each lane of a node, a queue and a filter, what earliest_work or earliest_message says, and the clock. A filter is an object of namespaces, labels (tags of work items, queue names of instances), owner (of sessions, or to whom instances are sticky), min and max (pinned version); what is absent does not filter. What a node polls with that serves several namespaces.';

-- +goose StatementBegin
CREATE FUNCTION node_listens(p_node integer)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_listener integer;
BEGIN
    SELECT w.listener INTO v_listener FROM waiters w WHERE w.node = p_node AND w.lane = 0;
    RETURN FOUND AND NOT pg_try_advisory_xact_lock_shared(hashtext('pgwake nodes of ' || current_schema()), v_listener); -- shared, as in wake
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION node_listens IS 'Whether a node, by its key, has a LISTEN connection at this moment. False also for one whose role may not say that it has, and always on that connection itself.';

-- +goose StatementBegin
CREATE FUNCTION call_beat(p_beat text, p_node integer, p_about text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_news boolean;
BEGIN
    EXECUTE format('SELECT %I($1, $2)', p_beat) INTO v_news USING p_node, p_about;
    RETURN coalesce(v_news, true);
EXCEPTION WHEN OTHERS THEN
    RETURN true; -- the layer is going to look, and sees what is wrong
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION call_beat IS 'Internal: calls the function of a layer that goes with the periodic statement of p_node, and returns whether there is something new for the layer. Whatever fails there concerns nobody else.';

-- +goose StatementBegin
CREATE FUNCTION look(p_queues text[], p_filters text[], p_node integer, p_lanes integer[], p_newest integer,
    p_beats text[] DEFAULT '{}', p_abouts text[] DEFAULT '{}')
RETURNS TABLE (lane integer, earliest_at timestamptz, now_at timestamptz, alone boolean, dead text[], known bigint, news boolean[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT e.lane, e.earliest_at, e.now_at, NULL::boolean, NULL::text[], NULL::bigint, NULL::boolean[] FROM earliest_of_lanes(p_queues, p_filters) AS e;
    IF has_table_privilege('waiters', 'DELETE') THEN
        -- A lane that is newer than the list may have its row already, and count on it.
        DELETE FROM waiters w WHERE w.node = p_node AND w.lane BETWEEN 1 AND p_newest AND w.lane <> ALL (p_lanes);
    END IF;
    IF has_table_privilege('worker_queue', 'UPDATE') AND EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds) THEN
        PERFORM bring_back_left();
    END IF;
    RETURN QUERY SELECT 0, NULL::timestamptz, clock_timestamp(), NOT EXISTS (SELECT FROM waiters w WHERE w.node NOT IN (p_node, 0)), dead_queues(p_node),
           (SELECT count(*) FROM namespaces),
           ARRAY(SELECT call_beat(b.beat, p_node, b.about) FROM unnest(p_beats, p_abouts) WITH ORDINALITY AS b (beat, about, ord) ORDER BY b.ord);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION look IS 'Internal: earliest_of_lanes, and then a row that says whether p_node is the only node that listens, dead_queues, how many namespaces were registered, and what call_beat says to each of p_beats. Of the lanes of p_node up to p_newest only p_lanes are left: the rows of the others go. The one statement a minute of an idle node.';

-- +goose StatementBegin
CREATE FUNCTION notify_queues(p_node integer, p_queues text[], p_due bigint[], p_next timestamptz[], p_namespaces text[], p_labels text[],
    p_hows text[], p_lanes integer[], p_instances text[] DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_told record;
    v_lane waiters;
BEGIN
    FOR v_told IN SELECT * FROM unnest(p_queues, p_due, p_next, p_namespaces, p_labels, p_hows, p_lanes) AS told (queue, due, next, namespace, label, how, lane) LOOP
        IF v_told.how = 'all' THEN
            PERFORM notify_queue(v_told.queue, v_told.due, v_told.next, v_told.namespace);
            CONTINUE;
        END IF;
        -- What this tells of was committed before, so whoever is not armed by now will see it when it looks.
        IF v_told.how = 'one kind' THEN
            PERFORM wake(v_told.queue, v_told.namespace, v_told.label, v_told.due, 0, p_node);
            CONTINUE WHEN v_told.next IS NULL;
            v_told.due := 0;
        END IF;
        CONTINUE WHEN NOT somebody_waits(v_told.queue);
        IF v_told.how = 'any' THEN
            IF v_told.due > 0 THEN
                PERFORM pass_on(v_told.queue, CASE WHEN v_told.namespace IS NOT NULL THEN ARRAY[v_told.namespace] END, NULL, v_told.due, 0, p_node);
            END IF;
            CONTINUE WHEN v_told.next IS NULL;
            v_told.due := 0;
        ELSIF v_told.how = 'bounce' THEN
            -- If its row is gone, whatever is due.
            SELECT * INTO v_lane FROM waiters w WHERE w.node = p_node AND w.lane = v_told.lane;
            PERFORM pass_on(v_told.queue, v_lane.namespaces, v_lane.labels, v_told.due, 1, p_node, v_told.lane);
            CONTINUE;
        END IF;
        PERFORM notify_queue(v_told.queue, v_told.due, v_told.next, v_told.namespace);
    END LOOP;
    PERFORM pg_notify(channel('instance'), changed.hash) FROM unnest(p_instances) AS changed (hash);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_queues IS 'Internal: what p_node has to say, in one round trip. Each entry tells of items that are due or will be, of one namespace or of any, by how: all, every node; waiting, those that wait, since what it tells of is committed; one kind, as many as it takes of those who wait for the namespace and label; any, the same of whatever is due there; bounce, somebody else than the lane of p_node, which was told alone and cannot come. p_instances are payloads of notify_instance.';

-- +goose StatementBegin
CREATE FUNCTION hear_all(p_node integer, p_listener integer, p_always boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT (has_table_privilege('waiters', 'INSERT') AND has_table_privilege('waiters', 'UPDATE') AND has_table_privilege('waiters', 'DELETE')) THEN
        RETURN;
    END IF;
    DELETE FROM waiters w WHERE w.node = p_node AND w.lane < 0;
    IF p_always THEN
        PERFORM arm(p_node, -1, p_listener, 'orchestrator', 0, true, NULL, NULL, 0, 0), arm(p_node, -2, p_listener, 'worker', 0, true, NULL, NULL, 0, 0);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION hear_all IS 'Internal: whether producers are to notify this node of everything, for as long as its connection p_listener lives.';

-- +goose StatementBegin
CREATE FUNCTION observe(p_listener integer, p_hears boolean)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_listener BETWEEN 1 AND 1000000000) IS NOT TRUE THEN -- lanes are made of it
        RAISE EXCEPTION 'the key of an observer is 1 to 1000000000: not %', quote_nullable(p_listener) USING ERRCODE = 'PW003';
    ELSIF p_hears THEN
        IF NOT pg_try_advisory_lock(hashtext('pgwake nodes of ' || current_schema()), p_listener) THEN -- as often as it likes
            RAISE EXCEPTION 'the key % is another session''s', p_listener USING ERRCODE = 'PW003';
        END IF;
        -- As in listen_session: for as long as its backend is there, producers tell everybody.
        PERFORM set_config(s.name, s.value, false)
           FROM (VALUES ('tcp_keepalives_idle', '10'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '3'), ('tcp_user_timeout', '25000'),
                        ('idle_session_timeout', '0'), ('synchronous_commit', 'off')) AS s (name, value);
    END IF;
    IF has_table_privilege('waiters', 'INSERT') AND has_table_privilege('waiters', 'UPDATE') AND has_table_privilege('waiters', 'DELETE') THEN
        DELETE FROM waiters w WHERE w.node = 0 AND w.listener = p_listener;
        IF p_hears THEN
            PERFORM arm(0, -2 * p_listener, p_listener, 'orchestrator', 0, true, NULL, NULL, 0, 0),
                    arm(0, -2 * p_listener - 1, p_listener, 'worker', 0, true, NULL, NULL, 0, 0);
        END IF;
    END IF;
    RETURN ARRAY[channel('orchestrator'), channel('worker'), channel('instance')];
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION observe IS 'Internal: whether producers are to notify of everything for the sake of somebody who takes nothing, for as long as the connection of this session lives. p_listener is its key, from 1 to 1000000000; any other is PW003. With p_hears the session must not be one that a pooler shares. Returns the channels on which all is told.';

-- +goose StatementBegin
CREATE FUNCTION listen_session(p_node integer, p_listener integer, p_always boolean DEFAULT false)
RETURNS TABLE (backend_pid integer, now_at timestamptz, alone boolean, dead text[])
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- The backend of a node that died without a word ends within 25 s.
    PERFORM set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
            set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '25000', false);
    -- It is idle for a minute at a time.
    PERFORM set_config('idle_session_timeout', '0', false);
    -- What a node says on its own account must not wait for the disk, and nothing here changes a row.
    PERFORM set_config('synchronous_commit', 'off', false);
    -- The protocol counts on a new snapshot for each statement; the role's default may differ.
    PERFORM set_config('default_transaction_isolation', 'read committed', false);
    -- While the session lives, others fail to get this, and know thereby that its rows in waiters count.
    IF NOT pg_try_advisory_lock(hashtext('pgwake nodes of ' || current_schema()), p_listener) THEN
        RAISE EXCEPTION 'the key % is another session''s', p_listener USING ERRCODE = 'PW003';
    END IF;
    IF has_table_privilege('waiters', 'INSERT') AND has_table_privilege('waiters', 'UPDATE') AND has_table_privilege('waiters', 'DELETE') THEN
        -- Those of a connection before. In the order of remove_waiters, by which another node may be at them.
        PERFORM FROM waiters w WHERE w.node = p_node ORDER BY w.lane FOR UPDATE;
        DELETE FROM waiters w WHERE w.node = p_node;
        PERFORM arm(p_node, 0, p_listener, 'worker', 0, false, NULL, NULL, 0, 0);
        PERFORM hear_all(p_node, p_listener, p_always);
    END IF;
    RETURN QUERY SELECT pg_backend_pid(), clock_timestamp(), NOT EXISTS (SELECT FROM waiters w WHERE w.node NOT IN (p_node, 0)), dead_queues(p_node);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION listen_session IS 'Internal: configures the session of a node''s LISTEN connection, which must not be one that a pooler shares. p_node is the node''s key for the life of its process, p_listener that of this connection, any numbers. With p_always, producers notify for as long as it lives. Returns the same as look about the other nodes.';

-- +goose Down

DROP TRIGGER worker_queue_notify ON worker_queue;
DROP TRIGGER orchestrator_queue_notify ON orchestrator_queue;
DROP TRIGGER namespaces_notify ON namespaces;
DROP FUNCTION listen_session, observe, hear_all, notify_queues, look, call_beat, node_listens, earliest_of_lanes, remove_waiters, dead_queues, disarm_node, arm, producers, wait_for_producers, pass_on, due_lists, texts, earliest_message, sticky_lists, message_lists, earliest_work, session_lists, asked_lists, work_lists, notify_namespaces, register_namespaces, check_namespaces, max_namespaces, take_lock, lock_patience, reads_committed, quiet, notify_inserted, wake, somebody_waits, notify_queue, node_channel, channel;
