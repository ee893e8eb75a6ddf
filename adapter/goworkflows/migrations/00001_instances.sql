-- What the runtime has to know of its instances at once, and by its own names.
-- Runs with search_path = <schema>, pg_temp, after the migrations of the Provider, whose tables and functions it uses.

-- +goose Up

-- The runtime locks and queues each execution by itself, so each is an instance of the Provider: instance_id/execution_id, which is
-- unambiguous, as no execution id holds a slash. The Provider knows of an instance from its first acknowledged turn on, and the runtime from
-- the moment of its creation: hence the table.
CREATE TABLE gowf_instances (
    instance            text        PRIMARY KEY GENERATED ALWAYS AS (instance_id || '/' || execution_id) STORED,
    instance_id         text        NOT NULL CONSTRAINT gowf_instances_instance_id_check CHECK (instance_id <> ''),
    execution_id        text        NOT NULL CONSTRAINT gowf_instances_execution_id_check CHECK (execution_id <> '' AND strpos(execution_id, '/') = 0),
    parent_instance_id  text,
    parent_execution_id text,
    parent_event_id     bigint,
    queue               text        NOT NULL,
    state               smallint    NOT NULL DEFAULT 0 CONSTRAINT gowf_instances_state_check CHECK (state BETWEEN 0 AND 2),
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed_at        timestamptz CONSTRAINT gowf_instances_completed_at_check CHECK ((completed_at IS NULL) = (state = 0))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
COMMENT ON TABLE gowf_instances IS 'The executions of the workflows of go-workflows, from their creation until they are removed.';
COMMENT ON COLUMN gowf_instances.instance IS 'The instance of the Provider that it is.';
COMMENT ON COLUMN gowf_instances.state IS 'As the runtime counts: 0 active, 1 continued as new, 2 finished.';

-- gowf_create: of an instance id one execution is active at a time. gowf_send: which one that is. GetStats: how many there are.
CREATE UNIQUE INDEX gowf_instances_active_idx ON gowf_instances (instance_id) WHERE state = 0;
-- GetWorkflowInstances, by page
CREATE INDEX gowf_instances_page_idx ON gowf_instances (created_at DESC, instance DESC);
-- RemoveWorkflowInstances
CREATE INDEX gowf_instances_completed_idx ON gowf_instances (completed_at) WHERE completed_at IS NOT NULL;

-- Two executions that are to be active at the same moment: the second waits for the transaction of the first, and adds nothing if that commits.
-- +goose StatementBegin
CREATE FUNCTION gowf_create(
    p_instance_ids text[], p_execution_ids text[], p_parent_instance_ids text[], p_parent_execution_ids text[], p_parent_event_ids bigint[],
    p_names text[], p_queues text[], p_datas text[], p_namespace text, p_continues text DEFAULT NULL)
RETURNS boolean[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_created boolean[] := array_fill(false, ARRAY[cardinality(p_instance_ids)]);
    v_new     text;
    n         integer;
BEGIN
    UPDATE gowf_instances g SET state = 1 WHERE g.instance = p_continues;
    FOR n IN SELECT i.ord FROM unnest(p_instance_ids) WITH ORDINALITY AS i (id, ord) ORDER BY i.id, i.ord LOOP -- so that two cannot deadlock
        INSERT INTO gowf_instances (instance_id, execution_id, parent_instance_id, parent_execution_id, parent_event_id, queue)
        VALUES (p_instance_ids[n], p_execution_ids[n], p_parent_instance_ids[n], p_parent_execution_ids[n], p_parent_event_ids[n], p_queues[n])
        ON CONFLICT DO NOTHING
        RETURNING instance INTO v_new;
        v_created[n] := FOUND;
        IF FOUND THEN
            PERFORM enqueue_message(v_new, 'start', p_datas[n]::json, p_name => p_names[n], p_namespace => p_namespace, p_queue => p_queues[n]);
        END IF;
    END LOOP;
    RETURN v_created;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_create IS 'Creates executions, each with the message that opens it, and says of each whether that was possible: not if one of its instance id is active, or if there is the same one already. p_continues is the instance that ends with it as continued as new.';

-- An execution that ends meanwhile drops what was sent: nobody can tell the two orders apart.
-- +goose StatementBegin
CREATE FUNCTION gowf_send(p_instance_id text, p_execution_id text, p_data json, p_namespace text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_instance text;
    v_queue    text;
BEGIN
    IF p_execution_id IS NULL THEN
        IF NOT reads_committed() THEN
            RAISE EXCEPTION 'which execution is active a transaction that is % need not see: make it READ COMMITTED',
                upper(current_setting('transaction_isolation')) USING ERRCODE = 'PW003';
        END IF;
        SELECT g.instance, g.queue INTO v_instance, v_queue FROM gowf_instances g WHERE g.instance_id = p_instance_id AND g.state = 0;
    ELSE
        SELECT g.instance, g.queue INTO v_instance, v_queue FROM gowf_instances g WHERE g.instance = p_instance_id || '/' || p_execution_id;
    END IF;
    IF v_instance IS NULL THEN
        RETURN false;
    END IF;
    PERFORM enqueue_message(v_instance, 'queue_message', p_data, p_namespace => p_namespace, p_queue => v_queue); -- where somebody drops it, if it has no more to begin
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_send IS 'Sends an event to an execution or, if p_execution_id is null, to the active one of the instance id. False if there is none. PW003 for the active one in a transaction that is not READ COMMITTED, which may see one that has ended.';

-- The end of an execution is a turn like any other, acknowledged in one round trip, and this goes with it.
-- +goose StatementBegin
CREATE FUNCTION gowf_ended() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    UPDATE gowf_instances g SET state = 2, completed_at = NEW.completed_at WHERE g.instance = NEW.instance_id AND g.state = 0;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_ended IS 'Internal: notes in gowf_instances that an execution has finished.';

-- Those without a slash are somebody else's.
CREATE TRIGGER gowf_ended AFTER INSERT OR UPDATE OF status ON executions
    FOR EACH ROW WHEN (NEW.status IN ('Completed', 'Failed', 'Cancelled') AND strpos(NEW.instance_id, '/') > 0) EXECUTE FUNCTION gowf_ended();

-- +goose StatementBegin
CREATE FUNCTION gowf_removed() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    DELETE FROM gowf_instances g WHERE g.instance IN (SELECT r.instance_id FROM removed r);
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_removed IS 'Internal: removes from gowf_instances what was deleted by any verb.';

CREATE TRIGGER gowf_removed AFTER DELETE ON instances
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION gowf_removed();

-- +goose StatementBegin
CREATE FUNCTION gowf_opened(p_instance text) RETURNS boolean
LANGUAGE sql VOLATILE -- with a snapshot of its own
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
    SELECT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance)
        OR EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.kind = 'start');
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_opened IS 'Internal: whether an execution has begun, or can.';

-- What opens an execution may be a dead letter, or have been purged as one. Then it is active and can neither begin nor end, and for the Provider it
-- is not there.
-- +goose StatementBegin
CREATE FUNCTION gowf_remove_unopened(p_instance text, p_told json, p_namespace text) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_token  uuid := gen_random_uuid();
    v_opened boolean;
    v_gone   gowf_instances;
BEGIN
    PERFORM check_isolation();
    v_opened := gowf_opened(p_instance); -- a refusal need not wait for anybody
    IF NOT v_opened THEN
        PERFORM lock_instances(ARRAY[p_instance], v_token);
        PERFORM FROM dead_letters d WHERE d.instance_id = p_instance ORDER BY d.id FOR UPDATE; -- of which one may be on its way into the queue
        v_opened := gowf_opened(p_instance);
        IF v_opened THEN
            DELETE FROM instance_locks l WHERE l.instance_id = p_instance AND l.lock_token = v_token;
        END IF;
    END IF;
    IF v_opened THEN
        RETURN false;
    END IF;
    PERFORM remove_instances(ARRAY[p_instance]);
    DELETE FROM gowf_instances g WHERE g.instance = p_instance RETURNING * INTO v_gone;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF p_told IS NOT NULL AND v_gone.parent_instance_id IS NOT NULL THEN
        PERFORM gowf_send(v_gone.parent_instance_id, v_gone.parent_execution_id, p_told, p_namespace);
    END IF;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_remove_unopened IS 'Removes an execution that cannot begin, since what opens it is a dead letter or was purged, with all that is for it, and sends its parent p_told. False if it can begin, null if there is none. PW003 in a transaction that is not READ COMMITTED.';

-- +goose StatementBegin
CREATE FUNCTION gowf_require_none() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM gowf_instances) THEN
        RAISE EXCEPTION 'schema % still holds workflows; remove them before migrating down', current_schema() USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION gowf_require_none IS 'Internal: fails with PW006 while a row would be lost by migrating down.';

SELECT revoke_from_public();

-- +goose Down

LOCK TABLE gowf_instances IN ACCESS EXCLUSIVE MODE;
SELECT gowf_require_none();
DROP TRIGGER gowf_removed ON instances;
DROP TRIGGER gowf_ended ON executions;
DROP FUNCTION gowf_require_none, gowf_remove_unopened, gowf_opened, gowf_removed, gowf_ended, gowf_send, gowf_create;
DROP TABLE gowf_instances;
