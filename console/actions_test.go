package console_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: does each button do what it says, for those who may, and for nobody else?

// asked takes note of what somebody was asked for, and allows it.
type asked struct {
	mu  sync.Mutex
	all []console.Action
}

func (a *asked) authorize(_ *http.Request, of console.Action) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, of)
	return nil
}

// presses clicks a button, by its text and what is around it, and waits for the page that comes then.
func (x *tab) presses(within, text string) {
	x.t.Helper()
	_, err := chromedp.RunResponse(x.ctx, func(ctx context.Context, t *chromedp.Target) (chromedp.Void, error) {
		return chromedp.Evaluate[chromedp.Void](`[...document.querySelectorAll(`+quoted(within+" button")+`)].find(b => b.textContent.trim() == `+quoted(text)+`).click()`)(ctx, t)
	})
	require.NoError(x.t, err, text)
	x.arrives()
}

func (x *tab) visit(url string) {
	x.t.Helper()
	x.again()
	x.run(chromedp.Navigate(url))
	x.arrives()
}

// One action of each kind, in a browser, as people do it.
func TestActions_OneOfEachKind_DoesWhatItSays(t *testing.T) {
	t.Parallel()
	var who asked
	w := newWorld(t, console.Options{Authorize: who.authorize})
	ctx := t.Context()
	x := open(t, w.url+"letters", 1280, 900)

	// Dead letters: one goes back, another is removed for good, which is asked for once more.
	x.run(chromedp.Click(chromedp.CSS(`input[name=id][value="` + text(w.letters[0]) + `"]`)))
	x.presses(".acts", "Redrive those chosen")
	x.reads("1 put back into their queues.")
	x.visit(w.url + "letter?id=" + text(w.letters[1]))
	x.presses(".acts", "Purge")
	x.reads("Remove these dead letters for good?")
	require.Equal(t, "No, go back", eval[string](x, `document.activeElement.textContent`), "a key that is pressed once more does no harm")
	x.presses("main", "Yes: purge")
	x.reads("1 removed.")
	left, err := w.ListDeadLetters(ctx, nil)
	require.NoError(t, err)
	require.Len(t, left, 2)
	back, err := w.Peek(ctx, pgwake.Worker, &pgwake.PeekFilter{Namespace: "mail"})
	require.NoError(t, err)
	require.Len(t, back, 1)
	x.visit(w.url + "letters?reason=Handler+error")
	x.presses(".acts", "Redrive all of the filter")
	x.reads("1 put back")

	// A queue.
	x.visit(w.url + "queues?q=billing")
	x.reads("served") // as soon as all is counted
	x.presses("#queues-h ~ .scroll", "Pause")
	x.reads("paused")
	paused, err := w.GetPaused(ctx, pgwake.Worker)
	require.NoError(t, err)
	require.Contains(t, paused.Namespaces, "billing")
	x.presses("#queues-h ~ .scroll", "Resume")
	x.reads("served")

	// Schedules.
	x.visit(w.url + "schedules")
	x.presses("tr:has(td code):last-child", "Run now")
	x.reads("It came, as")
	x.presses("tr:has(td code):last-child", "Pause")
	x.reads("Paused.")
	schedules, err := w.bus.Schedules(ctx, "", 10)
	require.NoError(t, err)
	require.True(t, schedules[1].Paused, schedules[1].Name)
	x.presses("tr:has(td code):last-child", "Resume")
	x.reads("Resumed.")

	// Events once more.
	x.visit(w.url + "events")
	x.run(chromedp.SetValue(chromedp.CSS("input[name=first]"), text(w.event)))
	x.presses("section", "Replay")
	x.presses("main", "Yes: replay events")
	x.reads("Replay")

	// A task: what failed runs again, and now it does not fail; live.
	x.visit(w.url + "task?id=" + w.task)
	x.reads("blocked by failures")
	close(w.declined)
	x.presses(".acts", "Retry what failed")
	x.reads("1 steps run again.")
	x.run(chromedp.Poll[chromedp.Void](`document.querySelectorAll(".graph .good").length == 8 && document.querySelector(".facts").innerText.includes("9 of 9")`))

	// Two more: one is cancelled, the other taken for done.
	for button, sure := range map[string]string{"Cancel": "Yes: cancel task", "Take for done": "Yes: resolve task"} {
		s, err := w.engine.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Delay: time.Hour})
		require.NoError(t, err)
		x.visit(w.url + "task?id=" + s.ID)
		x.presses(".acts", button)
		x.presses("main", sure)
		want := map[string]taskgraph.TaskState{"Cancel": taskgraph.TaskCancelled, "Take for done": taskgraph.TaskResolvedManually}[button]
		x.reads(strings.ReplaceAll(string(want), "_", " "))
		state, err := w.engine.CurrentTaskState(ctx, s.ID)
		require.NoError(t, err)
		require.Equal(t, want, state)
	}

	// An instance.
	x.visit(w.url + "instance?id=order-7")
	x.presses(".acts", "Delete")
	x.presses("main", "Yes: delete instance")
	x.reads("1 instances deleted.")
	_, err = w.GetInstanceInfo(ctx, "order-7")
	require.ErrorIs(t, err, pgwake.ErrNotFound)

	verbs := make(map[console.Verb]bool)
	for _, a := range who.all {
		verbs[a.Verb] = true
	}
	require.Len(t, verbs, 12, "each kind")
	require.Contains(t, who.all, console.Action{Verb: console.RedriveLetter, Namespace: "mail", Target: text(w.letters[0])})
	require.Contains(t, who.all, console.Action{Verb: console.RedriveLetter, Target: "all of reason Handler error"})
	require.Contains(t, who.all, console.Action{Verb: console.PauseQueue, Queue: "worker", Namespace: "billing", Target: "billing"})
	require.Contains(t, who.all, console.Action{Verb: console.DeleteInstance, Namespace: "flow", Target: "order-7"})
}

