package eventbus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: how do the verbs reach the database?

// Bus is the verbs of the event bus in a namespace, each of which is one SQL function and one round trip. A Node has them as well;
// WithTx has them take part in a transaction. Safe for concurrent use as far as the transaction is.
//
// Errors are a *pgwake.Error around pgwake.ErrInvalid for arguments that break a rule, before anything is sent as far as that can be known;
// around pgwake.ErrNotFound for what does not exist; and around the other conditions that package pgwake has.
type Bus struct {
	p         *pgwake.Provider
	tx        pgx.Tx // nil: each verb by itself
	in        string // the quoted schema, and a dot
	cfg       *Config
	namespace string
	producer  string // "": nobody says
	telemetry *telemetry
}

// New returns a Bus on the Provider's database, and creates or migrates its tables in the Provider's schema, unless the Provider was
// told not to migrate. A nil Config means the defaults. Errors: pgwake.ErrConfig, and those of pgwake.Provider.Migrate.
func New(ctx context.Context, p *pgwake.Provider, config *Config) (*Bus, error) {
	cfg, err := config.resolve()
	if err != nil {
		return nil, err
	}
	if p == nil {
		return nil, fmt.Errorf("%w: there is no Provider", pgwake.ErrConfig)
	}
	t, err := newTelemetry(&cfg)
	if err != nil {
		return nil, err
	}
	b := &Bus{p: p, in: pgx.Identifier{p.Schema()}.Sanitize() + ".", cfg: &cfg, namespace: cfg.Namespace, telemetry: t}
	if err := p.Migrate(ctx, migrations.Layer()); err != nil {
		return b, err
	}
	switch moved, err := value[bool](ctx, b, verb{op: "adopt event log", function: "adopt_event_log"}); {
	case errors.Is(err, pgwake.ErrPermission): // who may only emit, or look, leaves it to those who keep the log
	case err != nil:
		b.cfg.Logger.Warn("eventbus: cannot tell whether the log came from another server, or cannot go on with it: call adopt_event_log before anybody emits", "error", err)
	case moved:
		b.cfg.Logger.Info("eventbus: the log came from another server, and goes on here")
	}
	return b, nil
}

// Namespace returns the namespace of the Bus.
func (b *Bus) Namespace() string { return b.namespace }

// In returns the verbs in another namespace. A name that cannot be one is an error of each of them.
func (b *Bus) In(namespace string) *Bus {
	in := *b
	in.namespace = namespace
	return &in
}

// WithTx returns the verbs as part of a transaction on the Provider's database, which is to be READ COMMITTED: what they do takes effect,
// and wakes whoever is to handle it, when that commits; if it is rolled back nobody sees anything of it. For one of database/sql see
// pgwake.WrapSQLTx.
func (b *Bus) WithTx(tx pgx.Tx) *Bus {
	in := *b
	in.tx = tx
	return &in
}

// do carries a call of a function out as a verb. One that enqueues feeds the worker queue: a node that hibernates wakes up for it.
func (b *Bus) do(ctx context.Context, op string, enqueues bool, statement func(context.Context, pgwake.Querier) error) error {
	err := pgwake.CheckNamespace(b.namespace)
	switch {
	case err != nil:
	case b.tx != nil:
		err = b.p.DoTx(ctx, b.tx, op, statement)
	case enqueues:
		err = b.p.Do(ctx, op, statement, pgwake.Worker)
	default:
		err = b.p.Do(ctx, op, statement)
	}
	return failed(op, err)
}

// call is a call of an SQL function.
func (b *Bus) call(function string, args int) string {
	var text strings.Builder
	text.WriteString(b.in + function + "(")
	for i := range args {
		if i > 0 {
			text.WriteString(", ")
		}
		text.WriteString("$" + strconv.Itoa(i+1))
	}
	return text.String() + ")"
}

// verb is a call of an SQL function.
type verb struct {
	op       string
	function string
	columns  string // of its rows
	enqueues bool
	args     []any
	silence  time.Duration // how long nothing of the answer may come; 0: the caller's context alone bounds it
}

// query carries out a verb that returns rows.
func query[T any](ctx context.Context, b *Bus, v verb, row pgx.RowToFunc[T]) (all []T, err error) {
	err = b.do(ctx, v.op, v.enqueues, func(ctx context.Context, q pgwake.Querier) error {
		if v.silence > 0 {
			var heard func() time.Time
			if on, ok := q.(interface{ Conn() *pgx.Conn }); ok {
				heard = conns.LastHeard(on.Conn())
			}
			var end context.CancelFunc
			ctx, end = conns.WhileHeard(ctx, heard, time.Now().Add(v.silence), v.silence)
			defer end()
		}
		rows, err := q.Query(ctx, "SELECT "+v.columns+" FROM "+b.call(v.function, len(v.args)), v.args...)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, row)
		return err
	})
	return all, err
}

// value carries out a verb that returns one value.
func value[T any](ctx context.Context, b *Bus, v verb) (one T, err error) {
	v.columns = "*"
	all, err := query(ctx, b, v, pgx.RowTo[T])
	if err != nil {
		return one, err
	}
	return all[0], nil
}

// outOfRange are the SQLSTATEs of JSON that is good, and too much for jsonb: numbers, and depth.
var outOfRange = []string{"22003", "54001"}

func failed(op string, err error) error {
	err = pgwake.WrapError(op, err)
	var e *pgwake.Error
	if errors.As(err, &e) {
		for _, state := range outOfRange {
			if e.SQLState == state && !errors.Is(e.Err, pgwake.ErrInvalid) {
				e.Err = fmt.Errorf("%w: %w", pgwake.ErrInvalid, e.Err)
			}
		}
	}
	return err
}

// invalid is an error of an argument.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", pgwake.ErrInvalid, fmt.Sprintf(format, args...))
}

// text is an optional text as an argument: NULL if empty.
func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
