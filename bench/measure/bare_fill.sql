INSERT INTO bare (input) SELECT n::text::json FROM generate_series(1, $1) AS n
