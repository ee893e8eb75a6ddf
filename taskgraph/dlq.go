package taskgraph

import (
	"context"
	"encoding/json"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: which tasks does somebody have to look into? That has nothing to do with the dead letters of a queue: an entry is a note, and
// a task is put right by what is done to its steps.

// DLQReason says why somebody has to look into a task.
type DLQReason string

// The reasons, and how urgent they are (DLQEntry.Priority).
const (
	DLQDependencyCycle    DLQReason = "dependency_cycle_detected" // 1000
	DLQMaxRetriesExceeded DLQReason = "max_retries_exceeded"      // 500
	DLQStaleness          DLQReason = "staleness_timeout"         // 100
	DLQWorkerUnavailable  DLQReason = "worker_unavailable"        // 50
	DLQManual             DLQReason = "manual_dlq"                // 10
)

// DLQStatus says how far somebody has got with an entry.
type DLQStatus string

// An entry is pending, until it is resolved as one of the others.
const (
	DLQPending           DLQStatus = "pending"
	DLQManuallyResolved  DLQStatus = "manually_resolved"
	DLQPermanentlyFailed DLQStatus = "permanently_failed"
	DLQCancelled         DLQStatus = "cancelled"
)

// DLQEntry is a task that somebody has to look into, or had to.
type DLQEntry struct {
	ID            string          `db:"dlq_entry_uuid"`
	TaskID        string          `db:"task_uuid"`
	Namespace     string          `db:"namespace_name"`
	TaskName      string          `db:"task_name"`
	Version       string          `db:"version"`
	OriginalState TaskState       `db:"original_state"` // when the entry was made
	State         TaskState       `db:"current_state"`  // by now
	Reason        DLQReason       `db:"dlq_reason"`
	Priority      float64         `db:"priority_score"` // by the reason, and one for each minute that it was pending
	Minutes       float64         `db:"minutes_in_dlq"` // that it was pending
	Status        DLQStatus       `db:"resolution_status"`
	ResolvedAt    *time.Time      `db:"resolved_at"`
	ResolvedBy    *string         `db:"resolved_by"`
	Notes         *string         `db:"resolution_notes"`
	Snapshot      json.RawMessage `db:"snapshot"` // the task when the entry was made: its state, steps_by_state, and in open_steps those that were not done
	Metadata      json.RawMessage `db:"metadata"`
	CreatedAt     time.Time       `db:"created_at"`
}

// AddToDLQ notes that somebody has to look into a task, and goes on as before. metadata is any value of which package encoding/json makes
// JSON; nil: none. It returns the id of the entry; a task has one that is pending at most, and if there is one already, that is returned,
// and added is false. Errors: pgwake.ErrNotFound, pgwake.ErrInvalid for an unknown reason, pgwake.ErrPayloadTooLarge for metadata of more
// than pgwake.Config.MaxPayload.
func (g *Graph) AddToDLQ(ctx context.Context, task string, reason DLQReason, metadata any) (entry string, added bool, err error) {
	const op = "add to DLQ"
	if err := checkID(op, "task", task); err != nil {
		return "", false, err
	}
	if reason == "" {
		reason = DLQManual
	}
	text, err := jsonText(metadata, g.p.MaxPayload())
	if err != nil {
		return "", false, invalid(op, "the metadata: %w", err)
	}
	done, err := row[struct {
		Entry string `db:"dlq_entry_uuid"`
		Added bool   `db:"added"`
	}](ctx, g, op, "add_to_dlq", task, string(reason), text)
	return done.Entry, done.Added, err
}

// DLQFilter says which entries, all of its conditions together. The zero value and nil mean those that are pending.
type DLQFilter struct {
	Status DLQStatus // Defaults to DLQPending
	All    bool      // whatever the status
	Reason DLQReason // "": any
	TaskID string    // "": any
	Limit  int       // up to 10,000. Defaults to 100
	Offset int       // how many of them to leave out first
}

// ListDLQ returns entries, the most urgent first.
func (g *Graph) ListDLQ(ctx context.Context, f *DLQFilter) ([]DLQEntry, error) {
	const op = "list DLQ"
	if f == nil {
		f = &DLQFilter{}
	}
	if f.Limit < 0 || f.Limit > maxList || f.Offset < 0 {
		return nil, invalid(op, "a limit of %d from %d, and %d is the most", f.Limit, f.Offset, maxList)
	}
	if f.TaskID != "" {
		if err := checkID(op, "task", f.TaskID); err != nil {
			return nil, err
		}
	}
	limit, status := f.Limit, f.Status
	if limit == 0 {
		limit = 100
	}
	if status == "" && !f.All {
		status = DLQPending
	}
	return rows[DLQEntry](ctx, g, op, "list_dlq", optional(string(status)), optional(string(f.Reason)), optional(f.TaskID), limit, f.Offset)
}

// ResolveDLQ ends an entry that is pending: with which status, by whom, and with what notes. Nothing is done to the task. False if it was
// resolved before. Errors: pgwake.ErrNotFound, pgwake.ErrInvalid for another status and for by of more than 255 bytes, and
// pgwake.ErrPayloadTooLarge for notes of more than MaxReasonLength.
func (g *Graph) ResolveDLQ(ctx context.Context, entry string, status DLQStatus, by, notes string) (bool, error) {
	const op = "resolve DLQ entry"
	if err := checkID(op, "DLQ entry", entry); err != nil {
		return false, err
	}
	if problem := textProblem(by, 0, pgwake.MaxNameLength); problem != "" {
		return false, invalid(op, "the name of who resolves it %s", problem)
	}
	if err := checkReason(op, "notes", notes); err != nil {
		return false, err
	}
	return value[bool](ctx, g, op, "resolve_dlq", entry, string(status), optional(by), optional(notes))
}
