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
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemo_MuchGoesWrong_EachEventHasItsEffectOnceInEachGroup(t *testing.T) {
	var out bytes.Buffer
	r, err := demo(t.Context(), pgwaketest.URL(t), &out)
	t.Log(out.String())
	require.NoError(t, err)
	assert.Equal(t, []string{"order 1: a kettle, invoice DE-1", "order 2: two cups, invoice FR-2", "order 4: tea, invoice NZ-4"}, r.Orders)
	assert.Equal(t, []string{"DE 1 orders, 3000 cents", "FR 1 orders, 1200 cents", "NZ 1 orders, 800 cents"}, r.Takings)
	assert.ElementsMatch(t, []string{"order.placed 1", "order.placed 2", "order.placed 4", "invoice.sent 1", "invoice.sent 2", "invoice.sent 4"}, r.Log,
		"order 3 was rolled back")
	assert.Equal(t, attempts, r.Attempts)
	assert.Contains(t, out.String(), "order 3 is rolled back (the card is refused), and its event with it")
	assert.Contains(t, out.String(), "order 4, attempt 3: there is no tax rate of NZ")
	assert.Contains(t, out.String(), "a dead letter of group billing: order.placed after 3 attempts: there is no tax rate of NZ")
	assert.Contains(t, out.String(), "invoice NZ-4 of 920 cents")
	assert.Empty(t, schemas(t))
}

func TestDemo_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
	defer cancel()
	if _, err := demo(ctx, pgwaketest.URL(t), io.Discard); err != nil { // it may be done by then
		assert.ErrorIs(t, err, context.Canceled)
	}
	assert.Empty(t, schemas(t))
}

func schemas(t *testing.T) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), // other tests may share the server
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("eventbus_%d", os.Getpid())).Scan(&names))
	return names
}
