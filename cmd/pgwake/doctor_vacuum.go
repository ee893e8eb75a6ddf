package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: can vacuum keep up with the queues?
//
// Their rows come and go, so what is dead has to be cleared away all the time. Whatever keeps an old snapshot, or the id of an old
// transaction, keeps vacuum from that, on every table of the database; and claims, which read along an index, read what is dead as well.

// session is one that holds something up.
type session struct {
	pid               int32
	role, application string
	seconds           float64
	xids              int64 // transactions begun since, whose dead rows may not go
}

func (s session) String() string {
	text := fmt.Sprintf("process %d", s.pid)
	if s.role != "" {
		text += " of " + s.role
	}
	if s.application != "" {
		text += fmt.Sprintf(" (%s)", s.application)
	}
	text += " for " + glance.Span(seconds(s.seconds))
	if s.xids > 0 {
		text += fmt.Sprintf(", %d transactions back", s.xids)
	}
	return text
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// sessionsOf are those that a query finds, which has gone on for longer than a duration.
func (at *patient) sessionsOf(ctx context.Context, name string, longer time.Duration) ([]session, error) {
	rows, err := at.conn.Query(ctx, query(name), longer)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s session, err error) {
		return s, row.Scan(&s.pid, &s.role, &s.application, &s.seconds, &s.xids)
	})
}

// blind says that the role cannot see what other roles do.
func (at *patient) blind() string {
	if at.allSeen {
		return ""
	}
	return "; sessions of other roles cannot be seen without GRANT pg_read_all_stats"
}

func checkTransactions(ctx context.Context, at *patient) finding {
	all, err := at.sessionsOf(ctx, "transactions", at.transaction)
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn(fmt.Sprintf("SELECT pg_cancel_backend(%d)", all[0].pid), "vacuum clears nothing away that died since: %s", few(textsOf(all)))
	}
	return ok("none over %s%s", glance.Span(at.transaction), at.blind())
}

func checkIdle(ctx context.Context, at *patient) finding {
	all, err := at.sessionsOf(ctx, "idle", at.idle)
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn(fmt.Sprintf("SELECT pg_terminate_backend(%d); and ALTER ROLE … SET idle_in_transaction_session_timeout = '1min'", all[0].pid),
			"somebody has begun a transaction, and does nothing in it, so vacuum clears nothing away, and its locks stay: %s", few(textsOf(all)))
	}
	return ok("none over %s%s", glance.Span(at.idle), at.blind())
}

