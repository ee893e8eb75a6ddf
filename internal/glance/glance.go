// Package glance is what there is to know of a schema at a glance: what is queued, who is there and how they are, and what follows from
// two looks one after the other. The command line and the console show it.
package glance

import (
	"context"
	_ "embed"
	"encoding/json"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is there at this moment?

// Picture is one look at everything. It is not changed any more once it was taken.
type Picture struct {
	At      time.Time // by the clock of this machine, as are all instants below
	Depths  []pgwake.QueueDepth
	Oldest  time.Time // since when what is due longest has been so; zero: nothing is due
	Letters int64     // dead letters
	Paused  []string  // namespaces that are paused, each with its queue
	Came    int64     // work items and messages, since statistics began
	Went    int64

	Nodes   []pgwake.NodeInfo
	Reports map[int32]pgwake.NodeReport // by NodeInfo.Key
}

//go:embed queues.sql
var queues string

// Queues takes a picture of all but the nodes, in one statement.
func Queues(ctx context.Context, p *pgwake.Provider) (pic Picture, err error) {
	var depths []byte
	in := pgx.Identifier{p.Schema()}.Sanitize() + "."
	err = p.Do(ctx, "look", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, strings.ReplaceAll(queues, "{schema}.", in), p.Schema()).
			Scan(&depths, &pic.Letters, &pic.Paused, &pic.Came, &pic.Went)
	})
	if err != nil {
		return Picture{}, err
	}
	if pic.Depths, err = depthsOf(depths); err != nil {
		return Picture{}, err
	}
	for i := range pic.Depths {
		d := &pic.Depths[i]
		if d.Due == 0 {
			continue
		}
		d.OldestDue = p.LocalTime(d.OldestDue)
		if pic.Oldest.IsZero() || d.OldestDue.Before(pic.Oldest) {
			pic.Oldest = d.OldestDue
		}
	}
	return pic, nil
}

// With is the picture with the nodes, as they said themselves.
func (pic Picture) With(nodes []pgwake.NodeInfo, reports []pgwake.NodeReport) Picture {
	pic.Nodes, pic.Reports = nodes, make(map[int32]pgwake.NodeReport, len(reports))
	for _, r := range reports {
		pic.Reports[r.Key] = r
	}
	return pic
}

// depthsOf reads the rows of SQL function queue_depths.
func depthsOf(data []byte) (all []pgwake.QueueDepth, err error) {
	var rows []struct {
		Queue     string     `json:"queue"`
		Namespace string     `json:"namespace"`
		Tag       string     `json:"tag"`
		Due       int64      `json:"due"`
		Delayed   int64      `json:"delayed"`
		Leased    int64      `json:"leased"`
		KeptBack  int64      `json:"kept_back"`
		OldestDue *time.Time `json:"oldest_due"`
	}
	if err := json.Unmarshal(data, &rows); err != nil {
		return nil, err
	}
	for _, r := range rows {
		d := pgwake.QueueDepth{Namespace: r.Namespace, Tag: r.Tag, Due: r.Due, Delayed: r.Delayed, Leased: r.Leased, KeptBack: r.KeptBack}
		if d.Queue = pgwake.Worker; r.Queue == pgwake.Orchestrator.String() {
			d.Queue = pgwake.Orchestrator
		}
		if r.OldestDue != nil {
			d.OldestDue = *r.OldestDue
		}
		all = append(all, d)
	}
	return all, nil
}
