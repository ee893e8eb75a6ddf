package taskgraph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are tasks run as their definitions say?

// patience is far more than anything should take.
const patience = 30 * time.Second

// graph is an Engine on a schema of its own.
type graph struct {
	*taskgraph.Engine
	t    *testing.T
	p    *pgwake.Provider
	stop func() error // ends Run, and returns what that does
}

func newGraph(t *testing.T, config *taskgraph.Config) *graph {
	t.Helper()
	return onProvider(t, schemas.New(t, nil), config)
}

func onProvider(t *testing.T, p *pgwake.Provider, config *taskgraph.Config) *graph {
	t.Helper()
	c := taskgraph.Config{}
	if config != nil {
		c = *config
	}
	c.Backoff.Jitter = taskgraph.NoJitter
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	e, err := taskgraph.New(t.Context(), p, &c)
	require.NoError(t, err)
	return &graph{Engine: e, t: t, p: p}
}

// run has the Engine run until the test ends, or stop is called.
func (g *graph) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	g.stop = sync.OnceValue(func() error { cancel(); return <-ended })
	g.t.Cleanup(func() {
		if err := g.stop(); err != nil {
			g.t.Errorf("Run: %v", err)
		}
	})
}

// within returns a context that ends when patience does.
func (g *graph) within() context.Context {
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	g.t.Cleanup(cancel)
	return ctx
}

func (g *graph) register(definitions ...*taskgraph.Definition) {
	g.t.Helper()
	require.NoError(g.t, g.Register(g.within(), definitions...))
}

// submit registers a definition, and creates a task of it.
func (g *graph) submit(d *taskgraph.Definition, with ...func(*taskgraph.Submission)) string {
	g.t.Helper()
	g.register(d)
	s := taskgraph.Submission{Namespace: d.Namespace, Name: d.Name, Version: d.Version}
	for _, set := range with {
		set(&s)
	}
	done, err := g.Submit(g.within(), s)
	require.NoError(g.t, err)
	return done.ID
}

// until waits until a task is in a state.
func (g *graph) until(task string, state taskgraph.TaskState) {
	g.t.Helper()
	var last taskgraph.Progress
	for p, err := range g.Watch(g.within(), task) {
		require.NoError(g.t, err, "the task is %+v, and is to be %s: %s", last, state, g.describe(task))
		if last = p; p.State == state {
			return
		}
	}
	require.Equal(g.t, state, last.State, g.describe(task))
}

func (g *graph) describe(task string) string {
	steps, err := g.Steps(context.Background(), task)
	if err != nil {
		return err.Error()
	}
	text := ""
	for _, s := range steps {
		text += fmt.Sprintf("\n%s %s attempts %d %s", s.Name, s.State, s.Attempts, s.Err())
	}
	return text
}

// complete waits for the end of a task.
func (g *graph) complete(task string) *taskgraph.Task {
	g.t.Helper()
	g.until(task, taskgraph.TaskComplete)
	done, err := g.Wait(g.within(), task)
	require.NoError(g.t, err)
	return done
}

func (g *graph) step(task, name string) taskgraph.StepInfo {
	g.t.Helper()
	steps, err := g.Steps(g.within(), task)
	require.NoError(g.t, err)
	at := slices.IndexFunc(steps, func(s taskgraph.StepInfo) bool { return s.Name == name })
	require.GreaterOrEqual(g.t, at, 0, "step %s", name)
	return steps[at]
}

// query returns what a query on the schema does, as texts.
func (g *graph) query(sql string, args ...any) []string {
	g.t.Helper()
	var all []string
	require.NoError(g.t, pgx.BeginFunc(g.within(), g.p.Pool(), func(tx pgx.Tx) error {
		if _, err := tx.Exec(g.within(), "SET LOCAL search_path = "+pgx.Identifier{g.p.Schema()}.Sanitize()); err != nil {
			return err
		}
		rows, err := tx.Query(g.within(), sql, args...)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	}))
	return all
}

func (g *graph) one(sql string, args ...any) string {
	g.t.Helper()
	all := g.query(sql, args...)
	require.Len(g.t, all, 1, sql)
	return all[0]
}

// undone is that of a lab.
func (g *graph) undone(sql string) {
	g.t.Helper()
	g.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = pgx.BeginFunc(ctx, g.p.Pool(), func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SET LOCAL search_path = "+pgx.Identifier{g.p.Schema()}.Sanitize()+"; "+sql)
			return err
		})
	})
}

// states are those that a task, or a step, has been in.
func (g *graph) states(task string) []string {
	g.t.Helper()
	return g.query(`SELECT to_state FROM task_transitions WHERE task_id = $1 ORDER BY sort_key`, task)
}

