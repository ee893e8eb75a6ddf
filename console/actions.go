package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what can people change, who is asked before, and what do they learn of it?
//
// An action is a POST from a form of the console itself. It is carried out if Options.Authorize says so, and what cannot be taken back is asked
// for once more by a page. The answer leads back to where the button was, so that reloading a page does nothing twice.

// request is a form that somebody has sent.
type request struct {
	url.Values
	tree []string // instances that it is about, of which Authorize was asked
}

// deed carries out what a form asks for. It returns how much was done, for the words of the action.
type deed func(ctx context.Context, c *console, form *request) (n int64, err error)

// action is a kind of button.
type action struct {
	verb   Verb
	asks   string // before it is done; "": it is done at once
	done   string // what to say when it is, with the number
	target string // the field that says what it is about
	do     deed

	// in returns the namespaces that it is in, whatever the form says of that. Authorize is asked for each.
	in func(ctx context.Context, c *console, form *request) ([]string, error)

	// seen is how that looks by now of which the page has shown what the form says; see stale.go. Nil: what it is about says itself which one it is.
	seen func(ctx context.Context, c *console, form *request) (string, error)
}

var actions = map[string]action{
	"redrive": {RedriveLetter, "", "%d put back into their queues", "id", onLetters(eventbus.RedriveDeadLetters), inLetters, nil},
	"purge": {PurgeLetter, "Remove these dead letters for good?", "%d removed", "id", onLetters(func(ctx context.Context, p *pgwake.Provider, f *pgwake.DeadLetterFilter) (int, error) {
		return p.PurgeDeadLetters(ctx, f)
	}), inLetters, nil},
	"pause-queue":     {PauseQueue, "", "Paused: nobody fetches from it", "namespace", onQueue((*pgwake.Provider).Pause), inQueue, nil},
	"resume-queue":    {ResumeQueue, "", "Resumed", "namespace", onQueue((*pgwake.Provider).Resume), inQueue, nil},
	"cancel-task":     {CancelTask, "Cancel the task, and all of its steps that have not ended?", "Cancelled", "id", onTask((*taskgraph.Graph).Cancel), inTask, seenTask},
	"resolve-task":    {ResolveTask, "Take the task for done, and cancel its steps that have not ended?", "Resolved", "id", onTask((*taskgraph.Graph).ResolveTask), inTask, seenTask},
	"retry-task":      {RetryTask, "", "%d steps run again", "id", retryTask, inTask, seenFailures},
	"pause-schedule":  {PauseSchedule, "", "Paused", "name", onSchedule((*eventbus.Bus).PauseSchedule), inBus, seenSchedule},
	"resume-schedule": {ResumeSchedule, "", "Resumed", "name", onSchedule((*eventbus.Bus).ResumeSchedule), inBus, seenSchedule},
	"run-schedule":    {RunSchedule, "", "It came, as %d", "name", runSchedule, inBus, seenSchedule},
	"replay":          {ReplayEvents, "Deliver these events to the group once more?", "Replay %d has begun", "group", replay, inBus, nil},
	"delete-instance": {DeleteInstance, "Delete the instance with all its descendants, their history and their messages, for good?", "%d instances deleted", "id", deleteInstance, inInstance, seenInstance},
}

// inLetters are the namespaces of those that are chosen. What a form says is enough where nothing is done in others: "" is all.
func inLetters(ctx context.Context, c *console, form *request) ([]string, error) {
	f, _, err := letterFilter(form.Values)
	if err != nil {
		return nil, err
	}
	if f.Namespace != "" || form.Get("all") != "" {
		return []string{f.Namespace}, nil
	}
	if f.IDs, err = chosen(form); err != nil {
		return nil, err
	}
	f.Limit, f.PayloadBytes = len(f.IDs), unlisted
	found, err := c.p.ListDeadLetters(ctx, f)
	if err != nil {
		return nil, err
	}
	var in []string
	for _, d := range found {
		in = append(in, d.Namespace)
	}
	if slices.Sort(in); len(in) == 0 {
		return nil, fmt.Errorf("%w: none of these dead letters is there any more", pgwake.ErrNotFound)
	}
	return slices.Compact(in), nil
}

