package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

// This file answers: how is progress shown? In a terminal by a line that is written over and over, elsewhere
// by a plain line now and then.

// plainPause is the least time between two plain lines of progress.
const plainPause = 5 * time.Second

type screen struct {
	out   io.Writer
	width func() int // of the terminal; nil: it is none
	last  time.Time  // of a plain line
}

func newScreen(file *os.File) *screen {
	s := &screen{out: file, last: time.Now()}
	fd := int(file.Fd())
	if term.IsTerminal(fd) {
		s.width = func() int {
			width, _, err := term.GetSize(fd)
			if err != nil || width <= 0 {
				return 80
			}
			return width
		}
	}
	return s
}

// status replaces what status showed before.
func (s *screen) status(text string) {
	if s.width == nil {
		if time.Since(s.last) >= plainPause {
			s.last = time.Now()
			fmt.Fprintln(s.out, "  ...", text)
		}
		return
	}
	line := []rune("  " + text)
	if width := s.width(); len(line) >= width { // a line that wraps could not be written over
		line = line[:max(width-1, 0)]
	}
	fmt.Fprintf(s.out, "\r\x1b[K%s", string(line))
}

// clear removes what status showed.
func (s *screen) clear() {
	if s.width != nil {
		fmt.Fprint(s.out, "\r\x1b[K")
	}
}

// line shows something that stays.
func (s *screen) line(text string) { fmt.Fprintln(s.out, text) }
