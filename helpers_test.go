package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the tests of the contract have in common?
//
// They see the library as its users do, through the exported API. What a user cannot see, such as whether
// a refused call wrote anything, is looked up backstage: in the tables, on connections of the tests' own.

const (
	// lease outlives every test. A claim made with it comes back only because somebody gave it back, or
	// because travel moved the clock.
	lease = time.Hour

	// patience bounds what must happen without a lease ending: far more than it takes, far less than
	// lease.
	patience = 20 * time.Second
)

// tctx is for what has no *testing.T at hand, such as the body of a property.
var tctx = context.Background()

var (
	now  = &pgwake.FetchOptions{LockTimeout: lease, NoWait: true}          // what is due at this moment
	soon = &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience} // what must become due
)

// node is a Provider and the way backstage.
type node struct {
	*pgwake.Provider
	schema string
}

// newNode opens a Provider on an empty schema.
func newNode(tb testing.TB, config *pgwake.Config) *node {
	tb.Helper()
	openBackstage(tb)
	c := pgwake.Config{}
	if config != nil {
		c = *config
	}
	if c.Schema != "" {
		return &node{Provider: pgwaketest.New(tb, &c), schema: c.Schema}
	}
	c.Schema = testschema.Core.Borrow(tb)
	return &node{Provider: opened(tb, &c), schema: c.Schema}
}

// another opens one more Provider on the schema.
func (n *node) another(tb testing.TB) *node {
	tb.Helper()
	return n.anotherWith(tb, &pgwake.Config{})
}

// anotherWith is another, which is configured.
func (n *node) anotherWith(tb testing.TB, c *pgwake.Config) *node {
	tb.Helper()
	c.Schema = n.schema
	return &node{Provider: opened(tb, c), schema: n.schema}
}

// opened opens a Provider, and does so again if it is to listen and could not at the first attempt. That a machine stands still is no trouble
// here, be it then or when a notification comes: the queues would be polled for a minute.
func opened(tb testing.TB, config *pgwake.Config) *pgwake.Provider {
	tb.Helper()
	c := *config
	if c.NotifyDeliveryTimeout == 0 {
		c.NotifyDeliveryTimeout = patience
	}
	listens := (c.Mode == pgwake.ModeHybrid || c.Mode == pgwake.ModeEventDriven) && c.Modes == nil && c.ListenConfig == nil && !c.DisableLongPoll && c.HibernateAfter == 0
	p := pgwaketest.Open(tb, &c)
	for range 3 {
		if s := p.Stats(); !listens || s.Listening && !s.Worker.Aggressive {
			break
		}
		require.NoError(tb, p.Close(context.Background()))
		p = pgwaketest.Open(tb, &c)
	}
	return p
}

// tester is what a *testing.T and a *rapid.T have in common.
type tester interface {
	require.TestingT
	Helper()
	Cleanup(func())
}

// backstage are the connections behind the scenes, on no schema in particular: users is for transactions
// of users, peek for looking and meddling, each time in one round trip.
var backstage struct {
	once        sync.Once
	users, peek *pgxpool.Pool
	err         error
}

func openBackstage(tb testing.TB) {
	tb.Helper()
	url := pgwaketest.URL(tb)
	backstage.once.Do(func() {
		open := func(mode pgx.QueryExecMode) *pgxpool.Pool {
			config, err := pgxpool.ParseConfig(url)
			if err == nil {
				config.MaxConns = 16
				config.ConnConfig.DefaultQueryExecMode = mode
				var pool *pgxpool.Pool
				if pool, err = pgxpool.NewWithConfig(context.Background(), config); err == nil {
					return pool
				}
			}
			backstage.err = err
			return nil
		}
		backstage.users = open(pgx.QueryExecModeCacheDescribe)
		backstage.peek = open(pgx.QueryExecModeExec)
	})
	require.NoError(tb, backstage.err)
}

func closeBackstage() {
	if backstage.users != nil {
		backstage.users.Close()
		backstage.peek.Close()
	}
}

// begin starts a transaction of a user, one that ends with the test at the latest.
func (n *node) begin(tb tester) pgx.Tx {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tx, err := backstage.users.Begin(ctx)
	require.NoError(tb, err, "too many transactions are open")
	tb.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(context.Background(), `SELECT set_config('search_path', $1, true)`, n.quoted())
	require.NoError(tb, err)
	return tx
}

// tried is what comes of a call in a transaction of a user that ends at once: of those that are open there are not many at a time.
func (n *node) tried(tb tester, call func(pgx.Tx) error) error {
	tb.Helper()
	tx := n.begin(tb)
	err := call(tx)
	require.NoError(tb, tx.Rollback(context.Background()))
	return err
}

func (n *node) quoted() string { return pgx.Identifier{n.schema}.Sanitize() }

// exec runs a statement in the schema and returns how many rows it met.
func (n *node) exec(tb tester, sql string, args ...any) int64 {
	tb.Helper()
	var met int64
	n.peek(tb, sql, args, func(results pgx.BatchResults) error {
		tag, err := results.Exec()
		met = tag.RowsAffected()
		return err
	})
	return met
}

