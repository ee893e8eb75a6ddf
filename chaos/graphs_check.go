package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: did the task graph keep its promises?
//
// A shape says how each of its tasks is to end. So of each task, and of each of its steps, the ledgers and the tables have to
// tell one story, in which nothing was lost, nothing ran before what it waits for or after its end, and nothing took effect
// twice. All processes are on one machine, and so one clock orders their lines. Whatever is caused by another has a later
// line, since a line is written before the call and another after it.

// graphsHeld is what the database holds of tasks at the end.
type graphsHeld struct {
	tasks   []heldTask
	steps   []heldStep
	effects []graphEffect
	orders  []string // ids of tasks
}

type heldTask struct{ id, shape, state, parent, parentStep string }

type heldStep struct {
	task, name, state, run string // of the result
	skipped                bool
}

type graphEffect struct{ task, step, run string }

// graphsLeft is what is still to be done about tasks.
const graphsLeft = `(SELECT count(*) FROM graphs.worker_queue) + (SELECT count(*) FROM graphs.orchestrator_queue)
	+ (SELECT count(*) FROM graphs.tasks WHERE NOT graphs.is_terminal(state))`

func (t *graphsHeld) read(ctx context.Context, conn *pgx.Conn) error {
	var task heldTask
	err := each(ctx, conn, `SELECT t.task_id::text, d.name, t.state, coalesce(t.parent_task_id::text, ''), coalesce(p.name, '') FROM graphs.tasks t
		JOIN graphs.task_definitions d USING (task_definition_id) LEFT JOIN graphs.steps p ON p.step_id = t.parent_step_id`,
		[]any{&task.id, &task.shape, &task.state, &task.parent, &task.parentStep}, func() { t.tasks = append(t.tasks, task) })
	if err != nil {
		return err
	}
	var step heldStep
	if err = each(ctx, conn, `SELECT s.task_id::text, s.name, s.state, coalesce(s.results ->> 'run', ''), s.skip AND s.state = 'complete' FROM graphs.steps s`,
		[]any{&step.task, &step.name, &step.state, &step.run, &step.skipped}, func() { t.steps = append(t.steps, step) }); err != nil {
		return err
	}
	var effect graphEffect
	if err = each(ctx, conn, `SELECT task, step, run FROM graph_effects`, []any{&effect.task, &effect.step, &effect.run},
		func() { t.effects = append(t.effects, effect) }); err != nil {
		return err
	}
	var order string
	return each(ctx, conn, `SELECT task FROM graph_orders`, []any{&order}, func() { t.orders = append(t.orders, order) })
}

// taskFate is all that is known of a task.
type taskFate struct {
	id        string
	shape     *shape // nil: nobody submitted it, and it is not a step of another
	sent      entry
	confirmed time.Time
	as        string // the id that the submission returned
	duplicate bool
	revoked   bool
	orders    int
	held      *heldTask // nil: it is not there
	steps     map[string]heldStep
	runs      map[string][]*attempt // of steps, in the order of their lines
	effects   map[string][]graphEffect
	subs      map[string]*taskFate // tasks that its steps are

	cancelTried, cancelled bool                 // it may be, or it surely is
	decided                map[string]time.Time // when somebody set out to decide about which step first; "": about the task
	told                   map[taskgraph.TaskState]time.Time
	over                   time.Time // by when it had ended, as somebody was told first
}

func (f *taskFate) String() string {
	if f.shape == nil {
		return "task " + f.id
	}
	return fmt.Sprintf("task %s (%s)", f.id, f.shape.name)
}

// attempt is a call of a handler.
type attempt struct {
	graphLine
	process   string
	began     time.Time
	stopped   bool
	result    time.Time   // when it was about to return one
	failed    bool        // or it returned an error
	completed time.Time   // when the step was complete with its effect
	refused   bool        // it was not to complete the step
	kept      []time.Time // when it called for a checkpoint that was accepted
}

// graphJudge judges tasks.
type graphJudge struct {
	*judge
	fates map[string]*taskFate
}

