-- What was done is kept, and what others are about to do is waited for, after a server, or a worker, was away.
--
-- Invariant (begun): a step that is enqueued with the very item of the attempt that ends is one whose beginning the server has lost, and not its
-- claim, as after a failover. It is begun then, and what it came to counts: the token says whose it is.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION add_steps(
    p_task_uuid uuid, p_names text[], p_templates text[], p_inputs text[] DEFAULT NULL, p_max_attempts integer[] DEFAULT NULL,
    p_parents text[] DEFAULT NULL, p_children text[] DEFAULT NULL, p_conditions text[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_batch uuid := gen_random_uuid(); -- another call may be of the same instant, or the clock have gone back
    v_task  tasks;
    v_ids   uuid[];
    v_last  integer;
    v_wrong text;
BEGIN
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_task.task_id IS NULL THEN
        RAISE EXCEPTION 'there is no task %', p_task_uuid USING ERRCODE = 'PW002';
    ELSIF is_terminal(v_task.state) THEN
        RAISE EXCEPTION 'task % has ended: %', p_task_uuid, v_task.state USING ERRCODE = 'PW003';
    END IF;
    IF coalesce(cardinality(p_names), 0) <> coalesce(cardinality(p_templates), 0) OR coalesce(cardinality(p_parents), 0) <> coalesce(cardinality(p_children), 0) THEN
        RAISE EXCEPTION 'a step has a name and a template, and a dependency a parent and a child' USING ERRCODE = 'PW003';
    END IF;
    IF v_task.total_steps + coalesce(cardinality(p_names), 0) > 20000 THEN -- MaxSteps in Go
        RAISE EXCEPTION 'task % has % steps, with % more it would have over 20000', p_task_uuid, v_task.total_steps, cardinality(p_names) USING ERRCODE = 'PW003';
    END IF;
    SELECT i.name INTO v_wrong FROM unnest(p_names) AS i (name) GROUP BY i.name HAVING count(*) > 1 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'two of the steps are called %', v_wrong USING ERRCODE = 'PW003';
    END IF;
    SELECT s.name INTO v_wrong FROM unnest(p_names) AS i (name) JOIN steps s ON s.task_id = p_task_uuid AND s.name = i.name LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'task % has a step % already', p_task_uuid, v_wrong USING ERRCODE = 'PW003';
    END IF;
    PERFORM check_conditions(p_conditions);
    SELECT i.template INTO v_wrong FROM unnest(p_templates) AS i (template)
     WHERE NOT EXISTS (SELECT FROM step_definitions d WHERE d.task_definition_id = v_task.task_definition_id AND d.name = i.template) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the definition of task % has no step %', p_task_uuid, v_wrong USING ERRCODE = 'PW002';
    END IF;
    SELECT max(s.position) INTO v_last FROM steps s WHERE s.task_id = p_task_uuid;
    v_last := coalesce(v_last, 0);
    v_ids := ARRAY(SELECT numbered_uuid(v_batch, v_now, v_last + n) FROM generate_series(1, cardinality(p_names)) AS n ORDER BY n);
    INSERT INTO steps (step_id, task_id, step_definition_id, position, name, retryable, max_attempts, inputs, priority, created_at)
    SELECT i.id, p_task_uuid, d.step_definition_id, v_last + i.ord, i.name, d.retryable, coalesce(i.max_attempts, d.max_attempts),
           coalesce(i.inputs::jsonb, d.inputs), v_task.priority, v_now
      FROM unnest(v_ids, p_names, p_templates, p_inputs, p_max_attempts) WITH ORDINALITY AS i (id, name, template, inputs, max_attempts, ord)
      JOIN step_definitions d ON d.task_definition_id = v_task.task_definition_id AND d.name = i.template;
    INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, metadata, created_at)
    SELECT i.id, 1, p_task_uuid, 'pending', '{"event": "Create"}', v_now FROM unnest(v_ids) AS i (id);

    SELECT i.name INTO v_wrong FROM unnest(p_parents || p_children) AS i (name)
     WHERE NOT EXISTS (SELECT FROM steps s WHERE s.task_id = p_task_uuid AND s.name = i.name) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'task % has no step %', p_task_uuid, v_wrong USING ERRCODE = 'PW002';
    END IF;
    SELECT i.name INTO v_wrong FROM unnest(p_children) AS i (name)
     WHERE NOT EXISTS (SELECT FROM steps s WHERE s.task_id = p_task_uuid AND s.name = i.name AND s.state = 'pending') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'step % has begun, and cannot wait for another any more', v_wrong USING ERRCODE = 'PW003';
    END IF;
    WITH joined AS (
        INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, condition)
        SELECT p_task_uuid, f.step_id, c.step_id, i.condition::jsonpath
          FROM unnest(p_parents, p_children, p_conditions) AS i (parent, child, condition)
          JOIN steps f ON f.task_id = p_task_uuid AND f.name = i.parent
          JOIN steps c ON c.task_id = p_task_uuid AND c.name = i.child
        ON CONFLICT DO NOTHING
        RETURNING from_step_id, to_step_id, condition)
    UPDATE steps s
       SET unmet = s.unmet + fed.open, skip = s.skip OR fed.skip
      FROM (SELECT j.to_step_id, count(*) FILTER (WHERE NOT p.passed_on) AS open,
                   bool_or(p.passed_on AND j.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(p.results, j.condition, '{}', true), false)) AS skip
              FROM joined j JOIN steps p ON p.step_id = j.from_step_id GROUP BY j.to_step_id) AS fed
     WHERE s.step_id = fed.to_step_id;
    -- Nothing that was there before waits for anything new unless a dependency says so. Otherwise a cycle is one of new steps alone.
    IF (CASE WHEN p_children IS NULL OR p_children = '{}' THEN false
             WHEN NOT EXISTS (SELECT unnest(p_children) EXCEPT SELECT unnest(p_names)) THEN array_position(step_levels(v_ids), NULL) IS NOT NULL
             ELSE EXISTS (SELECT FROM calculate_dependency_levels(p_task_uuid) AS l WHERE l.dependency_level IS NULL) END) THEN
        RAISE EXCEPTION 'the dependencies of task % would have a cycle', p_task_uuid USING ERRCODE = 'PW003';
    END IF;
    UPDATE tasks t SET total_steps = t.total_steps + cardinality(v_ids), updated_at = v_now WHERE t.task_id = p_task_uuid;
    PERFORM wake_task(p_task_uuid, 'steps_added');
    RETURN QUERY SELECT i.id FROM unnest(v_ids) AS i (id);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION end_attempt(
    p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_success boolean, p_results jsonb,
    p_retry_delay interval, p_backoff_seconds integer, p_headers text, p_quiet boolean)
