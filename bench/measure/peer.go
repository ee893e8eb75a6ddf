package measure

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how is something other than pgwake put through the same scenarios?

// Peer is another way to hand items over through PostgreSQL. Its items carry their number and nothing else.
type Peer interface {
	Name() string
	Settings() string // for people

	// Prepare makes in the schema, which exists, what the others need.
	Prepare(ctx context.Context, url, schema string) error
	// Produce opens a producer with connections for so many goroutines at a time.
	Produce(ctx context.Context, url, schema string, writers int) (PeerProducer, error)
	// Open starts a node that handles so many items at a time.
	Open(ctx context.Context, url, schema string, workers int, h PeerHandler) (PeerNode, error)
}

// PeerHandler is what a node does with its items. Both functions are safe for concurrent use.
type PeerHandler struct {
	Hand func(n int)     // an item is in hand; nil: nothing is done with it
	Done func(count int) // so many more items are done for good, durably; nil: nobody wants to know
}

// PeerProducer enqueues. It is safe for concurrent use.
type PeerProducer interface {
	// Enqueue adds one item by a transaction of its own. at is its due time; zero: now.
	Enqueue(ctx context.Context, n int, at time.Time) error
	// Fill adds count items, numbered from first, as fast as it can.
	Fill(ctx context.Context, first, count int) error
	Close()
}

// PeerNode is a node at work.
type PeerNode interface {
	Looks() int64 // queries for work so far; -1: it does not tell
	// Failed is closed when the node cannot go on; Close tells why.
	Failed() <-chan struct{}
	Close(ctx context.Context) error
}

// preparePeer makes the stage's schema and has the peer furnish it.
func (s stage) preparePeer(ctx context.Context, p Peer) error {
	if err := withConn(ctx, s.url, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{s.schema}.Sanitize())
		return err
	}); err != nil {
		return err
	}
	return p.Prepare(ctx, s.url, s.schema)
}

// peerNode is a node of a peer whose failure ends a context.
type peerNode struct {
	PeerNode
	ctx  context.Context
	stop context.CancelFunc
}

// openPeer opens a node with as many connections as openWith gives to a Provider.
func (s stage) openPeer(ctx context.Context, p Peer, workers int, h PeerHandler) (*peerNode, error) {
	url, err := withPool(s.url, connectionsFor(workers))
	if err != nil {
		return nil, err
	}
	n, err := p.Open(ctx, url, s.schema, workers, h)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	go func() {
		select {
		case <-n.Failed():
			stop()
		case <-ctx.Done():
		}
	}()
	return &peerNode{n, ctx, stop}, nil
}

// close ends the node and joins its error, for defer.
func (n *peerNode) close(err *error) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	*err = errors.Join(*err, n.Close(ctx))
	n.stop()
}

// cast is who plays in a scenario of single items: a node whose dispatchers note what they have in hand, and a producer.
type cast struct {
	*producer
	ctx  context.Context // ends with the scenario, or when the node fails
	net  func(context.Context) (SafetyNet, error)
	exit func(*error)
}

// cast opens a node with so many dispatchers, of pgwake or of a peer, and a producer, which in a peer's case is always
// another node's.
func (s stage) cast(ctx context.Context, peer Peer, by Producer, dispatchers int, l *ledger) (_ *cast, err error) {
	c := &cast{net: func(context.Context) (SafetyNet, error) { return SafetyNet{}, nil }}
	if peer == nil {
		n, err := s.open(ctx, dispatchers)
		if err != nil {
			return nil, err
		}
		if c.producer, err = s.produce(ctx, by, n, l); err != nil {
			n.close(&err)
			return nil, err
		}
		n.dispatch(dispatchers, nil, l.take)
		c.ctx, c.exit = n.ctx, n.close
		c.net = func(ctx context.Context) (SafetyNet, error) { return safetyNet(ctx, n.Provider) }
		return c, nil
	}
	if err := s.preparePeer(ctx, peer); err != nil {
		return nil, err
	}
	p, err := peer.Produce(ctx, s.url, s.schema, 1)
	if err != nil {
		return nil, err
	}
	n, err := s.openPeer(ctx, peer, dispatchers, PeerHandler{Hand: func(n int) { l.arrive(n, time.Now()) }})
	if err != nil {
		p.Close()
		return nil, err
	}
	c.producer = &producer{enqueue: p.Enqueue, close: func(*error) { p.Close() }}
	c.ctx, c.exit = n.ctx, n.close
	return c, nil
}