// post sends a form, as a browser does that is where the header Origin says.
func (s *site) post(t *testing.T, origin string, form url.Values) int {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, s.url+"act", strings.NewReader(form.Encode()))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if origin != "" {
		r.Header.Set("Origin", origin)
	}
	answer, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	answer.Body.Close()
	return answer.StatusCode
}

func TestActions_WhoMayNot_ChangesNothing(t *testing.T) {
	t.Parallel()
	pause := url.Values{"verb": {"pause-queue"}, "queue": {"worker"}, "namespace": {"shop"}, "back": {"queues"}}
	own := func(s *site) string { return strings.TrimSuffix(s.url, "/ops/console/") }

	readOnly := newSite(t, nil, nil)
	readOnly.enqueue(t, "mail", "shop", `{}`)
	require.Equal(t, http.StatusForbidden, readOnly.post(t, own(readOnly), pause))
	var body string
	require.Eventually(t, func() bool { // a page does not wait for long until all is counted
		_, body, _ = readOnly.get(t, "queues")
		return strings.Contains(body, "shop")
	}, patience, pollEvery)
	require.NotContains(t, body, `method="post"`)

	refused := newSite(t, readOnly.Provider, &console.Options{Authorize: func(*http.Request, console.Action) error { return errors.New("only for operators") }})
	require.Equal(t, http.StatusForbidden, refused.post(t, own(refused), pause))

	var who asked
	allowed := newSite(t, readOnly.Provider, &console.Options{Authorize: who.authorize})
	require.Equal(t, http.StatusForbidden, allowed.post(t, "https://evil.example", pause), "a form of another site")
	require.Empty(t, who.all, "nobody is asked for what another site wants")
	purge := url.Values{"verb": {"purge"}, "all": {"yes"}}
	require.Equal(t, http.StatusOK, allowed.post(t, own(allowed), purge), "it asks first")
	for _, bad := range []url.Values{{}, {"verb": {"format c:"}}, {"verb": {"redrive"}}, {"verb": {"pause-queue"}, "queue": {"other"}, "namespace": {"shop"}}, {"verb": {"redrive"}, "id": {"x"}}, {"verb": {"cancel-task"}}, {"verb": {"replay"}, "sure": {"yes"}}} {
		require.Contains(t, []int{http.StatusBadRequest, http.StatusOK}, allowed.post(t, own(allowed), bad), "%v", bad)
	}
	paused, err := readOnly.GetPaused(t.Context(), pgwake.Worker)
	require.NoError(t, err)
	require.Empty(t, paused.Namespaces)
	require.Equal(t, http.StatusSeeOther, allowed.post(t, own(allowed), pause))
}

