package main

import (
	"context"
	"fmt"
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

	lanes := 0
	unlogged := func(inflict func()) {
		lanes++
		for _, schema := range allSchemas {
			require.NoError(t, exec(fmt.Sprintf(`WITH w AS (INSERT INTO %s.waiters (node, lane, listener, queue, armed, number, namespace, fanout, places)
				VALUES (-1, %d, -1, 'worker', false, 0, '*', 1, 1) RETURNING 1) SELECT count(*) FROM w`, schema, lanes), &n))
		}
		inflict()
		require.Empty(t, c.violations)
	}
	inflict(halt(devpg.Immediate), func() {})
	require.Len(t, c.violations, len(allSchemas), "there are no such tables")
	assert.Contains(t, c.violations[0], "schema pgwake has no unlogged tables")
	c.violations = nil
	require.NoError(t, c.prepare(t.Context()))
	require.NoError(t, c.prepareLayers(t.Context()))
	unlogged(func() { inflict(halt(devpg.Immediate), func() { assert.Error(t, exec(add, &n)) }) })
	// A server that is shut down forgets nothing, which is what must not be found after a crash.
	unlogged(func() { inflict(halt(devpg.Fast), func() {}) })
	mark, err := c.mark(t.Context())
	require.NoError(t, err)
	unlogged(func() {})
	require.NoError(t, c.checkUnlogged(t.Context(), mark))
	require.Len(t, c.violations, len(allSchemas))
	assert.Contains(t, c.violations[0], "1 rows of pgwake.waiters, which is unlogged, are from before")
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

	require.NoError(t, c.checkSwept(t.Context()))
	require.NoError(t, c.checkNothingRemains(t.Context()))
	require.Empty(t, c.violations)
	unlogged(func() {}) // of a node that is gone
	require.NoError(t, c.checkSwept(t.Context()))
	var left []string
	for _, schema := range allSchemas {
		left = append(left, "1 queues with rows of nodes that are gone, in schema "+schema+", are left with others there")
	}
	assert.Equal(t, left, c.violations)
	c.violations = nil
	require.NoError(t, c.checkNothingRemains(t.Context()))
	require.Empty(t, c.violations, "another node removes them")

	conn, err := pgx.Connect(t.Context(), c.server.URL+"&application_name=chaos-1-pool")
	require.NoError(t, err)
	left = []string{"1 connections are left after all have closed", "4 advisory locks are left after all have closed"}
	for _, schema := range allSchemas {
		_, err = conn.Exec(t.Context(), `SELECT `+schema+`.listen_session(-1, -1)`) // of one that is there
		require.NoError(t, err)
		require.NoError(t, exec(`WITH l AS (INSERT INTO `+schema+`.instance_locks (instance_id, lock_token, locked_until)
			VALUES ('a', gen_random_uuid(), now() + interval '1 h'), ('b', gen_random_uuid(), now() - interval '1 h')) SELECT 1`, &n))
		left = append(left, "1 rows of waiters in schema "+schema+" are left after all have closed",
			"1 locked instances in schema "+schema+" are left after all have closed")
	}
	require.NoError(t, c.checkSwept(t.Context()))
	require.Empty(t, c.violations)
	require.NoError(t, c.checkNothingRemains(t.Context()))
	assert.Equal(t, left, c.violations)
	require.NoError(t, conn.Close(t.Context()))
}
