package main

import (
	"runtime"
	"time"

	"github.com/pgwake/pgwake/bench/keep"
	"github.com/pgwake/pgwake/devpg"
)

// This file answers: what is kept of a run?

// record is the file that a run leaves. Durations are in nanoseconds.
type record struct {
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`

	Commit   string `json:"commit"`
	Postgres string `json:"postgres"`
	Source   string `json:"source"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	CPUs     int    `json:"cpus"`
	Rounds   int    `json:"rounds"`

	Settings []string                 `json:"settings"` // of everybody
	Metrics  map[string]float64       `json:"metrics"`  // see results.metrics
	Took     map[string]time.Duration `json:"took"`     // by scenario
	Results  results                  `json:"results"`  // raw samples
}

func newRecord(s *devpg.Server) *record {
	return &record{
		Started:  time.Now(),
		Commit:   keep.Commit(),
		Postgres: s.Version,
		Source:   s.Source,
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
		CPUs:     runtime.NumCPU(),
		Took:     map[string]time.Duration{},
	}
}

// finish adds what follows from the samples.
func (r *record) finish(rounds int) {
	r.Finished, r.Rounds = time.Now(), rounds
	r.Settings, r.Metrics = r.Results.settings(), r.Results.metrics()
}
