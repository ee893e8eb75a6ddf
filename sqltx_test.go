package pgwake_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// twin prepares a Tx verb on an empty schema, with every option that it has, and returns a call of it. The call can be
// made again after a rollback.
type twin func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error)

// awkward is a text with everything that an array literal has to quote.
const awkward = `a "quoted", {braced} \back'slashed` + "\nNULL é"

var awkwardJSON = json.RawMessage(`{"text": "a \"quoted\", {braced} \\back'slashed NULL é", "list": [1, null]}`)

var allOptions = pgwake.EnqueueOptions{Namespace: "express", Priority: 7, Delay: 5 * time.Hour, DedupKey: awkward}

// At another instant than allOptions, and in another zone than the server's.
func atNoon() pgwake.EnqueueOptions {
	return pgwake.EnqueueOptions{At: time.Date(2100, 1, 2, 12, 0, 0, 123456789, time.FixedZone("far", 5*3600))}
}

func allWork() []pgwake.WorkEnqueue {
	return []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: awkward, Input: awkwardJSON, Instance: awkward, ExecutionID: 1 << 60, ActivityID: 2,
			Tag: awkward, Session: awkward}, EnqueueOptions: allOptions},
		{WorkItem: pgwake.WorkItem{Name: "plain"}},
		{WorkItem: pgwake.WorkItem{Name: "at noon"}, EnqueueOptions: atNoon()},
	}
}

func allMessages() []pgwake.MessageEnqueue {
	return []pgwake.MessageEnqueue{
		{Message: pgwake.Message{Instance: awkward, Kind: pgwake.MessageStart, Data: awkwardJSON, Name: awkward, Version: "1.0",
			ExecutionID: 3, Queue: awkward}, EnqueueOptions: allOptions},
		{Message: pgwake.Message{Instance: "plain", Kind: "ping"}},
		{Message: pgwake.Message{Instance: "plain", Kind: "pong"}, EnqueueOptions: atNoon()},
	}
}

// takeTwo claims two new items.
func takeTwo(t *testing.T, n *node) []pgwake.LockToken {
	n.enqueue(t, "a", "b")
	return []pgwake.LockToken{n.take(t).LockToken, n.take(t).LockToken}
}

// turnOf returns a turn of a known instance, with a work item and a timer that were set before.
func turnOf(t *testing.T, n *node, instance string) *pgwake.OrchestrationItem {
	n.start(t, instance)
	n.sendWith(t, pgwake.Message{Instance: instance, Kind: "timer"}, &pgwake.EnqueueOptions{Delay: time.Hour, DedupKey: "timer"})
	_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "slow", Instance: instance, ExecutionID: 1, ActivityID: 4}, nil)
	require.NoError(t, err)
	n.send(t, instance, "go")
	return n.takeTurn(t)
}

// deadLetters makes two, one of each queue.
func deadLetters(t *testing.T, n *node) *pgwake.DeadLetterFilter {
	require.NoError(t, n.DeadLetterWorkItem(tctx, takeTwo(t, n)[0], "spoilt", awkward))
	require.NoError(t, n.DeadLetterOrchestrationItem(tctx, turnOf(t, n, "order").LockToken, "spoilt", ""))
	return &pgwake.DeadLetterFilter{Reason: "spoilt", DiedBefore: time.Now().Add(24 * time.Hour), IDs: []int64{1, 2, 3}}
}

// executionsOf makes an instance that completed after it had continued as new.
func executionsOf(t *testing.T, n *node, instance string) {
	n.start(t, instance)
	for execution, status := range []pgwake.Status{2: pgwake.StatusContinuedAsNew, 3: pgwake.StatusCompleted} {
		if status != "" {
			n.send(t, instance, "go")
			n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{ExecutionID: int64(execution), Metadata: pgwake.Metadata{Status: status},
				History: []pgwake.Event{{ID: 1, Type: "done"}}})
		}
	}
}

