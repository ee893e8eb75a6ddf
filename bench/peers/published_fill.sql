INSERT INTO queue (input) SELECT n::text::json FROM generate_series($1::bigint, $1::bigint + $2::bigint - 1) AS n
