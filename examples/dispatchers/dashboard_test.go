package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// This file answers: do the dashboard and the alerts in docs/grafana ask for what there is? What there is comes out of the exporter that
// service.go has, after everything that measures has been at work.

const docs = "../../docs"

// series are the names of series with their labels, as Prometheus has them.
type series map[string]map[string]bool

var (
	sample = regexp.MustCompile(`(?m)^([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})? \S+$`)
	label  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\]|\\.)*"`)
)

// scrape returns what the exporter shows.
func scrape(t *testing.T, m *meters) series {
	t.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Equal(t, http.StatusOK, answer.Code)
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	all := make(series)
	for _, line := range sample.FindAllStringSubmatch(string(text), -1) {
		if all[line[1]] == nil {
			all[line[1]] = make(map[string]bool)
		}
		for _, l := range label.FindAllStringSubmatch(line[2], -1) {
			all[line[1]][l[1]] = true
		}
	}
	return all
}

// measured is what everything has found.
var measured series

// everything has all that measures do something, so that each metric is there, with its attributes. The first test that asks has it done.
func everything(t *testing.T) series {
	t.Helper()
	if measured == nil {
		measured = atWork(t)
	}
	return measured
}

func atWork(t *testing.T) series {
	t.Helper()
	m, err := newMeters()
	require.NoError(t, err)
	schema := fmt.Sprintf("dashboard_%d", os.Getpid())
	p := pgwaketest.New(t, &pgwake.Config{Schema: schema, MeterProvider: m, MeasureDepths: time.Second})
	other := pgwaketest.Open(t, &pgwake.Config{Schema: schema}) // whose notifications are heard

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 3)
	handled := make(chan none, 2)
	handle := func(d *dispatch.Dispatcher) {
		dispatch.Handle(d, "x", func(context.Context, none) (none, error) {
			handled <- none{}
			return none{}, nil
		})
	}
	d := dispatch.New(p, &dispatch.Config{MeterProvider: m, Namespaces: []string{pgwake.DefaultNamespace}})
	handle(d)
	go func() { ended <- d.Run(ctx) }()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{MeterProvider: m,
		Groups: []dispatch.Group{{Namespaces: []string{"tenant-*"}, Handlers: handle, Config: dispatch.Config{MeterProvider: m}}}})
	go func() { ended <- c.Run(ctx) }()
	o := dispatch.NewOrchestrator(p, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "w", Status: pgwake.StatusCompleted}}, nil
	}, &dispatch.OrchestratorConfig{MeterProvider: m})
	go func() { ended <- o.Run(ctx) }()

	waiting := func() bool { s := p.Stats(); return s.Worker.Parked > 0 && s.Orchestrator.Parked > 0 }
	require.Eventually(t, waiting, 10*time.Second, 10*time.Millisecond)
	for _, namespace := range []string{"", "tenant-a"} {
		_, err = other.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
		<-handled
	}
	_, err = other.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "w"}, nil)
	require.NoError(t, err)
	_, err = p.WaitForInstance(ctx, "i")
	require.NoError(t, err)

	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "shop", MeterProvider: m})
	require.NoError(t, err)
	require.NoError(t, bus.Subscribe(ctx, "mailer", []string{"heard"}, nil))
	for _, eventType := range []string{"heard", "unheard", "heard"} { // the last one is a duplicate, and its delivery stays in the queue
		_, err = bus.Emit(ctx, eventType, nil, &eventbus.EmitOptions{DedupKey: eventType})
		require.NoError(t, err)
	}

	shown := func(s series) bool {
		return len(s["pgwake_dispatch_coordinators_spawned_total"]) > 0 && len(s["pgwake_queue_depth"]) > 0
	}
	var s series
	require.Eventually(t, func() bool { s = scrape(t, m); return shown(s) }, 10*time.Second, 10*time.Millisecond)
	stop()
	for range cap(ended) {
		require.NoError(t, <-ended)
	}
	for name, labels := range scrape(t, m) { // what is recorded at the end, such as the throughput of the last second
		s[name] = labels
	}
	return s
}

// kinds are what a name of OpenTelemetry may end in once it is exported: what a counter, a histogram and a gauge do, with a unit or without.
var kinds = []string{"", "_total", "_bucket", "_sum", "_count", "_seconds", "_seconds_bucket", "_seconds_sum", "_seconds_count"}

