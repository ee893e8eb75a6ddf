package pgwake

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: what can be done with orchestrations, one turn at a time?

// MessageKind tells messages apart. Three kinds mean something to the queue; any other name is the runtime's.
type MessageKind string

const (
	// MessageStart opens the first execution of an instance. It carries Name, Version and ExecutionID.
	MessageStart MessageKind = "start"
	// MessageContinueAsNew opens another execution of an instance, and carries the same.
	MessageContinueAsNew MessageKind = "continue_as_new"
	// MessageQueued is for instances that exist: if nothing has opened the instance, and nothing in the same turn
	// does, it is dropped, and the server's log says so.
	MessageQueued MessageKind = "queue_message"
)

// Message is something for an instance to react to.
type Message struct {
	Instance string          // the instance it is for; at most 255 bytes
	Kind     MessageKind     // required; at most 255 bytes
	Data     json.RawMessage // JSON of at most Config.MaxPayload bytes, kept byte for byte; empty means none

	// For MessageStart and MessageContinueAsNew: the orchestration, which is required, its version, and the execution
	// that begins. ExecutionID 0 means 1.
	Name        string
	Version     string
	ExecutionID int64

	// Queue is the queue name of the instance, for FetchOptions.Queues. Like the namespace it counts only for an
	// instance that is not known yet; a known one keeps its own. At most 255 bytes. Defaults to "": none.
	Queue string

	// Headers travel with the message; see WorkItem.
	Headers map[string]string
}

// MessageEnqueue is a message together with its options, for enqueuing several at once. The namespace counts
// only for an instance that is not known yet; a known one keeps its own.
type MessageEnqueue struct {
	Message
	EnqueueOptions
}

// ClaimedMessage is a message of a turn.
type ClaimedMessage struct {
	Message
	ID         int64
	Attempt    int // claims so far, this one included
	EnqueuedAt time.Time
}

// OrchestrationItem is a turn: an instance under its lock, with the messages that were visible when it was
// claimed, in the order of their ids, and the history of its current execution. Messages that arrive later
// belong to the next turn.
type OrchestrationItem struct {
	Instance    string
	Namespace   string
	Name        string // of the orchestration; for a new instance, from its opening message
	Version     string
	ExecutionID int64 // the current one, or that which MessageContinueAsNew opens
	Messages    []ClaimedMessage
	History     []Event // of the execution
	LastEventID int64   // the highest id in the history, whether or not that was asked for; 0: none
	Attempt     int     // the most that any of the messages was claimed

	// HistoryError says why History is empty although there is one: Config.ValidateEvent refused an event of it.
	HistoryError error

	Queue         string            // queue name of the instance
	Parent        string            // instance that started this one as its child
	Attributes    json.RawMessage   // Metadata.Attributes
	PinnedVersion *Version          // of the execution; nil: none
	KV            map[string]string // what the executions before this one left

	LockToken   LockToken
	LockedUntil time.Time // end of the lease, server time
	Path        Path      // how it was found
}

// Status of an execution.
type Status string

// The statuses of an execution.
const (
	StatusRunning        Status = "Running"
	StatusCompleted      Status = "Completed"
	StatusFailed         Status = "Failed"
	StatusCancelled      Status = "Cancelled"
	StatusContinuedAsNew Status = "ContinuedAsNew"
)

var statuses = []Status{"", StatusRunning, StatusCompleted, StatusFailed, StatusCancelled, StatusContinuedAsNew}

// Metadata describes an instance and its execution. The first ack of an instance must carry its Name: that
// is what creates the instance. Empty fields leave what is stored as it is.
type Metadata struct {
	Name    string
	Version string
	Status  Status
	Output  string // any text of at most Config.MaxPayload bytes

	Queue         string          // queue name of the instance; its messages follow
	Parent        string          // instance that started this one as its child; neither itself nor a descendant, which is ErrInvalid
	Attributes    json.RawMessage // JSON of at most Config.MaxPayload bytes, for the runtime to see again with each turn
	PinnedVersion *Version        // that a node must support to take a turn of this execution; another execution has its own
}

