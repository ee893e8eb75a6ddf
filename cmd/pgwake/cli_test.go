package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	eventmigrations "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	taskmigrations "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: how do the tests run commands, and what holds for all of them?

// asCommand in the environment makes of the test program the command itself: for a test in a terminal.
const asCommand = "PGWAKE_TEST_IS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	testschema.Main(m)
}

// result is what became of a command.
type result struct {
	code     int
	out, err string
}

// cli runs commands on a schema of the test server, as a user does.
type cli struct {
	t       *testing.T
	url     string
	schema  string
	environ []string
	in      string
	now     func() time.Time
}

// layered are schemas with the layers of task graphs and of the event bus.
var layered = testschema.With(taskmigrations.Layer(), eventmigrations.Layer())

// newCLI is on a fresh schema that is migrated, and has a Provider on it to look and to plant.
func newCLI(t *testing.T, config *pgwake.Config) (*cli, *pgwake.Provider) {
	t.Helper()
	return newCLIOn(t, testschema.Core, config)
}

// newCLIOn is newCLI on a schema of that kind.
func newCLIOn(t *testing.T, kind *testschema.Kind, config *pgwake.Config) (*cli, *pgwake.Provider) {
	t.Helper()
	if config == nil {
		config = &pgwake.Config{Mode: pgwake.ModeDisabled}
	}
	p := kind.New(t, config)
	return &cli{t: t, url: pgwaketest.URL(t), schema: p.Schema(), now: time.Now}, p
}

func (c *cli) run(args ...string) result {
	c.t.Helper()
	return c.runIn(c.t.Context(), args...)
}

func (c *cli) runIn(ctx context.Context, args ...string) result {
	c.t.Helper()
	var out, errs bytes.Buffer
	w := world{in: strings.NewReader(c.in), out: &out, err: &errs, now: c.now,
		environ: append([]string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}, c.environ...)}
	code := run(ctx, args, w)
	return result{code, out.String(), errs.String()}
}

// ok runs a command that has to succeed, and returns what it printed.
func (c *cli) ok(args ...string) string {
	c.t.Helper()
	r := c.run(args...)
	require.Zero(c.t, r.code, "%s: %s%s", strings.Join(args, " "), r.out, r.err)
	return r.out
}

// refused runs a command that has to fail, and returns what it said.
func (c *cli) refused(code int, args ...string) string {
	c.t.Helper()
	r := c.run(args...)
	require.Equal(c.t, code, r.code, "%s: %s%s", strings.Join(args, " "), r.out, r.err)
	require.NotEmpty(c.t, r.err)
	return r.err
}

// into runs a command with --json and decodes what it printed.
func into[T any](c *cli, args ...string) (v T) {
	c.t.Helper()
	out := c.ok(append(args, "--json")...)
	require.NoError(c.t, json.Unmarshal([]byte(out), &v), out)
	return v
}

// exec runs a statement with the schema as its search path, on a connection of its own.
func (c *cli) exec(sql string, args ...any) {
	c.t.Helper()
	conn := c.connect(c.url)
	_, err := conn.Exec(c.t.Context(), sql, args...)
	require.NoError(c.t, err)
	require.NoError(c.t, conn.Close(context.Background()))
}

