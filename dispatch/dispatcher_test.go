package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// dispatching runs a Dispatcher in a bubble until test returns, and then ends it.
func dispatching(t *testing.T, c Config, register func(*Dispatcher), test func(t *testing.T, f *fake, stop func() error)) {
	t.Helper()
	virtualtime.Test(t, func(t *testing.T) {
		f := newFake()
		if c.Logger == nil {
			c.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
		}
		d := New(f, &c)
		register(d)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
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

func does(fn func(ctx context.Context, item *pgwake.ClaimedWorkItem) error) Handler {
	return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) { return nil, fn(ctx, item) }
}

// raise has most be n at the least.
func raise(most *atomic.Int64, n int64) {
	for before := most.Load(); before < n && !most.CompareAndSwap(before, n); before = most.Load() {
	}
}

func TestRun_HandlerReturns_ItemIsAcknowledged(t *testing.T) {
	var handled atomic.Int64
	dispatching(t, Config{}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { handled.Add(1); return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("a", "a", "a")
		synctest.Wait()
		require.Equal(t, []string{"a", "a", "a"}, f.acked)
		require.EqualValues(t, 3, handled.Load())
	})
}

func TestRun_SlowHandler_ItsLeaseIsRenewed(t *testing.T) {
	var attempts atomic.Int64
	dispatching(t, Config{LockTimeout: time.Second}, func(d *Dispatcher) {
		d.Handle("slow", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			attempts.Add(1)
			time.Sleep(10 * time.Second)
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("slow")
		time.Sleep(11 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"slow"}, f.acked)
		require.EqualValues(t, 1, attempts.Load())
	})
}

func TestRun_RenewalsFail_ContextEndsWithTheLease(t *testing.T) {
	var cause chan error
	dispatching(t, Config{LockTimeout: time.Second}, func(d *Dispatcher) {
		cause = make(chan error, 1)
		d.Handle("slow", does(func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			if item.Attempt == 1 {
				<-ctx.Done()
				cause <- context.Cause(ctx)
			}
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "renew" {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		began := time.Now()
		f.enqueue("slow")
		require.ErrorIs(t, <-cause, pgwake.ErrLockLost)
		require.GreaterOrEqual(t, time.Since(began), time.Second)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"slow"}, f.acked, "somebody else's second attempt")
	})
}

func TestRun_HandlerFails_IsRetriedWithGrowingDelays_ThenBuried(t *testing.T) {
	var at []time.Duration
	began := time.Time{}
	dispatching(t, Config{MaxAttempts: 4, Retry: func(n int, _ error) time.Duration { return time.Duration(n) * time.Second }}, func(d *Dispatcher) {
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error {
			at = append(at, time.Since(began))
			return errors.New("no")
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		began = time.Now()
		f.enqueue("bad")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second}, at)
		require.Equal(t, map[string]string{"bad": "max attempts: no"}, f.buried)
	})
}

func TestRun_WhatErrorsAskFor_IsDone(t *testing.T) {
	var mu sync.Mutex
	seen := map[string][]int{}
	dispatching(t, Config{Concurrency: 1}, func(d *Dispatcher) {
		for name, fn := range map[string]func(n int) error{
			"permanent": func(int) error { return fmt.Errorf("it %w", Permanent(errors.New("never works"))) },
			"after": func(n int) error {
				if n == 1 {
					return RetryAfter(errors.New("later"), 5*time.Minute)
				}
				return nil
			},
			"snooze": func(n int) error {
				if len(seen["snooze"]) < 3 {
					return Snooze(time.Minute)
				}
				return nil
			},
			"panic": func(n int) error {
				if n == 1 {
					panic("oh")
				}
				return nil
			},
		} {
			d.Handle(name, does(func(_ context.Context, item *pgwake.ClaimedWorkItem) error {
				mu.Lock()
				defer mu.Unlock()
				seen[name] = append(seen[name], item.Attempt)
				return fn(item.Attempt)
			}))
		}
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("permanent", "after", "snooze", "panic", "unknown")
		time.Sleep(4 * time.Minute)
		synctest.Wait()
		require.Equal(t, map[string]string{"permanent": "permanent error: it never works"}, f.buried)
		mu.Lock()
		require.Equal(t, map[string][]int{"permanent": {1}, "after": {1}, "snooze": {1, 1, 1}, "panic": {1, 2}}, seen)
		mu.Unlock()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		require.ElementsMatch(t, []string{"after", "snooze", "panic"}, f.acked)
		require.Len(t, f.items, 1, "that nobody knows")
		require.Equal(t, ErrNoHandler.Error(), f.items[0].LastError)
	})
}

func TestRun_HandlerTakesTooLong_TimesOut(t *testing.T) {
	dispatching(t, Config{Timeout: time.Second, MaxAttempts: 1}, func(d *Dispatcher) {
		d.Handle("slow", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("slow")
		time.Sleep(time.Second + time.Millisecond)
		synctest.Wait()
		require.Contains(t, f.buried["slow"], ErrTimeout.Error())
	})
}

func TestRun_Concurrency_IsNeverExceeded(t *testing.T) {
	var now, most atomic.Int64
	dispatching(t, Config{Concurrency: 3}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error {
			raise(&most, now.Add(1))
			time.Sleep(time.Second)
			now.Add(-1)
			return nil
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		for range 30 {
			f.enqueue("a")
		}
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		require.Len(t, f.acked, 30, "and is used")
		require.EqualValues(t, 3, most.Load())
		require.Len(t, f.items, 0)
		for _, n := range f.fetched {
			require.LessOrEqual(t, n, 3, "nothing is claimed that cannot be begun")
		}
	})
}

func TestStop_HandlersEnd_BeforeRunDoes(t *testing.T) {
	dispatching(t, Config{StopTimeout: time.Minute}, func(d *Dispatcher) {
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			time.Sleep(10 * time.Second)
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.enqueue("a")
		synctest.Wait()
		began := time.Now()
		require.NoError(t, stop())
		require.Equal(t, 10*time.Second, time.Since(began))
		require.Equal(t, []string{"a"}, f.acked)
	})
}

func TestStop_HandlersTakeTooLong_AreCancelledAndTheirItemsGivenBack(t *testing.T) {
	for name, heeds := range map[string]bool{"that heed": true, "that do not": false} {
		t.Run(name, func(t *testing.T) {
			var release chan struct{}
			dispatching(t, Config{StopTimeout: 5 * time.Second, CancelTimeout: time.Second}, func(d *Dispatcher) {
				release = make(chan struct{})
				d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
					<-ctx.Done()
					if !heeds {
						<-release
					}
					return ctx.Err()
				}))
			}, func(t *testing.T, f *fake, stop func() error) {
				f.enqueue("a")
				synctest.Wait()
				began := time.Now()
				err := stop()
				if heeds {
					require.NoError(t, err)
					require.Equal(t, 5*time.Second, time.Since(began))
				} else {
					require.ErrorIs(t, err, ErrHandlersLeft)
					require.Equal(t, 6*time.Second, time.Since(began))
				}
				synctest.Wait()
				require.False(t, f.items[0].visible.After(time.Now()), "others may have it at once")
				require.Zero(t, f.items[0].Attempt, "the attempt does not count")
				close(release)
				synctest.Wait()
				require.Empty(t, f.acked)
			})
		})
	}
}

