package pgwake

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: does the promise hold on a real server, whatever producers and nodes do?
//
// A scenario is drawn whole, and then run: nodes with lanes and dispatchers, and a schedule of what producers do in
// transactions of any length. Nothing polls, and the fallback is an hour away and comes when the test orders one: a
// wake-up that is lost is an item that waits for ever, and a test that fails by its patience. Without faults no
// fallback is needed. With faults one fallback of each node that survives must do.

// propertyCases is how many scenarios a property runs: few, or by PGWAKE_CASES=1000 as many as one has time for.
func propertyCases(t *testing.T, unless int) {
	t.Helper()
	checks := flag.Lookup("rapid.checks") // of all properties: it is put back
	was, n := checks.Value.String(), strconv.Itoa(unless)
	if was != checks.DefValue {
		n = was
	}
	if text := os.Getenv("PGWAKE_CASES"); text != "" {
		n = text
	}
	require.NoError(t, flag.Set(checks.Name, n), "PGWAKE_CASES")
	t.Cleanup(func() { _ = flag.Set(checks.Name, was) })
}

// world is a scenario that runs.
type world struct {
	scenario
	t      *rapid.T
	schema string
	peek   *pgx.Conn
	nodes  []*propertyNode

	producers []*propertyProducer
	producing sync.WaitGroup // the goroutines
	pending   sync.WaitGroup // what they have to do

	mu          sync.Mutex
	items       []*propertyItem
	byName      map[string]*propertyItem
	released    chan struct{}
	dispatchers []*propertyDispatcher
	problems    []string
	severed     []int32 // backends whose sockets were closed

	stalled atomic.Bool // the machine stood still for longer than an announcement may be late
}

// watch notices when the machine stands still.
func (w *world) watch(ctx context.Context) {
	for last := time.Now(); sleep(ctx, announceGrace/20); last = time.Now() {
		if time.Since(last) > announceGrace/4 {
			w.stalled.Store(true)
		}
	}
}

// property is what the scenarios of a test have in common: a schema, and what they add up to.
type property struct {
	schema string
	peek   *pgx.Conn
	cases  int
	total  struct {
		items, committed, searched, unannounced, byFallback int64
		finds                                               map[string]int64
	}
}

func newProperty(t *testing.T) *property {
	t.Helper()
	p := &property{schema: testProvider(t, Config{}).cfg.Schema}
	p.peek = plain(t, p.schema)
	mustExec(t, p.peek, `INSERT INTO namespaces (name) VALUES ('a'), ('b')`)
	p.total.finds = make(map[string]int64)
	t.Cleanup(func() {
		t.Logf("%d scenarios, %d items, %d of them committed; finds: %v; %d found unannounced behind open producers, %d that only a fallback found",
			p.cases, p.total.items, p.total.committed, p.total.finds, p.total.unannounced, p.total.byFallback)
	})
	return p
}

func (p *property) run(t *rapid.T, s scenario) {
	w := &world{scenario: s, t: t, schema: p.schema, peek: p.peek, byName: make(map[string]*propertyItem), released: make(chan struct{})}
	p.cases++
	_, err := w.peek.Exec(tctx, `DELETE FROM worker_queue; DELETE FROM orchestrator_queue; DELETE FROM instance_locks; DELETE FROM instances`)
	require.NoError(t, err)
	watching, stop := context.WithCancel(tctx)
	w.producing.Go(func() { w.watch(watching) })
	defer w.end()
	defer stop()
	w.begin()
	for _, step := range s.steps {
		w.do(step)
		if s.serial || step.kind == "settle" || step.kind == "barrier" {
			w.pending.Wait()
		}
		if step.kind == "barrier" {
			w.requireNoneWaits("at a barrier")
		}
		w.requireNoProblem()
	}
	if s.faults {
		p.total.byFallback += int64(w.finishAfterFaults())
	} else {
		w.finish()
	}
	w.requireNoProblem()
	for _, n := range w.nodes {
		st := n.Stats()
		for _, q := range []QueueStats{st.Worker, st.Orchestrator} {
			for why, count := range q.Finds {
				p.total.finds[why] += count
			}
			p.total.unannounced += q.FallbackFinds + q.ScoutFinds
		}
	}
	p.total.items += int64(len(w.items))
	for _, i := range w.items {
		if i.committed {
			p.total.committed++
		}
	}
}

