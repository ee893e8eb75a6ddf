package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: is what was there when somebody began to follow told from what came later?

func TestSnapshot_SawWhatHadEnded(t *testing.T) {
	t.Parallel()
	s, err := parseSnapshot("10:15:10,13")
	require.NoError(t, err)
	for xact, saw := range map[uint64]bool{9: true, 10: false, 11: true, 13: false, 14: true, 15: false, 100: false} {
		require.Equal(t, saw, s.saw(xact), xact)
	}
	xact, id := s.before()
	require.EqualValues(t, 9, xact)
	require.Positive(t, id)
	later := s.shifted(1000)
	for xact := range uint64(20) {
		require.Equal(t, s.saw(xact), later.saw(1000+xact), xact)
	}
	require.True(t, later.saw(999), "from another server")
	require.False(t, snapshot{}.saw(1), "who begins at the beginning has seen nothing")
	for _, text := range []string{"", "1:2", "1:x:", "1:2:3:4", "a:b:c"} {
		_, err := parseSnapshot(text)
		require.Error(t, err, text)
	}
}

// tail letters asks for snapshots as long as an id is missing, and goes on after what passes.
func TestSnapshot_ConnectionIsLost_Passes(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	var err error
	require.Eventually(t, func() bool {
		var pid int32
		if p.Pool().QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid) != nil {
			return false
		}
		c.exec(`SELECT pg_terminate_backend($1::int, 10000)`, pid) // and waits until it is gone
		_, err = takeSnapshot(t.Context(), p)
		return err != nil
	}, 20*time.Second, 10*time.Millisecond)
	require.True(t, isPassing(err), "%v", err)
}
