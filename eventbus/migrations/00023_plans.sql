-- Statements that read what they are for, also while the server takes a table for empty: one is that is analyzed just after it was emptied, until
-- it is analyzed again. Then a plain join may walk over all of it. What is in a subquery with OFFSET 0 or LIMIT is looked up, and so is what is compared
-- by = ANY (ARRAY[...]), which no order of an index is of use for.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION list_groups(p_namespace text)
RETURNS TABLE (group_name text, pattern text, created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT g.name, s.pattern, coalesce(s.created_at, g.created_at) FROM event_groups g
      LEFT JOIN LATERAL (SELECT s.pattern, s.created_at FROM event_subscriptions s WHERE s.group_id = g.group_id OFFSET 0) AS s ON true
     WHERE g.namespace = coalesce(p_namespace, 'default') ORDER BY g.name, s.pattern;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_dedup_keys(p_namespace text, p_ids bigint[], p_dedup_keys text[], p_dedup_fors interval[])
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
      LEFT JOIN LATERAL (SELECT k.event_id FROM event_dedup_keys k WHERE k.namespace = p_namespace AND k.dedup_key = i.dedup_key LIMIT 1) AS k ON true;
    -- Whoever adds keys removes twice as many whose time is over.
    DELETE FROM event_dedup_keys k
     USING (SELECT old.namespace, old.dedup_key FROM event_dedup_keys old
             WHERE old.kept_until <= v_now
             ORDER BY old.kept_until
             LIMIT 2 * cardinality(p_ids) + 10 FOR UPDATE SKIP LOCKED) AS over
     WHERE k.namespace = ANY (ARRAY[over.namespace]) AND k.dedup_key = over.dedup_key;
    RETURN v_owners;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION is_under_way(p_task scheduled_tasks, p_last_id bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN CASE WHEN p_task.event_type IS NULL THEN EXISTS (SELECT FROM worker_queue q WHERE q.id = p_last_id)
                ELSE EXISTS (SELECT FROM event_log e CROSS JOIN LATERAL unnest(e.routes) AS r (group_id)
                               LEFT JOIN LATERAL (SELECT k.key FROM event_keys k WHERE k.group_id = r.group_id AND k.key = e.key LIMIT 1) AS k ON true
                              WHERE e.event_id = p_last_id AND e.scheduled_task_id = p_task.task_id
                                AND (k.key IS NOT NULL OR e.xact = log_xact())) END; -- which lines up at its commit
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION item_of_key_settled()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_key event_keys;
BEGIN
    IF EXISTS (SELECT FROM worker_queue q WHERE q.id = OLD.id) THEN
        RETURN NULL; -- it was redriven since, in this very transaction, and has its place still
    END IF;
    -- As is_behind, before the key is locked, for invariant (order).
    PERFORM FROM event_groups g WHERE g.namespace = OLD.namespace AND g.name = split_part(substr(OLD.tag, 10), '|', 1) AND g.behind FOR KEY SHARE;
    SELECT * INTO v_key FROM event_keys k WHERE k.item_id = OLD.id FOR UPDATE;
    IF NOT FOUND THEN -- it waits behind another, whoever settles which may be about to bring it to the head; or it is nothing of the bus
        PERFORM FROM event_lines l JOIN event_keys k ON k.group_id = ANY (ARRAY[l.group_id]) AND k.key = l.key WHERE l.item_id = OLD.id FOR UPDATE OF k;
        SELECT * INTO v_key FROM event_keys k WHERE k.item_id = OLD.id FOR UPDATE;
    END IF;
    IF FOUND THEN
        PERFORM next_of_key(v_key.group_id, v_key.key);
    ELSE
        DELETE FROM event_lines l WHERE l.item_id = OLD.id;
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION replay_some(p_replay_id bigint, p_limit integer DEFAULT 500)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_replay    event_replays;
    v_namespace text;
    v_end       xid8;
    v_ids       bigint[];
    v_emitted   timestamptz[];
    v_xacts     xid8[];
    v_read      integer;
    v_key       text;
    v_keys      text[];
    v_more      boolean;
BEGIN
    PERFORM is_behind(r.group_id) FROM event_replays r WHERE r.replay_id = p_replay_id AND NOT r.undelivered; -- see invariant (order)
    SELECT * INTO v_replay FROM event_replays r WHERE r.replay_id = p_replay_id FOR UPDATE;
    IF NOT FOUND OR v_replay.ended_at IS NOT NULL THEN
        RETURN 'done';
    END IF;
    SELECT g.namespace INTO v_namespace FROM event_groups g WHERE g.group_id = v_replay.group_id;
    IF v_replay.horizon IS NULL THEN
        v_replay.horizon := horizon();
    END IF;
    -- Of what is below the horizon nothing is delivered to a new group by those who emit and have not seen it: that is here. Those
    -- who have seen it have noted that in their events, on whichever side of the horizon. Above, all have.
    v_end := least(v_replay.horizon, log_xact(pg_snapshot_xmin(pg_current_snapshot())));
    -- Planned for the bounds that there are: one plan for any bounds reads, in each step, all that is left of the log, and sorts it.
    EXECUTE '
        SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
          FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
                 WHERE l.namespace = $1 AND (l.xact, l.event_id) > ($2, $3) AND l.xact < $4
                   AND ($5 IS NULL OR l.event_id >= $5) AND ($6 IS NULL OR l.event_id <= $6)
                   AND ($7 IS NULL OR l.emitted_at >= $7) AND ($8 IS NULL OR l.emitted_at < $8)
                   AND NOT ($9 AND l.routes @> ARRAY[$10])
                 ORDER BY l.xact, l.event_id LIMIT $11) AS e'
      INTO v_ids, v_emitted, v_xacts, v_read
     USING v_namespace, v_replay.after_xact, v_replay.after_id, v_end, v_replay.first_id, v_replay.last_id, v_replay.emitted_from, v_replay.emitted_to,
           v_replay.undelivered, v_replay.group_id, p_limit;
    IF v_read > 0 THEN
        v_replay.delivered := v_replay.delivered + deliver(v_ids, v_emitted, v_replay.group_id, v_replay.undelivered);
        v_replay.after_xact := v_xacts[v_read];
        v_replay.after_id := v_ids[v_read];
    END IF;
    IF v_end = v_replay.horizon THEN
        IF NOT v_replay.undelivered THEN
            v_more := v_read = p_limit;
        ELSIF v_read > 0 THEN -- with keys that are locked now it cannot wait for those who say that the group is behind, and wait for them
            v_more := true;
        ELSE
            PERFORM FROM event_groups g WHERE g.group_id = v_replay.group_id AND g.behind FOR UPDATE; -- which waits for is_behind, as UPDATE does not
            IF FOUND THEN
                UPDATE event_groups g SET behind = false WHERE g.group_id = v_replay.group_id;
                v_more := true; -- once this has committed, no line is held any more
            ELSE
                v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit); -- as the index has them
                FOR v_key IN SELECT k.key FROM event_keys k
                              WHERE k.group_id = v_replay.group_id AND k.key = ANY (v_keys) AND (k.item_id IS NULL) IS TRUE -- or all that are so might be walked over
                              ORDER BY k.key COLLATE "C" FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                END LOOP;
                v_more := cardinality(v_keys) = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at,
           waiting_since = CASE WHEN v_read = 0 AND NOT v_more AND v_replay.ended_at IS NULL THEN coalesce(r.waiting_since, clock_timestamp()) END
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_since timestamptz;
    v_first bigint;
    v_ids   bigint[];
    v_lined bigint[];
    v_keys  text[];
    v_item  record;
    v_tag   text;
    v_gone  bigint[] := '{}';
    v_moved boolean := false;
    v_most  bigint := nullif(current_setting('pgwake.strays_at_a_time', true), ''); -- null: all
    v_done  bigint := 0;
