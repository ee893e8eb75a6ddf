package pgwake

import (
	"net"
	"syscall"
	"testing"

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
}
