package measure

import (
	"context"
	_ "embed"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what becomes of the throughput while somebody else keeps a transaction open, so that nothing of
// what is done can be cleared away?

//go:embed bloat_size.sql
var bloatSizeSQL string

// BloatOptions are the sizes of Bloat.
type BloatOptions struct {
	Duration    time.Duration // with the transaction open; before that, a fifth of it without. Defaults to 20 s.
	Chunk       int           // Items enqueued at a time; the next when these are done. Defaults to 100.
	Dispatchers int           // Defaults to 4.
	Peer        Peer          // Defaults to nil: pgwake, in batches.
	Progress    func(Progress)
}

// BloatResult is what Bloat found.
type BloatResult struct {
	Who      string  `json:"who"`
	Before   float64 `json:"before"`   // items/s while nobody holds a transaction open
	First    float64 `json:"first"`    // items/s in the first fifth of the time with one
	Last     float64 `json:"last"`     // items/s in the last fifth
	Items    int     `json:"items"`    // done while it was open
	Size     int64   `json:"size"`     // bytes of all tables and indexes at the end
	Rounds   Samples `json:"rounds"`   // time that each chunk took while it was open
	OpenFrom int     `json:"open_at"`  // items done before it was opened
	Duration Samples `json:"duration"` // of the three parts: before, first, last
}

// Ratio is the throughput at the end over that before.
func (r *BloatResult) Ratio() float64 { return r.Last / max(r.Before, 1e-9) }

// Bloat keeps a node busy with chunk after chunk, first alone, and then while another connection holds a transaction
// open whose snapshot is older than all of it.
func Bloat(ctx context.Context, url string, o BloatOptions) (r *BloatResult, err error) {
	orDefault(&o.Duration, 20*time.Second)
	orDefault(&o.Chunk, 100)
	orDefault(&o.Dispatchers, 4)
	defer func(ctx context.Context) { err = about(ctx, "bloat", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	r = &BloatResult{Who: "pgwake"}
	done := make(chan int, 1<<16)
	var fill func(ctx context.Context, first, count int) error
	if o.Peer == nil {
		n, err := s.open(ctx, o.Dispatchers)
		if err != nil {
			return nil, err
		}
		defer n.close(&err)
		for range o.Dispatchers {
			n.loop(func() error {
				items, err := n.FetchWorkItems(n.ctx, o.Chunk, nil)
				if err != nil {
					return err
				}
				err = n.AckWorkItems(n.ctx, tokensOf(items))
				done <- len(items)
				return err
			})
		}
		ctx, fill = n.ctx, n.fill
	} else {
		r.Who = o.Peer.Name()
		if err := s.preparePeer(ctx, o.Peer); err != nil {
			return nil, err
		}
		p, err := o.Peer.Produce(ctx, s.url, s.schema, 1)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		n, err := s.openPeer(ctx, o.Peer, o.Dispatchers, PeerHandler{Done: func(count int) { done <- count }})
		if err != nil {
			return nil, err
		}
		defer n.close(&err)
		ctx, fill = n.ctx, p.Fill
	}

	m := newMeter(o.Progress)
	total := 0
	work := func(d time.Duration) (perSecond float64, err error) {
		began, count := time.Now(), 0
		for time.Since(began) < d {
			chunkBegan := time.Now()
			if err := fill(ctx, total, o.Chunk); err != nil {
				return 0, err
			}
			for left := o.Chunk; left > 0; {
				select {
				case n := <-done:
					left -= n
				case <-ctx.Done():
					return 0, context.Cause(ctx)
				}
			}
			r.Rounds = append(r.Rounds, time.Since(chunkBegan))
			total += o.Chunk
			count += o.Chunk
			if m.due() {
				m.report(Progress{Done: total})
			}
		}
		took := time.Since(began)
		r.Duration = append(r.Duration, took)
		return float64(count) / took.Seconds(), nil
	}
	if r.Before, err = work(o.Duration / 5); err != nil {
		return nil, err
	}
	r.OpenFrom, r.Rounds = total, nil
	holder, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer hangUp(holder)
	tx, err := holder.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, "SELECT pg_current_xact_id()"); err != nil {
		return nil, err
	}
	if r.First, err = work(o.Duration / 5); err != nil {
		return nil, err
	}
	if _, err = work(o.Duration * 3 / 5); err != nil {
		return nil, err
	}
	if r.Last, err = work(o.Duration / 5); err != nil {
		return nil, err
	}
	r.Items = total - r.OpenFrom
	return r, withConn(ctx, s.url, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, bloatSizeSQL, s.schema).Scan(&r.Size)
	})
}
