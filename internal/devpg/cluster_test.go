//go:build unix

package devpg

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A port that was free when it was chosen may be taken when the server binds it,
// and what answers there may even be a PostgreSQL.
func TestFirstStart_PortTakenMeanwhile_TakesAnother(t *testing.T) {
	ctx := t.Context()
	if len(candidates(ctx, os.Getenv(EnvBinDir))) == 0 {
		t.Skip("there are no PostgreSQL server binaries on this machine")
	}
	winner, err := Start(ctx, &Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, winner.Stop(context.Background())) })
	loser, err := Start(ctx, &Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, loser.Stop(context.Background())) })
	require.NoError(t, loser.Halt(ctx, Immediate))

	var free int
	offers := []func() (int, error){
		func() (int, error) { return winner.Port(), nil },
		func() (_ int, err error) { free, err = freePort(); return free, err },
	}
	err = loser.cluster.firstStart(ctx, func() (int, error) {
		offer := offers[0]
		offers = offers[1:]
		return offer()
	})
	require.NoError(t, err)
	assert.Equal(t, free, loser.Port())
	assert.NoError(t, loser.cluster.answers(ctx))

	err = loser.Halt(ctx, Immediate)
	require.NoError(t, err)
	err = loser.cluster.firstStart(ctx, func() (int, error) { return winner.Port(), nil })
	assert.ErrorIs(t, err, errEnded)
	assert.Contains(t, loser.cluster.logTail(), "could not bind")
	loser.cluster.port = winner.Port()
	assert.ErrorIs(t, loser.cluster.answers(ctx), errForeign)
}
