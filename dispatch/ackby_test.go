package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: is what a handler acknowledged by itself acknowledged, and nothing else?

// byItself is a Dispatcher whose handler for "a" acknowledges by itself, on a fake.
type byItself struct {
	*fake
	log    strings.Builder
	ends   []Ended
	called atomic.Int64 // acknowledgements that were called
	stop   func() error
}

// ack is a statement of the handler's.
func (b *byItself) ack(ctx context.Context, token pgwake.LockToken) error {
	b.called.Add(1)
	return b.AckWorkItems(ctx, []pgwake.LockToken{token})
}

func (b *byItself) outcomes() (all []Outcome) {
	for _, e := range b.ends {
		all = append(all, e.Outcome)
	}
	return all
}

// acking runs a Dispatcher in a bubble, with a handler for "a" that is to acknowledge by itself.
func acking(t *testing.T, c Config, handle func(b *byItself, ctx context.Context, item *pgwake.ClaimedWorkItem) error, test func(t *testing.T, b *byItself)) {
	t.Helper()
	var b *byItself
	virtualtime.Test(t, func(t *testing.T) {
		b = &byItself{fake: newFake()}
		c := c
		c.Logger = slog.New(slog.NewTextHandler(&b.log, nil))
		if c.Concurrency == 0 {
			c.Concurrency = 1
		}
		if c.Retry == nil {
			c.Retry = func(int, error) time.Duration { return time.Hour }
		}
		c.OnEnd = func(e Ended) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.ends = append(b.ends, e)
		}
		d := New(b.fake, &c)
		d.Handle("a", func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) {
			return Result(`"of the handler"`), handle(b, ctx, item)
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
		stopped := false
		b.stop = func() error {
			stopped = true
			cancel()
			return <-ended
		}
		test(t, b)
		if !stopped {
			require.NoError(t, b.stop())
		}
	})
}

func TestAckBy_Succeeds_ItemIsDoneWhateverTheHandlerDoesThen(t *testing.T) {
	failure := errors.New("afterwards")
	for name, afterwards := range map[string]func(ctx context.Context) error{
		"nothing":         func(context.Context) error { return nil },
		"an error":        func(context.Context) error { return failure },
		"a permanent one": func(context.Context) error { return Permanent(failure) },
		"a snooze":        func(context.Context) error { return Snooze(time.Minute) },
		"a panic":         func(context.Context) error { panic(failure) },
		"its goroutine":   func(context.Context) error { runtime.Goexit(); return nil },
		"its time is up":  func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"another ack of a": func(ctx context.Context) error {
			return AckBy(ctx, func(context.Context, pgwake.LockToken) error { panic("it is called again") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := testmeter.New()
			acking(t, Config{MeterProvider: m, Timeout: time.Second}, func(b *byItself, ctx context.Context, item *pgwake.ClaimedWorkItem) error {
				require.NoError(t, AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
					require.Equal(t, item.LockToken, token)
					return b.ack(ctx, token)
				}))
				return afterwards(ctx)
			}, func(t *testing.T, b *byItself) {
				b.add(pgwake.WorkItem{Name: "a", Instance: "i"})
				time.Sleep(2 * time.Second)
				synctest.Wait()
				require.NoError(t, b.stop())
				require.Equal(t, []string{"a"}, b.acked)
				require.Empty(t, b.sent, "nobody waits for a completion")
				require.Empty(t, b.items)
				require.Zero(t, b.calls["abandon"]+b.calls["dead letter"]+b.calls["ack"]-1)
				require.Equal(t, []Outcome{Done}, b.outcomes())
				require.Equal(t, name != "nothing", b.ends[0].Err != nil)
				require.Equal(t, name != "nothing", strings.Contains(b.log.String(), "failed after it was acknowledged"), b.log.String())
				require.Len(t, m.Recorded(testmeter.Key(MetricDuration, AttrName.String("a"), AttrOutcome.String(string(Done)))), 1)
			})
		})
	}
}

