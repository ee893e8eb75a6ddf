package pgwake_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: can tables and functions of others be built on what a Provider exports?

func TestPool_OfOpen_HasTransactionsForTxVerbs_AndIsClosedByClose(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	require.Equal(t, n.schema, p.Schema())
	require.Equal(t, 1<<20, p.MaxPayload())
	for _, commit := range []bool{false, true} {
		tx, err := p.Pool().Begin(t.Context())
		require.NoError(t, err)
		_, err = p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "x"}, nil)
		require.NoError(t, err)
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			n.requireNoWork(t)
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, "x", n.take(t).Name)
	}
	pool := p.Pool()
	require.NoError(t, p.Close(t.Context()))
	require.Error(t, pool.Ping(t.Context()))
}

func TestPool_OfNew_IsTheCallers(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pool := n.userPool(t, 2)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema})
	require.NoError(t, err)
	require.Same(t, pool, p.Pool())
	require.NoError(t, p.Close(t.Context()))
	require.NoError(t, pool.Ping(t.Context()))
}

func TestSchema_LeftOut_IsTheDefault(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Schema: `Schema of "layers"`})
	require.Equal(t, `Schema of "layers"`, n.Schema())
}

// enqueues calls an SQL function of the Provider's.
func (n *node) enqueues(name string) func(context.Context, pgwake.Querier) error {
	return func(ctx context.Context, q pgwake.Querier) error {
		_, err := q.Exec(ctx, `SELECT `+n.quoted()+`.enqueue_work($1)`, name)
		return err
	}
}

func TestDo_Statement_TakesEffectAndFailsAsAVerb(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	for name, do := range map[string]func(func(context.Context, pgwake.Querier) error) error{
		"Do": func(statement func(context.Context, pgwake.Querier) error) error {
			return n.Do(ctx, "add", statement, pgwake.Worker)
		},
		"DoTx": func(statement func(context.Context, pgwake.Querier) error) error {
			tx := n.begin(t)
			defer tx.Rollback(t.Context())
			if err := n.DoTx(ctx, tx, "add", statement); err != nil {
				return err
			}
			return tx.Commit(t.Context())
		},
	} {
		require.NoError(t, do(n.enqueues("x")), name)
		require.Equal(t, "x", n.take(t).Name)
		err := requireError(t, do(n.enqueues("")), pgwake.ErrInvalid)
		require.Equal(t, "add", err.Op)
		require.NotEmpty(t, err.SQLState)
		require.False(t, err.Unknown)
		own := fmt.Errorf("%w: of the layer", pgwake.ErrNotFound)
		require.Equal(t, name == "Do", requireError(t, do(func(context.Context, pgwake.Querier) error { return own }), own).Unknown, name)
		wrapped := pgwake.WrapError("find", own)
		require.Equal(t, wrapped, do(func(context.Context, pgwake.Querier) error { return wrapped }), name)
		requireError(t, do(nil), pgwake.ErrInvalid)
	}
	requireError(t, n.DoTx(t.Context(), nil, "add", n.enqueues("x")), pgwake.ErrInvalid)
	cancel()
	require.False(t, requireError(t, n.Do(ctx, "add", n.enqueues("x")), context.Canceled).Unknown)
	n.requireNoWork(t)
}

func TestDo_RoleDefaultsToAnotherIsolationLevel_IsReadCommitted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) {
		c.RuntimeParams["options"] = `-c default_transaction_isolation=repeatable\ read`
	}), nil)
	for _, at := range []*node{n, p} {
		var level string
		require.NoError(t, at.Do(t.Context(), "look", func(ctx context.Context, q pgwake.Querier) error {
			return q.QueryRow(ctx, `SELECT current_setting('transaction_isolation')`).Scan(&level)
		}))
		require.Equal(t, "read committed", level)
	}
}

