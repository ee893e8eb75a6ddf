-- What a schedule awaits outlasts a change of its jitter.
--
-- Invariant: as long as a schedule is active, and its cron expression and time zone are what they were, each of its occurrences comes exactly once,
-- whatever else is said of it meanwhile.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schedule_task(
    p_namespace text, p_name text, p_cron_expression text, p_event_type text DEFAULT NULL, p_payload jsonb DEFAULT NULL, p_timezone text DEFAULT NULL,
    p_active boolean DEFAULT NULL, p_jitter interval DEFAULT '0', p_catch_up text DEFAULT NULL, p_overlap text DEFAULT 'allow', p_key text DEFAULT NULL,
    p_work_name text DEFAULT NULL, p_work_tag text DEFAULT NULL, p_by_pg_cron boolean DEFAULT false)
RETURNS uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now       timestamptz;
    v_namespace text := coalesce(p_namespace, 'default');
    v_timezone  text := coalesce(p_timezone, 'UTC');
    v_catch_up  text := coalesce(p_catch_up, CASE WHEN p_by_pg_cron THEN 'skip' ELSE 'one' END);
    v_id        uuid;
    v_new       boolean;
    v_active    boolean;
    v_was       scheduled_tasks;
    v_is        scheduled_tasks;
BEGIN
    PERFORM check_options(ARRAY[v_namespace], NULL, NULL, NULL), check_texts('the name of a schedule', ARRAY[p_name], p_required => true),
            check_texts('names of work items, tags and keys', ARRAY[p_work_name, p_work_tag, p_key]);
    IF (p_event_type IS NULL) = (p_work_name IS NULL) OR p_work_tag IS NOT NULL AND p_work_name IS NULL THEN
        RAISE EXCEPTION 'a schedule has either an event type, or the name of a work item and perhaps its tag' USING ERRCODE = 'PW003';
    ELSIF (octet_length(p_event_type) <= 180 AND p_event_type ~ '^[^.*#|[:space:][:cntrl:]]+(\.[^.*#|[:space:][:cntrl:]]+)*$') IS FALSE THEN
        RAISE EXCEPTION '% is no event type', quote_literal(p_event_type) USING ERRCODE = 'PW003';
    ELSIF (p_jitter BETWEEN interval '0' AND interval '1 day' AND v_catch_up IN ('skip', 'one', 'all') AND p_overlap IN ('allow', 'skip') AND p_by_pg_cron IS NOT NULL) IS NOT TRUE THEN
        RAISE EXCEPTION 'jitter is up to a day, catch_up is skip, one or all, and overlap is allow or skip: not %, %, %', quote_nullable(p_jitter), quote_nullable(v_catch_up), quote_nullable(p_overlap) USING ERRCODE = 'PW003';
    ELSIF p_by_pg_cron AND (p_jitter, v_catch_up, p_overlap) IS DISTINCT FROM (interval '0', 'skip', 'allow') THEN
        RAISE EXCEPTION 'pg_cron has no jitter, catches up with nothing, and does not look at what came before: not %, %, %', p_jitter, v_catch_up, p_overlap USING ERRCODE = 'PW003';
    ELSIF octet_length(p_payload::text) > 1048576 THEN
        RAISE EXCEPTION 'the payload has more than 1 MiB' USING ERRCODE = 'PW003';
    ELSIF next_occurrence(p_cron_expression, v_timezone, clock_timestamp()) IS NULL THEN
        RAISE EXCEPTION 'cron expression % is for no day that there is', quote_literal(p_cron_expression) USING ERRCODE = 'PW003';
    ELSIF p_by_pg_cron THEN
        PERFORM pg_cron_schedule(p_cron_expression, v_timezone); -- also if it is paused: it may be resumed
    END IF;
    p_jitter := make_interval(secs => extract(epoch FROM p_jitter));
    PERFORM register_namespaces(ARRAY[v_namespace]);
    INSERT INTO scheduled_tasks AS t (namespace, name, cron_expression, timezone, event_type, work_name, work_tag, payload, key, active, jitter, catch_up, overlap)
    VALUES (v_namespace, p_name, p_cron_expression, v_timezone, p_event_type, p_work_name, p_work_tag, coalesce(p_payload, 'null'), p_key, false, p_jitter, v_catch_up, p_overlap)
    ON CONFLICT (namespace, name) DO UPDATE SET name = excluded.name -- which locks it, or makes it anew if it is deleted meanwhile
    RETURNING t.task_id, t.xmax = 0 INTO v_id, v_new; -- a row that was there has been locked
    SELECT * INTO v_was FROM scheduled_tasks t WHERE t.task_id = v_id;
    v_active := coalesce(p_active, v_new OR v_was.active); -- who says what it is does not end a pause that somebody made for a reason
    v_now := clock_timestamp(); -- no occurrence that came before the lock is after this
    UPDATE scheduled_tasks t
       SET cron_expression = p_cron_expression, timezone = v_timezone, event_type = p_event_type, work_name = p_work_name, work_tag = p_work_tag,
           payload = coalesce(p_payload, 'null'), key = p_key, active = v_active, jitter = p_jitter, catch_up = v_catch_up, overlap = p_overlap, by_pg_cron = p_by_pg_cron,
           last_id = CASE WHEN (t.event_type IS NULL) = (p_event_type IS NULL) THEN t.last_id END, -- events and work items have ids of their own
           since = CASE WHEN t.cron_expression <> p_cron_expression OR NOT t.active THEN v_now ELSE t.since END, updated_at = v_now
     WHERE t.task_id = v_id
       AND (t.cron_expression, t.timezone, t.event_type, t.work_name, t.work_tag, t.payload, t.key, t.active, t.jitter, t.catch_up, t.overlap, t.by_pg_cron)
           IS DISTINCT FROM (p_cron_expression, v_timezone, p_event_type, p_work_name, p_work_tag, coalesce(p_payload, 'null'), p_key, v_active, p_jitter, v_catch_up, p_overlap, p_by_pg_cron)
    RETURNING t.* INTO v_is;
    IF (v_is.cron_expression, v_is.timezone, v_is.active, v_is.jitter, v_is.by_pg_cron)
       IS DISTINCT FROM (v_was.cron_expression, v_was.timezone, v_was.active, v_was.jitter, v_was.by_pg_cron) AND v_is.task_id IS NOT NULL THEN
        PERFORM withdraw_occurrence(v_was);
        PERFORM await_occurrence(v_is, CASE
            WHEN (v_was.cron_expression, v_was.timezone, v_was.active, v_was.by_pg_cron) = (v_is.cron_expression, v_is.timezone, v_is.active, false)
            THEN coalesce(v_was.next_at - interval '1 us', v_now) -- the same one: it may be due, and is neither left out nor, if the clock went back, made twice
            ELSE v_now END);
    END IF;
    RETURN v_id;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- In the newest migration, where nothing is gone yet.
