package main

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what do the results say of the event bus?

const (
	eventsLater   = 1.5
	eventsSlower  = 0.5 // the throughput of events over that of items
	longLogSlower = 1.2
	scheduleLate  = 10 * time.Millisecond
	logKept       = 50 * time.Millisecond
)

// eventMetrics are figures by name.
func (r *results) eventMetrics(put func(string, []float64)) {
	put("event_handler_ratio", each(r.Events, func(e *measure.EventsResult) float64 {
		return float64(e.Tx.FromCommit.Summary().P50) / float64(e.Items.FromCommit.Summary().P50)
	}))
	put("event_rate_ratio", each(r.Events, (*measure.EventsResult).RateRatio))
	put("event_log_ratio", each(r.EventLog, (*measure.EventLogResult).Ratio))
	put("event_log_kept_max_ms", each(r.EventLog, func(l *measure.EventLogResult) float64 { return inMillis(l.Beside.Summary().Max) }))
	put("schedule_late_p99_ms", each(r.Schedules, func(s *measure.SchedulesResult) float64 { return inMillis(s.Handled.Summary().P99) }))
	put("schedule_idle_statements", each(r.Schedules, func(s *measure.SchedulesResult) float64 { return float64(s.With - s.Without) }))
}

func (r *results) eventRows() (rows []row) {
	if n := len(r.Events); n > 0 {
		latency := func(of func(*measure.EventsResult) measure.Samples) func(int) measure.Summary {
			return func(i int) measure.Summary { return of(r.Events[i]).Summary() }
		}
		tx := latency(func(e *measure.EventsResult) measure.Samples { return e.Tx.FromCommit })
		plain := latency(func(e *measure.EventsResult) measure.Samples { return e.Plain.FromCommit })
		items := latency(func(e *measure.EventsResult) measure.Samples { return e.Items.FromCommit })
		sent := latency(func(e *measure.EventsResult) measure.Samples { return e.Tx.FromSend })
		itemsSent := latency(func(e *measure.EventsResult) measure.Samples { return e.Items.FromSend })
		rates := func(of func(*measure.EventsResult) *measure.DrainResult) []float64 {
			return each(r.Events, func(e *measure.EventsResult) float64 { return of(e).PerSecond() })
		}
		drain := rates(func(e *measure.EventsResult) *measure.DrainResult { return e.Drain })
		first := r.Events[0].Drain
		const claim = " (item, by FetchWorkItem)"
		rows = append(rows,
			r.compare("single event by another provider, commit to handler with a transaction, p50", n, p50(tx), p50(items), claim, atMost(eventsLater)),
			r.compare("  the emit included, p50", n, p50(sent), p50(itemsSent), " (item, the enqueue included)", atMost(eventsLater)),
			r.compare("  p99", n, p99(tx), p99(items), claim, noGoal),
			r.compare("  commit to handler without a transaction, p50", n, p50(plain), p50(items), claim, noGoal),
			rate(fmt.Sprintf("backlog of %d, %d handlers that do nothing, events with a transaction each", first.Items, first.Dispatchers), "events/s",
				drain, rates(func(e *measure.EventsResult) *measure.DrainResult { return e.ItemsDrain }), "items, fetched and acknowledged one by one", eventsSlower),
			rate("  against items with a transaction each", "events/s",
				drain, rates(func(e *measure.EventsResult) *measure.DrainResult { return e.ItemsTxDrain }), "HandleTx", 0),
			rate("  against items without, in batches", "events/s",
				drain, rates(func(e *measure.EventsResult) *measure.DrainResult { return e.SharedDrain }), "Handle, acks share commits", 0))
	}
	for _, l := range r.EventLog {
		rows = append(rows,
			r.compare(fmt.Sprintf("emit, %d events of the month in the log, p50", l.Rows), 1,
				p50(func(int) measure.Summary { return l.Full.Summary() }), p50(func(int) measure.Summary { return l.Empty.Summary() }), " (empty log)", atMost(longLogSlower)),
			row{measure: "  to fill it", figure: fmt.Sprint(l.Filled.Round(time.Millisecond))},
			r.compare(fmt.Sprintf("emit while the partitions of a log are made that has %d events in its default one, the longest of %d", l.Kept, len(l.Beside)), 1,
				longest(func(int) measure.Summary { return l.Beside.Summary() }), longest(func(int) measure.Summary { return l.Before.Summary() }),
				fmt.Sprintf(" (the longest of %d before)", len(l.Before)), under(logKept)),
			row{measure: "  to make them", figure: fmt.Sprint(l.Keep.Round(time.Millisecond))})
	}
	for _, s := range r.Schedules {
		of := func(samples measure.Samples) func(int) measure.Summary {
			return func(int) measure.Summary { return samples.Summary() }
		}
		polls := fmt.Sprintf(" (%d poll a table of next runs each second)", s.Nodes)
		added := s.With - s.Without
		rows = append(rows,
			r.compare(fmt.Sprintf("%d schedules each %v over %d nodes, tick to handler with a transaction, p50", s.Schedules, s.Every, s.Nodes), 1, p50(of(s.Handled)), p50(of(s.Polled)), polls, noGoal),
			r.compare("  p99", 1, p99(of(s.Handled)), p99(of(s.Polled)), polls, under(scheduleLate)),
			r.compare("  tick to event, p99", 1, p99(of(s.Emitted)), p99(of(s.Polled)), polls, noGoal),
			r.compare("  all at the same instants, tick to handler, p50", 1, p50(of(s.Together)), p50(of(s.Polled)), polls, noGoal),
			r.compare("  the last of them", 1, longest(of(s.Together)), longest(of(s.Polled)), polls, noGoal),
			row{measure: "  ticks that came again", figure: fmt.Sprint(s.Again), goal: "0", met: s.Again == 0},
			// When the periodic statement falls is chance: so one more is none that was added.
			row{measure: fmt.Sprintf("statements of a node in %v with %d schedules that are not due", s.IdleFor, s.Idle), figure: fmt.Sprint(s.With),
				baseline: fmt.Sprintf("%d (none), %d (%d that poll)", s.Without, s.PolledCalls, s.Nodes), goal: "none added", met: added <= 1})
	}
	return rows
}
