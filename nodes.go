package pgwake

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: who else is there? It is what nodes have written down for producers to know whom to notify.

// NodeInfo is a Provider that listens for work, as others see it. One that polls, or hibernates, is not to be seen.
type NodeInfo struct {
	Key int32 // of the node, for the life of the Provider

	// Listening: its LISTEN connection is there. A node that is not has died without a word, and the next one that looks clears it
	// away, within a FallbackInterval.
	Listening bool

	// PID is that of the connection's backend, and Since when it began; 0 and the zero time if it is not listening. Application and Address
	// are those of the client; "" and the zero time for a role that may not see what other roles do (pg_read_all_stats).
	PID         uint32
	Since       time.Time
	Application string
	Address     string

	HearsAll bool // producers notify it of everything: NotifyBroadcast, or ModeShadow
	Lanes    []LaneInfo
}

// LaneInfo is what dispatchers of a node fetch that fetch the same.
type LaneInfo struct {
	Queue       Queue
	Namespaces  []string // nil: all
	Labels      []string // tags of work items, with "" for those without, or queue names of instances; nil: all
	Dispatchers int      // that have been seen there at a time
	Waiting     bool     // one of them waits, or is about to
	Fanout      int      // how many nodes are to be told of one item; 0: all
}

// ListNodes returns the nodes that listen on the schema, and those that died and are not cleared away yet, by key. A role that may
// only enqueue is not among them, since it cannot say that it is there. It reads PostgreSQL's table of locks: for people who look, and
// not many times a second.
func (p *Provider) ListNodes(ctx context.Context) (nodes []NodeInfo, err error) {
	err = p.do(ctx, "list nodes", func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.listNodes)
		if err != nil {
			return err
		}
		nodes, err = collectNodes(rows)
		return err
	})
	return nodes, err
}

// collectNodes reads a row for each lane, those of a node one after the other.
func collectNodes(rows pgx.Rows) (nodes []NodeInfo, err error) {
	var n NodeInfo
	var pid *int64
	var since *time.Time
	var lane int32
	var queue string
	var l LaneInfo
	_, err = pgx.ForEachRow(rows, []any{&n.Key, &n.Listening, &pid, &n.Application, &n.Address, &since,
		&lane, &queue, &l.Namespaces, &l.Labels, &l.Dispatchers, &l.Waiting, &l.Fanout}, func() (err error) {
		if l.Queue, err = queueNamed(queue); err != nil {
			return err
		}
		if len(nodes) == 0 || nodes[len(nodes)-1].Key != n.Key {
			n.PID, n.Since = uint32(value(pid)), value(since)
			nodes = append(nodes, n)
		}
		node := &nodes[len(nodes)-1]
		node.Listening = node.Listening || n.Listening // rows of a connection before may be there for a moment
		switch {
		case lane < 0:
			node.HearsAll = true
		case lane > 0:
			node.Lanes = append(node.Lanes, l)
		}
		return nil
	})
	return nodes, err
}
