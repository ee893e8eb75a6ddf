package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"log"
	"log/slog"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// The examples run against the tests' server, each on an empty schema. In yours, databaseURL is
// os.Getenv("DATABASE_URL"), config is nil or whatever you like, and where they call check you return the error.

// forExample returns the URL of a server and a Config with an empty schema, and a function that removes it.
func forExample() (databaseURL string, config *pgwake.Config, end func()) {
	tb := &exampletb.TB{}
	n := newNode(tb, nil) // migrates; a second Provider on the schema is the example's
	return pgwaketest.URL(tb), &pgwake.Config{Schema: n.schema}, tb.End
}

// openProvider opens a Provider for an example, as pgwake.Open(ctx, databaseURL, nil) does. end closes it.
func openProvider() (ctx context.Context, p *pgwake.Provider, end func()) {
	tb := &exampletb.TB{}
	return context.Background(), newNode(tb, nil).Provider, tb.End
}

// openProviderAndPool also opens a pool on the database, for transactions.
func openProviderAndPool() (context.Context, *pgwake.Provider, *pgxpool.Pool, func()) {
	ctx, p, end := openProvider()
	pool, err := pgxpool.New(ctx, pgwaketest.URL(&exampletb.TB{}))
	check(err)
	return ctx, p, pool, func() { pool.Close(); end() }
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Every method of a Provider has an example whose output is checked.
func TestExamples_EveryMethodOfProvider_HasOne(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("example*_test.go")
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		files = append(files, file)
	}
	outputs := make(map[string]string)
	for _, e := range doc.Examples(files...) {
		require.True(t, e.Output != "" || e.EmptyOutput, "Example%s has no output, so it never runs", e.Name)
		outputs[e.Name] = e.Output
	}
	methods := reflect.TypeFor[*pgwake.Provider]()
	require.NotZero(t, methods.NumMethod())
	for i := range methods.NumMethod() {
		require.NotEmpty(t, outputs["Provider_"+methods.Method(i).Name], "ExampleProvider_%s", methods.Method(i).Name)
	}
}

// The first program: enqueue, fetch, work, ack.
func Example() {
	databaseURL, config, end := forExample()
	defer end()
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()

	run := func() error {
		p, err := pgwake.Open(ctx, databaseURL, config) // migrates, listens
		if err != nil {
			return err
		}
		defer p.Close(context.WithoutCancel(ctx))

		_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
		if err != nil {
			return err
		}

		for {
			item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: 30 * time.Second, PollTimeout: time.Minute})
			if errors.Is(err, pgwake.ErrNoWork) {
				continue // the poll timeout passed; nothing was due
			}
			if err != nil {
				return err
			}
			fmt.Printf("%s %s\n", item.Name, item.Input) // ... do the work ...
			if err := p.AckWorkItem(ctx, item.LockToken, nil); err != nil {
				return err
			}
			return nil // an example has to end
		}
	}
	if err := run(); err != nil {
		fmt.Println(err)
	}
	// Output: email.send {"to":"ada"}
}

// On a pool of your own, which stays yours.
func ExampleNew() {
	databaseURL, config, end := forExample()
	defer end()
	ctx := context.Background()

	poolConfig, err := pgxpool.ParseConfig(databaseURL)
	check(err)
	pgwake.TunePool(poolConfig)
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	check(err)
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, config)
	check(err)
	fmt.Println("close:", p.Close(ctx))
	fmt.Println("ping:", pool.Ping(ctx))
	// Output:
	// close: <nil>
	// ping: <nil>
}

// The pool goes through a transaction pooler, such as PgBouncer; LISTEN and the migrations go around it.
func ExampleConfig_listenConfig() {
	databaseURL, config, end := forExample()
	defer end()
	ctx := context.Background()
	poolerURL, directURL := databaseURL, databaseURL

	through, err := pgxpool.ParseConfig(poolerURL)
	check(err)
	through.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // no prepared statements
	config.ListenConfig, err = pgx.ParseConfig(directURL)
	check(err)

	pool, err := pgxpool.NewWithConfig(ctx, through)
	check(err)
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, config)
	check(err)
	defer p.Close(ctx)

	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "through the pooler"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output: through the pooler
}

