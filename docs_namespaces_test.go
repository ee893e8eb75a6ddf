package pgwake_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	loops "github.com/pgwake/pgwake/dispatch" // another test has a function of its name
	eventbusmigrations "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	taskgraphmigrations "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

// This file answers: does the SQL of docs/operations.md remove the namespaces that are not used any more, and no others?

var layered = testschema.With(taskgraphmigrations.Layer(), eventbusmigrations.Layer())

// registrySQL is what the page has, for the schema: what removes, and what registers.
func (n *node) registrySQL(t *testing.T) (remove, register string) {
	t.Helper()
	var all []string
	blocks, _ := fences(docPages(t)["docs/operations.md"], "sql")
	for _, b := range blocks {
		if strings.Contains(b, "pgwake.namespaces n") {
			all = append(all, strings.NewReplacer(" pgwake.", " "+n.quoted()+".", "'pgwake'::", "'"+n.quoted()+"'::").Replace(b))
		}
	}
	require.Len(t, all, 2)
	return all[0], all[1]
}

func (n *node) registered(t *testing.T) []string {
	t.Helper()
	all, err := n.ListNamespaces(t.Context())
	require.NoError(t, err)
	var names []string
	for _, one := range all {
		names = append(names, one.Name)
	}
	return names
}

// asWritten runs SQL of the page in a session that has no search_path.
func (n *node) asWritten(t *testing.T, sql string) {
	t.Helper()
	_, err := n.Pool().Exec(t.Context(), sql)
	require.NoError(t, err, sql)
}

