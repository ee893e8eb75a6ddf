-- Whoever may add to the queues, and no more, could say that a task of his is a step of another's, and so what that step comes to; and could
-- send a message, as if an item was given up, that failed a step which is a task. Purging locks instances before tasks, as turns do.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION create_task_many(
    p_tasks uuid[], p_namespaces text[], p_names text[], p_versions text[], p_contexts text[] DEFAULT NULL,
    p_priorities integer[] DEFAULT NULL, p_delays interval[] DEFAULT NULL, p_deadlines timestamptz[] DEFAULT NULL,
    p_idempotency_keys text[] DEFAULT NULL, p_initiators text[] DEFAULT NULL, p_source_systems text[] DEFAULT NULL, p_reasons text[] DEFAULT NULL,
    p_tags text[] DEFAULT NULL, p_correlations uuid[] DEFAULT NULL, p_parent_correlations uuid[] DEFAULT NULL,
    p_parent_tasks uuid[] DEFAULT NULL, p_parent_steps uuid[] DEFAULT NULL, p_headers text[] DEFAULT NULL)
RETURNS TABLE (task_id uuid, duplicate boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_ids     uuid[] := ARRAY(SELECT coalesce(p_tasks[n], new_uuid()) FROM generate_series(1, cardinality(p_names)) AS n ORDER BY n);
    v_missing text;
    v_added   uuid[];
    v_new     boolean[]; -- of v_ids, whether it was added
BEGIN
    SELECT format('%s, version %s, in namespace %s', i.name, i.version, i.namespace) INTO v_missing
      FROM unnest(p_namespaces, p_names, p_versions) AS i (namespace, name, version)
     WHERE NOT EXISTS (SELECT FROM task_definitions d WHERE d.namespace = i.namespace AND d.name = i.name AND d.version = i.version) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'there is no task definition %', v_missing USING ERRCODE = 'PW002';
    END IF;
    IF interval '0' > ANY (p_delays) THEN
        RAISE EXCEPTION 'a delay is negative' USING ERRCODE = 'PW003';
    END IF;
    -- Invariant (nobody makes up what a step comes to): a task is a step of another only if a turn of that has said so, by its id, before there is one.
    IF EXISTS (SELECT FROM unnest(v_ids, p_parent_tasks, p_parent_steps) AS i (id, parent_task, parent_step)
                WHERE (i.parent_task IS NOT NULL OR i.parent_step IS NOT NULL)
                  AND NOT EXISTS (SELECT FROM steps s WHERE s.step_id = i.parent_step AND s.task_id = i.parent_task
                                     AND s.state = 'in_progress' AND s.sub_task_id = i.id)) THEN
        RAISE EXCEPTION 'only a turn of its parent makes a task that is a step' USING ERRCODE = 'PW003';
    END IF;
    WITH added AS (
        INSERT INTO tasks (task_id, task_definition_id, namespace, priority, priority_key, deadline, start_at, next_ready_at, requested_at, initiator, source_system,
                           reason, tags, context, idempotency_key, correlation_id, parent_correlation_id, parent_task_id, parent_step_id, created_at,
                           total_steps, timer_at, depth)
        SELECT i.id, d.task_definition_id, d.namespace, coalesce(i.priority, 0), task_priority_key(d.namespace, coalesce(i.priority, 0), 0, v_now),
               i.deadline, v_now + coalesce(i.delay, '0'), v_now + coalesce(i.delay, '0'), v_now, i.initiator, i.source_system, i.reason, i.tags::jsonb, coalesce(i.context::jsonb, '{}'),
               i.idempotency_key, coalesce(i.correlation, i.id), i.parent_correlation, i.parent_task, i.parent_step, v_now,
               (SELECT count(*) FROM step_definitions s WHERE s.task_definition_id = d.task_definition_id AND NOT s.on_demand),
               CASE WHEN i.delay > interval '0' THEN v_now + i.delay END,
               CASE WHEN i.parent_task IS NULL THEN 0 ELSE coalesce((SELECT p.depth + 1 FROM tasks p WHERE p.task_id = i.parent_task), 0) END
          FROM unnest(v_ids, p_namespaces, p_names, p_versions, p_contexts, p_priorities, p_delays, p_deadlines, p_idempotency_keys, p_initiators,
                      p_source_systems, p_reasons, p_tags, p_correlations, p_parent_correlations, p_parent_tasks, p_parent_steps) WITH ORDINALITY
               AS i (id, namespace, name, version, context, priority, delay, deadline, idempotency_key, initiator, source_system, reason, tags,
                     correlation, parent_correlation, parent_task, parent_step, ord)
          JOIN task_definitions d ON d.namespace = i.namespace AND d.name = i.name AND d.version = i.version
         ORDER BY i.idempotency_key, i.ord -- so that two batches with the same keys cannot deadlock
        ON CONFLICT (idempotency_key) DO NOTHING
        RETURNING tasks.task_id)
    SELECT array_agg(a.task_id) INTO v_added FROM added a;
    v_added := coalesce(v_added, '{}');
    -- By a hash, which a query with the joins that are enabled here would not make: to look each up in an array is n * n.
    v_new := ARRAY(SELECT i.id IN (SELECT unnest(v_added)) FROM unnest(v_ids) WITH ORDINALITY AS i (id, ord) ORDER BY i.ord);

    WITH stepped AS (
        INSERT INTO steps (step_id, task_id, step_definition_id, position, name, retryable, max_attempts, inputs, priority, unmet, created_at)
        SELECT numbered_uuid(t.task_id, v_now, s.position), t.task_id, s.step_definition_id, s.position, s.name, s.retryable, s.max_attempts, s.inputs,
               t.priority, s.parents, v_now
          FROM tasks t JOIN step_definitions s ON s.task_definition_id = t.task_definition_id AND NOT s.on_demand
         WHERE t.task_id = ANY (v_added) -- which an index is asked for; an array that is not takes as long as it has elements
        RETURNING step_id, steps.task_id),
    stepped_log AS (
        INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, metadata, created_at)
        SELECT s.step_id, 1, s.task_id, 'pending', '{"event": "Create"}', v_now FROM stepped s),
    joined AS (
        INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, condition)
        SELECT t.task_id, numbered_uuid(t.task_id, v_now, d.parent), numbered_uuid(t.task_id, v_now, d.child), d.condition
          FROM tasks t JOIN step_definition_dependencies d ON d.task_definition_id = t.task_definition_id
         WHERE t.task_id = ANY (v_added))
    INSERT INTO task_transitions (task_id, sort_key, to_state, metadata, created_at)
    SELECT a.id, 1, 'pending', '{"event": "Create"}', v_now FROM unnest(v_added) AS a (id);

    PERFORM FROM (
        SELECT array_agg(i.id::text) AS ids, array_agg('start'::text) AS kinds, array_agg(NULL::text) AS datas, array_agg(i.name) AS names,
               array_agg(i.version) AS versions, array_agg(i.namespace) AS namespaces, array_agg(place.priority) AS priorities,
               array_agg(CASE WHEN i.delay > interval '0' THEN v_now + i.delay WHEN place.due_at < v_now THEN place.due_at END) AS dues,
               array_agg('taskgraph'::text) AS queues, array_agg(i.headers) AS headers,
               array_agg(CASE WHEN i.delay > interval '0' THEN 'retry/' || i.id END) AS keys -- as tasks.timer_at says
          FROM unnest(v_ids, p_namespaces, p_names, p_versions, p_priorities, p_delays, p_deadlines, p_headers, v_new)
               AS i (id, namespace, name, version, priority, delay, deadline, headers, new)
         CROSS JOIN LATERAL claim_place(coalesce(i.priority, 0), i.namespace, 0, i.deadline, v_now) AS place
         WHERE i.new) AS m
     CROSS JOIN LATERAL enqueue_message_many(m.ids, m.kinds, m.datas, m.names, m.versions, NULL, m.namespaces, m.priorities, NULL, m.dues, m.keys,
                                             m.queues, m.headers)
     WHERE m.ids IS NOT NULL;

    IF cardinality(v_added) < cardinality(v_ids) THEN
        SELECT k.key INTO v_missing
          FROM unnest(v_new, p_idempotency_keys, p_namespaces, p_names, p_versions, p_contexts) AS k (new, key, namespace, name, version, context)
          JOIN tasks t ON t.idempotency_key = k.key
          JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
         WHERE NOT k.new AND ((d.namespace, d.name, d.version) <> (k.namespace, k.name, k.version) OR t.context <> coalesce(k.context::jsonb, '{}')) LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'the idempotency key % belongs to a task of another definition or context', v_missing USING ERRCODE = 'PW007';
        END IF;
    END IF;
    FOR task_id, duplicate IN
        SELECT CASE WHEN i.new THEN i.id ELSE t.task_id END, NOT i.new
          FROM unnest(v_ids, p_idempotency_keys, v_new) WITH ORDINALITY AS i (id, key, new, ord)
          LEFT JOIN LATERAL (SELECT k.task_id FROM tasks k WHERE k.idempotency_key = i.key AND NOT i.new) t ON true
         ORDER BY i.ord
    LOOP
        IF task_id IS NULL THEN -- purged since the insert met it
            RAISE EXCEPTION 'a task with the same idempotency key was removed at this moment' USING ERRCODE = '40001';
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION create_task_many IS 'Creates tasks of registered definitions with all their steps, one per array element, and has them evaluated: at once, or after their delays. Returns a row for each in the same order. A task whose idempotency key another has adds nothing and returns that other, as duplicate; PW007 if it is of another definition or has another context. Arrays that are null, or have a null, mean the defaults: priority 0, no delay. p_headers are JSON objects of strings that travel with the message, such as the trace. PW002 for an unknown definition, PW003 for a negative delay, and for parents, which are for turns of the parent alone; 40001 if the task with the idempotency key was removed at this moment: the same call can succeed.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION end_sub_task(p_task tasks)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_most    constant bigint := 64 << 20; -- of what jsonb takes, which is 256 MiB in one value
    v_success boolean := p_task.state IN ('complete', 'resolved_manually');
    v_size    bigint := 0;
    v_step    record;
    v_results jsonb;
