package workflows

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/postgres"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
)

// This file answers: which backends are compared?

// onPgwake is a process on pgwake.
type onPgwake struct {
	p *pgwake.Provider
	b *goworkflows.Backend
}

func ours(ctx context.Context, url string) (process, error) {
	p, err := pgwake.Open(ctx, url, &pgwake.Config{Logger: silent})
	if err != nil {
		return nil, err
	}
	b, err := goworkflows.New(ctx, p, backend.WithLogger(silent))
	if err != nil {
		return nil, errors.Join(err, p.Close(context.WithoutCancel(ctx)))
	}
	return &onPgwake{p, b}, nil
}

func (o *onPgwake) backend() backend.Backend { return o.b }
func (o *onPgwake) options() *worker.Options { return o.b.WorkerOptions() }

func (o *onPgwake) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	return errors.Join(o.b.Close(), o.p.Close(ctx))
}

// polling is a process on the runtime's own backend.
type polling struct {
	b  backend.Backend
	db *sql.DB
}

func theirs(_ context.Context, url string) (process, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	db := stdlib.OpenDB(*config)
	b := postgres.NewPostgresBackendWithDB(db, postgres.WithApplyMigrations(true), postgres.WithBackendOptions(backend.WithLogger(silent)))
	return &polling{b, db}, nil
}

func (p *polling) backend() backend.Backend { return p.b }

func (p *polling) options() *worker.Options {
	o := worker.DefaultOptions
	return &o
}

func (p *polling) close() error { return errors.Join(p.b.Close(), p.db.Close()) }

// farewell bounds what is done after the context has ended.
const farewell = 10 * time.Second
