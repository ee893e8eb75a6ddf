package pgwake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHistogram_Quantile_IsTheUpperBoundOfItsBucket(t *testing.T) {
	var live histogram
	for _, d := range []time.Duration{0, 3 * time.Microsecond, 700 * time.Microsecond, time.Hour} {
		live.observe(d)
	}
	var h Histogram
	for i := range live.buckets {
		h[i] = live.buckets[i].Load()
	}
	require.Equal(t, time.Microsecond, h.Quantile(0))
	require.Equal(t, 4*time.Microsecond, h.Quantile(0.5))
	require.Equal(t, 1024*time.Microsecond, h.Quantile(0.9))
	require.Equal(t, time.Duration(1<<23)*time.Microsecond, h.Quantile(1))
	require.Zero(t, (&Histogram{}).Quantile(0.5))
}

func TestStats_FindsByTheSafetyNet_CountOnlyIfNothingAnnouncedThem(t *testing.T) {
	l := testLane()
	now := time.Now()
	l.now = func() time.Time { return now }
	found := report{found: 1, now: now}
	scout := func() token {
		l.signal(WakeScout)
		tok := l.tokens[0]
		l.tokens = nil
		return tok
	}

	tok := scout()
	l.endLook(l.beginLook(session{epoch: 1}), found, &tok, 1)
	now = now.Add(announceGrace / 2)
	l.signal(WakeNotify) // the notification was on its way
	now = now.Add(time.Second)
	l.audit()
	require.Zero(t, l.stats.unannounced[WakeScout].Load())
	l.endLook(l.beginLook(session{epoch: 1}), report{now: now}, nil, 1) // and whom it woke found nothing

	l.tokens = nil
	tok = scout()
	l.endLook(l.beginLook(session{epoch: 1}), found, &tok, 1)
	l.audit()
	require.Zero(t, l.stats.unannounced[WakeScout].Load(), "too early to tell")
	now = now.Add(announceGrace + 1)
	l.audit()
	require.EqualValues(t, 1, l.stats.unannounced[WakeScout].Load())
	l.signal(WakeNotify)
	require.EqualValues(t, 1, l.stats.unannounced[WakeScout].Load())

	// The notification came, and the scout overtook the dispatcher that it woke.
	l.tokens = nil
	tok = scout()
	l.endLook(l.beginLook(session{epoch: 1}), found, &tok, 1)
	now = now.Add(time.Second)
	l.audit()
	require.EqualValues(t, 1, l.stats.unannounced[WakeScout].Load())
}

// A lane that looks again at rows that others had locked may find what another lane was told of.
func TestStats_FindsBesideRowsThatWereLocked_CountOnlyIfTheLaneWasToBeTold(t *testing.T) {
	for _, c := range []struct {
		fanout  int
		settled bool
		want    int64
	}{{2, true, 0}, {0, false, 0}, {0, true, 1}} {
		l := testLane()
		now := time.Now()
		l.now = func() time.Time { return now }
		l.fanout, l.settled, l.settler = c.fanout, c.settled, &settler{bell: newBell()}
		l.endLook(l.beginLook(session{epoch: 1}), report{now: now, earliest: now}, nil, 1)
		now = now.Add(maxRetryInterval)
		l.fire(nil)
		require.Len(t, l.tokens, 1)
		tok := l.tokens[0]
		l.tokens = nil
		l.endLook(l.beginLook(session{epoch: 1}), report{found: 1, now: now}, &tok, 1)
		now = now.Add(announceGrace + 1)
		l.audit()
		require.Equal(t, c.want, l.stats.unannounced[WakeScout].Load(), "%+v", c)
	}
}
