package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/streamtest"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: is a Provider an EventStream as others are, and is what StreamSource makes of one a Source?

// streamedProvider is a Provider that a test can disconnect.
type streamedProvider struct {
	*pgwake.Provider
	schema, application string
}

func openStreamed(tb testing.TB, schema string) *streamedProvider {
	tb.Helper()
	s := &streamedProvider{schema: schema, application: fmt.Sprintf("stream_%d", time.Now().UnixNano())}
	u, err := url.Parse(pgwaketest.URL(tb))
	require.NoError(tb, err)
	q := u.Query()
	q.Set("application_name", s.application)
	u.RawQuery = q.Encode()
	s.Provider, err = pgwake.Open(tb.Context(), u.String(), &pgwake.Config{Schema: schema, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close(context.Background())) })
	return s
}

// capable is an EventStream that StreamSource does not know to be a Provider.
type capable struct {
	dispatch.EventStream
	dispatch.LeaseExtender
	dispatch.DeadLetterer
}

// providerFactory returns streams on Providers, as they are or in disguise.
func providerFactory(disguise bool) streamtest.Factory {
	var providers sync.Map // by stream
	stream := func(tb testing.TB, schema string) dispatch.EventStream {
		p := openStreamed(tb, schema)
		s := dispatch.ProviderStream(p.Provider)
		if disguise {
			s = capable{s, s.(dispatch.LeaseExtender), s.(dispatch.DeadLetterer)}
		}
		providers.Store(s, p)
		return s
	}
	of := func(s dispatch.EventStream) *streamedProvider {
		p, _ := providers.Load(s)
		return p.(*streamedProvider)
	}
	return streamtest.Factory{
		New:     func(tb testing.TB) dispatch.EventStream { return stream(tb, testschema.Core.Borrow(tb)) },
		Another: func(tb testing.TB, s dispatch.EventStream) dispatch.EventStream { return stream(tb, of(s).schema) },
		Break: func(tb testing.TB, s dispatch.EventStream) {
			testdb.Exec(tb, pgwaketest.URL(tb), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, of(s).application)
		},
		DeadLetters: func(tb testing.TB, s dispatch.EventStream, namespace string) (names []string) {
			dead, err := of(s).ListDeadLetters(tb.Context(), nil)
			require.NoError(tb, err)
			for _, d := range dead {
				require.Equal(tb, namespace, d.Namespace)
				names = append(names, d.Name)
			}
			return names
		},
	}
}

func TestProviderStream_Contract(t *testing.T) {
	t.Parallel()
	streamtest.Run(t, providerFactory(false))
}

func TestStreamSource_Contract(t *testing.T) {
	t.Parallel()
	streamtest.Run(t, providerFactory(true))
}

func TestStreamSource_Provider_IsTheSourceAsItIs(t *testing.T) {
	p := testschema.Core.New(t, nil)
	require.Same(t, p, dispatch.StreamSource(dispatch.ProviderStream(p), nil))
}

// plain is a stream without capabilities, of which Receive fails as it is told.
type plain struct {
	err    error
	nacked chan pgwake.AbandonOptions
}

