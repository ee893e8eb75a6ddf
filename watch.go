package pgwake

import (
	"context"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"
)

// This file answers: how does a layer learn that something in its own tables has changed, and say now and then that its node lives?
//
// Both go by what the node has anyway: the LISTEN connection, whose session is the sign that the node lives (SQL function node_listens),
// and the periodic statement on it, which calls a function of the layer's. So while nothing changes that costs no statement.
//
// Invariant: whatever was notified of a topic, or was to be while this node did not listen, there is a token afterwards. Notifications
// that were not sent at all (pgwake.notify) are the beat's to find.

// WatchOptions says what a Watch is about.
type WatchOptions struct {
	// Topic is any text: SQL function notify_instance tells of it, at the commit of whoever calls it. Required.
	Topic string

	// Beat is an SQL function of the layer's, in the Provider's schema, that the periodic statement calls once a Watch.Interval, as
	// Beat(node integer, about text) returning boolean: false if there is nothing new for the layer to look at. It is to be quick; it fails
	// where it would wait for a lock for more than 100 ms, and a function that fails is one that returned true. Required.
	Beat, About string
}

// Watch tells a layer when to look at what may have changed. Close ends it. Safe for concurrent use.
type Watch struct {
	// C has a token when it is time to look: when the topic was notified (a little later, if that comes all the time); when its Beat says so;
	// when the node begins to listen, and when it ceases to (SetModes, hibernation, a connection that broke); at each poll while it
	// hibernates; and in any case when the last token or beat was 1.5 times Interval ago. Several at a time are one.
	C <-chan struct{}

	// Node is the key of the Provider's node, as SQL function node_listens takes it.
	Node int32

	// Interval is how often beats come, but for jitter: Config.FallbackInterval, or HibernatePoll if that is longer and the node may hibernate.
	Interval time.Duration

	of     *waits
	hash   uint64
	beat   string
	about  string
	tokens bell
	late   *time.Timer
	putOff atomic.Bool // there is a token to come, for what was notified without credit (trust.go)
	closed atomic.Bool
}

// Watch begins to watch what others may change. Fails with ErrClosed.
func (p *Provider) Watch(ctx context.Context, o WatchOptions) (*Watch, error) {
	const op = "watch"
	if o.Topic == "" || o.Beat == "" {
		return nil, failed(op, invalid("there is no topic, or no beat"))
	}
	_, done, err := p.begin(ctx)
	if err != nil {
		return nil, failed(op, err)
	}
	defer done()
	w := &Watch{Node: p.engine.node, Interval: p.cfg.FallbackInterval, of: p.engine.waits, hash: hashOf(o.Topic), beat: o.Beat, about: o.About, tokens: newBell()}
	if p.cfg.HibernateAfter > 0 {
		w.Interval = max(w.Interval, p.cfg.HibernatePoll)
	}
	w.C = w.tokens
	w.late = time.AfterFunc(math.MaxInt64, w.look)
	w.late.Reset(w.patience()) // now that it is there for look
	if err := w.of.watch(w); err != nil {
		w.late.Stop()
		return nil, failed(op, err)
	}
	return w, nil
}

// Listens reports whether the node has a LISTEN connection. When one breaks that is known here at once, while to the server (SQL function node_listens) its
// session may be there for a while.
func (w *Watch) Listens() bool { return w.of.e.epoch() != 0 }

// Close ends the Watch: there is no further token, and no beat but one that has begun. So does Provider.Close.
func (w *Watch) Close() {
	w.end()
	w.of.unwatch(w)
}

func (w *Watch) end() {
	w.closed.Store(true)
	w.late.Stop()
}

func (w *Watch) patience() time.Duration { return w.Interval*3/2 + rand.N(w.Interval/10+1) }

// look gives a token.
func (w *Watch) look() { w.beaten(true) }

// notified gives a token for a notification. Without credit that is put off.
func (w *Watch) notified() {
	e := w.of.e
	at := e.trust.until()
	switch {
	case len(w.tokens) > 0 || w.putOff.Load(): // whoever takes that one has not looked yet
	case at.IsZero():
		e.trust.spend()
		w.look()
	default:
		w.putOff.Store(true)
		time.AfterFunc(at.Sub(e.clock.Now()), func() {
			e.trust.spend()
			w.putOff.Store(false)
			w.look()
		})
	}
}

// beaten takes note of a beat.
func (w *Watch) beaten(news bool) {
	if w.closed.Load() {
		return
	}
	if news {
		w.tokens.ring()
	}
	w.late.Reset(w.patience())
}

// watch has a Watch get tokens from now on.
func (w *waits) watch(x *Watch) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return ErrClosed
	}
	w.watches[x] = struct{}{}
	return nil
}

func (w *waits) unwatch(x *Watch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.watches, x)
}

// all returns every Watch.
func (w *waits) all() []*Watch {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Keys(w.watches))
}

// lookAtWatches gives each Watch a token.
func (w *waits) lookAtWatches() {
	for _, x := range w.all() {
		x.look()
	}
}
