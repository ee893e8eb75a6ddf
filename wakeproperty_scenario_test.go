package pgwake

import (
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"
)

// This file answers: which scenarios are drawn for wakeproperty_test.go?

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
