package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
)

// This file answers: does an emit take longer because of what is in the log, or because of who keeps it?

// EventLogOptions are the sizes of EventLog.
type EventLogOptions struct {
	Rows     int // Events of this month in the log. Defaults to 10,000,000.
	Emits    int // Of each log. Defaults to 500.
	Kept     int // Events in the log that is kept while others emit. Defaults to 1,000,000.
	Progress func(Progress)
}

// EventLogResult is what emits took, each of one event that goes to one group, beside a log of so many rows and beside an empty one.
type EventLogResult struct {
	Rows   int           `json:"rows"`
	Filled time.Duration `json:"filled"` // it took to fill the log
	Full   Samples       `json:"full"`
	Empty  Samples       `json:"empty"`

	// Of a log for which nobody has made partitions yet, so that so many events are in its default one: emits, one after the other, while all
	// that is missing is made, and before that.
	Kept   int           `json:"kept"`
	Keep   time.Duration `json:"keep"` // it took to make them
	Beside Samples       `json:"beside"`
	Before Samples       `json:"before"`
}

// Ratio of the medians.
func (r *EventLogResult) Ratio() float64 {
	return float64(r.Full.Summary().P50) / max(float64(r.Empty.Summary().P50), 1)
}

//go:embed eventlog.sql
var eventLogSQL string

// EventLog takes the time of single emits. The two that are compared take turns.
func EventLog(ctx context.Context, url string, o EventLogOptions) (r *EventLogResult, err error) {
	orDefault(&o.Rows, 10_000_000)
	orDefault(&o.Emits, 500)
	orDefault(&o.Kept, 1_000_000)
	defer func(ctx context.Context) { err = about(ctx, "the log of events", err) }(ctx)
	r = &EventLogResult{Rows: o.Rows, Kept: o.Kept}
	m := newMeter(o.Progress)
	if err := r.keep(ctx, url, &o, m); err != nil {
		return nil, err
	}
	var emit [2]func(i int) (time.Duration, error)
	for full := range emit {
		s := newStage(url)
		defer s.drop(&err)
		n, bus, opened := s.openBus(ctx, connectionsFor(1))
		if opened != nil {
			return nil, opened
		}
		defer n.close(&err)
		if err := bus.Subscribe(ctx, "", []string{"measure.*"}, nil); err != nil {
			return nil, err
		}
		if full == 1 {
			began := time.Now()
			if err := s.fillLog(ctx, o.Rows, m); err != nil {
				return nil, err
			}
			r.Filled = time.Since(began)
		}
		if err := s.calm(ctx); err != nil {
			return nil, err
		}
		emit[full] = func(i int) (time.Duration, error) {
			began := time.Now()
			_, err := bus.Emit(ctx, fmt.Sprintf("measure.type%d", i%100), map[string]int{"order": i}, nil)
			return time.Since(began), err
		}
	}
	for i := range fetchCostWarmUps + o.Emits {
		empty, err := emit[0](i)
		if err != nil {
			return nil, err
		}
		full, err := emit[1](i)
		if err != nil {
			return nil, err
		}
		if i >= fetchCostWarmUps {
			r.Empty, r.Full = append(r.Empty, empty), append(r.Full, full)
		}
		if m.due() {
			m.report(Progress{Done: i + 1, Total: fetchCostWarmUps + o.Emits, Figures: r.Full.Summary()})
		}
	}
	return r, nil
}

//go:embed eventlog_forget.sql
var forgetPartitionsSQL string

// keep takes the time of emits while the log is kept.
func (r *EventLogResult) keep(ctx context.Context, url string, o *EventLogOptions, m *meter) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, bus, err := s.openBus(ctx, connectionsFor(1))
	if err != nil {
		return err
	}
	defer n.close(&err)
	if err := bus.Subscribe(ctx, "", []string{"measure.*"}, nil); err != nil {
		return err
	}
	if err := s.exec(ctx, forgetPartitionsSQL); err != nil {
		return err
	}
	if err := s.fillLog(ctx, o.Kept, m); err != nil {
		return err
	}
	if err := s.calm(ctx); err != nil {
		return err
	}
	emit := func(to *Samples) error {
		began := time.Now()
		_, err := bus.Emit(ctx, "measure.kept", nil, nil)
		*to = append(*to, time.Since(began))
		return err
	}
	for range fetchCostWarmUps {
		if err := emit(new(Samples)); err != nil {
			return err
		}
	}
	for range o.Emits {
		if err := emit(&r.Before); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	kept := make(chan struct{})
	group.Go(func() error {
		defer close(kept)
		began := time.Now()
		for state := ""; state != "done"; {
			if err := s.one(ctx, &state, `SELECT keep_event_log()`); err != nil {
				return err
			}
			if state == "large" {
				return errors.New("the log cannot be kept")
			}
		}
		r.Keep = time.Since(began)
		return nil
	})
	group.Go(func() error {
		for {
			select {
			case <-kept:
				return nil
			default:
			}
			if err := emit(&r.Beside); err != nil {
				return err
			}
		}
	})
	return group.Wait()
}

// fillLog writes events to the log, of this month.
func (s stage) fillLog(ctx context.Context, rows int, m *meter) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	const chunk = 100_000
	for first := 1; first <= rows; first += chunk {
		if _, err := conn.Exec(ctx, eventLogSQL, first, min(first+chunk-1, rows), rows); err != nil {
			return err
		}
		m.report(Progress{Done: first, Total: rows})
	}
	return nil
}
