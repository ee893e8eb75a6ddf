package pgwake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Invariant of leases.go: every lease has an instant that was told after its claim and not past its end, and
// equal timeouts cost at most one notification per half of it.
func TestLeases_AnyClaims_AreCoveredByAnAnnouncedInstant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var known leases
		var told []time.Time
		now := time.Now()
		timeouts := rapid.SliceOfN(rapid.IntRange(1, 60), 1, 3).Draw(t, "timeouts")
		last := make(map[int]time.Time)
		for range rapid.IntRange(1, 100).Draw(t, "claims") {
			now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond)
			seconds := rapid.SampledFrom(timeouts).Draw(t, "timeout")
			timeout := time.Duration(seconds) * time.Second
			end := now.Add(timeout)
			if joins, announce := known.announce(Worker, now, timeout); announce {
				if before, ok := last[seconds]; ok {
					require.GreaterOrEqual(t, now.Sub(before), timeout/2, "announced twice within half the timeout")
				}
				last[seconds] = now
				known.told(Worker, end, joins)
				told = append(told, end)
			}
			covered := false
			for _, at := range told {
				covered = covered || (at.After(now) && !at.After(end))
			}
			require.True(t, covered, "a lease of %v claimed at %v", timeout, now)
		}
	})
}

// What was told before a node began to listen does not cover it, and is looked at all the same.
func TestLeases_NodeJoins_IsToldTheNextInstantAndCoveredAnew(t *testing.T) {
	var known leases
	now := time.Now()
	at := now.Add(30 * time.Second)
	announces := func(q Queue) bool {
		_, announce := known.announce(q, now, 30*time.Second)
		return announce
	}
	known.heard(Worker, at)
	require.False(t, announces(Worker))
	require.Equal(t, at, known.joined(Worker, now))
	require.True(t, announces(Worker))
	require.Equal(t, at, known.next(Worker, now))
	known.heard(Worker, at)
	require.False(t, announces(Worker))
	require.Zero(t, known.joined(Orchestrator, now))
}

func TestLeases_OtherQueue_IsNotCovered(t *testing.T) {
	var known leases
	now := time.Now()
	known.heard(Worker, now.Add(30*time.Second))
	_, announce := known.announce(Worker, now, 30*time.Second)
	require.False(t, announce)
	_, announce = known.announce(Orchestrator, now, 30*time.Second)
	require.True(t, announce)
}

// deployment is several nodes on one database that exists only in memory, on virtual time. Each node is an engine with
// its timer and its coalescer; the deployment plays the database, the LISTEN connections and the dispatchers. LISTEN
// connections break, dispatchers die with their leases, nodes die with all of theirs, and others come. There is no
// fallback: what is found is found because somebody was told, or knew.
//
// The queue is that of turns. What holds for a work item holds for a turn of one message, and only turns are released.
type deployment struct {
	plan  plan
	group sync.WaitGroup

	mu        sync.Mutex
	rng       *rand.Rand
	nodes     []*simNode
	messages  []*simMessage
	instances map[string]*simInstance
	claims    int
	releases  []*simRelease
	violation string
}

// plan is what a run is made of.
type plan struct {
	seed   uint64 // of everything that is not said here
	policy AggressivePolicy
	leases []time.Duration
	nodes  [][][]string // the namespaces of each dispatcher of each node
	steps  []step
}

// step is something that happens to a node, some time after the step before.
type step struct {
	kind  string
	node  int
	after time.Duration
}

func (s step) String() string { return fmt.Sprintf("%v later %s %d", s.after, s.kind, s.node) }

const (
	sendsQuietly = "enqueue by node" // the coalescer tells
	sends        = "enqueue by SQL"  // the transaction tells
	visits       = "visit"           // nobody is told of the message that it takes
	goesDeaf     = "cut"             // its LISTEN connection is lost, and comes back
	dies         = "kill"            // and another node takes its place
	strands      = "visit and kill"  // the lease that it leaves behind is known to whom it was announced
)

type simMessage struct {
	instance *simInstance
	visible  time.Time
	claim    int  // that it was last taken by
	silent   bool // nobody was told of it, and nobody has taken it
	held     bool
	gone     bool
}

type simInstance struct {
	name, namespace string
	claim           int // that holds it; 0: none
	until           time.Time
	busy            bool // somebody has locked its row
	changed         time.Time
}

// simRelease is an instance that an ack has freed without a notification.
type simRelease struct {
	at        time.Time
	namespace string
	looked    bool // a query for it, which the server answered, began later
}

