package pgwake

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// This file answers: how do those who look at this node learn that it has done something?
//
// They have asked for it (Provider.Observe), and ask again while they look. The first thing that the node does after a while it tells them at
// once, and then, for as long as it is at work, how it is, every reportEvery. So at work or not, that costs a quarter of a statement
// a second at most, on the LISTEN connection; and where nobody looks, a load of a variable for each thing that the node does.

const (
	// followedFor is how long those are told who have asked once, and maxFollowers how many: anybody can ask.
	followedFor  = 2 * time.Minute
	maxFollowers = 16

	reportEvery = 4 * time.Second

	// stirs begins what a node tells of its own accord. Its report follows, or nothing.
	stirs = "stirs"
)

// followers are those who want to know.
type followers struct {
	say func(channels []string, payload string)

	on   atomic.Bool // there are some
	news atomic.Bool // something was done of which the next report tells

	mu      sync.Mutex
	until   map[string]time.Time // by the channel
	planned *time.Timer          // the next report; nil: there is none, since nothing was done
}

// follow has somebody told from now on.
func (f *followers) follow(channel string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prune()
	if f.until == nil {
		f.until = make(map[string]time.Time)
	}
	if _, again := f.until[channel]; again || len(f.until) < maxFollowers {
		f.until[channel] = time.Now().Add(followedFor)
	}
	f.on.Store(true)
}

// prune forgets those who have not asked again.
func (f *followers) prune() {
	maps.DeleteFunc(f.until, func(_ string, until time.Time) bool { return time.Now().After(until) })
	f.on.Store(len(f.until) > 0)
}

func (f *followers) channels() []string { return slices.Sorted(maps.Keys(f.until)) }

// changed tells those who look at this node that it has done something that they may see. It never blocks.
func (e *engine) changed() {
	if e.listener == nil {
		return
	}
	if f := &e.listener.followers; f.on.Load() && !f.news.Load() {
		f.begin(e.reportJSON)
	}
}

// begin takes note of the first news.
func (f *followers) begin(report func() (string, bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.news.Swap(true) || f.planned != nil {
		return
	}
	f.prune()
	if len(f.until) == 0 {
		f.news.Store(false)
		return
	}
	f.say(f.channels(), stirs)
	f.planned = time.AfterFunc(reportEvery, func() { f.report(report) })
}

// report tells what the node has done since it last told something.
func (f *followers) report(report func() (string, bool)) {
	var text string
	news := f.news.Swap(false) // before it is read how the node is: what comes after that is of the next
	if news {
		text, news = report()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prune()
	switch {
	case f.planned == nil: // end was first
		return
	case len(f.until) == 0, !news && !f.news.Load():
		f.planned = nil
		f.news.Store(false)
		return
	case news:
		f.say(f.channels(), stirs+text)
	}
	f.planned.Reset(reportEvery)
}

// end forgets all of them.
func (f *followers) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.planned != nil {
		f.planned.Stop()
		f.planned = nil
	}
	f.until = nil
	f.on.Store(false)
	f.news.Store(false) // or those who ask again, after a panic, would never be told
}
