package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: does somebody do the work that there is?

// unopened is the finding of a check that needs a Provider.
func (at *patient) unopened() (finding, bool) {
	return skip("see connection, schema and rights"), at.p == nil
}

func checkWaiters(ctx context.Context, at *patient) finding {
	if f, none := at.unopened(); none {
		return f
	}
	nodes, err := at.p.ListNodes(ctx)
	if err != nil {
		return unknown(err)
	}
	living, lanes := 0, 0
	var dead []string
	for _, n := range nodes {
		if !n.Listening {
			dead = append(dead, fmt.Sprint(n.Key))
			continue
		}
		living++
		lanes += len(n.Lanes)
	}
	if len(dead) > 0 {
		return warn("DELETE FROM "+at.table("waiters")+" WHERE node IN ("+strings.Join(dead, ", ")+")",
			"%s, and may be told of work in vain: the next node that looks clears that away, within its FallbackInterval",
			count(len(dead), "node")+" that died without a word waits still")
	}
	return ok("%s with %s", count(living, "node"), count(lanes, "lane"))
}

func checkPauses(ctx context.Context, at *patient) finding {
	if f, none := at.unopened(); none {
		return f
	}
	paused, err := pausedOf(ctx, at.p)
	if err != nil {
		return unknown(err)
	}
	var all []string
	fix := ""
	for _, one := range paused {
		what, of := fmt.Sprintf("%s of the %s queue", one.namespace, one.queue), fmt.Sprintf("ARRAY['%s']", one.namespace)
		if one.namespace == pgwake.AllNamespaces {
			what, of = fmt.Sprintf("the %s queue", one.queue), "NULL"
		}
		all = append(all, what)
		fix = cmp.Or(fix, fmt.Sprintf("SELECT %s('%s', %s, false)", at.table("pause"), one.queue, of))
	}
	if len(all) > 0 {
		return warn(fix, "nobody fetches from %s, since somebody has paused that", few(all))
	}
	return ok("nothing is paused")
}

func checkBacklog(ctx context.Context, at *patient) finding {
	if f, none := at.unopened(); none {
		return f
	}
	depths, err := at.p.GetQueueDepths(ctx)
	if err != nil {
		return unknown(err)
	}
	nodes, err := at.p.ListNodes(ctx)
	if err != nil {
		return unknown(err)
	}
	paused, err := pausedOf(ctx, at.p)
	if err != nil {
		return unknown(err)
	}
	var due int64
	var oldest pgwake.QueueDepth
	for _, d := range depths {
		if d.Due > 0 && !slices.ContainsFunc(paused, func(one pausedNamespace) bool { return one.has(d) }) {
			due += d.Due
			if oldest.OldestDue.IsZero() || d.OldestDue.Before(oldest.OldestDue) {
				oldest = d
			}
		}
	}
	if due == 0 {
		return ok("nothing that is due waits")
	}
	waited, err := at.waited(ctx, oldest.OldestDue)
	if err != nil {
		return unknown(err)
	}
	if waited > at.oldest {
		who := "and no node listens: start one"
		if listening(nodes) > 0 {
			who = "although nodes listen: are they busy, or for other namespaces and tags?"
		}
		return warn(at.pgwake("top")+"; "+at.pgwake("peek --queue "+oldest.Queue.String()+" --namespace "+oldest.Namespace),
			"%s due, the oldest for %s, in namespace %s of the %s queue, %s", count(due, "item"), glance.Span(waited), oldest.Namespace, oldest.Queue, who)
	}
	return ok("%s due, the oldest for %s", count(due, "item"), glance.Span(waited))
}

func listening(nodes []pgwake.NodeInfo) (n int) {
	for _, node := range nodes {
		if node.Listening {
			n++
		}
	}
	return n
}

// waited is how long ago an instant of the server's was.
func (at *patient) waited(ctx context.Context, since time.Time) (time.Duration, error) {
	var now time.Time
	err := at.conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now.Sub(since), err
}

func checkDeadLetters(ctx context.Context, at *patient) finding {
	if f, none := at.unopened(); none {
		return f
	}
	n, last, err := countLetters(ctx, at.p, nil)
	if err != nil {
		return unknown(err)
	}
	if n <= at.deadLetters {
		return ok("%d", n)
	}
	newest, err := at.p.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{IDs: []int64{last}, PayloadBytes: unlisted})
	if err != nil {
		return unknown(err)
	}
	reason := ""
	for _, d := range newest { // unless it was redriven, or purged, meanwhile
		reason = "; of the newest the reason is: " + glance.Short(d.Reason, 80)
	}
	return warn(at.pgwake("dlq list")+"; then "+at.pgwake("dlq redrive --all")+", or purge", "there are %d%s", n, reason)
}

// pausedNamespace is one that nobody is to fetch from, or pgwake.AllNamespaces.
type pausedNamespace struct {
	queue     pgwake.Queue
	namespace string
}

// has says that it is for a part of a queue.
func (p pausedNamespace) has(d pgwake.QueueDepth) bool {
	return p.queue == d.Queue && (p.namespace == pgwake.AllNamespaces || p.namespace == d.Namespace)
}

func pausedOf(ctx context.Context, p *pgwake.Provider) (all []pausedNamespace, err error) {
	for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
		paused, err := p.GetPaused(ctx, queue)
		if err != nil {
			return nil, err
		}
		if paused.All {
			all = append(all, pausedNamespace{queue, pgwake.AllNamespaces})
		}
		for _, name := range paused.Namespaces {
			all = append(all, pausedNamespace{queue, name})
		}
	}
	return all, nil
}
