-- tail: a number above those of all transactions that have begun to write by now. The upper end of a snapshot is above those alone that have ended.
SELECT pg_current_xact_id()::text::bigint
