package devpg

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestNewestFirst_OrdersByVersionNotByText(t *testing.T) {
	assert.Equal(t,
		[]string{"/opt/postgresql/bin", "/opt/postgresql@16/bin", "/opt/postgresql@9/bin"},
		newestFirst([]string{"/opt/postgresql@9/bin", "/opt/postgresql/bin", "/opt/postgresql@16/bin"}))
}

func TestMajorOf_ReadsReleasesAndBetas(t *testing.T) {
	for version, want := range map[string]int{"15.18": 15, "19beta2": 19, "20devel": 20, "9.6.24": 9, "": 0, "x": 0} {
		assert.Equal(t, want, majorOf(version), version)
	}
}

func TestCandidates_OneInstallationByTwoPaths_IsTriedOnce(t *testing.T) {
	base, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	own, linked := filepath.Join(base, "own"), filepath.Join(base, "linked")
	require.NoError(t, os.Mkdir(own, 0o755))
	require.NoError(t, os.Mkdir(linked, 0o755))
	for _, name := range []string{"initdb", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(own, name), nil, 0o755))
		require.NoError(t, os.Symlink(filepath.Join(own, name), filepath.Join(linked, name)))
	}
	t.Setenv("PATH", linked+":relative:"+own)
	assert.Equal(t, own, candidates(t.Context(), "")[0])
	assert.NotContains(t, candidates(t.Context(), ""), linked)
	assert.Equal(t, []string{"/asked"}, candidates(t.Context(), "/asked"))
}

func TestHasLibrary_LooksBesideTheBinaries(t *testing.T) {
	base := t.TempDir()
	bin := &binaries{dir: filepath.Join(base, "bin")}
	assert.False(t, bin.hasLibrary(t.Context(), "pg_stat_statements"))
	lib := filepath.Join(base, "lib", "postgresql")
	require.NoError(t, os.MkdirAll(lib, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(lib, "pg_stat_statements.so"), nil, 0o644))
	assert.True(t, bin.hasLibrary(t.Context(), "pg_stat_statements"))
	assert.False(t, bin.hasLibrary(t.Context(), "pg_stat"))
}
