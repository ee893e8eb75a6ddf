package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

// This file answers: how does a soak go, from the first process to the verdict?
//
// Two processes do everything that soakload.go has, and nothing goes wrong. The parent samples them and the server,
// holds a snapshot open now and then, and keeps the accounts (accounts.go). In the end nothing may have grown
// (growth.go), and after all have closed nothing may be left.

const (
	soakNodes  = 2
	sampling   = time.Second
	answerTime = 10 * time.Second // for a sample

	// The parent holds a snapshot open: in every so long for so long.
	snapshotEvery  = 10 * time.Second
	snapshotLength = 3 * time.Second

	mostDead = 20_000 // dead tuples of a table
	mostTold = 30     // violations that are printed
)

// paces come in turn, so that each fifth of a minute has had all of them.
var paces = []struct {
	name   string
	length time.Duration
}{{paceBusy, 3 * time.Second}, {paceTrickle, 2 * time.Second}, {paceIdle, time.Second}}

// soakSettings: the default, a minute between two rounds of autovacuum, would let dead tuples grow all through a short
// run.
var soakSettings = map[string]string{"autovacuum_naptime": "2s", "log_lock_waits": "on"}

// sampledTables are those that are written all the time. The others are taken together.
var sampledTables = []string{"worker_queue", "orchestrator_queue", "waiters"}

const otherTables = "other tables"

func soakGauges() (gauges []gauge) {
	const mb = 1 << 20
	for i := range soakNodes {
		gauges = append(gauges,
			gauge{name: fmt.Sprintf("process %d: heap in use, MB", i), unit: mb, relative: .2, absolute: 3 * mb},
			gauge{name: fmt.Sprintf("process %d: goroutines", i), relative: .1, absolute: 20})
	}
	gauges = append(gauges,
		gauge{name: "connections", relative: .1, absolute: 6},
		gauge{name: "rows of waiters, but for short-lived lanes", relative: .1, absolute: 10},
		gauge{name: "instances", relative: .3, absolute: 50})
	for _, table := range append(slices.Clone(sampledTables), otherTables) {
		gauges = append(gauges,
			gauge{name: table + ": dead tuples", relative: .5, absolute: 2000, most: mostDead},
			gauge{name: table + ": table, MB", unit: mb, relative: .3, absolute: mb},
			gauge{name: table + ": indexes, MB", unit: mb, relative: .3, absolute: mb})
	}
	return gauges
}

// soakVerdict is what a soak comes to.
type soakVerdict struct {
	options    options
	accounts   *accounts
	table      string
	vitals     vitals // of all processes, the counters
	stalls     time.Duration
	samples    int
	violations []string
}

func (v *soakVerdict) failed() bool { return len(v.violations) > 0 }

// soaking is a run.
type soaking struct {
	*chaos
	accounts *accounts
	recorder *recorder
	last     vitals

	warmUp time.Duration // before the first sample

	// How long an item may wait: far more than a wake-up takes, since others may be at work on the machine. What that
	// stalls is added.
	late time.Duration
}

// soak returns the verdict, or an error if the run itself failed or was interrupted.
func soak(ctx context.Context, o options, out *os.File) (v *soakVerdict, err error) {
	return newSoak(o, out).run(ctx, progressTo(out))
}

func newSoak(o options, out io.Writer) *soaking {
	return &soaking{
		chaos:  &chaos{options: o, out: out, began: time.Now(), counts: map[string]int{}},
		warmUp: 5 * time.Second,
		late:   time.Second + o.slack,
	}
}

