package pgwake

import (
	"sync"
	"sync/atomic"
)

// This file answers: who on this node is waiting, and for what?

// waiters is the registry of a node's lanes. A lane comes with the first fetch that needs it.
type waiters struct {
	newLane func(Queue, filter) *lane
	modes   *modes

	mu     sync.RWMutex
	byKey  [queueCount]map[string]*lane
	closed bool

	count [queueCount]atomic.Int32 // of lanes, for whoever may not wait for mu
}

func newWaiters(m *modes, newLane func(Queue, filter) *lane) *waiters {
	w := &waiters{newLane: newLane, modes: m}
	for q := range w.byKey {
		w.byKey[q] = make(map[string]*lane)
	}
	return w
}

// enter returns the lane for what is fetched of what a filter asks for, with the caller inside it.
func (w *waiters) enter(q Queue, asked filter) (*lane, error) {
	w.mu.RLock()
	f := w.modes.apply(asked) // under the registry's lock: whoever drops the lanes that a change concerns drops this one as well
	key := f.key()
	l := w.byKey[q][key]
	if l != nil && !w.closed {
		l.enter() // under the registry's lock: a lane with somebody inside is never retired
		w.mu.RUnlock()
		return l, nil
	}
	w.mu.RUnlock()

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, ErrClosed
	}
	f = w.modes.apply(asked)
	key = f.key()
	if l = w.byKey[q][key]; l == nil {
		w.retireIdle()
		l = w.newLane(q, f)
		w.byKey[q][key] = l
		w.count[q].Store(int32(len(w.byKey[q])))
	}
	l.enter()
	return l, nil
}

// lanes returns the lanes of a queue.
func (w *waiters) lanes(q Queue) []*lane {
	w.mu.RLock()
	defer w.mu.RUnlock()
	lanes := make([]*lane, 0, len(w.byKey[q]))
	for _, l := range w.byKey[q] {
		if !l.filter.nothing { // there is no news for that one
			lanes = append(lanes, l)
		}
	}
	return lanes
}

// each calls fn for every lane of the queue that serves the namespace; "" stands for any.
func (w *waiters) each(q Queue, namespace string, fn func(*lane)) {
	for _, l := range w.lanes(q) {
		if l.serves(namespace) {
			fn(l)
		}
	}
}

// byID returns the lane with that id; nil: there is none any more.
func (w *waiters) byID(q Queue, id int32) *lane {
	for _, l := range w.lanes(q) {
		if l.id == id {
			return l
		}
	}
	return nil
}

// oneLane reports whether the queue has no more than one lane. It may be called with a lane's mu held.
func (w *waiters) oneLane(q Queue) bool { return w.count[q].Load() <= 1 }

// callParked gives a token to somebody who waits and can take d, and reports whether there is one.
func (w *waiters) callParked(d produced) bool {
	for _, l := range w.lanes(d.queue) {
		if l.callParked(d) {
			return true
		}
	}
	return false
}

// parked returns how many dispatchers of the queue wait.
func (w *waiters) parked(q Queue) int {
	n := 0
	for _, l := range w.lanes(q) {
		l.mu.Lock()
		n += len(l.waiting)
		l.mu.Unlock()
	}
	return n
}

// settled reports whether those who wait for the queue, if any, look only when they are told to: each of their lanes is
// known to be empty.
func (w *waiters) settled(q Queue) bool {
	for _, l := range w.lanes(q) {
		l.mu.Lock()
		settled := l.inside == 0 || l.arming.settled && l.empty
		l.mu.Unlock()
		if !settled {
			return false
		}
	}
	return true
}

// retire drops the lanes that nobody has used for a while, so that short-lived filters leave no trace.
func (w *waiters) retire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.retireIdle()
}

func (w *waiters) retireIdle() {
	for q := range w.byKey {
		for key, l := range w.byKey[q] {
			if l.retire() {
				l.audit()
				delete(w.byKey[q], key)
			}
		}
		w.count[q].Store(int32(len(w.byKey[q])))
	}
}

// drop takes the lanes out of the registry that a change of modes concerns, and returns them. Whoever waits there begins anew.
func (w *waiters) drop(concerned func(filter) bool) (dropped []*lane) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	for q := range w.byKey {
		for key, l := range w.byKey[q] {
			if concerned(l.filter) {
				l.audit()
				close(l.dropped)
				delete(w.byKey[q], key)
				dropped = append(dropped, l)
			}
		}
		w.count[q].Store(int32(len(w.byKey[q])))
	}
	return dropped
}

// close ends every wait with ErrClosed, and lets none begin.
func (w *waiters) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	w.closed = true
	for q := range w.byKey {
		for _, l := range w.byKey[q] {
			close(l.closed)
		}
	}
}
