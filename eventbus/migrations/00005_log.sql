-- The log as a source: read by a cursor, and delivered once more.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION get_events(p_event_ids bigint[], p_emitted timestamptz[])
RETURNS SETOF event_log
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT e.* FROM unnest(p_event_ids, p_emitted) AS i (event_id, emitted_at)
      JOIN event_log e ON e.event_id = i.event_id AND e.emitted_at = i.emitted_at;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_events IS 'Events of the log, by id and the time at which they were emitted, in any order; without those that are not there any more.';

-- +goose StatementBegin
CREATE FUNCTION read_events(p_namespace text, p_after_xact xid8 DEFAULT NULL, p_after_id bigint DEFAULT NULL, p_limit integer DEFAULT 100, p_event_types text[] DEFAULT NULL)
RETURNS SETOF event_log
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    -- Invariant (cursor): no event that is still to be committed has an xact below this. So what lies between two cursors is the same
    -- whenever it is read, and whoever goes on from the last event that he got passes over none.
    v_end xid8 := log_xact(pg_snapshot_xmin(pg_current_snapshot()));
BEGIN
    RETURN QUERY
    SELECT e.* FROM event_log e
     WHERE e.namespace = coalesce(p_namespace, 'default') AND (e.xact, e.event_id) > (coalesce(p_after_xact, '0'), coalesce(p_after_id, 0)) AND e.xact < v_end
       AND (p_event_types IS NULL OR e.event_type = ANY (p_event_types))
     ORDER BY e.xact, e.event_id
     LIMIT p_limit;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION read_events IS 'Events of a namespace (null: default) after a cursor, which is xact and event_id of the last one that was read (null: from the beginning): every one exactly once, however late its transaction committed. One appears when all transactions that began to write before its own have ended. With p_event_types, only those of these types. If the tables came from a dump, call adopt_event_log before anybody emits, and cursors stay good.';

-- +goose StatementBegin
CREATE FUNCTION adopt_event_log()
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER -- the offset is its owner's to set
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_last bigint;
BEGIN
    FOR i IN 1 .. 2 LOOP
        -- That first, and then the end of a later snapshot: what is committed meanwhile is below that.
        SELECT max(n.xact) INTO v_last
          FROM (SELECT l.xact::text::bigint FROM (SELECT DISTINCT name FROM namespaces) AS s
                 CROSS JOIN LATERAL (SELECT e.xact FROM event_log e WHERE e.namespace = s.name ORDER BY e.xact DESC, e.event_id DESC LIMIT 1) AS l
                 UNION ALL SELECT r.horizon::text::bigint - 1 FROM event_replays r WHERE r.ended_at IS NULL
                 UNION ALL SELECT r.horizon::text::bigint - 1 FROM event_retirements r) AS n (xact);
        IF (v_last < log_xact(pg_snapshot_xmax(pg_current_snapshot()))::text::bigint) IS NOT FALSE THEN
            RETURN false;
        END IF;
        -- Invariant (one offset): whoever emits reads the offset while he has a lock on the log. So those who read the old one have committed
        -- once this is granted, and a second look sees what they wrote.
        LOCK TABLE event_log IN SHARE ROW EXCLUSIVE MODE;
    END LOOP;
    -- From here on all are above what is there: also those that have begun, none of which has a number below xmin.
    PERFORM setval('event_log_offset_seq', v_last + 1 - pg_snapshot_xmin(pg_current_snapshot())::text::bigint);
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION adopt_event_log IS 'Goes on with a log that came from a server whose transactions had higher numbers than this one''s have, as after pg_dump and a restore: cursors, replays and the order of events stay good, and what is emitted from now on comes after all that is there. To be called before anybody emits; eventbus.New and keep_event_log call it. Returns whether that was needed.';

