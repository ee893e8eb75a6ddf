package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/devpg"
)

// This file answers: how does a run go, from the first process to the verdict?

// How long what takes.
const (
	faultsPerRound = 12 * time.Second             // and then comes a calm
	calmLength     = leasesPatience + time.Second // after the bounds have passed, with probes alone

	// The bounds after the end of all faults: on recovery, and, from the moment on at which a connection
	// silently lost its peer, on noticing that. The second is Config.FallbackInterval's, with its jitter.
	recoveryBound = 5 * time.Second
	silenceBound  = fallbackInterval + time.Second + recoveryBound

	// What stalls the machine holds up recovery as well, so the first bound grows by it; by no more than this, or a
	// disk that is always slow would make a round endless. The last is for connections that come and go.
	mostStalled   = 30 * time.Second
	listenerBound = time.Second

	askBound     = 20 * time.Second // a conversation of the run itself, on a machine that may have much else to do
	openingBound = 20 * time.Second // from the start of a process, or the end of the faults, to its Provider
	readyBound   = 45 * time.Second // as long is waited for that
	drainBound   = 30 * time.Second
	closingBound = 30 * time.Second // a server that is gone or silent included: see Provider.Close for its connections
)

// span is a stretch of time.
type span struct{ from, to time.Time }

// silence is when the pools of a process lost their peers silently, and with how many connections at most.
type silence struct {
	process     string
	at          time.Time
	connections int
}

// round is what the checker needs to know of a round. By bound everything must have recovered, and until
// calm.to nothing goes wrong, as from calm.from on.
type round struct {
	bound time.Time
	grew  time.Duration // by how much the bound is later for what stalled the machine
	calm  span
	kinds []string // of the faults that happened
	alone bool     // there was one

	opened []opening
}

// opening is how a process that had still to open when nothing was wrong any more came to work.
type opening struct {
	process string
	took    span
}

// chaos is a run.
type chaos struct {
	options
	conditions
	out    io.Writer
	began  time.Time
	dir    string
	server *devpg.Server // the one that is to be reached
	*premises
	logs  int // of servers, kept
	net   *network
	nodes []*node

	serverMu  sync.Mutex // one fault at a time
	stoppedMu sync.Mutex
	stopped   []int // backends that may be stopped

	mu          sync.Mutex
	pace        string // at which is enqueued while it soaks
	counts      map[string]int
	silentSince time.Time // when a connection last lost its peer silently
	silences    []silence
	crashes     []span
	happened    []string // kinds of faults of this round
	stalls      []span   // when the machine or the server was slow by itself
	violations  []string

	schedules scheduleTimes
	held      *pgx.Conn // with a transaction that stays open
}

func (c *chaos) log(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Fprintf(c.out, "%8.3fs  %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

func (c *chaos) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what]++
}

// note keeps what has happened in this round.
func (c *chaos) note(kind string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.happened = append(c.happened, kind)
}

// crashed keeps that the server was gone from that moment on, as in a crash, and is back.
func (c *chaos) crashed(began time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.crashes = append(c.crashes, span{began, time.Now()})
}

// complain takes note of a violation, if there is one.
func (c *chaos) complain(err error) {
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.violations = append(c.violations, err.Error())
	}
}