func checkPrepared(ctx context.Context, at *patient) finding {
	rows, err := at.conn.Query(ctx, query("prepared"), at.prepared)
	if err != nil {
		return unknown(err)
	}
	var all, fixes []string
	var gid, owner string
	var age float64
	var xids int64
	_, err = pgx.ForEachRow(rows, []any{&gid, &owner, &age, &xids}, func() error {
		all = append(all, fmt.Sprintf("%q of %s for %s, %d transactions back", gid, owner, glance.Span(seconds(age)), xids))
		fixes = append(fixes, "ROLLBACK PREPARED "+quoteText(gid))
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn(fixes[0], "nobody has ended what was prepared, and vacuum clears nothing away meanwhile: %s", few(all))
	}
	return ok("none over %s", glance.Span(at.prepared))
}

func quoteText(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func checkSlots(ctx context.Context, at *patient) finding {
	rows, err := at.conn.Query(ctx, query("slots"), at.xminAge)
	if err != nil {
		return unknown(err)
	}
	var all, fixes []string
	var name string
	var read bool
	var xids, wal int64
	_, err = pgx.ForEachRow(rows, []any{&name, &read, &xids, &wal}, func() error {
		if read {
			all = append(all, fmt.Sprintf("the standby that reads %s keeps what died in the last %d transactions", name, xids))
			fixes = append(fixes, endOldest)
			return nil
		}
		text := fmt.Sprintf("nobody reads %s, which keeps %s of WAL", name, glance.Size(wal))
		if xids > 0 {
			text += fmt.Sprintf(", and what died in the last %d transactions", xids)
		}
		all = append(all, text)
		fixes = append(fixes, "SELECT pg_drop_replication_slot("+quoteText(name)+"), unless its reader comes back")
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn(fixes[0], "%s", few(all))
	}
	return ok("each is being read")
}

// endOldest ends what a standby has told the primary to keep rows for.
const endOldest = "on the standby: SELECT pg_cancel_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() " +
	"ORDER BY age(backend_xmin) DESC LIMIT 1) AS oldest; or hot_standby_feedback = off"

// checkStandbys looks at those without a slot: of others the slot keeps what they need.
func checkStandbys(ctx context.Context, at *patient) finding {
	rows, err := at.conn.Query(ctx, query("standbys"), at.xminAge)
	if err != nil {
		return unknown(err)
	}
	var all []string
	var pid int32
	var name string
	var xids int64
	_, err = pgx.ForEachRow(rows, []any{&pid, &name, &xids}, func() error {
		all = append(all, fmt.Sprintf("%s, by process %d, %d transactions back", name, pid, xids))
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn(endOldest, "a query on a standby takes long, and vacuum clears nothing away meanwhile that died since: %s", few(all))
	}
	return ok("none keeps what died over %d transactions ago%s", at.xminAge, at.blind())
}

func checkAutovacuum(ctx context.Context, at *patient) finding {
	var on bool
	var off, bare []string
	if err := at.conn.QueryRow(ctx, query("autovacuum"), at.schema).Scan(&on, &off, &bare); err != nil {
		return unknown(err)
	}
	switch {
	case !on:
		return fail("ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf()", "it is off: tables and indexes grow without an end")
	case len(off) > 0:
		return fail(fmt.Sprintf("ALTER TABLE %s RESET (autovacuum_enabled)", at.table(off[0])), "it is off for %s, which grows without an end", few(off))
	case len(bare) > 0:
		return warn(fmt.Sprintf("ALTER TABLE %s SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)", at.table(bare[0])),
			"%s has lost the settings that it came with, so vacuum comes late", few(bare))
	}
	return ok("on, with the settings of the tables")
}

// table is the quoted name of one of the schema.
func (at *patient) table(name string) string { return pgx.Identifier{at.schema, name}.Sanitize() }

func checkDeadTuples(ctx context.Context, at *patient) finding {
	rows, err := at.conn.Query(ctx, query("dead_tuples"), at.schema, at.deadTuples)
	if err != nil {
		return unknown(err)
	}
	var all []string
	var worst, name string
	var live, dead int64
	var since *float64
	_, err = pgx.ForEachRow(rows, []any{&name, &live, &dead, &since}, func() error {
		vacuumed := "never vacuumed"
		if since != nil {
			vacuumed = "vacuumed " + glance.Span(seconds(*since)) + " ago"
		}
		all = append(all, fmt.Sprintf("%s has %d beside %d that live, %s", name, dead, live, vacuumed))
		worst = cmp.Or(worst, name)
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn("VACUUM "+at.table(worst)+"; if that does not help, see the transactions above", "%s", few(all))
	}
	return ok("no table has many")
}

func checkBloat(ctx context.Context, at *patient) finding {
	rows, err := at.conn.Query(ctx, query("bloat"), at.schema, at.bloat)
	if err != nil {
		return unknown(err)
	}
	var all []string
	var worst, name string
	var bytes, needed int64
	_, err = pgx.ForEachRow(rows, []any{&name, &bytes, &needed}, func() error {
		all = append(all, fmt.Sprintf("%s has %s, and needs about %s", name, glance.Size(bytes), glance.Size(needed)))
		worst = cmp.Or(worst, name)
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(all) > 0 {
		return warn("REINDEX INDEX CONCURRENTLY "+at.table(worst), "%s", few(all))
	}
	return ok("none over %d MiB that is five times as large as it need be", at.bloat>>20)
}
