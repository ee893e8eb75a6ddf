package amqp

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how is there a connection, and what is declared on it?
//
// A port has one connection at a time, which whoever needs it first makes. After a failure there is a pause, in which all calls
// fail with the same error: so a broker that is away is not overrun.

const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second

	longestDelay = 40 * 24 * time.Hour // RabbitMQ has 32 bits of milliseconds for it
	delayKept    = 10 * time.Minute    // how long a queue for delays outlives its last message

	declarePatience = 5 * time.Second
)

type port struct {
	s *Stream

	turn chan struct{} // who connects, or uses what is below
	link *link         // nil: none yet
	over bool

	err   error // of the last attempt
	pause time.Duration
	next  time.Time // attempt
}

func newPort(s *Stream) *port { return &port{s: s, turn: make(chan struct{}, 1)} }

// connect returns a link that was open a moment ago.
func (p *port) connect(ctx context.Context) (*link, error) {
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-p.turn }()
	switch {
	case p.over:
		return nil, pgwake.ErrClosed
	case p.link != nil && !p.link.conn.IsClosed():
		return p.link, nil
	case time.Now().Before(p.next):
		return nil, p.err
	}
	l, err := p.s.dial()
	if err != nil {
		p.err, p.pause = err, min(max(2*p.pause, firstPause), lastPause)
		p.next = time.Now().Add(p.pause)
		p.s.cfg.Logger.Warn("amqp: cannot connect", "error", err, "not_before", p.pause)
		return nil, err
	}
	p.link, p.pause = l, 0
	return l, nil
}

func (p *port) shut() {
	p.turn <- struct{}{}
	defer func() { <-p.turn }()
	p.over = true
	if p.link != nil {
		_ = p.link.conn.CloseDeadline(time.Now().Add(time.Second))
	}
}

func (s *Stream) queueType() string {
	if s.cfg.Quorum {
		return amqp091.QueueTypeQuorum
	}
	return amqp091.QueueTypeClassic
}

// link is a connection.
type link struct {
	conn    *amqp091.Connection
	confirm *amqp091.Channel // on which is published

	queueType string

	mu       sync.Mutex
	declared map[string]time.Time // queues, and when
	lanes    map[string]*lane     // by queue
}

func (s *Stream) dial() (*link, error) {
	conn, err := amqp091.DialConfig(s.url, s.cfg.Connection)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	ch, err := conn.Channel()
	if err == nil {
		err = ch.Confirm(false)
	}
	if err != nil {
		_ = conn.CloseDeadline(time.Now().Add(time.Second))
		return nil, fmt.Errorf("open a channel: %w", err)
	}
	return &link{conn: conn, confirm: ch, queueType: s.queueType(), declared: make(map[string]time.Time), lanes: make(map[string]*lane)}, nil
}

// declareNamespace declares the queue of a namespace, and that of its dead letters.
func (l *link) declareNamespace(ctx context.Context, queue string) error {
	if err := l.declareQueue(ctx, deadQueue(queue), 0, nil); err != nil {
		return err
	}
	return l.declareQueue(ctx, queue, 0, deadLettersTo(deadQueue(queue)))
}

// declareDelay declares the queue for a delay, and returns its name. Invariant: it outlives what is published to it now.
func (l *link) declareDelay(ctx context.Context, queue string, delay time.Duration) (string, error) {
	ttl := roundedUp(delay)
	name := fmt.Sprintf("%s.delay.%d", queue, ttl)
	args := deadLettersTo(queue)
	args["x-message-ttl"] = ttl
	args["x-expires"] = ttl + delayKept.Milliseconds()
	return name, l.declareQueue(ctx, name, delayKept/2, args) // to declare it is to use it
}

// roundedUp is a delay in milliseconds, an eighth longer at most, or 8 ms: of all that there are, few remain.
func roundedUp(delay time.Duration) int64 {
	ms := uint64((delay + time.Millisecond - 1) / time.Millisecond)
	if spare := max(bits.Len64(ms)-4, 3); ms > 0 {
		ms = (ms + 1<<spare - 1) >> spare << spare
	}
	return int64(ms)
}

func deadQueue(queue string) string { return queue + ".dead" }

// deadLettersTo has what expires, or is given up, put to another queue.
func deadLettersTo(queue string) amqp091.Table {
	return amqp091.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
}

// declareQueue declares a durable queue, unless that was done on this connection, within a time if there is one.
func (l *link) declareQueue(ctx context.Context, name string, within time.Duration, args amqp091.Table) error {
	l.mu.Lock()
	at, ok := l.declared[name]
	l.mu.Unlock()
	if ok && (within == 0 || time.Since(at) < within) {
		return nil
	}
	all := amqp091.Table{"x-queue-type": l.queueType}
	for key, value := range args {
		all[key] = value
	}
	begun := time.Now()
	if err := l.declareAlone(ctx, name, all); err != nil {
		return fmt.Errorf("declare queue %s: %w", name, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.declared[name] = begun
	return nil
}

// declareAlone uses a channel of its own: RabbitMQ does not answer for as long as a queue has no leader, such as one that was being
// created when the broker was killed, and no other is to wait for that. Such a channel is left behind until it answers, or the connection
// ends.
func (l *link) declareAlone(ctx context.Context, name string, args amqp091.Table) error {
	ch, err := l.conn.Channel()
	if err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, declarePatience)
	defer cancel()
	declared := make(chan error, 1)
	go func() {
		_, err := ch.QueueDeclare(name, true, false, false, false, args)
		declared <- err
		_ = ch.Close()
	}()
	select {
	case err := <-declared:
		return err
	case <-bounded.Done():
		return bounded.Err()
	}
}

// forget has a queue declared again: it may be gone.
func (l *link) forget(queue string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.declared, queue)
}

// sending is a message on its way to a queue, or to what belongs to that.
type sending struct {
	delay   time.Duration
	dead    bool
	message amqp091.Publishing
}

var errNotConfirmed = errors.New("the broker has not confirmed a message")

// send publishes, and waits until all is confirmed.
func (s *Stream) send(ctx context.Context, queue string, all []sending) error {
	l, err := s.out.connect(ctx)
	if err != nil {
		return err
	}
	confirmations := make([]*amqp091.DeferredConfirmation, 0, len(all))
	for _, m := range all {
		to := queue
		switch {
		case m.dead:
			to = deadQueue(queue)
			err = l.declareNamespace(ctx, queue)
		case m.delay > 0:
			to, err = l.declareDelay(ctx, queue, m.delay)
		}
		if err != nil {
			return err
		}
		c, err := l.confirm.PublishWithDeferredConfirmWithContext(ctx, "", to, false, false, m.message)
		if err != nil {
			l.broken()
			return err
		}
		confirmations = append(confirmations, c)
	}
	for _, c := range confirmations {
		ok, err := c.WaitContext(ctx)
		if err != nil {
			return err
		}
		if !ok {
			l.broken()
			return errNotConfirmed
		}
	}
	return nil
}

// broken ends a connection whose channel for publishing is gone: another one has another.
func (l *link) broken() {
	if l.confirm.IsClosed() {
		_ = l.conn.CloseDeadline(time.Now().Add(time.Second))
	}
}
