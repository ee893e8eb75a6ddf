package pgwake

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: which acks travel together, when, and what does each of them hear?

// groupTest is ackGroups without a database, on virtual time.
type groupTest struct {
	ackGroups
	took    time.Duration       // by each transaction
	fail    func(n int64) error // because of the ack of item n; nil: none
	locked  chan struct{}       // closed when the items of acks of this kind no longer are
	groups  [][]int64           // items, by transaction, in the order of their beginning
	singles []int64             // items of acks that are made by themselves
	ends    map[int64]error     // what the ack of each item heard
	cut     []int               // transactions whose context ended
}

func inGroups(t *testing.T, play func(t *testing.T, g *groupTest)) {
	virtualtime.Test(t, func(t *testing.T) {
		p := &Provider{}
		p.abort, p.abortNow = context.WithCancel(context.Background())
		defer p.abortNow()
		g := &groupTest{ackGroups: newAckGroups(p), took: time.Millisecond, locked: make(chan struct{}), ends: make(map[int64]error)}
		g.transact = func(ctx context.Context, acks []*groupedAck, outcomes []error) error {
			g.mu.Lock()
			n := len(g.groups)
			var items []int64
			for i, a := range acks {
				items = append(items, a.item)
				switch a.message.Kind {
				case "lost":
					outcomes[i] = ErrLockLost
				case "locked":
					outcomes[i] = errAlone
				}
			}
			g.groups = append(g.groups, items)
			g.mu.Unlock()
			select {
			case <-time.After(g.took):
			case <-ctx.Done():
				g.mu.Lock()
				defer g.mu.Unlock()
				g.cut = append(g.cut, n)
				return ctx.Err()
			}
			for _, item := range items {
				if g.fail != nil && g.fail(item) != nil {
					return g.fail(item)
				}
			}
			return nil
		}
		g.alone = func(ctx context.Context, a *groupedAck) error {
			g.mu.Lock()
			g.singles = append(g.singles, a.item)
			g.mu.Unlock()
			unlocked := time.After(g.took)
			if a.message.Kind == "locked" {
				unlocked = nil
			}
			select {
			case <-unlocked:
			case <-g.locked:
			case <-ctx.Done():
				return ctx.Err()
			}
			if a.message.Kind == "lost" {
				return ErrLockLost
			}
			if g.fail != nil {
				return g.fail(a.item)
			}
			return nil
		}
		play(t, g)
		p.inFlight.Wait()
		require.Zero(t, g.flying)
		require.Empty(t, g.waiting)
	})
}

// sent returns the transactions so far, and heard what the acks heard.
func (g *groupTest) sent() [][]int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.groups)
}

func (g *groupTest) heard() map[int64]error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.ends)
}

// call makes the ack of an item in a goroutine, and returns when it waits.
func (g *groupTest) call(ctx context.Context, item int64, kind MessageKind) {
	g.p.inFlight.Go(func() {
		err := g.do(ctx, &groupedAck{lease: lease{item: item}, message: Message{Kind: kind}})
		g.mu.Lock()
		defer g.mu.Unlock()
		g.ends[item] = err
	})
	synctest.Wait()
}

func (g *groupTest) calls(items ...int64) {
	for _, item := range items {
		g.call(context.Background(), item, "")
	}
}

func TestAckGroups_OneAlone_GoesAtOnce_AndWhatComesMeanwhileGoesWhenItHasEnded(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		began := time.Now()
		g.calls(1)
		require.Equal(t, [][]int64{{1}}, g.sent())
		require.Empty(t, g.heard(), "it has not committed")
		g.calls(2, 3)
		require.Len(t, g.sent(), 1)
		time.Sleep(g.took)
		synctest.Wait()
		require.Equal(t, [][]int64{{1}, {2, 3}}, g.sent())
		require.Equal(t, map[int64]error{1: nil}, g.heard())
		g.p.inFlight.Wait()
		require.Equal(t, map[int64]error{1: nil, 2: nil, 3: nil}, g.heard())
		require.Equal(t, 2*g.took, time.Since(began))
	})
}

