package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
)

// This file answers: what does a process do that carries workflows out?

// workerVariable is set to the schema in a process that is a worker.
const workerVariable = "PGWAKE_EXAMPLE_WORKER"

// lease is how long what a process has in hand is kept for it after its last sign of life.
const lease = 2 * time.Second

// place is where the workflows are.
type place struct{ url, schema string }

// deployment is the place as a process sees it.
type deployment struct {
	pool     *pgxpool.Pool
	provider *pgwake.Provider
	backend  *goworkflows.Backend
}

// open is what every process begins with. Tables of the example's own are in the same schema.
func (at place) open(ctx context.Context) (*deployment, error) {
	config, err := pgxpool.ParseConfig(at.url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.RuntimeParams["search_path"] = at.schema
	pgwake.TunePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: at.schema})
	if err != nil {
		pool.Close()
		return nil, err
	}
	b, err := goworkflows.New(ctx, p, backend.WithWorkflowLockTimeout(lease), backend.WithActivityLockTimeout(lease), backend.WithStickyTimeout(lease))
	if err != nil {
		err = errors.Join(err, p.Close(context.WithoutCancel(ctx)))
		pool.Close()
		return nil, err
	}
	return &deployment{pool, p, b}, nil
}

// close ends it, and carries statements out when nothing is under way any more.
func (d *deployment) close(ctx context.Context, last ...string) error {
	ctx = context.WithoutCancel(ctx)
	err := errors.Join(d.backend.Close(), d.provider.Close(ctx))
	for _, sql := range last {
		_, failed := d.pool.Exec(ctx, sql)
		err = errors.Join(err, failed)
	}
	d.pool.Close()
	return err
}

// carryOut is a worker, until ctx ends.
func (at place) carryOut(ctx context.Context) (err error) {
	d, err := at.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close(ctx)) }()

	w := worker.New(d.backend, d.backend.WorkerOptions())
	err = errors.Join(w.RegisterWorkflow(Order), w.RegisterWorkflow(Ship), w.RegisterActivity(&Shop{d.pool, os.Getpid()}))
	if err != nil {
		return err
	}
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if err := w.Start(working); err != nil {
		return err
	}
	<-ctx.Done()
	stop()
	return w.WaitForCompletion()
}

// beWorker is the program as a worker: until its standard input ends, and so no longer than whoever started it.
func beWorker(at place) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return at.carryOut(ctx)
}

// process is another process of this program, as a worker.
type process struct {
	*exec.Cmd
	stdin io.Closer
}

func (at place) startWorker() (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := exec.Command(program)
	c.Env, c.Stderr = append(os.Environ(), workerVariable+"="+at.schema, "PGWAKE_DATABASE_URL="+at.url), os.Stderr
	stdin, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	return &process{c, stdin}, c.Start()
}

// kill is SIGKILL: nothing is said, finished or given back.
func (p *process) kill() error {
	if err := p.Process.Kill(); err != nil {
		return err
	}
	_ = p.Wait() // "signal: killed"
	return nil
}

// stop ends it in an orderly way.
func (p *process) stop() error {
	if err := p.stdin.Close(); err != nil {
		return err
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("the worker process: %w", err)
	}
	return nil
}
