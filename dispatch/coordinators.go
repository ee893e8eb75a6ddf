package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/metric"
)

// This file answers: which namespaces are served here, and since when?
//
// A goroutine for each Source waits for namespaces, which costs nothing until there is another one. Each namespace that this node is to
// serve gets a coordinator (coordinator.go).
//
// Invariants
//
//	(1) A Source's namespace has one coordinator at most: it is looked for, made and begun under one lock.
//	(2) A namespace that is to be served and that the Source has told of has one, but from Retire to Spawn: what is told of is known from
//	    then on, and what was missed, as while a connection was down, the Source tells of afterwards.

// Source is what Coordinators need of a *pgwake.Provider. With a Decider they need a TurnProvider as well, and with a Rollout, SetModes
// and GetModes.
type Source interface {
	Provider
	WaitForNamespaces(ctx context.Context, known []string) (added []string, err error)
}

// Shard has some of the namespaces on a database of their own.
type Shard struct {
	// Namespaces are names, or patterns as path.Match has them.
	Namespaces []string
	Source     Source

	// Begin begins the transactions of HandleTx on the database of Source, in place of Config.Begin, which is for the Source of
	// NewCoordinators. Once for a Source is enough, however many Shards it has. Required where a Group has HandleTx and Source is another
	// one: items of any namespace may be there. A stream has no transactions, and what is said of it here or by Config.Begin is not used.
	// Defaults to nil: to Config.Begin, for the Source of NewCoordinators.
	Begin func(context.Context) (pgx.Tx, error)
}

