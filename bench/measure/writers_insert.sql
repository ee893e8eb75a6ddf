INSERT INTO bare_queue (name, input) VALUES ('measure', $1) RETURNING id
