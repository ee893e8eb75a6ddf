package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
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

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDemo_EverythingGoesWrong_EverythingIsDone(t *testing.T) {
	var out bytes.Buffer
	r, err := demo(t.Context(), pgwaketest.URL(t), &out)
	t.Log(out.String())
	require.NoError(t, err)
	assert.Equal(t, 1+1+mailCount+transferCount+sampleCount, r.Done, "the video, which was at work when the shutdown began, among them")
	assert.Equal(t, 1, r.Dead)
	if assert.Len(t, r.DeadLetters, 1) {
		letter := r.DeadLetters[0]
		assert.Equal(t, []any{"mail.send", `"nobody"`, 4, "no such mailbox"}, []any{letter.Name, string(letter.Data), letter.Attempts, letter.Error})
	}
	assert.Equal(t, map[string]int{"ada": 100 - 5*transferCount, "grace": 5 * transferCount}, r.Balances, "each transfer happened once")
	assert.EqualValues(t, sampleCount*(sampleCount+1)/2, r.Samples)
	assert.Contains(t, out.String(), "panic: index out of range; again in")
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
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("dispatchers_%d", os.Getpid())).Scan(&names))
	return names
}

// start runs a dispatcher with one handler, for one item. stop shuts it down and waits for it.
func start(t *testing.T, grace time.Duration, do handler) (d *dispatcher, stop func()) {
	d = &dispatcher{Provider: pgwaketest.New(t, nil), namespace: pgwake.DefaultNamespace, lease: lease, maxAttempts: 2, grace: grace,
		handlers: map[string]handler{"x": do}, log: log.New(io.Discard, "", 0), settled: make(chan outcome, 1)}
	_, err := d.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	running, cancel := context.WithCancel(t.Context())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		d.run(running, 1, d.single)
	}()
	return d, func() {
		cancel()
		<-stopped
	}
}

func TestRun_GraceIsOver_ItemIsGivenBackUncounted(t *testing.T) {
	began, why := make(chan struct{}), make(chan error, 1)
	d, stop := start(t, time.Millisecond, func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		close(began)
		<-ctx.Done()
		why <- context.Cause(ctx)
		return ctx.Err()
	})
	<-began
	stop()
	require.ErrorIs(t, <-why, errShutdown)
	item, err := d.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err, "it is due at once")
	assert.Equal(t, 1, item.Attempt)
}

func TestKeepLease_LeaseIsLost_HandlerIsTold(t *testing.T) {
	why := make(chan error, 1)
	var d *dispatcher
	ready := make(chan struct{})
	d, stop := start(t, time.Minute, func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		<-ready
		if err := d.AckWorkItem(ctx, item.LockToken, nil); err != nil { // as if somebody else had had it since
			return err
		}
		<-ctx.Done()
		why <- context.Cause(ctx)
		return errors.New("interrupted")
	})
	defer stop()
	close(ready)
	require.ErrorIs(t, <-why, pgwake.ErrLockLost)
}
