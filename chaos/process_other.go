//go:build !unix

package main

import (
	"errors"
	"os/exec"
)

func stop(int) error { return errors.ErrUnsupported }

func resume(int) error { return errors.ErrUnsupported }

func ownGroup(*exec.Cmd) {}
