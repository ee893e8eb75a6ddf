package pgmq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/require"
)

// This file answers: are the rights of docs/security.md enough for who receives and who sends, and what may others do?

// as makes a role like that of the page, and returns the URL of the database as that role, and its name. It goes when the test ends.
func (s *stream) as(t *testing.T, role string, layers ...string) (roleURL, name string) {
	t.Helper()
	name = fmt.Sprintf("%s_%d_%d", role, os.Getpid(), databases.Add(1))
	s.exec(t, testroles.SQL(t, role, name, "pgwake", layers...))
	url, err := url.Parse(s.url)
	require.NoError(t, err)
	q := url.Query()
	q.Set("role", name)
	url.RawQuery = q.Encode()
	t.Cleanup(func() {
		_, err := s.pool.Exec(context.Background(), `DROP OWNED BY `+name+`; DROP ROLE `+name)
		require.NoError(t, err)
	})
	return url.String(), name
}

// refused asserts that a role may do none of this.
func (s *stream) refused(t *testing.T, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		_, err := s.pool.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "SQLSTATE 42501", sql)
	}
}

func TestRoles_OfThePage_ReceiveAndSend(t *testing.T) {
	owner := standIn(t)
	owner.exec(t, `SELECT pgmq.create('mail_queue'), pgmq.create('other_queue')`)
	consuming, _ := owner.as(t, "pgmq_consumer")
	sending, _ := owner.as(t, "pgmq_producer")
	publishing, _ := owner.as(t, "pgmq_producer", "pgmq")

	consumer := newStream(t, consuming)
	awaitListening(t, owner.url, consumer.application) // the role sees not what other sessions do
	producer := &stream{pool: open(t, sending)}
	producer.exec(t, `SELECT pgmq.send('mail_queue', '{"n": 1}')`)
	first := consumer.receive(t, "mail")
	require.NoError(t, consumer.Extend(t.Context(), []pgwake.LockToken{first.Receipt}, time.Hour))
	consumer.ack(t, first)
	require.NoError(t, newStream(t, publishing).Publish(t.Context(), "mail", dispatch.StreamMessage{Name: "mail.send"}))
	second := consumer.receive(t, "mail")
	require.Equal(t, "mail.send", second.Name)
	consumer.free(t, second)
	require.NoError(t, consumer.DeadLetter(t.Context(), consumer.receive(t, "mail").Receipt, "poison", "cause"))

	_, err := consumer.Receive(t.Context(), "other", 1, time.Minute)
	require.ErrorIs(t, err, pgwake.ErrPermission)
	require.ErrorIs(t, consumer.Publish(t.Context(), "mail", dispatch.StreamMessage{Name: "x"}), pgwake.ErrPermission)
	consumer.refused(t, `SELECT pgmq.send('mail_queue', '1')`, `SELECT pgmq.send('other_queue', '1')`, `DELETE FROM pgmq.a_mail_queue`,
		`SELECT pgwake_pgmq.attach('mail_queue')`, `DROP TRIGGER pgwake_sent ON pgmq.q_mail_queue`, `CREATE TABLE pgwake_pgmq.mine (n int)`)
	_, err = pgmq.New(t.Context(), producer.pool, nil)
	require.ErrorIs(t, err, pgwake.ErrPermission)
	producer.refused(t, `SELECT pgmq.read('mail_queue', 1, 1)`, `DELETE FROM pgmq.q_mail_queue`, `SELECT pgmq.send('other_queue', '1')`,
		`SELECT pgwake_pgmq.tell('mail_queue', 1, now())`, `SELECT pgwake_pgmq.on_send()`)
	_, err = newStream(t, publishing).Receive(t.Context(), "mail", 1, time.Minute)
	require.ErrorIs(t, err, pgwake.ErrPermission)
}

