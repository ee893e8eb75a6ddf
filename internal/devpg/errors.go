package devpg

// What is said when there is no PostgreSQL: the three ways to get one, and why
// each that was tried did not work.

import (
	"errors"
	"strings"
)

// ErrNoServer is what errors.Is finds in the error of a Start that found no
// server. The error itself is a [*NoServerError].
var ErrNoServer = errors.New("no PostgreSQL to run against")

// ErrNotOwned is returned for what only a server that Start booted can do.
var ErrNotOwned = errors.New("the server was given by its URL, and is left alone")

// ErrStopped is returned for what a server that was stopped cannot do.
var ErrStopped = errors.New("the server was stopped")

// threeWays follows ErrNoServer's text.
const threeWays = `. Three ways to get one:
  1. name one that runs:   export PGWAKE_DATABASE_URL=postgres://user:password@host:5432/database
  2. install the server:   apt-get install postgresql, or brew install postgresql@17;
                           or name a directory with initdb and postgres in PGWAKE_PG_BIN
  3. start Docker, or be online for a download, and run the command, in a clone of pgwake, through
                           go run ./devpg/cmd/withpg -- command`

// NoServerError says what was tried. It unwraps to ErrNoServer and to the error
// of each attempt.
type NoServerError struct {
	Tried []Attempt
}

// Attempt is one way to a server that did not work.
type Attempt struct {
	Way string // such as "PGWAKE_DATABASE_URL" or "/usr/lib/postgresql/15/bin"
	Err error
}

// Error returns several lines: the three ways, then one for each attempt.
func (e *NoServerError) Error() string {
	var b strings.Builder
	b.WriteString(ErrNoServer.Error())
	b.WriteString(threeWays)
	b.WriteString("\nTried:")
	for _, a := range e.Tried {
		b.WriteString("\n  - " + a.Way + ": ")
		b.WriteString(strings.ReplaceAll(a.Err.Error(), "\n", "\n    "))
	}
	return b.String()
}

func (e *NoServerError) Unwrap() []error {
	errs := []error{ErrNoServer}
	for _, a := range e.Tried {
		errs = append(errs, a.Err)
	}
	return errs
}
