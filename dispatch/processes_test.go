package dispatch_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of items when processes end, or are ended?

// child is what a process of these tests is told.
type child struct {
	URL, Schema string
	Lease       time.Duration
	Takes       time.Duration // a handler
}

const childVariable = "PGWAKE_TEST_DISPATCHER"

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
	testschema.Main(m)
}

// run dispatches until SIGTERM.
func (c child) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	const places = 8
	config, err := pgxpool.ParseConfig(c.URL)
	if err != nil {
		return err
	}
	config.MaxConns = places + 4 // a transaction each, and what the Dispatcher does beside
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: c.Schema, SkipMigrate: true})
	if err != nil {
		return err
	}
	defer p.Close(context.Background())
	d := dispatch.New(p, &dispatch.Config{
		Concurrency: places, LockTimeout: c.Lease, Begin: pool.Begin, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	dispatch.HandleTx(d, "work", func(ctx context.Context, tx pgx.Tx, n int) (struct{}, error) {
		item := dispatch.ItemFrom(ctx)
		waited := time.Since(p.LocalTime(item.DueAt))
		time.Sleep(c.Takes)
		_, err := tx.Exec(ctx, `INSERT INTO `+pgx.Identifier{c.Schema, "effects"}.Sanitize()+` VALUES ($1, $2, $3)`, n, item.Attempt, waited)
		return struct{}{}, err
	})
	fmt.Println("ready")
	return d.Run(ctx)
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

// fleet is three processes under a load of 200 items a second.
type fleet struct {
	child
	p         *pgwake.Provider
	pool      *pgxpool.Pool
	processes []*exec.Cmd
	enqueued  int
}

func newFleet(t *testing.T, lease, takes time.Duration) *fleet {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	f := &fleet{child: child{URL: pgwaketest.URL(t), Schema: testdb.Schema(t), Lease: lease, Takes: takes}}
	var err error
	f.pool, err = pgxpool.New(t.Context(), f.URL)
	require.NoError(t, err)
	t.Cleanup(f.pool.Close)
	f.p, err = pgwake.New(t.Context(), f.pool, &pgwake.Config{Schema: f.Schema})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.p.Close(context.Background())) })
	f.exec(t, `CREATE TABLE `+f.table()+` (n integer PRIMARY KEY, attempt integer, waited interval)`)
	for range 3 {
		f.processes = append(f.processes, f.start(t))
	}
	return f
}

func (f *fleet) table() string { return pgx.Identifier{f.Schema, "effects"}.Sanitize() }

func (f *fleet) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// load enqueues for so long.
func (f *fleet) load(t *testing.T, length time.Duration) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(length); time.Now().Before(end); <-tick.C {
		enqueue := pgwake.WorkItem{Name: "work", Input: json.RawMessage(fmt.Sprint(f.enqueued))}
		_, err := f.p.EnqueueForWorker(t.Context(), enqueue, nil)
		require.NoError(t, err)
		f.enqueued++
	}
}

// end waits until everything is done, and returns the longest wait and how many items were tried again.
func (f *fleet) end(t *testing.T) (longest time.Duration, again int) {
	t.Helper()
	awaitEmpty(t, f.p)
	var rows int
	require.NoError(t, f.pool.QueryRow(t.Context(),
		`SELECT count(*), max(waited), count(*) FILTER (WHERE attempt > 1) FROM `+f.table()).Scan(&rows, &longest, &again))
	require.Equal(t, f.enqueued, rows, "each item has had its effect, once")
	t.Logf("%d items; the longest wait was %v; %d were tried again", rows, longest, again)
	return longest, again
}

// A lease of half a minute tells what was given back from what was left to expire.
func TestRollingRestart_UnderLoad_NoItemWaitsForALease(t *testing.T) {
	f := newFleet(t, 30*time.Second, 20*time.Millisecond)
	for i := range f.processes {
		f.load(t, 500*time.Millisecond)
		require.NoError(t, f.processes[i].Process.Signal(syscall.SIGTERM))
		stopped := make(chan error, 1)
		go func() { stopped <- f.processes[i].Wait() }()
		f.load(t, 200*time.Millisecond)
		require.NoError(t, awaited(t, stopped, 3*patience))
		f.processes[i] = f.start(t)
	}
	f.load(t, 500*time.Millisecond)
	longest, again := f.end(t)
	require.Less(t, longest, 15*time.Second)
	require.Zero(t, again, "whatever is begun is ended, and what was only claimed does not count")
}

func TestKill_OneOfThreeProcesses_ItsItemsComeBackWithTheirLeases(t *testing.T) {
	const lease = 2 * time.Second
	f := newFleet(t, lease, 100*time.Millisecond) // so that each has some in hand
	var longest time.Duration
	again := 0
	for i := 0; i < len(f.processes) && again == 0; i++ { // what is killed had none if little can be enqueued in that time
		f.load(t, 500*time.Millisecond)
		require.NoError(t, f.processes[i].Process.Kill())
		_ = f.processes[i].Wait()
		f.processes[i] = f.start(t)
		f.load(t, 500*time.Millisecond)
		longest, again = f.end(t)
	}
	require.Positive(t, again, "they had none")
	require.Less(t, longest, 15*time.Second, "from the end of the lease")
}
