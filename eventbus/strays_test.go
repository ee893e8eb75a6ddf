package eventbus_test

import (
	"testing"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: does what others had in hand when a group or a subscription was removed go all the same, and reach nobody whose it is not?

// openTransaction is one of anybody, which is older than what comes after: nothing is over as long as it is open.
func (l *lab) openTransaction() { l.t.Helper(); l.holding(`SELECT pg_current_xact_id()`) }

// replayed runs the replay of the only group to its end, or until it is not behind any more.
func (l *lab) replayed(until string) {
	l.t.Helper()
	l.afterOthers(func() bool {
		l.exec(`SELECT replay_some(replay_id) FROM event_replays`)
		return one[bool](l, `SELECT `+until+` FROM event_groups JOIN event_replays USING (group_id)`)
	}, "it is replayed")
}

// deliveries are the events whose deliveries are in the queue, or in a line.
func (l *lab) deliveries() []int64 {
	l.t.Helper()
	return all[int64](l, `SELECT (input->>'event_id')::bigint FROM worker_queue WHERE name <> 'eventbus|replay'
		UNION ALL SELECT event_id FROM event_lines WHERE item_id IS NULL ORDER BY 1`)
}

// A key that waits for the end of a replay has no item by which it could be found.
func TestDeleteGroup_KeyThatHasNoItemIsLocked_NothingIsLeft(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]string{"with a subscription": `SELECT`, "without one": `SELECT unsubscribe(NULL, 'g', 'a')`} {
		t.Run("of a group "+name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.emitKey("a", "x")
			l.log(1)
			require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
			l.emitKey("a", "k")
			l.replayed(`NOT behind`)
			require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_keys WHERE item_id IS NULL`))
			emits := &emission{l, l.begin()}
			emits.emit("k")
			emits.exec(`SET CONSTRAINTS ALL IMMEDIATE`) // as in the middle of its commit
			l.exec(before)
			l.exec(deleteGroup)
			require.NoError(t, emits.tx.Commit(l.within()))
			l.exec(`DELETE FROM worker_queue WHERE name = 'eventbus|replay'`)
			l.gone()
			require.False(t, one[bool](l, `SELECT has_deliveries('-infinity', 'infinity')`), "nothing keeps the log")
		})
	}
}

// A letter that waits in the line of a key is in the hands of somebody who is going to ask for the key.
func TestDeleteGroup_LetterThatWaitsIsBeingRemoved_NoDeadlockAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.emitKey("a", "k")
	l.bury(tagA, "no")
	l.emitKey("a", "k")
	_, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	removes := l.holding(`DELETE FROM worker_queue WHERE visible_at > '9999-01-01'`)
	deletes := l.run(deleteGroup)
	require.NoError(t, removes.Commit(l.within()))
	deletes.end(t)
	l.gone()
}

// What was passed over for a lock is looked at again as soon as that has ended, and not when all transactions have.
func TestUnsubscribe_KeyIsLockedAndAnOlderTransactionIsOpen_NextIsInTheQueue(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	l.emitKey("a", "k")
	l.emitKey("b", "k")
	l.openTransaction()
	emits := l.holding(`SELECT FROM event_keys FOR UPDATE`)
	l.exec(`SELECT unsubscribe(NULL, 'g', 'a')`)
	l.exec(`SELECT remove_strays()`)
	require.Equal(t, []string{"a " + tagA}, l.queued())
	require.NoError(t, emits.Commit(l.within()))
	l.exec(`SELECT remove_strays()`)
	require.Equal(t, []string{"b eventbus/g|b"}, l.queued())
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_retirements`), "others may come")
}

