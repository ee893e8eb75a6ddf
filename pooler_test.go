//go:build linux

package pgwake_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testpooler"
	"github.com/stretchr/testify/require"
)

// This file answers: what happens behind PgBouncer?

// A LISTEN through a pooler that shares sessions succeeds, and nothing ever comes. The node finds out, says
// so, and polls; and it leaves the shared sessions as they are.
func TestPooler_ListenThroughATransactionPooler_SaysSoAndPolls(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := testpooler.Start(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		through(pool.ConnConfig)
		through(listen)
	})
	require.False(t, n.Stats().Listening)
	require.Contains(t, fmt.Sprint(n.Health().Problems), "transaction pooler")
	for range 3 {
		n.flows(t, patience)
	}
	require.True(t, n.Stats().Worker.Aggressive, "it polls")

	for _, err := range n.Observe(t.Context()) {
		require.ErrorContains(t, err, "transaction pooler")
	}

	// What the node set on a session, or who observes it, would be set for whoever gets the session next.
	shared, err := pgxpool.ParseConfig(server)
	require.NoError(t, err)
	through(shared.ConnConfig)
	shared.MaxConns = 4
	stranger, err := pgxpool.NewWithConfig(t.Context(), shared)
	require.NoError(t, err)
	defer stranger.Close()
	for range 20 {
		var commits, channels string
		require.NoError(t, stranger.QueryRow(t.Context(),
			`SELECT current_setting('synchronous_commit'), coalesce((SELECT string_agg(c, ',') FROM pg_listening_channels() c), '')`).Scan(&commits, &channels))
		require.Equal(t, "on", commits)
		require.NotContains(t, channels, "_worker")
	}
}

func TestPooler_ListenConfigGoesAroundIt_IsPushed(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := testpooler.Start(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) { through(pool.ConnConfig) })
	n.pushed(t, patience)
}

func TestPooler_SessionsAreNotShared_IsPushed(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := testpooler.Start(t, server, "session")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		pool.MaxConns = 2
		through(pool.ConnConfig)
		through(listen)
	})
	n.pushed(t, patience)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "own"}, nil)
	require.NoError(t, err)
	n.await(t, "own", patience)
}

// A node without a connection of its own, for places where a pooler is all there is.
func TestPooler_ModePolling_NeedsNothingElse(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := testpooler.Start(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{Mode: pgwake.ModePolling}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		through(pool.ConnConfig)
		through(listen)
	})
	n.flows(t, patience)
	require.True(t, n.Health().OK)
}

// The turn, and what a session of migrations sets, would be those of a session that others have next.
func TestPooler_Migrations_AreRefused(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := testpooler.Start(t, server, "transaction")
	config, err := pgxpool.ParseConfig(server)
	require.NoError(t, err)
	through(config.ConnConfig)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pgwake.New(t.Context(), pool, &pgwake.Config{Schema: "pooled", Mode: pgwake.ModePolling, Logger: silent})
	require.ErrorContains(t, err, "unsupported startup parameter")
	var there bool
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT to_regnamespace('pooled') IS NOT NULL`).Scan(&there))
	require.False(t, there)
}

// The pooler keeps for each client what it has set, and knows both settings.
func TestPooler_RoleHasItsOwnStyleOfDatesAndEncoding_EverythingWorks(t *testing.T) {
	t.Parallel()
	config, schema := settled(t, "datestyle = 'German'", "client_encoding = 'LATIN1'")
	direct := config.ConnConfig.Copy()
	through := testpooler.Start(t, fmt.Sprintf("host=%s port=%d user=%s password=secret dbname=%s sslmode=disable", direct.Host, direct.Port, direct.User, direct.Database), "transaction")
	through(config.ConnConfig)
	pgwake.TunePool(config)
	p, err := newOn(t, config, pgwake.Config{Schema: schema, ListenConfig: direct})
	require.NoError(t, err)
	n := &node{Provider: p, schema: schema}
	for range 10 { // on whichever session
		require.NoError(t, dropped(p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "größer ✉"}, nil)))
		item := n.take(t)
		require.Equal(t, "größer ✉", item.Name)
		require.NoError(t, p.AckWorkItem(t.Context(), item.LockToken, nil))
	}
}
