package pgwake_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
	ours, others := testtls.New(t, "ours"), testtls.New(t, "others")
	ours.Serve(t, server, "127.0.0.1")
	byName := func(url string) string { return strings.Replace(url, "127.0.0.1", "localhost", 1) }

	p, err := pgwake.Open(t.Context(), ours.URL(server, "verify-full"), &pgwake.Config{Logger: silent})
	require.NoError(t, err)
	require.True(t, p.Health().OK, p.Health().Problems)
	require.True(t, p.Stats().Listening)
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	// The pool, LISTEN, and what asks the nodes or observes them.
	asked := 0
	encrypted := func(err error) {
		asked++
		require.NoError(t, err)
		rows, err := p.Pool().Query(t.Context(), `SELECT a.application_name || ' ' || s.ssl FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.backend_type = 'client backend' ORDER BY 1`)
		require.NoError(t, err)
		sessions, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(sessions), 3)
		require.Equal(t, []string{" true", "pgwake listen true"}, slices.Compact(sessions))
	}
	atFirst(p.NodeReports(t.Context(), patience), encrypted)
	atFirst(p.Observe(t.Context()), encrypted)
	require.Equal(t, 2, asked)
	require.NoError(t, p.Close(t.Context()))

	// What each way to make a connection comes to. But for the pool they go by Config.ListenConfig, and the pool of that Provider is another's.
	schemas := 0
	ways := func(url string) map[string]error {
		listen, err := pgx.ParseConfig(url)
		require.NoError(t, err)
		open := func(url string, c pgwake.Config) (*pgwake.Provider, error) {
			c.Logger = silent
			p, err := pgwake.Open(t.Context(), url, &c)
			if err == nil {
				t.Cleanup(func() { require.NoError(t, p.Close(context.WithoutCancel(t.Context()))) })
			}
			return p, err
		}
		all := map[string]error{}
		_, all["pool"] = open(url, pgwake.Config{SkipMigrate: true})
		schemas++
		_, all["migrations"] = open(server.URL, pgwake.Config{ListenConfig: listen, Schema: fmt.Sprint("of_listen_", schemas)})
		p, err := open(server.URL, pgwake.Config{ListenConfig: listen, SkipMigrate: true})
		require.NoError(t, err, "without LISTEN it polls")
		all["LISTEN"] = nil
		if h := p.Health(); !h.OK {
			all["LISTEN"] = errors.New(h.Problems[0].Text)
		}
		atFirst(p.NodeReports(t.Context(), patience), func(err error) { all["NodeReports"] = err })
		atFirst(p.Observe(t.Context()), func(err error) { all["Observe"] = err })
		require.Len(t, all, 5)
		return all
	}
	refused := func(url, says string) {
		t.Helper()
		for way, err := range ways(url) {
			require.ErrorContains(t, err, says, way)
			if typed := (*pgwake.Error)(nil); errors.As(err, &typed) {
				require.Equal(t, says == "TLS", typed.Retryable, "%s: %v", way, err)
			} else {
				require.Equal(t, "LISTEN", way)
			}
		}
	}
	for way, err := range ways(ours.URL(server, "verify-full")) {
		require.NoError(t, err, way)
	}
	const certificate = "x509: certificate"
	refused(others.URL(server, "verify-full"), certificate)
	refused(others.URL(server, "verify-ca"), certificate)
	refused(byName(ours.URL(server, "verify-full")), certificate)
	// Of the authority, and so enough for who does not ask for the host.
	for way, err := range ways(byName(ours.URL(server, "verify-ca"))) {
		require.NoError(t, err, way)
	}

	admin, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	_, err = admin.Exec(t.Context(), `ALTER SYSTEM SET ssl = off`)
	require.NoError(t, err)
	require.NoError(t, admin.Close(t.Context()))
	require.NoError(t, server.Restart(t.Context(), devpg.Fast))
	refused(ours.URL(server, "verify-full"), "TLS") // it does not go on without
}

// atFirst does something with the first error of a sequence, nil or not, while that goes on.
func atFirst[T any](all iter.Seq2[T, error], do func(error)) {
	for _, err := range all {
		do(err)
		return
	}
}

// It is the right server, and is let do again once somebody has renewed its certificate.
func TestError_CertificateHasExpired_Retryable(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lasts     time.Duration
		retryable bool
	}{"expired": {-time.Minute, true}, "of another authority": {time.Hour, false}} {
		ours := testtls.New(t, "ours")
		signs := ours
		if !c.retryable {
			signs = testtls.New(t, "others")
		}
		signs.Until = time.Now().Add(c.lasts)
		cert, err := tls.X509KeyPair(signs.Sign(t, "127.0.0.1"))
		require.NoError(t, err)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		var served sync.WaitGroup
		served.Go(func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				_, _ = io.ReadFull(conn, make([]byte, 8)) // what asks for TLS
				_, _ = conn.Write([]byte("S"))
				_ = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}}).Handshake()
				_ = conn.Close()
			}
		})
		_, err = pgwake.Open(t.Context(), fmt.Sprintf("postgres://u@%s/db?sslmode=verify-full&sslrootcert=%s", listener.Addr(), url.QueryEscape(ours.File)), &pgwake.Config{Logger: silent})
		var failure *pgwake.Error
		require.ErrorAs(t, err, &failure, name)
		require.ErrorAs(t, err, new(*tls.CertificateVerificationError), name)
		require.Equal(t, c.retryable, failure.Retryable, "%s: %v", name, err)
		require.NoError(t, listener.Close())
		served.Wait()
	}
}
