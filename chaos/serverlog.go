package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// This file answers: what has the server to say of it?
//
// It says who waited for a lock for longer than a second, and who was in a deadlock. The library must not bring about
// any: it would repeat what the server broke off, so that nothing would be seen but two calls that took a second.

// readServerLog complains about deadlocks.
func (c *chaos) readServerLog() error {
	f, err := os.Open(c.server.LogPath())
	if err != nil {
		return err
	}
	defer f.Close()
	found, err := deadlocks(f)
	for _, what := range found {
		c.complain(errors.New(what))
	}
	return err
}

// goesOn matches the lines that belong to the error before them.
var goesOn = regexp.MustCompile(`^\t|(DETAIL|HINT|CONTEXT|STATEMENT):  `)

// deadlocks returns what a log says of each: the line, and those that belong to it.
func deadlocks(log io.Reader) (found []string, err error) {
	lines := bufio.NewReader(log)
	inside := false
	for {
		line, err := lines.ReadString('\n')
		switch {
		case strings.Contains(line, "ERROR:  deadlock detected"):
			found, inside = append(found, line), true
		case inside && goesOn.MatchString(line):
			found[len(found)-1] += line
		default:
			inside = false
		}
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return found, err
		}
	}
}

// keepServerLog copies the log to the ledgers, before it goes with the server.
func (c *chaos) keepServerLog() error {
	c.logs++
	from, err := os.Open(c.server.LogPath())
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(filepath.Join(c.dir, fmt.Sprintf("server-log-%d.txt", c.logs)))
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	if err = errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("keep the server's log: %w", err)
	}
	return nil
}
