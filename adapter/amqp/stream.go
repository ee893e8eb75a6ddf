package amqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how do RabbitMQ's queues do what an EventStream does?

// Config is for New. The zero value means the defaults, and so does a nil one.
type Config struct {
	// Namespaces are those to be served from the beginning. Their queues are declared when somebody first waits for them. At most 100,000, with those
	// that are published to, or declared: beyond that it is a pgwake.ErrTooManyNamespaces, and nothing is declared. Defaults to none.
	Namespaces []string

	// Prefix begins the names of all queues. Defaults to "pgwake.".
	Prefix string

	// Quorum has queues be quorum queues, which are replicated, and count the deliveries of a message that kills its process each time. All
	// who use a queue are to agree. Defaults to false: durable classic queues.
	Quorum bool

	// Prefetch is how many messages a Receive claims at most. Defaults to 100.
	Prefetch int

	// HeldBytes bounds the messages in memory that were received and are not settled, each of which counts 1 KiB more than it has. With as many
	// a Receive waits until some are settled, or their leases have ended, and has an error other than context.DeadlineExceeded if that is not in its time; one
	// that waits for messages then already gets one nevertheless. A Receive returns no more than 64 MiB, or one message; what is kept for the next one counts, too. Defaults to 256 MiB.
	HeldBytes int64

	// Connection is how to connect: TLS, credentials, heartbeat. Defaults to what the URL says, and a heartbeat of 10 s: a connection
	// that does not answer for twice as long is gone. Of a Dial that takes longer than the Stream lives, or than connection_timeout in the
	// URL (30 s), the result is closed. Recovery is not used: a Stream connects again by itself.
	Connection amqp091.Config

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

// Stream is a dispatch.EventStream of the queues of a RabbitMQ. All methods are safe for concurrent use.
type Stream struct {
	url string
	cfg Config

	life     context.Context // ends with Close
	closed   <-chan struct{} // of life
	close    func()
	patience time.Duration // with a broker that is to be connected to

	// What is published goes by another connection than what is received: RabbitMQ may stop reading from one that publishes.
	in, out *port

	lastLane atomic.Uint64

	received       budget
	publishedAhead int64 // the budget of what is under way
	spareFor       time.Duration

	mu         sync.Mutex
	lanes      map[uint64]*lane
	namespaces map[string]bool
	news       chan struct{} // closed when there is another namespace
}

var (
	_ dispatch.EventStream   = (*Stream)(nil)
	_ dispatch.LeaseExtender = (*Stream)(nil)
	_ dispatch.DeadLetterer  = (*Stream)(nil)
)

// New returns a Stream. It connects when there is something to do, and again when a connection was lost; while there is none, calls
// fail, and may be made again. Fails with pgwake.ErrConfig for a URL or a Config that is unusable.
func New(url string, config *Config) (*Stream, error) {
	s := &Stream{url: url, patience: connectPatience, publishedAhead: publishedAhead, spareFor: spareFor, lanes: make(map[uint64]*lane), namespaces: make(map[string]bool), news: make(chan struct{})}
	if config != nil {
		s.cfg = *config
	}
	uri, err := amqp091.ParseURI(url)
	if err != nil { // which may quote the URL, and so the password
		why := "the URL is malformed; in its user and password, reserved characters must be percent-encoded"
		if scheme, _, _ := strings.Cut(url, "://"); !strings.EqualFold(scheme, "amqp") && !strings.EqualFold(scheme, "amqps") {
			why = "the scheme of the URL must be amqp:// or amqps://"
		}
		return nil, failed("new", fmt.Errorf("%w: %s", pgwake.ErrConfig, why))
	}
	if uri.ConnectionTimeout > 0 {
		s.patience = time.Duration(uri.ConnectionTimeout) * time.Millisecond
	}
	if s.cfg.Prefix == "" {
		s.cfg.Prefix = "pgwake."
	}
	if s.cfg.Prefetch == 0 {
		s.cfg.Prefetch = 100
	}
	if s.cfg.HeldBytes == 0 {
		s.cfg.HeldBytes = 256 << 20
	}
	s.received.most = s.cfg.HeldBytes
	if s.cfg.Connection.Heartbeat == 0 {
		s.cfg.Connection.Heartbeat = 10 * time.Second
	}
	if s.cfg.Connection.Locale == "" {
		s.cfg.Connection.Locale = "en_US"
	}
	if s.cfg.Logger == nil {
		s.cfg.Logger = slog.Default()
	}
	if s.cfg.Prefetch < 1 || s.cfg.Prefetch > pgwake.MaxFetch {
		return nil, failed("new", fmt.Errorf("%w: Prefetch %d is not between 1 and %d", pgwake.ErrConfig, s.cfg.Prefetch, pgwake.MaxFetch))
	}
	if s.cfg.HeldBytes < 0 {
		return nil, failed("new", fmt.Errorf("%w: HeldBytes %d is negative", pgwake.ErrConfig, s.cfg.HeldBytes))
	}
	if !queueable(s.cfg.Prefix) {
		return nil, failed("new", fmt.Errorf("%w: Prefix %.60q has line breaks or invalid UTF-8", pgwake.ErrConfig, s.cfg.Prefix))
	}
	for _, namespace := range s.cfg.Namespaces {
		if err := s.check(namespace); err != nil {
			return nil, failed("new", fmt.Errorf("%w: %w", pgwake.ErrConfig, err))
		}
		if err := s.known(namespace); err != nil {
			return nil, failed("new", fmt.Errorf("%w: %w", pgwake.ErrConfig, err))
		}
		s.learn(namespace)
	}
	s.in, s.out = newPort(s), newPort(s)
	life, end := context.WithCancel(context.Background())
	s.life, s.closed = life, life.Done()
	s.close = sync.OnceFunc(func() {
		s.giveBackSpare()
		end()
		s.in.shut()
		s.out.shut()
	})
	return s, nil
}

// Close ends the connections, and returns every Receive that waits, with pgwake.ErrClosed. What was received and not settled is
// redelivered at once: close a Stream after the Coordinators on it have ended. It takes up to 5 s for what is kept for a Receive that does
// not come any more to be given back. Safe to call twice.
func (s *Stream) Close() { s.close() }

// giveBackSpare gives back what no Receive will take any more.
func (s *Stream) giveBackSpare() {
	bounded, cancel := context.WithTimeout(context.Background(), putBackFor)
	defer cancel()
	s.mu.Lock()
	lanes := slices.Collect(maps.Values(s.lanes))
	s.mu.Unlock()
	for _, l := range lanes {
		l.giveBackSpare(bounded)
	}
}

// longestName leaves room for what is added to the name of a queue; AMQP has 255 bytes for it.
const longestName = 200

// ofAnother matches names of the queues that belong to that of another namespace: see deadQueue and declareDelay.
var ofAnother = regexp.MustCompile(`\.(dead|delay\.[0-9]+)$`)

func (s *Stream) check(namespace string) error {
	if ofAnother.MatchString(namespace) {
		return fmt.Errorf("%w: namespace %.60q would have the queue of another's dead letters or delays", pgwake.ErrInvalid, namespace)
	}
	if namespace == "" || len(s.cfg.Prefix)+len(namespace) > longestName || !queueable(namespace) {
		return fmt.Errorf("%w: namespace %.60q is empty, longer than %d bytes with its prefix, or has line breaks or invalid UTF-8", pgwake.ErrInvalid, namespace, longestName)
	}
	return nil
}

// queueable reports whether RabbitMQ takes a name as it is. It leaves line breaks out, so that the queue would be another's, and ends the
// connection, and all leases with it, if a name is no UTF-8.
func queueable(name string) bool { return utf8.ValidString(name) && !strings.ContainsAny(name, "\r\n") }

// ready reports why nothing can be done.
func (s *Stream) ready(ctx context.Context) error {
	select {
	case <-s.closed:
		return pgwake.ErrClosed
	default:
		return ctx.Err()
	}
}

// mostNamespaces is how many there are of a Provider.
const mostNamespaces = 100_000

// known reports why a namespace cannot be one of those that the Stream serves.
func (s *Stream) known(namespace string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.namespaces[namespace] && len(s.namespaces) >= mostNamespaces {
		return fmt.Errorf("%w: %d, and %.60q is not among them", pgwake.ErrTooManyNamespaces, len(s.namespaces), namespace)
	}
	return nil
}

// learn takes note of a namespace, unless there are as many as there may be.
func (s *Stream) learn(namespace string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.namespaces[namespace] || len(s.namespaces) >= mostNamespaces {
		return
	}
	s.namespaces[namespace] = true
	close(s.news)
	s.news = make(chan struct{})
}

// WaitForNamespaces tells of those that this Stream knows.
func (s *Stream) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	theirs := make(map[string]bool, len(known))
	for _, namespace := range known {
		theirs[namespace] = true
	}
	for {
		s.mu.Lock()
		added := slices.DeleteFunc(slices.Sorted(maps.Keys(s.namespaces)), func(name string) bool { return theirs[name] })
		news := s.news
		s.mu.Unlock()
		if len(added) > 0 {
			return added, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, failed("wait for namespaces", ctx.Err())
		case <-s.closed:
			return nil, failed("wait for namespaces", pgwake.ErrClosed)
		}
	}
}

