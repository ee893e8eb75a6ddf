package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemo_AllTimersCome_NoneTooEarly(t *testing.T) {
	var out bytes.Buffer
	came, err := demo(t.Context(), pgwaketest.URL(t), &out)
	require.NoError(t, err)
	require.Len(t, came, timerCount)
	var order []int
	places := map[place]int{}
	for _, timer := range came {
		assert.GreaterOrEqual(t, timer.late, time.Duration(0), "number %d", timer.n)
		assert.Less(t, timer.late, 30*time.Second, "number %d was found by accident", timer.n)
		order = append(order, timer.n)
		places[timer.by]++
	}
	assert.Equal(t, map[place]int{before: 1, own: 1 + randomCount/3, other: randomCount / 3, plain: 1 + randomCount/3}, places)
	assert.Less(t, slices.Index(order, 2), slices.Index(order, 1), "the later one was set first")
	slices.Sort(order)
	assert.Len(t, slices.Compact(order), timerCount, "each came once")
	assert.Contains(t, out.String(), "number 2 is here: it was set after number 1")
	assert.Empty(t, schemas(t))
}

func TestDemo_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
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
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("timers_%d", os.Getpid())).Scan(&names))
	return names
}

func TestHistogram_EachTimerIsALetterInItsRow(t *testing.T) {
	var out bytes.Buffer
	histogram(&out, []timer{
		{late: 0, by: plain}, {late: 499 * time.Microsecond, by: own}, {late: 500 * time.Microsecond, by: before}, {late: time.Hour, by: other}})
	assert.Contains(t, out.String(), "under 500µs  2  os\n")
	assert.Contains(t, out.String(), "under 1ms    1  b\n")
	assert.Contains(t, out.String(), "more         1  p\n")
}
