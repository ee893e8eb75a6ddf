package goworkflows_test

import (
	"context"
	"testing"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/backend/test"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: do the runtime's own suites for every backend pass?

// underTest has what the suites want to see beyond a backend.
type underTest struct {
	*goworkflows.Backend
	p *pgwake.Provider
}

// GetFutureEvents returns the timers.
func (b *underTest) GetFutureEvents(ctx context.Context) ([]*history.Event, error) {
	rows, err := b.p.Pool().Query(ctx, `SELECT data FROM `+pgx.Identifier{b.p.Schema(), "orchestrator_queue"}.Sanitize()+`
		WHERE dedup_key IS NOT NULL AND visible_at > clock_timestamp() ORDER BY visible_at`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*history.Event, error) {
		e := &history.Event{}
		return e, row.Scan(e)
	})
}

// suite has the tests of a suite each find the same schema empty.
type suite struct {
	t      *testing.T
	schema string
}

func newSuite(t *testing.T) *suite {
	t.Helper()
	l := newLab(t, nil)
	return &suite{t, l.p.Schema()}
}

// setup makes a backend. As in the runtime's own runs, instances are sticky to nobody: what one worker has begun another one may go on with at once.
func (s *suite) setup(options ...backend.BackendOption) test.TestBackend {
	p := pgwaketest.Open(s.t, &pgwake.Config{Schema: s.schema})
	b, err := goworkflows.New(s.t.Context(), p, append(options, backend.WithStickyTimeout(0), backend.WithLogger(silent))...)
	require.NoError(s.t, err)
	return &underTest{b, p}
}

func (s *suite) teardown(b test.TestBackend) {
	require.NoError(s.t, b.Close())
	p := b.(*underTest).p
	ctx := context.WithoutCancel(s.t.Context())
	_, err := p.Pool().Exec(ctx, `DO $$ BEGIN EXECUTE (SELECT 'TRUNCATE ' || string_agg(format('%I.%I', schemaname, tablename), ', ') FROM pg_tables
		WHERE schemaname = '`+s.schema+`' AND tablename <> 'namespaces' AND tablename NOT LIKE '%migrations'); END $$`)
	require.NoError(s.t, err)
	require.NoError(s.t, p.Close(ctx))
}

func TestBackend_SuiteOfTheRuntime_Passes(t *testing.T) {
	s := newSuite(t)
	test.BackendTest(t, s.setup, s.teardown)
}

func TestEndToEnd_SuiteOfTheRuntime_Passes(t *testing.T) {
	s := newSuite(t)
	test.EndToEndBackendTest(t, s.setup, s.teardown)
}
