package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { testschema.Main(m) }

const anyPort = "127.0.0.1:0"

func TestDemo_EverythingGoesWrong_EverythingIsDone(t *testing.T) {
	var out bytes.Buffer
	r, err := demo(t.Context(), pgwaketest.URL(t), anyPort, false, &out)
	t.Log(out.String())
	require.NoError(t, err)
	assert.Equal(t, 1+1+mailCount+1+transferCount+sampleCount, r.Done, "the video, which was at work when the shutdown began, among them")
	assert.Equal(t, 1, r.Dead)
	if assert.Len(t, r.DeadLetters, 1) {
		letter := r.DeadLetters[0]
		assert.Equal(t, []any{"mail.send", `"nobody"`, 4, "no such mailbox"}, []any{letter.Name, string(letter.Data), letter.Attempts, letter.Error})
	}
	assert.Equal(t, map[string]int{"ada": 100 - 5*transferCount, "grace": 5 * transferCount}, r.Balances, "each transfer happened once")
	assert.EqualValues(t, sampleCount*(sampleCount+1)/2, r.Samples)
	assert.Positive(t, r.Transfers)
	assert.LessOrEqual(t, r.Transfers, int64(limits.MaxRunningPerKey))
	assert.Equal(t, []string{"the day begins", "process report.build", "process mail.send"}, r.Trace)
	assert.Contains(t, out.String(), "panic: index out of range")
	assert.Empty(t, schemas(t))
}

func TestDemo_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
	defer cancel()
	_, err := demo(ctx, pgwaketest.URL(t), anyPort, false, io.Discard)
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

// get returns the status and the text of an answer.
func get(t *testing.T, s *service, path string) (status int, text string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(fmt.Sprintf("http://%s%s", s.listener.Addr(), path))
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(body)
}

func TestService_ProbesAndMetrics_SayHowItIs(t *testing.T) {
	meters, err := newMeters()
	require.NoError(t, err)
	p := testschema.Core.New(t, &pgwake.Config{MeterProvider: meters})
	s, err := newService(p, meters, anyPort, &spans{})
	require.NoError(t, err)
	d := dispatch.New(p, &dispatch.Config{MeterProvider: meters})
	begun, finish := make(chan none), make(chan none)
	dispatch.Handle(d, "x", func(context.Context, none) (none, error) {
		begun <- none{}
		<-finish
		return none{}, nil
	})
	s.dispatchers = []*dispatch.Dispatcher{d}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx) }()
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	<-begun

	status, text := get(t, s, "/livez")
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, "alive\n", text)
	status, text = get(t, s, "/console/queues")
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, text, "Queues and lanes")
	status, text = get(t, s, "/readyz")
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, "ready\n", text)
	_, text = get(t, s, "/metrics")
	assert.Regexp(t, `pgwake_dispatch_running\{.*messaging_destination_name="x".*\} 1\n`, text)
	assert.Regexp(t, `pgwake_items_total\{.*pgwake_queue="worker".*\} 1\n`, text)

	stop()
	require.Eventually(t, s.stopping.Load, 10*time.Second, 10*time.Millisecond)
	status, text = get(t, s, "/readyz")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "stopping\n", text)
	close(finish)
	require.NoError(t, <-ended)
}

func TestService_AddressIsTaken_IsAnError(t *testing.T) {
	p := testschema.Core.New(t, nil)
	meters, err := newMeters()
	require.NoError(t, err)
	s, err := newService(p, meters, anyPort, &spans{})
	require.NoError(t, err)
	defer s.listener.Close()
	defer s.tracers.Shutdown(t.Context())
	_, err = newService(p, meters, s.listener.Addr().String(), &spans{})
	require.Error(t, err)
}
