package taskgraph_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: does YAML say the same as a program?

const orderYAML = `namespace: shop
name: fulfil_order
version: 1.0.0
description: Gets an order out of the door.
on_failure: drain
lifecycle:
  max_waiting_for_dependencies: 1h30m
steps:
  - name: reserve
    handler: inventory.reserve
    max_attempts: 5
    timeout: 1m
  - name: charge
    description: Takes the money.
    handler: payments.charge
    after:
      - reserve
    retryable: false
  - name: ship
    handler: shipping.ship
    after:
      - step: charge
        if: $.status == "paid"
    retry_every: 7s
    tag: gpu
    limit_key: carrier
    inputs:
      carrier: ACME
      parcels: 1
  - name: refund
    sub_task_name: refund_order
    sub_task_version: 2.0.0
    after:
      - charge
      - ship
  - name: notify
    handler: mail.send
    on_demand: true
`

func TestParseDefinitions_ADefinition_IsTheOneOfTheProgram(t *testing.T) {
	t.Parallel()
	definitions, err := taskgraph.ParseDefinitions([]byte(orderYAML))
	require.NoError(t, err)
	require.Len(t, definitions, 1)
	require.Equal(t, marshal(t, order()), marshal(t, definitions[0]))
	written, err := order().YAML()
	require.NoError(t, err)
	require.Equal(t, orderYAML, string(written))
}

func TestParseDefinitions_SeveralDocuments_AreSeveralDefinitions(t *testing.T) {
	t.Parallel()
	definitions, err := taskgraph.ParseDefinitions([]byte(`---
# nothing yet
---
namespace: n
name: t
version: 1.10
steps: [{name: a, handler: h}]
--- # a comment
namespace: n
name: t
version: "2"
steps: []
...
---
`))
	require.NoError(t, err)
	require.Len(t, definitions, 2)
	require.Equal(t, "1.10", definitions[0].Version)
	require.Equal(t, "2", definitions[1].Version)
	require.Empty(t, definitions[1].Steps)
}

func TestParseDefinitions_Anchors_MayShare(t *testing.T) {
	t.Parallel()
	definitions, err := taskgraph.ParseDefinitions([]byte(`
namespace: n
name: t
version: 1
steps:
  - &usual {name: a, handler: h, timeout: &time 90s, inputs: &in {x: [1]}}
  - {<<: *usual, name: b, after: [&a {step: a, if: $.ok == true}]}
  - {name: c, handler: h, timeout: *time, after: [*a], inputs: {<<: *in, in: *in}}
`))
	require.NoError(t, err)
	s := definitions[0].Steps
	require.Equal(t, "b", s[1].Name)
	require.Equal(t, 90*time.Second, *s[1].Timeout)
	require.Equal(t, 90*time.Second, *s[2].Timeout)
	require.Equal(t, []taskgraph.Dependency{{Step: "a", If: "$.ok == true"}}, s[2].After)
	require.JSONEq(t, `{"x": [1], "in": {"x": [1]}}`, string(s[2].Inputs))
}

func TestParseDefinitions_Inputs_AreTheJSONThatTheyLookLike(t *testing.T) {
	t.Parallel()
	for text, inputs := range map[string]string{
		`1.50`:                        `1.50`,
		`123456789012345678901234567`: `123456789012345678901234567`,
		`1e400`:                       `"1e400"`, // YAML knows no such number
		`!!float 1e400`:               `1e400`,
		`0x10`:                        `16`,
		`1_000`:                       `1000`,
		`+5`:                          `5`,
		`.5`:                          `0.5`,
		`2024-01-31`:                  `"2024-01-31"`,
		`yes`:                         `"yes"`,
		`"1"`:                         `"1"`,
		`true`:                        `true`,
		`[~, null]`:                   `[null, null]`,
		`{1: a, true: b}`:             `{"1": "a", "true": "b"}`,
		`"\u263a"`:                    `"☺"`,
		`{}`:                          `{}`,
		`{a: {b: [{c: d}]}}`:          `{"a": {"b": [{"c": "d"}]}}`,
	} {
		definitions, err := taskgraph.ParseDefinitions(fmt.Appendf(nil, "{namespace: n, name: t, version: 1, steps: [{name: a, handler: h, inputs: %s}]}", text))
		require.NoError(t, err, text)
		require.Equal(t, inputs, strings.NewReplacer(",", ", ", ":", ": ").Replace(string(definitions[0].Steps[0].Inputs)), text)
	}
}