// leave closes both, for defer.
func (c *cast) leave(err *error) {
	c.producer.close(err)
	c.exit(err)
}

// nameOf a peer; "": pgwake.
func nameOf(p Peer) string {
	if p == nil {
		return ""
	}
	return p.Name()
}

// PeerIdleResult is what PeerIdle found.
type PeerIdleResult struct {
	Peer       string        `json:"peer"`
	Settings   string        `json:"settings"`
	Workers    int           `json:"workers"`
	Duration   time.Duration `json:"duration"`
	Statements int64         `json:"statements"`
}

// PerSecond is the steady rate of statements.
func (r *PeerIdleResult) PerSecond() float64 { return float64(r.Statements) / r.Duration.Seconds() }

// PeerIdle counts the statements of a peer's node that has nothing to do, as Idle does.
func PeerIdle(ctx context.Context, url string, p Peer, workers int, d time.Duration) (r *PeerIdleResult, err error) {
	defer func(ctx context.Context) { err = about(ctx, "idle, "+p.Name(), err) }(ctx)
	s := newStage(url)
	c, err := newCounter(ctx, url, pgx.Identifier{s.schema}.Sanitize())
	if err != nil {
		return nil, err
	}
	defer c.close(&err)
	s.url = c.URL
	defer s.drop(&err)
	if err := s.preparePeer(ctx, p); err != nil {
		return nil, err
	}
	n, err := s.openPeer(ctx, p, workers, PeerHandler{})
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := pause(n.ctx, quietSpell); err != nil { // a peer may never be quiet
		return nil, err
	}
	settled, err := c.read(n.ctx)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := pause(n.ctx, d); err != nil {
		return nil, err
	}
	now, err := c.read(n.ctx)
	return &PeerIdleResult{
		Peer: p.Name(), Settings: p.Settings(), Workers: workers,
		Duration: time.Since(began), Statements: now.since(settled).total(),
	}, err
}

// PeerTimersResult is what PeerTimers found.
type PeerTimersResult struct {
	Peer     string  `json:"peer"`
	Lateness Samples `json:"lateness"`
}

// PeerTimers schedules items for random instants within a window and takes the lateness of each, as Timers does for
// those that another Provider schedules. What is later than the patience of a scenario is an error.
func PeerTimers(ctx context.Context, url string, p Peer, o TimersOptions) (r *PeerTimersResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "timers, "+p.Name(), err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	clock, err := newServerClock(ctx, url)
	if err != nil {
		return nil, err
	}
	l := newLedger(o.Timers)
	c, err := s.cast(ctx, p, OtherProvider, o.Dispatchers, l)
	if err != nil {
		return nil, err
	}
	defer c.leave(&err)
	due := make([]time.Time, o.Timers)
	from := clock.server(time.Now()).Add(o.Lead)
	for n := range due {
		due[n] = from.Add(time.Duration(n) * o.Window / time.Duration(o.Timers)).Truncate(time.Microsecond)
		if err := c.enqueue(c.ctx, n, due[n]); err != nil {
			return nil, err
		}
	}
	m := newMeter(o.Progress)
	seen := 0
	if err := l.wait(c.ctx, o.Timers, func(int) {
		if seen++; m.due() {
			m.report(Progress{Done: seen, Total: o.Timers})
		}
	}); err != nil {
		return nil, err
	}
	if err := clock.finish(ctx); err != nil {
		return nil, err
	}
	r = &PeerTimersResult{Peer: p.Name()}
	for n := range due {
		r.Lateness = append(r.Lateness, clock.server(l.line(n).inHand).Sub(due[n]))
	}
	return r, nil
}
