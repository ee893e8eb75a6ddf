package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"charm.land/lipgloss/v2"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// This file answers: how does the schema come up, go down, and get to where it may only be changed by hand?

func (a *app) migrateCommand() *cobra.Command {
	return group("migrate", "Bring the schema up or down, or print the SQL that does",
		a.migrateUpCommand(), a.migrateDownCommand(), a.migrateStatusCommand(), a.migratePrintCommand())
}

// layersFlag adds --layer, of which there may be several.
func layersFlag(c *cobra.Command, names *[]string) {
	c.Flags().StringSliceVar(names, "layer", []string{layers[0].name}, "which of "+layerNames()+"; may be repeated")
	_ = c.RegisterFlagCompletionFunc("layer", cobra.FixedCompletions(strings.Split(layerNames(), ", "), cobra.ShellCompDirectiveNoFileComp))
}

func (a *app) migrateUpCommand() *cobra.Command {
	var names []string
	c := &cobra.Command{
		Use: "up", Short: "Create the schema, or apply what it lacks", Args: cobra.NoArgs,
		Long: "Create the schema, or apply what it lacks. It may run again, and in any number of places at once.",
		Example: `  pgwake migrate up
  pgwake migrate up --layer root --layer eventbus`,
		RunE: func(c *cobra.Command, _ []string) error { return a.migrate(c.Context(), names, true) },
	}
	layersFlag(c, &names)
	return c
}

func (a *app) migrateDownCommand() *cobra.Command {
	var names []string
	c := &cobra.Command{
		Use: "down", Short: "Take migrations back; refused while rows would be lost", Args: cobra.NoArgs,
		Long: "Take all migrations of the layers back. It is refused while a table holds rows, so nothing is lost, and for root while there is another layer.",
		RunE: func(c *cobra.Command, _ []string) error { return a.migrate(c.Context(), names, false) },
	}
	layersFlag(c, &names)
	return c
}

// migrate takes the layers up, or down, which is the other way round.
func (a *app) migrate(ctx context.Context, names []string, up bool) error {
	chosen, err := chosenLayers(names)
	if err != nil {
		return err
	}
	config, err := a.listenConfig() // migrations need a session of their own
	if err != nil {
		return err
	}
	if !up {
		slices.Reverse(chosen)
		if err := a.confirm(ctx, "Take the migrations of %s back, in schema %q of %s?", strings.Join(names, ", "), a.schema, place(config)); err != nil {
			return err
		}
	}
	for _, l := range chosen {
		do := l.up
		if !up {
			do = l.down
		}
		if err := do(ctx, config, a.schema); err != nil {
			return withMigrateHint(err)
		}
	}
	return a.migrateStatus(ctx)
}

func withMigrateHint(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "PW006" {
		return &hinted{err, "empty the tables, or take the layers on it down first: pgwake migrate down --layer taskgraph,eventbus,root"}
	}
	if isForbidden(err) || errors.As(err, &pg) && pg.Code == "42P16" { // invalid_table_definition: of a schema that may not be used, the search path is left with pg_temp
		return &hinted{err, "the role has to own the schema, or may CREATE in a database that has none yet; or apply by another what pgwake migrate print writes"}
	}
	return err
}

func (a *app) migrateStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say which version each layer is at", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return a.migrateStatus(c.Context()) },
	}
}

func (a *app) migrateStatus(ctx context.Context) error {
	conn, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	states, err := statesOf(ctx, conn, a.schema)
	if err != nil {
		return err
	}
	if a.asJSON {
		return a.printJSON(states)
	}
	table := &rows{heads: []string{"LAYER", "VERSION", "LATEST", "STATE", "WHAT"}}
	for _, s := range states {
		table.add(s.Layer, fmt.Sprint(s.Version), fmt.Sprint(s.Latest), s.State, s.About)
	}
	table.style = func(row int, head string) *lipgloss.Style {
		if head != "STATE" {
			return nil
		}
		return map[string]*lipgloss.Style{"current": &a.style.ok, "missing": &a.style.faint, "behind": &a.style.warn, "newer": &a.style.warn, "foreign": &a.style.fail}[states[row].State]
	}
	a.printRows(table)
	return nil
}

func (a *app) migratePrintCommand() *cobra.Command {
	var names []string
	var from int64
	c := &cobra.Command{
		Use: "print", Short: "Print the SQL of migrate up, for those who apply it by hand", Args: cobra.NoArgs,
		Long: `Print what migrate up would do as SQL, a transaction for each layer. It needs no database: by itself it is for one that has nothing yet.
With --from it is for a layer that is at that version, as migrate status says. A schema at another version refuses it.`,
		Example: `  pgwake migrate print --layer root,eventbus > up.sql && psql -v ON_ERROR_STOP=1 -f up.sql
  pgwake migrate print --layer root --from 3`,
		RunE: func(*cobra.Command, []string) error { return a.migratePrint(names, from) },
	}
	layersFlag(c, &names)
	c.Flags().Int64Var(&from, "from", 0, "version that the layer is at")
	return c
}

func (a *app) migratePrint(names []string, from int64) error {
	chosen, err := chosenLayers(names)
	if err != nil {
		return err
	}
	if from > 0 && len(chosen) > 1 {
		return usagef("print them one by one", "--from is the version of one layer, and there are %d", len(chosen))
	}
	scripts := make(map[string]string)
	for _, l := range chosen {
		if scripts[l.name], err = l.script(a.schema, from); err != nil {
			return err
		}
	}
	if a.asJSON {
		return a.printJSON(scripts)
	}
	for _, l := range chosen {
		if scripts[l.name] == "" {
			a.printf("-- Layer %s has nothing after version %d.\n", l.name, from)
		}
		a.printf("%s", scripts[l.name])
	}
	return nil
}
