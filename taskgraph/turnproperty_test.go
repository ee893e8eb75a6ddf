package taskgraph_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: does a turn enqueue what is said to be ready, and does it count what there is, whatever was done to the steps by
// whatever verb before?

// play is a task to which anything happens that may. Delays are none, or an hour and more, so it does not matter how long anything takes.
type play struct {
	*lab
	r     *rapid.T
	task  string
	drain bool
	begun map[string]claimed // attempts by their step
}

// stepRow is a step as it is in the table.
type stepRow struct {
	ID          string     `db:"step_id"`
	Name        string     `db:"name"`
	State       string     `db:"state"`
	Attempts    int        `db:"attempts"`
	MaxAttempts int        `db:"max_attempts"`
	Retryable   bool       `db:"retryable"`
	Backoff     *int       `db:"backoff_request_seconds"`
	LastAttempt *time.Time `db:"last_attempted_at"`
	NextAttempt *time.Time `db:"next_attempt_at"`
	LastFailure *time.Time `db:"failed_at"`
	Results     []byte     `db:"results"`
	Every       int        `db:"backoff_seconds"`
}

func (p *play) rows() []stepRow {
	p.t.Helper()
	rows, err := p.conn.Query(p.within(), `SELECT s.step_id::text, s.name, s.state, s.attempts, s.max_attempts, s.retryable, s.backoff_request_seconds, s.last_attempted_at,
			s.next_attempt_at, s.results, d.backoff_seconds, (SELECT max(x.created_at) FROM step_transitions x WHERE x.step_id = s.step_id
				AND x.to_state IN ('enqueued_as_error_for_orchestration', 'waiting_for_retry', 'error')) AS failed_at
		FROM steps s JOIN step_definitions d USING (step_definition_id) WHERE s.task_id = $1 ORDER BY s.position`, p.task)
	require.NoError(p.r, err)
	steps, err := pgx.CollectRows(rows, pgx.RowToStructByName[stepRow])
	require.NoError(p.r, err)
	return steps
}

var wanted = regexp.MustCompile(`== (\d+)`)

// model is the task as it is in the tables, and the ids of its steps.
func (p *play) model() (model.Task, []string) {
	p.t.Helper()
	task := model.Task{State: string(p.stateOf(p.task))}
	var ids []string
	for _, s := range p.rows() {
		step := model.Step{State: s.State, Attempts: s.Attempts, MaxAttempts: s.MaxAttempts, Retryable: s.Retryable, Backoff: s.Backoff,
			LastAttempt: s.LastAttempt, LastFailure: s.LastFailure, NextAttempt: s.NextAttempt, Result: make(map[string]int)}
		var result map[string]any
		if json.Unmarshal(s.Results, &result) == nil {
			if n, ok := result["n"].(float64); ok {
				step.Result["n"] = int(n)
			}
		}
		task.Steps, ids = append(task.Steps, step), append(ids, s.ID)
	}
	rows, err := p.conn.Query(p.within(), `SELECT from_step_id::text, to_step_id::text, coalesce(condition::text, '') FROM step_dependencies WHERE task_id = $1`, p.task)
	require.NoError(p.r, err)
	edges, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ From, To, Condition string }])
	require.NoError(p.r, err)
	for _, e := range edges {
		parent := model.Parent{Step: slices.Index(ids, e.From)}
		if want := wanted.FindStringSubmatch(e.Condition); want != nil {
			n, err := strconv.Atoi(want[1])
			require.NoError(p.r, err)
			parent.Condition = &model.Condition{Key: "n", Want: n}
		}
		to := &task.Steps[slices.Index(ids, e.To)]
		to.Parents = append(to.Parents, parent)
	}
	return task, ids
}

