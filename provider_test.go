package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// Schemas

func TestOpen_SchemaNameThatNeedsQuoting_EverythingWorks(t *testing.T) {
	t.Parallel()
	for i, format := range []string{
		"With Space %d", `"quoted" %d`, "it's %d", "Schéma-✉ %d", "UPPER%d", "1st%d", "select", "a,b;%d", `back\slash %d`, "new\nline %d",
		"dot.dot %d", "%%s $1 %d", "$user %d", "; DROP SCHEMA public; -- %d", strings.Repeat("é", 25) + "%013d",
	} {
		name := format
		if strings.Contains(format, "%") {
			name = fmt.Sprintf(format, i)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newNode(t, &pgwake.Config{Schema: name})
			require.Equal(t, []bool{true}, query[bool](t, a, `SELECT to_regclass($1) IS NOT NULL`, a.quoted()+".worker_queue"))
			require.True(t, a.Health().OK, "%v", a.Health().Problems)
			b := a.another(t)
			got := make(chan error, 1)
			go func() {
				item, err := b.FetchWorkItem(t.Context(), soon)
				if err == nil {
					err = b.AckWorkItem(t.Context(), item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
				}
				got <- err
			}()
			require.Eventually(t, func() bool { s := b.Stats().Worker; return s.Parked == 1 && s.Settled }, patience, 10*time.Millisecond)
			a.enqueue(t, "x")
			require.NoError(t, <-got)
			a.ackTurn(t, a.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: 1, Type: "e"}}})
			require.Positive(t, b.Stats().Worker.Tokens["notify"], "the other node was notified")
		})
	}
}

// In a search_path, even quoted, $user stands for the schema named like the role.
func TestOpen_SchemaNamedDollarUser_IsThatSchemaOrRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pgwaketest.URL(t)
	t.Cleanup(func() { n.exec(t, `DROP SCHEMA IF EXISTS "$user" CASCADE`) })
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: "$user", Logger: silent})
	if err != nil {
		requireError(t, err, pgwake.ErrConfig)
		return
	}
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	require.Equal(t, []string{"$user"}, query[string](t, n,
		`SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = '$user' AND relname = 'worker_queue'`))
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
}

func TestOpen_NoConfig_UsesTheDocumentedSchema(t *testing.T) {
	// The one test that uses schema "pgwake". It takes it only if nobody else has it.
	n := newNode(t, nil)
	if len(query[string](t, n, `SELECT nspname FROM pg_namespace WHERE nspname = 'pgwake'`)) > 0 {
		t.Skip("the schema pgwake exists on this server")
	}
	t.Cleanup(func() { n.exec(t, `DROP SCHEMA IF EXISTS pgwake CASCADE`) })
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, query[string](t, n, `SELECT name FROM pgwake.worker_queue`))
}

// Of several addresses the first ones do not answer: trying them takes longer than anything waits that has another connection.
func TestOpen_FirstAddressesAreSilent_ConnectsToTheNext(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	if strings.HasPrefix(config.Host, "/") || config.TLSConfig != nil {
		t.Skip("the server is not at an address, or asks for TLS")
	}
	hosts, ports := "", ""
	for range 2 {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { silent.Close() })
		host, port, _ := net.SplitHostPort(silent.Addr().String())
		hosts, ports = hosts+host+",", ports+port+","
	}
	p, err := pgwake.Open(t.Context(), fmt.Sprintf("host=%s%s port=%s%d user=%s password='%s' dbname=%s sslmode=disable", hosts, config.Host, ports, config.Port,
		config.User, config.Password, config.Database), &pgwake.Config{Schema: newNode(t, nil).schema, Logger: silent})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.Stats().Listening }, 3*patience, 10*time.Millisecond)
	require.NoError(t, p.Close(within(t, patience)))
}

// pgx tries all that a name stands for, one after the other.
func TestListen_FirstAddressOfANameIsSilent_ConnectsToTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	config, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	if net.ParseIP(config.Host) == nil {
		t.Skip("the server is at no address of its own")
	}
	quiet, err := net.Listen("tcp", fmt.Sprintf("127.0.0.2:%d", config.Port))
	if err != nil {
		t.Skip("there is no other address for this port: ", err)
	}
	defer quiet.Close()
	addresses := []string{"127.0.0.2", config.Host}
	config.Host, config.Fallbacks = "two.example", nil
	config.LookupFunc = func(context.Context, string) ([]string, error) { return addresses, nil }
	p, err := pgwake.New(t.Context(), n.userPool(t, 2), &pgwake.Config{Schema: n.schema, ListenConfig: config, Logger: silent})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.Stats().Listening }, 3*patience, 10*time.Millisecond)
	require.NoError(t, p.Close(within(t, patience)))
}

func TestOpen_SkipMigrate_UsesWhatIsThereAndCreatesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p := n.openAt(t, n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{SkipMigrate: true})
	p.enqueue(t, "x")
	require.Equal(t, []string{"x"}, n.takeAll(t))

	missing := n.schema + "_missing"
	_, err := pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: missing, SkipMigrate: true})
	requireError(t, err, pgwake.ErrNotMigrated)
	require.Empty(t, query[string](t, n, `SELECT nspname FROM pg_namespace WHERE nspname = $1`, missing))

	n.exec(t, `DELETE FROM schema_migrations WHERE version_id = (SELECT max(version_id) FROM schema_migrations)`)
	_, err = pgwake.Open(t.Context(), n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{Schema: n.schema, SkipMigrate: true})
	requireError(t, err, pgwake.ErrNotMigrated)
}

