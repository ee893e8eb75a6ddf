package exampletb

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEnd_LastCleanupComesFirst(t *testing.T) {
	var did []int
	tb := &TB{}
	for i := range 3 {
		tb.Cleanup(func() { did = append(did, i) })
	}
	tb.End()
	require.Equal(t, []int{2, 1, 0}, did)
}
