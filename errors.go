package pgwake

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/migrations"
)

// This file answers: what can go wrong, and how does a caller tell?

// The conditions that callers tell apart, for use with errors.Is. The errors returned by the verbs wrap
// them in an *Error.
var (
	// ErrNoWork: the poll timeout of a fetch passed and nothing was due.
	ErrNoWork = errors.New("no work")
	// ErrLockLost: the lock token is unknown, was used up, or has expired. Nothing was written. Of a batch it is said by
	// a *LostLocksError, and holds for the tokens that this lists.
	ErrLockLost = errors.New("lock token is unknown or expired")
	// ErrNotFound: there is no such instance or execution.
	ErrNotFound = errors.New("not found")
	// ErrInstanceRunning: the instance is running, and deleting it was not forced.
	ErrInstanceRunning = errors.New("instance is running")
	// ErrHasParent: the instance is a child, and goes only together with its parent; or it is a parent, and a child
	// of it would be left behind.
	ErrHasParent = errors.New("instance has a parent or would leave children behind")
	// ErrDuplicateEvent: an event with this id is already in the execution's history. Nothing was written.
	ErrDuplicateEvent = errors.New("event id is already in the history")
	// ErrInvalid: an argument breaks a rule that its documentation states. Nothing was written.
	ErrInvalid = errors.New("invalid argument")
	// ErrPayloadTooLarge: a payload exceeds Config.MaxPayload. It is also an ErrInvalid.
	ErrPayloadTooLarge = fmt.Errorf("%w: payload too large", ErrInvalid)
	// ErrTooManyNamespaces: the namespace is new, and there are as many as there may be (SQL function max_namespaces, 100,000); or so many have
	// been added before, and the transaction itself has added 1,000.
	// Nothing was written. Those that there are go on.
	ErrTooManyNamespaces = errors.New("too many namespaces")
	// ErrClosed: the Provider is closed.
	ErrClosed = errors.New("provider is closed")
	// ErrConfig: the Config, the database URL or the schema name is unusable.
	ErrConfig = errors.New("invalid configuration")
	// ErrServerTooOld: the server is older than PostgreSQL 14.
	ErrServerTooOld = errors.New("PostgreSQL 14 or newer is required")
	// ErrPermission: the role lacks a right that the operation needs.
	ErrPermission = errors.New("permission denied")
	// ErrNotMigrated: the schema does not have the tables and functions that this version needs.
	ErrNotMigrated = migrations.ErrNotMigrated
)

// Error is what every verb returns when it fails.
type Error struct {
	Op        string // the verb, such as "ack work item"
	Err       error  // the cause; errors.Is and errors.As see through
	Retryable bool   // the same call may succeed later: deadlock, serialization failure, lost connection, shutdown, full pool, a fetch that met a row which cannot be read, or a panic
	SQLState  string // the server's SQLSTATE, if the server answered

	// Unknown says that the verb was sent and no answer came back, since the connection was lost or the context of the
	// call ended: it may have taken effect all the same, or may yet. To ack or to abandon again is harmless then, and an
	// enqueue may be repeated that has a DedupKey; without one it may add the same twice. If it is false, nothing was
	// written, but what the error itself says (LostLocksError). It is false for fetches, which give back what they claimed,
	// but for one with FetchOptions.Ack; and for Tx twins, whose outcome is that of the transaction.
	Unknown bool
}

func (e *Error) Error() string { return "pgwake: " + e.Op + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// LostLocksError lists the items of a batch whose lease had ended. It is an ErrLockLost. The others of the
// batch were dealt with.
type LostLocksError struct{ Tokens []LockToken }

func (e *LostLocksError) Error() string {
	return fmt.Sprintf("%v: %d of the batch, the first is %s", ErrLockLost, len(e.Tokens), quote(string(e.Tokens[0])))
}

// Unwrap makes errors.Is(err, ErrLockLost) hold.
func (e *LostLocksError) Unwrap() error { return ErrLockLost }

// unknownOutcome marks the error of a verb that may have taken effect.
type unknownOutcome struct{ error }

func (e unknownOutcome) Unwrap() error { return e.error }

// unreadable marks the error of a claim that met what it cannot read. That is no fault of whoever fetches, and is over once the row is gone.
type unreadable struct{ error }

func (e unreadable) Unwrap() error { return e.error }

// panicError is a panic, a tracer's or a codec's, where others wait for what comes of it. Retryable: one panic is not to end who fetches.
type panicError struct {
	value any
	stack []byte
}

func (e panicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.value, e.stack) }

