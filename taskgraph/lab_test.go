package taskgraph_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: how do tests of single verbs get tasks into any state, at any time in the past?

// labPatience is far more than anything here should take.
const labPatience = 30 * time.Second

// schemas are those of all tests that do not migrate themselves.
var schemas = testschema.With(migrations.Layer())

// lab is the verbs on a schema of its own, without an Engine, and a session in which all names are those of the schema.
type lab struct {
	*taskgraph.Graph
	t    *testing.T
	p    *pgwake.Provider
	conn *pgx.Conn
}

func newLab(t *testing.T) *lab {
	t.Helper()
	p := schemas.New(t, nil)
	return &lab{taskgraph.NewGraph(p), t, p, session(t, p)}
}

// session is one more connection on the schema of p.
func session(t *testing.T, p *pgwake.Provider) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), p.Pool().Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = conn.Exec(t.Context(), `SELECT set_config('search_path', $1, false)`, pgx.Identifier{p.Schema()}.Sanitize())
	require.NoError(t, err)
	return conn
}

// pool is a pool on the schema of p, for as many callers at once.
func pool(t *testing.T, p *pgwake.Provider, most int) *pgxpool.Pool {
	t.Helper()
	config := p.Pool().Config().Copy()
	config.MaxConns = int32(most)
	config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{p.Schema()}.Sanitize()
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// apart has a verb on a connection of the pool, in a transaction of its own.
func (l *lab) apart(p *pgxpool.Pool, verb func(g *taskgraph.Graph) error) error {
	return pgx.BeginFunc(l.t.Context(), p, func(tx pgx.Tx) error { return verb(l.WithTx(tx)) })
}

func (l *lab) within() context.Context {
	ctx, cancel := context.WithTimeout(l.t.Context(), labPatience)
	l.t.Cleanup(cancel)
	return ctx
}

func (l *lab) exec(sql string, args ...any) {
	l.t.Helper()
	_, err := l.conn.Exec(l.within(), sql, args...)
	require.NoError(l.t, err, sql)
}

// undone has statements executed when the test ends: a schema that is as it was made is lent to another test, and to make one takes longer
// than most tests do.
func (l *lab) undone(sql string) {
	l.t.Helper()
	l.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), labPatience)
		defer cancel()
		_, _ = l.conn.Exec(ctx, sql) // or else it is dropped
	})
}

// eventually asserts that something comes to be. It asks less and less often: what takes long is mostly held up by other tests, which
// have the processors for themselves the while.
func eventually(t *testing.T, is func() bool) {
	t.Helper()
	pause := 3 * time.Millisecond
	for end := time.Now().Add(labPatience); ; pause = min(pause*3/2, 30*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-t.Context().Done():
		}
		if is() {
			return
		}
		if time.Now().After(end) {
			require.Fail(t, "it does not come to be")
		}
	}
}

// fails asserts that a statement fails with this SQLSTATE.
func (l *lab) fails(state, sql string, args ...any) {
	l.t.Helper()
	_, err := l.conn.Exec(l.within(), sql, args...)
	require.ErrorContains(l.t, err, "(SQLSTATE "+state+")", sql)
}

// role is a new role of docs/security.md.
func (l *lab) role(role string) string {
	l.t.Helper()
	return testroles.New(l.t, role, l.p.Schema(), "taskgraph")
}

// as has a role execute a statement.
func (l *lab) as(role, sql string, args ...any) {
	l.t.Helper()
	l.exec(`SET ROLE ` + role)
	defer l.exec(`RESET ROLE`)
	l.exec(sql, args...)
}

// all returns the only column of a query.
func all[T any](l *lab, sql string, args ...any) []T {
	l.t.Helper()
	rows, err := l.conn.Query(l.within(), sql, args...)
	require.NoError(l.t, err, sql)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(l.t, err, sql)
	return values
}

// one returns the only value of a query.
func one[T any](l *lab, sql string, args ...any) T {
	l.t.Helper()
	values := all[T](l, sql, args...)
	require.Len(l.t, values, 1, sql)
	return values[0]
}

// define registers a definition of steps that do not depend on each other, with a configuration in JSON.
func (l *lab) define(namespace, name, version, configuration string, steps ...string) string {
	l.t.Helper()
	handlers := make([]string, len(steps))
	for i := range handlers {
		handlers[i] = "handler"
	}
	return one[string](l, `SELECT register_task_definition($1, $2, $3, NULL, $4::jsonb, $5, $6)::text`, namespace, name, version, configuration, steps, handlers)
}

// create creates a task of a definition that has version 1.
func (l *lab) create(namespace, name string) string {
	l.t.Helper()
	return one[string](l, `SELECT create_task($1, $2, '1')::text`, namespace, name)
}

// bring takes a pending task into a state, by a way that there is.
func (l *lab) bring(task string, to taskgraph.TaskState) {
	l.t.Helper()
	if path := taskPath(to); len(path) > 1 {
		require.True(l.t, one[bool](l, `SELECT transition_task($1, $2, NULL, '{}', true)`, task, path))
	}
}

// taskPath is a shortest way from pending to a state.
func taskPath(to taskgraph.TaskState) []taskgraph.TaskState {
	return shortest(taskgraph.TaskPending, to, taskgraph.TaskState.Next)
}

func stepPath(to taskgraph.StepState) []taskgraph.StepState {
	return shortest(taskgraph.StepPending, to, taskgraph.StepState.Next)
}

