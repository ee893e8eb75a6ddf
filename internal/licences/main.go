// Program licences writes docs/licences.md: what the modules of this repository depend on, under which licences, and how old it is.
//
//	go run ./internal/licences          asks the module proxy where a release is older than two years
//	go run ./internal/licences -check   compares the page with the go.mod files; needs no network
//
// notes.txt says what a direct dependency is used for, and why one is kept of which there was no release for two years.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	page      = "docs/licences.md"
	notes     = "internal/licences/notes.txt"
	ourselves = "github.com/pgwake/pgwake"
)

func main() {
	check := flag.Bool("check", false, "compare the page with the go.mod files")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, "licences:", err)
		os.Exit(1)
	}
}

// dependency is a version of a module that one of ours requires.
type dependency struct {
	path, version string
	direct        []string // our modules that import it
	indirect      []string // and those that need it for others
	licence       string
	released      time.Time
	newest        time.Time // when its newest version was released
}

func run(check bool) error {
	modules, err := filepath.Glob("go.mod")
	if err != nil {
		return err
	}
	for _, pattern := range []string{"*/go.mod", "*/*/go.mod"} {
		more, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		modules = append(modules, more...)
	}
	all, err := required(modules)
	if err != nil {
		return err
	}
	if check {
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		return compare(string(text), all)
	}
	source, err := os.ReadFile(notes)
	if err != nil {
		return err
	}
	noted, err := parseNotes(string(source))
	if err != nil {
		return err
	}
	if err := lookUp(all); err != nil {
		return err
	}
	text, err := write(all, noted, time.Now())
	if err != nil {
		return err
	}
	return os.WriteFile(page, []byte(text), 0o644)
}

// required returns what these go.mod files require, in order of paths and versions.
func required(files []string) ([]*dependency, error) {
	byName := map[string]*dependency{}
	for _, file := range files {
		out, err := exec.Command("go", "mod", "edit", "-json", file).Output()
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		var mod struct {
			Require []struct {
				Path, Version string
				Indirect      bool
			}
		}
		if err := json.Unmarshal(out, &mod); err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		ours := path.Dir(filepath.ToSlash(file))
		for _, r := range mod.Require {
			if r.Path == ourselves || strings.HasPrefix(r.Path, ourselves+"/") {
				continue
			}
			name := r.Path + "@" + r.Version
			if byName[name] == nil {
				byName[name] = &dependency{path: r.Path, version: r.Version}
			}
			if d := byName[name]; r.Indirect {
				d.indirect = append(d.indirect, ours)
			} else {
				d.direct = append(d.direct, ours)
			}
		}
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b *dependency) int { return strings.Compare(a.name(), b.name()) }), nil
}

func (d *dependency) name() string { return d.path + "@" + d.version }

// goList calls the go command outside of our modules, for each of these at once, and decodes the objects that it prints.
func goList[T any](names []string, args ...string) (all []T, err error) {
	dir, err := os.MkdirTemp("", "licences")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module none\n"), 0o644); err != nil {
		return nil, err
	}
	cmd := exec.Command("go", append(args, names...)...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var one T
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
}

// lookUp finds out the licences, by the texts in the module cache, and the ages.
func lookUp(all []*dependency) error {
	var names []string
	for _, d := range all {
		names = append(names, d.name())
	}
	downloads, err := goList[struct{ Path, Version, Dir, Info string }](names, "mod", "download", "-json")
	if err != nil {
		return err
	}
	byName := map[string]int{}
	for i, d := range downloads {
		byName[d.Path+"@"+d.Version] = i
	}
	var old []string
	for _, d := range all {
		i, ok := byName[d.name()]
		if !ok {
			return fmt.Errorf("%s was not downloaded", d.name())
		}
		if d.licence, err = licenceIn(downloads[i].Dir); err != nil {
			return fmt.Errorf("%s: %w", d.name(), err)
		}
		info, err := os.ReadFile(downloads[i].Info)
		if err != nil {
			return err
		}
		var release struct{ Time time.Time }
		if err := json.Unmarshal(info, &release); err != nil {
			return fmt.Errorf("%s: %w", d.name(), err)
		}
		d.released, d.newest = release.Time, release.Time
		if isOld(d.newest, time.Now()) && !slices.Contains(old, d.path+"@latest") {
			old = append(old, d.path+"@latest")
		}
	}
	if old == nil {
		return nil
	}
	newest, err := goList[struct {
		Path string
		Time time.Time
	}](old, "list", "-m", "-json")
	if err != nil {
		return err
	}
	for _, n := range newest {
		for _, d := range all {
			if d.path == n.Path && n.Time.After(d.newest) {
				d.newest = n.Time
			}
		}
	}
	return nil
}

// isOld says whether nothing has been released for two years.
func isOld(newest, now time.Time) bool { return newest.Before(now.AddDate(-2, 0, 0)) }