// connect opens a connection that ends with the test.
func (c *cli) connect(url string) *pgx.Conn {
	c.t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(c.t, err)
	config.RuntimeParams["search_path"] = pgx.Identifier{c.schema}.Sanitize()
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(c.t.Context(), config)
	require.NoError(c.t, err)
	c.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func TestCommandLine_IsWrong_ExitCodeIsTwoAndNothingWasTried(t *testing.T) {
	t.Parallel()
	c := &cli{t: t, url: "postgres://nobody@127.0.0.1:1/none", schema: "none", now: time.Now}
	for _, args := range [][]string{
		{"no-such-command"}, {"doctor", "--no-such-flag"}, {"doctor", "what?"}, {"migrate"}, {"migrate", "up", "--layer", "nothing"}, {"migrate", "up", "--layer", ""},
		{"migrate", "print", "--layer", "root,eventbus", "--from", "3"}, {"peek", "--limit", "0"}, {"dlq", "list", "--limit", "-1"},
		{"task", "list", "--limit", "10001"}, {"schedule", "list", "--limit", "many"}, {"tail", "--limit", "-1"}, {"dlq", "show", "7th"}, {"migrate", "down"}, {"peek", "--database-url", "neither nor"},
	} {
		require.Contains(t, c.refused(exitUsage, args...), "pgwake:")
	}
	c.url = ""
	said := c.refused(exitUsage, "migrate", "status")
	require.Contains(t, said, "it is not said which database")
	require.Contains(t, said, "PGWAKE_DATABASE_URL")
}

// Whoever reads JSON reads errors as well.
func TestErrors_JSON_SaysTheSame(t *testing.T) {
	t.Parallel()
	c := &cli{t: t, url: "postgres://ada:s3cret-word@127.0.0.1:1/shop", schema: "x", now: time.Now}
	for code, lines := range map[int][][]string{
		exitUsage:  {{"--json", "no-such-command"}, {"peek", "--limit", "0", "--json"}, {"dlq", "--json"}, {"dlq", "purge", "--json"}, {"enqueue", "x", "{", "--json"}},
		exitFailed: {{"peek", "--json"}, {"migrate", "status", "--json"}},
	} {
		for _, args := range lines {
			r := c.run(args...)
			require.Equal(t, code, r.code, "%v", args)
			var said struct{ Error, Hint string }
			require.NoError(t, json.Unmarshal([]byte(r.err), &said), "%v: %s", args, r.err)
			require.NotEmpty(t, said.Error)
			require.NotContains(t, r.err, "s3cret")
			require.Empty(t, r.out)
		}
	}
}

// full is a disk without room.
type full struct{ err error }

func (f full) Write([]byte) (int, error) { return 0, f.err }

func TestOutput_CannotBeWritten_ItFails(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "x"}, "no such printer")
	for _, args := range [][]string{{"migrate", "status"}, {"dlq", "list"}, {"dlq", "list", "--json"}, {"tail", "letters", "--all", "--every", "10ms"}, {"completion", "bash"}} {
		for _, err := range []error{errors.New("no space left"), syscall.EPIPE} {
			var said bytes.Buffer
			w := world{in: strings.NewReader(""), out: full{err}, err: &said, now: time.Now, environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}}
			require.Equal(t, exitFailed, run(t.Context(), args, w), "%v", args)
			require.Equal(t, err != syscall.EPIPE, strings.Contains(said.String(), "no space left"), "%v: %s", args, said.String())
			if err == syscall.EPIPE {
				require.Empty(t, said.String(), "whoever read it has enough")
			}
		}
	}
}

// silence is a terminal at which nobody types.
type silence struct{ asked, over chan struct{} }

func (s silence) Read([]byte) (int, error) {
	close(s.asked)
	<-s.over
	return 0, io.EOF
}

func TestInterrupted_WhileItWaitsForInput_EndsAtOnce(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "x"}, "no such printer")
	for _, args := range [][]string{{"dlq", "purge", "--all"}, {"migrate", "down"}, {"enqueue", "x", "-"}} {
		ctx, cancel := context.WithCancel(t.Context())
		in := silence{make(chan struct{}), make(chan struct{})}
		go func() { <-in.asked; cancel() }()
		var out, said bytes.Buffer
		w := world{in: in, out: &out, err: &said, now: time.Now, environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}}
		require.Equal(t, exitFailed, run(ctx, args, w))
		require.True(t, strings.HasSuffix(said.String(), "pgwake: interrupted\n"), said.String())
		close(in.over)
	}
	require.Len(t, into[[]deadLetter](c, "dlq", "list"), 1)
}

