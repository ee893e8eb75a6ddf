-- What tasks have is bounded whoever creates them, so that whoever is to run, or list, one can read it; and thresholds of a definition, so
-- that all stale tasks are found.

-- +goose Up

-- By triggers, which run without a right of whoever writes: new functions the roles that there are may not call yet. WHEN lets pass, at no
-- cost, what is in bounds whatever it is: jsonb has 16 bytes for a number of at most 147,455 digits. What is copied from another row has the
-- size that it is compressed to, and was looked at there. A sub-task has what its parent has: if that was there before, its turns go on.

-- +goose StatementBegin
CREATE FUNCTION refuse_unreadable()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_over boolean;
BEGIN
    FOR v_arg IN 0 .. TG_NARGS - 1 LOOP
        BEGIN
            EXECUTE format('SELECT octet_length(($1).%I::text) > 268435456', TG_ARGV[v_arg]) INTO v_over USING NEW;
            IF v_over THEN
                RAISE program_limit_exceeded;
            END IF;
        EXCEPTION WHEN program_limit_exceeded OR internal_error THEN -- also by the server, of 1 GB
            IF SQLSTATE = 'XX000' AND NOT starts_with(SQLERRM, 'invalid memory alloc request size') THEN
                RAISE;
            END IF;
            RAISE EXCEPTION 'the % for % has more than 268435456 bytes once its numbers are written out', TG_ARGV[v_arg], TG_TABLE_NAME USING ERRCODE = 'PW003';
        END;
    END LOOP;
    RETURN NEW;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION refuse_unreadable IS 'Internal: PW003 for JSON of more than 256 MiB once jsonb has written out its numbers, of which some bytes may be 131,072 digits: nobody could read it. Its arguments are the columns.';

-- +goose StatementBegin
CREATE FUNCTION refuse_row()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'PW003';
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION refuse_row IS 'Internal: PW003 for an instant or a time that is infinite, or that clients, or JSON, do not have: nobody could read what has it. Its argument says so.';

CREATE TRIGGER tasks_readable BEFORE INSERT ON tasks FOR EACH ROW
    WHEN ((pg_column_size(NEW.context) > 16384 OR pg_column_size(NEW.tags) > 16384) AND NEW.parent_task_id IS NULL)
    EXECUTE FUNCTION refuse_unreadable('context', 'tags');
CREATE TRIGGER tasks_instants BEFORE INSERT ON tasks FOR EACH ROW
    WHEN (NOT (NEW.deadline BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00' AND NEW.start_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00')
          AND NEW.parent_task_id IS NULL)
    EXECUTE FUNCTION refuse_row('the deadline of a task, or the instant when it is to start, is not between the years 1 and 9999');
CREATE TRIGGER task_definitions_readable BEFORE INSERT ON task_definitions FOR EACH ROW
    WHEN (pg_column_size(NEW.configuration) > 16384) EXECUTE FUNCTION refuse_unreadable('configuration');
CREATE TRIGGER step_definitions_readable BEFORE INSERT ON step_definitions FOR EACH ROW
    WHEN (pg_column_size(NEW.inputs) > 16384) EXECUTE FUNCTION refuse_unreadable('inputs');
CREATE TRIGGER step_definitions_timeout BEFORE INSERT ON step_definitions FOR EACH ROW
    WHEN (NEW.timeout > '106751 days 23:47:16') EXECUTE FUNCTION refuse_row('the timeout of a step is more than 2^63 ns, which is 292 years');
CREATE TRIGGER steps_readable BEFORE INSERT ON steps FOR EACH ROW
    WHEN (pg_column_size(NEW.inputs) > 16384) EXECUTE FUNCTION refuse_unreadable('inputs');
-- After an update, for before one a trigger locks the row by itself. What is there stays.
CREATE TRIGGER steps_readable_results AFTER UPDATE OF results ON steps FOR EACH ROW
    WHEN (pg_column_size(NEW.results) > 16384 AND NEW.results IS DISTINCT FROM OLD.results) EXECUTE FUNCTION refuse_unreadable('results');
