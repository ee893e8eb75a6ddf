// Package amqp has the queues of a RabbitMQ (3.10 or newer) served by Coordinators as those of a pgwake.Provider are.
//
//	s, err := amqp.New(url, &amqp.Config{Namespaces: []string{"billing"}})
//	defer s.Close()
//	c := dispatch.NewCoordinators(dispatch.StreamSource(s, nil), &dispatch.CoordinatorsConfig{Groups: groups})
//	return c.Run(ctx)
//
// # Queues
//
// A namespace is a durable queue, Config.Prefix and its name. Its dead letters are in one with ".dead" after that, to which
// RabbitMQ also puts what it gives up by itself, by x-dead-letter-exchange. AMQP has no list of queues: a Stream knows the namespaces of its
// Config, and those that were published to, or declared, through it. A process that is to serve a namespace of which it never publishes
// has to be told of it. A name is UTF-8 without line breaks, and does not end in ".dead" or in ".delay." and digits, as the queues that belong to
// others do.
//
// # Messages
//
// The property "type" is for which handler a message is; without it that is the name of the queue. Headers are texts, of 64 KiB in all. Those
// that begin with "pgwake-" are this package's, and those that RabbitMQ adds are left out. So are CC and BCC, by which it puts copies to more
// queues: whoever sends a message with its own client may have that, Publish refuses them, and what is sent again here goes to one queue. A dead
// letter may be sent again to the queue with the headers that it has in the other, as a shovel does, and begins anew.
//
// # Claims and leases
//
// A Receive is a consumer whose prefetch is what is asked for, and that is cancelled as soon as something came: so what a process has is
// what it can begin, and the rest is for others. From a quorum queue it gets what is there one by one (basic.get), and is a consumer of one message
// when there is none: such a queue counts a delivery of what is on its way to a consumer that is cancelled. An idle namespace is a consumer that waits, and costs nothing but a channel: a connection
// has 2,047 of them unless RabbitMQ's channel_max and Config.Connection.ChannelMax say otherwise, and namespaces beyond that are not
// served, as Coordinators.Health says.
//
// RabbitMQ has no leases: a message is its consumer's until the connection ends. So a process that dies has its messages redelivered at once;
// and within a process that lives this package ends leases that nobody extends, by giving the message back. A connection that is lost ends all
// leases. RabbitMQ itself ends those of 30 minutes (consumer_timeout), and the channel with them: handlers that take longer need
// it to be set higher.
//
// RabbitMQ sends as many messages as it was asked for, however large they are. The first Receive of a namespace asks for one, and the next ones for
// more as far as those before were not large. A Receive returns 64 MiB of them, or one, and up to 64 MiB more are kept for the next one. What no
// Receive has taken after 5 s, or until Close, goes back, to the end of the queue, without an attempt that counts. Of all that it has not
// settled yet, a Stream holds Config.HeldBytes, and one message for each Receive that waits, and asks for no more until there is room; what comes
// beyond that goes back in the same way, at once.
//
// A RabbitMQ that does not answer any more is found out by its heartbeats, within twice Config.Connection.Heartbeat: 20 s unless it is set.
// Until then a Receive may outlive its context, and so may the end of Coordinators.Run.
//
// # Giving back
//
// Nack sends a copy of the message, which has the number of its attempt and the error, and acknowledges the original once RabbitMQ
// has confirmed the copy. So it goes to the end of the queue, and if the connection is lost in between there are two of it. A Nack whose context ends
// before RabbitMQ has confirmed has sent its copy all the same, and to call it again sends another one. A delay is
// a queue of its own with a time to live, ".delay.<milliseconds>" after the name, from which messages come back by dead-lettering; all in one have
// the same delay, so none waits behind another. There are few of them, since delays are rounded up by an eighth at most, or 8 ms, and they are gone when
// nothing has used them for ten minutes. The longest delay is 40 days:
// Nack takes any longer one for that, so that an attempt may come sooner than RetryAfter asked for, and Publish refuses it.
//
// A copy has to fit into a frame, of 128 KiB unless RabbitMQ says otherwise, with 4 KiB to spare for what RabbitMQ adds. Others may send
// headers that fill one. Then the error, cause and reason of the copy are cut, down to 256 bytes, and if that is not enough headers of the message are left out, the
// smallest that makes room, or else the largest ones: "pgwake-left-out" says how many. The body and all else are as they were.
//
// # What others send
//
// The client library does not read tables that are nested more than 32 deep, or have more than 8,192 entries, nor a frame that is larger than was
// agreed, as one that was full is once RabbitMQ has added to it. It ends the connection instead, and so all leases of the Stream, whenever it is sent such
// a message. RabbitMQ takes it from whoever may publish, so let nobody do that whom you do not trust, or have queues with a limit: for quorum queues
// (Config.Quorum) that is a policy of delivery-limit, after so many deliveries RabbitMQ puts the message to the dead letters by itself. Classic queues have
// none: somebody has to get the message out by another client, or purge the queue.
//
// # What is certain
//
// Publish returns when RabbitMQ has confirmed that the messages are on disk, in a queue: one that was deleted in the meantime is declared
// again, and so it is by whoever receives from it. Whoever deletes a queue deletes what is in it, and also what waits for the end of a delay and would come to it. An ack is sent and not answered: if the connection is lost
// right then, the message comes again. Delivery is at least once, but for this: when a delay ends, RabbitMQ moves the message without
// having that confirmed, so a broker that is killed within the same fraction of a second may lose it.
//
// What is on its way to RabbitMQ, and not confirmed, is 64 MiB and what was sent last. Publish, Nack and DeadLetter wait for that to become less, as
// long as their context lets them, and while RabbitMQ takes nothing, since it has no memory or disk left.
//
// The number of an attempt is exact while processes live. What came to nobody's hand since a connection was lost
// is marked as redelivered and no more, and so counts as one attempt, however often that happens; quorum queues (Config.Quorum) count each, and also
// that of a message that comes at the moment at which a Receive that has waited in vain ends. A
// RabbitMQ 3.10.8 of one node that is killed may come back with quorum queues that have no leader, and neither take nor give
// anything: use classic queues there, and quorum queues in a cluster.
package amqp
