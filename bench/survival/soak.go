package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// This file answers: what if nothing happens for a long time? Module chaos has the soak; this has it run, and reads its report.

var soak = scenario{
	name: "soak", what: "every kind of load by two processes, and nothing goes wrong", once: true,
	promise: "nothing grows (memory, goroutines, connections, rows, dead tuples, tables), nothing is late by more than a second, and after all have closed nothing is left",
	run:     soakByChaos,
	keep:    func(*result) []string { return nil }, // the other program judges
}

func soakByChaos(ctx context.Context, t *trial) error {
	dir, err := os.MkdirTemp("", "pgwake-survival-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	arguments := []string{"-soak", "-for", t.o.soak.String(), "-samples", filepath.Join(dir, "soak.jsonl")}
	program := t.o.chaos
	if program == "" {
		program, arguments = "go", append([]string{"run", "github.com/pgwake/pgwake/chaos"}, arguments...)
	}
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	var report, progress bytes.Buffer
	cmd.Stdout, cmd.Stderr = &report, io.MultiWriter(&progress, os.Stderr)
	err = cmd.Run()
	t.Report = report.String()
	var ended *exec.ExitError
	switch {
	case err == nil:
	case ctx.Err() == nil && errors.As(err, &ended) && strings.Contains(t.Report, "VIOLATION: "):
		for line := range strings.Lines(t.Report) {
			if violation, ok := strings.CutPrefix(line, "VIOLATION: "); ok {
				t.Broken = append(t.Broken, strings.TrimSpace(violation))
			}
		}
	default:
		return fmt.Errorf("%w\n%s", err, progress.String())
	}
	if _, version, ok := strings.Cut(progress.String(), "PostgreSQL "); ok {
		t.Postgres, _, _ = strings.Cut(version, " ")
	}
	t.Fsync = false // devpg says so of a server that is there to be soaked
	return t.readSoak(t.Report)
}

var (
	soakItems = regexp.MustCompile(`(?m)^(\d+) items and messages, (\d+) deliveries;`)
	soakWaits = regexp.MustCompile(`(?m)^from due to in hand: p50 (\S+), p99 (\S+), at most (\S+); (\d+) later than (\S+)$`)
)

// soaked is how late items were. A soak has no phases, and keeps its samples to itself.
type soaked struct {
	Length time.Duration `json:"length"`
	P50    time.Duration `json:"p50"`
	P99    time.Duration `json:"p99"`
	Max    time.Duration `json:"max"`
}

// readSoak takes the figures out of the report of a soak.
func (t *trial) readSoak(report string) error {
	items, waits := soakItems.FindStringSubmatch(report), soakWaits.FindStringSubmatch(report)
	if items == nil || waits == nil {
		return fmt.Errorf("the report of the soak is not understood:\n%s", report)
	}
	var err error
	if t.Items, err = strconv.Atoi(items[1]); err != nil {
		return err
	}
	t.Soaked = &soaked{Length: t.o.soak}
	for i, to := range []*time.Duration{&t.Soaked.P50, &t.Soaked.P99, &t.Soaked.Max} {
		if *to, err = time.ParseDuration(waits[i+1]); err != nil {
			return err
		}
	}
	return nil
}
