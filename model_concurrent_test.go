package pgwake_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: do all verbs together keep their promises when many call them at once?
//
// 8 goroutines on two nodes call verbs at random, with tokens that they share, and record what was asked, what was
// answered, and when. Afterwards the record of each item and of each instance is replayed: one claim at a time, each
// lease held until it was given back or had ended, one ack and nothing after it, every attempt counted, every
// message in its turn and in its order, every event once, nothing lost.
//
// Time is in jumps of an hour. A jump waits until no call is under way, and a lease ends between two jumps, so for
// every call it is known whether its lease holds, and a call that is answered otherwise is wrong.

const (
	stormClients = 8
	stormCalls   = 150 // of each
	stormJump    = time.Hour
	stormMargin  = stormJump / 2 // between a jump and whatever happens by itself
)

// stormEvent is a call and its answer.
type stormEvent struct {
	verb      string
	jumps     int   // so far
	call, ret int64 // places in the order of all calls and returns
	err       error // nil, or one that the contract allows for

	token  pgwake.LockToken // of what was acknowledged, abandoned, renewed
	lease  int              // in jumps: a claim in jump j holds through j+lease
	delay  int              // in jumps
	ignore bool
	events []int64 // ids, of an ack
	added  []stormAdded

	items []*pgwake.ClaimedWorkItem
	turn  *pgwake.OrchestrationItem
}

// stormAdded is what a call added to a queue.
type stormAdded struct {
	by        *stormEvent
	name      string // that nothing else has
	instance  string // of a message; "": a work item
	namespace string
	key       string
	due       int // the first jump after which it is
	id        int64
	duplicate bool // and so not added
}

type storm struct {
	*testing.T
	nodes []*node

	time  sync.RWMutex // a jump excludes calls
	jumps int
	order atomic.Int64
	names atomic.Int64

	mu    sync.Mutex
	work  []pgwake.LockToken
	turns []*pgwake.OrchestrationItem
	log   []*stormEvent
}

var (
	stormInstances  = []string{"i", "j", "k", "l", "m", "n"}
	stormNamespaces = []string{"default", "a"}
	stormKeys       = []string{"", "", "", "k1", "k2"}
)

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

// jump lets an hour pass.
func (s *storm) jump() {
	s.time.Lock()
	defer s.time.Unlock()
	s.nodes[0].travel(s, stormJump)
	s.jumps++
}

// record makes a call and writes it down. verb fills in what it asks before, and what came of it after.
func (s *storm) record(name string, verb func(e *stormEvent) error) *stormEvent {
	s.time.RLock()
	defer s.time.RUnlock()
	e := &stormEvent{verb: name, jumps: s.jumps, call: s.order.Add(1)}
	e.err = verb(e)
	e.ret = s.order.Add(1)
	for i := range e.added {
		e.added[i].by = e
	}
	switch {
	case e.err == nil, errors.Is(e.err, pgwake.ErrNoWork), errors.Is(e.err, pgwake.ErrLockLost), errors.Is(e.err, pgwake.ErrDuplicateEvent):
	case e.token == "" && errors.Is(e.err, context.DeadlineExceeded): // a fetch that got no connection in time: nothing was claimed
	default:
		s.Errorf("%s: %v", name, e.err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, e)
	for _, item := range e.items {
		s.work = append(s.work, item.LockToken)
	}
	if e.turn != nil {
		s.turns = append(s.turns, e.turn)
	}
	return e
}

// recent returns one of the latest, so that most of them hold and several goroutines choose the same.
func recent[T any](s *storm, r *rand.Rand, all *[]T) (one T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(*all) == 0 {
		return one, false
	}
	return (*all)[max(0, len(*all)-1-r.IntN(6))], true
}

// delayOf is a delay that is over between two jumps.
func delayOf(jumps int) time.Duration {
	if jumps == 0 {
		return 0
	}
	return time.Duration(jumps)*stormJump - stormMargin
}

func leaseOf(jumps int) time.Duration { return time.Duration(jumps)*stormJump + stormMargin }

func (s *storm) options(r *rand.Rand, e *stormEvent, instance string) (a stormAdded, o pgwake.EnqueueOptions) {
	delay := pick(r, []int{0, 0, 0, 1, 2})
	a = stormAdded{
		name: strconv.FormatInt(s.names.Add(1), 10), instance: instance, namespace: pick(r, stormNamespaces), key: pick(r, stormKeys), due: e.jumps + delay,
	}
	if instance != "" {
		a.namespace = pgwake.DefaultNamespace // so that it is known in which one a message's key counts
	}
	return a, pgwake.EnqueueOptions{Namespace: a.namespace, Priority: r.IntN(10), Delay: delayOf(delay), DedupKey: a.key}
}

func (s *storm) aWorkItem(r *rand.Rand, e *stormEvent) pgwake.WorkEnqueue {
	a, o := s.options(r, e, "")
	e.added = append(e.added, a)
	return pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: a.name}, EnqueueOptions: o}
}

