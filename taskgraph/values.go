package taskgraph

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgwake/pgwake"
)

// This file answers: what can PostgreSQL keep?

// checkText returns what is wrong with a text that has at least so many bytes, and at most pgwake.MaxNameLength; "": nothing.
func checkText(text string, least int) string {
	switch {
	case len(text) < least:
		return "is empty"
	case len(text) > pgwake.MaxNameLength:
		return fmt.Sprintf("has %d bytes, and %d is the most", len(text), pgwake.MaxNameLength)
	case !utf8.ValidString(text):
		return "is not UTF-8"
	case strings.ContainsRune(text, 0):
		return "contains a NUL"
	}
	return ""
}

func isUUID(text string) bool {
	var id pgtype.UUID
	return len(text) == 36 && id.Scan(text) == nil
}

// checkJSON fails for JSON that jsonb does not take: in a text of it there is no NUL.
func checkJSON(data []byte) error {
	if !utf8.Valid(data) {
		return errors.New("is not UTF-8")
	}
	if !bytes.Contains(data, []byte(`\u0000`)) {
		return nil
	}
	for tokens := json.NewDecoder(bytes.NewReader(data)); ; {
		switch token, err := tokens.Token(); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		default:
			if text, ok := token.(string); ok && strings.ContainsRune(text, 0) {
				return errors.New("a text of it contains a NUL")
			}
		}
	}
}

// checkID fails unless it is the id of a task or a step.
func checkID(op, what, id string) error {
	if !isUUID(id) {
		return invalid(op, "%q is not the id of a %s", id[:min(len(id), 64)], what)
	}
	return nil
}
