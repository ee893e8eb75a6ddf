package main

import (
	"fmt"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how does the live view look?

// topPages are the pages, in the order of the tab key. The first has a little of everything.
var topPages = []struct {
	name string
	draw func(*topModel) []string
}{
	{"overview", (*topModel).overview},
	{"queues", (*topModel).queues},
	{"nodes", (*topModel).nodes},
	{"lanes", (*topModel).lanes},
	{"wake reasons", (*topModel).reasons},
}

func (m *topModel) View() tea.View {
	v := tea.NewView(m.text())
	v.AltScreen = true
	v.WindowTitle = "pgwake top"
	return v
}

// text fills the window: the head, a part of the page, and the help in the last lines.
func (m *topModel) text() string {
	head := m.head()
	foot := strings.Split(m.help.View(m.keys), "\n")
	var body []string
	if m.seen > 0 {
		body = topPages[m.page].draw(m)
	}
	room := max(1, m.height-len(head)-len(foot)-1)
	if m.come == nil { // it is printed, and not to be looked at through a window
		room, foot = len(body), nil
	}
	m.offset = min(m.offset, max(0, len(body)-room))
	body = body[m.offset:min(len(body), m.offset+room)]
	lines := append(head, body...)
	if m.come != nil {
		for len(lines) < m.height-len(foot) {
			lines = append(lines, "")
		}
	}
	lines = append(lines, foot...)
	for i := range lines {
		lines[i] = strings.TrimRight(ansi.Truncate(lines[i], m.width, "…"), " ")
	}
	return strings.Join(lines, "\n")
}

func (m *topModel) head() []string {
	s := m.a.style
	name := s.head.Render("pgwake top") + "  "
	if m.held {
		name += s.warn.Render("held") + "  "
	}
	if m.seen > 0 {
		name += s.faint.Render(m.now.At.Format(time.TimeOnly)) + "  "
	}
	lines := []string{name + m.title}
	if m.come != nil {
		var tabs []string
		for i, p := range topPages {
			style := s.faint
			if i == m.page {
				style = s.mark.Bold(true)
			}
			tabs = append(tabs, style.Render(p.name))
		}
		line := strings.Join(tabs, s.faint.Render(" | "))
		if ansi.StringWidth(line) > m.width {
			line = tabs[m.page] + s.faint.Render(fmt.Sprintf(" (%d of %d)", m.page+1, len(tabs)))
		}
		lines = append(lines, line)
	}
	if m.err != nil {
		lines = append(lines, s.fail.Render(glance.OneLine(strings.Join(strings.Fields(m.a.withoutSecrets(m.err.Error())), " "))))
	}
	if m.seen == 0 && m.err == nil {
		lines = append(lines, s.faint.Render("looking…"))
	}
	return append(lines, "")
}

// bars are those of a sparkline.
var bars = []rune("▁▂▃▄▅▆▇█")

// sparkline draws values, the latest of them if there is no room for all; the highest fills its place.
func (m *topModel) sparkline(values []float64) string {
	values = values[max(0, len(values)-max(1, m.width-12)):]
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	var b strings.Builder
	for _, v := range values {
		i := 0
		if most > 0 {
			i = int(v / most * float64(len(bars)-1))
		}
		b.WriteRune(bars[i])
	}
	return b.String()
}

func (m *topModel) overview() []string {
	s, t, c := m.a.style, glance.SumsOf(m.now.Depths), m.change
	due := s.ok
	if wait := m.now.At.Sub(m.now.Oldest); !m.now.Oldest.IsZero() && wait > time.Minute {
		due = s.warn
	}
	letters := s.faint
	if m.now.Letters > 0 {
		letters = s.warn
	}
	lines := m.wrapped("due "+due.Render(text(t.Due)), fmt.Sprintf("delayed %d", t.Delayed), fmt.Sprintf("leased %d", t.Leased), fmt.Sprintf("kept back %d", t.KeptBack),
		"dead letters "+letters.Render(text(m.now.Letters)))
	lines = append(lines, m.wrapped("oldest due "+due.Render(m.since(m.now.Oldest)), fmt.Sprintf("in %.1f/s", c.Came), fmt.Sprintf("out %.1f/s", c.Went),
		fmt.Sprintf("queries for work %.1f/s", c.Looks))...)
	lines = append(lines,
		fmt.Sprintf("wake latency p50 %s   p99 %s", glance.Bound(c.Latency.Quantile(0.5)), glance.Bound(c.Latency.Quantile(0.99))),
		s.mark.Render(fmt.Sprintf("%-11s", "latency p99"))+" "+m.sparkline(m.latencies),
		s.mark.Render(fmt.Sprintf("%-11s", "out"))+" "+m.sparkline(m.rates))
	if len(m.now.Paused) > 0 {
		lines = append(lines, s.warn.Render("paused: "+glance.OneLine(few(m.now.Paused))))
	}
	for _, part := range [][]string{m.queues(), m.nodes(), m.reasons()} {
		lines = append(append(lines, ""), part...)
	}
	return lines
}

// drawn are the lines of a table. Where the window is too narrow it does without the spare columns, the first of them first.
func (m *topModel) drawn(r *rows, spare ...string) []string {
	if len(r.cells) == 0 {
		return []string{m.a.style.faint.Render(r.none)}
	}
	for _, head := range spare {
		if r.width() <= m.width {
			break
		}
		r.drop(head)
	}
	return strings.Split(m.a.drawRows(r), "\n")
}

// wrapped are the parts, as many in a line as the window has room for.
func (m *topModel) wrapped(parts ...string) (lines []string) {
	const between = "   "
	for _, part := range parts {
		last := len(lines) - 1
		if last >= 0 && ansi.StringWidth(lines[last]+between+part) <= m.width {
			lines[last] += between + part
		} else {
			lines = append(lines, part)
		}
	}
	return lines
}

func (m *topModel) queues() []string {
	table := &rows{heads: []string{"QUEUE", "NAMESPACE", "TAG", "DUE", "DELAYED", "LEASED", "KEPT BACK", "OLDEST"}, none: "both queues are empty"}
	for _, d := range m.now.Depths {
		oldest := "-"
		if d.Due > 0 {
			oldest = m.since(d.OldestDue)
		}
		table.add(d.Queue.String(), glance.Short(d.Namespace, max(10, m.width/2)), orDash(d.Tag), text(d.Due), text(d.Delayed), text(d.Leased), text(d.KeptBack), oldest)
	}
	return m.drawn(table, "KEPT BACK", "TAG", "LEASED", "DELAYED", "QUEUE")
}

func (m *topModel) nodes() []string {
	table := &rows{heads: []string{"NODE", "HOST", "PID", "MODE", "STATE", "WAIT", "ITEMS", "P99", "CLOCK", "LANES"}, none: "no node listens"}
	var states []string
	for _, n := range m.now.Nodes {
		host, pid, mode, waits, items, p99, clock := orDash(n.Address), "-", "-", "-", "-", "-", "-"
		state := "no answer"
		if r, said := m.now.Reports[n.Key]; said {
			w := r.Stats.Worker
			host, pid, mode = r.Host, text(int64(r.PID)), r.Stats.Mode.String()
			waits = text(int64(w.Parked + r.Stats.Orchestrator.Parked))
			items = text(w.Items + r.Stats.Orchestrator.Items)
			p99, clock = glance.Bound(w.WakeLatency.Quantile(0.99)), glance.Span(r.Stats.ClockOffset)
			state = glance.NodeState(r)
		}
		if !n.Listening {
			state = "died"
		}
		states = append(states, state)
		table.add(fmt.Sprintf("%08x", uint32(n.Key)), glance.Short(host, 24), pid, mode, glance.Short(state, 50), waits, items, p99, clock, text(int64(len(n.Lanes))))
	}
	table.style = func(row int, head string) *lipgloss.Style {
		if head != "STATE" {
			return nil
		}
		if states[row] == "ok" {
			return &m.a.style.ok
		}
		return &m.a.style.warn
	}
	return m.drawn(table, "CLOCK", "PID", "LANES", "P99", "ITEMS", "WAIT", "MODE")
}

func (m *topModel) lanes() []string {
	table := &rows{heads: []string{"NODE", "QUEUE", "NAMESPACES", "TAGS OR QUEUE NAMES", "DISPATCHERS", "WAITS", "FANOUT"}, none: "nobody fetches, on the nodes that listen"}
	for _, n := range m.now.Nodes {
		for _, l := range n.Lanes {
			waits := "busy"
			if l.Waiting {
				waits = "waits"
			}
			table.add(fmt.Sprintf("%08x", uint32(n.Key)), l.Queue.String(), glance.Short(oneOrAll(l.Namespaces), 40), glance.Short(oneOrAll(l.Labels), 40), text(int64(l.Dispatchers)), waits, text(int64(l.Fanout)))
		}
	}
	return m.drawn(table, "FANOUT", "NODE", "TAGS OR QUEUE NAMES", "QUEUE")
}

func oneOrAll(names []string) string {
	if names == nil {
		return "*"
	}
	shown := make([]string, len(names))
	for i, n := range names {
		if shown[i] = n; n == "" {
			shown[i] = "(none)"
		}
	}
	return strings.Join(shown, ", ")
}

func (m *topModel) reasons() []string {
	all := m.now.Reasons()
	table := &rows{heads: []string{"WAKE REASON", "FINDS", "NOW", ""}, none: "no node has found anything yet"}
	var most int64
	for _, n := range all {
		most = max(most, n)
	}
	for _, reason := range glance.ByCount(all) {
		if all[reason] > 0 {
			table.add(reason, text(all[reason]), text(m.change.Found[reason]), strings.Repeat("█", max(1, int(30*all[reason]/most))))
		}
	}
	return m.drawn(table)
}