func TestSubscribe_GroupIsMadeAnewAndAKeyWasLocked_EachEventOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ first, second string }{
		"until it is made":      {`COMMIT`, `SELECT`},
		"until strays are gone": {`SELECT`, `COMMIT`},
	} {
		for _, pattern := range []string{"a", "#"} {
			t.Run(name+", "+pattern, func(t *testing.T) {
				t.Parallel()
				l := newLab(t, nil)
				l.subscribe("g", "a")
				first, second := l.emitKey("a", "k"), l.emitKey("a", "k")
				l.log(2)
				l.openTransaction()
				emits := l.holding(`SELECT FROM event_keys FOR UPDATE`)
				l.exec(deleteGroup)
				require.Equal(t, []string{"a eventbus/|1"}, l.queued(), "no node claims it")
				_, err := emits.Exec(l.within(), c.first)
				require.NoError(t, err)
				for range 2 { // each node says so
					require.NoError(t, l.Subscribe(l.within(), "g", []string{pattern}, &eventbus.SubscribeOptions{FromBeginning: true}))
				}
				l.exec(`UPDATE event_replays SET horizon = horizon()`)
				_, err = emits.Exec(l.within(), c.second)
				require.NoError(t, err)
				if c.first == `SELECT` {
					l.exec(`SELECT remove_strays()`)
				}
				require.Empty(t, l.deliveries(), "what the former group had is not for this one")
				l.exec(`SELECT replay_some(replay_id) FROM event_replays`)
				l.exec(`SELECT remove_strays()`)
				require.Equal(t, []int64{first, second}, l.deliveries())
				require.Equal(t, []int64{first}, l.heads("k"))
				require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_keys`))
			})
		}
	}
}

func TestSubscribe_GroupIsMadeAnewAndAnEmitWithoutAKeyIsUnderWay_EachEventOnceAndLettersStay(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"a", "#"} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			letter := l.emit("a")
			l.bury(tagA, "no")
			tx := l.begin()
			stray, err := l.WithTx(tx).Emit(l.within(), "a", nil, nil)
			require.NoError(t, err)
			l.exec(deleteGroup)
			l.subscribe("g", pattern)
			own := l.emit("a")
			_, err = l.Redrive(l.within(), nil)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(l.within()))
			require.Equal(t, []int64{letter, stray, own}, l.deliveries())
			l.exec(`SELECT remove_strays()`)
			require.Equal(t, []int64{letter, own}, l.deliveries(), "the one that did not know of this group is not for it")
			l.afterOthers(func() bool {
				l.exec(`SELECT remove_strays()`)
				return one[int](l, `SELECT count(*) FROM event_retirements`) == 0
			}, "the subscription is retired")
			require.Equal(t, []int64{letter, own}, l.deliveries())
		})
	}
}

func TestSubscribe_GroupIsMadeAnewAndTheClockGoesBack_HasWhatIsReplayed(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"a", "#"} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			first, second := l.emit("a"), l.emit("a")
			l.log(2)
			l.openTransaction() // so the retirement lasts
			l.exec(deleteGroup)
			require.NoError(t, l.Subscribe(l.within(), "g", []string{pattern}, &eventbus.SubscribeOptions{FromBeginning: true}))
			l.exec(`UPDATE event_groups SET created_at = created_at + interval '1 hour'`) // the clock has gone back since
			l.exec(`UPDATE event_replays SET horizon = horizon()`)
			l.exec(`SELECT replay_some(replay_id) FROM event_replays`)
			require.Equal(t, []int64{first, second}, l.deliveries())
			l.exec(`SELECT remove_strays()`)
			require.Equal(t, []int64{first, second}, l.deliveries())
		})
	}
}

// Logical replication brings rows, and not sequences.
func TestKeys_SequenceOfPlacesIsBehindTheRows_NoneIsLeftBehind(t *testing.T) {
	t.Parallel()
	for name, next := range map[string]int{"also behind what has left": 1, "behind what waits alone": 500} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			l.emitKey("a", "k")
			l.bury(tagA, "no")
			l.exec(`SELECT setval('event_lines_place_seq', 100)`)
			want := []int64{l.emitKey("a", "k")}
			l.exec(`SELECT setval('event_lines_place_seq', 1000)`)
			want = append(want, l.emitKey("a", "k"))
			l.exec(`SELECT setval('event_lines_place_seq', $1, false)`, next)
			want = append(want, l.emitKey("a", "k"))
			_, err := l.Redrive(l.within(), nil)
			require.NoError(t, err)
			want = append(want, want[0]-1, l.emitKey("a", "k"))
			for _, id := range want {
				require.Equal(t, []int64{id}, l.heads("k"))
				require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
			}
			require.Empty(t, l.queued())
			require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
		})
	}
}