func TestRun_ItemOfAnOrchestration_ResultOrFailureIsSent(t *testing.T) {
	type in struct{ A int }
	type out struct{ B int }
	dispatching(t, Config{MaxAttempts: 1}, func(d *Dispatcher) {
		Handle(d, "double", func(_ context.Context, i in) (out, error) { return out{2 * i.A}, nil })
		Handle(d, "fail", func(context.Context, in) (out, error) { return out{}, errors.New("no") })
	}, func(t *testing.T, f *fake, _ func() error) {
		f.add(pgwake.WorkItem{Name: "double", Input: json.RawMessage(`{"A":2}`), Instance: "i", ExecutionID: 3, ActivityID: 4})
		synctest.Wait()
		f.add(pgwake.WorkItem{Name: "fail", Instance: "i", ExecutionID: 3, ActivityID: 5})
		synctest.Wait()
		require.Equal(t, []pgwake.Message{
			{Instance: "i", Kind: KindCompleted, Data: json.RawMessage(`{"execution_id":3,"activity_id":4,"name":"double","result":{"B":4}}`)},
			{Instance: "i", Kind: KindFailed, Data: json.RawMessage(`{"execution_id":3,"activity_id":5,"name":"fail","error":"no"}`)},
		}, f.sent)
		require.Empty(t, f.buried)
	})
}

func TestRun_ItemOfASessionInHand_ItsSessionIsRenewed(t *testing.T) {
	session := &pgwake.SessionOptions{Owner: "me", LockTimeout: 3 * time.Second}
	dispatching(t, Config{Session: session}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(10 * time.Second); return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, f.sessions, "nothing is in hand")
		f.add(pgwake.WorkItem{Name: "a", Session: "s"})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.InDelta(t, 10, len(f.sessions), 1, "one a second")
		require.Equal(t, "me", f.sessions[0])
	})
}

func TestStop_WithSessions_TheyAreReleasedOnceTheirItemsAreGivenBack(t *testing.T) {
	session := &pgwake.SessionOptions{Owner: "me", LockTimeout: 3 * time.Second}
	for _, refused := range []bool{false, true} {
		dispatching(t, Config{Session: session, StopTimeout: time.Second}, func(d *Dispatcher) {
			d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }))
		}, func(t *testing.T, f *fake, stop func() error) {
			f.mu.Lock()
			f.fail = func(verb string) error {
				if verb == "release" && refused {
					return retryable(verb)
				}
				return nil
			}
			f.mu.Unlock()
			f.add(pgwake.WorkItem{Name: "a", Session: "s"})
			synctest.Wait()
			require.Empty(t, f.released)
			require.NoError(t, stop(), "whatever becomes of the sessions")
			require.Equal(t, []string{"me"}, f.released)
			require.Zero(t, f.leasedAtRelease)
		})
	}
}

func TestStop_WithoutSessions_NothingIsReleased(t *testing.T) {
	dispatching(t, Config{}, func(*Dispatcher) {}, func(t *testing.T, f *fake, stop func() error) {
		require.NoError(t, stop())
		require.Empty(t, f.released)
	})
}

// The lease begins with the claim, not with the fetch.
func TestRun_ItemComesAfterALongWait_ItsLeaseIsWhole(t *testing.T) {
	dispatching(t, Config{LockTimeout: 20 * time.Second}, func(d *Dispatcher) {
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
			time.Sleep(5 * time.Second)
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		time.Sleep(25 * time.Second)
		f.enqueue("a")
		time.Sleep(6 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a"}, f.acked)
	})
}

func TestStop_WhatBecameOfItems_IsInTheDatabaseWhenRunReturns(t *testing.T) {
	dispatching(t, Config{Concurrency: 2}, func(d *Dispatcher) {
		d.Handle("good", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.slow = time.Second
		f.enqueue("good", "bad")
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"good"}, f.acked)
		require.Len(t, f.items, 1)
		require.Equal(t, "no", f.items[0].LastError)
	})
}

func TestStop_DatabaseIsAway_RunReturnsAllTheSame(t *testing.T) {
	dispatching(t, Config{CancelTimeout: 3 * time.Second}, func(d *Dispatcher) {
		d.Handle("good", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "ack" {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		f.enqueue("good")
		synctest.Wait()
		began := time.Now()
		require.NoError(t, stop())
		require.Equal(t, settlePatience, time.Since(began))
		require.Empty(t, f.acked)
	})
}

// Nothing will come of what is left to settle: Run does not wait for the end of the leases, nor try all the time.
func TestStop_ProviderIsClosed_RunReturnsAtOnce(t *testing.T) {
	dispatching(t, Config{Concurrency: 40}, func(d *Dispatcher) {
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Second); return errors.New("no") }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.enqueue(slices.Repeat([]string{"bad"}, 40)...)
		synctest.Wait()
		f.mu.Lock()
		f.fail = func(verb string) error { return &pgwake.Error{Op: verb, Err: pgwake.ErrClosed} }
		f.mu.Unlock()
		began := time.Now()
		require.NoError(t, stop())
		require.Equal(t, time.Second, time.Since(began))
		require.Equal(t, 40, f.calls["abandon"])
	})
}

// More are to be given back than at one time, and the database never answers: none of that outlives Run (goleak).
func TestStop_DatabaseHangs_NothingIsLeftBehind(t *testing.T) {
	dispatching(t, Config{Concurrency: 40, StopTimeout: 1}, func(d *Dispatcher) {
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.enqueue(slices.Repeat([]string{"a"}, 40)...)
		synctest.Wait()
		f.stuck = true
		require.NoError(t, stop())
		require.Len(t, f.items, 40)
	})
}

// However little time handlers have to notice, what they have done is acknowledged.
func TestStop_HandlersHaveNoTime_WhatTheyDidIsAcknowledged(t *testing.T) {
	dispatching(t, Config{Concurrency: 20, CancelTimeout: 1}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Second); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.enqueue(slices.Repeat([]string{"a"}, 20)...)
		synctest.Wait()
		f.slow = 100 * time.Millisecond
		require.NoError(t, stop())
		require.Len(t, f.acked, 20)
	})
}

