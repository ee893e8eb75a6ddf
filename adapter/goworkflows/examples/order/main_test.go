package main

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestRun_TheFirstProcessIsKilled_TheSecondFinishes(t *testing.T) {
	o, err := run(t.Context())
	require.NoError(t, err)
	require.Equal(t, "paid 1995 cents, sent as parcel 1", o.result)
	require.Len(t, o.effects, articles+2, "each once")
	by := map[int]int{}
	for _, pid := range o.effects {
		by[pid]++
	}
	require.GreaterOrEqual(t, by[o.pids[0]], diesAfter)
	require.Greater(t, by[o.pids[1]], 2)
	require.Len(t, by, 2)
}

func TestRun_Interrupted_Ends(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := run(ctx)
	assert.ErrorIs(t, err, context.Canceled)
}
