package main

import (
	"context"
	"slices"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/bench/peers"
	"github.com/pgwake/pgwake/bench/workflows"
)

// This file answers: what can be run, and at which sizes?

// sizes of all scenarios.
type sizes struct {
	idle       measure.IdleOptions
	baseline   measure.BaselineOptions
	singles    measure.SinglesOptions
	pairs      measure.PairsOptions
	timers     measure.TimersOptions
	burst      measure.BurstOptions
	redelivery measure.RedeliveryOptions
	stress     measure.StressOptions
	histories  measure.HistoriesOptions
	fanIn      measure.FanInOptions
	convoy     measure.ConvoyOptions

	idleTimeouts []time.Duration // poll timeouts: how often dispatchers return and come again must not show at the server

	noPeers       bool          // but River's drain
	peerIdle      time.Duration // to count statements of a peer
	peerPairs     measure.PairsOptions
	peerTimers    measure.TimersOptions // none: left out
	drain         measure.DrainOptions
	slowDrain     time.Duration // how long those may take that would take minutes
	riverWorkers  []int         // to try with the settings of River's own bench
	writers       measure.WritersOptions
	writersCounts []int
	nodes         measure.NodesOptions
	nodesCounts   []int
	fetch         measure.FetchCostOptions
	bloat         measure.BloatOptions
	quotas        measure.QuotasOptions
	restarts      measure.RestartsOptions
	namespaces    measure.NamespacesOptions
	tasks         measure.TasksOptions
	manyTasks     measure.ManyTasksOptions
	events        measure.EventsOptions
	eventLog      measure.EventLogOptions
	schedules     measure.SchedulesOptions
	workflows     workflows.Options
}

// peers returns these, unless there are to be none.
func (s *sizes) peers(all ...measure.Peer) []measure.Peer {
	if s.noPeers {
		return nil
	}
	return all
}

// tell has all scenarios report their progress.
func (s *sizes) tell(to func(measure.Progress)) {
	for _, progress := range []*func(measure.Progress){
		&s.idle.Progress, &s.baseline.Progress, &s.singles.Progress, &s.pairs.Progress, &s.timers.Progress, &s.burst.Progress,
		&s.redelivery.Progress, &s.stress.Progress, &s.histories.Progress, &s.fanIn.Progress, &s.convoy.Progress,
		&s.peerPairs.Progress, &s.peerTimers.Progress, &s.drain.Progress, &s.writers.Progress, &s.nodes.Progress,
		&s.fetch.Progress, &s.bloat.Progress, &s.quotas.Progress, &s.restarts.Progress, &s.namespaces.Progress,
		&s.tasks.Progress, &s.manyTasks.Progress, &s.events.Progress, &s.eventLog.Progress, &s.schedules.Progress, &s.workflows.Progress,
	} {
		*progress = to
	}
}

var full = sizes{
	idle:       measure.IdleOptions{Duration: 3 * time.Minute},
	baseline:   measure.BaselineOptions{Rounds: 200},
	singles:    measure.SinglesOptions{Items: 500},
	pairs:      measure.PairsOptions{Pairs: 100},
	timers:     measure.TimersOptions{Timers: 300, Window: 6 * time.Second},
	burst:      measure.BurstOptions{Items: 50_000},
	redelivery: measure.RedeliveryOptions{Kills: 5, Items: 3, LockTimeout: 2 * time.Second},
	stress:     measure.StressOptions{Duration: 30 * time.Second},
	histories:  measure.HistoriesOptions{Turns: 200},
	fanIn:      measure.FanInOptions{Turns: 5, Large: 10_000, Singles: 300, Many: 100_000},
	convoy:     measure.ConvoyOptions{Acks: 5000},

	idleTimeouts: []time.Duration{time.Second, time.Minute},

	peerIdle:      30 * time.Second,
	peerPairs:     measure.PairsOptions{Pairs: 25, Rest: 200 * time.Millisecond},
	peerTimers:    measure.TimersOptions{Timers: 50, Window: 4 * time.Second},
	drain:         measure.DrainOptions{Items: 200_000},
	slowDrain:     5 * time.Second,
	riverWorkers:  []int{8, 100, 500, peers.RiverBenchWorkers},
	writers:       measure.WritersOptions{Duration: 2 * time.Second},
	writersCounts: []int{1, 4, 16, 32},
	nodes:         measure.NodesOptions{Items: 100},
	nodesCounts:   []int{2, 5, 10},
	fetch:         measure.FetchCostOptions{Backlog: 200_000, Locked: 100_000, Timers: 1_000_000, LockedInstances: 10_000, Fetches: 500},
	bloat:         measure.BloatOptions{Duration: 20 * time.Second},
	quotas:        measure.QuotasOptions{Drain: measure.DrainOptions{Items: 200_000}},
}

