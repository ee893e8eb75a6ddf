-- $2 work items for each of the namespaces $1.
INSERT INTO worker_queue (name, namespace) SELECT 'measure', unnest($1::text[]) FROM generate_series(1, $2::integer)
