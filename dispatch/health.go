package dispatch

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/pgwake/pgwake"
)

// This file answers: do the Coordinators do their work?

// HealthStatus says how well something does.
type HealthStatus int

const (
	Healthy   HealthStatus = iota
	Unknown                // Run has not begun, or the Source does not say
	Degraded               // work is done, though later, or not all of it
	Unhealthy              // no work is done
)

func (s HealthStatus) String() string {
	return [...]string{"healthy", "unknown", "degraded", "unhealthy"}[s]
}

// MarshalText implements encoding.TextMarshaler.
func (s HealthStatus) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// HealthPart is how one part of the whole does.
type HealthPart struct {
	Part    string       `json:"part"` // listener, notifications, fallback, database, producers, engine, source, coordinators
	Status  HealthStatus `json:"status"`
	Reasons []string     `json:"reasons,omitempty"` // what is wrong, for an operator
}

// Health is how the Coordinators do: the worst of its parts.
type Health struct {
	Status HealthStatus `json:"status"`
	Parts  []HealthPart `json:"parts"`
}

// partOf is what a Problem of a Provider is with, and how bad that is.
var partOf = map[pgwake.Part]struct {
	part   string
	status HealthStatus
}{
	pgwake.PartProvider:      {"source", Unhealthy},
	pgwake.PartListener:      {"listener", Degraded},
	pgwake.PartNotifications: {"notifications", Degraded},
	pgwake.PartPolls:         {"fallback", Degraded},
	pgwake.PartDatabase:      {"database", Unhealthy},
	pgwake.PartProducers:     {"producers", Degraded},
	pgwake.PartEngine:        {"engine", Degraded},
}

// Health reports on the coordinators and on their Sources, as far as these say (pgwake.Provider.Health), and asks no database
// anything. Safe for concurrent use.
func (c *Coordinators) Health() Health {
	var h Health
	for _, part := range []string{"listener", "notifications", "fallback", "database", "coordinators"} {
		h.note(part, Healthy, "")
	}
	for i, s := range c.sources {
		where := ""
		if len(c.sources) > 1 {
			where = fmt.Sprintf("source %d: ", i)
		}
		source, ok := s.(interface{ Health() pgwake.Health })
		if !ok {
			continue
		}
		for _, problem := range source.Health().Problems {
			p, known := partOf[problem.With]
			if !known {
				p.part, p.status = string(problem.With), Degraded
			}
			h.note(p.part, p.status, where+problem.Text)
		}
	}
	c.healthOfCoordinators(&h)
	for _, p := range h.Parts {
		h.Status = max(h.Status, p.Status)
	}
	return h
}

func (c *Coordinators) healthOfCoordinators(h *Health) {
	c.mu.Lock()
	begun, over := c.serving != nil, c.over
	c.mu.Unlock()
	switch {
	case c.err != nil:
		h.note("coordinators", Unhealthy, c.err.Error())
	case !begun:
		h.note("coordinators", Unknown, "Run has not begun")
	case over:
		h.note("coordinators", Unhealthy, "Run is about to end, or has ended")
	}
	all, failing := c.Namespaces(), 0
	for _, n := range all {
		if n.Err != nil {
			failing++
			h.note("coordinators", Degraded, fmt.Sprintf("namespace %s: %v", n.Namespace, n.Err))
		}
	}
	if failing > 0 && failing == len(all) {
		h.note("coordinators", Unhealthy, "no namespace can be served")
	}
}

// note adds what is wrong with a part.
func (h *Health) note(part string, status HealthStatus, reason string) {
	i := slices.IndexFunc(h.Parts, func(p HealthPart) bool { return p.Part == part })
	if i < 0 {
		h.Parts = append(h.Parts, HealthPart{Part: part})
		i = len(h.Parts) - 1
	}
	p := &h.Parts[i]
	p.Status = max(p.Status, status)
	if reason != "" {
		p.Reasons = append(p.Reasons, reason)
	}
}

// HealthHandler answers GET requests whose paths end in /livez and /readyz, with Health as JSON. The process is alive, with 200, as long
// as it can say so: nothing that Health knows is mended by another process. It is ready, with 200, while Run is at work and
// work is done, Degraded or not; otherwise it answers 503. It asks the database nothing.
func (c *Coordinators) HealthHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, code := c.Health(), http.StatusOK
		switch {
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "GET or HEAD", http.StatusMethodNotAllowed)
			return
		case strings.HasSuffix(r.URL.Path, "/readyz"):
			if h.Status == Unhealthy || h.Status == Unknown {
				code = http.StatusServiceUnavailable
			}
		case !strings.HasSuffix(r.URL.Path, "/livez"):
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(h) // who asked may have gone
	})
}
