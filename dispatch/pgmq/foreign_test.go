package pgmq_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: what can a message do that somebody else has written, by whatever it says of itself?

// lostTo asserts that a receipt holds no more.
func (s *stream) lostTo(t *testing.T, d dispatch.StreamDelivery) {
	t.Helper()
	some := (*pgwake.LostLocksError)(nil)
	require.ErrorAs(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}), &some)
}

func (s *stream) ack(t *testing.T, all ...dispatch.StreamDelivery) {
	t.Helper()
	receipts := make([]pgwake.LockToken, len(all))
	for i, d := range all {
		receipts[i] = d.Receipt
	}
	require.NoError(t, s.Ack(t.Context(), receipts))
}

func (s *stream) free(t *testing.T, d dispatch.StreamDelivery) {
	t.Helper()
	require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{IgnoreAttempt: true, Error: "no luck"}))
}

// It is counted, extended, given back, buried and acknowledged as any other, and so is what is acknowledged with it.
func TestReceive_ForeignHeaders_AreNoObstacleAndProveNothing(t *testing.T) {
	s := standIn(t)
	for i, headers := range []string{
		`null`, `1`, `"pgwake"`, `[1]`, `["pgwake"]`, `[{"pgwake": {"back": 1}}]`, `{}`, `{"k": {"l": [1, null]}, "m": null}`,
		`{"pgwake": null}`, `{"pgwake": "back"}`, `{"pgwake": 1}`, `{"pgwake": true}`, `{"pgwake": [1]}`, `{"pgwake": ["back"]}`, `{"pgwake": [{"back": 1}]}`,
		`{"pgwake": {"back": "x"}}`, `{"pgwake": {"back": 99999999999}}`, `{"pgwake": {"back": 1.5}}`, `{"pgwake": {"back": null}}`, `{"pgwake": {"back": {}}}`,
		`{"pgwake": {"back": 1}}`, `{"pgwake": {"back": "1"}}`, `{"pgwake": {"of": 1, "back": 1}}`, `{"pgwake": {"of": ["x"], "back": 1}}`,
		`{"pgwake": {"free": "x"}}`, `{"pgwake": {"free": 1.5}}`, `{"pgwake": {"free": -1000}}`, `{"pgwake": {"free": 1000}}`, `{"pgwake": {"free": 2147483647}}`,
		`{"pgwake": {"free": 1e30}}`, `{"pgwake": {"free": null}}`, `{"pgwake": {"free": [1]}}`, `{"pgwake": {"FREE": 1, "ERROR": "x"}}`,
		`{"pgwake": {"name": 7, "error": 7}}`, `{"pgwake": {"name": {}, "error": "somebody else's"}}`, `{"pgwake": {"dead": 7}}`,
	} {
		t.Run(headers, func(t *testing.T) {
			namespace := fmt.Sprintf("n%d", i)
			queue := namespace + "_queue"
			s.exec(t, `SELECT pgmq.create($1)`, queue)
			send := func() {
				t.Helper()
				s.exec(t, `SELECT pgmq.send($1, '{"odd": 1}', $2::jsonb, clock_timestamp())`, queue, headers)
				s.exec(t, `SELECT pgmq.send($1, '{"good": 1}')`, queue)
			}
			send()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			both, err := s.Receive(ctx, namespace, 2, time.Minute)
			require.NoError(t, err)
			require.Len(t, both, 2)
			first, good := both[0], both[1]
			require.JSONEq(t, `{"odd": 1}`, string(first.Payload))
			require.Equal(t, queue, first.Name)
			require.Equal(t, 1, first.Attempt)
			require.Empty(t, first.LastError)
			require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{first.Receipt, good.Receipt}, time.Minute))
			s.free(t, first)
			second := s.receive(t, namespace)
			require.Equal(t, 1, second.Attempt)
			require.Equal(t, "no luck", second.LastError)
			require.NoError(t, s.Nack(t.Context(), second.Receipt, pgwake.AbandonOptions{Delay: time.Second / 100}))
			s.lostTo(t, second)
			third := s.receive(t, namespace)
			require.Equal(t, 2, third.Attempt)
			s.ack(t, third, good)

			send()
			require.NoError(t, s.DeadLetter(t.Context(), s.receive(t, namespace).Receipt, "poison", "cause"))
			s.ack(t, s.receive(t, namespace))
			var left, dead int
			require.NoError(t, s.pool.QueryRow(t.Context(), fmt.Sprintf(`SELECT (SELECT count(*) FROM pgmq.q_%s),
				(SELECT count(*) FROM pgmq.a_%[1]s WHERE headers -> 'pgwake' -> 'dead' ->> 'reason' = 'poison')`, queue)).Scan(&left, &dead))
			require.Equal(t, []int{0, 1}, []int{left, dead})
		})
	}
}

