-- An occurrence that a statement is given twice is carried out once.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION occur_many(p_items bigint[], p_tokens uuid[], p_task_ids uuid[])
RETURNS boolean[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute'; -- as in occur
    v_tasks  scheduled_tasks[];
    v_events bigint[];
    v_nexts  timestamptz[];
    v_items  bigint[];
BEGIN
    -- Each once, also where one is there by a claim whose lease has ended, and by the next one.
    v_tasks := ARRAY(
        SELECT t FROM scheduled_tasks t
         WHERE t.task_id = ANY (p_task_ids) AND EXISTS (SELECT FROM unnest(p_items, p_task_ids) AS i (item, task_id) WHERE i.task_id = t.task_id AND i.item = t.item_id)
           AND t.active AND t.event_type IS NOT NULL AND t.overlap = 'allow' AND t.next_at + t.jitter >= clock_timestamp() - c_late
         ORDER BY t.task_id FOR UPDATE OF t SKIP LOCKED);
    -- The ends of the items first: whose lease has ended is carried out by somebody else.
    v_items := ARRAY(SELECT t.item_id FROM unnest(v_tasks) AS t);
    v_items := ARRAY(SELECT a.item_id FROM ack_work_many(
        ARRAY(SELECT i.item FROM unnest(p_items, p_tokens) AS i (item, token) WHERE i.item = ANY (v_items) ORDER BY i.item, i.token),
        ARRAY(SELECT i.token FROM unnest(p_items, p_tokens) AS i (item, token) WHERE i.item = ANY (v_items) ORDER BY i.item, i.token)) AS a);
    v_tasks := ARRAY(SELECT t FROM unnest(v_tasks) AS t WHERE t.item_id = ANY (v_items) ORDER BY t.namespace, t.task_id);
    IF v_tasks = '{}' THEN
        RETURN array_fill(false, ARRAY[cardinality(p_items)]);
    END IF;
    v_events := ARRAY(
        SELECT e.event_id
          FROM (SELECT t.namespace, array_agg(t.event_type ORDER BY t.task_id) AS types, array_agg(t.payload::text ORDER BY t.task_id) AS payloads,
                       array_agg(t.key ORDER BY t.task_id) AS keys, array_agg(jsonb_build_object('scheduled_at', t.next_at)::text ORDER BY t.task_id) AS metadata,
                       array_agg(t.task_id ORDER BY t.task_id) AS ids
                  FROM unnest(v_tasks) AS t GROUP BY t.namespace ORDER BY t.namespace OFFSET 0) AS n
         CROSS JOIN LATERAL emit_many(n.namespace, n.types, n.payloads, n.keys, p_producer => 'scheduler', p_metadata => n.metadata, p_scheduled_task_ids => n.ids)
               WITH ORDINALITY AS e
         ORDER BY n.namespace, e.ordinality);
    WITH counted AS ( -- @every alone counts from since
        SELECT t.cron_expression, t.timezone, t.next_at, s.since, next_occurrence(t.cron_expression, t.timezone, t.next_at, s.since) AS at
          FROM unnest(v_tasks) AS t CROSS JOIN LATERAL (SELECT CASE WHEN t.cron_expression ~* '@every' THEN t.since END) AS s (since)
         GROUP BY t.cron_expression, t.timezone, t.next_at, s.since)
    SELECT array_agg(c.at ORDER BY t.namespace, t.task_id) INTO v_nexts
      FROM unnest(v_tasks) AS t
      JOIN counted c ON c.cron_expression = t.cron_expression AND c.timezone = t.timezone AND c.next_at = t.next_at
                    AND c.since IS NOT DISTINCT FROM CASE WHEN t.cron_expression ~* '@every' THEN t.since END;
    WITH due AS (
        SELECT array_agg('eventbus|schedule'::text ORDER BY d.ord) AS names, array_agg(json_build_object('task_id', d.task_id)::text ORDER BY d.ord) AS inputs,
               array_agg(d.namespace ORDER BY d.ord) AS namespaces, array_agg(d.next + d.jitter * random() ORDER BY d.ord) AS visible_ats,
               array_agg('eventbus'::text ORDER BY d.ord) AS tags
          FROM (SELECT t.task_id, t.namespace, t.jitter, v_nexts[t.ordinality] AS next, t.ordinality AS ord FROM unnest(v_tasks) WITH ORDINALITY AS t) AS d
         WHERE d.next IS NOT NULL)
    SELECT array_agg(m.item_id ORDER BY m.ordinality) INTO v_items
      FROM due d CROSS JOIN LATERAL enqueue_work_many(d.names, d.inputs, d.namespaces, p_visible_ats => d.visible_ats, p_tags => d.tags) WITH ORDINALITY AS m
     WHERE d.names IS NOT NULL;
    UPDATE scheduled_tasks t
       SET last_at = o.next_at, last_id = v_events[o.ord], updated_at = clock_timestamp(), next_at = v_nexts[o.ord], item_id = v_items[o.place]
      FROM (SELECT u.task_id, u.next_at, u.ordinality AS ord, CASE WHEN v_nexts[u.ordinality] IS NOT NULL THEN count(v_nexts[u.ordinality]) OVER (ORDER BY u.ordinality) END AS place
              FROM unnest(v_tasks) WITH ORDINALITY AS u) AS o
     WHERE t.task_id = o.task_id;
    RETURN ARRAY(SELECT i.task_id IN (SELECT t.task_id FROM unnest(v_tasks) AS t) FROM unnest(p_task_ids) WITH ORDINALITY AS i (task_id, ord) ORDER BY i.ord);
END
$$;
-- +goose StatementEnd

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
CREATE OR REPLACE FUNCTION occur_many(p_items bigint[], p_tokens uuid[], p_task_ids uuid[])
RETURNS boolean[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    c_late   CONSTANT interval := '1 minute'; -- as in occur
    v_tasks  scheduled_tasks[];
    v_events bigint[];
    v_nexts  timestamptz[];
    v_items  bigint[];
BEGIN
    v_tasks := ARRAY(
        SELECT t FROM unnest(p_items, p_task_ids) AS i (item, task_id) JOIN scheduled_tasks t ON t.task_id = i.task_id AND t.item_id = i.item
         WHERE t.active AND t.event_type IS NOT NULL AND t.overlap = 'allow' AND t.next_at + t.jitter >= clock_timestamp() - c_late
         ORDER BY t.task_id FOR UPDATE OF t SKIP LOCKED);
    -- The ends of the items first: whose lease has ended is carried out by somebody else.
    v_items := ARRAY(SELECT a.item_id FROM ack_work_many(ARRAY(SELECT t.item_id FROM unnest(v_tasks) AS t ORDER BY t.item_id),
        ARRAY(SELECT i.token FROM unnest(v_tasks) AS t JOIN unnest(p_items, p_tokens) AS i (item, token) ON i.item = t.item_id ORDER BY t.item_id)) AS a);
    v_tasks := ARRAY(SELECT t FROM unnest(v_tasks) AS t WHERE t.item_id = ANY (v_items) ORDER BY t.namespace, t.task_id);
    IF v_tasks = '{}' THEN
        RETURN array_fill(false, ARRAY[cardinality(p_items)]);
    END IF;
    v_events := ARRAY(
        SELECT e.event_id
          FROM (SELECT t.namespace, array_agg(t.event_type ORDER BY t.task_id) AS types, array_agg(t.payload::text ORDER BY t.task_id) AS payloads,
                       array_agg(t.key ORDER BY t.task_id) AS keys, array_agg(jsonb_build_object('scheduled_at', t.next_at)::text ORDER BY t.task_id) AS metadata,
                       array_agg(t.task_id ORDER BY t.task_id) AS ids
                  FROM unnest(v_tasks) AS t GROUP BY t.namespace ORDER BY t.namespace OFFSET 0) AS n
         CROSS JOIN LATERAL emit_many(n.namespace, n.types, n.payloads, n.keys, p_producer => 'scheduler', p_metadata => n.metadata, p_scheduled_task_ids => n.ids)
               WITH ORDINALITY AS e
         ORDER BY n.namespace, e.ordinality);
    WITH counted AS ( -- @every alone counts from since
        SELECT t.cron_expression, t.timezone, t.next_at, s.since, next_occurrence(t.cron_expression, t.timezone, t.next_at, s.since) AS at
          FROM unnest(v_tasks) AS t CROSS JOIN LATERAL (SELECT CASE WHEN t.cron_expression ~* '@every' THEN t.since END) AS s (since)
         GROUP BY t.cron_expression, t.timezone, t.next_at, s.since)
    SELECT array_agg(c.at ORDER BY t.namespace, t.task_id) INTO v_nexts
      FROM unnest(v_tasks) AS t
      JOIN counted c ON c.cron_expression = t.cron_expression AND c.timezone = t.timezone AND c.next_at = t.next_at
                    AND c.since IS NOT DISTINCT FROM CASE WHEN t.cron_expression ~* '@every' THEN t.since END;
    WITH due AS (
        SELECT array_agg('eventbus|schedule'::text ORDER BY d.ord) AS names, array_agg(json_build_object('task_id', d.task_id)::text ORDER BY d.ord) AS inputs,
               array_agg(d.namespace ORDER BY d.ord) AS namespaces, array_agg(d.next + d.jitter * random() ORDER BY d.ord) AS visible_ats,
               array_agg('eventbus'::text ORDER BY d.ord) AS tags
          FROM (SELECT t.task_id, t.namespace, t.jitter, v_nexts[t.ordinality] AS next, t.ordinality AS ord FROM unnest(v_tasks) WITH ORDINALITY AS t) AS d
         WHERE d.next IS NOT NULL)
    SELECT array_agg(m.item_id ORDER BY m.ordinality) INTO v_items
      FROM due d CROSS JOIN LATERAL enqueue_work_many(d.names, d.inputs, d.namespaces, p_visible_ats => d.visible_ats, p_tags => d.tags) WITH ORDINALITY AS m
     WHERE d.names IS NOT NULL;
    UPDATE scheduled_tasks t
       SET last_at = o.next_at, last_id = v_events[o.ord], updated_at = clock_timestamp(), next_at = v_nexts[o.ord], item_id = v_items[o.place]
      FROM (SELECT u.task_id, u.next_at, u.ordinality AS ord, CASE WHEN v_nexts[u.ordinality] IS NOT NULL THEN count(v_nexts[u.ordinality]) OVER (ORDER BY u.ordinality) END AS place
              FROM unnest(v_tasks) WITH ORDINALITY AS u) AS o
     WHERE t.task_id = o.task_id;
    RETURN ARRAY(SELECT i.task_id IN (SELECT t.task_id FROM unnest(v_tasks) AS t) FROM unnest(p_task_ids) WITH ORDINALITY AS i (task_id, ord) ORDER BY i.ord);
END
$$;
-- +goose StatementEnd
