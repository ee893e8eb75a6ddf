package measure

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCounter_WithADatabaseOfItsOwn_CountsWhateverTheNodeSays(t *testing.T) {
	c := open(t, serverURL(t))
	requireExtension(t)
	assert.Equal(t, "pg_stat_statements, in a database of the node's own", c.How)
	assert.Equal(t, int64(3), counted(t, c, "SELECT 1", "SELECT 2", "SET application_name = 'x'"))
}

func TestCounter_RoleThatMayNotCreateDatabases_CountsByText(t *testing.T) {
	requireExtension(t)
	c := open(t, modestURL(t, true))
	assert.Equal(t, "pg_stat_statements, statements that contain ours", c.How)
	assert.Equal(t, int64(2), counted(t, c, "SELECT 1", "SET ours.a = 1", "SET ours.b = 2"))
}

func TestCounter_NoExtension_CountsTransactions(t *testing.T) {
	c := open(t, modestURL(t, false))
	assert.Contains(t, c.How, "pg_stat_database, all transactions in the database")
	calls, err := c.read(t.Context())
	require.NoError(t, err)
	assert.Contains(t, calls, "transactions")
}

func TestWithSetting_WorksOnBothFormsOfAURL(t *testing.T) {
	for _, url := range []string{"postgres://u:p@h:1/d?sslmode=disable", "user=u password=p host=h port=1 dbname=d sslmode=disable"} {
		with, err := withSetting(url, "dbname", `it's \ it`)
		require.NoError(t, err)
		config, err := pgx.ParseConfig(with)
		require.NoError(t, err)
		assert.Equal(t, `it's \ it`, config.Database)
		assert.Equal(t, "p", config.Password)
	}
	_, err := withSetting("postgres://u:secret@h:x/", "dbname", "d")
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "secret")
}

func open(t *testing.T, url string) *counter {
	t.Helper()
	c, err := newCounter(t.Context(), url, "ours")
	require.NoError(t, err)
	t.Cleanup(func() {
		var err error
		c.close(&err)
		assert.NoError(t, err)
	})
	return c
}

// counted runs statements where the node would, and one elsewhere, and returns how many the counter saw.
func counted(t *testing.T, c *counter, statements ...string) int64 {
	t.Helper()
	conn, err := connect(t.Context(), c.URL)
	require.NoError(t, err)
	defer hangUp(conn)
	before, err := c.read(t.Context())
	require.NoError(t, err)
	run(t, serverURL(t), "SET ours.elsewhere = 1")
	for _, sql := range statements {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	after, err := c.read(t.Context())
	require.NoError(t, err)
	return after.since(before).total()
}

// modestURL is that of a database in which the role may do next to nothing.
func modestURL(t *testing.T, extension bool) string {
	t.Helper()
	name := fmt.Sprintf("modest_%08x", rand.Uint32())
	run(t, serverURL(t), "CREATE DATABASE "+name)
	t.Cleanup(func() {
		run(t, serverURL(t), "DROP DATABASE "+name+" WITH (FORCE)")
		run(t, serverURL(t), "DROP ROLE "+name)
	})
	run(t, serverURL(t), "CREATE ROLE "+name+" LOGIN PASSWORD 'modest'")
	there, err := withSetting(serverURL(t), "dbname", name)
	require.NoError(t, err)
	if extension {
		run(t, there, "CREATE EXTENSION pg_stat_statements")
	}
	for key, value := range map[string]string{"user": name, "password": "modest"} {
		there, err = withSetting(there, key, value)
		require.NoError(t, err)
	}
	return there
}

func requireExtension(t *testing.T) {
	t.Helper()
	conn, err := connect(t.Context(), serverURL(t))
	require.NoError(t, err)
	defer hangUp(conn)
	var preloaded string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW shared_preload_libraries").Scan(&preloaded))
	if preloaded != "pg_stat_statements" {
		t.Skip("the server has not loaded pg_stat_statements")
	}
}
