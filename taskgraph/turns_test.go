package taskgraph_test

import (
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does one turn do, statement by statement, whatever others do meanwhile?

// meanwhile has a statement sent by a session of its own, returns once it waits for a lock that somebody has, and returns what waits
// for its end.
func (l *lab) meanwhile(sql string, args ...any) (end func() error) {
	l.t.Helper()
	end, waits := l.beside(session(l.t, l.p), sql, args...)
	require.True(l.t, waits, "it waits for nobody: %s", sql)
	return end
}

// beside is meanwhile on a session that is there, for what may also come to its end: it says which of the two.
func (l *lab) beside(conn *pgx.Conn, sql string, args ...any) (end func() error, waits bool) {
	l.t.Helper()
	pid, ended := conn.PgConn().PID(), make(chan error, 1)
	go func() {
		_, err := conn.Exec(l.within(), sql, args...)
		ended <- err
	}()
	end = func() error { return <-ended }
	require.Eventually(l.t, func() bool {
		waits = one[bool](l, `SELECT wait_event_type = 'Lock' IS TRUE FROM pg_stat_activity WHERE pid = $1`, pid)
		return waits || len(ended) == 1
	}, labPatience, labPatience/10_000)
	return end, waits
}

// turn takes a turn that is due, and returns the task; "" if there is none.
func (l *lab) turn() string {
	l.t.Helper()
	turn, err := l.p.FetchOrchestrationItem(l.within(), &pgwake.FetchOptions{Queues: []string{"taskgraph"}, WithoutHistory: true, NoWait: true})
	if errors.Is(err, pgwake.ErrNoWork) {
		return ""
	}
	require.NoError(l.t, err)
	task, token, err := turn.LockToken.Turn()
	require.NoError(l.t, err)
	cancel := false
	for _, m := range turn.Messages {
		cancel = cancel || m.Kind == "cancel"
	}
	l.exec(`SELECT evaluate_task($1, $2, NULL, $3)`, task, token, cancel)
	return task
}

// turns takes turns until none is due, and says how many that were.
func (l *lab) turns() (n int) {
	l.t.Helper()
	for l.turn() != "" {
		n++
	}
	return n
}

// claimed is a work item of a step that somebody has.
type claimed struct {
	step  string
	item  int64
	token string
}

// take claims the work item of a step, as another node would once the lease of whoever has it has ended.
func (l *lab) take(task, step string) claimed {
	l.t.Helper()
	c := claimed{step: l.step(task, step)}
	require.NoError(l.t, l.conn.QueryRow(l.within(), `UPDATE worker_queue q SET lock_token = gen_random_uuid(), visible_at = clock_timestamp() + interval '1 h'
		  FROM steps s WHERE s.step_id = $1 AND q.id = s.work_item_id RETURNING q.id, q.lock_token::text`, c.step).Scan(&c.item, &c.token))
	return c
}

// begin begins an attempt at a step that is enqueued, and returns what its handler has.
func (l *lab) begin(task, step string) claimed {
	l.t.Helper()
	c := l.take(task, step)
	require.Equal(l.t, "run", l.start(c))
	return c
}

func (l *lab) start(c claimed, lostDelays ...string) string {
	l.t.Helper()
	return one[string](l, `SELECT outcome FROM start_step($1, $2, $3, NULL, $4::text[]::interval[])`, c.step, c.item, c.token, lostDelays)
}

// finish ends an attempt.
func (l *lab) finish(c claimed, success bool, results string) {
	l.t.Helper()
	require.True(l.t, one[bool](l, `SELECT finish_step($1, $2, $3, NULL, $4, $5::text::jsonb)`, c.step, c.item, c.token, success, results))
}

// ran has a step that is enqueued end well.
func (l *lab) ran(task, step, results string) {
	l.t.Helper()
	l.finish(l.begin(task, step), true, results)
}

func (l *lab) stateOf(task string) taskgraph.TaskState {
	l.t.Helper()
	return one[taskgraph.TaskState](l, `SELECT state FROM tasks WHERE task_id = $1`, task)
}

// stepStates are the states of the steps of a task, in the order of the definition.
func (l *lab) stepStates(task string) []string {
	l.t.Helper()
	return all[string](l, `SELECT state FROM steps WHERE task_id = $1 ORDER BY position`, task)
}

// submit registers definitions, and creates a task of the last one.
func (l *lab) submit(definitions ...*taskgraph.Definition) string {
	l.t.Helper()
	require.NoError(l.t, l.Register(l.within(), definitions...))
	d := definitions[len(definitions)-1]
	done, err := l.Submit(l.within(), taskgraph.Submission{Namespace: d.Namespace, Name: d.Name, Version: d.Version})
	require.NoError(l.t, err)
	return done.ID
}
