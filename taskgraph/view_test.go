package taskgraph_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: can people see what a task is about?

// requireGolden compares with testdata; PGWAKE_WRITE_GOLDEN=1 writes it anew.
func requireGolden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("PGWAKE_WRITE_GOLDEN") != "" {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	golden, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(golden), text)
}

func requireGoldens(t *testing.T, name string, v *taskgraph.View) {
	t.Helper()
	requireGolden(t, name+".dot", v.DOT())
	requireGolden(t, name+".mmd", v.Mermaid())
	requireGolden(t, name+".txt", v.Text(nil))
}

// running is a task with steps in all states.
func running() *taskgraph.View {
	after := func(names ...string) (list []taskgraph.Dependency) {
		for _, name := range names {
			list = append(list, taskgraph.Dependency{Step: name})
		}
		return list
	}
	return &taskgraph.View{
		Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", State: "steps_in_process", TaskID: "0197c1c8-54b4-7a3e-9d3c-2f1b1c9d0e11",
		Steps: []taskgraph.StepView{
			{Name: "reserve", State: "complete", Attempts: 2, MaxAttempts: 5, Duration: 1234 * time.Millisecond},
			{Name: "charge", State: "in_progress", Attempts: 1, MaxAttempts: 3, After: after("reserve"), Duration: 42 * time.Second},
			{Name: "ship", State: "pending", MaxAttempts: 3, After: []taskgraph.Dependency{{Step: "charge", If: `$.status == "paid" && $.total > 0`}, {Step: "pack"}}},
			{Name: "pack", State: "waiting_for_retry", Attempts: 1, MaxAttempts: 3, After: after("reserve"), Duration: 7 * time.Millisecond,
				Error: "connection refused:\n\tdial tcp"},
			{Name: "gift", State: "complete", Skipped: true, MaxAttempts: 3, After: after("reserve")},
			{Name: "audit", State: "error", Attempts: 3, MaxAttempts: 3, Error: strings.Repeat("no room left on the device ", 20), Duration: 3 * time.Hour},
			{Name: "enqueued", State: "enqueued", MaxAttempts: 0},
			{Name: "returned", State: "enqueued_for_orchestration", Attempts: 1, MaxAttempts: 1, Duration: 15 * time.Minute},
			{Name: "failed", State: "enqueued_as_error_for_orchestration", Attempts: 1, MaxAttempts: 1, Duration: 900 * time.Microsecond},
			{Name: "cancelled", State: "cancelled", MaxAttempts: 1},
			{Name: "by hand", State: "resolved_manually", Attempts: 1, MaxAttempts: 1},
			{Name: "last", State: "pending", MaxAttempts: 1, After: after("ship", "gift", "nobody", "cancelled")},
		},
	}
}

func TestView_ARunningTask_ShowsItsStates(t *testing.T) {
	t.Parallel()
	requireGoldens(t, "running", running())
	requireGolden(t, "running.ansi", running().Text(&taskgraph.TextOptions{Color: true}))
}

func TestView_ADefinition_HasNoStates(t *testing.T) {
	t.Parallel()
	requireGoldens(t, "definition", order().View())
}

func TestView_WithoutSteps_IsATitle(t *testing.T) {
	t.Parallel()
	requireGoldens(t, "empty", taskgraph.Define("n", "t", "1").View())
}

// names are such as break what is not careful.
var names = []string{
	`"quoted"`, `back\slash`, "two\nlines", "tab\there", "<b>bold</b><script>alert(1)</script>", "&amp; &#65;", "#quot;#35;", "**bold** _it_ `code` ~~x~~",
	"1. list", "- item", "# heading", "[link](http://x.y)", "](", "end", "fa:fa-ban", "%% comment", "%%{init: {}}%%", ":::class", "style x fill:#fff;", "a;b|c{d}(e)>f]",
	"", " ", "  two  blanks ", "héllo wörld", "日本語", "😀👨‍👩‍👧", "שלום", "مرحبا 123", "evil\u202egnp.exe", "zero\u200bwidth", "nul\x00", "bad\xff", "$math$", `\N\G\l`, "a -> b", "www.example.com",
	"e\u0301", "ﬂ°°60¶ßb>", "ﬂ°lt¶ßb>", "$$x^2$$", `a\name`, "fab:fa-x",
}

func strange() *taskgraph.View {
	v := &taskgraph.View{Namespace: "n", Name: "a\"b<i>\nשלום", Version: "1|2", State: "blocked_by_failures", TaskID: "t"}
	for i, name := range names {
		s := taskgraph.StepView{Name: name, State: "error", Attempts: 1, MaxAttempts: 1, Error: "it was " + name}
		if i > 0 {
			s.After = []taskgraph.Dependency{{Step: names[i-1], If: `$.x == "` + names[i-1] + `"`}}
		}
		v.Steps = append(v.Steps, s)
	}
	return v
}

func TestView_StrangeNames_AreShownAndMeanNothing(t *testing.T) {
	t.Parallel()
	v := strange()
	requireGoldens(t, "strange", v)
	text := v.Text(nil)
	require.NotContains(t, v.DOT()+v.Mermaid()+text, "\u202e")
	require.NotContains(t, v.DOT()+v.Mermaid()+text, "\x00")
	require.Len(t, strings.Split(text, "\n"), 1+1+1+1+1+2*len(names)+1)
	mermaid := strings.Split(v.Mermaid(), "\n")
	require.Len(t, mermaid, 1+1+len(names)+1+len(names)-1+1+1)
	for i := range names {
		line := strings.TrimSpace(mermaid[2+i])
		require.Regexp(t, `^s\d+\["([\pL\pM\p{Nd} _-]|#\d+;|<br/>)*"\]:::error$`, line)
	}
}

func TestView_Text_AThousandParents_NamesTen(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1")
	var names []string
	for i := range 1000 {
		names = append(names, fmt.Sprint("s", i))
		d.Step(names[i], "h")
	}
	text := d.Step("join", "h", taskgraph.After(names...)).View().Text(nil)
	require.Contains(t, text, "1      join  <- s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, 990 more\n")
}

// Nobody should have made it, and whoever looks for what is wrong should see it.
func TestView_Text_ACycle_IsShownLast(t *testing.T) {
	t.Parallel()
	text := taskgraph.Define("n", "t", "1").
		Step("a", "h", taskgraph.After("b")).Step("b", "h", taskgraph.After("a")).Step("c", "h").Step("d", "h", taskgraph.After("c")).Step("e", "h", taskgraph.After("b")).
		View().Text(nil)
	require.Equal(t, `n/t 1

level  step
0      c
1      d  <- c
-      a  <- b
-      b  <- a
-      e  <- b
`, text)
}
