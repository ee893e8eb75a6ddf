-- Claims the first due row as fetch_work does, and nothing else of what that does.
UPDATE bare_queue
   SET visible_at = clock_timestamp() + interval '30 s', lock_token = gen_random_uuid(), attempt_count = attempt_count + 1
 WHERE id = ANY (ARRAY(
       SELECT id FROM bare_queue
        WHERE -priority = 0 AND tag = '' AND session_id IS NULL AND visible_at <= statement_timestamp()
        ORDER BY visible_at, id
        LIMIT 1 FOR UPDATE SKIP LOCKED))
RETURNING id
