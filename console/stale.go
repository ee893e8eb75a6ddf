package console

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: is what is acted upon what the page has shown?
//
// A page may be minutes old when a button is pressed, and so may the question be whether somebody is sure. A button has with it what the page has shown
// of what it is about (field seen), as far as somebody goes by that who presses it; the act compares it with what is there, right before it is done. What changes
// all the time is left out, so that what goes on can be acted upon.

// errStale is an action on what is not there as the page has shown it.
var errStale = errors.New("nothing was changed: this is no longer what the page showed. Look at it again, and decide anew")

// checkSeen fails unless what a form is about still is what the page has shown. A form that does not say what that was, as of a program, means what there is.
func (c *console) checkSeen(ctx context.Context, of action, form *request) error {
	was := form.Get("seen")
	if of.seen == nil || was == "" {
		return nil
	}
	now, err := of.seen(ctx, c, form)
	if err == nil && now != was {
		err = errStale
	}
	return err
}

// digest is what was seen, in short.
func digest(parts ...any) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", parts))
	return hex.EncodeToString(sum[:12])
}

func seenTask(ctx context.Context, c *console, form *request) (string, error) {
	t, err := c.o.Tasks.Task(ctx, form.Get("id")) // inTask has made sure of the task graph
	if err != nil {
		return "", err
	}
	return taskSeen(t), nil
}

// taskSeen: whether it goes on; if not, since when.
func taskSeen(t *taskgraph.Task) string {
	if t.State.IsTerminal() || t.State == taskgraph.TaskBlockedByFailures {
		return digest(string(t.State), instantSeen(t.StateSince))
	}
	return digest("goes on")
}

func seenFailures(ctx context.Context, c *console, form *request) (string, error) {
	steps, err := c.o.Tasks.Steps(ctx, form.Get("id"))
	return failuresSeen(steps), err
}

// failuresSeen: which steps have failed for good, and when.
func failuresSeen(steps []taskgraph.StepInfo) string {
	var all []any
	for _, s := range steps {
		if s.State == taskgraph.StepError {
			all = append(all, s.ID, instantSeen(s.UpdatedAt))
		}
	}
	return digest(all...)
}

func seenSchedule(ctx context.Context, c *console, form *request) (string, error) {
	bus, err := c.busOf(form)
	if err != nil {
		return "", err
	}
	s, err := bus.GetSchedule(ctx, form.Get("name"))
	return scheduleSeen(&s), err
}

// scheduleSeen: when what comes, and whether it does.
func scheduleSeen(s *eventbus.ScheduleInfo) string {
	return digest(s.ID, s.Cron, s.TimeZone, s.Type, s.Work, fmt.Sprint(s.Paused))
}

func seenInstance(ctx context.Context, c *console, form *request) (string, error) {
	info, err := c.p.GetInstanceInfo(ctx, form.Get("id"))
	if err != nil {
		return "", err
	}
	return instanceSeen(info), nil
}

// instanceSeen: which of those that have had the id, and whether it has ended. Its execution is not part of it: one that begins anew all the time is the same instance.
func instanceSeen(info *pgwake.InstanceInfo) string {
	ended := info.Status == pgwake.StatusCompleted || info.Status == pgwake.StatusFailed || info.Status == pgwake.StatusCancelled
	return digest(instantSeen(info.CreatedAt), fmt.Sprint(ended))
}

// instantSeen is an instant as PostgreSQL has it, to the microsecond.
func instantSeen(at time.Time) string { return at.UTC().Format(time.RFC3339Nano) }
