package console_test

import (
	"context"
	"log"
	"net/http"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/pgwaketest"
)

// openProvider opens a Provider for an example, as pgwake.Open(ctx, databaseURL, nil) does. end closes it.
func openProvider() (ctx context.Context, p *pgwake.Provider, end func()) {
	tb := &exampletb.TB{}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p = pgwaketest.New(tb, nil)
	return ctx, p, func() {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		cancel()
		tb.End()
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
