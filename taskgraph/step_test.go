package taskgraph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a handler get to see of the steps before its own?

func TestStep_ResultsLargerThanOneJSONBHolds_AreReadOneByOne(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	var text string
	var result, all, unknown, later error
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		result = s.Result(ctx, "b", &text)
		_, all = s.Results(ctx)
		unknown = s.Result(ctx, "nobody", &text)
		later = s.Result(ctx, "later", &text)
		return nil, nil
	})
	task := g.submit(taskgraph.Define("shop", "large", "1").Step("a", "x").Step("b", "x").Step("c", "x").Step("join", "h", taskgraph.After("a", "b", "c")).
		Step("later", "x", taskgraph.After("join")))
	for _, name := range []string{"a", "b", "c"} {
		did(t)(g.CompleteStep(t.Context(), g.step(task, name).ID, "the result of "+name, ""))
	}
	_, err := g.p.Pool().Exec(g.within(), fmt.Sprintf(`SET LOCAL session_replication_role = replica; -- or a trigger has a look at all of that
		UPDATE %s SET results = to_jsonb(repeat('x', 135 << 20)) WHERE task_id = '%s' AND name IN ('a', 'c')`, pgx.Identifier{g.p.Schema(), "steps"}.Sanitize(), task))
	require.NoError(t, err)
	g.query(`UPDATE steps SET results = '"nobody is to see that"' WHERE task_id = $1 AND name = 'later' RETURNING name`, task)
	g.run()
	eventually(t, func() bool {
		return g.one(`SELECT state FROM steps WHERE task_id = $1 AND name = 'join'`, task) == string(taskgraph.StepComplete)
	})
	require.NoError(t, g.stop())
	require.NoError(t, result)
	require.Equal(t, "the result of b", text)
	require.ErrorContains(t, all, "total size of jsonb object elements exceeds")
	require.ErrorIs(t, unknown, pgwake.ErrNotFound)
	require.ErrorIs(t, later, pgwake.ErrNotFound)
}

// What is said of one step is what is said of it among all.
func TestDependencyResult_EachAncestor_IsThatOfTheMap(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := taskgraph.Define("shop", "ancestors", "1").Step("alone", "h").Step("a", "h").Step("b", "h", taskgraph.After("a")).Step("skipped", "h", taskgraph.AfterIf("a", "$ == 7")).
		Step("null", "h").Step("open", "h").Step("join", "h", taskgraph.After("b", "skipped", "null", "open")).Step("after", "h", taskgraph.After("join"))
	task, other := l.task(d), l.task(d)
	for _, name := range []string{"alone", "a", "b", "after"} {
		did(t)(l.CompleteStep(t.Context(), l.step(task, name), map[string]string{"from": name}, ""))
	}
	did(t)(l.CompleteStep(t.Context(), l.step(task, "null"), jsonNull{}, ""))
	did(t)(l.ResolveStep(t.Context(), l.step(task, "skipped"), ""))
	l.exec(`UPDATE steps SET results = '"not yet"' WHERE name = 'open'`)
	results, err := l.DependencyResults(t.Context(), l.step(task, "join"))
	require.NoError(t, err)
	require.Len(t, results, 3)
	for _, name := range []string{"alone", "a", "b", "skipped", "null", "open", "join", "after", "nobody", "", "a\x00"} {
		result, err := l.DependencyResult(t.Context(), l.step(task, "join"), name)
		switch want, known := results[name]; {
		case known:
			require.NoError(t, err, name)
			require.Equal(t, want, result, name)
		case name == "a\x00":
			require.ErrorIs(t, err, pgwake.ErrInvalid)
		default:
			require.ErrorIs(t, err, pgwake.ErrNotFound, name)
		}
	}
	for _, step := range []string{l.step(other, "join"), noID} {
		_, err = l.DependencyResult(t.Context(), step, "a")
		require.ErrorIs(t, err, pgwake.ErrNotFound)
	}
	_, err = l.DependencyResult(t.Context(), "7", "a")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

type jsonNull struct{}

func (jsonNull) MarshalJSON() ([]byte, error) { return []byte("null"), nil }

// What does not fit may be a secret, and errors go to logs and are kept.
func TestStep_WhatDoesNotFit_IsNotInTheError(t *testing.T) {
	t.Parallel()
	type inner struct {
		N    int8
		When time.Time
		Keys map[int8]string
		Num  json.Number
		Text int `json:",string"`
	}
	type outer struct{ In []inner }
	for text, says := range map[string]string{
		`{"In": [{"N": 73731}]}`:              ", does not fit int8",
		`{"In": [{"N": "73731"}]}`:            "field In.N, at byte 21, does not fit int8",
		`{"In": [{"Keys": {"73731": ""}}]}`:   "does not fit int8",
		`{"In": [{"When": "s73731"}]}`:        "something in it does not fit taskgraph_test.outer (*time.ParseError)",
		`{"In": [{"When": "s73731"}, {}, 3]}`: "does not fit taskgraph_test.outer",
		`{"In": [{"Num": "73731x"}]}`:         "something in it does not fit taskgraph_test.outer",
		`{"In": [{"Text": "73731x"}]}`:        "field In.Text, at byte",
		`"73731"`:                             "what is at byte 7 does not fit taskgraph_test.outer",
		`73731x`:                              "not JSON from byte 6 on",
	} {
		s := taskgraph.Step{Name: "a", TaskID: "t", Inputs: json.RawMessage(text), Context: json.RawMessage(text)}
		for what, err := range map[string]error{"inputs of step a": s.DecodeInputs(new(outer)), "context of task t": s.DecodeContext(new(outer))} {
			require.ErrorContains(t, err, what, text)
			require.ErrorContains(t, err, says, text)
			for ; err != nil; err = errors.Unwrap(err) {
				require.NotContains(t, err.Error(), "73731", text)
			}
		}
	}
	s := taskgraph.Step{Inputs: json.RawMessage(`1`)}
	require.ErrorContains(t, s.DecodeInputs(outer{}), "non-pointer taskgraph_test.outer")
	require.ErrorContains(t, s.DecodeInputs(nil), "Unmarshal(nil)")
}

func TestStep_ResultAndCheckpointThatDoNotFit_AreNotInTheError(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var when time.Time
		switch s.Name {
		case "result":
			return nil, s.Result(ctx, "a", &when)
		case "checkpoint":
			if err := s.Checkpoint(ctx, "s3cr3t"); err != nil {
				return nil, err
			}
			_, err := s.LastCheckpoint(&when)
			return nil, err
		}
		return "s3cr3t", nil
	})
	g.run()
	d := taskgraph.Define("shop", "secret", "1").Step("a", "h").Step("result", "h", taskgraph.After("a")).Step("checkpoint", "h")
	d.OnFailure = taskgraph.Drain
	task := g.submit(d)
	for name, says := range map[string]string{
		"result":     "decode the result of step a: something in it does not fit time.Time (*time.ParseError)",
		"checkpoint": "decode the checkpoint of step checkpoint: something in it does not fit time.Time (*time.ParseError)",
	} {
		eventually(t, func() bool { return g.step(task, name).State == taskgraph.StepError })
		require.Equal(t, says, g.step(task, name).Err())
	}
}
