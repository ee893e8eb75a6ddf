package measure

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how fast could it be? Whatever wakes a process through PostgreSQL needs one trip of a
// notification, and whatever takes an item needs one claim.

var (
	//go:embed bare_table.sql
	bareTableSQL string
	//go:embed bare_fill.sql
	bareFillSQL string
	//go:embed bare_insert.sql
	bareInsertSQL string
	//go:embed bare_send.sql
	bareSendSQL string
	//go:embed bare_claim.sql
	bareClaimSQL string
	//go:embed bare_return.sql
	bareReturnSQL string
	//go:embed bare_ack.sql
	bareAckSQL string
)

// bareItem is a row of the bare table that was claimed.
type bareItem struct {
	ID           int64
	Token, Input string
}

// createBare makes the bare table with so many rows.
func (s stage) createBare(ctx context.Context, rows int) error {
	if err := withConn(ctx, s.url, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{s.schema}.Sanitize())
		return err
	}); err != nil {
		return err
	}
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	if _, err := conn.Exec(ctx, bareTableSQL); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, bareFillSQL, rows); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "ANALYZE bare")
	return err
}

// BaselineOptions are the sizes of Baseline.
type BaselineOptions struct {
	Rounds   int           // Each takes one sample of every kind. Defaults to 200.
	Gap      time.Duration // Mean time between two samples, as in Singles. Defaults to 20 ms.
	Gaps     Gaps          // Defaults to Uniform.
	Progress func(Progress)
}

// BaselineResult is what Baseline found.
type BaselineResult struct {
	// RoundTrip is one prepared SELECT 1, on a connection that was just used; Insert is one prepared INSERT of a row,
	// directly after it, which commits to disk.
	RoundTrip Samples `json:"round_trip"`
	Insert    Samples `json:"insert"`

	// Trip is one statement that inserts a row and calls pg_notify, on one connection, until another
	// connection, of this process too, has the notification in hand.
	Trip Latency `json:"trip"`

	// Claim is the round trip of one prepared UPDATE that takes the first due row of a small table with
	// SKIP LOCKED, and that does not wait for the disk: a lease need not survive a crash of the server.
	// DurableClaim waits.
	Claim        Samples `json:"claim"`
	DurableClaim Samples `json:"durable_claim"`

	// Sleep is how much later than asked a Go timer fires: the machine's own part of any lateness.
	Sleep Samples `json:"sleep"`
}

// Baseline takes the samples in turn, at the pace of Singles, so that they see the same, idle machine.
func Baseline(ctx context.Context, url string, o BaselineOptions) (r *BaselineResult, err error) {
	orDefault(&o.Rounds, 200)
	orDefault(&o.Gap, 20*time.Millisecond)
	orDefault(&o.Gaps, Uniform)
	defer func(ctx context.Context) { err = about(ctx, "the baseline", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	if err := s.createBare(ctx, 0); err != nil {
		return nil, err
	}
	var conns [3]*pgx.Conn
	for i := range conns {
		if conns[i], err = s.connect(ctx); err != nil {
			return nil, err
		}
		defer hangUp(conns[i])
	}
	sender, claimer, lazyClaimer := conns[0], conns[1], conns[2]
	if _, err := lazyClaimer.Exec(ctx, "SET synchronous_commit = off"); err != nil {
		return nil, err
	}
	ears, err := listen(ctx, url, s.schema)
	if err != nil {
		return nil, err
	}
	defer ears.close()

	r = &BaselineResult{}
	m := newMeter(o.Progress)
	rest := func() error {
		gap := o.Gaps.draw(o.Gap)
		began := time.Now()
		err := pause(ctx, gap)
		r.Sleep = append(r.Sleep, time.Since(began)-gap)
		return err
	}
	timed := func(took *Samples, sql string) (n int64, err error) {
		began := time.Now()
		err = sender.QueryRow(ctx, sql).Scan(&n)
		*took = append(*took, time.Since(began))
		return n, err
	}
	claim := func(by *pgx.Conn, took *Samples, id int64) error {
		if err := rest(); err != nil {
			return err
		}
		var item bareItem
		began := time.Now()
		if err := by.QueryRow(ctx, bareClaimSQL, 1).Scan(&item.ID, &item.Token, &item.Input); err != nil {
			return err
		}
		*took = append(*took, time.Since(began))
		if item.ID != id {
			return fmt.Errorf("claimed row %d instead of %d", item.ID, id)
		}
		return nil
	}
	for n := range warmUps + o.Rounds {
		if n == warmUps {
			*r = BaselineResult{}
			m = newMeter(o.Progress)
		}
		if _, err := timed(&r.RoundTrip, "SELECT 1"); err != nil {
			return nil, err
		}
		inserted, err := timed(&r.Insert, bareInsertSQL)
		if err != nil {
			return nil, err
		}
		if _, err := sender.Exec(ctx, bareAckSQL, []int64{inserted}); err != nil {
			return nil, err
		}
		if err := rest(); err != nil {
			return nil, err
		}
		id, err := r.Trip.take(ctx, s, sender, ears)
		if err != nil {
			return nil, err
		}
		if err := claim(lazyClaimer, &r.Claim, id); err != nil {
			return nil, err
		}
		if _, err := sender.Exec(ctx, bareReturnSQL, id); err != nil {
			return nil, err
		}
		if err := claim(claimer, &r.DurableClaim, id); err != nil {
			return nil, err
		}
		if _, err := sender.Exec(ctx, bareAckSQL, []int64{id}); err != nil {
			return nil, err
		}
		if n >= warmUps && m.due() {
			m.report(Progress{Done: n - warmUps + 1, Total: o.Rounds, Figures: r.Trip.FromSend.Summary()})
		}
	}
	m.report(Progress{Done: o.Rounds, Total: o.Rounds, Figures: r.Trip.FromSend.Summary()})
	return r, nil
}

// take makes one trip and returns the row that it inserted.
func (l *Latency) take(ctx context.Context, s stage, sender *pgx.Conn, e *ears) (id int64, err error) {
	var void string
	trip := line{sent: time.Now()}
	if err := sender.QueryRow(ctx, bareSendSQL, s.schema).Scan(&void, &id); err != nil {
		return 0, err
	}
	trip.committed = time.Now()
	select {
	case h := <-e.heard:
		if h.err != nil {
			return 0, h.err
		}
		if h.payload != strconv.FormatInt(id, 10) {
			return 0, fmt.Errorf("heard of row %q instead of %d", h.payload, id)
		}
		trip.inHand = h.at
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	l.add(trip)
	return id, nil
}

// ears listen to one channel.
type ears struct {
	heard chan heard
	stop  context.CancelFunc
	ended chan struct{}
}

type heard struct {
	payload string
	at      time.Time
	err     error
}

func listen(ctx context.Context, url, channel string) (*ears, error) {
	conn, err := connect(ctx, url)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		hangUp(conn)
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	e := &ears{heard: make(chan heard, 16), stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(e.ended)
		defer hangUp(conn)
		for {
			n, err := conn.WaitForNotification(ctx)
			h := heard{at: time.Now(), err: err}
			if err == nil {
				h.payload = n.Payload
			}
			select {
			case e.heard <- h:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return e, nil
}

func (e *ears) close() {
	e.stop()
	<-e.ended
}
