package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/stretchr/testify/require"
)

// This file answers: does top show what goes on, and heed its keys?

func TestTop_NoTerminal_IsOnePicture(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, &pgwake.Config{})
	ctx, cancel := context.WithCancel(context.Background())
	fetching := make(chan struct{})
	go func() {
		defer close(fetching)
		_, _ = p.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"other"}})
	}()
	defer func() { cancel(); <-fetching }()
	require.Eventually(t, func() bool { return p.Stats().Worker.Parked == 1 }, 20*time.Second, 10*time.Millisecond)
	c.ok("enqueue", "x", "--namespace", "mail")
	bury(t, p, pgwake.WorkItem{Name: "x"}, "broken")
	var of topJSON
	require.Eventually(t, func() bool { // a node that has not answered within a second is left out
		of = into[topJSON](c, "top", "--every", "100ms")
		return len(of.Nodes) > 0 && of.Nodes[0].Mode != ""
	}, 20*time.Second, 10*time.Millisecond)
	require.EqualValues(t, 1, of.Due)
	require.EqualValues(t, 1, of.Dead)
	require.Len(t, of.Queues, 1)
	require.Equal(t, "mail", of.Queues[0].Namespace)
	require.NotEmpty(t, of.Nodes)
	require.True(t, of.Nodes[0].Listening)
	require.Equal(t, "hybrid", of.Nodes[0].Mode)
	require.Equal(t, 1, of.Nodes[0].Parked)
	require.Equal(t, []string{"other"}, of.Nodes[0].Lanes[0].Namespaces)
	var out string
	require.Eventually(t, func() bool {
		out = c.ok("top", "--every", "100ms")
		return strings.Contains(out, "hybrid")
	}, 20*time.Second, 10*time.Millisecond)
	require.Contains(t, out, "dead letters 1")
	require.Contains(t, c.refused(exitUsage, "top", "--every", "1ms"), "too often")
}

// A picture of nothing says that nothing waits.
func TestTop_InterruptedBeforeThePicture_IsAFailureAndPrintsNothing(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	c.ok("enqueue", "x")
	for _, args := range [][]string{{"top", "--every", "100ms"}, {"top", "--every", "100ms", "--json"}} {
		ctx, interrupt := context.WithCancel(t.Context())
		c.now = func() time.Time { interrupt(); return time.Now() } // the first look
		r := c.runIn(ctx, args...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.err, "interrupted")
		require.Empty(t, r.out)
	}
}

// modelOf is a view that has seen two pictures, a second apart.
func modelOf(t *testing.T) *topModel {
	t.Helper()
	at := time.Date(2026, 11, 25, 17, 0, 0, 0, time.UTC)
	m := newTopModel(newApp(world{out: io.Discard, err: io.Discard, now: time.Now}), "shop", make(chan picture))
	node := pgwake.NodeInfo{Key: 7, Listening: true, Lanes: []pgwake.LaneInfo{{Queue: pgwake.Worker, Dispatchers: 4, Waiting: true, Fanout: 2}}}
	report := func(notified int64) map[int32]pgwake.NodeReport {
		r := pgwake.NodeReport{Key: 7, Host: "host-a", PID: 42, Stats: pgwake.Stats{Listening: true}}
		r.Stats.Worker.Finds = map[string]int64{"notify": notified, "timer": 1}
		r.Stats.Worker.WakeLatency[10] = notified
		return map[int32]pgwake.NodeReport{7: r}
	}
	var depths []pgwake.QueueDepth
	for _, namespace := range strings.Split("abcdefghijklmnopqrstuvwxyz", "") {
		depths = append(depths, pgwake.QueueDepth{Queue: pgwake.Worker, Namespace: "ns-" + namespace, Due: 1, OldestDue: at.Add(-time.Minute)})
	}
	send := func(pic picture) { m.Update(pictureMsg{pic, true}) }
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 24})
	send(picture{Picture: glance.Picture{At: at, Nodes: []pgwake.NodeInfo{node}, Reports: report(10), Depths: depths, Came: 100, Went: 50}})
	send(picture{Picture: glance.Picture{At: at.Add(time.Second), Nodes: []pgwake.NodeInfo{node}, Reports: report(30), Depths: depths, Oldest: at.Add(-time.Minute), Came: 140,
		Went: 80, Letters: 3}})
	return m
}