// A renewal finds no lease once the statement has committed: that is neither the end of the commit nor of the handler.
func TestAckBy_RenewalsComeRightAfterTheCommit_NothingIsLost(t *testing.T) {
	const length = time.Second
	for _, answers := range []time.Duration{0, 3 * length} { // how long the answer to the commit is on its way
		var ended []error
		acking(t, Config{LockTimeout: length}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			ended = nil
			err := AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
				err := b.ack(own, token)
				time.Sleep(answers) // until it is heard here
				ended = append(ended, own.Err(), ctx.Err())
				return err
			})
			time.Sleep(3 * length)
			ended = append(ended, err, ctx.Err())
			return nil
		}, func(t *testing.T, b *byItself) {
			b.enqueue("a")
			time.Sleep(7 * length)
			synctest.Wait()
			require.Equal(t, []error{nil, nil, nil, nil}, ended)
			require.Equal(t, []Outcome{Done}, b.outcomes())
			require.Equal(t, answers > 0, b.renewed > 0)
			require.Empty(t, b.log.String())
		})
	}
}

func TestAckBy_LeaseIsLost_NothingIsDone(t *testing.T) {
	const length = time.Second
	for name, c := range map[string]struct {
		before func(b *byItself, ctx context.Context)
		ack    func(b *byItself, ctx context.Context, token pgwake.LockToken) error
		called int64
	}{
		"and it is known": {before: func(_ *byItself, ctx context.Context) { <-ctx.Done() }, ack: (*byItself).ack},
		"and it is not":   {before: func(*byItself, context.Context) {}, ack: (*byItself).ack, called: 1},
		"and the server says so": {before: func(*byItself, context.Context) {}, called: 1, ack: func(b *byItself, ctx context.Context, token pgwake.LockToken) error {
			_ = b.ack(ctx, token)
			return fmt.Errorf("keep the receipt: %w", &pgconn.PgError{Code: "PW001", Severity: "ERROR"})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var errs []error
			acking(t, Config{LockTimeout: length}, func(b *byItself, ctx context.Context, item *pgwake.ClaimedWorkItem) error {
				require.NoError(t, b.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: time.Hour})) // behind our back
				c.before(b, ctx)
				errs = nil
				for range 2 {
					errs = append(errs, AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error { return c.ack(b, ctx, token) }))
				}
				return nil // whatever it says
			}, func(t *testing.T, b *byItself) {
				b.enqueue("a")
				time.Sleep(3 * length)
				synctest.Wait()
				require.Len(t, errs, 2)
				require.ErrorIs(t, errs[0], pgwake.ErrLockLost)
				require.ErrorIs(t, errs[1], pgwake.ErrLockLost)
				require.Equal(t, c.called, b.called.Load())
				require.Equal(t, []Outcome{LeaseLost}, b.outcomes())
				require.Empty(t, b.acked)
				require.Equal(t, 1, b.calls["abandon"], "ours alone")
				require.Equal(t, 1, strings.Count(b.log.String(), "\n"), b.log.String())
			})
		})
	}
}

// A lease that is lost while the statement is on its way, and fails, is told afterwards.
func TestAckBy_LeaseIsLostMeanwhileAndItFails_HandlerIsTold(t *testing.T) {
	var during, after error
	acking(t, Config{LockTimeout: time.Second}, func(b *byItself, ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		err := AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
			_ = b.AbandonWorkItem(ctx, token, &pgwake.AbandonOptions{Delay: time.Hour})
			time.Sleep(2 * time.Second)
			during = ctx.Err()
			return errors.New("no")
		})
		after = context.Cause(ctx)
		return err
	}, func(t *testing.T, b *byItself) {
		b.enqueue("a")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.NoError(t, during)
		require.ErrorIs(t, after, pgwake.ErrLockLost)
		require.Equal(t, []Outcome{LeaseLost}, b.outcomes())
	})
}

