UPDATE queue
   SET visible_at = clock_timestamp() + interval '30 s', lock_token = gen_random_uuid()
 WHERE id = ANY (ARRAY(
       SELECT id FROM queue
        WHERE visible_at <= statement_timestamp()
        ORDER BY visible_at, id
        LIMIT 1 FOR UPDATE SKIP LOCKED))
RETURNING id, input::text
