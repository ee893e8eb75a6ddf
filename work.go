package pgwake

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: what can be done with work items?

const opEnqueueWork = "enqueue work"

// WorkItem is a unit of work for whoever fetches it.
type WorkItem struct {
	Name  string          // what to do; at most 255 bytes
	Input json.RawMessage // JSON of at most Config.MaxPayload bytes, kept byte for byte; empty means none

	// The orchestration that scheduled the item, if one did, and what it calls it; see CancelActivities. Opaque to the
	// queue.
	Instance    string
	ExecutionID int64
	ActivityID  int64

	// Tag is what a fetch can ask for or leave out, such as the hardware that the item needs. At most 255 bytes.
	// Defaults to "": none.
	Tag string

	// Session is for items that are to be handled in one place, one owner at a time; see SessionOptions. Within a
	// session items go by due time and id. Among the first 32+n that are due, for a fetch of n, a higher priority goes first; so where
	// order matters, all items of a session have the same priority. At most 255 bytes. Defaults to "": none.
	Session string

	// Key is with whom the item shares the limits of its namespace, such as a customer; see Limits. Not together with
	// Session. At most 255 bytes. Defaults to "": none.
	Key string

	// Headers travel with the item, such as to which trace it belongs (see Config.Propagator): names of at most 255
	// bytes and any text, of MaxHeaderBytes together. Defaults to none.
	Headers map[string]string
}

// EnqueueOptions says when, where and how urgently. Nil means the zero value: now, in the default
// namespace, at priority 0.
type EnqueueOptions struct {
	// Namespace is where the item goes; the first item creates it. At most 40 characters of lower-case
	// letters, digits, '_' and '-', beginning with a letter. Defaults to DefaultNamespace.
	Namespace string

	// Priority from 0 to 9; higher ones are fetched first. Defaults to 0.
	Priority int

	// Delay makes the item due so much later, by the server's clock. Defaults to 0: due at once.
	Delay time.Duration

	// At makes the item due at an instant of the server's clock; one in the past is due at once, and before those of
	// its priority that are due since later: a head start. Priorities never age, so as long as there are enough items of a
	// higher one, lower ones starve. Instead, give all items the same priority, and urgent ones a HeadStart. An attempt that fails
	// ends the head start: the item is due when it is to be tried again. Not together with Delay. Defaults to the zero time: not used.
	At time.Time

	// DedupKey makes the enqueue add nothing while an item with the same key is queued in the same queue
	// and namespace, claimed or not. At most 255 bytes. Defaults to "": no such check.
	DedupKey string

	// DedupFor takes the key of a work item for so long, from its enqueue on, whatever becomes of the item. At most 100
	// years. Defaults to 0: the key is free again when the item has left the queue.
	DedupFor time.Duration

	// DedupScope says which work items stand in the way of this one. Defaults to DedupQueued.
	DedupScope DedupScope
}

// DedupScope says for how much of its life a work item stands in the way of another with the same dedup key. The later
// enqueue decides.
type DedupScope int

const (
	// DedupQueued: while it is queued, claimed or not.
	DedupQueued DedupScope = iota
	// DedupWaiting: until it is claimed, so that what happens while it is at work is done by another item. If its attempt
	// fails it is queued beside that, without its key. One that stands in the way is not claimed before the transaction of the
	// enqueue has ended, so it sees whatever that has changed.
	DedupWaiting
	// DedupQueuedOrDead: while it is queued, and as long as there is a dead letter of it.
	DedupQueuedOrDead
)

// text is what enqueue_work_many takes; nil: the default.
func (s DedupScope) text() *string {
	switch s {
	case DedupWaiting:
		return new("waiting")
	case DedupQueuedOrDead:
		return new("dead")
	}
	return nil
}

// Enqueued is the outcome of an enqueue.
type Enqueued struct {
	// Duplicate says that nothing was added, because the dedup key is taken. ID and DueAt are then those of the item that
	// is queued; if it no longer is, DueAt is zero, and ID as well if it was finished at this very moment.
	Duplicate bool
	ID        int64
	DueAt     time.Time // server time

	now time.Time // server time of the enqueue
}

// WorkEnqueue is a work item together with its options, for enqueuing several at once.
type WorkEnqueue struct {
	WorkItem
	EnqueueOptions
}