func TestCompletion_OffersWhatThereIs(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	for _, name := range []string{"nightly", "of the month", "odd\nname"} {
		_, err = bus.Schedule(t.Context(), eventbus.Schedule{Name: name, Cron: "30 4 * * *", Type: "report.due"})
		require.NoError(t, err)
	}
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "no such printer")
	e, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	e.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	require.NoError(t, e.Register(t.Context(), taskgraph.Define("default", "order", "1.0.0").Step("reserve", "ok")))
	s, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: "order", Version: "1.0.0"})
	require.NoError(t, err)

	offered := func(args ...string) string { return c.ok(append([]string{"__complete"}, args...)...) }
	require.Contains(t, offered("schedule", "run", ""), "nightly\t30 4 * * *\nof the month\t30 4 * * *\n:36")
	require.Contains(t, offered("task", "show", ""), s.ID+"\torder pending")
	require.Contains(t, offered("task", "list", "--before", ""), s.ID)
	require.Contains(t, offered("dlq", "show", ""), "\tmail.send")
	require.Contains(t, offered("dlq", "purge", "--id", ""), "\tmail.send")
	require.Contains(t, offered("peek", "--namespace", ""), "default")
	require.Contains(t, offered("task", "list", "--state", ""), "blocked_by_failures")
	require.Contains(t, offered("task", "show", "--as", ""), "mermaid")
	require.Contains(t, offered("tail", ""), "transitions")
	require.Equal(t, ":4\n", offered("schedule", "run", "nightly", ""), "there is one argument, and it is no file")
	require.Equal(t, ":4\n", offered("peek", "--name", ""))
	c.url = "postgres://nobody@127.0.0.1:1/none"
	require.Equal(t, ":4\n", offered("schedule", "run", ""))
}

func TestErrors_ServerIsNotThere_SayWhatToTryAndNoPassword(t *testing.T) {
	t.Parallel()
	for _, u := range []string{
		"postgres://ada:s3cr%65t-word@127.0.0.1:1/shop?sslmode=disable", "host=127.0.0.1 port=1 user=ada password='s3cret-word' dbname=shop",
		"postgres://ada:s3cret-word@127.0.0.1:port/shop", "postgres://ada:s3cret-word@[::1/shop", "host=127.0.0.1 password=s3cret-word port=nine",
		"postgres://ada:s3cret-word@127.0.0.1:1/shop?pool_max_conns=many",
	} {
		for _, args := range [][]string{{"migrate", "status"}, {"migrate", "up"}, {"doctor"}, {"doctor", "--json"}} {
			c := &cli{t: t, url: u, schema: "x", now: time.Now}
			r := c.run(args...)
			require.NotZero(t, r.code)
			require.NotContains(t, r.out+r.err, "s3cr", "%s %v", u, args)
			r = (&cli{t: t, schema: "x", now: time.Now}).run(append(args, "--database-url", u)...)
			require.NotZero(t, r.code)
			require.NotContains(t, r.out+r.err, "s3cr", "%s %v", u, args)
		}
	}
	said := (&cli{t: t, url: "postgres://ada@127.0.0.1:1/shop", schema: "x", now: time.Now}).refused(exitFailed, "migrate", "status")
	require.Contains(t, said, "→")
	r := (&cli{t: t, url: "postgres://ada@127.0.0.1:1/shop", schema: "x", now: time.Now}).run("doctor")
	require.Regexp(t, `(?m)^fail +connection +failed to connect to [^\\]* connection refused$`, r.out, "one line, without what a line break is written as")
}

func TestErrors_ServerRefuses_SayWhy(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	role := c.role("CONNECTION LIMIT 0")
	require.Contains(t, c.refused(exitFailed, "migrate", "status", "--database-url", c.as(role)), "as a superuser")
	in := func(url, database string) string {
		return with(t, url, func(config *pgx.ConnConfig) { config.Database = database })
	}
	require.Contains(t, c.refused(exitFailed, "migrate", "status", "--database-url", in(c.url, "no_such_database")), "name of the database")

	closed := pgx.Identifier{"closed_" + c.schema}.Sanitize()
	c.exec(`CREATE DATABASE ` + closed)
	defer c.exec(`DROP DATABASE ` + closed + ` WITH (FORCE)`)
	c.exec(`REVOKE CONNECT ON DATABASE ` + closed + ` FROM PUBLIC`)
	c.exec(`ALTER ROLE ` + role + ` CONNECTION LIMIT -1`)
	refusing := in(c.as(role), "closed_"+c.schema)
	require.Contains(t, c.run("doctor", "--database-url", refusing).out, "GRANT CONNECT ON DATABASE "+closed+" TO "+role)
}

