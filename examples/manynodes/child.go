package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"time"
)

// This file answers: how does the parent hold its nodes?

// child is a node, seen from its parent.
type child struct {
	cmd    *exec.Cmd
	killed bool
	ended  chan error
}

// startNode starts a process that passes on its reports, and ends when ctx does.
func startNode(ctx context.Context, r role, reports chan<- report) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	encoded, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), envRole+"="+string(encoded))
	cmd.Stderr = os.Stderr
	leash, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	cmd.Cancel, cmd.WaitDelay = leash.Close, 10*time.Second // ask it first
	lines, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, ended: make(chan error, 1)}
	pass := func(line report) {
		select {
		case reports <- line:
		case <-ctx.Done(): // nobody wants to know any more
		}
	}
	go func() {
		decoder := json.NewDecoder(lines)
		var line report
		for decoder.Decode(&line) == nil {
			pass(line)
			line = report{}
		}
		err := cmd.Wait()
		if cmd.ProcessState.Success() {
			err = nil // rather than that ctx has ended
		}
		c.ended <- err
		pass(report{Node: r.Node, What: ended})
	}()
	return c, nil
}

// kill gives the process no time for anything.
func (c *child) kill() error {
	c.killed = true
	return c.cmd.Process.Kill()
}

// wait returns when the process has ended, with an error if it had trouble.
func (c *child) wait() error {
	err := <-c.ended
	if c.killed {
		return nil
	}
	return err
}
