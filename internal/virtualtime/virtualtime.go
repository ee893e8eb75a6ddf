// Package virtualtime runs tests in bubbles of [testing/synctest].
package virtualtime

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// Test is [synctest.Test], on one processor as long as the race detector is on.
//
// A bubble has one context of the race detector for all its timers. On two processors two of them may fire in one moment, one out
// of the heap and one as its channel is looked at, and a context that two use crashes the process (go.dev/issue/78156). The
// detector sees as many races on one processor: it goes by what happens before what, and not by the clock.
func Test(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if raceDetector {
		oneProcessor()
		defer allProcessors()
	}
	synctest.Test(t, f)
}

// Seeds are those of a simulation that has n: with the race detector, which makes one fifteen times as slow, a quarter of them.
// make model-quick has all.
func Seeds(n uint64) uint64 {
	if raceDetector {
		return (n + 3) / 4
	}
	return n
}

// A processor is a matter of the whole process, and tests may be parallel.
var (
	mu       sync.Mutex
	bubbles  int
	ordinary int
)

func oneProcessor() {
	mu.Lock()
	defer mu.Unlock()
	if bubbles++; bubbles == 1 {
		ordinary = runtime.GOMAXPROCS(1)
	}
}

func allProcessors() {
	mu.Lock()
	defer mu.Unlock()
	if bubbles--; bubbles == 0 {
		runtime.GOMAXPROCS(ordinary)
	}
}
