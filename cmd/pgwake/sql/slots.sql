-- doctor, replication slots: those that nobody reads, and that keep something nevertheless
SELECT s.slot_name::text, coalesce(greatest(age(s.xmin), age(s.catalog_xmin)), 0),
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::bigint
  FROM pg_replication_slots s
 WHERE NOT s.active AND (s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL OR s.restart_lsn IS NOT NULL)
 ORDER BY s.slot_name
