package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/charmbracelet/x/term"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: who is asked before something is gone, and how?

// errDeclined: somebody was asked, and did not say yes.
var errDeclined = errors.New("nothing was done")

// confirm asks, unless --yes has answered. Where nobody can be asked it is refused.
func (a *app) confirm(format string, args ...any) error {
	if a.yes {
		return nil
	}
	question := glance.OneLine(a.withoutSecrets(fmt.Sprintf(format, args...)))
	if f, ok := a.in.(*os.File); ok && !term.IsTerminal(f.Fd()) {
		return usagef("--yes, if that is what is wanted", "there is nobody to ask: %s", question)
	}
	fmt.Fprintf(a.err, "%s [y/N] ", a.style.warn.Render(question))
	answer, err := bufio.NewReader(a.in).ReadString('\n')
	if err != nil && answer == "" {
		return usagef("--yes, if that is what is wanted", "there is no answer to: %s", question)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errDeclined
}

// hinted is an error with what to do about it.
type hinted struct {
	err  error
	hint string
}

func (e *hinted) Error() string { return e.err.Error() }
func (e *hinted) Unwrap() error { return e.err }
