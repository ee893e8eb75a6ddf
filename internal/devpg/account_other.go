//go:build !unix

package devpg

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
)

// account is another user to run the server as; there is none here.
type account struct{}

// serverAccount fails: without a POSIX shell there is no watchdog, and without
// that a server could be left running.
func serverAccount() (*account, error) {
	return nil, fmt.Errorf("not supported here (%s): %w", runtime.GOOS, errors.ErrUnsupported)
}

func (a *account) suffix() string { return "" }

func (a *account) run(*exec.Cmd) {}

var immediateStop []os.Signal
