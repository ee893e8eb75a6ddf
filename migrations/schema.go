package migrations

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// This file answers: which names can a schema have?

// ErrSchema: no schema can have the name. Nothing was asked of the server, which would cut a name that is too long, and take another schema for it.
var ErrSchema = errors.New("unusable name of a schema")

// maxIdentifier is the length at which PostgreSQL truncates names (NAMEDATALEN - 1).
const maxIdentifier = 63

// CheckSchema fails with ErrSchema unless a schema that is migrated can have this name.
func CheckSchema(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrSchema)
	case len(name) > maxIdentifier:
		return fmt.Errorf("%w: it is %d bytes long, and PostgreSQL truncates names at %d", ErrSchema, len(name), maxIdentifier)
	case strings.ContainsRune(name, 0) || !utf8.ValidString(name):
		return fmt.Errorf("%w: %q contains NUL or invalid UTF-8", ErrSchema, name)
	case strings.HasPrefix(name, "pg_"), name == "$user", name == "information_schema":
		return fmt.Errorf("%w: %q is the server's", ErrSchema, name)
	}
	return nil
}