// A form is sent twice, and the invoice goes out once: while an item with the dedup key is queued, another
// adds nothing.
func ExampleProvider_EnqueueForWorker() {
	ctx, p, end := openProvider()
	defer end()

	for range 2 {
		added, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "invoice.send", Input: []byte(`{"order":7}`)},
			&pgwake.EnqueueOptions{DedupKey: "invoice of order 7", Priority: 5})
		check(err)
		fmt.Println("duplicate:", added.Duplicate)
	}
	// Output:
	// duplicate: false
	// duplicate: true
}

// Each level of urgency is worth a minute, so nothing starves, as it may behind a stream of a higher priority.
func ExampleHeadStart() {
	ctx, p, end := openProvider()
	defer end()

	for _, task := range []struct {
		name string
		at   time.Time
	}{
		{"report", time.Now().Add(-90 * time.Second)}, // for the example, as if it had been enqueued so long ago
		{"backup", pgwake.HeadStart(0, time.Minute)},
		{"invoice", pgwake.HeadStart(1, time.Minute)},
	} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: task.name}, &pgwake.EnqueueOptions{At: task.at})
		check(err)
	}
	items, err := p.FetchWorkItems(ctx, 3, nil)
	check(err)
	for _, item := range items {
		fmt.Println(item.Name)
	}
	// Output:
	// report
	// invoice
	// backup
}

// The item exists if and only if the order does.
func ExampleProvider_EnqueueForWorkerTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()

	placeOrder := func(id int, pay func() error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// INSERT INTO orders ...
			_, err := p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: fmt.Sprint("ship order ", id)}, nil)
			if err != nil {
				return err
			}
			return pay() // an error rolls everything back
		})
	}
	fmt.Println(placeOrder(1, func() error { return errors.New("card declined") }))
	fmt.Println(placeOrder(2, func() error { return nil }))

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output:
	// card declined
	// <nil>
	// ship order 2
}

// Many items are one statement and one notification. Each has options of its own.
func ExampleProvider_EnqueueForWorkerMany() {
	ctx, p, end := openProvider()
	defer end()

	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: "report"}},
		{WorkItem: pgwake.WorkItem{Name: "alarm"}, EnqueueOptions: pgwake.EnqueueOptions{Priority: pgwake.MaxPriority}},
		{WorkItem: pgwake.WorkItem{Name: "reminder"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Hour}},
	})
	check(err)
	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	for _, item := range items {
		fmt.Println(item.Name)
	}
	// Output:
	// alarm
	// report
}

// A newsletter counts as sent if and only if there is an item for each of its readers. A batch with a bad
// element is refused before anything is written.
func ExampleProvider_EnqueueForWorkerManyTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()

	send := func(readers ...string) error {
		var batch []pgwake.WorkEnqueue
		for _, reader := range readers {
			batch = append(batch, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "newsletter", Input: json.RawMessage(reader)}})
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// UPDATE newsletters SET sent_at = now() ...
			_, err := p.EnqueueForWorkerManyTx(ctx, tx, batch)
			return err
		})
	}
	fmt.Println("invalid:", errors.Is(send(`"ada"`, `no JSON`), pgwake.ErrInvalid))
	fmt.Println("sent:", send(`"ada"`, `"grace"`))

	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	for _, item := range items {
		fmt.Printf("%s to %s\n", item.Name, item.Input)
	}
	// Output:
	// invalid: true
	// sent: <nil>
	// newsletter to "ada"
	// newsletter to "grace"
}

// The loop of a dispatcher, and what it does about each kind of error.
func ExampleProvider_FetchWorkItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "thumbnail"}, nil)
	check(err)

	ctx, shutdown := context.WithCancel(ctx) // in a program: signal.NotifyContext
	dispatch := func() error {
		for {
			item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Minute, PollTimeout: time.Minute})
			var failed *pgwake.Error
			switch {
			case err == nil:
			case errors.Is(err, pgwake.ErrNoWork):
				continue // nothing was due for a minute
			case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
				return nil // a shutdown; nothing is left claimed
			case errors.As(err, &failed) && failed.Retryable:
				select { // the database is away, and will be back
				case <-time.After(time.Second):
				case <-ctx.Done():
				}
				continue
			default:
				return err // a mistake in this program, or a missing right
			}

			fmt.Println(item.Name) // ... do the work ...

			// What is done is done: a shutdown does not keep it from being acknowledged.
			err = p.AckWorkItem(context.WithoutCancel(ctx), item.LockToken, nil)
			if err != nil { // it comes again when its lease ends, if it did not yet
				log.Print(err)
			}
			shutdown() // an example has to end
		}
	}
	fmt.Println("shut down:", dispatch())
	// Output:
	// thumbnail
	// shut down: <nil>
}

