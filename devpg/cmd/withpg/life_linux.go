package main

import (
	"os/exec"
	"syscall"
)

// endWithUs ends the command if we are killed: without its server it has nothing
// to do.
func endWithUs(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
}