func TestAckBy_FailsWithoutEffect_HandlerGoesOnAsItLikes(t *testing.T) {
	no := &pgconn.PgError{Code: "40001", Severity: "ERROR"}
	fails := func(ctx context.Context) error {
		return AckBy(ctx, func(context.Context, pgwake.LockToken) error { return no })
	}
	for name, c := range map[string]struct {
		handle func(b *byItself, ctx context.Context) error
		want   Outcome
		err    error
	}{
		"returns it": {func(_ *byItself, ctx context.Context) error { return fails(ctx) }, Retried, no},
		"forgets it": {func(_ *byItself, ctx context.Context) error { _ = fails(ctx); return nil }, Retried, no},
		"gives up":   {func(_ *byItself, ctx context.Context) error { return Permanent(fails(ctx)) }, DeadLettered, no},
		"waits":      {func(_ *byItself, ctx context.Context) error { _ = fails(ctx); return Snooze(time.Minute) }, Snoozed, nil},
		"tries again": {func(b *byItself, ctx context.Context) error {
			_ = fails(ctx)
			return AckBy(ctx, b.ack)
		}, Done, nil},
		"tries again and fails": {func(b *byItself, ctx context.Context) error {
			require.NoError(t, AckBy(ctx, b.ack))
			return no
		}, Done, no},
	} {
		t.Run(name, func(t *testing.T) {
			acking(t, Config{}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error { return c.handle(b, ctx) }, func(t *testing.T, b *byItself) {
				b.enqueue("a")
				synctest.Wait()
				require.Equal(t, []Outcome{c.want}, b.outcomes())
				require.ErrorIs(t, b.ends[0].Err, c.err)
				require.Equal(t, c.want == Done, len(b.acked) == 1)
			})
		})
	}
}

// It took effect, and no answer came: what is given back is gone, which is no loss of a lease.
func TestAckBy_OutcomeIsUnknown_ItIsGivenBack_AndNobodyIsAlarmed(t *testing.T) {
	for name, c := range map[string]struct {
		err     error // panics, if nil
		happens bool
	}{
		"it happened":               {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, true},
		"it did not":                {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, false},
		"the connection broke":      {fmt.Errorf("commit: %w", io.ErrUnexpectedEOF), true},
		"it panicked":               {nil, true},
		"it panicked, and did not":  {nil, false},
		"the last attempt":          {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, true},
		"an orchestration's":        {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, true},
		"forgotten by the handler":  {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, false},
		"forgotten, and it happend": {&pgwake.Error{Op: "ack", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			config := Config{}
			if name == "the last attempt" {
				config.MaxAttempts = 1
			}
			acking(t, config, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
				defer func() {
					err := AckBy(ctx, func(context.Context, pgwake.LockToken) error { panic("it is called again") })
					require.ErrorIs(t, err, pgwake.ErrInvalid)
				}()
				err := AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
					if c.happens {
						require.NoError(t, b.ack(ctx, token))
					}
					if c.err == nil {
						panic("in the middle")
					}
					return c.err
				})
				if strings.HasPrefix(name, "forgotten") {
					return nil
				}
				return err
			}, func(t *testing.T, b *byItself) {
				w := pgwake.WorkItem{Name: "a"}
				if name == "an orchestration's" {
					w.Instance = "i"
				}
				b.add(w)
				time.Sleep(time.Second)
				synctest.Wait()
				require.Equal(t, c.happens, len(b.items) == 0)
				require.Equal(t, c.happens, len(b.acked) == 1)
				require.Empty(t, b.sent)
				require.NotContains(t, b.log.String(), "lease")
				require.Equal(t, 1, strings.Count(b.log.String(), "level="), b.log.String())
			})
		})
	}
}

func TestAckBy_WhereItCannotBe_IsRefused(t *testing.T) {
	never := func(context.Context, pgwake.LockToken) error { panic("it is called") }
	refused := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, pgwake.ErrInvalid)
		require.ErrorAs(t, err, new(permanentError))
	}
	refused(AckBy(t.Context(), never))
	var batch, without, meanwhile, late error
	var left context.Context
	dispatching(t, Config{Concurrency: 1}, func(d *Dispatcher) {
		d.HandleBatch("batch", 2, func(ctx context.Context, _ []*pgwake.ClaimedWorkItem) error {
			batch = AckBy(ctx, never)
			return batch
		})
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			without = AckBy(ctx, nil)
			_ = AckBy(ctx, func(context.Context, pgwake.LockToken) error {
				meanwhile = AckBy(ctx, never)
				return errors.New("no")
			})
			left = ctx
			return Snooze(time.Hour)
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("batch", "a")
		synctest.Wait()
		refused(batch)
		require.Contains(t, f.buried["batch"], "AckBy")
		refused(without)
		refused(meanwhile)
		late = AckBy(left, never)
		require.ErrorIs(t, late, pgwake.ErrLockLost)
		require.Empty(t, f.acked)
	})
}

