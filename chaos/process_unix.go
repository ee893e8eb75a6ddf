//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// This file answers: how are processes stopped and continued?

func stop(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }

func resume(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

// ownGroup sets a process apart: Ctrl-C in a terminal does not reach it, and if the parent dies while it is
// stopped, the system continues it, so that it sees the end of its input.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
