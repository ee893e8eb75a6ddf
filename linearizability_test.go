package pgwake_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: does one item behave as if whatever is done to it at once were done one after the other?
//
// Each history is short: 8 goroutines on two nodes claim, acknowledge, abandon and renew one item, or let its
// lease end, two operations each, with every token that any of them has seen so far. Porcupine then looks for an
// order of the operations that respects who had returned before whom was called, and in which a queue of one
// item, done by one caller at a time, would have given the same answers. Tests of single races ask for what
// somebody thought of; this one finds what nobody did.

const (
	linearClients = 8 // goroutines of a history
	linearEach    = 2 // operations of each
	linearAtOnce  = 4 // histories at once, each on an item of its own
)

// linearHistories is how many histories of each queue are checked: few, or by PGWAKE_HISTORIES=10000 as many as
// it takes to believe it.
func linearHistories(t *testing.T) int {
	t.Helper()
	text := os.Getenv("PGWAKE_HISTORIES")
	if text == "" {
		return testsize.Of(60, 120)
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "PGWAKE_HISTORIES")
	require.Positive(t, n, "PGWAKE_HISTORIES")
	return n
}

// linearVerb is what can be done to the item.
type linearVerb int

const (
	linearClaim linearVerb = iota
	linearAck
	linearAbandon
	linearRenew
	linearExpire // time passes: a lease ends, a delay is over
	linearRead   // backstage, when all is quiet
)

func (v linearVerb) String() string {
	return [...]string{"claim", "ack", "abandon", "renew", "expire", "read"}[v]
}

// linearInput is what an operation was asked to do.
type linearInput struct {
	verb   linearVerb
	token  pgwake.LockToken
	delay  bool // abandon: not due before time passes
	ignore bool // abandon: this attempt does not count
}

// linearOutput is what it answered.
type linearOutput struct {
	ok      bool // claimed; the token held; there was something for time to end; the item exists
	token   pgwake.LockToken
	attempt int

	// contended: another operation was under way at some moment of this one. See linearModel.
	contended bool
}

// linearState is an item. Its lease holds while token is not empty.
type linearState struct {
	gone, delayed bool
	token         pgwake.LockToken
	attempts      int
}

func (s linearState) due() bool { return !s.gone && !s.delayed && s.token == "" }

// linearModel is the queue of one item. A claim that meets a row which somebody else has locked at that very
// moment passes it over instead of waiting, even if that somebody will then leave it as it is, as a verb whose
// token turns out to be stale does. So what finds nothing among others proves nothing, and only with mayMiss is
// such a claim right to find nothing although the item is due. One that nobody disturbs must find it always.
func linearModel(mayMiss bool) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return linearState{} },
		Step: func(state, input, output any) (bool, any) {
			s, in, out := state.(linearState), input.(linearInput), output.(linearOutput)
			switch in.verb {
			case linearClaim:
				if !out.ok {
					return !s.due() || mayMiss && out.contended, s
				}
				held := s.token
				legal := s.due() && out.attempt == s.attempts+1 && out.token != held
				s.token, s.attempts = out.token, s.attempts+1
				return legal, s
			case linearExpire:
				legal := out.ok == (!s.gone && (s.token != "" || s.delayed))
				s.token, s.delayed = "", false
				return legal, s
			case linearRead:
				return out.ok == !s.gone && (s.gone || out.attempt == s.attempts), s
			}
			holds := !s.gone && s.token == in.token && in.token != ""
			if out.ok != holds || !holds {
				return out.ok == holds, s
			}
			switch in.verb {
			case linearAck:
				s = linearState{gone: true}
			case linearAbandon:
				s.token, s.delayed = "", in.delay
				if in.ignore {
					s.attempts--
				}
			case linearRenew:
			}
			return true, s
		},
		DescribeOperation: func(input, output any) string {
			in, out := input.(linearInput), output.(linearOutput)
			return fmt.Sprintf("%v %+v -> %+v", in.verb, in, out)
		},
	}
}

// linearQueue is one of the queues, as far as one item of it goes.
type linearQueue struct {
	add     func(*testing.T, *node, string) int64 // one item, in a namespace of its own
	claim   func(*node, *pgwake.FetchOptions) (pgwake.LockToken, int, error)
	ack     func(*node, pgwake.LockToken) error
	abandon func(*node, pgwake.LockToken, *pgwake.AbandonOptions) error
	renew   func(*node, pgwake.LockToken) error
	delays  bool // whether an abandon may come with a delay

	// expire is a statement that lets the item's time pass, by putting the instant that it waits for far into the
	// past. A verb may have read the clock before it had to wait for the row: by that clock the instant has
	// passed as well, so time passes at one moment for all.
	expire []string
	read   string // the attempts, if there is a row
}

