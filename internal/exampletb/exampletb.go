// Package exampletb has the testing.TB that an example does not get, for helpers that take one.
package exampletb

import (
	"log"
	"slices"
	"testing"
)

// TB ends the process when the example cannot go on. It has what the helpers use; any other method panics. For one goroutine.
type TB struct {
	testing.TB
	cleanups []func()
}

func (*TB) Helper()                           {}
func (*TB) Failed() bool                      { return false }
func (*TB) FailNow()                          { log.Fatal("the example cannot go on") }
func (*TB) Errorf(format string, args ...any) { log.Fatalf(format, args...) }
func (*TB) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (e *TB) Cleanup(f func())                { e.cleanups = append(e.cleanups, f) }

// End is what a test does when it is over.
func (e *TB) End() {
	for _, f := range slices.Backward(e.cleanups) {
		f()
	}
}
