package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// This file answers: how long after the end of the faults does work flow again?
//
// Probes say so: they have namespaces and dispatchers of their own, so nothing but their way keeps them waiting. Work flows from
// the moment on after which every probe is in hand at once.

// flowing is how long a probe may take while work flows.
const flowing = 500 * time.Millisecond

const mixed = "many at once" // instead of a kind

// checkRecovery: by the bound of each round work flows again, and there are probes that say so.
func (j *judge) checkRecovery() {
	j.v.recovered = map[string]time.Duration{}
	for i, r := range j.rounds {
		took, last := j.recovery(r)
		name := mixed
		switch {
		case len(r.kinds) == 0: // it was missed, or left out
			continue
		case r.alone:
			name = r.kinds[0]
		}
		if calm := r.calm.to.Sub(r.calm.from); !j.probed(r.calm) && calm > j.excusedIn(r.calm.from, r.calm.to) {
			j.complain("round %d (%s): no probe was sent in the calm of %v, so nothing tells whether work flowed again", i+1, name, calm.Round(time.Millisecond))
		}
		j.v.recovered[name] = max(j.v.recovered[name], took)
		if bound := r.bound.Sub(r.calm.from) - j.stalledIn(r.calm.from, r.bound); took > bound+j.slack {
			j.complain("round %d (%s): work flowed again only %v after the faults, and %v is the bound; the last to wait was %v",
				i+1, name, took.Round(time.Millisecond), bound.Round(time.Millisecond), last)
		}
	}
}

// checkOpenings: a process that begins anew works in time.
func (j *judge) checkOpenings() {
	for i, r := range j.rounds {
		for _, o := range r.opened {
			took := o.took.to.Sub(o.took.from)
			j.v.opening = max(j.v.opening, took)
			if took > openingBound+j.excusedIn(o.took.from, o.took.to) {
				j.complain("round %d: %s took %v to open when nothing was wrong any more, and %v is the bound", i+1, o.process, took.Round(time.Millisecond), openingBound)
			}
		}
	}
}

// probed reports whether the enqueue of a probe has returned in a calm.
func (j *judge) probed(calm span) bool {
	for _, f := range j.fates {
		if f.Do == doProbe && f.confirmed.After(calm.from) && f.confirmed.Before(calm.to) {
			return true
		}
	}
	return false
}

// recovery is how long after the faults of a round it took until work flowed, not counting what stalled the machine, and which probe says so.
func (j *judge) recovery(r round) (took time.Duration, last *fate) {
	for _, f := range j.fates {
		if f.Do != doProbe {
			continue
		}
		for i, c := range f.claims {
			from, inHand := f.due(i), c.inHand
			if from.IsZero() {
				continue
			}
			if from.Before(r.calm.from) {
				from = r.calm.from
			}
			if !from.Before(r.bound) || !inHand.After(from) {
				continue
			}
			stalled := j.stalledIn(from, inHand)
			waited := inHand.Sub(from) - stalled
			if waited > flowing {
				waited = inHand.Sub(r.calm.from) - j.stalledIn(r.calm.from, inHand)
			}
			if waited > took {
				took, last = waited, f
			}
		}
	}
	return took, last
}

// recoveries says the worst of each kind.
func recoveries(worst map[string]time.Duration) string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(worst)) {
		all = append(all, fmt.Sprintf("%s %v", kind, worst[kind].Round(time.Millisecond)))
	}
	return "work flowed again after, at worst: " + strings.Join(all, ", ")
}
