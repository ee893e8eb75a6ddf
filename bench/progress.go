package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: how does somebody who waits see how far it is?

// progress is one line on a terminal that is written again and again; nothing anywhere else.
type progress struct {
	out   *os.File // nil: silent
	began time.Time
	label string
}

func newProgress(out *os.File) *progress {
	p := &progress{began: time.Now()}
	if info, err := out.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		p.out = out
	}
	return p
}

// scenario says what comes now.
func (p *progress) scenario(round, rounds int, what string) {
	p.label = fmt.Sprintf("round %d of %d: %s", round, rounds, what)
	p.tell(measure.Progress{})
}

// tell is for the scenarios.
func (p *progress) tell(at measure.Progress) {
	if p.out != nil {
		fmt.Fprint(p.out, "\r\x1b[K", progressLine(time.Since(p.began), p.label, at))
	}
}

// clear leaves an empty line.
func (p *progress) clear() {
	if p.out != nil {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}

// barWidth is in characters.
const barWidth = 20

func progressLine(elapsed time.Duration, label string, at measure.Progress) string {
	var line strings.Builder
	fmt.Fprintf(&line, "%3d:%02d  %s", int(elapsed.Minutes()), int(elapsed.Seconds())%60, label)
	switch {
	case at.Total > 0:
		done := min(at.Done*barWidth/at.Total, barWidth)
		fmt.Fprintf(&line, "  %s%s %d/%d", strings.Repeat("█", done), strings.Repeat("░", barWidth-done), at.Done, at.Total)
	case at.Done > 0:
		fmt.Fprintf(&line, "  %d", at.Done)
	case at.Elapsed > 0:
		fmt.Fprintf(&line, "  %v", at.Elapsed.Round(time.Second))
	}
	if at.Figures.N > 0 {
		fmt.Fprintf(&line, "  p50 %s", millis(at.Figures.P50))
	}
	return line.String()
}
