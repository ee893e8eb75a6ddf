package taskgraph_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: is everything told that is wrong with a definition, and nothing else?

func TestValidate_AProblem_IsToldWithItsStep(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	cut := `"` + long[:100] + `"…`
	for name, c := range map[string]struct {
		spoil   func(d *taskgraph.Definition)
		problem string
	}{
		"namespace":         {func(d *taskgraph.Definition) { d.Namespace = "Shop" }, `namespace "Shop" does not match ^[a-z][a-z0-9_-]{0,39}$`},
		"namespace empty":   {func(d *taskgraph.Definition) { d.Namespace = "" }, `namespace "" does not match`},
		"namespace long":    {func(d *taskgraph.Definition) { d.Namespace = long[:41] }, `namespace "` + long[:41] + `" does not match`},
		"name empty":        {func(d *taskgraph.Definition) { d.Name = "" }, `name is empty`},
		"name long":         {func(d *taskgraph.Definition) { d.Name = long }, `name is 256 bytes long, more than 255`},
		"version empty":     {func(d *taskgraph.Definition) { d.Version = "" }, `version is empty`},
		"version NUL":       {func(d *taskgraph.Definition) { d.Version = "1\x00" }, `version "1\x00" contains NUL`},
		"description UTF-8": {func(d *taskgraph.Definition) { d.Description = "\xff" }, `description "\xff" is not valid UTF-8`},
		"on failure":        {func(d *taskgraph.Definition) { d.OnFailure = "stop" }, `on_failure is "stop", neither fail_fast nor drain`},
		"lifecycle":         {func(d *taskgraph.Definition) { d.Lifecycle.MaxLifetime = -1 }, `lifecycle max_lifetime of -1ns is negative`},
		"lifecycle, fine":   {func(d *taskgraph.Definition) { d.Lifecycle.MaxStepsInProcess = 1 }, `lifecycle max_steps_in_process of 1ns is not in whole milliseconds`},
		"no step name":      {func(d *taskgraph.Definition) { d.Step("", "h") }, `step 3 has no name`},
		"step name long":    {func(d *taskgraph.Definition) { d.Step(long, "h") }, `step ` + cut + `: name is 256 bytes long, more than 255`},
		"step name NUL":     {func(d *taskgraph.Definition) { d.Step("c\x00", "h") }, `step "c\x00": name "c\x00" contains NUL`},
		"step name UTF-8":   {func(d *taskgraph.Definition) { d.Step("c\xff", "h") }, `step "c\xff": name "c\xff" is not valid UTF-8`},
		"step name percent": {func(d *taskgraph.Definition) { d.Step("50%d", "") }, `step "50%d": has neither a handler nor a sub-task`},
		"twice":             {func(d *taskgraph.Definition) { d.Step("a", "h").Step("a", "h") }, `step "a": defined 3 times`},
		"no handler":        {func(d *taskgraph.Definition) { d.Step("c", "") }, `step "c": has neither a handler nor a sub-task`},
		"handler long":      {func(d *taskgraph.Definition) { d.Step("c", long) }, `step "c": handler is 256 bytes long, more than 255`},
		"no task name":      {func(d *taskgraph.Definition) { d.SubTask("c", "", "1") }, `step "c": sub-task has no name`},
		"no task version":   {func(d *taskgraph.Definition) { d.SubTask("c", "t", "") }, `step "c": sub-task has no version`},
		"no task at all":    {func(d *taskgraph.Definition) { d.SubTask("c", "", "") }, `step "c": has neither a handler nor a sub-task`},
		"handler and task":  {func(d *taskgraph.Definition) { d.Steps[0].SubTaskName = "t" }, `step "a": has both a handler and a sub-task`},
		"attempts":          {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.MaxAttempts(-1)) }, `step "c": max_attempts of -1 is negative`},
		"attempts, many":    {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.MaxAttempts(1<<31)) }, `step "c": max_attempts of 2147483648 is more than 2147483647`},
		"backoff":           {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.RetryEvery(-1)) }, `step "c": retry_every of -1ns is negative`},
		"backoff, fine":     {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.RetryEvery(1500*time.Millisecond)) }, `step "c": retry_every of 1.5s is not in whole seconds`},
		"backoff, long":     {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.RetryEvery(1<<31*time.Second)) }, `is more than 2147483647 s`},
		"timeout 0":         {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.Timeout(0)) }, `step "c": timeout of 0s is not positive`},
		"timeout":           {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.Timeout(-time.Second)) }, `step "c": timeout of -1s is not positive`},
		"timeout, fine":     {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.Timeout(time.Microsecond)) }, `step "c": timeout of 1µs is not in whole milliseconds`},
		"tag long":          {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.Tag(long[:201])) }, `step "c": tag is 201 bytes long, more than 200`},
		"limit key NUL":     {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.LimitKey("\x00")) }, `step "c": limit_key "\x00" contains NUL`},
		"inputs":            {func(d *taskgraph.Definition) { d.Steps[0].Inputs = json.RawMessage("{") }, `step "a": inputs: not JSON`},
		"inputs UTF-8":      {func(d *taskgraph.Definition) { d.Steps[0].Inputs = json.RawMessage("\"\xff\"") }, `step "a": inputs: not valid UTF-8`},
		"inputs NUL":        {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.Inputs("\x00")) }, `step "c": inputs: the escape \u0000 is no character`},
		"inputs surrogate":  {func(d *taskgraph.Definition) { d.Steps[0].Inputs = json.RawMessage(`["\ud83d\ude00\\\ud83dx"]`) }, `inputs: the escape \ud83d is no character`},
		"inputs number":     {func(d *taskgraph.Definition) { d.Steps[0].Inputs = json.RawMessage(`[1e131072]`) }, `step "a": inputs: the number "1e131072" is beyond`},
		"inputs deep": {func(d *taskgraph.Definition) {
			d.Steps[0].Inputs = json.RawMessage(strings.Repeat("[", 1001) + strings.Repeat("]", 1001))
		}, `step "a": inputs: nested more than 1000 deep`},
		"timeout of a task": {func(d *taskgraph.Definition) { d.SubTask("c", "t", "1", taskgraph.Timeout(time.Second)) }, `step "c": timeout is for steps that a handler runs`},
		"tag of a task":     {func(d *taskgraph.Definition) { d.SubTask("c", "t", "1", taskgraph.Tag("gpu")) }, `step "c": tag is for steps that a handler runs`},
		"key of a task":     {func(d *taskgraph.Definition) { d.SubTask("c", "t", "1", taskgraph.LimitKey("k")) }, `step "c": limit_key is for steps that a handler runs`},
		"pause of a task":   {func(d *taskgraph.Definition) { d.SubTask("c", "t", "1", taskgraph.RetryEvery(-1)) }, `step "c": retry_every of -1ns is negative`},
		"self edge":         {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.After("c")) }, `step "c": depends on itself`},
		"unknown parent":    {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.After("d")) }, `step "c": depends on "d", which there is not`},
		"edge twice": {func(d *taskgraph.Definition) {
			d.Step("c", "h", taskgraph.After("a"), taskgraph.AfterIf("a", "$ == 1"))
		}, `step "c": depends on "a" 2 times`},
		"on a template":   {func(d *taskgraph.Definition) { d.Template("c", "h").Step("d", "h", taskgraph.After("c")) }, `step "d": depends on "c", which is added on demand`},
		"of a template":   {func(d *taskgraph.Definition) { d.Template("c", "h", taskgraph.After("a")) }, `step "c": is added on demand, and its dependencies with it`},
		"condition":       {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.AfterIf("a", "$.x = 1")) }, `step "c": condition on "a": condition "$.x = 1": at character 5: expected one of`},
		"condition empty": {func(d *taskgraph.Definition) { d.Step("c", "h", taskgraph.AfterIf("a", "")) }, `step "c": condition on "a" is empty`},
		"condition long": {func(d *taskgraph.Definition) {
			d.Step("c", "h", taskgraph.AfterIf("a", "$ == 1"+strings.Repeat(" ", 4096)))
		}, `step "c": condition on "a" is 4102 bytes long, more than 4096`},
	} {
		d := taskgraph.Define("shop", "t", "1").Step("a", "h").Step("b", "h", taskgraph.After("a"))
		require.NoError(t, d.Validate())
		c.spoil(d)
		problems := problemsOf(t, d)
		require.Len(t, problems, 1, "%s: %q", name, problems)
		require.Contains(t, problems[0], c.problem, name)
		require.Contains(t, d.Validate().Error(), "definition "+fmt.Sprintf("%q", d.Namespace+"/")[:len(d.Namespace)+2], name)
	}
}

