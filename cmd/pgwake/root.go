package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"charm.land/lipgloss/v2"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/migrations"
	"github.com/spf13/cobra"
)

// This file answers: which commands are there, what do all of them have in common, and what does the process end with?

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // it could not be done, or doctor found something
	exitUsage  = 2 // nothing was tried: the command line is wrong
)

// app is what the commands of one process share.
type app struct {
	world
	output *checkedOutput // which world.out is
	style  styles
	color  bool // whether the output may have any

	databaseURL, listenURL, schema string
	asJSON, yes, noColor           bool
	maxResult                      int // of task resolve; 0: the default of taskgraph.Config

	began       bool // the command line was understood
	schemaNamed bool // by its flag
}

// run carries out a command line and returns the exit code.
func run(ctx context.Context, args []string, w world) int {
	a := newApp(w)
	root := a.root()
	root.SetArgs(args)
	root.SetContext(ctx)
	err := root.ExecuteContext(ctx)
	a.asJSON = a.asJSON || !a.began && slices.Contains(args, "--json") // which may stand after what is wrong
	if err == nil {
		err = a.output.err
	}
	return a.end(ctx, err)
}

// end says what went wrong, if anything did.
func (a *app) end(ctx context.Context, err error) int {
	var code exitCode
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &code): // it has said so itself
		return int(code)
	case errors.Is(err, errUnread) || errors.Is(a.output.err, syscall.EPIPE): // whoever read it has enough
		return exitFailed
	case !a.began:
		a.complain(err, "pgwake --help lists what there is")
		return exitUsage
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		a.complain(errors.New("interrupted"), "")
		return exitFailed
	}
	var usage *usageError
	if errors.As(err, &usage) {
		a.complain(usage.err, usage.hint)
		return exitUsage
	}
	a.complain(err, hintFor(err))
	if errors.Is(err, pgwake.ErrInvalid) { // nothing was written
		return exitUsage
	}
	return exitFailed
}

func (a *app) complain(err error, hint string) {
	text := strings.TrimPrefix(err.Error(), "pgwake: ") // an Error of the library says so as well
	text = strings.ReplaceAll(text, ": pgwake: ", ": ")
	if a.asJSON {
		_ = encode(a.err, "", map[string]string{"error": a.withoutSecrets(text), "hint": hint})
		return
	}
	fmt.Fprintln(a.err, a.style.fail.Render("pgwake:"), visible(a.withoutSecrets(text)))
	if hint != "" {
		fmt.Fprintln(a.err, a.style.faint.Render("  → "+visible(hint)))
	}
}

// notice says what is neither an error nor what was asked for.
func (a *app) notice(text string) {
	if a.asJSON {
		_ = encode(a.err, "", map[string]string{"notice": text})
		return
	}
	fmt.Fprintln(a.err, a.style.ok.Render(text))
}

// exitCode ends the process without a word.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// usageError is a command line that cannot be carried out, with what to do about it.
type usageError struct {
	err  error
	hint string
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(hint, format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...), hint}
}

func (a *app) root() *cobra.Command {
	c := &cobra.Command{
		Use:   "pgwake",
		Short: "Operate a pgwake database: migrate it, examine it, watch it, and take a hand in it",
		Long: strings.TrimSpace(`
Operate a pgwake database: migrate it, examine it, watch it, and take a hand in it.

The database is --database-url, or else $PGWAKE_DATABASE_URL, $DATABASE_URL, or what PGHOST and the like say.
Exit codes: 0 done; 1 it failed, was interrupted, or doctor found something; 2 the command line is wrong, and nothing was tried.`),
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return a.begin() },
	}
	c.SetIn(a.in)
	c.SetOut(a.out)
	c.SetErr(a.err)
	c.Version = version()
	c.SetVersionTemplate("pgwake {{.Version}}\n")
	f := c.PersistentFlags()
	f.StringVar(&a.databaseURL, "database-url", "", "the database, as a URL or keyword=value pairs; PGWAKE_DATABASE_URL, DATABASE_URL")
	f.StringVar(&a.listenURL, "listen-url", "", "the same database without a transaction pooler, for LISTEN and migrations; PGWAKE_LISTEN_URL")
	f.StringVar(&a.schema, "schema", "", `schema of the tables and functions; PGWAKE_SCHEMA (default "pgwake")`)
	f.BoolVar(&a.asJSON, "json", false, "print JSON")
	f.BoolVarP(&a.yes, "yes", "y", false, "do not ask before anything is deleted or taken back")
	f.BoolVar(&a.noColor, "no-color", false, "print without colours; so does NO_COLOR, and whatever is no terminal")
	c.AddCommand(a.migrateCommand(), a.doctorCommand(), a.enqueueCommand(), a.peekCommand(), a.tailCommand(), a.dlqCommand(), a.taskCommand(), a.scheduleCommand(), a.benchCommand(), a.topCommand(), a.consoleCommand())
	a.addCompletions(c)
	return c
}

// begin is called once the command line was understood.
func (a *app) begin() error {
	a.began, a.schemaNamed = true, a.schema != ""
	if a.schema == "" {
		a.schema = a.env("PGWAKE_SCHEMA")
	}
	if a.schema == "" {
		a.schema = "pgwake"
	}
	if a.noColor {
		a.withoutColor()
	}
	if err := migrations.CheckSchema(a.schema); err != nil {
		return &usageError{err, "--schema, or PGWAKE_SCHEMA, with another"}
	}
	return nil
}

// group is a command that only has others below it.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		if asJSON, _ := c.Flags().GetBool("json"); !asJSON { // programs read no help
			c.SetOut(c.ErrOrStderr())
			_ = c.Help()
		}
		return usagef(c.CommandPath()+" --help lists them", "%s needs one of its commands", c.CommandPath())
	}}
	c.AddCommand(commands...)
	return c
}

// env is a variable of the environment.
func (a *app) env(name string) string {
	for i := len(a.environ) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(a.environ[i], name+"="); ok {
			return v
		}
	}
	return ""
}

// styles are the colours. Those that nobody can see are taken out of the output on its way; see checkedOutput.
type styles struct{ ok, warn, fail, faint, head, mark lipgloss.Style }

func newStyles() styles {
	of := func(color string) lipgloss.Style { return lipgloss.NewStyle().Foreground(lipgloss.Color(color)) }
	return styles{ok: of("2"), warn: of("3"), fail: of("1").Bold(true), faint: of("8"), head: lipgloss.NewStyle().Bold(true), mark: of("6")}
}