// turn takes a turn, and compares what it did with what there was to do.
func (p *play) turn() {
	p.t.Helper()
	p.exec(`BEGIN`)
	before := make(map[string]stepRow)
	for _, s := range p.rows() {
		before[s.ID] = s
	}
	p.exec(`SELECT advance_task($1, NULL, NULL, true)`, p.task)
	enqueued := all[string](p.lab, `SELECT step_id::text FROM step_transitions WHERE task_id = $1 AND xact = pg_current_xact_id() AND to_state = 'enqueued' ORDER BY step_id`, p.task)

	// As if it had enqueued none of them: these have to be the ones that are ready. What failed in the turn itself waits as long as was
	// asked for then, or as its definition says.
	p.exec(`SAVEPOINT turn`)
	for _, id := range enqueued {
		s, state := before[id], "waiting_for_retry"
		if s.State == "pending" {
			state = s.State
		} else if s.NextAttempt == nil {
			at := one[time.Time](p.lab, `SELECT clock_timestamp()`).Add(time.Duration(s.Every) * time.Second)
			s.NextAttempt = &at
		}
		p.exec(`UPDATE steps SET state = $2, next_attempt_at = $3, work_item_id = NULL WHERE step_id = $1`, id, state, s.NextAttempt)
	}
	now := one[time.Time](p.lab, `SELECT clock_timestamp()`)
	task, ids := p.model()
	var ready []string
	blocked := false
	for i, s := range task.Steps {
		if task.Readiness(i, now).Ready {
			ready = append(ready, ids[i])
		}
		blocked = blocked || s.State == "error" || s.State == "cancelled"
	}
	slices.Sort(ready)
	listed := all[string](p.lab, `SELECT workflow_step_uuid::text FROM get_ready_steps($1)`, p.task)
	require.Equal(p.r, len(ready), len(listed), "the model and get_ready_steps")
	for i := range ready {
		require.Equal(p.r, ready[i], listed[i], "the model and get_ready_steps")
	}
	if task.State == "cancelled" || blocked && !p.drain {
		ready = nil // none is enqueued
	}
	require.Equal(p.r, len(ready), len(enqueued), "the model and the turn: %v and %v", ready, enqueued)
	for i := range ready {
		require.Equal(p.r, ready[i], enqueued[i], "the model and the turn")
	}
	p.exec(`ROLLBACK TO turn`)

	// What it has counted is what there is.
	require.Empty(p.r, all[string](p.lab, `SELECT s.name || ' ' || s.state || ' unmet ' || s.unmet || ' skip ' || s.skip || ' passed on ' || s.passed_on FROM steps s
		CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE NOT f.passed_on) AS unmet,
				coalesce(bool_or(f.passed_on AND d.condition IS NOT NULL AND NOT coalesce(jsonb_path_match(f.results, d.condition, '{}', true), false)), false) AS skip
			FROM step_dependencies d JOIN steps f ON f.step_id = d.from_step_id WHERE d.to_step_id = s.step_id) AS x
		WHERE s.task_id = $1 AND (s.unmet <> x.unmet OR s.skip <> x.skip OR s.passed_on <> (s.state IN ('complete', 'resolved_manually')))`, p.task))
	require.Empty(p.r, all[string](p.lab, `SELECT t.completed_steps || ' of ' || t.total_steps FROM tasks t
		CROSS JOIN LATERAL (SELECT count(*) AS n, count(*) FILTER (WHERE s.passed_on) AS passed FROM steps s WHERE s.task_id = t.task_id) AS x
		WHERE t.task_id = $1 AND (t.completed_steps, t.total_steps) <> (x.passed, x.n)`, p.task))
	after, _ := p.model()
	context := after.Context(now)
	state := taskgraph.TaskState(after.State)
	switch {
	case state == taskgraph.TaskComplete:
		require.Equal(p.r, context.Total, context.Closed)
	case state.IsTerminal():
	case blocked && !p.drain:
		require.Equal(p.r, taskgraph.TaskBlockedByFailures, state)
		require.Nil(p.r, one[*time.Time](p.lab, `SELECT next_ready_at FROM tasks WHERE task_id = $1`, p.task))
	default:
		require.NotEqual(p.r, context.Total, context.Closed, "and it goes on")
		requireInstant(p.r, context.NextReady, one[*time.Time](p.lab, `SELECT next_ready_at FROM tasks WHERE task_id = $1`, p.task))
	}
	p.exec(`COMMIT`)
	_, err := p.Replay(p.within(), p.task)
	require.NoError(p.r, err)
}

// try calls a verb that may refuse what it is asked for.
func (p *play) try(sql string, args ...any) {
	p.t.Helper()
	_, err := p.conn.Exec(p.within(), sql, args...)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && refused.Code == "PW003" {
		return
	}
	require.NoError(p.r, err, sql)
}

