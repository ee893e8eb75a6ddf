-- Schedules that are not due for months.
SELECT count(schedule_task(NULL, 'idle-' || i, CASE WHEN extract(month FROM now()) BETWEEN 4 AND 9 THEN '0 3 1 1 *' ELSE '0 3 1 7 *' END, 'measure'))
FROM generate_series(1, $1::integer) AS i
