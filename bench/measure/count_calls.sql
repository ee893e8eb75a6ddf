-- Calls by text in this database, without those of this very query and its kind. $1: what a statement must
-- contain to be counted, '' for nothing.
SELECT s.query, sum(s.calls)::bigint
  FROM pg_stat_statements s
  JOIN pg_database d ON d.oid = s.dbid
 WHERE d.datname = current_database() AND s.toplevel
   AND position('pg_stat_statements' IN s.query) = 0 AND position($1::text IN s.query) > 0
 GROUP BY s.query
