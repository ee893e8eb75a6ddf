package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what was there when somebody began to follow?
//
// A cursor is a transaction and an id, and transactions do not end in the order in which they begin. So who follows from now on begins
// before the oldest that is open, and leaves out what was committed already.

// snapshot is one of PostgreSQL's. The zero value has seen nothing.
type snapshot struct {
	least, next uint64 // all before least have ended, and none from next on has
	open        map[uint64]bool
}

// takeSnapshot returns that of this moment.
func takeSnapshot(ctx context.Context, p *pgwake.Provider) (s snapshot, err error) {
	var text string
	if err := ask(ctx, p, "now", &text); err != nil {
		return s, err
	}
	return parseSnapshot(text)
}

// takeLogSnapshot is takeSnapshot in the numbers of the event log, which go on from server to server.
func takeLogSnapshot(ctx context.Context, p *pgwake.Provider) (snapshot, error) {
	s, err := takeSnapshot(ctx, p)
	if err != nil {
		return s, err
	}
	var added uint64
	if err := ask(ctx, p, "log_offset", &added); err != nil {
		return s, err
	}
	return s.shifted(added), nil
}

// ask is for an embedded statement that returns one value.
func ask(ctx context.Context, p *pgwake.Provider, name string, value any) error {
	sql := strings.ReplaceAll(query(name), "{schema}", pgx.Identifier{p.Schema()}.Sanitize())
	return p.Do(ctx, "follow", func(ctx context.Context, q pgwake.Querier) error { return q.QueryRow(ctx, sql).Scan(value) })
}

func parseSnapshot(text string) (s snapshot, err error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return s, fmt.Errorf("this is no snapshot: %q", text)
	}
	s.open = make(map[uint64]bool)
	var numbers []uint64
	for _, number := range append(parts[:2], strings.FieldsFunc(parts[2], func(r rune) bool { return r == ',' })...) {
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			return s, fmt.Errorf("this is no snapshot: %q", text)
		}
		numbers = append(numbers, n)
	}
	s.least, s.next = numbers[0], numbers[1]
	for _, n := range numbers[2:] {
		s.open[n] = true
	}
	return s, nil
}

// shifted is the same of transactions with numbers that are so much higher.
func (s snapshot) shifted(by uint64) snapshot {
	open := make(map[uint64]bool, len(s.open))
	for n := range s.open {
		open[n+by] = true
	}
	return snapshot{s.least + by, s.next + by, open}
}

// saw reports whether what a transaction did was there.
func (s snapshot) saw(xact uint64) bool { return xact < s.next && !s.open[xact] }

// before is the place in a log after which comes all that was not there, and some of what was.
func (s snapshot) before() (xact uint64, id int64) {
	if s.least == 0 {
		return 0, 0
	}
	return s.least - 1, math.MaxInt64
}
