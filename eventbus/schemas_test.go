package eventbus_test

import (
	"testing"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: does a transaction that emits in two schemas of a database emit in each as if there was no other?

// What is noted of a transaction is noted in settings, which all schemas share; ids of events are those of the schema.
func TestKeys_OneTransactionEmitsInTwoSchemas_EachHasItsLines(t *testing.T) {
	t.Parallel()
	for name, sizes := range map[string][2]int{"one and one": {1, 1}, "one and several": {1, 3}, "several and one": {3, 1}, "several and several": {3, 3}} {
		for order, highFirst := range map[string]bool{"high ids first": true, "low ids first": false} {
			for checked, check := range map[string]string{"at the commit": `SELECT`, "in between as well": `SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED`} {
				t.Run(name+", "+order+", "+checked, func(t *testing.T) {
					t.Parallel()
					high, low := newLab(t, nil), newLab(t, nil)
					high.exec(`SELECT setval('event_log_event_id_seq', 1000000)`)
					labs := []*lab{low, high}
					if highFirst {
						labs = []*lab{high, low}
					}
					tx := high.begin()
					var want [2][]int64
					for range 2 {
						for i, l := range labs {
							if len(want[i]) == 0 {
								l.subscribe("g", "a")
							}
							emissions := make([]eventbus.Emission, sizes[i])
							for j := range emissions {
								emissions[j] = eventbus.Emission{Type: "a", EmitOptions: eventbus.EmitOptions{Key: "k"}}
							}
							emitted, err := l.WithTx(tx).EmitMany(l.within(), emissions)
							require.NoError(t, err)
							for _, e := range emitted {
								want[i] = append(want[i], e.ID)
							}
							_, err = tx.Exec(l.within(), check)
							require.NoError(t, err)
						}
					}
					require.NoError(t, tx.Commit(high.within()))
					for i, l := range labs {
						require.Equal(t, want[i][:1], l.heads("k"))
						require.Equal(t, want[i][1:], all[int64](l, `SELECT event_id FROM event_lines ORDER BY place`))
						for _, id := range want[i] {
							require.Equal(t, []int64{id}, l.heads("k"))
							require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
						}
						require.Empty(t, l.queued())
					}
				})
			}
		}
	}
}
