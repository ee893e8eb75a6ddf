package dispatch

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"
)

// turns has turns in memory, one at a time for each instance.
type turns struct {
	mu        sync.Mutex
	items     map[string]*fakeTurn
	news      chan struct{}
	fail      func(verb string) error // nil: none
	acks      []pgwake.OrchestrationAck
	ackedFrom []trace.SpanContext // in whose trace
	given     []pgwake.AbandonOptions
	buried    map[string]string // instance to cause

	unanswered map[string]int // how many calls of a verb succeed, and seem to have failed

	delay              time.Duration // what a verb takes
	upload             time.Duration // what an ack takes besides
	slow               time.Duration // what a renewal takes
	renewing, cutShort atomic.Int64  // renewals

	released []string // owners to whom nothing is sticky any more
}

type fakeTurn struct {
	pgwake.OrchestrationItem
	visible time.Time
}

func newTurns(instances ...string) *turns {
	f := &turns{items: map[string]*fakeTurn{}, buried: map[string]string{}, news: make(chan struct{}, 1)}
	for _, instance := range instances {
		f.add(instance)
	}
	return f
}

func (f *turns) add(instance string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.items[instance] = &fakeTurn{OrchestrationItem: pgwake.OrchestrationItem{
		Instance: instance, Name: "flow", ExecutionID: 1, LastEventID: 3}}
	f.changed()
}

func (f *turns) changed() {
	select {
	case f.news <- struct{}{}:
	default:
	}
}

func (f *turns) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	for {
		f.mu.Lock()
		if f.fail != nil {
			if err := f.fail("fetch"); err != nil {
				f.mu.Unlock()
				return nil, err
			}
		}
		wait := time.Hour
		for _, t := range f.items {
			if due := time.Until(t.visible); due > 0 {
				wait = min(wait, due)
				continue
			}
			t.Attempt++
			t.visible = time.Now().Add(o.LockTimeout)
			t.LockedUntil, t.LockToken = t.visible.Add(skew), pgwake.LockToken(t.Instance)
			turn := t.OrchestrationItem
			f.mu.Unlock()
			f.changed()
			return &turn, nil
		}
		f.mu.Unlock()
		t := time.NewTimer(wait)
		select {
		case <-f.news:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, ctx.Err()
		}
		t.Stop()
	}
}

func (f *turns) verb(ctx context.Context, name string, token pgwake.LockToken, change func(*fakeTurn)) error {
	f.mu.Lock()
	delay := f.delay
	f.mu.Unlock()
	nap(ctx, delay)
	if err := ctx.Err(); err != nil {
		return &pgwake.Error{Op: name, Err: err, Retryable: errors.Is(err, context.DeadlineExceeded)}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.changed()
	if f.fail != nil {
		if err := f.fail(name); err != nil {
			return err
		}
	}
	t := f.items[string(token)]
	if t == nil || t.LockToken != token || !t.visible.After(time.Now()) {
		return &pgwake.Error{Op: name, Err: pgwake.ErrLockLost}
	}
	change(t)
	if f.unanswered[name] > 0 {
		f.unanswered[name]--
		return &pgwake.Error{Op: name, Err: context.DeadlineExceeded, Retryable: true, Unknown: true}
	}
	return nil
}

func (f *turns) AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	f.mu.Lock()
	upload := f.upload
	f.mu.Unlock()
	nap(ctx, upload)
	return f.verb(ctx, "ack", token, func(t *fakeTurn) {
		f.acks = append(f.acks, ack)
		f.ackedFrom = append(f.ackedFrom, trace.SpanContextFromContext(ctx))
		delete(f.items, t.Instance)
	})
}

func (f *turns) AbandonOrchestrationItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	return f.verb(ctx, "abandon", token, func(t *fakeTurn) {
		f.given = append(f.given, *o)
		t.visible, t.LockToken = time.Now().Add(o.Delay), ""
		if o.IgnoreAttempt {
			t.Attempt--
		}
	})
}

func (f *turns) ReleaseSticky(_ context.Context, owners []string) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.released = append(f.released, owners...)
	return 0, nil
}

func (f *turns) DeadLetterOrchestrationItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error {
	return f.verb(ctx, "dead letter", token, func(t *fakeTurn) {
		f.buried[t.Instance] = reason + ": " + cause
		delete(f.items, t.Instance)
	})
}

func (f *turns) LocalTime(server time.Time) time.Time { return server.Add(-skew) }

func (f *turns) RenewOrchestrationItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (until time.Time, err error) {
	f.mu.Lock()
	slow := f.slow
	f.mu.Unlock()
	if slow > 0 {
		f.renewing.Add(1)
		defer f.renewing.Add(-1)
		nap(ctx, slow)
		if ctx.Err() != nil {
			f.cutShort.Add(1)
			time.Sleep(time.Millisecond) // a connection is closed
			return until, retryable("renew")
		}
	}
	return until, f.verb(ctx, "renew", token, func(t *fakeTurn) {
		until = time.Now().Add(extend)
		t.visible = until
	})
}

// deciding runs an Orchestrator in a bubble until test returns, and then ends it.
func deciding(t *testing.T, c OrchestratorConfig, decide func() Decider, instances []string, test func(t *testing.T, f *turns, stop func() error)) {
	t.Helper()
	virtualtime.Test(t, func(t *testing.T) {
		f := newTurns(instances...)
		if c.Logger == nil {
			c.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
		}
		o := NewOrchestrator(f, decide(), &c)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- o.Run(ctx) }()
		stopped := false
		stop := func() error {
			stopped = true
			cancel()
			return <-ended
		}
		test(t, f, stop)
		if !stopped {
			require.NoError(t, stop())
		}
	})
}

func TestOrchestrator_Decides_WhatIsLeftOutIsFilledIn(t *testing.T) {
	deciding(t, OrchestratorConfig{Sticky: time.Second, Owner: "me"}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if turn.Instance == "b" {
				ack.Metadata.Status = pgwake.StatusCompleted
			}
			return ack, nil
		}
	}, []string{"a", "b"}, func(t *testing.T, f *turns, _ func() error) {
		synctest.Wait()
		require.ElementsMatch(t, []pgwake.OrchestrationAck{
			{ExecutionID: 1, Metadata: pgwake.Metadata{Name: "flow"}, Sticky: &pgwake.Sticky{Owner: "me", For: time.Second}},
			{ExecutionID: 1, Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusCompleted}},
		}, f.acks)
	})
}

func TestOrchestrator_TurnMiddleware_IsAroundTheDecider_TheFirstOutermost(t *testing.T) {
	var calls []string
	around := func(name string) TurnMiddleware {
		return func(next Decider) Decider {
			return func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
				calls = append(calls, name)
				return next(ctx, turn)
			}
		}
	}
	deciding(t, OrchestratorConfig{Middleware: []TurnMiddleware{around("a"), around("b")}}, func() Decider {
		return func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			calls = append(calls, "decider")
			return ack, nil
		}
	}, []string{"i"}, func(t *testing.T, _ *turns, _ func() error) {
		synctest.Wait()
		require.Equal(t, []string{"a", "b", "decider"}, calls)
	})
	for _, wrong := range []TurnMiddleware{nil, func(Decider) Decider { return nil }} {
		o := NewOrchestrator(newTurns(), func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			return ack, nil
		}, &OrchestratorConfig{Middleware: []TurnMiddleware{wrong}})
		require.ErrorIs(t, o.Run(t.Context()), pgwake.ErrConfig)
	}
}

func TestOrchestrator_SlowTurn_IsRenewed(t *testing.T) {
	deciding(t, OrchestratorConfig{LockTimeout: time.Second}, func() Decider {
		return func(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			time.Sleep(10 * time.Second)
			return ack, ctx.Err()
		}
	}, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
		time.Sleep(11 * time.Second)
		synctest.Wait()
		require.Len(t, f.acks, 1)
	})
}

