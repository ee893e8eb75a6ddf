package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: do the commands about queues and dead letters do what the library does, and show it as it is?

func TestEnqueue_WorkItem_IsThereAsItWasSaid(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	of := into[enqueued](c, "enqueue", "mail.send", `{"to":"ada"}`, "--namespace", "mail", "--priority", "3", "--delay", "1h", "--dedup-key", "k",
		"--tag", "gpu", "--key", "customer", "--header", "a=b")
	require.Equal(t, "worker", of.Queue)
	items := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "mail.send", Input: json.RawMessage(`{"to":"ada"}`), Tag: "gpu", Headers: map[string]string{"a": "b"}}, 1)
	require.Equal(t, of.ID, items[0].ID)
	require.Equal(t, 3, items[0].Priority)
	require.WithinDuration(t, time.Now().Add(time.Hour), items[0].DueAt, time.Minute)
	require.True(t, into[enqueued](c, "enqueue", "mail.send", "--namespace", "mail", "--dedup-key", "k").Duplicate)
	require.Contains(t, c.ok("enqueue", "mail.send", "--namespace", "mail", "--dedup-key", "k"), "nothing was added")

	c.in = `{"from": "standard input"}`
	c.ok("enqueue", "piped", "-", "--at", "2030-01-01T00:00:00Z")
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "piped", Input: json.RawMessage(c.in)}, 1)
}

func TestEnqueue_MessageToAnInstance_IsThere(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	c.ok("enqueue", "start", `[1]`, "--instance", "order-7", "--orchestration", "order", "--version-of", "1.0.0")
	pgwaketest.RequireMessage(t, p, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "order", Version: "1.0.0", Data: json.RawMessage(`[1]`)}, 1)
}

func TestEnqueue_WhatCannotBe_SaysWhatToDo(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	require.Contains(t, c.refused(exitUsage, "enqueue", "x", "hello"), "this is no JSON")
	require.Contains(t, c.refused(exitUsage, "enqueue", "x", "--at", "soon"), "this is no instant")
	require.Contains(t, c.refused(exitUsage, "enqueue", "x", "--at", "10m"), "--delay", "elsewhere that is ten minutes ago")
	require.Contains(t, c.refused(exitUsage, "enqueue", "x", "--namespace", "NO"), "namespace")
	require.Contains(t, (&cli{t: t, url: c.url, schema: "not there", now: time.Now}).refused(exitFailed, "enqueue", "x"), "pgwake migrate up")
	pgwaketest.RequireNoWork(t, p)
}

// What came to nothing before it, such as a jq that failed or a variable that is not set, is no item without input.
func TestEnqueue_InputIsEmpty_NothingIsAdded(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	for _, in := range []string{"", " \n\t"} {
		c.in = in
		require.Contains(t, c.refused(exitUsage, "enqueue", "x", "-"), "standard input is empty")
		require.Contains(t, c.refused(exitUsage, "enqueue", "x", in), "the JSON is empty")
		require.Contains(t, c.refused(exitUsage, "enqueue", "x", "-", "--instance", "i"), "standard input is empty")
	}
	require.Contains(t, c.refused(exitUsage, "enqueue", "approved", "--instance", ""), "--instance is empty", "it would be a work item")
	pgwaketest.RequireNoWork(t, p)
	require.Empty(t, into[[]queuedItem](c, "peek", "--queue", "orchestrator"))
}

// A command neither listens nor waits, and still whoever waits is told at once.
func TestEnqueue_SomebodyWaits_IsTold(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, &pgwake.Config{FallbackInterval: time.Hour})
	got := make(chan string, 1)
	go func() {
		item, err := p.FetchWorkItem(context.Background(), &pgwake.FetchOptions{PollTimeout: 20 * time.Second})
		if err != nil {
			got <- err.Error()
			return
		}
		got <- item.Name
	}()
	require.Eventually(t, func() bool { s := p.Stats().Worker; return s.Parked == 1 && s.Settled }, 20*time.Second, 10*time.Millisecond)
	c.ok("enqueue", "mail.send")
	require.Equal(t, "mail.send", <-got)
	require.Zero(t, p.Stats().Worker.ScoutFinds)
}

