package pgwake

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: how do those who wait for an instance learn that it has changed? And those who wait for a new namespace.
//
// A transaction that changes the custom status of an instance, or the status of its execution, or deletes it, notifies
// in that transaction (SQL function notify_instance), or its Provider does right after the commit (coalescer.go). The
// payload is a hash of the instance's id: two instances that share one cost a look too many. One goroutine looks on
// behalf of all waiters of the node: at those whom a notification concerns, one query at a time, so whatever comes in
// during one is dealt with by the next.
//
// Notifications alone have it look only with credit, or a little later (trust.go).
//
// Invariants
//
//	(1) A waiter is registered, and due, before the query that reads for it first begins.
//	(2) A waiter that is due is read by a query that begins after it became due; only a query that begins makes it
//	    undue, and one that fails makes those that it did not answer due again.
//	(3) A waiter becomes due with every notification that it may concern; whenever the node begins to listen, since
//	    what was notified before went unheard; with every fallback, but one that waits for a namespace only with a fallback that
//	    sees others than it knows; and while the node does not listen, or
//	    hibernates, at every poll that is not skipped (breaker.go).
//
// So no change is lost: one that was committed before the first query is seen by it, and one after is notified after
// the waiter was registered, by the transaction or right after its commit (if that process dies in between, the
// fallback finds it), or meets a node that does not listen, and polls. While nothing changes and the node
// listens there is no query at all.

type waits struct {
	e    *engine
	bell bell
	done chan struct{} // closed by close

	// look asks the database; tests replace it.
	look func(ctx context.Context, asked []question, tell func(i int, a answer)) error

	mu      sync.Mutex
	closed  bool
	count   int
	watches map[*Watch]struct{}              // of layers, which look by themselves
	byHash  map[uint64]map[*waiting]struct{} // by instance
	due     map[*waiting]struct{}
	err     error // of the last query

	urgent bool      // of those who are due some are not, or not only, because of a notification
	anyone bool      // a notification has made everyone due
	readAt time.Time // local: when to read for those whom notifications have made due, without credit (trust.go); zero: at once
}

// question is what a waiter wants to know. Waiters with equal questions are read together.
type question struct {
	instance string
	outcome  bool  // how the instance ended; otherwise: its custom status
	lastSeen int64 // version of the custom status
	known    int64 // the incarnation of the instance that was read last; 0: there was none

	// Or, of no instance, which namespaces there are besides these, which are joined by commas; known is then a hash of the ids of
	// those that were read last.
	namespaces bool
	besides    string
}

// answer is what the database says to a question: which incarnation of the instance there is and, if complete, what
// the waiter waits for.
type answer struct {
	known     int64 // 0: none
	complete  bool
	value     *string // custom status or output
	version   int64
	execution int64
	status    string
}

// waiting is a waiter. Its channel holds one verdict.
type waiting struct {
	question
	hash     uint64
	verdicts chan verdict
}

type verdict struct {
	answer
	err error
}

func newWaits(e *engine) *waits {
	w := &waits{e: e, bell: newBell(), done: make(chan struct{}),
		byHash: make(map[uint64]map[*waiting]struct{}), due: make(map[*waiting]struct{}), watches: make(map[*Watch]struct{})}
	w.look = w.ask
	return w
}

// ofNoInstance is the hash of those who wait for namespaces.
var ofNoInstance = hashOf("")

// hashOf is what notify_instance sends, as a number.
func hashOf(instance string) uint64 {
	sum := sha256.Sum256([]byte(instance))
	return binary.BigEndian.Uint64(sum[:])
}

// wait returns the complete answer to a question. It holds no connection meanwhile.
func (w *waits) wait(ctx context.Context, q question) (answer, error) {
	x, err := w.enter(q)
	if err != nil {
		return answer{}, err
	}
	defer w.leave(x)
	select {
	case v := <-x.verdicts:
		return v.answer, v.err
	case <-w.done:
		return answer{}, ErrClosed
	case <-ctx.Done():
		return answer{}, w.cutShort(ctx.Err())
	}
}

// cutShort is the error of a wait that ended with its context: if the database could not be read, that may be why.
func (w *waits) cutShort(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return fmt.Errorf("%w; the last look failed: %w", err, w.err)
	}
	return err
}

func (w *waits) enter(q question) (*waiting, error) {
	x := &waiting{question: q, hash: hashOf(q.instance), verdicts: make(chan verdict, 1)}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, ErrClosed
	}
	if w.byHash[x.hash] == nil {
		w.byHash[x.hash] = make(map[*waiting]struct{})
	}
	w.byHash[x.hash][x] = struct{}{}
	w.count++
	w.due[x] = struct{}{} // invariant (1)
	w.urgent = true
	w.bell.ring()
	w.e.stir()
	return x, nil
}

