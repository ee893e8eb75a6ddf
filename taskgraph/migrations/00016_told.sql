-- Whoever follows a task is told of what was done to it outside of its turns, and steps that are due are told of although the server's clock goes back.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION evaluate_task(
    p_task_uuid uuid, p_lock_token uuid, p_processor_uuid uuid, p_cancel boolean DEFAULT false,
    p_failed_positions integer[] DEFAULT NULL, p_failed_errors text[] DEFAULT NULL, p_headers text DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (queue text, namespace text, due_at timestamptz, now_at timestamptz, history json, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_instance   text := p_task_uuid::text;
    v_before     tasks;
    v_task       tasks;
    v_name       text;
    v_version    text;
    v_children   text[];
    v_executions bigint[];
    v_activities bigint[];
    v_status     text;
    v_progress   text;
    v_timed      boolean;
    v_failed     record;
    v_began      timestamptz;
BEGIN
    PERFORM hold_instance_lock(v_instance, p_lock_token); -- fails if the lease has ended: nothing stale is written
    SELECT * INTO v_before FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_before.task_id IS NULL THEN
        RETURN QUERY SELECT * FROM ack_orchestration(v_instance, p_lock_token, 1, p_quiet => p_quiet);
        RETURN;
    END IF;
    IF p_cancel AND NOT is_terminal(v_before.state) THEN
        PERFORM cancel_open_steps(p_task_uuid, '{"event": "Cancel", "reason": "its parent was cancelled"}');
        PERFORM transition_task(p_task_uuid, ARRAY[v_before.state, 'cancelled'], NULL, '{"event": "Cancel", "reason": "its parent was cancelled"}', true);
    END IF;
    IF p_failed_positions IS NOT NULL THEN
        -- Whoever runs handlers has given an item up; unless there is another by now, that was the step's.
        FOR v_failed IN
            SELECT s.step_id, s.state, f.error FROM unnest(p_failed_positions, p_failed_errors) AS f (position, error)
              JOIN steps s ON s.task_id = p_task_uuid AND s.position = f.position
             WHERE s.state IN ('enqueued', 'in_progress') AND s.work_item_id IS NOT NULL -- or it is a task, and no item's
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id)
        LOOP
            PERFORM transition_steps(ARRAY[v_failed.step_id], ARRAY[v_failed.state, 'error'], p_processor_uuid, '{"event": "Fail"}',
                                     ARRAY[jsonb_build_object('error', v_failed.error, 'retryable', false)]);
        END LOOP;
    END IF;
    v_began := clock_timestamp();
    v_task := advance_task(p_task_uuid, p_processor_uuid, p_headers, true, p_quiet);
    IF p_quiet THEN
        RETURN QUERY
        SELECT 'worker', q.namespace, q.visible_at, clock_timestamp(), NULL::json, q.tag
          FROM worker_queue q WHERE q.instance_id = v_instance -- by nobody else: the task is locked
           AND (q.created_at >= v_began OR q.xmin = pg_current_xact_id()::xid); -- the server's clock may have gone back since
    END IF;
    v_timed := v_before.timer_at IS DISTINCT FROM v_task.next_ready_at; -- which is null once it has ended
    IF NOT v_timed AND v_task.next_ready_at IS NOT NULL THEN
        -- Invariant (no timer is lost): whoever waits for an instant has a message in the queue for it. That of an instant that stays is there
        -- already, unless it ends with this turn: it was due when the turn was fetched, and the server's clock has gone back since.
        v_timed := EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_lock_token
                              AND coalesce(q.dedup_key, '') = 'retry/' || v_instance);
    END IF;
    SELECT d.name, d.version INTO v_name, v_version FROM task_definitions d WHERE d.task_definition_id = v_task.task_definition_id;
    v_status := CASE v_task.state WHEN 'complete' THEN 'Completed' WHEN 'resolved_manually' THEN 'Completed' WHEN 'error' THEN 'Failed' WHEN 'cancelled' THEN 'Cancelled' END;
    IF is_terminal(v_task.state) THEN
        SELECT array_agg(q.execution_id), array_agg(q.activity_id) INTO v_executions, v_activities FROM worker_queue q WHERE q.instance_id = v_instance;
        v_children := ARRAY(SELECT c.task_id::text FROM tasks c WHERE c.parent_task_id = p_task_uuid AND NOT is_terminal(c.state));
        PERFORM end_sub_task(v_task);
    END IF;
    -- What was told last: somebody else may have taken the task further since, outside of a turn.
    v_progress := json_build_object('state', v_task.state, 'completed', v_task.completed_steps, 'total', v_task.total_steps);
    RETURN QUERY SELECT * FROM ack_orchestration(
        v_instance, p_lock_token, 1, v_name, v_version, v_status,
        CASE WHEN v_status IS NOT NULL THEN json_build_object('state', v_task.state)::text END,
        p_message_instances => CASE WHEN v_children <> '{}' THEN v_children
                                    WHEN v_timed AND v_task.next_ready_at IS NOT NULL THEN ARRAY[v_instance] END,
        p_message_kinds => CASE WHEN v_children <> '{}' THEN array_fill('cancel'::text, ARRAY[cardinality(v_children)]) ELSE ARRAY['retry'] END,
        p_message_visible_ats => CASE WHEN v_children <> '{}' THEN NULL ELSE ARRAY[v_task.next_ready_at] END,
        p_message_dedup_keys => CASE WHEN v_children <> '{}' THEN NULL ELSE ARRAY['retry/' || v_instance] END,
        p_cancel_messages => CASE WHEN v_timed AND v_before.timer_at IS NOT NULL THEN ARRAY['retry/' || v_instance] END,
        p_cancel_executions => v_executions, p_cancel_activities => v_activities,
        p_custom_status => CASE WHEN v_progress IS DISTINCT FROM (SELECT i.custom_status FROM instances i WHERE i.instance_id = v_instance) THEN v_progress END,
        p_quiet => p_quiet);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION evaluate_task(
    p_task_uuid uuid, p_lock_token uuid, p_processor_uuid uuid, p_cancel boolean DEFAULT false,
    p_failed_positions integer[] DEFAULT NULL, p_failed_errors text[] DEFAULT NULL, p_headers text DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (queue text, namespace text, due_at timestamptz, now_at timestamptz, history json, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_instance   text := p_task_uuid::text;
    v_before     tasks;
    v_task       tasks;
    v_name       text;
    v_version    text;
    v_children   text[];
    v_executions bigint[];
    v_activities bigint[];
    v_status     text;
    v_timed      boolean;
    v_failed     record;
    v_began      timestamptz;
BEGIN
    PERFORM hold_instance_lock(v_instance, p_lock_token); -- fails if the lease has ended: nothing stale is written
    SELECT * INTO v_before FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_before.task_id IS NULL THEN
        RETURN QUERY SELECT * FROM ack_orchestration(v_instance, p_lock_token, 1, p_quiet => p_quiet);
        RETURN;
    END IF;
    IF p_cancel AND NOT is_terminal(v_before.state) THEN
        PERFORM cancel_open_steps(p_task_uuid, '{"event": "Cancel", "reason": "its parent was cancelled"}');
        PERFORM transition_task(p_task_uuid, ARRAY[v_before.state, 'cancelled'], NULL, '{"event": "Cancel", "reason": "its parent was cancelled"}', true);
    END IF;
    IF p_failed_positions IS NOT NULL THEN
        -- Whoever runs handlers has given an item up; unless there is another by now, that was the step's.
        FOR v_failed IN
            SELECT s.step_id, s.state, f.error FROM unnest(p_failed_positions, p_failed_errors) AS f (position, error)
              JOIN steps s ON s.task_id = p_task_uuid AND s.position = f.position
             WHERE s.state IN ('enqueued', 'in_progress') AND s.work_item_id IS NOT NULL -- or it is a task, and no item's
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id)
        LOOP
            PERFORM transition_steps(ARRAY[v_failed.step_id], ARRAY[v_failed.state, 'error'], p_processor_uuid, '{"event": "Fail"}',
                                     ARRAY[jsonb_build_object('error', v_failed.error, 'retryable', false)]);
        END LOOP;
    END IF;
    v_began := clock_timestamp();
    v_task := advance_task(p_task_uuid, p_processor_uuid, p_headers, true, p_quiet);
    IF p_quiet THEN
        RETURN QUERY
        SELECT 'worker', q.namespace, q.visible_at, clock_timestamp(), NULL::json, q.tag
          FROM worker_queue q WHERE q.instance_id = v_instance AND q.created_at >= v_began; -- by nobody else: the task is locked
    END IF;
    v_timed := v_before.timer_at IS DISTINCT FROM v_task.next_ready_at; -- which is null once it has ended
    IF NOT v_timed AND v_task.next_ready_at IS NOT NULL THEN
        -- Invariant (no timer is lost): whoever waits for an instant has a message in the queue for it. That of an instant that stays is there
        -- already, unless it ends with this turn: it was due when the turn was fetched, and the server's clock has gone back since.
        v_timed := EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_lock_token
                              AND coalesce(q.dedup_key, '') = 'retry/' || v_instance);
    END IF;
    SELECT d.name, d.version INTO v_name, v_version FROM task_definitions d WHERE d.task_definition_id = v_task.task_definition_id;
    v_status := CASE v_task.state WHEN 'complete' THEN 'Completed' WHEN 'resolved_manually' THEN 'Completed' WHEN 'error' THEN 'Failed' WHEN 'cancelled' THEN 'Cancelled' END;
    IF is_terminal(v_task.state) THEN
        SELECT array_agg(q.execution_id), array_agg(q.activity_id) INTO v_executions, v_activities FROM worker_queue q WHERE q.instance_id = v_instance;
        v_children := ARRAY(SELECT c.task_id::text FROM tasks c WHERE c.parent_task_id = p_task_uuid AND NOT is_terminal(c.state));
        PERFORM end_sub_task(v_task);
    END IF;
    RETURN QUERY SELECT * FROM ack_orchestration(
        v_instance, p_lock_token, 1, v_name, v_version, v_status,
        CASE WHEN v_status IS NOT NULL THEN json_build_object('state', v_task.state)::text END,
        p_message_instances => CASE WHEN v_children <> '{}' THEN v_children
                                    WHEN v_timed AND v_task.next_ready_at IS NOT NULL THEN ARRAY[v_instance] END,
        p_message_kinds => CASE WHEN v_children <> '{}' THEN array_fill('cancel'::text, ARRAY[cardinality(v_children)]) ELSE ARRAY['retry'] END,
        p_message_visible_ats => CASE WHEN v_children <> '{}' THEN NULL ELSE ARRAY[v_task.next_ready_at] END,
        p_message_dedup_keys => CASE WHEN v_children <> '{}' THEN NULL ELSE ARRAY['retry/' || v_instance] END,
        p_cancel_messages => CASE WHEN v_timed AND v_before.timer_at IS NOT NULL THEN ARRAY['retry/' || v_instance] END,
        p_cancel_executions => v_executions, p_cancel_activities => v_activities,
        p_custom_status => CASE WHEN is_terminal(v_task.state) OR v_before.state <> v_task.state OR v_before.completed_steps <> v_task.completed_steps OR v_before.sort_key = 1
                                THEN json_build_object('state', v_task.state, 'completed', v_task.completed_steps, 'total', v_task.total_steps)::text END,
        p_quiet => p_quiet);
END
$$;
-- +goose StatementEnd
