package measure

import (
	"context"
	_ "embed"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how many statements did the server see from a node?
//
// pg_stat_statements counts calls by database, role and text. So the node under observation gets a database
// of its own, and every call counted there is the node's, but for the counter's own queries, which are left
// out by their text. Where the role may not create databases, only statements with a given text in them are
// counted, such as the name of the node's schema, which nearly all of its statements have. Without the
// extension the transactions of the database are counted.

var (
	//go:embed count_calls.sql
	countCallsSQL string
	//go:embed extension_schema.sql
	extensionSchemaSQL string
	//go:embed count_transactions.sql
	countTransactionsSQL string
)

// counter counts statements that the server ran.
type counter struct {
	URL string // where the node under observation is to work
	How string // how statements are counted, for people

	conn     *pgx.Conn
	admin    *pgx.Conn // nil: no database was made
	database string    // that was made
	sql      string
	args     []any
}

// calls is how often each statement was run.
type calls map[string]int64

func (c calls) total() (n int64) {
	for _, count := range c {
		n += count
	}
	return n
}

// since returns the calls that were added.
func (c calls) since(before calls) calls {
	added := calls{}
	for text, count := range c {
		if count > before[text] {
			added[text] = count - before[text]
		}
	}
	return added
}

// newCounter finds the best way to count that the server and the role allow. mark is a text that the
// statements of interest contain.
func newCounter(ctx context.Context, url, mark string) (_ *counter, err error) {
	conn, err := connect(ctx, url)
	if err != nil {
		return nil, err
	}
	c := &counter{URL: url, conn: conn}
	defer func() {
		if err != nil {
			c.close(&err)
		}
	}()
	err = c.moveOut(ctx, url)
	if ctx.Err() != nil {
		return nil, err
	}
	if err := c.countCalls(ctx, mark); err == nil {
		return c, nil
	} else if ctx.Err() != nil {
		return nil, err
	}
	if err := c.countTransactions(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// moveOut makes a database for the node, and connects to it.
func (c *counter) moveOut(ctx context.Context, url string) error {
	database := ownName()
	if _, err := c.conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{database}.Sanitize()); err != nil {
		return err
	}
	there, err := withSetting(url, "dbname", database)
	if err != nil {
		return errors.Join(err, dropDatabase(c.conn, database))
	}
	conn, err := connect(ctx, there)
	if err != nil {
		return errors.Join(err, dropDatabase(c.conn, database))
	}
	c.admin, c.conn, c.URL, c.database = c.conn, conn, there, database
	return nil
}

func dropDatabase(admin *pgx.Conn, database string) error {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	_, err := admin.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{database}.Sanitize()+" WITH (FORCE)")
	return err
}

// countCalls sets up counting by pg_stat_statements.
func (c *counter) countCalls(ctx context.Context, mark string) error {
	if _, err := c.conn.Exec(ctx, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements"); err != nil {
		return err
	}
	var in string
	if err := c.conn.QueryRow(ctx, extensionSchemaSQL).Scan(&in); err != nil {
		return err
	}
	if err := searchPath(ctx, c.conn, in); err != nil {
		return err
	}
	c.sql = countCallsSQL
	if c.admin != nil {
		c.How = "pg_stat_statements, in a database of the node's own"
		c.args = []any{""}
	} else {
		c.How = "pg_stat_statements, statements that contain " + mark
		c.args = []any{mark}
	}
	_, err := c.read(ctx)
	return err
}

// countTransactions sets up counting by pg_stat_database.
func (c *counter) countTransactions(ctx context.Context) error {
	c.sql = countTransactionsSQL
	if c.admin != nil {
		c.How = "pg_stat_database, transactions in a database of the node's own"
		c.args = []any{c.database}
		hangUp(c.conn) // or its own transactions would count
		c.conn = c.admin
	} else {
		c.How = "pg_stat_database, all transactions in the database"
		c.args = []any{c.conn.Config().Database}
	}
	c.How += ", some seconds behind, since pg_stat_statements is not to be had"
	_, err := c.read(ctx)
	return err
}

// read returns the counts so far.
func (c *counter) read(ctx context.Context) (calls, error) {
	rows, err := c.conn.Query(ctx, c.sql, c.args...)
	if err != nil {
		return nil, err
	}
	counts := calls{}
	var text string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&text, &n}, func() error {
		counts[text] += n
		return nil
	})
	return counts, err
}

// close hangs up, and drops the database that was made.
func (c *counter) close(err *error) {
	if c.admin != nil {
		if c.conn != c.admin {
			hangUp(c.conn)
		}
		*err = errors.Join(*err, dropDatabase(c.admin, c.database))
		c.conn = c.admin
	}
	hangUp(c.conn)
}

// Counter counts the statements of whoever works in a database of its own, for packages that measure something else.
type Counter struct {
	URL string // of the database
	c   *counter
}

// NewCounter makes the database. It fails if the role may not.
func NewCounter(ctx context.Context, url string) (_ *Counter, err error) {
	c, err := newCounter(ctx, url, "")
	if err != nil {
		return nil, err
	}
	if c.database == "" {
		err = errors.New("the role may not create a database")
		c.close(&err)
		return nil, err
	}
	return &Counter{c.URL, c}, nil
}

// Idle counts them for a while, once it has become quiet: or else after a few seconds.
func (c *Counter) Idle(ctx context.Context, of time.Duration) (statements int64, took time.Duration, err error) {
	before, err := c.c.settle(ctx, quietSpell)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := pause(ctx, of); err != nil {
		return 0, 0, err
	}
	after, err := c.c.read(ctx)
	return after.since(before).total(), time.Since(began), err
}

// Close drops the database, and joins an error of its own to that of the caller.
func (c *Counter) Close(err *error) { c.c.close(err) }
