// Command bench measures what pgwake promises, prints each figure with its baseline beside it, and says which
// goals were met. Package measure defines the figures.
//
//	go run ./bench                              everything, 5 rounds: most of an hour
//	go run ./bench -run single,pairs -rounds 3
//	go run ./bench -short                       about two minutes, for CI
//	go run ./bench -quick                       a minute or three: what the specification has goals for, in small
//	go run ./bench -docs docs/benchmarks.md     everything, and the page with it
//	go run ./bench -run fetch -backlog 10000000 fetches from a backlog of ten million
//
// It prints a Markdown table with the settings of everybody. Figures and ratios are medians over the rounds;
// each ratio is taken within a round, between neighbours. bench/results.json gets the figures by their names,
// the table, and the raw samples of all rounds; bench/charts gets pictures. A missed goal is reported and is no
// failure: the exit code says whether the measuring worked.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pgwake/pgwake/bench/keep"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/devpg"
)

func main() {
	measure.ChildMain()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends at once
	err := bench(ctx, os.Args[1:])
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "interrupted")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// settings are the flags.
type settings struct {
	scenarios        []string
	sizes            sizes
	rounds           int
	json             string
	charts           string
	docs             string
	cpuProfile, heap string
}

func parse(args []string) (*settings, error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	run := flags.String("run", "", "comma-separated `scenarios`: "+strings.Join(names(), ", ")+" (default all)")
	short := flags.Bool("short", false, "small sizes and one round")
	quickly := flags.Bool("quick", false, "smaller sizes, one round, and only what the specification has goals for")
	rounds := flags.Int("rounds", 0, "`rounds` to take the median of (default 5, with -short or -quick 1)")
	idle := flags.Duration("idle", 0, "how long to count statements while idle (default 3m, with -short 4s, with -quick 3s)")
	items := flags.Int("items", 0, "`items` to drain (default 200000, with -short or -quick 10000)")
	backlog := flags.Int("backlog", 0, "`items` that are due around those that are fetched (default 200000, with -short or -quick 20000)")
	tasks := flags.Int("tasks", 0, "`tasks` to ask about, of ten steps each (default 1000000, with -short 10000, with -quick 2000)")
	log := flags.Int("log", 0, "`events` in the log beside which to emit (default 10000000, with -short 20000, with -quick 10000)")
	s := &settings{sizes: full, rounds: 5, scenarios: names()}
	flags.StringVar(&s.json, "json", keep.Beside("results.json"), "`file` for the figures and the raw samples")
	flags.StringVar(&s.charts, "charts", keep.Beside("charts"), "`directory` for the charts")
	flags.StringVar(&s.docs, "docs", "", "Markdown `file` in which to replace the results")
	flags.StringVar(&s.cpuProfile, "cpuprofile", "", "`file` for a CPU profile of this process")
	flags.StringVar(&s.heap, "memprofile", "", "`file` for a profile of its allocations")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if *short {
		s.sizes, s.rounds = small, 1
	}
	if *quickly {
		s.sizes, s.rounds, s.scenarios = quick(), 1, quickNames
	}
	if *rounds > 0 {
		s.rounds = *rounds
	}
	if *idle > 0 {
		s.sizes.idle.Duration = *idle
	}
	if *items > 0 {
		s.sizes.drain.Items = *items
	}
	if *backlog > 0 {
		s.sizes.fetch.Backlog = *backlog
	}
	if *tasks > 0 {
		s.sizes.manyTasks.Tasks = *tasks
	}
	if *log > 0 {
		s.sizes.eventLog.Rows = *log
	}
	if *run != "" {
		s.scenarios = strings.Split(*run, ",")
	}
	for _, name := range s.scenarios {
		if !slices.Contains(names(), name) {
			return nil, fmt.Errorf("bench: there is no scenario %q; there are %s", name, strings.Join(names(), ", "))
		}
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("bench: unexpected argument %q", flags.Arg(0))
	}
	return s, nil
}

func bench(ctx context.Context, args []string) (err error) {
	s, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	stopProfile, err := profile(s.cpuProfile, s.heap)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopProfile()) }()
	server, err := devpg.Start(ctx, &devpg.Options{Fsync: true, Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
	if err != nil {
		return err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		err = errors.Join(err, server.Stop(stopping))
	}()
	r := newRecord(server)
	if !server.Owned() {
		fmt.Println("The server was given: whether it writes through (fsync) is not known here.")
	}
	bar := newProgress(os.Stderr)
	s.sizes.tell(bar.tell)
	for n := range s.rounds {
		for _, sc := range scenarios {
			wanted := slices.Contains(s.scenarios, sc.name) ||
				sc.name == baseline && slices.ContainsFunc(s.scenarios, needsBaseline)
			if !wanted || sc.once && n > 0 {
				continue
			}
			bar.scenario(n+1, s.rounds, sc.what)
			began := time.Now()
			err := sc.run(ctx, server.URL, &s.sizes, &r.Results)
			bar.clear()
			if err != nil {
				return err
			}
			r.Took[sc.name] += time.Since(began)
		}
	}
	r.finish(s.rounds)
	r.print(os.Stdout)
	if err := keep.JSON(s.json, r); err != nil {
		return err
	}
	fmt.Println("\nFigures and raw samples:", s.json)
	charts, err := r.Results.writeCharts(s.charts)
	if err != nil {
		return err
	}
	for _, chart := range charts {
		fmt.Println("Chart:", chart)
	}
	if s.docs != "" {
		return r.writeDocs(s.docs)
	}
	return nil
}

// profile begins profiles of this process; stop writes them.
func profile(cpu, heap string) (stop func() error, err error) {
	var file *os.File
	if cpu != "" {
		if file, err = os.Create(cpu); err != nil {
			return nil, err
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return nil, err
		}
	}
	return func() (err error) {
		if file != nil {
			pprof.StopCPUProfile()
			err = file.Close()
		}
		if heap != "" {
			allocs, created := os.Create(heap)
			if created != nil {
				return errors.Join(err, created)
			}
			err = errors.Join(err, pprof.Lookup("allocs").WriteTo(allocs, 0), allocs.Close())
		}
		return err
	}, nil
}
