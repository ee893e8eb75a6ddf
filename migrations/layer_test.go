package migrations_test

import (
	"context"
	"io/fs"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: do migrations of others stand on those of the Provider, and fall before them?

const notesTable = `-- +goose Up
CREATE TABLE notes (item bigint PRIMARY KEY, note text);
-- +goose StatementBegin
CREATE FUNCTION require_no_notes() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM notes) THEN
        RAISE EXCEPTION 'there are notes' USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
-- +goose Down
SELECT require_no_notes();
DROP FUNCTION require_no_notes;
DROP TABLE notes;
`

const noteFunction = `-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION enqueue_noted(p_name text, p_note text) RETURNS void
LANGUAGE sql
SET search_path FROM CURRENT
AS $$ INSERT INTO notes SELECT enqueue_work(p_name), p_note $$;
-- +goose StatementEnd
-- +goose Down
LOCK TABLE notes IN ACCESS EXCLUSIVE MODE;
SELECT require_no_notes();
DROP FUNCTION enqueue_noted;
`

// notes is a layer that annotates work items.
func notes(files ...string) migrations.Layer {
	of := fstest.MapFS{"README.md": {Data: []byte("no migration")}}
	for i, text := range files {
		of["0000"+string(rune('1'+i))+"_notes.sql"] = &fstest.MapFile{Data: []byte(text)}
	}
	return migrations.Layer{Files: of, Table: "notes_migrations", Empty: "require_no_notes"}
}

func layerVersion(t *testing.T, s *schema, l migrations.Layer) (current, latest int64) {
	t.Helper()
	current, latest, err := l.Version(t.Context(), s.conn, s.name)
	require.NoError(t, err)
	return current, latest
}

func TestLayer_Up_AppliesWhatTheSchemaLacks_AndChangesNothingAgain(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `Layered "schema", 'of' notes`)
	s.up(t)
	first, both := notes(notesTable), notes(notesTable, noteFunction)
	require.NoError(t, first.Up(t.Context(), s.config, s.name))
	current, latest := layerVersion(t, s, both)
	require.Equal(t, []int64{1, 2}, []int64{current, latest})

	require.NoError(t, both.Up(t.Context(), s.config, s.name))
	s.exec(t, `SELECT enqueue_noted('x', 'of the layer')`)
	before, rows := s.objects(t), s.list(t, `SELECT note FROM notes`)
	require.NoError(t, both.Up(t.Context(), s.config, s.name))
	require.NoError(t, first.Up(t.Context(), s.config, s.name), "an older program")
	s.up(t)
	require.Equal(t, before, s.objects(t))
	require.Equal(t, rows, s.list(t, `SELECT note FROM notes`))
	current, latest = layerVersion(t, s, both)
	require.Equal(t, []int64{2, 2}, []int64{current, latest})
	current, latest = s.version(t)
	require.Equal(t, latest, current, "that of the Provider is another")
}

func TestLayer_UpTwentyAtOnceWithTheProvidersMigrations_AllSucceedOrSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	l := notes(notesTable, noteFunction)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if err := migrations.Up(t.Context(), s.config.Copy(), s.name); err != nil {
				t.Error(err)
			}
			if err := l.Up(t.Context(), s.config.Copy(), s.name); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	current, latest := layerVersion(t, s, l)
	require.Equal(t, latest, current)
	require.Equal(t, []string{"1", "2"}, s.list(t, `SELECT version_id::text FROM notes_migrations WHERE version_id > 0 ORDER BY 1`))
	s.exec(t, `SELECT enqueue_noted('x', 'y')`)
}

func TestLayer_ProviderIsNotMigrated_UpIsRefusedAndLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	l := notes(notesTable)
	require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrNotMigrated)
	require.Equal(t, []string{"false"}, s.list(t, `SELECT (to_regnamespace($1) IS NOT NULL)::text`, s.name))
	require.NoError(t, l.Down(t.Context(), s.config, s.name), "there is nothing")

	s.exec(t, `CREATE SCHEMA `+pgx.Identifier{s.name}.Sanitize())
	require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrNotMigrated)
	require.NoError(t, l.Down(t.Context(), s.config, s.name))
	require.Empty(t, s.objects(t))

	s.up(t)
	s.exec(t, `DELETE FROM schema_migrations WHERE version_id = (SELECT max(version_id) FROM schema_migrations)`)
	require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrNotMigrated, "half of them is not enough")
	s.exec(t, `COMMENT ON TABLE schema_migrations IS 'of another time'`)
	require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrForeign)
	require.Equal(t, []string{"false"}, s.list(t, `SELECT (to_regclass('notes_migrations') IS NOT NULL)::text`))
	current, latest := layerVersion(t, s, l)
	require.Equal(t, []int64{0, 1}, []int64{current, latest})
}

