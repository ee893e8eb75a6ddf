-- A schedule that is behind is in time again as soon as it can be.
--
-- Invariant: what is due of a schedule comes by one claim and one commit, as far as two seconds allow. If each occurrence had its own, one that is
-- claimed more rarely than it occurs would stay a minute behind: whatever is not late would be, once it is its turn. Many schedules that are behind
-- at once are claimed as rarely as that, for what is late is not carried out with others (occur_many).

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION occur(p_item bigint, p_token uuid, p_task_id uuid, p_most integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute'; -- as in occur_many
    c_least  CONSTANT interval := '1 s'; -- from one occurrence to the next
    c_long   CONSTANT interval := '2 s'; -- what is locked is not to be for long
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
        EXIT WHEN v_at + v_task.jitter > v_now - c_least OR v_done + v_left >= p_most OR clock_timestamp() > v_now + c_long;
        v_next := next_occurrence(v_task.cron_expression, v_task.timezone, v_at, v_task.since);
        EXIT WHEN v_next IS NULL OR v_next + v_task.jitter > v_now;
        v_at := v_next;
    END LOOP;
    UPDATE scheduled_tasks t SET skipped = t.skipped + v_left WHERE t.task_id = p_task_id;
    PERFORM await_occurrence(v_task, v_at);
    PERFORM ack_work(p_item, p_token);
    RETURN v_done;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION occur IS 'Internal: carries out an occurrence that is due, or leaves it out, as the schedule says, and enqueues the next one. What else is due by now, whatever its jitter, comes with it: p_most, or as many as two seconds allow. Returns how many. PW001 if the token of the work item no longer holds.';

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
COMMENT ON FUNCTION occur IS 'Internal: carries out an occurrence that is due, or leaves it out, as the schedule says, and enqueues the next one. Of those that are late, which are all to come, it carries out p_most. Returns how many. PW001 if the token of the work item no longer holds.';
