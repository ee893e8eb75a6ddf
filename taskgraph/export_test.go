package taskgraph

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// NewGraph returns the verbs on a schema that has the tables, without an Engine.
func NewGraph(p *pgwake.Provider) *Graph {
	return &Graph{p: p, in: pgx.Identifier{p.Schema()}.Sanitize() + ".", headers: func(context.Context) *string { return nil }, maxResult: 1 << 20}
}

// SetUpkeepPatience sets how long upkeep takes at most. Before Run.
func SetUpkeepPatience(e *Engine, d time.Duration) { e.patience = d }

// SetClock sets the clock of the node. Before Run.
func SetClock(e *Engine, now func() time.Time) { e.clock = now }
