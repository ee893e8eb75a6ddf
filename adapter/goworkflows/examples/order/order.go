package main

import (
	"context"
	"fmt"
	"time"

	"github.com/cschleiden/go-workflows/workflow"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: what happens to an order?

// paid is the signal that the customer has paid.
const paid = "paid"

// deadline is when an order is given up that nobody has paid for.
const deadline = time.Hour

// coolingOff is how long a parcel waits, for a customer who has second thoughts.
const coolingOff = 300 * time.Millisecond

var shop *Shop // names its activities

// Order is the workflow: reserve, wait for the payment, send the invoice, ship.
func Order(ctx workflow.Context, order string, articles int) (string, error) {
	for n := range articles {
		if _, err := workflow.ExecuteActivity[any](ctx, workflow.DefaultActivityOptions, shop.Reserve, order, n).Get(ctx); err != nil {
			return "", err
		}
	}

	waiting, stop := workflow.WithCancel(ctx)
	timer := workflow.ScheduleTimer(waiting, deadline)
	amount := 0
	workflow.Select(ctx,
		workflow.Receive(workflow.NewSignalChannel[int](ctx, paid), func(_ workflow.Context, cents int, _ bool) { amount = cents }),
		workflow.Await(timer, func(workflow.Context, workflow.Future[any]) {}),
	)
	stop()
	if amount == 0 {
		return "given up", nil
	}

	if _, err := workflow.ExecuteActivity[any](ctx, workflow.DefaultActivityOptions, shop.Invoice, order, amount).Get(ctx); err != nil {
		return "", err
	}
	parcel, err := workflow.CreateSubWorkflowInstance[string](ctx, workflow.SubWorkflowOptions{InstanceID: "parcel of " + order}, Ship, order).Get(ctx)
	return fmt.Sprintf("paid %d cents, sent as %s", amount, parcel), err
}

// Ship is a workflow of its own, which the order waits for.
func Ship(ctx workflow.Context, order string) (string, error) {
	if err := workflow.Sleep(ctx, coolingOff); err != nil {
		return "", err
	}
	return workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, shop.Post, order).Get(ctx)
}

// Shop has the activities. Each may be carried out more than once, if a process dies in the middle of it, and so each has its effect under a name of
// its own.
type Shop struct {
	pool *pgxpool.Pool
	pid  int
}

// Reserve takes its time, as the warehouse is slow.
func (s *Shop) Reserve(ctx context.Context, order string, article int) error {
	time.Sleep(50 * time.Millisecond)
	return s.effect(ctx, fmt.Sprintf("%s: article %02d is reserved", order, article))
}

// Invoice writes one.
func (s *Shop) Invoice(ctx context.Context, order string, cents int) error {
	return s.effect(ctx, fmt.Sprintf("%s: the invoice over %d cents is sent", order, cents))
}

// Post returns the number of the parcel.
func (s *Shop) Post(ctx context.Context, order string) (string, error) {
	return "parcel 1", s.effect(ctx, order+": the parcel is on its way")
}

func (s *Shop) effect(ctx context.Context, what string) error {
	_, err := s.pool.Exec(ctx, `INSERT INTO effects (what, pid) VALUES ($1, $2) ON CONFLICT (what) DO NOTHING`, what, s.pid)
	return err
}