// ActivityRef names a work item by what scheduled it.
type ActivityRef struct{ ExecutionID, ActivityID int64 }

// OrchestrationAck is what a turn decided. All of it takes effect, or none.
type OrchestrationAck struct {
	// ExecutionID is the execution that the turn belongs to; a higher one than the current becomes
	// current. Defaults to 1.
	ExecutionID int64

	History   []Event          // appended; ids are the runtime's and must be new in the execution
	WorkItems []WorkEnqueue    // for workers
	Messages  []MessageEnqueue // for instances, this one included; a timer is a delayed message to itself. The dedup keys of the turn's own messages are free for these
	Metadata  Metadata

	// CancelActivities removes work items of this instance, claimed or not: whoever has one learns of it by the loss
	// of its lease. Those that are not there are fine. An item that the same ack schedules is removed as well.
	CancelActivities []ActivityRef

	// CancelMessages removes messages to this instance by their dedup keys, such as timers that are not due yet. That
	// comes first: Messages may set one anew under its key. Keys are those of the whole namespace, so an instance
	// does well to begin its own with its id.
	CancelMessages []string

	CustomStatus *CustomStatusUpdate // nil: as it was
	KV           []KVUpdate          // in order

	// Sticky has the next turns go to one owner for a while. Nil: to anybody, whatever the ack before said.
	Sticky *Sticky
}

// Sticky is a preference for whoever has the state of an instance at hand, such as its history in a cache. Until For
// has passed since the ack, only a fetch whose FetchOptions.Owner is Owner gets a turn of the instance; afterwards
// anybody does. So whatever becomes due while the owner is away is late by For at most; one that leaves in an orderly way says
// so with ReleaseSticky. A turn that is given back, or whose lease ends, is anybody's.
type Sticky struct {
	Owner string        // at most 255 bytes
	For   time.Duration // from 10 ms to 24 h
}

func (s *Sticky) check() error {
	if s == nil {
		return nil
	}
	if s.For < MinLockTimeout || s.For > MaxLockTimeout {
		return invalid("sticky for %v is not between %v and %v", s.For, MinLockTimeout, MaxLockTimeout)
	}
	return checkText("sticky owner", s.Owner, true)
}

// EnqueueForOrchestrator adds a message, durably once it returns. It creates no instance: that is for the
// first ack to do. The error is ErrInvalid if the message or an option breaks a rule.
func (p *Provider) EnqueueForOrchestrator(ctx context.Context, m Message, o *EnqueueOptions) (Enqueued, error) {
	return first(p.EnqueueForOrchestratorMany(ctx, []MessageEnqueue{{m, value(o)}}))
}

// EnqueueForOrchestratorTx is EnqueueForOrchestrator as part of the transaction.
func (p *Provider) EnqueueForOrchestratorTx(ctx context.Context, tx pgx.Tx, m Message, o *EnqueueOptions) (Enqueued, error) {
	return first(p.EnqueueForOrchestratorManyTx(ctx, tx, []MessageEnqueue{{m, value(o)}}))
}

// EnqueueForOrchestratorMany adds messages, all or none, in one statement. The outcomes are in the order of
// the messages.
func (p *Provider) EnqueueForOrchestratorMany(ctx context.Context, messages []MessageEnqueue) (added []Enqueued, err error) {
	var due []produced
	quiet := p.engine.quiet()
	err = p.doAndTell(ctx, "enqueue message", func(ctx context.Context, q querier) error {
		added, due, err = p.enqueueMessages(ctx, q, messages, quiet)
		return err
	}, func() { p.engine.tell(due, quiet) }, Orchestrator)
	return added, err
}

// EnqueueForOrchestratorManyTx is EnqueueForOrchestratorMany as part of the transaction.
func (p *Provider) EnqueueForOrchestratorManyTx(ctx context.Context, tx pgx.Tx, messages []MessageEnqueue) (added []Enqueued, err error) {
	err = p.doTx(ctx, tx, "enqueue message", func(ctx context.Context, q querier) error {
		added, _, err = p.enqueueMessages(ctx, q, messages, false)
		return err
	})
	return added, err
}