-- +goose StatementBegin
CREATE FUNCTION find_events(
    p_namespace text, p_event_types text[] DEFAULT NULL, p_key text DEFAULT NULL, p_event_id bigint DEFAULT NULL,
    p_from timestamptz DEFAULT NULL, p_to timestamptz DEFAULT NULL,
    p_before_xact xid8 DEFAULT NULL, p_before_id bigint DEFAULT NULL, p_limit integer DEFAULT 100, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (event_id bigint, namespace text, event_type text, payload jsonb, emitted_at timestamptz, producer_node_id text, scheduled_task_id uuid,
    metadata jsonb, headers jsonb, key text, routes bigint[], xact xid8, payload_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off -- which index is the best depends on what is asked for
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT e.event_id, e.namespace, e.event_type, CASE WHEN e.payload_cut IS NULL THEN e.payload END, e.emitted_at, e.producer_node_id, e.scheduled_task_id,
           e.metadata, e.headers, e.key, e.routes, e.xact, e.payload_cut
      FROM (SELECT of.*, cut_of(of.payload, p_payload_bytes) AS payload_cut
              FROM (SELECT e.* FROM event_log e
                     WHERE e.namespace = coalesce(p_namespace, 'default')
                       AND (p_before_xact IS NULL OR (e.xact, e.event_id) < (p_before_xact, p_before_id))
                       AND (p_event_types IS NULL OR e.event_type = ANY (p_event_types)) AND (p_key IS NULL OR e.key = p_key)
                       AND (p_event_id IS NULL OR e.event_id = p_event_id)
                       AND (p_from IS NULL OR e.emitted_at >= p_from) AND (p_to IS NULL OR e.emitted_at < p_to)
                     ORDER BY e.xact DESC, e.event_id DESC
                     LIMIT p_limit) AS of
            OFFSET 0) AS e;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION find_events IS 'Events of a namespace (null: default) for which all conditions hold that are not null, the latest first, p_limit of them before a cursor: xact and event_id of the last one of the page before. For people who look: an event that is committed late comes among those that were seen already; read_events passes over none. It walks along the log until it has found enough, or by an index if p_event_id or p_event_types leave little. With p_payload_bytes payload is null where it is longer, and payload_cut an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION begin_replay(
    p_group_id bigint, p_first_id bigint DEFAULT NULL, p_last_id bigint DEFAULT NULL, p_from timestamptz DEFAULT NULL, p_to timestamptz DEFAULT NULL,
    p_undelivered boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_replay bigint;
BEGIN
    INSERT INTO event_replays (group_id, first_id, last_id, emitted_from, emitted_to, undelivered)
    VALUES (p_group_id, p_first_id, p_last_id, p_from, p_to, p_undelivered)
    RETURNING replay_id INTO v_replay;
    -- It is an item of work for any node of the namespace, and so it is done, whoever dies.
    PERFORM enqueue_work('eventbus|replay', json_build_object('replay_id', v_replay), g.namespace, p_tag => 'eventbus') FROM event_groups g WHERE g.group_id = p_group_id;
    RETURN v_replay;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION begin_replay IS 'Internal: see replay_events, and subscribe.';

-- +goose StatementBegin
CREATE FUNCTION replay_events(
    p_namespace text, p_group text, p_first_id bigint DEFAULT NULL, p_last_id bigint DEFAULT NULL, p_from timestamptz DEFAULT NULL, p_to timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_group bigint := (SELECT g.group_id FROM event_groups g WHERE g.namespace = coalesce(p_namespace, 'default') AND g.name = coalesce(p_group, 'default'));
BEGIN
    IF v_group IS NULL THEN
        RAISE EXCEPTION 'namespace % has no group %', coalesce(p_namespace, 'default'), quote_literal(coalesce(p_group, 'default')) USING ERRCODE = 'PW002';
    END IF;
    RETURN begin_replay(v_group, p_first_id, p_last_id, p_from, p_to);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION replay_events IS 'Has a group (null: default) get events of the log once more: those with ids from p_first_id to p_last_id, emitted at p_from or later and before p_to (null: no such bound), as far as it is subscribed to them. The nodes of the namespace do it, in the order of the log, and it includes what commits late. What is emitted after the call may be left out. Returns the id of the replay, see get_replay. PW002 if there is no such group.';

-- +goose StatementBegin
CREATE FUNCTION replay_some(p_replay_id bigint, p_limit integer DEFAULT 500)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_replay    event_replays;
    v_namespace text;
    v_end       xid8;
    v_ids       bigint[];
    v_emitted   timestamptz[];
    v_xacts     xid8[];
    v_read      integer;
    v_key       text;
    v_moved     integer := 0;
    v_more      boolean;
BEGIN
    SELECT * INTO v_replay FROM event_replays r WHERE r.replay_id = p_replay_id FOR UPDATE;
    IF NOT FOUND OR v_replay.ended_at IS NOT NULL THEN
        RETURN 'done';
    END IF;
    SELECT g.namespace INTO v_namespace FROM event_groups g WHERE g.group_id = v_replay.group_id;
    IF v_replay.horizon IS NULL THEN
        v_replay.horizon := horizon();
    END IF;
    -- Of what is below the horizon nothing is delivered to a new group by those who emit and have not seen it: that is here. Those
    -- who have seen it have noted that in their events, on whichever side of the horizon. Above, all have.
    v_end := least(v_replay.horizon, log_xact(pg_snapshot_xmin(pg_current_snapshot())));
    SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
      INTO v_ids, v_emitted, v_xacts, v_read
      FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
             WHERE l.namespace = v_namespace AND (l.xact, l.event_id) > (v_replay.after_xact, v_replay.after_id) AND l.xact < v_end
               AND l.event_id BETWEEN coalesce(v_replay.first_id, 0) AND coalesce(v_replay.last_id, 9223372036854775807)
               AND l.emitted_at >= coalesce(v_replay.emitted_from, '-infinity') AND l.emitted_at < coalesce(v_replay.emitted_to, 'infinity')
               AND NOT (v_replay.undelivered AND l.routes @> ARRAY[v_replay.group_id])
             ORDER BY l.xact, l.event_id LIMIT p_limit) AS e;
    IF v_read > 0 THEN
        v_replay.delivered := v_replay.delivered + deliver(v_ids, v_emitted, v_replay.group_id, v_replay.undelivered);
        v_replay.after_xact := v_xacts[v_read];
        v_replay.after_id := v_ids[v_read];
    END IF;
    IF v_end = v_replay.horizon THEN
        IF NOT v_replay.undelivered THEN
            v_more := v_read = p_limit;
        ELSIF v_read > 0 THEN -- with keys that are locked now it cannot wait for those who say that the group is behind, and wait for them
            v_more := true;
        ELSE
            PERFORM FROM event_groups g WHERE g.group_id = v_replay.group_id AND g.behind FOR UPDATE; -- which waits for is_behind, as UPDATE does not
            IF FOUND THEN
                UPDATE event_groups g SET behind = false WHERE g.group_id = v_replay.group_id;
                v_more := true; -- once this has committed, no line is held any more
            ELSE
                FOR v_key IN SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                    v_moved := v_moved + 1;
                END LOOP;
                v_more := v_moved = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION replay_some IS 'Internal: goes on with a replay, by p_limit events. Returns ''more'' if there are more; ''wait'' if there may be when transactions have ended that are open now; ''done'' if there are none.';

-- +goose StatementBegin
CREATE FUNCTION get_replay(p_replay_id bigint)
RETURNS TABLE (delivered bigint, created_at timestamptz, ended_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT r.delivered, r.created_at, r.ended_at FROM event_replays r WHERE r.replay_id = p_replay_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_replay IS 'How far a replay has got: how many events were delivered, and when it had delivered all; null: not yet.';

-- +goose StatementBegin
CREATE FUNCTION has_deliveries(p_from timestamptz, p_to timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- One statement, and so one snapshot: what goes from one of these tables to another meanwhile is seen in one of them.
    RETURN EXISTS (SELECT FROM event_lines l WHERE l.emitted_at >= p_from AND l.emitted_at < p_to)
        OR EXISTS (SELECT FROM (SELECT q.tag, q.input FROM worker_queue q UNION ALL SELECT d.tag, d.data FROM dead_letters d WHERE d.queue = 'worker') AS i (tag, input)
                    WHERE CASE WHEN i.tag = 'eventbus' OR starts_with(i.tag, 'eventbus/')
                               THEN (delivered_event(i.input)).emitted_at <@ tstzrange(p_from, p_to) END);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION has_deliveries IS 'Internal: whether an event that was emitted at p_from or later, and before p_to, is still to be handled by somebody, or is a dead letter.';

-- +goose StatementBegin
CREATE FUNCTION has_replays(p_from timestamptz, p_to timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    LOCK TABLE event_replays IN SHARE MODE;
    RETURN EXISTS (SELECT FROM event_replays r WHERE r.ended_at IS NULL AND coalesce(r.emitted_from, '-infinity') < p_to AND coalesce(r.emitted_to, 'infinity') > p_from);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION has_replays IS 'Internal: whether a replay that is open may deliver events that were emitted at p_from or later, and before p_to. None begins or goes on before the end of the transaction.';

-- Invariant (retention): no event is removed of which a delivery is queued, in a line or a dead letter. A delivery of an old event is
-- made by a replay alone, and by whatever there is of it already. So while no replay of its time is open, and none can begin or go on, what has
-- no deliveries in a snapshot will have none, if all its events were committed before that: so the month is locked, or its events are listed, first.

-- +goose StatementBegin
CREATE FUNCTION partman_schema()
RETURNS name
LANGUAGE sql
STABLE
SET search_path FROM CURRENT
AS $$
    SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'pg_partman' AND e.extversion ~ '^4\.';
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION partman_schema IS 'Internal: schema of extension pg_partman; null: it is not installed, or not its version 4.';

-- +goose StatementBegin
CREATE FUNCTION use_partman(p_on boolean DEFAULT true)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_partman name := partman_schema();
    v_changed integer := 0;
BEGIN
    IF v_partman IS NULL AND p_on THEN
        RAISE EXCEPTION 'extension pg_partman is not installed in this database, or not its version 4' USING ERRCODE = 'PW003';
    ELSIF current_schema() ~ '[.''"]' AND p_on THEN
        RAISE EXCEPTION 'pg_partman cannot do with the dot, or quote, in the name of schema %', current_schema() USING ERRCODE = 'PW003';
    ELSIF p_on THEN
        -- Not create_parent, which wants to make the default partition. Who removes months has to know what is still to be handled, so retention
        -- is not for pg_partman; and the nodes call it with UTC, which its background worker does not know of.
        EXECUTE format($sql$INSERT INTO %I.part_config (parent_table, control, partition_type, partition_interval, premake, datetime_string, automatic_maintenance, jobmon)
            VALUES ($1, 'emitted_at', 'native', '1 mon', 2, 'YYYY_MM', 'off', false) ON CONFLICT (parent_table) DO NOTHING$sql$, v_partman) USING current_schema() || '.event_log';
        GET DIAGNOSTICS v_changed = ROW_COUNT;
    ELSIF v_partman IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I.part_config WHERE parent_table = $1', v_partman) USING current_schema() || '.event_log';
        GET DIAGNOSTICS v_changed = ROW_COUNT;
    END IF;
    RETURN v_changed > 0;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION use_partman IS 'Has extension pg_partman, whose version 4 is to be installed, make the partitions of the log from now on, as its table part_config says, where how many months ahead can be changed; or not any more. Partitions have the names that it gives them in any case. keep_event_log calls it, and removes old months as before, since pg_partman cannot know what is still to be handled. Returns whether that is new. PW003 if the extension is missing.';

-- +goose StatementBegin
CREATE FUNCTION run_partman()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET timezone = 'UTC' -- its months begin where the session's do
AS $$
DECLARE
    v_partman name := partman_schema();
    v_has     boolean;
BEGIN
    IF v_partman IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.part_config WHERE parent_table = $1)', v_partman) INTO v_has USING current_schema() || '.event_log';
    IF v_has THEN
        EXECUTE format('SELECT %I.run_maintenance($1, p_analyze => false, p_jobmon => false)', v_partman) USING current_schema() || '.event_log';
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'pg_partman made no partitions of the log, so pgwake does: %', SQLERRM;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION run_partman IS 'Internal: has pg_partman make partitions of the log, if that is for it to do. What is missing afterwards make_event_partitions makes: what fails here must not end in the default partition.';

-- Whoever emits into the default partition waits while one that is new is attached beside it, which has PostgreSQL search it for what belongs into
-- the new one, and what does is to be moved: of a large one, for seconds. So that becomes a partition like the others as it is, and an empty one the
-- default. There too it would be searched, but for a constraint that says the same as the bounds, and can be validated while others emit.

-- Invariant (no event is refused): the constraint ends at least a day after now, or is dropped. It is there for as long as three calls take, and after
-- them only if who made them died, and all nodes with him, for this is the first thing that others do then.

-- +goose StatementBegin
CREATE FUNCTION set_default_aside(p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_bound record;
    v_first timestamp;
    v_last  timestamp;
BEGIN
    SELECT * INTO v_bound FROM bounded_default();
    IF v_bound.name IS NULL THEN
        SELECT date_trunc('month', min(d.emitted_at) AT TIME ZONE 'UTC'), date_trunc('month', greatest(max(d.emitted_at), p_now) AT TIME ZONE 'UTC' + interval '7 days')
          INTO v_first, v_last FROM event_log_default d;
        IF EXISTS (SELECT FROM event_partitions() p
                    WHERE p.from_at < (v_last + interval '1 month') AT TIME ZONE 'UTC' AND p.to_at > v_first AT TIME ZONE 'UTC') THEN
            RETURN false;
        END IF;
        EXECUTE format('ALTER TABLE event_log_default ADD CONSTRAINT %I CHECK (emitted_at >= %L AND emitted_at < %L) NOT VALID',
            'event_log_default_' || to_char(v_first, 'YYYY_MM') || '_to_' || to_char(v_last, 'YYYY_MM'),
            v_first AT TIME ZONE 'UTC', (v_last + interval '1 month') AT TIME ZONE 'UTC');
    ELSIF v_bound.to_at < p_now + interval '1 day' THEN
        PERFORM unbound_default();
    ELSIF NOT v_bound.valid THEN
        EXECUTE format('ALTER TABLE event_log_default VALIDATE CONSTRAINT %I', v_bound.name);
    ELSE
        ALTER TABLE event_log DETACH PARTITION event_log_default;
        EXECUTE format('ALTER TABLE event_log_default RENAME TO %I', 'event_log_p' || v_bound.months);
        EXECUTE format('ALTER TABLE event_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', 'event_log_p' || v_bound.months, v_bound.from_at, v_bound.to_at);
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT %I', 'event_log_p' || v_bound.months, v_bound.name);
        EXECUTE format('COMMENT ON TABLE %I IS %L', 'event_log_p' || v_bound.months, 'Events of those months, in UTC, which were in the default partition.');
        CREATE TABLE event_log_default PARTITION OF event_log DEFAULT;
        COMMENT ON TABLE event_log_default IS 'Events of months for which there is no partition.';
        PERFORM revoke_from_public();
    END IF;
    RETURN true;
EXCEPTION WHEN check_violation THEN -- something came between what was there and the constraint
    PERFORM unbound_default();
    RETURN false;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION set_default_aside IS 'Internal: goes on to make the default partition a partition of the months of its events, and an empty one the default. Takes a few calls, each in a transaction of its own. False: it cannot, since there are partitions of months between.';

-- +goose StatementBegin
CREATE FUNCTION keep_event_log(p_retention interval DEFAULT '6 months', p_months integer DEFAULT 2, p_now timestamptz DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER -- partitions are their owner's to make
SET search_path FROM CURRENT
SET lock_timeout = '25ms' -- of two locks at the most: so long may those wait who emit behind this
AS $$
DECLARE
    v_now       timestamptz := coalesce(p_now, clock_timestamp());
    v_old       timestamptz := date_trunc('month', v_now AT TIME ZONE 'UTC' - p_retention) AT TIME ZONE 'UTC'; -- before this all is old
    v_missing   boolean := EXISTS (
        SELECT FROM generate_series(0, p_months) AS n,
                    LATERAL (SELECT (date_trunc('month', v_now AT TIME ZONE 'UTC') + make_interval(months => n)) AT TIME ZONE 'UTC') AS m (begins_at)
         WHERE NOT EXISTS (SELECT FROM event_partitions() p WHERE p.from_at <= m.begins_at AND p.to_at > m.begins_at));
    v_blocked   boolean := false;
    v_partition record;
    v_remains   tid[];
    v_urgent    boolean := true;
BEGIN
    IF p_retention < '1 day' THEN
        RAISE EXCEPTION 'events are kept for at least a day: not %', p_retention USING ERRCODE = 'PW003';
    ELSIF NOT pg_try_advisory_xact_lock(hashtext('pgwake event partitions of ' || current_schema()), 0) THEN
        RETURN 'wait'; -- for another, who may die
    ELSIF adopt_event_log() THEN
        RETURN 'more';
    END IF;
    -- Those who emit into the default partition wait until it is searched, and what is in the way is moved: that must take no longer than a lock may.
    IF v_missing AND pg_table_size('event_log_default') > 512 * 1024 THEN -- with what is out of line: it is moved too
        IF set_default_aside(v_now) THEN
            RETURN 'more';
        END IF;
        v_blocked := true;
    ELSE
        PERFORM run_partman();
        IF make_event_partitions(p_months, p_now) > 0 THEN
            RETURN 'more';
        END IF;
    END IF;
    v_remains := ARRAY(SELECT d.ctid FROM event_log_default d WHERE d.emitted_at < v_old LIMIT 10000);
    IF v_remains <> '{}' THEN
        IF has_replays('-infinity', v_old) THEN
            RETURN 'wait';
        ELSIF NOT has_deliveries('-infinity', v_old) THEN
            DELETE FROM event_log_default d WHERE d.ctid = ANY (v_remains);
            RETURN 'more';
        END IF;
    END IF;
    FOR v_partition IN
        SELECT *, pg_relation_size(p.name::text::regclass) = 0 AS empty FROM event_partitions() p WHERE p.to_at <= v_old ORDER BY empty, p.name
    LOOP
        v_urgent := NOT v_partition.empty;
        IF has_replays(v_partition.from_at, v_partition.to_at) THEN
            RETURN 'wait';
        END IF;
        EXECUTE format('LOCK TABLE %I IN SHARE MODE', v_partition.name);
        CONTINUE WHEN has_deliveries(v_partition.from_at, v_partition.to_at);
        -- What it has goes first, which waits for nobody who emits: for DROP there may be no moment for months, where some transaction always does.
        EXECUTE format(CASE WHEN v_partition.empty THEN 'DROP TABLE %I' ELSE 'TRUNCATE %I' END, v_partition.name);
        RETURN 'more'; -- in another transaction: nobody is to wait for more than one
    END LOOP;
    DELETE FROM event_replays r WHERE r.ended_at < v_old;
    DELETE FROM event_nodes n WHERE greatest(n.last_heartbeat, n.stopped_at) < v_old
       AND (n.stopped_at IS NOT NULL OR n.last_heartbeat <= clock_timestamp() - 3 * n.heartbeats);
    RETURN CASE WHEN v_blocked THEN 'large' ELSE 'done' END;
EXCEPTION WHEN lock_not_available THEN
    RETURN CASE WHEN v_urgent THEN 'wait' ELSE 'done' END; -- tables without anything in them are the last, and can wait for another day
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION keep_event_log IS 'Makes the partitions of the log for the next p_months, has the default one become one of them if much is in it, and empties, or drops if it is empty, one month whose events are all older than p_retention (null: none is), unless one of them is still to be handled, or is a dead letter; in the end also what is known of replays that ended, and of nodes that were seen last, before those months. Returns ''more'' if it is to be called again at once; ''wait'' if it gave way to others, or to a replay, or somebody else is at it, and is to be called again in a while; ''large'' if partitions are missing, the default partition has more than 512 KiB, so that who emits would wait for too long for new ones, and it cannot become a partition itself, since there are others of months between its events: make_event_partitions is to be called at a quiet time; ''done'' if there is nothing to do. The nodes call it once a day. Whoever emits waits for its locks for no more than 50 ms. PW003 for a retention of less than a day.';

-- +goose Down

SELECT use_partman(false);
DROP FUNCTION keep_event_log, set_default_aside, run_partman, use_partman, partman_schema, has_replays, has_deliveries, get_replay, replay_some, replay_events, begin_replay, adopt_event_log, find_events, read_events, get_events;