func TestParseDefinitions_NotOne_FailsWithTheLine(t *testing.T) {
	t.Parallel()
	const head = "namespace: n\nname: t\nversion: 1\nsteps:\n"
	for name, c := range map[string]struct {
		text     string
		problems []string
	}{
		"empty":             {"", []string{"YAML holds no definition"}},
		"a comment":         {"# nothing\n", []string{"YAML holds no definition"}},
		"no YAML":           {"a: [", []string{"YAML: line 1: did not find expected node content"}},
		"a tab":             {"a:\n\tb: 1", []string{"YAML: line 2: found character that cannot start any token"}},
		"no UTF-8":          {"a: \xff", []string{"YAML: "}},
		"a list":            {"- a", []string{"line 1: cannot unmarshal !!seq into a mapping"}},
		"unknown field":     {head + "  - {name: a, handler: h}\nstep: []\nonfailure: x", []string{"line 6: field step is unknown", "line 7: field onfailure is unknown"}},
		"in a step":         {head + "  - name: a\n    handlr: h", []string{"line 6: field handlr is unknown"}},
		"in a dependency":   {head + "  - name: a\n    handler: h\n    after:\n      - step: b\n        when: x", []string{`line 9: field "when" is unknown`}},
		"in the lifecycle":  {head + "  []\nlifecycle:\n  max: 1s", []string{"line 7: field max is unknown"}},
		"twice":             {head + "  - name: a\n    name: b", []string{`line 6: mapping key "name" already defined at line 5`}},
		"twice in inputs":   {head + "  - name: a\n    inputs: {x: 1,\n      x: 2}", []string{`line 7: mapping key "x" already defined at line 6`}},
		"empty condition":   {head + "  - name: a\n    after: [{step: b, if: ''}]", []string{"line 6: if is empty"}},
		"durations":         {head + "  - name: a\n    timeout: 5\n    retry_every: fast", []string{`line 6: "5" is not a duration, such as 90s`, `line 7: "fast" is not a duration`}},
		"a duration list":   {head + "  - name: a\n    timeout: [1s]", []string{`line 6: "" is not a duration`}},
		"attempts":          {head + "  - name: a\n    max_attempts: many", []string{"line 6: cannot unmarshal !!str `many` into int"}},
		"half an attempt":   {head + "  - name: a\n    max_attempts: 3.5", []string{`line 6: "3.5" is not a whole number`}},
		"an empty step":     {head + "  - name: a\n    handler: h\n  -\n", []string{"line 7: an element of the list is empty"}},
		"waits for nothing": {head + "  - name: a\n    handler: h\n    after:\n      - b\n      -\n  - {name: b, handler: h}", []string{"line 9: an element of the list is empty"}},
		"a null, aliased":   {"namespace: &none ~\nname: t\nversion: 1\nsteps: [*none]", []string{"an element of the list is empty"}},
		"after":             {head + "  - name: a\n    after: b", []string{"line 6: cannot unmarshal !!str `b` into a list"}},
		"steps":             {"namespace: n\nsteps: {a: b}", []string{"line 2: cannot unmarshal !!map into a list"}},
		"failure":           {"on_failure: [x]", []string{"line 1: cannot unmarshal !!seq into a text"}},
		"not a number":      {head + "  - name: a\n    inputs: [.nan]", []string{`line 6: ".nan" is not a number of JSON`}},
		"infinite":          {head + "  - name: a\n    inputs: {x: -.inf}", []string{`line 6: "-.inf" is not a number of JSON`}},
		"binary":            {head + "  - name: a\n    inputs: !!binary aGk=", []string{`line 6: "aGk=" of type !!binary has no like in JSON`}},
		"of another type":   {head + "  - name: a\n    inputs: !money 5", []string{`line 6: "5" of type !money has no like in JSON`}},
		"key is a list":     {head + "  - name: a\n    inputs: {[1]: 2}", []string{"line 6: "}},
		"alias to nothing":  {"a: *b", []string{"unknown anchor 'b' referenced"}},
		"contains itself":   {head + "  - name: a\n    inputs: &b\n      x: *b", []string{`"b" contains itself`}},
		"validation":        {head + "  - {name: a, after: [b], handler: h}", []string{`definition "n/t" "1": step "a": depends on "b", which there is not`}},
		"several documents": {head + "  - {name: a}\n---\nx: 1\n---\nnamespace: N", []string{`step "a": has neither`, "line 7: field x is unknown", `namespace "N" does not match`}},
		"the same twice":    {head + "  []\n---\n" + head + "  []", []string{`definition "n/t" "1" is there more than once`}},
	} {
		definitions, err := taskgraph.ParseDefinitions([]byte(c.text))
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
		require.Nil(t, definitions, name)
		for _, problem := range c.problems {
			require.ErrorContains(t, err, problem, name)
		}
		require.NotContains(t, err.Error(), "taskgraph.", name)
	}
}