// A statement of a layer waits for a lock.
func TestDo_NoAnswerComes_OutcomeIsUnknown(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(n *node, leave func(), pid int32){
		"the caller leaves":      func(_ *node, leave func(), _ int32) { leave() },
		"the connection is lost": func(n *node, _ func(), pid int32) { n.exec(t, `SELECT pg_terminate_backend($1)`, pid) },
	} {
		for way, call := range map[string]func(*node, context.Context, func(context.Context, pgwake.Querier) error) error{
			"by Do": func(n *node, ctx context.Context, statement func(context.Context, pgwake.Querier) error) error {
				return n.Do(ctx, "add", statement, pgwake.Worker)
			},
			"on the pool": func(n *node, ctx context.Context, statement func(context.Context, pgwake.Querier) error) error {
				return pgwake.WrapError("add", statement(ctx, n.Pool()))
			},
		} {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, nil)
				lock := n.begin(t)
				_, err := lock.Exec(t.Context(), `LOCK TABLE worker_queue IN ACCESS EXCLUSIVE MODE`)
				require.NoError(t, err)
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				outcome := make(chan error, 1)
				go func() { outcome <- call(n, ctx, n.enqueues("x")) }()
				n.awaitBlocked(t, 1)
				cut(n, leave, n.blocked(t)[0])
				var typed *pgwake.Error
				require.ErrorAs(t, <-outcome, &typed)
				require.True(t, typed.Unknown, "%v", typed)
				require.Equal(t, ctx.Err() == nil, typed.Retryable, "%v", typed)
			})
		}
	}
}

// A statement of a layer has a bound of its own, and got no answer: other connections may have lost their peer as well.
func TestDo_NoAnswerWithinABoundOfTheStatement_PoolIsReset(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	config := n.Pool().Config()
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModeDisabled})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	answered := func(seconds float64, outcome error) {
		require.ErrorIs(t, p.Do(t.Context(), "wait", func(ctx context.Context, q pgwake.Querier) error {
			_, err := q.Exec(ctx, `SELECT pg_sleep($1)`, seconds)
			require.NoError(t, err)
			return outcome
		}), outcome)
	}
	answered(0, nil)
	made := pool.Stat().NewConnsCount()
	answered(5.1, context.DeadlineExceeded)
	answered(0, nil)
	require.Greater(t, pool.Stat().NewConnsCount(), made)
}

func TestDo_ProviderCloses_IsWaitedFor_AndNoneBeginsAfter(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	began, end, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- p.Do(t.Context(), "add", func(ctx context.Context, q pgwake.Querier) error {
			close(began)
			<-end
			return n.enqueues("x")(ctx, q)
		})
	}()
	<-began
	closed := make(chan error, 1)
	go func() { closed <- p.Close(context.Background()) }()
	require.Eventually(t, func() bool {
		return errors.Is(p.Do(t.Context(), "look", func(context.Context, pgwake.Querier) error { return nil }), pgwake.ErrClosed)
	}, patience, 1)
	requireError(t, p.Do(t.Context(), "add", n.enqueues("late")), pgwake.ErrClosed)
	close(end)
	require.NoError(t, <-done)
	require.NoError(t, <-closed)
	require.Equal(t, []string{"x"}, n.takeAll(t))
	requireError(t, p.Migrate(t.Context(), remarks), pgwake.ErrClosed)
}

// What does not heed its context goes on until it returns, and Close does not wait for that longer than its own.
func TestDo_FunctionDoesNotHeedItsContext_CloseReturnsAllTheSame(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	end, done, closed := make(chan struct{}), make(chan error, 1), make(chan error, 1)
	go func() {
		done <- p.Do(t.Context(), "hang", func(context.Context, pgwake.Querier) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			closed <- p.Close(ctx)
			<-end
			return nil
		})
	}()
	requireError(t, <-closed, context.DeadlineExceeded)
	requireError(t, p.Do(t.Context(), "look", func(context.Context, pgwake.Querier) error { return nil }), pgwake.ErrClosed)
	later := make(chan error, 1)
	go func() { later <- p.Close(context.Background()) }()
	close(end)
	require.NoError(t, <-done)
	require.NoError(t, <-later, "the rest ends when it has")
}

// remarks is a layer.
var remarks = migrations.Layer{Table: "remarks_migrations", Empty: "require_no_remarks", Files: fstest.MapFS{"00001_remarks.sql": {Data: []byte(`
-- +goose Up
CREATE TABLE remarks (remark text);
-- +goose StatementBegin
CREATE FUNCTION require_no_remarks() RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM remarks) THEN
        RAISE EXCEPTION 'there are remarks' USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
-- +goose Down
LOCK TABLE remarks IN ACCESS EXCLUSIVE MODE;
SELECT require_no_remarks();
DROP FUNCTION require_no_remarks;
DROP TABLE remarks;
`)}}}