func TestAckGroups_GroupTakesLong_TheNextGoesAfterThePause_ButNoMoreThanSo(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.took = time.Second
		for item := range int64(10) {
			g.calls(item)
			time.Sleep(groupPause)
			synctest.Wait()
		}
		require.Equal(t, [][]int64{{0}, {1}, {2}, {3}}, g.sent())
		time.Sleep(g.took)
		synctest.Wait()
		require.Equal(t, []int64{4, 5, 6, 7, 8, 9}, g.sent()[4])
	})
}

// Their connections have lost the other end without a sign, and their callers wait for ever.
func TestAckGroups_GroupsHang_HoldUpOthersForAWhile(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.took = 24 * time.Hour
		for item := range int64(maxGroups) {
			g.calls(item)
			time.Sleep(groupPause)
			synctest.Wait()
		}
		g.took = time.Millisecond
		g.calls(10, 11)
		time.Sleep(groupPatience - maxGroups*groupPause - 1)
		synctest.Wait()
		require.Len(t, g.sent(), maxGroups)
		time.Sleep(groupPause + g.took + 1)
		synctest.Wait()
		require.Equal(t, map[int64]error{10: nil, 11: nil}, g.heard())
		time.Sleep(maxGroups * groupPause) // all of them have hung for long
		g.calls(12)
		time.Sleep(g.took)
		synctest.Wait()
		require.Equal(t, map[int64]error{10: nil, 11: nil, 12: nil}, g.heard(), "it went at once: it is alone")
		g.p.inFlight.Wait()
		require.Len(t, g.heard(), maxGroups+3)
	})
}

func TestAckGroups_LargeGroup_DoesNotWait(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		began := time.Now()
		g.calls(-1)
		for item := range int64(groupSize + 1) {
			g.calls(item)
		}
		require.Len(t, g.sent(), 2)
		require.Len(t, g.sent()[1], groupSize)
		require.Zero(t, time.Since(began))
	})
}

func TestAckGroups_SameItemTwice_IsNotInOneGroup(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.calls(1, 2, 2, 3)
		g.p.inFlight.Wait()
		require.Equal(t, [][]int64{{1}, {2, 3}, {2}}, g.sent())
	})
}

func TestAckGroups_ErrorOfOne_IsNobodyElses(t *testing.T) {
	// Whatever is wrong with one; and a failed serialization, a deadlock, a lock that took too long, or a statement.
	for _, code := range []string{"23514", "PW003", "40001", "40P01", "55P03", "57014"} {
		t.Run(code, func(t *testing.T) {
			refused := &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code}
			inGroups(t, func(t *testing.T, g *groupTest) {
				g.fail = func(item int64) error {
					if item == 3 {
						return refused
					}
					return nil
				}
				began := time.Now()
				g.calls(1, 2)
				g.call(context.Background(), 3, "")
				g.call(context.Background(), 4, "lost")
				g.call(context.Background(), 5, "")
				g.p.inFlight.Wait()
				require.Equal(t, [][]int64{{1}, {2, 3, 4, 5}}, g.sent())
				require.ElementsMatch(t, []int64{2, 3, 4, 5}, g.singles)
				require.Equal(t, map[int64]error{1: nil, 2: nil, 3: refused, 4: ErrLockLost, 5: nil}, g.heard())
				require.Equal(t, 3*g.took, time.Since(began), "they do not wait for one another")
			})
		})
	}
}

func TestAckGroups_OneAloneIsRefused_IsNotTriedAgain(t *testing.T) {
	refused := &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "55P03"}
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.fail = func(int64) error { return refused }
		g.calls(1)
		g.p.inFlight.Wait()
		require.Equal(t, map[int64]error{1: refused}, g.heard())
		require.Empty(t, g.singles)
	})
}

func TestAckGroups_ServerCannot_IsSaidToAll(t *testing.T) {
	for _, code := range []string{"53300", "57P01", "25006", "08006"} {
		down := &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code}
		inGroups(t, func(t *testing.T, g *groupTest) {
			g.fail = func(int64) error { return down }
			g.calls(1, 2, 3)
			g.p.inFlight.Wait()
			require.Equal(t, map[int64]error{1: down, 2: down, 3: down}, g.heard())
			require.Empty(t, g.singles)
		})
	}
}