func TestOrchestrator_RenewalsFail_ContextEndsWithTheLease(t *testing.T) {
	var cause chan error
	deciding(t, OrchestratorConfig{LockTimeout: time.Second}, func() Decider {
		cause = make(chan error, 1)
		return func(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if turn.Attempt == 1 {
				<-ctx.Done()
				cause <- context.Cause(ctx)
			}
			return ack, nil
		}
	}, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "renew" {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		require.ErrorIs(t, <-cause, pgwake.ErrLockLost)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, f.acks, 1, "of the second attempt alone")
		require.Empty(t, f.given)
	})
}

func TestOrchestrator_TurnFails_IsRetried_AndThenTheInstanceFails(t *testing.T) {
	for name, decide := range map[string]Decider{
		"by an error": func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			return ack, errors.New("no")
		},
		"by a panic": func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) { panic("no") },
		"by a nil pointer": func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			return ack, (*nilError)(nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			deciding(t, OrchestratorConfig{MaxAttempts: 3, Retry: func(n int, _ error) time.Duration { return time.Duration(n) * time.Second }},
				func() Decider { return decide }, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
					time.Sleep(4 * time.Second)
					synctest.Wait()
					require.Len(t, f.given, 2)
					require.Equal(t, []time.Duration{time.Second, 2 * time.Second}, []time.Duration{f.given[0].Delay, f.given[1].Delay})
					require.Len(t, f.acks, 1)
					ack := f.acks[0]
					require.Equal(t, pgwake.StatusFailed, ack.Metadata.Status)
					require.Contains(t, ack.Metadata.Output, "no")
					require.Len(t, ack.History, 1)
					require.EqualValues(t, 4, ack.History[0].ID)
					require.Equal(t, KindExecutionFailed, ack.History[0].Type)
					require.Contains(t, string(ack.History[0].Data), `"attempts":3`)
				})
		})
	}
}

func TestOrchestrator_AckIsRefused_TheTurnHasFailed(t *testing.T) {
	deciding(t, OrchestratorConfig{MaxAttempts: 2}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			return ack, nil
		}
	}, nil, func(t *testing.T, f *turns, _ func() error) {
		acks := 0
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "ack" {
				if acks++; acks <= 2 {
					return &pgwake.Error{Op: verb, Err: pgwake.ErrInvalid}
				}
			}
			return nil
		}
		f.mu.Unlock()
		f.add("a")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, f.given, 1)
		require.Len(t, f.acks, 1)
		require.Equal(t, pgwake.StatusFailed, f.acks[0].Metadata.Status)
	})
}

func TestOrchestrator_Stops_TurnsThatTakeTooLongAreGivenBack(t *testing.T) {
	var log strings.Builder
	deciding(t, OrchestratorConfig{StopTimeout: 5 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}, func() Decider {
		return func(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if turn.Instance == "quick" {
				time.Sleep(time.Second)
				return ack, nil
			}
			<-ctx.Done()
			return ack, context.Cause(ctx)
		}
	}, []string{"quick", "slow"}, func(t *testing.T, f *turns, stop func() error) {
		synctest.Wait()
		began := time.Now()
		require.NoError(t, stop())
		require.Equal(t, 5*time.Second, time.Since(began))
		require.Len(t, f.acks, 1)
		require.Len(t, f.given, 1)
		require.True(t, f.given[0].IgnoreAttempt)
		require.Zero(t, f.given[0].Delay)
		require.Empty(t, log.String(), "nothing has failed")
	})
}

func TestOrchestrator_FetchFailsForGood_RunReturnsIt(t *testing.T) {
	deciding(t, OrchestratorConfig{}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			return ack, nil
		}
	}, []string{"a"}, func(t *testing.T, f *turns, stop func() error) {
		synctest.Wait()
		f.mu.Lock()
		f.fail = func(string) error { return &pgwake.Error{Op: "fetch", Err: pgwake.ErrInvalid} }
		f.mu.Unlock()
		f.changed()
		synctest.Wait()
		require.ErrorIs(t, stop(), pgwake.ErrInvalid)
	})
}