func TestMigrate_Layer_ComesIntoTheProvidersSchema(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.openAt(t, n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{SkipMigrate: true})
	requireError(t, other.Migrate(t.Context(), remarks), pgwake.ErrNotMigrated)
	for range 2 {
		require.NoError(t, n.Migrate(t.Context(), remarks))
		require.NoError(t, other.Migrate(t.Context(), remarks))
	}
	n.exec(t, `INSERT INTO remarks VALUES ('x')`)

	bad := remarks
	bad.Empty = ""
	requireError(t, n.Migrate(t.Context(), bad), pgwake.ErrConfig)
	bad = remarks
	bad.Files = fstest.MapFS{"00001_other.sql": {Data: []byte("-- +goose Up\nSELECT 1;\n")}}
	require.ErrorIs(t, requireError(t, n.Migrate(t.Context(), bad), pgwake.ErrNotMigrated), migrations.ErrForeign)
}

// Migrations cannot go through a transaction pooler.
func TestMigrate_ListenConfigIsAnother_ItIsUsed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	direct := n.Pool().Config().ConnConfig
	direct.RuntimeParams["application_name"] = "direct " + n.schema
	p := n.openAt(t, n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{ListenConfig: direct})
	layer := remarks
	files := fstest.MapFS{}
	for name, file := range remarks.Files.(fstest.MapFS) {
		files[name] = &fstest.MapFile{Data: []byte(strings.Replace(string(file.Data), "-- +goose Up\n", "-- +goose Up\nCREATE TABLE by AS SELECT current_setting('application_name') AS name;\n", 1))}
	}
	layer.Files = files
	require.NoError(t, p.Migrate(t.Context(), layer))
	require.Equal(t, []string{"direct " + n.schema}, query[string](t, n, `SELECT name FROM by`))
}

func TestWrapError_WhateverItIs_IsClassified(t *testing.T) {
	t.Parallel()
	require.NoError(t, pgwake.WrapError("count", nil))
	n := newNode(t, nil)
	for name, c := range map[string]struct {
		sql                string
		is                 error
		state              string
		retryable, unknown bool
	}{
		"a lost lease":   {`DO $$ BEGIN RAISE 'gone' USING ERRCODE = 'PW001'; END $$`, pgwake.ErrLockLost, "PW001", false, false},
		"not found":      {`DO $$ BEGIN RAISE 'none' USING ERRCODE = 'PW002'; END $$`, pgwake.ErrNotFound, "PW002", false, false},
		"bad argument":   {`SELECT nonsense::uuid FROM (VALUES ('x')) AS t (nonsense)`, pgwake.ErrInvalid, "22P02", false, false},
		"not there":      {`SELECT nothing_of_the_kind()`, pgwake.ErrNotMigrated, "42883", false, false},
		"a layer's own":  {`DO $$ BEGIN RAISE 'twice' USING ERRCODE = 'PW007'; END $$`, nil, "PW007", false, false},
		"deadlock":       {`DO $$ BEGIN RAISE 'locked' USING ERRCODE = '40P01'; END $$`, nil, "40P01", true, false},
		"it was the end": {`SELECT pg_terminate_backend(pg_backend_pid())`, nil, "57P01", true, true},
	} {
		_, err := n.Pool().Exec(t.Context(), c.sql)
		require.Error(t, err, name)
		wrapped := pgwake.WrapError("count", fmt.Errorf("of the layer: %w", err))
		var typed *pgwake.Error
		require.ErrorAs(t, wrapped, &typed)
		require.Equal(t, []any{"count", c.state, c.retryable, c.unknown}, []any{typed.Op, typed.SQLState, typed.Retryable, typed.Unknown}, name)
		if c.is != nil {
			require.ErrorIs(t, wrapped, c.is, name)
		}
		require.ErrorAs(t, wrapped, new(*pgconn.PgError))
		require.Equal(t, wrapped, pgwake.WrapError("again", wrapped), "it is idempotent")
		again := fmt.Errorf("deeper: %w", wrapped)
		require.Equal(t, again, pgwake.WrapError("again", again))
	}
	require.True(t, requireError(t, pgwake.WrapError("commit", driver.ErrBadConn), driver.ErrBadConn).Unknown, "lib/pq has it for a commit whose answer is lost")
	for name, err := range map[string]error{
		"of no server": errors.New("of the layer"),
		"an argument":  fmt.Errorf("%w: no such definition", pgwake.ErrInvalid),
		"no rows":      pgx.ErrNoRows,
		"a rollback":   pgx.ErrTxCommitRollback,
		"never sent": func() error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := pgx.ConnectConfig(ctx, n.Pool().Config().ConnConfig)
			return err
		}(),
	} {
		require.False(t, requireError(t, pgwake.WrapError("count", err), err).Unknown, name)
	}
}

