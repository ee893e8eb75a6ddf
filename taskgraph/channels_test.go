package taskgraph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what do listeners hear that know nothing of pgwake?

// ear is a session that listens, as any client of the database may.
type ear struct {
	t    *testing.T
	conn *pgx.Conn
}

func (l *lab) listen(channels ...string) *ear {
	l.t.Helper()
	conn := session(l.t, l.p)
	for _, c := range append(channels, "end_"+l.p.Schema()) {
		_, err := conn.Exec(l.t.Context(), `LISTEN `+pgx.Identifier{c}.Sanitize())
		require.NoError(l.t, err)
	}
	return &ear{l.t, conn}
}

// heard is a notification whose payload is JSON.
type heard struct {
	channel, payload string
	fields           map[string]any
}

// heard returns what was committed before, and concerns this schema: other tests use the same channels of the database.
func (l *lab) heard(e *ear, ours func(fields map[string]any) bool) (all []heard) {
	l.t.Helper()
	l.exec(`SELECT pg_notify('end_' || $1, '')`, l.p.Schema())
	for {
		n, err := e.conn.WaitForNotification(l.within())
		require.NoError(l.t, err)
		if n.Channel == "end_"+l.p.Schema() {
			return all
		}
		require.Less(l.t, len(n.Payload), 1000)
		h := heard{channel: n.Channel, payload: n.Payload}
		require.NoError(l.t, json.Unmarshal([]byte(n.Payload), &h.fields))
		if ours(h.fields) {
			all = append(all, h)
		}
	}
}

// of says whether something is about a task.
func of(task string) func(map[string]any) bool {
	return func(fields map[string]any) bool { return fields["task_uuid"] == task }
}

// requireFields asserts that a payload has these fields and emitted_at, and no others.
func requireFields(t *testing.T, want map[string]any, h heard) {
	t.Helper()
	got := make(map[string]any)
	for k, v := range h.fields {
		got[k] = v
	}
	emitted, err := time.Parse(time.RFC3339Nano, fmt.Sprint(got["emitted_at"]))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), emitted, time.Minute)
	delete(got, "emitted_at")
	require.Equal(t, want, got)
}

func (l *lab) outside(on bool) {
	l.t.Helper()
	require.NoError(l.t, l.SetSettings(l.within(), taskgraph.SettingsChange{OutsideChannels: &on}))
}

func TestChannels_Off_NothingIsTold(t *testing.T) {
	l := newLab(t)
	l.define("shop", "order", "1", `{}`, "a")
	e := l.listen(taskgraph.TaskReadyAll, taskgraph.TaskStateChangeAll, taskgraph.NamespaceCreatedAll, taskgraph.TaskReadyChannel("shop"), taskgraph.TaskStateChangeChannel("shop"))
	ours := func(task string) func(map[string]any) bool {
		return func(fields map[string]any) bool {
			return fields["task_uuid"] == task || fields["namespace_name"] == "quiet-"+l.p.Schema()
		}
	}
	task := l.create("shop", "order")
	l.exec(`SELECT tell_task_ready($1, 1, 'task_start', NULL, NULL)`, task)
	l.bring(task, taskgraph.TaskComplete)
	require.NoError(t, l.p.RegisterNamespace(t.Context(), "quiet-"+l.p.Schema()))
	require.Empty(t, l.heard(e, ours(task)))
	l.outside(true)
	require.NoError(t, l.EnsureTaskQueue(l.within(), "loud_queue"))
	l.outside(false)
	another := l.create("shop", "order")
	l.bring(another, taskgraph.TaskComplete)
	require.Empty(t, l.heard(e, ours(another)))
}

