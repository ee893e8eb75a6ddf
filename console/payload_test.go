package console

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: is everything shown, whatever it is, and bounded?

func TestRender_WhateverItIs_IsTextThatHidesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.OneOf(rapid.SliceOfN(rapid.Byte(), 0, 400), rapid.Map(rapid.StringN(0, 200, -1), func(s string) []byte { return []byte(s) }), rapid.Map(rapid.StringN(0, 200, -1), func(s string) []byte {
			quoted, _ := json.Marshal(map[string]any{s: []string{s, s}})
			return quoted
		})).Draw(t, "data")
		most := rapid.IntRange(1, 300).Draw(t, "most")
		text, cut, isHex := render(data, most)
		for _, r := range text {
			require.True(t, r == '\n' || r == '\t' || unicode.IsPrint(r), "%q", r)
		}
		if !cut && !isHex && json.Valid(data) && strings.IndexFunc(string(data), func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
			require.JSONEq(t, string(data), text)
		}
	})
}

func TestRender_LargeOrDeepJSON_IsBounded(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]string{
		"deep":  strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
		"wide":  "[" + strings.Repeat("1,", 1<<20) + "1]",
		"both":  strings.Repeat("[", 60) + strings.Repeat("1,", 1<<20) + "1" + strings.Repeat("]", 60),
		"large": `"` + strings.Repeat("x", 1<<20) + `"`,
	} {
		text, cut, _ := render([]byte(data), firstPart)
		require.Less(t, len(text), 2*firstPart, name)
		require.Equal(t, name != "deep", cut, name)
	}
	text, cut, isHex := render([]byte("\xff\xfe\x00"), 100)
	require.Contains(t, text, "ff fe 00")
	require.False(t, cut)
	require.True(t, isHex)
	text, _, _ = render([]byte(`{"a":[1,{}],"b":"x,{[\""}`), 1000)
	require.Equal(t, "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": \"x,{[\\\"\"\n}", text)
}

// Every step has a place of its own, to the right of all that it waits for, whatever the graph is: also one that goes in circles.
func TestDrawn_AnyGraph_LeadsFromLeftToRight(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "steps")
		steps := make([]step, n)
		circular := rapid.Bool().Draw(t, "circular")
		for i := range steps {
			steps[i].StepInfo = taskgraph.StepInfo{Name: string(rune('A' + i))}
			for _, p := range rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 0, 3, rapid.ID).Draw(t, "parents") {
				if p < i || circular {
					steps[i].Parents = append(steps[i].Parents, string(rune('A'+p)))
					steps[i].Conditions = append(steps[i].Conditions, "")
				}
			}
		}
		g := drawn(steps)
		places := make(map[[2]int]bool)
		at := make(map[string]int)
		for _, b := range g.Boxes {
			at[b.Name] = b.X
		}
		for _, b := range g.Boxes {
			require.False(t, places[[2]int{b.X, b.Y}], "two in one place")
			places[[2]int{b.X, b.Y}] = true
			require.True(t, b.X >= 0 && b.Y >= 0 && b.X+boxWidth <= g.Width && b.Y+boxHeight <= g.Height)
			for _, parent := range steps[b.Name[0]-'A'].Parents {
				if !circular {
					require.Less(t, at[parent], b.X)
				}
			}
		}
	})
	require.Nil(t, drawn(make([]step, maxDrawn+1)))
}

// Few steps can have more dependencies than can be drawn, each of which would pass by all that is between its ends.
func TestDrawn_EachStepWaitsForAllBefore_IsNotDrawn(t *testing.T) {
	t.Parallel()
	steps := make([]step, maxDrawn)
	var before []string
	for i := range steps {
		steps[i].StepInfo = taskgraph.StepInfo{Name: fmt.Sprint(i), Parents: before}
		before = append(before[:i:i], fmt.Sprint(i))
	}
	require.Nil(t, drawn(steps))
	require.NotNil(t, drawn(steps[:20]))
	for i := range steps { // a chain
		steps[i].Parents = steps[i].Parents[max(0, i-1):]
	}
	require.Len(t, drawn(steps).Edges, maxDrawn-1)
}
