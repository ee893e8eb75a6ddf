package pgwake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/migrations"
)

// This file answers: how does a Provider begin and end, and how does each of its verbs?

// minServerVersion is the oldest server that pgwake supports, as server_version_num.
const minServerVersion = 140000

// Provider hands durable work from PostgreSQL to Go code. Make one per process and database with Open or
// New, share it among all goroutines, and Close it in the end. All methods are safe for concurrent use.
//
// Every verb is one round trip, unless the role's default isolation level is another than READ COMMITTED; then it
// brings a transaction of its own. A verb whose name ends in Tx joins the caller's transaction and takes
// effect when that commits; if it fails on the server, the transaction is aborted, as with any failed statement.
// A batch of which some leases were lost has not failed on the server.
//
// Let the transaction of a Tx verb be READ COMMITTED. In one that is REPEATABLE READ or SERIALIZABLE a verb does not see
// what was committed after the snapshot. Deletions are refused there with ErrInvalid. Whatever meets a row that has
// changed since, such as the release of a turn behind which messages were held, fails with a serialization failure,
// SQLSTATE 40001, after which the whole transaction may be tried again.
type Provider struct {
	cfg     Config
	sql     *statements
	pool    *pgxpool.Pool
	ownPool bool
	direct  dialer
	engine  *engine

	unmeasure func() // ends what measure began

	histories *historyCache // nil: none is kept

	// limitsHold: limits held when work was last looked for. A claim may have locked a namespace then, until it commits.
	limitsHold atomic.Bool

	acks     ackGroups
	enqueues *groups[*groupedEnqueue]

	// readCommitted: a transaction of the role is READ COMMITTED unless it says otherwise, as usual. The
	// functions count on it: a later statement must see what was committed since the one before.
	readCommitted bool

	mu        sync.Mutex
	lastReset time.Time // of the pool, because it did not answer

	inquiries [queueCount]inquiry // of claims that are silent

	// Verbs in flight. A verb ends with its caller's context or, if Close runs out of time, with abort.
	inFlight sync.WaitGroup
	closing  chan struct{} // closed when Close begins; no verb begins after
	closed   chan struct{} // closed when Close has finished
	abort    context.Context
	abortNow context.CancelFunc
}

// Open connects to the database, creates or migrates the schema, and starts to listen. databaseURL is
// whatever pgx accepts: a URL or keyword/value string, pool settings included; at least one connection is kept
// warm, or more if pool_min_conns says so, but none with Config.HibernateAfter. A nil Config means the defaults.
//
// The Provider uses the pool and one more connection, for LISTEN; for each queue yet another while a transaction that
// has added to it stays open for more than a second, and dispatchers begin to wait. If LISTEN cannot be had, the
// Provider works all the same, by polling, and Health says so.
//
// Errors: ErrConfig for a URL or Config that is unusable, also if it names a DateStyle or client_encoding that cannot be read, ErrServerTooOld, ErrPermission, ErrNotMigrated, which is
// also a migrations.ErrForeign if the schema was made by other migrations, and whatever connecting may return. An empty
// databaseURL is none: it means what the environment says (PGHOST and the like), as everywhere in pgx.
func Open(ctx context.Context, databaseURL string, config *Config) (*Provider, error) {
	const op = "open"
	cfg, err := config.resolve()
	if err != nil {
		return nil, failed(op, err)
	}
	poolConfig, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, failed(op, fmt.Errorf("%w: %w", ErrConfig, err))
	}
	switch warm := max(poolConfig.MinConns, poolConfig.MinIdleConns); {
	case cfg.HibernateAfter > 0 && warm > 0:
		return nil, failed(op, fmt.Errorf("%w: HibernateAfter is for a server that suspends when nobody is connected, and the pool's settings keep %d connections open",
			ErrConfig, warm))
	case cfg.HibernateAfter == 0 && poolConfig.MinConns == 0:
		poolConfig.MinConns = 1
	}
	var opened atomic.Pointer[Provider]
	poolConfig.ShouldPing = func(_ context.Context, conn pgxpool.ShouldPingParams) bool {
		// The LISTEN connection notices a dead server before the pool does, and the pool is then reset; so a
		// connection need not be tried before every use. Rarely used ones still are.
		if p := opened.Load(); p != nil && p.engine.epoch() != 0 {
			return conn.IdleDuration > time.Minute
		}
		return conn.IdleDuration > time.Second
	}
	TunePool(poolConfig)
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, failed(op, err)
	}
	p, err := newProvider(ctx, pool, &cfg, true)
	if err != nil {
		pool.Close()
		return nil, failed(op, err)
	}
	opened.Store(p)
	return p, nil
}

