// Package frozen knows the migrations that were released, and so never change.
//
// CHECKSUMS has a line for each, as sha256sum writes it. `make freeze` adds those that are not in it, at a release; before that they are edited in place.
package frozen

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// Sets are the directories of migrations.
var Sets = []string{"migrations", "taskgraph/migrations", "eventbus/migrations", "adapter/goworkflows/migrations"}

// ErrChanged: a migration is not what was released.
var ErrChanged = errors.New("a released migration never changes: undo that, and add a new one")

// Check compares the migrations with the checksums of those that are frozen. Others pass, as long as they come after those.
func Check(repository fs.FS, checksums string) error {
	frozen, err := parse(checksums)
	if err != nil {
		return err
	}
	now, err := sums(repository)
	if err != nil {
		return err
	}
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(frozen)) {
		switch now[name] {
		case frozen[name]:
		case "":
			failed = append(failed, fmt.Errorf("%s is gone: %w", name, ErrChanged))
		default:
			failed = append(failed, fmt.Errorf("%s has changed: %w", name, ErrChanged))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		for other := range frozen {
			if frozen[name] == "" && path.Dir(other) == path.Dir(name) && other > name {
				failed = append(failed, fmt.Errorf("%s is new, and comes before %s, which is released: %w", name, other, ErrChanged))
				break
			}
		}
	}
	return errors.Join(failed...)
}

// Freeze returns the checksums with those of all migrations that have none yet. Fails with ErrChanged as Check does.
func Freeze(repository fs.FS, checksums string) (string, error) {
	if err := Check(repository, checksums); err != nil {
		return "", err
	}
	now, err := sums(repository)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(now)) {
		fmt.Fprintf(&b, "%s  %s\n", now[name], name)
	}
	return b.String(), nil
}

func parse(checksums string) (map[string]string, error) {
	frozen := map[string]string{}
	for line := range strings.Lines(checksums) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok || len(sum) != 2*sha256.Size || frozen[name] != "" {
			return nil, fmt.Errorf("CHECKSUMS has a line that is none, or twice: %q", line)
		}
		frozen[name] = sum
	}
	return frozen, nil
}

// sums are those of all migrations, by their names in the repository.
func sums(repository fs.FS) (map[string]string, error) {
	all := map[string]string{}
	for _, set := range Sets {
		names, err := fs.Glob(repository, path.Join(set, "*.sql"))
		if err != nil {
			return nil, err
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("there are no migrations in %s", set)
		}
		for _, name := range names {
			text, err := fs.ReadFile(repository, name)
			if err != nil {
				return nil, err
			}
			all[name] = fmt.Sprintf("%x", sha256.Sum256(text))
		}
	}
	return all, nil
}