func TestDashboard_EveryInstrumentOfTheCode_IsExportedAndOnIt(t *testing.T) {
	all := everything(t)
	declared := make(map[string]bool)
	constant := regexp.MustCompile(`(?m)^\s*Metric\w+\s*=\s*"([^"]+)"`)
	for _, room := range []string{".", "dispatch", "eventbus", "taskgraph"} {
		files, err := filepath.Glob(filepath.Join("../..", room, "*.go"))
		require.NoError(t, err)
		for _, file := range files {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, m := range constant.FindAllStringSubmatch(string(source), -1) {
				declared[strings.ReplaceAll(m[1], ".", "_")] = true
			}
		}
	}
	require.Greater(t, len(declared), 30)
	of := func(name string) string { // the instrument
		for _, kind := range kinds {
			if base, ok := strings.CutSuffix(name, kind); ok && declared[base] {
				return base
			}
		}
		return ""
	}
	exported := make(map[string]bool)
	for name := range all {
		if base := of(name); base != "" {
			exported[base] = true
		} else if strings.HasPrefix(name, "pgwake_") || strings.HasPrefix(name, "messaging_") {
			t.Errorf("%s is exported, and no constant has its name", name)
		}
	}
	shown := make(map[string]bool)
	for _, panel := range dashboard(t) {
		for _, target := range panel.Targets {
			for name := range parse(target.Expr).selects {
				shown[of(name)] = true
			}
		}
	}
	for name := range declared {
		require.True(t, exported[name], "nothing here has %s measured: have everything do so", name)
		require.True(t, shown[name], "the dashboard does not show %s", name)
	}
}

// expression is what an expression of Prometheus asks for.
type expression struct {
	selects map[string]map[string]string // by name of the series: what its labels are to be
	by      []string                     // labels that others are added up by, or that are compared
}

var (
	clause   = regexp.MustCompile(`\b(?:by|on|group_left|group_right|without|ignoring)\s*\(([^)]*)\)`)
	selector = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	interval = regexp.MustCompile(`\[[^\]]*\]`)
	function = regexp.MustCompile(`\b[a-z_]+\s*\(`)
	keyword  = regexp.MustCompile(`\b(?:sum|max|min|avg|count|and|or|unless|offset\s+\w+|bool)\b`)
)

// parse reads as much of an expression as the ones in docs/grafana have.
func parse(text string) expression {
	e := expression{selects: make(map[string]map[string]string)}
	text = clause.ReplaceAllStringFunc(text, func(c string) string {
		for l := range strings.SplitSeq(clause.FindStringSubmatch(c)[1], ",") {
			e.by = append(e.by, strings.TrimSpace(l))
		}
		return ""
	})
	text = keyword.ReplaceAllString(function.ReplaceAllString(interval.ReplaceAllString(text, ""), "("), "")
	for _, s := range selector.FindAllStringSubmatch(text, -1) {
		if e.selects[s[1]] == nil {
			e.selects[s[1]] = make(map[string]string)
		}
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			e.selects[s[1]][m[1]] = m[3]
		}
	}
	return e
}

// ofScrape are the labels that Prometheus itself adds.
var ofScrape = []string{"job", "instance"}

// values are what the labels may say.
var values = map[string][]string{
	"pgwake_queue":   {pgwake.Orchestrator.String(), pgwake.Worker.String()},
	"pgwake_state":   {"due", "delayed", "leased", "kept back"},
	"pgwake_path":    {string(pgwake.PathEvent), string(pgwake.PathPolling), string(pgwake.PathFetch)},
	"pgwake_outcome": {string(dispatch.Done), string(dispatch.Retried), string(dispatch.Snoozed), string(dispatch.DeadLettered), string(dispatch.GivenBack), string(dispatch.LeaseLost)},
}

// wrong returns what an expression asks for that is not there.
func (e expression) wrong(all series) (problems []string) {
	if len(e.selects) == 0 {
		problems = append(problems, "it asks for nothing")
	}
	for name, matchers := range e.selects {
		labels, ok := all[name]
		if !ok {
			problems = append(problems, "there is no "+name)
			continue
		}
		for l, value := range matchers {
			if !labels[l] && !slices.Contains(ofScrape, l) {
				problems = append(problems, name+" has no label "+l)
			}
			for one := range strings.SplitSeq(value, "|") {
				if known := values[l]; known != nil && !slices.Contains(known, one) {
					problems = append(problems, l+" is never "+one)
				}
			}
		}
		for _, l := range e.by {
			if !labels[l] && !slices.Contains(ofScrape, l) {
				problems = append(problems, name+" has no label "+l)
			}
		}
	}
	return problems
}

