package eventbus

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: which dead letters go back, and which have nobody to go to?
//
// The tag of a delivery names its group, and the pattern by which it came. Where the group was deleted, or is not subscribed to that any more, no node
// claims it: in the queue it would be seen no more, and be kept for ever, with its month of the log; and what has its key would wait behind it. The
// Provider, and the SQL function, know nothing of that.

// stays is what holds for the dead letters d that nobody would claim. While a subscription is being retired, what comes back by it goes by another of
// its group that is for it.
func stays(in string) string {
	return `(d.queue OPERATOR(pg_catalog.=) 'worker' AND pg_catalog.starts_with(d.tag, 'eventbus/')
		AND NOT EXISTS (SELECT FROM ` + in + `event_subscriptions AS s WHERE s.namespace OPERATOR(pg_catalog.=) d.namespace AND s.tag OPERATOR(pg_catalog.=) d.tag)
		AND NOT EXISTS (SELECT FROM ` + in + `event_retirements AS r JOIN ` + in + `event_groups AS g ON g.namespace OPERATOR(pg_catalog.=) r.namespace
			AND g.name OPERATOR(pg_catalog.=) pg_catalog.split_part(pg_catalog.substr(r.tag, 10), '|', 1)
			WHERE r.namespace OPERATOR(pg_catalog.=) d.namespace AND r.tag OPERATOR(pg_catalog.=) d.tag
			AND EXISTS (SELECT FROM ` + in + `routes(d.namespace, d.name) AS t WHERE t.group_id OPERATOR(pg_catalog.=) g.group_id)))`
}

// Redrive delivers dead letters once more, each to the group that it is from, at most LetterFilter.Limit of them, and returns how many. They are
// due at once and never attempted so far; one of a key waits for what is there of that. One that no group was subscribed to goes to those
// that are by now, and once more to one that has had it from the log (SubscribeOptions.FromBeginning). One whose group was deleted, or is not subscribed any more to the pattern by which it came, stays where it is and does not
// count, also if it is asked for by its id: nobody would handle it. It can go once a group of that name is subscribed to that pattern again. To
// redrive any number of letters, call it until it returns 0.
func (b *Bus) Redrive(ctx context.Context, f *LetterFilter) (int, error) {
	const op = "redrive dead letters"
	args, err := f.args(b.namespace, 1000)
	if err != nil {
		return 0, failed(op, err)
	}
	after, limit := len(args)-2, len(args)-1
	return redrive(args[after].(int64), args[limit].(int), func(from int64, most int) ([]int64, error) {
		args[after], args[limit] = from, most
		return query(ctx, b, verb{op: op, function: "list_event_dead_letters", columns: "letter_id", args: args}, pgx.RowTo[int64])
	}, func(ids []int64, most int) (int, error) {
		if b.tx != nil {
			n, err := redriveClaimable(ctx, b.p, b.tx, ids, most)
			return n, failed(op, err)
		}
		return redriveByItself(ctx, op, b.p, ids, most)
	})
}

// RedriveDeadLetters is Provider.RedriveDeadLetters for those who redrive letters of any kind and namespace, such as a tool: it leaves where it is what
// Bus.Redrive does. It is several statements, each of which takes effect by itself; how many letters went is returned with an error as well. In a
// schema without a bus it is the same.
func RedriveDeadLetters(ctx context.Context, p *pgwake.Provider, f *pgwake.DeadLetterFilter) (int, error) {
	there, err := busIn(ctx, p)
	if err != nil {
		return 0, err
	}
	if f == nil {
		f = &pgwake.DeadLetterFilter{}
	}
	if !there || f.Before != 0 { // with which a list goes back, and a redrive is refused
		return p.RedriveDeadLetters(ctx, f)
	}
	page := *f
	page.PayloadBytes = 1 // nobody is to see them
	return redrive(f.After, cmp.Or(f.Limit, 1000), func(from int64, most int) ([]int64, error) {
		page.After, page.Limit = from, most
		letters, err := p.ListDeadLetters(ctx, &page)
		if err != nil {
			return nil, err
		}
		ids := make([]int64, len(letters))
		for i, d := range letters {
			ids[i] = d.ID
		}
		return ids, nil
	}, func(ids []int64, most int) (int, error) {
		return redriveByItself(ctx, "redrive dead letters", p, ids, most)
	})
}

// busIn reports whether there is a bus in the schema.
func busIn(ctx context.Context, p *pgwake.Provider) (there bool, err error) {
	err = p.Do(ctx, "look for a bus", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL", pgx.Identifier{p.Schema(), "event_subscriptions"}.Sanitize()).Scan(&there)
	})
	return there, err
}

func redriveByItself(ctx context.Context, op string, p *pgwake.Provider, ids []int64, most int) (redriven int, err error) {
	err = pgx.BeginTxFunc(ctx, conns.Transactions{Pool: p.Pool()}, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		redriven, err = redriveClaimable(ctx, p, tx, ids, most)
		return err
	})
	if err != nil {
		return 0, failed(op, err)
	}
	return redriven, nil
}

// redriveClaimable redrives the first letters that somebody would claim, most of them. Invariant: as long as one goes by a subscription that is
// being retired, that does not end, for its row is locked, and remove_strays passes over it; afterwards that sees what has gone. One that is
// removed from now on is not over before this transaction, which has its number by then (see horizon).
func redriveClaimable(ctx context.Context, p *pgwake.Provider, tx pgx.Tx, ids []int64, most int) (int, error) {
	in := pgx.Identifier{p.Schema()}.Sanitize() + "."
	_, err := tx.Exec(ctx, "SELECT pg_catalog.pg_current_xact_id()") // before the snapshot of what is next
	if err == nil {
		_, err = tx.Exec(ctx, "SELECT FROM "+in+"event_retirements AS r WHERE EXISTS (SELECT FROM "+in+`dead_letters AS d
			WHERE d.id OPERATOR(pg_catalog.=) ANY ($1) AND d.namespace OPERATOR(pg_catalog.=) r.namespace AND d.tag OPERATOR(pg_catalog.=) r.tag) FOR KEY SHARE OF r`, ids)
	}
	if err != nil {
		return 0, err
	}
	rows, err := tx.Query(ctx, "SELECT d.id FROM "+in+"dead_letters AS d WHERE d.id OPERATOR(pg_catalog.=) ANY ($1) AND NOT "+stays(in), ids)
	if err != nil {
		return 0, err
	}
	ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	return p.RedriveDeadLettersTx(ctx, tx, &pgwake.DeadLetterFilter{IDs: ids, Limit: most})
}

// laterPage is how many letters are looked at in one statement where those before did not go.
const laterPage = 1000

// redrive redrives the first letters that can go, limit of them, and returns how many. Those that stay must not fill the batch, or no
// later one ever would go: list returns the first so many after an id, in the order of their ids.
func redrive(after int64, limit int, list func(after int64, most int) ([]int64, error), verb func(ids []int64, most int) (int, error)) (redriven int, err error) {
	for most := limit; ; most = laterPage {
		ids, err := list(after, most)
		if err != nil {
			return redriven, err
		}
		if len(ids) > 0 {
			n, err := verb(ids, limit-redriven)
			redriven += n
			if err != nil {
				return redriven, err
			}
		}
		if redriven == limit || len(ids) < most {
			return redriven, nil
		}
		after = ids[len(ids)-1]
	}
}
