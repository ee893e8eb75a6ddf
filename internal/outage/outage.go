// Package outage tells what is the matter with the server, and so passes, from what it thinks of a call, and would think again.
package outage

import (
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
)

// Passes reports whether the same call may succeed later, for what the error says: it is Retryable, or says how the server is, or who may come to
// it, as while passwords change, a standby is promoted that knows less, or tables are restored. Whoever has work in hand goes on for as long as his
// lease lasts, and takes it for no failure of the work.
func Passes(err error) bool {
	var failure *pgwake.Error
	return errors.As(err, &failure) && (failure.Retryable || !errors.Is(err, pgwake.ErrClosed) &&
		(OfTheServer(failure) || errors.As(err, new(*pgconn.ConnectError)) || errors.Is(err, pgwake.ErrPermission) || errors.Is(err, pgwake.ErrNotMigrated)))
}

// OfTheServer reports whether the error is not for what somebody is missing there (pgwake.ErrPermission, pgwake.ErrNotMigrated), but for what the
// server is missing, or for a password that was good before.
func OfTheServer(err *pgwake.Error) bool {
	return len(err.SQLState) == 5 && (slices.Contains([]string{
		"26",       // a prepared statement is not known
		"28", "3D", // who comes, and to which database
		"58", // the server's disk, say
	}, err.SQLState[:2]) || err.SQLState == "XX001" || err.SQLState == "XX002") // what is there cannot be read
}
