package pgwake_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: is it bounded how many locks one transaction takes in the server's table, which all share?

// limitVeryMany sets a limit for the first namespaces, and adds as many items as given to each, with the same key.
func (n *node) limitVeryMany(t *testing.T, namespaces int, limit string, items int) {
	t.Helper()
	n.exec(t, `INSERT INTO limits (queue, namespace, `+limit+`) SELECT 'worker', 'n' || n, 1 FROM generate_series(1, $1) AS n`, namespaces)
	n.exec(t, `
		SELECT count(*) FROM (SELECT array_agg('x'::text) AS names, array_agg('1'::text) AS inputs, array_agg('n' || n) AS namespaces, array_agg('k'::text) AS keys
		                        FROM generate_series(1, $1) AS n, generate_series(1, $2)) AS a
		 CROSS JOIN LATERAL enqueue_work_many(a.names, a.inputs, a.namespaces, p_keys => a.keys) AS added`, namespaces, items)
}

// locksOf runs a statement in a transaction and returns its answer, and how many advisory locks it had then. The transaction stays open.
func locksOf(t *testing.T, tx pgx.Tx, sql string, args ...any) (answer, locks int) {
	t.Helper()
	require.NoError(t, tx.QueryRow(t.Context(), sql, args...).Scan(&answer))
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`).Scan(&locks))
	return answer, locks
}

// oneLook is fetch_work, with a limit, an owner and max attempts.
const oneLook = `SELECT count(f.item_id)::integer FROM fetch_work(gen_random_uuid(), '1 h', $1, p_owner => $2, p_max_attempts => $3) AS f`

// drainVeryMany fetches and acknowledges, a hundred at a time, until there is nothing left, and returns how many that were.
func (n *node) drainVeryMany(t *testing.T) (done int) {
	t.Helper()
	var acks []pgwake.LockToken
	for {
		items, err := n.FetchWorkItems(t.Context(), 100, &pgwake.FetchOptions{PollTimeout: patience, LockTimeout: lease, Ack: acks})
		require.NoError(t, err)
		acks = nil
		for _, item := range items {
			acks = append(acks, item.LockToken)
		}
		if done += len(items); query[int](t, n, `SELECT count(*)::integer FROM worker_queue`)[0] == len(acks) {
			break
		}
	}
	require.NoError(t, n.AckWorkItems(t.Context(), acks))
	return done
}

func TestLimits_InVeryManyNamespaces_ALookLocksAHundredOfThem_AndAllAreDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1500, "max_running", 1)
	tx := n.begin(t)
	got, locks := locksOf(t, tx, oneLook, 10, nil, 0)
	require.Equal(t, 10, got)
	require.LessOrEqual(t, locks, 110) // and those of other kinds
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 1500, n.drainVeryMany(t))
}

// One look makes dead letters a hundred times, and looks again each time.
func TestLimits_InVeryManyNamespaces_SpentItems_ALookLocksAFewHundred(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1100, "max_running", 1)
	n.exec(t, `UPDATE worker_queue SET attempt_count = 3`)
	got, locks := locksOf(t, n.begin(t), oneLook, 10, nil, 3)
	require.Zero(t, got)
	require.LessOrEqual(t, locks, 400)
}

// Where there is nothing to claim nothing is locked: of those that are full one is found as soon as it is not.
func TestLimits_InVeryManyNamespaces_AllAreFullButOne_ItIsFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1100, "max_running", 2)
	n.exec(t, `UPDATE worker_queue q SET visible_at = clock_timestamp() + interval '1 h', lock_token = gen_random_uuid(), slot = true
	            WHERE q.id IN (SELECT min(id) FROM worker_queue GROUP BY namespace)`)
	tx := n.begin(t)
	got, locks := locksOf(t, tx, oneLook, 10, nil, 0)
	require.Zero(t, got)
	require.LessOrEqual(t, locks, 10)
	require.NoError(t, tx.Rollback(t.Context()))
	n.exec(t, `DELETE FROM worker_queue WHERE namespace = 'n700' AND slot`)
	got, _ = locksOf(t, n.begin(t), oneLook, 10, nil, 0)
	require.Equal(t, 1, got)
}

// Others have whatever a look comes to. The one item that they have not is found by the look that comes to it, without anybody being told.
func TestLimits_InVeryManyNamespaces_OthersHaveAllItemsButOne_ItIsFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1300, "max_running", 1)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT FROM worker_queue WHERE namespace <> 'n700' FOR UPDATE`)
	require.NoError(t, err)
	looking := n.begin(t)
	_, locks := locksOf(t, looking, oneLook, 10, nil, 0)
	require.LessOrEqual(t, locks, 1010)
	require.NoError(t, looking.Rollback(t.Context()))
	item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
	require.NoError(t, err)
	require.Equal(t, "n700", item.Namespace)
}

