package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/pgwake/pgwake/devpg"
)

// This file answers: what is kept of a run?

// record is the file of raw samples. Durations are in nanoseconds.
type record struct {
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`

	Postgres string `json:"postgres"`
	Source   string `json:"source"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	CPUs     int    `json:"cpus"`

	Results results `json:"results"`
}

func newRecord(s *devpg.Server) *record {
	return &record{
		Started:  time.Now(),
		Postgres: s.Version,
		Source:   s.Source,
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
		CPUs:     runtime.NumCPU(),
	}
}

// write puts the record into a new file and returns its name.
func (r *record) write(dir string) (string, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("keep the raw samples: %w", err)
	}
	name := filepath.Join(dir, r.Started.UTC().Format("20060102-150405.000")+".json")
	if err := os.WriteFile(name, append(text, '\n'), 0o644); err != nil {
		return "", fmt.Errorf("keep the raw samples: %w", err)
	}
	return name, nil
}