func (s *soaking) run(ctx context.Context, progress func(string)) (v *soakVerdict, err error) {
	if s.dir, err = os.MkdirTemp("", "pgwake-soak-"); err != nil {
		return nil, err
	}
	defer func() {
		if ctx.Err() != nil || err == nil && !v.failed() {
			os.RemoveAll(s.dir)
			return
		}
		fmt.Fprintf(s.out, "\nFAILED. Again: %v\nThe ledgers and logs are in %s\n", s.options, s.dir)
	}()
	s.log("%v", s.options)
	if s.recorder, err = newRecorder(s.samples); err != nil {
		return nil, err
	}
	defer s.recorder.file.Close()
	s.server, err = devpg.Start(ctx, &devpg.Options{IgnoreURL: true, Settings: soakSettings})
	if err != nil {
		return nil, err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, s.keepServerLog(), s.server.Stop(stopping))
	}()
	s.log("PostgreSQL %s from %s", s.server.Version, s.server.Source)
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	defer s.tearDown()
	for i := range soakNodes {
		n := &node{index: i, role: soaker, seed: s.seed, rest: 1, nodes: soakNodes, dir: s.dir, address: fmt.Sprintf("127.0.0.1:%d", s.server.Port())}
		if i == 0 {
			n.plant = s.plant
		}
		if err := n.start(); err != nil {
			return nil, err
		}
		s.nodes = append(s.nodes, n)
	}
	for _, n := range s.nodes {
		if err := n.process.awaitReady(ctx, readyBound+s.options.slack); err != nil {
			return nil, err
		}
	}
	s.accounts = newAccounts(s.dir, s.late)
	defer s.accounts.close()
	if err := s.soakFor(ctx, progress); err != nil {
		return nil, err
	}
	progress("")
	if _, err := s.drain(ctx); err != nil {
		return nil, err
	}
	if _, err := s.vitals(ctx, map[string]float64{}); err != nil { // the last word of the counters
		return nil, err
	}
	s.closeAll()
	err = s.checkRemains(ctx, afterAll, goingPatience, slices.Concat(remainsOn(), remainsIn("pgwake"), []remain{
		{"dead letters", `SELECT count(*) FROM pgwake.dead_letters`},
		{"notes of messages to be brought up", `SELECT count(*) FROM pgwake.realignments`},
	})...)
	if err != nil {
		return nil, err
	}
	if err := s.accounts.finish(s.stalls); err != nil {
		return nil, err
	}
	s.readLogs()
	if err := s.readServerLog(); err != nil {
		return nil, err
	}
	return s.verdict(), nil
}

// soakFor has the processes work, and samples.
func (s *soaking) soakFor(ctx context.Context, progress func(string)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begin := time.Now().Add(s.warmUp)
	end := begin.Add(s.length)
	done := make(chan struct{})
	beside := func(what string, f func() error) {
		go func() {
			defer func() { done <- struct{}{} }()
			if err := f(); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", what, err))
			}
		}()
	}
	beside("watch", func() error { return s.watch(ctx, end) })
	beside("snapshots", func() error { return s.holdSnapshots(ctx, end) })
	beside("paces", func() error { s.setPaces(ctx, end); return nil })
	every := min(sampling, s.length/(2*leastSamples))
	err := s.converse(ctx, func(conn *pgx.Conn) error {
		for next := begin; next.Before(end) || len(s.recorder.readings) < leastSamples; next = next.Add(every) {
			if behind := time.Since(next); behind > every {
				next = next.Add(behind.Truncate(every)) // the machine is slow
			}
			if !nap(ctx, time.Until(next)) {
				return context.Cause(ctx)
			}
			if err := s.sampleAll(ctx, conn); err != nil {
				return err
			}
			s.mu.Lock()
			stalls := slices.Clone(s.stalls)
			s.mu.Unlock()
			if err := s.accounts.update(time.Now(), stalls); err != nil {
				return err
			}
			progress(s.progress(time.Since(begin), len(s.accounts.j.v.violations)))
		}
		return nil
	})
	if err != nil {
		cancel(err)
	}
	for range 3 {
		<-done
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	return err
}

// converse has a conversation as long as it takes.
func (s *soaking) converse(ctx context.Context, talk func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return talk(conn)
}

func (s *soaking) setPaces(ctx context.Context, end time.Time) {
	for i := 0; time.Now().Before(end); i++ {
		pace := paces[i%len(paces)]
		s.mu.Lock()
		s.pace = pace.name
		s.mu.Unlock()
		for _, n := range s.nodes {
			n.process.tell(pace.name)
		}
		if !nap(ctx, min(pace.length, time.Until(end))) {
			return
		}
	}
}

