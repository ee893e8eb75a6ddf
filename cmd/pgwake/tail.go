package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/spf13/cobra"
)

// This file answers: what happens, as it happens?
//
// Each source is read on from where it was read last, by cursors that skip nothing, however late it is committed. That is a query for
// each source in each interval: it is for people who look on, and not for programs that have to know at once.

// happened is what tail prints as JSON, one in a line.
type happened struct {
	Source    string          `json:"source"` // events, transitions or letters
	At        moment          `json:"at"`
	Namespace string          `json:"namespace,omitempty"`
	What      string          `json:"what"`
	ID        string          `json:"id"`
	Detail    string          `json:"detail,omitempty"`
	Data      json.RawMessage `json:"data,omitempty"`
}

// source is something that can be followed.
type source interface {
	// begin goes to the end of what there is.
	begin(ctx context.Context) error
	// next returns what came since, and whether there may be more right now.
	next(ctx context.Context) (all []happened, more bool, err error)
}

// tailFlags say what is followed.
type tailFlags struct {
	namespace string
	types     []string
	all       bool
	every     time.Duration
	limit     int
}

// page is how much is read at a time.
const page = 500

var sourceNames = []string{"events", "transitions", "letters"}

func (a *app) tailCommand() *cobra.Command {
	var f tailFlags
	c := &cobra.Command{
		Use: "tail [" + strings.Join(sourceNames, " | ") + "]...", Short: "Follow events, transitions of tasks, and dead letters",
		ValidArgs: sourceNames, Args: cobra.OnlyValidArgs,
		Long:    "Follow events of the bus, transitions of tasks and of their steps, and dead letters as they come: all of them that the schema has, or those that are named. Ctrl-C ends it.",
		Example: "  pgwake tail\n  pgwake tail events --namespace shop --type order.created --json\n  pgwake tail letters --all",
		RunE: func(c *cobra.Command, args []string) error {
			return endless(c.Context(), a.tail(c.Context(), &f, args))
		},
	}
	s := c.Flags()
	s.StringVarP(&f.namespace, "namespace", "n", "", "namespace: of events the default one, of letters all, unless it is given")
	s.StringArrayVar(&f.types, "type", nil, "events of these types alone; may be repeated")
	s.BoolVar(&f.all, "all", false, "what there is already, first")
	s.DurationVar(&f.every, "every", 500*time.Millisecond, "how often to look")
	s.IntVar(&f.limit, "limit", 0, "end after so many (0: never)")
	return c
}

// errUnread: nobody reads the output any more.
var errUnread = errors.New("nobody reads the output")

// endless is what becomes of a command that goes on until it is interrupted: that is no failure, whenever it comes.
func endless(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (a *app) tail(ctx context.Context, f *tailFlags, names []string) error {
	if f.every < 10*time.Millisecond {
		return usagef("--every 500ms", "every %s is too often", f.every)
	}
	if f.limit < 0 {
		return usagef("--limit 10, or 0 for no end", "there is no limit of %d", f.limit)
	}
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	sources, err := a.sources(ctx, p, f, names)
	if err != nil {
		return err
	}
	for _, s := range sources {
		if !f.all {
			if err := s.begin(ctx); err != nil {
				return err
			}
		}
	}
	shown, away := 0, false
	for {
		err := a.drainAll(ctx, sources, f.limit, &shown)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !isPassing(err):
			return err
		case err != nil && !away:
			a.complain(err, "it goes on as soon as the database answers again")
		case err == nil && away:
			a.notice("the database answers again")
		}
		away = err != nil
		if f.limit > 0 && shown >= f.limit {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(f.every):
		}
		if isGone(a.output.w.Forward) {
			return errUnread
		}
	}
}

// isPassing says that the same may succeed later, as when the server restarts.
func isPassing(err error) bool {
	var of *pgwake.Error
	return errors.As(err, &of) && of.Retryable
}

func (a *app) drainAll(ctx context.Context, sources []source, limit int, shown *int) error {
	for _, s := range sources {
		if err := a.drain(ctx, s, limit, shown); err != nil {
			return err
		}
	}
	return nil
}