// A transaction has locked more items than are given back at one time.
func TestStop_ItemsAreLocked_OthersAreGivenBack(t *testing.T) {
	dispatching(t, Config{Concurrency: 40, StopTimeout: 1}, func(d *Dispatcher) {
		until := func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }
		d.Handle("locked", does(until))
		d.Handle("free", does(until))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.locked["locked"] = true
		f.enqueue(slices.Repeat([]string{"locked", "free"}, 20)...)
		synctest.Wait()
		require.NoError(t, stop())
		leased := map[string]int{}
		for _, i := range f.items {
			if i.LockToken != "" {
				leased[i.Name]++
			}
		}
		require.Equal(t, map[string]int{"locked": 20}, leased)
	})
}

// Ten long items take all places after quick ones, with many more waiting: those stay with others.
func TestRun_AllPlacesHangAfterQuickItems_NothingIsClaimedOverAndOver(t *testing.T) {
	dispatching(t, Config{}, func(d *Dispatcher) {
		d.Handle("quick", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Millisecond); return nil }))
		d.Handle("long", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }))
	}, func(t *testing.T, f *fake, stop func() error) {
		enqueueMany(f, "quick", 500)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Len(t, f.acked, 500)
		enqueueMany(f, "long", 10)
		enqueueMany(f, "quick", 500)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Less(t, f.calls["abandon"], 1000)
	})
}

func enqueueMany(f *fake, name string, n int) {
	for range n {
		f.enqueue(name)
	}
}

// nilError panics when it is asked what it says.
type nilError struct{ said string }

func (e *nilError) Error() string { return e.said }
func (e *nilError) Unwrap() error { return errors.New(e.said) }

func TestRun_WhatTheProviderWouldRefuse_IsMadeFit(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		after time.Duration
	}{
		"an error without a text":   {(*nilError)(nil), time.Second},
		"a text that is too long":   {errors.New(strings.Repeat("x", 2<<20)), time.Second},
		"a text that is no text":    {errors.New("a\x00b\xff"), time.Second},
		"a delay below 0":           {RetryAfter(errors.New("no"), -time.Hour), 0},
		"a snooze below 0":          {Snooze(-time.Hour), 0},
		"a panic with such a value": {nil, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			attempts := 0
			dispatching(t, Config{Retry: func(int, error) time.Duration { return time.Second }}, func(d *Dispatcher) {
				d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error {
					if attempts++; attempts > 1 {
						return nil
					}
					if c.err == nil {
						panic((*nilError)(nil))
					}
					return c.err
				}))
			}, func(t *testing.T, f *fake, _ func() error) {
				f.enqueue("a")
				time.Sleep(c.after)
				synctest.Wait()
				require.Equal(t, []string{"a"}, f.acked, "long before its lease ends")
			})
		})
	}
}

func TestRun_HooksDoNotReturn_ItemHasItsFate(t *testing.T) {
	for name, ends := range map[string]func(){"panic": func() { panic("oh") }, "end of the goroutine": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			dispatching(t, Config{
				MaxAttempts: 2, Retry: func(int, error) time.Duration { ends(); return 0 }, OnEnd: func(Ended) { ends() },
			}, func(d *Dispatcher) {
				d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
				d.Handle("good", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
				d.HandleBatch("batch", 3, func(context.Context, []*pgwake.ClaimedWorkItem) error { return nil })
			}, func(t *testing.T, f *fake, _ func() error) {
				f.enqueue("bad", "good", "batch", "batch", "batch")
				time.Sleep(5 * time.Second)
				synctest.Wait()
				require.ElementsMatch(t, []string{"good", "batch", "batch", "batch"}, f.acked)
				require.Equal(t, map[string]string{"bad": "max attempts: no"}, f.buried)
			})
		})
	}
}

func TestRun_CompletionCannotBeMadeOrIsRefused_TheOrchestrationIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		result     Result
		completion func(*pgwake.ClaimedWorkItem, Result, error) (*pgwake.Message, error)
	}{
		"no JSON":  {Result("oops"), nil},
		"too long": {Result(`"` + strings.Repeat("x", 2<<20) + `"`), nil},
		"NUL":      {Result(`"\u0000"`), nil},
		"an end of the goroutine": {nil, func(i *pgwake.ClaimedWorkItem, r Result, err error) (*pgwake.Message, error) {
			if err == nil {
				runtime.Goexit()
			}
			return CompletionMessage(i, r, err)
		}},
		"a panic": {nil, func(i *pgwake.ClaimedWorkItem, r Result, err error) (*pgwake.Message, error) {
			if err == nil {
				panic("oh")
			}
			return CompletionMessage(i, r, err)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			begin := func(context.Context) (pgx.Tx, error) { return fakeTx{}, nil }
			dispatching(t, Config{Completion: c.completion, Begin: begin}, func(d *Dispatcher) {
				d.Handle("a", func(context.Context, *pgwake.ClaimedWorkItem) (Result, error) { calls++; return c.result, nil })
				HandleTx(d, "tx", func(context.Context, pgx.Tx, struct{}) (Result, error) { calls++; return c.result, nil })
			}, func(t *testing.T, f *fake, _ func() error) {
				for i, name := range []string{"a", "tx"} {
					f.add(pgwake.WorkItem{Name: name, Instance: "i"})
					time.Sleep(time.Second)
					synctest.Wait()
					require.Len(t, f.sent, i+1)
					require.Equal(t, KindFailed, f.sent[i].Kind)
					require.Equal(t, i+1, calls)
				}
			})
		})
	}
}

// Nothing can be sent, so the item is kept for people: it does not come again for ever.
func TestRun_CompletionAndFailureAreRefused_ItemIsBuried(t *testing.T) {
	calls := 0
	long := Result(`"` + strings.Repeat("x", 2<<20) + `"`)
	dispatching(t, Config{Completion: func(i *pgwake.ClaimedWorkItem, _ Result, err error) (*pgwake.Message, error) {
		return &pgwake.Message{Instance: i.Instance, Kind: KindCompleted, Data: long}, nil
	}}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { calls++; return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.add(pgwake.WorkItem{Name: "a", Instance: "i"})
		time.Sleep(time.Second)
		synctest.Wait()
		require.Empty(t, f.sent)
		require.Contains(t, f.buried["a"], ReasonPermanent)
		require.Equal(t, 1, calls)
	})
}

// A batch is done, and then its transaction fails: that is an error of all of them.
func TestRun_BatchErrorsJoinedWithAnother_AreThatOfAll(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		acked int
	}{
		"alone":   {BatchErrors{nil, errors.New("no")}, 1},
		"wrapped": {fmt.Errorf("the batch: %w", BatchErrors{nil, errors.New("no")}), 1},
		"joined":  {errors.Join(BatchErrors{nil, nil}, errors.New("commit")), 0},
	} {
		t.Run(name, func(t *testing.T) {
			dispatching(t, Config{}, func(d *Dispatcher) {
				d.HandleBatch("a", 2, func(_ context.Context, items []*pgwake.ClaimedWorkItem) error {
					if len(items) < 2 {
						return errors.New("no")
					}
					return c.err
				}, WithMaxAttempts(1))
			}, func(t *testing.T, f *fake, _ func() error) {
				f.addAll(pgwake.WorkItem{Name: "a"}, pgwake.WorkItem{Name: "a"})
				synctest.Wait()
				require.Len(t, f.acked, c.acked)
				require.NotEmpty(t, f.buried)
			})
		})
	}
}

