-- The worker queue without its trigger.
CREATE TABLE bare_queue (LIKE worker_queue INCLUDING ALL)
