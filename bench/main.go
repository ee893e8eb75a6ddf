// Command bench measures what pgwake promises, prints each figure with its baseline beside it, and says which
// goals were met. Package measure defines the figures.
//
//	go run ./bench                              everything, 5 rounds: about a quarter of an hour
//	go run ./bench -run single,pairs -rounds 3
//	go run ./bench -short                       one or two minutes, for CI
//
// Figures and ratios are medians over the rounds; each ratio is taken within a round, between neighbours. The
// raw samples of all rounds go to a JSON file. A missed goal is reported and is no failure: the exit code says
// whether the measuring worked.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

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
	scenarios []string
	sizes     sizes
	rounds    int
	out       string
}

func parse(args []string) (*settings, error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	run := flags.String("run", "", "comma-separated `scenarios`: "+strings.Join(names(), ", ")+" (default all)")
	short := flags.Bool("short", false, "small sizes and one round")
	rounds := flags.Int("rounds", 0, "`rounds` to take the median of (default 5, with -short 1)")
	idle := flags.Duration("idle", 0, "how long to count statements while idle (default 3m, with -short 10s)")
	out := flags.String("out", "", "`directory` for the raw samples (default bench/results)")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	s := &settings{sizes: full, rounds: 5, scenarios: names(), out: *out}
	if *short {
		s.sizes, s.rounds = small, 1
	}
	if *rounds > 0 {
		s.rounds = *rounds
	}
	if *idle > 0 {
		s.sizes.idle.Duration = *idle
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
	if s.out == "" {
		s.out = "results"
		if _, err := os.Stat("bench"); err == nil {
			s.out = filepath.Join("bench", "results")
		}
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
	fmt.Printf("PostgreSQL %s, %s; %d CPUs\n", server.Version, server.Source, r.CPUs)
	for n := range s.rounds {
		for _, sc := range scenarios {
			wanted := slices.Contains(s.scenarios, sc.name) ||
				sc.name == baseline && slices.ContainsFunc(s.scenarios, needsBaseline)
			if !wanted || sc.once && n > 0 {
				continue
			}
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", n+1, s.rounds, sc.what)
			if err := sc.run(ctx, server.URL, &s.sizes, &r.Results); err != nil {
				return err
			}
		}
	}
	r.Finished = time.Now()
	file, err := r.write(s.out)
	if err != nil {
		return err
	}
	printTable(os.Stdout, r.Results.rows())
	fmt.Println("\nRaw samples:", file)
	return nil
}
