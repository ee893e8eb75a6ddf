package measure

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	ChildMain() // this binary is the child of Redelivery as well
	goleak.VerifyTestMain(m)
}

// server is found or booted by the first test that needs it. It stays reachable until the process ends, and
// its end goes with that.
var server = sync.OnceValues(func() (*devpg.Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return devpg.Start(ctx, &devpg.Options{Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
})

// serverURL is for sessions in which the server makes functions without looking into them: each scenario has all migrations run, and
// that they pass that look, their own tests say.
func serverURL(t *testing.T) string {
	t.Helper()
	s, err := server()
	require.NoError(t, err)
	url, err := withSetting(s.URL, "check_function_bodies", "off")
	require.NoError(t, err)
	return url
}

func run(t *testing.T, url, sql string) {
	t.Helper()
	require.NoError(t, withConn(context.Background(), url, func(conn *pgx.Conn) error {
		_, err := conn.Exec(context.Background(), sql)
		return err
	}))
}