// Declare declares the queues of a namespace, and has it served by Coordinators on this Stream.
func (s *Stream) Declare(ctx context.Context, namespace string) error {
	err := s.check(namespace)
	if err == nil {
		err = s.declare(ctx, namespace)
	}
	return failed("declare", err)
}

func (s *Stream) declare(ctx context.Context, namespace string) error {
	if err := s.known(namespace); err != nil {
		return err
	}
	l, err := s.out.connect(ctx)
	if err != nil {
		return err
	}
	if err := l.declareNamespace(ctx, s.cfg.Prefix+namespace, 0); err != nil {
		return err
	}
	s.learn(namespace)
	return nil
}

// Publish returns when all messages are confirmed. After an error any of them may have been sent. A delay of more than 40 days is
// pgwake.ErrInvalid.
func (s *Stream) Publish(ctx context.Context, namespace string, messages ...dispatch.StreamMessage) error {
	err := s.check(namespace)
	for _, m := range messages {
		if err == nil {
			err = checkMessage(&m)
		}
	}
	if err == nil {
		err = s.ready(ctx)
	}
	if err == nil {
		err = s.declare(ctx, namespace)
	}
	if err == nil {
		all := make([]sending, len(messages))
		for i := range messages {
			all[i] = sending{delay: messages[i].Delay, message: publishing(&messages[i])}
		}
		err = s.send(ctx, s.cfg.Prefix+namespace, all)
	}
	return failed("publish", err)
}

