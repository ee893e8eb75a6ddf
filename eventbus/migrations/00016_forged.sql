-- What nothing of the bus has made stands in nobody's way: what a producer enqueues under a tag of it, and how often a node says that it beats.
--
-- Invariant (line) says of whatever is enqueued with a key, under the tag of a group, that it has the key or is in its line if it is in worker_queue,
-- and only if it is. An INSERT that meets a dedup key that is taken fires BEFORE triggers for a row that will never be there. So the place is taken
-- AFTER the row is, in the same statement: nobody else has seen it due.

-- +goose Up

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
        RETURN NULL; -- it comes from the line
    END IF;
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = NEW.namespace AND g.name = split_part(substr(NEW.tag, 10), '|', 1);
    IF NOT FOUND THEN
        RETURN NULL;
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
        UPDATE worker_queue q SET visible_at = '9999-12-31 00:00:00+00' WHERE q.id = NEW.id;
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION item_of_key_comes_back IS 'Internal: has a dead letter that is redriven wait until what is there of its key is settled: in the queue, for a redrive counts what is there, but not due. Whatever else is enqueued with a key, under a tag of a group, waits as well.';

CREATE OR REPLACE TRIGGER worker_queue_behind_its_key AFTER INSERT ON worker_queue FOR EACH ROW
    WHEN (NEW.key IS NOT NULL AND starts_with(NEW.tag, 'eventbus/'))
    EXECUTE FUNCTION item_of_key_comes_back();

-- Nobody adds to worker_queue now, or has removed from it and not committed. So what is not there, and has a key or a place, never was. A key that
-- it had is at rest, and heartbeats, or its replay, go on with it.
-- +goose StatementBegin
DO $$
DECLARE
    v_key record;
BEGIN
    FOR v_key IN
        SELECT f.group_id, f.key
          FROM (SELECT k.group_id, k.key, k.item_id FROM event_keys k UNION ALL SELECT l.group_id, l.key, l.item_id FROM event_lines l) AS f
         WHERE f.item_id IS NOT NULL AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = f.item_id)
         GROUP BY f.group_id, f.key ORDER BY f.key COLLATE "C", f.group_id
    LOOP
        PERFORM FROM event_keys k WHERE k.group_id = v_key.group_id AND k.key = v_key.key FOR UPDATE;
        DELETE FROM event_lines l WHERE l.group_id = v_key.group_id AND l.key = v_key.key AND l.item_id IS NOT NULL
           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = l.item_id);
        UPDATE event_keys k SET item_id = NULL WHERE k.group_id = v_key.group_id AND k.key = v_key.key AND k.item_id IS NOT NULL
           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = k.item_id);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delivered_event(p_input json)
RETURNS event_log
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_event event_log;
BEGIN
    -- Invariant: what one item has keeps nobody from looking at the others. delivery_input makes 1,500 bytes at most, in the encoding of its time;
    -- what is longer may have more numbers, once jsonb writes them out, than a text has room for.
    IF octet_length(p_input::text) > 4096 THEN
        RETURN NULL;
    END IF;
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
COMMENT ON FUNCTION delivered_event IS 'Internal: the reverse of delivery_input, without what that leaves out; null: nothing of the bus has made this input, as where it has more than 4 KiB.';

-- Whatever a row says, list_nodes and keep_event_log can count with it: three times that ago is a time. Fields of an interval may have signs of
-- their own, and be as large as they like.
UPDATE event_nodes n SET heartbeats = '30 s'
 WHERE (n.heartbeats <= interval '300 years' AND least(extract(year FROM n.heartbeats), extract(month FROM n.heartbeats), extract(day FROM n.heartbeats),
        extract(hour FROM n.heartbeats), extract(minute FROM n.heartbeats), extract(second FROM n.heartbeats)) >= 0) IS NOT TRUE;
ALTER TABLE event_nodes DROP CONSTRAINT event_nodes_heartbeats_check, ADD CONSTRAINT event_nodes_heartbeats_check CHECK (
    heartbeats > interval '0' AND heartbeats <= interval '300 years' AND least(extract(year FROM heartbeats), extract(month FROM heartbeats),
    extract(day FROM heartbeats), extract(hour FROM heartbeats), extract(minute FROM heartbeats), extract(second FROM heartbeats)) >= 0);

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION register_node(
    p_node_id text, p_namespace text DEFAULT NULL, p_display_name text DEFAULT '', p_description text DEFAULT '', p_metadata jsonb DEFAULT '{}', p_heartbeats interval DEFAULT '30 s')
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_heartbeats BETWEEN interval '10 ms' AND interval '300 years') IS NOT TRUE THEN
        RAISE EXCEPTION 'heartbeats come every 10 ms to 300 years: not %', quote_nullable(p_heartbeats) USING ERRCODE = 'PW003';
    END IF;
    INSERT INTO event_nodes AS n (node_id, namespace, display_name, description, metadata, heartbeats)
    VALUES (p_node_id, coalesce(p_namespace, 'default'), p_display_name, p_description, p_metadata, p_heartbeats)
    ON CONFLICT (node_id) DO UPDATE
       SET namespace = excluded.namespace, display_name = excluded.display_name, description = excluded.description, metadata = excluded.metadata,
           heartbeats = excluded.heartbeats, last_heartbeat = clock_timestamp(), stopped_at = NULL, waiter = NULL;
    PERFORM register_namespaces(ARRAY[coalesce(p_namespace, 'default')]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_node IS 'Registers a node of a namespace (null: default), or changes what is known of it. p_heartbeats is how often it is going to call touch_node_heartbeat: PW003 for less than 10 ms, and for more than 300 years.';

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
CREATE OR REPLACE FUNCTION register_node(
    p_node_id text, p_namespace text DEFAULT NULL, p_display_name text DEFAULT '', p_description text DEFAULT '', p_metadata jsonb DEFAULT '{}', p_heartbeats interval DEFAULT '30 s')
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO event_nodes AS n (node_id, namespace, display_name, description, metadata, heartbeats)
    VALUES (p_node_id, coalesce(p_namespace, 'default'), p_display_name, p_description, p_metadata, p_heartbeats)
    ON CONFLICT (node_id) DO UPDATE
       SET namespace = excluded.namespace, display_name = excluded.display_name, description = excluded.description, metadata = excluded.metadata,
           heartbeats = excluded.heartbeats, last_heartbeat = clock_timestamp(), stopped_at = NULL, waiter = NULL;
    PERFORM register_namespaces(ARRAY[coalesce(p_namespace, 'default')]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_node IS 'Registers a node of a namespace (null: default), or changes what is known of it. p_heartbeats is how often it is going to call touch_node_heartbeat.';

ALTER TABLE event_nodes DROP CONSTRAINT event_nodes_heartbeats_check, ADD CONSTRAINT event_nodes_heartbeats_check CHECK (heartbeats > interval '0');

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION delivered_event(p_input json)
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
COMMENT ON FUNCTION item_of_key_comes_back IS 'Internal: has a dead letter that is redriven wait until what is there of its key is settled: in the queue, for a redrive counts what is there, but not due.';

CREATE OR REPLACE TRIGGER worker_queue_behind_its_key BEFORE INSERT ON worker_queue FOR EACH ROW
    WHEN (NEW.key IS NOT NULL AND starts_with(NEW.tag, 'eventbus/'))
    EXECUTE FUNCTION item_of_key_comes_back();
