-- Looking at instances and removing them, for runtimes and operators.
--
-- What a deletion relies on, and what others may rely on:
--
-- * No turn of an instance is taken, acknowledged, renewed or given back while a transaction deletes it:
--   each of those begins by locking the row in instance_locks, and so does a deletion. It adds the row where there
--   is none, under the advisory lock that a fetch needs to add one, and at the end removes it.
--   - A turn in progress is cut off: its token is gone with the row, so its ack fails with PW001 and
--     cannot bring the instance back.
--   - An ack that came first is waited for, and what it wrote is deleted.
--   - A fetch never waits for a deletion: it skips a lock row that is held, and only tries the advisory lock.
-- * A deletion waits in this order: advisory locks by key, lock rows by instance, dead letters by id, work items by
--   id, executions by instance and execution. Only then, holding everything that somebody else could, it
--   removes the first row. So two deletions cannot deadlock, neither can one and any verb that is a transaction of
--   its own, and nobody who waits for a removed dedup key can be waited for. A caller's transaction that holds
--   work items of an instance and then asks for its turn goes the other way; the server ends one of the two.
-- * Everything is decided again once the locks are held, by statements whose snapshots are newer. So a deletion in a
--   transaction that has one snapshot for all its statements is refused: it would not see, and leave behind, what was
--   queued since then.
--
-- A message or work item that is enqueued for a deleted instance is one for an instance that never was.
--
-- SQLSTATEs raised here: PW002 no such instance or execution, PW003 invalid argument, PW004 the instance is running,
-- PW005 it has a parent, or would leave children behind. An instance is running while its current execution is, and
-- also once that has continued as new: then the message that begins the next one is queued, or in a turn.

-- +goose Up

-- list_instances by status
CREATE INDEX executions_status_idx ON executions (status, instance_id) WHERE status IS NOT NULL; -- as in orchestrator_queue
-- delete_instances_bulk
CREATE INDEX executions_completed_idx ON executions (completed_at, instance_id) WHERE status IN ('Completed', 'Failed', 'Cancelled');

CREATE VIEW instance_info AS
SELECT i.instance_id, i.namespace, i.name, i.version, i.queue, i.parent_id, i.attributes,
       i.current_execution AS execution_id, coalesce(x.status, 'Running') AS status, x.output,
       i.custom_status, i.custom_status_version, coalesce(x.pin, 0) AS pin, i.created_at, i.updated_at
  FROM instances i
  LEFT JOIN executions x ON x.instance_id = ANY (ARRAY[i.instance_id]) AND x.execution_id = i.current_execution;
COMMENT ON VIEW instance_info IS 'Instances with their current execution.';

-- +goose StatementBegin
CREATE FUNCTION cut_of(p_payload anyelement, p_bytes integer)
RETURNS json
LANGUAGE plpgsql STABLE STRICT -- so where whole payloads are asked for, it costs nothing
SET search_path FROM CURRENT
AS $$
DECLARE
    v_text text := p_payload::text;
BEGIN
    IF octet_length(v_text) > p_bytes THEN
        RETURN json_build_object('bytes', octet_length(v_text), 'start', left(v_text, greatest(p_bytes, 0)));
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cut_of IS 'Internal: of a payload that as text is longer than p_bytes, an object of its length (bytes) and its first p_bytes characters (start); null otherwise. What lists have in place of it, if they are asked for payloads up to a length.';

-- +goose StatementBegin
CREATE FUNCTION pick_instances(p_status text, p_namespace text, p_name text, p_queue text, p_after text, p_limit integer)
RETURNS SETOF instance_info
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF p_status IS NULL THEN
        RETURN QUERY
        SELECT i.* FROM instance_info i
         WHERE i.instance_id > coalesce(p_after, '')
           AND (p_namespace IS NULL OR i.namespace = p_namespace) AND (p_name IS NULL OR i.name = p_name)
           AND (p_queue IS NULL OR i.queue = p_queue)
         ORDER BY i.instance_id LIMIT p_limit;
    ELSE
        RETURN QUERY
        SELECT i.* FROM executions x
          JOIN instance_info i ON i.instance_id = ANY (ARRAY[x.instance_id]) AND i.execution_id = x.execution_id
         WHERE x.status = p_status AND x.instance_id > coalesce(p_after, '')
           AND (p_namespace IS NULL OR i.namespace = p_namespace) AND (p_name IS NULL OR i.name = p_name)
           AND (p_queue IS NULL OR i.queue = p_queue)
         ORDER BY x.instance_id LIMIT p_limit;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pick_instances IS 'Internal: the instances of list_instances, whole.';

