-- What is ready: steps by their parents, attempts and backoff; tasks by their steps; and which task is next.
--
-- One function decides about steps, step_readiness, and everything else here asks it: whether one task is asked for or many,
-- some of its steps or a count of them, the answers are the same.
--
-- Steps, and the parents and children of a step, are looked up as a range of one id in the order of that id, with sorts disabled:
-- only one index has that order. For an equality a walk along any index that has the id as a second column would do for a planner
-- that believes the table to be empty. Functions that are called by others here set all that the plans of either depend on.

-- +goose Up

-- step_readiness: when steps of a task failed last
CREATE INDEX step_transitions_failures_idx ON step_transitions (task_id)
    WHERE to_state IN ('enqueued_as_error_for_orchestration', 'waiting_for_retry', 'error');

-- +goose StatementBegin
CREATE FUNCTION calculate_backoff_delay(
    p_attempts integer, p_base_delay numeric DEFAULT 1, p_max numeric DEFAULT 60, p_multiplier numeric DEFAULT 2.0)
RETURNS integer
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_attempts < 0 THEN
        RAISE EXCEPTION 'attempts must not be negative, but are %', p_attempts USING ERRCODE = 'PW003';
    ELSIF p_base_delay NOT BETWEEN 0 AND 2147483647 OR p_max NOT BETWEEN 0 AND 2147483647 THEN
        RAISE EXCEPTION 'a delay must be from 0 to 2147483647 s, but base and maximum are % and %', p_base_delay, p_max USING ERRCODE = 'PW003';
    ELSIF p_multiplier NOT BETWEEN 1 AND 1000000 THEN
        RAISE EXCEPTION 'the multiplier must be from 1 to 1000000, but is %', p_multiplier USING ERRCODE = 'PW003';
    ELSIF p_attempts = 0 OR p_base_delay = 0 OR p_max = 0 THEN
        RETURN 0;
    -- The power is taken only where it stays below the maximum, so that no number of attempts is too large for it.
    ELSIF ln(p_base_delay) + p_attempts * ln(p_multiplier) > ln(p_max) THEN
        RETURN floor(p_max);
    END IF;
    RETURN least(ceil(round(p_base_delay * p_multiplier ^ p_attempts, 6)), floor(p_max));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION calculate_backoff_delay IS 'Seconds to wait after that many attempts: p_base_delay * p_multiplier ^ attempts, in whole seconds, and p_max at most; none before the first attempt. Null if an argument is; PW003 if one is negative, or the multiplier less than 1.';

-- +goose StatementBegin
CREATE FUNCTION calculate_step_next_retry_time(
    p_backoff_request_seconds integer, p_last_attempted_at timestamptz, p_failure_time timestamptz, p_attempts integer,
    p_max_backoff_seconds integer DEFAULT 60, p_backoff_multiplier numeric DEFAULT 2.0)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_backoff_request_seconds IS NOT NULL AND p_last_attempted_at IS NOT NULL THEN
        RETURN p_last_attempted_at + make_interval(secs => p_backoff_request_seconds);
    END IF;
    RETURN p_failure_time + make_interval(secs => calculate_backoff_delay(
        coalesce(p_attempts, 0), 1, coalesce(p_max_backoff_seconds, 60), coalesce(p_backoff_multiplier, 2.0)));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION calculate_step_next_retry_time IS 'When a step may be tried again that has no stored instant for that (steps.next_attempt_at): what was asked for after the latest attempt, or else the exponential backoff after the latest failure. Null: at once.';

-- +goose StatementBegin
CREATE FUNCTION evaluate_step_state_readiness(
    p_current_state text, p_processed boolean, p_in_process boolean, p_dependencies_satisfied boolean,
    p_retry_eligible boolean, p_retryable boolean, p_next_retry_time timestamptz, p_now timestamptz DEFAULT clock_timestamp())
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_current_state IN ('pending', 'waiting_for_retry') AND NOT p_processed AND NOT p_in_process
       AND p_dependencies_satisfied AND p_retry_eligible AND (p_next_retry_time <= p_now) IS NOT FALSE; -- each once, or it is not inlined
-- +goose StatementEnd
COMMENT ON FUNCTION evaluate_step_state_readiness IS 'Whether a step with these properties is ready to be run. Whether it may be retried at all is part of p_retry_eligible already, and an error is never ready: it is there for good, unless somebody resets it.';

