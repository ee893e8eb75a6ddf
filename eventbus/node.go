package eventbus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: what does a Node do from its beginning to its end?
//
// A dispatch.Dispatcher claims the deliveries and runs the handlers. Which of them it claims, by their tags, follows from its handlers and
// from the patterns of its group (docs/notes/eventbus-routing.md). A goroutine asks for those, and says that the node lives, whenever a
// pgwake.Watch calls for it: when they have changed, and when the LISTEN connection comes or goes. While neither happens heartbeats go with
// the periodic statement of the Provider (SQL function beat_quietly).

// NodeConfig says how a Node works. The zero value means the defaults, and so does a nil *NodeConfig.
type NodeConfig struct {
	// ID is unique over all namespaces; characters that an id may not have are replaced. Two nodes with the same id are one to the others.
	// Defaults to "": one that nobody has.
	ID string

	// DisplayName, Description and Metadata, anything that is a JSON object, are for people. Default to none.
	DisplayName, Description string
	Metadata                 any

	// Group is whose deliveries it handles: each of them is handled by one of the nodes of a group. Defaults to DefaultGroup.
	Group string

	// Concurrency is how many events are handled at one time, at most. A handler with a transaction has a connection of the Provider's
	// pool, which needs as many and four more. Defaults to 10.
	Concurrency int

	// BatchSize is how many deliveries are claimed in one round trip, at most. Defaults to 10.
	BatchSize int

	// Visibility is how long deliveries of a process that died are kept from others. While a handler runs it is renewed. From 1 s to 24 h.
	// Defaults to 30 s.
	Visibility time.Duration

	// MaxAttempts is how often a delivery is tried before it becomes a dead letter. Defaults to 5.
	MaxAttempts int

	// Retry says how long to wait after an attempt that failed. Defaults to dispatch.Backoff(time.Second, time.Hour).
	Retry dispatch.RetryPolicy

	// Timeout ends the context of a handler. Defaults to 0: none, and then a handler that waits for what never comes, such as an answer
	// on a connection that vanished, keeps its delivery for as long as the process lives.
	Timeout time.Duration

	// StopTimeout is how long handlers may go on once the Node is to stop, and CancelTimeout how long those that did not end by then may take
	// to notice. Default to 25 s and 2 s.
	StopTimeout, CancelTimeout time.Duration

	// Heartbeat is how often the node says that it lives by a statement of its own. At least 10 ms. Defaults to 0: it does so with the
	// periodic statement that the Provider makes anyway, once a pgwake.Config.FallbackInterval, and where the Provider does not listen by one
	// of its own after half as long again.
	Heartbeat time.Duration
}

// controlTag is that of work items which any node of a namespace handles, whatever its group.
const controlTag = "eventbus"

// maxPatterns is how many tags a fetch may ask for, without controlTag.
const maxPatterns = pgwake.MaxTags - 1

// Node handles the events of a namespace for a group, and emits as the one that it is. Safe for concurrent use.
type Node struct {
	*Bus
	id          string
	how         NodeConfig
	handlers    handlers
	occurrences occurrences
	patience    time.Duration    // stepPatience, but in tests
	wall        func() time.Time // time.Now, but in tests
	spared      sync.Map         // int64 of an item, and an *atomic.Int64 of its commits that failed and cost no attempt
	register    func(context.Context) error

	mu       sync.Mutex
	patterns []string // of the group, as far as they were asked for
	working  *shift   // nil: it is not started
	done     <-chan struct{}
}

// shift is a Node from Start to Stop.
type shift struct {
	dispatcher *dispatch.Dispatcher
	working    context.Context // ends when it is to end, or does so by itself
	end        context.CancelFunc
	ended      chan struct{}
	err        error // once it has ended
	marked     error // and why it could not be marked as gone then
}

// Node registers a node of the Bus's namespace, or what is new of it. It handles nothing before Start. Errors: pgwake.ErrConfig for the
// NodeConfig, and those of a verb.
func (b *Bus) Node(ctx context.Context, config *NodeConfig) (*Node, error) {
	const op = "register node"
	n := &Node{patience: stepPatience, wall: time.Now}
	if config != nil {
		n.how = *config
	}
	if err := n.how.complete(); err != nil {
		return nil, err
	}
	if n.how.Metadata == nil {
		n.how.Metadata = struct{}{}
	}
	metadata, err := encode("metadata of the node", n.how.Metadata, b.cfg.MaxPayload)
	if err == nil {
		err = cmp.Or(checkText("display name", n.how.DisplayName), checkDescription(n.how.Description, b.cfg.MaxPayload))
	}
	if err != nil {
		return nil, failed(op, err)
	}
	n.id = nodeID(n.how.ID)
	own := *b
	own.producer, own.tx = n.id, nil
	n.Bus = &own
	n.occurrences.many = n.occurMany
	n.register = func(ctx context.Context) error {
		return n.do(ctx, op, false, func(ctx context.Context, q pgwake.Querier) error {
			args := []any{n.id, n.namespace, n.how.DisplayName, n.how.Description, metadata}
			_, err := q.Exec(ctx, "SELECT "+n.call("register_node", len(args)), args...)
			return err
		})
	}
	return n, n.register(ctx)
}