// What went wrong before is what people look for.
func TestRun_LastAttemptEndedItsProcess_DeadLetterTellsOfTheOneBefore(t *testing.T) {
	dispatching(t, Config{MaxAttempts: 2}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.next++
		f.items = append(f.items, &fakeItem{ClaimedWorkItem: pgwake.ClaimedWorkItem{
			WorkItem: pgwake.WorkItem{Name: "a"}, ID: f.next, Attempt: 2, LastError: "smtp: 550"}, visible: time.Now()})
		f.changed()
		f.mu.Unlock()
		synctest.Wait()
		require.Contains(t, f.buried["a"], errNoAttemptEnded.Error())
		require.Contains(t, f.buried["a"], "smtp: 550")
	})
}

func TestRun_HandlerEndsItsGoroutine_PlaceAndItemRemain(t *testing.T) {
	dispatching(t, Config{Concurrency: 1, MaxAttempts: 1}, func(d *Dispatcher) {
		d.Handle("exit", does(func(context.Context, *pgwake.ClaimedWorkItem) error { runtime.Goexit(); return nil }))
		d.Handle("good", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("exit", "good", "exit", "good")
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"good", "good"}, f.acked)
		require.Contains(t, f.buried["exit"], errGoexit.Error())
	})
}

func TestHandle_OptionsThatMakeNoSense_AreErrorsOfRun(t *testing.T) {
	h := does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil })
	batch := func(context.Context, []*pgwake.ClaimedWorkItem) error { return nil }
	for name, register := range map[string]func(*Dispatcher){
		"attempts":   func(d *Dispatcher) { d.Handle("a", h, WithMaxAttempts(-2)) },
		"in a batch": func(d *Dispatcher) { d.HandleBatch("a", 2, batch, WithMaxAttempts(-2)) },
		"timeout":    func(d *Dispatcher) { d.Handle("a", h, WithTimeout(-time.Second)) },
		"twice":      func(d *Dispatcher) { d.Handle("a", h); d.Handle("a", h) },
		"no name":    func(d *Dispatcher) { d.Handle("", h) },
		"no handler": func(d *Dispatcher) { d.Handle("a", nil) },
		"batch of none": func(d *Dispatcher) {
			d.HandleBatch("a", 0, batch)
		},
		"no transactions": func(d *Dispatcher) {
			HandleTx(d, "a", func(context.Context, pgx.Tx, int) (int, error) { return 0, nil })
		},
		"no function":                  func(d *Dispatcher) { Handle[int, int](d, "a", nil) },
		"no function in a transaction": func(d *Dispatcher) { HandleTx[int, int](d, "a", nil) },
		"no option":                    func(d *Dispatcher) { d.Handle("a", h, nil) },
		"none of a middleware": func(d *Dispatcher) {
			d.cfg.Middleware = []Middleware{func(Handler) Handler { return nil }}
			d.Handle("a", h)
		},
	} {
		d := New(newFake(), nil)
		register(d)
		err := d.Run(t.Context())
		require.ErrorIs(t, err, pgwake.ErrConfig, name)
		if name != "no name" {
			require.ErrorContains(t, err, `"a"`, "which handler it is about")
		}
	}
	d := New(newFake(), &Config{MaxAttempts: 3})
	d.Handle("a", h, WithMaxAttempts(0), WithRetry(nil))
	require.NoError(t, d.err)
	require.Equal(t, 3, d.handlers["a"].maxAttempts)
	require.NotNil(t, d.handlers["a"].retry)
	for _, c := range []Config{{Concurrency: -1}, {MinConcurrency: 20}, {LockTimeout: time.Millisecond}, {LockTimeout: 25 * time.Hour}, {Ahead: -2}, {Middleware: []Middleware{nil}}} {
		require.ErrorIs(t, New(newFake(), &c).Run(t.Context()), pgwake.ErrConfig)
	}
}

func TestRun_WithoutAProvider_IsAnError(t *testing.T) {
	require.ErrorIs(t, New(nil, nil).Run(t.Context()), pgwake.ErrConfig)
	require.ErrorIs(t, NewOrchestrator(nil, nil, nil).Run(t.Context()), pgwake.ErrConfig)
}

func TestRun_CalledTwice_IsAnError(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		d := New(newFake(), nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, d.Run(ctx))
		require.ErrorIs(t, d.Run(ctx), pgwake.ErrConfig)
	})
}

