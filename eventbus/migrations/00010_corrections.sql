-- What a session's time zone, its temporary tables and the numbers of open transactions did to functions of the files before.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION event_of_key_emitted()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- at the commit, by whoever emitted
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_xact     xid8 := log_xact();
    v_lined_up jsonb;
    v_one      record;
BEGIN
    -- Whoever may call functions may have a table of his own call this, with columns whose types run what he likes as the owner.
    IF pg_partition_root(TG_RELID) IS DISTINCT FROM 'event_log'::regclass THEN
        RAISE EXCEPTION 'event_of_key_emitted is for event_log alone, not for %', TG_RELID::regclass USING ERRCODE = 'PW003';
    END IF;
    IF current_setting('pgwake.emits_keys', true) = 'one' THEN
        PERFORM line_up(r.group_id, NEW.key, NEW.event_id, NEW.emitted_at, NEW.event_type, r.tag)
           FROM routes(NEW.namespace, NEW.event_type) AS r WHERE r.group_id = ANY (NEW.routes); -- those that are still subscribed
        RETURN NULL;
    END IF;
    -- Of several, the first has all of them lined up that are there by now, for invariant (locks). Ids go up within a transaction:
    -- what is emitted after this has a higher one.
    v_lined_up := coalesce(nullif(current_setting('pgwake.lined_up', true), ''), '{}');
    IF NEW.event_id <= (v_lined_up ->> NEW.namespace)::bigint THEN
        RETURN NULL;
    END IF;
    FOR v_one IN
        SELECT r.group_id, e.key, e.event_id, e.emitted_at, e.event_type, r.tag
          FROM event_log e CROSS JOIN LATERAL routes(e.namespace, e.event_type) AS r
         WHERE e.namespace = NEW.namespace AND e.xact = v_xact AND e.event_id > coalesce((v_lined_up ->> NEW.namespace)::bigint, 0)
           AND e.key IS NOT NULL AND r.group_id = ANY (e.routes)
         ORDER BY e.key COLLATE "C", r.group_id, e.event_id
    LOOP
        PERFORM line_up(v_one.group_id, v_one.key, v_one.event_id, v_one.emitted_at, v_one.event_type, v_one.tag);
    END LOOP;
    PERFORM set_config('pgwake.lined_up', (v_lined_up || jsonb_build_object(NEW.namespace,
        (SELECT max(e.event_id) FROM event_log e WHERE e.namespace = NEW.namespace AND e.xact = v_xact)))::text, true);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION horizon()