// tctx is for what a scenario does: rapid ends its own context before the clean-up.
var tctx = context.Background()

func (w *world) begin() {
	var opening sync.WaitGroup
	for at, d := range w.scenario.nodes {
		n := &propertyNode{drawnNode: d, w: w, name: fmt.Sprintf("%s %d", w.schema, at), lease: time.Hour, started: make([]bool, len(d.lanes)), gone: make(chan struct{})}
		if n.mortal {
			n.lease = 200 * time.Millisecond
		}
		n.ctx, n.stop = context.WithCancel(tctx)
		w.nodes = append(w.nodes, n)
		opening.Go(func() {
			if err := n.open(); err != nil {
				w.problem("open a node: %v", err)
			}
		})
	}
	for _, simple := range w.simple {
		p := &propertyProducer{simple: simple, todo: make(chan func(), len(w.steps)+10)}
		w.producers = append(w.producers, p)
		w.producing.Go(func() {
			for do := range p.todo {
				do()
				w.pending.Done()
			}
			w.sever(p)
		})
		opening.Go(func() { w.connect(p) })
	}
	opening.Wait()
	w.requireNoProblem()
	for _, n := range w.nodes {
		for lane, late := range n.late {
			if !late {
				n.start(lane)
			}
		}
	}
}

// problem is for goroutines: the schedule ends with it.
func (w *world) problem(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, fmt.Sprintf(format, args...))
}

func (w *world) requireNoProblem() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.problems) > 0 {
		w.t.Fatalf("%s", strings.Join(w.problems, "\n"))
	}
}

// eventually fails the scenario, with what is known of it, if it does not come true.
func (w *world) eventually(what string, condition func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(patient)
	for pause := 500 * time.Microsecond; !condition(); pause = min(2*pause, 10*time.Millisecond) {
		w.requireNoProblem()
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: it does not come true\n%s", what, w.state())
		}
		time.Sleep(pause)
	}
}

var testdbURL string

