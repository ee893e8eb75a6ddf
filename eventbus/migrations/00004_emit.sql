-- How an event gets into the log and to the groups.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION take_dedup_keys(p_namespace text, p_ids bigint[], p_dedup_keys text[], p_dedup_fors interval[])
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_owners bigint[];
BEGIN
    IF interval '0' >= ANY (p_dedup_fors) OR interval '36500 days' < ANY (p_dedup_fors) THEN
        RAISE EXCEPTION 'a dedup key is kept for more than no time, and at most 100 years' USING ERRCODE = 'PW003';
    END IF;
    INSERT INTO event_dedup_keys AS k (namespace, dedup_key, event_id, kept_until)
    SELECT DISTINCT ON (i.dedup_key) p_namespace, i.dedup_key, i.id, v_now + coalesce(i.dedup_for, interval '1 day')
      FROM unnest(p_ids, p_dedup_keys, p_dedup_fors) WITH ORDINALITY AS i (id, dedup_key, dedup_for, ord)
     WHERE i.dedup_key IS NOT NULL
     ORDER BY i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) DO UPDATE SET event_id = excluded.event_id, kept_until = excluded.kept_until
     WHERE k.kept_until <= v_now;
    -- In a second statement, whose snapshot shows what was waited for.
    SELECT array_agg(coalesce(k.event_id, i.id) ORDER BY i.ord) INTO v_owners
      FROM unnest(p_ids, p_dedup_keys) WITH ORDINALITY AS i (id, dedup_key, ord)
      LEFT JOIN event_dedup_keys k ON k.namespace = p_namespace AND k.dedup_key = i.dedup_key;
    -- Whoever adds keys removes twice as many whose time is over.
    DELETE FROM event_dedup_keys k
     USING (SELECT old.namespace, old.dedup_key FROM event_dedup_keys old
             WHERE old.kept_until <= v_now
             ORDER BY old.kept_until
             LIMIT 2 * cardinality(p_ids) + 10 FOR UPDATE SKIP LOCKED) AS over
     WHERE k.namespace = over.namespace AND k.dedup_key = over.dedup_key;
    RETURN v_owners;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION take_dedup_keys IS 'Internal: takes the dedup keys of these events, and returns for each the event that has its key: itself, or one before it.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_deliveries(p_namespace text, p_types text[], p_inputs text[], p_tags text[], p_headers text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF cardinality(p_types) = 1 THEN -- the namespace is known, and that of default is not asked for
        PERFORM enqueue_work_item(p_types[1], p_inputs[1], nullif(p_namespace, 'default'), 0::smallint, NULL, NULL, NULL, NULL, NULL, p_tags[1], NULL, p_headers[1], NULL, false);
    ELSIF cardinality(p_types) > 1 THEN
        PERFORM enqueue_work_many(p_types, p_inputs, array_fill(p_namespace, ARRAY[cardinality(p_types)]), p_tags => p_tags, p_headers => p_headers);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_deliveries IS 'Internal: enqueues deliveries of events without a key.';

