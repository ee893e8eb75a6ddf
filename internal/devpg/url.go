package devpg

// The first way to a server: a URL in the environment.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// answerTimeout bounds the wait for a server that should be running already.
const answerTimeout = 5 * time.Second

var errNotSet = errors.New("not set")

// fromURL returns the server that the environment names, or nil after it has told
// pass why each name is passed over.
func fromURL(ctx context.Context, o *Options, pass func(string, error)) *Server {
	if o.IgnoreURL {
		return nil
	}
	for _, name := range []string{EnvURL, EnvFallbackURL} {
		url := os.Getenv(name)
		if url == "" {
			pass(name, errNotSet)
			continue
		}
		srv, err := given(ctx, o, name, url)
		if err != nil {
			pass(name, err)
			continue
		}
		return srv
	}
	return nil
}

// given is the server at url if it answers and is of the right version.
func given(ctx context.Context, o *Options, name, url string) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err // pgx keeps passwords out of its errors
	}
	defer conn.Close(ctx)
	version := serverVersion(conn)
	if err := o.accepts(version); err != nil {
		return nil, err
	}
	cfg := conn.Config()
	return &Server{
		URL:     url,
		Source:  fmt.Sprintf("%s (%s:%d, database %s)", name, cfg.Host, cfg.Port, cfg.Database),
		Version: version,
	}, nil
}

// serverVersion is what the server reported when the connection began, such as
// "15.18", without the packager's remark in brackets.
func serverVersion(conn *pgx.Conn) string {
	version, _, _ := strings.Cut(conn.PgConn().ParameterStatus("server_version"), " ")
	return version
}

// majorOf is 15 for "15.18", 19 for "19beta2", and 0 for what starts with no digit.
func majorOf(version string) int {
	end := strings.IndexFunc(version, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(version)
	}
	major, _ := strconv.Atoi(version[:end])
	return major
}
