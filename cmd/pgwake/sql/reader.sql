-- doctor, rights: does the role see everything and change nothing, and which of the functions that only read may it not call?
SELECT current_user::text,
       has_schema_privilege(quote_ident($1), 'USAGE') AND coalesce((
           SELECT bool_and(has_table_privilege(c.oid, 'SELECT')) AND NOT bool_or(has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE'))
             FROM pg_class c WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind IN ('r', 'p') AND NOT c.relispartition), false)
           -- or it is a node's, and the rights on tables were forgotten
           AND NOT EXISTS (SELECT FROM pg_proc p WHERE p.pronamespace = to_regnamespace(quote_ident($1)) AND p.proname = 'fetch_work' AND has_function_privilege(p.oid, 'EXECUTE')),
       ARRAY(SELECT p.proname::text FROM pg_proc p
              WHERE p.pronamespace = to_regnamespace(quote_ident($1))
                AND (p.provolatile <> 'v' OR p.proname IN ('read_history', 'resume_history', 'list_nodes', 'list_patterns', 'node_listens', 'log_xact', 'ask_nodes'))
                AND NOT has_function_privilege(p.oid, 'EXECUTE')
              ORDER BY p.proname)