func TestChannel_TaskReady_StepTransition_EveryField(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a", "b")
	task := one[string](l, `SELECT create_task('shop', 'order', '1', '{"secret": "of the user"}', 3)::text`)
	l.bring(task, taskgraph.TaskStepsInProcess)
	step := l.step(task, "a")
	e := l.listen(taskgraph.TaskReadyAll, taskgraph.TaskReadyChannel("shop"), taskgraph.TaskReadyChannel("default"))
	l.exec(`SELECT tell_task_ready($1, 2, 'step_transition', $2, 'complete')`, task, step)
	got := l.heard(e, of(task))
	require.Equal(t, []string{"task_ready.shop", "task_ready"}, []string{got[0].channel, got[1].channel})
	require.Equal(t, got[0].payload, got[1].payload)
	requireFields(t, map[string]any{"task_uuid": task, "namespace": "shop", "priority": 3.0, "ready_steps": 2.0, "triggered_by": "step_transition",
		"step_uuid": step, "step_state": "complete"}, got[0])
	event, err := taskgraph.ParseTaskReady(got[0].payload)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), event.EmittedAt, time.Minute)
	event.EmittedAt = time.Time{}
	require.Equal(t, taskgraph.TaskReady{TaskUUID: task, Namespace: "shop", Priority: 3, ReadySteps: 2, TriggeredBy: taskgraph.TriggeredByStepTransition,
		StepUUID: step, StepState: taskgraph.StepComplete}, event)
}

func TestChannel_TaskReady_TaskStart_EveryField(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a")
	task := l.create("shop", "order")
	e := l.listen(taskgraph.TaskReadyAll)
	require.Equal(t, task, l.turn())
	got := l.heard(e, of(task))
	require.Len(t, got, 1)
	requireFields(t, map[string]any{"task_uuid": task, "namespace": "shop", "priority": 0.0, "ready_steps": 1.0, "triggered_by": "task_start", "task_state": "steps_in_process"}, got[0])
	event, err := taskgraph.ParseTaskReady(got[0].payload)
	require.NoError(t, err)
	event.EmittedAt = time.Time{}
	require.Equal(t, taskgraph.TaskReady{TaskUUID: task, Namespace: "shop", ReadySteps: 1, TriggeredBy: taskgraph.TriggeredByTaskStart, TaskState: taskgraph.TaskStepsInProcess}, event)
}

// What is told while an Engine runs: that a task begins, and from then on which step moved, and where to, so that others are ready.
func TestChannel_TaskReady_TurnsOfAnEngine_TellOfTheStepThatMoved(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	g := onProvider(t, l.p, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	ok, _ := failing(0, nil)
	once, _ := failing(1, errBroken)
	bad, _ := failing(1000, taskgraph.Permanent(errBroken))
	g.Handle("ok", ok)
	g.Handle("once", once)
	g.Handle("bad", bad)
	blocked := make(chan struct{})
	g.Handle("late", func(context.Context, *taskgraph.Step) (any, error) { <-blocked; return nil, nil })
	e := l.listen(taskgraph.TaskReadyAll)
	g.run()
	// said is what was told of a task, with steps by their names.
	said := func(task string) (all []string) {
		t.Helper()
		for _, h := range l.heard(e, of(task)) {
			event, err := taskgraph.ParseTaskReady(h.payload)
			require.NoError(t, err)
			text := fmt.Sprintf("%s %d", event.TriggeredBy, event.ReadySteps)
			if event.StepUUID != "" {
				text += " " + one[string](l, `SELECT name FROM steps WHERE step_id = $1`, event.StepUUID)
			}
			all = append(all, fmt.Sprint(text, " ", event.StepState, event.TaskState))
		}
		return all
	}
	task := g.submit(taskgraph.Define("shop", "linear", "1").Step("a", "ok").Step("b", "ok", taskgraph.After("a")).Step("c", "ok", taskgraph.After("a")))
	g.complete(task)
	require.Equal(t, []string{"task_start 1 steps_in_process", "step_transition 2 a complete"}, said(task))

	task = g.submit(taskgraph.Define("shop", "retried", "1").Step("a", "once").Step("b", "ok", taskgraph.After("a")))
	g.complete(task)
	require.Equal(t, []string{"task_start 1 steps_in_process", "step_transition 1 a enqueued", "step_transition 1 a complete"}, said(task))

	task = g.submit(taskgraph.Define("shop", "resolved", "1").Step("a", "bad").Step("b", "bad", taskgraph.After("a")).Step("c", "ok", taskgraph.After("b")))
	g.until(task, taskgraph.TaskBlockedByFailures)
	did(t)(g.ResolveStep(t.Context(), g.step(task, "a").ID, ""))
	eventually(t, func() bool { return g.step(task, "b").State == taskgraph.StepError })
	g.until(task, taskgraph.TaskBlockedByFailures)
	did(t)(g.CompleteStep(t.Context(), g.step(task, "b").ID, 1, ""))
	g.complete(task)
	require.Equal(t, []string{"task_start 1 steps_in_process", "step_transition 1 a resolved_manually", "step_transition 1 b complete"}, said(task))

	// With a failure, what is free may go on, but the task is not one that has ready steps: it is blocked.
	d := taskgraph.Define("shop", "drains", "1").Step("a", "bad").Step("b", "late").Step("c", "ok", taskgraph.After("b"))
	d.OnFailure = taskgraph.Drain
	task = g.submit(d)
	eventually(t, func() bool { return g.step(task, "a").State == taskgraph.StepError })
	close(blocked)
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, taskgraph.StepComplete, g.step(task, "c").State)
	require.Equal(t, []string{"task_start 2 steps_in_process"}, said(task))
}