BEGIN
    IF p_task.parent_step_id IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id
      WHERE s.step_id = p_task.parent_step_id AND s.state = 'in_progress'
        AND d.handler IS NULL -- what a handler runs ends with its item: until version 11 anybody who created a task could say that it is that step
        -- A step that was tried again has another task by now. What was in progress before steps knew theirs has the one that was created last.
        AND p_task.task_id = coalesce(s.sub_task_id, (SELECT c.task_id FROM tasks c WHERE c.parent_step_id = p_task.parent_step_id
                                                       ORDER BY c.created_at DESC, c.task_id DESC LIMIT 1));
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_success THEN
        FOR v_step IN SELECT s.results FROM steps s WHERE s.task_id = p_task.task_id AND s.state = 'complete' AND s.results IS NOT NULL LOOP
            v_size := v_size + pg_column_size(jsonb_build_array(v_step.results)); -- a column has the size that it is compressed to
            EXIT WHEN v_size > v_most;
        END LOOP;
    END IF;
    IF v_size > v_most THEN
        v_success := false;
        v_results := jsonb_build_object('error', format('the results of task %s have more than %s bytes together', p_task.task_id, v_most), 'retryable', false);
    ELSIF v_success THEN
        v_results := (SELECT coalesce(jsonb_object_agg(s.name, s.results), '{}') FROM steps s
                       WHERE s.task_id = p_task.task_id AND s.state = 'complete' AND s.results IS NOT NULL);
    ELSE
        v_results := jsonb_build_object('error', format('task %s ended as %s', p_task.task_id, p_task.state), 'retryable', p_task.state = 'error');
    END IF;
    PERFORM transition_steps(
        ARRAY[p_task.parent_step_id], ARRAY['in_progress', CASE WHEN v_success THEN 'enqueued_for_orchestration' ELSE 'enqueued_as_error_for_orchestration' END], NULL,
        jsonb_build_object('event', 'SubTaskEnded', 'task', p_task.task_id, 'state', p_task.state), ARRAY[v_results]);
    IF FOUND THEN
        PERFORM enqueue_message(p_task.parent_task_id::text, 'step', p_queue => 'taskgraph');
    END IF;
