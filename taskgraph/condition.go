package taskgraph

import (
	"encoding/json"
	"strings"
)

// This file answers: does a condition hold for a result?
//
// PostgreSQL decides it by jsonb_path_match, in lax mode and with errors suppressed, and what is here decides it alike. The
// names in parentheses are those of jsonpath_exec.c.

// Condition is a predicate on the result of a step; see ParseCondition. The zero Condition always holds. It is safe for
// concurrent use.
type Condition struct{ root predicate }

// String returns the condition in the form that is stored: another text of the same condition is the same.
func (c Condition) String() string {
	if c.root == nil {
		return ""
	}
	var b strings.Builder
	c.root.write(&b, looseBinding)
	return b.String()
}

// Holds reports whether the condition holds for a result. One that is neither true nor false of it, since it compares what
// cannot be compared, does not; nor does any of what is not JSON.
func (c Condition) Holds(result json.RawMessage) bool {
	if c.root == nil {
		return true
	}
	v, err := decodeJSON(result)
	return err == nil && c.root.eval(v) == certainlyTrue
}

// truth is three-valued: "and" is the least of two, "or" the greatest, and "not" the negative (JsonPathBool).
type truth int8

const (
	certainlyFalse truth = iota - 1
	unknownTruth
	certainlyTrue
)

func truthOf(b bool) truth {
	if b {
		return certainlyTrue
	}
	return certainlyFalse
}

// A predicate is true of a value, false, or unknown (executeBoolItem).
type predicate interface {
	eval(v any) truth
	write(b *strings.Builder, within binding)
}

type (
	disjunction struct{ left, right predicate }
	conjunction struct{ left, right predicate }
	negation    struct{ of predicate }
	existence   struct{ of valuePath }
	comparison  struct {
		operator    string
		left, right operand
	}
)

func (p disjunction) eval(v any) truth { return max(p.left.eval(v), p.right.eval(v)) }
func (p conjunction) eval(v any) truth { return min(p.left.eval(v), p.right.eval(v)) }
func (p negation) eval(v any) truth    { return -p.of.eval(v) }
func (p existence) eval(v any) truth   { return truthOf(len(p.of.find(v)) > 0) }

// eval compares everything on one side with everything on the other, and one that is true is enough (executePredicate).
func (p comparison) eval(v any) truth {
	result := certainlyFalse
	right := p.right.values(v)
	for _, l := range p.left.values(v) {
		for _, r := range right {
			if result = max(result, compareValues(p.operator, l, r)); result == certainlyTrue {
				return result
			}
		}
	}
	return result
}

// compareValues compares two values (compareItems).
func compareValues(operator string, l, r any) truth {
	if l == nil && r == nil {
		return truthOf(satisfies(operator, 0))
	}
	if l == nil || r == nil {
		return truthOf(operator == "!=")
	}
	switch l := l.(type) {
	case bool:
		if r, ok := r.(bool); ok {
			return truthOf(satisfies(operator, boolOrder(l)-boolOrder(r)))
		}
	case decimal:
		if r, ok := r.(decimal); ok {
			return truthOf(satisfies(operator, l.compare(r)))
		}
	case string:
		if r, ok := r.(string); ok {
			return truthOf(satisfies(operator, strings.Compare(l, r))) // by code point, as bytes of UTF-8 are
		}
	}
	return unknownTruth // of different types, or not scalar
}

func boolOrder(b bool) int {
	if b {
		return 1
	}
	return 0
}

func satisfies(operator string, order int) bool {
	switch operator {
	case "==":
		return order == 0
	case "!=":
		return order != 0
	case "<":
		return order < 0
	case "<=":
		return order <= 0
	case ">":
		return order > 0
	}
	return order >= 0
}

// operand is one side of a comparison.
type operand struct {
	path    valuePath
	literal *literal // instead of a path
}

type literal struct {
	text  string
	value any
}

// values returns what the operand stands for. Arrays stand for their elements (executeItemOptUnwrapResult), and what is not
// there for nothing.
func (o operand) values(v any) []any {
	if o.literal != nil {
		return []any{o.literal.value}
	}
	var values []any
	for _, found := range o.path.find(v) {
		if array, ok := found.([]any); ok {
			values = append(values, array...)
		} else {
			values = append(values, found)
		}
	}
	for i, v := range values {
		if n, ok := v.(json.Number); ok {
			values[i] = parseDecimal(string(n))
		}
	}
	return values
}

// valuePath leads from a value to some within it.
type valuePath []accessor

// accessor is a key of an object or a place in an array.
type accessor struct {
	key     string
	index   int
	indexed bool
}

// find returns what is at the path (executeItemOptUnwrapTarget).
func (p valuePath) find(v any) []any {
	found := []any{v}
	for _, a := range p {
		var next []any
		for _, v := range found {
			if a.indexed {
				next = a.place(next, v)
			} else {
				next = a.member(next, v)
			}
		}
		found = next
	}
	return found
}

// place appends the element of an array. Whatever is not an array is one of itself alone (jpiIndexArray).
func (a accessor) place(to []any, v any) []any {
	if array, ok := v.([]any); ok && a.index < len(array) {
		return append(to, array[a.index])
	} else if !ok && a.index == 0 {
		return append(to, v)
	}
	return to
}

// member appends what is under the key, of an object or of each object that is an element of an array (jpiKey).
func (a accessor) member(to []any, v any) []any {
	elements := []any{v}
	if array, ok := v.([]any); ok {
		elements = array
	}
	for _, e := range elements {
		if object, ok := e.(map[string]any); ok {
			if v, ok := object[a.key]; ok {
				to = append(to, v)
			}
		}
	}
	return to
}

// binding says how tightly the parts of a text hold together.
type binding int

const (
	looseBinding binding = iota // anything may stand here
	andBinding                  // no "||" without parentheses
)

func (p disjunction) write(b *strings.Builder, within binding) {
	if within == andBinding {
		b.WriteByte('(')
		defer b.WriteByte(')')
	}
	p.left.write(b, looseBinding)
	b.WriteString(" || ")
	p.right.write(b, looseBinding)
}

func (p conjunction) write(b *strings.Builder, _ binding) {
	p.left.write(b, andBinding)
	b.WriteString(" && ")
	p.right.write(b, andBinding)
}

func (p negation) write(b *strings.Builder, _ binding) {
	b.WriteString("!(")
	p.of.write(b, looseBinding)
	b.WriteByte(')')
}

func (p existence) write(b *strings.Builder, _ binding) {
	b.WriteString("exists(" + p.of.String() + ")")
}

func (p comparison) write(b *strings.Builder, _ binding) {
	b.WriteString(p.left.String() + " " + p.operator + " " + p.right.String())
}

func (o operand) String() string {
	if o.literal != nil {
		return o.literal.text
	}
	return o.path.String()
}
