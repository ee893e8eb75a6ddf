-- $2 work items, numbered from $1 and due after so long ($3), leased or not ($4), of which nobody is told.
INSERT INTO worker_queue (name, input, visible_at, lock_token, attempt_count)
SELECT 'measure', n::text::json, clock_timestamp() + $3::interval, CASE WHEN $4::bool THEN gen_random_uuid() END, $4::bool::int
  FROM generate_series($1::bigint, $1::bigint + $2::bigint - 1) AS n
