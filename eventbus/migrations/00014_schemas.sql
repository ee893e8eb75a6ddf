-- Schemas of one database that a transaction emits in at once: what it has lined up in one was taken for what it has lined up in the other.

-- +goose Up

-- Waits for those who have emitted and not committed: what one of them has noted by the former function, this one would line up again.
LOCK TABLE event_log IN SHARE ROW EXCLUSIVE MODE;

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
