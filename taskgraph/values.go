package taskgraph

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what can PostgreSQL keep?

func isUUID(text string) bool {
	var id pgtype.UUID
	return len(text) == 36 && id.Scan(text) == nil && strings.EqualFold(id.String(), text) // Scan takes anything for a hyphen
}

// mostWrittenOut is how long the numbers of a value are at most: as long as all of it in the largest MaxPayload.
const mostWrittenOut = 100 << 20

// errWrittenOut is what nobody could read, so that what needs it would fail for ever, and what lists it for everybody.
var errWrittenOut = fmt.Errorf("numbers that are more than %d bytes when they are written out", mostWrittenOut)

// checkJSON says what is wrong with what should be JSON that a jsonb can hold. Nothing is as good as that.
func checkJSON(data []byte) error {
	switch {
	case len(data) == 0:
		return nil
	case !utf8.Valid(data):
		return errors.New("not valid UTF-8")
	case !json.Valid(data):
		return errors.New("not JSON")
	}
	for _, escape := range jsonEscapes.FindAllSubmatch(data, -1) {
		if escape[1] != nil {
			return fmt.Errorf(`the escape \%s is no character`, escape[1])
		}
	}
	depth := 0
	tokens := json.NewDecoder(bytes.NewReader(data))
	tokens.UseNumber()
	for {
		token, err := tokens.Token()
		if err != nil { // the end
			if jsonvalue.Zeros(data) > mostWrittenOut {
				return errWrittenOut
			}
			return nil
		}
		switch t := token.(type) {
		case json.Delim:
			if t == '[' || t == '{' {
				depth++
			} else {
				depth--
			}
			if depth > pgwake.MaxDepth {
				return fmt.Errorf("nested more than %d deep", pgwake.MaxDepth)
			}
		case json.Number:
			if !parseDecimal(string(t)).fits() {
				return fmt.Errorf("the number %s is beyond those of PostgreSQL", quoteShort(string(t)))
			}
		}
	}
}

// jsonEscapes finds every escape in JSON, and captures what JSON allows and PostgreSQL's text cannot hold: NUL, and half of a
// surrogate pair.
var jsonEscapes = regexp.MustCompile(`\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u0000|u[dD][89a-fA-F][0-9a-fA-F]{2})|.)`)

// tooLarge is a pgwake.ErrPayloadTooLarge: JSON of so many bytes, and how many are the most.
type tooLarge struct{ bytes, most int }

func (e tooLarge) Error() string {
	return fmt.Sprintf("has %d bytes, and %d is the most", e.bytes, e.most)
}

func (tooLarge) Unwrap() error { return pgwake.ErrPayloadTooLarge }

// jsonText is a value as JSON of at most so many bytes that PostgreSQL can keep; nil for none.
func jsonText(v any, most int) (*string, error) {
	if v == nil {
		return nil, nil
	}
	data, err := marshal(v)
	if err != nil {
		return nil, err
	}
	if len(data) > most {
		return nil, tooLarge{len(data), most}
	}
	text := string(data)
	return &text, checkJSON(data)
}

// marshal is json.Marshal for values of which it may panic, since a MarshalJSON of theirs does.
func marshal(v any) (data json.RawMessage, err error) {
	defer func() {
		if p := recover(); p != nil {
			data, err = nil, fmt.Errorf("panic: %v", p)
		}
	}()
	return json.Marshal(v)
}

// problems are what is wrong with what a caller says: all of it, of which maxListed are told.
type problems struct {
	texts []string
	more  int
	large bool // something is too large
}

func (p *problems) add(format string, args ...any) {
	for _, arg := range args {
		_, large := arg.(tooLarge)
		p.large = p.large || large
	}
	if len(p.texts) == maxListed {
		p.more++
		return
	}
	p.texts = append(p.texts, fmt.Sprintf(format, args...))
}

func (p *problems) addStep(name, format string, args ...any) {
	p.add("step %s: "+format, append([]any{quoteShort(name)}, args...)...)
}

// err is a pgwake.ErrInvalid, which may be a pgwake.ErrPayloadTooLarge, or nil if there are none.
func (p *problems) err(op string) error {
	switch {
	case len(p.texts) == 0:
		return nil
	case p.large:
		return failed(op, fmt.Errorf("%w: %s", pgwake.ErrPayloadTooLarge, p))
	}
	return invalid(op, "%s", p)
}

func (p *problems) String() string {
	if len(p.texts) == 1 && p.more == 0 {
		return p.texts[0]
	}
	text := fmt.Sprintf("%d problems:\n\t%s", len(p.texts)+p.more, strings.Join(p.texts, "\n\t"))
	if p.more > 0 {
		text += fmt.Sprintf("\n\tand %d more", p.more)
	}
	return text
}

// checkID fails unless it is the id of a task or a step.
func checkID(op, what, id string) error {
	if !isUUID(id) {
		return invalid(op, "%q is not the id of a %s", id[:min(len(id), 64)], what)
	}
	return nil
}