// ClaimedWorkItem is a work item under a lease.
type ClaimedWorkItem struct {
	WorkItem
	ID          int64
	Namespace   string
	Priority    int
	Attempt     int // claims so far, this one included
	EnqueuedAt  time.Time
	DueAt       time.Time // since when it could be claimed, or its At; after a lease that ended, the end of that
	LastError   string    // AbandonOptions.Error of the latest attempt that gave one
	LockToken   LockToken
	LockedUntil time.Time // end of the lease, server time
	Path        Path      // how it was found

	// Places is how many items like this, of its namespace or of its key, may be at work at one time, over all nodes; 0: any
	// number. This is one of them, at work or not: whoever claims ahead keeps others from it.
	Places int
}

// EnqueueForWorkerTx is EnqueueForWorker as part of the transaction.
func (p *Provider) EnqueueForWorkerTx(ctx context.Context, tx pgx.Tx, item WorkItem, o *EnqueueOptions) (Enqueued, error) {
	return first(p.EnqueueForWorkerManyTx(ctx, tx, one(item, o)))
}

// EnqueueForWorkerMany adds work items, all or none, in one statement. The outcomes are in the order of
// the items.
func (p *Provider) EnqueueForWorkerMany(ctx context.Context, items []WorkEnqueue) ([]Enqueued, error) {
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return nil, failed(opEnqueueWork, err)
	}
	defer done()
	added, err := p.addWork(ctx, items)
	return added, p.ended(ctx, opEnqueueWork, err)
}

// addWork is EnqueueForWorkerMany once it is admitted.
func (p *Provider) addWork(ctx context.Context, items []WorkEnqueue) (added []Enqueued, err error) {
	quiet := p.engine.quiet()
	err = p.run(ctx, func(ctx context.Context, q querier) error {
		added, err = p.enqueueWork(ctx, q, items, quiet)
		return err
	}, func() {
		var due []produced
		for i, a := range added {
			if item := &items[i]; !a.Duplicate {
				due = append(due, produced{Worker, cmp.Or(item.Namespace, DefaultNamespace), optional(item.Tag, item.Session != ""), a.DueAt, a.now})
			}
		}
		p.engine.tell(due, quiet)
	}, Worker)
	return added, err
}

// EnqueueForWorkerManyTx is EnqueueForWorkerMany as part of the transaction.
func (p *Provider) EnqueueForWorkerManyTx(ctx context.Context, tx pgx.Tx, items []WorkEnqueue) (added []Enqueued, err error) {
	err = p.doTx(ctx, tx, opEnqueueWork, func(ctx context.Context, q querier) error {
		added, err = p.enqueueWork(ctx, q, items, false)
		return err
	})
	return added, err
}

func (p *Provider) enqueueWork(ctx context.Context, q querier, items []WorkEnqueue, quiet bool) ([]Enqueued, error) {
	if len(items) == 0 {
		return nil, nil
	}
	if len(items) == 1 && items[0].DedupKey == "" {
		e, err := p.enqueueWorkItem(ctx, q, &items[0], quiet)
		return []Enqueued{e}, err
	}
	c, err := p.workColumns(ctx, items)
	if err != nil {
		return nil, err
	}
	rows, err := q.Query(ctx, p.sql.enqueueWork, append(c.args(), quiet)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Enqueued, error) { return scanEnqueued(row) })
}

// enqueueWorkItem is enqueueWork for one without a dedup key.
func (p *Provider) enqueueWorkItem(ctx context.Context, q querier, item *WorkEnqueue, quiet bool) (e Enqueued, err error) {
	if err := p.checkWorkEnqueue(item); err != nil {
		return e, err
	}
	return scanEnqueued(q.QueryRow(ctx, p.sql.enqueueWorkItem, item.Name, payload(item.Input),
		optional(item.Namespace, item.Namespace == "" || item.Namespace == DefaultNamespace), int16(item.Priority),
		optional(item.Delay, item.Delay == 0), optional(item.At, item.At.IsZero()), text(item.Instance),
		optional(item.ExecutionID, item.ExecutionID == 0 && item.Instance == ""), optional(item.ActivityID, item.ActivityID == 0 && item.Instance == ""),
		text(item.Tag), text(item.Session), headersArg(p.withTrace(ctx, item.Headers)), text(item.Key), quiet))
}

