package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"charm.land/lipgloss/v2"
	"charm.land/lipgloss/v2/table"
	"github.com/charmbracelet/colorprofile"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/term"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: how is what a command has to say printed, for people and for programs?

func newApp(w world) *app {
	a := &app{world: w, style: newStyles()}
	a.output = &checkedOutput{w: colorprofile.NewWriter(w.out, w.environ)}
	a.out, a.err, a.color = a.output, colorprofile.NewWriter(w.err, w.environ), a.output.w.Profile >= colorprofile.ANSI
	return a
}

// checkedOutput takes away the colours that cannot be shown, all of them where there is no terminal. It keeps the first error: what was not
// written was not done.
type checkedOutput struct {
	w   *colorprofile.Writer
	err error
}

func (o *checkedOutput) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	if o.err == nil {
		o.err = err
	}
	return n, err
}

func (a *app) withoutColor() {
	a.color = false
	a.output.w.Profile = colorprofile.NoTTY
	if w, ok := a.err.(*colorprofile.Writer); ok {
		w.Profile = min(w.Profile, colorprofile.ASCII) // a progress bar is drawn all the same
	}
}

// isTerminal reports whether people read along.
func (a *app) isTerminal() bool {
	f, ok := a.output.w.Forward.(term.File)
	return ok && term.IsTerminal(f.Fd())
}

func (a *app) printf(format string, args ...any) { fmt.Fprintf(a.out, format, args...) }

func (a *app) printJSON(v any) error { return encode(a.out, "  ", v) }

// printLine prints one JSON value in one line, for what goes on.
func (a *app) printLine(v any) error { return encode(a.out, "", v) }

// encode prints JSON. What a terminal might heed is escaped, which JSON itself asks of the first 32 characters alone.
func encode(to io.Writer, indent string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return err
	}
	var escaped []byte
	for _, r := range b.String() {
		switch {
		case r == '\n' || !glance.Unprintable(r):
			escaped = utf8.AppendRune(escaped, r)
		case r > 0xFFFF:
			high, low := utf16.EncodeRune(r)
			escaped = fmt.Appendf(escaped, `\u%04x\u%04x`, high, low)
		default:
			escaped = fmt.Appendf(escaped, `\u%04x`, r)
		}
	}
	_, err := to.Write(escaped)
	return err
}

// moment is an instant in JSON, for which RFC 3339 has years of four digits, and PostgreSQL, and so whoever adds an item by SQL, has others.
type moment struct{ time.Time }

func (m moment) MarshalJSON() ([]byte, error) {
	if data, err := m.Time.MarshalJSON(); err == nil {
		return data, nil
	}
	return []byte(strconv.Quote(m.UTC().Format(time.RFC3339Nano))), nil
}

// rows are a table for people.
type rows struct {
	heads []string
	cells [][]string
	none  string // what to say in place of an empty table
	style func(row int, head string) *lipgloss.Style
}

func (r *rows) add(cells ...string) { r.cells = append(r.cells, cells) }

// width is how many columns of a terminal it takes.
func (r *rows) width() (sum int) {
	for i, head := range r.heads {
		most := ansi.StringWidth(head)
		for _, cells := range r.cells {
			most = max(most, ansi.StringWidth(cells[i]))
		}
		sum += most
	}
	return sum + 2*(len(r.heads)-1)
}

// drop takes a column out.
func (r *rows) drop(head string) {
	at := slices.Index(r.heads, head)
	r.heads = slices.Delete(r.heads, at, at+1)
	for i := range r.cells {
		r.cells[i] = slices.Delete(r.cells[i], at, at+1)
	}
}

func (a *app) printRows(r *rows) {
	if len(r.cells) == 0 {
		a.printf("%s\n", a.style.faint.Render(r.none))
		return
	}
	for line := range strings.Lines(a.drawRows(r)) {
		a.printf("%s\n", strings.TrimRight(line, " \n"))
	}
}

func (a *app) drawRows(r *rows) string {
	for _, cells := range r.cells {
		for i := range cells {
			cells[i] = glance.LeftToRight(glance.OneLine(cells[i]))
		}
	}
	t := table.New().Headers(r.heads...).Rows(r.cells...).Wrap(false).
		Border(lipgloss.HiddenBorder()).BorderTop(false).BorderBottom(false).BorderLeft(false).BorderRight(false).BorderHeader(false).BorderColumn(false).
		StyleFunc(func(row, column int) lipgloss.Style {
			s := lipgloss.NewStyle()
			if row == table.HeaderRow {
				s = a.style.head
			} else if r.style != nil {
				if of := r.style(row, r.heads[column]); of != nil {
					s = *of
				}
			}
			if column < len(r.heads)-1 {
				s = s.PaddingRight(2)
			}
			return s
		})
	return t.String()
}

// visible is glance.Lines, with spaces for tabs.
func visible(text string) string { return glance.Lines(strings.ReplaceAll(text, "\t", "    ")) }

// more says how to come by the next page, of a list whose last page may not have been this.
func (a *app) more(flag, last string) {
	a.printf("%s\n", a.style.faint.Render("… more: "+flag+" "+shellWord(last)))
}

// shellWord is a word of a command line.
func shellWord(text string) string {
	plain := func(r rune) bool {
		return r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("_-./:@,+", r))
	}
	if text != "" && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	if strings.ContainsFunc(text, glance.Unprintable) {
		return "$'" + strings.ReplaceAll(glance.OneLine(strings.ReplaceAll(text, `\`, `\\`)), "'", `\'`) + "'"
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// most is how many a list has at most.
type most int

func (m *most) String() string { return strconv.Itoa(int(*m)) }
func (m *most) Type() string   { return "int" }

func (m *most) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > pgwake.MaxFetch {
		return fmt.Errorf("it is from 1 to %d", pgwake.MaxFetch)
	}
	*m = most(n)
	return nil
}

func limitFlag(c *cobra.Command, n *int) {
	*n = 20
	c.Flags().Var((*most)(n), "limit", fmt.Sprintf("how many, from 1 to %d", pgwake.MaxFetch))
}

// count is a number of things: 1 item, 2 items.
func count[N int | int64 | int32](n N, thing string) string {
	if n == 1 {
		return fmt.Sprintf("%d %s", n, thing)
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// version is that of the module, as `go install` has built it.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// text is a number as a text.
func text(n int64) string { return strconv.FormatInt(n, 10) }

// textsOf are the texts of many things.
func textsOf[T fmt.Stringer](all []T) []string {
	texts := make([]string, len(all))
	for i, one := range all {
		texts[i] = one.String()
	}
	return texts
}
