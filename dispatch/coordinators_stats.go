package dispatch

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// This file answers: what can be seen of Coordinators from outside?

// Metrics of Coordinators, which have no attributes. They are sums: those of several Coordinators of one process add up.
const (
	// MetricCoordinators is the number of namespaces that are served.
	MetricCoordinators = "pgwake.dispatch.coordinators"
	// MetricSpawned is how many coordinators began so far.
	MetricSpawned = "pgwake.dispatch.coordinators.spawned"
	// MetricWorking is the number of those of which a Dispatcher or an Orchestrator is at work.
	MetricWorking = "pgwake.dispatch.coordinators.working"
	// MetricWorkers is the number of places for handlers that these have.
	MetricWorkers = "pgwake.dispatch.coordinators.workers"
	// MetricAhead is the number of items that these have claimed, and that wait for a place.
	MetricAhead = "pgwake.dispatch.coordinators.ahead"
	// MetricFailing is the number of namespaces that cannot be served at this moment.
	MetricFailing = "pgwake.dispatch.coordinators.failing"
)

// NamespaceStats is what is done about one namespace of one Source.
type NamespaceStats struct {
	Namespace string
	Source    Source
	Group     string    // its Name
	Since     time.Time // local: when it was spawned

	// Working: a Dispatcher is at work, on Running items in so many Places, with so many items Ahead that wait for one; or an
	// Orchestrator is. There is neither when there is no work.
	Working                bool
	Running, Places, Ahead int

	// Err is why the namespace cannot be served at this moment, or not in all that it is to be served in, and Failures how many
	// attempts in a row have failed. The next one may succeed. nil: it can.
	Err      error
	Failures int
}

// Namespaces returns what is done about those that are served, by name. Safe for concurrent use.
func (c *Coordinators) Namespaces() []NamespaceStats {
	all := c.coordinators()
	stats := make([]NamespaceStats, len(all))
	for i, k := range all {
		stats[i] = k.stats()
	}
	return stats
}

func (k *coordinator) stats() NamespaceStats {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := NamespaceStats{Namespace: k.at.namespace, Source: k.source, Group: k.group.Name, Since: k.since}
	for _, f := range []failing{k.handlers, k.work, k.turns} {
		s.Err, s.Failures = errors.Join(s.Err, f.err), max(s.Failures, f.times)
	}
	s.Working = k.dispatcher != nil || k.deciding
	if k.dispatcher != nil {
		s.Running, s.Places, s.Ahead = k.dispatcher.work.counts()
	}
	return s
}

func (w *workshop) counts() (running, places, ahead int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.running), w.places.now, len(w.ahead)
}

// CoordinatorsStats counts. Counters count from the beginning of Run.
type CoordinatorsStats struct {
	Active  int // namespaces that are served
	Working int // those of which a Dispatcher or an Orchestrator is at work
	Places  int // for handlers, of these Dispatchers
	Ahead   int // items that these have claimed, and that wait for a place
	Failing int // namespaces that cannot be served at this moment

	Spawned int64 // coordinators that began
	Retired int64 // those that Retire ended
	Shifts  int64 // how often a Dispatcher, or an Orchestrator, began
}

// Stats returns a snapshot, and asks the database nothing. Safe for concurrent use.
func (c *Coordinators) Stats() CoordinatorsStats {
	s := CoordinatorsStats{Spawned: c.spawned.Load(), Retired: c.retired.Load(), Shifts: c.shifts.Load(), Failing: len(c.leftOut())}
	for _, n := range c.Namespaces() {
		s.Active++
		s.Places += n.Places
		s.Ahead += n.Ahead
		if n.Working {
			s.Working++
		}
		if n.Err != nil {
			s.Failing++
		}
	}
	return s
}

// observe has the metrics read from Stats until stop is called.
func (c *Coordinators) observe(k *checks) (stop func()) {
	meter, note := meterOf(c.cfg.MeterProvider, k)
	sums := []struct {
		name, about string
		of          func(*CoordinatorsStats) int
		sum         metric.Int64ObservableUpDownCounter
	}{
		{name: MetricCoordinators, about: "namespaces that are served", of: func(s *CoordinatorsStats) int { return s.Active }},
		{name: MetricWorking, about: "namespaces of which a Dispatcher or an Orchestrator is at work", of: func(s *CoordinatorsStats) int { return s.Working }},
		{name: MetricWorkers, about: "places for handlers", of: func(s *CoordinatorsStats) int { return s.Places }},
		{name: MetricAhead, about: "items that wait for a place", of: func(s *CoordinatorsStats) int { return s.Ahead }},
		{name: MetricFailing, about: "namespaces that cannot be served", of: func(s *CoordinatorsStats) int { return s.Failing }},
	}
	spawned, err := meter.Int64ObservableCounter(MetricSpawned, metric.WithDescription("coordinators that began"))
	note(err)
	all := []metric.Observable{spawned}
	for i := range sums {
		one := &sums[i]
		one.sum, err = meter.Int64ObservableUpDownCounter(one.name, metric.WithDescription(one.about))
		note(err)
		all = append(all, one.sum)
	}
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s := c.Stats()
		o.ObserveInt64(spawned, s.Spawned)
		for _, one := range sums {
			o.ObserveInt64(one.sum, int64(one.of(&s)))
		}
		return nil
	}, all...)
	note(err)
	return func() {
		if registration != nil {
			_ = registration.Unregister()
		}
	}
}
