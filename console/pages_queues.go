package console

import (
	"cmp"
	"slices"
	"strings"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what is queued where, and who fetches it?

type queues struct {
	Ready bool
	Err   string
	Rows  []queueRow
	Pager pager
	Sums  glance.Sums
	All   []string // whole queues that are paused
	Lanes []lane
}

type queueRow struct {
	pgwake.QueueDepth
	Paused bool // nobody fetches from it
	Itself bool // and not because the whole queue is paused
}

// lane is one of all lanes.
type lane struct {
	Node int32
	pgwake.LaneInfo
}

// maxRows is how many rows of a table a page has that is not read page by page: there may be hundreds of nodes.
const maxRows = 200

func loadQueues(v *view) (any, error) {
	m := v.moment()
	if m == nil {
		return &queues{}, nil
	}
	q := &queues{Ready: !m.At.IsZero(), Sums: glance.SumsOf(m.Depths)}
	if m.Err != nil {
		q.Err = glance.Short(m.Err.Error(), 300)
	}
	paused := make(map[string]bool)
	for _, name := range m.Paused {
		paused[name] = true
		if queue, all := strings.CutSuffix(name, " *"); all {
			q.All = append(q.All, queue)
		}
	}
	seen := make(map[string]bool)
	filter := strings.ToLower(v.text("q"))
	for _, d := range longest(m.Depths) {
		name := d.Queue.String() + " " + d.Namespace
		seen[name] = true
		if filter != "" && !strings.Contains(strings.ToLower(d.Namespace+" "+d.Tag), filter) {
			continue
		}
		q.Rows = append(q.Rows, queueRow{d, paused[name] || paused[d.Queue.String()+" *"], paused[name]})
	}
	for _, name := range m.Paused { // and empty
		queue, namespace, _ := strings.Cut(name, " ")
		if namespace == "*" || seen[name] || filter != "" && !strings.Contains(namespace, filter) {
			continue
		}
		d := pgwake.QueueDepth{Namespace: namespace, Queue: pgwake.Worker}
		if queue == pgwake.Orchestrator.String() {
			d.Queue = pgwake.Orchestrator
		}
		q.Rows = append(q.Rows, queueRow{d, true, true})
	}
	var err error
	if q.Rows, q.Pager, err = paged(v, q.Rows, perPage); err != nil {
		return nil, err
	}
	for _, n := range m.Nodes {
		for _, l := range n.Lanes {
			if len(q.Lanes) < maxRows {
				q.Lanes = append(q.Lanes, lane{n.Key, l})
			}
		}
	}
	return q, nil
}

// longest sorts depths: first what is due and has waited longest, then where there is most.
func longest(depths []pgwake.QueueDepth) []pgwake.QueueDepth {
	all := slices.Clone(depths)
	slices.SortStableFunc(all, func(a, b pgwake.QueueDepth) int {
		switch {
		case a.Due > 0 && b.Due > 0:
			return a.OldestDue.Compare(b.OldestDue)
		case a.Due > 0 || b.Due > 0:
			return cmp.Compare(b.Due, a.Due)
		}
		return cmp.Compare(b.Delayed+b.Leased+b.KeptBack, a.Delayed+a.Leased+a.KeptBack)
	})
	return all
}
