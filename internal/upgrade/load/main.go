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
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
)

// The kinds of the ledger. What is done in the transaction that acknowledges is done exactly once; a step at least once.
const (
	kindItem    = "item"
	kindLimited = "limited"
	kindSession = "session"
	kindMessage = "message"
	kindEvent   = "event"
	kindStep    = "step"
)

// spaces are the namespaces of what is not in the default one.
var spaces = map[string]string{kindLimited: "limited", kindSession: "sessions", kindMessage: "instances"}

// each is how many there are of sessions, of keys and of a node's instances.
const each = 3

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

	if err := p.SetLimits(ctx, spaces[kindLimited], pgwake.Limits{MaxRunningPerKey: 1}); err != nil {
		return err
	}

	working, stop := context.WithCancel(ctx)
	producing, enough := context.WithCancel(working)
	loops := []func() error{
		func() error { return engine.Run(working) },
		func() error { return l.consume(working, kindItem, pgwake.FetchOptions{Tags: pgwake.Tags("upgrade")}) },
		func() error { return l.consume(working, kindLimited, pgwake.FetchOptions{}) },
		func() error {
			return l.consume(working, kindSession, pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: name, LockTimeout: time.Second}})
		},
		func() error { return l.turns(working) },
		func() error { return l.produce(producing) },
	}
	failures := make(chan error, len(loops))
	var all sync.WaitGroup
	for _, loop := range loops {
		all.Go(func() { failures <- loop() })
	}
	defer func() {
		stop()
		enough()
		all.Wait()
		for range loops {
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
	items := []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: "upgrade", Input: input, Tag: "upgrade"}},
		{WorkItem: pgwake.WorkItem{Name: "upgrade", Input: input, Key: fmt.Sprint("key ", n%each)}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: spaces[kindLimited]}},
		{WorkItem: pgwake.WorkItem{Name: "upgrade", Input: input, Session: fmt.Sprint("session ", n%each)}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: spaces[kindSession]}},
	}
	if _, err := l.p.EnqueueForWorkerManyTx(ctx, tx, items); err != nil {
		return err
	}
	m := pgwake.Message{Instance: fmt.Sprint(l.name, " ", n%each), Kind: pgwake.MessageQueued, Data: input}
	if n < each {
		m.Kind, m.Name = pgwake.MessageStart, "upgrade"
	}
	if _, err := l.p.EnqueueForOrchestratorTx(ctx, tx, m, &pgwake.EnqueueOptions{Namespace: spaces[kindMessage]}); err != nil {
		return err
	}
	o := &eventbus.EmitOptions{}
	if n%2 == 0 {
		o.Key = fmt.Sprint("key ", l.name, n%3)
	}
	if _, err := l.bus.WithTx(tx).Emit(ctx, "upgrade.sent", of, o); err != nil {
		return err
	}
	kinds := []string{kindItem, kindLimited, kindSession, kindMessage, kindEvent}
	ids := slices.Repeat([]string{of.ID}, len(kinds))
	if n%5 == 0 {
		if _, err := l.engine.WithTx(tx).Submit(ctx, taskgraph.Submission{Namespace: "default", Name: "upgrade", Version: "1", Context: of}); err != nil {
			return err
		}
		kinds, ids = append(kinds, kindStep, kindStep), append(ids, of.ID+" first", of.ID+" second")
	}
	_, err = tx.Exec(ctx, `INSERT INTO `+l.ledger+`.sent (kind, id) SELECT * FROM unnest($1::text[], $2::text[])`, kinds, ids)
	return err
}

// consume handles work items of a kind, each in the transaction that acknowledges it.
func (l *load) consume(ctx context.Context, kind string, o pgwake.FetchOptions) error {
	o.PollTimeout = time.Second
	if space := spaces[kind]; space != "" {
		o.Namespaces = []string{space}
	}
	for ctx.Err() == nil {
		item, err := l.p.FetchWorkItem(ctx, &o)
		if ctx.Err() != nil {
			return nil
		}
		if nothing(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		err = pgx.BeginFunc(context.WithoutCancel(ctx), l.p.Pool(), func(tx pgx.Tx) error {
			if err := l.done(context.WithoutCancel(ctx), tx, kind, item.Input); err != nil {
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

// turns takes those of instances, each of which has an event for each of its messages.
func (l *load) turns(ctx context.Context) error {
	for ctx.Err() == nil {
		turn, err := l.p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{PollTimeout: time.Second, Namespaces: []string{spaces[kindMessage]}})
		if ctx.Err() != nil {
			return nil
		}
		if nothing(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("fetch a turn: %w", err)
		}
		if int64(len(turn.History)) != turn.LastEventID {
			return fmt.Errorf("%s has %d events, and the last is %d", turn.Instance, len(turn.History), turn.LastEventID)
		}
		err = pgx.BeginFunc(context.WithoutCancel(ctx), l.p.Pool(), func(tx pgx.Tx) error {
			ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: turn.Name}}
			for i, m := range turn.Messages {
				if err := l.done(context.WithoutCancel(ctx), tx, kindMessage, m.Data); err != nil {
					return err
				}
				ack.History = append(ack.History, pgwake.Event{ID: turn.LastEventID + int64(i) + 1, Type: "upgraded", Data: m.Data})
			}
			return l.p.AckOrchestrationItemTx(context.WithoutCancel(ctx), tx, turn.LockToken, ack)
		})
		if err != nil {
			return fmt.Errorf("handle a turn of %s: %w", turn.Instance, err)
		}
	}
	return nil
}

// nothing reports whether there was none, or might be one the next time, as when the pool is exhausted.
func nothing(err error) bool {
	var e *pgwake.Error
	return errors.Is(err, pgwake.ErrNoWork) || errors.As(err, &e) && e.Retryable
}

func (l *load) done(ctx context.Context, tx pgx.Tx, kind string, input json.RawMessage) error {
	var of thing
	if err := json.Unmarshal(input, &of); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO `+l.ledger+`.done (kind, id, node) VALUES ($1, $2, $3)`, kind, of.ID, l.name)
	return err
}