func TestPeek_ShowsWhatIsThere_PageByPage(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	require.Contains(t, c.ok("peek"), "has nothing of the kind")
	for _, name := range []string{"a", "b", "c"} {
		c.ok("enqueue", name, `{"n":1}`, "--instance", "i")
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Input: json.RawMessage(`{"n":1}`)}, nil)
		require.NoError(t, err)
	}
	first := into[[]queuedItem](c, "peek", "--limit", "2")
	require.Len(t, first, 2)
	require.Equal(t, "due", first[0].State)
	require.JSONEq(t, `{"n":1}`, string(first[0].Data))
	rest := into[[]queuedItem](c, "peek", "--limit", "2", "--after", text(first[1].ID))
	require.Len(t, rest, 1)
	require.Equal(t, "c", rest[0].Name)
	require.Contains(t, c.ok("peek", "--limit", "2"), "--after "+text(first[1].ID))
	require.Len(t, into[[]queuedItem](c, "peek", "--queue", "orchestrator", "--instance", "i"), 3)
	require.Contains(t, c.ok("peek", "--queue", "orchestrator"), "i: a")
	require.Contains(t, c.refused(exitUsage, "peek", "--queue", "nothing"), "there is no queue")
}

// What others wrote does not get at the terminal.
func TestPeek_NameHasEscapeSequences_TheyAreShownAsWhatTheyAre(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "\x1b[2Jevil\r\n"}, nil)
	require.NoError(t, err)
	out := c.ok("peek")
	require.NotContains(t, out, "\x1b")
	require.Contains(t, out, `\x1b[2Jevil`)
}

func TestDLQ_ListShowRedrivePurge(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	for _, name := range []string{"a", "b", "c"} {
		bury(t, p, pgwake.WorkItem{Name: name, Input: json.RawMessage(`{"n":1}`)}, "no such printer")
	}
	letters := into[[]deadLetter](c, "dlq", "list")
	require.Len(t, letters, 3)
	require.Contains(t, c.ok("dlq", "list"), "no such printer")
	require.Contains(t, c.ok("dlq", "list", "--limit", "1"), "… more: --after "+text(letters[0].ID))
	require.Contains(t, c.ok("dlq", "list", "--latest", "--limit", "1"), "… more: --below "+text(letters[2].ID))
	require.Equal(t, letters[1].ID, into[[]deadLetter](c, "dlq", "list", "--below", text(letters[2].ID), "--limit", "1")[0].ID)
	shown := c.ok("dlq", "show", text(letters[0].ID))
	require.Contains(t, shown, "550 no such mailbox")
	alone := into[deadLetter](c, "dlq", "show", text(letters[0].ID))
	require.JSONEq(t, `{"n":1}`, string(alone.Data))
	alone.Data = letters[0].Data // which is indented otherwise
	require.Equal(t, letters[0], alone)
	require.Contains(t, c.refused(exitFailed, "dlq", "show", "999999999"), "there is no dead letter")
	require.Contains(t, c.refused(exitUsage, "dlq", "show", "x"), "this is no id")

	require.Contains(t, c.refused(exitUsage, "dlq", "redrive"), "--all")
	require.Equal(t, map[string]int{"redriven": 1}, into[map[string]int](c, "dlq", "redrive", "--name", "a"))
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "a"}, 1)

	require.Contains(t, c.refused(exitUsage, "dlq", "purge", "--all"), "--yes", "nobody answers")
	c.in = "no\n"
	require.Contains(t, c.refused(exitFailed, "dlq", "purge", "--all"), "Purge 2 dead letters for good?")
	require.Len(t, into[[]deadLetter](c, "dlq", "list"), 2)
	c.in = "yes\n"
	require.Contains(t, c.ok("dlq", "purge", "--id", text(letters[1].ID)), "1 dead letter purged")
	require.Equal(t, map[string]int{"purged": 1}, into[map[string]int](c, "dlq", "purge", "--all", "--yes"))
	require.Contains(t, c.ok("dlq", "list"), "there are no dead letters")
}

