package pgwake

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// This file answers: what of the engine can be seen by OpenTelemetry?
//
// It is what Stats says, read whenever it is collected, so it costs no query; but for the depths of the queues, for which there
// is Config.MeasureDepths. Lags and latencies are recorded as they are.

// Scope is the name of the instrumentation.
const Scope = "github.com/pgwake/pgwake"

// Metrics of a Provider. Each has the attribute AttrQueue, unless it says otherwise.
//
// Those of several Providers of one process add up, as sums do; so one that is closed takes what it has counted out of them, as
// a restart does. Gauges do not add up: these have AttrServer, AttrPort and AttrDatabase, which say whose queue it is, and two Providers
// of the same queue say the same.
const (
	MetricReceived   = "pgwake.notifications.received"  // counter: QueueStats.Notifications
	MetricProcessed  = "pgwake.notifications.processed" // counter: those that were understood
	MetricUnreadable = "pgwake.notifications.failed"    // counter: QueueStats.Unreadable
	MetricPutOff     = "pgwake.notifications.put_off"   // counter: QueueStats.PutOff
	MetricLag        = "pgwake.notifications.lag"       // histogram, seconds: QueueStats.NotificationLag

	MetricItems       = "pgwake.items"             // counter: QueueStats.ItemsBy; by AttrPath
	MetricLooks       = "pgwake.looks"             // counter: QueueStats.Looks
	MetricPolls       = "pgwake.polls"             // counter: QueueStats.Polls
	MetricWakes       = "pgwake.wakes"             // counter: QueueStats.Tokens; by AttrReason
	MetricFinds       = "pgwake.finds"             // counter: QueueStats.Finds; by AttrReason
	MetricUnannounced = "pgwake.finds.unannounced" // counter: QueueStats.FallbackFinds and ScoutFinds; by AttrReason
	MetricMisses      = "pgwake.claim.conflicts"   // counter: QueueStats.Misses
	MetricPassedOn    = "pgwake.passed_on"         // counter: QueueStats.PassedOn
	MetricRenewals    = "pgwake.lease.renewals"    // counter: QueueStats.Renewals
	MetricLatency     = "pgwake.wake.latency"      // histogram, seconds: QueueStats.WakeLatency
	MetricParked      = "pgwake.parked"            // sum: QueueStats.Parked
	MetricAggressive  = "pgwake.aggressive"        // sum: Providers of which QueueStats.Aggressive is true

	MetricListening    = "pgwake.listening"     // sum, without attributes: Providers of which Stats.Listening is true
	MetricHibernating  = "pgwake.hibernating"   // sum, without attributes: Providers of which Stats.Hibernating is true
	MetricHibernations = "pgwake.hibernations"  // counter, without attributes: Stats.Hibernations
	MetricReconnects   = "pgwake.reconnects"    // counter, without attributes: Stats.Reconnects, which a change of modes may be, too
	MetricFallbacks    = "pgwake.fallbacks"     // counter, without attributes: Stats.Fallbacks
	MetricSkipped      = "pgwake.polls.skipped" // counter, without attributes: BreakerStats.Skipped
	MetricPanics       = "pgwake.panics"        // counter, without attributes: Stats.Panics

	// MetricDepth is a gauge: items by AttrNamespace, and by AttrState as QueueDepth has it. Of a namespace that has become empty it
	// says so once, until the queues are read again.
	MetricDepth = "pgwake.queue.depth"
	// MetricOldestDue is a gauge: seconds since QueueDepth.OldestDue, by AttrNamespace; 0 if nothing is due.
	MetricOldestDue = "pgwake.queue.oldest_due"
	// MetricDeadLetters is a gauge: letters that there are, by AttrNamespace, as CountDeadLetters has it; read with the depths.
	MetricDeadLetters = "pgwake.dead_letters"
)

// Attributes of metrics.
const (
	AttrQueue     = attribute.Key("pgwake.queue")       // of a Queue
	AttrPath      = attribute.Key("pgwake.path")        // a Path
	AttrReason    = attribute.Key("pgwake.wake.reason") // of a WakeReason
	AttrNamespace = attribute.Key("pgwake.namespace")
	AttrState     = attribute.Key("pgwake.state")   // due, delayed, leased, kept back
	AttrServer    = attribute.Key("server.address") // as the pool's settings have it
	AttrPort      = attribute.Key("server.port")
	AttrDatabase  = attribute.Key("db.namespace") // the database, a |, and the schema
)

// secondsBuckets are those of lags and latencies: a wake-up is a matter of milliseconds.
var secondsBuckets = []float64{.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 60}

// measurement is what is collected.
type measurement struct {
	metric.Meter
	all  []metric.Observable
	read []func(context.Context, *Stats, metric.Observer) error
	err  error
}

