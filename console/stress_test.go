package console_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A million items, and as many events, dead letters and instances: pages are painted before anybody notices, from any place in a list, and whatever is
// searched for. PGWAKE_STRESS=1 runs it.
func TestStress_AMillionOfEach_PagesArePaintedAtOnce(t *testing.T) {
	if os.Getenv("PGWAKE_STRESS") == "" {
		t.Skip("PGWAKE_STRESS is not set")
	}
	const million = 1_000_000
	p := pgwaketest.New(t, nil)
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	engine, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, engine.Register(t.Context(), taskgraph.Define("shop", "fulfil_order", "1.0.0").Step("pack", "ok")))
	s := newSite(t, p, &console.Options{Events: bus, Tasks: engine.Graph})
	began := time.Now()
	for _, of := range []string{
		`INSERT INTO %[1]s.worker_queue (namespace, name, input) SELECT 'n' || i %% 100, 'job', '{"n": 1}' FROM generate_series(1, %[2]d) i`,
		`INSERT INTO %[1]s.event_log (namespace, event_type, payload, xact) SELECT 'default', CASE WHEN i %% 100000 = 0 THEN 'rare' ELSE 'common' END, '{"n": 1}', pg_current_xact_id() FROM generate_series(1, %[2]d) i`,
		`INSERT INTO %[1]s.dead_letters (queue, item_id, namespace, priority, attempt_count, name, data, enqueued_at, died_at, reason) SELECT 'worker', i, 'n', 0, 1, 'job', '{}', now(), now(), 'x' FROM generate_series(1, %[2]d) i`,
		`INSERT INTO %[1]s.instances (instance_id, namespace, name) SELECT 'i' || i, 'n' || i %% 100, 'order' FROM generate_series(1, %[2]d) i`,
		`INSERT INTO %[1]s.executions (instance_id, execution_id, status) SELECT 'i' || i, 1, CASE WHEN i %% 100000 = 0 THEN 'Running' ELSE 'Completed' END FROM generate_series(1, %[2]d) i`,
		`INSERT INTO %[1]s.tasks (task_id, task_definition_id, namespace, correlation_id, state) SELECT gen_random_uuid(), d.task_definition_id, 'n' || i %% 100, gen_random_uuid(), 'complete' FROM %[1]s.task_definitions d, generate_series(1, %[2]d) i`,
		`ANALYZE %[1]s.worker_queue, %[1]s.event_log, %[1]s.dead_letters, %[1]s.instances, %[1]s.executions, %[1]s.tasks`,
	} {
		_, err := p.Pool().Exec(t.Context(), "SET pgwake.notify = off; "+fmt.Sprintf(of, p.Schema(), million), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	t.Log("planted in", time.Since(began))
	var last int64
	require.NoError(t, p.Pool().QueryRow(t.Context(), "SELECT max(id) FROM "+p.Schema()+".worker_queue").Scan(&last))
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte(`<!doctype html><title>plain</title><link rel="icon" href="data:,"><p>hello`))
	}))
	defer plain.Close()
	x := open(t, s.url+"nowhere", 1280, 900)
	x.forgive()
	// painted are the instants of the answer and of the first paint.
	painted := func(url string) (answered, painted float64) {
		x.again()
		x.run(chromedp.Navigate(url))
		painted = eval[float64](x, `new Promise(r => { const look = () => { const p = performance.getEntriesByName("first-contentful-paint")[0]; p ? r(p.startTime) : setTimeout(look, 5); }; look(); })`)
		return eval[float64](x, `performance.getEntriesByType("navigation")[0].responseStart`), painted
	}
	median := func(all []float64) float64 { slices.Sort(all); return all[len(all)/2] }
	for _, path := range []string{"", "queues", "nodes", "items", fmt.Sprintf("items?after=%d", last/2), fmt.Sprintf("item?id=%d", last-7), "items?namespace=n7", "items?instance=none",
		"letters", "letters?before=100000", "events", "events?type=rare", "events?id=500000",
		"instances", "instances?status=Running", "tasks", "schedules"} {
		var answers, paints, plains []float64
		for range 7 { // by turns: the machine may have other things to do, and no graphics card
			_, of := painted(plain.URL)
			plains = append(plains, of)
			answer, paint := painted(s.url + path)
			answers, paints = append(answers, answer), append(paints, paint)
		}
		t.Logf("%-28s answered after %3.0f ms, painted after %4.0f ms; a page with one word %4.0f ms; medians of %d", path, median(answers), median(paints), median(plains), len(paints))
		assert.Less(t, median(answers), 200.0, path)
		assert.Less(t, median(paints)-median(plains), 200.0, path)
		require.Empty(t, x.errors)
	}
	// Where there is nothing of the kind all of it is looked through: a page says so at once.
	for _, path := range []string{"items?name=none", "letters?name=none", "letters?namespace=none", "events?key=none", "instances?name=none", "tasks?namespace=none", "tasks?state=error"} {
		var answers []float64
		for range 5 {
			r := must(http.NewRequest(http.MethodGet, s.url+path, nil))
			r.Header.Set("Accept", "text/html")
			began := time.Now()
			answer, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			answer.Body.Close()
			require.Equal(t, http.StatusOK, answer.StatusCode)
			answers = append(answers, time.Since(began).Seconds()*1000)
		}
		t.Logf("%-28s answered after %3.0f ms", path, median(answers))
		assert.Less(t, median(answers), 200.0, path)
	}
	x.mu.Lock()
	x.requests = nil // the plain page
	x.mu.Unlock()
	x.again()
	x.run(chromedp.Navigate(s.url))
	x.reads("1\u202f000\u202f000")
}
