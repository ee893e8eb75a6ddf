-- A node that was stopped stays so, whatever it has said before and is heard of only now; and neither how a session reads literals and writes times
-- matters, nor which letters are lower case to the database.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
    v_stopped  timestamptz := (SELECT n.stopped_at FROM event_nodes n WHERE n.node_id = p_node_id);
BEGIN
    PERFORM remove_strays();
    v_patterns := ARRAY(SELECT p.pattern FROM list_patterns(p_namespace, p_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
    -- What a node says itself counts, whoever has said before that it has stopped; who says so from then on has the last word, for nobody may be
    -- waiting for this any more. The row is looked at once more when it is locked.
    UPDATE event_nodes n
       SET last_heartbeat = clock_timestamp(), heartbeats = p_heartbeats, stopped_at = NULL, patterns = v_patterns,
           waiter = CASE WHEN node_listens(p_waiter) THEN p_waiter END
     WHERE n.node_id = p_node_id AND (n.stopped_at IS NULL OR n.stopped_at = v_stopped);
    RETURN v_patterns;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stop_node(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_stopped timestamptz;
BEGIN
    SELECT n.stopped_at INTO v_stopped FROM event_nodes n WHERE n.node_id = p_node_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- One that was gone already is so by another time: a beat that began since then knows by that that it was stopped once more.
    UPDATE event_nodes n SET stopped_at = coalesce(v_stopped + interval '1 us', clock_timestamp()), waiter = NULL WHERE n.node_id = p_node_id;
    RETURN v_stopped IS NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION stop_node IS 'Marks a node as gone, and returns whether it was not yet. A heartbeat that is under way does not change that.';

-- With standard_conforming_strings off a backslash in a literal is something else. What is read by those that a role has set so stays what it is.
ALTER FUNCTION pattern_regex SET standard_conforming_strings = on;
ALTER FUNCTION subscribe SET standard_conforming_strings = on;
ALTER FUNCTION partman_schema SET standard_conforming_strings = on;
ALTER FUNCTION parse_cron SET standard_conforming_strings = on;
ALTER FUNCTION next_occurrence SET standard_conforming_strings = on;
ALTER FUNCTION pg_cron_schedule SET standard_conforming_strings = on;
ALTER FUNCTION schedule_task SET standard_conforming_strings = on;
UPDATE event_subscriptions s SET regex = pattern_regex(s.pattern) WHERE s.regex IS NOT NULL AND s.regex <> pattern_regex(s.pattern);

-- Whoever migrated so has a log that takes more types than there are. If there are events of such, it goes on to do so.
-- +goose StatementBegin
DO $$
DECLARE
    v_partition regclass;
BEGIN
    IF EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = 'event_log'::regclass AND c.conname = 'event_log_event_type_check' AND strpos(pg_get_constraintdef(c.oid), chr(92)) = 0)
       AND NOT EXISTS (SELECT FROM event_log e WHERE e.event_type !~ E'^[^.*#|[:space:][:cntrl:]]+(\\.[^.*#|[:space:][:cntrl:]]+)*$') THEN
        ALTER TABLE event_log DROP CONSTRAINT event_log_event_type_check;
        FOR v_partition IN SELECT c.conrelid::regclass FROM pg_constraint c JOIN pg_inherits i ON i.inhrelid = c.conrelid
                            WHERE i.inhparent = 'event_log'::regclass AND c.conname = 'event_log_event_type_check' LOOP
            EXECUTE format('ALTER TABLE %s DROP CONSTRAINT event_log_event_type_check', v_partition); -- those that were made by themselves, and then attached, have their own
        END LOOP;
        ALTER TABLE event_log ADD CONSTRAINT event_log_event_type_check
            CHECK (octet_length(event_type) <= 180 AND event_type ~ E'^[^.*#|[:space:][:cntrl:]]+(\\.[^.*#|[:space:][:cntrl:]]+)*$');
    END IF;
END
$$;
-- +goose StatementEnd

-- FRI is frı to who goes by the rules of Turkish.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION cron_field(p_cron text, p_what text, p_field text, p_least integer, p_most integer, p_names text DEFAULT NULL)
RETURNS integer[]
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_part   text;
    v_parts  text[];
    v_ends   integer[];
    v_step   integer;
    v_values integer[] := '{}';
BEGIN
    FOREACH v_part IN ARRAY string_to_array(p_field, ',') LOOP
        v_parts := regexp_match(v_part COLLATE "C", '^(?:([*?])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,4}))?$', 'i');
        -- A name is a number: its place in the list, in which each has three letters and a space.
        SELECT array_agg(CASE WHEN e.text ~ '^[0-9]' THEN e.text::integer ELSE (nullif(strpos(p_names, lower(e.text COLLATE "C") || ' '), 0) - 1) / 4 + p_least END ORDER BY e.ord)
          INTO v_ends FROM unnest(v_parts[2:3]) WITH ORDINALITY AS e (text, ord) WHERE e.text IS NOT NULL;
        v_step := v_parts[4]::integer;
        IF v_parts[1] IS NOT NULL THEN
            v_ends := ARRAY[p_least, p_most];
        ELSIF cardinality(v_ends) = 1 THEN
            v_ends := v_ends || CASE WHEN v_step IS NULL THEN v_ends[1] ELSE p_most END;
        END IF;
        IF (v_ends[1] >= p_least AND v_ends[2] <= p_most AND v_ends[1] <= v_ends[2] AND coalesce(v_step, 1) > 0) IS NOT TRUE THEN
            RAISE EXCEPTION 'cron expression %: % cannot be a %', quote_literal(p_cron), quote_literal(v_part), p_what USING ERRCODE = 'PW003';
        END IF;
        v_values := v_values || ARRAY(SELECT generate_series(v_ends[1], v_ends[2], coalesce(v_step, 1)));
    END LOOP;
    RETURN ARRAY(SELECT DISTINCT v.value FROM unnest(v_values) AS v (value) ORDER BY v.value);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION named_cron(p_cron text)
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    SELECT CASE c.cron WHEN '@yearly' THEN '0 0 1 1 *' WHEN '@annually' THEN '0 0 1 1 *' WHEN '@monthly' THEN '0 0 1 * *' WHEN '@weekly' THEN '0 0 * * 0'
                                    WHEN '@daily' THEN '0 0 * * *' WHEN '@midnight' THEN '0 0 * * *' WHEN '@hourly' THEN '0 * * * *' ELSE c.cron END
      FROM lower(btrim(p_cron, E' \t\r\n') COLLATE "C") AS c (cron)
$$;
-- +goose StatementEnd

-- Bounds are literals. Where these name the zone of the session by an abbreviation it may be that of another: IST is that of India, or of Israel.
ALTER FUNCTION make_event_partitions SET datestyle = 'ISO' SET timezone = 'UTC';
ALTER FUNCTION set_default_aside SET datestyle = 'ISO' SET timezone = 'UTC';

-- Partitions that such a session has made are those of the months that they are called by from now on, or the next one would overlap with the last of
-- them. Detached, as all of these are while events are moved, they have no trigger: nothing is lined up anew.
-- +goose StatementBegin
DO $$
DECLARE
    v_names name[];
    v_from  timestamptz[];
    v_to    timestamptz[];
BEGIN
    PERFORM set_config('datestyle', 'ISO', true), set_config('timezone', 'UTC', true);
    SELECT array_agg(p.name), array_agg(p.from_at), array_agg(p.to_at) INTO v_names, v_from, v_to
      FROM event_partitions() p JOIN pg_class c ON c.relname = p.name JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'event_log'::regclass
     WHERE c.relnamespace = to_regnamespace(quote_ident(current_schema())) AND pg_get_expr(c.relpartbound, c.oid) <> format('FOR VALUES FROM (%L) TO (%L)', p.from_at, p.to_at);
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    PERFORM unbound_default();
    ALTER TABLE event_log DETACH PARTITION event_log_default;
    FOR i IN 1 .. cardinality(v_names) LOOP
        EXECUTE format('ALTER TABLE event_log DETACH PARTITION %I', v_names[i]);
        EXECUTE format('WITH moved AS (DELETE FROM %I WHERE emitted_at < %L OR emitted_at >= %L RETURNING *) INSERT INTO event_log_default SELECT * FROM moved', v_names[i], v_from[i], v_to[i]);
    END LOOP;
    FOR i IN 1 .. cardinality(v_names) LOOP
        EXECUTE format('WITH moved AS (DELETE FROM event_log_default WHERE emitted_at >= %L AND emitted_at < %L RETURNING *) INSERT INTO %I SELECT * FROM moved', v_from[i], v_to[i], v_names[i]);
        EXECUTE format('ALTER TABLE event_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', v_names[i], v_from[i], v_to[i]);
    END LOOP;
    ALTER TABLE event_log ATTACH PARTITION event_log_default DEFAULT;
EXCEPTION WHEN invalid_object_definition OR check_violation THEN
    RAISE WARNING 'partitions of the log stay as they are, which do not begin and end with the months that they are called by: %', SQLERRM;
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

ALTER FUNCTION set_default_aside RESET datestyle RESET timezone;
ALTER FUNCTION make_event_partitions RESET datestyle RESET timezone;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION named_cron(p_cron text)
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    SELECT CASE c.cron WHEN '@yearly' THEN '0 0 1 1 *' WHEN '@annually' THEN '0 0 1 1 *' WHEN '@monthly' THEN '0 0 1 * *' WHEN '@weekly' THEN '0 0 * * 0'
                                    WHEN '@daily' THEN '0 0 * * *' WHEN '@midnight' THEN '0 0 * * *' WHEN '@hourly' THEN '0 * * * *' ELSE c.cron END
      FROM lower(btrim(p_cron, E' \t\r\n')) AS c (cron)
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION cron_field(p_cron text, p_what text, p_field text, p_least integer, p_most integer, p_names text DEFAULT NULL)
RETURNS integer[]
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_part   text;
    v_parts  text[];
    v_ends   integer[];
    v_step   integer;
    v_values integer[] := '{}';
BEGIN
    FOREACH v_part IN ARRAY string_to_array(p_field, ',') LOOP
        v_parts := regexp_match(v_part, '^(?:([*?])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,4}))?$', 'i');
        -- A name is a number: its place in the list, in which each has three letters and a space.
        SELECT array_agg(CASE WHEN e.text ~ '^[0-9]' THEN e.text::integer ELSE (nullif(strpos(p_names, lower(e.text) || ' '), 0) - 1) / 4 + p_least END ORDER BY e.ord)
          INTO v_ends FROM unnest(v_parts[2:3]) WITH ORDINALITY AS e (text, ord) WHERE e.text IS NOT NULL;
        v_step := v_parts[4]::integer;
        IF v_parts[1] IS NOT NULL THEN
            v_ends := ARRAY[p_least, p_most];
        ELSIF cardinality(v_ends) = 1 THEN
            v_ends := v_ends || CASE WHEN v_step IS NULL THEN v_ends[1] ELSE p_most END;
        END IF;
        IF (v_ends[1] >= p_least AND v_ends[2] <= p_most AND v_ends[1] <= v_ends[2] AND coalesce(v_step, 1) > 0) IS NOT TRUE THEN
            RAISE EXCEPTION 'cron expression %: % cannot be a %', quote_literal(p_cron), quote_literal(v_part), p_what USING ERRCODE = 'PW003';
        END IF;
        v_values := v_values || ARRAY(SELECT generate_series(v_ends[1], v_ends[2], coalesce(v_step, 1)));
    END LOOP;
    RETURN ARRAY(SELECT DISTINCT v.value FROM unnest(v_values) AS v (value) ORDER BY v.value);
END
$$;
-- +goose StatementEnd

ALTER FUNCTION schedule_task RESET standard_conforming_strings;
ALTER FUNCTION pg_cron_schedule RESET standard_conforming_strings;
ALTER FUNCTION next_occurrence RESET standard_conforming_strings;
ALTER FUNCTION parse_cron RESET standard_conforming_strings;
ALTER FUNCTION partman_schema RESET standard_conforming_strings;
ALTER FUNCTION subscribe RESET standard_conforming_strings;
ALTER FUNCTION pattern_regex RESET standard_conforming_strings;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION stop_node(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE event_nodes n SET stopped_at = clock_timestamp(), waiter = NULL WHERE n.node_id = p_node_id AND n.stopped_at IS NULL;
    RETURN FOUND;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION stop_node IS 'Marks a node as gone, and returns whether it was not yet.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
BEGIN
    PERFORM remove_strays();
    v_patterns := ARRAY(SELECT p.pattern FROM list_patterns(p_namespace, p_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
    -- What a node says itself counts, whoever has said before that it has stopped.
    UPDATE event_nodes n
       SET last_heartbeat = clock_timestamp(), heartbeats = p_heartbeats, stopped_at = NULL, patterns = v_patterns,
           waiter = CASE WHEN node_listens(p_waiter) THEN p_waiter END
     WHERE n.node_id = p_node_id;
    RETURN v_patterns;
END
$$;
-- +goose StatementEnd