// judgeGraphs judges all tasks.
func (j *judge) judgeGraphs(lines []entry, t graphsHeld) {
	g := &graphJudge{judge: j, fates: map[string]*taskFate{}}
	g.read(lines)
	g.take(t)
	for _, id := range slices.Sorted(maps.Keys(g.fates)) {
		f := g.fates[id]
		g.checkExists(f)
		if f.held == nil || f.shape == nil {
			continue
		}
		g.checkEnd(f)
		g.checkSteps(f)
		g.checkRuns(f)
		g.checkFences(f)
		g.checkPace(f)
	}
	g.checkDuplicates()
}

func (g *graphJudge) fate(id string) *taskFate {
	if g.fates[id] == nil {
		g.fates[id] = &taskFate{id: id, steps: map[string]heldStep{}, runs: map[string][]*attempt{}, effects: map[string][]graphEffect{},
			subs: map[string]*taskFate{}, decided: map[string]time.Time{}, told: map[taskgraph.TaskState]time.Time{}}
	}
	return g.fates[id]
}

// read takes what the lines say into the fates.
func (g *graphJudge) read(lines []entry) {
	slices.SortStableFunc(lines, func(a, b entry) int { return a.At.Compare(b.At) })
	byRun := map[string]*attempt{}
	for _, e := range lines {
		f, l := g.fate(e.Key), e.Graph
		a := byRun[l.Run]
		switch {
		case e.What == sending:
			f.sent, f.shape = e, shapes[e.Do]
		case e.What == sent:
			f.confirmed, f.as, f.duplicate = e.At, l.Task, e.Duplicate
		case e.What == revoked:
			f.revoked = true
		case e.What == cancelling:
			f.cancelTried = true
		case e.What == cancelled:
			f.cancelled = true
			f.tell(taskgraph.TaskCancelled, e.At)
		case e.What == deciding:
			if f.decided[l.Step].IsZero() {
				f.decided[l.Step] = e.At
			}
		case e.What == decided && l.Step == "" && f.shape != nil:
			f.tell(f.shape.end, e.At)
		case e.What == refused && l.Decide == cancelling: // it had ended
			f.cancelTried = false
			f.endedBy(e.At)
		case e.What == decided, e.What == refused && l.Decide != "":
		case e.What == ended:
			f.tell(taskgraph.TaskState(l.State), e.At)
		case e.What == got:
			a = &attempt{graphLine: *l, process: e.process, began: e.At}
			byRun[l.Run], f.runs[l.Step] = a, append(f.runs[l.Step], a)
		case a == nil:
			g.complain("%s: %s of %v, by an attempt that nobody made", e.process, e.What, f)
		case e.What == returning:
			a.stopped = true
		case e.What == saw:
			a.Seen = l.Seen
		case e.What == kept:
			a.kept = append(a.kept, l.Since)
		case e.What == done, e.What == acking:
			a.result = e.At
		case e.What == failing:
			a.failed = true
		case e.What == acked:
			a.completed = e.At
		case e.What == refused:
			a.refused = true
		}
	}
}

// tell notes that somebody was told of a final state.
func (f *taskFate) tell(state taskgraph.TaskState, at time.Time) {
	if f.told[state].IsZero() {
		f.told[state] = at
	}
	f.endedBy(at)
}

func (f *taskFate) endedBy(at time.Time) {
	if f.over.IsZero() {
		f.over = at
	}
}

// take takes what the tables have into the fates.
func (g *graphJudge) take(t graphsHeld) {
	for _, h := range t.tasks {
		f := g.fate(h.id)
		f.held = &h
		if h.parent != "" {
			f.shape = shapes[h.shape]
			g.fate(h.parent).subs[h.parentStep] = f
		}
	}
	for _, s := range t.steps {
		g.fate(s.task).steps[s.name] = s
	}
	for _, e := range t.effects {
		f := g.fate(e.task)
		f.effects[e.step] = append(f.effects[e.step], e)
	}
	for _, id := range t.orders {
		g.fate(id).orders++
	}
	g.v.graphs.effects = len(t.effects)
}