var small = sizes{
	idle:       measure.IdleOptions{Duration: 4 * time.Second},
	baseline:   measure.BaselineOptions{Rounds: 40, Gap: 10 * time.Millisecond},
	singles:    measure.SinglesOptions{Items: 60, Gap: 10 * time.Millisecond},
	pairs:      measure.PairsOptions{Pairs: 25},
	timers:     measure.TimersOptions{Timers: 90, Window: 2 * time.Second},
	burst:      measure.BurstOptions{Items: 10_000},
	redelivery: measure.RedeliveryOptions{Kills: 2, Items: 2, LockTimeout: time.Second},
	stress:     measure.StressOptions{Duration: 2 * time.Second},
	histories:  measure.HistoriesOptions{Turns: 30},
	fanIn:      measure.FanInOptions{Turns: 2, Large: 2000, Singles: 60, Many: 10_000},
	convoy:     measure.ConvoyOptions{Acks: 400},

	idleTimeouts: []time.Duration{time.Second},

	peerIdle:      2 * time.Second,
	peerPairs:     measure.PairsOptions{Pairs: 3, Rest: 50 * time.Millisecond},
	drain:         measure.DrainOptions{Items: 10_000},
	slowDrain:     500 * time.Millisecond,
	riverWorkers:  []int{peers.RiverBenchWorkers},
	writers:       measure.WritersOptions{Duration: 300 * time.Millisecond},
	writersCounts: []int{4, 32},
	nodes:         measure.NodesOptions{Items: 25},
	nodesCounts:   []int{10},
	fetch:         measure.FetchCostOptions{Backlog: 20_000, Locked: 10_000, Timers: 20_000, LockedInstances: 500, Fetches: 40},
	bloat:         measure.BloatOptions{Duration: time.Second},
	quotas:        measure.QuotasOptions{Drain: measure.DrainOptions{Items: 10_000}, Items: 100, Flood: 10_000, Singles: 20},
	restarts:      measure.RestartsOptions{Calm: time.Second, Kills: 1, LockTimeout: time.Second},
	namespaces: measure.NamespacesOptions{
		Items: 100, Created: 20, Gap: 10 * time.Millisecond, Stretch: time.Second, Duration: time.Second, Polls: 3, Flood: 5000,
		Restarts: measure.NamespaceRestartsOptions{Items: 1000},
		Scale:    measure.NamespaceScaleOptions{Duration: 300 * time.Millisecond},
		Many:     measure.ManyNamespacesOptions{Duration: 2 * time.Second, Lease: 10 * time.Second},
	},
	tasks:     measure.TasksOptions{Singles: 60, Gap: 10 * time.Millisecond, Stretch: 2 * time.Second, Duration: time.Second, Polled: 12, Width: 200},
	manyTasks: measure.ManyTasksOptions{Tasks: 10_000, Large: 2000, Reads: 10},
	events:    measure.EventsOptions{Singles: 60, Gap: 10 * time.Millisecond, Backlog: 2000},
	eventLog:  measure.EventLogOptions{Rows: 20_000, Emits: 100, Kept: 50_000},
	schedules: measure.SchedulesOptions{Schedules: 100, Every: 2 * time.Second, Duration: 4 * time.Second, IdleFor: 2 * time.Second},
	workflows: workflows.Options{Runs: 10, SlowRuns: 1, Backlog: 100, SlowBacklog: 50, Idle: 10 * time.Second, SlowIdle: 3 * time.Second},
}

