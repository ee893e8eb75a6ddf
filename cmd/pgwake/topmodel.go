package main

import (
	"time"

	"charm.land/bubbles/v2/help"
	"charm.land/bubbles/v2/key"
	tea "charm.land/bubbletea/v2"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what does the live view do with keys and pictures?

// topKeys are the keys, with what they are for.
type topKeys struct {
	next, back, up, down, pause, help, quit key.Binding

	narrow bool // one below the other
}

func newTopKeys() topKeys {
	of := func(what string, keys ...string) key.Binding {
		return key.NewBinding(key.WithKeys(keys...), key.WithHelp(keys[0], what))
	}
	return topKeys{next: of("next page", "tab", "right", "l"), back: of("page before", "shift+tab", "left", "h"), up: of("up", "up", "k"), down: of("down", "down", "j"),
		pause: of("hold, go on", "p", "space"), help: of("help", "?"), quit: of("quit", "q", "esc", "ctrl+c")}
}

func (k topKeys) ShortHelp() []key.Binding {
	if k.narrow {
		return []key.Binding{k.help, k.quit, k.next}
	}
	return []key.Binding{k.next, k.pause, k.help, k.quit}
}

func (k topKeys) FullHelp() [][]key.Binding {
	if k.narrow {
		return [][]key.Binding{{k.next, k.back, k.up, k.down, k.pause, k.help, k.quit}}
	}
	return [][]key.Binding{{k.next, k.back}, {k.up, k.down}, {k.pause, k.help, k.quit}}
}

// history is how many pictures a sparkline shows.
const history = 60

// topModel is the live view.
type topModel struct {
	a     *app
	title string
	come  <-chan picture
	keys  topKeys
	help  help.Model

	now    picture // the last one that told something
	seen   int     // so many
	change glance.Change
	err    error // of the latest look

	latencies, rates []float64 // the latest last; of a time in which nothing was found, 0

	page, offset  int
	held          bool
	width, height int
}

func newTopModel(a *app, title string, come <-chan picture) *topModel {
	return &topModel{a: a, title: title, come: come, keys: newTopKeys(), help: help.New(), width: 120, height: 40}
}

// pictureMsg is a picture that came; more says that others may.
type pictureMsg struct {
	picture
	more bool
}

func (m *topModel) Init() tea.Cmd { return m.await }

func (m *topModel) await() tea.Msg {
	pic, more := <-m.come
	return pictureMsg{pic, more}
}

func (m *topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
		m.help.SetWidth(msg.Width)
		m.keys.narrow = msg.Width < 60
	case pictureMsg:
		if !msg.more {
			return m, tea.Quit
		}
		if !m.held {
			m.take(msg.picture)
		}
		return m, m.await
	case tea.KeyPressMsg:
		return m, m.press(msg)
	}
	return m, nil
}

func (m *topModel) press(msg tea.KeyPressMsg) tea.Cmd {
	switch k := m.keys; {
	case key.Matches(msg, k.quit):
		return tea.Quit
	case key.Matches(msg, k.next):
		m.page, m.offset = (m.page+1)%len(topPages), 0
	case key.Matches(msg, k.back):
		m.page, m.offset = (m.page+len(topPages)-1)%len(topPages), 0
	case key.Matches(msg, k.down):
		m.offset++
	case key.Matches(msg, k.up):
		m.offset = max(0, m.offset-1)
	case key.Matches(msg, k.pause):
		m.held = !m.held
	case key.Matches(msg, k.help):
		m.help.ShowAll = !m.help.ShowAll
	}
	return nil
}

// take takes a picture in. Of one that tells nothing but an error the one before stays.
func (m *topModel) take(pic picture) {
	m.err = pic.err
	if pic.err != nil {
		return
	}
	if m.seen > 0 {
		m.change = glance.ChangeOf(m.now.Picture, pic.Picture)
		m.latencies = pushed(m.latencies, inMillis(m.change.Latency.Quantile(0.99)))
		m.rates = pushed(m.rates, m.change.Went)
	}
	m.now = pic
	m.seen++
}

func pushed(all []float64, v float64) []float64 {
	all = append(all, v)
	return all[max(0, len(all)-history):]
}

// since is how long ago an instant was when the picture was taken.
func (m *topModel) since(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return glance.Span(max(0, m.now.At.Sub(at)))
}
