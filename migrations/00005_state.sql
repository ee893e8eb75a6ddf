-- What an instance tells the world: custom status, key-value pairs, and that something about it has changed.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION notify_instance(p_instance text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('pgwake.notify', true) IS DISTINCT FROM 'off' THEN
        -- A hash: an id is the user's, may be confidential, and everybody on the server may LISTEN.
        PERFORM pg_notify(channel('instance'), substr(encode(sha256(convert_to(p_instance, 'UTF8')), 'hex'), 1, 16));
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_instance IS 'Internal: tells the nodes that an instance, its custom status or the status of its current execution has changed; of a layer, that something of a topic has. Several calls in a transaction are one notification. Silent while the setting pgwake.notify is off.';

-- +goose StatementBegin
CREATE FUNCTION apply_custom_status(p_instance text, p_clear boolean, p_value text, p_quiet boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT p_clear AND p_value IS NULL THEN
        RAISE EXCEPTION 'the custom status of instance % is null', p_instance USING ERRCODE = 'PW003';
    END IF;
    UPDATE instances i
       SET custom_status = CASE WHEN NOT p_clear THEN p_value END, custom_status_version = i.custom_status_version + 1
     WHERE i.instance_id = p_instance;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'instance % is unknown and can have no custom status', p_instance USING ERRCODE = 'PW003';
    END IF;
    IF NOT p_quiet THEN
        PERFORM notify_instance(p_instance);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION apply_custom_status IS 'Internal: sets or clears the custom status of an instance, which takes its version up by one, and tells the nodes unless p_quiet leaves that to the caller. Part of ack_orchestration.';

-- +goose StatementBegin
CREATE FUNCTION get_custom_status(p_instance text, p_last_seen bigint DEFAULT 0)
RETURNS TABLE (value text, version bigint)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT i.custom_status, i.custom_status_version FROM instances i
     WHERE i.instance_id = p_instance AND i.custom_status_version > p_last_seen;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_custom_status IS 'The custom status of an instance (null: cleared) and its version, if that is higher than p_last_seen; otherwise, and for an unknown instance, no row.';

-- +goose StatementBegin
CREATE FUNCTION look_at_instances(p_instances text[], p_last_seen bigint[], p_known bigint[])
RETURNS TABLE (question integer, known bigint, answered boolean, value text, version bigint, execution_id bigint, status text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT asked.ord::integer, i.incarnation,
           coalesce(i.custom_status_version > asked.last_seen, x.instance_id IS NOT NULL, false),
           CASE WHEN asked.last_seen IS NULL THEN x.output WHEN i.custom_status_version > asked.last_seen THEN i.custom_status END,
           i.custom_status_version, i.current_execution, x.status
      FROM unnest(p_instances, p_last_seen, p_known) WITH ORDINALITY AS asked (instance_id, last_seen, known, ord)
      LEFT JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = asked.instance_id OFFSET 0) i ON true
      LEFT JOIN LATERAL (
           SELECT e.* FROM executions e
            WHERE asked.last_seen IS NULL AND e.instance_id = i.instance_id AND e.execution_id = i.current_execution OFFSET 0) x
        ON x.status IN ('Completed', 'Failed', 'Cancelled')
     WHERE i.incarnation IS DISTINCT FROM asked.known OR i.custom_status_version > asked.last_seen OR x.instance_id IS NOT NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION look_at_instances IS 'Internal: what the waiters of a node ask: for each instance whether its custom status is newer than last_seen or, if that is null, whether its current execution has ended. known is the incarnation that was seen last, null for none. A row for each question that has an answer, and for each instance whose known is no longer true.';

-- +goose StatementBegin
CREATE FUNCTION merge_kv(p_instance text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_cleared text[] := ARRAY(SELECT d.key FROM kv_delta d WHERE d.instance_id = p_instance AND d.value IS NULL);
BEGIN
    WITH taken AS (
        DELETE FROM kv_delta d WHERE d.instance_id = p_instance
        RETURNING d.instance_id, d.key, d.value, d.execution_id
    ), cleared AS (
        DELETE FROM kv_store s WHERE s.instance_id = p_instance AND s.key = ANY (v_cleared)
    )
    INSERT INTO kv_store (instance_id, key, value, execution_id)
    SELECT t.instance_id, t.key, t.value, t.execution_id FROM taken t WHERE t.value IS NOT NULL
    ON CONFLICT (instance_id, key) DO UPDATE SET value = excluded.value, execution_id = excluded.execution_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION merge_kv IS 'Internal: moves what the executions of an instance changed so far into kv_store, where the next turn sees it. Part of ack_orchestration: when an execution ends, and before the writes of a higher one.';

-- +goose StatementBegin
CREATE FUNCTION apply_kv(p_instance text, p_execution bigint, p_ops text[], p_keys text[], p_values text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_cleared integer := coalesce((SELECT max(u.ord) FROM unnest(p_ops) WITH ORDINALITY AS u (op, ord) WHERE u.op = 'clear_all'), 0);
BEGIN
    IF cardinality(p_ops) > 0 AND NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'instance % is unknown and can have no key-value pairs', p_instance USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(p_ops, p_keys, p_values) AS u (op, key, value)
         WHERE CASE u.op WHEN 'clear_all' THEN false
                         WHEN 'clear' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255
                         WHEN 'set' THEN coalesce(octet_length(u.key), 0) NOT BETWEEN 1 AND 255 OR u.value IS NULL
                         ELSE true END) THEN
        RAISE EXCEPTION 'a key-value update of instance % is neither set, with a key and a value, nor clear, with a key, nor clear_all', p_instance
            USING ERRCODE = 'PW003';
    END IF;

    -- Of the updates after the last clear_all, the last one of each key counts.
    IF v_cleared > 0 THEN
        DELETE FROM kv_delta d WHERE d.instance_id = p_instance;
        INSERT INTO kv_delta (instance_id, key, value, execution_id)
        SELECT s.instance_id, s.key, NULL, p_execution FROM kv_store s WHERE s.instance_id = p_instance;
    END IF;
    INSERT INTO kv_delta (instance_id, key, value, execution_id)
    SELECT DISTINCT ON (u.key) p_instance, u.key, CASE u.op WHEN 'set' THEN u.value END, p_execution
      FROM unnest(p_ops, p_keys, p_values) WITH ORDINALITY AS u (op, key, value, ord)
     WHERE u.ord > v_cleared
     ORDER BY u.key, u.ord DESC
    ON CONFLICT (instance_id, key) DO UPDATE SET value = excluded.value, execution_id = excluded.execution_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION apply_kv IS 'Internal: changes the key-value pairs of an instance, in order: set, clear or, without a key, clear_all. Clients see it at once, turns once merge_kv has run. Part of ack_orchestration.';

-- +goose StatementBegin
CREATE FUNCTION kv_snapshot(p_instance text)
RETURNS json
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN (SELECT coalesce(json_object_agg(s.key, s.value ORDER BY s.key), '{}') FROM kv_store s WHERE s.instance_id = p_instance);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION kv_snapshot IS 'Internal: the key-value pairs that a turn sees, as one object: those of the executions before. Part of fetch_orchestration.';

-- +goose StatementBegin
CREATE FUNCTION get_kv(p_instance text, p_key text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN (
        SELECT CASE WHEN d.key IS NULL THEN s.value ELSE d.value END
          FROM (VALUES (p_instance, p_key)) AS asked (instance_id, key)
          LEFT JOIN kv_delta d ON d.instance_id = asked.instance_id AND d.key = asked.key
          LEFT JOIN kv_store s ON s.instance_id = asked.instance_id AND s.key = asked.key);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_kv IS 'Value of a key of an instance, as the latest acknowledged turn left it; null if there is none.';

-- +goose StatementBegin
CREATE FUNCTION list_kv(p_instance text)
RETURNS TABLE (key text, value text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT d.key, d.value FROM kv_delta d WHERE d.instance_id = p_instance AND d.value IS NOT NULL
     UNION ALL
    SELECT s.key, s.value FROM kv_store s
     WHERE s.instance_id = p_instance
       AND NOT EXISTS (SELECT FROM kv_delta d WHERE d.instance_id = p_instance AND d.key = s.key OFFSET 0)
     ORDER BY 1;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_kv IS 'All key-value pairs of an instance by key, as the latest acknowledged turn left them; no row for an unknown instance.';

-- +goose Down

DROP FUNCTION list_kv, get_kv, kv_snapshot, apply_kv, merge_kv, look_at_instances, get_custom_status, apply_custom_status,
    notify_instance;
