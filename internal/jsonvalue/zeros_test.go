package jsonvalue_test

import (
	"testing"

	"github.com/pgwake/pgwake/internal/jsonvalue"
	"github.com/stretchr/testify/require"
)

func TestZeros_AreThoseOfTheExponentsOfNumbers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{
		``: 0, `null`: 0, `true`: 0, `12`: 0, `1e5`: 5, `1E+5`: 5, `-1.5e-5`: 5, `[1e5, {"k": 2e7}]`: 12, `"1e5"`: 0, `{"1e5": false}`: 0, `["\"1e5", 1e1]`: 1,
		`1e99999999999999999999`: 1_000_000,
	} {
		require.Equal(t, want, jsonvalue.Zeros([]byte(text)), text)
	}
}
