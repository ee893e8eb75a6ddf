package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: which Providers does a process have while it soaks, and how is it?

// members are the Providers of a process.
type members struct {
	mu    sync.Mutex
	live  map[*pgwake.Provider]bool
	gone  vitals      // counters of those that have been closed
	brief []time.Time // when each dispatcher that is gone after a moment began
	kept  [][]byte    // a planted leak of memory
}

// vitals are what a process knows of itself.
type vitals struct {
	Heap       uint64 // in use, after a collection, in bytes
	Goroutines int
	Brief      int // lanes that were used a moment, and have not been idle for long enough to be dropped

	// Counters of all Providers so far.
	Items, Looks, Fallbacks    int64
	FallbackFinds, ScoutFinds  int64
	Panics, Reconnects, Opened int64
}

func (v *vitals) add(s pgwake.Stats) {
	for _, q := range []pgwake.QueueStats{s.Worker, s.Orchestrator} {
		v.Items += q.Items
		v.Looks += q.Looks
		v.FallbackFinds += q.FallbackFinds
		v.ScoutFinds += q.ScoutFinds
	}
	v.Fallbacks += s.Fallbacks
	v.Panics += s.Panics
	v.Reconnects += s.Reconnects
	v.Opened++
}

func (w *workload) sample() vitals {
	m := &w.members
	m.mu.Lock()
	v := m.gone
	for p := range m.live {
		v.add(p.Stats())
	}
	for len(m.brief) > 0 && time.Since(m.brief[0]) > briefLife {
		m.brief = m.brief[1:]
	}
	v.Brief = len(m.brief)
	m.mu.Unlock()
	var s runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&s)
	v.Heap, v.Goroutines = s.HeapInuse, runtime.NumGoroutine()
	return v
}

func (m *members) joined(p *pgwake.Provider) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.live == nil {
		m.live = map[*pgwake.Provider]bool{}
	}
	m.live[p] = true
}

func (m *members) left(p *pgwake.Provider) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.live, p)
	m.gone.add(p.Stats())
}

// member is a Provider from its opening to its end, with dispatchers.
func (w *workload) member(life context.Context, rng *rand.Rand, config *pgwake.Config, whole bool) {
	ctx, cancel := context.WithTimeout(life, 2*verbTimeout)
	defer cancel()
	config.FallbackInterval, config.AggressivePolicy = fallbackInterval, pgwake.Never
	listen, err := pgx.ParseConfig(w.ListenURL)
	var p *pgwake.Provider
	if err == nil {
		config.ListenConfig = listen
		p, err = pgwake.New(ctx, w.pool, config)
	}
	if err != nil {
		if life.Err() == nil {
			w.ledger.write(wrong, entry{Err: fmt.Sprintf("open: %v", err)})
			nap(life, time.Second)
		}
		return
	}
	w.members.joined(p)
	w.dispatch(life, rng, p, whole)
	closing, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	if err := p.Close(closing); err != nil {
		w.ledger.write(wrong, entry{Err: fmt.Sprintf("close: %v", err)})
	}
	w.members.left(p)
}