// Several items cost one round trip to fetch and one to acknowledge.
func ExampleProvider_FetchWorkItems() {
	ctx, p, end := openProvider()
	defer end()

	var batch []pgwake.WorkEnqueue
	for _, name := range strings.Fields("a b c d e") {
		batch = append(batch, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: name}})
	}
	_, err := p.EnqueueForWorkerMany(ctx, batch)
	check(err)

	for range 2 {
		items, err := p.FetchWorkItems(ctx, 3, nil)
		check(err)
		var names []string
		var tokens []pgwake.LockToken
		for _, item := range items {
			names = append(names, item.Name)
			tokens = append(tokens, item.LockToken)
		}
		fmt.Println(names)
		check(p.AckWorkItems(ctx, tokens))
	}
	// Output:
	// [a b c]
	// [d e]
}

// The ack of an activity carries its result to the instance that asked for it, both or neither.
func ExampleProvider_AckWorkItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "flight.book", Instance: "trip-9", ExecutionID: 1, ActivityID: 4}, nil)
	check(err)

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	result, err := json.Marshal(map[string]any{"activity": item.ActivityID, "seat": "12A"})
	check(err)
	check(p.AckWorkItem(ctx, item.LockToken, &pgwake.Message{Instance: item.Instance, Kind: "activity.completed", Data: result}))

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Printf("%s: %s %s\n", turn.Instance, turn.Messages[0].Kind, turn.Messages[0].Data)
	// Output: trip-9: activity.completed {"activity":4,"seat":"12A"}
}

// The ack commits together with what the handler wrote: its effect happens exactly once.
func ExampleProvider_AckWorkItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "book"}, nil)
	check(err)

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// INSERT INTO ledger ...
		return p.AckWorkItemTx(ctx, tx, item.LockToken, nil)
	})
	fmt.Println("booked:", err)

	// Whoever comes late with the same claim can do nothing.
	err = p.AckWorkItem(ctx, item.LockToken, nil)
	fmt.Println("lock lost:", errors.Is(err, pgwake.ErrLockLost))
	// Output:
	// booked: <nil>
	// lock lost: true
}

// Handlers that end many items at the same time let their acks share a commit. Each has its own outcome.
func ExampleProvider_AckBatched() {
	ctx, p, end := openProvider()
	defer end()
	for range 8 {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send"}, nil)
		check(err)
	}
	var handlers sync.WaitGroup
	for range 8 {
		handlers.Go(func() {
			item, err := p.FetchWorkItem(ctx, nil)
			check(err)
			check(p.AckBatched(ctx, item.LockToken, nil))
		})
	}
	handlers.Wait()
	_, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true})
	fmt.Println(err)
	// Output: pgwake: fetch work: no work
}

// One lease of a batch has ended before the ack. The others are done; that item comes again.
func ExampleProvider_AckWorkItems() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: "a"}}, {WorkItem: pgwake.WorkItem{Name: "b"}}, {WorkItem: pgwake.WorkItem{Name: "c"}}})
	check(err)

	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	var tokens []pgwake.LockToken
	for _, item := range items {
		tokens = append(tokens, item.LockToken)
	}
	check(p.AbandonWorkItem(ctx, tokens[1], nil)) // as if its lease had ended

	var lost *pgwake.LostLocksError
	if err := p.AckWorkItems(ctx, tokens); errors.As(err, &lost) {
		fmt.Println("not acknowledged:", len(lost.Tokens))
	} else {
		check(err)
	}
	again, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(again.Name, "attempt", again.Attempt)
	// Output:
	// not acknowledged: 1
	// b attempt 2
}

