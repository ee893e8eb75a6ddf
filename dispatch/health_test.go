package dispatch_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: does Health say what is wrong, and which of it makes a process useless?

func probe(t *testing.T, c *dispatch.Coordinators, path string) (code int, h struct {
	Status string
	Parts  []struct {
		Part, Status string
		Reasons      []string
	}
}) {
	t.Helper()
	w := httptest.NewRecorder()
	c.HealthHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	if w.Header().Get("Content-Type") == "application/json" {
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &h))
	}
	return w.Code, h
}

// healthOf is that of one part.
func healthOf(h dispatch.Health, part string) dispatch.HealthPart {
	for _, p := range h.Parts {
		if p.Part == part {
			return p
		}
	}
	return dispatch.HealthPart{Status: -1}
}

func TestHealth_FromBeforeRunToItsEnd_TheWorstOfItsParts(t *testing.T) {
	t.Parallel()
	m := newModal(t, pgwake.Config{})
	code, h := probe(t, m.c, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, "unknown", h.Status)
	code, _ = probe(t, m.c, "/livez")
	require.Equal(t, http.StatusOK, code)

	stop := running(t, m.c)
	m.waits(t, 1)
	require.Equal(t, dispatch.Healthy, m.c.Health().Status)
	code, h = probe(t, m.c, "/admin/readyz")
	require.Equal(t, http.StatusOK, code)
	require.Len(t, h.Parts, 5)

	for range 8 { // as if each had been on its way for a minute
		m.exec(t, `SELECT pg_notify(channel('worker'), '0 0 * ' || (extract(epoch FROM now() - interval '1 min') * 1000000)::bigint)`)
	}
	require.Eventually(t, func() bool { return m.c.Health().Status == dispatch.Degraded }, patience, 10*time.Millisecond)
	require.Contains(t, healthOf(m.c.Health(), "notifications").Reasons[0], "late")
	code, h = probe(t, m.c, "/readyz")
	require.Equal(t, http.StatusOK, code, "it works all the same")
	require.Equal(t, "degraded", h.Status)
	for range 8 {
		m.enqueue(t, "default", true)
	}
	require.Eventually(t, func() bool { return m.c.Health().Status == dispatch.Healthy }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return len(m.handled("default")) == 8 && m.c.Stats().Working == 0 }, patience, 10*time.Millisecond)

	m.exec(t, `ALTER TABLE worker_queue RENAME TO away`) // and there is nothing to do when it is back
	m.exec(t, `SELECT notify_queue('worker', 1, NULL)`)
	require.Eventually(t, func() bool { return m.c.Health().Status == dispatch.Unhealthy }, patience, 10*time.Millisecond)
	require.NotEmpty(t, healthOf(m.c.Health(), "database").Reasons)
	require.Eventually(t, func() bool { return len(healthOf(m.c.Health(), "coordinators").Reasons) > 0 }, patience, 10*time.Millisecond)
	code, _ = probe(t, m.c, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	code, _ = probe(t, m.c, "/livez")
	require.Equal(t, http.StatusOK, code, "another process could do no more")
	m.exec(t, `ALTER TABLE away RENAME TO worker_queue`)
	require.Eventually(t, func() bool { return m.c.Health().Status == dispatch.Healthy }, patience, 10*time.Millisecond)

	require.NoError(t, stop())
	code, h = probe(t, m.c, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, "unhealthy", h.Status)
	code, _ = probe(t, m.c, "/")
	require.Equal(t, http.StatusNotFound, code)
}