// query returns the first column of the rows that sql yields in the schema.
func query[T any](tb tester, n *node, sql string, args ...any) (all []T) {
	tb.Helper()
	n.peek(tb, sql, args, func(results pgx.BatchResults) error {
		rows, err := results.Query()
		if err == nil {
			all, err = pgx.CollectRows(rows, pgx.RowTo[T])
		}
		return err
	})
	return all
}

// peek sends a statement with the search path before it: a pipeline is a transaction.
func (n *node) peek(tb tester, sql string, args []any, read func(pgx.BatchResults) error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var b pgx.Batch
	b.Queue(`SELECT set_config('search_path', $1, true)`, n.quoted())
	b.Queue(sql, args...)
	results := backstage.peek.SendBatch(ctx, &b)
	_, err := results.Exec()
	if err == nil {
		err = read(results)
	}
	require.NoError(tb, errors.Join(err, results.Close()), sql)
}

// tables are those that a verb may write to.
var tables = []string{"namespaces", "worker_queue", "dedup_keys", "rates", "limits", "marking", "releases", "orchestrator_queue", "realignments", "instance_locks", "instances", "executions", "history",
	"sessions", "kv_store", "kv_delta", "dead_letters", "archive"}

// content returns all rows of all tables, each with its table's name before it, so that two moments can be
// compared.
func (n *node) content(tb tester) map[string][]string {
	tb.Helper()
	var sql []string
	for _, table := range tables {
		sql = append(sql, `SELECT '`+table+` ' || to_json(t) FROM `+table+` t`)
	}
	all := make(map[string][]string)
	for _, row := range query[string](tb, n, strings.Join(sql, " UNION ALL ")+` ORDER BY 1`) {
		table, content, _ := strings.Cut(row, " ")
		all[table] = append(all[table], content)
	}
	return all
}

// rows returns how many rows each table holds, those that hold none left out.
func (n *node) rows(tb tester) map[string]int {
	tb.Helper()
	var sql []string
	for _, table := range tables {
		sql = append(sql, `SELECT '`+table+` ' || count(*) FROM `+table+` HAVING count(*) > 0`)
	}
	counts := make(map[string]int)
	for _, row := range query[string](tb, n, strings.Join(sql, " UNION ALL ")) {
		table, count, _ := strings.Cut(row, " ")
		var err error
		counts[table], err = strconv.Atoi(count)
		require.NoError(tb, err)
	}
	return counts
}

// travel lets time pass: every instant that the queues wait for comes so much nearer, or lies so much
// further back. Nobody is notified, so only a fetch that asks will notice.
func (n *node) travel(tb tester, d time.Duration) {
	tb.Helper()
	n.exec(tb, `WITH w AS (UPDATE worker_queue SET visible_at = visible_at - $1::interval),
	                 o AS (UPDATE orchestrator_queue SET visible_at = visible_at - $1::interval, sticky_due = sticky_due - $1::interval),
	                 i AS (UPDATE instances SET sticky_until = sticky_until - $1::interval)
	            UPDATE instance_locks SET locked_until = locked_until - $1::interval`, d)
}

// refuse makes the table refuse the rows for which the condition holds: a failure that no check in Go can
// foresee.
func (n *node) refuse(tb tester, table, condition string) {
	tb.Helper()
	n.exec(tb, `ALTER TABLE `+table+` ADD CONSTRAINT refused_by_test CHECK (NOT (`+condition+`))`)
}

// enqueue adds work items with these names, due at once, in one call each.
func (n *node) enqueue(tb tester, names ...string) {
	tb.Helper()
	for _, name := range names {
		n.enqueueWith(tb, name, nil)
	}
}

func (n *node) enqueueWith(tb tester, name string, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	tb.Helper()
	added, err := n.EnqueueForWorker(context.Background(), pgwake.WorkItem{Name: name}, o)
	require.NoError(tb, err)
	return added
}

// take fetches one item that must be due.
func (n *node) take(tb tester) *pgwake.ClaimedWorkItem {
	tb.Helper()
	item, err := n.FetchWorkItem(context.Background(), now)
	require.NoError(tb, err)
	return item
}

// takeAll fetches everything due in the namespaces, and returns the names.
func (n *node) takeAll(tb tester, namespaces ...string) []string {
	tb.Helper()
	items, err := n.FetchWorkItems(context.Background(), pgwake.MaxFetch,
		&pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: namespaces})
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil
	}
	require.NoError(tb, err)
	return namesOf(items)
}

func namesOf(items []*pgwake.ClaimedWorkItem) []string {
	names := make([]string, len(items))
	for i, item := range items {
		names[i] = item.Name
	}
	return names
}

// requireNoWork asserts that nothing is due.
func (n *node) requireNoWork(tb tester) {
	tb.Helper()
	item, err := n.FetchWorkItem(context.Background(), now)
	require.ErrorIs(tb, err, pgwake.ErrNoWork, "%+v", item)
	require.Nil(tb, item)
}

