package main

import (
	"context"
	"slices"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what can be run, and at which sizes?

// sizes of all scenarios.
type sizes struct {
	idle       measure.IdleOptions
	baseline   measure.BaselineOptions
	singles    measure.SinglesOptions
	pairs      measure.PairsOptions
	timers     measure.TimersOptions
	burst      measure.BurstOptions
	redelivery measure.RedeliveryOptions
	stress     measure.StressOptions
	histories  measure.HistoriesOptions
	fanIn      measure.FanInOptions
	convoy     measure.ConvoyOptions
}

var full = sizes{
	idle:       measure.IdleOptions{Duration: 3 * time.Minute},
	baseline:   measure.BaselineOptions{Rounds: 200},
	singles:    measure.SinglesOptions{Items: 500},
	pairs:      measure.PairsOptions{Pairs: 100},
	timers:     measure.TimersOptions{Timers: 300, Window: 6 * time.Second},
	burst:      measure.BurstOptions{Items: 50_000},
	redelivery: measure.RedeliveryOptions{Kills: 5, Items: 3, LockTimeout: 2 * time.Second},
	stress:     measure.StressOptions{Duration: 30 * time.Second},
	histories:  measure.HistoriesOptions{Turns: 200},
	fanIn:      measure.FanInOptions{Turns: 5, Large: 10_000, Singles: 300, Many: 100_000},
	convoy:     measure.ConvoyOptions{Acks: 5000},
}

var small = sizes{
	idle:       measure.IdleOptions{Duration: 10 * time.Second},
	baseline:   measure.BaselineOptions{Rounds: 60},
	singles:    measure.SinglesOptions{Items: 100},
	pairs:      measure.PairsOptions{Pairs: 25},
	timers:     measure.TimersOptions{Timers: 90, Window: 2 * time.Second},
	burst:      measure.BurstOptions{Items: 10_000},
	redelivery: measure.RedeliveryOptions{Kills: 2, Items: 2, LockTimeout: time.Second},
	stress:     measure.StressOptions{Duration: 5 * time.Second},
	histories:  measure.HistoriesOptions{Turns: 50},
	fanIn:      measure.FanInOptions{Turns: 2, Large: 2000, Singles: 60, Many: 10_000},
	convoy:     measure.ConvoyOptions{Acks: 400},
}

// results of all rounds, in the order of the rounds.
type results struct {
	Idle       []*measure.IdleResult       `json:"idle,omitempty"`
	ShortPoll  []*measure.ShortPollResult  `json:"short_poll,omitempty"`
	Baseline   []*measure.BaselineResult   `json:"baseline,omitempty"`
	Singles    []*measure.SinglesResult    `json:"singles,omitempty"` // of all producers
	Pairs      []*measure.PairsResult      `json:"pairs,omitempty"`
	Timers     []*measure.TimersResult     `json:"timers,omitempty"`
	Burst      []*measure.BurstResult      `json:"burst,omitempty"`
	Prefilled  []*measure.BurstResult      `json:"prefilled_burst,omitempty"`
	BareBurst  []time.Duration             `json:"bare_burst,omitempty"`
	Redelivery []*measure.RedeliveryResult `json:"redelivery,omitempty"`
	Stress     []*measure.StressResult     `json:"stress,omitempty"`
	Polled     []*measure.StressResult     `json:"polled_stress,omitempty"`
	Histories  []*measure.HistoriesResult  `json:"histories,omitempty"`
	FanIn      []*measure.FanInResult      `json:"fan_in,omitempty"`
	Convoy     []*measure.ConvoyResult     `json:"convoy,omitempty"`
}

type scenario struct {
	name string
	what string
	once bool // not in every round
	run  func(ctx context.Context, url string, s *sizes, to *results) error
}

const baseline = "baseline"

var scenarios = []scenario{
	{name: "idle", what: "statements of an idle node", once: true,
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.ShortPoll)(measure.ShortPoll(ctx, url, 0)); err != nil {
				return err
			}
			for _, timeout := range idlePollTimeouts {
				o := s.idle
				o.PollTimeout = timeout
				if err := add(&to.Idle)(measure.Idle(ctx, url, o)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: baseline, what: "bare notifications and claims",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Baseline)(measure.Baseline(ctx, url, s.baseline))
		}},
	{name: "single", what: "single items",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			for _, by := range producers {
				o := s.singles
				o.Producer = by
				if err := add(&to.Singles)(measure.Singles(ctx, url, o)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "pairs", what: "second items, soon after the first",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Pairs)(measure.Pairs(ctx, url, s.pairs))
		}},
	{name: "timers", what: "timers",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Timers)(measure.Timers(ctx, url, s.timers))
		}},
	{name: "burst", what: "bursts",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.BareBurst)(measure.BareBurst(ctx, url, s.burst)); err != nil {
				return err
			}
			o := s.burst
			if err := add(&to.Burst)(measure.Burst(ctx, url, o)); err != nil {
				return err
			}
			o.Prefill = true
			return add(&to.Prefilled)(measure.Burst(ctx, url, o))
		}},
	{name: "redelivery", what: "items of killed processes",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Redelivery)(measure.Redelivery(ctx, url, s.redelivery))
		}},
	{name: "stress", what: "orchestrations, pushed and polled",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.Stress)(measure.Stress(ctx, url, s.stress)); err != nil {
				return err
			}
			polled := s.stress
			polled.ShortPoll = shortPoll
			return add(&to.Polled)(measure.Stress(ctx, url, polled))
		}},
	{name: "history", what: "turns with short and long histories",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			return add(&to.Histories)(measure.Histories(ctx, url, s.histories))
		}},
	{name: "fanin", what: "completions fanned in to one instance, and many instances",
		run: func(ctx context.Context, url string, s *sizes, to *results) error {
			if err := add(&to.FanIn)(measure.FanIn(ctx, url, s.fanIn)); err != nil {
				return err
			}
			return add(&to.Convoy)(measure.LockConvoy(ctx, url, s.convoy))
		}},
}

// idlePollTimeouts of the dispatchers: how often they return and come again must not show at the server.
var idlePollTimeouts = []time.Duration{time.Second, time.Minute}

// shortPoll is how long the dispatchers of a polling loop pause when there is nothing.
const shortPoll = 50 * time.Millisecond

var producers = []measure.Producer{measure.OtherProvider, measure.PlainSQL, measure.SameProvider}

func names() (all []string) {
	for _, sc := range scenarios {
		all = append(all, sc.name)
	}
	return all
}

// needsBaseline reports whether the figures of a scenario are compared with those of the baseline.
func needsBaseline(name string) bool {
	return !slices.Contains([]string{"idle", "burst", "stress", "history", "fanin"}, name)
}

// add keeps a result.
func add[T any](to *[]T) func(T, error) error {
	return func(r T, err error) error {
		if err == nil {
			*to = append(*to, r)
		}
		return err
	}
}
