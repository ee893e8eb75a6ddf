package watermill_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/require"
)

// This file answers: does Watermill's own suite for every Pub/Sub pass?
//
// It does so with few messages, and, where PGWAKE_STRESS is set, with all that it has and restarts of the server (make stress).

// suite is what the tests of Watermill are run on: processes, as far as the database can tell, two that publish and two that subscribe.
type suite struct {
	publishing  []*eventbus.Bus
	subscribing []*eventbus.Bus
	pub         watermill.PublisherConfig
	sub         watermill.SubscriberConfig
	made        atomic.Int64

	features tests.Features
}

// ordered has the messages of a topic come one after the other, each of them once.
func ordered(s *suite) {
	s.pub = watermill.PublisherConfig{Key: watermill.KeyOfTopic, DedupFor: time.Hour}
	s.features = tests.Features{ConsumerGroups: true, Persistent: true, GuaranteedOrder: true, ExactlyOnceDelivery: true}
}

// parallel has them come as they like.
func parallel(s *suite) {
	s.features = tests.Features{ConsumerGroups: true, Persistent: true}
}

// transactional is ordered in transactions.
func transactional(s *suite) {
	ordered(s)
	s.sub.Transactional = true
}

// newSuite has who publishes be the producer of docs/security.md, and who subscribes the worker.
func newSuite(t *testing.T, set func(*suite)) *suite {
	t.Helper()
	s := &suite{}
	set(s)
	if s.features.ForceShort = !full(); !full() {
		s.sub.Node.StopTimeout = time.Second // a test leaves a message without an ack
	}
	c := &pgwake.Config{Schema: schemas.New(t, nil).Schema(), SkipMigrate: true}
	worker := testroles.URL(t, testroles.New(t, testroles.Worker, c.Schema, "eventbus"))
	producer := testroles.URL(t, testroles.New(t, testroles.Producer, c.Schema, "eventbus"))
	s.subscribing = []*eventbus.Bus{process(t, worker, c), process(t, worker, c)}
	c.Mode = pgwake.ModeDisabled
	s.publishing = []*eventbus.Bus{process(t, producer, c), process(t, producer, c)}
	return s
}

// process is a bus with a Provider of its own, which has room for the transactions of many messages.
func process(t *testing.T, url string, c *pgwake.Config) *eventbus.Bus {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 30
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	own := *c
	own.Logger = silent
	p, err := pgwake.New(t.Context(), pool, &own)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return newBus(t, p)
}

// pubSub makes a Publisher and a Subscriber, in either of the processes.
func (s *suite) pubSub(t *testing.T) (message.Publisher, message.Subscriber) {
	return s.pubSubOf(t, "")
}

func (s *suite) pubSubOf(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	n := s.made.Add(1)
	pub, err := watermill.NewPublisher(s.publishing[n%2], &s.pub)
	require.NoError(t, err)
	config := s.sub
	config.Node.Group = group
	return pub, newSubscriber(t, s.subscribing[(n/2)%2], &config)
}

func (s *suite) run(t *testing.T) { tests.TestPubSub(t, s.features, s.pubSub, s.pubSubOf) }

func TestPubSub_OrderOfTopicsAndDedup_SuitePasses(t *testing.T) { newSuite(t, ordered).run(t) }

func TestPubSub_NoOrder_SuitePasses(t *testing.T) { newSuite(t, parallel).run(t) }

func TestPubSub_Transactional_SuitePasses(t *testing.T) { newSuite(t, transactional).run(t) }

// A group that is new gets everything from the beginning.
func TestPubSub_FromBeginning_NewGroupGetsOldMessages(t *testing.T) {
	s := newSuite(t, parallel)
	s.sub.FromBeginning, s.features.NewSubscriberReceivesOldMessages = true, true
	tests.TestNewSubscriberReceivesOldMessages(t, tests.TestContext{TestID: tests.NewTestID(), Features: s.features},
		func(t *testing.T) (message.Publisher, message.Subscriber) {
			return s.pubSubOf(t, "group-"+strconv.FormatInt(s.made.Load(), 10))
		})
}

// The suite reads its list of what was published while a goroutine of it may still add to that: so make stress goes without the race detector.
func TestPubSub_ServerRestarts_SuitePasses(t *testing.T) {
	if !full() {
		t.Skip("with PGWAKE_STRESS")
	}
	for name, set := range map[string]func(*suite){"ordered": ordered, "parallel": parallel} {
		t.Run(name, func(t *testing.T) {
			server := ownServer(t)
			s := &suite{}
			set(s)
			s.sub.Node.Visibility = 5 * time.Second // for what was claimed, and the answer was lost
			s.features.RestartServiceCommand = restarting(t, server)
			s.subscribing = []*eventbus.Bus{process(t, server.URL, &pgwake.Config{}), process(t, server.URL, &pgwake.Config{})}
			s.publishing = s.subscribing
			tests.TestReconnect(t, tests.TestContext{TestID: tests.NewTestID(), Features: s.features}, s.pubSub)
		})
	}
}

func TestPubSub_AllAtOnce_SuitePasses(t *testing.T) {
	if !full() {
		t.Skip("with PGWAKE_STRESS")
	}
	for name, set := range map[string]func(*suite){"ordered": ordered, "parallel": parallel} {
		t.Run(name, func(t *testing.T) {
			s := newSuite(t, set)
			tests.TestPubSubStressTest(t, s.features, s.pubSub, s.pubSubOf)
		})
	}
}

// ownServer is a PostgreSQL that a test may do anything to.
func ownServer(t *testing.T) *devpg.Server {
	t.Helper()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	return server
}

// envRestart is a socket on which the test process waits for a wish to restart the server.
const envRestart = "PGWAKE_TEST_RESTART"

// restarting returns a command that restarts the server, and ends when that is done: this very program, see TestMain.
func restarting(t *testing.T, server *devpg.Server) []string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if err := server.Restart(context.Background(), devpg.Fast); err != nil {
				fmt.Fprint(conn, err)
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = listener.Close(); <-ended })
	self, err := os.Executable()
	require.NoError(t, err)
	return []string{"env", envRestart + "=" + socket, self}
}

// restart is that command.
func restart(socket string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	problem, err := io.ReadAll(conn)
	if err == nil && len(problem) > 0 {
		err = fmt.Errorf("restart the server: %s", problem)
	}
	return err
}
