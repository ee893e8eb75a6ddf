package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: does bench measure, and leave nothing behind?

// benchSchemas counts those of measurements that are there.
func (c *cli) benchSchemas() (n int) {
	c.t.Helper()
	require.NoError(c.t, c.connect(c.url).QueryRow(c.t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'pgwake\_bench\_%'`).Scan(&n))
	return n
}

// Not in parallel: whoever else measures has a schema as well.
func TestBench_MeasuresAndLeavesNothing(t *testing.T) {
	c, _ := newCLI(t, nil)
	b := into[benchmark](c, "bench", "--for", "600ms", "--batch", "20")
	for _, s := range []spread{b.RoundTrip, b.Commit, b.Hand} {
		require.Positive(t, s.Samples)
		require.Positive(t, s.P50)
		require.LessOrEqual(t, s.P50, s.Max)
	}
	require.Positive(t, b.Done.PerSecond)
	require.Equal(t, b.Enqueued.Items, b.Done.Items)
	require.True(t, b.Listening)
	require.Zero(t, c.benchSchemas())
	require.Contains(t, c.ok("bench", "--for", "300ms"), "enqueue to hand")
	require.Zero(t, c.benchSchemas())
}

func TestBench_Interrupted_LeavesNothing(t *testing.T) {
	c, _ := newCLI(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	require.Equal(t, exitFailed, c.runIn(ctx, "bench", "--for", "1h").code)
	require.Zero(t, c.benchSchemas())
}

func TestBench_RoleMayNotCreateSchemas_SaysWhatToGrant(t *testing.T) {
	c, _ := newCLI(t, nil)
	require.Contains(t, c.refused(exitFailed, "bench", "--database-url", c.as(c.role(""))), "GRANT CREATE ON DATABASE")
	require.Zero(t, c.benchSchemas())
}