func (p *Provider) enqueueMessages(ctx context.Context, q querier, messages []MessageEnqueue, quiet bool) (added []Enqueued, due []produced, err error) {
	if len(messages) == 0 {
		return nil, nil, nil
	}
	c, err := p.messageColumns(ctx, messages)
	if err != nil {
		return nil, nil, err
	}
	rows, err := q.Query(ctx, p.sql.enqueueMessages, append(c.args(), quiet)...)
	if err != nil {
		return nil, nil, err
	}
	added, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Enqueued, err error) {
		d := produced{queue: Orchestrator}
		var id *int64
		var dueAt *time.Time
		err = row.Scan(&id, &e.Duplicate, &dueAt, &e.now, &d.namespace, &d.label)
		e.ID, e.DueAt = value(id), value(dueAt)
		if d.dueAt, d.now = e.DueAt, e.now; !e.Duplicate {
			due = append(due, d)
		}
		return e, err
	})
	return added, due, err
}

// messageColumns are messages as the arrays that enqueue_message_many and ack_orchestration take.
type messageColumns struct {
	instances, kinds, datas, names, versions []*string
	executions                               []*int64
	options                                  optionColumns
	queues, headers                          []*string
}

func (c *messageColumns) args() []any {
	args := append([]any{c.instances, c.kinds, c.datas, c.names, c.versions, c.executions}, c.options.args()...)
	return append(args, c.queues, c.headers)
}

func (p *Provider) messageColumns(ctx context.Context, messages []MessageEnqueue) (*messageColumns, error) {
	c := &messageColumns{}
	for i := range messages {
		m := &messages[i]
		if err := p.checkMessage(&m.Message); err != nil {
			return nil, at(i, len(messages), err)
		}
		err := c.options.add(&m.EnqueueOptions)
		if err == nil && (m.DedupFor != 0 || m.DedupScope != DedupQueued) {
			err = invalid("DedupFor and DedupScope are for work items")
		}
		if err != nil {
			return nil, at(i, len(messages), err)
		}
		c.add(&m.Message, p.withTrace(ctx, m.Headers))
	}
	return c, nil
}

// add adds a message, with these headers; the zero Message is none.
func (c *messageColumns) add(m *Message, headers map[string]string) {
	c.instances = append(c.instances, text(m.Instance))
	c.kinds = append(c.kinds, text(string(m.Kind)))
	c.datas = append(c.datas, payload(m.Data))
	c.names = append(c.names, text(m.Name))
	c.versions = append(c.versions, text(m.Version))
	c.executions = append(c.executions, optional(m.ExecutionID, m.ExecutionID == 0))
	c.queues = append(c.queues, text(m.Queue))
	c.headers = append(c.headers, headersArg(headers))
}

func (p *Provider) checkMessage(m *Message) error {
	if err := checkText("instance id", m.Instance, true); err != nil {
		return err
	}
	if err := checkText("message kind", string(m.Kind), true); err != nil {
		return err
	}
	opens := m.Kind == MessageStart || m.Kind == MessageContinueAsNew
	if err := checkText("orchestration name", m.Name, opens); err != nil {
		return err
	}
	if err := checkText("orchestration version", m.Version, false); err != nil {
		return err
	}
	if m.ExecutionID < 0 {
		return invalid("execution id %d is negative", m.ExecutionID)
	}
	if err := checkText("queue name", m.Queue, false); err != nil {
		return err
	}
	if err := CheckHeaders(m.Headers); err != nil {
		return err
	}
	return p.cfg.checkJSON("data of a message to instance "+quote(m.Instance), m.Data)
}

