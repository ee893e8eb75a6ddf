-- doctor, idle in transaction: sessions that have been so for longer than $1, the oldest first
SELECT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''),
       extract(epoch FROM clock_timestamp() - a.state_change)::float8, coalesce(greatest(age(a.backend_xmin), age(a.backend_xid)), 0)
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
   AND a.state LIKE 'idle in transaction%' AND a.state_change < clock_timestamp() - $1::interval
 ORDER BY a.state_change