// Given back, its receipt holds no more, even if what had the place of pgwake's header cannot have a note.
func TestNack_ForeignHeaders_EndsTheReceipt(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	for _, headers := range []string{`[1]`, `{"pgwake": null}`, `{"pgwake": "x"}`, `{"pgwake": [1]}`, `{"pgwake": {"back": [1]}}`} {
		s.exec(t, `SELECT pgmq.send('a_queue', '1', $1::jsonb, clock_timestamp())`, headers)
		d := s.receive(t, "a")
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Delay: time.Hour}))
		s.lostTo(t, d)
	}
}

// A dead letter that somebody sends again, as it is in the archive, is a message that was never read. Another queue has the same ids.
func TestReceive_DeadLetterSentAgain_BeginsAnew(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue'), pgmq.create('b_queue')`)
	require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "mail.send"}))
	s.free(t, s.receive(t, "a"))
	s.free(t, s.receive(t, "a"))
	require.NoError(t, s.Nack(t.Context(), s.receive(t, "a").Receipt, pgwake.AbandonOptions{}))
	require.NoError(t, s.DeadLetter(t.Context(), s.receive(t, "a").Receipt, "poison", "cause"))
	for _, to := range []string{"a", "b"} {
		s.exec(t, fmt.Sprintf(`SELECT pgmq.send('%s_queue', message, headers, clock_timestamp()) FROM pgmq.a_a_queue`, to))
		for attempt := 1; attempt <= 4; attempt++ {
			d := s.receive(t, to)
			require.Equal(t, "mail.send", d.Name)
			require.Equal(t, attempt, d.Attempt)
			if attempt == 1 {
				require.Empty(t, d.LastError)
			}
			require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, time.Minute), "attempt %d", attempt)
			require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}))
		}
		s.ack(t, s.receive(t, to))
	}
}

// Somebody who knows which message it is has put a number there that is none, or more than can be.
func TestNack_NoteWasChanged_IsCountedAllTheSame(t *testing.T) {
	s := standIn(t)
	for _, free := range []string{`"x"`, `"1"`, `1.5`, `-3`, `99999999999`, `2147483647`, `999999999`, `1e40`, `null`, `{}`} {
		require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x"}))
		s.free(t, s.receive(t, "a"))
		s.exec(t, `UPDATE pgmq.q_a_queue SET headers = jsonb_set(headers, '{pgwake,free}', $1::jsonb)`, free)
		d := s.receive(t, "a")
		require.Equal(t, 2, d.Attempt, free)
		s.free(t, d)
		s.exec(t, `UPDATE pgmq.q_a_queue SET headers = jsonb_set(headers, '{pgwake,back}', $1::jsonb)`, free)
		s.ack(t, s.receive(t, "a"))
	}
}

// PostgreSQL has instants that no clock shows. A message that is never due, or always was, is in nobody's way.
func TestReceive_InstantsBeyondAnyClock_AreNoObstacle(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `SELECT pgmq.send('a_queue', '"never"', NULL, 'infinity')`)
	s.exec(t, `INSERT INTO pgmq.q_a_queue (vt, message, enqueued_at) VALUES ('-infinity', '"always"', 'infinity')`)
	d := s.receive(t, "a")
	require.Equal(t, `"always"`, string(d.Payload))
	require.WithinDuration(t, time.Now(), d.EnqueuedAt, time.Minute)
	s.ack(t, d)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := s.Receive(short, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	s.exec(t, `UPDATE pgmq.q_a_queue SET vt = '-infinity'`)
	d = s.receive(t, "a")
	require.Equal(t, `"never"`, string(d.Payload))
	s.ack(t, d)
}

