package taskgraph

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what is told to listeners that know nothing of pgwake? Each channel is notified in the transaction that makes the change, so
// that a listener hears of it when that commits, and of nothing that is rolled back. They are channels of the database: schemas side by side in it
// share them. A payload has fewer than 1,000 bytes, ids, states and instants, and of what users chose the names of namespaces and queues. A notification is a
// hint: nobody hears it who does not listen, so look as well when listening begins.

// The channels. The first three are silent unless Settings.OutsideChannels is on; SendWithNotify always tells the last one.
const (
	TaskReadyAll        = "task_ready"
	TaskStateChangeAll  = "task_state_change"
	NamespaceCreatedAll = "namespace_created"
	MessageReadyAll     = "pgmq_message_ready"
)

// TaskReadyChannel is where the tasks of a namespace are told of whose steps are ready; TaskReadyAll has all of them.
func TaskReadyChannel(namespace string) string { return TaskReadyAll + "." + namespace }

// TaskStateChangeChannel is where the tasks of a namespace are told of that have ended; TaskStateChangeAll has all of them.
func TaskStateChangeChannel(namespace string) string { return TaskStateChangeAll + "." + namespace }

// MessageReadyChannel is where the messages of a namespace are told of; MessageReadyAll has all of them.
func MessageReadyChannel(namespace string) string { return MessageReadyAll + "." + namespace }

// What made steps of a task ready.
const (
	TriggeredByTaskStart      = "task_start"
	TriggeredByStepTransition = "step_transition"
)

// TaskReady says that steps of a task are ready.
type TaskReady struct {
	TaskUUID    string    `json:"task_uuid"`
	Namespace   string    `json:"namespace"`
	Priority    int       `json:"priority"`             // that the task was created with
	ReadySteps  int       `json:"ready_steps"`          // that are enqueued with this
	TriggeredBy string    `json:"triggered_by"`         // TriggeredByTaskStart or TriggeredByStepTransition
	StepUUID    string    `json:"step_uuid,omitempty"`  // of the step that came into a state; "" for a start
	StepState   StepState `json:"step_state,omitempty"` // that state
	TaskState   TaskState `json:"task_state,omitempty"` // with a start: what the task came into
	EmittedAt   time.Time `json:"emitted_at"`           // beginning of the transaction
}

// ActionNeeded is what the end of a task may call for.
type ActionNeeded string

// A task that is complete or resolved is to be finalized, one in error looked into, and one that was cancelled cleaned up after.
const (
	ActionFinalization  ActionNeeded = "finalization"
	ActionErrorHandling ActionNeeded = "error_handling"
	ActionCleanup       ActionNeeded = "cleanup"
)

// TaskStateChange says that a task has ended.
type TaskStateChange struct {
	TaskUUID     string       `json:"task_uuid"`
	Namespace    string       `json:"namespace"`
	TaskState    TaskState    `json:"task_state"`
	TriggeredBy  string       `json:"triggered_by"` // task_transition
	ActionNeeded ActionNeeded `json:"action_needed"`
	EmittedAt    time.Time    `json:"emitted_at"`
}

// NamespaceCreated says that there is a new namespace. Each transaction says so that was the first there.
type NamespaceCreated struct {
	NamespaceUUID string    `json:"namespace_uuid"` // always the same for a name, as long as the server has MD5, or has not
	NamespaceName string    `json:"namespace_name"`
	Description   *string   `json:"description"` // nil: namespaces have none
	CreatedAt     time.Time `json:"created_at"`
	TriggeredBy   string    `json:"triggered_by"` // namespace_creation
	EmittedAt     time.Time `json:"emitted_at"`
}

// MessageReady says that there is a message in a queue, and when it is due.
type MessageReady struct {
	EventType    string    `json:"event_type"` // message_ready
	MsgID        int64     `json:"msg_id"`
	QueueName    string    `json:"queue_name"`
	Namespace    string    `json:"namespace"`
	ReadyAt      time.Time `json:"ready_at"`
	DelaySeconds int       `json:"delay_seconds"`
	EmittedAt    time.Time `json:"emitted_at"`
}

// ParseTaskReady reads the payload of a notification. It fails with pgwake.ErrInvalid for what is none, and ignores fields that it does not
// know; so do the three others.
func ParseTaskReady(payload string) (e TaskReady, err error) {
	err = parse(payload, &e, func() bool {
		return isUUID(e.TaskUUID) && pgwake.CheckNamespace(e.Namespace) == nil && e.ReadySteps > 0 && e.TriggeredBy != ""
	})
	return e, err
}

// ParseTaskStateChange reads the payload of a notification.
func ParseTaskStateChange(payload string) (e TaskStateChange, err error) {
	err = parse(payload, &e, func() bool {
		return isUUID(e.TaskUUID) && pgwake.CheckNamespace(e.Namespace) == nil && e.TaskState.IsTerminal() && e.ActionNeeded != ""
	})
	return e, err
}

// ParseNamespaceCreated reads the payload of a notification.
func ParseNamespaceCreated(payload string) (e NamespaceCreated, err error) {
	err = parse(payload, &e, func() bool { return pgwake.CheckNamespace(e.NamespaceName) == nil && isUUID(e.NamespaceUUID) })
	return e, err
}

// ParseMessageReady reads the payload of a notification.
func ParseMessageReady(payload string) (e MessageReady, err error) {
	err = parse(payload, &e, func() bool { return e.MsgID > 0 && e.QueueName != "" && pgwake.CheckNamespace(e.Namespace) == nil })
	return e, err
}

func parse(payload string, event any, complete func() bool) error {
	if err := json.Unmarshal([]byte(payload), event); err != nil {
		return fmt.Errorf("%w: payload %.100q: %w", pgwake.ErrInvalid, payload, err)
	}
	if !complete() {
		return fmt.Errorf("%w: payload %.100q is incomplete", pgwake.ErrInvalid, payload)
	}
	return nil
}
