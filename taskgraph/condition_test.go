package taskgraph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: do conditions mean in Go what they mean in PostgreSQL?

func condition(t require.TestingT, text string) taskgraph.Condition {
	c, err := taskgraph.ParseCondition(text)
	require.NoError(t, err, text)
	return c
}

// server answers as the functions in SQL do.
type server struct{ *pgx.Conn }

func newServer(t *testing.T) server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, testdb.URL(t))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return server{conn}
}

func (s server) holds(t require.TestingT, result, condition string) (holds bool) {
	const query = `SELECT coalesce(jsonb_path_match($1::text::jsonb, $2::text::jsonpath, '{}', true), false)`
	require.NoError(t, s.QueryRow(context.Background(), query, result, condition).Scan(&holds), "%s of %s", condition, result)
	return holds
}

var conditionCases = []struct {
	condition, result string
	holds             bool
}{
	{`$.status == "paid"`, `{"status": "paid"}`, true},
	{`$.status == "paid"`, `{"status": "open"}`, false},
	{`$.status == "paid"`, `null`, false},
	{`$ == 1`, `1`, true},
	{`1 == $`, `1`, true},
	{`1 < $`, `2`, true},
	{`$."a b".c[1] == 2`, `{"a b": {"c": [1, 2]}}`, true},
	{`$.a == 1 && $.a == 2 || $.a == 3`, `{"a": 3}`, true},
	{`$.a == 1 && ($.a == 2 || $.a == 3)`, `{"a": 3}`, false},

	// What is not there.
	{`$.a == null`, `{}`, false},
	{`$.a != null`, `{}`, false},
	{`$.a != 1`, `{}`, false},
	{`!($.a == 1)`, `{}`, true},
	{`exists($.a)`, `{}`, false},
	{`exists($.a)`, `{"a": null}`, true},
	{`exists($.a[0])`, `{"a": []}`, false},
	{`exists($.a)`, `{"a": []}`, true},
	{`exists($)`, `null`, true},
	{`!exists($.a)`, `{}`, true},

	// null, and what is of different types.
	{`$.a == null`, `{"a": null}`, true},
	{`$.a <= null`, `{"a": null}`, true},
	{`$.a < null`, `{"a": null}`, false},
	{`$.a != null`, `{"a": 1}`, true},
	{`$.a < null`, `{"a": 1}`, false},
	{`$.a != null`, `{"a": {}}`, true},
	{`$.a != "1"`, `{"a": 1}`, false},
	{`!($.a == "1")`, `{"a": 1}`, false},
	{`$.a == "1" || $.a == 1`, `{"a": 1}`, true},
	{`!($.a == "1" && $.a == 2)`, `{"a": 1}`, true},
	{`$.a == $.b`, `{"a": {}, "b": {}}`, false},
	{`!($.a == $.b)`, `{"a": {}, "b": {}}`, false},
	{`$.a < true`, `{"a": false}`, true},

	// Arrays.
	{`$.a == 2`, `{"a": [1, 2]}`, true},
	{`$.a != 2`, `{"a": [1, 2]}`, true},
	{`!($.a != 2)`, `{"a": [2, 2]}`, true},
	{`$.a == 2`, `{"a": [[2]]}`, false},
	{`$.a.b == 2`, `{"a": [{"b": 1}, 7, {"b": 2}]}`, true},
	{`$.a.b == 2`, `{"a": [[{"b": 2}]]}`, false},
	{`$.a[0] == 2`, `{"a": 2}`, true},
	{`$.a[1] == 2`, `{"a": 2}`, false},
	{`$.a == $.b`, `{"a": [1, 2], "b": [2, 3]}`, true},
	{`$ == 2`, `[1, 2]`, true},
	{`!($[2147483647] == 1)`, `[1]`, true},
	{`$.a == "x"`, `{"a": [1, "x"]}`, true},
	{`!($.a == "y")`, `{"a": [1, "x"]}`, false},

	// Numbers are exact.
	{`$ == 100`, `1e2`, true},
	{`$ == 0`, `-0`, true},
	{`$ == -0.0`, `0`, true},
	{`$ == 0e5`, `0.00`, true},
	{`$ == 9007199254740993`, `9007199254740992`, false},
	{`$ > 9007199254740992`, `9007199254740993`, true},
	{`$ == 0.1`, `0.10000000000000000000000000000000001`, false},
	{`$ < 1e400`, `1e399`, true},
	{`$ > -1e400`, `-1e399`, true},
	{`$ > 1e-400`, `1.5e-400`, true},
	{`$ >= -5`, `-4.9`, true},
	{`$ < 10`, `9`, true},

	// Strings, by code point.
	{`$ < "b"`, `"a"`, true},
	{`$ < "a"`, `"B"`, true},
	{`$ < "ab"`, `"a"`, true},
	{`$ < "\ud83d\ude00"`, `"\uffee"`, true},
	{`$ == "é"`, `"\u00e9"`, true},
	{`$ == "\"\\\/\b\f\n\r\t"`, `"\"\\/\b\f\n\r\t"`, true},
}

