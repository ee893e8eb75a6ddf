package pgwake

import (
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/migrations"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
)

// This file answers: what can be set, and to what?

// Mode says how a node learns of due work.
type Mode int

const (
	// ModeHybrid listens for notifications and, once a FallbackInterval, asks in case one was lost.
	ModeHybrid Mode = iota
	// ModeEventDriven listens for notifications alone. The connection is still kept alive by a statement
	// every FallbackInterval, whose answer wakes nobody.
	ModeEventDriven
	// ModePolling has no LISTEN connection: every PollInterval one dispatcher of the node asks, or one statement for
	// all namespaces that are waited for one by one, and whoever finds work calls the others. For
	// transaction poolers and servers without NOTIFY. Instants that the node knows of, timers and ends of
	// leases, are met exactly all the same.
	ModePolling
	// ModeShadow listens and counts what producers say (QueueStats.Notifications), and fetches nothing: a fetch waits until its
	// time is up. For a trial beside whatever does the work meanwhile.
	ModeShadow
	// ModeDisabled neither listens nor fetches.
	ModeDisabled
)

func (m Mode) String() string {
	switch m {
	case ModeHybrid:
		return "hybrid"
	case ModeEventDriven:
		return "event-driven"
	case ModePolling:
		return "polling"
	case ModeShadow:
		return "shadow"
	case ModeDisabled:
		return "disabled"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// AggressivePolicy says when a node polls in spite of listening.
type AggressivePolicy int

const (
	// OnTrouble polls after a sign that notifications may not get through: the LISTEN connection was
	// lost, a fetch failed, or a notification was not taken in time.
	OnTrouble AggressivePolicy = iota
	// OnEveryWake polls after every wake-up as well.
	OnEveryWake
	// Never does not poll, whatever happens.
	Never
)

func (p AggressivePolicy) String() string {
	switch p {
	case OnTrouble:
		return "on-trouble"
	case OnEveryWake:
		return "on-every-wake"
	case Never:
		return "never"
	}
	return fmt.Sprintf("AggressivePolicy(%d)", int(p))
}

// NotifyPolicy says when producers notify a node of what they add.
type NotifyPolicy int

const (
	// NotifyDirected has them notify WakeFanout nodes for an item that any dispatcher can take, of those where somebody
	// waits; a node that cannot come passes it on. While all dispatchers are busy producers are silent, and pay next to
	// nothing.
	NotifyDirected NotifyPolicy = iota
	// NotifyQuiescent has them notify all nodes while somebody waits, or may be about to, and be silent otherwise.
	NotifyQuiescent
	// NotifyBroadcast has them notify for as long as the node listens, busy or not. Transactions that notify commit one
	// after the other on the whole server, and those behind them wait. To compare with, and to see each notification.
	NotifyBroadcast
)

func (p NotifyPolicy) String() string {
	switch p {
	case NotifyDirected:
		return "directed"
	case NotifyQuiescent:
		return "quiescent"
	case NotifyBroadcast:
		return "broadcast"
	}
	return fmt.Sprintf("NotifyPolicy(%d)", int(p))
}

// Config holds every setting of a Provider. The zero value means the defaults, and so does a nil *Config.
// Durations that are negative, and values out of their range, are errors; all of them are reported at once.
type Config struct {
	// Schema holds the tables and functions. Any name of at most 63 bytes is good, also one that has to
	// be quoted. Defaults to "pgwake".
	Schema string

	// SkipMigrate leaves the schema as it is; New and Open then fail with ErrNotMigrated if it is behind.
	// Defaults to false: the schema is created and migrated.
	SkipMigrate bool

	// Mode says how the node learns of due work. Defaults to ModeHybrid. SetModes changes it.
	Mode Mode

	// Modes are those of single namespaces that have another. They are for fetches that name their namespaces: one of several leaves
	// out those that are in ModeShadow or ModeDisabled, and learns of the others in each way that one of them has; one of all
	// goes by Mode. Default to none.
	Modes map[string]Mode

	// Notify says when producers notify this node. A node that wants to hear more than another gets
	// it, and the other with it. Defaults to NotifyDirected.
	Notify NotifyPolicy

	// DisableLongPoll makes every fetch return at once, and opens no LISTEN connection. The loops of package dispatch ask every 100 ms then.
	// Defaults to false.
	DisableLongPoll bool

	// ListenConfig is the configuration of the LISTEN connection, and of those that migrate, for when
	// the pool goes through a transaction pooler, which can carry neither. Defaults to the pool's, with what its hooks
	// do (New); they are not called on connections of a ListenConfig, to which RuntimeParams can give a role ("role").
	ListenConfig *pgx.ConnConfig

	// FallbackEnabled says whether what the periodic statement finds wakes a dispatcher. The statement
	// itself runs in any case, since it keeps the LISTEN connection alive. It is for ModeHybrid, and nil means true; if
	// Mode is ModeEventDriven it must not be set to true.
	FallbackEnabled *bool

	// FallbackInterval is the time between two such statements; jitter adds up to a tenth of it, 1 s at most. It also
	// bounds, with 5 s on top, how long a connection that lost its peer without a sign goes unnoticed.
	// From 100 ms to 24 h. Defaults to 60 s.
	FallbackInterval time.Duration

	// MaxWait is how long a fetch waits whose PollTimeout is 0. At least 1 ms. Defaults to 30 s.
	MaxWait time.Duration

	// TimerGrace wakes a dispatcher this much before an item is due, at the price of one query that finds
	// nothing. Due times are measured on the server's clock, so no grace is needed for clocks that
	// differ. It is not for what all lanes of a queue were told of, such as the end of a lease, or due times
	// of several namespaces in one notification. At most 1 s. Defaults to 0.
	TimerGrace time.Duration

	// AggressivePolicy says when a node polls in spite of listening. Defaults to OnTrouble.
	AggressivePolicy AggressivePolicy

	// AggressiveDuration is how long that polling lasts at least. From 1 ms to 24 h. Defaults to 60 s.
	AggressiveDuration time.Duration

	// AggressiveInterval is the time between two polls of a queue. The first comes after 5 ms, and the
	// time then doubles up to this. From 5 ms to 1 h. Defaults to 100 ms.
	AggressiveInterval time.Duration

	// AggressiveExitThreshold is how many queries in a row must succeed and find nothing before the polling
	// ends. At least 1. Defaults to 5.
	AggressiveExitThreshold int

	// NotifyDeliveryTimeout is how soon a waiting dispatcher must take up a notification; if it is later,
	// something is wrong with the process and the node polls. From 1 ms to 1 min. Defaults to 100 ms.
	NotifyDeliveryTimeout time.Duration

	// CoalesceInterval is the least time, on average, between two notifications that the library sends on
	// its own account. After a pause the first four go out at once; what may not go yet is merged into
	// the next. From 1 ms to 1 s. Defaults to 5 ms.
	CoalesceInterval time.Duration

	// PollInterval is the time between two polls of a queue in ModePolling. From 1 ms to 1 h. Defaults to 100 ms.
	PollInterval time.Duration

	// ArchiveFor is how long a copy of each work item that this Provider acknowledges is kept in the archive
	// (Provider.ListArchive), deliveries that package eventbus handles among them. Not kept is what the SQL functions of layers
	// acknowledge by themselves: steps of package taskgraph, which its own tables have, and, of eventbus, occurrences of schedules
	// and events that are routed once more. Nor is what ends otherwise: dead letters, and what is cancelled or removed. At most 10 years.
	// Defaults to 0: none is kept.
	ArchiveFor time.Duration

	// HistoryCache is how many bytes of histories the Provider may keep, so that a turn reads of a long one only
	// what this node does not know. A history takes about 100 bytes for each event, and what the event holds. One
	// that is larger than all of it is not kept. OrchestrationAck.Sticky has the turns of an instance come to the node that
	// knows its history. Defaults to 0: none is kept.
	HistoryCache int

	// ValidateEvent is called for each event of a history that is fetched; if it returns an error, the turn comes with
	// that as HistoryError and without a history. For a runtime that cannot go on with events it does not
	// understand: it can then mark the instance as failed. It is called by the goroutine of the fetch, and must not
	// block. Defaults to nil: all are good.
	ValidateEvent func(*Event) error

	// WakeFanout is how many nodes a producer wakes for one item, with NotifyDirected: more than one in case that one is
	// dying at that moment. Each of them makes a query. From 1 to 100. Defaults to 2.
	WakeFanout int

	// QuietAbove is the number of finds per second above which dispatchers of this node that fetch the same ask producers
	// for silence while all of them are busy; eight finds in a row, or notifications that nobody takes, do as well. At
	// least 1. Not for NotifyBroadcast. Defaults to 200.
	QuietAbove int

	// HibernateAfter closes the LISTEN connection after so long without work, and those of a pool that Open made, for
	// servers that suspend when idle. What other processes add from then on is found by the next poll (HibernatePoll).
	// What is done through this Provider, or found by it, ends that at once; instants that it knows are met. It does not
	// begin while something is wrong, or a transaction is open that has added to a queue. Not without a LISTEN
	// connection, nor with pool_min_conns. From 100 ms to 24 h; minutes make sense. Defaults to 0: off.
	HibernateAfter time.Duration

	// HibernatePoll is the time between two looks while hibernating, in every mode that listens. All nodes look at the
	// same instants of the server's clock, which is to be idle in between. From 1 s to 24 h. Defaults to 6 min.
	HibernatePoll time.Duration

	// Propagator puts into the headers of whatever is enqueued to which trace it belongs, by the context of the call. A
	// header that the caller has set stays. Defaults to OpenTelemetry's global one, which adds nothing unless it is set.
	Propagator propagation.TextMapPropagator

	// MeterProvider is for OpenTelemetry's metrics; see the Metric names. Defaults to the global one, which does nothing unless it
	// is set.
	MeterProvider metric.MeterProvider

	// MeasureDepths has the depths of the queues and the dead letters measured as well, by namespace, and read at most this often,
	// but not while the node hibernates: see MetricDepth and MetricDeadLetters, and GetQueueDepths and CountDeadLetters for what that
	// costs. At least 1 s. Defaults to 0: not at all.
	MeasureDepths time.Duration

	// MaxPayload is the largest payload accepted, in bytes: input of a work item, data of a message or an event,
	// attributes, output, custom status, value of a key, error of an AbandonOptions. At least 1, at most 100 MiB. Defaults to 1 MiB.
	MaxPayload int

	// Logger receives what operators should know: a lost connection, a goroutine that panicked.
	// Defaults to slog.Default().
	Logger *slog.Logger

	// clock replaces the local clock in tests of clocks that disagree.
	clock func() time.Time
	// fault is called at points where tests make the engine fail.
	fault func(point string)
}

// Limits of the lock timeout of a fetch or a renewal, and its default.
const (
	MinLockTimeout     = 10 * time.Millisecond
	MaxLockTimeout     = 24 * time.Hour
	DefaultLockTimeout = 30 * time.Second
)

const defaultSchema = "pgwake"

// listens reports whether there is to be a LISTEN connection.
func (c *Config) listens() bool {
	return !c.DisableLongPoll && newModes(c).any(Mode.listens)
}

// resolve returns a copy with the defaults filled in, or an ErrConfig that lists everything wrong.
func (c *Config) resolve() (Config, error) {
	var r Config
	if c != nil {
		r = *c
	}
	var problems []string
	problem := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }

	if r.Schema == "" {
		r.Schema = defaultSchema
	}
	if err := migrations.CheckSchema(r.Schema); err != nil {
		problem("Schema: %v", err)
	}

	if !r.Mode.known() {
		problem("Mode %d is unknown", int(r.Mode))
	}
	r.Modes = maps.Clone(r.Modes)
	for _, namespace := range slices.Sorted(maps.Keys(r.Modes)) {
		if err := CheckNamespace(namespace); err != nil {
			problem("Modes: %v", err)
		}
		if mode := r.Modes[namespace]; !mode.known() {
			problem("Modes: mode %d of %s is unknown", int(mode), quote(namespace))
		}
	}
	if r.Notify < NotifyDirected || r.Notify > NotifyBroadcast {
		problem("Notify %d is unknown", int(r.Notify))
	}
	if r.AggressivePolicy < OnTrouble || r.AggressivePolicy > Never {
		problem("AggressivePolicy %d is unknown", int(r.AggressivePolicy))
	}
	switch {
	case r.FallbackEnabled == nil:
		r.FallbackEnabled = new(true)
	case *r.FallbackEnabled && r.Mode == ModeEventDriven:
		problem("FallbackEnabled is true, and ModeEventDriven is the mode without it")
	default:
		r.FallbackEnabled = new(*r.FallbackEnabled) // the caller may use the variable again
	}

	const ever = time.Duration(math.MaxInt64)
	duration := func(name string, d *time.Duration, fallback, least, most time.Duration) {
		if *d == 0 {
			*d = fallback
		}
		switch {
		case most == ever && *d < least:
			problem("%s %v is less than %v", name, *d, least)
		case *d < least || *d > most:
			problem("%s %v is not between %v and %v", name, *d, least, most)
		}
	}
	duration("FallbackInterval", &r.FallbackInterval, time.Minute, 100*time.Millisecond, 24*time.Hour)
	duration("MaxWait", &r.MaxWait, 30*time.Second, time.Millisecond, ever)
	duration("TimerGrace", &r.TimerGrace, 0, 0, time.Second)
	duration("AggressiveDuration", &r.AggressiveDuration, time.Minute, time.Millisecond, 24*time.Hour)
	duration("AggressiveInterval", &r.AggressiveInterval, 100*time.Millisecond, firstScoutInterval, time.Hour)
	duration("NotifyDeliveryTimeout", &r.NotifyDeliveryTimeout, 100*time.Millisecond, time.Millisecond, time.Minute)
	duration("CoalesceInterval", &r.CoalesceInterval, 5*time.Millisecond, time.Millisecond, time.Second)
	duration("PollInterval", &r.PollInterval, 100*time.Millisecond, time.Millisecond, time.Hour)
	duration("ArchiveFor", &r.ArchiveFor, 0, 0, 10*365*24*time.Hour)
	if r.MeasureDepths != 0 {
		duration("MeasureDepths", &r.MeasureDepths, 0, time.Second, ever)
	}
	if r.HibernateAfter != 0 {
		before := len(problems)
		duration("HibernateAfter", &r.HibernateAfter, 0, 100*time.Millisecond, 24*time.Hour)
		if len(problems) == before && !r.listens() {
			problem("HibernateAfter %v is for a node that listens", r.HibernateAfter)
		}
	}
	duration("HibernatePoll", &r.HibernatePoll, 6*time.Minute, time.Second, 24*time.Hour)

	number := func(name string, n *int, fallback, least int) {
		if *n == 0 {
			*n = fallback
		}
		if *n < least {
			problem("%s %d is less than %d", name, *n, least)
		}
	}
	number("AggressiveExitThreshold", &r.AggressiveExitThreshold, 5, 1)
	number("WakeFanout", &r.WakeFanout, 2, 1)
	if r.WakeFanout > 100 {
		problem("WakeFanout %d is more than 100", r.WakeFanout)
	}
	number("QuietAbove", &r.QuietAbove, 200, 1)
	number("MaxPayload", &r.MaxPayload, 1<<20, 1)
	if r.MaxPayload > mostPayload {
		problem("MaxPayload %d is more than %d", r.MaxPayload, mostPayload)
	}
	number("HistoryCache", &r.HistoryCache, 0, 0)

	if r.Propagator == nil {
		r.Propagator = otel.GetTextMapPropagator()
	}
	if r.MeterProvider == nil {
		r.MeterProvider = otel.GetMeterProvider()
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	if len(problems) > 0 {
		return Config{}, fmt.Errorf("%w: %s", ErrConfig, strings.Join(problems, "; "))
	}
	return r, nil
}

// lockTimeout checks and completes the lock timeout of a fetch or a renewal.
func lockTimeout(d time.Duration) (time.Duration, error) {
	switch {
	case d == 0:
		return DefaultLockTimeout, nil
	case d < MinLockTimeout || d > MaxLockTimeout:
		return 0, invalid("lock timeout %v is not between %v and %v", d, MinLockTimeout, MaxLockTimeout)
	}
	return d, nil
}