func TestAckGroups_SomeAreLocked_WaitByThemselves_AndHoldUpNobody(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.calls(0)
		for item := range int64(2 * maxGroups) {
			g.call(context.Background(), 10+item, "locked")
		}
		g.calls(1)
		time.Sleep(2 * g.took)
		synctest.Wait()
		require.Len(t, g.sent(), 2)
		require.Equal(t, map[int64]error{0: nil, 1: nil}, g.heard())
		require.Len(t, g.singles, 2*maxGroups)

		for item := range int64(2 * maxGroups) { // nor do those that come one by one
			g.call(context.Background(), 20+item, "locked")
			time.Sleep(g.took)
			synctest.Wait()
		}
		began := time.Now()
		g.calls(2)
		time.Sleep(g.took)
		synctest.Wait()
		require.Equal(t, map[int64]error{0: nil, 1: nil, 2: nil}, g.heard())
		require.Equal(t, g.took, time.Since(began))
		close(g.locked)
		g.p.inFlight.Wait()
		require.Len(t, g.heard(), 3+4*maxGroups)
		for item, err := range g.heard() {
			require.NoError(t, err, item)
		}
	})
}

func TestAckGroups_CallerLeavesWhatIsLocked_TheOthersGoOn(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		ctx, cancel := context.WithCancel(context.Background())
		g.calls(1)
		g.call(ctx, 2, "locked")
		g.call(context.Background(), 3, "locked")
		time.Sleep(2 * g.took)
		synctest.Wait()
		g.calls(4)
		cancel()
		synctest.Wait()
		require.Equal(t, map[int64]error{1: nil, 2: context.Canceled}, g.heard())
		close(g.locked)
		g.p.inFlight.Wait()
		require.Equal(t, map[int64]error{1: nil, 2: context.Canceled, 3: nil, 4: nil}, g.heard())
		require.Empty(t, g.cut)
	})
}

func TestAckGroups_NobodyKnows_IsSaidToAll(t *testing.T) {
	broken := errors.New("connection reset")
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.fail = func(item int64) error { return broken }
		g.calls(1, 2, 3)
		g.p.inFlight.Wait()
		require.Equal(t, [][]int64{{1}, {2, 3}}, g.sent())
		require.Empty(t, g.singles, "it is not tried again: it may have committed")
		require.Equal(t, map[int64]error{1: broken, 2: broken, 3: broken}, g.heard())
	})
}

func TestAckGroups_Panic_IsAnErrorOfTheGroup(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		g.fail = func(item int64) error { panic("item " + strconv.FormatInt(item, 10)) }
		g.calls(1)
		g.p.inFlight.Wait()
		require.ErrorContains(t, g.heard()[1], "panic: item 1")
		require.True(t, outcomeUnknown(g.heard()[1]) && retryable(g.heard()[1]), "it may have come after the commit")
		g.fail = nil
		g.calls(2)
		g.p.inFlight.Wait()
		require.NoError(t, g.heard()[2])
	})
}

func TestAckGroups_CallerLeaves_TakesAlongWhatHasNotStarted(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		ctx, cancel := context.WithCancel(context.Background())
		g.calls(1)
		g.call(ctx, 2, "")
		g.calls(3)
		cancel()
		g.p.inFlight.Wait()
		require.Equal(t, [][]int64{{1}, {3}}, g.sent())
		require.Equal(t, map[int64]error{1: nil, 2: context.Canceled, 3: nil}, g.heard())
	})
}

func TestAckGroups_CallersLeave_GroupGoesOnForTheOthers(t *testing.T) {
	inGroups(t, func(t *testing.T, g *groupTest) {
		ctx, cancel := context.WithCancel(context.Background())
		g.calls(1)
		g.call(ctx, 2, "")
		g.calls(3)
		time.Sleep(g.took)
		synctest.Wait()
		require.Equal(t, [][]int64{{1}, {2, 3}}, g.sent())
		cancel()
		g.p.inFlight.Wait()
		require.Equal(t, map[int64]error{1: nil, 2: unknownOutcome{context.Canceled}, 3: nil}, g.heard(), "2 was on its way")
		require.Empty(t, g.cut)

		g.took = time.Hour
		began := time.Now()
		ctx, cancel = context.WithCancel(context.Background())
		g.call(ctx, 4, "")
		cancel()
		g.p.inFlight.Wait()
		require.Equal(t, []int{2}, g.cut, "nobody waits for it")
		require.Zero(t, time.Since(began))
	})
}