func TestParseDefinitions_MuchInLittle_IsRefused(t *testing.T) {
	t.Parallel()
	laughs := "a0: &a0 [" + strings.Repeat("ha,", 50) + "]\n"
	for i := 1; i < 12; i++ {
		laughs += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.Repeat(fmt.Sprintf("*a%d,", i-1), 50))
	}
	long := "a: &a " + strings.Repeat("x", taskgraph.MaxYAML/2) + "\nb: [" + strings.Repeat("*a,", 100_000) + "]"
	for _, text := range []string{laughs, long} {
		_, err := taskgraph.ParseDefinitions([]byte(text))
		require.ErrorIs(t, err, pgwake.ErrInvalid)
		require.ErrorContains(t, err, "with what its aliases stand for, this is more than 16777216 bytes")
	}
	_, err := taskgraph.ParseDefinitions(bytes.Repeat([]byte("\n"), taskgraph.MaxYAML+1))
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, "YAML of 4194305 bytes is more than 4194304")
	_, err = taskgraph.ParseDefinitions([]byte(strings.Repeat("[", taskgraph.MaxYAML)))
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	_, err = taskgraph.ParseDefinitions([]byte("steps: [" + strings.Repeat("{x: 1},", 10_000)))
	require.Less(t, len(err.Error()), 10_000)
}

func TestParseDefinitions_ManyUnknownFields_ListsAHundred(t *testing.T) {
	t.Parallel()
	_, err := taskgraph.ParseDefinitions([]byte("steps: [" + strings.Repeat("{x: 1},", 10_000) + "]"))
	require.ErrorContains(t, err, "and 9900 more")
	require.Less(t, len(err.Error()), 10_000)
}

func TestYAML_InputsNotJSON_Fails(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1").Step("a", "h")
	d.Steps[0].Inputs = json.RawMessage("{")
	_, err := d.YAML()
	require.ErrorContains(t, err, `step "a": `)
	_, err = json.Marshal(d)
	require.ErrorContains(t, err, `step "a": `)
}

// drawText draws what YAML has a mind of its own about.
func drawText(least int) *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"a", "yes", "no", "null", "~", "true", "1", "1.0", "1e3", "0x1", "1_0", ".5", ".nan", "<<", "=", "-", "? a", ": b", "# c",
			"!t", "&a", "*a", "'", `"`, "%a", "@a", "`a", "{", "[", "a: b", "a #b", " a", "a ", "a\nb", "a\n", "\na", " a\n b\n", "\t", "a\tb", "\u007f", "\u0085", "\u2028",
			"\ufeffa", "é", "😀", "\u202e", "2024-01-31", "12:30", "|", ">", "---", "...", "a\r\nb", "\x01", "0o7", "+1", "\n", "  ", "\u00a0"}),
		rapid.Map(rapid.StringN(least, 10, 40), func(s string) string { return strings.ReplaceAll(s, "\x00", "x") }),
	)
}