// Renewals that hang do not make anybody believe that the lease holds.
func TestRun_RenewalsHang_ContextEndsWithTheLease(t *testing.T) {
	const length = 30 * time.Second
	var ended chan time.Duration
	dispatching(t, Config{Concurrency: 3000, LockTimeout: length}, func(d *Dispatcher) {
		ended = make(chan time.Duration, 3000)
		d.Handle("a", does(func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			began := time.Now()
			<-ctx.Done()
			ended <- time.Since(began)
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.hang = true
		f.mu.Unlock()
		time.Sleep(time.Second) // or the lease would end when the leases are looked at
		enqueueMany(f, "a", 3000)
		for range 3000 {
			require.Equal(t, length, <-ended)
		}
	})
}

// The database is away for most of a lease.
func TestRun_RenewalsFailForMostOfALease_ItIsKept(t *testing.T) {
	dispatching(t, Config{LockTimeout: 30 * time.Second}, func(d *Dispatcher) {
		d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { time.Sleep(time.Minute); return ctx.Err() }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.hang = true
		f.mu.Unlock()
		f.enqueue("a")
		time.Sleep(25 * time.Second)
		f.mu.Lock()
		f.hang = false
		f.mu.Unlock()
		time.Sleep(40 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a"}, f.acked)
	})
}

// The last of the renewals took effect a moment before the lease ended here: the server's would go on for an hour.
func TestRun_RenewalsHaveNoAnswer_ItemIsGivenBackOnceThereIsOne(t *testing.T) {
	var began []time.Time
	var over time.Time
	dispatching(t, Config{LockTimeout: time.Hour}, func(d *Dispatcher) {
		began = nil
		d.Handle("a", does(func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			if began = append(began, time.Now()); item.Attempt > 1 {
				return nil
			}
			<-ctx.Done()
			over = time.Now()
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.unanswered = map[string]int{"renew": math.MaxInt}
		f.mu.Unlock()
		f.enqueue("a")
		time.Sleep(time.Hour + time.Minute)
		f.mu.Lock()
		f.unanswered = nil
		f.mu.Unlock()
		time.Sleep(2 * lastPause)
		synctest.Wait()
		require.Equal(t, began[0].Add(time.Hour), over)
		require.Len(t, began, 2)
		require.Equal(t, []string{"a"}, f.acked)
		require.Equal(t, 1, f.calls["abandon"])
	})
}

// The database is back a moment before the lease ends, and the answer to the renewal comes a moment after.
func TestRun_RenewalIsUnderWayWhenTheLeaseEnds_ItemIsGivenBack(t *testing.T) {
	var began []time.Duration
	start := time.Time{}
	dispatching(t, Config{LockTimeout: time.Minute}, func(d *Dispatcher) {
		began, start = nil, time.Now()
		d.Handle("a", does(func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			if began = append(began, time.Since(start)); item.Attempt == 1 {
				<-ctx.Done()
			}
			return ctx.Err()
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.late = 6500 * time.Millisecond
		f.fail = func(verb string) error {
			if verb == "renew" && time.Since(start) < 54*time.Second {
				return &pgwake.Error{Op: verb, Err: errors.New("away"), Retryable: true}
			}
			return nil
		}
		f.mu.Unlock()
		f.enqueue("a")
		time.Sleep(70 * time.Second)
		synctest.Wait()
		require.Len(t, began, 2)
		require.InDelta(t, time.Minute, began[1], float64(2*time.Second))
		require.Equal(t, []string{"a"}, f.acked)
	})
}

// One of a batch is given up, and somebody takes it before that is stored. The other is at work.
func TestRun_BatchWithAnItemThatWasTriedTooOften_ItIsLost_TheOtherGoesOn(t *testing.T) {
	var handled []error
	dispatching(t, Config{Concurrency: 1, MaxAttempts: 1, LockTimeout: time.Second}, func(d *Dispatcher) {
		d.HandleBatch("a", 2, func(ctx context.Context, items []*pgwake.ClaimedWorkItem) error {
			time.Sleep(3 * time.Second)
			handled = append(handled, context.Cause(ctx))
			return nil
		})
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "dead letter" {
				f.items[0].LockToken, f.items[0].visible = "somebody else's", time.Now().Add(time.Hour)
				return retryable(verb)
			}
			return nil
		}
		for range 2 {
			f.items = append(f.items, &fakeItem{ClaimedWorkItem: pgwake.ClaimedWorkItem{WorkItem: pgwake.WorkItem{Name: "a"}, ID: int64(len(f.items))}})
		}
		f.items[0].Attempt = 1
		f.changed()
		f.mu.Unlock()
		time.Sleep(4 * time.Second)
		synctest.Wait()
		require.Equal(t, []error{nil}, handled)
	})
}

// Items trickle in behind a handler that hangs. What came first is not kept for longer because of what comes after it.
func TestRun_ItemsComeOneByOneBehindALongOne_NoneIsKeptFromOthersForLong(t *testing.T) {
	dispatching(t, Config{Concurrency: 1, CancelTimeout: time.Second, StopTimeout: time.Second}, func(d *Dispatcher) {
		d.Handle("quick", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Millisecond); return nil }))
		d.Handle("long", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return ctx.Err() }))
	}, func(t *testing.T, f *fake, _ func() error) {
		enqueueMany(f, "quick", 100)
		time.Sleep(time.Second)
		f.enqueue("long")
		synctest.Wait()
		for range 6 {
			f.enqueue("quick")
			time.Sleep(staleAhead / 2)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Len(t, f.items, 7)
		for _, i := range f.items[1:] {
			require.False(t, i.visible.After(time.Now()), "it is there for others")
		}
	})
}

// The answer of the database is lost. The next attempt finds that there is nothing left to do, and nobody is alarmed.
func TestRun_AnswerIsLost_IsNoLossOfALease(t *testing.T) {
	var log strings.Builder
	dispatching(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil)), Retry: func(int, error) time.Duration { return time.Hour }}, func(d *Dispatcher) {
		d.Handle("good", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.mu.Lock()
		f.unanswered = map[string]int{"ack": 2, "abandon": 1}
		f.mu.Unlock()
		f.enqueue("good", "bad")
		f.add(pgwake.WorkItem{Name: "good", Instance: "i"})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.NoError(t, stop())
		require.Len(t, f.acked, 2)
		require.Len(t, f.items, 1)
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), "dispatch: failed")
	})
}

// What is probed by itself is named twice to the database, and once to whoever reads the log.
func TestRun_OneItemCannotBeRenewed_LogCountsOne(t *testing.T) {
	var log strings.Builder
	dispatching(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil)), Retry: func(int, error) time.Duration { return time.Hour }}, func(d *Dispatcher) {
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
	}, func(t *testing.T, f *fake, stop func() error) {
		var away atomic.Bool
		away.Store(true)
		f.mu.Lock()
		f.fail = func(verb string) error {
			if away.Load() && (verb == "abandon" || verb == "renew") {
				return retryable(verb)
			}
			return nil
		}
		f.mu.Unlock()
		f.enqueue("bad")
		time.Sleep(5 * time.Second)
		away.Store(false)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.NoError(t, stop())
		require.Regexp(t, `cannot renew leases" .*items=1\n`, log.String())
		require.NotContains(t, log.String(), "items=2")
	})
}

func TestRun_DeadLetterIsRefused_ItGoesWithoutItsCause(t *testing.T) {
	dispatching(t, Config{MaxAttempts: 1}, func(d *Dispatcher) {
		d.Handle("bad", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.noCauses = true
		f.enqueue("bad")
		synctest.Wait()
		require.Equal(t, map[string]string{"bad": "max attempts: "}, f.buried)
	})
}

func TestText_WhateverAnErrorSays_FitsAndIsText(t *testing.T) {
	for _, said := range []string{strings.Repeat("\x00", 2*longestText), strings.Repeat("a\xff", longestText), strings.Repeat("ä", longestText), "fine"} {
		kept := text(errors.New(said))
		require.LessOrEqual(t, len(kept), longestText)
		require.Greater(t, len(kept), min(len(said), longestText)-4)
		require.NoError(t, refused("", 0, kept))
	}
}

func TestHandleTx_MiddlewareReplacesTheContext_NothingIsBegun(t *testing.T) {
	detached := func(next Handler) Handler {
		return func(_ context.Context, item *pgwake.ClaimedWorkItem) (Result, error) {
			return next(context.Background(), item)
		}
	}
	begin := func(context.Context) (pgx.Tx, error) { panic("it has begun") }
	dispatching(t, Config{Middleware: []Middleware{detached}, Begin: begin}, func(d *Dispatcher) {
		HandleTx(d, "a", func(context.Context, pgx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil })
	}, func(t *testing.T, f *fake, _ func() error) {
		f.enqueue("a")
		synctest.Wait()
		require.Contains(t, f.buried["a"], "middleware has replaced")
	})
}

// Where a limit leaves few places, the next item comes with the ack of the one before, and none is claimed ahead.
func TestRun_UnderALimit_AcksTakeTheNextItem(t *testing.T) {
	var now, most atomic.Int64
	dispatching(t, Config{}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error {
			raise(&most, now.Add(1))
			time.Sleep(time.Millisecond)
			now.Add(-1)
			return nil
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.mu.Lock()
		f.limit = 2
		f.mu.Unlock()
		enqueueMany(f, "a", 100)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, f.acked, 100)
		require.EqualValues(t, 2, most.Load())
		require.Greater(t, len(f.ackedWith), 40)
		require.Less(t, len(f.fetched), 10, "others are not woken for a place that is taken at once")
		require.Zero(t, f.calls["abandon"])
	})
}

