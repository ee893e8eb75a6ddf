package main

import (
	"fmt"

	"charm.land/bubbles/v2/progress"
	"github.com/charmbracelet/colorprofile"
)

// This file answers: how does somebody who waits see that something happens?

// bar is drawn on standard error, if that is a terminal, in place and again and again. The output is not touched by it.
type bar struct {
	a     *app
	what  string
	total int64
	model progress.Model
	shown bool
}

const barWidth = 40

func (a *app) progress(what string, total int64) *bar {
	w, ok := a.err.(*colorprofile.Writer)
	b := &bar{a: a, what: what, total: total}
	b.shown = ok && w.Profile > colorprofile.NoTTY && total > 0
	if b.shown {
		b.model = progress.New(progress.WithWidth(barWidth))
	}
	return b
}

// at says how far it is.
func (b *bar) at(n int64) {
	if b.shown {
		fmt.Fprintf(b.a.err, "\r%s %s %d/%d ", b.what, b.model.ViewAs(min(1, float64(n)/float64(b.total))), n, b.total)
	}
}

// end wipes it away.
func (b *bar) end() {
	if b.shown {
		fmt.Fprint(b.a.err, "\r\x1b[K")
	}
}
