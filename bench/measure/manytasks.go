package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what does a question about tasks cost when there are many, or when one is large?

// ManyTasksOptions are the sizes of ManyTasks.
type ManyTasksOptions struct {
	Tasks int // of ten steps each. Defaults to 1,000,000.
	Large int // steps of one task, with five times as many dependencies. Defaults to 10,000.
	Reads int // of each query. Defaults to 20.

	Progress func(Progress)
}

// ManyTasksResult is what ManyTasks found.
type ManyTasksResult struct {
	Tasks int `json:"tasks"`
	Steps int `json:"steps"`
	Large int `json:"large"` // steps
	Edges int `json:"edges"` // of those

	Registered time.Duration `json:"registered"` // the definition of the large task
	Created    time.Duration `json:"created"`    // that task

	Queries []*QueryCost `json:"queries"`
}

// QueryCost is what one query takes.
type QueryCost struct {
	SQL   string  `json:"sql"`
	Times Samples `json:"times"` // to the result and back
	Rows  int64   `json:"rows"`

	// Plans are those of all statements that it led to, each as it was made for the first time, as EXPLAIN (ANALYZE, BUFFERS) has them.
	// None where the server has no auto_explain.
	Plans []string `json:"plans,omitempty"`
}

// Query returns the first whose SQL begins so; nil if there is none.
func (r *ManyTasksResult) Query(begins string) *QueryCost {
	for _, q := range r.Queries {
		if strings.HasPrefix(q.SQL, begins) {
			return q
		}
	}
	return nil
}

var (
	//go:embed manytasks_tasks.sql
	manyTasksSQL string
	//go:embed manytasks_steps.sql
	manyStepsSQL string
	//go:embed manytasks_edges.sql
	manyEdgesSQL string
	//go:embed manytasks_log.sql
	manyLogSQL string
)

// The queries whose cost has a goal.
const (
	NextReadyTasks = `SELECT * FROM get_next_ready_tasks(100)`
	LargeReadiness = `SELECT count(*) FROM get_step_readiness_status($large)`
)

// manyTasksQueries are all that look for tasks or for what is ready. $task is one of the many, $step its last step, $large the large one.
var manyTasksQueries = []string{
	NextReadyTasks,
	`SELECT * FROM get_next_ready_task()`,
	`SELECT * FROM get_task_ready_info($task)`,
	`SELECT * FROM get_step_readiness_status($task)`,
	`SELECT * FROM get_step_readiness_status($task, ARRAY[$step]::uuid[])`,
	`SELECT count(*) FROM get_step_readiness_status_batch($hundred)`,
	`SELECT * FROM get_ready_steps($task)`,
	`SELECT check_step_dependencies($step)`,
	`SELECT * FROM get_task_execution_context($task)`,
	`SELECT count(*) FROM get_task_execution_contexts_batch($hundred)`,
	`SELECT * FROM calculate_dependency_levels($task)`,
	`SELECT * FROM get_step_transitive_dependencies($step)`,
	`SELECT get_step_dependency_results_map($step)`,
	`SELECT * FROM recover_tasks()`,
	`SELECT * FROM find_stuck_tasks(10) LIMIT 100`,
	`SELECT * FROM detect_and_transition_stale_tasks()`,
	`SELECT * FROM get_system_health_counts()`,
	`SELECT * FROM get_analytics_metrics()`,
	`SELECT * FROM get_slowest_steps()`,
	`SELECT * FROM get_slowest_tasks()`,
	`SELECT * FROM list_tasks(p_state => 'waiting_for_retry')`,
	`SELECT * FROM read_transitions('0', 0, 1000)`,
	LargeReadiness,
	`SELECT count(*) FROM get_ready_steps($large)`,
	`SELECT * FROM get_task_execution_context($large)`,
	`SELECT count(*) FROM calculate_dependency_levels($large)`,
}

// ManyTasks fills the tables, and asks.
func ManyTasks(ctx context.Context, url string, o ManyTasksOptions) (r *ManyTasksResult, err error) {
	orDefault(&o.Tasks, 1_000_000)
	orDefault(&o.Large, 10_000)
	orDefault(&o.Reads, 20)
	defer func(ctx context.Context) { err = about(ctx, "many tasks", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	many := taskgraph.Define("many", "many", "1").Step("1", "measure")
	for i := 2; i <= 10; i++ {
		parents := []string{fmt.Sprint(i - 1)}
		if i > 2 && i%3 == 0 {
			parents = append(parents, fmt.Sprint(i-2))
		}
		many.Step(fmt.Sprint(i), "measure", taskgraph.After(parents...))
	}
	n, e, err := s.taskNode(ctx, nil, many)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	r = &ManyTasksResult{Tasks: o.Tasks, Steps: 10 * o.Tasks, Large: o.Large}
	large := r.layered(o.Large)
	began := time.Now()
	if err := e.Register(ctx, large); err != nil {
		return nil, err
	}
	r.Registered = time.Since(began)
	began = time.Now()
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: large.Namespace, Name: large.Name, Version: large.Version})
	if err != nil {
		return nil, err
	}
	r.Created = time.Since(began)
	if err := s.exec(ctx, `UPDATE steps SET state = 'complete', passed_on = true WHERE task_id = $1 AND position <= $2`, task.ID, o.Large/2); err != nil {
		return nil, err
	}
	m := newMeter(o.Progress)
	if err := s.fillTasks(ctx, o.Tasks, m); err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	for { // so that what was filled is in the rollups, as it would be
		n, err := e.RefreshRollups(ctx)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
	}
	return r, r.ask(ctx, s, task.ID, o.Reads, m)
}