// quick has the figures with a goal in the specification, and is done within a minute, or three on two slow processors.
func quick() sizes {
	s := small
	s.noPeers = true
	s.baseline = measure.BaselineOptions{Rounds: 25, Gap: 6 * time.Millisecond}
	s.singles = measure.SinglesOptions{Items: 50, Gap: 10 * time.Millisecond}
	s.pairs.Pairs = 12
	s.timers = measure.TimersOptions{Timers: 60, Window: time.Second}
	s.redelivery.Kills = 1
	s.idle.Duration = 3 * time.Second
	s.nodes.Items = 15
	s.writersCounts = []int{maxWriters}
	s.namespaces.Items, s.namespaces.Duration, s.namespaces.Polls = 50, 300*time.Millisecond, 2
	s.namespaces.Restarts.Items = 300
	s.namespaces.Scale = measure.NamespaceScaleOptions{Counts: []int{1, linearFor}, Duration: 200 * time.Millisecond}
	s.namespaces.Many.Duration = 500 * time.Millisecond
	s.tasks.Duration, s.tasks.Polled, s.tasks.Width = 500*time.Millisecond, 11, 100
	s.manyTasks = measure.ManyTasksOptions{Tasks: 2000, Large: 1000, Reads: 5}
	s.events = measure.EventsOptions{Singles: 40, Gap: 5 * time.Millisecond, Backlog: 1000}
	s.eventLog = measure.EventLogOptions{Rows: 10_000, Emits: 60, Kept: 20_000}
	s.schedules = measure.SchedulesOptions{Schedules: 50, Every: time.Second, Duration: 2 * time.Second, Idle: 2000, IdleFor: time.Second}
	s.workflows = workflows.Options{Runs: 5, SlowRuns: 1, Backlog: 40, SlowBacklog: 20, Idle: 3 * time.Second, SlowIdle: time.Second}
	s.fetch = measure.FetchCostOptions{Backlog: 10_000, Locked: 5000, Timers: 10_000, LockedInstances: 300, Fetches: 40}
	return s
}

// quickNames are the scenarios of quick.
var quickNames = []string{"idle", baseline, "single", "pairs", "timers", "redelivery", "writers", "nodes", "drain", "fetch", namespaces, tasks, manyTasks, events, eventLog, schedules, flows}

// results of all rounds, in the order of the rounds.
type results struct {
	Idle       []*measure.IdleResult       `json:"idle,omitempty"`
	ShortPoll  []*measure.ShortPollResult  `json:"short_poll,omitempty"`
	Baseline   []*measure.BaselineResult   `json:"baseline,omitempty"`
	Singles    []*measure.SinglesResult    `json:"singles,omitempty"` // of all producers
	Pairs      []*measure.PairsResult      `json:"pairs,omitempty"`
	Timers     []*measure.TimersResult     `json:"timers,omitempty"`
	Burst      []*measure.BurstResult      `json:"burst,omitempty"`
	Prefilled  []*measure.BurstResult      `json:"prefilled_burst,omitempty"`
	SmallBurst []*measure.BurstResult      `json:"small_burst,omitempty"`
	BareBurst  []time.Duration             `json:"bare_burst,omitempty"`
	Redelivery []*measure.RedeliveryResult `json:"redelivery,omitempty"`
	Stress     []*measure.StressResult     `json:"stress,omitempty"`
	Polled     []*measure.StressResult     `json:"polled_stress,omitempty"`
	Histories  []*measure.HistoriesResult  `json:"histories,omitempty"`
	FanIn      []*measure.FanInResult      `json:"fan_in,omitempty"`
	Convoy     []*measure.ConvoyResult     `json:"convoy,omitempty"`

	// Of several subjects each, which their fields tell apart, in the same order in every round.
	PeerIdle   []*measure.PeerIdleResult   `json:"peer_idle,omitempty"`
	PeerPairs  []*measure.PairsResult      `json:"peer_pairs,omitempty"`
	PeerTimers []*measure.PeerTimersResult `json:"peer_timers,omitempty"`
	Drains     []*measure.DrainResult      `json:"drains,omitempty"`
	Writers    []*measure.WritersResult    `json:"writers,omitempty"`
	Nodes      []*measure.NodesResult      `json:"nodes,omitempty"`
	FetchCosts []*measure.FetchCost        `json:"fetch_costs,omitempty"`
	Bloat      []*measure.BloatResult      `json:"bloat,omitempty"`
	Quotas     []*measure.QuotasResult     `json:"quotas,omitempty"`
	Restarts   []*measure.RestartsResult   `json:"restarts,omitempty"`
	Namespaces []*measure.NamespacesResult `json:"namespaces,omitempty"`
	Tasks      []*measure.TasksResult      `json:"tasks,omitempty"`
	ManyTasks  []*measure.ManyTasksResult  `json:"many_tasks,omitempty"`
	Events     []*measure.EventsResult     `json:"events,omitempty"`
	EventLog   []*measure.EventLogResult   `json:"event_log,omitempty"`
	Schedules  []*measure.SchedulesResult  `json:"schedules,omitempty"`
	Workflows  []*workflows.Result         `json:"workflows,omitempty"`
}

type scenario struct {
	name string
	what string
	once bool // not in every round
	run  func(ctx context.Context, url string, s *sizes, to *results) error
}

const (
	baseline   = "baseline"
	namespaces = "namespaces"
	tasks      = "tasks"
	manyTasks  = "manytasks"
	events     = "events"
	eventLog   = "eventlog"
	schedules  = "schedules"
	flows      = "workflows"
)

