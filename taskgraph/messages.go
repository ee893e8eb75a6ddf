package taskgraph

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how are the Provider's work items used by the names of pgmq's verbs? A queue is a namespace, which is in its name, and a
// message of it a work item with the queue's name; its id is that of the work item, and what read it has to acknowledge it with
// Provider.AckWorkItem, and may do with it what else can be done to a work item.

// QueueMessage is a message that was read, and is nobody else's until VisibleAt.
type QueueMessage struct {
	ID         int64           `db:"msg_id"`
	Reads      int             `db:"read_ct"` // this one included
	EnqueuedAt time.Time       `db:"enqueued_at"`
	VisibleAt  time.Time       `db:"vt"` // when the lease ends
	Message    json.RawMessage `db:"message"`
	Headers    json.RawMessage `db:"headers"` // an object of strings; nil: none
	ClaimID    string          `db:"lock_token"`
}

// Token is what the verbs of the Provider take, such as AckWorkItem and AbandonWorkItem.
func (m *QueueMessage) Token() pgwake.LockToken {
	return pgwake.LockToken(fmt.Sprintf("%s/%d", m.ClaimID, m.ID))
}

// ReadSpecificMessage claims a message of a queue by its id, for a time in whole seconds, rounded up. Of several who were told of it one gets
// it, and the others nil, as for a message that is not due or is gone. Errors: pgwake.ErrNotFound if there is no such queue; pgwake.ErrInvalid for
// a bad name or time, an item of a session, and a queue whose namespace has limits.
func (g *Graph) ReadSpecificMessage(ctx context.Context, queue string, id int64, lease time.Duration) (*QueueMessage, error) {
	const op = "read message"
	if err := checkQueueName(op, queue); err != nil {
		return nil, err
	}
	if lease <= 0 {
		return nil, invalid(op, "a lease of %v", lease)
	}
	n, err := wholeUnits(op, lease, time.Second)
	if err != nil {
		return nil, err
	}
	all, err := rows[QueueMessage](ctx, g, op, "pgmq_read_specific_message", queue, id, n)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	return &all[0], nil
}

// MessageOptions says more about a message. Nil means the zero value.
type MessageOptions struct {
	Delay   time.Duration     // before it is due, in whole seconds, rounded up
	Headers map[string]string // travel with it; see pgwake.WorkItem
}

// SendWithNotify enqueues a message, any value of which package encoding/json makes JSON, and returns its id. Listeners are told on the channels
// MessageReadyChannel names, in the same transaction, and whoever fetches is, as for any work item. Errors: pgwake.ErrInvalid,
// pgwake.ErrPayloadTooLarge.
func (g *Graph) SendWithNotify(ctx context.Context, queue string, message any, o *MessageOptions) (int64, error) {
	const op = "send message"
	if err := checkQueueName(op, queue); err != nil {
		return 0, err
	}
	if o == nil {
		o = &MessageOptions{}
	}
	data, err := marshal(message)
	switch most := g.p.MaxPayload(); {
	case err == nil && len(data) > most:
		err = tooLarge{len(data), most}
	case err == nil:
		err = checkJSON(data)
	}
	if err != nil {
		return 0, invalid(op, "the message: %w", err)
	}
	delay, err := wholeUnits(op, o.Delay, time.Second)
	if err != nil {
		return 0, err
	}
	var headers *string
	if len(o.Headers) > 0 {
		if err := pgwake.CheckHeaders(o.Headers); err != nil {
			return 0, failed(op, err)
		}
		text, _ := json.Marshal(o.Headers) // strings
		headers = optional(string(text))
	}
	return value[int64](ctx, g, op, "pgmq_send_with_notify", queue, string(data), delay, headers)
}

// EnsureTaskQueue makes sure that there is a queue. A message creates it as well. pgwake.ErrInvalid for a bad name.
func (g *Graph) EnsureTaskQueue(ctx context.Context, queue string) error {
	const op = "ensure queue"
	if err := checkQueueName(op, queue); err != nil {
		return err
	}
	_, err := value[bool](ctx, g, op, "ensure_task_queue", queue)
	return err
}

// QueueStatistics is how much is in a queue.
type QueueStatistics struct {
	Queue            string `db:"queue_name"`
	Length           int64  `db:"queue_length"`           // messages, due or not, read or not
	OldestAgeSeconds *int   `db:"oldest_msg_age_seconds"` // nil: it is empty
	NewestAgeSeconds *int   `db:"newest_msg_age_seconds"`
}

// QueueStatistics returns how much is in a queue. It reads all work items of its namespace. Errors: pgwake.ErrNotFound, and pgwake.ErrInvalid for a
// bad name.
func (g *Graph) QueueStatistics(ctx context.Context, queue string) (QueueStatistics, error) {
	const op = "get queue statistics"
	if err := checkQueueName(op, queue); err != nil {
		return QueueStatistics{}, err
	}
	return row[QueueStatistics](ctx, g, op, "get_queue_statistics", queue)
}

var (
	pgmqName         = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,62}$`)
	pgmqStandardName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_]*_queue$`)
)

func checkQueueName(op, queue string) error {
	if !pgmqName.MatchString(queue) {
		return invalid(op, "queue %.100q does not match %s", queue, pgmqName)
	}
	return nil
}

// ExtractQueueNamespace returns the namespace of a queue: orchestration for those whose names begin so, <x> for worker_<x>_queue and
// <x>_queue, and pgwake.DefaultNamespace for all others, and where <x> is no name of a namespace.
func ExtractQueueNamespace(queue string) string {
	namespace := ""
	worker, isWorker := strings.CutPrefix(queue, "worker_")
	x, isQueue := strings.CutSuffix(worker, "_queue")
	switch {
	case strings.HasPrefix(queue, "orchestration"):
		namespace = "orchestration"
	case isWorker && isQueue && x != "":
		namespace = x
	case isWorker && isQueue:
		namespace = "worker"
	case pgmqStandardName.MatchString(queue):
		namespace = strings.TrimSuffix(queue, "_queue")
	}
	if pgwake.CheckNamespace(namespace) != nil {
		return pgwake.DefaultNamespace
	}
	return namespace
}