// What is due since for ever, and locked, is asked for again: nobody tells when that transaction ends.
func TestReceive_AlwaysDueAndLocked_ComesWhenItIsFree(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `INSERT INTO pgmq.q_a_queue (vt, message) VALUES ('-infinity', '1')`)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM pgmq.q_a_queue FOR UPDATE`)
	require.NoError(t, err)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Receive(short, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, tx.Rollback(t.Context()))
	s.ack(t, s.receive(t, "a"))
}

// They run as the owner: on a table of somebody else's they would read what is theirs, and call what it calls.
func TestTriggers_OnTablesThatAreNotOfPgmq_AreRefused(t *testing.T) {
	s := standIn(t)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	exec := func(sql string) {
		t.Helper()
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	refused := func(sql, why string) {
		t.Helper()
		exec(`SAVEPOINT s`)
		_, err := tx.Exec(t.Context(), sql)
		require.ErrorContains(t, err, why)
		exec(`ROLLBACK TO s`)
	}
	exec(`CREATE ROLE pgwake_pgmq_consumer; GRANT USAGE ON SCHEMA pgwake_pgmq TO pgwake_pgmq_consumer; SET ROLE pgwake_pgmq_consumer`)
	exec(`CREATE TEMP TABLE mine (queue_name text, created_at timestamptz, msg_id bigint, vt timestamptz); CREATE TEMP TABLE added (msg_id bigint, vt timestamptz)`)
	for _, function := range []string{"on_send", "on_release", "on_create"} {
		trigger := `CREATE TRIGGER t AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION pgwake_pgmq.` + function + `('x')`
		refused(trigger, "permission denied for function pgwake_pgmq."+function)
		exec(`RESET ROLE; GRANT EXECUTE ON FUNCTION pgwake_pgmq.` + function + `() TO pgwake_pgmq_consumer; SET ROLE pgwake_pgmq_consumer`) // as before it was revoked
		exec(trigger)
		refused(`INSERT INTO mine VALUES ('q', now(), 1, now())`, function+" is for the tables of pgmq only")
		exec(`DROP TRIGGER t ON mine`)
	}
}

// A few kB of numbers may be 1 GB once they are written out, which nobody could read: such a message would come back for ever. It is in
// nobody's way, wherever the numbers are.
func TestReceive_NumbersThatAreTooLongWhenWrittenOut_AreDeadLetters(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	long := func(exponent string, n int) string { return "[7" + strings.Repeat(exponent+", 7", n) + "]" }
	s.exec(t, `SELECT pgmq.send('a_queue', '"first"')`)
	for _, numbers := range []string{long("e131071", 8300), long("E+131071", 1500), "[[{\"k\": [-" + long(".5e-16382", 17000)[1:] + "}]]", "[0" + strings.Repeat("e-16383, 0", 17000) + "]"} {
		s.exec(t, `SELECT pgmq.send('a_queue', $1::jsonb)`, numbers)
	}
	s.exec(t, `SELECT pgmq.send('a_queue', '"second"')`)
	for _, headers := range []string{`{"k": %s}`, `{"pgwake": {"name": %s}}`} {
		s.exec(t, `SELECT pgmq.send('a_queue', '1', $1::jsonb, clock_timestamp())`, fmt.Sprintf(headers, long("e131071", 8300)))
	}
	s.exec(t, `SELECT pgmq.send('a_queue', '"third"', $1::jsonb, clock_timestamp())`, fmt.Sprintf(`{"pgwake": {"of": %s, "back": %[1]s, "free": %[1]s}}`, long("e131071", 8300)))
	s.exec(t, `SELECT pgmq.send('a_queue', (repeat('[', 4500) || repeat(']', 4500))::jsonb)`) // as deep as the server's stack allows for, or so
	s.exec(t, `SELECT pgmq.send('a_queue', $1::jsonb)`, long("e131071", 100))

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := s.Receive(ctx, "a", 100, time.Minute)
	require.NoError(t, err)
	var got []string
	for _, d := range all[:len(all)-1] {
		got = append(got, string(d.Payload))
	}
	require.Equal(t, []string{`"first"`, `"second"`, `"third"`, strings.Repeat("[", 4500) + strings.Repeat("]", 4500)}, got)
	require.Greater(t, len(all[len(all)-1].Payload), 100*131072)
	s.ack(t, all...)
	var left int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pgmq.q_a_queue`).Scan(&left))
	require.Zero(t, left)
	rows, err := s.pool.Query(t.Context(), `SELECT headers -> 'pgwake' -> 'dead' ->> 'reason' || ': ' || left(headers -> 'pgwake' -> 'dead' ->> 'cause', 11) FROM pgmq.a_a_queue ORDER BY msg_id`)
	require.NoError(t, err)
	dead, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	message, headers := "unreadable: the message", "unreadable: the headers"
	require.Equal(t, []string{message, message, message, message, headers, headers}, dead)
}

