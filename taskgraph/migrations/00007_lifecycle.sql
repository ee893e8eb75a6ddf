-- A definition that was registered by SQL may say anything of its thresholds. One whose thresholds nobody can read has the defaults, and
-- keeps nobody from finding the stale tasks of all others.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle_minutes(p_configuration jsonb, p_key text, p_default integer)
RETURNS float8
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
BEGIN
    -- As a number of minutes, or as our definitions have it, a duration that is called the same without its unit; a hundred years at most.
    RETURN (SELECT least(52596000, CASE WHEN jsonb_typeof(l.lifecycle -> p_key) = 'number' THEN (l.lifecycle ->> p_key)::float8
                                        WHEN jsonb_typeof(l.lifecycle -> l.duration) = 'string' THEN extract(epoch FROM (l.lifecycle ->> l.duration)::interval)::float8 / 60
                                        ELSE p_default END)
              FROM (SELECT p_configuration -> 'lifecycle' AS lifecycle,
                           CASE p_key WHEN 'max_duration_minutes' THEN 'max_lifetime' ELSE regexp_replace(p_key, '_minutes$', '') END AS duration) AS l);
EXCEPTION WHEN data_exception THEN
    RETURN p_default;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lifecycle_minutes IS 'Internal: a threshold of a task definition, or the default, also if what the definition says is no duration. Null: there is none.';

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lifecycle_minutes(p_configuration jsonb, p_key text, p_default integer)
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