var soonest = pgwake.BulkFilter{CompletedBefore: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), Instances: []string{"order", awkward}}

var twins = map[string]twin{
	"EnqueueForWorkerTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.EnqueueForWorkerTx(ctx, tx, allWork()[0].WorkItem, &allOptions)
		}
	},
	"EnqueueForWorkerManyTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		n.enqueueWith(t, "queued", &pgwake.EnqueueOptions{Delay: 9 * time.Hour, DedupKey: "queued"})
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.EnqueueForWorkerManyTx(ctx, tx, append(allWork(), pgwake.WorkEnqueue{
				WorkItem: pgwake.WorkItem{Name: "again"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "queued"}}))
		}
	},
	"EnqueueForOrchestratorTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.EnqueueForOrchestratorTx(ctx, tx, allMessages()[0].Message, &allOptions)
		}
	},
	"EnqueueForOrchestratorManyTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.EnqueueForOrchestratorManyTx(ctx, tx, allMessages())
		}
	},
	"AckWorkItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		token := takeTwo(t, n)[0]
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.AckWorkItemTx(ctx, tx, token, &allMessages()[0].Message)
		}
	},
	"AckWorkItemsTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		tokens := takeTwo(t, n)
		return func(ctx context.Context, tx pgx.Tx) (any, error) { return nil, n.AckWorkItemsTx(ctx, tx, tokens) }
	},
	"AbandonWorkItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		token := takeTwo(t, n)[0]
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.AbandonWorkItemTx(ctx, tx, token, &pgwake.AbandonOptions{Delay: 3 * time.Hour, IgnoreAttempt: true, Error: awkward})
		}
	},
	"RenewWorkItemLockTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		token := takeTwo(t, n)[0]
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.RenewWorkItemLockTx(ctx, tx, token, 4*time.Hour)
		}
	},
	"RenewWorkItemLocksTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		tokens := takeTwo(t, n)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.RenewWorkItemLocksTx(ctx, tx, tokens, 4*time.Hour)
		}
	},
	"AckOrchestrationItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		turn := turnOf(t, n, "order")
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.AckOrchestrationItemTx(ctx, tx, turn.LockToken, pgwake.OrchestrationAck{
				ExecutionID: 1,
				History:     []pgwake.Event{{ID: 1, Type: awkward, Data: awkwardJSON}, {ID: 2, Type: "plain"}},
				WorkItems:   allWork(),
				Messages:    allMessages(),
				Metadata: pgwake.Metadata{Name: awkward, Version: "2.0", Status: pgwake.StatusFailed, Output: awkward, Queue: awkward,
					Attributes: awkwardJSON, PinnedVersion: &pgwake.Version{Major: 1, Minor: 2, Patch: 3}},
				CancelActivities: []pgwake.ActivityRef{{ExecutionID: 1, ActivityID: 4}},
				CancelMessages:   []string{"timer", awkward},
				CustomStatus:     &pgwake.CustomStatusUpdate{Value: awkward},
				KV: []pgwake.KVUpdate{{Op: pgwake.KVClearAll}, {Key: awkward, Value: awkward}, {Key: "empty"},
					{Op: pgwake.KVClear, Key: "other"}},
			})
		}
	},
	"AbandonOrchestrationItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		turn := turnOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.AbandonOrchestrationItemTx(ctx, tx, turn.LockToken, &pgwake.AbandonOptions{Delay: 3 * time.Hour, IgnoreAttempt: true})
		}
	},
	"RenewOrchestrationItemLockTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		turn := turnOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.RenewOrchestrationItemLockTx(ctx, tx, turn.LockToken, 4*time.Hour)
		}
	},
	"AppendHistoryTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.AppendHistoryTx(ctx, tx, awkward, 2, []pgwake.Event{{ID: 1, Type: awkward, Data: awkwardJSON}, {ID: 2, Type: "plain"}})
		}
	},
	"RenewSessionLockTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		claimSession(t, n, lease)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.RenewSessionLockTx(ctx, tx, []string{"nobody", awkward}, 4*time.Hour, 2*time.Hour)
		}
	},
	"ReleaseSessionsTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		item := claimSession(t, n, lease)
		require.NoError(t, n.AckWorkItem(tctx, item.LockToken, nil))
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.ReleaseSessionsTx(ctx, tx, []string{"nobody", awkward})
		}
	},
	"ReleaseStickyTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		n.stick(t, "order", awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.ReleaseStickyTx(ctx, tx, []string{"nobody", awkward})
		}
	},
	"CleanupSessionsTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		item := claimSession(t, n, lease)
		require.NoError(t, n.AckWorkItem(tctx, item.LockToken, nil))
		n.exec(t, `UPDATE sessions SET locked_until = locked_until - interval '2 hours'`)
		return func(ctx context.Context, tx pgx.Tx) (any, error) { return n.CleanupSessionsTx(ctx, tx) }
	},
	"DeadLetterWorkItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		token := takeTwo(t, n)[0]
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.DeadLetterWorkItemTx(ctx, tx, token, "spoilt", awkward)
		}
	},
	"DeadLetterOrchestrationItemTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		turn := turnOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.DeadLetterOrchestrationItemTx(ctx, tx, turn.LockToken, "spoilt", awkward)
		}
	},
	"RedriveDeadLettersTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		filter := deadLetters(t, n)
		return func(ctx context.Context, tx pgx.Tx) (any, error) { return n.RedriveDeadLettersTx(ctx, tx, filter) }
	},
	"PurgeDeadLettersTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		filter := deadLetters(t, n)
		return func(ctx context.Context, tx pgx.Tx) (any, error) { return n.PurgeDeadLettersTx(ctx, tx, filter) }
	},
	"PurgeArchiveTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		n.exec(t, `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at) VALUES (1, 'default', 0, 1, 'x', now())`)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.PurgeArchiveTx(ctx, tx, time.Now().Add(24*time.Hour))
		}
	},
	"DoTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.DoTx(ctx, tx, "remark", n.enqueues("remarked"))
		}
	},
	"SetLimitsTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.SetLimitsTx(ctx, tx, "mine", pgwake.Limits{MaxRunning: 3, RatePerKey: pgwake.Rate{Interval: time.Second, Burst: 2}})
		}
	},
	"RegisterNamespaceTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.RegisterNamespaceTx(ctx, tx, "fresh")
		}
	},
	"PauseTx": func(_ *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.PauseTx(ctx, tx, pgwake.Worker, "mine", "other")
		}
	},
	"ResumeTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		require.NoError(t, n.Pause(tctx, pgwake.Worker, pgwake.AllNamespaces))
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return nil, n.ResumeTx(ctx, tx, pgwake.Worker, pgwake.AllNamespaces)
		}
	},
	"DeleteInstanceTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		turnOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.DeleteInstanceTx(ctx, tx, awkward, &pgwake.DeleteOptions{Force: true})
		}
	},
	"DeleteInstancesTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		executionsOf(t, n, awkward)
		executionsOf(t, n, "order")
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.DeleteInstancesTx(ctx, tx, []string{awkward, "order"}, nil)
		}
	},
	"DeleteInstancesBulkTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		executionsOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) { return n.DeleteInstancesBulkTx(ctx, tx, &soonest) }
	},
	"PruneExecutionsTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		executionsOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.PruneExecutionsTx(ctx, tx, awkward, &pgwake.PruneOptions{KeepLast: 1, CompletedBefore: soonest.CompletedBefore})
		}
	},
	"PruneExecutionsBulkTx": func(t *testing.T, n *node) func(context.Context, pgx.Tx) (any, error) {
		executionsOf(t, n, awkward)
		return func(ctx context.Context, tx pgx.Tx) (any, error) {
			return n.PruneExecutionsBulkTx(ctx, tx, &soonest, &pgwake.PruneOptions{KeepLast: 1})
		}
	},
}