// Receive waits as a consumer of the namespace's queue. Invariant: when its time is over it says so, by the error of its context, only if it
// was one until then. From that Coordinators take it that the queue is there, and empty.
func (s *Stream) Receive(ctx context.Context, namespace string, most int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	const op = "receive"
	if err := s.check(namespace); err != nil {
		return nil, failed(op, err)
	}
	if most < 1 || most > pgwake.MaxFetch || lease <= 0 {
		return nil, failed(op, fmt.Errorf("%w: %d messages for %v", pgwake.ErrInvalid, most, lease))
	}
	if err := s.ready(ctx); err != nil {
		return nil, failed(op, err)
	}
	for failures := 0; ; failures++ {
		if l := s.in.lane(s.cfg.Prefix + namespace); l != nil { // what is spare has its room, and may be why there is no more
			if got, err := l.takeSpare(min(most, s.cfg.Prefetch), lease); err == nil && len(got) > 0 {
				return got, nil
			}
		}
		if err := s.roomToReceive(ctx); err != nil {
			return nil, failed(op, err)
		}
		l, err := s.lane(ctx, namespace)
		if err != nil {
			return nil, failed(op, notConnected(err))
		}
		got, err := l.receive(ctx, min(most, s.cfg.Prefetch), lease)
		if len(got) > 0 {
			s.learn(namespace)
			return got, nil
		}
		switch ended := s.ready(ctx); {
		case ended != nil && (err == nil || !errors.Is(ended, context.DeadlineExceeded)):
			return nil, failed(op, ended)
		case err != nil && (ended != nil || failures > 0):
			return nil, failed(op, err)
		}
		// The connection was lost, and perhaps another one is to be had.
	}
}

