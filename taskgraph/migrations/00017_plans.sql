-- Whatever is about few tasks reads few rows, also while the server believes that there are none, as it does for a while when it has analyzed tables
-- that were empty. To it any walk over a table was as good as a lookup then: one was made for each step that changed its state, for each turn and
-- each new task, and by upkeep for each task that it looked at. What is a subquery that ends in OFFSET 0, or in an order, is looked up by its key.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION transition_steps(
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
         -- As it is neither joined by a hash nor in an order, a step is looked up for each. An index that has the state alone is not asked for that.
         WHERE s.step_id = ANY (ARRAY[i.step_id])
           AND coalesce(s.state, '') = p_path[1]
        RETURNING s.step_id, s.task_id, s.sort_key - v_hops AS before),
    logged AS (
        INSERT INTO step_transitions (step_id, sort_key, task_id, from_state, to_state, processor_id, metadata, created_at)
        SELECT m.step_id, m.before + hop.n, m.task_id, p_path[hop.n], p_path[hop.n + 1], p_processor, coalesce(p_metadata, '{}'), v_now
          FROM moved m CROSS JOIN generate_series(1, v_hops) AS hop (n))
    SELECT m.step_id FROM moved m;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION advance_task(p_task uuid, p_processor uuid, p_headers text DEFAULT NULL, p_turn boolean DEFAULT false, p_quiet boolean DEFAULT false)
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
          FROM unnest(v_again) AS i (id)
         CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s
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
        -- What is passed on is found first, and once: the planner may have the rows of all steps come first, and find it for each of them.
        WITH found AS MATERIALIZED (
            SELECT d.to_step_id, count(*)::integer AS n,
                   bool_or(d.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(s.results, d.condition, '{}', true), false)) AS skip
              FROM unnest(v_passed) AS p (id)
             CROSS JOIN LATERAL (SELECT w.results FROM steps w WHERE w.step_id BETWEEN p.id AND p.id ORDER BY w.step_id) AS s
             CROSS JOIN LATERAL (SELECT w.to_step_id, w.condition FROM step_dependencies w WHERE w.from_step_id BETWEEN p.id AND p.id
                                  ORDER BY w.from_step_id) AS d
             GROUP BY d.to_step_id),
        fed AS (
            UPDATE steps c SET unmet = c.unmet - f.n, skip = c.skip OR f.skip
              FROM found f WHERE c.step_id = ANY (ARRAY[f.to_step_id])
            RETURNING c.step_id, c.unmet, c.skip, c.state)
        SELECT array_agg(f.step_id) INTO v_skipped FROM fed f WHERE f.skip AND f.unmet = 0 AND f.state IN ('pending', 'waiting_for_retry');
        EXIT WHEN v_skipped IS NULL;
    END LOOP;
    v_results := v_results OR v_count > 0;

    IF v_subs THEN
        v_failed := ARRAY(
            SELECT s.step_id FROM steps s
             CROSS JOIN LATERAL (SELECT w.sub_task_name, w.sub_task_version FROM step_definitions w
                                  WHERE w.step_definition_id = s.step_definition_id AND w.handler IS NULL OFFSET 0) AS d
             WHERE s.task_id = p_task AND s.state IN ('pending', 'waiting_for_retry') AND s.unmet = 0
               AND (v_task.depth >= 99
                    OR NOT EXISTS (SELECT FROM task_definitions c WHERE c.namespace = v_task.namespace AND c.name = d.sub_task_name AND c.version = d.sub_task_version OFFSET 0)));
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION steps_at_once(p_namespace text, p_steps uuid[], p_most integer)
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
         CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s
         CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id OFFSET 0) AS d ORDER BY i.ord
    LOOP
        EXIT WHEN v_size >= p_most;
        v_steps := v_steps || v_step.step_id;
        v_size := v_size + 1;
        IF v_step.sub_task_name IS NOT NULL THEN
            v_size := v_size + (SELECT count(*) FROM task_definitions c
                                 CROSS JOIN LATERAL (SELECT FROM step_definitions w WHERE w.task_definition_id = c.task_definition_id AND NOT w.on_demand OFFSET 0) AS d
                                 WHERE c.namespace = p_namespace AND c.name = v_step.sub_task_name AND c.version = v_step.sub_task_version);
        END IF;
    END LOOP;
    RETURN v_steps;
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
    v_size     bigint;
    v_some     integer;
