package devpg

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFromDocker_BootsTheVersionAskedForAndRemovesIt(t *testing.T) {
	if err := dockerHealth(t.Context()); err != nil {
		t.Skipf("Docker does not answer: %v", err)
	}
	srv, err := fromDocker(t.Context(), &Options{Version: "17", Settings: map[string]string{"work_mem": "7MB"}})
	require.NoError(t, err)
	t.Cleanup(func() { stopped(t, srv) })
	assert.Regexp(t, `^17\.`, srv.Version)
	assert.Equal(t, "7MB", ask(t, srv, "SHOW work_mem"))
	assert.Equal(t, "off", ask(t, srv, "SHOW fsync"))
	assert.Equal(t, "on", ask(t, srv, "SHOW synchronous_commit"))
	stopped(t, srv)
	stopped(t, srv)
}

func TestFromDocker_NoDocker_IsAReasonAndNoPanic(t *testing.T) {
	if dockerHealth(t.Context()) == nil {
		t.Skip("Docker answers")
	}
	for range 2 { // testcontainers remembers between calls
		_, err := fromDocker(t.Context(), &Options{Version: "17"})
		require.ErrorContains(t, err, "Docker")
	}
}

func TestContainerCommand_SettingsWinOverOurs(t *testing.T) {
	assert.Equal(t, []string{
		"postgres", "-c", "fsync=on", "-c", "full_page_writes=on", "-c", "max_connections=20",
		"-c", "shared_preload_libraries=pg_stat_statements",
	}, containerCommand(&Options{Fsync: true, Settings: map[string]string{"max_connections": "20"}}))
}
