package pgwake

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: how do notifications reach this node, and how does it know that they do?
//
// One goroutine owns one connection. It listens, hands what it hears to the lanes, and once a
// FallbackInterval asks the database for what is due: the safety net, and the proof that the connection
// lives. Others may have it run a short statement in between (exec), so that while it listens nothing of the
// engine needs the pool. It never waits for a dispatcher.
//
// The epoch counts connections; 0 means that there is none. It is set after LISTEN was committed and a
// notification has come back, so a query that begins in an epoch misses nothing that the epoch's
// notifications do not report.

const (
	// answerDeadline bounds every statement on the LISTEN connection; the periodic one has longer if it looks at many lanes (lookDeadline). One
	// that takes longer has lost its peer: together with FallbackInterval this is the bound on an outage that gives no sign.
	answerDeadline = 5 * time.Second

	// listenPatience is how long what may take long has on it, before it goes on the pool instead.
	listenPatience = 250 * time.Millisecond

	// selfTestDeadline is how soon the node must hear its own notification.
	selfTestDeadline = time.Second

	// The pauses between attempts. The longest leaves time to connect, so that push is back within 5 s of
	// the server.
	firstReconnect   = 50 * time.Millisecond
	lastReconnect    = 4 * time.Second
	healthySession   = lastReconnect // to connect at once after one of this length is no more attempts than with the longest pause
	fallbackJitter   = time.Second
	closingHandshake = time.Second
)

type listener struct {
	e      *engine
	dialer dialer

	current  atomic.Pointer[session] // nil: none
	sessions atomic.Uint64           // so far
	pid      atomic.Uint32           // of the backend, which behind a pooler is not what the connection says

	retry   bell // ends the pause before the next attempt
	changed bell // the modes have changed

	hibernation hibernation
	followers   followers

	// For the goroutine of run alone.
	nextFallback time.Time
	hearing      bool // that producers are to notify of everything: what the session has said last
	watched      bool // each Watch knows of the session, or is about to
	questions         // that are to be answered

	tried     chan struct{} // closed once the first attempt to listen has ended, either way
	triedOnce sync.Once

	mu        sync.Mutex
	interrupt context.CancelFunc // ends the wait for a notification; nil: not waiting
	jobs      []*job
	outdated  bool // the modes have changed since the session went by them
	left      bool // and lanes have gone by that, whose rows are still there
	lastErr   error
	lag       lateness
	missing   bool     // the log says that there is no connection
	socket    net.Conn // of the connection, or of the last one
}

// session is a LISTEN connection.
type session struct {
	epoch    uint64 // 0: none
	node     int32  // key of the node
	listener int32  // key of the connection
}

// session returns the one that is up.
func (l *listener) session() session {
	if s := l.current.Load(); s != nil {
		return *s
	}
	return session{}
}

// job is a statement for the LISTEN connection.
type job struct {
	sql  string
	args []any
	dest any // where the one value of the one row goes
	done chan error

	patience time.Duration // after which the server is to end the statement, with error 57014; 0: never
}

var (
	errNotListening = errors.New("not listening")
	errDeaf         = fmt.Errorf("LISTEN succeeded, but no notification came within %v: "+
		"a transaction pooler carries none (Config.ListenConfig goes around it), and neither does another database", selfTestDeadline)
)

func newListener(e *engine, d dialer) *listener {
	l := &listener{e: e, dialer: d, tried: make(chan struct{}), retry: newBell(), changed: newBell(), hibernation: newHibernation()}
	l.followers.say = l.notify
	return l
}

// retryNow is called when the database answers again: if there is no connection, this is the time for the
// next attempt. It never blocks.
func (l *listener) retryNow() { l.retry.ring() }

