package taskgraph

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how do the verbs reach the database?

// ErrConflict: what is to be created exists already, and is another: a version of a definition, or the task of an idempotency key.
// Nothing was written.
var ErrConflict = errors.New("exists already, and is another")

const stateConflict = "PW007"

// Graph is the verbs of the task graph, each of which is one SQL function and one round trip. An Engine has them; WithTx has them
// take part in a transaction. Safe for concurrent use as far as the transaction is.
//
// Errors are a *pgwake.Error around pgwake.ErrInvalid for arguments that break a rule, pgwake.ErrNotFound for what does not exist,
// ErrConflict, and the conditions that package pgwake has.
type Graph struct {
	p         *pgwake.Provider
	tx        pgx.Tx // nil: each verb by itself
	in        string // the quoted schema, and a dot
	headers   func(context.Context) *string
	maxResult int // Config.MaxResult
}

// WithTx returns the verbs as part of a transaction on the Provider's database, which is to be READ COMMITTED: what they do takes
// effect, and wakes whoever is to go on, when that commits.
func (g *Graph) WithTx(tx pgx.Tx) *Graph {
	in := *g
	in.tx = tx
	return &in
}

// do carries a call of a function out as a verb. Those that only read wake no node that hibernates.
func (g *Graph) do(ctx context.Context, op, function string, statement func(context.Context, pgwake.Querier) error) error {
	if g.tx != nil {
		return failed(op, g.p.DoTx(ctx, g.tx, op, statement))
	}
	var feeds []pgwake.Queue
	if verb, _, _ := strings.Cut(function, "_"); !slices.Contains([]string{"get", "list", "calculate", "check", "find", "read"}, verb) {
		feeds = []pgwake.Queue{pgwake.Orchestrator, pgwake.Worker}
	}
	return failed(op, g.p.Do(ctx, op, statement, feeds...))
}

// call is a call of an SQL function.
func (g *Graph) call(function string, args int) string {
	var text strings.Builder
	text.WriteString(g.in + function + "(")
	for i := range args {
		if i > 0 {
			text.WriteString(", ")
		}
		text.WriteString("$" + strconv.Itoa(i+1))
	}
	return text.String() + ")"
}

// rows calls an SQL function that returns rows, each of which becomes a T: columns are asked for by the db tags of its fields, so that a
// newer schema may have more of them.
func rows[T any](ctx context.Context, g *Graph, op, function string, args ...any) ([]T, error) {
	return collect(ctx, g, op, function, "SELECT "+fieldColumns(reflect.TypeFor[T]())+" FROM "+g.call(function, len(args)), pgx.RowToStructByName[T], args)
}

func collect[T any](ctx context.Context, g *Graph, op, function, sql string, to pgx.RowToFunc[T], args []any) (all []T, err error) {
	err = g.do(ctx, op, function, func(ctx context.Context, q pgwake.Querier) error {
		found, err := q.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(found, to)
		return err
	})
	return all, err
}

// fieldColumns are those of the db tags of a struct, in its order; an embedded struct is its fields.
func fieldColumns(of reflect.Type) string {
	var names []string
	for i := range of.NumField() {
		if f := of.Field(i); f.Anonymous {
			names = append(names, fieldColumns(f.Type))
		} else {
			names = append(names, f.Tag.Get("db"))
		}
	}
	return strings.Join(names, ", ")
}

// row is rows for a function that returns one. pgwake.ErrNotFound if it returns none.
func row[T any](ctx context.Context, g *Graph, op, function string, args ...any) (T, error) {
	all, err := rows[T](ctx, g, op, function, args...)
	var none T
	switch {
	case err != nil:
		return none, err
	case len(all) == 0:
		return none, failed(op, fmt.Errorf("%w: %v", pgwake.ErrNotFound, args[0]))
	}
	return all[0], nil
}

// values calls an SQL function that returns a set of single values.
func values[T any](ctx context.Context, g *Graph, op, function string, args ...any) ([]T, error) {
	return collect(ctx, g, op, function, "SELECT "+g.call(function, len(args)), pgx.RowTo[T], args)
}

// exec calls an SQL function whose result is of no interest.
func exec(ctx context.Context, g *Graph, op, function string, args ...any) error {
	return g.do(ctx, op, function, func(ctx context.Context, q pgwake.Querier) error {
		_, err := q.Exec(ctx, "SELECT "+g.call(function, len(args)), args...)
		return err
	})
}

// value calls an SQL function that returns one value.
func value[T any](ctx context.Context, g *Graph, op, function string, args ...any) (v T, err error) {
	all, err := values[T](ctx, g, op, function, args...)
	if err != nil {
		return v, err
	}
	return all[0], nil
}

func failed(op string, err error) error {
	err = pgwake.WrapError(op, err)
	var e *pgwake.Error
	if errors.As(err, &e) && e.SQLState == stateConflict && !errors.Is(e.Err, ErrConflict) {
		e.Err = fmt.Errorf("%w: %w", ErrConflict, e.Err)
	}
	return err
}

// invalid is an error of an argument, before anything is sent.
func invalid(op, format string, args ...any) error {
	return failed(op, fmt.Errorf("%w: %w", pgwake.ErrInvalid, fmt.Errorf(format, args...)))
}
