-- doctor, dead tuples: tables with more than $2 of them, and more than half as many as live ones
SELECT s.relname::text, s.n_live_tup, s.n_dead_tup, extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8
  FROM pg_stat_all_tables s
 WHERE s.schemaname = $1 AND s.n_dead_tup > $2 AND s.n_dead_tup > s.n_live_tup / 2
 ORDER BY s.n_dead_tup DESC