func TestChannel_TaskReady_NothingIsReadyOrTheTaskHasEnded_IsSilent(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a")
	e := l.listen(taskgraph.TaskReadyAll)
	task := l.create("shop", "order")
	for _, ready := range []any{0, -1, nil} {
		l.exec(`SELECT tell_task_ready($1, $2, 'step_transition', NULL, NULL)`, task, ready)
	}
	l.exec(`SELECT tell_task_ready($1, 1, 'step_transition', NULL, NULL)`, noID)
	l.bring(task, taskgraph.TaskCancelled)
	l.exec(`SELECT tell_task_ready($1, 1, 'step_transition', NULL, NULL)`, task)
	require.Empty(t, l.heard(e, func(f map[string]any) bool { return f["task_uuid"] == task || f["task_uuid"] == noID }))
}

func TestT63_StepBegins_NoTaskReadyIsTold(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a", "b")
	task := l.create("shop", "order")
	l.bring(task, taskgraph.TaskStepsInProcess)
	e := l.listen(taskgraph.TaskReadyAll, taskgraph.TaskReadyChannel("shop"))
	l.enqueued(task, "a")
	require.True(t, one[bool](l, `SELECT transition_step_state_atomic($1, 'enqueued', 'in_progress')`, l.step(task, "a")))
	require.Empty(t, l.heard(e, of(task)))
}

func TestChannel_TaskStateChange_EveryEndAndField(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a")
	e := l.listen(taskgraph.TaskStateChangeAll, taskgraph.TaskStateChangeChannel("shop"), taskgraph.TaskStateChangeChannel("default"))
	actions := map[taskgraph.TaskState]taskgraph.ActionNeeded{
		taskgraph.TaskComplete: taskgraph.ActionFinalization, taskgraph.TaskError: taskgraph.ActionErrorHandling,
		taskgraph.TaskCancelled: taskgraph.ActionCleanup, taskgraph.TaskResolvedManually: taskgraph.ActionFinalization,
	}
	for _, s := range taskgraph.TaskStates() {
		task := one[string](l, `SELECT create_task('shop', 'order', '1', '{"secret": "of the user"}')::text`)
		l.bring(task, s)
		got := l.heard(e, of(task))
		if !s.IsTerminal() {
			require.Empty(t, got, s)
			continue
		}
		require.Equal(t, []string{"task_state_change.shop", "task_state_change"}, []string{got[0].channel, got[1].channel})
		require.Len(t, got, 2)
		requireFields(t, map[string]any{"task_uuid": task, "namespace": "shop", "task_state": string(s), "triggered_by": "task_transition",
			"action_needed": string(actions[s])}, got[0])
		require.Equal(t, got[0].payload, got[1].payload)
		event, err := taskgraph.ParseTaskStateChange(got[1].payload)
		require.NoError(t, err)
		event.EmittedAt = time.Time{}
		require.Equal(t, taskgraph.TaskStateChange{TaskUUID: task, Namespace: "shop", TaskState: s, TriggeredBy: "task_transition", ActionNeeded: actions[s]}, event)
	}
}

