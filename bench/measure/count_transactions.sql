-- Transactions in database $1.
SELECT 'transactions', xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1