func TestCondition_OfAResult_HoldsAsTheLanguageSays(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	for _, c := range conditionCases {
		require.Equal(t, c.holds, s.holds(t, c.result, c.condition), "PostgreSQL: %s of %s", c.condition, c.result)
		require.Equal(t, c.holds, condition(t, c.condition).Holds(json.RawMessage(c.result)), "%s of %s", c.condition, c.result)
	}
}

func TestCondition_NoResult_DoesNotHold(t *testing.T) {
	t.Parallel()
	for _, result := range []string{"", " ", "{", "1 2", "nul"} {
		require.False(t, condition(t, "exists($)").Holds(json.RawMessage(result)), "%q", result)
	}
	require.False(t, condition(t, "exists($)").Holds(nil))
}

func TestCondition_Zero_AlwaysHolds(t *testing.T) {
	t.Parallel()
	require.True(t, taskgraph.Condition{}.Holds(nil))
	require.Empty(t, taskgraph.Condition{}.String())
}

// A number of a result may be one that no numeric can hold.
func TestCondition_NumberBeyondAll_ComparesWithoutWritingItOut(t *testing.T) {
	t.Parallel()
	require.True(t, condition(t, "$ > 1").Holds(json.RawMessage("1e999999999999999999999")))
	require.True(t, condition(t, "$ < 1 && $ > 0").Holds(json.RawMessage("1e-999999999999999999999")))
	require.True(t, condition(t, "$ == 0").Holds(json.RawMessage("0e999999999999999999999")))
}

var conditionKeys = []string{"a", "b", "c d", "", "exists", "null", "is", "to", "last", "size", "é", `"\/`, "A_1", "$", "true", "strict", "type"}

