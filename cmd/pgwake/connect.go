package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/migrations"
)

// This file answers: which database is it, how is it reached, and what is told of it?

// silent is the log of what is opened for the length of a command: errors come back to it.
var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// connectTimeout is how long a connection may take if the URL does not say so.
const connectTimeout = 10 * time.Second

// target is the URL of the database.
func (a *app) target() (string, error) {
	for _, u := range []string{a.databaseURL, a.env("PGWAKE_DATABASE_URL"), a.env("DATABASE_URL")} {
		if u != "" {
			return u, nil
		}
	}
	for _, name := range []string{"PGHOST", "PGSERVICE", "PGDATABASE"} {
		if a.env(name) != "" {
			return "", nil // pgx reads the others
		}
	}
	return "", usagef("--database-url postgres://user@host:5432/database, or PGWAKE_DATABASE_URL with the same", "it is not said which database")
}

// poolConfig is how to connect, through whatever is in between.
func (a *app) poolConfig() (*pgxpool.Config, error) {
	u, err := a.target()
	if err != nil {
		return nil, err
	}
	return a.parse(u)
}

// config is the same for one connection.
func (a *app) config() (*pgx.ConnConfig, error) {
	config, err := a.poolConfig()
	if err != nil {
		return nil, err
	}
	return config.ConnConfig, nil
}

// listenTarget is the URL of the way around a transaction pooler, if there is another.
func (a *app) listenTarget() string { return cmp.Or(a.listenURL, a.env("PGWAKE_LISTEN_URL")) }

// listenConfig is how to connect around a transaction pooler: that of config, unless --listen-url says otherwise.
func (a *app) listenConfig() (*pgx.ConnConfig, error) {
	if u := a.listenTarget(); u != "" {
		config, err := a.parse(u)
		if err != nil {
			return nil, err
		}
		return config.ConnConfig, nil
	}
	return a.config()
}

func (a *app) parse(u string) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(u) // settings of the pool are allowed
	if err != nil {
		return nil, usagef("as in postgres://user@host:5432/database?sslmode=require; the password may be in PGPASSWORD or ~/.pgpass", "the URL of the database: %w", err)
	}
	c := config.ConnConfig
	c.DefaultQueryExecMode = pgx.QueryExecModeExec // a pooler may be in between: no statement is to stay prepared
	c.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		// The role may have another style of dates, or encoding.
		return conns.Legible(ctx, conn, c.DefaultQueryExecMode)
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = connectTimeout
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "pgwake command line"
	}
	return config, nil
}

// connect opens one connection.
func (a *app) connect(ctx context.Context) (*pgx.Conn, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, config)
}

// provider opens a Provider that changes nothing by being there: it neither migrates nor listens nor fetches.
func (a *app) provider(ctx context.Context) (*pgwake.Provider, func(), error) {
	return a.openProvider(ctx, &pgwake.Config{Mode: pgwake.ModeDisabled})
}

// openProvider opens one on the schema. The function ends it, and the pool with it.
func (a *app) openProvider(ctx context.Context, c *pgwake.Config) (*pgwake.Provider, func(), error) {
	config, err := a.poolConfig()
	if err != nil {
		return nil, nil, err
	}
	pgwake.TunePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, nil, err
	}
	if c.ListenConfig, err = a.listenConfig(); err != nil {
		pool.Close()
		return nil, nil, err
	}
	c.Schema = cmp.Or(c.Schema, a.schema)
	c.SkipMigrate = true
	c.Logger = silent
	p, err := pgwake.New(ctx, pool, c)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return p, func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = p.Close(ending)
		pool.Close()
	}, nil
}

// hintFor is what to do about an error.
func hintFor(err error) string {
	var known *hinted
	var refused *pgconn.ConnectError
	var pg *pgconn.PgError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(err, &known):
		return known.hint
	case errors.As(err, &certificate):
		return "sslrootcert, of the URL or as PGSSLROOTCERT, is the certificate of who has signed the server's; and verify-full asks for the host of the URL in that"
	case errors.Is(err, pgwake.ErrNotMigrated) && errors.Is(err, migrations.ErrForeign):
		return "the schema was made by another program, or by an unreleased version of this one: name another with --schema"
	case errors.Is(err, pgwake.ErrNotMigrated):
		return "pgwake migrate up, or --schema with the name of the one that is; pgwake migrate status tells"
	case isForbidden(err) && errors.As(err, &refused):
		to := refused.Config
		return "GRANT CONNECT ON DATABASE " + pgx.Identifier{cmp.Or(to.Database, to.User)}.Sanitize() + " TO " + pgx.Identifier{to.User}.Sanitize()
	case isForbidden(err):
		return "pgwake doctor says which rights the role lacks, and how to grant them"
	case errors.As(err, &pg) && pg.Code == "28P01":
		return "the password: in the URL, PGPASSWORD, or ~/.pgpass"
	case errors.As(err, &pg) && pg.Code == "3D000":
		return "the name of the database, after the last / of the URL"
	case errors.As(err, &pg) && pg.Code == "53300":
		return "pgwake doctor as a superuser, for whom some are kept, says whose limit that is; fewer processes, or a smaller pool_max_conns"
	case errors.As(err, &refused):
		return "is the server there, and the URL right? Try: psql with the same URL"
	}
	return ""
}

// isForbidden says that the role lacks a right.
func isForbidden(err error) bool {
	var pg *pgconn.PgError
	return errors.Is(err, pgwake.ErrPermission) || errors.As(err, &pg) && pg.Code == "42501"
}

// secret finds a password in a URL or in keyword=value pairs.
var secret = regexp.MustCompile(`(://[^:@/\s]*:)[^@\s]*(@)|(password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'"` + "`" + `]+)`)

// written finds the password of a URL.
var written = regexp.MustCompile(`://[^:@/\s]*:([^@\s]+)@`)

// withoutSecrets takes passwords out of a text that is to be printed.
func (a *app) withoutSecrets(text string) string {
	passwords := []string{a.env("PGPASSWORD")}
	var public []string // a password that is one of these is none, and would take the name out of what is said
	for _, u := range []string{a.databaseURL, a.listenURL, a.env("PGWAKE_DATABASE_URL"), a.env("DATABASE_URL"), a.env("PGWAKE_LISTEN_URL")} {
		if config, err := pgx.ParseConfig(u); err == nil {
			passwords = append(passwords, config.Password, url.QueryEscape(config.Password), url.PathEscape(config.Password))
			public = append(public, config.User, config.Database)
		}
		if m := written.FindStringSubmatch(u); m != nil {
			passwords = append(passwords, m[1]) // as it stands there
		}
	}
	for _, password := range passwords {
		if len(password) > 2 && !slices.Contains(public, password) {
			text = strings.ReplaceAll(text, password, "xxxxx")
		}
	}
	return secret.ReplaceAllString(text, "${1}${3}xxxxx${2}")
}

// place says which database it is, for people.
func place(c *pgx.ConnConfig) string {
	return glance.OneLine(fmt.Sprintf("%s on %s:%d as %s", c.Database, c.Host, c.Port, c.User))
}
