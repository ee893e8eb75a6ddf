package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	bus "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/migrations"
	graph "github.com/pgwake/pgwake/taskgraph/migrations"
)

// This file answers: which sets of migrations are there, and which of them is meant?

// layer is one set. The first stands on nothing, and the others on it.
type layer struct {
	name, about string
	up, down    func(ctx context.Context, config *pgx.ConnConfig, schema string) error
	version     func(ctx context.Context, conn *pgx.Conn, schema string) (current, latest int64, err error)
	script      func(schema string, after int64) (string, error)
}

var layers = []layer{
	{"root", "queues, instances, dead letters", migrations.Up, migrations.Down, migrations.Version, migrations.Script},
	{"taskgraph", "tasks with steps", graph.Up, graph.Down, graph.Version, graph.Layer().Script},
	{"eventbus", "events, groups, schedules", bus.Up, bus.Down, bus.Version, bus.Layer().Script},
}

// chosenLayers are those of the names, in the order of layers.
func chosenLayers(names []string) (all []layer, err error) {
	for _, l := range layers {
		if slices.Contains(names, l.name) {
			all = append(all, l)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(l layer) bool { return l.name == name }) {
			return nil, usagef(layerNames(), "there is no layer %q", name)
		}
	}
	if len(all) == 0 {
		return nil, usagef(layerNames(), "--layer names none")
	}
	return all, nil
}

// layerState is what migrate status tells of a layer.
type layerState struct {
	Layer   string `json:"layer"`
	Version int64  `json:"version"`
	Latest  int64  `json:"latest"`
	State   string `json:"state"` // missing, behind, current, newer, foreign
	About   string `json:"about"`
	Error   string `json:"error,omitempty"`
}

func stateOf(ctx context.Context, conn *pgx.Conn, schema string, l layer) (layerState, error) {
	s := layerState{Layer: l.name, About: l.about}
	var err error
	s.Version, s.Latest, err = l.version(ctx, conn, schema)
	switch {
	case errors.Is(err, migrations.ErrForeign):
		s.State, s.Error = "foreign", err.Error()
		return s, nil
	case err != nil:
		return s, err
	case s.Version == 0:
		s.State = "missing"
	case s.Version < s.Latest:
		s.State = "behind"
	case s.Version > s.Latest:
		s.State = "newer"
	default:
		s.State = "current"
	}
	return s, nil
}

// statesOf are those of all layers.
func statesOf(ctx context.Context, conn *pgx.Conn, schema string) ([]layerState, error) {
	var all []layerState
	for _, l := range layers {
		s, err := stateOf(ctx, conn, schema, l)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.name, err)
		}
		all = append(all, s)
	}
	return all, nil
}

func layerNames() string {
	var names []string
	for _, l := range layers {
		names = append(names, l.name)
	}
	return strings.Join(names, ", ")
}
