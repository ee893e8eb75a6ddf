// Command mutants opens each hole of the wake engine again, one at a time, and requires the test that is
// named for it to fail: a test that cannot fail protects nothing. Run it with `make mutants`.
//
// A mutant is a patch of one source file, laid over the tree by the build's -overlay; nothing is written to
// the tree itself. It must apply, compile, and be caught.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// deadline bounds one mutant, with its build on a slow machine. A test that hangs on its mutant has not caught it.
const deadline = 10 * time.Minute

// atOnce is how many mutants are tried at a time. Most of the time their tests wait in vain.
const atOnce = 4

func main() {
	only := flag.String("run", "", "run only the mutants whose name matches this regular expression")
	first := flag.Bool("first", false, "of those whose names begin with the same word, run only the first")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *only, *first); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, first bool) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	var tries errgroup.Group
	tries.SetLimit(atOnce)
	var caught atomic.Int64
	attempt := func(m *mutant) error {
		began := time.Now()
		err := m.try(ctx)
		if err == nil {
			caught.Add(1)
			fmt.Printf("ok    %-52s caught by %s in %.1fs\n", m.name, m.test, time.Since(began).Seconds())
		}
		return err
	}
	var mu sync.Mutex
	var again []*mutant
	tried := make(map[string]bool)
	for i := range mutants {
		m := &mutants[i]
		word, _, _ := strings.Cut(m.name, " ")
		if !wanted.MatchString(m.name) || first && tried[word] {
			continue
		}
		tried[word] = true
		tries.Go(func() error {
			if err := attempt(m); err != nil {
				fmt.Printf("again %-52s %v\n", m.name, err)
				mu.Lock()
				defer mu.Unlock()
				again = append(again, m)
			}
			return nil
		})
	}
	if err := tries.Wait(); err != nil {
		return err
	}
	// A test that waits for a race cannot miss what it watches for if nothing is broken; on a machine that is too
	// busy it can miss the break; and a simulation draws other steps each time. So each mutant has further tries, with the machine
	// to itself.
	survived := 0
	for _, m := range again {
		err := attempt(m)
		for tries := 1; err != nil && tries < furtherTries; tries++ {
			err = attempt(m)
		}
		if err != nil {
			survived++
			fmt.Printf("FAIL  %-52s %v\n", m.name, err)
		}
	}
	fmt.Printf("mutants: %d passed, %d failed\n", caught.Load(), survived)
	if survived > 0 || caught.Load() == 0 {
		return errors.New("not every mutant was caught")
	}
	return nil
}

const furtherTries = 3

// apply returns the file with the hole. Of a migration that is the way up.
func (m *mutant) apply(source []byte) ([]byte, error) {
	up, down, isMigration := bytes.Cut(source, []byte(downFrom))
	for _, p := range m.patches {
		if n := bytes.Count(up, []byte(p.old)); n != 1 {
			return nil, fmt.Errorf("%s has %d places like %q, and the patch needs one", m.file, n, p.old)
		}
		up = bytes.Replace(up, []byte(p.old), []byte(p.new), 1)
	}
	if isMigration {
		up = slices.Concat(up, []byte(downFrom), down)
	}
	return up, nil
}

// downFrom is where the way down begins in a migration.
const downFrom = "-- +goose Down"

// try returns nil if the mutant's test fails on it.
func (m *mutant) try(ctx context.Context) error {
	source, err := os.ReadFile(m.file)
	if err != nil {
		return err
	}
	if source, err = m.apply(source); err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "pgwake-mutant")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	mutated := filepath.Join(dir, filepath.Base(m.file))
	if err := os.WriteFile(mutated, source, 0o600); err != nil {
		return err
	}
	original, err := filepath.Abs(m.file)
	if err != nil {
		return err
	}
	overlay := filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{original: mutated}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	test := exec.CommandContext(ctx, "go", "test", "-vet=off", "-overlay", overlay, "-count=1", "-run", "^"+m.test+"$", m.pkg)
	out, err := test.CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("no verdict: %w", ctx.Err())
	case err == nil:
		return fmt.Errorf("%s passed: it does not protect what it is named for", m.test)
	case !strings.Contains(string(out), "--- FAIL: "+m.test):
		return fmt.Errorf("%s did not fail by itself:\n%s", m.test, out)
	}
	return nil
}