// queueOf is the queue that a form is about.
func queueOf(form *request) (pgwake.Queue, error) { return queueNamed(form.Get("queue")) }

func inQueue(_ context.Context, _ *console, form *request) ([]string, error) {
	if _, err := queueOf(form); err != nil {
		return nil, err
	}
	if n := form.Get("namespace"); n != pgwake.AllNamespaces {
		return []string{n}, nil
	}
	return []string{""}, nil
}

func inTask(ctx context.Context, c *console, form *request) ([]string, error) {
	if c.o.Tasks == nil {
		return nil, badRequest("there is no task graph")
	}
	t, err := c.o.Tasks.Task(ctx, form.Get("id"))
	if err != nil {
		return nil, err
	}
	return []string{t.Namespace}, nil
}

func inBus(_ context.Context, c *console, form *request) ([]string, error) {
	bus, err := c.busOf(form)
	if err != nil {
		return nil, err
	}
	return []string{bus.Namespace()}, nil
}

// mostLookedUp is how many instances are looked up, each by a statement. Of more than that it is as if they were in all namespaces.
const mostLookedUp = 1000

// inInstance are the namespaces of an instance and its descendants, which may be in others.
func inInstance(ctx context.Context, c *console, form *request) ([]string, error) {
	tree, err := c.p.GetInstanceTree(ctx, form.Get("id"))
	if err != nil {
		return nil, err
	}
	if form.tree = tree; len(tree) > mostLookedUp {
		return []string{""}, nil
	}
	var in []string
	for _, id := range tree {
		info, err := c.p.GetInstanceInfo(ctx, id)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(in, info.Namespace) {
			in = append(in, info.Namespace)
		}
	}
	return in, nil
}

// by is who did it, for those who read transitions.
const by = "by hand, in the console"

// errNothing is an action that has changed nothing.
var errNothing = errors.New("nothing was changed: it is not in a state for that any more")

// onLetters is an action on dead letters: those that are chosen, or all of a filter.
func onLetters(do func(context.Context, *pgwake.Provider, *pgwake.DeadLetterFilter) (int, error)) deed {
	const most = 100_000
	return func(ctx context.Context, c *console, form *request) (sum int64, err error) {
		f, _, err := letterFilter(form.Values)
		if err != nil {
			return 0, err
		}
		f.Limit = mostChosen
		if form.Get("all") == "" {
			if f.IDs, err = chosen(form); err != nil {
				return 0, err
			}
		} else if f.DiedBefore, err = c.afterLetters(ctx, form); err != nil {
			return 0, err
		}
		for sum < most {
			n, err := do(ctx, c.p, f)
			sum += int64(n)
			if err != nil && sum > 0 {
				err = fmt.Errorf("%d were done, and then: %w", sum, err)
			}
			if err != nil || n == 0 {
				return sum, err
			}
		}
		return sum, nil
	}
}

// mostChosen is how many dead letters can be chosen, and are taken in one statement.
const mostChosen = 500

// chosen are the dead letters that a form names one by one.
func chosen(form *request) (ids []int64, err error) {
	for _, text := range form.Values["id"] {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, badRequest("id is to be a number")
		}
		ids = append(ids, id)
	}
	switch {
	case len(ids) == 0:
		return nil, badRequest("no dead letter is chosen")
	case len(ids) > mostChosen:
		return nil, badRequest("more than %d dead letters are chosen", mostChosen)
	}
	return ids, nil
}

// allOf says which dead letters are all of a form.
func allOf(form *request) string {
	var of []string
	for _, name := range letterFields {
		if value := form.Get(name); value != "" {
			of = append(of, name+" "+value)
		}
	}
	if len(of) == 0 {
		return "all"
	}
	return "all of " + strings.Join(of, ", ")
}

// afterLetters is an instant after the latest dead letter of the page: what dies anew, before the button is pressed or while an action on all is under
// way, is not one of all. If the form does not say, it is after the latest there is.
func (c *console) afterLetters(ctx context.Context, form *request) (time.Time, error) {
	if text := form.Get("until"); text != "" {
		until, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			return until, badRequest("until is to be an instant")
		}
		return until, nil
	}
	latest, err := c.p.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{Before: math.MaxInt64, Limit: 1, PayloadBytes: unlisted})
	if err != nil || len(latest) == 0 {
		return time.Now(), err
	}
	return latest[0].DiedAt.Add(time.Microsecond), nil
}

