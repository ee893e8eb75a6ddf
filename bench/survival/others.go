package main

// This file answers: what do the sources say of others in the same trouble? The figures are theirs, on machines of theirs.

const (
	sweep    = "https://github.com/hardbyte/postgresql-job-queue-benchmarking/blob/main/results/2026-05-09-full-sweep/SUMMARY.md"
	hangfire = "https://github.com/hangfire-postgres/Hangfire.PostgreSql/issues/410"
	horizon  = "https://github.com/NikolayS/pgque/blob/main/docs/benchmarks.md"
	digest   = "https://planetscale.com/blog/keeping-a-postgres-queue-healthy"
	features = "https://www.pgbouncer.org/features.html"
)

var others = map[string]string{
	restart.name: "rate afterwards, of that before: awa, pgque and River 100%; absurd, Oban, procrastinate and pgmq 0%; pg-boss's process ended [[sweep](" + sweep + ")]",
	crash.name:   "no source has this one; see restart",
	kill.name: "rate afterwards, of that before: awa, Oban, pgque and River 100%; absurd, procrastinate and pgmq 0%; pg-boss's process ended [[sweep](" + sweep + ")]. " +
		"Hangfire.PostgreSql does not listen again, and items wait for their invisibility timeout [[issue](" + hangfire + ")]",
	idle.name: "a generic `SKIP LOCKED` queue at 800/s for 3 min: 797 to 517 items/s, 6,397 to 91,593 dead tuples; pgque, which claims no rows: none [[pgque](" + horizon + ")]. " +
		"Rate meanwhile: pgque 100%, Oban 96%, awa 75%; the runs of absurd, pg-boss, procrastinate, River and pgmq did not end [[sweep](" + sweep + ")]",
	readers.name: "800 items/s and three overlapping queries of 120 s: 155,000 items behind, 383,000 dead tuples, claims 300 ms instead of 2 [[PlanetScale](" + digest + ")]. " +
		"Rate meanwhile: pg-boss, River and pgque 100%, Oban 98%, absurd 74%, awa 71%, procrastinate 63%, pgmq 39% [[sweep](" + sweep + ")]",
	pooler.name: "LISTEN works \"never\" with transaction pooling [[PgBouncer](" + features + ")]; it succeeds, and nothing comes",
	soak.name:   "the sweep's soak of 6 h is not published there",
}
