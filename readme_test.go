package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// readmeFirstProgram is the first program of the README, word for word. Example runs it.
func readmeFirstProgram(ctx context.Context) error {
	p, err := pgwake.Open(ctx, os.Getenv("DATABASE_URL"), nil) // all defaults; migrates, listens
	if err != nil {
		return err
	}
	defer p.Close(context.WithoutCancel(ctx))

	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
	if err != nil {
		return err
	}

	for {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: 30 * time.Second, PollTimeout: time.Minute})
		if errors.Is(err, pgwake.ErrNoWork) {
			continue // the poll timeout passed; nothing was due
		}
		if err != nil {
			return err
		}
		fmt.Printf("%s %s\n", item.Name, item.Input)
		if err := p.AckWorkItem(ctx, item.LockToken, nil); err != nil {
			return err
		}
	}
}

// Every piece of Go in the README stands in this file, so it compiles.
func TestReadme_GoSnippets_Compile(t *testing.T) {
	_ = readmeFirstProgram
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("readme_test.go")
	require.NoError(t, err)
	snippets := regexp.MustCompile("(?s)```go\n(.*?)\n```").FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, snippets)
	for _, s := range snippets {
		indented := "\t" + strings.ReplaceAll(s[1], "\n", "\n\t")
		indented = strings.ReplaceAll(indented, "\t\n", "\n")
		require.Contains(t, string(source), indented)
	}
}