RETURNS TABLE (queue text, namespace text, due_at timestamptz, now_at timestamptz, history json, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step_uuid FOR NO KEY UPDATE;
    IF v_step.work_item_id = p_work_item AND v_step.state = 'enqueued' THEN -- see invariant (begun)
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['enqueued', 'in_progress'], p_processor_uuid, '{"event": "Start"}', p_claim => p_lock_token);
        v_step.state := 'in_progress';
    END IF;
    IF v_step.work_item_id IS DISTINCT FROM p_work_item OR v_step.state IS DISTINCT FROM 'in_progress' THEN
        PERFORM ack_work(p_work_item, p_lock_token);
        RETURN;
    END IF;
    -- The result, the end of the item and the message to the task are one transaction: ack_work fails if the lease has ended.
    IF p_success THEN
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'enqueued_for_orchestration'], p_processor_uuid,
                                 '{"event": "EnqueueForOrchestration"}', ARRAY[p_results]);
    ELSE
        IF p_backoff_seconds IS NOT NULL THEN
            -- Whatever somebody asked for during the attempt was before that.
            UPDATE steps s
               SET backoff_request_seconds = p_backoff_seconds, next_attempt_at = clock_timestamp() + coalesce(p_retry_delay, make_interval(secs => p_backoff_seconds))
             WHERE s.step_id = p_step_uuid;
        END IF;
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'enqueued_as_error_for_orchestration'], p_processor_uuid,
                                 jsonb_build_object('event', 'EnqueueAsErrorForOrchestration', 'error', left(p_results ->> 'error', 1000)), ARRAY[p_results],
                                 ARRAY[clock_timestamp() + p_retry_delay]);
    END IF;
    RETURN QUERY
    SELECT 'orchestrator', ack_work(p_work_item, p_lock_token, v_step.task_id::text, 'step', p_headers => p_headers, p_quiet => p_quiet),
           clock_timestamp(), clock_timestamp(), NULL::json, 'taskgraph';
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION release_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_delay interval DEFAULT '0', p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step_uuid FOR NO KEY UPDATE;
    IF v_step.work_item_id = p_work_item AND v_step.state = 'enqueued' THEN -- see invariant (begun)
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['enqueued', 'in_progress'], p_processor_uuid, '{"event": "Start"}', p_claim => p_lock_token);
        v_step.state := 'in_progress';
    END IF;
    IF v_step.work_item_id IS DISTINCT FROM p_work_item OR v_step.state IS DISTINCT FROM 'in_progress' THEN
        PERFORM ack_work(p_work_item, p_lock_token);
        RETURN false;
    END IF;
    UPDATE steps s SET attempts = greatest(s.attempts - 1, 0) WHERE s.step_id = p_step_uuid;
    PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'waiting_for_retry'], p_processor_uuid,
                             jsonb_strip_nulls(jsonb_build_object('event', 'Release', 'reason', p_reason)), ARRAY[NULL::jsonb], ARRAY[clock_timestamp() + p_delay]);
    PERFORM ack_work(p_work_item, p_lock_token, v_step.task_id::text, 'step');
    RETURN true;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stale_tasks(p_limit integer, p_dependencies integer, p_retry integer, p_steps integer, p_lifetime integer)
