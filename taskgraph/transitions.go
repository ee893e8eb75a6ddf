package taskgraph

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what happened to a task, and in which state was it when?

// Transition is a change of state of a task, or of one of its steps.
type Transition struct {
	ID         int64           `db:"transition_id"`
	Xact       uint64          `db:"xact"` // the transaction that made it
	TaskID     string          `db:"task_uuid"`
	StepID     *string         `db:"workflow_step_uuid"` // nil: of the task itself
	StepName   *string         `db:"step_name"`          // likewise
	SortKey    int             `db:"sort_key"`           // which one of the task, or of the step, from 1
	FromState  *string         `db:"from_state"`         // nil: it was created
	ToState    string          `db:"to_state"`           // a TaskState, or a StepState
	Processor  *string         `db:"processor_uuid"`     // who made it, if anybody said
	Metadata   json.RawMessage `db:"metadata"`           // an object; why, in "event"
	CreatedAt  time.Time       `db:"created_at"`
	MostRecent bool            `db:"most_recent"` // there was none of the task, or step, after it
}

// Cursor returns the place of the transition, from which to read on.
func (t *Transition) Cursor() Cursor { return Cursor{t.Xact, t.ID} }

// TransitionTaskAfter is TransitionTask from the state that a transition of the task led to, as long as that is the latest one: false if there
// was another since, although the task may be in that state again. So whoever decides by what he has read does nothing once it is out of
// date.
func (g *Graph) TransitionTaskAfter(ctx context.Context, latest *Transition, to TaskState, processor string) (bool, error) {
	const op = "transition task"
	if err := checkID(op, "task", latest.TaskID); err != nil {
		return false, err
	}
	if latest.StepID != nil {
		return false, invalid(op, "transition %d is of step %s", latest.ID, *latest.StepID)
	}
	return value[bool](ctx, g, op, "transition_task_state_atomic", latest.TaskID, latest.ToState, string(to), optional(processor), json.RawMessage("{}"), latest.SortKey)
}

// Cursor is a place in the sequence of all transitions. The zero value is its beginning.
type Cursor struct {
	Xact uint64
	ID   int64
}

// String returns the cursor as a text, to be kept.
func (c Cursor) String() string {
	return strconv.FormatUint(c.Xact, 10) + "/" + strconv.FormatInt(c.ID, 10)
}

// ParseCursor is the reverse of Cursor.String. Fails with pgwake.ErrInvalid.
func ParseCursor(text string) (Cursor, error) {
	first, second, _ := strings.Cut(text, "/")
	xact, err1 := strconv.ParseUint(first, 10, 64)
	id, err2 := strconv.ParseInt(second, 10, 64)
	if err1 != nil || err2 != nil || id < 0 {
		return Cursor{}, fmt.Errorf("%w: %.100q is not a cursor", pgwake.ErrInvalid, text)
	}
	return Cursor{xact, id}, nil
}

// ReadTransitions returns up to limit transitions of all tasks and steps that come after a cursor, such as that of the last one that was
// read before. Each comes exactly once, however late its transaction committed: it appears when all transactions that began to write
// before have ended. So a transaction that stays open holds up what came after it. Those of one task or step belong in the order of SortKey.
// There is nothing to wait for: ask again when a channel (see TaskStateChangeChannel) or a clock says so.
func (g *Graph) ReadTransitions(ctx context.Context, after Cursor, limit int) ([]Transition, error) {
	const op = "read transitions"
	if limit < 1 || limit > maxList || after.ID < 0 {
		return nil, invalid(op, "a limit of %d from %v, and 1 to %d is possible", limit, after, maxList)
	}
	return rows[Transition](ctx, g, op, "read_transitions", after.Xact, after.ID, limit)
}

// TaskTransitions returns the transitions of a task, in order, and not those of its steps; none if there is no such task.
func (g *Graph) TaskTransitions(ctx context.Context, task string) ([]Transition, error) {
	const op = "list transitions of task"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	return rows[Transition](ctx, g, op, "get_task_transitions", task)
}

// StepTransitions returns the transitions of a step, in order; none if there is no such step.
func (g *Graph) StepTransitions(ctx context.Context, step string) ([]Transition, error) {
	const op = "list transitions of step"
	if err := checkID(op, "step", step); err != nil {
		return nil, err
	}
	return rows[Transition](ctx, g, op, "get_step_transitions", step)
}

// AllTransitions returns the transitions of a task and of its steps, in the order in which they were written; none if there is no such task.
func (g *Graph) AllTransitions(ctx context.Context, task string) ([]Transition, error) {
	const op = "list all transitions of task"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	return rows[Transition](ctx, g, op, "get_all_transitions", task)
}

// Snapshot is a task, with the steps that it had, at an instant.
type Snapshot struct {
	At    time.Time
	Name  string // of the definition
	State TaskState
	Since time.Time
	Steps []StepSnapshot // in the order of the definition
}

// StepSnapshot is a step at that instant.
type StepSnapshot struct {
	ID, Name string
	State    StepState
	Since    time.Time
}

