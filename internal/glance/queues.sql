-- What is queued, dead or paused, and what has come and gone since statistics began. $1 is the schema.
SELECT (SELECT coalesce(json_agg(d), '[]') FROM {schema}.queue_depths() d),
       (SELECT coalesce(sum(l.letters), 0)::bigint FROM {schema}.count_dead_letters() l),
       ARRAY(SELECT q || ' ' || n FROM unnest(ARRAY['worker', 'orchestrator']) q, {schema}.list_paused(q) n),
       t.came, t.went
  FROM (SELECT coalesce(sum(s.n_tup_ins), 0)::bigint AS came, coalesce(sum(s.n_tup_del), 0)::bigint AS went FROM pg_stat_all_tables s
         WHERE s.schemaname = $1 AND s.relname IN ('worker_queue', 'orchestrator_queue')) t
