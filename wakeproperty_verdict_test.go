package pgwake

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// This file answers: has the promise been kept in a scenario of wakeproperty_test.go?

// dueRow is an item that is due and free.
type dueRow struct {
	name string
	drawnItem
}

// due asks for the rows that are in the queues: those that are due and free, or all.
func (w *world) due(all bool) (rows []dueRow) {
	w.t.Helper()
	r, err := w.peek.Query(tctx, `
		SELECT 'worker', name, namespace, tag FROM worker_queue WHERE $1 OR visible_at <= clock_timestamp()
		UNION ALL
		SELECT 'orchestrator', q.instance_id, q.namespace, '' FROM orchestrator_queue q
		 WHERE $1 OR q.visible_at <= clock_timestamp() AND NOT EXISTS (
			SELECT FROM instance_locks l WHERE l.instance_id = q.instance_id AND l.locked_until > clock_timestamp())`, all)
	require.NoError(w.t, err)
	var queue string
	var d dueRow
	_, err = pgx.ForEachRow(r, []any{&queue, &d.name, &d.namespace, &d.tag}, func() error {
		if d.Queue = Worker; queue != "worker" {
			d.Queue = Orchestrator
		}
		rows = append(rows, d)
		return nil
	})
	require.NoError(w.t, err)
	return rows
}

// requireNoneWaits asserts the promise: no item is due and free while somebody waits who may take it.
func (w *world) requireNoneWaits(when string) {
	w.t.Helper()
	w.eventually("no due item waits while somebody does, "+when, func() bool {
		return !slices.ContainsFunc(w.due(false), func(row dueRow) bool {
			return slices.ContainsFunc(w.dispatchers, func(d *propertyDispatcher) bool { return d.fetching.Load() && d.lane.takes(row.drawnItem) })
		})
	})
}

// requireAllHandled waits until nothing is left that a lane of the nodes takes.
func (w *world) requireAllHandled(nodes []*propertyNode) {
	w.t.Helper()
	w.eventually("all is handled", func() bool {
		w.release() // those that were blocked meanwhile
		return !slices.ContainsFunc(w.due(true), func(row dueRow) bool { return taken(nodes, row.drawnItem) })
	})
}

func taken(nodes []*propertyNode, i drawnItem) bool {
	return slices.ContainsFunc(nodes, func(n *propertyNode) bool {
		return slices.ContainsFunc(n.lanes, func(l drawnLane) bool { return l.takes(i) })
	})
}

// here are the nodes that are left.
func (w *world) here() (here []*propertyNode) {
	for _, n := range w.nodes {
		if !n.away {
			here = append(here, n)
		}
	}
	return here
}

// startAll has everybody begin who has not.
func (w *world) startAll() {
	for _, n := range w.nodes {
		for lane := range n.lanes {
			n.start(lane)
		}
	}
}

// requireDelivery adds one more item for each lane, which a notification alone can tell of.
func (w *world) requireDelivery(nodes []*propertyNode) {
	w.t.Helper()
	fallbacks := func() (n int64) {
		for _, s := range nodes {
			n += s.Stats().Fallbacks
		}
		return n
	}
	made := fallbacks()
	p := w.producers[0]
	for _, n := range nodes {
		for _, l := range n.lanes {
			i := drawnItem{Queue: l.Queue, namespace: "a", handling: "quick"}
			if l.namespaces != nil {
				i.namespace = l.namespaces[0]
			}
			if labels, _ := l.tags.labels(); l.Queue == Worker && labels != nil {
				i.tag = labels[0]
			}
			items := w.make([]drawnItem{i})
			w.produce(p, func() {
				if w.insert(p, p.conn, nil, drawnStep{by: "rows"}, items) {
					w.commit(items)
				}
			})
			w.pending.Wait()
			w.requireAllHandled(nodes)
		}
	}
	if made != fallbacks() {
		w.t.Fatalf("more fallbacks were made")
	}
}

// settle waits until every lane has settled, unless a producer keeps them from it.
func (w *world) settle() {
	w.t.Helper()
	w.eventually("it settles", func() bool {
		return slices.ContainsFunc(w.producers, func(p *propertyProducer) bool { return p.open && p.added }) ||
			!slices.ContainsFunc(w.here(), func(n *propertyNode) bool {
				s := n.Stats()
				return !s.Worker.Settled || !s.Orchestrator.Settled
			})
	})
}

// finish ends the producers one by one, and asserts what must be then.
func (w *world) finish() {
	w.startAll()
	w.pending.Wait()
	w.release()
	w.requireNoneWaits("with producers open")
	for at, p := range w.producers {
		if p.open {
			w.settle()
			w.do(w.last[at])
			w.endTx(p, w.last[at].fate)
			w.pending.Wait()
			w.requireNoneWaits(fmt.Sprintf("after the end of producer %d", at))
		}
	}
	nodes := w.here()
	w.requireAllHandled(nodes)
	if w.stillness {
		w.requireStillness()
	}
	w.requireDelivery(nodes)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range w.items {
		switch {
		case !i.committed && i.fetched > 0:
			w.t.Fatalf("handled, and it was rolled back: %v", i)
		case i.fetched > 1+i.abandoned, i.committed && taken(nodes, i.drawnItem) && i.fetched != 1+i.abandoned:
			w.t.Fatalf("not handled once: %v", i)
		}
	}
	if !w.serial || w.stalled.Load() {
		return // one of several producers may end unseen, and a scout or a fallback be the first to see what it left
	}
	for _, n := range w.nodes {
		s := n.Stats()
		for _, q := range []QueueStats{s.Worker, s.Orchestrator} {
			if q.FallbackFinds+q.ScoutFinds != 0 {
				w.t.Fatalf("the safety net found something: %+v", q)
			}
		}
	}
}