// dead is what the archive of a_queue has: id, reason and, of what is not there by its own id, that.
func (s *stream) dead(t *testing.T) (all []string) {
	t.Helper()
	return s.deadOf(t, "a_queue")
}

// deadOf is dead of another queue.
func (s *stream) deadOf(t *testing.T, queue string) (all []string) {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), `SELECT concat_ws(' ', CASE WHEN msg_id < 0 THEN 'another' ELSE msg_id::text END, headers #>> '{pgwake,dead,reason}',
		CASE WHEN msg_id < 0 THEN headers #>> '{pgwake,dead,msg_id}' END) FROM pgmq.a_`+queue)
	require.NoError(t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// Whoever may insert may set all columns. None of it keeps the others from being received, and none of it is lost.
func TestReceive_ForeignColumns_AreNoObstacle(t *testing.T) {
	s := standIn(t)
	for i, c := range []struct {
		columns, values string
		dead            bool
	}{
		{"read_ct, vt, message", `2147483647, now(), '{}'`, true},
		{"read_ct, vt, message", `2147483646, now(), '{}'`, false},
		{"read_ct, vt, message", `-1, now(), '{}'`, false},
		{"read_ct, vt, message", `-2147483648, now(), '{}'`, false},
		{"msg_id, vt, message", `0, now(), '{}'`, false},
		{"msg_id, vt, message", `-9223372036854775808, now(), '{}'`, false},
		{"msg_id, vt, message", `9223372036854775807, now(), '{}'`, false},
		{"vt, message", `now(), NULL`, false},
		{"vt, message", `'4713-01-01 BC', '{}'`, false},
		{"vt, message, enqueued_at", `now(), '{}', '4713-01-01 BC'`, false},
		{"vt, message, enqueued_at", `now(), '{}', '294276-12-31'`, false},
		{"vt, message, enqueued_at", `now(), '{}', '-infinity'`, false},
	} {
		t.Run(c.columns+"/"+c.values, func(t *testing.T) {
			namespace := fmt.Sprintf("n%d", i)
			queue := namespace + "_queue"
			s.exec(t, `SELECT pgmq.create($1), pgmq.create('worker_' || $1)`, queue)
			s.exec(t, `SELECT pgmq.send($1, '1'), pgmq.send('worker_' || $1, '2')`, queue)
			s.exec(t, fmt.Sprintf(`INSERT INTO pgmq.q_%s (%s) OVERRIDING SYSTEM VALUE VALUES (%s)`, queue, c.columns, c.values))
			s.exec(t, `INSERT INTO pgmq.q_`+queue+` (vt, message) VALUES ('294276-12-31', '"never"')`)
			want := 3
			if c.dead {
				want = 2
			}
			var all []dispatch.StreamDelivery
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for len(all) < want {
				got, err := s.Receive(ctx, namespace, 10, time.Minute)
				require.NoError(t, err)
				all = append(all, got...)
			}
			for _, d := range all {
				require.Positive(t, d.Attempt)
				require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, time.Minute))
				require.NoError(t, s.DeadLetter(t.Context(), d.Receipt, "poison", "cause"))
			}
			require.Len(t, s.deadOf(t, queue), 2) // the other is of the other queue
			var left int
			require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pgmq.q_`+queue).Scan(&left))
			require.Equal(t, 1, left, "what is never due")
		})
	}
}

// What was read as often as can be counted is put aside, however many there are, and also if it was given back before that.
func TestReceive_ReadsCanBeCountedNoFurther_AreDeadLetters(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `INSERT INTO pgmq.q_a_queue (read_ct, vt, message) VALUES (2147483646, now(), '{}')`)
	d := s.receive(t, "a")
	require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}))
	s.exec(t, `INSERT INTO pgmq.q_a_queue (read_ct, vt, message) SELECT 2147483647, now(), '{}' FROM generate_series(1, 1500)`)
	s.exec(t, `SELECT pgmq.send('a_queue', '"good"')`)
	require.Equal(t, `"good"`, string(s.receive(t, "a").Payload))
	require.Len(t, s.dead(t), 1501)
}

// An id may come again, as after logical replication, which leaves sequences where they were. The archive keeps what it has, and what comes.
func TestDeadLetter_ArchiveHasTheID_KeepsBoth(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	long := "[7" + strings.Repeat("e131071, 7", 8300) + "]"
	for range 3 {
		s.exec(t, `INSERT INTO pgmq.q_a_queue (msg_id, vt, message) OVERRIDING SYSTEM VALUE VALUES (7, now(), '"good"')`)
		require.NoError(t, s.DeadLetter(t.Context(), s.receive(t, "a").Receipt, "poison", "cause"))
		s.exec(t, `INSERT INTO pgmq.q_a_queue (msg_id, vt, message) OVERRIDING SYSTEM VALUE VALUES (7, now(), $1::jsonb)`, long)
		s.exec(t, `SELECT pgmq.send('a_queue', '1')`)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		got, err := s.Receive(ctx, "a", 2, time.Minute)
		require.NoError(t, err)
		require.Len(t, got, 1)
		s.ack(t, got...)
	}
	require.ElementsMatch(t, []string{"7 poison", "another poison 7", "another poison 7", "another unreadable 7", "another unreadable 7", "another unreadable 7"}, s.dead(t))
	var left int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pgmq.q_a_queue`).Scan(&left))
	require.Zero(t, left)
}

