//go:build !linux

package pgbouncer

import "os/exec"

func confine(*exec.Cmd) error { return nil }
