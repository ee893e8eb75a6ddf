package pgwake

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: does the promise hold on a real server, whatever producers and nodes do?
//
// A scenario is drawn whole, and then run: nodes with lanes and dispatchers, and a schedule of what producers do in
// transactions of any length. Nothing polls, and the fallback is an hour away and comes when the test orders one: a
// wake-up that is lost is an item that waits for ever, and a test that fails by its patience. Without faults no
// fallback is needed. With faults one fallback of each node that survives must do.

// propertyCases is how many scenarios a property runs: few, or by PGWAKE_CASES=1000 as many as one has time for.
func propertyCases(t *testing.T, unless int) {
	t.Helper()
	checks := flag.Lookup("rapid.checks") // of all properties: it is put back
	was, n := checks.Value.String(), strconv.Itoa(unless)
	if was != checks.DefValue {
		n = was
	}
	if text := os.Getenv("PGWAKE_CASES"); text != "" {
		n = text
	}
	require.NoError(t, flag.Set(checks.Name, n), "PGWAKE_CASES")
	t.Cleanup(func() { _ = flag.Set(checks.Name, was) })
}

// drawnLane is what dispatchers fetch.
type drawnLane struct {
	Queue
	namespaces []string
	tags       TagFilter
}

var drawnLanes = []drawnLane{
	{Worker, nil, AnyTag()},
	{Orchestrator, nil, TagFilter{}},
	{Worker, nil, DefaultOnly()},
	{Worker, []string{"a"}, AnyTag()},
	{Worker, []string{"b"}, DefaultAnd("x")},
	{Worker, nil, Tags("x")},
	{Orchestrator, []string{"a"}, TagFilter{}},
	{Orchestrator, []string{"b"}, TagFilter{}},
}

func (l drawnLane) takes(i drawnItem) bool {
	labels, _ := l.tags.labels()
	return l.Queue == i.Queue && (l.namespaces == nil || slices.Contains(l.namespaces, i.namespace)) &&
		(i.Queue == Orchestrator || labels == nil || slices.Contains(labels, i.tag))
}

// drawnItem is an item, or a message for an instance of its own.
type drawnItem struct {
	Queue
	namespace, tag string
	delay          time.Duration
	handling       string
}

func (i drawnItem) String() string {
	return fmt.Sprintf("%v of %s, tag %q, after %v, %s", i.Queue, i.namespace, i.tag, i.delay, i.handling)
}

// drawnDispatcher is how one fetches.
type drawnDispatcher struct {
	poll   time.Duration // how long it waits; 0: until there is something
	cancel bool          // the wait ends with its context
	batch  int
	ackBy  bool // with its next fetch
}

type drawnNode struct {
	lanes       []drawnLane
	dispatchers [][]drawnDispatcher // by lane
	late        []bool              // by lane: they begin in the course of the schedule
	quietAbove  int
	notify      NotifyPolicy
	fanout      int
	skew        time.Duration // of its clock
	mortal      bool          // with leases that are soon over
}

type drawnStep struct {
	kind      string
	producer  int
	node      int
	lane      int
	isolation pgx.TxIsoLevel
	by        string // who inserts
	items     []drawnItem
	fate      string
	pause     time.Duration
}

type scenario struct {
	faults    bool
	serial    bool // each step waits for the one before, and there is one producer at a time
	stillness bool
	thaw      bool // mortals that were paused come back in the end; the others do
	nodes     []drawnNode
	simple    []bool // by producer: the simple protocol
	steps     []drawnStep
	last      []drawnStep // by producer: what is open in the end adds this, and has this fate
}

