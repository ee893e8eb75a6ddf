package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// This file answers: what does the page say, and is it what the go.mod files say?

// noted is what notes.txt says: by the path of a module, or by its beginning with /... after it.
type noted struct{ uses, reasons map[string]string }

// parseNotes reads lines "use PATH TEXT" and "old PATH TEXT"; # begins a comment.
func parseNotes(text string) (noted, error) {
	n := noted{map[string]string{}, map[string]string{}}
	for i, line := range strings.Split(text, "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		fields := strings.SplitN(line, " ", 3)
		of := map[string]map[string]string{"use": n.uses, "old": n.reasons}[fields[0]]
		if len(fields) < 3 || of == nil || of[fields[1]] != "" {
			return n, fmt.Errorf("%s:%d is not \"use PATH TEXT\" or \"old PATH TEXT\", or stands there twice: %s", notes, i+1, line)
		}
		of[fields[1]] = fields[2]
	}
	return n, nil
}

// find returns what is noted of a module, and takes down that it was asked for.
func find(in map[string]string, path string, asked map[string]bool) string {
	for {
		if text, ok := in[path]; ok {
			asked[path] = true
			return text
		}
		parent := strings.TrimSuffix(path, "/...")
		cut := strings.LastIndex(parent, "/")
		if cut < 0 {
			return ""
		}
		path = parent[:cut] + "/..."
	}
}

const head = `# Licences and ages of the dependencies

What each module of the repository requires, by its go.mod. Only what the module in the root requires comes with the library, and of that
the modules for its tests do not. A licence that ` + "`" + `internal/licences/detect.go` + "`" + ` does not allow is refused, and so is a dependency of which nothing was released for two years,
unless there is a reason: by ` + "`make licences`" + `, which writes this page. ` + "`make check`" + ` compares it with the go.mod files.

`

// write returns the page. An error says what notes.txt lacks, or has for nothing.
func write(all []*dependency, n noted, now time.Time) (string, error) {
	var b strings.Builder
	var missing []error
	uses, reasons := map[string]bool{}, map[string]bool{}
	b.WriteString(head)
	b.WriteString("## Direct\n\n| Module | Version | Licence | Released | In | What for |\n|---|---|---|---|---|---|\n")
	for _, d := range all {
		if d.direct == nil {
			continue
		}
		use := find(n.uses, d.path, uses)
		if use == "" {
			missing = append(missing, fmt.Errorf("what is %s used for in %s?", d.path, strings.Join(d.direct, ", ")))
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", d.path, d.version, d.licence, d.released.Format(time.DateOnly), modules(d.direct), use)
	}
	b.WriteString("\n## Indirect\n\n| Module | Version | Licence | Released | In |\n|---|---|---|---|---|\n")
	for _, d := range all {
		if d.indirect != nil {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", d.path, d.version, d.licence, d.released.Format(time.DateOnly), modules(d.indirect))
		}
	}
	b.WriteString("\n## No release for two years\n\n| Module | Newest release | Why it is kept |\n|---|---|---|\n")
	written := map[string]bool{}
	for _, d := range all {
		if !isOld(d.newest, now) || written[d.path] {
			continue
		}
		written[d.path] = true
		reason := find(n.reasons, d.path, reasons)
		if reason == "" {
			missing = append(missing, fmt.Errorf("of %s nothing was released since %s: replace it, or say why it is kept", d.path, d.newest.Format(time.DateOnly)))
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", d.path, d.newest.Format(time.DateOnly), reason)
	}
	for kind, of := range map[string][2]any{"use": {n.uses, uses}, "old": {n.reasons, reasons}} {
		for path := range of[0].(map[string]string) {
			if !of[1].(map[string]bool)[path] {
				missing = append(missing, fmt.Errorf("%s has %q %s, and nothing is meant by that any more", notes, kind, path))
			}
		}
	}
	return b.String(), errors.Join(missing...)
}

// modules are ours, by their directories.
func modules(dirs []string) string {
	names := slices.Clone(dirs)
	for i, dir := range names {
		if dir == "." {
			names[i] = "the library"
		}
	}
	return strings.Join(names, ", ")
}

var row = regexp.MustCompile(`(?m)^\| (\S+) \| (v\S+) \| [^|]+ \| [^|]+ \| ([^|]+) \|`)

// compare fails unless the page has the dependencies that there are, in the modules where they are.
func compare(text string, all []*dependency) error {
	have := map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(text, -1) {
		have[m[1]+"@"+m[2]+" in "+m[3]] = true
	}
	var different []string
	for _, d := range all {
		for _, in := range [][]string{d.direct, d.indirect} {
			name := d.name() + " in " + modules(in)
			if in != nil && !have[name] {
				different = append(different, "lacks "+name)
			}
			delete(have, name)
		}
	}
	for name := range have {
		different = append(different, "has "+name)
	}
	if different == nil {
		return nil
	}
	slices.Sort(different)
	return fmt.Errorf("%s is not what the go.mod files say, run make licences:\n%s", page, strings.Join(different, "\n"))
}
