package taskgraph_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
)

// This file answers: how does a test get tasks in any state, without running them?

// stage is a schema with the tables of the task graph, and one definition whose tasks are put there row by row.
type stage struct {
	*taskgraph.Graph
	p      *pgwake.Provider
	schema string
	pool   *pgxpool.Pool
}

// The definition of all tasks, and of all steps.
const (
	theDefinition = "00000000-0000-0000-0000-00000000000d"
	theStep       = "00000000-0000-0000-0000-0000000000d1"
)

func newStage(t *testing.T) *stage {
	t.Helper()
	p := schemas.New(t, nil)
	e, err := taskgraph.New(t.Context(), p, nil)
	require.NoError(t, err)
	s := &stage{Graph: e.Graph, p: p, schema: p.Schema()}
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{s.schema}.Sanitize() + ", pg_temp"
	s.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(s.pool.Close)
	s.exec(t, `INSERT INTO task_definitions (task_definition_id, namespace, name) VALUES ('`+theDefinition+`', 'default', 'the task')`)
	s.exec(t, `INSERT INTO step_definitions (step_definition_id, task_definition_id, position, name, handler)
		VALUES ('`+theStep+`', '`+theDefinition+`', 1, 'the step', 'handler')`)
	return s
}

// testing is what *testing.T and *rapid.T have in common.
type tester interface {
	require.TestingT
	Helper()
}

func (s *stage) exec(t tester, sql string, args ...any) {
	t.Helper()
	_, err := s.pool.Exec(context.Background(), sql, args...)
	require.NoError(t, err)
}

// fill executes statements that add, or remove, many rows at once, of which none is to refer to nothing. A session that has planned what
// a foreign key looks up when there were few rows reads all of a table for each of them.
func (s *stage) fill(t tester, sql string) {
	t.Helper()
	require.NoError(t, s.pool.AcquireFunc(context.Background(), func(c *pgxpool.Conn) error {
		return c.Conn().PgConn().Exec(context.Background(), "SET session_replication_role = replica;"+sql+";RESET session_replication_role").Close()
	}))
}

// value is the one value that a query returns.
func value[T any](t tester, s *stage, sql string, args ...any) T {
	t.Helper()
	found, err := s.pool.Query(context.Background(), sql, args...)
	require.NoError(t, err)
	v, err := pgx.CollectExactlyOneRow(found, pgx.RowTo[T])
	require.NoError(t, err)
	return v
}

// put is a task of the model that is in the tables.
type put struct {
	id    string
	steps []string // ids, in the order of the model
}

// place returns which step of the model has that id.
func (p put) place(id string) int { return slices.Index(p.steps, id) }

// byID are the places of the steps in the order of their ids.
func (p put) byID() []int {
	places := make([]int, len(p.steps))
	for i := range places {
		places[i] = i
	}
	slices.SortFunc(places, func(a, b int) int { return cmp.Compare(p.steps[a], p.steps[b]) })
	return places
}