var isolations = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func drawScenario(t *rapid.T, faults bool) scenario {
	ms := func(most int, label string) time.Duration {
		return time.Duration(rapid.IntRange(0, most).Draw(t, label)) * time.Millisecond
	}
	s := scenario{faults: faults}
	s.serial = !faults && rapid.IntRange(0, 2).Draw(t, "serial") == 0
	s.stillness = !faults && rapid.IntRange(0, 5).Draw(t, "stillness") == 0
	s.thaw = faults && rapid.Bool().Draw(t, "thaw")
	// A lane in which nobody waits is told nothing only if nobody else waits either: so most have few.
	nodes := rapid.SampledFrom([]int{1, 1, 1, 2, 2, 3, 4}).Draw(t, "nodes")
	if faults {
		nodes = rapid.IntRange(2, 3).Draw(t, "nodes")
	}
	for range nodes {
		n := drawnNode{quietAbove: rapid.SampledFrom([]int{0, 1}).Draw(t, "quiet above")}
		n.notify = rapid.SampledFrom([]NotifyPolicy{NotifyDirected, NotifyDirected, NotifyDirected, NotifyQuiescent, NotifyBroadcast}).Draw(t, "notify")
		n.fanout = rapid.SampledFrom([]int{0, 1, 3}).Draw(t, "fanout")
		n.skew = rapid.SampledFrom([]time.Duration{0, 0, 0, 3 * time.Hour, -3 * time.Hour}).Draw(t, "skew")
		n.mortal = faults && len(s.nodes) > 0 && rapid.Bool().Draw(t, "mortal")
		for range rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(t, "lanes") {
			n.lanes = append(n.lanes, rapid.SampledFrom(drawnLanes).Draw(t, "lane"))
			n.late = append(n.late, rapid.Bool().Draw(t, "late"))
			var dispatchers []drawnDispatcher
			for range rapid.IntRange(1, 3).Draw(t, "dispatchers") {
				d := drawnDispatcher{batch: rapid.IntRange(1, 3).Draw(t, "batch"), ackBy: rapid.Bool().Draw(t, "ack by the next fetch")}
				if rapid.IntRange(0, 2).Draw(t, "short polls") == 0 {
					d.poll, d.cancel = time.Millisecond+ms(20, "poll"), rapid.IntRange(0, 3).Draw(t, "cancel") == 0
				}
				dispatchers = append(dispatchers, d)
			}
			n.dispatchers = append(n.dispatchers, dispatchers)
		}
		s.nodes = append(s.nodes, n)
	}
	fates := []string{"commit", "commit", "commit", "rollback", "dies"}
	for range rapid.IntRange(1, 3).Draw(t, "producers") {
		s.simple = append(s.simple, rapid.Bool().Draw(t, "simple protocol"))
	}
	kinds := []string{"begin", "begin", "insert", "insert", "insert", "savepoint", "end", "end", "library", "start", "release", "settle", "barrier", "pause", "fallback", "leave"}
	if !s.serial && psqlPath() != "" {
		kinds = append(kinds, "psql")
	}
	if faults {
		kinds = slices.DeleteFunc(kinds, func(k string) bool { return k == "barrier" || k == "fallback" || k == "psql" })
		kinds = append(kinds, "die", "cut", "deafen", "freeze", "freeze", "deafen", "die", "thaw")
	}
	// Items are for lanes that there are, most of the time.
	var wanted []drawnLane
	for _, n := range s.nodes {
		wanted = append(wanted, n.lanes...)
	}
	item := rapid.Custom(func(t *rapid.T) drawnItem {
		i := drawnItem{
			Queue:     rapid.SampledFrom(wanted).Draw(t, "for").Queue,
			namespace: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "namespace"),
			handling:  rapid.SampledFrom([]string{"quick", "quick", "brief", "blocks", "abandons"}).Draw(t, "handling"),
		}
		if i.Queue == Worker {
			i.tag = rapid.SampledFrom([]string{"", "x"}).Draw(t, "tag")
		}
		if rapid.IntRange(0, 5).Draw(t, "delayed") == 0 {
			i.delay = ms(30, "delay")
		}
		return i
	})
	step := rapid.Custom(func(t *rapid.T) drawnStep {
		d := drawnStep{kind: rapid.SampledFrom(kinds).Draw(t, "kind")}
		switch d.kind {
		case "begin", "insert", "savepoint", "end", "psql", "library":
			d.producer = rapid.IntRange(0, len(s.simple)-1).Draw(t, "producer")
			d.isolation = rapid.SampledFrom(isolations).Draw(t, "isolation")
			d.by = rapid.SampledFrom([]string{"rows", "function", "twin"}).Draw(t, "by")
			d.fate = rapid.SampledFrom(fates).Draw(t, "fate")
		case "pause":
			d.pause = ms(5, "pause")
			return d
		}
		d.node = rapid.IntRange(0, len(s.nodes)-1).Draw(t, "node")
		switch d.kind {
		case "insert", "savepoint", "psql", "library":
			most := rapid.SampledFrom([]int{1, 1, 6, 12}).Draw(t, "many")
			d.items = rapid.SliceOfN(item, 1, most).Draw(t, "items")
		case "start":
			d.lane = rapid.IntRange(0, len(s.nodes[d.node].lanes)-1).Draw(t, "lane")
		}
		return d
	})
	for at := range s.simple {
		s.last = append(s.last, drawnStep{kind: "insert", producer: at, by: rapid.SampledFrom([]string{"rows", "function"}).Draw(t, "last by"),
			items: rapid.SliceOfN(item, 0, 2).Draw(t, "last items"), fate: rapid.SampledFrom(fates).Draw(t, "last fate")})
	}
	s.steps = rapid.SliceOfN(step, 8, 50).Draw(t, "steps")
	return s
}

var psqlPath = sync.OnceValue(func() string {
	path, _ := exec.LookPath("psql")
	return path
})

// propertyItem is what became of an item. The world's mutex guards it.
type propertyItem struct {
	drawnItem
	name      string
	committed bool
	unsure    bool // nobody knows
	fetched   int
	abandoned int
	held      int
}

// propertyNode is a Provider whose connections can be cut.
type propertyNode struct {
	*Provider
	drawnNode
	w       *world
	name    string // application_name
	pool    *pgxpool.Pool
	lease   time.Duration
	started []bool

	ctx     context.Context
	stop    context.CancelFunc
	gone    chan struct{} // closed when its handlers are to end
	away    bool          // it has left, or died
	running sync.WaitGroup

	ordered atomic.Bool // a fallback
	engine  atomic.Pointer[engine]
	frozen  atomic.Pointer[chan struct{}]

	mu    sync.Mutex
	dead  bool
	conns []net.Conn
}

type propertyDispatcher struct {
	drawnDispatcher
	n        *propertyNode
	lane     drawnLane
	fetching atomic.Bool
}

// propertyProducer is a connection, and the transaction that is open on it. Its goroutine does one thing after another.
type propertyProducer struct {
	conn   *pgx.Conn
	simple bool
	todo   chan func()
	tx     pgx.Tx
	inside []*propertyItem // of the transaction
	doomed bool            // the server has refused it
	open   bool            // these are the schedule's
	rc     bool            // READ COMMITTED
	added  bool            // something, and so may keep lanes from settling
}

// world is a scenario that runs.
type world struct {
	scenario
	t      *rapid.T
	schema string
	peek   *pgx.Conn
	nodes  []*propertyNode

	producers []*propertyProducer
	producing sync.WaitGroup // the goroutines
	pending   sync.WaitGroup // what they have to do

	mu          sync.Mutex
	items       []*propertyItem
	byName      map[string]*propertyItem
	released    chan struct{}
	dispatchers []*propertyDispatcher
	problems    []string
	severed     []int32 // backends whose sockets were closed

	stalled atomic.Bool // the machine stood still for longer than an announcement may be late
}

// watch notices when the machine stands still.
func (w *world) watch(ctx context.Context) {
	for last := time.Now(); sleep(ctx, announceGrace/20); last = time.Now() {
		if time.Since(last) > announceGrace/4 {
			w.stalled.Store(true)
		}
	}
}

// property is what the scenarios of a test have in common: a schema, and what they add up to.
type property struct {
	schema string
	peek   *pgx.Conn
	cases  int
	total  struct {
		items, committed, searched, unannounced, byFallback int64
		finds                                               map[string]int64
	}
}