// FetchOrchestrationItem locks the instance whose due message is first by priority, due time and id, and
// takes all its visible messages as one turn, waiting for one if need be. While it is locked nobody else
// gets a turn of that instance. With Config.HistoryCache a second query reads what of the history this node does not
// know. Errors as for FetchWorkItem.
func (p *Provider) FetchOrchestrationItem(ctx context.Context, o *FetchOptions) (item *OrchestrationItem, err error) {
	const op = "fetch orchestration"
	plan, err := p.plan(Orchestrator, o)
	if err != nil {
		return nil, failed(op, err)
	}
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return nil, failed(op, err)
	}
	defer done()
	err = p.engine.fetch(ctx, Orchestrator, plan, func(ctx context.Context, f filter, by Path, announce bool, row rowWrite) (report, error) {
		plan.filter = f
		claim := newClaim()
		c, err := detached(ctx, p, Orchestrator, plan, func(ctx context.Context, conn *pgxpool.Conn, rowCame func()) (claimed[*OrchestrationItem], error) {
			return p.claimOrchestration(ctx, conn, rowCame, claim, plan, announce, row)
		}, func(ctx context.Context, patience time.Duration) (bool, error) {
			var undone bool
			err := p.engine.undo(ctx, patience, &undone, p.sql.undoOrchestration, claim)
			if err != nil || !undone {
				return false, err
			}
			p.engine.undone(Orchestrator)
			return true, nil
		})
		if item = c.item; item != nil {
			item.Path = by
		}
		return c.report, err
	})
	if err != nil {
		return nil, p.ended(ctx, op, err)
	}
	return item, nil
}

// claimOrchestration runs fetch_orchestration.
func (p *Provider) claimOrchestration(ctx context.Context, conn *pgxpool.Conn, rowCame func(), claim pgtype.UUID, plan fetchPlan, announce bool, row rowWrite) (c claimed[*OrchestrationItem], err error) {
	sent := p.engine.clock.Now()
	var state historyState
	remembered := plan.history && p.histories != nil
	err = p.claimRows(ctx, conn, rowCame, true, func(rows pgx.Rows) error {
		var part string
		var id, execution *int64
		var kind, name, version, instance, namespace *string
		var data, headers []byte
		var attempt *int
		var createdAt, lockedUntil, earliest, now *time.Time
		var unfinished *bool
		err := rows.Scan(&part, &id, &kind, &data, &name, &version, &execution, &attempt, &headers, &createdAt, &instance,
			&namespace, &lockedUntil, &earliest, &now, &unfinished)
		if err != nil {
			return err
		}
		switch part {
		case "item":
			if attempt == nil {
				return unreadable{fmt.Errorf("the turn of instance %s came without its messages", quote(*instance))}
			}
			c.item = &OrchestrationItem{
				Instance: *instance, Namespace: *namespace, Name: value(name), Version: value(version),
				ExecutionID: *execution, Attempt: *attempt,
				LockToken: lockToken(claim, *instance), LockedUntil: *lockedUntil,
			}
			state, err = c.item.describe(data)
			return err
		case "message":
			c.item.Messages = append(c.item.Messages, ClaimedMessage{
				Message: Message{Instance: c.item.Instance, Kind: MessageKind(*kind), Data: data,
					Name: value(name), Version: value(version), ExecutionID: value(execution), Headers: headersOf(headers)},
				ID: *id, Attempt: *attempt, EnqueuedAt: *createdAt,
			})
		case "event":
			c.item.History = append(c.item.History, Event{ID: *id, Type: *kind, Data: data, CreatedAt: *createdAt})
			c.item.LastEventID = *id // one that was added without a turn may have come since the item was described
		case "outlook":
			p.engine.clock.Observe(sent, p.engine.clock.Now(), *now)
			c.earliest, c.now, c.leaseEnd, c.unfinished = value(earliest), *now, *lockedUntil, value(unfinished)
			if c.item != nil {
				c.found = 1
			}
		}
		return nil
	}, p.sql.fetchOrchestration, append([]any{claim, plan.lock, plan.filter.Namespaces, announce, plan.filter.Labels,
		optional(plan.filter.MinPin, plan.filter.MinPin == 0), optional(plan.filter.MaxPin, plan.filter.MaxPin == 0), plan.history && !remembered,
		text(plan.filter.Owner)}, row.args()...)...)
	if err != nil || c.item == nil {
		return c, err
	}
	if remembered {
		if err := p.recall(ctx, conn, rowCame, c.item, state); err != nil {
			return c, err
		}
	}
	c.item.validateHistory(p.cfg.ValidateEvent)
	return c, nil
}

