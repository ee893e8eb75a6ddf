package goworkflows

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/metrics"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/diag"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows/migrations"
	"github.com/pgwake/pgwake/internal/outage"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how does a Backend begin and end, and what do its methods have in common?

// Namespace is where everything of the workflows is, in both queues: what else is on the Provider stays out of the way.
const Namespace = "goworkflows"

// Backend is a backend.Backend and a diag.Backend. All methods are safe for concurrent use.
type Backend struct {
	p       *pgwake.Provider
	tx      pgx.Tx // nil: each call by itself
	in      string // the quoted schema, and a dot
	options *backend.Options
	owner   string // of instances that are sticky to the workers of this Backend

	maxAttempts struct{ turns, activities int } // 0: no bound

	executors *sync.Map // *executorCache: of the workers at work

	open  context.Context // until Close
	close context.CancelFunc
}

var _ diag.Backend = (*Backend)(nil)

// New returns a Backend on the Provider, which it does not close, and creates or migrates its table in the Provider's schema, unless
// the Provider was told not to migrate. The options are the runtime's; of the defaults see backend.DefaultOptions, and the package
// comment about the StickyTimeout. Errors: pgwake.ErrConfig, and those of pgwake.Provider.Migrate.
func New(ctx context.Context, p *pgwake.Provider, options ...backend.BackendOption) (*Backend, error) {
	if p == nil {
		return nil, fmt.Errorf("%w: there is no Provider", pgwake.ErrConfig)
	}
	o := backend.ApplyOptions(options...)
	for what, d := range map[string]time.Duration{"WorkflowLockTimeout": o.WorkflowLockTimeout, "ActivityLockTimeout": o.ActivityLockTimeout} {
		if d < pgwake.MinLockTimeout || d > pgwake.MaxLockTimeout {
			return nil, fmt.Errorf("%w: %s %v is not between %v and %v", pgwake.ErrConfig, what, d, pgwake.MinLockTimeout, pgwake.MaxLockTimeout)
		}
	}
	if o.StickyTimeout != 0 && (o.StickyTimeout < pgwake.MinLockTimeout || o.StickyTimeout > pgwake.MaxLockTimeout) {
		return nil, fmt.Errorf("%w: StickyTimeout %v is neither 0 nor between %v and %v", pgwake.ErrConfig, o.StickyTimeout, pgwake.MinLockTimeout, pgwake.MaxLockTimeout)
	}
	if len(o.WorkerName) > pgwake.MaxNameLength || !utf8.ValidString(o.WorkerName) || strings.ContainsRune(o.WorkerName, 0) {
		return nil, fmt.Errorf("%w: the worker name %.100q is not UTF-8 without NUL of at most %d bytes", pgwake.ErrConfig, o.WorkerName, pgwake.MaxNameLength)
	}
	b := &Backend{p: p, in: pgx.Identifier{p.Schema()}.Sanitize() + ".", options: o, owner: o.WorkerName, executors: &sync.Map{}}
	if b.owner == "" {
		b.owner = "worker-" + rand.Text()
	}
	if err := p.Migrate(ctx, migrations.Layer()); err != nil {
		return nil, err
	}
	b.open, b.close = context.WithCancel(context.Background())
	return b.WithMaxAttempts(0, 0), nil
}

// WithTx returns a Backend for a client.Client whose calls are part of a transaction on the Provider's database, which is to be READ
// COMMITTED: a workflow that it creates, or a signal that it sends, is there if and only if that commits. For one of database/sql see
// pgwake.WrapSQLTx. What workers call is not part of it, and Close closes the Backend that it is from.
func (b *Backend) WithTx(tx pgx.Tx) *Backend {
	in := *b
	in.tx = tx
	return &in
}

// How often a turn, and an activity, is claimed before it becomes a dead letter, unless WithMaxAttempts says otherwise: as in package dispatch.
const maxTurnAttempts, maxActivityAttempts = 10, 25

// WithMaxAttempts returns a Backend for a worker.Worker that is handed out a turn of a workflow, or an activity, so often at most without completing it.
// Then it becomes a dead letter, with the reason "max attempts": one that ends its process, or that never completes, would come again for ever. An attempt
// is a claim, however it ended, and also if the lease was over before. 0 is the default, 10 for turns and 25 for activities, and a negative number no bound.
// Close closes the Backend that it is from.
func (b *Backend) WithMaxAttempts(turns, activities int) *Backend {
	bounded := *b
	bounded.maxAttempts.turns = max(cmp.Or(turns, maxTurnAttempts), 0)
	bounded.maxAttempts.activities = min(max(cmp.Or(activities, maxActivityAttempts), 0), math.MaxInt32)
	return &bounded
}

