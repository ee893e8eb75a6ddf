// Package goworkflows is a backend for github.com/cschleiden/go-workflows: durable workflows in plain Go, in PostgreSQL and pushed. The versions that fit
// are those with the interfaces of v1.4.2.
//
//	p, err := pgwake.Open(ctx, os.Getenv("DATABASE_URL"), nil)
//	b, err := goworkflows.New(ctx, p)
//	w := worker.New(b, b.WorkerOptions())
//	w.RegisterWorkflow(Order)
//	w.RegisterActivity(Reserve)
//	err = w.Start(ctx)
//
//	instance, err := client.New(b).CreateWorkflowInstance(ctx, client.WorkflowInstanceOptions{InstanceID: "order-7"}, Order, "book")
//	err = b.WaitForWorkflowInstance(ctx, instance)
//
// All that the runtime has is there: sub-workflows, timers, signals, queues, continuing as new, removal and expiry, and what its web interface shows
// ([diag.Backend]). Its own suites for backends pass.
//
// # Waiting
//
// A Get of a worker waits until there is a task, without holding a connection or asking: from one step of a workflow to the next it takes a millisecond
// or two, also from one process to another, and an idle worker costs a statement a minute, that of the Provider. Use the worker's options of
// [Backend.WorkerOptions], and [Backend.WaitForWorkflowInstance] instead of the client's, which polls.
//
// # Leases
//
// A task belongs to whoever claimed it until WorkflowLockTimeout or ActivityLockTimeout is over. What a process had that died comes to others then. Each claim
// has a token of its own: a goroutine that was only slow can complete nothing that was claimed again, even by its own process. Activities are carried out at
// least once.
//
// While the database is away, workers try again, more and more rarely, up to once a second; and a task that is done is completed when it is back, if that
// is before the lease ends. So are leases renewed.
//
// # Sticky workers
//
// For StickyTimeout, 30 s by default, the next turns of a workflow come to the worker that has its state in memory; then to any. So if that one is killed the
// workflow may wait for so long. One that stops in an orderly way says so by [Backend.Close]. A timeout of 0 turns it off: each turn may then read the
// history once more.
//
// # Transactions
//
// [Backend.WithTx] is for a client whose workflows begin, and whose signals are sent, if and only if a transaction of the caller's commits.
//
// # In the database
//
// Each execution is an instance of the Provider, instance id and execution id with a slash between them, in the namespace [Namespace]; queues are queue names and
// tags. So the Provider's own means work on them: namespaces can be paused and limited, depths and dead letters are listed. The table gowf_instances has
// the executions, from their creation until they are removed. Events are JSON of at most pgwake.Config.MaxPayload bytes, 1 MiB by default, and have arguments and results as base64: an
// activity whose result is larger fails, and so does a workflow that hands over more; what a client sends that is larger is refused.
//
// What is queued and a worker cannot read, since code of a later version has written it, say, comes again to any worker for some eight minutes, more and more
// rarely, and all of its turn with it. Then it is a dead letter of the Provider: redrive it when there is code that understands it. An execution of which the
// opening is one is active until it is redriven or removed; what is sent to it before may be dropped.
//
// So is what no client, workflow, activity or timer sends to a workflow, as a producer may by SQL: an event that a workflow writes into its own history,
// the opening of one that is open, or of another, and another execution of the Provider. The runtime would panic for it.
//
// # What ends its worker
//
// The runtime panics for a signal whose argument is not of the type of the channel that the workflow waits on, for instance, and the process ends; so does
// that of an activity that ends it. Leases end, and others take it up. A turn that was claimed 10 times without being completed, and an activity that was 25
// times, is not handed out any more: it is a dead letter of the Provider, with the reason "max attempts" ([Backend.WithMaxAttempts]). Each claim counts,
// also of a worker that was only too slow, and of one that could not read it.
//
// The workflow does not hear of it. Its state stays active, [Backend.WaitForWorkflowInstance] and client.GetWorkflowResult wait on, and what comes
// afterwards, such as the right signal, is handed out. But all that was in the turn is put aside, so the result of an activity may be, too; and a workflow
// waits for an activity that is. Purge the letter that does the harm, and redrive the others, each by itself (pgwake.DeadLetterFilter), or all of them
// when there is code that survives it.
//
// What is sent to an execution that ends, or continues as new, before it has read it, ends with it, as on the runtime's other backends.
//
// Everything else on the Provider is to name its namespaces when it fetches turns: one that asks for all gets those of the workflows too.
package goworkflows
