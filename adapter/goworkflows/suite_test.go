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

// setup makes each test of a suite a backend on a schema of its own. As in the runtime's own runs, instances are sticky to nobody: each worker of the
// suites that is done would have the next wait.
func setup(t *testing.T) func(options ...backend.BackendOption) test.TestBackend {
	return func(options ...backend.BackendOption) test.TestBackend {
		p := pgwaketest.New(t, nil)
		b, err := goworkflows.New(t.Context(), p, append(options, backend.WithStickyTimeout(0), backend.WithLogger(silent))...)
		require.NoError(t, err)
		return &underTest{b, p}
	}
}

func teardown(t *testing.T) func(b test.TestBackend) {
	return func(b test.TestBackend) {
		require.NoError(t, b.Close())
		require.NoError(t, b.(*underTest).p.Close(context.WithoutCancel(t.Context())))
	}
}

func TestBackend_SuiteOfTheRuntime_Passes(t *testing.T) {
	test.BackendTest(t, setup(t), teardown(t))
}

func TestEndToEnd_SuiteOfTheRuntime_Passes(t *testing.T) {
	test.EndToEndBackendTest(t, setup(t), teardown(t))
}
