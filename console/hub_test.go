package console

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/glance"
	"github.com/stretchr/testify/require"
)

// This file answers: which moment may a page begin with, while looking takes long?

func TestHub_MomentThatAPageBeginsWith(t *testing.T) {
	t.Parallel()
	const never = -1
	for name, of := range map[string]struct {
		seen, stirred time.Duration // so long ago
		took          time.Duration // to look
		shown         bool
		waits         time.Duration
	}{
		"nobody has looked":                              {never, time.Hour, 0, false, brief},
		"just now":                                       {0, time.Hour, 0, true, 0},
		"before what was just done":                      {time.Second, 0, 0, true, brief},
		"while that was being done":                      {0, time.Second / 2, time.Second, true, brief},
		"a little while ago":                             {stale / 2, time.Hour, 0, true, brief},
		"a little while ago, and it takes long":          {stale / 2, time.Hour, time.Second, true, 0},
		"so lately that it takes too much to look again": {3 * time.Second, time.Hour, time.Second, true, 0},
		"when others looked":                             {2 * stale, time.Hour, 0, false, brief},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHub(nil)
				looking := make(chan struct{})
				h.looking = looking // somebody does, for ever
				defer close(looking)
				h.stirred = time.Now().Add(-of.stirred)
				if of.seen != never {
					h.now = &moment{Picture: glance.Picture{At: time.Now().Add(-of.seen)}}
					h.began, h.took = h.now.At.Add(-of.took), of.took
				}
				began := time.Now()
				require.Equal(t, of.shown, h.moment(t.Context()) != nil)
				require.Equal(t, of.waits, time.Since(began))
			})
		})
	}
}

// Pages that are opened one after the other have no more time taken for looking than one that is open.
func TestHub_LookingTakesLong_PagesThatAreOpenedDoNotHaveItBeginAnew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHub(nil)
		h.began, h.took = time.Now().Add(-time.Second), time.Second
		h.now = &moment{Picture: glance.Picture{At: time.Now()}}
		began := time.Now()
		require.Same(t, h.now, h.moment(t.Context()))
		require.Nil(t, h.looking)
		h.rest(t.Context())
		require.Equal(t, (share-1)*time.Second, time.Since(began))
	})
}