func TestDocs_Operations_UnusedNamespaces_GoAndComeBack(t *testing.T) {
	t.Parallel()
	openBackstage(t)
	schema := layered.Borrow(t)
	n := &node{Provider: pgwaketest.Open(t, &pgwake.Config{Schema: schema}), schema: schema}
	remove, register := n.registrySQL(t)

	// A row for each table that can have something of a namespace, which is called like the table.
	use := map[string]string{
		"worker_queue":        `INSERT INTO worker_queue (namespace, name) VALUES ($1, 'w')`,
		"orchestrator_queue":  `INSERT INTO orchestrator_queue (namespace, instance_id, kind) VALUES ($1, 'i', 'k')`,
		"instances":           `INSERT INTO instances (namespace, instance_id, name) VALUES ($1, 'other', 'flow')`,
		"dead_letters":        `INSERT INTO dead_letters (namespace, queue, item_id, priority, attempt_count, enqueued_at, reason) VALUES ($1, 'worker', 1, 0, 1, now(), 'r')`,
		"archive":             `INSERT INTO archive (namespace, item_id, priority, attempt_count, name, enqueued_at) VALUES ($1, 1, 0, 1, 'w', now())`,
		"limits":              `INSERT INTO limits (namespace, queue, paused) VALUES ($1, 'worker', true)`,
		"marking":             `INSERT INTO marking (namespace) VALUES ($1)`,
		"releases":            `INSERT INTO releases (namespace, tag, key) VALUES ($1, '', 'k')`,
		"rates":               `INSERT INTO rates (namespace, tag, key, tat, forget_at) VALUES ($1, '', 'k', now(), now())`,
		"dedup_keys":          `INSERT INTO dedup_keys (namespace, dedup_key, item_id, kept_until) VALUES ($1, 'k', 1, now())`,
		"task_definitions":    `INSERT INTO task_definitions (namespace, task_definition_id, name) VALUES ($1, gen_random_uuid(), 'd')`,
		"tasks":               `INSERT INTO tasks (namespace, task_id, task_definition_id, correlation_id) SELECT $1, gen_random_uuid(), task_definition_id, gen_random_uuid() FROM task_definitions`,
		"event_log":           `INSERT INTO event_log (namespace, event_type) VALUES ($1, 'e')`,
		"event_groups":        `INSERT INTO event_groups (namespace, name) VALUES ($1, 'g')`,
		"event_subscriptions": `INSERT INTO event_subscriptions (namespace, group_id, pattern, specificity, tag) SELECT $1, group_id, 'e', 0, 't' FROM event_groups`,
		"event_retirements":   `INSERT INTO event_retirements (namespace, tag) VALUES ($1, 't')`,
		"event_dedup_keys":    `INSERT INTO event_dedup_keys (namespace, dedup_key, event_id, kept_until) VALUES ($1, 'k', 1, now())`,
		"event_nodes":         `INSERT INTO event_nodes (namespace, node_id) VALUES ($1, 'n')`,
		"scheduled_tasks":     `INSERT INTO scheduled_tasks (namespace, name, cron_expression, event_type, active) VALUES ($1, 's', '* * * * *', 'e', false)`,
	}
	columns := query[string](t, n, `SELECT c.relname || '.' || a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
		 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND a.attname LIKE '%namespace%'`)
	want := []string{"waiters.namespace", "waiters.namespaces", "taskgraph_settings.namespace_priority"} // which use none
	used := []string{"default"}
	for table := range use {
		want = append(want, table+".namespace")
		used = append(used, table)
	}
	slices.Sort(used)
	require.ElementsMatch(t, want, columns, "a table has namespaces of which this test does not know")
	for _, table := range []string{"task_definitions", "event_groups"} { // to which others refer
		n.exec(t, use[table], table)
	}
	for table, sql := range use {
		if table != "task_definitions" && table != "event_groups" {
			require.EqualValues(t, 1, n.exec(t, sql, table), table)
		}
	}
	for _, name := range append([]string{"unused", "twice", "waited", "late"}, used...) {
		n.exec(t, `SELECT register_namespace($1)`, name)
	}
	n.exec(t, `INSERT INTO namespaces (name) VALUES ('twice')`)
	waits := n.wait(t, "waited")

	late := n.begin(t) // has found its namespace registered
	_, err := late.Exec(t.Context(), `SELECT enqueue_work('late', p_namespace => 'late')`)
	require.NoError(t, err)
	n.asWritten(t, remove)
	require.Equal(t, used, n.registered(t))
	require.NoError(t, late.Commit(t.Context()))
	n.asWritten(t, remove)
	require.Equal(t, used, n.registered(t), "it can be run again")

	// Who waited goes on, and is in the registry again.
	n.enqueueWith(t, "here", &pgwake.EnqueueOptions{Namespace: "waited"})
	require.Equal(t, "here", <-waits)

	// Those who serve what is registered do not know of the late one until it is.
	served := n.serve(t)
	n.enqueueWith(t, "again", &pgwake.EnqueueOptions{Namespace: "unused"})
	require.Equal(t, "unused again", <-served)
	require.NotContains(t, n.registered(t), "late")
	n.asWritten(t, register)
	require.Equal(t, "late late", <-served)
	all := append([]string{"late", "unused", "waited"}, used...)
	slices.Sort(all)
	require.Equal(t, all, n.registered(t))
	rows := query[int64](t, n, `SELECT count(*) FROM namespaces`)
	n.asWritten(t, register)
	require.Equal(t, rows, query[int64](t, n, `SELECT count(*) FROM namespaces`), "none is registered twice")
}

// wait has somebody wait for an item of a namespace, and hands out its name.
func (n *node) wait(t *testing.T, namespace string) <-chan string {
	t.Helper()
	got := make(chan string, 1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	go func() {
		defer close(got)
		item, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{namespace}, PollTimeout: patience})
		if err == nil {
			got <- item.Name
		}
	}()
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 1 }, patience, 10*time.Millisecond)
	return got
}

// serve has Coordinators handle whatever comes in namespaces whose names are of one word, and hands out namespaces and names.
func (n *node) serve(t *testing.T) <-chan string {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	got := make(chan string, 100)
	c := loops.NewCoordinators(n.Provider, &loops.CoordinatorsConfig{Logger: quiet, Groups: []loops.Group{{
		Namespaces: []string{"unused", "late"}, Config: loops.Config{Logger: quiet},
		Handlers: func(d *loops.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (loops.Result, error) {
				got <- fmt.Sprint(item.Namespace, " ", item.Name)
				return nil, nil
			})
		},
	}}})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-ended) })
	return got
}
