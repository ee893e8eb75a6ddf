package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/spf13/cobra"
)

// This file answers: how is the console served to whoever is at this machine, and to nobody else?

func (a *app) consoleCommand() *cobra.Command {
	var addr string
	var actions bool
	c := &cobra.Command{
		Use: "console", Short: "Serve the web console to this machine", Args: cobra.NoArgs,
		Long: `Serve the web console to this machine: queues, nodes, instances, tasks, events, dead letters and schedules, live, in a browser. Ctrl-C ends it.
It is read-only unless --actions is given. Everybody on this machine can open it: on one that is shared, mount package console in a program of yours,
behind what that has for passwords.`,
		Example: "  pgwake console\n  pgwake console --addr 127.0.0.1:9000 --actions",
		RunE:    func(c *cobra.Command, _ []string) error { return a.serveConsole(c.Context(), addr, actions) },
	}
	c.Flags().StringVar(&addr, "addr", "127.0.0.1:7276", "where to listen, on a loopback address; port 0 is any that is free")
	c.Flags().BoolVar(&actions, "actions", false, "have buttons that change something")
	return c
}

func (a *app) serveConsole(ctx context.Context, addr string, actions bool) error {
	at, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil || !at.IP.IsLoopback() {
		return usagef("--addr 127.0.0.1:7276, or [::1]:7276", "%q is no loopback address with a port", addr)
	}
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	o := &console.Options{Local: true}
	if o.Tasks, err = a.graph(ctx, p); err != nil && !errors.Is(err, pgwake.ErrNotMigrated) { // a layer that the schema does not have
		return err
	}
	if o.Events, err = a.bus(ctx, p, ""); err != nil {
		if !errors.Is(err, pgwake.ErrNotMigrated) {
			return err
		}
		o.Events = nil
	}
	if actions {
		o.Authorize = func(*http.Request, console.Action) error { return nil }
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	url := "http://" + listener.Addr().String() + "/"
	if a.asJSON {
		if err := a.printLine(map[string]string{"url": url}); err != nil {
			return err
		}
	} else {
		a.printf("%s %s\n", a.style.head.Render(url), a.style.faint.Render("Ctrl-C ends it"))
	}
	server := &http.Server{Handler: console.Handler(p, o), ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx }} // so streams end with it
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = server.Shutdown(ending)
	<-ended
	return err
}