// SQLSTATEs raised by the functions in migrations.
const (
	stateLockLost  = "PW001"
	stateNotFound  = "PW002"
	stateInvalid   = "PW003"
	stateRunning   = "PW004"
	stateHasParent = "PW005"
	stateTooMany   = "PW008"
	stateUndefined = "42883" // undefined_function
)

// WrapError returns the *Error of an operation that a layer on this package carried out by SQL of its own, outside of
// Provider.Do: with its SQLState, Retryable, and around the condition that the SQLSTATE stands for, as the verbs have them.
// Unknown is that of a statement which takes effect by itself, or of a commit, and so too careful for the statements before
// that: it is set if the connection broke, or the context ended, once there was something to lose. An error that is an *Error,
// or wraps one, is returned as it is, and nil stays nil.
func WrapError(op string, err error) error {
	if wrapped := (*Error)(nil); errors.As(err, &wrapped) {
		return err
	}
	if unanswered(err) {
		err = unknownOutcome{err}
	}
	return failed(op, err)
}

// unanswered is outcomeUnknown of an error that may be of anything, and of any driver.
func unanswered(err error) bool {
	if pgErr := serverError(err); pgErr != nil && pgErr.SeverityUnlocalized == "" { // another driver than pgx has told the SQLSTATE
		return strings.HasPrefix(pgErr.Code, "08") || strings.HasPrefix(pgErr.Code, "57P")
	}
	return outcomeUnknown(err) && (serverError(err) != nil || errors.Is(err, context.Canceled) || connectionLost(err))
}

// failed wraps err as the outcome of op. It is idempotent, and nil stays nil.
func failed(op string, err error) error {
	if err == nil {
		return nil
	}
	if wrapped := (*Error)(nil); errors.As(err, &wrapped) {
		return err
	}
	unknown := errors.As(err, new(unknownOutcome))
	if mark, outermost := err.(unknownOutcome); outermost {
		err = mark.error
	}
	e := &Error{Op: op, Err: err, Retryable: retryable(err), Unknown: unknown}
	pgErr := serverError(err)
	if pgErr == nil {
		return e
	}
	e.SQLState = pgErr.Code
	withoutData(pgErr)
	if condition := conditionOf(pgErr); condition != nil && !errors.As(err, new(unreadable)) {
		e.Err = fmt.Errorf("%w: %w", condition, err)
	}
	return e
}

// serverError returns what the server said; nil if err is not of the server. Under WrapSQLTx the driver may be another
// than pgx: lib/pq tells the SQLSTATE by a method of that name, and pgdriver by the field of the protocol.
func serverError(err error) *pgconn.PgError {
	pgErr := (*pgconn.PgError)(nil)
	if errors.As(err, &pgErr) {
		return pgErr
	}
	var state interface{ SQLState() string }
	var field interface{ Field(name byte) string }
	switch {
	case errors.As(err, &state):
		pgErr = &pgconn.PgError{Code: state.SQLState()}
	case errors.As(err, &field):
		pgErr = &pgconn.PgError{Code: field.Field('C')}
	}
	if pgErr == nil || pgErr.Code == "" {
		return nil
	}
	pgErr.Message = err.Error()
	if strings.Contains(pgErr.Message, historyPrimaryKey) { // whatever the language; each driver has its own way to tell it
		pgErr.ConstraintName = historyPrimaryKey
	}
	return pgErr
}

