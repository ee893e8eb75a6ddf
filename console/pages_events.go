package console

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: what was emitted, and what comes by the clock?

type events struct {
	Missing    bool // there is no event bus
	Namespace  string
	Namespaces []string
	Rows       []eventRow
	Groups     []eventbus.Group
	Pager      pager
	Replay     *eventbus.ReplayStatus // that somebody asked for
	ReplayID   int64
}

type eventRow struct {
	*eventbus.Event
	Brief string
}

// bus is that of the namespace that is asked for; nil if there is none.
func (v *view) bus() *eventbus.Bus {
	b := v.c.o.Events
	if b == nil {
		return nil
	}
	if n := v.text("namespace"); n != "" {
		return b.In(n)
	}
	return b
}

// namespaces are those that can be chosen, as far as they fit.
func (v *view) namespaces() (names []string, err error) {
	all, err := v.c.p.ListNamespaces(v.r.Context())
	for _, n := range all {
		if len(names) < maxRows {
			names = append(names, n.Name)
		}
	}
	return names, err
}

// instant is a parameter of the request, as <input type="datetime-local"> has it, in UTC.
func (v *view) instant(name string) (time.Time, error) { return instantOf(name, v.text(name)) }

func instantOf(name, text string) (at time.Time, err error) {
	if text == "" {
		return at, nil
	}
	for _, layout := range []string{"2006-01-02T15:04", "2006-01-02T15:04:05", time.RFC3339Nano} {
		if at, err = time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return at, badRequest("%s is to be a time such as 2026-01-02T15:04", name)
}

func loadEvents(v *view) (any, error) {
	bus := v.bus()
	if bus == nil {
		return &events{Missing: true}, nil
	}
	list := &events{Namespace: bus.Namespace()}
	f := &eventbus.FindFilter{Key: v.text("key"), Limit: perPage, PayloadBytes: v.c.listed()}
	if t := v.text("type"); t != "" {
		f.Types = []string{t}
	}
	var err error
	if f.ID, err = v.number("id"); err != nil {
		return nil, err
	}
	if f.From, err = v.instant("from"); err != nil {
		return nil, err
	}
	if f.To, err = v.instant("to"); err != nil {
		return nil, err
	}
	if before := v.text("before"); before != "" {
		if f.Before, err = eventbus.ParseCursor(before); err != nil {
			return nil, err
		}
	}
	found, err := bus.Find(v.r.Context(), f)
	if err != nil {
		return nil, err
	}
	for _, e := range found {
		list.Rows = append(list.Rows, eventRow{e, v.brief(Payload{"event", e.Namespace, e.Type, start(e.Payload, e.PayloadCut)})})
	}
	next := ""
	if len(found) == perPage {
		next = found[perPage-1].Cursor().String()
	}
	list.Pager = v.pagerOf("before", next)
	if v.Live {
		return list, nil
	}
	if list.ReplayID, err = v.number("replay"); err != nil {
		return nil, err
	}
	if list.ReplayID > 0 {
		if list.Replay, err = bus.GetReplay(v.r.Context(), list.ReplayID); err != nil {
			return nil, err
		}
	}
	if list.Groups, err = bus.Groups(v.r.Context()); err != nil {
		return nil, err
	}
	list.Namespaces, err = v.namespaces()
	return list, err
}

type event struct {
	Missing bool
	*eventbus.Event
	Parts []shown
}

func loadEvent(v *view) (any, error) {
	bus := v.bus()
	if bus == nil {
		return &event{Missing: true}, nil
	}
	id, err := v.number("id")
	if err != nil {
		return nil, err
	}
	found, err := bus.Find(v.r.Context(), &eventbus.FindFilter{ID: id, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 || id == 0 {
		return nil, fmt.Errorf("%w: event %d is not in the log of %s", pgwake.ErrNotFound, id, bus.Namespace())
	}
	e := &event{Event: found[0]}
	v.Title = "Event " + fmt.Sprint(id)
	e.Parts, err = v.parts("Payload", Payload{"event", e.Namespace, e.Type, e.Payload}, "Headers", Payload{"headers", e.Namespace, e.Type, headersOf(e.Headers)},
		"Metadata", Payload{"metadata", e.Namespace, e.Type, emptied(e.Metadata)})
	return e, err
}

// emptied is nothing in place of an object that has nothing.
func emptied(data []byte) []byte {
	if string(data) == "{}" {
		return nil
	}
	return data
}

type schedules struct {
	Missing    bool
	Namespace  string
	Namespaces []string
	Rows       []*scheduleRow
	Pager      pager
}

type scheduleRow struct {
	eventbus.ScheduleInfo
	What string
}

// Seen is for the buttons of the row.
func (s *scheduleRow) Seen() string { return scheduleSeen(&s.ScheduleInfo) }

func loadSchedules(v *view) (any, error) {
	bus := v.bus()
	if bus == nil {
		return &schedules{Missing: true}, nil
	}
	found, err := bus.Schedules(v.r.Context(), v.Value("after"), perPage)
	if err != nil {
		return nil, err
	}
	list := &schedules{Namespace: bus.Namespace()}
	for _, s := range found {
		row := &scheduleRow{s, "event " + s.Type}
		if s.Work != "" {
			row.What = "work " + s.Work
		}
		list.Rows = append(list.Rows, row)
	}
	next := ""
	if len(found) == perPage {
		next = found[perPage-1].Name
	}
	list.Pager = v.pagerOf("after", next)
	if !v.Live {
		list.Namespaces, err = v.namespaces()
	}
	return list, err
}
