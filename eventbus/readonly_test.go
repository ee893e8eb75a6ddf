package eventbus_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of a delivery after a switchover, while connections of the pool lead to the server that was the primary before?

// formerPrimary is a tracer of a pool that has statements with certain words go to the former primary, and all others to the new one. The former one takes no
// writes.
type formerPrimary struct {
	words atomic.Pointer[[]string] // nil: nothing goes there
	met   atomic.Int64             // how many went there
}

func (f *formerPrimary) TraceQueryStart(ctx context.Context, conn *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	f.route(ctx, conn, d.SQL)
	return ctx
}

func (*formerPrimary) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f *formerPrimary) route(ctx context.Context, conn *pgx.Conn, sql string) {
	if strings.HasPrefix(sql, "SET ") || conn.PgConn().TxStatus() != 'I' {
		return
	}
	there := "off"
	if words := f.words.Load(); words != nil && slices.ContainsFunc(*words, func(w string) bool { return strings.Contains(sql, w) }) {
		f.met.Add(1)
		there = "on"
	}
	_, _ = conn.Exec(ctx, `SET default_transaction_read_only = `+there)
}

func (f *formerPrimary) has(words ...string) { f.words.Store(&words) }

// onFormerPrimary returns another Bus on the schema of l, on a pool with such a tracer.
func (l *lab) onFormerPrimary() (*eventbus.Bus, *formerPrimary) {
	l.t.Helper()
	f := &formerPrimary{}
	bus, _ := l.onPool(func(config *pgxpool.Config) { config.ConnConfig.Tracer = f })
	return bus, f
}

func TestNode_EventIsReadOnTheFormerPrimary_IsNoDeadLetter(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`ALTER FUNCTION get_events RENAME TO get_events_here`)
	l.exec(`CREATE FUNCTION get_events(p_event_ids bigint[], p_emitted timestamptz[]) RETURNS SETOF event_log LANGUAGE sql STABLE SET search_path FROM CURRENT
		AS $$ SELECT * FROM get_events_here(p_event_ids, p_emitted) WHERE current_setting('transaction_read_only') = 'off' $$`)
	l.undone(`DROP FUNCTION get_events; ALTER FUNCTION get_events_here RENAME TO get_events`)
	bus, former := l.onFormerPrimary()
	former.has("get_events")
	config := quick("g")
	config.MaxAttempts = 1
	n := l.nodeOn(bus, config)
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	_, err := l.Emit(l.within(), "a", strings.Repeat("x", 5000), nil)
	require.NoError(t, err)
	l.eventually(func() bool { return former.met.Load() >= 6 }, "it is read there, again and again")
	require.Empty(t, all[string](l, `SELECT reason FROM dead_letters`))
	former.words.Store(nil)
	l.eventually(func() bool { return len(s.list()) == 1 && len(l.queued()) == 0 }, "it is handled")
	require.Empty(t, all[string](l, `SELECT reason FROM dead_letters`))
}

func TestNode_HandlerWritesOnTheFormerPrimary_CostsNoAttemptAndTheConnectionIsGone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`CREATE TABLE effects (id bigint)`)
	l.undone(`DROP TABLE effects`)
	table := pgx.Identifier{l.p.Schema(), "effects"}.Sanitize()
	bus, former := l.onFormerPrimary()
	config := quick("g")
	config.MaxAttempts = 1
	n := l.nodeOn(bus, config)
	var there *pgx.Conn
	var gone atomic.Bool
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1)`, e.ID)
		if err != nil {
			there = tx.Conn()
			former.has("SHOW transaction_read_only")
		} else {
			gone.Store(there != nil && there.IsClosed())
		}
		return err
	}))
	former.has("begin isolation level", "SHOW transaction_read_only")
	l.emit("a")
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM effects`) == 1 && len(l.queued()) == 0 }, "it is handled")
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
	require.True(t, gone.Load(), "nobody draws that one any more")
}

// Whoever has his transaction take no writes, and writes, has made a mistake.
func TestNode_HandlerHasItsTransactionReadOnlyAndWrites_IsADeadLetterInTheEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.MaxAttempts = 2
	n := l.node(config)
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, _ *eventbus.Event, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SET TRANSACTION READ ONLY; CREATE TABLE public.never (n integer)`)
		return err
	}))
	l.emit("a")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "it is given up")
	require.Equal(t, []string{eventbus.ReasonHandler}, all[string](l, `SELECT reason FROM dead_letters`))
}
