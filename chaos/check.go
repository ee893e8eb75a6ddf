package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: did pgwake keep its promises?
//
// The ledgers say what the processes saw, the tables what the database holds at the end, with the queues
// empty. For each item and message the two must be explained by one story in which nothing was lost, nothing
// was done twice, no lease was handed out twice, and nothing waited without a reason.

// tables is what the database holds at the end.
type tables struct {
	effects   []effect
	history   []event // by instance, in order
	stretches []stretch
	layers    layerTables
}

type effect struct{ key, token string }

type event struct {
	instance string
	remembered
}

func (c *chaos) readTables(ctx context.Context) (t tables, err error) {
	err = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var e effect
		rows, _ := conn.Query(ctx, `SELECT key, token FROM effects`)
		if _, err := pgx.ForEachRow(rows, []any{&e.key, &e.token}, func() error {
			t.effects = append(t.effects, e)
			return nil
		}); err != nil {
			return err
		}
		var s stretch
		rows, _ = conn.Query(ctx, `SELECT item, token, key, since, seen, until FROM stretches`)
		if _, err := pgx.ForEachRow(rows, []any{&s.item, &s.token, &s.key, &s.since, &s.seen, &s.until}, func() error {
			t.stretches = append(t.stretches, s)
			return nil
		}); err != nil {
			return err
		}
		var instance string
		var data []byte
		rows, _ = conn.Query(ctx, `SELECT instance_id, data FROM pgwake.history ORDER BY instance_id, execution_id, event_id`)
		_, err := pgx.ForEachRow(rows, []any{&instance, &data}, func() error {
			h := event{instance: instance}
			err := json.Unmarshal(data, &h.remembered)
			t.history = append(t.history, h)
			return err
		})
		return err
	})
	if err == nil {
		t.layers, err = c.readLayers(ctx)
	}
	return t, err
}

// fate is all that is known of an item or a message.
type fate struct {
	entry      // what was to be sent
	intended   time.Time
	confirmed  time.Time // when its enqueue had returned without an error; zero: outcome unknown
	revoked    bool
	claims     []*claim // in the order in which they were made
	effects    []effect
	remembered []event
}

// claim is a delivery, from the claim to what came of it.
type claim struct {
	entry            // what was in hand
	inHand           time.Time
	madeAt           time.Time // by the server
	tried, outcome   string    // acking or returning; acked, returned, refused or unknown
	renewedTo        time.Time
	triedAt, settled time.Time
}

// leaseEnd is when its lease ends, as it was given or renewed.
func (c *claim) leaseEnd() time.Time {
	if c.renewedTo.After(c.Until) {
		return c.renewedTo
	}
	return c.Until
}

// surelyOver is how long after the end of a lease, brought to the machine's clock, it surely is over.
const surelyOver = 50 * time.Millisecond

// triedLate reports whether something was tried with the token of a lease that was over, by a process that was held up or that waited for that.
func (c *claim) triedLate() bool { return c.triedAt.After(c.leaseEnd().Add(surelyOver)) }

// existed reports whether the item is known to have been in the queue.
func (f *fate) existed() bool {
	return !f.confirmed.IsZero() && !f.Duplicate || len(f.claims) > 0
}

// order has the claims be in the order in which they were made.
func (f *fate) order() {
	slices.SortFunc(f.claims, func(a, b *claim) int { return a.madeAt.Compare(b.madeAt) })
}

func (f *fate) String() string {
	what := "item"
	if f.Instance != "" {
		what = "message"
	}
	return fmt.Sprintf("%s %s (%s, id %d)", what, f.Key, f.Do, f.ID)
}

