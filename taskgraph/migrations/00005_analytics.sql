-- What is said of all tasks together: how many, how fast, what is stuck or stale; what was when; and who has to look into what.

-- +goose Up

-- How many tasks and steps there are in each state, and how often and how long they ran, is added up from the two logs of transitions:
-- up to a cursor in the tables below, by refresh_rollups, and from there on by whoever asks. So an answer is exact at any time, and
-- costs as much as has happened since the last refresh, whatever there is in all; and no transition pays for it.

CREATE TABLE rollup_cursor (
    singleton     boolean     NOT NULL DEFAULT true PRIMARY KEY CONSTRAINT rollup_cursor_singleton_check CHECK (singleton),
    xact          xid8        NOT NULL DEFAULT '0',
    transition_id bigint      NOT NULL DEFAULT 0,
    refreshed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE rollup_cursor IS 'Up to where the transitions are in state_counts and run_rollups, in the order of read_transitions; one row. Whoever changes one of the three has it locked.';
INSERT INTO rollup_cursor DEFAULT VALUES;

CREATE TABLE state_counts (
    kind  text   NOT NULL CONSTRAINT state_counts_kind_check CHECK (kind IN ('task', 'step')),
    state text   NOT NULL,
    n     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (kind, state)
) WITH (fillfactor = 50);
COMMENT ON TABLE state_counts IS 'How many tasks and steps are in each state, as of rollup_cursor.';
INSERT INTO state_counts (kind, state)
SELECT 'task', state FROM unnest(ARRAY['pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results', 'waiting_for_dependencies',
                                       'waiting_for_retry', 'blocked_by_failures', 'complete', 'error', 'cancelled', 'resolved_manually']) AS s (state)
UNION ALL
SELECT 'step', state FROM unnest(ARRAY['pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration',
                                       'waiting_for_retry', 'complete', 'error', 'cancelled', 'resolved_manually']) AS s (state);

CREATE TABLE run_rollups (
    bucket        timestamptz NOT NULL,
    kind          text        NOT NULL CONSTRAINT run_rollups_kind_check CHECK (kind IN ('task', 'step')),
    definition_id uuid        NOT NULL,
    created       bigint      NOT NULL,
    runs          bigint      NOT NULL,
    errors        bigint      NOT NULL,
    untimed       bigint      NOT NULL,
    seconds       float8      NOT NULL,
    error_seconds float8      NOT NULL,
    longest       float8,
    shortest      float8,
    steps         bigint      NOT NULL,
    latest        timestamptz,
    first_xact    xid8        NOT NULL,
    last_xact     xid8        NOT NULL,
    PRIMARY KEY (bucket, kind, definition_id)
);
COMMENT ON TABLE run_rollups IS 'What happened in five minutes to the tasks of a definition, or to steps of one, as of rollup_cursor. For 32 days, also if the tasks are removed before.';
COMMENT ON COLUMN run_rollups.definition_id IS 'In task_definitions or in step_definitions.';
COMMENT ON COLUMN run_rollups.runs IS 'Tasks that became complete or ended in error; attempts at steps that ended.';
COMMENT ON COLUMN run_rollups.errors IS 'Of these, those that failed.';
COMMENT ON COLUMN run_rollups.untimed IS 'Of the errors, those of which nobody knows how long they took: the worker was lost.';
COMMENT ON COLUMN run_rollups.seconds IS 'All runs together, the errors included; error_seconds, longest and shortest alike.';
COMMENT ON COLUMN run_rollups.steps IS 'Steps of the tasks that ended.';
COMMENT ON COLUMN run_rollups.first_xact IS 'In which transactions, from and to, all that was written.';

-- +goose StatementBegin
CREATE FUNCTION tally_states(p_after_xact xid8, p_after_id bigint, p_until_xact xid8 DEFAULT '18446744073709551615', p_until_id bigint DEFAULT 9223372036854775807)
RETURNS TABLE (kind text, state text, n bigint)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET max_parallel_workers_per_gather = 0 -- it is little as a rule, and the planner cannot know
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN QUERY
    SELECT x.kind, change.state, sum(change.n)::bigint
      FROM (SELECT 'task' AS kind, t.from_state, t.to_state FROM task_transitions t
             WHERE (t.xact, t.transition_id) > (p_after_xact, p_after_id) AND (t.xact, t.transition_id) <= (p_until_xact, p_until_id)
            UNION ALL
            SELECT 'step', s.from_state, s.to_state FROM step_transitions s
             WHERE (s.xact, s.transition_id) > (p_after_xact, p_after_id) AND (s.xact, s.transition_id) <= (p_until_xact, p_until_id)) AS x
     CROSS JOIN LATERAL (VALUES (x.from_state, -1), (x.to_state, 1)) AS change (state, n)
     WHERE change.state IS NOT NULL
     GROUP BY x.kind, change.state;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION tally_states IS 'Internal: by how much the transitions between two cursors changed the number of tasks and steps in each state.';

-- +goose StatementBegin
CREATE FUNCTION tally_runs(
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
COMMENT ON FUNCTION tally_runs IS 'Internal: what the transitions between two cursors, and two instants, are as rows of run_rollups.';

-- +goose StatementBegin
CREATE FUNCTION add_runs(p_since timestamptz, p_after_xact xid8, p_after_id bigint, p_until_xact xid8, p_until_id bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO run_rollups AS r
    SELECT * FROM tally_runs(p_since, p_after_xact, p_after_id, p_until_xact, p_until_id)
    ON CONFLICT (bucket, kind, definition_id) DO UPDATE
       SET created = r.created + excluded.created, runs = r.runs + excluded.runs, errors = r.errors + excluded.errors, untimed = r.untimed + excluded.untimed,
           seconds = r.seconds + excluded.seconds, error_seconds = r.error_seconds + excluded.error_seconds, longest = greatest(r.longest, excluded.longest),
           shortest = least(r.shortest, excluded.shortest), steps = r.steps + excluded.steps, latest = greatest(r.latest, excluded.latest),
           first_xact = least(r.first_xact, excluded.first_xact), last_xact = greatest(r.last_xact, excluded.last_xact);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION add_runs IS 'Internal: adds to run_rollups what the transitions between two cursors, from an instant on, amount to.';

-- +goose StatementBegin
CREATE FUNCTION adopt_transitions(p_from rollup_cursor, p_xact xid8)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_next  xid8;
    v_tasks bigint;
    v_steps bigint;
BEGIN
    -- Whoever has written there has committed, and nobody writes until this has: so nothing of theirs has a number from v_next on.
    LOCK TABLE task_transitions, step_transitions IN SHARE ROW EXCLUSIVE MODE;
    v_next := pg_snapshot_xmax(pg_current_snapshot());
    -- What was not added up on the other server, and what was written on this one since.
    PERFORM add_runs('-infinity', p_from.xact, p_from.transition_id, '18446744073709551615', 9223372036854775807);
    PERFORM add_runs(p_from.refreshed_at, '0', 0, p_xact, 0);
    -- Invariant (numbers): no transaction of this server has one from v_next on, so all these came with the tables. From here on they are
    -- older than any that is still to come. 3 is the first number that there is.
    UPDATE task_transitions x SET xact = '3' WHERE x.xact >= v_next;
    GET DIAGNOSTICS v_tasks = ROW_COUNT;
    UPDATE step_transitions x SET xact = '3' WHERE x.xact >= v_next;
    GET DIAGNOSTICS v_steps = ROW_COUNT;
    UPDATE run_rollups SET first_xact = '0', last_xact = p_xact;
    UPDATE rollup_cursor SET xact = p_xact, transition_id = 0, refreshed_at = clock_timestamp();
    PERFORM recount_states();
    RETURN v_tasks + v_steps;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION adopt_transitions IS 'Internal: goes on with tables that were restored from those of a server whose transactions had higher numbers than this one''s have.';

-- +goose StatementBegin
CREATE FUNCTION refresh_rollups(p_limit integer DEFAULT 100000)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_from  rollup_cursor;
    v_xact  xid8;
    v_id    bigint;
    v_last  record;
    v_found bigint := 0;
BEGIN
    IF coalesce(p_limit < 1, true) THEN
        RAISE EXCEPTION 'at least one transition has to be added up' USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_from FROM rollup_cursor FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0; -- somebody is at it
    END IF;
    -- Invariant (exactly once): what has an xact below this is committed or never will be, so nothing comes up behind the cursor.
    v_xact := pg_snapshot_xmin(pg_current_snapshot());
    v_id := 0;
    IF v_from.xact > pg_snapshot_xmax(pg_current_snapshot()) THEN
        RETURN adopt_transitions(v_from, v_xact);
    END IF;
    -- The last one that there is room for, and which one that is.
    SELECT x.xact, x.transition_id, x.n INTO v_last
      FROM (SELECT merged.xact, merged.transition_id, row_number() OVER (ORDER BY merged.xact, merged.transition_id) AS n FROM (
                (SELECT l.xact, l.transition_id FROM task_transitions l
                  WHERE (l.xact, l.transition_id) > (v_from.xact, v_from.transition_id) AND l.xact < v_xact ORDER BY l.xact, l.transition_id LIMIT p_limit)
                UNION ALL
                (SELECT l.xact, l.transition_id FROM step_transitions l
                  WHERE (l.xact, l.transition_id) > (v_from.xact, v_from.transition_id) AND l.xact < v_xact ORDER BY l.xact, l.transition_id LIMIT p_limit)) AS merged) AS x
     WHERE x.n <= p_limit ORDER BY x.n DESC LIMIT 1;
    IF FOUND THEN
        v_found := v_last.n;
        IF v_found = p_limit THEN
            v_xact := v_last.xact;
            v_id := v_last.transition_id;
        END IF;
    END IF;
    IF v_found > 0 THEN
        UPDATE state_counts c SET n = c.n + d.n
          FROM tally_states(v_from.xact, v_from.transition_id, v_xact, v_id) AS d WHERE c.kind = d.kind AND c.state = d.state AND d.n <> 0;
        PERFORM add_runs('-infinity', v_from.xact, v_from.transition_id, v_xact, v_id);
        DELETE FROM run_rollups r WHERE r.bucket < clock_timestamp() - interval '32 days';
    END IF;
    UPDATE rollup_cursor SET xact = v_xact, transition_id = v_id, refreshed_at = clock_timestamp();
    RETURN v_found;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION refresh_rollups IS 'Adds up what happened since it was last called, up to p_limit transitions, so that get_system_health_counts, get_analytics_metrics, get_slowest_steps and get_slowest_tasks need not; returns how many that were. Their answers are the same before and after. Of several callers at once one does it, and the others return 0. PW003 if p_limit is not positive.';

-- +goose StatementBegin
CREATE FUNCTION uncount_transitions()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_cursor rollup_cursor;
BEGIN
    -- A refresh that is under way is waited for, and one that comes finds the transitions gone.
    SELECT * INTO v_cursor FROM rollup_cursor FOR UPDATE;
    UPDATE state_counts c SET n = c.n - d.n
      FROM (SELECT change.state, sum(change.n)::bigint AS n
              FROM removed r CROSS JOIN LATERAL (VALUES (r.from_state, -1), (r.to_state, 1)) AS change (state, n)
             WHERE (r.xact, r.transition_id) <= (v_cursor.xact, v_cursor.transition_id)
             GROUP BY change.state) AS d
     WHERE c.kind = TG_ARGV[0] AND c.state = d.state;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION uncount_transitions IS 'Internal: takes out of state_counts what is removed from a log of transitions.';

CREATE TRIGGER task_transitions_uncount AFTER DELETE ON task_transitions
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION uncount_transitions('task');
CREATE TRIGGER step_transitions_uncount AFTER DELETE ON step_transitions
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION uncount_transitions('step');

-- +goose StatementBegin
CREATE FUNCTION recount_states()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET jit = off
AS $$
BEGIN
    PERFORM FROM rollup_cursor FOR UPDATE;
    UPDATE state_counts c SET n = coalesce(now_there.n, 0) - coalesce(since.n, 0)
      FROM state_counts k
      LEFT JOIN (SELECT 'task' AS kind, t.state, count(*) AS n FROM tasks t GROUP BY t.state
                 UNION ALL
                 SELECT 'step', s.state, count(*) FROM steps s GROUP BY s.state) AS now_there ON now_there.kind = k.kind AND now_there.state = k.state
      LEFT JOIN (SELECT d.* FROM rollup_cursor r CROSS JOIN LATERAL tally_states(r.xact, r.transition_id) AS d) AS since ON since.kind = k.kind AND since.state = k.state
     WHERE c.kind = k.kind AND c.state = k.state;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION recount_states IS 'Counts tasks and steps anew, from their tables, for when these were changed by hand. It reads all of them.';

-- +goose StatementBegin
CREATE FUNCTION get_system_health_counts()
RETURNS TABLE (
    pending_tasks bigint, initializing_tasks bigint, enqueuing_steps_tasks bigint, steps_in_process_tasks bigint, evaluating_results_tasks bigint,
    waiting_for_dependencies_tasks bigint, waiting_for_retry_tasks bigint, blocked_by_failures_tasks bigint, complete_tasks bigint, error_tasks bigint,
    cancelled_tasks bigint, resolved_manually_tasks bigint, total_tasks bigint,
    pending_steps bigint, enqueued_steps bigint, in_progress_steps bigint, enqueued_for_orchestration_steps bigint,
    enqueued_as_error_for_orchestration_steps bigint, waiting_for_retry_steps bigint, complete_steps bigint, error_steps bigint, cancelled_steps bigint,
    resolved_manually_steps bigint, total_steps bigint, active_connections bigint, max_connections bigint)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET jit = off
AS $$
DECLARE
    v_tasks jsonb;
    v_steps jsonb;
BEGIN
    -- One statement, so that the cursor and what lies before and after it are of one snapshot. Of tasks that have not ended there is an
    -- index, the same one that has those in error.
    SELECT jsonb_object_agg(k.state, k.n) FILTER (WHERE k.kind = 'task'), jsonb_object_agg(k.state, k.n) FILTER (WHERE k.kind = 'step')
      INTO v_tasks, v_steps
      FROM (SELECT c.kind, c.state, sum(c.n) AS n
              FROM (SELECT s.kind, s.state, s.n FROM state_counts s
                    UNION ALL
                    SELECT d.kind, d.state, d.n FROM rollup_cursor r CROSS JOIN LATERAL tally_states(r.xact, r.transition_id) AS d) AS c
             WHERE c.kind = 'step' OR c.state IN ('complete', 'cancelled', 'resolved_manually')
             GROUP BY c.kind, c.state
            UNION ALL
            SELECT 'task', t.state, count(*) FROM tasks t WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') GROUP BY t.state) AS k;
    RETURN QUERY
    SELECT t.pending, t.initializing, t.enqueuing_steps, t.steps_in_process, t.evaluating_results, t.waiting_for_dependencies, t.waiting_for_retry,
           t.blocked_by_failures, t.complete, t.error, t.cancelled, t.resolved_manually, (SELECT sum(e.value::bigint)::bigint FROM jsonb_each_text(v_tasks) AS e),
           s.pending, s.enqueued, s.in_progress, s.enqueued_for_orchestration, s.enqueued_as_error_for_orchestration, s.waiting_for_retry,
           s.complete, s.error, s.cancelled, s.resolved_manually, (SELECT sum(e.value::bigint)::bigint FROM jsonb_each_text(v_steps) AS e),
           -- Of others' sessions a role may see that they are there, and no more.
           (SELECT count(*) FROM pg_stat_activity a WHERE a.datid IS NOT NULL AND a.usesysid IS NOT NULL AND coalesce(a.backend_type, 'client backend') = 'client backend'),
           current_setting('max_connections')::bigint
      FROM jsonb_to_record('{"pending": 0, "initializing": 0, "enqueuing_steps": 0, "steps_in_process": 0, "evaluating_results": 0, "waiting_for_dependencies": 0,
                             "waiting_for_retry": 0, "blocked_by_failures": 0, "error": 0}' || v_tasks)
           AS t (pending bigint, initializing bigint, enqueuing_steps bigint, steps_in_process bigint, evaluating_results bigint, waiting_for_dependencies bigint,
                 waiting_for_retry bigint, blocked_by_failures bigint, complete bigint, error bigint, cancelled bigint, resolved_manually bigint)
     CROSS JOIN jsonb_to_record(v_steps)
           AS s (pending bigint, enqueued bigint, in_progress bigint, enqueued_for_orchestration bigint, enqueued_as_error_for_orchestration bigint,
                 waiting_for_retry bigint, complete bigint, error bigint, cancelled bigint, resolved_manually bigint);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_system_health_counts IS 'How many tasks and steps are in each state, and in all, and how many connections the server has and may have. It costs as much as there are tasks that have not ended, and transitions since the last refresh_rollups.';

-- +goose StatementBegin
CREATE FUNCTION runs_since(p_kind text, p_since timestamptz)
RETURNS TABLE (
    definition_id uuid, created bigint, runs bigint, errors bigint, untimed bigint, seconds float8, error_seconds float8, longest float8, shortest float8,
    steps bigint, latest timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_bucket timestamptz := date_bin('5 min', greatest(p_since, '-infinity'), 'epoch'); -- the one that p_since is in the middle of
BEGIN
    RETURN QUERY
    SELECT r.definition_id, sum(r.created)::bigint, sum(r.runs)::bigint, sum(r.errors)::bigint, sum(r.untimed)::bigint, sum(r.seconds), sum(r.error_seconds),
           max(r.longest), min(r.shortest), sum(r.steps)::bigint, max(r.latest)
      FROM (SELECT b.* FROM run_rollups b WHERE b.bucket > v_bucket
            UNION ALL
            SELECT first.* FROM rollup_cursor c
             CROSS JOIN LATERAL (SELECT min(b.first_xact::text::numeric)::text::xid8 AS from_xact, max(b.last_xact::text::numeric)::text::xid8 AS to_xact
                                   FROM run_rollups b WHERE b.bucket = v_bucket) AS span
             CROSS JOIN LATERAL tally_runs(p_since, span.from_xact, 0, least(span.to_xact, c.xact),
                                           CASE WHEN span.to_xact < c.xact THEN 9223372036854775807 ELSE c.transition_id END, v_bucket + interval '5 min') AS first
             WHERE span.from_xact IS NOT NULL
            UNION ALL
            SELECT later.* FROM rollup_cursor c CROSS JOIN LATERAL tally_runs(p_since, c.xact, c.transition_id) AS later) AS r
     WHERE r.kind = p_kind
     GROUP BY r.definition_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION runs_since IS 'Internal: what happened since an instant, by definition (of tasks, or of steps), as run_rollups has it: whole buckets from there, the first one, which is cut, and what came after the cursor from the log.';

-- +goose StatementBegin
CREATE FUNCTION get_analytics_metrics(p_since_timestamp timestamptz DEFAULT NULL)
RETURNS TABLE (
    active_tasks_count bigint, total_namespaces_count bigint, unique_task_types_count bigint, system_health_score numeric,
    task_throughput bigint, completion_count bigint, error_count bigint, completion_rate numeric, error_rate numeric,
    avg_task_duration numeric, avg_step_duration numeric, step_throughput bigint, analysis_period_start timestamptz, calculated_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_since timestamptz := coalesce(p_since_timestamp, v_now - interval '1 hour');
BEGIN
    RETURN QUERY
    SELECT (SELECT count(*) FROM tasks t WHERE t.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND t.state <> 'error'), -- as the index has it
           (SELECT count(DISTINCT n.name) FROM namespaces n),
           (SELECT count(*) FROM (SELECT DISTINCT d.namespace, d.name FROM task_definitions d) AS d),
           round(coalesce((t.runs - t.errors)::numeric / nullif(t.runs, 0), 1), 3),
           t.created, t.runs - t.errors, t.errors,
           round(coalesce(100 * (t.runs - t.errors)::numeric / nullif(t.created, 0), 0), 2),
           round(coalesce(100 * t.errors::numeric / nullif(t.created, 0), 0), 2),
           round(coalesce((t.seconds - t.error_seconds) / nullif(t.runs - t.errors, 0), 0)::numeric, 3),
           round(coalesce((s.seconds - s.error_seconds) / nullif(s.runs - s.errors, 0), 0)::numeric, 3),
           s.runs - s.errors, v_since, v_now
      FROM (SELECT coalesce(sum(r.created), 0)::bigint AS created, coalesce(sum(r.runs), 0)::bigint AS runs, coalesce(sum(r.errors), 0)::bigint AS errors,
                   sum(r.seconds) AS seconds, sum(r.error_seconds) AS error_seconds FROM runs_since('task', v_since) AS r) AS t
     CROSS JOIN (SELECT coalesce(sum(r.runs), 0)::bigint AS runs, coalesce(sum(r.errors), 0)::bigint AS errors,
                        sum(r.seconds) AS seconds, sum(r.error_seconds) AS error_seconds FROM runs_since('step', v_since) AS r) AS s;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_analytics_metrics IS 'What happened since an instant, by default in the last hour. task_throughput are the tasks that were created, completion_count and error_count those that became complete or ended in error, and completion_rate and error_rate these in percent of task_throughput: over 100 while more end than begin. system_health_score is the share of the complete ones among those that ended so, 1 if none did, and avg_task_duration how many seconds a complete one took from its creation. step_throughput are the attempts at steps that succeeded, avg_step_duration the seconds of one. active_tasks_count are the tasks that have not ended by now. A mean over nothing is 0. Times further back than 32 days are not known.';

-- +goose StatementBegin
CREATE FUNCTION get_slowest_steps(
    p_since_timestamp timestamptz DEFAULT NULL, p_limit_count integer DEFAULT 10, p_namespace_filter text DEFAULT NULL,
    p_task_name_filter text DEFAULT NULL, p_version_filter text DEFAULT NULL)
RETURNS TABLE (
    named_step_uuid uuid, namespace_name text, task_name text, version text, step_name text,
    avg_duration_seconds numeric, max_duration_seconds numeric, min_duration_seconds numeric,
    execution_count bigint, error_count bigint, error_rate numeric, last_executed_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    IF p_limit_count < 0 THEN
        RAISE EXCEPTION 'a limit is not negative' USING ERRCODE = 'PW003';
    END IF;
    RETURN QUERY
    SELECT d.step_definition_id, td.namespace, td.name, td.version, d.name,
           round((r.seconds / nullif(r.runs - r.untimed, 0))::numeric, 3), round(r.longest::numeric, 3), round(r.shortest::numeric, 3),
           r.runs, r.errors, round(r.errors::numeric / r.runs, 4), r.latest
      FROM runs_since('step', coalesce(p_since_timestamp, clock_timestamp() - interval '24 hours')) AS r
      JOIN step_definitions d ON d.step_definition_id = r.definition_id
      JOIN task_definitions td ON td.task_definition_id = d.task_definition_id
     WHERE r.runs > 0 AND (p_namespace_filter IS NULL OR td.namespace = p_namespace_filter) AND (p_task_name_filter IS NULL OR td.name = p_task_name_filter)
       AND (p_version_filter IS NULL OR td.version = p_version_filter)
     ORDER BY r.seconds / nullif(r.runs - r.untimed, 0) DESC NULLS LAST, td.namespace, td.name, td.version, d.name
     LIMIT coalesce(p_limit_count, 10);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_slowest_steps IS 'Steps of task definitions by how long an attempt takes, the slowest on average first: those of p_limit_count at most at which an attempt ended since an instant, by default in the last 24 hours. An execution is an attempt; error_rate is the share of those that failed, 0 to 1. One whose worker was lost counts, but nobody knows how long it took. Steps that did not run are absent. Times further back than 32 days are not known.';

-- +goose StatementBegin
CREATE FUNCTION get_slowest_tasks(
    p_since_timestamp timestamptz DEFAULT NULL, p_limit_count integer DEFAULT 10, p_namespace_filter text DEFAULT NULL,
    p_task_name_filter text DEFAULT NULL, p_version_filter text DEFAULT NULL)
RETURNS TABLE (
    named_task_uuid uuid, namespace_name text, task_name text, version text,
    avg_duration_seconds numeric, max_duration_seconds numeric, min_duration_seconds numeric,
    execution_count bigint, avg_step_count numeric, error_count bigint, error_rate numeric, last_executed_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    IF p_limit_count < 0 THEN
        RAISE EXCEPTION 'a limit is not negative' USING ERRCODE = 'PW003';
    END IF;
    RETURN QUERY
    SELECT d.task_definition_id, d.namespace, d.name, d.version,
           round((r.seconds / r.runs)::numeric, 3), round(r.longest::numeric, 3), round(r.shortest::numeric, 3),
           r.runs, round(r.steps::numeric / r.runs, 2), r.errors, round(r.errors::numeric / r.runs, 4), r.latest
      FROM runs_since('task', coalesce(p_since_timestamp, clock_timestamp() - interval '24 hours')) AS r
      JOIN task_definitions d ON d.task_definition_id = r.definition_id
     WHERE r.runs > 0 AND (p_namespace_filter IS NULL OR d.namespace = p_namespace_filter) AND (p_task_name_filter IS NULL OR d.name = p_task_name_filter)
       AND (p_version_filter IS NULL OR d.version = p_version_filter)
     ORDER BY r.seconds / r.runs DESC, d.namespace, d.name, d.version
     LIMIT coalesce(p_limit_count, 10);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_slowest_tasks IS 'Task definitions by how long their tasks take from their creation, the slowest on average first: those of p_limit_count at most of which tasks became complete, or ended in error, since an instant, by default in the last 24 hours. error_rate is the share of the latter, 0 to 1. Definitions of which none did are absent. Times further back than 32 days are not known.';

-- +goose StatementBegin
CREATE FUNCTION task_at_work(p_task uuid)
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
COMMENT ON FUNCTION task_at_work IS 'Internal: whether somebody has a turn of the task or one of its work items, under a lease that holds, or a task that is a step of it has not ended.';

-- +goose StatementBegin
CREATE FUNCTION find_stuck_tasks(p_minutes integer DEFAULT 10)
RETURNS TABLE (task_uuid uuid, current_state text, processor_uuid uuid, stuck_duration_minutes integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT t.task_id, t.state, t.processor_id, floor(extract(epoch FROM v_now - t.state_entered_at) / 60)::integer
      FROM unnest(ARRAY['initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results']) AS active (state)
      JOIN tasks t ON t.state = active.state AND t.state NOT IN ('complete', 'cancelled', 'resolved_manually')
     WHERE t.state_entered_at < v_now - make_interval(mins => p_minutes) AND NOT task_at_work(t.task_id)
     ORDER BY t.state_entered_at, t.task_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION find_stuck_tasks IS 'Tasks that came into an active state (initializing, enqueuing_steps, steps_in_process, evaluating_results) more than p_minutes ago and have been in it since, while nobody is at work on them: no turn of them and no step is claimed under a lease that holds, and none of their steps is a task that has not ended. A step that takes long is not stuck.';

-- +goose StatementBegin
CREATE FUNCTION lifecycle_minutes(p_configuration jsonb, p_key text, p_default integer)
RETURNS float8
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
    -- As a number of minutes, or as our definitions have it, a duration that is called the same without its unit.
    SELECT CASE WHEN jsonb_typeof(l.lifecycle -> p_key) = 'number' THEN (l.lifecycle ->> p_key)::float8
                WHEN jsonb_typeof(l.lifecycle -> l.duration) = 'string' THEN extract(epoch FROM (l.lifecycle ->> l.duration)::interval)::float8 / 60
                ELSE p_default END
      FROM (SELECT p_configuration -> 'lifecycle' AS lifecycle,
                   CASE p_key WHEN 'max_duration_minutes' THEN 'max_lifetime' ELSE regexp_replace(p_key, '_minutes$', '') END AS duration) AS l
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lifecycle_minutes IS 'Internal: a threshold of a task definition, or the default. Null: there is none.';

-- +goose StatementBegin
CREATE FUNCTION stale_tasks(p_limit integer, p_dependencies integer, p_retry integer, p_steps integer, p_lifetime integer)
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
COMMENT ON FUNCTION stale_tasks IS 'Internal: tasks that are over a threshold of their definition (stale), or over 80 % of one (warning), each with the one that it is most over; defaults in minutes, null: none.';

-- +goose StatementBegin
CREATE FUNCTION path_to_error(p_state text)
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_state
        WHEN 'pending'                  THEN ARRAY['pending', 'initializing', 'waiting_for_dependencies', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'initializing'             THEN ARRAY['initializing', 'waiting_for_dependencies', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'enqueuing_steps'          THEN ARRAY['enqueuing_steps', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'steps_in_process'         THEN ARRAY['steps_in_process', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'evaluating_results'       THEN ARRAY['evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'waiting_for_dependencies' THEN ARRAY['waiting_for_dependencies', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'waiting_for_retry'        THEN ARRAY['waiting_for_retry', 'enqueuing_steps', 'evaluating_results', 'blocked_by_failures', 'error']
        WHEN 'blocked_by_failures'      THEN ARRAY['blocked_by_failures', 'error'] END;
-- +goose StatementEnd
COMMENT ON FUNCTION path_to_error IS 'Internal: the states by which a task that is given up goes from this one to error. Null for a state in which it has ended.';

-- +goose StatementBegin
CREATE FUNCTION dlq_snapshot(p_task uuid, p_more jsonb DEFAULT '{}')
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
COMMENT ON FUNCTION dlq_snapshot IS 'Internal: what somebody who looks into a task wants to know of it as it is now, and what is known besides: its state, how many steps are in which, and the first 100 of those that are not done, pending ones last. Null if there is no such task.';

-- +goose StatementBegin
CREATE FUNCTION detect_and_transition_stale_tasks(
    p_dry_run boolean DEFAULT true, p_batch_size integer DEFAULT 100, p_default_waiting_deps_threshold integer DEFAULT 60,
    p_default_waiting_retry_threshold integer DEFAULT 30, p_default_steps_in_process_threshold integer DEFAULT 30,
    p_default_task_max_lifetime_hours integer DEFAULT 24)
RETURNS TABLE (
    task_uuid uuid, namespace_name text, task_name text, current_state text, time_in_state_minutes float8, staleness_rule text, staleness_minutes float8,
    staleness_threshold_minutes float8, health_status text, action_taken text, moved_to_dlq boolean, transition_success boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_stale    record;
    v_metadata jsonb;
BEGIN
    IF p_batch_size < 0 OR 0 > ANY (ARRAY[p_default_waiting_deps_threshold, p_default_waiting_retry_threshold, p_default_steps_in_process_threshold, p_default_task_max_lifetime_hours]) THEN
        RAISE EXCEPTION 'neither a batch nor a threshold is negative' USING ERRCODE = 'PW003';
    END IF;
    FOR v_stale IN
        SELECT * FROM stale_tasks(coalesce(p_batch_size, 100), p_default_waiting_deps_threshold, p_default_waiting_retry_threshold,
                                  p_default_steps_in_process_threshold, p_default_task_max_lifetime_hours * 60)
    LOOP
        action_taken := 'none';
        moved_to_dlq := false;
        transition_success := false;
        IF v_stale.health = 'stale' AND coalesce(p_dry_run, true) THEN
            action_taken := 'would_transition_to_dlq_and_error';
        ELSIF v_stale.health = 'stale' THEN
            -- Whoever has its row is at work on it, and it is another state that it is in after that.
            PERFORM FROM tasks t WHERE t.task_id = v_stale.task_id AND t.sort_key = v_stale.sort_key FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND THEN
                v_metadata := jsonb_build_object('event', 'Stale', 'rule', v_stale.rule, 'minutes', round(v_stale.minutes::numeric, 1), 'threshold_minutes', v_stale.threshold);
                INSERT INTO task_dlq (dlq_entry_id, task_id, original_state, reason, snapshot, metadata)
                VALUES (new_uuid(), v_stale.task_id, v_stale.state, 'staleness_timeout',
                        dlq_snapshot(v_stale.task_id, jsonb_build_object('time_in_state_minutes', v_stale.state_minutes)), v_metadata - 'event')
                ON CONFLICT (task_id) WHERE resolution_status = 'pending' DO NOTHING;
                moved_to_dlq := FOUND;
                transition_success := transition_task(v_stale.task_id, path_to_error(v_stale.state), NULL, v_metadata, true);
                PERFORM cancel_open_steps(v_stale.task_id, v_metadata);
                PERFORM wake_task(v_stale.task_id, 'ended');
                action_taken := CASE WHEN moved_to_dlq THEN 'transitioned_to_dlq_and_error' ELSE 'transitioned_to_error_only' END;
            ELSE
                action_taken := 'skipped';
            END IF;
        END IF;
        task_uuid := v_stale.task_id;
        namespace_name := v_stale.namespace;
        task_name := v_stale.name;
        current_state := v_stale.state;
        time_in_state_minutes := v_stale.state_minutes;
        staleness_rule := v_stale.rule;
        staleness_minutes := v_stale.minutes;
        staleness_threshold_minutes := v_stale.threshold;
        health_status := v_stale.health;
        RETURN NEXT;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION detect_and_transition_stale_tasks IS 'Finds tasks that are stale: 60 minutes in waiting_for_dependencies, 30 in waiting_for_retry with an attempt that is due, 30 in steps_in_process while nobody is at work on them, or 24 hours since they were to begin; null: no such threshold. A definition has its own in its configuration, under lifecycle: max_waiting_for_dependencies_minutes, max_waiting_for_retry_minutes, max_steps_in_process_minutes, max_duration_minutes; or durations: max_waiting_for_dependencies and so on, and max_lifetime. Unless p_dry_run, which changes nothing, each goes to error, its steps that have not ended are cancelled, and there is a pending entry for it in task_dlq. health_status is stale, or warning from 80 % of the threshold on, to which nothing is done; staleness_rule says which threshold, staleness_minutes how long it has been. current_state is that before. A namespace that is paused has no tasks that wait too long. Those that are furthest over it come first, p_batch_size of them at most. PW003 if one of the numbers is negative.';

-- +goose StatementBegin
CREATE FUNCTION add_to_dlq(p_task_uuid uuid, p_reason text DEFAULT 'manual_dlq', p_metadata jsonb DEFAULT '{}')
RETURNS TABLE (dlq_entry_uuid uuid, added boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_state text;
BEGIN
    IF (p_reason IN ('staleness_timeout', 'max_retries_exceeded', 'dependency_cycle_detected', 'worker_unavailable', 'manual_dlq')) IS NOT TRUE THEN
        RAISE EXCEPTION 'there is no reason % to look into a task', quote_nullable(p_reason) USING ERRCODE = 'PW003';
    END IF;
    SELECT t.state INTO v_state FROM tasks t WHERE t.task_id = p_task_uuid FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no task %', p_task_uuid USING ERRCODE = 'PW002';
    END IF;
    LOOP
        INSERT INTO task_dlq (dlq_entry_id, task_id, original_state, reason, snapshot, metadata)
        VALUES (new_uuid(), p_task_uuid, v_state, p_reason, dlq_snapshot(p_task_uuid), coalesce(p_metadata, '{}'))
        ON CONFLICT (task_id) WHERE resolution_status = 'pending' DO NOTHING RETURNING dlq_entry_id INTO dlq_entry_uuid;
        added := FOUND;
        IF NOT added THEN
            SELECT d.dlq_entry_id INTO dlq_entry_uuid FROM task_dlq d WHERE d.task_id = p_task_uuid AND d.resolution_status = 'pending';
        END IF;
        EXIT WHEN FOUND; -- or else it has been resolved meanwhile
    END LOOP;
    RETURN NEXT;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION add_to_dlq IS 'Notes that somebody has to look into a task, with a picture of it as it is now; the task itself goes on. If there is a pending entry already, that one is returned, and not added. PW002 if there is no such task, PW003 for an unknown reason.';

-- +goose StatementBegin
CREATE FUNCTION list_dlq(
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
COMMENT ON FUNCTION list_dlq IS 'Entries for tasks that somebody has to look into, the most urgent first; by default those that are pending, null: all. priority_score is 1000 for dependency_cycle_detected, 500 for max_retries_exceeded, 100 for staleness_timeout, 50 for worker_unavailable and 10 for manual_dlq, and one more for each minute that the entry was pending: so the order of those that are stays the same.';

-- +goose StatementBegin
CREATE FUNCTION resolve_dlq(p_dlq_entry_uuid uuid, p_status text, p_resolved_by text DEFAULT NULL, p_notes text DEFAULT NULL)
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
COMMENT ON FUNCTION resolve_dlq IS 'Ends an entry: manually_resolved, permanently_failed or cancelled, by whom and with what notes. It is a note about the task and does nothing to it. False, and nothing is changed, if it is resolved already. PW002 if there is no such entry, PW003 for another status.';

-- +goose StatementBegin
CREATE FUNCTION get_task_transitions(p_task_uuid uuid)
RETURNS TABLE (
    transition_id bigint, xact xid8, task_uuid uuid, workflow_step_uuid uuid, step_name text, sort_key integer, from_state text, to_state text,
    processor_uuid uuid, metadata jsonb, created_at timestamptz, most_recent boolean)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT x.transition_id, x.xact, x.task_id, NULL::uuid, NULL::text, x.sort_key, x.from_state, x.to_state, x.processor_id, x.metadata, x.created_at,
           lead(x.sort_key) OVER (ORDER BY x.sort_key) IS NULL
      FROM task_transitions x WHERE x.task_id = p_task_uuid ORDER BY x.sort_key;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_task_transitions IS 'The transitions of a task, in order; not those of its steps. most_recent is true of the last one.';

-- +goose StatementBegin
CREATE FUNCTION get_step_transitions(p_step_uuid uuid)
RETURNS TABLE (
    transition_id bigint, xact xid8, task_uuid uuid, workflow_step_uuid uuid, step_name text, sort_key integer, from_state text, to_state text,
    processor_uuid uuid, metadata jsonb, created_at timestamptz, most_recent boolean)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT x.transition_id, x.xact, x.task_id, x.step_id, s.name, x.sort_key, x.from_state, x.to_state, x.processor_id, x.metadata, x.created_at,
           lead(x.sort_key) OVER (ORDER BY x.sort_key) IS NULL
      FROM steps s JOIN step_transitions x ON x.step_id = s.step_id WHERE s.step_id = p_step_uuid ORDER BY x.sort_key;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_step_transitions IS 'The transitions of a step, in order. most_recent is true of the last one.';

-- +goose StatementBegin
CREATE FUNCTION get_all_transitions(p_task_uuid uuid)
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
COMMENT ON FUNCTION get_all_transitions IS 'The transitions of a task and of all its steps, in the order in which they were written. most_recent is true of the last one of each, and current_state is in which state that is.';

-- +goose StatementBegin
CREATE FUNCTION read_transitions(p_after_xact xid8 DEFAULT NULL, p_after_id bigint DEFAULT NULL, p_limit integer DEFAULT 1000)
RETURNS TABLE (
    transition_id bigint, xact xid8, task_uuid uuid, workflow_step_uuid uuid, step_name text, sort_key integer, from_state text, to_state text,
    processor_uuid uuid, metadata jsonb, created_at timestamptz, most_recent boolean)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_xact xid8 := coalesce(p_after_xact, '0');
    v_id   bigint := coalesce(p_after_id, 0);
    -- Invariant (cursor): no transition that is still to be committed has an xact below this. So what lies between two cursors is
    -- the same whenever it is read, and whoever goes on from the last row that he got passes over none.
    v_end  xid8 := pg_snapshot_xmin(pg_current_snapshot());
BEGIN
    IF p_limit < 0 THEN
        RAISE EXCEPTION 'a limit is not negative' USING ERRCODE = 'PW003';
    END IF;
    RETURN QUERY
    SELECT x.transition_id, x.xact, x.task_id, x.step_id, (SELECT s.name FROM steps s WHERE s.step_id = x.step_id), x.sort_key, x.from_state, x.to_state,
           x.processor_id, x.metadata, x.created_at,
           CASE WHEN x.step_id IS NULL THEN NOT EXISTS (SELECT FROM task_transitions n WHERE n.task_id = x.task_id AND n.sort_key = x.sort_key + 1 OFFSET 0)
                ELSE NOT EXISTS (SELECT FROM step_transitions n WHERE n.step_id = x.step_id AND n.sort_key = x.sort_key + 1 OFFSET 0) END
      FROM (SELECT * FROM (
                (SELECT l.transition_id, l.xact, l.task_id, NULL::uuid AS step_id, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata, l.created_at
                   FROM task_transitions l WHERE (l.xact, l.transition_id) > (v_xact, v_id) AND l.xact < v_end
                  ORDER BY l.xact, l.transition_id LIMIT p_limit)
                UNION ALL
                (SELECT l.transition_id, l.xact, l.task_id, l.step_id, l.sort_key, l.from_state, l.to_state, l.processor_id, l.metadata, l.created_at
                   FROM step_transitions l WHERE (l.xact, l.transition_id) > (v_xact, v_id) AND l.xact < v_end
                  ORDER BY l.xact, l.transition_id LIMIT p_limit)) AS merged
             ORDER BY merged.xact, merged.transition_id LIMIT p_limit) AS x
     ORDER BY x.xact, x.transition_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION read_transitions IS 'All transitions of tasks and steps after a cursor, which is xact and transition_id of the last one that was read (null: from the beginning): every one exactly once, however late its transaction committed. One appears when all transactions that began to write before its own have ended. Of one task or step the order is that of sort_key; transactions that ran side by side are in the order in which they began to write. The numbers of transactions are the server''s: if the tables are moved to another one, other than by pg_upgrade or replication, call refresh_rollups there once, and begin anew. most_recent is true of a transition after which there was none of the task, or step, when it was read.';

-- +goose StatementBegin
CREATE FUNCTION get_task_state_as_of(p_task_uuid uuid, p_at timestamptz)
RETURNS TABLE (workflow_step_uuid uuid, name text, current_state text, entered_at timestamptz, sort_key integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT NULL::uuid, d.name, x.to_state, x.created_at, x.sort_key
      FROM tasks t
      JOIN task_definitions d ON d.task_definition_id = t.task_definition_id
     CROSS JOIN LATERAL (SELECT l.* FROM task_transitions l WHERE l.task_id = t.task_id AND l.created_at <= p_at ORDER BY l.sort_key DESC LIMIT 1) AS x
     WHERE t.task_id = p_task_uuid;
    RETURN QUERY
    SELECT s.step_id, s.name, x.to_state, x.created_at, x.sort_key
      FROM steps s
     CROSS JOIN LATERAL (SELECT l.* FROM step_transitions l WHERE l.step_id = s.step_id AND l.created_at <= p_at ORDER BY l.sort_key DESC LIMIT 1) AS x
     WHERE s.task_id = p_task_uuid ORDER BY s.position;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_task_state_as_of IS 'In which state a task was at an instant, by its transitions, with its name and no workflow_step_uuid in the first row, and each of its steps, in the order of the definition. What was not there yet has no row.';

-- +goose Down

DROP FUNCTION get_task_state_as_of, read_transitions, get_all_transitions, get_step_transitions, get_task_transitions, resolve_dlq, list_dlq, add_to_dlq,
    detect_and_transition_stale_tasks, dlq_snapshot, path_to_error, stale_tasks, lifecycle_minutes, find_stuck_tasks, task_at_work,
    get_slowest_tasks, get_slowest_steps, get_analytics_metrics, runs_since, get_system_health_counts, recount_states;
DROP TRIGGER step_transitions_uncount ON step_transitions;
DROP TRIGGER task_transitions_uncount ON task_transitions;
DROP FUNCTION uncount_transitions, refresh_rollups, adopt_transitions, add_runs, tally_runs, tally_states;
DROP TABLE run_rollups, state_counts, rollup_cursor;