// withoutData takes out of an error of the server what the row has, or the text, that it is about: that is somebody's payload, and errors are logged.
func withoutData(err *pgconn.PgError) {
	switch {
	case err.Code == "23502", err.Code == "23514", strings.HasPrefix(err.Code, "22"): // not null, check: "Failing row contains (...)"; data exceptions: a line of the JSON
		err.Detail, err.Where = "", ""
	case strings.Contains(err.Where, "$1 = "): // with log_parameter_max_length_on_error the parameters are there, whatever the error and the language
		err.Where = ""
	}
}

const (
	// historyPrimaryKey is the constraint that keeps event ids unique.
	historyPrimaryKey = "history_pkey"

	// payloadCheck ends the names of the constraints that bound payloads, whoever writes them.
	payloadCheck = "_payload_check"
)

func conditionOf(err *pgconn.PgError) error {
	switch {
	case err.Code == stateLockLost:
		return ErrLockLost
	case err.Code == stateNotFound:
		return ErrNotFound
	case err.Code == stateInvalid:
		return ErrInvalid
	case err.Code == stateRunning:
		return ErrInstanceRunning
	case err.Code == stateHasParent:
		return ErrHasParent
	case err.Code == stateTooMany:
		return ErrTooManyNamespaces
	case err.Code == "23505" && err.ConstraintName == historyPrimaryKey:
		return ErrDuplicateEvent
	case err.Code == "42501": // insufficient_privilege
		return ErrPermission
	case err.Code == stateUndefined, err.Code == "3F000", err.Code == "42P01": // function, schema, table
		return ErrNotMigrated
	case err.Code == "23514" && strings.HasSuffix(err.ConstraintName, payloadCheck):
		return ErrPayloadTooLarge
	case err.Code == "54000" && !notificationsFull(err), err.Code == "54001": // beyond what the server can hold, or nested deeper than its stack
		return ErrInvalid
	case err.Code == "22P02", err.Code == "22021", err.Code == "22P05", err.Code == "22008", err.Code == "23514": // bad text, bad encoding, year, check
		return ErrInvalid
	}
	return nil
}

// retryable reports whether the same call may succeed later. A cancelled context is the caller's wish and
// is not; a deadline is, since it is how a full pool and a dead network show.
func retryable(err error) bool {
	if errors.Is(err, context.Canceled) {
		return false
	}
	if errors.As(err, new(unreadable)) || errors.As(err, new(panicError)) {
		return true
	}
	if connectErr := (*pgconn.ConnectError)(nil); errors.As(err, &connectErr) {
		return connectsLater(connectErr)
	}
	if pgErr := serverError(err); pgErr != nil {
		switch {
		case strings.HasPrefix(pgErr.Code, "08"), // connection exceptions
			strings.HasPrefix(pgErr.Code, "53"),                               // out of connections, memory, disk
			strings.HasPrefix(pgErr.Code, "57P"),                              // shutdown, crash, starting up
			strings.HasPrefix(pgErr.Code, "40"),                               // serialization failure, deadlock
			pgErr.Code == "25006",                                             // read-only: a standby, until failover ends
			pgErr.Code == "0A000" && pgErr.Routine == "RevalidateCachedQuery", // a migration came; it is prepared anew
			pgErr.Code == "55P03",                                             // lock timeout
			pgErr.Code == "57014",                                             // statement timeout
			pgErr.Code == "25P03", pgErr.Code == "25P04",                      // timeouts of idle transactions, and of any
			notificationsFull(pgErr):
			return true
		}
		return false
	}
	if badCertificate(err) { // the server is another, or the settings are wrong
		return false
	}
	return connectionLost(err) || pgconn.SafeToRetry(err)
}

// connectsLater reports whether one of the tries of which connecting consisted may succeed later: pgx goes through the hosts of a URL, all addresses
// of each, with TLS and without, and says what became of every one. That one host does not let the role in is for good; that the next one starts up is not.
//
// If there is one host alone, with a server that refuses for good, an address at which nobody answers tells nothing: localhost has two of them, and
// most servers are at one. Where a connection was made and broke, such as with TLS, somebody has answered.
func connectsLater(err *pgconn.ConnectError) bool {
	tries := []error{err.Unwrap()}
	if several, ok := tries[0].(interface{ Unwrap() []error }); ok {
		tries = several.Unwrap()
	}
	oneHost := !slices.ContainsFunc(err.Config.Fallbacks, func(f *pgconn.FallbackConfig) bool {
		return f.Host != err.Config.Host || f.Port != err.Config.Port
	})
	refused := false
	for _, try := range tries {
		switch said := serverError(try) != nil || badCertificate(try); {
		case said && retryable(try):
			return true
		case said:
			refused = true
		}
	}
	if !refused {
		return true
	}
	return slices.ContainsFunc(tries, func(try error) bool {
		return serverError(try) == nil && !badCertificate(try) && !withoutTLS(try) && !(oneHost && neverDialed(try))
	})
}

