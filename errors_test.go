package pgwake_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

func TestError_AnyVerbThatFails_NamesTheVerbAndLeadsToTheCause(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	stale := claims{"8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/1", "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/i"}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range poolVerbs(n, ctx, stale) {
		err := requireError(t, call(), context.Canceled)
		require.ErrorContains(t, err, "pgwake: "+err.Op+": ", name)
		require.Equal(t, context.Canceled, errors.Unwrap(err))
	}
	err := requireError(t, n.AckWorkItem(t.Context(), stale.work, nil), pgwake.ErrLockLost)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "PW001", err.SQLState)
	require.Equal(t, pgErr.Code, err.SQLState)
	require.False(t, err.Retryable)
	require.NotErrorIs(t, err, pgwake.ErrNoWork)
	require.NotErrorIs(t, err, fs.ErrNotExist)
}

func TestError_ServerSaysWhy_SQLStateDecidesWhetherToRetry(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION 'told to fail' USING ERRCODE = new.name; END $$`)
	n.exec(t, `CREATE TRIGGER fail BEFORE INSERT ON worker_queue FOR EACH ROW EXECUTE FUNCTION `+n.quoted()+`.fail()`)
	for state, want := range map[string]struct {
		retryable bool
		condition error
	}{
		"40001": {true, nil},  // serialization failure
		"40P01": {true, nil},  // deadlock
		"08006": {true, nil},  // connection failure
		"53300": {true, nil},  // too many connections
		"53100": {true, nil},  // disk full
		"57P01": {true, nil},  // admin shutdown
		"57P03": {true, nil},  // cannot connect now
		"25006": {true, nil},  // read-only: a standby
		"55P03": {true, nil},  // lock not available
		"57014": {true, nil},  // statement timeout
		"25P03": {true, nil},  // timeout of a transaction that is idle
		"25P04": {true, nil},  // timeout of any transaction
		"XX000": {false, nil}, // internal error
		"P0001": {false, nil},
		"23505": {false, nil}, // a unique violation that is none of ours
		"22012": {false, nil},
		"22008": {false, pgwake.ErrInvalid}, // an instant that the server does not have
		"42501": {false, pgwake.ErrPermission},
		"42P01": {false, pgwake.ErrNotMigrated},
		"42883": {false, pgwake.ErrNotMigrated},
		"3F000": {false, pgwake.ErrNotMigrated},
		"23514": {false, pgwake.ErrInvalid},
		"PW001": {false, pgwake.ErrLockLost},
		"PW002": {false, pgwake.ErrNotFound},
		"PW003": {false, pgwake.ErrInvalid},
	} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: state}, nil)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.Equal(t, state, typed.SQLState)
		require.Equal(t, want.retryable, typed.Retryable, state)
		require.ErrorContains(t, err, "told to fail")
		if want.condition != nil {
			require.ErrorIs(t, err, want.condition, state)
		}
		for _, condition := range []error{pgwake.ErrPermission, pgwake.ErrNotMigrated, pgwake.ErrInvalid, pgwake.ErrLockLost, pgwake.ErrNotFound, pgwake.ErrDuplicateEvent} {
			require.Equal(t, condition == want.condition, errors.Is(err, condition), "%s: %v", state, condition)
		}
	}
	require.NotContains(t, n.rows(t), "worker_queue")
}

func TestError_ServerCannotBeReached_Retryable(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"postgres://127.0.0.1:1/db", "host=/nowhere/at/all"} {
		p, err := pgwake.Open(t.Context(), url, nil)
		require.Nil(t, p)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.True(t, typed.Retryable, "%v", err)
		require.Equal(t, "open", typed.Op)
		require.NotErrorIs(t, err, pgwake.ErrConfig)
	}
}

// A node keeps its connections while another one migrates.
func TestError_FunctionReturnsSomethingElse_RetryableAndThenFine(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	// Of one connection: another would know nothing of what was there before.
	p, err := pgwake.New(t.Context(), n.userPool(t, 1), &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	n = &node{Provider: p, schema: n.schema}
	_, err = n.GetPaused(t.Context(), pgwake.Worker)
	require.NoError(t, err)
	n.exec(t, `DROP FUNCTION list_paused`)
	n.exec(t, `CREATE FUNCTION list_paused(p_queue text) RETURNS SETOF varchar LANGUAGE sql AS $$ SELECT 'a'::varchar $$`)
	_, err = n.GetPaused(t.Context(), pgwake.Worker)
	require.True(t, requireError(t, err, err).Retryable)
	paused, err := n.GetPaused(t.Context(), pgwake.Worker)
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, paused.Namespaces)
}

func TestError_NoSuchDatabase_NotRetryableAndWithSQLState(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	_, err := pgwake.Open(t.Context(), n.urlWith(t, func(c *pgx.ConnConfig) { c.Database = "no such database" }), nil)
	var typed *pgwake.Error
	require.ErrorAs(t, err, &typed)
	require.Equal(t, "3D000", typed.SQLState)
	require.False(t, typed.Retryable)
}

// A URL may name several hosts, and a host may have several addresses, of which each has an answer of its own.
func TestError_SeveralServersAreTried_RetryableIfOneMayLetInLater(t *testing.T) {
	t.Parallel()
	const (
		refused  = "connection refused"
		noEntry  = "28000" // no pg_hba.conf entry
		password = "28P01"
		starting = "57P03"
		full     = "53300"

		brokenTLS = "28000 without TLS, which broke"
	)
	for _, c := range []struct {
		url     string
		answers map[string]string // by address
		want    bool
	}{
		{"host=a", map[string]string{"a1": refused}, true},
		{"host=a", map[string]string{"a1": noEntry}, false},
		{"host=a", map[string]string{"a1": password}, false},
		{"host=a", map[string]string{"a1": starting}, true},
		{"host=a,b", map[string]string{"a1": noEntry, "b1": starting}, true},
		{"host=a,b", map[string]string{"a1": full, "b1": password}, true},
		{"host=a,b", map[string]string{"a1": noEntry, "b1": refused}, true},
		{"host=a,b", map[string]string{"a1": refused, "b1": password}, true},
		{"host=a,b", map[string]string{"a1": noEntry, "b1": noEntry}, false},
		{"host=a,b", map[string]string{"a1": refused, "b1": refused}, true},
		{"host=a,nowhere", map[string]string{"a1": noEntry}, true}, // the name may be known again later
		// A name for two addresses.
		{"host=a", map[string]string{"a1": refused, "a2": password}, false},
		{"host=a", map[string]string{"a1": noEntry, "a2": refused}, false},
		{"host=a", map[string]string{"a1": noEntry, "a2": starting}, true},
		{"host=a", map[string]string{"a1": refused, "a2": refused}, true},
		// Each address is tried with TLS, which no server has, and then without.
		{"host=a sslmode=prefer", map[string]string{"a1": password}, false},
		{"host=a,b sslmode=prefer", map[string]string{"a1": noEntry, "b1": noEntry}, false},
		{"host=a,b sslmode=prefer", map[string]string{"a1": noEntry, "b1": starting}, true},
		{"host=a sslmode=require", map[string]string{"a1": starting}, true},
		{"host=a sslmode=prefer", map[string]string{"a1": brokenTLS}, true}, // which is what it lets in with
	} {
		if !strings.Contains(c.url, "sslmode") {
			c.url += " sslmode=disable"
		}
		config, err := pgconn.ParseConfig(c.url + " user=u dbname=d")
		require.NoError(t, err)
		config.LookupFunc = func(_ context.Context, host string) (found []string, err error) {
			for _, address := range []string{host + "1", host + "2"} {
				if _, there := c.answers[address]; there {
					found = append(found, address)
				}
			}
			if found == nil {
				return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
			return found, nil
		}
		config.DialFunc = func(_ context.Context, _, address string) (net.Conn, error) {
			host, _, _ := net.SplitHostPort(address)
			if c.answers[host] == refused {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New(refused)}
			}
			client, server := net.Pipe()
			go refuse(server, c.answers[host])
			return client, nil
		}
		conn, err := pgconn.ConnectConfig(t.Context(), config)
		require.Nil(t, conn)
		var typed *pgwake.Error
		require.ErrorAs(t, pgwake.WrapError("connect", err), &typed)
		require.Equal(t, c.want, typed.Retryable, "%s: %v", c.url, err)
		require.False(t, typed.Unknown, "nothing was sent")
	}
}

// refuse is a server that lets nobody in, and has no TLS unless more is said than the code.
func refuse(conn net.Conn, code string) {
	defer conn.Close()
	server := pgproto3.NewBackend(conn, conn)
	message, err := server.ReceiveStartupMessage()
	code, broken, _ := strings.Cut(code, " ")
	if _, ok := message.(*pgproto3.SSLRequest); ok {
		if broken != "" {
			_, _ = conn.Write([]byte("S"))
			return
		}
		_, _ = conn.Write([]byte("N"))
		message, err = server.ReceiveStartupMessage()
	}
	if _, ok := message.(*pgproto3.StartupMessage); ok && err == nil {
		server.Send(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: code, Message: "told to refuse"})
		_ = server.Flush()
	}
}

func TestError_PoolIsExhausted_DeadlineIsRetryable(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pool := n.userPool(t, 1)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	held, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer held.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, nil)
	failed := requireError(t, err, context.DeadlineExceeded)
	require.True(t, failed.Retryable)
	require.False(t, failed.Unknown, "it was not sent")
	require.NotContains(t, n.rows(t), "worker_queue")
}

// Every verb waits for a table that the test has locked; then its server process is terminated.
func TestError_ConnectionLostDuringAVerb_Retryable(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	for name, call := range poolVerbs(n, t.Context(), c) {
		t.Run(name, func(t *testing.T) {
			tx := n.begin(t)
			_, err := tx.Exec(t.Context(), `LOCK TABLE worker_queue, orchestrator_queue, instance_locks, history, instances IN ACCESS EXCLUSIVE MODE`)
			require.NoError(t, err)
			outcome := make(chan error, 1)
			go func() { outcome <- call() }()
			require.Eventually(t, func() bool {
				for _, pid := range n.blocked(t) {
					n.exec(t, `SELECT pg_terminate_backend($1)`, pid)
				}
				select {
				case err = <-outcome:
					return true
				default:
					return false
				}
			}, patience, 5*time.Millisecond)
			require.NoError(t, tx.Rollback(t.Context()))
			var typed *pgwake.Error
			require.ErrorAs(t, err, &typed)
			require.True(t, typed.Retryable, "%v", err)
			require.Equal(t, !strings.HasPrefix(name, "fetch"), typed.Unknown, "%v", err)
			if typed.SQLState != "" {
				require.Equal(t, "57P01", typed.SQLState)
			}
		})
	}
	// And the same call does succeed later.
	require.NoError(t, n.AckWorkItem(t.Context(), c.work, nil))
	n.ackTurn(t, &pgwake.OrchestrationItem{LockToken: c.turn}, pgwake.OrchestrationAck{})
}

func TestError_LockTimeoutOfTheServer_Retryable(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `LOCK TABLE worker_queue IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["lock_timeout"] = "50ms" }), nil)
	err = p.AckWorkItem(t.Context(), c.work, nil)
	var typed *pgwake.Error
	require.ErrorAs(t, err, &typed)
	require.Equal(t, "55P03", typed.SQLState)
	require.True(t, typed.Retryable)
	require.False(t, typed.Unknown)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, p.AckWorkItem(t.Context(), c.work, nil))
}

