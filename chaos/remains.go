package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what is left of nodes that are gone, and after all processes have closed?

// ofNodes are the connections of the processes.
const ofNodes = `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'chaos-%'`

// remain is something of which nothing may be left, and a query that counts it.
type remain struct{ what, query string }

// remainsOn are what nodes that are gone could have left on the server.
func remainsOn() []remain {
	return []remain{
		{"connections", ofNodes},
		{"transactions that are prepared", `SELECT count(*) FROM pg_prepared_xacts`},
		{"advisory locks", `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`},
	}
}

// remainsIn are what they could have left in a schema.
func remainsIn(schema string) []remain {
	return []remain{
		{"rows of waiters in schema " + schema, `SELECT count(*) FROM ` + schema + `.waiters`},
		{"locked instances in schema " + schema, `SELECT count(*) FROM ` + schema + `.instance_locks WHERE locked_until > now()`},
	}
}

// How long what remains may be there.
const (
	goingPatience = 2 * time.Second // a backend takes a moment to end after its client has
	sweepPatience = silenceBound    // others find by a fallback what a node that is gone has left
)

// afterAll is when nobody is there any more.
const afterAll = "after all have closed"

// checkRemains complains about what is left, and stays.
func (c *chaos) checkRemains(ctx context.Context, when string, patience time.Duration, all ...remain) error {
	return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		until := time.Now().Add(min(patience+c.options.slack, askBound/2))
		for _, r := range all {
			var left int
			for {
				if err := conn.QueryRow(ctx, r.query).Scan(&left); err != nil {
					return fmt.Errorf("%s: %w", r.what, err)
				}
				if left == 0 || time.Now().After(until) {
					break
				}
				nap(ctx, 20*time.Millisecond)
			}
			if left > 0 {
				c.complain(fmt.Errorf("%d %s are left %s", left, r.what, when))
			}
		}
		return nil
	})
}

// checkSwept complains about rows of nodes that are gone while others are there.
func (c *chaos) checkSwept(ctx context.Context) error {
	var all []remain
	for _, schema := range allSchemas {
		all = append(all, remain{"queues with rows of nodes that are gone, in schema " + schema + ",", `SELECT cardinality(` + schema + `.dead_queues(0))`})
	}
	return c.checkRemains(ctx, "with others there", sweepPatience, all...)
}

// checkNothingRemains complains about what is left of a run. A node that could not remove its rows in time has left that to others; so
// another one comes, in a way.
func (c *chaos) checkNothingRemains(ctx context.Context) error {
	if err := c.checkRemains(ctx, afterAll, goingPatience, remainsOn()...); err != nil {
		return err
	}
	err := c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		for _, schema := range allSchemas {
			if _, err := conn.Exec(ctx, `SELECT `+schema+`.remove_waiters(queue, 0, false, '1 s') FROM unnest(ARRAY['worker', 'orchestrator']) AS queue`); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	var all []remain
	for _, schema := range allSchemas {
		all = append(all, remainsIn(schema)...)
	}
	return c.checkRemains(ctx, afterAll, goingPatience, all...)
}
