// Package pgmqtest has a stand-in for pgmq, for tests and demonstrations on servers that do not have it. It has the tables, and the
// functions that package pgmq uses; it is not for production.
package pgmqtest

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: how does a database get something that looks like pgmq?

//go:embed standin.sql
var standIn string

// Install creates the schema pgmq with the stand-in. It fails if there is such a schema, as where pgmq is installed.
func Install(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, standIn); err != nil {
		return fmt.Errorf("install the stand-in for pgmq: %w", err)
	}
	return nil
}
