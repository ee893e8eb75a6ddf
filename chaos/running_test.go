package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: would what is looked at while processes run, rather than in ledgers, be told from what may be?

func TestCountListeners_NotExactlyOneOfANode_IsAViolation(t *testing.T) {
	n := &node{index: 901, role: worker}
	c := &chaos{server: &devpg.Server{URL: testdb.URL(t)}, nodes: []*node{n}, out: io.Discard, counts: map[string]int{}}
	violations := func() []string {
		c.violations = nil
		require.NoError(t, c.countListeners(t.Context()))
		return c.violations
	}
	listen := func(sql string) {
		config, err := pgx.ParseConfig(c.server.URL)
		require.NoError(t, err)
		config.RuntimeParams["application_name"] = n.name("listen")
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	require.Len(t, violations(), 1)
	assert.Contains(t, c.violations[0], "node 901 (worker) has 0 LISTEN connections")
	listen(`SELECT pg_advisory_lock(901, 1)`)
	require.Empty(t, violations())
	listen(`SELECT 1`) // one of those that a node has for a few seconds
	require.Empty(t, violations())
	listen(`SELECT pg_advisory_lock(901, 2)`)
	require.Len(t, violations(), 1)
}

func TestCountListeners_ComesToListenInTime_IsNone(t *testing.T) {
	n := &node{index: 902, role: worker}
	c := &chaos{server: &devpg.Server{URL: testdb.URL(t)}, nodes: []*node{n}, out: io.Discard, counts: map[string]int{}, options: options{slack: time.Minute}}
	counted := make(chan error, 1)
	go func() { counted <- c.countListeners(t.Context()) }()
	config, err := pgx.ParseConfig(c.server.URL)
	require.NoError(t, err)
	config.RuntimeParams["application_name"] = n.name("listen")
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `SELECT pg_advisory_lock(902, 1)`)
	require.NoError(t, err)
	require.NoError(t, <-counted)
	require.Empty(t, c.violations)
}

func TestReadLogs_RaceOrPanicOfAProcess_IsAViolation(t *testing.T) {
	c := &chaos{dir: t.TempDir()}
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o644))
	}
	write("a.log", "level=WARN msg=\"the server is away\"\n")
	write("ledger.jsonl", "panic")
	c.readLogs()
	require.Empty(t, c.violations)
	write("b.log", "ready\npanic: no such thing\n\ngoroutine 1")
	write("c.log", "WARNING: DATA RACE\nWrite at")
	c.readLogs()
	require.Len(t, c.violations, 2)
	assert.Contains(t, c.violations[0], "b.log: panic: no such thing")
	assert.Contains(t, c.violations[1], "c.log: DATA RACE")
}