// What was decided is acknowledged once that can be, at no attempt of the instance's, and the Orchestrator goes on.
func TestOrchestrator_WhatTheServerIsLikeForAWhile_EndsNothing(t *testing.T) {
	for name, failure := range whatPasses {
		t.Run(name, func(t *testing.T) {
			var down atomic.Bool
			decided := map[string]int{}
			deciding(t, OrchestratorConfig{MaxAttempts: 1}, func() Decider {
				return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
					decided[turn.Instance]++
					down.Store(true)
					return ack, nil
				}
			}, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
				f.mu.Lock()
				f.fail = func(string) error {
					if down.Load() {
						return failure
					}
					return nil
				}
				f.mu.Unlock()
				time.Sleep(20 * time.Second)
				down.Store(false)
				f.changed()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				require.Equal(t, map[string]int{"a": 1}, decided)
				f.mu.Lock()
				defer f.mu.Unlock()
				require.Empty(t, f.items)
				require.Empty(t, f.buried)
				require.Empty(t, f.given)
			})
		})
	}
}

func TestOrchestrator_RenewalsAreSlow_LeaseIsKept(t *testing.T) {
	deciding(t, OrchestratorConfig{LockTimeout: 30 * time.Second}, func() Decider {
		return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			time.Sleep(5 * time.Minute)
			return ack, ctx.Err()
		}
	}, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
		f.mu.Lock()
		f.slow = 9 * time.Second
		f.mu.Unlock()
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		require.Len(t, f.acks, 1)
		require.Empty(t, f.given)
	})
}

func TestOrchestrator_DeciderEndsItsGoroutineOrPoisonPanics_LoopsGoOn(t *testing.T) {
	deciding(t, OrchestratorConfig{Concurrency: 1, MaxAttempts: 1, Poison: func(*pgwake.OrchestrationItem, error) (pgwake.OrchestrationAck, error) {
		panic("oh")
	}}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if turn.Instance == "exits" {
				runtime.Goexit()
			}
			return ack, nil
		}
	}, []string{"exits"}, func(t *testing.T, f *turns, _ func() error) {
		time.Sleep(time.Minute)
		f.add("good")
		synctest.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Len(t, f.acks, 1)
		require.Contains(t, f.buried["exits"], errGoexit.Error())
		require.Contains(t, f.buried["exits"], "oh")
	})
}

func TestOrchestrator_ProviderIsClosedDuringATurn_RunEnds(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := newTurns("a")
		o := NewOrchestrator(f, func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			<-ctx.Done()
			return ack, context.Cause(ctx)
		}, &OrchestratorConfig{StopTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
		ended := make(chan error, 1)
		go func() { ended <- o.Run(t.Context()) }()
		synctest.Wait()
		f.mu.Lock()
		f.fail = func(string) error { return pgwake.ErrClosed }
		f.mu.Unlock()
		f.changed()
		require.NoError(t, <-ended)
		require.ErrorIs(t, o.Run(t.Context()), pgwake.ErrConfig, "once")
	})
}

// The last attempt is decided, and the database is away when that is to be acknowledged: the instance is not to blame.
func TestOrchestrator_DatabaseIsAwayAfterTheLastDecision_InstanceIsNotFailed(t *testing.T) {
	var away atomic.Bool
	var once sync.Once
	deciding(t, OrchestratorConfig{MaxAttempts: 1, LockTimeout: 30 * time.Second}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			once.Do(func() { away.Store(true) })
			return pgwake.OrchestrationAck{}, nil
		}
	}, nil, func(t *testing.T, f *turns, _ func() error) {
		f.fail = func(verb string) error {
			if away.Load() && verb != "fetch" && verb != "abandon" { // which is the first that is heard again
				return retryable(verb)
			}
			return nil
		}
		f.add("a")
		time.Sleep(31 * time.Second)
		away.Store(false)
		time.Sleep(time.Minute)
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Len(t, f.acks, 1)
		require.NotEqual(t, pgwake.StatusFailed, f.acks[0].Metadata.Status)
	})
}