// happen has one thing happen.
func (p *play) happen() {
	r, steps := p.r, p.rows()
	s := rapid.SampledFrom(steps).Draw(r, "step")
	someone := func(state string) bool {
		in := slices.DeleteFunc(slices.Clone(steps), func(s stepRow) bool { return s.State != state })
		if len(in) > 0 {
			s = rapid.SampledFrom(in).Draw(r, "step "+state)
		}
		return len(in) > 0
	}
	delay := func(name string) any {
		return rapid.SampledFrom([]any{nil, "0", "1 h"}).Draw(r, name)
	}
	switch what := rapid.SampledFrom([]string{"turn", "turn", "turn", "begin", "begin", "begin", "end", "end", "end", "time", "backoff", "by hand", "transition", "add"}).Draw(r, "what"); what {
	case "turn":
		p.turn()
	case "begin":
		if someone("enqueued") {
			p.begun[s.ID] = p.begin(p.task, s.Name)
		}
	case "end":
		if !someone("in_progress") {
			return
		}
		c, ok := p.begun[s.ID]
		if !ok {
			return // it was begun by a transition
		}
		delete(p.begun, s.ID)
		switch rapid.IntRange(0, 5).Draw(r, "how") {
		case 0:
			c = p.take(p.task, s.Name)
			p.exec(`SELECT start_step($1, $2, $3, NULL, ARRAY[$4::text]::interval[])`, c.step, c.item, c.token, delay("lost"))
		case 1:
			p.exec(`SELECT release_step($1, $2, $3, NULL, coalesce($4::text, '0')::interval)`, c.step, c.item, c.token, delay("released"))
		case 2, 3:
			p.exec(`SELECT finish_step($1, $2, $3, NULL, false, jsonb_build_object('error', 'x', 'retryable', $4::boolean), $5::text::interval, $6::integer)`, c.step, c.item, c.token,
				rapid.IntRange(0, 3).Draw(r, "retryable") > 0, delay("failed"), rapid.SampledFrom([]any{nil, nil, 0, 3600}).Draw(r, "asked"))
		default:
			p.finish(c, true, rapid.SampledFrom([]string{`{"n": 1}`, `{"n": 2}`, `null`}).Draw(r, "result"))
		}
	case "time":
		p.exec(`UPDATE steps SET next_attempt_at = next_attempt_at - interval '90 min', last_attempted_at = last_attempted_at - interval '90 min' WHERE task_id = $1`, p.task)
	case "backoff":
		p.exec(`SELECT set_step_backoff_atomic($1, $2)`, s.ID, rapid.SampledFrom([]int{0, 3600}).Draw(r, "seconds"))
	case "by hand":
		verbs := []string{`SELECT reset_step_for_retry($1)`, `SELECT resolve_step_manually($1)`, `SELECT complete_step_manually($1, '{"n": 1}')`, `SELECT fail_step($1, 'x')`, `SELECT cancel_step($1)`}
		if someone("error") {
			verbs = verbs[:3]
		}
		p.exec(rapid.SampledFrom(verbs).Draw(r, "verb"), s.ID)
	case "transition":
		if next := taskgraph.StepState(s.State).Next(); len(next) > 0 {
			to := rapid.SampledFrom(next).Draw(r, "to")
			p.try(`SELECT transition_step_state_atomic($1, $2, $3)`, s.ID, s.State, to)
		}
	case "add":
		name := fmt.Sprintf("x%d", len(steps))
		parents, children := []string{s.Name}, []string{name}
		if other := rapid.SampledFrom(steps).Draw(r, "other"); other.ID != s.ID {
			parents, children = append(parents, name), append(children, other.Name)
		}
		conditions := rapid.SliceOfN(rapid.SampledFrom([]any{nil, nil, `$.n == 1`}), len(parents), len(parents)).Draw(r, "conditions")
		p.try(`SELECT add_steps($1, ARRAY[$2], ARRAY['extra'], p_parents => $3, p_children => $4, p_conditions => $5)`, p.task, name, parents, children, conditions)
	}
}

func TestTurn_AnythingHappened_EnqueuesWhatIsReadyAndCountsWhatThereIs(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := 0
	rapid.Check(t, func(r *rapid.T) {
		_, _ = l.conn.Exec(l.within(), `ROLLBACK`) // of a case that failed
		n++
		p := &play{lab: l, r: r, drain: rapid.Bool().Draw(r, "drain"), begun: make(map[string]claimed)}
		names, handlers := []string{"extra"}, []string{"h"}
		var parents, children []string
		var conditions []any
		for i := range rapid.IntRange(1, 6).Draw(r, "steps") {
			name := fmt.Sprintf("s%d", i)
			for _, parent := range names[1:] {
				if rapid.IntRange(0, 2).Draw(r, "depends") == 0 {
					parents, children = append(parents, parent), append(children, name)
					conditions = append(conditions, rapid.SampledFrom([]any{nil, nil, `$.n == 1`, `$.n == 2`}).Draw(r, "condition"))
				}
			}
			names, handlers = append(names, name), append(handlers, "h")
		}
		each := func(name string, of ...any) []any {
			return rapid.SliceOfN(rapid.SampledFrom(of), len(names), len(names)).Draw(r, name)
		}
		onDemand := make([]bool, len(names))
		onDemand[0] = true
		policy := `{}`
		if p.drain {
			policy = `{"on_failure": "drain"}`
		}
		definition := fmt.Sprintf("random%d", n)
		l.exec(`SELECT register_task_definition('shop', $1, '1', NULL, $2::text::jsonb, $3, $4, p_retryables => $5, p_max_attempts => $6, p_backoffs => $7, p_on_demands => $8,
			p_parents => $9, p_children => $10, p_conditions => $11)`, definition, policy, names, handlers, each("retryable", true, true, false), each("attempts", 1, 2, 3),
			each("backoff", 0, 3600), onDemand, parents, children, conditions)
		p.task = l.create("shop", definition)
		for range rapid.IntRange(5, 40).Draw(r, "length") {
			p.happen()
			if p.stateOf(p.task).IsTerminal() {
				break
			}
		}
		p.turn()
	})
}
