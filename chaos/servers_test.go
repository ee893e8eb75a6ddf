package main

import (
	"context"
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

// The servers of a run, without processes: what each fault does to them is what it is to do.
func TestServers_FullDiskWrongClockFailover(t *testing.T) {
	if testing.Short() {
		t.Skip("boots servers")
	}
	c := &chaos{options: options{}, conditions: conditions{ahead: 7 * time.Hour}, out: io.Discard, dir: t.TempDir(), counts: map[string]int{}}
	require.NoError(t, c.bootServer(t.Context()))
	t.Cleanup(func() {
		require.NoError(t, c.endServer(context.Background()))
		require.NoError(t, c.premises.remove())
	})
	if c.bin == "" || c.store == "" || c.ahead == 0 {
		t.Skip("needs root, faketime, and the programs of a server")
	}
	c.net = newNetwork("")
	exec := func(sql string, to ...any) error {
		return c.ask(t.Context(), func(ctx context.Context, conn *pgx.Conn) error { return conn.QueryRow(ctx, sql).Scan(to...) })
	}
	inflict := func(how func(*chaos, context.Context, fault, *node) (func() error, error), during func()) {
		heal, err := how(c, t.Context(), fault{}, nil)
		require.NoError(t, err)
		during()
		require.NoError(t, heal())
	}
	const add = `WITH w AS (INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 50) i RETURNING 1) SELECT count(*) FROM w`
	var n int
	var now time.Time
	require.NoError(t, exec(`SELECT clock_timestamp()`, &now))
	assert.WithinDuration(t, time.Now().Add(7*time.Hour), now, time.Minute)
	require.NoError(t, c.ask(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `CREATE TABLE t (i int, filler text)`)
		return err
	}))

	unlogged := func(inflict func()) {
		for _, schema := range allSchemas {
			require.NoError(t, exec(`WITH w AS (INSERT INTO `+schema+`.u VALUES (1) RETURNING 1) SELECT count(*) FROM w`, &n))
		}
		inflict()
		require.Empty(t, c.violations)
	}
	inflict(halt(devpg.Immediate), func() {})
	require.Len(t, c.violations, len(allSchemas), "there are no such tables")
	assert.Contains(t, c.violations[0], "schema pgwake has no unlogged tables")
	c.violations = nil
	for _, schema := range allSchemas {
		require.NoError(t, c.ask(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `CREATE SCHEMA `+schema+`; CREATE UNLOGGED TABLE `+schema+`.u (i int)`)
			return err
		}))
	}
	unlogged(func() { inflict(halt(devpg.Immediate), func() { assert.Error(t, exec(add, &n)) }) })
	// A server that is shut down forgets nothing, which is what must not be found after a crash.
	unlogged(func() { inflict(halt(devpg.Fast), func() {}) })
	mark, err := c.mark(t.Context())
	require.NoError(t, err)
	unlogged(func() {})
	require.NoError(t, c.checkUnlogged(t.Context(), mark))
	require.Len(t, c.violations, len(allSchemas))
	assert.Contains(t, c.violations[0], "1 rows of pgwake.u, which is unlogged, are from before")
	c.violations = nil

	require.NoError(t, exec(add, &n))
	inflict((*chaos).fillDisk, func() { assert.Error(t, exec(add, &n)) })
	require.NoError(t, exec(add, &n))
	require.NoError(t, exec(`SELECT count(*) FROM t`, &n))
	assert.Equal(t, 100, n)

	if _, err := (*chaos).failOver(&chaos{premises: &premises{bin: t.TempDir()}}, t.Context(), fault{}, nil); assert.ErrorIs(t, err, errLeftOut) {
		if found, _ := filepath.Glob(filepath.Join(c.bin, "pg_basebackup")); len(found) == 0 {
			return
		}
	}
	before := c.server.Port()
	unlogged(func() { inflict((*chaos).failOver, func() { assert.Error(t, exec(add, &n), "it only reads") }) })
	assert.NotEqual(t, before, c.server.Port())
	require.NoError(t, exec(add, &n))
	require.NoError(t, exec(`SELECT count(*) FROM t`, &n))
	assert.Equal(t, 150, n)
	assert.Len(t, c.crashes, 4)
}