BEGIN
    SELECT g.created_at, g.first_item INTO v_since, v_first FROM event_groups g WHERE g.group_id = p_group_id; -- null: it is gone
    -- Whoever has an item locked, or its key, may be about to settle it, and wait for what is locked here already, see invariant (order).
    IF starts_with(p_tag, event_tag('', '')) THEN
        -- A key goes with all that there is of it, or not yet.
        v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most FOR UPDATE SKIP LOCKED);
        DELETE FROM event_lines l WHERE l.ctid = ANY (ARRAY( -- where they are: nobody changes them
            SELECT f.ctid FROM event_lines f WHERE f.group_id = p_group_id AND f.key = ANY (v_keys) AND f.item_id IS NULL LIMIT v_most)); -- which nobody gets, whatever becomes of the item at the head
        GET DIAGNOSTICS v_done = ROW_COUNT;
        IF v_done >= v_most THEN
            RETURN;
        END IF;
        v_lined := ARRAY(
            SELECT o.item_id
              FROM (SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys)
                     UNION ALL SELECT l.item_id FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) OFFSET 0) AS o
             WHERE o.item_id IS NOT NULL);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) FOR UPDATE SKIP LOCKED);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) EXCEPT SELECT unnest(v_ids)); -- which are not to be had
        v_keys := ARRAY(
            SELECT unnest(v_keys)
            EXCEPT SELECT k.key FROM event_keys k WHERE k.item_id = ANY (v_ids)
            EXCEPT SELECT l.key FROM event_lines l WHERE l.item_id = ANY (v_ids));
        WITH lines AS (
            DELETE FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) RETURNING l.item_id
        ), keys AS (
            DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) RETURNING k.item_id
        )
        SELECT array_agg(o.item_id) INTO v_gone FROM (SELECT l.item_id FROM lines l UNION ALL SELECT k.item_id FROM keys k) AS o WHERE o.item_id IS NOT NULL;
        PERFORM remove_work(v_gone);
        -- What is not at work goes by the tag that nobody claims until its key can be had: for a new group of the name it is not.
        UPDATE worker_queue q SET tag = p_tag WHERE q.id = ANY (ARRAY(
            SELECT w.id FROM (SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most) AS k JOIN worker_queue w ON w.id = ANY (ARRAY[k.item_id])
             WHERE w.tag <> p_tag AND NOT (w.lock_token IS NOT NULL AND w.visible_at > clock_timestamp()) FOR UPDATE OF w SKIP LOCKED));
        RETURN;
    ELSIF EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = p_group_id AND s.tag = p_tag) THEN
        -- By the index, for all that is of the group itself has this tag as well.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since
                          AND (q.id < v_first) IS NOT FALSE AND q.session_id IS NULL AND q.key IS NULL);
    ELSE
        -- Without those of groups that are gone, which go by key: or of these there might be as many as that each time.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL
                          AND NOT EXISTS (SELECT FROM event_keys k WHERE k.item_id = q.id AND (k.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE OFFSET 0)
                          AND NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = q.id AND (l.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE OFFSET 0)
                        LIMIT v_most);
    END IF;
    v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.item_id = ANY (v_ids) UNION ALL SELECT l.item_id FROM event_lines l WHERE l.item_id = ANY (v_ids));
    v_ids := ARRAY(SELECT unnest(v_ids) EXCEPT SELECT unnest(v_lined)) || ARRAY(
        SELECT of.item_id FROM (SELECT k.item_id, k.group_id, k.key FROM event_keys k WHERE k.item_id = ANY (v_lined)
                                 UNION ALL SELECT l.item_id, l.group_id, l.key FROM event_lines l WHERE l.item_id = ANY (v_lined) OFFSET 0) AS of
          JOIN event_keys k ON k.group_id = ANY (ARRAY[of.group_id]) AND k.key = of.key
         WHERE of.group_id = p_group_id AND v_since IS NOT NULL FOR UPDATE OF k SKIP LOCKED); -- those of groups that are gone go by key
    FOR v_item IN
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND (q.id < v_first) IS NOT FALSE AND q.visible_at = q.created_at AS older, q.tag = p_tag AND q.session_id IS NULL AS stray,
               CASE WHEN q.key IS NULL THEN 1 ELSE 10 END AS weight -- at the commit the key moves on
          FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR UPDATE SKIP LOCKED -- by id alone: an index of tags would compare all ids with each of the tag
    LOOP
        EXIT WHEN v_done >= v_most;
        CONTINUE WHEN NOT v_item.stray; -- any more
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF NOT FOUND OR v_item.older AND NOT EXISTS (
            SELECT FROM delivered_event(v_item.input) AS d JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
             WHERE e.routes @> ARRAY[p_group_id]) THEN -- see invariant (former)
            v_gone := v_gone || v_item.id;
            v_done := v_done + v_item.weight;
        ELSIF v_tag <> p_tag THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
            v_moved := true;
            v_done := v_done + v_item.weight;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
    IF v_moved THEN
        PERFORM notify_queue('worker', 1, NULL, p_namespace); -- no insert tells
    END IF;
    IF v_done >= v_most THEN
        PERFORM notify_group(p_namespace, split_part(substr(p_tag, 10), '|', 1)); -- a node of it beats again, and goes on
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
     WHERE t.task_id = ANY (ARRAY[o.task_id]);
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
CREATE OR REPLACE FUNCTION list_groups(p_namespace text)
RETURNS TABLE (group_name text, pattern text, created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT g.name, s.pattern, coalesce(s.created_at, g.created_at) FROM event_groups g LEFT JOIN event_subscriptions s USING (group_id)
     WHERE g.namespace = coalesce(p_namespace, 'default') ORDER BY g.name, s.pattern;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION take_dedup_keys(p_namespace text, p_ids bigint[], p_dedup_keys text[], p_dedup_fors interval[])
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION is_under_way(p_task scheduled_tasks, p_last_id bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN CASE WHEN p_task.event_type IS NULL THEN EXISTS (SELECT FROM worker_queue q WHERE q.id = p_last_id)
                ELSE EXISTS (SELECT FROM event_log e CROSS JOIN LATERAL unnest(e.routes) AS r (group_id)
                               LEFT JOIN event_keys k ON k.group_id = r.group_id AND k.key = e.key
                              WHERE e.event_id = p_last_id AND e.scheduled_task_id = p_task.task_id
                                AND (k.key IS NOT NULL OR e.xact = log_xact())) END; -- which lines up at its commit
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION item_of_key_settled()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_key event_keys;
BEGIN
    IF EXISTS (SELECT FROM worker_queue q WHERE q.id = OLD.id) THEN
        RETURN NULL; -- it was redriven since, in this very transaction, and has its place still
    END IF;
    -- As is_behind, before the key is locked, for invariant (order).
    PERFORM FROM event_groups g WHERE g.namespace = OLD.namespace AND g.name = split_part(substr(OLD.tag, 10), '|', 1) AND g.behind FOR KEY SHARE;
    SELECT * INTO v_key FROM event_keys k WHERE k.item_id = OLD.id FOR UPDATE;
    IF NOT FOUND THEN -- it waits behind another, whoever settles which may be about to bring it to the head; or it is nothing of the bus
        PERFORM FROM event_lines l JOIN event_keys k ON k.group_id = l.group_id AND k.key = l.key WHERE l.item_id = OLD.id FOR UPDATE OF k;
        SELECT * INTO v_key FROM event_keys k WHERE k.item_id = OLD.id FOR UPDATE;
    END IF;
    IF FOUND THEN
        PERFORM next_of_key(v_key.group_id, v_key.key);
    ELSE
        DELETE FROM event_lines l WHERE l.item_id = OLD.id;
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION replay_some(p_replay_id bigint, p_limit integer DEFAULT 500)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_replay    event_replays;
    v_namespace text;
    v_end       xid8;
    v_ids       bigint[];
    v_emitted   timestamptz[];
    v_xacts     xid8[];
    v_read      integer;
    v_key       text;
    v_keys      text[];
    v_more      boolean;
BEGIN
    PERFORM is_behind(r.group_id) FROM event_replays r WHERE r.replay_id = p_replay_id AND NOT r.undelivered; -- see invariant (order)
    SELECT * INTO v_replay FROM event_replays r WHERE r.replay_id = p_replay_id FOR UPDATE;
    IF NOT FOUND OR v_replay.ended_at IS NOT NULL THEN
        RETURN 'done';
    END IF;
    SELECT g.namespace INTO v_namespace FROM event_groups g WHERE g.group_id = v_replay.group_id;
    IF v_replay.horizon IS NULL THEN
        v_replay.horizon := horizon();
    END IF;
    -- Of what is below the horizon nothing is delivered to a new group by those who emit and have not seen it: that is here. Those
    -- who have seen it have noted that in their events, on whichever side of the horizon. Above, all have.
    v_end := least(v_replay.horizon, log_xact(pg_snapshot_xmin(pg_current_snapshot())));
    -- Planned for the bounds that there are: one plan for any bounds reads, in each step, all that is left of the log, and sorts it.
    EXECUTE '
        SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
          FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
                 WHERE l.namespace = $1 AND (l.xact, l.event_id) > ($2, $3) AND l.xact < $4
                   AND ($5 IS NULL OR l.event_id >= $5) AND ($6 IS NULL OR l.event_id <= $6)
                   AND ($7 IS NULL OR l.emitted_at >= $7) AND ($8 IS NULL OR l.emitted_at < $8)
                   AND NOT ($9 AND l.routes @> ARRAY[$10])
                 ORDER BY l.xact, l.event_id LIMIT $11) AS e'
      INTO v_ids, v_emitted, v_xacts, v_read
     USING v_namespace, v_replay.after_xact, v_replay.after_id, v_end, v_replay.first_id, v_replay.last_id, v_replay.emitted_from, v_replay.emitted_to,
           v_replay.undelivered, v_replay.group_id, p_limit;
    IF v_read > 0 THEN
        v_replay.delivered := v_replay.delivered + deliver(v_ids, v_emitted, v_replay.group_id, v_replay.undelivered);
        v_replay.after_xact := v_xacts[v_read];
        v_replay.after_id := v_ids[v_read];
    END IF;
    IF v_end = v_replay.horizon THEN
        IF NOT v_replay.undelivered THEN
            v_more := v_read = p_limit;
        ELSIF v_read > 0 THEN -- with keys that are locked now it cannot wait for those who say that the group is behind, and wait for them
            v_more := true;
        ELSE
            PERFORM FROM event_groups g WHERE g.group_id = v_replay.group_id AND g.behind FOR UPDATE; -- which waits for is_behind, as UPDATE does not
            IF FOUND THEN
                UPDATE event_groups g SET behind = false WHERE g.group_id = v_replay.group_id;
                v_more := true; -- once this has committed, no line is held any more
            ELSE
                v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit); -- as the index has them
                FOR v_key IN SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.key = ANY (v_keys) AND k.item_id IS NULL
                              ORDER BY k.key COLLATE "C" FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                END LOOP;
                v_more := cardinality(v_keys) = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at,
           waiting_since = CASE WHEN v_read = 0 AND NOT v_more AND v_replay.ended_at IS NULL THEN coalesce(r.waiting_since, clock_timestamp()) END
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_since timestamptz;
    v_first bigint;
    v_ids   bigint[];
    v_lined bigint[];
    v_keys  text[];
    v_item  record;
    v_tag   text;
    v_gone  bigint[] := '{}';
    v_moved boolean := false;
    v_most  bigint := nullif(current_setting('pgwake.strays_at_a_time', true), ''); -- null: all
    v_done  bigint := 0;