RETURNS TABLE (
    task_id uuid, sort_key integer, namespace text, name text, version text, state text, rule text,
    state_minutes float8, minutes float8, threshold float8, health text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz := clock_timestamp();
    v_warn constant float8 := 0.8;
    v_dependencies timestamptz; -- what came into its state after these instants is fine in any definition; null: all is
    v_retry        timestamptz;
    v_steps        timestamptz;
    v_lifetime     timestamptz;
BEGIN
    SELECT v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_waiting_for_dependencies_minutes', p_dependencies))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_waiting_for_retry_minutes', p_retry))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_steps_in_process_minutes', p_steps))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_duration_minutes', p_lifetime)))
      INTO v_dependencies, v_retry, v_steps, v_lifetime FROM task_definitions d;
    RETURN QUERY
    WITH old AS ( -- by the index on (state, state_entered_at)
        SELECT t.*, false AS whole FROM tasks t WHERE t.state = 'waiting_for_dependencies' AND t.state_entered_at <= v_dependencies
        UNION ALL
        SELECT t.*, false FROM tasks t WHERE t.state = 'waiting_for_retry' AND t.state_entered_at <= v_retry
        UNION ALL
        SELECT t.*, false FROM tasks t WHERE t.state = 'steps_in_process' AND t.state_entered_at <= v_steps
        UNION ALL
        SELECT t.*, true FROM tasks t
         WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error' AND t.created_at <= v_lifetime
    ), measured AS (
        SELECT o.task_id, o.sort_key, o.namespace, d.name, d.version, o.state, r.rule, extract(epoch FROM v_now - o.state_entered_at)::float8 / 60 AS state_minutes,
               extract(epoch FROM v_now - r.since)::float8 / 60 AS minutes, lifecycle_minutes(d.configuration, r.rule, r.most) AS threshold
          FROM old o
          JOIN task_definitions d ON d.task_definition_id = o.task_definition_id
          LEFT JOIN LATERAL ( -- others are to get what somebody has lost since, and a turn what has come
               SELECT greatest((SELECT max(q.visible_at) FROM worker_queue q WHERE q.instance_id = o.task_id::text AND q.lock_token IS NOT NULL),
                               (SELECT min(q.visible_at) FROM orchestrator_queue q
                                 WHERE q.instance_id BETWEEN o.task_id::text AND o.task_id::text AND q.visible_at <= v_now)) AS at) latest
               ON o.state = 'steps_in_process' AND NOT o.whole
          JOIN LATERAL (VALUES
                   ('waiting_for_dependencies', false, 'max_waiting_for_dependencies_minutes', p_dependencies, o.state_entered_at),
                   -- A task that waits for an attempt that is to come is as it should be.
                   ('waiting_for_retry', false, 'max_waiting_for_retry_minutes', p_retry, greatest(o.state_entered_at, o.next_ready_at)),
                   ('steps_in_process', false, 'max_steps_in_process_minutes', p_steps, greatest(o.state_entered_at, latest.at)),
                   (o.state, true, 'max_duration_minutes', p_lifetime, greatest(o.created_at, o.start_at))
               ) AS r (state, whole, rule, most, since) ON r.state = o.state AND r.whole = o.whole
    ), worst AS (
        SELECT DISTINCT ON (m.task_id) m.* FROM measured m
         WHERE m.minutes >= v_warn * m.threshold
           AND (m.rule = 'max_duration_minutes'
                OR NOT EXISTS (SELECT FROM limits l WHERE l.paused AND l.namespace = ANY (ARRAY[m.namespace, '*']))
                   AND (m.state <> 'steps_in_process' OR NOT task_at_work(m.task_id)))
         ORDER BY m.task_id, m.minutes / nullif(m.threshold, 0) DESC NULLS FIRST, m.rule)
    SELECT w.task_id, w.sort_key, w.namespace, w.name, w.version, w.state, w.rule, w.state_minutes, w.minutes, w.threshold,
           CASE WHEN w.minutes >= w.threshold THEN 'stale' ELSE 'warning' END
      FROM worst w
     ORDER BY w.minutes >= w.threshold DESC, w.minutes - w.threshold DESC, w.task_id
     LIMIT p_limit;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION add_steps(
    p_task_uuid uuid, p_names text[], p_templates text[], p_inputs text[] DEFAULT NULL, p_max_attempts integer[] DEFAULT NULL,
    p_parents text[] DEFAULT NULL, p_children text[] DEFAULT NULL, p_conditions text[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_task  tasks;
    v_ids   uuid[];
    v_last  integer;
    v_wrong text;
BEGIN
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_task.task_id IS NULL THEN
        RAISE EXCEPTION 'there is no task %', p_task_uuid USING ERRCODE = 'PW002';
    ELSIF is_terminal(v_task.state) THEN
        RAISE EXCEPTION 'task % has ended: %', p_task_uuid, v_task.state USING ERRCODE = 'PW003';
    END IF;
    IF coalesce(cardinality(p_names), 0) <> coalesce(cardinality(p_templates), 0) OR coalesce(cardinality(p_parents), 0) <> coalesce(cardinality(p_children), 0) THEN
        RAISE EXCEPTION 'a step has a name and a template, and a dependency a parent and a child' USING ERRCODE = 'PW003';
    END IF;
    IF v_task.total_steps + coalesce(cardinality(p_names), 0) > 20000 THEN -- MaxSteps in Go
        RAISE EXCEPTION 'task % has % steps, with % more it would have over 20000', p_task_uuid, v_task.total_steps, cardinality(p_names) USING ERRCODE = 'PW003';
    END IF;
    SELECT i.name INTO v_wrong FROM unnest(p_names) AS i (name) GROUP BY i.name HAVING count(*) > 1 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'two of the steps are called %', v_wrong USING ERRCODE = 'PW003';
    END IF;
    SELECT s.name INTO v_wrong FROM unnest(p_names) AS i (name) JOIN steps s ON s.task_id = p_task_uuid AND s.name = i.name LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'task % has a step % already', p_task_uuid, v_wrong USING ERRCODE = 'PW003';
    END IF;
    PERFORM check_conditions(p_conditions);
    SELECT i.template INTO v_wrong FROM unnest(p_templates) AS i (template)
     WHERE NOT EXISTS (SELECT FROM step_definitions d WHERE d.task_definition_id = v_task.task_definition_id AND d.name = i.template) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the definition of task % has no step %', p_task_uuid, v_wrong USING ERRCODE = 'PW002';
    END IF;
    SELECT max(s.position) INTO v_last FROM steps s WHERE s.task_id = p_task_uuid;
    v_last := coalesce(v_last, 0);
    v_ids := ARRAY(SELECT numbered_uuid(p_task_uuid, v_now, v_last + n) FROM generate_series(1, cardinality(p_names)) AS n ORDER BY n);
    INSERT INTO steps (step_id, task_id, step_definition_id, position, name, retryable, max_attempts, inputs, priority, created_at)
    SELECT i.id, p_task_uuid, d.step_definition_id, v_last + i.ord, i.name, d.retryable, coalesce(i.max_attempts, d.max_attempts),
           coalesce(i.inputs::jsonb, d.inputs), v_task.priority, v_now
      FROM unnest(v_ids, p_names, p_templates, p_inputs, p_max_attempts) WITH ORDINALITY AS i (id, name, template, inputs, max_attempts, ord)
      JOIN step_definitions d ON d.task_definition_id = v_task.task_definition_id AND d.name = i.template;
    INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, metadata, created_at)
    SELECT i.id, 1, p_task_uuid, 'pending', '{"event": "Create"}', v_now FROM unnest(v_ids) AS i (id);

    SELECT i.name INTO v_wrong FROM unnest(p_parents || p_children) AS i (name)
     WHERE NOT EXISTS (SELECT FROM steps s WHERE s.task_id = p_task_uuid AND s.name = i.name) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'task % has no step %', p_task_uuid, v_wrong USING ERRCODE = 'PW002';
    END IF;
    SELECT i.name INTO v_wrong FROM unnest(p_children) AS i (name)
     WHERE NOT EXISTS (SELECT FROM steps s WHERE s.task_id = p_task_uuid AND s.name = i.name AND s.state = 'pending') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'step % has begun, and cannot wait for another any more', v_wrong USING ERRCODE = 'PW003';
    END IF;
    WITH joined AS (
        INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, condition)
        SELECT p_task_uuid, f.step_id, c.step_id, i.condition::jsonpath
          FROM unnest(p_parents, p_children, p_conditions) AS i (parent, child, condition)
          JOIN steps f ON f.task_id = p_task_uuid AND f.name = i.parent
          JOIN steps c ON c.task_id = p_task_uuid AND c.name = i.child
        ON CONFLICT DO NOTHING
        RETURNING from_step_id, to_step_id, condition)
    UPDATE steps s
       SET unmet = s.unmet + fed.open, skip = s.skip OR fed.skip
      FROM (SELECT j.to_step_id, count(*) FILTER (WHERE NOT p.passed_on) AS open,
                   bool_or(p.passed_on AND j.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(p.results, j.condition, '{}', true), false)) AS skip
              FROM joined j JOIN steps p ON p.step_id = j.from_step_id GROUP BY j.to_step_id) AS fed
     WHERE s.step_id = fed.to_step_id;
    -- Nothing that was there before waits for anything new unless a dependency says so. Otherwise a cycle is one of new steps alone.
    IF (CASE WHEN p_children IS NULL OR p_children = '{}' THEN false
             WHEN NOT EXISTS (SELECT unnest(p_children) EXCEPT SELECT unnest(p_names)) THEN array_position(step_levels(v_ids), NULL) IS NOT NULL
             ELSE EXISTS (SELECT FROM calculate_dependency_levels(p_task_uuid) AS l WHERE l.dependency_level IS NULL) END) THEN
        RAISE EXCEPTION 'the dependencies of task % would have a cycle', p_task_uuid USING ERRCODE = 'PW003';
    END IF;
    UPDATE tasks t SET total_steps = t.total_steps + cardinality(v_ids), updated_at = v_now WHERE t.task_id = p_task_uuid;
    PERFORM wake_task(p_task_uuid, 'steps_added');
    RETURN QUERY SELECT i.id FROM unnest(v_ids) AS i (id);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION end_attempt(
    p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_success boolean, p_results jsonb,
    p_retry_delay interval, p_backoff_seconds integer, p_headers text, p_quiet boolean)
