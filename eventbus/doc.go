// Package eventbus is publish and subscribe in PostgreSQL, on a pgwake.Provider: events are written once, to a log, and delivered to
// consumer groups, whose nodes handle them in transactions.
//
//	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "shop"})
//	node, err := bus.Node(ctx, &eventbus.NodeConfig{ID: "mailer-1", Group: "mailer"})
//	err = node.On(ctx, "order.*", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error { ... })
//	err = node.Start(ctx)
//	id, err := bus.Emit(ctx, "order.created", Order{ID: 7}, nil)
//
// # Emitting
//
// [Bus.Emit] writes the log and a delivery for each group that is subscribed to the event's type, in one statement: both or neither.
// [Bus.WithTx] has it take part in a transaction of the caller's, so that an event is emitted if, and only if, what it tells of has happened.
// From SQL it is SELECT pgwake.emit('shop', 'order.created', '{"id": 7}').
//
// # Groups
//
// A group gets each event of its subscriptions once, from the moment it is declared ([Node.On], [Bus.Subscribe]), whether or not a node of it
// is there. Nodes of a group compete. A node claims only what it has handlers for: so old and new versions of a program can be in one
// group.
//
// # Handling
//
// All handlers of an event run in one transaction, and the delivery ends with its commit: what a [Handler] does in the database happens
// exactly once. What fails is tried again, with growing pauses, NodeConfig.MaxAttempts times in all, and then is a dead letter
// ([Bus.DeadLetters], [Bus.Redrive], [Bus.Purge]), which goes back to the group that it is from and keeps its event.
//
// # Order
//
// Of events with the same key (EmitOptions.Key) a group gets one at a time, in the order in which they were committed; the next one comes
// when the one before was handled, or is a dead letter. Without a key there is no order.
//
// # Schedules
//
// [Bus.Schedule] has an event emitted, or a work item enqueued, whenever a cron expression says so, exactly once over all nodes, and
// without any that polls.
//
// # The log
//
// [Bus.Read] reads the log by a cursor and misses nothing, however late it is committed; [Bus.Replay] delivers a part of it to a group
// once more; a new group can begin at the beginning ([SubscribeOptions]).
package eventbus