// claimSession makes the owner with the awkward name hold a session.
func claimSession(t *testing.T, n *node, d time.Duration) *pgwake.ClaimedWorkItem {
	_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "x", Session: "s"}, nil)
	require.NoError(t, err)
	item, err := n.FetchWorkItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true,
		Session: &pgwake.SessionOptions{Owner: awkward, LockTimeout: d}})
	require.NoError(t, err)
	return item
}

// sqlDrivers are the drivers of database/sql that the twins run on.
var sqlDrivers = map[string]func(*pgx.ConnConfig) driver.Connector{
	"pgx": func(c *pgx.ConnConfig) driver.Connector {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		return stdlib.GetConnector(*c)
	},
	"pgx without the extended protocol": func(c *pgx.ConnConfig) driver.Connector {
		c.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		return stdlib.GetConnector(*c)
	},
	"another": func(c *pgx.ConnConfig) driver.Connector {
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
		return foreign{stdlib.GetConnector(*c)}
	},
}

// openSQL opens a database/sql on the tests' server.
func openSQL(tb testing.TB, driver string) *sql.DB {
	tb.Helper()
	openBackstage(tb)
	db := sql.OpenDB(sqlDrivers[driver](backstage.users.Config().ConnConfig.Copy()))
	tb.Cleanup(func() { require.NoError(tb, db.Close()) })
	return db
}

