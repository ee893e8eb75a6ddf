package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: how long does a fetch wait that finds nothing?

const (
	// overrun is how much longer than its poll timeout a fetch may take, a query apart.
	overrun = 200 * time.Millisecond

	// atOnce is how long a fetch may take that does not wait, a query apart.
	atOnce = 200 * time.Millisecond
)

// statementTime is how long one takes here and now that is no fetch.
func (n *node) statementTime(t *testing.T, looksAt pgwake.Queue) time.Duration {
	t.Helper()
	n.clock(t, looksAt) // the first may connect
	return queryTime(func() { n.clock(t, looksAt) })
}

var longPolling = group{"long_polling", []row{
	{"short_poll_returns_immediately", func(t *testing.T, n *node) {
		n = n.shortPoller(t)
		within(t, atOnce+n.statementTime(t, pgwake.Orchestrator), func() { n.requireNoTurnWith(t, soon) })
	}},
	{"long_poll_waits_for_timeout", func(t *testing.T, n *node) {
		const timeout = 500 * time.Millisecond
		begun := time.Now()
		n.requireNoTurnWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
		require.GreaterOrEqual(t, time.Since(begun), timeout)
	}},
	{"fetch_respects_timeout_upper_bound", func(t *testing.T, n *node) {
		const timeout = 300 * time.Millisecond
		within(t, timeout+overrun+n.statementTime(t, pgwake.Orchestrator), func() { n.requireNoTurnWith(t, &pgwake.FetchOptions{PollTimeout: timeout}) })
	}},
	{"short_poll_work_item_returns_immediately", func(t *testing.T, n *node) {
		n = n.shortPoller(t)
		within(t, atOnce+n.statementTime(t, pgwake.Worker), func() { n.requireNoWorkWith(t, soon) })
	}},
	{"long_poll_work_item_waits_for_timeout", func(t *testing.T, n *node) {
		const timeout = 500 * time.Millisecond
		begun := time.Now()
		n.requireNoWorkWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
		require.GreaterOrEqual(t, time.Since(begun), timeout)
	}},
}}
