-- What leaves a line, and in which order whoever has to do with a group waits for others.
--
-- Invariant (order): of what a group has, whoever waits for locks takes them in this order: its replay from the beginning (event_replays.undelivered);
-- its row in event_groups; its other replays, and its retirements; its rows of event_keys, by the bytes of the keys (COLLATE "C"); their lines; items
-- that wait in those. Whoever settles an item has it locked before all of that, and one who settles several, redrives, or goes on after SET
-- CONSTRAINTS ALL IMMEDIATE, locks keys in an order of his own. So whoever removes a group or a subscription waits for no key and no item: what
-- others have locked is left to remove_strays, which comes back when they have ended.
--
-- Invariant (former): a group that is made anew gets nothing of a former one of its name, though the tags are the same. With a key that is what the id
-- of the group in event_keys says, which a tag of its own stands for (eventbus/| and the id). Without one it is what nobody has touched since it was
-- enqueued, which was before the group was there, of an event that was not routed to it. A dead letter that was redriven was touched, and stays.

-- +goose Up

-- In the order in which a replay locks them.
ALTER TABLE event_replays ADD COLUMN waiting_since timestamptz;
COMMENT ON COLUMN event_replays.waiting_since IS 'Since when it has found nothing to deliver, and waits for transactions that are open; null: it does not.';
ALTER TABLE event_keys ADD COLUMN passed bigint;
COMMENT ON TABLE event_retirements IS 'Tags of subscriptions that were removed, until nobody can deliver by them any more; and, of a group that was removed, eventbus/| with its id, until nothing is left of its keys. See remove_strays.';
COMMENT ON COLUMN event_keys.passed IS 'Place of the delivery that has left the line last: all that wait have a higher one. Null: none has, or nobody has noted it.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION event_of_key_emitted()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- at the commit, by whoever emitted
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_xact     xid8 := log_xact();
    v_lined_up jsonb := coalesce(nullif(current_setting('pgwake.lined_up', true), ''), '{}'); -- up to which event, by namespaces
    v_last     bigint;
    v_one      record;
BEGIN
    -- Whoever may call functions may have a table of his own call this, with columns whose types run what he likes as the owner.
    IF pg_partition_root(TG_RELID) IS DISTINCT FROM 'event_log'::regclass THEN
        RAISE EXCEPTION 'event_of_key_emitted is for event_log alone, not for %', TG_RELID::regclass USING ERRCODE = 'PW003';
    END IF;
    IF NEW.event_id <= (v_lined_up ->> NEW.namespace)::bigint THEN
        RETURN NULL;
    END IF;
    IF current_setting('pgwake.emits_keys', true) = 'one' THEN
        PERFORM line_up(r.group_id, NEW.key, NEW.event_id, NEW.emitted_at, NEW.event_type, r.tag)
           FROM routes(NEW.namespace, NEW.event_type) AS r WHERE r.group_id = ANY (NEW.routes); -- those that are still subscribed
        v_last := NEW.event_id;
    ELSE
        -- Of several, the first has all of them lined up that are there by now, for invariant (locks).
        FOR v_one IN
            SELECT r.group_id, e.key, e.event_id, e.emitted_at, e.event_type, r.tag
              FROM event_log e CROSS JOIN LATERAL routes(e.namespace, e.event_type) AS r
             WHERE e.namespace = NEW.namespace AND e.xact = v_xact AND e.event_id > coalesce((v_lined_up ->> NEW.namespace)::bigint, 0)
               AND e.key IS NOT NULL AND r.group_id = ANY (e.routes)
             ORDER BY e.key COLLATE "C", r.group_id, e.event_id
        LOOP
            PERFORM line_up(v_one.group_id, v_one.key, v_one.event_id, v_one.emitted_at, v_one.event_type, v_one.tag);
        END LOOP;
        v_last := (SELECT max(e.event_id) FROM event_log e WHERE e.namespace = NEW.namespace AND e.xact = v_xact);
    END IF;
    -- Invariant (once): what was lined up is noted, also where it is one: the transaction may go on and emit more, after SET CONSTRAINTS or by a
    -- deferred trigger of somebody. Ids go up within a transaction, so what is emitted after this has a higher one. With a savepoint that is rolled
    -- back the note goes as well.
    PERFORM set_config('pgwake.lined_up', (v_lined_up || jsonb_build_object(NEW.namespace, v_last))::text, true);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION line_up(
    p_group_id bigint, p_key text, p_event_id bigint, p_emitted_at timestamptz, p_event_type text, p_tag text, p_log boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_item   bigint := CASE WHEN p_log OR NOT is_behind(p_group_id) THEN nextval('worker_queue_id_seq') END; -- null: not now
    v_head   bigint;
    v_passed bigint;
    v_place  bigint;
BEGIN
    -- Where nothing of the log is to come first, all that will wait has a place above this one.
    INSERT INTO event_keys AS k (group_id, key, item_id, passed)
    VALUES (p_group_id, p_key, v_item, CASE WHEN v_item IS NOT NULL AND NOT p_log THEN nextval('event_lines_place_seq') END)
    ON CONFLICT (group_id, key) DO UPDATE SET item_id = CASE WHEN p_log THEN coalesce(k.item_id, v_item) ELSE k.item_id END -- which locks it
    RETURNING k.item_id, k.passed INTO v_head, v_passed;
    IF v_head = v_item THEN
        PERFORM enqueue_delivery(v_item, p_event_id, p_emitted_at, p_tag);
    ELSE
        v_place := nextval('event_lines_place_seq') - CASE WHEN p_log THEN 4611686018427387904 ELSE 0 END;
        IF v_place <= v_passed THEN -- the sequence is behind the rows, as where logical replication has brought those alone; nobody looks there
            v_place := 1 + greatest(v_passed, (SELECT max(l.place) FROM event_lines l WHERE l.group_id = p_group_id AND l.key = p_key AND (l.place < 0 OR NOT p_log)));
        END IF;
        INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type)
        VALUES (p_group_id, p_key, v_place, p_event_id, p_emitted_at, p_event_type);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION item_of_key_comes_back()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_group  bigint;
    v_head   bigint;
    v_passed bigint;
    v_place  bigint;
