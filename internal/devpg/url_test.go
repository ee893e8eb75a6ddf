//go:build unix

package devpg_test

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

// nobodyThere is the URL of a server that refuses connections.
const nobodyThere = "postgres://someone:secret@127.0.0.1:1/db?sslmode=disable"

func TestStart_URLGiven_IsUsedAndNeverStopped(t *testing.T) {
	running := shared(t)
	for _, name := range []string{devpg.EnvURL, devpg.EnvFallbackURL} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, running.URL)
			srv, err := devpg.Start(t.Context(), nil)
			require.NoError(t, err)
			assert.Equal(t, running.URL, srv.URL)
			assert.Equal(t, running.Version, srv.Version)
			assert.Contains(t, srv.Source, name)
			assert.False(t, srv.Owned())
			assert.Empty(t, srv.DataDir())
			assert.Zero(t, srv.Port())
			assert.Zero(t, srv.PostmasterPID())
			assert.ErrorIs(t, srv.Restart(t.Context(), devpg.Fast), devpg.ErrNotOwned)

			require.NoError(t, srv.Stop(t.Context()))
			assert.Equal(t, "1", mustQuery(t, running, "SELECT 1"))
		})
	}
}

func TestStart_TwoURLs_OursComesFirst(t *testing.T) {
	first, second := shared(t), start(t, nil)
	t.Setenv(devpg.EnvURL, first.URL)
	t.Setenv(devpg.EnvFallbackURL, second.URL)
	srv, err := devpg.Start(t.Context(), nil)
	require.NoError(t, err)
	assert.Equal(t, first.URL, srv.URL)

	t.Setenv(devpg.EnvURL, nobodyThere)
	srv, err = devpg.Start(t.Context(), nil)
	require.NoError(t, err)
	assert.Equal(t, second.URL, srv.URL)
}

func TestStart_IgnoreURL_Boots(t *testing.T) {
	running := shared(t)
	t.Setenv(devpg.EnvURL, running.URL)
	srv := start(t, &devpg.Options{IgnoreURL: true})
	assert.True(t, srv.Owned())
	assert.NotEqual(t, running.Port(), srv.Port())
}

func TestStart_URLOfAnotherVersion_IsPassedOverAndSaysSo(t *testing.T) {
	running := shared(t)
	t.Setenv(devpg.EnvURL, running.URL)
	_, err := devpg.Start(t.Context(), &devpg.Options{Version: "7"})
	require.ErrorIs(t, err, devpg.ErrNoServer)
	assert.ErrorContains(t, err, "PGWAKE_DATABASE_URL: it is PostgreSQL "+running.Version+", and 7 is asked for")

	srv, err := devpg.Start(t.Context(), &devpg.Options{Version: strconv.Itoa(running.Major())})
	require.NoError(t, err)
	assert.Equal(t, running.URL, srv.URL)
}

func TestStart_URLThatDoesNotAnswer_IsPassedOverWithoutItsPassword(t *testing.T) {
	t.Setenv(devpg.EnvURL, nobodyThere)
	t.Setenv(devpg.EnvFallbackURL, "mysql://someone:secret@127.0.0.1/db")
	_, err := devpg.Start(t.Context(), &devpg.Options{BinDir: "/nowhere"})
	require.ErrorIs(t, err, devpg.ErrNoServer)
	assert.ErrorContains(t, err, "connection refused")
	assert.ErrorContains(t, err, "DATABASE_URL: cannot parse")
	assert.NotContains(t, err.Error(), "secret")
}