func scanEnqueued(row pgx.Row) (e Enqueued, err error) {
	var id *int64
	var dueAt *time.Time
	err = row.Scan(&id, &e.Duplicate, &dueAt, &e.now)
	e.ID, e.DueAt = value(id), value(dueAt)
	return e, err
}

// workColumns are work items as the arrays that enqueue_work_many and ack_orchestration take.
type workColumns struct {
	names, inputs []*string
	options       optionColumns
	instances     []*string
	executions    []*int64
	activities    []*int64
	tags          []*string
	sessions      []*string
	headers       []*string
	dedupFors     []*time.Duration
	dedupScopes   []*string
	keys          []*string
}

func (c *workColumns) args() []any {
	return append(append([]any{c.names, c.inputs}, c.options.args()...), c.instances, c.executions, c.activities, c.tags, c.sessions, c.headers, c.dedupFors, c.dedupScopes, c.keys)
}

func (p *Provider) workColumns(ctx context.Context, items []WorkEnqueue) (*workColumns, error) {
	c := &workColumns{}
	for i := range items {
		item := &items[i]
		if err := p.checkWork(&item.WorkItem); err != nil {
			return nil, at(i, len(items), err)
		}
		if err := c.options.add(&item.EnqueueOptions); err != nil {
			return nil, at(i, len(items), err)
		}
		c.names = append(c.names, &item.Name)
		c.inputs = append(c.inputs, payload(item.Input))
		c.instances = append(c.instances, text(item.Instance))
		c.executions = append(c.executions, optional(item.ExecutionID, item.ExecutionID == 0 && item.Instance == ""))
		c.activities = append(c.activities, optional(item.ActivityID, item.ActivityID == 0 && item.Instance == ""))
		c.tags = append(c.tags, text(item.Tag))
		c.sessions = append(c.sessions, text(item.Session))
		c.headers = append(c.headers, headersArg(p.withTrace(ctx, item.Headers)))
		c.dedupFors = append(c.dedupFors, optional(item.DedupFor, item.DedupFor == 0))
		c.dedupScopes = append(c.dedupScopes, item.DedupScope.text())
		c.keys = append(c.keys, text(item.Key))
	}
	return c, nil
}

func (p *Provider) checkWorkEnqueue(item *WorkEnqueue) error {
	if err := p.checkWork(&item.WorkItem); err != nil {
		return err
	}
	return item.EnqueueOptions.check()
}

func (p *Provider) checkWork(item *WorkItem) error {
	if err := checkText("work item name", item.Name, true); err != nil {
		return err
	}
	if err := checkText("instance id", item.Instance, false); err != nil {
		return err
	}
	if err := checkText("tag", item.Tag, false); err != nil {
		return err
	}
	if err := checkText("session", item.Session, false); err != nil {
		return err
	}
	if err := checkText("key", item.Key, false); err != nil {
		return err
	}
	if item.Key != "" && item.Session != "" {
		return invalid("both a key (%s) and a session (%s) are given", quote(item.Key), quote(item.Session))
	}
	if err := CheckHeaders(item.Headers); err != nil {
		return err
	}
	return p.cfg.checkJSON("input of work item "+quote(item.Name), item.Input)
}

// optionColumns are EnqueueOptions as the arrays that the SQL functions take. A column without a value
// stays nil, which is NULL.
type optionColumns struct {
	namespaces []*string
	priorities []int16
	delays     []*time.Duration
	visibleAts []*time.Time
	dedupKeys  []*string
}

func (c *optionColumns) args() []any {
	namespaces := c.namespaces
	if allNil(namespaces) {
		namespaces = nil // nothing to register
	}
	return []any{namespaces, c.priorities, c.delays, c.visibleAts, c.dedupKeys}
}

