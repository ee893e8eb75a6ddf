-- doctor, connections: what is used, and the least of what the server, the database and the role admit
SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL), -- which everybody may see, and backend_type not
       current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
           - coalesce(current_setting('reserved_connections', true)::bigint, 0),
       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()),
       (SELECT datconnlimit::bigint FROM pg_database WHERE datname = current_database()),
       (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user),
       (SELECT rolconnlimit::bigint FROM pg_roles WHERE rolname = current_user)
