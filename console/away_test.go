package console_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what is there to be seen while the database is slow, or away, and what must never be?

// line is how a Provider reaches its database, and can be cut.
type line struct {
	mu    sync.Mutex
	away  bool
	conns []net.Conn
}

func (l *line) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return nil, errors.New("the database is away")
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err == nil {
		l.conns = append(l.conns, conn)
	}
	return conn, err
}

func (l *line) cut(away bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away = away
	for _, c := range l.conns {
		_ = c.Close()
	}
	l.conns = nil
}

func TestPages_DatabaseIsAway_SaySoAndGoOnWhenItIsBack(t *testing.T) {
	t.Parallel()
	var l line
	first := testschema.Core.New(t, &pgwake.Config{Mode: pgwake.ModeDisabled})
	pools, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	pools.ConnConfig.DialFunc = l.dial
	listen, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	listen.DialFunc = l.dial
	pool, err := pgxpool.NewWithConfig(t.Context(), pools)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: first.Schema(), ListenConfig: listen, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	s := newSite(t, p, &console.Options{})

	tabs := []*tab{open(t, s.url, 1280, 900), open(t, s.url+"letters", 1280, 900)}
	alerts := `[...document.querySelectorAll("[role=alert]")].filter(a => !a.hidden).map(a => a.textContent).join()`
	for _, x := range tabs {
		x.run(chromedp.Poll[chromedp.Void](`document.getElementById("pulse").dataset.state == "live"`))
		require.Empty(t, eval[string](x, alerts))
	}
	l.cut(true)
	for _, x := range tabs {
		x.run(chromedp.Poll[chromedp.Void](alerts + `.includes("This is not up to date")`))
	}
	status, body, _ := s.get(t, "letters")
	require.Equal(t, http.StatusBadGateway, status)
	require.Contains(t, body, "the database is away")
	l.cut(false)
	for _, x := range tabs {
		x.again()
		x.run(chromedp.Poll[chromedp.Void](`!` + alerts + ` && document.getElementById("pulse").dataset.state == "live"`))
	}
}

// bury makes a dead letter.
func (s *site) bury(t *testing.T, name, namespace string) {
	t.Helper()
	s.enqueue(t, name, namespace, `{}`)
	item, err := s.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{namespace}})
	require.NoError(t, err)
	require.NoError(t, s.DeadLetterWorkItem(t.Context(), item.LockToken, "poison", ""))
}

