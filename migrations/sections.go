package migrations

import (
	"errors"
	"io/fs"
	"strings"
)

// This file answers: what of a file is the way up and what the way down, and in how many messages does it reach the server?
//
// Goose sends a file statement by statement, of which there are hundreds: each is a round trip, and to find where they end takes it
// longer than the server takes for most of them. The server finds that by itself.

// sections are what is between the marks of a migration, without those of statements, which are for goose alone.
type sections struct {
	up, down string
	whole    bool // each may be sent in one message: there is nothing else that goose would do, or refuse
}

func sectionsOf(text string) sections {
	var before, up, down strings.Builder
	s, into := sections{whole: true}, &before
	enter := func(from, to *strings.Builder) {
		s.whole = s.whole && into == from
		into = to
	}
	for line := range strings.Lines(text) {
		comment := strings.HasPrefix(strings.TrimSpace(line), "--")
		switch mark := strings.TrimRight(line, " \t\r\n"); {
		case !comment || !strings.Contains(line, "+goose"): // as goose knows them
			into.WriteString(strings.TrimRight(line, "\r\n") + "\n")
			s.whole = s.whole && (into != &before || comment || mark == "")
		case mark == "-- +goose Up":
			enter(&before, &up)
		case mark == "-- +goose Down":
			enter(&up, &down)
		case mark != "-- +goose StatementBegin" && mark != "-- +goose StatementEnd":
			s.whole = false
		}
	}
	s.up, s.down, s.whole = strings.TrimSpace(up.String()), strings.TrimSpace(down.String()), s.whole && into != &before
	return s
}

// bySection is files in each of which a section is one statement to goose, where it can be.
type bySection struct{ fs.FS }

func (s bySection) Open(name string) (fs.File, error) {
	f, err := s.FS.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") {
		return f, err
	}
	text, err := fs.ReadFile(s.FS, name)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	parts := sectionsOf(string(text))
	if !parts.whole {
		return f, nil
	}
	return &rewritten{f, strings.NewReader("-- +goose Up\n" + statement(parts.up) + "-- +goose Down\n" + statement(parts.down))}, nil
}

func statement(text string) string {
	return "-- +goose StatementBegin\n" + text + "\n-- +goose StatementEnd\n"
}

// rewritten is a file that says something else.
type rewritten struct {
	fs.File
	text *strings.Reader
}

func (f *rewritten) Read(p []byte) (int, error) { return f.text.Read(p) }
