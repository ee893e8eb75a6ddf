package main

import (
	"context"
	"math"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/colorprofile"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: how does the live view begin and end, and what is it where there is no terminal?

func (a *app) topCommand() *cobra.Command {
	var every time.Duration
	var once bool
	c := &cobra.Command{
		Use: "top", Short: "Watch queues, lanes, nodes, modes, wake reasons, rates and latencies, live", Args: cobra.NoArgs,
		Long: `Watch what goes on: queues and how long the oldest item has waited, the nodes with their modes and lanes, what wakes them, rates and latencies.
The nodes are asked each time, and say so themselves; those that do not listen cannot be asked. Keys are shown by ?.
Where the output is no terminal, or a dumb one, and with --once or --json, it is one picture, of what happens in --every.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if once || a.asJSON || !a.isTerminal() || a.env("TERM") == "dumb" { // which cannot be drawn on
				return a.top(c.Context(), every, a.topOnce)
			}
			return endless(c.Context(), a.top(c.Context(), every, a.topLive))
		},
	}
	c.Flags().DurationVar(&every, "every", time.Second, "how often to look")
	c.Flags().BoolVar(&once, "once", false, "print one picture, and end")
	return c
}

// leastEvery keeps top from being a load of its own.
const leastEvery = 100 * time.Millisecond

// top shows pictures for as long as a function looks at them.
func (a *app) top(ctx context.Context, every time.Duration, show func(context.Context, <-chan picture) error) error {
	if every < leastEvery {
		return usagef("--every 1s", "every %s is too often", every)
	}
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithCancel(ctx)
	come := pictures(ctx, p, every, a.now)
	defer func() { // before the Provider ends
		cancel()
		for range come {
		}
	}()
	return show(ctx, come)
}

// topLive draws them until somebody has seen enough.
func (a *app) topLive(ctx context.Context, come <-chan picture) error {
	config, err := a.config()
	if err != nil {
		return err
	}
	m := newTopModel(a, place(config)+", schema "+a.schema, come)
	options := []tea.ProgramOption{tea.WithContext(ctx), tea.WithInput(a.in), tea.WithOutput(a.output.w.Forward), tea.WithEnvironment(a.environ)}
	if a.noColor {
		options = append(options, tea.WithColorProfile(colorprofile.ASCII))
	}
	_, err = tea.NewProgram(m, options...).Run()
	return err
}

// topOnce prints what two of them tell. Without both it prints nothing, which could be taken for a database that has nothing to do.
func (a *app) topOnce(ctx context.Context, come <-chan picture) error {
	var seen [2]picture
	for i := range seen {
		pic, more := <-come
		if !more {
			return ctx.Err()
		}
		if pic.err != nil {
			return pic.err
		}
		seen[i] = pic
	}
	t := newTopModel(a, a.schema, nil)
	t.width = math.MaxInt32 // whoever reads it has to have all of it
	t.take(seen[0])
	t.take(seen[1])
	if a.asJSON {
		return a.printJSON(t.asJSON())
	}
	a.printf("%s\n", t.text())
	return nil
}

// topJSON is what top prints as JSON.
type topJSON struct {
	Due        int64            `json:"due"`
	Delayed    int64            `json:"delayed"`
	Leased     int64            `json:"leased"`
	KeptBack   int64            `json:"kept_back"`
	Dead       int64            `json:"dead_letters"`
	OldestWait float64          `json:"oldest_wait_seconds"`
	CamePerS   float64          `json:"came_per_second"`
	WentPerS   float64          `json:"went_per_second"`
	LooksPerS  float64          `json:"looks_per_second"`
	LatencyP50 float64          `json:"wake_latency_p50_ms"`
	LatencyP99 float64          `json:"wake_latency_p99_ms"`
	Reasons    map[string]int64 `json:"finds_by_reason"`
	Paused     []string         `json:"paused"`
	Queues     []depthJSON      `json:"queues"`
	Nodes      []nodeJSON       `json:"nodes"`
}

type depthJSON struct {
	Queue      string  `json:"queue"`
	Namespace  string  `json:"namespace"`
	Tag        string  `json:"tag,omitempty"`
	Due        int64   `json:"due"`
	Delayed    int64   `json:"delayed"`
	Leased     int64   `json:"leased"`
	KeptBack   int64   `json:"kept_back"`
	OldestWait float64 `json:"oldest_wait_seconds"`
}

type nodeJSON struct {
	Key       int32      `json:"key"`
	Host      string     `json:"host,omitempty"`
	PID       int        `json:"pid,omitempty"`
	Address   string     `json:"address,omitempty"`
	Listening bool       `json:"listening"`
	Mode      string     `json:"mode,omitempty"`
	Parked    int        `json:"parked"`
	Items     int64      `json:"items"`
	Problems  []string   `json:"problems,omitempty"`
	Lanes     []laneJSON `json:"lanes,omitempty"`
}

type laneJSON struct {
	Queue       string   `json:"queue"`
	Namespaces  []string `json:"namespaces"` // null: all
	Labels      []string `json:"labels"`     // null: all
	Dispatchers int      `json:"dispatchers"`
	Waiting     bool     `json:"waiting"`
}

func (m *topModel) asJSON() topJSON {
	s := glance.SumsOf(m.now.Depths)
	c := m.change
	of := topJSON{Due: s.Due, Delayed: s.Delayed, Leased: s.Leased, KeptBack: s.KeptBack, Dead: m.now.Letters, OldestWait: waitOf(m.now.At, m.now.Oldest),
		CamePerS: c.Came, WentPerS: c.Went, LooksPerS: c.Looks, LatencyP50: inMillis(c.Latency.Quantile(0.5)), LatencyP99: inMillis(c.Latency.Quantile(0.99)),
		Reasons: m.now.Reasons(), Paused: m.now.Paused, Queues: []depthJSON{}, Nodes: []nodeJSON{}}
	for _, d := range m.now.Depths {
		of.Queues = append(of.Queues, depthJSON{d.Queue.String(), d.Namespace, d.Tag, d.Due, d.Delayed, d.Leased, d.KeptBack, waitOf(m.now.At, d.OldestDue)})
	}
	for _, n := range m.now.Nodes {
		of.Nodes = append(of.Nodes, nodeOf(n, m.now.Reports))
	}
	return of
}

func nodeOf(n pgwake.NodeInfo, reports map[int32]pgwake.NodeReport) nodeJSON {
	of := nodeJSON{Key: n.Key, Address: n.Address, Listening: n.Listening}
	if r, said := reports[n.Key]; said {
		of.Host, of.PID, of.Mode = r.Host, r.PID, r.Stats.Mode.String()
		of.Parked = r.Stats.Worker.Parked + r.Stats.Orchestrator.Parked
		of.Items = r.Stats.Worker.Items + r.Stats.Orchestrator.Items
		for _, problem := range r.Problems {
			of.Problems = append(of.Problems, problem.String())
		}
	}
	for _, l := range n.Lanes {
		of.Lanes = append(of.Lanes, laneJSON{l.Queue.String(), l.Namespaces, l.Labels, l.Dispatchers, l.Waiting})
	}
	return of
}

func waitOf(now, since time.Time) float64 {
	if since.IsZero() {
		return 0
	}
	return max(0, now.Sub(since).Seconds())
}

func inMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