func TestYAML_AnyDefinition_ReadsAsItWasWritten(t *testing.T) {
	t.Parallel()
	for range 3 {
		rapid.Check(t, func(t *rapid.T) {
			d := taskgraph.Define("n", drawText(1).Draw(t, "name"), drawText(1).Draw(t, "version"))
			d.Description = drawText(0).Draw(t, "description")
			d.OnFailure = rapid.SampledFrom([]taskgraph.FailurePolicy{"", taskgraph.FailFast, taskgraph.Drain}).Draw(t, "policy")
			milliseconds := rapid.Map(rapid.Int64Range(1, math.MaxInt64/int64(time.Millisecond)), func(n int64) time.Duration { return time.Duration(n) * time.Millisecond })
			d.Lifecycle.MaxLifetime = milliseconds.Draw(t, "lifetime")
			for i, name := range rapid.SliceOfNDistinct(drawText(1), 0, 4, rapid.ID[string]).Draw(t, "steps") {
				var options []taskgraph.StepOption
				sub := rapid.Bool().Draw(t, "sub")
				add := func(what string, o taskgraph.StepOption) {
					if rapid.Bool().Draw(t, what) {
						options = append(options, o)
					}
				}
				if i > 0 {
					add("after", taskgraph.After(d.Steps[i-1].Name))
				}
				if i > 1 {
					add("if", taskgraph.AfterIf(d.Steps[i-2].Name, conditionDrawer{t}.predicate(1)))
				}
				add("attempts", taskgraph.MaxAttempts(rapid.IntRange(0, math.MaxInt32).Draw(t, "most")))
				add("once", taskgraph.NotRetryable())
				add("every", taskgraph.RetryEvery(time.Duration(rapid.IntRange(0, math.MaxInt32).Draw(t, "pause"))*time.Second))
				if !sub {
					add("timeout", taskgraph.Timeout(milliseconds.Draw(t, "patience")))
					add("tag", taskgraph.Tag(drawText(0).Draw(t, "hardware")))
					add("key", taskgraph.LimitKey(drawText(0).Draw(t, "limit")))
				}
				add("inputs", taskgraph.Inputs(drawInputs(2).Draw(t, "value")))
				if sub {
					d.SubTask(name, drawText(1).Draw(t, "task"), drawText(1).Draw(t, "task version"), options...)
				} else {
					d.Step(name, drawText(1).Draw(t, "handler"), options...)
				}
			}
			require.NoError(t, d.Validate())
			written, err := d.YAML()
			require.NoError(t, err)
			read, err := taskgraph.ParseDefinitions(written)
			require.NoError(t, err, "%s", written)
			require.Equal(t, marshal(t, d), marshal(t, read[0]), "%s", written)
		})
	}
}

func drawInputs(depth int) *rapid.Generator[any] {
	scalars := []*rapid.Generator[any]{
		rapid.SampledFrom([]any{nil, true, false, json.Number("1e400"), json.Number("-0"), json.Number("1.50"), json.Number("12345678901234567890123")}),
		rapid.Map(drawText(0), func(s string) any { return s }),
		rapid.Map(rapid.Float64Range(-1e300, 1e300), func(f float64) any { return f }),
	}
	if depth == 0 {
		return rapid.OneOf(scalars...)
	}
	inner := rapid.Deferred(func() *rapid.Generator[any] { return drawInputs(depth - 1) })
	return rapid.OneOf(append(scalars,
		rapid.Map(rapid.SliceOfN(inner, 0, 3), func(v []any) any { return v }),
		rapid.Map(rapid.MapOfN(drawText(0), inner, 0, 3), func(v map[string]any) any { return v }),
	)...)
}

func FuzzParseDefinitions_AnyText_IsRefusedOrReadsAsItIsWritten(f *testing.F) {
	f.Add([]byte(orderYAML))
	f.Add([]byte("{namespace: n, name: t, version: 1, steps: [{name: a, handler: h, inputs: {<<: {a: 0x1}, b: !!float 1e400}}]}\n---\n{}"))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("? [1]: 2\n: - |2-\n   x\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		definitions, err := taskgraph.ParseDefinitions(text)
		if err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			return
		}
		for _, d := range definitions {
			written, err := d.YAML()
			require.NoError(t, err)
			read, err := taskgraph.ParseDefinitions(written)
			require.NoError(t, err, "%s", written)
			require.Equal(t, marshal(t, d), marshal(t, read[0]))
		}
	})
}

func TestParseDefinitions_TheExampleOfItsComment_IsValid(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("yaml.go")
	require.NoError(t, err)
	_, comment, found := strings.Cut(string(source), "// ParseDefinitions reads")
	require.True(t, found)
	var example strings.Builder
	for line := range strings.Lines(comment) {
		if text, ok := strings.CutPrefix(line, "//\t"); ok {
			example.WriteString(text)
		}
	}
	definitions, err := taskgraph.ParseDefinitions([]byte(example.String()))
	require.NoError(t, err)
	require.Len(t, definitions[0].Steps, 5)
}
