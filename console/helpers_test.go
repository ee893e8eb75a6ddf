package console_test

import (
	"context"
	"log"
	"net/http"
	"slices"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
)

// exampleTB is the *testing.T that an example does not have.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (*exampleTB) Helper()                           {}
func (*exampleTB) Failed() bool                      { return false }
func (*exampleTB) FailNow()                          { log.Fatal("the example cannot go on") }
func (*exampleTB) Errorf(format string, args ...any) { log.Fatalf(format, args...) }
func (*exampleTB) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (e *exampleTB) Cleanup(f func())                { e.cleanups = append(e.cleanups, f) }

// openProvider opens a Provider for an example, as pgwake.Open(ctx, databaseURL, nil) does. end closes it.
func openProvider() (ctx context.Context, p *pgwake.Provider, end func()) {
	tb := &exampleTB{}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p = pgwaketest.New(tb, nil)
	return ctx, p, func() {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		cancel()
		for _, f := range slices.Backward(tb.cleanups) {
			f()
		}
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