func TestVerbs_SchemaIsDroppedMeanwhile_NotMigrated(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	n.exec(t, `DROP SCHEMA `+n.quoted()+` CASCADE`)
	for name, call := range poolVerbs(n, t.Context(), c) {
		requireError(t, call(), pgwake.ErrNotMigrated)
		_ = name
	}
}

func TestProviders_TwoSchemasInOneDatabase_DoNotSeeEachOther(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, nil), newNode(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	waiting := make(chan error, 2)
	go func() { waiting <- dropped(b.FetchWorkItem(ctx, soon)) }()
	go func() { waiting <- dropped(b.FetchOrchestrationItem(ctx, soon)) }()
	require.Eventually(t, func() bool { return b.Stats().Worker.Parked+b.Stats().Orchestrator.Parked == 2 }, patience, 10*time.Millisecond)

	// Through a third node, so that the notifications must travel, and then one by which b is known to
	// have heard whatever came before.
	other := a.another(t)
	other.enqueue(t, "x")
	other.send(t, "i", "k")
	c := a.claimBoth(t)
	require.Equal(t, []int{1, 1}, []int{len(query[int64](t, a, `SELECT id FROM worker_queue WHERE lock_token IS NOT NULL`)), len(query[int64](t, a, `SELECT 1 FROM instance_locks`))})
	require.ErrorIs(t, b.AckWorkItem(t.Context(), c.work, nil), pgwake.ErrLockLost, "a token of another schema")
	require.ErrorIs(t, b.AckOrchestrationItem(t.Context(), c.turn, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
	require.NotContains(t, b.rows(t), "worker_queue")
	b.exec(t, `SELECT notify_queue('worker', 0, NULL), notify_queue('orchestrator', 0, NULL)`)
	require.Zero(t, b.Stats().Worker.Tokens["notify"]+b.Stats().Orchestrator.Tokens["notify"])
	cancel()
	for range 2 {
		requireError(t, <-waiting, context.Canceled)
	}
}

// Roles

var roles atomic.Int64

// role creates a role and returns the test server's URL for it. It has no right but those granted to PUBLIC
// and what the statements give it; %[1]s is the role, quoted.
func (n *node) role(t *testing.T, grants ...string) (url, quoted string) {
	t.Helper()
	name := fmt.Sprintf("Role %d of %s", roles.Add(1), n.schema) // a session that is kept belongs to a role of its name that is gone
	quoted = pgx.Identifier{name}.Sanitize()
	n.exec(t, `CREATE ROLE `+quoted)
	t.Cleanup(func() {
		n.exec(t, `DROP OWNED BY `+quoted)
		n.exec(t, `DROP ROLE `+quoted)
	})
	for _, grant := range grants {
		n.exec(t, fmt.Sprintf(grant, quoted))
	}
	return n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["role"] = name }), quoted
}

func TestOpen_RoleMayNotCreateTheSchema_ErrPermissionAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	url, _ := n.role(t)
	missing := n.schema + "_missing"
	_, err := pgwake.Open(t.Context(), url, &pgwake.Config{Schema: missing})
	failed := requireError(t, err, pgwake.ErrPermission)
	require.Equal(t, "42501", failed.SQLState)
	require.False(t, failed.Retryable)
	require.Empty(t, query[string](t, n, `SELECT nspname FROM pg_namespace WHERE nspname = $1`, missing))

	_, err = pgwake.Open(t.Context(), url, &pgwake.Config{Schema: n.schema})
	requireError(t, err, pgwake.ErrPermission) // it exists, and is another's
}

func TestOpen_RoleOwnsOnlyItsSchema_MigratesAndWorks(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	own := n.schema + "_own"
	url, role := n.role(t)
	n.exec(t, `CREATE SCHEMA `+pgx.Identifier{own}.Sanitize()+` AUTHORIZATION `+role)
	t.Cleanup(func() { n.exec(t, `DROP SCHEMA IF EXISTS `+pgx.Identifier{own}.Sanitize()+` CASCADE`) })
	p := (&node{schema: own}).openAt(t, url, nil)
	require.True(t, p.Health().OK, "%v", p.Health().Problems)
	c := p.claimBoth(t)
	for name, call := range poolVerbs(p, t.Context(), c) {
		err := call()
		require.NotErrorIs(t, err, pgwake.ErrPermission, name)
	}
	_, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: time.Millisecond})
	require.NotErrorIs(t, err, pgwake.ErrPermission)
}

func TestOpen_RoleMayOnlyEnqueue_EnqueuesAndMayDoNothingElse(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	producer := testroles.URL(t, testroles.New(t, testroles.Producer, n.schema))
	p := n.openAt(t, producer, &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModeDisabled})
	require.True(t, p.Health().OK, p.Health().Problems)
	p.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "new", DedupKey: "k"})
	p.sendWith(t, pgwake.Message{Instance: "elsewhere", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "new", Delay: lease})
	p.send(t, "i", "k")
	fetching := n.openAt(t, producer, &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModePolling})
	for _, err := range []error{
		dropped(fetching.FetchWorkItem(t.Context(), now)),
		dropped(fetching.FetchOrchestrationItem(t.Context(), now)),
		p.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 1, Type: "e"}}),
	} {
		requireError(t, err, pgwake.ErrPermission)
	}
	require.Equal(t, []string{"x"}, n.takeAll(t))
	require.Equal(t, kinds{"k"}, kindsOf(n.takeTurn(t)))
}

