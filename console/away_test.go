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
	first := pgwaketest.New(t, &pgwake.Config{Mode: pgwake.ModeDisabled})
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

func TestPage_DatabaseSearchesForLong_SaysSoAtOnceAndHasItThen(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{})
	s.enqueue(t, "needle", "hay", `{}`)
	item, err := s.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.NoError(t, s.DeadLetterWorkItem(t.Context(), item.LockToken, "poison", ""))
	tx, err := s.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE `+s.Schema()+`.dead_letters IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)

	r := must(http.NewRequest(http.MethodGet, s.url+"letters?name=needle&done=purge&n=1", nil))
	r.Header.Set("Accept", "text/html")
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	data, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	answer.Body.Close()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	require.Contains(t, string(data), "Searching…")
	require.NotContains(t, string(data), "data-stream")
	require.Equal(t, "0; url=letters?done=purge&n=1&name=needle&wait=1", answer.Header.Get("Refresh"))
	whole := make(chan string, 2)
	for range cap(whole) {
		go func() {
			r, err := http.Get(s.url + "letters?name=needle&wait=1")
			if err != nil {
				whole <- err.Error()
				return
			}
			defer r.Body.Close()
			data, _ := io.ReadAll(r.Body)
			whole <- string(data)
		}()
	}
	require.NoError(t, tx.Rollback(t.Context()))
	for range cap(whole) {
		body := <-whole
		require.Contains(t, body, "poison")
		require.NotContains(t, body, "wait=1", "links and the stream are those of the page")
	}
	_, body, _ := s.get(t, "letters?name=needle")
	require.Contains(t, body, "poison")
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
	secrets := []string{"bob@example.com", "eve@example.com", "London", "550 no such mailbox", "421 try again", "card declined", "1Z-77", "ring twice", "order 7", "0123456789abcde", "stack trace"}
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
