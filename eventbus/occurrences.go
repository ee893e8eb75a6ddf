package eventbus

import (
	"context"
	"slices"
	"sync"
)

// This file answers: how do schedules that are due at the same moment share a statement and a commit?

// occurrences are those that a Node carries out now. Safe for concurrent use.
type occurrences struct {
	many func(ctx context.Context, items []int64, claims, schedules []string) (carriedOut []bool, err error)

	mu      sync.Mutex
	inHand  int
	waiting []*occurrence
	busy    int // statements that are on their way
}

type occurrence struct {
	item     int64
	claim    string
	schedule string
	done     chan bool // whether it was carried out, with others
}

const (
	mostOccurrences = 100 // in a statement
	mostStatements  = 2   // at a time: while they are on their way, others gather
)

// take counts one that is in hand, until the function that it returns is called.
func (o *occurrences) take() (leave func()) {
	count := func(n int) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.inHand += n
	}
	count(1)
	return func() { count(-1) }
}

// withOthers has one be carried out by the next statement, if it is not the only one, and reports whether it was. If not, nothing of it has taken
// effect, or nobody knows: it is to be carried out by itself, which tells.
func (o *occurrences) withOthers(ctx context.Context, item int64, claim, schedule string) bool {
	mine := &occurrence{item, claim, schedule, make(chan bool, 1)}
	o.mu.Lock()
	// One that waits already was claimed before, and its lease has ended.
	if o.inHand == 1 || slices.ContainsFunc(o.waiting, func(other *occurrence) bool { return other.item == item }) {
		o.mu.Unlock()
		return false
	}
	o.waiting = append(o.waiting, mine)
	if o.busy < mostStatements {
		o.busy++
		go o.carryOut()
	}
	o.mu.Unlock()
	select {
	case carriedOut := <-mine.done:
		return carriedOut
	case <-ctx.Done():
		o.mu.Lock()
		defer o.mu.Unlock()
		o.waiting = slices.DeleteFunc(o.waiting, func(other *occurrence) bool { return other == mine })
		return false
	}
}

// carryOut carries out what there is, until there is no more.
func (o *occurrences) carryOut() {
	for {
		o.mu.Lock()
		group := o.waiting[:min(len(o.waiting), mostOccurrences)]
		if o.waiting = o.waiting[len(group):]; len(group) == 0 {
			o.busy--
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()
		var items []int64
		var claims, schedules []string
		for _, one := range group {
			items, claims, schedules = append(items, one.item), append(claims, one.claim), append(schedules, one.schedule)
		}
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
		carriedOut, err := o.many(ctx, items, claims, schedules)
		cancel()
		for i, one := range group {
			one.done <- err == nil && carriedOut[i]
		}
	}
}
