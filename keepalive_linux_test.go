package pgwake

import (
	"context"
	"net"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testpooler"
	"github.com/stretchr/testify/require"
)

func TestOpen_ConnectionsOfThePoolNoticeAPeerThatIsGone(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	conn, err := p.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	seen := conn.Conn().PgConn().Conn().(interface{ NetConn() net.Conn }) // by which the Provider notices that something came
	tcp, ok := seen.NetConn().(*net.TCPConn)
	if !ok {
		t.Skip("the server is not reached by TCP")
	}
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	var timeout int
	require.NoError(t, raw.Control(func(fd uintptr) { timeout, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout) }))
	require.NoError(t, err)
	require.Equal(t, 25_000, timeout, "TCP_USER_TIMEOUT in milliseconds")
	require.Equal(t, kept, keepAlivesOf(t, conn.Conn()), "and its server")
}

var kept = [...]string{"10", "5", "3", "25000"}

func keepAlivesOf(t *testing.T, conn *pgx.Conn) (shown [len(keepAlives)]string) {
	t.Helper()
	for i, set := range keepAlives {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT setting FROM pg_settings WHERE name = $1`, set.name).Scan(&shown[i]))
	}
	return shown
}

func TestTunePool_ServersKeepAlive_IsWhatNobodyElseHasSet(t *testing.T) {
	t.Parallel()
	plain, err := pgx.Connect(t.Context(), testdb.URL(t))
	require.NoError(t, err)
	defer plain.Close(context.Background())
	untouched := keepAlivesOf(t, plain)
	theirs := untouched
	theirs[3] = "7000"
	later := kept
	later[3] = "7000"
	for name, c := range map[string]struct {
		parameters map[string]string
		after      string
		want       [len(keepAlives)]string
	}{
		"nobody":                     {want: kept},
		"parameters":                 {parameters: map[string]string{"tcp_user_timeout": "7000"}, want: theirs},
		"options":                    {parameters: map[string]string{"options": "-c tcp_user_timeout=7000"}, want: theirs},
		"their hook, which is later": {after: `SET tcp_user_timeout = 7000`, want: later},
	} {
		config, err := pgxpool.ParseConfig(testdb.URL(t))
		require.NoError(t, err)
		for name, value := range c.parameters {
			config.ConnConfig.RuntimeParams[name] = value
		}
		var made int
		config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { made++; return nil }
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, c.after)
			return err
		}
		TunePool(config)
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		for range 2 { // the second begins with it
			conn, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.want, keepAlivesOf(t, conn.Conn()), name)
			pool.Reset()
			conn.Release()
		}
		require.Equal(t, 2, made, name)
	}
}

func TestTunePool_PoolerComesInBetween_IsAskedForNothingItDoesNotKnow(t *testing.T) {
	t.Parallel()
	through := testpooler.Start(t, testdb.URL(t), "transaction")
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	var between bool
	config.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
		if between {
			through(config)
		}
		return nil
	}
	TunePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	shown := func() [len(keepAlives)]string {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		return keepAlivesOf(t, conn.Conn())
	}
	require.Equal(t, kept, shown())
	between = true
	pool.Reset()
	_, err = pool.Acquire(t.Context())
	require.ErrorContains(t, err, "unsupported startup parameter")
	require.NotEqual(t, kept, shown())
}

func TestTunePool_Pooler_ItsSessionsAreLeftAlone(t *testing.T) {
	t.Parallel()
	through := testpooler.Start(t, testdb.URL(t), "transaction")
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	through(config.ConnConfig)
	TunePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	for range 2 {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		require.NotEqual(t, kept, keepAlivesOf(t, conn.Conn()))
		pool.Reset()
		conn.Release()
	}
}

// What the second one's server is to have is known only after it has begun.
func TestServerKeepAlive_TwoConnectionsBeginAtOnce_BothHaveIt(t *testing.T) {
	t.Parallel()
	var k serverKeepAlive
	var begun [2]*pgx.Conn
	for i := range begun {
		config, err := pgx.ParseConfig(testdb.URL(t))
		require.NoError(t, err)
		k.before(config)
		begun[i], err = pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		defer begun[i].Close(context.Background())
	}
	for _, conn := range begun {
		require.NoError(t, k.after(t.Context(), conn))
		require.Equal(t, kept, keepAlivesOf(t, conn))
	}
}
