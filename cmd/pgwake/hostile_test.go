package main

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of a name that was made to do harm, or is merely odd?

// hostileName is such a name. carried: as a name, an id or a header it comes back as it is; the others cannot be, and are refused.
type hostileName struct {
	name    string
	carried bool
}

var hostile = []hostileName{
	{`it's "quoted"`, true},
	{`"`, true},
	{"a,b", true},
	{"a=b,c=d", true},
	{`'; DROP TABLE worker_queue; --`, true},
	{`$1 $$ %s %d \x00 {{.}}`, true},
	{"--yes", true},
	{"-", true},
	{"שלום 👩‍💻 e\u0301", true},
	{"invoice\u202efdp.exe", true},
	{"two\nlines\r\n", true},
	{"\x1b[2J\x1b]0;title\a\u009b1m\x7f", true},
	{" ", true},
	{strings.Repeat("x", pgwake.MaxNameLength), true},
	{strings.Repeat("x", pgwake.MaxNameLength+1), false},
	{"a\x00b", false},
	{"a\xffb", false},
	{"\xed\xa0\x80", false},
}

// quiet asserts that nothing which a terminal heeds gets there, whoever wrote it.
func quiet(t *testing.T, r result) {
	t.Helper()
	const leftToRight, joiner = "\u200e", "\u200d" // after a name that is written the other way; and of emoji
	said := strings.NewReplacer("\n", "", leftToRight, "", joiner, "").Replace(r.out + r.err)
	require.Equal(t, -1, strings.IndexFunc(said, glance.Unprintable), "%q", r.out+r.err)
}

// refusedUnwritten asserts that it was refused for what it is.
func refusedUnwritten(t *testing.T, r result) {
	t.Helper()
	quiet(t, r)
	require.Equal(t, exitUsage, r.code, r.out+r.err)
	require.Empty(t, r.out)
	require.Contains(t, r.err, "invalid")
}

func TestHostileNames_OfItems_AreCarriedUnchangedOrRefused(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	kept := 0
	for _, h := range hostile {
		// Each flag with its value in one word, and the name after what ends the flags, as a script that takes them from others has it.
		args := []string{"enqueue", "--tag=" + h.name, "--session=" + h.name, "--dedup-key=" + h.name, "--header=" + "a=" + h.name, "--json", "--", h.name}
		r := c.run(args...)
		c.run("enqueue", "keyed", "--key="+h.name)
		message := c.run("enqueue", "--instance="+h.name, "--orchestration=o", "--json", "--", h.name)
		peeked := c.run("peek", "--name="+h.name, "--json")
		if !h.carried {
			for _, r := range []result{r, message, peeked, c.run("peek", "--instance="+h.name), c.run("dlq", "list", "--name="+h.name)} {
				refusedUnwritten(t, r)
			}
			continue
		}
		kept++
		for _, r := range []result{r, message, peeked} {
			quiet(t, r)
			require.Zero(t, r.code, "%q: %s", h.name, r.err)
		}
		var items []queuedItem
		require.NoError(t, json.Unmarshal([]byte(peeked.out), &items))
		require.Len(t, items, 1, "%q", h.name)
		i := items[0]
		require.Equal(t, []string{h.name, h.name, h.name, h.name}, []string{i.Name, i.Tag, i.Session, i.DedupKey})
		require.Equal(t, h.name, i.Headers["a"])
		messages := into[[]queuedItem](c, "peek", "--queue=orchestrator", "--instance="+h.name)
		require.Len(t, messages, 1, "%q", h.name)
		require.Equal(t, []string{h.name, h.name}, []string{messages[0].Instance, messages[0].Kind})
		for _, args := range [][]string{{"peek", "--name=" + h.name}, {"peek", "--queue=orchestrator", "--instance=" + h.name}} {
			r := c.run(args...)
			require.Zero(t, r.code)
			quiet(t, r)
		}
	}
	keyed := 0
	for _, i := range into[[]queuedItem](c, "peek", "--name", "keyed", "--limit", "100") {
		require.True(t, slices.ContainsFunc(hostile, func(h hostileName) bool { return h.carried && h.name == i.Key }), "%q", i.Key)
		keyed++
	}
	require.Equal(t, kept, keyed)
	for _, h := range hostile { // of which no namespace, state, queue or id is one
		for _, args := range [][]string{
			{"enqueue", "x", "--namespace=" + h.name}, {"peek", "--namespace=" + h.name}, {"dlq", "list", "--namespace=" + h.name}, {"schedule", "list", "--namespace=" + h.name},
			{"peek", "--queue=" + h.name}, {"enqueue", "x", "--at=" + h.name}, {"enqueue", "x", "--", h.name + "{"}, {"dlq", "show", "--", h.name}, {"dlq", "purge", "--before=" + h.name, "--yes"},
			{"dlq", "purge", "--id=" + h.name, "--yes"}, {"task", "list", "--state=" + h.name}, {"migrate", "up", "--layer=" + h.name}, {"tail", "--", h.name},
		} {
			r := c.run(args...)
			quiet(t, r)
			require.Equal(t, exitUsage, r.code, "%q: %s%s", args, r.out, r.err)
		}
	}
	items, err := p.Peek(t.Context(), pgwake.Worker, &pgwake.PeekFilter{Limit: 100})
	require.NoError(t, err)
	require.Len(t, items, 2*kept, "nothing else was added or taken away")
}

