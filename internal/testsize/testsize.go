// Package testsize answers: how much of something does a test do?
//
// A specification names hundreds of rounds where some dozens show the same nearly always. `make test` takes the dozens, `make test-full`
// the hundreds.
package testsize

import "os"

// Full reports whether everything is to be done at full size: PGWAKE_FULL is set.
func Full() bool { return os.Getenv("PGWAKE_FULL") != "" }

// Of is few, or full where Full says so.
func Of[T any](few, full T) T {
	if Full() {
		return full
	}
	return few
}
