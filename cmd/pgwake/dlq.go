package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/spf13/cobra"
)

// This file answers: what became of work that was given up, and what is to become of it?

// deadLetter is what dlq prints as JSON.
type deadLetter struct {
	ID         int64             `json:"id"`
	Queue      string            `json:"queue"`
	ItemID     int64             `json:"item_id"`
	Namespace  string            `json:"namespace"`
	Name       string            `json:"name,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Instance   string            `json:"instance,omitempty"`
	Tag        string            `json:"tag,omitempty"`
	Session    string            `json:"session,omitempty"`
	Key        string            `json:"key,omitempty"`
	DedupKey   string            `json:"dedup_key,omitempty"`
	Priority   int               `json:"priority"`
	Attempts   int               `json:"attempts"`
	EnqueuedAt moment            `json:"enqueued_at"`
	DiedAt     moment            `json:"died_at"`
	Reason     string            `json:"reason"`
	Error      string            `json:"error,omitempty"`
	Headers    map[string]string `json:"headers,omitempty"`
	Data       json.RawMessage   `json:"data,omitempty"`
}

func letterJSON(d pgwake.DeadLetter) deadLetter {
	return deadLetter{ID: d.ID, Queue: d.Queue.String(), ItemID: d.ItemID, Namespace: d.Namespace, Name: d.Name, Kind: string(d.Kind), Instance: d.Instance,
		Tag: d.Tag, Session: d.Session, Key: d.Key, DedupKey: d.DedupKey, Priority: d.Priority, Attempts: d.Attempts, EnqueuedAt: moment{d.EnqueuedAt}, DiedAt: moment{d.DiedAt},
		Reason: d.Reason, Error: d.Error, Headers: d.Headers, Data: d.Data}
}

func (a *app) dlqCommand() *cobra.Command {
	return group("dlq", "Look at dead letters, put them back, or remove them",
		a.dlqListCommand(), a.dlqShowCommand(), a.dlqRedriveCommand(), a.dlqPurgeCommand())
}

// letterFlags are a DeadLetterFilter.
type letterFlags struct {
	f             pgwake.DeadLetterFilter
	queue, before string
	ids           []int64
	all           bool
}

func (l *letterFlags) add(c *cobra.Command) {
	queueFlag(c, &l.queue, "")
	s := c.Flags()
	s.StringVarP(&l.f.Namespace, "namespace", "n", "", "of this namespace alone")
	s.StringVar(&l.f.Name, "name", "", "of this name alone")
	s.StringVar(&l.f.Instance, "instance", "", "of, or to, this instance alone")
	s.StringVar(&l.f.Reason, "reason", "", "with this reason alone")
	s.StringVar(&l.before, "before", "", "that died before an instant, or longer ago than, as in 36h")
	s.Int64SliceVar(&l.ids, "id", nil, "those of these ids; may be repeated")
}

// filter is what the flags say. narrowed says that they leave anything out.
func (l *letterFlags) filter(now time.Time) (f *pgwake.DeadLetterFilter, narrowed bool, err error) {
	f = &l.f
	if l.queue != "" {
		q, err := queueOf(l.queue)
		if err != nil {
			return nil, false, err
		}
		f.Queue = &q
	}
	if l.before != "" {
		if f.DiedBefore, err = parseInstant(l.before, now); err != nil {
			return nil, false, err
		}
	}
	if len(l.ids) > 0 {
		f.IDs = l.ids
	}
	return f, l.queue != "" || l.before != "" || len(l.ids) > 0 || f.Namespace+f.Name+f.Instance+f.Reason != "", nil
}

func (a *app) dlqListCommand() *cobra.Command {
	var l letterFlags
	var latest bool
	c := &cobra.Command{
		Use: "list", Short: "List dead letters, the oldest first", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if latest && l.f.Before == 0 {
				l.f.Before = math.MaxInt64
			}
			return a.dlqList(c.Context(), &l)
		},
	}
	l.add(c)
	c.Flags().BoolVar(&latest, "latest", false, "the latest first")
	c.Flags().Int64Var(&l.f.After, "after", 0, "after the letter of this id, the last one of the page before")
	c.Flags().Int64Var(&l.f.Before, "below", 0, "the latest first, before the letter of this id, the last one of the page before")
	limitFlag(c, &l.f.Limit)
	return c
}

func (a *app) dlqList(ctx context.Context, l *letterFlags) error {
	f, _, err := l.filter(a.now())
	if err != nil {
		return err
	}
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	if !a.asJSON {
		f.PayloadBytes = unlisted
	}
	letters, err := p.ListDeadLetters(ctx, f)
	if err != nil {
		return err
	}
	if a.asJSON {
		all := make([]deadLetter, 0, len(letters))
		for _, d := range letters {
			all = append(all, letterJSON(d))
		}
		return a.printJSON(all)
	}
	table := &rows{heads: []string{"ID", "NAMESPACE", "NAME", "ATTEMPTS", "DIED", "REASON", "ERROR"}, none: "there are no dead letters of the kind"}
	for _, d := range letters {
		table.add(text(d.ID), d.Namespace, glance.Short(nameOf(d), nameWidth), text(int64(d.Attempts)), glance.Span(a.now().Sub(p.LocalTime(d.DiedAt)))+" ago", glance.Short(d.Reason, 40), glance.Short(d.Error, 60))
	}
	a.printRows(table)
	if len(letters) == f.Limit {
		flag := "--after"
		if f.Before > 0 {
			flag = "--below"
		}
		a.more(flag, text(letters[len(letters)-1].ID))
	}
	return nil
}

// nameOf says what a letter was, for people.
func nameOf(d pgwake.DeadLetter) string {
	if d.Queue == pgwake.Orchestrator {
		return d.Instance + ": " + string(d.Kind)
	}
	return d.Name
}

func (a *app) dlqShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show all of a dead letter", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil {
				return usagef("the first column of pgwake dlq list", "this is no id: %q", args[0])
			}
			return a.dlqShow(c.Context(), id)
		},
	}
}

func (a *app) dlqShow(ctx context.Context, id int64) error {
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	letters, err := p.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{IDs: []int64{id}})
	if err != nil {
		return err
	}
	if len(letters) == 0 {
		return &hinted{fmt.Errorf("there is no dead letter %d", id), "pgwake dlq list shows those that there are"}
	}
	d := letters[0]
	if a.asJSON {
		return a.printJSON(letterJSON(d))
	}
	a.printPairs([][2]string{
		{"letter", text(d.ID)}, {"queue", d.Queue.String()}, {"item", text(d.ItemID)}, {"namespace", d.Namespace}, {"name", nameOf(d)},
		{"tag", d.Tag}, {"session", d.Session}, {"key", d.Key}, {"dedup key", d.DedupKey}, {"instance", d.Instance}, {"priority", text(int64(d.Priority))},
		{"attempts", text(int64(d.Attempts))}, {"enqueued", d.EnqueuedAt.Local().Format(time.RFC3339)}, {"died", d.DiedAt.Local().Format(time.RFC3339)},
		{"reason", d.Reason}, {"error", d.Error}, {"headers", headersText(d.Headers)}, {"data", string(d.Data)},
	})
	return nil
}

// printPairs prints what is not empty, a line each; of a text of several lines, those below each other.
func (a *app) printPairs(pairs [][2]string) {
	for _, pair := range pairs {
		if pair[1] == "" {
			continue
		}
		for i, line := range strings.Split(strings.TrimRight(pair[1], "\n"), "\n") {
			name := pair[0]
			if i > 0 {
				name = ""
			}
			a.printf("%s %s\n", a.style.head.Render(fmt.Sprintf("%-12s", name)), visible(line))
		}
	}
}

func headersText(headers map[string]string) string {
	if len(headers) == 0 {
		return ""
	}
	data, _ := json.Marshal(headers) // strings
	return string(data)
}

func (a *app) dlqRedriveCommand() *cobra.Command {
	return a.dlqBulkCommand("redrive", "Put dead letters back into their queues, due at once and as if never attempted",
		eventbus.RedriveDeadLetters, "redriven", false)
}

func (a *app) dlqPurgeCommand() *cobra.Command {
	return a.dlqBulkCommand("purge", "Remove dead letters for good",
		func(ctx context.Context, p *pgwake.Provider, f *pgwake.DeadLetterFilter) (int, error) {
			return p.PurgeDeadLetters(ctx, f)
		}, "purged", true)
}

// bulkVerb deals with dead letters of a kind, and returns with how many.
type bulkVerb func(context.Context, *pgwake.Provider, *pgwake.DeadLetterFilter) (int, error)

// bulkStep is how many letters one statement deals with.
const bulkStep = 500

func (a *app) dlqBulkCommand(verb, about string, do bulkVerb, done string, ask bool) *cobra.Command {
	var l letterFlags
	c := &cobra.Command{
		Use: verb, Short: about, Args: cobra.NoArgs,
		Long:    about + ". All of them that are of the kind, and have died by now; --all for every one that there is.",
		Example: fmt.Sprintf("  pgwake dlq %s --id 7 --id 9\n  pgwake dlq %[1]s --name email.send --before 1h", verb),
		RunE: func(c *cobra.Command, _ []string) error {
			f, narrowed, err := l.filter(a.now())
			if err != nil {
				return err
			}
			if !narrowed && !l.all {
				return usagef("--id, --name, --namespace and the like, or --all", "it is not said which dead letters to %s", verb)
			}
			return a.dlqBulk(c.Context(), f, verb, do, done, ask)
		},
	}
	l.add(c)
	c.Flags().BoolVar(&l.all, "all", false, "all that there are")
	return c
}

func (a *app) dlqBulk(ctx context.Context, f *pgwake.DeadLetterFilter, verb string, do bulkVerb, done string, ask bool) error {
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	// What dies from now on is not meant: a letter that was redriven and dies again would go round and round.
	now, err := serverTime(ctx, p)
	if err != nil {
		return err
	}
	if f.DiedBefore.IsZero() || f.DiedBefore.After(now) {
		f.DiedBefore = now
	}
	total, _, err := countLetters(ctx, p, f)
	if err != nil {
		return err
	}
	if ask && total > 0 {
		if err := a.confirm(ctx, "%s %s for good?", strings.ToUpper(verb[:1])+verb[1:], count(total, "dead letter")); err != nil {
			return err
		}
	}
	bar := a.progress(verb, total)
	f.Limit = bulkStep
	var sum int64
	for err == nil {
		var n int
		if n, err = do(ctx, p, f); n == 0 {
			break
		}
		sum += int64(n)
		bar.at(sum)
	}
	bar.end()
	if a.asJSON { // also of what was done before an error
		return errors.Join(err, a.printJSON(map[string]int64{done: sum}))
	}
	a.printf("%s %s\n", count(sum, "dead letter"), a.style.ok.Render(done))
	if err != nil {
		return err
	}
	if verb == "redrive" && sum < total {
		a.printf("%s\n", a.style.faint.Render(count(total-sum, "letter")+" stayed: of their dedup keys something is queued again, their consumer group was deleted or is not subscribed any more, or somebody else was faster"))
	}
	return nil
}

// serverTime is the time of the server.
func serverTime(ctx context.Context, p *pgwake.Provider) (now time.Time, err error) {
	err = p.Do(ctx, "ask for the time", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	})
	return now, err
}

// countLetters counts those of a filter; last is the highest of their ids.
func countLetters(ctx context.Context, p *pgwake.Provider, f *pgwake.DeadLetterFilter) (n, last int64, err error) {
	counts, err := p.CountDeadLetters(ctx, f)
	for _, c := range counts {
		n, last = n+c.Letters, max(last, c.LastID)
	}
	return n, last, err
}
