package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemo_TheOrderIsFulfilledThoughMuchGoesWrong(t *testing.T) {
	var out bytes.Buffer
	done, err := demo(t.Context(), pgwaketest.URL(t), &out, 5*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskComplete, done.State)
	require.Equal(t, 11, done.TotalSteps, "three parcels have been added")
	require.Equal(t, 11, done.CompletedSteps)
	require.Equal(t, 2, done.Retries)
	require.Contains(t, out.String(), "label has failed for good: the address has no house number")
	require.Contains(t, out.String(), "pack-3")
	require.Empty(t, schemas(t))
}

func TestDemo_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
	defer cancel()
	_, err := demo(ctx, pgwaketest.URL(t), io.Discard, 50*time.Millisecond)
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, schemas(t))
}

func schemas(t *testing.T) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), // other tests may share the server
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("taskgraph_%d", os.Getpid())).Scan(&names))
	return names
}
