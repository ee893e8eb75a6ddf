package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what do the processes do all day?
//
// Producers enqueue; workers and orchestrators take what is due; and these send probes to all processes, each of
// which takes its own, so that everyone's way from notification to item in hand is measured. Probes are rare: a
// wake-up that is lost must not be made good by the next one. Each step goes into the ledger.

// The roles of processes.
const (
	producer     = "producer"
	worker       = "worker"
	orchestrator = "orchestrator"
	dispatcher   = "dispatcher" // enqueues and takes what is limited, in a schema of its own (limited.go)
	engine       = "engine"     // submits task graphs and runs their steps, likewise (graphs.go)
	busNode      = "bus node"   // emits and handles events, likewise (bus.go)
	idler        = "idler"      // does nothing but take its probes
	soaker       = "soaker"     // does all of it, and more, while nothing goes wrong
)

// What a handler is to do with a work item. All but the probe begin with an ordinary claim.
const (
	doAck     = "ack"
	doEffect  = "effect"  // a row in table effects and the ack, in one transaction
	doAbandon = "abandon" // give the first claim back, due later; then effect
	doHang    = "hang"    // hang until the first lease has ended, and try the effect all the same
	doSolo    = "solo"    // the same, where nobody else could have claimed it meanwhile
	doRenew   = "renew"   // renew the lease, and ack after it would have ended
	doReply   = "reply"   // ack with a message to an instance
	doProbe   = "probe"

	doLimited   = "limited"    // have it for a while, under a limit
	doLimitedTx = "limited tx" // the same, with an effect
	doTurn      = "turn"       // a message: into the history
)

// hasEffect reports whether an item that is gone has left exactly one row in table effects.
func hasEffect(do string) bool {
	return do == doEffect || do == doAbandon || do == doHang || do == doSolo || do == doLimitedTx
}

// effectsTable is where transactional effects go. It has no key, so that a second one is seen.
const effectsTable = `CREATE TABLE effects (key text NOT NULL, token text NOT NULL)`

const insertEffect = `INSERT INTO effects (key, token) VALUES ($1, $2)`

// The namespaces of ordinary work items, and how many instances there are.
var namespaces = []string{"default", "bulk"}

const instances = 8

func probeNamespace(node int) string { return fmt.Sprintf("probe-%d", node) }

// solo is a namespace with one dispatcher.
const solo = "solo"

// job is what an item or a message carries.
type job struct {
	Key      string `json:"key"`
	Do       string `json:"do"`
	Instance string `json:"instance,omitempty"` // whom to reply to
	Out      bool   `json:"out,omitempty"`      // the turn sends a work item, which replies
	Again    bool   `json:"again,omitempty"`    // the turn sends the instance another message, delayed
}

func (j job) json() json.RawMessage {
	text, _ := json.Marshal(j)
	return text
}

// remembered is the content of an event of a history.
type remembered struct {
	Key   string   `json:"key"`
	ID    int64    `json:"id"` // of the message
	Token string   `json:"token"`
	Sends []string `json:"sends,omitempty"` // the keys of what the turn sent on behalf of the message
}

type workload struct {
	order
	ledger   *ledger
	provider *pgwake.Provider
	pool     *pgxpool.Pool
	loops    sync.WaitGroup

	alive context.Context // until the process is to end
	die   context.CancelFunc
	loud  context.Context // until it is to enqueue no more
	quiet context.CancelFunc

	resting atomic.Bool // it is to enqueue probes alone

	hogging context.CancelFunc // see hog

	pace    atomic.Pointer[string] // at which it is to enqueue while it soaks
	members members

	engine   *taskgraph.Engine
	bus      *eventbus.Bus
	busNodes []*eventbus.Node
}

// begin starts the loops of the role.
func (w *workload) begin() {
	if w.Role == soaker {
		w.soak()
		return
	}
	switch w.Role {
	case dispatcher:
		w.loop("produce", w.produceLimited)
		w.loop("dispatch", w.dispatchLimited)
		return
	case engine:
		w.beginEngine()
		return
	case busNode:
		w.beginBus()
		return
	}
	if w.Role != idler {
		w.loop("probe", w.sendProbes)
	}
	own := &pgwake.FetchOptions{LockTimeout: lease, Namespaces: []string{probeNamespace(w.Node)}}
	for i := range 2 {
		w.loop(fmt.Sprint("probed", i), func(rng *rand.Rand) { w.fetchWork(rng, own, 1) })
	}
	switch w.Role {
	case producer:
		for _, name := range []string{"a", "b", "c"} {
			w.loop("produce "+name, func(rng *rand.Rand) { w.produce(rng, name) })
		}
	case worker:
		w.loop("sessions", w.ownSessions)
		for i := range 7 {
			o := &pgwake.FetchOptions{LockTimeout: lease, Namespaces: namespaces, PollTimeout: time.Second}
			w.loop(fmt.Sprint("work", i), func(rng *rand.Rand) { w.fetchWork(rng, o, 1) })
		}
		if w.Node == separates {
			w.loop("solo", func(rng *rand.Rand) {
				w.fetchWork(rng, &pgwake.FetchOptions{LockTimeout: lease, Namespaces: []string{solo}}, 1)
			})
		}
		w.loop("batches", func(rng *rand.Rand) {
			w.fetchWork(rng, &pgwake.FetchOptions{LockTimeout: lease, Namespaces: namespaces[1:]}, 5)
		})
	case orchestrator:
		w.loop("sessions", w.ownSessions)
		for i := range 4 {
			w.loop(fmt.Sprint("turns", i), w.fetchTurns)
		}
	}
}

