package testroles_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	events "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/migrations"
	graph "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen: far more than it takes.
const patience = time.Minute

var silent = slog.New(slog.DiscardHandler)

// stage is a schema with layers, all of them unless it is said which, as docs/security.md has it made: by a role that owns nothing else.
type stage struct {
	t      *testing.T
	schema string
	owner  string
	super  *pgx.Conn
}

func newStage(t *testing.T) *stage {
	t.Helper()
	return stageOf(t, "taskgraph", "eventbus")
}

func stageOf(t *testing.T, layers ...string) *stage {
	t.Helper()
	s := &stage{t: t, schema: testdb.Schema(t)}
	s.owner = testroles.New(t, testroles.Owner, s.schema)
	s.migrate(layers...)
	conn, err := pgx.Connect(t.Context(), testdb.URL(t))
	require.NoError(t, err)
	s.super = conn
	t.Cleanup(func() { require.NoError(t, s.super.Close(context.Background())) })
	return s
}

// migrate has the owner make what is missing of the schema with these layers.
func (s *stage) migrate(layers ...string) {
	s.t.Helper()
	p := s.open(s.owner, &pgwake.Config{Mode: pgwake.ModeDisabled})
	for _, layer := range layers {
		require.NoError(s.t, p.Migrate(s.t.Context(), map[string]migrations.Layer{"taskgraph": graph.Layer(), "eventbus": events.Layer()}[layer]))
	}
}

// role makes a role of the page, for all layers.
func (s *stage) role(role string) string {
	s.t.Helper()
	return testroles.New(s.t, role, s.schema, "taskgraph", "eventbus")
}

// open opens a Provider of a role.
func (s *stage) open(role string, config *pgwake.Config) *pgwake.Provider {
	s.t.Helper()
	config.Schema, config.Logger = s.schema, silent
	p, err := pgwake.Open(s.within(), testroles.URL(s.t, role), config)
	require.NoError(s.t, err)
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(s.t, p.Close(ctx))
	})
	return p
}

func (s *stage) within() context.Context {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	s.t.Cleanup(cancel)
	return ctx
}

// list returns the first column of a query on the catalogs, or of the schema, by a superuser.
func (s *stage) list(sql string, args ...any) []string {
	s.t.Helper()
	rows, err := s.super.Query(s.within(), sql, args...)
	require.NoError(s.t, err, sql)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(s.t, err, sql)
	return all
}