// layered is a definition of so many steps in layers of a hundred, each of which waits for five of the layer before.
func (r *ManyTasksResult) layered(steps int) *taskgraph.Definition {
	const layer, parents = 100, 5
	d := taskgraph.Define("large", "large", "1")
	for i := range steps {
		var after []string
		if i >= layer {
			before := i/layer*layer - layer
			for p := range parents {
				after = append(after, fmt.Sprint(before+(i+p*17)%layer))
			}
		}
		r.Edges += len(after)
		d.Step(fmt.Sprint(i), "measure", taskgraph.After(after...))
	}
	return d
}

// fillTasks adds the many. What it writes is right, so a server that allows for it need not check.
func (s stage) fillTasks(ctx context.Context, tasks int, m *meter) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	for _, set := range []string{`SET session_replication_role = replica`, `SET synchronous_commit = off`} {
		if _, err := conn.Exec(ctx, set); err != nil && !refusedBy(err) {
			return err
		}
	}
	const chunk = 20_000
	for first := 1; first <= tasks; first += chunk {
		for _, sql := range []string{manyTasksSQL, manyStepsSQL, manyEdgesSQL, manyLogSQL} {
			if _, err := conn.Exec(ctx, sql, first, min(first+chunk-1, tasks)); err != nil {
				return err
			}
		}
		m.report(Progress{Done: first, Total: tasks})
	}
	return nil
}

func refusedBy(err error) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && refused.Code == "42501"
}

// ask has each query answered so many times, each time undone, and once more with its plans.
func (r *ManyTasksResult) ask(ctx context.Context, s stage, large string, reads int, m *meter) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	uuid := func(id string) string { return "'" + id + "'::uuid" }
	id := func(n int) string { return fmt.Sprintf("00000000-0000-7000-8000-%012x", n) }
	middle := r.Tasks/2/20*20 + 19 // one that is ready
	var hundred []string
	for i := range 100 {
		hundred = append(hundred, id(min(middle+i, r.Tasks)))
	}
	names := strings.NewReplacer("$task", uuid(id(middle)), "$step", uuid(fmt.Sprintf("00000000-0000-7000-900a-%012x", middle)),
		"$large", uuid(large), "$hundred", "'{"+strings.Join(hundred, ",")+"}'::uuid[]")
	for i, sql := range manyTasksQueries {
		q := &QueryCost{SQL: sql}
		for n := range reads + 1 {
			took, rows, err := timed(ctx, conn, names.Replace(sql))
			if err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
			if q.Rows = rows; n > 0 { // the first one plans
				q.Times = append(q.Times, took)
			}
		}
		r.Queries = append(r.Queries, q)
		m.report(Progress{Done: i + 1, Total: len(manyTasksQueries), Figures: q.Times.Summary()})
	}
	return r.explain(ctx, s, names)
}

// timed has a query answered, and undone.
func timed(ctx context.Context, conn *pgx.Conn, sql string) (took time.Duration, rows int64, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	tag, err := tx.Exec(ctx, sql)
	took = time.Since(began)
	return took, tag.RowsAffected(), errors.Join(err, tx.Rollback(ctx))
}

// explain has the server tell its plans.
func (r *ManyTasksResult) explain(ctx context.Context, s stage, names *strings.Replacer) error {
	var plans []string
	known := make(map[string]bool) // statements, some of which are made for each of very many rows
	config, err := pgx.ParseConfig(s.url)
	if err != nil {
		return err
	}
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		_, text, _ := strings.Cut(n.Message, "Query Text: ")
		if statement, _, _ := strings.Cut(text, "(cost="); !known[statement] {
			known[statement] = true
			plans = append(plans, n.Message)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	if err := searchPath(ctx, conn, s.schema); err != nil {
		return err
	}
	var failed *pgconn.PgError
	if _, err := conn.Exec(ctx, `LOAD 'auto_explain'`); errors.As(err, &failed) {
		return nil // it is not there, or not for this role
	} else if err != nil {
		return err
	}
	for _, set := range []string{`auto_explain.log_min_duration = 0`, `auto_explain.log_analyze = on`, `auto_explain.log_buffers = on`, `auto_explain.log_timing = off`,
		`auto_explain.log_nested_statements = on`, `client_min_messages = log`} {
		if _, err := conn.Exec(ctx, "SET "+set); err != nil {
			return err
		}
	}
	for _, q := range r.Queries {
		for range 2 { // the first time, what is planned is read as well
			plans = nil
			clear(known)
			if _, _, err := timed(ctx, conn, names.Replace(q.SQL)); err != nil {
				return err
			}
		}
		q.Plans = plans
	}
	return nil
}
