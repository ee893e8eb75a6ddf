package pgwake

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// This file answers: how do the Tx verbs join a transaction of database/sql?

// WrapSQLTx lets the Tx verbs join a transaction of database/sql, and so of what is built on that, such as sqlc, GORM
// or bun:
//
//	_, err = p.EnqueueForWorkerTx(ctx, pgwake.WrapSQLTx(tx), item, nil)
//
// The driver may be any for PostgreSQL that writes parameters as $1. The transaction is to be on the database of the
// Provider and, as for any Tx verb, READ COMMITTED (see Provider). It stays the caller's: Commit and
// Rollback of what WrapSQLTx returns fail. So does everything else that no verb needs; LargeObjects must not be used,
// and Conn is nil. For nil it returns nil. Like the transaction it is safe for concurrent use.
func WrapSQLTx(tx *sql.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return sqlTx{tx}
}

var (
	errNotOurs     = errors.New("the transaction is ended by whoever began it with database/sql")
	errUnsupported = errors.New("not supported on a transaction of database/sql")
)

// sqlTx sends every argument as a string in PostgreSQL's text format, arrays included, and leaves its type to the
// server: no driver knows better, and many know less.
type sqlTx struct{ tx *sql.Tx }

func (t sqlTx) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	texts, err := textArgs(args)
	if err != nil {
		return &sqlRows{err: err}, err
	}
	rows, err := t.tx.QueryContext(ctx, query, texts...)
	if err != nil {
		return &sqlRows{err: err}, err
	}
	return &sqlRows{rows: rows}, nil
}

func (t sqlTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	rows, _ := t.Query(ctx, query, args...) // Scan returns the error
	return sqlRow{rows}
}

func (t sqlTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	texts, err := textArgs(args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	result, err := t.tx.ExecContext(ctx, query, texts...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	n, err := result.RowsAffected()
	return countTag(n), err
}

func (sqlTx) Commit(context.Context) error   { return errNotOurs }
func (sqlTx) Rollback(context.Context) error { return errNotOurs }

func (sqlTx) Begin(context.Context) (pgx.Tx, error) {
	return nil, fmt.Errorf("begin a nested transaction: %w", errUnsupported)
}

func (sqlTx) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, fmt.Errorf("copy: %w", errUnsupported)
}

func (sqlTx) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, fmt.Errorf("prepare: %w", errUnsupported)
}

func (sqlTx) SendBatch(context.Context, *pgx.Batch) pgx.BatchResults { return noBatch{} }
func (sqlTx) LargeObjects() pgx.LargeObjects                         { return pgx.LargeObjects{} }
func (sqlTx) Conn() *pgx.Conn                                        { return nil }

// noBatch are the results of a batch that was not sent.
type noBatch struct {
	pgx.BatchResults // nil, for methods that pgx may add: so that its users can have a newer one than this was written for
}

var errNoBatch = fmt.Errorf("send a batch: %w", errUnsupported)

func (noBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, errNoBatch }
func (noBatch) Query() (pgx.Rows, error)         { return &sqlRows{err: errNoBatch}, errNoBatch }
func (noBatch) QueryRow() pgx.Row                { return sqlRow{&sqlRows{err: errNoBatch}} }
func (noBatch) Close() error                     { return errNoBatch }
func (noBatch) Tx() pgx.Tx                       { return nil }

// textArgs returns the arguments as strings, and NULL as nil.
func textArgs(args []any) ([]any, error) {
	m := pgtype.NewMap() // it is not safe for concurrent use
	texts := make([]any, len(args))
	for i, arg := range args {
		if arg == nil {
			continue
		}
		t, ok := m.TypeForValue(arg)
		if !ok {
			return nil, fmt.Errorf("argument %d is a %T, which has no counterpart in PostgreSQL", i+1, arg)
		}
		text, err := m.Encode(t.OID, pgtype.TextFormatCode, arg, nil)
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}
		if text != nil {
			texts[i] = string(text)
		}
	}
	return texts, nil
}

// sqlRows are *sql.Rows with the manners of pgx.Rows. Without rows there is an error.
type sqlRows struct {
	pgx.Rows // as in noBatch

	rows *sql.Rows
	err  error // the first
	read int64
}

func (r *sqlRows) Next() bool {
	if r.err != nil || !r.rows.Next() {
		r.Close()
		return false
	}
	r.read++
	return true
}

func (r *sqlRows) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	to := make([]any, len(dest))
	for i, d := range dest {
		switch d := d.(type) {
		case nil:
			to[i] = new(any)
		case *pgtype.UUID:
			to[i] = (*uuidText)(d)
		default:
			to[i] = d
		}
	}
	r.fail(r.rows.Scan(to...))
	if r.err != nil {
		r.Close()
	}
	return r.err
}

func (r *sqlRows) Values() ([]any, error) {
	values := make([]any, len(r.FieldDescriptions()))
	dest := make([]any, len(values))
	for i := range values {
		dest[i] = &values[i]
	}
	return values, r.Scan(dest...)
}

func (r *sqlRows) Close() {
	if r.rows != nil {
		r.fail(r.rows.Close())
		r.fail(r.rows.Err())
	}
}

func (r *sqlRows) Err() error {
	if r.rows != nil {
		r.fail(r.rows.Err())
	}
	return r.err
}

func (r *sqlRows) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// FieldDescriptions has the names alone.
func (r *sqlRows) FieldDescriptions() []pgconn.FieldDescription {
	if r.rows == nil {
		return nil
	}
	names, err := r.rows.Columns()
	r.fail(err)
	fields := make([]pgconn.FieldDescription, len(names))
	for i, name := range names {
		fields[i].Name = name
	}
	return fields
}

func (r *sqlRows) CommandTag() pgconn.CommandTag { return countTag(r.read) }
func (*sqlRows) RawValues() [][]byte             { return nil }
func (*sqlRows) Conn() *pgx.Conn                 { return nil }
func (*sqlRows) TypeMap() *pgtype.Map            { return nil }

// countTag is a command tag that knows the number of rows alone.
func countTag(rows int64) pgconn.CommandTag {
	return pgconn.NewCommandTag(strconv.FormatInt(rows, 10))
}

type sqlRow struct{ rows pgx.Rows }

func (r sqlRow) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// uuidText is a pgtype.UUID that comes as bytes from drivers that do not know the type.
type uuidText pgtype.UUID

// Scan implements sql.Scanner.
func (u *uuidText) Scan(src any) error {
	if text, ok := src.([]byte); ok {
		src = string(text)
	}
	return (*pgtype.UUID)(u).Scan(src)
}
