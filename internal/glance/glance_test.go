package glance_test

import (
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestQueues_TellsWhatTheVerbsTell(t *testing.T) {
	t.Parallel()
	p := pgwaketest.New(t, &pgwake.Config{Mode: pgwake.ModePolling})
	for _, item := range []pgwake.WorkItem{{Name: "now"}, {Name: "gpu", Tag: "gpu"}, {Name: "dead"}} {
		_, err := p.EnqueueForWorker(t.Context(), item, &pgwake.EnqueueOptions{Namespace: "shop", Priority: len(item.Name)})
		require.NoError(t, err)
	}
	_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "o", ExecutionID: 1}, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.NoError(t, err)
	dead, err := p.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, p.DeadLetterWorkItem(t.Context(), dead.LockToken, "poison", ""))
	require.NoError(t, p.Pause(t.Context(), pgwake.Worker, "shop"))
	require.NoError(t, p.Pause(t.Context(), pgwake.Orchestrator, pgwake.AllNamespaces))

	pic, err := glance.Queues(t.Context(), p)
	require.NoError(t, err)
	depths, err := p.GetQueueDepths(t.Context())
	require.NoError(t, err)
	require.Len(t, pic.Depths, len(depths))
	var oldest time.Time
	for i, d := range depths {
		if d.Due > 0 {
			require.WithinDuration(t, p.LocalTime(d.OldestDue), pic.Depths[i].OldestDue, time.Second)
		}
		if d.Due > 0 && (oldest.IsZero() || pic.Depths[i].OldestDue.Before(oldest)) {
			oldest = pic.Depths[i].OldestDue
		}
		d.OldestDue, pic.Depths[i].OldestDue = time.Time{}, time.Time{}
		require.Equal(t, d, pic.Depths[i])
	}
	require.Equal(t, oldest, pic.Oldest)
	require.EqualValues(t, 1, pic.Letters)
	require.Equal(t, []string{"worker shop", "orchestrator *"}, pic.Paused)
}

func TestChangeOf_CountsOnlyNodesThatWereThereBefore(t *testing.T) {
	t.Parallel()
	at := time.Now()
	report := func(key int32, looks, notified, items int64) pgwake.NodeReport {
		r := pgwake.NodeReport{Key: key}
		r.Stats.Worker = pgwake.QueueStats{Looks: looks, Items: items, Finds: map[string]int64{"notify": notified}}
		r.Stats.Worker.WakeLatency[3] = notified
		return r
	}
	from := glance.Picture{At: at, Came: 10}.With(nil, []pgwake.NodeReport{report(1, 100, 10, 1)})
	to := glance.Picture{At: at.Add(2 * time.Second), Came: 30}.With(nil, []pgwake.NodeReport{report(1, 120, 16, 7), report(2, 500, 500, 500)})
	c := glance.ChangeOf(from, to)
	require.InDelta(t, 10, c.Came, 0.001)
	require.InDelta(t, 10, c.Looks, 0.001)
	require.InDelta(t, 7, c.Idle, 0.001)
	require.InDelta(t, 3, c.Items, 0.001)
	require.Equal(t, map[string]int64{"notify": 6}, c.Found)
	require.Equal(t, 8*time.Microsecond, c.Latency.Quantile(0.5))
	require.Equal(t, map[string]int64{"notify": 516}, to.Reasons())
	require.Zero(t, glance.ChangeOf(to, to).Came, "no time has passed")
}

func TestWords_OfOthers_CannotHideAnything(t *testing.T) {
	t.Parallel()
	require.Equal(t, `a\u202eb\x1b[2J\n`, glance.OneLine("a\u202eb\x1b[2J\n"))
	require.Equal(t, `\x7f\u009b2J`, glance.OneLine("\x7f\u009b2J"))
	require.Equal(t, "a\n\tb\\x00", glance.Lines("a\n\tb\x00"))
	require.Equal(t, "שלום", glance.OneLine("שלום"))
	require.Equal(t, "שלום 7\u200e", glance.LeftToRight("שלום 7"))
	require.Equal(t, "name 7", glance.LeftToRight("name 7"))
	require.Equal(t, "ab…", glance.Short("abcdef", 3))
	require.Len(t, []rune(glance.Short(strings.Repeat("\u202e", 1<<20), 10)), 10)
	require.Equal(t, "1m01s", glance.Span(61*time.Second))
	require.Equal(t, "in 2s", glance.DueIn(time.Unix(12, 0), time.Unix(10, 0)))
	require.Equal(t, "1.5 kB", glance.Size(1500))
	require.Equal(t, "-", glance.Bound(0))
}
