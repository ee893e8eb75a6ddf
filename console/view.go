package console

import (
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what is a page, and what do templates have to work with?

//go:embed templates/*.html
var templateFiles embed.FS

// page is a kind of page.
type page struct {
	name, title string
	in          string // name of the page in the navigation that it belongs to
	templates   *template.Template

	// load returns what the templates show. It may ask the database.
	load func(v *view) (any, error)

	// hub: what is live on the page comes from the hub. Otherwise it is loaded anew, which takes so many statements; 0: nothing is live.
	hub        bool
	statements int
}

// view is what a template shows: one page for one request.
type view struct {
	c    *console
	r    *http.Request
	page *page

	Title string
	Now   time.Time
	Query url.Values
	Body  any
	Live  bool // it is a part of a page, for a stream
	Early bool // it is the top of a page, and the rest is searched for
}

func (c *console) view(r *http.Request, of *page) *view {
	return &view{c: c, r: r, page: of, Title: of.title, Now: time.Now(), Query: r.URL.Query()}
}

// newPage makes a page of the template file of its name, which defines "content" and, if something is live, "live".
func newPage(name, title string, load func(*view) (any, error)) *page {
	of := &page{name: name, title: title, in: name, load: load}
	of.templates = template.Must(template.Must(shared.Clone()).ParseFS(templateFiles, "templates/"+name+".html"))
	return of
}

func (p *page) below(name string) *page { p.in = name; return p }
func (p *page) fromHub() *page          { p.hub = true; return p }
func (p *page) every(statements int) *page {
	p.statements = statements
	return p
}

// shared is what all pages have.
var shared = template.Must(template.New("").Funcs(template.FuncMap{
	"asset": func(name string) string { return assets[name].path },
	"count": count, "span": glance.Span, "size": func(n int) string { return glance.Size(int64(n)) }, "bound": glance.Bound,
	"short": func(most int, text string) string { return glance.Short(text, most) }, "line": glance.OneLine, "lines": glance.Lines,
	"rate": rate, "key": func(k int32) string { return fmt.Sprintf("%08x", uint32(k)) }, "dash": dash, "names": names, "link": link,
	"add": func(a, b int) int { return a + b }, "glyph": glyph, "tone": tone, "percent": percent, "list": func(v ...any) []any { return v }, "words": words, "reason": func(name string) string { return reasons[name] },
}).ParseFS(templateFiles, "templates/layout.html", "templates/parts.html"))

// Nav is the navigation, with the page that it is.
func (v *view) Nav() []navItem {
	all := []navItem{{"", "Overview", "overview"}, {"queues", "Queues", "queues"}, {"nodes", "Nodes", "nodes"}, {"instances", "Instances", "instances"}, {"tasks", "Tasks", "tasks"},
		{"events", "Events", "events"}, {"letters", "Dead letters", "letters"}, {"schedules", "Schedules", "schedules"}}
	return all
}

type navItem struct{ Path, Title, Page string }

// Here reports whether an item of the navigation is where the page belongs.
func (v *view) Here(page string) bool { return page == v.page.in }

// Root leads to where the console is mounted.
func (v *view) Root() string {
	if n := strings.Count(v.r.URL.Path, "/"); n > 1 {
		return strings.Repeat("../", n-1)
	}
	return "./"
}

// Stream is where the page hears of changes; "": it does not.
func (v *view) Stream() string {
	if !v.page.hub && v.page.statements == 0 {
		return ""
	}
	q := v.lasting()
	if len(q) == 0 {
		return "stream/" + v.page.name
	}
	return "stream/" + v.page.name + "?" + q.Encode()
}

// lasting are the parameters of the request, without those that are for one answer.
func (v *view) lasting() url.Values {
	q := v.r.URL.Query()
	for _, once := range []string{"done", "n"} {
		q.Del(once)
	}
	return q
}

// Schema is that of the Provider.
func (v *view) Schema() string { return v.c.p.Schema() }

// CanAct reports whether there are to be buttons.
func (v *view) CanAct() bool { return v.c.o.Authorize != nil }

// Theme is what whoever looks has chosen; "": as the system has it. It is in a cookie, which the script writes: so a page has it before it is painted,
// and the script is not waited for.
func (v *view) Theme() string {
	c, err := v.r.Cookie("pgwake-theme")
	if err != nil || c.Value != "light" && c.Value != "dark" {
		return ""
	}
	return c.Value
}

// Back is the page, for an action to return to.
func (v *view) Back() string {
	q := v.lasting()
	if v.page == overviewPage {
		return "./"
	}
	if len(q) == 0 {
		return v.page.name
	}
	return v.page.name + "?" + q.Encode()
}

// Ago is how long ago an instant of the server's clock was, or how far off it is.
func (v *view) Ago(at time.Time) string {
	if at.IsZero() {
		return "–"
	}
	return glance.DueIn(v.c.p.LocalTime(at), v.Now)
}

// Since is how long ago an instant of this machine was.
func (v *view) Since(at time.Time) string {
	if at.IsZero() {
		return "–"
	}
	return glance.Span(max(0, v.Now.Sub(at)))
}

// At is an instant, for those who want to know it exactly.
func (v *view) At(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format("2006-01-02 15:04:05.000 UTC")
}

// Value is a parameter of the request.
func (v *view) Value(name string) string { return v.Query.Get(name) }

// text is a parameter of the request, without blanks around it.
func (v *view) text(name string) string { return strings.TrimSpace(v.Query.Get(name)) }

// number is a parameter of the request; 0 if it is missing.
func (v *view) number(name string) (int64, error) {
	text := v.text(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, badRequest("%s is to be a number", name)
	}
	return n, nil
}

// queue is a parameter of the request.
func (v *view) queue(name string, otherwise pgwake.Queue) (pgwake.Queue, error) {
	if text := v.text(name); text != "" {
		return queueNamed(text)
	}
	return otherwise, nil
}

func queueNamed(text string) (pgwake.Queue, error) {
	switch text {
	case pgwake.Worker.String():
		return pgwake.Worker, nil
	case pgwake.Orchestrator.String():
		return pgwake.Orchestrator, nil
	}
	return 0, badRequest("there is no queue of that name")
}

// With is a link to the page with other parameters, which come as name and value by turns.
func (v *view) With(pairs ...string) string {
	q := v.lasting()
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] == "" {
			q.Del(pairs[i])
		} else {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return v.page.name + "?" + q.Encode()
}

// link is a link to a page with parameters, which come as name and value by turns; those without a value are left out.
func link(page string, pairs ...any) string {
	q := make(url.Values)
	for i := 0; i+1 < len(pairs); i += 2 {
		if value := fmt.Sprint(pairs[i+1]); value != "" {
			q.Set(fmt.Sprint(pairs[i]), value)
		}
	}
	if len(q) == 0 {
		return page
	}
	return page + "?" + q.Encode()
}

// count is a number with thin spaces between its thousands.
func count(v any) string {
	text := fmt.Sprint(v)
	digits := strings.TrimPrefix(text, "-")
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "\u202f" + digits[i:]
	}
	if strings.HasPrefix(text, "-") {
		return "−" + digits
	}
	return digits
}

// rate is a number of things a second.
func rate(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return count(int64(v + 0.5))
}

func dash(text string) string {
	if text == "" {
		return "–"
	}
	return text
}

// names are those that a lane is for; nil is all.
func names(all []string) string {
	if all == nil {
		return "all"
	}
	shown := make([]string, 0, len(all))
	for i, n := range all {
		if i == 8 {
			shown = append(shown, fmt.Sprintf("and %d more", len(all)-i))
			break
		}
		if n == "" {
			n = "(none)"
		}
		shown = append(shown, glance.Short(n, 40))
	}
	return strings.Join(shown, ", ")
}

// words is a name of the program's as people write it.
func words(name any) string { return strings.ReplaceAll(fmt.Sprint(name), "_", " ") }

func percent(part, whole int64) int64 {
	if whole <= 0 {
		return 0
	}
	return part * 100 / whole
}
