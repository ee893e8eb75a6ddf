-- doctor, standbys: those without a slot that tell of a snapshot from more than $1 transactions ago (hot_standby_feedback), the oldest first
SELECT r.pid, coalesce(nullif(r.application_name, ''), host(r.client_addr), 'a standby'), age(r.backend_xmin)
  FROM pg_stat_replication r
 WHERE age(r.backend_xmin) > $1::bigint
 ORDER BY age(r.backend_xmin) DESC