// A batch is added up, and the total and the end of its items commit together.
func ExampleProvider_AckWorkItemsTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: "sale", Input: []byte(`20`)}}, {WorkItem: pgwake.WorkItem{Name: "sale", Input: []byte(`22`)}}})
	check(err)

	items, err := p.FetchWorkItems(ctx, 100, nil)
	check(err)
	var tokens []pgwake.LockToken
	var total int
	for _, item := range items {
		var amount int
		check(json.Unmarshal(item.Input, &amount))
		total += amount
		tokens = append(tokens, item.LockToken)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// UPDATE turnover SET total = total + $1 ...
		return p.AckWorkItemsTx(ctx, tx, tokens) // one lost lease rolls the total back
	})
	fmt.Println("added", total, err)
	// Output: added 42 <nil>
}

// What fails is tried again later, each time after a longer pause.
func ExampleProvider_AbandonWorkItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "webhook"}, nil)
	check(err)

	post := func(attempt int) error {
		if attempt < 3 {
			return errors.New("503 Service Unavailable")
		}
		return nil
	}
	for {
		item, err := p.FetchWorkItem(ctx, nil)
		check(err)
		if err := post(item.Attempt); err != nil {
			fmt.Printf("attempt %d: %v\n", item.Attempt, err)
			pause := 5 * time.Millisecond << item.Attempt // rather seconds, and after enough of them a dead letter
			check(p.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: pause}))
			continue
		}
		check(p.AckWorkItem(ctx, item.LockToken, nil))
		fmt.Printf("attempt %d: done\n", item.Attempt)
		return
	}
	// Output:
	// attempt 1: 503 Service Unavailable
	// attempt 2: 503 Service Unavailable
	// attempt 3: done
}

// The record of a failure and the next attempt exist both or neither.
func ExampleProvider_AbandonWorkItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "import"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)

	giveBack := func(record func() error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := p.AbandonWorkItemTx(ctx, tx, item.LockToken, nil); err != nil {
				return err
			}
			return record() // INSERT INTO failures ...
		})
	}
	fmt.Println("given back:", giveBack(func() error { return errors.New("disk full") }))
	_, err = p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true})
	fmt.Println("anything due:", !errors.Is(err, pgwake.ErrNoWork))

	fmt.Println("given back:", giveBack(func() error { return nil }))
	item, err = p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println("attempt:", item.Attempt)
	// Output:
	// given back: disk full
	// anything due: false
	// given back: <nil>
	// attempt: 2
}

// A long piece of work extends its lease while it lasts.
func ExampleProvider_RenewWorkItemLock() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "encode"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: 10 * time.Second})
	check(err)

	until, err := p.RenewWorkItemLock(ctx, item.LockToken, time.Minute)
	if errors.Is(err, pgwake.ErrLockLost) {
		return // somebody else has it by now: stop working
	}
	check(err)
	fmt.Println("extended:", until.Sub(item.LockedUntil) >= 50*time.Second)
	// Output: extended: true
}

// Each step stores how far it got and extends the lease, both or neither. So a worker that was slow cannot
// overwrite the progress of the one that has the item by now.
func ExampleProvider_RenewWorkItemLockTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "copy table"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)

	step := func(rows int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// UPDATE progress SET rows = $1 ...
			_, err := p.RenewWorkItemLockTx(ctx, tx, item.LockToken, time.Minute)
			return err
		})
	}
	fmt.Println("1,000 rows:", step(1000))
	check(p.AbandonWorkItem(ctx, item.LockToken, nil)) // as if its lease had ended
	fmt.Println("2,000 rows, lock lost:", errors.Is(step(2000), pgwake.ErrLockLost))
	// Output:
	// 1,000 rows: <nil>
	// 2,000 rows, lock lost: true
}

// One heartbeat for all items that a process has in work.
func ExampleProvider_RenewWorkItemLocks() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "a"}}, {WorkItem: pgwake.WorkItem{Name: "b"}}})
	check(err)
	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	inWork := make(map[pgwake.LockToken]string)
	for _, item := range items {
		inWork[item.LockToken] = item.Name
	}
	check(p.AbandonWorkItem(ctx, items[0].LockToken, nil)) // as if its lease had ended

	var tokens []pgwake.LockToken
	for token := range inWork {
		tokens = append(tokens, token)
	}
	until, err := p.RenewWorkItemLocks(ctx, tokens, time.Minute)
	var lost *pgwake.LostLocksError
	if errors.As(err, &lost) {
		for _, token := range lost.Tokens {
			fmt.Println("stop working on", inWork[token])
		}
	} else {
		check(err)
	}
	for token := range until {
		fmt.Println("another minute for", inWork[token])
	}
	// Output:
	// stop working on a
	// another minute for b
}

