// Package keep keeps what a run has measured, in a file and on a page.
package keep

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
)

// JSON puts a value into a file, which is replaced as a whole.
func JSON(file string, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o755)
	}
	if err == nil {
		err = os.WriteFile(file+".tmp", append(text, '\n'), 0o644)
	}
	if err == nil {
		err = os.Rename(file+".tmp", file)
	}
	if err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	return nil
}

// The text between the marks is what Results replaces.
const (
	Begin = "<!-- results of a run: begin -->\n"
	End   = "<!-- results of a run: end -->\n"
)

// Results replaces the results in a Markdown file by those that make returns. Without the marks, make is not called.
func Results(file string, make func() (string, error)) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(text), Begin)
	_, after, ends := strings.Cut(rest, End)
	if !ok || !ends {
		return errors.New(file + " has no place for results: " + strings.TrimSpace(Begin) + " and " + strings.TrimSpace(End))
	}
	results, err := make()
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(before+Begin+results+End+after), 0o644)
}

// Beside is a path in the bench's directory, if that can be seen from here.
func Beside(name string) string {
	if _, err := os.Stat("bench"); err == nil {
		return filepath.Join("bench", name)
	}
	return name
}

// Commit is what this program was built from, or "unknown".
func Commit() string {
	commit, changed := "unknown", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				commit = s.Value[:min(len(s.Value), 10)]
			case s.Key == "vcs.modified" && s.Value == "true":
				changed = ", changed"
			}
		}
	}
	return commit + changed
}