CREATE TRIGGER steps_readable_checkpoint AFTER UPDATE OF checkpoint ON steps FOR EACH ROW
    WHEN (pg_column_size(NEW.checkpoint) > 16384) EXECUTE FUNCTION refuse_unreadable('checkpoint');
CREATE TRIGGER steps_instants AFTER UPDATE OF next_attempt_at ON steps FOR EACH ROW
    WHEN (NOT NEW.next_attempt_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00' AND NEW.next_attempt_at IS DISTINCT FROM OLD.next_attempt_at)
    EXECUTE FUNCTION refuse_row('the instant of the next attempt at a step is not between the years 1 and 9999');
CREATE TRIGGER task_dlq_readable BEFORE INSERT ON task_dlq FOR EACH ROW
    WHEN (pg_column_size(NEW.metadata) > 16384) EXECUTE FUNCTION refuse_unreadable('metadata');
CREATE TRIGGER task_transitions_readable BEFORE INSERT ON task_transitions FOR EACH ROW
    WHEN (pg_column_size(NEW.metadata) > 16384) EXECUTE FUNCTION refuse_unreadable('metadata');
CREATE TRIGGER step_transitions_readable BEFORE INSERT ON step_transitions FOR EACH ROW
    WHEN (pg_column_size(NEW.metadata) > 16384) EXECUTE FUNCTION refuse_unreadable('metadata');

COMMENT ON FUNCTION create_task_many IS 'Creates tasks of registered definitions with all their steps, one per array element, and has them evaluated: at once, or after their delays. Returns a row for each in the same order. A task whose idempotency key another has adds nothing and returns that other, as duplicate; PW007 if it is of another definition or has another context. Arrays that are null, or have a null, mean the defaults: priority 0, no delay. p_headers are JSON objects of strings that travel with the message, such as the trace. PW002 for an unknown definition, PW003 for a negative delay, for a deadline or a start that is not between the years 1 and 9999, for a context or tags of more than 256 MiB once their numbers are written out, and for parents, which are for turns of the parent alone; 40001 if the task with the idempotency key was removed at this moment: the same call can succeed.';

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
    v_size     bigint;
    v_some     integer;
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
            -- As many at a time as do not have more than 64 MiB of contexts: all of them may be more than an array holds.
            SELECT greatest(max(octet_length(s.inputs::text)), CASE WHEN bool_or(s.inputs IS NULL) THEN octet_length(p_task.context::text) END, 1) INTO v_size
              FROM steps s WHERE s.step_id = ANY (v_sub);
            v_some := greatest((64 << 20) / v_size, 1);
            FOR v_first IN 1 .. cardinality(v_sub) BY v_some LOOP
                PERFORM FROM (SELECT array_agg(p_task.namespace) AS namespaces, array_agg(d.sub_task_name) AS names, array_agg(d.sub_task_version) AS versions,
                                     array_agg(coalesce(s.inputs, p_task.context)::text) AS contexts, array_agg(p_task.priority) AS priorities,
                                     array_agg(p_task.deadline) AS deadlines, array_agg(p_task.correlation_id) AS correlations, array_agg(p_task.task_id) AS tasks,
                                     array_agg(s.step_id) AS steps, array_agg(s.sub_task_id) AS ids, array_agg(p_headers) AS headers
                                FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id
                               WHERE s.step_id = ANY (v_sub[v_first : v_first + v_some - 1])) AS a
                  CROSS JOIN LATERAL create_task_many(a.ids, a.namespaces, a.names, a.versions, a.contexts, a.priorities, p_deadlines => a.deadlines,
                                                      p_parent_correlations => a.correlations, p_parent_tasks => a.tasks, p_parent_steps => a.steps,
                                                      p_headers => a.headers);
            END LOOP;
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
            -- A column has the size that it is compressed to. As text it may be longer, and four times as much is the most that can be kept.
            v_size := v_size + greatest(pg_column_size(jsonb_build_array(v_step.results)), octet_length(v_step.results::text) / 3);
            EXIT WHEN v_size > v_most;
        END LOOP;
    END IF;
    IF v_size > v_most THEN
        v_success := false;
        v_results := jsonb_build_object('error', format('the results of task %s have more than %s bytes together, or three times as many once their numbers are written out', p_task.task_id, v_most), 'retryable', false);
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
CREATE OR REPLACE FUNCTION lifecycle_minutes(p_configuration jsonb, p_key text, p_default integer)
RETURNS float8
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
BEGIN
    -- As a number of minutes, or as our definitions have it, a duration that is called the same without its unit. Invariant (no definition keeps
    -- anybody from finding stale tasks): whatever it says, this is 0, or between 60 microseconds and a hundred years, so that neither an
    -- interval of it nor a division by it is out of range.
    RETURN (SELECT CASE WHEN l.minutes > 0.000001 THEN least(l.minutes, 52596000) WHEN l.minutes <= 0.000001 THEN 0 END
              FROM (SELECT CASE WHEN jsonb_typeof(o.lifecycle -> p_key) = 'number' THEN (o.lifecycle ->> p_key)::float8
                                WHEN jsonb_typeof(o.lifecycle -> o.duration) = 'string' THEN extract(epoch FROM (o.lifecycle ->> o.duration)::interval)::float8 / 60
                                ELSE p_default END AS minutes
                      FROM (SELECT p_configuration -> 'lifecycle' AS lifecycle,
                                   CASE p_key WHEN 'max_duration_minutes' THEN 'max_lifetime' ELSE regexp_replace(p_key, '_minutes$', '') END AS duration) AS o) AS l);
EXCEPTION WHEN data_exception THEN
    RETURN p_default;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lifecycle_minutes IS 'Internal: a threshold of a task definition, or the default, also if what the definition says is no duration. Null: there is none.';

SELECT revoke_from_public();

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle_minutes(p_configuration jsonb, p_key text, p_default integer)
RETURNS float8
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
BEGIN
    -- As a number of minutes, or as our definitions have it, a duration that is called the same without its unit; a hundred years at most.
    RETURN (SELECT least(52596000, CASE WHEN jsonb_typeof(l.lifecycle -> p_key) = 'number' THEN (l.lifecycle ->> p_key)::float8
                                        WHEN jsonb_typeof(l.lifecycle -> l.duration) = 'string' THEN extract(epoch FROM (l.lifecycle ->> l.duration)::interval)::float8 / 60
                                        ELSE p_default END)
              FROM (SELECT p_configuration -> 'lifecycle' AS lifecycle,
                           CASE p_key WHEN 'max_duration_minutes' THEN 'max_lifetime' ELSE regexp_replace(p_key, '_minutes$', '') END AS duration) AS l);
EXCEPTION WHEN data_exception THEN
    RETURN p_default;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lifecycle_minutes IS 'Internal: a threshold of a task definition, or the default, also if what the definition says is no duration. Null: there is none.';

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

COMMENT ON FUNCTION create_task_many IS 'Creates tasks of registered definitions with all their steps, one per array element, and has them evaluated: at once, or after their delays. Returns a row for each in the same order. A task whose idempotency key another has adds nothing and returns that other, as duplicate; PW007 if it is of another definition or has another context. Arrays that are null, or have a null, mean the defaults: priority 0, no delay. p_headers are JSON objects of strings that travel with the message, such as the trace. PW002 for an unknown definition, PW003 for a negative delay, and for parents, which are for turns of the parent alone; 40001 if the task with the idempotency key was removed at this moment: the same call can succeed.';

DROP TRIGGER step_transitions_readable ON step_transitions;
DROP TRIGGER task_transitions_readable ON task_transitions;
DROP TRIGGER task_dlq_readable ON task_dlq;
DROP TRIGGER steps_instants ON steps;
DROP TRIGGER steps_readable_checkpoint ON steps;
DROP TRIGGER steps_readable_results ON steps;
DROP TRIGGER steps_readable ON steps;
DROP TRIGGER step_definitions_timeout ON step_definitions;
DROP TRIGGER step_definitions_readable ON step_definitions;
DROP TRIGGER task_definitions_readable ON task_definitions;
DROP TRIGGER tasks_instants ON tasks;
DROP TRIGGER tasks_readable ON tasks;
DROP FUNCTION refuse_row, refuse_unreadable;
