-- Cron expressions: which instants are they for?
--
-- Times are those of a clock on the wall in a time zone, and where that is put forward or back there are two readings. An expression whose hours
-- begin with * goes by real time: it is for every instant at which the clock shows a time that matches, so for both of an hour that comes
-- twice. Any other names times of the day, each of which is to come once a day: one that is left out comes when the clock is put forward, and
-- one that comes twice, the first time.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION cron_field(p_cron text, p_what text, p_field text, p_least integer, p_most integer, p_names text DEFAULT NULL)
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
COMMENT ON FUNCTION cron_field IS 'Internal: the numbers that a field of a cron expression is for. PW003 if it breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION named_cron(p_cron text)
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    SELECT CASE c.cron WHEN '@yearly' THEN '0 0 1 1 *' WHEN '@annually' THEN '0 0 1 1 *' WHEN '@monthly' THEN '0 0 1 * *' WHEN '@weekly' THEN '0 0 * * 0'
                                    WHEN '@daily' THEN '0 0 * * *' WHEN '@midnight' THEN '0 0 * * *' WHEN '@hourly' THEN '0 * * * *' ELSE c.cron END
      FROM lower(btrim(p_cron, E' \t\r\n')) AS c (cron)
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION named_cron IS 'Internal: a cron expression in lower case, and what one such as @daily stands for.';

-- +goose StatementBegin
CREATE FUNCTION parse_cron(p_cron text)
RETURNS TABLE (
    every interval, seconds integer[], minutes integer[], hours integer[], days integer[], months integer[], weekdays integer[], either_day boolean, real_time boolean)
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_parts text[];
    v_cron  text := named_cron(p_cron);
    v_field text[];
BEGIN
    PERFORM check_texts('a cron expression', ARRAY[p_cron], p_required => true); -- or a list takes the square of its length
    IF v_cron ~ '^@every\s' THEN
        v_parts := regexp_match(v_cron, '^@every\s+(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6})s)?$');
        every := make_interval(hours => coalesce(v_parts[1]::integer, 0), mins => coalesce(v_parts[2]::integer, 0), secs => coalesce(v_parts[3]::integer, 0));
        IF v_parts IS NULL OR every < interval '1 s' THEN
            RAISE EXCEPTION 'cron expression %: @every is for 1 s or more, such as 1h30m or 10s', quote_literal(p_cron) USING ERRCODE = 'PW003';
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    v_field := regexp_split_to_array(v_cron, '\s+');
    IF cardinality(v_field) = 5 THEN
        v_field := ARRAY['0'] || v_field;
    ELSIF cardinality(v_field) = 6 THEN
        NULL;
    ELSE
        RAISE EXCEPTION 'cron expression %: it has 5 fields (minute, hour, day of the month, month, day of the week), or 6 with seconds before them, or is one of @yearly, @monthly, @weekly, @daily, @hourly and @every', quote_literal(p_cron) USING ERRCODE = 'PW003';
    END IF;
    seconds := cron_field(p_cron, 'second', v_field[1], 0, 59);
    minutes := cron_field(p_cron, 'minute', v_field[2], 0, 59);
    hours := cron_field(p_cron, 'hour', v_field[3], 0, 23);
    days := cron_field(p_cron, 'day of the month', v_field[4], 1, 31);
    months := cron_field(p_cron, 'month', v_field[5], 1, 12, 'jan feb mar apr may jun jul aug sep oct nov dec ');
    weekdays := ARRAY(SELECT DISTINCT d.day % 7 FROM unnest(cron_field(p_cron, 'day of the week', v_field[6], 0, 7, 'sun mon tue wed thu fri sat ')) AS d (day));
    either_day := v_field[4] !~ '^[*?]' AND v_field[6] !~ '^[*?]';
    real_time := v_field[3] ~ '^[*?]';
    RETURN NEXT;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION parse_cron IS 'Internal: what a cron expression is for. With either_day a day of the month or a day of the week is enough, otherwise it is to be both; see the beginning of the file for real_time. PW003 if it breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION next_wall_time(p_cron record, p_after timestamp)
RETURNS timestamp
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_from   timestamp := date_trunc('second', p_after) + interval '1 s';
    v_day    date := v_from::date;
    v_last   date := v_day + 8 * 366 + 31; -- in the longest pause a 29 February is left out
    v_hour   integer;
    v_minute integer;
    v_second integer;
