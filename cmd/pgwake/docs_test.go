package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// This file answers: is what docs/cli.md shows what the commands print? They are run, on a database with something of everything, and what
// they print is compared by its shape: without numbers, names of machines, and the width of columns. PGWAKE_WRITE_DOCS=1 writes the
// outputs anew.

const docsFile = "../../docs/cli.md"

func TestDocs_EveryCommand_PrintsWhatIsShown(t *testing.T) {
	c, vars := shop(t)
	before, err := os.ReadFile(docsFile)
	require.NoError(t, err)
	console := regexp.MustCompile("(?ms)^```console\n(.*?)^```$")
	ran := make(map[string]bool)
	after := console.ReplaceAllStringFunc(string(before), func(block string) string {
		var b strings.Builder
		b.WriteString("```console\n")
		for _, line := range strings.Split(block, "\n") {
			command, is := strings.CutPrefix(line, "$ pgwake ")
			if !is {
				continue
			}
			ran[strings.Fields(command)[0]] = true
			b.WriteString(line + "\n" + c.shown(command, vars))
		}
		return b.String() + "```"
	})
	for _, command := range newApp(world{}).root().Commands() {
		if name := command.Name(); name != "completion" && name != "help" {
			require.True(t, ran[name] || name == "console", "%s is not shown", name) // the console serves until it is ended
			require.Contains(t, string(before), "\n## "+name+"\n")
		}
	}
	if os.Getenv("PGWAKE_WRITE_DOCS") != "" {
		require.NoError(t, os.WriteFile(docsFile, []byte(after), 0o644))
		return
	}
	require.Equal(t, shapeOf(after), shapeOf(string(before)), "PGWAKE_WRITE_DOCS=1 writes it anew")
	require.Equal(t, versionsOf(after), versionsOf(string(before)), "the versions of the layers that `migrate status` and `doctor` print")
}

// versionsOf are the lines with versions of the layers in an output.
func versionsOf(page string) (all []string) {
	lines := regexp.MustCompile(`(?m)^(?:root|taskgraph|eventbus) +\d+ +\d+ .*$|^ok +(?:schema|layers) .*version \d+.*$`)
	for _, line := range lines.FindAllString(page, -1) {
		all = append(all, strings.Join(strings.Fields(line), " "))
	}
	return all
}

// Every flag that the page names is there.
func TestDocs_FlagsThatAreNamed_AreThere(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(docsFile)
	require.NoError(t, err)
	var flags []string
	root := newApp(world{}).root()
	all := root.PersistentFlags().FlagUsages()
	for _, c := range root.Commands() {
		all += c.Flags().FlagUsages()
		for _, below := range c.Commands() {
			all += below.Flags().FlagUsages()
		}
	}
	for _, m := range regexp.MustCompile("`(--[a-z-]+)").FindAllStringSubmatch(string(page), -1) {
		flags = append(flags, m[1])
		require.Contains(t, all, m[1])
	}
	require.NotEmpty(t, flags)
}

// Every command line of the documentation, and of the examples of the commands, can be typed: the command and its flags are there.
func TestDocs_CommandLines_CanBeTyped(t *testing.T) {
	t.Parallel()
	lines := make(map[string]string) // where they stand
	note := func(where, text string, line *regexp.Regexp) {
		for _, m := range line.FindAllStringSubmatch(text, -1) {
			lines[m[1]] = where
		}
	}
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	for _, name := range append(pages, "../../README.md") {
		page, err := os.ReadFile(name)
		require.NoError(t, err)
		note(name, string(page), regexp.MustCompile("`pgwake ([a-z][^`]*)`"))
		for _, block := range regexp.MustCompile("(?ms)^```(?:sh|console)\n.*?^```$").FindAllString(string(page), -1) {
			note(name, block, regexp.MustCompile(`(?m)^(?:\$ )?pgwake ([a-z].*)$`))
		}
	}
	delete(lines, "listen") // the name of a connection
	newRoot := func() *cobra.Command {
		root := newApp(world{}).root()
		root.InitDefaultCompletionCmd()
		return root
	}
	for _, above := range newRoot().Commands() {
		for _, c := range append(above.Commands(), above) {
			note(c.CommandPath(), c.Example, regexp.MustCompile(`(?m)\bpgwake ([a-z].*)$`))
		}
	}
	require.Greater(t, len(lines), 30)
	variable, rest := regexp.MustCompile(`\$[A-Z]+`), regexp.MustCompile(` (#|\||>|&&).*`)
	for line, where := range lines {
		c, args, err := newRoot().Find(words(variable.ReplaceAllString(rest.ReplaceAllString(line, ""), "7")))
		require.NoError(t, err, "%s: %s", where, line)
		require.False(t, c.HasSubCommands() && len(args) > 0, "%s: %s", where, line)
		require.NoError(t, c.ParseFlags(args), "%s: %s", where, line)
	}
}

