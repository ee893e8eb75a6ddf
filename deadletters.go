package pgwake

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// This file answers: what becomes of work that nobody is to fetch any more?

// DeadLetter is a work item or a message that was taken out of its queue, with the reason.
type DeadLetter struct {
	ID         int64 // of the letter; ids go up, though not without gaps
	Queue      Queue // where it was, and where a redrive puts it
	ItemID     int64 // of the work item or message, which it keeps through a redrive
	Namespace  string
	Priority   int
	Attempts   int // claims
	EnqueuedAt time.Time
	DiedAt     time.Time
	Reason     string
	Error      string // what went wrong, if anybody said

	Name        string          // of the work item; of the orchestration, for a message that opens an execution
	Kind        MessageKind     // of the message
	Version     string          // of the orchestration, for a message that opens an execution
	Data        json.RawMessage // input of the work item, or data of the message
	Instance    string          // that scheduled the work item, or that the message is for
	ExecutionID int64
	ActivityID  int64  // of the work item
	DedupKey    string // not queued by this: the same key may be enqueued again
	Tag         string // of the work item; queue name of the message
	Session     string // of the work item
	Headers     map[string]string
	Key         string // of the work item

	DataCut *Cut // Data, if that is longer than DeadLetterFilter.PayloadBytes
}

// DeadLetterFilter says which dead letters, all of its conditions together. The zero value and nil mean all, up to
// the limit.
type DeadLetterFilter struct {
	Queue      *Queue    // nil: both
	Namespace  string    // "": all
	Name       string    // see DeadLetter.Name
	Instance   string    // "": all
	Reason     string    // "": all
	DiedBefore time.Time // server time; the zero time: no such condition

	// IDs are those of the letters. Nil means all; empty and not nil means none.
	IDs []int64

	After int64 // only letters with a higher id: to list on, pass the last one listed

	// Before has a list begin with the latest letter of a lower id, and go back: math.MaxInt64 is the end, and to list on pass the last one
	// listed. A count, a redrive and a purge refuse it. Defaults to 0: those with the lowest ids first.
	Before int64

	// Limit is how many letters at most, those that come first; up to MaxFetch.
	// Defaults to 100 for a list, and to 1000 for a redrive and a purge.
	Limit int

	// PayloadBytes is up to how many bytes a payload is read whole. Of a longer one there is the beginning, see Cut. Defaults to 0: all are.
	PayloadBytes int
}

// args are the arguments that the SQL functions have in common.
func (f *DeadLetterFilter) args(limit int) ([]any, error) {
	if f == nil {
		f = &DeadLetterFilter{}
	}
	if f.Namespace != "" {
		if err := CheckNamespace(f.Namespace); err != nil {
			return nil, err
		}
	}
	limit, pageErr := pageLimit(f.After, f.Limit, limit)
	err := cmp.Or(checkText("name", f.Name, false), checkText("instance id", f.Instance, false),
		checkText("reason", f.Reason, false), checkInstant("DiedBefore", f.DiedBefore), pageErr)
	if err != nil {
		return nil, err
	}
	var queue *string
	if f.Queue != nil {
		if *f.Queue != Worker && *f.Queue != Orchestrator {
			return nil, invalid("queue %d is unknown", int(*f.Queue))
		}
		queue = new(f.Queue.String())
	}
	return []any{queue, text(f.Namespace), text(f.Name), text(f.Instance), text(f.Reason),
		optional(f.DiedBefore, f.DiedBefore.IsZero()), f.IDs, f.After, limit}, nil
}

// forwards are args for those who count the letters or do something to them, beginning with the lowest id.
func (f *DeadLetterFilter) forwards(limit int) ([]any, error) {
	if value(f).Before != 0 {
		return nil, invalid("only a list goes back, from %d", f.Before)
	}
	return f.args(limit)
}

// DeadLetterWorkItem takes an item out of the queue for good, unless it is redriven, with a reason to filter by
// (required, at most 255 bytes) and what went wrong (any text; it is cut at 64 KiB, and bytes that are not text are
// replaced; empty: what the latest AbandonOptions.Error said). The orchestration that scheduled the item is not told:
// that is for a message in the same transaction, see the Tx twin. ErrLockLost if the lease has ended.
func (p *Provider) DeadLetterWorkItem(ctx context.Context, token LockToken, reason, cause string) error {
	return p.doAndTell(ctx, "dead-letter work item", func(ctx context.Context, q querier) error {
		return p.deadLetterWork(ctx, q, token, reason, cause)
	}, p.engine.stir)
}

// DeadLetterWorkItemTx is DeadLetterWorkItem as part of the transaction.
func (p *Provider) DeadLetterWorkItemTx(ctx context.Context, tx pgx.Tx, token LockToken, reason, cause string) error {
	return p.doTx(ctx, tx, "dead-letter work item", func(ctx context.Context, q querier) error {
		return p.deadLetterWork(ctx, q, token, reason, cause)
	})
}