// checkExists: what was submitted is there, and nothing else.
func (g *graphJudge) checkExists(f *taskFate) {
	switch {
	case f.shape == nil:
		g.complain("%v is there, or has run, and nobody submitted it", f)
	case f.revoked && f.held != nil:
		g.complain("%v is there, but its transaction had been rolled back", f)
	case !f.confirmed.IsZero() && !f.duplicate && f.held == nil:
		g.complain("%v is lost: submitted at %v", f, f.confirmed.Format(time.StampMicro))
	case !f.confirmed.IsZero() && !f.duplicate && f.as != f.id:
		g.complain("%v was submitted, and %s was returned", f, f.as)
	case f.duplicate && f.held != nil:
		g.complain("%v is there, but its submission had reported a duplicate", f)
	case f.held == nil && len(f.runs) > 0:
		g.complain("%v has run, and is not there", f)
	}
	if exists := f.held != nil; f.sent.Graph != nil && f.sent.Graph.Order && (f.orders == 1) != exists || f.orders > 1 {
		g.complain("%v has %d rows of the transaction that submitted it; it is there: %v", f, f.orders, exists)
	}
	switch unknown := f.confirmed.IsZero() && !f.revoked && f.sent.What != ""; {
	case f.held != nil:
		g.v.graphs.tasks++
		if unknown {
			g.v.unknown++
		}
	case unknown:
		g.v.unhappened++
	}
}

// checkDuplicates: of the tasks with an idempotency key there is one, and it is what each submission returned.
func (g *graphJudge) checkDuplicates() {
	there := map[string]*taskFate{}
	for _, f := range g.fates {
		if key := f.sent.Dedup; key != "" && f.held != nil {
			if there[key] != nil {
				g.complain("%v and %v have the same idempotency key", f, there[key])
			}
			there[key] = f
		}
	}
	for _, f := range g.fates {
		if key := f.sent.Dedup; f.duplicate && (there[key] == nil || there[key].id != f.as) {
			g.complain("%v was refused as a duplicate of %s, which is not there", f, f.as)
		}
	}
}

// checkEnd: a task has ended, in the state that its shape has or that somebody brought about, and nobody was told of
// another.
func (g *graphJudge) checkEnd(f *taskFate) {
	state := taskgraph.TaskState(f.held.state)
	may := []taskgraph.TaskState{f.shape.end}
	parent := g.fates[f.held.parent]
	switch {
	case f.cancelled:
		may = []taskgraph.TaskState{taskgraph.TaskCancelled}
	case f.cancelTried, parent != nil && parent.held.state == string(taskgraph.TaskCancelled):
		may = append(may, taskgraph.TaskCancelled)
	}
	switch {
	case !state.IsTerminal():
		g.complain("%v is stuck: it is %s at the end", f, state)
	case !slices.Contains(may, state):
		g.complain("%v ended as %s, and was to end as %v", f, state, may)
	}
	for told, at := range f.told {
		if told != state {
			g.complain("%v is %s, but somebody was told at %v that it had ended as %s", f, state, at.Format(time.StampMicro), told)
		}
	}
	if state == taskgraph.TaskCancelled {
		g.v.graphs.cancelled++
	}
}

