-- Nodes, and the names that the queues of a namespace have elsewhere.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION register_node(
    p_node_id text, p_namespace text DEFAULT NULL, p_display_name text DEFAULT '', p_description text DEFAULT '', p_metadata jsonb DEFAULT '{}', p_heartbeats interval DEFAULT '30 s')
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO event_nodes AS n (node_id, namespace, display_name, description, metadata, heartbeats)
    VALUES (p_node_id, coalesce(p_namespace, 'default'), p_display_name, p_description, p_metadata, p_heartbeats)
    ON CONFLICT (node_id) DO UPDATE
       SET namespace = excluded.namespace, display_name = excluded.display_name, description = excluded.description, metadata = excluded.metadata,
           heartbeats = excluded.heartbeats, last_heartbeat = clock_timestamp(), stopped_at = NULL, waiter = NULL;
    PERFORM register_namespaces(ARRAY[coalesce(p_namespace, 'default')]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_node IS 'Registers a node of a namespace (null: default), or changes what is known of it. p_heartbeats is how often it is going to call touch_node_heartbeat.';

-- +goose StatementBegin
CREATE FUNCTION touch_node_heartbeat(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE event_nodes n SET last_heartbeat = clock_timestamp() WHERE n.node_id = p_node_id;
    RETURN FOUND;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION touch_node_heartbeat IS 'Says that a node lives, and returns whether it is registered.';

-- +goose StatementBegin
CREATE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
BEGIN
    IF EXISTS (SELECT FROM event_retirements) THEN
        PERFORM remove_strays();
    END IF;
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
COMMENT ON FUNCTION beat IS 'Internal: what a node says when it begins, when its LISTEN connection comes or goes, when its group has got other patterns, and otherwise as often as its heartbeats are to come: that it lives, how often it is going to say so (p_heartbeats), and that its Provider is p_waiter, which counts while that has a LISTEN connection. Returns the patterns of its group.';

-- +goose StatementBegin
CREATE FUNCTION beat_quietly(p_waiter integer, p_about text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_id    text := p_about::json ->> 0;
    v_group text := p_about::json ->> 1;
    v_node  event_nodes;
BEGIN
    UPDATE event_nodes n SET last_heartbeat = clock_timestamp() WHERE n.node_id = v_id RETURNING * INTO v_node;
    RETURN v_node.waiter IS DISTINCT FROM p_waiter OR v_node.stopped_at IS NOT NULL OR EXISTS (SELECT FROM event_retirements)
        OR v_node.patterns <> ARRAY(SELECT p.pattern FROM list_patterns(v_node.namespace, v_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION beat_quietly IS 'Internal: the heartbeat of a node, by its id and group, that goes with the periodic statement of its Provider. Returns whether there is a reason to call beat.';

-- +goose StatementBegin
CREATE FUNCTION stop_node(p_node_id text)
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
CREATE FUNCTION list_nodes(p_namespace text DEFAULT NULL)
RETURNS TABLE (
    node_id text, namespace text, display_name text, description text, metadata jsonb, registered_at timestamptz, last_heartbeat timestamptz,
    stopped_at timestamptz, live boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT n.node_id, n.namespace, n.display_name, n.description, n.metadata, n.registered_at, n.last_heartbeat, n.stopped_at,
           CASE WHEN n.stopped_at IS NOT NULL OR n.last_heartbeat <= clock_timestamp() - 3 * n.heartbeats THEN false
                ELSE n.waiter IS NULL OR node_listens(n.waiter) END
      FROM event_nodes n
     WHERE p_namespace IS NULL OR n.namespace = p_namespace
     ORDER BY n.namespace, n.node_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_nodes IS 'The nodes of a namespace (null: of all). One is live that was not stopped, whose latest heartbeat is not older than three of its intervals, and whose LISTEN connection is there, if it has said that it has one: a process that dies is not live from that moment on. One that has lost its connection alone says so by another, and is live by its heartbeats until it is back.';

-- +goose StatementBegin
CREATE FUNCTION queue_name_for_namespace(p_namespace text)
RETURNS text
LANGUAGE sql IMMUTABLE
RETURN 'core_events_' || replace(p_namespace, '-', '_');
-- +goose StatementEnd
COMMENT ON FUNCTION queue_name_for_namespace IS 'Name of the queue of a namespace, for those who know it by that. Here it is the namespace of the worker queue.';

-- +goose StatementBegin
CREATE FUNCTION dead_letter_queue_name_for_namespace(p_namespace text)
RETURNS text
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN queue_name_for_namespace(p_namespace) || '_dlq';
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION dead_letter_queue_name_for_namespace IS 'The same of its dead letters, which are those of the namespace in dead_letters.';

-- +goose Down

LOCK TABLE event_log, event_groups, event_nodes, event_dedup_keys IN ACCESS EXCLUSIVE MODE;
SELECT require_no_events();
DROP FUNCTION dead_letter_queue_name_for_namespace, queue_name_for_namespace, list_nodes, stop_node, beat_quietly, beat, touch_node_heartbeat, register_node;
