package taskgraph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: does a task come into being as it was submitted, once, or not at all?

// single is a definition of one step.
func single(name string) *taskgraph.Definition {
	return taskgraph.Define("shop", name, "1").Step("a", "h")
}

func aTask(d *taskgraph.Definition) taskgraph.Submission {
	return taskgraph.Submission{Namespace: d.Namespace, Name: d.Name, Version: d.Version}
}

func TestSubmit_InATransaction_TakesEffectWithItsCommit(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	rolledBack := errors.New("rolled back")
	var gone, there string
	for _, end := range []error{rolledBack, nil} {
		err := pgx.BeginFunc(t.Context(), l.p.Pool(), func(tx pgx.Tx) error {
			in := l.WithTx(tx)
			require.NoError(t, in.Register(t.Context(), single("tx")))
			done, err := in.Submit(t.Context(), aTask(single("tx")))
			require.NoError(t, err)
			state, err := in.CurrentTaskState(t.Context(), done.ID)
			require.NoError(t, err)
			require.Equal(t, taskgraph.TaskPending, state)
			gone, there = there, done.ID
			return end
		})
		require.ErrorIs(t, err, end)
	}
	_, err := l.Task(t.Context(), gone)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	require.Equal(t, []string{there}, all[string](l, `SELECT task_id::text FROM tasks`))
	require.Equal(t, []string{there}, all[string](l, `SELECT instance_id FROM orchestrator_queue`))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM steps`))
}

func TestSubmitMany_AllOrNone_InTheOrderOfTheSubmissions(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	require.NoError(t, l.Register(t.Context(), single("many"), single("other")))
	first := aTask(single("many"))
	first.IdempotencyKey, first.Context = "k1", 1
	known, err := l.Submit(t.Context(), first)
	require.NoError(t, err)

	unknown, conflict := aTask(single("nobody has it")), first
	conflict.Context = 2
	for _, wrong := range []taskgraph.Submission{unknown, conflict} {
		_, err := l.SubmitMany(t.Context(), []taskgraph.Submission{aTask(single("many")), wrong, aTask(single("other"))})
		require.Error(t, err)
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM tasks`))
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM orchestrator_queue`))
	}
	_, err = l.SubmitMany(t.Context(), []taskgraph.Submission{unknown})
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, err = l.SubmitMany(t.Context(), []taskgraph.Submission{conflict})
	require.ErrorIs(t, err, taskgraph.ErrConflict)

	second := aTask(single("other"))
	second.IdempotencyKey = "k0"
	second.ID = "00000000-0000-4000-8000-000000000007"
	again := second
	again.ID = ""
	done, err := l.SubmitMany(t.Context(), []taskgraph.Submission{aTask(single("many")), second, first, again, aTask(single("other"))})
	require.NoError(t, err)
	require.Len(t, done, 5)
	require.Equal(t, []bool{false, false, true, true, false}, []bool{done[0].Duplicate, done[1].Duplicate, done[2].Duplicate, done[3].Duplicate, done[4].Duplicate})
	require.Equal(t, []string{second.ID, known.ID, second.ID}, []string{done[1].ID, done[2].ID, done[3].ID})
	for i, name := range []string{"many", "other", "many", "other", "other"} {
		task, err := l.Task(t.Context(), done[i].ID)
		require.NoError(t, err)
		require.Equal(t, name, task.Name)
	}
	require.Equal(t, 4, one[int](l, `SELECT count(*) FROM tasks`))

	none, err := l.SubmitMany(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = l.SubmitMany(t.Context(), make([]taskgraph.Submission, taskgraph.MaxSubmissions+1))
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

func TestSubmit_EverythingThatIsSaid_IsKept(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	require.NoError(t, l.Register(t.Context(), single("kept")))
	deadline := time.Date(2100, 1, 2, 3, 4, 5, 0, time.UTC)
	s := aTask(single("kept"))
	s.ID, s.CorrelationID, s.ParentCorrelationID = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000003"
	s.Context, s.Tags, s.Priority, s.Delay, s.Deadline = map[string]any{"big": json.Number("9007199254740993")}, []string{"x"}, -3, time.Hour, deadline
	s.IdempotencyKey, s.Initiator, s.SourceSystem, s.Reason = "key", "ada", "web", "because"
	done, err := l.Submit(t.Context(), s)
	require.NoError(t, err)
	require.Equal(t, taskgraph.Submitted{ID: s.ID}, done)
	task, err := l.Task(t.Context(), s.ID)
	require.NoError(t, err)
	require.Equal(t, []any{"shop", "kept", "1", taskgraph.TaskPending, -3, 1, 0}, []any{task.Namespace, task.Name, task.Version, task.State, task.Priority, task.TotalSteps, task.CompletedSteps})
	require.Equal(t, []string{"key", "ada", "web", "because", s.CorrelationID, s.ParentCorrelationID},
		[]string{*task.IdempotencyKey, *task.Initiator, *task.SourceSystem, *task.Reason, task.CorrelationID, *task.ParentCorrelationID})
	require.Equal(t, `{"big": 9007199254740993}`, string(task.Context))
	require.Equal(t, `["x"]`, string(task.Tags))
	require.True(t, deadline.Equal(*task.Deadline))
	require.Equal(t, time.Hour, task.StartAt.Sub(task.RequestedAt))
	plain, err := l.Submit(t.Context(), aTask(single("kept")))
	require.NoError(t, err)
	task, err = l.Task(t.Context(), plain.ID)
	require.NoError(t, err)
	require.Equal(t, []any{`{}`, plain.ID, 0}, []any{string(task.Context), task.CorrelationID, task.Priority})
	require.Equal(t, [...]bool{true, true, true, true}, [...]bool{task.Tags == nil, task.IdempotencyKey == nil, task.Initiator == nil, task.Deadline == nil})
}

// closed is a Graph of which nothing is sent any more: what is refused all the same was refused before.
func closed(t *testing.T) *taskgraph.Graph {
	t.Helper()
	l := newLab(t)
	require.NoError(t, l.p.Close(t.Context()))
	_, err := l.Submit(t.Context(), aTask(single("none")))
	require.ErrorIs(t, err, pgwake.ErrClosed)
	return l.Graph
}

func TestSubmit_BadInput_AllOfItIsToldBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	g := closed(t)
	for name, c := range map[string]struct {
		spoil func(s *taskgraph.Submission)
		says  string
	}{
		"namespace":             {func(s *taskgraph.Submission) { s.Namespace = "Shop" }, `namespace "Shop" does not match`},
		"name":                  {func(s *taskgraph.Submission) { s.Name = "" }, "the name is empty"},
		"version":               {func(s *taskgraph.Submission) { s.Version = strings.Repeat("x", 256) }, "the version is 256 bytes long"},
		"id":                    {func(s *taskgraph.Submission) { s.ID = "7" }, `the id "7" is no UUID`},
		"correlation id":        {func(s *taskgraph.Submission) { s.CorrelationID = "7" }, `the correlation id "7" is no UUID`},
		"parent correlation id": {func(s *taskgraph.Submission) { s.ParentCorrelationID = "{}" }, `the parent correlation id "{}" is no UUID`},
		"key":                   {func(s *taskgraph.Submission) { s.IdempotencyKey = "a\x00" }, `the idempotency key "a\x00" contains NUL`},
		"long key":              {func(s *taskgraph.Submission) { s.IdempotencyKey = strings.Repeat("x", 256) }, "the idempotency key is 256 bytes long"},
		"initiator":             {func(s *taskgraph.Submission) { s.Initiator = "\xff" }, `the initiator "\xff" is not valid UTF-8`},
		"source system":         {func(s *taskgraph.Submission) { s.SourceSystem = "\x00" }, "the source system"},
		"reason":                {func(s *taskgraph.Submission) { s.Reason = "\x00" }, "the reason"},
		"priority":              {func(s *taskgraph.Submission) { s.Priority = 1<<20 + 1 }, "the priority 1048577 is not between -1048576 and 1048576"},
		"low priority":          {func(s *taskgraph.Submission) { s.Priority = math.MinInt }, "the priority"},
		"delay":                 {func(s *taskgraph.Submission) { s.Delay = -1 }, "the delay -1ns is not between"},
		"long delay":            {func(s *taskgraph.Submission) { s.Delay = math.MaxInt64 }, "the delay"},
		"deadline":              {func(s *taskgraph.Submission) { s.Deadline = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC) }, "the deadline is in the year 10000"},
		"identity":              {func(s *taskgraph.Submission) { s.Identity = 2 }, "the identity 2 is neither"},
		"two identities":        {func(s *taskgraph.Submission) { s.Identity, s.IdempotencyKey = taskgraph.IdentityStrict, "k" }, "an idempotency key of its own, and IdentityStrict"},
		"context":               {func(s *taskgraph.Submission) { s.Context = math.NaN() }, "the context: json: unsupported value: NaN"},
		"tags":                  {func(s *taskgraph.Submission) { s.Tags = func() {} }, "the tags: json: unsupported type"},
		"strict context": {func(s *taskgraph.Submission) {
			s.Identity, s.Context = taskgraph.IdentityStrict, json.RawMessage("1e400000")
		}, "the context: the number"},
	} {
		s := aTask(single("bad"))
		c.spoil(&s)
		_, err := g.Submit(t.Context(), s)
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
		require.ErrorContains(t, err, "task 0: "+c.says, name)
	}
	_, err := g.SubmitMany(t.Context(), []taskgraph.Submission{{Namespace: "A", Priority: 1 << 30}, aTask(single("good")), {Namespace: "a", Name: "n", Version: "1", Context: math.Inf(1)}})
	require.EqualError(t, err, `pgwake: submit tasks: invalid argument: 5 problems:
	task 0: namespace "A" does not match ^[a-z][a-z0-9_-]{0,39}$
	task 0: the name is empty
	task 0: the version is empty
	task 0: the priority 1073741824 is not between -1048576 and 1048576
	task 2: the context: json: unsupported value: +Inf`)
	twice := aTask(single("twice"))
	twice.ID = noID
	_, err = g.SubmitMany(t.Context(), []taskgraph.Submission{twice, aTask(single("twice")), twice})
	require.ErrorContains(t, err, "task 2: the id is that of task 0 as well")
	_, err = g.SubmitMany(t.Context(), make([]taskgraph.Submission, taskgraph.MaxSubmissions))
	require.ErrorContains(t, err, "30000 problems")
	require.ErrorContains(t, err, "and 29900 more")
	require.Less(t, len(err.Error()), 20_000)
}

// noJSON is what encoding/json takes, and jsonb does not, or what neither does.
var noJSON = map[string]any{
	"number":    json.RawMessage(`{"a": [1e400000]}`),
	"fraction":  json.RawMessage(`1e-16384`),
	"nested":    json.RawMessage(strings.Repeat("[", 1001) + strings.Repeat("]", 1001)),
	"far":       json.RawMessage(strings.Repeat(`{"a":`, 9000) + "1" + strings.Repeat("}", 9000)),
	"NUL":       "a\x00b",
	"NUL key":   map[string]int{"\x00": 1},
	"surrogate": json.RawMessage(`"\ud83d"`),
	"UTF-8":     json.RawMessage("\"\xff\""),
	"none":      json.RawMessage(`{`),
	"NaN":       math.NaN(),
	"function":  func() {},
	"panics":    panics{},
	"long":      writtenOut(8500, 131072),
}

func TestVerbs_JSONThatCannotBeKept_IsInvalidBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	g := closed(t)
	for name, v := range noJSON {
		for verb, err := range map[string]error{
			"context":  second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Context: v})),
			"tags":     second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Tags: v})),
			"result":   second(g.CompleteStep(t.Context(), noID, v, "")),
			"inputs":   second(g.AddSteps(t.Context(), noID, taskgraph.AddedStep{Name: "n", Template: "t", Inputs: v})),
			"message":  second(g.SendWithNotify(t.Context(), "jobs_queue", v, nil)),
			"register": g.Register(t.Context(), taskgraph.Define("shop", "n", "1").Step("a", "h", taskgraph.Inputs(v))),
		} {
			require.ErrorIs(t, err, pgwake.ErrInvalid, "%s of %s", name, verb)
		}
		_, _, err := g.AddToDLQ(t.Context(), noID, taskgraph.DLQManual, v)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%s in a DLQ", name)
	}
}

func second[T any](_ T, err error) error { return err }

// Nothing is sent: the provider is closed.
func TestVerbs_PayloadOverTheLimit_TooLargeAndNothingIsSent(t *testing.T) {
	t.Parallel()
	g, most := closed(t), 1<<20-2 // 1 MiB in quotes
	calls := func(v string) map[string]error {
		_, _, inDLQ := g.AddToDLQ(t.Context(), noID, taskgraph.DLQManual, v)
		return map[string]error{
			"context":  second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Context: v})),
			"strict":   second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Context: v, Identity: taskgraph.IdentityStrict})),
			"tags":     second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Tags: v})),
			"inputs":   second(g.AddSteps(t.Context(), noID, taskgraph.AddedStep{Name: "n", Template: "t", Inputs: v})),
			"result":   second(g.CompleteStep(t.Context(), noID, v, "")),
			"metadata": inDLQ,
			"message":  second(g.SendWithNotify(t.Context(), "jobs_queue", v, nil)),
		}
	}
	for what, err := range calls(strings.Repeat("x", most+1)) {
		require.ErrorIs(t, err, pgwake.ErrPayloadTooLarge, what)
		require.ErrorIs(t, err, pgwake.ErrInvalid, what)
		require.ErrorContains(t, err, "has 1048577 bytes, and 1048576 is the most", what)
		require.Less(t, len(err.Error()), 300, what)
	}
	for what, err := range calls(strings.Repeat("x", most)) {
		require.ErrorIs(t, err, pgwake.ErrClosed, what)
	}
}

// Nothing is sent: the provider is closed.
func TestVerbs_ReasonOverTheLimit_TooLargeAndNothingIsSent(t *testing.T) {
	t.Parallel()
	g := closed(t)
	calls := func(v string) map[string]error {
		return map[string]error{
			"cancel":       second(g.Cancel(t.Context(), noID, v)),
			"resolve":      second(g.ResolveTask(t.Context(), noID, v)),
			"give up":      second(g.GiveUp(t.Context(), noID, v)),
			"reset":        second(g.ResetStep(t.Context(), noID, v)),
			"resolve step": second(g.ResolveStep(t.Context(), noID, v)),
			"complete":     second(g.CompleteStep(t.Context(), noID, nil, v)),
			"cancel step":  second(g.CancelStep(t.Context(), noID, v)),
			"fail":         second(g.FailStep(t.Context(), noID, v)),
			"notes":        second(g.ResolveDLQ(t.Context(), noID, taskgraph.DLQCancelled, "", v)),
		}
	}
	for what, err := range calls(strings.Repeat("x", taskgraph.MaxReasonLength+1)) {
		require.ErrorIs(t, err, pgwake.ErrPayloadTooLarge, what)
		require.ErrorIs(t, err, pgwake.ErrInvalid, what)
		require.ErrorContains(t, err, "has 16385 bytes, and 16384 is the most", what)
	}
	for _, bad := range []string{"a\x00", "\xff"} {
		for what, err := range calls(bad) {
			require.ErrorIs(t, err, pgwake.ErrInvalid, what)
			require.NotErrorIs(t, err, pgwake.ErrPayloadTooLarge, what)
		}
	}
	for what, err := range calls(strings.Repeat("x", taskgraph.MaxReasonLength)) {
		require.ErrorIs(t, err, pgwake.ErrClosed, what)
	}
	_, err := g.ResolveDLQ(t.Context(), noID, taskgraph.DLQCancelled, strings.Repeat("x", pgwake.MaxNameLength+1), "")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

// The settings of the Provider and of the Engine count, and what is kept already stays.
func TestAttempt_PayloadOverWhatIsSet_IsRefused(t *testing.T) {
	t.Parallel()
	g := onProvider(t, schemas.New(t, &pgwake.Config{MaxPayload: 100}), &taskgraph.Config{MaxResult: 10})
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var kept string
		if err := s.Checkpoint(ctx, strings.Repeat("x", 98)); err != nil {
			return nil, err
		}
		if err := s.Checkpoint(ctx, strings.Repeat("y", 99)); !errors.Is(err, pgwake.ErrPayloadTooLarge) {
			return nil, fmt.Errorf("a checkpoint: %w", err)
		}
		if _, err := s.LastCheckpoint(&kept); err != nil || kept != strings.Repeat("x", 98) {
			return nil, fmt.Errorf("kept: %s, %w", kept, err)
		}
		return taskgraph.Decision{Steps: []taskgraph.AddedStep{{Name: "b", Template: "a", Inputs: strings.Repeat("z", 99)}}}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "large", "1").Step("a", "h"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Contains(t, g.step(task, "a").Err(), "inputs: has 101 bytes, and 100 is the most")
	require.Equal(t, 1, g.step(task, "a").Attempts)
	for size, refused := range map[int]bool{9: true, 8: false} {
		_, err := g.CompleteStep(g.within(), noID, strings.Repeat("x", size), "")
		require.Equal(t, refused, errors.Is(err, pgwake.ErrPayloadTooLarge), "%v", err)
	}
}

// What passes the check is kept as it is.
func TestSubmit_JSONAtTheLimits_IsKept(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	require.NoError(t, l.Register(t.Context(), single("limits")))
	for _, text := range []string{`1e131071`, `1e-16383`, strings.Repeat("[", 1000) + strings.Repeat("]", 1000), `"\ud83d\ude00"`, `"\\u0000"`, `null`, `""`} {
		s := aTask(single("limits"))
		s.Context, s.Tags = json.RawMessage(text), json.RawMessage(text)
		done, err := l.Submit(t.Context(), s)
		require.NoError(t, err)
		require.True(t, one[bool](l, `SELECT context = $2::text::jsonb AND tags = $2::text::jsonb FROM tasks WHERE task_id = $1`, done.ID, text), text)
	}
}

func TestAttempt_JSONThatCannotBeKept_IsTold(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	results := make(chan any, 1)
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		v := <-results
		if err := s.Checkpoint(ctx, v); !errors.Is(err, pgwake.ErrInvalid) {
			return nil, fmt.Errorf("a checkpoint: %w", err)
		}
		return v, nil
	})
	g.run()
	d := taskgraph.Define("shop", "json", "1").Step("a", "h")
	g.register(d)
	for name, v := range noJSON {
		results <- v
		task := g.submit(d)
		g.until(task, taskgraph.TaskBlockedByFailures)
		require.Contains(t, g.step(task, "a").Err(), "the result: ", name)
		require.Equal(t, 1, g.step(task, "a").Attempts, name)
	}
}

func TestSubmit_IdentityStrict_TasksAreTheSameWhoseContextsAreEqual(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	require.NoError(t, l.Register(t.Context(), single("strict"), single("other")))
	submit := func(d *taskgraph.Definition, context any) taskgraph.Submitted {
		t.Helper()
		s := aTask(d)
		s.Context, s.Identity = context, taskgraph.IdentityStrict
		done, err := l.Submit(t.Context(), s)
		require.NoError(t, err)
		return done
	}
	raw := func(text string) any { return json.RawMessage(text) }
	seen := make(map[string]bool)
	for _, equal := range [][]any{
		{nil, raw(`{}`), map[string]int{}, raw(" { } ")},
		{raw(`null`), (*int)(nil)},
		{raw(`{"a": 1, "b": [1, "x"]}`), raw(`{"b":[1.0,"\u0078"],"a":10e-1}`), map[string]any{"b": []any{1, "x"}, "a": 1}, raw(`{"a": 7, "a": 1, "b": [1, "x"]}`)},
		{raw(`9007199254740992`), raw(`9007199254740992.0`)},
		{raw(`9007199254740993`)},
		{raw(`1e400`), raw(`10e399`), raw(`0.1E+401`)},
		{raw(`1e401`)},
		{raw(`-1e400`)},
		{raw(`0`), raw(`-0`), raw(`0.000`), raw(`0e99`)},
		{raw(`0.1`), raw(`1e-1`)},
		{raw(`"0.1"`)},
		{raw(`[1, 2]`)},
		{raw(`[2, 1]`)},
		{raw(`""`)},
		{raw(`false`)},
	} {
		first := submit(single("strict"), equal[0])
		require.False(t, first.Duplicate || seen[first.ID], "%s", equal[0])
		seen[first.ID] = true
		for _, same := range equal[1:] {
			require.Equal(t, taskgraph.Submitted{ID: first.ID, Duplicate: true}, submit(single("strict"), same), "%s and %s", equal[0], same)
		}
		require.False(t, submit(single("other"), equal[0]).Duplicate, "of another definition")
	}
	require.Equal(t, 2*len(seen), one[int](l, `SELECT count(*) FROM tasks`))
}

func TestRegister_SeveralBadDefinitions_AllOfThemAreTold(t *testing.T) {
	t.Parallel()
	g := closed(t)
	err := g.Register(t.Context(), taskgraph.Define("shop", "one", "1").Step("a", ""), single("good"), nil, taskgraph.Define("shop", "two", "1").Step("b", "h", taskgraph.After("b")))
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, `definition "shop/one" "1": step "a": has neither a handler nor a sub-task`)
	require.ErrorContains(t, err, `definition 2 is nil`)
	require.ErrorContains(t, err, `definition "shop/two" "1": step "b": depends on itself`)
	var of *taskgraph.DefinitionError
	require.ErrorAs(t, err, &of)
}

func TestRegister_Again_ChangesNothing_AndAnotherOfTheSameVersionIsAConflict(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := taskgraph.Define("shop", "again", "1").Step("a", "h").Step("b", "h", taskgraph.After("a"))
	for range 3 {
		require.NoError(t, l.Register(t.Context(), d))
	}
	ids := all[string](l, `SELECT task_definition_id::text FROM task_definitions`)
	require.Len(t, ids, 1)
	for name, change := range map[string]func(d *taskgraph.Definition){
		"description": func(d *taskgraph.Definition) { d.Description = "x" },
		"a step":      func(d *taskgraph.Definition) { d.Step("c", "h") },
		"an option":   func(d *taskgraph.Definition) { taskgraph.MaxAttempts(7)(&d.Steps[0]) },
		"a condition": func(d *taskgraph.Definition) { d.Steps[1].After[0].If = "$ == 1" },
		"the policy":  func(d *taskgraph.Definition) { d.OnFailure = taskgraph.Drain },
	} {
		other := taskgraph.Define("shop", "again", "1").Step("a", "h").Step("b", "h", taskgraph.After("a"))
		change(other)
		err := l.Register(t.Context(), other)
		require.ErrorIs(t, err, taskgraph.ErrConflict, name)
		other.Version = "2 " + name
		require.NoError(t, l.Register(t.Context(), other), name)
	}
	require.Equal(t, ids, all[string](l, `SELECT task_definition_id::text FROM task_definitions WHERE version = '1'`))
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM step_definitions WHERE task_definition_id = $1`, ids[0]))
}