func drawValue(depth int) *rapid.Generator[any] {
	scalars := []*rapid.Generator[any]{
		rapid.SampledFrom([]any{nil, true, false, "", "a", "b", "B", "é", "\uffee", "😀", `"\`, "a\n"}),
		rapid.Map(rapid.SampledFrom(conditionNumbers), func(n string) any { return json.Number(n) }),
	}
	if depth == 0 {
		return rapid.OneOf(scalars...)
	}
	inner := rapid.Deferred(func() *rapid.Generator[any] { return drawValue(depth - 1) })
	return rapid.OneOf(append(scalars,
		rapid.Map(rapid.SliceOfN(inner, 0, 3), func(v []any) any { return v }),
		rapid.Map(rapid.MapOfN(rapid.SampledFrom(conditionKeys[:5]), inner, 0, 4), func(v map[string]any) any { return v }),
	)...)
}

var conditionNumbers = []string{
	"0", "-0", "0.0", "1", "-1", "1.0", "10e-1", "0.1e1", "100", "1e2", "1E+2", "12", "1.2e1", "99.99", "-99.990", "1e400", "-1e400", "1e-300",
	"9007199254740993", "9007199254740992", "123456789012345678901234567890.5",
}

type conditionDrawer struct{ *rapid.T }

func (d conditionDrawer) blank() string {
	return rapid.SampledFrom([]string{"", "", " ", " ", "  ", "\n\t"}).Draw(d.T, "blank")
}

func (d conditionDrawer) quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		if r == '"' || r == '\\' || r < ' ' || rapid.IntRange(0, 4).Draw(d.T, "escape") == 0 {
			for _, unit := range utf16.Encode([]rune{r}) {
				fmt.Fprintf(&b, `\u%04x`, unit)
			}
		} else {
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func (d conditionDrawer) path() string {
	path := "$" + d.blank()
	for range rapid.IntRange(0, 3).Draw(d.T, "accessors") {
		if rapid.IntRange(0, 3).Draw(d.T, "index") == 0 {
			path += "[" + d.blank() + rapid.SampledFrom([]string{"0", "0", "1", "2", "2147483647"}).Draw(d.T, "place") + d.blank() + "]"
		} else {
			key := rapid.SampledFrom(conditionKeys).Draw(d.T, "key")
			path += "." + d.blank()
			if strings.Trim(key, "abcdefghijklmnopqrstuvwxyzA_1") == "" && key != "" && rapid.Bool().Draw(d.T, "bare") {
				path += key
			} else {
				path += d.quote(key)
			}
		}
		path += d.blank()
	}
	return path
}

func (d conditionDrawer) literal() string {
	v := drawValue(0).Draw(d.T, "literal")
	switch v := v.(type) {
	case string:
		return d.quote(v)
	case json.Number:
		return string(v)
	}
	return fmt.Sprint(map[any]string{nil: "null", true: "true", false: "false"}[v])
}

func (d conditionDrawer) predicate(depth int) string {
	kind := rapid.IntRange(0, 9).Draw(d.T, "kind")
	switch {
	case depth == 0 || kind < 4:
		left, right := d.path(), d.literal()
		switch rapid.IntRange(0, 3).Draw(d.T, "sides") {
		case 0:
			left, right = right, left
		case 1:
			right = d.path()
		}
		operator := rapid.SampledFrom([]string{"==", "!=", "<", "<=", ">", ">="}).Draw(d.T, "operator")
		return left + d.blank() + operator + d.blank() + right
	case kind == 4:
		return "exists" + d.blank() + "(" + d.blank() + d.path() + ")"
	case kind == 5:
		return "!" + d.blank() + "(" + d.blank() + d.predicate(depth-1) + d.blank() + ")"
	case kind == 6:
		return "(" + d.predicate(depth-1) + ")"
	case kind == 7:
		return "! exists(" + d.path() + ")"
	case kind == 8:
		return d.predicate(depth-1) + d.blank() + "&&" + d.blank() + d.predicate(depth-1)
	}
	return d.predicate(depth-1) + d.blank() + "||" + d.blank() + d.predicate(depth-1)
}

// The same condition is compared as it was written, in the form that is stored, and in the one that the server makes of that.
func TestCondition_AnyOfAnyResult_HoldsAsInPostgreSQL(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	agreed := map[bool]int{}
	times := testsize.Of(10, 25)
	for range times { // rapid checks 100 cases at a time, unless it is told otherwise
		rapid.Check(t, func(t *rapid.T) {
			text := conditionDrawer{t}.predicate(3)
			encoded, err := json.Marshal(drawValue(3).Draw(t, "result"))
			require.NoError(t, err)
			result := string(encoded)
			c := condition(t, text)
			stored := c.String()
			require.Equal(t, stored, condition(t, stored).String())
			var printed string
			require.NoError(t, s.QueryRow(context.Background(), `SELECT ($1::text::jsonpath)::text`, stored).Scan(&printed))

			holds := s.holds(t, result, text)
			agreed[holds]++
			require.Equal(t, holds, s.holds(t, result, stored), "%s stored as %s, of %s", text, stored, result)
			require.Equal(t, holds, c.Holds(encoded), "%s of %s", text, result)
			require.Equal(t, holds, condition(t, printed).Holds(encoded), "%s printed as %s, of %s", text, printed, result)
		})
	}
	require.Greater(t, agreed[true], 4*times, "of so many the answers were to be of interest")
	require.Greater(t, agreed[false], 4*times)
}

func TestParseCondition_NotOne_FailsWithThePlace(t *testing.T) {
	t.Parallel()
	for text, problem := range map[string]string{
		``:                             `is empty`,
		"  \n":                         `is empty`,
		`$`:                            `at character 2: expected one of == != < <= > >=, found the end`,
		`$.approved`:                   `at character 11: expected one of`,
		`$.a = 1`:                      `at character 5: expected one of == != < <= > >=, found '='`,
		`$.a == `:                      `at character 8: expected a path, a string, a number, true, false or null, found the end`,
		`$.a == 'x'`:                   `at character 8: expected a path`,
		`$.a == paid`:                  `at character 8: expected a path`,
		`$.a == "x" and $.b == 1`:      `at character 12: expected &&, || or the end, found 'a'`,
		`"é" == $.é`:                   `at character 10: expected a key`,
		`$.a == 01`:                    `at character 9: expected &&`,
		`$.a == 1.`:                    `at character 9: expected &&`,
		`$.a == .5`:                    `at character 8: expected a path`,
		`$.a == +5`:                    `at character 8: expected a path`,
		`$.a == 1e131072`:              `at character 8: expected a number that PostgreSQL can hold`,
		`$.a == 1e-16384`:              `at character 8: expected a number that PostgreSQL can hold`,
		`$.a == 1x`:                    `at character 9: expected &&`,
		`$.a == truee`:                 `at character 8: expected a path`,
		`$.a == "x`:                    `at character 8: expected a string as in JSON`,
		`$.a == "\u0000"`:              `at character 8: expected a string as in JSON`,
		`$.a == "\ud800"`:              `at character 8: expected a string as in JSON`,
		`$.a == "\x41"`:                `at character 8: expected a string as in JSON`,
		"$.a == \"\n\"":                `at character 8: expected a string as in JSON`,
		`$."\u0000" == 1`:              `at character 3: expected a string as in JSON`,
		`$.a[-1] == 1`:                 `at character 5: expected a number from 0 to 2147483647, found '-'`,
		`$.a[2147483648] == 1`:         `at character 5: expected a number from 0`,
		`$.a[*] == 1`:                  `at character 5: expected a number from 0`,
		`$.a[last] == 1`:               `at character 5: expected a number from 0`,
		`$.a[0 == 1`:                   `at character 7: expected ], found '='`,
		`$.* == 1`:                     `at character 3: expected a key`,
		`$..a == 1`:                    `at character 3: expected a key`,
		`$.a-b == 1`:                   `at character 4: expected one of`,
		`$a == 1`:                      `at character 2: expected one of`,
		`$.a.size() == 1`:              `at character 9: expected one of`,
		`$.a ? (@ == 1)`:               `at character 5: expected one of`,
		`1 == 1`:                       `at character 6: expected a path to compare with, found '1'`,
		`!$.a == 1`:                    `at character 2: expected ( or exists after !`,
		`!!($.a == 1)`:                 `at character 2: expected ( or exists after !`,
		`($.a == 1`:                    `at character 10: expected ), found the end`,
		`$.a == 1)`:                    `at character 9: expected &&, || or the end, found ')'`,
		`($.a) == 1`:                   `at character 5: expected one of`,
		`exists $.a`:                   `at character 8: expected ( after exists`,
		`exists(1)`:                    `at character 8: expected $`,
		`$.a == 1 &&`:                  `at character 12: expected a path`,
		`$.a == 1 == 2`:                `at character 10: expected &&`,
		`strict $.a == 1`:              `at character 1: expected a path`,
		`$.a == 1 /* one */`:           `at character 10: expected &&`,
		"$.a == \x00":                  `contains NUL or invalid UTF-8`,
		"$.a == \"\xff\"":              `contains NUL or invalid UTF-8`,
		strings.Repeat("(", 1<<20):     `1048576 bytes are more than 65536`,
		strings.Repeat("!(", 1<<12):    `at character 8193: expected a path`,
		strings.Repeat("$.a==1||", 99): `at character 793: expected a path`,
	} {
		_, err := taskgraph.ParseCondition(text)
		require.ErrorIs(t, err, pgwake.ErrInvalid, text)
		require.ErrorContains(t, err, problem, text)
		require.Less(t, len(err.Error()), 700)
	}
}

// The deepest that a definition may have.
func TestCondition_NestedDeep_IsWhatThePostgreSQLTakes(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	for _, text := range []string{
		strings.Repeat("!(", 1360) + "$ == 1" + strings.Repeat(")", 1360),
		strings.Repeat("(", 2045) + "$ == 1" + strings.Repeat(")", 2045),
		strings.Repeat("$ == 2||", 511) + "$ == 1",
		"$" + strings.Repeat("[0]", 1360) + " == 1",
	} {
		require.LessOrEqual(t, len(text), taskgraph.MaxConditionLength)
		require.True(t, s.holds(t, "1", text))
		require.True(t, condition(t, text).Holds(json.RawMessage("1")))
		require.True(t, s.holds(t, "1", condition(t, text).String()))
	}
}

func FuzzParseCondition_AnyText_IsRefusedOrMeansTheSameInItsStoredForm(f *testing.F) {
	for _, c := range conditionCases {
		f.Add(c.condition, c.result)
	}
	f.Add(`!(!($.a==1)&&($.b==2||exists($)))`, `{"a": [1, {"b": 2}]}`)
	f.Add(strings.Repeat("(", 1000), "1")
	f.Add("$.\"\\ud83d\\ude00\" >= -1.5E+10", "{}")
	f.Fuzz(func(t *testing.T, text, result string) {
		c, err := taskgraph.ParseCondition(text)
		if err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			return
		}
		if len(text) > taskgraph.MaxConditionLength {
			return
		}
		stored := condition(t, c.String())
		require.Equal(t, c.String(), stored.String())
		require.Equal(t, c.Holds(json.RawMessage(result)), stored.Holds(json.RawMessage(result)))
	})
}
