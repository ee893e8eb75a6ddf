package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// upload is what an ack takes to be sent: longer than its first attempt has.
const upload = 2*verbTimeout + verbTimeout/2

// uploadLeases last longer than an upload, and less: they are renewed meanwhile.
var uploadLeases = []time.Duration{time.Minute, 5 * time.Second}

func TestOrchestrator_AckTakesLongToSend_IsMade(t *testing.T) {
	for _, lease := range uploadLeases {
		t.Run(lease.String(), func(t *testing.T) {
			decided := 0
			deciding(t, OrchestratorConfig{LockTimeout: lease}, func() Decider {
				return func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
					decided++
					return ack, nil
				}
			}, nil, func(t *testing.T, f *turns, _ func() error) {
				f.upload = upload
				f.add("a")
				time.Sleep(5 * upload)
				synctest.Wait()
				require.Len(t, f.acks, 1)
				require.Equal(t, 1, decided)
				require.Empty(t, f.given)
			})
		})
	}
}

// What is sent into the void is sent again when it was before, and not when an upload would be over.
func TestOrchestrator_AckGetsNoAnswer_IsMadeAgainSoon(t *testing.T) {
	deciding(t, OrchestratorConfig{LockTimeout: time.Hour}, decides, nil, func(t *testing.T, f *turns, _ func() error) {
		f.upload = time.Hour
		f.add("a")
		time.Sleep(time.Second)
		f.mu.Lock()
		f.upload = 0
		f.mu.Unlock()
		time.Sleep(verbTimeout)
		synctest.Wait()
		require.Len(t, f.acks, 1)
	})
}

// However long an attempt may take by then, it ends with the lease, and that is nothing that the turn is to blame for.
func TestOrchestrator_LeaseEndsWhileAnAckIsSent_TurnIsTakenAgain(t *testing.T) {
	const lease = 25 * time.Second // it ends amid the second attempt
	var log strings.Builder
	deciding(t, OrchestratorConfig{LockTimeout: lease, Logger: slog.New(slog.NewTextHandler(&log, nil))}, decides, nil, func(t *testing.T, f *turns, _ func() error) {
		f.upload = time.Hour
		f.fail = func(verb string) error {
			return map[bool]error{true: retryable(verb)}[verb == "renew"]
		}
		f.add("a")
		time.Sleep(lease - time.Second)
		f.mu.Lock()
		f.upload = 0
		f.mu.Unlock()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Len(t, f.acks, 1)
		require.Empty(t, f.buried)
		require.Contains(t, log.String(), "cannot acknowledge")
		require.Contains(t, log.String(), errNoTime.Error())
	})
}

func decides() Decider {
	return func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
		return ack, nil
	}
}

func TestRun_CompletionTakesLongToSend_ItemIsAcknowledged(t *testing.T) {
	for _, lease := range uploadLeases {
		t.Run(lease.String(), func(t *testing.T) {
			handled := 0
			dispatching(t, Config{LockTimeout: lease}, func(d *Dispatcher) {
				d.Handle("large", does(func(context.Context, *pgwake.ClaimedWorkItem) error { handled++; return nil }))
			}, func(t *testing.T, f *fake, _ func() error) {
				f.uploads = map[string]time.Duration{"large": upload}
				f.add(pgwake.WorkItem{Name: "large", Instance: "i", ExecutionID: 1, ActivityID: 1})
				time.Sleep(6 * upload)
				synctest.Wait()
				require.Equal(t, []string{"large"}, f.acked)
				require.Len(t, f.sent, 1)
				require.Equal(t, 1, handled)
			})
		})
	}
}

// It holds up those of its statement only until they are acknowledged one by one.
func TestRun_AckOfABatchTakesLongToSend_AllAreAcknowledged(t *testing.T) {
	var handled atomic.Int64
	dispatching(t, Config{Concurrency: 20}, func(d *Dispatcher) {
		d.HandleOthers(does(func(context.Context, *pgwake.ClaimedWorkItem) error { handled.Add(1); return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.uploads = map[string]time.Duration{"large": upload, "busy": ackPatience / 2}
		for range ackers {
			f.enqueue("busy")
			time.Sleep(10 * time.Millisecond)
		}
		f.enqueue(slices.Concat(slices.Repeat([]string{"small"}, 5), []string{"large"}, slices.Repeat([]string{"small"}, 5))...)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		f.mu.Lock()
		require.ElementsMatch(t, slices.Concat(slices.Repeat([]string{"busy"}, ackers), slices.Repeat([]string{"small"}, 10)), f.acked)
		f.mu.Unlock()
		time.Sleep(6 * upload)
		synctest.Wait()
		require.Contains(t, f.acked, "large")
		require.Empty(t, f.items)
		require.EqualValues(t, ackers+11, handled.Load())
	})
}

// Few are given back or buried at one time, so none of them keeps its place for longer than at first.
func TestRun_WhatIsGivenBackHangs_HasNoMoreTimeThanAtFirst(t *testing.T) {
	dispatching(t, Config{LockTimeout: time.Hour}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return errors.New("no") }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.slow = time.Hour
		f.last = true
		f.enqueue("a")
		time.Sleep(10 * (verbTimeout + lastPause))
		synctest.Wait()
		f.mu.Lock()
		calls := f.calls["abandon"]
		f.slow = 0
		f.mu.Unlock()
		require.GreaterOrEqual(t, calls, 9)
		time.Sleep(2 * verbTimeout)
	})
}
