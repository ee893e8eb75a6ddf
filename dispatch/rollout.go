package dispatch

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"

	"github.com/pgwake/pgwake"
)

// This file answers: how do namespaces go over from one mode to another, a few at a time?

// modal is a Source with modes: a *pgwake.Provider.
type modal interface {
	SetModes(mode pgwake.Mode, of map[string]pgwake.Mode) error
	GetModes() (mode pgwake.Mode, of map[string]pgwake.Mode)
}

// Percent is a Rollout for a part of the namespaces, in percent, which have the mode then, while the others have otherwise. Which ones
// those are their names decide, so they are the same on every node, and those of a smaller part are among those of a larger one.
func Percent(percent float64, then, otherwise pgwake.Mode) func(namespace string) pgwake.Mode {
	return func(namespace string) pgwake.Mode {
		h := fnv.New64a()
		_, _ = h.Write([]byte(namespace))
		if float64(mixed(h.Sum64())>>11)/(1<<53)*100 < percent {
			return then
		}
		return otherwise
	}
}

// mixed spreads what differs in a few low bits, as the hashes of similar names do, over all of them. It is the end of MurmurHash3, fmix64.
func mixed(x uint64) uint64 {
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// rollout is what Coordinators have the modes of namespaces from.
type rollout struct {
	mu      sync.Mutex // one change of modes at a time
	of      func(namespace string) pgwake.Mode
	general map[int]generalMode // of each Source that has been under a Rollout
}

// generalMode is that of namespaces that have no other: what it is without a Rollout, and what a Rollout has last made of it.
type generalMode struct{ own, set pgwake.Mode }

// SetRollout changes CoordinatorsConfig.Rollout, for the namespaces that there are and those to come. Work goes on meanwhile: see
// pgwake.Provider.SetModes, of which it has the errors; then it sets all Sources back to the modes that they had, as far as it can, and the
// Rollout is the one before. A Source that is closed it leaves out. nil leaves the modes as they are, and a general mode that is set
// from then on remains with the next Rollout. Safe for concurrent use.
func (c *Coordinators) SetRollout(of func(namespace string) pgwake.Mode) error {
	if c.err != nil {
		return c.err
	}
	for i, s := range c.sources {
		if _, ok := s.(modal); of != nil && !ok {
			var k checks
			k.bad("Source %d has no modes, for which there is a Rollout", i)
			return k.err
		}
	}
	c.rollout.mu.Lock()
	defer c.rollout.mu.Unlock()
	before, general, undo := c.rollout.of, maps.Clone(c.rollout.general), c.modesAsTheyAre()
	if before == nil {
		c.forgetGeneralModes()
	}
	c.rollout.of = of
	err := c.rollOut()
	if err != nil {
		c.rollout.of, c.rollout.general = before, general
		undo()
	}
	return err
}

// forgetGeneralModes forgets those that somebody has changed since. Without a Rollout that is his business, and it remains as he wants it.
func (c *Coordinators) forgetGeneralModes() {
	maps.DeleteFunc(c.rollout.general, func(source int, g generalMode) bool {
		now, _ := c.sources[source].(modal).GetModes()
		return now != g.set
	})
}

// modesAsTheyAre returns what sets all Sources back to the modes that they have now, which need not be those of a Rollout.
func (c *Coordinators) modesAsTheyAre() (undo func()) {
	var back []func() error
	for _, s := range c.sources {
		if m, ok := s.(modal); ok {
			mode, of := m.GetModes()
			back = append(back, func() error { return m.SetModes(mode, of) })
		}
	}
	return func() {
		for _, set := range back {
			_ = set() // what it can
		}
	}
}

// rollOut has all namespaces that are known in their modes, or fails. It is called with the rollout's mu held.
func (c *Coordinators) rollOut() error {
	var failures []error
	for i := range c.sources {
		modes, unsaid := c.askRollout(i, nil)
		err := joined(unsaid)
		if err == nil {
			err = c.setModes(i, modes)
		}
		if err != nil && !errors.Is(err, pgwake.ErrClosed) {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// askRollout returns the modes of the namespaces of a Source that are known, and of others. Of those for which the Rollout fails it returns
// why: one that is known keeps the mode that it has, and others have none. It is called with the rollout's mu held.
func (c *Coordinators) askRollout(source int, others []string) (modes map[string]pgwake.Mode, unsaid map[string]error) {
	modes, unsaid = make(map[string]pgwake.Mode), make(map[string]error)
	if c.rollout.of == nil {
		return modes, unsaid
	}
	known := make(map[string]bool)
	for _, namespace := range others {
		known[namespace] = false
	}
	c.mu.Lock()
	for at := range c.known {
		if at.source == source {
			known[at.namespace] = true
		}
	}
	c.mu.Unlock()
	general, now := c.sources[source].(modal).GetModes()
	for namespace, isKnown := range known {
		mode, err := c.rollout.mode(namespace)
		if err != nil {
			unsaid[namespace] = err
			if !isKnown {
				continue
			}
			var ofItsOwn bool
			if mode, ofItsOwn = now[namespace]; !ofItsOwn {
				mode = general
			}
		}
		modes[namespace] = mode
	}
	return modes, unsaid
}

// mode is what the Rollout says of a namespace.
func (r *rollout) mode(namespace string) (pgwake.Mode, error) {
	mode, err := hooked(func() (pgwake.Mode, error) { return r.of(namespace), nil })
	if err == nil && (mode < pgwake.ModeHybrid || mode > pgwake.ModeDisabled) {
		err = fmt.Errorf("%w: mode %d is unknown", pgwake.ErrInvalid, int(mode))
	}
	if err != nil {
		return mode, fmt.Errorf("rollout of namespace %.60q: %w", namespace, err)
	}
	return mode, nil
}

// joined is an error for all of these, which tells the first few.
func joined(failures map[string]error) error {
	var first []error
	for _, namespace := range slices.Sorted(maps.Keys(failures)) {
		if len(first) < mostReasons {
			first = append(first, failures[namespace])
		}
	}
	return errors.Join(first...)
}

// setModes sets those of the namespaces of a Source. It is called with the rollout's mu held.
func (c *Coordinators) setModes(source int, modes map[string]pgwake.Mode) error {
	if c.rollout.of == nil {
		return nil
	}
	m := c.sources[source].(modal)
	general, now := m.GetModes()
	g, ok := c.rollout.general[source]
	if !ok {
		g.own = general
	}
	g.set = g.with(modes)
	maps.DeleteFunc(modes, func(_ string, mode pgwake.Mode) bool { return mode == g.set })
	if general != g.set || !maps.Equal(now, modes) {
		if err := m.SetModes(g.set, modes); err != nil {
			return err
		}
	}
	c.rollout.general[source] = g
	return nil
}

// with is the general mode where the namespaces that are known have these. Nothing of those that are not is claimed. But as long as it is
// one that listens, so does the node, and whoever goes back to polling may have the listening for a reason.
func (g generalMode) with(modes map[string]pgwake.Mode) pgwake.Mode {
	if g.own == pgwake.ModeDisabled || len(modes) == 0 {
		return g.own
	}
	for _, mode := range modes {
		if mode != pgwake.ModePolling && mode != pgwake.ModeDisabled {
			return g.own
		}
	}
	return pgwake.ModePolling
}
