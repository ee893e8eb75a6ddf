package main

import (
	"context"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/spf13/cobra"
)

// This file answers: what does the tab key offer?

// completionTimeout is how long somebody who has pressed it waits at most.
const completionTimeout = 2 * time.Second

// addCompletions has the tab key offer what there is in the database. Nothing of pgwake is the name of a file.
func (a *app) addCompletions(root *cobra.Command) {
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	schedules := a.completes(func(c *cobra.Command, p *pgwake.Provider) (names []cobra.Completion, err error) {
		namespace, _ := c.Flags().GetString("namespace")
		bus, err := a.bus(c.Context(), p, namespace)
		if err != nil {
			return nil, err
		}
		all, err := bus.Schedules(c.Context(), "", pgwake.MaxFetch)
		return namesOf(all, func(s eventbus.ScheduleInfo) (string, string) { return s.Name, s.Cron }), err
	})
	tasks := a.completes(func(c *cobra.Command, p *pgwake.Provider) ([]cobra.Completion, error) {
		graph, err := a.graph(c.Context(), p)
		if err != nil {
			return nil, err
		}
		all, err := graph.ListTasks(c.Context(), &taskgraph.TaskFilter{PayloadBytes: unlisted})
		return namesOf(all, func(t taskgraph.Task) (string, string) { return t.ID, t.Name + " " + string(t.State) }), err
	})
	letters := a.completes(func(c *cobra.Command, p *pgwake.Provider) ([]cobra.Completion, error) {
		all, err := p.ListDeadLetters(c.Context(), &pgwake.DeadLetterFilter{PayloadBytes: unlisted})
		return namesOf(all, func(d pgwake.DeadLetter) (string, string) { return text(d.ID), nameOf(d) }), err
	})
	namespaces := a.completes(func(c *cobra.Command, p *pgwake.Provider) ([]cobra.Completion, error) {
		all, err := p.ListNamespaces(c.Context())
		return namesOf(all, func(n pgwake.Namespace) (string, string) { return n.Name, "" }), err
	})
	args := map[string]cobra.CompletionFunc{"pause": schedules, "resume": schedules, "run": schedules, "cancel": tasks, "retry": tasks, "resolve": tasks}
	flags := map[string]cobra.CompletionFunc{"namespace": namespaces, "id": letters, "as": cobra.FixedCompletions(drawings, cobra.ShellCompDirectiveNoFileComp),
		"state": cobra.FixedCompletions(namesOf(taskgraph.TaskStates(), func(s taskgraph.TaskState) (string, string) { return string(s), "" }), cobra.ShellCompDirectiveNoFileComp)}
	for _, above := range root.Commands() {
		for _, c := range append(above.Commands(), above) {
			switch of := above.Name() + " " + c.Name(); {
			case of == "dlq show":
				c.ValidArgsFunction = first(letters)
			case of == "task show":
				c.ValidArgsFunction = first(tasks)
			case of == "task list":
				_ = c.RegisterFlagCompletionFunc("before", tasks)
			case args[c.Name()] != nil:
				c.ValidArgsFunction = first(args[c.Name()])
			}
			for name, complete := range flags {
				if c.Flags().Lookup(name) != nil {
					_ = c.RegisterFlagCompletionFunc(name, complete)
				}
			}
		}
	}
}

// first completes one argument, and no others.
func first(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(c, args, begun)
	}
}

// completes asks the database. Of one that is not there, or not migrated, there is nothing to offer.
func (a *app) completes(read func(*cobra.Command, *pgwake.Provider) ([]cobra.Completion, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		a.begin()
		ctx, cancel := context.WithTimeout(c.Context(), completionTimeout)
		defer cancel()
		c.SetContext(ctx)
		p, end, err := a.provider(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer end()
		names, err := read(c, p)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}

func namesOf[T any](all []T, of func(T) (name, about string)) []cobra.Completion {
	var names []cobra.Completion
	for _, one := range all {
		if name, about := of(one); !strings.ContainsFunc(name, glance.Unprintable) { // which nobody could complete
			names = append(names, cobra.CompletionWithDesc(name, glance.Short(about, nameWidth)))
		}
	}
	return names
}