func TestLayer_Down_IsRefusedWhileRowsWouldBeLost_AndThenLeavesTheProviders(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	bare := s.objects(t)
	l := notes(notesTable, noteFunction)
	require.NoError(t, l.Up(t.Context(), s.config, s.name))
	layered := s.objects(t)
	s.exec(t, `SELECT enqueue_noted('x', 'y')`)
	require.Equal(t, "PW006", stateOf(l.Down(t.Context(), s.config, s.name)))
	require.Equal(t, layered, s.objects(t))
	s.exec(t, `DELETE FROM notes`)
	for range 2 {
		require.NoError(t, l.Down(t.Context(), s.config, s.name), "and again")
		require.Equal(t, []string{"x"}, s.list(t, `SELECT name FROM worker_queue`))
		current, _ := layerVersion(t, s, l)
		require.Zero(t, current)
	}
	require.Subset(t, layered, s.objects(t))
	for _, object := range s.objects(t) {
		if !slices.Contains(bare, object) {
			require.Contains(t, object, "notes_migrations", "what is left is its table, with what belongs to that")
		}
	}
	require.NoError(t, l.Up(t.Context(), s.config, s.name))
	require.Equal(t, layered, s.objects(t))
}

// The functions of a layer call those of the Provider.
func TestDown_ALayerIsThere_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "Down below")
	s.up(t)
	s.exec(t, `CREATE TABLE remarks (note text); COMMENT ON TABLE remarks IS 'layer, of somebody else'`)
	l := notes(notesTable, noteFunction)
	require.NoError(t, notes(notesTable).Up(t.Context(), s.config, s.name))
	before := s.objects(t)
	err := migrations.Down(t.Context(), s.config, s.name)
	require.Equal(t, "PW006", stateOf(err))
	require.ErrorContains(t, err, "notes_migrations")
	require.Equal(t, before, s.objects(t))
	s.exec(t, `SELECT enqueue_work('x')`)
	s.exec(t, `DELETE FROM worker_queue`)

	require.NoError(t, l.Up(t.Context(), s.config, s.name))
	require.NoError(t, l.Down(t.Context(), s.config, s.name))
	require.NoError(t, migrations.Down(t.Context(), s.config, s.name))
	require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrNotMigrated)
	s.up(t)
	require.NoError(t, l.Up(t.Context(), s.config, s.name))
	s.exec(t, `SELECT enqueue_noted('x', 'y')`)
}

func TestLayer_MadeByOthers_IsRefusedUnchanged(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	require.NoError(t, notes(notesTable).Up(t.Context(), s.config, s.name))
	before := s.objects(t)
	other := notes(noteFunction, notesTable)
	require.ErrorIs(t, other.Up(t.Context(), s.config, s.name), migrations.ErrForeign)
	_, _, err := other.Version(t.Context(), s.conn, s.name)
	require.ErrorIs(t, err, migrations.ErrForeign)
	require.Equal(t, before, s.objects(t))
}

func TestLayer_ThatCannotBe_IsRefused(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	good := notes(notesTable)
	gap := maps.Clone(good.Files.(fstest.MapFS))
	gap["00003_gap.sql"] = gap["00001_notes.sql"]
	for name, l := range map[string]migrations.Layer{
		"nothing":              {},
		"no files":             {Table: good.Table, Empty: good.Empty},
		"an empty directory":   {Files: fstest.MapFS{}, Table: good.Table, Empty: good.Empty},
		"the Provider's table": {Files: good.Files, Table: "schema_migrations", Empty: good.Empty},
		"a table with a dot":   {Files: good.Files, Table: "public.notes", Empty: good.Empty},
		"no function":          {Files: good.Files, Table: good.Table},
		"a number is missing":  {Files: fs.FS(gap), Table: good.Table, Empty: good.Empty},
	} {
		require.ErrorIs(t, l.Up(t.Context(), s.config, s.name), migrations.ErrLayer, name)
		require.ErrorIs(t, l.Down(t.Context(), s.config, s.name), migrations.ErrLayer, name)
		_, _, err := l.Version(context.Background(), s.conn, s.name)
		require.ErrorIs(t, err, migrations.ErrLayer, name)
	}
}
