package eventbus

import (
	"cmp"
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: which dead letters go back, and which have nobody to go to?
//
// The tag of a delivery names its group. Of one that was deleted no node claims anything: in the queue it would be seen no more, and be kept for
// ever, with its month of the log. The Provider, and the SQL function, know nothing of that.

// Redrive delivers dead letters once more, each to the group that it is from, at most LetterFilter.Limit of them, and returns how many. They are
// due at once and never attempted so far; one of a key waits for what is there of that. One that no group was subscribed to goes to those
// that are by now. One whose group was deleted stays where it is and does not count, also if it is asked for by its id: nobody would handle it.
// It can go once there is a group of that name again. To redrive any number of letters, call it until it returns 0.
func (b *Bus) Redrive(ctx context.Context, f *LetterFilter) (int, error) {
	const op = "redrive dead letters"
	args, err := f.args(b.namespace, 1000)
	if err != nil {
		return 0, failed(op, err)
	}
	stays := "group_name IS NOT NULL AND NOT EXISTS (SELECT FROM " + b.in +
		"event_groups AS g WHERE g.namespace OPERATOR(pg_catalog.=) $1 AND g.name OPERATOR(pg_catalog.=) group_name)"
	after, limit := len(args)-2, len(args)-1
	return redrive(args[after].(int64), args[limit].(int), func(from int64, most int) ([]candidate, error) {
		args[after], args[limit] = from, most
		return query(ctx, b, verb{op: op, function: "list_event_dead_letters", columns: "letter_id, " + stays, args: args}, pgx.RowToStructByPos[candidate])
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
	groups, err := groupsOf(ctx, p)
	if err != nil {
		return 0, err
	}
	if f == nil {
		f = &pgwake.DeadLetterFilter{}
	}
	if groups == nil || f.Before != 0 { // with which a list goes back, and a redrive is refused
		return p.RedriveDeadLetters(ctx, f)
	}
	page := *f
	page.PayloadBytes = 1 // nobody is to see them
	return redrive(f.After, cmp.Or(f.Limit, 1000), func(from int64, most int) ([]candidate, error) {
		page.After, page.Limit = from, most
		letters, err := p.ListDeadLetters(ctx, &page)
		found := make([]candidate, len(letters))
		for i, d := range letters {
			rest, delivery := strings.CutPrefix(d.Tag, controlTag+"/")
			name, _, _ := strings.Cut(rest, "|")
			found[i] = candidate{d.ID, delivery && d.Queue == pgwake.Worker && !groups[group{d.Namespace, name}]}
		}
		return found, err
	}, func(f *pgwake.DeadLetterFilter) (int, error) { return p.RedriveDeadLetters(ctx, f) })
}

// group is a group of any namespace.
type group struct{ namespace, name string }

// groupsOf are all that there are; nil: there is no bus in the schema.
func groupsOf(ctx context.Context, p *pgwake.Provider) (groups map[group]bool, err error) {
	table := pgx.Identifier{p.Schema(), "event_groups"}.Sanitize()
	err = p.Do(ctx, "list groups", func(ctx context.Context, q pgwake.Querier) error {
		var there bool
		if err := q.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL", table).Scan(&there); err != nil || !there {
			return err
		}
		rows, err := q.Query(ctx, "SELECT namespace, name FROM "+table)
		if err != nil {
			return err
		}
		groups = make(map[group]bool)
		var g group
		_, err = pgx.ForEachRow(rows, []any{&g.namespace, &g.name}, func() error { groups[g] = true; return nil })
		return err
	})
	return groups, err
}

// candidate is a dead letter that a filter chooses for a redrive.
type candidate struct {
	ID    int64
	Stays bool // its group was deleted
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
