package virtualtime

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// With synctest.Test and the race detector, this crashes in its first hundred bubbles.
func TestTest_TimersFireAndChannelsAreLookedAtInOneMoment_NothingCrashes(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	for range 200 {
		Test(t, func(*testing.T) {
			for range 50 {
				go func() {
					<-time.After(time.Second)
					for range 20 {
						select {
						case <-time.NewTimer(0).C:
						default:
						}
					}
				}()
			}
			for range 200 {
				time.AfterFunc(time.Second, func() {})
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
		})
	}
	require.Equal(t, before, runtime.GOMAXPROCS(0))
}

func TestTest_SomeAreParallel_ProcessorsComeBackWithTheLast(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	t.Run("parallel", func(t *testing.T) {
		for range 10 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				Test(t, func(*testing.T) { time.Sleep(time.Second) })
			})
		}
	})
	require.Equal(t, before, runtime.GOMAXPROCS(0))
}