func newProperty(t *testing.T) *property {
	t.Helper()
	p := &property{schema: testProvider(t, Config{}).cfg.Schema}
	p.peek = plain(t, p.schema)
	mustExec(t, p.peek, `INSERT INTO namespaces (name) VALUES ('a'), ('b')`)
	p.total.finds = make(map[string]int64)
	t.Cleanup(func() {
		t.Logf("%d scenarios, %d items, %d of them committed; finds: %v; %d found unannounced behind open producers, %d that only a fallback found",
			p.cases, p.total.items, p.total.committed, p.total.finds, p.total.unannounced, p.total.byFallback)
	})
	return p
}

func (p *property) run(t *rapid.T, s scenario) {
	w := &world{scenario: s, t: t, schema: p.schema, peek: p.peek, byName: make(map[string]*propertyItem), released: make(chan struct{})}
	p.cases++
	_, err := w.peek.Exec(tctx, `DELETE FROM worker_queue; DELETE FROM orchestrator_queue; DELETE FROM instance_locks; DELETE FROM instances`)
	require.NoError(t, err)
	watching, stop := context.WithCancel(tctx)
	w.producing.Go(func() { w.watch(watching) })
	defer w.end()
	defer stop()
	w.begin()
	for _, step := range s.steps {
		w.do(step)
		if s.serial || step.kind == "settle" || step.kind == "barrier" {
			w.pending.Wait()
		}
		if step.kind == "barrier" {
			w.requireNoneWaits("at a barrier")
		}
		w.requireNoProblem()
	}
	if s.faults {
		p.total.byFallback += int64(w.finishAfterFaults())
	} else {
		w.finish()
	}
	w.requireNoProblem()
	for _, n := range w.nodes {
		st := n.Stats()
		for _, q := range []QueueStats{st.Worker, st.Orchestrator} {
			for why, count := range q.Finds {
				p.total.finds[why] += count
			}
			p.total.unannounced += q.FallbackFinds + q.ScoutFinds
		}
	}
	p.total.items += int64(len(w.items))
	for _, i := range w.items {
		if i.committed {
			p.total.committed++
		}
	}
}

// tctx is for what a scenario does: rapid ends its own context before the clean-up.
var tctx = context.Background()

func (w *world) begin() {
	var opening sync.WaitGroup
	for at, d := range w.scenario.nodes {
		n := &propertyNode{drawnNode: d, w: w, name: fmt.Sprintf("%s %d", w.schema, at), lease: time.Hour, started: make([]bool, len(d.lanes)), gone: make(chan struct{})}
		if n.mortal {
			n.lease = 200 * time.Millisecond
		}
		n.ctx, n.stop = context.WithCancel(tctx)
		w.nodes = append(w.nodes, n)
		opening.Go(func() {
			if err := n.open(); err != nil {
				w.problem("open a node: %v", err)
			}
		})
	}
	for _, simple := range w.simple {
		p := &propertyProducer{simple: simple, todo: make(chan func(), len(w.steps)+10)}
		w.producers = append(w.producers, p)
		w.producing.Go(func() {
			for do := range p.todo {
				do()
				w.pending.Done()
			}
			w.sever(p)
		})
		opening.Go(func() { w.connect(p) })
	}
	opening.Wait()
	w.requireNoProblem()
	for _, n := range w.nodes {
		for lane, late := range n.late {
			if !late {
				n.start(lane)
			}
		}
	}
}

func (n *propertyNode) open() error {
	config, err := pgxpool.ParseConfig(testdbURL)
	if err != nil {
		return err
	}
	config.MaxConns = 6
	config.ConnConfig.RuntimeParams["application_name"] = n.name
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.dead {
			_ = conn.Close()
			return nil, errors.New("the node is dead")
		}
		n.conns = append(n.conns, conn)
		return conn, nil
	}
	if n.pool, err = pgxpool.NewWithConfig(tctx, config); err != nil {
		return err
	}
	n.Provider, err = New(tctx, n.pool, &Config{
		Schema: n.w.schema, SkipMigrate: true, Logger: silent, QuietAbove: n.quietAbove,
		Notify: n.notify, WakeFanout: n.fanout, clock: func() time.Time { return time.Now().Add(n.skew) },
		FallbackInterval: time.Hour, AggressivePolicy: Never, NotifyDeliveryTimeout: patient, fault: n.fault,
	})
	if err == nil {
		n.engine.Store(n.Provider.engine)
	}
	return err
}

// fault runs in the goroutine of the listener: it stops it, and brings a fallback forward.
func (n *propertyNode) fault(point string) {
	if point != "listener" {
		return
	}
	if frozen := n.frozen.Load(); frozen != nil {
		<-*frozen
	}
	if e := n.engine.Load(); e != nil && n.ordered.CompareAndSwap(true, false) {
		e.listener.nextFallback = time.Now()
	}
}

// fallback has the node make one, and waits for it.
func (n *propertyNode) fallback() {
	before := n.Stats().Fallbacks
	n.ordered.Store(true)
	ctx, cancel := context.WithTimeout(tctx, patient)
	defer cancel()
	var one int
	if err := n.Provider.engine.exec(ctx, &one, "SELECT 1"); err != nil { // which moves the listener
		n.w.problem("order a fallback: %v", err)
	}
	n.w.eventually("the fallback", func() bool { return n.Stats().Fallbacks > before })
}

func (n *propertyNode) start(lane int) {
	if n.started[lane] || n.away {
		return
	}
	n.started[lane] = true
	for _, drawn := range n.dispatchers[lane] {
		d := &propertyDispatcher{drawnDispatcher: drawn, n: n, lane: n.lanes[lane]}
		n.w.mu.Lock()
		n.w.dispatchers = append(n.w.dispatchers, d)
		n.w.mu.Unlock()
		n.running.Go(d.run)
	}
}

// dispatched is an item in the hands of a dispatcher.
type dispatched struct {
	item  *propertyItem
	token LockToken
}

