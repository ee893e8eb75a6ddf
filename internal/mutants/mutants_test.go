package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A mutant whose text is gone opens nothing, and whoever changed the text should hear of it at once.
func TestMutants_EveryPatch_FitsItsFileOnce(t *testing.T) {
	for _, m := range mutants {
		source, err := os.ReadFile(filepath.Join("..", "..", m.file))
		require.NoError(t, err, m.name)
		_, err = m.apply(source)
		require.NoError(t, err, m.name)
	}
}

// A function that a later migration defines anew is not changed by what an earlier one says.
func TestMutants_PatchOfAFunction_IsWhereItIsDefinedLast(t *testing.T) {
	function := regexp.MustCompile(`CREATE (?:OR REPLACE )?FUNCTION (\w+)\(`)
	for _, m := range mutants {
		if filepath.Ext(m.file) != ".sql" {
			continue
		}
		file := filepath.Join("..", "..", m.file)
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		all, err := filepath.Glob(filepath.Join(filepath.Dir(file), "0*.sql"))
		require.NoError(t, err)
		for _, p := range m.patches {
			before, _, _ := strings.Cut(string(source), p.old)
			defined := function.FindAllStringSubmatch(before, -1)
			if len(defined) == 0 {
				continue
			}
			name := defined[len(defined)-1][1]
			for _, later := range all[slices.Index(all, file)+1:] {
				text, err := os.ReadFile(later)
				require.NoError(t, err)
				up, _, _ := strings.Cut(string(text), downFrom)
				require.NotContains(t, up, "FUNCTION "+name+"(", "%s: %s defines %s anew", m.name, later, name)
			}
		}
	}
}
