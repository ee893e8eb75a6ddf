package dispatch

import (
	"hash/fnv"
	"maps"
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

// mixed spreads what differs in a few low bits, as the hashes of similar names do, over all of them.
func mixed(x uint64) uint64 {
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// rollout is what Coordinators have the modes of namespaces from.
type rollout struct {
	mu sync.Mutex // one change of modes at a time
	of func(namespace string) pgwake.Mode
}

// SetRollout changes CoordinatorsConfig.Rollout, of the namespaces that there are and those to come. Work goes on meanwhile: see
// pgwake.Provider.SetModes, of which it has the errors. nil leaves the modes as they are. Safe for concurrent use.
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
	before := c.rollout.of
	c.rollout.of = of
	err := c.rollOut()
	if err != nil {
		c.rollout.of = before
	}
	return err
}

// applyRollout has the namespaces that are known in their modes.
func (c *Coordinators) applyRollout() {
	c.rollout.mu.Lock()
	defer c.rollout.mu.Unlock()
	if err := c.rollOut(); err != nil {
		c.log.Error("dispatch: cannot set modes", "error", err)
	}
}

// rollOut is called with the rollout's mu held.
func (c *Coordinators) rollOut() error {
	if c.rollout.of == nil {
		return nil
	}
	c.mu.Lock()
	known := maps.Clone(c.known)
	c.mu.Unlock()
	modes := make(map[string]pgwake.Mode, len(known))
	for namespace := range known {
		modes[namespace] = c.rollout.of(namespace)
	}
	for _, s := range c.sources {
		m := s.(modal)
		general, now := m.GetModes()
		if maps.Equal(now, modes) {
			continue
		}
		if err := m.SetModes(general, modes); err != nil {
			return err
		}
	}
	return nil
}
