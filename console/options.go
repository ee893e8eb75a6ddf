package console

import (
	"net/http"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what can be set?

// Options holds every setting of a console. The zero value means the defaults, and so does a nil *Options.
type Options struct {
	// Tasks has the task graph shown: Engine.Graph of a taskgraph.Engine. Defaults to nil: its page says that there is none.
	Tasks *taskgraph.Graph

	// Events has events, groups and schedules shown, at first those of the namespace of the Bus. Defaults to nil: their pages say that
	// there are none.
	Events *eventbus.Bus

	// Authorize is asked before anything is changed; nil is yes, and an error is shown to whoever tried, with status 403. It has the request,
	// so that it can know who that is. Defaults to nil: nothing can be changed, and there are no buttons.
	//
	// Who may look is not asked here: that is for a handler around the console.
	Authorize func(r *http.Request, a Action) error

	// Redact returns what is shown of a payload, or of an error, in its place. It is called for each that is shown or downloaded, and is to be
	// safe for concurrent use. Defaults to nil: all of it.
	Redact func(p Payload) []byte

	// Local has the console be for this machine alone, whose users need no password: requests that did not come to a loopback address, or that
	// name another host than localhost or such an address, are refused. Without that check a page of any site that is open in a browser here could use the
	// console, by a name that is made to lead here. Not behind a proxy that passes its own name on. Defaults to false: whoever gets through may look.
	Local bool

	// MaxStreams is how many pages can be live at the same time; the others are to be reloaded by hand. Defaults to 100.
	MaxStreams int
}

// Action is what somebody is about to do.
type Action struct {
	Verb      Verb
	Namespace string // that it is in, whatever the request says; "": all of them. What is in several is asked for once for each of these
	Queue     string // that is paused or resumed: "worker" or "orchestrator"; "" for other verbs
	Target    string // what it is about: letters, a task, a schedule, an instance, a group, the namespace of a queue
}

// Verb is a kind of Action.
type Verb string

// The verbs.
const (
	RedriveLetter  Verb = "redrive"         // dead letters back into their queues
	PurgeLetter    Verb = "purge"           // dead letters, for good
	PauseQueue     Verb = "pause queue"     // a namespace of a queue
	ResumeQueue    Verb = "resume queue"    // likewise
	CancelTask     Verb = "cancel task"     // with its steps
	RetryTask      Verb = "retry task"      // the steps that failed for good
	ResolveTask    Verb = "resolve task"    // take it for done
	PauseSchedule  Verb = "pause schedule"  //
	ResumeSchedule Verb = "resume schedule" //
	RunSchedule    Verb = "run schedule"    // now, beside its occurrences
	ReplayEvents   Verb = "replay events"   // to a group, once more
	DeleteInstance Verb = "delete instance" // with its descendants; it is in the namespaces of all of them
)

// Payload is what users have put into the database, on its way to somebody's eyes.
type Payload struct {
	// Kind is "work item", "message", "dead letter", "event", "history", "output", "status", "attributes", "key-value pair", "context", "inputs",
	// "results", "checkpoint", "headers", "metadata", or "error" and "reason", which are texts.
	Kind      string
	Namespace string // "" if it is not known
	Name      string // of the work item, orchestration, event, step or schedule
	Data      []byte // not to be changed
}

// defaultStreams is what MaxStreams defaults to.
const defaultStreams = 100
