package pgwake_test

import (
	"fmt"
	"strings"
	"testing"

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
