package pgwake

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: which namespaces are there, and who learns of a new one?

// Namespace is one that items were enqueued to, or that was registered. There is always DefaultNamespace. None goes away by itself, but the
// owner of the schema may remove those that nothing is left of (docs/operations.md).
type Namespace struct {
	Name      string
	CreatedAt time.Time
}

// RegisterNamespace adds a namespace before its first item, so that whoever serves namespaces as they come is ready for it.
// Enqueueing does it as well. One that there is already remains as it is. Fails with ErrInvalid.
func (p *Provider) RegisterNamespace(ctx context.Context, namespace string) error {
	return p.do(ctx, "register namespace", func(ctx context.Context, q querier) error {
		return p.registerNamespace(ctx, q, namespace)
	})
}

// RegisterNamespaceTx is RegisterNamespace as part of the transaction.
func (p *Provider) RegisterNamespaceTx(ctx context.Context, tx pgx.Tx, namespace string) error {
	return p.doTx(ctx, tx, "register namespace", func(ctx context.Context, q querier) error {
		return p.registerNamespace(ctx, q, namespace)
	})
}

func (p *Provider) registerNamespace(ctx context.Context, q querier, namespace string) error {
	if err := CheckNamespace(namespace); err != nil {
		return err
	}
	_, err := q.Exec(ctx, p.sql.registerNamespace, namespace)
	return err
}

// ListNamespaces returns all of them, by name.
func (p *Provider) ListNamespaces(ctx context.Context) (all []Namespace, err error) {
	err = p.do(ctx, "list namespaces", func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.listNamespaces)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Namespace])
		return err
	})
	return all, err
}

// WaitForNamespaces returns, in order, the namespaces that are not among known as soon as there are any. It is pushed when the
// transaction with a namespace's first item commits, and while there is none it costs neither a query nor a connection. Where nothing
// is pushed, they are counted, for all who wait together, and read only if there are others: twice in a Config.AggressiveInterval while the
// node is to listen and cannot, so that a namespace is served within that, and twice in a Config.PollInterval if no mode listens. But
// with AggressivePolicy Never the fallback counts them, as it does those that were added in silence (pgwake.notify), and while
// the node hibernates each of its polls does. Errors: ErrInvalid, and as for WaitForStatus.
func (p *Provider) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	const op = "wait for namespaces"
	for _, name := range known {
		if err := CheckNamespace(name); err != nil {
			return nil, failed(op, err)
		}
	}
	known = slices.Sorted(slices.Values(known))
	a, err := p.wait(ctx, op, question{namespaces: true, besides: strings.Join(slices.Compact(known), ",")})
	if err != nil {
		return nil, err
	}
	return strings.Split(*a.value, ","), nil
}

// newNamespaces answers the questions for namespaces, each by its number. If there are those that all who ask know, it reads none.
func (w *waits) newNamespaces(ctx context.Context, on querier, asked map[int]question, tell func(i int, a answer)) error {
	known, first := int64(0), true // known is a hash: every number may be one
	for _, q := range asked {
		if !first && q.known != known {
			known = 0 // there is one at least
			break
		}
		known, first = q.known, false
	}
	rows, err := on.Query(ctx, w.e.sql.newNamespaces, known)
	if err != nil {
		return err
	}
	var all []string
	var name string
	var ids int64
	_, err = pgx.ForEachRow(rows, []any{&name, &ids}, func() error {
		all = append(all, name)
		return nil
	})
	if err != nil || all == nil {
		return err
	}
	for i, q := range asked {
		knows := make(map[string]bool)
		for name := range strings.SplitSeq(q.besides, ",") {
			knows[name] = true
		}
		added := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return knows[name] })
		tell(i, answer{known: ids, complete: len(added) > 0, value: new(strings.Join(added, ","))})
	}
	return nil
}