// send adds messages of these kinds for an instance, in one call each.
func (n *node) send(tb tester, instance string, kinds ...pgwake.MessageKind) {
	tb.Helper()
	for _, kind := range kinds {
		n.sendWith(tb, pgwake.Message{Instance: instance, Kind: kind}, nil)
	}
}

func (n *node) sendWith(tb tester, m pgwake.Message, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	tb.Helper()
	added, err := n.EnqueueForOrchestrator(context.Background(), m, o)
	require.NoError(tb, err)
	return added
}

// takeTurn fetches a turn that must be due.
func (n *node) takeTurn(tb tester) *pgwake.OrchestrationItem {
	tb.Helper()
	turn, err := n.FetchOrchestrationItem(context.Background(), now)
	require.NoError(tb, err)
	return turn
}

// requireNoTurn asserts that no instance has a turn due.
func (n *node) requireNoTurn(tb tester) {
	tb.Helper()
	turn, err := n.FetchOrchestrationItem(context.Background(), now)
	require.ErrorIs(tb, err, pgwake.ErrNoWork, "%+v", turn)
	require.Nil(tb, turn)
}

// start makes an instance known: a start message, and the ack of its first turn.
func (n *node) start(tb tester, instance string) {
	tb.Helper()
	n.sendWith(tb, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow", Version: "1.0.0"}, nil)
	turn := n.takeTurn(tb)
	require.Equal(tb, instance, turn.Instance)
	n.ackTurn(tb, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Version: "1.0.0"}})
}

func (n *node) ackTurn(tb tester, turn *pgwake.OrchestrationItem, ack pgwake.OrchestrationAck) {
	tb.Helper()
	require.NoError(tb, n.AckOrchestrationItem(context.Background(), turn.LockToken, ack))
}

// kindsOf returns the kinds of a turn's messages, in their order.
func kindsOf(turn *pgwake.OrchestrationItem) []pgwake.MessageKind {
	kinds := make([]pgwake.MessageKind, len(turn.Messages))
	for i, m := range turn.Messages {
		kinds[i] = m.Kind
	}
	return kinds
}

// claimedAt is the server's instant of a claim that was made with the lease.
func claimedAt(lockedUntil time.Time) time.Time { return lockedUntil.Add(-lease) }

// requireError asserts that err is an *Error with this cause, and returns it.
func requireError(tb tester, err, cause error) *pgwake.Error {
	tb.Helper()
	require.ErrorIs(tb, err, cause)
	var typed *pgwake.Error
	require.ErrorAs(tb, err, &typed)
	require.NotEmpty(tb, typed.Op)
	return typed
}

// awaitBlocked waits until so many statements on the schema wait for a lock that somebody else holds.
func (n *node) awaitBlocked(tb tester, count int) {
	tb.Helper()
	require.Eventually(tb, func() bool {
		return len(n.blocked(tb)) >= count
	}, patience, 5*time.Millisecond, "nobody waits for a lock")
}

// blocked returns the backends whose statement on the schema waits for a lock.
func (n *node) blocked(tb tester) []int32 {
	tb.Helper()
	return query[int32](tb, n, `SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%'`, n.quoted())
}

// urlWith returns the test server's URL after a change of what it says.
func (n *node) urlWith(tb testing.TB, change func(*pgx.ConnConfig)) string {
	tb.Helper()
	config := backstage.users.Config().ConnConfig
	config.RuntimeParams = map[string]string{}
	change(config)
	words := map[string]string{
		"host": config.Host, "port": fmt.Sprint(config.Port), "dbname": config.Database, "user": config.User, "password": config.Password,
	}
	if config.TLSConfig == nil {
		words["sslmode"] = "disable"
	}
	maps.Copy(words, config.RuntimeParams)
	var url strings.Builder
	for _, word := range slices.Sorted(maps.Keys(words)) {
		fmt.Fprintf(&url, "%s='%s' ", word, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(words[word]))
	}
	return strings.TrimSpace(url.String())
}

// openAt opens one more Provider on the schema, at a URL of its own. The Config may be nil.
func (n *node) openAt(tb testing.TB, url string, config *pgwake.Config) *node {
	tb.Helper()
	c := pgwake.Config{Logger: silent}
	if config != nil {
		c = *config
		c.Logger = silent
	}
	if c.NotifyDeliveryTimeout == 0 {
		c.NotifyDeliveryTimeout = patience
	}
	c.Schema = n.schema
	p, err := pgwake.Open(context.Background(), url, &c)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(tb, p.Close(ctx))
	})
	return &node{Provider: p, schema: n.schema}
}

var silent = slog.New(slog.DiscardHandler)

// userPool is a pool of the caller's, of so many connections.
func (n *node) userPool(tb testing.TB, connections int32) *pgxpool.Pool {
	tb.Helper()
	config := backstage.users.Config()
	config.MaxConns, config.MinConns = connections, 0
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}
