package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/devpg"
)

// keeper is a server whose sessions are kept.
type keeper struct {
	*sessions
	t   *testing.T
	url string // theirs
	srv *devpg.Server
}

// keeping keeps sessions of the server that tests share, or of one with these settings.
func keeping(t *testing.T, settings map[string]string) *keeper {
	t.Helper()
	srv := needServer(t)
	if settings != nil {
		var err error
		srv, err = devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true, Settings: settings})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, srv.Stop(context.Background())) })
	}
	s, ours, err := keepSessions(srv.URL)
	require.NoError(t, err)
	t.Cleanup(s.close)
	return &keeper{s, t, ours, srv}
}

// removes has a statement end what the test is about to leave on the server, once its clients have ended.
func (k *keeper) removes(sql string) {
	k.t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), k.srv.URL)
		require.NoError(k.t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(context.Background(), sql)
		require.NoError(k.t, err)
	})
}

// connect is a client. with is more of the URL's query.
func (k *keeper) connect(with string) *pgx.Conn {
	k.t.Helper()
	conn, err := pgx.Connect(k.t.Context(), k.url+with)
	require.NoError(k.t, err)
	k.t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func (k *keeper) exec(conn *pgx.Conn, sql string) {
	k.t.Helper()
	_, err := conn.Exec(k.t.Context(), sql)
	require.NoError(k.t, err)
}

func one[T any](k *keeper, conn *pgx.Conn, sql string) (value T) {
	k.t.Helper()
	require.NoError(k.t, conn.QueryRow(k.t.Context(), sql).Scan(&value))
	return value
}

// goodbye ends a client, and waits until its session is spare, or is none.
func (k *keeper) goodbye(conn *pgx.Conn, spare int) {
	k.t.Helper()
	require.NoError(k.t, conn.Close(k.t.Context()))
	k.spares(spare)
}

func (k *keeper) spares(count int) {
	k.t.Helper()
	require.Eventually(k.t, func() bool { return k.spareNow() == count }, 10*time.Second, 10*time.Millisecond)
}

func (k *keeper) spareNow() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.spare)
}

func TestSessions_ClientSaysGoodbye_TheNextHasItsSessionAsANewOne(t *testing.T) {
	k := keeping(t, nil)
	k.removes(`DROP ROLE IF EXISTS somebody`)
	const named = "&application_name=it%27s%20mine"
	first := k.connect(named)
	pid := first.PgConn().PID()
	require.Equal(t, "it's mine", one[string](k, first, `SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()`))
	for _, left := range []string{
		`SET statement_timeout = '1 h'`, `SET my.setting = 'x'`, `CREATE TEMP TABLE left_there (i int)`, `LISTEN here`, `SELECT pg_advisory_lock(7)`,
		`PREPARE left_there AS SELECT 1`, `CREATE ROLE somebody`, `GRANT somebody TO postgres`, `SET ROLE somebody`, `DECLARE c CURSOR WITH HOLD FOR SELECT 1`,
		`SET TimeZone = 'Asia/Tokyo'`, `SET application_name = 'another'`,
	} {
		k.exec(first, left)
	}
	k.goodbye(first, 1)

	second := k.connect(named)
	k.spares(0)
	require.Equal(t, pid, second.PgConn().PID())
	require.Equal(t, "it's mine", second.PgConn().ParameterStatus("application_name"))
	require.Equal(t, "UTC", second.PgConn().ParameterStatus("TimeZone"))
	require.Equal(t, "it's mine", one[string](k, second, `SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()`))
	require.Equal(t, "0 UTC postgres", one[string](k, second, `SELECT concat_ws(' ', current_setting('statement_timeout'), current_setting('TimeZone'), current_user)`))
	require.Empty(t, one[string](k, second, `SELECT coalesce(current_setting('my.setting', true), '')`))
	require.Zero(t, one[int](k, second, `SELECT (SELECT count(*) FROM pg_prepared_statements WHERE name = 'left_there') + (SELECT count(*) FROM pg_cursors WHERE name = 'c')
		+ (SELECT count(*) FROM pg_listening_channels()) + (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory') + (SELECT count(*) FROM pg_class WHERE relname = 'left_there')`))
	require.NotEqual(t, pid, k.connect(named).PgConn().PID(), "it is taken")
}

func TestSessions_ClientWouldHaveHadAnother_HasANewOne(t *testing.T) {
	k := keeping(t, nil)
	first := k.connect("&application_name=first")
	k.goodbye(first, 1)
	for _, with := range []string{"", "&application_name=second", "&application_name=first&statement_timeout=77"} {
		require.NotEqual(t, first.PgConn().PID(), k.connect(with).PgConn().PID(), "%q", with)
	}
	require.Equal(t, first.PgConn().PID(), k.connect("&application_name=first").PgConn().PID())
}