// onEachDriver runs a test as a subtest for each driver.
func onEachDriver(t *testing.T, test func(t *testing.T, db *sql.DB)) {
	for _, name := range slices.Sorted(maps.Keys(sqlDrivers)) {
		t.Run(name, func(t *testing.T) { test(t, openSQL(t, name)) })
	}
}

// beginSQL begins a transaction that ends with the test at the latest.
func beginSQL(tb testing.TB, db *sql.DB) *sql.Tx {
	tb.Helper()
	tx, err := db.BeginTx(tctx, nil)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// foreign makes pgx a driver like lib/pq: it takes the few types of driver.Value alone, returns as bytes what it does
// not know, and has an error type of its own.
type foreign struct{ driver.Connector }

type foreignConn struct{ *stdlib.Conn }

type foreignRows struct{ driver.Rows }

type foreignError struct{ state, message string }

func (e *foreignError) Error() string    { return "foreign: " + e.message }
func (e *foreignError) SQLState() string { return e.state }

func foreignly(err error) error {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		return &foreignError{pgErr.Code, pgErr.Message}
	}
	return err
}

func (f foreign) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := f.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return foreignConn{conn.(*stdlib.Conn)}, nil
}

func (foreignConn) CheckNamedValue(v *driver.NamedValue) (err error) {
	v.Value, err = driver.DefaultParameterConverter.ConvertValue(v.Value)
	return err
}

func (c foreignConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	result, err := c.Conn.ExecContext(ctx, query, args)
	return result, foreignly(err)
}

func (c foreignConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.Conn.QueryContext(ctx, query, args)
	if err != nil {
		return nil, foreignly(err)
	}
	return foreignRows{rows}, nil
}

func (r foreignRows) Next(dest []driver.Value) error {
	err := r.Rows.Next(dest)
	types := r.Rows.(driver.RowsColumnTypeDatabaseTypeName)
	for i, v := range dest {
		if text, ok := v.(string); ok && types.ColumnTypeDatabaseTypeName(i) != "TEXT" {
			dest[i] = []byte(text)
		}
	}
	return foreignly(err)
}

// What the schema holds as a transaction sees it, without what differs from one time to the next: ids, tokens, and
// instants but for the hours to them.
func contentInside(t *testing.T, n *node, tx pgx.Tx) []string {
	t.Helper()
	var query []string
	for _, table := range tables {
		query = append(query, `SELECT '`+table+` ' || to_json(t) FROM `+n.quoted()+`.`+table+` t`)
	}
	rows, err := tx.Query(tctx, strings.Join(query, " UNION ALL "))
	require.NoError(t, err)
	content, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for i := range content {
		content[i] = masked(t, content[i])
	}
	slices.Sort(content)
	return content
}

