-- Bounds of what a commit or a heartbeat does for keys and for what subscriptions that were removed have left, and notes of keys that are those of
-- one schema.
--
-- Invariant (bound): whoever settles walks over 100 deliveries at most that nobody gets any more, and a heartbeat over what it has time for. What
-- is left is found by the next heartbeat: retirements stay, and a key that has nothing in worker_queue is at rest, as those of a group that is
-- behind are, though the group is not (event_keys.item_id is null). What comes meanwhile waits behind what is there.

-- +goose Up

-- Waits for those who have emitted and not committed: what one of them has noted by the former function, this one would line up again.
LOCK TABLE event_log IN SHARE ROW EXCLUSIVE MODE;

COMMENT ON COLUMN event_keys.item_id IS 'Null: none, for the group is behind, or was a moment ago, or there is much before the next one that nobody gets any more; see next_of_key.';

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
    v_lined_up jsonb := coalesce(nullif(current_setting('pgwake.lined_up', true), ''), '{}'); -- up to which event, by v_log
    v_log      text;
    v_after    bigint;
    v_last     bigint;
    v_one      record;
BEGIN
    -- Whoever may call functions may have a table of his own call this, with columns whose types run what he likes as the owner.
    IF pg_partition_root(TG_RELID) IS DISTINCT FROM 'event_log'::regclass THEN
        RAISE EXCEPTION 'event_of_key_emitted is for event_log alone, not for %', TG_RELID::regclass USING ERRCODE = 'PW003';
    END IF;
    v_log := 'event_log'::regclass::oid || '/' || NEW.namespace; -- a transaction may emit in several schemas, which have the setting in common, and ids of their own
    v_after := coalesce((v_lined_up ->> v_log)::bigint, 0);
    IF NEW.event_id <= v_after THEN
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
             WHERE e.namespace = NEW.namespace AND e.xact = v_xact AND e.event_id > v_after
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
    PERFORM set_config('pgwake.lined_up', (v_lined_up || jsonb_build_object(v_log, v_last))::text, true);
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
    v_behind    boolean;
    v_namespace text;
    v_group     text;
    v_passed    bigint;
    v_next      event_lines;
    v_tag       text;
    v_item      bigint;
BEGIN
    SELECT g.namespace, g.name, coalesce(g.behind, false), coalesce(k.passed, -9223372036854775807) INTO v_namespace, v_group, v_behind, v_passed
      FROM event_keys k LEFT JOIN event_groups g ON g.group_id = k.group_id WHERE k.group_id = p_group_id AND k.key = p_key;
    FOR i IN 1 .. 100 LOOP
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
        IF v_item IS NOT NULL THEN
            RETURN;
        END IF;
    END LOOP;
    -- Invariant (bound): whoever settles does not pay for all that nobody gets any more, or his commit might never come to its end. The key is at
    -- rest, and a heartbeat goes on with it: of a node of the group as soon as it hears of this, or else of any that comes.
    UPDATE event_keys k SET item_id = NULL, passed = v_passed WHERE k.group_id = p_group_id AND k.key = p_key;
    IF v_group IS NOT NULL THEN
        PERFORM notify_group(v_namespace, v_group);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION next_of_key IS 'Internal: brings the next delivery of a key into the queue, now that none of it is there. If nobody gets the next 100 any more the key stays at rest, and remove_strays goes on. The caller holds the lock of the key, and got it in a statement before; and before that one on the row of the group, if that is behind.';

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
    v_most  bigint := nullif(current_setting('pgwake.strays_at_a_time', true), ''); -- null: all
    v_done  bigint := 0;
BEGIN
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
                        WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.priority = 0 AND q.visible_at < v_since AND q.session_id IS NULL AND q.key IS NULL);
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
        SELECT q.id, q.name, q.input, q.key IS NULL AND q.created_at < v_since AND q.visible_at = q.created_at AS older, q.tag = p_tag AND q.session_id IS NULL AS stray,
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
COMMENT ON FUNCTION retire_tag IS 'Internal: the deliveries of a subscription that is removed go by another of the group that is for them, or else away; by the tag of a group that is gone (eventbus/| with its id), all of its keys. But not those that somebody else has locked, or their keys; and where pgwake.strays_at_a_time is set about as many as that at a time.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_began  timestamptz := clock_timestamp();
    v_before text := coalesce(current_setting('pgwake.strays_at_a_time', true), '');
    v_tag    record;
    v_over   boolean;
    v_key    record;
