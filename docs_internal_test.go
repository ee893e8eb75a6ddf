package pgwake

import (
	"fmt"
	"math"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
)

// This file answers: does docs/settings.md say what the code does? Inside the package, since what a Config
// resolves to cannot be seen from outside.

// docTable returns the cells of a table's rows, by the text of their first cell without its backquotes. The table
// is the one under the heading.
func docTable(t *testing.T, heading string) map[string][]string {
	t.Helper()
	page, err := os.ReadFile("docs/settings.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), heading+"\n")
	require.True(t, found, heading)
	section, _, _ = strings.Cut(section, "\n#")
	rows := make(map[string][]string)
	for line := range strings.Lines(section) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i, cell := range cells {
			cells[i] = strings.TrimSpace(cell)
		}
		rows[strings.Trim(cells[0], "`")] = cells[1:]
	}
	return rows
}

// docDuration reads "60 s", "6 min", "24 h".
func docDuration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(strings.NewReplacer(" ", "", "min", "m").Replace(text))
	require.NoError(t, err, "duration %q", text)
	return d
}

var (
	between = regexp.MustCompile(`^(.+) to (.+)$`)
	atLeast = regexp.MustCompile(`^at least (.+)$`)
	only    = regexp.MustCompile(`^(.+) only$`)
)

// docLimits reads what a number or a duration may be.
func docLimits(t *testing.T, text string, number func(string) int64) (least, most int64) {
	t.Helper()
	if m := between.FindStringSubmatch(text); m != nil {
		return number(m[1]), number(m[2])
	}
	if m := atLeast.FindStringSubmatch(text); m != nil {
		return number(m[1]), math.MaxInt64
	}
	m := only.FindStringSubmatch(text)
	require.NotNil(t, m, "limits %q", text)
	return number(m[1]), number(m[1])
}

func TestDocs_Settings_EveryFieldWithItsDefaultAndItsLimits(t *testing.T) {
	t.Parallel()
	resolved, err := (*Config)(nil).resolve()
	require.NoError(t, err)
	rows := docTable(t, "# Settings")
	for field := range reflect.TypeFor[Config]().Fields() {
		if !field.IsExported() {
			continue
		}
		row, ok := rows[field.Name]
		require.True(t, ok, "docs/settings.md lacks %s", field.Name)
		require.Len(t, row, 5, field.Name)
		byDefault, limits := row[1], row[2]
		value := reflect.ValueOf(resolved).FieldByIndex(field.Index)
		delete(rows, field.Name)

		switch field.Type.Kind() {
		case reflect.String:
			require.Equal(t, byDefault, "`"+strconv.Quote(value.String())+"`", field.Name)
		case reflect.Bool:
			require.Equal(t, byDefault, fmt.Sprintf("`%t`", value.Bool()), field.Name)
		case reflect.Map: // Modes
			require.Equal(t, byDefault, "none", field.Name)
			require.Zero(t, value.Len(), field.Name)
		case reflect.Func: // ValidateEvent
			require.Equal(t, byDefault, "none", field.Name)
			require.True(t, value.IsNil(), field.Name)
		case reflect.Interface: // Propagator, MeterProvider
			require.Equal(t, byDefault, "OpenTelemetry's global one", field.Name)
			require.Contains(t, []any{otel.GetTextMapPropagator(), otel.GetMeterProvider()}, value.Interface(), field.Name)
		case reflect.Pointer: // FallbackEnabled, ListenConfig, Logger
			if on, ok := value.Interface().(*bool); ok {
				require.Equal(t, byDefault, fmt.Sprintf("`%t`", *on), field.Name)
			}
		case reflect.Int, reflect.Int64:
			if name, ok := map[any]string{ModeHybrid: "ModeHybrid", OnTrouble: "OnTrouble", NotifyDirected: "NotifyDirected"}[value.Interface()]; ok {
				require.Equal(t, byDefault, "`"+name+"`", field.Name)
				continue
			}
			number := func(text string) int64 {
				if field.Type == reflect.TypeFor[time.Duration]() {
					return int64(docDuration(t, text))
				}
				n, err := strconv.ParseInt(text, 10, 64)
				require.NoError(t, err, field.Name)
				return n
			}
			require.Equal(t, number(byDefault), value.Int(), field.Name)

			accepts := func(n int64) bool {
				var c Config
				reflect.ValueOf(&c).Elem().FieldByIndex(field.Index).SetInt(n)
				_, err := c.resolve()
				return err == nil
			}
			least, most := docLimits(t, limits, number)
			require.True(t, accepts(least), "%s %d", field.Name, least)
			require.True(t, accepts(most), "%s %d", field.Name, most)
			if least > 1 { // 0 is the default
				require.False(t, accepts(least-1), "%s %d", field.Name, least-1)
			}
			require.False(t, accepts(-1), "%s -1", field.Name)
			if most < math.MaxInt64 {
				require.False(t, accepts(most+1), "%s %d", field.Name, most+1)
			}
		default:
			require.Fail(t, "how does the page show such a field?", field.Name)
		}
	}
	delete(rows, "Field")
	require.Empty(t, rows, "docs/settings.md has fields that Config lacks")
}

