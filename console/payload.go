package console

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how is what users have put into the database shown, whatever it is?
//
// Invariant: nothing of it reaches a page or a file but by way of redacted, and nothing reaches a page that could hide, or be more than
// text: templates escape it, and what cannot be seen is shown as what it is.

const (
	briefly   = 120       // characters in a row of a list
	firstPart = 16 << 10  // bytes that a page shows at first
	wholePart = 512 << 10 // and at most; for more there is the download
	maxDepth  = 64        // of JSON that is indented
)

// shown is a payload as a page has it.
type shown struct {
	Part string // its name on the page
	Text string
	Size int    // bytes of all of it
	Cut  bool   // it is not all
	Hex  bool   // it is no text
	More string // where more is shown; "": no more can be
	File string // where all of it can be had
	None bool   // there is nothing
}

func (c *console) redacted(p Payload) []byte {
	if c.o.Redact == nil || len(p.Data) == 0 {
		return p.Data
	}
	return c.o.Redact(p)
}

// listed is how many bytes of a payload a list reads, of which most are not shown. What Redact is for is whole: it may have to understand it.
func (c *console) listed() int {
	if c.o.Redact != nil {
		return 0
	}
	return 32 * briefly
}

// unlisted is that of a list that shows no payloads.
const unlisted = 1

// start is what a list has of a payload, whole or cut.
func start(data []byte, cut *pgwake.Cut) []byte {
	if cut != nil {
		return []byte(cut.Start)
	}
	return data
}

// brief is a payload in one line.
func (v *view) brief(p Payload) string {
	data := v.c.redacted(p)
	if len(data) == 0 || string(data) == "null" || string(data) == "{}" {
		return ""
	}
	if !utf8.Valid(data[:min(len(data), 4*briefly)]) && !utf8.Valid(data) {
		return hex.EncodeToString(data[:min(len(data), briefly/2)])
	}
	return glance.Short(string(data[:min(len(data), 32*briefly)]), briefly)
}

// part is a payload on a page of its own, which the request may ask to download.
func (v *view) part(name string, p Payload) (shown, error) {
	data := v.c.redacted(p)
	if v.text("download") == name && !v.Live {
		return shown{}, &download{name, data}
	}
	s := shown{Part: name, Size: len(data)}
	if len(data) == 0 || string(data) == "null" {
		s.None = true
		return s, nil
	}
	most := firstPart
	if v.text("all") == name {
		most = wholePart
	}
	s.Text, s.Cut, s.Hex = render(data, most)
	if s.Cut && most < wholePart && !s.Hex {
		s.More = v.With("all", name)
	}
	s.File = v.With("download", name)
	return s, nil
}

// render makes a text of data, of about so many bytes.
func render(data []byte, most int) (text string, cut, isHex bool) {
	if !utf8.Valid(data) {
		const rows = 64
		return hex.Dump(data[:min(len(data), 16*rows)]), len(data) > 16*rows, true
	}
	if json.Valid(data) {
		if text, cut, ok := indented(data, most); ok {
			return glance.Lines(text), cut, false
		}
	}
	if len(data) > most {
		data, cut = data[:most], true
	}
	return glance.Lines(strings.ToValidUTF8(string(data), "")), cut, false
}

// indented is JSON with a line for each value, of so many bytes at most. It is not ok if it is too deep for that to be of use.
func indented(data []byte, most int) (text string, cut, ok bool) {
	var b strings.Builder
	depth, inString, escaped := 0, false, false
	line := func() {
		b.WriteByte('\n')
		for range depth {
			b.WriteString("  ")
		}
	}
	data = bytes.TrimSpace(data)
	for i, c := range data {
		if b.Len() > most {
			return strings.ToValidUTF8(b.String(), ""), true, true
		}
		switch {
		case inString:
			b.WriteByte(c)
			inString = escaped || c != '"'
			escaped = c == '\\' && !escaped
		case c == '"':
			inString = true
			b.WriteByte(c)
		case c == '{' || c == '[':
			b.WriteByte(c)
			if next := nextByte(data[i+1:]); next == '}' || next == ']' {
				depth++
				continue
			}
			if depth++; depth > maxDepth {
				return "", false, false
			}
			line()
		case c == '}' || c == ']':
			depth--
			if last := b.String()[b.Len()-1]; last != '{' && last != '[' {
				line()
			}
			b.WriteByte(c)
		case c == ',':
			b.WriteByte(c)
			line()
		case c == ':':
			b.WriteString(": ")
		case c == ' ' || c == '\n' || c == '\t' || c == '\r':
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), false, true
}

// nextByte is the first that is no blank.
func nextByte(data []byte) byte {
	if data = bytes.TrimLeft(data[:min(len(data), 64)], " \n\t\r"); len(data) > 0 {
		return data[0]
	}
	return 0
}

// download is a payload on its way to a file. It is the error of a page that was asked for a part of itself.
type download struct {
	part string
	data []byte
}

func (d *download) Error() string { return "download of " + d.part }

func (d *download) serve(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8") // whatever it is: nothing is to be made of it
	h.Set("Content-Disposition", fmt.Sprintf(`attachment; filename="pgwake-%s.txt"`, fileName(d.part)))
	h.Set("Content-Length", fmt.Sprint(len(d.data)))
	_, _ = w.Write(d.data) // whoever has gone needs it no more
}

func fileName(part string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(part))
}

// headersOf are headers as a payload.
func headersOf(headers map[string]string) []byte {
	if len(headers) == 0 {
		return nil
	}
	data, _ := json.Marshal(headers) // strings
	return data
}
