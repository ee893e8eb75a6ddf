//go:build !linux

package pgwake

import (
	"net"
	"time"
)

func setUserTimeout(*net.TCPConn, time.Duration) {}
