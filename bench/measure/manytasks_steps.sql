-- Their steps, ten of each.
INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state, sort_key, attempts, unmet, passed_on, processed_at, next_attempt_at, created_at)
SELECT ('00000000-0000-7000-9' || lpad(to_hex(s.position), 3, '0') || '-' || lpad(to_hex(n), 12, '0'))::uuid, t.task_id, s.step_definition_id, s.position, s.name,
       CASE WHEN n % 20 < 10 OR s.position < 5 AND n % 20 <> 18 THEN 'complete'
            WHEN s.position = 5 AND n % 20 < 15 THEN 'in_progress'
            WHEN s.position = 5 AND n % 20 < 17 THEN 'waiting_for_retry' ELSE 'pending' END,
       CASE WHEN n % 20 < 10 OR s.position < 5 AND n % 20 <> 18 THEN 5 WHEN s.position = 5 AND n % 20 < 15 THEN 3
            WHEN s.position = 5 AND n % 20 < 17 THEN 5 ELSE 1 END,
       CASE WHEN n % 20 < 10 OR s.position < 5 AND n % 20 <> 18 OR s.position = 5 AND n % 20 < 17 THEN 1 ELSE 0 END,
       CASE WHEN n % 20 < 10 OR s.position < 6 AND n % 20 <> 18 THEN 0 ELSE s.parents END,
       n % 20 < 10 OR s.position < 5 AND n % 20 <> 18,
       CASE WHEN n % 20 < 10 OR s.position < 5 AND n % 20 <> 18 THEN t.created_at + s.position * interval '1 s' END,
       CASE WHEN s.position = 5 AND n % 20 IN (15, 16) THEN now() + interval '1 h' END, t.created_at
  FROM generate_series($1::bigint, $2::bigint) AS n
  JOIN tasks t ON t.task_id = ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid
  JOIN step_definitions s ON s.task_definition_id = t.task_definition_id
