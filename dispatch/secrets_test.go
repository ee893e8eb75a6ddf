package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: does anything of a payload, or of a password, get to where people read it who only look after the system?

const (
	secretPayload  = "s3cr3t-payl0ad"
	secretPassword = "s3cr3t-passw0rd"
	secretNumber   = "4929123412341234"
)

// overheard is all that was logged, traced, or returned as an error.
type overheard struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *overheard) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// failure notes all that an error tells, what the server said of it included.
func (o *overheard) failure(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	fmt.Fprintf(o, "%v\n%+v\n%q\n", err, err, err)
	for ; err != nil; err = errors.Unwrap(err) {
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			for _, one := range many.Unwrap() {
				fmt.Fprintf(o, "%v\n", one)
			}
		}
	}
}

func (o *overheard) server(t *testing.T, err error) {
	t.Helper()
	o.failure(t, err)
	said := (*pgconn.PgError)(nil)
	require.ErrorAs(t, err, &said)
	fmt.Fprintf(o, "%#v\n", *said)
}

func TestSecrets_NoPayloadAndNoPassword_IsLoggedOrTracedOrInAnError(t *testing.T) {
	t.Parallel()
	heard := &overheard{}
	logger := slog.New(slog.NewTextHandler(heard, &slog.HandlerOptions{Level: slog.LevelDebug}))
	p := testschema.Core.New(t, &pgwake.Config{Logger: logger, MaxPayload: 1000})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	payload := json.RawMessage(`{"card": "` + secretPayload + `"}`)

	// Passwords, of servers that are not there, that refuse them, and in URLs that cannot be read.
	at := strings.TrimPrefix(strings.SplitN(pgwaketest.URL(t), "@", 2)[1], "")
	for _, url := range []string{
		"postgres://nobody:" + secretPassword + "@127.0.0.1:1/none?connect_timeout=2",
		"postgres://no such role:" + secretPassword + "@" + at,
		"postgres://nobody:" + secretPassword + "@" + at,
		"postgres://nobody:" + secretPassword + "@127.0.0.1:port/x",
		"postgres://nobody:" + secretPassword + "@127.0.0.1/x?sslmode=wrong",
		"host=127.0.0.1 port=x password=" + secretPassword,
	} {
		_, err := pgwake.Open(ctx, url, &pgwake.Config{Logger: logger})
		heard.failure(t, err)
	}

	// Payloads that are refused here, and there.
	long, _ := json.Marshal(strings.Repeat(secretPayload, 100))
	for _, input := range []json.RawMessage{long, json.RawMessage(`{"` + secretPayload), json.RawMessage(`"` + secretPayload + `\u0000"`), json.RawMessage("\"" + secretPayload + "\xff\"")} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Input: input}, nil)
		heard.failure(t, err)
	}
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Headers: map[string]string{"h": secretPayload + "\x00"}}, nil)
	heard.failure(t, err)
	err = p.Do(ctx, "layer", func(ctx context.Context, q pgwake.Querier) error {
		_, err := q.Exec(ctx, `INSERT INTO "`+p.Schema()+`".worker_queue (name, input, priority) VALUES ('w', $1, 12)`, payload)
		return err
	})
	heard.server(t, err)
	err = p.Do(ctx, "layer", func(ctx context.Context, q pgwake.Querier) error {
		_, err := q.Exec(ctx, `INSERT INTO "`+p.Schema()+`".worker_queue (input) VALUES ($1)`, payload)
		return err
	})
	heard.server(t, err)
	err = p.Do(ctx, "layer", func(ctx context.Context, q pgwake.Querier) error {
		_, err := q.Exec(ctx, `SELECT "`+p.Schema()+`".enqueue_work_many('{w}', $1::text[])`, []string{`{"card": ` + secretPayload + `}`})
		return err
	})
	heard.server(t, err)

	// Handlers that fail, panic, give up, or cannot read what they got; each logs at every level.
	traced := &recorder{}
	d := New(p, &Config{Logger: logger, TracerProvider: tracers{recorder: traced}, Concurrency: 2, MaxAttempts: 2,
		Retry: func(int, error) time.Duration { return time.Nanosecond }})
	done := make(chan struct{}, 10)
	Handle(d, "fails", func(context.Context, map[string]string) (map[string]string, error) { return nil, errors.New("no luck") })
	Handle(d, "panics", func(context.Context, map[string]string) (map[string]string, error) { panic("at the disco") })
	unread := map[string]json.RawMessage{
		"unread":        payload,
		"unread time":   json.RawMessage(`{"At": "` + secretPayload + `"}`),
		"unread number": json.RawMessage(`{"N": ` + secretNumber + `}`),
		"unread alone":  json.RawMessage(secretNumber),
		"unread string": json.RawMessage(`{"Quoted": "` + secretPayload + `"}`),
	}
	for name := range unread {
		switch name {
		case "unread", "unread alone":
			Handle(d, name, func(context.Context, int8) (int, error) { return 0, nil })
		default:
			Handle(d, name, func(context.Context, struct {
				At     time.Time
				N      int8
				Quoted int `json:",string"`
			}) (int, error) {
				return 0, nil
			})
		}
	}
	Handle(d, "dies", func(context.Context, map[string]string) (int, error) { return 0, Permanent(errors.New("never")) })
	Handle(d, "works", func(context.Context, map[string]string) (map[string]string, error) {
		done <- struct{}{}
		return map[string]string{"card": secretPayload}, nil
	})
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(running) }()
	for name, input := range unread {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name, Input: input}, nil)
		require.NoError(t, err)
	}
	for _, name := range []string{"fails", "panics", "dies", "works"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name, Input: payload, Headers: map[string]string{"h": secretPayload}}, nil)
		require.NoError(t, err)
	}
	<-done
	require.Eventually(t, func() bool {
		letters, err := p.ListDeadLetters(ctx, nil)
		return err == nil && len(letters) == 3+len(unread)
	}, 15*time.Second, 20*time.Millisecond)
	stop()
	<-ended
	letters, err := p.ListDeadLetters(ctx, nil)
	require.NoError(t, err)
	for _, letter := range letters {
		fmt.Fprintln(heard, letter.Reason, letter.Error)
	}
	traced.mu.Lock()
	fmt.Fprintln(heard, traced.spans)
	traced.mu.Unlock()

	said := heard.text.String()
	require.Contains(t, said, "no luck")
	require.Contains(t, said, "at the disco")
	require.Contains(t, said, "field N, which ends at byte 22, is no int8")
	for line := range strings.Lines(said) {
		require.NotContains(t, line, secretPayload)
		require.NotContains(t, line, secretPassword)
		require.NotContains(t, line, secretNumber)
	}
}

