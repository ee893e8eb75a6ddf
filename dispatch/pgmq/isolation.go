package pgmq

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: at which isolation level are the verbs?
//
// At READ COMMITTED, whatever the role's default is: they wait for others and go by what those have left, which another level does not see,
// or has the statement fail for. Where it is the default, each is one round trip.

// querier is a connection, or a transaction on it.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// askIsolation learns what the default is, and fails with pgwake.ErrConfig if the sessions of the pool cannot be read.
func (s *Stream) askIsolation(ctx context.Context) error {
	var isolation string
	err := conns.Do(ctx, s.pool, func(conn *pgxpool.Conn) error {
		if garbled := conns.Illegible(conn.Conn().PgConn(), conn.Conn().Config().DefaultQueryExecMode); garbled != "" {
			return fmt.Errorf("%w: the pool's sessions cannot be read: %s. Leave that out of the settings of its connections, and prepare the pool with pgwake.TunePool", pgwake.ErrConfig, garbled)
		}
		return conn.QueryRow(ctx, `SELECT pg_catalog.current_setting('default_transaction_isolation')`).Scan(&isolation)
	})
	s.readCommitted = isolation == string(pgx.ReadCommitted)
	return err
}

// do has verb use a connection of the pool.
func (s *Stream) do(ctx context.Context, verb func(querier) error) error {
	return conns.Do(ctx, s.pool, func(conn *pgxpool.Conn) error { return s.atReadCommitted(ctx, conn, verb) })
}

func (s *Stream) atReadCommitted(ctx context.Context, conn *pgxpool.Conn, verb func(querier) error) error {
	if s.readCommitted {
		return verb(conn)
	}
	return pgx.BeginTxFunc(ctx, conns.On{Conn: conn}, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return verb(tx) })
}
