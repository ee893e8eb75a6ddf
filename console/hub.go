package console

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how do all pages that are open learn of what goes on, by few statements, and by none when there are no pages?
//
// Invariants: while nobody watches no goroutine of the hub runs, and nothing is asked. While somebody does, the engine says when something has happened
// (Provider.Observe), and only then, and for as long as it goes on, is a picture of the queues taken: one each pace (1.25 statements a second) for all who
// watch. When nothing happens there is one each restPace, for what shows ages and for what nobody tells of. If a picture takes long, since there is much
// in the queues, they come so seldom that looking takes a fifth of the time of one connection, whether they are for pages that are open or for ones that
// are being opened; only after an action of the console's own one comes at once. If the engine cannot say when something has happened, it is
// as if something always did.

const (
	pace     = 800 * time.Millisecond
	restPace = 15 * time.Second
	share    = 5

	// tryAgain is how long it takes to listen to the engine once more, after that has failed.
	tryAgain = 3 * time.Second

	// acted is how long after an action of the console's own more is expected of it.
	acted = 2 * time.Second

	// recent is how long what a node has said of itself is of now: one that is at work says it anew every four seconds.
	recent = 10 * time.Second

	// past is how many moments are kept for the charts.
	past = 90
)

// moment is what is known at one time. It is not changed any more.
type moment struct {
	glance.Picture
	Change glance.Change // of the queues since the moment before, and of the nodes between the latest two answers
	Err    error         // of the latest look; all else is of the one before

	Asked      bool  // the nodes were, and not long ago
	Unanswered error // why they could not be

	Arrivals []float64 // items a second, at each moment until now
	Leavings []float64
	Backlog  []float64
}

// hub takes pictures for those who watch, and tells others when to look for themselves.
type hub struct {
	p *pgwake.Provider

	mu       sync.Mutex
	watchers map[chan struct{}]bool // and whether they are to have pictures
	stop     context.CancelFunc     // of the goroutines that look; nil: none is there
	ended    chan struct{}          // they have
	wake     chan struct{}          // has a token: something has happened
	until    time.Time              // things happen
	stirred  time.Time              // an action was done, which what was seen before does not show
	deaf     bool                   // nobody says when they do
	now      *moment                // nil: nobody has looked yet
	began    time.Time              // the latest look that has ended
	took     time.Duration          // that look
	nodes    []pgwake.NodeInfo
	asked    time.Time      // when it was known of them
	said     map[int32]said // by NodeInfo.Key

	unanswered error         // why they could not be asked
	looking    chan struct{} // closed when the look that is under way has ended; nil: none is
}

// said is what a node has said of itself last, and before that.
type said struct {
	latest, before pgwake.NodeReport
	twice          bool
	at             time.Time
}

func newHub(p *pgwake.Provider) *hub {
	return &hub{p: p, watchers: make(map[chan struct{}]bool), wake: make(chan struct{}, 1), said: make(map[int32]said)}
}

// watch has the bell ring, until end is called: at each moment for who is to have pictures, and else when something has happened. The first who
// watches has the hub begin, and the last one has it end: when end returns nothing of it is left.
func (h *hub) watch(pictures bool) (bell <-chan struct{}, end func()) {
	ring := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[ring] = pictures
	if h.stop == nil {
		h.begin()
	}
	token(h.wake)
	if pictures && h.current() != nil {
		token(ring) // it may be newer than what the page began with
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

func token(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default: // there is one
	}
}

// begin starts the goroutines. The caller has the lock.
func (h *hub) begin() {
	ctx, stop := context.WithCancel(context.Background()) // they are for several requests
	h.stop, h.ended, h.deaf = stop, make(chan struct{}), false
	var both sync.WaitGroup
	both.Go(func() { h.lookOn(ctx) })
	both.Go(func() { h.observeOn(ctx) })
	go func(ended chan struct{}) {
		both.Wait()
		close(ended)
	}(h.ended)
}

// wanted reports whether somebody is to have pictures.
func (h *hub) wanted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, pictures := range h.watchers {
		if pictures {
			return true
		}
	}
	return false
}

// lookOn takes pictures of the queues until ctx ends.
func (h *hub) lookOn(ctx context.Context) {
	h.rest(ctx)
	for ctx.Err() == nil {
		began := time.Now()
		if h.wanted() && errors.Is(h.lookOnce(ctx), pgwake.ErrClosed) {
			return
		}
		h.wait(ctx, h.wake, began, pace)
	}
}

// rested returns how long it is until another look may begin. The caller has the lock.
func (h *hub) rested() time.Duration { return share*h.took - time.Since(h.began) }

// rest waits until another look may begin, after one that those had who watched before.
func (h *hub) rest(ctx context.Context) {
	h.mu.Lock()
	left := time.NewTimer(h.rested())
	h.mu.Unlock()
	defer left.Stop()
	select {
	case <-ctx.Done():
	case <-left.C:
	}
}

// wait waits until it is time to look once more, after a look that began then: not before a pace is over, and if looking takes long not before five
// times as long is; then at once as long as things happen, and otherwise when something does, which rings the bell, or to see how old all is by now.
func (h *hub) wait(ctx context.Context, bell <-chan struct{}, began time.Time, pace time.Duration) {
	pace = max(pace, share*time.Since(began))
	next := time.NewTimer(pace - time.Since(began))
	defer next.Stop()
	select {
	case <-ctx.Done():
		return
	case <-next.C:
	}
	if h.happens() {
		return
	}
	next.Reset(max(0, restPace-time.Since(began)))
	select {
	case <-ctx.Done():
	case <-bell:
	case <-next.C:
	}
}

