package pgwake_test

import (
	"context"
	"errors"
	"log"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/require"
)

// This file answers: is what the pages under docs say true, as far as a machine can tell? First the Go that they
// show, word for word, and then the tests.

// handler does a job, as part of the transaction that also removes it.
type handler func(ctx context.Context, tx pgx.Tx, kind string, payload []byte) error

func poll(ctx context.Context, pool *pgxpool.Pool, handle handler) error {
	every := time.NewTicker(50 * time.Millisecond)
	defer every.Stop()
	for {
		worked, err := pollOnce(ctx, pool, handle)
		if err != nil {
			log.Print(err) // rolled back: the next poll finds it again
		}
		if worked && err == nil {
			continue // there may be more
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func pollOnce(ctx context.Context, pool *pgxpool.Pool, handle handler) (worked bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		var kind string
		var payload []byte
		err := tx.QueryRow(ctx, `
			SELECT id, kind, payload FROM jobs WHERE run_at <= now()
			 ORDER BY run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED`).Scan(&id, &kind, &payload)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		worked = true
		if err := handle(ctx, tx, kind, payload); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `DELETE FROM jobs WHERE id = $1`, id)
		return err
	})
	return worked, err
}

func work(ctx context.Context, p *pgwake.Provider, pool *pgxpool.Pool, handle handler) error {
	for {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Minute})
		if errors.Is(err, pgwake.ErrNoWork) {
			continue // nothing was due for 30 s
		}
		if err != nil && ctx.Err() != nil {
			return err // nothing is left claimed
		}
		if err != nil {
			log.Print(err) // the database is away
			time.Sleep(time.Second)
			continue
		}
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := handle(ctx, tx, item.Name, item.Input); err != nil {
				return err
			}
			return p.AckWorkItemTx(ctx, tx, item.LockToken, nil)
		})
		if err == nil {
			continue
		}
		log.Printf("%s, attempt %d: %v", item.Name, item.Attempt, err)
		again := &pgwake.AbandonOptions{Delay: time.Second << min(item.Attempt, 10)}
		if err := p.AbandonWorkItem(ctx, item.LockToken, again); err != nil {
			log.Print(err) // it comes back when its lease ends
		}
	}
}

func enqueueBefore(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `INSERT INTO jobs (kind, payload) VALUES ($1, $2)`, "email.send", `{"to":"ada"}`)
	return err
}

func enqueueAfter(ctx context.Context, p *pgwake.Provider, tx pgx.Tx) error {
	_, err := p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
	return err
}

func watch(ctx context.Context, p *pgwake.Provider) {
	every := time.NewTicker(time.Minute)
	defer every.Stop()
	before := p.Stats()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
		now := p.Stats()
		log.Printf("listening %t, waiting %d, items %d, queries %d, found by the safety net %d, wake-up to item %v (p99)",
			now.Listening, now.Worker.Parked, now.Worker.Items-before.Worker.Items, now.Worker.Looks-before.Worker.Looks,
			now.Worker.FallbackFinds+now.Worker.ScoutFinds, now.Worker.WakeLatency.Quantile(0.99))
		before = now
	}
}

func openAndHibernate(ctx context.Context, url string) error {
	p, err := pgwake.Open(ctx, url, &pgwake.Config{HibernateAfter: 5 * time.Minute, HibernatePoll: time.Hour})
	if err != nil {
		return err
	}
	return p.Close(ctx)
}

func openThroughPooler(ctx context.Context) error {
	// POOLER_URL is postgres://app@pooler:6432/shop?default_query_exec_mode=cache_describe
	direct, err := pgx.ParseConfig(os.Getenv("DIRECT_URL")) // postgres://app@db:5432/shop
	if err != nil {
		return err
	}
	p, err := pgwake.Open(ctx, os.Getenv("POOLER_URL"), &pgwake.Config{ListenConfig: direct})
	if err != nil {
		return err
	}
	return p.Close(ctx)
}