// What a handler has begun on a goroutine of its own is waited for.
func TestAckBy_HandlerDoesNotWaitForIt_TheDispatcherDoes(t *testing.T) {
	acking(t, Config{}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		began := make(chan struct{})
		go AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
			close(began)
			time.Sleep(time.Second)
			return b.ack(ctx, token)
		})
		<-began
		return errors.New("no")
	}, func(t *testing.T, b *byItself) {
		b.enqueue("a")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, []Outcome{Done}, b.outcomes())
		require.Zero(t, b.calls["abandon"])
	})
}

func TestAckBy_Middleware_MayWrapTheContext_AndNotReplaceIt(t *testing.T) {
	type key struct{}
	for name, pass := range map[string]func(context.Context) context.Context{
		"wraps":    func(ctx context.Context) context.Context { return context.WithValue(ctx, key{}, 1) },
		"replaces": func(context.Context) context.Context { return context.Background() },
	} {
		t.Run(name, func(t *testing.T) {
			around := func(next Handler) Handler {
				return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) { return next(pass(ctx), item) }
			}
			acking(t, Config{Middleware: []Middleware{around}}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
				return AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
					require.Equal(t, 1, own.Value(key{}))
					return b.ack(own, token)
				})
			}, func(t *testing.T, b *byItself) {
				b.enqueue("a")
				synctest.Wait()
				require.Equal(t, map[string][]Outcome{"wraps": {Done}, "replaces": {DeadLettered}}[name], b.outcomes())
			})
		})
	}
}

func TestAckBy_HandlersTimeIsUpMeanwhile_ItGoesOn(t *testing.T) {
	acking(t, Config{Timeout: time.Second}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		return AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			return b.ack(own, token)
		})
	}, func(t *testing.T, b *byItself) {
		b.enqueue("a")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, []Outcome{Done}, b.outcomes())
		require.Empty(t, b.log.String())
	})
}

// A handler that heeds the end may still say what has become of its item.
func TestAckBy_AfterTheHandlersContextHasEnded_IsMade(t *testing.T) {
	acking(t, Config{StopTimeout: time.Second}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		<-ctx.Done()
		return AckBy(ctx, b.ack)
	}, func(t *testing.T, b *byItself) {
		b.enqueue("a")
		synctest.Wait()
		require.NoError(t, b.stop())
		require.Equal(t, []Outcome{Done}, b.outcomes())
		require.Equal(t, []string{"a"}, b.acked)
	})
}

func TestAckBy_Hangs_EndsInTime(t *testing.T) {
	acking(t, Config{}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		return AckBy(ctx, func(own context.Context, _ pgwake.LockToken) error { <-own.Done(); return own.Err() })
	}, func(t *testing.T, b *byItself) {
		b.enqueue("a")
		time.Sleep(verbTimeout + time.Second)
		synctest.Wait()
		require.Equal(t, []Outcome{Retried}, b.outcomes())
	})
}

// The Dispatcher ends while the handler acknowledges: that is waited for, for as long as for what else settles items.
func TestStop_HandlerAcknowledgesByItself_ItsItemIsNotGivenBack(t *testing.T) {
	for took, want := range map[time.Duration]Outcome{
		4 * time.Second: Done,      // longer than the handler has
		time.Hour:       GivenBack, // for ever
	} {
		t.Run(fmt.Sprint(took), func(t *testing.T) {
			acking(t, Config{StopTimeout: time.Second, CancelTimeout: time.Second}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
				defer time.Sleep(time.Second / 2) // it has a little more to do
				return AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
					if nap(own, took); own.Err() != nil {
						return own.Err()
					}
					return b.ack(own, token)
				})
			}, func(t *testing.T, b *byItself) {
				b.enqueue("a")
				synctest.Wait()
				began := time.Now()
				require.NoError(t, b.stop())
				require.Less(t, time.Since(began), 9*time.Second)
				require.Len(t, b.ends, 1)
				require.Contains(t, []Outcome{want, Retried}, b.ends[0].Outcome)
				require.Equal(t, want == Done, b.ends[0].Outcome == Done)
				require.Equal(t, want == Done, len(b.acked) == 1)
				require.Zero(t, b.calls["abandon"], "there is no time left for it")
			})
		})
	}
}

