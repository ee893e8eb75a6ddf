package taskgraph_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of tasks when processes are killed between any two statements?

// child is what a process of these tests is told.
type child struct {
	URL, Schema string
	Lease       time.Duration
}

const childVariable = "PGWAKE_TEST_TASKGRAPH"

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // what fails here is to fail
	if told := os.Getenv(childVariable); told != "" {
		var c child
		if err := json.Unmarshal([]byte(told), &c); err != nil {
			panic(err)
		}
		if err := c.run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Most of what these tests do is to wait, for a server or for each other.
	flag.Parse()
	if n := flag.Lookup("test.parallel").Value; n.(flag.Getter).Get().(int) < atOnce {
		if err := n.Set(strconv.Itoa(atOnce)); err != nil {
			panic(err)
		}
	}
	testschema.Main(m)
}

// atOnce is how many parallel tests run at a time, at least.
const atOnce = 4

// run is an Engine until SIGTERM. Its handlers note each attempt in the table runs.
func (c child) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	p, err := pgwake.Open(ctx, c.URL, &pgwake.Config{Schema: c.Schema, SkipMigrate: true})
	if err != nil {
		return err
	}
	defer p.Close(context.Background())
	config := &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond, Max: 100 * time.Millisecond}}
	config.Steps.LockTimeout, config.Turns.LockTimeout = c.Lease, c.Lease
	e, err := taskgraph.New(ctx, p, config)
	if err != nil {
		return err
	}
	runs := pgx.Identifier{c.Schema, "runs"}.Sanitize()
	handle := func(name string, h taskgraph.Handler) {
		e.Handle(name, func(ctx context.Context, s *taskgraph.Step) (any, error) {
			if _, err := p.Pool().Exec(ctx, `INSERT INTO `+runs+` VALUES ($1, $2)`, s.ID, s.Attempt); err != nil {
				return nil, err
			}
			return h(ctx, s)
		})
	}
	handle("work", func(_ context.Context, s *taskgraph.Step) (any, error) {
		if n, _ := strconv.Atoi(s.Name[len(s.Name)-1:]); n%3 == 0 && s.Attempt == 1 {
			return nil, errBroken // some are tried again in any case
		}
		return s.Name, nil
	})
	handle("decide", func(_ context.Context, s *taskgraph.Step) (any, error) {
		d := &taskgraph.Decision{Result: s.Name}
		for _, name := range []string{"extra-1", "extra-3"} {
			d.Steps = append(d.Steps, taskgraph.AddedStep{Name: name, Template: "extra", After: []string{s.Name}, Before: []string{"end-3"}})
		}
		return d, nil
	})
	handle("checkpoint", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		at := 0
		if _, err := s.LastCheckpoint(&at); err != nil || at == 3 {
			return at, err
		}
		return nil, errors.Join(errBroken, s.Checkpoint(ctx, at+1))
	})
	handle("hold", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		if s.Attempt == 1 {
			// Until the test lets go, or the process is killed.
			if _, err := p.Pool().Exec(ctx, `SELECT pg_advisory_xact_lock(hashtext($1))`, c.Schema); err != nil {
				return nil, err
			}
		}
		return s.Name, nil
	})
	fmt.Println("ready")
	return e.Run(ctx)
}

// start starts a process and waits until it is ready.
func (c child) start(t *testing.T) *exec.Cmd {
	t.Helper()
	told, err := json.Marshal(c)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+string(told))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	return cmd
}

// kills is how often processes are killed at random: a few times unless PGWAKE_KILLS says more.
func kills(few int) int {
	if n, err := strconv.Atoi(os.Getenv("PGWAKE_KILLS")); err == nil && n > 0 {
		return n
	}
	return few
}

// newProcesses returns what processes are to be told, and an Engine on their schema that does not run.
func newProcesses(t *testing.T) (child, *graph) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	c := child{URL: pgwaketest.URL(t), Schema: testdb.Schema(t), Lease: 5 * time.Second}
	p, err := pgwake.Open(t.Context(), c.URL, &pgwake.Config{Schema: c.Schema})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	g := onProvider(t, p, nil)
	g.query(`CREATE TABLE runs (step uuid, attempt integer)`)
	return c, g
}