func TestLockToken_OfAFetch_IsWhatTheFunctionsTake(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "x")
	work := n.take(t)
	id, token, err := work.LockToken.WorkItem()
	require.NoError(t, err)
	require.Equal(t, work.ID, id)
	ack := func() error {
		_, err := n.Pool().Exec(t.Context(), `SELECT `+n.quoted()+`.ack_work(p_id => $1, p_token => $2)`, id, token)
		return pgwake.WrapError("ack", err)
	}
	require.NoError(t, ack())
	requireError(t, ack(), pgwake.ErrLockLost)
	requireError(t, n.AckWorkItem(t.Context(), work.LockToken, nil), pgwake.ErrLockLost)

	n.send(t, "order/7", "k") // an id with a slash
	turn := n.takeTurn(t)
	instance, token, err := turn.LockToken.Turn()
	require.NoError(t, err)
	require.Equal(t, "order/7", instance)
	n.exec(t, `SELECT ack_orchestration(p_instance => $1, p_token => $2, p_execution => 1, p_name => 'flow')`, instance, token)
	requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{ExecutionID: 1}), pgwake.ErrLockLost)

	for _, made := range []pgwake.LockToken{"", "x", "/", "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11", "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/"} {
		_, _, err = made.WorkItem()
		require.ErrorIs(t, err, pgwake.ErrLockLost, made)
		_, _, err = made.Turn()
		require.ErrorIs(t, err, pgwake.ErrLockLost, made)
	}
	_, _, err = turn.LockToken.WorkItem()
	require.ErrorIs(t, err, pgwake.ErrLockLost)
}

func TestDoAck_OfAnItemAndOfATurn_TellsThisNodeWithoutANotification(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "x")
	item := n.take(t)
	turns := make(chan *pgwake.OrchestrationItem)
	fetch := func() {
		go func() {
			turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: time.Minute, PollTimeout: patience})
			if err != nil {
				t.Error(err)
			}
			turns <- turn
		}()
		require.Eventually(t, func() bool { return n.Stats().Orchestrator.Settled && n.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
	}
	fetch()
	before := n.Stats().Orchestrator
	acks := func(sql string, args ...any) func(context.Context, pgwake.Querier, bool) (pgx.Rows, error) {
		return func(ctx context.Context, q pgwake.Querier, quiet bool) (pgx.Rows, error) {
			require.True(t, quiet, "it hears")
			return q.Query(ctx, strings.ReplaceAll(sql, "in.", n.quoted()+"."), args...)
		}
	}
	id, claim, err := item.LockToken.WorkItem()
	require.NoError(t, err)
	require.NoError(t, n.DoAck(t.Context(), "end", item.LockToken, acks(`SELECT 'orchestrator', in.ack_work($1, $2, 'i', 'start', p_name => 'flow', p_quiet => true), now(), now(), NULL::json, ''`, id, claim)))
	turn := <-turns
	require.Equal(t, "i", turn.Instance)
	_, claim, err = turn.LockToken.Turn()
	require.NoError(t, err)
	fetch()
	ack := acks(`SELECT * FROM in.ack_orchestration($1, $2, 1, 'flow', p_message_instances => ARRAY['j'], p_message_kinds => ARRAY['start'], p_message_names => ARRAY['flow'], p_quiet => true)`, "i", claim)
	require.NoError(t, n.DoAck(t.Context(), "end", turn.LockToken, ack))
	require.Equal(t, "j", (<-turns).Instance)
	require.Equal(t, before.Tokens["notify"], n.Stats().Orchestrator.Tokens["notify"])

	require.ErrorIs(t, n.DoAck(t.Context(), "end", turn.LockToken, ack), pgwake.ErrLockLost)
	require.ErrorIs(t, n.DoAck(t.Context(), "end", "x", ack), pgwake.ErrLockLost)
	require.ErrorIs(t, n.DoAck(t.Context(), "end", turn.LockToken, nil), pgwake.ErrInvalid)
}