// A lost lease does not abort the transaction: what still holds can be stored, and the rest is left out.
func ExampleProvider_RenewWorkItemLocksTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "a"}}, {WorkItem: pgwake.WorkItem{Name: "b"}}})
	check(err)
	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	check(p.AbandonWorkItem(ctx, items[0].LockToken, nil)) // as if its lease had ended

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		until, err := p.RenewWorkItemLocksTx(ctx, tx, []pgwake.LockToken{items[0].LockToken, items[1].LockToken}, time.Minute)
		if err != nil && !errors.Is(err, pgwake.ErrLockLost) {
			return err
		}
		for _, item := range items {
			if _, ours := until[item.LockToken]; ours {
				fmt.Println("storing the progress of", item.Name) // UPDATE progress ...
			}
		}
		return nil
	})
	fmt.Println("committed:", err)
	// Output:
	// storing the progress of b
	// committed: <nil>
}

// A start and what happened meanwhile. Whatever is visible when the instance is fetched is one turn.
func ExampleProvider_EnqueueForOrchestrator() {
	ctx, p, end := openProvider()
	defer end()

	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil", Version: "1.0.0"}, nil)
	check(err)
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "paid", Data: []byte(`{"cents":995}`)}, nil)
	check(err)
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "deadline"}, &pgwake.EnqueueOptions{Delay: 24 * time.Hour})
	check(err)

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println(turn.Instance, turn.Name, turn.Version)
	for _, m := range turn.Messages {
		fmt.Println(m.Kind, "with", len(m.Data), "bytes")
	}
	// Output:
	// order-7 fulfil 1.0.0
	// start with 0 bytes
	// paid with 13 bytes
}

// The workflow of an order starts if and only if the order is stored.
func ExampleProvider_EnqueueForOrchestratorTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()

	place := func(order string, store func(pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := p.EnqueueForOrchestratorTx(ctx, tx, pgwake.Message{Instance: order, Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
			if err != nil {
				return err
			}
			return store(tx) // INSERT INTO orders ...
		})
	}
	fmt.Println("order-1:", place("order-1", func(pgx.Tx) error { return errors.New("out of stock") }))
	fmt.Println("order-2:", place("order-2", func(pgx.Tx) error { return nil }))

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println("started:", turn.Instance)
	// Output:
	// order-1: out of stock
	// order-2: <nil>
	// started: order-2
}

// One event for several instances, in one statement. Each gets a turn of its own.
func ExampleProvider_EnqueueForOrchestratorMany() {
	ctx, p, end := openProvider()
	defer end()

	var news []pgwake.MessageEnqueue
	for _, cart := range []string{"cart-1", "cart-2", "cart-3"} {
		news = append(news, pgwake.MessageEnqueue{Message: pgwake.Message{Instance: cart, Kind: "price.changed"}})
	}
	_, err := p.EnqueueForOrchestratorMany(ctx, news)
	check(err)
	for range news {
		turn, err := p.FetchOrchestrationItem(ctx, nil)
		check(err)
		fmt.Println(turn.Instance, turn.Messages[0].Kind)
	}
	// Output:
	// cart-1 price.changed
	// cart-2 price.changed
	// cart-3 price.changed
}

// Both sides of a transfer hear of it, or none.
func ExampleProvider_EnqueueForOrchestratorManyTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()

	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// INSERT INTO transfers ...
		_, err := p.EnqueueForOrchestratorManyTx(ctx, tx, []pgwake.MessageEnqueue{
			{Message: pgwake.Message{Instance: "account-ada", Kind: "debit", Data: []byte(`5`)}},
			{Message: pgwake.Message{Instance: "account-grace", Kind: "credit", Data: []byte(`5`)}},
		})
		return err
	})
	check(err)
	for range 2 {
		turn, err := p.FetchOrchestrationItem(ctx, nil)
		check(err)
		fmt.Println(turn.Instance, turn.Messages[0].Kind)
	}
	// Output:
	// account-ada debit
	// account-grace credit
}

