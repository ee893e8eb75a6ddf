package measure

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"golang.org/x/sync/errgroup"
)

// This file answers: how late do schedules come, and what do those cost that are not due?

// SchedulesOptions are the sizes of Schedules.
type SchedulesOptions struct {
	Schedules int           // that tick. Defaults to 1,000.
	Every     time.Duration // each of them, in whole seconds, up to 30. Their ticks are evenly apart from each other, and then at the same instants. Defaults to 10 s.
	Nodes     int           // Defaults to 5.
	Duration  time.Duration // Defaults to 1 min.
	Idle      int           // schedules that are not due. Defaults to 10,000.
	IdleFor   time.Duration // for which statements are counted, with them and without. Defaults to 3 min.
	Progress  func(Progress)
}

// SchedulesResult is what Schedules found.
type SchedulesResult struct {
	Schedules  int           `json:"schedules"`
	Every      time.Duration `json:"every"`
	Nodes      int           `json:"nodes"`
	Handled    Samples       `json:"handled"` // from each tick to the handler of its event
	Emitted    Samples       `json:"emitted"` // from each tick to its event, by the server's clock alone
	Again      int           `json:"again"`   // ticks beyond the first of an instant
	ClockError time.Duration `json:"clock_error"`

	Together Samples `json:"together"` // as Handled, where all of them tick at the same instants

	// Of as many, by as many processes each of which looks once a second into a table of next runs, from each instant until it has it.
	Polled Samples `json:"polled"`

	Idle        int              `json:"idle"`
	IdleFor     time.Duration    `json:"idle_for"`
	How         string           `json:"how"`          // statements are counted
	Without     int64            `json:"without"`      // statements of a node in IdleFor, without any schedule
	With        int64            `json:"with"`         // and with those that are not due
	WithTexts   map[string]int64 `json:"with_texts"`   // what they were, if the server tells
	PolledCalls int64            `json:"polled_calls"` // how often the processes above looked in IdleFor
}

// Schedules measures schedules that tick, and then those that do not.
func Schedules(ctx context.Context, url string, o SchedulesOptions) (r *SchedulesResult, err error) {
	orDefault(&o.Schedules, 1000)
	orDefault(&o.Every, 10*time.Second)
	orDefault(&o.Nodes, 5)
	orDefault(&o.Duration, time.Minute)
	orDefault(&o.Idle, 10_000)
	orDefault(&o.IdleFor, 3*time.Minute)
	defer func(ctx context.Context) { err = about(ctx, "schedules", err) }(ctx)
	r = &SchedulesResult{Schedules: o.Schedules, Every: o.Every, Nodes: o.Nodes, Idle: o.Idle, IdleFor: o.IdleFor,
		PolledCalls: int64(o.Nodes) * int64(o.IdleFor/pollEach)}
	var again int
	if r.Handled, r.Emitted, again, err = r.tick(ctx, url, &o, false); err != nil {
		return nil, err
	}
	crowded := o
	crowded.Duration = 3 * o.Every
	if r.Together, _, r.Again, err = r.tick(ctx, url, &crowded, true); err != nil {
		return nil, err
	}
	r.Again += again
	if err := r.poll(ctx, url, &o); err != nil {
		return nil, err
	}
	return r, r.rest(ctx, url, &o)
}

// pollEach is the pace of those that poll.
const pollEach = time.Second

// tick has schedules tick, evenly apart or at the same instants, and returns how late their handlers and their events were, and how many came again.
func (r *SchedulesResult) tick(ctx context.Context, url string, o *SchedulesOptions, together bool) (late, emitted Samples, again int, err error) {
	s := newStage(url)
	defer s.drop(&err)
	clock, err := newServerClock(ctx, url)
	if err != nil {
		return nil, nil, 0, err
	}
	type handled struct{ due, inHand time.Time }
	var mu sync.Mutex
	var all []handled
	var first *eventbus.Bus
	for range o.Nodes {
		n, bus, opened := s.openBus(ctx, eventNodeConnections)
		if opened != nil {
			return nil, nil, 0, opened
		}
		defer n.close(&err)
		worker, failed := bus.Node(ctx, nil)
		if failed == nil {
			failed = worker.On(ctx, measured, func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
				now := handled{inHand: time.Now()}
				var of struct {
					At time.Time `json:"scheduled_at"`
				}
				err := json.Unmarshal(e.Metadata, &of)
				now.due = of.At
				mu.Lock()
				defer mu.Unlock()
				all = append(all, now)
				return err
			})
		}
		if failed == nil {
			failed = worker.Start(ctx)
		}
		if failed != nil {
			return nil, nil, 0, failed
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), farewell)
			defer cancel()
			err = errors.Join(err, worker.Stop(ctx))
		}()
		first = bus
	}
	began := time.Now()
	for i := range o.Schedules {
		cron := fmt.Sprintf("*/%d * * * * *", o.Every/time.Second)
		if !together {
			cron = fmt.Sprintf("@every %ds", o.Every/time.Second)
			if err := pause(ctx, time.Until(began.Add(o.Every*time.Duration(i)/time.Duration(o.Schedules)))); err != nil {
				return nil, nil, 0, err
			}
		}
		if _, err := first.Schedule(ctx, eventbus.Schedule{Name: fmt.Sprint(i), Cron: cron, Type: measured}); err != nil {
			return nil, nil, 0, err
		}
	}
	if err := pause(ctx, o.Every); err != nil { // each has come once
		return nil, nil, 0, err
	}
	from := clock.server(time.Now())
	m := newMeter(o.Progress)
	for left := o.Duration; left > 0; left = o.Duration - time.Since(m.began) {
		if err := pause(ctx, min(left, time.Second/2)); err != nil {
			return nil, nil, 0, err
		}
		m.report(Progress{Done: int(time.Since(m.began) / time.Second), Total: int(o.Duration / time.Second)})
	}
	if err := clock.finish(ctx); err != nil {
		return nil, nil, 0, err
	}
	to := clock.server(time.Now())
	r.ClockError = max(r.ClockError, clock.uncertainty())
	mu.Lock()
	defer mu.Unlock()
	for _, h := range all {
		if h.due.After(from) && h.due.Before(to) {
			late = append(late, clock.server(h.inHand).Sub(h.due))
		}
	}
	if len(late) == 0 {
		return nil, nil, 0, errors.New("no schedule came")
	}
	err = withConn(ctx, url, func(conn *pgx.Conn) error {
		if err := searchPath(ctx, conn, s.schema); err != nil {
			return err
		}
		rows, err := conn.Query(ctx, `SELECT e.emitted_at - d.due FROM event_log e CROSS JOIN LATERAL (SELECT (e.metadata ->> 'scheduled_at')::timestamptz AS due) d WHERE d.due > $1 AND d.due < $2`, from, to)
		if err != nil {
			return err
		}
		if emitted, err = pgx.CollectRows(rows, pgx.RowTo[time.Duration]); err != nil {
			return err
		}
		return conn.QueryRow(ctx, `SELECT count(*) - count(DISTINCT (scheduled_task_id, metadata ->> 'scheduled_at')) FROM event_log`).Scan(&again)
	})
	return late, emitted, again, err
}