func (d *propertyDispatcher) run() {
	var owed []LockToken
	defer func() {
		if len(owed) == 0 {
			return
		}
		if err := d.n.w.nodes[0].AckWorkItems(tctx, owed); !errors.Is(err, ErrLockLost) { // the last fetch may have done it
			d.settle(nil, err)
		}
	}()
	for d.n.ctx.Err() == nil {
		o := &FetchOptions{LockTimeout: d.n.lease, PollTimeout: d.poll, Namespaces: d.lane.namespaces, Tags: d.lane.tags, Ack: owed}
		if d.lane.Queue == Orchestrator {
			o.Tags, o.Ack = TagFilter{}, nil
		}
		ctx, cancel := d.n.ctx, context.CancelFunc(func() {})
		switch {
		case d.poll == 0:
			o.PollTimeout = time.Hour
		case d.cancel && len(owed) == 0:
			ctx, cancel = context.WithTimeout(ctx, d.poll)
			o.PollTimeout = time.Hour
		}
		d.fetching.Store(true)
		got, err := d.fetch(ctx, o)
		d.fetching.Store(false)
		cancel()
		var lost *LostLocksError
		switch {
		case err == nil, errors.Is(err, ErrNoWork):
			owed = nil
		case d.n.w.faults && errors.As(err, &lost):
			owed = nil
		case errors.Is(err, ErrClosed):
			return
		case d.n.ctx.Err() != nil:
			owed = nil // it was done when the wait began
			return
		case errors.Is(err, context.DeadlineExceeded): // its own, or that of a poll for which no connection came free
		case d.n.w.faults:
			sleep(d.n.ctx, 2*time.Millisecond)
		default:
			d.n.w.problem("fetch: %v", err)
			return
		}
		for _, g := range got {
			if d.handle(g) {
				owed = append(owed, g.token)
			}
		}
	}
}

func (d *propertyDispatcher) fetch(ctx context.Context, o *FetchOptions) (got []dispatched, err error) {
	if d.lane.Queue == Orchestrator {
		turn, err := d.n.FetchOrchestrationItem(ctx, o)
		if err != nil {
			return nil, err
		}
		return []dispatched{{d.n.w.fetched(turn.Instance), turn.LockToken}}, nil
	}
	items, err := d.n.FetchWorkItems(ctx, d.batch, o)
	for _, i := range items {
		got = append(got, dispatched{d.n.w.fetched(i.Name), i.LockToken})
	}
	return got, err
}

// fetched takes it down that an item was delivered.
func (w *world) fetched(name string) *propertyItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.byName[name]
	if i == nil {
		w.problems = append(w.problems, "nobody has added "+name)
		return &propertyItem{name: name}
	}
	i.fetched++
	i.held++
	if !w.faults && i.held > 1 {
		w.problems = append(w.problems, name+" was handed out twice")
	}
	return i
}

// handle does what the item demands. It returns whether the next fetch is to acknowledge it.
func (d *propertyDispatcher) handle(g dispatched) (owed bool) {
	w, item, worker := d.n.w, g.item, d.lane.Queue == Worker
	w.mu.Lock()
	released, first := w.released, item.fetched == 1
	w.mu.Unlock()
	switch item.handling {
	case "brief":
		sleep(d.n.ctx, 2*time.Millisecond)
	case "blocks":
		select {
		case <-released:
		case <-d.n.gone:
		}
	case "abandons":
		if !first {
			break
		}
		w.mu.Lock()
		item.abandoned++
		item.held--
		w.mu.Unlock()
		o := &AbandonOptions{Delay: item.delay}
		abandon := d.n.AbandonWorkItem
		if !worker {
			abandon = d.n.AbandonOrchestrationItem
		}
		err := abandon(tctx, g.token, o)
		if errors.Is(err, ErrClosed) && !d.n.isDead() {
			abandon = w.nodes[0].AbandonWorkItem
			if !worker {
				abandon = w.nodes[0].AbandonOrchestrationItem
			}
			err = abandon(tctx, g.token, o)
		}
		d.settle(nil, err)
		return false
	}
	if d.n.isDead() {
		return false
	}
	if worker && d.ackBy {
		w.mu.Lock()
		item.held--
		w.mu.Unlock()
		return true
	}
	ack := func(p *Provider) error {
		if worker {
			if d.batch == 3 {
				return p.AckBatched(tctx, g.token, nil)
			}
			return p.AckWorkItem(tctx, g.token, nil)
		}
		return p.AckOrchestrationItem(tctx, g.token, OrchestrationAck{Metadata: Metadata{Name: "flow"}})
	}
	w.mu.Lock()
	item.held--
	w.mu.Unlock()
	err := ack(d.n.Provider)
	if errors.Is(err, ErrClosed) && !d.n.isDead() {
		err = ack(w.nodes[0].Provider)
	}
	d.settle(item, err)
	return false
}

func (d *propertyDispatcher) settle(item *propertyItem, err error) {
	if err != nil && !d.n.w.faults {
		d.n.w.problem("end of %v: %v", item, err)
	}
}

func (n *propertyNode) isDead() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dead
}

// problem is for goroutines: the schedule ends with it.
func (w *world) problem(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, fmt.Sprintf(format, args...))
}

func (w *world) requireNoProblem() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.problems) > 0 {
		w.t.Fatalf("%s", strings.Join(w.problems, "\n"))
	}
}

// eventually fails the scenario, with what is known of it, if it does not come true.
func (w *world) eventually(what string, condition func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(patient)
	for pause := 500 * time.Microsecond; !condition(); pause = min(2*pause, 10*time.Millisecond) {
		w.requireNoProblem()
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: it does not come true\n%s", what, w.state())
		}
		time.Sleep(pause)
	}
}

// make takes items down that are about to be added.
func (w *world) make(all []drawnItem) []*propertyItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	var made []*propertyItem
	for _, d := range all {
		i := &propertyItem{drawnItem: d, name: fmt.Sprintf("i%d", len(w.items))}
		w.items = append(w.items, i)
		w.byName[i.name] = i
		made = append(made, i)
	}
	return made
}

func (i *propertyItem) String() string {
	return fmt.Sprintf("%s (%v): committed %v, unsure %v, fetched %d, abandoned %d, held %d",
		i.name, i.drawnItem, i.committed, i.unsure, i.fetched, i.abandoned, i.held)
}

