package main

import (
	"slices"
	"strings"
	"time"
)

// This file answers: what are the promises, item by item?

// checkEnd: what was sent was delivered and finished; what was not, never appeared.
func (j *judge) checkEnd(f *fate) {
	switch {
	case f.revoked && len(f.claims) > 0:
		j.complain("%v was delivered, but its transaction had been rolled back", f)
	case f.Duplicate && len(f.claims) > 0:
		j.complain("%v was delivered, but its enqueue had reported a duplicate", f)
	case f.existed() && len(f.claims) == 0:
		j.complain("%v is lost: sent at %v, never delivered", f, f.confirmed.Format(time.StampMicro))
	case f.existed() && !slices.ContainsFunc(f.claims, (*claim).mayHaveEnded):
		j.complain("%v is lost: delivered %d times, and gone without an ack", f, len(f.claims))
	}
}

// mayHaveEnded reports whether the claim's ack took effect, as far as its process knows.
func (c *claim) mayHaveEnded() bool {
	return c.outcome == acked || c.tried == acking && c.outcome == ""
}

// mayHaveReturned reports the same of an abandon.
func (c *claim) mayHaveReturned() bool {
	return c.outcome == returned || c.tried == returning && c.outcome == ""
}

// checkLeases: at most one ack took effect, under the last claim; no lease was given to two; no token did
// anything after its lease; no token failed before.
func (j *judge) checkLeases(f *fate) {
	ends := 0
	for i, c := range f.claims {
		if c.tried == acking && c.outcome == "" && !dispatched(f.Do) {
			j.v.unsure++
		}
		if c.outcome == refused {
			j.v.refusals++
			if c.settled.Before(c.Until) && !j.crashed(c.inHand, c.settled) {
				j.complain("%v: token %s was refused %v before its lease ended", f, c.Token, c.Until.Sub(c.settled))
			}
		}
		if c.triedLate() && !dispatched(f.Do) { // which renews its leases by itself
			if j.v.late++; c.outcome == acked || c.outcome == returned {
				j.complain("%v: token %s was accepted after its lease had ended", f, c.Token)
			}
		}
		last := i == len(f.claims)-1
		if c.outcome == acked {
			if ends++; ends > 1 {
				j.complain("%v was acknowledged twice", f)
			}
			if !last {
				j.complain("%v: token %s acknowledged it, but it was claimed again, by %s", f, c.Token, f.claims[i+1].process)
			}
		}
		if !last && !c.mayHaveReturned() && !dispatched(f.Do) {
			next, until := f.claims[i+1], c.leaseEnd()
			if next.madeAt.Before(until) && !j.crashed(c.madeAt, next.madeAt) {
				j.complain("%v: claimed by %s %v before the lease of %s ended", f, next.process, until.Sub(next.madeAt), c.process)
			}
		}
	}
}

// crashed reports whether the server crashed in the meantime, or a moment before. A claim is committed without
// waiting for the disk, so a crash may take it back.
func (j *judge) crashed(from, to time.Time) bool {
	return slices.ContainsFunc(j.crashes, func(s span) bool { return from.Before(s.to) && to.After(s.from.Add(-time.Second)) })
}

// checkTraces: an item whose ack is one with an effect has left one; a message is in the history once; and
// both by a token that was not refused. What a turn or a reply sends exists only if that took effect.
func (j *judge) checkTraces(f *fate) {
	traces, owed := len(f.effects), hasEffect(f.Do)
	if f.Instance != "" {
		traces, owed = len(f.remembered), true
	}
	switch {
	case traces > 1:
		j.complain("%v took effect %d times", f, traces)
	case traces > 0 && !f.existed():
		j.complain("%v took effect and never existed", f)
	case traces == 0 && owed && f.existed():
		j.complain("%v is gone without its effect", f)
	}
	for _, e := range f.remembered {
		f.effects = append(f.effects, effect{e.Key, e.Token})
	}
	for _, e := range f.effects {
		i := slices.IndexFunc(f.claims, func(c *claim) bool { return c.Token == e.token })
		switch {
		case i < 0:
			j.complain("%v took effect by token %s, which nobody got", f, e.token)
		case !f.claims[i].mayHaveEnded():
			j.complain("%v took effect by token %s, whose outcome was %q", f, e.token, f.claims[i].outcome)
		case f.claims[i].triedLate() && !dispatched(f.Do):
			j.complain("%v took effect by token %s, which was tried %v after its lease had ended", f, e.token, f.claims[i].triedAt.Sub(f.claims[i].leaseEnd()))
		}
	}
	if done := j.fates[f.Key+".done"]; f.Do == doReply && f.existed() && (done == nil || !done.existed()) {
		j.complain("%v is gone without its reply", f)
	}
	if i := strings.LastIndexByte(f.Key, '.'); i > 0 && f.existed() {
		sender := j.fates[f.Key[:i]]
		tookEffect := len(sender.remembered) > 0
		if sender.Instance == "" {
			tookEffect = slices.ContainsFunc(sender.claims, (*claim).mayHaveEnded)
		}
		if !tookEffect {
			j.complain("%v exists, but what was to send it took no effect", f)
		}
	}
}

// checkWait: once everything must have recovered, a probe is in hand within a second, and anything else within
// the time that two leases may hold it up, at first and whenever it is due again; a solo item, for as long as its one dispatcher
// hangs, and one under a limit, for as long as others have its places. Slowness of the
// machine is added.
func (j *judge) checkWait(f *fate) {
	if !f.existed() || f.Do == doSolo || dispatched(f.Do) {
		return
	}
	patience, into := probePatience, &j.v.probes
	if f.Do != doProbe {
		patience, into = leasesPatience, nil
	}
	for i, c := range f.claims {
		due := f.due(i)
		if due.IsZero() {
			continue
		}
		j.v.slowest = max(j.v.slowest, c.inHand.Sub(due))
		if after, late := j.late(due, c.inHand, patience, into); late {
			j.complain("%v, sent by %s, due at %v, was in hand in %s (delivery %d) only %v after that, and %v after all must have recovered",
				f, f.process, due.Format(time.StampMilli), c.process, i+1, c.inHand.Sub(due), after)
		}
	}
}

