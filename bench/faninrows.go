package main

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what do many messages cost, for one instance and for many, and does anybody wait for anybody?

func (r *results) fanInRows() (rows []row) {
	if len(r.FanIn) == 0 {
		return nil
	}
	first := r.FanIn[0]
	compare := func(name string, figure, base func(*measure.FanInResult) time.Duration, baseName string) {
		of := func(f func(*measure.FanInResult) time.Duration) perRound {
			return func(i int) time.Duration { return f(r.FanIn[i]) }
		}
		rows = append(rows, r.compare(name, len(r.FanIn), of(figure), of(base), baseName, atMost(1.5)))
	}
	median := func(s measure.Samples) time.Duration { return s.Summary().P50 }
	per1000 := func(s measure.Samples, messages int) time.Duration { return median(s) * 1000 / time.Duration(messages) }

	base := fmt.Sprintf(" (of %d)", first.Small)
	compare(fmt.Sprintf("turn of %d messages, fetch, per 1000 of them, p50", first.Large),
		func(f *measure.FanInResult) time.Duration { return per1000(f.LargeTurns.Fetch, f.Large) },
		func(f *measure.FanInResult) time.Duration { return per1000(f.SmallTurns.Fetch, f.Small) }, base)
	compare("  ack, per 1000 of them, p50",
		func(f *measure.FanInResult) time.Duration { return per1000(f.LargeTurns.Ack, f.Large) },
		func(f *measure.FanInResult) time.Duration { return per1000(f.SmallTurns.Ack, f.Small) }, base)
	compare("  fetch that meets one more meanwhile, p50",
		func(f *measure.FanInResult) time.Duration { return median(f.BehindLarge) },
		func(f *measure.FanInResult) time.Duration { return median(f.BehindSmall) }, base)

	base = fmt.Sprintf(" (%d)", first.Few)
	compare(fmt.Sprintf("turn of 1 message, %d instances with one, fetch, p50", first.Many),
		func(f *measure.FanInResult) time.Duration { return median(f.AmongMany.Fetch) },
		func(f *measure.FanInResult) time.Duration { return median(f.AmongFew.Fetch) }, base)
	compare("  ack, p50",
		func(f *measure.FanInResult) time.Duration { return median(f.AmongMany.Ack) },
		func(f *measure.FanInResult) time.Duration { return median(f.AmongFew.Ack) }, base)
	return rows
}

func (r *results) convoyRows() []row {
	if len(r.Convoy) == 0 {
		return nil
	}
	var apart, shared, crowded, ratios, crowdedRatios []float64
	var waits [3]measure.Convoy // of all rounds: apart, shared, crowded
	for _, c := range r.Convoy {
		apart, shared, crowded = append(apart, c.Apart.PerSecond()), append(shared, c.Shared.PerSecond()), append(crowded, c.Crowded.PerSecond())
		ratios = append(ratios, c.Shared.PerSecond()/c.Apart.PerSecond())
		crowdedRatios = append(crowdedRatios, c.Crowded.PerSecond()/c.Apart.PerSecond())
		for i, of := range []measure.Convoy{c.Apart, c.Shared, c.Crowded} {
			waits[i].Looks += of.Looks
			waits[i].Waits = append(waits[i].Waits, of.Waits...)
		}
	}
	seen := func(which func(*measure.LockWait) bool) (s [3]string, n int) {
		for i := range waits {
			s[i] = fmt.Sprint(waits[i].Waiting(which))
			n += waits[i].Waiting(which)
		}
		return s, n
	}
	ofAck := func(w *measure.LockWait) bool { return w.OfRow() && w.Function == "ack_work" }
	acks, none := seen(ofAck)
	others, _ := seen(func(w *measure.LockWait) bool { return w.OfRow() && w.Function != "ack_work" })
	rest, _ := seen(func(w *measure.LockWait) bool { return !w.OfRow() })
	return []row{
		{
			measure:  fmt.Sprintf("completions by %d workers, all to one instance: acks/s", r.Convoy[0].Workers),
			figure:   fmt.Sprintf("%.0f", measure.Median(shared)),
			baseline: fmt.Sprintf("%.0f (to instances of their own)", measure.Median(apart)),
			ratio:    fmt.Sprintf("%.2fx", measure.Median(ratios)),
			goal:     ">= 0.8x", met: measure.Median(ratios) >= 0.8,
		},
		{
			measure:  fmt.Sprintf("  with %d dispatchers", r.Convoy[0].Dispatchers),
			figure:   fmt.Sprintf("%.0f", measure.Median(crowded)),
			baseline: fmt.Sprintf("%.0f (to instances of their own, 1 dispatcher)", measure.Median(apart)),
			ratio:    fmt.Sprintf("%.2fx", measure.Median(crowdedRatios)),
		},
		{
			measure: fmt.Sprintf("  workers seen waiting for rows, in %d looks", waits[1].Looks+waits[2].Looks),
			figure:  acks[1] + ", " + acks[2], baseline: acks[0] + " (own)", goal: "0", met: none == 0,
		},
		{measure: "  dispatchers seen waiting for rows", figure: others[1] + ", " + others[2], baseline: others[0] + " (own)"},
		{measure: "  seen waiting for room or to notify", figure: rest[1] + ", " + rest[2], baseline: rest[0] + " (own)"},
	}
}
