package console_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// Every page, with something of everything and with what hostile people put there, in light and in dark, on a desk and on a phone.
func TestPages_EachOfThem_IsWholeAccessibleAndHarmless(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Options{Authorize: anybody})
	x := open(t, w.url, 1280, 900)
	examined := make(map[string]bool) // kinds of pages, first of those with what hostile people put there
	for i, of := range w.paths() {
		t.Log(of[0])
		x.again()
		x.run(chromedp.EmulateViewport(1280, 900), chromedp.Navigate(w.url+of[0]))
		x.reads(of[1])
		if of[0] == "nowhere" {
			x.forgive() // the browser notes the status
		}
		kind, _, _ := strings.Cut(of[0], "?")
		if !examined[kind] {
			x.accessible([]string{"light", "dark"}[i%2])
			x.contrasts([]string{"dark", "light"}[i%2]) // that is all in which they differ
		}
		examined[kind] = true
		x.run(chromedp.EmulateViewport(phoneWidth, phoneHeight))
		x.fits()
		if i < 2 { // the navigation is another one
			x.accessible([]string{"light", "dark"}[i])
		}
		x.harmless()
	}
	items, err := w.Peek(t.Context(), pgwake.Worker, &pgwake.PeekFilter{Namespace: "hostile"})
	require.NoError(t, err)
	events, err := w.bus.Find(t.Context(), &eventbus.FindFilter{Types: []string{"hostile"}})
	require.NoError(t, err)
	var more []string
	for _, i := range items {
		more = append(more, "item?all=Data&id="+text(i.ID))
	}
	for _, e := range events {
		more = append(more, "event?namespace=shop&all=Payload&id="+text(e.ID))
	}
	require.Len(t, more, 9)
	for _, path := range more { // pages of these kinds were examined above
		x.again()
		x.run(chromedp.Navigate(w.url + path))
		x.reads("Download")
		x.fits()
		x.harmless()
	}
}

// harmless requires that nothing of what users have written is more than text.
func (x *tab) harmless() {
	x.t.Helper()
	require.False(x.t, eval[bool](x, `/[\u202a-\u202e\u2066-\u2069\u0000-\u0008]/.test(document.title + document.body.innerText)`), "it could be turned around")
	require.Equal(x.t, "no", eval[string](x, `window.broken ? "yes" : "no"`), "what users have written is run")
	require.Equal(x.t, "console", eval[string](x, `document.documentElement.outerHTML.includes("style=") ? "style" : "console"`))
}

func TestKeys_LeadEverywhere(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	x := open(t, s.url, 1280, 900)
	key := func(keys string) { x.run(chromedp.KeyEvent(keys)) }
	_, err := chromedp.RunResponse(x.ctx, chromedp.KeyEvent("g"), chromedp.KeyEvent("d"))
	require.NoError(t, err)
	x.reads("There are no dead letters")
	key("/")
	require.Equal(t, "name", eval[string](x, `document.activeElement.name`))
	eval[chromedp.Void](x, `document.activeElement.blur()`)
	key("?")
	require.True(t, eval[bool](x, `document.getElementById("help").open`))
	key("\x1b")
	require.False(t, eval[bool](x, `document.getElementById("help").open`))
	eval[chromedp.Void](x, `document.getElementById("keys-on").click()`)
	key("?")
	require.False(t, eval[bool](x, `document.getElementById("help").open`), "the keys are left to others")
	x.visit(s.url + "letters")
	require.False(t, eval[bool](x, `document.getElementById("keys-on").checked`), "on other pages as well")
	eval[chromedp.Void](x, `document.getElementById("keys-on").click()`)
	for _, theme := range []string{"light", "dark", ""} {
		key("l")
		require.Equal(t, theme, eval[string](x, `document.documentElement.dataset.theme || ""`))
	}
	key("l")
	x.visit(s.url + "letters")
	require.Equal(t, "light", eval[string](x, `document.documentElement.dataset.theme`), "another page has it from the start")
	key("l")
	key("l")
	x.visit(s.url)
	require.False(t, eval[bool](x, `"theme" in document.documentElement.dataset`))
	key("\t")
	require.Equal(t, "#main", eval[string](x, `document.activeElement.getAttribute("href")`), "the first stop is the way past the navigation")
}