// A batch of which some leases were lost is not rolled back with the others.
func TestVerbs_RoleDefaultsToAnotherIsolationLevel_LostLocksLeaveTheOthersDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) {
		c.RuntimeParams["options"] = `-c default_transaction_isolation=repeatable\ read`
	}), nil)
	n.enqueue(t, "lost", "held")
	lost, held := n.take(t).LockToken, n.take(t).LockToken
	require.NoError(t, n.AckWorkItem(t.Context(), lost, nil))

	until, err := p.RenewWorkItemLocks(t.Context(), []pgwake.LockToken{lost, held}, time.Hour)
	var which *pgwake.LostLocksError
	require.ErrorAs(t, err, &which)
	require.Equal(t, []pgwake.LockToken{lost}, which.Tokens)
	require.EqualValues(t, 1, n.exec(t, `UPDATE worker_queue SET name = name WHERE visible_at = $1`, until[held]), "the lease that was promised is not there")

	require.ErrorAs(t, p.AckWorkItems(t.Context(), []pgwake.LockToken{lost, held}), &which)
	require.Equal(t, []pgwake.LockToken{lost}, which.Tokens)
	require.Zero(t, n.rows(t)["worker_queue"])
}

// The locks that the queues rely on need READ COMMITTED, whatever a role or a database has as its default.
func TestVerbs_RoleDefaultsToAnotherIsolationLevel_EverythingWorks(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) {
				// As a role or a database would have it: a default that the library may set aside.
				c.RuntimeParams["options"] = "-c default_transaction_isolation=" + strings.ReplaceAll(level, " ", `\ `)
			}), nil)
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			const count = 40
			var wg sync.WaitGroup
			var done atomic.Int64
			for i := range 4 {
				wg.Go(func() {
					for range count / 4 {
						if err := dropped(p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: fmt.Sprint("n", i)})); err != nil {
							t.Error(err)
							return
						}
					}
				})
				wg.Go(func() {
					for done.Load() < count && ctx.Err() == nil && !t.Failed() {
						item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: time.Second})
						if errors.Is(err, pgwake.ErrNoWork) || errors.Is(err, context.DeadlineExceeded) { // they share a small pool
							continue
						}
						if err == nil {
							err = p.AckWorkItem(ctx, item.LockToken, nil)
						}
						if err != nil {
							t.Error(err)
							return
						}
						done.Add(1)
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, count, done.Load())

			p.send(t, "i", "1")
			turn := p.takeTurn(t)
			p.send(t, "i", "2")
			p.requireNoTurn(t)
			p.ackTurn(t, turn, pgwake.OrchestrationAck{})
			require.Equal(t, kinds{"2"}, kindsOf(p.takeTurn(t)))
		})
	}
}

// Poolers dictate how statements are sent.
func TestVerbs_AnyQueryExecMode_EverythingWorks(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) {
				c.RuntimeParams["default_query_exec_mode"] = strings.ReplaceAll(mode.String(), " ", "_")
			}), nil)
			for _, err := range []error{
				dropped(p.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{
					{WorkItem: pgwake.WorkItem{Name: "a'b", Input: []byte(`{"a":"\\ ' , \" {}"}`), Instance: "i", ExecutionID: 1, ActivityID: 2}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "new", Priority: 3, DedupKey: "NULL"}},
					{WorkItem: pgwake.WorkItem{Name: "c"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Hour}},
					{WorkItem: pgwake.WorkItem{Name: "d"}, EnqueueOptions: pgwake.EnqueueOptions{At: time.Now().Add(-time.Minute)}},
				})),
				dropped(p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Data: []byte(`[1]`)}, &pgwake.EnqueueOptions{Priority: 9})),
			} {
				require.NoError(t, err)
			}
			items, err := p.FetchWorkItems(t.Context(), 5, &pgwake.FetchOptions{LockTimeout: lease, Namespaces: []string{"new", "default"}})
			require.NoError(t, err)
			require.Equal(t, []string{"a'b", "d"}, namesOf(items))
			require.Equal(t, `{"a":"\\ ' , \" {}"}`, string(items[0].Input))
			_, err = p.RenewWorkItemLocks(t.Context(), tokensOf(items), lease)
			require.NoError(t, err)
			require.NoError(t, p.AbandonWorkItem(t.Context(), items[1].LockToken, &pgwake.AbandonOptions{Delay: time.Minute, IgnoreAttempt: true}))
			require.NoError(t, p.AckWorkItems(t.Context(), tokensOf(items[:1])))
			turn, err := p.FetchOrchestrationItem(t.Context(), now)
			require.NoError(t, err)
			require.Equal(t, `[1]`, string(turn.Messages[0].Data))
			_, err = p.RenewOrchestrationItemLock(t.Context(), turn.LockToken, lease)
			require.NoError(t, err)
			p.ackTurn(t, turn, pgwake.OrchestrationAck{
				Metadata:  pgwake.Metadata{Name: "flow", Status: pgwake.StatusRunning, Output: "o"},
				History:   []pgwake.Event{{ID: 1, Type: "e", Data: []byte(`{"x":"y"}`)}},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}},
				Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "m"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Minute}}},
			})
			require.NoError(t, p.AckWorkItem(t.Context(), p.take(t).LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
			require.NoError(t, p.AbandonOrchestrationItem(t.Context(), p.takeTurn(t).LockToken, nil))
			require.NoError(t, p.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 2, Type: "f"}}))
			events, err := p.ReadHistoryExecution(t.Context(), "i", 1, 1)
			require.NoError(t, err)
			require.Equal(t, []string{`1 e {"x":"y"}`, "2 f "}, eventsOf(events))
		})
	}
}

