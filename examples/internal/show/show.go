// Package show serves the console of what an example does, for those who would rather see it: flag -console of each that has it.
package show

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
)

var address = flag.String("console", "", "`address` at which to serve the console to this machine, such as 127.0.0.1:7276, also after the end: until Ctrl-C; nowhere unless it is set")

// Console serves the console, if flag -console says so. It has buttons: whoever is at this machine, and nobody else, may do everything. stay is for
// the end of the example, before it tidies up: unless something went wrong it waits until ctx ends, so that what there is can be looked at. It returns
// that error, with its own.
func Console(ctx context.Context, out io.Writer, p *pgwake.Provider, o console.Options) (stay func(error) error, err error) {
	if *address == "" {
		return func(err error) error { return err }, nil
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return nil, err
	}
	o.Local = true
	o.Authorize = func(*http.Request, console.Action) error { return nil }
	mux := http.NewServeMux()
	mux.Handle("/console/", http.StripPrefix("/console", console.Handler(p, &o)))
	mux.Handle("/{$}", http.RedirectHandler("/console/", http.StatusTemporaryRedirect))
	looking, endLooking := context.WithCancel(ctx) // pages that are open end with it
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, BaseContext: func(net.Listener) context.Context { return looking }}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	fmt.Fprintf(out, "console: http://%s/console/\n", listener.Addr())
	return func(err error) error {
		if err == nil && ctx.Err() == nil {
			fmt.Fprintf(out, "\nThat was all. The console is there until Ctrl-C: http://%s/console/\n", listener.Addr())
			<-ctx.Done()
		}
		endLooking()
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, server.Shutdown(ending))
		if served := <-ended; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	}, nil
}
