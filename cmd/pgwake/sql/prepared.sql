-- doctor, prepared transactions: those that wait for somebody to end them for longer than $1
SELECT p.gid, p.owner::text, extract(epoch FROM clock_timestamp() - p.prepared)::float8, age(p.transaction)
  FROM pg_prepared_xacts p
 WHERE p.database = current_database() AND p.prepared < clock_timestamp() - $1::interval
 ORDER BY p.prepared
