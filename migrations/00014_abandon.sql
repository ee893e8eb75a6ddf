-- Whether a lease has ended is asked, and a delay begins, once what it is of is locked. Limits end no lease of an item that was charged.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION hold_instance_lock(p_instance text, p_token uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_until timestamptz;
BEGIN
    SELECT l.locked_until INTO v_until FROM instance_locks l
      WHERE l.instance_id = p_instance AND l.lock_token = p_token
        FOR UPDATE;
    -- Not in the condition: that is not asked again after a wait for somebody who changed nothing.
    IF coalesce(v_until <= clock_timestamp(), true) THEN
        RAISE EXCEPTION 'no lock on instance % with lock token %', p_instance, p_token USING ERRCODE = 'PW001';
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION abandon_work(
    p_id bigint, p_token uuid, p_delay interval DEFAULT '0', p_ignore_attempt boolean DEFAULT false,
    p_error text DEFAULT NULL, p_quiet boolean DEFAULT false, p_due_at timestamptz DEFAULT NULL)
RETURNS TABLE (item_namespace text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now       timestamptz;
    v_namespace text;
    v_tag       text;
    v_key       text;
    v_placed    boolean;
BEGIN
    PERFORM FROM worker_queue q WHERE q.id = p_id AND q.lock_token = p_token FOR NO KEY UPDATE;
    v_now := clock_timestamp(); -- not before whoever had the item locked is done
    UPDATE worker_queue q
       -- By an instant of the past the clock of a key would seem to be that late.
       SET visible_at = CASE WHEN p_due_at < v_now AND NOT (q.key IS NOT NULL AND has_rate(q.namespace)) THEN p_due_at ELSE v_now + p_delay END,
           lock_token = NULL, last_error = coalesce(p_error, q.last_error),
           attempt_count = greatest(q.attempt_count - p_ignore_attempt::integer, 0),
           charged = p_ignore_attempt AND p_delay <= interval '0' AND q.key IS NOT NULL AND has_rate(q.namespace), share_at = NULL
     WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > v_now
    RETURNING q.namespace, q.tag, q.key, q.slot OR q.key_slot INTO v_namespace, v_tag, v_key, v_placed;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF v_placed THEN
        PERFORM release_places(ARRAY[v_namespace], ARRAY[v_tag], ARRAY[v_key]);
    END IF;
    IF NOT p_quiet THEN
        PERFORM notify_queue('worker', (p_delay <= interval '0')::integer,
                             CASE WHEN p_delay > interval '0' THEN v_now + p_delay END, v_namespace);
    END IF;
    RETURN QUERY SELECT v_namespace, v_now + p_delay, v_now;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION dead_letter_work(p_id bigint, p_token uuid, p_reason text, p_error text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_until timestamptz;
BEGIN
    SELECT q.visible_at INTO v_until FROM worker_queue q
      WHERE q.id = p_id AND q.lock_token = p_token
        FOR UPDATE;
    IF coalesce(v_until <= clock_timestamp(), true) THEN -- as in hold_instance_lock
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    PERFORM bury_work(ARRAY[p_id], p_reason, p_error);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_limits(
    p_namespace text, p_weight integer DEFAULT 1, p_max_running integer DEFAULT NULL, p_max_running_per_key integer DEFAULT NULL,
    p_rate_interval interval DEFAULT NULL, p_rate_burst integer DEFAULT 1)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before limits;
    v_now    timestamptz;
    v_ids    bigint[]; -- of items that are to be changed
    v_held   boolean;  -- those that are held
    v_paid   boolean;  -- and those that have paid, or wait for their share
BEGIN
    PERFORM check_options(ARRAY[p_namespace], NULL, NULL, NULL);
    IF p_namespace IS NULL OR coalesce(p_weight NOT BETWEEN 1 AND 1000, true) OR 1 > p_max_running OR 1 > p_max_running_per_key
       OR interval '0' >= p_rate_interval OR coalesce(p_rate_burst < 1, true)
       OR extract(epoch FROM p_rate_interval) * p_rate_burst > extract(epoch FROM interval '36500 days') THEN
        RAISE EXCEPTION 'a weight must be 1 to 1000, every other limit positive, and a burst of a rate take at most 100 years' USING ERRCODE = 'PW003';
    END IF;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    PERFORM take_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace), 'the limits of ' || p_namespace);
    SELECT * INTO v_before FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    INSERT INTO limits AS l (queue, namespace, weight, max_running, max_running_per_key, rate_interval, rate_burst, over)
    VALUES ('worker', p_namespace, p_weight, p_max_running, p_max_running_per_key, p_rate_interval, p_rate_burst, p_max_running IS NOT NULL)
    ON CONFLICT (queue, namespace) DO UPDATE
       SET weight = p_weight, max_running = p_max_running, max_running_per_key = p_max_running_per_key,
           rate_interval = p_rate_interval, rate_burst = p_rate_burst, over = excluded.over;
    DELETE FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND NOT l.holds AND l.weight = 1;

    -- What is at work by now counts. What has a place already keeps it, and tells somebody in vain at most.
    IF p_max_running IS NOT NULL AND v_before.max_running IS NULL
       OR p_max_running_per_key IS NOT NULL AND v_before.max_running_per_key IS NULL THEN
        INSERT INTO marking (namespace) VALUES (p_namespace) ON CONFLICT (namespace) DO UPDATE SET transactions = NULL;
    ELSIF coalesce(p_max_running, p_max_running_per_key) IS NULL THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    END IF;
    v_held := p_max_running_per_key IS DISTINCT FROM v_before.max_running_per_key;
    v_paid := p_rate_interval IS DISTINCT FROM v_before.rate_interval OR p_rate_burst IS DISTINCT FROM v_before.rate_burst;
    IF v_held OR v_paid THEN
        v_ids := ARRAY(
            SELECT q.id FROM worker_queue q WHERE v_held AND q.namespace = p_namespace AND q.held_due IS NOT NULL
             UNION
            SELECT q.id FROM worker_queue q WHERE v_paid AND q.namespace = p_namespace AND q.session_id IS NULL AND q.charged);
        -- In order, so that nobody who locks several items can deadlock.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR NO KEY UPDATE);
    END IF;
    v_now := clock_timestamp();
    IF v_held THEN
        -- The next claims hold again what is too much.
        UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL WHERE q.id = ANY (v_ids) AND q.held_due IS NOT NULL;
        DELETE FROM releases r WHERE r.namespace = p_namespace;
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    END IF;
    IF v_paid THEN
        -- They pay anew. One that was given back in a transaction while the rate was lifted is charged without any, and whoever claims it then
        -- leaves that as it is: if it is at work, its lease stays.
        UPDATE worker_queue q
           SET visible_at = CASE WHEN q.held_due IS NULL AND q.lock_token IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.id = ANY (v_ids) AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION set_limits(
    p_namespace text, p_weight integer DEFAULT 1, p_max_running integer DEFAULT NULL, p_max_running_per_key integer DEFAULT NULL,
    p_rate_interval interval DEFAULT NULL, p_rate_burst integer DEFAULT 1)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_before limits;
    v_now    timestamptz;
    v_ids    bigint[]; -- of items that are to be changed
    v_held   boolean;  -- those that are held
    v_paid   boolean;  -- and those that have paid, or wait for their share