// id is a new id, in no order.
func id() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// insert puts tasks into the tables as they are, with what a turn would have noted in unmet and passed_on. A task in one of
// the states that are looked at by get_next_ready_tasks may be ready now.
func (s *stage) insert(t tester, tasks ...model.Task) []put {
	t.Helper()
	all := make([]put, len(tasks))
	batch := &pgx.Batch{}
	for n, task := range tasks {
		p := put{id: id()}
		for range task.Steps {
			p.steps = append(p.steps, id())
		}
		all[n] = p
		batch.Queue(`INSERT INTO tasks (task_id, task_definition_id, namespace, state, priority_key, total_steps, next_ready_at, correlation_id, created_at)
			SELECT $1, $2, 'default', $3, task_priority_key('default', 0, 0, now), $4, CASE WHEN NOT is_terminal($3) THEN now END, $1, now
			  FROM clock_timestamp() AS now`, p.id, theDefinition, cmp.Or(task.State, "pending"), len(task.Steps))
		for i, step := range task.Steps {
			var result []byte
			if step.Result != nil {
				result, _ = json.Marshal(step.Result)
			}
			unmet := 0
			for _, parent := range step.Parents {
				if !model.Done(task.Steps[parent.Step].State) {
					unmet++
				}
			}
			batch.Queue(`INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state, retryable, max_attempts, attempts,
					backoff_request_seconds, last_attempted_at, next_attempt_at, results, unmet, passed_on)
				VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`,
				p.steps[i], p.id, theStep, i+1, fmt.Sprint("s", i), step.State, step.Retryable, step.MaxAttempts, step.Attempts,
				step.Backoff, step.LastAttempt, step.NextAttempt, result, unmet, model.Done(step.State))
			batch.Queue(`INSERT INTO step_transitions (step_id, sort_key, task_id, to_state) VALUES ($1, 1, $2, 'pending')`, p.steps[i], p.id)
			if step.LastFailure != nil {
				batch.Queue(`INSERT INTO step_transitions (step_id, sort_key, task_id, to_state, created_at)
					VALUES ($1, 2, $2, 'enqueued_as_error_for_orchestration', $3::timestamptz - interval '1 s'), ($1, 3, $2, $4, $3), ($1, 4, $2, 'in_progress', $3::timestamptz + interval '1 h')`,
					p.steps[i], p.id, step.LastFailure, [...]string{"error", "waiting_for_retry", "enqueued_as_error_for_orchestration"}[i%3])
			}
		}
		for i, step := range task.Steps { // when all are there
			for k, parent := range step.Parents {
				var condition *string
				if parent.Condition != nil {
					path := parent.Condition.Path()
					condition = &path
				}
				batch.Queue(`INSERT INTO step_dependencies (task_id, from_step_id, to_step_id, name, condition) VALUES ($1, $2, $3, $4, $5::text::jsonpath)`,
					p.id, p.steps[parent.Step], p.steps[i], fmt.Sprint("edge ", k), condition)
			}
		}
	}
	require.NoError(t, s.pool.SendBatch(context.Background(), batch).Close())
	return all
}

// steps are n steps in a state, without parents, that have all their attempts.
func steps(n int, state string) []model.Step {
	all := make([]model.Step, n)
	for i := range all {
		all[i] = model.Step{State: state, Retryable: true, MaxAttempts: 3}
	}
	return all
}

// after makes a step depend on others.
func after(step model.Step, parents ...int) model.Step {
	for _, p := range parents {
		step.Parents = append(step.Parents, model.Parent{Step: p})
	}
	return step
}

// chain is a task of n steps, each of which waits for the one before.
func chain(n int) model.Task {
	task := model.Task{Steps: steps(n, "pending")}
	for i := 1; i < n; i++ {
		task.Steps[i] = after(task.Steps[i], i-1)
	}
	return task
}

// oneStep is a step in a state that some steps are the parents of.
func oneStep(state string, parents ...int) model.Step { return after(steps(1, state)[0], parents...) }

// instant is so far from now, as the server keeps it.
func instant(d time.Duration) *time.Time {
	at := time.Now().Add(d).Truncate(time.Microsecond)
	return &at
}

func (s *stage) settings(t tester, set string) {
	t.Helper()
	s.exec(t, `UPDATE taskgraph_settings SET `+set)
	s.exec(t, `UPDATE tasks SET priority_key = task_priority_key(namespace, priority, retries, created_at)`)
}

// ready inserts a pending task without steps that was created so long ago.
func (s *stage) ready(t tester, age time.Duration, set ...string) string {
	t.Helper()
	task := id()
	s.exec(t, `INSERT INTO tasks (task_id, task_definition_id, namespace, correlation_id, next_ready_at, created_at)
		VALUES ($1, $2, 'default', $1, now(), now() - $3::interval)`, task, theDefinition, age)
	s.exec(t, `UPDATE tasks SET `+strings.Join(append(set, `updated_at = now()`), ", ")+` WHERE task_id = $1`, task)
	s.exec(t, `UPDATE tasks SET priority_key = task_priority_key(namespace, priority, retries, created_at) WHERE task_id = $1`, task)
	return task
}
