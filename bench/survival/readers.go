package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// This file answers: what if long queries over the queue's tables overlap, so that there is always one whose snapshot is old?

const (
	readersAtOnce = 3
	queriesEnded  = "queries that ended"
	readPause     = 50 * time.Millisecond // between two scans of a query, so that it takes as long on any machine
)

var readers = scenario{
	name: "readers", what: fmt.Sprintf("%d analytic queries over the queue's tables at any time, overlapping, one after the other", readersAtOnce), rate: 800,
	promise: idle.promise,
	run: func(ctx context.Context, t *trial) error {
		return t.threePhases(ctx, func(ctx context.Context) error {
			length := t.o.trouble / 2 // of a query
			all, ctx := errgroup.WithContext(ctx)
			var mu sync.Mutex
			for i := range readersAtOnce {
				all.Go(func() error {
					if !pause(ctx, time.Duration(i)*length/readersAtOnce) {
						return nil
					}
					return t.ask(ctx, func(conn *pgx.Conn) error {
						for {
							_, err := conn.Exec(ctx, analyticSQL, int(length/readPause), readPause.Seconds())
							if err != nil {
								return err
							}
							mu.Lock()
							t.Counts[queriesEnded]++
							mu.Unlock()
						}
					})
				})
			}
			return all.Wait()
		})
	},
	keep: keepHeld,
}

// analyticSQL scans again and again, in one statement and so by one snapshot, whatever has been there since it began.
const analyticSQL = `SELECT max(names + messages + letters), count(slept) FROM generate_series(1, $1::int) AS scan CROSS JOIN LATERAL (SELECT
	(SELECT count(DISTINCT name) + max(attempt_count) FROM ` + schema + `.worker_queue WHERE id > -scan) AS names,
	(SELECT count(*) FROM ` + schema + `.orchestrator_queue WHERE id > -scan) AS messages,
	(SELECT count(*) FROM ` + schema + `.dead_letters WHERE id > -scan) AS letters,
	pg_sleep($2::float8 + 0 * scan)::text AS slept) AS scanned`
