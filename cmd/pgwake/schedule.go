package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: what comes when, and is it to come now, or not at all?

// scheduleJSON is what schedule list prints as JSON.
type scheduleJSON struct {
	Name     string `json:"name"`
	Cron     string `json:"cron"`
	TimeZone string `json:"time_zone"`
	Event    string `json:"event,omitempty"`
	Work     string `json:"work,omitempty"`
	Paused   bool   `json:"paused"`
	Next     moment `json:"next,omitzero"`
	Last     moment `json:"last,omitzero"`
	LastID   int64  `json:"last_id,omitempty"`
	Skipped  int64  `json:"skipped"`
}

func (a *app) scheduleCommand() *cobra.Command {
	return group("schedule", "Look at schedules, pause them, or have them come now",
		a.scheduleListCommand(),
		a.scheduleChangeCommand("pause NAME", "Have a schedule not occur any more", func(ctx context.Context, b *eventbus.Bus, name string) (string, error) {
			return changed(b.PauseSchedule(ctx, name))("paused", "was paused already")
		}),
		a.scheduleChangeCommand("resume NAME", "Have a schedule that is paused occur from now on", func(ctx context.Context, b *eventbus.Bus, name string) (string, error) {
			return changed(b.ResumeSchedule(ctx, name))("resumed", "was not paused")
		}),
		a.scheduleChangeCommand("run NAME", "Have what a schedule is for come now, beside its occurrences", runSchedule))
}

func changed(did bool, err error) func(done, not string) (string, error) {
	return func(done, not string) (string, error) {
		if err != nil {
			return "", err
		}
		if did {
			return done, nil
		}
		return not, nil
	}
}

func runSchedule(ctx context.Context, b *eventbus.Bus, name string) (string, error) {
	id, err := b.RunSchedule(ctx, name)
	if err != nil {
		return "", err
	}
	if id == 0 {
		fix := "pgwake schedule resume " + shellWord(name)
		if b.Namespace() != pgwake.DefaultNamespace {
			fix += " --namespace " + b.Namespace()
		}
		return "", &hinted{errors.New("it is paused: nothing came"), fix}
	}
	return "came as " + text(id), nil
}

// withBus opens the event bus in a namespace for as long as a function takes.
func (a *app) withBus(ctx context.Context, namespace string, do func(*pgwake.Provider, *eventbus.Bus) error) error {
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	bus, err := a.bus(ctx, p, namespace)
	if err != nil {
		return err
	}
	return do(p, bus)
}

func (a *app) scheduleListCommand() *cobra.Command {
	var namespace, after string
	var limit int
	c := &cobra.Command{
		Use: "list", Short: "List the schedules of a namespace", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withBus(c.Context(), namespace, func(p *pgwake.Provider, bus *eventbus.Bus) error {
				return a.scheduleList(c.Context(), p, bus, after, limit)
			})
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", `namespace (default "default")`)
	c.Flags().StringVar(&after, "after", "", "after the schedule of this name, the last one of the page before")
	limitFlag(c, &limit)
	return c
}

func (a *app) scheduleList(ctx context.Context, p *pgwake.Provider, bus *eventbus.Bus, after string, limit int) error {
	all, err := bus.Schedules(ctx, after, limit)
	if err != nil {
		return err
	}
	list := make([]scheduleJSON, 0, len(all))
	table := &rows{heads: []string{"NAME", "CRON", "ZONE", "WHAT", "NEXT", "LAST", "SKIPPED"}, none: "namespace " + bus.Namespace() + " has no schedules"}
	for _, s := range all {
		list = append(list, scheduleJSON{s.Name, s.Cron, s.TimeZone, s.Type, s.Work, s.Paused, moment{s.Next}, moment{s.Last}, s.LastID, s.Skipped})
		what := "event " + s.Type
		if s.Work != "" {
			what = "work " + s.Work
		}
		next := "paused"
		if !s.Paused {
			next = "by pg_cron"
			if !s.Next.IsZero() {
				next = glance.DueIn(p.LocalTime(s.Next), a.now())
			}
		}
		last := "never"
		if !s.Last.IsZero() {
			last = glance.DueIn(p.LocalTime(s.Last), a.now())
		}
		table.add(glance.Short(s.Name, nameWidth), glance.Short(s.Cron, nameWidth), s.TimeZone, glance.Short(what, nameWidth), next, last, text(s.Skipped))
	}
	if a.asJSON {
		return a.printJSON(list)
	}
	a.printRows(table)
	if len(all) == limit {
		a.more("--after", all[len(all)-1].Name)
	}
	return nil
}

func (a *app) scheduleChangeCommand(use, about string, do func(context.Context, *eventbus.Bus, string) (string, error)) *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: use, Short: about, Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withBus(c.Context(), namespace, func(_ *pgwake.Provider, bus *eventbus.Bus) error {
				said, err := do(c.Context(), bus, args[0])
				if errors.Is(err, pgwake.ErrNotFound) {
					return &hinted{fmt.Errorf("schedule %q: %w", args[0], err), "pgwake schedule list, and --namespace if it is in another one"}
				}
				if err != nil {
					return err
				}
				if a.asJSON {
					return a.printJSON(map[string]string{"schedule": args[0], "outcome": said})
				}
				a.printf("%s %s\n", glance.OneLine(args[0]), a.style.ok.Render(said))
				return nil
			})
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", `namespace (default "default")`)
	return c
}
