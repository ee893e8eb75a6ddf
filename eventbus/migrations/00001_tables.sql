-- The tables of the event bus: the log, who wants what of it, and the order of what belongs together.
-- Runs with search_path = <schema>, pg_temp, after the migrations of the Provider, whose functions it calls.

-- +goose Up

CREATE SEQUENCE event_log_event_id_seq;
COMMENT ON SEQUENCE event_log_event_id_seq IS 'Ids of events.';

-- A sequence, for whoever reads it sees the latest value, whatever the snapshot.
CREATE SEQUENCE event_log_offset_seq MINVALUE 0 START 0;
COMMENT ON SEQUENCE event_log_offset_seq IS 'What is added to the number of a transaction: nothing, until the log came to a server whose numbers are lower (adopt_event_log).';

-- +goose StatementBegin
CREATE FUNCTION log_xact(p_xact xid8 DEFAULT pg_current_xact_id())
RETURNS xid8
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- And not pg_sequence_last_value, which says nothing to a role that may not read it: its events would be those of long ago.
    RETURN (p_xact::text::bigint + (SELECT s.last_value FROM event_log_offset_seq s))::text::xid8;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION log_xact IS 'Internal: the number of a transaction in the log, which goes on from server to server.';

-- A delivery is a work item that refers to its row here. It has what is small of that as well (delivery_input).
CREATE TABLE event_log (
    event_id          bigint      NOT NULL DEFAULT nextval('event_log_event_id_seq'),
    namespace         text        NOT NULL
                      CONSTRAINT event_log_namespace_check CHECK (namespace = 'default' OR namespace ~ '^[a-z][a-z0-9_-]{0,39}$'),
    event_type        text        NOT NULL
                      CONSTRAINT event_log_event_type_check CHECK (octet_length(event_type) <= 180 AND event_type ~ '^[^.*#|[:space:][:cntrl:]]+(\.[^.*#|[:space:][:cntrl:]]+)*$'),
    payload           jsonb       NOT NULL DEFAULT 'null',
    emitted_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    producer_node_id  text        NOT NULL DEFAULT '' CONSTRAINT event_log_producer_check CHECK (octet_length(producer_node_id) <= 255),
    scheduled_task_id uuid,
    metadata          jsonb       NOT NULL DEFAULT '{}' CONSTRAINT event_log_metadata_check CHECK (jsonb_typeof(metadata) = 'object'),
    headers           jsonb       CONSTRAINT event_log_headers_check CHECK (jsonb_typeof(headers) = 'object'),
    key               text        CONSTRAINT event_log_key_check CHECK (octet_length(key) BETWEEN 1 AND 255),
    routes            bigint[]    NOT NULL DEFAULT '{}',
    xact              xid8        NOT NULL DEFAULT log_xact(),
    PRIMARY KEY (event_id, emitted_at)
) PARTITION BY RANGE (emitted_at);
ALTER SEQUENCE event_log_event_id_seq OWNED BY event_log.event_id;
COMMENT ON TABLE event_log IS 'Every event that was emitted, once; by month, in UTC. Append-only.';
COMMENT ON COLUMN event_log.producer_node_id IS 'Node that emitted it; empty: nobody said.';
COMMENT ON COLUMN event_log.scheduled_task_id IS 'Schedule that emitted it, if one did.';
COMMENT ON COLUMN event_log.headers IS 'What travels with the event beside its payload, an object of strings: such as the trace that it belongs to.';
COMMENT ON COLUMN event_log.key IS 'Of the events of a key each group gets one at a time, in order.';
COMMENT ON COLUMN event_log.routes IS 'Groups to which it was delivered when it was emitted, by id; not those to which it was replayed.';
COMMENT ON COLUMN event_log.xact IS 'Transaction that emitted it, see log_xact. The log is read in the order of (xact, event_id), and only below every open transaction, so that nothing is passed over that commits late (read_events). Whoever emits has this before he reads the subscriptions (see horizon).';
-- read_events, replay_some
CREATE INDEX event_log_cursor_idx ON event_log (namespace, xact, event_id);
-- look-ups by type and time
CREATE INDEX event_log_type_idx ON event_log (namespace, event_type, emitted_at);

CREATE TABLE event_log_default PARTITION OF event_log DEFAULT;
COMMENT ON TABLE event_log_default IS 'Events of months for which there is no partition.';

