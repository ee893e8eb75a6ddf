package pgwake_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what may producers in other languages pass in? What the functions accept, Go can fetch
// and finish; the rest they refuse, and nothing is written.

func TestSQLFunctions_ArgumentThatGoRefuses_IsRefusedAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	claim, id, _ := strings.Cut(string(n.claimBoth(t).work), "/")
	before := n.content(t)
	long := strings.Repeat("x", 256)
	const namespaces = "a namespace must have 1 to 40 lower-case letters, digits, _ and -, a letter first: not "
	refused := map[string]string{
		`enqueue_work(NULL)`:                                            "a name must have 1 to 255 bytes",
		`enqueue_work('')`:                                              "a name must have 1 to 255 bytes",
		`enqueue_work('` + long + `')`:                                  "a name must have 1 to 255 bytes",
		`enqueue_work_many(ARRAY['w', NULL], NULL)`:                     "a name must have 1 to 255 bytes",
		`enqueue_work_many(ARRAY['w', '` + long + `'], NULL)`:           "a name must have 1 to 255 bytes",
		`enqueue_work_many(ARRAY['w'], NULL, p_instances => ARRAY[''])`: "an instance id must have 1 to 255 bytes",
		`enqueue_work('w', p_tag => '` + long + `')`:                    "a tag must have 0 to 255 bytes",
		`enqueue_work('w', p_session => '')`:                            "a session must have 1 to 255 bytes",
		`enqueue_work_many(ARRAY['w', 'w'], NULL, p_priorities => ARRAY[0::smallint, 10::smallint])`:   "a priority must be 0 to 9",
		`enqueue_work_many(ARRAY['w', 'w'], NULL, ARRAY[NULL, 'a,b'])`:                                 namespaces + `'a,b'`,
		`enqueue_work_many(ARRAY['w', 'w'], NULL, p_delays => ARRAY[NULL, interval '-1 s'])`:           "a delay is negative",
		`enqueue_work('w', p_dedup_for => '1 s')`:                                                      "for how long, or until when, a dedup key counts is said without one",
		`enqueue_work('w', p_dedup_scope => 'dead')`:                                                   "for how long, or until when, a dedup key counts is said without one",
		`enqueue_work('w', p_dedup_key => 'k', p_dedup_for => '0')`:                                    "a dedup key is kept for more than no time, and at most 100 years",
		`enqueue_work('w', p_dedup_key => 'k', p_dedup_scope => 'ever')`:                               "the scope of a dedup key must be waiting, queued or dead",
		`enqueue_message('', 'k')`:                                                                     "an instance id must have 1 to 255 bytes",
		`enqueue_message(NULL, 'k')`:                                                                   "an instance id must have 1 to 255 bytes",
		`enqueue_message('` + long + `', 'k')`:                                                         "an instance id must have 1 to 255 bytes",
		`enqueue_message('i', '')`:                                                                     "a kind must have 1 to 255 bytes",
		`enqueue_message('i', NULL)`:                                                                   "a kind must have 1 to 255 bytes",
		`enqueue_message('i', '` + long + `')`:                                                         "a kind must have 1 to 255 bytes",
		`enqueue_message('i', 'start', p_name => '` + long + `')`:                                      "a name must have 1 to 255 bytes",
		`enqueue_message('i', 'start', p_name => '')`:                                                  "a name must have 1 to 255 bytes",
		`enqueue_message('i', 'start', p_name => 'n', p_version => '')`:                                "a version must have 1 to 255 bytes",
		`enqueue_message('i', 'k', p_queue => '` + long + `')`:                                         "a queue name must have 0 to 255 bytes",
		`enqueue_message('i', 'start')`:                                                                "a message that opens an execution needs the name of the orchestration",
		`enqueue_message('i', 'continue_as_new')`:                                                      "a message that opens an execution needs the name of the orchestration",
		`enqueue_message_many(ARRAY['i', 'j'], ARRAY['start', 'start'], NULL, ARRAY['n'])`:             "a message that opens an execution needs the name of the orchestration",
		`enqueue_message_many(ARRAY['i', 'j'], ARRAY['k', 'continue_as_new'], NULL, ARRAY['n', NULL])`: "a message that opens an execution needs the name of the orchestration",
		`enqueue_message_many(ARRAY['i', 'j'], ARRAY['k', 'k'], NULL, p_executions => '{NULL, -1}')`:   "an execution is not negative",
		`ack_work(` + id + `, '` + claim + `', p_instance => 'i', p_kind => 'start')`:                  "a message that opens an execution needs the name of the orchestration",
	}
	for _, enqueue := range []string{"enqueue_work('w'", "enqueue_message('i', 'k'"} {
		for option, says := range map[string]string{
			`p_dedup_key => ''`:                                       "a dedup key must have 1 to 255 bytes",
			`p_dedup_key => '` + long + `'`:                           "a dedup key must have 1 to 255 bytes",
			`p_delay => '-1 hour'`:                                    "a delay is negative",
			`p_priority => 10`:                                        "a priority must be 0 to 9",
			`p_priority => -1`:                                        "a priority must be 0 to 9",
			`p_priority => 65536`:                                     "a priority must be 0 to 9",
			`p_namespace => 'No'`:                                     namespaces + `'No'`,
			`p_namespace => ''`:                                       namespaces + `''`,
			`p_namespace => '1'`:                                      namespaces + `'1'`,
			`p_namespace => '` + long[:41] + `'`:                      namespaces + `'` + long[:41] + `'`,
			`p_visible_at => 'infinity'`:                              "a due time must be finite",
			`p_visible_at => '-infinity'`:                             "a due time must be finite",
			`p_delay => '1 second', p_visible_at => now()`:            "both a delay and a due time are given",
			`p_headers => '[]'`:                                       "headers must be a JSON object",
			`p_headers => '{"a": 1}'`:                                 "headers must be strings under names of 1 to 255 bytes, of 8192 bytes together",
			`p_headers => '{"": "a"}'`:                                "headers must be strings under names of 1 to 255 bytes, of 8192 bytes together",
			`p_headers => jsonb_build_object('a', repeat('x', 8192))`: "headers must be strings under names of 1 to 255 bytes, of 8192 bytes together",
		} {
			refused[enqueue+", "+option+")"] = says
		}
	}
	for call, says := range refused {
		tx := n.begin(t)
		_, err := tx.Exec(t.Context(), `SELECT `+call)
		var refusal *pgconn.PgError
		require.ErrorAs(t, err, &refusal, call)
		require.Equal(t, "PW003: "+says, refusal.Code+": "+refusal.Message, call)
		require.LessOrEqual(t, strings.Count(refusal.Where, "\n"), 6, "%s: %s", call, refusal.Where)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.Equal(t, before, n.content(t))
}

