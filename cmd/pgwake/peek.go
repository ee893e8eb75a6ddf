package main

import (
	"context"
	"encoding/json"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: what is in a queue?

// queuedItem is what peek prints as JSON.
type queuedItem struct {
	ID         int64             `json:"id"`
	Queue      string            `json:"queue"`
	Namespace  string            `json:"namespace"`
	State      string            `json:"state"`
	DueAt      moment            `json:"due_at"`
	Priority   int               `json:"priority"`
	Attempts   int               `json:"attempts"`
	EnqueuedAt moment            `json:"enqueued_at"`
	Name       string            `json:"name,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Version    string            `json:"version,omitempty"`
	Instance   string            `json:"instance,omitempty"`
	Tag        string            `json:"tag,omitempty"`
	Session    string            `json:"session,omitempty"`
	Key        string            `json:"key,omitempty"`
	DedupKey   string            `json:"dedup_key,omitempty"`
	Headers    map[string]string `json:"headers,omitempty"`
	LastError  string            `json:"last_error,omitempty"`
	Data       json.RawMessage   `json:"data,omitempty"`
}

// nameWidth is how much of a name a table has room for.
const nameWidth = 40

// Of a payload a table shows nothing, or the beginning: that is up to how many bytes it is read whole.
const (
	unlisted = 1
	listed   = 4 << 10
)

// dataStart is what there is of an item's data, or its beginning.
func dataStart(i pgwake.QueuedItem) string {
	if i.DataCut != nil {
		return i.DataCut.Start
	}
	return string(i.Data)
}

// queueFlag adds --queue, of which the default is the worker queue.
func queueFlag(c *cobra.Command, name *string, otherwise string) {
	c.Flags().StringVarP(name, "queue", "q", otherwise, "worker or orchestrator")
	_ = c.RegisterFlagCompletionFunc("queue", cobra.FixedCompletions([]string{"worker", "orchestrator"}, cobra.ShellCompDirectiveNoFileComp))
}

func queueOf(name string) (pgwake.Queue, error) {
	for _, q := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
		if q.String() == name {
			return q, nil
		}
	}
	return 0, usagef("worker or orchestrator", "there is no queue %q", name)
}

func (a *app) peekCommand() *cobra.Command {
	var queue string
	var f pgwake.PeekFilter
	c := &cobra.Command{
		Use: "peek", Short: "Show what is in a queue, and claim nothing", Args: cobra.NoArgs,
		Example: `  pgwake peek --namespace mail
  pgwake peek --queue orchestrator --instance order-7 --json`,
		RunE: func(c *cobra.Command, _ []string) error { return a.peek(c.Context(), queue, &f) },
	}
	queueFlag(c, &queue, "worker")
	s := c.Flags()
	s.StringVarP(&f.Namespace, "namespace", "n", "", "of this namespace alone")
	s.StringVar(&f.Name, "name", "", "of this name alone")
	s.StringVar(&f.Instance, "instance", "", "of, or to, this instance alone")
	s.Int64Var(&f.After, "after", 0, "after the item of this id, the last one of the page before")
	limitFlag(c, &f.Limit)
	return c
}

func (a *app) peek(ctx context.Context, queue string, f *pgwake.PeekFilter) error {
	q, err := queueOf(queue)
	if err != nil {
		return err
	}
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	if !a.asJSON {
		f.PayloadBytes = listed
	}
	items, err := p.Peek(ctx, q, f)
	if err != nil {
		return err
	}
	if a.asJSON {
		all := make([]queuedItem, 0, len(items))
		for _, i := range items {
			all = append(all, queuedJSON(i))
		}
		return a.printJSON(all)
	}
	a.printQueued(p, q, items)
	if len(items) == f.Limit {
		a.more("--after", text(items[len(items)-1].ID))
	}
	return nil
}

func queuedJSON(i pgwake.QueuedItem) queuedItem {
	return queuedItem{ID: i.ID, Queue: i.Queue.String(), Namespace: i.Namespace, State: string(i.State), DueAt: moment{i.DueAt}, Priority: i.Priority, Attempts: i.Attempts,
		EnqueuedAt: moment{i.EnqueuedAt}, Name: i.Name, Kind: string(i.Kind), Version: i.Version, Instance: i.Instance, Tag: i.Tag, Session: i.Session, Key: i.Key,
		DedupKey: i.DedupKey, Headers: i.Headers, LastError: i.LastError, Data: i.Data}
}

func (a *app) printQueued(p *pgwake.Provider, queue pgwake.Queue, items []pgwake.QueuedItem) {
	table := &rows{heads: []string{"ID", "NAMESPACE", "NAME", "STATE", "DUE", "PRIO", "ATTEMPTS", "AGE", "TAG", "DATA"}, none: "the " + queue.String() + " queue has nothing of the kind"}
	if queue == pgwake.Orchestrator {
		table.heads[2] = "INSTANCE: KIND"
	}
	for _, i := range items {
		name := i.Name
		if queue == pgwake.Orchestrator {
			name = i.Instance + ": " + string(i.Kind)
		}
		table.add(text(i.ID), i.Namespace, glance.Short(name, nameWidth), string(i.State), glance.DueIn(p.LocalTime(i.DueAt), a.now()), text(int64(i.Priority)), text(int64(i.Attempts)),
			glance.Span(a.now().Sub(p.LocalTime(i.EnqueuedAt))), orDash(glance.Short(i.Tag, nameWidth)), glance.Short(dataStart(i), 40))
	}
	a.printRows(table)
}