// measure has the metrics collected until stop is called.
func (p *Provider) measure() (stop func(), err error) {
	m := &measurement{Meter: p.cfg.MeterProvider.Meter(Scope)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w: MeterProvider: %w", ErrConfig, err)
		}
	}()
	lag := m.seconds(MetricLag, "from the beginning of the transaction that sent a notification to when it was heard")
	latency := m.seconds(MetricLatency, "from a signal to the item in hand")
	for q := range Queue(queueCount) {
		of := &p.engine.stats.queues[q]
		of.lag.export(lag, ofQueue(q))
		of.latency.export(latency, ofQueue(q))
	}
	m.addQueues()
	m.addNode()
	m.addDepths(p)
	if m.err != nil {
		return nil, m.err
	}
	registration, err := m.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		s := p.Stats()
		var err error
		for _, read := range m.read {
			err = errors.Join(err, read(ctx, &s, o))
		}
		return err
	}, m.all...)
	if err != nil {
		return nil, err
	}
	return func() { _ = registration.Unregister() }, nil
}

func ofQueue(q Queue, also ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(also, AttrQueue.String(q.String()))...))
}

func (m *measurement) seconds(name, about string) metric.Float64Histogram {
	h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(about), metric.WithExplicitBucketBoundaries(secondsBuckets...))
	m.err = errors.Join(m.err, err)
	return h
}

func (m *measurement) counter(name, about string) metric.Int64Observable {
	c, err := m.Int64ObservableCounter(name, metric.WithDescription(about))
	m.err, m.all = errors.Join(m.err, err), append(m.all, c)
	return c
}

// sum is for what may go down as well, and adds up over Providers.
func (m *measurement) sum(name, about string) metric.Int64Observable {
	s, err := m.Int64ObservableUpDownCounter(name, metric.WithDescription(about))
	m.err, m.all = errors.Join(m.err, err), append(m.all, s)
	return s
}

func (m *measurement) gauge(name, about string) metric.Int64Observable {
	g, err := m.Int64ObservableGauge(name, metric.WithDescription(about))
	m.err, m.all = errors.Join(m.err, err), append(m.all, g)
	return g
}

// addQueues adds what there is of each queue.
func (m *measurement) addQueues() {
	each := func(of metric.Int64Observable, value func(*QueueStats) int64) {
		m.read = append(m.read, func(_ context.Context, s *Stats, o metric.Observer) error {
			o.ObserveInt64(of, value(&s.Orchestrator), ofQueue(Orchestrator))
			o.ObserveInt64(of, value(&s.Worker), ofQueue(Worker))
			return nil
		})
	}
	each(m.counter(MetricReceived, "notifications heard"), func(q *QueueStats) int64 { return q.Notifications })
	each(m.counter(MetricProcessed, "notifications understood"), func(q *QueueStats) int64 { return q.Notifications - q.Unreadable })
	each(m.counter(MetricUnreadable, "notifications that nobody understood"), func(q *QueueStats) int64 { return q.Unreadable })
	each(m.counter(MetricPutOff, "notifications, and instants, whose look had to wait: more came than there was work"), func(q *QueueStats) int64 { return q.PutOff })
	each(m.counter(MetricLooks, "queries for work"), func(q *QueueStats) int64 { return q.Looks })
	each(m.counter(MetricPolls, "statements that looked for several lanes at once"), func(q *QueueStats) int64 { return q.Polls })
	each(m.counter(MetricMisses, "wake-ups that found nothing: another was faster"), func(q *QueueStats) int64 { return q.Misses })
	each(m.counter(MetricPassedOn, "wake-ups passed on to another node"), func(q *QueueStats) int64 { return q.PassedOn })
	each(m.counter(MetricRenewals, "leases renewed"), func(q *QueueStats) int64 { return q.Renewals })
	each(m.sum(MetricParked, "dispatchers that wait"), func(q *QueueStats) int64 { return int64(q.Parked) })
	each(m.sum(MetricAggressive, "Providers that poll the queue because something went wrong"), func(q *QueueStats) int64 { return oneIf(q.Aggressive) })

	wakes, finds := m.counter(MetricWakes, "wake-ups"), m.counter(MetricFinds, "queries that found work")
	items, unannounced := m.counter(MetricItems, "items and turns fetched"), m.counter(MetricUnannounced, "finds that nothing had announced")
	m.read = append(m.read, func(_ context.Context, s *Stats, o metric.Observer) error {
		for queue, q := range map[Queue]*QueueStats{Orchestrator: &s.Orchestrator, Worker: &s.Worker} {
			for reason, n := range q.Tokens {
				o.ObserveInt64(wakes, n, ofQueue(queue, AttrReason.String(reason)))
			}
			for reason, n := range q.Finds {
				o.ObserveInt64(finds, n, ofQueue(queue, AttrReason.String(reason)))
			}
			for path, n := range q.ItemsBy {
				o.ObserveInt64(items, n, ofQueue(queue, AttrPath.String(string(path))))
			}
			o.ObserveInt64(unannounced, q.FallbackFinds, ofQueue(queue, AttrReason.String(WakeFallback.String())))
			o.ObserveInt64(unannounced, q.ScoutFinds, ofQueue(queue, AttrReason.String(WakeScout.String())))
		}
		return nil
	})
}