// locked has whoever reads dead letters wait until the transaction ends.
func (s *site) locked(t *testing.T) pgx.Tx {
	t.Helper()
	tx, err := s.Pool().Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), `LOCK TABLE `+s.Schema()+`.dead_letters IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	return tx
}

// asBrowser asks for a page as one does that shows the beginning of it, and returns that. The rest is what can be read of the answer then.
func (s *site) asBrowser(t *testing.T, path, until string) (beginning string, answer *http.Response) {
	t.Helper()
	r := must(http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+path, nil))
	r.Header.Set("Accept", "text/html")
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { answer.Body.Close() })
	require.Equal(t, http.StatusOK, answer.StatusCode)
	for chunk := make([]byte, 4096); !strings.Contains(beginning, until); {
		n, err := answer.Body.Read(chunk)
		require.NoError(t, err, beginning)
		beginning += string(chunk[:n])
	}
	return beginning, answer
}

func TestPage_DatabaseSearchesForLong_BeginsAtOnceAndHasItThen(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	s.bury(t, "needle", "hay")
	tx := s.locked(t)
	top, answer := s.asBrowser(t, "letters?name=needle&done=purge&n=1", "Searching…")
	require.Contains(t, top, `rel="stylesheet"`, "style and script come meanwhile")
	require.Contains(t, top, "Schedules", "so does the navigation")
	require.NotContains(t, top, "<h1>")
	require.NoError(t, tx.Rollback(t.Context()))
	rest, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Contains(t, string(rest), "poison")
	require.Contains(t, string(rest), "1 removed.")
	require.True(t, strings.HasSuffix(strings.TrimSpace(string(rest)), "</html>"))
}

// What goes wrong once a page has begun is said on it.
func TestPage_SearchFailsAfterItHasBegun_SaysSo(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	tx := s.locked(t)
	_, answer := s.asBrowser(t, "letters", "Searching…")
	_, err := tx.Exec(t.Context(), `ALTER TABLE `+s.Schema()+`.dead_letters RENAME COLUMN reason TO gone`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	rest, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Contains(t, string(rest), "Bad Gateway")
	require.NotContains(t, string(rest), `id="live"`)
}

// Searches take no more than half of the connections, however many there are, and end when nobody waits for them any more.
func TestPages_ManySearchForLong_LeaveConnectionsAndEndWithTheirRequests(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	s.locked(t)
	ctx, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	conns := int(s.Pool().Config().MaxConns)
	for i := range 2 * conns {
		path := []string{"letters", "letters?name=x", "letter?id=7", "letters?namespace=x"}[i%4]
		all.Go(func() {
			r := must(http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil))
			if answer, err := http.DefaultClient.Do(r); err == nil {
				answer.Body.Close()
			}
		})
	}
	searching := func() (n int) {
		require.NoError(t, s.Pool().QueryRow(t.Context(), `SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE NOT l.granted AND c.relname = 'dead_letters' AND n.nspname = $1`, s.Schema()).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return searching() == conns/2 }, patience, pollEvery)
	s.enqueue(t, "mail", "shop", `{}`) // what the program itself does goes on
	require.LessOrEqual(t, searching(), conns/2)
	leave()
	all.Wait()
	require.Eventually(t, func() bool { return searching() == 0 }, patience, pollEvery)
}

// A hook that panics fails its request, and nothing else.
func TestPage_HookPanics_FailsAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Redact: func(console.Payload) []byte { panic(http.ErrAbortHandler) }})
	s.enqueue(t, "mail", "shop", `{"a": 1}`)
	_, err := http.Get(s.url + "items") //nolint:bodyclose // there is none
	require.Error(t, err)
	status, _, _ := s.get(t, "letters")
	require.Equal(t, http.StatusOK, status)
}

// What Redact hides is nowhere: on no page, in no stream, in no file and in no attribute.
func TestRedact_WhatItHidesIsNowhere(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{Authorize: anybody, Redact: func(console.Payload) []byte { return []byte(`"hidden"`) }}, false)
	secrets := []string{"bob@example.com", "eve@example.com", "London", "550 no such mailbox", "Handler error", "421 try again", "card declined", "1Z-77", "ring twice", "order 7", "0123456789abcde", "stack trace"}
	hidden := 0
	for _, of := range w.paths() {
		_, body, _ := w.get(t, of[0])
		page, query, _ := strings.Cut(of[0], "?")
		bodies := []string{body}
		if m := regexp.MustCompile(`data-stream="\./([^"]*)"`).FindStringSubmatch(body); m != nil {
			bodies = append(bodies, w.listen(t, strings.ReplaceAll(m[1], "&amp;", "&")).next("live"))
		}
		for _, m := range regexp.MustCompile(`href="(`+page+`\?[^"]*download=[^"]*)"`).FindAllStringSubmatch(body, -1) {
			_, file, _ := w.get(t, strings.ReplaceAll(m[1], "&amp;", "&"))
			bodies = append(bodies, file)
		}
		for _, b := range bodies {
			for _, secret := range secrets {
				require.NotContains(t, b, secret, "%s %s", page, query)
			}
			hidden += strings.Count(b, "hidden&#34;") + strings.Count(b, `"hidden"`)
		}
	}
	require.Greater(t, hidden, 100, "it was there to be hidden")
}

// Style and script are kept for ever under a name that changes with them; a page never is.
func TestAssets_AreKeptAndPagesAreNot(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	_, body, h := s.get(t, "letters")
	require.Equal(t, "no-store", h.Get("Cache-Control"))
	names := regexp.MustCompile(`(?:href|src)="\./(assets/[^"]*)"`).FindAllStringSubmatch(body, -1)
	require.Len(t, names, 3)
	require.Contains(t, body, ".js\" defer>", "nothing waits for the script before it is painted")
	for _, name := range names {
		status, _, h := s.get(t, name[1])
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, h.Get("Cache-Control"), "immutable")
		r := must(http.NewRequest(http.MethodGet, s.url+name[1], nil))
		r.Header.Set("If-None-Match", h.Get("ETag"))
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, http.StatusNotModified, answer.StatusCode)
	}
	status, _, _ := s.get(t, "assets/console.000000000000.js")
	require.Equal(t, http.StatusNotFound, status)
	for _, site := range []string{"cross-site", "same-site"} { // also of another name of the same site
		r := must(http.NewRequest(http.MethodPost, s.url+"act", strings.NewReader("verb=purge&all=yes&sure=yes")))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Sec-Fetch-Site", site)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, http.StatusForbidden, answer.StatusCode)
	}
}