// run keeps a session up, with a jittered back-off between attempts.
func (l *listener) run(ctx context.Context) {
	l.planFallback()
	pause := firstReconnect
	wait := time.NewTimer(0)
	defer wait.Stop()
	defer l.lost(errors.New("listener stopped")) // also when it panics
	defer l.followers.end()
	<-wait.C
	for {
		if l.rests() {
			l.rest(ctx)
			pause = firstReconnect
		}
		if ctx.Err() != nil {
			return
		}
		began := time.Now()
		err := l.serve(ctx)
		wasUp := l.current.Load() != nil
		switch {
		case errors.Is(err, errUnwanted):
			continue
		case errors.Is(err, errHibernates):
			l.hibernate(ctx)
			pause = firstReconnect
			continue
		}
		l.lost(err)
		if ctx.Err() != nil {
			return
		}
		l.fallbackByDispatchers()
		pause = pauseAfter(pause, wasUp, time.Since(began))
		wait.Reset(pause/2 + rand.N(pause/2))
		select {
		case <-ctx.Done():
			return
		case <-wait.C:
			pause = min(2*pause, lastReconnect)
		case <-l.retry:
			// Others saw the server return at the same moment; and should failures and successes alternate
			// for another reason, this is no busy loop.
			pause = firstReconnect
			if !sleep(ctx, rand.N(pause)) {
				return
			}
		}
	}
}

// pauseAfter is the pause before the next attempt, which has come to be that long: it begins anew after a session that was up for a while,
// since what it had grown by was another outage. An attempt that took as long to fail is none.
func pauseAfter(pause time.Duration, wasUp bool, lasted time.Duration) time.Duration {
	if wasUp && lasted >= healthySession {
		return firstReconnect
	}
	return pause
}

// rests reports whether there is to be no LISTEN connection.
func (l *listener) rests() bool { return !l.e.modes.any(Mode.listens) }

// rest waits until there is to be one.
func (l *listener) rest(ctx context.Context) {
	l.mu.Lock()
	l.missing, l.lastErr = false, nil
	l.mu.Unlock()
	l.hibernation.on.Store(false)
	l.triedOnce.Do(func() { close(l.tried) })
	l.e.waits.lookAtWatches() // whoever goes by the session has to know that it is no more
	l.watched = false
	for l.rests() {
		select {
		case <-ctx.Done():
			return
		case <-l.changed:
		}
	}
}

// reconsider has the listener go by the modes as they are now; left says that lanes that hear are gone. It never blocks.
func (l *listener) reconsider(left bool) {
	l.changed.ring()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outdated, l.left = true, l.left || left
	if l.interrupt != nil {
		l.interrupt()
	}
}

// errUnwanted ends a session without any trouble.
var errUnwanted = errors.New("nobody listens any more")

// goByModes ends the session if there is to be none, with errUnwanted, and otherwise has it hear what it is to. Any other error
// is that of a connection that broke.
func (l *listener) goByModes(ctx context.Context, conn *pgx.Conn, key int32) error {
	l.mu.Lock()
	outdated, left := l.outdated, l.left
	l.outdated, l.left = false, false
	l.mu.Unlock()
	if !outdated {
		return nil
	}
	exec := func(ctx context.Context, dest any, sql string, args ...any) error {
		bounded, cancel := context.WithTimeout(ctx, answerDeadline)
		defer cancel()
		return conn.QueryRow(bounded, sql, args...).Scan(dest)
	}
	if l.rests() {
		l.current.Store(nil)
		l.refuseJobs()
		l.e.alone.Store(false) // others may come, unheard
		l.e.leaveBy(context.WithoutCancel(ctx), exec)
		return errUnwanted
	}
	if left {
		l.nextFallback = time.Now() // which removes their rows
	}
	hearing := l.hearsAll()
	if hearing == l.hearing {
		return nil
	}
	var void any
	if err := exec(ctx, &void, l.e.sql.hearAll, l.e.node, key, hearing); err != nil {
		return ifBroken(conn, err)
	}
	l.hearing = hearing
	return nil
}

// hearsAll reports whether producers are to notify this node of everything, whoever waits.
func (l *listener) hearsAll() bool {
	return l.e.cfg.Notify == NotifyBroadcast || l.e.modes.any(func(m Mode) bool { return m == ModeShadow })
}

