package frozen_test

import (
	"errors"
	"io/fs"
	"os"
	"testing"
	"testing/fstest"

	"github.com/pgwake/pgwake/internal/frozen"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMigrations_ThatWereReleased_AreWhatTheyWere(t *testing.T) {
	checksums, err := os.ReadFile("CHECKSUMS")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("no migration is released yet: make freeze writes CHECKSUMS")
	}
	require.NoError(t, err)
	require.NoError(t, frozen.Check(os.DirFS("../.."), string(checksums)))
}

func TestCheck_FrozenMigrationChanges_OrAnotherComesBeforeIt_IsRefused(t *testing.T) {
	repository := fstest.MapFS{}
	put := func(name, text string) { repository[name] = &fstest.MapFile{Data: []byte(text)} }
	for _, set := range frozen.Sets {
		put(set+"/00001_tables.sql", "of "+set)
	}
	require.NoError(t, frozen.Check(repository, ""))
	checksums, err := frozen.Freeze(repository, "")
	require.NoError(t, err)
	require.NoError(t, frozen.Check(repository, checksums))
	put("migrations/00002_more.sql", "more")
	require.NoError(t, frozen.Check(repository, checksums), "it is not frozen yet")
	put("migrations/00002_more.sql", "more of it")
	both, err := frozen.Freeze(repository, checksums)
	require.NoError(t, err)

	put("migrations/00002_more.sql", "something else")
	require.NoError(t, frozen.Check(repository, checksums))
	err = frozen.Check(repository, both)
	require.ErrorIs(t, err, frozen.ErrChanged)
	require.ErrorContains(t, err, "migrations/00002_more.sql has changed: a released migration never changes: undo that, and add a new one")
	_, err = frozen.Freeze(repository, both)
	require.ErrorIs(t, err, frozen.ErrChanged)
	delete(repository, "migrations/00002_more.sql")
	require.ErrorContains(t, frozen.Check(repository, both), "is gone")
	put("eventbus/migrations/00000_before.sql", "")
	require.ErrorContains(t, frozen.Check(repository, checksums), "comes before eventbus/migrations/00001_tables.sql")
	require.Error(t, frozen.Check(repository, "x"))
	delete(repository, "taskgraph/migrations/00001_tables.sql")
	require.Error(t, frozen.Check(repository, ""), "a set is missing")
}