// validateHistory takes a history out of the turn that the runtime refuses.
func (item *OrchestrationItem) validateHistory(validate func(*Event) error) {
	if validate == nil {
		return
	}
	for i := range item.History {
		if item.HistoryError = validate(&item.History[i]); item.HistoryError != nil {
			item.History = nil
			return
		}
	}
}

// describe reads what fetch_orchestration says about the instance.
func (item *OrchestrationItem) describe(data []byte) (historyState, error) {
	var about struct {
		historyState
		Queue      string
		Parent     string
		Attributes json.RawMessage
		Pin        int64
		KV         map[string]string
	}
	if err := json.Unmarshal(data, &about); err != nil {
		return historyState{}, fmt.Errorf("read what instance %s is: %w", quote(item.Instance), err)
	}
	item.Queue, item.Parent, item.PinnedVersion = about.Queue, about.Parent, pinned(about.Pin)
	item.LastEventID, item.KV = value(about.Last), about.KV
	if string(about.Attributes) != "null" {
		item.Attributes = about.Attributes
	}
	return about.historyState, nil
}

// AckOrchestrationItem ends a turn with what it decided, in one transaction, and frees the instance.
// ErrLockLost if the lease has ended, ErrDuplicateEvent if an event id is taken; the turn is then still
// locked and nothing has changed.
func (p *Provider) AckOrchestrationItem(ctx context.Context, token LockToken, ack OrchestrationAck) error {
	quiet := p.engine.quiet()
	var done acked
	_, instance, _ := token.split()
	err := p.doAndTell(ctx, "ack orchestration", func(ctx context.Context, q querier) (err error) {
		done, err = p.ackOrchestration(ctx, q, token, ack, quiet)
		return err
	}, func() {
		p.histories.acked(instance, &ack, done.history) // before somebody fetches the next turn
		p.engine.acked(done.freed, done.due, quiet)
		if ack.changesInstance() {
			p.engine.waits.changed(instance, quiet)
		}
	}, Orchestrator, Worker)
	if err != nil {
		p.histories.drop(historyKey{instance, ack.execution()})
	}
	return err
}

// AckOrchestrationItemTx is AckOrchestrationItem as part of the transaction.
func (p *Provider) AckOrchestrationItemTx(ctx context.Context, tx pgx.Tx, token LockToken, ack OrchestrationAck) error {
	return p.doTx(ctx, tx, "ack orchestration", func(ctx context.Context, q querier) error {
		_, err := p.ackOrchestration(ctx, q, token, ack, false)
		return err
	})
}

// changesInstance reports whether somebody may wait for what it changes.
func (ack *OrchestrationAck) changesInstance() bool {
	return ack.CustomStatus != nil || ack.Metadata.Status != "" && ack.Metadata.Status != StatusRunning
}

// acked is what the ack of a turn brought about.
type acked struct {
	ended   bool       // a turn, whose instance is free
	freed   string     // namespace of that
	due     []produced // what is or will be due
	history []byte     // what became of the history, if something was added to it
}

func (ack *OrchestrationAck) execution() int64 { return max(ack.ExecutionID, 1) }

// ackOrchestration runs ack_orchestration.
func (p *Provider) ackOrchestration(ctx context.Context, q querier, token LockToken, ack OrchestrationAck, quiet bool) (done acked, err error) {
	claim, instance, err := token.split()
	if err != nil {
		return done, err
	}
	if ack.ExecutionID < 0 {
		return done, invalid("execution id %d is negative", ack.ExecutionID)
	}
	if err := p.checkMetadata(&ack.Metadata); err != nil {
		return done, err
	}
	events, err := p.eventColumns(ack.History)
	if err != nil {
		return done, err
	}
	work, err := p.workColumns(ctx, ack.WorkItems)
	if err != nil {
		return done, err
	}
	messages, err := p.messageColumns(ctx, ack.Messages)
	if err != nil {
		return done, err
	}
	state, err := p.stateArgs(&ack)
	if err != nil {
		return done, err
	}
	m := ack.Metadata
	args := []any{instance, claim, ack.execution(), text(m.Name), text(m.Version), text(string(m.Status)), text(m.Output)}
	args = slices.Concat(args, events.args(), work.args(), messages.args(), state, []any{quiet})
	rows, err := q.Query(ctx, p.sql.ackOrchestration, args...)
	if err != nil {
		return done, err
	}
	return readAcked(rows)
}