END
$$;
-- +goose StatementEnd

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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION purge_tasks(p_completed_before timestamptz, p_limit integer DEFAULT 1000)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_most  constant integer := 20000; -- steps of all of them: a call that took longer than it may would be tried for ever
    v_steps bigint := 0;
    v_task  record;
    v_tasks uuid[] := '{}';
BEGIN
    -- Before anything else, as refresh_rollups does, or two could wait for each other: what is deleted is taken out of the counts.
    PERFORM FROM rollup_cursor FOR UPDATE;
    PERFORM refresh_rollups();
    -- As they come, which is some at a time: hardly more are looked at, and locked, than are taken.
    FOR v_task IN
        SELECT t.task_id, t.total_steps FROM tasks t
         WHERE t.completed_at < p_completed_before AND is_terminal(t.state)
           AND NOT EXISTS (SELECT FROM tasks p WHERE p.task_id = t.parent_task_id AND NOT is_terminal(p.state))
           -- Whoever is at it yet, or is to be told.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           -- Its runs are added up, for nothing was written of it after it had ended.
           AND NOT EXISTS (SELECT FROM task_transitions x CROSS JOIN rollup_cursor c WHERE x.task_id = t.task_id AND x.sort_key = t.sort_key AND x.xact >= c.xact)
         ORDER BY t.completed_at LIMIT p_limit
           -- A turn of a message that came since has the instance, and updates the task: it is not to wait for whoever waits for the instance.
           FOR KEY SHARE SKIP LOCKED
    LOOP
        v_steps := v_steps + v_task.total_steps;
        EXIT WHEN v_steps > v_most AND v_tasks <> '{}'; -- one that is larger goes by itself
        v_tasks := v_tasks || v_task.task_id;
    END LOOP;
    PERFORM delete_instances(ARRAY(SELECT i.instance_id FROM instances i WHERE i.instance_id = ANY (ARRAY(SELECT t.id::text FROM unnest(v_tasks) AS t (id)))), true);
    DELETE FROM step_transitions x USING steps s WHERE s.task_id = ANY (v_tasks) AND x.step_id = s.step_id;
    DELETE FROM task_transitions x WHERE x.task_id = ANY (v_tasks);
    DELETE FROM task_dlq d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM step_dependencies d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM steps s WHERE s.task_id = ANY (v_tasks);
    DELETE FROM tasks t WHERE t.task_id = ANY (v_tasks);
    RETURN cardinality(v_tasks);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION create_task_many(
    p_tasks uuid[], p_namespaces text[], p_names text[], p_versions text[], p_contexts text[] DEFAULT NULL,
    p_priorities integer[] DEFAULT NULL, p_delays interval[] DEFAULT NULL, p_deadlines timestamptz[] DEFAULT NULL,
    p_idempotency_keys text[] DEFAULT NULL, p_initiators text[] DEFAULT NULL, p_source_systems text[] DEFAULT NULL, p_reasons text[] DEFAULT NULL,
    p_tags text[] DEFAULT NULL, p_correlations uuid[] DEFAULT NULL, p_parent_correlations uuid[] DEFAULT NULL,
    p_parent_tasks uuid[] DEFAULT NULL, p_parent_steps uuid[] DEFAULT NULL, p_headers text[] DEFAULT NULL)
