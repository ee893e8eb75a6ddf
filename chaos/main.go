// Command chaos runs a deployment of several processes on one PostgreSQL, lets things go wrong, and checks that
// pgwake keeps its promises.
//
//	go run ./chaos                        a minute with a random seed
//	go run ./chaos -seed 7 -for 3m        the faults of seed 7, longer
//	go run ./chaos -seeds 1-100 -for 3m   one seed after the other, each with a line in a file of results
//	go run ./chaos -seed 7 -plan          what is to happen, without doing it
//	go run ./chaos -only "black hole"      one fault of this kind in each round
//	go run ./chaos -nodes 8               more workers and orchestrators; half as many producers, an idle
//	                                      process, and two each with dispatchers under limits, with
//	                                      engines of task graphs and with nodes of the event bus come on top
//	go run ./chaos -soak -for 1h          nothing goes wrong; does anything grow? (soak.go)
//
// It starts a server of its own, which it stops and kills. Processes talk to it through toxiproxy, each through
// two ways of its own, one for its pool and one for LISTEN. What they set out to do and what came of it is
// written to ledgers outside the database (ledger.go); at the end those are held against each other and
// against the tables: of items and messages (check.go, promises.go, recovery.go, sessions.go, limited.go), of task graphs (graphs_check.go)
// and of events and schedules (bus_check.go); and nothing may remain (remains.go). A failing run says why, prints its seed, keeps its ledgers, and exits with 1; a
// passing run leaves nothing behind.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// This file answers: what can be asked for, and what does the exit code say?

func main() {
	childMain()
	var o options
	flag.Uint64Var(&o.seed, "seed", 0, "which faults happen (default random)")
	flag.DurationVar(&o.length, "for", time.Minute, "how long")
	seeds := flag.String("seeds", "", "FROM-TO: runs all of these, one after the other, with a line of each in the results")
	results := flag.String("results", "chaos.jsonl", "where -seeds appends them")
	reportOf := flag.String("report", "", "makes the tables of -page of these results, and does nothing else")
	page := flag.String("page", "docs/reliability.md", "see -report")
	planOnly := flag.Bool("plan", false, "print what is to happen, and do nothing")
	only := flag.String("only", "", "these kinds of faults, such as \"black hole,reset\", one alone in each round")
	flag.IntVar(&o.nodes, "nodes", 4, "workers and orchestrators, at least 2")
	flag.DurationVar(&o.slack, "slack", 0, "how much later than by its bound everything may come, on a machine that has too little CPU for all of this")
	flag.Float64Var(&o.rest, "rest", restHere(), "how many times as long as with 8 processors producers rest; the default is for those that there are")
	flag.BoolVar(&o.soak, "soak", false, "no faults, but every kind of load: does anything grow, or come late?")
	flag.StringVar(&o.samples, "samples", "soak.jsonl", "where a soak keeps its samples")
	plant := flag.String("plant", "", "defects to be found: by a soak, such as goroutine,lost; amid faults, async (with -only failover) or late")
	flag.Parse()
	var err error
	if o.plant, err = plantsOf(*plant, o.soak); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	if o.only, err = kindsOf(*only); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	var first, last uint64
	if *seeds != "" {
		if first, last, err = seedsOf(*seeds); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}
	if flag.NArg() > 0 || o.nodes < 2 || o.length <= 0 || o.rest < 1 {
		flag.Usage()
		os.Exit(2)
	}
	if o.seed == 0 {
		o.seed = uint64(rand.Uint32())
	}
	if *reportOf != "" {
		if err := report(*reportOf, *page); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if *planOnly {
		o.printPlan(os.Stdout)
		return
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel) // a second Ctrl-C ends at once
	if *seeds != "" {
		bad, err := runSeeds(ctx, o, first, last, *results, os.Stderr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		if err != nil || bad > 0 {
			os.Exit(1)
		}
		return
	}
	var result interface {
		fmt.Stringer
		failed() bool
	}
	if o.soak {
		var v *soakVerdict
		if v, err = soak(ctx, o, os.Stderr); v != nil {
			result = v
		}
	} else {
		var v *verdict
		if v, err = run(ctx, o, os.Stderr); v != nil {
			result = v
		}
	}
	if result != nil { // there is a verdict even if cleaning up failed, or was cut short
		fmt.Print(result)
	}
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "interrupted")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case result.failed():
		os.Exit(1)
	}
}

type options struct {
	seed   uint64
	length time.Duration
	nodes  int
	only   []string // kinds

	slack time.Duration
	rest  float64 // see restHere

	soak    bool
	samples string // path
	plant   []string
}

func (o options) String() string {
	text := fmt.Sprintf("go run ./chaos -seed %d -for %v -nodes %d -rest %v", o.seed, o.length, o.nodes, o.rest)
	if o.soak {
		text = fmt.Sprintf("go run ./chaos -soak -seed %d -for %v", o.seed, o.length)
	}
	if o.slack > 0 {
		text += fmt.Sprintf(" -slack %v", o.slack)
	}
	if len(o.only) > 0 {
		text += fmt.Sprintf(" -only %q", strings.Join(o.only, ","))
	}
	if len(o.plant) > 0 {
		text += " -plant " + strings.Join(o.plant, ",")
	}
	return text
}

// restHere is how many times as long as with 8 processors producers are to rest, so that faults break things, and not the load.
func restHere() float64 { return max(1, 8/float64(runtime.NumCPU())) }

// deployed is how many processes there are.
func (o options) deployed() int { return separates + o.nodes + o.producers() + 1 }

func (o options) producers() int { return max(o.nodes/2, 1) }

// kindsOf reads a list of names.
func kindsOf(list string) (names []string, err error) {
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		var known []string
		for _, k := range kinds {
			known = append(known, k.name)
		}
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("there is no kind of fault %q, only %q", name, known)
		}
		names = append(names, name)
	}
	return names, nil
}
