package pgwake

import (
	"context"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: which enqueues go directly, which together, and when? What groups do else is in
// ackgroup_internal_test.go.

// enqueueTest is the groups of enqueues without a database, on virtual time. Items are told apart by name.
type enqueueTest struct {
	*groups[*groupedEnqueue]
	took     map[string]time.Duration // by an item, or the group that it begins; 1 ms unless told
	panics   string                   // the item that is made with a panic
	made     []string                 // directly, in the order of their beginning
	together [][]string               // groups, likewise
}

func inEnqueueGroups(t *testing.T, play func(t *testing.T, e *enqueueTest)) {
	virtualtime.Test(t, func(t *testing.T) {
		p := &Provider{}
		p.abort, p.abortNow = context.WithCancel(context.Background())
		defer p.abortNow()
		e := &enqueueTest{groups: newEnqueueGroups(p), took: make(map[string]time.Duration)}
		make := func(ctx context.Context, first string) error {
			took, ok := e.took[first]
			if !ok {
				took = time.Millisecond
			}
			select {
			case <-time.After(took):
			case <-ctx.Done():
				return ctx.Err()
			}
			if first == e.panics {
				panic(first)
			}
			return nil
		}
		e.alone = func(ctx context.Context, c *groupedEnqueue) error {
			e.mu.Lock()
			e.made = append(e.made, c.item.Name)
			e.mu.Unlock()
			return make(ctx, c.item.Name)
		}
		e.transact = func(ctx context.Context, calls []*groupedEnqueue, _ []error) error {
			var names []string
			for _, c := range calls {
				names = append(names, c.item.Name)
			}
			e.mu.Lock()
			e.together = append(e.together, names)
			e.mu.Unlock()
			return make(ctx, names[0])
		}
		play(t, e)
		p.inFlight.Wait()
		require.Zero(t, e.flying)
		require.Zero(t, e.singles)
		require.Empty(t, e.waiting)
	})
}

// alones returns what went directly so far, sent the groups, and onTheirWay how many calls go directly at this moment.
func (e *enqueueTest) alones() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.made)
}

func (e *enqueueTest) sent() [][]string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.together)
}

func (e *enqueueTest) onTheirWay() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.singles
}

// calls makes an enqueue of each in a goroutine, one after the other has begun or waits.
func (e *enqueueTest) calls(t *testing.T, names ...string) {
	for _, name := range names {
		e.p.inFlight.Go(func() {
			defer func() {
				if p := recover(); p != nil && p != e.panics {
					panic(p)
				}
			}()
			require.NoError(t, e.do(context.Background(), &groupedEnqueue{item: WorkEnqueue{WorkItem: WorkItem{Name: name}}}))
		})
		synctest.Wait()
	}
}

func (e *enqueueTest) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestEnqueueGroups_FewAtATime_GoByThemselves(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		e.took = map[string]time.Duration{"a": 2 * time.Millisecond, "b": time.Hour, "c": time.Hour, "d": time.Hour}
		e.calls(t, "a", "b", "c", "d")
		require.Equal(t, []string{"a", "b", "c", "d"}, e.alones())
		e.calls(t, "e")
		require.Len(t, e.alones(), 4)
		e.pass(2 * time.Millisecond)
		require.Equal(t, []string{"a", "b", "c", "d", "e"}, e.alones())
		require.Empty(t, e.sent())
	})
}

func TestEnqueueGroups_MoreThanAFew_GoTogether_UntilTheyAreFewAgain(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		e.took = map[string]time.Duration{"d": 3 * time.Millisecond, "1": 4 * time.Millisecond}
		e.calls(t, "a", "b", "c", "d", "1", "2", "3", "4")
		e.pass(time.Millisecond) // all but d have ended
		require.Equal(t, [][]string{{"1", "2", "3", "4"}}, e.sent())
		e.pass(2 * time.Millisecond) // so has d
		e.calls(t, "5", "6")
		require.Len(t, e.alones(), 4, "a group is on its way")
		e.pass(2 * time.Millisecond)
		require.ElementsMatch(t, []string{"a", "b", "c", "d", "5", "6"}, e.alones())
		require.Len(t, e.sent(), 1)
	})
}

