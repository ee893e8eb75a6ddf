package console_test

import (
	"context"
	"html"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: is what is acted upon what the page has shown?

// form is what the button of a verb sends that is on a page; of those on the page, the first whose form has this text.
func (s *site) form(t *testing.T, path, verb, has string) url.Values {
	t.Helper()
	status, body, _ := s.get(t, path)
	require.Equal(t, http.StatusOK, status, body)
	for _, text := range regexp.MustCompile(`(?s)<form class="act".*?</form>`).FindAllString(body, -1) {
		if !strings.Contains(text, `value="`+verb+`"`) || !strings.Contains(text, has) {
			continue
		}
		fields := url.Values{"verb": {verb}}
		if id := regexp.MustCompile(`<form class="act" id="([^"]+)"`).FindStringSubmatch(text); id != nil { // fields may be elsewhere
			text += strings.Join(regexp.MustCompile(`<input type="hidden" form="`+id[1]+`"[^>]*>`).FindAllString(body, -1), "")
		}
		for _, f := range regexp.MustCompile(`<input type="hidden"[^>]* name="([^"]*)" value="([^"]*)">`).FindAllStringSubmatch(text, -1) {
			fields.Set(f[1], html.UnescapeString(f[2]))
		}
		return fields
	}
	require.Fail(t, "there is no such button", "%s %s: %s", path, verb, body)
	return nil
}

// press sends a form, with the answer to the question that may come, and returns what came of it.
func (s *site) press(t *testing.T, form url.Values) (status int, body string) {
	t.Helper()
	sure := url.Values{"sure": {"yes"}}
	for name, values := range form {
		sure[name] = values
	}
	r, err := http.NewRequest(http.MethodPost, s.url+"act", strings.NewReader(sure.Encode()))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", strings.TrimSuffix(s.url, "/ops/console/"))
	answer, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(text)
}

// stale asserts that a form is refused since there is something else now, before and after the question.
func (s *site) stale(t *testing.T, form url.Values) {
	t.Helper()
	require.NotEmpty(t, form.Get("seen"), "%v", form)
	status, body := s.press(t, form)
	require.Equal(t, http.StatusConflict, status, body)
	require.Contains(t, body, "is no longer what the page showed")
	require.Equal(t, http.StatusConflict, s.post(t, strings.TrimSuffix(s.url, "/ops/console/"), form), "it does not even ask")
}

func TestActions_TaskIsNotWhatThePageShowed_IsRefused(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{Authorize: anybody}, false)
	page := "task?id=" + w.task
	failures := func() (n int) {
		all, err := w.engine.AllTransitions(t.Context(), w.task)
		require.NoError(t, err)
		for _, tr := range all {
			if tr.StepName == nil && tr.ToState == string(taskgraph.TaskBlockedByFailures) {
				n++
			}
		}
		return n
	}
	verbs := []string{"retry-task", "resolve-task", "cancel-task"}
	shown := map[string]url.Values{}
	for _, verb := range verbs {
		shown[verb] = w.form(t, page, verb, "")
	}
	// Somebody else has the step run again, and it fails once more: of that failure nobody here knows.
	status, body := w.press(t, w.form(t, page, "retry-task", ""))
	require.Equal(t, http.StatusSeeOther, status, body)
	require.Eventually(t, func() bool { return failures() == 2 }, patience, pollEvery)
	for _, verb := range verbs {
		w.stale(t, shown[verb])
	}
	require.Equal(t, 2, failures())
	shown["cancel-task"] = w.form(t, page, "cancel-task", "")
	close(w.declined)
	status, _ = w.press(t, w.form(t, page, "retry-task", ""))
	require.Equal(t, http.StatusSeeOther, status)
	require.Eventually(t, func() bool {
		state, err := w.engine.CurrentTaskState(t.Context(), w.task)
		return err == nil && state == taskgraph.TaskComplete
	}, patience, pollEvery)
	w.stale(t, shown["cancel-task"])
}

