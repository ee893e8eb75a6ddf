UPDATE bare SET visible_at = clock_timestamp() WHERE id = $1
