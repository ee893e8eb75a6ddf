package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: what does doctor do about what its checks find?
//
// A check that finds nothing is one line. Each tells of one cause: where one would only repeat what another says, it is skipped.

// queries are what is asked of PostgreSQL's catalogs and views.
//
//go:embed sql/*.sql
var queries embed.FS

// verdict of a check.
type verdict string

const (
	fine    verdict = "ok"
	warning verdict = "warn"
	failure verdict = "fail"
	skipped verdict = "skip" // nothing to say before another finding is mended
)

// finding is what a check has found.
type finding struct {
	Check   string  `json:"check"`
	Verdict verdict `json:"verdict"`
	Reason  string  `json:"reason"`
	Fix     string  `json:"fix,omitempty"` // a command that mends it, of a shell or SQL
}

// report is what doctor prints as JSON.
type report struct {
	Database string    `json:"database"`
	Schema   string    `json:"schema"`
	Verdict  verdict   `json:"verdict"` // the worst of them
	Findings []finding `json:"findings"`
}

// limits are from when on a check speaks.
type limits struct {
	transaction, idle, prepared, clock, oldest time.Duration
	deadTuples, deadLetters                    int64
	bloat                                      int64 // bytes
	xminAge                                    int64 // transactions
	connections, notifyQueue                   float64
}

// patient is the database under examination.
type patient struct {
	limits
	schema string
	flag   string // that names the schema, if one did
	now    func() time.Time

	conn   *pgx.Conn        // through whatever is in between
	direct *pgx.ConnConfig  // around it
	around bool             // that is another way
	p      *pgwake.Provider // nil: it cannot be opened, as when the schema is not migrated

	standby bool // the primary is what is to be examined
	pooled  bool // the session is not the client's own
	allSeen bool // the role may see what other roles' sessions do
}

// check looks at one thing.
type check struct {
	name string
	look func(context.Context, *patient) finding
}

func checks() []check {
	return []check{
		{"server", checkServer}, {"schema", checkSchema}, {"layers", checkLayers}, {"rights", checkRights},
		{"pooler", checkPooler}, {"notifications", checkNotifications}, {"notify queue", checkNotifyQueue}, {"clock", checkClock},
		{"connections", checkConnections}, {"long transactions", checkTransactions}, {"idle in transaction", checkIdle},
		{"prepared transactions", checkPrepared}, {"replication slots", checkSlots}, {"standbys", checkStandbys}, {"autovacuum", checkAutovacuum},
		{"dead tuples", checkDeadTuples}, {"index bloat", checkBloat}, {"waiters", checkWaiters}, {"pauses", checkPauses},
		{"backlog", checkBacklog}, {"dead letters", checkDeadLetters},
	}
}

// checkTimeout is how long one may take.
const checkTimeout = 30 * time.Second

func (a *app) doctorCommand() *cobra.Command {
	var l limits
	var strict bool
	var bloat int64
	c := &cobra.Command{
		Use: "doctor", Short: "Examine the database, and say what to do", Args: cobra.NoArgs,
		Long: `Examine the database, and say of what is not well why, and the command that mends it. It changes nothing.

Exit code 0: nothing failed; warnings alone are 0 as well, but 1 with --strict. 1: something failed, or could not be examined.`,
		RunE: func(c *cobra.Command, _ []string) error {
			l.bloat = bloat << 20
			return a.doctor(c.Context(), l, strict)
		},
	}
	f := c.Flags()
	f.BoolVar(&strict, "strict", false, "exit code 1 for warnings, too")
	f.DurationVar(&l.transaction, "max-transaction", 5*time.Minute, "how long a transaction may work")
	f.DurationVar(&l.idle, "max-idle", time.Minute, "how long a session may be idle in a transaction")
	f.DurationVar(&l.prepared, "max-prepared", 5*time.Minute, "how long a prepared transaction may wait for its end")
	f.Int64Var(&l.xminAge, "max-xmin-age", 500_000, "how many transactions ago the oldest snapshot of a standby may have begun")
	f.DurationVar(&l.clock, "max-clock-offset", 5*time.Second, "how far this machine's clock may differ from the server's")
	f.DurationVar(&l.oldest, "max-wait", time.Minute, "how long the oldest item that is due may have waited")
	f.Int64Var(&l.deadTuples, "max-dead-tuples", 10_000, "how many dead rows a table may have, if they are more than half as many as live ones")
	f.Int64Var(&bloat, "max-bloat", 100, "how large an index may be, in MiB, that is five times as large as its rows need")
	f.Int64Var(&l.deadLetters, "max-dead-letters", 0, "how many dead letters there may be")
	f.Float64Var(&l.connections, "max-connections", 0.85, "share of the connections that may be in use")
	f.Float64Var(&l.notifyQueue, "max-notify-queue", 0.05, "share of the server's queue of notifications that may be in use")
	return c
}