// Handlers succeed, fail once, and fail for good.
func TestRoles_CoordinatorsOfAConsumer_HandleRetryAndPutAside(t *testing.T) {
	owner := standIn(t)
	owner.exec(t, `SELECT pgmq.create('mail_queue')`)
	consuming, _ := owner.as(t, "pgmq_consumer")
	sending, _ := owner.as(t, "pgmq_producer")
	producer := &stream{pool: open(t, sending)}
	quiet := slog.New(slog.DiscardHandler)
	handled := make(chan string, 10)
	c := dispatch.NewCoordinators(dispatch.StreamSource(newStream(t, consuming), nil), &dispatch.CoordinatorsConfig{
		Logger: quiet, Groups: []dispatch.Group{{Namespaces: []string{"mail"}, Config: dispatch.Config{Logger: quiet, Retry: dispatch.Backoff(time.Millisecond, time.Millisecond)}, Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				handled <- fmt.Sprintf("%s, attempt %d", item.Input, item.Attempt)
				switch {
				case string(item.Input) == `"never"`:
					return nil, dispatch.Permanent(errors.New("never"))
				case string(item.Input) == `"again"` && item.Attempt == 1:
					return nil, errors.New("not yet")
				}
				return nil, nil
			})
		}}},
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	want := []string{`"good", attempt 1`, `"again", attempt 1`, `"again", attempt 2`, `"never", attempt 1`}
	producer.exec(t, `SELECT pgmq.send('mail_queue', m) FROM unnest('{"\"good\"","\"again\"","\"never\""}'::jsonb[]) AS m`)
	var got []string
	for range want {
		select {
		case of := <-handled:
			got = append(got, of)
		case <-time.After(patience):
			t.Fatalf("no more than %v came", got)
		}
	}
	require.ElementsMatch(t, want, got)
	require.Eventually(t, func() bool {
		var left, dead int
		require.NoError(t, owner.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pgmq.q_mail_queue), (SELECT count(*) FROM pgmq.a_mail_queue)`).Scan(&left, &dead))
		return left == 0 && dead == 1
	}, patience, 10*time.Millisecond)
	require.Equal(t, dispatch.Healthy, c.Health().Status)
	stop()
	require.NoError(t, <-ended)
}

// Who may call a function can do with it what he could do without: so USAGE of the schema is no more than that.
func TestInstall_FunctionsRunWithTheRightsOfTheirCaller(t *testing.T) {
	s := standIn(t)
	var public bool
	var owners []string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_namespace n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
			WHERE n.nspname = 'pgwake_pgmq' AND a.grantee = 0),
		(SELECT array_agg(proname::text ORDER BY proname) FROM pg_proc WHERE pronamespace = 'pgwake_pgmq'::regnamespace
			AND (prosecdef OR has_function_privilege('pg_monitor', oid, 'EXECUTE') IS DISTINCT FROM true))`).Scan(&public, &owners))
	require.False(t, public, "PUBLIC has no right on the schema")
	require.Equal(t, []string{"on_create", "on_release", "on_send"}, owners, "these run as the owner, and nobody may call them")
}

// What has the names of what the functions use, on the path of who calls them, is not used.
func TestFunctions_CallerHasOtherThingsOfThoseNames_AreNotDiverted(t *testing.T) {
	s := standIn(t)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `CREATE SCHEMA decoys;
		CREATE FUNCTION decoys.left(text, integer) RETURNS text LANGUAGE sql AS 'SELECT ''diverted''';
		CREATE FUNCTION decoys.substring(text, text) RETURNS text LANGUAGE sql AS 'SELECT ''diverted''';
		CREATE FUNCTION decoys.md5(text) RETURNS text LANGUAGE sql AS 'SELECT ''diverted''';
		CREATE FUNCTION decoys.octet_length(text) RETURNS integer LANGUAGE sql AS 'SELECT 99';
		CREATE FUNCTION decoys.no(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
		CREATE OPERATOR decoys.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = decoys.no);
		CREATE FUNCTION decoys.other(text, text) RETURNS text LANGUAGE sql AS 'SELECT ''diverted''';
		CREATE OPERATOR decoys.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = decoys.other);
		CREATE FUNCTION decoys.more(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT false';
		CREATE OPERATOR decoys.<= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = decoys.more);
		SET LOCAL search_path = decoys, pg_catalog`)
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), `SELECT pgwake_pgmq.namespace_of(q) FROM unnest(ARRAY['orchestration_x', 'worker_a_queue', 'worker__queue', 'b_queue', 'c']) q`)
	require.NoError(t, err)
	namespaces, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"orchestration", "a", "worker", "b", "default"}, namespaces)
	var short, long string
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT pgwake_pgmq.channel('a'), pgwake_pgmq.channel(repeat('x', 45))`).Scan(&short, &long))
	require.Equal(t, "pgmq_message_ready.a", short)
	require.Len(t, long, 19+32)
}
