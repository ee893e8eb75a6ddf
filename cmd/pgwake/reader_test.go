package main

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a role that may only read get to see?

func TestReader_LooksAtEverything_AndDoctorSaysWhatItCannotSee(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	_, err = bus.Emit(t.Context(), "order.created", nil, nil)
	require.NoError(t, err)
	_, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	bury(t, p, pgwake.WorkItem{Name: "mail"}, "no such mailbox")
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "print"}, nil)
	require.NoError(t, err)

	role := testroles.New(t, testroles.Reader, c.schema, "taskgraph", "eventbus")
	c.url = testroles.URL(t, role)
	for _, command := range []struct {
		shows string
		args  []string
	}{
		{"print", []string{"peek"}},
		{"no such mailbox", []string{"dlq", "list"}},
		{"550 no such mailbox", []string{"dlq", "list", "--json"}},
		{task, []string{"task", "list"}},
		{"card declined", []string{"task", "show", task}},
		{"digraph", []string{"task", "show", task, "--as", "dot"}},
		{"order.created", []string{"tail", "events", "--all", "--limit", "1"}},
		{"pending", []string{"tail", "transitions", "--all", "--limit", "1"}},
		{"no such mailbox", []string{"tail", "letters", "--all", "--limit", "1"}},
		{"order.created", []string{"tail", "--all", "--limit", "1"}},
		{"current", []string{"migrate", "status"}},
		{"", []string{"schedule", "list"}},
		{"worker", []string{"top"}},
	} {
		require.Contains(t, c.ok(command.args...), command.shows, command.args)
	}
	require.Contains(t, c.refused(exitFailed, "enqueue", "mail"), "pgwake doctor")

	r, code := c.examined("--max-dead-letters", "10", "--max-wait", "1h", "--max-transaction", "1h", "--max-idle", "1h", "--max-prepared", "1h")
	require.Zero(t, code, "%+v", r.Findings)
	reasons := map[string]string{}
	for _, f := range r.Findings {
		require.NotEqual(t, failure, f.Verdict, "%+v", f)
		require.NotEqual(t, skipped, f.Verdict, "%+v", f)
		reasons[f.Check] = f.Reason
	}
	require.Contains(t, reasons["rights"], "role "+role+" reads, and changes nothing")
	require.Contains(t, reasons["long transactions"], "cannot be seen without GRANT pg_read_all_stats")
	require.Contains(t, reasons["idle in transaction"], "cannot be seen without GRANT pg_read_all_stats")
	require.Contains(t, reasons["dead letters"], "1")

	rights := func(change string) finding {
		c.url = pgwaketest.URL(t)
		c.exec(change + role)
		c.url = testroles.URL(t, role)
		r, code := c.examined()
		require.Equal(t, exitFailed, code)
		at := slices.IndexFunc(r.Findings, func(f finding) bool { return f.Check == "rights" })
		require.Equal(t, failure, r.Findings[at].Verdict)
		return r.Findings[at]
	}
	f := rights("REVOKE EXECUTE ON FUNCTION list_nodes, log_xact FROM ")
	require.Contains(t, f.Reason, "lacks EXECUTE on functions list_nodes, log_xact")
	require.Contains(t, f.Fix, "docs/security.md")
	f = rights("GRANT EXECUTE ON FUNCTION fetch_work TO ") // whoever fetches is no reader
	require.Contains(t, f.Reason, "DELETE on tables")
	require.Contains(t, f.Fix, "GRANT SELECT, INSERT, UPDATE, DELETE")
}

// What doctor asks for is what the page grants.
func TestReader_DoctorAndThePage_NameTheSameFunctions(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/security.md")
	require.NoError(t, err)
	named := regexp.MustCompile(`p\.provolatile <> 'v' OR p\.proname IN \([^)]+\)`)
	require.NotEmpty(t, named.FindString(query("reader")))
	require.Equal(t, named.FindString(string(page)), named.FindString(query("reader")))
}