BEGIN
    SELECT * INTO v_place FROM claim_place(p_task.priority, p_task.namespace, p_task.retries, p_task.deadline, p_task.created_at);
    FOR v_of IN SELECT ARRAY['pending', 'enqueued'] AS path, p_ready AS ids UNION ALL SELECT ARRAY['waiting_for_retry', 'pending', 'enqueued'], p_due LOOP
        CONTINUE WHEN v_of.ids = '{}';
        SELECT array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NOT NULL), array_agg(s.step_id ORDER BY s.step_id) FILTER (WHERE d.handler IS NULL)
          INTO v_run, v_sub
          FROM unnest(v_of.ids) AS i (id)
         CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s
         CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id OFFSET 0) AS d;
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
                     CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s
                     CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id OFFSET 0) AS d) AS a
             CROSS JOIN LATERAL enqueue_work_many(a.handlers, a.inputs, a.namespaces, a.priorities, NULL, a.dues, NULL, a.instances, a.executions, a.positions,
                                                  a.tags, NULL, a.headers, p_keys => a.keys, p_quiet => p_quiet) WITH ORDINALITY AS w (item_id, duplicate, due_at, now_at, ord);
            PERFORM transition_steps(v_run, v_of.path, p_processor, v_metadata, p_work_items => v_items);
        END IF;
        IF v_sub IS NOT NULL THEN
            PERFORM transition_steps(v_sub, v_of.path || 'in_progress'::text, p_processor, v_metadata);
            -- Before there is that task, so that no clock is asked which one is the last: it may have gone back since.
            UPDATE steps s SET sub_task_id = new_uuid() FROM unnest(v_sub) AS i (id)
             WHERE s.step_id = ANY (ARRAY[i.id]);
            -- As many at a time as do not have more than 64 MiB of contexts: all of them may be more than an array holds.
            SELECT greatest(max(octet_length(s.inputs::text)), CASE WHEN bool_or(s.inputs IS NULL) THEN octet_length(p_task.context::text) END, 1) INTO v_size
              FROM unnest(v_sub) AS i (id)
             CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s;
            v_some := greatest((64 << 20) / v_size, 1);
            FOR v_first IN 1 .. cardinality(v_sub) BY v_some LOOP
                PERFORM FROM (SELECT array_agg(p_task.namespace) AS namespaces, array_agg(d.sub_task_name) AS names, array_agg(d.sub_task_version) AS versions,
                                     array_agg(coalesce(s.inputs, p_task.context)::text) AS contexts, array_agg(p_task.priority) AS priorities,
                                     array_agg(p_task.deadline) AS deadlines, array_agg(p_task.correlation_id) AS correlations, array_agg(p_task.task_id) AS tasks,
                                     array_agg(s.step_id) AS steps, array_agg(s.sub_task_id) AS ids, array_agg(p_headers) AS headers
                                FROM unnest(v_sub[v_first : v_first + v_some - 1]) AS i (id)
                               CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN i.id AND i.id ORDER BY w.step_id) AS s
                               CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id OFFSET 0) AS d) AS a
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
     WHERE NOT EXISTS (SELECT FROM task_definitions d WHERE d.namespace = i.namespace AND d.name = i.name AND d.version = i.version OFFSET 0) LIMIT 1;
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
                                     AND coalesce(s.state, '') = 'in_progress' AND s.sub_task_id = i.id OFFSET 0)) THEN
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
         CROSS JOIN LATERAL (SELECT w.task_definition_id, w.namespace FROM task_definitions w
                              WHERE w.namespace = i.namespace AND w.name = i.name AND w.version = i.version OFFSET 0) AS d
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
          FROM tasks t
         CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.task_definition_id = t.task_definition_id AND NOT w.on_demand OFFSET 0) AS s
         WHERE t.task_id = ANY (v_added) -- which an index is asked for; an array that is not takes as long as it has elements
        RETURNING step_id, steps.task_id),
    stepped_log AS (
        INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, metadata, created_at)
        SELECT s.step_id, 1, s.task_id, 'pending', '{"event": "Create"}', v_now FROM stepped s),
    joined AS (
        INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, condition)
        SELECT t.task_id, numbered_uuid(t.task_id, v_now, d.parent), numbered_uuid(t.task_id, v_now, d.child), d.condition
          FROM tasks t
         CROSS JOIN LATERAL (SELECT w.* FROM step_definition_dependencies w WHERE w.task_definition_id = t.task_definition_id OFFSET 0) AS d
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
         CROSS JOIN LATERAL (SELECT w.* FROM tasks w WHERE w.idempotency_key = k.key OFFSET 0) AS t
         CROSS JOIN LATERAL (SELECT w.* FROM task_definitions w WHERE w.task_definition_id = t.task_definition_id OFFSET 0) AS d
         WHERE NOT k.new AND ((d.namespace, d.name, d.version) <> (k.namespace, k.name, k.version) OR t.context <> coalesce(k.context::jsonb, '{}')) LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'the idempotency key % belongs to a task of another definition or context', v_missing USING ERRCODE = 'PW007';
        END IF;
    END IF;
    FOR task_id, duplicate IN
        SELECT CASE WHEN i.new THEN i.id ELSE t.task_id END, NOT i.new
          FROM unnest(v_ids, p_idempotency_keys, v_new) WITH ORDINALITY AS i (id, key, new, ord)
          LEFT JOIN LATERAL (SELECT k.task_id FROM tasks k WHERE k.idempotency_key = i.key AND NOT i.new OFFSET 0) t ON true
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
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text OFFSET 0)
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now OFFSET 0)
           AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.instance_id = t.task_id::text OFFSET 0)
           AND NOT EXISTS (SELECT FROM tasks c WHERE c.parent_task_id = t.task_id AND NOT is_terminal(coalesce(c.state, '')) OFFSET 0)
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Steps whose work item somebody else has removed, or made a dead letter. Their own dispatcher sends the task a message with that.
    v_more := ARRAY(
        SELECT t.task_id FROM tasks t
         WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error' -- as the index has it
           AND t.state_entered_at < v_now - p_older_than
           AND EXISTS (SELECT FROM steps s
                        CROSS JOIN LATERAL (SELECT FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id AND w.handler IS NOT NULL OFFSET 0) AS d
                        WHERE s.task_id = t.task_id AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
                          AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id OFFSET 0) OFFSET 0)
           -- A timer that is not due is that of another step, and says nothing of this one. What waits otherwise may: its turn has failed, and comes again.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text
                              AND (q.visible_at <= v_now OR coalesce(q.dedup_key, '') <> 'retry/' || t.task_id) OFFSET 0)
           AND NOT EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = t.task_id::text AND l.locked_until > v_now OFFSET 0)
         ORDER BY t.state_entered_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    -- Invariant: the end of an item and what becomes of its step are one transaction, and to begin an attempt takes an item that is
    -- there. So a statement that sees such a step without an item sees one that nobody is at, and the row of the task keeps
    -- turns away until it is put right.
    PERFORM lose_step(s.step_id, NULL, v_now)
       FROM steps s
      CROSS JOIN LATERAL (SELECT FROM step_definitions w WHERE w.step_definition_id = s.step_definition_id AND w.handler IS NOT NULL OFFSET 0) AS d
      WHERE s.task_id = ANY (v_more) AND s.state IN ('enqueued', 'in_progress') AND s.updated_at < v_now - p_older_than
        AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id OFFSET 0);
    v_tasks := ARRAY(SELECT DISTINCT i.id FROM unnest(v_tasks || v_more) AS i (id));
    PERFORM wake_task(i.id, 'recover') FROM unnest(v_tasks) AS i (id);
    RETURN cardinality(v_tasks);
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
           AND NOT EXISTS (SELECT FROM tasks p WHERE p.task_id = t.parent_task_id AND NOT is_terminal(coalesce(p.state, '')) OFFSET 0)
           -- Whoever is at it yet, or is to be told.
           AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id BETWEEN t.task_id::text AND t.task_id::text OFFSET 0)
           -- Its runs are added up, for nothing was written of it after it had ended.
           AND NOT EXISTS (SELECT FROM task_transitions x CROSS JOIN rollup_cursor c WHERE x.task_id = t.task_id AND x.sort_key = t.sort_key AND x.xact >= c.xact OFFSET 0)
         ORDER BY t.completed_at LIMIT p_limit
           -- A turn of a message that came since has the instance, and updates the task: it is not to wait for whoever waits for the instance.
           FOR KEY SHARE SKIP LOCKED
    LOOP
        v_steps := v_steps + v_task.total_steps;
        EXIT WHEN v_steps > v_most AND v_tasks <> '{}'; -- one that is larger goes by itself
        v_tasks := v_tasks || v_task.task_id;
    END LOOP;
    PERFORM delete_instances(ARRAY(SELECT i.instance_id FROM instances i WHERE i.instance_id = ANY (ARRAY(SELECT t.id::text FROM unnest(v_tasks) AS t (id)))), true);
    DELETE FROM step_transitions x WHERE x.step_id = ANY (ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = ANY (v_tasks)));
    DELETE FROM task_transitions x WHERE x.task_id = ANY (v_tasks);
    DELETE FROM task_dlq d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM step_dependencies d WHERE d.task_id = ANY (v_tasks);
    DELETE FROM steps s WHERE s.task_id = ANY (v_tasks);
    DELETE FROM tasks t WHERE t.task_id = ANY (v_tasks);
    RETURN cardinality(v_tasks);
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
         CROSS JOIN LATERAL (SELECT w.* FROM task_definitions w WHERE w.task_definition_id = o.task_definition_id OFFSET 0) AS d
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION tally_runs(
    p_since timestamptz, p_after_xact xid8, p_after_id bigint,
    p_until_xact xid8 DEFAULT '18446744073709551615', p_until_id bigint DEFAULT 9223372036854775807, p_before timestamptz DEFAULT 'infinity')
