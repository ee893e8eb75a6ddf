package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	eventmigrations "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/taskgraph"
	taskmigrations "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: what is there to be seen? A shop with something of everything, and what hostile people would put there.

// Texts that break pages which are not careful.
const (
	script = `<script>window.broken = true</script>`
	markup = `"><img src=x onerror="window.broken = true">{{.}}`
	rtl    = "invoice\u202efdp.exe שלום"
)

// huge is a mebibyte of JSON, and deep one that is nested as deep as can be.
var (
	huge = `"` + strings.Repeat("0123456789abcde ", 1<<16) + `"`
	deep = strings.Repeat("[", pgwake.MaxDepth) + strings.Repeat("]", pgwake.MaxDepth)
)

var silent = slog.New(slog.DiscardHandler)

// world is a site with something of everything.
type world struct {
	*site
	bus      *eventbus.Bus
	engine   *taskgraph.Engine
	task     string
	declined chan struct{} // closed: the card is not declined any more
	item     int64
	letters  []int64
	event    int64
	hostile  bool
}

// newWorld makes one. Actions are allowed if o says so.
// schemas are those of the tests with task graphs and the event bus.
var schemas = testschema.With(taskmigrations.Layer(), eventmigrations.Layer())

func newWorld(t *testing.T, o console.Options) *world { return makeWorld(t, o, true) }

// makeWorld leaves out what hostile people would put there, unless it is told to have it.
func makeWorld(t *testing.T, o console.Options, hostile bool) *world {
	t.Helper()
	w := &world{declined: make(chan struct{}), hostile: hostile}
	p := schemas.New(t, &pgwake.Config{MaxPayload: 4 << 20})
	var err error
	w.bus, err = eventbus.New(t.Context(), p, &eventbus.Config{Namespace: "shop", MaxPayload: 4 << 20, Logger: silent})
	require.NoError(t, err)
	w.engine, err = taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	o.Tasks, o.Events = w.engine.Graph, w.bus
	w.site = newSite(t, p, &o)
	w.plantLetters(t)
	w.plantItems(t)
	w.plantInstance(t)
	w.plantEvents(t)
	w.plantTask(t)
	return w
}

func (w *world) plantLetters(t *testing.T) {
	for i, of := range []struct{ name, data, reason, cause string }{
		{"email.send", `{"to": "bob@example.com", "order": 7}`, "Handler error", "550 no such mailbox"},
		{"email.send", `{"to": "eve@example.com", "order": 9}`, "Handler error", "421 try again later"},
		{script, `{"html": ` + quoted(script+markup) + `}`, "poison " + rtl, markup + "\x1b[2J\n" + rtl},
		{"report.print", huge, "Handler error", strings.Repeat("a long stack trace\n", 200)},
	} {
		if of.name == script && !w.hostile {
			continue
		}
		_, err := w.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: of.name, Input: json.RawMessage(of.data)}, &pgwake.EnqueueOptions{Namespace: "mail"})
		require.NoError(t, err)
		claimed, err := w.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"mail"}})
		require.NoError(t, err, i)
		require.NoError(t, w.DeadLetterWorkItem(t.Context(), claimed.LockToken, of.reason, of.cause))
	}
	all, err := w.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	for _, d := range all {
		w.letters = append(w.letters, d.ID)
	}
}

func quoted(text string) string {
	data, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	return string(data)
}

func (w *world) plantItems(t *testing.T) {
	for i := range 60 {
		w.enqueue(t, "invoice.send", "billing", fmt.Sprintf(`{"order": %d}`, i))
	}
	w.item = w.enqueue(t, "invoice.print", "billing", `{"order": 7, "lines": [{"sku": 42, "count": 2}, {"sku": 7, "count": 1}], "to": {"name": "Ada", "town": "London"}}`)
	for _, data := range []string{huge, deep, quoted(script), quoted(markup), quoted(rtl), quoted("\x1b[2J\u2028\u2066\u200b")} {
		if w.hostile {
			w.enqueue(t, script+rtl, "hostile", data)
		}
	}
	_, err := w.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "video.encode", Tag: "gpu"}, &pgwake.EnqueueOptions{Namespace: "media", Delay: time.Hour})
	require.NoError(t, err)
	w.enqueue(t, "thumbnail", "media", `{}`)
	_, err = w.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"media"}, LockTimeout: time.Hour})
	require.NoError(t, err)
	if w.hostile {
		require.NoError(t, w.Pause(t.Context(), pgwake.Worker, "hostile"))
	}
}

