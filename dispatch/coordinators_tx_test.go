package dispatch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: where are the effects of handlers, if there are several databases, and how do handlers know?

// alone returns a Provider on a database of its own, which has a table for effects.
func alone(t *testing.T) *pgwake.Provider {
	t.Helper()
	name := strings.Replace(testdb.Schema(t), "test_", "test_alone_", 1)
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+name)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+name+` WITH (FORCE)`) })
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.ConnConfig.Database, config.MaxConns = name, 8
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	_, err = pool.Exec(t.Context(), `CREATE TABLE effects (n integer)`)
	require.NoError(t, err)
	return p
}

// Of a namespace that was moved some items are still where it was. The two databases have the same names for everything, and share nothing.
func TestHandleTx_NamespaceWasMovedToAnotherDatabase_EffectsAreWhereTheItemIs(t *testing.T) {
	t.Parallel()
	one, other := alone(t), alone(t)
	const items = 20
	var mu sync.Mutex
	seen := map[dispatch.Source][]int{}
	c := dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{
			Namespaces: []string{"*"},
			Config:     dispatch.Config{Concurrency: 3, Begin: one.Pool().Begin},
			Handlers: func(d *dispatch.Dispatcher) {
				dispatch.HandleTx(d, "insert", func(ctx context.Context, tx pgx.Tx, n int) (struct{}, error) {
					mu.Lock()
					source := dispatch.SourceFrom(ctx)
					seen[source] = append(seen[source], n)
					mu.Unlock()
					_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, n)
					return struct{}{}, err
				})
			},
		}},
		Shards: []dispatch.Shard{
			{Namespaces: []string{"moved"}, Source: other, Begin: other.Pool().Begin},
			{Namespaces: []string{"moved-too"}, Source: other},
		},
	})
	expected := map[dispatch.Source][]int{}
	for n := range 2 * items {
		p := []*pgwake.Provider{one, other}[n%2]
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "insert", Input: json.RawMessage(fmt.Sprint(n))}, &pgwake.EnqueueOptions{Namespace: "moved"})
		require.NoError(t, err)
		expected[p] = append(expected[p], n)
	}
	running(t, c)
	for _, p := range []*pgwake.Provider{one, other} {
		awaitEmpty(t, p)
		rows, err := p.Pool().Query(t.Context(), `SELECT n FROM effects ORDER BY n`)
		require.NoError(t, err)
		effects, err := pgx.CollectRows(rows, pgx.RowTo[int])
		require.NoError(t, err)
		require.Equal(t, expected[p], effects)
	}
	mu.Lock()
	defer mu.Unlock()
	for _, handled := range seen {
		slices.Sort(handled)
	}
	require.Equal(t, expected, seen, "each was handled once, and knew where it was")
}

// insertsNothing has a HandleTx, and counts nothing: what matters is that there is one.
func insertsNothing(d *dispatch.Dispatcher) {
	dispatch.HandleTx(d, "tx", func(context.Context, pgx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil })
}

func TestCoordinators_HandleTxWithoutABeginForASource_RunFailsBeforeAnythingIsTaken(t *testing.T) {
	one, other := testschema.Core.New(t, nil), testschema.Core.New(t, nil)
	config := dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{Name: "all", Namespaces: []string{"*"}, Config: dispatch.Config{Begin: one.Pool().Begin}, Handlers: insertsNothing}},
		Shards: []dispatch.Shard{{Namespaces: []string{"x"}, Source: other}},
	}
	enqueueIn(t, one, "x", "tx")
	c := dispatch.NewCoordinators(one, &config)
	err := c.Run(t.Context())
	require.ErrorIs(t, err, pgwake.ErrConfig)
	require.ErrorContains(t, err, `Group "all" has HandleTx of "tx", and Source 1 no Begin`)
	require.ErrorIs(t, c.Spawn("x"), pgwake.ErrConfig)
	item, err := one.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Equal(t, 1, item.Attempt, "nobody had it before")

	// Who does nothing in transactions needs none.
	config.Groups[0].Handlers = newLedger().register
	running(t, dispatch.NewCoordinators(one, &config))
}

// disguised is the queue of a Provider as a stream, which has no transactions.
func disguised(p *pgwake.Provider) dispatch.Source {
	s := dispatch.ProviderStream(p)
	return dispatch.StreamSource(capable{s, s.(dispatch.LeaseExtender), s.(dispatch.DeadLetterer)}, nil)
}

