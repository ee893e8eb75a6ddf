// Package pgwake hands durable work from PostgreSQL to Go code: within about a millisecond of its becoming
// due, and with about one query a minute while nothing is due.
//
// # First steps
//
// Open a [Provider], enqueue, fetch, acknowledge:
//
//	p, err := pgwake.Open(ctx, os.Getenv("DATABASE_URL"), nil) // migrates, listens
//	if err != nil {
//		return err
//	}
//	defer p.Close(context.WithoutCancel(ctx))
//
//	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
//	if err != nil {
//		return err
//	}
//	for {
//		item, err := p.FetchWorkItem(ctx, nil) // waits, holding no connection and asking nothing
//		if errors.Is(err, pgwake.ErrNoWork) {
//			continue // nothing was due for 30 s
//		}
//		if err != nil {
//			return err
//		}
//		// ... do the work ...
//		if err := p.AckWorkItem(ctx, item.LockToken, nil); err != nil {
//			return err
//		}
//	}
//
// Run as many such loops as there should be items in work at once, in as many processes as you like. Every
// verb has an example; that of [Provider.FetchWorkItem] is this loop with all that can go wrong. Nobody has to write it:
// package [github.com/pgwake/pgwake/dispatch] has handlers instead, with lease renewal, retries, transactions and a graceful end.
//
// # Leases
//
// A fetch claims an item for a lock timeout (30 s unless [FetchOptions] says otherwise) and gives it a
// [LockToken]. Acknowledge it, give it back with [Provider.AbandonWorkItem], or make the lease longer with
// [Provider.RenewWorkItemLock] before it ends. When a process dies, its items come back the moment their
// leases end; an expired token can do nothing, so a process that was only slow cannot do harm. Delivery is
// at least once. An effect that happens in the transaction that also acknowledges ([Provider.AckWorkItemTx])
// happens exactly once.
//
// # Failures
//
// What a fetch returns tells the loop what to do. [ErrNoWork]: call again. The context has ended, or [ErrClosed]:
// stop; nothing is left claimed. An [*Error] that is Retryable: the database is away; pause, for a second at most,
// and call again. Anything else is a mistake in the program, or a right that is missing.
//
// An item whose handler failed goes back with [Provider.AbandonWorkItem], after a delay that grows with
// [ClaimedWorkItem].Attempt. Without a word it comes back when its lease ends. Nothing limits the attempts unless
// [FetchOptions] does: an item that was claimed oftener than MaxAttempts becomes a dead letter. To give up
// earlier, call [Provider.DeadLetterWorkItem]. Dead letters are kept with the reason, until somebody puts them back
// ([Provider.RedriveDeadLetters]) or removes them. An ack that fails with [ErrLockLost] came too late: the item is
// somebody else's by now, or will be.
//
// # Time, order, and whom it is for
//
// [EnqueueOptions] delays an item or sets the instant at which it is due, by the server's clock; the clock
// of the application does not matter. Due items are fetched by priority, then due time, then id; where
// nothing is to wait for ever behind what is more urgent, a [HeadStart] takes the place of the priority. A namespace
// is a queue of its own within a queue: fetch from some with [FetchOptions], or from all. A dedup key makes
// an enqueue add nothing while an item with the same key is queued.
//
// A tag says what an item needs, such as a GPU: only a fetch that asks for it ([Tags], [DefaultAnd], [AnyTag]) gets
// it. A session says that items belong together: one owner at a time gets them ([SessionOptions]).
//
// # Transactions
//
// Each verb that changes something, but the fetches and [Provider.AckBatched], has a twin that ends in Tx and joins
// your transaction: the item exists if and only if the transaction commits. [WrapSQLTx] joins a transaction of database/sql.
//
// # Orchestrations
//
// The second queue carries messages to instances of durable workflows. [Provider.FetchOrchestrationItem]
// locks an instance and returns a turn: its visible messages, in order, and its history.
// [Provider.AckOrchestrationItem] stores what the turn decided, all or nothing: history, work items,
// messages, timers (messages with a delay). A runtime on top replays the history and decides; nothing here
// reads it. Queue names and pinned versions let a node ask for the instances that it can run, and
// an instance can be sticky for a while to the node that has its history ([Sticky]).
//
// Whoever started an instance waits for its end with [Provider.WaitForInstance], or for its custom status with
// [Provider.WaitForStatus]; both are pushed, and thousands of them cost one query for each change. An instance also keeps
// key-value pairs, and can be listed, looked at, deleted and pruned.
//
// # Any language
//
// Every verb is one SQL function of the schema (package migrations), so psql and other languages can take
// part: SELECT pgwake.enqueue_work('email.send', '{"to":"ada"}') wakes a Go dispatcher like any other.
//
// So can SQL of one's own, in tables and functions that [Provider.Migrate] brings into the same schema: [Provider.Do] sends
// a statement as a verb, [Provider.Pool] begins transactions, [LockToken.WorkItem] and [LockToken.Turn] are what such a statement
// acknowledges with, and [WrapError] tells what went wrong. A handler that does so says it by dispatch.AckBy.
//
// # Operation
//
// A Provider uses its pool and one connection more, for LISTEN. Errors are an [*Error] that says which verb
// failed and whether to try again, around conditions for errors.Is such as [ErrLockLost]. [Provider.Stats] and
// [Provider.Health] show what the engine does; they ask the database nothing. Without a LISTEN connection a
// Provider polls, as little as it can, and says so.
//
// In the directory docs, whose README.md orders the pages: tutorial.md, the first hour; concepts.md; how-to pages, such as
// moving-from-polling.md, moving-from-river.md, outbox.md, schedules.md and testing.md; operations.md (pool size, poolers, alerts,
// failures, backup, rights) and settings.md; and architecture.md.
package pgwake