// addNode adds what there is of the node as a whole.
func (m *measurement) addNode() {
	one := func(of metric.Int64Observable, value func(*Stats) int64) {
		m.read = append(m.read, func(_ context.Context, s *Stats, o metric.Observer) error { o.ObserveInt64(of, value(s)); return nil })
	}
	one(m.sum(MetricListening, "Providers whose LISTEN connection is up"), func(s *Stats) int64 { return oneIf(s.Listening) })
	one(m.sum(MetricHibernating, "Providers that do not listen because there is nothing to do"), func(s *Stats) int64 { return oneIf(s.Hibernating) })
	one(m.counter(MetricHibernations, "how often that began"), func(s *Stats) int64 { return s.Hibernations })
	one(m.counter(MetricReconnects, "LISTEN connections made after the first"), func(s *Stats) int64 { return s.Reconnects })
	one(m.counter(MetricFallbacks, "periodic statements"), func(s *Stats) int64 { return s.Fallbacks })
	one(m.counter(MetricSkipped, "polls that were skipped because queries for work fail"), func(s *Stats) int64 { return s.Breaker.Skipped })
	one(m.counter(MetricPanics, "goroutines of the engine that panicked"), func(s *Stats) int64 { return s.Panics })
}

// depths are those of the queues by namespace, as they were when they were read last; zero for those that have become empty since
// the time before.
type depths struct {
	mu sync.Mutex
	at time.Time // when that was begun, whatever came of it
	of map[part]depth
}

// depth is how much there is, queued or dead.
type depth struct {
	QueueDepth
	dead int64
}

type part struct {
	queue     Queue
	namespace string
}

// refresh reads them, unless that is not long ago, or the server is to be left asleep.
func (d *depths) refresh(ctx context.Context, p *Provider) error {
	if time.Since(d.at) < p.cfg.MeasureDepths || p.engine.hibernates() {
		return nil
	}
	d.at = time.Now() // before it is known to succeed: a database in trouble is not to be asked more often than one in health
	all, err := p.GetQueueDepths(ctx)
	if err != nil {
		return err
	}
	dead, err := p.CountDeadLetters(ctx, nil)
	if err != nil {
		return err
	}
	for at, before := range d.of {
		if d.of[at] = (depth{}); before == (depth{}) {
			delete(d.of, at) // or every namespace that ever was would be told of for ever
		}
	}
	for _, one := range all {
		at := part{one.Queue, one.Namespace}
		sum := d.of[at]
		sum.Due, sum.Delayed, sum.Leased, sum.KeptBack = sum.Due+one.Due, sum.Delayed+one.Delayed, sum.Leased+one.Leased, sum.KeptBack+one.KeptBack
		if !one.OldestDue.IsZero() && (sum.OldestDue.IsZero() || one.OldestDue.Before(sum.OldestDue)) {
			sum.OldestDue = one.OldestDue
		}
		d.of[at] = sum
	}
	for _, one := range dead {
		at := part{one.Queue, one.Namespace}
		sum := d.of[at]
		sum.dead = one.Letters
		d.of[at] = sum
	}
	return nil
}

// addDepths adds how much is queued, and dead, by namespace.
func (m *measurement) addDepths(p *Provider) {
	if p.cfg.MeasureDepths == 0 {
		return
	}
	queued, dead := m.gauge(MetricDepth, "items in the queue"), m.gauge(MetricDeadLetters, "dead letters that there are")
	oldest, err := m.Float64ObservableGauge(MetricOldestDue, metric.WithUnit("s"), metric.WithDescription("how long the first of the due items has waited"))
	m.err, m.all = errors.Join(m.err, err), append(m.all, oldest)
	whose := p.whose()
	of := func(at part, also ...attribute.KeyValue) metric.MeasurementOption {
		return ofQueue(at.queue, slices.Concat(whose, also, []attribute.KeyValue{AttrNamespace.String(at.namespace)})...)
	}
	d := &depths{of: make(map[part]depth)}
	m.read = append(m.read, func(ctx context.Context, _ *Stats, o metric.Observer) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		err := d.refresh(ctx, p) // what is known is told all the same
		for at, n := range d.of {
			o.ObserveInt64(queued, n.Due, of(at, AttrState.String("due")))
			o.ObserveInt64(queued, n.Delayed, of(at, AttrState.String("delayed")))
			o.ObserveInt64(queued, n.Leased, of(at, AttrState.String("leased")))
			o.ObserveInt64(queued, n.KeptBack, of(at, AttrState.String("kept back")))
			o.ObserveInt64(dead, n.dead, of(at))
			var waits time.Duration
			if !n.OldestDue.IsZero() {
				waits = max(time.Since(p.LocalTime(n.OldestDue)), 0)
			}
			o.ObserveFloat64(oldest, waits.Seconds(), of(at))
		}
		return err
	})
}

// whose are the attributes of a queue that tell it from those of other Providers.
func (p *Provider) whose() []attribute.KeyValue {
	c := p.pool.Config().ConnConfig
	database := c.Database
	if database == "" { // the server's default
		database = c.User
	}
	return []attribute.KeyValue{AttrServer.String(c.Host), AttrPort.Int(int(c.Port)), AttrDatabase.String(database + "|" + p.cfg.Schema)}
}

func oneIf(yes bool) int64 {
	if yes {
		return 1
	}
	return 0
}