// One turn of an orchestration: read what happened, decide, acknowledge. The runtime that does this is
// yours; events and messages mean to the queue nothing but their ids.
func ExampleProvider_FetchOrchestrationItem() {
	ctx, p, end := openProvider()
	defer end()

	// Somebody starts the orchestration.
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{
		Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil", Version: "1.0.0", Data: json.RawMessage(`{"sku":42}`),
	}, nil)
	check(err)

	turn := func() {
		item, err := p.FetchOrchestrationItem(ctx, nil)
		check(err)
		ack := pgwake.OrchestrationAck{ExecutionID: item.ExecutionID, Metadata: pgwake.Metadata{Name: item.Name, Version: item.Version}}
		next := int64(len(item.History)) + 1
		for _, m := range item.Messages {
			fmt.Printf("%s: %s\n", item.Instance, m.Kind)
			ack.History = append(ack.History, pgwake.Event{ID: next, Type: string(m.Kind), Data: m.Data})
			next++
			switch m.Kind {
			case pgwake.MessageStart:
				ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
					Name: "pack", Input: m.Data, Instance: item.Instance, ExecutionID: item.ExecutionID, ActivityID: next}})
			case "activity.completed":
				ack.Metadata.Status, ack.Metadata.Output = pgwake.StatusCompleted, string(m.Data)
			}
		}
		check(p.AckOrchestrationItem(ctx, item.LockToken, ack))
	}
	turn()

	// A worker runs the activity, and its ack carries the answer.
	activity, err := p.FetchWorkItem(ctx, nil)
	check(err)
	check(p.AckWorkItem(ctx, activity.LockToken, &pgwake.Message{
		Instance: activity.Instance, Kind: "activity.completed", Data: json.RawMessage(`"packed"`)}))
	turn()

	history, err := p.ReadHistory(ctx, "order-7")
	check(err)
	for _, e := range history {
		fmt.Printf("%d %s %s\n", e.ID, e.Type, e.Data)
	}
	// Output:
	// order-7: start
	// order-7: activity.completed
	// 1 start {"sku":42}
	// 2 activity.completed "packed"
}

// A timer of an orchestration is a delayed message to itself.
func ExampleProvider_AckOrchestrationItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "trial-3", Kind: pgwake.MessageStart, Name: "trial"}, nil)
	check(err)

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Name: turn.Name},
		History:  []pgwake.Event{{ID: 1, Type: "started"}, {ID: 2, Type: "timer.set"}},
		Messages: []pgwake.MessageEnqueue{{
			Message:        pgwake.Message{Instance: turn.Instance, Kind: "timer.fired"},
			EnqueueOptions: pgwake.EnqueueOptions{Delay: 20 * time.Millisecond},
		}},
	}))

	turn, err = p.FetchOrchestrationItem(ctx, nil) // waits, without polling
	check(err)
	fmt.Println(turn.Messages[0].Kind, "with", len(turn.History), "events of history")
	check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		History:  []pgwake.Event{{ID: 3, Type: "ended"}},
		Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted},
	}))
	// Output: timer.fired with 2 events of history
}

// What a turn decided and the tables that others read change together.
func ExampleProvider_AckOrchestrationItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
	check(err)

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// UPDATE orders SET state = 'accepted' ...
		return p.AckOrchestrationItemTx(ctx, tx, turn.LockToken, pgwake.OrchestrationAck{
			Metadata:  pgwake.Metadata{Name: turn.Name},
			WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "pack", Instance: turn.Instance}}},
		})
	})
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name, item.Instance)
	// Output: pack order-7
}

// A process that does not know this version of an orchestration leaves the turn to others, and does not
// count it as an attempt.
func ExampleProvider_AbandonOrchestrationItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil", Version: "2.0.0"}, nil)
	check(err)

	for _, known := range []string{"1.0.0", "2.0.0"} { // two processes
		turn, err := p.FetchOrchestrationItem(ctx, nil)
		check(err)
		fmt.Printf("attempt %d with code for %s\n", turn.Attempt, known)
		if turn.Version != known {
			check(p.AbandonOrchestrationItem(ctx, turn.LockToken, &pgwake.AbandonOptions{Delay: 10 * time.Millisecond, IgnoreAttempt: true}))
			continue
		}
		check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: turn.Name}}))
	}
	// Output:
	// attempt 1 with code for 1.0.0
	// attempt 1 with code for 2.0.0
}

