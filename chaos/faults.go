package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

// This file answers: what goes wrong, when, and how is it made to?
//
// A run is a sequence of rounds (plan.go): faults for a while, then none until everything must have recovered. The
// seed alone says which faults, when, and on whom; so it says the same again.

// fault is something that goes wrong for a while.
type fault struct {
	At   time.Duration // since the beginning of the round
	For  time.Duration
	Kind *kind
	Node int    // of whom
	Way  string // pool, listen, both
	Size int    // milliseconds or kB/s, where the kind has a size
}

func (f fault) String() string {
	text := f.Kind.name
	if !f.Kind.ofServer {
		text += fmt.Sprintf(" of node %d", f.Node)
	}
	if f.Kind.ways != nil {
		text += ", " + f.Way
	}
	if f.Kind.size > 0 {
		text += fmt.Sprintf(", %d", f.Size)
	}
	if f.For > 0 {
		text += fmt.Sprintf(", for %v", f.For.Round(time.Millisecond))
	}
	return text
}

// kind is a kind of fault. apply makes it happen and returns what ends it.
type kind struct {
	name        string
	weight      int  // in a round of many; 0: it comes alone
	ofServer    bool // rather than of a node
	least, most time.Duration
	ways        []string
	size        int // the most
	apply       func(*chaos, context.Context, fault, *node) (heal func() error, err error)
}

var (
	anyWay     = []string{"pool", "listen", "both"}
	mostListen = []string{"listen", "listen", "listen", "pool"}
	listenOnly = []string{"listen"}
)

// kinds are all kinds. Durations lie on both sides of the lease (2 s), of the bound on silent faults (8 s), and
// of what it takes until nodes wait longest between two attempts to connect (6 s).
var kinds = []kind{
	{name: "kill -9", weight: 4, least: 0, most: 2 * time.Second, apply: (*chaos).kill},
	{name: "close and start anew", weight: 1, apply: (*chaos).replace},
	{name: "stop process", weight: 2, least: lease + 200*time.Millisecond, most: 2 * lease, apply: (*chaos).stopProcess},
	{name: "terminate backend", weight: 6, ways: mostListen, apply: (*chaos).terminate},
	{name: "stop backend", weight: 2, least: 500 * time.Millisecond, most: 9 * time.Second, ways: listenOnly, apply: (*chaos).stopBackend},
	{name: "black hole", weight: 3, least: 300 * time.Millisecond, most: 9 * time.Second, ways: anyWay, apply: toxic((*way).blackhole)},
	{name: "lost answers", weight: 3, least: 100 * time.Millisecond, most: 6 * time.Second, ways: anyWay, apply: toxic((*way).mute)},
	{name: "vanish", weight: 2, ways: anyWay, apply: (*chaos).vanish},
	{name: "reset", weight: 2, least: 100 * time.Millisecond, most: time.Second, ways: anyWay, apply: toxic((*way).reset)},
	{name: "latency", weight: 2, least: 500 * time.Millisecond, most: 4 * time.Second, ways: anyWay, size: 300, apply: sized((*way).slow)},
	{name: "bandwidth", weight: 1, least: 500 * time.Millisecond, most: 4 * time.Second, ways: anyWay, size: 32, apply: sized((*way).narrow)},
	{name: "refuse", weight: 3, least: 100 * time.Millisecond, most: 10 * time.Second, ways: anyWay, apply: toxic((*way).shut)},
	{name: "fast restart", weight: 1, ofServer: true, least: 0, most: 9 * time.Second, apply: halt(devpg.Fast)},
	{name: "immediate restart", weight: 1, ofServer: true, least: 0, most: 9 * time.Second, apply: halt(devpg.Immediate)},
	{name: "row locks", weight: 2, ofServer: true, least: 200 * time.Millisecond, most: 3 * time.Second, apply: (*chaos).lockRows},
	{name: "statement timeout", weight: 1, ofServer: true, least: 200 * time.Millisecond, most: 4 * time.Second, size: 30, apply: limit("statement_timeout")},
	{name: "lock timeout", weight: 1, ofServer: true, least: 200 * time.Millisecond, most: 3 * time.Second, size: 30, apply: limit("lock_timeout")},
	{name: "pool exhausted", weight: 2, least: 500 * time.Millisecond, most: 6 * time.Second, apply: (*chaos).exhaustPool},
	{name: "connections used up", weight: 1, ofServer: true, least: 500 * time.Millisecond, most: 5 * time.Second, apply: (*chaos).useUpConnections},
	{name: diskFull, ofServer: true, least: 500 * time.Millisecond, most: 4 * time.Second, apply: (*chaos).fillDisk},
	{name: failover, ofServer: true, least: 0, most: 4 * time.Second, size: 2, apply: (*chaos).failOver},
}