// Of each key one may be at work at a time: the others are held, and brought back where nothing else is due.
func TestLimits_OfKeysInVeryManyNamespaces_AllAreDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1100, "max_running_per_key", 2)
	var first []pgwake.LockToken
	for held := 0; held < 1100; held = query[int](t, n, `SELECT count(*)::integer FROM worker_queue WHERE held_due IS NOT NULL`)[0] {
		items, _ := n.takeSome(t, 1000)
		for _, item := range items {
			first = append(first, item.LockToken)
		}
	}
	require.Len(t, first, 1100)
	require.NoError(t, n.AckWorkItems(t.Context(), first))
	require.Equal(t, 1100, n.drainVeryMany(t))
}

func TestSessions_VeryMany_AClaimLocksAThousand(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `
		SELECT count(*) FROM (SELECT array_agg('x'::text) AS names, array_agg('1'::text) AS inputs, array_agg('s' || n) AS sessions FROM generate_series(1, 1500) AS n) AS a
		 CROSS JOIN LATERAL enqueue_work_many(a.names, a.inputs, p_sessions => a.sessions) AS added`)
	n.enqueue(t, "of none")

	others := n.begin(t)
	_, err := others.Exec(t.Context(), `SELECT FROM worker_queue WHERE session_id <> 's1400' FOR UPDATE`)
	require.NoError(t, err)
	tx := n.begin(t)
	got, locks := locksOf(t, tx, oneLook, 10_000, "me", 0)
	require.Equal(t, 2, got)
	require.LessOrEqual(t, locks, 110)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, others.Rollback(t.Context()))

	tx = n.begin(t)
	got, locks = locksOf(t, tx, oneLook, 10_000, "me", 0)
	require.Equal(t, 1001, got)
	require.LessOrEqual(t, locks, 1010)
	require.NoError(t, tx.Commit(t.Context()))
	got, _ = locksOf(t, n.begin(t), oneLook, 10_000, "me", 0)
	require.Equal(t, 500, got)
}

