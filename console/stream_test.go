package console_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// listening is a stream, without a browser.
type listening struct {
	t     *testing.T
	end   func()
	lines *bufio.Scanner
}

// listen opens a stream, which ends with the test.
func (s *site) listen(t *testing.T, path string) *listening {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	require.NoError(t, err)
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode)
	require.Equal(t, "text/event-stream", answer.Header.Get("Content-Type"))
	l := &listening{t: t, lines: bufio.NewScanner(answer.Body), end: func() { cancel(); answer.Body.Close() }}
	l.lines.Buffer(nil, 8<<20)
	t.Cleanup(l.end)
	return l
}

// next returns what the next event of a kind says.
func (l *listening) next(kind string) string {
	l.t.Helper()
	is := false
	for l.lines.Scan() {
		if of, event := strings.CutPrefix(l.lines.Text(), "event: "); event {
			is = of == kind
		} else if data, says := strings.CutPrefix(l.lines.Text(), "data: "); says && is {
			var text string
			require.NoError(l.t, json.Unmarshal([]byte(data), &text))
			return text
		}
	}
	require.FailNow(l.t, "the stream has ended", "%v", l.lines.Err())
	return ""
}

// That nobody listens is said when that is known, and not before.
func TestStream_NodesAreAsked_NobodyListensOnlyWhenThatIsSo(t *testing.T) {
	t.Parallel()
	until := func(l *listening, text string) (before []string) {
		for {
			live := l.next("live")
			if strings.Contains(live, text) {
				return before
			}
			before = append(before, live)
		}
	}
	some := newSite(t, nil, nil)
	require.Eventually(t, func() bool {
		nodes, err := some.ListNodes(t.Context())
		return err == nil && len(nodes) == 1 && nodes[0].Listening
	}, patience, pollEvery)
	for _, live := range until(some.listen(t, "stream/nodes"), "<code>") {
		require.NotContains(t, live, "Nobody listens.")
	}
	none := newSite(t, testschema.Core.New(t, &pgwake.Config{Mode: pgwake.ModePolling}), nil)
	until(none.listen(t, "stream/nodes"), "Nobody listens.")
	until(none.listen(t, "stream/overview"), "nobody listens")
}

// A page of another site cannot have streams be open, and whoever asks for the head of one does not wait for its end.
func TestStream_OfAnotherSiteOrItsHeadAlone_IsNotBegun(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	for method, site := range map[string]string{http.MethodGet: "cross-site", http.MethodHead: "same-origin"} {
		r := must(http.NewRequestWithContext(t.Context(), method, s.url+"stream/overview", nil))
		r.Header.Set("Sec-Fetch-Site", site)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		_, err = io.ReadAll(answer.Body) // it has an end
		require.NoError(t, err)
		answer.Body.Close()
		want := map[string]int{http.MethodGet: http.StatusForbidden, http.MethodHead: http.StatusOK}[method]
		require.Equal(t, want, answer.StatusCode, method)
	}
}

func TestStream_MoreThanThereMayBe_AreRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{MaxStreams: 2})
	first := s.listen(t, "stream/overview")
	s.listen(t, "stream/letters")
	status, _, h := s.get(t, "stream/queues")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, h.Get("Retry-After"))
	first.end()
	require.Eventually(t, func() bool { // as soon as the server has noticed
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.DefaultClient.Do(must(http.NewRequestWithContext(ctx, http.MethodGet, s.url+"stream/queues", nil)))
		if err != nil {
			return false
		}
		defer r.Body.Close()
		return r.StatusCode == http.StatusOK
	}, patience, pollEvery)
}
