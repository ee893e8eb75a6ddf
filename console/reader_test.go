package console_test

import (
	"context"
	"html"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a console show, and what can it do, that works as the reader of docs/security.md?

func TestReader_SeesEachPage_AndIsToldThatItMayChangeNothing(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{}, false)
	role := testroles.New(t, testroles.Reader, w.Schema(), "taskgraph", "eventbus")
	p, err := pgwake.Open(t.Context(), testroles.URL(t, role), &pgwake.Config{Schema: w.Schema(), SkipMigrate: true, Mode: pgwake.ModeDisabled, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.WithoutCancel(t.Context()))) })
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Namespace: "shop", Logger: silent})
	require.NoError(t, err)
	engine, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	var who asked
	s := newSite(t, p, &console.Options{Authorize: who.authorize, Tasks: engine.Graph, Events: bus})

	for _, page := range w.paths() {
		want := http.StatusOK
		if page[0] == "nowhere" {
			want = http.StatusNotFound
		}
		require.Eventually(t, func() bool { // a page does not wait for long until all is counted
			status, body, _ := s.get(t, page[0])
			require.Equal(t, want, status, page[0])
			require.NotContains(t, body, "permission denied", page[0])
			return strings.Contains(body, page[1])
		}, patience, pollEvery, page[0])
	}
	stream := s.listen(t, "stream/queues")
	require.NotContains(t, stream.next("live"), "permission denied")
	stream.end()

	before := w.rows(t)
	for _, form := range []url.Values{
		{"verb": {"redrive"}, "id": {text(w.letters[0])}}, {"verb": {"purge"}, "id": {text(w.letters[0])}}, {"verb": {"redrive"}, "all": {"yes"}}, {"verb": {"purge"}, "all": {"yes"}},
		{"verb": {"pause-queue"}, "queue": {"worker"}, "namespace": {"billing"}}, {"verb": {"resume-queue"}, "queue": {"worker"}, "namespace": {"billing"}},
		{"verb": {"cancel-task"}, "id": {w.task}}, {"verb": {"resolve-task"}, "id": {w.task}}, {"verb": {"retry-task"}, "id": {w.task}},
		{"verb": {"pause-schedule"}, "name": {"nightly-report"}}, {"verb": {"resume-schedule"}, "name": {"nightly-report"}}, {"verb": {"run-schedule"}, "name": {"nightly-report"}},
		{"verb": {"replay"}, "group": {"mailer"}, "first": {text(w.event)}}, {"verb": {"delete-instance"}, "id": {"order-7"}, "force": {"yes"}},
	} {
		form.Set("sure", "yes")
		answer, err := http.PostForm(s.url+"act", form)
		require.NoError(t, err)
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		require.NoError(t, err)
		require.Equal(t, http.StatusForbidden, answer.StatusCode, "%v: %s", form, body)
		require.Contains(t, html.UnescapeString(string(body)), "permission denied", form)
	}
	verbs := make(map[console.Verb]bool)
	for _, a := range who.all {
		verbs[a.Verb] = true
	}
	require.Len(t, verbs, 12, "each kind")
	require.Equal(t, before, w.rows(t))
}

// rows are all rows that an action may change.
func (w *world) rows(t *testing.T) []string {
	t.Helper()
	in := pgx.Identifier{w.Schema()}.Sanitize() + "."
	var each []string
	for _, table := range []string{"worker_queue", "orchestrator_queue", "dead_letters", "limits", "instances", "history", "tasks", "steps", "scheduled_tasks", "event_log", "event_replays", "event_groups"} {
		each = append(each, `SELECT '`+table+` ' || to_jsonb(t)::text FROM `+in+table+` t`)
	}
	rows, err := w.Pool().Query(t.Context(), strings.Join(each, ` UNION ALL `)+` ORDER BY 1`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}