func (g *graph) stepStates(task, name string) []string {
	g.t.Helper()
	return g.query(`SELECT x.to_state FROM step_transitions x JOIN steps s USING (step_id) WHERE s.task_id = $1 AND s.name = $2 ORDER BY x.sort_key`, task, name)
}

// recorder is a handler that notes which steps it ran, in order.
type recorder struct {
	mu  sync.Mutex
	ran []string
}

func (r *recorder) handle(_ context.Context, s *taskgraph.Step) (any, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ran = append(r.ran, s.Name)
	return map[string]string{"from": s.Name}, nil
}

func (r *recorder) names() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ran)
}

func TestT1_Linear_RunsInOrderAndTellsItsHistory(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.run()
	task := g.submit(taskgraph.Define("shop", "linear", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")).Step("c", "h", taskgraph.After("b")))
	done := g.complete(task)
	require.Equal(t, []string{"a", "b", "c"}, r.names())
	round := []string{"evaluating_results", "enqueuing_steps", "steps_in_process"}
	require.Equal(t, slices.Concat([]string{"pending", "initializing", "enqueuing_steps", "steps_in_process"}, round, round, []string{"evaluating_results", "complete"}), g.states(task))
	for _, name := range []string{"a", "b", "c"} {
		require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, name))
	}
	require.Equal(t, 3, done.CompletedSteps)
	require.NotNil(t, done.CompletedAt)
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.InDelta(t, 100, c.Completion, 0)
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	require.Empty(t, g.query(`SELECT kind FROM orchestrator_queue`))
}

func TestT2_Diamond_JoinsOnceThoughBothEndAtTheSameMoment(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	var joined sync.Map
	g.Handle("h", func(_ context.Context, s *taskgraph.Step) (any, error) { return nil, nil })
	var wait sync.Map // a barrier for each task
	g.Handle("both", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		b, _ := wait.LoadOrStore(s.TaskID, newBarrier(2))
		return nil, b.(*barrier).wait(ctx)
	})
	g.Handle("join", func(_ context.Context, s *taskgraph.Step) (any, error) {
		n, _ := joined.LoadOrStore(s.TaskID, new(atomic.Int32))
		n.(*atomic.Int32).Add(1)
		return nil, nil
	})
	d := taskgraph.Define("shop", "diamond", "1").Step("a", "h").Step("b", "both", taskgraph.After("a")).Step("c", "both", taskgraph.After("a")).Step("d", "join", taskgraph.After("b", "c"))
	g.register(d)
	g.run()
	rounds := testsize.Of(15, 100)
	all := make([]taskgraph.Submission, rounds)
	for i := range all {
		all[i] = taskgraph.Submission{Namespace: "shop", Name: "diamond", Version: "1"}
	}
	// Five at a time, or two barriers would wait for places that others have.
	for batch := range slices.Chunk(all, 5) {
		submitted, err := g.SubmitMany(g.within(), batch)
		require.NoError(t, err)
		for _, s := range submitted {
			g.complete(s.ID)
			n, _ := joined.Load(s.ID)
			require.EqualValues(t, 1, n.(*atomic.Int32).Load())
			require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(s.ID, "d"))
		}
	}
}

// barrier lets go of those who wait when there are so many.
type barrier struct {
	left atomic.Int32
	open chan struct{}
}

func newBarrier(n int32) *barrier {
	b := &barrier{open: make(chan struct{})}
	b.left.Store(n)
	return b
}