// simNode is a process.
type simNode struct {
	d          *deployment
	e          *engine
	ctx        context.Context
	kill       context.CancelFunc
	namespaces [][]string

	// voice stands for whatever carries the coalescer's statements, LISTEN connection or pool: one of them works.
	voice *engine
	said  chan struct{}

	ears chan heardNote

	// Guarded by the deployment's mutex.
	up     time.Time // when its LISTEN connection came
	doomed bool      // it is to die, and commits nothing any more that it would have to tell of
	untold int       // quiet commits that are under way
}

type heardNote struct {
	payload string
	at      time.Time
	epoch   uint64
}

// simulate returns what went wrong.
func (p plan) simulate() string {
	d := &deployment{plan: p, rng: rand.New(rand.NewPCG(p.seed, p.seed)), instances: make(map[string]*simInstance)}
	for _, namespaces := range p.nodes {
		d.nodes = append(d.nodes, d.boot(namespaces))
	}
	for _, n := range d.nodes {
		n.start()
	}
	watching, seen := context.WithCancel(context.Background())
	d.group.Go(func() { d.watch(watching) })
	for _, s := range p.steps {
		time.Sleep(s.after)
		d.take(s)
	}
	time.Sleep(simAbsence + 5*slices.Max(p.leases)) // of virtual time: those that died with a lease have lost it
	seen()
	var left []*simNode
	d.do(func() { left = slices.Clone(d.nodes) })
	for _, n := range left {
		n.die()
	}
	d.group.Wait()
	return d.violation
}

// now is the server's clock, which counts microseconds.
func (d *deployment) now() time.Time { return time.Now().Truncate(time.Microsecond) }

func (d *deployment) random(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

func (d *deployment) pause(most time.Duration) { time.Sleep(time.Duration(d.random(int(most) + 1))) }

// do changes the database.
func (d *deployment) do(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

// boot makes a node.
func (d *deployment) boot(namespaces [][]string) *simNode {
	cfg, err := (&Config{Logger: silent, AggressivePolicy: d.plan.policy, Notify: NotifyBroadcast}).resolve()
	if err != nil {
		panic(err)
	}
	n := &simNode{d: d, namespaces: namespaces, said: make(chan struct{}, 1), ears: make(chan heardNote, 1<<16)}
	n.ctx, n.kill = context.WithCancel(context.Background())
	n.e = newEngine(&cfg, newStatements("s"), nil, dialer{}, func(bool) {})
	n.e.listener = &listener{e: n.e}
	n.voice = &engine{cfg: &cfg, sql: n.e.sql, waiters: n.e.waiters, trust: n.e.trust, timer: n.e.timer, listener: &listener{}}
	n.voice.listener.current.Store(&session{epoch: 1})
	n.voice.listener.interrupt = func() {
		select {
		case n.said <- struct{}{}:
		default:
		}
	}
	n.e.coalescer = newCoalescer(n.voice)
	n.e.settlers[Orchestrator].wait = func(context.Context) error { d.pause(time.Millisecond); return nil }
	n.e.scouts[Orchestrator].look, n.e.alarms[Orchestrator].look = n.poll, n.poll
	return n
}

func (n *simNode) start() {
	n.e.group.Go("timer", n.e.timer.run)
	n.e.group.Go("coalescer", n.e.coalescer.run)
	n.e.group.Go("settler", n.e.settlers[Orchestrator].run)
	n.e.group.Go("scout", n.e.scouts[Orchestrator].run)
	n.e.group.Go("alarm", n.e.alarms[Orchestrator].run)
	n.d.group.Go(n.speak)
	n.d.group.Go(n.hear)
	n.listen()
	for _, served := range n.namespaces {
		n.d.group.Go(func() { n.dispatch(served) })
	}
}

// listen is what the listener does when it is up.
func (n *simNode) listen() {
	alive := false
	n.d.do(func() {
		if alive = n.ctx.Err() == nil; alive {
			n.up = time.Now()
			n.e.listener.current.Store(&session{epoch: n.e.listener.sessions.Add(1)})
		}
	})
	if alive {
		n.e.listenerUp()
	}
}

// die is kill -9: nothing is said any more.
func (n *simNode) die() {
	n.d.do(func() {
		n.kill()
		n.e.listener.current.Store(nil)
	})
	n.e.stop()
	n.e.group.Wait()
}

// speak runs the statements of the coalescer.
func (n *simNode) speak() {
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.said:
		}
		n.voice.listener.mu.Lock()
		jobs := n.voice.listener.jobs
		n.voice.listener.jobs = nil
		n.voice.listener.mu.Unlock()
		for _, j := range jobs {
			n.d.pause(2 * time.Millisecond)
			queues, due, next, namespaces := j.args[1].([]string), j.args[2].([]int64), j.args[3].([]*time.Time), j.args[4].([]*string)
			n.d.do(func() {
				for i := range queues {
					if queues[i] == Orchestrator.String() {
						n.d.notify(n, due[i], next[i], namespaces[i])
					}
				}
			})
			j.done <- nil
		}
	}
}