var (
	maskedIDs      = regexp.MustCompile(`(?i)"(id|item_id)":\d+`)
	maskedInstants = regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"`)
)

func masked(t *testing.T, content string) string {
	t.Helper()
	content = maskedIDs.ReplaceAllString(content, `"$1":0`)
	return maskedInstants.ReplaceAllStringFunc(content, func(quoted string) string {
		var instant time.Time
		require.NoError(t, json.Unmarshal([]byte(quoted), &instant))
		if instant.Year() == 2100 {
			return quoted[:len(`"2100-01-02T`)]
		}
		return fmt.Sprintf(`"in %v"`, time.Until(instant).Round(time.Hour))
	})
}

// Another verb with a Tx twin fails here until it stands in the table.
func TestWrapSQLTx_EveryTwin_IsInTheTable(t *testing.T) {
	var names []string
	provider := reflect.TypeFor[*pgwake.Provider]()
	for i := range provider.NumMethod() {
		method := provider.Method(i)
		for in := range method.Type.Ins() {
			if in == reflect.TypeFor[pgx.Tx]() {
				names = append(names, method.Name)
			}
		}
	}
	require.NotEmpty(t, names)
	require.Equal(t, names, slices.Sorted(maps.Keys(twins)))
}

func TestWrapSQLTx_EveryTwin_DoesWhatItDoesOnATransactionOfPgx(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(twins)) {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			call := twins[name](t, n)
			before := n.content(t)

			tx := n.begin(t)
			untouched := contentInside(t, n, tx)
			wantResult, err := call(tctx, tx)
			require.NoError(t, err)
			want := contentInside(t, n, tx)
			require.NotEqual(t, untouched, want, "the call changes nothing, so it shows nothing")
			require.NoError(t, tx.Rollback(tctx))
			require.Equal(t, before, n.content(t), "the table's call cannot be made again")

			for _, driver := range slices.Sorted(maps.Keys(sqlDrivers)) {
				tx := beginSQL(t, openSQL(t, driver))
				result, err := call(tctx, pgwake.WrapSQLTx(tx))
				require.NoError(t, err, driver)
				require.Equal(t, maskedJSON(t, wantResult), maskedJSON(t, result), driver)
				require.Equal(t, want, contentInside(t, n, pgwake.WrapSQLTx(tx)), driver)
				require.NoError(t, tx.Rollback())
				require.Equal(t, before, n.content(t), "a rollback leaves nothing of it: %s", driver)
			}

			sqlTx := beginSQL(t, openSQL(t, "pgx"))
			_, err = call(tctx, pgwake.WrapSQLTx(sqlTx))
			require.NoError(t, err)
			require.NoError(t, sqlTx.Commit())
			require.Equal(t, want, contentInside(t, n, n.begin(t)))
		})
	}
}

func maskedJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return masked(t, string(text))
}

func TestWrapSQLTx_Commit_WakesAParkedFetch(t *testing.T) {
	onEachDriver(t, func(t *testing.T, db *sql.DB) {
		n := newNode(t, nil)
		got := make(chan string, 1)
		go func() {
			item, err := n.FetchWorkItem(tctx, soon)
			if err != nil {
				got <- err.Error()
				return
			}
			got <- item.Name
		}()
		require.Eventually(t, func() bool { s := n.Stats().Worker; return s.Parked == 1 && s.Settled }, patience, 10*time.Millisecond)
		tx := beginSQL(t, db)
		_, err := n.EnqueueForWorkerTx(tctx, pgwake.WrapSQLTx(tx), pgwake.WorkItem{Name: "joined"}, nil)
		require.NoError(t, err)
		require.Equal(t, 1, n.Stats().Worker.Parked)
		require.NoError(t, tx.Commit())
		require.Equal(t, "joined", <-got)
	})
}