func press(m *topModel, keys ...string) (last tea.Cmd) {
	for _, k := range keys {
		code := []rune(k)[0]
		msg := tea.KeyPressMsg{Code: code, Text: k}
		switch k {
		case "tab":
			msg = tea.KeyPressMsg{Code: tea.KeyTab}
		case "down":
			msg = tea.KeyPressMsg{Code: tea.KeyDown}
		}
		_, last = m.Update(msg)
	}
	return last
}

func TestTopModel_TwoPictures_RatesAreWhatHappenedInBetween(t *testing.T) {
	t.Parallel()
	m := modelOf(t)
	require.InDelta(t, 40, m.change.Came, 0.1)
	require.InDelta(t, 30, m.change.Went, 0.1)
	require.EqualValues(t, 20, m.change.Found["notify"])
	require.Zero(t, m.change.Found["timer"])
	out := ansi.Strip(m.text())
	for _, part := range []string{"due 26", "oldest due 1m01s", "in 40.0/s", "out 30.0/s", "dead letters", "latency p99", "█"} {
		require.Contains(t, out, part)
	}
	require.Len(t, strings.Split(out, "\n"), 24, "it fills the window")
}

func TestTopModel_Keys(t *testing.T) {
	t.Parallel()
	m := modelOf(t)
	press(m, "tab")
	require.Contains(t, m.text(), "ns-a")
	require.NotContains(t, m.text(), "ns-z", "it is below")
	for range 50 {
		press(m, "down")
	}
	require.Contains(t, m.text(), "ns-z")
	require.NotContains(t, m.text(), "ns-a")
	press(m, "tab")
	require.Contains(t, m.text(), "host-a")
	press(m, "tab")
	require.Contains(t, m.text(), "DISPATCHERS")
	press(m, "tab")
	require.Contains(t, m.text(), "notify")
	press(m, "tab")
	require.Contains(t, m.text(), "oldest due")
	press(m, "h")
	require.Contains(t, m.text(), "WAKE REASON")

	require.NotContains(t, m.text(), "page before")
	press(m, "?")
	require.Contains(t, m.text(), "page before")

	press(m, "p")
	require.Contains(t, m.text(), "held")
	was := m.now.At
	m.Update(pictureMsg{picture{Picture: glance.Picture{At: was.Add(time.Hour)}}, true})
	require.Equal(t, was, m.now.At)
	press(m, "p")
	m.Update(pictureMsg{picture{err: errors.New("the server is away\x1b[2J")}, true})
	require.Contains(t, m.text(), `the server is away\x1b[2J`)
	require.Equal(t, was, m.now.At, "and what was known stays")

	require.Equal(t, tea.Quit(), press(m, "q")())
}

func TestTopModel_SmallWindow_IsCutAndDoesNotBreak(t *testing.T) {
	t.Parallel()
	m := modelOf(t)
	for _, size := range [][2]int{{1, 1}, {20, 5}, {300, 100}} {
		m.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		for range topPages {
			press(m, "tab")
			require.NotEmpty(t, m.View().Content)
		}
	}
}

func TestTopModel_NarrowWindow_ShowsWhatMattersMost(t *testing.T) {
	t.Parallel()
	m := modelOf(t)
	m.Update(tea.WindowSizeMsg{Width: 40, Height: 60})
	out := ansi.Strip(m.text())
	for _, part := range []string{"dead letters 3", "queries for work", "OLDEST", "1m01s", "host-a", "STATE", "notify", "q quit"} {
		require.Contains(t, out, part)
	}
	press(m, "h")
	require.Contains(t, ansi.Strip(m.text()), "wake reasons (5 of 5)", "there is no room for all their names")
	press(m, "?")
	require.Contains(t, ansi.Strip(m.text()), "quit")
}

func TestTopModel_NothingWasSeenYet_SaysNothingOfQueues(t *testing.T) {
	t.Parallel()
	m := newTopModel(newApp(world{out: io.Discard, err: io.Discard, now: time.Now}), "shop", make(chan picture))
	require.Contains(t, m.text(), "looking…")
	require.NotContains(t, m.text(), "empty")
	require.NotContains(t, m.text(), "00:00:00")
}
