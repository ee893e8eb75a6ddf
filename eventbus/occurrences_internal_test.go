package eventbus

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// Statements that get no answer hold up those that wait for the next one. A lease may end meanwhile, and its item come by another claim; and a handler
// leave.
func TestOccurrences_StatementsGetNoAnswer_AnItemWaitsOnceAndForNobodyWhoHasLeft(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var carried [][]int64
		had := func() [][]int64 { mu.Lock(); defer mu.Unlock(); return slices.Clone(carried) }
		goOn := make(chan struct{})
		o := &occurrences{many: func(_ context.Context, items []int64, _, _ []string) ([]bool, error) {
			mu.Lock()
			carried = append(carried, slices.Clone(items))
			mu.Unlock()
			<-goOn
			return make([]bool, len(items)), nil
		}}
		leave := o.take()
		defer leave()
		var left []context.CancelFunc
		returned := make(chan int64, 10)
		wait := func(item int64) {
			ctx, cancel := context.WithCancel(t.Context())
			left = append(left, cancel)
			leave := o.take()
			go func() {
				defer leave()
				o.withOthers(ctx, item, "claim", "schedule")
				returned <- item
			}()
			time.Sleep(time.Second)
		}
		wait(1)
		wait(2)
		require.Len(t, had(), 2, "there are so many statements at a time")
		wait(3)
		wait(4)
		require.Empty(t, returned)
		wait(3)
		require.EqualValues(t, 3, <-returned, "it waits already")
		left[3]()
		require.EqualValues(t, 4, <-returned)
		close(goOn)
		for range 3 {
			<-returned
		}
		require.Equal(t, [][]int64{{1}, {2}, {3}}, had())
		for _, leave := range left {
			leave()
		}
	})
}