// A turn whose code failed goes back together with the record of why.
func ExampleProvider_AbandonOrchestrationItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// INSERT INTO failures ...
		return p.AbandonOrchestrationItemTx(ctx, tx, turn.LockToken, nil)
	})
	check(err)
	turn, err = p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println(turn.Instance, "attempt", turn.Attempt)
	// Output: order-7 attempt 2
}

// The replay of a long history takes longer than the lease.
func ExampleProvider_RenewOrchestrationItemLock() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{LockTimeout: 10 * time.Second})
	check(err)

	until, err := p.RenewOrchestrationItemLock(ctx, turn.LockToken, time.Minute)
	if errors.Is(err, pgwake.ErrLockLost) {
		return // somebody else has the instance by now: stop
	}
	check(err)
	fmt.Println("extended:", until.Sub(turn.LockedUntil) >= 50*time.Second)
	// Output: extended: true
}

// A snapshot of a long replay is stored only by whoever still holds the instance.
func ExampleProvider_RenewOrchestrationItemLockTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)

	snapshot := func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// INSERT INTO snapshots ...
			_, err := p.RenewOrchestrationItemLockTx(ctx, tx, turn.LockToken, time.Minute)
			return err
		})
	}
	fmt.Println("stored:", snapshot())
	check(p.AbandonOrchestrationItem(ctx, turn.LockToken, nil)) // as if its lease had ended
	fmt.Println("lock lost:", errors.Is(snapshot(), pgwake.ErrLockLost))
	// Output:
	// stored: <nil>
	// lock lost: true
}

// What an instance went through, for a person who asks.
func ExampleProvider_ReadHistory() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Name: turn.Name},
		History:  []pgwake.Event{{ID: 1, Type: "ordered", Data: []byte(`{"sku":42}`)}, {ID: 2, Type: "packed"}},
	}))

	events, err := p.ReadHistory(ctx, "order-7")
	check(err)
	for _, e := range events {
		fmt.Println(e.ID, e.Type, string(e.Data))
	}
	// Output:
	// 1 ordered {"sku":42}
	// 2 packed
}

// A viewer that has the events up to 2 asks for the rest.
func ExampleProvider_ReadHistoryExecution() {
	ctx, p, end := openProvider()
	defer end()
	check(p.AppendHistory(ctx, "order-7", 1, []pgwake.Event{{ID: 1, Type: "ordered"}, {ID: 2, Type: "packed"}, {ID: 3, Type: "shipped"}}))

	events, err := p.ReadHistoryExecution(ctx, "order-7", 1, 3)
	check(err)
	for _, e := range events {
		fmt.Println(e.ID, e.Type)
	}
	// Output: 3 shipped
}

// A viewer shows a long history page by page.
func ExampleProvider_ReadHistoryPage() {
	ctx, p, end := openProvider()
	defer end()
	check(p.AppendHistory(ctx, "order-7", 1, []pgwake.Event{{ID: 1, Type: "ordered"}, {ID: 2, Type: "packed"}, {ID: 5, Type: "shipped"}}))

	const limit = 2
	for from := int64(0); ; {
		events, err := p.ReadHistoryPage(ctx, "order-7", 1, from, limit)
		check(err)
		for _, e := range events {
			fmt.Println(e.ID, e.Type)
			from = e.ID + 1
		}
		if len(events) < limit {
			break
		}
		fmt.Println("--")
	}
	// Output:
	// 1 ordered
	// 2 packed
	// --
	// 5 shipped
}

// An operator marks an instance that no turn can help any more. The ids of events are unique, so two
// operators do not both do it.
func ExampleProvider_AppendHistory() {
	ctx, p, end := openProvider()
	defer end()

	broken := []pgwake.Event{{ID: 1000, Type: "marked.broken", Data: []byte(`{"by":"ada"}`)}}
	fmt.Println("marked:", p.AppendHistory(ctx, "order-7", 1, broken))
	err := p.AppendHistory(ctx, "order-7", 1, broken)
	fmt.Println("marked before:", errors.Is(err, pgwake.ErrDuplicateEvent))
	// Output:
	// marked: <nil>
	// marked before: true
}

