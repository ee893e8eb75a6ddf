package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: is the server one that pgwake can work on, do notifications get through, and is there room?

const oldestServer = 14

// inUTF8 is what there is to do about a database of another encoding.
const inUTF8 = "pg_dump, CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8', and restore it there"

func checkServer(ctx context.Context, at *patient) finding {
	var major int
	var version, isolation, encoding string
	var readOnly bool
	err := at.conn.QueryRow(ctx, query("server")).Scan(&major, &version, &at.standby, &readOnly, &isolation, &encoding, &at.allSeen)
	switch {
	case err != nil:
		return unknown(err)
	case major < oldestServer:
		return fail("upgrade it to 14 or newer", "PostgreSQL %s is too old", version)
	case at.standby:
		return fail("add target_session_attrs=read-write to a URL with all hosts", "it is a standby, which can be neither written to nor listened on")
	case readOnly:
		return fail("ALTER ROLE CURRENT_USER SET default_transaction_read_only = off", "transactions are read-only by default")
	case isolation != "read committed":
		return warn("ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'read committed'",
			"transactions are %s by default, so each verb needs one of its own: two round trips more", isolation)
	case encoding == "SQL_ASCII":
		return warn(inUTF8, "the database is of encoding SQL_ASCII, and takes any bytes for text: what a client writes in another encoding than UTF-8 nobody can read")
	case encoding != "UTF8":
		return warn(inUTF8, "the database is of encoding %s: text with a character that this does not have is refused (22P05)", encoding)
	}
	return ok("PostgreSQL %s", version)
}

// sessionTest is how soon a notification has to be back.
const sessionTest = time.Second

func checkPooler(ctx context.Context, at *patient) finding {
	var pid uint32
	if err := at.conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		return unknown(err)
	}
	at.pooled = pid != at.conn.PgConn().PID()
	if !at.pooled {
		return ok("none in between")
	}
	if at.around {
		return ok("the URL goes through a pooler, and LISTEN around it")
	}
	config := at.conn.Config().Copy()
	took, err := roundTrip(ctx, config, at.conn)
	if err != nil {
		return fail("--listen-url with a URL that goes around it, and Config.ListenConfig in the program",
			"the URL goes through a pooler that carries no notifications, so nodes poll: %v", err)
	}
	return ok("one that lends whole sessions; a notification took %s", glance.Span(took))
}

func checkNotifications(ctx context.Context, at *patient) finding {
	if at.pooled && !at.around {
		return skip("see pooler")
	}
	took, err := roundTrip(ctx, at.direct, at.conn)
	if err != nil {
		return fail(cmp.Or(hintFor(err), "compare the two URLs: psql with each, and SELECT current_database(), pg_postmaster_start_time()"),
			"LISTEN and NOTIFY do not meet: %v", err)
	}
	return ok("there and back in %s", glance.Span(took))
}

// roundTrip listens on a connection of its own and notifies by another, as a node does that tests its own.
func roundTrip(ctx context.Context, config *pgx.ConnConfig, by *pgx.Conn) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout+sessionTest)
	defer cancel()
	listening, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return 0, err
	}
	defer func() { _ = listening.Close(context.WithoutCancel(ctx)) }()
	channel := fmt.Sprintf("pgwake_doctor_%d", rand.Uint64())
	if _, err := listening.Exec(ctx, "LISTEN "+channel); err != nil {
		return 0, err
	}
	began := time.Now()
	if _, err := by.Exec(ctx, `SELECT pg_notify($1, '')`, channel); err != nil {
		return 0, err
	}
	waiting, cancel := context.WithTimeout(ctx, sessionTest)
	defer cancel()
	if _, err := listening.WaitForNotification(waiting); err != nil {
		return 0, fmt.Errorf("none came within %s", glance.Span(sessionTest))
	}
	return time.Since(began), nil
}

func checkNotifyQueue(ctx context.Context, at *patient) finding {
	var used float64
	if err := at.conn.QueryRow(ctx, `SELECT pg_notification_queue_usage()`).Scan(&used); err != nil {
		return unknown(err)
	}
	fix := "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND xact_start < now() - interval '1 minute'"
	switch {
	case used > 0.5:
		return fail(fix, "it is %s full; when it is full, commits that notify fail: a session listens and does not read, as one that is idle in a transaction", percent(used))
	case used > at.notifyQueue:
		return warn(fix, "it is %s full: a session listens and does not read, as one that is idle in a transaction", percent(used))
	}
	return ok("%s full", percent(used))
}

func percent(share float64) string {
	return strconv.FormatFloat(math.Round(share*10_000)/100, 'f', -1, 64) + " %"
}

func checkClock(ctx context.Context, at *patient) finding {
	var offset, trip time.Duration
	for i := range 3 { // the quickest of three says it best
		sent := at.now()
		var there time.Time
		if err := at.conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&there); err != nil {
			return unknown(err)
		}
		took := at.now().Sub(sent)
		if i == 0 || took < trip {
			trip, offset = took, there.Sub(sent.Add(took/2))
		}
	}
	if offset.Abs() > at.clock {
		return warn("timedatectl set-ntp true, on whichever of the two is wrong",
			"the server's is %s %s this machine's: due times go by the server's, but head starts, and what is read of logs, do not", glance.Span(offset.Abs()), aheadOf(offset))
	}
	return ok("the server's is %s %s this machine's, give or take %s", glance.Span(offset.Abs()), aheadOf(offset), glance.Span(trip/2))
}

func aheadOf(offset time.Duration) string {
	if offset < 0 {
		return "behind"
	}
	return "ahead of"
}

func checkConnections(ctx context.Context, at *patient) finding {
	var used, most, ofDatabase, mostOfDatabase, ofRole, mostOfRole int64
	if err := at.conn.QueryRow(ctx, query("connections")).Scan(&used, &most, &ofDatabase, &mostOfDatabase, &ofRole, &mostOfRole); err != nil {
		return unknown(err)
	}
	config := at.conn.Config()
	var tight []string
	fix := ""
	for _, of := range []struct {
		what       string
		used, most int64
		fix        string
	}{
		{"the server", used, most, "ALTER SYSTEM SET max_connections = " + fmt.Sprint(2*most) + " and restart it, or a smaller pool_max_conns"},
		{"the database", ofDatabase, mostOfDatabase, "ALTER DATABASE " + pgx.Identifier{config.Database}.Sanitize() + " CONNECTION LIMIT " + fmt.Sprint(2*mostOfDatabase)},
		{"the role", ofRole, mostOfRole, "ALTER ROLE " + pgx.Identifier{config.User}.Sanitize() + " CONNECTION LIMIT " + fmt.Sprint(2*mostOfRole)},
	} {
		if of.most >= 0 && float64(of.used) > at.connections*float64(of.most) { // -1: any number
			tight = append(tight, fmt.Sprintf("%d of the %d that %s admits are in use", of.used, of.most, of.what))
			fix = of.fix
		}
	}
	if len(tight) > 0 {
		return warn(fix, "%s", strings.Join(tight, "; "))
	}
	return ok("%d of %d are in use", used, most)
}
