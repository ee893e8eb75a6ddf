-- A step that is a task of its own knows which: the one that was created last need not be the one with the latest time, since the server's clock
-- may have gone back. And the trigger that runs as the owner fires for its own table alone.

-- +goose Up

ALTER TABLE steps ADD COLUMN sub_task_id uuid;
COMMENT ON COLUMN steps.sub_task_id IS 'The task that it is, if it is one: that of its last attempt. Null also for an attempt that began before version 9.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_steps(p_task tasks, p_ready uuid[], p_due uuid[], p_processor uuid, p_headers text, p_quiet boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_place    record;
    v_items    bigint[];
    v_run      uuid[];
    v_sub      uuid[];
    v_metadata jsonb := '{"event": "Enqueue"}';
    v_of       record;
BEGIN
    SELECT * INTO v_place FROM claim_place(p_task.priority, p_task.namespace, p_task.retries, p_task.deadline, p_task.created_at);
    FOR v_of IN SELECT ARRAY['pending', 'enqueued'] AS path, p_ready AS ids UNION ALL SELECT ARRAY['waiting_for_retry', 'pending', 'enqueued'], p_due LOOP
        CONTINUE WHEN v_of.ids = '{}';
        SELECT array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NOT NULL), array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NULL)
          INTO v_run, v_sub
          FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id WHERE s.step_id = ANY (v_of.ids);
        IF v_run IS NOT NULL THEN
            -- Invariant: a step is enqueued if and only if it has a work item; both come with this transaction.
            SELECT array_agg(w.item_id ORDER BY w.ord) INTO v_items
              FROM (SELECT array_agg(d.handler ORDER BY i.ord) AS handlers,
                           array_agg(json_build_object('step', s.step_id)::text ORDER BY i.ord) AS inputs,
                           array_agg(s.position::bigint ORDER BY i.ord) AS positions,
                           array_agg('taskgraph' || coalesce('/' || nullif(d.tag, ''), '') ORDER BY i.ord) AS tags, array_agg(d.limit_key ORDER BY i.ord) AS keys,
                           array_agg(p_task.namespace) AS namespaces, array_agg(v_place.priority) AS priorities, array_agg(v_place.due_at) AS dues,
                           array_agg(p_task.task_id::text) AS instances, array_agg(1::bigint) AS executions, array_agg(p_headers) AS headers
                      FROM unnest(v_run) WITH ORDINALITY AS i (id, ord)
                      JOIN steps s ON s.step_id = i.id JOIN step_definitions d ON d.step_definition_id = s.step_definition_id) AS a
             CROSS JOIN LATERAL enqueue_work_many(a.handlers, a.inputs, a.namespaces, a.priorities, NULL, a.dues, NULL, a.instances, a.executions, a.positions,
                                                  a.tags, NULL, a.headers, p_keys => a.keys, p_quiet => p_quiet) WITH ORDINALITY AS w (item_id, duplicate, due_at, now_at, ord);
            PERFORM transition_steps(v_run, v_of.path, p_processor, v_metadata, p_work_items => v_items);
        END IF;
        IF v_sub IS NOT NULL THEN
            PERFORM transition_steps(v_sub, v_of.path || 'in_progress'::text, p_processor, v_metadata);
            -- Before there is that task, so that no clock is asked which one is the last: it may have gone back since.
            UPDATE steps s SET sub_task_id = new_uuid() WHERE s.step_id = ANY (v_sub);
            PERFORM FROM (SELECT array_agg(p_task.namespace) AS namespaces, array_agg(d.sub_task_name) AS names, array_agg(d.sub_task_version) AS versions,
                                 array_agg(coalesce(s.inputs, p_task.context)::text) AS contexts, array_agg(p_task.priority) AS priorities,
                                 array_agg(p_task.deadline) AS deadlines, array_agg(p_task.correlation_id) AS correlations, array_agg(p_task.task_id) AS tasks,
                                 array_agg(s.step_id) AS steps, array_agg(s.sub_task_id) AS ids, array_agg(p_headers) AS headers
                            FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id WHERE s.step_id = ANY (v_sub)) AS a
              CROSS JOIN LATERAL create_task_many(a.ids, a.namespaces, a.names, a.versions, a.contexts, a.priorities, p_deadlines => a.deadlines,
                                                  p_parent_correlations => a.correlations, p_parent_tasks => a.tasks, p_parent_steps => a.steps,
                                                  p_headers => a.headers);
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd

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
CREATE OR REPLACE FUNCTION tell_namespace_created()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- whoever may enqueue need not be able to read the settings
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever may call it may have it fire for a table of his own. The types of that may have casts that are functions of his, which would be
    -- called as the owner, so before this is known nothing is read of NEW.
    IF TG_RELID <> 'namespaces'::regclass THEN
        RAISE EXCEPTION 'tell_namespace_created is the trigger of the table namespaces of its schema, and of no other' USING ERRCODE = '42501';
    END IF;
    IF EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        PERFORM pg_notify('namespace_created', json_build_object(
            'namespace_uuid', md5('namespace ' || NEW.name)::uuid, 'namespace_name', NEW.name, 'description', NULL::text, 'created_at', NEW.created_at,
            'triggered_by', 'namespace_creation', 'emitted_at', transaction_timestamp())::text);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_steps(p_task tasks, p_ready uuid[], p_due uuid[], p_processor uuid, p_headers text, p_quiet boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_place    record;
    v_items    bigint[];
    v_run      uuid[];
    v_sub      uuid[];
    v_metadata jsonb := '{"event": "Enqueue"}';
    v_of       record;
BEGIN
    SELECT * INTO v_place FROM claim_place(p_task.priority, p_task.namespace, p_task.retries, p_task.deadline, p_task.created_at);
    FOR v_of IN SELECT ARRAY['pending', 'enqueued'] AS path, p_ready AS ids UNION ALL SELECT ARRAY['waiting_for_retry', 'pending', 'enqueued'], p_due LOOP
        CONTINUE WHEN v_of.ids = '{}';
        SELECT array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NOT NULL), array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NULL)
          INTO v_run, v_sub
          FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id WHERE s.step_id = ANY (v_of.ids);
        IF v_run IS NOT NULL THEN
            -- Invariant: a step is enqueued if and only if it has a work item; both come with this transaction.
            SELECT array_agg(w.item_id ORDER BY w.ord) INTO v_items
              FROM (SELECT array_agg(d.handler ORDER BY i.ord) AS handlers,
                           array_agg(json_build_object('step', s.step_id)::text ORDER BY i.ord) AS inputs,
                           array_agg(s.position::bigint ORDER BY i.ord) AS positions,
                           array_agg('taskgraph' || coalesce('/' || nullif(d.tag, ''), '') ORDER BY i.ord) AS tags, array_agg(d.limit_key ORDER BY i.ord) AS keys,
                           array_agg(p_task.namespace) AS namespaces, array_agg(v_place.priority) AS priorities, array_agg(v_place.due_at) AS dues,
                           array_agg(p_task.task_id::text) AS instances, array_agg(1::bigint) AS executions, array_agg(p_headers) AS headers
                      FROM unnest(v_run) WITH ORDINALITY AS i (id, ord)
                      JOIN steps s ON s.step_id = i.id JOIN step_definitions d ON d.step_definition_id = s.step_definition_id) AS a
             CROSS JOIN LATERAL enqueue_work_many(a.handlers, a.inputs, a.namespaces, a.priorities, NULL, a.dues, NULL, a.instances, a.executions, a.positions,
                                                  a.tags, NULL, a.headers, p_keys => a.keys, p_quiet => p_quiet) WITH ORDINALITY AS w (item_id, duplicate, due_at, now_at, ord);
            PERFORM transition_steps(v_run, v_of.path, p_processor, v_metadata, p_work_items => v_items);
        END IF;
        IF v_sub IS NOT NULL THEN
            PERFORM transition_steps(v_sub, v_of.path || 'in_progress'::text, p_processor, v_metadata);
            PERFORM FROM (SELECT array_agg(p_task.namespace) AS namespaces, array_agg(d.sub_task_name) AS names, array_agg(d.sub_task_version) AS versions,
                                 array_agg(coalesce(s.inputs, p_task.context)::text) AS contexts, array_agg(p_task.priority) AS priorities,
                                 array_agg(p_task.deadline) AS deadlines, array_agg(p_task.correlation_id) AS correlations, array_agg(p_task.task_id) AS tasks,
                                 array_agg(s.step_id) AS steps, array_agg(p_headers) AS headers
                            FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id WHERE s.step_id = ANY (v_sub)) AS a
              CROSS JOIN LATERAL create_task_many(NULL, a.namespaces, a.names, a.versions, a.contexts, a.priorities, p_deadlines => a.deadlines,
                                                  p_parent_correlations => a.correlations, p_parent_tasks => a.tasks, p_parent_steps => a.steps,
                                                  p_headers => a.headers);
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd

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
        -- A step that was tried again has another task by now.
        AND p_task.task_id = (SELECT c.task_id FROM tasks c WHERE c.parent_step_id = p_task.parent_step_id ORDER BY c.created_at DESC, c.task_id DESC LIMIT 1);
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
CREATE OR REPLACE FUNCTION tell_namespace_created()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- whoever may enqueue need not be able to read the settings
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        PERFORM pg_notify('namespace_created', json_build_object(
            'namespace_uuid', md5('namespace ' || NEW.name)::uuid, 'namespace_name', NEW.name, 'description', NULL::text, 'created_at', NEW.created_at,
            'triggered_by', 'namespace_creation', 'emitted_at', transaction_timestamp())::text);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

ALTER TABLE steps DROP COLUMN sub_task_id;