// run returns the verdict, or an error if the run itself failed or was interrupted.
func run(ctx context.Context, o options, out io.Writer) (v *verdict, err error) {
	c := &chaos{options: o, conditions: o.conditions(), out: out, began: time.Now(), counts: map[string]int{}}
	if c.dir, err = os.MkdirTemp("", "pgwake-chaos-"); err != nil {
		return nil, err
	}
	defer func() {
		if ctx.Err() != nil || err == nil && len(v.violations) == 0 {
			os.RemoveAll(c.dir)
			return
		}
		fmt.Fprintf(out, "\nFAILED. Again: %v\nThe ledgers and logs are in %s\n", o, c.dir)
	}()
	c.log("%v", o)
	defer func() {
		err = errors.Join(err, c.endServer(ctx))
		if c.premises != nil {
			err = errors.Join(err, c.premises.remove())
		}
	}()
	if err := c.bootServer(ctx); err != nil {
		return nil, err
	}
	c.log("PostgreSQL %s from %s", c.server.Version, c.server.Source)
	c.log("%v", c.conditions)
	if err := c.prepare(ctx); err != nil {
		return nil, err
	}
	if err := c.prepareLayers(ctx); err != nil {
		return nil, err
	}
	c.net = newNetwork(fmt.Sprintf("127.0.0.1:%d", c.server.Port()))
	defer c.tearDown()
	defer c.letGo()
	if err := c.populate(ctx); err != nil {
		return nil, err
	}

	var rounds []round
	for number, s := range o.plan() {
		r, err := c.round(ctx, number, s)
		if err != nil {
			return nil, err
		}
		rounds = append(rounds, r)
	}
	rounds[len(rounds)-1].calm.to, err = c.drain(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.countListeners(ctx); err != nil {
		return nil, err
	}
	if err := c.checkSwept(ctx); err != nil {
		return nil, err
	}
	tables, err := c.readTables(ctx)
	if err != nil {
		return nil, err
	}
	c.closeAll()
	if err := c.checkNothingRemains(ctx); err != nil {
		return nil, err
	}
	lines, err := readLedgers(c.dir)
	if err != nil {
		return nil, err
	}
	c.readLogs()
	if err := c.readServerLog(); err != nil { // those of earlier servers were read when they ended
		return nil, err
	}
	return c.judge(lines, tables, rounds), nil
}

// prepare makes the schemas, and the tables for effects and stretches.
func (c *chaos) prepare(ctx context.Context) error {
	p, err := pgwake.Open(ctx, c.server.URL, nil)
	if err != nil {
		return err
	}
	defer p.Close(context.WithoutCancel(ctx))
	limited, err := pgwake.Open(ctx, c.server.URL, &pgwake.Config{Schema: limitedSchema})
	if err != nil {
		return err
	}
	defer limited.Close(context.WithoutCancel(ctx))
	if err := limited.SetLimits(ctx, limitedNamespace, limits); err != nil {
		return err
	}
	return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, effectsTable+";"+stretchesTable+";"+makeChaosRole)
		return err
	})
}