func TestSessions_ClientLeavesSomethingOpen_ItsSessionEnds(t *testing.T) {
	k := keeping(t, nil)
	watcher := k.connect("")
	gone := func(conn *pgx.Conn) bool {
		return one[bool](k, watcher, fmt.Sprintf(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %d)`, conn.PgConn().PID()))
	}
	ended := func(conn *pgx.Conn) {
		t.Helper()
		require.Eventually(t, func() bool { return gone(conn) }, 10*time.Second, 10*time.Millisecond)
		k.spares(0)
	}
	in := k.connect("")
	k.exec(in, `BEGIN`)
	k.goodbye(in, 0)
	ended(in)

	without := k.connect("")
	require.NoError(t, without.PgConn().Conn().Close()) // without a word
	ended(without)

	amid := k.connect("")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := amid.Exec(ctx, `SELECT pg_sleep(60)`)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	// pgx cancels, and then says goodbye: the server may have answered by then.
	require.Eventually(t, func() bool { return k.spareNow() == 1 || gone(amid) }, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, 1, one[int](k, k.connect(""), `SELECT 1`))
}

func TestSessions_Cancel_ReachesTheServer(t *testing.T) {
	k := keeping(t, nil)
	conn := k.connect("")
	asking, end := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	defer asked.Wait()
	defer end()
	asked.Go(func() {
		for asking.Err() == nil { // the first may come before the statement
			_ = conn.PgConn().CancelRequest(asking)
			select {
			case <-asking.Done():
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	_, err := conn.PgConn().Exec(t.Context(), `SELECT pg_sleep(60)`).ReadAll()
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "57014", refused.Code)
	end()
	asked.Wait()
	require.NoError(t, conn.Close(t.Context()))
}

func TestSessions_TerminatedWhileSpare_TheNextHasANewOne(t *testing.T) {
	k := keeping(t, nil)
	first, killer := k.connect(""), k.connect("")
	k.goodbye(first, 1)
	require.True(t, one[bool](k, killer, fmt.Sprintf(`SELECT pg_terminate_backend(%d, 10000)`, first.PgConn().PID())))
	second := k.connect("")
	require.NotEqual(t, first.PgConn().PID(), second.PgConn().PID())
	require.Equal(t, 1, one[int](k, second, `SELECT 1`))
}

func TestSessions_TerminatedWhileInUse_ClientIsTold(t *testing.T) {
	k := keeping(t, nil)
	first, killer := k.connect(""), k.connect("")
	require.True(t, one[bool](k, killer, fmt.Sprintf(`SELECT pg_terminate_backend(%d, 10000)`, first.PgConn().PID())))
	_, err := first.Exec(t.Context(), `SELECT 1`)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "57P01", refused.Code)
	k.goodbye(first, 0)
}

func TestSessions_TooMany_SpareOnesMakeRoom_AndThenItIsAnError(t *testing.T) {
	k := keeping(t, map[string]string{"max_connections": "8", "superuser_reserved_connections": "0", "max_wal_senders": "0", "autovacuum": "off"})
	var some []*pgx.Conn
	for range 6 {
		some = append(some, k.connect(""))
	}
	for i, conn := range some {
		k.goodbye(conn, i+1)
	}
	for range 8 {
		k.connect("&statement_timeout=77")
	}
	k.spares(0)
	_, err := pgx.Connect(t.Context(), k.url)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "53300", refused.Code)
}

func TestSessions_ManyThatNobodyWantsAgain_OneThatWasIsKept(t *testing.T) {
	k := keeping(t, map[string]string{"max_connections": "100"})
	first := k.connect("")
	pid := first.PgConn().PID()
	k.goodbye(first, 1)
	k.goodbye(k.connect(""), 1)
	for i := range mostSpare + 1 {
		name := fmt.Sprintf("client%02d", i)
		require.NoError(t, k.connect("&application_name="+name).Close(t.Context()))
		require.Eventually(t, func() bool {
			k.mu.Lock()
			defer k.mu.Unlock()
			return strings.Contains(k.spare[len(k.spare)-1].wanted, name)
		}, 10*time.Second, 10*time.Millisecond)
	}
	k.spares(mostSpare)
	require.Equal(t, pid, k.connect("").PgConn().PID())
}

func TestSessions_OtherDatabase_IsPassedThrough(t *testing.T) {
	k := keeping(t, nil)
	k.removes(`DROP DATABASE IF EXISTS other WITH (FORCE)`)
	k.exec(k.connect(""), `CREATE DATABASE other`)
	u, err := url.Parse(k.url)
	require.NoError(t, err)
	u.Path = "/other"
	conn, err := pgx.Connect(t.Context(), u.String())
	require.NoError(t, err)
	require.Equal(t, "other", one[string](k, conn, `SELECT current_database()`))
	k.goodbye(conn, 0)
	u.Path = "/none"
	_, err = pgx.Connect(t.Context(), u.String())
	require.ErrorContains(t, err, "3D000")
}

func TestSessions_LargeMessages_ComeWhole(t *testing.T) {
	k := keeping(t, nil)
	k.removes(`DROP TABLE IF EXISTS many`)
	conn := k.connect("")
	for _, size := range []int{1, bufferSize - 1, bufferSize, 10 * bufferSize, 5_000_000} {
		text := make([]byte, size)
		for i := range text {
			text[i] = byte('a' + i%26)
		}
		var back string
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT $1::text`, string(text)).Scan(&back))
		require.Equal(t, string(text), back)
	}
	n, err := conn.CopyFrom(t.Context(), pgx.Identifier{"many"}, []string{"i"}, pgx.CopyFromSlice(1, func(int) ([]any, error) { return []any{1}, nil }))
	require.Error(t, err)
	require.Zero(t, n)
	k.exec(conn, `CREATE TABLE many (i int)`)
	n, err = conn.CopyFrom(t.Context(), pgx.Identifier{"many"}, []string{"i"}, pgx.CopyFromSlice(50_000, func(i int) ([]any, error) { return []any{i}, nil }))
	require.NoError(t, err)
	require.EqualValues(t, 50_000, n)
	k.goodbye(conn, 1)
}
