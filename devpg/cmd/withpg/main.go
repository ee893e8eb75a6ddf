// Command withpg runs a command with a PostgreSQL for it.
//
//	withpg [-fsync] [-pg 15] [-ignore-url] [-keep-url] [-keep-sessions] -- command [arguments]
//
// It takes the server at $PGWAKE_DATABASE_URL or $DATABASE_URL if one answers, and
// otherwise starts one, in the ways of package [github.com/pgwake/pgwake/devpg].
// It says on standard error which, runs the command with PGWAKE_DATABASE_URL and
// DATABASE_URL set to that server, passes signals on to it, and stops the server afterwards. If withpg
// is killed, the server ends too.
//
// The flags:
//
//	-fsync       start a server that writes as in production, for benchmarks;
//	             a server that runs already is then not taken
//	-pg 15       the major version; defaults to $PGWAKE_PG, else any
//	-ignore-url  start a server even if the environment has the URL of one
//	-keep-url    if PGWAKE_DATABASE_URL is set, leave all as it is
//	-keep-sessions
//	             give sessions of clients that have ended to others, as new ones: what
//	             thousands of short ones cost is for the most part that they begin. Only
//	             for a server that it starts, and by a port of its own that is in the URL.
//	             Further servers that the command boots share what initdb makes
//
// The exit status is the command's, or 128 and its signal if it was ended by one;
// 127 if the command is not found, 126 if it cannot be run, 125 if there is no
// server, and 2 for wrong usage.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/devpg"
)

const (
	urlVariable     = "PGWAKE_DATABASE_URL"
	usualVariable   = "DATABASE_URL"
	versionVariable = "PGWAKE_PG"
	// Where servers that the command boots find what initdb made for the first of them.
	pristineVariable = "PGWAKE_DEVPG_PRISTINE"
	stopTimeout      = 30 * time.Second

	statusUsage    = 2
	statusNoServer = 125
	statusCannot   = 126
	statusNotFound = 127
	statusSignal   = 128
)

// The main thread lives as long as the process. Where the command's life is tied
// to that of the thread that started it, it must be this one.
func init() { runtime.LockOSThread() }

func main() { os.Exit(run(os.Args[1:], os.Stderr)) }

func run(args []string, stderr io.Writer) int {
	var opts devpg.Options
	flags := flag.NewFlagSet("withpg", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: withpg [-fsync] [-pg 15] [-ignore-url] [-keep-url] [-keep-sessions] -- command [arguments]")
		flags.PrintDefaults()
	}
	flags.BoolVar(&opts.Fsync, "fsync", false, "start a server that writes as in production")
	flags.StringVar(&opts.Version, "pg", "", "major version of PostgreSQL (default $"+versionVariable+", else any)")
	flags.BoolVar(&opts.IgnoreURL, "ignore-url", false, "start a server even if the environment has the URL of one")
	keepURL := flags.Bool("keep-url", false, "if "+urlVariable+" is set, leave all as it is")
	again := flags.Bool("keep-sessions", false, "give sessions of clients that have ended to others, as new ones")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return statusUsage
	}
	if flags.NArg() == 0 {
		flags.Usage()
		return statusUsage
	}

	// Signals are taken from here on, so that none ends this process while it has a
	// server to stop.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)

	env := os.Environ()
	if *keepURL && os.Getenv(urlVariable) != "" {
		fmt.Fprintln(stderr, "withpg: "+urlVariable+" is kept as it is")
	} else {
		var passedOver []string // part of the error if there is no server
		opts.Logf = func(format string, args ...any) { passedOver = append(passedOver, fmt.Sprintf(format, args...)) }
		srv, sig, err := start(&opts, signals)
		if err != nil {
			fmt.Fprintln(stderr, "withpg:", err)
			if sig != 0 {
				return statusSignal + int(sig)
			}
			return statusNoServer
		}
		defer stop(srv, stderr)
		for _, line := range passedOver { // the last one says which was taken
			fmt.Fprintln(stderr, "withpg: "+strings.TrimPrefix(line, "devpg: "))
		}
		url := srv.URL
		if *again && srv.Owned() {
			if kept, ours, err := keepSessions(url); err != nil {
				fmt.Fprintln(stderr, "withpg: sessions are not kept:", err) // it takes longer
			} else {
				defer kept.close()
				url = ours
			}
			if dir := directoryOf(srv.URL); dir != "" {
				env = append(env, pristineVariable+"="+dir)
			}
		}
		env = append(env, urlVariable+"="+url, usualVariable+"="+url)
		if opts.Version != "" {
			// Otherwise a command that reads the variable might pass this server over.
			env = append(env, versionVariable+"="+opts.Version)
		}
	}
	return command(flags.Args(), env, signals, stderr)
}

// directoryOf is that of a server of this machine, which goes with it, or "".
func directoryOf(url string) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return ""
	}
	defer conn.Close(ctx)
	var data string
	if err := conn.QueryRow(ctx, "SHOW data_directory").Scan(&data); err != nil {
		return ""
	}
	if _, err := os.Stat(data); err != nil { // it is in a container
		return ""
	}
	return filepath.Dir(data)
}

// start starts a server unless a signal comes first; that is then returned.
func start(opts *devpg.Options, signals <-chan os.Signal) (*devpg.Server, syscall.Signal, error) {
	opts.IgnoreURL = opts.IgnoreURL || opts.Fsync
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	type result struct {
		srv *devpg.Server
		err error
	}
	started := make(chan result, 1)
	go func() {
		srv, err := devpg.Start(ctx, opts)
		started <- result{srv, err}
	}()
	var caught syscall.Signal
	for {
		select {
		case r := <-started:
			if r.err == nil && caught != 0 {
				stop(r.srv, io.Discard)
				r.err = context.Cause(ctx)
			}
			return r.srv, caught, r.err
		case s := <-signals:
			caught, _ = s.(syscall.Signal)
			cancel(fmt.Errorf("ended by signal: %v", s))
		}
	}
}

func stop(srv *devpg.Server, stderr io.Writer) {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := srv.Stop(ctx); err != nil {
		fmt.Fprintln(stderr, "withpg:", err)
	}
}

// command runs the command, passes signals on to it, and returns its exit status.
func command(args, env []string, signals <-chan os.Signal, stderr io.Writer) int {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	endWithUs(cmd)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(stderr, "withpg:", err)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			return statusNotFound
		}
		return statusCannot
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if !fromTerminal(s) {
				_ = cmd.Process.Signal(s) // it may have ended
			}
		case err := <-ended:
			return status(cmd, err, stderr)
		}
	}
}

func status(cmd *exec.Cmd, err error, stderr io.Writer) int {
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(stderr, "withpg:", err)
		return statusCannot
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return statusSignal + int(ws.Signal())
	}
	return cmd.ProcessState.ExitCode()
}
