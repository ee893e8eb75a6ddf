package pgwake

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what did an execution go through?

// Event is an entry of an execution's history. The runtime chooses id, type and content; nothing here reads
// them.
type Event struct {
	ID        int64           // unique in the execution; history is kept in its order
	Type      string          // required; at most 255 bytes
	Data      json.RawMessage // JSON of at most Config.MaxPayload bytes, kept byte for byte; empty means none
	CreatedAt time.Time       // set by the server when the event is stored
}

// ReadHistory returns the history of the instance's current execution; empty for an unknown instance.
func (p *Provider) ReadHistory(ctx context.Context, instance string) ([]Event, error) {
	return p.readHistory(ctx, instance, nil, nil, nil)
}

// ReadHistoryExecution returns the history of one execution from an event id on; from 0 is all of it. Empty
// if there is none.
func (p *Provider) ReadHistoryExecution(ctx context.Context, instance string, executionID, fromEventID int64) ([]Event, error) {
	return p.readHistory(ctx, instance, &executionID, &fromEventID, nil)
}

// ReadHistoryPage is ReadHistoryExecution for people who look: it returns at most limit events, up to MaxFetch, those with the lowest ids.
// To read on, pass the id after that of the last one.
func (p *Provider) ReadHistoryPage(ctx context.Context, instance string, executionID, fromEventID int64, limit int) ([]Event, error) {
	if limit < 1 || limit > MaxFetch {
		return nil, failed("read history", invalid("a limit of %d is not between 1 and %d", limit, MaxFetch))
	}
	return p.readHistory(ctx, instance, &executionID, &fromEventID, &limit)
}

func (p *Provider) readHistory(ctx context.Context, instance string, execution, from *int64, limit *int) (events []Event, err error) {
	err = p.do(ctx, "read history", func(ctx context.Context, q querier) error {
		if err := checkText("instance id", instance, true); err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.readHistory, instance, execution, from, limit)
		if err != nil {
			return err
		}
		events, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Event, err error) {
			err = row.Scan(&e.ID, &e.Type, (*[]byte)(&e.Data), &e.CreatedAt, nil)
			return e, err
		})
		return err
	})
	return events, err
}

// AppendHistory adds events to an execution without a turn, all or none. ErrDuplicateEvent if an id is taken.
// It takes no lock: a runtime uses it for what no turn can decide, such as marking a broken instance.
func (p *Provider) AppendHistory(ctx context.Context, instance string, executionID int64, events []Event) error {
	defer p.engine.changed()
	return p.do(ctx, "append history", func(ctx context.Context, q querier) error {
		return p.appendHistory(ctx, q, instance, executionID, events)
	})
}

// AppendHistoryTx is AppendHistory as part of the transaction. In one that is not READ COMMITTED it is ErrInvalid for an
// execution that has not been acknowledged yet, as far as the transaction sees, and a serialization failure for one
// that has changed after its snapshot.
func (p *Provider) AppendHistoryTx(ctx context.Context, tx pgx.Tx, instance string, executionID int64, events []Event) error {
	return p.doTx(ctx, tx, "append history", func(ctx context.Context, q querier) error {
		return p.appendHistory(ctx, q, instance, executionID, events)
	})
}

func (p *Provider) appendHistory(ctx context.Context, q querier, instance string, execution int64, events []Event) error {
	if err := checkText("instance id", instance, true); err != nil {
		return err
	}
	if execution < 1 {
		return invalid("execution id %d is less than 1", execution)
	}
	c, err := p.eventColumns(events)
	if err != nil || len(events) == 0 {
		return err
	}
	_, err = q.Exec(ctx, p.sql.appendHistory, append([]any{instance, execution}, c.args()...)...)
	return err
}

// eventColumns are events as the arrays that append_history and ack_orchestration take.
type eventColumns struct {
	ids   []int64
	types []string
	datas []*string
}

func (c *eventColumns) args() []any { return []any{c.ids, c.types, c.datas} }

func (p *Provider) eventColumns(events []Event) (*eventColumns, error) {
	c := &eventColumns{}
	for i := range events {
		e := &events[i]
		if err := checkText("event type", e.Type, true); err != nil {
			return nil, at(i, len(events), err)
		}
		if err := p.cfg.checkJSON("data of event "+quote(e.Type), e.Data); err != nil {
			return nil, at(i, len(events), err)
		}
		c.ids = append(c.ids, e.ID)
		c.types = append(c.types, e.Type)
		c.datas = append(c.datas, payload(e.Data))
	}
	return c, nil
}
