package devpg

// The third way to a server: a container.

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/wait"
)

const (
	dockerAnswers = 10 * time.Second // for an engine that runs
	dockerBoots   = 5 * time.Minute  // with the download of an image
)

// fromDocker starts the image postgres:MAJOR. If this process is killed,
// testcontainers' Ryuk removes the container.
func fromDocker(ctx context.Context, o *Options) (*Server, error) {
	if err := dockerHealth(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dockerBoots)
	defer cancel()
	image := "postgres:" + o.Version
	password := rand.Text() // the port may be open to other machines
	ctr, err := testcontainers.Run(ctx, image,
		testcontainers.WithLogger(quiet{}),
		testcontainers.WithExposedPorts("5432/tcp"),
		testcontainers.WithEnv(map[string]string{
			"POSTGRES_PASSWORD":    password,
			"POSTGRES_INITDB_ARGS": "--no-sync --encoding=UTF8 --locale=C",
		}),
		testcontainers.WithCmd(containerCommand(o)...),
		// The image starts the server twice: once for its set-up, without a port.
		testcontainers.WithWaitStrategyAndDeadline(dockerBoots, wait.ForAll(
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2),
			wait.ForListeningPort("5432/tcp"),
		)),
	)
	srv := &Server{
		Source: "Docker, image " + image + ", " + devpg.Durability(o.Fsync),
		stop: func(ctx context.Context) error {
			if err := testcontainers.TerminateContainer(ctr, testcontainers.StopContext(ctx)); err != nil {
				return fmt.Errorf("stop the container of %s: %w", image, err)
			}
			return nil
		},
	}
	if err == nil {
		srv.URL, srv.Version, err = reach(ctx, ctr, password)
	}
	if err != nil {
		// A container that did not start may still be there. The caller's ctx may be
		// what ended it.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dockerAnswers)
		defer cancel()
		_ = srv.Stop(ctx)
		return nil, fmt.Errorf("run image %s: %w", image, err)
	}
	return srv, nil
}

// dockerHealth says why there is no Docker here, or nil.
func dockerHealth(ctx context.Context) (err error) {
	defer func() {
		// testcontainers panics where there is no trace of Docker.
		if r := recover(); r != nil {
			err = fmt.Errorf("look for Docker: %v", r)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, dockerAnswers)
	defer cancel()
	provider, err := testcontainers.NewDockerProvider(testcontainers.Generic2DockerOptions(testcontainers.WithLogger(quiet{}))...)
	if err != nil {
		return fmt.Errorf("look for Docker: %w", err)
	}
	defer provider.Close()
	if err := provider.Health(ctx); err != nil {
		return fmt.Errorf("ask Docker whether it runs: %w", err)
	}
	return nil
}

// containerCommand is the server's command line. The official image has the
// library of pg_stat_statements, with which tests count statements.
func containerCommand(o *Options) []string {
	set := map[string]string{
		"max_connections":          "200",
		"fsync":                    onOff(o.Fsync),
		"full_page_writes":         onOff(o.Fsync),
		"shared_preload_libraries": "pg_stat_statements",
	}
	maps.Copy(set, o.Settings)
	command := []string{"postgres"}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		command = append(command, "-c", name+"="+set[name])
	}
	return command
}

// reach connects to the server in the container and returns how, and its version.
func reach(ctx context.Context, ctr testcontainers.Container, password string) (string, string, error) {
	endpoint, err := ctr.PortEndpoint(ctx, "5432/tcp", "")
	if err != nil {
		return "", "", err
	}
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", password),
		Host: endpoint, Path: "/postgres", RawQuery: "sslmode=disable",
	}
	conn, err := pgx.Connect(ctx, u.String())
	if err != nil {
		return "", "", err
	}
	defer conn.Close(ctx)
	var version string
	err = conn.QueryRow(ctx, "SELECT split_part(current_setting('server_version'), ' ', 1)").Scan(&version)
	return u.String(), version, err
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// quiet keeps testcontainers from writing to standard error.
type quiet struct{}

var _ log.Logger = quiet{}

func (quiet) Printf(string, ...any) {}