// Whoever may act in one namespace cannot do so in another by saying that it is his.
func TestActions_FormNamesAnotherNamespace_AuthorizeIsAskedOfTheRealOne(t *testing.T) {
	t.Parallel()
	onlyMine := func(_ *http.Request, a console.Action) error {
		if a.Namespace != "mine" {
			return errors.New("only in mine")
		}
		return nil
	}
	w := makeWorld(t, console.Options{Authorize: onlyMine}, false)
	origin := strings.TrimSuffix(w.url, "/ops/console/")
	for _, form := range []url.Values{
		{"verb": {"cancel-task"}, "id": {w.task}}, {"verb": {"resolve-task"}, "id": {w.task}}, {"verb": {"retry-task"}, "id": {w.task}},
		{"verb": {"delete-instance"}, "id": {"order-7"}, "force": {"yes"}},
	} {
		form.Set("namespace", "mine")
		form.Set("sure", "yes")
		require.Equal(t, http.StatusForbidden, w.post(t, origin, form), form)
	}
	letter := url.Values{"verb": {"purge"}, "sure": {"yes"}, "id": {text(w.letters[0])}}
	require.Equal(t, http.StatusForbidden, w.post(t, origin, letter), "it says of no namespace, and the letter is in another")
	require.Equal(t, http.StatusForbidden, w.post(t, origin, url.Values{"verb": {"purge"}, "sure": {"yes"}, "all": {"yes"}}))
	require.Equal(t, http.StatusForbidden, w.post(t, origin, url.Values{"verb": {"pause-queue"}, "queue": {"worker"}, "namespace": {pgwake.AllNamespaces}}))
	letter.Set("namespace", "mine")
	require.Equal(t, http.StatusSeeOther, w.post(t, origin, letter), "of those that are in mine: none")
	left, err := w.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, left, len(w.letters))
	state, err := w.engine.CurrentTaskState(t.Context(), w.task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskBlockedByFailures, state)
	_, err = w.GetInstanceInfo(t.Context(), "order-7")
	require.NoError(t, err)
}

// Letters that are chosen may be in several namespaces.
func TestActions_LettersOfSeveralNamespaces_AuthorizeIsAskedForEach(t *testing.T) {
	t.Parallel()
	var who asked
	s := newSite(t, nil, &console.Options{Authorize: who.authorize})
	ids := url.Values{"verb": {"redrive"}}
	for _, namespace := range []string{"mine", "yours", "mine"} {
		s.bury(t, "mail", namespace)
	}
	letters, err := s.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	for _, d := range letters {
		ids.Add("id", text(d.ID))
	}
	origin := strings.TrimSuffix(s.url, "/ops/console/")
	require.Equal(t, http.StatusSeeOther, s.post(t, origin, ids))
	var in []string
	for _, a := range who.all {
		in = append(in, a.Namespace)
	}
	require.Equal(t, []string{"mine", "yours"}, in)
	require.Equal(t, http.StatusNotFound, s.post(t, origin, ids), "they are gone, and nobody is asked")
	require.Len(t, who.all, 2)
}

// acked begins an instance, as a child of another unless that is "", whose turn ends with a status.
func (s *site) acked(t *testing.T, id, namespace, parent string, status pgwake.Status) {
	t.Helper()
	_, err := s.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: id, Kind: pgwake.MessageStart, Name: "order", ExecutionID: 1}, &pgwake.EnqueueOptions{Namespace: namespace})
	require.NoError(t, err)
	turn, err := s.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{namespace}})
	require.NoError(t, err)
	require.NoError(t, s.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{ExecutionID: 1, Metadata: pgwake.Metadata{Name: "order", Parent: parent, Status: status}}))
}