func TestT8_CyclesAndUnknownParents_AreRefusedByGoAndBySQL_AndNothingIsKept(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for name, edges := range map[string][][2]string{
		"self edge":      {{"a", "a"}},
		"2-cycle":        {{"a", "b"}, {"b", "a"}},
		"5-cycle":        {{"a", "b"}, {"b", "c"}, {"c", "d"}, {"d", "e"}, {"e", "a"}},
		"behind one":     {{"a", "b"}, {"b", "a"}, {"b", "c"}},
		"unknown parent": {{"nobody", "a"}},
		"unknown child":  {{"a", "nobody"}},
	} {
		steps, handlers := []string{"a", "b", "c", "d", "e"}, []string{"h", "h", "h", "h", "h"}
		d := taskgraph.Define("bakery", "cycle", "1")
		var parents, children []string
		for _, step := range steps {
			d.Step(step, "h")
		}
		for _, e := range edges {
			parents, children = append(parents, e[0]), append(children, e[1])
			for i := range d.Steps {
				if d.Steps[i].Name == e[1] {
					taskgraph.After(e[0])(&d.Steps[i])
				}
			}
		}
		if name != "unknown child" { // which cannot be said in Go
			require.ErrorIs(t, l.Register(t.Context(), d), pgwake.ErrInvalid, name)
		}
		_, err := l.conn.Exec(t.Context(), `SELECT register_task_definition('bakery', 'cycle', '1', NULL, '{}', $1, $2, p_parents => $3, p_children => $4)`, steps, handlers, parents, children)
		require.ErrorIs(t, pgwake.WrapError("register", err), pgwake.ErrInvalid, name)
		for _, table := range []string{"task_definitions", "step_definitions", "step_definition_dependencies", "tasks", "steps", "step_dependencies"} {
			require.Zero(t, one[int](l, `SELECT count(*) FROM `+table), "%s of %s", table, name)
		}
		require.Equal(t, []string{"default"}, all[string](l, `SELECT name FROM namespaces`), name)
	}
}