func (w *world) commit(items []*propertyItem) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range items {
		i.committed = true
	}
}

// of splits the items by queue, in their order.
func of(items []*propertyItem) (work, messages []*propertyItem) {
	for _, i := range items {
		if i.Queue == Worker {
			work = append(work, i)
		} else {
			messages = append(messages, i)
		}
	}
	return work, messages
}

// insertSQL is what a producer in any language sends, a statement for each queue. Names are our own and need no quotes.
func insertSQL(items []*propertyItem, byFunction bool) (statements []string) {
	for at, all := range [2][]*propertyItem{} {
		work, messages := of(items)
		worker := at == 0
		if all = messages; worker {
			all = work
		}
		if len(all) == 0 {
			continue
		}
		var names, namespaces, tags, delays, rows, kinds []string
		for _, i := range all {
			delay := fmt.Sprintf("%dms", i.delay.Milliseconds())
			names, namespaces = append(names, i.name), append(namespaces, i.namespace)
			tags, delays, kinds = append(tags, strconv.Quote(i.tag)), append(delays, delay), append(kinds, "start")
			if worker {
				rows = append(rows, fmt.Sprintf("('%s', '%s', '%s', clock_timestamp() + interval '%s')", i.name, i.namespace, i.tag, delay))
			} else {
				rows = append(rows, fmt.Sprintf("('%s', 'start', 'flow', '%s', clock_timestamp() + interval '%s')", i.name, i.namespace, delay))
			}
		}
		array := func(all []string) string { return "'{" + strings.Join(all, ",") + "}'" }
		switch {
		case worker && byFunction:
			statements = append(statements, fmt.Sprintf("SELECT count(*) FROM enqueue_work_many(%s, NULL, %s, p_delays => %s, p_tags => %s)",
				array(names), array(namespaces), array(delays), array(tags)))
		case worker:
			statements = append(statements, "INSERT INTO worker_queue (name, namespace, tag, visible_at) VALUES "+strings.Join(rows, ", "))
		case byFunction:
			flows := slices.Repeat([]string{"flow"}, len(names))
			statements = append(statements, fmt.Sprintf("SELECT count(*) FROM enqueue_message_many(%s, %s, NULL, %s, p_namespaces => %s, p_delays => %s)",
				array(names), array(kinds), array(flows), array(namespaces), array(delays)))
		default:
			statements = append(statements, "INSERT INTO orchestrator_queue (instance_id, kind, name, namespace, visible_at) VALUES "+strings.Join(rows, ", "))
		}
	}
	return statements
}

// enqueues are the items as arguments of the library.
func enqueues(items []*propertyItem) (work []WorkEnqueue, messages []MessageEnqueue) {
	for _, i := range items {
		o := EnqueueOptions{Namespace: i.namespace, Delay: i.delay}
		if i.Queue == Worker {
			work = append(work, WorkEnqueue{WorkItem: WorkItem{Name: i.name, Tag: i.tag}, EnqueueOptions: o})
		} else {
			messages = append(messages, MessageEnqueue{Message: Message{Instance: i.name, Kind: MessageStart, Name: "flow"}, EnqueueOptions: o})
		}
	}
	return work, messages
}

var testdbURL string

func (w *world) connect(p *propertyProducer) {
	config, err := pgx.ParseConfig(testdbURL)
	if err == nil {
		config.RuntimeParams["search_path"] = pgx.Identifier{w.schema}.Sanitize()
		if p.simple {
			config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		}
		p.conn, err = pgx.ConnectConfig(tctx, config)
	}
	if err != nil {
		w.problem("connect a producer: %v", err)
	}
}

// sever ends the connection of a producer, and with it the transaction.
func (w *world) sever(p *propertyProducer) {
	if p.conn != nil {
		_ = p.conn.PgConn().Conn().Close()
		_ = p.conn.Close(tctx)
	}
	p.tx, p.inside, p.doomed = nil, nil, false
}

// refused takes the error of a statement. The server may refuse a SERIALIZABLE transaction.
func (w *world) refused(p *propertyProducer, err error) bool {
	if err == nil {
		return false
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "25P02") || errors.Is(err, pgx.ErrTxCommitRollback) {
		p.doomed = true
	} else {
		w.problem("produce: %v", err)
	}
	return true
}

// produce has a producer do something after what it does now.
func (w *world) produce(p *propertyProducer, do func()) {
	w.pending.Add(1)
	p.todo <- do
}

// querierTx is what a producer inserts with.
type querierTx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func (w *world) insert(p *propertyProducer, as querierTx, twin *propertyNode, step drawnStep, items []*propertyItem) (ok bool) {
	if tx, is := as.(pgx.Tx); is && twin != nil {
		work, messages := enqueues(items)
		if len(work) > 0 {
			if _, err := twin.EnqueueForWorkerManyTx(tctx, tx, work); w.refused(p, err) {
				return false
			}
		}
		if len(messages) > 0 {
			if _, err := twin.EnqueueForOrchestratorManyTx(tctx, tx, messages); w.refused(p, err) {
				return false
			}
		}
		return true
	}
	for _, statement := range insertSQL(items, step.by != "rows") {
		if _, err := as.Exec(tctx, statement); w.refused(p, err) {
			return false
		}
	}
	return true
}

// endTx ends the transaction of a producer.
func (w *world) endTx(p *propertyProducer, fate string) {
	p.open = false
	w.produce(p, func() {
		if p.tx == nil {
			return
		}
		switch {
		case fate == "dies":
			w.sever(p)
			w.connect(p)
		case fate == "rollback" || p.doomed:
			if err := p.tx.Rollback(tctx); err != nil {
				w.problem("roll back: %v", err)
			}
		default:
			if !w.refused(p, p.tx.Commit(tctx)) {
				w.commit(p.inside)
			}
		}
		p.tx, p.inside, p.doomed = nil, nil, false
	})
}

