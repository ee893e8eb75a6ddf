-- doctor, autovacuum: whether it is on, for which tables it is off, and which were robbed of the settings that they came with
SELECT current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on',
       ARRAY(SELECT c.relname::text FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind = 'r'
                AND EXISTS (SELECT FROM pg_options_to_table(c.reloptions) AS o
                             WHERE o.option_name = 'autovacuum_enabled' AND lower(o.option_value) IN ('false', 'off', 'no', '0'))
              ORDER BY c.relname),
       ARRAY(SELECT c.relname::text FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relname IN ('worker_queue', 'orchestrator_queue')
                AND NOT EXISTS (SELECT FROM pg_options_to_table(c.reloptions) AS o WHERE o.option_name = 'autovacuum_vacuum_scale_factor')
              ORDER BY c.relname)