// docPages returns the pages by their path.
func docPages(t *testing.T) map[string]string {
	t.Helper()
	pages := make(map[string]string)
	for _, pattern := range []string{"README.md", "CHANGELOG.md", "docs/*.md", "docs/*/*.md"} {
		paths, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, path := range paths {
			page, err := os.ReadFile(path)
			require.NoError(t, err)
			pages[filepath.ToSlash(path)] = string(page)
		}
	}
	require.Contains(t, pages, "docs/architecture.md")
	return pages
}

// fences takes the blocks in a language out of a page, without their indentation, and returns what is left.
func fences(page, language string) (blocks []string, rest string) {
	var block, outside []string
	inside, wanted, indent := false, false, 0
	for line := range strings.Lines(page) {
		trimmed := strings.TrimSpace(line)
		switch {
		case !inside && strings.HasPrefix(trimmed, "```"):
			inside, wanted = true, trimmed == "```"+language
			indent = len(line) - len(strings.TrimLeft(line, " "))
			block = nil
		case inside && trimmed == "```":
			if inside = false; wanted {
				blocks = append(blocks, strings.Join(block, ""))
			}
		case inside:
			block = append(block, line[min(indent, len(line)-1):])
		default:
			outside = append(outside, line)
		}
	}
	return blocks, strings.Join(outside, "")
}

// stands says whether code has a snippet, however deep.
func stands(code, snippet string) bool {
	for indent := ""; len(indent) < 5; indent += "\t" {
		lines := strings.ReplaceAll(indent+strings.ReplaceAll(strings.TrimSuffix(snippet, "\n"), "\n", "\n"+indent)+"\n", indent+"\n", "\n")
		if strings.Contains(code, "\n"+lines) {
			return true
		}
	}
	return false
}

// Every piece of Go on the pages stands in this file or among the examples, so it compiles. For the programs in the README
// and the tutorial see readme_test.go and tutorial_test.go.
func TestDocs_GoSnippets_StandInCodeThatCompiles(t *testing.T) {
	t.Parallel()
	_, _, _ = watch, openThroughPooler, openAndHibernate
	var code strings.Builder
	for _, path := range []string{"docs_test.go", "example_test.go", "dispatch/example_test.go", "dispatch/example_coordinators_test.go",
		"dispatch/example_moving_test.go", "taskgraph/example_test.go", "eventbus/example_test.go", "eventbus/example_document003_test.go",
		"eventbus/example_howto_test.go", "pgwaketest/example_test.go", "console/example_test.go", "adapter/goworkflows/example_test.go"} {
		source, err := os.ReadFile(path)
		require.NoError(t, err)
		code.Write(source)
	}
	found := 0
	for path, page := range docPages(t) {
		snippets, _ := fences(page, "go")
		for _, s := range snippets {
			if strings.HasPrefix(s, "package main\n") {
				require.Contains(t, []string{"README.md", "docs/tutorial.md"}, path)
				continue
			}
			found++
			if !stands(code.String(), s) {
				require.Failf(t, "a snippet that no compiler has seen", "%s:\n%s", path, s)
			}
		}
	}
	require.NotZero(t, found)
}

