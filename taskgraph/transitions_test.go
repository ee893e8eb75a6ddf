package taskgraph_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: is everything that happened told, in order, once, and as of any time?

func TestTransitions_OfTaskAndStep_AreInOrder(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b")
	task := l.create("default", "work")
	a := l.step(task, "a")
	const processor = "00000000-0000-0000-0000-000000000007"
	l.exec(`SELECT transition_task($1, ARRAY['pending', 'initializing', 'enqueuing_steps'], $2, '{"event": "Start"}', true)`, task, processor)
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued'], $2, '{}')`, a, processor)

	ofTask, err := l.TaskTransitions(l.within(), task)
	require.NoError(t, err)
	require.Equal(t, []string{"-pending", "pending-initializing", "initializing-enqueuing_steps"}, hops(ofTask))
	for i, x := range ofTask {
		require.Equal(t, []any{task, (*string)(nil), i + 1, i == 2}, []any{x.TaskID, x.StepID, x.SortKey, x.MostRecent})
		require.NotZero(t, x.ID)
		require.NotZero(t, x.Xact)
		require.WithinDuration(t, time.Now(), x.CreatedAt, time.Minute)
	}
	require.Nil(t, ofTask[0].Processor)
	require.Equal(t, processor, *ofTask[2].Processor)
	require.JSONEq(t, `{"event": "Start"}`, string(ofTask[2].Metadata))

	ofStep, err := l.StepTransitions(l.within(), a)
	require.NoError(t, err)
	require.Equal(t, []string{"-pending", "pending-enqueued"}, hops(ofStep))
	require.Equal(t, []any{task, a, "a", 2, true}, []any{ofStep[1].TaskID, *ofStep[1].StepID, *ofStep[1].StepName, ofStep[1].SortKey, ofStep[1].MostRecent})
	require.False(t, ofStep[0].MostRecent)

	everything, err := l.AllTransitions(l.within(), task)
	require.NoError(t, err)
	require.Len(t, everything, 6)
	require.True(t, slices.IsSortedFunc(everything, func(x, y taskgraph.Transition) int { return int(x.ID - y.ID) }))
	recent := 0
	for _, x := range everything {
		if x.MostRecent {
			recent++
		}
	}
	require.Equal(t, 3, recent, "of the task and of each step")

	for _, list := range []func(context.Context, string) ([]taskgraph.Transition, error){l.TaskTransitions, l.StepTransitions, l.AllTransitions} {
		none, err := list(l.within(), noID)
		require.NoError(t, err)
		require.Empty(t, none)
		_, err = list(l.within(), "7")
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
}

func hops(transitions []taskgraph.Transition) (all []string) {
	for _, x := range transitions {
		from := ""
		if x.FromState != nil {
			from = *x.FromState
		}
		all = append(all, from+"-"+x.ToState)
	}
	return all
}

func TestTaskAsOf_EachInstant_IsWhatWasThen(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "b", "a")
	now := func() time.Time { return one[time.Time](l, `SELECT clock_timestamp()`) }
	before := now()
	task := l.create("default", "work")
	a, b := l.step(task, "a"), l.step(task, "b")
	type was struct {
		at   time.Time
		task taskgraph.TaskState
		a, b taskgraph.StepState
	}
	history := []was{{now(), "pending", "pending", "pending"}}
	l.exec(`SELECT transition_task($1, ARRAY['pending', 'initializing', 'enqueuing_steps', 'steps_in_process'], NULL, '{}', true)`, task)
	history = append(history, was{now(), "steps_in_process", "pending", "pending"})
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid, $2], ARRAY['pending', 'enqueued'], NULL, '{}')`, a, b)
	history = append(history, was{now(), "steps_in_process", "enqueued", "enqueued"})
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['enqueued', 'in_progress', 'enqueued_for_orchestration', 'complete'], NULL, '{}')`, b)
	history = append(history, was{now(), "steps_in_process", "enqueued", "complete"})
	l.exec(`SELECT cancel_task($1)`, task)
	history = append(history, was{now(), "cancelled", "cancelled", "complete"}, was{now().Add(time.Hour), "cancelled", "cancelled", "complete"})
	for i, h := range history {
		s, err := l.TaskAsOf(l.within(), task, h.at)
		require.NoError(t, err)
		require.Equal(t, h.task, s.State, i)
		require.Equal(t, "work", s.Name)
		require.False(t, s.Since.After(h.at))
		require.Equal(t, []string{"b", b, string(h.b), "a", a, string(h.a)},
			[]string{s.Steps[0].Name, s.Steps[0].ID, string(s.Steps[0].State), s.Steps[1].Name, s.Steps[1].ID, string(s.Steps[1].State)}, i)
	}
	for _, c := range []struct {
		task string
		at   time.Time
	}{{task, before}, {noID, now()}} {
		_, err := l.TaskAsOf(l.within(), c.task, c.at)
		require.ErrorIs(t, err, pgwake.ErrNotFound)
	}
	_, err := l.TaskAsOf(l.within(), "7", before)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

