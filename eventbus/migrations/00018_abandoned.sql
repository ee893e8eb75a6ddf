-- A default partition that was about to become one of the months takes what is emitted, however long ago that was begun.
--
-- Invariant (no event is refused): the constraint by which it becomes one ends two to three months after it was made, and is dropped in the last of
-- them. Whoever keeps the log does that, and whoever begins with a bus: for whoever began it may have died, and a transaction that has emitted and
-- stays open holds up the end of it, and the dropping, too.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION give_up_bound()
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '25ms'
AS $$
DECLARE
    v_left interval;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('pgwake event partitions of ' || current_schema()), 0) THEN
        RETURN false; -- whoever has it is at that
    END IF;
    v_left := (SELECT b.to_at - clock_timestamp() FROM bounded_default() b);
    IF (v_left < interval '1 month') IS NOT TRUE THEN
        RETURN false;
    END IF;
    -- Rather than that everybody is refused, some are kept waiting.
    PERFORM set_config('lock_timeout', CASE WHEN v_left < interval '1 day' THEN '10s' WHEN v_left < interval '7 days' THEN '1s' ELSE '25ms' END, true);
    PERFORM unbound_default();
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION give_up_bound IS 'Internal: drops the constraint by which the default partition was to become another, if it ends in less than a month. Returns whether it did. 55P03 if others had it for too long: 25 ms, a second in the last week, 10 on the last day.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_default_aside(p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_bound  record;
    v_first  timestamp;
    v_last   timestamp;
    v_latest timestamptz;
BEGIN
    SELECT * INTO v_bound FROM bounded_default();
    IF v_bound.name IS NULL THEN
        v_last := date_trunc('month', greatest(p_now, clock_timestamp()) AT TIME ZONE 'UTC') + interval '2 months';
        SELECT date_trunc('month', least(min(d.emitted_at), p_now) AT TIME ZONE 'UTC'), max(d.emitted_at) INTO v_first, v_latest FROM event_log_default d;
        IF v_latest >= (v_last + interval '1 month') AT TIME ZONE 'UTC' OR EXISTS (SELECT FROM event_partitions() p
                    WHERE p.from_at < (v_last + interval '1 month') AT TIME ZONE 'UTC' AND p.to_at > v_first AT TIME ZONE 'UTC') THEN
            RETURN false;
        END IF;
        EXECUTE format('ALTER TABLE event_log_default ADD CONSTRAINT %I CHECK (emitted_at >= %L AND emitted_at < %L) NOT VALID',
            'event_log_default_' || to_char(v_first, 'YYYY_MM') || '_to_' || to_char(v_last, 'YYYY_MM'),
            v_first AT TIME ZONE 'UTC', (v_last + interval '1 month') AT TIME ZONE 'UTC');
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
COMMENT ON FUNCTION set_default_aside IS 'Internal: goes on to make the default partition a partition of the months of its events, and an empty one the default. Takes a few calls, each in a transaction of its own. False: it cannot, since there are partitions of months between, or events of a time that is still to come.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION keep_event_log(p_retention interval DEFAULT '6 months', p_months integer DEFAULT 2, p_now timestamptz DEFAULT NULL)
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
    ELSIF give_up_bound() OR adopt_event_log() THEN
        RETURN 'more'; -- in another transaction: nobody is to wait for more than this
    END IF;
    -- Those who emit into the default partition wait until it is searched, and what is in the way is moved: that must take no longer than a lock may.
    IF v_missing AND pg_table_size('event_log_default') > 512 * 1024 THEN -- with what is out of line: it is moved too
        IF set_default_aside(v_now) THEN
            RETURN 'more';
        END IF;
        v_blocked := EXISTS (SELECT FROM event_log_default); -- if it is empty there is nothing to move, and little to search
    END IF;
    IF NOT v_blocked THEN
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
COMMENT ON FUNCTION keep_event_log IS 'Makes the partitions of the log for the next p_months, has the default one become one of them if much is in it, and empties, or drops if it is empty, one month whose events are all older than p_retention (null: none is), unless one of them is still to be handled, or is a dead letter; in the end also what is known of replays that ended, and of nodes that were seen last, before those months. Returns ''more'' if it is to be called again at once; ''wait'' if it gave way to others, or to a replay, or somebody else is at it, and is to be called again in a while; ''large'' if partitions are missing, the default partition has more than 512 KiB, so that who emits would wait for too long for new ones, and it cannot become a partition itself, since there are others of months between its events, or one of its events is of a time that is still to come: make_event_partitions is to be called at a quiet time; ''done'' if there is nothing to do. The nodes call it once a day. Whoever emits waits for its locks for no more than 50 ms, or for 1 s in the last week, and 10 s on the last day, before the default partition would take no events, see adopt_event_log. PW003 for a retention of less than a day.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION adopt_event_log()
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
            BEGIN -- last: whoever emits has the log locked when he waits for the default partition
                PERFORM give_up_bound();
            EXCEPTION WHEN lock_not_available THEN
                RAISE WARNING 'the default partition of the log takes no events after %, and transactions that stay open hold up that this be changed', (SELECT b.to_at FROM bounded_default() b);
            END;
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
COMMENT ON FUNCTION adopt_event_log IS 'Goes on with a log that came from a server whose transactions had higher numbers than this one''s have, as after pg_dump and a restore: cursors, replays and the order of events stay good, and what is emitted from now on comes after all that is there. To be called before anybody emits; eventbus.New and keep_event_log call it. Returns whether that was needed. It also has the default partition take events of all times, where it was to become another and was left for so long that it soon would refuse some.';

SELECT revoke_from_public();

-- +goose Down

-- In the newest migration, where nothing is gone yet.
LOCK TABLE scheduled_tasks, event_log, event_groups, event_nodes, event_dedup_keys IN ACCESS EXCLUSIVE MODE;
SELECT require_no_events();
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM scheduled_tasks) THEN
        RAISE EXCEPTION 'schema % still holds schedules; remove them before migrating down', current_schema() USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION adopt_event_log()
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
CREATE OR REPLACE FUNCTION keep_event_log(p_retention interval DEFAULT '6 months', p_months integer DEFAULT 2, p_now timestamptz DEFAULT NULL)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_default_aside(p_now timestamptz)
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

DROP FUNCTION give_up_bound;