RETURNS SETOF run_rollups
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET max_parallel_workers_per_gather = 0
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT date_bin('5 min', e.at, 'epoch'), e.kind, e.definition_id, count(*) FILTER (WHERE e.created), count(*) FILTER (WHERE NOT e.created),
           count(*) FILTER (WHERE e.failed), count(*) FILTER (WHERE e.failed AND e.seconds IS NULL),
           coalesce(sum(e.seconds), 0), coalesce(sum(e.seconds) FILTER (WHERE e.failed), 0), max(e.seconds), min(e.seconds),
           coalesce(sum(e.steps), 0)::bigint, max(e.at) FILTER (WHERE NOT e.created),
           min(e.xact)::text::xid8, max(e.xact)::text::xid8
      FROM (SELECT 'task' AS kind, t.task_definition_id AS definition_id, x.created_at AS at, x.from_state IS NULL AS created, x.to_state = 'error' AS failed,
                   CASE WHEN x.from_state IS NOT NULL THEN extract(epoch FROM x.created_at - t.created_at)::float8 END AS seconds,
                   CASE WHEN x.from_state IS NOT NULL THEN t.total_steps END AS steps, x.xact::text::numeric AS xact
              FROM task_transitions x CROSS JOIN LATERAL (SELECT w.* FROM tasks w WHERE w.task_id = x.task_id OFFSET 0) AS t
             WHERE (x.xact, x.transition_id) > (p_after_xact, p_after_id) AND (x.xact, x.transition_id) <= (p_until_xact, p_until_id)
               AND x.created_at >= p_since AND x.created_at < p_before
               AND (x.from_state IS NULL OR x.to_state IN ('complete', 'error'))
            UNION ALL
            -- An attempt is over when the step leaves in_progress, unless somebody has put an end to it by hand, or given it up as not made.
            SELECT 'step', s.step_definition_id, x.created_at, false, x.to_state <> 'enqueued_for_orchestration',
                   CASE WHEN x.to_state IN ('enqueued_for_orchestration', 'enqueued_as_error_for_orchestration') THEN extract(epoch FROM x.created_at - began.created_at)::float8 END,
                   NULL, x.xact::text::numeric
              FROM step_transitions x
             CROSS JOIN LATERAL (SELECT w.step_definition_id FROM steps w WHERE w.step_id BETWEEN x.step_id AND x.step_id ORDER BY w.step_id) AS s
             CROSS JOIN LATERAL (SELECT w.created_at FROM step_transitions w WHERE w.step_id = x.step_id AND w.sort_key = x.sort_key - 1 OFFSET 0) AS began
             WHERE (x.xact, x.transition_id) > (p_after_xact, p_after_id) AND (x.xact, x.transition_id) <= (p_until_xact, p_until_id)
               AND x.created_at >= p_since AND x.created_at < p_before
               AND x.from_state = 'in_progress'
               AND (x.to_state IN ('enqueued_for_orchestration', 'enqueued_as_error_for_orchestration') OR x.metadata ->> 'event' IN ('WorkerLost', 'Fail'))) AS e
     GROUP BY 1, 2, 3;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION task_at_work(p_task uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = p_task::text AND l.locked_until > clock_timestamp())
        OR EXISTS (SELECT FROM worker_queue q WHERE q.instance_id = p_task::text AND q.lock_token IS NOT NULL AND q.visible_at > clock_timestamp())
        OR EXISTS (SELECT FROM tasks c WHERE c.parent_task_id = p_task AND NOT is_terminal(coalesce(c.state, '')));
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION wake_task(p_task uuid, p_kind text, p_data jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE tasks t SET next_ready_at = least(t.next_ready_at, clock_timestamp())
     WHERE t.task_id = p_task AND NOT is_terminal(coalesce(t.state, '')) AND t.state <> 'pending' AND (t.next_ready_at <= clock_timestamp()) IS NOT TRUE;
    PERFORM enqueue_message(p_task::text, p_kind, p_data::json, p_namespace => t.namespace, p_queue => 'taskgraph') FROM tasks t WHERE t.task_id = p_task;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION cancel_sub_tasks(p_step uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM enqueue_message(c.task_id::text, 'cancel', p_namespace => c.namespace, p_queue => 'taskgraph') FROM tasks c WHERE c.parent_step_id = p_step AND NOT is_terminal(coalesce(c.state, ''));
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION resolve_dlq(p_dlq_entry_uuid uuid, p_status text, p_resolved_by text DEFAULT NULL, p_notes text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_status IN ('manually_resolved', 'permanently_failed', 'cancelled')) IS NOT TRUE THEN
        RAISE EXCEPTION 'an entry is resolved as manually_resolved, permanently_failed or cancelled, not %', quote_nullable(p_status) USING ERRCODE = 'PW003';
    END IF;
    UPDATE task_dlq d
       SET resolution_status = p_status, resolved_at = clock_timestamp(), resolved_by = p_resolved_by, resolution_notes = p_notes, updated_at = clock_timestamp()
     WHERE d.dlq_entry_id = p_dlq_entry_uuid AND coalesce(d.resolution_status, '') = 'pending';
    IF FOUND THEN
        RETURN true;
    ELSIF NOT EXISTS (SELECT FROM task_dlq d WHERE d.dlq_entry_id = p_dlq_entry_uuid) THEN
        RAISE EXCEPTION 'there is no entry %', p_dlq_entry_uuid USING ERRCODE = 'PW002';
    END IF;
    RETURN false;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION checkpoint_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_checkpoint jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM FROM steps s WHERE s.step_id = p_step_uuid AND s.work_item_id = p_work_item AND coalesce(s.state, '') = 'enqueued' FOR NO KEY UPDATE;
    IF FOUND THEN -- see invariant (begun); without a lease it is undone
        PERFORM transition_steps(ARRAY[p_step_uuid], ARRAY['enqueued', 'in_progress'], NULL, '{"event": "Start"}', p_claim => p_lock_token);
    END IF;
    UPDATE steps s SET checkpoint = p_checkpoint, updated_at = clock_timestamp()
     WHERE s.step_id = p_step_uuid AND coalesce(s.state, '') = 'in_progress' AND s.work_item_id = p_work_item
       AND EXISTS (SELECT FROM worker_queue q WHERE q.id = p_work_item AND q.lock_token = p_lock_token AND q.visible_at > clock_timestamp());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_work_item, p_lock_token USING ERRCODE = 'PW001';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION end_sub_task(p_task tasks)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET jit = off SET max_parallel_workers_per_gather = 0 -- as in add_steps
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
    PERFORM FROM (SELECT w.* FROM steps w WHERE w.step_id BETWEEN p_task.parent_step_id AND p_task.parent_step_id ORDER BY w.step_id) AS s
      CROSS JOIN LATERAL (SELECT w.handler FROM step_definitions w WHERE w.step_definition_id BETWEEN s.step_definition_id AND s.step_definition_id
                           ORDER BY w.step_definition_id) AS d
      WHERE coalesce(s.state, '') = 'in_progress'
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
               AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = s.work_item_id OFFSET 0)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION dlq_snapshot(p_task uuid, p_more jsonb DEFAULT '{}')
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
BEGIN
    RETURN (
        SELECT p_more || jsonb_build_object(
                   'namespace', t.namespace, 'task_name', d.name, 'version', d.version, 'current_state', t.state, 'state_entered_at', t.state_entered_at,
                   'processor_uuid', t.processor_id, 'priority', t.priority, 'correlation_id', t.correlation_id, 'parent_task_uuid', t.parent_task_id,
                   'created_at', t.created_at, 'next_ready_at', t.next_ready_at, 'total_steps', t.total_steps,
                   'steps_by_state', coalesce((SELECT jsonb_object_agg(k.state, k.n) FROM (
                       SELECT s.state, count(*) AS n FROM steps s WHERE s.task_id = t.task_id GROUP BY s.state) AS k), '{}'),
                   'open_steps', coalesce((SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                           'workflow_step_uuid', o.step_id, 'name', o.name, 'state', o.state, 'attempts', o.attempts, 'last_attempted_at', o.last_attempted_at,
                           'next_attempt_at', o.next_attempt_at, 'error', left(o.results ->> 'error', 1000))) ORDER BY o.position)
                       FROM (SELECT s.* FROM steps s
                              WHERE s.task_id = t.task_id AND s.state NOT IN ('complete', 'cancelled', 'resolved_manually')
                              ORDER BY s.state = 'pending', s.position LIMIT 100) AS o), '[]'))
          FROM tasks t
         CROSS JOIN LATERAL (SELECT w.name, w.version FROM task_definitions w WHERE w.task_definition_id = t.task_definition_id OFFSET 0) AS d
         WHERE t.task_id = p_task);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION list_dlq(
    p_status text DEFAULT 'pending', p_reason text DEFAULT NULL, p_task_uuid uuid DEFAULT NULL, p_limit integer DEFAULT 100, p_offset integer DEFAULT 0)