RETURNS xid8
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever emits has his transaction's number before he reads what is subscribed to (emit_many). So if he has not seen what
    -- was committed before this, his number is below one that is taken now, and he has ended once the lower end of a snapshot has got there.
    -- The upper end of a snapshot is just above the highest number that has ended, and there may be open ones above that. So a
    -- subtransaction takes a number, and ends.
    BEGIN
        INSERT INTO event_retirements (namespace, tag) VALUES ('', gen_random_uuid()::text);
        RAISE EXCEPTION USING ERRCODE = 'PW000', MESSAGE = 'a number was taken';
    EXCEPTION WHEN SQLSTATE 'PW000' THEN
        NULL;
    END;
    -- In a REPEATABLE READ transaction the snapshot is older, and its own number is above that.
    RETURN log_xact(greatest(pg_snapshot_xmax(pg_current_snapshot()), pg_current_xact_id()));
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delete_group(p_namespace text, p_group text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_first     text := event_tag(coalesce(p_group, 'default'), '');
    v_tags      text[];
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_tags := ARRAY(
        SELECT s.tag FROM event_subscriptions s WHERE s.group_id = v_group
        UNION -- of a subscription that was removed there may be a dead letter that was redriven
        SELECT l.tag FROM work_lists(ARRAY[v_namespace], NULL) AS l WHERE starts_with(l.tag, v_first));
    DELETE FROM event_groups g WHERE g.group_id = v_group; -- its subscriptions, and replays, go with it
    INSERT INTO event_retirements (namespace, tag) SELECT v_namespace, t.tag FROM unnest(v_tags) AS t (tag)
    ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    DELETE FROM event_lines l WHERE l.group_id = v_group;
    DELETE FROM event_keys k WHERE k.group_id = v_group AND k.item_id IS NULL; -- the others go with their items
    PERFORM retire_tag(v_group, v_namespace, t.tag) FROM unnest(v_tags) AS t (tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION next_occurrence(p_cron text, p_timezone text, p_after timestamptz, p_since timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET timezone = 'UTC' -- in which a day has 24 hours: in that of the session it may have 23
AS $$
DECLARE
    v_timezone text := coalesce(p_timezone, 'UTC');
    v_cron     record;
    v_since    timestamptz := coalesce(p_since, p_after);
    v_at       timestamptz := p_after;
    v_to       timestamptz;
    v_next     timestamptz;
    v_wall     timestamp;
BEGIN
    -- PostgreSQL takes more than names of zones: abbreviations, which are other zones elsewhere, and rules, as those have them that have a digit.
    IF v_timezone !~ '^(UTC|GMT|Etc/GMT(\+(1[0-2]|[0-9])|-(1[0-4]|[0-9]))|[A-Z][A-Za-z]+(/[A-Za-z_-]+)+)$' THEN
        RAISE EXCEPTION '% is not the name of a time zone, such as Europe/Berlin', quote_literal(v_timezone) USING ERRCODE = 'PW003';
    END IF;
    BEGIN
        v_wall := v_at AT TIME ZONE v_timezone;
    EXCEPTION WHEN invalid_parameter_value THEN
        RAISE EXCEPTION '% is not the name of a time zone that the server has', quote_literal(v_timezone) USING ERRCODE = 'PW003';
    END;
    IF NOT (isfinite(p_after) AND isfinite(v_since)) THEN
        RAISE EXCEPTION 'there is no occurrence after %, counted from %', p_after, v_since USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_cron FROM parse_cron(p_cron);
    IF v_cron.every IS NOT NULL THEN
        RETURN v_since + v_cron.every * (greatest(floor(extract(epoch FROM p_after - v_since) / extract(epoch FROM v_cron.every)), 0) + 1);
    END IF;
    v_wall := next_wall_time(v_cron, v_wall);
    IF NOT v_cron.real_time THEN
        LOOP
            v_next := first_shown(v_wall, v_timezone);
            EXIT WHEN v_wall IS NULL OR v_next > p_after;
            v_wall := next_wall_time(v_cron, v_wall);
        END LOOP;
        RETURN v_next;
    END IF;
    -- As if the clock was not changed, a day at a time, and anew from wherever it is.
    WHILE v_wall IS NOT NULL LOOP
        v_next := v_at + (v_wall - (v_at AT TIME ZONE v_timezone));
        v_to := least(v_next, v_at + interval '1 day');
        IF (v_to AT TIME ZONE v_timezone) - (v_to AT TIME ZONE 'UTC') = (v_at AT TIME ZONE v_timezone) - (v_at AT TIME ZONE 'UTC') THEN
            IF v_to = v_next THEN
                RETURN v_next;
            END IF;
            v_at := v_to;
        ELSE
            v_to := clock_change(v_timezone, v_at, v_to);
            IF v_next < v_to THEN
                RETURN v_next;
            END IF;
            v_at := v_to;
            v_wall := next_wall_time(v_cron, (v_at AT TIME ZONE v_timezone) - interval '1 s'); -- what it shows now counts
        END IF;
    END LOOP;
    RETURN NULL;
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
CREATE OR REPLACE FUNCTION event_of_key_emitted()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- at the commit, by whoever emitted
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_xact     xid8 := log_xact();
    v_lined_up jsonb;
    v_one      record;
BEGIN
    IF current_setting('pgwake.emits_keys', true) = 'one' THEN
        PERFORM line_up(r.group_id, NEW.key, NEW.event_id, NEW.emitted_at, NEW.event_type, r.tag)
           FROM routes(NEW.namespace, NEW.event_type) AS r WHERE r.group_id = ANY (NEW.routes); -- those that are still subscribed
        RETURN NULL;
    END IF;
    -- Of several, the first has all of them lined up that are there by now, for invariant (locks). Ids go up within a transaction:
    -- what is emitted after this has a higher one.
    v_lined_up := coalesce(nullif(current_setting('pgwake.lined_up', true), ''), '{}');
    IF NEW.event_id <= (v_lined_up ->> NEW.namespace)::bigint THEN
        RETURN NULL;
    END IF;
    FOR v_one IN
        SELECT r.group_id, e.key, e.event_id, e.emitted_at, e.event_type, r.tag
          FROM event_log e CROSS JOIN LATERAL routes(e.namespace, e.event_type) AS r
         WHERE e.namespace = NEW.namespace AND e.xact = v_xact AND e.event_id > coalesce((v_lined_up ->> NEW.namespace)::bigint, 0)
           AND e.key IS NOT NULL AND r.group_id = ANY (e.routes)
         ORDER BY e.key COLLATE "C", r.group_id, e.event_id
    LOOP
        PERFORM line_up(v_one.group_id, v_one.key, v_one.event_id, v_one.emitted_at, v_one.event_type, v_one.tag);
    END LOOP;
    PERFORM set_config('pgwake.lined_up', (v_lined_up || jsonb_build_object(NEW.namespace,
        (SELECT max(e.event_id) FROM event_log e WHERE e.namespace = NEW.namespace AND e.xact = v_xact)))::text, true);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION horizon()
RETURNS xid8
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever emits has his transaction's number before he reads what is subscribed to (emit_many). So if he has not seen what
    -- was committed before this snapshot, his number is below its upper end, and he has ended once its lower end has got there.
    RETURN log_xact(pg_snapshot_xmax(pg_current_snapshot()));
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delete_group(p_namespace text, p_group text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_tags      text[];
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_tags := ARRAY(SELECT s.tag FROM event_subscriptions s WHERE s.group_id = v_group);
    DELETE FROM event_groups g WHERE g.group_id = v_group; -- its subscriptions, and replays, go with it
    INSERT INTO event_retirements (namespace, tag) SELECT v_namespace, t.tag FROM unnest(v_tags) AS t (tag)
    ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    DELETE FROM event_lines l WHERE l.group_id = v_group;
    DELETE FROM event_keys k WHERE k.group_id = v_group AND k.item_id IS NULL; -- the others go with their items
    PERFORM retire_tag(v_group, v_namespace, t.tag) FROM unnest(v_tags) AS t (tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION next_occurrence(p_cron text, p_timezone text, p_after timestamptz, p_since timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_timezone text := coalesce(p_timezone, 'UTC');
    v_cron     record;
    v_since    timestamptz := coalesce(p_since, p_after);
    v_at       timestamptz := p_after;
    v_to       timestamptz;
    v_next     timestamptz;
    v_wall     timestamp;
BEGIN
    -- PostgreSQL takes more than names of zones: abbreviations, which are other zones elsewhere, and rules, as those have them that have a digit.
    IF v_timezone !~ '^(UTC|GMT|Etc/GMT(\+(1[0-2]|[0-9])|-(1[0-4]|[0-9]))|[A-Z][A-Za-z]+(/[A-Za-z_-]+)+)$' THEN
        RAISE EXCEPTION '% is not the name of a time zone, such as Europe/Berlin', quote_literal(v_timezone) USING ERRCODE = 'PW003';
    END IF;
    BEGIN
        v_wall := v_at AT TIME ZONE v_timezone;
    EXCEPTION WHEN invalid_parameter_value THEN
        RAISE EXCEPTION '% is not the name of a time zone that the server has', quote_literal(v_timezone) USING ERRCODE = 'PW003';
    END;
    IF NOT (isfinite(p_after) AND isfinite(v_since)) THEN
        RAISE EXCEPTION 'there is no occurrence after %, counted from %', p_after, v_since USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_cron FROM parse_cron(p_cron);
    IF v_cron.every IS NOT NULL THEN
        RETURN v_since + v_cron.every * (greatest(floor(extract(epoch FROM p_after - v_since) / extract(epoch FROM v_cron.every)), 0) + 1);
    END IF;
    v_wall := next_wall_time(v_cron, v_wall);
    IF NOT v_cron.real_time THEN
        LOOP
            v_next := first_shown(v_wall, v_timezone);
            EXIT WHEN v_wall IS NULL OR v_next > p_after;
            v_wall := next_wall_time(v_cron, v_wall);
        END LOOP;
        RETURN v_next;
    END IF;
    -- As if the clock was not changed, a day at a time, and anew from wherever it is.
    WHILE v_wall IS NOT NULL LOOP
        v_next := v_at + (v_wall - (v_at AT TIME ZONE v_timezone));
        v_to := least(v_next, v_at + interval '1 day');
        IF (v_to AT TIME ZONE v_timezone) - (v_to AT TIME ZONE 'UTC') = (v_at AT TIME ZONE v_timezone) - (v_at AT TIME ZONE 'UTC') THEN
            IF v_to = v_next THEN
                RETURN v_next;
            END IF;
            v_at := v_to;
        ELSE
            v_to := clock_change(v_timezone, v_at, v_to);
            IF v_next < v_to THEN
                RETURN v_next;
            END IF;
            v_at := v_to;
            v_wall := next_wall_time(v_cron, (v_at AT TIME ZONE v_timezone) - interval '1 s'); -- what it shows now counts
        END IF;
    END LOOP;
    RETURN NULL;
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
