-- doctor, rights: what the role may not do that a Provider does, one row for each kind of thing. The tables of versions it only reads,
-- partitions it reaches by their table, and triggers fire without a right to call their functions.
SELECT 'USAGE on the schema', array[quote_ident($1)], format('GRANT USAGE ON SCHEMA %I TO %I;', $1, current_user)
 WHERE NOT has_schema_privilege(quote_ident($1), 'USAGE')
UNION ALL
SELECT r.right_name || ' on tables', array_agg(c.relname::text ORDER BY c.relname),
       format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO %I;', $1, current_user)
           || coalesce((SELECT format(' REVOKE INSERT, UPDATE, DELETE ON %s FROM %I;', string_agg(format('%I.%I', $1, v.relname), ', ' ORDER BY v.relname), current_user)
                          FROM pg_class v WHERE v.relnamespace = to_regnamespace(quote_ident($1)) AND v.relkind = 'r' AND v.relname LIKE '%\_migrations'
                        HAVING count(*) > 0), '')
  FROM pg_class c CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS r (right_name)
 WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND (r.right_name = 'SELECT' OR c.relname NOT LIKE '%\_migrations') AND NOT has_table_privilege(c.oid, r.right_name)
 GROUP BY r.right_name
UNION ALL
SELECT 'USAGE on sequences', array_agg(c.relname::text ORDER BY c.relname),
       format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA %I TO %I;', $1, current_user)
  FROM pg_class c
 WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND CASE WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE') END -- which fails for anything else
HAVING count(*) > 0
UNION ALL
SELECT 'EXECUTE on functions', array_agg(p.proname::text ORDER BY p.proname),
       format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA %I TO %I;', $1, current_user)
           || coalesce((SELECT format(' REVOKE EXECUTE ON FUNCTION %s FROM %I;', string_agg(format('%I.%I', $1, t.proname), ', ' ORDER BY t.proname), current_user)
                          FROM pg_proc t WHERE t.pronamespace = to_regnamespace(quote_ident($1)) AND t.prorettype = 'trigger'::regtype
                        HAVING count(*) > 0), '')
  FROM pg_proc p
 WHERE p.pronamespace = to_regnamespace(quote_ident($1)) AND p.prorettype <> 'trigger'::regtype AND NOT has_function_privilege(p.oid, 'EXECUTE')
HAVING count(*) > 0
ORDER BY 1
