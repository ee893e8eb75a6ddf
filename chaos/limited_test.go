package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
)

// has is a stretch of an item, and the lines of its handler. outcome is empty if its process was killed.
func (s *story) has(item, token, key string, since, seen, until int, outcome string) *story {
	s.line(0, sending, entry{Key: item, Do: doLimited}).line(1, sent, entry{Key: item, ID: 1, Due: at(0)})
	s.claimed(since, item, token)
	if outcome != "" {
		s.ends(seen, item, token, outcome, "")
	}
	s.tables.stretches = append(s.tables.stretches, stretch{item, token, key, at(since), at(seen), at(until)})
	return s
}

func TestCheckLimits_Overlaps_AreCounted(t *testing.T) {
	full := func() *story { // as much as may be, from 100 to 200
		s := new(story)
		for i := range limits.MaxRunning {
			s.has(fmt.Sprint("full", i), "t", fmt.Sprint("k", i/limits.MaxRunningPerKey), 100, 200, 2100, acking)
		}
		return s
	}
	for name, c := range map[string]struct {
		*story
		violation string
	}{
		"as many as may be":        {full(), ""},
		"the next in the place":    {full().has("a", "t", "k9", 200, 300, 2200, acking), ""},
		"too many":                 {full().has("a", "t", "k9", 199, 300, 2200, acking), "4 items in the namespace at once"},
		"too many with a key":      {new(story).has("a", "t", "k", 1, 9, 2000, acking).has("b", "t", "k", 2, 9, 2000, acking).has("c", "t", "k", 3, 9, 2000, acking), "3 items with key k at once"},
		"an item had by two":       {new(story).has("a", "t", "k", 1, 9, 2000, returning).has("a", "u", "k", 8, 9, 2000, acking), "2 claims of a at once"},
		"one after the other":      {new(story).has("a", "t", "k", 1, 9, 2000, returning).has("a", "u", "k", 9, 20, 2000, acking), ""},
		"a place of the killed":    {new(story).has("b", "t", "k", 1, 2, 2000, acking).has("a", "t", "k", 1, 9, 2000, "").has("a", "u", "k", 1999, 2100, 3000, acking), "2 claims of a at once"},
		"after the lease":          {new(story).has("b", "t", "k", 1, 2, 2000, acking).has("a", "t", "k", 1, 9, 2000, "").has("a", "u", "k", 2000, 2100, 3000, acking), ""},
		"by a token of nobody's":   {&story{tables: tables{stretches: []stretch{{"a", "t", "k", at(1), at(2), at(3)}}}}, "which nobody got"},
		"gone without its handler": {new(story).has("a", "t", "k", 1, 9, 2000, returning), "is lost"},
	} {
		t.Run(name, func(t *testing.T) {
			found := c.violations()
			if c.violation == "" {
				assert.Empty(t, found)
			} else if assert.NotEmpty(t, found) {
				assert.Contains(t, found[0], c.violation)
			}
		})
	}
}

// What a Dispatcher takes waits for a place as long as others have it.
func TestJudge_LimitedItemWaits_IsNoViolation(t *testing.T) {
	s := &story{rounds: []round{{bound: at(1_000), calm: span{at(0), at(60_000)}}}}
	assert.Empty(t, s.has("a", "t", "k", 30_000, 30_010, 32_000, acking).violations())
}
