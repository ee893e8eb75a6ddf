package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/pgbouncer"
)

// This file answers: what if a transaction pooler is in between, through which LISTEN succeeds and nothing ever comes?

const (
	polling   = "polling" // a phase of this scenario alone
	pooledP99 = 2 * time.Second

	notListening = "nodes that say that a transaction pooler is in between"
	listening    = "nodes that listen around it"
)

var pooler = scenario{
	name: "pooler", rate: 50, // so few that nobody is there by chance
	what: "a real PgBouncer, `pool_mode = transaction`. Before: none. During: in between for everything, and nobody told pgwake. After: " +
		"`ListenConfig` goes around it. Polling: no way around it, and `ModePolling`",
	promise: fmt.Sprintf("every node says that a pooler is in between, p99 under %v throughout, and polls find no more than a tenth where there is a way around it", pooledP99),
	run: func(ctx context.Context, t *trial) (err error) {
		if t.Report, err = pgbouncer.Version(); err != nil {
			return err
		}
		p, err := pgbouncer.Start(t.server.URL, "transaction")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Stop()) }()
		for _, part := range []struct {
			name   string
			way    way
			length time.Duration
		}{
			{before, way{}, t.o.trouble / 2},
			{during, way{pool: p.Through, listen: p.Through}, t.o.trouble},
			{after, way{pool: p.Through}, t.o.trouble / 2},
			{polling, way{mode: pgwake.ModePolling, pool: p.Through, listen: p.Through}, t.o.trouble / 2},
		} {
			if err := t.begin(ctx, part.way); err != nil {
				return err
			}
			if err := t.phase(ctx, part.name, part.length, nil); err != nil {
				return err
			}
			for _, n := range t.load.nodes {
				switch {
				case part.name == during && strings.Contains(fmt.Sprint(n.Health().Problems), "transaction pooler"):
					t.Counts[notListening]++
				case part.name == after && n.Stats().Listening:
					t.Counts[listening]++
				}
			}
			if err := t.load.drain(ctx, patience); err != nil {
				return err
			}
		}
		return nil
	},
	keep: func(r *result) (broken []string) {
		for _, p := range r.Phases {
			broken = append(broken, r.late(p.Name, pooledP99)...)
		}
		for _, count := range []string{notListening, listening} {
			if r.Counts[count] != consumers {
				broken = append(broken, fmt.Sprintf("%s: %d of %d", count, r.Counts[count], consumers))
			}
		}
		finds := r.of(after).Finds
		var all int64
		for _, n := range finds {
			all += n
		}
		if polled := finds["scout"]; polled*10 > all {
			broken = append(broken, fmt.Sprintf("%d of %d finds by polling, although there is a way around the pooler", polled, all))
		}
		return broken
	},
}