// lost ends the epoch: what was known by listening is void, and the scout takes over.
func (l *listener) lost(err error) {
	wasUp := l.current.Load() != nil
	if wasUp && l.e.ctx.Err() == nil {
		l.e.lost(timedOut(err)) // before anybody is sent to the pool instead
	}
	l.current.Store(nil)
	l.hibernation.on.Store(false)
	l.mu.Lock()
	l.interrupt = nil
	l.lastErr = err
	first := !l.missing
	l.missing = true
	l.mu.Unlock()
	if first && l.e.ctx.Err() == nil {
		l.e.log().Warn("pgwake: not listening; "+l.instead()+" until it is", "error", err)
	}
	l.refuseJobs()
	l.e.listenerLost(l.watched) // which current does not tell, if the session was about to be given up
	l.watched = false
	l.triedOnce.Do(func() { close(l.tried) })
}

// timedOut reports whether err is of a peer that gave no sign.
func timedOut(err error) bool {
	var silence net.Error
	return errors.As(err, &silence) && silence.Timeout()
}

// refuseJobs sends those to the pool who wait for the LISTEN connection to run their statements. There is none any more.
func (l *listener) refuseJobs() {
	l.mu.Lock()
	jobs := l.jobs
	l.jobs = nil
	l.mu.Unlock()
	for _, j := range jobs {
		j.done <- errNotListening
	}
}

// up begins an epoch.
func (l *listener) up(key int32) {
	l.mu.Lock()
	again := l.missing
	l.missing, l.lastErr = false, nil
	l.mu.Unlock()
	l.retry.silence() // done
	if again {
		l.e.log().Info("pgwake: listening again")
	}
	l.lag.reset()
	l.current.Store(&session{l.sessions.Add(1), l.e.node, key})
	if l.hibernation.on.Swap(false) {
		l.hibernation.returns.Add(1)
	}
	l.e.stir()
	l.watched = true
	// Whatever was notified, or became due, before this moment went unheard. One look per lane finds it,
	// and brings the instants of everything that is not due yet.
	l.e.listenerUp()
	l.triedOnce.Do(func() { close(l.tried) })
}

// cut closes the socket of the connection, so that whoever waits for its peer stops, and the server learns of it if it
// still can: as long as its end of the session is there, the node it was for seems to live.
func (l *listener) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.socket != nil {
		_ = l.socket.Close()
	}
}

// serve connects, listens, and serves until something breaks.
func (l *listener) serve(ctx context.Context) error {
	l.e.inject("connect")
	preparing, cancel := context.WithTimeout(ctx, l.dialer.patience(ctx))
	defer cancel()
	hears := &ear{take: func(*pgconn.Notification) {}}
	conn, err := l.dialer.connect(preparing, func(config *pgx.ConnConfig) {
		if _, named := config.RuntimeParams["application_name"]; !named {
			config.RuntimeParams["application_name"] = "pgwake listen"
		}
		// As it is read, also while a statement is under way: the driver would keep any number of them meanwhile.
		config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { hears.take(n) }
	})
	if err != nil {
		return err
	}
	defer l.cut() // of a peer that does not answer, the driver would hold on to it for 15 s
	defer hangUp(ctx, conn)
	l.mu.Lock()
	l.socket = conn.PgConn().Conn()
	l.mu.Unlock()
	keepAlive(conn.PgConn().Conn())
	heard, err := l.listen(preparing, conn, hears)
	if err != nil {
		return err
	}
	key := int32(rand.Uint32()) // anew each time: producers may still hold the old one
	hears.take = func(*pgconn.Notification) {
		l.e.joins.Add(1) // perhaps another node is there, of which the answer does not know
		l.e.inCompany()
	}
	if err := l.prepare(preparing, conn, key); err != nil {
		return err
	}
	l.questions = questions{}
	hears.take = func(n *pgconn.Notification) { l.handle(n, heard) } // of what came before, up makes everybody look
	l.up(key)

	l.planFallback()
	l.planHibernation()
	for {
		l.e.inject("listener")
		err := l.wait(ctx, conn, l.nextAction())
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		if err := l.answer(ctx, conn); err != nil {
			return err
		}
		if err := l.runJobs(ctx, conn); err != nil {
			return err
		}
		if err := l.goByModes(ctx, conn, key); err != nil {
			return err
		}
		if !time.Now().Before(l.nextFallback) {
			if err := l.fallback(ctx, conn); err != nil {
				return err
			}
			l.planFallback()
		}
		if err := l.tryHibernate(ctx, conn); err != nil {
			return err
		}
	}
}

