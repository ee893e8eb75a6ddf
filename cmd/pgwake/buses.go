package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: how do commands get at the layers?

// bus is the event bus in a namespace.
func (a *app) bus(ctx context.Context, p *pgwake.Provider, namespace string) (*eventbus.Bus, error) {
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: namespace, Logger: silent})
	return bus, layerError(err, "eventbus")
}

// graph is the task graph. Nothing of it runs here.
func (a *app) graph(ctx context.Context, p *pgwake.Provider) (*taskgraph.Graph, error) {
	e, err := taskgraph.New(ctx, p, &taskgraph.Config{MaxResult: a.maxResult, Logger: silent})
	if err != nil {
		return nil, layerError(err, "taskgraph")
	}
	return e.Graph, nil
}

// layerError says how the layer gets there that is missing.
func layerError(err error, layer string) error {
	if !errors.Is(err, pgwake.ErrNotMigrated) {
		return err
	}
	return &hinted{fmt.Errorf("the schema has no %s: %w", layer, err), "pgwake migrate up --layer " + layer}
}
