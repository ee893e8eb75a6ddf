//go:build !unix

package devpg_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

func TestStart_NotUnix_SaysThatBinariesAreNotSupported(t *testing.T) {
	_, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.ErrorIs(t, err, devpg.ErrNoServer)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}