BEGIN
    SELECT g.created_at, g.first_item INTO v_since, v_first FROM event_groups g WHERE g.group_id = p_group_id; -- null: it is gone
    -- Whoever has an item locked, or its key, may be about to settle it, and wait for what is locked here already, see invariant (order).
    IF starts_with(p_tag, event_tag('', '')) THEN
        -- A key goes with all that there is of it, or not yet.
        v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most FOR UPDATE SKIP LOCKED);
        DELETE FROM event_lines l
         USING (SELECT f.key, f.place FROM event_lines f WHERE f.group_id = p_group_id AND f.key = ANY (v_keys) AND f.item_id IS NULL LIMIT v_most) AS o
         WHERE l.group_id = p_group_id AND l.key = o.key AND l.place = o.place; -- which nobody gets, whatever becomes of the item at the head
        GET DIAGNOSTICS v_done = ROW_COUNT;
        IF v_done >= v_most THEN
            RETURN;
        END IF;
        v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) AND k.item_id IS NOT NULL
                         UNION ALL SELECT l.item_id FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) AND l.item_id IS NOT NULL);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) FOR UPDATE SKIP LOCKED);
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_lined) EXCEPT SELECT unnest(v_ids)); -- which are not to be had
        v_keys := ARRAY(
            SELECT unnest(v_keys)
            EXCEPT SELECT k.key FROM event_keys k WHERE k.item_id = ANY (v_ids)
            EXCEPT SELECT l.key FROM event_lines l WHERE l.item_id = ANY (v_ids));
        WITH lines AS (
            DELETE FROM event_lines l WHERE l.group_id = p_group_id AND l.key = ANY (v_keys) RETURNING l.item_id
        ), keys AS (
            DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = ANY (v_keys) RETURNING k.item_id
        )
        SELECT array_agg(o.item_id) INTO v_gone FROM (SELECT l.item_id FROM lines l UNION ALL SELECT k.item_id FROM keys k) AS o WHERE o.item_id IS NOT NULL;
        PERFORM remove_work(v_gone);
        -- What is not at work goes by the tag that nobody claims until its key can be had: for a new group of the name it is not.
        UPDATE worker_queue q SET tag = p_tag WHERE q.id = ANY (ARRAY(
            SELECT w.id FROM (SELECT k.item_id FROM event_keys k WHERE k.group_id = p_group_id LIMIT v_most) AS k JOIN worker_queue w ON w.id = k.item_id
             WHERE w.tag <> p_tag AND NOT (w.lock_token IS NOT NULL AND w.visible_at > clock_timestamp()) FOR UPDATE OF w SKIP LOCKED));
        RETURN;
    ELSIF EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = p_group_id AND s.tag = p_tag) THEN
        -- By the index, for all that is of the group itself has this tag as well.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since
                          AND (q.id < v_first) IS NOT FALSE AND q.session_id IS NULL AND q.key IS NULL);
    ELSE
        -- Without those of groups that are gone, which go by key: or of these there might be as many as that each time.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL
                          AND NOT EXISTS (SELECT FROM event_keys k WHERE k.item_id = q.id AND (k.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                          AND NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = q.id AND (l.group_id = p_group_id AND v_since IS NOT NULL) IS NOT TRUE)
                        LIMIT v_most);
    END IF;
    v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.item_id = ANY (v_ids) UNION ALL SELECT l.item_id FROM event_lines l WHERE l.item_id = ANY (v_ids));
    v_ids := ARRAY(SELECT unnest(v_ids) EXCEPT SELECT unnest(v_lined)) || ARRAY(
        SELECT of.item_id FROM (SELECT k.item_id, k.group_id, k.key FROM event_keys k WHERE k.item_id = ANY (v_lined)
                                 UNION ALL SELECT l.item_id, l.group_id, l.key FROM event_lines l WHERE l.item_id = ANY (v_lined)) AS of
          JOIN event_keys k ON k.group_id = of.group_id AND k.key = of.key
         WHERE of.group_id = p_group_id AND v_since IS NOT NULL FOR UPDATE OF k SKIP LOCKED); -- those of groups that are gone go by key
    FOR v_item IN
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND (q.id < v_first) IS NOT FALSE AND q.visible_at = q.created_at AS older, q.tag = p_tag AND q.session_id IS NULL AS stray,
               CASE WHEN q.key IS NULL THEN 1 ELSE 10 END AS weight -- at the commit the key moves on
          FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR UPDATE SKIP LOCKED -- by id alone: an index of tags would compare all ids with each of the tag
    LOOP
        EXIT WHEN v_done >= v_most;
        CONTINUE WHEN NOT v_item.stray; -- any more
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF NOT FOUND OR v_item.older AND NOT EXISTS (
            SELECT FROM delivered_event(v_item.input) AS d JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
             WHERE e.routes @> ARRAY[p_group_id]) THEN -- see invariant (former)
            v_gone := v_gone || v_item.id;
            v_done := v_done + v_item.weight;
        ELSIF v_tag <> p_tag THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
            v_moved := true;
            v_done := v_done + v_item.weight;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
    IF v_moved THEN
        PERFORM notify_queue('worker', 1, NULL, p_namespace); -- no insert tells
    END IF;
    IF v_done >= v_most THEN
        PERFORM notify_group(p_namespace, split_part(substr(p_tag, 10), '|', 1)); -- a node of it beats again, and goes on
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
