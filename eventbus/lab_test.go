package eventbus_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what do tests of the bus have in common?

// patience is far more than anything here should take.
const patience = 30 * time.Second

// schemas are those of all tests that do not migrate themselves.
var schemas = testschema.With(migrations.Layer())

// lab is a bus on a schema of its own, and a session in which all names are those of the schema.
type lab struct {
	*eventbus.Bus
	t    *testing.T
	p    *pgwake.Provider
	conn *pgx.Conn
}

func newLab(t *testing.T, config *eventbus.Config) *lab {
	t.Helper()
	return newLabOn(t, nil, config)
}

// newLabOn is newLab with a Provider of this kind.
func newLabOn(t *testing.T, provider *pgwake.Config, config *eventbus.Config) *lab {
	t.Helper()
	p := schemas.New(t, provider)
	if config == nil {
		config = &eventbus.Config{}
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	bus, err := eventbus.New(t.Context(), p, config)
	require.NoError(t, err)
	return &lab{bus, t, p, session(t, p)}
}

// session is one more connection on the schema of p.
func session(t testing.TB, p *pgwake.Provider) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), p.Pool().Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = conn.Exec(t.Context(), `SELECT set_config('search_path', $1, false)`, pgx.Identifier{p.Schema()}.Sanitize())
	require.NoError(t, err)
	return conn
}

func (l *lab) within() context.Context {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	l.t.Cleanup(cancel)
	return ctx
}

func (l *lab) exec(sql string, args ...any) {
	l.t.Helper()
	_, err := l.conn.Exec(l.within(), sql, args...)
	require.NoError(l.t, err, sql)
}

// undone has statements executed when the test ends: a schema that is as it was made is lent to another test, and to make one takes longer
// than most tests do.
func (l *lab) undone(sql string) {
	l.t.Helper()
	l.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, _ = l.conn.Exec(ctx, sql) // or else it is dropped
	})
}

// redefines has a function of the schema be another one until the test ends.
func (l *lab) redefines(function, sql string) {
	l.t.Helper()
	l.undone(one[string](l, `SELECT pg_get_functiondef($1::text::regproc)`, function))
	l.exec(sql)
}

// all returns the only column of a query.
func all[T any](l *lab, sql string, args ...any) []T {
	l.t.Helper()
	rows, err := l.conn.Query(l.within(), sql, args...)
	require.NoError(l.t, err, sql)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(l.t, err, sql)
	return values
}

// one returns the only value of a query.
func one[T any](l *lab, sql string, args ...any) T {
	l.t.Helper()
	values := all[T](l, sql, args...)
	require.Len(l.t, values, 1, sql)
	return values[0]
}

// emit emits an event of a type, with nothing in it.
func (l *lab) emit(eventType string) int64 { return l.emitKey(eventType, "") }

func (l *lab) emitKey(eventType, key string) int64 {
	l.t.Helper()
	id, err := l.Emit(l.within(), eventType, nil, &eventbus.EmitOptions{Key: key})
	require.NoError(l.t, err)
	return id
}

func (l *lab) subscribe(group string, patterns ...string) {
	l.t.Helper()
	require.NoError(l.t, l.Subscribe(l.within(), group, patterns, nil))
}

// log waits until so many events can be read, which those of transactions of other tests may hold up, and returns them.
func (l *lab) log(n int) (events []*eventbus.Event) {
	l.t.Helper()
	l.afterOthers(func() bool {
		var err error
		events, err = l.Read(l.within(), eventbus.Cursor{}, 1000)
		require.NoError(l.t, err)
		return len(events) >= n
	}, "the events are in the log")
	require.Len(l.t, events, n)
	return events
}

// queued are the types and tags of the deliveries in the queue, in the order of their ids.
func (l *lab) queued() []string {
	l.t.Helper()
	return all[string](l, `SELECT name || ' ' || tag FROM worker_queue ORDER BY id`)
}