var (
	docLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	docTest = regexp.MustCompile(`\b(Test[A-Z]\w*)(…?)`)
	docFile = regexp.MustCompile("`([\\w./*-]+\\.(?:go|sql))`")
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	unslug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// slug is the anchor of a heading.
func slug(title string) string {
	return strings.ReplaceAll(unslug.ReplaceAllString(strings.ToLower(title), ""), " ", "-")
}

func TestDocs_Links_LeadSomewhere(t *testing.T) {
	t.Parallel()
	pages := docPages(t)
	anchors := make(map[string]bool)
	for path, page := range pages {
		_, prose := fences(page, "")
		for _, h := range heading.FindAllStringSubmatch(prose, -1) {
			anchors[path+"#"+slug(h[1])] = true
		}
	}
	for path, page := range pages {
		_, prose := fences(page, "")
		for _, link := range docLink.FindAllStringSubmatch(prose, -1) {
			target := link[1]
			if strings.Contains(target, "://") {
				continue
			}
			file, anchor, _ := strings.Cut(target, "#")
			to := path
			if file != "" {
				to = filepath.ToSlash(filepath.Join(filepath.Dir(path), file))
				if _, err := os.Stat(to); err != nil {
					t.Errorf("%s links to %s: %v", path, target, err)
				}
			}
			if anchor != "" && !anchors[to+"#"+anchor] {
				t.Errorf("%s links to %s, and there is no such heading", path, target)
			}
		}
	}
	for path := range pages { // nobody finds a page that nothing links to
		if strings.HasPrefix(path, "docs/notes/") {
			require.Contains(t, pages["docs/architecture.md"], "](notes/"+filepath.Base(path)+")")
		} else if dir, name := filepath.Split(path); dir == "docs/" && name != "README.md" {
			require.Contains(t, pages["docs/README.md"], "]("+name+")")
		}
	}
}

func TestDocs_NamedTestsAndFiles_Exist(t *testing.T) {
	t.Parallel()
	var names []string
	sources := []string{"*_test.go", "*/*_test.go", "*/*/*_test.go"}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, pattern := range sources {
		paths, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, path := range paths {
			source, err := os.ReadFile(path)
			require.NoError(t, err)
			for _, m := range function.FindAllStringSubmatch(string(source), -1) {
				names = append(names, m[1])
			}
		}
	}
	exists := func(name string, prefix bool) bool {
		for _, n := range names {
			if n == name || prefix && strings.HasPrefix(n, name) {
				return true
			}
		}
		return false
	}
	for path, page := range docPages(t) {
		_, page = fences(page, "") // patterns for go test -run are no names
		for _, m := range docTest.FindAllStringSubmatch(page, -1) {
			require.True(t, exists(m[1], m[2] != ""), "%s names %s", path, m[0])
		}
		for _, m := range docFile.FindAllStringSubmatch(page, -1) {
			found, err := filepath.Glob(m[1])
			require.NoError(t, err)
			require.NotEmpty(t, found, "%s names %s", path, m[1])
		}
	}

	// The other way round: the rooms of the architecture are complete.
	root, err := filepath.Glob("*.go")
	require.NoError(t, err)
	named := docFile.FindAllStringSubmatch(docPages(t)["docs/architecture.md"], -1)
	for _, path := range root {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		known := false
		for _, m := range named {
			matches, err := filepath.Match(m[1], path)
			require.NoError(t, err)
			known = known || matches
		}
		require.True(t, known, "docs/architecture.md does not say what %s is for", path)
	}
}

// docSQL returns the block of a page that contains the text, for the schema of the node.
func (n *node) docSQL(t *testing.T, page, text string) string {
	t.Helper()
	blocks, _ := fences(docPages(t)[page], "sql")
	for _, block := range blocks {
		if strings.Contains(block, text) {
			return regexp.MustCompile(`\bpgwake\b`).ReplaceAllLiteralString(block, n.quoted())
		}
	}
	require.Failf(t, "no such block", "%s in %s", text, page)
	return ""
}

func TestDocs_MovingFromPolling_EveryJobIsDoneOnceAndThereIsAWayBack(t *testing.T) {
	t.Parallel()
	const page = "docs/moving-from-polling.md"
	n := newNode(t, nil)
	pool, err := pgxpool.New(t.Context(), n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["search_path"] = n.quoted() }))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	run := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	count := func(sql string) (n int) {
		t.Helper()
		require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&n), sql)
		return n
	}
	inTx := func(produce func(pgx.Tx) error) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, produce))
	}
	run(`CREATE TABLE effects (kind text)`)
	handle := func(ctx context.Context, tx pgx.Tx, kind string, payload []byte) error {
		require.NotEmpty(t, payload)
		_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, kind)
		return err
	}
	done := func() map[string]int {
		rows, err := pool.Query(t.Context(), `SELECT kind FROM effects`)
		require.NoError(t, err)
		kinds, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		counts := make(map[string]int)
		for _, kind := range kinds {
			counts[kind]++
		}
		return counts
	}

	// Before: the table and its loop.
	run(n.docSQL(t, page, "CREATE TABLE jobs"))
	run(`INSERT INTO jobs (kind, payload, run_at) VALUES ('early', '{}', now() - interval '1 min'), ('waiting', '[1]', now()),
		('tomorrow', '{}', now() + interval '1 day')`)
	worked, err := pollOnce(t.Context(), pool, handle)
	require.NoError(t, err)
	require.True(t, worked)
	require.Equal(t, map[string]int{"early": 1}, done())

	// Both run. What an old producer inserts goes to the new queue, and the rest is moved.
	run(n.docSQL(t, page, "CREATE TRIGGER"))
	inTx(func(tx pgx.Tx) error { return enqueueBefore(t.Context(), tx) })
	move := n.docSQL(t, page, "array_agg")
	require.Equal(t, 2, count(move))
	require.Equal(t, 0, count(move))
	var notMoved, due, later int
	require.NoError(t, pool.QueryRow(t.Context(), n.docSQL(t, page, "not_moved")).Scan(&notMoved, &due, &later))
	require.Equal(t, []int{0, 2, 1}, []int{notMoved, due, later})

	ctx, stop := context.WithCancel(t.Context())
	loops := make(chan error, 2)
	go func() { loops <- poll(ctx, pool, handle) }()
	go func() { loops <- work(ctx, n.Provider, pool, handle) }()
	want := map[string]int{"early": 1, "waiting": 1, "email.send": 1}
	require.Eventually(t, func() bool { return maps.Equal(want, done()) }, patience, 10*time.Millisecond)

	// After: the new producers.
	inTx(func(tx pgx.Tx) error { return enqueueAfter(t.Context(), n.Provider, tx) })
	run(n.docSQL(t, page, "p_delay"))
	want["email.send"] = 3
	require.Eventually(t, func() bool { return maps.Equal(want, done()) }, patience, 10*time.Millisecond)
	stop()
	for range cap(loops) {
		require.ErrorIs(t, <-loops, context.Canceled)
	}

	// And back again.
	run(n.docSQL(t, page, "DROP TRIGGER"))
	require.Equal(t, 2, count(`SELECT count(*) FROM jobs WHERE kind IN ('tomorrow', 'email.send') AND run_at > now()`))
	require.Equal(t, 0, count(`SELECT count(*) FROM worker_queue`))
	run(n.docSQL(t, page, "DROP TABLE jobs"))
	require.Equal(t, want, done())
}