// unheard is a connection that ends before the first answer arrives after certain words were sent. The server has done by then what they say.
type unheard struct {
	net.Conn
	words string
	said  *atomic.Bool // of all connections
	ends  *atomic.Bool
}

func (u unheard) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(u.words)) && !u.said.Swap(true) {
		u.ends.Store(true)
	}
	return u.Conn.Write(b)
}

func (u unheard) Read(b []byte) (int, error) {
	n, err := u.Conn.Read(b)
	if u.ends.Load() {
		return 0, errors.Join(io.EOF, u.Close())
	}
	return n, err
}

// pollingBy is a Provider of a pool that sends nothing unasked.
func (n *node) pollingBy(t *testing.T, config *pgxpool.Config) *pgwake.Provider {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModePolling, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return p
}

// unheardNode is a Provider of a pool on which one answer to something with these words is lost.
func (n *node) unheardNode(t *testing.T, words string, change func(*pgx.ConnConfig)) *pgwake.Provider {
	t.Helper()
	config := backstage.users.Config()
	change(config.ConnConfig)
	dial, said := config.ConnConfig.DialFunc, &atomic.Bool{}
	said.Store(true) // New has its own to say
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return unheard{conn, words, said, &atomic.Bool{}}, err
	}
	p := n.pollingBy(t, config)
	said.Store(false)
	t.Cleanup(func() { require.True(t, said.Load(), "it was sent") })
	return p
}

