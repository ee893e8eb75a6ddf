package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// This file answers: does something grow, in samples that go up and down all the time?
//
// The median of the last fifth of the run is held against that of the second: by then all pools, plans and pages are
// there, and what comes and goes has been through all of its phases. A median takes no notice of single peaks.

// reading is one sample. It is a line of the file of samples.
type reading struct {
	At     time.Time          `json:"at"`
	Pace   string             `json:"pace"`
	Values map[string]float64 `json:"values"`
}

// gauge is something that is sampled and must not grow.
type gauge struct {
	name     string
	unit     float64 // what is printed as 1
	relative float64 // it may grow by this part of what it was,
	absolute float64 // and by this
	most     float64 // no sample may be above, if that is not 0
}

// leastSamples is how many it takes to say anything.
const leastSamples = 20

// growth is what a gauge comes to.
type growth struct {
	gauge
	early, late, max float64
}

// measure judges the values of a gauge. Of too few nothing can be said, which is a violation too.
func (g gauge) measure(values []float64) (r growth, violation string) {
	r = growth{gauge: g}
	if len(values) < leastSamples {
		return r, fmt.Sprintf("%s: there are only %d samples", g.name, len(values))
	}
	r.early, r.late, r.max = median(fifth(values, 1)), median(fifth(values, 4)), slices.Max(values)
	switch {
	case r.late > r.allowed():
		return r, fmt.Sprintf("%s grew from %s to %s; at most %s is no growth", g.name, g.show(r.early), g.show(r.late), g.show(r.allowed()))
	case g.most > 0 && r.max > g.most:
		return r, fmt.Sprintf("%s: %s is above %s", g.name, g.show(r.max), g.show(g.most))
	}
	return r, ""
}

// allowed is the most that is no growth.
func (r growth) allowed() float64 { return r.early + r.relative*max(r.early, 0) + r.absolute }

func (g gauge) show(v float64) string {
	if g.unit > 1 {
		return fmt.Sprintf("%.1f", v/g.unit)
	}
	return fmt.Sprintf("%.0f", v)
}

// fifth is the n-th part of five, from 0.
func fifth(values []float64, n int) []float64 {
	return values[len(values)*n/5 : len(values)*(n+1)/5]
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// growthTable judges all gauges.
func growthTable(gauges []gauge, readings []reading) (table string, violations []string) {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tsecond fifth\tlast fifth\tno growth up to\tmost\t\t")
	for _, g := range gauges {
		var values []float64
		for _, r := range readings {
			if v, ok := r.Values[g.name]; ok {
				values = append(values, v)
			}
		}
		r, violation := g.measure(values)
		verdict := "ok"
		if violation != "" {
			verdict, violations = "GROWS", append(violations, violation)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", g.name, g.show(r.early), g.show(r.late), g.show(r.allowed()), g.show(r.max), verdict)
	}
	t.Flush()
	return b.String(), violations
}

// recorder keeps the samples, in memory and in a file.
type recorder struct {
	file     *os.File
	readings []reading
}

func newRecorder(path string) (*recorder, error) {
	f, err := os.Create(path)
	return &recorder{file: f}, err
}

func (r *recorder) add(v reading) error {
	r.readings = append(r.readings, v)
	line, err := json.Marshal(v)
	if err == nil {
		_, err = r.file.Write(append(line, '\n'))
	}
	return err
}