// The mark in the history and the refund exist both or neither.
func ExampleProvider_AppendHistoryTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()

	refund := func(pay func() error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := p.AppendHistoryTx(ctx, tx, "order-7", 1, []pgwake.Event{{ID: 1000, Type: "refunded"}}); err != nil {
				return err
			}
			return pay() // INSERT INTO refunds ...
		})
	}
	for _, outcome := range []error{errors.New("bank is closed"), nil} {
		fmt.Println(refund(func() error { return outcome }))
		events, err := p.ReadHistory(ctx, "order-7")
		check(err)
		fmt.Println("events:", len(events))
	}
	// Output:
	// bank is closed
	// events: 0
	// <nil>
	// events: 1
}

// Namespaces divide a queue. A fetch may serve some of them, or all.
func ExampleFetchOptions_namespaces() {
	ctx, p, end := openProvider()
	defer end()

	for _, namespace := range []string{"billing", "mail", "billing"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "for " + namespace}, &pgwake.EnqueueOptions{Namespace: namespace})
		check(err)
	}
	for {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"billing"}, NoWait: true})
		if errors.Is(err, pgwake.ErrNoWork) {
			fmt.Println("nothing more for billing")
			return
		}
		check(err)
		fmt.Println(item.Name)
	}
	// Output:
	// for billing
	// for billing
	// nothing more for billing
}

// A delayed item is due by the server's clock, and is fetched then without polling.
func ExampleEnqueueOptions_delay() {
	ctx, p, end := openProvider()
	defer end()

	added, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "remind"}, &pgwake.EnqueueOptions{Delay: 100 * time.Millisecond})
	check(err)
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Minute, PollTimeout: 10 * time.Second})
	check(err)
	claimed := item.LockedUntil.Add(-time.Minute)
	fmt.Println(item.Name, "too early:", claimed.Before(added.DueAt))
	// Output: remind too early: false
}

// A Provider that cannot listen says so, and delivers work all the same. So tell somebody; restarting the
// process for it helps nobody.
func ExampleProvider_Health() {
	databaseURL, config, end := forExample()
	defer end()
	ctx := context.Background()
	config.Logger = slog.New(slog.DiscardHandler)

	var err error
	config.ListenConfig, err = pgx.ParseConfig("postgres://127.0.0.1:1/nobody-answers-here")
	check(err)
	p, err := pgwake.Open(ctx, databaseURL, config)
	check(err)
	defer p.Close(ctx)
	if health := p.Health(); !health.OK {
		for _, problem := range health.Problems {
			text, _, _ := strings.Cut(problem.Text, ": ") // the cause differs from system to system
			fmt.Println(text)
		}
	}

	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "delivered"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output:
	// not listening; polling every 100ms
	// delivered
}

// Is work pushed, or does the safety net find it?
func ExampleProvider_Stats() {
	ctx, p, end := openProvider()
	defer end()

	before := p.Stats().Worker
	for _, name := range []string{"a", "b", "c"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name}, nil)
		check(err)
		item, err := p.FetchWorkItem(ctx, nil)
		check(err)
		check(p.AckWorkItem(ctx, item.LockToken, nil))
	}
	after := p.Stats().Worker
	fmt.Println("fetched:", after.Items-before.Items)
	fmt.Println("by the safety net:", after.FallbackFinds+after.ScoutFinds)
	// Output:
	// fetched: 3
	// by the safety net: 0
}

// Every dispatcher that waits returns; what is under way has until the context ends.
func ExampleProvider_Close() {
	ctx, p, end := openProvider()
	defer end()

	var dispatchers sync.WaitGroup
	var stopped atomic.Int64
	for range 4 {
		dispatchers.Go(func() {
			for {
				_, err := p.FetchWorkItem(ctx, nil)
				if errors.Is(err, pgwake.ErrClosed) {
					stopped.Add(1)
					return
				}
			}
		})
	}
	closing, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	fmt.Println("closed:", p.Close(closing))
	dispatchers.Wait()
	fmt.Println("dispatchers that stopped:", stopped.Load())
	// Output:
	// closed: <nil>
	// dispatchers that stopped: 4
}
