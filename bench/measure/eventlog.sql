-- Events $1 to $2 of $3, spread over the first four weeks of this month, of a hundred types.
INSERT INTO event_log (namespace, event_type, payload, emitted_at, producer_node_id)
SELECT 'default', 'measure.type' || i % 100, jsonb_build_object('order', i, 'customer', 'customer-' || i % 1000, 'total', 100),
       date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' + i * (interval '28 days' / ($3::bigint + 1)), 'measure'
  FROM generate_series($1::bigint, $2::bigint) AS i