RETURNS TABLE (queue text, namespace text, due_at timestamptz, now_at timestamptz, history json, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step_uuid FOR NO KEY UPDATE;
    IF v_step.work_item_id IS DISTINCT FROM p_work_item OR v_step.state IS DISTINCT FROM 'in_progress' THEN
        PERFORM ack_work(p_work_item, p_lock_token);
        RETURN;
    END IF;
    -- The result, the end of the item and the message to the task are one transaction: ack_work fails if the lease has ended.
    IF p_success THEN
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'enqueued_for_orchestration'], p_processor_uuid,
                                 '{"event": "EnqueueForOrchestration"}', ARRAY[p_results]);
    ELSE
        IF p_backoff_seconds IS NOT NULL THEN
            -- Whatever somebody asked for during the attempt was before that.
            UPDATE steps s
               SET backoff_request_seconds = p_backoff_seconds, next_attempt_at = clock_timestamp() + coalesce(p_retry_delay, make_interval(secs => p_backoff_seconds))
             WHERE s.step_id = p_step_uuid;
        END IF;
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'enqueued_as_error_for_orchestration'], p_processor_uuid,
                                 jsonb_build_object('event', 'EnqueueAsErrorForOrchestration', 'error', left(p_results ->> 'error', 1000)), ARRAY[p_results],
                                 ARRAY[clock_timestamp() + p_retry_delay]);
    END IF;
    RETURN QUERY
    SELECT 'orchestrator', ack_work(p_work_item, p_lock_token, v_step.task_id::text, 'step', p_headers => p_headers, p_quiet => p_quiet),
           clock_timestamp(), clock_timestamp(), NULL::json, 'taskgraph';
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION release_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_delay interval DEFAULT '0', p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step_uuid FOR NO KEY UPDATE;
    IF v_step.work_item_id IS DISTINCT FROM p_work_item OR v_step.state IS DISTINCT FROM 'in_progress' THEN
        PERFORM ack_work(p_work_item, p_lock_token);
        RETURN false;
    END IF;
    UPDATE steps s SET attempts = greatest(s.attempts - 1, 0) WHERE s.step_id = p_step_uuid;
    PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['in_progress', 'waiting_for_retry'], p_processor_uuid,
                             jsonb_strip_nulls(jsonb_build_object('event', 'Release', 'reason', p_reason)), ARRAY[NULL::jsonb], ARRAY[clock_timestamp() + p_delay]);
    PERFORM ack_work(p_work_item, p_lock_token, v_step.task_id::text, 'step');
    RETURN true;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stale_tasks(p_limit integer, p_dependencies integer, p_retry integer, p_steps integer, p_lifetime integer)
