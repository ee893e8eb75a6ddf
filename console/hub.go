package console

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how do all pages that are open learn of what goes on, by few statements, and by none when there are no pages?
//
// Invariants: while nobody watches no goroutine of the hub runs, and nothing is asked. However many watch, it takes one picture of the queues
// each pace (1.43 statements a second), and asks the nodes once an askEvery, which takes three, and one of each node (0.5 a second): less than two
// a second together. If a picture takes long, since there is much in the queues, they come so seldom that looking takes a fifth of the time of one
// connection.

const (
	pace     = 700 * time.Millisecond
	askEvery = 8 * time.Second
	share    = 5

	// past is how many moments are kept for the charts.
	past = 90
)

// moment is what is known at one time. It is not changed any more.
type moment struct {
	glance.Picture
	Change glance.Change // of the queues since the moment before, and of the nodes between the latest two answers
	Err    error         // of the latest look; all else is of the one before

	Unanswered error // why the nodes could not be asked

	asked    glance.Picture // the latest picture with an answer of the nodes
	Arrivals []float64      // items a second, at each moment until now
	Leavings []float64
	Backlog  []float64
}

// hub takes pictures for those who watch.
type hub struct {
	p *pgwake.Provider

	mu       sync.Mutex
	watchers map[chan struct{}]struct{}
	stop     context.CancelFunc // of the goroutines that look; nil: none is there
	ended    chan struct{}      // they have
	now      *moment            // nil: nobody has looked yet
	nodes    []pgwake.NodeInfo
	reports  []pgwake.NodeReport
	answered bool // by the nodes, since the last picture

	unanswered error         // why they could not be asked
	looking    chan struct{} // closed when the look that is under way for a page has ended; nil: none is
}

func newHub(p *pgwake.Provider) *hub { return &hub{p: p, watchers: make(map[chan struct{}]struct{})} }

// watch has the bell ring at each moment, until end is called. The first who watches has the hub begin, and the last one has it end: when end
// returns nothing of it is left.
func (h *hub) watch() (bell <-chan struct{}, end func()) {
	ring := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[ring] = struct{}{}
	if h.stop == nil {
		h.begin()
	}
	return ring, func() {
		h.mu.Lock()
		delete(h.watchers, ring)
		var ended chan struct{}
		if len(h.watchers) == 0 {
			h.stop()
			h.stop, ended = nil, h.ended
		}
		h.mu.Unlock()
		if ended != nil {
			<-ended
		}
	}
}

// begin starts the goroutines. The caller has the lock.
func (h *hub) begin() {
	ctx, stop := context.WithCancel(context.Background()) // they are for several requests
	h.stop, h.ended = stop, make(chan struct{})
	var both sync.WaitGroup
	both.Go(func() { h.lookOn(ctx) })
	both.Go(func() { h.askOn(ctx) })
	go func(ended chan struct{}) {
		both.Wait()
		close(ended)
	}(h.ended)
}

// lookOn takes pictures of the queues until ctx ends.
func (h *hub) lookOn(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		err := h.look(ctx)
		if errors.Is(err, pgwake.ErrClosed) {
			return
		}
		next := time.NewTimer(max(pace, share*time.Since(began)) - time.Since(began))
		select {
		case <-ctx.Done():
		case <-next.C:
		}
		next.Stop()
	}
}

// askOn asks the nodes until ctx ends.
func (h *hub) askOn(ctx context.Context) {
	for ctx.Err() == nil {
		for reports, err := range h.p.NodeReports(ctx, askEvery) {
			var nodes []pgwake.NodeInfo
			if err == nil {
				nodes, err = h.p.ListNodes(ctx)
			}
			h.mu.Lock()
			if h.unanswered = err; err == nil {
				h.nodes, h.reports, h.answered = nodes, reports, true
			}
			h.mu.Unlock()
			if err != nil {
				break
			}
		}
		again := time.NewTimer(askEvery)
		select {
		case <-ctx.Done():
		case <-again.C:
		}
		again.Stop()
	}
}

// look takes a picture of the queues, and tells those who watch.
func (h *hub) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pic, err := glance.Queues(ctx, h.p)
	pic.At = time.Now()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return err // nobody wants to know any more
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = next(h.now, pic.With(h.nodes, h.reports), h.answered, err)
	h.now.Unanswered = h.unanswered
	h.answered = false
	for ring := range h.watchers {
		select {
		case ring <- struct{}{}:
		default: // it has not looked at the one before
		}
	}
	return err
}

// next is the moment after another.
func next(was *moment, pic glance.Picture, answered bool, err error) *moment {
	if was == nil {
		was = &moment{}
	}
	if err != nil {
		same := *was
		same.Err = err
		return &same
	}
	now := &moment{Picture: pic, asked: was.asked, Change: was.Change}
	queues := glance.ChangeOf(glance.Picture{At: was.At, Came: was.Came, Went: was.Went}, pic)
	now.Change.Came, now.Change.Went = queues.Came, queues.Went
	if was.At.IsZero() {
		now.Change.Came, now.Change.Went = 0, 0
	}
	if answered {
		nodes := glance.ChangeOf(was.asked, now.Picture)
		nodes.Came, nodes.Went = now.Change.Came, now.Change.Went
		now.Change, now.asked = nodes, now.Picture
	}
	s := glance.SumsOf(pic.Depths)
	now.Arrivals, now.Leavings = pushed(was.Arrivals, now.Change.Came), pushed(was.Leavings, now.Change.Went)
	now.Backlog = pushed(was.Backlog, float64(s.Due))
	return now
}

// pushed is a copy with one more value, and without those that are too old.
func pushed(all []float64, v float64) []float64 {
	return append(append(make([]float64, 0, past), all[max(0, len(all)-past+1):]...), v)
}

// fresh is how old a moment may be that a page begins with, and firstPaint how long it waits for a newer one before it begins without.
const (
	fresh      = 2 * time.Second
	firstPaint = 50 * time.Millisecond
)

// moment returns the latest, which is of now if that can be had at once; nil if there is none yet, and looking takes long.
func (h *hub) moment(ctx context.Context) *moment {
	h.mu.Lock()
	if h.now != nil && h.now.Err == nil && time.Since(h.now.At) < fresh {
		defer h.mu.Unlock()
		return h.now
	}
	if h.looking == nil {
		h.looking = make(chan struct{})
		go func(done chan struct{}) {
			_ = h.look(context.WithoutCancel(ctx)) // for whoever comes next as well; the moment has the error
			h.mu.Lock()
			h.looking = nil
			h.mu.Unlock()
			close(done)
		}(h.looking)
	}
	done := h.looking
	h.mu.Unlock()
	enough := time.NewTimer(firstPaint)
	defer enough.Stop()
	select {
	case <-done:
	case <-enough.C:
	case <-ctx.Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

// latest is the moment that was last taken.
func (h *hub) latest() *moment {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}
