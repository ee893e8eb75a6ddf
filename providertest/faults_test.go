package providertest_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/migrations"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/providertest"
	"github.com/stretchr/testify/require"
)

// This file answers: do the rows of the suite fail on a Provider that breaks what they are about?
//
// TestFaults runs this test binary once more, for TestBroken. Each fault is a subtest of that, which puts a broken
// Provider through the rows that must fail. `make mutants` runs it.

const (
	// faultsWish is a regular expression: TestFaults is wanted, with the faults whose name matches.
	faultsWish = "PGWAKE_FAULTS"

	// brokenSwitch is what TestFaults sets for TestBroken, to the same.
	brokenSwitch = "PGWAKE_BROKEN"

	// faultsDeadline bounds all of them. Those that lose a wake-up need what the suite has as patience.
	faultsDeadline = 5 * time.Minute

	// rowsAtOnce is how many rows are run at a time. Most of the time they wait.
	rowsAtOnce = 24
)

// fault is one way to break the contract: by other SQL functions in the schema, by a Provider that does
// something else with a verb, or by both.
type fault struct {
	name string
	rows []string // group/row: each of them must fail
	sql  []edit
	verb func(node) providertest.Provider
}

// edit replaces old, at every place of the function where it is; there must be one.
type edit struct{ function, old, new string }

// unfit marks the failure of a fault that the functions have no place for.
const unfit = "the fault does not fit"

// dress returns n as a Provider with the fault, which may be nil.
func (f *fault) dress(n node) providertest.Provider {
	if f == nil || f.verb == nil {
		return n
	}
	return f.verb(n)
}

// infect breaks the functions of a schema, and returns the statements that mend them.
func (f *fault) infect(tb testing.TB, schema string) (mend []string) {
	tb.Helper()
	if f == nil || len(f.sql) == 0 {
		return nil
	}
	conn, err := pgx.Connect(context.Background(), pgwaketest.URL(tb))
	require.NoError(tb, err)
	defer conn.Close(context.Background())
	mend, err = f.edit(context.Background(), conn, schema)
	require.NoError(tb, err, unfit)
	return mend
}

// edit breaks the functions of a schema, and returns the statements that mend them, the last first.
func (f *fault) edit(ctx context.Context, conn *pgx.Conn, schema string) (mend []string, err error) {
	for _, e := range f.sql {
		var source string
		err := conn.QueryRow(ctx, `SELECT pg_get_functiondef(p.oid) FROM pg_proc p
			WHERE p.pronamespace = $1::regnamespace AND p.proname = $2`, pgx.Identifier{schema}.Sanitize(), e.function).Scan(&source)
		if err != nil {
			return nil, fmt.Errorf("%s: function %s: %w", f.name, e.function, err)
		}
		broken := strings.ReplaceAll(source, e.old, e.new)
		if broken == source {
			return nil, fmt.Errorf("%s: function %s has no place like %q", f.name, e.function, e.old)
		}
		if _, err := conn.Exec(ctx, broken); err != nil {
			return nil, fmt.Errorf("%s: function %s with %q: %w", f.name, e.function, e.new, err)
		}
		mend = append([]string{source}, mend...)
	}
	return mend, nil
}

func TestFaults_All_FitTheFunctions(t *testing.T) {
	schema := testdb.Schema(t)
	migrate(t, schema)
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(context.Background())

	names := make(map[string]bool)
	for _, f := range faults {
		require.False(t, names[f.name], "two faults are called %q", f.name)
		names[f.name] = true
		require.NotEmpty(t, f.rows, f.name)
		require.True(t, len(f.sql) > 0 || f.verb != nil, "%s: nothing is broken", f.name)
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		if _, err := f.edit(t.Context(), conn, schema); err != nil {
			t.Error(err)
		}
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

func migrate(tb testing.TB, schema string) {
	tb.Helper()
	config, err := pgx.ParseConfig(pgwaketest.URL(tb))
	require.NoError(tb, err)
	require.NoError(tb, migrations.Up(context.Background(), config, schema))
}

// TestBroken is the other half of TestFaults.
func TestBroken(t *testing.T) {
	wish := os.Getenv(brokenSwitch)
	if wish == "" {
		t.Skip("it fails by design, and TestFaults runs it")
	}
	put := func(name string, f *fault, rows []string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			providertest.Run(t, only(t, rows, factory(f)))
		})
	}
	var all []string
	for _, f := range matching(wish) {
		put(f.name, &f, f.rows)
		all = append(all, f.rows...)
	}
	put(sound, nil, all)
}

// sound is the name of the subtest of TestBroken that has no fault.
const sound = "none"