func shortest[S comparable](from, to S, next func(S) []S) []S {
	for paths := [][]S{{from}}; ; paths = paths[1:] {
		last := paths[0][len(paths[0])-1]
		if last == to {
			return paths[0]
		}
		for _, s := range next(last) {
			paths = append(paths, append(append([]S{}, paths[0]...), s))
		}
	}
}

// step is the id of a step of a task.
func (l *lab) step(task, name string) string {
	l.t.Helper()
	return one[string](l, `SELECT step_id::text FROM steps WHERE task_id = $1 AND name = $2`, task, name)
}

// older makes a task as if it had come into its state so long before.
func (l *lab) older(task string, d time.Duration) {
	l.t.Helper()
	l.exec(`UPDATE tasks SET state_entered_at = state_entered_at - $2::interval, created_at = created_at - $2::interval, start_at = start_at - $2::interval,
		next_ready_at = next_ready_at - $2::interval WHERE task_id = $1`, task, d)
	l.exec(`UPDATE orchestrator_queue SET visible_at = visible_at - $2::interval WHERE instance_id = $1`, task, d)
}

// attempt is one at a step: how long it took, and what came of it.
type attempt struct {
	took time.Duration
	to   taskgraph.StepState // StepEnqueuedForOrchestration, StepEnqueuedAsErrorForOrchestration, or StepError: the worker was lost
}

// past is a task that ended some time ago, with the steps of its definition and the attempts at them; a step without attempts did not run.
type past struct {
	definition string // its id
	ended      time.Duration
	took       time.Duration
	state      taskgraph.TaskState
	steps      map[string][]attempt
}

// was writes it down, as of now. It is not how a task gets there, but what is counted is the same.
func (l *lab) was(p past) string {
	l.t.Helper()
	var task string
	var now time.Time
	require.NoError(l.t, l.conn.QueryRow(l.within(), `SELECT gen_random_uuid()::text, clock_timestamp()`).Scan(&task, &now))
	ended := now.Add(-p.ended)
	l.exec(`INSERT INTO tasks (task_id, task_definition_id, namespace, state, sort_key, state_entered_at, total_steps, completed_at, correlation_id, created_at)
		SELECT $1, $2, d.namespace, $3, 2, $4, (SELECT count(*) FROM step_definitions s WHERE s.task_definition_id = $2), CASE WHEN is_terminal($3) THEN $4::timestamptz END, $1, $5
		  FROM task_definitions d WHERE d.task_definition_id = $2`, task, p.definition, p.state, ended, ended.Add(-p.took))
	l.exec(`INSERT INTO task_transitions (task_id, sort_key, from_state, to_state, created_at) VALUES ($1, 1, NULL, 'pending', $2), ($1, 2, 'pending', $3, $4)`,
		task, ended.Add(-p.took), p.state, ended)
	for _, name := range all[string](l, `SELECT name FROM step_definitions WHERE task_definition_id = $1 ORDER BY position`, p.definition) {
		at := ended.Add(-p.took)
		path, instants := []string{"pending"}, []time.Time{at}
		move := func(to taskgraph.StepState) { path, instants = append(path, string(to)), append(instants, at) }
		for i, a := range p.steps[name] {
			if i > 0 {
				move(taskgraph.StepWaitingForRetry)
			}
			move(taskgraph.StepInProgress)
			at = at.Add(a.took)
			move(a.to)
		}
		switch path[len(path)-1] {
		case string(taskgraph.StepEnqueuedForOrchestration):
			at = at.Add(time.Millisecond)
			move(taskgraph.StepComplete)
		case string(taskgraph.StepEnqueuedAsErrorForOrchestration):
			move(taskgraph.StepError)
		}
		events := make([]string, len(path))
		for i, to := range path {
			if events[i] = `{}`; to == string(taskgraph.StepError) {
				events[i] = `{"event": "WorkerLost"}`
			}
		}
		l.exec(`WITH s AS (
			INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state, sort_key, attempts)
			SELECT gen_random_uuid(), $1, d.step_definition_id, d.position, d.name, $4, cardinality($5::text[]), $6 FROM step_definitions d WHERE d.task_definition_id = $2 AND d.name = $3
			RETURNING step_id, task_id)
			INSERT INTO step_transitions (step_id, task_id, sort_key, from_state, to_state, metadata, created_at)
			SELECT s.step_id, s.task_id, x.n, ($5::text[])[x.n - 1], x.to_state, x.metadata, x.at FROM s, unnest($5::text[], $7::jsonb[], $8::timestamptz[]) WITH ORDINALITY AS x (to_state, metadata, at, n)`,
			task, p.definition, name, path[len(path)-1], path, len(p.steps[name]), events, instants)
	}
	return task
}

func succeeded(took time.Duration) attempt {
	return attempt{took, taskgraph.StepEnqueuedForOrchestration}
}

func failed(took time.Duration) attempt {
	return attempt{took, taskgraph.StepEnqueuedAsErrorForOrchestration}
}

// refreshed runs a test as things are, and then after the rollups were refreshed: it makes no difference.
func (l *lab) refreshed(check func(t *testing.T)) {
	l.t.Helper()
	for _, when := range []string{"before", "after"} {
		ok := l.t.Run(fmt.Sprintf("%s a refresh", when), func(t *testing.T) { check(t) })
		require.True(l.t, ok)
		_, err := l.RefreshRollups(l.within())
		require.NoError(l.t, err)
	}
}