// leave removes a waiter, if it is still registered.
func (w *waits) leave(x *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.remove(x)
}

func (w *waits) remove(x *waiting) {
	same := w.byHash[x.hash]
	if _, registered := same[x]; !registered {
		return
	}
	delete(same, x)
	if len(same) == 0 {
		delete(w.byHash, x.hash)
	}
	delete(w.due, x)
	w.count--
}

// parked returns how many wait.
func (w *waits) parked() int {
	all, _ := w.waiters()
	return all
}

// waiters returns how many wait, and how many of them for namespaces.
func (w *waits) waiters() (all, ofNamespaces int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count, len(w.byHash[ofNoInstance])
}

// heard takes in the payload of a notification. One that it cannot read, from a newer version or a stranger, means
// any instance.
func (w *waits) heard(payload string) {
	hash, err := strconv.ParseUint(payload, 16, 64)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.anyone = true
		w.bell.ring()
	} else {
		w.makeDue(hash)
	}
	for x := range w.watches {
		if err != nil || x.hash == hash {
			x.notified()
		}
	}
}

// changed is called after the commit of what changed an instance. If that was quiet, nobody hears of it but by
// this; otherwise a node that listens does.
func (w *waits) changed(instance string, quiet bool) {
	hash := hashOf(instance)
	if quiet {
		w.e.coalescer.tellChange(hash)
	}
	if quiet || w.e.epoch() == 0 {
		w.lookAt(hash)
	}
}

func (w *waits) lookAt(hash uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.urgent = true
	w.makeDue(hash)
	for x := range w.watches {
		if x.hash == hash {
			x.look()
		}
	}
}

// makeDue makes those due who wait for an instance. The caller holds mu.
func (w *waits) makeDue(hash uint64) {
	for x := range w.byHash[hash] {
		w.due[x] = struct{}{}
	}
	if len(w.byHash[hash]) > 0 {
		w.bell.ring()
		w.e.stir()
	}
}

// lookAtAll makes every waiter due, and every Watch.
func (w *waits) lookAtAll() {
	w.lookAtThose(func(*waiting) bool { return true })
	w.lookAtWatches()
}

// fallback makes those due that a fallback is for, which added up the ids of the namespaces.
func (w *waits) fallback(namespaces int64) {
	w.lookAtThose(func(x *waiting) bool { return !x.namespaces || x.known != namespaces })
}

func (w *waits) lookAtThose(due func(*waiting) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.urgent = true
	for _, same := range w.byHash {
		for x := range same {
			if due(x) {
				w.due[x] = struct{}{}
			}
		}
	}
	w.bell.ring()
}

// run looks whenever somebody is due.
func (w *waits) run(ctx context.Context) {
	w.lookAtAll()                 // whatever was taken by a run that panicked
	var polled, counted time.Time // when the last poll of all of them ended, and of those that wait for namespaces
	pause := firstRetry           // before the next attempt, after a failure
	poll := time.NewTimer(0)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.bell:
		case <-poll.C:
		}
		w.e.inject("waits")
		interval, polling := w.pollInterval()
		waiters, ofNamespaces := w.waiters()
		polling = polling && waiters > 0
		all := polling && time.Since(polled) >= interval
		count := all || polling && ofNamespaces > 0 && time.Since(counted) >= interval/2
		if count && w.e.mayPoll() {
			w.lookAtThose(func(x *waiting) bool { return all || x.namespaces })
		}
		switch err := w.read(ctx); {
		case err == nil:
			pause = firstRetry
		case !sleep(ctx, pause/2+rand.N(pause/2)):
			return
		default:
			pause = min(2*pause, lastRetry)
			w.bell.ring()
		}
		if all {
			polled = time.Now()
		}
		if count {
			counted = time.Now()
		}
		switch {
		case !polling:
			poll.Stop()
		case ofNamespaces > 0:
			poll.Reset(min(time.Until(polled.Add(interval)), time.Until(counted.Add(interval/2))))
		default:
			poll.Reset(time.Until(polled.Add(interval)))
		}
	}
}

// The pauses after a query that failed.
const (
	firstRetry = 10 * time.Millisecond
	lastRetry  = 250 * time.Millisecond
)

// pollInterval is the time between two looks at all waiters while nobody tells this node of changes. Half of that lies between two
// counts of the namespaces: who serves a new one has to fetch from it, too, before that is as good as polled.
func (w *waits) pollInterval() (interval time.Duration, polling bool) {
	cfg := w.e.cfg
	switch {
	case w.e.listener == nil || w.e.listener.rests():
		return cfg.PollInterval, true
	case w.e.epoch() != 0 || w.e.hibernates() || cfg.AggressivePolicy == Never:
		return 0, false
	}
	return cfg.AggressiveInterval, true
}

