package eventbus_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: do those who go by the bytes of keys and those who ask the database agree, whatever its collation?

// newLabOfWords is newLab in a database that orders texts as people do: a is before B.
func newLabOfWords(t *testing.T) *lab {
	t.Helper()
	l := newLabInDatabase(t, "words", `ENCODING 'UTF8' LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'en-US'`, `ENCODING 'UTF8' LOCALE 'en_US.utf8'`)
	require.True(t, one[bool](l, `SELECT 'a' < 'B'`))
	return l
}

// newLabInDatabase is newLab in a database of its own, with the first options that the server has.
func newLabInDatabase(t *testing.T, word string, options ...string) *lab {
	t.Helper()
	admin, err := pgx.Connect(t.Context(), testdb.URL(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, admin.Close(context.Background())) }()
	name := strings.Replace(testdb.Schema(t), "test_", "test_"+word+"_", 1)
	for _, option := range options {
		if _, err = admin.Exec(t.Context(), `CREATE DATABASE `+name+` TEMPLATE template0 `+option); err == nil {
			break
		}
	}
	if err != nil {
		t.Skipf("the server makes no such database: %v", err)
	}
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+name+` WITH (FORCE)`) })
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.ConnConfig.Database = name
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return &lab{bus, t, p, session(t, p)}
}

// Whoever emits locks the keys in the order of their bytes, and so does a replay. Were it not so, the first would have B, for which the second waits,
// and wait for a, which that has.
func TestReplay_DatabaseOrdersKeysAsWords_NoDeadlockWithWhoeverEmits(t *testing.T) {
	t.Parallel()
	keys := []string{"B", "C", "a"}
	for name, replay := range map[string]func(*lab) (sql string){
		"delivers events of the log": func(l *lab) string {
			for _, key := range keys {
				l.emitKey("a", key)
			}
			return `SELECT deliver(ids, times, group_id) FROM event_groups, (SELECT array_agg(event_id) AS ids, array_agg(emitted_at) AS times FROM event_log) AS e`
		},
		"has those come that wait": func(l *lab) string {
			l.exec(`INSERT INTO event_keys (group_id, key) SELECT group_id, key FROM event_groups, unnest($1::text[]) AS k (key)`, keys)
			l.exec(`SELECT begin_replay(group_id, p_undelivered => true) FROM event_groups`)
			l.exec(`UPDATE event_replays SET horizon = '3'`) // below which there is nothing
			return `SELECT replay_some(replay_id) FROM event_replays`
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLabOfWords(t)
			l.subscribe("g", "a")
			sql := replay(l)
			held := l.holding(`SELECT FROM event_keys WHERE key = 'C' FOR UPDATE`)
			e := &emission{l, l.begin()}
			e.emit(keys...)
			committed := l.committing(e.tx) // it has B, and waits for C
			replays := l.run(sql)
			require.NoError(t, held.Rollback(l.within()))
			require.NoError(t, <-committed)
			replays.end(t)
		})
	}
}