// Without an end to it the turn would come again for ever.
func TestOrchestrator_PoisonIsRefused_MessagesBecomeDeadLetters(t *testing.T) {
	for name, most := range map[string]int{"the ack": 1, "the ack, and the text": 2} {
		t.Run(name, func(t *testing.T) {
			refusals := 0
			refuse := func(verb string) error {
				if verb == "fetch" || refusals == most {
					return nil
				}
				refusals++
				return &pgwake.Error{Op: verb, Err: pgwake.ErrInvalid} // the instance is unknown, say
			}
			deciding(t, OrchestratorConfig{}, func() Decider {
				return func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
					return pgwake.OrchestrationAck{}, Permanent(errors.New("what is that?"))
				}
			}, nil, func(t *testing.T, f *turns, _ func() error) {
				f.mu.Lock()
				f.fail = refuse
				f.mu.Unlock()
				f.add("a")
				synctest.Wait()
				require.Contains(t, f.buried["a"], ReasonPermanent)
				require.Empty(t, f.items)
				require.Empty(t, f.given)
			})
		})
	}
}

// However little time Deciders have to notice, what becomes of their turns is in the database when Run returns.
func TestOrchestrator_DecidersHaveNoTime_TurnsAreHandedBack(t *testing.T) {
	for name, decide := range map[string]Decider{
		"who heeds it": func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			<-ctx.Done()
			return ack, ctx.Err()
		},
		"who is late": func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			<-ctx.Done()
			time.Sleep(time.Second)
			return ack, ctx.Err()
		},
		"who is done": func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			time.Sleep(time.Second)
			return ack, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			deciding(t, OrchestratorConfig{StopTimeout: time.Second, CancelTimeout: 1}, func() Decider { return decide },
				[]string{"a", "b"}, func(t *testing.T, f *turns, stop func() error) {
					synctest.Wait()
					f.mu.Lock()
					f.delay = 100 * time.Millisecond
					f.mu.Unlock()
					if err := stop(); err != nil {
						require.ErrorIs(t, err, ErrHandlersLeft)
					}
					for _, turn := range f.items {
						require.Empty(t, turn.LockToken)
					}
					time.Sleep(time.Second)
				})
		})
	}
}

// Nothing is asked of the Provider after Run: it may be closed by then.
func TestOrchestrator_TurnsCannotBeSettledAtTheEnd_NothingIsCalledAfterRun(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := newTurns("a", "b", "c")
		var over atomic.Bool
		var late atomic.Int64
		f.fail = func(verb string) error {
			if over.Load() {
				late.Add(1)
			}
			if verb == "fetch" {
				return nil
			}
			return retryable(verb)
		}
		o := NewOrchestrator(f, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			return pgwake.OrchestrationAck{}, nil
		}, &OrchestratorConfig{Logger: slog.New(slog.DiscardHandler), StopTimeout: time.Second, CancelTimeout: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(2*time.Second, cancel)
		require.NoError(t, o.Run(ctx))
		over.Store(true)
		time.Sleep(time.Minute)
		require.Zero(t, late.Load())
	})
}

func TestOrchestrator_DeciderDoesNotHeedTheEnd_ItsTurnIsGivenBack(t *testing.T) {
	release := make(chan struct{})
	var log strings.Builder
	virtualtime.Test(t, func(t *testing.T) {
		release = make(chan struct{})
		f := newTurns("a")
		o := NewOrchestrator(f, func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			<-release
			return ack, nil
		}, &OrchestratorConfig{StopTimeout: time.Second, CancelTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- o.Run(ctx) }()
		synctest.Wait()
		cancel()
		require.ErrorIs(t, <-ended, ErrHandlersLeft)
		require.Len(t, f.given, 1)
		require.True(t, f.given[0].IgnoreAttempt)
		close(release)
		synctest.Wait()
		require.Empty(t, f.acks)
		require.Empty(t, log.String(), "it was given back")
	})
}

func TestOrchestrator_RenewalsFailForMostOfALease_ItIsKept(t *testing.T) {
	deciding(t, OrchestratorConfig{LockTimeout: 30 * time.Second}, func() Decider {
		return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			time.Sleep(time.Minute)
			return ack, ctx.Err()
		}
	}, []string{"a"}, func(t *testing.T, f *turns, _ func() error) {
		began := time.Now()
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "renew" && time.Since(began) < 25*time.Second {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		time.Sleep(61 * time.Second)
		synctest.Wait()
		require.Len(t, f.acks, 1)
	})
}