// begin begins a transaction of its own, which the test ends.
func (l *lab) begin() pgx.Tx {
	l.t.Helper()
	tx, err := l.p.Pool().Begin(l.t.Context())
	require.NoError(l.t, err)
	l.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// eventually asserts that something comes to be. It asks less and less often: what takes long is mostly held up by other tests, which
// have the processors for themselves the while.
func (l *lab) eventually(is func() bool, what string) {
	l.t.Helper()
	l.eventuallyWithin(patience, is, what)
}

// afterOthers is eventually for what waits until transactions of others have ended that are on the server, and for nothing else: those of other
// tests stay open for as long as these take.
func (l *lab) afterOthers(is func() bool, what string) {
	l.t.Helper()
	l.eventuallyWithin(4*patience, is, what)
}

func (l *lab) eventuallyWithin(most time.Duration, is func() bool, what string) {
	l.t.Helper()
	pause := 2 * time.Millisecond
	for end := time.Now().Add(most); ; pause = min(pause*3/2, 25*time.Millisecond) {
		doze(l.t.Context(), pause)
		if is() {
			return
		}
		if time.Now().After(end) {
			require.Fail(l.t, "it does not come to be", what)
		}
	}
}

// eventuallyAll asserts that a number comes to be so large, and that it never stands still for long until then.
func (l *lab) eventuallyAll(number func() int, want int, what string) {
	l.t.Helper()
	for was := number(); was < want; was = number() {
		l.eventually(func() bool { return number() > was }, what)
	}
}

// quick is a NodeConfig with short pauses.
func quick(group string) *eventbus.NodeConfig {
	return &eventbus.NodeConfig{Group: group, Heartbeat: 50 * time.Millisecond, Retry: dispatch.Backoff(time.Millisecond, 10*time.Millisecond),
		StopTimeout: patience, CancelTimeout: time.Second}
}

// node is a Node that is started, and stopped when the test ends.
func (l *lab) node(config *eventbus.NodeConfig) *eventbus.Node {
	l.t.Helper()
	return l.nodeOn(l.Bus, config)
}

func (l *lab) nodeOn(bus *eventbus.Bus, config *eventbus.NodeConfig) *eventbus.Node {
	l.t.Helper()
	n, err := bus.Node(l.within(), config)
	require.NoError(l.t, err)
	require.NoError(l.t, n.Start(l.within()))
	l.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Stop(ctx); err != nil {
			l.t.Errorf("stop: %v", err)
		}
	})
	return n
}

// another is one more process on the same schema.
func (l *lab) another() *eventbus.Bus {
	l.t.Helper()
	bus, _ := l.mortal()
	return bus
}

// mortal is another, with its Provider, without which it is as good as dead.
func (l *lab) mortal() (*eventbus.Bus, *pgwake.Provider) {
	l.t.Helper()
	p := pgwaketest.Open(l.t, &pgwake.Config{Schema: l.p.Schema(), SkipMigrate: true})
	bus, err := eventbus.New(l.t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(l.t, err)
	return bus, p
}

// onPool is another process on the same schema, with a pool that is the caller's.
func (l *lab) onPool(configure func(*pgxpool.Config)) (*eventbus.Bus, *pgwake.Provider) {
	l.t.Helper()
	config := l.p.Pool().Config()
	config.MaxConns = 8
	configure(config)
	pool, err := pgxpool.NewWithConfig(l.t.Context(), config)
	require.NoError(l.t, err)
	l.t.Cleanup(pool.Close)
	p, err := pgwake.New(l.t.Context(), pool, &pgwake.Config{Schema: l.p.Schema(), Logger: slog.New(slog.DiscardHandler)})
	require.NoError(l.t, err)
	l.t.Cleanup(func() { require.NoError(l.t, p.Close(context.Background())) })
	bus, err := eventbus.New(l.t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(l.t, err)
	return bus, p
}

// seen is what handlers were called with.
type seen struct {
	mu  sync.Mutex
	all []string
}

func (s *seen) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, fmt.Sprintf(format, args...))
}

func (s *seen) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// types notes the type of each event.
func (s *seen) types(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
	s.note("%s", e.Type)
	return nil
}

// ids notes the id of each event.
func (s *seen) ids(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
	s.note("%d", e.ID)
	return nil
}
