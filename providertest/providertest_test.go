package providertest_test

import (
	"context"
	"database/sql"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/providertest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { testschema.Main(m) }

// damaged is the type of an event that config refuses.
const damaged = "damaged"

// node is a pgwake.Provider that knows its schema.
type node struct {
	*pgwake.Provider
	schema string
}

func open(tb testing.TB, schema string, c pgwake.Config) node {
	c.Schema = schema
	c.ValidateEvent = func(e *pgwake.Event) error {
		if e.Type == damaged {
			return errors.New("the event is damaged")
		}
		return nil
	}
	return node{pgwaketest.Open(tb, &c), schema}
}

func (n node) in() (schema string) { return n.schema }

// schemaOf returns the schema of a node, in whatever it was dressed.
func schemaOf(p providertest.Provider) string { return p.(interface{ in() string }).in() }

// take returns a schema without data. If f is not nil, its functions have that fault until tb ends.
func take(tb testing.TB, f *fault) string {
	tb.Helper()
	schema := testschema.Core.Borrow(tb)
	mend := f.infect(tb, schema)
	tb.Cleanup(func() { // after the Provider was closed
		for _, function := range mend {
			testdb.Exec(tb, pgwaketest.URL(tb), function)
		}
	})
	return schema
}

func TestProvider(t *testing.T) {
	providertest.Run(t, factory(nil))
}

// factory makes Providers with a fault, or sound ones if that is nil.
func factory(f *fault) providertest.Factory {
	return providertest.Factory{
		New: func(tb testing.TB) providertest.Provider { return f.dress(open(tb, take(tb, f), pgwake.Config{})) },
		Another: func(tb testing.TB, p providertest.Provider) providertest.Provider {
			return f.dress(open(tb, schemaOf(p), pgwake.Config{}))
		},
		ShortPoll: func(tb testing.TB) providertest.Provider {
			return f.dress(open(tb, take(tb, f), pgwake.Config{DisableLongPoll: true}))
		},
		CorruptHistory: func(tb testing.TB, p providertest.Provider, instance string) {
			schema := pgx.Identifier{schemaOf(p)}.Sanitize()
			testdb.Exec(tb, pgwaketest.URL(tb), `UPDATE `+schema+`.history h SET type = $2 FROM `+schema+`.instances i
				WHERE i.instance_id = $1 AND h.instance_id = $1 AND h.execution_id = i.current_execution`, instance, damaged)
		},
		Begin: func(tb testing.TB, p providertest.Provider) pgx.Tx {
			conn, err := pgx.Connect(context.Background(), pgwaketest.URL(tb))
			require.NoError(tb, err)
			tb.Cleanup(func() { _ = conn.Close(context.Background()) })
			tx, err := conn.Begin(context.Background())
			require.NoError(tb, err)
			return tx
		},
		BeginSQL: func(tb testing.TB, p providertest.Provider) *sql.Tx {
			db, err := sql.Open("pgx", pgwaketest.URL(tb))
			require.NoError(tb, err)
			tb.Cleanup(func() { _ = db.Close() })
			tx, err := db.Begin()
			require.NoError(tb, err)
			tb.Cleanup(func() { _ = tx.Rollback() })
			return tx
		},
	}
}

// What a Provider has beyond the contract is listed here.
func TestTransactional_HasEveryVerb(t *testing.T) {
	contract := reflect.TypeFor[providertest.Transactional]()
	for m := range reflect.TypeFor[*pgwake.Provider]().Methods() {
		switch m.Name {
		case "Close", "Health", "Stats", "SetModes", "GetModes", "LocalTime", "Peek", "ReadHistoryPage", "ListNodes", "NodeReports", "Observe", "CountDeadLetters", "ListArchive", "PurgeArchive", "PurgeArchiveTx",
			"RegisterNamespace", "RegisterNamespaceTx", "ListNamespaces", "WaitForNamespaces", "SetLimits", "SetLimitsTx", "GetLimits", "Pause", "PauseTx", "Resume", "ResumeTx", "GetPaused",
			"Pool", "Schema", "MaxPayload", "ArchiveFor", "Do", "DoTx", "DoAck", "DoEnqueue", "Migrate", "Watch":
			continue
		}
		_, ok := contract.MethodByName(m.Name)
		require.True(t, ok, "%s is missing", m.Name)
	}
}

// What calls a verb is part of a row, or staticcheck finds it unused.
func TestTransactional_HasARowForEveryVerb(t *testing.T) {
	called := make(map[string]bool)
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for n := range ast.Preorder(file) {
			if call, ok := n.(*ast.CallExpr); ok {
				if verb, ok := call.Fun.(*ast.SelectorExpr); ok {
					called[verb.Sel.Name] = true
				}
			}
		}
	}
	for m := range reflect.TypeFor[providertest.Transactional]().Methods() {
		require.True(t, called[m.Name], "no row calls %s", m.Name)
	}
}
