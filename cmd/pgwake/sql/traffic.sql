-- top: what has come and gone since statistics began, in the worker queue and in that of messages
SELECT s.relname::text, s.n_tup_ins, s.n_tup_del FROM pg_stat_all_tables s
 WHERE s.schemaname = $1 AND s.relname IN ('worker_queue', 'orchestrator_queue')