// notify is notify_queue, in a transaction that commits at this moment; from does not hear its own LISTEN connection.
func (d *deployment) notify(from *simNode, due int64, next *time.Time, namespace *string) {
	micros, scope := int64(0), "*"
	if next != nil {
		micros = next.UnixMicro()
	}
	if namespace != nil {
		scope = *namespace
	}
	for _, n := range d.nodes {
		if epoch := n.e.epoch(); epoch != 0 && n != from {
			n.ears <- heardNote{fmt.Sprintf("%d %d %s", due, micros, scope), time.Now().Add(time.Duration(d.rng.IntN(3_000_000))), epoch}
		}
	}
}

// hear delivers what was notified, in order, some time later, and unless the connection has broken meanwhile.
func (n *simNode) hear() {
	for {
		select {
		case <-n.ctx.Done():
			return
		case h := <-n.ears:
			time.Sleep(time.Until(h.at))
			if n.e.epoch() == h.epoch {
				heard, _ := parseNote(h.payload)
				n.e.heard(Orchestrator, heard)
			}
		}
	}
}

// take lets a step happen.
func (d *deployment) take(s step) {
	var n *simNode
	d.do(func() { n = d.nodes[s.node] })
	switch s.kind {
	case sends, sendsQuietly:
		d.enqueue(n, s.kind == sendsQuietly, false)
	case visits:
		d.enqueue(n, false, true)
		if n.ctx.Err() == nil {
			namespaces := n.namespaces[d.random(len(n.namespaces))]
			d.group.Go(func() { n.fetch(namespaces, fetchPlan{noWait: true}) })
		}
	case goesDeaf:
		if n.ctx.Err() != nil || n.e.listener.current.Swap(nil) == nil {
			return
		}
		n.e.listenerLost(true)
		d.group.Go(func() {
			d.pause(4 * time.Second)
			n.listen()
		})
	case strands:
		d.take(step{kind: visits, node: s.node})
		d.take(step{kind: dies, node: s.node})
	case dies:
		var again bool
		d.do(func() { again, n.doomed = n.doomed, true })
		if !again {
			d.group.Go(func() { d.replace(s.node, n) })
		}
	}
}

// replace kills a node, once it has told of what it committed quietly, since for the rest there is the fallback, which
// is not here. Another node takes its place, often too late to look for what it left.
func (d *deployment) replace(place int, n *simNode) {
	for untold := 1; untold > 0; {
		d.do(func() { untold = n.untold })
		time.Sleep(simReleaseBound)
	}
	n.die()
	d.pause([]time.Duration{time.Second, simAbsence}[d.random(2)])
	born := d.boot(n.namespaces)
	d.do(func() { d.nodes[place] = born })
	born.start()
}

// enqueue adds messages to one instance or several.
func (d *deployment) enqueue(by *simNode, quiet, silent bool) {
	var all []produced
	d.do(func() {
		quiet = quiet && !by.doomed && by.e.quiet()
		now := d.now()
		var due int64
		var next *time.Time
		var namespace *string
		for range 1 + d.rng.IntN(2) {
			name := fmt.Sprint("i", d.rng.IntN(6))
			i := d.instances[name]
			if i == nil {
				i = &simInstance{name: name, namespace: []string{"blue", "red"}[len(d.instances)%2]}
				d.instances[name] = i
			}
			m := &simMessage{instance: i, visible: now, silent: silent}
			if !silent && d.rng.IntN(3) == 0 {
				m.visible = now.Add(time.Duration(d.rng.IntN(4_000_000)) * time.Microsecond)
				if next == nil || m.visible.Before(*next) {
					next = &m.visible
				}
			} else {
				due++
			}
			d.messages = append(d.messages, m)
			all = append(all, produced{queue: Orchestrator, namespace: i.namespace, dueAt: m.visible, now: now})
			namespace = &i.namespace
			if all[0].namespace != i.namespace {
				namespace = nil
			}
		}
		switch {
		case quiet:
			by.untold++
		case !silent:
			d.notify(nil, due, next, namespace)
		}
	})
	if quiet {
		by.e.tell(all, true)
		d.do(func() { by.untold-- })
	}
}