RETURNS TABLE (task_id uuid, duplicate boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_ids     uuid[] := ARRAY(SELECT coalesce(p_tasks[n], new_uuid()) FROM generate_series(1, cardinality(p_names)) AS n ORDER BY n);
    v_missing text;
    v_added   uuid[];
    v_new     boolean[]; -- of v_ids, whether it was added
BEGIN
    SELECT format('%s, version %s, in namespace %s', i.name, i.version, i.namespace) INTO v_missing
      FROM unnest(p_namespaces, p_names, p_versions) AS i (namespace, name, version)
     WHERE NOT EXISTS (SELECT FROM task_definitions d WHERE d.namespace = i.namespace AND d.name = i.name AND d.version = i.version) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'there is no task definition %', v_missing USING ERRCODE = 'PW002';
    END IF;
    IF interval '0' > ANY (p_delays) THEN
        RAISE EXCEPTION 'a delay is negative' USING ERRCODE = 'PW003';
    END IF;
    WITH added AS (
        INSERT INTO tasks (task_id, task_definition_id, namespace, priority, priority_key, deadline, start_at, next_ready_at, requested_at, initiator, source_system,
                           reason, tags, context, idempotency_key, correlation_id, parent_correlation_id, parent_task_id, parent_step_id, created_at,
                           total_steps, timer_at, depth)
        SELECT i.id, d.task_definition_id, d.namespace, coalesce(i.priority, 0), task_priority_key(d.namespace, coalesce(i.priority, 0), 0, v_now),
               i.deadline, v_now + coalesce(i.delay, '0'), v_now + coalesce(i.delay, '0'), v_now, i.initiator, i.source_system, i.reason, i.tags::jsonb, coalesce(i.context::jsonb, '{}'),
               i.idempotency_key, coalesce(i.correlation, i.id), i.parent_correlation, i.parent_task, i.parent_step, v_now,
               (SELECT count(*) FROM step_definitions s WHERE s.task_definition_id = d.task_definition_id AND NOT s.on_demand),
               CASE WHEN i.delay > interval '0' THEN v_now + i.delay END,
               CASE WHEN i.parent_task IS NULL THEN 0 ELSE coalesce((SELECT p.depth + 1 FROM tasks p WHERE p.task_id = i.parent_task), 0) END
          FROM unnest(v_ids, p_namespaces, p_names, p_versions, p_contexts, p_priorities, p_delays, p_deadlines, p_idempotency_keys, p_initiators,
                      p_source_systems, p_reasons, p_tags, p_correlations, p_parent_correlations, p_parent_tasks, p_parent_steps) WITH ORDINALITY
               AS i (id, namespace, name, version, context, priority, delay, deadline, idempotency_key, initiator, source_system, reason, tags,
                     correlation, parent_correlation, parent_task, parent_step, ord)
          JOIN task_definitions d ON d.namespace = i.namespace AND d.name = i.name AND d.version = i.version
         ORDER BY i.idempotency_key, i.ord -- so that two batches with the same keys cannot deadlock
        ON CONFLICT (idempotency_key) DO NOTHING
        RETURNING tasks.task_id)
    SELECT array_agg(a.task_id) INTO v_added FROM added a;
    v_added := coalesce(v_added, '{}');
    -- By a hash, which a query with the joins that are enabled here would not make: to look each up in an array is n * n.
    v_new := ARRAY(SELECT i.id IN (SELECT unnest(v_added)) FROM unnest(v_ids) WITH ORDINALITY AS i (id, ord) ORDER BY i.ord);

    WITH stepped AS (
        INSERT INTO steps (step_id, task_id, step_definition_id, position, name, retryable, max_attempts, inputs, priority, unmet, created_at)
        SELECT numbered_uuid(t.task_id, v_now, s.position), t.task_id, s.step_definition_id, s.position, s.name, s.retryable, s.max_attempts, s.inputs,
               t.priority, s.parents, v_now
          FROM tasks t JOIN step_definitions s ON s.task_definition_id = t.task_definition_id AND NOT s.on_demand
         WHERE t.task_id = ANY (v_added) -- which an index is asked for; an array that is not takes as long as it has elements
        RETURNING step_id, steps.task_id),
    stepped_log AS (
        INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, metadata, created_at)
        SELECT s.step_id, 1, s.task_id, 'pending', '{"event": "Create"}', v_now FROM stepped s),
    joined AS (
        INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, condition)
        SELECT t.task_id, numbered_uuid(t.task_id, v_now, d.parent), numbered_uuid(t.task_id, v_now, d.child), d.condition
          FROM tasks t JOIN step_definition_dependencies d ON d.task_definition_id = t.task_definition_id
         WHERE t.task_id = ANY (v_added))
    INSERT INTO task_transitions (task_id, sort_key, to_state, metadata, created_at)
    SELECT a.id, 1, 'pending', '{"event": "Create"}', v_now FROM unnest(v_added) AS a (id);

    PERFORM FROM (
        SELECT array_agg(i.id::text) AS ids, array_agg('start'::text) AS kinds, array_agg(NULL::text) AS datas, array_agg(i.name) AS names,
               array_agg(i.version) AS versions, array_agg(i.namespace) AS namespaces, array_agg(place.priority) AS priorities,
               array_agg(CASE WHEN i.delay > interval '0' THEN v_now + i.delay WHEN place.due_at < v_now THEN place.due_at END) AS dues,
               array_agg('taskgraph'::text) AS queues, array_agg(i.headers) AS headers,
               array_agg(CASE WHEN i.delay > interval '0' THEN 'retry/' || i.id END) AS keys -- as tasks.timer_at says
          FROM unnest(v_ids, p_namespaces, p_names, p_versions, p_priorities, p_delays, p_deadlines, p_headers, v_new)
               AS i (id, namespace, name, version, priority, delay, deadline, headers, new)
         CROSS JOIN LATERAL claim_place(coalesce(i.priority, 0), i.namespace, 0, i.deadline, v_now) AS place
         WHERE i.new) AS m
     CROSS JOIN LATERAL enqueue_message_many(m.ids, m.kinds, m.datas, m.names, m.versions, NULL, m.namespaces, m.priorities, NULL, m.dues, m.keys,
                                             m.queues, m.headers)
     WHERE m.ids IS NOT NULL;

    IF cardinality(v_added) < cardinality(v_ids) THEN
        SELECT k.key INTO v_missing
          FROM unnest(v_new, p_idempotency_keys, p_namespaces, p_names, p_versions, p_contexts) AS k (new, key, namespace, name, version, context)
          JOIN tasks t ON t.idempotency_key = k.key
          JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
         WHERE NOT k.new AND ((d.namespace, d.name, d.version) <> (k.namespace, k.name, k.version) OR t.context <> coalesce(k.context::jsonb, '{}')) LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'the idempotency key % belongs to a task of another definition or context', v_missing USING ERRCODE = 'PW007';
        END IF;
    END IF;
    FOR task_id, duplicate IN
        SELECT CASE WHEN i.new THEN i.id ELSE t.task_id END, NOT i.new
          FROM unnest(v_ids, p_idempotency_keys, v_new) WITH ORDINALITY AS i (id, key, new, ord)
          LEFT JOIN LATERAL (SELECT k.task_id FROM tasks k WHERE k.idempotency_key = i.key AND NOT i.new) t ON true
         ORDER BY i.ord
    LOOP
        IF task_id IS NULL THEN -- purged since the insert met it
            RAISE EXCEPTION 'a task with the same idempotency key was removed at this moment' USING ERRCODE = '40001';
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION create_task_many IS 'Creates tasks of registered definitions with all their steps, one per array element, and has them evaluated: at once, or after their delays. Returns a row for each in the same order. A task whose idempotency key another has adds nothing and returns that other, as duplicate; PW007 if it is of another definition or has another context. Arrays that are null, or have a null, mean the defaults: priority 0, no delay. p_headers are JSON objects of strings that travel with the message, such as the trace. PW002 for an unknown definition, PW003 for a negative delay; 40001 if the task with the idempotency key was removed at this moment: the same call can succeed.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION end_sub_task(p_task tasks)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_most    constant bigint := 64 << 20; -- of what jsonb takes, which is 256 MiB in one value
    v_success boolean := p_task.state IN ('complete', 'resolved_manually');
    v_size    bigint := 0;
    v_step    record;
    v_results jsonb;
