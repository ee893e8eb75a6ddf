package migrations_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: does the SQL for those who migrate by hand leave what Up leaves?

// script is what brings a schema from a version to the latest.
type script func(schema string, after int64) (string, error)

func (s *schema) run(t *testing.T, of script, after int64) error {
	t.Helper()
	sql, err := of(s.name, after)
	require.NoError(t, err)
	require.NotEmpty(t, sql)
	results, err := s.conn.PgConn().Exec(t.Context(), sql).ReadAll()
	if err != nil {
		_, rollback := s.conn.PgConn().Exec(t.Context(), "ROLLBACK").ReadAll()
		require.NoError(t, rollback)
		return err
	}
	require.NotEmpty(t, results)
	return nil
}

// made is all that a schema has, and its texts, without its name.
func (s *schema) made(t *testing.T) []string {
	t.Helper()
	all := s.list(t, `
		SELECT pg_get_functiondef(p.oid) || coalesce(obj_description(p.oid, 'pg_proc'), '') FROM pg_proc p WHERE p.pronamespace = to_regnamespace($1)
		UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = $1
		UNION ALL SELECT c.relname || ' ' || c.relkind::text || ' ' || c.relpersistence::text || coalesce(obj_description(c.oid, 'pg_class'), '') || coalesce(array_to_string(c.reloptions, ','), '')
		  FROM pg_class c WHERE c.relnamespace = to_regnamespace($1)
		UNION ALL SELECT table_name || ' ' || column_name || ' ' || data_type || is_nullable || coalesce(column_default, '') FROM information_schema.columns WHERE table_schema = $1
		UNION ALL SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace($1)
		UNION ALL SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = to_regnamespace($1) AND NOT t.tgisinternal`, s.name)
	for i, line := range all {
		all[i] = strings.ReplaceAll(line, s.name, "its schema")
	}
	slices.Sort(all)
	return all
}

func TestScript_FreshSchema_LeavesWhatUpLeaves(t *testing.T) {
	t.Parallel()
	byUp, byHand := newSchema(t, ""), newSchema(t, "")
	l := notes(notesTable, noteFunction)
	byUp.up(t)
	require.NoError(t, l.Up(t.Context(), byUp.config, byUp.name))
	require.NoError(t, byHand.run(t, migrations.Script, 0))
	require.NoError(t, byHand.run(t, l.Script, 0))
	want, got := byUp.made(t), byHand.made(t)
	require.Equal(t, want, got)

	current, latest := byHand.version(t)
	require.Equal(t, latest, current)
	byHand.up(t)
	require.NoError(t, l.Up(t.Context(), byHand.config, byHand.name))
	require.Equal(t, got, byHand.made(t), "Up finds nothing to do")
	byHand.exec(t, `SELECT enqueue_noted('x', 'y')`)
	byHand.exec(t, `DELETE FROM notes; DELETE FROM worker_queue`)
	require.NoError(t, l.Down(t.Context(), byHand.config, byHand.name))
	require.NoError(t, migrations.Down(t.Context(), byHand.config, byHand.name))
	require.NoError(t, byHand.run(t, migrations.Script, 0), "after Down, which leaves the table of versions")
}

func TestScript_NameThatNeedsQuoting_NothingLandsElsewhere(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `By "hand", 'and' $1 foot`)
	require.NoError(t, s.run(t, migrations.Script, 0))
	require.NoError(t, s.run(t, notes(notesTable).Script, 0))
	current, latest := s.version(t)
	require.Equal(t, latest, current)
	require.Equal(t, []string{"notes"}, s.list(t, `SELECT tablename::text FROM pg_tables WHERE schemaname = $1 AND tablename = 'notes'`, s.name))
}

func TestScript_SchemaIsBehind_BringsWhatItLacks(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	first, both := notes(notesTable), notes(notesTable, noteFunction)
	require.NoError(t, s.run(t, first.Script, 0))
	require.NoError(t, s.run(t, both.Script, 1))
	current, latest := layerVersion(t, s, both)
	require.Equal(t, []int64{2, 2}, []int64{current, latest})
	sql, err := both.Script(s.name, 2)
	require.NoError(t, err)
	require.Empty(t, sql, "there is nothing to do")
}

// A snapshot from before the turn would show the version of that time.
func TestScript_AnotherOneIsAtWork_SeesItsVersion(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	l := notes(notesTable, noteFunction)
	require.NoError(t, notes(notesTable).Up(t.Context(), s.config.Copy(), s.name))
	sql, err := l.Script(s.name, 1)
	require.NoError(t, err)
	first := s.connect(t)
	_, err = first.PgConn().Exec(t.Context(), strings.ReplaceAll(sql, "COMMIT;", "")).ReadAll()
	require.NoError(t, err)
	s.exec(t, `SET default_transaction_isolation = 'repeatable read'`)
	done := make(chan error, 1)
	go func() { done <- s.run(t, l.Script, 1) }()
	looks := s.connect(t)
	require.Eventually(t, func() bool {
		var waits bool
		require.NoError(t, looks.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)`, s.conn.PgConn().PID()).Scan(&waits))
		return waits
	}, time.Minute, 10*time.Millisecond)
	_, err = first.Exec(t.Context(), `COMMIT`)
	require.NoError(t, err)
	require.ErrorContains(t, <-done, "version")
}

func TestScript_SchemaIsAtAnotherVersion_ChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	l := notes(notesTable, noteFunction)
	require.Error(t, s.run(t, l.Script, 0), "the Provider's migrations are not there")
	s.up(t)
	before := s.made(t)
	require.ErrorContains(t, s.run(t, migrations.Script, 0), "are not at version 0")
	require.Error(t, s.run(t, l.Script, 1))
	require.Equal(t, before, s.made(t))
	s.exec(t, `DELETE FROM schema_migrations WHERE version_id = (SELECT max(version_id) FROM schema_migrations)`)
	require.ErrorContains(t, s.run(t, l.Script, 0), "schema_migrations are not at version")
	_, err := migrations.Script("x", -1)
	require.Error(t, err)
}
