package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how is which namespace served?

// Group says how namespaces are served that have something in common, and serves as a template for others. It takes work items, if
// there are Handlers, and turns, if there is a Decider.
type Group struct {
	// Name is for Extends, and for people. Unique. Required if another Group extends this one.
	Name string

	// Extends names the Group that every field which is zero here has its value from, and so does every such field of Config and
	// of Turns. Defaults to "": none.
	Extends string

	// Namespaces are names, or patterns as path.Match has them: "*", "tenant-*". A namespace that several Groups are for belongs to
	// the one that has it by its name, or else to the first. It is not taken from the Group that this one extends. Defaults to
	// none: this Group is a template for others.
	Namespaces []string

	// Config is that of each namespace's Dispatcher; its Namespaces are not to be set.
	Config Config

	// Handlers registers the handlers of a Dispatcher. It is called once by NewCoordinators, of which the Dispatcher never runs: so
	// that a mistake is found at once, and to see what is fetched. Then it is called for each: whenever a namespace has work after it
	// had none, and in advance for those that are kept Warm; several at a time. Items that it was called for wait for it; if it takes
	// longer than half of their lease (Config.LockTimeout), they are given back, and may go to another node.
	Handlers func(*Dispatcher)

	// Turns is the configuration of each namespace's Orchestrator, of which Decider takes the turns; its Namespaces are not to be set.
	Turns   OrchestratorConfig
	Decider Decider

	// Eager has the Dispatcher and the Orchestrator of a namespace begin when it is spawned. Defaults to false: with its first item.
	Eager bool

	// RetireAfter is how long a namespace has no work before its Dispatcher ends, and its Orchestrator. What is left until there is
	// work again is a goroutine that waits. At least 1 ms; Never for not at all. Defaults to 10 s.
	RetireAfter time.Duration

	// Warm is how many Dispatchers are kept with their Handlers registered, for whichever namespace has work next. For Handlers that take
	// their time to register. Defaults to 0.
	Warm int
}

// Never is for Group.RetireAfter.
const Never time.Duration = -1

// group is a Group with all that it inherits.
type group struct {
	Group
	warm chan *Dispatcher // nil: none is kept

	// Of these only the settings are of use; nil: it takes no work items, or no turns.
	proto      *Dispatcher
	protoTurns *Orchestrator
}

// idle is after how long without work to retire; 0: never.
func (g *group) idle() time.Duration { return max(g.RetireAfter, 0) }

// newDispatcher makes one for any namespace.
func (g *group) newDispatcher() (*Dispatcher, error) {
	return hooked(func() (*Dispatcher, error) {
		d := New(nobody, &g.Config)
		g.Handlers(d)
		return d, d.err
	})
}

// take returns one of those that are kept, or a new one.
func (g *group) take() (*Dispatcher, error) {
	select {
	case d := <-g.warm:
		return d, nil
	default:
		return g.newDispatcher()
	}
}

// nobody is the Provider of a Dispatcher that has none yet.
var nobody = (*pgwake.Provider)(nil)

// groups are all of them.
type groups []*group

// newGroups completes what was configured, and says what is wrong with it.
func newGroups(configured []Group) (all groups, err error) {
	var k checks
	byName := make(map[string]*Group)
	for i := range configured {
		g := &configured[i]
		if g.Name != "" && byName[g.Name] != nil {
			k.bad("two Groups are called %q", g.Name)
		}
		byName[g.Name] = g
	}
	for _, g := range configured {
		settings := g
		for seen := []string{}; g.Extends != ""; {
			base := byName[g.Extends]
			if base == nil || slices.Contains(seen, g.Extends) {
				k.bad("Group %q extends %q, which there is not, or which extends itself", settings.title(), g.Extends)
				break
			}
			seen = append(seen, g.Extends)
			inherit(&settings, base)
			g = *base
		}
		if len(settings.Namespaces) > 0 {
			all = append(all, k.group(settings))
		}
	}
	if len(all) == 0 {
		k.bad("there is no Group with Namespaces")
	}
	return all, k.err
}

// inherit gives each exported field that is zero the value that it has in base, but for what makes a Group what it is.
func inherit(g, base *Group) {
	names, name, extends := g.Namespaces, g.Name, g.Extends
	fill(reflect.ValueOf(g).Elem(), reflect.ValueOf(base).Elem())
	g.Namespaces, g.Name, g.Extends = names, name, extends
}