func onQueue(do func(*pgwake.Provider, context.Context, pgwake.Queue, ...string) error) deed {
	return func(ctx context.Context, c *console, form *request) (int64, error) {
		queue, err := queueOf(form)
		if err != nil {
			return 0, err
		}
		return 1, do(c.p, ctx, queue, form.Get("namespace"))
	}
}

func onTask(do func(*taskgraph.Graph, context.Context, string, string) (bool, error)) deed {
	return func(ctx context.Context, c *console, form *request) (int64, error) {
		if c.o.Tasks == nil {
			return 0, badRequest("there is no task graph")
		}
		changed, err := do(c.o.Tasks, ctx, form.Get("id"), by)
		if err == nil && !changed {
			err = errNothing
		}
		return 1, err
	}
}

func retryTask(ctx context.Context, c *console, form *request) (n int64, err error) {
	if c.o.Tasks == nil {
		return 0, badRequest("there is no task graph")
	}
	steps, err := c.o.Tasks.Steps(ctx, form.Get("id"))
	if err != nil {
		return 0, err
	}
	for _, s := range steps {
		if s.State != taskgraph.StepError {
			continue
		}
		changed, err := c.o.Tasks.ResetStep(ctx, s.ID, by)
		if err != nil {
			return n, err
		}
		if changed {
			n++
		}
	}
	if n == 0 {
		err = errNothing
	}
	return n, err
}

// busOf is the event bus that a form is about.
func (c *console) busOf(form *request) (*eventbus.Bus, error) {
	if c.o.Events == nil {
		return nil, badRequest("there is no event bus")
	}
	if n := form.Get("namespace"); n != "" {
		return c.o.Events.In(n), nil
	}
	return c.o.Events, nil
}

func onSchedule(do func(*eventbus.Bus, context.Context, string) (bool, error)) deed {
	return func(ctx context.Context, c *console, form *request) (int64, error) {
		bus, err := c.busOf(form)
		if err != nil {
			return 0, err
		}
		changed, err := do(bus, ctx, form.Get("name"))
		if err == nil && !changed {
			err = errNothing
		}
		return 1, err
	}
}

func runSchedule(ctx context.Context, c *console, form *request) (int64, error) {
	bus, err := c.busOf(form)
	if err != nil {
		return 0, err
	}
	id, err := bus.RunSchedule(ctx, form.Get("name"))
	if err == nil && id == 0 {
		err = errNothing // it is paused
	}
	return id, err
}

func replay(ctx context.Context, c *console, form *request) (id int64, err error) {
	bus, err := c.busOf(form)
	if err != nil {
		return 0, err
	}
	var r eventbus.Range
	for name, to := range map[string]*int64{"first": &r.FirstID, "last": &r.LastID} {
		if text := form.Get(name); text != "" {
			if *to, err = strconv.ParseInt(text, 10, 64); err != nil {
				return 0, badRequest("%s is to be a number", name)
			}
		}
	}
	if r.From, err = instantOf("from", form.Get("from")); err != nil {
		return 0, err
	}
	if r.To, err = instantOf("to", form.Get("to")); err != nil {
		return 0, err
	}
	return bus.Replay(ctx, form.Get("group"), r)
}

// deleteInstance deletes exactly those of which Authorize was asked: not what was started since then.
func deleteInstance(ctx context.Context, c *console, form *request) (int64, error) {
	d, err := c.p.DeleteInstances(ctx, form.tree, &pgwake.DeleteOptions{Force: form.Get("force") != ""})
	return d.Instances, err
}

// maxForm is how large a form may be: there are 25 letters on a page.
const maxForm = 64 << 10

