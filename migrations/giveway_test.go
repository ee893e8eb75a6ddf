package migrations_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: do those who work go on while a migration waits for one of them?

// noteColumn changes a table that all enqueue into.
const noteColumn = `-- +goose Up
ALTER TABLE worker_queue ADD COLUMN noted text;
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
ALTER TABLE worker_queue DROP COLUMN noted;
`

// openTransaction leaves one open that has added an item.
func openTransaction(t *testing.T, s *schema) pgx.Tx {
	t.Helper()
	config := s.conn.Config().Copy()
	config.RuntimeParams["application_name"] = "a long report"
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT enqueue_work('of a long transaction')`)
	require.NoError(t, err)
	return tx
}

// produce enqueues while a statement of a migration has waited for a lock at least once, some seconds at the most for each item.
func produce(t *testing.T, s *schema) {
	t.Helper()
	s.exec(t, `SET statement_timeout = '5 s'`)
	waits := func() bool {
		return s.list(t, `SELECT count(*)::text FROM pg_locks WHERE relation = 'worker_queue'::regclass AND NOT granted`)[0] != "0"
	}
	for waited := 0; waited < 3; {
		s.exec(t, `SELECT enqueue_work('x')`)
		if waits() {
			waited++
			s.exec(t, `SELECT enqueue_work('behind a migration')`)
		}
	}
}

func TestUp_ATransactionHoldsALock_ProducersGoOn_AndTheMigrationIsDoneOnceItEnds(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	l := notes(notesTable, noteColumn)
	for _, change := range []func() error{
		func() error { return l.Up(t.Context(), s.config.Copy(), s.name) },
		func() error { return l.Down(t.Context(), s.config.Copy(), s.name) },
	} {
		tx := openTransaction(t, s)
		done := make(chan error, 1)
		go func() { done <- change() }()
		produce(t, s)
		select {
		case err := <-done:
			require.NoError(t, err)
			t.Fatal("it did not wait")
		default:
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-done)
	}
	current, _ := layerVersion(t, s, l)
	require.Zero(t, current)
	require.Equal(t, []string{"2"}, s.list(t, `SELECT count(*)::text FROM worker_queue WHERE name = 'of a long transaction'`))
}

func TestUp_ATransactionDoesNotEnd_SaysWhose_AndCanGoOnLater(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	l := notes(notesTable, noteColumn)
	tx := openTransaction(t, s)
	err := migrations.WithPatience(l, time.Millisecond).Up(t.Context(), s.config, s.name)
	require.ErrorIs(t, err, migrations.ErrBusy)
	require.Equal(t, "55P03", stateOf(err))
	require.ErrorContains(t, err, "worker_queue")
	require.ErrorContains(t, err, "a long report")
	current, _ := layerVersion(t, s, l)
	require.EqualValues(t, 1, current, "what came before is there")
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, l.Up(t.Context(), s.config, s.name))
	current, _ = layerVersion(t, s, l)
	require.EqualValues(t, 2, current)
}

func TestUp_AStrangerHoldsTheLockOfMigrations_IsBusyAndSaysWho(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	var pid string
	require.NoError(t, s.conn.QueryRow(t.Context(), `SELECT pg_backend_pid()::text
		FROM pg_advisory_lock(hashtextextended('pgwake migrations of ' || $1, 0))`, s.name).Scan(&pid))
	l := migrations.WithPatience(notes(notesTable), 100*time.Millisecond)
	err := l.Up(t.Context(), s.conn.Config(), s.name)
	require.ErrorIs(t, err, migrations.ErrBusy)
	require.ErrorContains(t, err, "pid "+pid+" migrates")
	s.exec(t, `SELECT pg_advisory_unlock_all()`)
}

func TestUp_StatementTimeoutOfTheRole_IsForStatementsOfApplications(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	config := s.config.Copy()
	config.RuntimeParams["statement_timeout"] = "2s"
	require.NoError(t, notes(notesTable, `-- +goose Up
SELECT pg_sleep(2.5);
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
`).Up(t.Context(), config, s.name))
}

func TestUp_RoleReadsBackslashesAsEscapes_FilesAreWhatTheySay(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	config := s.config.Copy()
	config.RuntimeParams["standard_conforming_strings"] = "off"
	require.NoError(t, notes(notesTable, `-- +goose Up
ALTER TABLE notes ALTER note SET DEFAULT '\.';
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
`).Up(t.Context(), config, s.name))
	require.Equal(t, []string{`\.`}, s.list(t, `INSERT INTO notes VALUES (1) RETURNING note`))
}

func TestUp_SessionsBeginWithAnotherStyleOfDatesAndEncoding_TextIsWhatTheFilesHave(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			s := newSchema(t, "")
			config := s.config.Copy()
			config.RuntimeParams["datestyle"], config.RuntimeParams["client_encoding"] = "German", "LATIN1" // as a role would have it
			config.DefaultQueryExecMode = mode
			require.NoError(t, migrations.Up(t.Context(), config, s.name))
			l := notes(notesTable, `-- +goose Up
COMMENT ON TABLE notes IS 'größer ✉';
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
`)
			require.NoError(t, l.Up(t.Context(), config, s.name))
			require.NoError(t, l.Up(t.Context(), config, s.name), "again")
			require.Equal(t, []string{"größer ✉"}, s.list(t, `SELECT obj_description('notes'::regclass, 'pg_class')`))
			require.NoError(t, l.Down(t.Context(), config, s.name))
			require.NoError(t, migrations.Down(t.Context(), config, s.name))
		})
	}
}

// What a session changes without the turn, somebody else may change as well.
func TestUp_TheSessionThatHasTheTurnEnds_NothingMoreIsChanged(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	l := notes(notesTable, noteColumn)
	tx := openTransaction(t, s)
	done := make(chan error, 1)
	go func() { done <- l.Up(t.Context(), s.config.Copy(), s.name) }()
	produce(t, s)
	s.exec(t, `RESET statement_timeout`)
	require.Equal(t, []string{"true"}, s.list(t, `
		SELECT pg_terminate_backend(pid, 60000)::text FROM pg_locks, hashtextextended('pgwake migrations of ' || current_schema(), 0) AS key
		 WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		   AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295`))
	require.NoError(t, tx.Commit(t.Context()))
	err := <-done
	require.True(t, stateOf(err) == "57P01" || errors.Is(err, pgconn.ErrConnClosed), "%v", err)
	current, _ := layerVersion(t, s, l)
	require.EqualValues(t, 1, current, "what came before is there")
	require.NoError(t, l.Up(t.Context(), s.config, s.name))
}

// The server goes on with a statement whose caller has gone, if no request to cancel it gets there.
func TestUp_ContextEndsDuringAStatement_NobodyElseHasTheTurnUntilTheServerIsDone(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	l := notes(notesTable, `-- +goose Up
SET LOCAL lock_timeout = 0;
SELECT pg_advisory_xact_lock(hashtextextended(current_schema(), 0));
CREATE TABLE more_notes ();
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
DROP TABLE more_notes;
`)
	s.exec(t, `SELECT pg_advisory_lock(hashtextextended(current_schema(), 0))`)
	config := s.config.Copy()
	var gone atomic.Bool
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if gone.Load() {
			return nil, errors.New("nothing gets there")
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- l.Up(ctx, config, s.name) }()
	require.Eventually(t, func() bool {
		return s.list(t, `SELECT count(*)::text FROM pg_locks, hashtextextended(current_schema(), 0) AS key
			WHERE locktype = 'advisory' AND NOT granted AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295`)[0] == "1"
	}, time.Minute, 10*time.Millisecond)
	gone.Store(true)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)

	next, end := context.WithTimeout(t.Context(), 20*time.Second)
	defer end()
	err := migrations.WithPatience(l, 100*time.Millisecond).Up(next, s.config.Copy(), s.name)
	require.ErrorIs(t, err, migrations.ErrBusy)
	require.ErrorContains(t, err, "migrates")
	s.exec(t, `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, l.Up(t.Context(), s.config.Copy(), s.name))
	require.Equal(t, []string{"2"}, s.list(t, `SELECT count(*)::text FROM `+l.Table+` WHERE version_id > 0`))
}
