-- A message is not for an execution that cannot be: whatever turn it came to would fail.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_message_many(
    p_instances text[], p_kinds text[], p_datas text[], p_names text[] DEFAULT NULL, p_versions text[] DEFAULT NULL,
    p_executions bigint[] DEFAULT NULL, p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_queues text[] DEFAULT NULL, p_headers text[] DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz, item_namespace text, item_label text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now        timestamptz := clock_timestamp();
    v_before     text;
    v_ids        bigint[] := ARRAY(SELECT nextval('orchestrator_queue_id_seq') FROM generate_series(1, cardinality(p_instances)));
    v_namespaces text[];
    v_queues     text[];
    v_pins       bigint[];
    v_owners     text[];
    v_untils     timestamptz[];
    v_unsure     text[]; -- instances
    v_guessed    text[];
    v_texts      text := concat(p_instances, p_kinds, p_names, p_versions, p_dedup_keys, p_queues);
BEGIN
    -- As in enqueue_work_many.
    IF octet_length(v_texts) > 255 OR strpos(v_texts, '""') > 0
       OR array_position(p_instances, NULL) IS NOT NULL OR array_position(p_kinds, NULL) IS NOT NULL
       OR p_kinds && ARRAY['start', 'continue_as_new'] AND (coalesce(cardinality(p_names), 0) < cardinality(p_kinds) OR array_position(p_names, NULL) IS NOT NULL)
       OR octet_length(p_namespaces::text) > 42 OR p_namespaces::text !~ '^\{(NULL|[a-z][a-z0-9_-]*)}$' OR 0 > ANY (p_priorities) OR 9 < ANY (p_priorities)
       OR interval '0' > ANY (p_delays) OR 'infinity' = ANY (p_visible_ats) OR '-infinity' = ANY (p_visible_ats)
       OR array_remove(p_delays, NULL) <> '{}' AND array_remove(p_visible_ats, NULL) <> '{}' OR 0 > ANY (p_executions) THEN
        PERFORM check_texts('an instance id', p_instances, p_required => true), check_texts('a kind', p_kinds, p_required => true);
        PERFORM check_texts('a name', p_names), check_texts('a version', p_versions);
        PERFORM check_texts('a dedup key', p_dedup_keys), check_texts('a queue name', p_queues, 0);
        PERFORM check_options(p_namespaces, p_priorities, p_delays, p_visible_ats);
        IF EXISTS (SELECT FROM unnest(p_kinds, p_names) AS i (kind, name) WHERE i.kind IN ('start', 'continue_as_new') AND i.name IS NULL) THEN
            RAISE EXCEPTION 'a message that opens an execution needs the name of the orchestration' USING ERRCODE = 'PW003';
        ELSIF 0 > ANY (p_executions) THEN
            RAISE EXCEPTION 'an execution is not negative' USING ERRCODE = 'PW003';
        END IF;
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    PERFORM register_namespaces(p_namespaces);
    v_unsure := share_homes(p_instances);
    SELECT array_agg(coalesce(home.namespace, 'default') ORDER BY home.ord), array_agg(coalesce(home.queue, '') ORDER BY home.ord),
           array_agg(home.pin ORDER BY home.ord), array_agg(home.sticky_owner ORDER BY home.ord), array_agg(home.sticky_until ORDER BY home.ord),
           array_agg(DISTINCT home.instance_id) FILTER (WHERE home.guessed)
      INTO v_namespaces, v_queues, v_pins, v_owners, v_untils, v_guessed
      FROM (SELECT i.ord, i.instance_id,
                   coalesce(known.namespace, queued.namespace,
                            first_value(i.namespace) OVER (PARTITION BY i.instance_id ORDER BY i.namespace IS NULL, i.ord)) AS namespace,
                   coalesce(known.queue, queued.queue,
                            first_value(i.queue) OVER (PARTITION BY i.instance_id ORDER BY i.queue IS NULL, i.ord)) AS queue,
                   coalesce(current.pin, 0) AS pin,
                   CASE WHEN known.sticky_until > v_now THEN known.sticky_owner END AS sticky_owner, known.sticky_until,
                   -- Whoever opens an instance says where it is; for anybody else that is a guess. That it is in the
                   -- default namespace and has no queue name is none: ack_orchestration counts on nothing else.
                   coalesce(known.instance_id, queued.namespace) IS NULL AND i.kind NOT IN ('start', 'continue_as_new')
                   AND (i.namespace <> 'default' OR i.queue <> '') AS guessed
              FROM unnest(p_instances, coalesce(p_namespaces, '{}'), coalesce(p_queues, '{}'), p_kinds) WITH ORDINALITY AS i (instance_id, namespace, queue, kind, ord)
              LEFT JOIN instances known ON known.instance_id = ANY (ARRAY[i.instance_id]) -- as in ack_work_many
              LEFT JOIN executions current ON current.instance_id = ANY (ARRAY[known.instance_id]) AND current.execution_id = known.current_execution
              LEFT JOIN LATERAL ( -- it is about to become known
                   SELECT q.namespace, q.queue FROM orchestrator_queue q
                    WHERE known.instance_id IS NULL AND q.instance_id BETWEEN i.instance_id AND i.instance_id
                    ORDER BY q.instance_id, q.id LIMIT 1) queued ON true) AS home;
    v_before := quiet(p_quiet);
    INSERT INTO orchestrator_queue (id, instance_id, kind, data, name, version, execution_id,
                                    namespace, priority, visible_at, dedup_key, queue, pin, sticky_owner, sticky_due, headers, created_at)
    SELECT i.id, i.instance_id, i.kind, i.data::json, i.name, i.version, i.execution_id, i.namespace,
           coalesce(i.priority, 0), CASE WHEN due.sticks THEN i.sticky_until ELSE due.at END, i.dedup_key, i.queue, i.pin,
           CASE WHEN due.sticks THEN i.sticky_owner END, CASE WHEN due.sticks THEN due.at END, i.headers::jsonb, v_now
      FROM unnest(v_ids, p_instances, p_kinds, p_datas, p_names, p_versions, p_executions, v_namespaces, p_priorities,
                  p_delays, p_visible_ats, p_dedup_keys, v_queues, v_pins, v_owners, v_untils, p_headers) WITH ORDINALITY
           AS i (id, instance_id, kind, data, name, version, execution_id, namespace, priority,
                 delay, visible_at, dedup_key, queue, pin, sticky_owner, sticky_until, headers, ord)
     CROSS JOIN LATERAL (SELECT d.at, i.sticky_owner IS NOT NULL AND d.at < i.sticky_until AS sticks
                           FROM (SELECT coalesce(i.visible_at, v_now + i.delay, v_now) AS at) AS d) AS due
     ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF NOT p_quiet AND array_remove(v_owners, NULL) <> '{}' THEN
        -- The trigger has told when they are visible.
        PERFORM notify_queue('orchestrator', count(*) FILTER (WHERE q.sticky_due <= v_now), min(q.sticky_due) FILTER (WHERE q.sticky_due > v_now))
           FROM unnest(v_ids) AS i (id)
          CROSS JOIN LATERAL (SELECT s.sticky_due FROM orchestrator_queue s WHERE s.id BETWEEN i.id AND i.id ORDER BY s.id LIMIT 1) q
         HAVING count(q.sticky_due) > 0;
    END IF;

    v_unsure := v_unsure || v_guessed;
    IF v_unsure <> '{}' THEN
        INSERT INTO realignments (instance_id) SELECT DISTINCT i.id FROM unnest(v_unsure) AS i (id);
        PERFORM notify_queue('orchestrator', 1, NULL); -- wherever they belong
    END IF;

    -- In a second statement, whose snapshot shows the row that a conflict was waited for. The limits keep the planner from
    -- a join by walking over the whole table, which is as good to it if it believes the table to be empty.
    RETURN QUERY
    SELECT coalesce(added.id, queued.id), added.id IS NULL,
           coalesce(added.sticky_due, added.visible_at, queued.sticky_due, queued.visible_at), v_now, i.namespace,
           CASE WHEN added.pin = 0 AND added.sticky_owner IS NULL THEN added.queue END
      FROM unnest(v_ids, v_namespaces, p_dedup_keys) WITH ORDINALITY AS i (id, namespace, dedup_key, ord)
      LEFT JOIN LATERAL (SELECT q.* FROM orchestrator_queue q WHERE q.id = i.id LIMIT 1) added ON true
      LEFT JOIN LATERAL (
           SELECT q.* FROM orchestrator_queue q
            WHERE added.id IS NULL AND q.namespace = i.namespace AND q.dedup_key BETWEEN i.dedup_key AND i.dedup_key
            ORDER BY q.dedup_key LIMIT 1) queued ON true
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION enqueue_message_many(
    p_instances text[], p_kinds text[], p_datas text[], p_names text[] DEFAULT NULL, p_versions text[] DEFAULT NULL,
    p_executions bigint[] DEFAULT NULL, p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_queues text[] DEFAULT NULL, p_headers text[] DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz, item_namespace text, item_label text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now        timestamptz := clock_timestamp();
    v_before     text;
    v_ids        bigint[] := ARRAY(SELECT nextval('orchestrator_queue_id_seq') FROM generate_series(1, cardinality(p_instances)));
    v_namespaces text[];
    v_queues     text[];
    v_pins       bigint[];
    v_owners     text[];
    v_untils     timestamptz[];
    v_unsure     text[]; -- instances
    v_guessed    text[];
    v_texts      text := concat(p_instances, p_kinds, p_names, p_versions, p_dedup_keys, p_queues);
BEGIN
    -- As in enqueue_work_many.
    IF octet_length(v_texts) > 255 OR strpos(v_texts, '""') > 0
       OR array_position(p_instances, NULL) IS NOT NULL OR array_position(p_kinds, NULL) IS NOT NULL
       OR p_kinds && ARRAY['start', 'continue_as_new'] AND (coalesce(cardinality(p_names), 0) < cardinality(p_kinds) OR array_position(p_names, NULL) IS NOT NULL)
       OR octet_length(p_namespaces::text) > 42 OR p_namespaces::text !~ '^\{(NULL|[a-z][a-z0-9_-]*)}$' OR 0 > ANY (p_priorities) OR 9 < ANY (p_priorities)
       OR interval '0' > ANY (p_delays) OR 'infinity' = ANY (p_visible_ats) OR '-infinity' = ANY (p_visible_ats)
       OR array_remove(p_delays, NULL) <> '{}' AND array_remove(p_visible_ats, NULL) <> '{}' THEN
        PERFORM check_texts('an instance id', p_instances, p_required => true), check_texts('a kind', p_kinds, p_required => true);
        PERFORM check_texts('a name', p_names), check_texts('a version', p_versions);
        PERFORM check_texts('a dedup key', p_dedup_keys), check_texts('a queue name', p_queues, 0);
        PERFORM check_options(p_namespaces, p_priorities, p_delays, p_visible_ats);
        IF EXISTS (SELECT FROM unnest(p_kinds, p_names) AS i (kind, name) WHERE i.kind IN ('start', 'continue_as_new') AND i.name IS NULL) THEN
            RAISE EXCEPTION 'a message that opens an execution needs the name of the orchestration' USING ERRCODE = 'PW003';
        END IF;
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    PERFORM register_namespaces(p_namespaces);
    v_unsure := share_homes(p_instances);
    SELECT array_agg(coalesce(home.namespace, 'default') ORDER BY home.ord), array_agg(coalesce(home.queue, '') ORDER BY home.ord),
           array_agg(home.pin ORDER BY home.ord), array_agg(home.sticky_owner ORDER BY home.ord), array_agg(home.sticky_until ORDER BY home.ord),
           array_agg(DISTINCT home.instance_id) FILTER (WHERE home.guessed)
      INTO v_namespaces, v_queues, v_pins, v_owners, v_untils, v_guessed
      FROM (SELECT i.ord, i.instance_id,
                   coalesce(known.namespace, queued.namespace,
                            first_value(i.namespace) OVER (PARTITION BY i.instance_id ORDER BY i.namespace IS NULL, i.ord)) AS namespace,
                   coalesce(known.queue, queued.queue,
                            first_value(i.queue) OVER (PARTITION BY i.instance_id ORDER BY i.queue IS NULL, i.ord)) AS queue,
                   coalesce(current.pin, 0) AS pin,
                   CASE WHEN known.sticky_until > v_now THEN known.sticky_owner END AS sticky_owner, known.sticky_until,
                   -- Whoever opens an instance says where it is; for anybody else that is a guess. That it is in the
                   -- default namespace and has no queue name is none: ack_orchestration counts on nothing else.
                   coalesce(known.instance_id, queued.namespace) IS NULL AND i.kind NOT IN ('start', 'continue_as_new')
                   AND (i.namespace <> 'default' OR i.queue <> '') AS guessed
              FROM unnest(p_instances, coalesce(p_namespaces, '{}'), coalesce(p_queues, '{}'), p_kinds) WITH ORDINALITY AS i (instance_id, namespace, queue, kind, ord)
              LEFT JOIN instances known ON known.instance_id = ANY (ARRAY[i.instance_id]) -- as in ack_work_many
              LEFT JOIN executions current ON current.instance_id = ANY (ARRAY[known.instance_id]) AND current.execution_id = known.current_execution
              LEFT JOIN LATERAL ( -- it is about to become known
                   SELECT q.namespace, q.queue FROM orchestrator_queue q
                    WHERE known.instance_id IS NULL AND q.instance_id BETWEEN i.instance_id AND i.instance_id
                    ORDER BY q.instance_id, q.id LIMIT 1) queued ON true) AS home;
    v_before := quiet(p_quiet);
    INSERT INTO orchestrator_queue (id, instance_id, kind, data, name, version, execution_id,
                                    namespace, priority, visible_at, dedup_key, queue, pin, sticky_owner, sticky_due, headers, created_at)
    SELECT i.id, i.instance_id, i.kind, i.data::json, i.name, i.version, i.execution_id, i.namespace,
           coalesce(i.priority, 0), CASE WHEN due.sticks THEN i.sticky_until ELSE due.at END, i.dedup_key, i.queue, i.pin,
           CASE WHEN due.sticks THEN i.sticky_owner END, CASE WHEN due.sticks THEN due.at END, i.headers::jsonb, v_now
      FROM unnest(v_ids, p_instances, p_kinds, p_datas, p_names, p_versions, p_executions, v_namespaces, p_priorities,
                  p_delays, p_visible_ats, p_dedup_keys, v_queues, v_pins, v_owners, v_untils, p_headers) WITH ORDINALITY
           AS i (id, instance_id, kind, data, name, version, execution_id, namespace, priority,
                 delay, visible_at, dedup_key, queue, pin, sticky_owner, sticky_until, headers, ord)
     CROSS JOIN LATERAL (SELECT d.at, i.sticky_owner IS NOT NULL AND d.at < i.sticky_until AS sticks
                           FROM (SELECT coalesce(i.visible_at, v_now + i.delay, v_now) AS at) AS d) AS due
     ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF NOT p_quiet AND array_remove(v_owners, NULL) <> '{}' THEN
        -- The trigger has told when they are visible.
        PERFORM notify_queue('orchestrator', count(*) FILTER (WHERE q.sticky_due <= v_now), min(q.sticky_due) FILTER (WHERE q.sticky_due > v_now))
           FROM unnest(v_ids) AS i (id)
          CROSS JOIN LATERAL (SELECT s.sticky_due FROM orchestrator_queue s WHERE s.id BETWEEN i.id AND i.id ORDER BY s.id LIMIT 1) q
         HAVING count(q.sticky_due) > 0;
    END IF;

    v_unsure := v_unsure || v_guessed;
    IF v_unsure <> '{}' THEN
        INSERT INTO realignments (instance_id) SELECT DISTINCT i.id FROM unnest(v_unsure) AS i (id);
        PERFORM notify_queue('orchestrator', 1, NULL); -- wherever they belong
    END IF;

    -- In a second statement, whose snapshot shows the row that a conflict was waited for. The limits keep the planner from
    -- a join by walking over the whole table, which is as good to it if it believes the table to be empty.
    RETURN QUERY
    SELECT coalesce(added.id, queued.id), added.id IS NULL,
           coalesce(added.sticky_due, added.visible_at, queued.sticky_due, queued.visible_at), v_now, i.namespace,
           CASE WHEN added.pin = 0 AND added.sticky_owner IS NULL THEN added.queue END
      FROM unnest(v_ids, v_namespaces, p_dedup_keys) WITH ORDINALITY AS i (id, namespace, dedup_key, ord)
      LEFT JOIN LATERAL (SELECT q.* FROM orchestrator_queue q WHERE q.id = i.id LIMIT 1) added ON true
      LEFT JOIN LATERAL (
           SELECT q.* FROM orchestrator_queue q
            WHERE added.id IS NULL AND q.namespace = i.namespace AND q.dedup_key BETWEEN i.dedup_key AND i.dedup_key
            ORDER BY q.dedup_key LIMIT 1) queued ON true
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
