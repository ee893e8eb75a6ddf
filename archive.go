package pgwake

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what was done? The archive keeps acknowledged work items for Config.ArchiveFor.

// ArchivedItem is a work item that was acknowledged.
type ArchivedItem struct {
	WorkItem
	ID         int64 // of the entry; ids go up, though not without gaps
	ItemID     int64 // of the work item
	Namespace  string
	Priority   int
	Attempts   int // claims, the one that was acknowledged included
	DedupKey   string
	EnqueuedAt time.Time
	FinishedAt time.Time // when it was acknowledged, server time
	InputCut   *Cut      // Input, if that is longer than ArchiveFilter.PayloadBytes
}

// ArchiveFilter says which entries of the archive, all of its conditions together. The zero value and nil mean all,
// up to the limit.
type ArchiveFilter struct {
	Namespace string // "": all
	Name      string // of the work item; "": all
	Instance  string // that scheduled the work item; "": all

	After int64 // only entries with a higher id: to list on, pass the last one listed
	Limit int   // how many entries at most; up to MaxFetch. Defaults to 100

	// PayloadBytes is up to how many bytes a payload is read whole. Of a longer one there is the beginning, see Cut. Defaults to 0: all are.
	PayloadBytes int
}

func (f *ArchiveFilter) args() ([]any, error) {
	if f == nil {
		f = &ArchiveFilter{}
	}
	if f.Namespace != "" {
		if err := CheckNamespace(f.Namespace); err != nil {
			return nil, err
		}
	}
	if err := checkText("work item name", f.Name, false); err != nil {
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
	return []any{text(f.Namespace), text(f.Name), text(f.Instance), f.After, limit, payload}, err
}

const archiveColumns = "id, item_id, namespace, priority, attempt_count, name, input, instance_id, execution_id, activity_id, dedup_key, tag, session_id, " +
	"enqueued_at, finished_at, headers, key, input_cut"

// ListArchive returns acknowledged work items in the order of the entries' ids, which is about the order of the
// acks; empty if there are none. Whatever Config.ArchiveFor says: without it a Provider adds nothing, but it reads
// what others added.
func (p *Provider) ListArchive(ctx context.Context, f *ArchiveFilter) (items []ArchivedItem, err error) {
	err = p.do(ctx, "list archive", func(ctx context.Context, q querier) error {
		args, err := f.args()
		if err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.listArchive, args...)
		if err != nil {
			return err
		}
		items, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (a ArchivedItem, err error) {
			var instance, dedupKey, session, key *string
			var execution, activity *int64
			var headers []byte
			err = row.Scan(&a.ID, &a.ItemID, &a.Namespace, &a.Priority, &a.Attempts, &a.Name, (*[]byte)(&a.Input),
				&instance, &execution, &activity, &dedupKey, &a.Tag, &session, &a.EnqueuedAt, &a.FinishedAt, &headers, &key, &a.InputCut)
			a.Instance, a.ExecutionID, a.ActivityID = value(instance), value(execution), value(activity)
			a.DedupKey, a.Session, a.Headers = value(dedupKey), value(session), headersOf(headers)
			a.Key = value(key)
			return a, err
		})
		return err
	})
	return items, err
}

// PurgeArchive removes everything that was acknowledged before an instant of the server's clock, in one statement,
// and returns how many entries that was. A large archive is purged bit by bit with instants that move on. Acks
// remove what is older than Config.ArchiveFor by themselves; this is for more than that, and for when there are no
// more acks.
func (p *Provider) PurgeArchive(ctx context.Context, before time.Time) (purged int, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "purge archive", func(ctx context.Context, q querier) error {
		purged, err = p.purgeArchive(ctx, q, before)
		return err
	})
	return purged, err
}

// PurgeArchiveTx is PurgeArchive as part of the transaction.
func (p *Provider) PurgeArchiveTx(ctx context.Context, tx pgx.Tx, before time.Time) (purged int, err error) {
	err = p.doTx(ctx, tx, "purge archive", func(ctx context.Context, q querier) error {
		purged, err = p.purgeArchive(ctx, q, before)
		return err
	})
	return purged, err
}

func (p *Provider) purgeArchive(ctx context.Context, q querier, before time.Time) (purged int, err error) {
	if before.IsZero() {
		return 0, invalid("the time to purge before is zero")
	}
	if err := checkInstant("the time to purge before,", before); err != nil {
		return 0, err
	}
	err = q.QueryRow(ctx, p.sql.purgeArchive, before).Scan(&purged)
	return purged, err
}