var linearWork = linearQueue{
	add: func(t *testing.T, n *node, namespace string) int64 {
		return n.enqueueWith(t, "item", &pgwake.EnqueueOptions{Namespace: namespace}).ID
	},
	claim: func(n *node, o *pgwake.FetchOptions) (pgwake.LockToken, int, error) {
		item, err := n.FetchWorkItem(tctx, o)
		if err != nil {
			return "", 0, err
		}
		return item.LockToken, item.Attempt, nil
	},
	ack: func(n *node, token pgwake.LockToken) error { return n.AckWorkItem(tctx, token, nil) },
	abandon: func(n *node, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
		return n.AbandonWorkItem(tctx, token, o)
	},
	renew: func(n *node, token pgwake.LockToken) error {
		_, err := n.RenewWorkItemLock(tctx, token, lease)
		return err
	},
	delays: true,
	expire: []string{`UPDATE worker_queue SET visible_at = '2000-01-01' WHERE id = $1 AND visible_at > clock_timestamp()`},
	read:   `SELECT attempt_count FROM worker_queue WHERE id = $1`,
}

var linearTurn = linearQueue{
	add: func(t *testing.T, n *node, namespace string) int64 {
		// A start, so that no fetch of another history takes the lock for a moment to see whether the namespace is right.
		return n.sendWith(t, pgwake.Message{Instance: namespace, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: namespace}).ID
	},
	claim: func(n *node, o *pgwake.FetchOptions) (pgwake.LockToken, int, error) {
		turn, err := n.FetchOrchestrationItem(tctx, o)
		if err != nil {
			return "", 0, err
		}
		return turn.LockToken, turn.Attempt, nil
	},
	ack: func(n *node, token pgwake.LockToken) error {
		return n.AckOrchestrationItem(tctx, token, pgwake.OrchestrationAck{})
	},
	abandon: func(n *node, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
		return n.AbandonOrchestrationItem(tctx, token, o)
	},
	renew: func(n *node, token pgwake.LockToken) error {
		_, err := n.RenewOrchestrationItemLock(tctx, token, lease)
		return err
	},
	// The lock first, as every verb does, and then what the turn took; both at the same instant.
	expire: []string{
		`UPDATE instance_locks l SET locked_until = '2000-01-01'
		  WHERE l.locked_until > clock_timestamp() AND l.instance_id = (SELECT q.instance_id FROM orchestrator_queue q WHERE q.id = $1)`,
		`UPDATE orchestrator_queue q SET visible_at = l.locked_until FROM instance_locks l
		  WHERE q.id = $1 AND l.instance_id = q.instance_id AND l.lock_token = q.lock_token
		    AND l.locked_until <= clock_timestamp() AND q.visible_at > clock_timestamp()`,
	},
	read: `SELECT attempt_count FROM orchestrator_queue WHERE id = $1`,
}

// passes lets the item's time pass, and reports whether there was something for it to end.
func (q *linearQueue) passes(n *node, id int64) (bool, error) {
	var b pgx.Batch
	b.Queue(`SELECT set_config('search_path', $1, true)`, n.quoted())
	for _, sql := range q.expire {
		b.Queue(sql, id)
	}
	results := backstage.peek.SendBatch(tctx, &b) // one transaction
	_, err := results.Exec()
	var met int64
	for range q.expire {
		tag, e := results.Exec()
		err, met = errors.Join(err, e), met+tag.RowsAffected()
	}
	return met > 0, errors.Join(err, results.Close())
}

// linearHistory is one history while it comes about.
type linearHistory struct {
	queue     *linearQueue
	nodes     []*node
	namespace string
	item      int64
	began     time.Time

	mu     sync.Mutex
	tokens []pgwake.LockToken
	ops    []porcupine.Operation
}

// perform does what in says, and records when it was called, what it answered, and when.
func (h *linearHistory) perform(client int, in linearInput) error {
	n := h.nodes[client%len(h.nodes)]
	var out linearOutput
	var err error
	called := time.Since(h.began)
	switch in.verb {
	case linearClaim:
		out.token, out.attempt, err = h.queue.claim(n, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: []string{h.namespace}})
	case linearAck:
		err = h.queue.ack(n, in.token)
	case linearAbandon:
		o := &pgwake.AbandonOptions{IgnoreAttempt: in.ignore}
		if in.delay {
			o.Delay = lease
		}
		err = h.queue.abandon(n, in.token, o)
	case linearRenew:
		err = h.queue.renew(n, in.token)
	case linearExpire:
		out.ok, err = h.queue.passes(n, h.item)
	}
	returned := time.Since(h.began)
	switch {
	case errors.Is(err, pgwake.ErrNoWork), errors.Is(err, pgwake.ErrLockLost):
	case err != nil:
		return fmt.Errorf("%v: %w", in.verb, err)
	case in.verb != linearExpire:
		out.ok = true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if out.token != "" {
		h.tokens = append(h.tokens, out.token)
	}
	h.ops = append(h.ops, porcupine.Operation{
		ClientId: client, Input: in, Output: out, Call: called.Nanoseconds(), Return: returned.Nanoseconds(),
	})
	return nil
}

