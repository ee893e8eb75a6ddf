package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"time"
)

// This file answers: what is to happen in a run?
//
// All of it follows from the seed, the length and what else was asked for, and from nothing that happens: so a seed says the same
// faults, in the same order and at the same offsets from the beginnings of their rounds, again.

// conditions are what is so for the whole of a run.
type conditions struct {
	ahead    time.Duration // by how much the server's clock is ahead of the machine's
	skewed   bool          // each process has a clock of its own, which is wrong
	heldOpen bool          // somebody else's transaction stays open
}

func (c conditions) String() string {
	text := "the server's clock is right"
	if c.ahead != 0 {
		text = fmt.Sprintf("the server's clock is %.0f h ahead", c.ahead.Hours())
	}
	if c.skewed {
		text += "; those of processes are wrong by hours"
	}
	if c.heldOpen {
		text += "; a transaction of somebody else stays open"
	}
	return text
}

const conditionsStream = 1 << 40 // beyond the numbers of rounds

func (o options) conditions() conditions {
	rng := rand.New(rand.NewPCG(o.seed, conditionsStream))
	hours := []int{0, 0, -7, -1, 1, 7}[rng.IntN(6)]
	return conditions{ahead: time.Duration(hours) * time.Hour, skewed: rng.IntN(2) == 0, heldOpen: rng.IntN(2) == 0}
}

// skew is by how much the clock of a process is ahead of the machine's. Those of the layers and of Dispatchers measure leases
// on the machine's as well, which in earnest is the same one.
func (c conditions) skew(o *order) time.Duration {
	if schemas[o.Role] != "" || !c.skewed {
		return 0
	}
	rng := rand.New(rand.NewPCG(o.Seed, conditionsStream+uint64(o.Node+1000*o.Generation)))
	return between(rng, -9*time.Hour, 9*time.Hour)
}

// stage is a round as it is planned.
type stage struct {
	length time.Duration // of its faults
	faults []fault
	alone  bool // there is one, so that what it takes to recover is known to be its doing
}

// plan is all rounds. As a rule every third one has a single fault, of any kind.
func (o options) plan() (stages []stage) {
	for left := o.length; left > silenceBound || len(stages) == 0; {
		number := len(stages)
		rng := rand.New(rand.NewPCG(o.seed, uint64(number)))
		s := stage{alone: len(o.only) > 0 || number%3 == 2}
		switch {
		case len(o.only) > 0:
			s.faults = []fault{single(rng, o.deployed(), kindNamed(o.only[number%len(o.only)]))}
		case s.alone:
			s.faults = []fault{single(rng, o.deployed(), &kinds[rng.IntN(len(kinds))])}
		default:
			s.length = min(faultsPerRound, max(left-silenceBound, 2*time.Second))
			s.faults = schedule(rng, o.deployed(), s.length)
		}
		if s.alone {
			s.length = s.faults[0].At + s.faults[0].For
		}
		stages = append(stages, s)
		left -= s.length + silenceBound + calmLength
	}
	return stages
}

// single is the fault of a round that has one.
func single(rng *rand.Rand, nodes int, k *kind) fault {
	f := fault{At: time.Second, Node: rng.IntN(nodes)}
	f.choose(rng, k, k.most)
	return f
}

func (o options) printPlan(out io.Writer) {
	fmt.Fprintln(out, o.conditions())
	for i, s := range o.plan() {
		fmt.Fprintf(out, "round %d: faults for %v\n", i+1, s.length.Round(time.Millisecond))
		for _, f := range s.faults {
			fmt.Fprintf(out, "%8.3fs  %v\n", f.At.Seconds(), f)
		}
	}
}