func (o *EnqueueOptions) check() error {
	if o.Namespace != "" {
		if err := CheckNamespace(o.Namespace); err != nil {
			return err
		}
	}
	if o.Priority < MinPriority || o.Priority > MaxPriority {
		return invalid("priority %d is not between %d and %d", o.Priority, MinPriority, MaxPriority)
	}
	if o.Delay != 0 && !o.At.IsZero() {
		return invalid("both a delay (%v) and a due time (%v) are given", o.Delay, o.At)
	}
	if err := checkDelay(o.Delay); err != nil {
		return err
	}
	if err := checkInstant("due time", o.At); err != nil {
		return err
	}
	if err := checkText("dedup key", o.DedupKey, false); err != nil {
		return err
	}
	switch {
	case o.DedupFor < 0 || o.DedupFor > maxDelay || o.DedupFor > 0 && o.DedupFor < time.Microsecond:
		return invalid("a dedup key kept for %v is not between %v and %v", o.DedupFor, time.Microsecond, maxDelay)
	case o.DedupScope < DedupQueued || o.DedupScope > DedupQueuedOrDead:
		return invalid("dedup scope %d is unknown", int(o.DedupScope))
	case o.DedupKey == "" && (o.DedupFor != 0 || o.DedupScope != DedupQueued):
		return invalid("DedupFor and DedupScope are for items with a dedup key")
	}
	return nil
}

func (c *optionColumns) add(o *EnqueueOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	c.namespaces = append(c.namespaces, optional(o.Namespace, o.Namespace == "" || o.Namespace == DefaultNamespace))
	c.priorities = append(c.priorities, int16(o.Priority))
	c.delays = append(c.delays, optional(o.Delay, o.Delay == 0))
	c.visibleAts = append(c.visibleAts, optional(o.At, o.At.IsZero()))
	c.dedupKeys = append(c.dedupKeys, text(o.DedupKey))
	return nil
}

// FetchWorkItem claims the due item that is first by priority, due time and id, waiting for one if
// need be. ErrNoWork when the poll timeout has passed, the context's error when it ends, ErrClosed when the
// Provider is closed. A cancelled fetch leaves nothing claimed.
func (p *Provider) FetchWorkItem(ctx context.Context, o *FetchOptions) (*ClaimedWorkItem, error) {
	items, err := p.FetchWorkItems(ctx, 1, o)
	if err != nil {
		return nil, err
	}
	return items[0], nil
}

// FetchWorkItems claims up to n due items, 1 to MaxFetch, in order, and waits only for the first. The slice
// is never empty: see FetchWorkItem for the errors.
func (p *Provider) FetchWorkItems(ctx context.Context, n int, o *FetchOptions) (items []*ClaimedWorkItem, err error) {
	const op = "fetch work"
	plan, err := p.plan(Worker, o)
	if n < 1 || n > MaxFetch {
		err = invalid("number of items %d is not between 1 and %d", n, MaxFetch)
	}
	if lost := (*LostLocksError)(nil); errors.As(err, &lost) {
		return nil, p.do(ctx, op, func(ctx context.Context, q querier) error { return p.ackWorkMany(ctx, q, o.Ack) })
	}
	if err != nil {
		return nil, failed(op, err)
	}
	plan.items = n
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return nil, failed(op, err)
	}
	defer done()
	err = p.engine.fetch(ctx, Worker, plan, func(ctx context.Context, f filter, by Path, announce bool, row rowWrite) (report, error) {
		plan.filter = f
		claim := newClaim()
		c, err := detached(ctx, p, Worker, plan, func(ctx context.Context, conn *pgxpool.Conn, rowCame func()) (claimed[[]*ClaimedWorkItem], error) {
			return p.claimWork(ctx, conn, rowCame, claim, plan, announce, row)
		}, func(ctx context.Context, patience time.Duration) (bool, error) {
			var undone int64
			err := p.engine.undo(ctx, patience, &undone, p.sql.undoWork, claim, plan.lock)
			if err != nil || undone == 0 {
				return false, err
			}
			p.engine.undone(Worker)
			return true, nil
		})
		items = c.item
		for _, item := range items {
			item.Path = by
		}
		if err == nil && plan.ack != nil {
			p.engine.stir()
			plan.ack = nil // they are acknowledged: whatever is asked from here on is for work alone
		}
		return c.report, err
	})
	if err != nil {
		return nil, p.ended(ctx, op, err)
	}
	return items, nil
}

