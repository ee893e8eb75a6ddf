package taskgraph_test

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: does a definition say what it was told?

// order is a definition with something of everything.
func order() *taskgraph.Definition {
	d := taskgraph.Define("shop", "fulfil_order", "1.0.0")
	d.Description = "Gets an order out of the door."
	d.OnFailure = taskgraph.Drain
	d.Lifecycle.MaxWaitingForDependencies = 90 * time.Minute
	d.Step("reserve", "inventory.reserve", taskgraph.MaxAttempts(5), taskgraph.Timeout(time.Minute))
	d.Step("charge", "payments.charge", taskgraph.After("reserve"), taskgraph.NotRetryable(), taskgraph.Describe("Takes the money."))
	d.Step("ship", "shipping.ship", taskgraph.AfterIf("charge", `$.status=="paid"`), taskgraph.RetryEvery(7*time.Second),
		taskgraph.Tag("gpu"), taskgraph.LimitKey("carrier"), taskgraph.Inputs(map[string]any{"parcels": 1, "carrier": "ACME"}))
	d.SubTask("refund", "refund_order", "2.0.0", taskgraph.After("ship", "charge"))
	d.Template("notify", "mail.send")
	return d
}

const orderJSON = `{"namespace": "shop", "name": "fulfil_order", "version": "1.0.0", "description": "Gets an order out of the door.",
	"on_failure": "drain", "lifecycle": {"max_waiting_for_dependencies": "1h30m"}, "steps": [
		{"name": "reserve", "handler": "inventory.reserve", "max_attempts": 5, "timeout": "1m"},
		{"name": "charge", "handler": "payments.charge", "description": "Takes the money.", "after": [{"step": "reserve"}], "retryable": false},
		{"name": "ship", "handler": "shipping.ship", "after": [{"step": "charge", "if": "$.status == \"paid\""}], "retry_every": "7s",
			"tag": "gpu", "limit_key": "carrier", "inputs": {"carrier": "ACME", "parcels": 1}},
		{"name": "refund", "sub_task_name": "refund_order", "sub_task_version": "2.0.0", "after": [{"step": "charge"}, {"step": "ship"}]},
		{"name": "notify", "handler": "mail.send", "on_demand": true}]}`

func marshal(t require.TestingT, v any) string {
	data, err := json.Marshal(v)
	require.NoError(t, err)
	return string(data)
}

func TestDefinition_AsJSON_SaysWhatTheProgramSaid(t *testing.T) {
	t.Parallel()
	require.NoError(t, order().Validate())
	require.JSONEq(t, orderJSON, marshal(t, order()))
	require.Equal(t, marshal(t, order()), marshal(t, *order()))
	var read taskgraph.Definition
	require.NoError(t, json.Unmarshal([]byte(orderJSON), &read))
	require.NoError(t, read.Validate())
	require.Equal(t, marshal(t, order()), marshal(t, read))
	require.Equal(t, 7*time.Second, *read.Steps[2].RetryEvery)
}

func TestDefinition_TwoThatMeanTheSame_AreTheSameJSON(t *testing.T) {
	t.Parallel()
	one := taskgraph.Define("n", "t", "1").Step("a", "h").Step("b", "h")
	other := taskgraph.Define("n", "t", "1").Step("a", "h").Step("b", "h")
	one.Step("c", "h", taskgraph.After("a"), taskgraph.AfterIf("b", `$."x"==1`), taskgraph.Inputs(json.RawMessage(`{"b": 1.50, "a":[ ]}`)))
	other.Step("c", "h", taskgraph.AfterIf("b", ` ( $.x == 1 ) `), taskgraph.After("a"), taskgraph.Inputs(json.RawMessage(`{"a":[],"b":1.50}`)))
	other.Steps[2].Retryable = new(true)
	other.OnFailure = taskgraph.FailFast
	taskgraph.MaxAttempts(taskgraph.DefaultMaxAttempts)(&other.Steps[2])
	require.Equal(t, marshal(t, one), marshal(t, other))
	require.Contains(t, marshal(t, one), "1.50")
	require.NotContains(t, marshal(t, one), "fail_fast")
}

