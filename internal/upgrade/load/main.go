// Program load is a node of internal/upgrade: it produces, handles, and notes both in a ledger, until its standard input ends. It is also built from
// earlier states, so it uses nothing that these do not have.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// The kinds of the ledger. What is done in the transaction that acknowledges is done exactly once; a step at least once.
const (
	kindItem  = "item"
	kindEvent = "event"
	kindStep  = "step"
)

// thing is the input of whatever is sent.
type thing struct {
	ID string `json:"id"`
}

func main() {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3]); err != nil {
		slog.Error("load", "error", err)
		os.Exit(1)
	}
}

// run says "ready" once it is. A line on standard input has it produce no more.
func run(ctx context.Context, url, schema, name string) (err error) {
	p, err := pgwake.Open(ctx, url, &pgwake.Config{Schema: schema})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()
	bus, err := eventbus.New(ctx, p, nil)
	if err != nil {
		return err
	}
	engine, err := taskgraph.New(ctx, p, nil)
	if err != nil {
		return err
	}
	l := &load{p: p, bus: bus, engine: engine, ledger: pgx.Identifier{schema + "_ledger"}.Sanitize(), name: name}

	node, err := bus.Node(ctx, &eventbus.NodeConfig{Group: "upgrade"})
	if err != nil {
		return err
	}
	if err := node.On(ctx, "upgrade.*", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		return l.done(ctx, tx, kindEvent, e.Payload)
	}); err != nil {
		return err
	}
	if err := node.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, node.Stop(context.WithoutCancel(ctx))) }()

	engine.Handle("upgrade.step", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var of thing
		if err := s.DecodeContext(&of); err != nil {
			return nil, err
		}
		_, err := p.Pool().Exec(ctx, `INSERT INTO `+l.ledger+`.done (kind, id, node) VALUES ($1, $2, $3)`, kindStep, of.ID+" "+s.Name, name)
		return nil, err
	})
	if err := engine.Register(ctx, taskgraph.Define("default", "upgrade", "1").Step("first", "upgrade.step").Step("second", "upgrade.step", taskgraph.After("first"))); err != nil {
		return err
	}

	working, stop := context.WithCancel(ctx)
	producing, enough := context.WithCancel(working)
	failures := make(chan error, 3)
	var all sync.WaitGroup
	all.Go(func() { failures <- engine.Run(working) })
	all.Go(func() { failures <- l.consume(working) })
	all.Go(func() { failures <- l.produce(producing) })
	defer func() {
		stop()
		enough()
		all.Wait()
		for range 3 {
			err = errors.Join(err, <-failures)
		}
	}()
	fmt.Println("ready")
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		enough()
	}
	return input.Err()
}

type load struct {
	p      *pgwake.Provider
	bus    *eventbus.Bus
	engine *taskgraph.Engine
	ledger string
	name   string
}

// produce sends one of each kind, with its line in the ledger, in one transaction.
func (l *load) produce(ctx context.Context) error {
	for n := 0; ctx.Err() == nil; n++ {
		of := thing{ID: fmt.Sprintf("%s-%d", l.name, n)}
		// One that has begun ends: what is sent is to be in the ledger.
		err := pgx.BeginFunc(context.WithoutCancel(ctx), l.p.Pool(), func(tx pgx.Tx) error { return l.send(context.WithoutCancel(ctx), tx, n, of) })
		if err != nil {
			return fmt.Errorf("send %s: %w", of.ID, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

func (l *load) send(ctx context.Context, tx pgx.Tx, n int, of thing) error {
	input, err := json.Marshal(of)
	if err != nil {
		return err
	}
	if _, err := l.p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "upgrade", Input: input, Tag: "upgrade"}, nil); err != nil {
		return err
	}
	o := &eventbus.EmitOptions{}
	if n%2 == 0 {
		o.Key = fmt.Sprint("key ", l.name, n%3)
	}
	if _, err := l.bus.WithTx(tx).Emit(ctx, "upgrade.sent", of, o); err != nil {
		return err
	}
	kinds := []string{kindItem, kindEvent}
	ids := []string{of.ID, of.ID}
	if n%5 == 0 {
		if _, err := l.engine.WithTx(tx).Submit(ctx, taskgraph.Submission{Namespace: "default", Name: "upgrade", Version: "1", Context: of}); err != nil {
			return err
		}
		kinds, ids = append(kinds, kindStep, kindStep), append(ids, of.ID+" first", of.ID+" second")
	}
	_, err = tx.Exec(ctx, `INSERT INTO `+l.ledger+`.sent (kind, id) SELECT * FROM unnest($1::text[], $2::text[])`, kinds, ids)
	return err
}

// consume handles work items, each in the transaction that acknowledges it.
func (l *load) consume(ctx context.Context) error {
	for ctx.Err() == nil {
		item, err := l.p.FetchWorkItem(ctx, &pgwake.FetchOptions{PollTimeout: time.Second, Tags: pgwake.Tags("upgrade")})
		if ctx.Err() != nil {
			return nil
		}
		var e *pgwake.Error
		if errors.Is(err, pgwake.ErrNoWork) || errors.As(err, &e) && e.Retryable { // as when the pool is exhausted
			continue
		}
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		err = pgx.BeginFunc(context.WithoutCancel(ctx), l.p.Pool(), func(tx pgx.Tx) error {
			if err := l.done(context.WithoutCancel(ctx), tx, kindItem, item.Input); err != nil {
				return err
			}
			return l.p.AckWorkItemTx(context.WithoutCancel(ctx), tx, item.LockToken, nil)
		})
		if err != nil {
			return fmt.Errorf("handle item %d: %w", item.ID, err)
		}
	}
	return nil
}

func (l *load) done(ctx context.Context, tx pgx.Tx, kind string, input json.RawMessage) error {
	var of thing
	if err := json.Unmarshal(input, &of); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO `+l.ledger+`.done (kind, id, node) VALUES ($1, $2, $3)`, kind, of.ID, l.name)
	return err
}
