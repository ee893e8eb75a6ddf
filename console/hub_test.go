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
		shown         bool
		waits         time.Duration
	}{
		"nobody has looked":         {never, time.Hour, false, brief},
		"just now":                  {0, time.Hour, true, 0},
		"before what was just done": {time.Second, 0, true, brief},
		"a little while ago":        {stale / 2, time.Hour, true, brief},
		"when others looked":        {2 * stale, time.Hour, false, brief},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHub(nil)
				h.looking = make(chan struct{})
				h.stirred = time.Now().Add(-of.stirred)
				if of.seen != never {
					h.now = &moment{Picture: glance.Picture{At: time.Now().Add(-of.seen)}}
				}
				began := time.Now()
				require.Equal(t, of.shown, h.moment(t.Context()) != nil)
				require.Equal(t, of.waits, time.Since(began))
			})
		})
	}
}