// The server's version

func TestOpen_ServerIsTooOld_ErrServerTooOldAndNothingElseIsAsked(t *testing.T) {
	t.Parallel()
	url, asked := fakeServer(t, "130022")
	_, err := pgwake.Open(t.Context(), url, nil)
	require.False(t, requireError(t, err, pgwake.ErrServerTooOld).Retryable)
	require.ErrorContains(t, err, "13")
	require.Equal(t, []string{`SELECT pg_catalog.current_setting('server_version_num')::int`}, asked())
}

// fakeServer answers every query with one integer. It returns its URL and what it was asked, but for what the first connection is.
func fakeServer(t *testing.T, answer string) (url string, asked func() []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var mu sync.Mutex
	var queries []string
	var wg sync.WaitGroup
	serve := func(conn net.Conn) {
		defer conn.Close()
		b := pgproto3.NewBackend(conn, conn)
		if _, err := b.ReceiveStartupMessage(); err != nil {
			return
		}
		b.Send(&pgproto3.AuthenticationOk{})
		for name, value := range map[string]string{"server_version": "13.22", "client_encoding": "UTF8", "standard_conforming_strings": "on"} {
			b.Send(&pgproto3.ParameterStatus{Name: name, Value: value})
		}
		b.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
		b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		for b.Flush() == nil {
			m, err := b.Receive()
			if err != nil {
				return
			}
			if q, ok := m.(*pgproto3.Query); ok {
				if q.String != "-- ping" && q.String != ";" && !strings.Contains(q.String, "tcp_user_timeout") {
					mu.Lock()
					queries = append(queries, q.String)
					mu.Unlock()
				}
				b.Send(&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("v"), DataTypeOID: 23, DataTypeSize: 4, TypeModifier: -1}}})
				b.Send(&pgproto3.DataRow{Values: [][]byte{[]byte(answer)}})
				b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
				b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			}
		}
	}
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serve(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return fmt.Sprintf("postgres://u@%s/db?sslmode=disable&default_query_exec_mode=simple_protocol", l.Addr()), func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), queries...)
	}
}

// Close

func TestClose_EveryVerbAfterwards_IsErrClosed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	before := n.content(t)
	require.NoError(t, n.Close(t.Context()))
	require.NoError(t, n.Close(t.Context()), "again")
	tx := n.begin(t)
	calls := poolVerbs(n, t.Context(), c)
	for name, call := range txVerbs(n, t.Context(), c) {
		calls["in a transaction: "+name] = func() error { return call(tx) }
	}
	for name, call := range calls {
		require.False(t, requireError(t, call(), pgwake.ErrClosed).Retryable, name)
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, before, n.content(t))
	require.False(t, n.Health().OK)
}

func TestClose_ManyAtOnce_AllReturnWhenItIsDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if err := n.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if _, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil); !errors.Is(err, pgwake.ErrClosed) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestClose_FetchesAreWaiting_TheyReturnAtOnceWithErrClosed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	errs := make(chan error, 30)
	for i := range 10 {
		o := &pgwake.FetchOptions{PollTimeout: time.Hour}
		if i%2 == 0 {
			o.Namespaces = []string{fmt.Sprint("n", i)}
		}
		go func() { errs <- dropped(n.FetchWorkItem(t.Context(), o)) }()
		go func() { errs <- dropped(n.FetchWorkItems(t.Context(), 5, o)) }()
		go func() { errs <- dropped(n.FetchOrchestrationItem(t.Context(), o)) }()
	}
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked+n.Stats().Orchestrator.Parked == 30 }, patience, 10*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, n.Close(ctx))
	for range 30 {
		select {
		case err := <-errs:
			requireError(t, err, pgwake.ErrClosed)
		case <-time.After(patience):
			require.Fail(t, "a fetch still waits")
		}
	}
}

func TestClose_VerbInFlight_WaitsForIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `LOCK TABLE worker_queue`)
	require.NoError(t, err)
	verb, closed := make(chan error, 1), make(chan error, 1)
	go func() { verb <- dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)) }()
	n.awaitBlocked(t, 1)
	go func() { closed <- n.Close(t.Context()) }()
	n.awaitClosing(t)
	select {
	case err := <-closed:
		require.Fail(t, "Close did not wait", "%v", err)
	default:
	}
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-verb, "what began before Close ends as if there were none")
	require.NoError(t, <-closed)
	require.Equal(t, 1, n.rows(t)["worker_queue"])
}

// awaitClosing waits until Close has begun.
func (n *node) awaitClosing(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := n.ReadHistory(t.Context(), "i")
		return errors.Is(err, pgwake.ErrClosed)
	}, patience, 10*time.Millisecond)
}

