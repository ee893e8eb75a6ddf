package measure

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: does a fetch take longer because of rows that it does not take?

// FetchCostOptions are the sizes of FetchCost. A size of 0 leaves the case out.
type FetchCostOptions struct {
	Backlog         int // Work items that are due.
	Locked          int // Work items that others hold.
	Timers          int // Work items that become due in an hour.
	LockedInstances int // Instances that others hold, each with one more message that is due.
	Fetches         int // Of each case and of its baseline. Defaults to 200.
	Progress        func(Progress)
}

// FetchCost is what fetches took in a table with many such rows, and in one that has little more than what is fetched.
type FetchCost struct {
	Case  string  `json:"case"`
	Rows  int     `json:"rows"`
	Full  Samples `json:"full"`
	Empty Samples `json:"empty"`
}

// Ratio of the medians.
func (c *FetchCost) Ratio() float64 {
	return float64(c.Full.Summary().P50) / max(float64(c.Empty.Summary().P50), 1)
}

// The cases of FetchCost.
const (
	CaseBacklog         = "backlog"
	CaseLocked          = "locked"
	CaseTimers          = "timers"
	CaseLockedInstances = "locked instances"
)

// fetchCostWarmUps is how many fetches of each do not count: they prepare statements and read what is cold.
const fetchCostWarmUps = 20

// FetchCosts takes the time of single fetches; acks, in between, do not count. The two that are compared take turns.
func FetchCosts(ctx context.Context, url string, o FetchCostOptions) (costs []*FetchCost, err error) {
	orDefault(&o.Fetches, 200)
	defer func(ctx context.Context) { err = about(ctx, "the cost of a fetch", err) }(ctx)
	m := newMeter(o.Progress)
	for _, c := range []struct {
		name string
		rows int
		fill func(context.Context, stage, *node, int) error
		take func(context.Context, *node) (time.Duration, error)
	}{
		{CaseBacklog, o.Backlog, func(ctx context.Context, s stage, _ *node, rows int) error {
			return s.fillWork(ctx, 0, rows, 0, false)
		}, takeWork},
		{CaseLocked, o.Locked, func(ctx context.Context, s stage, _ *node, rows int) error {
			return s.fillWork(ctx, 0, rows, time.Hour, true)
		}, takeWork},
		{CaseTimers, o.Timers, func(ctx context.Context, s stage, _ *node, rows int) error {
			return s.fillWork(ctx, 0, rows, time.Hour, false)
		}, takeWork},
		{CaseLockedInstances, o.LockedInstances, lockInstances, takeTurn},
	} {
		if c.rows == 0 {
			continue
		}
		cost := &FetchCost{Case: c.name, Rows: c.rows}
		if err := cost.measure(ctx, url, o.Fetches, c.fill, c.take, m); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		costs = append(costs, cost)
	}
	return costs, nil
}

func (c *FetchCost) measure(ctx context.Context, url string, fetches int, fill func(context.Context, stage, *node, int) error,
	take func(context.Context, *node) (time.Duration, error), m *meter) (err error) {
	var nodes [2]*node
	for i := range nodes {
		s := newStage(url)
		defer s.drop(&err)
		n, err := s.open(ctx, 8)
		if err != nil {
			return err
		}
		defer n.close(&err)
		if i == 1 {
			if err := fill(ctx, s, n, c.Rows); err != nil {
				return err
			}
		}
		if c.Case == CaseLockedInstances {
			err = sendTo(ctx, n, fetchCostWarmUps+fetches, func(i int) string { return "free-" + strconv.Itoa(i) })
		} else {
			err = s.fillWork(ctx, c.Rows, fetchCostWarmUps+fetches, 0, false)
		}
		if err != nil {
			return err
		}
		if err := s.exec(ctx, "VACUUM (ANALYZE) worker_queue, orchestrator_queue, instance_locks"); err != nil {
			return err
		}
		nodes[i] = n
	}
	for i := range fetchCostWarmUps + fetches {
		empty, err := take(ctx, nodes[0])
		if err != nil {
			return err
		}
		full, err := take(ctx, nodes[1])
		if err != nil {
			return err
		}
		if i >= fetchCostWarmUps {
			c.Empty, c.Full = append(c.Empty, empty), append(c.Full, full)
		}
		if m.due() {
			m.report(Progress{Done: i + 1, Total: fetchCostWarmUps + fetches, Figures: c.Full.Summary()})
		}
	}
	return nil
}

// takeWork fetches and acknowledges an item.
func takeWork(ctx context.Context, n *node) (time.Duration, error) {
	began := time.Now()
	item, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true})
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	return took, n.AckWorkItem(ctx, item.LockToken, nil)
}

// takeTurn fetches and acknowledges the turn of an instance that nobody holds.
func takeTurn(ctx context.Context, n *node) (time.Duration, error) {
	began := time.Now()
	item, err := n.FetchOrchestrationItem(ctx, nil) // it may take several looks to get past those that are held
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	return took, n.AckOrchestrationItem(ctx, item.LockToken, pgwake.OrchestrationAck{ExecutionID: item.ExecutionID,
		Metadata: pgwake.Metadata{Name: "measure", Status: pgwake.StatusCompleted}})
}

// lockInstances sends each instance a message, claims their turns, and sends each another message.
func lockInstances(ctx context.Context, _ stage, n *node, instances int) error {
	name := func(i int) string { return "held-" + strconv.Itoa(i) }
	if err := sendTo(ctx, n, instances, name); err != nil {
		return err
	}
	group, claiming := errgroup.WithContext(ctx)
	for range 8 {
		group.Go(func() error {
			for {
				_, err := n.FetchOrchestrationItem(claiming, &pgwake.FetchOptions{NoWait: true, LockTimeout: time.Hour})
				if errors.Is(err, pgwake.ErrNoWork) {
					return nil
				}
				if err != nil {
					return err
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return sendTo(ctx, n, instances, name)
}
