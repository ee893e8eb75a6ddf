package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/bench/keep"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/migrations"
)

// This file answers: how does a round of a scenario go, and what does it come to?

const (
	warmUp   = 2 * time.Second
	sampling = 250 * time.Millisecond // of dead tuples
	patience = 6 * lockTimeout        // until all has been done, when the load has ended
)

// settings of the server: with the default, a minute between two rounds of autovacuum, dead tuples would only grow in so short a run,
// trouble or not.
var settings = map[string]string{"autovacuum_naptime": "2s"}

// The names of phases that all scenarios have.
const (
	before = "before"
	during = "during"
	after  = "after"
)

// result is what a round of a scenario comes to. Durations are in nanoseconds.
type result struct {
	Scenario string    `json:"scenario"`
	Started  time.Time `json:"started"`
	Commit   string    `json:"commit"` // of the program, and so of the library
	Postgres string    `json:"postgres"`
	Fsync    bool      `json:"fsync"`
	Platform string    `json:"platform"`
	CPUs     int       `json:"cpus"`
	Busy     float64   `json:"busy,omitempty"` // load average of the minute before the program began, where the system tells

	Rate    int           `json:"rate"`    // items/s that are enqueued
	Trouble time.Duration `json:"trouble"` // how long it lasts
	Phases  []*phase      `json:"phases"`

	Downtime  time.Duration `json:"downtime,omitempty"`   // of the server
	FirstItem time.Duration `json:"first_item,omitempty"` // from when the server answers again to the first handler of an item that is newer
	RateBack  time.Duration `json:"rate_back,omitempty"`  // from there to the beginning of a second with 90% of the rate before; -1: never

	Items      int            `json:"items"`      // whose enqueue returned
	Lost       int            `json:"lost"`       // of these; no handler ever began
	Left       int            `json:"left"`       // rows in the queue, or among the dead letters, in the end
	Duplicates int            `json:"duplicates"` // handlers that began beyond the first of their item
	Refused    int            `json:"refused"`    // enqueues that failed, and were repeated
	Unknown    int            `json:"unknown"`    // enqueues whose outcome nobody knows
	Counts     map[string]int `json:"counts,omitempty"`

	Soaked *soaked  `json:"soaked,omitempty"`
	Report string   `json:"report,omitempty"` // what another program said of itself, or of the scenario
	Broken []string `json:"broken,omitempty"` // promises
}

// phase is a stretch of a round.
type phase struct {
	Name      string           `json:"name"`
	Length    time.Duration    `json:"length"`
	Enqueued  float64          `json:"enqueued"`   // items/s whose enqueue returned
	PerSecond float64          `json:"per_second"` // items/s whose first handler began
	Pickup    measure.Samples  `json:"pickup"`     // of these: from the return of the enqueue to the handler
	Dead      int64            `json:"dead"`       // tuples of all tables, at most
	Finds     map[string]int64 `json:"finds"`      // queries that found work, by what made them

	from, to time.Time
}

// of is the phase with this name, or an empty one.
func (r *result) of(name string) *phase {
	for _, p := range r.Phases {
		if p.Name == name {
			return p
		}
	}
	return &phase{Name: name, Finds: map[string]int64{}}
}

// trial is a round of a scenario under way.
type trial struct {
	*result
	o      *options
	server *devpg.Server
	load   *load

	mu   sync.Mutex
	dead []deadTuples
}

type deadTuples struct {
	at    time.Time
	count int64
}

// runTrial does a round.
func runTrial(ctx context.Context, s scenario, o *options) (r *result, err error) {
	r = &result{Scenario: s.name, Started: time.Now(), Commit: keep.Commit(), Rate: s.rate, Trouble: o.trouble, Fsync: true, Counts: map[string]int{},
		Platform: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Busy: o.busy}
	t := &trial{result: r, o: o}
	if s.once { // it brings its own server and load
		if err := s.run(ctx, t); err != nil {
			return nil, err
		}
		r.Broken = append(r.Broken, s.keep(r)...)
		return r, nil
	}
	t.server, err = devpg.Start(ctx, &devpg.Options{IgnoreURL: true, Fsync: true, Settings: settings})
	if err != nil {
		return nil, err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		err = errors.Join(err, t.server.Stop(stopping))
	}()
	r.Postgres = t.server.Version
	direct, err := pgx.ParseConfig(t.server.URL)
	if err != nil {
		return nil, err
	}
	if err := migrations.Up(ctx, direct, schema); err != nil {
		return nil, err
	}
	t.load = newLoad(t.server.URL, s.rate)
	if err := t.watched(ctx, func() error { return s.run(ctx, t) }); err != nil {
		return nil, errors.Join(err, t.load.close())
	}
	if err := t.judge(ctx); err != nil {
		return nil, err
	}
	r.Broken = append(r.Broken, s.keep(r)...)
	return r, nil
}

// loadAverage is how many wanted a CPU in the last minute, or 0.
func loadAverage() (average float64) {
	text, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		_, _ = fmt.Sscan(string(text), &average)
	}
	return average
}

// settledLoad is the load average when that of what has just ended, such as another scenario, is forgotten: at the latest after two minutes.
func settledLoad(ctx context.Context) (average float64) {
	for end := time.Now().Add(2 * time.Minute); ; {
		average = loadAverage()
		if average <= float64(runtime.NumCPU()) || time.Now().After(end) || !pause(ctx, time.Second) {
			return average
		}
	}
}

