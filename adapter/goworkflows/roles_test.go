package goworkflows_test

import (
	"context"
	"testing"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/core"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/require"
)

// This file answers: are the rights of docs/security.md enough for each role, and no more than that? What workers do most of the time the suites of the
// runtime do as that role.

// role makes a role of the page.
func (l *lab) role(role string) string {
	l.t.Helper()
	return testroles.New(l.t, role, l.p.Schema(), "goworkflows")
}

// opened opens a Provider of a role, which does not migrate.
func (l *lab) opened(role string, mode pgwake.Mode) *pgwake.Provider {
	l.t.Helper()
	p, err := pgwake.Open(l.within(), testroles.URL(l.t, role), &pgwake.Config{Schema: l.p.Schema(), SkipMigrate: true, Mode: mode, Logger: silent})
	require.NoError(l.t, err)
	l.t.Cleanup(func() { require.NoError(l.t, p.Close(context.WithoutCancel(l.t.Context()))) })
	return p
}

// as is another process that works as a role.
func (l *lab) as(role string, mode pgwake.Mode, options ...backend.BackendOption) *lab {
	l.t.Helper()
	return labOn(l.t, l.opened(role, mode), options...)
}

func TestRights_AreWhatThePageSays(t *testing.T) {
	t.Parallel()
	testroles.RequireRights(t, newLab(t, nil).p.Schema(), "goworkflows")
}

func TestWorker_RemovesWhatCannotBegin_AndReleasesWhatIsStickyToIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	role := l.role(testroles.Worker)
	worker := l.as(role, pgwake.ModeHybrid, backend.WithStickyTimeout(time.Hour))
	instance := worker.create("w")
	l.bury()
	require.NoError(t, worker.RemoveWorkflowInstance(l.within(), instance))
	require.Zero(t, l.count("gowf_instances", "true"))
	worker.create("w")
	require.NoError(t, worker.complete(worker.workflowTask(), core.WorkflowInstanceStateActive))
	require.NoError(t, worker.Close())

	conn, in := testroles.Connect(t, role), pgx.Identifier{l.p.Schema()}.Sanitize()+"."
	for _, sql := range []string{`DELETE FROM ` + in + `gowf_migrations`, `UPDATE ` + in + `gowf_migrations SET is_applied = false`, `DROP TABLE ` + in + `gowf_instances`,
		`CREATE TRIGGER mine BEFORE INSERT ON ` + in + `gowf_instances FOR EACH ROW EXECUTE FUNCTION ` + in + `gowf_ended()`} {
		_, err := conn.Exec(l.within(), sql)
		require.ErrorContains(t, err, "SQLSTATE 42501", sql)
	}
}

func TestReader_SeesEverythingAndChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	instance, unopened := l.create("order-7"), l.create("order-8")
	_, err := l.p.Pool().Exec(l.within(), `DELETE FROM `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.orchestrator_queue WHERE instance_id LIKE 'order-8/%'`)
	require.NoError(t, err)
	reader := l.as(l.role(testroles.Reader), pgwake.ModeDisabled)
	for what, look := range map[string]func() error{
		"stats":     func() error { _, err := reader.GetStats(l.within()); return err },
		"instance":  func() error { _, err := reader.GetWorkflowInstance(l.within(), instance); return err },
		"instances": func() error { _, err := reader.GetWorkflowInstances(l.within(), "", "", 10); return err },
		"tree":      func() error { _, err := reader.GetWorkflowTree(l.within(), instance); return err },
		"state":     func() error { _, err := reader.GetWorkflowInstanceState(l.within(), instance); return err },
		"history":   func() error { _, err := reader.GetWorkflowInstanceHistory(l.within(), instance, nil); return err },
	} {
		require.NoError(t, look(), what)
	}
	for what, change := range map[string]func() error{
		"create": func() error {
			return reader.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("order-9", uuid.NewString()), started("w"))
		},
		"signal": func() error {
			return reader.SignalWorkflow(l.within(), "order-7", history.NewPendingEvent(time.Now(), history.EventType_SignalReceived, &history.SignalReceivedAttributes{Name: "s"}))
		},
		"cancel": func() error {
			return reader.CancelWorkflowInstance(l.within(), instance, history.NewWorkflowCancellationEvent(time.Now()))
		},
		"remove": func() error { return reader.RemoveWorkflowInstance(l.within(), unopened) },
	} {
		require.ErrorIs(t, change(), pgwake.ErrPermission, what)
	}
	require.Equal(t, 2, l.count("gowf_instances", "true"))
	require.Equal(t, 1, l.count("orchestrator_queue", "true"))
}

func TestNew_Producer_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	_, err := goworkflows.New(l.within(), l.opened(l.role(testroles.Producer), pgwake.ModeDisabled))
	require.ErrorIs(t, err, pgwake.ErrPermission)
	require.ErrorContains(t, err, "gowf_migrations")
}