func (s *storm) aMessage(r *rand.Rand, e *stormEvent) pgwake.MessageEnqueue {
	a, o := s.options(r, e, pick(r, stormInstances))
	e.added = append(e.added, a)
	return pgwake.MessageEnqueue{Message: pgwake.Message{Instance: a.instance, Kind: pgwake.MessageKind(a.name)}, EnqueueOptions: o}
}

// outcomes notes what became of what was enqueued.
func (e *stormEvent) outcomes(all []pgwake.Enqueued) {
	for i, o := range all {
		e.added[i].id, e.added[i].duplicate = o.ID, o.Duplicate
	}
}

// act makes one call, chosen at random.
func (s *storm) act(r *rand.Rand) {
	n := pick(r, s.nodes)
	work, hasWork := recent(s, r, &s.work)
	turn, hasTurn := recent(s, r, &s.turns)
	o := &pgwake.FetchOptions{NoWait: true}
	if r.IntN(3) == 0 {
		o.Namespaces = []string{pick(r, stormNamespaces)}
	}
	if r.IntN(10) == 0 {
		o.NoWait, o.PollTimeout = false, time.Millisecond
	}
	back := &pgwake.AbandonOptions{IgnoreAttempt: r.IntN(3) == 0}
	abandon := func(e *stormEvent) {
		e.ignore, e.delay = back.IgnoreAttempt, pick(r, []int{0, 0, 1, 2})
		back.Delay = delayOf(e.delay)
	}
	switch p := r.IntN(100); {
	case p < 2:
		s.jump()
	case p < 12:
		s.record("enqueue work", func(e *stormEvent) error {
			var batch []pgwake.WorkEnqueue
			for range 1 + r.IntN(3) {
				batch = append(batch, s.aWorkItem(r, e))
			}
			added, err := n.EnqueueForWorkerMany(tctx, batch)
			e.outcomes(added)
			return err
		})
	case p < 20:
		s.record("enqueue messages", func(e *stormEvent) error {
			var batch []pgwake.MessageEnqueue
			for range 1 + r.IntN(2) {
				batch = append(batch, s.aMessage(r, e))
			}
			added, err := n.EnqueueForOrchestratorMany(tctx, batch)
			e.outcomes(added)
			return err
		})
	case p < 38:
		s.fetchWork(n, o, 1+r.IntN(2), 1+r.IntN(3))
	case p < 60 && !hasTurn, p < 56:
		s.fetchTurn(n, o, 1+r.IntN(2))
	case p < 80 && !hasWork, p >= 80 && !hasTurn: // no token yet
	case p < 68:
		s.ackWork(r, n, work)
	case p < 74:
		s.record("abandon work", func(e *stormEvent) error {
			e.token = work
			abandon(e)
			return n.AbandonWorkItem(tctx, work, back)
		})
	case p < 80:
		s.record("renew work", func(e *stormEvent) error {
			e.token = work
			_, err := n.RenewWorkItemLock(tctx, work, leaseOf(1))
			return err
		})
	case p < 92:
		s.ackTurn(r, n, turn)
	case p < 96:
		s.record("abandon turn", func(e *stormEvent) error {
			e.token = turn.LockToken
			abandon(e)
			return n.AbandonOrchestrationItem(tctx, turn.LockToken, back)
		})
	default:
		s.record("renew turn", func(e *stormEvent) error {
			e.token = turn.LockToken
			_, err := n.RenewOrchestrationItemLock(tctx, turn.LockToken, leaseOf(1))
			return err
		})
	}
}

