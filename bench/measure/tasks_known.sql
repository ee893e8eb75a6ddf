-- From the results of steps of the latest $1 tasks to the turns that know of them.
SELECT known.created_at - finished.created_at
  FROM (SELECT task_id FROM tasks ORDER BY created_at DESC LIMIT $1) AS t
  JOIN steps s ON s.task_id = t.task_id
  JOIN step_transitions known ON known.step_id = s.step_id AND known.to_state = 'complete'
  JOIN step_transitions finished ON finished.step_id = s.step_id AND finished.sort_key = known.sort_key - 1
