-- Each task is looked up by its key, and so is its definition, whatever the statistics say. While the server believed that there are no tasks,
-- as it does for a while after a table was emptied, all tasks of a state, or of a definition, were read for one, and all steps and dependencies
-- for each step when one passed on what it had done. And a chunk of tasks takes a time that grows with their number, and not with its square.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION ready_task_infos(p_tasks uuid[], p_ready bigint[], p_at timestamptz)
RETURNS SETOF ready_task_info
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off SET enable_sort = off
AS $$
BEGIN
    RETURN QUERY
    SELECT t.task_id, d.name, t.priority, t.namespace, u.ready,
           round((t.priority_key + s.age_weight * hours_since_2000(p_at) + s.deadline_weight * hours_overdue(t.deadline, p_at))::numeric, 6), t.state
      FROM unnest(p_tasks, p_ready) WITH ORDINALITY AS u (task_id, ready, place)
     CROSS JOIN LATERAL (SELECT w.* FROM tasks w WHERE w.task_id BETWEEN u.task_id AND u.task_id ORDER BY w.task_id) AS t
     CROSS JOIN LATERAL (SELECT w.name FROM task_definitions w WHERE w.task_definition_id BETWEEN t.task_definition_id AND t.task_definition_id
                          ORDER BY w.task_definition_id) AS d
     CROSS JOIN taskgraph_settings s
     ORDER BY u.place;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION get_next_ready_tasks(p_limit integer DEFAULT 5)
RETURNS SETOF ready_task_info
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET enable_sort = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_deadlines float8 := (SELECT s.deadline_weight FROM taskgraph_settings s);
    v_size      integer := p_limit;
    v_ids       uuid[] := '{}'; -- tasks that are taken, and how many of their steps are ready
    v_ready     bigint[] := '{}';
    v_chunk     uuid[]; -- the next ones that may be ready, and those before which the next chunk ends
    v_scores    float8[];
    v_createds  timestamptz[];
    v_counts    bigint[]; -- how many steps of each task of the chunk are ready
    v_score     float8 := 'Infinity';
    v_created   timestamptz := '-infinity';
    v_id        uuid := '00000000-0000-0000-0000-000000000000';
    v_more_ids  uuid[];
    v_more      bigint[];