// dispatch is a dispatcher, and whoever takes its place when it dies.
func (n *simNode) dispatch(namespaces []string) {
	for n.ctx.Err() == nil {
		n.fetch(namespaces, fetchPlan{poll: time.Duration(1+n.d.random(20_000)) * time.Millisecond})
	}
}

// fetch takes a turn and does something with it.
func (n *simNode) fetch(namespaces []string, p fetchPlan) {
	p.lock, p.filter.Namespaces = n.d.plan.leases[n.d.random(len(n.d.plan.leases))], namespaces
	var turn *simInstance
	var claim int
	err := n.e.fetch(n.ctx, Orchestrator, p, func(_ context.Context, _ filter, _ Path, announce bool, _ rowWrite) (r report, err error) {
		if n.d.random(50) == 0 {
			n.d.pause(time.Millisecond)
			return report{}, errors.New("connection reset")
		}
		began := time.Now()
		turn, claim, r = n.fetchTurn(namespaces, p.lock, announce)
		n.d.do(func() {
			for _, freed := range n.d.releases {
				freed.looked = freed.looked || !freed.at.After(began) && serves(namespaces, freed.namespace)
			}
		})
		return r, nil
	})
	if err == nil && n.ctx.Err() == nil {
		n.handle(turn, claim, p.lock)
	}
}

func serves(namespaces []string, namespace string) bool {
	return namespaces == nil || slices.Contains(namespaces, namespace)
}

// fetchTurn is fetch_orchestration. What it locks others pass over until it commits.
func (n *simNode) fetchTurn(namespaces []string, lock time.Duration, announce bool) (turn *simInstance, claim int, r report) {
	d := n.d
	d.pause(2 * time.Millisecond)
	d.do(func() {
		now := d.now()
		until := now.Add(lock)
		for _, m := range d.messages {
			i := m.instance
			switch {
			case m.gone || m.visible.After(now) || i.busy || !serves(namespaces, i.namespace):
			case i.claim != 0 && i.until.After(now):
				m.visible, m.held = i.until, true
			case turn == nil:
				d.claims++
				turn, claim = i, d.claims
				i.busy = true
			}
		}
		for _, m := range d.messages {
			if m.instance == turn && !m.gone && !m.visible.After(now) {
				m.claim = claim
			}
		}
		r = d.outlook(namespaces, claim, now, until)
		r.leaseEnd = until
	})
	d.pause(2 * time.Millisecond)
	if turn != nil {
		r.found = 1
		d.do(func() { // the commit
			turn.busy, turn.claim, turn.until, turn.changed = false, claim, r.leaseEnd, time.Now()
			for _, m := range d.messages {
				if m.claim == claim {
					m.visible, m.held, m.silent = r.leaseEnd, false, false
				}
			}
			if announce {
				d.notify(nil, 0, &r.leaseEnd, nil)
			}
		})
	}
	d.pause(time.Millisecond)
	return turn, claim, r
}

// outlook is what a query says of what is left: of what it has claimed, that this is due when the lease ends.
func (d *deployment) outlook(namespaces []string, claim int, now, until time.Time) report {
	r := report{now: now}
	for _, m := range d.messages {
		if m.gone || !serves(namespaces, m.instance.namespace) {
			continue
		}
		at := m.visible
		if claim != 0 && m.claim == claim {
			at = until
		}
		if r.earliest.IsZero() || at.Before(r.earliest) {
			r.earliest = at
		}
	}
	return r
}

// poll is earliest_of_lanes.
func (n *simNode) poll(_ context.Context, filters []string, tell func(int, report)) error {
	d := n.d
	d.pause(2 * time.Millisecond)
	if d.random(50) == 0 {
		return errors.New("connection reset")
	}
	answers := make([]report, len(filters))
	d.do(func() {
		for at, text := range filters {
			namespaces := filterOf(text).Namespaces
			answers[at] = d.outlook(namespaces, 0, d.now(), time.Time{})
			for _, freed := range d.releases {
				freed.looked = freed.looked || serves(namespaces, freed.namespace)
			}
		}
	})
	d.pause(2 * time.Millisecond)
	for at, r := range answers {
		tell(at, r)
	}
	return nil
}

