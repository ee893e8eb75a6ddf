package console_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/stretchr/testify/require"
)

// This file answers: are the pages there, in a browser, and do they change by themselves?

// enqueue enqueues a work item.
func (s *site) enqueue(t *testing.T, name, namespace, input string) int64 {
	t.Helper()
	e, err := s.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Input: []byte(input)}, &pgwake.EnqueueOptions{Namespace: namespace})
	require.NoError(t, err)
	return e.ID
}

// get reads a page without a browser.
func (s *site) get(t *testing.T, path string) (status int, body string, header http.Header) {
	t.Helper()
	r, err := http.Get(s.url + path)
	require.NoError(t, err)
	defer r.Body.Close()
	data, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return r.StatusCode, string(data), r.Header
}

func TestOverview_SomethingIsEnqueued_IsSeenWithinASecond(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	x := open(t, s.url, 1280, 900)
	x.reads("Both queues are empty.")
	require.Eventually(t, func() bool { return eval[string](x, `document.getElementById("pulse-text").textContent`) == "live" }, patience, 10*time.Millisecond)
	for i := range 3 {
		began := time.Now()
		s.enqueue(t, "mail", "shop"+strings.Repeat("x", i), `{}`)
		x.run(chromedp.Poll[chromedp.Void](fmt.Sprintf(`document.querySelectorAll("#backlog-h ~ .scroll tbody tr").length == %d`, i+1), chromedp.WithPollingInterval(10*time.Millisecond)))
		t.Log("seen after", time.Since(began))
		require.Less(t, time.Since(began), 5*time.Second) // 0.8 s at most on a machine that has time
	}
}

func TestHandler_EveryAnswer_HasAStrictPolicy(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	for _, path := range []string{"", "queues", "nowhere", "nowhere/below", "stream/nothing"} {
		_, body, h := s.get(t, path)
		require.Contains(t, h.Get("Content-Security-Policy"), "default-src 'none'")
		require.NotContains(t, h.Get("Content-Security-Policy"), "unsafe")
		require.Equal(t, "nosniff", h.Get("X-Content-Type-Options"))
		require.NotContains(t, body, "style=")
		require.NotContains(t, body, "onclick")
	}
	r, err := http.DefaultTransport.RoundTrip(must(http.NewRequest(http.MethodGet, strings.TrimSuffix(s.url, "/"), nil)))
	require.NoError(t, err)
	r.Body.Close()
	require.NotEmpty(t, r.Header.Get("Location"))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
