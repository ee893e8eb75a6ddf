package pgmq

import (
	"context"
	crand "crypto/rand"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"

	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: how does the Stream hear of messages and queues, and how does it know that it does?
//
// One goroutine owns one connection. It counts as listening once a notification of another session has come: behind a transaction pooler
// every LISTEN succeeds, and nothing ever comes. When it listens, and each time that it does again, all who wait ask once, for what
// nobody has told them. In between it tries the connection once in FallbackInterval: one that does not answer is gone.
//
// Anybody can notify, so none is believed: a notification says that it is time to ask, and how often that is done is bounded (credit.go).

const (
	readyChannel   = "pgmq_message_ready"
	createdChannel = "pgmq_queue_created"

	// selfTestDeadline is how soon the Stream must hear its own notification.
	selfTestDeadline = time.Second

	firstReconnect = 50 * time.Millisecond
	lastReconnect  = 4 * time.Second
)

var errDeaf = fmt.Errorf("LISTEN succeeded, but no notification came within %v: "+
	"a transaction pooler carries none (Config.ListenConfig goes around it), and neither does another database", selfTestDeadline)

// event is what is told, as far as it is of use here.
type event struct {
	Namespace string    `json:"namespace"`
	ReadyAt   time.Time `json:"ready_at"` // server time
}

// listen listens until ctx ends. Of an outage the log hears once, not at each attempt.
func (s *Stream) listen(ctx context.Context) {
	pause, missing := firstReconnect, false
	for ctx.Err() == nil {
		err := s.session(ctx, func() {
			if missing {
				s.cfg.Logger.Info("pgmq: listens again")
			}
			pause, missing = firstReconnect, false
		})
		if ctx.Err() != nil {
			return
		}
		if !missing {
			s.cfg.Logger.Warn("pgmq: does not listen, and asks once in FallbackInterval until it does", "interval", s.cfg.FallbackInterval, "error", err)
			missing = true
		}
		timer := time.NewTimer(pause - rand.N(pause/10))
		pause = min(2*pause, lastReconnect)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// session is one connection, from its beginning to its end.
func (s *Stream) session(ctx context.Context, began func()) error {
	// Where notifications go as they are read, also while a statement is under way: the driver would keep any number of them meanwhile.
	take := func(*pgconn.Notification) {}
	conn, err := s.connect(ctx, func(config *pgx.ConnConfig) {
		config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { take(n) }
	})
	if err != nil {
		return err
	}
	defer hangUp(conn)
	test := "pgmq_test_" + crand.Text()
	if err := try(ctx, conn, "LISTEN "+quoted(test)); err != nil {
		return err
	}
	came := false
	take = func(n *pgconn.Notification) { came = came || n.Channel == test }
	if err := s.selfTest(ctx, conn, test, &came); err != nil {
		_ = try(ctx, conn, "UNLISTEN "+quoted(test)) // on a session that is shared: as good as one can
		return err
	}
	take = func(n *pgconn.Notification) { s.hear(n.Channel, n.Payload) }
	// The session is its own, then, and idle for FallbackInterval at a time.
	if err := try(ctx, conn, "LISTEN "+readyChannel+"; LISTEN "+createdChannel+"; UNLISTEN "+quoted(test)+"; SET idle_session_timeout = 0"); err != nil {
		return err
	}
	began()
	s.lookAround()
	for {
		waiting, cancel := context.WithTimeout(ctx, s.cfg.FallbackInterval)
		err := conn.PgConn().WaitForNotification(waiting)
		quiet := waiting.Err() != nil
		cancel()
		switch {
		case err == nil:
		case ctx.Err() != nil || !quiet:
			return err
		default:
			if err := try(ctx, conn, "SELECT"); err != nil {
				return err
			}
		}
	}
}

// selfTest has the connection notified by another session, and waits until that has come. From the same session it might come all the
// same: with the answer to the statement that sent it.
func (s *Stream) selfTest(ctx context.Context, conn *pgx.Conn, channel string, came *bool) error {
	if err := s.notify(ctx, channel); err != nil {
		return fmt.Errorf("send the notification that tests LISTEN: %w", err)
	}
	testing, cancel := context.WithTimeout(ctx, selfTestDeadline)
	defer cancel()
	for !*came {
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

// notify sends a notification that says nothing, from the pool, which shows that both lead to the same database. A pool of which others
// hold every connection, or whose connections have lost their peer, must not keep the Stream from listening, so it is then sent from a
// connection of its own.
func (s *Stream) notify(ctx context.Context, channel string) error {
	const notify = `SELECT pg_catalog.pg_notify($1, '')`
	bounded, cancel := context.WithTimeout(ctx, selfTestDeadline)
	defer cancel()
	pooled, err := conns.Acquire(bounded, s.pool)
	if err == nil {
		defer conns.Release(pooled)
		_, err = pooled.Exec(bounded, notify, channel)
	}
	if err == nil || bounded.Err() == nil {
		return err
	}
	other, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(other)
	again, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	_, err = other.Exec(again, notify, channel)
	return err
}

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

// try runs a statement that is quick, or else the connection is gone.
func try(ctx context.Context, conn *pgx.Conn, sql string) error {
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	_, err := conn.Exec(bounded, sql)
	return err
}

// connect makes a connection in the way of the pool, with its settings adjusted by each of these. hangUp closes it.
func (s *Stream) connect(ctx context.Context, adjust ...func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	like := s.pool.Config()
	config := like.ConnConfig
	if s.cfg.ListenConfig != nil {
		config = s.cfg.ListenConfig.Copy()
		like.BeforeConnect, like.AfterConnect = nil, nil
	}
	looking, found := context.WithTimeout(ctx, answerDeadline)
	patience := time.Duration(conns.Addresses(looking, config)) * answerDeadline
	found()
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if like.BeforeConnect != nil {
		if err := like.BeforeConnect(bounded, config); err != nil {
			return nil, err
		}
	}
	for _, set := range adjust {
		set(config)
	}
	// A wait is interrupted by a deadline on the socket, which leaves the connection usable.
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	conns.Share(bounded, config)
	conn, err := pgx.ConnectConfig(bounded, config)
	if err != nil {
		return nil, err
	}
	if like.AfterConnect != nil {
		err = like.AfterConnect(bounded, conn)
	}
	if err == nil {
		err = conns.Legible(bounded, conn.PgConn(), config.DefaultQueryExecMode)
	}
	if err != nil {
		hangUp(conn)
		return nil, err
	}
	return conn, nil
}

// hangUp closes a connection, also of a Stream that is closed.
func hangUp(conn *pgx.Conn) {
	closing, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(closing)
}

// hear passes on what was told. What cannot be read is somebody else's; it is safe to ask for nothing.
func (s *Stream) hear(channel, payload string) {
	var e event
	if json.Unmarshal([]byte(payload), &e) != nil {
		s.tellAll()
		return
	}
	if channel == createdChannel {
		s.tell("", time.Now())
		return
	}
	s.tell(e.Namespace, s.clock.Local(e.ReadyAt))
}