// read makes one query for everyone who is due, if anyone is, and hands out the answers.
func (w *waits) read(ctx context.Context) error {
	w.mu.Lock()
	if w.isPutOff() {
		w.mu.Unlock()
		return nil
	}
	if w.anyone {
		for _, same := range w.byHash {
			for x := range same {
				w.due[x] = struct{}{}
			}
		}
	}
	notified := !w.urgent
	w.urgent, w.anyone, w.readAt = false, false, time.Time{}
	var asked []question
	askers := make(map[question][]*waiting)
	for x := range w.due { // invariant (2)
		if askers[x.question] == nil {
			asked = append(asked, x.question)
		}
		askers[x.question] = append(askers[x.question], x)
	}
	clear(w.due)
	w.mu.Unlock()
	if len(asked) == 0 {
		return nil
	}
	w.e.stats.waitReads.Add(1)
	if notified {
		w.e.trust.spend()
	}
	found := false
	err := w.look(ctx, asked, func(i int, a answer) {
		found = found || a.complete
		w.tell(askers[asked[i]], a)
	})
	if found {
		w.e.trust.earn()
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	recovered := err == nil && w.err != nil
	w.err = err
	if err != nil {
		w.urgent = true
		for _, some := range askers {
			for _, x := range some {
				if _, registered := w.byHash[x.hash][x]; registered {
					w.due[x] = struct{}{}
				}
			}
		}
	}
	if recovered && w.e.listener != nil {
		w.e.listener.retryNow()
	}
	return err
}

// isPutOff reports whether there is no credit to read for those whom notifications have made due, and nobody else is. Then they are read
// for when there is. The caller holds mu.
func (w *waits) isPutOff() bool {
	if w.urgent || len(w.due) == 0 && !(w.anyone && w.count > 0) {
		return false
	}
	first := w.readAt.IsZero()
	if !w.e.trust.putOff(&w.readAt) {
		return false
	}
	pause := w.readAt.Sub(w.e.clock.Now())
	if first && pause > 0 {
		time.AfterFunc(pause, w.bell.ring)
	}
	return pause > 0
}

// tell gives an answer to those who asked.
func (w *waits) tell(askers []*waiting, a answer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range askers {
		v := verdict{answer: a}
		switch {
		case !x.namespaces && x.known != 0 && a.known != x.known: // whatever another of the same id has come to
			v.err = fmt.Errorf("%w: instance %s was deleted", ErrNotFound, quote(x.instance))
		case a.complete:
		default:
			x.known = a.known
			continue
		}
		w.remove(x)
		select {
		case x.verdicts <- v:
		default: // it has one
		}
	}
}

// ask sends the questions to the database. The answers come as they arrive: what was told stays true, even if the
// query fails in the end.
func (w *waits) ask(ctx context.Context, asked []question, tell func(i int, a answer)) error {
	var instances []string
	var lastSeen, known []*int64
	var numbers []int // of those questions among all
	ofNamespaces := make(map[int]question)
	for i, q := range asked {
		if q.namespaces {
			ofNamespaces[i] = q
			continue
		}
		numbers = append(numbers, i)
		instances = append(instances, q.instance)
		lastSeen, known = append(lastSeen, optional(q.lastSeen, q.outcome)), append(known, optional(q.known, q.known == 0))
	}
	return w.e.onPool(ctx, time.Now().Add(answerDeadline+time.Duration(len(asked))*laneDeadline), func(ctx context.Context, conn *pgxpool.Conn) error {
		if len(ofNamespaces) > 0 {
			if err := w.newNamespaces(ctx, conn, ofNamespaces, tell); err != nil || len(instances) == 0 {
				return err
			}
		}
		rows, err := conn.Query(ctx, w.e.sql.lookAtInstances, instances, lastSeen, known)
		if err != nil {
			return err
		}
		var i int
		var a answer
		var incarnation, version, execution *int64 // null: the instance is unknown
		var status *string                         // null: the execution has not ended
		_, err = pgx.ForEachRow(rows, []any{&i, &incarnation, &a.complete, &a.value, &version, &execution, &status}, func() error {
			a.known, a.version, a.execution, a.status = value(incarnation), value(version), value(execution), value(status)
			tell(numbers[i-1], a)
			return nil
		})
		return err
	})
}

// close ends every wait with ErrClosed, and lets none begin.
func (w *waits) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		close(w.done)
		for x := range w.watches {
			x.end()
		}
	}
}
