package eventbus_test

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: how much of what nobody gets any more does one commit, or one heartbeat, deal with?

// A commit that had to remove all of a long line might take longer than it may, and be undone, each time anew.
func TestNextOfKey_ManyThatNobodyGetsAreBeforeTheNext_ACommitRemovesSomeAndHeartbeatsTheRest(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	l.emitKey("a", "k")
	l.line("b", 700)
	next := l.emitKey("a", "k")
	l.line("b", 300)
	last := l.emitKey("a", "k")
	_, err := l.Unsubscribe(l.within(), "g", "b")
	require.NoError(t, err)

	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Empty(t, l.queued())
	require.Equal(t, 1002-100, one[int](l, `SELECT count(*) FROM event_lines`), "that many are a commit's")
	tail := l.emitKey("a", "k")
	require.Empty(t, l.queued(), "one that comes meanwhile waits behind the others")

	l.exec(`SELECT remove_strays()`)
	require.Equal(t, []int64{next}, l.heads("k"))
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Empty(t, l.queued())
	l.exec(`SELECT remove_strays()`)
	for _, id := range []int64{last, tail} {
		require.Equal(t, []int64{id}, l.heads("k"))
		require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	}
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

// A key that is at rest has nothing in the queue that a letter could wait for: so it comes at once, one at a time as ever, and what has waited comes
// after it.
func TestKeys_DeadLetterIsRedrivenWhileItsKeyIsAtRest_GoesFirst(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	letter := l.emitKey("a", "k")
	l.bury(tagA, "no")
	l.emitKey("a", "k")
	l.line("b", 300)
	waits := l.emitKey("a", "k")
	_, err := l.Unsubscribe(l.within(), "g", "b")
	require.NoError(t, err)
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Empty(t, l.queued(), "it is at rest")

	redriven, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Equal(t, []int64{letter}, l.heads("k"))
	l.walked()
	require.Equal(t, []int64{letter}, l.heads("k"), "none comes beside it")
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	l.walked()
	require.Equal(t, []int64{waits}, l.heads("k"))
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

// A group that is behind gets of the log first, of which a letter of it is.
func TestKeys_DeadLetterIsRedrivenWhileItsGroupIsBehind_GoesBeforeWhatIsEmittedMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	letter := l.emitKey("a", "k")
	l.openTransaction() // which keeps the group behind
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.replayed("delivered = 1")
	meanwhile := l.emitKey("a", "k")
	l.bury(tagA, "no")
	require.Empty(t, l.heads("k"), "it is at rest")

	redriven, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Equal(t, []int64{letter}, l.heads("k"))
	require.Equal(t, []int64{letter, meanwhile}, l.lined("k"))
	require.True(t, one[bool](l, `SELECT EXISTS (SELECT FROM event_keys k JOIN worker_queue q ON q.id = k.item_id)`), "and what comes of the log waits for it")
}

// A node whose heartbeats are far apart hears of a key that is at rest, and one that is deaf finds it.
func TestNode_KeyIsAtRest_AllThatIsDueIsHandled(t *testing.T) {
	t.Parallel()
	for name, told := range map[string]bool{"told": true, "not told": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLabOn(t, &seldom, nil)
			l.subscribe("g", "a", "b")
			l.emitKey("a", "k")
			l.line("b", 12_000) // more than one heartbeat walks over
			l.emitKey("a", "k")
			_, err := l.Unsubscribe(l.within(), "g", "b")
			require.NoError(t, err)
			l.exec(`DELETE FROM event_retirements`) // which heartbeats come for as well
			config, s := quick("g"), &seen{}
			if told {
				config.Heartbeat = time.Hour
			} else {
				l.exec(`ALTER FUNCTION notify_group RENAME TO notify_nobody; CREATE FUNCTION notify_group(text, text) RETURNS void LANGUAGE sql AS ''`)
				l.undone(`DROP FUNCTION notify_group; ALTER FUNCTION notify_nobody RENAME TO notify_group`)
			}
			n := l.node(config)
			quietly := func() bool {
				return one[bool](l, `SELECT beat_quietly(waiter, json_build_array(node_id, 'g')::text) FROM event_nodes`)
			}
			l.eventually(func() bool { return !quietly() }, "it has begun")
			if !told {
				l.exec(`ALTER FUNCTION remove_strays RENAME TO remove_later; CREATE FUNCTION remove_strays() RETURNS void LANGUAGE sql AS ''`)
			}
			l.exec(`DELETE FROM worker_queue`)
			if !told {
				require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_keys WHERE item_id IS NULL`))
				require.True(t, quietly(), "there is a reason to call beat")
				l.exec(`DROP FUNCTION remove_strays(); ALTER FUNCTION remove_later RENAME TO remove_strays`)
			}
			require.NoError(t, n.On(l.within(), "a", s.types))
			l.eventually(func() bool { return len(s.list()) == 1 && len(l.queued()) == 0 }, "it is handled")
			require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
			require.False(t, quietly())
		})
	}
}

// What is replayed comes in the order of the log also while a key is at rest.
func TestReplay_KeyIsAtRest_OrderOfTheLogStays(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var want []int64
	for range 3 {
		want = append(want, l.emitKey("a", "k"))
	}
	l.log(3)
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.exec(`SELECT replay_some(replay_id, 1) FROM event_replays`)
	l.exec(`INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type)
		SELECT group_id, 'k', n - 4611686018427387904 + (SELECT last_value FROM event_lines_place_seq), 0, now(), 'b' FROM event_groups, generate_series(1, 250) AS n`)
	l.exec(`SELECT setval('event_lines_place_seq', nextval('event_lines_place_seq') + 1000)`)
	l.exec(`SELECT replay_some(replay_id, 1) FROM event_replays`)
	require.Equal(t, want[:1], l.heads("k"))
	l.exec(`DELETE FROM worker_queue WHERE key = 'k'`)
	require.Empty(t, l.heads("k"), "it is at rest")
	l.exec(`SELECT replay_some(replay_id, 1) FROM event_replays`)
	require.Empty(t, l.heads("k"), "the one before has not come yet")
	l.replayed(`ended_at IS NOT NULL`)
	l.walked()
	for _, id := range want[1:] {
		require.Equal(t, []int64{id}, l.heads("k"))
		l.exec(`DELETE FROM worker_queue WHERE key = 'k'`)
	}
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

// A heartbeat that had to deal with all strays might take longer than it may, and be undone with all that it says, each time anew.
func TestRemoveStrays_ThereAreMany_SomeAtATimeAndNoneIsLeft(t *testing.T) {
	t.Parallel()
	const items = `INSERT INTO worker_queue (name, tag) SELECT 'b', 'eventbus/g|b' FROM generate_series(1, 8)`
	for name, c := range map[string]struct {
		patterns        []string
		removed, strays string
		left            string // how many there are to deal with yet
		atATime         int
	}{
		"of a subscription": {[]string{"b"}, `SELECT unsubscribe(NULL, 'g', 'b')`, items, `SELECT count(*) FROM worker_queue`, 3},
		"that go by another one": {[]string{"b", "#"}, `SELECT unsubscribe(NULL, 'g', 'b')`, items,
			`SELECT count(*) FROM worker_queue WHERE tag = 'eventbus/g|b'`, 3},
		"of a subscription, with keys": {[]string{"b"}, `SELECT unsubscribe(NULL, 'g', 'b')`,
			`INSERT INTO worker_queue (name, tag, key) SELECT 'b', 'eventbus/g|b', 'k' || n FROM generate_series(1, 8) AS n`, `SELECT count(*) FROM worker_queue`, 1},
		"of a group": {[]string{"b"}, deleteGroup, items, `SELECT count(*) FROM worker_queue`, 3},
		"of a group that is made anew": {[]string{"b"}, deleteGroup + `; SELECT subscribe(NULL, 'g', '{b}')`,
			`INSERT INTO worker_queue (id, name, tag, input, created_at, visible_at) SELECT -n, 'b', 'eventbus/g|b', '{"event_id": 0, "emitted_at": "2020-01-01T00:00:00Z"}', '2020-01-01', '2020-01-01' FROM generate_series(1, 8) AS n`,
			`SELECT count(*) FROM worker_queue`, 3},
		"of a group, with keys": {[]string{"b"}, deleteGroup, `
			INSERT INTO worker_queue (id, name, tag, key) SELECT n + 1000, 'b', 'eventbus/g|b', 'k' || n FROM generate_series(1, 8) AS n;
			INSERT INTO event_keys (group_id, key, item_id) SELECT 1, 'k' || n, n + 1000 FROM generate_series(1, 8) AS n;
			INSERT INTO event_lines (group_id, key, event_id, emitted_at, event_type) SELECT 1, 'k' || n % 4 + 1, 0, now(), 'b' FROM generate_series(1, 8) AS n`,
			`SELECT (SELECT count(*) FROM worker_queue) + (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`, 9}, // of each of them
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", c.patterns...)
			l.exec(c.removed)
			l.exec(c.strays)
			l.exec(`SET pgwake.strays_at_a_time = 3`)
			for left := one[int](l, c.left); left > 0; {
				was := left
				l.exec(`SELECT remove_strays()`)
				left = one[int](l, c.left)
				require.Less(t, left, was)
				require.LessOrEqual(t, was-left, c.atATime)
				if left > 0 {
					require.Positive(t, one[int](l, `SELECT count(*) FROM event_retirements`), "the next heartbeat goes on")
				}
			}
			l.afterOthers(func() bool {
				l.exec(`SELECT remove_strays()`)
				return one[int](l, `SELECT count(*) FROM event_retirements`) == 0
			}, "its subscriptions are retired")
			require.Equal(t, name == "that go by another one", len(l.queued()) == 8)
		})
	}
}

// One heartbeat of each node looks for keys that are at rest, and those of groups that are behind, of which there may be any number, are not.
func TestBeatQuietly_KeysOfAGroupThatIsBehind_AreNotRead(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.exec(`INSERT INTO event_groups (namespace, name, behind) VALUES ('default', 'behind', true)`)
	// At once, or the server's own ANALYZE may come in between, and statistics of half of them have the wrong index used until the next.
	l.exec(`INSERT INTO event_keys (group_id, key, item_id) SELECT group_id, 'k' || n, CASE WHEN NOT behind THEN n END FROM event_groups, generate_series(1, 20000) AS n`)
	for range 2 {
		require.Less(t, l.pages(`SELECT remove_strays()`), int64(50))
		require.Less(t, l.pages(`SELECT beat_quietly(NULL, '["n", "g"]')`), int64(50))
		l.exec(`ANALYZE event_keys, event_groups`)
	}
}

// Of the strays that a heartbeat leaves to the next it reads none, and it does not hold each one's id against all others either.
func TestRemoveStrays_TwentyThousand_ReadsThoseAloneThatItDealsWith(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "b")
	l.exec(`SET pgwake.strays_at_a_time = 10`)
	l.exec(`SELECT unsubscribe(NULL, 'g', 'b')`)
	l.exec(`INSERT INTO worker_queue (name, tag) SELECT 'b', 'eventbus/g|b' FROM generate_series(1, 20000)`)
	for range 2 {
		require.Less(t, l.pages(`SELECT remove_strays()`), int64(350))
		l.exec(`ANALYZE worker_queue`)
	}
}