func (s *storm) fetchWork(n *node, o *pgwake.FetchOptions, lease, most int) *stormEvent {
	return s.record("fetch work", func(e *stormEvent) (err error) {
		e.lease, o.LockTimeout = lease, leaseOf(lease)
		e.items, err = n.FetchWorkItems(tctx, most, o)
		return err
	})
}

func (s *storm) fetchTurn(n *node, o *pgwake.FetchOptions, lease int) *stormEvent {
	return s.record("fetch turn", func(e *stormEvent) (err error) {
		e.lease, o.LockTimeout = lease, leaseOf(lease)
		e.turn, err = n.FetchOrchestrationItem(tctx, o)
		return err
	})
}

func (s *storm) ackWork(r *rand.Rand, n *node, token pgwake.LockToken) {
	s.record("ack work", func(e *stormEvent) error {
		e.token = token
		if r.IntN(2) == 0 {
			return n.AckWorkItem(tctx, token, nil)
		}
		m := s.aMessage(r, e)
		e.added[0].key, e.added[0].due = "", e.jumps // a completion has no options
		return n.AckWorkItem(tctx, token, &m.Message)
	})
}

// ackTurn decides as a runtime would: the next events of the history that the turn brought along, now and then one
// that is there already.
func (s *storm) ackTurn(r *rand.Rand, n *node, turn *pgwake.OrchestrationItem) {
	s.record("ack turn", func(e *stormEvent) error {
		e.token = turn.LockToken
		ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}
		for i := range r.IntN(3) {
			e.events = append(e.events, int64(len(turn.History)+1+i))
		}
		if len(turn.History) > 0 && r.IntN(5) == 0 {
			e.events = append(e.events, 1+r.Int64N(int64(len(turn.History))))
		}
		for _, id := range e.events {
			ack.History = append(ack.History, pgwake.Event{ID: id, Type: "e"})
		}
		for range r.IntN(2) {
			w := s.aWorkItem(r, e)
			w.DedupKey, e.added[len(e.added)-1].key = "", "" // the ack does not tell what was a duplicate
			ack.WorkItems = append(ack.WorkItems, w)
		}
		for range r.IntN(2) {
			m := s.aMessage(r, e)
			m.DedupKey, e.added[len(e.added)-1].key = "", ""
			ack.Messages = append(ack.Messages, m)
		}
		return n.AckOrchestrationItem(tctx, turn.LockToken, ack)
	})
}

// drain finishes whatever is left, once all leases and delays are over.
func (s *storm) drain() {
	for range 3 {
		s.jump()
	}
	n := s.nodes[0]
	for {
		work := s.fetchWork(n, &pgwake.FetchOptions{NoWait: true}, 1, pgwake.MaxFetch)
		for _, item := range work.items {
			s.record("ack work", func(e *stormEvent) error {
				e.token = item.LockToken
				return n.AckWorkItem(tctx, item.LockToken, nil)
			})
		}
		turn := s.fetchTurn(n, &pgwake.FetchOptions{NoWait: true}, 1)
		if turn.turn != nil {
			s.record("ack turn", func(e *stormEvent) error {
				e.token = turn.turn.LockToken
				return n.AckOrchestrationItem(tctx, e.token, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}})
			})
		}
		if work.err != nil && turn.err != nil || s.Failed() {
			return
		}
	}
}

