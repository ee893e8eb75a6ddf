package eventbus_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestMatch_SegmentsAndWildcards(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern   string
		for_, not []string
	}{
		{"order.created", []string{"order.created"}, []string{"order", "order.created.x", "Order.created", "orderXcreated"}},
		{"order.*", []string{"order.created"}, []string{"order", "order.item.added", "orders.created"}},
		{"order.#", []string{"order", "order.created", "order.item.added"}, []string{"orders"}},
		{"#", []string{"a", "a.b", "a.b.c"}, nil},
		{"*", []string{"a"}, []string{"a.b"}},
		{"#.created", []string{"created", "a.created", "a.b.created"}, []string{"a.created.b"}},
		{"a.#.z", []string{"a.z", "a.b.z", "a.b.c.z"}, []string{"a", "a.b"}},
		{"*.#", []string{"a", "a.b"}, nil},
		{"a(b)+$.c", []string{"a(b)+$.c"}, []string{"ab.c"}},
	} {
		for _, eventType := range c.for_ {
			require.True(t, eventbus.Match(c.pattern, eventType), "%s %s", c.pattern, eventType)
		}
		for _, eventType := range c.not {
			require.False(t, eventbus.Match(c.pattern, eventType), "%s %s", c.pattern, eventType)
		}
	}
}

func segments(of ...string) *rapid.Generator[string] {
	return rapid.Map(rapid.SliceOfN(rapid.SampledFrom(of), 1, 5), func(s []string) string { return strings.Join(s, ".") })
}

// What a pattern covers it is for: a node never claims what it has no handler for.
func TestCovers_AnyPatterns_IsForWhateverTheOtherIsFor(t *testing.T) {
	t.Parallel()
	require.True(t, eventbus.Covers("order.#", "order.*"))
	require.True(t, eventbus.Covers("order.*", "order.created"))
	require.True(t, eventbus.Covers("#", "order.#.x"))
	require.True(t, eventbus.Covers("*.#", "*.*"))
	require.False(t, eventbus.Covers("order.*", "order.#"))
	require.False(t, eventbus.Covers("order.created", "order.*"))
	rapid.Check(t, func(t *rapid.T) {
		a, b := segments("a", "b", "*", "#").Draw(t, "a"), segments("a", "b", "*", "#").Draw(t, "b")
		eventType := segments("a", "b", "c").Draw(t, "type")
		if eventbus.Covers(a, b) && eventbus.Match(b, eventType) && !eventbus.Match(a, eventType) {
			t.Fatalf("%s is said to cover %s, and is not for %s", a, b, eventType)
		}
		if !strings.ContainsAny(b, "*#") && eventbus.Covers(a, b) != eventbus.Match(a, b) {
			t.Fatalf("%s and the type %s", a, b)
		}
	})
}

// The database routes by the same rules, and a group gets an event by the first of its patterns in the order of pattern_specificity.
func TestRoutes_AnyPatterns_AreAsInGo(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		patterns := rapid.SliceOfNDistinct(segments("a", "b", "(c]+", "*", "#"), 1, 4, rapid.ID[string]).Draw(rt, "patterns")
		eventType := segments("a", "b", "(c]+").Draw(rt, "type")
		bus := l.In(fmt.Sprint("n", n))
		require.NoError(rt, bus.Subscribe(l.within(), "g", patterns, nil))
		matches := false
		for _, p := range patterns {
			matches = matches || eventbus.Match(p, eventType)
		}
		tags := all[string](l, `SELECT tag FROM routes($1, $2)`, bus.Namespace(), eventType)
		if !matches {
			require.Empty(rt, tags)
			return
		}
		require.Len(rt, tags, 1)
		by := strings.TrimPrefix(tags[0], "eventbus/g|")
		require.True(rt, eventbus.Match(by, eventType))
		for _, p := range patterns {
			if eventbus.Match(p, eventType) && eventbus.Covers(by, p) && p != by {
				require.True(rt, eventbus.Covers(p, by), "%s routes %s although %s is more specific", by, eventType, p)
			}
		}
	})
}
