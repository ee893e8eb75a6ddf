-- The state machines of tasks and steps, and the one way in which anything changes its state.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION new_uuid()
RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
BEGIN ATOMIC
    -- Version 7: 48 bits of milliseconds, and the rest at random.
    SELECT encode(substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                  || set_byte(r.bytes, 0, 112 | (get_byte(r.bytes, 0) & 15)), 'hex')::uuid
      FROM (SELECT substring(uuid_send(gen_random_uuid()) FROM 7) AS bytes) AS r;
END;
-- +goose StatementEnd
COMMENT ON FUNCTION new_uuid IS 'Internal: a new UUID of version 7.';

-- +goose StatementBegin
CREATE FUNCTION numbered_uuid(p_of uuid, p_at timestamptz, p_number integer)
RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- The number takes the 12 bits after the milliseconds, and carries into these. The last 8 bytes are of a hash of the whole id of the
-- parent, with the bits of the variant in their place: the ids of two parents may well have the same last bytes.
RETURN encode(substring(int8send((extract(epoch FROM p_at) * 1000)::bigint + p_number / 4096) FROM 3)
                  || substring(int4send(28672 | (p_number % 4096)) FROM 3)
                  || set_byte(substring(sha256(uuid_send(p_of)) FROM 1 FOR 8), 0, 128 | (get_byte(sha256(uuid_send(p_of)), 0) & 63)), 'hex')::uuid;
-- +goose StatementEnd
COMMENT ON FUNCTION numbered_uuid IS 'Internal: the UUID of version 7 of what has a number within something else. Those of one parent and instant are in the order of the numbers, and whoever knows these three need not look it up.';

