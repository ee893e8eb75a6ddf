package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what can be set, and to what?

// Config says how a Dispatcher works. The zero value means the defaults, and so does a nil *Config.
type Config struct {
	// Concurrency is how many items are handled at one time. Defaults to 10.
	Concurrency int

	// Namespaces, Tags and Session say what is fetched; see pgwake.FetchOptions. Default to everything that has neither tag
	// nor session.
	Namespaces []string
	Tags       pgwake.TagFilter
	Session    *pgwake.SessionOptions

	// LockTimeout is how long the items of a process that died are kept from others. While a handler runs, the lease is
	// renewed. From 1 s to 24 h. Defaults to 30 s.
	LockTimeout time.Duration

	// Timeout ends the context of a handler, with ErrTimeout as the cause. Defaults to 0: none.
	Timeout time.Duration

	// MaxAttempts is how often an item is tried before it becomes a dead letter; Unlimited for ever. Defaults to 25.
	MaxAttempts int

	// Retry says how long to wait after an attempt that failed. Defaults to Backoff(time.Second, time.Hour).
	Retry RetryPolicy

	// Ahead is how many items may be claimed beyond those at work, so that short handlers need not wait for the database. It
	// claims as many as are likely to be begun within 20 ms, and gives back what is not. Defaults to 1000; NotAhead is for
	// none.
	Ahead int

	// Begin begins the transactions of HandleTx, on the Provider's database; a pool's Begin will do. Defaults to nil:
	// there is no HandleTx.
	Begin func(context.Context) (pgx.Tx, error)

	// StopTimeout is how long handlers may go on once Run is to end. Defaults to 25 s.
	StopTimeout time.Duration

	// CancelTimeout is how long those that did not end by then may take to notice. Defaults to 2 s.
	CancelTimeout time.Duration

	// Middleware wraps every handler, the first outermost.
	Middleware []Middleware

	// Completion makes the message for the orchestration that scheduled an item, out of the handler's result or the error
	// of the last attempt; nil: none. Defaults to CompletionMessage.
	Completion func(item *pgwake.ClaimedWorkItem, result Result, err error) (*pgwake.Message, error)

	// Logger receives what operators should know. Its keys are those of package slogkeys... Defaults to slog.Default().
	Logger *slog.Logger
}

// Values for fields of which 0 means the default.
const (
	Unlimited = -1 // Config.MaxAttempts
	NotAhead  = -1 // Config.Ahead
)

func (c *Config) resolve() (Config, error) {
	r := Config{}
	if c != nil {
		r = *c
	}
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{pgwake.ErrConfig}, args...)...))
	}
	number := func(name string, v *int, unless, least int) {
		if *v == 0 {
			*v = unless
		}
		if *v < least {
			bad("%s %d is less than %d", name, *v, least)
		}
	}
	duration := func(name string, v *time.Duration, unless, least time.Duration) {
		if *v == 0 {
			*v = unless
		}
		if *v < least {
			bad("%s %v is less than %v", name, *v, least)
		}
	}
	number("Concurrency", &r.Concurrency, 10, 1)
	number("MaxAttempts", &r.MaxAttempts, 25, Unlimited)
	number("Ahead", &r.Ahead, 1000, NotAhead)
	duration("LockTimeout", &r.LockTimeout, pgwake.DefaultLockTimeout, time.Second)
	duration("Timeout", &r.Timeout, 0, 0)
	duration("StopTimeout", &r.StopTimeout, 25*time.Second, 0)
	duration("CancelTimeout", &r.CancelTimeout, 2*time.Second, 0)
	if r.LockTimeout > pgwake.MaxLockTimeout {
		bad("LockTimeout %v is more than %v", r.LockTimeout, pgwake.MaxLockTimeout)
	}
	if r.Retry == nil {
		r.Retry = Backoff(time.Second, time.Hour)
	}
	if r.Completion == nil {
		r.Completion = CompletionMessage
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	return r, errors.Join(errs...)
}