func TestModel_EightGoroutinesCallAnything_EveryPromiseIsKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pool := n.userPool(t, 2*stormClients)
	s := &storm{T: t}
	for range 2 {
		p, err := pgwake.New(tctx, pool, &pgwake.Config{Schema: n.schema, Logger: silent})
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close(tctx)) }()
		s.nodes = append(s.nodes, &node{Provider: p, schema: n.schema})
	}
	seed, began := rand.Uint64(), time.Now()
	var wg sync.WaitGroup
	for client := range stormClients {
		r := rand.New(rand.NewPCG(seed, uint64(client)))
		wg.Go(func() {
			for i := 0; i < stormCalls && !t.Failed(); i++ {
				s.act(r)
			}
		})
	}
	wg.Wait()
	s.drain()
	if t.Failed() {
		return
	}
	require.Less(t, time.Since(began), stormMargin, "too slow for the margin between jumps and ends of leases")
	s.replay()
	t.Logf("%d calls in %v, %d work items and %d turns claimed, %d jumps", len(s.log), time.Since(began).Round(time.Millisecond), len(s.work), len(s.turns), s.jumps)
}

// The replay

// stormClaim is the claim of one thing, and what was done with its token.
type stormClaim struct {
	by      *stormEvent
	token   pgwake.LockToken
	uses    []*stormEvent // in any order
	holds   int           // until after this jump, not included
	end     *stormEvent   // the ack or the abandon that ended it; nil: its lease did
	attempt int
}

// settle finds out how long the claim held and what ended it, and checks every use of its token against that.
func (s *storm) settle(c *stormClaim) {
	c.holds = c.by.jumps + c.by.lease + 1
	renewed := -1
	for _, u := range c.uses {
		switch {
		case u.err != nil:
		case u.verb == "renew work", u.verb == "renew turn":
			if u.jumps > renewed { // those within one jump come to the same
				renewed, c.holds = u.jumps, u.jumps+2
			}
		default:
			require.Nil(s, c.end, "%s was acknowledged or abandoned twice", c.token)
			c.end = u
		}
	}
	for _, u := range c.uses {
		ended := u.jumps >= c.holds
		switch {
		case u.err == nil || errors.Is(u.err, pgwake.ErrDuplicateEvent): // the token held
			require.False(s, ended, "%s by %s after the lease had ended", u.verb, c.token)
			require.False(s, c.end != nil && c.end != u && c.end.ret < u.call, "%s by %s after it was used up", u.verb, c.token)
		default:
			require.True(s, ended || c.end != nil && c.end.call < u.ret, "%s by %s failed although nothing had ended the lease: %v", u.verb, c.token, u.err)
		}
	}
}

// follows makes sure that the claim came after what let go of the thing before it: prev, nil for the first claim.
func (s *storm) follows(c, prev *stormClaim, what string) {
	switch {
	case prev == nil:
	case prev.end == nil:
		require.GreaterOrEqual(s, c.by.jumps, prev.holds, "%s was claimed while %s held it", what, prev.token)
	default:
		require.Greater(s, c.by.ret, prev.end.call, "%s was claimed before %s was given back", what, prev.token)
	}
}

// pending is an item while it is replayed.
type pending struct {
	*stormAdded
	due, attempt int
}

// giveBack is what the end of a claim means for what is still there.
func (p *pending) giveBack(c *stormClaim) {
	if c.end == nil {
		p.due = c.holds
		return
	}
	p.due = c.end.jumps + c.end.delay
	if c.end.ignore {
		p.attempt--
	}
}

