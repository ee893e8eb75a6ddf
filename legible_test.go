package pgwake_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what if a role has another style of dates, or another encoding?

// asText are the modes in which instants come as text.
var asText = []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}

// settled creates a role whose sessions have these settings, with a schema of its own, and returns the test server's settings for it.
func settled(t *testing.T, settings ...string) (config *pgxpool.Config, schema string) {
	t.Helper()
	schema = testdb.Schema(t)
	name := fmt.Sprintf("role_%d_of_%s", roles.Add(1), schema)
	admin := testdb.URL(t)
	testdb.Exec(t, admin, fmt.Sprintf("CREATE ROLE %[1]s LOGIN PASSWORD 'secret'; CREATE SCHEMA %[2]s AUTHORIZATION %[1]s", name, pgx.Identifier{schema}.Sanitize()))
	t.Cleanup(func() { testdb.Exec(t, admin, fmt.Sprintf("DROP OWNED BY %[1]s CASCADE; DROP ROLE %[1]s", name)) })
	for _, setting := range settings {
		testdb.Exec(t, admin, "ALTER ROLE "+name+" SET "+setting)
	}
	config, err := pgxpool.ParseConfig(admin)
	require.NoError(t, err)
	config.ConnConfig.User, config.ConnConfig.Password = name, "secret"
	return config, schema
}

// newOn is New on a pool of that configuration. What it returns ends with the test.
func newOn(t *testing.T, config *pgxpool.Config, c pgwake.Config) (*pgwake.Provider, error) {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c.Logger = silent
	p, err := pgwake.New(t.Context(), pool, &c)
	if err == nil {
		t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	}
	return p, err
}

func TestNew_RoleHasItsOwnStyleOfDatesAndEncoding_EverythingWorks(t *testing.T) {
	t.Parallel()
	for _, mode := range asText {
		for _, style := range []string{"German", "SQL, DMY", "Postgres, MDY"} {
			t.Run(fmt.Sprint(mode, " ", style), func(t *testing.T) {
				t.Parallel()
				config, schema := settled(t, "datestyle = '"+style+"'", "client_encoding = 'LATIN1'")
				config.ConnConfig.DefaultQueryExecMode = mode
				pgwake.TunePool(config)
				p, err := newOn(t, config, pgwake.Config{Schema: schema}) // which migrates
				require.NoError(t, err)
				require.True(t, p.Health().OK, "%v", p.Health().Problems)
				require.True(t, p.Stats().Listening)

				const text = "größer ✉ 漢"
				due := time.Date(2099, 4, 3, 2, 1, 0, 0, time.UTC)
				id, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: text, Input: []byte(`"` + text + `"`)}, nil)
				require.NoError(t, err)
				_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "later"}, &pgwake.EnqueueOptions{At: due})
				require.NoError(t, err)
				queued, err := p.Peek(t.Context(), pgwake.Worker, &pgwake.PeekFilter{PayloadBytes: 100})
				require.NoError(t, err)
				require.Len(t, queued, 2)
				for _, item := range queued {
					require.Less(t, time.Since(item.EnqueuedAt).Abs(), time.Hour)
					if item.ID != id.ID {
						require.True(t, item.DueAt.Equal(due), "%v", item.DueAt)
					}
				}
				item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience})
				require.NoError(t, err)
				require.Equal(t, text, item.Name)
				require.Equal(t, `"`+text+`"`, string(item.Input))
				until, err := p.RenewWorkItemLock(t.Context(), item.LockToken, time.Hour)
				require.NoError(t, err)
				require.InDelta(t, time.Hour, time.Until(until), float64(10*time.Minute))
				require.NoError(t, p.AckWorkItem(t.Context(), item.LockToken, &pgwake.Message{Instance: text, Kind: "done"}))
				turn, err := p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience})
				require.NoError(t, err)
				require.Equal(t, text, turn.Instance)
				require.NoError(t, p.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{
					Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusRunning}, History: []pgwake.Event{{ID: 1, Type: text}}}))
				nodes, err := p.ListNodes(t.Context())
				require.NoError(t, err)
				require.Len(t, nodes, 1)

				// What others read: of an encoding that nobody converts it would be something else.
				var there string
				require.NoError(t, p.Pool().QueryRow(t.Context(), `SELECT encode(convert_to(type, 'UTF8'), 'escape') FROM `+pgx.Identifier{schema, "history"}.Sanitize()).Scan(&there))
				require.Contains(t, there, `gr\303\266\303\237er`)

				// The order of day and month stays the role's.
				require.NoError(t, p.Pool().QueryRow(t.Context(), `SELECT current_setting('datestyle')`).Scan(&there))
				want := "ISO, DMY"
				if strings.HasSuffix(style, "MDY") {
					want = "ISO, MDY"
				}
				require.Equal(t, want, there)
			})
		}
	}
}