CREATE TABLE event_groups (
    group_id   bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace  text        NOT NULL CONSTRAINT event_groups_namespace_check CHECK (namespace ~ '^[a-z][a-z0-9_-]{0,39}$'),
    name       text        NOT NULL CONSTRAINT event_groups_name_check CHECK (octet_length(name) <= 64 AND name ~ '^[^|[:space:][:cntrl:]]+$'),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    behind     boolean     NOT NULL DEFAULT false,
    UNIQUE (namespace, name)
);
COMMENT ON TABLE event_groups IS 'Consumer groups. Each gets every event that one of its subscriptions is for, once. A group that is made anew under an old name is another one.';
COMMENT ON COLUMN event_groups.behind IS 'It began at the beginning, and what it is to get of the log is not delivered yet; what is emitted of a key waits behind that, see line_up.';

CREATE TABLE event_subscriptions (
    group_id    bigint      NOT NULL REFERENCES event_groups ON DELETE CASCADE,
    namespace   text        NOT NULL,
    pattern     text        NOT NULL,
    regex       text,
    specificity integer     NOT NULL,
    tag         text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, pattern)
);
-- routes: the subscriptions to a type itself
CREATE INDEX event_subscriptions_type_idx ON event_subscriptions (namespace, pattern) WHERE regex IS NULL;
-- routes: all others
CREATE INDEX event_subscriptions_wild_idx ON event_subscriptions (namespace, group_id) WHERE regex IS NOT NULL;
COMMENT ON TABLE event_subscriptions IS 'Which events a group gets, by type.';
COMMENT ON COLUMN event_subscriptions.pattern IS 'Segments as types have them, or * for one of any kind, or # for any number of them, none included.';
COMMENT ON COLUMN event_subscriptions.regex IS 'The same for a type with a dot before it; null: the pattern is a type.';
COMMENT ON COLUMN event_subscriptions.specificity IS 'Of several patterns of a group that an event matches, the one with the highest routes it; see pattern_specificity.';
COMMENT ON COLUMN event_subscriptions.tag IS 'Tag of the work items that it routes.';

CREATE TABLE event_retirements (
    namespace text NOT NULL,
    tag       text NOT NULL,
    horizon   xid8,
    PRIMARY KEY (namespace, tag)
);
COMMENT ON TABLE event_retirements IS 'Tags of subscriptions that were removed, until nobody can deliver by them any more; see remove_strays.';
COMMENT ON COLUMN event_retirements.horizon IS 'Transactions from this one on know of it; null: not looked at yet.';

