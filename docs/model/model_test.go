package model

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func nodes(n, dispatchers int) (all []Node) {
	for range n {
		all = append(all, Node{{TagA, dispatchers}})
	}
	return all
}

func producers(n int) (all []Producer) {
	for range n {
		all = append(all, Producer{Tag: TagA})
	}
	return all
}

func try(t *testing.T, cfg Config) Result {
	t.Helper()
	began := time.Now()
	r, err := Explore(cfg, 60_000_000)
	t.Logf("%s: %d states, %d steps, depth %d, %v, %v %v", cfg.Name, r.States, r.Steps, r.Depth, time.Since(began).Round(time.Millisecond), r.Fault, err)
	if r.Fault != Nothing {
		t.Logf("\n%s", strings.Join(r.Trace, "\n"))
	}
	require.NoError(t, err)
	return r
}

func TestScratch(t *testing.T) {
	for _, cfg := range []Config{
		{Name: "1x1x1", Nodes: nodes(1, 1), Producers: producers(1)},
		{Name: "1x1x2", Nodes: nodes(1, 1), Producers: producers(2)},
		{Name: "1x2x1", Nodes: nodes(1, 2), Producers: producers(1)},
		{Name: "2x1x1", Nodes: nodes(2, 1), Producers: producers(1)},
		{Name: "1x2x2", Nodes: nodes(1, 2), Producers: producers(2)},
		{Name: "2x1x2", Nodes: nodes(2, 1), Producers: producers(2)},
		{Name: "1x2x3", Nodes: nodes(1, 2), Producers: producers(3)},
		{Name: "2x1x3", Nodes: nodes(2, 1), Producers: producers(3)},
	} {
		if os.Getenv("ONLY") != "" && !strings.Contains(cfg.Name, os.Getenv("ONLY")) {
			continue
		}
		if try(t, cfg).Fault != Nothing {
			return
		}
	}
}