// Then nobody waits for a disk to begin: only the end of what was done does.
func TestRun_UnderALimit_NextBeginsBeforeTheFlush(t *testing.T) {
	dispatching(t, Config{}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Millisecond); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.mu.Lock()
		f.limit, f.disk = 2, true
		f.mu.Unlock()
		enqueueMany(f, "a", 100)
		time.Sleep(time.Second) // less than a flush may take
		synctest.Wait()
		f.mu.Lock()
		require.Len(t, f.acked, 100)
		require.Zero(t, f.calls["flush"])
		f.mu.Unlock()
		time.Sleep(verbTimeout)
		synctest.Wait()

		f.mu.Lock()
		f.disk = false
		f.mu.Unlock()
		require.NoError(t, stop())
		require.NotZero(t, f.calls["flush"], "the Dispatcher ends when all is on the disk")
		require.Len(t, f.acked, 100)
		require.Greater(t, f.calls["ack"], 100, "what cannot be known to be on the disk is acknowledged again")
	})
}

// What was left to an ack that then takes nothing is free again at once.
func TestWorkshop_AckTakesNothingInTrouble_ClaimsGoOn(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := newFake()
		f.slow = time.Minute
		d := New(f, &Config{Concurrency: 1})
		d.work.each, d.work.allowed, d.apart.tried = 1, 100, 1
		d.acks.add(&held{item: &pgwake.ClaimedWorkItem{}})
		room := make(chan int, 1)
		go func() { room <- d.work.room(t.Context()) }()
		synctest.Wait()
		require.Empty(t, room)
		go func() { _, _ = d.acks.call(t.Context(), make([]pgwake.LockToken, len(d.acks.begin()))) }()
		synctest.Wait()
		require.Len(t, room, 1)
		time.Sleep(2 * time.Minute)
	})
}

func TestWorkshop_UnderALimit_CallsTogetherAskForNoMoreThanCanBeBegun(t *testing.T) {
	w := New(newFake(), &Config{Concurrency: 10, Ahead: NotAhead}).work
	w.each, w.allowed = 1, 100
	require.Equal(t, 10, w.room(t.Context()), "the fetch")
	require.Zero(t, w.inPlaceOf(5), "an ack beside it")
	w.take(nil, 10)
	require.Equal(t, 6, w.inPlaceOf(6))
	require.Equal(t, 4, w.inPlaceOf(6), "another one")
	w.answered(6)
	w.answered(4)
	w.d.acks.add(&held{})
	require.Equal(t, 9, w.room(t.Context()), "the rest is for that ack")
	w.take(nil, 9)

	w.learn(9, 9)
	require.Equal(t, 1, w.inPlaceOf(1), "few may have got all by chance")
	w.answered(1)
	w.learn(10, 10)
	require.Zero(t, w.inPlaceOf(10), "places are not scarce")
	require.Equal(t, 10, w.room(t.Context()))
	w.take(nil, 10)
	w.learn(9, 8)
	require.Equal(t, 10, w.inPlaceOf(10), "now they are")
}

// Each verb takes up to nearly a third of a lease, which is no reason to lose it.
func TestRun_DatabaseIsSlow_LeasesAreKept(t *testing.T) {
	for _, takes := range []time.Duration{3 * time.Second, 9 * time.Second} {
		t.Run(takes.String(), func(t *testing.T) {
			calls := 0
			dispatching(t, Config{LockTimeout: 30 * time.Second}, func(d *Dispatcher) {
				d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
					calls++
					time.Sleep(5 * time.Minute)
					return ctx.Err()
				}))
			}, func(t *testing.T, f *fake, _ func() error) {
				f.slow = takes // before there is anything to be done
				f.enqueue("a")
				time.Sleep(6 * time.Minute)
				synctest.Wait()
				require.Equal(t, []string{"a"}, f.acked)
				require.Equal(t, 1, calls)
			})
		})
	}
}

// A transaction locks items that are to be given back, buried or completed, more than there are connections. Who waits for one of
// them has a connection.
func TestRun_FailedItemsAreLocked_OthersAreSettled(t *testing.T) {
	for name, item := range map[string]pgwake.WorkItem{"retried": {}, "buried": {}, "completed": {Instance: "i", ExecutionID: 1, ActivityID: 1}} {
		t.Run(name, func(t *testing.T) {
			dispatching(t, Config{Concurrency: 50, LockTimeout: 30 * time.Second, Retry: Backoff(time.Nanosecond, time.Nanosecond)}, func(d *Dispatcher) {
				d.Handle("locked", does(func(_ context.Context, i *pgwake.ClaimedWorkItem) error {
					if name == "buried" {
						return Permanent(errors.New("no"))
					}
					return map[bool]error{true: errors.New("no")}[i.Instance == "" && i.Attempt == 1]
				}))
				d.Handle("free", does(func(_ context.Context, i *pgwake.ClaimedWorkItem) error {
					return map[bool]error{true: errors.New("no")}[i.Attempt == 1]
				}))
			}, func(t *testing.T, f *fake, _ func() error) {
				f.locked["locked"] = true
				item.Name = "locked"
				f.add(item) // the first is tried
				time.Sleep(10 * time.Millisecond)
				for range 20 {
					f.add(item)
				}
				time.Sleep(2 * ackPatience) // it is known by now that they are locked
				f.mu.Lock()
				f.mostWaiting = 0
				f.mu.Unlock()
				for range 20 {
					f.add(item)
				}
				f.enqueue("free")
				time.Sleep(time.Second)
				synctest.Wait()
				f.mu.Lock()
				require.Equal(t, []string{"free"}, f.acked)
				require.Zero(t, f.mostWaiting)
				f.locked["locked"] = false
				f.mu.Unlock()
				time.Sleep(2 * lastPause)
				synctest.Wait()
				require.Empty(t, f.items)
			})
		})
	}
}

