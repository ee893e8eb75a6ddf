// Package peers has what pgwake is compared with: River, the published design that pgwake goes back to, and a plain
// short poll. They go through the scenarios of package measure, on the same server, by the same driver, and with what is
// enqueued and done committed to disk.
//
// It is apart from package measure so that the demo, which needs that one, needs no River.
package peers

import (
	"context"
	"runtime/debug"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// newPool opens a pool whose connections find the schema without its name. connections of 0 leaves their number to the
// URL; settings are those of the session.
func newPool(ctx context.Context, url, schema string, connections int, settings map[string]string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	if connections > 0 {
		config.MaxConns = int32(connections)
	}
	config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	for setting, value := range settings {
		config.ConnConfig.RuntimeParams[setting] = value
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// riverVersion is the one that this program was built with.
func riverVersion() string {
	const module = "github.com/riverqueue/river"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if dep.Path == module {
				return "River " + dep.Version
			}
		}
	}
	return "River"
}