// handle ends a turn, or does not.
func (n *simNode) handle(turn *simInstance, claim int, lock time.Duration) {
	d := n.d
	switch d.random(10) {
	case 0: // the dispatcher dies with its lease
		return
	case 1:
		d.pause(20 * time.Millisecond)
		d.do(func() { d.giveBack(turn, claim, time.Duration(d.rng.IntN(2)*d.rng.IntN(500_000))*time.Microsecond) })
	case 2:
		d.pause(lock / 2)
		d.do(func() { d.renew(turn, claim, lock) })
		fallthrough
	default:
		d.pause(min(200*time.Millisecond, lock/2))
		n.ack(turn, claim)
	}
	if d.random(3) == 0 { // it has other things to do
		d.pause(3 * time.Second)
	}
}

// holds reports whether the claim's lease has not ended.
func (i *simInstance) holds(claim int, now time.Time) bool {
	return i.claim == claim && i.until.After(now) && !i.busy
}

// giveBack is abandon_orchestration.
func (d *deployment) giveBack(i *simInstance, claim int, delay time.Duration) {
	now := d.now()
	if !i.holds(claim, now) {
		return
	}
	at := now.Add(delay)
	i.claim, i.changed = 0, time.Now()
	for _, m := range d.messages {
		if m.claim == claim {
			m.visible, m.claim = at, 0
		} else if m.instance == i && m.held {
			m.visible, m.held = now, false
		}
	}
	d.notify(nil, 1, optional(at, delay == 0), &i.namespace)
}

// renew is renew_orchestration.
func (d *deployment) renew(i *simInstance, claim int, lock time.Duration) {
	if now := d.now(); i.holds(claim, now) {
		i.until = now.Add(lock)
		for _, m := range d.messages {
			if m.claim == claim || m.instance == i && m.held {
				m.visible = i.until
			}
		}
	}
}

// ack is AckOrchestrationItem: between its last snapshot and its commit, which a disk may hold up, messages come that
// it does not see, and that nobody else can take.
func (n *simNode) ack(i *simInstance, claim int) {
	d := n.d
	quiet, begun := n.e.quiet(), false
	var seen []*simMessage
	var due []produced
	d.do(func() {
		now := d.now()
		if begun = !n.doomed && i.holds(claim, now); !begun {
			return
		}
		i.busy = true
		n.untold++
		for _, m := range d.messages {
			if m.instance == i && !m.gone && (m.held || m.claim != claim && !m.visible.After(now)) {
				seen = append(seen, m)
				due = []produced{{queue: Orchestrator, namespace: i.namespace, dueAt: now, now: now}}
			}
		}
	})
	if !begun {
		return
	}
	d.pause([]time.Duration{2 * time.Millisecond, 300 * time.Millisecond}[d.random(4)/3])
	d.do(func() {
		now := d.now()
		i.busy, i.claim, i.changed = false, 0, time.Now()
		for _, m := range d.messages {
			m.gone = m.gone || m.claim == claim
		}
		for _, m := range seen {
			if m.held {
				m.visible, m.held = now, false
			}
		}
		if quiet {
			d.releases = append(d.releases, &simRelease{at: time.Now(), namespace: i.namespace})
		} else {
			d.notify(nil, 1, nil, &i.namespace)
		}
	})
	n.e.acked(i.namespace, due, quiet)
	d.do(func() { n.untold-- })
}

// The bounds of what a wake-up may take here: a late notification, queries that fail, rows that somebody has locked; and
// of a look after a release, which no lock delays.
const (
	simWakeBound    = 150 * time.Millisecond
	simReleaseBound = 60 * time.Millisecond
)

// simAbsence is for how long the place of a node that died stays empty at most.
const simAbsence = 30 * time.Second

// watch checks the invariants every few milliseconds, up to the first that does not hold.
func (d *deployment) watch(ctx context.Context) {
	for ctx.Err() == nil && d.violation == "" {
		time.Sleep(10 * time.Millisecond)
		d.do(func() { d.violation = cmp.Or(d.late(), d.unseen()) })
	}
}