// Where leases cannot be renewed nobody knows what is locked, and all that was decided is carried out all the same: long before the leases
// end.
func TestRun_LeasesCannotBeRenewed_ItemsAreSettled(t *testing.T) {
	const count = 50 // more than are carried out at one time
	var said strings.Builder
	dispatching(t, Config{
		Concurrency: 3 * count, LockTimeout: time.Hour, Retry: Backoff(time.Second, time.Second), Logger: slog.New(slog.NewTextHandler(&said, nil)),
	}, func(d *Dispatcher) {
		d.Handle("done", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
		d.Handle("retried", does(func(_ context.Context, i *pgwake.ClaimedWorkItem) error {
			return map[bool]error{true: errors.New("no")}[i.Attempt == 1]
		}))
		d.Handle("buried", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return Permanent(errors.New("no")) }))
		d.Handle("unending", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { <-ctx.Done(); return context.Cause(ctx) }))
	}, func(t *testing.T, f *fake, stop func() error) {
		failures := 0
		f.last = true
		f.fail = func(verb string) error {
			if failures++; verb != "fetch" && failures < 2*count { // the queue is away for a while
				return retryable(verb)
			}
			return nil
		}
		f.enqueue(slices.Repeat([]string{"done", "retried", "buried"}, count)...)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		f.mu.Lock()
		require.Len(t, f.acked, 2*count)
		require.Equal(t, map[string]string{"buried": "permanent error: no"}, f.buried)
		require.Empty(t, f.items)
		f.mu.Unlock()

		f.enqueue(slices.Repeat([]string{"unending"}, count)...)
		time.Sleep(time.Hour - time.Minute) // each was to be renewed, again and again
		require.NoError(t, stop())
		for _, i := range f.items {
			require.Empty(t, i.LockToken, "it was given back")
		}
		require.Len(t, f.items, count)
		require.False(t, strings.Contains(said.String(), "cannot renew"), "there is nothing to be done about it")
	})
}

// A transaction locks items of three acks, more than there are at one time.
func TestRun_DoneItemsAreLocked_OthersAreAcknowledged(t *testing.T) {
	dispatching(t, Config{Concurrency: 20, LockTimeout: 30 * time.Second}, func(d *Dispatcher) {
		d.Handle("locked", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
		d.Handle("free", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.locked["locked"] = true // before there is anything to be done
		for range 3 {
			f.enqueue("free", "locked", "free")
			time.Sleep(10 * time.Millisecond)
		}
		f.enqueue("free", "free")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		f.mu.Lock()
		require.Equal(t, slices.Repeat([]string{"free"}, 8), f.acked)
		f.locked["locked"] = false
		f.mu.Unlock()
		time.Sleep(lastPause + 10*time.Millisecond)
		synctest.Wait()
		require.Len(t, f.acked, 11)
		require.Empty(t, f.items)
	})
}

// What is claimed for batches, and belongs to none, is given back once, and not again and again. Batches that come later are
// whole all the same.
func TestRun_SlowItemsBesideABatchHandler_ClaimsAdapt(t *testing.T) {
	const slow, batch = 400, 100
	var mu sync.Mutex
	var sizes []int
	dispatching(t, Config{Concurrency: 2}, func(d *Dispatcher) {
		d.HandleBatch("many", batch, func(_ context.Context, items []*pgwake.ClaimedWorkItem) error {
			mu.Lock()
			sizes = append(sizes, len(items))
			mu.Unlock()
			time.Sleep(100 * time.Millisecond)
			return nil
		}, WithMaxAttempts(Unlimited))
		d.Handle("slow", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(300 * time.Millisecond); return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		enqueueMany(f, "slow", slow)
		time.Sleep(slow * 150 * time.Millisecond)
		synctest.Wait()
		require.Len(t, f.acked, slow)
		require.LessOrEqual(t, f.calls["abandon"], 2*batch)
		f.addAll(slices.Repeat([]pgwake.WorkItem{{Name: "many"}}, 20*batch)...)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, f.acked, slow+20*batch)
		require.LessOrEqual(t, len(sizes), 20+2*8)
		require.Equal(t, batch, slices.Max(sizes))
	})
}

func TestRun_DoneItemsAreLostOrRefused_LogSaysWhich(t *testing.T) {
	for name, failure := range map[string]error{
		"lost":    &pgwake.LostLocksError{Tokens: []pgwake.LockToken{"1/1", "2/1"}},
		"refused": pgwake.ErrPermission,
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			dispatching(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(d *Dispatcher) {
				d.HandleBatch("a", 2, func(context.Context, []*pgwake.ClaimedWorkItem) error { return nil })
			}, func(t *testing.T, f *fake, stop func() error) {
				f.mu.Lock()
				f.fail = func(verb string) error {
					if verb == "ack" {
						return &pgwake.Error{Op: verb, Err: failure}
					}
					return nil
				}
				f.mu.Unlock()
				f.addAll(pgwake.WorkItem{Name: "a"}, pgwake.WorkItem{Name: "a"})
				synctest.Wait()
				require.NoError(t, stop())
				for id := range 2 { // in one statement, or each by itself
					require.Regexp(t, fmt.Sprintf(`(ids|item)=[^=]*\b%d\b`, id+1), log.String())
				}
			})
		})
	}
}

// One item of many cannot be acknowledged. None of the others comes again because of it.
func TestRun_OneOfTheDoneItemsIsRefused_OthersAreAcknowledged(t *testing.T) {
	for name, unheld := range map[string]bool{"by acks": false, "by renewals too": true} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			var handled atomic.Int64
			var all chan struct{}
			dispatching(t, Config{Concurrency: 41, LockTimeout: 30 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(d *Dispatcher) {
				all = make(chan struct{})
				d.HandleOthers(does(func(context.Context, *pgwake.ClaimedWorkItem) error {
					handled.Add(1)
					<-all
					return nil
				}))
			}, func(t *testing.T, f *fake, stop func() error) {
				f.mu.Lock()
				f.poisoned, f.unheld, f.slow = map[string]bool{"bad": true}, unheld, time.Millisecond
				f.mu.Unlock()
				f.enqueue(slices.Concat(slices.Repeat([]string{"good"}, 20), []string{"bad"}, slices.Repeat([]string{"good"}, 20))...)
				time.Sleep(time.Second)
				close(all)
				time.Sleep(time.Second)
				synctest.Wait()
				f.mu.Lock()
				require.Equal(t, slices.Repeat([]string{"good"}, 40), f.acked)
				require.Len(t, f.items, 1)
				f.mu.Unlock()
				require.EqualValues(t, 41, handled.Load())
				require.NoError(t, stop())
				require.Equal(t, 1, strings.Count(log.String(), "left to the end of its lease"), log.String())
				require.Contains(t, log.String(), "name=bad")
			})
		})
	}
}

