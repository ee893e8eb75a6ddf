package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/pgwake/pgwake/internal/frozen"
)

// This file answers: from which earlier states can one deploy to this one?

//go:embed stages
var stages string

// state is an earlier one.
type state struct{ name, commit string }

// git runs git in the repository, and returns what it says.
func git(ctx context.Context, repository string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", repository}, args...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// choose returns the state that is named, or else the latest edit of a migration, and each stage and release whose migrations these continue. One that is
// older than that edit does if what was edited came after it: until a migration is released, it may be. With all of the history there has to be one.
func choose(ctx context.Context, repository, from string) ([]state, error) {
	if from != "" {
		s, err := stateOf(ctx, repository, from, from)
		return []state{s}, err
	}
	// A merge counts for all that it brings, and a file that is new edits none.
	commit, err := git(ctx, repository, append([]string{"log", "-1", "--first-parent", "-m", "--diff-filter=MDRT", "--format=%H", "HEAD", "--"}, migrations()...)...)
	if err != nil {
		return nil, err
	}
	if commit == "" { // of a history that is not all there
		commit = "HEAD"
	}
	subject, err := git(ctx, repository, "log", "-1", "--format=%h, the latest edit of a migration: %s", commit)
	if err != nil {
		return nil, err
	}
	latest, err := stateOf(ctx, repository, subject, commit)
	if err != nil {
		return nil, err
	}
	states := []state{latest}
	for line := range strings.Lines(stages) {
		name, commit, _ := strings.Cut(strings.TrimSpace(line), " ")
		states = append(states, state{name, commit})
	}
	releases, err := git(ctx, repository, "tag", "--list", "v*", "--sort=creatordate")
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(releases) {
		states = append(states, state{name, name})
	}
	chosen := states[:1]
	for _, s := range states[1:] {
		s, err := stateOf(ctx, repository, s.name, s.commit)
		if err != nil { // they were edited since, or the history is not all there
			why, _, _ := strings.Cut(err.Error(), "\n")
			fmt.Fprintf(os.Stderr, "not from %s: %s\n", s.name, why)
			continue
		}
		chosen = append(chosen, s)
	}
	shallow, err := git(ctx, repository, "rev-parse", "--is-shallow-repository")
	if err == nil && len(chosen) == 1 && shallow == "false" {
		err = errors.New("this state continues the migrations of no stage and of no release")
	}
	return chosen, err
}

// stateOf returns a state, and fails if this one does not continue its migrations.
func stateOf(ctx context.Context, repository, name, commit string) (state, error) {
	commit, err := git(ctx, repository, "rev-parse", "--verify", commit+"^{commit}")
	if err != nil {
		return state{}, err
	}
	changed, err := changedMigrations(ctx, repository, commit)
	if err == nil && changed != "" {
		err = fmt.Errorf("migrations of %s have changed since, or are gone, so its schema is refused (migrations.ErrForeign):\n%s", name, changed)
	}
	return state{name, commit}, err
}

// migrations are those of all sets, for git.
func migrations() (all []string) {
	for _, set := range frozen.Sets {
		all = append(all, ":(glob)"+set+"/*.sql")
	}
	return all
}

// changedMigrations are the files of a state that are not the same here. What is new here is none of them.
func changedMigrations(ctx context.Context, repository, commit string) (string, error) {
	return git(ctx, repository, append([]string{"diff", "--name-only", "--diff-filter=a", commit, "--"}, migrations()...)...)
}
