package measure

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when was which item sent, committed, and in hand?

// patience is how long a scenario waits for items when none arrives. It is longer than the fallback takes,
// so that an item whose wake-up was lost shows up as what it is: very late.
const patience = 75 * time.Second

// ledger has a line for each item; the item carries its number as its input.
type ledger struct {
	mu      sync.Mutex
	lines   []line
	again   int      // deliveries of an item that had been delivered before
	arrived chan int // numbers of items, as they come in hand for the first time; never full
}

type line struct{ sent, committed, inHand time.Time }

func newLedger(items int) *ledger {
	return &ledger{lines: make([]line, items), arrived: make(chan int, items)}
}

// item is the work item with the given number.
func (l *ledger) item(n int) pgwake.WorkItem {
	return pgwake.WorkItem{Name: "measure", Input: number(n)}
}

func number(n int) json.RawMessage { return json.RawMessage(strconv.Itoa(n)) }

// enqueued notes an enqueue. The item may have arrived already.
func (l *ledger) enqueued(n int, sent, committed time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines[n].sent, l.lines[n].committed = sent, committed
}

// take notes an arrival. It is a dispatcher's handler.
func (l *ledger) take(item *pgwake.ClaimedWorkItem, inHand time.Time) error {
	n, err := strconv.Atoi(string(item.Input))
	if err != nil || n < 0 || n >= len(l.lines) {
		return fmt.Errorf("work item %d has input %q, which is no item's number", item.ID, item.Input)
	}
	l.arrive(n, inHand)
	return nil
}

// arrive notes the arrival of the item with this number.
func (l *ledger) arrive(n int, inHand time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.lines[n].inHand.IsZero() {
		l.again++
		return
	}
	l.lines[n].inHand = inHand
	l.arrived <- n
}

// line returns what is known of an item.
func (l *ledger) line(n int) line {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines[n]
}

// redelivered returns how many deliveries there were too many.
func (l *ledger) redelivered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.again
}

// wait takes in the arrival of count more items, each of which it shows to see.
func (l *ledger) wait(ctx context.Context, count int, see func(n int)) error {
	tooLong := time.NewTimer(patience)
	defer tooLong.Stop()
	for range count {
		select {
		case n := <-l.arrived:
			tooLong.Reset(patience)
			see(n)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tooLong.C:
			return fmt.Errorf("an item that was enqueued did not arrive within %v", patience)
		}
	}
	return nil
}

// Latency of handing items over; the package comment defines the two.
type Latency struct {
	FromCommit Samples `json:"from_commit"`
	FromSend   Samples `json:"from_send"`
	Ahead      int     `json:"ahead"` // items that were in hand before their enqueue had returned
}

func (l *Latency) add(of line) {
	fromCommit := of.inHand.Sub(of.committed)
	if fromCommit < 0 {
		l.Ahead++
	}
	l.FromCommit = append(l.FromCommit, max(fromCommit, 0))
	l.FromSend = append(l.FromSend, of.inHand.Sub(of.sent))
}
