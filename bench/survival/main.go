// Command survival puts pgwake through what breaks others: a server that restarts or crashes, backends that are killed, transactions
// that stay open, long readers, a transaction pooler in between, and time. Each scenario has a promise.
//
//	go run ./bench/survival                              all of them, three rounds: some ten minutes
//	go run ./bench/survival -run restart,kill -rounds 1
//	go run ./bench/survival -for 3m                      with three minutes of each trouble
//	go run ./bench/survival -docs docs                   and the pages with it
//	go run ./bench/survival -run "" -docs docs           only the pages, of what there is
//
// It starts a server of its own for each round of each scenario, with fsync on. The same load goes on before, during and after the
// trouble: items at a fixed rate, each with a handler. bench/survival.json gets every figure and the raw samples, and keeps the
// results of scenarios that are not run this time. A broken promise is printed, and the exit code is 1.
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

	"github.com/pgwake/pgwake/bench/keep"
)

// This file answers: what can be asked for, and what does the exit code say?

// scenario is a kind of trouble.
type scenario struct {
	name    string
	what    string // for the table
	rate    int    // items/s
	promise string // what it is to keep, for people; nothing lost, nothing left goes without saying

	run  func(ctx context.Context, t *trial) error
	keep func(r *result) (broken []string) // judges by the promise
	once bool                              // not in every round
}

var scenarios = []scenario{restart, crash, kill, idle, readers, pooler, soak}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends at once
	kept, err := survive(ctx, os.Args[1:])
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "interrupted")
		os.Exit(130)
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case !kept:
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	scenarios []scenario
	rounds    int
	trouble   time.Duration // how long it lasts; half of that before, and after
	soak      time.Duration
	chaos     string // the program that soaks
	json      string
	docs      string
	busy      float64 // the load average before there is one of ours: that of a round counts the one before it
}

func parse(args []string) (*options, error) {
	var names []string
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	o := &options{}
	flags := flag.NewFlagSet("survival", flag.ContinueOnError)
	run := flags.String("run", strings.Join(names, ","), "comma-separated `scenarios`, or none")
	flags.IntVar(&o.rounds, "rounds", 3, "`rounds` to take the median of")
	flags.DurationVar(&o.trouble, "for", 15*time.Second, "how long the trouble lasts, and twice a half of it is calm")
	flags.DurationVar(&o.soak, "soak", time.Minute, "how long to soak")
	flags.StringVar(&o.chaos, "chaos", "", "`program` that soaks, built from ./chaos (default built and run by go run)")
	flags.StringVar(&o.json, "json", keep.Beside("survival.json"), "`file` for the figures and the raw samples")
	flags.StringVar(&o.docs, "docs", "", "`directory` of "+tablePage+" and "+detailsPage+", in which to replace the results")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("survival: unexpected argument %q", flags.Arg(0))
	}
	if o.rounds < 1 || o.trouble < 2*time.Second || o.soak <= 0 {
		return nil, errors.New("survival: at least one round, two seconds of trouble, and some time to soak")
	}
	for _, name := range strings.FieldsFunc(*run, func(r rune) bool { return r == ',' }) {
		i := slices.Index(names, name)
		if i < 0 {
			return nil, fmt.Errorf("survival: there is no scenario %q; there are %s", name, strings.Join(names, ", "))
		}
		o.scenarios = append(o.scenarios, scenarios[i])
	}
	return o, nil
}

// survive runs what is asked for, and says whether all promises were kept.
func survive(ctx context.Context, args []string) (kept bool, err error) {
	o, err := parse(args)
	if err != nil {
		return false, err
	}
	rec, err := readRecord(o.json)
	if err != nil {
		return false, err
	}
	if len(o.scenarios) > 0 {
		o.busy = settledLoad(ctx)
	}
	kept = true
	for _, s := range o.scenarios {
		var results []*result
		for n := range o.rounds {
			if s.once && n > 0 {
				break
			}
			r, err := runTrial(ctx, s, o)
			if err != nil {
				return false, fmt.Errorf("%s: %w", s.name, err)
			}
			results = append(results, r)
			r.print(os.Stdout, n+1)
			kept = kept && len(r.Broken) == 0
		}
		rec.Scenarios[s.name] = results
		if err := keep.JSON(o.json, rec); err != nil { // also if the next one is interrupted
			return false, err
		}
	}
	if o.docs != "" {
		return kept, errors.Join(keep.Results(filepath.Join(o.docs, tablePage), rec.table), keep.Results(filepath.Join(o.docs, detailsPage), rec.details))
	}
	return kept, nil
}
