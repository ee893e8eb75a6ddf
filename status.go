package pgwake

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
)

// This file answers: what does an instance say about itself, and how did it end?

// CustomStatusUpdate is what a turn does to the custom status of its instance. Either way its version goes up by one.
type CustomStatusUpdate struct {
	Value string // any text of at most Config.MaxPayload bytes, the empty one included
	Clear bool   // leaves none; Value must then be empty
}

// CustomStatus is what an instance says about its progress.
type CustomStatus struct {
	Value   string
	Set     bool  // false: it was cleared, or never set
	Version int64 // goes up by one with each update, clearing included; 0: never set
}

// Outcome is how an instance ended.
type Outcome struct {
	Instance    string
	ExecutionID int64
	Status      Status // StatusCompleted, StatusFailed or StatusCancelled
	Output      string
}

// GetCustomStatus returns the custom status of an instance if its version is higher than lastSeen: 0 for any that
// was ever set. Nil, without an error, if it is not, and for an unknown instance. Versions begin anew with an instance
// that is deleted and made again: whoever remembers one of the former sees nothing of the latter until that has got
// further.
func (p *Provider) GetCustomStatus(ctx context.Context, instance string, lastSeen int64) (status *CustomStatus, err error) {
	err = p.do(ctx, "get custom status", func(ctx context.Context, q querier) error {
		if err := checkText("instance id", instance, true); err != nil {
			return err
		}
		var text *string
		var s CustomStatus
		err := q.QueryRow(ctx, p.sql.getCustomStatus, instance, lastSeen).Scan(&text, &s.Version)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err == nil {
			s.Value, s.Set = value(text), text != nil
			status = &s
		}
		return err
	})
	return status, err
}

// WaitForStatus returns the custom status of an instance as soon as its version is higher than lastSeen. It is
// pushed, and while nothing changes it costs neither a query nor a connection, however many wait; where the node does not
// listen, a query for all of them every Config.PollInterval, or AggressiveInterval if it is to. The instance need not exist yet. Versions in between are skipped: it is the latest one that is returned. What GetCustomStatus says of a
// lastSeen from a former instance holds here too.
//
// It waits as long as ctx lets it. Errors: the context's, then with the database's if the last attempt to read failed;
// ErrClosed when the Provider is closed; ErrNotFound when an instance that existed when the wait began is deleted,
// even if there is another with its id by then.
func (p *Provider) WaitForStatus(ctx context.Context, instance string, lastSeen int64) (*CustomStatus, error) {
	a, err := p.waitForInstance(ctx, "wait for status", question{instance: instance, lastSeen: lastSeen})
	if err != nil {
		return nil, err
	}
	return &CustomStatus{Value: value(a.value), Set: a.value != nil, Version: a.version}, nil
}

// WaitForInstance returns how an instance ended as soon as its current execution is Completed, Failed or Cancelled.
// One that continues as new has not ended. Costs and errors as for WaitForStatus.
func (p *Provider) WaitForInstance(ctx context.Context, instance string) (*Outcome, error) {
	a, err := p.waitForInstance(ctx, "wait for instance", question{instance: instance, outcome: true})
	if err != nil {
		return nil, err
	}
	return &Outcome{Instance: instance, ExecutionID: a.execution, Status: Status(a.status), Output: value(a.value)}, nil
}

func (p *Provider) waitForInstance(ctx context.Context, op string, q question) (answer, error) {
	if err := checkText("instance id", q.instance, true); err != nil {
		return answer{}, failed(op, err)
	}
	return p.wait(ctx, op, q)
}

func (p *Provider) wait(ctx context.Context, op string, q question) (a answer, err error) {
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return a, failed(op, err)
	}
	defer done()
	a, err = p.engine.waits.wait(ctx, q)
	return a, p.ended(ctx, op, err)
}

// statusArgs are an update, or none, as the arguments of apply_custom_status.
func (p *Provider) statusArgs(u *CustomStatusUpdate) (clear *bool, text *string, err error) {
	switch {
	case u == nil:
		return nil, nil, nil
	case u.Clear && u.Value != "":
		return nil, nil, invalid("the custom status is both cleared and set")
	case u.Clear:
		return new(true), nil, nil
	}
	return new(false), &u.Value, p.cfg.checkValue("custom status", u.Value)
}