func TestWrapSQLTx_ErrorsOfTheServer_AreThoseOfTheVerb(t *testing.T) {
	onEachDriver(t, func(t *testing.T, db *sql.DB) {
		n := newNode(t, nil)
		n.start(t, "order")
		require.NoError(t, n.AppendHistory(tctx, "order", 1, []pgwake.Event{{ID: 1, Type: "x"}}))
		tokens := takeTwo(t, n)
		require.NoError(t, n.AckWorkItem(tctx, tokens[0], nil))

		for _, test := range []struct {
			cause error
			state string
			call  func(tx pgx.Tx) error
		}{
			{pgwake.ErrLockLost, "PW001", func(tx pgx.Tx) error { return n.AckWorkItemTx(tctx, tx, tokens[0], nil) }},
			{pgwake.ErrNotFound, "PW002", func(tx pgx.Tx) error { _, err := n.DeleteInstanceTx(tctx, tx, "none", nil); return err }},
			{pgwake.ErrInstanceRunning, "PW004", func(tx pgx.Tx) error { _, err := n.DeleteInstanceTx(tctx, tx, "order", nil); return err }},
			{pgwake.ErrDuplicateEvent, "23505", func(tx pgx.Tx) error {
				return n.AppendHistoryTx(tctx, tx, "order", 1, []pgwake.Event{{ID: 1, Type: "x"}})
			}},
		} {
			tx := beginSQL(t, db)
			err := test.call(pgwake.WrapSQLTx(tx))
			require.Equal(t, test.state, requireError(t, err, test.cause).SQLState)
			require.NoError(t, tx.Rollback())
		}

		tx := beginSQL(t, db)
		err := n.AckWorkItemsTx(tctx, pgwake.WrapSQLTx(tx), tokens)
		var lost *pgwake.LostLocksError
		require.ErrorAs(t, err, &lost)
		require.Equal(t, tokens[:1], lost.Tokens)
		require.NoError(t, tx.Commit(), "the transaction goes on")
		require.Empty(t, n.rows(t)["worker_queue"])
	})
}

// A conflict of transactions is worth another try, whoever reports it.
func TestWrapSQLTx_SerializationFailure_IsRetryable(t *testing.T) {
	onEachDriver(t, func(t *testing.T, db *sql.DB) {
		n := newNode(t, nil)
		token := takeTwo(t, n)[0]
		tx, err := db.BeginTx(tctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback()) }()
		_, err = tx.Exec(`SELECT 1`) // its snapshot
		require.NoError(t, err)
		_, err = n.RenewWorkItemLock(tctx, token, lease)
		require.NoError(t, err)
		err = n.AbandonWorkItemTx(tctx, pgwake.WrapSQLTx(tx), token, nil)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.Equal(t, "40001", typed.SQLState)
		require.True(t, typed.Retryable)
	})
}

// fieldError is an error like those of pgdriver, the driver of bun.
type fieldError map[byte]string

func (e fieldError) Error() string          { return e['M'] }
func (e fieldError) Field(name byte) string { return e[name] }

type failingConn struct {
	foreignConn
	err error
}

func (c failingConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return nil, c.err
}

type failing struct {
	foreign
	err error
}

func (f failing) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := f.foreign.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return failingConn{conn.(foreignConn), f.err}, nil
}

func TestWrapSQLTx_ErrorsOfOtherDrivers_AreUnderstood(t *testing.T) {
	n := newNode(t, nil)
	abandon := func(failure error) error {
		db := sql.OpenDB(failing{foreign{stdlib.GetConnector(*backstage.users.Config().ConnConfig)}, failure})
		defer db.Close()
		tx := beginSQL(t, db)
		defer func() { require.NoError(t, tx.Rollback()) }()
		token := pgwake.LockToken("00000000-0000-0000-0000-000000000001/1")
		return n.AbandonWorkItemTx(tctx, pgwake.WrapSQLTx(tx), token, nil)
	}
	require.Equal(t, "PW001", requireError(t, abandon(fieldError{'C': "PW001", 'M': "?"}), pgwake.ErrLockLost).SQLState)
	require.True(t, requireError(t, abandon(driver.ErrBadConn), driver.ErrBadConn).Retryable)
	cause := errors.New("of no server")
	require.Empty(t, requireError(t, abandon(cause), cause).SQLState)
}