// checkSteps: the steps of a task are those of its shape; each is in a state that explains that of the task and is explained by
// what its attempts did; and its effect is there once if it is complete, and else not at all.
func (g *graphJudge) checkSteps(f *taskFate) {
	complete := f.held.state == string(taskgraph.TaskComplete)
	known := map[string]bool{}
	for _, step := range f.shape.of(f.id) {
		known[step.name] = true
		s, is := f.steps[step.name]
		if !is {
			if complete || step.do != stepExtra {
				g.complain("%v has no step %s", f, step.name)
			}
			continue
		}
		state := taskgraph.StepState(s.state)
		runs := f.runs[step.name]
		switch {
		case complete && (state != f.shape.ended(step) || s.skipped != step.skipped):
			g.complain("%v is complete, and its step %s is %s, skipped: %v", f, step.name, s.state, s.skipped)
		case !state.IsTerminal() && state != taskgraph.StepError && taskgraph.TaskState(f.held.state).IsTerminal():
			g.complain("%v is %s, and its step %s is %s", f, f.held.state, step.name, s.state)
		case state == taskgraph.StepError && !step.fails():
			g.complain("%v: step %s is in error, which it has no reason to be", f, step.name)
		case state == taskgraph.StepError && !slices.ContainsFunc(runs, func(a *attempt) bool { return a.failed }):
			// Each of two attempts may have been lost with its process.
			if step.do != stepExhaust {
				g.complain("%v: step %s is in error, and no attempt said so", f, step.name)
			}
		case state == taskgraph.StepComplete && !s.skipped && step.do != "" && !slices.ContainsFunc(runs, func(a *attempt) bool {
			return a.Run == s.run && !a.result.IsZero() && !a.refused
		}):
			g.complain("%v: step %s is complete with the result of attempt %q, which returned none", f, step.name, s.run)
		}
		if s.skipped && len(runs) > 0 {
			g.complain("%v: step %s was skipped, and has run", f, step.name)
		}
		owed := 0
		if step.do == stepEffect && state == taskgraph.StepComplete {
			owed = 1
		}
		if n := len(f.effects[step.name]); n != owed {
			g.complain("%v: step %s is %s and took effect %d times", f, step.name, s.state, n)
		} else if n == 1 && f.effects[step.name][0].run != s.run {
			g.complain("%v: step %s took effect by attempt %s, and is complete by %s", f, step.name, f.effects[step.name][0].run, s.run)
		}
		if step.sub != "" && state == taskgraph.StepComplete && (f.subs[step.name] == nil || f.subs[step.name].held.state != string(taskgraph.TaskComplete)) {
			g.complain("%v: step %s is complete, and the task that it is is not", f, step.name)
		}
	}
	for name := range f.steps {
		if !known[name] {
			g.complain("%v has a step %s, which it was not to have", f, name)
		}
	}
}

// checkRuns: a step runs after all that it waits for, with the results of that; and no attempt is made twice, unless it was
// given back, or a crash of the server took back that it was begun.
func (g *graphJudge) checkRuns(f *taskFate) {
	steps := map[string]shapeStep{}
	for _, step := range f.shape.of(f.id) {
		steps[step.name] = step
	}
	for name, runs := range f.runs {
		step, is := steps[name]
		if !is {
			g.complain("%v: step %s has run, which it was not to have", f, name)
			continue
		}
		for i, a := range runs {
			g.v.graphs.runs++
			for _, parent := range step.after {
				if !f.doneBy(steps, parent, a.began) {
					g.complain("%v: step %s ran in %s at %v, before %s was done", f, name, a.process, a.began.Format(time.StampMicro), parent)
				}
			}
			if a.Try < 1 || a.Try > step.attempts() {
				g.complain("%v: step %s made attempt %d of %d", f, name, a.Try, step.attempts())
			}
			g.checkSeen(f, a, steps)
			for _, before := range runs[:i] {
				if before.Try == a.Try && !before.stopped && step.do != stepRelent && !g.crashed(before.began, a.began) {
					g.complain("%v: attempt %d at step %s was made by %s and by %s", f, a.Try, name, before.Run, a.Run)
				}
			}
		}
		if len(runs) > 1 {
			g.v.graphs.again += len(runs) - 1
		}
	}
}

// checkSeen: an attempt was given the results with which the steps before are complete, and those of all it waits for.
func (g *graphJudge) checkSeen(f *taskFate, a *attempt, steps map[string]shapeStep) {
	if a.Seen == nil { // it could not read them
		return
	}
	for name, run := range a.Seen {
		if s := f.steps[name]; s.run != run {
			g.complain("%v: step %s was given the result of attempt %q at %s, which is complete with that of %q", f, a.Step, run, name, s.run)
		}
	}
	for _, parent := range steps[a.Step].after {
		s := f.steps[parent]
		if _, seen := a.Seen[parent]; !seen && !s.skipped && s.state != string(taskgraph.StepResolvedManually) {
			g.complain("%v: step %s was given no result of %s", f, a.Step, parent)
		}
	}
}