func TestProcesses_KilledAtRandom_EveryTaskCompletesAndNoStepIsEnqueuedTwice(t *testing.T) {
	t.Parallel()
	c, g := newProcesses(t)
	many := taskgraph.MaxAttempts(50)
	d := taskgraph.Define("shop", "killed", "1").Step("start-1", "work", many)
	var middle []string
	for i := range 4 {
		middle = append(middle, fmt.Sprintf("middle-%d", i))
		d.Step(middle[i], "work", taskgraph.After("start-1"), many)
	}
	d.Step("decide-1", "decide", taskgraph.After("start-1"), many).
		Step("checkpoint-1", "checkpoint", taskgraph.After("start-1"), many).
		SubTask("child-1", "inner", "1", taskgraph.After("start-1"), many).
		Step("join-1", "work", taskgraph.After(middle...), many).
		Step("end-3", "work", taskgraph.After("join-1", "decide-1", "checkpoint-1", "child-1"), many).
		Template("extra", "work", many)
	g.register(d, taskgraph.Define("shop", "inner", "1").Step("in-1", "work", many).Step("in-3", "work", taskgraph.After("in-1"), many))

	const processes, tasksPerRound = 3, 8
	var all []taskgraph.Submitted
	var running []*exec.Cmd
	for range processes {
		running = append(running, c.start(t))
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for range kills(testsize.Of(2, 4)) {
		batch := make([]taskgraph.Submission, tasksPerRound)
		for i := range batch {
			batch[i] = aTask(d)
		}
		submitted, err := g.SubmitMany(g.within(), batch)
		require.NoError(t, err)
		all = append(all, submitted...)
		// In the middle of whatever they are at, two are killed, and others begin.
		select {
		case <-time.After(time.Duration(random.IntN(400)) * time.Millisecond):
		case <-t.Context().Done():
		}
		for _, i := range random.Perm(processes)[:2] {
			require.NoError(t, running[i].Process.Kill())
			_ = running[i].Wait()
			running[i] = c.start(t)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, s := range all {
		done, err := g.Wait(ctx, s.ID)
		require.NoError(t, err, g.describe(s.ID))
		require.Equal(t, taskgraph.TaskComplete, done.State, g.describe(s.ID))
		require.Equal(t, len(d.Steps)-1+2, done.TotalSteps, "what was decided, once")
		require.JSONEq(t, `3`, string(g.step(s.ID, "checkpoint-1").Results))
		require.JSONEq(t, `{"in-1": "in-1", "in-3": "in-3"}`, string(g.step(s.ID, "child-1").Results))
		require.NoError(t, g.replay(s.ID))
	}
	// The step that is a task has no worker that could be lost.
	require.Equal(t, fmt.Sprintf("%d %[1]d", len(all)), g.one(`SELECT count(*) || ' ' || count(*) FILTER (WHERE state = 'complete') FROM tasks WHERE parent_task_id IS NOT NULL`))
	// An attempt is begun by in_progress alone, and each ended in a state that the machine has: no step was enqueued while it was.
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM step_transitions x JOIN step_transitions y ON y.step_id = x.step_id AND y.sort_key = x.sort_key + 1
		WHERE x.to_state = 'enqueued' AND y.to_state NOT IN ('in_progress')`))
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM runs r WHERE NOT EXISTS (
		SELECT FROM step_transitions x WHERE x.step_id = r.step AND x.to_state = 'in_progress' OFFSET 0)`))
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM (SELECT step, attempt FROM runs GROUP BY 1, 2 HAVING count(*) > 1) AS twice`), "each attempt runs once at most")
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	for _, cmd := range running {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.NoError(t, cmd.Wait())
	}
}

// kill ends a process as if by the kernel.
func kill(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
}

func TestProcesses_KilledWhileAStepRuns_AnotherRunsItAgain(t *testing.T) {
	t.Parallel()
	c, g := newProcesses(t)
	hold := session(t, g.p)
	_, err := hold.Exec(t.Context(), `SELECT pg_advisory_lock(hashtext($1))`, c.Schema)
	require.NoError(t, err)
	first := c.start(t)
	task := g.submit(taskgraph.Define("shop", "killed", "1").Step("a", "hold", taskgraph.MaxAttempts(2)).Step("b", "hold", taskgraph.After("a")))
	eventually(t, func() bool { return len(g.query(`SELECT step::text FROM runs`)) == 1 })
	require.Equal(t, "steps_in_process", g.one(`SELECT state FROM tasks WHERE task_id = $1`, task))
	kill(t, first)
	c.start(t)
	eventually(t, func() bool { return g.step(task, "a").State == taskgraph.StepComplete })
	_, err = hold.Exec(t.Context(), `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, err)
	g.complete(task)
	require.Equal(t, "1", g.lostWorkers())
	require.Equal(t, []string{"1", "2"}, g.query(`SELECT attempt::text FROM runs r JOIN steps s ON s.step_id = r.step AND s.name = 'a' ORDER BY attempt`))
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "waiting_for_retry", "pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"))
}