BEGIN
    WHILE v_day <= v_last LOOP
        IF extract(month FROM v_day)::integer <> ALL (p_cron.months) THEN
            v_day := (date_trunc('month', v_day) + interval '1 month')::date;
            CONTINUE;
        END IF;
        IF (CASE WHEN p_cron.either_day THEN extract(day FROM v_day)::integer = ANY (p_cron.days) OR extract(dow FROM v_day)::integer = ANY (p_cron.weekdays)
                ELSE extract(day FROM v_day)::integer = ANY (p_cron.days) AND extract(dow FROM v_day)::integer = ANY (p_cron.weekdays) END) THEN
            FOREACH v_hour IN ARRAY p_cron.hours LOOP
                CONTINUE WHEN v_day + make_time(v_hour, 59, 59) < v_from;
                FOREACH v_minute IN ARRAY p_cron.minutes LOOP
                    CONTINUE WHEN v_day + make_time(v_hour, v_minute, 59) < v_from;
                    FOREACH v_second IN ARRAY p_cron.seconds LOOP
                        IF v_day + make_time(v_hour, v_minute, v_second) >= v_from THEN
                            RETURN v_day + make_time(v_hour, v_minute, v_second);
                        END IF;
                    END LOOP;
                END LOOP;
            END LOOP;
        END IF;
        v_day := v_day + 1;
    END LOOP;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION next_wall_time IS 'Internal: the next time that matches what parse_cron returned, on a clock that is never put forward or back. Null: there is none.';

-- +goose StatementBegin
CREATE FUNCTION clock_change(p_timezone text, p_from timestamptz, p_to timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_before interval := (p_from AT TIME ZONE p_timezone) - (p_from AT TIME ZONE 'UTC');
    v_from   bigint := floor(extract(epoch FROM p_from));
    v_to     bigint := ceil(extract(epoch FROM p_to));
    v_middle bigint;
BEGIN
    WHILE v_to - v_from > 1 LOOP
        v_middle := (v_from + v_to) / 2;
        IF (to_timestamp(v_middle) AT TIME ZONE p_timezone) - (to_timestamp(v_middle) AT TIME ZONE 'UTC') = v_before THEN
            v_from := v_middle;
        ELSE
            v_to := v_middle;
        END IF;
    END LOOP;
    RETURN to_timestamp(v_to);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION clock_change IS 'Internal: the second at which the clock of a time zone is changed between two instants of which that is known.';

-- +goose StatementBegin
CREATE FUNCTION first_shown(p_wall timestamp, p_timezone text)
RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_at     timestamptz := p_wall AT TIME ZONE p_timezone; -- of two instants the later; of none, as if the clock had not been changed yet
    v_before timestamptz := v_at - interval '26 hours';
    v_first  timestamptz;
BEGIN
    IF v_at AT TIME ZONE p_timezone <> p_wall THEN
        RETURN clock_change(p_timezone, v_before, v_at);
    END IF;
    -- By the clock as it was the day before.
    v_first := (p_wall - ((v_before AT TIME ZONE p_timezone) - (v_before AT TIME ZONE 'UTC'))) AT TIME ZONE 'UTC';
    RETURN CASE WHEN v_first < v_at AND v_first AT TIME ZONE p_timezone = p_wall THEN v_first ELSE v_at END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION first_shown IS 'Internal: the first instant at which the clock of a time zone shows a time, or a later one if that is left out.';

-- +goose StatementBegin
CREATE FUNCTION next_occurrence(p_cron text, p_timezone text, p_after timestamptz, p_since timestamptz DEFAULT NULL)
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
COMMENT ON FUNCTION next_occurrence IS 'The first instant after p_after that a cron expression is for, in a time zone (null: UTC); null if there is none. It has 5 fields (minute, hour, day of the month, month, day of the week; names, lists, ranges and steps) or 6, with seconds before them, or is @yearly, @monthly, @weekly, @daily, @hourly, or @every 1h30m, which counts from p_since. If a day of the month and a day of the week are given, either will do. Where the clock is put forward or back: with hours that begin with * every instant that matches; otherwise each time once a day, when it is first shown or, if it is left out, when the clock is put forward. PW003 if it breaks a rule.';

-- +goose Down

DROP FUNCTION next_occurrence, first_shown, clock_change, next_wall_time, parse_cron, named_cron, cron_field;