// ask has a conversation with the server that no proxy disturbs.
func (c *chaos) ask(ctx context.Context, talk func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	conn, err := pgx.Connect(ctx, c.server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return talk(ctx, conn)
}

// populate starts all processes and waits until they work.
func (c *chaos) populate(ctx context.Context) error {
	roles := separateRoles()
	for i := range c.options.nodes {
		roles = append(roles, []string{worker, orchestrator}[i%2])
	}
	for range c.producers() {
		roles = append(roles, producer)
	}
	roles = append(roles, idler)
	for i, role := range roles {
		n := &node{index: i, role: role, user: chaosRole, seed: c.seed, nodes: len(roles), dir: c.dir, conditions: c.conditions, rest: c.options.rest}
		if err := c.connect(n); err != nil {
			return err
		}
		if err := n.start(); err != nil {
			return err
		}
		c.nodes = append(c.nodes, n)
		if err := n.process.awaitReady(ctx, readyBound+c.options.slack); err != nil { // not all at once, which is much for a small machine
			return err
		}
		n.process.tell("probe") // until all are there
	}
	for _, n := range c.nodes {
		n.process.tell("work")
	}
	return nil
}

// connect gives a node new ways.
func (c *chaos) connect(n *node) (err error) {
	if n.pool, err = c.net.newWay(n.name("pool")); err == nil {
		n.listen, err = c.net.newWay(n.name("listen"))
	}
	return err
}

// tearDown ends whatever still runs.
func (c *chaos) tearDown() {
	for _, n := range c.nodes {
		n.process.kill()
		for _, w := range []*way{n.pool, n.listen} {
			if w == nil {
				continue
			}
			_ = w.change(func() error { w.proxy.Stop(); return nil })
		}
	}
}

// round lets things go wrong for a while, ends that, and waits until all must have recovered and probes have
// shown whether it has.
func (c *chaos) round(ctx context.Context, number int, s stage) (r round, err error) {
	c.log("round %d: faults for %v", number+1, s.length.Round(time.Millisecond))
	c.happened = nil
	if err := c.holdOpen(ctx); err != nil {
		return r, err
	}
	began := time.Now()
	var faults sync.WaitGroup
	failures := make(chan error, 1)
	for _, f := range s.faults {
		if !nap(ctx, time.Until(began.Add(f.At))) {
			break
		}
		faults.Go(func() {
			if err := c.inflict(ctx, f); err != nil {
				select {
				case failures <- err:
				default:
				}
			}
		})
	}
	faults.Wait()
	select {
	case err := <-failures:
		return r, err
	case <-ctx.Done():
		return r, context.Cause(ctx)
	default:
	}
	if r.opened, err = c.awaitAll(ctx, time.Now()); err != nil {
		c.complain(err)
		return r, err
	}
	if err := c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error { return conn.Ping(ctx) }); err != nil {
		return r, err
	}
	healed := time.Now()
	if err := c.holdOpen(ctx); err != nil {
		return r, err
	}
	r.kinds, r.alone = c.happened, s.alone
	if c.planted(plantLate) {
		idle := c.nodes[len(c.nodes)-1]
		open, err := sized(func(w *way, _ int) (func() error, error) { return w.shut() })(c, ctx, fault{Way: "both"}, idle)
		if err != nil {
			return r, err
		}
		time.AfterFunc(recoveryBound+2*time.Second, func() { c.complain(open()) })
	}
	r.bound = healed.Add(recoveryBound)
	if silent := c.silentSince.Add(silenceBound); silent.After(r.bound) {
		r.bound = silent
	}
	c.log("calm; all must have recovered in %v", time.Until(r.bound).Round(time.Millisecond))
	for unstalled, noted := r.bound, len(c.stalls); time.Now().Before(r.bound); {
		if err := c.watch(ctx, r.bound); err != nil {
			return r, err
		}
		r.grew = min(c.stalled(noted), mostStalled)
		r.bound = unstalled.Add(r.grew)
	}
	r.calm = span{healed, r.bound.Add(calmLength)}
	if err := c.countListeners(ctx); err != nil {
		return r, err
	}
	for _, n := range c.nodes {
		n.process.tell("probe")
		defer n.process.tell("work")
	}
	return r, c.watch(ctx, r.calm.to)
}

// awaitAll waits until all processes work, and notes what stalls the machine meanwhile. The faults ended at that moment.
func (c *chaos) awaitAll(ctx context.Context, ended time.Time) (opened []opening, err error) {
	watching, enough := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() { watched <- c.watch(watching, ended.Add(time.Hour)) }()
	for _, n := range c.nodes {
		if err = n.process.awaitReady(ctx, readyBound+c.options.slack); err != nil {
			break
		}
		if o, was := n.process.openedAfter(ended); was {
			opened = append(opened, o)
		}
	}
	enough()
	<-watched // its error is that, or whoever asks the server next has it as well
	return opened, err
}

// countListeners complains about nodes that do not have exactly one LISTEN connection, and do not come to have it.
func (c *chaos) countListeners(ctx context.Context) error {
	for began, noted := time.Now(), len(c.stalls); ; {
		wrong, err := c.miscounted(ctx)
		if err != nil || len(wrong) == 0 {
			return err
		}
		if time.Since(began) > listenerBound+c.options.slack+min(c.stalled(noted), mostStalled) {
			for _, err := range wrong {
				c.log("%v", err)
				c.complain(err)
			}
			return nil
		}
		if err := c.watch(ctx, time.Now().Add(50*time.Millisecond)); err != nil {
			return err
		}
	}
}

