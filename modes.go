package pgwake

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// This file answers: how does a node learn of due work, namespace by namespace, and how is that changed while it is at work?
//
// A fetch goes by the modes as they are when it begins to wait, and its lane is that of what it asks for and how it learns of it.
// A change drops the lanes that it concerns: whoever waits there begins anew, in another lane, by a query. So nothing is
// lost here, and what is no longer fetched here the others are told of. The other lanes do not notice.
//
// Invariant: a lane that hears is one of a node that listens, or is about to: the listener comes and goes with the modes that
// need it.

// manner is how a lane learns of work.
type manner struct{ hears, polls, fallsBack bool }

func (m Mode) known() bool { return m >= ModeHybrid && m <= ModeDisabled }

func (m Mode) manner() manner {
	return manner{hears: m == ModeHybrid || m == ModeEventDriven, polls: m == ModePolling, fallsBack: m == ModeHybrid}
}

// fetches reports whether work is done in this mode.
func (m Mode) fetches() bool { return m <= ModePolling }

// listens reports whether the mode needs the LISTEN connection.
func (m Mode) listens() bool { return m.manner().hears || m == ModeShadow }

func (m manner) and(o manner) manner {
	return manner{hears: m.hears || o.hears, polls: m.polls || o.polls, fallsBack: m.fallsBack || o.fallsBack}
}

type modes struct {
	mu      sync.RWMutex
	general Mode
	of      map[string]Mode // of single namespaces
}

func newModes(c *Config) *modes { return &modes{general: c.Mode, of: maps.Clone(c.Modes)} }

// mode returns that of a namespace; "": of those that have none of their own.
func (m *modes) mode(namespace string) Mode {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.modeOf(namespace)
}

func (m *modes) modeOf(namespace string) Mode {
	if mode, ok := m.of[namespace]; ok {
		return mode
	}
	return m.general
}

// apply returns what of f is fetched at this moment, and how that is learned of.
func (m *modes) apply(f filter) filter {
	m.mu.RLock()
	defer m.mu.RUnlock()
	asked := f.Namespaces
	if asked == nil {
		asked = []string{""}
	}
	var served []string
	for _, namespace := range asked {
		mode := m.modeOf(namespace)
		if !mode.fetches() {
			f.unfetched = append(f.unfetched, namespace)
			continue
		}
		served = append(served, namespace)
		f.manner = f.manner.and(mode.manner())
	}
	switch {
	case len(served) == 0:
		f.nothing, f.Labels = true, []string{}
	case f.Namespaces != nil:
		f.Namespaces = served
	}
	return f
}

// any reports whether a mode that is set is such.
func (m *modes) any(is func(Mode) bool) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if is(m.general) {
		return true
	}
	for _, mode := range m.of {
		if is(mode) {
			return true
		}
	}
	return false
}

// SetModes changes how the node learns of due work: mode is Config.Mode, and of Config.Modes, from now on. Fetches that wait
// begin anew where that concerns them, and nothing is lost or done twice by it. The LISTEN connection comes and goes as
// the modes need it. Fails with ErrInvalid, and changes nothing then. Safe for concurrent use.
func (p *Provider) SetModes(mode Mode, of map[string]Mode) error {
	const op = "set modes"
	if !mode.known() {
		return failed(op, invalid("mode %d is unknown", int(mode)))
	}
	for _, namespace := range slices.Sorted(maps.Keys(of)) {
		if err := CheckNamespace(namespace); err != nil {
			return failed(op, err)
		}
		if mode := of[namespace]; !mode.known() {
			return failed(op, invalid("mode %d of %s is unknown", int(mode), quote(namespace)))
		}
	}
	_, done, err := p.begin(context.Background())
	if err != nil {
		return failed(op, err)
	}
	defer done()
	p.engine.setModes(mode, maps.Clone(of))
	return nil
}

// GetModes returns the modes that are in force.
func (p *Provider) GetModes() (mode Mode, of map[string]Mode) {
	m := p.engine.modes
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.general, maps.Clone(m.of)
}

func (e *engine) setModes(mode Mode, of map[string]Mode) {
	concerned := e.modes.set(mode, of)
	left := false
	var notes [queueCount]note
	for _, l := range e.waiters.drop(concerned) {
		if l.filter.manner.hears { // it may have been told alone, of what is fetched here no more
			left = true
			n := note{due: 1}
			if len(l.filter.Namespaces) == 1 {
				n.namespace = l.filter.Namespaces[0]
			}
			if of := &notes[l.queue]; of.due == 0 {
				*of = n
			} else {
				*of = of.merge(n)
			}
			e.coalescer.tell(l.queue, n)
		}
	}
	for q, n := range notes {
		if n.due > 0 { // or another lane of this node has to look, which does not hear what the node says
			e.signal(Queue(q), n, WakeLocal)
		}
	}
	e.timer.moved()
	e.waits.bell.ring()
	if e.listener != nil {
		e.listener.reconsider(left)
	}
}

// set returns which lanes the change concerns: those that were asked for a namespace whose mode is another one now.
func (m *modes) set(general Mode, of map[string]Mode) (concerned func(filter) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := &modes{general: m.general, of: m.of}
	m.general, m.of = general, of
	after := &modes{general: general, of: of}
	changed := func(namespace string) bool { return before.modeOf(namespace) != after.modeOf(namespace) }
	return func(f filter) bool {
		served := f.Namespaces
		if served == nil {
			served = []string{""}
		}
		return slices.ContainsFunc(served, changed) || slices.ContainsFunc(f.unfetched, changed)
	}
}