// holdSnapshots keeps vacuum from its work now and then.
func (s *soaking) holdSnapshots(ctx context.Context, end time.Time) error {
	rng := rand.New(rand.NewPCG(s.seed, 0))
	return s.converse(ctx, func(conn *pgx.Conn) error {
		for time.Now().Before(end) {
			length := between(rng, snapshotLength/2, snapshotLength)
			if !nap(ctx, min(snapshotEvery-length, time.Until(end))) {
				return nil
			}
			err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `SELECT FROM pgwake.worker_queue LIMIT 1`)
				nap(ctx, min(length, time.Until(end)))
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// vitals asks all processes for theirs, puts what may grow into values, and returns how many lanes are short-lived.
func (s *soaking) vitals(ctx context.Context, values map[string]float64) (brief int, err error) {
	var all vitals
	for _, n := range s.nodes {
		n.process.tell("sample")
		select {
		case v := <-n.process.vitals:
			values[fmt.Sprintf("process %d: heap in use, MB", n.index)] = float64(v.Heap)
			values[fmt.Sprintf("process %d: goroutines", n.index)] = float64(v.Goroutines)
			brief += v.Brief
			all.sum(v)
		case <-n.process.gone:
			return 0, n.process.alive()
		case <-time.After(answerTime):
			return 0, fmt.Errorf("%v gave no sample within %v", n, answerTime)
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	s.last = all
	values["fallback finds"], values["scout finds"] = float64(all.FallbackFinds), float64(all.ScoutFinds)
	values["panics"], values["reconnects"] = float64(all.Panics), float64(all.Reconnects)
	values["looks"], values["items"], values["Providers opened"] = float64(all.Looks), float64(all.Items), float64(all.Opened)
	return brief, nil
}

func (v *vitals) sum(of vitals) {
	v.Items += of.Items
	v.Looks += of.Looks
	v.Fallbacks += of.Fallbacks
	v.FallbackFinds += of.FallbackFinds
	v.ScoutFinds += of.ScoutFinds
	v.Panics += of.Panics
	v.Reconnects += of.Reconnects
	v.Opened += of.Opened
}

// wrong is which counters should be 0 and are not. Scouts that look for what a producer adds in silence count nothing, and
// nothing else is to make these nodes poll.
//
// On a machine that is too slow, notifications come later than the moment that a find has before it counts as unannounced.
func (v *vitals) wrong(slow bool) (violations []string) {
	if v.FallbackFinds > 0 && !slow {
		violations = append(violations, fmt.Sprintf("%d unannounced finds of fallbacks", v.FallbackFinds))
	}
	if v.ScoutFinds > 0 && !slow {
		violations = append(violations, fmt.Sprintf("%d unannounced finds of scouts", v.ScoutFinds))
	}
	if v.Panics > 0 {
		violations = append(violations, fmt.Sprintf("%d panics of the engine", v.Panics))
	}
	return violations
}

func (s *soaking) sampleAll(ctx context.Context, conn *pgx.Conn) error {
	s.mu.Lock()
	r := reading{At: time.Now(), Pace: s.pace, Values: map[string]float64{}}
	s.mu.Unlock()
	brief, err := s.vitals(ctx, r.Values)
	if err != nil {
		return err
	}
	var connections, waiters, instances, queued float64
	err = conn.QueryRow(ctx, `SELECT (`+ofNodes+`), (SELECT count(*) FROM pgwake.waiters), (SELECT count(*) FROM pgwake.instances),
		(SELECT count(*) FROM pgwake.worker_queue) + (SELECT count(*) FROM pgwake.orchestrator_queue)`).
		Scan(&connections, &waiters, &instances, &queued)
	if err != nil {
		return err
	}
	r.Values["connections"], r.Values["instances"], r.Values["queued"] = connections, instances, queued
	r.Values["rows of waiters"], r.Values["short-lived lanes"] = waiters, float64(brief)
	r.Values["rows of waiters, but for short-lived lanes"] = waiters - float64(brief)
	var table string
	var dead, size, indexes float64
	rows, _ := conn.Query(ctx, `SELECT relname, n_dead_tup::float8, pg_table_size(relid)::float8, pg_indexes_size(relid)::float8
		FROM pg_stat_user_tables WHERE schemaname = 'pgwake'`)
	_, err = pgx.ForEachRow(rows, []any{&table, &dead, &size, &indexes}, func() error {
		if !slices.Contains(sampledTables, table) {
			table = otherTables
		}
		r.Values[table+": dead tuples"] += dead
		r.Values[table+": table, MB"] += size
		r.Values[table+": indexes, MB"] += indexes
		return nil
	})
	if err != nil {
		return err
	}
	return s.recorder.add(r)
}

func (s *soaking) verdict() *soakVerdict {
	v := &soakVerdict{options: s.options, accounts: s.accounts, vitals: s.last, stalls: s.stalled(0), samples: len(s.recorder.readings)}
	v.table, v.violations = growthTable(soakGauges(), s.recorder.readings)
	v.violations = slices.Concat(v.violations, s.last.wrong(s.slack > 0), s.violations, s.accounts.j.v.violations)
	return v
}

// String is the report.
func (v *soakVerdict) String() string {
	var b strings.Builder
	a := v.accounts
	fmt.Fprintf(&b, "%s\n", v.table)
	fmt.Fprintf(&b, "seed %d: %v, %d samples; the machine stalled for %v in all\n", v.options.seed, v.options.length, v.samples, v.stalls.Round(time.Millisecond))
	fmt.Fprintf(&b, "%d items and messages, %d deliveries; %d given back, %d renewed, %d duplicates refused, %d rolled back, %d of unknown outcome\n",
		a.items, a.deliveries, a.returns, a.renewals, a.duplicates, a.rolledBack, a.unknown)
	if n := len(a.waits); n > 0 {
		slices.Sort(a.waits)
		fmt.Fprintf(&b, "from due to in hand: p50 %v, p99 %v, at most %v; %d later than %v\n", a.waits[n/2].Round(time.Microsecond),
			a.waits[n*99/100].Round(time.Microsecond), a.waits[n-1].Round(time.Microsecond), a.tooLate, a.late)
	}
	fmt.Fprintf(&b, "Providers opened: %d; looks for work: %d; unannounced finds of %d fallbacks: %d, of scouts: %d; reconnects: %d; panics: %d\n",
		v.vitals.Opened, v.vitals.Looks, v.vitals.Fallbacks, v.vitals.FallbackFinds, v.vitals.ScoutFinds, v.vitals.Reconnects, v.vitals.Panics)
	for i, text := range v.violations {
		if i == mostTold {
			fmt.Fprintf(&b, "and %d violations more\n", len(v.violations)-i)
			break
		}
		fmt.Fprintf(&b, "VIOLATION: %s\n", text)
	}
	return b.String()
}

const progressWidth = 20

func (s *soaking) progress(elapsed time.Duration, violations int) string {
	done := min(int(elapsed*progressWidth/s.length), progressWidth)
	last := s.recorder.readings[len(s.recorder.readings)-1].Values
	line := fmt.Sprintf("%3d:%02d  %s%s  %.0f items, %.0f queued, %.0f connections, %.0f waiters", int(elapsed.Minutes()), int(elapsed.Seconds())%60,
		strings.Repeat("█", done), strings.Repeat("░", progressWidth-done), last["items"], last["queued"], last["connections"], last["rows of waiters"])
	if violations > 0 {
		line += fmt.Sprintf(", %d violations", violations)
	}
	return line
}

// progressTo writes a line again and again on a terminal, and elsewhere one every half minute.
func progressTo(out *os.File) func(string) {
	info, err := out.Stat()
	if err == nil && info.Mode()&os.ModeCharDevice != 0 {
		return func(line string) { fmt.Fprint(out, "\r\x1b[K", line) }
	}
	var told time.Time
	return func(line string) {
		if line != "" && time.Since(told) > 30*time.Second {
			told = time.Now()
			fmt.Fprintln(out, line)
		}
	}
}