BEGIN
    -- A heartbeat has its time as well: what would take longer than that would be undone with it, each time anew. So the next one goes on.
    PERFORM set_config('pgwake.strays_at_a_time', coalesce(nullif(v_before, ''), '10000'), true); -- for retire_tag, which others have do all
    FOR v_tag IN
        SELECT r.namespace, r.tag, CASE WHEN starts_with(r.tag, event_tag('', '')) THEN split_part(r.tag, '|', 2)::bigint
                 ELSE (SELECT g.group_id FROM event_groups g WHERE g.namespace = r.namespace AND g.name = split_part(substr(r.tag, 10), '|', 1)) END AS group_id
          FROM event_retirements r ORDER BY r.namespace COLLATE "C", r.tag COLLATE "C"
    LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        PERFORM is_behind(v_tag.group_id); -- see invariant (order)
        SELECT r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) INTO v_over
          FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND; -- somebody else is at it, or has removed it
        -- At each call, for those who had something of it locked may have ended. The horizon tells when nothing can come any more.
        PERFORM retire_tag(v_tag.group_id, v_tag.namespace, v_tag.tag);
        CONTINUE WHEN v_over IS NOT TRUE
            OR starts_with(v_tag.tag, event_tag('', '')) AND EXISTS (SELECT FROM event_keys k WHERE k.group_id = v_tag.group_id)
            OR CASE WHEN EXISTS (SELECT FROM event_subscriptions s WHERE s.group_id = v_tag.group_id AND s.tag = v_tag.tag)
               THEN EXISTS (SELECT FROM event_groups g
                              JOIN worker_queue q ON q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.priority = 0 AND q.visible_at < g.created_at
                             WHERE g.group_id = v_tag.group_id AND q.session_id IS NULL AND q.key IS NULL AND q.visible_at = q.created_at) -- of a former group
               ELSE EXISTS (SELECT FROM worker_queue q WHERE q.namespace = v_tag.namespace AND q.tag = v_tag.tag AND q.session_id IS NULL) END;
        DELETE FROM event_retirements r WHERE r.namespace = v_tag.namespace AND r.tag = v_tag.tag;
    END LOOP;
    PERFORM set_config('pgwake.strays_at_a_time', v_before, true);
    UPDATE event_retirements r SET horizon = horizon()
     WHERE (r.namespace, r.tag) IN (SELECT n.namespace, n.tag FROM event_retirements n WHERE n.horizon IS NULL FOR UPDATE SKIP LOCKED);
    -- Keys that are at rest, see invariant (bound): those of a group that is not behind. Of what a replay has left it moves the rest itself.
    v_began := clock_timestamp();
    FOR i IN 1 .. 100 LOOP
        EXIT WHEN clock_timestamp() > v_began + interval '2 s';
        SELECT w.group_id, w.key INTO v_key
          FROM event_groups g
         CROSS JOIN LATERAL (SELECT k.group_id, k.key FROM event_keys k WHERE k.group_id = g.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT 1 FOR UPDATE SKIP LOCKED) AS w
         WHERE NOT g.behind LIMIT 1;
        EXIT WHEN NOT FOUND;
        PERFORM next_of_key(v_key.group_id, v_key.key);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION remove_strays IS 'Internal: deals with what was delivered by subscriptions after they were removed, by transactions that did not know of that, once all of these have ended; and brings in what waits behind what nobody gets any more (next_of_key). All of it bounded: the next heartbeat goes on.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_patterns text[];
BEGIN
    PERFORM remove_strays();
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat_quietly(p_waiter integer, p_about text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off -- most keys may be those of a group that is behind, which are not to be read
AS $$
DECLARE
    v_id    text := p_about::json ->> 0;
    v_group text := p_about::json ->> 1;
    v_node  event_nodes;
BEGIN
    UPDATE event_nodes n SET last_heartbeat = clock_timestamp() WHERE n.node_id = v_id RETURNING * INTO v_node;
    RETURN v_node.waiter IS DISTINCT FROM p_waiter OR v_node.stopped_at IS NOT NULL OR EXISTS (SELECT FROM event_retirements)
        OR EXISTS (SELECT FROM event_groups g WHERE NOT g.behind AND (SELECT true FROM event_keys k WHERE k.group_id = g.group_id AND k.item_id IS NULL ORDER BY k.key LIMIT 1)) -- see remove_strays
        OR v_node.patterns <> ARRAY(SELECT p.pattern FROM list_patterns(v_node.namespace, v_group) AS p (pattern) ORDER BY p.pattern COLLATE "C");
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
    ON CONFLICT (group_id, key) DO UPDATE SET item_id = CASE
        WHEN p_log AND NOT EXISTS (SELECT FROM event_lines l WHERE l.group_id = p_group_id AND l.key = p_key AND l.place > coalesce(k.passed, -9223372036854775807) AND l.place < 0)
        THEN coalesce(k.item_id, v_item) ELSE k.item_id END -- which locks it; of a key that is at rest there may be some that come before
    RETURNING k.item_id, k.passed INTO v_head, v_passed;
    IF v_head = v_item THEN
        PERFORM enqueue_delivery(v_item, p_event_id, p_emitted_at, p_tag);
    ELSE
        -- Behind all that wait, also where the sequence is behind the rows, as where logical replication has brought those alone.
        v_place := greatest(nextval('event_lines_place_seq') - CASE WHEN p_log THEN 4611686018427387904 ELSE 0 END, 1 + v_passed,
            1 + (SELECT l.place FROM event_lines l
                  WHERE l.group_id = p_group_id AND l.key = p_key AND l.place > coalesce(v_passed, -9223372036854775807)
                    AND l.place < CASE WHEN p_log THEN 0 ELSE 9223372036854775807 END ORDER BY l.place DESC LIMIT 1));
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
        v_place := greatest(nextval('event_lines_place_seq'), 1 + v_passed, -- as in line_up
            1 + (SELECT l.place FROM event_lines l
                  WHERE l.group_id = v_group AND l.key = NEW.key AND l.place > coalesce(v_passed, -9223372036854775807) ORDER BY l.place DESC LIMIT 1));
        INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type, item_id)
        SELECT v_group, NEW.key, v_place, coalesce(e.event_id, 0), coalesce(e.emitted_at, NEW.created_at), NEW.name, NEW.id FROM delivered_event(NEW.input) AS e
         WHERE NOT EXISTS (SELECT FROM event_lines l WHERE l.item_id = NEW.id); -- of this very transaction, see item_of_key_settled
        NEW.visible_at := '9999-12-31 00:00:00+00';
    END IF;
    RETURN NEW;
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
COMMENT ON FUNCTION remove_strays IS 'Internal: deals with what was delivered by subscriptions after they were removed, by transactions that did not know of that, once all of these have ended.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat(p_node_id text, p_namespace text, p_group text, p_waiter integer, p_heartbeats interval)
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION beat_quietly(p_waiter integer, p_about text)
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

COMMENT ON COLUMN event_keys.item_id IS 'Null: none yet, for the group is behind, or was a moment ago.';
