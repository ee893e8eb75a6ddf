package pgwake

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/migrations"
)

// This file answers: what is there for those who build on the SQL functions, with tables and functions of their own?
//
// A layer that has to know what becomes of its work items, in the transaction in which that happens, has triggers of its own on worker_queue
// (package eventbus is an example). Invariant: an item that is settled, be it acknowledged, made a dead letter, cancelled or removed, by
// whatever function, is one row that is deleted; one that is given back or renewed is updated, and keeps its id; one that is redriven is
// inserted with the id that it had. A trigger is to have a WHEN that leaves out the items of others. How a layer hears of changes to tables
// of its own is in watch.go.

// Pool returns the pool that the Provider uses: that of New, or the one that Open made, which Close closes. It is there for
// transactions with Tx verbs in them, and for what else is to be asked on the same database. Leave it as it is: do not close or
// reset it, and give each connection back soon, since fetches and all other verbs need them, too. A transaction with a Tx verb in
// it is to be READ COMMITTED; see Provider.
func (p *Provider) Pool() *pgxpool.Pool { return p.pool }

// Schema returns the schema that the Provider's tables and functions are in, Config.Schema. It is not quoted; see pgx.Identifier.
func (p *Provider) Schema() string { return p.cfg.Schema }

// MaxPayload returns Config.MaxPayload, for CheckJSON: what a layer's own statements put into a queue or a history nobody else checks.
func (p *Provider) MaxPayload() int { return p.cfg.MaxPayload }

// ArchiveFor returns Config.ArchiveFor, for a layer's own statements that acknowledge work items: p_archive_for of ack_work and the like. 0: none
// is kept, which is null there.
func (p *Provider) ArchiveFor() time.Duration { return p.cfg.ArchiveFor }

// Querier is what statements can be sent by: a connection of the pool, or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Do carries out a statement of the caller's as a verb of the Provider, of that name: on a connection of its pool, READ COMMITTED
// whatever the role's default is, and with the errors that verbs have. Close waits for it, or ends it, and afterwards it fails
// with ErrClosed. Several statements each take effect by themselves, or all together. The queues are those in which the statement may make
// something due: a node that hibernates wakes up for it. The SQL functions notify as ever.
//
// An error of the function that is none of the server's, and neither an *Error nor ErrInvalid nor ErrLockLost, is taken for one after
// which nobody knows whether the statement took effect (Error.Unknown); see WrapError. Safe for concurrent use.
func (p *Provider) Do(ctx context.Context, verb string, statement func(context.Context, Querier) error, feeds ...Queue) error {
	if statement == nil {
		return failed(verb, invalid("there is no statement"))
	}
	return p.doAndTell(ctx, verb, statement, func() {
		if len(feeds) > 0 {
			p.engine.stir()
		}
	}, feeds...)
}

// DoAck is Do for a statement that acknowledges what the token stands for. If quiet is true it is to have the SQL functions notify nobody
// (p_quiet), and the Provider tells who has to know once the statement was committed, this node first, as it does for its own acks. For that
// the statement returns rows: those of ack_orchestration for a turn; for a work item, rows of the same columns with the queue, namespace
// and label (the name of the queue, or the tag) of what became due. Errors are those of Do, and ErrLockLost for a malformed token.
func (p *Provider) DoAck(ctx context.Context, verb string, token LockToken, ack func(ctx context.Context, q Querier, quiet bool) (pgx.Rows, error)) error {
	if ack == nil {
		return failed(verb, invalid("there is no statement"))
	}
	_, subject, err := token.split()
	if err != nil {
		return failed(verb, err)
	}
	quiet := p.engine.quiet()
	var done acked
	return p.doAndTell(ctx, verb, func(ctx context.Context, q Querier) error {
		rows, err := ack(ctx, q, quiet)
		if err != nil {
			return err
		}
		done, err = readAcked(rows)
		return err
	}, func() {
		p.engine.tell(done.due, quiet)
		if done.ended {
			p.engine.released(done.freed, quiet)
			p.engine.waits.changed(subject, quiet)
		}
	}, Orchestrator, Worker)
}

// Due is a work item that a layer's statement has added, which is due at once.
type Due struct{ Namespace, Tag string }

// DoEnqueue is Do for a statement that adds work items which are due at once. If quiet is true it is to have the SQL functions notify nobody
// of them (p_quiet), and the Provider tells who has to know once the statement was committed, this node first, as it does for its own
// enqueues. For that the statement returns what it has added.
func (p *Provider) DoEnqueue(ctx context.Context, verb string, statement func(ctx context.Context, q Querier, quiet bool) ([]Due, error)) error {
	if statement == nil {
		return failed(verb, invalid("there is no statement"))
	}
	quiet := p.engine.quiet()
	var added []Due
	return p.doAndTell(ctx, verb, func(ctx context.Context, q Querier) (err error) {
		added, err = statement(ctx, q, quiet)
		return err
	}, func() {
		due := make([]produced, len(added))
		for i, d := range added {
			due[i] = produced{queue: Worker, namespace: d.Namespace, label: &d.Tag}
		}
		p.engine.tell(due, quiet)
	}, Worker)
}

// DoTx is Do as part of the transaction.
func (p *Provider) DoTx(ctx context.Context, tx pgx.Tx, verb string, statement func(context.Context, Querier) error) error {
	if statement == nil {
		return failed(verb, invalid("there is no statement"))
	}
	return p.doTx(ctx, tx, verb, statement)
}

// Migrate brings the tables and functions of a layer into the Provider's schema, as Open brings its own: over connections of
// Config.ListenConfig, at any number of nodes at once. With Config.SkipMigrate it only looks whether they are there. Fails with
// ErrNotMigrated if they are not then, or were made by other migrations (migrations.ErrForeign), or if the schema was migrated to a
// version of the Provider that is older than this one; with ErrConfig for a Layer that cannot be (migrations.ErrLayer); and
// with ErrPermission.
func (p *Provider) Migrate(ctx context.Context, layer migrations.Layer) error {
	const op = "migrate"
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return failed(op, err)
	}
	defer done()
	var current, latest int64
	err = p.onConnection(ctx, func(c *pgxpool.Conn) error {
		current, latest, err = layer.Version(ctx, c.Conn(), p.cfg.Schema)
		return err
	})
	if err == nil {
		err = migrate(ctx, layer.Up, current, latest, &p.cfg, p.direct)
	}
	switch {
	case errors.Is(err, migrations.ErrForeign):
		err = fmt.Errorf("%w: %w", ErrNotMigrated, err)
	case errors.Is(err, migrations.ErrLayer):
		err = fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return p.ended(ctx, op, err)
}

// migrate applies what a schema at the current version lacks, unless it is to be left as it is.
func migrate(ctx context.Context, up func(context.Context, *pgx.ConnConfig, string) error, current, latest int64, cfg *Config, direct dialer) error {
	switch {
	case current >= latest:
		return nil
	case cfg.SkipMigrate:
		return fmt.Errorf("%w: schema %q is at version %d of %d", ErrNotMigrated, cfg.Schema, current, latest)
	}
	config, err := direct.prepare(ctx)
	if err != nil {
		return err
	}
	return up(conns.Preparing(ctx, direct.after), config, cfg.Schema)
}