func (b *barrier) wait(ctx context.Context) error {
	if b.left.Add(-1) == 0 {
		close(b.open)
	}
	select {
	case <-b.open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func TestT3_FanOut_EachRunsOnceAndTheyAreJoinedOnce(t *testing.T) {
	t.Parallel()
	width, processors := testsize.Of(120, 500), testsize.Of(4, 8)
	first := schemas.New(t, nil)
	var mu sync.Mutex
	ran := make(map[string]int)
	var nodes []*graph
	for i := range processors {
		p := first
		if i > 0 {
			p = pgwaketest.Open(t, &pgwake.Config{Schema: first.Schema()})
		}
		g := onProvider(t, p, nil)
		g.Handle("h", func(_ context.Context, s *taskgraph.Step) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			ran[s.Name]++
			return nil, nil
		})
		g.run()
		nodes = append(nodes, g)
	}
	g := nodes[0]
	d := taskgraph.Define("shop", "fan", "1").Step("split", "h")
	var parts []string
	for i := range width {
		parts = append(parts, fmt.Sprintf("part-%d", i))
		d.Step(parts[i], "h", taskgraph.After("split"))
	}
	d.Step("join", "h", taskgraph.After(parts...))
	task := g.submit(d)
	g.complete(task)
	for _, node := range nodes {
		require.NoError(t, node.stop())
	}
	require.Len(t, ran, width+2)
	for name, n := range ran {
		require.Equal(t, 1, n, name)
	}
	require.Equal(t, fmt.Sprint(width+2), g.one(`SELECT count(*)::text FROM step_transitions WHERE task_id = $1 AND to_state = 'enqueued'`, task))
	levels, err := g.DependencyLevels(t.Context(), task)
	require.NoError(t, err)
	count := map[int]int{}
	for _, l := range levels {
		count[l.Level]++
	}
	require.Equal(t, map[int]int{0: 1, 1: width, 2: 1}, count)
}

// The nodes that do not serve the namespace, and the dispatchers that did not take the turn, would look for nothing.
func TestEngine_TurnEnds_NobodyIsToldThroughTheDatabase(t *testing.T) {
	g := newGraph(t, nil)
	g.Handle("work", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	g.run()
	d := taskgraph.Define("default", "task", "1").Step("a", "work").Step("b", "work", taskgraph.After("a"))
	g.register(d)
	g.complete(g.submit(d)) // it is served from now on
	conn := session(t, g.p)
	channel := g.one(`SELECT channel('orchestrator')`)
	_, err := conn.Exec(t.Context(), `LISTEN `+pgx.Identifier{channel}.Sanitize())
	require.NoError(t, err)
	turns := func() (told bool) { // of a task
		g.complete(g.submit(d))
		_, err = conn.Exec(t.Context(), `SELECT pg_notify($1, 'end')`, channel)
		require.NoError(t, err)
		for {
			n, err := conn.WaitForNotification(g.within())
			require.NoError(t, err)
			if n.Payload == "end" {
				return told
			}
			told = told || strings.Contains(n.Payload, " * ") || strings.Contains(n.Payload, " default ")
		}
	}
	require.Eventually(t, func() bool { return !turns() }, labPatience, 10*time.Millisecond) // but if this node is too busy to look within 10 ms
}

func TestT4_LongChain_RunsInOrderToItsEnd(t *testing.T) {
	t.Parallel()
	length := testsize.Of(110, 300)
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	var ancestors int
	g.Handle("last", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		all, err := s.Results(ctx)
		ancestors = len(all)
		return nil, err
	})
	d := taskgraph.Define("shop", "chain", "1")
	var names []string
	for i := range length {
		names = append(names, fmt.Sprint("s", i))
		switch {
		case i == 0:
			d.Step(names[i], "h")
		case i < length-1:
			d.Step(names[i], "h", taskgraph.After(names[i-1]))
		default:
			d.Step(names[i], "last", taskgraph.After(names[i-1]))
		}
	}
	g.run()
	task := g.submit(d)
	ctx, cancel := context.WithTimeout(t.Context(), 6*patience) // there are hundreds of turns
	defer cancel()
	done, err := g.Wait(ctx, task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskComplete, done.State)
	require.Equal(t, length, done.CompletedSteps)
	require.Equal(t, names[:length-1], r.names())
	require.Equal(t, length-1, ancestors)
	last := g.step(task, names[length-1]).ID
	depth, err := g.StepDepth(t.Context(), last)
	require.NoError(t, err)
	require.Equal(t, length-1, depth)
	before, err := g.TransitiveDependencies(t.Context(), last)
	require.NoError(t, err)
	require.Len(t, before, length-1)
	for i, a := range before {
		require.Equal(t, []any{i + 1, names[length-2-i]}, []any{a.Distance, a.Name})
	}
}

func TestT6_NoSteps_CompletesAtOnce(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.run()
	task := g.submit(taskgraph.Define("shop", "nothing", "1"))
	g.complete(task)
	require.Equal(t, []string{"pending", "initializing", "complete"}, g.states(task))
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.AllComplete, c.ExecutionStatus)
}

func TestT7_TwoRootsAndAnIsolatedStep_AllCount(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	release := make(chan struct{})
	g.Handle("slow", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "roots", "1").Step("a", "h").Step("b", "h").Step("c", "h", taskgraph.After("a", "b")).Step("alone", "slow"))
	for p, err := range g.Watch(g.within(), task) {
		require.NoError(t, err)
		if p.Completed == 3 {
			require.Equal(t, taskgraph.TaskStepsInProcess, p.State, "one is at work yet")
			break
		}
	}
	close(release)
	g.complete(task)
}

