-- What goes on at a step while its server, or its item, is lost is kept, and found.
--
-- Invariant (begun), of 00013_survives.sql: a step that is enqueued with the very item of an attempt is one whose beginning the server has lost.
-- It is begun by what is said for it, which is also how far it has got: the token says whose it is.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION checkpoint_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_checkpoint jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM FROM steps s WHERE s.step_id = p_step_uuid AND s.work_item_id = p_work_item AND s.state = 'enqueued' FOR NO KEY UPDATE;
    IF FOUND THEN -- see invariant (begun); without a lease it is undone
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['enqueued', 'in_progress'], NULL, '{"event": "Start"}', p_claim => p_lock_token);
    END IF;
    UPDATE steps s SET checkpoint = p_checkpoint, updated_at = clock_timestamp()
     WHERE s.step_id = p_step_uuid AND s.state = 'in_progress' AND s.work_item_id = p_work_item
       AND EXISTS (SELECT FROM worker_queue q WHERE q.id = p_work_item AND q.lock_token = p_lock_token AND q.visible_at > clock_timestamp());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_work_item, p_lock_token USING ERRCODE = 'PW001';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION recover_tasks(p_older_than interval DEFAULT '5 min', p_limit integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_tasks uuid[];
    v_more  uuid[];
BEGIN
    -- Of no use as long as every change of a task is made by these functions: each comes with a message that is as durable.
    v_tasks := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.state IN ('pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results', 'waiting_for_dependencies', 'waiting_for_retry')
           AND t.state_entered_at < v_now - p_older_than
           AND (t.next_ready_at < v_now - p_older_than OR t.next_ready_at IS NULL AND t.state NOT IN ('pending', 'waiting_for_dependencies'))
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now)
           AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.instance_id = t.task_id::text)
           AND NOT EXISTS (SELECT FROM tasks c WHERE c.parent_task_id = t.task_id AND NOT is_terminal(c.state))
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Steps whose work item somebody else has removed, or made a dead letter. Their own dispatcher sends the task a message with that.
    v_more := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error' -- as the index has it
           AND t.state_entered_at < v_now - p_older_than
           AND EXISTS (SELECT FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id AND d.handler IS NOT NULL
                        WHERE s.task_id = t.task_id AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
                          AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id))
           -- A timer that is not due is that of another step, and says nothing of this one. What waits otherwise may: its turn has failed, and comes again.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text
                              AND (q.visible_at <= v_now OR coalesce(q.dedup_key, '') <> 'retry/' || t.task_id))
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now)
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Invariant: the end of an item and what becomes of its step are one transaction, and to begin an attempt takes an item that is
    -- there. So a statement that sees such a step without an item sees one that nobody is at, and the row of the task keeps
    -- turns away until it is put right.
    PERFORM lose_step(s.step_id, NULL, v_now)
       FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id AND d.handler IS NOT NULL
      WHERE s.task_id = ANY (v_more) AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
        AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id);
    v_tasks := ARRAY(SELECT DISTINCT i.id FROM unnest(v_tasks || v_more) AS i (id));
    PERFORM wake_task(i.id, 'recover') FROM unnest(v_tasks) AS i (id);
    RETURN cardinality(v_tasks);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION checkpoint_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_checkpoint jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE steps s SET checkpoint = p_checkpoint, updated_at = clock_timestamp()
     WHERE s.step_id = p_step_uuid AND s.state = 'in_progress' AND s.work_item_id = p_work_item
       AND EXISTS (SELECT FROM worker_queue q WHERE q.id = p_work_item AND q.lock_token = p_lock_token AND q.visible_at > clock_timestamp());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_work_item, p_lock_token USING ERRCODE = 'PW001';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION recover_tasks(p_older_than interval DEFAULT '5 min', p_limit integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_tasks uuid[];
    v_more  uuid[];
BEGIN
    -- Of no use as long as every change of a task is made by these functions: each comes with a message that is as durable.
    v_tasks := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.state IN ('pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results', 'waiting_for_dependencies', 'waiting_for_retry')
           AND t.state_entered_at < v_now - p_older_than
           AND (t.next_ready_at < v_now - p_older_than OR t.next_ready_at IS NULL AND t.state NOT IN ('pending', 'waiting_for_dependencies'))
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now)
           AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.instance_id = t.task_id::text)
           AND NOT EXISTS (SELECT FROM tasks c WHERE c.parent_task_id = t.task_id AND NOT is_terminal(c.state))
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Steps whose work item somebody else has removed, or made a dead letter. Their own dispatcher sends the task a message with that.
    v_more := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error' -- as the index has it
           AND t.state_entered_at < v_now - p_older_than
           AND EXISTS (SELECT FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id AND d.handler IS NOT NULL
                        WHERE s.task_id = t.task_id AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
                          AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id))
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now)
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Invariant: the end of an item and what becomes of its step are one transaction, and to begin an attempt takes an item that is
    -- there. So a statement that sees such a step without an item sees one that nobody is at, and the row of the task keeps
    -- turns away until it is put right.
    PERFORM lose_step(s.step_id, NULL, v_now)
       FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id AND d.handler IS NOT NULL
      WHERE s.task_id = ANY (v_more) AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
        AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id);
    v_tasks := ARRAY(SELECT DISTINCT i.id FROM unnest(v_tasks || v_more) AS i (id));
    PERFORM wake_task(i.id, 'recover') FROM unnest(v_tasks) AS i (id);
    RETURN cardinality(v_tasks);
END
$$;
-- +goose StatementEnd