CREATE TYPE step_readiness_status AS (
    workflow_step_uuid      uuid,
    task_uuid               uuid,
    named_step_uuid         uuid,
    name                    text,
    current_state           text,
    dependencies_satisfied  boolean,
    retry_eligible          boolean,
    ready_for_execution     boolean,
    last_failure_at         timestamptz,
    next_retry_at           timestamptz,
    total_parents           integer,
    completed_parents       integer,
    attempts                integer,
    retry_limit             integer,
    backoff_request_seconds integer,
    last_attempted_at       timestamptz
);
COMMENT ON TYPE step_readiness_status IS 'A step, whether it is ready to be run, and why not.';
COMMENT ON COLUMN step_readiness_status.named_step_uuid IS 'Its step definition.';
COMMENT ON COLUMN step_readiness_status.dependencies_satisfied IS 'Every parent is complete or resolved_manually, and the conditions on their results hold; so it is without parents.';
COMMENT ON COLUMN step_readiness_status.retry_eligible IS 'No attempt was made yet, or it is retryable and has attempts left. When the next one may be made is no part of this.';
COMMENT ON COLUMN step_readiness_status.ready_for_execution IS 'It is pending or waiting_for_retry, the two before hold, and next_retry_at is not ahead.';
COMMENT ON COLUMN step_readiness_status.last_failure_at IS 'When it last came into one of the states that tell of a failure.';
COMMENT ON COLUMN step_readiness_status.next_retry_at IS 'When it may be tried again; null: at once, or its state is not one from which it will be.';
COMMENT ON COLUMN step_readiness_status.total_parents IS 'How many dependencies it has. A parent on which it depends under two names counts twice.';
COMMENT ON COLUMN step_readiness_status.completed_parents IS 'Those of them whose parent is complete or resolved_manually, whatever the conditions.';
COMMENT ON COLUMN step_readiness_status.retry_limit IS 'Attempts that it has in all.';

-- +goose StatementBegin
CREATE FUNCTION step_readiness(p_tasks uuid[], p_steps uuid[] DEFAULT NULL)
RETURNS SETOF step_readiness_status
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
-- Hashes of what index conditions find: ten thousand steps take a tenth of the time that it takes to look each parent up, and nothing
-- outside of the tasks is read however wrong the statistics are.
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_hashjoin = on SET enable_nestloop = off SET enable_mergejoin = off SET enable_sort = off
AS $$
DECLARE
    v_now  timestamptz := clock_timestamp();
    v_done uuid[]; -- of those that the steps depend on: to look them up in an array is faster than any join, as long as it is hashed
