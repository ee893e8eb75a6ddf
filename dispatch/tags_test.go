package dispatch_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

func TestSetTags_WhileAFetchWaits_ItAsksAnewForThose(t *testing.T) {
	t.Parallel()
	p := pgwaketest.New(t, nil)
	handled := make(chan string, 2)
	d := dispatch.New(p, &dispatch.Config{Tags: pgwake.Tags("none")})
	d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		handled <- item.Tag
		return nil, nil
	})
	ctx, end := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- d.Run(ctx) }()
	for _, tag := range []string{"a", "b"} {
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Tag: tag}, nil)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return p.Stats().Worker.Parked == 1 }, 10*time.Second, time.Millisecond, "it waits for others")
		d.SetTags(pgwake.Tags(tag))
		require.Equal(t, tag, <-handled)
	}
	end()
	require.NoError(t, <-ran)
}