RETURNS TABLE (
    dlq_entry_uuid uuid, task_uuid uuid, namespace_name text, task_name text, version text, original_state text, current_state text, dlq_reason text,
    priority_score float8, minutes_in_dlq float8, resolution_status text, resolved_at timestamptz, resolved_by text, resolution_notes text,
    snapshot jsonb, metadata jsonb, created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT e.dlq_entry_id, e.task_id, t.namespace, d.name, d.version, e.original_state, t.state, e.reason,
           e.base + e.minutes, e.minutes, e.resolution_status, e.resolved_at, e.resolved_by, e.resolution_notes, e.snapshot, e.metadata, e.created_at
      FROM (SELECT q.*, extract(epoch FROM coalesce(q.resolved_at, clock_timestamp()) - q.created_at)::float8 / 60 AS minutes,
                   CASE q.reason WHEN 'dependency_cycle_detected' THEN 1000 WHEN 'max_retries_exceeded' THEN 500 WHEN 'staleness_timeout' THEN 100
                                 WHEN 'worker_unavailable' THEN 50 ELSE 10 END AS base
              FROM task_dlq q
             WHERE (p_status IS NULL OR q.resolution_status = p_status) AND (p_reason IS NULL OR q.reason = p_reason)
               AND (p_task_uuid IS NULL OR q.task_id = p_task_uuid)) AS e
     CROSS JOIN LATERAL (SELECT w.* FROM tasks w WHERE w.task_id = e.task_id OFFSET 0) AS t
     CROSS JOIN LATERAL (SELECT w.* FROM task_definitions w WHERE w.task_definition_id = t.task_definition_id OFFSET 0) AS d
     ORDER BY e.base + e.minutes DESC, e.created_at, e.dlq_entry_id
     LIMIT p_limit OFFSET p_offset;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION get_all_transitions(p_task_uuid uuid)
RETURNS TABLE (
    transition_id bigint, xact xid8, task_uuid uuid, workflow_step_uuid uuid, step_name text, sort_key integer, from_state text, to_state text,
    processor_uuid uuid, metadata jsonb, created_at timestamptz, most_recent boolean, current_state text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT x.transition_id, x.xact, x.task_id, x.step_id, x.name, x.sort_key, x.from_state, x.to_state, x.processor_id, x.metadata, x.created_at,
           lead(x.sort_key) OVER (PARTITION BY x.step_id ORDER BY x.sort_key) IS NULL, x.state
      FROM (SELECT l.transition_id, l.xact, l.task_id, NULL::uuid AS step_id, NULL::text AS name, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata,
                   l.created_at, t.state
              FROM tasks t CROSS JOIN LATERAL (SELECT w.* FROM task_transitions w WHERE w.task_id = t.task_id OFFSET 0) AS l WHERE t.task_id = p_task_uuid
            UNION ALL
            SELECT l.transition_id, l.xact, l.task_id, l.step_id, s.name, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata, l.created_at, s.state
              FROM steps s CROSS JOIN LATERAL (SELECT w.* FROM step_transitions w WHERE w.step_id = s.step_id OFFSET 0) AS l WHERE s.task_id = p_task_uuid) AS x
     ORDER BY x.transition_id;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION add_steps(
    p_task_uuid uuid, p_names text[], p_templates text[], p_inputs text[] DEFAULT NULL, p_max_attempts integer[] DEFAULT NULL,
    p_parents text[] DEFAULT NULL, p_children text[] DEFAULT NULL, p_conditions text[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET jit = off -- as a range of ids is taken for far more than the one that it is
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
              FROM joined j
             CROSS JOIN LATERAL (SELECT w.passed_on, w.results FROM steps w WHERE w.step_id BETWEEN j.from_step_id AND j.from_step_id ORDER BY w.step_id) AS p
             GROUP BY j.to_step_id) AS fed
     WHERE s.step_id = ANY (ARRAY[fed.to_step_id]);
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
CREATE OR REPLACE FUNCTION start_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_lost_delays interval[] DEFAULT NULL)
RETURNS TABLE (
    outcome text, task_uuid uuid, namespace text, task_name text, task_version text, step_name text, handler text, attempts integer, max_attempts integer,
    context jsonb, inputs jsonb, checkpoint jsonb, tags jsonb, correlation_id uuid, backoff_seconds integer, timeout interval)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
SET jit = off -- as in add_steps
AS $$
#variable_conflict use_column
DECLARE
    v_step    steps;
    v_backoff integer;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id BETWEEN p_step_uuid AND p_step_uuid ORDER BY s.step_id FOR NO KEY UPDATE;
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
     CROSS JOIN LATERAL (SELECT w.name, w.version FROM task_definitions w WHERE w.task_definition_id = t.task_definition_id OFFSET 0) AS d
     CROSS JOIN LATERAL (SELECT w.* FROM step_definitions w WHERE w.step_definition_id = v_step.step_definition_id OFFSET 0) AS sd
     WHERE t.task_id = v_step.task_id;
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
SET jit = off -- as in add_steps
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id BETWEEN p_step_uuid AND p_step_uuid ORDER BY s.step_id FOR NO KEY UPDATE;
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
SET jit = off -- as in add_steps
AS $$
DECLARE
    v_step steps;
BEGIN
    SELECT * INTO v_step FROM steps s WHERE s.step_id BETWEEN p_step_uuid AND p_step_uuid ORDER BY s.step_id FOR NO KEY UPDATE;
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

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

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
CREATE OR REPLACE FUNCTION start_step(p_step_uuid uuid, p_work_item bigint, p_lock_token uuid, p_processor_uuid uuid, p_lost_delays interval[] DEFAULT NULL)
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
CREATE OR REPLACE FUNCTION get_all_transitions(p_task_uuid uuid)
RETURNS TABLE (
    transition_id bigint, xact xid8, task_uuid uuid, workflow_step_uuid uuid, step_name text, sort_key integer, from_state text, to_state text,
    processor_uuid uuid, metadata jsonb, created_at timestamptz, most_recent boolean, current_state text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT x.transition_id, x.xact, x.task_id, x.step_id, x.name, x.sort_key, x.from_state, x.to_state, x.processor_id, x.metadata, x.created_at,
           lead(x.sort_key) OVER (PARTITION BY x.step_id ORDER BY x.sort_key) IS NULL, x.state
      FROM (SELECT l.transition_id, l.xact, l.task_id, NULL::uuid AS step_id, NULL::text AS name, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata,
                   l.created_at, t.state
              FROM tasks t JOIN task_transitions l ON l.task_id = t.task_id WHERE t.task_id = p_task_uuid
            UNION ALL
            SELECT l.transition_id, l.xact, l.task_id, l.step_id, s.name, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata, l.created_at, s.state
              FROM steps s JOIN step_transitions l ON l.step_id = s.step_id WHERE s.task_id = p_task_uuid) AS x
     ORDER BY x.transition_id;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION list_dlq(
    p_status text DEFAULT 'pending', p_reason text DEFAULT NULL, p_task_uuid uuid DEFAULT NULL, p_limit integer DEFAULT 100, p_offset integer DEFAULT 0)
RETURNS TABLE (
    dlq_entry_uuid uuid, task_uuid uuid, namespace_name text, task_name text, version text, original_state text, current_state text, dlq_reason text,
    priority_score float8, minutes_in_dlq float8, resolution_status text, resolved_at timestamptz, resolved_by text, resolution_notes text,
    snapshot jsonb, metadata jsonb, created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT e.dlq_entry_id, e.task_id, t.namespace, d.name, d.version, e.original_state, t.state, e.reason,
           e.base + e.minutes, e.minutes, e.resolution_status, e.resolved_at, e.resolved_by, e.resolution_notes, e.snapshot, e.metadata, e.created_at
      FROM (SELECT q.*, extract(epoch FROM coalesce(q.resolved_at, clock_timestamp()) - q.created_at)::float8 / 60 AS minutes,
                   CASE q.reason WHEN 'dependency_cycle_detected' THEN 1000 WHEN 'max_retries_exceeded' THEN 500 WHEN 'staleness_timeout' THEN 100
                                 WHEN 'worker_unavailable' THEN 50 ELSE 10 END AS base
              FROM task_dlq q
             WHERE (p_status IS NULL OR q.resolution_status = p_status) AND (p_reason IS NULL OR q.reason = p_reason)
               AND (p_task_uuid IS NULL OR q.task_id = p_task_uuid)) AS e
      JOIN tasks t ON t.task_id = e.task_id
      JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
     ORDER BY e.base + e.minutes DESC, e.created_at, e.dlq_entry_id
     LIMIT p_limit OFFSET p_offset;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION dlq_snapshot(p_task uuid, p_more jsonb DEFAULT '{}')
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
BEGIN
    RETURN (
        SELECT p_more || jsonb_build_object(
                   'namespace', t.namespace, 'task_name', d.name, 'version', d.version, 'current_state', t.state, 'state_entered_at', t.state_entered_at,
                   'processor_uuid', t.processor_id, 'priority', t.priority, 'correlation_id', t.correlation_id, 'parent_task_uuid', t.parent_task_id,
                   'created_at', t.created_at, 'next_ready_at', t.next_ready_at, 'total_steps', t.total_steps,
                   'steps_by_state', coalesce((SELECT jsonb_object_agg(k.state, k.n) FROM (
                       SELECT s.state, count(*) AS n FROM steps s WHERE s.task_id = t.task_id GROUP BY s.state) AS k), '{}'),
                   'open_steps', coalesce((SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                           'workflow_step_uuid', o.step_id, 'name', o.name, 'state', o.state, 'attempts', o.attempts, 'last_attempted_at', o.last_attempted_at,
                           'next_attempt_at', o.next_attempt_at, 'error', left(o.results ->> 'error', 1000))) ORDER BY o.position)
                       FROM (SELECT s.* FROM steps s
                              WHERE s.task_id = t.task_id AND s.state NOT IN ('complete', 'cancelled', 'resolved_manually')
                              ORDER BY s.state = 'pending', s.position LIMIT 100) AS o), '[]'))
          FROM tasks t JOIN task_definitions d ON d.task_definition_id = t.task_definition_id WHERE t.task_id = p_task);
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
CREATE OR REPLACE FUNCTION resolve_dlq(p_dlq_entry_uuid uuid, p_status text, p_resolved_by text DEFAULT NULL, p_notes text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_status IN ('manually_resolved', 'permanently_failed', 'cancelled')) IS NOT TRUE THEN
        RAISE EXCEPTION 'an entry is resolved as manually_resolved, permanently_failed or cancelled, not %', quote_nullable(p_status) USING ERRCODE = 'PW003';
    END IF;
    UPDATE task_dlq d
       SET resolution_status = p_status, resolved_at = clock_timestamp(), resolved_by = p_resolved_by, resolution_notes = p_notes, updated_at = clock_timestamp()
     WHERE d.dlq_entry_id = p_dlq_entry_uuid AND d.resolution_status = 'pending';
    IF FOUND THEN
        RETURN true;
    ELSIF NOT EXISTS (SELECT FROM task_dlq d WHERE d.dlq_entry_id = p_dlq_entry_uuid) THEN
        RAISE EXCEPTION 'there is no entry %', p_dlq_entry_uuid USING ERRCODE = 'PW002';
    END IF;
    RETURN false;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION cancel_sub_tasks(p_step uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM enqueue_message(c.task_id::text, 'cancel', p_namespace => c.namespace, p_queue => 'taskgraph') FROM tasks c WHERE c.parent_step_id = p_step AND NOT is_terminal(c.state);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION wake_task(p_task uuid, p_kind text, p_data jsonb DEFAULT NULL)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION task_at_work(p_task uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = p_task::text AND l.locked_until > clock_timestamp())
        OR EXISTS (SELECT FROM worker_queue q WHERE q.instance_id = p_task::text AND q.lock_token IS NOT NULL AND q.visible_at > clock_timestamp())
        OR EXISTS (SELECT FROM tasks c WHERE c.parent_task_id = p_task AND NOT is_terminal(c.state));
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION tally_runs(
    p_since timestamptz, p_after_xact xid8, p_after_id bigint,
    p_until_xact xid8 DEFAULT '18446744073709551615', p_until_id bigint DEFAULT 9223372036854775807, p_before timestamptz DEFAULT 'infinity')
RETURNS SETOF run_rollups
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET max_parallel_workers_per_gather = 0
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT date_bin('5 min', e.at, 'epoch'), e.kind, e.definition_id, count(*) FILTER (WHERE e.created), count(*) FILTER (WHERE NOT e.created),
           count(*) FILTER (WHERE e.failed), count(*) FILTER (WHERE e.failed AND e.seconds IS NULL),
           coalesce(sum(e.seconds), 0), coalesce(sum(e.seconds) FILTER (WHERE e.failed), 0), max(e.seconds), min(e.seconds),
           coalesce(sum(e.steps), 0)::bigint, max(e.at) FILTER (WHERE NOT e.created),
           min(e.xact)::text::xid8, max(e.xact)::text::xid8
      FROM (SELECT 'task' AS kind, t.task_definition_id AS definition_id, x.created_at AS at, x.from_state IS NULL AS created, x.to_state = 'error' AS failed,
                   CASE WHEN x.from_state IS NOT NULL THEN extract(epoch FROM x.created_at - t.created_at)::float8 END AS seconds,
                   CASE WHEN x.from_state IS NOT NULL THEN t.total_steps END AS steps, x.xact::text::numeric AS xact
              FROM task_transitions x JOIN tasks t ON t.task_id = x.task_id
             WHERE (x.xact, x.transition_id) > (p_after_xact, p_after_id) AND (x.xact, x.transition_id) <= (p_until_xact, p_until_id)
               AND x.created_at >= p_since AND x.created_at < p_before
               AND (x.from_state IS NULL OR x.to_state IN ('complete', 'error'))
            UNION ALL
            -- An attempt is over when the step leaves in_progress, unless somebody has put an end to it by hand, or given it up as not made.
            SELECT 'step', s.step_definition_id, x.created_at, false, x.to_state <> 'enqueued_for_orchestration',
                   CASE WHEN x.to_state IN ('enqueued_for_orchestration', 'enqueued_as_error_for_orchestration') THEN extract(epoch FROM x.created_at - began.created_at)::float8 END,
                   NULL, x.xact::text::numeric
              FROM step_transitions x
              JOIN steps s ON s.step_id = x.step_id
              JOIN step_transitions began ON began.step_id = x.step_id AND began.sort_key = x.sort_key - 1
             WHERE (x.xact, x.transition_id) > (p_after_xact, p_after_id) AND (x.xact, x.transition_id) <= (p_until_xact, p_until_id)
               AND x.created_at >= p_since AND x.created_at < p_before
               AND x.from_state = 'in_progress'
               AND (x.to_state IN ('enqueued_for_orchestration', 'enqueued_as_error_for_orchestration') OR x.metadata ->> 'event' IN ('WorkerLost', 'Fail'))) AS e
     GROUP BY 1, 2, 3;
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
CREATE OR REPLACE FUNCTION steps_at_once(p_namespace text, p_steps uuid[], p_most integer)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION advance_task(p_task uuid, p_processor uuid, p_headers text DEFAULT NULL, p_turn boolean DEFAULT false, p_quiet boolean DEFAULT false)
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
        -- What is passed on is found first, and once: the planner may have the rows of all steps come first, and find it for each of them.
        WITH found AS MATERIALIZED (
            SELECT d.to_step_id, count(*)::integer AS n,
                   bool_or(d.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(s.results, d.condition, '{}', true), false)) AS skip
              FROM unnest(v_passed) AS p (id)
             CROSS JOIN LATERAL (SELECT w.results FROM steps w WHERE w.step_id BETWEEN p.id AND p.id ORDER BY w.step_id) AS s
             CROSS JOIN LATERAL (SELECT w.to_step_id, w.condition FROM step_dependencies w WHERE w.from_step_id BETWEEN p.id AND p.id
                                  ORDER BY w.from_step_id) AS d
             GROUP BY d.to_step_id),
        fed AS (
            UPDATE steps c SET unmet = c.unmet - f.n, skip = c.skip OR f.skip
              FROM found f WHERE c.step_id = f.to_step_id
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION transition_steps(
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