func TestClose_VerbIsStuck_ReturnsWhenItsContextEndsAndLeavesNothing(t *testing.T) {
	// Not parallel: it looks at all goroutines.
	n := newNode(t, nil)
	leak := goleak.IgnoreCurrent()
	p, err := pgwake.Open(t.Context(), n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["application_name"] = "stuck" }), &pgwake.Config{Schema: n.schema})
	require.NoError(t, err)
	tx := n.begin(t)
	_, err = tx.Exec(t.Context(), `LOCK TABLE worker_queue, orchestrator_queue`)
	require.NoError(t, err)
	verbs := make(chan error, 3)
	go func() { verbs <- dropped(p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)) }()
	go func() { verbs <- dropped(p.FetchWorkItem(t.Context(), soon)) }()
	go func() { verbs <- dropped(p.FetchOrchestrationItem(t.Context(), soon)) }()
	n.awaitBlocked(t, 3)

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	err = p.Close(ctx)
	requireError(t, err, context.DeadlineExceeded)
	require.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond)
	require.Less(t, time.Since(began), 10*time.Second)
	for range 3 {
		select {
		case err := <-verbs:
			require.Error(t, err)
		case <-time.After(patience):
			require.Fail(t, "a verb is still stuck")
		}
	}
	require.Eventually(t, func() bool {
		return len(query[int32](t, n, `SELECT pid FROM pg_stat_activity WHERE application_name = 'stuck'`)) == 0
	}, patience, 5*time.Millisecond, "a connection is left")
	require.NoError(t, tx.Rollback(t.Context())) // after that: else one might get the lock before it hears that it is cancelled
	require.NoError(t, p.Close(t.Context()), "later calls return nil")
	requireNoGoroutines(t, leak, readAhead)
	require.NotContains(t, n.rows(t), "worker_queue")
}

// slowConn carries 1 MiB a second.
type slowConn struct{ net.Conn }

func (c slowConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p[:min(len(p), 16<<10)])
	time.Sleep(time.Duration(n) * time.Second / (1 << 20))
	return n, err
}

// A history takes as long to arrive as it needs; only silence means that nobody is there.
func TestFetchOrchestrationItem_LongHistoryOnASlowLine_Arrives(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const events = 7 // so many seconds
	for i := range events {
		data := []byte(`"` + strings.Repeat("x", 1<<20-2) + `"`)
		require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: int64(i), Type: "e", Data: data}}))
	}
	n.send(t, "i", "k")
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return slowConn{conn}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModePolling})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	turn, err := p.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.Len(t, turn.History, events)
}

// A network that swallows everything gives no error either.
func TestClose_NetworkIsSilent_ReturnsWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	link := newLink(t, backstage.users.Config().ConnConfig)
	p, err := pgwake.Open(t.Context(), n.urlWith(t, link.use), &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	link.mode.Store(swallow)
	verb := make(chan error, 1)
	go func() { verb <- dropped(p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)) }()
	require.Eventually(t, func() bool { return link.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	requireError(t, p.Close(ctx), context.DeadlineExceeded)
	require.Less(t, time.Since(began), 5*time.Second)
	require.Error(t, <-verb)
}

func TestClose_OnACallersPool_LeavesItOpenAndNothingTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pool := n.userPool(t, 2)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema})
	require.NoError(t, err)
	waiting := make(chan error, 8)
	for range 8 { // more than the pool has connections
		go func() { waiting <- dropped(p.FetchWorkItem(t.Context(), soon)) }()
	}
	require.Eventually(t, func() bool { return p.Stats().Worker.Parked == 8 }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return pool.Stat().AcquiredConns() == 0 }, patience, time.Millisecond, "waiting holds a connection")
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	require.NoError(t, <-waiting)
	require.NoError(t, p.Close(t.Context()))
	for range 7 {
		requireError(t, <-waiting, pgwake.ErrClosed)
	}
	require.NoError(t, pool.Ping(t.Context()))
	require.Zero(t, pool.Stat().AcquiredConns())

	again, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema})
	require.NoError(t, err)
	require.NoError(t, again.Close(t.Context()))
}

// readAhead: on a connection whose write took long, pgx reads ahead until something comes; so may those of the test.
var readAhead = goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgconn/internal/bgreader.(*BGReader).bgRead")

// requireNoGoroutines asserts that none is left but those. To close a connection that was given up in the middle takes pgx a while: it has the
// statement cancelled first.
func requireNoGoroutines(t *testing.T, but ...goleak.Option) {
	t.Helper()
	err := goleak.Find(but...)
	for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
		err = goleak.Find(but...)
	}
	require.NoError(t, err)
}