// The process is killed while its statement goes from one active state to the next. The server may carry that to its end, or not.
func TestProcesses_KilledInTheMiddleOfATurn_ItIsTakenOnceOrByAnother(t *testing.T) {
	t.Parallel()
	for _, turn := range []string{"first", "next"} {
		for _, rolledBack := range []bool{false, true} {
			t.Run(fmt.Sprint(turn, " rolled back ", rolledBack), func(t *testing.T) {
				t.Parallel()
				c, g := newProcesses(t)
				hold, lock := session(t, g.p), session(t, g.p)
				_, err := hold.Exec(t.Context(), `SELECT pg_advisory_lock(hashtext($1))`, c.Schema)
				require.NoError(t, err)
				task := g.submit(taskgraph.Define("shop", "killed", "1").Step("a", "hold").Step("b", "work-1", taskgraph.After("a")))
				begin := func() pgx.Tx {
					tx, err := lock.Begin(t.Context())
					require.NoError(t, err)
					_, err = tx.Exec(t.Context(), `SELECT FROM tasks WHERE task_id = $1 FOR UPDATE`, task)
					require.NoError(t, err)
					return tx
				}
				var tx pgx.Tx
				if turn == "first" {
					tx = begin()
				}
				first := c.start(t)
				if turn == "next" {
					eventually(t, func() bool { return len(g.query(`SELECT step::text FROM runs`)) == 1 })
					tx = begin()
				}
				_, err = hold.Exec(t.Context(), `SELECT pg_advisory_unlock_all()`)
				require.NoError(t, err)
				var waiting []string
				eventually(t, func() bool {
					waiting = g.query(`SELECT pid::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || current_schema() || '%evaluate_task%'`)
					return len(waiting) == 1
				})
				kill(t, first)
				if rolledBack {
					g.query(`SELECT pg_terminate_backend($1::integer)::text`, waiting[0])
				}
				require.NoError(t, tx.Rollback(t.Context()))
				// What it adds while the other begins to wait would be found by the fallback alone: whoever was to tell of it is gone.
				eventually(t, func() bool {
					return len(g.query(`SELECT pid::text FROM pg_stat_activity WHERE pid = $1::integer`, waiting[0])) == 0
				})
				c.start(t)
				eventually(t, func() bool { return g.step(task, "b").State == taskgraph.StepEnqueued })
				require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"))
				require.Equal(t, []string{"pending", "enqueued"}, g.stepStates(task, "b"))
				require.Equal(t, []string{"pending", "initializing", "enqueuing_steps", "steps_in_process", "evaluating_results", "enqueuing_steps", "steps_in_process"}, g.states(task))
				require.NoError(t, g.replay(task))
			})
		}
	}
}

// replay runs the transitions of a task through the state machines in Go.
func (g *graph) replay(task string) error {
	_, err := g.Replay(g.within(), task)
	return err
}