// readAll reads on from a cursor, in pages.
func (l *lab) readAll(after taskgraph.Cursor, page int) ([]taskgraph.Transition, taskgraph.Cursor) {
	l.t.Helper()
	var read []taskgraph.Transition
	for {
		more, err := l.ReadTransitions(l.within(), after, page)
		require.NoError(l.t, err)
		if read = append(read, more...); len(more) > 0 {
			after = more[len(more)-1].Cursor()
		}
		if len(more) < page {
			return read, after
		}
	}
}

// readOn reads on until so many have come: transactions of others on the server hold up what came after they began.
func (l *lab) readOn(after taskgraph.Cursor, page, n int) ([]taskgraph.Transition, taskgraph.Cursor) {
	l.t.Helper()
	var read []taskgraph.Transition
	eventually(l.t, func() bool {
		more, cursor := l.readAll(after, page)
		read, after = append(read, more...), cursor
		return len(read) >= n
	})
	require.Len(l.t, read, n)
	return read, after
}

func TestReadTransitions_TransactionCommitsLate_NothingIsPassedOver(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	early := l.create("default", "work")
	_, cursor := l.readOn(taskgraph.Cursor{}, 100, 2)

	late := session(t, l.p)
	tx, err := late.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT transition_task($1, ARRAY['pending', 'initializing'], NULL, '{}', true)`, early) // its number is the first
	require.NoError(t, err)
	meanwhile := l.create("default", "work")
	l.bring(meanwhile, taskgraph.TaskComplete)
	read, cursor := l.readAll(cursor, 100)
	require.Empty(t, read, "what came after it waits for it")

	_, err = tx.Exec(t.Context(), `SELECT create_task('default', 'work', '1')`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	read, cursor = l.readOn(cursor, 2, 1+2+4)
	require.Equal(t, "pending-initializing", hops(read)[0])
	require.Equal(t, early, read[0].TaskID)
	read, _ = l.readAll(cursor, 100)
	require.Empty(t, read)
	read, _ = l.readAll(taskgraph.Cursor{}, 1)
	require.Len(t, read, 9)
}

func TestReadTransitions_TransactionIsRolledBack_OthersGoOn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	task := l.create("default", "work")
	tx, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT create_task('default', 'work', '1')`)
	require.NoError(t, err)
	l.bring(task, taskgraph.TaskInitializing)
	read, cursor := l.readOn(taskgraph.Cursor{}, 100, 1)
	require.Equal(t, []string{"-pending"}, hops(read))
	require.NoError(t, tx.Rollback(t.Context()))
	read, _ = l.readOn(cursor, 100, 1)
	require.Equal(t, []string{"pending-initializing"}, hops(read))
}

