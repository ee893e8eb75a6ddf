package main

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// This file answers: was an item lost, done twice, or late, in a run whose ledgers are too long to be read at once?
//
// The ledgers are read while they are written. What has come to its end is judged and forgotten, so the accounts are as
// long as the queues. Whatever is said later of something that is forgotten is a violation: nobody sent it.

const (
	ledgerLag = 3 * time.Second // by when a line has surely been written that bears an instant
	afterlife = 5 * time.Second // how long what has ended is remembered
)

type accounts struct {
	j       *judge
	late    time.Duration // what takes longer than that, and than the machine stalls meanwhile, is late
	dir     string
	ledgers map[string]*ledgerReader
	pending []entry // lines that others may have to come before

	items, deliveries, returns, renewals, duplicates, rolledBack int
	unknown                                                      int
	waits                                                        []time.Duration // from due to in hand
	tooLate                                                      int
}

func newAccounts(dir string, late time.Duration) *accounts {
	return &accounts{j: newJudge(soakLease), late: late, dir: dir, ledgers: map[string]*ledgerReader{}}
}

func (a *accounts) close() {
	for _, r := range a.ledgers {
		r.file.Close()
	}
}

// update reads on, and judges what had come to its end by now. stalls are when the machine was slow by itself.
func (a *accounts) update(now time.Time, stalls []span) error {
	paths, err := filepath.Glob(filepath.Join(a.dir, "*.ledger"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if a.ledgers[path] == nil {
			if a.ledgers[path], err = followLedger(path, strings.TrimSuffix(filepath.Base(path), ".ledger")); err != nil {
				return err
			}
		}
		if a.pending, err = a.ledgers[path].readOn(a.pending); err != nil {
			return err
		}
	}
	a.take(now, stalls)
	return nil
}

func (a *accounts) take(now time.Time, stalls []span) {
	a.j.stalls = stalls
	slices.SortStableFunc(a.pending, func(x, y entry) int { return x.At.Compare(y.At) })
	n, _ := slices.BinarySearchFunc(a.pending, now.Add(-ledgerLag), func(e entry, t time.Time) int { return e.At.Compare(t) })
	for _, e := range a.pending[:n] {
		if e.What == renewed {
			a.renewals++
		}
	}
	a.j.read(a.pending[:n])
	a.pending = slices.Delete(a.pending, 0, n)
	for key, f := range a.j.fates {
		if ended, ok := f.ended(); ok && now.Sub(ended) > ledgerLag+afterlife {
			a.settle(f)
			delete(a.j.fates, key)
			for _, c := range f.claims {
				delete(a.j.claims, c.Key+c.Token)
			}
		}
	}
}

// finish judges everything that is left.
func (a *accounts) finish(stalls []span) error {
	if err := a.update(time.Now().Add(time.Hour), stalls); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(a.j.fates)) {
		a.settle(a.j.fates[key])
	}
	return nil
}

// ended is when nothing more was to happen to it, if that has come.
func (f *fate) ended() (at time.Time, ok bool) {
	switch {
	case f.revoked:
		return f.intended, true
	case f.confirmed.IsZero():
		return at, false
	case f.Duplicate:
		return f.confirmed, true
	}
	for _, c := range f.claims {
		if c.outcome == acked {
			ok = true
		}
		at = slices.MaxFunc([]time.Time{at, f.confirmed, c.inHand, c.settled}, time.Time.Compare)
	}
	return at, ok
}

func (a *accounts) settle(f *fate) {
	f.order()
	a.j.checkEnd(f)
	a.j.checkLeases(f)
	switch {
	case f.revoked:
		a.rolledBack++
	case f.Duplicate:
		a.duplicates++
	case f.confirmed.IsZero():
		a.unknown++
	default:
		a.items++
	}
	a.deliveries += len(f.claims)
	for i, c := range f.claims {
		if c.outcome == returned {
			a.returns++
		}
		if c.outcome == "" {
			a.unknown++
		}
		if due := f.due(i); !due.IsZero() {
			a.wait(f, c, due)
		}
	}
}

// due is since when claim i could have been made at the latest, by the server's clock: as the server told whoever has it, or as what came of
// the claim before says. Zero: unknown.
func (f *fate) due(i int) time.Time {
	due := f.claims[i].Due
	switch {
	case i == 0 && f.Due.After(due):
		return f.Due
	case i > 0 && due.IsZero():
		before := f.claims[i-1]
		if before.outcome == returned {
			return before.settled.Add(before.Delay)
		}
		return before.leaseEnd().Add(before.Delay) // nobody knows whether it was given back, but that was before its end
	}
	return due
}

// wait judges how long something waited for a dispatcher, of which there were always some.
func (a *accounts) wait(f *fate, c *claim, due time.Time) {
	waited := max(c.inHand.Sub(due), 0)
	a.waits = append(a.waits, waited)
	most := a.late + a.j.stalledIn(due, c.inHand)
	if waited > most {
		a.tooLate++
		a.j.complain("%v, sent by %s, due at %v, was late: it came in hand in %s after %v (namespace %q, tag %q, session %q)",
			f, f.process, due.Format(time.StampMilli), c.process, waited, c.Namespace, c.Tag, c.Session)
	}
}