// verdict is what the run comes to.
type verdict struct {
	options        options
	conditions     conditions
	violations     []string
	faults         map[string]int
	rounds         int
	stalled        time.Duration // by how much the bounds of all rounds grew
	opening        time.Duration // how long a process took to open after the faults, at most
	items          int           // that existed
	redelivers     int
	unknown        int // enqueues of unknown outcome, that turned out to have happened and not to
	unhappened     int
	unsure         int // acks of unknown outcome
	effects        int
	refusals, late int // tokens that were refused, and those that were tried after their leases
	stretches      int // of handlers under a limit, and how many there were at once
	running        int
	runningPerKey  int
	sessions       int // claims of their items, and how often another owner came
	takeovers      int
	graphs         graphTotals
	bus            busTotals
	slowest        time.Duration // from due to in hand, of all
	probes         []time.Duration
	recovered      map[string]time.Duration // worst by kind of fault, and of many at once
}

func (v *verdict) failed() bool { return len(v.violations) > 0 }

// judge compares what was seen with what there is.
func (c *chaos) judge(lines []entry, t tables, rounds []round) *verdict {
	j := newJudge(lease)
	j.crashes, j.stalls, j.silences, j.rounds, j.slack = c.crashes, c.stalls, c.silences, rounds, c.options.slack
	j.v = &verdict{options: c.options, conditions: c.conditions, violations: c.violations, faults: c.counts, rounds: len(rounds)}
	for _, r := range rounds {
		j.v.stalled += r.grew
	}
	graphs, bus, lines := apart(lines)
	j.gather(lines, t)
	for _, key := range slices.Sorted(maps.Keys(j.fates)) {
		f := j.fates[key]
		j.checkEnd(f)
		j.checkLeases(f)
		j.checkTraces(f)
		j.checkWait(f)
	}
	j.checkOpenings()
	j.checkRecovery()
	j.checkErrors()
	j.checkDuplicates()
	j.checkOrder(t.history)
	j.checkSessions()
	j.checkLimits(t.stretches)
	j.judgeGraphs(graphs, t.layers.graphs)
	j.judgeBus(bus, t.layers.bus)
	return j.v
}

type judge struct {
	lease           time.Duration
	fates           map[string]*fate
	claims          map[string]*claim // by key and token
	errors          []entry           // of calls
	crashes, stalls []span
	silences        []silence
	rounds          []round
	slack           time.Duration // see options
	v               *verdict
}

func newJudge(lease time.Duration) *judge {
	return &judge{lease: lease, fates: map[string]*fate{}, claims: map[string]*claim{}, v: &verdict{}}
}

func (j *judge) complain(format string, args ...any) {
	j.v.violations = append(j.v.violations, fmt.Sprintf(format, args...))
}

// read takes what some lines say into the fates. What is said later has to come later.
func (j *judge) read(lines []entry) {
	slices.SortStableFunc(lines, func(a, b entry) int { return a.At.Compare(b.At) })
	for _, e := range lines {
		if e.What == wrong {
			j.complain("%s: %s", e.process, e.Err)
			continue
		}
		if e.What == erred {
			j.errors = append(j.errors, e)
			continue
		}
		f := j.fates[e.Key]
		if e.What == sending {
			if f == nil { // a turn may send again what it sent without effect
				j.fates[e.Key] = &fate{entry: e, intended: e.At}
			}
			continue
		}
		if f == nil {
			j.complain("%s: %s of %q, which nobody sent", e.process, e.What, e.Key)
			continue
		}
		held := j.claims[e.Key+e.Token]
		switch {
		case e.What == sent:
			f.confirmed, f.ID, f.Duplicate, f.Due = e.At, cmp.Or(f.ID, e.ID), e.Duplicate, e.Due
			if f.Due.IsZero() {
				f.Due = e.At.Add(f.Delay)
			}
		case e.What == revoked:
			f.revoked = true
		case e.What == got && held != nil:
			j.complain("%v was handed out twice under token %s", f, e.Token)
		case e.What == got:
			held = &claim{entry: e, inHand: e.At, madeAt: e.Until.Add(-j.lease)}
			j.claims[e.Key+e.Token] = held
			f.claims = append(f.claims, held)
			if f.ID = cmp.Or(f.ID, e.ID); f.ID != e.ID {
				j.complain("%v exists a second time, as id %d", f, e.ID)
			}
		case held == nil:
			j.complain("%s: %s of %v under token %s, which nobody got", e.process, e.What, f, e.Token)
		case e.What == acking || e.What == returning:
			held.tried, held.triedAt, held.Delay = e.What, e.At, e.Delay
		case e.What == renewed:
			held.renewedTo = e.Until
		default:
			held.outcome, held.settled = e.What, e.At
		}
	}
}

