package eventbus

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: what is a setting that nobody has set?

// Those that document 003 names are as it says.
func TestDefaults_OfZeroValues_AreTheDocuments(t *testing.T) {
	var n NodeConfig
	require.NoError(t, n.complete())
	require.Equal(t, []any{10, 30 * time.Second, DefaultGroup}, []any{n.BatchSize, n.Visibility, n.Group})
	require.Equal(t, []any{10, 5}, []any{n.Concurrency, n.MaxAttempts})
	c, err := (*Config)(nil).resolve()
	require.NoError(t, err)
	require.Equal(t, []any{"default", 1 << 20, 184 * 24 * time.Hour, false}, []any{c.Namespace, c.MaxPayload, c.KeepFor, c.StrictRouting})
	require.Equal(t, 2*time.Second, readPause)
}