func TestTail_Letters_ThoseThatComeAndNotThoseThatThereAre(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "before"}, "old")
	require.Contains(t, c.ok("tail", "letters", "--all", "--limit", "1"), "before")
	done := make(chan result, 1)
	go func() { done <- c.run("tail", "--limit", "1", "--every", "20ms", "--json") }()
	// Until the command has begun it does not see what comes; so something comes again and again.
	for {
		bury(t, p, pgwake.WorkItem{Name: "after"}, "new")
		select {
		case r := <-done:
			require.Zero(t, r.code, r.err)
			var h happened
			require.NoError(t, json.Unmarshal([]byte(r.out), &h))
			require.Equal(t, "letters", h.Source)
			require.Equal(t, "after", h.What)
			require.True(t, strings.HasPrefix(h.Detail, "new"))
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// A letter has an id before it is committed, and those of others, with higher ids, may be there first.
func TestTail_LetterIsCommittedLate_IsShownAllTheSame(t *testing.T) {
	t.Parallel()
	for _, all := range []bool{true, false} {
		_, p := newCLI(t, &pgwake.Config{Mode: pgwake.ModePolling})
		s := &letterSource{p: p}
		shown := func() (names []string) {
			for more := true; more; {
				var letters []happened
				var err error
				letters, more, err = s.next(t.Context())
				require.NoError(t, err)
				for _, h := range letters {
					names = append(names, h.What)
				}
			}
			return names
		}
		bury(t, p, pgwake.WorkItem{Name: "before"}, "broken")
		var open []pgx.Tx
		for _, name := range []string{"late", "undone"} {
			_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name}, nil)
			require.NoError(t, err)
			item, err := p.FetchWorkItem(t.Context(), nil)
			require.NoError(t, err)
			tx, err := p.Pool().Begin(t.Context())
			require.NoError(t, err)
			open = append(open, tx)
			require.NoError(t, p.DeadLetterWorkItemTx(t.Context(), tx, item.LockToken, "broken", ""))
		}
		bury(t, p, pgwake.WorkItem{Name: "after"}, "broken")
		if all {
			require.Equal(t, []string{"before", "after"}, shown())
		} else {
			require.NoError(t, s.begin(t.Context()))
		}
		require.Empty(t, shown())
		require.NoError(t, open[0].Commit(t.Context()))
		require.Equal(t, []string{"late"}, shown())
		require.NotEmpty(t, s.gaps)
		require.NoError(t, open[1].Rollback(t.Context()))
		require.Eventually(t, func() bool { return len(shown()) == 0 && len(s.gaps) == 0 }, 20*time.Second, 10*time.Millisecond, "it is not waited for any more")
	}
}

// The upper end of a snapshot says nothing about transactions that began since the last one that ended.
func TestTail_TransactionIsOpenAboveAllThatHaveEnded_ItsLetterIsWaitedFor(t *testing.T) {
	t.Parallel()
	_, p := newCLI(t, &pgwake.Config{Mode: pgwake.ModePolling})
	bury(t, p, pgwake.WorkItem{Name: "first"}, "broken")
	tx, err := p.Pool().Begin(t.Context())
	require.NoError(t, err)
	var number uint64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&number))
	s := &letterSource{p: p}
	require.NoError(t, s.passed(t.Context(), []pgwake.DeadLetter{{ID: 5}}))
	require.Greater(t, s.gaps[0].until, number)
	require.NoError(t, tx.Rollback(t.Context()))
}

func TestTail_IdsThatNobodyHas_AreNotAllRemembered(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "first"}, "broken")
	c.exec(`UPDATE dead_letters SET id = 5000000000`)
	s := &letterSource{p: p}
	require.NoError(t, s.passed(t.Context(), []pgwake.DeadLetter{{ID: 5_000_000_000}}))
	require.Len(t, s.gaps[0].ids, mostMissed)
	require.EqualValues(t, 5_000_000_000, s.last)
}

func TestTail_NobodyReadsItAnyMore_Ends(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("a write tells there")
	}
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "x"}, "broken")
	from, to, err := os.Pipe()
	require.NoError(t, err)
	defer to.Close()
	go func() { // as head -1 does
		_, _ = bufio.NewReader(from).ReadString('\n')
		_ = from.Close()
	}()
	var said bytes.Buffer
	w := world{in: strings.NewReader(""), out: to, err: &said, now: time.Now, environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}}
	require.Equal(t, exitFailed, run(t.Context(), []string{"tail", "letters", "--all", "--every", "10ms"}, w))
	require.Empty(t, said.String())
}

// consent says yes, once something else has happened.
type consent func()

func (c consent) Read(p []byte) (int, error) {
	c()
	return copy(p, "y\n"), nil
}

// A letter that is redriven and dies again would be redriven for ever; and nobody has said yes to more than was asked.
func TestDLQ_LetterThatDiesMeanwhile_Stays(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "before"}, "broken")
	var out, said bytes.Buffer
	w := world{in: consent(func() { bury(t, p, pgwake.WorkItem{Name: "meanwhile"}, "broken") }), out: &out, err: &said, now: time.Now,
		environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}}
	require.Zero(t, run(t.Context(), []string{"dlq", "purge", "--all"}, w), said.String())
	require.Equal(t, "1 dead letter purged\n", out.String())
	left := into[[]deadLetter](c, "dlq", "list")
	require.Len(t, left, 1)
	require.Equal(t, "meanwhile", left[0].Name)
}

