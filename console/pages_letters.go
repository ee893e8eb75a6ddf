package console

import (
	"cmp"
	"fmt"
	"math"
	"net/url"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what was given up, and why?

type letters struct {
	Rows     []letterRow
	Pager    pager
	Filter   []field // what is asked for, for actions on all of it
	Narrowed bool    // not all are asked for
	Until    string  // all of them are those that died before
}

type letterRow struct {
	pgwake.DeadLetter
	Title  string
	Reason string
	Error  string
}

// letterFilter is what a form, or a link, says of dead letters.
func letterFilter(q url.Values) (f *pgwake.DeadLetterFilter, narrowed bool, err error) {
	f = &pgwake.DeadLetterFilter{Namespace: q.Get("namespace"), Name: q.Get("name"), Instance: q.Get("instance"), Reason: q.Get("reason")}
	if name := q.Get("queue"); name != "" {
		queue, err := queueNamed(name)
		if err != nil {
			return nil, false, err
		}
		f.Queue = &queue
	}
	return f, f.Queue != nil || f.Namespace+f.Name+f.Instance+f.Reason != "", nil
}

// letterFields are the parameters that letterFilter reads.
var letterFields = []string{"queue", "namespace", "name", "instance", "reason"}

func loadLetters(v *view) (any, error) {
	f, narrowed, err := letterFilter(v.Query)
	if err != nil {
		return nil, err
	}
	if f.Before, err = v.number("before"); err != nil {
		return nil, err
	}
	f.Before, f.Limit, f.PayloadBytes = cmp.Or(f.Before, math.MaxInt64), perPage, unlisted
	found, err := v.c.p.ListDeadLetters(v.r.Context(), f)
	if err != nil {
		return nil, err
	}
	list := &letters{Narrowed: narrowed}
	for _, d := range found {
		list.Rows = append(list.Rows, letterRow{d, titleOf(d.Queue, d.Name, d.Instance, string(d.Kind)), v.reasonOf(&d), v.brief(Payload{"error", d.Namespace, d.Name, []byte(d.Error)})})
	}
	list.Until = v.text("until") // of the first page
	if v.text("before") == "" && len(found) > 0 {
		latest := slices.MaxFunc(found, func(a, b pgwake.DeadLetter) int { return a.DiedAt.Compare(b.DiedAt) })
		list.Until = instantSeen(latest.DiedAt.Add(time.Microsecond))
	}
	if v.text("before") != "" {
		list.Pager.First = v.With("before", "", "until", "")
	}
	if len(found) == perPage {
		list.Pager.Next = v.With("before", fmt.Sprint(found[perPage-1].ID), "until", list.Until)
	}
	for _, name := range letterFields {
		if value := v.Value(name); value != "" {
			list.Filter = append(list.Filter, field{name, value})
		}
	}
	return list, nil
}

// reasonOf is a text of whoever gave it up.
func (v *view) reasonOf(d *pgwake.DeadLetter) string {
	return string(v.c.redacted(Payload{"reason", d.Namespace, d.Name, []byte(d.Reason)}))
}

type letter struct {
	pgwake.DeadLetter
	Title  string
	Reason string
	Parts  []shown
}

func loadLetter(v *view) (any, error) {
	id, err := v.number("id")
	if err != nil {
		return nil, err
	}
	found, err := v.c.p.ListDeadLetters(v.r.Context(), &pgwake.DeadLetterFilter{IDs: []int64{id}})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%w: there is no dead letter %d any more, or never was", pgwake.ErrNotFound, id)
	}
	d := &letter{DeadLetter: found[0], Reason: v.reasonOf(&found[0]), Title: titleOf(found[0].Queue, found[0].Name, found[0].Instance, string(found[0].Kind))}
	v.Title = "Dead letter " + fmt.Sprint(id)
	of := func(kind string, data []byte) Payload { return Payload{kind, d.Namespace, d.Name, data} }
	d.Parts, err = v.parts("Data", of("dead letter", d.Data), "Error", of("error", []byte(d.Error)), "Headers", of("headers", headersOf(d.Headers)))
	return d, err
}
