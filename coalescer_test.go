package pgwake

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The first few at once, the rest merged: many enqueues within an interval reach the other nodes in few
// notifications, and none is forgotten.
func TestCoalescer_ManyEnqueuesAtOnce_AreTheFewestNotifications(t *testing.T) {
	p := testProvider(t, Config{CoalesceInterval: 300 * time.Millisecond})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	somebodyWaits(t, ear)
	began := time.Now()
	var producers sync.WaitGroup
	for range 4 {
		producers.Go(func() {
			for range 10 {
				_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil)
				require.NoError(t, err)
			}
		})
	}
	producers.Wait()
	var due int64
	var heard int
	for due < 40 {
		ctx, cancel := context.WithTimeout(t.Context(), patient)
		n, err := ear.WaitForNotification(ctx)
		cancel()
		require.NoError(t, err, "%d of 40 were announced", due)
		due += noteOf(t, said(t, n)).due
		heard++
	}
	require.LessOrEqual(t, heard, int(time.Since(began)/(300*time.Millisecond))+burst+1)
	require.EqualValues(t, 40, due)
}

func TestNote_Merge_SaysAtLeastWhatBothSay(t *testing.T) {
	early, late := time.Now(), time.Now().Add(time.Hour)
	require.Equal(t, note{due: 3, next: early, namespace: "a"},
		note{due: 1, next: late, namespace: "a"}.merge(note{due: 2, next: early, namespace: "a"}))
	require.Equal(t, note{due: 1, next: late},
		note{due: 1, namespace: "a"}.merge(note{next: late, namespace: "b"}))
	require.Equal(t, note{due: 1, next: late}, note{next: late, namespace: "a"}.merge(note{due: 1}))
}

// With the LISTEN connection gone the coalescer must still get through, by the pool.
func TestCoalescer_NotListening_TellsByThePool(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Orchestrator)
	somebodyWaits(t, ear)
	p.engine.coalescer.tell(Orchestrator, note{due: 1, namespace: "red"})
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	n, err := ear.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "1 0 red", said(t, n))
}

// Whatever else there is to say at that moment, that a node has begun to listen is a note of its own.
func TestCoalescer_NodeJoinsWithNewsPending_BothAreHeard(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	somebodyWaits(t, ear)
	c := p.engine.coalescer
	c.turn <- struct{}{} // as if something were being sent
	c.tell(Worker, note{due: 1, namespace: "red"})
	c.join()
	<-c.turn
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	var heard []note
	for len(heard) < 2 {
		n, err := ear.WaitForNotification(ctx)
		require.NoError(t, err, "heard only %v", heard)
		heard = append(heard, noteOf(t, said(t, n)))
	}
	require.ElementsMatch(t, []note{joined, {due: 1, namespace: "red"}}, heard)
}

// What was about to be said when the goroutine panicked is said by its next run.
func TestCoalescer_PanicWhileItSpeaks_SaysItAfterwards(t *testing.T) {
	bomb := make(chan struct{}, 1)
	bomb <- struct{}{}
	p := testProvider(t, Config{Mode: ModePolling, fault: func(at string) {
		if at == "flush" {
			select {
			case <-bomb:
				panic("injected")
			default:
			}
		}
	}})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	somebodyWaits(t, ear)
	p.engine.coalescer.tell(Worker, note{due: 1, namespace: "red"})
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	n, err := ear.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "1 0 red", said(t, n))
	require.EqualValues(t, 1, p.Stats().Panics)
}

// What the server refuses for what it says it would refuse for ever, and all that is merged into it.
func TestCoalescer_ServerRefusesWhatItSays_IsDroppedAndTheRestIsHeard(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	somebodyWaits(t, ear)
	c := p.engine.coalescer
	c.turn <- struct{}{}                                                                // as if something were being sent
	c.tell(Orchestrator, note{due: 1, namespace: strings.Repeat("x", 8000), all: true}) // longer than a notification may be
	c.join()
	<-c.turn
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	n, err := ear.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "0 0 *", said(t, n), "that it has joined is at no fault")
	c.tell(Worker, note{due: 1, namespace: "red"})
	n, err = ear.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "1 0 red", said(t, n))
}