// Whoever may delete an instance in one namespace does not delete what it has started in another, where he may not.
func TestActions_DescendantsInOtherNamespaces_AuthorizeIsAskedForEach(t *testing.T) {
	t.Parallel()
	var who asked
	s := newSite(t, nil, &console.Options{Authorize: func(r *http.Request, a console.Action) error {
		if a.Target == "order-7" && a.Namespace == "theirs" {
			return errors.New("not in theirs")
		}
		return who.authorize(r, a)
	}})
	for _, root := range []string{"order-7", "order-8"} {
		s.acked(t, root, "mine", "", pgwake.StatusRunning)
		s.acked(t, root+"-parcel", "mine", root, pgwake.StatusRunning)
		s.acked(t, root+"-label", "theirs", root+"-parcel", pgwake.StatusRunning)
	}
	remove := func(id string) int {
		return s.post(t, strings.TrimSuffix(s.url, "/ops/console/"), url.Values{"verb": {"delete-instance"}, "id": {id}, "force": {"yes"}, "sure": {"yes"}})
	}
	require.Equal(t, http.StatusForbidden, remove("order-7"))
	tree, err := s.GetInstanceTree(t.Context(), "order-7")
	require.NoError(t, err)
	require.Len(t, tree, 3)
	who.all = nil
	require.Equal(t, http.StatusSeeOther, remove("order-8"))
	require.Equal(t, []console.Action{{Verb: console.DeleteInstance, Namespace: "mine", Target: "order-8"}, {Verb: console.DeleteInstance, Namespace: "theirs", Target: "order-8"}}, who.all)
	_, err = s.GetInstanceTree(t.Context(), "order-8")
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	require.Equal(t, http.StatusConflict, remove("order-7-parcel"), "it goes with its parent")
}

// What is put back and dies again at once is not put back for ever.
func TestActions_AllAreRedrivenAndDieAgain_EachIsRedrivenOnce(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{Authorize: anybody}, false)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { // a handler that fails whatever it gets
		defer close(ended)
		for {
			item, err := w.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"mail"}, PollTimeout: time.Minute})
			if err != nil {
				return
			}
			_ = w.DeadLetterWorkItem(ctx, item.LockToken, "again", "")
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	r, err := http.NewRequest(http.MethodPost, w.url+"act", strings.NewReader(url.Values{"verb": {"redrive"}, "all": {"yes"}, "back": {"letters"}}.Encode()))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	answer.Body.Close()
	require.Equal(t, http.StatusSeeOther, answer.StatusCode)
	to, err := url.Parse(answer.Header.Get("Location"))
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(len(w.letters)), to.Query().Get("n"))
}

// Nobody would claim them, and the page of dead letters has them no more.
func TestActions_LettersOfAGroupThatWasDeleted_Stay(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{Authorize: anybody}, false)
	require.NoError(t, w.bus.Subscribe(t.Context(), "brief", []string{"parcel.lost"}, nil))
	_, err := w.bus.Emit(t.Context(), "parcel.lost", nil, nil)
	require.NoError(t, err)
	item, err := w.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"shop"}, Tags: pgwake.Tags("eventbus/brief|parcel.lost")})
	require.NoError(t, err)
	require.NoError(t, w.DeadLetterWorkItem(t.Context(), item.LockToken, "poison", ""))
	_, err = w.bus.DeleteGroup(t.Context(), "brief")
	require.NoError(t, err)
	require.Equal(t, http.StatusSeeOther, w.post(t, strings.TrimSuffix(w.url, "/ops/console/"), url.Values{"verb": {"redrive"}, "all": {"yes"}}))
	left, err := w.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Equal(t, "parcel.lost", left[0].Name)
}

// What a form says of where it came from leads nowhere but into the console.
func TestActions_BackToAnotherPlace_IsTheOverview(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Authorize: anybody})
	for _, back := range []string{"https://evil.example/", "//evil.example", "javascript:alert(1)", "/other", "../other", ""} {
		form := url.Values{"verb": {"pause-queue"}, "queue": {"worker"}, "namespace": {"shop"}, "back": {back}}
		r, err := http.NewRequest(http.MethodPost, s.url+"act", strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		answer, err := http.DefaultTransport.RoundTrip(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.True(t, strings.HasPrefix(answer.Header.Get("Location"), "./?"), answer.Header.Get("Location"))
	}
}

func text(n int64) string { return strconv.FormatInt(n, 10) }