// What is held is not changed until it goes on, and what has the focus keeps it.
func TestLive_HeldOrFocused_StaysAsItIs(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	s.enqueue(t, "mail", "first", `{}`)
	x := open(t, s.url+"queues", 1280, 900)
	x.reads("first")
	x.run(chromedp.Focus(chromedp.CSS("#queues-h ~ .scroll a")))
	s.enqueue(t, "mail", "second", `{}`)
	x.reads("second")
	require.Equal(t, "first", eval[string](x, `document.activeElement.textContent`))
	x.run(chromedp.KeyEvent("p"))
	s.enqueue(t, "mail", "third", `{}`)
	x.run(chromedp.Poll[chromedp.Void](`document.getElementById("pulse").dataset.state == "held"`))
	seen := s.takenBy(t, x, 2)
	require.NotContains(t, seen, "third")
	x.run(chromedp.KeyEvent("p"))
	x.reads("third")
}

// What is chosen stays chosen, and what is next to it does not become so, when something comes above it.
func TestLive_LetterComesAboveOneThatIsChosen_TheChoiceStays(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, &console.Options{Authorize: anybody})
	s.bury(t, "first", "mail")
	s.bury(t, "second", "mail")
	x := open(t, s.url+"letters", 1280, 900)
	row := func(name string) string {
		return `[...document.querySelectorAll("tbody tr")].find(r => r.innerText.includes("` + name + `")).querySelector("input")`
	}
	eval[chromedp.Void](x, row("first")+`.click()`)
	eval[chromedp.Void](x, row("first")+`.focus()`)
	s.bury(t, "third", "mail")
	x.reads("third")
	require.Equal(t, []bool{true, false, false}, eval[[]bool](x, `[`+row("first")+`, `+row("second")+`, `+row("third")+`].map(b => b.checked)`))
	require.True(t, eval[bool](x, row("first")+` === document.activeElement`))
	letters, err := s.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	_, err = s.PurgeDeadLetters(t.Context(), &pgwake.DeadLetterFilter{IDs: []int64{letters[1].ID}})
	require.NoError(t, err)
	x.run(chromedp.Poll[chromedp.Void](`document.querySelectorAll("tbody tr").length == 2`))
	require.Equal(t, []bool{true, false}, eval[[]bool](x, `[`+row("first")+`, `+row("third")+`].map(b => b.checked)`))
	require.True(t, eval[bool](x, row("first")+` === document.activeElement`))
	_, err = s.PurgeDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	x.reads("There are no dead letters")
	require.Equal(t, "main", eval[string](x, `document.activeElement.id`), "what had the focus is gone, and the next is near")
}

// takenBy is what a page has after so many more moments.
func (s *site) takenBy(t *testing.T, x *tab, moments int) string {
	t.Helper()
	stream := s.listen(t, "stream/queues")
	for range moments {
		stream.next("live")
	}
	return x.text()
}

func TestPager_LeadsThroughAListAndBack(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil, nil)
	for i := range 60 {
		s.enqueue(t, fmt.Sprintf("job-%03d", i), "n", `{}`)
	}
	x := open(t, s.url+"items?namespace=n", 1280, 900)
	for _, first := range []string{"job-000", "job-025", "job-050"} {
		x.reads(first)
		require.Contains(t, eval[string](x, `document.querySelector("tbody tr").innerText`), first)
		if first != "job-050" {
			_, err := chromedp.RunResponse(x.ctx, chromedp.KeyEvent("]"))
			require.NoError(t, err)
		}
	}
	_, err := chromedp.RunResponse(x.ctx, chromedp.KeyEvent("["))
	require.NoError(t, err)
	x.reads("job-000")
}
