-- The verbs of the orchestrator queue, and history.

-- +goose Up

-- What fetches select an instance by (namespace, queue name, pinned version, stickiness) is its home. A message carries
-- a copy of it, and an ack that gives the instance another home changes the copies. Three things keep a copy from staying
-- out of date although neither transaction waits for the other:
--
--  (1) Whoever adds a message holds a shared lock (below) from before it reads the instance, and whoever changes what
--      is copied tries for the exclusive one before it changes the copies. If he gets it, nobody has read the
--      instance and not committed; and who comes later, before he commits, does not get the shared one.
--  (2) Who does not get his lock, or reads in a snapshot from before it, leaves a note in realignments.
--  (3) Each fetch that selects changes the copies of the instances noted. A note goes when that was done under the
--      exclusive lock, and till then it is an instant at which nodes look.
--
-- One lock stands for many instances, so that a large batch does not fill the server's lock table.

-- +goose StatementBegin
CREATE FUNCTION share_homes(p_instances text[])
RETURNS text[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_failed integer[];
BEGIN
    v_failed := ARRAY(
        SELECT b.bucket FROM (SELECT DISTINCT hashtext(i.id) & 127 AS bucket FROM unnest(p_instances) AS i (id)) AS b
         WHERE NOT pg_try_advisory_xact_lock_shared(hashtext('pgwake homes of ' || current_schema()), b.bucket));
    IF v_failed = '{}' AND reads_committed() THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(SELECT DISTINCT i.id FROM unnest(p_instances) AS i (id)
                  WHERE hashtext(i.id) & 127 = ANY (v_failed) OR NOT reads_committed());
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION share_homes IS 'Internal: tries for the shared locks of instances'' homes, see above. Returns those of which what is read may be out of date when it is committed.';

-- +goose StatementBegin
CREATE FUNCTION lock_home(p_instance text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN pg_try_advisory_xact_lock(hashtext('pgwake homes of ' || current_schema()), hashtext(p_instance) & 127);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_home IS 'Internal: tries for the exclusive lock of an instance''s home, see above. Never waits.';

-- +goose StatementBegin
CREATE FUNCTION lock_homes(p_instances text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO realignments (instance_id)
    SELECT i.id FROM unnest(p_instances) AS i (id)
     WHERE NOT (reads_committed() AND lock_home(i.id));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_homes IS 'Internal: tries for the exclusive locks of instances'' homes, and leaves a note for each that it does not get. Never waits.';

-- +goose StatementBegin
CREATE FUNCTION align_messages(p_instance text, OUT moved boolean, OUT remains boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_home    instances;
    v_pin     bigint;
    v_keyed   bigint;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    SELECT * INTO v_home FROM instances i WHERE i.instance_id = p_instance;
    SELECT x.pin INTO v_pin FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = v_home.current_execution;
    v_pin := coalesce(v_pin, 0);
    UPDATE orchestrator_queue q
       SET queue = coalesce(v_home.queue, q.queue), pin = v_pin,
           namespace = CASE WHEN q.dedup_key IS NULL THEN coalesce(v_home.namespace, q.namespace) ELSE q.namespace END,
           visible_at = CASE WHEN q.sticky_owner IS DISTINCT FROM v_home.sticky_owner THEN coalesce(q.sticky_due, q.visible_at) ELSE q.visible_at END,
           sticky_due = CASE WHEN q.sticky_owner = v_home.sticky_owner THEN q.sticky_due END,
           sticky_owner = CASE WHEN q.sticky_owner = v_home.sticky_owner THEN q.sticky_owner END
      FROM (SELECT m.id FROM orchestrator_queue m
             WHERE m.instance_id = p_instance
               AND (m.namespace <> v_home.namespace OR m.queue <> v_home.queue OR m.pin <> v_pin
                    OR m.sticky_owner <> coalesce(v_home.sticky_owner, ''))
               FOR UPDATE OF m SKIP LOCKED) AS stale
     WHERE q.id = ANY (ARRAY[stale.id])
       -- What stays is not told of: those who look because of that would tell each other for ever.
       AND (q.dedup_key IS NULL AND q.namespace <> v_home.namespace OR q.queue <> v_home.queue OR q.pin <> v_pin
            OR q.sticky_owner <> coalesce(v_home.sticky_owner, ''));
    moved := FOUND;
    -- One whose dedup key is taken there, or may be by somebody who has not committed, stays where it is until that is free.
    FOR v_keyed IN
        SELECT m.id FROM orchestrator_queue m
         WHERE m.instance_id = p_instance AND m.namespace <> v_home.namespace AND coalesce(m.dedup_key, '') <> ''
           AND NOT EXISTS (SELECT FROM orchestrator_queue d WHERE d.namespace = v_home.namespace AND d.dedup_key BETWEEN m.dedup_key AND m.dedup_key
                            ORDER BY d.dedup_key OFFSET 0)
           FOR UPDATE OF m SKIP LOCKED
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '1ms', true);
            UPDATE orchestrator_queue q SET namespace = v_home.namespace WHERE q.id = v_keyed;
            moved := true;
        EXCEPTION WHEN unique_violation OR lock_not_available THEN
            NULL;
        END;
        PERFORM set_config('lock_timeout', v_timeout, true);
    END LOOP;
    remains := EXISTS (
        SELECT FROM orchestrator_queue m
         WHERE m.instance_id = p_instance
           AND (m.namespace <> v_home.namespace OR m.queue <> v_home.queue OR m.pin <> v_pin
                OR m.sticky_owner <> coalesce(v_home.sticky_owner, '')));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION align_messages IS 'Internal: brings what the messages of an instance copied from it up to date. moved: something was not; remains: something is not, because somebody has the message locked, or because its dedup key is taken where it belongs. Never waits.';

-- +goose StatementBegin
CREATE FUNCTION realign_messages()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_note    realignments;
    v_alone   boolean;
    v_aligned record;
    v_moved   boolean := false;
BEGIN
    -- One at a time: two that then hold messages of what the other has aligned would wait for each other.
    IF NOT pg_try_advisory_xact_lock(hashtext('pgwake realignments of ' || current_schema()), 0) THEN
        RETURN;
    END IF;
    -- Whatever next_at says, for those that can be done with: the fetch may have been woken for this very message.
    FOR v_note IN SELECT * FROM realignments r ORDER BY r.next_at LIMIT 20 FOR UPDATE SKIP LOCKED LOOP
        -- Messages are changed under the lock row of their instance alone, like everywhere.
        PERFORM FROM instance_locks l WHERE l.instance_id = v_note.instance_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND
             AND (EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = v_note.instance_id)
                  OR NOT pg_try_advisory_xact_lock(hashtext(current_schema()::text), hashtext(v_note.instance_id)));
        v_alone := lock_home(v_note.instance_id);
        CONTINUE WHEN NOT v_alone AND v_note.next_at > clock_timestamp(); -- it would have to be done again
        SELECT * INTO v_aligned FROM align_messages(v_note.instance_id);
        v_moved := v_moved OR v_aligned.moved;
        IF v_alone AND NOT v_aligned.remains THEN
            DELETE FROM realignments r WHERE r.id = v_note.id;
        ELSIF v_note.next_at <= clock_timestamp() THEN
            UPDATE realignments r
               SET next_at = clock_timestamp() + least(interval '2 s', interval '50 ms' * 2 ^ least(v_note.tries, 10)), tries = v_note.tries + 1
             WHERE r.id = v_note.id;
        END IF;
    END LOOP;
    IF v_moved THEN
        PERFORM notify_queue('orchestrator', 1, NULL);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION realign_messages IS 'Internal: brings the messages of up to 20 instances that are noted up to date, and tells the nodes if that moved any.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_message_many(
    p_instances text[], p_kinds text[], p_datas text[], p_names text[] DEFAULT NULL, p_versions text[] DEFAULT NULL,
    p_executions bigint[] DEFAULT NULL, p_namespaces text[] DEFAULT NULL, p_priorities smallint[] DEFAULT NULL,
    p_delays interval[] DEFAULT NULL, p_visible_ats timestamptz[] DEFAULT NULL, p_dedup_keys text[] DEFAULT NULL,
    p_queues text[] DEFAULT NULL, p_headers text[] DEFAULT NULL, p_quiet boolean DEFAULT false)
RETURNS TABLE (item_id bigint, duplicate boolean, due_at timestamptz, now_at timestamptz, item_namespace text, item_label text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now        timestamptz := clock_timestamp();
    v_before     text;
    v_ids        bigint[] := ARRAY(SELECT nextval('orchestrator_queue_id_seq') FROM generate_series(1, cardinality(p_instances)));
    v_namespaces text[];
    v_queues     text[];
    v_pins       bigint[];
    v_owners     text[];
    v_untils     timestamptz[];
    v_unsure     text[]; -- instances
    v_guessed    text[];
    v_texts      text := concat(p_instances, p_kinds, p_names, p_versions, p_dedup_keys, p_queues);
BEGIN
    -- As in enqueue_work_many.
    IF octet_length(v_texts) > 255 OR strpos(v_texts, '""') > 0
       OR array_position(p_instances, NULL) IS NOT NULL OR array_position(p_kinds, NULL) IS NOT NULL
       OR p_kinds && ARRAY['start', 'continue_as_new'] AND (coalesce(cardinality(p_names), 0) < cardinality(p_kinds) OR array_position(p_names, NULL) IS NOT NULL)
       OR octet_length(p_namespaces::text) > 42 OR p_namespaces::text !~ '^\{(NULL|[a-z][a-z0-9_-]*)}$' OR 0 > ANY (p_priorities) OR 9 < ANY (p_priorities)
       OR interval '0' > ANY (p_delays) OR 'infinity' = ANY (p_visible_ats) OR '-infinity' = ANY (p_visible_ats)
       OR array_remove(p_delays, NULL) <> '{}' AND array_remove(p_visible_ats, NULL) <> '{}' THEN
        PERFORM check_texts('an instance id', p_instances, p_required => true), check_texts('a kind', p_kinds, p_required => true);
        PERFORM check_texts('a name', p_names), check_texts('a version', p_versions);
        PERFORM check_texts('a dedup key', p_dedup_keys), check_texts('a queue name', p_queues, 0);
        PERFORM check_options(p_namespaces, p_priorities, p_delays, p_visible_ats);
        IF EXISTS (SELECT FROM unnest(p_kinds, p_names) AS i (kind, name) WHERE i.kind IN ('start', 'continue_as_new') AND i.name IS NULL) THEN
            RAISE EXCEPTION 'a message that opens an execution needs the name of the orchestration' USING ERRCODE = 'PW003';
        END IF;
    END IF;
    IF array_remove(p_headers, NULL) <> '{}' THEN
        PERFORM check_headers(p_headers);
    END IF;
    PERFORM register_namespaces(p_namespaces);
    v_unsure := share_homes(p_instances);
    SELECT array_agg(coalesce(home.namespace, 'default') ORDER BY home.ord), array_agg(coalesce(home.queue, '') ORDER BY home.ord),
           array_agg(home.pin ORDER BY home.ord), array_agg(home.sticky_owner ORDER BY home.ord), array_agg(home.sticky_until ORDER BY home.ord),
           array_agg(DISTINCT home.instance_id) FILTER (WHERE home.guessed)
      INTO v_namespaces, v_queues, v_pins, v_owners, v_untils, v_guessed
      FROM (SELECT i.ord, i.instance_id,
                   coalesce(known.namespace, queued.namespace,
                            first_value(i.namespace) OVER (PARTITION BY i.instance_id ORDER BY i.namespace IS NULL, i.ord)) AS namespace,
                   coalesce(known.queue, queued.queue,
                            first_value(i.queue) OVER (PARTITION BY i.instance_id ORDER BY i.queue IS NULL, i.ord)) AS queue,
                   coalesce(current.pin, 0) AS pin,
                   CASE WHEN known.sticky_until > v_now THEN known.sticky_owner END AS sticky_owner, known.sticky_until,
                   -- Whoever opens an instance says where it is; for anybody else that is a guess. That it is in the
                   -- default namespace and has no queue name is none: ack_orchestration counts on nothing else.
                   coalesce(known.instance_id, queued.namespace) IS NULL AND i.kind NOT IN ('start', 'continue_as_new')
                   AND (i.namespace <> 'default' OR i.queue <> '') AS guessed
              FROM unnest(p_instances, coalesce(p_namespaces, '{}'), coalesce(p_queues, '{}'), p_kinds) WITH ORDINALITY AS i (instance_id, namespace, queue, kind, ord)
              LEFT JOIN instances known ON known.instance_id = ANY (ARRAY[i.instance_id]) -- as in ack_work_many
              LEFT JOIN executions current ON current.instance_id = ANY (ARRAY[known.instance_id]) AND current.execution_id = known.current_execution
              LEFT JOIN LATERAL ( -- it is about to become known
                   SELECT q.namespace, q.queue FROM orchestrator_queue q
                    WHERE known.instance_id IS NULL AND q.instance_id BETWEEN i.instance_id AND i.instance_id
                    ORDER BY q.instance_id, q.id LIMIT 1) queued ON true) AS home;
    v_before := quiet(p_quiet);
    INSERT INTO orchestrator_queue (id, instance_id, kind, data, name, version, execution_id,
                                    namespace, priority, visible_at, dedup_key, queue, pin, sticky_owner, sticky_due, headers, created_at)
    SELECT i.id, i.instance_id, i.kind, i.data::json, i.name, i.version, i.execution_id, i.namespace,
           coalesce(i.priority, 0), CASE WHEN due.sticks THEN i.sticky_until ELSE due.at END, i.dedup_key, i.queue, i.pin,
           CASE WHEN due.sticks THEN i.sticky_owner END, CASE WHEN due.sticks THEN due.at END, i.headers::jsonb, v_now
      FROM unnest(v_ids, p_instances, p_kinds, p_datas, p_names, p_versions, p_executions, v_namespaces, p_priorities,
                  p_delays, p_visible_ats, p_dedup_keys, v_queues, v_pins, v_owners, v_untils, p_headers) WITH ORDINALITY
           AS i (id, instance_id, kind, data, name, version, execution_id, namespace, priority,
                 delay, visible_at, dedup_key, queue, pin, sticky_owner, sticky_until, headers, ord)
     CROSS JOIN LATERAL (SELECT d.at, i.sticky_owner IS NOT NULL AND d.at < i.sticky_until AS sticks
                           FROM (SELECT coalesce(i.visible_at, v_now + i.delay, v_now) AS at) AS d) AS due
     ORDER BY i.namespace, i.dedup_key, i.ord -- so that two batches with the same keys cannot deadlock
    ON CONFLICT (namespace, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
    PERFORM set_config('pgwake.notify', v_before, true);
    IF NOT p_quiet AND array_remove(v_owners, NULL) <> '{}' THEN
        -- The trigger has told when they are visible.
        PERFORM notify_queue('orchestrator', count(*) FILTER (WHERE q.sticky_due <= v_now), min(q.sticky_due) FILTER (WHERE q.sticky_due > v_now))
           FROM unnest(v_ids) AS i (id)
          CROSS JOIN LATERAL (SELECT s.sticky_due FROM orchestrator_queue s WHERE s.id BETWEEN i.id AND i.id ORDER BY s.id LIMIT 1) q
         HAVING count(q.sticky_due) > 0;
    END IF;

    v_unsure := v_unsure || v_guessed;
    IF v_unsure <> '{}' THEN
        INSERT INTO realignments (instance_id) SELECT DISTINCT i.id FROM unnest(v_unsure) AS i (id);
        PERFORM notify_queue('orchestrator', 1, NULL); -- wherever they belong
    END IF;

    -- In a second statement, whose snapshot shows the row that a conflict was waited for. The limits keep the planner from
    -- a join by walking over the whole table, which is as good to it if it believes the table to be empty.
    RETURN QUERY
    SELECT coalesce(added.id, queued.id), added.id IS NULL,
           coalesce(added.sticky_due, added.visible_at, queued.sticky_due, queued.visible_at), v_now, i.namespace,
           CASE WHEN added.pin = 0 AND added.sticky_owner IS NULL THEN added.queue END
      FROM unnest(v_ids, v_namespaces, p_dedup_keys) WITH ORDINALITY AS i (id, namespace, dedup_key, ord)
      LEFT JOIN LATERAL (SELECT q.* FROM orchestrator_queue q WHERE q.id = i.id LIMIT 1) added ON true
      LEFT JOIN LATERAL (
           SELECT q.* FROM orchestrator_queue q
            WHERE added.id IS NULL AND q.namespace = i.namespace AND q.dedup_key BETWEEN i.dedup_key AND i.dedup_key
            ORDER BY q.dedup_key LIMIT 1) queued ON true
     ORDER BY i.ord;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_message_many IS 'Adds messages, one per array element, and returns a row for each in the same order; see enqueue_message. An instance that is known, or has a message queued, keeps its namespace and queue name, whatever the message says. due_at is the due instant for whom the instance is sticky to, if it is. item_label is the queue name, or null if the instance is sticky, or pinned to a version: then not everybody who serves that can take the message. Nulls, dedup keys, p_headers and p_quiet as in enqueue_work_many. PW003 if an argument breaks a rule.';

-- +goose StatementBegin
CREATE FUNCTION enqueue_message(
    p_instance text, p_kind text, p_data json DEFAULT NULL, p_name text DEFAULT NULL, p_version text DEFAULT NULL,
    p_namespace text DEFAULT NULL, p_priority integer DEFAULT 0, p_delay interval DEFAULT NULL,
    p_visible_at timestamptz DEFAULT NULL, p_dedup_key text DEFAULT NULL, p_queue text DEFAULT NULL,
    p_headers jsonb DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (SELECT item_id FROM enqueue_message_many(
        ARRAY[p_instance], ARRAY[p_kind], ARRAY[p_data::text], ARRAY[p_name], ARRAY[p_version], NULL,
        ARRAY[p_namespace], ARRAY[least(greatest(coalesce(p_priority, 0), -1), 10)::smallint], ARRAY[p_delay], ARRAY[p_visible_at], ARRAY[p_dedup_key], ARRAY[p_queue], ARRAY[p_headers::text]));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION enqueue_message IS 'Adds one message for an instance, due at p_visible_at, or after p_delay, or now, and returns its id: SELECT enqueue_message(''order-7'', ''start'', ''{}'', p_name => ''order''). The kinds ''start'' and ''continue_as_new'' open an execution and need p_name, the orchestration; a ''queue_message'' for an instance that is unknown is dropped; any other kind is the runtime''s own. p_namespace and p_queue, the queue name, count only for an instance that is not known yet. p_priority, p_dedup_key and p_headers as in enqueue_work. PW003 if an argument breaks a rule: ids, kinds, names, versions and keys have 1 to 255 bytes, a queue name at most 255; p_delay is not negative, and not together with p_visible_at.';

-- +goose StatementBegin
CREATE FUNCTION lock_due_instance(
    p_id bigint, p_instance text, p_token uuid, p_now timestamptz, p_until timestamptz,
    p_namespaces text[], p_queues text[], p_min_pin bigint, p_max_pin bigint, p_owner text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_lock_end timestamptz;
    v_aligned  record;
    v_held     bigint;
    v_opens    timestamptz;
    v_dropped  bigint;
BEGIN
    -- Has an earlier candidate, or another fetch, moved this message meanwhile? (The order is that of the primary key: for an
    -- equality, a walk over any index that has the id will do for a planner that believes the table to be empty.)
    PERFORM FROM orchestrator_queue q
      WHERE q.id BETWEEN p_id AND p_id AND (q.visible_at <= p_now OR q.sticky_owner = p_owner AND q.sticky_due <= p_now)
      ORDER BY q.id LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;

    SELECT l.locked_until, l.held INTO v_lock_end, v_held FROM instance_locks l
     WHERE l.instance_id = p_instance FOR UPDATE SKIP LOCKED;
    IF FOUND AND v_lock_end > p_now THEN
        -- Out of the way until the lease ends. Whoever releases the lock locks its row first, so it
        -- either sees these messages as held and brings them back, or we could not have locked the row,
        -- or, in a snapshot from before this, it fails for the change of the row.
        -- What came before this message is in the turn, as a rule: it may be much, and no need to read it again
        -- for each that arrives. A due one among it is a candidate in its own right; should there be many, which
        -- come in the reverse order of their ids, each 16th takes all of them along.
        UPDATE orchestrator_queue q SET visible_at = v_lock_end, held = true, sticky_owner = NULL, sticky_due = NULL
         WHERE q.instance_id = p_instance AND q.id >= CASE WHEN v_held % 16 = 15 THEN 0 ELSE p_id END
           AND coalesce(q.sticky_due, q.visible_at) <= p_now;
        UPDATE instance_locks l SET held = l.held + 1 WHERE l.instance_id = p_instance;
        RETURN NULL;
    ELSIF FOUND THEN
        UPDATE instance_locks l SET lock_token = p_token, locked_until = p_until, held = 0 WHERE l.instance_id = p_instance;
    ELSE
        -- Either there is no lock, or an ack is about to remove it, or another fetch is about to add it. An
        -- insert would wait for those, and an ack may be part of a long transaction.
        IF EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = p_instance)
           OR NOT pg_try_advisory_xact_lock(hashtext(current_schema()::text), hashtext(p_instance)) THEN
            RETURN false;
        END IF;
        INSERT INTO instance_locks (instance_id, lock_token, locked_until)
        VALUES (p_instance, p_token, p_until) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    -- The candidate was chosen by what its message says of the instance, which may be out of date.
    IF (p_namespaces IS NOT NULL OR p_queues IS NOT NULL OR p_min_pin IS NOT NULL) AND EXISTS (
        SELECT FROM instances i LEFT JOIN executions x ON x.instance_id = i.instance_id AND x.execution_id = i.current_execution
         WHERE i.instance_id = p_instance
           AND (i.namespace <> ALL (p_namespaces) OR i.queue <> ALL (p_queues) OR x.pin <> 0 AND x.pin NOT BETWEEN p_min_pin AND p_max_pin)) THEN
        SELECT * INTO v_aligned FROM align_messages(p_instance);
        IF v_aligned.moved THEN
            PERFORM notify_queue('orchestrator', 1, NULL);
        END IF;
        PERFORM FROM orchestrator_queue q
          WHERE q.id BETWEEN p_id AND p_id AND (p_namespaces IS NULL OR q.namespace = ANY (p_namespaces))
            AND (p_queues IS NULL OR q.queue = ANY (p_queues)) AND (p_min_pin IS NULL OR q.pin = 0 OR q.pin BETWEEN p_min_pin AND p_max_pin)
          ORDER BY q.id LIMIT 1;
        IF NOT FOUND THEN -- or else it has to stay where it is, and is taken there
            DELETE FROM instance_locks l WHERE l.instance_id = p_instance;
            RETURN NULL;
        END IF;
    END IF;
    -- What was sent to an instance that nothing has opened, nor opens now, waits for nobody.
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance)
       AND NOT EXISTS (SELECT FROM history h WHERE h.instance_id = p_instance)
       AND EXISTS (SELECT FROM orchestrator_queue q
                    WHERE q.instance_id = p_instance AND coalesce(q.sticky_due, q.visible_at) <= p_now AND q.kind = 'queue_message')
       AND NOT EXISTS (SELECT FROM orchestrator_queue q
                        WHERE q.instance_id = p_instance AND coalesce(q.sticky_due, q.visible_at) <= p_now AND q.kind IN ('start', 'continue_as_new')) THEN
        SELECT min(q.visible_at) INTO v_opens FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.kind IN ('start', 'continue_as_new');
        IF v_opens IS NOT NULL THEN -- but for what is about to open it
            UPDATE orchestrator_queue q SET visible_at = v_opens, sticky_owner = NULL, sticky_due = NULL
             WHERE q.instance_id = p_instance AND coalesce(q.sticky_due, q.visible_at) <= p_now AND q.kind = 'queue_message';
        ELSE
            DELETE FROM orchestrator_queue q
             WHERE q.instance_id = p_instance AND coalesce(q.sticky_due, q.visible_at) <= p_now AND q.kind = 'queue_message';
            GET DIAGNOSTICS v_dropped = ROW_COUNT;
            RAISE WARNING 'dropped % messages for instance %, which is unknown', v_dropped, p_instance;
        END IF;
    END IF;
    -- Before the lock was ours another fetch may have had the turn, and given it back or finished it.
    IF NOT EXISTS (SELECT FROM orchestrator_queue q
                    WHERE q.instance_id = p_instance AND (q.visible_at <= p_now OR q.sticky_owner = p_owner AND q.sticky_due <= p_now)) THEN
        DELETE FROM instance_locks l WHERE l.instance_id = p_instance;
        RETURN NULL;
    END IF;
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_due_instance IS 'Internal: tries to lock the instance of a due message; never waits. Null if there is no point: it is leased (its due messages are then held until the lease ends), it is not what was asked for, its message being out of date, or the message is gone. False if somebody is changing its lock at this moment.';

-- +goose StatementBegin
CREATE FUNCTION fetch_orchestration(
    p_token uuid, p_lock_timeout interval, p_namespaces text[] DEFAULT NULL, p_announce boolean DEFAULT false,
    p_queues text[] DEFAULT NULL, p_min_pin bigint DEFAULT NULL, p_max_pin bigint DEFAULT NULL, p_history boolean DEFAULT true,
    p_owner text DEFAULT NULL, p_node integer DEFAULT NULL, p_lane integer DEFAULT NULL, p_number bigint DEFAULT NULL,
    p_disarm boolean DEFAULT false, p_listener integer DEFAULT NULL, p_fanout integer DEFAULT 0, p_places integer DEFAULT 1)
RETURNS TABLE (
    part text, id bigint, type text, data json, name text, version text, execution_id bigint,
    attempt_count integer, headers jsonb, created_at timestamptz, instance_id text, namespace text,
    locked_until timestamptz, earliest_at timestamptz, now_at timestamptz, unfinished boolean)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_until     timestamptz := v_now + p_lock_timeout;
    v_served    text[] := served('orchestrator', p_namespaces);
    v_selects   boolean := v_served IS NOT NULL OR p_queues IS NOT NULL OR p_min_pin IS NOT NULL;
    v_instance  text;
    v_candidate record;
    v_spare     integer := 32;
    v_read      integer;
    v_locked    boolean;
    v_refused   text[] := '{}'; -- instances whose lock somebody is changing
    v_moved     integer := 0;
    v_moved_limit   CONSTANT integer := 1000; -- what is moved out of the way so far stays so; the next look goes on from there
    v_refused_limit CONSTANT integer := 10000; -- for those, each of which the next look would meet again
    v_known     instances;
    v_opening   orchestrator_queue;
    v_execution bigint;
    v_run       executions;
BEGIN
    IF p_lock_timeout <= interval '0' OR p_token IS NULL THEN
        RAISE EXCEPTION 'fetch_orchestration needs a token and a positive lock timeout' USING ERRCODE = 'PW003';
    END IF;
    IF EXISTS (SELECT FROM realignments) THEN
        PERFORM realign_messages();
        v_now := clock_timestamp();
        v_until := v_now + p_lock_timeout;
    END IF;

    -- The first candidate, in order, whose instance can be locked. These are loops and no WHERE clause:
    -- the planner is free to evaluate a function with side effects for rows that it then discards.
    IF NOT v_selects AND p_owner IS NULL THEN
        FOR v_candidate IN
            SELECT head.id, head.instance_id
              FROM generate_series(9, 0, -1) AS level (priority)
             CROSS JOIN LATERAL (
                   SELECT q.id, q.instance_id FROM orchestrator_queue q
                    WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                    ORDER BY q.visible_at, q.id) head
        LOOP
            CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
            v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until, NULL, NULL, NULL, NULL, NULL);
            IF v_locked THEN
                v_instance := v_candidate.instance_id;
            ELSIF NOT v_locked THEN
                v_refused := v_refused || v_candidate.instance_id;
            ELSE
                v_moved := v_moved + 1;
            END IF;
            EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
        END LOOP;
    ELSE
        -- Several lists have to be merged, so a few candidates of each are read at a time. A round
        -- that locks none has held all that are leased; the next reads further, past those in motion.
        LOOP
            v_read := 0;
            FOR v_candidate IN
                SELECT c.*
                  FROM message_lists(v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE v_selects
                UNION ALL
                SELECT c.*
                  FROM generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.visible_at FROM orchestrator_queue q
                        WHERE -q.priority = -level.priority AND q.visible_at <= v_now
                        ORDER BY q.visible_at, q.id
                        LIMIT v_spare) c
                 WHERE NOT v_selects
                UNION ALL
                SELECT c.*
                  FROM sticky_lists(p_owner, v_served, p_queues, p_min_pin, p_max_pin) AS list
                 CROSS JOIN generate_series(0, 9) AS level (priority)
                 CROSS JOIN LATERAL (
                       SELECT q.id, q.instance_id, q.priority, q.sticky_due FROM orchestrator_queue q
                        WHERE q.sticky_owner = p_owner AND q.namespace = list.namespace AND q.queue = list.queue AND q.pin = list.pin
                          AND q.priority = level.priority AND q.sticky_due <= v_now
                        ORDER BY q.sticky_due, q.id
                        LIMIT v_spare) c
                 WHERE p_owner IS NOT NULL
                 ORDER BY priority DESC, visible_at, id
            LOOP
                v_read := v_read + 1;
                CONTINUE WHEN v_candidate.instance_id = ANY (v_refused);
                v_locked := lock_due_instance(v_candidate.id, v_candidate.instance_id, p_token, v_now, v_until,
                                              v_served, p_queues, p_min_pin, p_max_pin, p_owner);
                IF v_locked THEN
                    v_instance := v_candidate.instance_id;
                ELSIF NOT v_locked THEN
                    v_refused := v_refused || v_candidate.instance_id;
                ELSE
                    v_moved := v_moved + 1;
                END IF;
                EXIT WHEN v_locked OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            END LOOP;
            EXIT WHEN v_instance IS NOT NULL OR v_read < v_spare OR v_moved = v_moved_limit OR cardinality(v_refused) = v_refused_limit;
            v_spare := v_spare * 8;
        END LOOP;
    END IF;

    IF v_instance IS NOT NULL THEN
        -- What was held behind the lock came back with the release of that, perhaps after this began, and is older than what
        -- was not.
        v_now := clock_timestamp();
        UPDATE orchestrator_queue q
           SET lock_token = p_token, visible_at = v_until, held = false, sticky_owner = NULL, sticky_due = NULL,
               attempt_count = q.attempt_count + 1
         WHERE q.instance_id = v_instance AND coalesce(q.sticky_due, q.visible_at) <= v_now;

        SELECT * INTO v_known FROM instances i WHERE i.instance_id = v_instance;
        -- In the order of their ids. If it were an equality, a walk along the primary key, over the messages of all
        -- instances, would give that order as well, and do for a planner that believes the table to be empty.
        SELECT * INTO v_opening FROM orchestrator_queue q
         WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token AND q.kind IN ('start', 'continue_as_new')
         ORDER BY q.instance_id, q.id LIMIT 1;
        v_execution := v_opening.execution_id;
        IF v_opening.id IS NOT NULL AND v_known.instance_id IS NOT NULL THEN -- for which a start opens nothing
            SELECT max(q.execution_id) INTO v_execution FROM orchestrator_queue q
             WHERE q.instance_id = v_instance AND q.lock_token = p_token AND q.kind = 'continue_as_new';
        END IF;
        v_execution := coalesce(greatest(v_known.current_execution, v_execution), 1);
        SELECT * INTO v_run FROM executions x WHERE x.instance_id = v_instance AND x.execution_id = v_execution;

        RETURN QUERY
        SELECT 'item', NULL::bigint, NULL::text,
               json_build_object(
                   'queue', coalesce(v_known.queue, (array_agg(q.queue ORDER BY q.instance_id, q.id))[1]), 'parent', v_known.parent_id,
                   'attributes', v_known.attributes, 'pin', v_run.pin,
                   'last_event', coalesce(v_run.last_event, (SELECT max(h.event_id) FROM history h
                                                              WHERE h.instance_id = v_instance AND h.execution_id = v_execution)),
                   'event_count', v_run.event_count, 'appended_at', v_run.appended_at, 'started_at', v_run.started_at, 'kv', kv_snapshot(v_instance)),
               coalesce(v_known.name, v_opening.name), coalesce(v_known.version, v_opening.version), v_execution,
               max(q.attempt_count), NULL::jsonb, min(q.created_at), v_instance, coalesce(v_known.namespace, (array_agg(q.namespace ORDER BY q.instance_id, q.id))[1]),
               v_until, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM (SELECT m.* FROM orchestrator_queue m WHERE m.instance_id BETWEEN v_instance AND v_instance AND m.lock_token = p_token
                 ORDER BY m.instance_id, m.id OFFSET 0) q;
        RETURN QUERY
        SELECT 'message', q.id, q.kind, q.data, q.name, q.version, q.execution_id, q.attempt_count, q.headers, q.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM orchestrator_queue q WHERE q.instance_id BETWEEN v_instance AND v_instance AND q.lock_token = p_token ORDER BY q.instance_id, q.id;
        RETURN QUERY
        SELECT 'event', h.event_id, h.type, h.data, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb, h.created_at,
               NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::boolean
          FROM history h WHERE p_history AND h.instance_id = v_instance AND h.execution_id = v_execution ORDER BY h.event_id;
        IF p_announce THEN
            PERFORM notify_queue('orchestrator', 0, v_until);
        END IF;
    END IF;

    RETURN QUERY
    SELECT 'outlook', NULL::bigint, NULL::text, NULL::json, NULL::text, NULL::text, NULL::bigint, NULL::integer, NULL::jsonb,
           NULL::timestamptz, NULL::text, NULL::text, v_until, earliest_message(p_namespaces, p_queues, p_min_pin, p_max_pin, p_owner), clock_timestamp(),
           v_instance IS NULL AND v_moved = v_moved_limit;
    IF p_number IS NOT NULL AND (p_disarm OR v_instance IS NULL) THEN
        PERFORM arm(p_node, p_lane, p_listener, 'orchestrator', p_number, v_instance IS NULL, p_namespaces, p_queues, p_fanout, p_places);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION fetch_orchestration IS 'Locks the instance with the first due message, among those of these namespaces and queue names (null: all) and pinned versions (null: any), those that are sticky to p_owner included, and takes all its due messages as one turn. Rows by part: one item (the instance), its messages by id, the history of its current execution by event id (unless p_history is false), and last, always, the outlook: the earliest visible_at that is left (see earliest_message) and the clock; it is unfinished if the look moved messages of locked instances out of the way and ended among them: the next gets further. p_number and the others as for fetch_work.';

-- +goose StatementBegin
CREATE FUNCTION hold_instance_lock(p_instance text, p_token uuid)
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
COMMENT ON FUNCTION hold_instance_lock IS 'Internal: locks the lock row of an instance to the end of the transaction. PW001 unless p_token holds it and has not expired.';

-- +goose StatementBegin
CREATE FUNCTION instance_scope(p_instance text)
RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text;
BEGIN
    SELECT i.namespace INTO v_namespace FROM instances i WHERE i.instance_id = p_instance;
    IF EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.namespace <> v_namespace) THEN
        RETURN NULL;
    END IF;
    RETURN v_namespace;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION instance_scope IS 'Internal: the namespace in which all messages of an instance are, or null if they may be in any: until its first ack, nothing says in which one they belong.';

-- +goose StatementBegin
CREATE FUNCTION release_instance(p_instance text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    DELETE FROM instance_locks l WHERE l.instance_id = p_instance;
    UPDATE orchestrator_queue q SET visible_at = v_now, held = false
     WHERE q.instance_id = p_instance AND q.held;
    RETURN EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = p_instance AND coalesce(q.sticky_due, q.visible_at) <= v_now);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION release_instance IS 'Internal: removes the lock of an instance and brings back the messages held behind it. True if the instance has a due message now. The caller holds the lock row.';

-- +goose StatementBegin
CREATE FUNCTION lock_new_history(p_instance text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM take_lock(hashtext('pgwake histories of ' || current_schema()), hashtext(p_instance), 'the history of ' || p_instance);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION lock_new_history IS 'Internal: waits for, and keeps out to the end of the transaction, whoever adds events to an execution of the instance that is not known yet, or makes one known: what the first adds, the second counts.';

-- +goose StatementBegin
CREATE FUNCTION append_history(p_instance text, p_execution bigint, p_event_ids bigint[], p_types text[], p_datas text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO history (instance_id, execution_id, event_id, type, data, created_at)
    SELECT p_instance, p_execution, e.event_id, e.type, e.data::json, v_now
      FROM unnest(p_event_ids, p_types, p_datas) AS e (event_id, type, data);
    FOR attempt IN 1..2 LOOP
        -- The lock of this row puts what is added to a history in an order: each copy of it is as it was after one
        -- of the additions.
        UPDATE executions x
           SET event_count = x.event_count + cardinality(p_event_ids), appended_at = v_now,
               last_event = greatest(x.last_event, (SELECT max(e.id) FROM unnest(p_event_ids) AS e (id)))
         WHERE x.instance_id = p_instance AND x.execution_id = p_execution;
        EXIT WHEN FOUND OR attempt = 2;
        IF NOT reads_committed() THEN
            RAISE EXCEPTION 'execution % of instance % may be known by now, which a transaction that is % does not see: make it READ COMMITTED',
                p_execution, p_instance, upper(current_setting('transaction_isolation')) USING ERRCODE = 'PW003';
        END IF;
        PERFORM lock_new_history(p_instance);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION append_history IS 'Adds events to an execution, all with the same created_at. An id that is taken is a unique violation of history_pkey. PW003 for an execution that is not known yet in a transaction that is not READ COMMITTED, which cannot tell.';

-- +goose StatementBegin
CREATE FUNCTION cancel_activities(p_instance text, p_executions bigint[], p_activities bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_ids bigint[] := ARRAY(
        SELECT q.id FROM unnest(p_executions, p_activities) AS c (execution_id, activity_id)
         CROSS JOIN LATERAL (
               SELECT w.id FROM worker_queue w
                WHERE w.instance_id = p_instance AND w.execution_id = c.execution_id AND w.activity_id = c.activity_id OFFSET 0) q);
BEGIN
    PERFORM remove_work(ARRAY(SELECT q.id FROM worker_queue q WHERE q.id = ANY (v_ids) ORDER BY q.id FOR UPDATE));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION cancel_activities IS 'Internal: removes work items of an instance, claimed or not. Part of ack_orchestration.';

-- +goose StatementBegin
CREATE FUNCTION ack_orchestration(
    p_instance text, p_token uuid, p_execution bigint,
    p_name text DEFAULT NULL, p_version text DEFAULT NULL, p_status text DEFAULT NULL, p_output text DEFAULT NULL,
    p_event_ids bigint[] DEFAULT NULL, p_event_types text[] DEFAULT NULL, p_event_datas text[] DEFAULT NULL,
    p_work_names text[] DEFAULT NULL, p_work_inputs text[] DEFAULT NULL, p_work_namespaces text[] DEFAULT NULL,
    p_work_priorities smallint[] DEFAULT NULL, p_work_delays interval[] DEFAULT NULL,
    p_work_visible_ats timestamptz[] DEFAULT NULL, p_work_dedup_keys text[] DEFAULT NULL,
    p_work_instances text[] DEFAULT NULL, p_work_executions bigint[] DEFAULT NULL, p_work_activities bigint[] DEFAULT NULL,
    p_work_tags text[] DEFAULT NULL, p_work_sessions text[] DEFAULT NULL, p_work_headers text[] DEFAULT NULL,
    p_work_dedup_fors interval[] DEFAULT NULL, p_work_dedup_scopes text[] DEFAULT NULL, p_work_keys text[] DEFAULT NULL,
    p_message_instances text[] DEFAULT NULL, p_message_kinds text[] DEFAULT NULL, p_message_datas text[] DEFAULT NULL,
    p_message_names text[] DEFAULT NULL, p_message_versions text[] DEFAULT NULL, p_message_executions bigint[] DEFAULT NULL,
    p_message_namespaces text[] DEFAULT NULL, p_message_priorities smallint[] DEFAULT NULL,
    p_message_delays interval[] DEFAULT NULL, p_message_visible_ats timestamptz[] DEFAULT NULL,
    p_message_dedup_keys text[] DEFAULT NULL, p_message_queues text[] DEFAULT NULL, p_message_headers text[] DEFAULT NULL,
    p_parent text DEFAULT NULL, p_queue text DEFAULT NULL, p_attributes text DEFAULT NULL, p_pin bigint DEFAULT NULL,
    p_sticky_owner text DEFAULT NULL, p_sticky_for interval DEFAULT NULL,
    p_cancel_executions bigint[] DEFAULT NULL, p_cancel_activities bigint[] DEFAULT NULL, p_cancel_messages text[] DEFAULT NULL,
    p_custom_status text DEFAULT NULL, p_clear_custom_status boolean DEFAULT false,
    p_kv_ops text[] DEFAULT NULL, p_kv_keys text[] DEFAULT NULL, p_kv_values text[] DEFAULT NULL,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (queue text, namespace text, due_at timestamptz, now_at timestamptz, history json, label text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now       timestamptz;
    v_namespace text;
    v_queue     text;
    v_scope     text;
    v_before    instances;
    v_known     instances;
    v_appended  timestamptz;
    v_history   json;
    v_pin       bigint; -- before
    v_pinned    bigint; -- now
    v_moves     boolean; -- whether its home changes
    v_noted     boolean;
    v_aligned   record;
BEGIN
    PERFORM hold_instance_lock(p_instance, p_token);
    v_scope := instance_scope(p_instance);
    SELECT q.namespace, q.queue INTO v_namespace, v_queue FROM orchestrator_queue q
     WHERE q.instance_id BETWEEN p_instance AND p_instance AND q.lock_token = p_token ORDER BY q.instance_id, q.id LIMIT 1;
    SELECT * INTO v_before FROM instances i WHERE i.instance_id = p_instance;
    SELECT x.pin INTO v_pin FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = v_before.current_execution;
    IF p_parent IS NOT NULL AND p_parent IS DISTINCT FROM v_before.parent_id AND p_instance IN (
        WITH RECURSIVE above (id) AS (
            SELECT p_parent
            UNION -- which ends a circle that others are in
            SELECT i.parent_id FROM above CROSS JOIN LATERAL (SELECT r.parent_id FROM instances r WHERE r.instance_id = above.id OFFSET 0) i
             WHERE i.parent_id IS NOT NULL)
        SELECT above.id FROM above) THEN
        RAISE EXCEPTION 'instance % would be its own ancestor', p_instance USING ERRCODE = 'PW003';
    END IF;

    -- What this turn ends or cancels stands in the way of nothing that it begins under the same key.
    UPDATE orchestrator_queue q SET dedup_key = NULL
     WHERE q.instance_id = p_instance AND q.lock_token = p_token AND coalesce(q.dedup_key, '') <> ''; -- for which no partial index will do
    IF cardinality(p_cancel_messages) > 0 THEN
        DELETE FROM orchestrator_queue q
         WHERE q.instance_id = p_instance AND coalesce(q.dedup_key, '') = ANY (p_cancel_messages);
    END IF;
    IF cardinality(p_cancel_activities) > 0 THEN
        PERFORM cancel_activities(p_instance, p_cancel_executions, p_cancel_activities);
    END IF;

    IF p_name IS NOT NULL AND v_before.instance_id IS NULL THEN
        INSERT INTO instances AS i (instance_id, namespace, name, version, current_execution, queue, parent_id, attributes,
                                    sticky_owner, sticky_until)
        VALUES (p_instance, coalesce(v_namespace, 'default'), p_name, p_version, p_execution,
                coalesce(p_queue, v_queue, ''), p_parent, p_attributes::json, p_sticky_owner, clock_timestamp() + p_sticky_for);
    ELSE
        UPDATE instances i
           SET name = coalesce(p_name, i.name), version = coalesce(p_version, i.version), updated_at = clock_timestamp(),
               current_execution = greatest(i.current_execution, p_execution), queue = coalesce(p_queue, i.queue),
               parent_id = coalesce(p_parent, i.parent_id), attributes = coalesce(p_attributes::json, i.attributes),
               sticky_owner = p_sticky_owner, sticky_until = clock_timestamp() + p_sticky_for
         WHERE i.instance_id = p_instance;
        IF NOT FOUND AND (cardinality(p_event_ids) > 0 OR p_status IS NOT NULL OR p_custom_status IS NOT NULL OR cardinality(p_kv_ops) > 0
                          OR coalesce(p_sticky_owner, p_version, p_output, p_parent, p_queue, p_attributes, p_pin::text) IS NOT NULL) THEN
            RAISE EXCEPTION 'instance % is new, so its first ack must name it', p_instance USING ERRCODE = 'PW003';
        END IF;
    END IF;
    SELECT * INTO v_known FROM instances i WHERE i.instance_id = p_instance;
    IF v_known.instance_id IS NOT NULL THEN
        SELECT x.appended_at INTO v_appended FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = p_execution;
        IF NOT FOUND THEN
            PERFORM lock_new_history(p_instance);
            v_now := clock_timestamp();
            INSERT INTO executions AS x (instance_id, execution_id, status, output, pin, started_at, completed_at, last_event, event_count, appended_at)
            SELECT p_instance, p_execution, coalesce(p_status, 'Running'), p_output, coalesce(p_pin, 0),
                   v_now, CASE WHEN p_status <> 'Running' THEN v_now END,
                   greatest(max(h.event_id), 0), count(*), max(h.created_at)
              FROM history h WHERE h.instance_id = p_instance AND h.execution_id = p_execution
            RETURNING x.appended_at INTO v_appended;
        ELSIF p_status IS NOT NULL OR p_output IS NOT NULL OR p_pin IS NOT NULL THEN
            UPDATE executions x
               SET status = coalesce(p_status, x.status), output = coalesce(p_output, x.output), pin = coalesce(p_pin, x.pin),
                   completed_at = CASE WHEN p_status IS NULL THEN x.completed_at WHEN p_status <> 'Running' THEN clock_timestamp() END
             WHERE x.instance_id = p_instance AND x.execution_id = p_execution;
        END IF;
    END IF;

    IF cardinality(p_event_ids) > 0 THEN
        PERFORM append_history(p_instance, p_execution, p_event_ids, p_event_types, p_event_datas);
        SELECT json_build_object('event_count', x.event_count, 'started_at', x.started_at, 'appended_at', x.appended_at,
                                 'appended_before', v_appended)
          INTO v_history FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = p_execution;
    END IF;
    IF cardinality(p_work_names) > 0 THEN
        RETURN QUERY
        SELECT 'worker', coalesce(n.namespace, 'default'), w.due_at, w.now_at, NULL::json, CASE WHEN n.session IS NULL THEN coalesce(n.tag, '') END
          FROM enqueue_work_many(p_work_names, p_work_inputs, p_work_namespaces, p_work_priorities, p_work_delays,
                                 p_work_visible_ats, p_work_dedup_keys, p_work_instances, p_work_executions,
                                 p_work_activities, p_work_tags, p_work_sessions, p_work_headers, p_work_dedup_fors, p_work_dedup_scopes, p_work_keys, p_quiet) WITH ORDINALITY AS w (item_id, duplicate, due_at, now_at, ord)
          LEFT JOIN unnest(p_work_namespaces, p_work_sessions, p_work_tags) WITH ORDINALITY AS n (namespace, session, tag, ord) ON n.ord = w.ord
         WHERE NOT w.duplicate;
    END IF;
    IF cardinality(p_message_instances) > 0 THEN
        RETURN QUERY
        SELECT 'orchestrator', m.item_namespace, m.due_at, m.now_at, NULL::json, m.item_label
          FROM enqueue_message_many(p_message_instances, p_message_kinds, p_message_datas, p_message_names,
                                    p_message_versions, p_message_executions, p_message_namespaces, p_message_priorities,
                                    p_message_delays, p_message_visible_ats, p_message_dedup_keys, p_message_queues, p_message_headers,
                                    p_quiet) AS m
         WHERE NOT m.duplicate;
    END IF;

    IF p_custom_status IS NOT NULL OR p_clear_custom_status THEN
        PERFORM apply_custom_status(p_instance, p_clear_custom_status, p_custom_status, p_quiet);
    END IF;
    -- What the execution before left comes first, and what this one leaves when it ends with this turn, last.
    IF v_before.current_execution < p_execution THEN
        PERFORM merge_kv(p_instance);
    END IF;
    IF cardinality(p_kv_ops) > 0 THEN
        PERFORM apply_kv(p_instance, p_execution, p_kv_ops, p_kv_keys, p_kv_values);
    END IF;
    IF p_status <> 'Running' THEN
        PERFORM merge_kv(p_instance);
    END IF;
    IF p_status <> 'Running' AND NOT p_quiet THEN
        PERFORM notify_instance(p_instance);
    END IF;

    -- After the inserts: what one turn both schedules and cancels does not happen. Whoever has such an activity in
    -- hand learns of it by the loss of its lease.
    IF cardinality(p_cancel_activities) > 0 AND cardinality(p_work_names) > 0 THEN
        PERFORM cancel_activities(p_instance, p_cancel_executions, p_cancel_activities);
    END IF;
    DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.lock_token = p_token;
    -- What the queue says of the instance follows it.
    SELECT x.pin INTO v_pinned FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = v_known.current_execution;
    -- 'default' and '' are what enqueue_message_many assumes of an unknown instance without a note (guessed, there).
    v_moves := v_known.instance_id IS NOT NULL
        AND ((v_known.namespace, v_known.queue, coalesce(v_pinned, 0))
                 IS DISTINCT FROM (coalesce(v_before.namespace, 'default'), coalesce(v_before.queue, ''), coalesce(v_pin, 0))
             OR coalesce(v_before.sticky_owner <> coalesce(v_known.sticky_owner, ''), false));
    IF v_moves THEN
        PERFORM lock_homes(ARRAY[p_instance]);
    END IF;
    v_now := clock_timestamp();
    IF v_moves OR v_known.instance_id IS NOT NULL AND v_before.instance_id IS NULL THEN
        -- That the instance is known is out of sight for whoever goes by a note until this commits: he is not to be alone.
        v_noted := NOT v_moves AND share_homes(ARRAY[p_instance]) <> '{}';
        SELECT * INTO v_aligned FROM align_messages(p_instance);
        IF v_aligned.remains OR v_noted THEN
            INSERT INTO realignments (instance_id) VALUES (p_instance);
        END IF;
        IF v_aligned.moved OR v_before.instance_id IS NOT NULL THEN -- whoever serves it now need not have heard of them
            v_scope := NULL;
            RETURN QUERY SELECT 'orchestrator', v_scope, v_now, v_now, NULL::json, NULL::text;
        ELSIF NOT EXISTS (SELECT FROM realignments r WHERE r.instance_id = p_instance) THEN
            -- From its first ack on all messages of an instance are where it is, and who adds one that may not be tells everybody.
            v_scope := v_known.namespace;
        END IF;
    END IF;
    IF release_instance(p_instance) THEN
        RETURN QUERY SELECT 'orchestrator', v_scope, v_now, v_now, NULL::json, NULL::text;
    END IF;
    IF v_before.sticky_owner IS NOT NULL OR v_known.sticky_owner IS NOT NULL THEN
        UPDATE orchestrator_queue q
           SET visible_at   = CASE WHEN due.sticks THEN v_known.sticky_until ELSE due.at END,
               sticky_owner = CASE WHEN due.sticks THEN v_known.sticky_owner END,
               sticky_due   = CASE WHEN due.sticks THEN due.at END
          FROM (SELECT m.id, coalesce(m.sticky_due, m.visible_at) AS at,
                       coalesce(coalesce(m.sticky_due, m.visible_at) < v_known.sticky_until, false) AS sticks
                  FROM orchestrator_queue m WHERE m.instance_id = p_instance) AS due
           -- What sticks already keeps its end, unless that is too late: nobody rewrites all timers with each turn.
         WHERE q.id = ANY (ARRAY[due.id])
           AND CASE WHEN due.sticks THEN q.sticky_owner IS DISTINCT FROM v_known.sticky_owner OR q.visible_at > v_known.sticky_until ELSE coalesce(q.sticky_owner, '') <> '' END;
        -- For whom are they now, and when? Nobody heard of that but as of now; those who look learn of what comes later.
        RETURN QUERY
        SELECT 'orchestrator', v_scope, min(coalesce(q.sticky_due, q.visible_at)), v_now, NULL::json, NULL::text
          FROM orchestrator_queue q WHERE q.instance_id = p_instance HAVING count(*) > 0;
    END IF;
    RETURN QUERY SELECT 'freed', v_scope, v_now, v_now, v_history, NULL::text;
    -- A caller that asked for quiet looks once more after its commit. For any other the commit is out
    -- of sight, and a message may commit between this snapshot and that commit: so always notify.
    IF NOT p_quiet THEN
        PERFORM notify_queue('orchestrator', 1, NULL, v_scope);
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION ack_orchestration IS 'Ends a turn: creates or updates the instance and its execution, appends history, enqueues work items and messages, sets custom status and key-value pairs, cancels activities and messages (by dedup key), makes the instance sticky to p_sticky_owner for p_sticky_for (null: to nobody), removes the messages of the turn and releases the instance. All or nothing. Returns a row for everything that became or will become due, by queue, and one with queue = ''freed'' for the namespace of the instance: what a caller that asked for quiet has to tell; label is the tag or queue name, or null if not everybody who serves that can take it. In that row history says what became of the history, if events were added: its event_count, started_at and appended_at, and appended_at before. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION release_sticky(p_owners text[])
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_instances text[];
BEGIN
    WITH released AS (
        UPDATE instances i SET sticky_owner = NULL, sticky_until = NULL
          FROM (SELECT r.instance_id FROM instances r
                 WHERE r.sticky_owner = ANY (p_owners) AND r.sticky_until > v_now
                   FOR NO KEY UPDATE SKIP LOCKED) AS sticky -- an ack that is on its way says anew to whom it is
         WHERE i.instance_id = ANY (ARRAY[sticky.instance_id])
        RETURNING i.instance_id
    )
    SELECT array_agg(r.instance_id) INTO v_instances FROM released r;
    IF v_instances IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM lock_homes(v_instances);
    -- The messages are changed by the fetches, each under the lock of its instance: one that is here for many would have to hold
    -- as many. Those go first that are due.
    INSERT INTO realignments (instance_id, next_at)
    SELECT i.id, greatest(message.due, v_now) FROM unnest(v_instances) AS i (id)
     CROSS JOIN LATERAL (SELECT min(q.sticky_due) AS due FROM orchestrator_queue q WHERE q.instance_id = i.id) message
     WHERE message.due IS NOT NULL;
    PERFORM notify_queue('orchestrator', 1, NULL);
    RETURN cardinality(v_instances);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION release_sticky IS 'Makes the instances that are sticky to these owners anybody''s from now on. Returns how many, those left out that another transaction is changing.';

-- +goose StatementBegin
CREATE FUNCTION give_back_turn(p_instance text, p_token uuid, p_delay interval, p_ignore_attempt boolean, p_quiet boolean)
RETURNS TABLE (scope text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_scope text;
BEGIN
    UPDATE orchestrator_queue q
       SET visible_at = v_now + p_delay, lock_token = NULL,
           attempt_count = greatest(q.attempt_count - p_ignore_attempt::integer, 0)
     WHERE q.instance_id = p_instance AND q.lock_token = p_token;
    PERFORM release_instance(p_instance);
    v_scope := instance_scope(p_instance);
    IF NOT p_quiet THEN
        PERFORM notify_queue('orchestrator', 1, CASE WHEN p_delay > interval '0' THEN v_now + p_delay END, v_scope);
    END IF;
    RETURN QUERY SELECT v_scope, v_now + p_delay, v_now;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION give_back_turn IS 'Internal: returns the messages of a turn to the queue, due after p_delay, and releases the instance; whatever was held behind it is due at once. Returns the scope of the instance (see instance_scope) and when the turn is due. The caller holds the lock row.';

-- +goose StatementBegin
CREATE FUNCTION abandon_orchestration(
    p_instance text, p_token uuid, p_delay interval DEFAULT '0', p_ignore_attempt boolean DEFAULT false,
    p_quiet boolean DEFAULT false)
RETURNS TABLE (scope text, due_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM hold_instance_lock(p_instance, p_token);
    RETURN QUERY SELECT * FROM give_back_turn(p_instance, p_token, p_delay, p_ignore_attempt, p_quiet);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION abandon_orchestration IS 'Gives a turn back: its messages are due again after p_delay and the instance is free at once. Returns the namespace (null: any) and when they are due. p_ignore_attempt undoes the count of this attempt. p_quiet leaves the notification to the caller. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION renew_orchestration(p_instance text, p_token uuid, p_lock_timeout interval)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_until  timestamptz;
    v_before timestamptz;
BEGIN
    PERFORM hold_instance_lock(p_instance, p_token);
    v_until := clock_timestamp() + p_lock_timeout;
    SELECT l.locked_until INTO v_before FROM instance_locks l WHERE l.instance_id = p_instance;
    UPDATE instance_locks l SET locked_until = v_until WHERE l.instance_id = p_instance;
    UPDATE orchestrator_queue q SET visible_at = v_until
     WHERE q.instance_id = p_instance AND (q.lock_token = p_token OR q.held);
    IF v_until < v_before THEN -- earlier than anybody knows
        PERFORM notify_queue('orchestrator', 0, v_until);
    END IF;
    RETURN v_until;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION renew_orchestration IS 'Makes the instance lock, and with it the turn, end p_lock_timeout from now, and returns that instant. PW001 if the token no longer holds.';

-- +goose StatementBegin
CREATE FUNCTION undo_orchestration_claim(p_token uuid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_instance text;
BEGIN
    SELECT l.instance_id INTO v_instance FROM instance_locks l
     WHERE l.lock_token = p_token AND l.locked_until > clock_timestamp() FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM give_back_turn(v_instance, p_token, interval '0', true, false);
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION undo_orchestration_claim IS 'Gives back the turn that p_token took, as if it had never been fetched; false if there is none. For a fetch whose outcome is unknown: it reads the locks of all turns at work, since an index for so rare a case would cost every turn.';

-- +goose StatementBegin
CREATE FUNCTION read_history(p_instance text, p_execution bigint DEFAULT NULL, p_from_event_id bigint DEFAULT NULL, p_limit integer DEFAULT NULL)
RETURNS TABLE (event_id bigint, type text, data json, created_at timestamptz, execution_id bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_execution bigint := coalesce(p_execution,
        (SELECT i.current_execution FROM instances i WHERE i.instance_id = p_instance), 1);
BEGIN
    RETURN QUERY
    SELECT h.event_id, h.type, h.data, h.created_at, h.execution_id FROM history h
     WHERE h.instance_id = p_instance AND h.execution_id = v_execution
       AND h.event_id >= coalesce(p_from_event_id, '-9223372036854775808')
     ORDER BY h.event_id
     LIMIT p_limit;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION read_history IS 'Events of an execution (null: the current one) by id, from p_from_event_id on, at most p_limit of them (null: all). No row for an unknown instance.';

-- +goose StatementBegin
CREATE FUNCTION resume_history(p_instance text, p_execution bigint, p_from_event_id bigint DEFAULT NULL)
RETURNS TABLE (event_id bigint, type text, data json, created_at timestamptz, event_count bigint, started_at timestamptz, appended_at timestamptz)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    -- One statement, so that both are of one snapshot.
    RETURN QUERY
    SELECT NULL::bigint, NULL::text, NULL::json, NULL::timestamptz, x.event_count, x.started_at, x.appended_at
      FROM executions x WHERE x.instance_id = p_instance AND x.execution_id = p_execution
    UNION ALL
    (SELECT h.event_id, h.type, h.data, h.created_at, NULL::bigint, NULL::timestamptz, NULL::timestamptz
       FROM history h
      WHERE h.instance_id = p_instance AND h.execution_id = p_execution
        AND h.event_id >= coalesce(p_from_event_id, '-9223372036854775808')
      ORDER BY h.event_id);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION resume_history IS 'Events of an execution by id, from p_from_event_id on (null: all), for a node that has those before; and, in a row without an event, what executions says of the history at the same moment, by which the node can tell whether it has all of it.';

-- +goose Down

DROP FUNCTION resume_history, read_history, undo_orchestration_claim, renew_orchestration, abandon_orchestration, give_back_turn, release_sticky,
    ack_orchestration, cancel_activities, append_history, lock_new_history, release_instance, instance_scope, hold_instance_lock, fetch_orchestration, lock_due_instance,
    enqueue_message, enqueue_message_many, realign_messages, align_messages, lock_homes, lock_home, share_homes;
