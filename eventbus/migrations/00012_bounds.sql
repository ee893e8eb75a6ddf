-- What events have is bounded whoever emits them, so that whoever is to handle one can read it.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION max_event_payload() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$ SELECT 104857600 $$;
-- +goose StatementEnd
COMMENT ON FUNCTION max_event_payload IS 'Internal: how many bytes of JSON a payload of an event has at most, whatever its producer says: as many as the largest MaxPayload of a Config.';

-- +goose StatementBegin
CREATE FUNCTION check_written_out(p_json text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    IF octet_length(p_json::jsonb::text) <= max_event_payload() THEN
        RETURN;
    END IF;
    RAISE program_limit_exceeded;
EXCEPTION WHEN program_limit_exceeded OR internal_error THEN -- also by the server, of 1 GB
    IF SQLSTATE = 'XX000' AND NOT starts_with(SQLERRM, 'invalid memory alloc request size') THEN
        RAISE;
    END IF;
    RAISE EXCEPTION 'a payload has more than % bytes once its numbers are written out', max_event_payload() USING ERRCODE = 'PW003';
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_written_out IS 'Internal: PW003 for JSON of more than max_event_payload once jsonb has written out its numbers, of which some bytes may be 131,072 digits: nobody could read such an event.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION emit_many(
    p_namespace text, p_event_types text[], p_payloads text[], p_keys text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_dedup_keys text[] DEFAULT NULL, p_dedup_fors interval[] DEFAULT NULL, p_producer text DEFAULT NULL, p_metadata text[] DEFAULT NULL,
    p_scheduled_task_ids uuid[] DEFAULT NULL, p_strict boolean DEFAULT false, p_max_payload integer DEFAULT 1048576,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (event_id bigint, duplicate boolean, deliveries integer, tags text[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_xact   xid8 := pg_current_xact_id(); -- this transaction has it before anything of the subscriptions is read, see horizon
    v_ids    bigint[] := ARRAY(SELECT nextval('event_log_event_id_seq') FROM generate_series(1, cardinality(p_event_types)));
    v_owners bigint[]; -- of the dedup keys; null: none is given
    v_counts integer[];
    v_types  text[];
    v_inputs text[];
    v_tags   text[];
    v_headers text[];
    v_groups bigint[];
    v_event  event_log;
    v_before text;
    v_most   integer := least(coalesce(p_max_payload, 1048576), max_event_payload()); -- whoever calls this says the first
    v_size   integer := (SELECT max(octet_length(t.json)) FROM unnest(p_payloads || p_metadata) AS t (json)); -- of the largest
BEGIN
    IF p_event_types IS NULL OR array_position(p_event_types, NULL) > 0 OR v_namespace !~ '^[a-z][a-z0-9_-]{0,39}$' THEN
        RAISE EXCEPTION 'emit needs an event type, and a namespace of 1 to 40 lower-case letters, digits, _ and -, a letter first: not %', quote_literal(v_namespace) USING ERRCODE = 'PW003';
    ELSIF cardinality(p_event_types) <> ANY (array_remove(ARRAY[cardinality(p_payloads), cardinality(p_keys), cardinality(p_headers),
        cardinality(p_dedup_keys), cardinality(p_dedup_fors), cardinality(p_metadata), cardinality(p_scheduled_task_ids)], NULL)) THEN
        RAISE EXCEPTION 'the arrays have different lengths' USING ERRCODE = 'PW003';
    ELSIF v_most < v_size THEN
        RAISE EXCEPTION 'a payload has more than % bytes', v_most USING ERRCODE = 'PW003';
    END IF;
    IF v_size > 4096 THEN -- what is less has some 450 numbers, of 131,072 digits at most, and is in bounds
        PERFORM check_written_out(t.json) FROM unnest(p_payloads || p_metadata) AS t (json)
          WHERE CASE WHEN octet_length(t.json) > 4096 THEN t.json ~ '(^|[[:space:],:[])-?[0-9.]+[eE][+-]?[0-9][0-9]' END;
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    IF array_remove(p_dedup_keys, NULL) <> '{}' THEN
        v_owners := take_dedup_keys(v_namespace, v_ids, p_dedup_keys, p_dedup_fors);
    END IF;
    IF v_namespace <> 'default' THEN
        PERFORM register_namespaces(ARRAY[v_namespace]);
    END IF;

    PERFORM emits_keys(p_keys);
    IF cardinality(v_ids) = 1 AND v_owners IS NULL THEN -- as below, at a fraction of the cost
        SELECT coalesce(array_agg(r.group_id), '{}'), array_agg(r.tag) INTO v_groups, v_tags FROM routes(v_namespace, p_event_types[1]) AS r;
        INSERT INTO event_log AS e (event_id, namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata, headers, key, routes, xact)
        VALUES (v_ids[1], v_namespace, p_event_types[1], coalesce(p_payloads[1], 'null')::jsonb, coalesce(p_producer, ''), p_scheduled_task_ids[1],
                coalesce(p_metadata[1], '{}')::jsonb, p_headers[1]::jsonb, p_keys[1], v_groups, log_xact(v_xact))
        RETURNING e.* INTO v_event;
        v_counts := ARRAY[cardinality(v_groups)];
        IF v_tags IS NULL AND p_strict THEN
            v_tags := '{eventbus}';
        ELSIF p_keys[1] IS NOT NULL THEN
            v_tags := NULL;
        END IF;
        IF v_tags IS NOT NULL THEN
            v_types := array_fill(p_event_types[1], ARRAY[cardinality(v_tags)]);
            v_inputs := array_fill(delivery_input(v_event)::text, ARRAY[cardinality(v_tags)]);
            v_headers := array_fill(p_headers[1], ARRAY[cardinality(v_tags)]);
        END IF;
    ELSE
    WITH given AS (
        SELECT i.* FROM unnest(v_ids, coalesce(v_owners, v_ids), p_event_types, p_payloads, p_keys, p_headers, p_metadata, p_scheduled_task_ids) WITH ORDINALITY
               AS i (id, owner, type, payload, key, headers, metadata, scheduled_task_id, ord)
    ), routed AS MATERIALIZED (
        SELECT t.type, array_agg(r.group_id) AS groups, array_agg(r.tag) AS tags
          FROM (SELECT DISTINCT g.type FROM given g) AS t CROSS JOIN LATERAL routes(v_namespace, t.type) AS r
         GROUP BY t.type
    ), logged AS (
        INSERT INTO event_log AS e (event_id, namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata, headers, key, routes, xact)
        SELECT g.id, v_namespace, g.type, coalesce(g.payload, 'null')::jsonb, coalesce(p_producer, ''), g.scheduled_task_id, coalesce(g.metadata, '{}')::jsonb,
               g.headers::jsonb, g.key, coalesce(r.groups, '{}'), (SELECT log_xact(v_xact))
          FROM given g LEFT JOIN routed r ON r.type = g.type
         WHERE g.owner = g.id
        RETURNING e.event_id, e.event_type, e.key, e AS event
    ), delivered AS ( -- those of keys are by line_up
        SELECT l.event_type AS type, delivery_input(l.event)::text AS input, d.tag, g.headers, g.ord
          FROM logged l JOIN given g ON g.id = l.event_id JOIN routed r ON r.type = l.event_type CROSS JOIN LATERAL unnest(r.tags) AS d (tag)
         WHERE l.key IS NULL
        UNION ALL -- these are for nobody
        SELECT l.event_type, delivery_input(l.event)::text, 'eventbus', g.headers, g.ord
          FROM logged l JOIN given g ON g.id = l.event_id
         WHERE p_strict AND NOT EXISTS (SELECT FROM routed r WHERE r.type = l.event_type)
    )
    SELECT d.types, d.inputs, d.tags, d.headers, c.counts
      INTO v_types, v_inputs, v_tags, v_headers, v_counts
      FROM (SELECT array_agg(d.type ORDER BY d.ord) AS types, array_agg(d.input ORDER BY d.ord) AS inputs, array_agg(d.tag ORDER BY d.ord) AS tags,
                   array_agg(d.headers ORDER BY d.ord) AS headers FROM delivered d) AS d,
           (SELECT array_agg(coalesce(cardinality(r.groups), 0) ORDER BY g.ord) AS counts FROM given g LEFT JOIN routed r ON r.type = g.type) AS c;
    END IF;
    IF p_strict AND 'eventbus' = ANY (v_tags) THEN
        PERFORM bury_unrouted(v_namespace, v_types, v_inputs, v_tags, v_headers);
        SELECT array_agg(d.type ORDER BY d.ord), array_agg(d.input ORDER BY d.ord), array_agg(d.tag ORDER BY d.ord), array_agg(d.headers ORDER BY d.ord)
          INTO v_types, v_inputs, v_tags, v_headers
          FROM unnest(v_types, v_inputs, v_tags, v_headers) WITH ORDINALITY AS d (type, input, tag, headers, ord) WHERE d.tag <> 'eventbus';
    END IF;
    IF v_tags IS NOT NULL THEN
        -- Of these alone: those at the head of a line come at the commit, and tell by themselves.
        v_before := quiet(p_quiet);
        PERFORM enqueue_deliveries(v_namespace, v_types, v_inputs, v_tags, v_headers);
        PERFORM set_config('pgwake.notify', v_before, true);
    END IF;
    RETURN QUERY
    SELECT i.owner, i.owner <> i.id, CASE WHEN i.owner = i.id THEN i.count ELSE 0 END, CASE WHEN i.ord = 1 THEN v_tags END
      FROM unnest(v_ids, coalesce(v_owners, v_ids), v_counts) WITH ORDINALITY AS i (id, owner, count, ord) ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION emit_many IS 'Emits events in a namespace (null: default), one per array element, all or none, and returns a row for each in the same order: its id, whether its dedup key is taken by another, whose id that is then, to how many groups it goes, and in the first row the tags of what was added to the worker queue. An array that is null, or has a null, means the default; see emit. p_payloads are JSON, p_headers JSON objects of strings and p_metadata JSON objects. With p_strict an event that is for no group becomes a dead letter; otherwise it is in the log alone. p_quiet leaves the notification to the caller. PW003 for a payload, or metadata, of more than p_max_payload bytes or of more than 100 MiB, also once its numbers are written out, and for other arguments that break a rule.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION append_event_log(
    p_namespace text, p_event_type text, p_payload jsonb, p_producer_node_id text, p_scheduled_task_id uuid DEFAULT NULL, p_metadata jsonb DEFAULT '{}')
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_id bigint;
BEGIN
    IF greatest(octet_length(p_payload::text), octet_length(p_metadata::text)) > 104857600 THEN -- max_event_payload, which a caller may have no right to call yet
        RAISE EXCEPTION 'a payload has more than 104857600 bytes' USING ERRCODE = 'PW003';
    END IF;
    INSERT INTO event_log (namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata)
    VALUES (p_namespace, p_event_type, coalesce(p_payload, 'null'), coalesce(p_producer_node_id, ''), p_scheduled_task_id, coalesce(p_metadata, '{}'))
    RETURNING event_id INTO v_id;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    RETURN v_id;
END
$$;
-- +goose StatementEnd

SELECT revoke_from_public();

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
CREATE OR REPLACE FUNCTION append_event_log(
    p_namespace text, p_event_type text, p_payload jsonb, p_producer_node_id text, p_scheduled_task_id uuid DEFAULT NULL, p_metadata jsonb DEFAULT '{}')
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_id bigint;
BEGIN
    INSERT INTO event_log (namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata)
    VALUES (p_namespace, p_event_type, coalesce(p_payload, 'null'), coalesce(p_producer_node_id, ''), p_scheduled_task_id, coalesce(p_metadata, '{}'))
    RETURNING event_id INTO v_id;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    RETURN v_id;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION emit_many(
    p_namespace text, p_event_types text[], p_payloads text[], p_keys text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_dedup_keys text[] DEFAULT NULL, p_dedup_fors interval[] DEFAULT NULL, p_producer text DEFAULT NULL, p_metadata text[] DEFAULT NULL,
    p_scheduled_task_ids uuid[] DEFAULT NULL, p_strict boolean DEFAULT false, p_max_payload integer DEFAULT 1048576,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (event_id bigint, duplicate boolean, deliveries integer, tags text[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_xact   xid8 := pg_current_xact_id(); -- this transaction has it before anything of the subscriptions is read, see horizon
    v_ids    bigint[] := ARRAY(SELECT nextval('event_log_event_id_seq') FROM generate_series(1, cardinality(p_event_types)));
    v_owners bigint[]; -- of the dedup keys; null: none is given
    v_counts integer[];
    v_types  text[];
    v_inputs text[];
    v_tags   text[];
    v_headers text[];
    v_groups bigint[];
    v_event  event_log;
    v_before text;
BEGIN
    IF p_event_types IS NULL OR array_position(p_event_types, NULL) > 0 OR v_namespace !~ '^[a-z][a-z0-9_-]{0,39}$' THEN
        RAISE EXCEPTION 'emit needs an event type, and a namespace of 1 to 40 lower-case letters, digits, _ and -, a letter first: not %', quote_literal(v_namespace) USING ERRCODE = 'PW003';
    ELSIF cardinality(p_event_types) <> ANY (array_remove(ARRAY[cardinality(p_payloads), cardinality(p_keys), cardinality(p_headers),
        cardinality(p_dedup_keys), cardinality(p_dedup_fors), cardinality(p_metadata), cardinality(p_scheduled_task_ids)], NULL)) THEN
        RAISE EXCEPTION 'the arrays have different lengths' USING ERRCODE = 'PW003';
    ELSIF p_max_payload < (SELECT max(octet_length(p.payload)) FROM unnest(p_payloads) AS p (payload)) THEN
        RAISE EXCEPTION 'a payload has more than % bytes', p_max_payload USING ERRCODE = 'PW003';
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    IF array_remove(p_dedup_keys, NULL) <> '{}' THEN
        v_owners := take_dedup_keys(v_namespace, v_ids, p_dedup_keys, p_dedup_fors);
    END IF;
    IF v_namespace <> 'default' THEN
        PERFORM register_namespaces(ARRAY[v_namespace]);
    END IF;

    PERFORM emits_keys(p_keys);
    IF cardinality(v_ids) = 1 AND v_owners IS NULL THEN -- as below, at a fraction of the cost
        SELECT coalesce(array_agg(r.group_id), '{}'), array_agg(r.tag) INTO v_groups, v_tags FROM routes(v_namespace, p_event_types[1]) AS r;
        INSERT INTO event_log AS e (event_id, namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata, headers, key, routes, xact)
        VALUES (v_ids[1], v_namespace, p_event_types[1], coalesce(p_payloads[1], 'null')::jsonb, coalesce(p_producer, ''), p_scheduled_task_ids[1],
                coalesce(p_metadata[1], '{}')::jsonb, p_headers[1]::jsonb, p_keys[1], v_groups, log_xact(v_xact))
        RETURNING e.* INTO v_event;
        v_counts := ARRAY[cardinality(v_groups)];
        IF v_tags IS NULL AND p_strict THEN
            v_tags := '{eventbus}';
        ELSIF p_keys[1] IS NOT NULL THEN
            v_tags := NULL;
        END IF;
        IF v_tags IS NOT NULL THEN
            v_types := array_fill(p_event_types[1], ARRAY[cardinality(v_tags)]);
            v_inputs := array_fill(delivery_input(v_event)::text, ARRAY[cardinality(v_tags)]);
            v_headers := array_fill(p_headers[1], ARRAY[cardinality(v_tags)]);
        END IF;
    ELSE
    WITH given AS (
        SELECT i.* FROM unnest(v_ids, coalesce(v_owners, v_ids), p_event_types, p_payloads, p_keys, p_headers, p_metadata, p_scheduled_task_ids) WITH ORDINALITY
               AS i (id, owner, type, payload, key, headers, metadata, scheduled_task_id, ord)
    ), routed AS MATERIALIZED (
        SELECT t.type, array_agg(r.group_id) AS groups, array_agg(r.tag) AS tags
          FROM (SELECT DISTINCT g.type FROM given g) AS t CROSS JOIN LATERAL routes(v_namespace, t.type) AS r
         GROUP BY t.type
    ), logged AS (
        INSERT INTO event_log AS e (event_id, namespace, event_type, payload, producer_node_id, scheduled_task_id, metadata, headers, key, routes, xact)
        SELECT g.id, v_namespace, g.type, coalesce(g.payload, 'null')::jsonb, coalesce(p_producer, ''), g.scheduled_task_id, coalesce(g.metadata, '{}')::jsonb,
               g.headers::jsonb, g.key, coalesce(r.groups, '{}'), (SELECT log_xact(v_xact))
          FROM given g LEFT JOIN routed r ON r.type = g.type
         WHERE g.owner = g.id
        RETURNING e.event_id, e.event_type, e.key, e AS event
    ), delivered AS ( -- those of keys are by line_up
        SELECT l.event_type AS type, delivery_input(l.event)::text AS input, d.tag, g.headers, g.ord
          FROM logged l JOIN given g ON g.id = l.event_id JOIN routed r ON r.type = l.event_type CROSS JOIN LATERAL unnest(r.tags) AS d (tag)
         WHERE l.key IS NULL
        UNION ALL -- these are for nobody
        SELECT l.event_type, delivery_input(l.event)::text, 'eventbus', g.headers, g.ord
          FROM logged l JOIN given g ON g.id = l.event_id
         WHERE p_strict AND NOT EXISTS (SELECT FROM routed r WHERE r.type = l.event_type)
    )
    SELECT d.types, d.inputs, d.tags, d.headers, c.counts
      INTO v_types, v_inputs, v_tags, v_headers, v_counts
      FROM (SELECT array_agg(d.type ORDER BY d.ord) AS types, array_agg(d.input ORDER BY d.ord) AS inputs, array_agg(d.tag ORDER BY d.ord) AS tags,
                   array_agg(d.headers ORDER BY d.ord) AS headers FROM delivered d) AS d,
           (SELECT array_agg(coalesce(cardinality(r.groups), 0) ORDER BY g.ord) AS counts FROM given g LEFT JOIN routed r ON r.type = g.type) AS c;
    END IF;
    IF p_strict AND 'eventbus' = ANY (v_tags) THEN
        PERFORM bury_unrouted(v_namespace, v_types, v_inputs, v_tags, v_headers);
        SELECT array_agg(d.type ORDER BY d.ord), array_agg(d.input ORDER BY d.ord), array_agg(d.tag ORDER BY d.ord), array_agg(d.headers ORDER BY d.ord)
          INTO v_types, v_inputs, v_tags, v_headers
          FROM unnest(v_types, v_inputs, v_tags, v_headers) WITH ORDINALITY AS d (type, input, tag, headers, ord) WHERE d.tag <> 'eventbus';
    END IF;
    IF v_tags IS NOT NULL THEN
        -- Of these alone: those at the head of a line come at the commit, and tell by themselves.
        v_before := quiet(p_quiet);
        PERFORM enqueue_deliveries(v_namespace, v_types, v_inputs, v_tags, v_headers);
        PERFORM set_config('pgwake.notify', v_before, true);
    END IF;
    RETURN QUERY
    SELECT i.owner, i.owner <> i.id, CASE WHEN i.owner = i.id THEN i.count ELSE 0 END, CASE WHEN i.ord = 1 THEN v_tags END
      FROM unnest(v_ids, coalesce(v_owners, v_ids), v_counts) WITH ORDINALITY AS i (id, owner, count, ord) ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION emit_many IS 'Emits events in a namespace (null: default), one per array element, all or none, and returns a row for each in the same order: its id, whether its dedup key is taken by another, whose id that is then, to how many groups it goes, and in the first row the tags of what was added to the worker queue. An array that is null, or has a null, means the default; see emit. p_payloads are JSON, p_headers JSON objects of strings and p_metadata JSON objects. With p_strict an event that is for no group becomes a dead letter; otherwise it is in the log alone. p_quiet leaves the notification to the caller. PW003 for a payload of more than p_max_payload bytes, and for other arguments that break a rule.';

DROP FUNCTION check_written_out, max_event_payload;