func (a *app) doctor(ctx context.Context, l limits, strict bool) error {
	config, err := a.config()
	if err != nil {
		return err
	}
	direct, err := a.listenConfig()
	if err != nil {
		return err
	}
	r := report{Database: place(config), Schema: a.schema}
	at := &patient{limits: l, schema: a.schema, now: a.now, direct: direct, around: a.listenTarget() != ""}
	if a.schemaNamed {
		at.flag = " --schema " + shellWord(a.schema)
	}
	if !a.asJSON {
		a.printf("%s\n\n", a.style.head.Render(r.Database+", schema "+glance.OneLine(r.Schema)))
	}
	a.examine(ctx, config, at, func(f finding) {
		f.Reason, f.Fix = a.withoutSecrets(f.Reason), a.withoutSecrets(f.Fix)
		r.Findings = append(r.Findings, f)
		if !a.asJSON {
			a.printFinding(f)
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.Verdict = worst(r.Findings)
	if err := a.printReport(r); err != nil {
		return err
	}
	if r.Verdict == failure || strict && r.Verdict == warning {
		return exitCode(exitFailed)
	}
	return nil
}

// examine makes all checks, and tells of each; once it is interrupted, of none.
func (a *app) examine(ctx context.Context, config *pgx.ConnConfig, at *patient, tell func(finding)) {
	conn, err := pgx.ConnectConfig(ctx, config)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		tell(finding{"connection", failure, err.Error(), cmp.Or(hintFor(err), "psql with the same URL")})
		return
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	at.conn = conn
	p, end, err := a.provider(ctx)
	switch {
	case err == nil:
		defer end()
		at.p = p
	case ctx.Err() == nil && !errors.Is(err, pgwake.ErrServerTooOld) && !errors.Is(err, pgwake.ErrNotMigrated) && !isForbidden(err): // which have checks of their own
		tell(finding{"connection", failure, err.Error(), hintFor(err)})
	}
	for _, c := range checks() {
		f := c.examine(ctx, at)
		if ctx.Err() != nil {
			return
		}
		tell(f)
	}
}

func (c check) examine(ctx context.Context, at *patient) finding {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	f := skip("see server")
	if !at.standby {
		f = c.look(ctx, at)
	}
	f.Check = c.name
	return f
}

// pgwake is a command on the same schema.
func (at *patient) pgwake(command string) string { return "pgwake " + command + at.flag }

func worst(all []finding) verdict {
	rank := map[verdict]int{skipped: 0, fine: 0, warning: 1, failure: 2}
	of := fine
	for _, f := range all {
		if rank[f.Verdict] > rank[of] {
			of = f.Verdict
		}
	}
	return of
}

func (a *app) printFinding(f finding) {
	style := map[verdict]lipgloss.Style{fine: a.style.ok, warning: a.style.warn, failure: a.style.fail, skipped: a.style.faint}[f.Verdict]
	reason := strings.NewReplacer("\n\t", " ", "\n", " ").Replace(f.Reason) // pgx has a line of each address
	a.printf("%s  %-21s  %s\n", style.Render(fmt.Sprintf("%-4s", f.Verdict)), f.Check, glance.OneLine(reason))
	if f.Fix != "" {
		a.printf("      %s\n", a.style.mark.Render("→ "+glance.OneLine(f.Fix)))
	}
}

// printReport prints what is to be said in the end: for programs all, and for people, who have seen the findings, how many there were.
func (a *app) printReport(r report) error {
	if a.asJSON {
		return a.printJSON(r)
	}
	counts := make(map[verdict]int)
	for _, f := range r.Findings {
		counts[f.Verdict]++
	}
	a.printf("\n%d ok, %d warn, %d fail", counts[fine], counts[warning], counts[failure])
	if n := counts[skipped]; n > 0 {
		a.printf(", %d skipped", n)
	}
	a.printf("\n")
	return nil
}

// ok, warn, fail and skip are findings of the check that makes them.
func ok(format string, args ...any) finding {
	return finding{Verdict: fine, Reason: fmt.Sprintf(format, args...)}
}

func warn(fix, format string, args ...any) finding {
	return finding{Verdict: warning, Reason: fmt.Sprintf(format, args...), Fix: fix}
}

func fail(fix, format string, args ...any) finding {
	return finding{Verdict: failure, Reason: fmt.Sprintf(format, args...), Fix: fix}
}

func skip(format string, args ...any) finding {
	return finding{Verdict: skipped, Reason: fmt.Sprintf(format, args...)}
}

// unknown is a check that could not be made.
func unknown(err error) finding {
	if isForbidden(err) {
		return skip("see rights")
	}
	return fail(hintFor(err), "it could not be examined: %v", err)
}

// query is an embedded statement.
func query(name string) string {
	text, err := queries.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic(err) // a name that is not among the files
	}
	return string(text)
}
