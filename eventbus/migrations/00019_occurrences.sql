-- What is not late comes, whatever was late before it; and so does what is replayed to a group that was made anew, whatever the clock says.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION occur(p_item bigint, p_token uuid, p_task_id uuid, p_most integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute';
    v_task   scheduled_tasks;
    v_now    timestamptz;
    v_at     timestamptz; -- carried out, or left out, up to here
    v_next   timestamptz;
    v_late   boolean;
    v_done   integer := 0;
    v_left   integer := 0;
BEGIN
    SELECT * INTO v_task FROM scheduled_tasks t WHERE t.task_id = p_task_id AND t.item_id = p_item AND t.active FOR UPDATE;
    IF NOT FOUND THEN -- it was changed, paused or deleted meanwhile, or somebody has set active himself
        PERFORM ack_work(p_item, p_token);
        RETURN 0;
    END IF;
    v_now := clock_timestamp();
    v_at := v_task.next_at;
    LOOP
        v_late := v_at + v_task.jitter < v_now - c_late;
        IF v_late AND v_task.catch_up = 'skip' THEN
            v_left := v_left + 1;
        ELSIF v_task.overlap = 'skip' AND is_under_way(v_task, v_task.last_id) THEN
            v_left := v_left + 1;
        ELSE
            v_task.last_id := carry_out(v_task, v_at);
            v_done := v_done + 1;
        END IF;
        IF v_late AND v_task.catch_up <> 'all' THEN
            v_at := v_now - c_late - v_task.jitter - interval '1 us'; -- all that is late, and nothing else: each of those that follow may still come in time
        END IF;
        EXIT WHEN NOT v_late OR v_task.catch_up <> 'all' OR v_done + v_left >= p_most;
        v_next := next_occurrence(v_task.cron_expression, v_task.timezone, v_at, v_task.since);
        EXIT WHEN v_next IS NULL OR v_next + v_task.jitter >= v_now - c_late;
        v_at := v_next;
    END LOOP;
    UPDATE scheduled_tasks t SET skipped = t.skipped + v_left WHERE t.task_id = p_task_id;
    PERFORM await_occurrence(v_task, v_at);
    PERFORM ack_work(p_item, p_token);
    RETURN v_done;
END
$$;
-- +goose StatementEnd

-- Invariant (former), see retire_tag: what a former group of the name has left was enqueued before the group was there, by the server's clock and by the
-- ids of items. Neither does alone: a clock may go back, and a sequence be behind the rows, as where logical replication has brought those alone.
ALTER TABLE event_groups ADD COLUMN first_item bigint;
ALTER TABLE event_groups ALTER COLUMN first_item SET DEFAULT nextval('worker_queue_id_seq');
COMMENT ON COLUMN event_groups.first_item IS 'An id of worker_queue of when it was made: its own items come after that. Null: it was made before that was noted.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_since timestamptz;
    v_first bigint;
    v_ids   bigint[];
    v_lined bigint[];
    v_keys  text[];
    v_item  record;
    v_tag   text;
    v_gone  bigint[] := '{}';
    v_moved boolean := false;
    v_most  bigint := nullif(current_setting('pgwake.strays_at_a_time', true), ''); -- null: all
    v_done  bigint := 0;
BEGIN
    SELECT g.created_at, g.first_item INTO v_since, v_first FROM event_groups g WHERE g.group_id = p_group_id; -- null: it is gone
    -- Whoever has an item locked, or its key, may be about to settle it, and wait for what is locked here already, see invariant (order).
    IF starts_with(p_tag, event_tag('', '')) THEN
        -- A key goes with all that there is of it, or not yet.
        v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most FOR UPDATE SKIP LOCKED);
        DELETE FROM event_lines l
         USING (SELECT f.key, f.place FROM event_lines f WHERE f.group_id = p_group_id AND f.key = ANY (v_keys) AND f.item_id IS NULL LIMIT v_most) AS o
         WHERE l.group_id = p_group_id AND l.key = o.key AND l.place = o.place; -- which nobody gets, whatever becomes of the item at the head
        GET DIAGNOSTICS v_done = ROW_COUNT;
        IF v_done >= v_most THEN
            RETURN;
        END IF;
        v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) AND k.item_id IS NOT NULL
                         UNION ALL SELECT l.item_id FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) AND l.item_id IS NOT NULL);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) FOR UPDATE SKIP LOCKED);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) EXCEPT SELECT unnest(v_ids)); -- which are not to be had
        v_keys := ARRAY(
            SELECT unnest(v_keys)
            EXCEPT SELECT k.key FROM event_keys k WHERE k.item_id = ANY (v_ids)
            EXCEPT SELECT l.key FROM event_lines l WHERE l.item_id = ANY (v_ids));
        WITH lines AS (
            DELETE FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) RETURNING l.item_id
        ), keys AS (
            DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) RETURNING k.item_id
        )
        SELECT array_agg(o.item_id) INTO v_gone FROM (SELECT l.item_id FROM lines l UNION ALL SELECT k.item_id FROM keys k) AS o WHERE o.item_id IS NOT NULL;
        PERFORM remove_work(v_gone);
        -- What is not at work goes by the tag that nobody claims until its key can be had: for a new group of the name it is not.
        UPDATE worker_queue q SET tag = p_tag WHERE q.id = ANY (ARRAY(
            SELECT w.id FROM (SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most) AS k JOIN worker_queue w ON w.id = k.item_id
             WHERE w.tag <> p_tag AND NOT (w.lock_token IS NOT NULL AND w.visible_at > clock_timestamp()) FOR UPDATE OF w SKIP LOCKED));
        RETURN;
    ELSIF EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = p_group_id AND s.tag = p_tag) THEN
        -- By the index, for all that is of the group itself has this tag as well.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since
                          AND (q.id < v_first) IS NOT FALSE AND q.session_id IS NULL AND q.key IS NULL);
    ELSE
        -- Without those of groups that are gone, which go by key: or of these there might be as many as that each time.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL
                          AND NOT EXISTS (SELECT FROM event_keys k WHERE k.item_id = q.id AND (k.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                          AND NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = q.id AND (l.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                        LIMIT v_most);
    END IF;
    v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.item_id = ANY (v_ids) UNION ALL SELECT l.item_id FROM event_lines l WHERE l.item_id = ANY (v_ids));
    v_ids := ARRAY(SELECT unnest(v_ids) EXCEPT SELECT unnest(v_lined)) || ARRAY(
        SELECT of.item_id FROM (SELECT k.item_id, k.group_id, k.key FROM event_keys k WHERE k.item_id = ANY (v_lined)
                                 UNION ALL SELECT l.item_id, l.group_id, l.key FROM event_lines l WHERE l.item_id = ANY (v_lined)) AS of
          JOIN event_keys k ON k.group_id = of.group_id AND k.key = of.key
         WHERE of.group_id = p_group_id AND v_since IS NOT NULL FOR UPDATE OF k SKIP LOCKED); -- those of groups that are gone go by key
    FOR v_item IN
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND (q.id < v_first) IS NOT FALSE AND q.visible_at = q.created_at AS older, q.tag = p_tag AND q.session_id IS NULL AS stray,
               CASE WHEN q.key IS NULL THEN 1 ELSE 10 END AS weight -- at the commit the key moves on
          FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR UPDATE SKIP LOCKED -- by id alone: an index of tags would compare all ids with each of the tag
    LOOP
        EXIT WHEN v_done >= v_most;
        CONTINUE WHEN NOT v_item.stray; -- any more
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF NOT FOUND OR v_item.older AND NOT EXISTS (
            SELECT FROM delivered_event(v_item.input) AS d JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
             WHERE e.routes @> ARRAY[p_group_id]) THEN -- see invariant (former)
            v_gone := v_gone || v_item.id;
            v_done := v_done + v_item.weight;
        ELSIF v_tag <> p_tag THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
            v_moved := true;
            v_done := v_done + v_item.weight;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
    IF v_moved THEN
        PERFORM notify_queue('worker', 1, NULL, p_namespace); -- no insert tells
    END IF;
    IF v_done >= v_most THEN
        PERFORM notify_group(p_namespace, split_part(substr(p_tag, 10), '|', 1)); -- a node of it beats again, and goes on
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_began  timestamptz := clock_timestamp();
    v_before text := coalesce(current_setting('pgwake.strays_at_a_time', true), '');
    v_tag    record;
    v_over   boolean;
    v_key    record;
BEGIN
    -- A heartbeat has its time as well: what would take longer than that would be undone with it, each time anew. So the next one goes on.
    PERFORM set_config('pgwake.strays_at_a_time', coalesce(nullif(v_before, ''), '10000'), true); -- for retire_tag, which others have do all
    FOR v_tag IN
        SELECT r.namespace, r.tag, CASE WHEN starts_with(r.tag, event_tag('', '')) THEN split_part(r.tag, '|', 2)::bigint
                 ELSE (SELECT g.group_id FROM event_groups g WHERE g.namespace = r.namespace AND g.name = split_part(substr(r.tag, 10), '|', 1)) END AS group_id
          FROM event_retirements r ORDER BY r.namespace COLLATE "C", r.tag COLLATE "C"
    LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        PERFORM is_behind(v_tag.group_id); -- see invariant (order)
        SELECT r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) INTO v_over
          FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND; -- somebody else is at it, or has removed it
        -- At each call, for those who had something of it locked may have ended. The horizon tells when nothing can come any more.
        PERFORM retire_tag(v_tag.group_id, v_tag.namespace, v_tag.tag);
        CONTINUE WHEN v_over IS NOT TRUE
            OR starts_with(v_tag.tag, event_tag('', '')) AND EXISTS (SELECT FROM event_keys k WHERE k.group_id = v_tag.group_id)
            OR CASE WHEN EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = v_tag.group_id AND s.tag = v_tag.tag)
               THEN EXISTS (SELECT FROM event_groups g
                              JOIN worker_queue q ON q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.priority = 0 AND q.visible_at < g.created_at
                             WHERE g.group_id = v_tag.group_id AND q.session_id IS NULL AND q.key IS NULL AND q.visible_at = q.created_at
                               AND (q.id < g.first_item) IS NOT FALSE) -- of a former group
               ELSE EXISTS (SELECT FROM worker_queue q WHERE q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.session_id IS NULL) END;
        DELETE FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag;
    END LOOP;
    PERFORM set_config('pgwake.strays_at_a_time', v_before, true);
    UPDATE event_retirements r SET horizon = horizon()
     WHERE (r.namespace, r.tag) IN (SELECT n.namespace, n.tag FROM event_retirements n WHERE n.horizon IS NULL FOR UPDATE SKIP LOCKED);
    -- Keys that are at rest, see invariant (bound): those of a group that is not behind. Of what a replay has left it moves the rest itself.
    v_began := clock_timestamp();
    FOR i IN 1 .. 100 LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        SELECT w.group_id, w.key INTO v_key
          FROM event_groups g
         CROSS JOIN LATERAL (SELECT k.group_id, k.key FROM event_keys k WHERE k.group_id = g.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT 1 FOR UPDATE SKIP LOCKED) AS w
         WHERE NOT g.behind LIMIT 1;
        EXIT WHEN NOT FOUND;
        PERFORM next_of_key(v_key.group_id, v_key.key);
    END LOOP;
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
CREATE OR REPLACE FUNCTION occur(p_item bigint, p_token uuid, p_task_id uuid, p_most integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute';
    v_task   scheduled_tasks;
    v_now    timestamptz;
    v_at     timestamptz; -- carried out, or left out, up to here
    v_next   timestamptz;
    v_late   boolean;
    v_done   integer := 0;
    v_left   integer := 0;
BEGIN
    SELECT * INTO v_task FROM scheduled_tasks t WHERE t.task_id = p_task_id AND t.item_id = p_item AND t.active FOR UPDATE;
    IF NOT FOUND THEN -- it was changed, paused or deleted meanwhile, or somebody has set active himself
        PERFORM ack_work(p_item, p_token);
        RETURN 0;
    END IF;
    v_now := clock_timestamp();
    v_at := v_task.next_at;
    LOOP
        v_late := v_at + v_task.jitter < v_now - c_late;
        IF v_late AND v_task.catch_up = 'skip' THEN
            v_left := v_left + 1;
            v_at := v_now - c_late - v_task.jitter; -- all that is late
            EXIT;
        ELSIF v_task.overlap = 'skip' AND is_under_way(v_task, v_task.last_id) THEN
            v_left := v_left + 1;
        ELSE
            v_task.last_id := carry_out(v_task, v_at);
            v_done := v_done + 1;
        END IF;
        IF v_late AND v_task.catch_up = 'one' THEN
            v_at := v_now;
        END IF;
        EXIT WHEN NOT v_late OR v_task.catch_up <> 'all' OR v_done + v_left >= p_most;
        v_next := next_occurrence(v_task.cron_expression, v_task.timezone, v_at, v_task.since);
        EXIT WHEN v_next IS NULL OR v_next + v_task.jitter >= v_now - c_late;
        v_at := v_next;
    END LOOP;
    UPDATE scheduled_tasks t SET skipped = t.skipped + v_left WHERE t.task_id = p_task_id;
    PERFORM await_occurrence(v_task, v_at);
    PERFORM ack_work(p_item, p_token);
    RETURN v_done;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_since timestamptz := (SELECT g.created_at FROM event_groups g WHERE g.group_id = p_group_id); -- null: it is gone
    v_ids   bigint[];
    v_lined bigint[];
    v_keys  text[];
    v_item  record;
    v_tag   text;
    v_gone  bigint[] := '{}';
    v_moved boolean := false;
    v_most  bigint := nullif(current_setting('pgwake.strays_at_a_time', true), ''); -- null: all
    v_done  bigint := 0;
BEGIN
    -- Whoever has an item locked, or its key, may be about to settle it, and wait for what is locked here already, see invariant (order).
    IF starts_with(p_tag, event_tag('', '')) THEN
        -- A key goes with all that there is of it, or not yet.
        v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most FOR UPDATE SKIP LOCKED);
        DELETE FROM event_lines l
         USING (SELECT f.key, f.place FROM event_lines f WHERE f.group_id = p_group_id AND f.key = ANY (v_keys) AND f.item_id IS NULL LIMIT v_most) AS o
         WHERE l.group_id = p_group_id AND l.key = o.key AND l.place = o.place; -- which nobody gets, whatever becomes of the item at the head
        GET DIAGNOSTICS v_done = ROW_COUNT;
        IF v_done >= v_most THEN
            RETURN;
        END IF;
        v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) AND k.item_id IS NOT NULL
                         UNION ALL SELECT l.item_id FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) AND l.item_id IS NOT NULL);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) FOR UPDATE SKIP LOCKED);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) EXCEPT SELECT unnest(v_ids)); -- which are not to be had
        v_keys := ARRAY(
            SELECT unnest(v_keys)
            EXCEPT SELECT k.key FROM event_keys k WHERE k.item_id = ANY (v_ids)
            EXCEPT SELECT l.key FROM event_lines l WHERE l.item_id = ANY (v_ids));
        WITH lines AS (
            DELETE FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) RETURNING l.item_id
        ), keys AS (
            DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) RETURNING k.item_id
        )
        SELECT array_agg(o.item_id) INTO v_gone FROM (SELECT l.item_id FROM lines l UNION ALL SELECT k.item_id FROM keys k) AS o WHERE o.item_id IS NOT NULL;
        PERFORM remove_work(v_gone);
        -- What is not at work goes by the tag that nobody claims until its key can be had: for a new group of the name it is not.
        UPDATE worker_queue q SET tag = p_tag WHERE q.id = ANY (ARRAY(
            SELECT w.id FROM (SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most) AS k JOIN worker_queue w ON w.id = k.item_id
             WHERE w.tag <> p_tag AND NOT (w.lock_token IS NOT NULL AND w.visible_at > clock_timestamp()) FOR UPDATE OF w SKIP LOCKED));
        RETURN;
    ELSIF EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = p_group_id AND s.tag = p_tag) THEN
        -- By the index, for all that is of the group itself has this tag as well.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since AND q.session_id IS NULL AND q.key IS NULL);
    ELSE
        -- Without those of groups that are gone, which go by key: or of these there might be as many as that each time.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL
                          AND NOT EXISTS (SELECT FROM event_keys k WHERE k.item_id = q.id AND (k.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                          AND NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = q.id AND (l.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                        LIMIT v_most);
    END IF;
    v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.item_id = ANY (v_ids) UNION ALL SELECT l.item_id FROM event_lines l WHERE l.item_id = ANY (v_ids));
    v_ids := ARRAY(SELECT unnest(v_ids) EXCEPT SELECT unnest(v_lined)) || ARRAY(
        SELECT of.item_id FROM (SELECT k.item_id, k.group_id, k.key FROM event_keys k WHERE k.item_id = ANY (v_lined)
                                 UNION ALL SELECT l.item_id, l.group_id, l.key FROM event_lines l WHERE l.item_id = ANY (v_lined)) AS of
          JOIN event_keys k ON k.group_id = of.group_id AND k.key = of.key
         WHERE of.group_id = p_group_id AND v_since IS NOT NULL FOR UPDATE OF k SKIP LOCKED); -- those of groups that are gone go by key
    FOR v_item IN
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND q.visible_at = q.created_at AS older, q.tag = p_tag AND q.session_id IS NULL AS stray,
               CASE WHEN q.key IS NULL THEN 1 ELSE 10 END AS weight -- at the commit the key moves on
          FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR UPDATE SKIP LOCKED -- by id alone: an index of tags would compare all ids with each of the tag
    LOOP
        EXIT WHEN v_done >= v_most;
        CONTINUE WHEN NOT v_item.stray; -- any more
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF NOT FOUND OR v_item.older AND NOT EXISTS (
            SELECT FROM delivered_event(v_item.input) AS d JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
             WHERE e.routes @> ARRAY[p_group_id]) THEN -- see invariant (former)
            v_gone := v_gone || v_item.id;
            v_done := v_done + v_item.weight;
        ELSIF v_tag <> p_tag THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
            v_moved := true;
            v_done := v_done + v_item.weight;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
    IF v_moved THEN
        PERFORM notify_queue('worker', 1, NULL, p_namespace); -- no insert tells
    END IF;
    IF v_done >= v_most THEN
        PERFORM notify_group(p_namespace, split_part(substr(p_tag, 10), '|', 1)); -- a node of it beats again, and goes on
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_began  timestamptz := clock_timestamp();
    v_before text := coalesce(current_setting('pgwake.strays_at_a_time', true), '');
    v_tag    record;
    v_over   boolean;
    v_key    record;
BEGIN
    -- A heartbeat has its time as well: what would take longer than that would be undone with it, each time anew. So the next one goes on.
    PERFORM set_config('pgwake.strays_at_a_time', coalesce(nullif(v_before, ''), '10000'), true); -- for retire_tag, which others have do all
    FOR v_tag IN
        SELECT r.namespace, r.tag, CASE WHEN starts_with(r.tag, event_tag('', '')) THEN split_part(r.tag, '|', 2)::bigint
                 ELSE (SELECT g.group_id FROM event_groups g WHERE g.namespace = r.namespace AND g.name = split_part(substr(r.tag, 10), '|', 1)) END AS group_id
          FROM event_retirements r ORDER BY r.namespace COLLATE "C", r.tag COLLATE "C"
    LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        PERFORM is_behind(v_tag.group_id); -- see invariant (order)
        SELECT r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) INTO v_over
          FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND; -- somebody else is at it, or has removed it
        -- At each call, for those who had something of it locked may have ended. The horizon tells when nothing can come any more.
        PERFORM retire_tag(v_tag.group_id, v_tag.namespace, v_tag.tag);
        CONTINUE WHEN v_over IS NOT TRUE
            OR starts_with(v_tag.tag, event_tag('', '')) AND EXISTS (SELECT FROM event_keys k WHERE k.group_id = v_tag.group_id)
            OR CASE WHEN EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = v_tag.group_id AND s.tag = v_tag.tag)
               THEN EXISTS (SELECT FROM event_groups g
                              JOIN worker_queue q ON q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.priority = 0 AND q.visible_at < g.created_at
                             WHERE g.group_id = v_tag.group_id AND q.session_id IS NULL AND q.key IS NULL AND q.visible_at = q.created_at) -- of a former group
               ELSE EXISTS (SELECT FROM worker_queue q WHERE q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.session_id IS NULL) END;
        DELETE FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag;
    END LOOP;
    PERFORM set_config('pgwake.strays_at_a_time', v_before, true);
    UPDATE event_retirements r SET horizon = horizon()
     WHERE (r.namespace, r.tag) IN (SELECT n.namespace, n.tag FROM event_retirements n WHERE n.horizon IS NULL FOR UPDATE SKIP LOCKED);
    -- Keys that are at rest, see invariant (bound): those of a group that is not behind. Of what a replay has left it moves the rest itself.
    v_began := clock_timestamp();
    FOR i IN 1 .. 100 LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        SELECT w.group_id, w.key INTO v_key
          FROM event_groups g
         CROSS JOIN LATERAL (SELECT k.group_id, k.key FROM event_keys k WHERE k.group_id = g.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT 1 FOR UPDATE SKIP LOCKED) AS w
         WHERE NOT g.behind LIMIT 1;
        EXIT WHEN NOT FOUND;
        PERFORM next_of_key(v_key.group_id, v_key.key);
    END LOOP;
END
$$;
-- +goose StatementEnd

ALTER TABLE event_groups DROP COLUMN first_item;