func TestDocs_Settings_PerCallAndFixedValues(t *testing.T) {
	t.Parallel()
	calls := docTable(t, "## Per call")
	lock := calls["LockTimeout`, and `extend` of a renewal"]
	require.NotNil(t, lock)
	require.Equal(t, DefaultLockTimeout, docDuration(t, lock[0]))
	require.Equal(t, fmt.Sprintf("%d ms to %d h", MinLockTimeout.Milliseconds(), int(MaxLockTimeout.Hours())), lock[1])
	require.Equal(t, fmt.Sprintf("1 to %d", MaxFetch), calls["n of `FetchWorkItems"][1])
	require.Equal(t, fmt.Sprintf("%d to %d", MinPriority, MaxPriority), calls["Priority"][1])
	require.Equal(t, fmt.Sprintf("%d bytes", MaxNameLength), calls["names, instance ids, versions, tags, sessions, keys, dedup keys"][1])
	require.Equal(t, fmt.Sprintf("at most %d", MaxTags), calls["Tags"][1])
	require.Equal(t, fmt.Sprintf("%d bytes", MaxHeaderBytes), calls["Headers"][1])
	require.Equal(t, fmt.Sprintf("1 to %d", MaxWeight), calls["Limits.Weight"][1])
	require.Equal(t, "`"+strings.Trim(namespacePattern.String(), "^$")+"`", calls["Namespaces"][1])

	fixed := docTable(t, "## Fixed")
	delete(fixed, "What")
	for what, value := range map[string]string{
		"longest wait for the answer to a statement on the LISTEN connection":                                                                                         answerDeadline.String(),
		"the same for the one that is made once a `FallbackInterval`, and for a poll of several lanes":                                                                answerDeadline.String() + ", and " + laneDeadline.String() + " for each lane, or namespace of one",
		"longest that giving back the claim of a fetch, which was cancelled or had no answer, may take the server on the LISTEN connection; then it goes on the pool": listenPatience.String(),
		"longest silence of the server meanwhile, at the first attempt; twice as long at each of the next four":                                                       answerDeadline.String(),
		"longest silence of the server while it looks on behalf of those who wait for an instance, or a namespace":                                                    answerDeadline.String() + ", and " + laneDeadline.String() + " for each question",
		"longest wait for the node's own test notification":                                                                                                           selfTestDeadline.String(),
		"longest wait for the answer to a fetch's query, while the server does not say that it is at work (then the lock timeout)":                                    claimDeadline(0).String() + ", and 1ms for each item",
		"the same for a connection of the pool that is tried, or made, before that query; a wait for others to release theirs is bounded by the poll timeout":         answerDeadline.String(),
		"pause before the LISTEN connection is made again":                                                                                                            firstReconnect.String() + " to " + lastReconnect.String(),
		"a session of this length ends the doubling of that pause":                                                                                                    healthySession.String(),
		"first poll after trouble": firstScoutInterval.String(),
		"longest pause before another look at rows that others had locked":                                                                        maxRetryInterval.String(),
		"longest that an `AckBatched`, or one of many `EnqueueForWorker`, waits for a group that is slow, while fewer than four are on their way": groupPause.String(),
		"after so long a group that hangs is none of those four":                                                                                  groupPatience.String(),
		"most of them in one such group":                                                                                                          strconv.Itoa(groupSize),
		"EnqueueForWorker` that go by themselves at a time, before others share a commit":                                                         strconv.Itoa(directEnqueues),
		"largest completion of an `AckBatched` that shares one":                                                                                   fmt.Sprintf("%d KiB", groupedCompletion>>10),
		"largest input that shares one":                                                                                                           fmt.Sprintf("%d KiB", groupedInput>>10),
	} {
		require.NotNil(t, fixed[what], what)
		require.Equal(t, value, strings.NewReplacer(" ms", "ms", " s", "s").Replace(fixed[what][0]), what)
		delete(fixed, what)
	}
	require.Empty(t, fixed)
}