var (
	//go:embed schedules_table.sql
	schedulesTableSQL string
	//go:embed schedules_claim.sql
	schedulesClaimSQL string
	//go:embed schedules_fill.sql
	schedulesFillSQL string
)

// poll has as many processes look into a table of next runs.
func (r *SchedulesResult) poll(ctx context.Context, url string, o *SchedulesOptions) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 1) // for the schema
	if err != nil {
		return err
	}
	n.close(&err)
	if err != nil {
		return err
	}
	clock, err := newServerClock(ctx, url)
	if err != nil {
		return err
	}
	if err := s.exec(ctx, schedulesTableSQL); err != nil {
		return err
	}
	if err := s.exec(ctx, `INSERT INTO next_runs SELECT i, clock_timestamp() + $1::interval * i / $2::integer FROM generate_series(1, $2::integer) AS i`, o.Every, o.Schedules); err != nil {
		return err
	}
	group, polling := errgroup.WithContext(ctx)
	polling, stop := context.WithTimeout(polling, o.Every+min(o.Duration, 2*o.Every))
	defer stop()
	var mu sync.Mutex
	for range o.Nodes {
		conn, err := s.connect(ctx)
		if err != nil {
			stop()
			return errors.Join(err, group.Wait())
		}
		phase := rand.N(pollEach)
		group.Go(func() error {
			defer hangUp(conn)
			for wait := phase; pause(polling, wait) == nil; wait = pollEach {
				rows, err := conn.Query(ctx, schedulesClaimSQL, o.Every)
				if err != nil {
					return err
				}
				due, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
				if err != nil {
					return err
				}
				inHand := clock.server(time.Now())
				mu.Lock()
				for _, at := range due {
					r.Polled = append(r.Polled, inHand.Sub(at))
				}
				mu.Unlock()
			}
			return nil
		})
	}
	return group.Wait()
}

// rest counts statements of a node without schedules, and with many that are not due.
func (r *SchedulesResult) rest(ctx context.Context, url string, o *SchedulesOptions) (err error) {
	s := newStage(url)
	c, err := newCounter(ctx, url, pgx.Identifier{s.schema}.Sanitize())
	if err != nil {
		return err
	}
	defer c.close(&err)
	r.How = c.How
	s.url = c.URL
	defer s.drop(&err)
	n, err := s.openPooled(ctx, eventNodeConnections, pgwake.Config{})
	if err != nil {
		return err
	}
	defer n.close(&err)
	bus, err := eventbus.New(ctx, n.Provider, nil)
	if err != nil {
		return err
	}
	worker, err := bus.Node(ctx, nil)
	if err == nil {
		err = worker.On(ctx, measured, func(context.Context, *eventbus.Event, pgx.Tx) error { return nil })
	}
	if err == nil {
		err = worker.Start(ctx)
	}
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		err = errors.Join(err, worker.Stop(ctx))
	}()
	count := func() (calls, error) {
		before, err := c.settle(ctx, quietSpell)
		if err == nil {
			err = pause(ctx, o.IdleFor)
		}
		if err != nil {
			return nil, err
		}
		after, err := c.read(ctx)
		return after.since(before), err
	}
	without, err := count()
	if err != nil {
		return err
	}
	if err := s.exec(ctx, schedulesFillSQL, o.Idle); err != nil {
		return err
	}
	with, err := count()
	r.Without, r.With, r.WithTexts = without.total(), with.total(), with
	return err
}