// instead says, for operators, what the node does, by the modes in force, while there is to be a connection and is none.
func (l *listener) instead() string {
	cfg := l.e.cfg
	switch {
	case !l.e.modes.any(func(m Mode) bool { return m.manner().hears }): // what it listens for is to be watched alone
		return "counting no notifications"
	case cfg.AggressivePolicy != Never:
		return fmt.Sprintf("polling every %v", cfg.AggressiveInterval)
	case l.fallsBack():
		return fmt.Sprintf("asking every %v", cfg.FallbackInterval)
	}
	return "finding only what this node enqueues, and what is due at an instant that it knows,"
}

// channels are those that this node listens on.
type channels struct {
	queues    [queueCount]string
	own       [queueCount]string // of this node alone
	instances string
}

// ear is where the notifications of a connection go, one by one, in the goroutine that has the connection read. It is not to make a
// statement.
type ear struct{ take func(*pgconn.Notification) }

// listen makes sure that notifications come, begins to listen, and returns the channels.
func (l *listener) listen(ctx context.Context, conn *pgx.Conn, hears *ear) (c channels, err error) {
	test := "pgwake_test_" + crand.Text()
	if err := execAll(ctx, conn, "LISTEN "+quoted(test)); err != nil {
		return c, fmt.Errorf("listen on a channel to test it: %w", err)
	}
	if err := l.selfTest(ctx, conn, test, hears); err != nil {
		_ = execAll(ctx, conn, "UNLISTEN "+quoted(test)) // on a session that is shared: as good as one can
		return c, err
	}
	err = conn.QueryRow(ctx, l.e.sql.channels, l.e.node).Scan(&c.queues[Orchestrator], &c.queues[Worker],
		&c.own[Orchestrator], &c.own[Worker], &c.instances)
	if err != nil {
		return c, fmt.Errorf("ask for the channels: %w", err)
	}
	statements := []string{"UNLISTEN " + quoted(test)}
	names := slices.Concat(c.queues[:], c.own[:], []string{c.instances})
	for _, name := range names {
		statements = append(statements, "LISTEN "+quoted(name))
	}
	if err := execAll(ctx, conn, statements...); err != nil {
		return c, fmt.Errorf("listen on %s: %w", strings.Join(names, ", "), err)
	}
	return c, nil
}

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

// execAll runs statements that return nothing, in one round trip and one transaction.
func execAll(ctx context.Context, conn *pgx.Conn, statements ...string) error {
	return conn.PgConn().Exec(ctx, strings.Join(statements, "; ")).Close()
}