func TestValidate_WhatTheServerCanHold_IsValid(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	deep := strings.Repeat("[", 999) + strings.Repeat("]", 999)
	inputs := `{"pair": "\ud83d\ude00", "slash": "\\u0000 \\ud83d", "big": 1e131071, "small": 1e-16383, "deep": ` + deep + `}`
	d := taskgraph.Define("a-b_c9", strings.Repeat("é", 127), "1").Step("a\n\"", "h", taskgraph.Inputs(json.RawMessage(inputs)), taskgraph.Tag(strings.Repeat("x", 200)))
	require.NoError(t, d.Validate())
	_, err := s.Exec(t.Context(), `SELECT $1::jsonb`, marshal(t, d))
	require.NoError(t, err)
	for _, number := range []string{"1e131072", "1e-16384"} {
		_, err := s.Exec(t.Context(), `SELECT $1::jsonb`, number)
		require.ErrorContains(t, err, "overflow", number)
	}
}

// All of the problems of all steps, in one error.
func TestValidate_ManyProblems_OneErrorListsAllSorted(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("", "", "").
		Step("z", "h", taskgraph.After("z", "nobody", "y", "y"), taskgraph.MaxAttempts(-1), taskgraph.Timeout(0)).
		Step("y", "", taskgraph.After("x"), taskgraph.Inputs(func() {})).
		Step("x", "h", taskgraph.AfterIf("y", "?"), taskgraph.RetryEvery(-time.Second)).
		SubTask("w", "t", "").
		Step("w", "h").
		Template("v", "h").
		Step("u", "h", taskgraph.After("v"))
	err := d.Validate()
	require.EqualError(t, err, `invalid argument: definition "/" "": 16 problems:
	namespace "" does not match ^[a-z][a-z0-9_-]{0,39}$
	name is empty
	version is empty
	step "u": depends on "v", which is added on demand
	step "w": defined 2 times
	step "w": sub-task has no version
	step "x": condition on "y": condition "?": at character 1: expected a path, a string, a number, true, false or null, found '?'
	step "x": is in a cycle of dependencies: "x" -> "y" -> "x"
	step "x": retry_every of -1s is negative
	step "y": has neither a handler nor a sub-task
	step "y": inputs are not JSON: json: unsupported type: func()
	step "z": depends on "nobody", which there is not
	step "z": depends on "y" 2 times
	step "z": depends on itself
	step "z": max_attempts of -1 is negative
	step "z": timeout of 0s is not positive`)
	for range 20 {
		require.EqualError(t, d.Validate(), err.Error(), "in the same order")
	}
}

