package watermill_test

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the tests have in common?

// patience is far more than anything here should take.
const patience = 30 * time.Second

var silent = slog.New(slog.DiscardHandler)

// lab is a bus on a schema of its own.
type lab struct {
	t   *testing.T
	p   *pgwake.Provider
	bus *eventbus.Bus
}

// schemas are those of all tests.
var schemas = testschema.With(migrations.Layer())

func newLab(t *testing.T) *lab {
	t.Helper()
	p := schemas.New(t, nil)
	return &lab{t, p, newBus(t, p)}
}

func newBus(t *testing.T, p *pgwake.Provider) *eventbus.Bus {
	t.Helper()
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	return bus
}

func (l *lab) within() context.Context {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	l.t.Cleanup(cancel)
	return ctx
}

func (l *lab) publisher(config *watermill.PublisherConfig) *watermill.Publisher {
	l.t.Helper()
	p, err := watermill.NewPublisher(l.bus, config)
	require.NoError(l.t, err)
	return p
}

func (l *lab) subscriber(config *watermill.SubscriberConfig) *watermill.Subscriber {
	l.t.Helper()
	return newSubscriber(l.t, l.bus, config)
}

// newSubscriber returns a Subscriber that is closed when the test ends.
func newSubscriber(t *testing.T, bus *eventbus.Bus, config *watermill.SubscriberConfig) *watermill.Subscriber {
	t.Helper()
	s, err := watermill.NewSubscriber(bus, config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func (l *lab) subscribe(s *watermill.Subscriber, topic string) <-chan *message.Message {
	l.t.Helper()
	messages, err := s.Subscribe(context.Background(), topic)
	require.NoError(l.t, err)
	return messages
}

// receive waits for a message.
func (l *lab) receive(messages <-chan *message.Message) *message.Message {
	l.t.Helper()
	select {
	case m, open := <-messages:
		require.True(l.t, open, "the channel is open")
		return m
	case <-time.After(patience):
		l.t.Fatal("no message came")
		return nil
	}
}

// count is how many rows a table has.
func (l *lab) count(table string) (n int) {
	l.t.Helper()
	require.NoError(l.t, l.p.Pool().QueryRow(l.within(), `SELECT count(*) FROM `+pgx.Identifier{l.p.Schema(), table}.Sanitize()).Scan(&n))
	return n
}

// eventually asserts that something comes to be.
func (l *lab) eventually(is func() bool, what string) {
	l.t.Helper()
	require.Eventually(l.t, is, patience, 10*time.Millisecond, what)
}

// ended asserts that a channel is closed, at last.
func ended[T any](l *lab, c <-chan T) {
	l.t.Helper()
	select {
	case _, open := <-c:
		require.False(l.t, open)
	case <-time.After(patience):
		l.t.Fatal("it has not ended")
	}
}

// full reports whether tests are to run at full size.
func full() bool { return os.Getenv("PGWAKE_STRESS") != "" }
