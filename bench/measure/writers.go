package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: how many items can many writers at a time enqueue, each by a transaction of its own?

var (
	//go:embed writers_table.sql
	writersTableSQL string
	//go:embed writers_insert.sql
	writersInsertSQL string
	//go:embed writers_trigger.sql
	writersTriggerSQL string
	//go:embed writers_claim.sql
	writersClaimSQL string
	//go:embed writers_ack.sql
	writersAckSQL string
)

// WritersWay is who inserts into what.
type WritersWay string

const (
	// BareTable inserts into a copy of the worker queue, with its indexes and constraints, that has no trigger.
	BareTable WritersWay = "bare table"
	// Library calls EnqueueForWorker of a Provider other than the one whose dispatchers there are.
	Library WritersWay = "pgwake"
	// Trigger inserts into the worker queue by plain SQL.
	Trigger WritersWay = "pgwake, plain SQL"
	// ByPeer has a peer's producer insert.
	ByPeer WritersWay = "a peer"
)

// WritersOptions are the sizes of Writers.
type WritersOptions struct {
	Way      WritersWay    // Defaults to Library.
	Peer     Peer          // for ByPeer
	Writers  int           // Defaults to 32.
	Duration time.Duration // Defaults to 2 s.

	// Dispatchers there are, of another Provider; none for a peer. Defaults to 8.
	Dispatchers int
	// Busy is how many of them are in handlers, blocked, all the time; the others claim and acknowledge what comes, one
	// item at a time. Defaults to 0: all of them. On a BareTable as many connections as are not busy do the same.
	Busy     int
	Progress func(Progress)
}

// WritersResult is what Writers found.
type WritersResult struct {
	Way      string        `json:"way"`
	Writers  int           `json:"writers"`
	Working  int           `json:"working"` // dispatchers that claim and acknowledge meanwhile
	Inserted int64         `json:"inserted"`
	Handled  int64         `json:"handled"` // by them
	Took     time.Duration `json:"took"`
}

// PerSecond is the rate of all writers together.
func (r *WritersResult) PerSecond() float64 { return float64(r.Inserted) / r.Took.Seconds() }

