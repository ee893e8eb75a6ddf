//go:build unix

package devpg

// Who the server runs as, how it is set apart from this process, and the signals
// that end it.

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// account is another user to run the server as. nil is the user that we are.
type account struct {
	name     string
	uid, gid uint32
}

// serverAccount is nil unless we are root, since PostgreSQL refuses root.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.ParseUint(u.Uid, 10, 32)
		gid, errGID := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(errUID, errGID); err != nil {
			return nil, fmt.Errorf("look up user %s: %w", name, err)
		}
		return &account{name: name, uid: uint32(uid), gid: uint32(gid)}, nil
	}
	return nil, errors.New("root cannot run a server, and there is neither a user postgres nor a user nobody")
}

// suffix is " as NAME" for messages.
func (a *account) suffix() string {
	if a == nil {
		return ""
	}
	return " as user " + a.name
}

// run makes cmd run as the account, with its groups only, and in a session of its
// own: Ctrl-C in a terminal and a kill of our process group do not reach it.
func (a *account) run(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if a != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid}
	}
}

// immediateStop is what a postmaster is sent to end at once with all its children,
// even if it was stopped by SIGSTOP.
var immediateStop = []os.Signal{syscall.SIGQUIT, syscall.SIGCONT}
