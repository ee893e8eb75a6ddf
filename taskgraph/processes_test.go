package taskgraph_test

import (
	"bufio"
	"context"
	"encoding/json"
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
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: what becomes of tasks when processes are killed between any two statements?

// child is what a process of these tests is told.
type child struct {
	URL, Schema string
	Lease       time.Duration
}

const childVariable = "PGWAKE_TEST_TASKGRAPH"

func TestMain(m *testing.M) {
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
	slog.SetDefault(slog.New(slog.DiscardHandler)) // what fails here is to fail
	goleak.VerifyTestMain(m)
}

// run is an Engine until SIGTERM. Its handler counts how often each step has ended, in the table runs.
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
	e.Handle("work", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		_, err := p.Pool().Exec(ctx, `INSERT INTO `+runs+` VALUES ($1, $2)`, s.ID, s.Attempt)
		if n, _ := strconv.Atoi(s.Name[len(s.Name)-1:]); n%3 == 0 && s.Attempt == 1 && err == nil {
			err = errBroken // some are tried again in any case
		}
		return s.Name, err
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

// rounds is how often something random is done: 1 unless the environment says more.
func rounds(few int) int {
	if n, err := strconv.Atoi(os.Getenv("PGWAKE_ROUNDS")); err == nil && n > 0 {
		return n
	}
	return few
}

func TestProcesses_KilledAtRandom_EveryTaskCompletesAndNoStepIsEnqueuedTwice(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	c := child{URL: pgwaketest.URL(t), Schema: testdb.Schema(t), Lease: 2 * time.Second}
	p, err := pgwake.Open(t.Context(), c.URL, &pgwake.Config{Schema: c.Schema})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	g := onProvider(t, p, nil)
	_, err = p.Pool().Exec(t.Context(), `CREATE TABLE `+pgx.Identifier{c.Schema, "runs"}.Sanitize()+` (step uuid, attempt integer)`)
	require.NoError(t, err)

	d := taskgraph.Define("shop", "killed", "1").Step("start-1", "work", taskgraph.MaxAttempts(50))
	var middle []string
	for i := range 6 {
		middle = append(middle, fmt.Sprintf("middle-%d", i))
		d.Step(middle[i], "work", taskgraph.After("start-1"), taskgraph.MaxAttempts(50))
	}
	d.Step("join-1", "work", taskgraph.After(middle...), taskgraph.MaxAttempts(50)).Step("end-3", "work", taskgraph.After("join-1"), taskgraph.MaxAttempts(50))
	g.register(d)

	const processes, tasksPerRound = 3, 10
	var all []taskgraph.Submitted
	var running []*exec.Cmd
	for range processes {
		running = append(running, c.start(t))
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for range rounds(4) {
		batch := make([]taskgraph.Submission, tasksPerRound)
		for i := range batch {
			batch[i] = taskgraph.Submission{Namespace: "shop", Name: "killed", Version: "1"}
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
	}
	// An attempt is begun by in_progress alone, and each ended in a state that the machine has: no step was enqueued while it was.
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM step_transitions x JOIN step_transitions y ON y.step_id = x.step_id AND y.sort_key = x.sort_key + 1
		WHERE x.to_state = 'enqueued' AND y.to_state NOT IN ('in_progress')`))
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM runs r WHERE NOT EXISTS (
		SELECT FROM step_transitions x WHERE x.step_id = r.step AND x.to_state = 'in_progress' OFFSET 0)`))
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM (SELECT step, attempt FROM runs GROUP BY 1, 2 HAVING count(*) > 1) AS twice`), "each attempt runs once at most")
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	for _, s := range all {
		require.NoError(t, g.replay(s.ID))
	}
	for _, cmd := range running {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.NoError(t, cmd.Wait())
	}
}

// replay runs the transitions of a task through the state machines in Go.
func (g *graph) replay(task string) error {
	_, err := g.Replay(g.within(), task)
	return err
}
