package main

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: does migrate do to a schema what the library does, and say where it is?

func states(all []layerState) (texts []string) {
	for _, s := range all {
		texts = append(texts, s.Layer+" "+s.State)
	}
	return texts
}

func TestMigrate_UpThenDown_LayerByLayer(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	require.Equal(t, []string{"root current", "taskgraph missing", "eventbus missing"}, states(into[[]layerState](c, "migrate", "status")))
	require.Equal(t, []string{"root current", "taskgraph current", "eventbus current"},
		states(into[[]layerState](c, "migrate", "up", "--layer", "eventbus,root", "--layer", "taskgraph")))
	require.Contains(t, c.ok("migrate", "status"), "eventbus")

	said := c.refused(exitFailed, "migrate", "down", "--yes")
	require.Contains(t, said, "--layer", "another layer stands on it")
	require.Equal(t, []string{"root current", "taskgraph missing", "eventbus missing"},
		states(into[[]layerState](c, "migrate", "down", "--yes", "--layer", "taskgraph,eventbus")))
}

func TestMigrateDown_IsAsked_OnlyYesGoesOn(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	c.ok("migrate", "up", "--layer", "taskgraph")
	for _, answer := range []string{"n\n", "\n", "what\n"} {
		c.in = answer
		require.Contains(t, c.refused(exitFailed, "migrate", "down", "--layer", "taskgraph"), "nothing was done")
		require.Equal(t, "taskgraph current", states(into[[]layerState](c, "migrate", "status"))[1])
	}
	c.in = "y\n"
	c.ok("migrate", "down", "--layer", "taskgraph")
	require.Equal(t, "taskgraph missing", states(into[[]layerState](c, "migrate", "status"))[1])
}

func TestMigrateDown_RowsWouldBeLost_SaysSo(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	require.Contains(t, c.refused(exitFailed, "migrate", "down", "--yes"), "→ empty the tables")
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "x"}, 1)
}

func TestMigratePrint_AppliedByHand_IsWhatUpWouldHaveDone(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	quoted := pgx.Identifier{c.schema}.Sanitize()
	c.exec(`DROP SCHEMA ` + quoted + ` CASCADE`)
	sql := c.ok("migrate", "print", "--layer", "root,taskgraph,eventbus")
	conn := c.connect(c.url)
	_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	require.NoError(t, err)
	require.Equal(t, []string{"root current", "taskgraph current", "eventbus current"}, states(into[[]layerState](c, "migrate", "status")))
	require.Contains(t, c.ok("migrate", "print", "--from", "1000"), "has nothing after")
	require.Len(t, into[map[string]string](c, "migrate", "print", "--layer", "root,eventbus"), 2)
}

func TestMigratePrint_NeedsNoDatabase(t *testing.T) {
	t.Parallel()
	c := &cli{t: t, schema: "by_hand", now: time.Now}
	require.Contains(t, c.ok("migrate", "print"), `SET LOCAL search_path = "by_hand"`)
}
