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
	Degraded               // work is done, though later, or not all of it; or something has just failed
	Unknown                // Run has not begun
	Unhealthy              // no work can be done
)

func (s HealthStatus) String() string {
	return [...]string{"healthy", "degraded", "unknown", "unhealthy"}[s]
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

// partOf is what a Problem of a Provider is with, and how bad that is. Queries that fail skip polls when there are ten in a row: until
// then it may have been a hiccup.
var partOf = map[pgwake.Part]struct {
	part   string
	status HealthStatus
}{
	pgwake.PartProvider:      {"source", Unhealthy},
	pgwake.PartListener:      {"listener", Degraded},
	pgwake.PartNotifications: {"notifications", Degraded},
	pgwake.PartPolls:         {"fallback", Unhealthy},
	pgwake.PartDatabase:      {"database", Degraded},
	pgwake.PartProducers:     {"producers", Degraded},
	pgwake.PartEngine:        {"engine", Degraded},
}

const (
	// A namespace of which so many attempts in a row have failed cannot be served.
	failuresOfOneAway = 5
	// What is wrong with so many namespaces is said of each.
	mostReasons = 10
)

// Health reports on the coordinators and on their Sources, as far as these say (pgwake.Provider.Health; a stream is known by what
// becomes of fetches alone), and asks no database anything. What is done no work for on purpose is healthy: namespaces in ModeShadow or
// ModeDisabled, and those that are paused. Safe for concurrent use.
func (c *Coordinators) Health() Health {
	var h Health
	sources := make([]Health, len(c.sources))
	say, unhealthy := false, 0
	for i, s := range c.sources {
		source, ok := s.(interface{ Health() pgwake.Health })
		if !ok {
			continue
		}
		say = true
		for _, problem := range source.Health().Problems {
			p, known := partOf[problem.With]
			if !known {
				p.part, p.status = string(problem.With), Degraded
			}
			sources[i].note(p.part, p.status, problem.Text)
			sources[i].Status = max(sources[i].Status, p.status)
		}
		if sources[i].Status == Unhealthy {
			unhealthy++
		}
	}
	if say {
		for _, part := range []string{"listener", "notifications", "fallback", "database"} {
			h.note(part, Healthy)
		}
	}
	for i, source := range sources {
		for _, p := range source.Parts {
			if unhealthy < len(sources) { // the others do their work
				p.Status = min(p.Status, Degraded)
			}
			if len(sources) > 1 {
				for j := range p.Reasons {
					p.Reasons[j] = fmt.Sprintf("source %d: %s", i, p.Reasons[j])
				}
			}
			h.note(p.Part, p.Status, p.Reasons...)
		}
	}
	c.healthOfCoordinators(&h)
	for _, p := range h.Parts {
		h.Status = max(h.Status, p.Status)
	}
	return h
}

func (c *Coordinators) healthOfCoordinators(h *Health) {
	const part = "coordinators"
	h.note(part, Healthy)
	c.mu.Lock()
	begun, over := c.serving != nil, c.over
	watching := slices.Clone(c.watching)
	c.mu.Unlock()
	switch {
	case c.err != nil:
		h.note(part, Unhealthy, c.err.Error())
	case !begun:
		h.note(part, Unknown, "Run has not begun")
	case over:
		h.note(part, Unhealthy, "Run is about to end, or has ended")
	}
	all, left, failing := c.Namespaces(), c.leftOut(), 0
	mute := 0 // Sources that cannot tell of namespaces
	for i, w := range watching {
		if w.err != nil {
			h.note(part, Degraded, fmt.Sprintf("namespaces of source %d: %v", i, w.err))
			mute++
		}
	}
	if len(all)+len(left) == 0 && mute == len(watching) {
		h.note(part, Unhealthy, "no namespace is known")
	}
	away := len(left) // namespaces that cannot be served
	for _, err := range left {
		if failing++; failing <= mostReasons {
			h.note(part, Degraded, err.Error())
		}
	}
	for _, n := range all {
		if n.Err == nil {
			continue
		}
		if failing++; failing <= mostReasons {
			h.note(part, Degraded, fmt.Sprintf("namespace %s: %v", n.Namespace, n.Err))
		}
		if n.Failures >= failuresOfOneAway {
			away++
		}
	}
	if failing > mostReasons {
		h.note(part, Degraded, fmt.Sprintf("and %d more namespaces", failing-mostReasons))
	}
	if away == len(all)+len(left) && away > 0 {
		h.note(part, Unhealthy, "no namespace can be served")
	}
}

// note adds what is wrong with a part.
func (h *Health) note(part string, status HealthStatus, reasons ...string) {
	i := slices.IndexFunc(h.Parts, func(p HealthPart) bool { return p.Part == part })
	if i < 0 {
		h.Parts = append(h.Parts, HealthPart{Part: part})
		i = len(h.Parts) - 1
	}
	p := &h.Parts[i]
	p.Status = max(p.Status, status)
	p.Reasons = append(p.Reasons, reasons...)
}

// HealthHandler answers GET requests whose paths end in /livez and /readyz, with Health as JSON. The process is alive, with 200, as long
// as it can say so: nothing that Health knows is mended by another process. It is ready, with 200, while Run is at work and
// work is done, Degraded or not; otherwise it answers 503. It asks the database nothing. Reasons tell of hosts, users and databases as
// errors do: they are not for the public.
func (c *Coordinators) HealthHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, code := c.Health(), http.StatusOK
		switch {
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "GET or HEAD", http.StatusMethodNotAllowed)
			return
		case strings.HasSuffix(r.URL.Path, "/readyz"):
			if h.Status >= Unknown {
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
