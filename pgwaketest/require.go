package pgwaketest

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is in the queues?

// Queued is what work items and messages in a queue have in common.
type Queued struct {
	ID         int64
	Namespace  string
	Priority   int
	DedupKey   string
	DueAt      time.Time // server time; while it is claimed, the end of the lease
	Claimed    bool      // somebody holds it, or the turn that it waits behind
	Attempts   int       // claims so far
	EnqueuedAt time.Time // server time
}

// QueuedWork is a work item in the queue.
type QueuedWork struct {
	pgwake.WorkItem
	Queued
	LastError string
}

// QueuedMessage is a message in the queue.
type QueuedMessage struct {
	pgwake.Message
	Queued

	// StickyOwner is who may have the message from StickyDue on, server time; for everybody else it is due at DueAt. Empty:
	// it is anybody's.
	StickyOwner string
	StickyDue   time.Time
}

func (m *QueuedMessage) state() string {
	if m.StickyOwner == "" || m.Claimed {
		return m.Queued.state()
	}
	return fmt.Sprintf(" due at %v for the sticky owner %q, and at %v for others", m.StickyDue, m.StickyOwner, m.DueAt)
}

// RequireWork fails the test unless exactly n work items like want are queued, due or not, claimed or not. It returns
// them in the order of their ids and claims nothing. Fields of want that are zero are not compared; so the zero
// WorkItem is like any. Inputs are compared as JSON: space and the order of keys do not matter. Of the headers
// those of want are compared. What an open
// transaction has enqueued is not there yet.
func RequireWork(tb testing.TB, p *pgwake.Provider, want pgwake.WorkItem, n int) []QueuedWork {
	tb.Helper()
	found, all := queuedWork(tb, p, want)
	if len(found) != n {
		tb.Fatalf("%d work items like %s are queued, and not %d; %s", len(found), describeWork(want), n, listed(all))
	}
	return found
}

// RequireNoWork fails the test if any work item is queued, due or not, claimed or not. RequireWork with 0 is for
// work items of a certain kind.
func RequireNoWork(tb testing.TB, p *pgwake.Provider) {
	tb.Helper()
	if _, all := queuedWork(tb, p, pgwake.WorkItem{}); len(all) > 0 {
		tb.Fatalf("work items are queued; %s", listed(all))
	}
}

// RequireMessage is RequireWork for messages to instances, with Data in place of Input.
func RequireMessage(tb testing.TB, p *pgwake.Provider, want pgwake.Message, n int) []QueuedMessage {
	tb.Helper()
	found, all := queuedMessages(tb, p, want)
	if len(found) != n {
		tb.Fatalf("%d messages like %s are queued, and not %d; %s", len(found), describeMessage(want), n, listed(all))
	}
	return found
}

// RequireNoMessage is RequireNoWork for messages to instances.
func RequireNoMessage(tb testing.TB, p *pgwake.Provider) {
	tb.Helper()
	if _, all := queuedMessages(tb, p, pgwake.Message{}); len(all) > 0 {
		tb.Fatalf("messages are queued; %s", listed(all))
	}
}

// The server compares, so that JSON is equal if it is equal as jsonb.
const (
	workSQL = `
		SELECT id, namespace, priority, coalesce(dedup_key, ''), visible_at, visible_at > clock_timestamp() AND lock_token IS NOT NULL,
		       attempt_count, created_at, name, input, coalesce(instance_id, ''), coalesce(execution_id, 0), coalesce(activity_id, 0),
		       tag, coalesce(session_id, ''), coalesce(last_error, ''), headers,
		       ($1 IN ('', name) AND coalesce(input::jsonb = $2::jsonb, $2::jsonb IS NULL) AND $3 IN ('', instance_id)
		        AND $4 IN (0::bigint, execution_id) AND $5 IN (0::bigint, activity_id) AND $6 IN ('', tag) AND $7 IN ('', session_id)
		        AND coalesce(headers @> $8::jsonb, $8::jsonb IS NULL)) IS TRUE
		  FROM worker_queue ORDER BY id`
	messageSQL = `
		SELECT id, namespace, priority, coalesce(dedup_key, ''), visible_at,
		       visible_at > clock_timestamp() AND (lock_token IS NOT NULL OR held),
		       attempt_count, created_at, instance_id, kind, data, coalesce(name, ''), coalesce(version, ''), coalesce(execution_id, 0), queue,
		       coalesce(sticky_owner, ''), coalesce(sticky_due, visible_at), headers,
		       ($1 IN ('', instance_id) AND $2 IN ('', kind) AND coalesce(data::jsonb = $3::jsonb, $3::jsonb IS NULL) AND $4 IN ('', name)
		        AND $5 IN ('', version) AND $6 IN (0::bigint, execution_id) AND $7 IN ('', queue)
		        AND coalesce(headers @> $8::jsonb, $8::jsonb IS NULL)) IS TRUE
		  FROM orchestrator_queue ORDER BY id`
)