// drain prints all that a source has by now, up to a limit.
func (a *app) drain(ctx context.Context, s source, limit int, shown *int) error {
	for more := true; more; {
		var all []happened
		var err error
		if all, more, err = s.next(ctx); err != nil {
			return err
		}
		for _, h := range all {
			if limit > 0 && *shown >= limit {
				return nil
			}
			*shown++
			if err := a.printHappened(h); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *app) printHappened(h happened) error {
	if a.asJSON {
		return a.printLine(h)
	}
	style := map[string]func(...string) string{"events": a.style.mark.Render, "transitions": a.style.ok.Render, "letters": a.style.fail.Render}[h.Source]
	a.printf("%s %s %s %s", a.style.faint.Render(h.At.Local().Format("15:04:05.000")), style(fmt.Sprintf("%-11s", h.Source)), a.style.faint.Render(h.ID), glance.OneLine(h.What))
	if h.Detail != "" {
		a.printf("  %s", glance.Short(h.Detail, 100))
	}
	if len(h.Data) > 0 && string(h.Data) != "null" {
		a.printf("  %s", a.style.faint.Render(glance.Short(string(h.Data), 120)))
	}
	a.printf("\n")
	return a.output.err // nobody may read it any more
}

// sources are those of the names, or all that the schema has.
func (a *app) sources(ctx context.Context, p *pgwake.Provider, f *tailFlags, names []string) ([]source, error) {
	wanted := names
	if len(wanted) == 0 {
		wanted = sourceNames
	}
	var all []source
	for _, name := range wanted {
		s, err := a.source(ctx, p, f, name)
		if errors.Is(err, pgwake.ErrNotMigrated) && len(names) == 0 {
			continue // a layer that the schema does not have
		}
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func (a *app) source(ctx context.Context, p *pgwake.Provider, f *tailFlags, name string) (source, error) {
	switch name {
	case "events":
		bus, err := a.bus(ctx, p, f.namespace)
		return &eventSource{p: p, bus: bus, types: f.types}, err
	case "transitions":
		graph, err := a.graph(ctx, p)
		return &transitionSource{p: p, graph: graph}, err
	}
	return &letterSource{p: p, namespace: f.namespace}, nil
}

type eventSource struct {
	p     *pgwake.Provider
	bus   *eventbus.Bus
	types []string
	after eventbus.Cursor
	seen  snapshot
}

func (s *eventSource) begin(ctx context.Context) (err error) {
	s.seen, err = takeLogSnapshot(ctx, s.p)
	s.after.Xact, s.after.ID = s.seen.before()
	return err
}

func (s *eventSource) next(ctx context.Context) (all []happened, more bool, err error) {
	events, err := s.bus.Read(ctx, s.after, page, s.types...)
	for _, e := range events {
		s.after = e.Cursor()
		if s.seen.saw(s.after.Xact) {
			continue
		}
		all = append(all, happened{"events", moment{e.EmittedAt}, e.Namespace, e.Type, text(e.ID), e.Key, e.Payload})
	}
	return all, len(events) == page, err
}

type transitionSource struct {
	p     *pgwake.Provider
	graph *taskgraph.Graph
	after taskgraph.Cursor
	seen  snapshot
}

func (s *transitionSource) begin(ctx context.Context) (err error) {
	s.seen, err = takeSnapshot(ctx, s.p)
	s.after.Xact, s.after.ID = s.seen.before()
	return err
}

func (s *transitionSource) next(ctx context.Context) (all []happened, more bool, err error) {
	transitions, err := s.graph.ReadTransitions(ctx, s.after, page)
	for i := range transitions {
		t := &transitions[i]
		s.after = t.Cursor()
		if s.seen.saw(s.after.Xact) {
			continue
		}
		what := "task"
		if t.StepName != nil {
			what = "step " + *t.StepName
		}
		from := "(new)"
		if t.FromState != nil {
			from = *t.FromState
		}
		data := t.Metadata
		if string(data) == "{}" {
			data = nil
		}
		all = append(all, happened{"transitions", moment{t.CreatedAt}, "", fmt.Sprintf("%s: %s → %s", what, from, t.ToState), t.TaskID, "", data})
	}
	return all, len(transitions) == page, err
}