func TestStop_HandlerStaysAfterItAcknowledged_ItsItemIsDone(t *testing.T) {
	var stay chan struct{}
	var err error
	acking(t, Config{StopTimeout: time.Second, CancelTimeout: time.Second}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		err = AckBy(ctx, b.ack)
		<-stay
		return err
	}, func(t *testing.T, b *byItself) {
		stay = make(chan struct{})
		b.enqueue("a")
		synctest.Wait()
		require.ErrorIs(t, b.stop(), ErrHandlersLeft)
		require.Equal(t, []Outcome{Done}, b.outcomes())
		close(stay)
		synctest.Wait()
		require.Equal(t, []Outcome{Done}, b.outcomes())
		require.NoError(t, err)
	})
}

func TestStop_HandlerWasLeftBehind_AcknowledgesNothing(t *testing.T) {
	var stay chan struct{}
	var err error
	acking(t, Config{StopTimeout: time.Second, CancelTimeout: time.Second}, func(b *byItself, ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		<-stay
		err = AckBy(ctx, b.ack)
		return err
	}, func(t *testing.T, b *byItself) {
		stay = make(chan struct{})
		b.enqueue("a")
		synctest.Wait()
		require.ErrorIs(t, b.stop(), ErrHandlersLeft)
		close(stay)
		synctest.Wait()
		require.ErrorIs(t, err, pgwake.ErrLockLost)
		require.Zero(t, b.called.Load())
		require.Equal(t, []Outcome{GivenBack}, b.outcomes())
	})
}

// One that has acknowledged its item and goes on still has its place.
func TestAckBy_HandlerGoesOn_TheDispatcherIsNotIdle(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := newFake()
		d := New(f, &Config{Logger: slog.New(slog.DiscardHandler)})
		var ended time.Time
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			err := AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
				return f.AckWorkItems(ctx, []pgwake.LockToken{token})
			})
			time.Sleep(time.Minute)
			ended = time.Now()
			return err
		}))
		f.enqueue("a")
		// The fake answers a fetch after 30 s, whatever that asks for.
		require.ErrorIs(t, d.run(t.Context(), claimed{}, time.Second), errIdle)
		require.False(t, ended.IsZero())
	})
}

func TestHandleTx_CommitHasNoAnswer_NobodyIsAlarmed(t *testing.T) {
	var log strings.Builder
	begin := func(context.Context) (pgx.Tx, error) { return unanswered{}, nil }
	dispatching(t, Config{Begin: begin, Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(d *Dispatcher) {
		HandleTx(d, "a", func(context.Context, pgx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil })
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("a")
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a"}, f.acked)
		require.NotContains(t, log.String(), "lease")
	})
}

// The function was not called: what passes costs no attempt.
func TestHandleTx_CannotBegin_IsTriedAgainAtNobodysExpense(t *testing.T) {
	silence := func(ctx context.Context) (pgx.Tx, error) { <-ctx.Done(); return nil, ctx.Err() }
	for name, first := range map[string]func(context.Context) (pgx.Tx, error){
		"refused":                       func(context.Context) (pgx.Tx, error) { return nil, &pgconn.PgError{Code: "53300"} },
		"no answer":                     silence,
		"no answer while there is time": silence,
		"an answer that is late": func(ctx context.Context) (pgx.Tx, error) {
			<-ctx.Done()
			return unanswered{}, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			tries := 0
			begin := func(ctx context.Context) (pgx.Tx, error) {
				if tries++; tries == 1 {
					return first(ctx)
				}
				return unanswered{}, nil
			}
			c := Config{Begin: begin, MaxAttempts: 1}
			if name == "no answer while there is time" {
				c.Timeout = time.Second
			}
			dispatching(t, c, func(d *Dispatcher) {
				HandleTx(d, "a", func(context.Context, pgx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil })
			}, func(t *testing.T, f *fake, _ func() error) {
				f.enqueue("a")
				time.Sleep(verbTimeout + 2*lastPause)
				synctest.Wait()
				require.Equal(t, []string{"a"}, f.acked)
				require.Equal(t, 2, tries)
			})
		})
	}
}

// unanswered is a transaction that commits, and the answer is lost.
type unanswered struct{ fakeTx }

func (unanswered) Commit(context.Context) error { return io.ErrUnexpectedEOF }