BEGIN
    IF p_task.parent_step_id IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM steps s
      WHERE s.step_id = p_task.parent_step_id AND s.state = 'in_progress'
        -- A step that was tried again has another task by now. What was in progress before steps knew theirs has the one that was created last.
        AND p_task.task_id = coalesce(s.sub_task_id, (SELECT c.task_id FROM tasks c WHERE c.parent_step_id = p_task.parent_step_id
                                                       ORDER BY c.created_at DESC, c.task_id DESC LIMIT 1));
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_success THEN
        FOR v_step IN SELECT s.results FROM steps s WHERE s.task_id = p_task.task_id AND s.state = 'complete' AND s.results IS NOT NULL LOOP
            v_size := v_size + pg_column_size(jsonb_build_array(v_step.results)); -- a column has the size that it is compressed to
            EXIT WHEN v_size > v_most;
        END LOOP;
    END IF;
    IF v_size > v_most THEN
        v_success := false;
        v_results := jsonb_build_object('error', format('the results of task %s have more than %s bytes together', p_task.task_id, v_most), 'retryable', false);
    ELSIF v_success THEN
        v_results := (SELECT coalesce(jsonb_object_agg(s.name, s.results), '{}') FROM steps s
                       WHERE s.task_id = p_task.task_id AND s.state = 'complete' AND s.results IS NOT NULL);
    ELSE
        v_results := jsonb_build_object('error', format('task %s ended as %s', p_task.task_id, p_task.state), 'retryable', p_task.state = 'error');
    END IF;
    PERFORM transition_steps(
        ARRAY[p_task.parent_step_id], ARRAY['in_progress', CASE WHEN v_success THEN 'enqueued_for_orchestration' ELSE 'enqueued_as_error_for_orchestration' END], NULL,
        jsonb_build_object('event', 'SubTaskEnded', 'task', p_task.task_id, 'state', p_task.state), ARRAY[v_results]);
    IF FOUND THEN
        PERFORM enqueue_message(p_task.parent_task_id::text, 'step', p_queue => 'taskgraph');
    END IF;
