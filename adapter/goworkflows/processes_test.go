package goworkflows_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of tasks that end each process that takes them?

// child is what a process of these tests is told.
type child struct {
	URL, Schema string
	Attempts    int
}

const childVariable = "PGWAKE_TEST_GOWORKFLOWS"

// run is a worker until its stdin ends, or whatever else ends it.
func (c child) run() error {
	ctx := context.Background()
	p, err := pgwake.Open(ctx, c.URL, &pgwake.Config{Schema: c.Schema, SkipMigrate: true})
	if err != nil {
		return err
	}
	b, err := goworkflows.New(ctx, p, backend.WithStickyTimeout(0), backend.WithLogger(silent))
	if err != nil {
		return err
	}
	b = b.WithMaxAttempts(c.Attempts, c.Attempts)
	w := worker.New(b, b.WorkerOptions())
	if err := w.RegisterWorkflow(func(ctx workflow.Context) (int, error) {
		n, _ := workflow.NewSignalChannel[int](ctx, "x").Receive(ctx)
		return n, nil
	}, nameIs("waits")); err != nil {
		return err
	}
	if err := w.RegisterWorkflow(func(ctx workflow.Context) (int, error) {
		return workflow.ExecuteActivity[int](ctx, workflow.DefaultActivityOptions, "dies").Get(ctx)
	}, nameIs("acts")); err != nil {
		return err
	}
	if err := w.RegisterActivity(func(context.Context) (int, error) {
		os.Exit(died)
		return 0, nil
	}, nameIs("dies")); err != nil {
		return err
	}
	if err := w.Start(ctx); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// died is the code with which a process ends that panics.
const died = 2

// process is a worker in a process of its own.
type process struct {
	*exec.Cmd
	said  bytes.Buffer
	ended chan struct{}
}

func (l *lab) process(attempts int) *process {
	l.t.Helper()
	told, err := json.Marshal(child{URL: pgwaketest.URL(l.t), Schema: l.p.Schema(), Attempts: attempts})
	require.NoError(l.t, err)
	p := &process{Cmd: exec.Command(os.Args[0]), ended: make(chan struct{})}
	p.Env = append(os.Environ(), childVariable+"="+string(told), "PGAPPNAME="+l.p.Schema())
	p.Stderr = &p.said
	in, err := p.StdinPipe()
	require.NoError(l.t, err)
	require.NoError(l.t, p.Start())
	go func() {
		defer close(p.ended)
		_ = p.Wait()
	}()
	l.t.Cleanup(func() {
		_ = in.Close()
		_ = p.Process.Kill()
		<-p.ended
	})
	return p
}

// killed has a task end processes, one after the other, until one lives, since it has put the task aside.
func (l *lab) killed(first *process, attempts int) (letters []pgwake.DeadLetter) {
	l.t.Helper()
	ctx, p := l.within(), first
	for deaths := 0; ; {
		select {
		case <-p.ended:
			require.Equal(l.t, died, p.ProcessState.ExitCode(), p.said.String())
			deaths++
			require.LessOrEqual(l.t, deaths, attempts, "one process after the other")
			// Or a claim of its that is on its way takes what is due again, for nobody.
			require.Eventually(l.t, func() bool {
				var sessions int
				require.NoError(l.t, l.p.Pool().QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, l.p.Schema()).Scan(&sessions))
				return sessions == 0
			}, patience, 10*time.Millisecond)
			pgwaketest.Advance(l.t, l.p, max(l.Options().WorkflowLockTimeout, l.Options().ActivityLockTimeout))
			p = l.process(attempts)
		case <-time.After(10 * time.Millisecond):
			var err error
			letters, err = l.p.ListDeadLetters(ctx, nil)
			require.NoError(l.t, err)
			if len(letters) > 0 {
				require.Equal(l.t, attempts, deaths)
				return letters
			}
		case <-ctx.Done():
			l.t.Fatal("nothing ends the process")
		}
	}
}

func TestGetWorkflowTask_EndsEachProcessThatTakesIt_IsPutAsideAndTheWorkflowGoesOn(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	l := newLab(t, nil)
	const attempts = 2
	first := l.process(attempts)
	instance := l.run("w", "waits")
	require.Eventually(t, func() bool { return l.count("history", "true") > 0 }, patience, 10*time.Millisecond, "the workflow waits")
	signals := client.New(l.Backend)
	require.NoError(t, signals.SignalWorkflow(l.within(), "w", "x", "no number"))
	letters := l.killed(first, attempts)
	require.Len(t, letters, 1)
	require.Equal(t, "max attempts", letters[0].Reason)
	require.Equal(t, attempts+1, letters[0].Attempts)
	require.NoError(t, signals.SignalWorkflow(l.within(), "w", "x", 7))
	got, err := resultOf[int](l, instance)
	require.NoError(t, err)
	require.Equal(t, 7, got)
}

func TestGetActivityTask_EndsEachProcessThatTakesIt_IsPutAside(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	l := newLab(t, nil)
	const attempts = 2
	first := l.process(attempts)
	l.run("w", "acts")
	letters := l.killed(first, attempts)
	require.Len(t, letters, 1)
	require.Equal(t, "max attempts", letters[0].Reason)
	require.Equal(t, pgwake.Worker, letters[0].Queue)
	require.Equal(t, attempts, letters[0].Attempts)
}
