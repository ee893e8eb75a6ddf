UPDATE next_runs n SET next_at = n.next_at + $1::interval
  FROM (SELECT id, next_at AS due FROM next_runs WHERE next_at <= clock_timestamp() ORDER BY next_at LIMIT 1000 FOR UPDATE SKIP LOCKED) d
 WHERE n.id = d.id
RETURNING d.due