END
$$;
-- +goose StatementEnd

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
             WHERE s.state IN ('enqueued', 'in_progress') AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION purge_tasks(p_completed_before timestamptz, p_limit integer DEFAULT 1000)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_most  constant integer := 20000; -- steps of all of them: a call that took longer than it may would be tried for ever
    v_steps bigint := 0;
    v_task  record;
    v_tasks uuid[] := '{}';
BEGIN
    -- Before anything else, as refresh_rollups does, or two could wait for each other: what is deleted is taken out of the counts.
    PERFORM FROM rollup_cursor FOR UPDATE;
    PERFORM refresh_rollups();
    -- As they come, which is some at a time: hardly more are looked at, and locked, than are taken.
    FOR v_task IN
        SELECT t.task_id, t.total_steps FROM tasks t
         WHERE t.completed_at < p_completed_before AND is_terminal(t.state)
           AND NOT EXISTS (SELECT FROM tasks p WHERE p.task_id = t.parent_task_id AND NOT is_terminal(p.state))
           -- Whoever is at it yet, or is to be told.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           -- Its runs are added up, for nothing was written of it after it had ended.
           AND NOT EXISTS (SELECT FROM task_transitions x CROSS JOIN rollup_cursor c WHERE x.task_id = t.task_id AND x.sort_key = t.sort_key AND x.xact >= c.xact)
         ORDER BY t.completed_at LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        v_steps := v_steps + v_task.total_steps;
        EXIT WHEN v_steps > v_most AND v_tasks <> '{}'; -- one that is larger goes by itself
        v_tasks := v_tasks || v_task.task_id;
    END LOOP;
    PERFORM delete_instances(ARRAY(SELECT i.instance_id FROM instances i WHERE i.instance_id = ANY (ARRAY(SELECT t.id::text FROM unnest(v_tasks) AS t (id)))), true);
    DELETE FROM step_transitions x USING steps s WHERE s.task_id = ANY (v_tasks) AND x.step_id = s.step_id;
    DELETE FROM task_transitions x WHERE x.task_id = ANY (v_tasks);
    DELETE FROM task_dlq d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM step_dependencies d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM steps s WHERE s.task_id = ANY (v_tasks);
    DELETE FROM tasks t WHERE t.task_id = ANY (v_tasks);
    RETURN cardinality(v_tasks);
END
$$;
-- +goose StatementEnd