func TestSQLFunctions_UnusualButGood_IsAccepted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, call := range []string{
		`enqueue_work('null', p_namespace => 'null', p_tag => '', p_priority => NULL)`,
		`enqueue_work('"" {}', p_namespace => '` + strings.Repeat("n", 40) + `', p_dedup_key => '""')`,
		`enqueue_work_many(array_fill('w'::text, ARRAY[300]), NULL, p_delays => ARRAY['0', NULL::interval], p_visible_ats => ARRAY[NULL, now()])`,
		`enqueue_message('i', 'k', p_queue => '')`,
		`enqueue_message_many(ARRAY['i', 'j'], ARRAY['k', 'start'], NULL, ARRAY[NULL, 'n'], p_namespaces => ARRAY['a', 'b'])`,
	} {
		n.exec(t, `SELECT `+call)
	}
}

func TestSQLFunctions_LimitsExactlyReached_GoFetchesAndFinishesIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	long := strings.Repeat("x", pgwake.MaxNameLength)
	n.exec(t, fmt.Sprintf(`SELECT enqueue_work(%[1]s, p_dedup_key => %[1]s, p_delay => '0'), enqueue_message(%[1]s, %[1]s, p_name => %[1]s, p_version => %[1]s)`,
		"'"+long+"'"))
	item, err := n.FetchWorkItem(t.Context(), now)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	turn, err := n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}))
}

