-- The order of what belongs together: of the events of a key each group has one delivery at a time.
--
-- Invariant (line): at each commit, for each group and key, either nothing is unsettled, and there is no row in event_keys and none in
-- event_lines; or there is one row in event_keys, and its item_id is in worker_queue, due or claimed or waiting for its next attempt,
-- and alone so: all others are in event_lines. Only while a group is behind, and until its replay has ended, may there be none of the
-- key in worker_queue, and item_id be null.
--
-- Invariant (behind): while a group is behind, nothing that was emitted since it was there leaves a line. So all that it gets of the log
-- comes before, in the order of the log. Whoever goes by that it is behind holds a lock on its row until he commits, and what ends it
-- waits for that (replay_some): from then on no line is held, and those that were are moved on by the replay.
--
-- Who changes any of it has the row of event_keys locked to the end of his transaction: whoever comes into the line (line_up) inserts
-- or locks it, and whoever settles its item, or removes one that waits (item_of_key_settled), locks it before he looks who is next, in a
-- statement of its own, whose snapshot shows all that was committed before he had the lock. So one who came before that is seen, and one who comes after that sees
-- that the line has moved on, or begins a new one: nobody is left behind. All of it is the work of triggers, in the transaction that emits
-- or settles, whoever that is and however he does it; so a process may die anywhere.
--
-- Both come at the very end of their transactions (DEFERRABLE INITIALLY DEFERRED): a transaction that emits, and then goes on for long, keeps
-- neither the events of others from their line, nor the head of the line from being settled. So the order of a key is that in which the
-- transactions commit, and within each the one in which it emits.
--
-- Invariant (locks): a transaction that emits in a namespace locks the rows of event_keys in the order of keys, and of groups within each
-- (event_of_key_emitted). So those that only emit cannot deadlock; one that settles locks one row more for each item, after those.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION delivery_input(p_event event_log)
RETURNS json
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET timezone = 'UTC' -- the session may have one whose offset has seconds, which is no time in RFC 3339
AS $$
DECLARE
    v_whole json;
BEGIN
    -- What is small is in the delivery as well, so that whoever claims it has it at once.
    IF pg_column_size(p_event.payload) + pg_column_size(p_event.metadata) <= 1000 THEN
        v_whole := json_build_object('event_id', p_event.event_id, 'emitted_at', p_event.emitted_at, 'payload', p_event.payload, 'metadata', p_event.metadata,
                                     'producer', p_event.producer_node_id, 'scheduled_task_id', p_event.scheduled_task_id, 'xact', p_event.xact::text);
        IF octet_length(v_whole::text) <= 1500 THEN -- it may have been compressed
            RETURN v_whole;
        END IF;
    END IF;
    RETURN json_build_object('event_id', p_event.event_id, 'emitted_at', p_event.emitted_at);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delivery_input IS 'Internal: input of the work item that is a delivery of an event, which says where it is in the log; and, unless that is more than about 1 kB, what the log has besides what the work item has itself.';

-- +goose StatementBegin
CREATE FUNCTION delivered_event(p_input json)
RETURNS event_log
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_event event_log;
BEGIN
    v_event.event_id := p_input ->> 'event_id';
    v_event.emitted_at := p_input ->> 'emitted_at';
    v_event.payload := p_input -> 'payload';
    v_event.metadata := p_input -> 'metadata';
    v_event.producer_node_id := p_input ->> 'producer';
    v_event.scheduled_task_id := p_input ->> 'scheduled_task_id';
    v_event.xact := p_input ->> 'xact';
    RETURN v_event;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delivered_event IS 'Internal: the reverse of delivery_input, without what that leaves out; null: nothing of the bus has made this input.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_delivery(p_item bigint, p_event_id bigint, p_emitted_at timestamptz, p_tag text)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO worker_queue (id, name, input, namespace, tag, headers, key, visible_at, created_at)
    SELECT p_item, e.event_type, delivery_input(e), e.namespace, p_tag, e.headers, e.key, v_now, v_now
      FROM event_log e WHERE e.event_id = p_event_id AND e.emitted_at = p_emitted_at;
    RETURN CASE WHEN FOUND THEN p_item END;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_delivery IS 'Internal: enqueues the delivery at the head of a line under an id that event_keys has already. Null: the event is not in the log any more.';

-- +goose StatementBegin
CREATE FUNCTION is_behind(p_group_id bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM FROM event_groups g WHERE g.group_id = p_group_id AND g.behind FOR KEY SHARE;
    RETURN FOUND;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION is_behind IS 'Internal: whether a group is behind; if so, it is until this transaction ends.';

-- +goose StatementBegin
CREATE FUNCTION line_up(
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
COMMENT ON FUNCTION line_up IS 'Internal: has a group get an event when all those of its key are settled that came before. With p_log it is one that the group, which is behind, gets of the log.';

-- +goose StatementBegin
CREATE FUNCTION emits_keys(p_keys text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF array_remove(p_keys, NULL) <> '{}' THEN
        PERFORM set_config('pgwake.emits_keys', CASE WHEN cardinality(array_remove(p_keys, NULL)) = 1
            AND coalesce(current_setting('pgwake.emits_keys', true), '') = '' THEN 'one' ELSE 'many' END, true);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION emits_keys IS 'Internal: notes whether this transaction emits several events with keys, for event_of_key_emitted. Whatever puts such events into the log calls it.';

-- +goose StatementBegin
CREATE FUNCTION event_of_key_emitted()
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
COMMENT ON FUNCTION event_of_key_emitted IS 'Internal: lines events up with those of their keys.';

CREATE CONSTRAINT TRIGGER event_log_line_up AFTER INSERT ON event_log
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.key IS NOT NULL AND NEW.routes <> '{}')
    EXECUTE FUNCTION event_of_key_emitted();

-- +goose StatementBegin
CREATE FUNCTION next_of_key(p_group_id bigint, p_key text)
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
CREATE FUNCTION item_of_key_settled()
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
COMMENT ON FUNCTION item_of_key_settled IS 'Internal: brings the next delivery of a key into the queue when one has left it, in whatever way.';

-- An item leaves the queue when it is acknowledged, dead, cancelled or removed, and not when it is to be tried again.
CREATE CONSTRAINT TRIGGER worker_queue_next_of_key AFTER DELETE ON worker_queue
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (OLD.key IS NOT NULL AND starts_with(OLD.tag, 'eventbus/'))
    EXECUTE FUNCTION item_of_key_settled();

-- +goose StatementBegin
CREATE FUNCTION item_of_key_comes_back()
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
COMMENT ON FUNCTION item_of_key_comes_back IS 'Internal: has a dead letter that is redriven wait until what is there of its key is settled: in the queue, for a redrive counts what is there, but not due.';

CREATE TRIGGER worker_queue_behind_its_key BEFORE INSERT ON worker_queue FOR EACH ROW
    WHEN (NEW.key IS NOT NULL AND starts_with(NEW.tag, 'eventbus/'))
    EXECUTE FUNCTION item_of_key_comes_back();

-- +goose Down

DROP TRIGGER worker_queue_behind_its_key ON worker_queue;
DROP TRIGGER worker_queue_next_of_key ON worker_queue;
DROP TRIGGER event_log_line_up ON event_log;
DROP FUNCTION item_of_key_comes_back, item_of_key_settled, next_of_key, event_of_key_emitted, emits_keys, line_up, is_behind, enqueue_delivery, delivered_event, delivery_input;
