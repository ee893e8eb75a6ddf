-- What a step of a replay reads of a long log.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION replay_some(p_replay_id bigint, p_limit integer DEFAULT 500)
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
    v_keys      text[];
    v_more      boolean;
BEGIN
    PERFORM is_behind(r.group_id) FROM event_replays r WHERE r.replay_id = p_replay_id AND NOT r.undelivered; -- see invariant (order)
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
    -- Planned for the bounds that there are: one plan for any bounds reads, in each step, all that is left of the log, and sorts it.
    EXECUTE '
        SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
          FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
                 WHERE l.namespace = $1 AND (l.xact, l.event_id) > ($2, $3) AND l.xact < $4
                   AND ($5 IS NULL OR l.event_id >= $5) AND ($6 IS NULL OR l.event_id <= $6)
                   AND ($7 IS NULL OR l.emitted_at >= $7) AND ($8 IS NULL OR l.emitted_at < $8)
                   AND NOT ($9 AND l.routes @> ARRAY[$10])
                 ORDER BY l.xact, l.event_id LIMIT $11) AS e'
      INTO v_ids, v_emitted, v_xacts, v_read
     USING v_namespace, v_replay.after_xact, v_replay.after_id, v_end, v_replay.first_id, v_replay.last_id, v_replay.emitted_from, v_replay.emitted_to,
           v_replay.undelivered, v_replay.group_id, p_limit;
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
                v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit); -- as the index has them
                FOR v_key IN SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.key = ANY (v_keys) AND k.item_id IS NULL
                              ORDER BY k.key COLLATE "C" FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                END LOOP;
                v_more := cardinality(v_keys) = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at,
           waiting_since = CASE WHEN v_read = 0 AND NOT v_more AND v_replay.ended_at IS NULL THEN coalesce(r.waiting_since, clock_timestamp()) END
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd

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
CREATE OR REPLACE FUNCTION replay_some(p_replay_id bigint, p_limit integer DEFAULT 500)
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
    v_keys      text[];
    v_more      boolean;
BEGIN
    PERFORM is_behind(r.group_id) FROM event_replays r WHERE r.replay_id = p_replay_id AND NOT r.undelivered; -- see invariant (order)
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
                v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit); -- as the index has them
                FOR v_key IN SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.key = ANY (v_keys) AND k.item_id IS NULL
                              ORDER BY k.key COLLATE "C" FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                END LOOP;
                v_more := cardinality(v_keys) = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at,
           waiting_since = CASE WHEN v_read = 0 AND NOT v_more AND v_replay.ended_at IS NULL THEN coalesce(r.waiting_since, clock_timestamp()) END
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd
