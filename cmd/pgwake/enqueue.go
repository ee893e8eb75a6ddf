package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: how does somebody add an item by hand?

// enqueueFlags are a work item, or a message, and where it goes.
type enqueueFlags struct {
	o                                  pgwake.EnqueueOptions
	at                                 string
	tag, session, key                  string
	headers                            headersFlag
	instance, name, version, queueName string
}

// enqueued is what enqueue prints as JSON.
type enqueued struct {
	ID        int64  `json:"id"`
	Queue     string `json:"queue"`
	Namespace string `json:"namespace"`
	DueAt     moment `json:"due_at,omitzero"`
	Duplicate bool   `json:"duplicate"`
}

func (a *app) enqueueCommand() *cobra.Command {
	var f enqueueFlags
	c := &cobra.Command{
		Use: "enqueue NAME [JSON | -]", Short: "Add a work item, or a message to an instance", Args: cobra.RangeArgs(1, 2),
		Long: `Add a work item of a name, with JSON as its input, or what standard input has, if it is -.
With --instance it is a message to an instance of an orchestration instead, and NAME is its kind.`,
		Example: `  pgwake enqueue email.send '{"to":"ada"}' --delay 10m
  jq -c .order order.json | pgwake enqueue invoice.print - --namespace shop --dedup-key order-7
  pgwake enqueue approved '{"by":"ada"}' --instance order-7`,
		RunE: func(c *cobra.Command, args []string) error { return a.enqueue(c, &f, args) },
	}
	s := c.Flags()
	s.StringVarP(&f.o.Namespace, "namespace", "n", "", `namespace (default "default")`)
	s.IntVar(&f.o.Priority, "priority", 0, "from 0 to 9, the highest first")
	s.DurationVar(&f.o.Delay, "delay", 0, "how much later it is due")
	s.StringVar(&f.at, "at", "", "when it is due, as in 2026-11-25T17:00:00Z, by the server's clock")
	s.StringVar(&f.o.DedupKey, "dedup-key", "", "add nothing while an item of this key is queued")
	s.DurationVar(&f.o.DedupFor, "dedup-for", 0, "nor for so long, whatever becomes of the item")
	s.StringVar(&f.tag, "tag", "", "what it needs")
	s.StringVar(&f.session, "session", "", "items that one owner handles at a time")
	s.StringVar(&f.key, "key", "", "with whom it shares the limits of the namespace")
	s.Var(&f.headers, "header", "name=value, which travels with it; may be repeated")
	s.StringVar(&f.instance, "instance", "", "a message to this instance")
	s.StringVar(&f.name, "orchestration", "", "of a message of kind start: what begins")
	s.StringVar(&f.version, "version-of", "", "of a message of kind start: the version of that")
	s.StringVar(&f.queueName, "queue-name", "", "of a message to a new instance: the queue name of that")
	return c
}

// headersFlag are headers as they are said, one at a time: what a value has of commas, quotes and = is part of it.
type headersFlag map[string]string

func (h *headersFlag) String() string { return "" }
func (h *headersFlag) Type() string   { return "name=value" }

func (h *headersFlag) Set(text string) error {
	name, value, both := strings.Cut(text, "=")
	if !both {
		return errors.New("it is name=value")
	}
	if *h == nil {
		*h = headersFlag{}
	}
	(*h)[name] = value
	return nil
}

func (a *app) enqueue(c *cobra.Command, f *enqueueFlags, args []string) error {
	if f.instance == "" && c.Flags().Changed("instance") { // it is no work item because a variable is not set
		return usagef("the id of the instance; a work item has no --instance", "--instance is empty")
	}
	data, err := a.payload(c.Context(), args[1:])
	if err != nil {
		return err
	}
	if f.at != "" {
		if f.o.At, err = time.Parse(time.RFC3339, f.at); err != nil {
			return usagef("2026-11-25T17:00:00Z; or --delay 10m", "this is no instant: %q", f.at)
		}
	}
	p, end, err := a.provider(c.Context())
	if err != nil {
		return err
	}
	defer end()
	queue := pgwake.Worker
	var added pgwake.Enqueued
	if f.instance != "" {
		queue = pgwake.Orchestrator
		added, err = p.EnqueueForOrchestrator(c.Context(), pgwake.Message{Instance: f.instance, Kind: pgwake.MessageKind(args[0]), Data: data,
			Name: f.name, Version: f.version, Queue: f.queueName, Headers: f.headers}, &f.o)
	} else {
		added, err = p.EnqueueForWorker(c.Context(), pgwake.WorkItem{Name: args[0], Input: data, Tag: f.tag, Session: f.session, Key: f.key, Headers: f.headers}, &f.o)
	}
	if err != nil {
		return err
	}
	of := enqueued{ID: added.ID, Queue: queue.String(), Namespace: cmp.Or(f.o.Namespace, pgwake.DefaultNamespace), DueAt: moment{added.DueAt}, Duplicate: added.Duplicate}
	return a.printEnqueued(of)
}

func (a *app) printEnqueued(of enqueued) error {
	switch {
	case a.asJSON:
		return a.printJSON(of)
	case of.Duplicate:
		a.printf("%s\n", a.style.warn.Render("nothing was added: the dedup key is taken, by item "+text(of.ID)))
	default:
		a.printf("%s item %d in the %s queue, namespace %s, due %s\n", a.style.ok.Render("added"), of.ID, of.Queue, of.Namespace, of.DueAt.Local().Format(time.RFC3339))
	}
	return nil
}

// payload is the JSON of an argument, or of standard input. If it was to be there, it is there: what came to nothing on its way is none.
func (a *app) payload(ctx context.Context, args []string) (json.RawMessage, error) {
	if len(args) == 0 {
		return nil, nil
	}
	data, from := []byte(args[0]), "the JSON"
	if args[0] == "-" {
		from = "standard input"
		var err error
		if data, err = heeding(ctx, func() ([]byte, error) { return io.ReadAll(a.in) }); err != nil {
			return nil, err
		}
	}
	if data = bytes.TrimSpace(data); len(data) == 0 {
		return nil, usagef("null, if that is what is meant", "%s is empty", from)
	}
	if !json.Valid(data) {
		return nil, usagef(`a text needs quotes of its own: '"`+glance.Short(string(data), 30)+`"'`, "this is no JSON: %s", glance.Short(string(data), 60))
	}
	return data, nil
}

// parseInstant reads an instant, or how long ago one was.
func parseInstant(text string, now time.Time) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	return time.Time{}, usagef("2026-11-25T17:00:00Z; or how long ago, as in 36h", "this is no instant: %q", text)
}
