package main

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemo_EachStream_SendsAllAndLeavesNothing(t *testing.T) {
	for _, stream := range []string{"pgwake", "pgmq", "amqp"} {
		t.Run(stream, func(t *testing.T) {
			c := config{stream: stream, databaseURL: pgwaketest.URL(t), amqpURL: os.Getenv("PGWAKE_AMQP_URL")}
			if stream == "amqp" && c.amqpURL == "" {
				t.Skip("PGWAKE_AMQP_URL names no RabbitMQ; the tests of module adapter/amqp start one")
			}
			var out bytes.Buffer
			require.NoError(t, demo(t.Context(), c, &out))
			require.Contains(t, out.String(), stream+": 60 invoices of 3 tenants sent in ")
			require.Contains(t, out.String(), ", 6 of them at the second attempt")
			if stream == "pgmq" {
				require.Regexp(t, `^pgmq: (the extension of this server|a stand-in, since the extension cannot be created: .+)\n`, out.String())
			}
			conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
			require.NoError(t, err)
			defer conn.Close(t.Context())
			var left int
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_database WHERE datname = $1) + (SELECT count(*) FROM pg_namespace WHERE nspname = $1)`,
				fmt.Sprintf("streams_%d", os.Getpid())).Scan(&left))
			require.Zero(t, left)
		})
	}
}

// A PostgreSQL that was started would be in the output.
func TestRun_UnusableConfig_IsSaidBeforeAnythingStarts(t *testing.T) {
	for name, c := range map[string]struct {
		config
		says []string
	}{
		"no such stream": {config{stream: "nope"}, []string{`"nope"`, "pgwake, pgmq or amqp"}},
		"no URL":         {config{stream: "amqp"}, []string{"-amqp", "PGWAKE_AMQP_URL", amqpExample}},
		"no URL of AMQP": {config{stream: "amqp", amqpURL: "localhost"}, []string{"-amqp", "PGWAKE_AMQP_URL", "amqp:// or amqps://"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := run(t.Context(), c.config, &out)
			for _, say := range c.says {
				require.ErrorContains(t, err, say)
			}
			require.Empty(t, out.String())
		})
	}
}