// claimWork runs fetch_work.
func (p *Provider) claimWork(ctx context.Context, conn *pgxpool.Conn, rowCame func(), claim pgtype.UUID, plan fetchPlan, announce bool, row rowWrite) (c claimed[[]*ClaimedWorkItem], err error) {
	sent := p.engine.clock.Now()
	lost := &LostLocksError{}
	var r workRow
	token := newTokenMaker(claim)
	// What a claim locks because of a limit is not to be locked until a disk has answered. So acks that came with it are
	// flushed after it has committed, before anybody hears of them.
	async := plan.ack == nil || plan.ackAsync || p.limitsHold.Load()
	err = p.claimRows(ctx, conn, rowCame, async, func(rows pgx.Rows) error {
		if err := rows.Scan(r.targets()...); err != nil {
			return err
		}
		if r.lost.Valid {
			lost.Tokens = append(lost.Tokens, lockToken(r.lost, strconv.FormatInt(r.id.Int64, 10)))
			return nil
		}
		c.leaseEnd = r.until.Time
		if !r.id.Valid { // the last row: the outlook
			p.engine.clock.Observe(sent, p.engine.clock.Now(), r.now.Time)
			c.found, c.earliest, c.now = len(c.item), r.earliest.Time, r.now.Time
			c.limited, c.unfinished = r.places.Int32 != 0, r.attempt.Valid
			p.limitsHold.Store(c.limited)
			return nil
		}
		c.item = append(c.item, r.item(token.of(r.id.Int64)))
		return nil
	}, p.sql.fetchWork, p.fetchArgs(claim, plan, announce, row)...)
	if err == nil && plan.ack != nil && async && !plan.ackAsync {
		rowCame()
		if _, err = conn.Exec(ctx, p.sql.flush); err != nil {
			err = unknownOutcome{err}
		}
	}
	if err == nil && lost.Tokens != nil {
		err = lost
	}
	return c, err
}

// Flush returns when whatever committed before it was called is on the disk, and with the standbys that synchronous_commit
// asks for: by FetchOptions.AckAsync, or in transactions of the caller's with synchronous_commit off. A server that crashed before
// that, and is back, has forgotten it; Flush cannot know.
func (p *Provider) Flush(ctx context.Context) error {
	return p.do(ctx, "flush", func(ctx context.Context, q querier) error {
		_, err := q.Exec(ctx, p.sql.flush)
		return err
	})
}

// workRow is a row of fetch_work. One is good for all rows of an answer, and is meant to be: an item costs two
// allocations and its input, and a text one more if it is not that of the row before.
type workRow struct {
	id, execution, activity                              pgtype.Int8
	priority                                             pgtype.Int2
	attempt                                              pgtype.Int4
	namespace, name, instance, tag, session, reason, key sameText
	places                                               pgtype.Int4
	input, headers                                       []byte
	enqueuedAt, dueAt, until, earliest, now              pgtype.Timestamptz
	lost                                                 pgtype.UUID

	pointers []any
}

func (r *workRow) targets() []any {
	if r.pointers == nil {
		r.pointers = []any{&r.id, &r.namespace, &r.priority, &r.attempt, &r.name, &r.input, &r.instance, &r.execution, &r.activity,
			&r.tag, &r.session, &r.reason, &r.headers, &r.key, &r.places, &r.enqueuedAt, &r.dueAt, &r.until, &r.earliest, &r.now, &r.lost}
	}
	return r.pointers
}

func (r *workRow) item(token LockToken) *ClaimedWorkItem {
	return &ClaimedWorkItem{
		WorkItem: WorkItem{Name: string(r.name), Input: r.input, Instance: string(r.instance), ExecutionID: r.execution.Int64,
			ActivityID: r.activity.Int64, Tag: string(r.tag), Session: string(r.session), Headers: headersOf(r.headers), Key: string(r.key)},
		ID: r.id.Int64, Namespace: string(r.namespace), Priority: int(r.priority.Int16), Attempt: int(r.attempt.Int32),
		EnqueuedAt: r.enqueuedAt.Time, DueAt: r.dueAt.Time, LastError: string(r.reason), LockToken: token, LockedUntil: r.until.Time,
		Places: int(r.places.Int32),
	}
}

// sameText reads texts, "" for NULL. One that equals the one before is that.
type sameText string

func (t *sameText) ScanBytes(text []byte) error {
	if string(*t) != string(text) {
		*t = sameText(text)
	}
	return nil
}

