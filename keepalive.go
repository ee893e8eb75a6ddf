package pgwake

import (
	"net"
	"time"
)

// This file answers: when does a connection notice that its peer is gone?

// keepAlive makes the local end notice a dead peer within about 25 s of silence: by probes while nothing
// is in flight, and by TCP_USER_TIMEOUT, where the system has it, while something is. What cannot be set
// (a Unix socket, a custom dialer) is left as it is; the fallback's deadline bounds those too.
func keepAlive(conn net.Conn) {
	if wrapped, ok := conn.(interface{ NetConn() net.Conn }); ok { // TLS
		conn = wrapped.NetConn()
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3})
	setUserTimeout(tcp, 25*time.Second)
}