func TestTail_Interrupted_EndsWell(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, nil)
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "the first")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, said spokenText
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"tail", "--all"}, world{in: strings.NewReader(""), out: &out, err: &said, now: time.Now,
			environ: []string{"PGWAKE_DATABASE_URL=" + c.url, "PGWAKE_SCHEMA=" + c.schema}})
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "the first") || len(ended) > 0 }, 20*time.Second, 10*time.Millisecond)
	cancel()
	require.Zero(t, <-ended, said.String())
	require.Contains(t, out.String(), "the first")
	require.Contains(t, c.refused(exitFailed, "tail", "events"), "pgwake migrate up --layer eventbus")
	require.Contains(t, c.refused(exitUsage, "tail", "nothing"), "invalid argument")
}

// More than a list has at most.
const manyLetters = 10_001

func TestDLQ_MoreThanAListHas_AllAreCounted(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	c.exec(`COMMENT ON TABLE dead_letters IS NULL`) // so that the schema is lent to nobody else: statistics would have more dead rows there than doctor likes
	c.exec(`INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, enqueued_at, reason)
	        SELECT 'worker', i, 'default', 0, 1, 'x', now(), CASE WHEN i = $1 THEN 'of the newest' ELSE 'broken' END FROM generate_series(1, $1::integer) AS i`, manyLetters)
	require.Contains(t, c.run("doctor").out, "there are 10001; of the newest the reason is: of the newest")
	require.EqualValues(t, manyLetters, into[topJSON](c, "top", "--every", "100ms").Dead)
	c.in = "n\n"
	require.Contains(t, c.refused(exitFailed, "dlq", "purge", "--all"), "Purge 10001 dead letters for good?")
	c.in = "y\n"
	require.Equal(t, "10001 dead letters purged\n", c.ok("dlq", "purge", "--all"))
}

// spokenText is what somebody reads while it is written.
type spokenText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *spokenText) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *spokenText) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func TestTail_ServerEndsItsConnections_ItGoesOn(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, &pgwake.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var out, said spokenText
	name := "tail of " + c.schema
	url := with(t, c.url, func(*pgx.ConnConfig) {}) + " application_name='" + name + "'"
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "the first")
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"tail", "letters", "--all", "--every", "10ms"}, world{in: strings.NewReader(""), out: &out, err: &said, now: time.Now,
			environ: []string{"PGWAKE_DATABASE_URL=" + url, "PGWAKE_SCHEMA=" + c.schema}})
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "the first") || len(ended) > 0 }, 20*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		c.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, name)
		return strings.Contains(said.String(), "the database answers again") || len(ended) > 0
	}, 20*time.Second, 50*time.Millisecond)
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "no such recipient")
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "no such recipient") || len(ended) > 0 }, 20*time.Second, 10*time.Millisecond)
	cancel()
	require.Zero(t, <-ended, said.String())
	require.Contains(t, out.String(), "no such recipient")
}

// An item that SQL has added may be due at any instant that the server knows, and one that is odd hides no other.
func TestJSON_DueAtAnyInstantOfTheServer_IsShownWithTheOthers(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	instants := map[string]string{"20000-01-01 00:00:00+00": "20000-01-01T00:00:00Z", "294276-12-31 23:59:59+00": "294276-12-31T23:59:59Z",
		"4713-11-24 00:00:00+00 BC": "-4712-11-24T00:00:00Z", "9999-12-31 23:59:59.000001+00": "9999-12-31T23:59:59.000001Z"}
	for at := range instants {
		c.exec(`SELECT enqueue_work($1, p_visible_at => $1::text::timestamptz), enqueue_message($1, $1, p_visible_at => $1::text::timestamptz)`, at)
	}
	for _, queue := range []string{"worker", "orchestrator"} {
		due := make(map[string]string)
		for _, i := range into[[]struct {
			Name, Instance string
			Due            string `json:"due_at"`
		}](c, "peek", "--queue", queue) {
			at, err := time.Parse(time.RFC3339, i.Due)
			if err == nil {
				i.Due = at.UTC().Format(time.RFC3339Nano)
			}
			due[i.Name+i.Instance] = i.Due
		}
		require.Equal(t, instants, due)
		require.Contains(t, c.ok("peek", "--queue", queue), "20000-01-01")
	}
	c.ok("top", "--once", "--json")
}
