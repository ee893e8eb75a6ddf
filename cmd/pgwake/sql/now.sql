-- tail: from which transaction on something is not committed yet, and the clock
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint, clock_timestamp()