// roomToReceive waits until there is room for a message.
func (s *Stream) roomToReceive(ctx context.Context) error {
	bounded, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	err := s.received.take(bounded, 0)
	if ended := s.ready(ctx); err != nil && ended != nil {
		err = ended
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("messages of more than %d bytes are held (Config.HeldBytes), and were not settled in time", s.cfg.HeldBytes)
	}
	return err
}

// notConnected is an error from before there was a consumer.
func notConnected(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("not connected: %v", err)
	}
	return err
}

// Ack acknowledges messages. RabbitMQ does not answer: see the package.
func (s *Stream) Ack(_ context.Context, receipts []pgwake.LockToken) error {
	return s.each("ack", receipts, func(l *lane, tag uint64) bool {
		h := l.take(tag)
		if h == nil {
			return false
		}
		defer l.settled(h)
		return l.ch.Ack(tag, false) == nil
	})
}

// Extend has leases end later, or sooner, as far as this process is concerned.
func (s *Stream) Extend(_ context.Context, receipts []pgwake.LockToken, lease time.Duration) error {
	return s.each("extend", receipts, func(l *lane, tag uint64) bool { return l.extend(tag, lease) })
}

// each does something for each receipt, which may fail, since it is lost.
func (s *Stream) each(op string, receipts []pgwake.LockToken, do func(l *lane, tag uint64) bool) error {
	var lost []pgwake.LockToken
	for _, r := range receipts {
		if l, tag := s.find(r); l == nil || !do(l, tag) {
			lost = append(lost, r)
		}
	}
	if lost != nil {
		return failed(op, &pgwake.LostLocksError{Tokens: lost})
	}
	return nil
}

// Nack sends a copy, and acknowledges the message. A delay of more than 40 days is taken for that, which is about what RabbitMQ can keep:
// if it were refused, the message would come again at the end of its lease.
func (s *Stream) Nack(ctx context.Context, r pgwake.LockToken, o pgwake.AbandonOptions) error {
	if o.Delay < 0 {
		return failed("nack", fmt.Errorf("%w: a delay of %v is negative", pgwake.ErrInvalid, o.Delay))
	}
	o.Delay = min(o.Delay, longestDelay)
	return failed("nack", s.replace(ctx, r, func(l *lane, h *held) sending {
		attempts := h.attempt
		if o.IgnoreAttempt {
			attempts--
		}
		return sending{delay: o.Delay, message: h.copy(attempts, o.Error, nil)}
	}))
}

// DeadLetter sends a copy to the queue of dead letters, and acknowledges the message.
func (s *Stream) DeadLetter(ctx context.Context, r pgwake.LockToken, reason, cause string) error {
	return failed("dead letter", s.replace(ctx, r, func(l *lane, h *held) sending {
		return sending{dead: true, message: h.copy(h.attempt, "", amqp091.Table{headerReason: reason, headerCause: cause})}
	}))
}

// replace sends another message in the place of one. If that fails the lease remains.
func (s *Stream) replace(ctx context.Context, r pgwake.LockToken, by func(*lane, *held) sending) error {
	l, tag := s.find(r)
	if l == nil {
		return pgwake.ErrLockLost
	}
	h := l.take(tag)
	if h == nil {
		return pgwake.ErrLockLost
	}
	err := l.exchange(ctx, h, by(l, h))
	if err != nil {
		l.putBack(tag, h)
		return err
	}
	l.settled(h)
	return nil
}