LOCK TABLE scheduled_tasks, event_log, event_groups, event_nodes, event_dedup_keys IN ACCESS EXCLUSIVE MODE;
SELECT require_no_events();
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM scheduled_tasks) THEN
        RAISE EXCEPTION 'schema % still holds schedules; remove them before migrating down', current_schema() USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schedule_task(
    p_namespace text, p_name text, p_cron_expression text, p_event_type text DEFAULT NULL, p_payload jsonb DEFAULT NULL, p_timezone text DEFAULT NULL,
    p_active boolean DEFAULT NULL, p_jitter interval DEFAULT '0', p_catch_up text DEFAULT NULL, p_overlap text DEFAULT 'allow', p_key text DEFAULT NULL,
    p_work_name text DEFAULT NULL, p_work_tag text DEFAULT NULL, p_by_pg_cron boolean DEFAULT false)
RETURNS uuid
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now       timestamptz;
    v_namespace text := coalesce(p_namespace, 'default');
    v_timezone  text := coalesce(p_timezone, 'UTC');
    v_catch_up  text := coalesce(p_catch_up, CASE WHEN p_by_pg_cron THEN 'skip' ELSE 'one' END);
    v_id        uuid;
    v_new       boolean;
    v_active    boolean;
    v_was       scheduled_tasks;
    v_is        scheduled_tasks;