func TestStop_HandlerFailsForAReasonOfItsOwn_ItIsKept(t *testing.T) {
	failure := errors.New("half of it is done")
	for err, want := range map[error]string{
		nil:              ErrStopping.Error(),
		context.Canceled: ErrStopping.Error(),
		failure:          ErrStopping.Error() + ": " + failure.Error(),
	} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			var ended []Ended
			dispatching(t, Config{StopTimeout: time.Second, OnEnd: func(e Ended) { ended = append(ended, e) }}, func(d *Dispatcher) {
				d.Handle("a", does(func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
					<-ctx.Done()
					if err == nil {
						return context.Cause(ctx)
					}
					return err
				}))
			}, func(t *testing.T, f *fake, stop func() error) {
				f.enqueue("a")
				synctest.Wait()
				require.NoError(t, stop())
				require.Equal(t, want, f.items[0].LastError)
				require.Len(t, ended, 1)
				require.ErrorIs(t, ended[0].Err, ErrStopping)
				require.Equal(t, GivenBack, ended[0].Outcome)
			})
		})
	}
}

// whatPasses is what a server says for a while, and is no fault of whoever asks.
var whatPasses = map[string]error{
	"password": &pgwake.Error{Op: "verb", SQLState: "28P01", Err: errors.New("wrong")},
	"disk":     &pgwake.Error{Op: "verb", SQLState: "58030", Err: errors.New("bad")},
	"rights":   &pgwake.Error{Op: "verb", Err: pgwake.ErrPermission},
	"tables":   &pgwake.Error{Op: "verb", Err: pgwake.ErrNotMigrated},
}

// What was done is acknowledged once that can be, and the Dispatcher goes on.
func TestRun_WhatTheServerIsLikeForAWhile_EndsNothing(t *testing.T) {
	for name, failure := range whatPasses {
		for _, items := range []int{1, 3} {
			t.Run(fmt.Sprint(name, items), func(t *testing.T) {
				var handled atomic.Int64
				var down atomic.Bool
				dispatching(t, Config{MaxAttempts: 1, LockTimeout: time.Minute}, func(d *Dispatcher) {
					d.HandleBatch("a", items, func(_ context.Context, batch []*pgwake.ClaimedWorkItem) error {
						handled.Add(int64(len(batch)))
						down.Store(true)
						return nil
					})
				}, func(t *testing.T, f *fake, _ func() error) {
					f.mu.Lock()
					f.fail = func(string) error {
						if down.Load() {
							return failure
						}
						return nil
					}
					f.mu.Unlock()
					f.addAll(slices.Repeat([]pgwake.WorkItem{{Name: "a"}}, items)...)
					time.Sleep(20 * time.Second)
					f.mu.Lock()
					require.Empty(t, f.acked)
					f.mu.Unlock()
					down.Store(false)
					time.Sleep(10 * time.Second)
					f.mu.Lock()
					require.Len(t, f.acked, items)
					f.mu.Unlock()
					f.enqueue("a")
					time.Sleep(time.Second)
					require.EqualValues(t, items+1, handled.Load(), "each once, and it goes on")
				})
			})
		}
	}
}

// Whoever is to do something about it must not find that all stands still for what cannot be done.
func TestRun_RightToAcknowledgeIsMissing_OthersGoOn(t *testing.T) {
	var handled atomic.Int64
	var log strings.Builder
	dispatching(t, Config{Concurrency: 1, LockTimeout: 10 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { handled.Add(1); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.mu.Lock()
		f.fail = func(verb string) error {
			if verb == "ack" {
				return whatPasses["rights"]
			}
			return nil
		}
		f.mu.Unlock()
		f.enqueue("a")
		time.Sleep(mendingPatience - 5*time.Second)
		require.EqualValues(t, 1, handled.Load(), "its lease is renewed as long as there is hope")
		time.Sleep(time.Minute)
		require.Greater(t, handled.Load(), int64(1), "its lease has ended")
		require.NoError(t, stop())
		require.Contains(t, log.String(), "left to the end of its lease")
	})
}

// It is a mistake if nothing has ever been answered, and not what somebody is about to mend.
func TestRun_FirstFetchIsRefused_RunReturnsIt(t *testing.T) {
	for name, ends := range map[string]bool{"rights": true, "tables": true, "password": false, "disk": false} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				f := newFake()
				f.fail = func(string) error { return whatPasses[name] }
				d := New(f, &Config{Logger: slog.New(slog.DiscardHandler)})
				d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err := d.Run(ctx)
				require.Equal(t, ends, err != nil, err)
			})
		})
	}
}

// Processes that begin together, and lose the database together, do not come back to it together.
func TestPauses_OfTwoThatBeginTogether_Differ(t *testing.T) {
	lasts := map[string]func(ctx context.Context, length time.Duration) error{
		"fetches": func(ctx context.Context, _ time.Duration) error {
			p := patience{log: slog.New(slog.DiscardHandler)}
			for range 20 {
				_, _ = p.after(ctx, retryable("fetch"))
			}
			return nil
		},
		"verbs": func(ctx context.Context, length time.Duration) error {
			calls := 0
			_, err := persist(ctx, func() time.Time { return time.Now().Add(time.Minute) }, func(context.Context) error {
				if calls++; calls < 20 {
					return retryable("ack")
				}
				return nil
			})
			return err
		},
		"renewals": func(ctx context.Context, length time.Duration) error {
			ctx, end := context.WithCancel(ctx)
			f := newFake()
			f.fail = func(string) error { end(); return nil }
			d := New(f, &Config{LockTimeout: length, Logger: slog.New(slog.DiscardHandler)})
			d.leases.add([]*held{{item: &pgwake.ClaimedWorkItem{}, until: time.Now().Add(length)}})
			f.items = []*fakeItem{{visible: time.Now().Add(length)}}
			d.leases.run(ctx)
			return nil
		},
	}
	for name, last := range lasts {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				took := map[time.Duration]bool{}
				for range 3 {
					began := time.Now()
					require.NoError(t, last(t.Context(), 30*time.Second))
					took[time.Since(began)] = true
				}
				require.Greater(t, len(took), 1)
			})
		})
	}
}

// A Provider with DisableLongPoll says at once that there is nothing.
func TestPauses_SourceDoesNotWait_IsNotAskedWithoutOne(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		p := patience{log: slog.New(slog.DiscardHandler)}
		took := func(fetch time.Duration, err error) time.Duration {
			time.Sleep(fetch)
			began := time.Now()
			goOn, gone := p.after(t.Context(), err)
			require.True(t, goOn)
			require.NoError(t, gone)
			return time.Since(began)
		}
		require.Zero(t, took(0, pgwake.ErrNoWork), "the first")
		for range 3 {
			require.InDelta(t, emptyPause-20*time.Millisecond, took(20*time.Millisecond, pgwake.ErrNoWork), float64(emptyPause/10))
		}
		require.Zero(t, took(0, nil), "there is work")
		require.Zero(t, took(time.Minute, pgwake.ErrNoWork))
		p.poll = 30 * time.Millisecond // then it is as it should be
		require.Zero(t, took(30*time.Millisecond, pgwake.ErrNoWork))
	})
}