func TestChannel_NamespaceCreated_EveryField(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	e := l.listen(taskgraph.NamespaceCreatedAll)
	name := fmt.Sprintf("shop-%d", time.Now().UnixNano())
	for range 2 {
		l.exec(`SELECT enqueue_work('x', p_namespace => $1)`, name)
	}
	got := l.heard(e, func(f map[string]any) bool { return f["namespace_name"] == name })
	require.Len(t, got, 1)
	uuid := one[string](l, `SELECT md5('namespace ' || $1)::uuid::text`, name)
	created, err := time.Parse(time.RFC3339Nano, fmt.Sprint(got[0].fields["created_at"]))
	require.NoError(t, err)
	require.True(t, created.Equal(one[time.Time](l, `SELECT created_at FROM namespaces WHERE name = $1`, name)))
	requireFields(t, map[string]any{"namespace_uuid": uuid, "namespace_name": name, "description": nil, "created_at": got[0].fields["created_at"],
		"triggered_by": "namespace_creation"}, got[0])
	event, err := taskgraph.ParseNamespaceCreated(got[0].payload)
	require.NoError(t, err)
	require.True(t, event.CreatedAt.Equal(created))
	event.EmittedAt, event.CreatedAt = time.Time{}, time.Time{}
	require.Equal(t, taskgraph.NamespaceCreated{NamespaceUUID: uuid, NamespaceName: name, TriggeredBy: "namespace_creation"}, event)
}

// A server whose OpenSSL is one for FIPS has no MD5.
func TestChannel_NamespaceCreated_ServerHasNoMD5_IsTold(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	e := l.listen(taskgraph.NamespaceCreatedAll)
	schema := pgx.Identifier{one[string](l, `SELECT current_schema()::text`)}.Sanitize()
	l.exec(`CREATE FUNCTION md5(text) RETURNS text LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION 'could not compute MD5 hash: unsupported' USING ERRCODE = CASE WHEN $1 LIKE '%new' THEN 'XX000' ELSE '53200' END; END $$`)
	l.exec(`ALTER FUNCTION namespace_uuid SET search_path = ` + schema + `, pg_catalog`)
	for _, namespace := range []string{"new", "of-14"} {
		l.exec(`SELECT enqueue_work('x', p_namespace => $1)`, namespace)
		uuid := one[string](l, `SELECT left(encode(sha256(convert_to('namespace ' || $1, 'UTF8')), 'hex'), 32)::uuid::text`, namespace)
		require.Len(t, l.heard(e, func(f map[string]any) bool { return f["namespace_uuid"] == uuid }), 1)
	}
}

// Whoever may only enqueue may also be the first in a namespace.
func TestChannel_NamespaceCreated_ByARoleThatMayOnlyEnqueue_IsTold(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	e := l.listen(taskgraph.NamespaceCreatedAll)
	l.as(l.role(testroles.Producer), `SELECT enqueue_work('x', p_namespace => 'new')`)
	created := one[time.Time](l, `SELECT created_at FROM namespaces WHERE name = 'new'`)
	require.Len(t, l.heard(e, func(f map[string]any) bool {
		at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(f["created_at"]))
		return err == nil && at.Equal(created)
	}), 1)
}