// act carries out what a form asks for.
func (c *console) act(w http.ResponseWriter, r *http.Request) {
	if c.o.Authorize == nil {
		c.fail(w, r, http.StatusForbidden, errors.New("this console is read-only: Options.Authorize is not set"))
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil {
		c.fail(w, r, http.StatusBadRequest, badRequest("the form cannot be read"))
		return
	}
	form := &request{Values: r.PostForm}
	name := form.Get("verb")
	of, known := actions[name]
	if !known {
		c.fail(w, r, http.StatusBadRequest, badRequest("there is no such action"))
		return
	}
	target := strings.Join(form.Values[of.target], ", ")
	if form.Get("all") != "" {
		target = allOf(form)
	}
	ctx, cancel := context.WithTimeout(r.Context(), 3*patience)
	defer cancel()
	namespaces, err := of.in(ctx, c, form)
	if err != nil {
		c.fail(w, r, statusOf(err), err)
		return
	}
	for _, n := range namespaces {
		asked := Action{Verb: of.verb, Namespace: n, Target: target}
		if of.verb == PauseQueue || of.verb == ResumeQueue {
			asked.Queue = form.Get("queue")
		}
		if err := c.o.Authorize(r, asked); err != nil {
			c.fail(w, r, http.StatusForbidden, err)
			return
		}
	}
	if err := c.checkSeen(ctx, of, form); err != nil {
		c.fail(w, r, statusOf(err), err)
		return
	}
	if of.asks != "" && form.Get("sure") == "" {
		c.confirm(w, r, of, target, form)
		return
	}
	n, err := of.do(ctx, c, form)
	c.hub.stir() // other pages that are open
	if err != nil {
		status := statusOf(err)
		if errors.Is(err, errNothing) || errors.Is(err, pgwake.ErrInstanceRunning) || errors.Is(err, pgwake.ErrHasParent) {
			status = http.StatusConflict
		}
		c.fail(w, r, status, err)
		return
	}
	to := backOf(form.Get("back"))
	q := to.Query()
	q.Set("done", name)
	q.Set("n", strconv.FormatInt(n, 10))
	if name == "replay" {
		q.Set("replay", strconv.FormatInt(n, 10))
	}
	if name == "delete-instance" {
		to.Path, q = "instances", url.Values{"done": {name}, "n": {strconv.FormatInt(n, 10)}}
	}
	to.RawQuery = q.Encode()
	w.Header().Set("Location", to.String()) // as it is: relative
	w.WriteHeader(http.StatusSeeOther)
}

// backOf is the page of the console that a form came from; the overview if it names another place.
func backOf(text string) *url.URL {
	u, err := url.Parse(text)
	if err == nil && u.Scheme == "" && u.Host == "" && u.User == nil {
		if _, known := pages[u.Path]; known {
			return &url.URL{Path: u.Path, RawQuery: u.RawQuery}
		}
	}
	return &url.URL{Path: "./"}
}

// confirmation is a question.
type confirmation struct {
	Question, Target, Verb string
	Fields                 []field
	Back                   string
}

var confirmPage = newPage("confirm", "Are you sure?", nil)

func (c *console) confirm(w http.ResponseWriter, r *http.Request, of action, target string, form *request) {
	v := c.view(r, confirmPage)
	q := &confirmation{Question: of.asks, Target: target, Verb: string(of.verb), Back: backOf(form.Get("back")).String()}
	for name, values := range form.Values {
		for _, value := range values {
			if value != "" {
				q.Fields = append(q.Fields, field{name, value})
			}
		}
	}
	v.Body = q
	c.write(w, http.StatusOK, v)
}

// Flash says what came of the action before; "" if there was none.
func (v *view) Flash() string {
	of, known := actions[v.text("done")]
	if !known {
		return ""
	}
	n, err := v.number("n")
	if err != nil {
		return ""
	}
	if !strings.Contains(of.done, "%d") {
		return of.done + "."
	}
	return fmt.Sprintf(of.done, n) + "."
}

// field is a field of a form.
type field struct {
	Name  string
	Value string
}

// Fields are those of a button: what comes after the first three parameters of template act, name and value by turns.
func (v *view) Fields(params []any) (all []field) {
	for i := 3; i+1 < len(params); i += 2 {
		all = append(all, field{fmt.Sprint(params[i]), fmt.Sprint(params[i+1])})
	}
	return all
}

// Asks reports whether an action is to be confirmed.
func (v *view) Asks(name string) bool { return actions[name].asks != "" }
