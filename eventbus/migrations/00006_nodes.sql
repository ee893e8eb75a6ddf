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
           heartbeats = excluded.heartbeats, last_heartbeat = clock_timestamp(), stopped_at = NULL;
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
CREATE FUNCTION beat(p_node_id text, p_namespace text, p_group text)
RETURNS SETOF text
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM touch_node_heartbeat(p_node_id);
    IF EXISTS (SELECT FROM event_retirements) THEN
        PERFORM remove_strays();
    END IF;
    RETURN QUERY SELECT * FROM list_patterns(p_namespace, p_group);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION beat IS 'Internal: all that a node has to say and to ask now and then: touch_node_heartbeat, remove_strays and list_patterns.';

-- +goose StatementBegin
CREATE FUNCTION stop_node(p_node_id text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE event_nodes n SET stopped_at = clock_timestamp() WHERE n.node_id = p_node_id AND n.stopped_at IS NULL;
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
           n.stopped_at IS NULL AND n.last_heartbeat > clock_timestamp() - 3 * n.heartbeats
      FROM event_nodes n
     WHERE p_namespace IS NULL OR n.namespace = p_namespace
     ORDER BY n.namespace, n.node_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_nodes IS 'The nodes of a namespace (null: of all). One is live that was not stopped, and whose latest heartbeat is not older than three of its intervals.';

-- +goose StatementBegin
CREATE FUNCTION queue_name_for_namespace(p_namespace text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT 'core_events_' || replace(p_namespace, '-', '_')
$$;
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
DROP FUNCTION dead_letter_queue_name_for_namespace, queue_name_for_namespace, list_nodes, stop_node, beat, touch_node_heartbeat, register_node;
