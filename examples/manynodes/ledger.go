package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// This file answers: which node had which item, and when?

// record is what happened to one item.
type record struct {
	node    int       // that claimed it last
	until   time.Time // end of that lease, server's clock
	handled int       // times
	acked   bool
}

type ledger struct {
	items     []record
	handled   [nodeCount + 1]int // by node
	killed    int                // node
	late      []time.Duration    // of the dead node's items: from the end of the lease to the next claim
	impatient bool
}

func (l *ledger) note(r report) {
	i := &l.items[r.Item]
	switch r.What {
	case claimed:
		if i.node != 0 && i.node == l.killed {
			l.late = append(l.late, r.Until.Add(-lockTimeout).Sub(i.until))
		}
		i.node, i.until = r.Node, r.Until
	case handled:
		i.handled++
		l.handled[r.Node]++
	case acked:
		i.acked = true
	}
}

// held is the number of items that the dead node had claimed, and not acknowledged as far as it said.
func (l *ledger) held() (n int) {
	for _, i := range l.items {
		if i.node == l.killed && !i.acked {
			n++
		}
	}
	return n
}

// settled: all items were handled, and no more redelivery is to be expected.
func (l *ledger) settled() bool {
	for _, i := range l.items {
		if i.handled == 0 || !i.acked && !l.impatient {
			return false
		}
	}
	return true
}

func (l *ledger) print(out io.Writer) {
	once, again := 0, 0
	for _, i := range l.items {
		once += min(i.handled, 1)
		again += max(i.handled-1, 0)
	}
	fmt.Fprintf(out, "\n%d of %d items were handled, %d of them twice, by\n", once, len(l.items), again)
	for n := 1; n <= nodeCount; n++ {
		fmt.Fprintf(out, "  node %d  %4d", n, l.handled[n])
		if n == l.killed {
			fmt.Fprint(out, "  until it was killed")
		}
		fmt.Fprintln(out)
	}
	slices.Sort(l.late)
	if len(l.late) > 0 {
		fmt.Fprintf(out, "of node %d others got %d, %v to %v after their leases had ended\n",
			l.killed, len(l.late), l.late[0], l.late[len(l.late)-1])
	}
}