// How long a probe, and anything else, may take once all must have recovered. A calm is longer, or nobody would be late in one.
const (
	probePatience  = time.Second
	leasesPatience = probePatience + 2*lease
)

// late reports whether something that was due came too late in a calm, and how long after all must have recovered. How long it took if it was
// due and came in one is added to probes, unless that is nil.
func (j *judge) late(due, came time.Time, patience time.Duration, probes *[]time.Duration) (after time.Duration, late bool) {
	for _, r := range j.rounds {
		from := due
		if from.Before(r.bound) {
			from = r.bound
		} else if probes != nil && came.Before(r.calm.to) {
			*probes = append(*probes, max(came.Sub(from), 0))
		}
		if end := from.Add(patience + j.excusedIn(from, came)); came.After(end) && end.Before(r.calm.to) {
			after, late = came.Sub(r.bound), true
		}
	}
	return after, late
}

// excusedIn is for how much longer something may take because of the machine: for as long as it stalled, and the slack that was asked for.
func (j *judge) excusedIn(from, to time.Time) time.Duration { return j.stalledIn(from, to) + j.slack }

// stalledIn is how long the machine stalled in between.
func (j *judge) stalledIn(from, to time.Time) (total time.Duration) {
	for _, s := range j.stalls {
		if s.to.After(from) && s.from.Before(to) {
			total += s.to.Sub(s.from)
		}
	}
	return total
}

// checkErrors: once all must have recovered, no call fails that begins and ends within the calm, but for as long as the machine was
// slow. Each connection of a pool that has lost its peer silently may fail one more, whenever it is used for the first time after that.
func (j *judge) checkErrors() {
	used := map[string]int{}
	for _, e := range j.errors {
		for i, r := range j.rounds {
			from := r.bound.Add(j.excusedIn(r.bound, e.At))
			if e.Since.Before(from) || e.At.After(r.calm.to) {
				continue
			}
			lost := 0
			for _, s := range j.silences {
				if s.process == e.process && s.at.Before(e.At) {
					lost += s.connections
				}
			}
			if used[e.process]++; used[e.process] > lost {
				j.complain("%s: round %d: a call failed that began %v after all must have recovered, and took %v: %s",
					e.process, i+1, e.Since.Sub(r.bound).Round(time.Millisecond), e.At.Sub(e.Since).Round(time.Millisecond), e.Err)
			}
		}
	}
}

// checkDuplicates: what a dedup key refused had an original at that time, and an original kept others out.
func (j *judge) checkDuplicates() {
	byKey := map[string][]*fate{}
	for _, f := range j.fates {
		if f.Dedup != "" {
			byKey[f.Dedup] = append(byKey[f.Dedup], f)
		}
	}
	for _, all := range byKey {
		for _, f := range all {
			if f.confirmed.IsZero() {
				continue
			}
			// Surely queued: from the return of the enqueue to the first attempt at an ack. Possibly queued:
			// from its call to the return of the ack.
			explained := false
			for _, original := range all {
				if original == f || original.Duplicate || original.revoked {
					continue
				}
				if original.intended.Before(f.confirmed) && !original.ackedBefore(f.intended) {
					explained = true
				}
				if !f.Duplicate && original.existed() && !original.confirmed.IsZero() && original.confirmed.Before(f.intended) &&
					f.confirmed.Before(original.firstTry()) {
					j.complain("%v was added although %v with its dedup key was queued", f, original)
				}
			}
			if f.Duplicate && !explained {
				j.complain("%v was refused as a duplicate of nothing", f)
			}
		}
	}
}

// ackedBefore reports whether an ack had returned by then.
func (f *fate) ackedBefore(t time.Time) bool {
	return slices.ContainsFunc(f.claims, func(c *claim) bool { return c.outcome == acked && c.settled.Before(t) })
}

// firstTry is when the first ack was called.
func (f *fate) firstTry() time.Time {
	first := time.Now()
	for _, c := range f.claims {
		if c.tried == acking && c.triedAt.Before(first) {
			first = c.triedAt
		}
	}
	return first
}

// checkOrder: the messages of a turn are in the order of their ids, and a message that was sent without a
// delay after the enqueue of another had returned is not before it in the history.
func (j *judge) checkOrder(history []event) {
	for i, h := range history {
		if i > 0 && history[i-1].instance == h.instance && history[i-1].Token == h.Token && history[i-1].ID >= h.ID {
			j.complain("%s: message id %d comes after %d in one turn", h.instance, h.ID, history[i-1].ID)
		}
	}
	var instance string
	var earliest *fate // of those that come later in the history, the one that was sent first
	for _, h := range slices.Backward(history) {
		if h.instance != instance {
			instance, earliest = h.instance, nil
		}
		f := j.fates[h.Key]
		if f == nil || f.confirmed.IsZero() || f.Delay > 0 || strings.Contains(f.Key, ".") {
			continue
		}
		if earliest != nil && earliest.confirmed.Before(f.intended) {
			j.complain("%s: %v comes before %v, whose enqueue had returned before this one was called", h.instance, f, earliest)
		}
		if earliest == nil || f.confirmed.Before(earliest.confirmed) {
			earliest = f
		}
	}
}