func (p *Provider) fetchArgs(claim pgtype.UUID, plan fetchPlan, announce bool, row rowWrite) []any {
	var ids []int64
	var claims []pgtype.UUID
	if plan.ack != nil {
		ids, claims = make([]int64, 0, len(plan.ack)), make([]pgtype.UUID, 0, len(plan.ack))
	}
	for _, l := range plan.ack {
		ids, claims = append(ids, l.item), append(claims, l.claim)
	}
	f := plan.filter
	return append([]any{claim, plan.lock, plan.items, f.Namespaces, announce, f.Labels, text(f.Owner), plan.session,
		plan.maxAttempts, ids, claims, p.archiveFor()}, append(row.args(), plan.filter.Fair)...)
}

// archiveFor is how long a copy of what is acknowledged is kept; nil: not at all.
func (p *Provider) archiveFor() *time.Duration {
	return optional(p.cfg.ArchiveFor, p.cfg.ArchiveFor == 0)
}

// AckWorkItem removes a finished item and, with a message, sends that to its instance, both or neither.
// ErrLockLost if the lease has ended.
func (p *Provider) AckWorkItem(ctx context.Context, token LockToken, completion *Message) error {
	return p.ack(ctx, token, completion, p.ackAlone)
}

// ack admits the ack of one item, and has it sent. The zero Message is none.
func (p *Provider) ack(ctx context.Context, token LockToken, completion *Message, send func(context.Context, lease, Message) error) error {
	const op = "ack work item"
	l, m, err := p.checkAck(ctx, token, completion)
	if err != nil {
		return failed(op, err)
	}
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return failed(op, err)
	}
	defer done()
	return p.ended(ctx, op, send(ctx, l, m))
}

// ackAlone makes an ack in a transaction of its own.
func (p *Provider) ackAlone(ctx context.Context, l lease, m Message) error {
	quiet := p.engine.quiet()
	var namespaces []string
	return p.run(ctx, func(ctx context.Context, q querier) error {
		namespace, err := p.ackWork(ctx, q, l, m, quiet)
		if namespace != nil {
			namespaces = []string{*namespace}
		}
		return err
	}, func() { p.tellOfMessages(namespaces, quiet) }, Orchestrator)
}

// tellOfMessages tells whom messages in these namespaces concern.
func (p *Provider) tellOfMessages(namespaces []string, quiet bool) {
	var due []produced
	for _, namespace := range namespaces {
		due = append(due, produced{queue: Orchestrator, namespace: namespace})
	}
	p.engine.tell(due, quiet)
}

// AckWorkItemTx is AckWorkItem as part of the transaction: whatever else the transaction does happens
// exactly once, together with the end of the item.
func (p *Provider) AckWorkItemTx(ctx context.Context, tx pgx.Tx, token LockToken, completion *Message) error {
	return p.doTx(ctx, tx, "ack work item", func(ctx context.Context, q querier) error {
		l, m, err := p.checkAck(ctx, token, completion)
		if err != nil {
			return err
		}
		_, err = p.ackWork(ctx, q, l, m, false)
		return err
	})
}

// ackWork runs ack_work. It returns the namespace of the message, if one was sent.
func (p *Provider) ackWork(ctx context.Context, q querier, l lease, m Message, quiet bool) (namespace *string, err error) {
	err = q.QueryRow(ctx, p.sql.ackWork, l.item, l.claim, text(m.Instance), text(string(m.Kind)), payload(m.Data),
		text(m.Name), text(m.Version), optional(m.ExecutionID, m.ExecutionID == 0), text(m.Queue), headersArg(m.Headers), quiet, p.archiveFor()).Scan(&namespace)
	return namespace, err
}

// checkAck returns what an ack is about, and the message that it sends; the zero Message is none.
func (p *Provider) checkAck(ctx context.Context, token LockToken, completion *Message) (l lease, m Message, err error) {
	if l, err = token.splitWork(); err != nil || completion == nil {
		return l, m, err
	}
	m = *completion
	m.Headers = p.withTrace(ctx, m.Headers)
	return l, m, p.checkMessage(completion)
}

// AckWorkItems removes finished items in one statement. Those whose lease has ended are left alone and
// reported by a *LostLocksError; all others are removed.
func (p *Provider) AckWorkItems(ctx context.Context, tokens []LockToken) error {
	return p.do(ctx, "ack work items", func(ctx context.Context, q querier) error {
		return p.ackWorkMany(ctx, q, tokens)
	})
}

