-- tail: what the event log adds to the numbers of transactions, since it came from a server whose numbers were higher
SELECT {schema}.log_xact('0')::text::bigint