func TestProvider_RepeatedConcurrentStartAndStop_LeavesNothing(t *testing.T) {
	// Not parallel: it looks at all goroutines.
	n := newNode(t, nil)
	pool := n.userPool(t, 4)
	require.NoError(t, pool.Ping(t.Context()))
	before := goleak.IgnoreCurrent()
	url := n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["application_name"] = "startstop" })
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for round := range 5 {
				var p *pgwake.Provider
				var err error
				if (i+round)%2 == 0 {
					p, err = pgwake.Open(t.Context(), url, &pgwake.Config{Schema: n.schema})
				} else {
					p, err = pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.Mode(round % 3)})
				}
				if err != nil {
					t.Error(err)
					return
				}
				var inner sync.WaitGroup
				inner.Go(func() {
					for {
						if _, err := p.FetchWorkItem(t.Context(), soon); errors.Is(err, pgwake.ErrClosed) {
							return
						}
					}
				})
				inner.Go(func() { _, _ = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil) })
				for range 2 {
					inner.Go(func() {
						if err := p.Close(t.Context()); err != nil {
							t.Error(err)
						}
					})
				}
				inner.Wait()
			}
		})
	}
	wg.Wait()
	requireNoGoroutines(t, before, readAhead)
	require.Eventually(t, func() bool {
		return len(query[int32](t, n, `SELECT pid FROM pg_stat_activity WHERE application_name = 'startstop'`)) == 0
	}, patience, 5*time.Millisecond, "a connection is left")
}

func TestOpen_ContextEnds_ItsErrorAndNothingIsLeft(t *testing.T) {
	// Not parallel: it looks at all goroutines.
	n := newNode(t, nil)
	leak := goleak.IgnoreCurrent()
	url := n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["application_name"] = "given up" })
	for after := time.Duration(0); after < 60*time.Millisecond; after += 4 * time.Millisecond {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		p, err := pgwake.Open(ctx, url, &pgwake.Config{Schema: n.schema})
		cancel()
		if err == nil {
			require.NoError(t, p.Close(t.Context()))
			continue
		}
		require.Nil(t, p)
		requireError(t, err, err)
	}
	requireNoGoroutines(t, leak, readAhead)
	require.Eventually(t, func() bool {
		return len(query[int32](t, n, `SELECT pid FROM pg_stat_activity WHERE application_name = 'given up'`)) == 0
	}, patience, 5*time.Millisecond, "a connection is left")
}

func TestProviders_ManyOnOneSchema_ShareTheWork(t *testing.T) {
	t.Parallel()
	first := newNode(t, nil)
	nodes := []*node{first}
	for range 5 {
		nodes = append(nodes, first.another(t))
	}
	const items, instances = 120, 24
	ctx, cancel := context.WithCancel(t.Context())
	var acked, turns atomic.Int64
	var consumers sync.WaitGroup
	for _, p := range nodes {
		consumers.Go(func() {
			for {
				item, err := p.FetchWorkItem(ctx, soon)
				if err != nil {
					return
				}
				if err := p.AckWorkItem(t.Context(), item.LockToken, nil); err != nil {
					t.Error(err)
				}
				acked.Add(1)
			}
		})
		consumers.Go(func() {
			for {
				turn, err := p.FetchOrchestrationItem(ctx, soon)
				if err != nil {
					return
				}
				if err := p.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}); err != nil {
					t.Error(err)
				}
				turns.Add(int64(len(turn.Messages)))
			}
		})
	}
	var producers sync.WaitGroup
	for i, p := range nodes {
		producers.Go(func() {
			for j := range items / len(nodes) {
				err := errors.Join(
					dropped(p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)),
					dropped(p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: fmt.Sprint((i + j) % instances), Kind: "k"}, nil)))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	producers.Wait()
	require.Eventually(t, func() bool { return acked.Load() == items && turns.Load() == items }, 2*patience, 2*time.Millisecond,
		"something was lost, or waits for the end of a lease")
	cancel()
	consumers.Wait()
	require.Equal(t, map[string]int{"namespaces": 1}, first.rows(t))
}

// Whatever the network says when a deadline cuts it short, such as "i/o timeout": the caller's context ended,
// and that is what the caller can tell.
func TestVerbs_ContextEndsAtAnyInstant_ErrorIsTheContexts(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	strange := make(map[string]int)
	for range testsize.Of(20, 40) {
		for name := range poolVerbs(n, t.Context(), c) {
			ctx, cancel := context.WithCancel(t.Context())
			if rand.IntN(2) == 0 {
				ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(700))*time.Microsecond)
			} else {
				time.AfterFunc(time.Duration(rand.IntN(700))*time.Microsecond, cancel)
			}
			err := poolVerbs(n, ctx, c)[name]()
			ended := ctx.Err()
			cancel()
			if err == nil || ended == nil {
				continue
			}
			for _, expected := range []error{pgwake.ErrLockLost, pgwake.ErrNoWork, pgwake.ErrDuplicateEvent, ended} {
				if errors.Is(err, expected) {
					err = nil
					break
				}
			}
			if err != nil {
				strange[err.Error()]++
			}
		}
	}
	require.Empty(t, strange)
}

// A cancelled fetch strands nothing

func TestFetch_CancelledAtAnyInstant_EveryItemIsStillFetchableAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const items = 20
	for i := range items {
		n.enqueue(t, "x")
		n.send(t, fmt.Sprint(i), "k")
	}
	var storm sync.WaitGroup
	for g := range 6 {
		storm.Go(func() {
			for range 60 {
				ctx, cancel := context.WithCancel(t.Context())
				stop := time.AfterFunc(time.Duration(rand.IntN(3000))*time.Microsecond, cancel)
				var err error
				if g%2 == 0 {
					var got []*pgwake.ClaimedWorkItem
					if got, err = n.FetchWorkItems(ctx, 1+rand.IntN(4), soon); err == nil {
						for _, item := range got {
							err = errors.Join(err, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
						}
					} else if got != nil {
						t.Error("items and an error")
					}
				} else {
					var turn *pgwake.OrchestrationItem
					if turn, err = n.FetchOrchestrationItem(ctx, soon); err == nil {
						err = n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true})
					} else if turn != nil {
						t.Error("a turn and an error")
					}
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				stop.Stop()
				cancel()
			}
		})
	}
	storm.Wait()
	n.requireAllFetchable(t, items, true)
}

