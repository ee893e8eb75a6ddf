package pgwake

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Importers of the library get what it requires, so each requirement is a decision. Tools and comparisons
// belong to modules of their own.
func TestGoMod_RequiresOnlyWhatWasDecided(t *testing.T) {
	source, err := os.ReadFile("go.mod")
	require.NoError(t, err)
	var direct []string
	for _, m := range regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(string(source), -1) {
		direct = append(direct, m[1])
	}
	require.ElementsMatch(t, []string{
		"github.com/jackc/pgx/v5",
		"github.com/pressly/goose/v3",
		"go.opentelemetry.io/otel",
		"go.opentelemetry.io/otel/metric",
		"go.opentelemetry.io/otel/trace",
		// taskgraph: definitions in YAML; requires nothing but its tests
		"go.yaml.in/yaml/v3",
		// tests, and internal/mutants
		"github.com/anishathalye/porcupine",
		"github.com/stretchr/testify",
		"go.uber.org/goleak",
		"golang.org/x/sync",
		"pgregory.net/rapid",
	}, direct)
}

// Each package that has tests looks for goroutines that they left behind.
func TestPackages_LookForLeaks(t *testing.T) {
	checked := map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		dir := filepath.Dir(path)
		checked[dir] = checked[dir] || strings.Contains(string(source), "goleak.") || strings.Contains(string(source), "testschema.Main(")
		return err
	}))
	require.Greater(t, len(checked), 10)
	for dir, leaks := range checked {
		require.True(t, leaks, "package in %s", dir)
	}
}