// The driver says little of what it was given; who knows what others say.
func TestErrors_RepeatAPassword_ItIsTakenOut(t *testing.T) {
	t.Parallel()
	a := newApp(world{environ: []string{"DATABASE_URL=postgres://ada:s3cr%65t-word@db/shop", "PGPASSWORD=from-the-environment"}})
	a.databaseURL = "host=db password='of the flag'"
	for _, text := range []string{
		"s3cret-word is wrong", "s3cr%65t-word is wrong", "it is from-the-environment", "it is of the flag", "cannot parse postgres://eve:other-word@db/shop",
		"cannot parse host=db password=other-word dbname=shop", `cannot parse host=db password = 'other-word' dbname=shop`,
	} {
		said := a.withoutSecrets(text)
		require.Contains(t, said, "xxxxx")
		for _, secret := range []string{"s3cr", "environment", "of the flag", "other"} {
			require.NotContains(t, said, secret)
		}
	}
	require.Equal(t, "postgres://ada@db:5432/shop is away", a.withoutSecrets("postgres://ada@db:5432/shop is away"))
}

func TestOutput_IsNoTerminal_HasNoEscapeSequences(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	for _, environ := range [][]string{{"TERM=xterm-256color"}, {"TERM=xterm-256color", "NO_COLOR=1"}} {
		c.environ = environ
		require.NotContains(t, c.ok("migrate", "status"), "\x1b")
		require.NotContains(t, c.ok("doctor"), "\x1b")
	}
	c.environ = []string{"TERM=xterm-256color", "CLICOLOR_FORCE=1"}
	require.Contains(t, c.ok("migrate", "status"), "\x1b")
	require.NotContains(t, c.ok("migrate", "status", "--no-color"), "\x1b")
}

func TestOutput_JSON_HasNothingThatATerminalHeeds(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	a := newApp(world{out: &out, err: &out})
	text := "ö 😀 \x1b[2J \x7f \u009b2J \u202e \U000E0041 \n\t"
	require.NoError(t, a.printLine(map[string]string{"a": text}))
	printed := strings.TrimSuffix(out.String(), "\n")
	require.Equal(t, -1, strings.IndexFunc(printed, glance.Unprintable), "%q", printed)
	require.Contains(t, printed, "ö 😀")
	var back map[string]string
	require.NoError(t, json.Unmarshal([]byte(printed), &back))
	require.Equal(t, text, back["a"])
}

func TestErrors_HaveEscapeSequences_TheyAreShownAsWhatTheyAre(t *testing.T) {
	t.Parallel()
	var said bytes.Buffer
	newApp(world{out: &said, err: &said}).complain(errors.New("pgwake: get task: \x1b[2J\nand \u009b"), "see \x07")
	require.Equal(t, "pgwake: get task: \\x1b[2J\nand \\u009b\n  → see \\a\n", said.String())
}

// As with postgres://postgres:postgres@localhost, of which errors would not say any more who and where.
func TestErrors_PasswordIsTheNameOfTheRole_TheNameStays(t *testing.T) {
	t.Parallel()
	a := newApp(world{environ: []string{"DATABASE_URL=postgres://shop:shop@db/data", "PGPASSWORD=data"}})
	require.Equal(t, "role shop of data", a.withoutSecrets("role shop of data"))
	require.Equal(t, "cannot parse postgres://shop:xxxxx@db/data", a.withoutSecrets("cannot parse postgres://shop:shop@db/data"))
}