// requireAllFetchable takes so many items and so many turns, which must come before any lease ends.
func (n *node) requireAllFetchable(t *testing.T, count int, unscathed bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	seenItems, seenTurns := make(map[int64]bool), make(map[string]bool)
	for len(seenItems) < count {
		got, err := n.FetchWorkItems(ctx, count, soon)
		require.NoError(t, err, "%d of %d items came: the others are stranded", len(seenItems), count)
		for _, item := range got {
			require.False(t, seenItems[item.ID])
			seenItems[item.ID] = true
			if unscathed {
				require.Equal(t, 1, item.Attempt, "as if it had never been fetched")
			}
		}
	}
	for len(seenTurns) < count {
		turn, err := n.FetchOrchestrationItem(ctx, soon)
		require.NoError(t, err, "%d of %d turns came: the others are stranded", len(seenTurns), count)
		require.False(t, seenTurns[turn.Instance])
		seenTurns[turn.Instance] = true
		if unscathed {
			require.Equal(t, 1, turn.Attempt, "as if it had never been fetched")
		}
	}
}

func TestClose_FetchesAreInFlight_EveryItemIsStillFetchableAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const items = 12
	for i := range items {
		n.enqueue(t, "x")
		n.send(t, fmt.Sprint(i), "k")
	}
	for range 8 {
		p := n.openAt(t, n.urlWith(t, func(*pgx.ConnConfig) {}), nil)
		var wg sync.WaitGroup
		for g := range 6 {
			wg.Go(func() {
				for misses := 0; ; { // one after the other: the server may need longer than that
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(10_000<<min(misses, 7)))*time.Microsecond)
					var err error
					if g%2 == 0 {
						var item *pgwake.ClaimedWorkItem
						if item, err = p.FetchWorkItem(ctx, soon); err == nil {
							err = n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true})
						}
					} else {
						var turn *pgwake.OrchestrationItem
						if turn, err = p.FetchOrchestrationItem(ctx, soon); err == nil {
							err = n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true})
						}
					}
					cancel()
					if errors.Is(err, pgwake.ErrClosed) {
						return
					}
					if misses++; err == nil {
						misses = 0
					}
					if err != nil && !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
				}
			})
		}
		assert.Eventually(t, func() bool { return p.Stats().Worker.Items > 3 && p.Stats().Orchestrator.Items > 3 }, patience, 10*time.Millisecond)
		require.NoError(t, p.Close(t.Context()))
		wg.Wait()
	}
	n.requireAllFetchable(t, items, true)
}

// The server committed the claim, and the answer never arrived.
func TestFetch_AnswerIsLost_ItemIsFetchableAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	link := newLink(t, backstage.users.Config().ConnConfig)
	direct, err := pgx.ParseConfig(n.urlWith(t, func(*pgx.ConnConfig) {}))
	require.NoError(t, err)
	for _, listen := range []*pgx.ConnConfig{direct, nil} { // undone through LISTEN, and through the pool
		p := n.openAt(t, n.urlWith(t, link.use), &pgwake.Config{ListenConfig: listen, DisableLongPoll: listen == nil})
		// Each fetch is made once in vain before, so that its connection knows the statement and the answer
		// that is lost is that of the claim.
		lose := func(make func(), fetch func() (giveBack func() error, err error)) {
			link.mode.Store(carry)
			_, err := fetch()
			require.ErrorIs(t, err, pgwake.ErrNoWork)
			make()
			for {
				link.mode.Store(cutAnswer)
				giveBack, err := fetch()
				if err == nil { // the cut met the greeting of a new connection
					require.NoError(t, giveBack())
					continue
				}
				var failed *pgwake.Error
				require.ErrorAs(t, err, &failed)
				require.True(t, failed.Retryable, "%v", err)
				link.mode.Store(carry)
				return
			}
		}
		ignore := &pgwake.AbandonOptions{IgnoreAttempt: true}
		lose(func() { n.enqueue(t, "x") }, func() (func() error, error) {
			item, err := p.FetchWorkItem(t.Context(), now)
			return func() error { return n.AbandonWorkItem(t.Context(), item.LockToken, ignore) }, err
		})
		lose(func() { n.send(t, "i", "k") }, func() (func() error, error) {
			turn, err := p.FetchOrchestrationItem(t.Context(), now)
			return func() error { return n.AbandonOrchestrationItem(t.Context(), turn.LockToken, ignore) }, err
		})
		n.requireAllFetchable(t, 1, true)
		n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
	}
}

