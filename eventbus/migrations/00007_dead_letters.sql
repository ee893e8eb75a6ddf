-- Dead letters of the bus, with the events that they are of.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION list_event_dead_letters(
    p_namespace text, p_group text DEFAULT NULL, p_event_type text DEFAULT NULL, p_reason text DEFAULT NULL, p_died_before timestamptz DEFAULT NULL,
    p_ids bigint[] DEFAULT NULL, p_after bigint DEFAULT 0, p_limit integer DEFAULT 100, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (
    letter_id bigint, item_id bigint, group_name text, reason text, error text, attempts integer, failed_at timestamptz,
    event_id bigint, event_type text, payload jsonb, emitted_at timestamptz, producer_node_id text, scheduled_task_id uuid, metadata jsonb, headers jsonb,
    key text, xact xid8, payload_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
BEGIN
    RETURN QUERY
    WITH letters AS MATERIALIZED ( -- what others bury is no JSON of ours
        SELECT d.*, CASE WHEN d.tag <> 'eventbus' THEN split_part(substr(d.tag, 10), '|', 1) END AS group_name FROM dead_letters d
         WHERE d.queue = 'worker' AND d.namespace = coalesce(p_namespace, 'default') AND d.id > p_after AND (p_ids IS NULL OR d.id = ANY (p_ids))
           AND (starts_with(d.tag, 'eventbus/') OR d.tag = 'eventbus' AND d.data ->> 'event_id' IS NOT NULL)
           AND (p_group IS NULL OR starts_with(d.tag, event_tag(p_group, '')))
           AND (p_event_type IS NULL OR d.name = p_event_type) AND (p_reason IS NULL OR d.reason = p_reason) AND (p_died_before IS NULL OR d.died_at < p_died_before)
         ORDER BY d.id
         LIMIT p_limit)
    SELECT l.id, l.item_id, l.group_name, l.reason, l.error, l.attempt_count, l.died_at,
           d.event_id, l.name, CASE WHEN p.cut IS NULL THEN p.payload END, d.emitted_at, coalesce(e.producer_node_id, d.producer_node_id, ''),
           coalesce(e.scheduled_task_id, d.scheduled_task_id), coalesce(e.metadata, d.metadata, '{}'), l.headers, coalesce(l.key, e.key), coalesce(e.xact, d.xact), p.cut
      FROM letters l CROSS JOIN LATERAL delivered_event(l.data) AS d LEFT JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
     CROSS JOIN LATERAL (SELECT coalesce(e.payload, d.payload) AS payload, cut_of(coalesce(e.payload, d.payload), p_payload_bytes) AS cut OFFSET 0) AS p
     ORDER BY l.id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_event_dead_letters IS 'Dead letters of the bus in a namespace (null: default), by id, p_limit of them after p_after, for which all conditions hold that are not null; each with its event, of which payload, metadata, producer and schedule are missing if it is large and not in the log any more. group_name is null for an event that no group was subscribed to, and event_id for an item that nothing of the bus has made. The ids are those that redrive_dead_letters and purge_dead_letters take. With p_payload_bytes payload is null where it is longer, and payload_cut an object of its length and its first characters (bytes, start).';

-- +goose Down

DROP FUNCTION list_event_dead_letters;