// Close returns every waiting Get, and lets others have at once what is sticky to the workers of this Backend. Stop these before: end the context
// of worker.Worker.Start, and call WaitForCompletion. The Provider stays open. It may be called again.
func (b *Backend) Close() error {
	b.close()
	if b.options.StickyTimeout == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closingTime)
	defer cancel()
	if _, err := b.p.ReleaseSticky(ctx, []string{b.owner}); err != nil && !errors.Is(err, pgwake.ErrClosed) {
		return err
	}
	return nil
}

// closingTime is how long Close waits for the database, at most.
const closingTime = 5 * time.Second

// Options returns the options, defaults included.
func (b *Backend) Options() *backend.Options { return b.options }

// Tracer returns the tracer of the options.
func (b *Backend) Tracer() trace.Tracer { return b.options.TracerProvider.Tracer(backend.TracerName) }

// Metrics returns the metrics client of the options.
func (b *Backend) Metrics() metrics.Client {
	return b.options.Metrics.WithTags(metrics.Tags{"backend": "pgwake"})
}

// FeatureSupported is true for all features that there are.
func (b *Backend) FeatureSupported(backend.Feature) bool { return true }

// do carries a statement out as a verb of the Provider. The queues are those that it may feed.
func (b *Backend) do(ctx context.Context, op string, statement func(context.Context, pgwake.Querier) error, feeds ...pgwake.Queue) error {
	if b.tx != nil {
		return b.p.DoTx(ctx, b.tx, op, statement)
	}
	return b.p.Do(ctx, op, statement, feeds...)
}

// nobodys is a queue that has nothing: the runtime has no queue with a space in its name.
const nobodys = "of nobody"

// prepared is the outcome of a fetch from nobody's queue, which is made when a worker starts: so that the server has planned what its fetches need before
// the first task is waited for, and that a right which is missing is told at once. A database that is away is no reason not to start.
func prepared(err error) error {
	if errors.Is(err, pgwake.ErrNoWork) || retryable(err) {
		return nil
	}
	return err
}

// While the database is away, pauses between attempts double from the first to the longest of these.
const firstPause, longestPause = 10 * time.Millisecond, time.Second

// fetch repeats an attempt to get a task for as long as the database is away, and ctx lets it. That there is nothing to do is no error. Any other error
// comes after a pause, since a worker without a polling interval calls again at once.
func (b *Backend) fetch(ctx context.Context, attempt func(context.Context) error) error {
	fetching, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.open, cancel)()
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		err := attempt(fetching)
		switch {
		case err == nil || errors.Is(err, pgwake.ErrNoWork) || errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case b.open.Err() != nil:
			err = pgwake.ErrClosed
		case retryable(err) && pause(fetching, wait):
			continue
		}
		pause(ctx, longestPause)
		return err
	}
}

func retryable(err error) bool {
	var failed *pgwake.Error
	return errors.As(err, &failed) && failed.Retryable
}

// persist repeats an ack for as long as the database is away, or not what it is to be, until its lease must have ended. To acknowledge twice does no harm.
func (b *Backend) persist(ctx context.Context, lease time.Duration, ack func() error) error {
	end := time.Now().Add(lease)
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		err := ack()
		if !outage.Passes(err) || time.Now().Add(wait).After(end) || !pause(ctx, wait) {
			return err
		}
	}
}

// errUnanswered: the lease is gone, and no answer came to a try before that, which may have been what ended it.
var errUnanswered = errors.New("no answer came to an earlier try, which may have completed the task")

// settle is persist for an ack, and fails with errUnanswered.
func (b *Backend) settle(ctx context.Context, lease time.Duration, ack func() error) error {
	unanswered := false
	err := b.persist(ctx, lease, func() error {
		err := ack()
		var failed *pgwake.Error
		unanswered = unanswered || errors.As(err, &failed) && failed.Unknown
		return err
	})
	if unanswered && errors.Is(err, pgwake.ErrLockLost) {
		return fmt.Errorf("%w: %w", errUnanswered, err)
	}
	return err
}

// settled is what a worker is told of an ack. For any error its log would say that the task could not be completed, which nobody knows if no answer came,
// and there is nothing that it could do: of one that is not completed somebody else has the lease by now, or will have it.
func (b *Backend) settled(ctx context.Context, instance *core.WorkflowInstance, err error) error {
	if !errors.Is(err, errUnanswered) {
		return err
	}
	b.options.Logger.WarnContext(ctx, "pgwake: a task is completed, or else its lease was lost and it comes again: no answer came to the ack, and the next one found no lease",
		"instance_id", instance.InstanceID, "execution_id", instance.ExecutionID, "error", err)
	return nil
}

// renew repeats a renewal for as long as the database is away. For any error the worker would take the task to be somebody else's, and an activity of
// which the context has ended has failed. A heartbeat comes a third of the lease after the one before (WorkerOptions), so what is left is the rest.
func (b *Backend) renew(ctx context.Context, lease time.Duration, renewal func() error) error {
	return b.persist(ctx, lease-lease/3, renewal)
}

// pause waits, and reports whether ctx let it.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
