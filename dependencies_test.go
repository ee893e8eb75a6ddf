package pgwake

import (
	"os"
	"regexp"
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
		// tests, and internal/mutants
		"github.com/stretchr/testify",
		"go.uber.org/goleak",
		"golang.org/x/sync",
		"pgregory.net/rapid",
	}, direct)
}