func TestWrapSQLTx_WhatIsTheCallers_IsRefused(t *testing.T) {
	n := newNode(t, nil)
	tx := beginSQL(t, openSQL(t, "pgx"))
	wrapped := pgwake.WrapSQLTx(tx)
	_, begun := wrapped.Begin(tctx)
	_, copied := wrapped.CopyFrom(tctx, nil, nil, nil)
	_, prepared := wrapped.Prepare(tctx, "", "")
	for _, err := range []error{wrapped.Commit(tctx), wrapped.Rollback(tctx), begun, copied, prepared, wrapped.SendBatch(tctx, nil).Close()} {
		require.ErrorContains(t, err, "database/sql")
	}
	require.Nil(t, wrapped.Conn())
	_, err := n.EnqueueForWorkerTx(tctx, wrapped, pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err, "the transaction goes on")

	require.NoError(t, tx.Rollback())
	_, err = n.EnqueueForWorkerTx(tctx, wrapped, pgwake.WorkItem{Name: "x"}, nil)
	requireError(t, err, sql.ErrTxDone)
	_, err = n.EnqueueForWorkerTx(tctx, pgwake.WrapSQLTx(nil), pgwake.WorkItem{Name: "x"}, nil)
	requireError(t, err, pgwake.ErrInvalid)
}

// What pgx.Rows and pgx.Row promise.
func TestWrapSQLTx_Rows_BehaveLikeThoseOfPgx(t *testing.T) {
	onEachDriver(t, func(t *testing.T, db *sql.DB) {
		tx := pgwake.WrapSQLTx(beginSQL(t, db))
		rows, err := tx.Query(tctx, `SELECT n AS number, CASE WHEN n = 2 THEN 'two' END AS name FROM generate_series(1::bigint, $1::bigint) n`, 3)
		require.NoError(t, err)
		type named struct {
			Number int64
			Name   *string
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[named])
		require.NoError(t, err)
		require.Equal(t, []named{{1, nil}, {2, new("two")}, {3, nil}}, all)
		require.EqualValues(t, 3, rows.CommandTag().RowsAffected())

		rows, err = tx.Query(tctx, `SELECT 1::bigint, true`)
		require.NoError(t, err)
		values, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
		require.NoError(t, err)
		require.Equal(t, [][]any{{int64(1), true}}, values)

		var n int
		require.ErrorIs(t, tx.QueryRow(tctx, `SELECT 1 WHERE false`).Scan(&n), pgx.ErrNoRows)
		require.NoError(t, tx.QueryRow(tctx, `SELECT 'skipped', 2::bigint`).Scan(nil, &n))
		require.Equal(t, 2, n)
		require.Error(t, tx.QueryRow(tctx, `SELECT 'no number'`).Scan(&n))
		require.ErrorContains(t, tx.QueryRow(tctx, `SELECT $1`, struct{}{}).Scan(&n), "argument 1")
		_, err = tx.Exec(tctx, `SELECT $1`, struct{}{})
		require.ErrorContains(t, err, "argument 1")

		tag, err := tx.Exec(tctx, `SELECT FROM generate_series(1, 4)`)
		require.NoError(t, err)
		require.EqualValues(t, 4, tag.RowsAffected())

		// The last one fails in the middle of its rows.
		rows, err = tx.Query(tctx, `SELECT 1 / (3 - n) FROM generate_series(1::bigint, 5) n`)
		if err == nil {
			for rows.Next() {
			}
			err = rows.Err()
		}
		require.ErrorContains(t, err, "division by zero")
	})
}
