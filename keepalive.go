package pgwake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: when does a connection notice that its peer is gone?

// keepAlive makes the local end notice a dead peer within about 25 s of silence: by probes while nothing
// is in flight, and by TCP_USER_TIMEOUT, where the system has it, while something is. What cannot be set
// (a Unix socket, a custom dialer) is left as it is; the fallback's deadline bounds those too. It returns whether conn is of TCP.
func keepAlive(conn net.Conn) bool {
	if wrapped, ok := conn.(interface{ NetConn() net.Conn }); ok { // TLS
		conn = wrapped.NetConn()
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return false
	}
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3})
	setUserTimeout(tcp, 25*time.Second)
	return true
}

// keepServerAlive has the other end do the same. Otherwise what a transaction has locked stays so after its machine is gone, for 2 hours, or
// for 15 minutes where the server had something to send. What the parameters of the connection set stays as it is, and so does what cannot be
// set, and the session of a pooler, which others have too: the process id that its clients are told is that of no backend.
func keepServerAlive(ctx context.Context, conn *pgx.Conn) error {
	config := conn.Config()
	for _, set := range serverKeepAlive {
		if _, ok := config.RuntimeParams[set.name]; ok {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(config.ConnectTimeout, answerDeadline)) // a pool gives no bound
	defer cancel()
	pid := strconv.FormatUint(uint64(conn.PgConn().PID()), 10)
	err := conn.PgConn().ExecParams(ctx, setServerKeepAlive, [][]byte{[]byte(pid)}, nil, nil, nil).Read().Err
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && !conn.IsClosed() {
		return nil
	}
	return err
}

// serverKeepAlive is for sessions what keepAlive is for this end. The LISTEN connection's session is given the same by listen_session.
var serverKeepAlive = [...]struct{ name, value string }{
	{"tcp_keepalives_idle", "10"}, {"tcp_keepalives_interval", "5"}, {"tcp_keepalives_count", "3"}, {"tcp_user_timeout", "25000"}}

var setServerKeepAlive = func() string {
	var sets []string
	for _, set := range serverKeepAlive {
		sets = append(sets, fmt.Sprintf("pg_catalog.set_config('%s', '%s', false)", set.name, set.value))
	}
	return "SELECT " + strings.Join(sets, ", ") + " WHERE pg_catalog.pg_backend_pid()::pg_catalog.int8 OPERATOR(pg_catalog.=) $1::pg_catalog.int8"
}()