// What comes by SQL is bounded by the tables alone, and handlers get it whole, whatever Config.MaxPayload is. It is one item among others.
func TestDispatcher_PayloadBySQLFarOverMaxPayload_IsHandledAndNotLoggedAndOthersGoOn(t *testing.T) {
	t.Parallel()
	heard := &overheard{}
	logger := slog.New(slog.NewTextHandler(heard, &slog.HandlerOptions{Level: slog.LevelDebug}))
	p := testschema.Core.New(t, &pgwake.Config{Logger: logger, MaxPayload: 1000})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	size := testsize.Of(8<<20, 100<<20)
	_, err := p.Pool().Exec(ctx, `SELECT "`+p.Schema()+`".enqueue_work('large', to_json(repeat('x', $1::integer - 2)))`, size)
	require.NoError(t, err)
	_, err = p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "small"}}, {WorkItem: pgwake.WorkItem{Name: "small"}}})
	require.NoError(t, err)

	d := New(p, &Config{Logger: logger, Concurrency: 2, MaxAttempts: 2, Retry: func(int, error) time.Duration { return time.Nanosecond }})
	sizes, small := make(chan int, 10), make(chan struct{}, 10)
	d.Handle("large", does(func(_ context.Context, item *pgwake.ClaimedWorkItem) error {
		sizes <- len(item.Input)
		return errors.New("no luck")
	}))
	d.Handle("small", does(func(context.Context, *pgwake.ClaimedWorkItem) error {
		small <- struct{}{}
		return nil
	}))
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(running) }()
	for range 2 {
		select {
		case got := <-sizes:
			require.Equal(t, size, got)
		case <-ctx.Done():
			require.FailNow(t, "it does not come")
		}
		<-small
	}
	require.Eventually(t, func() bool {
		letters, err := p.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{PayloadBytes: 100})
		return err == nil && len(letters) == 1 && letters[0].Error == "no luck"
	}, time.Minute, 20*time.Millisecond)
	stop()
	require.NoError(t, <-ended)
	heard.mu.Lock()
	defer heard.mu.Unlock()
	require.Less(t, heard.text.Len(), 100_000)
	require.NotContains(t, heard.text.String(), "xxxx")
}
