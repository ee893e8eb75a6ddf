package console_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// onlyOperators is what a program knows of whoever is there; here it is a header that a proxy sets.
func onlyOperators(r *http.Request, _ console.Action) error {
	if r.Header.Get("X-Role") != "operator" {
		return errors.New("this is for operators")
	}
	return nil
}

func withoutCards(p console.Payload) []byte {
	if p.Name == "card.charge" || p.Kind == "error" {
		return []byte(`"not shown here"`)
	}
	return p.Data
}

// mount has the console beside the other pages of a program.
func mount(mux *http.ServeMux, p *pgwake.Provider, engine *taskgraph.Engine, bus *eventbus.Bus) {
	mux.Handle("/console/", http.StripPrefix("/console", console.Handler(p, &console.Options{
		Tasks:     engine.Graph, // of a taskgraph.Engine, if there is one
		Events:    bus,          // of package eventbus, likewise
		Authorize: onlyOperators,
	})))
}

func ExampleHandler() {
	ctx, p, end := openProvider()
	defer end()
	engine, err := taskgraph.New(ctx, p, &taskgraph.Config{Logger: slog.New(slog.DiscardHandler)})
	check(err)
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	check(err)
	mux := http.NewServeMux()
	mount(mux, p, engine, bus)
	server := httptest.NewServer(mux)
	defer server.Close()

	for _, page := range []string{"", "queues", "tasks", "events", "letters", "schedules"} {
		answer, err := server.Client().Get(server.URL + "/console/" + page)
		check(err)
		answer.Body.Close()
		fmt.Println("/"+page, answer.StatusCode)
	}
	// Output:
	// / 200
	// /queues 200
	// /tasks 200
	// /events 200
	// /letters 200
	// /schedules 200
}

// What is secret is not shown, and cannot be downloaded.
func ExampleOptions_redact() {
	ctx, p, end := openProvider()
	defer end()
	item, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "card.charge", Input: []byte(`{"card": "4111 1111 1111 1111"}`)}, nil)
	check(err)
	server := httptest.NewServer(console.Handler(p, &console.Options{Redact: withoutCards}))
	defer server.Close()

	for _, page := range []string{"items", fmt.Sprintf("item?id=%d", item.ID), fmt.Sprintf("item?id=%d&download=Data", item.ID)} {
		answer, err := server.Client().Get(server.URL + "/" + page)
		check(err)
		body, err := io.ReadAll(answer.Body)
		check(err)
		answer.Body.Close()
		fmt.Println(strings.Contains(string(body), "4111"), strings.Contains(string(body), "not shown here"))
	}
	// Output:
	// false true
	// false true
	// false true
}