BEGIN
    PERFORM check_options(ARRAY[v_namespace], NULL, NULL, NULL), check_texts('the name of a schedule', ARRAY[p_name], p_required => true),
            check_texts('names of work items, tags and keys', ARRAY[p_work_name, p_work_tag, p_key]);
    IF (p_event_type IS NULL) = (p_work_name IS NULL) OR p_work_tag IS NOT NULL AND p_work_name IS NULL THEN
        RAISE EXCEPTION 'a schedule has either an event type, or the name of a work item and perhaps its tag' USING ERRCODE = 'PW003';
    ELSIF (octet_length(p_event_type) <= 180 AND p_event_type ~ '^[^.*#|[:space:][:cntrl:]]+(\.[^.*#|[:space:][:cntrl:]]+)*$') IS FALSE THEN
        RAISE EXCEPTION '% is no event type', quote_literal(p_event_type) USING ERRCODE = 'PW003';
    ELSIF (p_jitter BETWEEN interval '0' AND interval '1 day' AND v_catch_up IN ('skip', 'one', 'all') AND p_overlap IN ('allow', 'skip') AND p_by_pg_cron IS NOT NULL) IS NOT TRUE THEN
        RAISE EXCEPTION 'jitter is up to a day, catch_up is skip, one or all, and overlap is allow or skip: not %, %, %', quote_nullable(p_jitter), quote_nullable(v_catch_up), quote_nullable(p_overlap) USING ERRCODE = 'PW003';
    ELSIF p_by_pg_cron AND (p_jitter, v_catch_up, p_overlap) IS DISTINCT FROM (interval '0', 'skip', 'allow') THEN
        RAISE EXCEPTION 'pg_cron has no jitter, catches up with nothing, and does not look at what came before: not %, %, %', p_jitter, v_catch_up, p_overlap USING ERRCODE = 'PW003';
    ELSIF octet_length(p_payload::text) > 1048576 THEN
        RAISE EXCEPTION 'the payload has more than 1 MiB' USING ERRCODE = 'PW003';
    ELSIF next_occurrence(p_cron_expression, v_timezone, clock_timestamp()) IS NULL THEN
        RAISE EXCEPTION 'cron expression % is for no day that there is', quote_literal(p_cron_expression) USING ERRCODE = 'PW003';
    ELSIF p_by_pg_cron THEN
        PERFORM pg_cron_schedule(p_cron_expression, v_timezone); -- also if it is paused: it may be resumed
    END IF;
    p_jitter := make_interval(secs => extract(epoch FROM p_jitter));
    PERFORM register_namespaces(ARRAY[v_namespace]);
    INSERT INTO scheduled_tasks AS t (namespace, name, cron_expression, timezone, event_type, work_name, work_tag, payload, key, active, jitter, catch_up, overlap)
    VALUES (v_namespace, p_name, p_cron_expression, v_timezone, p_event_type, p_work_name, p_work_tag, coalesce(p_payload, 'null'), p_key, false, p_jitter, v_catch_up, p_overlap)
    ON CONFLICT (namespace, name) DO UPDATE SET name = excluded.name -- which locks it, or makes it anew if it is deleted meanwhile
    RETURNING t.task_id, t.xmax = 0 INTO v_id, v_new; -- a row that was there has been locked
    SELECT * INTO v_was FROM scheduled_tasks t WHERE t.task_id = v_id;
    v_active := coalesce(p_active, v_new OR v_was.active); -- who says what it is does not end a pause that somebody made for a reason
    v_now := clock_timestamp(); -- no occurrence that came before the lock is after this
    UPDATE scheduled_tasks t
       SET cron_expression = p_cron_expression, timezone = v_timezone, event_type = p_event_type, work_name = p_work_name, work_tag = p_work_tag,
           payload = coalesce(p_payload, 'null'), key = p_key, active = v_active, jitter = p_jitter, catch_up = v_catch_up, overlap = p_overlap, by_pg_cron = p_by_pg_cron,
           last_id = CASE WHEN (t.event_type IS NULL) = (p_event_type IS NULL) THEN t.last_id END, -- events and work items have ids of their own
           since = CASE WHEN t.cron_expression <> p_cron_expression OR NOT t.active THEN v_now ELSE t.since END, updated_at = v_now
     WHERE t.task_id = v_id
       AND (t.cron_expression, t.timezone, t.event_type, t.work_name, t.work_tag, t.payload, t.key, t.active, t.jitter, t.catch_up, t.overlap, t.by_pg_cron)
           IS DISTINCT FROM (p_cron_expression, v_timezone, p_event_type, p_work_name, p_work_tag, coalesce(p_payload, 'null'), p_key, v_active, p_jitter, v_catch_up, p_overlap, p_by_pg_cron)
    RETURNING t.* INTO v_is;
    IF (v_is.cron_expression, v_is.timezone, v_is.active, v_is.jitter, v_is.by_pg_cron)
       IS DISTINCT FROM (v_was.cron_expression, v_was.timezone, v_was.active, v_was.jitter, v_was.by_pg_cron) AND v_is.task_id IS NOT NULL THEN
        PERFORM withdraw_occurrence(v_was);
        PERFORM await_occurrence(v_is, v_now);
    END IF;
    RETURN v_id;
END
$$;
-- +goose StatementEnd