// draw chooses what a client does next.
func (h *linearHistory) draw(r *rand.Rand) linearInput {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tokens) == 0 {
		return linearInput{verb: linearClaim}
	}
	in := linearInput{token: h.tokens[len(h.tokens)-1]} // the latest is good most of the time
	if r.IntN(4) == 0 {
		in.token = h.tokens[r.IntN(len(h.tokens))]
	}
	switch p := r.IntN(100); {
	case p < 35:
		return linearInput{verb: linearClaim}
	case p < 55:
		return linearInput{verb: linearExpire}
	case p < 65:
		in.verb = linearAck // ends the history, so not often
	case p < 85:
		in.verb, in.delay, in.ignore = linearAbandon, h.queue.delays && r.IntN(4) == 0, r.IntN(3) == 0
	default:
		in.verb = linearRenew
	}
	return in
}

// run lets the clients loose, and looks at the item when they are done: with nobody around, and after its time
// has passed, it must be there unless it was acknowledged.
func (h *linearHistory) run(t *testing.T, seed uint64) {
	h.item = h.queue.add(t, h.nodes[0], h.namespace)
	h.began = time.Now()
	require.NoError(t, h.perform(0, linearInput{verb: linearClaim})) // or most of the operations would have no token
	var wg sync.WaitGroup
	for client := range linearClients {
		r := rand.New(rand.NewPCG(seed, uint64(client)))
		wg.Go(func() {
			for range linearEach {
				if err := h.perform(client, h.draw(r)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	at := time.Since(h.began).Nanoseconds()
	attempts := query[int](t, h.nodes[0], h.queue.read, h.item)
	read := linearOutput{ok: len(attempts) > 0}
	if read.ok {
		read.attempt = attempts[0]
	}
	h.ops = append(h.ops, porcupine.Operation{Input: linearInput{verb: linearRead}, Output: read, Call: at, Return: time.Since(h.began).Nanoseconds()})
	require.NoError(t, h.perform(0, linearInput{verb: linearExpire}))
	require.NoError(t, h.perform(0, linearInput{verb: linearClaim}))
	if last := h.ops[len(h.ops)-1].Output.(linearOutput); last.ok {
		require.NoError(t, h.perform(0, linearInput{verb: linearAck, token: last.token})) // the namespace is free again
	}
	for i := range h.ops {
		out := h.ops[i].Output.(linearOutput)
		out.contended = slices.ContainsFunc(h.ops, func(o porcupine.Operation) bool {
			return o != h.ops[i] && o.Call <= h.ops[i].Return && o.Return >= h.ops[i].Call
		})
		h.ops[i].Output = out
	}
}

// String lists the operations in the order of their calls, with times in microseconds.
func (h *linearHistory) String() string {
	ops := slices.Clone(h.ops)
	slices.SortFunc(ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var s strings.Builder
	for _, o := range ops {
		fmt.Fprintf(&s, "\n%7d..%-7d client %d: %v", o.Call/1000, o.Return/1000, o.ClientId, linearModel(true).DescribeOperation(o.Input, o.Output))
	}
	return s.String()
}

func TestLinearizability_WorkItem_ClaimAckAbandonRenewExpire(t *testing.T) {
	t.Parallel()
	checkLinearizable(t, &linearWork)
}

func TestLinearizability_Turn_ClaimAckAbandonRenewExpire(t *testing.T) {
	t.Parallel()
	checkLinearizable(t, &linearTurn)
}

func checkLinearizable(t *testing.T, q *linearQueue) {
	n := newNode(t, nil)
	pool := n.userPool(t, linearAtOnce*linearClients/2)
	nodes := make([]*node, 2)
	for i := range nodes {
		p, err := pgwake.New(tctx, pool, &pgwake.Config{Schema: n.schema, Logger: silent})
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close(tctx)) }()
		nodes[i] = &node{Provider: p, schema: n.schema}
	}
	histories, seed := linearHistories(t), rand.Uint64() // of what is asked; when it runs is not ours to repeat
	strict, lenient := linearModel(false), linearModel(true)
	var missed, claims, checked, next atomic.Int64
	began := time.Now()
	var wg sync.WaitGroup
	for slot := range linearAtOnce {
		wg.Go(func() {
			for i := next.Add(1); int(i) <= histories && !t.Failed(); i = next.Add(1) {
				h := &linearHistory{queue: q, nodes: nodes, namespace: fmt.Sprintf("slot-%d", slot)}
				h.run(t, seed+uint64(i))
				if !porcupine.CheckOperations(strict, h.ops) {
					missed.Add(1)
					if !porcupine.CheckOperations(lenient, h.ops) {
						t.Errorf("history %d of seed %d is that of no order of its operations:%v", i, seed, h)
					}
				}
				checked.Add(1)
				claims.Add(int64(len(h.tokens)))
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	t.Logf("%d histories of %d to %d operations in %v, %d claims; in %d a claim passed over an item that another held for a moment",
		checked.Load(), linearClients*linearEach+4, linearClients*linearEach+5, time.Since(began).Round(time.Millisecond), claims.Load(), missed.Load())
	require.EqualValues(t, histories, checked.Load())
	require.Greater(t, claims.Load(), int64(2*histories), "hardly anything happened")
}