func TestT8_Validate_SelfEdgeAndCycles_AreRefusedWithTheNamesOfTheSteps(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1").
		Step("self", "h", taskgraph.After("self")).
		Step("two b", "h", taskgraph.After("two a")).
		Step("two a", "h", taskgraph.After("two b")).
		Step("behind", "h", taskgraph.After("two a", "5e")).
		Step("before", "h")
	for i, name := range []string{"5c", "5d", "5e", "5a", "5b"} {
		parent := []string{"5b", "5c", "5d", "5e", "5a"}[i]
		d.Step(name, "h", taskgraph.After(parent, "before"))
	}
	require.Equal(t, []string{
		`step "5a": is in a cycle of dependencies: "5a" -> "5b" -> "5c" -> "5d" -> "5e" -> "5a"`,
		`step "self": depends on itself`,
		`step "two a": is in a cycle of dependencies: "two a" -> "two b" -> "two a"`,
	}, problemsOf(t, d))
}

func TestValidate_LongCycle_NamesTenOfItsSteps(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	const n = taskgraph.MaxSteps
	for i := range n {
		d.Step(fmt.Sprintf("%05d", i), "h", taskgraph.After(fmt.Sprintf("%05d", (i+n-1)%n)))
	}
	require.Equal(t, []string{`step "00000": is in a cycle of dependencies: "00000" -> "00001" -> "00002" -> "00003" -> "00004" -> "00005" -> "00006" -> ` +
		`"00007" -> "00008" -> "00009" -> (19990 more) -> "00000"`}, problemsOf(t, d))
}

