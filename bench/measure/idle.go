package measure

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: what does a node ask of the server while there is nothing to do?

// IdleOptions are the sizes of Idle.
type IdleOptions struct {
	Duration      time.Duration // Defaults to 15 s.
	Workers       int           // Dispatchers that fetch work items. Defaults to 48.
	Orchestrators int           // Dispatchers that fetch orchestrations. Defaults to 16; -1: none.
	PollTimeout   time.Duration // Of every fetch; the dispatchers then fetch again. Defaults to 1 s.
	Progress      func(Progress)
}

// IdleResult is what Idle found.
type IdleResult struct {
	Workers       int           `json:"workers"`
	Orchestrators int           `json:"orchestrators"`
	PollTimeout   time.Duration `json:"poll_timeout"`
	Duration      time.Duration `json:"duration"` // as it was

	How        string           `json:"how"`        // statements are counted
	StartUp    int64            `json:"start_up"`   // statements from opening the Provider until it was quiet
	Statements int64            `json:"statements"` // in Duration, after that
	Texts      map[string]int64 `json:"texts"`      // what they were, if the server tells
	Net        SafetyNet        `json:"safety_net"`
}

// PerSecond is the steady rate of statements.
func (r *IdleResult) PerSecond() float64 { return float64(r.Statements) / r.Duration.Seconds() }

const (
	// quietSpell without a statement means that a node has settled.
	quietSpell = 1500 * time.Millisecond
	// settling ends after so long whether it has settled or not; what goes on is counted as steady then.
	settling = 6 * time.Second
)

// Idle opens a Provider with dispatchers and counts the statements that the server saw from it while there
// was nothing to do: those of starting up apart, and then those of a while.
func Idle(ctx context.Context, url string, o IdleOptions) (r *IdleResult, err error) {
	orDefault(&o.Duration, 15*time.Second)
	orDefault(&o.Workers, 48)
	orDefault(&o.Orchestrators, 16)
	orDefault(&o.PollTimeout, time.Second)
	o.Orchestrators = max(o.Orchestrators, 0)
	defer func(ctx context.Context) { err = about(ctx, "idle", err) }(ctx)

	s := newStage(url)
	c, err := newCounter(ctx, url, pgx.Identifier{s.schema}.Sanitize())
	if err != nil {
		return nil, err
	}
	defer c.close(&err)
	s.url = c.URL
	defer s.drop(&err)
	start, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	n, err := s.open(ctx, o.Workers+o.Orchestrators)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	fetch := &pgwake.FetchOptions{PollTimeout: o.PollTimeout}
	n.dispatch(o.Workers, fetch, func(*pgwake.ClaimedWorkItem, time.Time) error { return nil })
	for range o.Orchestrators {
		n.loop(func() error {
			_, err := n.FetchOrchestrationItem(n.ctx, fetch)
			return err
		})
	}
	ctx = n.ctx
	if err := n.parked(o.Workers); err != nil {
		return nil, err
	}
	settled, err := c.settle(ctx, quietSpell)
	if err != nil {
		return nil, err
	}

	m := newMeter(o.Progress)
	now := settled
	for left := o.Duration; left > 0; left = o.Duration - time.Since(m.began) {
		if err := pause(ctx, min(left, time.Second/2)); err != nil {
			return nil, err
		}
		if now, err = c.read(ctx); err != nil {
			return nil, err
		}
		m.report(Progress{Statements: now.since(settled).total()})
	}
	added := now.since(settled)
	r = &IdleResult{
		Workers: o.Workers, Orchestrators: o.Orchestrators, PollTimeout: o.PollTimeout, Duration: time.Since(m.began),
		How: c.How, StartUp: settled.since(start).total(), Statements: added.total(), Texts: added,
	}
	r.Net, err = safetyNet(ctx, n.Provider)
	return r, err
}

// settle waits until no statement comes for a spell, and returns the counts then.
func (c *counter) settle(ctx context.Context, spell time.Duration) (calls, error) {
	began, quietSince := time.Now(), time.Now()
	last, err := c.read(ctx)
	for err == nil && time.Since(quietSince) < spell && time.Since(began) < settling {
		if err = pause(ctx, 100*time.Millisecond); err != nil {
			break
		}
		var now calls
		if now, err = c.read(ctx); err == nil && now.total() != last.total() {
			last, quietSince = now, time.Now()
		}
	}
	return last, err
}

// ShortPollResult is what ShortPoll found.
type ShortPollResult struct {
	Dispatchers int           `json:"dispatchers"` // on each of two queues
	Interval    time.Duration `json:"interval"`
	Duration    time.Duration `json:"duration"` // as it was
	Statements  int64         `json:"statements"`
}

// PerSecond is the rate of statements.
func (r *ShortPollResult) PerSecond() float64 { return float64(r.Statements) / r.Duration.Seconds() }

// ShortPoll is the baseline of Idle: 4 dispatchers on each of two queues do not wait for work, but make one
// bare claim every 50 ms, which finds none.
func ShortPoll(ctx context.Context, url string, d time.Duration) (r *ShortPollResult, err error) {
	orDefault(&d, 3*time.Second)
	defer func(ctx context.Context) { err = about(ctx, "idle's baseline", err) }(ctx)
	r = &ShortPollResult{Dispatchers: 4, Interval: 50 * time.Millisecond}

	s := newStage(url)
	c, err := newCounter(ctx, url, "UPDATE bare")
	if err != nil {
		return nil, err
	}
	defer c.close(&err)
	s.url = c.URL
	defer s.drop(&err)
	if err := s.createBare(ctx, 0); err != nil {
		return nil, err
	}
	polling, stop := context.WithCancel(ctx)
	defer stop()
	group, polling := errgroup.WithContext(polling)
	for range 2 * r.Dispatchers {
		conn, err := s.connect(ctx)
		if err != nil {
			stop()
			return nil, errors.Join(err, group.Wait())
		}
		group.Go(func() error {
			defer hangUp(conn)
			for pause(polling, r.Interval) == nil {
				if _, err := conn.Exec(polling, bareClaimSQL, 1); err != nil && polling.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	before, err := c.read(ctx)
	if err == nil {
		began := time.Now()
		err = pause(polling, d)
		r.Duration = time.Since(began)
	}
	if err == nil {
		var after calls
		if after, err = c.read(ctx); err == nil {
			r.Statements = after.since(before).total()
		}
	}
	stop()
	return r, errors.Join(err, group.Wait())
}
