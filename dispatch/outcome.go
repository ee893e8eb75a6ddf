package dispatch

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: who is told of what became of an item?

// Outcome is what becomes of an item.
type Outcome string

const (
	Done         Outcome = "done"          // acknowledged; if the completion is refused then, the orchestration is told that, and the log
	Retried      Outcome = "retried"       // failed, and due again after a delay
	Snoozed      Outcome = "snoozed"       // due again after a delay that the handler asked for; the attempt does not count
	DeadLettered Outcome = "dead-lettered" // failed for the last time; the orchestration that scheduled it, if one did, is told instead
	GivenBack    Outcome = "given back"    // not begun in time, or the Dispatcher stops; due again at once
	LeaseLost    Outcome = "lease lost"    // somebody else's by now
)

// Ended is the end of an attempt at an item.
type Ended struct {
	Item    *pgwake.ClaimedWorkItem
	Outcome Outcome
	Err     error         // of the handler, or why that came to no end; nil if all is well, with Snoozed, and if it was not begun
	Delay   time.Duration // with Retried and Snoozed
	Held    time.Duration // from the claim to now
}

func (v verdict) outcome() Outcome {
	switch {
	case v.fate == acknowledge, v.fate == committed:
		return Done
	case v.fate == bury:
		return DeadLettered
	case v.fate == forsake:
		return LeaseLost
	case !v.free:
		return Retried
	case v.snoozed:
		return Snoozed
	}
	return GivenBack
}

// log is for lines about an item.
func (d *Dispatcher) log(h *held) *slog.Logger {
	return d.cfg.Logger.With("item", h.item.ID, "name", h.item.Name, "namespace", h.item.Namespace, "attempt", h.item.Attempt)
}

// tell says what becomes of an item.
func (d *Dispatcher) tell(h *held, v verdict) {
	outcome := v.outcome()
	switch outcome {
	case Retried:
		d.log(h).Warn("dispatch: failed", "again_in", v.delay, "error", text(v.err))
	case DeadLettered:
		d.log(h).Error("dispatch: given up", "reason", v.reason, "error", text(v.err))
	case LeaseLost:
		d.log(h).Warn("dispatch: the lease was lost", "error", text(v.err))
	case Done:
		if v.err != nil {
			d.log(h).Warn("dispatch: failed after it was acknowledged", "error", text(v.err))
		}
	}
	if d.cfg.OnEnd != nil {
		ended := Ended{Item: h.item, Outcome: outcome, Err: v.err, Delay: v.delay, Held: time.Since(h.since)}
		if _, err := hooked(func() (_ struct{}, _ error) { d.cfg.OnEnd(ended); return }); err != nil {
			d.log(h).Error("dispatch: OnEnd did not return", "error", text(err))
		}
	}
}

// hooked calls a function of the user's. A panic is an error, and so is an end of its goroutine, which is one of its own: that of
// the caller has more to do.
func hooked[T any](fn func() (T, error)) (v T, err error) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = errGoexit
		defer func() {
			if panicked := recover(); panicked != nil {
				err = &PanicError{panicked, debug.Stack()}
			}
		}()
		v, err = fn()
	}()
	<-ended
	return v, err
}

// longestText is how much of an error is kept, in bytes.
const longestText = 16 << 10

// text is what an error says, as the Provider takes it.
func text(err error) (said string) {
	if err == nil {
		return ""
	}
	defer func() {
		if panicked := recover(); panicked != nil { // a nil pointer in an error, say
			said = fmt.Sprintf("%T, whose text cannot be had: %v", err, panicked)
		}
	}()
	said = err.Error()
	said = said[:min(len(said), longestText)]
	said = strings.ReplaceAll(strings.ToValidUTF8(said, "\uFFFD"), "\x00", "\uFFFD") // which takes more room
	return strings.ToValidUTF8(said[:min(len(said), longestText)], "")
}
