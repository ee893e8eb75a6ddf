package pgwake_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testtls"
	"github.com/stretchr/testify/require"
)

// This file answers: does everything go by TLS that is told to?

func TestOpen_VerifyFull_EverythingGoesByTLS_AndNothingWithoutIt(t *testing.T) {
	t.Parallel()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	ours, others := testtls.NewAuthority(t, "ours"), testtls.NewAuthority(t, "others")
	ours.Certify(t, server, "127.0.0.1")
	at := func(mode string, ca *testtls.Authority) string { return ca.URL(server, mode) }

	p, err := pgwake.Open(t.Context(), at("verify-full", ours), &pgwake.Config{Logger: silent})
	require.NoError(t, err)
	require.True(t, p.Health().OK, p.Health().Problems)
	require.True(t, p.Stats().Listening)
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	rows, err := p.Pool().Query(t.Context(), `SELECT a.application_name || ' ' || s.ssl FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.backend_type = 'client backend' GROUP BY 1 ORDER BY 1`)
	require.NoError(t, err)
	sessions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{" true", "pgwake listen true"}, sessions, "the pool, and LISTEN")
	require.NoError(t, p.Close(t.Context()))

	refused := func(mode string, ca *testtls.Authority) {
		t.Helper()
		p, err := pgwake.Open(t.Context(), at(mode, ca), &pgwake.Config{Logger: silent})
		require.Nil(t, p)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.ErrorContains(t, err, "x509: certificate")
		require.False(t, typed.Retryable, "%v", err)
	}
	refused("verify-full", others)
	refused("verify-ca", others)
	ours.Certify(t, server, "127.0.0.2")
	refused("verify-full", ours)
	// Of the authority, and so enough for who does not ask for the host.
	p, err = pgwake.Open(t.Context(), at("verify-ca", ours), &pgwake.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	admin, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	_, err = admin.Exec(t.Context(), `ALTER SYSTEM SET ssl = off`)
	require.NoError(t, err)
	require.NoError(t, admin.Close(t.Context()))
	require.NoError(t, server.Restart(t.Context(), devpg.Fast))
	_, err = pgwake.Open(t.Context(), at("verify-full", ours), &pgwake.Config{Logger: silent})
	require.ErrorContains(t, err, "TLS", "it does not go on without")
}