// Writers counts what so many goroutines enqueue, one item after another.
func Writers(ctx context.Context, url string, o WritersOptions) (r *WritersResult, err error) {
	orDefault(&o.Way, Library)
	orDefault(&o.Writers, 32)
	orDefault(&o.Duration, 2*time.Second)
	orDefault(&o.Dispatchers, 8)
	orDefault(&o.Busy, o.Dispatchers)
	defer func(ctx context.Context) { err = about(ctx, "writers", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	r = &WritersResult{Way: string(o.Way), Writers: o.Writers}

	var handled atomic.Int64
	var write func(ctx context.Context, writer, n int) error
	if o.Way == ByPeer {
		r.Way = o.Peer.Name()
		if err := s.preparePeer(ctx, o.Peer); err != nil {
			return nil, err
		}
		p, err := o.Peer.Produce(ctx, s.url, s.schema, o.Writers)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		write = func(ctx context.Context, _, n int) error { return p.Enqueue(ctx, n, time.Time{}) }
	} else {
		r.Working = o.Dispatchers - o.Busy
		n, err := s.open(ctx, o.Dispatchers)
		if err != nil {
			return nil, err
		}
		defer n.close(&err)
		ctx = n.ctx
		if o.Way == BareTable {
			stop, err := s.serveBare(ctx, r.Working, &handled)
			if err != nil {
				return nil, err
			}
			defer stop(&err) // before the node closes
		} else {
			free, err := n.occupy(o.Dispatchers, o.Busy, &handled)
			if err != nil {
				return nil, err
			}
			defer free()
		}
		w, err := s.openWriters(ctx, &o)
		if err != nil {
			return nil, err
		}
		defer w.close(&err)
		write = w.write
	}

	m := newMeter(o.Progress)
	// The first of each writer does not count: it prepares the statement, and may connect.
	var group errgroup.Group
	for w := range o.Writers {
		group.Go(func() error { return write(ctx, w, w) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	var inserted atomic.Int64
	before := handled.Load()
	began := time.Now()
	for w := range o.Writers {
		group.Go(func() error {
			for time.Since(began) < o.Duration {
				n := inserted.Add(1)
				if err := write(ctx, w, int(n)); err != nil {
					return err
				}
				if w == 0 && m.due() {
					m.report(Progress{Done: int(n)})
				}
			}
			return nil
		})
	}
	err = group.Wait()
	r.Took, r.Inserted, r.Handled = time.Since(began), inserted.Load(), handled.Load()-before
	return r, err
}

// occupy starts dispatchers and returns when so many of them are in their handlers, where they stay until free is called.
// The others handle what comes. Until then nothing may be enqueued.
func (n *node) occupy(dispatchers, busy int, handled *atomic.Int64) (free func(), err error) {
	held := make(chan struct{})
	var inHandler atomic.Int64
	all := make(chan struct{})
	n.dispatch(dispatchers, nil, func(*pgwake.ClaimedWorkItem, time.Time) error {
		if place := inHandler.Add(1); place > int64(busy) {
			handled.Add(1)
			return nil
		} else if place == int64(busy) {
			close(all)
		}
		select {
		case <-held:
		case <-n.ctx.Done():
		}
		return nil
	})
	free = func() { close(held) }
	if busy == 0 {
		return free, nil
	}
	for i := range busy {
		if _, err := n.EnqueueForWorker(n.ctx, pgwake.WorkItem{Name: "measure", Input: number(i)}, nil); err != nil {
			free()
			return nil, err
		}
	}
	select {
	case <-all:
		return free, nil
	case <-n.ctx.Done():
		free()
		return nil, context.Cause(n.ctx)
	}
}

// writers are what each of many writers calls.
type writers struct {
	write func(ctx context.Context, writer, n int) error
	close func(*error)
}

// openWriters opens a connection for each writer.
func (s stage) openWriters(ctx context.Context, o *WritersOptions) (*writers, error) {
	if o.Way == Library {
		n, err := s.openPooled(ctx, o.Writers, pgwake.Config{})
		if err != nil {
			return nil, err
		}
		return &writers{close: n.close, write: func(ctx context.Context, _, i int) error {
			_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "measure", Input: number(i)}, nil)
			return err
		}}, nil
	}
	sql, ok := map[WritersWay]string{BareTable: writersInsertSQL, Trigger: writersTriggerSQL}[o.Way]
	if !ok {
		return nil, fmt.Errorf("unknown way %q", o.Way)
	}
	conns, hangUpAll, err := s.connectMany(ctx, o.Writers)
	if err != nil {
		return nil, err
	}
	return &writers{close: func(*error) { hangUpAll() }, write: func(ctx context.Context, writer, n int) error {
		var id int64
		return conns[writer].QueryRow(ctx, sql, number(n)).Scan(&id)
	}}, nil
}

// connectMany opens so many connections.
func (s stage) connectMany(ctx context.Context, count int) (conns []*pgx.Conn, hangUpAll func(), err error) {
	hangUpAll = func() {
		for _, conn := range conns {
			hangUp(conn)
		}
	}
	for range count {
		conn, err := s.connect(ctx)
		if err != nil {
			hangUpAll()
			return nil, nil, err
		}
		conns = append(conns, conn)
	}
	return conns, hangUpAll, nil
}

// serveBare makes the bare table and has so many connections claim and delete its rows, one at a time. Its claims do not
// wait for the disk and its deletes do, as those of the library.
func (s stage) serveBare(ctx context.Context, connections int, handled *atomic.Int64) (stop func(*error), err error) {
	if err := s.exec(ctx, writersTableSQL); err != nil {
		return nil, err
	}
	conns, hangUpAll, err := s.connectMany(ctx, connections)
	if err != nil {
		return nil, err
	}
	for _, conn := range conns { // as the library's functions: the statistics of a queue are wrong most of the time
		for _, sql := range []string{"SET enable_seqscan = off", "SET enable_bitmapscan = off", "SET enable_sort = off"} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				hangUpAll()
				return nil, err
			}
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	for _, conn := range conns {
		group.Go(func() error {
			err := serveOne(ctx, conn, handled)
			if ctx.Err() != nil {
				return nil
			}
			return err
		})
	}
	return func(err *error) {
		cancel()
		*err = errors.Join(*err, group.Wait())
		hangUpAll()
	}, nil
}

func serveOne(ctx context.Context, conn *pgx.Conn, handled *atomic.Int64) error {
	for {
		var id int64
		claim := &pgx.Batch{}
		claim.Queue("SELECT set_config('synchronous_commit', 'off', true)")
		claim.Queue(writersClaimSQL).QueryRow(func(row pgx.Row) error { return row.Scan(&id) })
		switch err := conn.SendBatch(ctx, claim).Close(); {
		case errors.Is(err, pgx.ErrNoRows):
			if err := pause(ctx, time.Millisecond); err != nil {
				return err
			}
			continue
		case err != nil:
			return err
		}
		if _, err := conn.Exec(ctx, writersAckSQL, id); err != nil {
			return err
		}
		handled.Add(1)
	}
}
