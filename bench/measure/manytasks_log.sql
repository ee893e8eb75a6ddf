-- Their transitions: all of the steps, and two of each task.
WITH task AS (
    INSERT INTO task_transitions (task_id, sort_key, from_state, to_state, created_at)
    SELECT t.task_id, k, CASE WHEN k = 2 THEN 'pending' END, CASE WHEN k = 2 THEN t.state ELSE 'pending' END, t.created_at
      FROM generate_series($1::bigint, $2::bigint) AS n
      JOIN tasks t ON t.task_id = ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid
     CROSS JOIN generate_series(1, 2) AS k)
INSERT INTO step_transitions (step_id, task_id, sort_key, from_state, to_state, created_at)
SELECT s.step_id, s.task_id, k, path.states[k - 1], path.states[k], s.created_at + (s.position * 10 + k) * interval '100 ms'
  FROM generate_series($1::bigint, $2::bigint) AS n
  JOIN steps s ON s.task_id = ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid
 CROSS JOIN LATERAL (SELECT CASE s.state
           WHEN 'complete' THEN ARRAY['pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'complete']
           WHEN 'in_progress' THEN ARRAY['pending', 'enqueued', 'in_progress']
           WHEN 'waiting_for_retry' THEN ARRAY['pending', 'enqueued', 'in_progress', 'enqueued_as_error_for_orchestration', 'waiting_for_retry']
           ELSE ARRAY['pending'] END AS states) AS path
 CROSS JOIN LATERAL generate_series(1, cardinality(path.states)) AS k
