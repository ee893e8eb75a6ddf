package order

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: given what has happened to an instance, what does its workflow do next? Nothing here
// touches a database or a clock, so a turn that is repeated after a crash decides the same again.

// workflow is a function that is written with the methods of turn. An error is that of the turn, which is
// tried again, and not that of the workflow: see turn.fail.
type workflow func(t *turn, input json.RawMessage) error

// Types of events. Those that answer a call are kinds of messages, too. A message of any other kind is an
// event from outside, and keeps its kind in the history.
const (
	started           = "started"
	activityScheduled = "activity.scheduled"
	activityCompleted = "activity.completed"
	timerSet          = "timer.set"
	timerFired        = "timer.fired"
	continuedAsNew    = "continued_as_new"
	completed         = "completed"
	failed            = "failed"
)

// detail is what an event carries, and a message that answers a call.
type detail struct {
	Execution int64           `json:"execution,omitempty"` // that made the call; only in messages
	Call      int64           `json:"call,omitempty"`      // its number among the calls of the execution
	Name      string          `json:"name,omitempty"`      // of the activity
	Data      json.RawMessage `json:"data,omitempty"`      // what it is given, or gave
	Error     string          `json:"error,omitempty"`     // why it gave nothing
}

// answer to an activity or a timer, or an event from outside.
type answer struct {
	here bool
	data json.RawMessage
	err  string
}

// turn is one run of a workflow function over its history.
type turn struct {
	instance string
	ack      pgwake.OrchestrationAck // grows during the run
	next     int64                   // id of the next event
	calls    int64                   // made in this run

	// What the history says.
	begun, over bool
	input       json.RawMessage
	made        map[int64]string // calls by number
	answers     map[int64]answer // by call
	outside     map[string]answer
}

// decide makes the messages of a turn part of the history, runs the workflow over that, and returns what is
// to be stored and sent.
func decide(run workflow, item *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("workflow panicked: %v", p)
		}
	}()
	execution, history := current(item)
	t := &turn{instance: item.Instance, ack: pgwake.OrchestrationAck{ExecutionID: execution}, next: nextEvent(history),
		made: map[int64]string{}, answers: map[int64]answer{}, outside: map[string]answer{}}
	for _, e := range history {
		t.apply(e)
	}
	if t.over {
		return t.ack, nil // whatever the messages say, they are too late
	}
	for _, m := range item.Messages {
		if err := t.receive(m.Message); err != nil {
			return ack, err
		}
	}
	if !t.begun {
		return pgwake.OrchestrationAck{}, nil // for an instance that nobody has started
	}
	t.ack.Metadata.Name, t.ack.Metadata.Version = item.Name, item.Version
	err = run(t, t.input)
	return t.ack, err
}

// current is the execution that a turn belongs to, and its history. The turn that opens another execution
// comes with the history of the one before, which remains current until the ack.
func current(item *pgwake.OrchestrationItem) (execution int64, history []pgwake.Event) {
	for _, m := range item.Messages {
		if m.Kind == pgwake.MessageContinueAsNew && m.ExecutionID > item.ExecutionID {
			return m.ExecutionID, nil
		}
	}
	return item.ExecutionID, item.History
}

// nextEvent is the id after the last.
func nextEvent(history []pgwake.Event) int64 { return int64(len(history)) + 1 }

// receive makes a message part of the history, unless it is there already.
func (t *turn) receive(m pgwake.Message) error {
	switch m.Kind {
	case pgwake.MessageStart, pgwake.MessageContinueAsNew:
		if !t.begun {
			t.record(started, m.Data)
		}
	case activityCompleted, timerFired:
		var d detail
		if err := json.Unmarshal(m.Data, &d); err != nil {
			return err
		}
		if d.Execution == t.ack.ExecutionID && !t.answers[d.Call].here {
			t.record(string(m.Kind), encode(detail{Call: d.Call, Data: d.Data, Error: d.Error}))
		}
	default:
		if !t.outside[string(m.Kind)].here {
			t.record(string(m.Kind), m.Data)
		}
	}
	return nil
}

// record adds an event.
func (t *turn) record(kind string, data json.RawMessage) {
	e := pgwake.Event{ID: t.next, Type: kind, Data: data}
	t.next++
	t.ack.History = append(t.ack.History, e)
	t.apply(e)
}