var scenarios = []scenario{
	{name: "idle", what: "statements of an idle node", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.ShortPoll)(measure.ShortPoll(ctx, url, 0)); err != nil {
				return err
			}
			for _, timeout := range s.idleTimeouts {
				o := s.idle
				o.PollTimeout = timeout
				if err := add(&to.Idle)(measure.Idle(ctx, url, o)); err != nil {
					return err
				}
			}
			for _, peer := range s.peers(published, river) {
				if err := add(&to.PeerIdle)(measure.PeerIdle(ctx, url, peer, 64, s.peerIdle)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: baseline, what: "bare notifications and claims",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Baseline)(measure.Baseline(ctx, url, s.baseline))
		}},
	{name: "single", what: "single items",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			for _, by := range producers {
				o := s.singles
				o.Producer = by
				if err := add(&to.Singles)(measure.Singles(ctx, url, o)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "pairs", what: "second items, soon after the first",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.Pairs)(measure.Pairs(ctx, url, s.pairs)); err != nil {
				return err
			}
			for _, peer := range s.peers(allPeers...) {
				o := s.peerPairs
				o.Peer = peer
				if err := add(&to.PeerPairs)(measure.Pairs(ctx, url, o)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "timers", what: "timers",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.Timers)(measure.Timers(ctx, url, s.timers)); err != nil {
				return err
			}
			if s.peerTimers.Timers == 0 || len(to.PeerTimers) > 0 { // it takes minutes, so only once
				return nil
			}
			for _, peer := range s.peers(published, river) {
				if err := add(&to.PeerTimers)(measure.PeerTimers(ctx, url, peer, s.peerTimers)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "burst", what: "bursts",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.SmallBurst)(measure.Burst(ctx, url, measure.BurstOptions{Items: 100, Dispatchers: 4, Batch: 1})); err != nil {
				return err
			}
			if err := add(&to.BareBurst)(measure.BareBurst(ctx, url, s.burst)); err != nil {
				return err
			}
			o := s.burst
			if err := add(&to.Burst)(measure.Burst(ctx, url, o)); err != nil {
				return err
			}
			o.Prefill = true
			return add(&to.Prefilled)(measure.Burst(ctx, url, o))
		}},
	{name: "redelivery", what: "items of killed processes",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Redelivery)(measure.Redelivery(ctx, url, s.redelivery))
		}},
	{name: "stress", what: "orchestrations, pushed and polled",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.Stress)(measure.Stress(ctx, url, s.stress)); err != nil {
				return err
			}
			polled := s.stress
			polled.ShortPoll = shortPoll
			return add(&to.Polled)(measure.Stress(ctx, url, polled))
		}},
	{name: "history", what: "turns with short and long histories",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Histories)(measure.Histories(ctx, url, s.histories))
		}},
	{name: "fanin", what: "completions fanned in to one instance, and many instances",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.FanIn)(measure.FanIn(ctx, url, s.fanIn)); err != nil {
				return err
			}
			return add(&to.Convoy)(measure.LockConvoy(ctx, url, s.convoy))
		}},
	{name: "writers", what: "many writers at a time", run: runWriters},
	{name: "nodes", what: "single items for many nodes", run: runNodes},
	{name: "limits", what: "limits, and tenants that take turns",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Quotas)(measure.Quotas(ctx, url, s.quotas))
		}},
	{name: "restarts", what: "processes that are restarted, or killed",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Restarts)(measure.Restarts(ctx, url, s.restarts))
		}},
	{name: namespaces, what: "namespaces with a coordinator each",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Namespaces)(measure.Namespaces(ctx, url, s.namespaces))
		}},
	{name: tasks, what: "tasks made of steps",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Tasks)(measure.Tasks(ctx, url, s.tasks))
		}},
	{name: manyTasks, what: "questions about many tasks, and a large one", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.ManyTasks)(measure.ManyTasks(ctx, url, s.manyTasks))
		}},
	{name: events, what: "events, and items beside them",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Events)(measure.Events(ctx, url, s.events))
		}},
	{name: eventLog, what: "emits beside a full log", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.EventLog)(measure.EventLog(ctx, url, s.eventLog))
		}},
	{name: schedules, what: "schedules, due and not", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Schedules)(measure.Schedules(ctx, url, s.schedules))
		}},
	{name: flows, what: "workflows of go-workflows, pushed and polled", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Workflows)(workflows.Measure(ctx, url, s.workflows))
		}},
	{name: "drain", what: "a backlog of items that do nothing", run: runDrains},
	{name: "fetch", what: "fetches among rows that they do not take", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			costs, err := measure.FetchCosts(ctx, url, s.fetch)
			to.FetchCosts = append(to.FetchCosts, costs...)
			return err
		}},
	{name: "bloat", what: "throughput beside a transaction that stays open", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			for _, peer := range append([]measure.Peer{nil}, s.peers(published, riverBench)...) {
				o := s.bloat
				if o.Peer = peer; peer == riverBench {
					o.Dispatchers = riverBloatWorkers
				}
				if err := add(&to.Bloat)(measure.Bloat(ctx, url, o)); err != nil {
					return err
				}
			}
			return nil
		}},
}

