//go:build race

package cloudevents_test

import (
	"flag"

	"github.com/pgwake/pgwake/internal/testsize"
)

// The race detector makes a property several times as slow, so it is checked 40 times and not 100 unless -rapid.checks says
// otherwise, or all is to be done at full size. The cases differ from run to run.
func init() {
	checks := flag.Lookup("rapid.checks")
	checks.DefValue = testsize.Of("40", checks.DefValue)
	if err := checks.Value.Set(checks.DefValue); err != nil {
		panic(err)
	}
}