// apply takes note of an event, an old one or a new one.
func (t *turn) apply(e pgwake.Event) {
	var d detail
	switch e.Type {
	case activityScheduled, timerSet, activityCompleted, timerFired:
		if err := json.Unmarshal(e.Data, &d); err != nil {
			panic(fmt.Sprintf("event %d: %v", e.ID, err))
		}
	}
	switch e.Type {
	case started:
		t.begun, t.input = true, e.Data
	case activityScheduled, timerSet:
		t.made[d.Call] = e.Type + " " + d.Name
	case activityCompleted, timerFired:
		t.answers[d.Call] = answer{here: true, data: d.Data, err: d.Error}
	case continuedAsNew, completed, failed:
		t.over = true
	default:
		t.outside[e.Type] = answer{here: true, data: e.Data}
	}
}

// activity has a worker do something, once per place in the workflow, and returns its answer once that is
// here.
func (t *turn) activity(name string, input any) answer {
	d := detail{Name: name, Data: encode(input)}
	if call, isNew := t.call(activityScheduled, d); isNew {
		t.ack.WorkItems = append(t.ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
			Name: name, Input: d.Data, Instance: t.instance, ExecutionID: t.ack.ExecutionID, ActivityID: call}})
	}
	return t.answers[t.calls]
}

// timer answers after a time. It is a delayed message to the instance itself.
func (t *turn) timer(delay time.Duration) answer {
	if call, isNew := t.call(timerSet, detail{}); isNew {
		t.ack.Messages = append(t.ack.Messages, pgwake.MessageEnqueue{
			Message: pgwake.Message{Instance: t.instance, Kind: timerFired,
				Data: encode(detail{Execution: t.ack.ExecutionID, Call: call})},
			EnqueueOptions: pgwake.EnqueueOptions{Delay: delay}})
	}
	return t.answers[t.calls]
}

// event from outside: the first message of that kind.
func (t *turn) event(kind string) answer { return t.outside[kind] }

// call gives a call its number, and records it if no earlier turn did.
func (t *turn) call(kind string, d detail) (number int64, isNew bool) {
	t.calls++
	d.Call = t.calls
	before, recorded := t.made[d.Call]
	if is := kind + " " + d.Name; recorded && before != is {
		// Going on would give the answer of one call to another.
		panic(fmt.Sprintf("call %d is %q and was %q: the workflow has changed, or is not deterministic", d.Call, is, before))
	}
	if !recorded {
		t.record(kind, encode(d))
	}
	return d.Call, !recorded
}

// continueAsNew ends this execution and begins the next. Answers that are still to come are dropped then;
// events from outside that nobody has seen belong to the new one.
func (t *turn) continueAsNew(input any) error {
	t.record(continuedAsNew, nil)
	t.ack.Metadata.Status = pgwake.StatusContinuedAsNew
	t.ack.Messages = append(t.ack.Messages, pgwake.MessageEnqueue{Message: pgwake.Message{
		Instance: t.instance, Kind: pgwake.MessageContinueAsNew, Name: t.ack.Metadata.Name, Version: t.ack.Metadata.Version,
		ExecutionID: t.ack.ExecutionID + 1, Data: encode(input)}})
	return nil
}

// complete ends the workflow.
func (t *turn) complete(output string) error {
	t.record(completed, encode(output))
	t.end(pgwake.StatusCompleted, output)
	return nil
}

// fail ends the workflow, too.
func (t *turn) fail(err error) error {
	t.record(failed, encode(err.Error()))
	t.end(pgwake.StatusFailed, err.Error())
	return nil
}

// endings is the namespace in which those who wait for the end of a workflow fetch the news of it.
const endings = "endings"

// ending is the news.
type ending struct {
	Instance string
	Status   pgwake.Status
	Output   string
}

func (t *turn) end(status pgwake.Status, output string) {
	t.ack.Metadata.Status, t.ack.Metadata.Output = status, output
	t.ack.WorkItems = append(t.ack.WorkItems, pgwake.WorkEnqueue{
		WorkItem:       pgwake.WorkItem{Name: "ended", Input: encode(ending{t.instance, status, output})},
		EnqueueOptions: pgwake.EnqueueOptions{Namespace: endings}})
}

// encode returns v as JSON. What workflows and activities hand over can always be encoded.
func encode(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}
