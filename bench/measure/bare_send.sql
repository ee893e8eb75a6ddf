WITH added AS (
    INSERT INTO bare (input) VALUES ('1') RETURNING id
)
SELECT pg_notify($1, id::text)::text, id FROM added
