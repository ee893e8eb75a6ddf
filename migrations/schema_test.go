package migrations_test

import (
	"strings"
	"testing"

	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: is a name that no schema can have refused, before the server makes another of it?

func TestSchema_NameThatNoneCanHave_IsRefusedEverywhere(t *testing.T) {
	t.Parallel()
	s := newSchema(t, strings.Repeat("x", 63))
	s.up(t)
	l := notes(notesTable)
	for _, name := range []string{"", strings.Repeat("x", 64), "a\x00b", "a\xffb", "pg_temp", "pg_catalog", "$user", "information_schema"} {
		_, _, versionErr := l.Version(t.Context(), s.conn, name)
		_, scriptErr := migrations.Script(name, 0)
		for _, err := range []error{migrations.CheckSchema(name), versionErr, scriptErr, l.Up(t.Context(), s.config, name), l.Down(t.Context(), s.config, name),
			migrations.Up(t.Context(), s.config, name), migrations.Down(t.Context(), s.config, name)} {
			require.ErrorIs(t, err, migrations.ErrSchema, "%q", name)
		}
	}
	current, latest := s.version(t)
	require.Equal(t, latest, current, "the one whose name it begins with")
}
