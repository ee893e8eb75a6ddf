package amqp

import (
	"context"
	"fmt"
	"maps"
	"math/bits"
	"net"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how is there a connection, and what is declared on it?
//
// A port has one connection at a time, which whoever needs it first has made. After a failure there is a pause, in which all calls
// fail with the same error: so a broker that is away is not overrun.

const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second

	longestDelay = 40 * 24 * time.Hour // RabbitMQ has 32 bits of milliseconds for it
	delayKept    = 10 * time.Minute    // how long a queue for delays outlives its last message

	declarePatience = 5 * time.Second
	connectPatience = 30 * time.Second // unless the URL says otherwise, as of amqp091

	// delayTrust is for how long the queue of a namespace is taken to exist by what is put to its delays: only RabbitMQ puts that to the
	// queue, later, and drops what has none.
	delayTrust = time.Second
)

type port struct {
	s *Stream

	mu      sync.Mutex
	over    bool
	link    *link    // nil: none yet
	attempt *attempt // nil: nobody connects

	err   error // of the last attempt
	pause time.Duration
	next  time.Time // attempt
}

// attempt is one to connect. It is the port's and not of the call that began it, which may leave: otherwise calls that have less time than
// a slow broker takes would never have a connection. It ends with the Stream.
type attempt struct {
	done chan struct{} // closed: what follows is final
	link *link
	err  error
}

func newPort(s *Stream) *port { return &port{s: s} }

// connect returns a link that was open a moment ago.
func (p *port) connect(ctx context.Context) (*link, error) {
	a, l, err := p.begin()
	if a == nil {
		return l, err
	}
	select {
	case <-a.done:
		return a.link, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-p.s.closed:
		return nil, pgwake.ErrClosed
	}
}

// lane returns the one of a queue; nil: there is none.
func (p *port) lane(queue string) *lane {
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lanes[queue]
}

// begin returns the attempt to wait for, or what is known without one.
func (p *port) begin() (*attempt, *link, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.over:
		return nil, nil, pgwake.ErrClosed
	case p.link != nil && !p.link.conn.IsClosed():
		return nil, p.link, nil
	case p.attempt != nil:
		return p.attempt, nil, nil
	case time.Now().Before(p.next):
		return nil, nil, p.err
	}
	p.attempt = &attempt{done: make(chan struct{})}
	go p.try(p.attempt)
	return p.attempt, nil, nil
}

func (p *port) try(a *attempt) {
	defer close(a.done)
	a.link, a.err = p.s.dial()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attempt = nil
	switch {
	case a.err == nil:
		p.link, p.pause = a.link, 0
	case !p.over:
		p.err, p.pause = a.err, min(max(2*p.pause, firstPause), lastPause)
		p.next = time.Now().Add(p.pause)
		p.s.cfg.Logger.Warn("amqp: cannot connect", "error", a.err, "not_before", p.pause)
	}
}

// shut is called when the Stream's life has ended, and so an attempt is about to.
func (p *port) shut() {
	p.mu.Lock()
	p.over = true
	a := p.attempt
	p.mu.Unlock()
	if a != nil {
		<-a.done
	}
	p.mu.Lock()
	defer p.mu.Unlock()
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
	conn      *amqp091.Connection
	publisher *publisher

	queueType string

	mu       sync.Mutex
	declared map[string]time.Time // queues, and when
	lanes    map[string]*lane     // by queue
}

// dial connects. All that it waits for ends when its socket is closed, and that is so when the time is over, or the Stream's life is.
func (s *Stream) dial() (*link, error) {
	ctx, cancel := context.WithTimeout(s.life, s.patience)
	defer cancel()
	var socket net.Conn
	connected := func() bool { return true }
	config := s.cfg.Connection
	config.Recovery = nil                             // a channel that comes back would have other messages under the tags of those that were held
	config.Properties = maps.Clone(config.Properties) // amqp091 writes to them, and two ports may dial at once
	config.TLSClientConfig = config.TLSClientConfig.Clone()
	config.Dial = func(network, address string) (conn net.Conn, err error) {
		if conn, err = s.socket(ctx, network, address); err == nil {
			socket = conn
			connected = context.AfterFunc(ctx, func() { _ = conn.Close() })
		}
		return conn, err
	}
	l, err := s.handshake(config)
	if connected() && err == nil {
		return l, nil
	}
	if socket != nil {
		_ = socket.Close() // amqp091 leaves it open after some errors
	}
	switch {
	case s.life.Err() != nil:
		return nil, pgwake.ErrClosed
	case ctx.Err() != nil:
		return nil, fmt.Errorf("connect: no answer within %v", s.patience)
	}
	return nil, err
}

// socket calls the Dial of the Config, which knows of no context: when that ends, it is left alone, and what it returns is closed.
func (s *Stream) socket(ctx context.Context, network, address string) (net.Conn, error) {
	dial := s.cfg.Connection.Dial
	if dial == nil {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	type answer struct {
		conn net.Conn
		err  error
	}
	answers := make(chan answer)
	go func() {
		conn, err := dial(network, address)
		select {
		case answers <- answer{conn, err}:
		case <-ctx.Done():
			if err == nil {
				_ = conn.Close()
			}
		}
	}()
	select {
	case a := <-answers:
		return a.conn, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Stream) handshake(config amqp091.Config) (*link, error) {
	conn, err := amqp091.DialConfig(s.url, config)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	p, err := newPublisher(conn, s.publishedAhead)
	if err != nil {
		_ = conn.CloseDeadline(time.Now().Add(time.Second))
		return nil, fmt.Errorf("open a channel: %w", err)
	}
	return &link{conn: conn, publisher: p, queueType: s.queueType(), declared: make(map[string]time.Time), lanes: make(map[string]*lane)}, nil
}

// declareNamespace declares the queue of a namespace, and that of its dead letters, unless that was done on this connection, within a time
// if there is one.
func (l *link) declareNamespace(ctx context.Context, queue string, within time.Duration) error {
	if err := l.declareQueue(ctx, deadQueue(queue), within, nil); err != nil {
		return err
	}
	return l.declareQueue(ctx, queue, within, deadLettersTo(deadQueue(queue)))
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
	bounded, cancel := context.WithTimeout(ctx, declarePatience)
	defer cancel()
	declared := make(chan error, 1)
	go func() {
		ch, err := l.conn.Channel()
		if err != nil {
			declared <- err
			return
		}
		_, err = ch.QueueDeclare(name, true, false, false, false, args)
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
