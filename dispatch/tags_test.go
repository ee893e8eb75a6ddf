package dispatch_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

func TestSetTags_WhileAFetchWaits_ItAsksAnewForThose(t *testing.T) {
	t.Parallel()
	p := testschema.Core.New(t, nil)
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

// telling tells of the fetches of a Provider.
type telling struct {
	*pgwake.Provider
	began chan context.Context
}

func (p *telling) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	p.began <- ctx
	return p.Provider.FetchWorkItems(ctx, n, o)
}

func TestSetTags_ToWhatTheyAre_TheFetchGoesOn(t *testing.T) {
	t.Parallel()
	p := &telling{testschema.Core.New(t, nil), make(chan context.Context, 10)}
	d := dispatch.New(p, &dispatch.Config{Tags: pgwake.Tags("a", "b")})
	d.HandleOthers(func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) { return nil, nil })
	ctx, end := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- d.Run(ctx) }()
	fetch := <-p.began
	d.SetTags(pgwake.Tags("a", "b"))
	require.NoError(t, fetch.Err())
	d.SetTags(pgwake.Tags("a"))
	require.Error(t, fetch.Err())
	end()
	require.NoError(t, <-ran)
}
