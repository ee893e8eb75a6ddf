package taskgraph_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: how does a test have statements fail, and questions and answers get lost?

// breaks has the next calls of an SQL function fail, so many of them, with an SQLSTATE. Of its arguments, $1 and so on, those calls can be
// chosen by a condition.
func (g *graph) breaks(function, state string, times int, condition string) {
	g.t.Helper()
	away := function + "_away"
	if len(g.query(`SELECT proname::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace AND proname = $1`, away)) == 0 {
		g.query(`ALTER FUNCTION ` + function + ` RENAME TO ` + away)
		g.undone(`DROP FUNCTION ` + function + `; DROP SEQUENCE ` + function + `_calls; ALTER FUNCTION ` + away + ` RENAME TO ` + function)
	} else {
		g.query(`DROP SEQUENCE ` + function + `_calls`)
		g.query(`DROP FUNCTION ` + function)
	}
	g.query(`CREATE SEQUENCE ` + function + `_calls`)
	of := `FROM pg_proc WHERE pronamespace = current_schema()::regnamespace AND proname = $1`
	var args []string
	for i := range strings.Count(g.one(`SELECT proargtypes::text `+of, away), " ") + 1 {
		args = append(args, fmt.Sprint("$", i+1))
	}
	g.query(fmt.Sprintf(`CREATE FUNCTION %[1]s(%[2]s) RETURNS %[3]s LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
		BEGIN
			IF %[4]s AND nextval('%[1]s_calls') <= %[5]d THEN -- a rollback does not take that back
				RAISE EXCEPTION 'the test has it fail' USING ERRCODE = '%[6]s';
			END IF;
			%[7]s;
		END $$`, function, g.one(`SELECT pg_get_function_arguments(oid) `+of, away), g.one(`SELECT pg_get_function_result(oid) `+of, away),
		condition, times, state, map[bool]string{
			true:  `RETURN QUERY SELECT * FROM ` + away + `(` + strings.Join(args, ", ") + `)`,
			false: `RETURN ` + away + `(` + strings.Join(args, ", ") + `)`,
		}[g.one(`SELECT proretset::text `+of, away) == "true"]))
}

// losesBeginning has the server lose what start_step has done to a step, and not the claim, as after a failover.
func (g *graph) losesBeginning(step string) {
	g.t.Helper()
	g.query(`DELETE FROM step_transitions WHERE step_id = $1 AND to_state = 'in_progress'`, step)
	g.query(`UPDATE steps SET state = 'enqueued', claim = NULL, attempts = attempts - 1, last_attempted_at = NULL, sort_key = sort_key - 1 WHERE step_id = $1`, step)
}

// loss is what is lost of a statement.
type loss int32

const (
	question   loss = iota + 1 // it never gets to the server
	answer                     // it has taken effect
	connection                 // it never gets to the server, and nobody says so
)

// network is that between a Provider and the server. It loses a connection with a statement, or with what is said to it.
type network struct {
	what       loss
	of         string // part of the statement, which does not begin a transaction: that may say "read committed"
	statements atomic.Int32
	lost       atomic.Int32
}

// loses has it lose the next statement that contains a text.
func (n *network) loses(what loss, of string) {
	n.what, n.of = what, of
	n.statements.Store(1)
}

func (n *network) TraceQueryStart(ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if n.statements.Load() > 0 && strings.Contains(q.SQL, n.of) && !strings.HasPrefix(q.SQL, "begin ") && n.statements.Add(-1) >= 0 {
		n.lost.Add(1)
		conn.PgConn().Conn().(*line).loses.Store(int32(n.what))
	}
	return ctx
}

func (*network) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// line is a connection of a network.
type line struct {
	net.Conn
	loses atomic.Int32
}

func (l *line) Write(p []byte) (int, error) {
	if what := loss(l.loses.Load()); what == question || what == connection {
		return len(p), nil
	}
	return l.Conn.Write(p)
}

func (l *line) Read(p []byte) (int, error) {
	if loss(l.loses.Load()) == question {
		_ = l.Close()
		return 0, io.ErrUnexpectedEOF
	}
	n, err := l.Conn.Read(p)
	// The answer to a statement begins with BindComplete, that to a simple query with CommandComplete, and all of it is sent when the
	// server has committed; before that comes the answer to its preparation, if it is.
	if loss(l.loses.Load()) == answer && n > 0 && (p[0] == '2' || p[0] == 'C') {
		_ = l.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// onNetwork is an Engine whose network can lose something.
func onNetwork(t *testing.T, config *taskgraph.Config) (*graph, *network) {
	t.Helper()
	n := &network{}
	schema := schemas.Borrow(t)
	pools, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	dial := pools.ConnConfig.DialFunc
	pools.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return &line{Conn: conn}, err
	}
	pools.ConnConfig.Tracer = n
	pool, err := pgxpool.NewWithConfig(t.Context(), pools)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: schema})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return onProvider(t, p, config), n
}