func fill(to, from reflect.Value) {
	for i := range to.NumField() {
		switch f := to.Field(i); {
		case f.Type() == reflect.TypeFor[Config](), f.Type() == reflect.TypeFor[OrchestratorConfig]():
			fill(f, from.Field(i))
		case f.IsZero():
			f.Set(from.Field(i))
		}
	}
}

// group completes one that serves namespaces.
func (k *checks) group(settings Group) *group {
	g := &group{Group: settings}
	fails := func(format string, args ...any) { k.bad("Group %q: %s", g.title(), fmt.Sprintf(format, args...)) }
	for _, pattern := range g.Namespaces {
		if !validPattern(pattern) {
			fails("%q is neither a namespace nor a pattern", pattern)
		}
	}
	if g.Config.Namespaces != nil || g.Turns.Namespaces != nil {
		fails("the Namespaces of its Config, or of its Turns, are set")
	}
	if g.RetireAfter == 0 {
		g.RetireAfter = 10 * time.Second
	}
	if g.RetireAfter < time.Millisecond && g.RetireAfter != Never {
		fails("RetireAfter %v is less than a millisecond", g.RetireAfter)
	}
	if g.Warm < 0 {
		fails("Warm %d is negative", g.Warm)
	}
	if g.Handlers == nil && g.Decider == nil {
		fails("there are neither Handlers nor a Decider")
	}
	// Settings of what it does not do are looked at all the same: handlers may come to it later, and the mistake is here.
	_, _, err := g.Config.resolve()
	if g.Handlers != nil {
		g.proto, err = g.newDispatcher()
		if g.Warm > 0 {
			g.warm = make(chan *Dispatcher, g.Warm)
		}
	}
	_, _, errOfTurns := g.Turns.resolve()
	if g.Decider != nil {
		g.protoTurns = NewOrchestrator(nobody, g.Decider, &g.Turns)
		errOfTurns = g.protoTurns.err
	}
	for _, err := range []error{err, errOfTurns} {
		if err != nil {
			k.err = errors.Join(k.err, fmt.Errorf("Group %q: %w", g.title(), err))
		}
	}
	return g
}

// owners are those of the sessions that work items have, and to whom instances are sticky, each once.
func (all groups) owners() (ofSessions, ofTurns []string) {
	for _, g := range all {
		if g.proto != nil && g.Config.Session != nil && g.Config.Session.Owner != "" {
			ofSessions = append(ofSessions, g.Config.Session.Owner)
		}
		if g.protoTurns != nil && g.Turns.Owner != "" {
			ofTurns = append(ofTurns, g.Turns.Owner)
		}
	}
	slices.Sort(ofSessions)
	slices.Sort(ofTurns)
	return slices.Compact(ofSessions), slices.Compact(ofTurns)
}

// title is how errors call it.
func (g *Group) title() string { return cmp.Or(g.Name, strings.Join(g.Namespaces, ", ")) }

// of returns the group that a namespace belongs to; nil: none.
func (all groups) of(namespace string) *group {
	patterns := make([][]string, len(all))
	for i, g := range all {
		patterns[i] = g.Namespaces
	}
	if i := firstFor(patterns, namespace); i >= 0 {
		return all[i]
	}
	return nil
}

// firstFor returns which of these is for a namespace: the first that has its name, or else a pattern that it matches; -1: none.
func firstFor(patterns [][]string, namespace string) int {
	if i := slices.IndexFunc(patterns, func(p []string) bool { return slices.Contains(p, namespace) }); i >= 0 {
		return i
	}
	return slices.IndexFunc(patterns, func(p []string) bool { return matchesAny(p, namespace) })
}

// validPattern reports whether path.Match takes it.
func validPattern(pattern string) bool {
	_, err := path.Match(pattern, "")
	return err == nil && pattern != ""
}

// matchesAny reports whether a namespace is one of these, which are names or valid patterns. All is all, also names of streams that have
// what path.Match takes for a separator.
func matchesAny(patterns []string, namespace string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		matches, _ := path.Match(pattern, namespace)
		return matches || pattern == "*" || pattern == namespace
	})
}
