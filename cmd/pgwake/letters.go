package main

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"

	"github.com/pgwake/pgwake"
)

// This file answers: which dead letters have come since, also of transactions that are committed late?
//
// Letters have ids and no transaction that a cursor could go by. So an id that was passed over is looked for again, for as long as any of the
// transactions that were open then is: one of them may have it.

// letterSource follows dead letters.
type letterSource struct {
	p         *pgwake.Provider
	namespace string // "": all
	last      int64  // the highest id that was seen
	gaps      []gap
}

// gap are ids that were not there when a higher one was.
type gap struct {
	ids   map[int64]bool
	until uint64 // once all transactions before this have ended, they will not come any more
}

// mostMissed is how many ids one gap has at most, the highest of them. Of letters that were purged, or are of other namespaces, there may be any number.
const mostMissed = pgwake.MaxFetch

func (s *letterSource) filter() *pgwake.DeadLetterFilter {
	return &pgwake.DeadLetterFilter{Namespace: s.namespace, Limit: page}
}

// begin takes the latest for seen.
func (s *letterSource) begin(ctx context.Context) error {
	f := s.filter()
	f.Before, f.PayloadBytes = math.MaxInt64, unlisted
	latest, err := s.p.ListDeadLetters(ctx, f)
	if err != nil || len(latest) == 0 {
		return err
	}
	slices.SortFunc(latest, func(a, b pgwake.DeadLetter) int { return cmp.Compare(a.ID, b.ID) })
	s.last = latest[0].ID - 1
	return s.passed(ctx, latest)
}

// next reads everything before it takes anything for seen, so that after an error the same comes again.
func (s *letterSource) next(ctx context.Context) (all []happened, more bool, err error) {
	late, ended, err := s.late(ctx)
	if err != nil {
		return nil, false, err
	}
	f := s.filter()
	f.After = s.last
	letters, err := s.p.ListDeadLetters(ctx, f)
	if err == nil {
		err = s.passed(ctx, letters)
	}
	if err != nil {
		return nil, false, err
	}
	s.settle(late, ended)
	for _, d := range append(late, letters...) {
		detail := d.Reason
		if d.Error != "" {
			detail += ": " + d.Error
		}
		all = append(all, happened{"letters", moment{d.DiedAt}, d.Namespace, nameOf(d), text(d.ID), detail, d.Data})
	}
	return all, len(letters) == page || len(late) == page, nil
}

// passed takes letters for seen, and what is missing between them for late. An error changes nothing.
func (s *letterSource) passed(ctx context.Context, letters []pgwake.DeadLetter) error {
	if len(letters) == 0 {
		return nil
	}
	last := letters[len(letters)-1].ID
	missing := make(map[int64]bool)
	after := s.last
	for _, d := range letters {
		for id := max(after+1, last-mostMissed); id < d.ID; id++ {
			missing[id] = true
		}
		after = d.ID
	}
	if len(missing) > 0 {
		var until uint64
		if err := ask(ctx, s.p, "number", &until); err != nil { // after they were read, so that whoever has one of the ids has begun by then
			return err
		}
		s.gaps = append(s.gaps, gap{missing, until})
	}
	s.last = last
	return nil
}

// late are letters that have come into the gaps meanwhile. All transactions before ended had ended before.
func (s *letterSource) late(ctx context.Context) (letters []pgwake.DeadLetter, ended uint64, err error) {
	if len(s.gaps) == 0 {
		return nil, 0, nil
	}
	now, err := takeSnapshot(ctx, s.p)
	if err != nil {
		return nil, 0, err
	}
	f := s.filter()
	for _, g := range s.gaps {
		f.IDs = slices.AppendSeq(f.IDs, maps.Keys(g.ids))
	}
	letters, err = s.p.ListDeadLetters(ctx, f)
	return letters, now.least, err
}

// settle takes what came late out of the gaps, and forgets those into which nothing can come any more.
func (s *letterSource) settle(late []pgwake.DeadLetter, ended uint64) {
	s.gaps = slices.DeleteFunc(s.gaps, func(g gap) bool {
		for _, d := range late {
			delete(g.ids, d.ID)
		}
		return len(g.ids) == 0 || g.until <= ended && len(late) < page // else more of them may be there
	})
}
