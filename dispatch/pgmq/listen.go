package pgmq

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how does the Stream hear of messages and queues?
//
// One goroutine owns one connection. When it listens, and each time that it does again, all who wait ask once, for what nobody has
// told them. In between it tries the connection once in FallbackInterval: one that does not answer is gone.

const (
	readyChannel   = "pgmq_message_ready"
	createdChannel = "pgmq_queue_created"

	firstReconnect = 50 * time.Millisecond
	lastReconnect  = 4 * time.Second
)

// event is what is told, as far as it is of use here.
type event struct {
	Namespace string    `json:"namespace"`
	ReadyAt   time.Time `json:"ready_at"` // server time
}

// listen listens until ctx ends.
func (s *Stream) listen(ctx context.Context) {
	pause := firstReconnect
	for ctx.Err() == nil {
		err := s.session(ctx, func() { pause = firstReconnect })
		if ctx.Err() != nil {
			return
		}
		again := pause - rand.N(pause/10)
		s.cfg.Logger.Warn("pgmq: does not listen", "error", err, "again_in", again)
		pause = min(2*pause, lastReconnect)
		timer := time.NewTimer(again)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// session is one connection, from its beginning to its end.
func (s *Stream) session(ctx context.Context, began func()) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if err := try(ctx, conn, "LISTEN "+readyChannel+"; LISTEN "+createdChannel); err != nil {
		return err
	}
	began()
	s.tellAll()
	for {
		waiting, cancel := context.WithTimeout(ctx, s.cfg.FallbackInterval)
		n, err := conn.WaitForNotification(waiting)
		quiet := waiting.Err() != nil
		cancel()
		switch {
		case err == nil:
			s.hear(n.Channel, n.Payload)
		case ctx.Err() != nil || !quiet:
			return err
		default:
			if err := try(ctx, conn, "SELECT"); err != nil {
				return err
			}
		}
	}
}

// try runs a statement that is quick, or else the connection is gone.
func try(ctx context.Context, conn *pgx.Conn, sql string) error {
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	_, err := conn.Exec(bounded, sql)
	return err
}

// connect makes a connection in the way of the pool.
func (s *Stream) connect(ctx context.Context) (*pgx.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	if s.cfg.ListenConfig != nil {
		return pgx.ConnectConfig(bounded, s.cfg.ListenConfig.Copy())
	}
	like := s.pool.Config()
	config := like.ConnConfig
	if like.BeforeConnect != nil {
		if err := like.BeforeConnect(bounded, config); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(bounded, config)
	if err == nil && like.AfterConnect != nil {
		if err = like.AfterConnect(bounded, conn); err != nil {
			_ = conn.Close(bounded)
		}
	}
	return conn, err
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