// schedule makes the faults of a round. One node has one fault at a time, and so has the server, but for the last.
func schedule(rng *rand.Rand, nodes int, length time.Duration) []fault {
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	var faults []fault
	free := make([]time.Duration, nodes+1) // when the node, or last the server, may have its next
	for at := between(rng, 0, 500*time.Millisecond); at < length; at += between(rng, 50*time.Millisecond, 600*time.Millisecond) {
		f := fault{At: at, Node: rng.IntN(nodes)}
		p := rng.IntN(total)
		for i := range kinds {
			if p -= kinds[i].weight; p < 0 {
				f.Kind = &kinds[i]
				break
			}
		}
		target := f.Node
		if f.Kind.ofServer {
			target = nodes
		}
		left := length - at
		if free[target] > at || f.Kind.least > left {
			continue
		}
		f.choose(rng, f.Kind, left)
		free[target] = at + f.For + 300*time.Millisecond
		faults = append(faults, f)
	}
	last := fault{At: length, Node: nodes - 1} // the idle one
	switch rng.IntN(3) {
	case 0: // the hardest to notice: a node that says nothing itself, and no other fault comes to help
		last.Kind, last.Way = kindNamed("vanish"), "listen"
	case 1: // at its end all nodes wait longest
		last.Kind, last.For = kindNamed("fast restart"), min(8*time.Second, length)
		last.At -= last.For
	default:
		return faults
	}
	return append(faults, last)
}

// choose says how long the fault takes, at most, and what else its kind leaves open.
func (f *fault) choose(rng *rand.Rand, k *kind, most time.Duration) {
	f.Kind = k
	short := rng.Float64() // squared, since long ones keep others away
	f.For = k.least + time.Duration(short*short*float64(min(k.most, most)-k.least))
	if k.ways != nil {
		f.Way = k.ways[rng.IntN(len(k.ways))]
	}
	if k.size > 0 {
		f.Size = 1 + rng.IntN(k.size)
	}
}

func kindNamed(name string) *kind {
	return &kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })]
}

// errMissed: there was nobody to hit, because of another fault.
var errMissed = errors.New("missed")

// errLeftOut: this machine does not have what the fault takes.
var errLeftOut = errors.New("left out")

// inflict lets a fault happen, waits, and ends it.
func (c *chaos) inflict(ctx context.Context, f fault) error {
	var n *node
	target := &c.serverMu
	if !f.Kind.ofServer {
		n = c.nodes[f.Node]
		target = &n.mu
	}
	target.Lock() // one may last longer than planned
	defer target.Unlock()
	heal, err := f.Kind.apply(c, ctx, f, n)
	if err == nil {
		c.log("%v", f)
		c.count(f.Kind.name)
		c.note(f.Kind.name)
		nap(ctx, f.For)
		if heal != nil {
			err = heal()
		}
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, errStuck): // no fault of the product
		c.log("%v: %v; the node starts anew", f, err)
		n.process.kill()
		if err = c.connect(n); err == nil {
			err = n.start()
		}
	case errors.Is(err, errMissed), errors.Is(err, errLeftOut):
		c.log("%v: %v", f, err)
		err = nil
	}
	if err != nil {
		return fmt.Errorf("%v: %w", f, err)
	}
	return nil
}

func (c *chaos) kill(_ context.Context, _ fault, n *node) (func() error, error) {
	c.complain(n.process.alive())
	n.process.kill()
	return n.start, nil
}

// replace ends a process in the orderly way, whatever else is going on, and starts the next.
func (c *chaos) replace(_ context.Context, _ fault, n *node) (func() error, error) {
	select {
	case <-n.process.ready:
	default:
		return nil, errMissed
	}
	c.complain(n.close())
	return n.start, nil
}

func (c *chaos) stopProcess(_ context.Context, _ fault, n *node) (func() error, error) {
	pid := n.process.cmd.Process.Pid
	return func() error { return resume(pid) }, stop(pid)
}

func (c *chaos) terminate(ctx context.Context, f fault, n *node) (func() error, error) {
	_, err := c.backend(ctx, `SELECT pid FROM (SELECT pid FROM pg_stat_activity WHERE application_name = $1
		ORDER BY random() LIMIT 1) AS one WHERE pg_terminate_backend(pid)`, n.name(f.Way))
	return nil, err
}

