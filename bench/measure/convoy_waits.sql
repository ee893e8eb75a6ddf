-- Which backends with the application_name $1 wait for a heavyweight lock: for which kind, in which function, and how many.
SELECT wait_event, coalesce(substring(query FROM '\.(\w+)"?\('), 'another statement'), count(*)
  FROM pg_stat_activity
 WHERE application_name = $1 AND wait_event_type = 'Lock'
 GROUP BY 1, 2