func (p *Provider) deadLetterWork(ctx context.Context, q querier, token LockToken, reason, cause string) error {
	l, err := token.splitWork()
	if err != nil {
		return err
	}
	if err := checkText("reason", reason, true); err != nil {
		return err
	}
	_, err = q.Exec(ctx, p.sql.deadLetterWork, l.item, l.claim, reason, causeText(cause))
	return err
}

// DeadLetterOrchestrationItem takes the messages of a turn out of the queue, as DeadLetterWorkItem does an item,
// and frees the instance. Messages that came since make its next turn. ErrLockLost if the lease has ended.
func (p *Provider) DeadLetterOrchestrationItem(ctx context.Context, token LockToken, reason, cause string) error {
	quiet := p.engine.quiet()
	var freed produced
	var more bool
	return p.doAndTell(ctx, "dead-letter orchestration", func(ctx context.Context, q querier) (err error) {
		freed, more, err = p.deadLetterOrchestration(ctx, q, token, reason, cause, quiet)
		return err
	}, func() {
		var due []produced
		if more {
			due = append(due, freed)
		}
		p.engine.acked(freed.namespace, due, quiet)
	}, Orchestrator)
}

// DeadLetterOrchestrationItemTx is DeadLetterOrchestrationItem as part of the transaction.
func (p *Provider) DeadLetterOrchestrationItemTx(ctx context.Context, tx pgx.Tx, token LockToken, reason, cause string) error {
	return p.doTx(ctx, tx, "dead-letter orchestration", func(ctx context.Context, q querier) error {
		_, _, err := p.deadLetterOrchestration(ctx, q, token, reason, cause, false)
		return err
	})
}

// deadLetterOrchestration runs dead_letter_orchestration. It returns where the instance was freed, and whether it
// has a message due there.
func (p *Provider) deadLetterOrchestration(ctx context.Context, q querier, token LockToken, reason, cause string, quiet bool) (freed produced, more bool, err error) {
	claim, instance, err := token.split()
	if err != nil {
		return freed, false, err
	}
	if err := checkText("reason", reason, true); err != nil {
		return freed, false, err
	}
	var scope *string // null: any
	err = q.QueryRow(ctx, p.sql.deadLetterTurn, instance, claim, reason, causeText(cause), quiet).
		Scan(&scope, &more, &freed.now)
	freed.queue, freed.namespace, freed.dueAt = Orchestrator, value(scope), freed.now
	return freed, more, err
}

// maxCause is where what went wrong is cut. More would be a log, not a cause.
const maxCause = 64 << 10

// causeText makes of what went wrong a text that PostgreSQL can hold. It refuses nothing, or a poisonous item whose
// error is odd would come back for ever.
func causeText(cause string) *string {
	if len(cause) > maxCause {
		cause = cause[:maxCause]
		for cut := 1; cut < utf8.UTFMax; cut++ { // the first bytes of a character that was cut
			if start := len(cause) - cut; utf8.RuneStart(cause[start]) {
				if !utf8.FullRuneInString(cause[start:]) {
					cause = cause[:start]
				}
				break
			}
		}
	}
	cause = strings.ReplaceAll(strings.ToValidUTF8(cause, "\uFFFD"), "\x00", "\uFFFD")
	return text(cause)
}

// ListDeadLetters returns dead letters in the order of their ids; empty if there are none.
func (p *Provider) ListDeadLetters(ctx context.Context, f *DeadLetterFilter) (letters []DeadLetter, err error) {
	err = p.do(ctx, "list dead letters", func(ctx context.Context, q querier) error {
		args, err := f.args(100)
		if err != nil {
			return err
		}
		before := value(f).Before
		if before < 0 {
			return invalid("id %d to go back from is negative", before)
		}
		payload, err := payloadLimit(value(f).PayloadBytes)
		if err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.listDeadLetters, append(args, optional(before, before == 0), payload)...)
		if err != nil {
			return err
		}
		letters, err = pgx.CollectRows(rows, scanDeadLetter)
		return err
	})
	return letters, err
}

const letterColumns = "id, queue, item_id, namespace, priority, attempt_count, name, kind, version, data, instance_id, execution_id, activity_id, dedup_key, " +
	"tag, session_id, enqueued_at, died_at, reason, error, headers, key, data_cut"

func scanDeadLetter(row pgx.CollectableRow) (d DeadLetter, err error) {
	var queue string
	var name, kind, version, instance, dedupKey, session, cause, key *string
	var execution, activity *int64
	var headers []byte
	err = row.Scan(&d.ID, &queue, &d.ItemID, &d.Namespace, &d.Priority, &d.Attempts, &name, &kind, &version,
		(*[]byte)(&d.Data), &instance, &execution, &activity, &dedupKey, &d.Tag, &session,
		&d.EnqueuedAt, &d.DiedAt, &d.Reason, &cause, &headers, &key, &d.DataCut)
	if err != nil {
		return d, err
	}
	d.Queue, err = queueNamed(queue)
	d.Name, d.Kind, d.Version = value(name), MessageKind(value(kind)), value(version)
	d.Instance, d.ExecutionID, d.ActivityID = value(instance), value(execution), value(activity)
	d.DedupKey, d.Session, d.Error, d.Headers = value(dedupKey), value(session), value(cause), headersOf(headers)
	d.Key = value(key)
	return d, err
}