-- +goose StatementBegin
CREATE FUNCTION emit_many(
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

-- +goose StatementBegin
CREATE FUNCTION bury_unrouted(p_namespace text, p_types text[], p_inputs text[], p_tags text[], p_headers text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_dead record;
    v_item bigint;
BEGIN
    FOR v_dead IN SELECT d.* FROM unnest(p_types, p_inputs, p_tags, p_headers) AS d (type, input, tag, headers) WHERE d.tag = 'eventbus' LOOP
        SELECT m.item_id INTO v_item FROM enqueue_work_many(ARRAY[v_dead.type], ARRAY[v_dead.input], ARRAY[p_namespace], p_tags => ARRAY[v_dead.tag],
                                                            p_headers => ARRAY[v_dead.headers], p_quiet => true) AS m;
        PERFORM bury_work(ARRAY[v_item], 'No handler for event ' || v_dead.type, NULL);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bury_unrouted IS 'Internal: dead letters of events that are for no group. If one is redriven, a node looks again whom it is for (route_again).';

-- +goose StatementBegin
CREATE FUNCTION emit(
    p_namespace text, p_event_type text, p_payload jsonb DEFAULT 'null', p_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_dedup_key text DEFAULT NULL, p_dedup_for interval DEFAULT '1 day', p_producer text DEFAULT NULL, p_metadata jsonb DEFAULT NULL,
    p_scheduled_task_id uuid DEFAULT NULL, p_strict boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (SELECT m.event_id FROM emit_many(p_namespace, ARRAY[p_event_type], ARRAY[p_payload::text], ARRAY[p_key], ARRAY[p_headers::text],
        ARRAY[p_dedup_key], ARRAY[p_dedup_for], p_producer, ARRAY[p_metadata::text], ARRAY[p_scheduled_task_id], p_strict) AS m);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION emit IS 'Emits an event in a namespace (null: default) and returns its id: SELECT emit(''shop'', ''order.created'', ''{"order": 7}''). It is written to the log and delivered to each group that is subscribed to its type, when the transaction commits. The type has up to 180 bytes, in segments with dots between them. Of events with the same p_key a group gets one at a time, in the order of commits. If an event with the same p_dedup_key was emitted in the namespace less than its p_dedup_for ago, nothing happens, and the id is that of the first. p_producer is who emits. p_headers, an object of strings of at most 8 KiB, travels with the event. PW003 if an argument breaks a rule, or the payload has more than 1 MiB.';

-- +goose StatementBegin
CREATE FUNCTION append_event_log(
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
COMMENT ON FUNCTION append_event_log IS 'Writes an event to the log without delivering it to anybody, and returns its id; see emit.';

-- +goose StatementBegin
CREATE FUNCTION deliver(p_events bigint[], p_emitted timestamptz[], p_group_id bigint DEFAULT NULL, p_log boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_delivery  record;
    v_delivered bigint := 0;
BEGIN
    FOR v_delivery IN
        SELECT e.event_id, e.emitted_at, e.event_type, e.namespace, e.headers, e.key, e AS event, r.group_id, r.tag
          FROM unnest(p_events, p_emitted) WITH ORDINALITY AS i (event_id, emitted_at, ord)
          JOIN event_log e ON e.event_id = i.event_id AND e.emitted_at = i.emitted_at
         CROSS JOIN LATERAL routes(e.namespace, e.event_type) AS r
         WHERE p_group_id IS NULL OR r.group_id = p_group_id
         ORDER BY e.key, i.ord -- keys are locked in the same order by all who do so
    LOOP
        IF v_delivery.key IS NOT NULL THEN
            PERFORM line_up(v_delivery.group_id, v_delivery.key, v_delivery.event_id, v_delivery.emitted_at, v_delivery.event_type, v_delivery.tag, p_log);
        ELSE
            PERFORM enqueue_deliveries(v_delivery.namespace, ARRAY[v_delivery.event_type], ARRAY[delivery_input(v_delivery.event)::text],
                                       ARRAY[v_delivery.tag], ARRAY[v_delivery.headers::text]);
        END IF;
        v_delivered := v_delivered + 1;
    END LOOP;
    RETURN v_delivered;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION deliver IS 'Internal: delivers events of the log as if they were emitted now, to a group (null: to each) that is subscribed to them, and returns how many deliveries that are. p_log is as of line_up.';

-- +goose StatementBegin
CREATE FUNCTION route_again(p_item bigint, p_token uuid, p_event_id bigint, p_emitted_at timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_delivered bigint := deliver(ARRAY[p_event_id], ARRAY[p_emitted_at]);
BEGIN
    IF v_delivered > 0 THEN
        PERFORM ack_work(p_item, p_token);
    ELSE
        PERFORM dead_letter_work(p_item, p_token, 'No handler for event ' || q.name) FROM worker_queue q WHERE q.id = p_item;
    END IF;
    RETURN v_delivered;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION route_again IS 'Internal: delivers an event that was a dead letter because it was for nobody, instead of its claimed work item; if it is still for nobody, that is a dead letter once more. PW001 if the token no longer holds.';

-- +goose Down

DROP FUNCTION route_again, deliver, append_event_log, emit, bury_unrouted, emit_many, enqueue_deliveries, take_dedup_keys;
