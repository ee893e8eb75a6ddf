-- From the creation of the latest $1 tasks to their first turn.
SELECT turn.created_at - made.created_at
  FROM (SELECT task_id FROM tasks ORDER BY created_at DESC LIMIT $1) AS t
  JOIN task_transitions made ON made.task_id = t.task_id AND made.sort_key = 1
  JOIN task_transitions turn ON turn.task_id = t.task_id AND turn.sort_key = 2