func TestExpression_AsksForWhatIsNotThere_SaysSo(t *testing.T) {
	all := series{"a_total": {"pgwake_outcome": true}, "b_bucket": {"le": true}}
	for text, want := range map[string][]string{
		`sum by (job, pgwake_outcome) (rate(a_total{pgwake_outcome=~"done|retried"}[5m])) > 0 or sum(a_total offset 15m)`: nil,
		`histogram_quantile(0.9, sum by (le) (rate(b_bucket{instance="x"}[$__rate_interval])))`:                           nil,
		`rate(a[5m])`:                           {"there is no a"},
		`a_total and on (instance) c`:           {"there is no c"},
		`a_total{le="1"}`:                       {"a_total has no label le"},
		`a_total{pgwake_outcome=~"done|lost"}`:  {"pgwake_outcome is never lost"},
		`sum by (le) (a_total) unless b_bucket`: {"a_total has no label le"},
		`1 > 0`:                                 {"it asks for nothing"},
	} {
		require.Equal(t, want, parse(text).wrong(all), text)
	}
}

type panel struct {
	Type, Title string
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr, LegendFormat string }
}

// dashboard returns the panels that show something.
func dashboard(t *testing.T) []panel {
	t.Helper()
	file, err := os.ReadFile(docs + "/grafana/dashboard.json")
	require.NoError(t, err)
	var d struct {
		Panels     []panel
		Templating struct{ List []struct{ Name string } }
	}
	require.NoError(t, json.Unmarshal(file, &d))
	variables := []string{"__rate_interval"}
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
	}
	for _, m := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(string(file), -1) {
		require.Contains(t, variables, m[1])
	}
	return slices.DeleteFunc(d.Panels, func(p panel) bool { return p.Type == "row" })
}

func TestDashboard_EveryPanel_AsksForWhatThereIs(t *testing.T) {
	all := everything(t)
	inLegend := regexp.MustCompile(`\{\{(\w+)\}\}`)
	for _, p := range dashboard(t) {
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			e := parse(target.Expr)
			require.Empty(t, e.wrong(all), "%s: %s", p.Title, target.Expr)
			for _, l := range inLegend.FindAllStringSubmatch(target.LegendFormat, -1) {
				require.Contains(t, e.by, l[1], "%s: the legend of %s", p.Title, target.Expr)
			}
			for name := range e.selects {
				inSeconds := strings.HasSuffix(name, "_seconds") || strings.HasSuffix(name, "_seconds_bucket")
				require.Equal(t, inSeconds, p.FieldConfig.Defaults.Unit == "s", "%s: the unit of %s", p.Title, name)
			}
		}
	}
}

func TestAlerts_EachAlert_AsksForWhatThereIsAndHasASectionOnThePage(t *testing.T) {
	all := everything(t)
	file, err := os.ReadFile(docs + "/grafana/alerts.yaml")
	require.NoError(t, err)
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(file, &rules))
	page, err := os.ReadFile(docs + "/operations.md")
	require.NoError(t, err)
	var sections, alerts []string
	for _, m := range regexp.MustCompile(`(?m)^### (Pgwake\w+)$`).FindAllStringSubmatch(string(page), -1) {
		sections = append(sections, m[1])
	}
	inText := regexp.MustCompile(`\$labels\.(\w+)`)
	for _, group := range rules.Groups {
		for _, r := range group.Rules {
			alerts = append(alerts, r.Alert)
			e := parse(r.Expr)
			require.Empty(t, e.wrong(all), r.Alert)
			require.Contains(t, []string{"warning", "critical"}, r.Labels["severity"], r.Alert)
			require.Contains(t, sections, r.Alert, "docs/operations.md has no section about it")
			require.Equal(t, "https://github.com/pgwake/pgwake/blob/main/docs/operations.md#"+strings.ToLower(r.Alert), r.Annotations["runbook_url"])
			for _, l := range inText.FindAllStringSubmatch(r.Annotations["summary"], -1) {
				require.Contains(t, e.by, l[1], r.Alert)
			}
		}
	}
	require.Equal(t, alerts, sections, "one section for each, in their order")
}