// New is Open on a pool of the caller, which Close leaves open. Config.ListenConfig defaults to the pool's
// connection settings, with what its BeforeConnect and AfterConnect do, but not its PrepareConn and BeforeAcquire: a SET
// ROLE in AfterConnect is in force for LISTEN and for migrations, whose tables then belong to that role.
//
// The Provider never holds one of the pool's connections while it waits. If one of them does
// not answer for 5 s, or the LISTEN connection falls silent, the pool is reset: connections are then closed when nobody
// uses them, and made anew. TunePool has that take no longer than it must. One that broke is taken out of the pool
// (pgxpool.Conn.Hijack) and closed, of which BeforeClose and a ReleaseTracer hear nothing.
//
// TunePool also has sessions read whatever DateStyle and client_encoding the role has. Without it a DateStyle other than
// ISO, where values come as text (QueryExecModeExec, QueryExecModeSimpleProtocol), and an encoding other than UTF8 are an ErrConfig.
func New(ctx context.Context, pool *pgxpool.Pool, config *Config) (*Provider, error) {
	const op = "new"
	cfg, err := config.resolve()
	if err != nil {
		return nil, failed(op, err)
	}
	if pool == nil {
		return nil, failed(op, fmt.Errorf("%w: the pool is nil", ErrConfig))
	}
	p, err := newProvider(ctx, pool, &cfg, false)
	return p, failed(op, err)
}

// TunePool prepares the configuration of a pool for New, as Open does with its own; call it last, before pgxpool.NewWithConfig. Where config says
// nothing, it sets 5 s for making a connection (ConnConfig.ConnectTimeout) and for trying one before use (PingTimeout). To AfterConnect it adds
// TCP keep-alive probes and TCP_USER_TIMEOUT, by which a dead peer is noticed after some 25 s, and it has sessions begin with the same for the
// server (tcp_keepalives_idle, _interval, _count, tcp_user_timeout): one whose machine is gone ends then, if it runs no statement, and so does one
// whose client reads nothing of a long answer for that long. That is not done where anybody has set one of these already, in RuntimeParams for
// example, nor behind a pooler; whether it is to be is asked on the first connection. Connections that the Provider finds broken give up their
// places in the pool at once, which takes 15 s otherwise; with PrepareConn or BeforeAcquire, not those that are tried before use. BeforeClose and a
// ReleaseTracer hear nothing of those. What DialFunc returns is wrapped, so that an item that is large is not taken for the silence of the server
// while it arrives, which is claimed anew after 5 s otherwise.
// Sessions whose DateStyle is not ISO, or whose client_encoding is not UTF8, are set to that, in the order of day and month that they have, unless
// RuntimeParams have named the one or the other: pgx could not read them.
func TunePool(config *pgxpool.Config) {
	config.PingTimeout = cmp.Or(config.PingTimeout, answerDeadline)
	config.ConnConfig.ConnectTimeout = cmp.Or(config.ConnConfig.ConnectTimeout, answerDeadline)
	var server serverKeepAlive
	before, after := config.BeforeConnect, config.AfterConnect
	config.BeforeConnect = func(ctx context.Context, config *pgx.ConnConfig) error {
		server.before(config)
		if before == nil {
			return nil
		}
		return before(ctx, config)
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		like := conn.Config()
		if err := conns.Legible(ctx, conn.PgConn(), like.DefaultQueryExecMode, conns.Named(&like.Config)...); err != nil {
			return err
		}
		if keepAlive(conn.PgConn().Conn()) {
			if err := server.after(ctx, conn); err != nil {
				return err
			}
		}
		if after == nil {
			return nil
		}
		return after(ctx, conn)
	}
	conns.Tune(config)
}