BEGIN
    PERFORM check_options(ARRAY[p_namespace], NULL, NULL, NULL);
    IF p_namespace IS NULL OR coalesce(p_weight NOT BETWEEN 1 AND 1000, true) OR 1 > p_max_running OR 1 > p_max_running_per_key
       OR interval '0' >= p_rate_interval OR coalesce(p_rate_burst < 1, true)
       OR extract(epoch FROM p_rate_interval) * p_rate_burst > extract(epoch FROM interval '36500 days') THEN
        RAISE EXCEPTION 'a weight must be 1 to 1000, every other limit positive, and a burst of a rate take at most 100 years' USING ERRCODE = 'PW003';
    END IF;
    PERFORM register_namespaces(ARRAY[p_namespace]);
    PERFORM take_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace), 'the limits of ' || p_namespace);
    SELECT * INTO v_before FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    INSERT INTO limits AS l (queue, namespace, weight, max_running, max_running_per_key, rate_interval, rate_burst, over)
    VALUES ('worker', p_namespace, p_weight, p_max_running, p_max_running_per_key, p_rate_interval, p_rate_burst, p_max_running IS NOT NULL)
    ON CONFLICT (queue, namespace) DO UPDATE
       SET weight = p_weight, max_running = p_max_running, max_running_per_key = p_max_running_per_key,
           rate_interval = p_rate_interval, rate_burst = p_rate_burst, over = excluded.over;
    DELETE FROM limits l WHERE l.queue = 'worker' AND l.namespace = p_namespace AND NOT l.holds AND l.weight = 1;

    -- What is at work by now counts. What has a place already keeps it, and tells somebody in vain at most.
    IF p_max_running IS NOT NULL AND v_before.max_running IS NULL
       OR p_max_running_per_key IS NOT NULL AND v_before.max_running_per_key IS NULL THEN
        INSERT INTO marking (namespace) VALUES (p_namespace) ON CONFLICT (namespace) DO UPDATE SET transactions = NULL;
    ELSIF coalesce(p_max_running, p_max_running_per_key) IS NULL THEN
        DELETE FROM marking m WHERE m.namespace = p_namespace;
    END IF;
    v_held := p_max_running_per_key IS DISTINCT FROM v_before.max_running_per_key;
    v_paid := p_rate_interval IS DISTINCT FROM v_before.rate_interval OR p_rate_burst IS DISTINCT FROM v_before.rate_burst;
    IF v_held OR v_paid THEN
        v_ids := ARRAY(
            SELECT q.id FROM worker_queue q WHERE v_held AND q.namespace = p_namespace AND q.held_due IS NOT NULL
             UNION
            SELECT q.id FROM worker_queue q WHERE v_paid AND q.namespace = p_namespace AND q.session_id IS NULL AND q.charged);
        -- In order, so that nobody who locks several items can deadlock.
        v_ids := ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR NO KEY UPDATE);
    END IF;
    v_now := clock_timestamp();
    IF v_held THEN
        -- The next claims hold again what is too much.
        UPDATE worker_queue q SET visible_at = q.held_due, held_due = NULL WHERE q.id = ANY (v_ids) AND q.held_due IS NOT NULL;
        DELETE FROM releases r WHERE r.namespace = p_namespace;
        UPDATE limits l SET holding_since = NULL WHERE l.queue = 'worker' AND l.namespace = p_namespace;
    END IF;
    IF v_paid THEN
        -- They pay anew.
        UPDATE worker_queue q SET visible_at = CASE WHEN q.held_due IS NULL THEN v_now ELSE q.visible_at END, charged = false
         WHERE q.id = ANY (v_ids) AND q.charged;
        DELETE FROM rates r WHERE r.namespace = p_namespace;
    END IF;
    PERFORM notify_queue('worker', 1, NULL, p_namespace);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION dead_letter_work(p_id bigint, p_token uuid, p_reason text, p_error text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM FROM worker_queue q
      WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > clock_timestamp()
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    PERFORM bury_work(ARRAY[p_id], p_reason, p_error);
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION abandon_work(
    p_id bigint, p_token uuid, p_delay interval DEFAULT '0', p_ignore_attempt boolean DEFAULT false,
    p_error text DEFAULT NULL, p_quiet boolean DEFAULT false, p_due_at timestamptz DEFAULT NULL)
RETURNS TABLE (item_namespace text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_namespace text;
    v_tag       text;
    v_key       text;
    v_placed    boolean;
BEGIN
    UPDATE worker_queue q
       -- By an instant of the past the clock of a key would seem to be that late.
       SET visible_at = CASE WHEN p_due_at < v_now AND NOT (q.key IS NOT NULL AND has_rate(q.namespace)) THEN p_due_at ELSE v_now + p_delay END,
           lock_token = NULL, last_error = coalesce(p_error, q.last_error),
           attempt_count = greatest(q.attempt_count - p_ignore_attempt::integer, 0),
           charged = p_ignore_attempt AND p_delay <= interval '0' AND q.key IS NOT NULL AND has_rate(q.namespace), share_at = NULL
     WHERE q.id = p_id AND q.lock_token = p_token AND q.visible_at > v_now
    RETURNING q.namespace, q.tag, q.key, q.slot OR q.key_slot INTO v_namespace, v_tag, v_key, v_placed;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on work item % with lock token %', p_id, p_token USING ERRCODE = 'PW001';
    END IF;
    IF v_placed THEN
        PERFORM release_places(ARRAY[v_namespace], ARRAY[v_tag], ARRAY[v_key]);
    END IF;
    IF NOT p_quiet THEN
        PERFORM notify_queue('worker', (p_delay <= interval '0')::integer,
                             CASE WHEN p_delay > interval '0' THEN v_now + p_delay END, v_namespace);
    END IF;
    RETURN QUERY SELECT v_namespace, v_now + p_delay, v_now;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION hold_instance_lock(p_instance text, p_token uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM FROM instance_locks l
      WHERE l.instance_id = p_instance AND l.lock_token = p_token AND l.locked_until > clock_timestamp()
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no lock on instance % with lock token %', p_instance, p_token USING ERRCODE = 'PW001';
    END IF;
END
$$;
-- +goose StatementEnd
