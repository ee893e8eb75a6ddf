-- doctor, index bloat: indexes of more than $2 bytes that are more than five times as large as their rows need. An entry takes
-- its columns (24 bytes for one of which the statistics know nothing) and 16 bytes, and pages are two thirds full. All rows count, so
-- the estimate is too high for partial indexes, and the check so much the more careful. GIN and the like pack entries: left out.
SELECT c.relname::text, pg_relation_size(c.oid), (s.n_live_tup * n.needed)::bigint
  FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_am m ON m.oid = c.relam AND m.amname = 'btree'
  JOIN pg_stat_all_tables s ON s.relid = i.indrelid
 CROSS JOIN LATERAL (
       SELECT (16 + sum(coalesce(t.avg_width, 24))) * 1.5 AS needed
         FROM unnest(i.indkey::smallint[]) AS k (number)
         LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
         LEFT JOIN pg_stats t ON t.schemaname = s.schemaname AND t.tablename = s.relname AND t.attname = a.attname) AS n
 WHERE s.schemaname = $1 AND pg_relation_size(c.oid) > $2 AND pg_relation_size(c.oid) > 5 * s.n_live_tup * n.needed
 ORDER BY pg_relation_size(c.oid) DESC