// neverDialed reports whether nobody took the connection at an address.
func neverDialed(try error) bool {
	var failed *net.OpError
	return errors.As(try, &failed) && failed.Op == "dial"
}

// withoutTLS reports whether a try ended since the server has no TLS. With sslmode=prefer the next one, at the same address, goes without.
func withoutTLS(try error) bool {
	for ; try != nil; try = errors.Unwrap(try) {
		if try.Error() == "server refused TLS connection" { // pgx gives it no type
			return true
		}
	}
	return false
}

// refusedForGood reports whether the server refused a statement for what it was given, as it will again.
func refusedForGood(err error) bool {
	said := serverError(err)
	return said != nil && !retryable(err) && (strings.HasPrefix(said.Code, "22") || errors.Is(conditionOf(said), ErrInvalid))
}

// notificationsFull reports whether the server's queue of notifications is full, so that nothing that notifies can be committed until whoever listens
// within an old transaction has read on. The state is the one of what is too large, so the function that raised it has to tell, or the text, which
// is in the server's language, where the driver tells no function.
func notificationsFull(err error) bool {
	said := serverError(err)
	return said != nil && said.Code == "54000" && (said.Routine == "PreCommit_Notify" || said.Routine == "" && strings.Contains(said.Message, "NOTIFY"))
}

// takesNoWrites reports whether a server was met that is read-only: a standby, or one that was the primary until a moment ago.
func takesNoWrites(err error) bool {
	said := serverError(err)
	return said != nil && said.Code == "25006"
}

// badCertificate reports whether the server was refused for what it showed. With sslmode=verify-ca pgx verifies by itself, and then it is not wrapped.
// One that has expired is of the right server, and is renewed sooner or later.
func badCertificate(err error) bool {
	if invalid := (x509.CertificateInvalidError{}); errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		return false
	}
	return errors.As(err, new(*tls.CertificateVerificationError)) || errors.As(err, new(x509.UnknownAuthorityError)) ||
		errors.As(err, new(x509.HostnameError)) || errors.As(err, new(x509.CertificateInvalidError))
}

// connectionLost reports whether err is of a connection that broke, or on which no answer came in time.
func connectionLost(err error) bool {
	var netErr net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &netErr) || errors.Is(err, driver.ErrBadConn) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, pgconn.ErrConnClosed)
}

// outcomeUnknown reports whether a statement that failed with err may have been committed all the same:
// it was sent, and no answer to it came back. Of an *Error, which a layer returns, that is known.
func outcomeUnknown(err error) bool {
	if wrapped := (*Error)(nil); errors.As(err, &wrapped) {
		return wrapped.Unknown
	}
	if err == nil || neverSent(err) || errors.As(err, new(*pgconn.ConnectError)) { // which may hold what the server said
		return false
	}
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		idle := pgErr.Code == "57P05" || pgErr.Code == "25P03" // the session ended since nothing came, before this did
		return pgErr.SeverityUnlocalized != "ERROR" && !idle
	}
	return !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrLockLost)
}

// neverSent reports whether a statement that failed with err did not leave this process, or can have had no effect. Of "conn closed" nobody knows: pgx takes it for
// that, and has it as well where a connection ended before the answer came, if that may be of several results: of whatever has no arguments, as a commit, of a batch
// in mode exec, and of anything in simple_protocol.
func neverSent(err error) bool {
	return pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed) || errors.As(err, new(conns.NotBegun))
}

// invalid returns an ErrInvalid that says what is wrong with which argument.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