// Places of keys become free in very many namespaces at once: whoever may hold an item knows of each, by the lock or by a row.
func TestLimits_PlacesInVeryManyNamespacesBecomeFree_ATransactionLocksAThousand(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1100, "max_running_per_key", 1)
	tx := n.begin(t)
	got, locks := locksOf(t, tx, `SELECT remove_work(ARRAY(SELECT id FROM worker_queue))::integer`)
	require.Equal(t, 1100, got)
	require.LessOrEqual(t, locks, 1010)
	var noted int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM releases`).Scan(&noted))
	require.GreaterOrEqual(t, noted+locks, 1100)
}

func TestLimits_ItemsAreLeftInVeryManyNamespaces_ALookLocksAThousand_AndTheNextTheOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1100, "max_running_per_key", 1)
	n.exec(t, `UPDATE worker_queue SET held_due = visible_at, visible_at = '9999-12-31 00:00:00+00'`)
	for _, left := range []int{100, 0} {
		tx := n.begin(t)
		got, locks := locksOf(t, tx, `SELECT 1 FROM (SELECT bring_back_left()) AS done`)
		require.Equal(t, 1, got)
		require.LessOrEqual(t, locks, 1010)
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, left, query[int](t, n, `SELECT count(*)::integer FROM worker_queue WHERE held_due IS NOT NULL`)[0])
	}
}

// Where nobody claims what was brought back, the next look has the same namespaces before it.
func TestLimits_ItemsAreLeftInVeryManyNamespaces_NobodyClaimsThere_AFewLooksReachAll(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const looks = 12 // with one in eleven that does not reach a namespace
	n.limitVeryMany(t, 1100, "max_running_per_key", looks+1)
	n.exec(t, `UPDATE worker_queue SET held_due = visible_at, visible_at = '9999-12-31 00:00:00+00'`)
	for range looks {
		n.exec(t, `SELECT bring_back_left()`)
	}
	require.Equal(t, 1100, query[int](t, n, `SELECT count(DISTINCT namespace)::integer FROM worker_queue WHERE held_due IS NULL`)[0])
}

// Whoever has the limits of many namespaces locked, and does not come to his end, holds up none of the others.
func TestLimits_SomebodyHasVeryManyLocked_OthersAreClaimedFrom(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 900, "max_running", 1)
	inTheWay := n.begin(t)
	_, err := inTheWay.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtext('pgwake limits of ' || current_schema()), hashtext('n' || n)) FROM generate_series(1, 900) AS n`)
	require.NoError(t, err)
	n.exec(t, `SELECT enqueue_work('free', p_namespace => 'z')`)
	tx := n.begin(t)
	_, err = tx.Exec(t.Context(), `SET LOCAL statement_timeout = '10 s'`) // a wait for each of them takes longer
	require.NoError(t, err)
	var name string
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT name FROM fetch_work(gen_random_uuid(), '1 h') WHERE item_id IS NOT NULL`).Scan(&name))
	require.Equal(t, "free", name)
}

// An ack that may still be undone keeps claims from holding what is too much of a key. They look past it.
func TestLimits_NothingMayBeHeldAtThisMoment_OtherKeysAreClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1, "max_running_per_key", 80)
	n.take(t) // so the key is full
	n.exec(t, `SELECT enqueue_work('other', p_namespace => 'n1', p_key => 'other')`)
	acking := n.begin(t)
	_, err := acking.Exec(t.Context(), `SELECT pg_advisory_xact_lock_shared(hashtext('pgwake releases of ' || current_schema()), hashtext('n1'))`)
	require.NoError(t, err)
	require.Equal(t, "other", n.take(t).Name)
	require.Equal(t, 0, query[int](t, n, `SELECT count(*)::integer FROM worker_queue WHERE held_due IS NOT NULL`)[0])
}

// In a list of namespaces one may come twice: an item of it is there once.
func TestLimits_NamespaceIsAskedForTwice_WhatIsClaimedIsNotHeldAsWell(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limitVeryMany(t, 1, "max_running_per_key", 20)
	n.exec(t, `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 1)`)
	n.exec(t, `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 1)`) // from here on they are held
	n.exec(t, `SELECT count(*) FROM worker_queue q CROSS JOIN LATERAL ack_work_many(ARRAY[q.id], ARRAY[q.lock_token]) WHERE q.lock_token IS NOT NULL`)
	for range 3 {
		n.exec(t, `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 10, ARRAY['n1', 'n1'])`)
		require.Equal(t, []int{1, 0}, query[int](t, n, `SELECT count(*) FILTER (WHERE lock_token IS NOT NULL)::integer FROM worker_queue
			UNION ALL SELECT count(*) FILTER (WHERE lock_token IS NOT NULL AND held_due IS NOT NULL)::integer FROM worker_queue`))
		n.exec(t, `SELECT count(*) FROM worker_queue q CROSS JOIN LATERAL ack_work_many(ARRAY[q.id], ARRAY[q.lock_token]) WHERE q.lock_token IS NOT NULL`)
	}
}

// Rows of keys at rest are those of any namespace. Whoever has removed some pays in none any more: somebody might, who waits for him and he for that one.
func TestLimits_OfRates_WhatIsForgottenComesLast(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO limits (queue, namespace, rate_interval, rate_burst) SELECT 'worker', 'n' || n, '1 h', 1 FROM generate_series(1, 2) AS n`)
	n.exec(t, `INSERT INTO rates (namespace, tag, key, tat, begun, forget_at) SELECT 'n2', '', 'old' || n, now() - interval '1 day', now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 50) AS n`)
	n.exec(t, `SELECT enqueue_work_many(array_fill('x'::text, ARRAY[12]), NULL, array_fill('n1'::text, ARRAY[12]), p_keys => ARRAY['a','a','b','b','c','d','e','f','g','h','i','j'])`)
	n.exec(t, `CREATE TABLE seen_by_test (place serial, what text)`)
	n.exec(t, `CREATE FUNCTION see_by_test() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$ BEGIN INSERT INTO seen_by_test (what) VALUES (TG_OP); RETURN NULL; END $$`)
	n.exec(t, `CREATE TRIGGER see_by_test AFTER INSERT OR UPDATE OR DELETE ON rates FOR EACH ROW EXECUTE FUNCTION see_by_test()`)
	for _, sql := range []string{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 5)`, `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 10, ARRAY['n1', 'n2'], p_max_attempts => 1)`} {
		n.exec(t, sql)
		require.Equal(t, []bool{true}, query[bool](t, n, `SELECT max(place) FILTER (WHERE what <> 'DELETE') < min(place) FILTER (WHERE what = 'DELETE') FROM seen_by_test`))
		n.exec(t, `TRUNCATE seen_by_test`)
	}
}

// Above READ COMMITTED nobody sees what was held while he waited for the lock, and it would stay so.
func TestSetLimits_TransactionIsNotReadCommitted_IsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx, err := n.Pool().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	requireError(t, n.SetLimitsTx(t.Context(), tx, "n", pgwake.Limits{MaxRunning: 1}), pgwake.ErrInvalid)
}