// doneBy reports whether a step may have been done by then.
func (f *taskFate) doneBy(steps map[string]shapeStep, name string, at time.Time) bool {
	step := steps[name]
	if resolved := f.decided[name]; f.shape.blocked == resolveStep && !resolved.IsZero() && resolved.Before(at) {
		return true
	}
	switch {
	case step.skipped:
		return !slices.ContainsFunc(step.after, func(parent string) bool { return !f.doneBy(steps, parent, at) })
	case step.sub != "":
		sub := f.subs[name]
		return sub != nil && !slices.ContainsFunc(sub.shape.steps, func(s shapeStep) bool { return !returnedBy(sub.runs[s.name], at) })
	}
	return returnedBy(f.runs[name], at)
}

func returnedBy(runs []*attempt, at time.Time) bool {
	return slices.ContainsFunc(runs, func(a *attempt) bool { return !a.result.IsZero() && a.result.Before(at) })
}

// checkFences: what an attempt asks for once it is over is refused. It is over when its task has ended, when its step is complete,
// and when another attempt has begun, as whoever was told of it knows.
func (g *graphJudge) checkFences(f *taskFate) {
	for name, runs := range f.runs {
		for i, a := range runs {
			over, why := f.over, "its task had ended"
			earlier := func(at time.Time, because string) {
				if !at.IsZero() && (over.IsZero() || at.Before(over)) {
					over, why = at, because
				}
			}
			for n, other := range runs {
				earlier(other.completed, other.Run+" had completed it")
				if n > i && other.Try > a.Try {
					earlier(other.began, other.Run+" had begun")
				}
			}
			for _, since := range a.kept {
				if !over.IsZero() && since.After(over) {
					g.complain("%v: a checkpoint of attempt %s at step %s was accepted %v after %s", f, a.Run, name, since.Sub(over), why)
				}
			}
		}
		// An attempt that had begun may come to its handler late, since its process was stopped or the answer was; not later than what is
		// stopped goes on and has lost its lease.
		const latest = 2*lease + lease + verbTimeout
		for _, a := range runs {
			if !f.over.IsZero() && a.began.Sub(f.over) > latest+g.excusedIn(f.over, a.began) {
				g.complain("%v: step %s ran in %s %v after somebody had been told that the task had ended", f, name, a.process, a.began.Sub(f.over))
			}
		}
	}
}

// checkPace: once all must have recovered, a probe is at work at once after its submission, and after the step before; and whoever
// waits for it is told at once.
func (g *graphJudge) checkPace(f *taskFate) {
	if f.shape.name != probeShape || f.confirmed.IsZero() || len(f.runs["a"]) == 0 || len(f.runs["b"]) == 0 {
		return
	}
	first, second := f.runs["a"][0], f.runs["b"][0]
	g.pace(fmt.Sprintf("%v, submitted by %s: step a in %s", f, f.sent.process, first.process), f.confirmed, first.began)
	if !first.result.IsZero() {
		g.pace(fmt.Sprintf("%v: step b in %s, after a in %s", f, second.process, first.process), first.result, second.began)
	}
	if told := f.told[taskgraph.TaskComplete]; !told.IsZero() && !second.result.IsZero() {
		from := second.result
		if f.confirmed.After(from) {
			from = f.confirmed
		}
		g.pace(fmt.Sprintf("%v: the end, in %s, after b in %s", f, f.sent.process, second.process), from, told)
	}
}

// pace judges how long a probe took from one thing to the next: somebody is woken for a turn, and then somebody for a step, or whoever
// waits for the end.
func (g *graphJudge) pace(what string, due, came time.Time) {
	if after, late := g.late(due, came, 2*probePatience, &g.v.graphs.probes); late {
		g.complain("%s, due at %v, came only %v after that, and %v after all must have recovered", what, due.Format(time.StampMilli), came.Sub(due), after)
	}
}

// graphTotals are what a run had of tasks.
type graphTotals struct {
	tasks, cancelled int
	runs, again      int
	effects          int
	probes           []time.Duration
}

func (t *graphTotals) String() string {
	if t.tasks == 0 {
		return ""
	}
	return fmt.Sprintf("task graphs: %d tasks, %d cancelled; %d attempts at steps, %d of them again; %d transactional effects; %s\n",
		t.tasks, t.cancelled, t.runs, t.again, t.effects, quantiles(t.probes))
}