// What one item may be is no other than what each of many may be: enqueue_work_item is as much a producer's as enqueue_work_many.
func TestEnqueueWorkItem_Arguments_AreRefusedAndAcceptedAsThoseOfMany(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := n.content(t)
	type arguments struct{ name, namespace, priority, delay, visibleAt, instance, tag, session, headers, key string }
	usual := arguments{`'w'`, `NULL`, `NULL`, `NULL`, `NULL`, `NULL`, `NULL`, `NULL`, `NULL`, `NULL`}
	enqueue := func(call string) (code, message string) {
		tx := n.begin(t)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		_, err := tx.Exec(t.Context(), `SELECT `+call)
		if err == nil {
			return "", ""
		}
		var refusal *pgconn.PgError
		require.ErrorAs(t, err, &refusal, call)
		return refusal.Code, refusal.Message
	}
	try := func(good bool, change func(*arguments, string), values ...string) {
		t.Helper()
		for _, v := range values {
			a := usual
			change(&a, v)
			code, message := enqueue(fmt.Sprintf(`enqueue_work_item(%s, NULL, %s, %s::smallint, %s, %s, %s, NULL, NULL, %s, %s, %s, %s, false)`,
				a.name, a.namespace, a.priority, a.delay, a.visibleAt, a.instance, a.tag, a.session, a.headers, a.key))
			codeOfMany, messageOfMany := enqueue(fmt.Sprintf(`enqueue_work_many(ARRAY[%s], NULL, ARRAY[%s], ARRAY[%s]::smallint[], ARRAY[%s]::interval[], ARRAY[%s]::timestamptz[],
				p_instances => ARRAY[%s], p_tags => ARRAY[%s], p_sessions => ARRAY[%s], p_headers => ARRAY[%s], p_keys => ARRAY[%s])`,
				a.name, a.namespace, a.priority, a.delay, a.visibleAt, a.instance, a.tag, a.session, a.headers, a.key))
			require.Equal(t, codeOfMany+": "+messageOfMany, code+": "+message, "%.500v", a)
			if good {
				require.Empty(t, code, "%.500v", a)
			} else {
				require.Equal(t, "PW003", code, "%.500v", a)
			}
		}
	}
	long, longest := "'"+strings.Repeat("x", 256)+"'", "'"+strings.Repeat("x", 255)+"'"
	for _, text := range []func(*arguments, string){
		func(a *arguments, v string) { a.name = v },
		func(a *arguments, v string) { a.instance = v },
		func(a *arguments, v string) { a.session = v },
		func(a *arguments, v string) { a.key = v },
	} {
		try(false, text, `''`, long)
		try(true, text, longest, `'""'`)
	}
	try(false, func(a *arguments, v string) { a.name = v }, `NULL`)
	tag := func(a *arguments, v string) { a.tag = v }
	try(false, tag, long)
	try(true, tag, `''`, longest)
	namespace := func(a *arguments, v string) { a.namespace = v }
	try(false, namespace, `''`, `'No'`, `'1'`, `'`+strings.Repeat("n", 41)+`'`)
	try(true, namespace, `'default'`, `'`+strings.Repeat("n", 40)+`'`)
	priority := func(a *arguments, v string) { a.priority = v }
	try(false, priority, `-1`, `10`)
	try(true, priority, `0`, `9`)
	delay := func(a *arguments, v string) { a.delay = v }
	try(false, delay, `'-1 s'`)
	try(true, delay, `'0'`, `'1 hour'`)
	at := func(a *arguments, v string) { a.visibleAt = v }
	try(false, at, `'infinity'`, `'-infinity'`)
	try(true, at, `'4713-01-01 BC'`, `'294276-12-31'`)
	headers := func(a *arguments, v string) { a.headers = v }
	try(false, headers, `'[]'`, `'{"a": 1}'`, `'{"": "a"}'`, `'{"a": {}}'`, `'{"`+strings.Repeat("x", 256)+`": "a"}'`, `'{"a": "`+strings.Repeat("x", 8192)+`"}'`)
	try(true, headers, `'{}'`, `'{"a": "`+strings.Repeat("x", 8191)+`"}'`)
	try(false, func(a *arguments, v string) { a.session, a.key = v, v }, `'s'`)
	try(false, func(a *arguments, v string) { a.delay, a.visibleAt = `'1 s'`, v }, `now()`)
	require.Equal(t, before, n.content(t))
}

