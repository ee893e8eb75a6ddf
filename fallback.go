package pgwake

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what finds work that no notification told of?
//
// Once a FallbackInterval the goroutine of the listener asks for all lanes of the node by one statement on its connection; while there
// is none, one dispatcher of each lane asks.

// planFallback adds jitter, so that nodes that started together do not ask together.
func (l *listener) planFallback() {
	interval := l.e.cfg.FallbackInterval
	l.nextFallback = time.Now().Add(interval + rand.N(min(fallbackJitter, interval/10+1)))
}

// fallsBack reports whether what the periodic statement finds wakes anybody.
func (l *listener) fallsBack() bool {
	return *l.e.cfg.FallbackEnabled && l.e.modes.any(func(m Mode) bool { return m.manner().fallsBack })
}

// fallbackByDispatchers is the fallback while there is no connection: one dispatcher of each lane asks.
func (l *listener) fallbackByDispatchers() {
	if !l.fallsBack() || time.Now().Before(l.nextFallback) {
		return
	}
	l.planFallback()
	if !l.e.mayPoll() {
		return
	}
	l.e.waits.lookAtAll()
	for q := range Queue(queueCount) {
		for _, ln := range l.e.waiters.lanes(q) {
			if ln.filter.manner.fallsBack {
				ln.signal(WakeFallback)
			}
		}
	}
}

// errForgotten ends a session of which the server knows nothing any more.
var errForgotten = errors.New("the table of those who listen has no row of this node any more: it was emptied, or made anew")

// fallback asks, for every lane of the node at once, whether something is due and what comes next. Whoever waits
// for an instance has it looked at, on the pool.
//
// Invariant: what the lanes take for written is there, or the session ends by the next of these at the latest: a new one writes all of it.
func (l *listener) fallback(ctx context.Context, conn *pgx.Conn) error {
	if !l.e.mayPoll() {
		bounded, cancel := context.WithTimeout(ctx, answerDeadline)
		defer cancel()
		return conn.Ping(bounded)
	}
	err := l.lookAtLanes(ctx, conn)
	if errors.Is(err, errForgotten) {
		return err
	}
	l.e.guard(err)
	if err != nil && !conn.IsClosed() && !takesNoWrites(err) { // nothing depends on it
		l.e.log().Warn("pgwake: the fallback failed", "error", err)
		return nil
	}
	return err
}

// lookAtLanes makes the periodic statement.
func (l *listener) lookAtLanes(ctx context.Context, conn *pgx.Conn) error {
	l.e.waiters.retire()
	newest := l.e.lanes.Load() // before they are listed: those that come meanwhile are not taken for retired
	var lanes []*lane
	var looks []look
	var queues []string
	var filters []string
	ids := []int32{} // nil would be NULL, and no row go
	for q := range Queue(queueCount) {
		for _, ln := range l.e.waiters.lanes(q) {
			if !ln.filter.manner.hears {
				continue
			}
			lanes, ids = append(lanes, ln), append(ids, ln.id)
			looks = append(looks, ln.beginFallback())
			queues = append(queues, q.String())
			filters = append(filters, ln.filter.text())
		}
	}

	bounded, cancel := context.WithTimeout(ctx, lookDeadline(filters))
	defer cancel()
	watches := l.e.waits.all()
	beats, abouts := make([]string, len(watches)), make([]string, len(watches))
	for i, w := range watches {
		beats[i], abouts[i] = w.beat, w.about
	}
	nodes := others{joins: l.e.joins.Load()}
	sent := l.e.clock.Now()
	rows, err := conn.Query(bounded, l.e.sql.look, queues, filters, l.e.node, ids, newest, beats, abouts, l.e.sql.waiters)
	if err != nil {
		return fmt.Errorf("fallback: %w", err)
	}
	var at int
	var earliest *time.Time
	var now time.Time
	var alone *bool
	var namespaces *int64
	var news []bool
	var forgotten bool
	_, err = pgx.ForEachRow(rows, []any{&at, &earliest, &now, &alone, &nodes.dead, &nodes.count, &namespaces, &news, &forgotten}, func() error {
		if at == 0 {
			nodes.none = *alone
			for i, w := range watches {
				w.beaten(news[i])
			}
			if l.fallsBack() {
				l.e.waits.fallback(*namespaces)
			}
			return nil
		}
		r := report{now: now}
		if earliest != nil {
			r.earliest = *earliest
		}
		if *l.e.cfg.FallbackEnabled && lanes[at-1].filter.manner.fallsBack {
			lanes[at-1].endFallback(looks[at-1], r, l.e.cfg.FallbackInterval)
			l.e.keepInstants(lanes[at-1], now)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("fallback: %w", err)
	}
	if forgotten {
		return errForgotten
	}
	l.e.clock.Observe(sent, l.e.clock.Now(), now)
	l.e.timer.moved() // by the clock as it was before, it may have slept again on what the lanes have learnt
	l.e.learnOf(nodes)
	l.e.stats.fallbacks.Add(1)
	return nil
}

func (l *lane) beginFallback() look {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.knows(session{})
}

// endFallback wakes a dispatcher for what is due, and re-seeds the timer otherwise.
func (l *lane) endFallback(k look, r report, interval time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !r.more() {
		l.learn(k, r)
		return
	}
	// Of what has just become due others may have been told, and be on their way. And while all dispatchers are in handlers,
	// and the lane is not known empty, whoever comes first looks anyway.
	fresh := r.now.Sub(r.earliest) < min(interval/10, time.Second)
	l.emit(token{reason: WakeFallback, silent: fresh || l.inside == 0 && !l.empty})
}
