DELETE FROM bare_queue WHERE id = $1
