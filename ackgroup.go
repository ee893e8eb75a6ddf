package pgwake

import (
	"context"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// This file answers: how do acks of the same moment share a commit? What it adds to groups.go: a lease that was lost fails
// that ack alone, and a group waits for no item that another transaction has locked, nor for its session. That ack is made by itself, and
// waits by itself; it is no longer on its way with a group, so that it holds up none.

// groupedCompletion is for how many bytes a completion may have to share a commit: larger ones would hold up others, and a thousand of the largest do
// not fit into a statement, which none of them is at fault for.
const groupedCompletion = 64 << 10

// groupedAck is the ack of one item.
type groupedAck struct {
	lease
	message Message
}

// ackGroups are those of a Provider. None is made directly, since one whose item is locked would be on its way for long.
type ackGroups struct{ *groups[*groupedAck] }

func newAckGroups(p *Provider) ackGroups {
	g := ackGroups{&groups[*groupedAck]{p: p, ample: maxGroups}}
	g.key = func(a *groupedAck) any { return a.lease } // a second ack of an item is to learn what the first did
	g.transact = g.commit
	g.alone = func(ctx context.Context, a *groupedAck) error { return p.ackAlone(ctx, a.lease, a.message) }
	g.init()
	return g
}

// AckBatched is AckWorkItem in one transaction with the acks that other goroutines make on this Provider at the same
// moment: they share one round trip and one commit. An ack alone goes at once; one that meets others waits for 5 ms at
// most, unless four groups are on their way already, of which one that hangs, since its connection gives no sign, counts
// for 5 s. An item that another transaction has locked, or the session of which it has, holds up none but its own ack,
// which is then made as AckWorkItem makes it; and so is one with more than 64 KiB of data. It returns after the commit, with the error of this item alone:
// ErrLockLost if its lease has ended, or that of the group if it failed as a whole. If ctx ends before the group has
// started nothing is acknowledged; afterwards the ack may still take effect. It has no Tx twin, since in a
// transaction of the caller's all acks share the commit anyway.
func (p *Provider) AckBatched(ctx context.Context, token LockToken, completion *Message) error {
	return p.ack(ctx, token, completion, func(ctx context.Context, l lease, m Message) error {
		if len(m.Data) > groupedCompletion {
			return p.ackAlone(ctx, l, m)
		}
		m.Data, m.Headers = slices.Clone(m.Data), maps.Clone(m.Headers) // the group may read them when the caller has left
		return p.acks.do(ctx, &groupedAck{lease: l, message: m})
	})
}

func (g ackGroups) commit(ctx context.Context, acks []*groupedAck, outcomes []error) error {
	var ids []int64
	var claims []pgtype.UUID
	places := make(map[lease]int, len(acks))
	c := &messageColumns{}
	for i, a := range acks {
		ids, claims = append(ids, a.item), append(claims, a.claim)
		places[a.lease] = i
		c.add(&a.message, a.message.Headers)
	}
	p := g.p
	quiet := p.engine.quiet()
	var namespaces []string // of the messages
	return p.run(ctx, func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.ackWorkGroup, ids, claims, c.instances, c.kinds, c.datas, c.names, c.versions, c.executions, c.queues,
			c.headers, quiet, p.archiveFor())
		if err != nil {
			return err
		}
		for i := range outcomes {
			outcomes[i] = ErrLockLost
		}
		var l lease
		var namespace *string
		var busy bool
		_, err = pgx.ForEachRow(rows, []any{&l.item, &l.claim, &namespace, &busy}, func() error {
			outcomes[places[l]] = nil
			if busy {
				outcomes[places[l]] = errAlone
			}
			if namespace != nil {
				namespaces = append(namespaces, *namespace)
			}
			return nil
		})
		return err
	}, func() { p.tellOfMessages(namespaces, quiet) }, Orchestrator)
}
