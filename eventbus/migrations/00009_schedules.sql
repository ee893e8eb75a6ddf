-- Schedules: what is emitted, or enqueued, again and again.
--
-- Invariant (schedule): at each commit an active schedule with a next_at has one work item, item_id, which is due then or a little later
-- (jitter), and no other has none. Who carries an occurrence out, or changes the schedule, has its row locked, and knows by item_id whether
-- the occurrence is still that of the schedule. What an occurrence emits, the item of the next one, and the end of its own are one
-- transaction: so each comes exactly once, whoever dies, and none without that.
--
-- One that pg_cron fires (by_pg_cron) has a job of it in place of the item: at each commit it has one, job_id, if it is active, and no other has.

-- +goose Up

CREATE TABLE scheduled_tasks (
    task_id         uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    namespace       text        NOT NULL CONSTRAINT scheduled_tasks_namespace_check CHECK (namespace ~ '^[a-z][a-z0-9_-]{0,39}$'),
    name            text        NOT NULL CONSTRAINT scheduled_tasks_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    cron_expression text        NOT NULL,
    timezone        text        NOT NULL DEFAULT 'UTC',
    event_type      text,
    work_name       text,
    work_tag        text,
    payload         jsonb       NOT NULL DEFAULT 'null',
    key             text        CONSTRAINT scheduled_tasks_key_check CHECK (octet_length(key) BETWEEN 1 AND 255),
    active          boolean     NOT NULL DEFAULT true,
    jitter          interval    NOT NULL DEFAULT '0' CONSTRAINT scheduled_tasks_jitter_check CHECK (jitter BETWEEN interval '0' AND interval '1 day'),
    catch_up        text        NOT NULL DEFAULT 'one' CONSTRAINT scheduled_tasks_catch_up_check CHECK (catch_up IN ('skip', 'one', 'all')),
    overlap         text        NOT NULL DEFAULT 'allow' CONSTRAINT scheduled_tasks_overlap_check CHECK (overlap IN ('allow', 'skip')),
    by_pg_cron      boolean     NOT NULL DEFAULT false,
    job_id          bigint,
    since           timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_at         timestamptz,
    item_id         bigint,
    last_at         timestamptz,
    last_id         bigint,
    skipped         bigint      NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (namespace, name),
    CONSTRAINT scheduled_tasks_what_check CHECK ((event_type IS NULL) <> (work_name IS NULL) AND (work_tag IS NULL OR work_name IS NOT NULL))
) WITH (fillfactor = 70);
COMMENT ON TABLE scheduled_tasks IS 'Schedules: events that are emitted, or work items that are enqueued, whenever a cron expression says so (next_occurrence).';
COMMENT ON COLUMN scheduled_tasks.event_type IS 'Of the events; null: it enqueues work items.';
COMMENT ON COLUMN scheduled_tasks.payload IS 'Of the events, or the input of the work items.';
COMMENT ON COLUMN scheduled_tasks.jitter IS 'Each occurrence comes up to so much later, by chance.';
COMMENT ON COLUMN scheduled_tasks.catch_up IS 'What becomes of occurrences that nobody could carry out for a minute or more: none (skip), one for all of them, or all come.';
COMMENT ON COLUMN scheduled_tasks.overlap IS 'With skip an occurrence is left out while what came of the one before is not done.';
COMMENT ON COLUMN scheduled_tasks.by_pg_cron IS 'pg_cron fires it, and not the nodes.';
COMMENT ON COLUMN scheduled_tasks.job_id IS 'Job of pg_cron that fires it; null: there is none.';
COMMENT ON COLUMN scheduled_tasks.since IS 'From when @every counts.';
COMMENT ON COLUMN scheduled_tasks.next_at IS 'The next occurrence, without jitter; null: there is none, or only pg_cron knows.';
COMMENT ON COLUMN scheduled_tasks.item_id IS 'Work item of the next occurrence.';
COMMENT ON COLUMN scheduled_tasks.last_at IS 'The latest occurrence that was carried out, or when run_scheduled_task was; null: there was none.';
COMMENT ON COLUMN scheduled_tasks.last_id IS 'Event or work item that came of it.';
COMMENT ON COLUMN scheduled_tasks.skipped IS 'How often occurrences were left out, by catch_up, in which case several count once, or by overlap.';

