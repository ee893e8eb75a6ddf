-- From when steps of the latest $1 tasks were enqueued to when they were at work.
SELECT begun.created_at - enqueued.created_at
  FROM (SELECT task_id FROM tasks ORDER BY created_at DESC LIMIT $1) AS t
  JOIN steps s ON s.task_id = t.task_id
  JOIN step_transitions begun ON begun.step_id = s.step_id AND begun.to_state = 'in_progress'
  JOIN step_transitions enqueued ON enqueued.step_id = s.step_id AND enqueued.sort_key = begun.sort_key - 1
