package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what if backends are killed all the time?

const (
	killEvery = time.Second
	killRate  = 0.9 // of what is enqueued
	killP99   = 2 * time.Second
)

var kill = scenario{
	name: "kill", what: "the backends of all LISTEN connections, and a random one, are killed every second", rate: 400,
	promise: fmt.Sprintf("%.0f%% of what is enqueued is done in the same time, p99 under %v meanwhile and under %v afterwards", 100*killRate, killP99, calmP99),
	run: func(ctx context.Context, t *trial) error {
		return t.threePhases(ctx, func(ctx context.Context) error {
			return t.ask(ctx, func(conn *pgx.Conn) error {
				for {
					var listening, others int
					if err := conn.QueryRow(ctx, killSQL).Scan(&listening, &others); err != nil {
						return err
					}
					t.Counts["LISTEN backends killed"] += listening
					t.Counts["other backends killed"] += others
					if !pause(ctx, killEvery) {
						return nil
					}
				}
			})
		})
	},
	keep: func(r *result) []string {
		return slices.Concat(r.slow(during, killRate), r.late(during, killP99), r.late(after, calmP99))
	},
}

// killSQL spares the connection that sends it, and those that watch.
const killSQL = `WITH listening AS MATERIALIZED (
	SELECT pid FROM pg_stat_activity WHERE application_name = 'pgwake listen'
), others AS MATERIALIZED (
	SELECT pid FROM pg_stat_activity
	WHERE backend_type = 'client backend' AND application_name = '' AND pid <> pg_backend_pid() AND query NOT LIKE '%pg_stat_user_tables%'
	ORDER BY random() LIMIT 1
)
SELECT (SELECT count(*) FROM listening WHERE pg_terminate_backend(pid)), (SELECT count(*) FROM others WHERE pg_terminate_backend(pid))`