func newProvider(ctx context.Context, pool *pgxpool.Pool, cfg *Config, ownPool bool) (*Provider, error) {
	// Neither LISTEN nor a migration can go through a transaction pooler.
	direct := dialer{config: cfg.ListenConfig}
	if direct.config == nil {
		like := pool.Config()
		direct = dialer{config: like.ConnConfig, before: like.BeforeConnect, after: like.AfterConnect}
	}
	p := &Provider{cfg: *cfg, sql: newStatements(cfg.Schema), pool: pool, ownPool: ownPool, direct: direct,
		histories: newHistoryCache(cfg.HistoryCache), closing: make(chan struct{}), closed: make(chan struct{})}
	var err error
	if p.readCommitted, err = p.checkServer(ctx); err != nil {
		return nil, err
	}
	p.abort, p.abortNow = context.WithCancel(context.Background())
	p.acks, p.enqueues = newAckGroups(p), newEnqueueGroups(p)
	p.engine = newEngine(&p.cfg, p.sql, pool, direct, func(silent bool) { // what took the LISTEN connection may have taken the pool's
		switch {
		case ownPool:
			pool.Reset()
		case silent:
			p.unanswered()
		}
	})
	p.engine.poolSilent, p.engine.readCommitted = p.unanswered, p.readCommitted
	if ownPool {
		p.engine.tidy = func() {
			if pool.Stat().TotalConns() > 0 {
				pool.Reset() // those in use are closed when they are not any more
			}
		}
	}
	if p.unmeasure, err = p.measure(); err != nil {
		return nil, err
	}
	p.engine.start(ctx)
	if err := ctx.Err(); err != nil {
		p.unmeasure()
		p.engine.close(ctx)
		return nil, err
	}
	return p, nil
}

// checkServer makes sure of the server's version and of the schema. It reports whether the role's default
// isolation level is READ COMMITTED.
func (p *Provider) checkServer(ctx context.Context) (readCommitted bool, err error) {
	var current, latest int64
	err = p.onConnection(ctx, func(c *pgxpool.Conn) error {
		if garbled := conns.Illegible(c.Conn().PgConn(), c.Conn().Config().DefaultQueryExecMode); garbled != "" {
			return fmt.Errorf("%w: the pool's sessions cannot be read: %s. Leave that out of the settings of its connections, and prepare the pool with TunePool", ErrConfig, garbled)
		}
		var version int
		if err := c.QueryRow(ctx, `SELECT pg_catalog.current_setting('server_version_num')::int`).Scan(&version); err != nil {
			return err
		}
		if version < minServerVersion {
			return fmt.Errorf("%w: the server is version %d", ErrServerTooOld, version/10000)
		}
		var isolation string
		if err := c.QueryRow(ctx, `SELECT pg_catalog.current_setting('default_transaction_isolation')`).Scan(&isolation); err != nil {
			return err
		}
		readCommitted = isolation == string(pgx.ReadCommitted)
		current, latest, err = migrations.Version(ctx, c.Conn(), p.cfg.Schema)
		return err
	})
	switch {
	case errors.Is(err, migrations.ErrForeign):
		return false, fmt.Errorf("%w: %w", ErrNotMigrated, err)
	case err != nil:
		return false, err
	}
	return readCommitted, migrate(ctx, migrations.Up, current, latest, &p.cfg, p.direct)
}

// dialer is how connections outside the pool are made, in the way of the pool: with a password that is made anew
// each time, for instance, and of a role that is set when they are there. That goes for those of migrations as well, which bring their own.
type dialer struct {
	config *pgx.ConnConfig
	before func(context.Context, *pgx.ConnConfig) error
	after  func(context.Context, *pgx.Conn) error
}

// prepare returns the configuration of one connection.
func (d dialer) prepare(ctx context.Context) (*pgx.ConnConfig, error) {
	config := d.config.Copy()
	if d.before == nil {
		return config, nil
	}
	return config, d.before(ctx, config)
}

// patience is for how long to wait for a connection, and that it is prepared: as long as a server may be silent, for each that may be it.
func (d dialer) patience(ctx context.Context) time.Duration {
	looking, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	return time.Duration(conns.Addresses(looking, d.config)) * answerDeadline
}

// connect makes one connection, with its settings adjusted by each of these. hangUp closes it.
func (d dialer) connect(ctx context.Context, adjust ...func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	config, err := d.prepare(ctx)
	if err != nil {
		return nil, err
	}
	for _, set := range adjust {
		set(config)
	}
	// A wait is interrupted by a deadline on the socket, which leaves the connection usable.
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	conns.Share(ctx, config)
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if d.after != nil {
		err = d.after(ctx, conn)
	}
	if err == nil {
		err = conns.Legible(ctx, conn.PgConn(), config.DefaultQueryExecMode)
	}
	if err != nil {
		hangUp(ctx, conn)
		return nil, err
	}
	return conn, nil
}

