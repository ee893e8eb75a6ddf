package taskgraph_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what can messages do that whoever may add to the queues has made up?

// engineFor is an Engine on the schema of a lab, and what sends messages as a producer.
func engineFor(t *testing.T) (l *lab, g *graph, send func(instance, kind, data string)) {
	l = newLab(t)
	config := taskgraph.Config{}
	config.Turns.Retry = func(int, error) time.Duration { return 0 }
	g = onProvider(t, l.p, &config)
	role := l.role(testroles.Producer)
	return l, g, func(instance, kind, data string) {
		t.Helper()
		l.as(role, `SELECT enqueue_message($1, $2, nullif($3, '')::json, p_name => 'work', p_queue => 'taskgraph')`, instance, kind, data)
	}
}

func TestEngine_MessagesThatAreMadeUp_TheTaskGoesOn(t *testing.T) {
	t.Parallel()
	l, g, send := engineFor(t)
	release := make(chan struct{})
	g.Handle("h", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return 7, ctx.Err()
	})
	task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h"),
		taskgraph.Define("shop", "outer", "1").Step("a", "h").SubTask("child", "inner", "1").Step("b", "h", taskgraph.After("a", "child")))
	g.run()
	eventually(t, func() bool {
		return g.step(task, "a").State == taskgraph.StepInProgress && g.step(task, "child").State == taskgraph.StepInProgress
	})
	for _, data := range []string{
		"", `null`, `7`, `"x"`, `[]`, `{}`, `{"activity_id": "1"}`, `{"activity_id": 1.5}`, `{"activity_id": 1e400}`, `{"activity_id": 0}`, `{"activity_id": -1}`,
		`{"activity_id": 5000000000}`, `{"activity_id": 2147483648}`, `{"activity_id": 2147483647}`, `{"activity_id": 3}`,
		`{"activity_id": 1, "error": "\u0000"}`, `{"activity_id": 1, "error": "\ud800"}`, `{"activity_id": 1, "error": "` + strings.Repeat(`\u0000`, 100_000) + `"}`,
		`{"activity_id": 1, "result": "\u0000"}`, `{"activity_id": 1, "name": "\u0000"}`,
		`{"activity_id": 2}`, `{"activity_id": 2, "error": "made up"}`,
		strings.Repeat("[", 900) + strings.Repeat("]", 900),
	} {
		for _, kind := range []string{"activity_failed", "activity_completed", "start", "queue_message", "continue_as_new", "retry", "no such kind"} {
			send(task, kind, data)
		}
	}
	eventually(t, func() bool {
		return one[int](l, `SELECT count(*) FROM orchestrator_queue WHERE instance_id = $1`, task) == 0
	})
	close(release)
	g.complete(task)
	require.JSONEq(t, `{"x": 7}`, string(g.step(task, "child").Results))
}

// A turn that cannot be taken would come back for ever, and with it all that comes for its instance.
func TestEngine_MessagesForWhatIsNoTask_AreGoneOrDeadLetters(t *testing.T) {
	t.Parallel()
	l, g, send := engineFor(t)
	g.Handle("h", func(context.Context, *taskgraph.Step) (any, error) { return 7, nil })
	task := l.submit(single("h"))
	g.run()
	g.complete(task)
	const unknown = "0189aaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
	for _, instance := range []string{"not-a-uuid", strings.ToUpper(task), strings.ReplaceAll(task, "-", "x"), "{" + task + "}", strings.ReplaceAll(task, "-", ""), unknown} {
		for _, kind := range []string{"activity_failed", "cancel", "start", "queue_message", "continue_as_new", "no such kind"} {
			send(instance, kind, `{"activity_id": 1}`)
			send(instance+"/"+kind, kind, `{"activity_id": 1}`)
		}
	}
	eventually(t, func() bool { return one[int](l, `SELECT count(*) FROM orchestrator_queue`) == 0 })
	require.Equal(t, []string{"Completed"}, all[string](l, `SELECT status FROM instance_info WHERE instance_id = $1`, task))
	require.Equal(t, []string{"permanent error"}, all[string](l, `SELECT reason FROM dead_letters WHERE instance_id = 'not-a-uuid/activity_failed'`))
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters WHERE instance_id = $1`, unknown), "what is for a task that was removed is nothing to look at")
}
