package pgwake

import (
	"context"
	"net"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

func TestOpen_ConnectionsOfThePoolNoticeAPeerThatIsGone(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	conn, err := p.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	tcp, ok := conn.Conn().PgConn().Conn().(*net.TCPConn)
	if !ok {
		t.Skip("the server is not reached by TCP")
	}
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	var timeout int
	require.NoError(t, raw.Control(func(fd uintptr) { timeout, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout) }))
	require.NoError(t, err)
	require.Equal(t, 25_000, timeout, "TCP_USER_TIMEOUT in milliseconds")
	require.Equal(t, [...]string{"10", "5", "3", "25000"}, serverKeepAliveOf(t, conn.Conn()), "and its server")
}

func serverKeepAliveOf(t *testing.T, conn *pgx.Conn) (shown [len(serverKeepAlive)]string) {
	t.Helper()
	for i, set := range serverKeepAlive {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT setting FROM pg_settings WHERE name = $1`, set.name).Scan(&shown[i]))
	}
	return shown
}

func TestTunePool_ServerKeepAlive_IsLeftToParametersAndPoolers(t *testing.T) {
	t.Parallel()
	connect := func(parameters map[string]string, hooks ...func(*pgx.Conn) error) [len(serverKeepAlive)]string {
		config, err := pgxpool.ParseConfig(testdb.URL(t))
		require.NoError(t, err)
		for name, value := range parameters {
			config.ConnConfig.RuntimeParams[name] = value
		}
		config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
			for _, hook := range hooks {
				if err := hook(conn); err != nil {
					return err
				}
			}
			return nil
		}
		TunePool(config)
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		return serverKeepAliveOf(t, conn.Conn())
	}
	plain, err := pgx.Connect(t.Context(), testdb.URL(t))
	require.NoError(t, err)
	defer plain.Close(context.Background())
	untouched := serverKeepAliveOf(t, plain)
	theirs := untouched
	theirs[3] = "7000"
	require.Equal(t, theirs, connect(map[string]string{"tcp_user_timeout": "7000"}))
	require.Equal(t, "25000", connect(nil)[3])
	require.Equal(t, "8000", connect(nil, func(conn *pgx.Conn) error {
		_, err := conn.Exec(context.Background(), `SET tcp_user_timeout = 8000`)
		return err
	})[3], "their hook comes after")

	_, err = plain.PgConn().ExecParams(t.Context(), setServerKeepAlive, [][]byte{[]byte("4294967295")}, nil, nil, nil).Close()
	require.NoError(t, err)
	require.Equal(t, untouched, serverKeepAliveOf(t, plain), "whoever was told of another process has not got this session for itself")
}