// jsonb has at most 256 MiB. Headers that are as large as can be have no room for what is noted when a message is received, or settled.
func TestReceive_HeadersWithoutRoomForANote_AreDeadLetters(t *testing.T) {
	if !testsize.Full() {
		t.Skip("it takes many seconds")
	}
	for name, headers := range map[string]string{
		"when it is received":     `jsonb_build_object('pgwake', '{}'::jsonb, 'x', repeat('y', 268435455 - 40))`,
		"when it is given back":   `jsonb_build_object('x', repeat('y', 268435455 - 40))`,
		"when it is acknowledged": `jsonb_build_object('pgwake', jsonb_build_object('x', repeat('y', 268435455 - 40)))`,
	} {
		t.Run(name, func(t *testing.T) {
			s := standIn(t)
			s.exec(t, `SELECT pgmq.create('a_queue')`)
			s.exec(t, `SELECT pgmq.send('a_queue', '1', `+headers+`, clock_timestamp())`)
			s.exec(t, `SELECT pgmq.send('a_queue', '2')`)
			ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
			defer cancel()
			s.SetPatience(patience)
			got, err := s.Receive(ctx, "a", 2, time.Minute)
			require.NoError(t, err)
			require.Len(t, got, 1)
			require.Equal(t, `2`, string(got[0].Payload))
			s.ack(t, got...)
			require.Equal(t, []string{"1"}, s.dead(t), "it is there as it was, without a note")
		})
	}
}

// What is nested as deep as one stack is for may be too deep for another.
func TestHasRoom_DeeperThanTheStack_HasNone(t *testing.T) {
	s := standIn(t)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `CREATE TEMP TABLE deep ON COMMIT DROP AS SELECT jsonb_build_object('x', (repeat('[', 4500) || repeat(']', 4500))::jsonb) AS headers`)
	require.NoError(t, err)
	room := func() (has bool) {
		t.Helper()
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT pgwake_pgmq.has_room(headers, 1, now()) FROM deep`).Scan(&has))
		return has
	}
	require.True(t, room())
	_, err = tx.Exec(t.Context(), `SET LOCAL max_stack_depth = '200kB'`)
	require.NoError(t, err)
	require.False(t, room())
}
