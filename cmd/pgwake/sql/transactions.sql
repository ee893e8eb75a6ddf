-- doctor, transactions: sessions that work on one for longer than $1, the oldest first
SELECT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''),
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8, coalesce(greatest(age(a.backend_xmin), age(a.backend_xid)), 0)
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
   AND a.state NOT LIKE 'idle in transaction%' AND a.xact_start < clock_timestamp() - $1::interval
 ORDER BY a.xact_start
