package main

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how do the layers take part in a run?
//
// The processes of taskgraph (graphs.go) and eventbus (bus.go) have schemas of their own, as the dispatchers under limits
// have, so that each has its own queues, and what is seen of one is not explained by another. Their lines in the ledgers
// have a part of their own, by which they are told from the others; they are judged by themselves (graphs_check.go,
// bus_check.go).

// The processes that have a schema of their own are the first of the deployment, in this order.
const (
	engines   = 2
	busNodes  = 2
	separates = dispatchers + engines + busNodes
)

// handlerTimeout is how long handlers of the layers may take, of which some hang for longer than a lease. One whose connection has
// silently lost its peer would wait for an answer for as long as its lease is renewed. By the time by which all must have noticed such a loss
// it has ended.
const handlerTimeout = lease + lease/2 + verbTimeout

// schemas are those of the roles that have one of their own.
var schemas = map[string]string{dispatcher: limitedSchema, engine: graphSchema, busNode: busSchema}

// allSchemas are those, and that of everybody else.
var allSchemas = []string{"pgwake", limitedSchema, graphSchema, busSchema}

// separateRoles are the roles of those processes.
func separateRoles() []string {
	return slices.Concat(slices.Repeat([]string{dispatcher}, dispatchers), slices.Repeat([]string{engine}, engines),
		slices.Repeat([]string{busNode}, busNodes))
}

// prepareLayers makes the schemas of the layers, with what has to be there from the beginning.
func (c *chaos) prepareLayers(ctx context.Context) error {
	for schema, furnish := range map[string]func(context.Context, *pgwake.Provider) error{
		graphSchema: prepareGraphs, busSchema: c.prepareBus,
	} {
		p, err := pgwake.Open(ctx, c.server.URL, &pgwake.Config{Schema: schema})
		if err != nil {
			return err
		}
		defer p.Close(context.WithoutCancel(ctx))
		if err := furnish(ctx, p); err != nil {
			return err
		}
	}
	return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, graphTables+";"+busTables)
		return err
	})
}

// layered reports whether the layers take part, as they do not in a soak.
func (c *chaos) layered() bool { return !c.schedules.made.IsZero() }

// openLayer makes what the role needs besides its Provider.
func (w *workload) openLayer(ctx context.Context) error {
	switch w.Role {
	case engine:
		return w.openEngine(ctx)
	case busNode:
		return w.openBus(ctx)
	}
	return nil
}

// layerTables is what the database holds of the layers at the end.
type layerTables struct {
	graphs graphsHeld
	bus    busHeld
}

func (c *chaos) readLayers(ctx context.Context) (t layerTables, err error) {
	err = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if err := t.graphs.read(ctx, conn); err != nil {
			return err
		}
		return t.bus.read(ctx, conn, c.ahead)
	})
	t.bus.schedules = c.schedules
	return t, err
}

// each calls f for every row of a query, with its columns in what to points to.
func each(ctx context.Context, conn *pgx.Conn, sql string, to []any, f func()) error {
	rows, _ := conn.Query(ctx, sql) // the error is that of the rows
	_, err := pgx.ForEachRow(rows, to, func() error { f(); return nil })
	return err
}

// apart returns the lines of task graphs, those of events, and all others.
func apart(lines []entry) (graphs, bus, others []entry) {
	for _, e := range lines {
		switch {
		case e.Graph != nil:
			graphs = append(graphs, e)
		case e.Bus != nil:
			bus = append(bus, e)
		default:
			others = append(others, e)
		}
	}
	return graphs, bus, others
}
