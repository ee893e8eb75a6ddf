package console

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: which instances are there, and what has happened to one of them?

type instances struct {
	Rows     []pgwake.InstanceInfo
	Statuses []pgwake.Status
	Pager    pager
}

// statuses are those that can be asked for.
var statuses = []pgwake.Status{pgwake.StatusRunning, pgwake.StatusCompleted, pgwake.StatusFailed, pgwake.StatusCancelled, pgwake.StatusContinuedAsNew}

func loadInstances(v *view) (any, error) {
	found, err := v.c.p.ListInstances(v.r.Context(), &pgwake.ListOptions{Status: pgwake.Status(v.text("status")), Namespace: v.text("namespace"), Name: v.text("name"),
		Queue: v.text("queue"), After: v.Value("after"), Limit: perPage, PayloadBytes: unlisted})
	if err != nil {
		return nil, err
	}
	list := &instances{Rows: found, Statuses: statuses}
	next := ""
	if len(found) == perPage {
		next = found[perPage-1].Instance
	}
	list.Pager = v.pagerOf("after", next)
	return list, nil
}

type instance struct {
	*pgwake.InstanceInfo
	Executions []pgwake.ExecutionInfo
	Older      int // executions that are not shown
	Execution  int64
	Events     []happened
	KV         []pair
	Children   []string
	Hidden     int // children that are not shown
	AskChild   string
	Parts      []shown
	Pager      pager
}

// Seen is for the button that deletes it.
func (i *instance) Seen() string { return instanceSeen(i.InstanceInfo) }

// happened is an event of a history.
type happened struct {
	pgwake.Event
	Gap   time.Duration // since the event before, on this page
	Brief string
	Link  string
}

type pair struct{ Key, Value string }

const maxShown = 100

func loadInstance(v *view) (any, error) {
	ctx, id := v.r.Context(), v.Value("id")
	info, err := v.c.p.GetInstanceInfo(ctx, id)
	if err != nil {
		return nil, err
	}
	i := &instance{InstanceInfo: info, Execution: info.ExecutionID, AskChild: v.With("children", "1")}
	v.Title = "Instance " + info.Instance
	of := func(kind string, data string) Payload { return Payload{kind, info.Namespace, info.Name, []byte(data)} }
	if i.Parts, err = v.parts("Output", of("output", info.Output), "Custom status", of("status", info.CustomStatus), "Attributes", of("attributes", string(info.Attributes))); err != nil {
		return nil, err
	}
	if i.Executions, err = v.c.p.ListExecutions(ctx, id); err != nil {
		return nil, err
	}
	slices.Reverse(i.Executions)
	if len(i.Executions) > maxShown {
		i.Executions, i.Older = i.Executions[:maxShown], len(i.Executions)-maxShown
	}
	if n, err := v.number("execution"); err != nil {
		return nil, err
	} else if n > 0 {
		i.Execution = n
	}
	if err := i.readHistory(v); err != nil {
		return nil, err
	}
	pairs, err := v.c.p.ListKV(ctx, id)
	if err != nil {
		return nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		if len(i.KV) < maxShown {
			i.KV = append(i.KV, pair{key, v.brief(of("key-value pair", pairs[key]))})
		}
	}
	if v.text("children") != "" && !v.Live {
		if i.Children, err = v.c.p.ListChildren(ctx, id); err != nil {
			return nil, err
		}
		if len(i.Children) > maxShown {
			i.Children, i.Hidden = i.Children[:maxShown], len(i.Children)-maxShown
		}
	}
	return i, nil
}

// readHistory reads a page of the history, or one event of it that is asked for.
func (i *instance) readHistory(v *view) error {
	from, err := v.number("from")
	if err != nil {
		return err
	}
	one, err := v.number("event")
	if err != nil {
		return err
	}
	limit := perPage
	if v.text("event") != "" {
		from, limit = one, 1
	}
	events, err := v.c.p.ReadHistoryPage(v.r.Context(), i.Instance, i.Execution, from, limit)
	if err != nil {
		return err
	}
	for n, e := range events {
		h := happened{Event: e, Brief: v.brief(Payload{"history", i.Namespace, e.Type, e.Data}), Link: v.With("event", fmt.Sprint(e.ID), "execution", fmt.Sprint(i.Execution), "from", "")}
		if n > 0 {
			h.Gap = e.CreatedAt.Sub(events[n-1].CreatedAt)
		}
		i.Events = append(i.Events, h)
	}
	if v.text("event") != "" && len(events) == 1 {
		part, err := v.part("Event "+fmt.Sprint(one), Payload{"history", i.Namespace, events[0].Type, events[0].Data})
		if err != nil {
			return err
		}
		i.Parts = append(i.Parts, part)
		i.Pager = pager{First: v.With("event", "")}
		return nil
	}
	next := ""
	if len(events) == perPage {
		next = fmt.Sprint(events[perPage-1].ID + 1)
	}
	i.Pager = v.pagerOf("from", next)
	return nil
}
