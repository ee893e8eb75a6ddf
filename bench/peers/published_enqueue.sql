INSERT INTO queue (input, visible_at) VALUES ($1, coalesce($2, clock_timestamp()))