// The peers, at their defaults, and River as well at the settings of its own benchmark.
var (
	published  = peers.Published()
	poll       = peers.ShortPoll(shortPoll)
	river      = peers.River("River, defaults", peers.RiverSettings{})
	riverBench = peers.River("River, bench settings", peers.RiverBench)

	allPeers = []measure.Peer{published, poll, river, riverBench}
)

func runWriters(ctx context.Context, url string, s *sizes, to *results) error {
	run := func(o measure.WritersOptions) error { return add(&to.Writers)(measure.Writers(ctx, url, o)) }
	for _, writers := range s.writersCounts {
		o := s.writers
		o.Writers = writers
		for _, way := range []measure.WritersWay{measure.BareTable, measure.Library, measure.Trigger} {
			o.Way = way
			if err := run(o); err != nil {
				return err
			}
		}
		o.Way = measure.ByPeer
		for _, peer := range s.peers(published, river) {
			o.Peer = peer
			if err := run(o); err != nil {
				return err
			}
		}
	}
	half := s.writers // of the dispatchers are idle
	half.Writers, half.Dispatchers, half.Busy = maxWriters, 8, 4
	for _, way := range []measure.WritersWay{measure.BareTable, measure.Library} {
		half.Way = way
		if err := run(half); err != nil {
			return err
		}
	}
	return nil
}

// riverBloatWorkers is a number of workers with which River is fast, and all of a chunk are done at a time.
const riverBloatWorkers = 500

// maxWriters is for how many there is a goal.
const maxWriters = 32

func runNodes(ctx context.Context, url string, s *sizes, to *results) error {
	for _, nodes := range s.nodesCounts {
		for _, peer := range append([]measure.Peer{nil}, s.peers(published)...) {
			o := s.nodes
			o.Nodes, o.Peer = nodes, peer
			if err := add(&to.Nodes)(measure.Nodes(ctx, url, o)); err != nil {
				return err
			}
		}
	}
	return nil
}

func runDrains(ctx context.Context, url string, s *sizes, to *results) error {
	keep := add(&to.Drains)
	slow := func(o measure.DrainOptions) measure.DrainOptions {
		o.Limit = s.slowDrain
		return o
	}
	// Those that are compared come one after the other.
	if err := keep(measure.BareDrain(ctx, url, s.drain)); err != nil {
		return err
	}
	if err := keep(measure.Drain(ctx, url, s.drain)); err != nil {
		return err
	}
	for _, workers := range slices.Backward(s.riverWorkers) {
		o := s.drain
		if o.Dispatchers = workers; workers < 100 {
			o = slow(o)
		}
		if err := keep(measure.PeerDrain(ctx, url, riverBench, o)); err != nil {
			return err
		}
	}
	if s.noPeers {
		return nil
	}
	for _, way := range []measure.DrainWay{measure.ByDispatcher, measure.OneByOne, measure.GroupedAcks} {
		o := slow(s.drain)
		o.Way = way
		if err := keep(measure.Drain(ctx, url, o)); err != nil {
			return err
		}
	}
	for _, peer := range []measure.Peer{river, published} {
		if err := keep(measure.PeerDrain(ctx, url, peer, slow(s.drain))); err != nil {
			return err
		}
	}
	return nil
}

// shortPoll is how long the dispatchers of a polling loop pause when there is nothing.
const shortPoll = 50 * time.Millisecond

var producers = []measure.Producer{measure.OtherProvider, measure.PlainSQL, measure.SameProvider}

func names() (all []string) {
	for _, sc := range scenarios {
		all = append(all, sc.name)
	}
	return all
}

// needsBaseline reports whether the figures of a scenario are compared with those of the baseline.
func needsBaseline(name string) bool {
	return !slices.Contains([]string{"idle", "burst", "stress", "history", "fanin", "writers", "nodes", "limits", "restarts", "drain", "fetch", "bloat", manyTasks, events, eventLog, schedules, flows}, name)
}

// add keeps a result.
func add[T any](to *[]T) func(T, error) error {
	return func(r T, err error) error {
		if err == nil {
			*to = append(*to, r)
		}
		return err
	}
}