func TestOpen_RoleHasItsOwnStyleOfDates_Works(t *testing.T) {
	t.Parallel()
	config, schema := settled(t, "datestyle = 'German'", "client_encoding = 'LATIN1'")
	c := config.ConnConfig
	p, err := pgwake.Open(t.Context(), fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=%s sslmode=disable default_query_exec_mode=exec", c.Host, c.Port, c.User, c.Password, c.Database),
		&pgwake.Config{Schema: schema, Logger: silent})
	require.NoError(t, err)
	defer p.Close(context.Background())
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "✉"}, nil)
	require.NoError(t, err)
	item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience})
	require.NoError(t, err)
	require.Equal(t, "✉", item.Name)
}

// What somebody has named is left as it is, and so is a pool that was not tuned: then it is said what cannot be read.
func TestNew_SessionsOfThePoolCannotBeRead_ErrConfigSaysWhat(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		role   []string
		change func(*pgxpool.Config)
		says   string // "": it works
	}{
		"style, not tuned":         {[]string{"datestyle = 'German'"}, func(*pgxpool.Config) {}, `DateStyle is "German, DMY"`},
		"style, not tuned, binary": {[]string{"datestyle = 'German'"}, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe }, ""},
		"encoding, not tuned":      {[]string{"client_encoding = 'LATIN1'"}, func(*pgxpool.Config) {}, "client_encoding is LATIN1"},
		"style that was named": {nil, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["DateStyle"] = "SQL, DMY"
			pgwake.TunePool(c)
		}, `DateStyle is "SQL, DMY"`},
		"style that was named in options": {nil, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["options"] = "-c DateStyle=German"
			pgwake.TunePool(c)
		}, `DateStyle is "German, DMY"`},
		"encoding that was named": {nil, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["client_encoding"] = "LATIN1"
			pgwake.TunePool(c)
		}, "client_encoding is LATIN1"},
		"style of a hook": {nil, func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "SET datestyle = 'German'")
				return err
			}
			pgwake.TunePool(c)
		}, `DateStyle is "German, DMY"`},
		"encoding, not tuned, simple_protocol": {[]string{"client_encoding = 'LATIN1'"}, func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		}, "client_encoding is LATIN1"},
		"encoding that nobody converts": {[]string{"client_encoding = 'SQL_ASCII'"}, func(*pgxpool.Config) {}, ""},
		"encoding that nobody converts, simple_protocol": {[]string{"client_encoding = 'SQL_ASCII'"}, func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
			pgwake.TunePool(c)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config, schema := settled(t, c.role...)
			config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
			c.change(config)
			p, err := newOn(t, config, pgwake.Config{Schema: schema})
			if c.says != "" {
				require.False(t, requireError(t, err, pgwake.ErrConfig).Retryable)
				require.ErrorContains(t, err, c.says)
				return
			}
			require.NoError(t, err)
			require.True(t, p.Stats().Listening, "%v", p.Health().Problems)
			_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "✉"}, nil)
			require.NoError(t, err)
			item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience})
			require.NoError(t, err)
			require.Equal(t, "✉", item.Name)
		})
	}
}

// The LISTEN connection is the Provider's own, and so it reads whatever anybody has named.
func TestNew_ListenConfigNamesAStyleOfDates_Listens(t *testing.T) {
	t.Parallel()
	config, schema := settled(t)
	listen := config.ConnConfig.Copy()
	listen.RuntimeParams["datestyle"], listen.RuntimeParams["client_encoding"] = "German", "LATIN1"
	listen.DefaultQueryExecMode = pgx.QueryExecModeExec
	p, err := newOn(t, config, pgwake.Config{Schema: schema, ListenConfig: listen}) // and migrates by it
	require.NoError(t, err)
	require.True(t, p.Stats().Listening, "%v", p.Health().Problems)
	atFirst(p.NodeReports(t.Context(), patience), func(err error) { require.NoError(t, err) })
}
