-- What is not late comes, whatever was late before it.

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
            v_at := v_now - c_late - v_task.jitter; -- all that is late, and nothing else: each of those that follow may still come in time
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