// loop runs f in a goroutine with random numbers of its own, which the seed determines.
func (w *workload) loop(name string, f func(*rand.Rand)) {
	h := fnv.New64()
	fmt.Fprint(h, w.process(), name)
	rng := rand.New(rand.NewPCG(w.Seed, h.Sum64()))
	w.loops.Go(func() { f(rng) })
}

var errRevoked = errors.New("to be rolled back")

// enqueue makes the call between the lines that say what it is to do and what it did.
func (w *workload) enqueue(lines []entry, call func(context.Context) ([]pgwake.Enqueued, error)) {
	w.ledger.write(sending, lines...)
	ctx, cancel := verb(context.Background())
	defer cancel()
	added, err := call(ctx)
	switch {
	case errors.Is(err, errRevoked):
		w.ledger.write(revoked, lines...)
	case err != nil:
		w.failed(ctx, "enqueue", err)
	default:
		for i, a := range added {
			lines[i] = entry{Key: lines[i].Key, ID: a.ID, Duplicate: a.Duplicate, Due: w.local(a.DueAt)}
		}
		w.ledger.write(sent, lines...)
	}
}

// calling is the context of a call, which knows since when.
type calling struct {
	context.Context
	since  time.Time
	fickle bool // it may end at any moment, since somebody loses patience or a process is to end, and then so does the call
}

// verb begins a call that has no reason to take longer than verbTimeout.
func verb(of context.Context) (calling, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(of, verbTimeout)
	return calling{Context: ctx, since: time.Now()}, cancel
}

// fickle begins a call that may take as long as its context.
func fickle(ctx context.Context) calling { return calling{ctx, time.Now(), true} }

// failed takes note of an error, but for those that whoever calls has brought about: it held a lease for too long, or gave up.
// Amid faults many have a reason; see checkErrors for when they do not.
func (w *workload) failed(ctx calling, what string, err error) {
	var ofVerb *pgwake.Error // or it is the pool's own
	e := entry{Since: ctx.since, Err: fmt.Sprintf("%s: %.300v", what, err)}
	switch gaveUp := ctx.Err(); {
	case errors.Is(err, pgwake.ErrLockLost), errors.Is(err, pgwake.ErrClosed):
	case errors.Is(gaveUp, context.Canceled), ctx.fickle && gaveUp != nil:
	case errors.As(err, &ofVerb) && !(ofVerb.Retryable && w.Role != soaker) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled):
		w.ledger.write(wrong, e)
	default:
		w.ledger.write(erred, e)
	}
}

// renew makes the lease of some claims longer.
func (w *workload) renew(claims []entry, call func(context.Context) (time.Time, error)) bool {
	ctx, cancel := verb(context.Background())
	defer cancel()
	until, err := call(ctx)
	if err != nil {
		w.failed(ctx, "renew", err)
		return false
	}
	for i := range claims {
		claims[i].Until = w.local(until)
	}
	w.ledger.write(renewed, claims...)
	return true
}

// finish acks or gives back some claims, which sends something as well, between the lines that say so.
func (w *workload) finish(how string, claims, sends []entry, call func(context.Context) error) {
	if len(sends) > 0 {
		w.ledger.write(sending, sends...)
	}
	w.ledger.write(how, claims...)
	ctx, cancel := verb(context.Background())
	defer cancel()
	err := call(ctx)
	switch {
	case errors.Is(err, pgwake.ErrLockLost):
		w.ledger.write(refused, claims...)
	case err != nil:
		w.failed(ctx, how, err)
	default:
		outcome := acked
		if how == returning {
			outcome = returned
		}
		w.ledger.write(outcome, claims...)
		if len(sends) > 0 {
			w.ledger.write(sent, sends...)
		}
	}
}

// local is the instant of this machine's clock at which the server's shows t.
func (w *workload) local(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.Add(-w.Ahead)
}

func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rng.Int64N(int64(most-least)+1))
}

// rest is the pause of a producer after what it began then: the longer the fewer processors there are, and what took long is done less
// often. So the load is what the machine can bear: things are to be broken by the faults, and not by the load.
func (w *workload) rest(rng *rand.Rand, began time.Time, least, most time.Duration) {
	pause := max(time.Duration(w.Rest*float64(between(rng, least, most))), min(10*time.Since(began), 2*time.Second))
	for nap(w.loud, pause) && w.resting.Load() {
	}
}

// restProbes is the pause of who sends probes through a layer: in a calm as long as it was told, and else longer, as for rest.
func (w *workload) restProbes(pause time.Duration) {
	for begun := time.Now(); nap(w.loud, 50*time.Millisecond); {
		if waited := time.Since(begun); waited >= time.Duration(w.Rest*float64(pause)) || w.resting.Load() && waited >= pause {
			return
		}
	}
}

// nap waits for d and reports true, or false if ctx ends first.
func nap(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