// A stream has no transactions, and so no Begin. It is no reason against those of other Sources, whichever comes first.
func TestCoordinators_HandleTxBesideAStream_ItsItemsAreRefused(t *testing.T) {
	for name, streamIsFirst := range map[string]bool{"the stream is of a Shard": false, "the stream is the Source of NewCoordinators": true} {
		t.Run(name, func(t *testing.T) {
			one, p := testschema.Core.New(t, nil), testschema.Core.New(t, nil)
			group := dispatch.Group{Namespaces: []string{"*"}, Handlers: insertsNothing}
			first, shard := disguised(p), dispatch.Shard{Namespaces: []string{"y"}, Source: one, Begin: one.Pool().Begin}
			if !streamIsFirst {
				group.Config.Begin = one.Pool().Begin
				first, shard = one, dispatch.Shard{Namespaces: []string{"x"}, Source: first}
			}
			c := dispatch.NewCoordinators(first, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{group}, Shards: []dispatch.Shard{shard}})
			running(t, c)
			enqueueIn(t, one, "x", "tx")
			enqueueIn(t, p, "x", "tx")
			awaitEmpty(t, one)
			awaitEmpty(t, p)
			letters, err := p.ListDeadLetters(t.Context(), nil)
			require.NoError(t, err)
			require.Len(t, letters, 1)
			require.Contains(t, letters[0].Error, "a stream, which has no transactions")
			letters, err = one.ListDeadLetters(t.Context(), nil)
			require.NoError(t, err)
			require.Empty(t, letters)
		})
	}
}

// Nothing could ever be done for it.
func TestHandleTx_NoTransactionCanBeHad_RunFailsBeforeAnythingIsTaken(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueueIn(t, p, "x", "tx")
	for name, c := range map[string]struct {
		source dispatch.Source
		begin  func(context.Context) (pgx.Tx, error)
		says   string
		all    string // what Coordinators say
	}{
		"a stream":                 {disguised(p), nil, `HandleTx of "tx": a stream has no transactions`, "all Sources are streams"},
		"a stream, and a Begin":    {disguised(p), p.Pool().Begin, `HandleTx of "tx": a stream has no transactions`, "all Sources are streams"},
		"a Provider, and no Begin": {p, nil, `HandleTx of "tx" needs Config.Begin`, `HandleTx of "tx", and Source 0 no Begin`},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			config := dispatch.Config{Begin: c.begin, Namespaces: []string{"x"}}
			d := dispatch.New(c.source, &config)
			insertsNothing(d)
			err := d.Run(ctx)
			require.ErrorIs(t, err, pgwake.ErrConfig)
			require.ErrorContains(t, err, c.says)
			config.Namespaces = nil
			err = dispatch.NewCoordinators(c.source, &dispatch.CoordinatorsConfig{
				Groups: []dispatch.Group{{Namespaces: []string{"*"}, Config: config, Handlers: insertsNothing}},
			}).Run(ctx)
			require.ErrorIs(t, err, pgwake.ErrConfig)
			require.ErrorContains(t, err, c.all)
		})
	}
	item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Equal(t, 1, item.Attempt, "nobody had it before")
}

// The Group need not say once more what each Shard says.
func TestHandleTx_EachShardHasItsBegin_GroupNeedsNone(t *testing.T) {
	one, other := testschema.Core.New(t, nil), testschema.Core.New(t, nil)
	c := dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: insertsNothing}},
		Shards: []dispatch.Shard{
			{Namespaces: []string{"x"}, Source: one, Begin: one.Pool().Begin},
			{Namespaces: []string{"y"}, Source: other, Begin: other.Pool().Begin},
		},
	})
	running(t, c)
	for _, p := range []*pgwake.Provider{one, other} {
		enqueueIn(t, p, "x", "tx")
		awaitEmpty(t, p)
		letters, err := p.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		require.Empty(t, letters)
	}
}

// Handlers of every kind learn where their items are, which they acknowledge themselves, say.
func TestSourceFrom_HandlersOfEveryKind(t *testing.T) {
	one, other := testschema.Core.New(t, nil), testschema.Core.New(t, nil)
	require.Nil(t, dispatch.SourceFrom(t.Context()))
	type told struct {
		by     string
		source dispatch.Source
	}
	all := make(chan told, 10)
	tell := func(ctx context.Context, by string) { all <- told{by, dispatch.SourceFrom(ctx)} }
	group := dispatch.Group{
		Namespaces: []string{"x"},
		Handlers: func(d *dispatch.Dispatcher) {
			d.Handle("AckBy", func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				return nil, dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
					tell(ctx, "AckBy")
					return dispatch.SourceFrom(ctx).AckWorkItems(ctx, []pgwake.LockToken{token})
				})
			})
			d.HandleBatch("batch", 10, func(ctx context.Context, _ []*pgwake.ClaimedWorkItem) error {
				tell(ctx, "batch")
				return nil
			})
		},
		Decider: func(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			tell(ctx, "turn")
			return ack, nil
		},
	}
	running(t, dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{group}, Shards: []dispatch.Shard{{Namespaces: []string{"x"}, Source: other}},
	}))
	third := testschema.Core.New(t, nil) // without Coordinators
	d := dispatch.New(third, nil)
	group.Handlers(d)
	running(t, d)
	o := dispatch.NewOrchestrator(third, group.Decider, nil)
	running(t, o)
	for _, p := range []*pgwake.Provider{one, other, third} {
		enqueueIn(t, p, "x", "AckBy", "batch")
		_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "x"})
		require.NoError(t, err)
		awaitEmpty(t, p)
		var by []string
		for range 3 {
			a := await(t, all)
			require.Equal(t, dispatch.Source(p), a.source, a.by)
			by = append(by, a.by)
		}
		require.ElementsMatch(t, []string{"AckBy", "batch", "turn"}, by)
	}
}
