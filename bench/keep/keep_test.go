package keep

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestResults_ReplacesWhatIsBetweenTheMarks(t *testing.T) {
	t.Parallel()
	page := filepath.Join(t.TempDir(), "page.md")
	require.NoError(t, os.WriteFile(page, []byte("above\n"+Begin+"old\n"+End+"below\n"), 0o644))
	broken := errors.New("nothing to say")
	require.ErrorIs(t, Results(page, func() (string, error) { return "", broken }), broken)
	for _, results := range []string{"new\n", "newer\n"} {
		require.NoError(t, Results(page, func() (string, error) { return results, nil }))
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Equal(t, "above\n"+Begin+results+End+"below\n", string(text))
	}
	require.NoError(t, os.WriteFile(page, []byte("above\n"+Begin), 0o644))
	require.ErrorContains(t, Results(page, func() (string, error) { panic("called") }), "no place for results")
}

func TestJSON_ReplacesAsAWhole(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "new", "kept.json")
	require.NoError(t, JSON(file, []int{1, 2}))
	require.NoError(t, JSON(file, []int{3}))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "[3]\n", string(text))
	require.Error(t, JSON(file, func() {}))
	require.FileExists(t, file, "what was there stays")
}
