-- What this package adds to pgmq: notifications of what is sent, whoever sends it, and verbs that take one round trip. Everything is
-- in a schema of its own, but for the triggers, which go with it.
--
-- Whoever has USAGE on the schema may call its functions: PUBLIC keeps EXECUTE, since roles that receive were told to need no more. None
-- but the triggers' has other rights than its caller, so nobody can do with them what he could not do without.

CREATE SCHEMA IF NOT EXISTS pgwake_pgmq;
COMMENT ON SCHEMA pgwake_pgmq IS 'notifications for pgmq, and what consumers that wait for them need; version 1';

CREATE OR REPLACE FUNCTION pgwake_pgmq.namespace_of(p_queue text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
	-- Names are in full: with a path of its own it could not be put in line where a query calls it.
	SELECT CASE
		WHEN p_queue OPERATOR(pg_catalog.~) '^orchestration' THEN 'orchestration'
		WHEN p_queue OPERATOR(pg_catalog.~) '^worker_.*_queue$' THEN coalesce(pg_catalog.substring(p_queue, '^worker_(.+)_queue$'), 'worker')
		WHEN p_queue OPERATOR(pg_catalog.~) '^[a-zA-Z][a-zA-Z0-9_]*_queue$' THEN pg_catalog.left(p_queue, -6)
		ELSE 'default'
	END
$$;
COMMENT ON FUNCTION pgwake_pgmq.namespace_of(text) IS
	'The namespace of a queue: orchestration... is orchestration, worker_<x>_queue and <x>_queue are <x>, and any other is default.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.channel(p_namespace text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
	-- The name of a channel has at most 63 bytes, 19 of which are these.
	SELECT 'pgmq_message_ready.' OPERATOR(pg_catalog.||)
		CASE WHEN pg_catalog.octet_length(p_namespace) OPERATOR(pg_catalog.<=) 44 THEN p_namespace ELSE pg_catalog.md5(p_namespace) END
$$;
COMMENT ON FUNCTION pgwake_pgmq.channel(text) IS
	'On which channel the messages of a namespace are told of: pgmq_message_ready.<namespace>, or the md5 of one that is too long.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.tell(p_queue text, p_msg_id bigint, p_ready_at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_namespace text := pgwake_pgmq.namespace_of(p_queue);
	v_now timestamptz := clock_timestamp();
	v_ready_at timestamptz := CASE WHEN p_ready_at = '-infinity' THEN v_now ELSE p_ready_at END;
	v_event text;
BEGIN
	IF v_ready_at = 'infinity' THEN -- whoever makes it due has it told
		RETURN;
	END IF;
	v_event := json_build_object(
		'event_type', 'message_ready', 'msg_id', p_msg_id, 'queue_name', p_queue, 'namespace', v_namespace, 'ready_at', v_ready_at,
		'delay_seconds', greatest(ceil(extract(epoch FROM v_ready_at - v_now)), 0)::bigint, 'emitted_at', v_now);
	PERFORM pg_notify(pgwake_pgmq.channel(v_namespace), v_event);
	PERFORM pg_notify('pgmq_message_ready', v_event);
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.tell(text, bigint, timestamptz) IS
	'Notifies the channel of the queue''s namespace and pgmq_message_ready that a message is due, now or at an instant. It tells nothing of its content.';

-- The triggers' functions run as whoever installed them: a producer needs no rights here. So nobody else may put them on a table of
-- their own, on which "added" would be theirs, too: EXECUTE is asked for when a trigger is made, and not when it fires. Those that
-- were made before that was taken away are refused before anything of theirs is read.

CREATE OR REPLACE FUNCTION pgwake_pgmq.on_send() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_first record;
BEGIN
	IF TG_TABLE_SCHEMA <> 'pgmq' THEN
		RAISE insufficient_privilege USING MESSAGE = 'pgwake_pgmq.on_send is for the tables of pgmq only';
	END IF;
	-- One notification for a statement: whoever asks for its first message learns when the others are due.
	SELECT msg_id, vt INTO v_first FROM added ORDER BY vt, msg_id LIMIT 1;
	IF FOUND THEN
		PERFORM pgwake_pgmq.tell(TG_ARGV[0], v_first.msg_id, v_first.vt);
	END IF;
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.on_send() IS 'Trigger of each queue: tells of what a statement has sent.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.on_release() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF TG_TABLE_SCHEMA <> 'pgmq' THEN
		RAISE insufficient_privilege USING MESSAGE = 'pgwake_pgmq.on_release is for the tables of pgmq only';
	END IF;
	PERFORM pgwake_pgmq.tell(TG_ARGV[0], NEW.msg_id, NEW.vt);
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.on_release() IS 'Trigger of each queue: tells of a message that is due sooner than it was, as after pgmq.set_vt.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.attach(p_queue text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_table text := 'q_' || lower(p_queue);
BEGIN
	EXECUTE format('CREATE OR REPLACE TRIGGER pgwake_sent AFTER INSERT ON pgmq.%I REFERENCING NEW TABLE AS added
		FOR EACH STATEMENT EXECUTE FUNCTION pgwake_pgmq.on_send(%L)', v_table, p_queue);
	-- A claim makes vt later, so for claims there is no call.
	EXECUTE format('CREATE OR REPLACE TRIGGER pgwake_released AFTER UPDATE OF vt ON pgmq.%I
		FOR EACH ROW WHEN (NEW.vt < OLD.vt) EXECUTE FUNCTION pgwake_pgmq.on_release(%L)', v_table, p_queue);
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.attach(text) IS 'Has a queue tell of its messages.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.on_create() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF TG_TABLE_SCHEMA <> 'pgmq' OR TG_TABLE_NAME <> 'meta' THEN
		RAISE insufficient_privilege USING MESSAGE = 'pgwake_pgmq.on_create is for the tables of pgmq only';
	END IF;
	BEGIN
		PERFORM pgwake_pgmq.attach(NEW.queue_name);
	EXCEPTION WHEN OTHERS THEN -- the queue comes before its notifications
		RAISE WARNING 'queue % does not tell of its messages, and is polled: %', NEW.queue_name, SQLERRM;
	END;
	PERFORM pg_notify('pgmq_queue_created', json_build_object('event_type', 'queue_created', 'queue_name', NEW.queue_name,
		'namespace', pgwake_pgmq.namespace_of(NEW.queue_name), 'created_at', NEW.created_at, 'emitted_at', clock_timestamp())::text);
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.on_create() IS 'Trigger of pgmq.meta: has a new queue tell of its messages, and announces it on pgmq_queue_created.';

REVOKE EXECUTE ON FUNCTION pgwake_pgmq.on_send(), pgwake_pgmq.on_release(), pgwake_pgmq.on_create() FROM PUBLIC;

CREATE OR REPLACE FUNCTION pgwake_pgmq.namespaces() RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT DISTINCT pgwake_pgmq.namespace_of(queue_name) FROM pgmq.meta ORDER BY 1
$$;
COMMENT ON FUNCTION pgwake_pgmq.namespaces() IS 'The namespaces that have a queue.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.send(p_namespace text, p_messages jsonb[], p_headers jsonb[], p_delays interval[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_queue text;
	v_batch record;
BEGIN
	FOR i IN 1..2 LOOP
		SELECT queue_name INTO v_queue FROM pgmq.meta WHERE pgwake_pgmq.namespace_of(queue_name) = p_namespace
			ORDER BY queue_name <> p_namespace || '_queue', queue_name LIMIT 1;
		EXIT WHEN FOUND;
		-- The second is for namespaces such as tenant-a, and for ab where there is AB: queues whose names differ by case have the same
		-- table. A name that pgmq takes has at most 47 characters, and no -- among them.
		SELECT name INTO v_queue FROM unnest(ARRAY[p_namespace || '_queue', 'worker_' || p_namespace || '_queue']) WITH ORDINALITY AS q(name, n)
			WHERE pgwake_pgmq.namespace_of(name) = p_namespace AND name ~ '^[a-zA-Z0-9_]+(-[a-zA-Z0-9_]+)*$' AND length(name) <= 47
			  AND NOT EXISTS (SELECT FROM pgmq.meta WHERE lower(queue_name) = lower(name)) ORDER BY n LIMIT 1;
		IF NOT FOUND THEN
			RAISE invalid_parameter_value USING MESSAGE = format('no queue of pgmq can be called after namespace "%s": ', p_namespace)
				|| 'it is to have letters, digits, _ and single -, and at most 41 characters, or 34 where the queue is worker_<namespace>_queue, '
				|| 'and to differ from others not only by upper and lower case';
		END IF;
		IF i = 1 THEN -- somebody else may be creating it, or one that differs by case
			PERFORM pg_advisory_xact_lock(hashtextextended('pgwake_pgmq.' || lower(p_namespace), 0));
		ELSE
			PERFORM pgmq.create(v_queue);
		END IF;
	END LOOP;
	FOR v_batch IN
		SELECT delay, array_agg(message ORDER BY n) AS messages, array_agg(header ORDER BY n) AS headers
		  FROM unnest(p_messages, p_headers, p_delays) WITH ORDINALITY AS m(message, header, delay, n)
		 GROUP BY delay
	LOOP
		PERFORM pgmq.send_batch(v_queue, v_batch.messages, v_batch.headers, clock_timestamp() + v_batch.delay);
	END LOOP;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.send(text, jsonb[], jsonb[], interval[]) IS
	'Sends messages to the queue of a namespace, which it creates if there is none: <namespace>_queue, or worker_<namespace>_queue where that belongs to another.';

-- What jsonb holds in some bytes may be 131,072 digits once it is written out, as 1e131071 is. What is at most 4 kB, and not compressed, has
-- some 256 numbers, which are in bounds: receive writes that out without more ado.

CREATE OR REPLACE FUNCTION pgwake_pgmq.written_out(p_value jsonb) RETURNS text
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_number numeric;
	v_size bigint := 0; -- of what the exponents stand for: at least, and without writing it out, which would take seconds
	v_text text;
BEGIN
	BEGIN
		FOR v_number IN SELECT n::numeric FROM jsonb_path_query(p_value, 'strict $.** ? (@.type() == "number" && (@.abs() > 1e500 || @.abs() < 1e-300))') AS n LOOP
			v_number := abs(v_number);
			v_size := v_size + scale(v_number) + CASE
				WHEN v_number < 1 THEN 0 WHEN v_number < 1e1000 THEN 500 WHEN v_number < 1e2000 THEN 1000
				WHEN v_number < 1e4000 THEN 2000 WHEN v_number < 1e8000 THEN 4000
				WHEN v_number < 1e16000 THEN 8000 WHEN v_number < 1e32000 THEN 16000 WHEN v_number < 1e64000 THEN 32000 WHEN v_number < 1e96000 THEN 64000
				ELSE 96000 END;
			IF v_size > 134217728 THEN
				RETURN NULL;
			END IF;
		END LOOP;
	EXCEPTION WHEN statement_too_complex THEN -- nested deeper than the path's stack, which writing out does without
		NULL;
	END;
	v_text := p_value;
	RETURN CASE WHEN octet_length(v_text) <= 268435456 THEN v_text END;
EXCEPTION WHEN program_limit_exceeded OR internal_error THEN -- by the server, of 1 GB
	IF SQLSTATE = 'XX000' AND NOT starts_with(SQLERRM, 'invalid memory alloc request size') THEN
		RAISE;
	END IF;
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.written_out(jsonb) IS 'A value as text. Null: its numbers have more than 128 MiB, or all of it more than 256 MiB, which is more than what Publish takes can come to.';

-- A message that cannot be received would come back for ever, and keep all others of its namespace, since a call is for all: so each is looked
-- at for what would fail, now or when it is given back, and becomes a dead letter instead.

CREATE OR REPLACE FUNCTION pgwake_pgmq.has_room(p_headers jsonb, p_id bigint, p_enqueued_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	-- That of a dead letter is the longest note: 64 KiB, and some.
	PERFORM pg_column_size(pgwake_pgmq.noted(p_headers, p_id, p_enqueued_at, jsonb_build_object('room', repeat('x', 131072))));
	RETURN true;
EXCEPTION WHEN program_limit_exceeded OR statement_too_complex OR internal_error THEN
	IF SQLSTATE = 'XX000' AND NOT starts_with(SQLERRM, 'invalid memory alloc request size') THEN
		RAISE;
	END IF;
	RETURN false;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.has_room(jsonb, bigint, timestamptz) IS
	'Whether headers can have a note: jsonb has at most 256 MiB, and no more depth than the stack is for.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.bury_counted_out(p_queue text) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_id bigint;
	v_buried integer := 0;
BEGIN
	FOR v_id IN EXECUTE format('SELECT msg_id FROM pgmq.%I WHERE read_ct = 2147483647 AND vt <= clock_timestamp() LIMIT 1000 FOR UPDATE SKIP LOCKED', 'q_' || lower(p_queue)) LOOP
		PERFORM pgwake_pgmq.bury(p_queue, v_id, 'unreadable', 'the message was read as often as can be counted');
		v_buried := v_buried + 1;
	END LOOP;
	RETURN v_buried;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.bury_counted_out(text) IS
	'Archives messages of which no further read can be counted, at most 1000, and returns how many.';

-- An answer has at most 64 MiB of messages and headers, or one message. What pgmq.read has read beyond that is put back in the same transaction,
-- so nobody has seen it read. How many are too many is not known before they are written out: whoever asks learns it from the answer.

CREATE OR REPLACE FUNCTION pgwake_pgmq.receive(p_namespace text, p_vt integer, p_most integer)
RETURNS TABLE (queue_name text, msg_id bigint, read_ct integer, enqueued_at timestamptz, message text, headers jsonb, next_vt timestamptz, answered_at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_queue text;
	v_left integer := p_most;
	v_room bigint := 67108864; -- of this answer
	v_full boolean := false;
	v_size bigint;
	v_headers text;
	v_small boolean; -- the headers
	v_bad text; -- why nobody could read it
	v_reading boolean; -- nothing has come yet
	v_again boolean;
	v_buried integer;
	v_spare bigint[];
	v_next timestamptz;
	v_earliest timestamptz;
	v_message record;
BEGIN
	-- In any order, so that no queue of a namespace keeps the others waiting.
	FOR v_queue IN SELECT m.queue_name FROM pgmq.meta m WHERE pgwake_pgmq.namespace_of(m.queue_name) = p_namespace ORDER BY random() LOOP
		IF v_left > 0 AND NOT v_full THEN
			v_again := true;
			WHILE v_again LOOP
				v_again := false;
				v_reading := true;
				v_spare := '{}';
				BEGIN
					FOR v_message IN SELECT r.* FROM pgmq.read(v_queue, p_vt, v_left) r LOOP
						v_reading := false;
						IF v_full THEN
							v_spare := v_spare || v_message.msg_id;
							CONTINUE;
						END IF;
						queue_name := v_queue;
						msg_id := v_message.msg_id;
						read_ct := v_message.read_ct;
						enqueued_at := CASE WHEN v_message.enqueued_at BETWEEN '0001-01-01 UTC' AND '9999-12-31 UTC' THEN v_message.enqueued_at ELSE clock_timestamp() END;
						v_bad := NULL;
						IF coalesce(pg_column_size(v_message.message) <= 4096 AND pg_column_compression(v_message.message) IS NULL, true) THEN
							message := v_message.message;
						ELSE
							message := pgwake_pgmq.written_out(v_message.message);
							v_bad := CASE WHEN message IS NULL THEN 'the message has more bytes than anybody could read once its numbers are written out' END;
						END IF;
						headers := v_message.headers;
						v_small := coalesce(pg_column_size(headers) <= 4096 AND pg_column_compression(headers) IS NULL, true);
						IF NOT v_small AND v_bad IS NULL THEN
							v_bad := CASE WHEN NOT pgwake_pgmq.has_room(headers, msg_id, v_message.enqueued_at) THEN 'the headers leave no room for a note' END;
						END IF;
						IF v_bad IS NULL THEN
							IF jsonb_typeof(headers) = 'object' AND headers ? 'pgwake' THEN
								headers := pgwake_pgmq.noted(headers, msg_id, v_message.enqueued_at, '{}');
							END IF;
							IF v_small THEN
								v_headers := headers;
							ELSE
								v_headers := pgwake_pgmq.written_out(headers);
								v_bad := CASE WHEN v_headers IS NULL THEN 'the headers have more bytes than anybody could read once their numbers are written out' END;
							END IF;
						END IF;
						v_size := coalesce(octet_length(message), 0) + coalesce(octet_length(v_headers), 0);
						IF v_bad IS NOT NULL THEN
							PERFORM pgwake_pgmq.bury(v_queue, msg_id, 'unreadable', v_bad);
						ELSIF v_size > v_room AND v_room < 67108864 THEN
							v_full := true;
							v_spare := v_spare || msg_id;
							CONTINUE;
						ELSE
							v_room := v_room - v_size;
							v_full := v_room <= 0;
							RETURN NEXT;
						END IF;
						v_left := v_left - 1;
					END LOOP;
				EXCEPTION WHEN numeric_value_out_of_range THEN -- by pgmq.read, which counts
					v_buried := CASE WHEN v_reading THEN pgwake_pgmq.bury_counted_out(v_queue) ELSE 0 END;
					IF v_buried = 0 THEN
						RAISE;
					END IF;
					v_again := v_buried < 1000; -- or the rest is for the next call, so that this one has an end
				END;
			END LOOP;
			IF v_spare <> '{}' THEN
				EXECUTE format('UPDATE pgmq.%I SET vt = clock_timestamp(), read_ct = read_ct - 1 WHERE msg_id = ANY ($1)', 'q_' || lower(v_queue)) USING v_spare;
			END IF;
		END IF;
		-- By pgmq's index on vt, of which min(vt) would read all while the planner believes that the queue is empty.
		EXECUTE format('SELECT vt FROM pgmq.%I WHERE vt < ''infinity'' ORDER BY vt LIMIT 1', 'q_' || lower(v_queue)) INTO v_earliest;
		v_next := least(v_next, v_earliest);
	END LOOP;
	queue_name := NULL;
	msg_id := NULL;
	read_ct := NULL;
	enqueued_at := NULL;
	message := NULL;
	headers := NULL;
	answered_at := clock_timestamp();
	-- Not each client has other instants: what is due after them never is.
	next_vt := CASE WHEN v_next < '0001-01-01 UTC' THEN answered_at WHEN v_next <= '9999-12-31 UTC' THEN v_next END;
	RETURN NEXT;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.receive(text, integer, integer) IS
	'Reads from the queues of a namespace, by pgmq.read. What nobody could read, since it is too large once it is written out, becomes a dead letter. One answer has at most 64 MiB, or one message; the rest is due as before. The last row is no message: it says when one is due next, or a lease ends, and what the clock shows.';

-- A receipt is a queue, a message and how often that was read: the next read makes another. A message that was given back has
-- receipts no more, although its vt is later and it was not read since: "back" says so.

-- Headers are whatever somebody has sent. Invariant: none of them makes a statement fail, which is one for many messages, and none of
-- them is taken for a note about this very message, such as one that came along from another queue or the archive: "of" says which
-- message a note is about, as nobody knows before it is sent.

CREATE OR REPLACE FUNCTION pgwake_pgmq.note(p_headers jsonb, p_id bigint, p_enqueued_at timestamptz) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE AS $$
	SELECT CASE
		WHEN jsonb_typeof(n) IS DISTINCT FROM 'object' THEN '{}'
		WHEN n -> 'of' = to_jsonb(o) THEN n -- not as text, which may be larger than any
		ELSE n - '{back,free,error,dead}'::text[]
	END || jsonb_build_object('of', o)
	  FROM (SELECT p_headers -> 'pgwake', p_id || '/' || extract(epoch FROM p_enqueued_at)) AS x(n, o)
$$;
COMMENT ON FUNCTION pgwake_pgmq.note(jsonb, bigint, timestamptz) IS
	'What headers say in pgwake, an object whatever they are, without what is about another message than this.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.free(p_note jsonb) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT CASE WHEN jsonb_typeof(p_note -> 'free') = 'number' AND (p_note -> 'free')::text ~ '^[0-9]{1,9}$' THEN (p_note ->> 'free')::integer ELSE 0 END
$$;
COMMENT ON FUNCTION pgwake_pgmq.free(jsonb) IS 'How many attempts a note takes out of the count.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.noted(p_headers jsonb, p_id bigint, p_enqueued_at timestamptz, p_more jsonb) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE AS $$
	SELECT CASE WHEN jsonb_typeof(p_headers) = 'object' THEN p_headers ELSE '{}' END
		|| jsonb_build_object('pgwake', pgwake_pgmq.note(p_headers, p_id, p_enqueued_at) || p_more)
$$;
COMMENT ON FUNCTION pgwake_pgmq.noted(jsonb, bigint, timestamptz, jsonb) IS 'The headers of a message, with more in its note.';

-- Those of several messages lock them in the order of their ids, whatever the caller's is, so that two callers do not wait for each
-- other. Who has waited for a lock looks at the message as it is then: a lease that was lost meanwhile does not hold.
--
-- Most of the time a queue is empty when it is analyzed, and the planner goes by that once it is full: in a join, a walk over all of it for each
-- message is as good as looking that up. So nothing is joined here with a queue, but for what LATERAL has looked up.

CREATE OR REPLACE FUNCTION pgwake_pgmq.ack(p_queue text, p_ids bigint[], p_reads integer[]) RETURNS TABLE (id bigint, reads integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF EXISTS (SELECT FROM pgmq.meta WHERE queue_name = p_queue) THEN
		RETURN QUERY EXECUTE format('WITH held AS MATERIALIZED (
				SELECT q.msg_id FROM pgmq.%1$I q
				 WHERE q.msg_id = ANY ($1) AND ((q.msg_id, q.read_ct) IN (SELECT * FROM unnest($1, $2))) IS TRUE -- which is no join
				   AND q.vt > clock_timestamp()
				   AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
				 ORDER BY q.msg_id FOR UPDATE
			)
			DELETE FROM pgmq.%1$I q WHERE q.msg_id = ANY (ARRAY(SELECT msg_id FROM held))
			RETURNING q.msg_id, q.read_ct', 'q_' || lower(p_queue)) USING p_ids, p_reads;
	END IF;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.ack(text, bigint[], integer[]) IS 'Deletes messages whose lease holds, by id and number of reads, and returns those.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.extend(p_queue text, p_ids bigint[], p_reads integer[], p_lease interval) RETURNS TABLE (id bigint, reads integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF EXISTS (SELECT FROM pgmq.meta WHERE queue_name = p_queue) THEN
		RETURN QUERY EXECUTE format('WITH held AS MATERIALIZED (
				SELECT q.msg_id FROM pgmq.%1$I q
				 WHERE q.msg_id = ANY ($1) AND ((q.msg_id, q.read_ct) IN (SELECT * FROM unnest($1, $2))) IS TRUE
				   AND q.vt > clock_timestamp()
				   AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
				 ORDER BY q.msg_id FOR UPDATE
			)
			UPDATE pgmq.%1$I q SET vt = clock_timestamp() + $3 WHERE q.msg_id = ANY (ARRAY(SELECT msg_id FROM held))
			RETURNING q.msg_id, q.read_ct', 'q_' || lower(p_queue)) USING p_ids, p_reads, p_lease;
	END IF;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.extend(text, bigint[], integer[], interval) IS 'Has the leases of messages end so much later than now, and returns those that held.';

-- A transaction may hold a message for long, such as that of a handler which deletes it to begin with: the leases of the others do not wait for it.

CREATE OR REPLACE FUNCTION pgwake_pgmq.extend_free(p_queue text, p_ids bigint[], p_reads integer[], p_lease interval)
RETURNS TABLE (id bigint, reads integer, extended boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF EXISTS (SELECT FROM pgmq.meta WHERE queue_name = p_queue) THEN
		RETURN QUERY EXECUTE format('WITH held AS MATERIALIZED (
				SELECT q.msg_id, q.read_ct
				  FROM unnest($1, $2) AS r(id, reads), LATERAL (
					SELECT msg_id, read_ct, headers, enqueued_at, vt FROM pgmq.%1$I WHERE msg_id = r.id OFFSET 0
				) AS q
				 WHERE q.read_ct = r.reads AND q.vt > clock_timestamp()
				   AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
			), free AS MATERIALIZED (
				SELECT q.msg_id FROM (SELECT * FROM held ORDER BY msg_id) AS held, LATERAL (
					SELECT q.msg_id FROM pgmq.%1$I q
					 WHERE q.msg_id = held.msg_id AND q.read_ct = held.read_ct AND q.vt > clock_timestamp()
					   AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
					   FOR UPDATE SKIP LOCKED
				) AS q
			), done AS (
				UPDATE pgmq.%1$I q SET vt = clock_timestamp() + $3 WHERE q.msg_id = ANY (ARRAY(SELECT msg_id FROM free))
				RETURNING q.msg_id
			)
			SELECT held.msg_id, held.read_ct, done.msg_id IS NOT NULL FROM held LEFT JOIN done ON done.msg_id = held.msg_id', 'q_' || lower(p_queue))
			USING p_ids, p_reads, p_lease;
	END IF;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.extend_free(text, bigint[], integer[], interval) IS
	'Has the leases of messages end so much later than now, but for those that another transaction has locked, which hold as they are, and returns both.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.nack(p_queue text, p_id bigint, p_reads integer, p_delay interval, p_free boolean, p_error text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_done bigint;
BEGIN
	IF EXISTS (SELECT FROM pgmq.meta WHERE queue_name = p_queue) THEN
		EXECUTE format('UPDATE pgmq.%I q SET vt = clock_timestamp() + $3, headers = pgwake_pgmq.noted(q.headers, q.msg_id, q.enqueued_at,
				jsonb_strip_nulls(jsonb_build_object(''back'', q.read_ct, ''error'', $5,
					''free'', CASE WHEN $4 THEN pgwake_pgmq.free(pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at)) + 1 END)))
			WHERE q.msg_id = $1 AND q.read_ct = $2 AND q.vt > clock_timestamp()
			  AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
			RETURNING q.msg_id', 'q_' || lower(p_queue)) INTO v_done USING p_id, p_reads, p_delay, p_free, p_error;
	END IF;
	RETURN v_done IS NOT NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.nack(text, bigint, integer, interval, boolean, text) IS
	'Gives a message back whose lease holds, due after a delay; p_free takes the attempt out of the count. False: the lease is lost.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.bury(p_queue text, p_id bigint, p_reason text, p_cause text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_queue text := 'q_' || lower(p_queue);
	v_archived bigint;
BEGIN
	BEGIN
		EXECUTE format('UPDATE pgmq.%I q SET headers = pgwake_pgmq.noted(q.headers, q.msg_id, q.enqueued_at,
				jsonb_build_object(''dead'', jsonb_build_object(''reason'', $2, ''cause'', $3, ''at'', clock_timestamp(), ''msg_id'', q.msg_id)))
			WHERE q.msg_id = $1', v_queue) USING p_id, p_reason, p_cause;
	EXCEPTION WHEN program_limit_exceeded OR statement_too_complex OR internal_error THEN -- no room for a note: it is archived as it is
		IF SQLSTATE = 'XX000' AND NOT starts_with(SQLERRM, 'invalid memory alloc request size') THEN
			RAISE;
		END IF;
	END;
	BEGIN
		PERFORM pgmq.archive(p_queue, p_id);
	EXCEPTION WHEN unique_violation THEN
		-- The archive has another message by that id. Invariant: both are kept. No sequence comes to an id below zero.
		FOR i IN 1..8 LOOP
			EXECUTE format('INSERT INTO pgmq.%I (msg_id, read_ct, enqueued_at, vt, message, headers)
				SELECT -1 - floor(random() * 4611686018427387904)::bigint, read_ct, enqueued_at, vt, message, headers FROM pgmq.%I WHERE msg_id = $1
				ON CONFLICT DO NOTHING RETURNING msg_id', 'a_' || lower(p_queue), v_queue) INTO v_archived USING p_id;
			EXIT WHEN v_archived IS NOT NULL;
		END LOOP;
		IF v_archived IS NULL THEN
			RAISE;
		END IF;
		EXECUTE format('DELETE FROM pgmq.%I WHERE msg_id = $1', v_queue) USING p_id;
	END;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.bury(text, bigint, text, text) IS 'Archives a message, which the caller has locked, with a reason and a cause among its headers. Where the archive has another by its id it is there by a negative one.';

CREATE OR REPLACE FUNCTION pgwake_pgmq.dead_letter(p_queue text, p_id bigint, p_reads integer, p_reason text, p_cause text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_held bigint;
BEGIN
	IF EXISTS (SELECT FROM pgmq.meta WHERE queue_name = p_queue) THEN
		EXECUTE format('SELECT q.msg_id FROM pgmq.%I q
			WHERE q.msg_id = $1 AND q.read_ct = $2 AND q.vt > clock_timestamp()
			  AND pgwake_pgmq.note(q.headers, q.msg_id, q.enqueued_at) -> ''back'' IS DISTINCT FROM to_jsonb(q.read_ct)
			FOR UPDATE', 'q_' || lower(p_queue)) INTO v_held USING p_id, p_reads;
		IF v_held IS NOT NULL THEN
			PERFORM pgwake_pgmq.bury(p_queue, p_id, p_reason, p_cause);
		END IF;
	END IF;
	RETURN v_held IS NOT NULL;
END
$$;
COMMENT ON FUNCTION pgwake_pgmq.dead_letter(text, bigint, integer, text, text) IS
	'Archives a message whose lease holds, with a reason and a cause among its headers. False: the lease is lost.';

-- No queue is created from here to the commit, so none is overlooked.
CREATE OR REPLACE TRIGGER pgwake_created AFTER INSERT ON pgmq.meta FOR EACH ROW EXECUTE FUNCTION pgwake_pgmq.on_create();
DO $$
DECLARE
	v_queue text;
BEGIN
	FOR v_queue IN SELECT queue_name FROM pgmq.meta LOOP
		PERFORM pgwake_pgmq.attach(v_queue);
	END LOOP;
END
$$;
