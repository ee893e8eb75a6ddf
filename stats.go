package pgwake

import (
	"context"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// This file answers: what has the engine been doing? Reading it costs no query.

// Stats is a snapshot of a Provider's engine. Counters count from its creation.
type Stats struct {
	Mode      Mode
	Listening bool // the LISTEN connection is up

	// Hibernating: it is not, because there has been no work for Config.HibernateAfter. Hibernations says how often
	// that has begun.
	Hibernating  bool
	Hibernations int64

	Orchestrator QueueStats
	Worker       QueueStats

	Waits     int   // calls of WaitForStatus, WaitForInstance and WaitForNamespaces that wait at this moment
	WaitReads int64 // queries made for all of them together

	Fallbacks  int64 // periodic statements on the LISTEN connection
	Breaker    BreakerStats
	Reconnects int64 // LISTEN connections made after the first, but for those that ended a hibernation
	Panics     int64 // engine goroutines that panicked and were restarted

	// ClockOffset is how far the server's clock is ahead of the local one, as far as round trips can tell.
	ClockOffset time.Duration
}

// BreakerStats is what the circuit breaker of polls, the fallback included, does. Queries for work have to succeed: 10 failures in a row have
// polls skipped for a minute, or until one that is no poll succeeds; then 3 successes in a row are as good as if nothing had been.
type BreakerStats struct {
	Open     bool  // polls are skipped
	Skipped  int64 // so many polls so far
	Failures int   // of queries for work, in a row
	Err      error // of the last of these
}

// QueueStats is what happened on one queue.
type QueueStats struct {
	Parked     int  // dispatchers that wait at this moment
	Settled    bool // who waits here looks only when told to; false while a transaction is open that may not tell, and while somebody looks
	Aggressive bool // the queue is being polled because something went wrong

	Notifications int64 // heard, of what this queue is fed by other sessions
	PutOff        int64 // notifications, and instants, whose look had to wait, for a second at most: more came than there was work
	Unreadable    int64 // those of them that nobody understood: of strangers, or of another version; somebody looked all the same

	// NotificationLag is the time from the beginning of the transactions that sent notifications to when they were heard.
	NotificationLag Histogram

	Looks  int64            // queries for work
	Polls  int64            // statements that looked for several lanes at once, such as those of many namespaces: what else polls is in Looks
	Tokens map[string]int64 // wake-ups by reason: notify, timer, chain, local, reconnect, fallback, scout, settle
	Finds  map[string]int64 // queries that found work by reason; "fetch" is the query at the start of a fetch
	Items  int64            // items, or turns, fetched

	ItemsBy map[Path]int64 // Items by how they were found

	Misses   int64 // queries that somebody, or the clock, had asked for, and that found nothing: another was faster
	Renewals int64 // leases renewed, but for those in transactions of the caller

	// PassedOn is how often nobody here could come for what this node alone knew of, such as a notification to it or an
	// enqueue of its own, so that another was to be told.
	PassedOn int64

	// FallbackFinds and ScoutFinds count the queries that found work which no notification and no timer
	// announced, not even within the next 100 ms: work that had been due for a second or more when the fallback saw it (for
	// a tenth of FallbackInterval, if that is less). They are 0 unless something is broken; but in ModePolling, and where
	// AggressivePolicy is OnEveryWake, polls find what others enqueue, and may be the first to.
	FallbackFinds int64
	ScoutFinds    int64

	// WakeLatency is the time from a signal to the item in hand.
	WakeLatency Histogram
}

// Histogram counts durations in buckets: bucket i holds those under 2^i microseconds that no earlier
// bucket holds; the last one holds the rest.
type Histogram [24]int64

// Quantile returns an upper bound of the q-quantile (0 to 1), exact to a factor of two; 0 if empty.
func (h *Histogram) Quantile(q float64) time.Duration {
	var total int64
	for _, n := range h {
		total += n
	}
	if total == 0 {
		return 0
	}
	rank := int64(q * float64(total-1))
	for i, n := range h {
		if rank < n {
			return time.Duration(1<<i) * time.Microsecond
		}
		rank -= n
	}
	return time.Duration(1<<(len(h)-1)) * time.Microsecond
}

type histogram struct {
	buckets [len(Histogram{})]atomic.Int64
	metric  metric.Float64Histogram
	as      []metric.RecordOption
}

// export has what is observed recorded in seconds. It is called before observe is.
func (h *histogram) export(to metric.Float64Histogram, as metric.RecordOption) {
	h.metric, h.as = to, []metric.RecordOption{as}
}

func (h *histogram) observe(d time.Duration) {
	d = max(d, 0)
	h.buckets[min(bits.Len64(uint64(d.Microseconds())), len(h.buckets)-1)].Add(1)
	if h.metric != nil {
		h.metric.Record(context.Background(), d.Seconds(), h.as...)
	}
}

func (h *histogram) read(to *Histogram) {
	for i := range h.buckets {
		to[i] = h.buckets[i].Load()
	}
}

// queueStats are the counters behind QueueStats.
type queueStats struct {
	notifications atomic.Int64
	putOff        atomic.Int64
	unreadable    atomic.Int64
	lag           histogram

	looks       atomic.Int64
	polls       atomic.Int64
	items       atomic.Int64
	misses      atomic.Int64
	renewals    atomic.Int64
	passedOn    atomic.Int64
	tokens      [wakeReasons]atomic.Int64
	finds       [wakeReasons]atomic.Int64
	itemsBy     [len(paths)]atomic.Int64
	unannounced [wakeReasons]atomic.Int64
	latency     histogram
}

// understood takes note of a notification that was read, or could not be.
func (s *queueStats) understood(ok bool) {
	if !ok {
		s.unreadable.Add(1)
	}
}

type engineStats struct {
	queues    [queueCount]queueStats
	fallbacks atomic.Int64
	waitReads atomic.Int64
}

// Stats returns a snapshot. It is cheap and safe for concurrent use.
func (p *Provider) Stats() Stats { return p.engine.snapshot() }

func (e *engine) snapshot() Stats {
	s := Stats{
		Mode:      e.modes.mode(""),
		Waits:     e.waits.parked(),
		WaitReads: e.stats.waitReads.Load(),
		Fallbacks: e.stats.fallbacks.Load(),
		Breaker:   e.breakerStats(),
		Panics:    e.group.Panics(),
	}
	if e.listener != nil {
		h := &e.listener.hibernation
		s.Listening = e.epoch() != 0
		s.Hibernating, s.Hibernations = !s.Listening && h.on.Load(), h.times.Load()
		s.Reconnects = max(int64(e.listener.sessions.Load()-h.returns.Load())-1, 0)
	}
	s.ClockOffset, _ = e.clock.Offset()
	s.Orchestrator = e.queueStats(Orchestrator)
	s.Worker = e.queueStats(Worker)
	return s
}

func (e *engine) breakerStats() BreakerStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := &e.breaker
	return BreakerStats{Open: b.state == breakerOpen, Skipped: b.skipped, Failures: b.failures, Err: b.err}
}

