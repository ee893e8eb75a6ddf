package providertest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/providertest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

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

// schemas are used by one row after another: most of the time that a row takes would go into migrations.
type schemas struct {
	all  testing.TB // until its end
	mu   sync.Mutex
	free []string
}

// take returns a schema without data. If f is not nil, its functions have that fault until tb ends.
func (s *schemas) take(tb testing.TB, f *fault) string {
	schema := s.unused()
	if schema == "" {
		schema = testdb.Schema(s.all)
		migrate(tb, schema)
	}
	mend := f.infect(tb, schema)
	tb.Cleanup(func() { // after the Provider was closed
		testdb.Exec(tb, pgwaketest.URL(tb), empty(schema))
		for _, function := range mend {
			testdb.Exec(tb, pgwaketest.URL(tb), function)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.free = append(s.free, schema)
	})
	return schema
}

func (s *schemas) unused() (schema string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := len(s.free) - 1; last >= 0 {
		schema, s.free = s.free[last], s.free[:last]
	}
	return schema
}

// empty is a statement that leaves a schema as the migrations do.
func empty(schema string) string {
	return `DO $$ BEGIN
		SET search_path = ` + schema + `;
		EXECUTE (SELECT 'TRUNCATE ' || string_agg(quote_ident(tablename), ', ') || ' RESTART IDENTITY' FROM pg_tables
		          WHERE schemaname = current_schema() AND tablename <> 'schema_migrations');
		INSERT INTO namespaces (name) VALUES ('default');
	END $$`
}

func TestProvider(t *testing.T) {
	providertest.Run(t, factory(&schemas{all: t}, nil))
}

// factory makes Providers with a fault, or sound ones if that is nil.
func factory(s *schemas, f *fault) providertest.Factory {
	return providertest.Factory{
		New: func(tb testing.TB) providertest.Provider { return f.dress(open(tb, s.take(tb, f), pgwake.Config{})) },
		Another: func(tb testing.TB, p providertest.Provider) providertest.Provider {
			return f.dress(open(tb, schemaOf(p), pgwake.Config{}))
		},
		ShortPoll: func(tb testing.TB) providertest.Provider {
			return f.dress(open(tb, s.take(tb, f), pgwake.Config{DisableLongPoll: true}))
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
			"Pool", "Schema", "MaxPayload", "Do", "DoTx", "DoAck", "DoEnqueue", "Migrate", "Watch":
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
