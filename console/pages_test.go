package console_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/internal/testschema"
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

// An item that SQL has added may be due at any instant that the server knows.
func TestPages_DueAtAnyInstantOfTheServer_AreShown(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	schema := pgx.Identifier{s.Schema()}.Sanitize()
	for at, reads := range map[string]string{"20000-01-01": "20000-01-01 00:00:00", "294276-12-31": "294276-12-31 00:00:00", "4713-11-24 BC": "-4712-11-24 00:00:00"} {
		var id int64
		require.NoError(t, s.Do(t.Context(), "enqueue", func(ctx context.Context, q pgwake.Querier) error {
			return q.QueryRow(ctx, `SELECT `+schema+`.enqueue_work('odd', p_visible_at => ($1::text || ' UTC')::timestamptz)`, at).Scan(&id)
		}))
		for _, path := range []string{fmt.Sprint("item?queue=worker&id=", id), "items?queue=worker"} {
			status, body, _ := s.get(t, path)
			require.Equal(t, http.StatusOK, status, path)
			require.Contains(t, body, reads, path)
		}
	}
	require.Eventually(t, func() bool { // a page does not wait for long until all is counted
		_, body, _ := s.get(t, "queues")
		return strings.Contains(body, "default")
	}, patience, 10*time.Millisecond)
}

// A queue that is paused as a whole is resumed as a whole.
func TestQueues_AllOfOneIsPaused_OneButtonResumesIt(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Authorize: anybody})
	s.enqueue(t, "mail", "shop", `{}`)
	require.NoError(t, s.Pause(t.Context(), pgwake.Worker, pgwake.AllNamespaces))
	body := ""
	reads := func(text string) {
		t.Helper()
		require.Eventually(t, func() bool { // a page does not wait for long until all is counted
			_, body, _ = s.get(t, "queues")
			return strings.Contains(body, text)
		}, patience, pollEvery)
	}
	reads("The whole worker queue is paused.")
	require.Equal(t, 1, strings.Count(body, `value="resume-queue"`))
	require.Contains(t, body, `name="namespace" value="*"`)
	resume := url.Values{"verb": {"resume-queue"}, "queue": {"worker"}, "namespace": {"*"}}
	require.Equal(t, http.StatusSeeOther, s.post(t, strings.TrimSuffix(s.url, "/ops/console/"), resume))
	reads("served")
	require.NotContains(t, body, "is paused.")
}

// However many tenants there are, queues are read page by page, and one that is not there any more is the last.
func TestQueues_ManyNamespaces_ArePaged(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	for i := range 30 {
		s.enqueue(t, "mail", fmt.Sprintf("tenant-%02d", i), `{}`)
	}
	shows := func(path string, rows int) (body string) {
		t.Helper()
		require.Eventually(t, func() bool {
			_, body, _ = s.get(t, path)
			return strings.Count(body, `data-key="worker `) == rows
		}, patience, pollEvery, path)
		return body
	}
	require.Contains(t, shows("queues", 25), `href="queues?from=25" rel="next"`)
	for _, last := range []string{"queues?from=25", "queues?from=1000"} {
		body := shows(last, 5)
		require.Contains(t, body, "tenant-29")
		require.Contains(t, body, `href="queues?" rel="first"`)
	}
}

// However many tenants are paused, an overview is one.
func TestOverview_ManyNamespacesArePaused_SomeAreNamed(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	for i := range 20 {
		require.NoError(t, s.Pause(t.Context(), pgwake.Worker, fmt.Sprintf("tenant-%d", i)))
	}
	body := ""
	require.Eventually(t, func() bool {
		_, body, _ = s.get(t, "")
		return strings.Contains(body, "Paused:")
	}, patience, pollEvery)
	require.Equal(t, 8, strings.Count(body, "Paused:"))
	require.Contains(t, body, "12 more</a> are paused.")
}

func TestHandler_EveryAnswer_HasAStrictPolicy(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	for _, path := range []string{"", "queues", "nowhere", "nowhere/below", "stream/nothing"} {
		_, body, h := s.get(t, path)
		require.Contains(t, h.Get("Content-Security-Policy"), "default-src 'none'")
		require.NotContains(t, h.Get("Content-Security-Policy"), "unsafe")
		require.Equal(t, "nosniff", h.Get("X-Content-Type-Options"))
		require.Equal(t, "no", h.Get("X-Accel-Buffering"))
		require.NotContains(t, body, "style=")
		require.NotContains(t, body, "onclick")
	}
	r, err := http.DefaultTransport.RoundTrip(must(http.NewRequest(http.MethodGet, strings.TrimSuffix(s.url, "/"), nil)))
	require.NoError(t, err)
	r.Body.Close()
	require.NotEmpty(t, r.Header.Get("Location"))
}

// A console for this machine answers nobody else, and no page of another site whose name has been made to lead here.
func TestHandler_Local_AnswersThisMachineAlone(t *testing.T) {
	t.Parallel()
	p := testschema.Core.New(t, nil)
	local, anywhere := console.Handler(p, &console.Options{Local: true}), console.Handler(p, nil)
	status := func(h http.Handler, at, host string) int {
		r := httptest.NewRequest(http.MethodGet, "/letters", nil)
		r.Host = host
		if at != "" {
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(at)))))
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.NotEmpty(t, w.Header().Get("Content-Security-Policy"))
		return w.Code
	}
	for _, host := range []string{"localhost", "LOCALHOST:80", "127.0.0.1:7276", "[::1]", "[::1]:7276"} {
		require.Equal(t, http.StatusOK, status(local, "127.0.0.1:7276", host), host)
		require.Equal(t, http.StatusForbidden, status(local, "10.0.0.7:7276", host), host)
		require.Equal(t, http.StatusOK, status(local, "", host), "by a socket")
	}
	for _, host := range []string{"evil.example", "evil.example:7276", "10.0.0.7", "localhost.evil.example", "127.0.0.1.evil.example", ""} {
		require.Equal(t, http.StatusForbidden, status(local, "[::1]:7276", host), host)
	}
	require.Equal(t, http.StatusOK, status(anywhere, "10.0.0.7:7276", "console.example"))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
