package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDeadlocks_Log_ReturnsEachWithWhatItSays(t *testing.T) {
	found, err := deadlocks(strings.NewReader(`2026-01-01 00:00:00.000 UTC [7] LOG:  process 7 still waiting for ShareLock on transaction 9 after 1000.1 ms
2026-01-01 00:00:00.000 UTC [7] ERROR:  deadlock detected
2026-01-01 00:00:00.000 UTC [7] DETAIL:  Process 7 waits for ShareLock on transaction 9; blocked by process 8.
	Process 8 waits for ShareLock on transaction 10; blocked by process 7.
2026-01-01 00:00:00.000 UTC [7] STATEMENT:  SELECT 1
2026-01-01 00:00:01.000 UTC [8] LOG:  checkpoint starting: time
2026-01-01 00:00:01.000 UTC [8] DETAIL:  of something else
2026-01-01 00:00:02.000 UTC [9] ERROR:  deadlock detected`))
	require.NoError(t, err)
	require.Len(t, found, 2)
	assert.Contains(t, found[0], "blocked by process 7")
	assert.Contains(t, found[0], "STATEMENT:  SELECT 1")
	assert.NotContains(t, found[0], "something else")
	assert.Contains(t, found[1], "[9]")
	none, err := deadlocks(strings.NewReader("LOG:  all is well\n"))
	require.NoError(t, err)
	assert.Empty(t, none)
}
