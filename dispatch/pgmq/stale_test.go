package pgmq_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a verb read while the server believes that a queue is empty?
//
// Most of the time it is, when it is analyzed. Then it has pages and, to the planner, no rows, until the next time: a walk over all of it is as
// good as looking up some.

// fillQueue adds 20,000 messages to the queue. Those of an even id are due, the others are leased, and were read once.
const fillQueue = `
	INSERT INTO pgmq.q_a_queue (vt, read_ct, message, headers)
		SELECT CASE g % 2 WHEN 0 THEN now() ELSE now() + interval '1 day' END, g % 2, '1', '{"pgwake": {"name": "m"}}'
		  FROM generate_series(1, 20000) g;
	INSERT INTO pgmq.a_a_queue (vt, msg_id, message) SELECT now(), -g, '1' FROM generate_series(1, 20000) g`

// What earlier statements left behind is walked over for as long as anybody has a snapshot from before. So that each run reads the same, somebody has
// one here all the time: nothing is removed.
func TestVerbs_QueueAnalyzedWhenEmpty_ReadHardlyMoreThanWhatTheyAreFor(t *testing.T) {
	s := standIn(t)
	holder, err := pgx.Connect(t.Context(), s.url)
	require.NoError(t, err)
	defer holder.Close(context.Background())
	_, err = holder.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class LIMIT 1`)
	require.NoError(t, err)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `ALTER TABLE pgmq.q_a_queue SET (autovacuum_enabled = off)`)
	s.exec(t, `ALTER TABLE pgmq.a_a_queue SET (autovacuum_enabled = off)`)
	conn, err := pgx.Connect(t.Context(), s.url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	for _, sql := range []string{
		fillQueue, `DELETE FROM pgmq.q_a_queue; DELETE FROM pgmq.a_a_queue`, `ANALYZE pgmq.q_a_queue, pgmq.a_a_queue`, fillQueue,
		`SET statement_timeout = '60 s'`, // what walks and walks is not waited for
	} {
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}

	const few, one = `'a_queue', '{30005,30001,30003}', '{1,1,1}'`, `'a_queue', 30001, 1, `
	for _, verb := range []struct {
		call string
		most int64
	}{
		{`SELECT count(*) FROM pgwake_pgmq.namespaces()`, 100},
		{`SELECT pgwake_pgmq.send('a', '{1,2}', '{null,null}', '{0,1 min}')`, 100},
		{`SELECT count(*) FROM pgwake_pgmq.receive('a', 60, 3)`, 1100}, // along what is left of those that were deleted, by id and by vt
		{`SELECT count(*) FROM pgwake_pgmq.ack(` + few + `)`, 100},
		{`SELECT count(*) FROM pgwake_pgmq.extend(` + few + `, '1 min')`, 100},
		{`SELECT count(*) FROM pgwake_pgmq.extend_free(` + few + `, '1 min')`, 100},
		{`SELECT pgwake_pgmq.nack(` + one + `'1 min', true, 'e')`, 100},
		{`SELECT pgwake_pgmq.dead_letter(` + one + `'r', 'c')`, 100},
		{`SELECT pgwake_pgmq.bury('a_queue', 30001, 'r', 'c')`, 100},
	} {
		testdb.RequirePages(t, conn, verb.most, verb.call)
	}
}
