-- doctor, replication slots: those that nobody reads, and that keep something nevertheless; and those whose reader, a standby that tells of its
-- snapshots, keeps what died more than $1 transactions ago. What is kept of the catalogs is no matter while somebody reads.
SELECT s.slot_name::text, s.active,
       CASE WHEN s.active THEN age(s.xmin) ELSE coalesce(greatest(age(s.xmin), age(s.catalog_xmin)), 0) END,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::bigint
  FROM pg_replication_slots s
 WHERE (NOT s.active AND (s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL OR s.restart_lsn IS NOT NULL))
    OR (s.active AND age(s.xmin) > $1::bigint)
 ORDER BY s.active, s.slot_name
