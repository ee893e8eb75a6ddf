-- A node that was stopped stays so, whatever it has said before and is heard of only now.

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
