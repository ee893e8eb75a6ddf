package goworkflows

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/backend/metadata"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: how are instances, events and timers of the runtime named and written down in the Provider?

// instanceOf is the instance of the Provider that an execution is, as gowf_instances has it.
func instanceOf(w *core.WorkflowInstance) string { return w.InstanceID + "/" + w.ExecutionID }

// executionOf is the execution that an instance of the Provider is.
func executionOf(instance string) *core.WorkflowInstance {
	slash := strings.LastIndexByte(instance, '/') // execution ids have none
	if slash < 0 {
		return core.NewWorkflowInstance(instance, "")
	}
	return core.NewWorkflowInstance(instance[:slash], instance[slash+1:])
}

// maxInstance leaves room in a dedup key for the number of a timer.
const maxInstance = 255 - len("#-9223372036854775808")

func checkInstance(w *core.WorkflowInstance) error {
	switch {
	case w.InstanceID == "" || w.ExecutionID == "":
		return fmt.Errorf("%w: instance id %q and execution id %q are both required", pgwake.ErrInvalid, w.InstanceID, w.ExecutionID)
	case strings.Contains(w.ExecutionID, "/"):
		return fmt.Errorf("%w: execution id %q has a slash", pgwake.ErrInvalid, w.ExecutionID)
	case len(instanceOf(w)) > maxInstance:
		return fmt.Errorf("%w: instance id %.20q… and execution id %.40q have more than %d bytes", pgwake.ErrInvalid, w.InstanceID, w.ExecutionID, maxInstance-1)
	}
	return nil
}

// timerKey is the dedup key of a timer, by which it is cancelled.
func timerKey(instance string, scheduleEventID int64) string {
	return instance + "#" + strconv.FormatInt(scheduleEventID, 10)
}

// description is what the Provider keeps of an instance as its attributes, and gives back with each turn.
type description struct {
	Instance *core.WorkflowInstance     `json:"instance"`
	Metadata *metadata.WorkflowMetadata `json:"metadata,omitempty"`
	State    core.WorkflowInstanceState `json:"state,omitempty"`
}

// opening is the message that opens an execution. Its attributes are not there before the first ack.
type opening struct {
	Instance *core.WorkflowInstance `json:"instance"`
	Event    openingEvent           `json:"event"`
}

// openingEvent is read as any event is.
type openingEvent struct{ *history.Event }

func (e *openingEvent) UnmarshalJSON(data []byte) (err error) {
	e.Event, err = decodeEvent(data)
	return err
}

// withoutAncestors leaves only the parent, as the runtime needs no more: chains of sub-workflows may be long.
func withoutAncestors(w *core.WorkflowInstance) *core.WorkflowInstance {
	if w.Parent == nil {
		return core.NewWorkflowInstance(w.InstanceID, w.ExecutionID)
	}
	return core.NewSubWorkflowInstance(w.InstanceID, w.ExecutionID, core.NewWorkflowInstance(w.Parent.InstanceID, w.Parent.ExecutionID), w.ParentEventID)
}

// unnamed is the name of what the runtime has no name for, since the Provider wants one.
const unnamed = "unnamed"

func nameOf(name string) string { return cmp.Or(name, unnamed) }

// names are queues as queue names or tags.
func names(queues []workflow.Queue) []string {
	all := make([]string, len(queues))
	for i, q := range queues {
		all[i] = string(q)
	}
	return all
}

// room is what an event has to leave of pgwake.Config.MaxPayload: in the history it also has its number.
const room = len(`"sid":-9223372036854775808,`)

// encodeSent writes down what is sent to an instance. Invariant: what is queued can be an event of its history, and of the attributes that are made of it;
// or else the instance would fail for what others have sent it, or could not even do that, and had the same turn for ever.
func encodeSent(what string, v any, maxPayload int) (json.RawMessage, error) {
	data, err := encode(v)
	if err != nil {
		return nil, err
	}
	return data, pgwake.CheckJSON(what, data, maxPayload-room)
}

// encode writes an event or an opening down. Invariant: names come back as they are, where encoding/json writes U+FFFD for what is not UTF-8.
func encode(v any) (json.RawMessage, error) {
	e, _ := v.(*history.Event)
	if o, opens := v.(opening); opens {
		e = o.Event.Event
	}
	if name := noName(e); name != "" {
		return nil, fmt.Errorf("%w: %q is not valid UTF-8", pgwake.ErrInvalid, name[:min(len(name), 100)])
	}
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", pgwake.ErrInvalid, err)
	}
	return data, nil
}

// noName returns a name in an event that is no UTF-8; "": there is none.
func noName(e *history.Event) string {
	var names []string
	var about *metadata.WorkflowMetadata
	if e != nil {
		switch a := e.Attributes.(type) {
		case *history.ExecutionStartedAttributes:
			names, about = []string{a.Name, string(a.Queue)}, a.Metadata
		case *history.SubWorkflowScheduledAttributes:
			names, about = []string{a.Name, string(a.SubWorkflowQueue)}, a.Metadata
		case *history.ActivityScheduledAttributes:
			names, about = []string{a.Name, string(a.Queue)}, a.Metadata
		case *history.SignalReceivedAttributes:
			names = []string{a.Name}
		case *history.TimerScheduledAttributes:
			names = []string{a.Name}
		}
	}
	if about != nil {
		for key, value := range *about {
			names = append(names, key, value)
		}
	}
	for _, name := range names {
		if !utf8.ValidString(name) {
			return name
		}
	}
	return ""
}

func decodeEvent(data json.RawMessage) (e *history.Event, err error) {
	// The runtime's decoder panics for what the runtime does not write, such as an error whose cause is null.
	defer func() {
		if broken := recover(); broken != nil {
			e, err = nil, fmt.Errorf("read an event: the runtime's decoder panicked: %v", broken)
		}
	}()
	var head struct {
		Type history.EventType `json:"t"`
	}
	if err := jsonvalue.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("read an event: %w", err)
	}
	if head.Type == 0 {
		return nil, errors.New("read an event: it has no type")
	}
	e = &history.Event{}
	if err := jsonvalue.Unmarshal(data, e); err != nil {
		return nil, fmt.Errorf("read an event: %w", err)
	}
	if e.Attributes == nil { // for which a worker would panic
		return nil, fmt.Errorf("read an event: %v without attributes", e.Type)
	}
	return e, nil
}

// asError is an error as events carry it.
func asError(err error) *workflow.Error { return workflow.NewError(err).(*workflow.Error) }
