//go:build unix

package main

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// This file answers: does anybody still read the output?

// isGone says that nobody does: head has enough, say, or the terminal was closed. A write would tell as well, but there may be nothing to write.
func isGone(to io.Writer) (gone bool) {
	f, is := to.(*os.File)
	if !is {
		return false
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return false
	}
	_ = conn.Control(func(fd uintptr) {
		asked := []unix.PollFd{{Fd: int32(fd)}} // for errors alone, which always are told
		n, err := unix.Poll(asked, 0)
		gone = err == nil && n == 1 && asked[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
	})
	return gone
}