-- +goose StatementBegin
CREATE FUNCTION is_task_edge(p_from text, p_to text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_from
        WHEN 'pending'                  THEN p_to IN ('initializing', 'cancelled', 'resolved_manually')
        WHEN 'initializing'             THEN p_to IN ('enqueuing_steps', 'complete', 'waiting_for_dependencies', 'cancelled', 'resolved_manually')
        WHEN 'enqueuing_steps'          THEN p_to IN ('steps_in_process', 'evaluating_results', 'error', 'cancelled', 'resolved_manually')
        WHEN 'steps_in_process'         THEN p_to IN ('evaluating_results', 'waiting_for_retry', 'cancelled', 'resolved_manually')
        WHEN 'evaluating_results'       THEN p_to IN ('complete', 'enqueuing_steps', 'steps_in_process', 'waiting_for_dependencies', 'waiting_for_retry',
                                                      'blocked_by_failures', 'cancelled', 'resolved_manually')
        WHEN 'waiting_for_dependencies' THEN p_to IN ('evaluating_results', 'cancelled', 'resolved_manually')
        WHEN 'waiting_for_retry'        THEN p_to IN ('enqueuing_steps', 'cancelled', 'resolved_manually')
        WHEN 'blocked_by_failures'      THEN p_to IN ('evaluating_results', 'error', 'cancelled', 'resolved_manually')
        ELSE false END;
-- +goose StatementEnd
COMMENT ON FUNCTION is_task_edge IS 'Whether a task may go from one state to the other in one transition. Nothing leaves complete, error, cancelled and resolved_manually.';

-- +goose StatementBegin
CREATE FUNCTION is_step_edge(p_from text, p_to text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_from
        WHEN 'pending'     THEN p_to IN ('enqueued', 'waiting_for_retry', 'error', 'cancelled', 'resolved_manually', 'complete')
        WHEN 'enqueued'    THEN p_to IN ('in_progress', 'waiting_for_retry', 'error', 'cancelled', 'resolved_manually', 'complete')
        WHEN 'in_progress' THEN p_to IN ('enqueued_for_orchestration', 'enqueued_as_error_for_orchestration', 'waiting_for_retry', 'error',
                                         'cancelled', 'resolved_manually', 'complete')
        WHEN 'enqueued_for_orchestration'          THEN p_to IN ('complete', 'error', 'cancelled', 'resolved_manually')
        WHEN 'enqueued_as_error_for_orchestration' THEN p_to IN ('waiting_for_retry', 'error', 'complete', 'cancelled', 'resolved_manually')
        WHEN 'waiting_for_retry' THEN p_to IN ('pending', 'cancelled', 'resolved_manually', 'complete')
        WHEN 'error'             THEN p_to IN ('pending', 'cancelled', 'resolved_manually', 'complete')
        ELSE false END;
-- +goose StatementEnd
COMMENT ON FUNCTION is_step_edge IS 'Whether a step may go from one state to the other in one transition. Nothing leaves complete, cancelled and resolved_manually; error is left by operators alone.';

-- +goose StatementBegin
CREATE FUNCTION is_terminal(p_task_state text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_task_state IN ('complete', 'error', 'cancelled', 'resolved_manually');
-- +goose StatementEnd
COMMENT ON FUNCTION is_terminal IS 'Internal: whether a task in this state has ended.';

-- +goose StatementBegin
CREATE FUNCTION transition_task(
    p_task uuid, p_path text[], p_processor uuid, p_metadata jsonb, p_leads boolean,
    p_passed integer DEFAULT 0, p_retried integer DEFAULT 0, p_turn boolean DEFAULT false, p_next_ready_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_hops integer := cardinality(p_path) - 1;
    v_to   text := p_path[cardinality(p_path)];
    v_now  timestamptz;
    v_task tasks;
BEGIN
    FOR i IN 1 .. v_hops LOOP
        IF is_task_edge(p_path[i], p_path[i + 1]) IS NOT TRUE THEN
            RAISE EXCEPTION 'a task does not go from % to %', p_path[i], p_path[i + 1] USING ERRCODE = 'PW003';
        END IF;
    END LOOP;
    -- Invariant (compare-and-swap): whoever changes the state of a task holds its row lock from before he compares it. So of any
    -- number of callers that expect the same state one changes it, and sort keys have neither gaps nor duplicates.
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task FOR NO KEY UPDATE;
    IF v_task.state IS DISTINCT FROM p_path[1] THEN
        RETURN false;
    END IF;
    IF NOT p_leads AND v_task.processor_id <> p_processor IS NOT FALSE AND v_task.processor_id IS NOT NULL
       AND v_to NOT IN ('cancelled', 'resolved_manually')
       AND v_task.state IN ('initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results')
       AND EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = p_task::text AND l.locked_until > clock_timestamp()) THEN
        RETURN false;
    END IF;
    v_now := clock_timestamp();
    INSERT INTO task_transitions (task_id, sort_key, from_state, to_state, processor_id, metadata, created_at)
    SELECT p_task, v_task.sort_key + hop.n, p_path[hop.n], p_path[hop.n + 1], p_processor, coalesce(p_metadata, '{}'), v_now
      FROM generate_series(1, v_hops) AS hop (n) ORDER BY hop.n;
    UPDATE tasks t
       SET state = v_to, sort_key = t.sort_key + v_hops, updated_at = v_now,
           state_entered_at = CASE WHEN v_hops > 0 THEN v_now ELSE t.state_entered_at END,
           processor_id = CASE WHEN v_hops = 0 THEN t.processor_id
                               WHEN v_to IN ('initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results') THEN p_processor END,
           completed_at = CASE WHEN is_terminal(v_to) THEN v_now END,
           completed_steps = t.completed_steps + p_passed, retries = t.retries + p_retried,
           priority_key = CASE WHEN p_retried > 0 THEN task_priority_key(t.namespace, t.priority, t.retries + p_retried, t.created_at) ELSE t.priority_key END,
           next_ready_at = CASE WHEN is_terminal(v_to) THEN NULL WHEN p_turn THEN p_next_ready_at ELSE t.next_ready_at END,
           timer_at = CASE WHEN p_turn AND NOT is_terminal(v_to) THEN p_next_ready_at ELSE t.timer_at END
     WHERE t.task_id = p_task;
    IF is_terminal(v_to) THEN
        PERFORM tell_task_state(p_task);
    END IF;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION transition_task IS 'Internal: the compare-and-swap of tasks. Takes a task that is in the first state of the path along all of it, in one step, and writes a transition for each. False, and nothing is changed, if it is in another state, if there is no such task, or if its state belongs to another processor whose lease holds: that does not concern whoever leads, which is the holder of the lease, nor a cancellation or a manual resolution. PW003 if the path is none. With the same write, so that a turn has one: so many steps more were passed on, and so many went to wait for another attempt; and with p_turn, which says that the caller sees to the timer, steps are ready next at p_next_ready_at. A path of one state is for these alone.';

-- +goose StatementBegin
CREATE FUNCTION transition_task_state_atomic(
    p_task_uuid uuid, p_from_state text, p_to_state text, p_processor_uuid uuid DEFAULT NULL, p_metadata jsonb DEFAULT '{}',
    p_expected_sort_key integer DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_expected_sort_key IS NOT NULL THEN
        PERFORM FROM tasks t WHERE t.task_id = p_task_uuid AND t.sort_key = p_expected_sort_key FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    IF NOT transition_task(p_task_uuid, ARRAY[p_from_state, p_to_state], p_processor_uuid, p_metadata, false) THEN
        RETURN false;
    END IF;
    IF is_terminal(p_to_state) THEN
        PERFORM cancel_open_steps(p_task_uuid, p_metadata);
    END IF;
    IF is_terminal(p_to_state) OR p_to_state IN ('evaluating_results', 'enqueuing_steps', 'initializing') THEN
        PERFORM wake_task(p_task_uuid, 'transition');
    END IF;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION transition_task_state_atomic IS 'Takes a task from one state to another, if it is in the first: of several callers one succeeds. False, and nothing is changed, if it is not, if there is no such task, and if it is in an active state (initializing, enqueuing_steps, steps_in_process, evaluating_results) that another processor brought it into, whose lease holds. Given p_expected_sort_key, that of the transition by which it came into the state when the caller saw it there, false also if there was another since. If it ends with that, its steps that have not are cancelled. PW003 if there is no such transition, see is_task_edge.';

-- +goose StatementBegin
CREATE FUNCTION get_current_task_state(p_task_uuid uuid)
RETURNS text
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$ SELECT t.state FROM tasks t WHERE t.task_id = p_task_uuid $$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_current_task_state IS 'State of a task; null if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION transition_steps(
    p_steps uuid[], p_path text[], p_processor uuid, p_metadata jsonb,
    p_results jsonb[] DEFAULT NULL, p_next_attempts timestamptz[] DEFAULT NULL, p_work_items bigint[] DEFAULT NULL, p_claim uuid DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_hops integer := cardinality(p_path) - 1;
    v_to   text := p_path[cardinality(p_path)];
    v_now  timestamptz := clock_timestamp();
BEGIN
    FOR i IN 1 .. v_hops LOOP
        IF is_step_edge(p_path[i], p_path[i + 1]) IS NOT TRUE THEN
            RAISE EXCEPTION 'a step does not go from % to %', p_path[i], p_path[i + 1] USING ERRCODE = 'PW003';
        END IF;
    END LOOP;
    -- Invariant (compare-and-swap): the update locks the row and, had another changed it meanwhile, compares its state anew.
    RETURN QUERY
    WITH moved AS (
        UPDATE steps s
           SET state = v_to, sort_key = s.sort_key + v_hops, updated_at = v_now,
               processor_id = coalesce(p_processor, s.processor_id),
               attempts = CASE WHEN p_path[1] = 'error' AND v_to = 'pending' THEN 0 ELSE s.attempts + (v_to = 'in_progress')::integer END,
               last_attempted_at = CASE WHEN v_to = 'in_progress' THEN v_now ELSE s.last_attempted_at END,
               processed_at = CASE WHEN v_to IN ('complete', 'cancelled', 'resolved_manually') THEN v_now END,
               -- Invariant: what waits for an attempt has an instant for that. One that somebody has asked for (set_step_backoff_atomic) stands.
               next_attempt_at = CASE WHEN v_to = 'waiting_for_retry'
                                      THEN coalesce(s.next_attempt_at, i.next_attempt_at, v_now + make_interval(secs => coalesce(
                                               (SELECT d.backoff_seconds FROM step_definitions d WHERE d.step_definition_id = s.step_definition_id),
                                               calculate_backoff_delay(s.attempts))))
                                      WHEN v_to = 'enqueued_as_error_for_orchestration' THEN coalesce(s.next_attempt_at, i.next_attempt_at)
                                      WHEN v_to = 'pending' AND p_path[1] = 'waiting_for_retry' THEN s.next_attempt_at END,
               backoff_request_seconds = CASE WHEN v_to IN ('enqueued_as_error_for_orchestration', 'waiting_for_retry')
                                                OR v_to = 'pending' AND p_path[1] = 'waiting_for_retry' THEN s.backoff_request_seconds END,
               results = CASE WHEN v_to IN ('cancelled', 'resolved_manually', 'pending', 'enqueued', 'in_progress') THEN NULL
                              WHEN p_results IS NOT NULL THEN i.result
                              -- What an attempt returned is no failure, and what went wrong is no result.
                              WHEN v_to = 'complete' AND p_path[1] <> 'enqueued_for_orchestration' OR v_to = 'error' AND p_path[1] = 'enqueued_for_orchestration' THEN NULL
                              ELSE s.results END,
               work_item_id = CASE WHEN v_to = 'enqueued' THEN i.work_item WHEN v_to = 'in_progress' THEN s.work_item_id END,
               claim = CASE WHEN v_to = 'in_progress' THEN p_claim END
          FROM unnest(p_steps, coalesce(p_results, '{}'), coalesce(p_next_attempts, '{}'), coalesce(p_work_items, '{}'))
               AS i (step_id, result, next_attempt_at, work_item)
         WHERE s.step_id = i.step_id AND s.state = p_path[1]
        RETURNING s.step_id, s.task_id, s.sort_key - v_hops AS before),
    logged AS (
        INSERT INTO step_transitions (step_id, sort_key, task_id, from_state, to_state, processor_id, metadata, created_at)
        SELECT m.step_id, m.before + hop.n, m.task_id, p_path[hop.n], p_path[hop.n + 1], p_processor, coalesce(p_metadata, '{}'), v_now
          FROM moved m CROSS JOIN generate_series(1, v_hops) AS hop (n))
    SELECT m.step_id FROM moved m;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION transition_steps IS 'Internal: the compare-and-swap of steps. Takes those of them that are in the first state of the path along all of it, writes a transition for each hop, and does what belongs to the last state: it counts the attempt (in_progress), notes when it ended, decides when the next one is due unless that is known (waiting_for_retry), and forgets what no longer holds. Results, instants of the next attempt and work items are for the steps of the same place. Returns those that it moved. PW003 if the path is none.';

-- +goose StatementBegin
CREATE FUNCTION transition_step_state_atomic(
    p_step_uuid uuid, p_from_state text, p_to_state text, p_processor_uuid uuid DEFAULT NULL, p_metadata jsonb DEFAULT '{}')
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task  uuid := (SELECT s.task_id FROM steps s WHERE s.step_id = p_step_uuid);
    v_state text;
BEGIN
    IF p_from_state = 'pending' AND p_to_state = 'enqueued' THEN
        RAISE EXCEPTION 'a step is enqueued together with its work item, by a turn of its task' USING ERRCODE = 'PW003';
    END IF;
    SELECT t.state INTO v_state FROM tasks t WHERE t.task_id = v_task FOR NO KEY UPDATE; -- before its steps, as everywhere
    IF is_step_edge(p_from_state, p_to_state) AND is_terminal(v_state) THEN
        RETURN false;
    END IF;
    PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY[p_from_state, p_to_state], p_processor_uuid, p_metadata);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_to_state = 'waiting_for_retry'
       AND EXISTS (SELECT FROM steps s WHERE s.step_id = p_step_uuid AND NOT (s.attempts = 0 OR s.retryable AND s.attempts < s.max_attempts)) THEN
        RAISE EXCEPTION 'step % has no attempt left to wait for', p_step_uuid USING ERRCODE = 'PW003';
    END IF;
    IF p_from_state = 'in_progress' THEN
        PERFORM cancel_sub_tasks(p_step_uuid);
    END IF;
    PERFORM wake_task(v_task, 'step_transition');
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION transition_step_state_atomic IS 'Takes a step from one state to another, if it is in the first, and has its task evaluated. False, and nothing is changed, if it is not, if there is no such step, and if its task has ended. A task that the step is is cancelled when the step leaves in_progress. PW003 if there is no such transition, see is_step_edge; for one to enqueued, which is for turns of the task alone, since a work item comes with it; and for one to waiting_for_retry if no attempt is left.';

-- +goose StatementBegin
CREATE FUNCTION cancel_sub_tasks(p_step uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM enqueue_message(c.task_id::text, 'cancel', p_namespace => c.namespace, p_queue => 'taskgraph') FROM tasks c WHERE c.parent_step_id = p_step AND NOT is_terminal(c.state);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cancel_sub_tasks IS 'Internal: cancels the task that a step is, if it has not ended: nobody waits for it any more.';

-- +goose StatementBegin
CREATE FUNCTION wake_task(p_task uuid, p_kind text, p_data jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE tasks t SET next_ready_at = least(t.next_ready_at, clock_timestamp())
     WHERE t.task_id = p_task AND NOT is_terminal(t.state) AND t.state <> 'pending' AND (t.next_ready_at <= clock_timestamp()) IS NOT TRUE;
    PERFORM enqueue_message(p_task::text, p_kind, p_data::json, p_namespace => t.namespace, p_queue => 'taskgraph') FROM tasks t WHERE t.task_id = p_task;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION wake_task IS 'Internal: has a task evaluated, since something about it has changed in this transaction.';

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
DROP FUNCTION wake_task, cancel_sub_tasks, transition_step_state_atomic, transition_steps, get_current_task_state, transition_task_state_atomic, transition_task,
    is_terminal, is_step_edge, is_task_edge, numbered_uuid, new_uuid;