func (e *engine) queueStats(q Queue) QueueStats {
	for _, l := range e.waiters.lanes(q) {
		l.audit()
	}
	c := &e.stats.queues[q]
	s := QueueStats{
		Parked:        e.waiters.parked(q),
		Settled:       e.waiters.settled(q),
		Aggressive:    e.isAggressive(q),
		Notifications: c.notifications.Load(),
		PutOff:        c.putOff.Load(),
		Unreadable:    c.unreadable.Load(),
		Looks:         c.looks.Load(),
		Polls:         c.polls.Load(),
		Items:         c.items.Load(),
		Misses:        c.misses.Load(),
		Renewals:      c.renewals.Load(),
		PassedOn:      c.passedOn.Load(),
		Tokens:        make(map[string]int64, wakeReasons),
		Finds:         make(map[string]int64, wakeReasons),
		ItemsBy:       make(map[Path]int64, len(paths)),
		FallbackFinds: c.unannounced[WakeFallback].Load(),
		ScoutFinds:    c.unannounced[WakeScout].Load(),
	}
	for why := range WakeReason(wakeReasons) {
		s.Tokens[why.String()] = c.tokens[why].Load()
		s.Finds[why.String()] = c.finds[why].Load()
	}
	delete(s.Tokens, WakeFetch.String())
	for i, path := range paths {
		s.ItemsBy[path] = c.itemsBy[i].Load()
	}
	c.latency.read(&s.WakeLatency)
	c.lag.read(&s.NotificationLag)
	return s
}

// Health says whether a Provider does its work as designed.
type Health struct {
	OK       bool
	Problems []Problem // what is wrong; empty if OK
}

// Problem is something that is wrong.
type Problem struct {
	With Part
	Text string // for an operator
}

func (p Problem) String() string { return p.Text }

// Part is what a Problem is with.
type Part string

const (
	PartProvider      Part = "provider"      // it is closed
	PartListener      Part = "listener"      // there is no LISTEN connection
	PartNotifications Part = "notifications" // they come late, or more of them than there is work
	PartPolls         Part = "polls"         // they are skipped; see BreakerStats
	PartDatabase      Part = "database"      // queries for work fail
	PartProducers     Part = "producers"     // their transactions stay open
	PartEngine        Part = "engine"        // a goroutine panicked
)

// Health reports on the engine and asks the database nothing. A Provider that is not OK, and
// not closed, still delivers work wherever the database answers: by polling, or with AggressivePolicy Never by the
// fallback, if that is enabled. One that hibernates is OK.
func (p *Provider) Health() Health { return p.engine.health() }

func (e *engine) health() Health {
	var problems []Problem
	note := func(with Part, text string) {
		if text != "" {
			problems = append(problems, Problem{with, text})
		}
	}
	if e.ctx.Err() != nil {
		return Health{Problems: []Problem{{PartProvider, "closed"}}}
	}
	if e.isDeaf() {
		problem := "not listening; " + e.listener.instead()
		if err := e.listener.err(); err != nil {
			problem += ": " + err.Error()
		}
		note(PartListener, problem)
	}
	if e.listener != nil {
		note(PartNotifications, e.listener.lag.problem(e.clock.Now()))
		note(PartNotifications, e.trust.problem())
	}
	if b := e.breakerStats(); b.Failures > 0 {
		note(PartDatabase, fmt.Sprintf("queries for work fail: %d in a row, the last with: %v", b.Failures, b.Err))
		if b.Open {
			note(PartPolls, "polls are skipped until queries for work succeed, or for a minute")
		}
	}
	for _, s := range e.settlers {
		note(PartProducers, s.problem())
	}
	if e.group.Degraded() {
		note(PartEngine, "a goroutine of the engine panicked and is about to be restarted")
	}
	return Health{OK: len(problems) == 0, Problems: problems}
}

func (l *listener) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastErr
}