// TaskAsOf returns in which state a task and its steps were at an instant of the server's clock. pgwake.ErrNotFound if there was no such
// task then.
func (g *Graph) TaskAsOf(ctx context.Context, task string, at time.Time) (*Snapshot, error) {
	const op = "get task as of an instant"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	all, err := rows[struct {
		StepID *string   `db:"workflow_step_uuid"`
		Name   string    `db:"name"`
		State  string    `db:"current_state"`
		Since  time.Time `db:"entered_at"`
		Nth    int       `db:"sort_key"`
	}](ctx, g, op, "get_task_state_as_of", task, at)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 || all[0].StepID != nil {
		return nil, failed(op, fmt.Errorf("%w: task %s at %v", pgwake.ErrNotFound, task, at))
	}
	s := &Snapshot{At: at, Name: all[0].Name, State: TaskState(all[0].State), Since: all[0].Since}
	for _, step := range all[1:] {
		s.Steps = append(s.Steps, StepSnapshot{ID: *step.StepID, Name: step.Name, State: StepState(step.State), Since: step.Since})
	}
	return s, nil
}

// Replayed is where transitions lead to.
type Replayed struct {
	Tasks map[string]TaskState // by id
	Steps map[string]StepState // by id
}

// ReplayError is a transition that cannot be, or is not where it belongs.
type ReplayError struct {
	Transition Transition
	Problem    string
}

func (e *ReplayError) Error() string {
	of := "task " + e.Transition.TaskID
	if e.Transition.StepID != nil {
		of = "step " + *e.Transition.StepID + " of " + of
	}
	return fmt.Sprintf("transition %d of %s: %s", e.Transition.SortKey, of, e.Problem)
}

// Replay runs transitions through the state machines, in the order of their ids, and returns where that leads. Each task and each step has to
// begin as pending, with the transition number 1; each further transition has to have the next number, leave the state in which the one
// before has left it, and be one that there may be. Otherwise the error is a *ReplayError with the first one that is not so.
func Replay(transitions []Transition) (*Replayed, error) {
	ordered := slices.Clone(transitions)
	slices.SortStableFunc(ordered, func(a, b Transition) int { return cmp.Compare(a.ID, b.ID) })
	r := &Replayed{Tasks: make(map[string]TaskState), Steps: make(map[string]StepState)}
	count := make(map[string]int)
	for _, t := range ordered {
		id, from := "task "+t.TaskID, string(r.Tasks[t.TaskID])
		if t.StepID != nil {
			id, from = "step "+*t.StepID, string(r.Steps[*t.StepID])
		}
		said := ""
		if t.FromState != nil {
			said = *t.FromState
		}
		problem := ""
		switch count[id]++; {
		case t.SortKey != count[id]:
			problem = fmt.Sprintf("it comes as number %d", count[id])
		case said != from:
			problem = fmt.Sprintf("it is said to leave %q, and the state is %q", said, from)
		case from == "" && t.ToState != string(TaskPending):
			problem = fmt.Sprintf("it begins as %s", t.ToState)
		case from != "" && t.StepID == nil && !TaskState(from).CanBecome(TaskState(t.ToState)),
			from != "" && t.StepID != nil && !StepState(from).CanBecome(StepState(t.ToState)):
			problem = fmt.Sprintf("from %s to %s", from, t.ToState)
		}
		if problem != "" {
			return nil, &ReplayError{t, problem}
		}
		if t.StepID == nil {
			r.Tasks[t.TaskID] = TaskState(t.ToState)
		} else {
			r.Steps[*t.StepID] = StepState(t.ToState)
		}
	}
	return r, nil
}

// Replay is the function of that name for all transitions of a task and of its steps, which have to lead to the states that these are
// in. pgwake.ErrNotFound if there is no such task; a *ReplayError, within the *pgwake.Error, for the first transition that is out of
// place, or the last one of a task or step that is in another state.
func (g *Graph) Replay(ctx context.Context, task string) (*Replayed, error) {
	const op = "replay task"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	all, err := rows[struct {
		ID         int64           `db:"transition_id"`
		Xact       uint64          `db:"xact"`
		TaskID     string          `db:"task_uuid"`
		StepID     *string         `db:"workflow_step_uuid"`
		StepName   *string         `db:"step_name"`
		SortKey    int             `db:"sort_key"`
		FromState  *string         `db:"from_state"`
		ToState    string          `db:"to_state"`
		Processor  *string         `db:"processor_uuid"`
		Metadata   json.RawMessage `db:"metadata"`
		CreatedAt  time.Time       `db:"created_at"`
		MostRecent bool            `db:"most_recent"`
		State      string          `db:"current_state"`
	}](ctx, g, op, "get_all_transitions", task)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, failed(op, fmt.Errorf("%w: task %s", pgwake.ErrNotFound, task))
	}
	transitions := make([]Transition, len(all))
	for i, t := range all {
		transitions[i] = Transition{t.ID, t.Xact, t.TaskID, t.StepID, t.StepName, t.SortKey, t.FromState, t.ToState, t.Processor, t.Metadata, t.CreatedAt, t.MostRecent}
	}
	r, err := Replay(transitions)
	if err != nil {
		return nil, failed(op, err)
	}
	for i, t := range all {
		if t.MostRecent && t.ToState != t.State {
			return nil, failed(op, &ReplayError{transitions[i], fmt.Sprintf("it leads to %s, and the state is %s", t.ToState, t.State)})
		}
	}
	return r, nil
}
