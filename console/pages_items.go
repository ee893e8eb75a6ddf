package console

import (
	"fmt"

	"github.com/pgwake/pgwake"
)

// This file answers: what is in a queue, item by item?

// perPage is how many rows a page of a list has: more than fit into a window, and few enough that a browser lays them out in no time.
const perPage = 25

// pager has links to other pages of a list.
type pager struct{ First, Next string }

// pagerOf is that of a list which goes on after a place; "" if it does not.
func (v *view) pagerOf(param, next string) (p pager) {
	if v.text(param) != "" {
		p.First = v.With(param, "")
	}
	if next != "" {
		p.Next = v.With(param, next)
	}
	return p
}

// paged are the rows of a page of a list that is known as a whole: of its last one, if it has become shorter than where the page begins.
func paged[T any](v *view, all []T, most int) (rows []T, p pager, err error) {
	from, err := v.number("from")
	if err != nil {
		return nil, p, err
	}
	from = min(from, int64(max(0, len(all)-1)/most*most))
	rows, next := all[from:], ""
	if len(rows) > most {
		rows, next = rows[:most], fmt.Sprint(from+int64(most))
	}
	return rows, v.pagerOf("from", next), nil
}

type items struct {
	Queue pgwake.Queue
	Rows  []itemRow
	Pager pager
}

type itemRow struct {
	pgwake.QueuedItem
	Title string
	Brief string
}

func titleOf(queue pgwake.Queue, name, instance, kind string) string {
	if queue == pgwake.Orchestrator {
		return instance + ": " + kind
	}
	return name
}

func loadItems(v *view) (any, error) {
	queue, err := v.queue("queue", pgwake.Worker)
	if err != nil {
		return nil, err
	}
	f := &pgwake.PeekFilter{Namespace: v.text("namespace"), Name: v.text("name"), Instance: v.text("instance"), Limit: perPage, PayloadBytes: v.c.listed()}
	if f.After, err = v.number("after"); err != nil {
		return nil, err
	}
	found, err := v.c.p.Peek(v.r.Context(), queue, f)
	if err != nil {
		return nil, err
	}
	list := &items{Queue: queue}
	for _, i := range found {
		list.Rows = append(list.Rows, itemRow{i, titleOf(queue, i.Name, i.Instance, string(i.Kind)), v.brief(payloadOf(&i))})
	}
	next := ""
	if len(found) == perPage {
		next = fmt.Sprint(found[perPage-1].ID)
	}
	list.Pager = v.pagerOf("after", next)
	return list, nil
}

func payloadOf(i *pgwake.QueuedItem) Payload {
	kind := "work item"
	if i.Queue == pgwake.Orchestrator {
		kind = "message"
	}
	return Payload{kind, i.Namespace, i.Name, start(i.Data, i.DataCut)}
}

type item struct {
	pgwake.QueuedItem
	Title string
	Parts []shown
}

func loadItem(v *view) (any, error) {
	queue, err := v.queue("queue", pgwake.Worker)
	if err != nil {
		return nil, err
	}
	id, err := v.number("id")
	if err != nil {
		return nil, err
	}
	found, err := v.c.p.Peek(v.r.Context(), queue, &pgwake.PeekFilter{After: max(id-1, 0), Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 || found[0].ID != id {
		return nil, fmt.Errorf("%w: item %d is not in the queue any more, or never was", pgwake.ErrNotFound, id)
	}
	i := &item{QueuedItem: found[0], Title: titleOf(queue, found[0].Name, found[0].Instance, string(found[0].Kind))}
	v.Title = "Item " + fmt.Sprint(id)
	i.Parts, err = v.parts("Data", payloadOf(&i.QueuedItem), "Headers", Payload{"headers", i.Namespace, i.Name, headersOf(i.Headers)},
		"Latest error", Payload{"error", i.Namespace, i.Name, []byte(i.LastError)})
	return i, err
}

// parts are several of a page, name and payload by turns; those that have nothing are left out, but for the first.
func (v *view) parts(pairs ...any) (all []shown, err error) {
	for i := 0; i+1 < len(pairs); i += 2 {
		s, err := v.part(pairs[i].(string), pairs[i+1].(Payload))
		if err != nil {
			return nil, err
		}
		if i == 0 || !s.None {
			all = append(all, s)
		}
	}
	return all, nil
}
