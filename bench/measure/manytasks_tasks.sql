-- Tasks $1 to $2 of the definition 'many', the older the smaller the number: half are complete, a quarter are at work, a tenth wait for the next
-- attempt of a step, and a tenth are ready, half of these not begun. The rest wait for something else.
INSERT INTO tasks (task_id, task_definition_id, namespace, state, sort_key, priority_key, next_ready_at, total_steps, completed_steps, completed_at, correlation_id,
                   created_at, state_entered_at)
SELECT t.id, d.task_definition_id, d.namespace, t.state, 2, task_priority_key(d.namespace, 0, 0, t.at),
       CASE WHEN t.kind IN (15, 16) THEN now() + interval '1 h' WHEN t.kind >= 18 THEN t.at END, 10, CASE WHEN t.kind < 10 THEN 10 WHEN t.kind <> 18 THEN 4 ELSE 0 END,
       CASE WHEN t.kind < 10 THEN t.at + interval '1 min' END, t.id, t.at, t.at
  FROM (SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid AS id, n % 20 AS kind, now() - interval '1 d' + n * interval '50 ms' AS at,
               CASE WHEN n % 20 < 10 THEN 'complete' WHEN n % 20 < 15 THEN 'steps_in_process' WHEN n % 20 < 17 THEN 'waiting_for_retry'
                    WHEN n % 20 = 18 THEN 'pending' ELSE 'waiting_for_dependencies' END AS state
          FROM generate_series($1::bigint, $2::bigint) AS n) AS t
 CROSS JOIN task_definitions d WHERE d.name = 'many'