func TestHostileNames_OfSchemas_AreNeverPartOfTheStatement(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	for _, h := range hostile {
		for _, args := range [][]string{{"migrate", "status"}, {"peek"}, {"doctor"}, {"enqueue", "x"}, {"migrate", "print"}, {"migrate", "up"}, {"migrate", "down", "--yes"}} {
			there := h.carried && len(h.name) < 64 // there could be such a schema
			if there && args[0] == "migrate" && args[1] != "status" {
				continue // SQL is for programs; and that the others make no other schema is for the tests of package migrations
			}
			r := c.run(append(args, "--schema="+h.name)...)
			quiet(t, r)
			switch {
			case !there:
				require.Equal(t, exitUsage, r.code, "%q %q: %s", args, h.name, r.out+r.err)
				require.Contains(t, r.err, "name of a schema")
			case args[0] == "migrate":
				require.Contains(t, r.out, "missing", "%q: %s", h.name, r.err)
			default:
				require.Equal(t, exitFailed, r.code, "%q %q: %s", args, h.name, r.out)
			}
		}
	}
	require.Contains(t, c.ok("migrate", "status"), "current")
}

func TestHostileNames_OfDeadLettersAndSchedules_AreFoundByThem(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	for _, h := range hostile {
		list, purge, pause := []string{"dlq", "list", "--name=" + h.name}, []string{"dlq", "purge", "--yes", "--name=" + h.name}, []string{"schedule", "pause", "--", h.name}
		if !h.carried {
			refusedUnwritten(t, c.run(list...))
			refusedUnwritten(t, c.run(purge...))
			refusedUnwritten(t, c.run(pause...))
			continue
		}
		bury(t, p, pgwake.WorkItem{Name: h.name}, "broken")
		_, err := bus.Schedule(t.Context(), eventbus.Schedule{Name: h.name, Cron: "30 4 * * *", Type: "report.due"})
		require.NoError(t, err)
		require.Len(t, into[[]deadLetter](c, list...), 1)
		for _, args := range [][]string{list, {"dlq", "show", text(into[[]deadLetter](c, "dlq", "list", "--name="+h.name)[0].ID)}, {"tail", "letters", "--all", "--limit", "1"}, purge, pause, {"schedule", "list"}, {"__complete", "schedule", "run", ""}} {
			r := c.run(args...)
			if args[0] != "__complete" { // whose lines end with a tab and what it is
				quiet(t, r)
			}
			require.Zero(t, r.code, "%q: %s", args, r.err)
		}
		require.Empty(t, into[[]deadLetter](c, "dlq", "list"))
	}
	for _, s := range into[[]scheduleJSON](c, "schedule", "list", "--limit", "100") {
		require.True(t, s.Paused, s.Name)
	}
}

func TestHostileNames_OfSteps_MeanThatStep(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	e, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	e.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	d := taskgraph.Define("default", "odd", "1.0.0").Step("a", "ok").Step("b", "ok").Step("two", "ok") // of which others are made by a comma, or a line's end
	want := map[string]string{"a": "pending", "b": "pending", "two": "pending"}
	for _, h := range hostile {
		if h.carried {
			d.Step(h.name, "ok")
		}
	}
	require.NoError(t, e.Register(t.Context(), d))
	s, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: "odd", Version: "1.0.0"})
	require.NoError(t, err)
	states := func() map[string]string {
		all := make(map[string]string)
		for _, s := range into[taskJSON](c, "task", "show", s.ID).Steps {
			all[s.Name] = s.State
		}
		return all
	}
	for _, h := range hostile {
		r := c.run("task", "resolve", "--step="+h.name, "--reason="+h.name, "--", s.ID)
		quiet(t, r)
		if h.carried {
			require.Zero(t, r.code, "%q: %s", h.name, r.err)
			want[h.name] = "resolved_manually"
		} else {
			require.NotZero(t, r.code, "%q", h.name)
		}
		r = c.run("task", "show", "--", h.name)
		quiet(t, r)
		require.Equal(t, exitUsage, r.code, "%q is no id: %s", h.name, r.err)
	}
	require.Equal(t, want, states())
	for _, as := range drawings {
		quiet(t, c.run("task", "show", s.ID, "--as", as))
	}
}
