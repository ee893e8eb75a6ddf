package pgwake_test

import (
	"context"
	"database/sql"
	"fmt"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
)

// With sqlc, GORM or bun it is the *sql.Tx beneath their transaction.
func ExampleWrapSQLTx() {
	databaseURL, config, end := forExample()
	defer end()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	check(err)
	defer p.Close(ctx)

	db, err := sql.Open("pgx", databaseURL) // or "postgres" of lib/pq
	check(err)
	defer db.Close()

	tx, err := db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	_, err = tx.ExecContext(ctx, `CREATE TEMPORARY TABLE orders AS SELECT 7 AS id`) // whatever else belongs together
	check(err)
	_, err = p.EnqueueForWorkerTx(ctx, pgwake.WrapSQLTx(tx), pgwake.WorkItem{Name: "ship", Input: []byte(`{"order":7}`)}, nil)
	check(err)
	check(tx.Commit())

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Printf("%s %s\n", item.Name, item.Input)
	// Output: ship {"order":7}
}