// Turns

func TestAckBy_OfADecider_TheOrchestratorAcknowledgesNothing(t *testing.T) {
	failure := errors.New("afterwards")
	for name, afterwards := range map[string]func(ctx context.Context) error{
		"nothing":        func(context.Context) error { return nil },
		"an error":       func(context.Context) error { return failure },
		"a panic":        func(context.Context) error { panic(failure) },
		"its goroutine":  func(context.Context) error { runtime.Goexit(); return nil },
		"its time is up": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			m := testmeter.New()
			var log strings.Builder
			var mine *turns
			deciding(t, OrchestratorConfig{MeterProvider: m, Logger: slog.New(slog.NewTextHandler(&log, nil)), Sticky: time.Minute, Owner: "me", MaxAttempts: 1,
				Timeout: time.Second}, func() Decider {
				log.Reset()
				return func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
					require.NoError(t, AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
						require.Equal(t, turn.LockToken, token)
						return mine.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{ExecutionID: 7})
					}))
					return pgwake.OrchestrationAck{ExecutionID: 8}, afterwards(ctx)
				}
			}, nil, func(t *testing.T, f *turns, stop func() error) {
				mine = f
				f.add("a")
				time.Sleep(2 * time.Second)
				synctest.Wait()
				require.NoError(t, stop())
				require.Equal(t, []pgwake.OrchestrationAck{{ExecutionID: 7}}, f.acks)
				require.Empty(t, f.given)
				require.Empty(t, f.buried)
				require.Equal(t, name != "nothing", strings.Contains(log.String(), "failed after it was acknowledged"), log.String())
				require.Len(t, m.Recorded(testmeter.Key(MetricTurn, AttrName.String("flow"), AttrOutcome.String(string(Done)))), 1)
			})
		})
	}
}

func TestAckBy_OfADecider_RenewalsComeRightAfterTheCommit_NothingIsLost(t *testing.T) {
	const length = time.Second
	for _, answers := range []time.Duration{0, 3 * length} { // how long the answer to the commit is on its way
		var log strings.Builder
		var ended []error
		var mine *turns
		deciding(t, OrchestratorConfig{LockTimeout: length, Logger: slog.New(slog.NewTextHandler(&log, nil))}, func() Decider {
			ended = nil
			return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
				err = AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
					err := mine.AckOrchestrationItem(own, token, pgwake.OrchestrationAck{})
					time.Sleep(answers) // until it is heard here
					ended = append(ended, own.Err(), ctx.Err())
					return err
				})
				time.Sleep(3 * length)
				ended = append(ended, err, ctx.Err())
				return ack, err
			}
		}, nil, func(t *testing.T, f *turns, _ func() error) {
			mine = f
			f.add("a")
			time.Sleep(7 * length)
			synctest.Wait()
			require.Equal(t, []error{nil, nil, nil, nil}, ended)
			require.Len(t, f.acks, 1)
			require.Empty(t, log.String())
		})
	}
}

