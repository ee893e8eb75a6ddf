UPDATE bare
   SET visible_at = clock_timestamp() + interval '30 s', lock_token = gen_random_uuid()
 WHERE id = ANY (ARRAY(
       SELECT id FROM bare
        WHERE visible_at <= statement_timestamp()
        ORDER BY visible_at, id
        LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING id, lock_token::text, input::text
