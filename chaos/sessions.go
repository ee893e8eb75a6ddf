package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: are the items of a session handed out in order, and to one owner at a time?
//
// Producers enqueue some items for sessions, and each worker and each orchestrator is an owner for as long as its process lives. An owner has
// one item at a time. What is delivered again is due later, and so has another place.

const (
	sessionSpace = "sessions" // a namespace, where nothing else is
	someSessions = 3
	sessionLock  = lease
)

// inSession has some items be of a session. Those that hang or renew would keep it from others. They have no priority, by which a claim
// goes first, and no dedup key, by which an enqueue could lock one.
func inSession(rng *rand.Rand, do string, e *pgwake.WorkEnqueue) bool {
	if do != doAck && do != doEffect && do != doAbandon || rng.IntN(5) > 0 {
		return false
	}
	e.Session, e.Namespace = fmt.Sprint("session-", rng.IntN(someSessions)), sessionSpace
	e.Priority, e.DedupKey = 0, ""
	return true
}

// ownSessions takes items of sessions until the process is to end.
func (w *workload) ownSessions(rng *rand.Rand) {
	w.fetchWork(rng, &pgwake.FetchOptions{
		LockTimeout: lease, Namespaces: []string{sessionSpace}, Session: &pgwake.SessionOptions{Owner: w.process(), LockTimeout: sessionLock},
	}, 1)
}

// sessionClaim is a claim of an item of a session.
type sessionClaim struct {
	*claim
	of *fate
}

// checkSessions: whoever gets an item of a session gets the first that is due, by due time and then by id; and while the lock of an owner lasts,
// nobody else gets any.
func (j *judge) checkSessions() {
	items := map[string][]*fate{}
	for _, f := range j.fates {
		if f.Session != "" {
			items[f.Session] = append(items[f.Session], f)
		}
	}
	for _, session := range slices.Sorted(maps.Keys(items)) {
		var claims []sessionClaim
		for _, f := range items[session] {
			for _, c := range f.claims {
				claims = append(claims, sessionClaim{c, f})
			}
		}
		slices.SortFunc(claims, func(a, b sessionClaim) int { return a.madeAt.Compare(b.madeAt) })
		j.checkOwners(session, claims)
		for _, c := range claims {
			for _, f := range items[session] {
				if f.passedOver(c) && !j.crashed(c.madeAt, f.claims[0].madeAt) {
					j.complain("%s: %v was handed out to %s at %v, before %v, which was due before it", session, c.of, c.process, c.madeAt.Format(time.StampMicro), f)
				}
			}
		}
	}
}

// passedOver reports whether an item was queued, and had never been claimed, when an item behind it was handed out.
func (f *fate) passedOver(c sessionClaim) bool {
	if f == c.of || f.confirmed.IsZero() || !f.confirmed.Before(c.madeAt) || len(f.claims) == 0 {
		return false
	}
	first := f.claims[0]
	if first.Due.After(f.Due) { // it had been handed out before, and its process does not know
		return false
	}
	behind := f.Due.Before(c.Due) || f.Due.Equal(c.Due) && f.ID < c.of.ID
	return behind && c.inHand.Before(first.madeAt)
}

// checkOwners takes claims in their order.
func (j *judge) checkOwners(session string, claims []sessionClaim) {
	last := map[string]time.Time{} // claims of each owner
	for i, c := range claims {
		for owner, madeAt := range last {
			if until := madeAt.Add(sessionLock); owner != c.process && c.madeAt.Before(until) && !j.crashed(madeAt, c.madeAt) {
				j.complain("%s: %v was handed out to %s %v before the lock of %s ended", session, c.of, c.process, until.Sub(c.madeAt), owner)
			}
		}
		last[c.process] = c.madeAt
		j.v.sessions++
		if i > 0 && claims[i-1].process != c.process {
			j.v.takeovers++
		}
	}
}
