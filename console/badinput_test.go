package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: what does the console say to requests that no page of it leads to?

// Whatever an address says, the answer is a page that says what is wrong with it: it is never the database's fault, or the server's.
func TestPages_AddressMakesNoSense_SaySo(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	engine, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	s := newSite(t, p, &console.Options{Events: bus, Tasks: engine.Graph, Authorize: anybody})
	values := []string{"-1", "99999999999999999999", "x", "%00", "%ff", strings.Repeat("9", 5000), "0001-01-01T00:00", "*"}
	for page, params := range map[string][]string{
		"": {"done", "n"}, "queues": {"q", "from"}, "nodes": {"x"}, "items": {"queue", "namespace", "name", "instance", "after"}, "item": {"queue", "id", "all", "download"},
		"instances": {"status", "namespace", "name", "queue", "after"}, "instance": {"id"}, "tasks": {"state", "namespace", "name", "parent", "before"}, "task": {"id"},
		"events": {"namespace", "type", "key", "id", "from", "to", "before", "replay"}, "event": {"namespace", "id"}, "letters": {"queue", "namespace", "name", "instance", "reason", "before"},
		"letter": {"id"}, "schedules": {"namespace", "after"},
	} {
		for _, param := range params {
			for _, value := range values {
				if !strings.HasPrefix(value, "%") {
					value = url.QueryEscape(value)
				}
				status, body, _ := s.get(t, page+"?"+param+"="+value)
				assert.Contains(t, []int{http.StatusOK, http.StatusBadRequest, http.StatusNotFound}, status, "%s?%s=%.40s: %s", page, param, value, body[max(0, len(body)-1800):max(0, len(body)-1400)])
			}
		}
	}
	origin := strings.TrimSuffix(s.url, "/ops/console/")
	for _, verb := range []string{"redrive", "purge", "pause-queue", "resume-queue", "cancel-task", "resolve-task", "retry-task", "pause-schedule", "resume-schedule", "run-schedule", "replay", "delete-instance"} {
		for _, value := range []string{"", "-1", "99999999999999999999", "x", "\x00", "\xff", strings.Repeat("9", 5000)} {
			form := url.Values{"verb": {verb}, "sure": {"yes"}, "queue": {"worker"}}
			for _, name := range []string{"id", "namespace", "name", "group", "first", "from"} {
				form.Set(name, value)
			}
			allowed := []int{http.StatusBadRequest, http.StatusNotFound, http.StatusConflict}
			if strings.HasSuffix(verb, "-queue") && value == "x" { // a namespace may be called that
				allowed = []int{http.StatusSeeOther}
			}
			assert.Contains(t, allowed, s.post(t, origin, form), "%s %.40q", verb, value)
		}
	}
}
