package pgmq

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/dbclock"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: does a stranger who notifies the Stream cost it no more than is said, and does nobody miss anything for it?

func TestCredit_IsSpentPaidBackAndEarned(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		var c credit
		for range mostCredit {
			require.Zero(t, c.until())
			c.spend()
		}
		require.Zero(t, c.until())
		c.spend()
		require.Equal(t, spendPause, time.Until(c.until()))
		time.Sleep(spendPause)
		require.Zero(t, c.until())
		for range mostCredit {
			c.spend()
		}
		require.Equal(t, mostDebt, time.Until(c.until()), "nothing is put off for longer")
		for range mostDebt / foundWorth {
			require.NotZero(t, c.until())
			c.earn()
		}
		require.Zero(t, c.until())
		time.Sleep(24 * time.Hour)
		c.earn()
		for range mostCredit {
			c.spend()
		}
		require.Zero(t, c.until())
		c.spend()
		require.NotZero(t, c.until(), "there is no more than the most of it")
	})
}

// asker is a Stream without a database, and those who wait on it.
type asker struct {
	*Stream
	asked, found atomic.Int64

	mu  sync.Mutex
	due map[string]bool // namespaces of which the database has something
}

// newAsker has so many wait, each for a namespace of its own: n0, n1 and so on. The first is "", who waits for namespaces.
func newAsker(t *testing.T, waiters int) *asker {
	a := &asker{due: make(map[string]bool)}
	a.Stream = &Stream{cfg: Config{FallbackInterval: time.Hour}, clock: dbclock.New(nil), closed: make(chan struct{}), parked: make(map[*parked]bool)}
	a.clock.Observe(time.Now(), time.Now(), time.Now())
	ctx, end := context.WithCancel(t.Context())
	var all sync.WaitGroup
	t.Cleanup(func() { end(); all.Wait() })
	for i := range waiters {
		namespace := fmt.Sprintf("n%d", i)
		if i == 0 {
			namespace = ""
		}
		all.Go(func() {
			for a.await(ctx, namespace, func() (next time.Time, found bool, err error) {
				time.Sleep(time.Millisecond) // what a statement takes
				a.asked.Add(1)
				a.mu.Lock()
				defer a.mu.Unlock()
				found = a.due[namespace]
				delete(a.due, namespace)
				return next, found, nil
			}) == nil {
				a.found.Add(1)
			}
		})
	}
	time.Sleep(time.Second)
	require.EqualValues(t, waiters, a.asked.Swap(0), "each has asked once")
	return a
}

// Invariants (1) and (3), whatever the stranger says.
func TestCredit_StrangerNotifiesAllTheTime_FewAskAndNobodyWaitsLong(t *testing.T) {
	const lasts = 10 * time.Second
	for what, payload := range map[string]func(namespace int) (channel, payload string){
		"unreadable": func(int) (string, string) { return readyChannel, "x" },
		"namespaces": func(n int) (string, string) { return readyChannel, fmt.Sprintf(`{"namespace": "n%d"}`, n) },
		"later": func(n int) (string, string) {
			at := time.Now().Add(time.Duration(n+1) * time.Millisecond)
			return readyChannel, fmt.Sprintf(`{"namespace": "n%d", "ready_at": %q}`, n, at.Format(time.RFC3339Nano))
		},
		"queues": func(int) (string, string) { return createdChannel, `{}` },
	} {
		for _, waiters := range []int{2, 10, 100} {
			t.Run(fmt.Sprint(what, " ", waiters), func(t *testing.T) {
				virtualtime.Test(t, func(t *testing.T) {
					a := newAsker(t, waiters)
					i := 0
					for began := time.Now(); time.Since(began) < lasts; time.Sleep(time.Millisecond) {
						for range 5 {
							a.hear(payload(i % waiters))
							i++
						}
					}
					synctest.Wait()
					require.LessOrEqual(t, a.asked.Load(), mostCredit+max(int64(lasts/spendPause), int64(waiters)*int64(lasts/mostDebt))+int64(waiters))
					require.Greater(t, a.asked.Load(), int64(lasts/mostDebt), "they ask")

					// What is sent meanwhile is found, a second later at most.
					a.mu.Lock()
					for n := range waiters {
						a.due[fmt.Sprintf("n%d", n)] = true
					}
					a.due[""] = true
					a.mu.Unlock()
					for n := range waiters {
						a.hear(readyChannel, fmt.Sprintf(`{"namespace": "n%d"}`, n))
					}
					a.hear(createdChannel, `{}`)
					time.Sleep(mostDebt + 2*time.Millisecond)
					synctest.Wait()
					require.EqualValues(t, waiters, a.found.Load())
				})
			})
		}
	}
}

// All who wait ask at once when there is a new connection, and at the instants that they know, whatever a stranger has spent.
func TestCredit_NoneIsLeft_AsksOfItsOwnAreNotPutOff(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		a := newAsker(t, 10)
		for range 2 * mostCredit {
			a.credit.spend()
		}
		before := a.credit.until()
		a.tellAll() // which is put off
		a.lookAround()
		time.Sleep(time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 10, a.asked.Load())
		require.Equal(t, before, a.credit.until())
		time.Sleep(10 * mostDebt)
		require.EqualValues(t, 10, a.asked.Load(), "what they were told is answered")

		for range 2 * mostCredit {
			a.credit.spend()
		}
		p := &parked{bell: make(chan struct{}, 1)}
		a.mu.Lock()
		p.hear(time.Now())
		a.mu.Unlock()
		began := time.Now()
		require.NoError(t, a.sleep(t.Context(), p, began.Add(mostDebt/2)))
		require.Equal(t, mostDebt/2, time.Since(began))
	})
}

// Producers pay for themselves: of each message others are told who ask in vain.
func TestCredit_ManyMessages_NothingIsPutOff(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		a := newAsker(t, 10)
		for range 2000 {
			a.mu.Lock()
			a.due["n1"] = true
			a.mu.Unlock()
			a.tell("n1", time.Now())
			for n := 2; n < 8; n++ { // what other nodes get
				a.tell(fmt.Sprintf("n%d", n), time.Now())
			}
			time.Sleep(2 * time.Millisecond)
			require.Zero(t, a.credit.until())
		}
		synctest.Wait()
		require.EqualValues(t, 2000, a.found.Load())
	})
}
