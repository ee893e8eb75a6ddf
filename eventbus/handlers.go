package eventbus

import (
	"slices"
	"sync"
)

// This file answers: which handlers are there for an event?

// handlers are those of a Node. Safe for concurrent use.
type handlers struct {
	mu  sync.RWMutex
	all []registered
}

// registered is a handler with the pattern of its events; it is one of the two kinds.
type registered struct {
	pattern       string
	plain         PlainHandler
	transactional Handler
}

func (h *handlers) add(r registered) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, r)
}

// of returns those for a type, in the order in which they were registered.
func (h *handlers) of(eventType string) (plain []PlainHandler, transactional []Handler) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, r := range h.all {
		switch {
		case !Match(r.pattern, eventType):
		case r.plain != nil:
			plain = append(plain, r.plain)
		default:
			transactional = append(transactional, r.transactional)
		}
	}
	return plain, transactional
}

// cover reports whether there is a handler for everything that a pattern is for, and whether there is one of that very pattern.
func (h *handlers) cover(pattern string) (covered, same bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, r := range h.all {
		covered = covered || Covers(r.pattern, pattern)
		same = same || r.pattern == pattern
	}
	return covered, same
}

// patterns are those of all handlers, each once.
func (h *handlers) patterns() (all []string) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, r := range h.all {
		if !slices.Contains(all, r.pattern) {
			all = append(all, r.pattern)
		}
	}
	return all
}
