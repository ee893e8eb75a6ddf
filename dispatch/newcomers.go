package dispatch

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how do Coordinators learn of namespaces, and what becomes of one whose mode they cannot learn?
//
// Invariant: a namespace is known, and so served, only once it is in the mode that the Rollout says, if there is one. Where the Rollout fails
// for one that a Source has told of, that is left, and tried again; no other waits for it.

// watch spawns a coordinator for each namespace of a Source, as they come.
func (c *Coordinators) watch(ctx context.Context, source int) {
	patience := c.patience(nil)
	var known []string  // all that were admitted, or left
	var again time.Time // when to try again those that are left; zero: there are none
	for {
		added, err := c.waitForNamespaces(ctx, source, known, again)
		if err == nil {
			again, err = c.admit(source, added, again)
		}
		if err == nil {
			known = append(known, added...)
		} else if ctx.Err() == nil && !errors.Is(err, pgwake.ErrClosed) {
			c.watched(source, err)
		}
		goOn, err := patience.after(ctx, err)
		if err != nil {
			c.log.Error("dispatch: cannot learn of namespaces", "error", err)
			nap(ctx, longestPause)
			goOn = ctx.Err() == nil
		}
		if !goOn {
			// The Provider is closed, or all is to end: so are the coordinators, and Run waits for them.
			return
		}
	}
}

// waitForNamespaces is that of the Source; there may be none when it is time to try again. It may take for ever: what failed before goes
// well if it has been at it for a while.
func (c *Coordinators) waitForNamespaces(ctx context.Context, source int, known []string, again time.Time) (added []string, err error) {
	well := time.AfterFunc(lastPause, func() { c.watched(source, nil) })
	defer well.Stop()
	waiting := ctx
	if !again.IsZero() {
		var cancel context.CancelFunc
		waiting, cancel = context.WithDeadline(ctx, again)
		defer cancel()
	}
	added, err = c.sources[source].WaitForNamespaces(waiting, known)
	if err != nil && waiting.Err() != nil && ctx.Err() == nil {
		return nil, nil
	}
	return added, err
}

// watched takes note of whether a Source tells of namespaces.
func (c *Coordinators) watched(source int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watching[source].note(err)
}

// admit has namespaces served of which a Source has told, and, when it is time to try again, those that are left. Those for which the
// Rollout fails are left, and keep no others waiting: it returns when to try them again; zero: none is left. If it fails, nothing happens.
func (c *Coordinators) admit(source int, added []string, again time.Time) (time.Time, error) {
	due := !again.IsZero() && !time.Now().Before(again)
	if due {
		added = slices.Concat(added, c.leftIn(source))
	}
	// One whose mode cannot be set is not served: it might be one that is to be watched alone.
	unsaid, err := c.learn(source, added)
	if err != nil {
		return again, err
	}
	if len(unsaid) > 0 {
		c.log.Error("dispatch: the Rollout fails for namespaces; it is asked again about those that are not served", "namespaces", len(unsaid), "error", joined(unsaid))
	}
	c.mu.Lock()
	for _, namespace := range added {
		if at := (place{source, namespace}); !c.known[at] { // nor has Spawn made it known since
			c.left[at] = unsaid[namespace]
		}
	}
	c.mu.Unlock()
	for _, namespace := range added {
		if unsaid[namespace] == nil && c.serves(namespace) {
			c.spawn(place{source, namespace})
		}
	}
	switch {
	case len(c.leftIn(source)) == 0:
		return time.Time{}, nil
	case due, again.IsZero():
		again = time.Now().Add(jittered(longestPause))
	}
	return again, nil
}

// leftIn returns the namespaces of a Source that are left.
func (c *Coordinators) leftIn(source int) (left []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for at := range c.left {
		if at.source == source {
			left = append(left, at.namespace)
		}
	}
	return left
}

// leftOut returns why namespaces are left that are to be served here. One that was retired is not.
func (c *Coordinators) leftOut() (why []error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range slices.SortedFunc(maps.Keys(c.left), place.compare) {
		if c.serves(at.namespace) && !c.shut[at] {
			why = append(why, c.left[at])
		}
	}
	return why
}

// learn takes note of namespaces before they are served: in their modes. It returns why the Rollout fails for some: of these, none is known
// that was not. If the modes cannot be set, that is so for all of them.
func (c *Coordinators) learn(source int, namespaces []string) (unsaid map[string]error, err error) {
	c.rollout.mu.Lock()
	defer c.rollout.mu.Unlock()
	modes, unsaid := c.askRollout(source, namespaces)
	if err := c.setModes(source, modes); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, namespace := range namespaces {
		if at := (place{source, namespace}); unsaid[namespace] == nil {
			c.known[at] = true
			delete(c.left, at)
		}
	}
	return unsaid, nil
}