// selfTest sends this node a notification from another session. Behind a transaction pooler every LISTEN
// succeeds and nothing ever comes. From the same session it might come all the same: with the answer to
// the statement that sent it.
func (l *listener) selfTest(ctx context.Context, conn *pgx.Conn, channel string, hears *ear) error {
	came := false
	hears.take = func(n *pgconn.Notification) { came = came || n.Channel == channel }
	if err := l.notifySelf(ctx, channel); err != nil {
		return fmt.Errorf("send the notification that tests LISTEN: %w", err)
	}
	testing, cancel := context.WithTimeout(ctx, selfTestDeadline)
	defer cancel()
	for !came {
		err := conn.PgConn().WaitForNotification(testing)
		if err != nil && testing.Err() != nil && ctx.Err() == nil {
			return errDeaf
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// testLISTEN sends a notification that says nothing.
const testLISTEN = "SELECT pg_catalog.pg_notify($1, '')"

// notifySelf sends the notification from the pool, as producers do, which shows that both lead to the same database.
// A pool of which others hold every connection, or whose connections have lost their peer, must not keep the node from listening, so it is
// then sent from a connection of its own.
func (l *listener) notifySelf(ctx context.Context, channel string) error {
	waiting, cancel := context.WithTimeout(ctx, selfTestDeadline)
	defer cancel()
	pooled, err := conns.Acquire(waiting, l.e.pool)
	if err == nil {
		defer conns.Release(pooled)
		_, err = pooled.Exec(waiting, testLISTEN, channel)
	}
	if takesNoWrites(err) { // it is not where this session is
		l.e.poolSilent()
	}
	if err == nil || waiting.Err() == nil {
		return err
	}
	other, err := l.dialer.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(ctx, other)
	_, err = other.Exec(ctx, testLISTEN, channel)
	return err
}

// prepare configures the session, which is our own, as selfTest has shown: what it sets, no transaction of
// anybody else will run under.
func (l *listener) prepare(ctx context.Context, conn *pgx.Conn, key int32) error {
	sent := l.e.clock.Now()
	var pid uint32
	var now time.Time
	nodes := others{joins: l.e.joins.Load()}
	l.hearing = l.hearsAll()
	err := conn.QueryRow(ctx, l.e.sql.session, l.e.node, key, l.hearing).Scan(&pid, &now, &nodes.none, &nodes.dead, &nodes.count)
	if err != nil {
		return fmt.Errorf("prepare the LISTEN session: %w", err)
	}
	l.e.clock.Observe(sent, l.e.clock.Now(), now)
	l.pid.Store(pid)
	l.e.learnOf(nodes)
	return nil
}

// wait returns after the next notification, or when there is a job or the time has come.
func (l *listener) wait(ctx context.Context, conn *pgx.Conn, until time.Time) error {
	waiting, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	l.mu.Lock()
	if len(l.jobs) > 0 || l.outdated {
		l.mu.Unlock()
		return nil
	}
	l.interrupt = cancel
	l.mu.Unlock()

	err := conn.PgConn().WaitForNotification(waiting)

	l.mu.Lock()
	l.interrupt = nil
	l.mu.Unlock()
	if err != nil && waiting.Err() != nil && !conn.IsClosed() {
		err = nil // interrupted, and none the worse for it
	}
	return err
}

func (l *listener) handle(n *pgconn.Notification, c channels) {
	for q, channel := range c.own {
		if n.Channel == channel {
			said := l.took(Queue(q), n.Payload)
			c, ok := parseCall(said)
			l.e.stats.queues[q].understood(ok)
			l.e.called(Queue(q), c)
			return
		}
	}
	// What this connection sent is the coalescer's, and the lanes here were signalled directly.
	if n.PID == l.pid.Load() {
		return
	}
	if n.Channel == c.instances {
		reply, follows, ok := questionIn(n.Payload)
		if !ok {
			l.e.waits.heard(n.Payload)
			return
		}
		if follows {
			l.followers.follow(reply)
		}
		l.questions.note(reply)
		return
	}
	for q, channel := range c.queues {
		if n.Channel == channel {
			said := l.took(Queue(q), n.Payload)
			n, ok := parseNote(said)
			l.e.stats.queues[q].understood(ok)
			l.e.heard(Queue(q), n)
		}
	}
}

// took takes note of a notification that came, and returns what it says: its payload without the last field, which is when the
// transaction began that sent it, in microseconds since 1970; "" if it is not like that.
func (l *listener) took(q Queue, payload string) (said string) {
	l.e.stats.queues[q].notifications.Add(1)
	end := strings.LastIndexByte(payload, ' ')
	if end < 0 {
		return ""
	}
	micros, err := strconv.ParseInt(payload[end+1:], 10, 64)
	if err != nil {
		return ""
	}
	lag := l.e.clock.Server(l.e.clock.Now()).Sub(time.UnixMicro(micros))
	l.e.stats.queues[q].lag.observe(lag)
	l.lag.observe(lag, l.e.clock.Now())
	return payload[:end]
}

// parseNote reads what the SQL function notify_queue wrote. A payload that it cannot read, from a newer
// version or a stranger, means: look, whatever your namespace.
func parseNote(payload string) (n note, ok bool) {
	unclear := note{due: 1}
	due, rest, ok1 := strings.Cut(payload, " ")
	micros, namespace, ok2 := strings.Cut(rest, " ")
	count, err1 := strconv.ParseInt(due, 10, 64)
	next, err2 := strconv.ParseInt(micros, 10, 64)
	if !ok1 || !ok2 || err1 != nil || err2 != nil || count < 0 || namespace != "*" && CheckNamespace(namespace) != nil {
		return unclear, false
	}
	n = note{due: count, namespace: namespace}
	if next != 0 {
		n.next = time.UnixMicro(next)
	}
	if namespace == "*" {
		n.namespace = ""
	}
	return n, true
}

// call is a notification to one lane of this node.
type call struct {
	lane      int32  // 0: none
	hop       int    // how often it was passed on
	standBy   bool   // another lane was told as well, and is to come first
	namespace string // "": any
}

// parseCall reads what the SQL function wake wrote. Of a payload that it cannot read nobody knows for whom it is.
func parseCall(payload string) (c call, ok bool) {
	parts := strings.SplitN(payload, " ", 4)
	if len(parts) != 4 {
		return call{}, false
	}
	lane, err1 := strconv.ParseInt(parts[0], 10, 32)
	hop, err2 := strconv.ParseUint(parts[1], 10, 31)
	if err1 != nil || err2 != nil || CheckNamespace(parts[3]) != nil {
		return call{}, false
	}
	return call{int32(lane), int(hop), parts[2] == "1", parts[3]}, true
}

// exec runs a statement on the LISTEN connection. It fails at once if there is none. dest is not to be
// read unless exec returns nil.
func (l *listener) exec(ctx context.Context, dest any, sql string, args ...any) error {
	return l.execJob(ctx, &job{sql: sql, args: args, dest: dest})
}

func (l *listener) execJob(ctx context.Context, j *job) error {
	j.done = make(chan error, 1)
	if !l.submit(j) {
		return errNotListening
	}
	select {
	case err := <-j.done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// submit leaves a statement to the LISTEN connection, and reports whether there is one.
func (l *listener) submit(j *job) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current.Load() == nil {
		return false
	}
	l.jobs = append(l.jobs, j)
	if l.interrupt != nil {
		l.interrupt()
	}
	return true
}

// notify has a notification sent to some channels, if there is a connection. It never blocks.
func (l *listener) notify(channels []string, payload string) {
	l.submit(tellingOf(channels, payload))
}

// runJobs runs what exec left. An error that says the connection broke ends the session.
func (l *listener) runJobs(ctx context.Context, conn *pgx.Conn) error {
	for {
		l.mu.Lock()
		if len(l.jobs) == 0 {
			l.mu.Unlock()
			return nil
		}
		j := l.jobs[0]
		l.jobs = l.jobs[1:]
		l.mu.Unlock()
		if err := j.run(ctx, conn); err != nil {
			return err // lost answers the others
		}
	}
}

// run runs the statement and answers whoever asked for it. The error is that of a connection that broke.
func (j *job) run(ctx context.Context, conn *pgx.Conn) (broken error) {
	answer := errNotListening // also when this panics
	defer func() { j.done <- answer }()
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	err := j.send(bounded, conn)
	if conn.IsClosed() {
		answer = fmt.Errorf("%w: %w", errNotListening, err)
		return fmt.Errorf("statement on the LISTEN connection: %w", err)
	}
	answer = err
	return nil
}

func (j *job) send(ctx context.Context, conn *pgx.Conn) error {
	if j.patience == 0 {
		return conn.QueryRow(ctx, j.sql, j.args...).Scan(j.dest)
	}
	batch := &pgx.Batch{} // one transaction, with which the setting ends
	batch.Queue("SELECT pg_catalog.set_config('statement_timeout', $1, true)", strconv.FormatInt(j.patience.Milliseconds(), 10))
	batch.Queue(j.sql, j.args...).QueryRow(func(row pgx.Row) error { return row.Scan(j.dest) })
	return conn.SendBatch(ctx, batch).Close()
}