func TestChannel_MessageReady_EveryField(t *testing.T) {
	l := newLab(t) // outside channels are off: whoever sends with notify wants it
	e := l.listen(taskgraph.MessageReadyAll, taskgraph.MessageReadyChannel("billing"), taskgraph.MessageReadyChannel("default"))
	id, err := l.SendWithNotify(l.within(), "worker_billing_queue", map[string]string{"secret": "of the user"}, nil)
	require.NoError(t, err)
	ours := func(id int64) func(map[string]any) bool {
		due := one[time.Time](l, `SELECT visible_at FROM worker_queue WHERE id = $1`, id)
		return func(f map[string]any) bool {
			at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(f["ready_at"]))
			return err == nil && at.Equal(due)
		}
	}
	got := l.heard(e, ours(id))
	require.Equal(t, []string{"pgmq_message_ready.billing", "pgmq_message_ready"}, []string{got[0].channel, got[1].channel})
	require.Equal(t, got[0].payload, got[1].payload)
	requireFields(t, map[string]any{"event_type": "message_ready", "msg_id": float64(id), "queue_name": "worker_billing_queue", "namespace": "billing",
		"ready_at": got[0].fields["ready_at"], "delay_seconds": 0.0}, got[0])
	event, err := taskgraph.ParseMessageReady(got[1].payload)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), event.ReadyAt, time.Minute)
	event.EmittedAt, event.ReadyAt = time.Time{}, time.Time{}
	require.Equal(t, taskgraph.MessageReady{EventType: "message_ready", MsgID: id, QueueName: "worker_billing_queue", Namespace: "billing"}, event)

	later, err := l.SendWithNotify(l.within(), "worker_billing_queue", 1, &taskgraph.MessageOptions{Delay: 90 * time.Second})
	require.NoError(t, err)
	got = l.heard(e, ours(later))
	require.Len(t, got, 2, "at once, of what is due later")
	event, err = taskgraph.ParseMessageReady(got[0].payload)
	require.NoError(t, err)
	require.Equal(t, 90, event.DelaySeconds)
	require.WithinDuration(t, time.Now().Add(90*time.Second), event.ReadyAt, time.Minute)
	require.InDelta(t, 90, event.ReadyAt.Sub(event.EmittedAt).Seconds(), 5)
}

// A node that waits wakes up when a message is due that was sent with a delay, without looking in between.
func TestSendWithNotify_Delayed_ANodeThatWaitsGetsItWhenItIsDue(t *testing.T) {
	l := newLab(t)
	got := make(chan *pgwake.ClaimedWorkItem, 1)
	go func() {
		item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{"jobs"}, PollTimeout: labPatience})
		if err != nil {
			t.Error(err)
		}
		got <- item
	}()
	eventually(t, func() bool { s := l.p.Stats().Worker; return s.Parked == 1 && s.Settled })
	var id int64
	require.NoError(t, l.apart(pool(t, l.p, 1), func(g *taskgraph.Graph) (err error) { // of another process
		id, err = g.SendWithNotify(l.within(), "jobs_queue", 1, &taskgraph.MessageOptions{Delay: time.Second})
		return err
	}))
	item := <-got
	require.NotNil(t, item)
	require.Equal(t, id, item.ID)
	require.Equal(t, 1, item.Attempt)
}

func TestT45_Channels_RolledBack_NothingIsTold(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	l.define("shop", "order", "1", `{}`, "a")
	e := l.listen(taskgraph.TaskReadyAll, taskgraph.TaskStateChangeAll, taskgraph.NamespaceCreatedAll, taskgraph.MessageReadyAll)
	task := l.create("shop", "order")
	tx, err := l.conn.Begin(t.Context())
	require.NoError(t, err)
	unheard := fmt.Sprintf("unheard-%d", time.Now().UnixNano())
	for _, statement := range []string{
		`SELECT tell_task_ready('` + task + `', 1, 'task_start', NULL, NULL)`,
		`SELECT cancel_task('` + task + `')`,
		`SELECT enqueue_work('x', p_namespace => '` + unheard + `')`,
		`SELECT pgmq_send_with_notify('a_queue_of_` + task[:8] + `', '1')`,
	} {
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, l.heard(e, func(f map[string]any) bool {
		return f["task_uuid"] == task || f["namespace_name"] == unheard || f["queue_name"] == "a_queue_of_"+task[:8]
	}))
}

