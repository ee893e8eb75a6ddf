package measure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: what does a scenario play on? A stage is a schema that lives as long as the scenario; a
// node is a Provider on it with dispatchers.

// farewell bounds what a scenario does after its context has ended: to close and to clean up.
const farewell = 10 * time.Second

type stage struct{ url, schema string }

func newStage(url string) stage {
	return stage{url: url, schema: ownName()}
}

// ownName returns a new name for a schema or a database, with this process in it.
func ownName() string { return fmt.Sprintf("%s%08x", ownPrefix(), rand.Uint32()) }

func ownPrefix() string { return fmt.Sprintf("pgwake_measure_%x_", os.Getpid()) }

// drop removes whatever the scenario left in the database, and joins an error of its own to that of the
// scenario. It is for defer, after everything that uses the schema was closed.
func (s stage) drop(err *error) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	*err = errors.Join(*err, withConn(ctx, s.url, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{s.schema}.Sanitize()+" CASCADE")
		return err
	}))
}

// connect opens one connection. The URL may have settings for a pool.
func connect(ctx context.Context, url string) (*pgx.Conn, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, config.ConnConfig)
}

// connect opens a connection that finds the stage's schema without its name.
func (s stage) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := connect(ctx, s.url)
	if err != nil {
		return nil, err
	}
	if err := searchPath(ctx, conn, s.schema); err != nil {
		hangUp(conn)
		return nil, err
	}
	return conn, nil
}

// exec runs one statement in the stage's schema.
func (s stage) exec(ctx context.Context, sql string, args ...any) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	_, err = conn.Exec(ctx, sql, args...)
	return err
}

// calm has the server do before a measurement what it would do at some moment in it: vacuum what was filled, and write out
// what has gathered. Whom the one falls on would otherwise be chance.
func (s stage) calm(ctx context.Context) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	rows, err := conn.Query(ctx, `SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)`,
		pgx.Identifier{s.schema}.Sanitize())
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, table := range tables {
		if _, err := conn.Exec(ctx, `VACUUM (ANALYZE) `+pgx.Identifier{s.schema, table}.Sanitize()); err != nil {
			return err
		}
	}
	_, err = conn.Exec(ctx, `CHECKPOINT`)
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && refused.Code == "42501" {
		return nil // a role that may not: then it is chance
	}
	return err
}

func searchPath(ctx context.Context, conn *pgx.Conn, schema string) error {
	_, err := conn.Exec(ctx, "SELECT set_config('search_path', $1, false)", pgx.Identifier{schema}.Sanitize())
	return err
}

// withConn lends a connection.
func withConn(ctx context.Context, url string, use func(*pgx.Conn) error) error {
	conn, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	return use(conn)
}

func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	_ = conn.Close(ctx)
}

// withSetting returns the database URL, or keyword/value string, with one more setting.
func withSetting(databaseURL, key, value string) (string, error) {
	if !strings.HasPrefix(databaseURL, "postgres://") && !strings.HasPrefix(databaseURL, "postgresql://") {
		escaped := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value)
		return databaseURL + " " + key + "='" + escaped + "'", nil // the last one counts
	}
	u, err := url.Parse(databaseURL)
	if err != nil {
		return "", errors.New("the database URL cannot be parsed") // url.Parse would quote the password
	}
	query := u.Query()
	query.Set(key, value)                                       // the query counts more than the path
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // pgx, like libpq, takes a plus for itself
	return u.String(), nil
}

// withPool returns the database URL with a limit for a pool, unless it has one.
func withPool(url string, connections int) (string, error) {
	if strings.Contains(url, "pool_max_conns") {
		return url, nil
	}
	return withSetting(url, "pool_max_conns", strconv.Itoa(connections))
}

// connectionsFor so many dispatchers: all may query at a time, up to a limit.
func connectionsFor(dispatchers int) int { return max(4, min(dispatchers+1, 16)) }

// node is a Provider with dispatchers.
type node struct {
	*pgwake.Provider
	group *errgroup.Group
	ctx   context.Context // ends with the scenario, or when a dispatcher fails
}

// open starts a Provider that has enough connections for so many dispatchers to query at a time.
func (s stage) open(ctx context.Context, dispatchers int) (*node, error) {
	return s.openWith(ctx, dispatchers, pgwake.Config{})
}

func (s stage) openWith(ctx context.Context, dispatchers int, config pgwake.Config) (*node, error) {
	return s.openPooled(ctx, connectionsFor(dispatchers), config)
}

// openPooled opens a Provider with so many connections.
func (s stage) openPooled(ctx context.Context, connections int, config pgwake.Config) (*node, error) {
	url, err := withPool(s.url, connections)
	if err != nil {
		return nil, err
	}
	config.Schema = s.schema
	p, err := pgwake.Open(ctx, url, &config)
	if err != nil {
		return nil, err
	}
	n := &node{Provider: p}
	n.group, n.ctx = errgroup.WithContext(ctx)
	return n, nil
}

// close ends the dispatchers and the Provider. The error is that of the first dispatcher that failed; it is
// joined to that of the scenario, for defer.
func (n *node) close(err *error) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	closed := n.Provider.Close(ctx)
	*err = errors.Join(*err, n.group.Wait(), closed)
}

// dispatch starts dispatchers that fetch one item at a time, hand it to the handler, and acknowledge it.
func (n *node) dispatch(dispatchers int, o *pgwake.FetchOptions, handle func(*pgwake.ClaimedWorkItem, time.Time) error) {
	for range dispatchers {
		n.loop(func() error {
			item, err := n.FetchWorkItem(n.ctx, o)
			inHand := time.Now()
			if err != nil {
				return err
			}
			if err := handle(item, inHand); err != nil {
				return err
			}
			return n.AckWorkItem(n.ctx, item.LockToken, nil)
		})
	}
}

// loop repeats turn until the node closes or turn fails. That there was no work is no failure.
func (n *node) loop(turn func() error) {
	n.group.Go(func() error {
		for {
			err := turn()
			switch {
			case n.ctx.Err() != nil || errors.Is(err, pgwake.ErrClosed):
				return nil
			case err != nil && !errors.Is(err, pgwake.ErrNoWork):
				return err
			}
		}
	})
}

// parked waits until so many dispatchers wait for work. Looking costs the database nothing.
func (n *node) parked(dispatchers int) error {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for n.Stats().Worker.Parked < dispatchers {
		select {
		case <-look.C:
		case <-n.ctx.Done():
			return context.Cause(n.ctx)
		}
	}
	return nil
}

// fill enqueues items, numbered from first, in one transaction.
func (n *node) fill(ctx context.Context, first, count int) error {
	items := make([]pgwake.WorkEnqueue, count)
	for i := range items {
		items[i].WorkItem = pgwake.WorkItem{Name: "measure", Input: number(first + i)}
	}
	_, err := n.EnqueueForWorkerMany(ctx, items)
	return err
}

func tokensOf(items []*pgwake.ClaimedWorkItem) []pgwake.LockToken {
	tokens := make([]pgwake.LockToken, len(items))
	for i, item := range items {
		tokens[i] = item.LockToken
	}
	return tokens
}