func queuedWork(tb testing.TB, p *pgwake.Provider, want pgwake.WorkItem) (found []QueuedWork, all []string) {
	tb.Helper()
	found, all, err := queued(tb, p, workSQL, func(row pgx.CollectableRow) (w QueuedWork, like bool, err error) {
		err = row.Scan(&w.ID, &w.Namespace, &w.Priority, &w.DedupKey, &w.DueAt, &w.Claimed, &w.Attempts, &w.EnqueuedAt,
			&w.Name, (*[]byte)(&w.Input), &w.Instance, &w.ExecutionID, &w.ActivityID, &w.Tag, &w.Session, &w.LastError, &w.Headers, &like)
		return w, like, err
	}, func(w QueuedWork) string { return describeWork(w.WorkItem) + w.state() },
		want.Name, wanted(tb, want.Input), want.Instance, want.ExecutionID, want.ActivityID, want.Tag, want.Session, wantedHeaders(want.Headers))
	if err != nil {
		tb.Fatalf("look for work items like %s: %v", describeWork(want), err)
	}
	return found, all
}

func queuedMessages(tb testing.TB, p *pgwake.Provider, want pgwake.Message) (found []QueuedMessage, all []string) {
	tb.Helper()
	found, all, err := queued(tb, p, messageSQL, func(row pgx.CollectableRow) (m QueuedMessage, like bool, err error) {
		err = row.Scan(&m.ID, &m.Namespace, &m.Priority, &m.DedupKey, &m.DueAt, &m.Claimed, &m.Attempts, &m.EnqueuedAt,
			&m.Instance, &m.Kind, (*[]byte)(&m.Data), &m.Name, &m.Version, &m.ExecutionID, &m.Queue, &m.StickyOwner, &m.StickyDue, &m.Headers, &like)
		if m.StickyOwner == "" {
			m.StickyDue = time.Time{}
		}
		return m, like, err
	}, func(m QueuedMessage) string { return describeMessage(m.Message) + m.state() },
		want.Instance, string(want.Kind), wanted(tb, want.Data), want.Name, want.Version, want.ExecutionID, want.Queue, wantedHeaders(want.Headers))
	if err != nil {
		tb.Fatalf("look for messages like %s: %v", describeMessage(want), err)
	}
	return found, all
}

// queued returns the rows that are like what is wanted, and descriptions of all rows.
func queued[T any](tb testing.TB, p *pgwake.Provider, sql string, scan func(pgx.CollectableRow) (T, bool, error), describe func(T) string, args ...any) (found []T, all []string, err error) {
	tb.Helper()
	err = backstage(tb, p, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
			item, like, err := scan(row)
			if like {
				found = append(found, item)
			}
			return describe(item), err
		})
		return err
	})
	return found, all, err
}

// wantedHeaders returns headers as an argument: NULL if they are not compared.
func wantedHeaders(headers map[string]string) *string {
	if len(headers) == 0 {
		return nil
	}
	object, _ := json.Marshal(headers) // strings
	return new(string(object))
}

// wanted returns JSON as an argument: NULL if it is not compared.
func wanted(tb testing.TB, data json.RawMessage) *string {
	tb.Helper()
	if len(data) == 0 {
		return nil
	}
	if !json.Valid(data) {
		tb.Fatalf("what is wanted is not valid JSON: %s", data)
	}
	return new(string(data))
}

func (q *Queued) state() string {
	switch {
	case q.Claimed:
		return fmt.Sprintf(" claimed until %v", q.DueAt)
	case q.DueAt.After(q.EnqueuedAt):
		return fmt.Sprintf(" due at %v", q.DueAt)
	}
	return ""
}

// listed says what a queue holds, for the failure of a test.
func listed(all []string) string {
	const most = 20
	switch {
	case len(all) == 0:
		return "the queue is empty"
	case len(all) > most:
		all = append(all[:most:most], fmt.Sprintf("and %d more", len(all)-most))
	}
	return "the queue holds\n\t" + strings.Join(all, "\n\t")
}

func describeWork(w pgwake.WorkItem) string {
	return describe(field{"name", w.Name}, field{"input", w.Input}, field{"instance", w.Instance}, field{"execution", w.ExecutionID},
		field{"activity", w.ActivityID}, field{"tag", w.Tag}, field{"session", w.Session}, field{"headers", w.Headers})
}

func describeMessage(m pgwake.Message) string {
	return describe(field{"instance", m.Instance}, field{"kind", string(m.Kind)}, field{"data", m.Data}, field{"name", m.Name},
		field{"version", m.Version}, field{"execution", m.ExecutionID}, field{"queue", m.Queue}, field{"headers", m.Headers})
}

type field struct {
	name  string
	value any
}

// describe leaves out the fields that are zero.
func describe(fields ...field) string {
	var parts []string
	for _, f := range fields {
		switch v := f.value.(type) {
		case string:
			if v != "" {
				parts = append(parts, fmt.Sprintf("%s: %q", f.name, v))
			}
		case json.RawMessage:
			if len(v) > 0 {
				parts = append(parts, fmt.Sprintf("%s: %s", f.name, v))
			}
		case map[string]string:
			if len(v) > 0 {
				parts = append(parts, fmt.Sprintf("%s: %q", f.name, v))
			}
		case int64:
			if v != 0 {
				parts = append(parts, fmt.Sprintf("%s: %d", f.name, v))
			}
		}
	}
	return "{" + strings.Join(parts, ", ") + "}"
}
