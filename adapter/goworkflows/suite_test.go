package goworkflows_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/backend/test"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/assert"
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

// suite has the tests of a suite each find the same schema empty, which takes a tenth of the time that a schema for each does. All that
// they do they do as the worker of docs/security.md.
type suite struct {
	t      *testing.T
	keeper *lab
	role   string
}

func newSuite(t *testing.T) *suite {
	t.Helper()
	l := newLab(t, nil)
	return &suite{t, l, l.role(testroles.Worker)}
}

// setup makes a backend. As in the runtime's own runs, instances are sticky to nobody: what one worker has begun another one may go on with at once.
func (s *suite) setup(options ...backend.BackendOption) test.TestBackend {
	l := s.keeper.as(s.role, pgwake.ModeHybrid, options...)
	// The suites give a fetch 100 ms, and the first one on a connection has the server plan its functions. There may be two.
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			_, err := l.p.FetchWorkItem(s.t.Context(), &pgwake.FetchOptions{NoWait: true})
			assert.ErrorIs(s.t, err, pgwake.ErrNoWork)
		})
	}
	both.Wait()
	return &underTest{l.Backend, l.p}
}

func (s *suite) teardown(b test.TestBackend) {
	ctx := context.WithoutCancel(s.t.Context())
	require.NoError(s.t, b.Close())
	require.NoError(s.t, b.(*underTest).p.Close(ctx))
	_, err := s.keeper.p.Pool().Exec(ctx, strings.ReplaceAll(`DELETE FROM {}instances; DELETE FROM {}gowf_instances; DELETE FROM {}orchestrator_queue;
		DELETE FROM {}worker_queue; DELETE FROM {}history; DELETE FROM {}instance_locks`, "{}", pgx.Identifier{s.keeper.p.Schema()}.Sanitize()+"."))
	require.NoError(s.t, err)
}

func TestBackend_SuiteOfTheRuntime_Passes(t *testing.T) {
	s := newSuite(t)
	test.BackendTest(t, s.setup, s.teardown)
}

func TestEndToEnd_SuiteOfTheRuntime_Passes(t *testing.T) {
	s := newSuite(t)
	test.EndToEndBackendTest(t, s.setup, s.teardown)
}