func TestStep_Results_AreThoseOfAllAncestorsByName(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	var seen map[string]json.RawMessage
	g.Handle("last", func(ctx context.Context, s *taskgraph.Step) (_ any, err error) {
		if seen, err = s.Results(ctx); err != nil {
			return nil, err
		}
		var a struct{ From string }
		if err := s.Result(ctx, "a", &a); err != nil {
			return nil, err
		}
		if err := s.Result(ctx, "nobody", &a); err == nil {
			return nil, taskgraph.Permanent(fmt.Errorf("there is no such step"))
		}
		var order struct{ Order int }
		if err := s.DecodeContext(&order); err != nil {
			return nil, err
		}
		return a.From + fmt.Sprint(order.Order), nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "results", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")).Step("c", "last", taskgraph.After("b")).Step("other", "h"),
		func(s *taskgraph.Submission) { s.Context = map[string]int{"order": 7} })
	g.complete(task)
	require.Len(t, seen, 2)
	require.JSONEq(t, `{"from": "b"}`, string(seen["b"]))
	require.JSONEq(t, `"a7"`, string(g.step(task, "c").Results))
}

func TestConditions_OneDoesNotHold_TheStepIsSkippedAndWhatComesAfterGoesOn(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.Handle("pay", func(context.Context, *taskgraph.Step) (any, error) {
		return map[string]any{"status": "declined", "total": 12}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "conditions", "1").
		Step("pay", "pay").
		Step("ship", "h", taskgraph.AfterIf("pay", `$.status == "paid"`)).
		Step("track", "h", taskgraph.AfterIf("ship", `$.from == "ship"`)).
		Step("refund", "h", taskgraph.AfterIf("pay", `$.status == "declined" && $.total > 10`)).
		Step("report", "h", taskgraph.After("track", "refund")))
	done := g.complete(task)
	require.Equal(t, []string{"refund", "report"}, r.names())
	require.Equal(t, 5, done.CompletedSteps)
	for name, skipped := range map[string]bool{"ship": true, "track": true, "refund": false, "report": false} {
		require.Equal(t, skipped, g.step(task, name).Skipped, name)
	}
	require.Equal(t, []string{"pending", "complete"}, g.stepStates(task, "track"))
	require.Equal(t, "Skip", g.one(`SELECT x.metadata ->> 'event' FROM step_transitions x JOIN steps s USING (step_id) WHERE s.task_id = $1 AND s.name = 'ship' AND x.sort_key = 2`, task))
}

// Whoever waits is told of each change, and while nothing is due nobody asks.
func TestT66_IdleSystem_EachChangeIsClaimedWithoutAPoll(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.Handle("h", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	g.run()
	d := taskgraph.Define("shop", "idle", "1").Step("a", "h").Step("b", "h", taskgraph.After("a"))
	g.complete(g.submit(d)) // the namespace is served from then on
	idle := func() pgwake.Stats {
		t.Helper()
		require.Eventually(t, func() bool {
			s := g.p.Stats()
			return s.Worker.Settled && s.Orchestrator.Settled && s.Worker.Parked > 0 && s.Orchestrator.Parked > 0
		}, patience, 10*time.Millisecond)
		return g.p.Stats()
	}
	for range 20 {
		idle()
		g.complete(g.submit(d))
	}
	s := idle()
	require.Zero(t, s.Orchestrator.FallbackFinds+s.Worker.FallbackFinds+s.Orchestrator.ScoutFinds+s.Worker.ScoutFinds)
	require.Zero(t, s.Orchestrator.Finds["fallback"]+s.Worker.Finds["fallback"])
	// From a change, before its commit, to the claim that it lets be, by the server's clock alone: how fast that is, the benchmarks say.
	waits := g.query(`SELECT extract(epoch FROM x.created_at - before.created_at)::text FROM task_transitions x
		JOIN task_transitions before ON before.task_id = x.task_id AND before.sort_key = 1 WHERE x.sort_key = 2
		UNION ALL SELECT extract(epoch FROM x.created_at - before.created_at)::text FROM step_transitions x
		JOIN step_transitions before ON before.step_id = x.step_id AND before.sort_key = x.sort_key - 1 WHERE x.to_state = 'in_progress'`)
	require.Len(t, waits, 21*3)
	var all []float64
	for _, text := range waits {
		var seconds float64
		_, err := fmt.Sscan(text, &seconds)
		require.NoError(t, err)
		all = append(all, seconds)
	}
	slices.Sort(all)
	t.Logf("from a change to its claim: p50 %.1f ms", 1000*all[len(all)/2])
	require.Less(t, all[len(all)/2], 1.0, "no poll comes so soon")
}