func (w *world) plantInstance(t *testing.T) {
	for _, id := range []string{"order-7", script + rtl} {
		if id != "order-7" && !w.hostile {
			continue
		}
		_, err := w.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: id, Kind: pgwake.MessageStart, Name: "order", ExecutionID: 1}, &pgwake.EnqueueOptions{Namespace: "flow"})
		require.NoError(t, err)
		turn, err := w.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"flow"}})
		require.NoError(t, err)
		ack := pgwake.OrchestrationAck{ExecutionID: 1, Metadata: pgwake.Metadata{Name: "order", Status: pgwake.StatusRunning}}
		for i, kind := range []string{"OrchestrationStarted", "ActivityScheduled", "ActivityCompleted", "TimerCreated"} {
			ack.History = append(ack.History, pgwake.Event{ID: int64(i + 1), Type: kind, Data: json.RawMessage(quoted(map[bool]string{true: script + rtl, false: "order 7"}[w.hostile]))})
		}
		require.NoError(t, w.AckOrchestrationItem(t.Context(), turn.LockToken, ack))
	}
	var more []pgwake.Event
	for i := range 80 {
		more = append(more, pgwake.Event{ID: int64(10 + i), Type: "Note", Data: json.RawMessage(fmt.Sprintf(`{"n": %d}`, i))})
	}
	require.NoError(t, w.AppendHistory(t.Context(), "order-7", 1, more))
}

func (w *world) plantEvents(t *testing.T) {
	require.NoError(t, w.bus.Subscribe(t.Context(), "mailer", []string{"order.*"}, nil))
	for i := range 55 {
		_, err := w.bus.Emit(t.Context(), "order.created", map[string]any{"order": i, "total": 19.9}, &eventbus.EmitOptions{Key: fmt.Sprintf("customer-%d", i%7)})
		require.NoError(t, err)
	}
	for _, payload := range []string{huge, quoted(script + markup), quoted(rtl)} {
		if !w.hostile {
			break
		}
		_, err := w.bus.Emit(t.Context(), "hostile", json.RawMessage(payload), &eventbus.EmitOptions{Key: markup})
		require.NoError(t, err)
	}
	var err error
	w.event, err = w.bus.Emit(t.Context(), "order.shipped", map[string]any{"order": 7, "parcel": "1Z-77"}, &eventbus.EmitOptions{Key: "customer-3"})
	require.NoError(t, err)
	for _, s := range []eventbus.Schedule{{Name: "nightly-report", Cron: "30 4 * * *", TimeZone: "Europe/Berlin", Type: "report.due"}, {Name: markup, Cron: "@hourly", Work: script}} {
		if s.Name == markup && !w.hostile {
			s.Name, s.Work = "remind-customers", "email.remind"
		}
		_, err := w.bus.Schedule(t.Context(), s)
		require.NoError(t, err)
	}
}

// plantTask has a task run until its card is declined.
func (w *world) plantTask(t *testing.T) {
	e := w.engine
	e.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return map[string]bool{"done": true}, nil })
	e.Handle("charge", func(context.Context, *taskgraph.Step) (any, error) {
		select {
		case <-w.declined:
			return map[string]string{"receipt": "R-77"}, nil
		default:
			return nil, taskgraph.Permanent(errors.New("card declined " + map[bool]string{true: script}[w.hostile]))
		}
	})
	require.NoError(t, e.Register(t.Context(), taskgraph.Define("shop", "fulfil_order", "1.0.0").
		Step("reserve_stock", "ok").Step("check_address", "ok").Step("score_risk", "ok", taskgraph.After("check_address")).
		Step("charge_card", "charge", taskgraph.After("reserve_stock", "score_risk")).
		Step("gift_wrap", "ok", taskgraph.AfterIf("reserve_stock", "$.gift == true")).
		Step("pack", "ok", taskgraph.After("charge_card", "gift_wrap")).Step("print_label", "ok", taskgraph.After("check_address")).
		Step("ship", "ok", taskgraph.After("pack", "print_label")).Step("notify", "ok", taskgraph.After("ship"))))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = e.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	s, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Context: map[string]any{"order": 7, "note": map[bool]string{true: script, false: "ring twice"}[w.hostile]}})
	require.NoError(t, err)
	w.task = s.ID
	require.Eventually(t, func() bool {
		state, err := e.CurrentTaskState(t.Context(), w.task)
		return err == nil && state == taskgraph.TaskBlockedByFailures
	}, patience, 10*time.Millisecond)
}

// paths are all pages, each with something on it, and what has to be there.
func (w *world) paths() [][2]string {
	paths := [][2]string{
		{"", "Overview"}, {"queues", "billing"}, {"nodes", "Nodes"}, {"items?queue=worker&namespace=billing", "invoice.send"},
		{fmt.Sprintf("item?queue=worker&id=%d", w.item), "London"}, {"instances", "order-7"}, {"instance?id=order-7", "ActivityScheduled"},
		{"tasks", "fulfil_order"}, {"task?id=" + w.task, "charge_card"}, {"events", "order.shipped"}, {fmt.Sprintf("event?namespace=shop&id=%d", w.event), "1Z-77"},
		{"letters", "email.send"}, {fmt.Sprintf("letter?id=%d", w.letters[0]), "email.send"}, {fmt.Sprintf("letter?id=%d", w.letters[len(w.letters)-1]), "report.print"}, {"schedules", "nightly-report"},
		{"nowhere", "no such page"},
	}
	if w.hostile {
		paths = append([][2]string{{"items?namespace=hostile", "hostile"}, {"instance?id=" + url.QueryEscape(script+rtl), "OrchestrationStarted"}, {fmt.Sprintf("letter?id=%d", w.letters[2]), "poison"}}, paths...)
	}
	return paths
}

// anybody allows everything.
func anybody(*http.Request, console.Action) error { return nil }