func mode(m pgx.QueryExecMode) func(*pgx.ConnConfig) {
	return func(c *pgx.ConnConfig) { c.DefaultQueryExecMode = m }
}

func serializable(c *pgx.ConnConfig) {
	c.RuntimeParams["default_transaction_isolation"] = "serializable"
}

// However pgx sends it: where an answer may have several results, a connection that ends before it looks to pgx as if nothing had been sent.
func TestError_ConnectionEndsBeforeTheAnswer_OutcomeIsUnknown(t *testing.T) {
	t.Parallel()
	enqueue := func(ctx context.Context, p *pgwake.Provider) error {
		return dropped(p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, nil))
	}
	inTx := func(ctx context.Context, p *pgwake.Provider) error {
		return pgwake.WrapError("work", pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
			return dropped(p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "x"}, nil))
		}))
	}
	for name, c := range map[string]struct {
		words   string
		change  func(*pgx.ConnConfig)
		call    func(context.Context, *pgwake.Provider) error
		unknown bool
	}{
		"a verb in mode exec":                     {"enqueue_work", mode(pgx.QueryExecModeExec), enqueue, true},
		"a verb in mode simple_protocol":          {"enqueue_work", mode(pgx.QueryExecModeSimpleProtocol), enqueue, true},
		"a verb of a role that is serializable":   {"commit\x00", serializable, enqueue, true},
		"of which the transaction cannot begin":   {"begin ", serializable, enqueue, false},
		"the commit of a transaction of somebody": {"commit\x00", mode(pgx.QueryExecModeCacheStatement), inTx, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			var failed *pgwake.Error
			require.ErrorAs(t, c.call(t.Context(), n.unheardNode(t, c.words, c.change)), &failed)
			require.Equal(t, []bool{c.unknown, true}, []bool{failed.Unknown, failed.Retryable}, "%v", failed)
			if c.unknown {
				require.Equal(t, "x", n.take(t).Name)
			}
			n.requireNoWork(t)
		})
	}
}

