package taskgraph_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// next are the ids that NextReadyTasks returns outside of a transaction.
func (s *stage) next(t *testing.T, limit int) []string {
	t.Helper()
	found, err := s.NextReadyTasks(t.Context(), limit)
	require.NoError(t, err)
	return taskIDs(found)
}

func taskIDs(found []taskgraph.ReadyTask) []string {
	ids := make([]string, len(found))
	for i, task := range found {
		ids[i] = task.TaskID
	}
	return ids
}

func TestT29_EightCallersClaimAHundredTasks_NoneTwiceAndNoneLeft(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for range 100 {
		s.ready(t, time.Minute)
	}
	var mu sync.Mutex
	claimed := make(map[string]int)
	const processors = 8
	p := pool(t, s.p, processors)
	callers, ctx := errgroup.WithContext(t.Context())
	for range processors {
		callers.Go(func() error {
			for misses := 0; misses < 20; {
				n := 0
				err := pgx.BeginFunc(ctx, p, func(tx pgx.Tx) error {
					found, err := s.WithTx(tx).NextReadyTasks(ctx, 5)
					if err != nil {
						return err
					}
					n = len(found)
					for _, task := range found {
						var won bool
						if err := tx.QueryRow(ctx, `SELECT transition_task_state_atomic($1, 'pending', 'initializing')`, task.TaskID).Scan(&won); err != nil {
							return err
						}
						if !won {
							return fmt.Errorf("task %s was claimed by another, who had its lock", task.TaskID)
						}
						mu.Lock()
						claimed[task.TaskID]++
						mu.Unlock()
					}
					return nil
				})
				if err != nil {
					return err
				}
				if n == 0 {
					misses++ // others may have all that is left, and give it back
				}
			}
			return nil
		})
	}
	require.NoError(t, callers.Wait())
	require.Len(t, claimed, 100)
	for task, n := range claimed {
		require.Equal(t, 1, n, task)
	}
	require.Empty(t, s.next(t, 5))
}

func TestNextReadyTasks_TransactionsAtOnce_GetDisjointTasksUntilTheyEnd(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for range 25 {
		s.ready(t, time.Minute)
	}
	all := s.next(t, 100)
	require.Len(t, all, 25)
	var got []string
	var txs []pgx.Tx
	for i := range 3 {
		tx, err := s.pool.Begin(t.Context())
		require.NoError(t, err)
		txs = append(txs, tx)
		defer func() { _ = tx.Rollback(context.Background()) }()
		found, err := s.WithTx(tx).NextReadyTasks(t.Context(), 10)
		require.NoError(t, err)
		require.Len(t, found, []int{10, 10, 5}[i])
		again, err := s.WithTx(tx).NextReadyTasks(t.Context(), 3)
		require.NoError(t, err)
		require.Equal(t, taskIDs(found)[:3], taskIDs(again), "one's own locks keep nothing from oneself")
		got = append(got, taskIDs(found)...)
	}
	require.Equal(t, all, got)
	_, err := s.NextReadyTask(t.Context())
	require.Error(t, err, "all are taken")
	// Who holds a task does not keep others from adding what refers to it.
	s.exec(t, `SET lock_timeout = '5 s'; INSERT INTO task_dlq (dlq_entry_id, task_id, original_state, reason)
		VALUES ('`+unknown+`', '`+got[0]+`', 'pending', 'manual_dlq'); RESET lock_timeout`)
	require.NoError(t, txs[1].Rollback(t.Context()))
	require.Equal(t, all[10:20], s.next(t, 100))
}

func TestT48_LowPriority_GrowsWithAgeUntilItIsFirst(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	var ids []string
	ages := []time.Duration{0, 30 * time.Minute, 59 * time.Minute, 61 * time.Minute, 23 * time.Hour, 25 * time.Hour, 72 * time.Hour}
	for _, age := range ages {
		ids = append(ids, s.ready(t, age))
	}
	before := -1.0
	first, err := s.TaskReadyInfo(t.Context(), ids[0])
	require.NoError(t, err)
	for i, task := range ids {
		info, err := s.TaskReadyInfo(t.Context(), task)
		require.NoError(t, err)
		require.Greater(t, info.ComputedPriority, before, "aged %v", ages[i])
		require.InDelta(t, 0.1*ages[i].Hours(), info.ComputedPriority-first.ComputedPriority, 0.01, "no cliff at 1 h, nor at 24 h")
		before = info.ComputedPriority
	}
	// Tasks of priority 3 keep coming. That of priority 0 is before those that come 30 h after it.
	low := s.ready(t, 29*time.Hour, `tags = '{}'`)
	high := s.ready(t, 0, `priority = 3`)
	order := s.next(t, 100)
	require.Less(t, slices.Index(order, high), slices.Index(order, low), "at 29 h")
	s.exec(t, `UPDATE tasks SET created_at = created_at - interval '2 h', priority_key = task_priority_key(namespace, priority, retries, created_at - interval '2 h') WHERE task_id = $1`, low)
	order = s.next(t, 100)
	require.Less(t, slices.Index(order, low), slices.Index(order, high), "at 31 h")
}