BEGIN
    IF p_limit IS NULL OR p_limit < 0 THEN
        RAISE EXCEPTION 'the limit must be 0 or more, but is %', p_limit USING ERRCODE = 'PW003';
    END IF;
    -- In chunks, so that what is not ready hides nothing behind it, and little is looked at that is not returned.
    WHILE cardinality(v_ids) < p_limit LOOP
        -- Tasks that are past a deadline are in an order of their own, which changes with time: each of them is looked at.
        SELECT array_agg(c.task_id ORDER BY c.score DESC, c.created_at, c.task_id), array_agg(c.score ORDER BY c.score DESC, c.created_at, c.task_id),
               array_agg(c.created_at ORDER BY c.score DESC, c.created_at, c.task_id)
          INTO v_chunk, v_scores, v_createds
          FROM (SELECT u.* FROM (
                    (SELECT t.task_id, t.priority_key AS score, t.created_at FROM tasks t
                      WHERE t.next_ready_at <= v_now AND t.next_ready_at IS NOT NULL
                        AND t.state IN ('pending', 'waiting_for_dependencies', 'waiting_for_retry')
                        AND (v_deadlines = 0 OR (t.deadline <= v_now) IS NOT TRUE)
                        AND t.priority_key <= v_score AND (t.priority_key < v_score OR (t.created_at, t.task_id) > (v_created, v_id))
                      ORDER BY t.priority_key DESC, t.created_at, t.task_id LIMIT v_size)
                     UNION ALL
                    SELECT o.* FROM (
                        SELECT t.task_id, t.priority_key + v_deadlines * hours_overdue(t.deadline, v_now) AS score, t.created_at FROM tasks t
                         WHERE v_deadlines > 0 AND t.deadline <= v_now AND t.deadline IS NOT NULL
                           AND t.next_ready_at <= v_now AND t.next_ready_at IS NOT NULL
                           AND t.state IN ('pending', 'waiting_for_dependencies', 'waiting_for_retry')) AS o
                     WHERE o.score <= v_score AND (o.score < v_score OR (o.created_at, o.task_id) > (v_created, v_id))) AS u
                 ORDER BY u.score DESC, u.created_at, u.task_id LIMIT v_size) AS c;
        EXIT WHEN v_chunk IS NULL;
        -- What is ready is grouped with what was asked for: a join of the two might compare each with each.
        SELECT array_agg(g.steps ORDER BY g.place) INTO v_counts
          FROM (SELECT u.task_id, min(u.place) AS place, count(*) FILTER (WHERE u.place IS NULL) AS steps
                  FROM (SELECT c.task_id, c.place FROM unnest(v_chunk) WITH ORDINALITY AS c (task_id, place)
                         UNION ALL
                        SELECT r.task_uuid, NULL FROM step_readiness(v_chunk) AS r WHERE r.ready_for_execution) AS u
                 GROUP BY u.task_id) AS g;
        -- Invariant (disjoint): whoever returns a task holds its row lock, and of those that another holds he takes none. The lock is
        -- one that allows for rows that refer to the task. What the filters compare may have changed since the chunk was read.
        -- A task is looked up, and locked, when its turn comes: those behind the limit are not.
        SELECT array_agg(l.task_id), array_agg(l.steps)
          INTO v_more_ids, v_more
          FROM (SELECT t.task_id, c.steps
                  FROM unnest(v_chunk, v_counts) WITH ORDINALITY AS c (task_id, steps, place)
                 CROSS JOIN LATERAL (SELECT w.task_id FROM tasks w
                         WHERE w.task_id BETWEEN c.task_id AND c.task_id AND w.next_ready_at <= v_now
                           AND (w.state = 'pending' OR w.state IN ('waiting_for_dependencies', 'waiting_for_retry') AND c.steps > 0)
                         ORDER BY w.task_id FOR NO KEY UPDATE SKIP LOCKED) AS t
                 ORDER BY c.place LIMIT p_limit - cardinality(v_ids)) AS l;
        v_ids := v_ids || v_more_ids;
        v_ready := v_ready || v_more;
        EXIT WHEN cardinality(v_chunk) < v_size;
        v_score := v_scores[v_size];
        v_created := v_createds[v_size];
        v_id := v_chunk[v_size];
        v_size := least(2 * v_size::bigint, greatest(p_limit, 5000));
    END LOOP;
    RETURN QUERY SELECT r.* FROM ready_task_infos(v_ids, v_ready, v_now) AS r;
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

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION ready_task_infos(p_tasks uuid[], p_ready bigint[], p_at timestamptz)
RETURNS SETOF ready_task_info
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT t.task_id, d.name, t.priority, t.namespace, u.ready,
           round((t.priority_key + s.age_weight * hours_since_2000(p_at) + s.deadline_weight * hours_overdue(t.deadline, p_at))::numeric, 6), t.state
      FROM unnest(p_tasks, p_ready) WITH ORDINALITY AS u (task_id, ready, place)
      JOIN tasks t ON t.task_id = u.task_id
      JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
     CROSS JOIN taskgraph_settings s
     ORDER BY u.place;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION get_next_ready_tasks(p_limit integer DEFAULT 5)
RETURNS SETOF ready_task_info
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET enable_sort = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_deadlines float8 := (SELECT s.deadline_weight FROM taskgraph_settings s);
    v_size      integer := p_limit;
    v_ids       uuid[] := '{}'; -- tasks that are taken, and how many of their steps are ready
    v_ready     bigint[] := '{}';
    v_chunk     uuid[]; -- the next ones that may be ready, and those before which the next chunk ends
    v_scores    float8[];
    v_createds  timestamptz[];
    v_score     float8 := 'Infinity';
    v_created   timestamptz := '-infinity';
    v_id        uuid := '00000000-0000-0000-0000-000000000000';
    v_more_ids  uuid[];
    v_more      bigint[];
