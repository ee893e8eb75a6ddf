package pgwake

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what is in a queue, for somebody who looks and takes nothing?

// ItemState says what keeps an item in its queue, in the words of QueueDepth.
type ItemState string

const (
	ItemDue      ItemState = "due"       // it could be fetched now, but for what QueueDepth.Due counts all the same
	ItemDelayed  ItemState = "delayed"   // it is due later
	ItemLeased   ItemState = "leased"    // somebody has claimed it, or it is held back behind a turn of its instance
	ItemKeptBack ItemState = "kept back" // by a limit of its key
)

// Cut is what a list has of a payload that is longer than it was to read, in place of it.
type Cut struct {
	Bytes int64  `json:"bytes"` // length of all of it
	Start string `json:"start"` // its first characters, as many as bytes were to be read
}

// QueuedItem is a work item, or a message, that is in its queue.
type QueuedItem struct {
	ID         int64
	Queue      Queue
	Namespace  string
	Priority   int
	State      ItemState
	DueAt      time.Time // server time; while it is leased, the end of the lease
	Attempts   int       // claims so far
	EnqueuedAt time.Time

	Name        string          // of the work item; of the orchestration, for a message that opens an execution
	Kind        MessageKind     // of the message
	Version     string          // of the orchestration, for a message that opens an execution
	Data        json.RawMessage // input of the work item, or data of the message
	Instance    string          // that scheduled the work item, or that the message is for
	ExecutionID int64
	ActivityID  int64 // of the work item
	DedupKey    string
	Tag         string // of the work item; queue name of the message
	Session     string // of the work item
	Key         string // of the work item
	Headers     map[string]string
	LastError   string // AbandonOptions.Error of the latest attempt at the work item that gave one

	DataCut *Cut // Data, if that is longer than PeekFilter.PayloadBytes
}

// PeekFilter says which items, all of its conditions together. The zero value and nil mean all, up to the limit.
type PeekFilter struct {
	Namespace string // "": all
	Name      string // see QueuedItem.Name; "": all
	Instance  string // "": all

	After int64 // only items with a higher id: to list on, pass the last one listed
	Limit int   // how many items at most; up to MaxFetch. Defaults to 100

	// PayloadBytes is up to how many bytes a payload is read whole. Of a longer one there is the beginning, see Cut. Defaults to 0: all are.
	PayloadBytes int
}

// Peek returns what is in a queue, in the order of the ids, which is about that in which it was enqueued; empty if there is nothing.
// It claims nothing, and waits for nobody. Without an After it reads along the ids until it has as many as Limit says. Errors:
// ErrInvalid.
func (p *Provider) Peek(ctx context.Context, queue Queue, f *PeekFilter) (items []QueuedItem, err error) {
	err = p.do(ctx, "peek", func(ctx context.Context, q querier) error {
		args, err := f.args(queue)
		if err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.peek, args...)
		if err != nil {
			return err
		}
		items, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (QueuedItem, error) { return scanQueued(row, queue) })
		return err
	})
	return items, err
}

func (f *PeekFilter) args(queue Queue) ([]any, error) {
	if f == nil {
		f = &PeekFilter{}
	}
	if queue != Worker && queue != Orchestrator {
		return nil, invalid("queue %d is unknown", int(queue))
	}
	if f.Namespace != "" {
		if err := CheckNamespace(f.Namespace); err != nil {
			return nil, err
		}
	}
	if err := checkText("name", f.Name, false); err != nil {
		return nil, err
	}
	if err := checkText("instance id", f.Instance, false); err != nil {
		return nil, err
	}
	limit, err := pageLimit(f.After, f.Limit, 100)
	if err != nil {
		return nil, err
	}
	payload, err := payloadLimit(f.PayloadBytes)
	return []any{queue.String(), text(f.Namespace), text(f.Name), text(f.Instance), f.After, limit, payload}, err
}

const queuedColumns = "id, namespace, priority, state, due_at, attempt_count, created_at, name, kind, version, data, instance_id, execution_id, activity_id, " +
	"dedup_key, tag, session_id, key, headers, last_error, data_cut"

func scanQueued(row pgx.CollectableRow, queue Queue) (i QueuedItem, err error) {
	var name, kind, version, instance, dedupKey, session, key, lastError *string
	var execution, activity *int64
	var headers []byte
	err = row.Scan(&i.ID, &i.Namespace, &i.Priority, (*string)(&i.State), &i.DueAt, &i.Attempts, &i.EnqueuedAt, &name, &kind, &version,
		(*[]byte)(&i.Data), &instance, &execution, &activity, &dedupKey, &i.Tag, &session, &key, &headers, &lastError, &i.DataCut)
	i.Queue = queue
	i.Name, i.Kind, i.Version = value(name), MessageKind(value(kind)), value(version)
	i.Instance, i.ExecutionID, i.ActivityID = value(instance), value(execution), value(activity)
	i.DedupKey, i.Session, i.Key = value(dedupKey), value(session), value(key)
	i.Headers, i.LastError = headersOf(headers), value(lastError)
	return i, err
}
