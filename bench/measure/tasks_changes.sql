-- When the latest $1 tasks were created, or, if $2 is a state, when steps of theirs came into it.
SELECT t.task_id::text, coalesce(step.created_at, made.created_at)
  FROM (SELECT task_id FROM tasks ORDER BY created_at DESC LIMIT $1) AS t
  JOIN task_transitions made ON made.task_id = t.task_id AND made.sort_key = 1
  LEFT JOIN steps s ON s.task_id = t.task_id AND $2 <> ''
  LEFT JOIN step_transitions step ON step.step_id = s.step_id AND step.to_state = $2
 WHERE ($2 = '') = (step.step_id IS NULL)