// do begins a step of the schedule. One that makes no sense does nothing.
func (w *world) do(step drawnStep) {
	n := w.nodes[step.node]
	if w.serial && slices.ContainsFunc(w.producers, func(p *propertyProducer) bool { return p.open }) {
		switch step.kind { // one producer at a time
		case "begin", "insert", "savepoint", "end":
			step.producer = slices.IndexFunc(w.producers, func(p *propertyProducer) bool { return p.open })
		case "library":
			return
		}
	}
	p := w.producers[step.producer]
	switch step.kind {
	case "begin":
		if p.open {
			return
		}
		p.open, p.rc, p.added = true, step.isolation == pgx.ReadCommitted, false
		w.produce(p, func() {
			tx, err := p.conn.BeginTx(tctx, pgx.TxOptions{IsoLevel: step.isolation})
			if err != nil {
				w.problem("begin: %v", err)
				return
			}
			p.tx = tx
			_, err = tx.Exec(tctx, "SELECT 1") // from here on the snapshot may be an old one
			w.refused(p, err)
		})
	case "insert":
		p.added = true
		items := w.make(step.items)
		twin := n
		if step.by != "twin" || !p.open || !p.rc || n.away {
			twin = nil
		}
		w.produce(p, func() {
			switch {
			case p.doomed:
			case p.tx != nil:
				if w.insert(p, p.tx, twin, step, items) {
					p.inside = append(p.inside, items...)
				}
			default: // each statement is a transaction
				if w.insert(p, p.conn, nil, step, items) {
					w.commit(items)
				}
			}
		})
	case "savepoint":
		if !p.open {
			return
		}
		p.added = true
		items, keep := w.make(step.items), step.fate == "commit"
		twin := n
		if step.by != "twin" || !p.rc || n.away {
			twin = nil
		}
		w.produce(p, func() {
			if p.tx == nil || p.doomed {
				return
			}
			inner, err := p.tx.Begin(tctx)
			if w.refused(p, err) || !w.insert(p, inner, twin, step, items) {
				return
			}
			if keep {
				if !w.refused(p, inner.Commit(tctx)) {
					p.inside = append(p.inside, items...)
				}
			} else {
				w.refused(p, inner.Rollback(tctx))
			}
		})
	case "end":
		w.endTx(p, step.fate)
	case "psql":
		items := w.make(step.items)
		w.produce(p, func() { w.psql(step, items) })
	case "library":
		if n.away {
			return
		}
		items := w.make(step.items)
		w.produce(w.producers[0], func() {
			work, messages := enqueues(items)
			var err error
			switch {
			case len(work) == 0:
			case step.fate != "commit":
				_, err = n.EnqueueForWorkerMany(tctx, work)
			default: // each by itself, all at once
				var calls sync.WaitGroup
				errs := make([]error, len(work))
				for at, item := range work {
					calls.Go(func() { _, errs[at] = n.EnqueueForWorker(tctx, item.WorkItem, &item.EnqueueOptions) })
				}
				calls.Wait()
				err = errors.Join(errs...)
			}
			if len(messages) > 0 && err == nil {
				_, err = n.EnqueueForOrchestratorMany(tctx, messages)
			}
			if err == nil {
				w.commit(items)
				return
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, i := range items {
				i.unsure = true
			}
			if !w.faults {
				w.problems = append(w.problems, "enqueue: "+err.Error())
			}
		})
	case "start":
		n.start(step.lane)
	case "release":
		w.release()
	case "pause":
		time.Sleep(step.pause)
	case "fallback":
		if !n.away {
			n.fallback()
		}
	case "leave":
		w.leave(n)
	case "die":
		w.die(n)
	case "cut":
		if n.mortal && !n.away {
			w.cut(n, false)
		}
	case "deafen":
		if !n.away {
			w.exec(`SELECT pg_terminate_backend($1)`, n.Provider.engine.listener.pid.Load())
		}
	case "freeze":
		if n.frozen.Load() == nil && !n.away {
			n.frozen.Store(new(make(chan struct{})))
		}
	case "thaw":
		n.thawUp()
	}
}

func (n *propertyNode) thawUp() {
	if frozen := n.frozen.Swap(nil); frozen != nil {
		close(*frozen)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.peek.Exec(tctx, sql, args...)
	require.NoError(w.t, err)
}

func (w *world) psql(step drawnStep, items []*propertyItem) {
	half := len(items) / 2 // these are rolled back to a savepoint
	kept, undone := items[half:], items[:half]
	script := []string{"BEGIN ISOLATION LEVEL " + string(step.isolation)}
	script = append(script, insertSQL(kept, step.by != "rows")...)
	script = append(script, "SAVEPOINT s")
	script = append(script, insertSQL(undone, step.by != "rows")...)
	script = append(script, "ROLLBACK TO s", map[bool]string{true: "COMMIT", false: "ROLLBACK"}[step.fate == "commit"], "")
	cmd := exec.Command(psqlPath(), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.DevNull, "-d", testdbURL)
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+w.schema)
	cmd.Stdin = strings.NewReader(strings.Join(script, ";\n"))
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil && !strings.Contains(string(out), "could not serialize"):
		w.problem("psql: %v: %s", err, out)
	case err == nil && step.fate == "commit":
		w.commit(kept)
	}
}

// release ends all handlers that are blocked at this moment.
func (w *world) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.released)
	w.released = make(chan struct{})
}

// leave closes a node in good order, with dispatchers that wait. The first one stays.
func (w *world) leave(n *propertyNode) {
	if n == w.nodes[0] || n.away {
		return
	}
	w.pending.Wait()
	n.away = true
	n.thawUp()
	close(n.gone)
	n.close()
}

func (n *propertyNode) close() {
	ctx, cancel := context.WithTimeout(tctx, patient)
	defer cancel()
	if n.Provider != nil {
		if err := n.Close(ctx); err != nil && !n.isDead() {
			n.w.problem("close: %v", err)
		}
	}
	n.running.Wait()
}

// die has a node end without a word, as the process does.
func (w *world) die(n *propertyNode) {
	if !n.mortal || n.away {
		return
	}
	n.away = true
	w.cut(n, true)
	n.stop()
	close(n.gone)
	n.thawUp()
	n.running.Wait()
}