func (s *storm) replay() {
	uses := make(map[pgwake.LockToken][]*stormEvent)
	added := make(map[string]*stormAdded)
	for _, e := range s.log {
		if e.token != "" {
			uses[e.token] = append(uses[e.token], e)
		}
		for i := range e.added {
			if e.err == nil {
				added[e.added[i].name] = &e.added[i]
			}
		}
	}
	work := make(map[string][]*stormClaim)  // by name
	turns := make(map[string][]*stormClaim) // by instance
	tokens := make(map[pgwake.LockToken]bool)
	claim := func(e *stormEvent, token pgwake.LockToken, attempt int) *stormClaim {
		require.False(s, tokens[token], "token %s was given out twice", token)
		tokens[token] = true
		c := &stormClaim{by: e, token: token, uses: uses[token], attempt: attempt}
		s.settle(c)
		return c
	}
	for _, e := range s.log {
		for i, item := range e.items {
			require.True(s, i == 0 || e.items[i-1].Priority >= item.Priority, "the order of a batch")
			work[item.Name] = append(work[item.Name], claim(e, item.LockToken, item.Attempt))
		}
		if e.turn != nil {
			turns[e.turn.Instance] = append(turns[e.turn.Instance], claim(e, e.turn.LockToken, e.turn.Attempt))
		}
	}
	for name, claims := range work {
		a := added[name]
		require.True(s, a != nil && a.instance == "" && !a.duplicate, "work item %s was claimed, and nobody added it", name)
		s.replayItem(a, claims)
	}
	messages := make(map[string][]*pending) // by instance
	for _, a := range added {
		switch {
		case a.duplicate:
		case a.instance == "":
			require.NotEmpty(s, work[a.name], "work item %s was lost", a.name)
		default:
			messages[a.instance] = append(messages[a.instance], &pending{stormAdded: a, due: a.due})
		}
	}
	for instance := range maps.Keys(messages) {
		s.replayInstance(instance, turns[instance], messages[instance])
	}
	finished := func(a *stormAdded) *stormEvent {
		claims := work[a.name]
		if a.instance != "" {
			claims = turns[a.instance]
			claims = slices.DeleteFunc(slices.Clone(claims), func(c *stormClaim) bool {
				return !slices.ContainsFunc(c.by.turn.Messages, func(m pgwake.ClaimedMessage) bool { return string(m.Kind) == a.name })
			})
		}
		return claims[len(claims)-1].end // sorted by the replays
	}
	s.replayKeys(added, finished)
	rows := s.nodes[0].rows(s)
	require.Zero(s, rows["worker_queue"]+rows["orchestrator_queue"]+rows["instance_locks"], "%v", rows)
}

func inOrder(claims []*stormClaim) {
	slices.SortFunc(claims, func(a, b *stormClaim) int { return cmp.Compare(a.by.ret, b.by.ret) })
}

// replayItem follows a work item from its enqueue to its ack.
func (s *storm) replayItem(a *stormAdded, claims []*stormClaim) {
	inOrder(claims) // no claim returns before the one that follows can have begun: follows says so
	p := &pending{stormAdded: a, due: a.due}
	var prev *stormClaim
	for i, c := range claims {
		what := "work item " + a.name
		s.follows(c, prev, what)
		require.Greater(s, c.by.ret, a.by.call, "%s was claimed before it was enqueued", what)
		require.GreaterOrEqual(s, c.by.jumps, p.due, "%s was claimed before it was due", what)
		p.attempt++
		require.Equal(s, p.attempt, c.attempt, "attempts of %s", what)
		acked := c.end != nil && c.end.verb == "ack work"
		require.Equal(s, i == len(claims)-1, acked, "%s is acknowledged once, and then it is gone", what)
		p.giveBack(c)
		prev = c
	}
}