func TestAckBy_OfADecider_Fails_TheTurnIsTakenAgainOrIsSomebodyElses(t *testing.T) {
	away := &pgwake.Error{Op: "evaluate", Err: context.DeadlineExceeded, Retryable: true}
	for name, c := range map[string]struct {
		ack      func(f *turns, ctx context.Context, token pgwake.LockToken) error
		forgets  bool
		attempts int // that count, of those that were given back
		acks     int
		given    int
		logs     string
	}{
		"the database is away": {ack: func(*turns, context.Context, pgwake.LockToken) error { return away }, given: 1, logs: "cannot acknowledge"},
		"the database is away, and it forgets that": {ack: func(*turns, context.Context, pgwake.LockToken) error { return away }, forgets: true, given: 1,
			logs: "cannot acknowledge"},
		"the server says so by itself": {ack: func(*turns, context.Context, pgwake.LockToken) error {
			return &pgconn.PgError{Code: "57P01", Severity: "FATAL"}
		}, given: 1,
			logs: "cannot acknowledge"},
		"it is refused": {ack: func(*turns, context.Context, pgwake.LockToken) error { return pgwake.ErrInvalid }, given: 1, attempts: 1, logs: "dispatch: failed"},
		"the lease is lost": {ack: func(f *turns, ctx context.Context, token pgwake.LockToken) error {
			require.NoError(t, f.AbandonOrchestrationItem(ctx, token, &pgwake.AbandonOptions{Delay: time.Hour}))
			return &pgconn.PgError{Code: "PW001", Severity: "ERROR"}
		}, given: 1, attempts: 1, logs: "the lease was lost"},
		"it happened, and no answer came": {ack: func(f *turns, ctx context.Context, token pgwake.LockToken) error {
			require.NoError(t, f.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{}))
			return &pgwake.Error{Op: "evaluate", Err: context.DeadlineExceeded, Retryable: true, Unknown: true}
		}, acks: 1, logs: "cannot acknowledge"},
		"it panicked after it happened": {ack: func(f *turns, ctx context.Context, token pgwake.LockToken) error {
			require.NoError(t, f.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{}))
			panic("in the middle")
		}, acks: 1, logs: "dispatch: failed"},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			var mine *turns
			deciding(t, OrchestratorConfig{Logger: slog.New(slog.NewTextHandler(&log, nil)), Retry: func(int, error) time.Duration { return time.Hour }}, func() Decider {
				log.Reset()
				return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
					err = AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error { return c.ack(mine, ctx, token) })
					if c.forgets {
						return ack, nil
					}
					return ack, fmt.Errorf("evaluate: %w", err)
				}
			}, nil, func(t *testing.T, f *turns, _ func() error) {
				mine = f
				f.add("a")
				time.Sleep(time.Second)
				synctest.Wait()
				require.Len(t, f.acks, c.acks)
				require.Len(t, f.given, c.given)
				if c.given > 0 {
					require.Equal(t, c.attempts, f.items["a"].Attempt)
				}
				require.Equal(t, 1, strings.Count(log.String(), "level="), log.String())
				require.Contains(t, log.String(), c.logs)
			})
		})
	}
}

func TestOrchestrator_StopsWhileADeciderAcknowledgesByItself_ItsTurnIsNotGivenBack(t *testing.T) {
	for took, done := range map[time.Duration]bool{4 * time.Second: true, time.Hour: false} {
		t.Run(fmt.Sprint(took), func(t *testing.T) {
			var mine *turns
			deciding(t, OrchestratorConfig{StopTimeout: time.Second, CancelTimeout: time.Second}, func() Decider {
				return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
					defer time.Sleep(time.Second / 2) // it has a little more to do
					return ack, AckBy(ctx, func(own context.Context, token pgwake.LockToken) error {
						if nap(own, took); own.Err() != nil {
							return own.Err()
						}
						return mine.AckOrchestrationItem(own, token, ack)
					})
				}
			}, nil, func(t *testing.T, f *turns, stop func() error) {
				mine = f
				f.add("a")
				synctest.Wait()
				require.NoError(t, stop())
				synctest.Wait()
				require.Equal(t, done, len(f.acks) == 1)
				require.Empty(t, f.given)
			})
		})
	}
}

func TestOrchestrator_DeciderWasLeftBehind_AcknowledgesNothing(t *testing.T) {
	for _, before := range []bool{false, true} {
		var stay chan struct{}
		var mine *turns
		var errs []error
		deciding(t, OrchestratorConfig{StopTimeout: time.Second, CancelTimeout: time.Second}, func() Decider {
			stay, errs = make(chan struct{}), nil
			return func(ctx context.Context, _ *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
				acks := func(ctx context.Context, token pgwake.LockToken) error {
					return mine.AckOrchestrationItem(ctx, token, ack)
				}
				if before {
					errs = append(errs, AckBy(ctx, acks))
				}
				<-stay
				errs = append(errs, AckBy(ctx, acks))
				return ack, nil
			}
		}, nil, func(t *testing.T, f *turns, stop func() error) {
			mine = f
			f.add("a")
			synctest.Wait()
			require.ErrorIs(t, stop(), ErrHandlersLeft)
			close(stay)
			synctest.Wait()
			if before {
				require.NoError(t, errs[0])
				require.Len(t, f.acks, 1)
				require.Empty(t, f.given)
				return
			}
			require.ErrorIs(t, errs[0], pgwake.ErrLockLost)
			require.Empty(t, f.acks)
			require.Len(t, f.given, 1)
		})
	}
}