// readAcked reads the rows of ack_orchestration, or such as it has.
func readAcked(rows pgx.Rows) (done acked, err error) {
	var queue string
	var namespace *string // null: any
	var d produced
	var history []byte
	_, err = pgx.ForEachRow(rows, []any{&queue, &namespace, &d.dueAt, &d.now, &history, &d.label}, func() error {
		d.namespace = value(namespace)
		switch queue {
		case "freed":
			done.ended, done.freed, done.history = true, d.namespace, history
		case Worker.String():
			d.queue = Worker
			done.due = append(done.due, d)
		default:
			d.queue = Orchestrator
			done.due = append(done.due, d)
		}
		return nil
	})
	return done, err
}

// stateArgs are the arguments of ack_orchestration that say what becomes of the instance.
func (p *Provider) stateArgs(ack *OrchestrationAck) ([]any, error) {
	m := &ack.Metadata
	var pin *int64
	if m.PinnedVersion != nil {
		pin = new(m.PinnedVersion.pin())
	}
	if err := ack.Sticky.check(); err != nil {
		return nil, err
	}
	args := []any{text(m.Parent), text(m.Queue), payload(m.Attributes), pin, nil, nil}
	if s := ack.Sticky; s != nil {
		args[4], args[5] = s.Owner, s.For
	}
	var executions, activities []int64
	for _, a := range ack.CancelActivities {
		executions, activities = append(executions, a.ExecutionID), append(activities, a.ActivityID)
	}
	for i, key := range ack.CancelMessages {
		if err := checkText("dedup key", key, true); err != nil {
			return nil, at(i, len(ack.CancelMessages), err)
		}
	}
	args = append(args, executions, activities, ack.CancelMessages)
	clear, status, err := p.statusArgs(ack.CustomStatus)
	if err != nil {
		return nil, err
	}
	kv, err := p.kvColumns(ack.KV)
	if err != nil {
		return nil, err
	}
	return append(append(args, status, clear), kv.args()...), nil
}

func (p *Provider) checkMetadata(m *Metadata) error {
	if err := checkText("orchestration name", m.Name, false); err != nil {
		return err
	}
	if err := checkText("orchestration version", m.Version, false); err != nil {
		return err
	}
	if err := checkText("queue name", m.Queue, false); err != nil {
		return err
	}
	if err := checkText("parent instance id", m.Parent, false); err != nil {
		return err
	}
	if err := checkStatus(m.Status); err != nil {
		return err
	}
	if m.PinnedVersion != nil {
		if err := m.PinnedVersion.check(); err != nil {
			return err
		}
	}
	if err := p.cfg.checkJSON("attributes", m.Attributes); err != nil {
		return err
	}
	// A turn brings them inside of an object, and one that cannot be read would come back for ever.
	if len(m.Attributes) > 0 && !json.Valid(slices.Concat([]byte("["), m.Attributes, []byte("]"))) {
		return invalid("attributes are nested too deeply")
	}
	return p.cfg.checkValue("output", m.Output)
}

// AbandonOrchestrationItem gives a turn back. Its messages are due again after the delay; the instance is
// free at once. ErrLockLost if the lease has ended.
func (p *Provider) AbandonOrchestrationItem(ctx context.Context, token LockToken, o *AbandonOptions) error {
	quiet := p.engine.quiet()
	back := produced{queue: Orchestrator}
	return p.doAndTell(ctx, "abandon orchestration", func(ctx context.Context, q querier) error {
		return p.abandonOrchestration(ctx, q, token, o, quiet, &back)
	}, func() {
		freed := back
		freed.dueAt = freed.now // what was held behind the turn
		p.engine.tell([]produced{back, freed}, quiet)
	}, Orchestrator)
}

