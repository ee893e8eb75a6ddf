package pgwake_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/pgwake/pgwake/internal/testtls"
	"github.com/stretchr/testify/require"
)

// This file answers: does the password of the database URL get anywhere but to the server?

func TestSecrets_PasswordOfTheURL_IsInNoMetricLogRecordOrError(t *testing.T) {
	t.Parallel()
	const password, wrong = `s3cr3t/"pass'w0rd`, `s3cr3t-that-is-n0ne`
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	admin, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	defer admin.Close(context.Background())
	mustBe := func(password string) {
		_, err = admin.Exec(t.Context(), `ALTER ROLE shop PASSWORD '`+strings.ReplaceAll(password, `'`, `''`)+`'`)
		require.NoError(t, err)
	}
	_, err = admin.Exec(t.Context(), `CREATE ROLE shop LOGIN; GRANT CREATE ON DATABASE postgres TO shop`)
	require.NoError(t, err)
	mustBe(password)
	testtls.AskForPassword(t, server, "shop")
	at := func(password string) string {
		return fmt.Sprintf("postgres://shop:%s@127.0.0.1:%d/postgres", url.QueryEscape(password), server.Port())
	}

	var heard logbook
	m := testmeter.New()
	config := &pgwake.Config{MeterProvider: m, MeasureDepths: time.Second, Logger: slog.New(slog.NewJSONHandler(&heard, &slog.HandlerOptions{Level: slog.LevelDebug, AddSource: true}))}
	say := func(what ...any) { fmt.Fprintf(&heard, "%v %+v\n", what, what) }
	measured := func() error {
		seen, err := m.Collect(t.Context())
		require.NotEmpty(t, seen)
		say(err, seen, m.AllRecorded())
		return err
	}
	p, err := pgwake.Open(t.Context(), at(wrong), config)
	require.Nil(t, p)
	require.ErrorContains(t, err, "password authentication failed")
	say(err)
	p, err = pgwake.Open(t.Context(), at(password), config)
	require.NoError(t, err)
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.NoError(t, measured())
	say(p.Health(), p.Stats())

	// It is another one by now, and every connection has to be made again.
	mustBe(wrong)
	_, err = admin.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return heard.count("not listening") > 0 && len(p.Health().Problems) > 0 }, patience, 10*time.Millisecond)
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, nil)
	require.Error(t, err)
	say(err, p.Health(), p.Stats())
	_ = measured() // depths that are a second old are asked for again, and cannot be
	mustBe(password)
	require.NoError(t, p.Close(t.Context()))

	said := heard.String()
	require.Contains(t, said, pgwake.MetricReceived)
	for _, secret := range []string{password, wrong, url.QueryEscape(password), "s3cr3t"} {
		for line := range strings.Lines(said) {
			require.NotContains(t, line, secret)
		}
	}
}