BEGIN
    IF EXISTS (SELECT FROM event_keys k WHERE k.item_id = NEW.id) THEN
        RETURN NEW; -- it comes from the line
    END IF;
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = NEW.namespace AND g.name = split_part(substr(NEW.tag, 10), '|', 1);
    IF NOT FOUND THEN
        RETURN NEW;
    END IF;
    INSERT INTO event_keys AS k (group_id, key, item_id) VALUES (v_group, NEW.key, NEW.id)
    ON CONFLICT (group_id, key) DO UPDATE SET item_id = coalesce(k.item_id, NEW.id)
    RETURNING k.item_id, k.passed INTO v_head, v_passed;
    IF v_head <> NEW.id THEN
        v_place := nextval('event_lines_place_seq');
        IF v_place <= v_passed THEN -- as in line_up
            v_place := 1 + greatest(v_passed, (SELECT max(l.place) FROM event_lines l WHERE l.group_id = v_group AND l.key = NEW.key));
        END IF;
        INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type, item_id)
        SELECT v_group, NEW.key, v_place, coalesce(e.event_id, 0), coalesce(e.emitted_at, NEW.created_at), NEW.name, NEW.id FROM delivered_event(NEW.input) AS e
         WHERE NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = NEW.id); -- of this very transaction, see item_of_key_settled
        NEW.visible_at := '9999-12-31 00:00:00+00';
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION next_of_key(p_group_id bigint, p_key text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_behind    boolean;
    v_namespace text;
    v_passed    bigint;
    v_next      event_lines;
    v_tag       text;
    v_item      bigint;
BEGIN
    SELECT g.namespace, coalesce(g.behind, false), coalesce(k.passed, -9223372036854775807) INTO v_namespace, v_behind, v_passed
      FROM event_keys k LEFT JOIN event_groups g ON g.group_id = k.group_id WHERE k.group_id = p_group_id AND k.key = p_key;
    LOOP
        -- Between two places, and so by the index alone: neither those that have left, which dead rows and entries may remain of, nor those
        -- that a group that is behind is not to get yet are walked over.
        DELETE FROM event_lines l
         WHERE l.group_id = p_group_id AND l.key = p_key
           AND l.place = (SELECT f.place FROM event_lines f
                           WHERE f.group_id = p_group_id AND f.key = p_key AND f.place > v_passed
                             AND f.place < CASE WHEN v_behind THEN 0 ELSE 9223372036854775807 END ORDER BY f.place LIMIT 1)
        RETURNING * INTO v_next;
        IF NOT FOUND THEN
            IF v_behind AND EXISTS (SELECT FROM event_lines l WHERE l.group_id = p_group_id AND l.key = p_key AND l.place > v_passed) THEN
                UPDATE event_keys k SET item_id = NULL, passed = v_passed WHERE k.group_id = p_group_id AND k.key = p_key;
            ELSE
                DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = p_key;
            END IF;
            RETURN;
        END IF;
        v_passed := v_next.place;
        -- By a tag that is good now: the one of when it was emitted may be of a subscription that has ended.
        SELECT r.tag INTO v_tag FROM routes(v_namespace, v_next.event_type) AS r WHERE r.group_id = p_group_id;
        v_item := coalesce(v_next.item_id, CASE WHEN v_tag IS NOT NULL THEN nextval('worker_queue_id_seq') END);
        CONTINUE WHEN v_item IS NULL; -- it is for nobody any more
        UPDATE event_keys k SET item_id = v_item, passed = v_passed WHERE k.group_id = p_group_id AND k.key = p_key;
        IF v_next.item_id IS NOT NULL THEN
            UPDATE worker_queue q SET visible_at = clock_timestamp() WHERE q.id = v_item;
            PERFORM notify_queue('worker', 1, NULL, v_namespace);
        ELSE
            v_item := enqueue_delivery(v_item, v_next.event_id, v_next.emitted_at, v_tag);
        END IF;
        EXIT WHEN v_item IS NOT NULL;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION next_of_key IS 'Internal: brings the next delivery of a key into the queue, now that none of it is there. The caller holds the lock of the key, and got it in a statement before; and before that one on the row of the group, if that is behind.';

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
CREATE OR REPLACE FUNCTION subscribe(p_namespace text, p_group text, p_patterns text[], p_from_beginning boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     text := coalesce(p_group, 'default');
    v_id        bigint;
    v_new       boolean;
    v_bad       text;
    v_tags      text[];
BEGIN
    SELECT p.pattern INTO v_bad FROM unnest(p_patterns) AS p (pattern)
     WHERE (octet_length(p.pattern) <= 180 AND p.pattern ~ '^([^.*#|[:space:][:cntrl:]]+|[*#])(\.([^.*#|[:space:][:cntrl:]]+|[*#]))*$') IS NOT TRUE LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a pattern must have up to 180 bytes, in segments with dots between them, each a name, * or #: not %', quote_nullable(v_bad) USING ERRCODE = 'PW003';
    END IF;
    -- Its row is locked: from here on nobody changes what the group is subscribed to.
    INSERT INTO event_groups AS g (namespace, name, behind) VALUES (v_namespace, v_group, p_from_beginning)
    ON CONFLICT (namespace, name) DO UPDATE SET name = excluded.name
    RETURNING g.group_id, g.xmax = 0 INTO v_id, v_new;
    PERFORM register_namespaces(ARRAY[v_namespace]);
    WITH added AS (
        INSERT INTO event_subscriptions AS s (group_id, namespace, pattern, regex, specificity, tag)
        SELECT DISTINCT v_id, v_namespace, p.pattern, CASE WHEN p.pattern ~ '[*#]' THEN pattern_regex(p.pattern) END, pattern_specificity(p.pattern), event_tag(v_group, p.pattern)
          FROM unnest(p_patterns) AS p (pattern)
        ON CONFLICT (group_id, pattern) DO NOTHING
        RETURNING s.tag)
    SELECT array_agg(a.tag) INTO v_tags FROM added a;
    IF v_tags IS NOT NULL THEN
        PERFORM notify_group(v_namespace, v_group);
    END IF;
    IF v_new THEN -- what is left of another one of that name is not for this one, see invariant (former)
        PERFORM retire_tag(CASE WHEN starts_with(r.tag, event_tag('', '')) THEN split_part(r.tag, '|', 2)::bigint ELSE v_id END, r.namespace, r.tag)
           FROM event_retirements r WHERE r.namespace = v_namespace AND (starts_with(r.tag, event_tag('', '')) OR starts_with(r.tag, event_tag(v_group, '')));
    ELSE
        DELETE FROM event_retirements r WHERE r.namespace = v_namespace AND r.tag = ANY (v_tags);
    END IF;
    IF v_new AND p_from_beginning THEN
        PERFORM begin_replay(v_id, p_undelivered => true);
    END IF;
    RETURN v_id;
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
    v_since timestamptz := (SELECT g.created_at FROM event_groups g WHERE g.group_id = p_group_id); -- null: it is gone
    v_ids   bigint[];
    v_lined bigint[];
    v_keys  text[];
    v_item  record;
    v_tag   text;
    v_gone  bigint[] := '{}';
    v_moved boolean := false;
BEGIN
    -- Whoever has an item locked, or its key, may be about to settle it, and wait for what is locked here already, see invariant (order).
    IF starts_with(p_tag, event_tag('', '')) THEN
        -- A key goes with all that there is of it, or not yet.
        v_keys := ARRAY(SELECT k.key FROM event_keys k WHERE k.group_id = p_group_id FOR UPDATE SKIP LOCKED);
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
            SELECT w.id FROM event_keys k JOIN worker_queue w ON w.id = k.item_id
             WHERE k.group_id = p_group_id AND w.tag <> p_tag AND NOT (w.lock_token IS NOT NULL AND w.visible_at > clock_timestamp()) FOR UPDATE OF w SKIP LOCKED));
        RETURN;
    ELSIF EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = p_group_id AND s.tag = p_tag) THEN
        -- By the index, for all that is of the group itself has this tag as well.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since AND q.session_id IS NULL AND q.key IS NULL);
    ELSE
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL);
    END IF;
    v_lined := ARRAY(SELECT k.item_id FROM event_keys k WHERE k.item_id = ANY (v_ids) UNION ALL SELECT l.item_id FROM event_lines l WHERE l.item_id = ANY (v_ids));
    v_ids := ARRAY(SELECT unnest(v_ids) EXCEPT SELECT unnest(v_lined)) || ARRAY(
        SELECT of.item_id FROM (SELECT k.item_id, k.group_id, k.key FROM event_keys k WHERE k.item_id = ANY (v_lined)
                                 UNION ALL SELECT l.item_id, l.group_id, l.key FROM event_lines l WHERE l.item_id = ANY (v_lined)) AS of
          JOIN event_keys k ON k.group_id = of.group_id AND k.key = of.key
         WHERE of.group_id = p_group_id AND v_since IS NOT NULL FOR UPDATE OF k SKIP LOCKED); -- those of groups that are gone go by key
    FOR v_item IN
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND q.visible_at = q.created_at AS older
          FROM worker_queue q WHERE q.id = ANY (v_ids) AND q.tag = p_tag AND q.session_id IS NULL ORDER BY q.id FOR UPDATE SKIP LOCKED
    LOOP
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF NOT FOUND OR v_item.older AND NOT EXISTS (
            SELECT FROM delivered_event(v_item.input) AS d JOIN event_log e ON e.event_id = d.event_id AND e.emitted_at = d.emitted_at
             WHERE e.routes @> ARRAY[p_group_id]) THEN -- see invariant (former)
            v_gone := v_gone || v_item.id;
        ELSIF v_tag <> p_tag THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
            v_moved := true;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
    IF v_moved THEN
        PERFORM notify_queue('worker', 1, NULL, p_namespace); -- no insert tells
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION retire_tag IS 'Internal: the deliveries of a subscription that is removed go by another of the group that is for them, or else away; by the tag of a group that is gone (eventbus/| with its id), all of its keys. But not those that somebody else has locked, or their keys.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_tag  record;
    v_over boolean;