func TestT49_EqualPriority_OldestFirstThenByID(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.settings(t, `age_weight = 0`)
	var old, young []string
	for range 5 {
		young = append(young, s.ready(t, 0, `created_at = '2020-01-02 00:00+00'`))
		old = append(old, s.ready(t, 0, `created_at = '2020-01-01 00:00+00'`))
	}
	slices.Sort(old)
	slices.Sort(young)
	want := append(old, young...)
	require.Equal(t, want, s.next(t, 100))
	require.Equal(t, want[:7], s.next(t, 7))
	s.settings(t, `age_weight = 0.1`)
	require.Equal(t, want, s.next(t, 100), "age says the same")
	task, err := s.NextReadyTask(t.Context())
	require.NoError(t, err)
	require.Equal(t, want[0], task.TaskID)
}

func TestT50_TenThousandOldTasksThatAreNotReady_DoNotHideAFreshOne(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	// The hint of each says that it is ready, and its one step waits for a step that is in progress. That is the worst case:
	// a turn that finds nothing ready clears the hint.
	s.fill(t, `
		INSERT INTO tasks (task_id, task_definition_id, namespace, state, priority_key, next_ready_at, correlation_id, created_at)
		SELECT new_uuid(), '`+theDefinition+`', 'default', 'waiting_for_dependencies', task_priority_key('default', 0, 0, now() - interval '1 d'), now(), new_uuid(), now() - interval '1 d'
		  FROM generate_series(1, 10000) AS n;
		INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state)
		SELECT new_uuid(), t.task_id, '`+theStep+`', p, 's' || p, (ARRAY['in_progress', 'pending'])[p] FROM tasks t, generate_series(1, 2) AS p;
		ANALYZE steps; -- or the next statement may compare each with each
		INSERT INTO step_dependencies (task_id, from_step_id, to_step_id)
		SELECT p.task_id, p.step_id, c.step_id FROM steps p JOIN steps c ON c.task_id = p.task_id AND c.position = 2 WHERE p.position = 1`)
	fresh := s.insert(t, model.Task{State: "waiting_for_dependencies", Steps: []model.Step{oneStep("complete"), oneStep("pending", 0)}})[0]
	require.Equal(t, []string{fresh.id}, s.next(t, 1))
	require.Equal(t, []string{fresh.id}, s.next(t, 5))
	s.exec(t, `UPDATE tasks SET next_ready_at = NULL WHERE task_id <> $1`, fresh.id)
	require.Equal(t, []string{fresh.id}, s.next(t, 1))
}

func TestNextReadyTasks_EachState_PendingAlwaysAndWaitingOnlyIfReady(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	names := make(map[string]string)
	for _, state := range model.TaskStates {
		for name, its := range map[string][]model.Step{
			"ready":     {oneStep("complete"), oneStep("pending", 0), oneStep("pending")},
			"not ready": {oneStep("in_progress"), oneStep("pending", 0)},
			"no steps":  nil,
		} {
			names[s.insert(t, model.Task{State: state, Steps: its})[0].id] = state + ", " + name
		}
	}
	later := s.insert(t, model.Task{State: "pending"})[0].id
	s.exec(t, `UPDATE tasks SET next_ready_at = now() + interval '1 h' WHERE task_id = $1`, later)
	found, err := s.NextReadyTasks(t.Context(), 100)
	require.NoError(t, err)
	var got []string
	for _, task := range found {
		got = append(got, names[task.TaskID])
		want := 0
		if strings.HasSuffix(names[task.TaskID], ", ready") {
			want = 2
		}
		require.Equal(t, want, task.Ready, names[task.TaskID])
		info, err := s.TaskReadyInfo(t.Context(), task.TaskID)
		require.NoError(t, err)
		require.InDelta(t, task.ComputedPriority, info.ComputedPriority, 0.01)
		info.ComputedPriority = task.ComputedPriority
		require.Equal(t, task, *info)
		require.Equal(t, "the task", task.Name)
		require.Equal(t, "default", task.Namespace)
	}
	require.ElementsMatch(t, []string{"pending, ready", "pending, not ready", "pending, no steps", "waiting_for_dependencies, ready", "waiting_for_retry, ready"}, got)
	info, err := s.TaskReadyInfo(t.Context(), later)
	require.NoError(t, err, "whatever its state")
	require.Equal(t, taskgraph.TaskState("pending"), info.State)
}