// do begins a step of the schedule. One that makes no sense does nothing.
func (w *world) do(step drawnStep) {
	n := w.nodes[step.node]
	if w.serial && slices.ContainsFunc(w.producers, func(p *propertyProducer) bool { return p.open }) {
		switch step.kind { // one producer at a time
		case "begin", "insert", "savepoint", "end":
			step.producer = slices.IndexFunc(w.producers, func(p *propertyProducer) bool { return p.open })
		case "library":
			return
		}
	}
	p := w.producers[step.producer]
	switch step.kind {
	case "begin":
		if p.open {
			return
		}
		p.open, p.rc, p.added = true, step.isolation == pgx.ReadCommitted, false
		w.produce(p, func() {
			tx, err := p.conn.BeginTx(tctx, pgx.TxOptions{IsoLevel: step.isolation})
			if err != nil {
				w.problem("begin: %v", err)
				return
			}
			p.tx = tx
			_, err = tx.Exec(tctx, "SELECT 1") // from here on the snapshot may be an old one
			w.refused(p, err)
		})
	case "insert":
		p.added = true
		items := w.make(step.items)
		twin := n
		if step.by != "twin" || !p.open || !p.rc || n.away {
			twin = nil
		}
		w.produce(p, func() {
			switch {
			case p.doomed:
			case p.tx != nil:
				if w.insert(p, p.tx, twin, step, items) {
					p.inside = append(p.inside, items...)
				}
			default: // each statement is a transaction
				if w.insert(p, p.conn, nil, step, items) {
					w.commit(items)
				}
			}
		})
	case "savepoint":
		if !p.open {
			return
		}
		p.added = true
		items, keep := w.make(step.items), step.fate == "commit"
		twin := n
		if step.by != "twin" || !p.rc || n.away {
			twin = nil
		}
		w.produce(p, func() {
			if p.tx == nil || p.doomed {
				return
			}
			inner, err := p.tx.Begin(tctx)
			if w.refused(p, err) || !w.insert(p, inner, twin, step, items) {
				return
			}
			if keep {
				if !w.refused(p, inner.Commit(tctx)) {
					p.inside = append(p.inside, items...)
				}
			} else {
				w.refused(p, inner.Rollback(tctx))
			}
		})
	case "end":
		w.endTx(p, step.fate)
	case "psql":
		items := w.make(step.items)
		w.produce(p, func() { w.psql(step, items) })
	case "library":
		if n.away {
			return
		}
		items := w.make(step.items)
		w.produce(w.producers[0], func() {
			work, messages := enqueues(items)
			var err error
			switch {
			case len(work) == 0:
			case step.fate != "commit":
				_, err = n.EnqueueForWorkerMany(tctx, work)
			default: // each by itself, all at once
				var calls sync.WaitGroup
				errs := make([]error, len(work))
				for at, item := range work {
					calls.Go(func() { _, errs[at] = n.EnqueueForWorker(tctx, item.WorkItem, &item.EnqueueOptions) })
				}
				calls.Wait()
				err = errors.Join(errs...)
			}
			if len(messages) > 0 && err == nil {
				_, err = n.EnqueueForOrchestratorMany(tctx, messages)
			}
			if err == nil {
				w.commit(items)
				return
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, i := range items {
				i.unsure = true
			}
			if !w.faults {
				w.problems = append(w.problems, "enqueue: "+err.Error())
			}
		})
	case "start":
		n.start(step.lane)
	case "release":
		w.release()
	case "pause":
		time.Sleep(step.pause)
	case "fallback":
		if !n.away {
			n.fallback()
		}
	case "leave":
		w.leave(n)
	case "die":
		w.die(n)
	case "cut":
		if n.mortal && !n.away {
			w.cut(n, false)
		}
	case "deafen":
		if !n.away {
			w.exec(`SELECT pg_terminate_backend($1)`, n.Provider.engine.listener.pid.Load())
		}
	case "freeze":
		if n.frozen.Load() == nil && !n.away {
			n.frozen.Store(new(make(chan struct{})))
		}
	case "thaw":
		n.thawUp()
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.peek.Exec(tctx, sql, args...)
	require.NoError(w.t, err)
}

// end stops everything, whatever state it is in.
func (w *world) end() {
	for _, n := range w.nodes {
		n.stop()
		if !n.away {
			n.away = true
			close(n.gone)
		}
		n.thawUp()
	}
	for _, p := range w.producers {
		close(p.todo)
	}
	w.producing.Wait()
	var closing sync.WaitGroup
	for _, n := range w.nodes {
		closing.Go(func() {
			n.close()
			if n.pool != nil {
				n.pool.Close()
			}
		})
	}
	closing.Wait()
}

// Producers of every kind, and nodes that come and leave in good order.
func TestWakeProperty_WithoutFaults_NoDueItemWaitsWhileADispatcherDoes(t *testing.T) {
	testdbURL = testdb.URL(t)
	propertyCases(t, 10)
	p := newProperty(t)
	rapid.Check(t, func(t *rapid.T) { p.run(t, drawScenario(t, false)) })
}

// Nodes that die, pause, and lose their connections, in the middle of it.
func TestWakeProperty_WithFaults_OneFallbackFindsWhatIsLost(t *testing.T) {
	testdbURL = testdb.URL(t)
	propertyCases(t, 4)
	p := newProperty(t)
	rapid.Check(t, func(t *rapid.T) { p.run(t, drawScenario(t, true)) })
}