// With the rights that the page lists, a role may submit tasks and cannot take part in them.
func TestSubmit_RoleMayOnlySubmit_SubmitsAndMayDoNothingElse(t *testing.T) {
	l := newLab(t)
	l.define("shop", "order", "1", `{}`, "a")
	role := l.role(testroles.Producer)
	l.as(role, `SELECT create_task('shop', 'order', '1', p_idempotency_key => 'k'), create_task('shop', 'order', '1', p_idempotency_key => 'k')`)
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM tasks`))

	task := one[string](l, `SELECT task_id::text FROM tasks`)
	l.exec(`SET ROLE ` + role)
	l.fails("42501", `SELECT cancel_task($1::text::uuid)`, task)
	l.fails("42501", `SELECT fetch_orchestration(gen_random_uuid(), '30 s')`)
	l.fails("42501", `SELECT register_task_definition('shop', 'another', '1', NULL, '{}', ARRAY['a'], ARRAY['h'])`)
	l.exec(`RESET ROLE`)
	l.turn()
	require.Equal(t, "steps_in_process", one[string](l, `SELECT state FROM tasks`))
}

func TestListTasks_PayloadBytes_TheBeginningStandsForAContextThatIsLonger(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	long := strings.Repeat("x", 3000)
	task := g.submit(single("h"), func(s *taskgraph.Submission) { s.Context = long })
	short := g.submit(single("h"), func(s *taskgraph.Submission) { s.Context = 1 })
	tasks, err := g.ListTasks(t.Context(), &taskgraph.TaskFilter{PayloadBytes: 100})
	require.NoError(t, err)
	require.Len(t, tasks, 2)
	require.Equal(t, []any{short, `1`, (*pgwake.Cut)(nil)}, []any{tasks[0].ID, string(tasks[0].Context), tasks[0].ContextCut})
	require.Equal(t, []any{task, json.RawMessage(nil), &pgwake.Cut{Bytes: 3002, Start: `"` + long[:99]}}, []any{tasks[1].ID, tasks[1].Context, tasks[1].ContextCut})
	whole, err := g.Task(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, []any{`"` + long + `"`, (*pgwake.Cut)(nil)}, []any{string(whole.Context), whole.ContextCut})
}
