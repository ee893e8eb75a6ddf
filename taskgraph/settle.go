package taskgraph

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: how do the beginning and the end of an attempt get into the database, whatever happens to be wrong with it?
//
// A deadlock, a pool that is full or a server that restarts is not to cost an attempt: the call is repeated until it is answered. If it
// was sent and no answer came, it may have had its effect, and to repeat it is not to have another one. What never succeeds has a
// lease's time, as long as others would wait for a worker that died; then the item is given back, and the attempt, if it has begun, is lost.

// beforeRepeat is how long to wait before a call is repeated.
var beforeRepeat = Backoff{Base: 5 * time.Millisecond, Max: time.Second}

// beforeItemAgain is how long an item is put off of whose step no attempt could begin.
const beforeItemAgain = 15 * time.Second

// unsettled is the error of a call that may be repeated. It is not unwrapped: nobody but settle is to conclude from it that the call
// may have had its effect.
type unsettled struct{ error }

// settle acknowledges an item by a call (dispatch.AckBy) that is repeated while it fails for a reason that passes: for as long as one
// AckBy lasts, and again for as long as a lease does, unless ctx ends, which is that of the handler. unsure tells the call that one before it
// may have had its effect. That the lease is lost then means that it had, or that the item is somebody else's by now: there is nothing left
// to do.
func (e *Engine) settle(ctx context.Context, call func(ctx context.Context, unsure bool) error) error {
	unsure, until := false, time.Now().Add(e.lease())
	for {
		repeat := false
		err := dispatch.AckBy(ctx, func(ctx context.Context, _ pgwake.LockToken) error {
			for n := 1; ; n++ {
				err := call(ctx, unsure)
				switch repeat = outage.Passes(err); {
				case unsure && errors.Is(err, pgwake.ErrLockLost):
					return nil
				case !repeat:
					return err
				}
				var failure *pgwake.Error
				unsure = unsure || errors.As(err, &failure) && failure.Unknown
				select {
				case <-ctx.Done():
					return unsettled{err}
				case <-time.After(beforeRepeat.Delay(n)):
				}
			}
		})
		if !repeat || ctx.Err() != nil || time.Now().After(until) {
			return err
		}
	}
}

// lease is how long that of a step's item is.
func (e *Engine) lease() time.Duration {
	return cmp.Or(e.cfg.Steps.LockTimeout, pgwake.DefaultLockTimeout)
}

// refused reports whether the database has said no, and would do so again.
func refused(err error) bool {
	var failure *pgwake.Error
	return errors.As(err, &failure) && !failure.Unknown && !outage.Passes(err) &&
		!errors.Is(err, pgwake.ErrLockLost) && !errors.Is(err, pgwake.ErrClosed) && !errors.Is(err, context.Canceled)
}

// isAt reports whether the attempt has not ended: it is in progress by the claim that has begun it, or the server has lost its beginning (see
// 00013_survives.sql). A call that is on its way in the database is waited for, by the lock of the row.
func (e *Engine) isAt(ctx context.Context, s *Step) (bool, error) {
	all, err := collect(ctx, e.Graph, "look at step", "get",
		`SELECT true FROM `+e.in+`steps WHERE step_id = $1 AND (state = 'in_progress' AND claim = $2 OR state = 'enqueued' AND work_item_id = $3) FOR SHARE`,
		pgx.RowTo[bool], []any{s.ID, s.claim, s.item})
	return len(all) > 0, err
}
