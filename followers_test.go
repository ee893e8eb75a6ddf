package pgwake

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: are those who look at a node told what it does, also after the goroutine that hears them has panicked?

func TestFollowers_ListenerPanicsAfterNews_WhoAsksAgainIsTold(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		f := &e.listener.followers
		said := make(chan string, 10)
		f.say = func(_ []string, payload string) { said <- payload }
		e.changed()
		require.Empty(t, said, "nobody has asked")
		for range 2 {
			f.follow("a")
			e.changed()
			require.Equal(t, stirs, <-said)
			f.end() // as when it panics
			e.changed()
			require.Empty(t, said, "they are forgotten")
		}
		f.follow("a")
		e.changed()
		time.Sleep(followedFor)
		synctest.Wait()
		require.Len(t, said, 2, "that it has done something, and how it is since")
	})
}
