package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A mutant whose text is gone opens nothing, and whoever changed the text should hear of it at once.
func TestMutants_EveryPatch_FitsItsFileOnce(t *testing.T) {
	for _, m := range mutants {
		source, err := os.ReadFile(filepath.Join("..", "..", m.file))
		require.NoError(t, err, m.name)
		for _, p := range m.patches {
			require.Equal(t, 1, strings.Count(string(source), p.old), "%s: %q", m.name, p.old)
		}
	}
}
