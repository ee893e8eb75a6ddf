-- The verbs of tasks: what is registered, created, evaluated, run, and put right by hand.

-- Locks are taken in this order: the instance of a task (its turn), its row in tasks, its rows in steps, its work items. Whoever
-- has one and needs another that comes before it takes that one first.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION check_conditions(p_conditions text[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_condition text;
    v_plain     text; -- nothing is between the quotes of its strings, and all keys are strings
    v_method    text;
BEGIN
    FOR v_condition IN SELECT DISTINCT i.condition FROM unnest(p_conditions) AS i (condition) WHERE i.condition IS NOT NULL LOOP
        -- Only of a predicate is there a negation. Between the quotes of strings, a $ is nothing but that; before one, it is a variable.
        PERFORM ('!(' || regexp_replace(v_condition::jsonpath::text, '^strict ', '') || ')')::jsonpath;
        v_plain := regexp_replace(v_condition::jsonpath::text, '"(\\.|[^"\\])*"', '""', 'g');
        IF strpos(v_plain, '$""') > 0 THEN
            RAISE EXCEPTION 'the condition % has a variable, and there are none', left(v_condition, 200) USING ERRCODE = 'PW003';
        END IF;
        -- Others fail for some results, although errors are suppressed: a date may not be compared with an instant. Then every turn
        -- of the task would fail.
        SELECT m.found[1] INTO v_method FROM regexp_matches(v_plain, '\.([a-z_]+)\(', 'g') AS m (found)
         WHERE m.found[1] NOT IN ('type', 'size', 'double', 'ceiling', 'floor', 'abs', 'keyvalue', 'bigint', 'boolean', 'integer', 'number', 'string') LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'the condition % asks for %, which fails for some values', left(v_condition, 200), v_method USING ERRCODE = 'PW003';
        END IF;
    END LOOP;
EXCEPTION WHEN syntax_error OR invalid_text_representation THEN
    RAISE EXCEPTION 'the condition % is no predicate of SQL/JSON: %', left(v_condition, 200), SQLERRM USING ERRCODE = 'PW003';
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_conditions IS 'Internal: PW003 unless these can be conditions of dependencies, whatever the result that they are asked about.';

-- +goose StatementBegin
CREATE FUNCTION register_task_definition(
    p_namespace text, p_name text, p_version text, p_description text, p_configuration jsonb,
    p_steps text[], p_handlers text[], p_descriptions text[] DEFAULT NULL, p_retryables boolean[] DEFAULT NULL,
    p_max_attempts integer[] DEFAULT NULL, p_backoffs integer[] DEFAULT NULL, p_timeouts interval[] DEFAULT NULL, p_tags text[] DEFAULT NULL,
    p_limit_keys text[] DEFAULT NULL, p_inputs text[] DEFAULT NULL, p_on_demands boolean[] DEFAULT NULL,
    p_sub_tasks text[] DEFAULT NULL, p_sub_versions text[] DEFAULT NULL,
    p_parents text[] DEFAULT NULL, p_children text[] DEFAULT NULL, p_conditions text[] DEFAULT NULL)
RETURNS uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET enable_nestloop = off -- arrays of ten thousand steps are ten rows to the planner
AS $$
DECLARE
    v_id       uuid := new_uuid();
    v_known    task_definitions;
    v_unknown  text;
    v_unmet    integer[];
    v_frontier integer[];
    v_next     integer[];
    v_met      integer := 0;
    v_child    record;
BEGIN
    INSERT INTO task_definitions (task_definition_id, namespace, name, version, description, configuration)
    VALUES (v_id, p_namespace, p_name, p_version, p_description, coalesce(p_configuration, '{}'))
    ON CONFLICT (namespace, name, version) DO NOTHING;
    IF NOT FOUND THEN
        SELECT * INTO v_known FROM task_definitions d WHERE d.namespace = p_namespace AND d.name = p_name AND d.version = p_version;
        IF v_known.configuration <> coalesce(p_configuration, '{}') THEN
            RAISE EXCEPTION 'version % of % is registered in namespace %, and is another: give the new one a version of its own', p_version, p_name, p_namespace
                USING ERRCODE = 'PW007';
        END IF;
        RETURN v_known.task_definition_id;
    END IF;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    PERFORM check_conditions(p_conditions);
    IF coalesce(cardinality(p_parents), 0) <> coalesce(cardinality(p_children), 0) THEN
        RAISE EXCEPTION 'a dependency has a parent and a child' USING ERRCODE = 'PW003';
    END IF;
    INSERT INTO step_definitions (step_definition_id, task_definition_id, position, name, handler, description, retryable, max_attempts,
                                  backoff_seconds, timeout, tag, limit_key, inputs, on_demand, sub_task_name, sub_task_version)
    SELECT numbered_uuid(v_id, clock_timestamp(), i.ord::integer), v_id, i.ord, i.name, i.handler, i.description, coalesce(i.retryable, true), coalesce(i.max_attempts, 3),
           i.backoff, i.timeout, coalesce(i.tag, ''), i.limit_key, i.inputs::jsonb, coalesce(i.on_demand, false), i.sub_task, i.sub_version
      FROM unnest(p_steps, p_handlers, p_descriptions, p_retryables, p_max_attempts, p_backoffs, p_timeouts, p_tags, p_limit_keys, p_inputs,
                  p_on_demands, p_sub_tasks, p_sub_versions) WITH ORDINALITY
           AS i (name, handler, description, retryable, max_attempts, backoff, timeout, tag, limit_key, inputs, on_demand, sub_task, sub_version, ord);
    SELECT i.name INTO v_unknown FROM unnest(p_parents || p_children) AS i (name)
     WHERE NOT EXISTS (SELECT FROM unnest(p_steps) AS s (name) WHERE s.name = i.name) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'there is a dependency of, or on, step %, and no such step', v_unknown USING ERRCODE = 'PW003';
    END IF;
    INSERT INTO step_definition_dependencies (task_definition_id, parent, child, condition)
    SELECT v_id, f.position, c.position, i.condition::jsonpath
      FROM unnest(p_parents, p_children, p_conditions) AS i (parent, child, condition)
      JOIN unnest(p_steps) WITH ORDINALITY AS f (name, position) ON f.name = i.parent
      JOIN unnest(p_steps) WITH ORDINALITY AS c (name, position) ON c.name = i.child;
    IF EXISTS (SELECT FROM step_definitions s
                WHERE s.task_definition_id = v_id AND s.on_demand
                  AND (EXISTS (SELECT FROM step_definition_dependencies d WHERE d.task_definition_id = v_id AND d.parent = s.position)
                       OR EXISTS (SELECT FROM step_definition_dependencies d WHERE d.task_definition_id = v_id AND d.child = s.position))) THEN
        RAISE EXCEPTION 'a step that is added on demand has no dependencies before it is' USING ERRCODE = 'PW003';
    END IF;
    UPDATE step_definitions s SET parents = d.n
      FROM (SELECT d.child, count(*) AS n FROM step_definition_dependencies d WHERE d.task_definition_id = v_id GROUP BY d.child) AS d
     WHERE s.task_definition_id = v_id AND s.position = d.child;
    -- From the steps without parents on, level by level: what is never met is in a circle, or behind one.
    SELECT array_agg(s.parents ORDER BY s.position), array_agg(s.position) FILTER (WHERE s.parents = 0) INTO v_unmet, v_frontier
      FROM step_definitions s WHERE s.task_definition_id = v_id;
    WHILE v_frontier <> '{}' LOOP
        v_met := v_met + cardinality(v_frontier);
        v_next := '{}';
        FOR v_child IN
            SELECT d.child, count(*) AS n FROM step_definition_dependencies d
             WHERE d.task_definition_id = v_id AND d.parent = ANY (v_frontier) GROUP BY d.child
        LOOP
            v_unmet[v_child.child] := v_unmet[v_child.child] - v_child.n;
            IF v_unmet[v_child.child] = 0 THEN
                v_next := v_next || v_child.child;
            END IF;
        END LOOP;
        v_frontier := v_next;
    END LOOP;
    IF v_met < cardinality(p_steps) THEN
        RAISE EXCEPTION 'the dependencies of % have a cycle', p_name USING ERRCODE = 'PW003';
    END IF;
    RETURN v_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_task_definition IS 'Registers a version of a task definition, and its namespace: one array element for each step, with the handler that runs it or the definition of the task that it is (p_sub_tasks, p_sub_versions), and one of p_parents, p_children and p_conditions for each dependency. Arrays that are null, or have a null, mean the defaults: retryable, 3 attempts. Returns its id; that of the registered one if it is registered already, and PW007 if that has another configuration. PW003, or a violation of a constraint, for what can be no definition, such as one with a cycle.';

-- +goose StatementBegin
CREATE FUNCTION claim_place(p_priority integer, p_namespace text, p_retries integer, p_deadline timestamptz, p_since timestamptz,
                            OUT priority smallint, OUT due_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_set    taskgraph_settings;
    v_levels float8;
BEGIN
    SELECT * INTO v_set FROM taskgraph_settings;
    v_levels := p_priority + coalesce((v_set.namespace_priority ->> p_namespace)::float8, 0) + v_set.retry_weight * p_retries
        + v_set.deadline_weight * coalesce(greatest(extract(epoch FROM clock_timestamp() - p_deadline) / 3600, 0), 0);
    -- A task gains age_weight levels an hour. So a level is a head start of so much time, and within the same priority of the queue
    -- older ones come first: the order is that of the computed priority, at whatever time one looks. Levels below 0 cannot be had: less
    -- than no head start would keep an item from being claimed while nobody else is there, and with a head start for all, from
    -- which some is taken, everything would seem to have been due for days.
    IF v_set.age_weight > 0 THEN
        priority := 0;
        due_at := p_since - make_interval(secs => least(greatest(v_levels, 0) / v_set.age_weight * 3600, 1e9));
    ELSE
        priority := least(greatest(round(v_levels), 0), 9);
        due_at := p_since;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION claim_place IS 'Internal: where in a queue of the Provider something belongs that has so many levels of priority and has waited since an instant. Levels below 0 count as 0 here; get_next_ready_tasks knows them.';

-- +goose StatementBegin
CREATE FUNCTION create_task_many(
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
CREATE FUNCTION create_task(
    p_namespace text, p_name text, p_version text, p_context jsonb DEFAULT '{}', p_priority integer DEFAULT 0,
    p_delay interval DEFAULT NULL, p_idempotency_key text DEFAULT NULL)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (SELECT c.task_id FROM create_task_many(NULL, ARRAY[p_namespace], ARRAY[p_name], ARRAY[p_version], ARRAY[p_context::text], ARRAY[p_priority],
                                                   ARRAY[p_delay], p_idempotency_keys => ARRAY[p_idempotency_key]) AS c);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION create_task IS 'Creates a task of a registered definition and returns its id: SELECT create_task(''shop'', ''fulfil_order'', ''1.0.0'', ''{"order": 7}''). See create_task_many.';

-- +goose StatementBegin
CREATE FUNCTION add_steps(
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
COMMENT ON FUNCTION add_steps IS 'Adds steps to a task that runs: for each a name that the task does not have and the step of its definition that it is like; and dependencies, among them and with those there are, by name. A dependency that there is already changes nothing. Returns the ids. PW002 for a task or step that does not exist, PW003 if the task has ended, if a step that is to wait has begun, for a name that is taken, for more than 20000 steps in all, for a condition that is no predicate, or for a cycle, also one that two callers only make together; and for arrays that do not belong together.';

-- +goose StatementBegin
CREATE FUNCTION cancel_open_steps(p_task uuid, p_metadata jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_state text;
BEGIN
    -- A worker may move a step from one of these states to the next meanwhile, and never back: so in this order none gets away.
    FOREACH v_state IN ARRAY ARRAY['waiting_for_retry', 'pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration', 'waiting_for_retry'] LOOP
        PERFORM transition_steps(ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = p_task AND s.state = v_state ORDER BY s.step_id), ARRAY[v_state, 'cancelled'],
                                 NULL, p_metadata);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cancel_open_steps IS 'Internal: cancels all steps of a task that have not ended. The caller has its row locked.';

-- +goose StatementBegin
CREATE FUNCTION cancel_task(p_task_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_state    text;
    v_metadata jsonb := jsonb_strip_nulls(jsonb_build_object('event', 'Cancel', 'reason', p_reason));
BEGIN
    SELECT t.state INTO v_state FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_state IS NULL OR is_terminal(v_state) THEN
        RETURN false;
    END IF;
    PERFORM cancel_open_steps(p_task_uuid, v_metadata);
    PERFORM transition_task(p_task_uuid, ARRAY[v_state, 'cancelled'], NULL, v_metadata, true);
    PERFORM wake_task(p_task_uuid, 'ended');
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cancel_task IS 'Cancels a task and its steps that have not ended, in one transaction. What handlers at work return later is dropped, and they learn of it by the loss of their leases; tasks that steps of it are are cancelled after it. False, and nothing is changed, if it has ended, or if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION resolve_task_manually(p_task_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_state    text;
    v_metadata jsonb := jsonb_strip_nulls(jsonb_build_object('event', 'ResolveManually', 'reason', p_reason));
BEGIN
    SELECT t.state INTO v_state FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_state IS NULL OR is_terminal(v_state) THEN
        RETURN false;
    END IF;
    PERFORM cancel_open_steps(p_task_uuid, v_metadata);
    PERFORM transition_task(p_task_uuid, ARRAY[v_state, 'resolved_manually'], NULL, v_metadata, true);
    PERFORM wake_task(p_task_uuid, 'ended');
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION resolve_task_manually IS 'Ends a task as resolved by somebody; its steps that have not ended are cancelled. False, and nothing is changed, if it has ended, or if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION give_up_task(p_task_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_metadata jsonb := jsonb_strip_nulls(jsonb_build_object('event', 'GiveUp', 'reason', p_reason));
BEGIN
    PERFORM FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF NOT transition_task(p_task_uuid, ARRAY['blocked_by_failures', 'error'], NULL, v_metadata, true) THEN
        RETURN false;
    END IF;
    PERFORM cancel_open_steps(p_task_uuid, v_metadata);
    PERFORM wake_task(p_task_uuid, 'ended');
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION give_up_task IS 'Ends a task that is blocked_by_failures as failed; its steps that have not ended are cancelled. False, and nothing is changed, if it is not blocked, or if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION act_on_step(p_step uuid, p_to text, p_metadata jsonb, p_results jsonb)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_step steps;
    v_task text;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step;
    SELECT t.state INTO v_task FROM tasks t WHERE t.task_id = v_step.task_id FOR NO KEY UPDATE;
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step FOR NO KEY UPDATE;
    IF v_task IS NULL OR is_terminal(v_task) OR NOT is_step_edge(v_step.state, p_to) THEN
        RETURN false;
    END IF;
    PERFORM transition_steps(ARRAY[p_step], ARRAY[v_step.state, p_to], NULL, p_metadata, ARRAY[p_results]);
    -- Whoever runs it learns of that by the loss of its lease.
    PERFORM cancel_activities(v_step.task_id::text, ARRAY[1::bigint], ARRAY[v_step.position::bigint]);
    PERFORM cancel_sub_tasks(p_step);
    PERFORM wake_task(v_step.task_id, 'step_action');
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION act_on_step IS 'Internal: what somebody does to a step by hand.';

-- +goose StatementBegin
CREATE FUNCTION reset_step_for_retry(p_step_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM FROM steps s WHERE s.step_id = p_step_uuid AND s.state = 'error';
    RETURN FOUND AND act_on_step(p_step_uuid, 'pending', jsonb_strip_nulls(jsonb_build_object('event', 'ResetForRetry', 'reason', p_reason)), NULL);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION reset_step_for_retry IS 'Has a step that is in error run again, with all its attempts, and its task go on. What an attempt has kept (checkpoint_step) is there for the next one, as after any failure. False, and nothing is changed, if it is in another state, if its task has ended, or if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION resolve_step_manually(p_step_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN act_on_step(p_step_uuid, 'resolved_manually', jsonb_strip_nulls(jsonb_build_object('event', 'ResolveManually', 'reason', p_reason)), NULL);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION resolve_step_manually IS 'Takes a step for done, without a result: those that wait for it go on, but for dependencies with a condition, which does not hold. False, and nothing is changed, if it is complete, cancelled or resolved, if its task has ended, or if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION complete_step_manually(p_step_uuid uuid, p_results jsonb, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN act_on_step(p_step_uuid, 'complete', jsonb_strip_nulls(jsonb_build_object('event', 'CompleteManually', 'reason', p_reason)), p_results);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION complete_step_manually IS 'Completes a step with a result, as if its handler had returned it. False as for resolve_step_manually.';

-- +goose StatementBegin
CREATE FUNCTION cancel_step(p_step_uuid uuid, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN act_on_step(p_step_uuid, 'cancelled', jsonb_strip_nulls(jsonb_build_object('event', 'Cancel', 'reason', p_reason)), NULL);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cancel_step IS 'Cancels one step: its task is then blocked, for those that wait for it never run. False as for resolve_step_manually.';

-- +goose StatementBegin
CREATE FUNCTION fail_step(p_step_uuid uuid, p_error text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN act_on_step(p_step_uuid, 'error', '{"event": "Fail"}', jsonb_build_object('error', coalesce(p_error, ''), 'retryable', false));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION fail_step IS 'Fails a step for good that has not ended. False, and nothing is changed, if it has, if it waits for its next attempt, if its task has ended, or if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION lose_step(p_step uuid, p_processor uuid, p_next_attempt timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_state text;
    v_again boolean;
BEGIN
    -- An attempt that was not begun is none.
    SELECT s.state, s.state = 'enqueued' OR s.retryable AND s.attempts < s.max_attempts INTO v_state, v_again FROM steps s WHERE s.step_id = p_step;
    PERFORM transition_steps(ARRAY[p_step], ARRAY[v_state, CASE WHEN v_again THEN 'waiting_for_retry' ELSE 'error' END], p_processor,
                             '{"event": "WorkerLost"}', ARRAY['{"error": "the worker was lost", "retryable": true}'::jsonb], ARRAY[p_next_attempt]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lose_step IS 'Internal: ends an attempt at a step of which nothing more will be heard: it waits for the next one, due at an instant (null: as if it had failed), or is in error if that was the last. The caller has the row of the step, or that of its task.';

-- +goose StatementBegin
CREATE FUNCTION start_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_lost_delays interval[] DEFAULT NULL)
RETURNS TABLE (
    outcome text, task_uuid uuid, namespace text, task_name text, task_version text, step_name text, handler text, attempts integer, max_attempts integer,
    context jsonb, inputs jsonb, checkpoint jsonb, tags jsonb, correlation_id uuid, backoff_seconds integer, timeout interval)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_step    steps;
    v_backoff integer;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id = p_step_uuid FOR NO KEY UPDATE;
    IF v_step.work_item_id IS DISTINCT FROM p_work_item OR v_step.state NOT IN ('enqueued', 'in_progress') OR v_step.step_id IS NULL THEN
        -- Cancelled, resolved, or run by another item: this one is of no use any more.
        PERFORM ack_work(p_work_item, p_lock_token);
        RETURN QUERY SELECT 'discarded', v_step.task_id, NULL::text, NULL::text, NULL::text, v_step.name, NULL::text, v_step.attempts, v_step.max_attempts,
                            NULL::jsonb, NULL::jsonb, NULL::jsonb, NULL::jsonb, NULL::uuid, NULL::integer, NULL::interval;
        RETURN;
    END IF;
    IF v_step.state = 'in_progress' AND v_step.claim IS DISTINCT FROM p_lock_token THEN
        -- The item has come again, so whoever had it has lost its lease: the attempt has failed. Its result, should it come yet, has a
        -- token that can do nothing.
        SELECT d.backoff_seconds INTO v_backoff FROM step_definitions d WHERE d.step_definition_id = v_step.step_definition_id;
        PERFORM lose_step(p_step_uuid, p_processor_uuid,
                          CASE WHEN v_backoff IS NULL THEN clock_timestamp() + p_lost_delays[least(v_step.attempts, cardinality(p_lost_delays))] END);
        PERFORM ack_work(p_work_item, p_lock_token, v_step.task_id::text, 'step');
        RETURN QUERY SELECT 'lost', v_step.task_id, NULL::text, NULL::text, NULL::text, v_step.name, NULL::text, v_step.attempts, v_step.max_attempts,
                            NULL::jsonb, NULL::jsonb, NULL::jsonb, NULL::jsonb, NULL::uuid, NULL::integer, NULL::interval;
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = p_work_item AND q.lock_token = p_lock_token AND q.visible_at > clock_timestamp()) THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_work_item, p_lock_token USING ERRCODE = 'PW001';
    END IF;
    IF v_step.state = 'enqueued' THEN -- or it has taken effect before, and nobody heard
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['enqueued', 'in_progress'], p_processor_uuid, '{"event": "Start"}', p_claim => p_lock_token);
        v_step.attempts := v_step.attempts + 1;
    END IF;
    RETURN QUERY
    SELECT 'run', t.task_id, t.namespace, d.name, d.version, v_step.name, sd.handler, v_step.attempts, v_step.max_attempts,
           t.context, v_step.inputs, v_step.checkpoint, t.tags, t.correlation_id, sd.backoff_seconds, sd.timeout
      FROM tasks t
      JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
      JOIN step_definitions sd ON sd.step_definition_id = v_step.step_definition_id
     WHERE t.task_id = v_step.task_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION start_step IS 'Begins an attempt at a step whose work item was claimed. outcome is run, with what the handler is to know, to whoever holds the claim by which it has begun as often as he asks; discarded, if the item is out of date: it is then acknowledged; or lost, if a worker has begun before, and its lease ended: the attempt is then over, the item acknowledged, and the step waits for the next one, or is in error if that was the last. p_lost_delays are for how long it waits after the first attempt, the second and so on, unless its definition says how long; the last one is for all after that. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION end_attempt(
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
COMMENT ON FUNCTION end_attempt IS 'Internal: finish_step. No row if the step has been cancelled or resolved meanwhile, and otherwise one like those of ack_orchestration: for what the task is to be evaluated, of which with p_quiet nobody is notified.';

-- +goose StatementBegin
CREATE FUNCTION finish_step(
    p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_success boolean, p_results jsonb,
    p_retry_delay interval DEFAULT NULL, p_backoff_seconds integer DEFAULT NULL, p_headers text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM end_attempt(p_step_uuid, p_work_item, p_lock_token, p_processor_uuid, p_success, p_results,
                                           p_retry_delay, p_backoff_seconds, p_headers, false));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION finish_step IS 'Ends an attempt: keeps what the handler returned, or {"error": text, "retryable": boolean}, acknowledges the work item, and has the task evaluated, in one transaction. A step that may be tried again is due after p_retry_delay, or when set_step_backoff_atomic has asked for during the attempt; p_backoff_seconds says that the handler asked for the delay, and then that is it. False if the step has been cancelled or resolved meanwhile: then only the item is acknowledged. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION release_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_delay interval DEFAULT '0', p_reason text DEFAULT NULL)
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
COMMENT ON FUNCTION release_step IS 'Gives up an attempt that does not count, such as that of a worker that stops: the step is due again after p_delay. False and PW001 as for finish_step.';

-- +goose StatementBegin
CREATE FUNCTION checkpoint_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_checkpoint jsonb)
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
COMMENT ON FUNCTION checkpoint_step IS 'Keeps how far an attempt has got, for the next one. PW001 if the token no longer holds, or the step is no longer this attempt''s.';

-- +goose StatementBegin
CREATE FUNCTION steps_at_once(p_namespace text, p_steps uuid[], p_most integer)
RETURNS uuid[]
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_steps uuid[] := '{}';
    v_size  bigint := 0;
    v_step  record;
BEGIN
    FOR v_step IN
        SELECT s.step_id, d.sub_task_name, d.sub_task_version
          FROM unnest(p_steps) WITH ORDINALITY AS i (id, ord)
          JOIN steps s ON s.step_id = i.id JOIN step_definitions d ON d.step_definition_id = s.step_definition_id ORDER BY i.ord
    LOOP
        EXIT WHEN v_size >= p_most;
        v_steps := v_steps || v_step.step_id;
        v_size := v_size + 1;
        IF v_step.sub_task_name IS NOT NULL THEN
            v_size := v_size + (SELECT count(*) FROM task_definitions c JOIN step_definitions d ON d.task_definition_id = c.task_definition_id AND NOT d.on_demand
                                 WHERE c.namespace = p_namespace AND c.name = v_step.sub_task_name AND c.version = v_step.sub_task_version);
        END IF;
    END LOOP;
    RETURN v_steps;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION steps_at_once IS 'Internal: the first of some steps, as many as a turn enqueues: no further one once p_most steps come with those before it, for with a step that is a task come all the steps of that.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_steps(p_task tasks, p_ready uuid[], p_due uuid[], p_processor uuid, p_headers text, p_quiet boolean)
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
COMMENT ON FUNCTION enqueue_steps IS 'Internal: enqueues steps of a task with their work items, those that are pending and those whose next attempt is due; a step that is a task of its own is in progress from the creation of that on.';

-- +goose StatementBegin
CREATE FUNCTION advance_task(p_task uuid, p_processor uuid, p_headers text DEFAULT NULL, p_turn boolean DEFAULT false, p_quiet boolean DEFAULT false)
RETURNS tasks
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
AS $$
DECLARE
    v_most    constant integer := 1000; -- of each kind that are enqueued at a time: a turn that took longer than it may would be tried for ever
    v_rounds  integer := 0; -- in which something was passed on: as many at most
    v_rest    boolean := false; -- there is more to do of that
    v_now     timestamptz;
    v_task    tasks;
    v_drain   boolean;
    v_subs    boolean;
    v_done    uuid[];
    v_again   uuid[];
    v_failed  uuid[];
    v_passed  uuid[];
    v_told    uuid; -- the step that moved
    v_count   integer := 0;
    v_skipped uuid[];
    v_results boolean := false;
    v_blocked boolean;
    v_ready   uuid[] := '{}';
    v_due     uuid[] := '{}';
    v_found   integer;
    v_flying  boolean;
    v_pending boolean;
    v_retry   timestamptz;
    v_path    text[];
    v_from    text;
    v_event   text;
BEGIN
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task FOR NO KEY UPDATE;
    IF v_task.task_id IS NULL OR is_terminal(v_task.state) OR v_task.state = 'pending' AND v_task.start_at > clock_timestamp() THEN
        RETURN v_task;
    END IF;
    SELECT d.drain, EXISTS (SELECT FROM step_definitions s WHERE s.task_definition_id = d.task_definition_id AND s.handler IS NULL)
      INTO v_drain, v_subs FROM task_definitions d WHERE d.task_definition_id = v_task.task_definition_id;

    -- What came back.
    SELECT ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = p_task AND s.state = 'enqueued_for_orchestration' ORDER BY s.step_id),
           ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = p_task AND s.state = 'enqueued_as_error_for_orchestration' ORDER BY s.step_id)
      INTO v_done, v_again;
    IF v_done <> '{}' THEN
        PERFORM transition_steps(v_done, ARRAY['enqueued_for_orchestration', 'complete'], p_processor, '{"event": "Complete"}');
    END IF;
    IF v_again <> '{}' THEN
        v_results := true;
        SELECT coalesce(array_agg(s.step_id) FILTER (WHERE again.ok), '{}'), coalesce(array_agg(s.step_id) FILTER (WHERE NOT again.ok), '{}')
          INTO v_again, v_failed
          FROM unnest(v_again) AS i (id) JOIN steps s ON s.step_id = i.id
         -- Whatever a result is: only false says that there is to be no other attempt.
         CROSS JOIN LATERAL (SELECT s.retryable AND s.attempts < s.max_attempts AND s.results -> 'retryable' IS DISTINCT FROM 'false' AS ok) AS again;
        PERFORM transition_steps(v_again, ARRAY['enqueued_as_error_for_orchestration', 'waiting_for_retry'], p_processor, '{"event": "WaitForRetry"}');
        PERFORM transition_steps(v_failed, ARRAY['enqueued_as_error_for_orchestration', 'error'], p_processor, '{"event": "Fail"}');
    END IF;

    -- What is complete is passed on to its children, and what has to be skipped is complete with that. First, what was added, or put
    -- back by hand, after the condition was known.
    v_skipped := ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = p_task AND s.state IN ('pending', 'waiting_for_retry') AND s.unmet = 0 AND s.skip);
    LOOP
        IF v_skipped <> '{}' THEN
            PERFORM transition_steps(v_skipped, ARRAY['pending', 'complete'], p_processor, '{"event": "Skip"}', array_fill(NULL::jsonb, ARRAY[cardinality(v_skipped)]));
            -- One that somebody had wait for an attempt before it could have any.
            PERFORM transition_steps(v_skipped, ARRAY['waiting_for_retry', 'complete'], p_processor, '{"event": "Skip"}', array_fill(NULL::jsonb, ARRAY[cardinality(v_skipped)]));
            -- One that is skipped may let the next one be, along a chain as long as the task. The rest is for the next turn, which comes at
            -- once: these are complete, and not passed on, and until they are the task is at work on them.
            v_rest := v_rounds = v_most;
            EXIT WHEN v_rest;
        END IF;
        v_rounds := v_rounds + 1;
        WITH passed AS (
            UPDATE steps s SET passed_on = true
             WHERE s.task_id = p_task AND NOT s.passed_on AND s.state IN ('complete', 'resolved_manually') RETURNING s.step_id)
        SELECT array_agg(p.step_id) INTO v_passed FROM passed p;
        EXIT WHEN v_passed IS NULL;
        v_count := v_count + cardinality(v_passed);
        v_told := coalesce(v_told, v_done[1], v_passed[1]);
        WITH fed AS (
            UPDATE steps c SET unmet = c.unmet - f.n, skip = c.skip OR f.skip
              FROM (SELECT d.to_step_id, count(*)::integer AS n,
                           bool_or(d.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(s.results, d.condition, '{}', true), false)) AS skip
                      FROM unnest(v_passed) AS p (id) JOIN step_dependencies d ON d.from_step_id = p.id JOIN steps s ON s.step_id = p.id
                     GROUP BY d.to_step_id) AS f
             WHERE c.step_id = f.to_step_id
            RETURNING c.step_id, c.unmet, c.skip, c.state)
        SELECT array_agg(f.step_id) INTO v_skipped FROM fed f WHERE f.skip AND f.unmet = 0 AND f.state IN ('pending', 'waiting_for_retry');
        EXIT WHEN v_skipped IS NULL;
    END LOOP;
    v_results := v_results OR v_count > 0;

    IF v_subs THEN
        v_failed := ARRAY(
            SELECT s.step_id FROM steps s JOIN step_definitions d ON d.step_definition_id = s.step_definition_id AND d.handler IS NULL
             WHERE s.task_id = p_task AND s.state IN ('pending', 'waiting_for_retry') AND s.unmet = 0
               AND (v_task.depth >= 99
                    OR NOT EXISTS (SELECT FROM task_definitions c WHERE c.namespace = v_task.namespace AND c.name = d.sub_task_name AND c.version = d.sub_task_version)));
        IF v_failed <> '{}' THEN
            -- One that waits for an attempt was made to by hand, before it could have any.
            PERFORM transition_steps(v_failed, ARRAY['waiting_for_retry', 'pending'], p_processor, '{"event": "Retry"}');
            PERFORM transition_steps(v_failed, ARRAY['pending', 'error'], p_processor, '{"event": "Fail"}', array_fill(
                jsonb_build_object('retryable', false, 'error', CASE WHEN v_task.depth >= 99 THEN 'it is a task within 100 others, and that is as deep as it goes'
                                                                     ELSE 'there is no definition of the task that it is' END),
                ARRAY[cardinality(v_failed)]));
        END IF;
    END IF;

    -- What there is to do. Invariant (a task that is complete stays so): workers move steps without the lock of the task, yet only those
    -- that are in flight. So if none was, the statements after that see the same steps as it did; and if one was, whatever became of it
    -- meanwhile sends a message, and it is for the turn of that to say that the task is complete.
    SELECT EXISTS (SELECT FROM steps s WHERE s.task_id = p_task
                      AND s.state IN ('enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration')),
           EXISTS (SELECT FROM steps s WHERE s.task_id = p_task AND s.state IN ('error', 'cancelled')),
           EXISTS (SELECT FROM steps s WHERE s.task_id = p_task AND s.state IN ('pending', 'waiting_for_retry'))
      INTO v_flying, v_blocked, v_pending;
    v_flying := v_flying OR v_rest;
    IF NOT v_blocked OR v_drain THEN
        v_now := clock_timestamp();
        SELECT ARRAY(SELECT s.step_id FROM steps s
                      WHERE s.task_id = p_task AND s.state = 'pending' AND s.unmet = 0 AND (s.next_attempt_at <= v_now) IS NOT FALSE
                      ORDER BY s.step_id LIMIT v_most),
               ARRAY(SELECT s.step_id FROM steps s
                      WHERE s.task_id = p_task AND s.state = 'waiting_for_retry' AND s.unmet = 0 AND s.next_attempt_at <= v_now
                      ORDER BY s.next_attempt_at, s.step_id LIMIT v_most),
               (SELECT min(s.next_attempt_at) FROM steps s
                 WHERE s.task_id = p_task AND s.state IN ('pending', 'waiting_for_retry') AND s.unmet = 0 AND s.next_attempt_at > v_now)
          INTO v_ready, v_due, v_retry;
        v_rest := v_rest OR v_most IN (cardinality(v_ready), cardinality(v_due)); -- there may be more
        IF v_subs THEN
            v_found := cardinality(v_ready) + cardinality(v_due);
            v_ready := steps_at_once(v_task.namespace, v_ready, v_most);
            v_due := steps_at_once(v_task.namespace, v_due, v_most);
            v_rest := v_rest OR cardinality(v_ready) + cardinality(v_due) < v_found;
        END IF;
    END IF;
    IF v_rest THEN
        v_retry := clock_timestamp(); -- for which another turn comes at once
    END IF;

    -- From where it is to where that is decided, along the edges that there are.
    v_path := ARRAY[v_task.state];
    IF v_task.state = 'pending' THEN
        v_path := v_path || 'initializing'::text;
    ELSIF v_task.state = 'enqueuing_steps' THEN -- whoever was at that has left it
        v_path := v_path || 'evaluating_results'::text;
    ELSIF v_task.state = 'steps_in_process' AND (v_results OR v_ready <> '{}' OR v_due <> '{}' OR NOT v_flying OR v_blocked AND NOT v_drain) THEN
        v_path := v_path || 'evaluating_results'::text;
    ELSIF v_task.state = 'waiting_for_dependencies' AND (v_results OR v_ready <> '{}' OR v_due <> '{}' OR v_flying OR v_blocked OR v_retry IS NOT NULL OR NOT v_pending) THEN
        v_path := v_path || 'evaluating_results'::text;
    ELSIF v_task.state = 'waiting_for_retry' AND (v_results OR v_ready <> '{}' OR v_due <> '{}' OR v_flying OR v_blocked OR v_retry IS NULL) THEN
        v_path := v_path || 'enqueuing_steps'::text;
        IF v_ready = '{}' AND v_due = '{}' THEN
            v_path := v_path || 'evaluating_results'::text;
        END IF;
    ELSIF v_task.state = 'blocked_by_failures' AND (NOT v_blocked OR v_drain AND (v_ready <> '{}' OR v_due <> '{}' OR v_flying OR v_retry IS NOT NULL)) THEN
        v_path := v_path || 'evaluating_results'::text;
    END IF;
    v_from := v_path[cardinality(v_path)];
    IF v_from = 'initializing' AND v_task.total_steps > 0 AND v_ready = '{}' AND v_due = '{}' AND (v_blocked OR NOT v_pending OR v_flying OR v_retry IS NOT NULL) THEN
        -- Something was done to its steps before it began.
        v_path := v_path || ARRAY['waiting_for_dependencies', 'evaluating_results'];
        v_from := 'evaluating_results';
    END IF;
    IF v_from = 'enqueuing_steps' THEN
        v_path := v_path || 'steps_in_process'::text;
        v_event := 'RetryReady';
    ELSIF v_from IN ('initializing', 'evaluating_results') THEN
        -- Blocked comes first: with fail_fast nothing more is enqueued, with drain what does not depend on the failure is.
        IF v_ready <> '{}' OR v_due <> '{}' THEN
            v_path := v_path || ARRAY['enqueuing_steps', 'steps_in_process'];
            v_event := 'ReadyStepsFound';
        ELSIF v_blocked AND NOT (v_drain AND (v_flying OR v_retry IS NOT NULL)) THEN
            v_path := v_path || 'blocked_by_failures'::text;
            v_event := 'PermanentFailure';
        ELSIF v_flying THEN
            v_path := v_path || 'steps_in_process'::text;
            v_event := 'StepsStillInFlight';
        ELSIF v_retry IS NOT NULL THEN
            v_path := v_path || 'waiting_for_retry'::text;
            v_event := 'RetryScheduled';
        ELSIF NOT v_pending THEN
            v_path := v_path || 'complete'::text;
            v_event := CASE WHEN v_task.total_steps = 0 THEN 'NoStepsFound' ELSE 'AllStepsSuccessful' END;
        ELSE
            v_path := v_path || 'waiting_for_dependencies'::text;
            v_event := 'NoDependenciesReady';
        END IF;
    END IF;

    v_task.retries := v_task.retries + cardinality(v_again);
    IF v_ready <> '{}' OR v_due <> '{}' THEN
        PERFORM enqueue_steps(v_task, v_ready, v_due, p_processor, p_headers, p_quiet);
    END IF;
    IF cardinality(v_path) > 1 OR v_count > 0 OR v_again <> '{}' OR p_turn AND (v_task.next_ready_at, v_task.timer_at) IS DISTINCT FROM (v_retry, v_retry) THEN
        PERFORM transition_task(p_task, v_path, p_processor, jsonb_strip_nulls(jsonb_build_object('event', v_event)), true,
                                v_count, cardinality(v_again), p_turn, v_retry);
    END IF;
    IF NOT v_blocked AND (v_ready <> '{}' OR v_due <> '{}') THEN
        IF v_task.state IN ('pending', 'initializing') THEN
            PERFORM tell_task_ready(p_task, cardinality(v_ready) + cardinality(v_due), 'task_start', NULL, NULL);
        ELSE
            v_told := coalesce(v_told, v_due[1], v_ready[1]);
            PERFORM tell_task_ready(p_task, cardinality(v_ready) + cardinality(v_due), 'step_transition', v_told,
                                    (SELECT s.state FROM steps s WHERE s.step_id = v_told));
        END IF;
    END IF;
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task;
    RETURN v_task;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION advance_task IS 'Internal: takes a task as far as it goes now: results and failures of its steps, what they let run, and its own state. It goes by the tables alone and not by what was said, so it may be called at any time, any number of times, and goes on wherever another has left it. Up to 1000 steps are enqueued, those of tasks that steps are included, and what is skipped is passed on up to 1000 times: then it is ready again at once. With p_turn the caller has the turn of the task, and sees to the timer; or else he has its row, and has the task evaluated after that.';

-- +goose StatementBegin
CREATE FUNCTION evaluate_task(
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
COMMENT ON FUNCTION evaluate_task IS 'Takes a turn of a task: does what is to be done about it, and acknowledges the turn, in one transaction. p_cancel cancels it; p_failed_positions are steps whose work items were given up. With p_quiet nobody is notified of the work items and of the end of the turn, and the rows say what is to be told, as those of ack_orchestration do. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION end_sub_task(p_task tasks)
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
COMMENT ON FUNCTION end_sub_task IS 'Internal: gives the step that a task is the outcome of that task: the results of its complete steps by name, or a failure, such as that these are more than 64 MiB.';

-- +goose StatementBegin
CREATE FUNCTION finalize_task_completion(p_task_uuid uuid, p_processor_uuid uuid DEFAULT NULL)
RETURNS TABLE (action text, task_state text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task   tasks;
    v_status text;
BEGIN
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task_uuid FOR NO KEY UPDATE;
    IF v_task.task_id IS NULL THEN
        RAISE EXCEPTION 'there is no task %', p_task_uuid USING ERRCODE = 'PW002';
    END IF;
    IF NOT is_terminal(v_task.state) THEN
        IF v_task.state = 'blocked_by_failures' THEN
            SELECT c.execution_status INTO v_status FROM get_task_execution_context(p_task_uuid) AS c;
            IF v_status = 'blocked_by_failures' THEN -- for the second time
                PERFORM give_up_task(p_task_uuid, 'finalized while blocked');
                RETURN QUERY SELECT 'Failed', 'error';
                RETURN;
            END IF;
        END IF;
        v_task := advance_task(p_task_uuid, p_processor_uuid);
        PERFORM wake_task(p_task_uuid, 'finalized'); -- for the timer, and for whoever waits
    END IF;
    RETURN QUERY
    SELECT CASE v_task.state WHEN 'complete' THEN 'Completed' WHEN 'resolved_manually' THEN 'Completed' WHEN 'error' THEN 'Failed' WHEN 'cancelled' THEN 'Failed'
                             WHEN 'blocked_by_failures' THEN 'Failed' WHEN 'waiting_for_dependencies' THEN 'Pending' WHEN 'waiting_for_retry' THEN 'Pending'
                             WHEN 'pending' THEN 'Pending'
                             ELSE CASE WHEN v_task.state = 'steps_in_process' AND EXISTS (
                                            SELECT FROM task_transitions x WHERE x.task_id = p_task_uuid AND x.sort_key = v_task.sort_key AND x.xact = pg_current_xact_id_if_assigned()
                                               AND x.metadata ->> 'event' <> 'StepsStillInFlight')
                                       THEN 'Reenqueued' ELSE 'NoAction' END END, v_task.state;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION finalize_task_completion IS 'Does what is to be done about a task, without waiting for its turn, and says what that was: Completed; Failed, which for a task with failed steps is blocked_by_failures at the first call and error at the second; Reenqueued, if steps of it were ready; Pending, if it waits, or is to begin later; or NoAction, while steps are at work. Of a task that has ended it says the same each time, and changes nothing. PW002 if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION set_step_backoff_atomic(p_step_uuid uuid, p_backoff_seconds integer)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task  uuid := (SELECT s.task_id FROM steps s WHERE s.step_id = p_step_uuid);
    v_now   timestamptz;
    v_state text;
BEGIN
    IF p_backoff_seconds < 0 OR p_backoff_seconds IS NULL THEN
        RAISE EXCEPTION 'a backoff is not negative' USING ERRCODE = 'PW003';
    END IF;
    PERFORM FROM tasks t WHERE t.task_id = v_task FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    UPDATE steps s
       SET backoff_request_seconds = p_backoff_seconds, last_attempted_at = v_now, updated_at = v_now, next_attempt_at = v_now + make_interval(secs => p_backoff_seconds)
     WHERE s.step_id = p_step_uuid RETURNING s.state INTO v_state;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_state IN ('pending', 'waiting_for_retry') THEN
        PERFORM wake_task(v_task, 'step_action'); -- for its timer
    END IF;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION set_step_backoff_atomic IS 'Has the next attempt at a step wait so many seconds from now on: the backoff and the instant that it counts from are written together. What is asked for last holds: if an attempt is under way, it is for the one after that, unless the handler asks for another when it fails. An attempt that is enqueued is not held up. False if there is no such step, PW003 if it is negative.';

-- +goose StatementBegin
CREATE FUNCTION recover_tasks(p_older_than interval DEFAULT '5 min', p_limit integer DEFAULT 100)
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
COMMENT ON FUNCTION recover_tasks IS 'Has tasks evaluated that could go on and of which nothing in any queue knows, such as after the tables were changed by hand, and returns how many that were. A step that was enqueued, or begun, with a work item that is not in the queue any more, since somebody removed it or made it a dead letter, is one whose worker was lost: it is tried again at once, or is in error if its attempts are used up. Nothing is done about what is younger than p_older_than.';

-- +goose StatementBegin
CREATE FUNCTION upkeep_tasks(p_fail_stale boolean, p_limit integer DEFAULT 100)
RETURNS TABLE (recovered integer, failed integer)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('pgwake upkeep of tasks'), hashtext(current_schema())) THEN
        RETURN QUERY SELECT 0, 0;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT recover_tasks(p_limit => p_limit),
           CASE WHEN p_fail_stale THEN (SELECT count(*)::integer FROM detect_and_transition_stale_tasks(p_dry_run => false, p_batch_size => p_limit) AS s WHERE s.transition_success)
                ELSE 0 END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION upkeep_tasks IS 'What some node has to do now and then: recover_tasks, and with p_fail_stale detect_and_transition_stale_tasks. Does nothing while another node is at it.';

-- +goose StatementBegin
CREATE FUNCTION purge_tasks(p_completed_before timestamptz, p_limit integer DEFAULT 1000)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_tasks uuid[];
BEGIN
    -- Before anything else, as refresh_rollups does, or two could wait for each other: what is deleted is taken out of the counts.
    PERFORM FROM rollup_cursor FOR UPDATE;
    PERFORM refresh_rollups();
    v_tasks := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.completed_at < p_completed_before AND is_terminal(t.state)
           AND NOT EXISTS (SELECT FROM tasks p WHERE p.task_id = t.parent_task_id AND NOT is_terminal(p.state))
           -- Whoever is at it yet, or is to be told.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text)
           -- Its runs are added up, for nothing was written of it after it had ended.
           AND NOT EXISTS (SELECT FROM task_transitions x CROSS JOIN rollup_cursor c WHERE x.task_id = t.task_id AND x.sort_key = t.sort_key AND x.xact >= c.xact)
         ORDER BY t.completed_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
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
COMMENT ON FUNCTION purge_tasks IS 'Removes tasks that ended before an instant, with all that belongs to them, those first that ended first, and returns how many: call it until it returns 0. A task whose parent has not ended stays, and so does one that ended while a transaction was open that still is: what it took is not added up yet (refresh_rollups).';

-- +goose StatementBegin
CREATE FUNCTION list_tasks(
    p_tasks uuid[] DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_state text DEFAULT NULL,
    p_parent_task uuid DEFAULT NULL, p_before timestamptz DEFAULT NULL, p_before_task uuid DEFAULT NULL, p_limit integer DEFAULT 100,
    p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (
    task_id uuid, namespace text, name text, version text, state text, state_entered_at timestamptz, processor_id uuid, priority integer, deadline timestamptz,
    total_steps integer, completed_steps integer, retries integer, start_at timestamptz, next_ready_at timestamptz, requested_at timestamptz,
    completed_at timestamptz, initiator text, source_system text, reason text, tags jsonb, context jsonb, idempotency_key text, correlation_id uuid,
    parent_correlation_id uuid, parent_task_id uuid, parent_step_id uuid, context_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT t.task_id, t.namespace, t.name, t.version, t.state, t.state_entered_at, t.processor_id, t.priority, t.deadline, t.total_steps, t.completed_steps, t.retries,
           t.start_at, t.next_ready_at, t.requested_at, t.completed_at, t.initiator, t.source_system, t.reason, t.tags,
           CASE WHEN t.context_cut IS NULL THEN t.context END, t.idempotency_key, t.correlation_id, t.parent_correlation_id, t.parent_task_id, t.parent_step_id,
           t.context_cut
      FROM (SELECT of.*, cut_of(of.context, p_payload_bytes) AS context_cut
              FROM (SELECT t.*, d.name, d.version FROM tasks t JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
                     WHERE (p_tasks IS NULL OR t.task_id = ANY (p_tasks)) AND (p_namespace IS NULL OR t.namespace = p_namespace) AND (p_name IS NULL OR d.name = p_name)
                       AND (p_state IS NULL OR t.state = p_state) AND (p_parent_task IS NULL OR t.parent_task_id = p_parent_task)
                       AND (p_before IS NULL OR (t.created_at, t.task_id) < (p_before, coalesce(p_before_task, '00000000-0000-0000-0000-000000000000')))
                     ORDER BY t.created_at DESC, t.task_id DESC LIMIT p_limit) AS of
            OFFSET 0) AS t;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_tasks IS 'Tasks, those first that were created last: of p_tasks, and in a namespace, by the name of their definition, in a state, and those that are steps of a task. The next page begins before the last one of this (p_before, p_before_task). With p_payload_bytes context is null where it is longer, and context_cut an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION list_steps(p_tasks uuid[])
RETURNS TABLE (
    task_id uuid, step_id uuid, name text, handler text, sub_task_name text, state text, retryable boolean, max_attempts integer, attempts integer,
    processor_id uuid, processed_at timestamptz, last_attempted_at timestamptz, backoff_request_seconds integer, next_attempt_at timestamptz,
    inputs jsonb, results jsonb, checkpoint jsonb, skipped boolean, created_at timestamptz, updated_at timestamptz, parents text[], conditions text[])
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
-- Hashes, as in step_readiness: to look up the parents of each step by itself may be to read all dependencies for each.
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_hashjoin = on SET enable_nestloop = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_definitions uuid[] := ARRAY(SELECT t.task_definition_id FROM tasks t WHERE t.task_id = ANY (p_tasks));
BEGIN
    RETURN QUERY
    SELECT s.task_id, s.step_id, s.name, d.handler, d.sub_task_name, s.state, s.retryable, s.max_attempts, s.attempts, s.processor_id, s.processed_at,
           s.last_attempted_at, s.backoff_request_seconds, s.next_attempt_at, s.inputs, s.results, s.checkpoint, s.skip AND s.state = 'complete',
           s.created_at, s.updated_at, p.names, p.conditions
      FROM (SELECT w.* FROM steps w WHERE w.task_id = ANY (p_tasks) OFFSET 0) AS s -- or an index would be walked along, for the order
      JOIN (SELECT w.* FROM step_definitions w WHERE w.task_definition_id = ANY (v_definitions) OFFSET 0) AS d ON d.step_definition_id = s.step_definition_id
      LEFT JOIN (
           SELECT e.to_step_id, array_agg(f.name ORDER BY f.step_id, e.name) AS names, array_agg(coalesce(e.condition::text, '') ORDER BY f.step_id, e.name) AS conditions
             FROM (SELECT w.* FROM step_dependencies w WHERE w.task_id = ANY (p_tasks) OFFSET 0) AS e
             JOIN (SELECT w.step_id, w.name FROM steps w WHERE w.task_id = ANY (p_tasks) OFFSET 0) AS f ON f.step_id = e.from_step_id
            GROUP BY e.to_step_id) AS p ON p.to_step_id = s.step_id
     ORDER BY s.task_id, s.step_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_steps IS 'The steps of tasks in the order of their ids, each with the names of those that it waits for, and the conditions of these dependencies, an empty text for none.';

-- +goose Down

DROP FUNCTION list_steps, list_tasks, purge_tasks, upkeep_tasks, recover_tasks, set_step_backoff_atomic, finalize_task_completion, end_sub_task, evaluate_task, advance_task, enqueue_steps, steps_at_once,
    checkpoint_step, release_step, finish_step, end_attempt, start_step, lose_step, fail_step, cancel_step, complete_step_manually, resolve_step_manually, reset_step_for_retry,
    act_on_step, give_up_task, resolve_task_manually, cancel_task, cancel_open_steps, add_steps, create_task, create_task_many, claim_place,
    register_task_definition, check_conditions;