BEGIN
    IF p_limit IS NULL OR p_limit < 0 THEN
        RAISE EXCEPTION 'the limit must be 0 or more, but is %', p_limit USING ERRCODE = 'PW003';
    END IF;
    -- In chunks, so that what is not ready hides nothing behind it, and little is looked at that is not returned.
    WHILE cardinality(v_ids) < p_limit LOOP
        -- Tasks that are past a deadline are in an order of their own, which changes with time: each of them is looked at.
        SELECT array_agg(c.task_id ORDER BY c.score DESC, c.created_at, c.task_id), array_agg(c.score ORDER BY c.score DESC, c.created_at, c.task_id),
               array_agg(c.created_at ORDER BY c.score DESC, c.created_at, c.task_id)
          INTO v_chunk, v_scores, v_createds
          FROM (SELECT u.* FROM (
                    (SELECT t.task_id, t.priority_key AS score, t.created_at FROM tasks t
                      WHERE t.next_ready_at <= v_now AND t.next_ready_at IS NOT NULL
                        AND t.state IN ('pending', 'waiting_for_dependencies', 'waiting_for_retry')
                        AND (v_deadlines = 0 OR (t.deadline <= v_now) IS NOT TRUE)
                        AND t.priority_key <= v_score AND (t.priority_key < v_score OR (t.created_at, t.task_id) > (v_created, v_id))
                      ORDER BY t.priority_key DESC, t.created_at, t.task_id LIMIT v_size)
                     UNION ALL
                    SELECT o.* FROM (
                        SELECT t.task_id, t.priority_key + v_deadlines * hours_overdue(t.deadline, v_now) AS score, t.created_at FROM tasks t
                         WHERE v_deadlines > 0 AND t.deadline <= v_now AND t.deadline IS NOT NULL
                           AND t.next_ready_at <= v_now AND t.next_ready_at IS NOT NULL
                           AND t.state IN ('pending', 'waiting_for_dependencies', 'waiting_for_retry')) AS o
                     WHERE o.score <= v_score AND (o.score < v_score OR (o.created_at, o.task_id) > (v_created, v_id))) AS u
                 ORDER BY u.score DESC, u.created_at, u.task_id LIMIT v_size) AS c;
        EXIT WHEN v_chunk IS NULL;
        -- Invariant (disjoint): whoever returns a task holds its row lock, and of those that another holds he takes none. The lock is
        -- one that allows for rows that refer to the task. What the filters compare may have changed since the chunk was read.
        WITH ready AS MATERIALIZED (
            SELECT r.task_uuid, count(*) AS steps FROM step_readiness(v_chunk) AS r WHERE r.ready_for_execution GROUP BY r.task_uuid)
        SELECT array_agg(l.task_id), array_agg(l.steps)
          INTO v_more_ids, v_more
          FROM (SELECT t.task_id, coalesce(r.steps, 0) AS steps
                  FROM unnest(v_chunk) WITH ORDINALITY AS c (task_id, place)
                  JOIN tasks t ON t.task_id = c.task_id AND t.task_id = ANY (v_chunk)
                  LEFT JOIN ready r ON r.task_uuid = c.task_id
                 WHERE t.next_ready_at <= v_now
                   AND (t.state = 'pending' OR t.state IN ('waiting_for_dependencies', 'waiting_for_retry') AND r.steps > 0)
                 ORDER BY c.place LIMIT p_limit - cardinality(v_ids)
                   FOR NO KEY UPDATE OF t SKIP LOCKED) AS l;
        v_ids := v_ids || v_more_ids;
        v_ready := v_ready || v_more;
        EXIT WHEN cardinality(v_chunk) < v_size;
        v_score := v_scores[v_size];
        v_created := v_createds[v_size];
        v_id := v_chunk[v_size];
        v_size := least(2 * v_size::bigint, greatest(p_limit, 5000));
    END LOOP;
    RETURN QUERY SELECT r.* FROM ready_task_infos(v_ids, v_ready, v_now) AS r;
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