// CoordinatorsConfig says what Coordinators serve, and how.
type CoordinatorsConfig struct {
	// Namespaces are those that this node serves: names, or patterns as path.Match has them, but that "*" is all. Defaults to nil:
	// all; none, if it is empty and not nil.
	Namespaces []string

	// Groups say how which of them are served. One that no Group is for is not served. Required.
	Groups []Group

	// Shards say which namespaces are kept elsewhere. One that several are for belongs to the one that has it by its name, or else to the
	// first; one that none is for, to the Source of NewCoordinators. Whoever enqueues asks Coordinators.SourceOf. Every
	// Source is served, also if a namespace is in one to which it does not belong: so one can be moved while it is in use.
	// Defaults to none.
	Shards []Shard

	// Rollout says how the node learns of the work of each namespace; see Percent. With it the modes of all Sources are the
	// Coordinators': those of the namespaces, and Config.Mode, which remains as it is but for ModePolling in its place as long as all
	// namespaces are in ModePolling or ModeDisabled: so nothing listens then. A namespace whose mode cannot be set is not served until
	// it can, nor is one for which it panics, or returns no Mode that there is: it is asked again after a minute, and by Spawn, and the others
	// do not wait for that. One that is served already keeps its mode. It is called by one goroutine at a time, and by SetRollout and
	// Spawn, among others: it would wait for ever if it called one of the two, or waited for somebody who does. Defaults to nil: modes
	// remain as they are.
	Rollout func(namespace string) pgwake.Mode

	// MeterProvider is for OpenTelemetry; see the Metric names. Defaults to the global one.
	MeterProvider metric.MeterProvider

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

// Coordinators serve namespaces as they come: each with a Dispatcher and an Orchestrator of its own while it has work, and next to
// nothing while it has none. All of them wait behind the one LISTEN connection of their Provider.
type Coordinators struct {
	cfg     CoordinatorsConfig
	err     error
	groups  groups
	sources []Source                                      // that of NewCoordinators, and then of Shards
	begins  map[int]func(context.Context) (pgx.Tx, error) // Shard.Begin, by the number of the Source
	log     *slog.Logger

	ran     atomic.Bool
	rollout rollout
	warned  atomic.Int64 // when a fetch that failed was last logged, in Unix milliseconds

	spawned, retired, shifts atomic.Int64

	mu       sync.Mutex
	byPlace  map[place]*coordinator
	shut     map[place]bool // by Retire
	all      sync.WaitGroup
	serving  context.Context // nil: Run has not begun
	over     bool            // Run is about to end
	failures []error         // of those that did not end as they should
	known    map[place]bool  // all that the Sources have told of, or Spawn, and that are in their modes
	left     map[place]error // all that the Sources have told of besides, and why they are not in their modes
	watching []failing       // whether each Source can tell of namespaces
}

// place is where a coordinator is at work.
type place struct {
	source    int
	namespace string
}

// NewCoordinators returns Coordinators on a Provider. Errors of the config are those of Run.
func NewCoordinators(source Source, config *CoordinatorsConfig) *Coordinators {
	c := &Coordinators{byPlace: make(map[place]*coordinator), shut: make(map[place]bool), known: make(map[place]bool), left: make(map[place]error), sources: []Source{source}}
	c.begins = make(map[int]func(context.Context) (pgx.Tx, error))
	if config != nil {
		c.cfg = *config
	}
	if c.log = c.cfg.Logger; c.log == nil {
		c.log = slog.Default()
	}
	if c.cfg.Namespaces == nil {
		c.cfg.Namespaces = []string{"*"}
	}
	var k checks
	for _, s := range c.cfg.Shards {
		if !slices.Contains(c.sources, s.Source) {
			c.sources = append(c.sources, s.Source)
		}
		if i := slices.Index(c.sources, s.Source); s.Begin != nil && c.begins[i] == nil {
			c.begins[i] = s.Begin
		}
	}
	for _, pattern := range slices.Concat(append(shardPatterns(c.cfg.Shards), c.cfg.Namespaces)...) {
		if !validPattern(pattern) {
			k.bad("%q is neither a namespace nor a pattern", pattern)
		}
	}
	groups, err := newGroups(c.cfg.Groups)
	k.err = errors.Join(k.err, err)
	c.groups = groups
	takesTurns := slices.ContainsFunc(groups, func(g *group) bool { return g.Decider != nil })
	for i, s := range c.sources {
		if s == nil {
			k.bad("Source %d is nil", i)
			continue
		}
		if _, ok := s.(TurnProvider); takesTurns && !ok {
			k.bad("Source %d has no turns, for which there is a Decider", i)
		}
		if _, ok := s.(modal); c.cfg.Rollout != nil && !ok {
			k.bad("Source %d has no modes, for which there is a Rollout", i)
		}
	}
	for _, g := range groups {
		k.err = errors.Join(k.err, c.checkTransactions(g))
	}
	c.watching = make([]failing, len(c.sources))
	c.rollout.of, c.rollout.general = c.cfg.Rollout, make(map[int]generalMode)
	c.err = k.err
	return c
}

func shardPatterns(shards []Shard) (all [][]string) {
	for _, s := range shards {
		all = append(all, s.Namespaces)
	}
	return all
}

// SourceOf returns the Source that a namespace belongs to, whether or not it is served here: its items are to be enqueued there.
func (c *Coordinators) SourceOf(namespace string) Source { return c.sources[c.owner(namespace)] }

// owner returns the number of that Source.
func (c *Coordinators) owner(namespace string) int {
	i := firstFor(shardPatterns(c.cfg.Shards), namespace)
	if i < 0 {
		return 0
	}
	return slices.Index(c.sources, c.cfg.Shards[i].Source)
}

// checkTransactions makes sure that a HandleTx has its transaction wherever there can be one, and somewhere.
func (c *Coordinators) checkTransactions(g *group) error {
	if g.proto == nil || g.proto.transacts == "" {
		return nil
	}
	var k checks
	streams := 0
	for i, s := range c.sources {
		switch {
		case isStream(s):
			streams++
		case c.beginOf(i, g) == nil:
			k.bad("Group %q has HandleTx of %q, and Source %d no Begin: neither Config.Begin nor that of a Shard is for it", g.title(), g.proto.transacts, i)
		}
	}
	if streams == len(c.sources) {
		k.bad("Group %q has HandleTx of %q, and all Sources are streams, which have no transactions", g.title(), g.proto.transacts)
	}
	return k.err
}

// beginOf returns what begins transactions on the database of a Source; nil: nothing is known to.
func (c *Coordinators) beginOf(source int, g *group) func(context.Context) (pgx.Tx, error) {
	if isStream(c.sources[source]) {
		return nil
	}
	if begin := c.begins[source]; begin != nil || source > 0 {
		return begin
	}
	return g.Config.Begin
}

// Run serves until ctx ends or all Sources are closed. It ends as Dispatcher.Run does, all namespaces at a time, and returns what that
// does. Last, it releases in each Source what is kept for the owners that the Groups name: sessions (Config.Session), and instances that
// are sticky (Turns.Owner), whether or not anything was at work. A mistake in any part of the config it returns at once; but a namespace
// that cannot be served later on, for whatever reason, is tried again and again (see Health), and does not end the others. Run may be
// called once.
func (c *Coordinators) Run(ctx context.Context) error {
	if c.err != nil {
		return c.err
	}
	if c.ran.Swap(true) {
		return errRanBefore
	}
	var k checks
	defer c.observe(&k)()
	if k.err != nil {
		return k.err
	}
	serving, end := context.WithCancel(ctx)
	defer end()
	c.begin(serving)
	var keepers sync.WaitGroup
	for _, g := range c.groups {
		if g.warm != nil {
			keepers.Go(func() { c.keepWarm(serving, g) })
		}
	}
	var watchers sync.WaitGroup
	for i := range c.sources {
		watchers.Go(func() { c.watch(serving, i) })
	}
	watchers.Wait()
	end()
	c.stop()
	keepers.Wait()
	c.leave()
	return errors.Join(c.failures...)
}

// leave gives up what is kept for the owners of the Groups, in all Sources. It comes once all has ended: namespaces share owners, and one
// that retires leaves nothing of theirs to others.
func (c *Coordinators) leave() {
	ofSessions, ofTurns := c.groups.owners()
	var all sync.WaitGroup
	for _, s := range c.sources {
		if len(ofSessions) > 0 {
			all.Go(func() { leave(c.log, ofSessions, s.ReleaseSessions) })
		}
		if len(ofTurns) > 0 {
			all.Go(func() { leave(c.log, ofTurns, s.(TurnProvider).ReleaseSticky) })
		}
	}
	all.Wait()
}

// begin has those served that were asked for before Run.
func (c *Coordinators) begin(serving context.Context) {
	c.mu.Lock()
	c.serving = serving
	asked := maps.Clone(c.known)
	c.mu.Unlock()
	for at := range asked {
		c.spawn(at)
	}
}

// stop waits for all coordinators. None begins any more.
func (c *Coordinators) stop() {
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.all.Wait()
}

// keepWarm makes Dispatchers in advance.
func (c *Coordinators) keepWarm(ctx context.Context, g *group) {
	for {
		d, err := g.newDispatcher()
		if err != nil { // whoever needs one will say so
			nap(ctx, lastPause)
			if ctx.Err() != nil {
				return
			}
			continue
		}
		select {
		case g.warm <- d:
		case <-ctx.Done():
			return
		}
	}
}

// patience is that of all who wait here: one of them says what is wrong.
func (c *Coordinators) patience(served *atomic.Bool) patience {
	return patience{log: c.log, served: served, muted: func() bool {
		now, last := time.Now().UnixMilli(), c.warned.Load()
		return now-last < lastPause.Milliseconds() || !c.warned.CompareAndSwap(last, now)
	}}
}

// serves reports whether this node is to serve a namespace.
func (c *Coordinators) serves(namespace string) bool {
	return matchesAny(c.cfg.Namespaces, namespace) && c.groups.of(namespace) != nil
}

// spawn has a place served, unless it is, or was shut, or all is about to end.
func (c *Coordinators) spawn(at place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.serving == nil || c.over || c.byPlace[at] != nil || c.shut[at] {
		return
	}
	k := newCoordinator(c, at)
	c.byPlace[at] = k
	c.spawned.Add(1)
	ctx, end := context.WithCancel(c.serving)
	k.end = end
	c.all.Go(func() {
		defer c.remove(k)
		k.run(ctx)
	})
}

// remove takes a coordinator that has ended out of the registry. If another one was asked for while it was about to, that begins.
func (c *Coordinators) remove(k *coordinator) {
	k.end()
	c.mu.Lock()
	delete(c.byPlace, k.at)
	again := k.retired && !c.shut[k.at]
	if k.retired {
		c.retired.Add(1)
	}
	c.mu.Unlock()
	if again {
		c.spawn(k.at)
	}
	close(k.ended)
}

// Spawn has a namespace served from now on, or from when Run begins, before it has an item or is registered, and also after Retire. One
// that is served already remains as it is. Fails with pgwake.ErrInvalid if this node is not to serve it, or if there can be no such
// namespace, and as SetRollout. Safe for concurrent use.
func (c *Coordinators) Spawn(namespace string) error {
	if c.err != nil {
		return c.err
	}
	if !c.serves(namespace) {
		return fmt.Errorf("spawn: %w: namespace %.60q is not one that is served here", pgwake.ErrInvalid, namespace)
	}
	owner := c.owner(namespace)
	if _, ok := c.sources[owner].(modal); ok { // a Provider, which has rules for names
		if err := pgwake.CheckNamespace(namespace); err != nil {
			return fmt.Errorf("spawn: %w", err)
		}
	}
	unsaid, err := c.learn(owner, []string{namespace})
	if err == nil {
		err = unsaid[namespace]
	}
	if err != nil {
		return fmt.Errorf("spawn: %w", err)
	}
	for i := range c.sources { // it may be in others too
		at := place{i, namespace}
		c.mu.Lock()
		known := c.known[at]
		delete(c.shut, at)
		c.mu.Unlock()
		if known {
			c.spawn(at)
		}
	}
	return nil
}

// Retire ends the serving of a namespace, as the end of Run would, and returns when that is done; it begins again with Spawn. Items
// that come meanwhile wait, or go to other nodes. Those of a session that is kept for an owner here, and the turns of an instance that is
// sticky to one, go there when that ends by itself: the owner goes on for other namespaces. It waits for handlers as Run does, for the
// Group's StopTimeout and CancelTimeout at most: so a handler of the namespace is not to call it. Safe for concurrent use.
func (c *Coordinators) Retire(namespace string) {
	for i := range c.sources {
		at := place{i, namespace}
		c.mu.Lock()
		c.shut[at] = true
		k := c.byPlace[at]
		if k != nil {
			k.retired = true
		}
		c.mu.Unlock()
		if k != nil {
			k.end()
			<-k.ended
		}
	}
}

// Scale sets how many handlers of a namespace run at one time, instead of Config.MinConcurrency and Config.Concurrency of its Group, from
// now on until Retire. 0 stands for what it does in a Config. Fails with pgwake.ErrConfig for numbers that these may not have, and for a Group without Handlers, and with pgwake.ErrNotFound if the namespace is not served at
// this moment. Safe for concurrent use.
func (c *Coordinators) Scale(namespace string, least, most int) error {
	found := false
	for _, k := range c.coordinators() {
		if k.at.namespace == namespace {
			found = true
			if err := k.scale(least, most); err != nil {
				return fmt.Errorf("scale %.60q: %w", namespace, err)
			}
		}
	}
	if !found {
		return fmt.Errorf("scale: %w: namespace %.60q is not served", pgwake.ErrNotFound, namespace)
	}
	return nil
}

// coordinators returns them in the order of their names.
func (c *Coordinators) coordinators() []*coordinator {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*coordinator, 0, len(c.byPlace))
	for _, k := range c.byPlace {
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b *coordinator) int { return a.at.compare(b.at) })
	return all
}
