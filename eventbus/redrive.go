package eventbus

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
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
// that are by now. One whose group was deleted, or is not subscribed any more to the pattern by which it came, stays where it is and does not
// count, also if it is asked for by its id: nobody would handle it. It can go once a group of that name is subscribed to that pattern again. To
// redrive any number of letters, call it until it returns 0.
func (b *Bus) Redrive(ctx context.Context, f *LetterFilter) (int, error) {
	const op = "redrive dead letters"
	args, err := f.args(b.namespace, 1000)
	if err != nil {
		return 0, failed(op, err)
	}
	nobodys := "EXISTS (SELECT FROM " + b.in + "dead_letters AS d WHERE d.id OPERATOR(pg_catalog.=) letter_id AND " + stays(b.in) + ")"
	after, limit := len(args)-2, len(args)-1
	return redrive(args[after].(int64), args[limit].(int), func(from int64, most int) ([]candidate, error) {
		args[after], args[limit] = from, most
		return query(ctx, b, verb{op: op, function: "list_event_dead_letters", columns: "letter_id, " + nobodys, args: args}, pgx.RowToStructByPos[candidate])
	}, func(f *pgwake.DeadLetterFilter) (int, error) {
		if b.tx != nil {
			return b.p.RedriveDeadLettersTx(ctx, b.tx, f)
		}
		return b.p.RedriveDeadLetters(ctx, f)
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
	return redrive(f.After, cmp.Or(f.Limit, 1000), func(from int64, most int) ([]candidate, error) {
		page.After, page.Limit = from, most
		letters, err := p.ListDeadLetters(ctx, &page)
		if err != nil {
			return nil, err
		}
		found, ids := make([]candidate, len(letters)), make([]int64, len(letters))
		for i, d := range letters {
			ids[i] = d.ID
		}
		nobodys, err := thatStay(ctx, p, ids)
		for i, id := range ids {
			found[i] = candidate{id, nobodys[id]}
		}
		return found, err
	}, func(f *pgwake.DeadLetterFilter) (int, error) { return p.RedriveDeadLetters(ctx, f) })
}

// busIn reports whether there is a bus in the schema.
func busIn(ctx context.Context, p *pgwake.Provider) (there bool, err error) {
	err = p.Do(ctx, "look for a bus", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL", pgx.Identifier{p.Schema(), "event_subscriptions"}.Sanitize()).Scan(&there)
	})
	return there, err
}

// thatStay are those of the dead letters that nobody would claim.
func thatStay(ctx context.Context, p *pgwake.Provider, ids []int64) (nobodys map[int64]bool, err error) {
	in := pgx.Identifier{p.Schema()}.Sanitize() + "."
	err = p.Do(ctx, "choose dead letters", func(ctx context.Context, q pgwake.Querier) error {
		rows, err := q.Query(ctx, "SELECT d.id FROM "+in+"dead_letters AS d WHERE d.id OPERATOR(pg_catalog.=) ANY ($1) AND "+stays(in), ids)
		if err != nil {
			return err
		}
		nobodys = make(map[int64]bool)
		var id int64
		_, err = pgx.ForEachRow(rows, []any{&id}, func() error { nobodys[id] = true; return nil })
		return err
	})
	return nobodys, err
}

// candidate is a dead letter that a filter chooses for a redrive.
type candidate struct {
	ID    int64
	Stays bool // no node would claim it
}

// laterPage is how many candidates are looked at in one statement where those before did not go.
const laterPage = 1000

// redrive redrives the first candidates that can go, limit of them, and returns how many. Those that stay must not fill the batch, or no
// later one ever would go: list returns the first so many after an id, in the order of their ids.
func redrive(after int64, limit int, list func(after int64, most int) ([]candidate, error), verb func(*pgwake.DeadLetterFilter) (int, error)) (redriven int, err error) {
	for most := limit; ; most = laterPage {
		found, err := list(after, most)
		if err != nil {
			return redriven, err
		}
		var ids []int64
		for _, c := range found {
			if !c.Stays {
				ids = append(ids, c.ID)
			}
		}
		if len(ids) > 0 {
			n, err := verb(&pgwake.DeadLetterFilter{IDs: ids, Limit: limit - redriven})
			redriven += n
			if err != nil {
				return redriven, err
			}
		}
		if redriven == limit || len(found) < most {
			return redriven, nil
		}
		after = found[len(found)-1].ID
	}
}