// late: no due item waits while a dispatcher that may take it is parked.
func (d *deployment) late() string {
	now := time.Now()
	d.messages = slices.DeleteFunc(d.messages, func(m *simMessage) bool { return m.gone })
	for _, m := range d.messages {
		i := m.instance
		since := m.visible
		if i.changed.After(since) {
			since = i.changed
		}
		if m.silent || i.busy || i.claim != 0 && i.until.After(now) || now.Sub(since) <= simWakeBound {
			continue
		}
		if n := d.idler(i.namespace, now.Add(-simWakeBound)); n >= 0 {
			return fmt.Sprintf("a message of %q (%s) is due since %v, %v, while node %d has a dispatcher parked", i.name, i.namespace, now.Sub(m.visible), now.Sub(since), n)
		}
	}
	return ""
}

// unseen: whatever is released, somebody looks after that, if there is anybody.
func (d *deployment) unseen() string {
	now := time.Now()
	d.releases = slices.DeleteFunc(d.releases, func(r *simRelease) bool { return r.looked })
	for _, r := range d.releases {
		if now.Sub(r.at) <= simReleaseBound {
			continue
		}
		if n := d.idler(r.namespace, now.Add(-simReleaseBound)); n >= 0 {
			return fmt.Sprintf("nobody has looked for %v after a release in %q, while node %d has a dispatcher parked", now.Sub(r.at), r.namespace, n)
		}
	}
	return ""
}

// idler returns a node that has been listening since then, and has somebody parked who serves the namespace; or -1.
func (d *deployment) idler(namespace string, since time.Time) int {
	return slices.IndexFunc(d.nodes, func(n *simNode) bool {
		if n.e.epoch() == 0 || n.up.After(since) {
			return false
		}
		waiting := 0
		n.e.waiters.each(Orchestrator, namespace, func(l *lane) {
			l.mu.Lock()
			waiting += len(l.waiting)
			l.mu.Unlock()
		})
		return waiting > 0
	})
}

// A node that does not listen does not hear who joins, so it counts on nobody. Whatever order the moments take.
func TestDeployment_NodeJoinsWhileAnotherIsDeaf_IsToldOfItsLeases(t *testing.T) {
	for seed := range virtualtime.Seeds(200) {
		p := plan{seed: seed, policy: Never, leases: []time.Duration{10 * time.Second}, nodes: [][][]string{{nil}, {nil}}}
		p.steps = []step{
			{visits, 0, time.Second}, {goesDeaf, 0, 500 * time.Millisecond}, {dies, 1, time.Millisecond},
			{visits, 0, time.Second}, {visits, 0, 2 * time.Second}, {dies, 0, 5 * time.Millisecond},
		}
		virtualtime.Test(t, func(t *testing.T) { require.Empty(t, p.simulate(), "seed %d", seed) })
	}
}

// Invariants of leases.go and of the release, with everything that may come in between.
func TestDeployment_NodesGoDeafAndDie_NoDueItemWaitsForAParkedDispatcher(t *testing.T) {
	lanes := rapid.SampledFrom([][]string{nil, nil, {"blue"}, {"red"}, {"blue", "red"}})
	rapid.Check(t, func(rt *rapid.T) {
		nodes := rapid.SliceOfN(rapid.SliceOfN(lanes, 1, 2), 2, 3).Draw(rt, "nodes")
		// Where much is sent everybody looks all the time, and learns of leases by that.
		kinds := rapid.SampledFrom([][]string{
			{sends, sends, sendsQuietly, sendsQuietly, sendsQuietly, visits, goesDeaf, dies},
			{sends, visits, visits, strands, strands, goesDeaf},
		}).Draw(rt, "kinds")
		steps := rapid.Custom(func(rt *rapid.T) step {
			return step{
				kind:  rapid.SampledFrom(kinds).Draw(rt, "kind"),
				node:  rapid.IntRange(0, len(nodes)-1).Draw(rt, "node"),
				after: time.Duration(rapid.SampledFrom([]int{1, 5, 50, 500, 2000}).Draw(rt, "ms")) * time.Millisecond,
			}
		})
		p := plan{
			seed:   rapid.Uint64().Draw(rt, "seed"),
			policy: rapid.SampledFrom([]AggressivePolicy{Never, Never, Never, OnTrouble}).Draw(rt, "policy"), // polls make up for what is lost
			leases: rapid.SampledFrom([][]time.Duration{{2 * time.Second}, {10 * time.Second}, {time.Second, 4 * time.Second}}).Draw(rt, "leases"),
			nodes:  nodes,
			steps:  rapid.SliceOfN(steps, 5, 60).Draw(rt, "steps"),
		}
		var wrong string
		virtualtime.Test(t, func(*testing.T) { wrong = p.simulate() })
		if wrong != "" {
			rt.Fatal(wrong)
		}
	})
}