RETURNS TABLE (
    task_id uuid, sort_key integer, namespace text, name text, version text, state text, rule text,
    state_minutes float8, minutes float8, threshold float8, health text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz := clock_timestamp();
    v_warn constant float8 := 0.8;
    v_dependencies timestamptz; -- what came into its state after these instants is fine in any definition; null: all is
    v_retry        timestamptz;
    v_steps        timestamptz;
    v_lifetime     timestamptz;
BEGIN
    SELECT v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_waiting_for_dependencies_minutes', p_dependencies))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_waiting_for_retry_minutes', p_retry))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_steps_in_process_minutes', p_steps))),
           v_now - v_warn * make_interval(secs => 60 * min(lifecycle_minutes(d.configuration, 'max_duration_minutes', p_lifetime)))
      INTO v_dependencies, v_retry, v_steps, v_lifetime FROM task_definitions d;
    RETURN QUERY
    WITH old AS ( -- by the index on (state, state_entered_at)
        SELECT t.*, false AS whole FROM tasks t WHERE t.state = 'waiting_for_dependencies' AND t.state_entered_at <= v_dependencies
        UNION ALL
        SELECT t.*, false FROM tasks t WHERE t.state = 'waiting_for_retry' AND t.state_entered_at <= v_retry
        UNION ALL
        SELECT t.*, false FROM tasks t WHERE t.state = 'steps_in_process' AND t.state_entered_at <= v_steps
        UNION ALL
        SELECT t.*, true FROM tasks t
         WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error' AND t.created_at <= v_lifetime
    ), measured AS (
        SELECT o.task_id, o.sort_key, o.namespace, d.name, d.version, o.state, r.rule, extract(epoch FROM v_now - o.state_entered_at)::float8 / 60 AS state_minutes,
               extract(epoch FROM v_now - r.since)::float8 / 60 AS minutes, lifecycle_minutes(d.configuration, r.rule, r.most) AS threshold
          FROM old o
          JOIN task_definitions d ON d.task_definition_id = o.task_definition_id
          JOIN LATERAL (VALUES
                   ('waiting_for_dependencies', false, 'max_waiting_for_dependencies_minutes', p_dependencies, o.state_entered_at),
                   -- A task that waits for an attempt that is to come is as it should be.
                   ('waiting_for_retry', false, 'max_waiting_for_retry_minutes', p_retry, greatest(o.state_entered_at, o.next_ready_at)),
                   ('steps_in_process', false, 'max_steps_in_process_minutes', p_steps, o.state_entered_at),
                   (o.state, true, 'max_duration_minutes', p_lifetime, greatest(o.created_at, o.start_at))
               ) AS r (state, whole, rule, most, since) ON r.state = o.state AND r.whole = o.whole
    ), worst AS (
        SELECT DISTINCT ON (m.task_id) m.* FROM measured m
         WHERE m.minutes >= v_warn * m.threshold
           AND (m.rule = 'max_duration_minutes'
                OR NOT EXISTS (SELECT FROM limits l WHERE l.paused AND l.namespace = ANY (ARRAY[m.namespace, '*']))
                   AND (m.state <> 'steps_in_process' OR NOT task_at_work(m.task_id)))
         ORDER BY m.task_id, m.minutes / nullif(m.threshold, 0) DESC NULLS FIRST, m.rule)
    SELECT w.task_id, w.sort_key, w.namespace, w.name, w.version, w.state, w.rule, w.state_minutes, w.minutes, w.threshold,
           CASE WHEN w.minutes >= w.threshold THEN 'stale' ELSE 'warning' END
      FROM worst w
     ORDER BY w.minutes >= w.threshold DESC, w.minutes - w.threshold DESC, w.task_id
     LIMIT p_limit;
END
$$;
-- +goose StatementEnd
