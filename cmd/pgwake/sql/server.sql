-- doctor, server: is it one that can be written to?
SELECT current_setting('server_version_num')::int / 10000, split_part(current_setting('server_version'), ' ', 1),
       pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
       current_setting('default_transaction_isolation'), current_setting('server_encoding'),
       pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