// hangUp closes the connection, also if ctx has ended: within closingHandshake.
func hangUp(ctx context.Context, conn *pgx.Conn) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closingHandshake)
	defer cancel()
	_ = conn.Close(closing)
}

// Close returns every waiting fetch, and whoever waits for an instance, with ErrClosed, waits for the verbs in
// flight, tells the other nodes what this one had left to say, and ends all goroutines and connections of its own.
// When ctx does not leave it the time for that, it cuts the verbs in flight short and returns the context's error, by
// its deadline or at most 1 s after it was cancelled; nothing is left behind then either, once the server has closed
// its ends or, if it does not answer, after 15 s. A function or a hook of the caller's that does not heed its context goes on until it
// returns, and the rest ends then.
// Later calls wait for the first and return nil, or the error of their own context if that ends before.
func (p *Provider) Close(ctx context.Context) error {
	if !p.beginClose() {
		select {
		case <-p.closed:
			return nil
		case <-ctx.Done():
			return failed("close", ctx.Err())
		}
	}
	late := ctx.Err() != nil
	p.engine.endWaits()
	unmeasured, idle := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(unmeasured)
		defer func() {
			if panicked := recover(); panicked != nil {
				p.cfg.Logger.Error("pgwake: panic of the MeterProvider", "panic", panicked, "stack", string(debug.Stack()))
			}
		}()
		p.unmeasure() // waits for a collection, which may be at a statement (MeasureDepths)
	}()
	go func() {
		p.inFlight.Wait()
		close(idle)
	}()
	var err error
	patience, cancel := leaveTime(ctx)
	defer cancel()
	select {
	case <-idle:
	case <-patience.Done():
		err = patience.Err()
		p.abortNow()
	}
	go func() { // to its end, also if that is later: a function of the caller's, such as a hook, may not heed its context
		defer close(p.closed)
		<-idle
		p.engine.close(ctx)
		p.abortNow()
		<-unmeasured
		if p.ownPool {
			p.pool.Close()
		}
	}()
	select {
	case <-p.closed:
	case <-ctx.Done():
		err = ctx.Err()
		if late || !errors.Is(err, context.DeadlineExceeded) { // the end could not be foreseen
			select {
			case <-p.closed:
			case <-time.After(closingHandshake):
			}
		}
	}
	return failed("close", err)
}

// leaveTime ends before ctx does: a statement that is cut short is cancelled on the server while its connection
// closes, and that takes a moment, too.
func leaveTime(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, end.Add(-min(closingHandshake, time.Until(end)/4)))
}

// beginClose lets no verb begin any more. It reports whether it is the first to.
func (p *Provider) beginClose() (first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isClosing() {
		return false
	}
	close(p.closing)
	return true
}

func (p *Provider) isClosing() bool {
	select {
	case <-p.closing:
		return true
	default:
		return false
	}
}

// begin admits a verb. The returned context ends with the caller's or when Close runs out of time; done
// must be called when the verb has ended.
func (p *Provider) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isClosing() {
		return nil, nil, ErrClosed
	}
	p.inFlight.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(p.abort, cancel)
	return ctx, func() {
		stop()
		cancel()
		p.inFlight.Done()
	}, nil
}

type querier = Querier

// do runs a verb on the pool.
func (p *Provider) do(ctx context.Context, op string, verb func(context.Context, querier) error) error {
	return p.doAndTell(ctx, op, verb, func() {})
}

// doAndTell runs a verb on the pool that feeds queues, and tells of it once it was committed, or of the queues if
// nobody knows whether it was. The telling is part of the verb: Close waits for it, and lets the coalescer have
// the last word.
func (p *Provider) doAndTell(ctx context.Context, op string, verb func(context.Context, querier) error, tell func(), queues ...Queue) error {
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return failed(op, err)
	}
	defer done()
	return p.ended(ctx, op, p.run(ctx, verb, tell, queues...))
}

// connectTimeout is how long the pool lets it take to make a connection, to the last of several addresses.
func (p *Provider) connectTimeout(ctx context.Context) time.Duration {
	config := p.pool.Config().ConnConfig
	tries := max(1+len(config.Fallbacks), conns.Addresses(ctx, config))
	return cmp.Or(config.ConnectTimeout, 2*time.Minute) * time.Duration(tries) // 2 minutes: pgx's default
}