// What gives back the claim of a caller who has left takes the server longer than a lost connection would be waited for.
func TestFetch_GivingBackTakesLong_IsDoneAndLISTENStays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.Eventually(t, func() bool { return n.Stats().Listening }, patience, time.Millisecond)
	sessions := n.Stats().Reconnects
	n.exec(t, `ALTER FUNCTION undo_work_claim RENAME TO fast_by_test`)
	n.exec(t, `CREATE FUNCTION undo_work_claim(uuid, interval) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
		BEGIN PERFORM pg_catalog.pg_sleep(6.5); RETURN fast_by_test($1, $2); END $$`)
	n.exec(t, `CREATE FUNCTION held_by_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(8); RETURN NULL; END $$`)
	n.exec(t, `CREATE TRIGGER held_by_test AFTER UPDATE ON worker_queue FOR EACH ROW WHEN (NEW.lock_token IS NOT NULL) EXECUTE FUNCTION held_by_test()`)
	n.enqueue(t, "x")
	inTheWay := n.begin(t)
	_, err := inTheWay.Exec(t.Context(), `SELECT pg_advisory_xact_lock(8)`)
	require.NoError(t, err)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Hour})
		left <- err
	}()
	n.awaitBlocked(t, 1)
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	require.NoError(t, inTheWay.Rollback(t.Context()))
	item, err := n.FetchWorkItem(within(t, time.Minute), &pgwake.FetchOptions{PollTimeout: time.Minute})
	require.NoError(t, err)
	require.Equal(t, 1, item.Attempt)
	require.Equal(t, sessions, n.Stats().Reconnects)
}

func TestFetch_ConnectionsAreKilledAllTheTime_NothingIsStranded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	app := "killed " + n.schema
	p := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["application_name"] = app }), nil)
	const items = 40
	for i := range items {
		n.enqueue(t, "x")
		n.send(t, fmt.Sprint(i), "k")
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	retry := func(ack func() error) {
		for {
			err := ack()
			var failed *pgwake.Error
			if err == nil || errors.Is(err, pgwake.ErrLockLost) { // an earlier attempt did it
				return
			}
			if !errors.As(err, &failed) || !failed.Retryable {
				t.Error(err)
				return
			}
		}
	}
	for g := range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				o := &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 50 * time.Millisecond}
				if g%2 == 0 {
					if item, err := p.FetchWorkItem(t.Context(), o); err == nil {
						retry(func() error { return p.AckWorkItem(t.Context(), item.LockToken, nil) })
					}
				} else if turn, err := p.FetchOrchestrationItem(t.Context(), o); err == nil {
					retry(func() error { return p.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}) })
				}
			}
		})
	}
	for range 12 {
		n.exec(t, `SELECT pg_terminate_backend(pid), pg_sleep(0.01 * random()) FROM pg_stat_activity WHERE application_name = $1`, app)
	}
	require.Eventually(t, func() bool { return len(n.rows(t)) == 1 }, 2*patience, 20*time.Millisecond, "something waits for the end of a lease")
	close(stop)
	wg.Wait()
}

// link is a network between a Provider and the server that can fail.
type link struct {
	address   string
	server    *pgx.ConnConfig
	mode      atomic.Int32
	swallowed atomic.Int64
	silenced  sync.Map     // connections of which something was swallowed, by number
	made      atomic.Int64 // connections so far
	closed    sync.Map     // those of them that the client has closed, by number
	forgotten atomic.Int64 // so many of them, the oldest, carry nothing any more
	cut       func()       // ends all of them, for good: a pool need not wait for those that carry nothing
}

const (
	carry     int32 = iota
	swallow         // nothing arrives any more, on either side, and nobody is told
	cutAnswer       // the next answer is lost with its connection; then back to carry
)

func newLink(t *testing.T, server *pgx.ConnConfig) *link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := &link{address: listener.Addr().String(), server: server}
	var mu sync.Mutex
	var conns []net.Conn
	var over bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			network, address := pgconnAddress(l.server)
			server, err := net.Dial(network, address)
			if err != nil {
				client.Close()
				continue
			}
			mu.Lock()
			if over { // it was accepted before the listener was closed
				client.Close()
				server.Close()
			}
			conns = append(conns, client, server)
			mu.Unlock()
			number := l.made.Add(1)
			wg.Go(func() {
				defer l.closed.Store(number, true)
				l.pump(number, server, client, false)
			})
			wg.Go(func() { l.pump(number, client, server, true) })
		}
	})
	l.cut = func() {
		listener.Close()
		mu.Lock()
		over = true
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	}
	t.Cleanup(l.cut)
	return l
}

func pgconnAddress(c *pgx.ConnConfig) (network, address string) {
	if strings.HasPrefix(c.Host, "/") {
		return "unix", fmt.Sprintf("%s/.s.PGSQL.%d", c.Host, c.Port)
	}
	return "tcp", net.JoinHostPort(c.Host, fmt.Sprint(c.Port))
}

// use makes a connection go through the link.
func (l *link) use(c *pgx.ConnConfig) {
	host, port, _ := net.SplitHostPort(l.address)
	c.Host = host
	_, _ = fmt.Sscan(port, &c.Port)
}

// forget loses all that the connections of this moment carry from now on, as a firewall does that has forgotten them.
func (l *link) forget() { l.forgotten.Store(l.made.Load()) }

// pump carries bytes from one side to the other.
func (l *link) pump(number int64, to, from net.Conn, answers bool) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		switch mode := l.mode.Load(); {
		case mode == swallow || number <= l.forgotten.Load():
			l.swallowed.Add(int64(n))
			l.silenced.Store(number, true)
			continue
		case mode == cutAnswer && answers && l.mode.CompareAndSwap(cutAnswer, carry):
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil && !errors.Is(err, io.EOF) {
			return
		}
	}
}