// requireStillness asserts that nodes that only wait make no statement.
func (w *world) requireStillness() {
	w.t.Helper()
	observe := func() (seen string) {
		var looks []int64
		for _, n := range w.here() {
			s := n.Stats()
			looks = append(looks, s.Worker.Looks, s.Orchestrator.Looks)
		}
		err := w.peek.QueryRow(tctx, `SELECT coalesce(string_agg(pid || ' ' || query_start, ', ' ORDER BY pid), '') FROM pg_stat_activity
			WHERE application_name LIKE $1 || ' %' AND query_start IS NOT NULL`, w.schema).Scan(&seen)
		require.NoError(w.t, err)
		return fmt.Sprint(looks, seen)
	}
	last := observe()
	w.eventually("it is still", func() bool {
		time.Sleep(150 * time.Millisecond) // nothing is to happen, and a scout looks every 100 ms at least
		before := last
		last = observe()
		return last == before
	})
}

// finishAfterFaults asserts the bound: one fallback of each node that survives. It returns how many items it found.
func (w *world) finishAfterFaults() (lost int) {
	w.startAll()
	w.pending.Wait()
	for at, p := range w.producers {
		if p.open {
			w.do(w.last[at])
			w.endTx(p, w.last[at].fate)
		}
	}
	w.pending.Wait()
	var survivors []*propertyNode
	frozen := false
	for _, n := range w.here() {
		if w.thaw || !n.mortal { // what it is about to give back, it gives back over the connection that is stopped
			n.thawUp()
		}
		if n.frozen.Load() == nil {
			survivors = append(survivors, n)
		} else {
			frozen = true
		}
	}
	for _, n := range survivors {
		w.eventually("it listens again", func() bool { return n.Stats().Listening })
	}
	// What the dead have sent has arrived, and their leases are over.
	w.eventually("the dead are gone", func() (gone bool) {
		w.release()
		require.NoError(w.t, w.peek.QueryRow(tctx, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY ($1))
			AND NOT EXISTS (SELECT FROM worker_queue WHERE visible_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')
			AND NOT EXISTS (SELECT FROM orchestrator_queue WHERE visible_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')
			AND NOT EXISTS (SELECT FROM instance_locks WHERE locked_until BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')`,
			w.severed).Scan(&gone))
		return gone
	})
	before := make([]int64, len(survivors))
	for at, n := range survivors {
		s := n.Stats()
		before[at] = s.Worker.Finds["fallback"] + s.Orchestrator.Finds["fallback"]
	}
	for _, n := range survivors {
		n.fallback()
	}
	w.requireAllHandled(survivors) // by one fallback of each
	for at, n := range survivors {
		s := n.Stats()
		lost += int(s.Worker.Finds["fallback"] + s.Orchestrator.Finds["fallback"] - before[at])
	}
	w.mu.Lock()
	for _, i := range w.items {
		switch {
		case !i.committed && !i.unsure && i.fetched > 0:
			w.t.Fatalf("handled, and it was rolled back: %v", i)
		case i.committed && taken(survivors, i.drawnItem) && i.fetched == 0:
			w.t.Fatalf("gone, and never handled: %v", i)
		}
	}
	w.mu.Unlock()
	if frozen {
		return lost // who is told may be deaf
	}
	w.requireDelivery(survivors)
	return lost
}

// state is what there is to know of a scenario that has failed.
func (w *world) state() string {
	var b strings.Builder
	rows, err := w.peek.Query(tctx, `
		SELECT name, visible_at - clock_timestamp(), lock_token FROM worker_queue
		UNION ALL SELECT instance_id, visible_at - clock_timestamp(), lock_token FROM orchestrator_queue`)
	require.NoError(w.t, err)
	var name string
	var due time.Duration
	var token *string
	w.mu.Lock()
	_, err = pgx.ForEachRow(rows, []any{&name, &due, &token}, func() error {
		fmt.Fprintf(&b, "left: %v; due in %v, claimed %v\n", w.byName[name], due, token != nil)
		return nil
	})
	w.mu.Unlock()
	require.NoError(w.t, err)
	for at, n := range w.nodes {
		if n.Provider == nil {
			continue
		}
		s := n.Stats()
		fmt.Fprintf(&b, "node %d: away %v, listening %v, health %v\n  worker %+v\n  orchestrator %+v\n", at, n.away, s.Listening, n.Health(), s.Worker, s.Orchestrator)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.dispatchers {
		fmt.Fprintf(&b, "dispatcher of %s for %+v of %v %v: %+v, fetching %v\n", d.n.name, d.lane.Queue, d.lane.namespaces, d.lane.tags, d.drawnDispatcher, d.fetching.Load())
	}
	return b.String()
}