// No name that is accepted makes a channel that PostgreSQL does not take, and no data of a user is in a payload: the transaction of a
// business is not aborted by a notification.
func TestT46_Channels_LongNamesAndData_AbortNothing(t *testing.T) {
	l := newLab(t)
	l.outside(true)
	long := strings.Repeat("a", 40)
	require.LessOrEqual(t, max(len(taskgraph.TaskReadyChannel(long)), len(taskgraph.TaskStateChangeChannel(long)), len(taskgraph.MessageReadyChannel(long))), 63)
	d := l.define(long, strings.Repeat("t", 255), "1", `{}`, strings.Repeat("s", 255))
	require.NotEmpty(t, d)
	e := l.listen(taskgraph.TaskReadyChannel(long), taskgraph.TaskStateChangeChannel(long), taskgraph.MessageReadyChannel(long))
	task := one[string](l, `SELECT create_task($1, $2, '1', jsonb_build_object('long', repeat('x', 100000)))::text`, long, strings.Repeat("t", 255))
	l.exec(`SELECT tell_task_ready($1, 1, 'step_transition', $2, 'complete')`, task, l.step(task, strings.Repeat("s", 255)))
	l.bring(task, taskgraph.TaskError)
	queue := "worker_" + long + "_queue"
	id, err := l.SendWithNotify(l.within(), queue, strings.Repeat("x", 100_000), nil)
	require.NoError(t, err)
	got := l.heard(e, func(f map[string]any) bool { return f["task_uuid"] == task || f["msg_id"] == float64(id) })
	require.Len(t, got, 3)

	tooLong := long + "a"
	l.fails("23514", `SELECT register_task_definition($1, 'work', '1', NULL, '{}', '{}', '{}')`, tooLong)
	l.fails("PW003", `SELECT enqueue_work('x', p_namespace => $1)`, tooLong)
	require.Equal(t, "default", taskgraph.ExtractQueueNamespace(tooLong+"_queue"))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue WHERE name = $1 AND namespace = $2`, queue, long))
}

func TestParse_MalformedPayload_IsAnError(t *testing.T) {
	const task = `"task_uuid": "00000000-0000-0000-0000-000000000001"`
	for name, c := range map[string]struct {
		parse func(string) error
		bad   []string
		good  string
	}{
		"task ready": {func(p string) error { _, err := taskgraph.ParseTaskReady(p); return err },
			[]string{`{` + task + `}`, `{` + task + `, "namespace": "A", "ready_steps": 1, "triggered_by": "x"}`, `{` + task + `, "namespace": "a", "ready_steps": 0, "triggered_by": "x"}`,
				`{"task_uuid": "7", "namespace": "a", "ready_steps": 1, "triggered_by": "x"}`},
			`{` + task + `, "namespace": "a", "ready_steps": 1, "triggered_by": "x", "something": "new"}`},
		"task state change": {func(p string) error { _, err := taskgraph.ParseTaskStateChange(p); return err },
			[]string{`{` + task + `, "namespace": "a", "task_state": "pending", "action_needed": "cleanup"}`, `{` + task + `, "namespace": "a", "task_state": "complete"}`},
			`{` + task + `, "namespace": "a", "task_state": "complete", "action_needed": "finalization"}`},
		"namespace created": {func(p string) error { _, err := taskgraph.ParseNamespaceCreated(p); return err },
			[]string{`{"namespace_name": "a"}`, `{"name": "a", "namespace_uuid": "00000000-0000-0000-0000-000000000001"}`},
			`{"namespace_name": "a", "namespace_uuid": "00000000-0000-0000-0000-000000000001", "description": "x"}`},
		"message ready": {func(p string) error { _, err := taskgraph.ParseMessageReady(p); return err },
			[]string{`{"msg_id": 0, "queue_name": "a", "namespace": "a"}`, `{"msg_id": 1, "queue_name": "a"}`, `{"msg_id": "1", "queue_name": "a", "namespace": "a"}`},
			`{"msg_id": 1, "queue_name": "a", "namespace": "a"}`},
	} {
		for _, payload := range append(c.bad, "", "x", "null", "[]", "7", `"x"`, `{}`, `{"task_uuid": 7}`) {
			require.ErrorIs(t, c.parse(payload), pgwake.ErrInvalid, "%s: %s", name, payload)
		}
		require.NoError(t, c.parse(c.good), name)
	}
}
