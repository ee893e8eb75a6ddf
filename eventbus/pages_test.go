package eventbus_test

import (
	"context"
	"math"
	"testing"

	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: what does the end of a delivery read of a long line?

// pages are those that a statement, which is undone, reads once it is planned: what other tests make or drop has it planned anew, which reads catalogs. So
// it is the fewest, once they have been so few three times.
func (l *lab) pages(statement string, args ...any) int64 {
	l.t.Helper()
	read := int64(math.MaxInt64)
	for tries, same := 0, 0; same < 3 && tries < 50; tries++ {
		tx, err := l.conn.Begin(l.within())
		require.NoError(l.t, err)
		var plan []struct {
			Plan struct {
				Hit  int64 `json:"Shared Hit Blocks"`
				Read int64 `json:"Shared Read Blocks"`
			}
		}
		err = tx.QueryRow(l.within(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) `+statement, args...).Scan(&plan)
		_ = tx.Rollback(context.Background())
		require.NoError(l.t, err, statement)
		switch now := plan[0].Plan.Hit + plan[0].Plan.Read; {
		case now < read:
			read, same = now, 1
		case now == read:
			same++
		}
	}
	l.t.Logf("%d pages: %s", read, statement)
	return read
}

// line has so many deliveries of a type wait in the line of k, of which the events are not in the log.
func (l *lab) line(eventType string, n int) {
	l.t.Helper()
	l.exec(`INSERT INTO event_lines (group_id, key, event_id, emitted_at, event_type) SELECT group_id, 'k', 0, now(), $1 FROM event_groups, generate_series(1, $2)`, eventType, n)
}

// walked has heartbeats walk over what nobody gets any more, until no key is at rest.
func (l *lab) walked() {
	l.t.Helper()
	l.eventually(func() bool {
		l.exec(`SELECT remove_strays()`)
		return one[int](l, `SELECT count(*) FROM event_keys WHERE item_id IS NULL`) == 0
	}, "no key is at rest")
}

// oldSnapshot has a transaction see from now on what is there, and nobody can remove that.
const oldSnapshot = `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT FROM event_lines LIMIT 1`

const settle = `SELECT next_of_key(group_id, key) FROM event_keys`

// Neither those that wait behind the next one nor what is left of those that were before it are read, also while nobody can remove that.
func TestNextOfKey_TwentyThousandInTheLine_ReadsTheNextAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`ALTER TABLE event_lines SET (autovacuum_enabled = off)`)
	l.undone(`ALTER TABLE event_lines RESET (autovacuum_enabled)`)
	l.subscribe("g", "a")
	l.emitKey("a", "k")
	l.line("b", 19_000) // for nobody any more
	for range 3 {
		l.emitKey("a", "k")
	}
	l.line("a", 1_000)
	l.exec(`ANALYZE event_lines, event_keys`)
	l.holding(oldSnapshot)
	l.exec(`DELETE FROM worker_queue`)
	l.walked() // over those
	require.Equal(t, 1_002, one[int](l, `SELECT count(*) FROM event_lines`))
	require.Less(t, l.pages(settle), int64(150))
	l.exec(`VACUUM event_keys`)
	l.exec(`DELETE FROM worker_queue`)
	require.Less(t, l.pages(settle), int64(150))
}

// Of a group that is behind none is read that is not to come yet.
func TestNextOfKey_GroupIsBehindAndTwentyThousandWait_ReadsNoneOfThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.emitKey("a", "k")
	l.exec(`UPDATE event_groups SET behind = true`)
	l.line("a", 20_000)
	l.exec(`ANALYZE event_lines, event_keys`)
	require.Less(t, l.pages(settle), int64(150))
	require.Equal(t, 20_000, one[int](l, `SELECT count(*) FROM event_lines`))
}

// A key that had a long line, and has none any more, does not pay for it.
func TestNextOfKey_KeyHadALongLineBefore_ReadsTheNextAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`ALTER TABLE event_lines SET (autovacuum_enabled = off)`)
	l.undone(`ALTER TABLE event_lines RESET (autovacuum_enabled)`)
	l.subscribe("g", "a")
	l.holding(oldSnapshot)
	l.emitKey("a", "k")
	l.line("b", 19_000)
	l.exec(`DELETE FROM worker_queue`)
	l.walked()
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
	l.emitKey("a", "k")
	l.emitKey("a", "k")
	require.Less(t, l.pages(settle), int64(150))
}

// A step that read all that is left of the log, and there is one for each 500 of it, would take hours to deliver a long one.
func TestReplaySome_LogIsLong_AStepReadsWhatItDelivers(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]string{
		"from the beginning": `SELECT subscribe(NULL, 'g', '{a}', true)`,
		"of all":             `SELECT subscribe(NULL, 'g', '{a}'), replay_events(NULL, 'g')`,
		"up to the end":      `SELECT subscribe(NULL, 'g', '{a}'), replay_events(NULL, 'g', 1, 1000000000, '2020-01-01', '2100-01-01')`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			read := func() int64 {
				l.exec(begin)
				l.afterOthers(func() bool {
					return one[bool](l, `SELECT bool_and(xact < pg_snapshot_xmin(pg_current_snapshot())) FROM event_log`)
				}, "all that has emitted is over")
				pages := l.pages(`SELECT replay_some(max(replay_id), 10) FROM event_replays`)
				l.exec(`SELECT delete_group(NULL, 'g')`)
				return pages
			}
			grow := func(n int) {
				l.exec(`SELECT emit_many(NULL, array_fill('a'::text, ARRAY[$1::integer]), array_fill('{}'::text, ARRAY[$1::integer]))`, n)
				l.exec(`ANALYZE event_log`)
			}
			grow(1000)
			few := read()
			grow(testsize.Of(14_000, 29_000))
			require.Less(t, read(), few+150, "of some 450, or 900, that there are")
		})
	}
}
