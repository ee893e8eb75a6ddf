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
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	nodeMain() // the nodes are processes of this binary
	goleak.VerifyTestMain(m)
}

func TestDemo_NodeIsKilled_EveryItemIsHandled(t *testing.T) {
	var out bytes.Buffer
	l, err := demo(t.Context(), pgwaketest.URL(t), &out)
	require.NoError(t, err)
	for n, i := range l.items {
		assert.GreaterOrEqual(t, i.handled, 1, "item %d", n)
	}
	assert.NotZero(t, l.killed)
	require.NotEmpty(t, l.late, "it had an item in hand")
	for _, late := range l.late {
		assert.GreaterOrEqual(t, late, time.Duration(0), "not before the lease had ended")
	}
	assert.Contains(t, out.String(), "400 of 400 items were handled")
	assert.Empty(t, schemas(t))
}

func TestDemo_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(500*time.Millisecond, cancel) // any moment will do
	defer cancel()
	_, err := demo(ctx, pgwaketest.URL(t), io.Discard)
	require.ErrorIs(t, err, context.Canceled)
	assert.Empty(t, schemas(t))
}

func schemas(t *testing.T) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), // other tests may share the server
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("manynodes_%d", os.Getpid())).Scan(&names))
	return names
}

func TestNode_ParentLetsGo_EndsByItself(t *testing.T) {
	schema := fmt.Sprintf("manynodes_%d_node", os.Getpid())
	pgwaketest.New(t, &pgwake.Config{Schema: schema})
	ctx, letGo := context.WithCancel(t.Context())
	defer letGo()
	reports := make(chan report)
	c, err := startNode(ctx, role{1, pgwaketest.URL(t), schema}, reports)
	require.NoError(t, err)
	require.Equal(t, report{Node: 1, What: ready}, <-reports)
	letGo()
	assert.NoError(t, c.wait(), "it ended with code 0, and not by a kill")
}
