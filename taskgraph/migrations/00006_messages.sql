-- The queues of the Provider by the names that pgmq gives its verbs, the channels for listeners that know nothing of pgwake, and
-- the settings.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION extract_queue_namespace(p_queue_name text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT CASE WHEN n.name ~ '^[a-z][a-z0-9_-]{0,39}$' THEN n.name ELSE 'default' END
      FROM (SELECT CASE WHEN p_queue_name ~ '^orchestration' THEN 'orchestration'
                        WHEN p_queue_name ~ '^worker_.*_queue$' THEN coalesce(substring(p_queue_name FROM '^worker_(.+)_queue$'), 'worker')
                        WHEN p_queue_name ~ '^[a-zA-Z][a-zA-Z0-9_]*_queue$' THEN substring(p_queue_name FROM '^(.*)_queue$') END AS name) AS n;
END;
-- +goose StatementEnd
COMMENT ON FUNCTION extract_queue_namespace IS 'The namespace of a queue: orchestration for those whose names begin so, <x> for worker_<x>_queue and <x>_queue, and default for all others, and where <x> is no name of a namespace.';

-- +goose StatementBegin
CREATE FUNCTION check_queue_name(p_queue_name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_queue_name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,62}$') IS NOT TRUE THEN
        RAISE EXCEPTION 'a queue name has 1 to 63 letters, digits, _ and -, a letter first: not %', quote_nullable(left(p_queue_name, 100)) USING ERRCODE = 'PW003';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_queue_name IS 'Internal: PW003 unless there can be a queue of this name.';

-- +goose StatementBegin
CREATE FUNCTION ensure_task_queue(p_queue_name text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM check_queue_name(p_queue_name);
    PERFORM register_namespaces(ARRAY[extract_queue_namespace(p_queue_name)]);
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ensure_task_queue IS 'Makes sure that there is a queue, which means its namespace, and returns true. A message creates it as well. PW003 for a bad name.';

-- +goose StatementBegin
CREATE FUNCTION pgmq_send_with_notify(p_queue_name text, p_message jsonb, p_delay_seconds integer DEFAULT 0, p_headers jsonb DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := extract_queue_namespace(p_queue_name);
    v_sent      record;
    v_event     text;
BEGIN
    PERFORM check_queue_name(p_queue_name);
    IF coalesce(p_delay_seconds, 0) < 0 THEN
        RAISE EXCEPTION 'a delay is negative' USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_sent FROM enqueue_work_many(
        ARRAY[p_queue_name], ARRAY[p_message::text], ARRAY[v_namespace],
        p_delays => CASE WHEN p_delay_seconds > 0 THEN ARRAY[make_interval(secs => p_delay_seconds)] END, p_headers => ARRAY[p_headers::text]);
    -- For others. Those who fetch have been told by the enqueue, of when it is due as well.
    v_event := json_build_object(
        'event_type', 'message_ready', 'msg_id', v_sent.item_id, 'queue_name', p_queue_name, 'namespace', v_namespace, 'ready_at', v_sent.due_at,
        'delay_seconds', coalesce(p_delay_seconds, 0), 'emitted_at', transaction_timestamp());
    PERFORM pg_notify('pgmq_message_ready.' || v_namespace, v_event);
    PERFORM pg_notify('pgmq_message_ready', v_event);
    RETURN v_sent.item_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pgmq_send_with_notify IS 'Enqueues a work item whose name is the name of the queue, in the namespace of that (extract_queue_namespace), due after a delay, and returns its id. In the same transaction it notifies the channels pgmq_message_ready and pgmq_message_ready.<namespace>, at once, with the instant at which the message is due and nothing of what it says. p_headers is an object of strings. PW003 for a bad name, a negative delay or bad headers.';

-- +goose StatementBegin
CREATE FUNCTION pgmq_read_specific_message(p_queue_name text, p_target_msg_id bigint, p_vt_seconds integer DEFAULT 30)
RETURNS TABLE (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb, lock_token uuid)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_namespace text := extract_queue_namespace(p_queue_name);
    v_now       timestamptz := clock_timestamp();
    v_item      worker_queue;
BEGIN
    PERFORM check_queue_name(p_queue_name);
    IF coalesce(p_vt_seconds < 1, true) THEN
        RAISE EXCEPTION 'a visibility timeout has at least a second' USING ERRCODE = 'PW003';
    ELSIF NOT EXISTS (SELECT FROM namespaces n WHERE n.name = v_namespace) THEN
        RAISE EXCEPTION 'there is no queue %', p_queue_name USING ERRCODE = 'PW002';
    ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds AND l.paused AND l.namespace = ANY (ARRAY[v_namespace, '*'])) THEN
        RETURN; -- nobody gets it
    ELSIF EXISTS (SELECT FROM limits l WHERE l.queue = 'worker' AND l.holds AND l.namespace = ANY (ARRAY[v_namespace, '*'])) THEN
        RAISE EXCEPTION 'namespace % has limits: what may begin there is for fetch_work to know', v_namespace USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_item FROM worker_queue q
     WHERE q.id = p_target_msg_id AND q.namespace = v_namespace AND q.name = p_queue_name AND q.visible_at <= v_now
       FOR UPDATE SKIP LOCKED; -- whoever has it locked is about to claim it
    IF NOT FOUND THEN
        RETURN;
    ELSIF v_item.session_id IS NOT NULL THEN
        RAISE EXCEPTION 'work item % is of session %: it is for the owner of that', p_target_msg_id, v_item.session_id USING ERRCODE = 'PW003';
    END IF;
    RETURN QUERY
    UPDATE worker_queue q
       SET visible_at = v_now + make_interval(secs => p_vt_seconds), lock_token = gen_random_uuid(), attempt_count = q.attempt_count + 1,
           slot = false, key_slot = false, charged = false
     WHERE q.id = p_target_msg_id
    RETURNING q.id, q.attempt_count, q.created_at, q.visible_at, q.input::jsonb, q.headers, q.lock_token;
    PERFORM notify_queue('worker', 0, v_now + make_interval(secs => p_vt_seconds), v_namespace);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pgmq_read_specific_message IS 'Claims the work item of this id, if it is in the queue of this name and due: of several who were told of it one gets it, and the others no row. lock_token is what acknowledges it (ack_work) or gives it back (abandon_work); vt is when the claim ends, after which anybody may claim it. No row for one that is claimed, not due yet, gone or never was, nor in a namespace that is paused. PW002 if there is no such queue; PW003 for a bad name or timeout, for an item of a session, and for a namespace with limits, since whether it may begin is not known from it alone.';

-- +goose StatementBegin
CREATE FUNCTION get_queue_statistics(p_queue_name text)
RETURNS TABLE (queue_name text, queue_length bigint, oldest_msg_age_seconds integer, newest_msg_age_seconds integer)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
AS $$
DECLARE
    v_namespace text := extract_queue_namespace(p_queue_name);
    v_now       timestamptz := clock_timestamp();
BEGIN
    PERFORM check_queue_name(p_queue_name);
    IF NOT EXISTS (SELECT FROM namespaces n WHERE n.name = v_namespace) THEN
        RAISE EXCEPTION 'there is no queue %', p_queue_name USING ERRCODE = 'PW002';
    END IF;
    RETURN QUERY
    SELECT p_queue_name, count(*), floor(extract(epoch FROM v_now - min(q.created_at)))::integer, floor(extract(epoch FROM v_now - max(q.created_at)))::integer
      FROM worker_queue q WHERE q.namespace = v_namespace AND q.name = p_queue_name AND q.session_id IS NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_queue_statistics IS 'How many messages are in a queue, due or not and claimed or not, and how old the first and the last one are; null if there are none. It reads all work items of the namespace. PW002 if there is no such queue, PW003 for a bad name.';

-- +goose StatementBegin
CREATE FUNCTION tell_task_ready(p_task uuid, p_ready_steps integer, p_triggered_by text, p_step uuid, p_step_state text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task  tasks;
    v_event text;
BEGIN
    IF NOT EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        RETURN;
    END IF;
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task;
    IF (p_ready_steps > 0) IS NOT TRUE OR v_task.task_id IS NULL OR is_terminal(v_task.state) THEN
        RETURN;
    END IF;
    -- Of all that is told in a transaction the instant is the same, so that what is told twice is one notification.
    v_event := CASE WHEN p_triggered_by = 'task_start' THEN json_build_object(
        'task_uuid', p_task, 'namespace', v_task.namespace, 'priority', v_task.priority, 'ready_steps', p_ready_steps,
        'triggered_by', p_triggered_by, 'task_state', v_task.state, 'emitted_at', transaction_timestamp())
    ELSE json_build_object(
        'task_uuid', p_task, 'namespace', v_task.namespace, 'priority', v_task.priority, 'ready_steps', p_ready_steps,
        'triggered_by', p_triggered_by, 'step_uuid', p_step, 'step_state', p_step_state, 'emitted_at', transaction_timestamp()) END;
    PERFORM pg_notify('task_ready.' || v_task.namespace, v_event);
    PERFORM pg_notify('task_ready', v_event);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION tell_task_ready IS 'Internal: tells the channels task_ready and task_ready.<namespace>, if outside channels are on, that steps of a task are ready: since one of its steps came into a state, or with triggered_by task_start, since the task begins.';

-- +goose StatementBegin
CREATE FUNCTION tell_task_state(p_task uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_task   tasks;
    v_action text;
    v_event  text;
BEGIN
    IF NOT EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        RETURN;
    END IF;
    SELECT * INTO v_task FROM tasks t WHERE t.task_id = p_task;
    v_action := CASE v_task.state WHEN 'complete' THEN 'finalization' WHEN 'resolved_manually' THEN 'finalization' WHEN 'error' THEN 'error_handling'
                                  WHEN 'cancelled' THEN 'cleanup' END;
    IF v_action IS NULL THEN
        RETURN;
    END IF;
    v_event := json_build_object(
        'task_uuid', p_task, 'namespace', v_task.namespace, 'task_state', v_task.state, 'triggered_by', 'task_transition', 'action_needed', v_action,
        'emitted_at', transaction_timestamp());
    PERFORM pg_notify('task_state_change.' || v_task.namespace, v_event);
    PERFORM pg_notify('task_state_change', v_event);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION tell_task_state IS 'Internal: tells the channels task_state_change and task_state_change.<namespace>, if outside channels are on, that a task has ended, and how.';

-- +goose StatementBegin
CREATE FUNCTION tell_namespace_created()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- whoever may enqueue need not be able to read the settings
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        PERFORM pg_notify('namespace_created', json_build_object(
            'namespace_uuid', md5('namespace ' || NEW.name)::uuid, 'namespace_name', NEW.name, 'description', NULL::text, 'created_at', NEW.created_at,
            'triggered_by', 'namespace_creation', 'emitted_at', transaction_timestamp())::text);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION tell_namespace_created IS 'Internal: tells the channel namespace_created, if outside channels are on, of a new namespace. It is told by each transaction that was the first there; namespace_uuid is the same for a name.';

CREATE TRIGGER namespaces_tell_outside AFTER INSERT ON namespaces FOR EACH ROW EXECUTE FUNCTION tell_namespace_created();

-- +goose StatementBegin
CREATE FUNCTION get_taskgraph_settings()
RETURNS TABLE (outside_channels boolean, age_weight float8, retry_weight float8, deadline_weight float8, namespace_priority jsonb)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT s.outside_channels, s.age_weight, s.retry_weight, s.deadline_weight, s.namespace_priority FROM taskgraph_settings s;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION get_taskgraph_settings IS 'The settings, see set_taskgraph_settings.';

-- +goose StatementBegin
CREATE FUNCTION set_taskgraph_settings(
    p_outside_channels boolean DEFAULT NULL, p_age_weight float8 DEFAULT NULL, p_retry_weight float8 DEFAULT NULL, p_deadline_weight float8 DEFAULT NULL,
    p_namespace_priority jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
DECLARE
    v_before taskgraph_settings;
    v_after  taskgraph_settings;
BEGIN
    IF (p_age_weight BETWEEN 0 AND 1e6) IS FALSE OR (p_retry_weight BETWEEN 0 AND 1e6) IS FALSE OR (p_deadline_weight BETWEEN 0 AND 1e6) IS FALSE THEN
        RAISE EXCEPTION 'a weight must be 0 to 1000000' USING ERRCODE = 'PW003';
    ELSIF jsonb_typeof(p_namespace_priority) <> 'object' THEN
        RAISE EXCEPTION 'the priorities of namespaces must be a JSON object' USING ERRCODE = 'PW003';
    ELSIF p_namespace_priority IS NOT NULL AND EXISTS (
            SELECT FROM jsonb_each(p_namespace_priority) AS e
             WHERE e.key !~ '^[a-z][a-z0-9_-]{0,39}$'
                OR CASE WHEN jsonb_typeof(e.value) = 'number' THEN abs((e.value #>> '{}')::numeric) > 1e6 ELSE true END) THEN
        RAISE EXCEPTION 'the priorities of namespaces must be numbers of at most 1000000 under names of namespaces' USING ERRCODE = 'PW003';
    END IF;
    SELECT * INTO v_before FROM taskgraph_settings s FOR UPDATE;
    UPDATE taskgraph_settings s
       SET outside_channels = coalesce(p_outside_channels, s.outside_channels), age_weight = coalesce(p_age_weight, s.age_weight),
           retry_weight = coalesce(p_retry_weight, s.retry_weight), deadline_weight = coalesce(p_deadline_weight, s.deadline_weight),
           namespace_priority = coalesce(p_namespace_priority, s.namespace_priority)
    RETURNING * INTO v_after;
    IF (v_before.age_weight, v_before.retry_weight, v_before.namespace_priority) IS DISTINCT FROM (v_after.age_weight, v_after.retry_weight, v_after.namespace_priority) THEN
        UPDATE tasks t SET priority_key = task_priority_key(t.namespace, t.priority, t.retries, t.created_at)
          FROM (SELECT o.task_id FROM tasks o
                 WHERE o.state NOT IN ('complete', 'cancelled', 'resolved_manually') AND o.state <> 'error' -- as the index has it
                 ORDER BY o.task_id FOR NO KEY UPDATE) AS o
         WHERE t.task_id = o.task_id AND t.priority_key <> task_priority_key(t.namespace, t.priority, t.retries, t.created_at);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION set_taskgraph_settings IS 'Sets what holds for all nodes; what is null stays as it is. The priority of a task is the one that it was created with, and p_age_weight (at first 0.1) for each hour since, p_retry_weight (0) for each time that a step of it went to wait for another attempt, p_deadline_weight (0) for each hour past its deadline, and that of its namespace in p_namespace_priority, such as {"billing": 2}. A change of these rewrites the tasks that have not ended, so with many of those it takes its time; one that is created meanwhile may keep the order that it would have had before. With p_outside_channels, at first off, the channels task_ready, task_state_change, each also with a dot and the name of a namespace, and namespace_created are notified, in the transaction that makes the change: they are those of the database, whatever the schema. PW003 for what is out of range.';

SELECT revoke_from_public();

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();
DROP TRIGGER namespaces_tell_outside ON namespaces;
DROP FUNCTION set_taskgraph_settings, get_taskgraph_settings, tell_namespace_created, tell_task_state, tell_task_ready, get_queue_statistics,
    pgmq_read_specific_message, pgmq_send_with_notify, ensure_task_queue, check_queue_name, extract_queue_namespace;