// watched samples the dead tuples while f runs.
func (t *trial) watched(ctx context.Context, f func() error) error {
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		for pause(watching, sampling) {
			_ = t.ask(watching, func(conn *pgx.Conn) error { // not while the server is away
				d := deadTuples{at: time.Now()}
				err := conn.QueryRow(watching, `SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables WHERE schemaname = $1`, schema).Scan(&d.count)
				t.mu.Lock()
				defer t.mu.Unlock()
				if err == nil {
					t.dead = append(t.dead, d)
				}
				return err
			})
		}
	})
	err := f()
	stop()
	watch.Wait()
	return err
}

// ask has a connection of its own.
func (t *trial) ask(ctx context.Context, talk func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, t.server.URL)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	return talk(conn)
}

// threePhases has the load go on directly, calm, with trouble, and calm again. The trouble is to end with its context.
func (t *trial) threePhases(ctx context.Context, trouble func(ctx context.Context) error) error {
	if err := t.begin(ctx, way{}); err != nil {
		return err
	}
	if err := t.phase(ctx, before, t.o.trouble/2, nil); err != nil {
		return err
	}
	if err := t.phase(ctx, during, t.o.trouble, trouble); err != nil {
		return err
	}
	if err := t.phase(ctx, after, t.o.trouble/2, nil); err != nil {
		return err
	}
	return t.load.drain(ctx, patience)
}

// begin begins the load, and lets it warm up.
func (t *trial) begin(ctx context.Context, w way) error {
	if err := t.load.begin(ctx, w); err != nil {
		return err
	}
	if !pause(ctx, warmUp) {
		return context.Cause(ctx)
	}
	t.load.keepPace()
	return nil
}

// phase is a stretch of so long, with trouble or without.
func (t *trial) phase(ctx context.Context, name string, length time.Duration, trouble func(ctx context.Context) error) error {
	p := &phase{Name: name, from: time.Now()}
	found := t.load.counts()
	lasting, end := context.WithTimeout(ctx, length)
	defer end()
	var err error
	if trouble != nil {
		if err = trouble(lasting); lasting.Err() != nil && ctx.Err() == nil {
			err = nil // that it ended is its end
		}
	}
	if err == nil {
		<-lasting.Done()
		err = context.Cause(ctx)
	}
	p.to = time.Now()
	p.Length = p.to.Sub(p.from)
	p.Finds = t.load.counts()
	maps.DeleteFunc(p.Finds, func(reason string, n int64) bool {
		p.Finds[reason] = n - found[reason]
		return p.Finds[reason] == 0
	})
	t.Phases = append(t.Phases, p)
	return err
}

// judge counts, when all is over.
func (t *trial) judge(ctx context.Context) error {
	err := t.ask(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT (`+countQueued+`) + (SELECT count(*) FROM `+schema+`.dead_letters)`).Scan(&t.Left)
	})
	if err != nil {
		return err
	}
	t.load.mu.Lock()
	defer t.load.mu.Unlock()
	t.count(t.load.items)
	t.Refused, t.Unknown = t.load.refused, t.load.unknown
	for _, p := range t.Phases {
		for _, d := range t.dead {
			if d.at.After(p.from) && d.at.Before(p.to) {
				p.Dead = max(p.Dead, d.count)
			}
		}
	}
	if t.Lost > 0 {
		t.Broken = append(t.Broken, fmt.Sprintf("%d items are lost", t.Lost))
	}
	if t.Left > 0 {
		t.Broken = append(t.Broken, fmt.Sprintf("%d items are left", t.Left))
	}
	return nil
}

// count puts every item into its phase, which is that in which its first handler began.
func (r *result) count(items []fate) {
	r.Items, r.Lost, r.Duplicates = 0, 0, 0
	for _, f := range items {
		r.Duplicates += max(f.runs-1, 0)
		if !f.committed.IsZero() {
			r.Items++
			if f.runs == 0 {
				r.Lost++
			}
		}
	}
	for _, p := range r.Phases {
		enqueued, began := 0, 0
		p.Pickup = nil
		for _, f := range items {
			if !f.committed.Before(p.from) && f.committed.Before(p.to) {
				enqueued++
			}
			if f.runs == 0 || f.began.Before(p.from) || !f.began.Before(p.to) {
				continue
			}
			began++
			if !f.committed.IsZero() {
				p.Pickup = append(p.Pickup, max(f.began.Sub(f.committed), 0))
			}
		}
		p.Enqueued, p.PerSecond = float64(enqueued)/p.Length.Seconds(), float64(began)/p.Length.Seconds()
	}
}

// recovered measures how long it took from when the server answered, after an outage.
func (r *result) recovered(items []fate, down, up time.Time, perSecond float64) {
	r.Downtime, r.FirstItem, r.RateBack = up.Sub(down), -1, -1
	const step = 50 * time.Millisecond
	var begun []int // by steps since up
	for _, f := range items {
		if f.runs == 0 {
			continue
		}
		since := f.began.Sub(up)
		if newer := f.committed.After(down); newer && (r.FirstItem < 0 || since < r.FirstItem) {
			r.FirstItem = max(since, 0) // the answer may be later than the item
		}
		if since < 0 {
			continue
		}
		i := int(since / step)
		for len(begun) <= i {
			begun = append(begun, 0)
		}
		begun[i]++
	}
	const window = int(time.Second / step)
	enough := int(math.Ceil(0.9 * perSecond))
	for i := 0; i+window <= len(begun); i++ {
		count := 0
		for _, n := range begun[i : i+window] {
			count += n
		}
		if count >= enough {
			r.RateBack = time.Duration(i) * step
			return
		}
	}
}