CREATE TABLE event_keys (
    group_id bigint NOT NULL,
    key      text   NOT NULL,
    item_id  bigint,
    PRIMARY KEY (group_id, key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- item_of_key_settled
CREATE INDEX event_keys_item_idx ON event_keys (item_id);
-- replay_some
CREATE INDEX event_keys_waiting_idx ON event_keys (group_id, key) WHERE item_id IS NULL;
COMMENT ON TABLE event_keys IS 'Keys of which a group has a delivery that is not settled, with the work item of that; its lock is what orders them, see line_up.';
COMMENT ON COLUMN event_keys.item_id IS 'Null: none yet, for the group is behind, or was a moment ago.';

CREATE SEQUENCE event_lines_place_seq;
COMMENT ON SEQUENCE event_lines_place_seq IS 'Places in the lines of keys.';

CREATE TABLE event_lines (
    group_id   bigint      NOT NULL,
    key        text        NOT NULL,
    place      bigint      NOT NULL DEFAULT nextval('event_lines_place_seq'),
    event_id   bigint      NOT NULL,
    emitted_at timestamptz NOT NULL,
    event_type text        NOT NULL,
    item_id    bigint,
    PRIMARY KEY (group_id, key, place)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
ALTER SEQUENCE event_lines_place_seq OWNED BY event_lines.place;
-- item_of_key_settled
CREATE INDEX event_lines_item_idx ON event_lines (item_id) WHERE item_id IS NOT NULL;
COMMENT ON TABLE event_lines IS 'Deliveries that wait for one of their key, first come, first served. They are not in the worker queue yet.';
COMMENT ON COLUMN event_lines.place IS 'Below 0: what a group that is behind gets of the log, before all that is emitted meanwhile.';
COMMENT ON COLUMN event_lines.item_id IS 'Work item of a delivery that was a dead letter, and is due in 9999 while it waits; null: it has none yet.';

CREATE TABLE event_dedup_keys (
    namespace  text        NOT NULL,
    dedup_key  text        NOT NULL CONSTRAINT event_dedup_keys_check CHECK (octet_length(dedup_key) BETWEEN 1 AND 255),
    event_id   bigint      NOT NULL,
    kept_until timestamptz NOT NULL,
    PRIMARY KEY (namespace, dedup_key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- take_dedup_keys, which removes those whose time is over
CREATE INDEX event_dedup_keys_until_idx ON event_dedup_keys (kept_until);
COMMENT ON TABLE event_dedup_keys IS 'Dedup keys of events, for as long as they are taken.';

CREATE TABLE event_replays (
    replay_id    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     bigint      NOT NULL REFERENCES event_groups ON DELETE CASCADE,
    first_id     bigint,
    last_id      bigint,
    emitted_from timestamptz,
    emitted_to   timestamptz,
    undelivered  boolean     NOT NULL,
    horizon      xid8,
    after_xact   xid8        NOT NULL DEFAULT '0',
    after_id     bigint      NOT NULL DEFAULT 0,
    delivered    bigint      NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz
);
COMMENT ON TABLE event_replays IS 'What of the log is delivered to a group once more, and how far that has got.';
COMMENT ON COLUMN event_replays.emitted_to IS 'Exclusive; the other bounds are inclusive. Null is no bound.';
COMMENT ON COLUMN event_replays.undelivered IS 'Leaves out what was delivered to the group when it was emitted: for a group that is to begin at the beginning.';
COMMENT ON COLUMN event_replays.horizon IS 'As of event_log.xact. Events of this transaction and later ones are not replayed; null: not begun.';

CREATE TABLE event_nodes (
    node_id        text        PRIMARY KEY CONSTRAINT event_nodes_id_check CHECK (node_id ~ '^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$'),
    namespace      text        NOT NULL CONSTRAINT event_nodes_namespace_check CHECK (namespace ~ '^[a-z][a-z0-9_-]{0,39}$'),
    display_name   text        NOT NULL DEFAULT '',
    description    text        NOT NULL DEFAULT '',
    metadata       jsonb       NOT NULL DEFAULT '{}' CONSTRAINT event_nodes_metadata_check CHECK (jsonb_typeof(metadata) = 'object'),
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_heartbeat timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeats     interval    NOT NULL DEFAULT '30 s' CONSTRAINT event_nodes_heartbeats_check CHECK (heartbeats > interval '0'),
    stopped_at     timestamptz,
    waiter         integer,
    patterns       text[]      NOT NULL DEFAULT '{}',
    UNIQUE (namespace, node_id)
) WITH (fillfactor = 50);
COMMENT ON TABLE event_nodes IS 'Nodes that emit and handle events.';
COMMENT ON COLUMN event_nodes.registered_at IS 'When it did so for the first time.';
COMMENT ON COLUMN event_nodes.heartbeats IS 'How often it sends one.';
COMMENT ON COLUMN event_nodes.stopped_at IS 'When it ended as it should; null: it has not.';
COMMENT ON COLUMN event_nodes.waiter IS 'Key of its Provider in waiters, while that has a LISTEN connection: when this is gone, so is the node. Null: heartbeats alone tell.';
COMMENT ON COLUMN event_nodes.patterns IS 'Those of its group that it was told of last.';

-- +goose StatementBegin
CREATE FUNCTION event_partitions()
RETURNS TABLE (name name, from_at timestamptz, to_at timestamptz)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT p.name, to_date(p.months[1], 'YYYY_MM')::timestamp AT TIME ZONE 'UTC',
           (to_date(coalesce(p.months[2], p.months[1]), 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC'
      FROM (SELECT c.relname AS name, regexp_match(c.relname, '^event_log_p([0-9]{4}_[0-9]{2})(?:_to_([0-9]{4}_[0-9]{2}))?$') AS months
              FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'event_log'::regclass) AS p
     WHERE p.months IS NOT NULL
     ORDER BY p.name;
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION event_partitions IS 'Internal: partitions of the log, without the default one, and the time of their events: from from_at on, and before to_at.';

-- +goose StatementBegin
CREATE FUNCTION bounded_default()
RETURNS TABLE (name name, valid boolean, from_at timestamptz, to_at timestamptz, months text)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT c.conname, c.convalidated, to_date(c.parts[1], 'YYYY_MM')::timestamp AT TIME ZONE 'UTC', (to_date(c.parts[2], 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC',
           c.parts[1] || '_to_' || c.parts[2]
      FROM (SELECT k.conname, k.convalidated, regexp_match(k.conname, '^event_log_default_([0-9]{4}_[0-9]{2})_to_([0-9]{4}_[0-9]{2})$') AS parts
              FROM pg_constraint k WHERE k.conrelid = 'event_log_default'::regclass AND k.contype = 'c') AS c
     WHERE c.parts IS NOT NULL;
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION bounded_default IS 'Internal: the constraint that set_default_aside is about to make a partition by, if it is.';

-- +goose StatementBegin
CREATE FUNCTION unbound_default()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_bound name;
BEGIN
    FOR v_bound IN SELECT b.name FROM bounded_default() b LOOP
        EXECUTE format('ALTER TABLE event_log_default DROP CONSTRAINT %I', v_bound);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION unbound_default IS 'Internal: has the default partition take events of all times, if it does not.';

-- +goose StatementBegin
CREATE FUNCTION make_event_partitions(p_months integer DEFAULT 2, p_now timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_month timestamp := date_trunc('month', coalesce(p_now, clock_timestamp()) AT TIME ZONE 'UTC');
    v_name  text;
    v_from  timestamptz;
    v_to    timestamptz;
    v_made  integer := 0;
BEGIN
    IF (p_months BETWEEN 0 AND 120 AND isfinite(v_month)) IS NOT TRUE THEN
        RAISE EXCEPTION 'partitions can be made for 0 to 120 months ahead: not % from %', quote_nullable(p_months), v_month USING ERRCODE = 'PW003';
    END IF;
    PERFORM take_lock(hashtext('pgwake event partitions of ' || current_schema()), 0, 'the partitions of the log');
    PERFORM unbound_default();
    FOR i IN 0 .. p_months LOOP
        v_name := 'event_log_p' || to_char(v_month + make_interval(months => i), 'YYYY_MM');
        v_from := (v_month + make_interval(months => i)) AT TIME ZONE 'UTC';
        v_to := (v_month + make_interval(months => i + 1)) AT TIME ZONE 'UTC';
        CONTINUE WHEN EXISTS (SELECT FROM event_partitions() p WHERE p.from_at <= v_from AND p.to_at >= v_to);
        EXECUTE format('CREATE TABLE %I (LIKE event_log INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', v_name);
        -- What has come for the month already is in the way, and nobody is to add to it until this has committed. For a month that is
        -- still to come there is nothing, and nobody who emits is kept waiting.
        IF i = 0 OR EXISTS (SELECT FROM event_log_default d WHERE d.emitted_at >= v_from AND d.emitted_at < v_to) THEN
            LOCK TABLE event_log IN SHARE ROW EXCLUSIVE MODE;
        END IF;
        EXECUTE format('WITH moved AS (DELETE FROM event_log_default WHERE emitted_at >= %L AND emitted_at < %L RETURNING *) INSERT INTO %I SELECT * FROM moved', v_from, v_to, v_name);
        EXECUTE format('ALTER TABLE event_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', v_name, v_from, v_to);
        EXECUTE format('COMMENT ON TABLE %I IS %L', v_name, 'Events of that month, in UTC.');
        v_made := v_made + 1;
    END LOOP;
    PERFORM revoke_from_public();
    RETURN v_made;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION make_event_partitions IS 'Makes the partitions of the log for this month, in UTC, and p_months after it, as far as they are missing, and returns how many that were. What is in the default partition and belongs there is moved. Nobody can emit while the one of this month is being made, or one for which there is something to move. The nodes call it, see keep_event_log.';

SELECT make_event_partitions();

-- +goose StatementBegin
CREATE FUNCTION require_no_events() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM event_log) OR EXISTS (SELECT FROM event_groups) OR EXISTS (SELECT FROM event_nodes) OR EXISTS (SELECT FROM event_dedup_keys) THEN
        RAISE EXCEPTION 'schema % still holds events, groups or nodes; remove them before migrating down', current_schema()
            USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION require_no_events IS 'Internal: fails with PW006 while a row would be lost by migrating down.';

-- +goose Down

DROP FUNCTION require_no_events, make_event_partitions, unbound_default, bounded_default, event_partitions;
DROP TABLE event_nodes, event_replays, event_dedup_keys, event_lines, event_keys, event_retirements, event_subscriptions, event_groups, event_log;
DROP FUNCTION log_xact;
DROP SEQUENCE event_log_offset_seq;
