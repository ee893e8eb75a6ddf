package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// This file answers: what are the programs of the two states made of?

//go:embed load/main.go
var loadSource []byte

// next are migrations that a later version might have, for each set in which this state has none that is newer than the earlier one. So what is deployed
// always migrates, and the way back leads to a schema that is newer than the old nodes know.
var next = map[string]string{
	"migrations":           "ALTER TABLE worker_queue ADD COLUMN of_next_version text; ALTER TABLE orchestrator_queue ADD COLUMN of_next_version text;",
	"taskgraph/migrations": "ALTER TABLE tasks ADD COLUMN of_next_version text;",
	"eventbus/migrations":  "ALTER TABLE event_log ADD COLUMN of_next_version text;",
}

// build builds the load of the earlier state, and that of now.
func build(ctx context.Context, repository, from, dir string) (old, now string, err error) {
	tree := filepath.Join(dir, "tree")
	if _, err := git(ctx, repository, "worktree", "add", "--detach", tree, from); err != nil {
		return "", "", err
	}
	defer func() {
		_, removed := git(context.WithoutCancel(ctx), repository, "worktree", "remove", "--force", tree)
		err = errors.Join(err, removed)
	}()
	load := filepath.Join(tree, "internal", "upgrade", "load")
	if err := os.MkdirAll(load, 0o755); err != nil {
		return "", "", err
	}
	if err := os.WriteFile(filepath.Join(load, "main.go"), loadSource, 0o644); err != nil {
		return "", "", err
	}
	overlay, err := newer(repository, tree, dir)
	if err != nil {
		return "", "", err
	}
	old, now = filepath.Join(dir, "old"), filepath.Join(dir, "now")
	return old, now, errors.Join(goBuild(ctx, tree, old), goBuild(ctx, repository, now, "-overlay", overlay))
}

func goBuild(ctx context.Context, in, binary string, flags ...string) error {
	cmd := exec.CommandContext(ctx, "go", append(append([]string{"build", "-o", binary}, flags...), "./internal/upgrade/load")...)
	cmd.Dir, cmd.Env = in, append(os.Environ(), "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the load in %s: %w: %s", in, err, out)
	}
	return nil
}

// newer writes down, for go build, which migrations are to be there beside those of the repository, so that each set has one that the tree lacks.
func newer(repository, tree, dir string) (overlay string, err error) {
	files := map[string]string{}
	for set, sql := range next {
		before, err := filepath.Glob(filepath.Join(tree, set, "*.sql"))
		if err != nil {
			return "", err
		}
		there, err := filepath.Glob(filepath.Join(repository, set, "*.sql"))
		if err != nil {
			return "", err
		}
		if len(there) > len(before) {
			continue
		}
		name := fmt.Sprintf("%05d_next.sql", len(there)+1)
		to, err := filepath.Abs(filepath.Join(repository, set, name))
		if err != nil {
			return "", err
		}
		files[to] = filepath.Join(dir, filepath.Base(filepath.Dir(set))+name)
		if err := os.WriteFile(files[to], []byte("-- +goose Up\n"+sql+"\n-- +goose Down\n"), 0o644); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o644)
}