// gather makes the fates.
func (j *judge) gather(lines []entry, t tables) {
	j.read(lines)
	for _, e := range t.effects {
		if f := j.fates[e.key]; f != nil {
			f.effects = append(f.effects, e)
		} else {
			j.complain("there is an effect of %q, which nobody sent", e.key)
		}
	}
	for _, h := range t.history {
		f := j.fates[h.Key]
		if f == nil {
			j.complain("%s remembers %q, which nobody sent", h.instance, h.Key)
			continue
		}
		f.remembered = append(f.remembered, h)
		for _, key := range h.Sends { // its turn took effect, so this was sent
			if s := j.fates[key]; s != nil && s.confirmed.IsZero() {
				s.confirmed, s.Due = s.intended, s.intended.Add(verbTimeout+s.Delay)
			}
		}
	}
	for _, f := range j.fates {
		f.order()
		j.v.effects += len(f.effects)
		switch unknown := f.confirmed.IsZero() && !f.revoked; {
		case f.existed():
			j.v.items++
			j.v.redelivers += max(len(f.claims)-1, 0)
			if unknown {
				j.v.unknown++
			}
		case unknown:
			j.v.unhappened++
		}
	}
}

// quantiles says how long probes took.
func quantiles(probes []time.Duration) string {
	n := len(probes)
	if n == 0 {
		return "no probes"
	}
	slices.Sort(probes)
	return fmt.Sprintf("after recovery p50 %v, p99 %v, at most %v (%d probes)", probes[n/2], probes[n*99/100], probes[n-1], n)
}

// String is the summary.
func (v *verdict) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d rounds; faults:", v.options.seed, v.rounds)
	for _, name := range slices.Sorted(maps.Keys(v.faults)) {
		fmt.Fprintf(&b, " %d %s,", v.faults[name], name)
	}
	fmt.Fprintf(&b, "\n%d items and messages, %d delivered again, %d transactional effects; %d tokens tried after their leases, %d refused\n",
		v.items, v.redelivers, v.effects, v.late, v.refusals)
	fmt.Fprintf(&b, "unknown outcomes: %d enqueues had happened, %d had not; %d acks\n", v.unknown, v.unhappened, v.unsure)
	if v.stretches > 0 {
		fmt.Fprintf(&b, "under limits: %d claims; at most %d items at once, of %d, and %d with a key, of %d\n",
			v.stretches, v.running, limits.MaxRunning, v.runningPerKey, limits.MaxRunningPerKey)
	}
	if v.sessions > 0 {
		fmt.Fprintf(&b, "sessions: %d claims in order; %d times another owner took over\n", v.sessions, v.takeovers)
	}
	if len(v.probes) > 0 {
		fmt.Fprintf(&b, "from due to in hand: at most %v amid the faults; %s\n", v.slowest.Round(time.Millisecond), quantiles(v.probes))
	}
	if len(v.recovered) > 0 {
		fmt.Fprintln(&b, recoveries(v.recovered))
	}
	if v.opening > 0 {
		fmt.Fprintf(&b, "processes that began anew worked %v after the faults, at most\n", v.opening.Round(time.Millisecond))
	}
	fmt.Fprintf(&b, "for what stalled the machine the bounds of the rounds grew by %v in all\n", v.stalled.Round(time.Millisecond))
	fmt.Fprint(&b, v.graphs.String(), v.bus.String())
	for _, s := range v.violations {
		fmt.Fprintf(&b, "VIOLATION: %s\n", s)
	}
	return b.String()
}