// replayInstance follows an instance through its turns.
func (s *storm) replayInstance(instance string, turns []*stormClaim, messages []*pending) {
	inOrder(turns)
	var history []int64
	var prev *stormClaim
	for _, c := range turns {
		turn := c.by.turn
		what := fmt.Sprintf("the turn %s of %s", c.token, instance)
		s.follows(c, prev, what)
		var ids []int64
		for _, e := range turn.History {
			ids = append(ids, e.ID)
		}
		require.Equal(s, history, ids, "history in %s", what)

		var in []*pending
		most := 0
		for _, m := range turn.Messages {
			at := slices.IndexFunc(messages, func(p *pending) bool { return p.name == string(m.Kind) })
			require.GreaterOrEqual(s, at, 0, "%s has message %s, which nobody sent or which was acknowledged before", what, m.Kind)
			p := messages[at]
			require.Greater(s, c.by.ret, p.by.call, "%s has message %s before it was sent", what, m.Kind)
			require.GreaterOrEqual(s, c.by.jumps, p.due, "%s has message %s before it was due", what, m.Kind)
			p.attempt++
			require.Equal(s, p.attempt, m.Attempt, "attempts of message %s", m.Kind)
			most = max(most, m.Attempt)
			require.True(s, p.id == 0 || p.id == m.ID, "id of message %s", m.Kind)
			p.id = m.ID
			if len(in) > 0 {
				before := in[len(in)-1]
				require.Less(s, before.id, p.id, "order in %s", what)
				require.False(s, p.by.ret < before.by.call, "%s has message %s after %s, which was sent later", what, p.name, before.name)
			}
			in = append(in, p)
		}
		require.NotEmpty(s, in, what)
		require.Equal(s, most, c.attempt, "attempts of %s", what)
		// Whatever was there when the turn was asked for is in it. If the turn before was being given back at that
		// moment, then what it gave back may be due a moment later.
		if prev == nil || prev.end == nil || prev.end.ret < c.by.call {
			for _, p := range messages {
				if p.by.ret < c.by.call && p.due <= c.by.jumps {
					require.Contains(s, in, p, "%s lacks message %s", what, p.name)
				}
			}
		}
		for _, u := range c.uses {
			taken := slices.ContainsFunc(u.events, func(id int64) bool { return slices.Contains(history, id) })
			if u.err == nil || errors.Is(u.err, pgwake.ErrDuplicateEvent) {
				require.Equal(s, taken, u.err != nil, "%s with events %v after %v", u.verb, u.events, history)
			}
		}
		for _, p := range in {
			p.giveBack(c)
		}
		if c.end != nil && c.end.verb == "ack turn" {
			history = append(history, c.end.events...)
			messages = slices.DeleteFunc(messages, func(p *pending) bool { return slices.Contains(in, p) })
		}
		prev = c
	}
	require.Empty(s, messages, "messages of %s were lost", instance)
	stored, err := s.nodes[0].ReadHistory(tctx, instance)
	require.NoError(s, err)
	var ids []int64
	for _, e := range stored {
		ids = append(ids, e.ID)
	}
	require.Equal(s, history, ids, "history of %s", instance)
}

// replayKeys makes sure that a key was queued once at a time, and that a duplicate had something to be one of.
func (s *storm) replayKeys(added map[string]*stormAdded, finished func(*stormAdded) *stormEvent) {
	byKey := make(map[string][]*stormAdded)
	for _, a := range added {
		if a.key != "" {
			scope := fmt.Sprint(a.instance == "", a.namespace, a.key)
			byKey[scope] = append(byKey[scope], a)
		}
	}
	for key, all := range byKey {
		var queued []*stormAdded
		for _, a := range all {
			if a.duplicate {
				continue
			}
			for _, q := range queued { // one was gone when the other came
				require.True(s, finished(q).call < a.by.ret || finished(a).call < q.by.ret, "key %s was queued twice at once", key)
			}
			queued = append(queued, a)
		}
		for _, a := range all {
			if !a.duplicate {
				continue
			}
			require.True(s, slices.ContainsFunc(queued, func(q *stormAdded) bool {
				return q.by.call < a.by.ret && finished(q).ret > a.by.call && (a.id == q.id || a.id == 0)
			}), "%s was a duplicate of nothing that was queued with key %s", a.name, key)
		}
	}
}