BEGIN
    IF p_steps IS NULL THEN
        v_done := ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = ANY (p_tasks) AND s.state IN ('complete', 'resolved_manually'));
    ELSE
        v_done := ARRAY(
            SELECT s.step_id
              FROM unnest(p_steps) AS a (step_id)
             CROSS JOIN LATERAL (SELECT w.from_step_id FROM step_dependencies w WHERE w.to_step_id BETWEEN a.step_id AND a.step_id ORDER BY w.to_step_id) AS d
             CROSS JOIN LATERAL (SELECT w.step_id, w.state FROM steps w WHERE w.step_id BETWEEN d.from_step_id AND d.from_step_id ORDER BY w.step_id) AS s
             WHERE s.state IN ('complete', 'resolved_manually'));
    END IF;
    RETURN QUERY
    WITH asked AS MATERIALIZED (SELECT DISTINCT u.step_id FROM unnest(p_steps) AS u (step_id))
    SELECT r.step_id, r.task_id, r.step_definition_id, r.name, r.state, r.satisfied, r.eligible,
           evaluate_step_state_readiness(r.state, r.processed, r.in_process, r.satisfied, r.eligible, r.retryable, r.next_retry_at, v_now),
           r.failed_at, r.next_retry_at, r.total, r.completed, r.attempts, r.max_attempts, r.backoff_request_seconds, r.last_attempted_at
      FROM (SELECT s.step_id, s.task_id, s.step_definition_id, s.name, s.state, s.processed, s.in_process, s.retryable,
                   s.attempts, s.max_attempts, s.backoff_request_seconds, s.last_attempted_at,
                   p.to_step_id IS NULL OR p.completed = p.total AND p.hold IS NOT FALSE AS satisfied,
                   coalesce(p.total, 0) AS total, coalesce(p.completed, 0) AS completed,
                   s.attempts = 0 OR s.retryable AND s.attempts < s.max_attempts AS eligible,
                   f.failed_at,
                   CASE WHEN s.next_attempt_at IS NOT NULL OR s.state NOT IN ('pending', 'waiting_for_retry') THEN s.next_attempt_at
                        WHEN s.backoff_request_seconds IS NOT NULL OR f.failed_at IS NOT NULL
                        THEN calculate_step_next_retry_time(s.backoff_request_seconds, s.last_attempted_at, f.failed_at, s.attempts)
                   END AS next_retry_at
              FROM (SELECT w.* FROM steps w WHERE p_steps IS NULL AND w.task_id = ANY (p_tasks)
                     UNION ALL
                    SELECT x.* FROM asked a CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN a.step_id AND a.step_id ORDER BY w.step_id) AS x
                     WHERE x.task_id = ANY (p_tasks)) AS s
              LEFT JOIN (
                    SELECT d.to_step_id, count(*)::integer AS total,
                           (count(*) FILTER (WHERE d.from_step_id IN (SELECT u.step_id FROM unnest(v_done) AS u (step_id))))::integer AS completed,
                           bool_and((SELECT coalesce(jsonb_path_match(c.results, d.condition, '{}', true), false) -- results are large, and rarely asked for
                                       FROM steps c WHERE c.step_id BETWEEN d.from_step_id AND d.from_step_id ORDER BY c.step_id LIMIT 1))
                               FILTER (WHERE d.condition IS NOT NULL) AS hold
                      FROM (SELECT w.to_step_id, w.from_step_id, w.condition FROM step_dependencies w WHERE p_steps IS NULL AND w.task_id = ANY (p_tasks)
                             UNION ALL
                            SELECT x.* FROM asked a CROSS JOIN LATERAL (SELECT w.to_step_id, w.from_step_id, w.condition FROM step_dependencies w
                                                                         WHERE w.to_step_id BETWEEN a.step_id AND a.step_id ORDER BY w.to_step_id) AS x) AS d
                     GROUP BY d.to_step_id) AS p ON p.to_step_id = s.step_id
              LEFT JOIN (
                    SELECT f.step_id, max(f.created_at) AS failed_at
                      FROM (SELECT w.step_id, w.created_at FROM step_transitions w
                             WHERE w.task_id = ANY (p_tasks) AND w.to_state IN ('enqueued_as_error_for_orchestration', 'waiting_for_retry', 'error')
                            OFFSET 0) AS f -- or it would be read in the order of an index, for the groups
                     GROUP BY f.step_id) AS f ON f.step_id = s.step_id) AS r;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION step_readiness IS 'Internal: the readiness of all steps of some tasks, or of some steps of a task, in no order.';

-- +goose StatementBegin
CREATE FUNCTION get_step_readiness_status(p_task_uuid uuid, p_step_uuids uuid[] DEFAULT NULL)
RETURNS SETOF step_readiness_status
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM step_readiness(ARRAY[p_task_uuid], p_step_uuids) AS r ORDER BY r.workflow_step_uuid;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_readiness_status IS 'Which steps of a task are ready to be run, and why the others are not; by id. Given ids, those of them that are steps of the task, with the same rows. None for an unknown task.';

-- +goose StatementBegin
CREATE FUNCTION get_step_readiness_status_batch(p_task_uuids uuid[])
RETURNS SETOF step_readiness_status
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM step_readiness(p_task_uuids) AS r ORDER BY r.task_uuid, r.workflow_step_uuid;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_readiness_status_batch IS 'get_step_readiness_status of several tasks at once, by task and step.';

-- +goose StatementBegin
CREATE FUNCTION get_ready_steps(p_task_uuid uuid)
RETURNS SETOF step_readiness_status
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM step_readiness(ARRAY[p_task_uuid]) AS r WHERE r.ready_for_execution ORDER BY r.workflow_step_uuid;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_ready_steps IS 'The steps of a task that are ready to be run, by id.';