// AckWorkItemsTx is AckWorkItems as part of the transaction.
func (p *Provider) AckWorkItemsTx(ctx context.Context, tx pgx.Tx, tokens []LockToken) error {
	return p.doTx(ctx, tx, "ack work items", func(ctx context.Context, q querier) error {
		return p.ackWorkMany(ctx, q, tokens)
	})
}

func (p *Provider) ackWorkMany(ctx context.Context, q querier, tokens []LockToken) error {
	defer p.engine.stir()
	_, err := onLeases(ctx, q, tokens, p.sql.ackWorkMany, []any{p.archiveFor()}, func(row pgx.CollectableRow) (l lease, _ struct{}, err error) {
		err = row.Scan(&l.item, &l.claim)
		return l, struct{}{}, err
	})
	return err
}

// onLeases runs a statement on (ids, claims, args...) that returns a row for each lease that still holds,
// and what scan makes of it by token. The tokens without a row are a *LostLocksError.
func onLeases[T any](ctx context.Context, q querier, tokens []LockToken, sql string, args []any,
	scan func(pgx.CollectableRow) (lease, T, error)) (map[LockToken]T, error) {
	var ids []int64
	var claims []pgtype.UUID
	for _, t := range tokens {
		if l, err := t.splitWork(); err == nil {
			ids = append(ids, l.item)
			claims = append(claims, l.claim)
		}
	}
	held := make(map[lease]T, len(ids))
	if len(ids) > 0 {
		rows, err := q.Query(ctx, sql, append([]any{ids, claims}, args...)...)
		if err != nil {
			return nil, err
		}
		_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (_ struct{}, err error) {
			l, v, err := scan(row)
			held[l] = v
			return struct{}{}, err
		})
		if err != nil {
			return nil, err
		}
	}
	byToken := make(map[LockToken]T, len(held))
	var lost LostLocksError
	for _, t := range tokens {
		l, err := t.splitWork()
		v, ok := held[l]
		if err != nil || !ok {
			lost.Tokens = append(lost.Tokens, t)
			continue
		}
		byToken[t] = v
	}
	if len(lost.Tokens) > 0 {
		return byToken, &lost
	}
	return byToken, nil
}

// firstYear is that of the first instant of the server. Who enqueues by SQL may say it, and whatever was claimed can be given back as of when it was due.
const firstYear = -4713

// AbandonOptions says how to give something back. Nil means the zero value.
type AbandonOptions struct {
	// Delay makes it due again so much later. Defaults to 0: at once.
	Delay time.Duration

	// DueAt gives a work item its place in the queue as of an instant of the past, server time, such as its own DueAt: what was
	// not begun is not to go to the end. One whose key has a rate is due now all the same. Not together with Delay. Defaults to
	// the zero time: now.
	DueAt time.Time

	// IgnoreAttempt takes this attempt out of the count. Defaults to false.
	IgnoreAttempt bool

	// Error is why, for whoever fetches the work item next (ClaimedWorkItem.LastError) and for a dead letter. Any
	// text of at most Config.MaxPayload bytes. Turns have no use for it. Defaults to "": the error before stays.
	Error string
}

func (p *Provider) abandonOptions(o *AbandonOptions) (AbandonOptions, error) {
	if o == nil {
		return AbandonOptions{}, nil
	}
	if err := checkDelay(o.Delay); err != nil {
		return *o, err
	}
	if o.Delay != 0 && !o.DueAt.IsZero() {
		return *o, invalid("DueAt contradicts the delay %v", o.Delay)
	}
	if year := o.DueAt.Year(); year < firstYear || year > 9999 {
		return *o, invalid("DueAt %v is not between the years %d and 9999", o.DueAt, firstYear)
	}
	return *o, p.cfg.checkValue("error", o.Error)
}

// AbandonWorkItem gives an item back, for anyone to fetch. ErrLockLost if the lease has ended.
func (p *Provider) AbandonWorkItem(ctx context.Context, token LockToken, o *AbandonOptions) error {
	quiet := p.engine.quiet()
	back := produced{queue: Worker}
	return p.doAndTell(ctx, "abandon work item", func(ctx context.Context, q querier) error {
		return p.abandonWork(ctx, q, token, o, quiet, &back)
	}, func() { p.engine.tell([]produced{back}, quiet) }, Worker)
}

