// Package order is a durable workflow, and the small runtime that it needs on top of pgwake.
package order

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// This file answers: what happens to an order? It knows nothing of queues, leases and crashes.

const (
	workflowName = "fulfil"
	paid         = "paid" // what the customer sends, with the name of the bank
	coolingOff   = 300 * time.Millisecond
)

// order is what an execution begins with.
type order struct {
	Articles []string `json:"articles"`

	// The second execution has these from the first.
	Total  int    `json:"total,omitempty"` // in cents
	PaidBy string `json:"paid_by,omitempty"`
}

// fulfil is the workflow. It runs from the top in every turn, and returns when it has to wait: what was done
// before is found in the history and not done again. So it must make the same calls each time. Clocks, random
// numbers and I/O belong into activities.
func fulfil(t *turn, input json.RawMessage) error {
	var o order
	if err := json.Unmarshal(input, &o); err != nil {
		return err
	}
	if o.PaidBy != "" {
		return ship(t, o)
	}

	// Fan out: all of them are scheduled in the first turn, and run wherever a worker is free.
	reservations := make([]answer, len(o.Articles))
	for i, article := range o.Articles {
		reservations[i] = t.activity("reserve", article)
	}
	// Fan in.
	for _, reserved := range reservations {
		price, ok, err := value[int](reserved)
		if err != nil {
			return t.fail(err)
		}
		if !ok {
			return nil
		}
		o.Total += price
	}

	// Wait for both, in whatever order they come. The answer to the invoice is the payment.
	t.activity("invoice", o.Total)
	considered := t.timer(coolingOff)
	payment := t.event(paid)
	if !considered.here || !payment.here {
		return nil
	}

	// A history should not grow for ever. A new execution has an empty one and remembers its input.
	var err error
	o.PaidBy, _, err = value[string](payment)
	if err != nil {
		return t.fail(err)
	}
	return t.continueAsNew(o)
}

// ship is the second execution.
func ship(t *turn, o order) error {
	parcel, ok, err := value[string](t.activity("ship", o.Articles))
	switch {
	case err != nil:
		return t.fail(err)
	case !ok:
		return nil
	}
	return t.complete(fmt.Sprintf("%d articles for %d.%02d, paid by %s, sent as %s",
		len(o.Articles), o.Total/100, o.Total%100, o.PaidBy, parcel))
}

// value decodes an answer; ok is false while there is none.
func value[T any](a answer) (v T, ok bool, err error) {
	switch {
	case !a.here:
		return v, false, nil
	case a.err != "":
		return v, false, errors.New(a.err)
	}
	err = json.Unmarshal(a.data, &v)
	return v, err == nil, err
}