// shop is a database with something of everything, and what the commands of the page refer to.
func shop(t *testing.T) (*cli, map[string]string) {
	t.Helper()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	_, err = bus.Emit(t.Context(), "order.created", map[string]int{"order": 7}, &eventbus.EmitOptions{Key: "customer-3"})
	require.NoError(t, err)
	_, err = bus.Schedule(t.Context(), eventbus.Schedule{Name: "nightly", Cron: "30 4 * * *", TimeZone: "Europe/Berlin", Type: "report.due"})
	require.NoError(t, err)
	_, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	for _, to := range []string{"bob", "eve"} {
		bury(t, p, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"` + to + `"}`)}, "Handler error")
	}
	for _, name := range []string{"invoice.print", "invoice.send"} {
		_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Input: []byte(`{"order":7}`)}, &pgwake.EnqueueOptions{Namespace: "shop"})
		require.NoError(t, err)
	}
	letters := into[[]deadLetter](c, "dlq", "list")
	return c, map[string]string{"$TASK": task, "$LETTER": text(letters[0].ID)}
}

// shown is what a command prints, as the page shows it: on a database of another name.
func (c *cli) shown(command string, vars map[string]string) string {
	c.t.Helper()
	for name, value := range vars {
		command = strings.ReplaceAll(command, name, value)
	}
	out := c.ok(words(command)...)
	config := c.connect(c.url).Config()
	host, err := os.Hostname()
	require.NoError(c.t, err)
	at := regexp.MustCompile(regexp.QuoteMeta(config.Database) + ` on ` + regexp.QuoteMeta(config.Host) + `:\d+ as ` + regexp.QuoteMeta(config.User))
	out = at.ReplaceAllString(out, "shop on db:5432 as app")
	named := regexp.MustCompile(`(?m)^([0-9a-f]{8}  )(` + regexp.QuoteMeta(glance.Short(host, 24)) + ` +)`) // in the table of nodes, whose columns stay where they are
	out = named.ReplaceAllStringFunc(out, func(of string) string { return of[:10] + fmt.Sprintf("%-*s", len(of)-10, "web") })
	return strings.NewReplacer(c.schema, "pgwake", "role "+config.User+" ", "role app ").Replace(out)
}

// words splits a command line as a shell does, as far as the page has need of that.
func words(line string) (all []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|(\S+)`).FindAllStringSubmatch(line, -1) {
		all = append(all, cmp.Or(m[1], m[2]))
	}
	return all
}

var shapes = []struct {
	is *regexp.Regexp
	as string
}{
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`), "UUID"},
	{regexp.MustCompile(`\b[0-9a-f]{8}\b`), "KEY"},
	{regexp.MustCompile(`[▁▂▃▄▅▆▇█]+`), "█"},
	{regexp.MustCompile(`(?m)\b(notify|fetch|chain|local|timer|reconnect|settle|scout)\b +[0-9]+ .*\n`), ""}, // which of them there are is a matter of luck
	{regexp.MustCompile(`[-0-9][0-9.,:TZ+-]*(ns|µs|ms|s|m|h|d| kB| MB)?([0-9.]+(s|m|h))?`), "N"},
	{regexp.MustCompile(`(ahead of|behind) this`), "beside this"},
	{regexp.MustCompile(` +`), " "},
}

func shapeOf(page string) string {
	for _, s := range shapes {
		page = s.is.ReplaceAllString(page, s.as)
	}
	return page
}

func TestShapeOf_SameButForNumbers_IsTheSame(t *testing.T) {
	t.Parallel()
	require.Equal(t, shapeOf("due 1   oldest 1m01s  p99 < 1.02ms at 17:00:00"), shapeOf("due 26  oldest 45.1s p99 < 900µs at 09:12:59"))
	require.NotEqual(t, shapeOf("due 1"), shapeOf("delayed 1"))
	require.Equal(t, glance.Span(61*time.Second), "1m01s")
}