// A task that goes on changes its state all the time, and is the same task.
func TestActions_TaskGoesOn_CanBeCancelled(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, &pgwake.Config{})
	e, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	s := newSite(t, p, &console.Options{Authorize: anybody, Tasks: e.Graph})
	begun, end := make(chan struct{}, 1), make(chan struct{})
	e.Handle("waits", func(context.Context, *taskgraph.Step) (any, error) {
		begun <- struct{}{}
		<-end
		return nil, nil
	})
	require.NoError(t, e.Register(t.Context(), taskgraph.Define("shop", "slow", "1.0.0").Step("first", "waits")))
	task, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "slow", Version: "1.0.0"})
	require.NoError(t, err)
	form := s.form(t, "task?id="+task.ID, "cancel-task", "")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = e.Run(ctx) }()
	t.Cleanup(func() { close(end); cancel(); <-ended })
	<-begun
	status, body := s.press(t, form)
	require.Equal(t, http.StatusSeeOther, status, body)
}

func TestActions_InstanceIsAnotherOfTheSameID_IsRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Authorize: anybody})
	s.acked(t, "order-7", "mine", "", pgwake.StatusRunning)
	shown := s.form(t, "instance?id=order-7", "delete-instance", "")
	_, err := s.DeleteInstance(t.Context(), "order-7", &pgwake.DeleteOptions{Force: true})
	require.NoError(t, err)
	s.acked(t, "order-7", "mine", "", pgwake.StatusRunning)
	s.stale(t, shown)
	s.acked(t, "order-8", "mine", "", pgwake.StatusCompleted)
	ended := s.form(t, "instance?id=order-8", "delete-instance", "")
	for id, form := range map[string]url.Values{"order-7": s.form(t, "instance?id=order-7", "delete-instance", ""), "order-8": ended} {
		status, body := s.press(t, form)
		require.Equal(t, http.StatusSeeOther, status, body)
		_, err = s.GetInstanceInfo(t.Context(), id)
		require.ErrorIs(t, err, pgwake.ErrNotFound)
	}
}

func TestActions_ScheduleIsAnotherOfTheSameName_IsRefused(t *testing.T) {
	t.Parallel()
	w := makeWorld(t, console.Options{Authorize: anybody}, false)
	run, pause := w.form(t, "schedules", "run-schedule", "nightly-report"), w.form(t, "schedules", "pause-schedule", "nightly-report")
	_, err := w.bus.RunSchedule(t.Context(), "nightly-report")
	require.NoError(t, err)
	status, body := w.press(t, run)
	require.Equal(t, http.StatusSeeOther, status, "that it came meanwhile makes no other of it: "+body)
	_, err = w.bus.Schedule(t.Context(), eventbus.Schedule{Name: "nightly-report", Cron: "30 4 * * *", TimeZone: "Europe/Berlin", Work: "delete.everything"})
	require.NoError(t, err)
	w.stale(t, run)
	w.stale(t, pause)
	status, _ = w.press(t, w.form(t, "schedules", "pause-schedule", "nightly-report"))
	require.Equal(t, http.StatusSeeOther, status)
	resume := w.form(t, "schedules", "resume-schedule", "nightly-report")
	_, err = w.bus.ResumeSchedule(t.Context(), "nightly-report")
	require.NoError(t, err)
	w.stale(t, resume)
	_, err = w.bus.DeleteSchedule(t.Context(), "nightly-report")
	require.NoError(t, err)
	status, _ = w.press(t, run)
	require.Equal(t, http.StatusNotFound, status)
}

// Nobody has said yes to what died while the question was on the screen.
func TestActions_LettersDieAfterThePage_AllAreThoseOfThePage(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Authorize: anybody})
	for range 60 { // on three pages
		s.bury(t, "before", "shop")
	}
	first := s.form(t, "letters", "purge", "Purge all")
	_, body, _ := s.get(t, "letters")
	next := regexp.MustCompile(`<a href="([^"]+)" rel="next"`).FindStringSubmatch(body)
	require.NotNil(t, next, body)
	second := s.form(t, html.UnescapeString(next[1]), "redrive", "Redrive all")
	require.Equal(t, first.Get("until"), second.Get("until"), "the other pages are of the same list")
	s.bury(t, "meanwhile", "shop")
	status, body := s.press(t, first)
	require.Equal(t, http.StatusSeeOther, status, body)
	left, err := s.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Equal(t, "meanwhile", left[0].Name)
	status, _ = s.press(t, second)
	require.Equal(t, http.StatusSeeOther, status)
	left, err = s.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Equal(t, http.StatusBadRequest, s.post(t, strings.TrimSuffix(s.url, "/ops/console/"), url.Values{"verb": {"redrive"}, "all": {"yes"}, "until": {"soon"}}))
}
