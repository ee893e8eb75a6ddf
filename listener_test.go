package pgwake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseNote_WhatTheServerWrites_IsUnderstood(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	ear := plain(t, p.cfg.Schema)
	mustExec(t, ear, "LISTEN "+channelOf(t, p, Worker))
	at := time.Date(2031, 5, 6, 7, 8, 9, 123456000, time.UTC)
	for _, c := range []struct {
		next      *time.Time
		namespace *string
		want      note
	}{
		{nil, nil, note{due: 3}},
		{&at, nil, note{due: 3, next: at}},
		{&at, new("red"), note{due: 3, next: at, namespace: "red"}},
	} {
		mustExec(t, conn, `SELECT notify_queue('worker', 3, $1, $2)`, c.next, c.namespace)
		n, err := ear.WaitForNotification(t.Context())
		require.NoError(t, err)
		got := parseNote(n.Payload)
		require.True(t, c.want.next.Equal(got.next))
		got.next = c.want.next
		require.Equal(t, c.want, got)
	}
}

func channelOf(t *testing.T, p *Provider, q Queue) (channel string) {
	t.Helper()
	require.NoError(t, plain(t, p.cfg.Schema).QueryRow(t.Context(), `SELECT channel($1)`, q.String()).Scan(&channel))
	return channel
}

// Whatever a stranger or a newer version sends must at worst cost a look.
func FuzzParseNote(f *testing.F) {
	for _, s := range []string{"", "1 0 *", "0 1763720000123456 red", "1", "x y z", "1 2", "-1 -1 -1", "9999999999999999999 0 *"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		n := parseNote(payload)
		if n.due <= 0 && n.next.IsZero() {
			require.Regexp(t, `^[-+]?\d+ [-+]?0+ `, payload, "a payload that is not clear must make somebody look")
		}
	})
}

func TestListener_BackendKilledUnderLoad_LosesNothingAndListensAgain(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	for range 5 {
		wait := fetchWork(t, p, longPoll)
		awaitParked(t, p, Worker, 1)
		reconnects := p.Stats().Reconnects
		mustExec(t, producer, `SELECT pg_terminate_backend($1), enqueue_work('w')`, p.engine.listener.pid.Load())
		require.NoError(t, p.AckWorkItem(t.Context(), get(t, wait).item.LockToken, nil))
		eventually(t, "it listens again", func() bool { return p.Stats().Reconnects > reconnects && p.Stats().Listening })
		require.True(t, p.Health().OK)
	}
}

func TestListener_CannotConnect_ProviderPollsAndSaysSo(t *testing.T) {
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port = 1 // nobody listens there
	config.Fallbacks = nil
	p := testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config})
	require.False(t, p.Stats().Listening)
	require.False(t, p.Health().OK)
	require.Contains(t, p.Health().Problems[0], "not listening")
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('polled')`)
	require.Equal(t, "polled", get(t, wait).item.Name)
	require.True(t, p.Stats().Worker.Aggressive)
}