// What a queue may hold does not depend on who waits: an instant that a notification has no number for is no reason to refuse it.
func TestEnqueue_LatestInstantOfTheServer_IsAcceptedWhoeverWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, waits := range []bool{false, true} {
		if waits {
			for _, fetch := range []func() error{
				func() error { return dropped(n.FetchWorkItem(t.Context(), soon)) },
				func() error { return dropped(n.FetchOrchestrationItem(t.Context(), soon)) },
			} {
				done := make(chan error, 1)
				go func() { done <- fetch() }()
				defer func() { <-done }()
			}
			require.Eventually(t, func() bool {
				return query[int](t, n, `SELECT count(*) FROM waiters WHERE armed`)[0] == 2
			}, patience, 10*time.Millisecond)
		}
		for _, at := range []string{`294247-01-10 04:00:54+00`, `294247-01-10 04:00:55+00`, `294276-12-31 23:59:59.999999+00`} {
			for _, call := range []string{
				`enqueue_work('w', p_visible_at => $1)`,
				`enqueue_work_many('{w}', NULL, p_visible_ats => ARRAY[$1::timestamptz])`,
				`enqueue_work_item('w', NULL, NULL, NULL, NULL, $1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false)`,
				`enqueue_message('i', 'k', p_visible_at => $1)`,
			} {
				n.exec(t, `SELECT `+strings.Replace(call, `$1`, `'`+at+`'`, 1))
			}
		}
	}
	n.enqueue(t, "w")
	n.send(t, "j", "k")
}

// That a row cannot be read is no fault of whoever fetches. It stays at the head of its queue until somebody removes it, and until then the same call fails.
func TestFetch_RowIsMoreThanTheServerCanSend_MayBeTriedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "w")
	n.send(t, "i", "k")
	n.exec(t, `CREATE FUNCTION refuse_by_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'out of memory' USING ERRCODE = '54000'; END $$`)
	for _, queue := range []string{"worker_queue", "orchestrator_queue"} {
		n.exec(t, `CREATE TRIGGER refuse_by_test BEFORE UPDATE ON `+queue+` FOR EACH ROW EXECUTE FUNCTION refuse_by_test()`)
	}
	for _, err := range []error{dropped(n.FetchWorkItem(t.Context(), now)), dropped(n.FetchOrchestrationItem(t.Context(), now))} {
		var failure *pgwake.Error
		require.ErrorAs(t, err, &failure)
		require.True(t, failure.Retryable)
		require.NotErrorIs(t, err, pgwake.ErrInvalid)
		require.Equal(t, "54000", failure.SQLState)
	}
	for _, queue := range []string{"worker_queue", "orchestrator_queue"} {
		n.exec(t, `DROP TRIGGER refuse_by_test ON `+queue)
	}
	n.take(t)
	n.takeTurn(t)
}

// Whatever instant an item was due at, whoever claimed it can give it back as of that.
func TestAbandonWorkItem_DueSinceLongBeforeOurTime_KeepsItsPlaceAndItsAttempts(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, at := range []string{`0044-03-15 BC`, `4714-11-24 00:00:00+00 BC`, `0001-01-01 00:00:00.000001+00`} {
		n.exec(t, `SELECT enqueue_work('old', p_visible_at => '`+at+`')`)
		item := n.take(t)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true, DueAt: item.DueAt}), at)
		again := n.take(t)
		require.Equal(t, 1, again.Attempt)
		require.True(t, item.DueAt.Equal(again.DueAt), "%v, not %v", again.DueAt, item.DueAt)
		tx := n.begin(t)
		require.NoError(t, n.AbandonWorkItemTx(t.Context(), tx, again.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true, DueAt: again.DueAt}), at)
		require.NoError(t, tx.Commit(t.Context()))
		again = n.take(t)
		require.True(t, item.DueAt.Equal(again.DueAt), "%v, not %v", again.DueAt, item.DueAt)
		require.NoError(t, n.AckWorkItem(t.Context(), again.LockToken, nil))
	}
}
