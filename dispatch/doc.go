// Package dispatch runs handlers on the work of a pgwake.Provider, so that nobody has to write the loop around Fetch:
// with leases that are renewed for as long as a handler takes, retries, panics that become failures, and an end that
// loses nothing.
//
//	d := dispatch.New(p, nil)
//	dispatch.Handle(d, "email.send", func(ctx context.Context, in Email) (Receipt, error) { ... })
//	return d.Run(ctx)
//
// # What becomes of an item
//
// A handler that returns nil has its item acknowledged, with the result as completion if an orchestration scheduled it.
// One that returns an error has it given back, due again after a delay (Config.Retry) or after the one that the error asks
// for ([RetryAfter], [Snooze]), until it has been tried Config.MaxAttempts times; then it becomes a dead letter, as it does at
// once for an error that is [Permanent]. A panic is an error with a stack ([PanicError]). An item for which there is no
// handler is given back like one that failed: another process may know it, or the next version of this one. That costs an
// attempt and a delay each time, and is for the minutes of a rolling deployment: programs with different handlers are to have
// Namespaces or Tags of their own.
//
// What becomes of an item is told to the database for as long as the lease can be renewed. An attempt to do so that is not over after
// 10 s, or less where leases are short, is made anew, since the connection may have lost its peer; that of an ack has twice as long each
// time, so that one which is large arrives over a slow network as well.
//
// Delivery is at least once: a process that dies leaves its items to others when their leases end, and some of them were
// done. [HandleTx] is for handlers whose effects in the database are to happen exactly once, and [AckBy] for those of which one
// statement, or a transaction of their own, has the effects and acknowledges the item.
//
// # Throughput
//
// One claim takes as many items as there are places for, and one statement acknowledges all that is done by then. Where
// handlers are quick, items are claimed ahead (Config.Ahead) for 20 ms of work; where they take their time, none is, so nobody
// keeps from others what he cannot begin. With Config.MinConcurrency, as many places are in use as get most done.
//
// # Limits
//
// How many items of a namespace, or of a key in it, are at work over all processes, and how often a key may begin one, is set in the
// database (pgwake.Provider.SetLimits). What is claimed has its place, begun or not. So where their number is limited, at most a
// quarter of the places is claimed ahead, or a sixteenth where fetches find that places are scarce, which is none if they are few;
// then an ack takes the next item with it. A rate alone has no places: quick items are claimed ahead. With Config.Fair namespaces
// take turns, so that a flood in one keeps no other waiting.
//
// # The end
//
// When the context of Run ends, the Dispatcher claims no more, and gives back at once what it had claimed ahead. Handlers
// go on for Config.StopTimeout. Then their contexts end, with [ErrStopping] as the cause, and what does not end with that
// within Config.CancelTimeout is given back as well. Run waits until all of that is in the database, unless none of it can be
// for 5 s, or for Config.CancelTimeout if that is longer: what takes longer to send comes again. Last, the
// owner releases its sessions, and an Orchestrator the instances that are sticky to it; of Coordinators it does once all
// namespaces have ended. So others have all of it at once, and not when leases and locks end. Close the Provider after Run has returned.
//
// # Namespaces
//
// [Coordinators] serve namespaces as they come: each with a Dispatcher and an Orchestrator of its own, as the [Group] says that it
// belongs to, from its first item until it has had none for a while. An idle namespace costs a goroutine that waits, and no query. With
// Shards some of them are in other databases; with a Rollout they go over from polling to events, a few at a time ([Percent]). A
// [Router] chooses among handlers by namespace and priority.
//
// # Orchestrations
//
// An [Orchestrator] does the same for turns: it fetches them, calls a [Decider], and acknowledges what that decided, under a
// lease that is renewed; an instance whose turn fails again and again is ended as failed ([FailInstance]).
//
// # Other queues
//
// An [EventStream] is any other queue that [StreamSource] makes a [Source] of: Coordinators serve it with the same Groups and handlers. Packages
// dispatch/pgmq and adapter/amqp have two of them; [ProviderStream] is a Provider as a third, so that a configuration can choose.
//
// Register handlers before Run, from one goroutine. Run may be called once; handlers, hooks and Deciders are called by many
// goroutines at a time.
package dispatch