// onConnection has do use a connection. Where none can be had it has what connecting returns, however many addresses that tries.
func (p *Provider) onConnection(ctx context.Context, do func(*pgxpool.Conn) error) error {
	conn, err := (*pgxpool.Conn)(nil), errPoolSilent
	if p.pool.Stat().IdleConns() > 0 { // which may have lost their peer
		conn, err = p.acquire(ctx, time.Time{})
	}
	if errors.Is(err, errPoolSilent) {
		conn, err = conns.Acquire(ctx, p.pool)
	}
	if err != nil {
		return err
	}
	defer conns.Release(conn)
	return do(conn)
}

// run is what doAndTell does once the verb is admitted.
func (p *Provider) run(ctx context.Context, verb func(context.Context, querier) error, tell func(), queues ...Queue) error {
	conn, err := p.acquire(ctx, time.Time{})
	if errors.Is(err, errPoolSilent) { // what there is now was made since, or is to be: for as long as the pool's settings let that take
		longer, cancel := context.WithTimeout(ctx, p.connectTimeout(ctx)+answerDeadline)
		defer cancel()
		conn, err = conns.Acquire(longer, p.pool)
	}
	if err != nil {
		return err // nothing was sent
	}
	defer conns.Release(conn)
	sent, ended := time.Now(), false
	defer func() {
		if !ended { // a panic, of a tracer or a codec, which may have come after the commit
			p.engine.unsure(queues...)
		}
	}()
	err = atReadCommitted(ctx, conn, p.readCommitted, func(q sender) error { return verb(ctx, q) })
	ended = true
	if err != nil && (ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded)) && time.Since(sent) >= answerDeadline { // the verb may have a bound of its own
		p.unanswered()
	}
	switch {
	case err == nil:
		tell()
	case outcomeUnknown(err):
		p.engine.unsure(queues...)
		return unknownOutcome{err}
	}
	if notificationsFull(err) {
		p.engine.coalescer.full()
	}
	if takesNoWrites(err) {
		p.unanswered()
	}
	return err
}

// LocalTime returns when, by the clock of this process, the server's clock shows an instant such as
// ClaimedWorkItem.LockedUntil or DueAt: never later than that, for what the round trips so far tell, and earlier by less
// than one of them took. The two clocks need not agree. The result has a monotonic reading, as time.Now has.
func (p *Provider) LocalTime(server time.Time) time.Time { return p.engine.clock.LocalBefore(server) }

// sender is a connection, or a transaction on it.
type sender interface {
	querier
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// atReadCommitted runs a verb at the isolation level that the functions count on: as it is, where that is the role's default.
func atReadCommitted(ctx context.Context, conn *pgxpool.Conn, isDefault bool, verb func(sender) error) error {
	if isDefault {
		return verb(conn)
	}
	return inTransaction(ctx, conn, func(tx pgx.Tx) error { return verb(tx) })
}

// inTransaction is for where the role's default isolation level is not the one that the functions count on. A
// batch of which some leases were lost is committed: the others of it were dealt with.
func inTransaction(ctx context.Context, conn *pgxpool.Conn, verb func(pgx.Tx) error) error {
	var lost *LostLocksError
	err := pgx.BeginTxFunc(ctx, conns.On{Conn: conn}, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		err := verb(tx)
		if errors.As(err, &lost) {
			return nil
		}
		return err
	})
	if err == nil && lost != nil {
		return lost
	}
	return err
}

// doTx runs a verb in the caller's transaction.
func (p *Provider) doTx(ctx context.Context, tx pgx.Tx, op string, verb func(context.Context, querier) error) error {
	if tx == nil {
		return failed(op, invalid("the transaction is nil"))
	}
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return failed(op, err)
	}
	defer done()
	defer p.engine.stir() // it is about to be committed
	return p.ended(ctx, op, verb(ctx, tx))
}

// ended wraps the outcome of a verb. One that Close or its context cut short ended for that reason, whatever
// the connection says.
func (p *Provider) ended(ctx context.Context, op string, err error) error {
	switch {
	case err == nil:
		return nil
	case p.abort.Err() != nil:
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	case ctx.Err() != nil && !errors.Is(err, ctx.Err()):
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return failed(op, err)
}