// Package testroles has more of this.
func TestDocs_Security_TheGrantsAreEnoughForEveryVerb(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	p := n.openAt(t, testroles.URL(t, testroles.New(t, testroles.Worker, n.schema)), &pgwake.Config{SkipMigrate: true})
	require.True(t, p.Health().OK, p.Health().Problems)
	for name, call := range poolVerbs(p, t.Context(), p.claimBoth(t)) {
		require.NotErrorIs(t, call(), pgwake.ErrPermission, name)
	}
}

func TestDocs_Operations_TheQueryAnswers(t *testing.T) {
	t.Parallel()
	const page = "docs/operations.md"
	n := newNode(t, nil)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Tag: "gpu"}, nil)
	require.NoError(t, err)
	n.travel(t, time.Hour)
	n.exec(t, `UPDATE worker_queue SET created_at = created_at - interval '1 hour'`)
	_, err = n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, &pgwake.EnqueueOptions{At: time.Now().Add(-24 * time.Hour)})
	require.NoError(t, err)
	sql := strings.TrimSuffix(strings.TrimSpace(n.docSQL(t, page, "work_waits")), ";")
	waits := query[time.Duration](t, n, `SELECT work_waits FROM (`+sql+`) AS answer`)[0]
	require.GreaterOrEqual(t, waits, time.Hour)
	require.Less(t, waits, time.Hour+patience)
}