-- +goose StatementBegin
CREATE FUNCTION list_instances(
    p_status text DEFAULT NULL, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_queue text DEFAULT NULL,
    p_after text DEFAULT NULL, p_limit integer DEFAULT 100, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (instance_id text, namespace text, name text, version text, queue text, parent_id text, attributes json, execution_id bigint, status text,
    output text, custom_status text, custom_status_version bigint, pin bigint, created_at timestamptz, updated_at timestamptz,
    attributes_cut json, output_cut json, custom_status_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT i.instance_id, i.namespace, i.name, i.version, i.queue, i.parent_id, CASE WHEN i.attributes_cut IS NULL THEN i.attributes END,
           i.execution_id, i.status, CASE WHEN i.output_cut IS NULL THEN i.output END, CASE WHEN i.custom_status_cut IS NULL THEN i.custom_status END,
           i.custom_status_version, i.pin, i.created_at, i.updated_at, i.attributes_cut, i.output_cut, i.custom_status_cut
      FROM (SELECT of.*, cut_of(of.attributes, p_payload_bytes) AS attributes_cut, cut_of(of.output, p_payload_bytes) AS output_cut,
                   cut_of(of.custom_status, p_payload_bytes) AS custom_status_cut
              FROM pick_instances(p_status, p_namespace, p_name, p_queue, p_after, p_limit) AS of
            OFFSET 0) AS i;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_instances IS 'Instances by id, from the one after p_after on; a null filter is none. It walks along the ids, or those of a status, so a filter that few match reads what lies between. With p_payload_bytes attributes, output and custom status are null where they are longer, and in place of each there is an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION get_instance_info(p_instance text)
RETURNS SETOF instance_info
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY SELECT i.* FROM instance_info i WHERE i.instance_id = p_instance;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_instance_info IS 'One instance with its current execution. PW002 if there is none.';

-- +goose StatementBegin
CREATE FUNCTION list_executions(p_instance text, p_execution bigint DEFAULT NULL)
RETURNS TABLE (execution_id bigint, status text, output text, pin bigint, events bigint, started_at timestamptz, completed_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT x.execution_id, x.status, x.output, x.pin, x.event_count, x.started_at, x.completed_at
      FROM executions x
     WHERE x.instance_id = p_instance AND x.execution_id >= coalesce(p_execution, x.execution_id)
       AND x.execution_id <= coalesce(p_execution, x.execution_id)
     ORDER BY x.execution_id;
    IF NOT FOUND AND p_execution IS NOT NULL THEN
        RAISE EXCEPTION 'there is no execution % of instance %', p_execution, p_instance USING ERRCODE = 'PW002';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_executions IS 'Executions of an instance by id, or p_execution alone, which is PW002 if there is none. No row for an unknown instance.';

-- +goose StatementBegin
CREATE FUNCTION list_children(p_instance text)
RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY SELECT i.instance_id FROM instances i WHERE i.parent_id = p_instance ORDER BY i.instance_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_children IS 'Instances that this one started, by id; not those that they started.';

-- +goose StatementBegin
CREATE FUNCTION get_parent(p_instance text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_parent text;
BEGIN
    SELECT i.parent_id INTO v_parent FROM instances i WHERE i.instance_id = p_instance;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
    RETURN v_parent;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_parent IS 'Instance that started this one, null for a root. PW002 if there is no such instance.';

-- +goose StatementBegin
CREATE FUNCTION instance_trees(p_roots text[])
RETURNS TABLE (root text, instance_id text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_roots      text[] := p_roots;
    v_ids        text[] := p_roots;
    v_seen_roots text[];
    v_seen_ids   text[];
BEGIN
    -- Level by level, and not by one recursive query: that would make room for as many rows as the planner fears.
    WHILE v_ids IS NOT NULL LOOP
        RETURN QUERY SELECT above.root, above.id FROM unnest(v_roots, v_ids) AS above (root, id);
        v_seen_roots := v_seen_roots || v_roots;
        v_seen_ids := v_seen_ids || v_ids;
        SELECT array_agg(below.root ORDER BY below.id), array_agg(below.id ORDER BY below.id) INTO v_roots, v_ids
          FROM (SELECT above.root, i.instance_id
                  FROM unnest(v_roots, v_ids) AS above (root, id)
                 CROSS JOIN LATERAL (SELECT c.instance_id FROM instances c WHERE c.parent_id = above.id OFFSET 0) i
                EXCEPT -- parents may go round in a circle
                SELECT * FROM unnest(v_seen_roots, v_seen_ids)) AS below (root, id);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION instance_trees IS 'Internal: for each of the instances, known or not, itself and its descendants: level by level, and in one by id.';

-- +goose StatementBegin
CREATE FUNCTION get_instance_tree(p_instance text)
RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
    RETURN QUERY SELECT t.instance_id FROM instance_trees(ARRAY[p_instance]) t;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_instance_tree IS 'An instance, its children by id, their children, and so on. PW002 if there is no such instance.';

-- +goose StatementBegin
CREATE FUNCTION check_isolation()
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT reads_committed() THEN
        RAISE EXCEPTION 'a deletion in a transaction that is % would leave behind what was queued since that began: make it READ COMMITTED',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_isolation IS 'Internal: PW003 unless the transaction is READ COMMITTED. Part of the deletions.';

-- +goose StatementBegin
CREATE FUNCTION lock_instances(p_instances text[], p_token uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    -- Advisory locks are few on a server, so of very many instances only some get one: those with messages first. A
    -- fetch that meets a message of another one then waits for the end of the deletion; if it also holds a row that
    -- the deletion still lacks, the server ends one of the two, which may be called again.
    PERFORM take_lock(hashtext(current_schema()::text), k.key, 'instances that are to be deleted')
       FROM (SELECT DISTINCT hashtext(first.id) AS key
               FROM (SELECT asked.id FROM unnest(p_instances) AS asked (id)
                      ORDER BY EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = ANY (ARRAY[asked.id])) DESC
                      LIMIT 1000) first
              ORDER BY 1) k;
    -- The update changes nothing, and locks.
    INSERT INTO instance_locks AS l (instance_id, lock_token, locked_until)
    SELECT asked.id, p_token, clock_timestamp()
      FROM (SELECT DISTINCT unnest(p_instances) AS id) asked
     ORDER BY asked.id -- so that two deletions cannot deadlock
    ON CONFLICT (instance_id) DO UPDATE SET held = l.held;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_instances IS 'Internal: locks the lock rows of these instances to the end of the transaction. Rows that it had to add carry p_token and must be removed before.';

-- +goose StatementBegin
CREATE FUNCTION check_deletion(p_instances text[], p_force boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_instance text;
    v_other    text;
BEGIN
    SELECT asked.id INTO v_instance FROM unnest(p_instances) AS asked (id)
     WHERE NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = asked.id OFFSET 0) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'there is no instance %', v_instance USING ERRCODE = 'PW002';
    END IF;

    -- A parent that is gone is none.
    SELECT p.instance_id INTO v_other
      FROM (SELECT i.parent_id FROM unnest(p_instances) AS asked (id)
             CROSS JOIN LATERAL (SELECT r.parent_id FROM instances r WHERE r.instance_id = asked.id OFFSET 0) i
             WHERE i.parent_id IS NOT NULL
            EXCEPT SELECT unnest(p_instances)) above
     CROSS JOIN LATERAL (SELECT r.instance_id FROM instances r WHERE r.instance_id = above.parent_id OFFSET 0) p LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a child of instance % goes only together with it', v_other USING ERRCODE = 'PW005';
    END IF;
    SELECT c.instance_id INTO v_other
      FROM unnest(p_instances) AS asked (id) CROSS JOIN LATERAL (SELECT r.instance_id FROM instances r WHERE r.parent_id = asked.id OFFSET 0) c
    EXCEPT SELECT unnest(p_instances) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'instance % would lose its parent', v_other USING ERRCODE = 'PW005';
    END IF;

    SELECT i.instance_id INTO v_instance
      FROM unnest(p_instances) AS asked (id) CROSS JOIN LATERAL (SELECT r.* FROM instance_info r WHERE r.instance_id = asked.id OFFSET 0) i
     WHERE i.status IN ('Running', 'ContinuedAsNew') AND NOT p_force LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'instance % is running', v_instance USING ERRCODE = 'PW004';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_deletion IS 'Internal: fails unless these instances may be deleted together: PW002 if one is unknown, PW005 if one has a parent or a child that is not among them, PW004 if one is running or between two executions, unless forced.';

-- +goose StatementBegin
CREATE FUNCTION remove_instances(p_instances text[])
RETURNS TABLE (instances bigint, executions bigint, events bigint, queue_items bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_letters bigint[];
    v_work    bigint[];
    v_rows    bigint;
BEGIN
    -- Letters first: one may be on its way into the queue. One that comes out of it is seen by the delete.
    v_letters := ARRAY(SELECT d.id FROM dead_letters d WHERE d.instance_id = ANY (p_instances));
    PERFORM FROM dead_letters d WHERE d.id = ANY (v_letters) ORDER BY d.id FOR UPDATE;
    v_work := ARRAY(SELECT q.id FROM worker_queue q WHERE q.instance_id = ANY (p_instances));
    v_work := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_work) ORDER BY q.id FOR UPDATE);
    PERFORM FROM executions x WHERE x.instance_id = ANY (p_instances) ORDER BY x.instance_id, x.execution_id FOR UPDATE;
    -- A message that meets this is for no version, and for no owner, any more; and it only guesses where it belongs.
    PERFORM lock_homes(ARRAY(
        SELECT i.instance_id FROM instances i
         WHERE i.instance_id = ANY (p_instances)
           AND (i.sticky_owner IS NOT NULL OR i.namespace <> 'default' OR i.queue <> ''
                OR EXISTS (SELECT FROM executions x WHERE x.instance_id = i.instance_id AND x.execution_id = i.current_execution AND x.pin <> 0 OFFSET 0))));

    queue_items := remove_work(v_work);
    DELETE FROM orchestrator_queue q WHERE q.instance_id = ANY (p_instances);
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    queue_items := queue_items + v_rows;
    DELETE FROM dead_letters d WHERE d.instance_id = ANY (p_instances);
    DELETE FROM kv_delta k WHERE k.instance_id = ANY (p_instances);
    DELETE FROM kv_store k WHERE k.instance_id = ANY (p_instances);
    DELETE FROM history h WHERE h.instance_id = ANY (p_instances);
    GET DIAGNOSTICS events = ROW_COUNT;
    DELETE FROM executions x WHERE x.instance_id = ANY (p_instances);
    GET DIAGNOSTICS executions = ROW_COUNT;
    DELETE FROM instances i WHERE i.instance_id = ANY (p_instances);
    GET DIAGNOSTICS instances = ROW_COUNT;
    DELETE FROM instance_locks l WHERE l.instance_id = ANY (p_instances);
    PERFORM notify_instance(gone.id) FROM unnest(p_instances) AS gone (id); -- whoever waits for it
    RETURN NEXT;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION remove_instances IS 'Internal: deletes these instances with their executions, history, key-value pairs, dead letters and all that is queued by or for them, and counts. The caller has locked them by lock_instances.';

-- +goose StatementBegin
CREATE FUNCTION delete_instance(p_instance text, p_force boolean DEFAULT false)
RETURNS TABLE (instances bigint, executions bigint, events bigint, queue_items bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_token  uuid := gen_random_uuid();
    v_tree   text[] := ARRAY(SELECT t.instance_id FROM instance_trees(ARRAY[p_instance]) t);
    v_locked text[] := '{}';
    v_more   text[] := v_tree;
BEGIN
    PERFORM check_isolation();
    PERFORM check_deletion(v_tree, p_force); -- a refusal need not wait for anybody
    WHILE v_more <> '{}' LOOP -- more than once if a child was acknowledged for the first time meanwhile
        PERFORM lock_instances(v_more, v_token);
        v_locked := v_locked || v_more;
        v_tree := ARRAY(SELECT t.instance_id FROM instance_trees(ARRAY[p_instance]) t);
        v_more := ARRAY(SELECT unnest(v_tree) EXCEPT SELECT unnest(v_locked));
    END LOOP;
    PERFORM check_deletion(v_tree, p_force);
    -- Whatever an ack gave another parent meanwhile is not part of this any more.
    DELETE FROM instance_locks l WHERE l.instance_id = ANY (v_locked) AND l.instance_id <> ALL (v_tree) AND l.lock_token = v_token;
    RETURN QUERY SELECT * FROM remove_instances(v_tree);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_instance IS 'Deletes an instance that nobody started, with all its descendants and whatever belongs to them, and counts. Whoever has a turn or a work item of theirs can do nothing with it any more. PW002 if there is none, PW005 if it has a parent, PW004 if one of them is running or between two executions, unless forced. PW003 in a transaction that is not READ COMMITTED.';

-- +goose StatementBegin
CREATE FUNCTION delete_instances(p_instances text[], p_force boolean DEFAULT false)
RETURNS TABLE (instances bigint, executions bigint, events bigint, queue_items bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM check_isolation();
    PERFORM check_deletion(p_instances, p_force); -- a refusal need not wait for anybody
    PERFORM lock_instances(p_instances, gen_random_uuid());
    PERFORM check_deletion(p_instances, p_force);
    RETURN QUERY SELECT * FROM remove_instances(p_instances);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_instances IS 'Deletes exactly these instances, all or none, as delete_instance does, with the same errors. PW005 also if one of them has a child that is not among them.';

-- +goose StatementBegin
CREATE FUNCTION delete_instances_bulk(
    p_instances text[] DEFAULT NULL, p_completed_before timestamptz DEFAULT NULL, p_limit integer DEFAULT 1000)
RETURNS TABLE (instances bigint, executions bigint, events bigint, queue_items bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_token uuid := gen_random_uuid();
    v_roots text[];
    v_tree  text[]; -- what is locked
    v_new   text[];
    v_going text[];
    v_kept  text[];
BEGIN
    PERFORM check_isolation();
    IF p_limit < 1 THEN
        RAISE EXCEPTION 'delete_instances_bulk needs a limit of at least 1' USING ERRCODE = 'PW003';
    END IF;
    IF p_instances IS NULL THEN
        v_roots := ARRAY(
            SELECT i.instance_id FROM executions x
             CROSS JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = x.instance_id OFFSET 0) i
             WHERE i.current_execution = x.execution_id AND x.completed_at < coalesce(p_completed_before, 'infinity') AND x.status IN ('Completed', 'Failed', 'Cancelled')
               AND NOT EXISTS (SELECT FROM instances p WHERE p.instance_id = i.parent_id OFFSET 0)
               AND NOT EXISTS (SELECT FROM instance_trees(ARRAY[i.instance_id]) t
                                CROSS JOIN LATERAL (SELECT m.status FROM instance_info m WHERE m.instance_id = t.instance_id OFFSET 0) going
                                WHERE going.status IN ('Running', 'ContinuedAsNew'))
             ORDER BY x.completed_at, x.instance_id LIMIT p_limit);
    ELSE
        v_roots := ARRAY(
            SELECT i.instance_id FROM (SELECT DISTINCT unnest(p_instances) AS id) asked
             CROSS JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = asked.id OFFSET 0) i
             CROSS JOIN LATERAL (SELECT e.* FROM executions e WHERE e.instance_id = i.instance_id AND e.execution_id = i.current_execution OFFSET 0) x
             WHERE x.completed_at < coalesce(p_completed_before, 'infinity') AND x.status IN ('Completed', 'Failed', 'Cancelled')
               AND NOT EXISTS (SELECT FROM instances p WHERE p.instance_id = i.parent_id OFFSET 0)
               AND NOT EXISTS (SELECT FROM instance_trees(ARRAY[i.instance_id]) t
                                CROSS JOIN LATERAL (SELECT m.status FROM instance_info m WHERE m.instance_id = t.instance_id OFFSET 0) going
                                WHERE going.status IN ('Running', 'ContinuedAsNew'))
             ORDER BY x.completed_at, x.instance_id LIMIT p_limit);
    END IF;
    v_tree := ARRAY(SELECT DISTINCT t.instance_id FROM instance_trees(v_roots) t);
    PERFORM lock_instances(v_tree, v_token);

    -- Roots that have changed meanwhile stay: deleted by others, running again or ended anew, with a new descendant, or
    -- roots no more.
    v_new := ARRAY(SELECT t.instance_id FROM instance_trees(v_roots) t EXCEPT SELECT unnest(v_tree));
    v_roots := ARRAY(
        SELECT i.instance_id FROM unnest(v_roots) AS root (id)
         CROSS JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = root.id OFFSET 0) i
         CROSS JOIN LATERAL (SELECT e.* FROM executions e WHERE e.instance_id = i.instance_id AND e.execution_id = i.current_execution OFFSET 0) x
         WHERE x.completed_at < coalesce(p_completed_before, 'infinity')
           AND NOT EXISTS (SELECT FROM instances p WHERE p.instance_id = i.parent_id OFFSET 0)
        EXCEPT
        SELECT t.root FROM instance_trees(v_roots) t
          LEFT JOIN LATERAL (SELECT now.* FROM instance_info now WHERE now.instance_id = t.instance_id OFFSET 0) m ON true
         WHERE m.instance_id IS NULL OR m.status IN ('Running', 'ContinuedAsNew') OR m.instance_id = ANY (v_new));
    v_going := ARRAY(SELECT DISTINCT t.instance_id FROM instance_trees(v_roots) t);
    v_kept := ARRAY(SELECT unnest(v_tree) EXCEPT SELECT unnest(v_going));
    DELETE FROM instance_locks l WHERE l.instance_id = ANY (v_kept) AND l.lock_token = v_token;
    RETURN QUERY SELECT * FROM remove_instances(v_going);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_instances_bulk IS 'Deletes up to p_limit instances that nobody started and whose current execution has ended, before p_completed_before if that is given, with all their descendants: of p_instances or, if null, of all, those first that ended first. One that is running or between two executions, or has such a descendant, is passed over. PW003 in a transaction that is not READ COMMITTED.';

-- +goose StatementBegin
CREATE FUNCTION prunable_executions(p_instance text, p_keep_last integer, p_completed_before timestamptz)
RETURNS SETOF bigint
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT x.execution_id FROM executions x
     WHERE x.instance_id = p_instance AND coalesce(x.status, '') <> 'Running' -- for which no partial index will do
       AND (p_completed_before IS NULL OR x.completed_at < p_completed_before)
       AND x.execution_id <> (SELECT i.current_execution FROM instances i WHERE i.instance_id = p_instance)
       AND x.execution_id < (SELECT last.execution_id FROM executions last WHERE last.instance_id = p_instance
                              ORDER BY last.execution_id DESC OFFSET greatest(p_keep_last, 1) - 1 LIMIT 1);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION prunable_executions IS 'Internal: executions of an instance that are neither running nor the current one nor among the last p_keep_last, and have ended before p_completed_before, if that is given.';

-- +goose StatementBegin
CREATE FUNCTION prune(p_instances text[], p_keep_last integer, p_completed_before timestamptz)
RETURNS TABLE (instances bigint, executions bigint, events bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    -- No lock row: a turn reads and writes the current execution, and that one stays. Which it is only goes up.
    RETURN QUERY
    WITH doomed AS (
        SELECT x.instance_id, x.execution_id
          FROM unnest(p_instances) AS asked (id)
         CROSS JOIN LATERAL prunable_executions(asked.id, p_keep_last, p_completed_before) AS old (execution_id)
         CROSS JOIN LATERAL (
               SELECT e.instance_id, e.execution_id FROM executions e
                WHERE e.instance_id = asked.id AND e.execution_id = old.execution_id AND coalesce(e.status, '') <> 'Running' -- see prunable_executions
                  FOR UPDATE SKIP LOCKED) x -- someone else prunes or deletes it
    ), gone AS (
        DELETE FROM executions x USING doomed d
         WHERE x.instance_id = ANY (ARRAY[d.instance_id]) AND x.execution_id = d.execution_id
        RETURNING x.instance_id
    ), forgotten AS (
        DELETE FROM history h USING doomed d
         WHERE h.instance_id = ANY (ARRAY[d.instance_id]) AND h.execution_id = d.execution_id
        RETURNING 1
    )
    SELECT count(DISTINCT g.instance_id), count(*), (SELECT count(*) FROM forgotten) FROM gone g;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION prune IS 'Internal: deletes the prunable executions of these instances, with their history, and counts the instances that lost any.';

-- +goose StatementBegin
CREATE FUNCTION prune_executions(p_instance text, p_keep_last integer DEFAULT 1, p_completed_before timestamptz DEFAULT NULL)
RETURNS TABLE (instances bigint, executions bigint, events bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
    RETURN QUERY SELECT * FROM prune(ARRAY[p_instance], p_keep_last, p_completed_before);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION prune_executions IS 'Deletes executions of an instance, with their history, and counts: all but the last p_keep_last or, if p_completed_before is given, those of them that ended before. The current execution and running ones always stay, key-value pairs too. PW002 if there is no such instance.';

-- +goose StatementBegin
CREATE FUNCTION prune_executions_bulk(
    p_instances text[] DEFAULT NULL, p_instance_completed_before timestamptz DEFAULT NULL, p_limit integer DEFAULT 1000,
    p_keep_last integer DEFAULT 1, p_completed_before timestamptz DEFAULT NULL)
RETURNS TABLE (instances bigint, executions bigint, events bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_instances text[];
BEGIN
    IF p_limit < 1 THEN
        RAISE EXCEPTION 'prune_executions_bulk needs a limit of at least 1' USING ERRCODE = 'PW003';
    END IF;
    -- Only those that have something to prune, so that the next call gets further.
    IF p_instances IS NULL THEN
        v_instances := ARRAY(
            SELECT i.instance_id FROM instances i
             WHERE i.current_execution > 1
               AND (p_instance_completed_before IS NULL OR EXISTS (
                    SELECT FROM executions x WHERE x.instance_id = i.instance_id AND x.execution_id = i.current_execution
                       AND x.completed_at < p_instance_completed_before OFFSET 0))
               AND EXISTS (SELECT FROM prunable_executions(i.instance_id, p_keep_last, p_completed_before))
             ORDER BY i.instance_id LIMIT p_limit);
    ELSE
        v_instances := ARRAY(
            SELECT i.instance_id FROM (SELECT DISTINCT unnest(p_instances) AS id) asked
             CROSS JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = asked.id OFFSET 0) i
             WHERE (p_instance_completed_before IS NULL OR EXISTS (
                    SELECT FROM executions x WHERE x.instance_id = i.instance_id AND x.execution_id = i.current_execution
                       AND x.completed_at < p_instance_completed_before OFFSET 0))
               AND EXISTS (SELECT FROM prunable_executions(i.instance_id, p_keep_last, p_completed_before))
             ORDER BY i.instance_id LIMIT p_limit);
    END IF;
    RETURN QUERY SELECT * FROM prune(v_instances, p_keep_last, p_completed_before);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION prune_executions_bulk IS 'Does what prune_executions does to up to p_limit instances that have something to prune, running ones included: of p_instances or, if null, of all, which reads them all; only those whose current execution ended before p_instance_completed_before, if that is given.';

-- +goose StatementBegin
CREATE FUNCTION system_metrics()
RETURNS TABLE (metric text, label text, value bigint)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off
AS $$
BEGIN
    RETURN QUERY SELECT 'instances', i.status, count(*) FROM instance_info i GROUP BY i.status;
    RETURN QUERY SELECT 'executions', NULL::text, count(*) FROM executions;
    RETURN QUERY SELECT 'events', NULL::text, count(*) FROM history;
    RETURN QUERY SELECT 'work_items', NULL::text, count(*) FROM worker_queue;
    RETURN QUERY SELECT 'messages', NULL::text, count(*) FROM orchestrator_queue;
    RETURN QUERY SELECT 'turns', NULL::text, count(*) FROM instance_locks l WHERE l.locked_until > clock_timestamp();
    RETURN QUERY SELECT 'sessions', NULL::text, count(*) FROM sessions s WHERE s.locked_until > clock_timestamp();
    RETURN QUERY SELECT 'dead_letters', NULL::text, count(*) FROM dead_letters;
    RETURN QUERY SELECT 'archived', NULL::text, count(*) FROM archive;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION system_metrics IS 'How much there is of everything; instances by status. It reads an index of each table from end to end.';

-- +goose StatementBegin
CREATE FUNCTION queue_depths()
RETURNS TABLE (queue text, namespace text, tag text, due bigint, delayed bigint, leased bigint, kept_back bigint, oldest_due timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT 'orchestrator', q.namespace, q.queue,
           count(*) FILTER (WHERE q.due_at <= v_now),
           count(*) FILTER (WHERE q.due_at > v_now AND q.lock_token IS NULL AND NOT q.held),
           count(*) FILTER (WHERE q.due_at > v_now AND (q.lock_token IS NOT NULL OR q.held)),
           0::bigint,
           min(greatest(q.due_at, q.created_at)) FILTER (WHERE q.due_at <= v_now)
      FROM (SELECT m.namespace, m.queue, m.lock_token, m.held, m.created_at, coalesce(m.sticky_due, m.visible_at) AS due_at
              FROM orchestrator_queue m) AS q
     GROUP BY q.namespace, q.queue ORDER BY q.namespace, q.queue;
    RETURN QUERY
    SELECT 'worker', q.namespace, q.tag,
           count(*) FILTER (WHERE q.visible_at <= v_now),
           count(*) FILTER (WHERE q.visible_at > v_now AND q.lock_token IS NULL AND q.held_due IS NULL AND (q.charged AND q.share_at IS NOT NULL) IS NOT TRUE),
           count(*) FILTER (WHERE q.visible_at > v_now AND q.lock_token IS NOT NULL),
           count(*) FILTER (WHERE q.visible_at > v_now AND q.lock_token IS NULL AND (q.held_due IS NOT NULL OR q.charged AND q.share_at IS NOT NULL)),
           min(greatest(q.visible_at, q.created_at)) FILTER (WHERE q.visible_at <= v_now)
      FROM worker_queue q GROUP BY q.namespace, q.tag ORDER BY q.namespace, q.tag;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION queue_depths IS 'How many items are queued: messages by namespace and queue name, work items by namespace and tag. Leased: claimed, or held behind a turn of their instance. Kept back: work items whose key is full, or has had its share of a rate. What a pause or a limit of the whole namespace keeps waiting is due. It reads both queues from end to end.';

-- +goose StatementBegin
CREATE FUNCTION peek(p_queue text, p_namespace text DEFAULT NULL, p_name text DEFAULT NULL, p_instance text DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit integer DEFAULT 100, p_payload_bytes integer DEFAULT NULL)
RETURNS TABLE (id bigint, namespace text, priority smallint, state text, due_at timestamptz, attempt_count integer, created_at timestamptz,
    name text, kind text, version text, data json, instance_id text, execution_id bigint, activity_id bigint, dedup_key text, tag text,
    session_id text, key text, headers jsonb, last_error text, data_cut json)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off -- which index is the best depends on what is asked for
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    IF p_queue = 'worker' THEN
        RETURN QUERY
        SELECT q.id, q.namespace, q.priority,
               CASE WHEN q.visible_at <= v_now THEN 'due' WHEN q.lock_token IS NOT NULL THEN 'leased'
                    WHEN q.held_due IS NOT NULL OR q.charged AND q.share_at IS NOT NULL THEN 'kept back' ELSE 'delayed' END,
               coalesce(q.held_due, q.visible_at), q.attempt_count, q.created_at,
               q.name, NULL::text, NULL::text, CASE WHEN q.data_cut IS NULL THEN q.input END, q.instance_id, q.execution_id, q.activity_id, q.dedup_key, q.tag,
               q.session_id, q.key, q.headers, q.last_error, q.data_cut
          FROM (SELECT of.*, cut_of(of.input, p_payload_bytes) AS data_cut
                  FROM (SELECT q.* FROM worker_queue q
                         WHERE q.id > p_after AND (p_namespace IS NULL OR q.namespace = p_namespace)
                           AND (p_name IS NULL OR q.name = p_name) AND (p_instance IS NULL OR q.instance_id = p_instance)
                         ORDER BY q.id LIMIT p_limit) AS of
                OFFSET 0) AS q;
    ELSIF p_queue = 'orchestrator' THEN
        RETURN QUERY
        SELECT m.id, m.namespace, m.priority,
               CASE WHEN coalesce(m.sticky_due, m.visible_at) <= v_now THEN 'due' WHEN m.lock_token IS NOT NULL OR m.held THEN 'leased' ELSE 'delayed' END,
               coalesce(m.sticky_due, m.visible_at), m.attempt_count, m.created_at,
               m.name, m.kind, m.version, CASE WHEN m.data_cut IS NULL THEN m.data END, m.instance_id, m.execution_id, NULL::bigint, m.dedup_key, m.queue,
               NULL::text, NULL::text, m.headers, NULL::text, m.data_cut
          FROM (SELECT of.*, cut_of(of.data, p_payload_bytes) AS data_cut
                  FROM (SELECT m.* FROM orchestrator_queue m
                         WHERE m.id > p_after AND (p_namespace IS NULL OR m.namespace = p_namespace)
                           AND (p_name IS NULL OR m.name = p_name) AND (p_instance IS NULL OR m.instance_id = p_instance)
                         ORDER BY m.id LIMIT p_limit) AS of
                OFFSET 0) AS m;
    ELSE
        RAISE EXCEPTION 'there is no queue %', p_queue USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION peek IS 'What is in a queue, worker or orchestrator, by id, p_limit items after p_after for which all conditions hold that are not null. It claims nothing. The state is as in queue_depths: due, delayed, leased or kept back; due_at is the end of the lease while there is one. kind and version are those of a message; tag is its queue name. With p_payload_bytes data is null where it is longer, and data_cut an object of its length and its first characters (bytes, start).';

-- +goose StatementBegin
CREATE FUNCTION listening_nodes()
RETURNS TABLE (node integer, listening boolean, pid integer, application_name text, client_address text, since timestamptz,
    lane integer, queue text, namespaces text[], labels text[], places integer, armed boolean, fanout integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT w.node, l.pid IS NOT NULL, l.pid, coalesce(a.application_name, ''), coalesce(host(a.client_addr), ''), a.backend_start,
           w.lane, w.queue, w.namespaces, w.labels, w.places::integer, w.armed, w.fanout::integer
      FROM waiters w
      -- The lock of listen_session: two keys, whose columns are unsigned.
      LEFT JOIN pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 2 AND l.mode = 'ExclusiveLock' AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND l.classid::bigint = hashtext('pgwake nodes of ' || current_schema())::bigint & 4294967295
           AND l.objid::bigint = w.listener::bigint & 4294967295
      LEFT JOIN pg_stat_activity a ON a.pid = l.pid
     WHERE w.node <> 0
     ORDER BY w.node, w.lane;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION listening_nodes IS 'The nodes that have a LISTEN connection, and those that died and are not cleared away yet (listening is false), with a row for each of their lanes. Lane 0 is the node itself; a negative one says that it wants to hear everything of the queue. Who the client is others may see only with the rights of pg_read_all_stats.';

-- +goose StatementBegin
CREATE FUNCTION ask_nodes(p_reply text, p_follow boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM pg_notify(channel('instance'), CASE WHEN p_follow THEN 'pgwake follow to ' ELSE 'pgwake report to ' END || p_reply);
    IF p_follow THEN
        PERFORM pg_notify(p_reply, 'asked');
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ask_nodes IS 'Has each node that listens say how it is, as JSON, by a notification to the channel p_reply, whose name is pgwake_report_ and up to 40 digits and lower-case letters. With p_follow it also says so there when it has done something, for two minutes, and whoever asks hears that the question was sent. To nodes of a version that does not know of that it is an instance which nobody waits for.';

CREATE FUNCTION list_namespaces()
RETURNS TABLE (name text, created_at timestamptz)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT n.name, min(n.created_at) FROM namespaces n GROUP BY n.name ORDER BY n.name
$$;
COMMENT ON FUNCTION list_namespaces IS 'All namespaces, by name.';

CREATE FUNCTION new_namespaces(p_known bigint)
RETURNS TABLE (name text, known bigint)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT DISTINCT n.name, c.known FROM (SELECT count(*) AS known FROM namespaces) AS c JOIN namespaces n ON c.known <> p_known ORDER BY n.name
$$;
COMMENT ON FUNCTION new_namespaces IS 'Internal: all namespaces, by name, each with the number of rows that there are; none if that is p_known. Rows are only added, so there is nothing new then.';

-- +goose StatementBegin
CREATE FUNCTION register_namespace(p_namespace text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_namespace IS NULL THEN
        RAISE EXCEPTION 'the namespace is null' USING ERRCODE = 'PW003';
    END IF;
    PERFORM check_options(ARRAY[p_namespace], NULL, NULL, NULL);
    PERFORM register_namespaces(ARRAY[p_namespace]);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION register_namespace IS 'Adds a namespace before its first item, for whoever is to be ready for that; one that there is already remains as it is. The verbs do so by themselves. PW008 if there are as many as there may be (max_namespaces). Whoever inserts rows into a queue by hand calls it: who serves namespaces one by one does not know of others.';

-- +goose Down

DROP FUNCTION register_namespace, new_namespaces, list_namespaces, ask_nodes, listening_nodes, peek, queue_depths, system_metrics, prune_executions_bulk, prune_executions, prune, prunable_executions,
    delete_instances_bulk, delete_instances, delete_instance, remove_instances, check_deletion, lock_instances, check_isolation,
    get_instance_tree, instance_trees, get_parent, list_children, list_executions, get_instance_info, list_instances, pick_instances, cut_of;
DROP VIEW instance_info;
DROP INDEX executions_completed_idx, executions_status_idx;
