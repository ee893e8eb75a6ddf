package testdb

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
)

// This file answers: how many pages does a statement read?

// RequirePages fails the test, which goes on, unless a statement, which is undone, reads fewer pages: those of what is planned already.
func RequirePages(tb testing.TB, conn interface {
	Begin(context.Context) (pgx.Tx, error)
}, fewerThan int64, statement string) {
	tb.Helper()
	var read int64
	// The first call also plans, and so does any other after sessions that migrate, in whatever database, have said more than this one has heard.
	for call := range 5 {
		tx, err := conn.Begin(tb.Context())
		if err != nil {
			tb.Fatal(err)
		}
		var plan []struct {
			Plan struct {
				Hit  int64 `json:"Shared Hit Blocks"`
				Read int64 `json:"Shared Read Blocks"`
			}
		}
		err = tx.QueryRow(tb.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) `+statement).Scan(&plan)
		_ = tx.Rollback(context.Background())
		if err != nil {
			tb.Errorf("%s: %v", statement, err)
			return
		}
		read = plan[0].Plan.Hit + plan[0].Plan.Read
		if call > 0 && read < fewerThan {
			break
		}
	}
	tb.Logf("%6d pages, of less than %d: %s", read, fewerThan, statement)
	if read >= fewerThan {
		tb.Errorf("%s read %d pages", statement, read)
	}
}