func TestDefinition_ZeroThatIsNoDefault_IsKept(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1").Step("a", "h", taskgraph.MaxAttempts(0), taskgraph.RetryEvery(0), nil)
	require.NoError(t, d.Validate())
	require.JSONEq(t, `{"namespace": "n", "name": "t", "version": "1", "steps": [{"name": "a", "handler": "h", "max_attempts": 0, "retry_every": "0s"}]}`,
		marshal(t, d))
}

func TestDefinition_NoSteps_IsValid(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	require.NoError(t, d.Validate())
	require.JSONEq(t, `{"namespace": "n", "name": "t", "version": "1", "steps": []}`, marshal(t, d))
}

func TestDefinition_OptionsShared_DoNotShareWhatTheySet(t *testing.T) {
	t.Parallel()
	shared := []taskgraph.StepOption{taskgraph.After("a"), taskgraph.Inputs(func() {})}
	d := taskgraph.Define("n", "t", "1").Step("a", "h").Step("b", "h", shared...).Step("c", "h", append(shared, taskgraph.After("b"))...)
	require.Len(t, d.Steps[1].After, 1)
	require.Len(t, d.Steps[2].After, 2)
	problems := problemsOf(t, d)
	require.Len(t, problems, 2)
}

type panics struct{}

func (panics) MarshalJSON() ([]byte, error) { panic("no") }

func TestInputs_NotJSON_AreAProblemAndNoPanic(t *testing.T) {
	t.Parallel()
	loop := map[string]any{}
	loop["loop"] = loop
	for name, v := range map[string]any{
		"NaN": math.NaN(), "+Inf": math.Inf(1), "func": func() {}, "chan": make(chan int), "complex": 1i, "panics": panics{}, "loop": loop,
		"within": []any{map[string]any{"a": math.Inf(-1)}}, "raw": json.RawMessage(`{`),
	} {
		problems := problemsOf(t, taskgraph.Define("n", "t", "1").Step("a", "h", taskgraph.Inputs(v)))
		require.Len(t, problems, 1, name)
		require.Contains(t, problems[0], `step "a": inputs are not JSON: `, name)
	}
}

func TestInputs_NothingOrNull_AreNone(t *testing.T) {
	t.Parallel()
	for _, v := range []any{nil, json.RawMessage(nil), json.RawMessage("null"), (*int)(nil)} {
		d := taskgraph.Define("n", "t", "1").Step("a", "h", taskgraph.Inputs(v))
		require.NoError(t, d.Validate())
		require.NotContains(t, marshal(t, d), "inputs")
	}
}

// The functions in SQL read durations out of the JSON.
func TestDefinition_DurationsInJSON_AreIntervalsOfPostgreSQL(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	for d, text := range map[time.Duration]string{
		time.Millisecond: "1ms", 90 * time.Second: "1m30s", time.Hour: "1h", time.Minute: "1m", 10 * time.Second: "10s", 20 * time.Minute: "20m",
		100 * time.Hour: "100h", time.Hour + time.Second: "1h0m1s", time.Hour + 30*time.Minute: "1h30m", 1500 * time.Millisecond: "1.5s",
		time.Hour + time.Millisecond: "1h0m0.001s", 999 * time.Millisecond: "999ms", 290 * 365 * 24 * time.Hour: "2540400h",
	} {
		definition := taskgraph.Define("n", "t", "1").Step("a", "h", taskgraph.Timeout(d))
		require.NoError(t, definition.Validate())
		var read string
		var is time.Duration
		require.NoError(t, s.QueryRow(t.Context(), `SELECT x, x::interval FROM (SELECT $1::jsonb->'steps'->0->>'timeout' AS x) AS step`,
			marshal(t, definition)).Scan(&read, &is))
		require.Equal(t, text, read)
		require.Equal(t, d, is)
	}
}

func problemsOf(t *testing.T, d *taskgraph.Definition) []string {
	t.Helper()
	err := d.Validate()
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	var e *taskgraph.DefinitionError
	require.ErrorAs(t, err, &e)
	require.Zero(t, e.More)
	return e.Problems
}