// happens reports whether things happen, for all that is known.
func (h *hub) happens() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.deaf || time.Now().Before(h.until)
}

// observeOn hears what the engine has to say until ctx ends.
func (h *hub) observeOn(ctx context.Context) {
	for ctx.Err() == nil {
		for o, err := range h.p.Observe(ctx) {
			if ctx.Err() != nil {
				return // others may have begun to watch, who hear it themselves
			}
			h.observed(o, err)
		}
		again := time.NewTimer(tryAgain)
		select {
		case <-ctx.Done():
		case <-again.C:
		}
		again.Stop()
	}
}

// observed takes in what the engine has said.
func (h *hub) observed(o pgwake.Observation, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deaf, h.unanswered = err != nil, err
	if o.Asked {
		h.nodes, h.asked = o.Nodes, time.Now()
		for key := range h.said {
			if !slices.ContainsFunc(o.Nodes, func(n pgwake.NodeInfo) bool { return n.Key == key }) {
				delete(h.said, key)
			}
		}
	}
	for _, r := range o.Reports {
		was, known := h.said[r.Key]
		h.said[r.Key] = said{latest: r, before: was.latest, twice: known, at: time.Now()}
	}
	h.goOn(o.For)
}

// stir says that something has happened, and that more may for a while.
func (h *hub) stir() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stirred = time.Now()
	h.goOn(acted)
}

// goOn has everybody look, and again for so long. The caller has the lock.
func (h *hub) goOn(d time.Duration) {
	if until := time.Now().Add(d); until.After(h.until) {
		h.until = until
	}
	token(h.wake)
	for ring, pictures := range h.watchers {
		if !pictures {
			token(ring)
		}
	}
}

// lookOnce looks, or waits for whoever does so.
func (h *hub) lookOnce(ctx context.Context) error {
	h.mu.Lock()
	if others := h.looking; others != nil {
		h.mu.Unlock()
		select {
		case <-others:
		case <-ctx.Done():
		}
		return nil
	}
	h.looking = make(chan struct{})
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		close(h.looking)
		h.looking = nil
	}()
	return h.look(ctx)
}

// look takes a picture of the queues, and tells those who watch.
func (h *hub) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	began := time.Now()
	pic, err := glance.Queues(ctx, h.p)
	pic.At = time.Now()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return err // nobody wants to know any more
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.began, h.took = began, pic.At.Sub(began)
	var nodes []pgwake.NodeInfo
	var latest, before []pgwake.NodeReport
	asked := !h.asked.IsZero() && pic.At.Sub(h.asked) < stale
	if asked {
		nodes = h.nodes
		for _, s := range h.said {
			latest = append(latest, s.latest)
			if s.twice && pic.At.Sub(s.at) < recent {
				before = append(before, s.before)
			}
		}
	}
	h.now = next(h.now, pic.With(nodes, latest), glance.Picture{}.With(nil, before), err)
	h.now.Asked, h.now.Unanswered = asked, h.unanswered
	for ring, pictures := range h.watchers {
		if pictures {
			token(ring)
		}
	}
	return err
}

// next is the moment after another. before is what the nodes that are at work had said before what they say now.
func next(was *moment, pic, before glance.Picture, err error) *moment {
	if was == nil {
		was = &moment{}
	}
	if err != nil {
		same := *was
		same.Err = err
		return &same
	}
	now := &moment{Picture: pic, Change: glance.ChangeOf(before, pic)}
	if !was.At.IsZero() {
		queues := glance.ChangeOf(glance.Picture{At: was.At, Came: was.Came, Went: was.Went}, pic)
		now.Change.Came, now.Change.Went = queues.Came, queues.Went
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

// fresh is how old a moment may be that a page begins with, and brief how long it waits for a newer one before it begins with one that is older, unless
// that is stale: from when others looked, who have gone.
const (
	fresh = 2 * time.Second
	brief = 50 * time.Millisecond
	stale = (share + 1) * patience
)

// moment returns the latest, which is of now if that can be had at once; nil if there is none that is not stale, and looking takes long.
func (h *hub) moment(ctx context.Context) *moment {
	h.mu.Lock()
	acted := h.now != nil && !h.began.After(h.stirred) // the look may have begun before, and ended after that
	if h.now != nil && !acted && (h.now.Err == nil && time.Since(h.now.At) < fresh || h.rested() > 0) {
		defer h.mu.Unlock()
		return h.current()
	}
	enough := brief
	if h.took > brief && !acted {
		enough = 0 // it would be in vain
	}
	h.mu.Unlock()
	done := make(chan struct{})
	go func() {
		_ = h.lookOnce(context.WithoutCancel(ctx)) // for whoever comes next as well; the moment has the error
		close(done)
	}()
	late := time.NewTimer(enough)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
	case <-ctx.Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.current()
}

// current is the latest moment, unless it is stale. The caller has the lock.
func (h *hub) current() *moment {
	if h.now != nil && h.now.Err == nil && time.Since(h.now.At) > stale {
		return nil
	}
	return h.now
}

// latest is the moment that was last taken.
func (h *hub) latest() *moment {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}
