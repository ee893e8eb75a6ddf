package pgwake_test

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: do events, schedules and task graphs go on where a dump is restored on another server?

// higherNumbers makes the transactions of the server have numbers that are far above those of one that has just begun.
const higherNumbers = `DO $$ BEGIN FOR i IN 1 .. 5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`

func TestDocs_Operations_DumpToAnotherServer_LayersGoOn(t *testing.T) {
	t.Parallel()
	var script string
	blocks, _ := fences(docPages(t)["docs/operations.md"], "sh")
	for _, b := range blocks {
		if strings.Contains(b, "pg_dump") {
			script = b
		}
	}
	database := "backup_layers"
	testdb.Exec(t, testdb.URL(t), `DROP DATABASE IF EXISTS `+database+` WITH (FORCE)`)
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
	from := inDatabase(t, database)
	conn, err := pgx.Connect(t.Context(), from)
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	var version string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT split_part(current_setting('server_version'), '.', 1)`).Scan(&version))
	binaries := clientBinaries(t, version)
	other, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true, Version: version})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Stop(context.WithoutCancel(t.Context()))) })
	_, err = conn.Exec(t.Context(), higherNumbers)
	require.NoError(t, err)

	p, err := pgwake.Open(t.Context(), from, nil)
	require.NoError(t, err)
	bus, err := eventbus.New(t.Context(), p, nil)
	require.NoError(t, err)
	engine, err := taskgraph.New(t.Context(), p, nil)
	require.NoError(t, err)
	require.NoError(t, engine.Register(t.Context(), taskgraph.Define("default", "flow", "1").Step("a", "work").Step("b", "work", taskgraph.After("a"))))
	task, err := engine.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: "flow", Version: "1"})
	require.NoError(t, err)
	require.NoError(t, bus.Subscribe(t.Context(), "g", []string{"a"}, nil))
	var emitted []int64
	for range 3 {
		id, err := bus.Emit(t.Context(), "a", nil, &eventbus.EmitOptions{Key: "k"})
		require.NoError(t, err)
		emitted = append(emitted, id)
	}
	var cursor eventbus.Cursor
	require.Eventually(t, func() bool { // transactions of other tests are older
		events, err := bus.Read(t.Context(), eventbus.Cursor{}, 2)
		require.NoError(t, err)
		if len(events) == 2 {
			cursor = events[1].Cursor()
		}
		return len(events) == 2
	}, patience, 20*time.Millisecond)
	_, err = bus.Replay(t.Context(), "g", eventbus.Range{FirstID: emitted[2], LastID: emitted[2]}) // or it may replay the fourth too
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	shell := exec.CommandContext(t.Context(), "bash", "-ec", script)
	shell.Dir = t.TempDir()
	shell.Env = append(os.Environ(), "DATABASE_URL="+from, "OTHER_URL="+other.URL, "PATH="+binaries+":"+os.Getenv("PATH"))
	out, err := shell.CombinedOutput()
	require.NoError(t, err, "%s", out)

	p, err = pgwake.Open(t.Context(), other.URL, nil)
	require.NoError(t, err)
	defer p.Close(context.WithoutCancel(t.Context()))
	bus, err = eventbus.New(t.Context(), p, nil) // which adopts the log
	require.NoError(t, err)
	fourth, err := bus.Emit(t.Context(), "a", nil, &eventbus.EmitOptions{Key: "k"})
	require.NoError(t, err)
	events, err := bus.Read(t.Context(), cursor, 10)
	require.NoError(t, err)
	require.Len(t, events, 2, "the cursor is good on the other server")
	require.Equal(t, []int64{emitted[2], fourth}, []int64{events[0].ID, events[1].ID})

	var mu sync.Mutex
	var handled []int64
	node, err := bus.Node(t.Context(), &eventbus.NodeConfig{Group: "g"})
	require.NoError(t, err)
	require.NoError(t, node.On(t.Context(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		mu.Lock()
		defer mu.Unlock()
		handled = append(handled, e.ID)
		return nil
	}))
	require.NoError(t, node.Start(t.Context()))
	defer node.Stop(context.WithoutCancel(t.Context()))
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(handled) == 5
	}, patience, 5*time.Millisecond, "four events, and the replay of one")
	require.Equal(t, emitted, handled[:3], "in the order of their key")
	require.ElementsMatch(t, []int64{emitted[2], fourth}, handled[3:])

	engine, err = taskgraph.New(t.Context(), p, nil)
	require.NoError(t, err)
	engine.Handle("work", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	running, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- engine.Run(running) }()
	within, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	done, err := engine.Wait(within, task.ID)
	stop()
	require.NoError(t, <-ended)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskComplete, done.State)
}