// idle_session_timeout ends sessions that wait for a statement, and so none of which one is at work.
func TestError_SessionHadBeenIdleForTooLong_NothingWasDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	config := backstage.users.Config()
	config.MaxConns, config.MinConns = 1, 0
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	config.ConnConfig.RuntimeParams["application_name"] = n.schema
	p := n.pollingBy(t, config)
	_, err := p.Pool().Exec(t.Context(), `SET idle_session_timeout = '1ms'`) // of the one session that there is
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return query[int64](t, n, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, n.schema)[0] == 0
	}, patience, time.Millisecond)
	var failed *pgwake.Error
	require.ErrorAs(t, dropped(p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)), &failed)
	require.Equal(t, []any{"57P05", false, true}, []any{failed.SQLState, failed.Unknown, failed.Retryable}, "%v", failed)
	n.requireNoWork(t)
}

func TestFetch_ConnectionEndsBeforeTheAnswer_WhatItClaimedIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgx.ConnConfig){
		"in mode exec":                   mode(pgx.QueryExecModeExec),
		"in mode simple_protocol":        mode(pgx.QueryExecModeSimpleProtocol),
		"by a role that is serializable": serializable,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.enqueue(t, "x")
			words := "fetch_work"
			if name == "by a role that is serializable" {
				words = "commit\x00"
			}
			_, err := n.unheardNode(t, words, change).FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: time.Hour, NoWait: true})
			var failed *pgwake.Error
			require.ErrorAs(t, err, &failed)
			require.Equal(t, []bool{false, true}, []bool{failed.Unknown, failed.Retryable}, "%v", failed)
			item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
			require.NoError(t, err)
			require.Equal(t, 1, item.Attempt)
		})
	}
}

// The caller leaves while the server waits for a lock.
func TestError_CallerLeavesAVerbThatWasSent_OutcomeIsUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		call    func(ctx context.Context, n *node, tx pgx.Tx, token pgwake.LockToken) error
		unknown bool
	}{
		"AckWorkItem": {func(ctx context.Context, n *node, _ pgx.Tx, token pgwake.LockToken) error {
			return n.AckWorkItem(ctx, token, nil)
		}, true},
		"EnqueueForWorker, in a group or not": {func(ctx context.Context, n *node, _ pgx.Tx, _ pgwake.LockToken) error {
			_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, nil)
			return err
		}, true},
		"AckBatched": {func(ctx context.Context, n *node, _ pgx.Tx, token pgwake.LockToken) error {
			return n.AckBatched(ctx, token, nil)
		}, true},
		"FetchWorkItem with Ack": {func(ctx context.Context, n *node, _ pgx.Tx, token pgwake.LockToken) error {
			_, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{Ack: []pgwake.LockToken{token}})
			return err
		}, true},
		"FetchWorkItem": {func(ctx context.Context, n *node, _ pgx.Tx, _ pgwake.LockToken) error {
			_, err := n.FetchWorkItem(ctx, nil)
			return err
		}, false},
		"AckWorkItemTx": {func(ctx context.Context, n *node, tx pgx.Tx, token pgwake.LockToken) error {
			return n.AckWorkItemTx(ctx, tx, token, nil)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			c0 := n.claimBoth(t)
			other := n.begin(t)
			lock := n.begin(t)
			_, err := lock.Exec(t.Context(), `LOCK TABLE worker_queue IN ACCESS EXCLUSIVE MODE`)
			require.NoError(t, err)
			ctx, leave := context.WithCancel(t.Context())
			outcome := make(chan error, 1)
			go func() { outcome <- c.call(ctx, n, other, c0.work) }()
			n.awaitBlocked(t, 1)
			leave()
			require.Equal(t, c.unknown, requireError(t, <-outcome, context.Canceled).Unknown)
		})
	}
}