// miscounted returns what is wrong with the LISTEN connections at this moment.
func (c *chaos) miscounted(ctx context.Context) (wrong []error, err error) {
	err = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		for _, n := range c.nodes {
			// A session that listens holds the lock that says that its node lives. Beside it, a node makes connections in the same way to
			// wait for a producer that stays open, until the server notices that one has vanished; and, for a few seconds, to ask what the server is at.
			rows, err := conn.Query(ctx, `SELECT a.pid || ': ' || a.query FROM pg_stat_activity a WHERE a.application_name = $1 AND a.query !~ 'wait_for_producers'
				AND (a.backend_start < clock_timestamp() - interval '10 s'
				     OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.granted))`, n.name("listen"))
			if err != nil {
				return err
			}
			listening, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			if len(listening) != 1 {
				wrong = append(wrong, fmt.Errorf("%v has %d LISTEN connections after all must have recovered: %q", n, len(listening), listening))
			}
		}
		return nil
	})
	return wrong, err
}

// stalled is how long the machine stalled in all, not counting the first stalls, which are older.
func (c *chaos) stalled(first int) (total time.Duration) {
	for _, s := range c.stalls[first:] {
		total += s.to.Sub(s.from)
	}
	return total
}

// watch waits until the end of a calm, and notes when the machine or the server is slow by itself: others may
// be at work here. What it times is a commit that writes, since a busy disk lets a query through and keeps everybody
// who enqueues or acknowledges waiting.
func (c *chaos) watch(ctx context.Context, until time.Time) error {
	conn, err := pgx.Connect(ctx, c.server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for time.Now().Before(until) {
		began := time.Now()
		if !nap(ctx, 20*time.Millisecond) {
			return context.Cause(ctx)
		}
		if _, err := conn.Exec(ctx, `SELECT pg_logical_emit_message(true, 'chaos', '')`); err != nil {
			return err
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			c.mu.Lock()
			c.stalls = append(c.stalls, span{began, time.Now()})
			c.mu.Unlock()
		}
	}
	return nil
}

// drain has the processes enqueue no more, waits until the queues are empty, and returns when that was, or when
// it was given up.
func (c *chaos) drain(ctx context.Context) (end time.Time, err error) {
	for _, n := range c.nodes {
		n.process.tell("quiet")
	}
	unsettled := `SELECT (SELECT count(*) FROM pgwake.worker_queue)
		+ (SELECT count(*) FROM pgwake.orchestrator_queue) + (SELECT count(*) FROM limited.worker_queue)`
	if c.layered() {
		if err := c.pauseSchedules(ctx); err != nil {
			return end, err
		}
		unsettled += ` + ` + graphsLeft + ` + ` + busLeft
	}
	c.log("no more is enqueued")
	for given := time.Now().Add(drainBound + c.options.slack); ; {
		if err := c.watch(ctx, time.Now().Add(500*time.Millisecond)); err != nil {
			return end, err
		}
		var left int
		err := c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			return conn.QueryRow(ctx, unsettled).Scan(&left)
		})
		if err != nil {
			return end, err
		}
		if left == 0 {
			c.log("the queues are empty")
			return time.Now(), nil
		}
		if time.Now().After(given) {
			c.complain(fmt.Errorf("%d items, messages, tasks and dead letters are left after %v", left, drainBound+c.options.slack))
			return time.Now(), nil
		}
	}
}

// closeAll has all processes end by themselves.
func (c *chaos) closeAll() {
	var all sync.WaitGroup
	for _, n := range c.nodes {
		all.Go(func() { c.complain(n.close()) })
	}
	all.Wait()
	c.log("closed")
}

// readLogs complains about what must not be in them.
func (c *chaos) readLogs() {
	logs, _ := filepath.Glob(filepath.Join(c.dir, "*.log"))
	for _, path := range logs {
		text, err := os.ReadFile(path)
		c.complain(err)
		for _, bad := range []string{"DATA RACE", "panic"} {
			if at := strings.Index(string(text), bad); at >= 0 {
				c.complain(fmt.Errorf("%s: %.2000s", filepath.Base(path), text[at:]))
			}
		}
	}
}