// cut closes the sockets of a node.
func (w *world) cut(n *propertyNode, forEver bool) {
	rows, err := w.peek.Query(tctx, `SELECT pid FROM pg_stat_activity WHERE application_name = $1`, n.name)
	require.NoError(w.t, err)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	require.NoError(w.t, err)
	w.severed = append(w.severed, pids...)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead = forEver
	for _, conn := range n.conns {
		_ = conn.Close()
	}
	n.conns = nil
}

// dueRow is an item that is due and free.
type dueRow struct {
	name string
	drawnItem
}

// due asks for the rows that are in the queues: those that are due and free, or all.
func (w *world) due(all bool) (rows []dueRow) {
	w.t.Helper()
	r, err := w.peek.Query(tctx, `
		SELECT 'worker', name, namespace, tag FROM worker_queue WHERE $1 OR visible_at <= clock_timestamp()
		UNION ALL
		SELECT 'orchestrator', q.instance_id, q.namespace, '' FROM orchestrator_queue q
		 WHERE $1 OR q.visible_at <= clock_timestamp() AND NOT EXISTS (
			SELECT FROM instance_locks l WHERE l.instance_id = q.instance_id AND l.locked_until > clock_timestamp())`, all)
	require.NoError(w.t, err)
	var queue string
	var d dueRow
	_, err = pgx.ForEachRow(r, []any{&queue, &d.name, &d.namespace, &d.tag}, func() error {
		if d.Queue = Worker; queue != "worker" {
			d.Queue = Orchestrator
		}
		rows = append(rows, d)
		return nil
	})
	require.NoError(w.t, err)
	return rows
}

// requireNoneWaits asserts the promise: no item is due and free while somebody waits who may take it.
func (w *world) requireNoneWaits(when string) {
	w.t.Helper()
	w.eventually("no due item waits while somebody does, "+when, func() bool {
		return !slices.ContainsFunc(w.due(false), func(row dueRow) bool {
			return slices.ContainsFunc(w.dispatchers, func(d *propertyDispatcher) bool { return d.fetching.Load() && d.lane.takes(row.drawnItem) })
		})
	})
}

// requireAllHandled waits until nothing is left that a lane of the nodes takes.
func (w *world) requireAllHandled(nodes []*propertyNode) {
	w.t.Helper()
	w.eventually("all is handled", func() bool {
		w.release() // those that were blocked meanwhile
		return !slices.ContainsFunc(w.due(true), func(row dueRow) bool { return taken(nodes, row.drawnItem) })
	})
}

func taken(nodes []*propertyNode, i drawnItem) bool {
	return slices.ContainsFunc(nodes, func(n *propertyNode) bool {
		return slices.ContainsFunc(n.lanes, func(l drawnLane) bool { return l.takes(i) })
	})
}

// here are the nodes that are left.
func (w *world) here() (here []*propertyNode) {
	for _, n := range w.nodes {
		if !n.away {
			here = append(here, n)
		}
	}
	return here
}

// startAll has everybody begin who has not.
func (w *world) startAll() {
	for _, n := range w.nodes {
		for lane := range n.lanes {
			n.start(lane)
		}
	}
}

// requireDelivery adds one more item for each lane, which a notification alone can tell of.
func (w *world) requireDelivery(nodes []*propertyNode) {
	w.t.Helper()
	fallbacks := func() (n int64) {
		for _, s := range nodes {
			n += s.Stats().Fallbacks
		}
		return n
	}
	made := fallbacks()
	p := w.producers[0]
	for _, n := range nodes {
		for _, l := range n.lanes {
			i := drawnItem{Queue: l.Queue, namespace: "a", handling: "quick"}
			if l.namespaces != nil {
				i.namespace = l.namespaces[0]
			}
			if labels, _ := l.tags.labels(); l.Queue == Worker && labels != nil {
				i.tag = labels[0]
			}
			items := w.make([]drawnItem{i})
			w.produce(p, func() {
				if w.insert(p, p.conn, nil, drawnStep{by: "rows"}, items) {
					w.commit(items)
				}
			})
			w.pending.Wait()
			w.requireAllHandled(nodes)
		}
	}
	if made != fallbacks() {
		w.t.Fatalf("more fallbacks were made")
	}
}

// settle waits until every lane has settled, unless a producer keeps them from it.
func (w *world) settle() {
	w.t.Helper()
	w.eventually("it settles", func() bool {
		return slices.ContainsFunc(w.producers, func(p *propertyProducer) bool { return p.open && p.added }) ||
			!slices.ContainsFunc(w.here(), func(n *propertyNode) bool {
				s := n.Stats()
				return !s.Worker.Settled || !s.Orchestrator.Settled
			})
	})
}

// finish ends the producers one by one, and asserts what must be then.
func (w *world) finish() {
	w.startAll()
	w.pending.Wait()
	w.release()
	w.requireNoneWaits("with producers open")
	for at, p := range w.producers {
		if p.open {
			w.settle()
			w.do(w.last[at])
			w.endTx(p, w.last[at].fate)
			w.pending.Wait()
			w.requireNoneWaits(fmt.Sprintf("after the end of producer %d", at))
		}
	}
	nodes := w.here()
	w.requireAllHandled(nodes)
	if w.stillness {
		w.requireStillness()
	}
	w.requireDelivery(nodes)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range w.items {
		switch {
		case !i.committed && i.fetched > 0:
			w.t.Fatalf("handled, and it was rolled back: %v", i)
		case i.fetched > 1+i.abandoned, i.committed && taken(nodes, i.drawnItem) && i.fetched != 1+i.abandoned:
			w.t.Fatalf("not handled once: %v", i)
		}
	}
	if !w.serial || w.stalled.Load() {
		return // one of several producers may end unseen, and a scout or a fallback be the first to see what it left
	}
	for _, n := range w.nodes {
		s := n.Stats()
		for _, q := range []QueueStats{s.Worker, s.Orchestrator} {
			if q.FallbackFinds+q.ScoutFinds != 0 {
				w.t.Fatalf("the safety net found something: %+v", q)
			}
		}
	}
}