// A subtransaction has a number of its own, which is not that of the transaction.
func TestReadTransitions_WrittenInASubtransaction_CountAsItsTransaction(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	tx, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT create_task('default', 'work', '1')`)
	require.NoError(t, err)
	l.create("default", "work")
	inner, err := tx.Begin(t.Context())
	require.NoError(t, err)
	_, err = inner.Exec(t.Context(), `SELECT create_task('default', 'work', '1')`)
	require.NoError(t, err)
	require.NoError(t, inner.Commit(t.Context()))
	read, cursor := l.readAll(taskgraph.Cursor{}, 100)
	require.Empty(t, read)
	require.NoError(t, tx.Commit(t.Context()))
	l.readOn(cursor, 100, 3)
}

// A reader that follows sees each transition once, whatever writers do at the time.
func TestReadTransitions_FollowedAmongWriters_EachComesOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	const writers, rounds = 4, 30
	p := pool(t, l.p, writers)
	var work sync.WaitGroup
	for range writers {
		work.Go(func() {
			for range rounds {
				err := pgx.BeginFunc(t.Context(), p, func(tx pgx.Tx) error {
					var task string
					if err := tx.QueryRow(t.Context(), `SELECT create_task('default', 'work', '1')::text`).Scan(&task); err != nil {
						return err
					}
					if rand.IntN(3) == 0 { // others commit first
						if _, err := tx.Exec(t.Context(), `SELECT pg_sleep(0.003)`); err != nil {
							return err
						}
					}
					_, err := tx.Exec(t.Context(), `SELECT transition_task($1, ARRAY['pending', 'initializing', 'complete'], NULL, '{}', true)`, task)
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { work.Wait(); close(done) }()
	seen := make(map[int64]int)
	var cursor taskgraph.Cursor
	began := time.Now()
	for ended := false; ; {
		var read []taskgraph.Transition
		read, cursor = l.readAll(cursor, 7)
		for _, x := range read {
			seen[x.ID]++
		}
		// Transactions of others on the server hold up what came after they began.
		if ended && (len(seen) >= writers*rounds*4 || time.Since(began) > labPatience) {
			break
		}
		if ended {
			<-time.After(10 * time.Millisecond)
		}
		select {
		case <-done:
			ended = true
		default:
		}
	}
	require.Len(t, seen, writers*rounds*4)
	for id, n := range seen {
		require.Equal(t, 1, n, id)
	}
}

func TestCursor_Text_ComesBack(t *testing.T) {
	for _, c := range []taskgraph.Cursor{{}, {7, 8}, {1<<64 - 1, 1<<63 - 1}} {
		parsed, err := taskgraph.ParseCursor(c.String())
		require.NoError(t, err)
		require.Equal(t, c, parsed)
	}
	for _, text := range []string{"", "7", "7/", "/7", "-1/7", "7/-1", "7/8/9", "a/b"} {
		_, err := taskgraph.ParseCursor(text)
		require.ErrorIs(t, err, pgwake.ErrInvalid, text)
	}
	l := newLab(t)
	for _, limit := range []int{0, -1, 10_001} {
		_, err := l.ReadTransitions(l.within(), taskgraph.Cursor{}, limit)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	l.fails("PW003", `SELECT read_transitions(p_limit => -1)`)
}

// path are the transitions of a task along states, or of a step; a start at number 1.
func path(task, step string, firstID int64, states ...string) (all []taskgraph.Transition) {
	for i, to := range states {
		x := taskgraph.Transition{ID: firstID + int64(i), TaskID: task, SortKey: i + 1, ToState: to}
		if step != "" {
			x.StepID = &step
		}
		if i > 0 {
			x.FromState = &states[i-1]
		}
		all = append(all, x)
	}
	return all
}

func TestReplay_Transitions_FirstFaultIsReported(t *testing.T) {
	good := slices.Concat(path("t", "", 1, "pending", "initializing", "enqueuing_steps", "steps_in_process"),
		path("t", "s", 10, "pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"), path("u", "", 20, "pending"))
	r, err := taskgraph.Replay(good)
	require.NoError(t, err)
	require.Equal(t, map[string]taskgraph.TaskState{"t": taskgraph.TaskStepsInProcess, "u": taskgraph.TaskPending}, r.Tasks)
	require.Equal(t, map[string]taskgraph.StepState{"s": taskgraph.StepComplete}, r.Steps)
	slices.Reverse(good)
	_, err = taskgraph.Replay(good)
	require.NoError(t, err, "ids say in which order")

	other := "waiting_for_retry"
	for name, c := range map[string]struct {
		break_ func(all []taskgraph.Transition) []taskgraph.Transition
		id     int64
		says   string
	}{
		"no edge": {func(all []taskgraph.Transition) []taskgraph.Transition {
			all[2].ToState = "complete"
			all[1].ToState = "pending"
			return all
		}, 2, "from pending to pending"},
		"leaves the end": {func(all []taskgraph.Transition) []taskgraph.Transition {
			return slices.Concat(path("t", "", 1, "pending", "cancelled", "initializing"), all[4:])
		}, 3, "from cancelled to initializing"},
		"one is missing":        {func(all []taskgraph.Transition) []taskgraph.Transition { return slices.Delete(all, 2, 3) }, 4, "it comes as number 3"},
		"one is there twice":    {func(all []taskgraph.Transition) []taskgraph.Transition { return slices.Insert(all, 2, all[1]) }, 2, "it comes as number 3"},
		"two are swapped":       {func(all []taskgraph.Transition) []taskgraph.Transition { all[1].ID, all[2].ID = 3, 2; return all }, 2, "it comes as number 2"},
		"another before it":     {func(all []taskgraph.Transition) []taskgraph.Transition { all[2].FromState = &other; return all }, 3, `it is said to leave "waiting_for_retry", and the state is "initializing"`},
		"begins elsewhere":      {func(all []taskgraph.Transition) []taskgraph.Transition { return path("t", "", 1, "complete") }, 1, "it begins as complete"},
		"step begins elsewhere": {func(all []taskgraph.Transition) []taskgraph.Transition { return path("t", "s", 1, "enqueued") }, 1, "it begins as enqueued"},
		"step takes no edge": {func(all []taskgraph.Transition) []taskgraph.Transition {
			all[7].ToState = "complete"
			all[6].ToState = "pending"
			return all
		}, 12, "from enqueued to pending"},
		"state of a task in a step": {func(all []taskgraph.Transition) []taskgraph.Transition {
			return path("t", "s", 1, "pending", "initializing")
		}, 2, "from pending to initializing"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := taskgraph.Replay(c.break_(slices.Concat(path("t", "", 1, "pending", "initializing", "enqueuing_steps", "steps_in_process"),
				path("t", "s", 10, "pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"))))
			var fault *taskgraph.ReplayError
			require.ErrorAs(t, err, &fault)
			require.Equal(t, c.id, fault.Transition.ID)
			require.Equal(t, c.says, fault.Problem)
			require.Contains(t, err.Error(), c.says)
		})
	}
}

func TestReplay_TaskWhoseRowsWereChanged_IsFoundOut(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.bring(task, taskgraph.TaskBlockedByFailures)
	r, err := l.Replay(l.within(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskBlockedByFailures, r.Tasks[task])
	require.Equal(t, taskgraph.StepPending, r.Steps[l.step(task, "a")])

	for _, change := range []string{
		`UPDATE tasks SET state = 'complete'`,
		`UPDATE steps SET state = 'complete'`,
		`DELETE FROM task_transitions WHERE sort_key = 2`,
		`UPDATE step_transitions SET to_state = 'error'`,
	} {
		tx, err := l.conn.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), change)
		require.NoError(t, err)
		_, err = l.WithTx(tx).Replay(l.within(), task)
		var fault *taskgraph.ReplayError
		require.ErrorAs(t, err, &fault, change)
		var e *pgwake.Error
		require.True(t, errors.As(err, &e), change)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	_, err = l.Replay(l.within(), noID)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, err = l.Replay(l.within(), strings.Repeat("7", 100))
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

// What a task was at any instant is what its transitions up to there lead to.
func TestTaskAsOf_AgreesWithReplay(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b", "c")
	task := l.create("default", "work")
	for range 40 {
		if rand.IntN(3) == 0 {
			if s := one[taskgraph.TaskState](l, `SELECT state FROM tasks WHERE task_id = $1`, task); !s.IsTerminal() {
				next := slices.DeleteFunc(s.Next(), taskgraph.TaskState.IsTerminal)
				l.hop(task, s, next[rand.IntN(len(next))])
			}
			continue
		}
		step := l.step(task, string("abc"[rand.IntN(3)]))
		s := one[taskgraph.StepState](l, `SELECT state FROM steps WHERE step_id = $1`, step)
		next := slices.DeleteFunc(s.Next(), taskgraph.StepState.IsTerminal)
		if len(next) > 0 {
			l.exec(`SELECT transition_steps(ARRAY[$1::uuid], $2, NULL, '{}')`, step, []taskgraph.StepState{s, next[rand.IntN(len(next))]})
		}
	}
	everything, err := l.AllTransitions(l.within(), task)
	require.NoError(t, err)
	require.Greater(t, len(everything), 20)
	for i := range everything {
		at := everything[i].CreatedAt
		known := slices.DeleteFunc(slices.Clone(everything), func(x taskgraph.Transition) bool { return x.CreatedAt.After(at) })
		r, err := taskgraph.Replay(known)
		require.NoError(t, err)
		s, err := l.TaskAsOf(l.within(), task, at)
		require.NoError(t, err)
		require.Equal(t, r.Tasks[task], s.State, fmt.Sprint(i))
		require.Len(t, s.Steps, len(r.Steps))
		for _, step := range s.Steps {
			require.Equal(t, r.Steps[step.ID], step.State, fmt.Sprint(i))
		}
	}
}