func (s *plain) Receive(ctx context.Context, namespace string, _ int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	if s.err != nil {
		return nil, s.err
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s *plain) Ack(context.Context, []pgwake.LockToken) error { return s.err }

func (s *plain) Nack(_ context.Context, _ pgwake.LockToken, o pgwake.AbandonOptions) error {
	s.nacked <- o
	return nil
}

func (s *plain) Publish(context.Context, string, ...dispatch.StreamMessage) error { return s.err }

func (s *plain) WaitForNamespaces(ctx context.Context, _ []string) ([]string, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestStreamSource_Errors_AreThoseThatDispatchersTellApart(t *testing.T) {
	away := errors.New("away")
	for _, c := range []struct {
		err, is   error
		retryable bool
	}{
		{away, away, true},
		{io.EOF, io.EOF, true},
		{fmt.Errorf("x: %w", pgwake.ErrInvalid), pgwake.ErrInvalid, false},
		{pgwake.ErrClosed, pgwake.ErrClosed, false},
		{&pgwake.LostLocksError{Tokens: []pgwake.LockToken{"t"}}, pgwake.ErrLockLost, false},
		{context.Canceled, context.Canceled, false},
		{&pgwake.Error{Err: away}, away, false},
	} {
		s := dispatch.StreamSource(&plain{err: c.err}, nil)
		for _, err := range []error{
			s.AckWorkItems(t.Context(), []pgwake.LockToken{"t"}),
			func() error {
				_, err := s.FetchWorkItems(t.Context(), 1, &pgwake.FetchOptions{Namespaces: []string{"a"}})
				return err
			}(),
		} {
			failure := (*pgwake.Error)(nil)
			require.ErrorAs(t, err, &failure)
			require.ErrorIs(t, err, c.is)
			require.Equal(t, c.retryable, failure.Retryable, "%v", c.err)
		}
	}
}

func TestStreamSource_WhatAQueueLacks_IsInvalid(t *testing.T) {
	s := dispatch.StreamSource(&plain{}, nil)
	for _, o := range []*pgwake.FetchOptions{
		nil,
		{Namespaces: []string{"a", "b"}},
		{Namespaces: []string{"a"}, Tags: pgwake.AnyTag()},
		{Namespaces: []string{"a"}, Session: &pgwake.SessionOptions{Owner: "o"}},
		{Namespaces: []string{"a"}, NoWait: true},
		{Namespaces: []string{"a"}, MaxAttempts: 1},
		{Namespaces: []string{"a"}, Ack: []pgwake.LockToken{"t"}},
	} {
		_, err := s.FetchWorkItems(t.Context(), 1, o)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%+v", o)
	}
	require.ErrorIs(t, s.AckWorkItemTx(t.Context(), pgx.Tx(nil), "t", nil), pgwake.ErrInvalid)
	require.ErrorIs(t, s.AckBatched(t.Context(), "t", &pgwake.Message{}), pgwake.ErrInvalid)
	for _, bad := range []dispatch.Source{dispatch.StreamSource(nil, nil), dispatch.StreamSource(&plain{}, &dispatch.StreamConfig{MaxWait: -1})} {
		_, err := bad.FetchWorkItems(t.Context(), 1, &pgwake.FetchOptions{Namespaces: []string{"a"}})
		require.ErrorIs(t, err, pgwake.ErrConfig)
	}
}

// oneDelivery is a stream with one message.
type oneDelivery struct {
	plain
	message chan dispatch.StreamDelivery
}

func (s *oneDelivery) Receive(ctx context.Context, namespace string, _ int, _ time.Duration) ([]dispatch.StreamDelivery, error) {
	select {
	case d := <-s.message:
		d.Namespace = namespace
		return []dispatch.StreamDelivery{d}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Nobody knows by which path a message came, so none is told.
func TestStreamSource_Metrics_HaveNoPath(t *testing.T) {
	m, done := testmeter.New(), make(chan struct{})
	s := &oneDelivery{message: make(chan dispatch.StreamDelivery, 1)}
	enqueued := time.Now().Add(-time.Hour)
	s.message <- dispatch.StreamDelivery{StreamMessage: dispatch.StreamMessage{Name: "a"}, EnqueuedAt: enqueued, Attempt: 1, Receipt: "r", LeasedUntil: time.Now().Add(time.Minute)}
	d := dispatch.New(dispatch.StreamSource(s, nil), &dispatch.Config{Namespaces: []string{"n"}, MeterProvider: m})
	d.Handle("a", func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		defer close(done)
		if item.DueAt != enqueued || item.Path != "" {
			t.Errorf("due at %v, not %v, by %q", item.DueAt, enqueued, item.Path)
		}
		return nil, nil
	})
	stop := running(t, d)
	await(t, done)
	require.NoError(t, stop())
	namespace := dispatch.AttrNamespace.String("n")
	require.Equal(t, []float64{1}, m.Recorded(testmeter.Key(dispatch.MetricClaimed, namespace)))
	waited := m.Recorded(testmeter.Key(dispatch.MetricWait, namespace, dispatch.AttrName.String("a")))
	require.Len(t, waited, 1)
	require.GreaterOrEqual(t, waited[0], time.Hour.Seconds(), "it counts from when the message was added")
}

func TestStreamSource_PollTimeout_IsNoWork(t *testing.T) {
	s := dispatch.StreamSource(&plain{}, nil)
	_, err := s.FetchWorkItems(t.Context(), 1, &pgwake.FetchOptions{Namespaces: []string{"a"}, PollTimeout: time.Millisecond})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.FetchWorkItems(ctx, 1, &pgwake.FetchOptions{Namespaces: []string{"a"}})
	require.ErrorIs(t, err, context.Canceled)
}

func TestStreamSource_WithoutDeadLetters_APoisonedMessageIsPutOff(t *testing.T) {
	p := &plain{nacked: make(chan pgwake.AbandonOptions, 1)}
	s := dispatch.StreamSource(p, nil)
	require.NoError(t, s.DeadLetterWorkItem(t.Context(), "t", "reason", "cause"))
	require.Equal(t, pgwake.AbandonOptions{Delay: time.Hour, Error: "reason: cause"}, await(t, p.nacked))
}

func TestStreamSource_WithoutExtend_SaysThatLeasesCannotBeRenewed(t *testing.T) {
	_, err := dispatch.StreamSource(&plain{}, nil).RenewWorkItemLocks(t.Context(), []pgwake.LockToken{"t"}, time.Minute)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	failure := (*pgwake.Error)(nil)
	require.ErrorAs(t, err, &failure)
	require.False(t, failure.Retryable)
}
