package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what do the results say of tasks that are made of steps?

// taskFigure is one of each round.
type taskFigure = func(*measure.TasksResult) float64

// Of tasks, for the table and for the figures by name.
var (
	taskRatio taskFigure = func(t *measure.TasksResult) float64 { return t.Rate.PerSecond() / t.PolledRate.PerSecond() }
	taskPolls taskFigure = func(t *measure.TasksResult) float64 {
		return 1 - t.Singles.ByClockPerSecond()/max(t.Polled.ByClockPerSecond(), 1e-9)
	}
	taskJoins taskFigure = func(t *measure.TasksResult) float64 { return float64(t.Fan.Joins) }
)

const (
	tasksFaster     = 10
	taskPollsFewer  = 0.999
	mostNextReady   = 20 * time.Millisecond
	mostLargeAnswer = 100 * time.Millisecond
)

// taskMetrics are figures by name.
func (r *results) taskMetrics(put func(string, []float64)) {
	of := func(name string, f taskFigure) { put(name, each(r.Tasks, f)) }
	of("task_claim_p50_ms", func(t *measure.TasksResult) float64 { return inMillis(t.Singles.Claims().Summary().P50) })
	of("task_claim_p99_ms", func(t *measure.TasksResult) float64 { return inMillis(t.Singles.Claims().Summary().P99) })
	of("task_rate_ratio", taskRatio)
	of("task_polls_fewer", taskPolls)
	of("task_joins", taskJoins)
	for name, sql := range map[string]string{"task_next_ready_ms": measure.NextReadyTasks, "task_readiness_ms": measure.LargeReadiness} {
		put(name, each(r.ManyTasks, func(m *measure.ManyTasksResult) float64 { return inMillis(m.Query(sql).Times.Summary().P50) }))
	}
}

func (r *results) taskRows() []row {
	return append(r.singleTaskRows(), r.manyTaskRows()...)
}

func (r *results) singleTaskRows() []row {
	n := len(r.Tasks)
	if n == 0 {
		return nil
	}
	first := r.Tasks[0]
	loops := fmt.Sprintf("polling each %v", first.Interval)
	samples := func(of func(*measure.TasksResult) measure.Samples) func(int) measure.Summary {
		return func(i int) measure.Summary { return of(r.Tasks[i]).Summary() }
	}
	claims := samples(func(t *measure.TasksResult) measure.Samples { return t.Singles.Claims() })
	polled := samples(func(t *measure.TasksResult) measure.Samples { return t.Polled.Claims() })
	one := func(name string, of func(*measure.TaskSingles) measure.Samples) row {
		return r.compare("  "+name+", p50", n, p50(samples(func(t *measure.TasksResult) measure.Samples { return of(t.Singles) })),
			p50(samples(func(t *measure.TasksResult) measure.Samples { return of(t.Polled) })), " ("+loops+")", noGoal)
	}
	median := func(f taskFigure) float64 { return measure.Median(each(r.Tasks, f)) }
	rates := func(of func(*measure.TasksResult) *measure.NamespaceRate) []float64 {
		return each(r.Tasks, func(t *measure.TasksResult) float64 { return of(t).PerSecond() })
	}
	fewer := median(taskPolls)
	most := 0
	again := 0
	for _, t := range r.Tasks {
		most = max(most, t.Fan.Joins)
		again += t.Fan.Again
	}
	fan := func(i int) measure.Summary { return measure.Samples{r.Tasks[i].Fan.Took}.Summary() }
	return []row{
		r.compare(fmt.Sprintf("task of %d steps, one at a time in one of %d namespaces: change to claim, p50", first.Steps, first.Namespaces),
			n, p50(claims), p50(polled), " ("+loops+")", under(2*time.Millisecond)),
		r.compare("  p99", n, p99(claims), p99(polled), " ("+loops+")", under(10*time.Millisecond)),
		one("of a new task", func(t *measure.TaskSingles) measure.Samples { return t.Turns }),
		one("of a step", func(t *measure.TaskSingles) measure.Samples { return t.Steps }),
		one("of a step, until it is at work", func(t *measure.TaskSingles) measure.Samples { return t.Begun }),
		one("of a result", func(t *measure.TaskSingles) measure.Samples { return t.Results }),
		one("of a result, until its turn has taken note", func(t *measure.TaskSingles) measure.Samples { return t.Known }),
		one("submit to end", func(t *measure.TaskSingles) measure.Samples { return t.Whole }),
		{
			measure:  "  statements for which time alone was the reason, per minute",
			figure:   fmt.Sprintf("%.1f", 60*median(func(t *measure.TasksResult) float64 { return t.Singles.ByClockPerSecond() })),
			baseline: fmt.Sprintf("%.0f (%s)", 60*median(func(t *measure.TasksResult) float64 { return t.Polled.ByClockPerSecond() }), loops),
			ratio:    fmt.Sprintf("%.2f%% fewer", 100*fewer), goal: ">= 99.9% fewer", met: fewer >= taskPollsFewer,
		},
		rate(fmt.Sprintf("tasks of %d steps, %d at a time, one coordinator", first.Steps, first.AtATime), "tasks/s",
			rates(func(t *measure.TasksResult) *measure.NamespaceRate { return t.Rate }),
			rates(func(t *measure.TasksResult) *measure.NamespaceRate { return t.PolledRate }), loops, tasksFaster),
		r.compare(fmt.Sprintf("task of 1, then %d steps, then 1", first.Fan.Width), n, p50(fan), nil, "", noGoal),
		{measure: "  joins, attempts beyond the first", figure: fmt.Sprintf("%d, %d", most, again), goal: "1, 0", met: most == 1 && median(taskJoins) == 1 && again == 0},
	}
}

func (r *results) manyTaskRows() (rows []row) {
	for _, m := range r.ManyTasks {
		cost := func(name, sql string, goal goal) row {
			return r.compare(name, 1, p50(func(int) measure.Summary { return m.Query(sql).Times.Summary() }), nil, "", goal)
		}
		rows = append(rows,
			cost(fmt.Sprintf("of %d tasks with %d steps: get_next_ready_tasks(100)", m.Tasks, m.Steps), measure.NextReadyTasks, under(mostNextReady)),
			cost(fmt.Sprintf("task of %d steps, %d dependencies: readiness of all", m.Large, m.Edges), measure.LargeReadiness, under(mostLargeAnswer)),
			row{measure: "  to register it, to create it", figure: fmt.Sprintf("%v, %v", m.Registered.Round(time.Millisecond), m.Created.Round(time.Millisecond))})
		for _, q := range m.Queries {
			if q.SQL == measure.NextReadyTasks || q.SQL == measure.LargeReadiness {
				continue
			}
			call := strings.NewReplacer("SELECT * FROM ", "", "SELECT count(*) FROM ", "", "SELECT ", "").Replace(q.SQL)
			rows = append(rows, cost("  "+call, q.SQL, noGoal))
		}
	}
	return rows
}