func TestEnqueueGroups_ThoseAheadAreStuck_TheNextGoAfterThePause(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		for _, name := range []string{"a", "b", "c", "d", "1", "2", "3", "4"} {
			e.took[name] = time.Hour
		}
		e.calls(t, "a", "b", "c", "d")
		for i, name := range []string{"1", "2", "3", "4"} {
			e.calls(t, name, name+" too")
			require.Len(t, e.sent(), i)
			e.pass(groupPause)
			require.Len(t, e.sent(), i+1)
		}
		e.calls(t, "5")
		e.pass(groupPatience - 4*groupPause)
		require.Len(t, e.sent(), maxGroups)
		e.pass(time.Hour)
		require.Contains(t, e.sent(), []string{"5"})
	})
}

// Their connections have lost the other end without a sign, and their callers wait for ever.
func TestEnqueueGroups_ThoseAheadHang_TheOthersGoOn(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		const forEver = 24 * time.Hour
		for _, name := range []string{"a", "b", "c", "d", "1", "2", "3", "4"} {
			e.took[name] = forEver
		}
		e.calls(t, "a", "b", "c", "d")
		for _, name := range []string{"1", "2", "3", "4"} {
			e.calls(t, name)
			e.pass(groupPause)
		}
		began := time.Now()
		e.calls(t, "5", "5 too")
		e.pass(groupPatience) // since the last of them has begun
		require.Contains(t, e.sent(), []string{"5", "5 too"})
		for i := range 2 * maxGroups { // from here on nobody waits for those
			name := strconv.Itoa(6 + i)
			e.calls(t, name)
			e.pass(groupPause)
			require.Contains(t, e.sent(), []string{name})
		}
		require.Len(t, e.alones(), directEnqueues, "so many hang, and no more")

		// Some that come later hang as well: again four of them hold up others, and for as long.
		for _, name := range []string{"w", "x", "y", "z"} {
			e.took[name] = forEver
			e.calls(t, name)
			e.pass(groupPause)
		}
		sent := len(e.sent())
		e.calls(t, "last")
		e.pass(groupPatience - 4*groupPause)
		require.Len(t, e.sent(), sent)
		e.pass(4 * groupPause)
		require.Contains(t, e.sent(), []string{"last"})
		require.Less(t, time.Since(began), time.Minute)
		e.pass(forEver) // after which those hear of their own
	})
}

// As many groups as a slow moment has brought about would go on for good, each of them small, if the end of one let the
// next start.
func TestEnqueueGroups_OneOfManyEnds_TheNextWaitsForFewer(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		e.took = map[string]time.Duration{"d": 15 * time.Millisecond, "1": 12 * time.Millisecond, "2": time.Second}
		for _, name := range []string{"a", "b", "c"} {
			e.took[name] = 7 * time.Millisecond
		}
		e.calls(t, "a", "b", "c", "d", "1")
		e.pass(groupPause)
		e.calls(t, "2", "too") // 5 ms
		e.pass(groupPause)
		require.Equal(t, [][]string{{"1"}, {"2", "too"}}, e.sent()) // 10 ms; d is on its way as well
		e.pass(4 * time.Millisecond)
		e.calls(t, "3")
		e.pass(2 * time.Millisecond) // d has ended
		require.Len(t, e.sent(), 2)
		e.pass(time.Millisecond) // so has 1
		require.Equal(t, [][]string{{"1"}, {"2", "too"}, {"3"}}, e.sent())
	})
}

func TestEnqueueGroups_PanicOfOneAlone_GivesItsPlaceBack(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		e.panics = "a"
		for range directEnqueues {
			e.calls(t, "a")
		}
		e.pass(time.Millisecond)
		require.Zero(t, e.onTheirWay())
		e.calls(t, "b")
		require.Equal(t, []string{"a", "a", "a", "a", "b"}, e.alones())
	})
}

func TestEnqueueGroups_CallerLeaves_TakesAlongWhatHasNotStarted(t *testing.T) {
	inEnqueueGroups(t, func(t *testing.T, e *enqueueTest) {
		ctx, cancel := context.WithCancel(context.Background())
		e.calls(t, "a", "b", "c", "d", "1")
		left := make(chan error, 1)
		e.p.inFlight.Go(func() {
			left <- e.do(ctx, &groupedEnqueue{item: WorkEnqueue{WorkItem: WorkItem{Name: "2"}}})
		})
		synctest.Wait()
		e.calls(t, "3", "4", "5", "6")
		cancel()
		require.ErrorIs(t, <-left, context.Canceled)
		e.pass(time.Millisecond)
		require.Equal(t, []string{"a", "b", "c", "d"}, e.alones())
		require.Equal(t, [][]string{{"1", "3", "4", "5", "6"}}, e.sent())
	})
}