func (c *NodeConfig) complete() error {
	c.Group = cmp.Or(c.Group, DefaultGroup)
	c.Concurrency = cmp.Or(c.Concurrency, 10)
	c.BatchSize = cmp.Or(c.BatchSize, 10)
	c.Visibility = cmp.Or(c.Visibility, pgwake.DefaultLockTimeout)
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 5)
	var problems []error
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if err := CheckGroup(c.Group); err != nil {
		problems = append(problems, err)
	}
	if c.BatchSize < 1 || c.BatchSize > pgwake.MaxFetch {
		wrong("BatchSize %d is not between 1 and %d", c.BatchSize, pgwake.MaxFetch)
	}
	if c.Concurrency < 1 || c.Concurrency > dispatch.MaxConcurrency {
		wrong("Concurrency %d is not between 1 and %d", c.Concurrency, dispatch.MaxConcurrency)
	}
	if c.Visibility < time.Second || c.Visibility > pgwake.MaxLockTimeout {
		wrong("Visibility %v is not between 1 s and %v", c.Visibility, pgwake.MaxLockTimeout)
	}
	if c.MaxAttempts < 1 && c.MaxAttempts != dispatch.Unlimited {
		wrong("MaxAttempts %d is less than 1", c.MaxAttempts)
	}
	if c.Heartbeat != 0 && c.Heartbeat < 10*time.Millisecond {
		wrong("Heartbeat %v is less than 10 ms", c.Heartbeat)
	}
	if c.Timeout < 0 || c.StopTimeout < 0 || c.CancelTimeout < 0 {
		wrong("Timeout, StopTimeout or CancelTimeout is negative")
	}
	if len(problems) > 0 {
		return fmt.Errorf("%w: %w", pgwake.ErrConfig, errors.Join(problems...))
	}
	return nil
}

// ID returns the id of the node.
func (n *Node) ID() string { return n.id }

// On has a handler get the events whose types match a pattern (see Match), and subscribes the group to them, for good (see
// Bus.Subscribe). Several handlers may be for an event; all of this node's run in one transaction, in the order in which they were
// registered. It may be called at any time.
func (n *Node) On(ctx context.Context, pattern string, h Handler) error {
	return n.on(ctx, registered{pattern: pattern, transactional: h})
}

// OnPlain is On for a handler without a transaction. It runs before those that have one.
func (n *Node) OnPlain(ctx context.Context, pattern string, h PlainHandler) error {
	return n.on(ctx, registered{pattern: pattern, plain: h})
}

func (n *Node) on(ctx context.Context, r registered) error {
	const op = "register handler"
	if r.plain == nil && r.transactional == nil {
		return failed(op, invalid("there is no handler for %q", r.pattern))
	}
	if _, same := n.handlers.cover(r.pattern); !same && len(n.handlers.patterns()) >= maxPatterns {
		return failed(op, invalid("%q is one pattern more than %d; there may be several nodes, or patterns with * and #", r.pattern, maxPatterns))
	}
	if err := n.Subscribe(ctx, n.how.Group, []string{r.pattern}, nil); err != nil {
		return err
	}
	n.handlers.add(r)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.claimAll()
	return nil
}

// claimAll has the dispatcher claim whatever the node has handlers for. It is called with mu held.
func (n *Node) claimAll() {
	if n.working != nil {
		n.working.dispatcher.SetTags(n.tags())
	}
}

// tags are those of deliveries that handlers of this node can take: of each pattern of theirs, and of each of the group that one of theirs
// covers.
func (n *Node) tags() pgwake.TagFilter {
	patterns := n.handlers.patterns()
	for _, p := range n.patterns {
		if covered, same := n.handlers.cover(p); covered && !same {
			patterns = append(patterns, p)
		}
	}
	if len(patterns) > maxPatterns {
		n.cfg.Logger.Warn("eventbus: the group has more patterns than a node can claim by; others have to handle the rest", "group", n.how.Group,
			"patterns", len(patterns), "most", maxPatterns)
		patterns = patterns[:maxPatterns]
	}
	tags := []string{controlTag}
	for _, p := range patterns {
		tags = append(tags, controlTag+"/"+n.how.Group+"|"+p)
	}
	return pgwake.Tags(tags...)
}

