package eventbus

import "strings"

// This file answers: which types is a pattern for, and which patterns does another one cover?

const (
	one       = "*" // a segment, whatever it is
	anyNumber = "#" // any number of segments, also none
)

// Match reports whether a pattern is for events of a type. Its segments are those of the type, but that '*' is for one segment of any
// kind, and '#' for any number of them, also none, wherever it is: "order.#" is for "order" and "order.item.added", and "#" for all.
func Match(pattern, eventType string) bool {
	return included(strings.Split(pattern, "."), strings.Split(eventType, "."))
}

// Covers reports whether a pattern is for every type that another one is for. It is careful: of two patterns that are for the same types
// and are written in different ways ("*.#" and "#.*") it may say no.
func Covers(pattern, other string) bool {
	return pattern == other || included(strings.Split(pattern, "."), strings.Split(other, "."))
}

// included reports whether everything that the segments of b stand for is something that those of a stand for. Invariant: it says yes
// only if that is so, since each step is one of these: a '#' of a takes nothing, or the next of b, whatever that stands for; a '*' takes
// one that is not '#'; a name takes the same name.
func included(a, b []string) bool {
	// ok[j] is whether a from i on includes b from j on; from the end to the beginning, since a pattern may have many '#'.
	ok := make([]bool, len(b)+1)
	ok[len(b)] = true
	for i := len(a) - 1; i >= 0; i-- {
		next := make([]bool, len(b)+1)
		for j := len(b); j >= 0; j-- {
			switch {
			case a[i] == anyNumber:
				next[j] = ok[j] || j < len(b) && next[j+1]
			case j < len(b) && b[j] != anyNumber:
				next[j] = (a[i] == one || a[i] == b[j]) && ok[j+1]
			}
		}
		ok = next
	}
	return ok[0]
}