func (c *chaos) stopBackend(ctx context.Context, f fault, n *node) (func() error, error) {
	c.stoppedMu.Lock() // not while the server is being shut down, which would take long
	defer c.stoppedMu.Unlock()
	pid, err := c.backend(ctx, `SELECT pid FROM pg_stat_activity WHERE application_name = $1 LIMIT 1`, n.name(f.Way))
	if err != nil || stop(pid) != nil {
		return nil, errMissed
	}
	c.stopped = append(c.stopped, pid)
	return func() error {
		_ = resume(pid) // it may be gone
		return nil
	}, nil
}

// backend returns the pid that a query finds.
func (c *chaos) backend(ctx context.Context, sql, name string) (pid int, err error) {
	err = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error { return conn.QueryRow(ctx, sql, name).Scan(&pid) })
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errMissed, err) // the server is down, or the node is not connected
	}
	return pid, nil
}

func (c *chaos) vanish(ctx context.Context, f fault, n *node) (func() error, error) {
	if f.Way != "listen" {
		n.silenced = true
		c.mu.Lock()
		c.silences = append(c.silences, silence{n.process.name, time.Now(), 2 * poolSize(n.role)}) // it may have two pools
		c.mu.Unlock()
	}
	_, err := toxic(func(w *way) (func() error, error) {
		until, err := w.vanish()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.silentSince = until
		return nil, err
	})(c, ctx, f, n)
	return nil, err
}

// toxic makes a fault of what a way can suffer.
func toxic(f func(*way) (func() error, error)) func(*chaos, context.Context, fault, *node) (func() error, error) {
	return sized(func(w *way, _ int) (func() error, error) { return f(w) })
}

func sized(apply func(*way, int) (func() error, error)) func(*chaos, context.Context, fault, *node) (func() error, error) {
	return func(_ *chaos, _ context.Context, f fault, n *node) (func() error, error) {
		var heals []func() error
		heal := func() (err error) {
			for _, h := range heals {
				err = errors.Join(err, h())
			}
			return err
		}
		for name, w := range map[string]*way{"pool": n.pool, "listen": n.listen} {
			if f.Way != name && f.Way != "both" {
				continue
			}
			h, err := apply(w, f.Size)
			if err != nil {
				return nil, errors.Join(err, heal())
			}
			heals = append(heals, h)
		}
		return heal, nil
	}
}

func halt(mode devpg.Mode) func(*chaos, context.Context, fault, *node) (func() error, error) {
	return func(c *chaos, ctx context.Context, _ fault, _ *node) (func() error, error) {
		c.stoppedMu.Lock()
		defer c.stoppedMu.Unlock()
		for _, pid := range c.stopped {
			_ = resume(pid)
		}
		c.stopped = nil
		mark, err := c.mark(ctx)
		if err != nil {
			return nil, errors.Join(errMissed, err)
		}
		began := time.Now()
		err = c.server.Halt(ctx, mode)
		return func() error {
			err := c.server.Resume(ctx)
			if mode == devpg.Immediate { // what was committed without waiting for the disk may be gone: claims
				c.crashed(began)
				err = errors.Join(err, c.checkUnlogged(ctx, mark)) // processes reach the server by now
			}
			return err
		}, err
	}
}

// lockRows is a transaction of somebody else that locks rows, stays open, and is rolled back.
func (c *chaos) lockRows(ctx context.Context, _ fault, _ *node) (func() error, error) {
	conn, err := pgx.Connect(ctx, c.server.URL)
	if err != nil {
		return nil, errMissed
	}
	heal := func() error {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing) // which rolls back; the server may be gone
		return nil
	}
	_, err = conn.Exec(ctx, `BEGIN; SET LOCAL search_path = pgwake;
		SELECT FROM worker_queue ORDER BY random() LIMIT 20 FOR UPDATE SKIP LOCKED;
		SELECT FROM limited.worker_queue ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED;
		SELECT FROM graphs.worker_queue ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED;
		SELECT FROM graphs.tasks WHERE NOT graphs.is_terminal(state) ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED;
		SELECT FROM bus.worker_queue ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED;
		SELECT FROM orchestrator_queue ORDER BY random() LIMIT 5 FOR UPDATE SKIP LOCKED;
		SELECT FROM instance_locks ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED`)
	if err != nil {
		return nil, errors.Join(errMissed, heal())
	}
	return heal, nil
}
