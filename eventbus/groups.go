package eventbus

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: who gets which events?

// SubscribeOptions says how a group begins. Nil means the zero value.
type SubscribeOptions struct {
	// FromBeginning has a group that is new get what is in the log as well, each event once, whatever is emitted meanwhile, and those of a
	// key in order: what is emitted of it waits until the nodes of the namespace have delivered the log, and that waits for the
	// transactions that are open when it begins. Without a key there is no order. A group that there is goes on as it does. Defaults
	// to false.
	FromBeginning bool

	// MissNothing is FromBeginning that goes on only with a group that gets what the patterns are for already, each by one that covers it (see
	// Covers). Where the group is there and would miss what was emitted before, Subscribe fails with pgwake.ErrInvalid, and changes nothing; as
	// part of a transaction (WithTx) that has to be rolled back then, and that is READ COMMITTED, and subscribes the group nowhere else: not in a savepoint either. Of
	// several who make a group at the same moment one comes first, and the others find it there. Defaults to false.
	MissNothing bool
}

// Subscribe has a group get the events whose types match one of the patterns (see Match), from the commit on, for good, whether or not
// there is a node that handles them. It makes the group if there is none. "" stands for DefaultGroup. Node.On does the same.
func (b *Bus) Subscribe(ctx context.Context, group string, patterns []string, o *SubscribeOptions) error {
	const op = "subscribe"
	group = cmp.Or(group, DefaultGroup)
	err := CheckGroup(group)
	for _, pattern := range patterns {
		err = cmp.Or(err, CheckPattern(pattern))
	}
	if err != nil {
		return failed(op, err)
	}
	if patterns == nil {
		patterns = []string{}
	}
	if o == nil {
		o = &SubscribeOptions{}
	}
	return b.do(ctx, op, true, func(ctx context.Context, q pgwake.Querier) error {
		subscribe := func(q pgwake.Querier) error {
			var id int64
			err := q.QueryRow(ctx, "SELECT * FROM "+b.call("subscribe", 4), b.namespace, group, patterns, o.FromBeginning || o.MissNothing).Scan(&id)
			if err != nil || !o.MissNothing {
				return err
			}
			return b.missesNothing(ctx, q, id, group, patterns)
		}
		if conn, alone := q.(*pgxpool.Conn); alone && o.MissNothing {
			return pgx.BeginTxFunc(ctx, conns.On{Conn: conn}, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return subscribe(tx) })
		}
		return subscribe(q) // if that is part of a transaction, its error ends that
	})
}

// What a group was before subscribe, which has just locked its row and written it anew: whatever else has come from the same transaction has
// the number that the row has, and from others there is what was committed before they let go of the row. Who makes a group from the beginning
// begins its replay as well.
const whatGroupWas = `SELECT g.behind AND EXISTS (SELECT FROM %[1]sevent_replays AS r
		WHERE r.group_id OPERATOR(pg_catalog.=) g.group_id AND r.undelivered AND r.xmin OPERATOR(pg_catalog.=) g.xmin),
	ARRAY(SELECT s.pattern FROM %[1]sevent_subscriptions AS s WHERE s.group_id OPERATOR(pg_catalog.=) g.group_id AND s.xmin OPERATOR(pg_catalog.<>) g.xmin),
	pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.~~) 'read %%committed'
	FROM %[1]sevent_groups AS g WHERE g.group_id OPERATOR(pg_catalog.=) $1`

// missesNothing fails unless this transaction, which has subscribed the group, has made it, or what was there of it covers the patterns. The
// statement is one of its own, and so sees what was committed while subscribe waited for the row.
func (b *Bus) missesNothing(ctx context.Context, q pgwake.Querier, id int64, group string, patterns []string) error {
	var made, seesAll bool
	var had []string
	switch err := q.QueryRow(ctx, fmt.Sprintf(whatGroupWas, b.in), id).Scan(&made, &had, &seesAll); {
	case err != nil:
		return err
	case !seesAll:
		return invalid("whether group %q misses something is not seen in a transaction that is not READ COMMITTED", group)
	case made:
		return nil
	}
	for _, pattern := range patterns {
		if !slices.ContainsFunc(had, func(other string) bool { return Covers(other, pattern) }) {
			return invalid("group %q is there, and does not get %q: it would miss what was emitted before", group, pattern)
		}
	}
	return nil
}

// Unsubscribe ends a subscription of a group, and returns whether there was one. What it has routed to the group, and is not handled yet, is
// routed by another pattern of the group that is for it, or else dropped; what somebody claims or settles at that moment, with the next heartbeats.
// It is one transaction, whose time grows with what there is: about 10 s for 100,000 deliveries.
func (b *Bus) Unsubscribe(ctx context.Context, group, pattern string) (bool, error) {
	const op = "unsubscribe"
	group = cmp.Or(group, DefaultGroup)
	if err := cmp.Or(CheckGroup(group), CheckPattern(pattern)); err != nil {
		return false, failed(op, err)
	}
	var was bool
	err := b.do(ctx, op, true, func(ctx context.Context, q pgwake.Querier) error {
		// What goes by another pattern was there already, so no insert tells those who wait for that.
		return q.QueryRow(ctx, "SELECT u.was, CASE WHEN u.was THEN "+b.in+"notify_queue('worker', 1, NULL, $1) END FROM "+b.call("unsubscribe", 3)+" AS u (was)",
			b.namespace, group, pattern).Scan(&was, nil)
	})
	return was, err
}

// DeleteGroup removes a group, with its subscriptions and what it has not handled yet, and returns whether there was one. It waits for nobody who
// settles a delivery: what somebody claims or settles at that moment is gone with the next heartbeats of nodes, if it is not settled. Its dead letters
// stay, and are not redriven unless there is a group of that name again. It is one transaction, whose time grows with what there is: about 5 s for
// 100,000 deliveries.
func (b *Bus) DeleteGroup(ctx context.Context, group string) (bool, error) {
	const op = "delete group"
	group = cmp.Or(group, DefaultGroup)
	if err := CheckGroup(group); err != nil {
		return false, failed(op, err)
	}
	return value[bool](ctx, b, verb{op: op, function: "delete_group", enqueues: true, args: []any{b.namespace, group}})
}

// Group is a consumer group.
type Group struct {
	Name     string
	Patterns []string // in the order of the alphabet
	Since    time.Time
}

// Groups returns the groups of the namespace, by name.
func (b *Bus) Groups(ctx context.Context) ([]Group, error) {
	var groups []Group
	_, err := query(ctx, b, verb{op: "list groups", function: "list_groups", columns: "group_name, pattern, created_at", args: []any{b.namespace}},
		func(row pgx.CollectableRow) (none struct{}, err error) {
			var name string
			var pattern *string
			var since time.Time
			if err := row.Scan(&name, &pattern, &since); err != nil {
				return none, err
			}
			if len(groups) == 0 || groups[len(groups)-1].Name != name {
				groups = append(groups, Group{Name: name, Since: since})
			}
			g := &groups[len(groups)-1]
			if pattern != nil {
				g.Patterns = append(g.Patterns, *pattern)
			}
			if since.Before(g.Since) {
				g.Since = since
			}
			return none, nil
		})
	return groups, err
}