func TestNextReadyTasks_LimitOfNone_IsNone(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.ready(t, 0)
	require.Empty(t, s.next(t, 0))
	require.Equal(t, 1, value[int](t, s, `SELECT count(*) FROM get_next_ready_tasks()`))
	_, err := s.pool.Exec(t.Context(), `SELECT get_next_ready_tasks(NULL)`)
	require.ErrorContains(t, err, "PW003")
}

func TestComputedPriority_EachWeight_CountsAndOrders(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.exec(t, `UPDATE taskgraph_settings SET age_weight = 0, retry_weight = 2, deadline_weight = 5, namespace_priority = '{"urgent": 7.5, "wrong": "x"}'`)
	plain := s.ready(t, 0)
	retried := s.ready(t, 0, `retries = 3`)
	urgent := s.ready(t, 0, `namespace = 'urgent'`)
	wrong := s.ready(t, 0, `namespace = 'wrong', created_at = '2020-01-01 00:00+00'`)
	overdue := s.ready(t, 0, `deadline = now() - interval '2 h'`)
	more := s.ready(t, 0, `deadline = now() - interval '3 h', priority = -1`)
	ahead := s.ready(t, 0, `deadline = now() + interval '2 h', priority = 1`)
	want := map[string]float64{plain: 0, retried: 6, urgent: 7.5, wrong: 0, overdue: 10, more: 14, ahead: 1}
	order := []string{more, overdue, urgent, retried, ahead, wrong, plain}
	found, err := s.NextReadyTasks(t.Context(), 100)
	require.NoError(t, err)
	require.Equal(t, order, taskIDs(found))
	for _, task := range found {
		require.InDelta(t, want[task.TaskID], task.ComputedPriority, 0.1)
	}
	for limit := range order {
		require.Equal(t, order[:limit], s.next(t, limit))
	}
	s.exec(t, `UPDATE taskgraph_settings SET deadline_weight = 0`)
	require.Equal(t, []string{urgent, retried, ahead}, s.next(t, 3), "deadlines do not count")
}

func TestNextReadyTasks_DeadlinesAndManyThatAreNotReady_AreExactlyByPriority(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.settings(t, `deadline_weight = 0.7`)
	s.exec(t, `
		INSERT INTO tasks (task_id, task_definition_id, namespace, state, next_ready_at, correlation_id, created_at, priority, deadline)
		SELECT gen_random_uuid(), '`+theDefinition+`', 'default', (ARRAY['pending', 'pending', 'waiting_for_retry', 'evaluating_results'])[1 + n % 4],
		       now() + CASE WHEN n % 7 = 0 THEN interval '1 h' ELSE interval '0' END, gen_random_uuid(), now() - n % 50 * interval '1 h', n % 9,
		       CASE WHEN n % 3 = 0 THEN now() + (n % 40 - 30) * interval '1 h' END
		  FROM generate_series(1, 2000) AS n`)
	s.settings(t, `deadline_weight = 0.7`)
	want := strings.Split(value[string](t, s, `
		SELECT string_agg(task_id::text, ',' ORDER BY priority_key + 0.7 * hours_overdue(deadline, now()) DESC, created_at, task_id)
		  FROM tasks WHERE state = 'pending' AND next_ready_at <= now()`), ",")
	require.Greater(t, len(want), 500)
	for _, limit := range []int{1, 7, 100, 1000, 5000} {
		got := s.next(t, limit)
		require.Equal(t, want[:min(limit, len(want))], got, "limit "+strconv.Itoa(limit))
	}
}
