package main

import (
	"bufio"
	"context"
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
func (a *app) confirm(ctx context.Context, format string, args ...any) error {
	if a.yes {
		return nil
	}
	question := glance.OneLine(a.withoutSecrets(fmt.Sprintf(format, args...)))
	if f, ok := a.in.(*os.File); ok && !term.IsTerminal(f.Fd()) {
		return usagef("--yes, if that is what is wanted", "there is nobody to ask: %s", question)
	}
	fmt.Fprintf(a.err, "%s [y/N] ", a.style.warn.Render(question))
	answer, err := heeding(ctx, func() (string, error) { return bufio.NewReader(a.in).ReadString('\n') })
	if ctx.Err() != nil {
		fmt.Fprintln(a.err) // the question was not ended by an answer
		return ctx.Err()
	}
	if err != nil && answer == "" {
		return usagef("--yes, if that is what is wanted", "there is no answer to: %s", question)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errDeclined
}

// heeding is what reads from a terminal or a pipe, which no context ends: on an interrupt it is left behind, as the process is about to be.
func heeding[T any](ctx context.Context, read func() (T, error)) (T, error) {
	type outcome struct {
		v   T
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		v, err := read()
		done <- outcome{v, err}
	}()
	select {
	case o := <-done:
		return o.v, o.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// hinted is an error with what to do about it.
type hinted struct {
	err  error
	hint string
}

func (e *hinted) Error() string { return e.err.Error() }
func (e *hinted) Unwrap() error { return e.err }