// What triggers of a layer on worker_queue may count on.
func TestWorkerQueue_ItemIsSettledInAnyWay_ItsRowIsDeletedOnceAndOnlyThen(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `CREATE TABLE changes (number serial, op text, id bigint)`)
	n.exec(t, `CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
		BEGIN INSERT INTO changes (op, id) VALUES (TG_OP, CASE WHEN TG_OP = 'DELETE' THEN OLD.id ELSE NEW.id END); RETURN NULL; END $$`)
	n.exec(t, `CREATE TRIGGER note AFTER INSERT OR DELETE ON worker_queue FOR EACH ROW EXECUTE FUNCTION note()`)
	enqueue := func() int64 {
		added, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
		require.NoError(t, err)
		return added.ID
	}
	changes := func(id int64) []string {
		return query[string](t, n, `SELECT op FROM changes WHERE id = $1 ORDER BY number`, id)
	}
	for name, settle := range map[string]func(token pgwake.LockToken) error{
		"ack":     func(token pgwake.LockToken) error { return n.AckWorkItem(t.Context(), token, nil) },
		"acks":    func(token pgwake.LockToken) error { return n.AckWorkItems(t.Context(), []pgwake.LockToken{token}) },
		"batched": func(token pgwake.LockToken) error { return n.AckBatched(t.Context(), token, nil) },
	} {
		id := enqueue()
		item := n.take(t)
		_, err := n.RenewWorkItemLock(t.Context(), item.LockToken, time.Minute)
		require.NoError(t, err)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
		require.Equal(t, []string{"INSERT"}, changes(id), "it is given back, and the same row")
		require.NoError(t, settle(n.take(t).LockToken), name)
		require.Equal(t, []string{"INSERT", "DELETE"}, changes(id), name)
	}
	id := enqueue()
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, "no", ""))
	require.Equal(t, []string{"INSERT", "DELETE"}, changes(id))
	redriven, err := n.RedriveDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Equal(t, []string{"INSERT", "DELETE", "INSERT"}, changes(id), "it comes back with its id")
	item := n.take(t)
	next := enqueue()
	fetched, err := n.FetchWorkItems(t.Context(), 1, &pgwake.FetchOptions{Ack: []pgwake.LockToken{item.LockToken}})
	require.NoError(t, err)
	require.Equal(t, []string{"INSERT", "DELETE", "INSERT", "DELETE"}, changes(id), "with a fetch")
	require.NoError(t, n.AbandonWorkItem(t.Context(), fetched[0].LockToken, nil))
	_, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{MaxAttempts: 1, NoWait: true})
	requireError(t, err, pgwake.ErrNoWork)
	require.Equal(t, []string{"INSERT", "DELETE"}, changes(next), "of which all attempts ended a process")
}

func TestDoEnqueue_ItemOfThisNode_IsToldWithoutTheFallback(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{FallbackInterval: time.Hour})
	other := n.another(t)
	for _, waits := range []*node{n, other} {
		got := make(chan error, 1)
		go func() {
			_, err := waits.FetchWorkItem(t.Context(), &pgwake.FetchOptions{Tags: pgwake.Tags("t"), PollTimeout: 20 * time.Second})
			got <- err
		}()
		require.Eventually(t, func() bool { return waits.Stats().Worker.Parked == 1 }, 20*time.Second, 10*time.Millisecond)
		require.NoError(t, n.DoEnqueue(t.Context(), "add", func(ctx context.Context, q pgwake.Querier, quiet bool) ([]pgwake.Due, error) {
			_, err := q.Exec(ctx, `SELECT * FROM `+n.quoted()+`.enqueue_work_many('{x}', '{1}', p_tags => '{t}', p_quiet => $1)`, quiet)
			return []pgwake.Due{{Namespace: pgwake.DefaultNamespace, Tag: "t"}}, err
		}))
		require.NoError(t, <-got)
	}
	requireError(t, n.DoEnqueue(t.Context(), "add", nil), pgwake.ErrInvalid)
}