func TestValidate_TooLarge_IsRefusedWithoutALookAtItsSteps(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	for range 100_000 {
		d.Step("", "", taskgraph.After("?", "?", "?"))
	}
	require.Equal(t, []string{"100000 steps are more than 20000", "300000 dependencies are more than 200000"}, problemsOf(t, d))
}

func TestValidate_LargestThereIs_IsValid(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	name := func(i int) string { return fmt.Sprint("s", i) }
	for i := range taskgraph.MaxSteps {
		d.Step(name(i), "h")
		for p := max(0, i-10); p < i; p++ {
			taskgraph.After(name(p))(&d.Steps[i])
		}
	}
	require.NoError(t, d.Validate())
}

func TestValidate_MoreProblemsThanAnybodyReads_ListsAHundred(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	for i := range taskgraph.MaxSteps {
		d.Step(fmt.Sprintf("%d%s", i, strings.Repeat("x", 256)), "", taskgraph.After(strings.Repeat("y", 256)))
	}
	err := d.Validate()
	var e *taskgraph.DefinitionError
	require.ErrorAs(t, err, &e)
	require.Len(t, e.Problems, 100)
	require.Equal(t, 3*taskgraph.MaxSteps-100, e.More)
	require.True(t, strings.HasSuffix(err.Error(), "\n\tand 59900 more"))
	require.Contains(t, err.Error(), ": 60000 problems:\n")
	require.Less(t, len(err.Error()), 50_000)
}

// Cycles are found if and only if there are any, and are ones.
func TestValidate_AnyGraph_FindsCyclesIfThereAreAny(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "steps")
		reaches := make([][]bool, n)
		d := taskgraph.Define("n", "t", "1")
		for i := range n {
			reaches[i] = make([]bool, n)
			d.Step(fmt.Sprint(i), "h")
			for _, p := range rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 0, 3, rapid.ID[int]).Draw(t, "parents") {
				if p != i {
					reaches[i][p] = true
					taskgraph.After(fmt.Sprint(p))(&d.Steps[i])
				}
			}
		}
		edges := make([][]bool, n)
		for i := range n {
			edges[i] = slices.Clone(reaches[i])
		}
		for k := range n {
			for i := range n {
				for j := range n {
					reaches[i][j] = reaches[i][j] || reaches[i][k] && reaches[k][j]
				}
			}
		}
		cyclic := false
		for i := range n {
			cyclic = cyclic || reaches[i][i]
		}
		err := d.Validate()
		require.Equal(t, cyclic, err != nil, "%v", err)
		var e *taskgraph.DefinitionError
		if !errors.As(err, &e) {
			return
		}
		seen := map[string]bool{}
		for _, problem := range e.Problems {
			_, list, _ := strings.Cut(problem, "is in a cycle of dependencies: ")
			names := strings.Split(strings.ReplaceAll(list, `"`, ""), " -> ")
			if strings.Contains(list, "more") {
				continue
			}
			for at, child := range names[1:] {
				var c, p int
				_, _ = fmt.Sscan(child, &c)
				_, _ = fmt.Sscan(names[at], &p)
				require.True(t, edges[c][p], problem)
				require.False(t, seen[child], "of two cycles: %q", e.Problems)
				seen[child] = true
			}
		}
	})
}