-- +goose StatementBegin
CREATE FUNCTION pg_cron_schedule(p_cron text, p_timezone text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    c_greenwich CONSTANT text[] := '{UTC,GMT,Etc/UTC,Etc/GMT}';
    v_zone  text := coalesce(current_setting('cron.timezone', true), 'GMT');
    v_every interval := (SELECT c.every FROM parse_cron(p_cron) c);
    v_cron  text := named_cron(p_cron);
BEGIN
    IF v_every IS NOT NULL THEN
        IF v_every >= interval '1 minute' THEN
            RAISE EXCEPTION 'pg_cron has @every for 1 to 59 s, and not %', quote_literal(p_cron) USING ERRCODE = 'PW003';
        END IF;
        RETURN extract(epoch FROM v_every)::integer || ' seconds';
    ELSIF cardinality(regexp_split_to_array(v_cron, '\s+')) <> 5 THEN
        RAISE EXCEPTION 'pg_cron takes cron expressions of 5 fields, and not %', quote_literal(p_cron) USING ERRCODE = 'PW003';
    ELSIF p_timezone <> v_zone AND NOT (p_timezone = ANY (c_greenwich) AND v_zone = ANY (c_greenwich)) THEN
        RAISE EXCEPTION 'pg_cron goes by the time zone % (cron.timezone), and not by %', v_zone, p_timezone USING ERRCODE = 'PW003';
    END IF;
    RETURN v_cron;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pg_cron_schedule IS 'Internal: a cron expression as pg_cron takes it. PW003 if it cannot.';

-- +goose StatementBegin
CREATE FUNCTION await_job(p_task scheduled_tasks)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name text := p_task.namespace || '_' || p_task.name;
BEGIN
    IF octet_length(v_name) > 26 THEN -- pg_cron cuts names to 63 bytes, and two jobs of one name are one: the id is to be whole
        v_name := left(regexp_replace(v_name, '[^ -~]', '_', 'g'), 26);
    END IF;
    RETURN cron.schedule(v_name || '_' || p_task.task_id, pg_cron_schedule(p_task.cron_expression, p_task.timezone),
                         format('SELECT %I.run_scheduled_task(%L)', current_schema(), p_task.task_id));
EXCEPTION
    WHEN invalid_schema_name OR undefined_function THEN
        RAISE EXCEPTION 'pg_cron is not installed in this database' USING ERRCODE = 'PW003';
    WHEN invalid_parameter_value THEN
        RAISE EXCEPTION 'pg_cron does not take %', quote_literal(p_task.cron_expression) USING ERRCODE = 'PW003', DETAIL = SQLERRM;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION await_job IS 'Internal: has pg_cron fire a schedule, and returns the id of the job. PW003 if it cannot.';

-- +goose StatementBegin
CREATE FUNCTION await_occurrence(p_task scheduled_tasks, p_after timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_next timestamptz := CASE WHEN p_task.active AND NOT p_task.by_pg_cron THEN next_occurrence(p_task.cron_expression, p_task.timezone, p_after, p_task.since) END;
    v_item bigint;
    v_job  bigint := CASE WHEN p_task.active AND p_task.by_pg_cron THEN await_job(p_task) END;
BEGIN
    IF v_next IS NOT NULL THEN
        v_item := enqueue_work('eventbus|schedule', json_build_object('task_id', p_task.task_id), p_task.namespace, p_tag => 'eventbus',
                               p_visible_at => v_next + p_task.jitter * random());
    END IF;
    UPDATE scheduled_tasks t SET next_at = v_next, item_id = v_item, job_id = v_job WHERE t.task_id = p_task.task_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION await_occurrence IS 'Internal: enqueues the first occurrence of a schedule after an instant, or has pg_cron fire it. The caller has its row locked, and no item or job of it is left.';

-- +goose StatementBegin
CREATE FUNCTION withdraw_occurrence(p_task scheduled_tasks)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever is carrying it out waits for the lock of the schedule, and then finds that it is over; a dead letter is nobody's.
    PERFORM remove_work(ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = p_task.item_id FOR UPDATE));
    IF p_task.job_id IS NOT NULL AND to_regclass('cron.job') IS NOT NULL THEN -- it may be gone, with or without pg_cron
        PERFORM cron.unschedule(j.jobid) FROM cron.job j WHERE j.jobid = p_task.job_id;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION withdraw_occurrence IS 'Internal: removes the pending occurrence of a schedule, or its job of pg_cron, whose row the caller has locked.';

-- +goose StatementBegin
CREATE FUNCTION schedule_task(
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
COMMENT ON FUNCTION schedule_task IS 'Has an event be emitted, or a work item with p_work_name be enqueued, in a namespace (null: default), whenever p_cron_expression says so (see next_occurrence), and returns the id of the schedule: SELECT schedule_task(''shop'', ''daily-cleanup'', ''0 2 * * *'', ''maintenance.cleanup'', p_timezone => ''Europe/Berlin''). If there is a schedule of the name, it is changed to this, also while an occurrence is due; to say the same again changes nothing. p_active says whether it occurs, or is paused (null: a new one occurs, and one that there is remains as it is). The producer of the events is scheduler. p_jitter has each come up to so much later. p_catch_up says what becomes of occurrences that nobody could carry out for a minute or more: skip, one for all of them, or all (null: one); p_overlap of skip leaves one out while what came of the one before is not done. The nodes of the namespace carry it out, or with p_by_pg_cron a job of pg_cron with the name namespace_name_id, of which the id comes after 26 bytes at the most, which can do with 5 fields or @every of up to 59s, in the zone of cron.timezone, and has none of the rest. PW003 if an argument breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION schedule_key(p_task scheduled_tasks)
RETURNS text
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT coalesce(p_task.key, CASE WHEN p_task.overlap = 'skip' THEN 'schedule ' || p_task.task_id END)
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION schedule_key IS 'Internal: key of what comes of a schedule; null: none.';

-- +goose StatementBegin
CREATE FUNCTION carry_out(p_task scheduled_tasks, p_at timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_id bigint;
BEGIN
    IF p_task.event_type IS NOT NULL THEN
        v_id := emit(p_task.namespace, p_task.event_type, p_task.payload, schedule_key(p_task), p_producer => 'scheduler',
                     p_metadata => jsonb_build_object('scheduled_at', p_at), p_scheduled_task_id => p_task.task_id);
    ELSE
        v_id := enqueue_work(p_task.work_name, p_task.payload::json, p_task.namespace, p_tag => p_task.work_tag, p_key => p_task.key);
    END IF;
    UPDATE scheduled_tasks t SET last_at = p_at, last_id = v_id, updated_at = clock_timestamp() WHERE t.task_id = p_task.task_id;
    RETURN v_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION carry_out IS 'Internal: emits the event of a schedule, or enqueues its work item, and returns the id of that. The caller has its row locked.';

-- +goose StatementBegin
CREATE FUNCTION is_under_way(p_task scheduled_tasks, p_last_id bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN CASE WHEN p_task.event_type IS NULL THEN EXISTS (SELECT FROM worker_queue q WHERE q.id = p_last_id)
                ELSE EXISTS (SELECT FROM event_log e CROSS JOIN LATERAL unnest(e.routes) AS r (group_id)
                               LEFT JOIN event_keys k ON k.group_id = r.group_id AND k.key = e.key
                              WHERE e.event_id = p_last_id AND e.scheduled_task_id = p_task.task_id
                                AND (k.key IS NOT NULL OR e.xact = log_xact())) END; -- which lines up at its commit
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION is_under_way IS 'Internal: whether what came of the latest occurrence of a schedule, or of anything of the same key, is not done.';

-- +goose StatementBegin
CREATE FUNCTION occur(p_item bigint, p_token uuid, p_task_id uuid, p_most integer DEFAULT 100)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute';
    v_task   scheduled_tasks;
    v_now    timestamptz;
    v_at     timestamptz; -- carried out, or left out, up to here
    v_next   timestamptz;
    v_late   boolean;
    v_done   integer := 0;
    v_left   integer := 0;
BEGIN
    SELECT * INTO v_task FROM scheduled_tasks t WHERE t.task_id = p_task_id AND t.item_id = p_item AND t.active FOR UPDATE;
    IF NOT FOUND THEN -- it was changed, paused or deleted meanwhile, or somebody has set active himself
        PERFORM ack_work(p_item, p_token);
        RETURN 0;
    END IF;
    v_now := clock_timestamp();
    v_at := v_task.next_at;
    LOOP
        v_late := v_at + v_task.jitter < v_now - c_late;
        IF v_late AND v_task.catch_up = 'skip' THEN
            v_left := v_left + 1;
            v_at := v_now - c_late - v_task.jitter; -- all that is late
            EXIT;
        ELSIF v_task.overlap = 'skip' AND is_under_way(v_task, v_task.last_id) THEN
            v_left := v_left + 1;
        ELSE
            v_task.last_id := carry_out(v_task, v_at);
            v_done := v_done + 1;
        END IF;
        IF v_late AND v_task.catch_up = 'one' THEN
            v_at := v_now;
        END IF;
        EXIT WHEN NOT v_late OR v_task.catch_up <> 'all' OR v_done + v_left >= p_most;
        v_next := next_occurrence(v_task.cron_expression, v_task.timezone, v_at, v_task.since);
        EXIT WHEN v_next IS NULL OR v_next + v_task.jitter >= v_now - c_late;
        v_at := v_next;
    END LOOP;
    UPDATE scheduled_tasks t SET skipped = t.skipped + v_left WHERE t.task_id = p_task_id;
    PERFORM await_occurrence(v_task, v_at);
    PERFORM ack_work(p_item, p_token);
    RETURN v_done;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION occur IS 'Internal: carries out an occurrence that is due, or leaves it out, as the schedule says, and enqueues the next one. Of those that are late, which are all to come, it carries out p_most. Returns how many. PW001 if the token of the work item no longer holds.';

-- At a full hour many schedules are due at once, and what each of them costs by itself is a statement, a commit and the arithmetic of its cron
-- expression, which many have in common. What is not like the others, or in somebody's hands, is left to occur.

-- +goose StatementBegin
CREATE FUNCTION occur_many(p_items bigint[], p_tokens uuid[], p_task_ids uuid[])
RETURNS boolean[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute'; -- as in occur
    v_tasks  scheduled_tasks[];
    v_events bigint[];
    v_nexts  timestamptz[];
    v_items  bigint[];
BEGIN
    v_tasks := ARRAY(
        SELECT t FROM unnest(p_items, p_task_ids) AS i (item, task_id) JOIN scheduled_tasks t ON t.task_id = i.task_id AND t.item_id = i.item
         WHERE t.active AND t.event_type IS NOT NULL AND t.overlap = 'allow' AND t.next_at + t.jitter >= clock_timestamp() - c_late
         ORDER BY t.task_id FOR UPDATE OF t SKIP LOCKED);
    -- The ends of the items first: whose lease has ended is carried out by somebody else.
    v_items := ARRAY(SELECT a.item_id FROM ack_work_many(ARRAY(SELECT t.item_id FROM unnest(v_tasks) AS t ORDER BY t.item_id),
        ARRAY(SELECT i.token FROM unnest(v_tasks) AS t JOIN unnest(p_items, p_tokens) AS i (item, token) ON i.item = t.item_id ORDER BY t.item_id)) AS a);
    v_tasks := ARRAY(SELECT t FROM unnest(v_tasks) AS t WHERE t.item_id = ANY (v_items) ORDER BY t.namespace, t.task_id);
    IF v_tasks = '{}' THEN
        RETURN array_fill(false, ARRAY[cardinality(p_items)]);
    END IF;
    v_events := ARRAY(
        SELECT e.event_id
          FROM (SELECT t.namespace, array_agg(t.event_type ORDER BY t.task_id) AS types, array_agg(t.payload::text ORDER BY t.task_id) AS payloads,
                       array_agg(t.key ORDER BY t.task_id) AS keys, array_agg(jsonb_build_object('scheduled_at', t.next_at)::text ORDER BY t.task_id) AS metadata,
                       array_agg(t.task_id ORDER BY t.task_id) AS ids
                  FROM unnest(v_tasks) AS t GROUP BY t.namespace ORDER BY t.namespace OFFSET 0) AS n
         CROSS JOIN LATERAL emit_many(n.namespace, n.types, n.payloads, n.keys, p_producer => 'scheduler', p_metadata => n.metadata, p_scheduled_task_ids => n.ids)
               WITH ORDINALITY AS e
         ORDER BY n.namespace, e.ordinality);
    WITH counted AS ( -- @every alone counts from since
        SELECT t.cron_expression, t.timezone, t.next_at, s.since, next_occurrence(t.cron_expression, t.timezone, t.next_at, s.since) AS at
          FROM unnest(v_tasks) AS t CROSS JOIN LATERAL (SELECT CASE WHEN t.cron_expression ~* '@every' THEN t.since END) AS s (since)
         GROUP BY t.cron_expression, t.timezone, t.next_at, s.since)
    SELECT array_agg(c.at ORDER BY t.namespace, t.task_id) INTO v_nexts
      FROM unnest(v_tasks) AS t
      JOIN counted c ON c.cron_expression = t.cron_expression AND c.timezone = t.timezone AND c.next_at = t.next_at
                    AND c.since IS NOT DISTINCT FROM CASE WHEN t.cron_expression ~* '@every' THEN t.since END;
    WITH due AS (
        SELECT array_agg('eventbus|schedule'::text ORDER BY d.ord) AS names, array_agg(json_build_object('task_id', d.task_id)::text ORDER BY d.ord) AS inputs,
               array_agg(d.namespace ORDER BY d.ord) AS namespaces, array_agg(d.next + d.jitter * random() ORDER BY d.ord) AS visible_ats,
               array_agg('eventbus'::text ORDER BY d.ord) AS tags
          FROM (SELECT t.task_id, t.namespace, t.jitter, v_nexts[t.ordinality] AS next, t.ordinality AS ord FROM unnest(v_tasks) WITH ORDINALITY AS t) AS d
         WHERE d.next IS NOT NULL)
    SELECT array_agg(m.item_id ORDER BY m.ordinality) INTO v_items
      FROM due d CROSS JOIN LATERAL enqueue_work_many(d.names, d.inputs, d.namespaces, p_visible_ats => d.visible_ats, p_tags => d.tags) WITH ORDINALITY AS m
     WHERE d.names IS NOT NULL;
    UPDATE scheduled_tasks t
       SET last_at = o.next_at, last_id = v_events[o.ord], updated_at = clock_timestamp(), next_at = v_nexts[o.ord], item_id = v_items[o.place]
      FROM (SELECT u.task_id, u.next_at, u.ordinality AS ord, CASE WHEN v_nexts[u.ordinality] IS NOT NULL THEN count(v_nexts[u.ordinality]) OVER (ORDER BY u.ordinality) END AS place
              FROM unnest(v_tasks) WITH ORDINALITY AS u) AS o
     WHERE t.task_id = o.task_id;
    RETURN ARRAY(SELECT i.task_id IN (SELECT t.task_id FROM unnest(v_tasks) AS t) FROM unnest(p_task_ids) WITH ORDINALITY AS i (task_id, ord) ORDER BY i.ord);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION occur_many IS 'Internal: occur for many, and says of each whether it was carried out. Those that are late, whose overlap is skip, that enqueue work items, whose schedule is locked or was changed, or whose token no longer holds, are left to occur.';

-- +goose StatementBegin
CREATE FUNCTION run_scheduled_task(p_task_id uuid)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task scheduled_tasks;
BEGIN
    SELECT * INTO v_task FROM scheduled_tasks t WHERE t.task_id = p_task_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no schedule %', p_task_id USING ERRCODE = 'PW002';
    END IF;
    RETURN CASE WHEN v_task.active THEN carry_out(v_task, clock_timestamp()) END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION run_scheduled_task IS 'Emits the event of a schedule now, or enqueues its work item, beside its occurrences, and returns the id of that. If the schedule is not active nothing happens: null. PW002 if there is none of this id.';

-- +goose StatementBegin
CREATE FUNCTION run_schedule(p_namespace text, p_name text)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_id uuid := (SELECT t.task_id FROM scheduled_tasks t WHERE t.namespace = coalesce(p_namespace, 'default') AND t.name = p_name);
BEGIN
    IF v_id IS NULL THEN
        RAISE EXCEPTION 'namespace % has no schedule %', coalesce(p_namespace, 'default'), quote_nullable(p_name) USING ERRCODE = 'PW002';
    END IF;
    RETURN coalesce(run_scheduled_task(v_id), 0);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION run_schedule IS 'run_scheduled_task by namespace (null: default) and name; 0 if the schedule is not active.';

-- +goose StatementBegin
CREATE FUNCTION activate_schedule(p_namespace text, p_name text, p_active boolean)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_now timestamptz;
    v_was scheduled_tasks;
    v_is  scheduled_tasks;
BEGIN
    SELECT * INTO v_was FROM scheduled_tasks t WHERE t.namespace = coalesce(p_namespace, 'default') AND t.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'namespace % has no schedule %', coalesce(p_namespace, 'default'), quote_nullable(p_name) USING ERRCODE = 'PW002';
    ELSIF v_was.active = p_active THEN
        RETURN false;
    END IF;
    v_now := clock_timestamp(); -- no occurrence that came before the lock is after this
    UPDATE scheduled_tasks t SET active = p_active, since = CASE WHEN p_active THEN v_now ELSE t.since END, updated_at = v_now
     WHERE t.task_id = v_was.task_id RETURNING t.* INTO v_is;
    PERFORM withdraw_occurrence(v_was);
    PERFORM await_occurrence(v_is, v_now);
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION activate_schedule IS 'Has a schedule of a namespace (null: default) occur, from now on, or not any more, and returns whether it did not do so before. Nothing is caught up with. PW002 if there is none.';

-- +goose StatementBegin
CREATE FUNCTION delete_schedule(p_namespace text, p_name text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_was scheduled_tasks;
BEGIN
    DELETE FROM scheduled_tasks t WHERE t.namespace = coalesce(p_namespace, 'default') AND t.name = p_name RETURNING t.* INTO v_was;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM withdraw_occurrence(v_was);
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_schedule IS 'Removes a schedule of a namespace (null: default) with its pending occurrence, and returns whether there was one. What has come of it stays.';

-- +goose StatementBegin
CREATE FUNCTION list_schedules(p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_after text DEFAULT '', p_limit integer DEFAULT 100)
RETURNS SETOF scheduled_tasks
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT * FROM scheduled_tasks t
     WHERE t.namespace = coalesce(p_namespace, 'default') AND (p_name IS NULL OR t.name = p_name) AND t.name > p_after
     ORDER BY t.name LIMIT p_limit;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_schedules IS 'Schedules of a namespace (null: default), by name: that of p_name alone, or p_limit of them after p_after.';

SELECT revoke_from_public();

-- +goose Down

LOCK TABLE scheduled_tasks IN ACCESS EXCLUSIVE MODE;
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM scheduled_tasks) THEN
        RAISE EXCEPTION 'schema % still holds schedules; remove them before migrating down', current_schema() USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
DROP FUNCTION list_schedules, delete_schedule, activate_schedule, run_schedule, run_scheduled_task, occur_many, occur, is_under_way, carry_out, schedule_key, schedule_task, withdraw_occurrence, await_occurrence, await_job, pg_cron_schedule;
DROP TABLE scheduled_tasks;
