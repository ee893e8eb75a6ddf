package dispatch

import (
	"context"
	"fmt"

	"github.com/pgwake/pgwake"
)

// This file answers: which handler is an item for, apart from its name?

// Route is a rule of a Router.
type Route struct {
	// Namespace is a name, or a pattern as path.Match has them. Defaults to "": any.
	Namespace string

	// MinPriority is the least priority of items that the rule is for. Defaults to 0: any.
	MinPriority int

	Handler Handler
}

// Router returns a Handler that has items handled by the first Route which is for them, or else by the handler for the others; without
// one (nil) such items fail with ErrNoHandler. Fails with pgwake.ErrConfig.
func Router(routes []Route, others Handler) (Handler, error) {
	var k checks
	for i, r := range routes {
		if r.Namespace != "" && !validPattern(r.Namespace) {
			k.bad("Route %d: %q is neither a namespace nor a pattern", i, r.Namespace)
		}
		if r.Handler == nil {
			k.bad("Route %d: there is no Handler", i)
		}
		if r.MinPriority < pgwake.MinPriority || r.MinPriority > pgwake.MaxPriority {
			k.bad("Route %d: MinPriority %d is not between %d and %d", i, r.MinPriority, pgwake.MinPriority, pgwake.MaxPriority)
		}
	}
	if k.err != nil {
		return nil, fmt.Errorf("router: %w", k.err)
	}
	if others == nil {
		others = noHandler
	}
	return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) {
		for _, r := range routes {
			if item.Priority >= r.MinPriority && (r.Namespace == "" || matchesAny([]string{r.Namespace}, item.Namespace)) {
				return r.Handler(ctx, item)
			}
		}
		return others(ctx, item)
	}, nil
}

func noHandler(context.Context, *pgwake.ClaimedWorkItem) (Result, error) { return nil, ErrNoHandler }