// only skips all rows of the suite in t but those. A -test.run for as many compiles regular expressions for a minute.
func only(t *testing.T, rows []string, f providertest.Factory) providertest.Factory {
	wanted := make(map[string]bool)
	for _, row := range rows {
		wanted[t.Name()+"/"+row] = true
	}
	all := f.New
	f.New = func(tb testing.TB) providertest.Provider {
		if !wanted[tb.Name()] {
			tb.SkipNow()
		}
		return all(tb)
	}
	return f
}

// matching returns the faults that match a regular expression.
func matching(wish string) (wanted []fault) {
	expression := regexp.MustCompile(wish)
	for _, f := range faults {
		if expression.MatchString(f.name) {
			wanted = append(wanted, f)
		}
	}
	return wanted
}

// missed says which rows of the fault did not do what they are for.
func (f *fault) missed(verdicts map[string]string) (complaints []string) {
	for _, row := range f.rows {
		if verdict := verdicts["TestBroken/"+sound+"/"+row]; verdict != "PASS" {
			complaints = append(complaints, fmt.Sprintf("%s: %q on a sound Provider", row, verdict))
		}
		if verdict := verdicts["TestBroken/"+strings.ReplaceAll(f.name, " ", "_")+"/"+row]; verdict != "FAIL" {
			complaints = append(complaints, fmt.Sprintf("%s: %q, so it does not protect what it is named for", row, verdict))
		}
	}
	return complaints
}

func TestFaults(t *testing.T) {
	wish := os.Getenv(faultsWish)
	if wish == "" {
		t.Skip("run it with make mutants, or with a regular expression in " + faultsWish)
	}
	wanted := matching(wish)
	require.NotEmpty(t, wanted, "no fault matches %q", wish)
	verdicts, out := runBroken(t, wish)

	// What a row sees of a wake-up that comes too early may depend on who is faster. On a machine with more to do than
	// it can, a fault that went unnoticed gets a second chance, with less to do.
	var again []string
	for _, f := range wanted {
		if len(f.missed(verdicts)) > 0 {
			again = append(again, "^"+regexp.QuoteMeta(f.name)+"$")
		}
	}
	if len(again) > 0 {
		t.Logf("once more: %s", again)
		secondVerdicts, more := runBroken(t, strings.Join(again, "|"))
		maps.DeleteFunc(secondVerdicts, func(_, verdict string) bool { return verdict == "SKIP" }) // not meant this time
		maps.Copy(verdicts, secondVerdicts)
		out = append(out, more...)
	}
	for _, f := range wanted {
		t.Run(f.name, func(t *testing.T) {
			for _, complaint := range f.missed(verdicts) {
				t.Error(complaint)
			}
		})
	}
	if t.Failed() {
		name := filepath.Join(os.TempDir(), "pgwake-faults.txt")
		require.NoError(t, os.WriteFile(name, out, 0o600))
		t.Logf("what the rows said is in %s", name)
	}
}

var (
	location    = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE)\s+(\S+)`)
	verdictLine = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+)`)
)

// runBroken runs TestBroken in a process of its own, and returns what became of each test: PASS, FAIL, SKIP or, if
// there is no such test, nothing. One that failed because the fault could not be made, or because PostgreSQL cannot
// execute the broken function, has caught nothing, and is INVALID.
func runBroken(t *testing.T, wish string) (verdicts map[string]string, out []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), faultsDeadline)
	defer cancel()
	child := exec.CommandContext(ctx, os.Args[0], "-test.v", "-test.count=1", fmt.Sprintf("-test.parallel=%d", rowsAtOnce), "-test.run=^TestBroken$")
	child.Env = append(os.Environ(), brokenSwitch+"="+wish, "PGWAKE_DATABASE_URL="+pgwaketest.URL(t))
	out, err := child.CombinedOutput()
	require.NoError(t, ctx.Err(), "no verdict")
	if err != nil { // nil: everything passed, which the verdicts say as well
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
	}
	require.NotContains(t, string(out), "\npanic: ")

	verdicts = make(map[string]string)
	invalid := make(map[string]bool)
	var at string
	for line := range strings.Lines(string(out)) {
		if m := location.FindStringSubmatch(line); m != nil {
			at = m[1]
		} else if m := verdictLine.FindStringSubmatch(line); m != nil {
			verdicts[m[2]] = m[1]
		} else if strings.Contains(line, unfit) || strings.Contains(line, "SQLSTATE 42") { // a syntax error, or no such column
			invalid[at] = true
		}
	}
	for test := range invalid {
		verdicts[test] = "INVALID"
	}
	return verdicts, out
}