// AbandonOrchestrationItemTx is AbandonOrchestrationItem as part of the transaction.
func (p *Provider) AbandonOrchestrationItemTx(ctx context.Context, tx pgx.Tx, token LockToken, o *AbandonOptions) error {
	return p.doTx(ctx, tx, "abandon orchestration", func(ctx context.Context, q querier) error {
		return p.abandonOrchestration(ctx, q, token, o, false, &produced{})
	})
}

func (p *Provider) abandonOrchestration(ctx context.Context, q querier, token LockToken, o *AbandonOptions, quiet bool, back *produced) error {
	claim, instance, err := token.split()
	if err != nil {
		return err
	}
	options, err := p.abandonOptions(o)
	if err != nil {
		return err
	}
	if !options.DueAt.IsZero() {
		return invalid("DueAt is for work items")
	}
	var scope *string
	err = q.QueryRow(ctx, p.sql.abandonOrchestration, instance, claim, options.Delay, options.IgnoreAttempt, quiet).
		Scan(&scope, &back.dueAt, &back.now)
	back.namespace = value(scope)
	return err
}

// RenewOrchestrationItemLock makes the lock of the instance end extend from now (0: DefaultLockTimeout) and
// returns that instant, in server time. ErrLockLost if the lease has ended.
func (p *Provider) RenewOrchestrationItemLock(ctx context.Context, token LockToken, extend time.Duration) (until time.Time, err error) {
	err = p.doAndTell(ctx, "renew orchestration lock", func(ctx context.Context, q querier) error {
		until, err = p.renewOrchestration(ctx, q, token, extend)
		return err
	}, func() {
		p.engine.stats.queues[Orchestrator].renewals.Add(1)
		p.engine.renewed(Orchestrator, until)
	})
	return until, err
}

// RenewOrchestrationItemLockTx is RenewOrchestrationItemLock as part of the transaction.
func (p *Provider) RenewOrchestrationItemLockTx(ctx context.Context, tx pgx.Tx, token LockToken, extend time.Duration) (until time.Time, err error) {
	err = p.doTx(ctx, tx, "renew orchestration lock", func(ctx context.Context, q querier) error {
		until, err = p.renewOrchestration(ctx, q, token, extend)
		return err
	})
	return until, err
}

func (p *Provider) renewOrchestration(ctx context.Context, q querier, token LockToken, extend time.Duration) (until time.Time, err error) {
	claim, instance, err := token.split()
	if err != nil {
		return until, err
	}
	if extend, err = lockTimeout(extend); err != nil {
		return until, err
	}
	err = q.QueryRow(ctx, p.sql.renewOrchestration, instance, claim, extend).Scan(&until)
	return until, err
}

// ReleaseSticky makes the instances that are sticky to these owners (Sticky) anybody's from now on, and returns how many that
// were: others have their turns at once, and not when the while is over. It is for owners that leave: settle the turns in hand,
// fetch no more, and then release. Many messages are brought in line by the fetches to come, those that are due first. An
// instance that another transaction is changing stays as it is. Fails with ErrInvalid for an owner that is empty or has more
// than 255 bytes. Safe for concurrent use; it waits for nobody.
func (p *Provider) ReleaseSticky(ctx context.Context, owners []string) (released int, err error) {
	return p.letGo(ctx, "release sticky instances", Orchestrator, func(ctx context.Context, q querier) (int, error) {
		return p.releaseSticky(ctx, q, owners)
	})
}

// ReleaseStickyTx is ReleaseSticky as part of the transaction: until that ends, acks of these instances wait.
func (p *Provider) ReleaseStickyTx(ctx context.Context, tx pgx.Tx, owners []string) (released int, err error) {
	err = p.doTx(ctx, tx, "release sticky instances", func(ctx context.Context, q querier) error {
		released, err = p.releaseSticky(ctx, q, owners)
		return err
	})
	return released, err
}

func (p *Provider) releaseSticky(ctx context.Context, q querier, owners []string) (released int, err error) {
	if err := checkOwners("sticky owner", owners); err != nil {
		return 0, err
	}
	err = q.QueryRow(ctx, p.sql.releaseSticky, owners).Scan(&released)
	return released, err
}
