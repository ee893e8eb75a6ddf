package pgwake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: when does a connection notice that its peer is gone?

// keepAlive makes the local end notice a dead peer within about 25 s of silence: by probes while nothing
// is in flight, and by TCP_USER_TIMEOUT, where the system has it, while something is. What cannot be set
// (a Unix socket, a custom dialer) is left as it is; the fallback's deadline bounds those too. It returns whether conn is of TCP.
func keepAlive(conn net.Conn) bool {
	for {
		wrapped, ok := conn.(interface{ NetConn() net.Conn }) // TLS, and what notices that something came
		if !ok {
			break
		}
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

// serverKeepAlive has the other ends of a pool's connections do the same. Otherwise what a transaction has locked stays so after its machine is
// gone, for 2 hours, or for 15 minutes where the server had something to send. What anybody has set already stays as it is, and so does what
// cannot be set, and a session of a pooler, which others have too.
//
// Who is at the other end is asked by a statement on the first connection; the others say what they want when they begin, which costs nothing.
type serverKeepAlive struct{ is atomic.Int32 }

// What is known of the other end.
const (
	notAsked  = iota
	wanted    // sessions are to begin with it
	leftAlone // they are not
)

// keepAlives is for sessions what keepAlive is for this end. The LISTEN connection's is given the same by listen_session.
var keepAlives = [...]struct{ name, value string }{
	{"tcp_keepalives_idle", "10"}, {"tcp_keepalives_interval", "5"}, {"tcp_keepalives_count", "3"}, {"tcp_user_timeout", "25000"}}

// setKeepAlives returns a row if they are set, which is where the process id that the client was told is that of the backend, as a pooler's is
// not, and nobody has set any. The id is put in: one message, which whoever is in between understands.
var setKeepAlives = func() string {
	var names, sets []string
	for _, set := range keepAlives {
		names = append(names, "'"+set.name+"'")
		sets = append(sets, fmt.Sprintf("pg_catalog.set_config('%s', '%s', false)", set.name, set.value))
	}
	return "SELECT " + strings.Join(sets, ", ") + ` WHERE pg_catalog.pg_backend_pid()::pg_catalog.int8 OPERATOR(pg_catalog.=) %d::pg_catalog.int8
		AND NOT EXISTS (SELECT FROM pg_catalog.pg_settings s WHERE s.name OPERATOR(pg_catalog.=) ANY (ARRAY[` + strings.Join(names, ", ") + `])
			AND s.source OPERATOR(pg_catalog.<>) 'default')`
}()

// before changes the configuration of a connection that is to be made.
func (k *serverKeepAlive) before(config *pgx.ConnConfig) {
	if k.is.Load() != wanted {
		return
	}
	for _, set := range keepAlives {
		config.RuntimeParams[set.name] = set.value
	}
	saw := config.OnPgError
	config.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
		if err.Code == "08P01" { // it is a pooler now, which knows none of these
			k.is.Store(leftAlone)
		}
		return saw == nil || saw(conn, err)
	}
}

// after finds out what is at the other end, unless that is known and the connection began with what it is to have.
func (k *serverKeepAlive) after(ctx context.Context, conn *pgx.Conn) error {
	switch k.is.Load() {
	case leftAlone:
		return nil
	case wanted:
		// One that began before that was known says it by itself.
		if conn.Config().RuntimeParams[keepAlives[0].name] != "" {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, askPatience) // a pool gives no bound
	defer cancel()
	results, err := conn.PgConn().Exec(ctx, fmt.Sprintf(setKeepAlives, conn.PgConn().PID())).ReadAll()
	refused := (*pgconn.PgError)(nil)
	switch {
	case err == nil && len(results) == 1 && len(results[0].Rows) == 1:
		k.is.CompareAndSwap(notAsked, wanted)
	case err == nil || errors.As(err, &refused) && !conn.IsClosed():
		k.is.CompareAndSwap(notAsked, leftAlone)
	default:
		return err
	}
	return nil
}

// askPatience is as long as it takes to notice a dead peer: a pooler all of whose sessions are busy does not answer, and is no worse than that for
// whoever needs one of them anyway.
const askPatience = 25 * time.Second