// requireStillness asserts that nodes that only wait make no statement.
func (w *world) requireStillness() {
	w.t.Helper()
	observe := func() (seen string) {
		var looks []int64
		for _, n := range w.here() {
			s := n.Stats()
			looks = append(looks, s.Worker.Looks, s.Orchestrator.Looks)
		}
		err := w.peek.QueryRow(tctx, `SELECT coalesce(string_agg(pid || ' ' || query_start, ', ' ORDER BY pid), '') FROM pg_stat_activity
			WHERE application_name LIKE $1 || ' %' AND query_start IS NOT NULL`, w.schema).Scan(&seen)
		require.NoError(w.t, err)
		return fmt.Sprint(looks, seen)
	}
	last := observe()
	w.eventually("it is still", func() bool {
		time.Sleep(150 * time.Millisecond) // nothing is to happen, and a scout looks every 100 ms at least
		before := last
		last = observe()
		return last == before
	})
}

// finishAfterFaults asserts the bound: one fallback of each node that survives. It returns how many items it found.
func (w *world) finishAfterFaults() (lost int) {
	w.startAll()
	w.pending.Wait()
	for at, p := range w.producers {
		if p.open {
			w.do(w.last[at])
			w.endTx(p, w.last[at].fate)
		}
	}
	w.pending.Wait()
	var survivors []*propertyNode
	frozen := false
	for _, n := range w.here() {
		if w.thaw || !n.mortal { // what it is about to give back, it gives back over the connection that is stopped
			n.thawUp()
		}
		if n.frozen.Load() == nil {
			survivors = append(survivors, n)
		} else {
			frozen = true
		}
	}
	for _, n := range survivors {
		w.eventually("it listens again", func() bool { return n.Stats().Listening })
	}
	// What the dead have sent has arrived, and their leases are over.
	w.eventually("the dead are gone", func() (gone bool) {
		w.release()
		require.NoError(w.t, w.peek.QueryRow(tctx, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY ($1))
			AND NOT EXISTS (SELECT FROM worker_queue WHERE visible_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')
			AND NOT EXISTS (SELECT FROM orchestrator_queue WHERE visible_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')
			AND NOT EXISTS (SELECT FROM instance_locks WHERE locked_until BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 min')`,
			w.severed).Scan(&gone))
		return gone
	})
	before := make([]int64, len(survivors))
	for at, n := range survivors {
		s := n.Stats()
		before[at] = s.Worker.Finds["fallback"] + s.Orchestrator.Finds["fallback"]
	}
	for _, n := range survivors {
		n.fallback()
	}
	w.requireAllHandled(survivors) // by one fallback of each
	for at, n := range survivors {
		s := n.Stats()
		lost += int(s.Worker.Finds["fallback"] + s.Orchestrator.Finds["fallback"] - before[at])
	}
	w.mu.Lock()
	for _, i := range w.items {
		switch {
		case !i.committed && !i.unsure && i.fetched > 0:
			w.t.Fatalf("handled, and it was rolled back: %v", i)
		case i.committed && taken(survivors, i.drawnItem) && i.fetched == 0:
			w.t.Fatalf("gone, and never handled: %v", i)
		}
	}
	w.mu.Unlock()
	if frozen {
		return lost // who is told may be deaf
	}
	w.requireDelivery(survivors)
	return lost
}

// end stops everything, whatever state it is in.
func (w *world) end() {
	for _, n := range w.nodes {
		n.stop()
		if !n.away {
			n.away = true
			close(n.gone)
		}
		n.thawUp()
	}
	for _, p := range w.producers {
		close(p.todo)
	}
	w.producing.Wait()
	var closing sync.WaitGroup
	for _, n := range w.nodes {
		closing.Go(func() {
			n.close()
			if n.pool != nil {
				n.pool.Close()
			}
		})
	}
	closing.Wait()
}

// state is what there is to know of a scenario that has failed.
func (w *world) state() string {
	var b strings.Builder
	rows, err := w.peek.Query(tctx, `
		SELECT name, visible_at - clock_timestamp(), lock_token FROM worker_queue
		UNION ALL SELECT instance_id, visible_at - clock_timestamp(), lock_token FROM orchestrator_queue`)
	require.NoError(w.t, err)
	var name string
	var due time.Duration
	var token *string
	w.mu.Lock()
	_, err = pgx.ForEachRow(rows, []any{&name, &due, &token}, func() error {
		fmt.Fprintf(&b, "left: %v; due in %v, claimed %v\n", w.byName[name], due, token != nil)
		return nil
	})
	w.mu.Unlock()
	require.NoError(w.t, err)
	for at, n := range w.nodes {
		if n.Provider == nil {
			continue
		}
		s := n.Stats()
		fmt.Fprintf(&b, "node %d: away %v, listening %v, health %v\n  worker %+v\n  orchestrator %+v\n", at, n.away, s.Listening, n.Health(), s.Worker, s.Orchestrator)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.dispatchers {
		fmt.Fprintf(&b, "dispatcher of %s for %+v of %v %v: %+v, fetching %v\n", d.n.name, d.lane.Queue, d.lane.namespaces, d.lane.tags, d.drawnDispatcher, d.fetching.Load())
	}
	return b.String()
}

// Producers of every kind, and nodes that come and leave in good order.
func TestWakeProperty_WithoutFaults_NoDueItemWaitsWhileADispatcherDoes(t *testing.T) {
	testdbURL = testdb.URL(t)
	propertyCases(t, 20)
	p := newProperty(t)
	rapid.Check(t, func(t *rapid.T) { p.run(t, drawScenario(t, false)) })
}

// Nodes that die, pause, and lose their connections, in the middle of it.
func TestWakeProperty_WithFaults_OneFallbackFindsWhatIsLost(t *testing.T) {
	testdbURL = testdb.URL(t)
	propertyCases(t, 8)
	p := newProperty(t)
	rapid.Check(t, func(t *rapid.T) { p.run(t, drawScenario(t, true)) })
}