func TestOrchestrator_RenewalsHaveNoAnswer_TurnIsGivenBackOnceThereIsOne(t *testing.T) {
	var began []time.Time
	deciding(t, OrchestratorConfig{LockTimeout: time.Hour}, func() Decider {
		began = nil
		return func(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if began = append(began, time.Now()); turn.Attempt > 1 {
				return ack, nil
			}
			<-ctx.Done()
			return ack, ctx.Err()
		}
	}, nil, func(t *testing.T, f *turns, _ func() error) {
		f.mu.Lock()
		f.unanswered = map[string]int{"renew": math.MaxInt}
		f.fail = func(verb string) error {
			if verb == "abandon" {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		f.add("a")
		time.Sleep(time.Hour + time.Minute)
		f.mu.Lock()
		f.fail = nil
		f.mu.Unlock()
		time.Sleep(2 * lastPause)
		synctest.Wait()
		require.Len(t, began, 2)
		require.Len(t, f.acks, 1)
		require.Len(t, f.given, 1)
	})
}

func TestOrchestrator_AnswerIsLost_IsNoLossOfALease(t *testing.T) {
	var log strings.Builder
	deciding(t, OrchestratorConfig{Logger: slog.New(slog.NewTextHandler(&log, nil)), Retry: func(int, error) time.Duration { return time.Hour }}, func() Decider {
		return func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			if turn.Instance == "bad" {
				return ack, errors.New("no")
			}
			return ack, nil
		}
	}, nil, func(t *testing.T, f *turns, stop func() error) {
		f.mu.Lock()
		f.unanswered = map[string]int{"ack": 1, "abandon": 1}
		f.mu.Unlock()
		f.add("good")
		f.add("bad")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.NoError(t, stop())
		require.Len(t, f.acks, 1)
		require.Len(t, f.given, 1)
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), "dispatch: failed")
	})
}

func TestOrchestrator_RenewalIsOnItsWay_TurnDoesNotCutItShort_AndRunWaitsForIt(t *testing.T) {
	deciding(t, OrchestratorConfig{LockTimeout: 30 * time.Second}, func() Decider {
		return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			time.Sleep(11 * time.Second)
			return ack, ctx.Err()
		}
	}, nil, func(t *testing.T, f *turns, stop func() error) {
		f.mu.Lock()
		f.slow = 2400 * time.Millisecond // from 9 s or a little later
		f.mu.Unlock()
		f.add("a")
		time.Sleep(11200 * time.Millisecond)
		synctest.Wait()
		require.Len(t, f.acks, 1)
		require.EqualValues(t, 1, f.renewing.Load())
		time.Sleep(1300 * time.Millisecond)
		require.Zero(t, f.renewing.Load()+f.cutShort.Load())
		f.add("b")
		synctest.Wait()
		require.NoError(t, stop())
		require.Zero(t, f.renewing.Load())
		require.EqualValues(t, 1, f.cutShort.Load())
	})
}

func TestOrchestrator_DeciderTakesLongToNoticeTheEnd_ItsLeaseIsKept(t *testing.T) {
	const length = time.Second
	deciding(t, OrchestratorConfig{LockTimeout: length, StopTimeout: time.Second, CancelTimeout: time.Minute}, func() Decider {
		return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			<-ctx.Done()
			time.Sleep(5 * length)
			return ack, nil
		}
	}, []string{"a"}, func(t *testing.T, f *turns, stop func() error) {
		synctest.Wait()
		require.NoError(t, stop())
		require.Len(t, f.acks, 1)
	})
}

func TestOrchestrator_Ends_ItsOwnerGivesUpWhatIsStickyToIt(t *testing.T) {
	for owner, want := range map[string][]string{"me": {"me"}, "": nil} {
		deciding(t, OrchestratorConfig{Owner: owner, StopTimeout: time.Second}, func() Decider {
			return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
				<-ctx.Done()
				return ack, ctx.Err()
			}
		}, []string{"a"}, func(t *testing.T, f *turns, stop func() error) {
			synctest.Wait()
			require.Empty(t, f.released)
			require.NoError(t, stop())
			require.Len(t, f.given, 1)
			require.Equal(t, want, f.released)
		})
	}
}