-- +goose StatementBegin
CREATE FUNCTION check_step_dependencies(p_step_uuid uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off
AS $$
BEGIN
    RETURN (SELECT r.dependencies_satisfied
              FROM step_readiness(ARRAY(SELECT s.task_id FROM steps s WHERE s.step_id BETWEEN p_step_uuid AND p_step_uuid ORDER BY s.step_id),
                                  ARRAY[p_step_uuid]) AS r);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_step_dependencies IS 'Whether all that a step depends on is satisfied, see step_readiness_status. Null if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION detect_cycle(p_from_step_uuid uuid, p_to_step_uuid uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE STRICT
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
BEGIN
    RETURN p_from_step_uuid = p_to_step_uuid OR p_from_step_uuid IN (
        WITH RECURSIVE below AS (
            SELECT p_to_step_uuid AS step_id
             UNION -- and not UNION ALL: what was seen is not followed again
            SELECT d.to_step_id
              FROM below b
             CROSS JOIN LATERAL (SELECT w.to_step_id FROM step_dependencies w WHERE w.from_step_id BETWEEN b.step_id AND b.step_id ORDER BY w.from_step_id) AS d)
        SELECT b.step_id FROM below b);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION detect_cycle IS 'Whether the second step, if it were to wait for the first, would wait for itself. It tells what the transaction sees: whoever adds dependencies to a task holds the row lock of the task from before he asks.';

-- +goose StatementBegin
CREATE FUNCTION step_and_ancestors(p_step uuid)
RETURNS uuid[]
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE above AS (
            (SELECT s.step_id FROM steps s WHERE s.step_id BETWEEN p_step AND p_step ORDER BY s.step_id)
             UNION
            SELECT d.from_step_id
              FROM above a
             CROSS JOIN LATERAL (SELECT w.from_step_id FROM step_dependencies w WHERE w.to_step_id BETWEEN a.step_id AND a.step_id ORDER BY w.to_step_id) AS d)
        SELECT a.step_id FROM above a);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION step_and_ancestors IS 'Internal: a step and all that it depends on, in no order; empty if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION step_neighbours(
    p_steps uuid[], p_up boolean, OUT starts integer[], OUT neighbours integer[], OUT opposite integer[])
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = on SET enable_nestloop = off SET enable_mergejoin = off SET enable_sort = off
AS $$
BEGIN
    WITH nodes AS MATERIALIZED (
        SELECT u.step_id, u.place::integer FROM unnest(p_steps) WITH ORDINALITY AS u (step_id, place)),
    edges AS MATERIALIZED (
        SELECT CASE WHEN p_up THEN c.place ELSE p.place END AS place, CASE WHEN p_up THEN p.place ELSE c.place END AS neighbour
          FROM nodes c
         CROSS JOIN LATERAL (SELECT w.from_step_id FROM step_dependencies w WHERE w.to_step_id BETWEEN c.step_id AND c.step_id ORDER BY w.to_step_id) AS d
          JOIN nodes p ON p.step_id = d.from_step_id)
    SELECT array_agg(n.before + 1 ORDER BY n.place), array_agg(n.opposite ORDER BY n.place),
           coalesce((SELECT array_agg(e.neighbour ORDER BY e.place) FROM edges e), '{}')
      INTO starts, opposite, neighbours
      FROM (SELECT n.place, coalesce(theirs.edges, 0) AS opposite,
                   coalesce(sum(own.edges) OVER (ORDER BY n.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::integer AS before
              FROM (SELECT n.place FROM nodes n UNION ALL SELECT cardinality(p_steps) + 1) AS n
              LEFT JOIN (SELECT e.place, count(*)::integer AS edges FROM edges e GROUP BY e.place) AS own ON own.place = n.place
              LEFT JOIN (SELECT e.neighbour, count(*)::integer AS edges FROM edges e GROUP BY e.neighbour) AS theirs ON theirs.neighbour = n.place) AS n;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION step_neighbours IS 'Internal: the dependencies among some steps, which stand for their places in the array: the neighbours of step n, its children or with p_up its parents, are those from starts[n] to before starts[n + 1], and opposite[n] is how many it has on the other side.';

-- +goose StatementBegin
CREATE FUNCTION step_levels(p_steps uuid[])
RETURNS integer[]
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_count    integer := cardinality(p_steps);
    v_levels   integer[] := array_fill(NULL::integer, ARRAY[v_count]);
    v_queue    integer[] := array_fill(0, ARRAY[v_count]);
    v_head     integer := 1;
    v_tail     integer := 0;
    v_starts   integer[];
    v_children integer[];
    v_waits    integer[];
    v_step     integer;
    v_child    integer;
BEGIN
    SELECT n.starts, n.neighbours, n.opposite INTO v_starts, v_children, v_waits FROM step_neighbours(p_steps, false) AS n;
    FOR i IN 1 .. v_count LOOP
        IF v_waits[i] = 0 THEN
            v_levels[i] := 0;
            v_tail := v_tail + 1;
            v_queue[v_tail] := i;
        END IF;
    END LOOP;
    -- Kahn's algorithm: each dependency is followed once. Steps come into the queue in the order of their levels, so the parent that
    -- a step waited for last is one of the highest level. What is on a cycle, or behind one, never comes into it.
    WHILE v_head <= v_tail LOOP
        v_step := v_queue[v_head];
        v_head := v_head + 1;
        FOR i IN v_starts[v_step] .. v_starts[v_step + 1] - 1 LOOP
            v_child := v_children[i];
            v_waits[v_child] := v_waits[v_child] - 1;
            IF v_waits[v_child] = 0 THEN
                v_levels[v_child] := v_levels[v_step] + 1;
                v_tail := v_tail + 1;
                v_queue[v_tail] := v_child;
            END IF;
        END LOOP;
    END LOOP;
    RETURN v_levels;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION step_levels IS 'Internal: the levels of some steps, each in the place of its step; what they depend on and is not among them does not count.';

-- +goose StatementBegin
CREATE FUNCTION calculate_dependency_levels(p_task_uuid uuid)
RETURNS TABLE (workflow_step_uuid uuid, dependency_level integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
DECLARE
    v_steps uuid[] := ARRAY(SELECT s.step_id FROM steps s WHERE s.task_id = p_task_uuid);
BEGIN
    RETURN QUERY SELECT u.step_id, u.level FROM unnest(v_steps, step_levels(v_steps)) AS u (step_id, level) ORDER BY u.level, u.step_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION calculate_dependency_levels IS 'The steps of a task with their levels, by level and id: 0 without parents, or else one more than the highest level of a parent. Null, and last, for steps on a cycle or behind one: they never run. No row for an unknown task.';

-- +goose StatementBegin
CREATE FUNCTION calculate_step_depth(p_step_uuid uuid)
RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_steps uuid[] := step_and_ancestors(p_step_uuid);
BEGIN
    RETURN (step_levels(v_steps))[array_position(v_steps, p_step_uuid)];
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION calculate_step_depth IS 'The level of a step, as calculate_dependency_levels has it. Null if there is no such step.';

-- +goose StatementBegin
CREATE FUNCTION get_step_transitive_dependencies(p_step_uuid uuid)
RETURNS TABLE (step_name text, step_uuid uuid, task_uuid uuid, distance integer, processed boolean, results jsonb)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
    v_steps     uuid[] := step_and_ancestors(p_step_uuid);
    v_count     integer := cardinality(v_steps);
    v_distances integer[] := array_fill(NULL::integer, ARRAY[v_count]);
    v_queue     integer[] := array_fill(0, ARRAY[v_count]);
    v_head      integer := 1;
    v_tail      integer := 1;
    v_starts    integer[];
    v_parents   integer[];
    v_step      integer;
    v_parent    integer;
BEGIN
    IF v_count = 0 THEN
        RETURN;
    END IF;
    SELECT n.starts, n.neighbours INTO v_starts, v_parents FROM step_neighbours(v_steps, true) AS n;
    v_queue[1] := array_position(v_steps, p_step_uuid);
    v_distances[v_queue[1]] := 0;
    WHILE v_head <= v_tail LOOP -- breadth first: whatever is met again is nearer already
        v_step := v_queue[v_head];
        v_head := v_head + 1;
        FOR i IN v_starts[v_step] .. v_starts[v_step + 1] - 1 LOOP
            v_parent := v_parents[i];
            IF v_distances[v_parent] IS NULL THEN
                v_distances[v_parent] := v_distances[v_step] + 1;
                v_tail := v_tail + 1;
                v_queue[v_tail] := v_parent;
            END IF;
        END LOOP;
    END LOOP;
    RETURN QUERY
    SELECT s.name, s.step_id, s.task_id, u.distance, s.processed, s.results
      FROM unnest(v_steps, v_distances) AS u (step_id, distance)
     CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN u.step_id AND u.step_id ORDER BY w.step_id) AS s
     WHERE u.distance > 0
     ORDER BY u.distance, s.step_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_transitive_dependencies IS 'All that a step depends on, its parents at distance 1, by distance and id: each once, at its smallest distance. processed: it is complete, cancelled or resolved_manually. No row for an unknown step.';

-- +goose StatementBegin
CREATE FUNCTION get_step_dependency_results_map(p_step_uuid uuid)
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
BEGIN
    RETURN (SELECT coalesce(jsonb_object_agg(s.name, s.results), '{}')
              FROM unnest(step_and_ancestors(p_step_uuid)) AS u (step_id)
             CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.step_id BETWEEN u.step_id AND u.step_id ORDER BY w.step_id) AS s
             WHERE s.processed AND s.results IS NOT NULL AND s.step_id <> p_step_uuid);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_dependency_results_map IS 'Results of all that a step depends on, by name of step: of those that are processed and have one, which the skipped and the resolved do not.';

CREATE TYPE task_execution_context AS (
    task_uuid                 uuid,
    named_task_uuid           uuid,
    status                    text,
    total_steps               bigint,
    pending_steps             bigint,
    enqueued_steps            bigint,
    in_progress_steps         bigint,
    waiting_for_retry_steps   bigint,
    completed_steps           bigint,
    failed_steps              bigint,
    cancelled_steps           bigint,
    ready_steps               bigint,
    permanently_blocked_steps bigint,
    execution_status          text,
    recommended_action        text,
    completion_percentage     numeric,
    health_status             text,
    next_ready_at             timestamptz
);
COMMENT ON TYPE task_execution_context IS 'How a task is doing. Every step is in one of the counts from pending to cancelled; ready and permanently blocked ones are in another as well.';
COMMENT ON COLUMN task_execution_context.named_task_uuid IS 'Its task definition.';
COMMENT ON COLUMN task_execution_context.status IS 'Its state.';
COMMENT ON COLUMN task_execution_context.enqueued_steps IS 'enqueued, enqueued_for_orchestration and enqueued_as_error_for_orchestration.';
COMMENT ON COLUMN task_execution_context.completed_steps IS 'complete and resolved_manually.';
COMMENT ON COLUMN task_execution_context.permanently_blocked_steps IS 'Steps that somebody has to see to before the task can end well: errors and, until the task itself has ended, cancelled ones.';
COMMENT ON COLUMN task_execution_context.execution_status IS 'The first that holds: blocked_by_failures (permanently blocked steps), has_ready_steps, processing (steps enqueued or in progress), all_complete (every step completed or, of a task that has ended, cancelled; so it is without steps), waiting_for_dependencies.';
COMMENT ON COLUMN task_execution_context.recommended_action IS 'By execution_status: handle_failures, execute_ready_steps, wait_for_completion, finalize_task, wait_for_dependencies.';
COMMENT ON COLUMN task_execution_context.completion_percentage IS 'completed_steps of total_steps, to two places; 100 without steps.';
COMMENT ON COLUMN task_execution_context.health_status IS 'blocked (permanently blocked steps), recovering (steps that are waiting_for_retry, or pending after an attempt), healthy.';
COMMENT ON COLUMN task_execution_context.next_ready_at IS 'When the next of its steps is ready that waits for nothing but that instant; null: none does.';

-- +goose StatementBegin
CREATE FUNCTION get_task_execution_contexts_batch(p_task_uuids uuid[])
RETURNS SETOF task_execution_context
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_hashjoin = on SET enable_nestloop = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    WITH counts AS (
        SELECT r.task_uuid,
               count(*) AS total,
               count(*) FILTER (WHERE r.current_state = 'pending') AS pending,
               count(*) FILTER (WHERE r.current_state IN ('enqueued', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration')) AS enqueued,
               count(*) FILTER (WHERE r.current_state = 'in_progress') AS in_progress,
               count(*) FILTER (WHERE r.current_state = 'waiting_for_retry') AS waiting,
               count(*) FILTER (WHERE r.current_state IN ('complete', 'resolved_manually')) AS completed,
               count(*) FILTER (WHERE r.current_state = 'error') AS failed,
               count(*) FILTER (WHERE r.current_state = 'cancelled') AS cancelled,
               count(*) FILTER (WHERE r.ready_for_execution) AS ready,
               count(*) FILTER (WHERE r.current_state = 'waiting_for_retry' OR r.current_state = 'pending' AND r.attempts > 0) AS recovering,
               min(r.next_retry_at) FILTER (WHERE r.current_state IN ('pending', 'waiting_for_retry') AND r.dependencies_satisfied
                                              AND r.retry_eligible AND NOT r.ready_for_execution) AS next_ready_at
          FROM step_readiness(p_task_uuids) AS r
         GROUP BY r.task_uuid),
    counted AS (
        SELECT t.task_id, t.task_definition_id, t.state, coalesce(c.total, 0) AS total, coalesce(c.pending, 0) AS pending,
               coalesce(c.enqueued, 0) AS enqueued, coalesce(c.in_progress, 0) AS in_progress, coalesce(c.waiting, 0) AS waiting,
               coalesce(c.completed, 0) AS completed, coalesce(c.failed, 0) AS failed, coalesce(c.cancelled, 0) AS cancelled,
               coalesce(c.ready, 0) AS ready, coalesce(c.recovering, 0) AS recovering, c.next_ready_at,
               coalesce(c.failed, 0) + CASE WHEN is_terminal(t.state) THEN 0 ELSE coalesce(c.cancelled, 0) END AS blocked
          FROM tasks t LEFT JOIN counts c ON c.task_uuid = t.task_id
         WHERE t.task_id = ANY (p_task_uuids)),
    decided AS (
        SELECT c.*, CASE WHEN c.blocked > 0 THEN 'blocked_by_failures'
                         WHEN c.ready > 0 THEN 'has_ready_steps'
                         WHEN c.in_progress + c.enqueued > 0 THEN 'processing'
                         WHEN c.completed + CASE WHEN is_terminal(c.state) THEN c.cancelled ELSE 0 END = c.total THEN 'all_complete'
                         ELSE 'waiting_for_dependencies' END AS execution_status
          FROM counted c)
    SELECT d.task_id, d.task_definition_id, d.state, d.total, d.pending, d.enqueued, d.in_progress, d.waiting, d.completed, d.failed, d.cancelled,
           d.ready, d.blocked, d.execution_status,
           CASE d.execution_status WHEN 'blocked_by_failures' THEN 'handle_failures'
                                   WHEN 'has_ready_steps' THEN 'execute_ready_steps'
                                   WHEN 'processing' THEN 'wait_for_completion'
                                   WHEN 'all_complete' THEN 'finalize_task'
                                   ELSE 'wait_for_dependencies' END,
           CASE WHEN d.total = 0 THEN 100.00 ELSE round(100.0 * d.completed / d.total, 2) END,
           CASE WHEN d.blocked > 0 THEN 'blocked' WHEN d.recovering > 0 THEN 'recovering' ELSE 'healthy' END,
           d.next_ready_at
      FROM decided d
     ORDER BY d.task_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_task_execution_contexts_batch IS 'get_task_execution_context of several tasks at once, by id; no row for an unknown one.';

-- +goose StatementBegin
CREATE FUNCTION get_task_execution_context(p_task_uuid uuid)
RETURNS SETOF task_execution_context
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT c.* FROM get_task_execution_contexts_batch(ARRAY[p_task_uuid]) AS c;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_task_execution_context IS 'How a task is doing, and what to do about it; no row for an unknown one.';

-- +goose StatementBegin
CREATE FUNCTION hours_since_2000(p_at timestamptz)
RETURNS float8
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (date_part('epoch', p_at) - 946684800) / 3600;
-- +goose StatementEnd
COMMENT ON FUNCTION hours_since_2000 IS 'Internal: an instant as age is counted in task_priority_key.';

-- +goose StatementBegin
CREATE FUNCTION hours_overdue(p_deadline timestamptz, p_at timestamptz)
RETURNS float8
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(greatest(date_part('epoch', p_at) - date_part('epoch', p_deadline), 0) / 3600, 0);
-- +goose StatementEnd
COMMENT ON FUNCTION hours_overdue IS 'Internal: by how many hours a deadline is past; 0 without one.';

-- +goose StatementBegin
CREATE FUNCTION task_priority_key(p_namespace text, p_priority integer, p_retries integer, p_created_at timestamptz)
RETURNS float8
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (SELECT p_priority + s.retry_weight * p_retries - s.age_weight * hours_since_2000(p_created_at)
                   + CASE WHEN jsonb_typeof(s.namespace_priority -> p_namespace) = 'number'
                          THEN (s.namespace_priority ->> p_namespace)::float8 ELSE 0 END
              FROM taskgraph_settings s);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION task_priority_key IS 'Internal: what tasks.priority_key has to be: the computed priority without that of a deadline, as of the year 2000. Of two tasks the one with the larger key has the higher priority, whenever one asks, as long as neither is past its deadline.';

CREATE TYPE ready_task_info AS (
    task_uuid         uuid,
    task_name         text,
    priority          integer,
    namespace_name    text,
    ready_steps_count bigint,
    computed_priority numeric,
    current_state     text
);
COMMENT ON TYPE ready_task_info IS 'A task, how many of its steps are ready, and how urgent it is.';
COMMENT ON COLUMN ready_task_info.priority IS 'That it was created with.';
COMMENT ON COLUMN ready_task_info.computed_priority IS 'Priority and, by the weights of taskgraph_settings, its age in hours, its namespace, how often a step of it went to wait for another attempt, and how many hours it is past its deadline.';

-- +goose StatementBegin
CREATE FUNCTION ready_task_infos(p_tasks uuid[], p_ready bigint[], p_at timestamptz)
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
COMMENT ON FUNCTION ready_task_infos IS 'Internal: tasks, of which so many steps are ready, in the order given.';

-- +goose StatementBegin
CREATE FUNCTION get_next_ready_tasks(p_limit integer DEFAULT 5)
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
COMMENT ON FUNCTION get_next_ready_tasks IS 'Tasks that wait to be taken up, pending ones and those in waiting_for_dependencies and waiting_for_retry that have steps that are ready, by computed priority, age and id. It locks them until the end of the transaction: meanwhile other callers get others. PW003 if the limit is negative.';

-- +goose StatementBegin
CREATE FUNCTION get_next_ready_task()
RETURNS SETOF ready_task_info
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT r.* FROM get_next_ready_tasks(1) AS r;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_next_ready_task IS 'The first of get_next_ready_tasks.';

-- +goose StatementBegin
CREATE FUNCTION get_task_ready_info(p_task_uuid uuid)
RETURNS SETOF ready_task_info
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT i.* FROM ready_task_infos(
        ARRAY[p_task_uuid], ARRAY(SELECT count(*) FROM step_readiness(ARRAY[p_task_uuid]) AS r WHERE r.ready_for_execution), clock_timestamp()) AS i;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_task_ready_info IS 'What get_next_ready_tasks tells of a task, for any one, whatever its state and whoever holds it; no row for an unknown one.';

-- One result by itself: all of a join may be more than one jsonb can hold.

-- +goose StatementBegin
CREATE FUNCTION get_step_dependency_result(p_step_uuid uuid, p_name text)
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
BEGIN
    RETURN (SELECT s.results
              FROM (SELECT w.task_id FROM steps w WHERE w.step_id BETWEEN p_step_uuid AND p_step_uuid ORDER BY w.step_id) AS own
             CROSS JOIN LATERAL (SELECT w.* FROM steps w WHERE w.task_id = own.task_id AND w.name BETWEEN p_name AND p_name ORDER BY w.name) AS s
             WHERE s.processed AND s.step_id <> p_step_uuid AND s.step_id = ANY (step_and_ancestors(p_step_uuid)));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_dependency_result IS 'The result of one step that a step depends on, by name, as get_step_dependency_results_map has it. Null if it has none, and if the step does not depend on one of that name.';

-- +goose Down

DROP FUNCTION get_step_dependency_result;
DROP FUNCTION get_task_ready_info, get_next_ready_task, get_next_ready_tasks, ready_task_infos, task_priority_key, hours_overdue, hours_since_2000,
    get_task_execution_context, get_task_execution_contexts_batch, get_step_dependency_results_map, get_step_transitive_dependencies,
    calculate_step_depth, calculate_dependency_levels, step_levels, step_neighbours, step_and_ancestors, detect_cycle, check_step_dependencies,
    get_ready_steps, get_step_readiness_status_batch, get_step_readiness_status, step_readiness, evaluate_step_state_readiness,
    calculate_step_next_retry_time, calculate_backoff_delay;
DROP TYPE ready_task_info, task_execution_context, step_readiness_status;
DROP INDEX step_transitions_failures_idx;
