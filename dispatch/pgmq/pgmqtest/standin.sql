-- A stand-in for pgmq, for tests and demonstrations on servers that do not have it: its tables, and those of its functions that the
-- documentation of version 1.5 gives and package pgmq uses. It is none of pgmq's code.

CREATE SCHEMA pgmq;

CREATE TABLE pgmq.meta (
	queue_name     varchar NOT NULL UNIQUE,
	is_partitioned boolean NOT NULL,
	is_unlogged    boolean NOT NULL,
	created_at     timestamptz NOT NULL DEFAULT now()
);

CREATE TYPE pgmq.message_record AS (
	msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb
);

CREATE FUNCTION pgmq.create(queue_name text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	q text := quote_ident('q_' || lower(queue_name));
	a text := quote_ident('a_' || lower(queue_name));
BEGIN
	EXECUTE 'CREATE TABLE IF NOT EXISTS pgmq.' || q || ' (msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, read_ct int NOT NULL DEFAULT 0,
		enqueued_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb, headers jsonb)';
	EXECUTE 'CREATE TABLE IF NOT EXISTS pgmq.' || a || ' (msg_id bigint PRIMARY KEY, read_ct int NOT NULL DEFAULT 0,
		enqueued_at timestamptz NOT NULL DEFAULT now(), archived_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb, headers jsonb)';
	EXECUTE 'CREATE INDEX IF NOT EXISTS ' || quote_ident('q_' || lower(queue_name) || '_vt_idx') || ' ON pgmq.' || q || ' (vt)';
	INSERT INTO pgmq.meta AS m VALUES ($1, false, false) ON CONFLICT DO NOTHING;
END
$$;

CREATE FUNCTION pgmq.send_batch(queue_name text, msgs jsonb[], headers jsonb[], delay timestamptz) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY EXECUTE 'INSERT INTO pgmq.' || quote_ident('q_' || lower(queue_name)) || ' (vt, message, headers)
		SELECT $3, m, h FROM unnest($1, $2) AS x(m, h) RETURNING msg_id' USING msgs, headers, delay;
END
$$;

CREATE FUNCTION pgmq.send(queue_name text, msg jsonb, headers jsonb, delay timestamptz) RETURNS SETOF bigint LANGUAGE sql AS
	'SELECT pgmq.send_batch($1, ARRAY[$2], ARRAY[$3], $4)';
CREATE FUNCTION pgmq.send(queue_name text, msg jsonb, delay integer) RETURNS SETOF bigint LANGUAGE sql AS
	'SELECT pgmq.send($1, $2, NULL::jsonb, clock_timestamp() + make_interval(secs => $3))';
CREATE FUNCTION pgmq.send(queue_name text, msg jsonb) RETURNS SETOF bigint LANGUAGE sql AS
	'SELECT pgmq.send($1, $2, 0)';

CREATE FUNCTION pgmq.read(queue_name text, vt integer, qty integer, conditional jsonb DEFAULT '{}') RETURNS SETOF pgmq.message_record LANGUAGE plpgsql AS $$
DECLARE
	q text := 'pgmq.' || quote_ident('q_' || lower(queue_name));
BEGIN
	RETURN QUERY EXECUTE 'UPDATE ' || q || ' AS q SET read_ct = q.read_ct + 1, vt = clock_timestamp() + make_interval(secs => $2)
		WHERE q.msg_id = ANY (ARRAY(SELECT d.msg_id FROM ' || q || ' AS d WHERE d.vt <= clock_timestamp() AND ($3 IS NULL OR d.message @> $3)
			ORDER BY d.msg_id LIMIT $1 FOR UPDATE SKIP LOCKED))
		RETURNING q.msg_id, q.read_ct, q.enqueued_at, q.vt, q.message, q.headers' USING qty, vt,
		nullif(conditional, '{}');
END
$$;

CREATE FUNCTION pgmq.set_vt(queue_name text, msg_id bigint, vt integer) RETURNS SETOF pgmq.message_record LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY EXECUTE 'UPDATE pgmq.' || quote_ident('q_' || lower(queue_name)) || ' SET vt = now() + make_interval(secs => $2) WHERE msg_id = $1
		RETURNING msg_id, read_ct, enqueued_at, vt, message, headers' USING msg_id, vt;
END
$$;

CREATE FUNCTION pgmq.delete(queue_name text, msg_id bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	gone bigint;
BEGIN
	EXECUTE 'DELETE FROM pgmq.' || quote_ident('q_' || lower(queue_name)) || ' WHERE msg_id = $1 RETURNING msg_id' INTO gone USING msg_id;
	RETURN gone IS NOT NULL;
END
$$;

CREATE FUNCTION pgmq.archive(queue_name text, msg_id bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	gone bigint;
BEGIN
	EXECUTE 'WITH d AS (DELETE FROM pgmq.' || quote_ident('q_' || lower(queue_name)) || ' WHERE msg_id = $1 RETURNING *)
		INSERT INTO pgmq.' || quote_ident('a_' || lower(queue_name)) || ' (msg_id, read_ct, enqueued_at, vt, message, headers)
		SELECT msg_id, read_ct, enqueued_at, vt, message, headers FROM d RETURNING msg_id' INTO gone USING msg_id;
	RETURN gone IS NOT NULL;
END
$$;
