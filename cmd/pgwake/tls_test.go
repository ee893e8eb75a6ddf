package main

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testtls"
	"github.com/stretchr/testify/require"
)

// This file answers: does each command go by TLS if it is told to, and does nobody but the server get to see the password?

// ownServer is one that a test may do anything to.
func ownServer(t *testing.T) *devpg.Server {
	t.Helper()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	return server
}

func TestTLS_VerifyFull_OnlyTheServerThatIsMeantIsTalkedTo(t *testing.T) {
	t.Parallel()
	server := ownServer(t)
	ours, others := testtls.New(t, "ours"), testtls.New(t, "others")
	ours.Serve(t, server, "127.0.0.1")
	c := &cli{t: t, url: ours.URL(server, "verify-full"), schema: "pgwake", now: time.Now}
	c.ok("migrate", "up", "--layer", "root,taskgraph,eventbus")
	c.ok("enqueue", "mail.send")
	require.Contains(t, c.ok("peek"), "mail.send")
	ssl := func(url string) (all []string) {
		c.url = url
		conn := c.connect(url)
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT array_agg(s.ssl::text) FROM pg_stat_ssl s WHERE pid = pg_backend_pid()`).Scan(&all))
		return all
	}
	require.Equal(t, []string{"true"}, ssl(c.url))

	commands := [][]string{{"migrate", "up"}, {"migrate", "status"}, {"peek"}, {"enqueue", "mail.send"}, {"dlq", "list"}, {"task", "list"}, {"schedule", "list"},
		{"tail"}, {"top", "--once"}, {"bench"}, {"console", "--addr", "127.0.0.1:0"}}
	refused := func(url, why string) {
		t.Helper()
		for _, args := range commands {
			r := (&cli{t: t, url: url, schema: "pgwake", now: time.Now}).run(args...)
			require.Equal(t, exitFailed, r.code, "%q: %s", args, r.out+r.err)
			require.Contains(t, r.err, why, "%q", args)
			require.Contains(t, r.err, "sslrootcert", "%q", args)
		}
		require.Contains(t, (&cli{t: t, url: url, schema: "pgwake", now: time.Now}).run("doctor").out, why)
	}
	refused(others.URL(server, "verify-full"), "x509: certificate")
	ours.Serve(t, server, "127.0.0.2")
	refused(ours.URL(server, "verify-full"), "x509: certificate")
	require.Equal(t, []string{"true"}, ssl(ours.URL(server, "verify-ca")), "of the authority, and the host was not asked for")
	require.Len(t, into[[]queuedItem](c, "peek"), 1, "nothing came through")
	// The way around a pooler is no way around TLS.
	c.environ = []string{"PGWAKE_LISTEN_URL=" + ours.URL(server, "verify-full")}
	require.Contains(t, c.refused(exitFailed, "migrate", "up"), "x509: certificate")
}

func TestSecrets_PasswordOfTheURL_IsInNothingThatACommandSays(t *testing.T) {
	t.Parallel()
	const password, wrong = `s3cr3t/"pass'w0rd%`, `s3cr3t-that-is-n0ne`
	server := ownServer(t)
	c := &cli{t: t, url: server.URL, schema: "pgwake", now: time.Now}
	c.exec(`CREATE ROLE shop LOGIN PASSWORD '` + strings.ReplaceAll(password, `'`, `''`) + `'`)
	c.exec(`GRANT CREATE ON DATABASE postgres TO shop`)
	testtls.AskForPassword(t, server, "shop")
	commands := [][]string{{"migrate", "up", "--layer", "root,taskgraph,eventbus"}, {"migrate", "status"}, {"migrate", "print"}, {"enqueue", "mail.send"}, {"peek"}, {"dlq", "list"}, {"dlq", "purge", "--all", "--yes"},
		{"task", "list"}, {"schedule", "list"}, {"top", "--once"}, {"doctor"}, {"enqueue", "x", "{"}, {"task", "show", "none"}, {"schedule", "run", "none"}, {"dlq", "show", "7"},
		{"no-such-command"}, {"peek", "--limit", "many"}, {"migrate", "down"}, {"migrate", "down", "--yes"}}
	for _, secret := range []string{password, wrong} {
		bare := fmt.Sprintf("postgres://shop@127.0.0.1:%d/postgres", server.Port())
		for _, way := range []*cli{
			{url: strings.Replace(bare, "shop@", "shop:"+url.QueryEscape(secret)+"@", 1)},
			{url: fmt.Sprintf("host=127.0.0.1 port=%d user=shop dbname=postgres password='%s'", server.Port(), strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(secret))},
			{url: bare + "?password=" + url.QueryEscape(secret)},
		} {
			way.t, way.schema, way.now = t, "pgwake", time.Now
			for i, args := range commands {
				if i%2 == 1 {
					args = append(slices.Clone(args), "--json")
				}
				r := way.run(args...)
				require.NotContains(t, r.out+r.err, "s3cr3t", "%q", args)
				require.NotContains(t, r.out+r.err, "w0rd", "%q", args)
				if args[0] == "peek" {
					require.Equal(t, secret == password && len(args) == 1, r.code == exitOK, "%s: the password is asked for, and is what it is: %s", way.url, r.err)
				}
			}
		}
	}
}