// AbandonWorkItemTx is AbandonWorkItem as part of the transaction.
func (p *Provider) AbandonWorkItemTx(ctx context.Context, tx pgx.Tx, token LockToken, o *AbandonOptions) error {
	return p.doTx(ctx, tx, "abandon work item", func(ctx context.Context, q querier) error {
		return p.abandonWork(ctx, q, token, o, false, &produced{})
	})
}

func (p *Provider) abandonWork(ctx context.Context, q querier, token LockToken, o *AbandonOptions, quiet bool, back *produced) error {
	l, err := token.splitWork()
	if err != nil {
		return err
	}
	options, err := p.abandonOptions(o)
	if err != nil {
		return err
	}
	return q.QueryRow(ctx, p.sql.abandonWork, l.item, l.claim, options.Delay, options.IgnoreAttempt, text(options.Error), quiet,
		optional(options.DueAt, options.DueAt.IsZero())).
		Scan(&back.namespace, &back.dueAt, &back.now)
}

// RenewWorkItemLock makes the lease end extend from now (0: DefaultLockTimeout) and returns that instant,
// in server time. ErrLockLost if the lease has ended.
func (p *Provider) RenewWorkItemLock(ctx context.Context, token LockToken, extend time.Duration) (time.Time, error) {
	until, err := p.RenewWorkItemLocks(ctx, []LockToken{token}, extend)
	return until[token], err
}

// RenewWorkItemLockTx is RenewWorkItemLock as part of the transaction.
func (p *Provider) RenewWorkItemLockTx(ctx context.Context, tx pgx.Tx, token LockToken, extend time.Duration) (time.Time, error) {
	until, err := p.RenewWorkItemLocksTx(ctx, tx, []LockToken{token}, extend)
	return until[token], err
}

// RenewWorkItemLocks renews several leases in one statement and returns their new ends by token. Those that
// have ended are reported by a *LostLocksError; all others are renewed, but for those of several that another transaction
// has locked at this moment: they are not waited for, nor in the result, and hold as they are. Renew them again.
func (p *Provider) RenewWorkItemLocks(ctx context.Context, tokens []LockToken, extend time.Duration) (until map[LockToken]time.Time, err error) {
	err = p.do(ctx, "renew work item locks", func(ctx context.Context, q querier) error {
		until, err = p.renewWork(ctx, q, tokens, extend)
		return err
	})
	p.engine.stats.queues[Worker].renewals.Add(int64(len(until)))
	for _, end := range until { // the same for all
		p.engine.renewed(Worker, end)
		break
	}
	return until, err
}

// RenewWorkItemLocksTx is RenewWorkItemLocks as part of the transaction.
func (p *Provider) RenewWorkItemLocksTx(ctx context.Context, tx pgx.Tx, tokens []LockToken, extend time.Duration) (until map[LockToken]time.Time, err error) {
	err = p.doTx(ctx, tx, "renew work item locks", func(ctx context.Context, q querier) error {
		until, err = p.renewWork(ctx, q, tokens, extend)
		return err
	})
	return until, err
}

func (p *Provider) renewWork(ctx context.Context, q querier, tokens []LockToken, extend time.Duration) (map[LockToken]time.Time, error) {
	extend, err := lockTimeout(extend)
	if err != nil {
		return nil, err
	}
	held, err := onLeases(ctx, q, tokens, p.sql.renewWork, []any{extend}, func(row pgx.CollectableRow) (l lease, until *time.Time, err error) {
		err = row.Scan(&l.item, &l.claim, &until)
		return l, until, err
	})
	renewed := make(map[LockToken]time.Time, len(held))
	for token, until := range held {
		if until != nil {
			renewed[token] = *until
		}
	}
	return renewed, err
}

// one makes a batch of one.
func one(item WorkItem, o *EnqueueOptions) []WorkEnqueue {
	return []WorkEnqueue{{item, value(o)}}
}

// first takes the outcome of a batch of one.
func first(all []Enqueued, err error) (Enqueued, error) {
	if err != nil {
		return Enqueued{}, err
	}
	return all[0], nil
}

// at says which element of a batch an error is about.
func at(i, of int, err error) error {
	if of == 1 {
		return err
	}
	return fmt.Errorf("element %d: %w", i, err)
}

// value returns what p points to, or the zero value: how results say NULL.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func allNil[T any](pointers []*T) bool {
	for _, p := range pointers {
		if p != nil {
			return false
		}
	}
	return true
}
