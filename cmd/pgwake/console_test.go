package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// serving runs `console` until the test ends, and returns where it is.
func (c *cli) serving(args ...string) (url string) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, in := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, append([]string{"console", "--addr", "127.0.0.1:0", "--json"}, args...), world{in: nil, out: in, err: io.Discard, now: c.now,
			environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}})
		in.Close()
	}()
	c.t.Cleanup(func() {
		cancel()
		require.Zero(c.t, <-ended)
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	require.NoError(c.t, err)
	var said struct{ URL string }
	require.NoError(c.t, json.Unmarshal(line, &said))
	return said.URL
}

func fetched(t *testing.T, url, host string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, url, nil)
	require.NoError(t, err)
	if host != "" {
		r.Host = host
	}
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(body)
}

func TestConsole_ServesThisMachineAlone(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, &pgwake.Config{Mode: pgwake.ModePolling})
	bury(t, p, pgwake.WorkItem{Name: "email.send"}, "Handler error")
	url := c.serving()
	status, body := fetched(t, url+"letters", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "email.send")
	require.NotContains(t, body, "Redrive", "it is read-only")
	status, body = fetched(t, url+"tasks", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "No task graph")
	for _, host := range []string{"evil.example", "evil.example:80", "10.0.0.1"} {
		status, _ = fetched(t, url, host)
		require.Equal(t, http.StatusForbidden, status, host)
	}
	for _, host := range []string{"localhost", "[::1]", "[::1]:80"} { // a browser leaves port 80 out
		status, _ = fetched(t, url, host)
		require.Equal(t, http.StatusOK, status, host)
	}

	_, body = fetched(t, c.serving("--actions")+"letters", "localhost:80")
	require.Contains(t, body, "Redrive")
	require.Contains(t, c.refused(exitUsage, "console", "--addr", "0.0.0.0:0"), "no loopback address")
}