BEGIN
    FOR v_tag IN
        SELECT r.namespace, r.tag, CASE WHEN starts_with(r.tag, event_tag('', '')) THEN split_part(r.tag, '|', 2)::bigint
                 ELSE (SELECT g.group_id FROM event_groups g WHERE g.namespace = r.namespace AND g.name = split_part(substr(r.tag, 10), '|', 1)) END AS group_id
          FROM event_retirements r ORDER BY r.namespace COLLATE "C", r.tag COLLATE "C"
    LOOP
        PERFORM is_behind(v_tag.group_id); -- see invariant (order)
        SELECT r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) INTO v_over
          FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND; -- somebody else is at it, or has removed it
        -- At each call, for those who had something of it locked may have ended. The horizon tells when nothing can come any more.
        PERFORM retire_tag(v_tag.group_id, v_tag.namespace, v_tag.tag);
        CONTINUE WHEN v_over IS NOT TRUE
            OR starts_with(v_tag.tag, event_tag('', '')) AND EXISTS (SELECT FROM event_keys k WHERE k.group_id = v_tag.group_id)
            OR NOT EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = v_tag.group_id AND s.tag = v_tag.tag)
               AND EXISTS (SELECT FROM worker_queue q WHERE q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.session_id IS NULL);
        DELETE FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag;
    END LOOP;
    UPDATE event_retirements r SET horizon = horizon()
     WHERE (r.namespace, r.tag) IN (SELECT n.namespace, n.tag FROM event_retirements n WHERE n.horizon IS NULL FOR UPDATE SKIP LOCKED);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delete_group(p_namespace text, p_group text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_first     text := event_tag(coalesce(p_group, 'default'), '');
    v_tags      text[];
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default');
    PERFORM FROM event_replays r WHERE r.group_id = v_group AND r.undelivered FOR UPDATE; -- see invariant (order)
    PERFORM FROM event_groups g WHERE g.group_id = v_group FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_tags := ARRAY(
        SELECT event_tag('', v_group::text) -- its keys
        UNION
        SELECT s.tag FROM event_subscriptions s WHERE s.group_id = v_group
        UNION -- of a subscription that was removed there may be a dead letter that was redriven
        SELECT l.tag FROM work_lists(ARRAY[v_namespace], NULL) AS l WHERE starts_with(l.tag, v_first));
    DELETE FROM event_groups g WHERE g.group_id = v_group; -- its subscriptions, and replays, go with it
    INSERT INTO event_retirements (namespace, tag) SELECT v_namespace, t.tag FROM unnest(v_tags) AS t (tag)
    ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    PERFORM retire_tag(v_group, v_namespace, t.tag) FROM unnest(v_tags) AS t (tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_group IS 'Removes a group (null: default) with its subscriptions and with what it has not handled yet, and returns whether there was one. It waits for nobody who settles: what is claimed or settled at that moment goes with the next heartbeats of nodes, if it is not settled. Its dead letters stay.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION deliver(p_events bigint[], p_emitted timestamptz[], p_group_id bigint DEFAULT NULL, p_log boolean DEFAULT false)
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
         ORDER BY e.key COLLATE "C", r.group_id, i.ord -- keys are locked in the same order by all who do so, whatever the collation of the database
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
    SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
      INTO v_ids, v_emitted, v_xacts, v_read
      FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
             WHERE l.namespace = v_namespace AND (l.xact, l.event_id) > (v_replay.after_xact, v_replay.after_id) AND l.xact < v_end
               AND l.event_id BETWEEN coalesce(v_replay.first_id, 0) AND coalesce(v_replay.last_id, 9223372036854775807)
               AND l.emitted_at >= coalesce(v_replay.emitted_from, '-infinity') AND l.emitted_at < coalesce(v_replay.emitted_to, 'infinity')
               AND NOT (v_replay.undelivered AND l.routes @> ARRAY[v_replay.group_id])
             ORDER BY l.xact, l.event_id LIMIT p_limit) AS e;
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

-- What former versions have left of groups that are gone. Whoever has a key locked is not waited for.
DELETE FROM event_lines l
 WHERE NOT EXISTS (SELECT FROM event_groups g WHERE g.group_id = l.group_id) AND NOT EXISTS (SELECT FROM event_keys k WHERE k.group_id = l.group_id AND k.key = l.key);
INSERT INTO event_retirements (namespace, tag)
SELECT DISTINCT 'default', event_tag('', k.group_id::text) FROM event_keys k WHERE NOT EXISTS (SELECT FROM event_groups g WHERE g.group_id = k.group_id);

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
    v_moved     integer := 0;
    v_more      boolean;
BEGIN
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
    SELECT array_agg(e.event_id ORDER BY e.xact, e.event_id), array_agg(e.emitted_at ORDER BY e.xact, e.event_id), array_agg(e.xact ORDER BY e.xact, e.event_id), count(*)
      INTO v_ids, v_emitted, v_xacts, v_read
      FROM (SELECT l.event_id, l.emitted_at, l.xact FROM event_log l
             WHERE l.namespace = v_namespace AND (l.xact, l.event_id) > (v_replay.after_xact, v_replay.after_id) AND l.xact < v_end
               AND l.event_id BETWEEN coalesce(v_replay.first_id, 0) AND coalesce(v_replay.last_id, 9223372036854775807)
               AND l.emitted_at >= coalesce(v_replay.emitted_from, '-infinity') AND l.emitted_at < coalesce(v_replay.emitted_to, 'infinity')
               AND NOT (v_replay.undelivered AND l.routes @> ARRAY[v_replay.group_id])
             ORDER BY l.xact, l.event_id LIMIT p_limit) AS e;
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
                FOR v_key IN SELECT k.key FROM event_keys k WHERE k.group_id = v_replay.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT p_limit FOR UPDATE LOOP
                    PERFORM next_of_key(v_replay.group_id, v_key);
                    v_moved := v_moved + 1;
                END LOOP;
                v_more := v_moved = p_limit;
            END IF;
        END IF;
        v_replay.ended_at := CASE WHEN NOT v_more THEN clock_timestamp() END;
    ELSE
        v_more := v_read = p_limit;
    END IF;
    UPDATE event_replays r
       SET horizon = v_replay.horizon, after_xact = v_replay.after_xact, after_id = v_replay.after_id, delivered = v_replay.delivered, ended_at = v_replay.ended_at
     WHERE r.replay_id = p_replay_id;
    RETURN CASE WHEN v_replay.ended_at IS NOT NULL THEN 'done' WHEN v_more THEN 'more' ELSE 'wait' END;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION deliver(p_events bigint[], p_emitted timestamptz[], p_group_id bigint DEFAULT NULL, p_log boolean DEFAULT false)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION item_of_key_comes_back()
RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_group bigint;
    v_head  bigint;
BEGIN
    IF EXISTS (SELECT FROM event_keys k WHERE k.item_id = NEW.id) THEN
        RETURN NEW; -- it comes from the line
    END IF;
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = NEW.namespace AND g.name = split_part(substr(NEW.tag, 10), '|', 1);
    IF NOT FOUND THEN
        RETURN NEW;
    END IF;
    INSERT INTO event_keys AS k (group_id, key, item_id) VALUES (v_group, NEW.key, NEW.id)
    ON CONFLICT (group_id, key) DO UPDATE SET item_id = coalesce(k.item_id, NEW.id)
    RETURNING k.item_id INTO v_head;
    IF v_head <> NEW.id THEN
        INSERT INTO event_lines (group_id, key, event_id, emitted_at, event_type, item_id)
        SELECT v_group, NEW.key, coalesce(e.event_id, 0), coalesce(e.emitted_at, NEW.created_at), NEW.name, NEW.id FROM delivered_event(NEW.input) AS e
         WHERE NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = NEW.id); -- of this very transaction, see item_of_key_settled
        NEW.visible_at := '9999-12-31 00:00:00+00';
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION subscribe(p_namespace text, p_group text, p_patterns text[], p_from_beginning boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     text := coalesce(p_group, 'default');
    v_id        bigint;
    v_new       boolean;
    v_bad       text;
BEGIN
    SELECT p.pattern INTO v_bad FROM unnest(p_patterns) AS p (pattern)
     WHERE (octet_length(p.pattern) <= 180 AND p.pattern ~ '^([^.*#|[:space:][:cntrl:]]+|[*#])(\.([^.*#|[:space:][:cntrl:]]+|[*#]))*$') IS NOT TRUE LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a pattern must have up to 180 bytes, in segments with dots between them, each a name, * or #: not %', quote_nullable(v_bad) USING ERRCODE = 'PW003';
    END IF;
    -- Its row is locked: from here on nobody changes what the group is subscribed to.
    INSERT INTO event_groups AS g (namespace, name, behind) VALUES (v_namespace, v_group, p_from_beginning)
    ON CONFLICT (namespace, name) DO UPDATE SET name = excluded.name
    RETURNING g.group_id, g.xmax = 0 INTO v_id, v_new;
    PERFORM register_namespaces(ARRAY[v_namespace]);
    INSERT INTO event_subscriptions (group_id, namespace, pattern, regex, specificity, tag)
    SELECT DISTINCT v_id, v_namespace, p.pattern, CASE WHEN p.pattern ~ '[*#]' THEN pattern_regex(p.pattern) END, pattern_specificity(p.pattern), event_tag(v_group, p.pattern)
      FROM unnest(p_patterns) AS p (pattern)
    ON CONFLICT (group_id, pattern) DO NOTHING;
    IF FOUND THEN
        PERFORM notify_group(v_namespace, v_group);
    END IF;
    DELETE FROM event_retirements r WHERE r.namespace = v_namespace AND r.tag IN (SELECT event_tag(v_group, p.pattern) FROM unnest(p_patterns) AS p (pattern));
    IF v_new AND p_from_beginning THEN
        PERFORM begin_replay(v_id, p_undelivered => true);
    END IF;
    RETURN v_id;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delete_group(p_namespace text, p_group text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_first     text := event_tag(coalesce(p_group, 'default'), '');
    v_tags      text[];
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_tags := ARRAY(
        SELECT s.tag FROM event_subscriptions s WHERE s.group_id = v_group
        UNION -- of a subscription that was removed there may be a dead letter that was redriven
        SELECT l.tag FROM work_lists(ARRAY[v_namespace], NULL) AS l WHERE starts_with(l.tag, v_first));
    DELETE FROM event_groups g WHERE g.group_id = v_group; -- its subscriptions, and replays, go with it
    INSERT INTO event_retirements (namespace, tag) SELECT v_namespace, t.tag FROM unnest(v_tags) AS t (tag)
    ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    DELETE FROM event_lines l WHERE l.group_id = v_group;
    DELETE FROM event_keys k WHERE k.group_id = v_group AND k.item_id IS NULL; -- the others go with their items
    PERFORM retire_tag(v_group, v_namespace, t.tag) FROM unnest(v_tags) AS t (tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_group IS 'Removes a group (null: default) with its subscriptions and with what it has not handled yet, and returns whether there was one. Its dead letters stay.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_tag record;
BEGIN
    UPDATE event_retirements r SET horizon = horizon() WHERE r.horizon IS NULL;
    FOR v_tag IN DELETE FROM event_retirements r WHERE r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) RETURNING r.namespace, r.tag LOOP
        PERFORM retire_tag((SELECT g.group_id FROM event_groups g
                             WHERE g.namespace = v_tag.namespace AND g.name = split_part(substr(v_tag.tag, 10), '|', 1)), v_tag.namespace, v_tag.tag);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_item record;
    v_tag  text;
    v_gone bigint[] := '{}';
BEGIN
    FOR v_item IN SELECT q.id, q.name FROM worker_queue q WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL ORDER BY q.id FOR UPDATE LOOP
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF FOUND THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
        ELSE
            v_gone := v_gone || v_item.id;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION retire_tag IS 'Internal: the deliveries of a subscription that is removed go by another of the group that is for them, or else away.';

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
CREATE OR REPLACE FUNCTION next_of_key(p_group_id bigint, p_key text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_behind    boolean := is_behind(p_group_id);
    v_namespace text := (SELECT g.namespace FROM event_groups g WHERE g.group_id = p_group_id);
    v_next      event_lines;
    v_tag       text;
    v_item      bigint;
BEGIN
    LOOP
        DELETE FROM event_lines l
         WHERE l.group_id = p_group_id AND l.key = p_key
           AND l.place = (SELECT f.place FROM event_lines f WHERE f.group_id = p_group_id AND f.key = p_key AND (f.place < 0 OR NOT v_behind) ORDER BY f.place LIMIT 1)
        RETURNING * INTO v_next;
        IF NOT FOUND THEN
            IF v_behind AND EXISTS (SELECT FROM event_lines l WHERE l.group_id = p_group_id AND l.key = p_key) THEN
                UPDATE event_keys k SET item_id = NULL WHERE k.group_id = p_group_id AND k.key = p_key;
            ELSE
                DELETE FROM event_keys k WHERE k.group_id = p_group_id AND k.key = p_key;
            END IF;
            RETURN;
        END IF;
        -- By a tag that is good now: the one of when it was emitted may be of a subscription that has ended.
        SELECT r.tag INTO v_tag FROM routes(v_namespace, v_next.event_type) AS r WHERE r.group_id = p_group_id;
        v_item := coalesce(v_next.item_id, CASE WHEN v_tag IS NOT NULL THEN nextval('worker_queue_id_seq') END);
        CONTINUE WHEN v_item IS NULL; -- it is for nobody any more
        UPDATE event_keys k SET item_id = v_item WHERE k.group_id = p_group_id AND k.key = p_key;
        IF v_next.item_id IS NOT NULL THEN
            UPDATE worker_queue q SET visible_at = clock_timestamp() WHERE q.id = v_item;
            PERFORM notify_queue('worker', 1, NULL, v_namespace);
        ELSE
            v_item := enqueue_delivery(v_item, v_next.event_id, v_next.emitted_at, v_tag);
        END IF;
        EXIT WHEN v_item IS NOT NULL;
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION next_of_key IS 'Internal: brings the next delivery of a key into the queue, now that none of it is there. The caller holds the lock of the key, and got it in a statement before.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION line_up(
    p_group_id bigint, p_key text, p_event_id bigint, p_emitted_at timestamptz, p_event_type text, p_tag text, p_log boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_item bigint := CASE WHEN p_log OR NOT is_behind(p_group_id) THEN nextval('worker_queue_id_seq') END; -- null: not now
    v_head bigint;
BEGIN
    INSERT INTO event_keys AS k (group_id, key, item_id) VALUES (p_group_id, p_key, v_item)
    ON CONFLICT (group_id, key) DO UPDATE SET item_id = CASE WHEN p_log THEN coalesce(k.item_id, v_item) ELSE k.item_id END -- which locks it
    RETURNING k.item_id INTO v_head;
    IF v_head = v_item THEN
        PERFORM enqueue_delivery(v_item, p_event_id, p_emitted_at, p_tag);
    ELSE
        INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type)
        VALUES (p_group_id, p_key, nextval('event_lines_place_seq') - CASE WHEN p_log THEN 4611686018427387904 ELSE 0 END, p_event_id, p_emitted_at, p_event_type);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION event_of_key_emitted()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- at the commit, by whoever emitted
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_xact     xid8 := log_xact();
    v_lined_up jsonb;
    v_one      record;
BEGIN
    -- Whoever may call functions may have a table of his own call this, with columns whose types run what he likes as the owner.
    IF pg_partition_root(TG_RELID) IS DISTINCT FROM 'event_log'::regclass THEN
        RAISE EXCEPTION 'event_of_key_emitted is for event_log alone, not for %', TG_RELID::regclass USING ERRCODE = 'PW003';
    END IF;
    IF current_setting('pgwake.emits_keys', true) = 'one' THEN
        PERFORM line_up(r.group_id, NEW.key, NEW.event_id, NEW.emitted_at, NEW.event_type, r.tag)
           FROM routes(NEW.namespace, NEW.event_type) AS r WHERE r.group_id = ANY (NEW.routes); -- those that are still subscribed
        RETURN NULL;
    END IF;
    -- Of several, the first has all of them lined up that are there by now, for invariant (locks). Ids go up within a transaction:
    -- what is emitted after this has a higher one.
    v_lined_up := coalesce(nullif(current_setting('pgwake.lined_up', true), ''), '{}');
    IF NEW.event_id <= (v_lined_up ->> NEW.namespace)::bigint THEN
        RETURN NULL;
    END IF;
    FOR v_one IN
        SELECT r.group_id, e.key, e.event_id, e.emitted_at, e.event_type, r.tag
          FROM event_log e CROSS JOIN LATERAL routes(e.namespace, e.event_type) AS r
         WHERE e.namespace = NEW.namespace AND e.xact = v_xact AND e.event_id > coalesce((v_lined_up ->> NEW.namespace)::bigint, 0)
           AND e.key IS NOT NULL AND r.group_id = ANY (e.routes)
         ORDER BY e.key COLLATE "C", r.group_id, e.event_id
    LOOP
        PERFORM line_up(v_one.group_id, v_one.key, v_one.event_id, v_one.emitted_at, v_one.event_type, v_one.tag);
    END LOOP;
    PERFORM set_config('pgwake.lined_up', (v_lined_up || jsonb_build_object(NEW.namespace,
        (SELECT max(e.event_id) FROM event_log e WHERE e.namespace = NEW.namespace AND e.xact = v_xact)))::text, true);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

COMMENT ON TABLE event_retirements IS 'Tags of subscriptions that were removed, until nobody can deliver by them any more; see remove_strays.';
ALTER TABLE event_replays DROP COLUMN waiting_since;
ALTER TABLE event_keys DROP COLUMN passed;
