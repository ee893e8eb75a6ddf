// Package watermill is a Pub/Sub of Watermill on package eventbus: its Publisher and Subscriber, for routers, middleware and CQRS, in PostgreSQL
// and pushed.
//
//	pub, err := watermill.NewPublisher(bus, nil)
//	sub, err := watermill.NewSubscriber(bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Group: "mailer"}})
//	messages, err := sub.Subscribe(ctx, "orders")
//	err = pub.Publish("orders", message.NewMessage(uuid, payload))
//	m := <-messages
//	m.Ack()
//
// # Messages and events
//
// A topic is a type of events: itself, or, with characters that a type cannot have, as [EventType] says. A message is an event: its metadata are
// those of the event, its UUID is the header [HeaderUUID]. Its payload may be any bytes, and comes as those: in the log it is a string, of
// base64 if it is no text, as the header [HeaderPayload] tells. With PublisherConfig.JSON it is JSON there, for handlers of package eventbus and for
// SQL. The other way round, an event that did not come from here is a message whose payload is the event's JSON, and whose UUID is its id.
// [EventFrom] has the event of a message that was received. UUIDs and metadata are UTF-8 without NUL, or else they are refused.
//
// # Groups
//
// A consumer group gets each message of a topic that was published since it subscribed, whether or not a subscriber is there:
// SubscribeInitialize, or the first Subscribe, is from when on. Subscribers of a group compete; with no group named, all are in
// eventbus.DefaultGroup. A group lives until eventbus.Bus.DeleteGroup, so give it a name that stays.
//
// # Acks
//
// An ack ends the delivery. A nack has the message come again at once, as often as it takes: giving up is for middleware, or SubscriberConfig.Node
// (MaxAttempts, Retry). What a process had that died comes again to others, after Visibility; until then it is kept for as long as it
// takes. So a message comes at least once. With SubscriberConfig.Transactional it comes with a transaction that the ack commits, and what is done by that
// is done exactly once: also publishing, by [Publisher.WithTx].
//
// Ack and Nack return before the database knows. Close, and the end of Subscribe's context, wait for it.
//
// # Order
//
// There is none, unless PublisherConfig.Key says what belongs together. Of those messages a group gets one at a time, in order, over all of its
// subscribers: the next one comes after the ack, and a nack does not let it pass.
//
// # Backpressure
//
// A subscription has at most Concurrency messages, at work or waiting to be received. What it has no place for stays in the
// database, for others.
package watermill