// DeadLetterCount is how many letters there are of a namespace of a queue.
type DeadLetterCount struct {
	Queue     Queue
	Namespace string
	Letters   int64
	LastID    int64 // the highest of their ids
}

// CountDeadLetters returns how many letters the filter is for, whatever its Limit, by queue and namespace; a part that has none is
// missing. Without conditions it reads an index from end to end: tens of milliseconds for 100,000 letters.
func (p *Provider) CountDeadLetters(ctx context.Context, f *DeadLetterFilter) (counts []DeadLetterCount, err error) {
	err = p.do(ctx, "count dead letters", func(ctx context.Context, q querier) error {
		args, err := f.forwards(100)
		if err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.countDeadLetters, args[:len(args)-1]...)
		if err != nil {
			return err
		}
		counts, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c DeadLetterCount, err error) {
			var queue string
			if err = row.Scan(&queue, &c.Namespace, &c.Letters, &c.LastID); err == nil {
				c.Queue, err = queueNamed(queue)
			}
			return c, err
		})
		return err
	})
	return counts, err
}

func queueNamed(name string) (Queue, error) {
	for _, q := range []Queue{Worker, Orchestrator} {
		if q.String() == name {
			return q, nil
		}
	}
	return 0, fmt.Errorf("queue %s is unknown", quote(name))
}

// RedriveDeadLetters puts letters back into their queues, at most DeadLetterFilter.Limit of them in one statement,
// and returns how many. They are due at once, never attempted so far, and otherwise as they were, under their old
// ids; messages go to the namespace and queue name that their instance has by now. A letter whose dedup key is
// queued again stays where it is and does not count, and one that somebody else is redriving is left to him. To
// redrive any number of letters, call it until it returns 0. It knows nothing of layers: deliveries of package eventbus, among others or alone,
// are for eventbus.RedriveDeadLetters, or eventbus.Bus.Redrive.
//
// A letter is no longer in the queue, so OrchestrationAck.CancelActivities does not reach it: an activity that died, and
// was cancelled afterwards, comes back with a redrive, and its completion is one that the orchestration must bear.
func (p *Provider) RedriveDeadLetters(ctx context.Context, f *DeadLetterFilter) (redriven int, err error) {
	quiet := p.engine.quiet()
	var due []produced
	err = p.doAndTell(ctx, "redrive dead letters", func(ctx context.Context, q querier) error {
		redriven, due, err = p.redrive(ctx, q, f, quiet)
		return err
	}, func() { p.engine.tell(due, quiet) }, Worker, Orchestrator)
	return redriven, err
}

// RedriveDeadLettersTx is RedriveDeadLetters as part of the transaction.
func (p *Provider) RedriveDeadLettersTx(ctx context.Context, tx pgx.Tx, f *DeadLetterFilter) (redriven int, err error) {
	err = p.doTx(ctx, tx, "redrive dead letters", func(ctx context.Context, q querier) error {
		redriven, _, err = p.redrive(ctx, q, f, false)
		return err
	})
	return redriven, err
}

// redrive runs redrive_dead_letters. It also returns where something became due.
func (p *Provider) redrive(ctx context.Context, q querier, f *DeadLetterFilter, quiet bool) (redriven int, due []produced, err error) {
	args, err := f.forwards(1000)
	if err != nil {
		return 0, nil, err
	}
	rows, err := q.Query(ctx, p.sql.redriveDeadLetters, append(args, quiet)...)
	if err != nil {
		return 0, nil, err
	}
	var queue string
	var n int
	var d produced
	_, err = pgx.ForEachRow(rows, []any{&queue, &d.namespace, &n, &d.now}, func() (err error) {
		d.queue, err = queueNamed(queue)
		d.dueAt = d.now
		due = append(due, d)
		redriven += n
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	return redriven, due, nil
}

// PurgeDeadLetters removes letters for good, at most DeadLetterFilter.Limit of them in one statement, and returns how
// many. To purge any number of letters, call it until it returns 0.
func (p *Provider) PurgeDeadLetters(ctx context.Context, f *DeadLetterFilter) (purged int, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "purge dead letters", func(ctx context.Context, q querier) error {
		purged, err = p.purgeDeadLetters(ctx, q, f)
		return err
	})
	return purged, err
}

// PurgeDeadLettersTx is PurgeDeadLetters as part of the transaction.
func (p *Provider) PurgeDeadLettersTx(ctx context.Context, tx pgx.Tx, f *DeadLetterFilter) (purged int, err error) {
	err = p.doTx(ctx, tx, "purge dead letters", func(ctx context.Context, q querier) error {
		purged, err = p.purgeDeadLetters(ctx, q, f)
		return err
	})
	return purged, err
}

func (p *Provider) purgeDeadLetters(ctx context.Context, q querier, f *DeadLetterFilter) (purged int, err error) {
	args, err := f.forwards(1000)
	if err != nil {
		return 0, err
	}
	err = q.QueryRow(ctx, p.sql.purgeDeadLetters, args...).Scan(&purged)
	return purged, err
}