// Start begins to handle events. If it has begun already, it does nothing; if it is coming to its end, Start waits for that, and begins anew.
// The context is that of Start alone.
func (n *Node) Start(ctx context.Context) error {
	if s := n.shift(); s != nil {
		if s.working.Err() == nil {
			return nil
		}
		if err := n.over(ctx, s); err != nil {
			return err
		}
	}
	about, _ := json.Marshal([]string{n.id, n.how.Group})
	watch, err := n.p.Watch(ctx, pgwake.WatchOptions{Topic: "eventbus/" + n.namespace + "/" + n.how.Group, Beat: "beat_quietly", About: string(about)})
	if err != nil {
		return failed("start node", err)
	}
	if err := n.beat(ctx, watch); err != nil { // after that it hears of every change
		watch.Close()
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.working != nil {
		watch.Close()
		return nil
	}
	d := dispatch.New(&source{n.p, n.Bus, n.how.BatchSize, n.cfg.Logger}, &dispatch.Config{
		Concurrency: n.how.Concurrency, Namespaces: []string{n.namespace}, Tags: n.tags(), LockTimeout: n.how.Visibility, Timeout: n.how.Timeout,
		MaxAttempts: n.how.MaxAttempts, Retry: n.how.Retry, StopTimeout: n.how.StopTimeout, CancelTimeout: n.how.CancelTimeout,
		MeterProvider: n.cfg.MeterProvider, TracerProvider: n.cfg.TracerProvider, Propagator: n.cfg.Propagator, Logger: n.cfg.Logger,
	})
	d.HandleOthers(n.handle)
	working, end := context.WithCancel(context.WithoutCancel(ctx))
	n.handleChores(working, d)
	s := &shift{dispatcher: d, working: working, end: end, ended: make(chan struct{})}
	n.working, n.done = s, s.ended
	go func() {
		defer close(s.ended)
		var duties sync.WaitGroup
		duties.Go(func() { n.keepBeating(working, watch) })
		duties.Go(func() { n.keepLog(working) })
		s.err = d.Run(working)
		end()
		duties.Wait()
		watch.Close()
		marking, cancel := context.WithTimeout(context.Background(), endTimeout)
		defer cancel()
		s.marked = n.markGone(marking)
	}()
	return nil
}

// Stop claims no more, gives back at once what is not begun, waits for the handlers as NodeConfig.StopTimeout says, and marks the node as
// gone. If ctx ends before, Stop returns with its error, and all of that goes on. A node that is not started is marked alone.
// dispatch.ErrHandlersLeft if a handler has not come to its end. Afterwards Start may be called again.
func (n *Node) Stop(ctx context.Context) error {
	s := n.shift()
	if s == nil {
		return n.markGone(ctx)
	}
	s.end()
	if err := n.over(ctx, s); err != nil {
		return err
	}
	if s.marked != nil { // the database was away
		return errors.Join(s.err, n.markGone(ctx))
	}
	return s.err
}

func (n *Node) markGone(ctx context.Context) error {
	_, err := value[bool](ctx, n.Bus, verb{op: "stop node", function: "stop_node", args: []any{n.id}})
	if errors.Is(err, pgwake.ErrClosed) { // then nobody can be told
		return nil
	}
	return err
}

func (n *Node) shift() *shift {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.working
}

// over waits until a shift has ended. From then on the node is not started.
func (n *Node) over(ctx context.Context, s *shift) error {
	select {
	case <-s.ended:
	case <-ctx.Done():
		return ctx.Err()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.working == s {
		n.working = nil
	}
	return nil
}

// Done returns a channel that is closed when the Node handles no events any more: it was stopped, its Provider was closed, or it met an error
// that will not go away, which Stop returns. It is about the latest Start; nil if there was none.
func (n *Node) Done() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.done
}

// keepBeating says that the node lives, and asks what patterns there are, whenever there is reason to, until ctx ends.
func (n *Node) keepBeating(ctx context.Context, watch *pgwake.Watch) {
	pause := n.how.Heartbeat
	for {
		var due <-chan time.Time // nil: the watch alone calls for it
		if pause > 0 {
			due = time.After(pause - rand.N(pause/10+1))
		}
		select {
		case <-ctx.Done():
		case <-watch.C:
		case <-due:
		}
		if ctx.Err() != nil {
			return
		}
		// One that has begun comes to its end: none is to come after stop_node.
		beating, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		err := n.beat(beating, watch)
		cancel()
		pause = n.how.Heartbeat
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, pgwake.ErrClosed) {
				n.cfg.Logger.Warn("eventbus: no heartbeat", "node", n.id, "error", err, "again_in", readPause)
			}
			pause = readPause
		}
	}
}

// beating calls beat, and reads whether there is the row of the node.
const beating = `SELECT %[1]sbeat($1, $2, $3, $4, $5), EXISTS (SELECT FROM %[1]sevent_nodes AS n WHERE n.node_id OPERATOR(pg_catalog.=) $1)`

func (n *Node) beat(ctx context.Context, watch *pgwake.Watch) error {
	var patterns []string
	var listening *int32
	if watch.Listens() { // or else the server may not know yet that the session has ended, and nobody would say so later
		listening = &watch.Node
	}
	for known := false; !known; {
		err := n.do(ctx, "heartbeat", false, func(ctx context.Context, q pgwake.Querier) error {
			return q.QueryRow(ctx, fmt.Sprintf(beating, n.in), n.id, n.namespace, n.how.Group, listening,
				cmp.Or(n.how.Heartbeat, watch.Interval)).Scan(&patterns, &known)
		})
		if err == nil && !known { // it was gone for so long that others have forgotten it
			err = n.register(ctx)
		}
		if err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(patterns, n.patterns) {
		n.patterns = patterns
		n.claimAll()
	}
	return nil
}
