package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
)

// This file answers: would the soak notice? Each plant is a defect, for it to be found.

// plants are defects by name. They are there until the process is to end.
var plants = map[string]func(*workload){
	"memory": func(w *workload) {
		for nap(w.alive, 100*time.Millisecond) {
			w.members.mu.Lock()
			w.members.kept = append(w.members.kept, make([]byte, 1500<<10))
			w.members.mu.Unlock()
		}
	},
	"goroutine": func(w *workload) {
		for nap(w.alive, 10*time.Millisecond) {
			w.loops.Go(func() { <-w.alive.Done() })
		}
	},
	// A few at a time: on a machine that is slow, more attempts at once would only time out.
	"connection": func(w *workload) {
		const atATime, each = 4, 37 // the server does not admit many more
		for range atATime {
			w.loops.Go(func() {
				var all []*pgx.Conn
				for n := 0; n < each && nap(w.alive, atATime*100*time.Millisecond); n++ {
					conn, err := pgx.Connect(w.alive, w.ListenURL)
					w.notPlanted(err)
					if err == nil {
						all = append(all, conn)
					}
				}
				<-w.alive.Done()
				for _, conn := range all {
					_ = conn.Close(context.Background())
				}
			})
		}
	},
	// Rows of a node that lives: those of others are removed by whoever opens a Provider.
	"waiter": func(w *workload) {
		const node = -1
		conn, err := pgx.Connect(w.alive, w.ListenURL)
		if err != nil {
			w.notPlanted(err)
			return
		}
		defer conn.Close(context.Background())
		_, err = conn.Exec(w.alive, `SELECT pgwake.listen_session($1, $1)`, node)
		for lane := 1; err == nil && nap(w.alive, 50*time.Millisecond); lane++ {
			_, err = conn.Exec(w.alive, `INSERT INTO pgwake.waiters (node, lane, listener, queue, armed, number, namespace, fanout, places)
				VALUES ($1, $2, $1, 'worker', false, 0, '*', 1, 1)`, node, lane)
		}
		w.notPlanted(err)
	},
	"lost": planted(`DELETE FROM pgwake.worker_queue WHERE id = (SELECT id FROM pgwake.worker_queue
		WHERE attempt_count = 0 AND visible_at > now() AND instance_id IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED)`, 500*time.Millisecond),
	"twice": planted(`INSERT INTO pgwake.worker_queue (name, input) SELECT name, input FROM pgwake.worker_queue
		WHERE attempt_count = 0 AND instance_id IS NULL LIMIT 1`, 500*time.Millisecond),
	// Items of which no node is told, where nothing else wakes anybody.
	"silent": func(w *workload) {
		const alone = "silent"
		w.loop(alone, func(rng *rand.Rand) {
			w.soakWork(w.alive, rng, w.provider, &pgwake.FetchOptions{
				LockTimeout: soakLease, Namespaces: []string{alone}, Tags: pgwake.Tags(alone)})
		})
		for n := 0; nap(w.loud, 700*time.Millisecond); n++ {
			j := job{Key: fmt.Sprintf("%s-silent-%d", w.process(), n), Do: doAck}
			w.enqueue([]entry{{Key: j.Key, Do: j.Do}}, func(ctx context.Context) ([]pgwake.Enqueued, error) {
				return w.inTx(ctx, func(tx pgx.Tx) ([]pgwake.Enqueued, error) {
					_, err := tx.Exec(ctx, `SELECT set_config('pgwake.notify', 'off', true)`)
					if err == nil {
						_, err = tx.Exec(ctx, `INSERT INTO pgwake.worker_queue (name, input, tag, namespace)
							VALUES ('soak', $1, $2, $2)`, j.json(), alone)
					}
					return make([]pgwake.Enqueued, 1), err
				})
			})
		}
	},
	// Two transactions that take two locks, each the other's second first.
	"deadlock": func(w *workload) {
		const first, second = 1, 2
		var begun sync.WaitGroup
		begun.Add(2)
		take := func(one, other int) {
			err := pgx.BeginFunc(w.alive, w.pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(w.alive, `SELECT pg_advisory_xact_lock(-7, $1)`, one)
				begun.Done()
				if err != nil {
					return err
				}
				begun.Wait()
				_, err = tx.Exec(w.alive, `SELECT pg_advisory_xact_lock(-7, $1)`, other)
				return err
			})
			if refused := (*pgconn.PgError)(nil); !errors.As(err, &refused) || refused.Code != "40P01" { // as one of them must
				w.notPlanted(err)
			}
		}
		w.loops.Go(func() { take(first, second) })
		take(second, first)
	},
}

// planted runs a statement over and over.
func planted(statement string, every time.Duration) func(*workload) {
	return func(w *workload) {
		for nap(w.loud, every) {
			_, err := w.pool.Exec(w.alive, statement)
			w.notPlanted(err)
		}
	}
}

// notPlanted complains, unless all is well or at its end: what was not planted cannot be found.
func (w *workload) notPlanted(err error) {
	if err != nil && w.alive.Err() == nil {
		w.ledger.write(wrong, entry{Err: fmt.Sprintf("plant a defect: %v", err)})
	}
}

// What can be planted in a run with faults.
const (
	plantAsync = "async" // the standby of a failover has long stopped to follow
	plantLate  = "late"  // a process stays cut off for longer than it may take to recover
)

func (o options) planted(name string) bool { return slices.Contains(o.plant, name) }

// plantsOf reads a list of names, which are to be of defects that a soak has, or that a run with faults has.
func plantsOf(list string, soak bool) (names []string, err error) {
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		there := []string{plantAsync, plantLate}
		if soak {
			there = slices.Sorted(maps.Keys(plants))
		}
		if !slices.Contains(there, name) {
			return nil, fmt.Errorf("there is no defect %q to plant here, only %v", name, there)
		}
		names = append(names, name)
	}
	return names, nil
}
