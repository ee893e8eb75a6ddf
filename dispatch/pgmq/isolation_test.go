package pgmq_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/stretchr/testify/require"
)

// This file answers: do the verbs go by what others have left, whatever the role's isolation level is?

// strict is a Stream where the default is another level than READ COMMITTED.
func strict(t *testing.T, level string) *stream {
	t.Helper()
	url := database(t, pgmqtest.Install)
	admin := open(t, url)
	var set string
	require.NoError(t, admin.QueryRow(t.Context(), `SELECT format('ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), $1::text)`, level).Scan(&set))
	_, err := admin.Exec(t.Context(), set)
	require.NoError(t, err)
	s := newStream(t, url)
	var got string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SHOW transaction_isolation`).Scan(&got))
	require.Equal(t, level, got)
	return s
}

func TestIsolation_DefaultIsAnother_EveryVerbIsReadCommitted(t *testing.T) {
	for _, level := range []string{"repeatable read", "serializable"} {
		s := strict(t, level)
		s.exec(t, `CREATE TABLE levels (level text); CREATE FUNCTION level() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN INSERT INTO public.levels VALUES (TG_OP || '' '' || current_setting(''transaction_isolation'')); RETURN NULL; END';
			SELECT pgmq.create('a_queue'); CREATE TRIGGER level AFTER INSERT OR UPDATE OR DELETE ON pgmq.q_a_queue EXECUTE FUNCTION level()`)
		saw := func(verb string) {
			t.Helper()
			var n, read int
			require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE level LIKE '% read committed') FROM levels`).Scan(&n, &read))
			require.Positive(t, n, verb)
			require.Equal(t, n, read, "%s at %s", verb, level)
			s.exec(t, `TRUNCATE levels`)
		}
		require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x"}, dispatch.StreamMessage{Name: "y"}))
		saw("publish")
		d := s.receive(t, "a")
		saw("receive")
		require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, time.Minute))
		saw("extend")
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}))
		saw("nack")
		require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{s.receive(t, "a").Receipt}))
		saw("ack")
		d = s.receive(t, "a")
		saw("receive again")
		require.NoError(t, s.DeadLetter(t.Context(), d.Receipt, "r", "c"))
		saw("dead letter")
		require.ErrorIs(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}), pgwake.ErrLockLost)
	}
}

// What somebody else changes while a verb waits for it is an error at another level.
func TestIsolation_DefaultIsAnother_WhoWaitsGoesOn(t *testing.T) {
	s := strict(t, "serializable")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	behind := func(statement string, verb func() error) {
		t.Helper()
		other, err := s.pool.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = other.Rollback(context.WithoutCancel(ctx)) }()
		_, err = other.Exec(ctx, statement)
		require.NoError(t, err)
		pid, ended := other.Conn().PgConn().PID(), make(chan error, 1)
		go func() { ended <- verb() }()
		require.Eventually(t, func() (waits bool) {
			require.NoError(t, s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, pid).Scan(&waits))
			return waits
		}, patience, 10*time.Millisecond)
		require.NoError(t, other.Commit(ctx))
		require.NoError(t, <-ended)
	}
	behind(`SELECT pgwake_pgmq.send('a', '{1}', '{NULL}', '{0}')`, func() error {
		return s.Publish(ctx, "a", dispatch.StreamMessage{Name: "x"})
	})
	d := s.receive(t, "a")
	const touch = `UPDATE pgmq.q_a_queue SET headers = coalesce(headers, '{}') || '{"touched": "yes"}'`
	behind(touch, func() error { return s.Extend(ctx, []pgwake.LockToken{d.Receipt}, time.Minute) })
	behind(touch, func() error { return s.Ack(ctx, []pgwake.LockToken{d.Receipt}) })
}

func TestNew_SessionsCannotBeRead_SaysSo(t *testing.T) {
	config, err := pgxpool.ParseConfig(database(t, pgmqtest.Install))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["datestyle"] = "German"
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pgmq.New(t.Context(), pool, nil)
	require.ErrorIs(t, err, pgwake.ErrConfig)
	require.ErrorContains(t, err, "German")
}
