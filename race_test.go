//go:build race

package pgwake_test

import "flag"

// The race detector makes a property several times as slow, so it is checked 40 times and not 100 unless -rapid.checks says
// otherwise. The cases differ from run to run.
func init() {
	checks := flag.Lookup("rapid.checks")
	checks.DefValue = "40"
	if err := checks.Value.Set(checks.DefValue); err != nil {
		panic(err)
	}
}
