// Package pgmq has the queues of pgmq, the message queue that is an extension or an SQL script for PostgreSQL, served by Coordinators
// as those of a pgwake.Provider are: handlers are called within milliseconds, and nobody polls.
//
//	err := pgmq.Install(ctx, pool) // once
//	s, err := pgmq.New(ctx, pool, nil)
//	defer s.Close()
//	c := dispatch.NewCoordinators(dispatch.StreamSource(s, nil), &dispatch.CoordinatorsConfig{Groups: groups})
//	return c.Run(ctx)
//
// # What Install adds
//
// A schema of its own, pgwake_pgmq, and triggers on pgmq's tables, which tell of messages whoever sends them, by pgmq.send or plain SQL:
// on the channel pgmq_message_ready, and on pgmq_message_ready.<namespace>, which is for other listeners. A statement that sends costs
// two notifications, however many messages it sends, and so takes the lock of PostgreSQL's notification queue at its commit; a claim costs
// none. Queues that are created later tell of themselves, on pgmq_queue_created. What is told has ids and instants, and nothing of what a
// message says. Uninstall removes it. Roles that receive need USAGE on that schema, and those that send need nothing of it: docs/security.md
// has the grants.
//
// # Namespaces
//
// The namespace of a queue is in its name: worker_<x>_queue and <x>_queue belong to <x>, those that begin with orchestration to
// orchestration, and all others to default. Several queues may have the same one. Publish takes the queue that is there. If there is none
// it creates <namespace>_queue, or worker_<namespace>_queue where that would belong to another namespace, as that of tenant-a would, or differ
// from another queue by upper and lower case alone, which to pgmq are one. For this a namespace is to have letters, digits, underscores and
// single hyphens, and at most 41 characters, or 34 in the second case.
//
// # Messages
//
// The header "pgwake" is an object of this package's: "name" in it is for which handler the message is (Publish sets it; without it
// that is the name of the queue). The rest of it is about one message, and ignored where that is another: a dead letter may be sent again
// with the headers that it has in the archive, and begins anew. All other headers are those of the message. A payload is JSON, and comes
// back as PostgreSQL's jsonb has it. Publish refuses what jsonb cannot hold, and what is larger than MaxPayload or nested deeper than
// pgwake.MaxDepth, with a pgwake.ErrInvalid, before anything is sent, and so numbers that jsonb writes out in more than MaxPayload. What
// others send, and has numbers of more than 128 MiB when they are written out, nobody could read: it becomes a dead letter, with reason
// "unreadable", when it would be received. So does what has headers that leave no room for a note, of 128 KiB within the 256 MiB of jsonb, which
// the archive has as they were, and what was read 2,147,483,647 times.
//
// An answer of the database has 64 MiB of messages and headers at most, or one message; a Receive that was to have more gets fewer messages, and the
// others are due as before. The database may be silent for 5 s before the first of them comes, and between one and the next, or the Receive fails, and
// they are due again; where that was too short for what is large, it is doubled the next time, up to 2 min.
//
// # When messages are due
//
// One connection listens, for all queues of the Stream. While it is there, a Receive that waits asks the database when it is told of a
// message, at the instant at which one becomes due or a lease ends, and once in FallbackInterval. Invariant: whoever waits knows the earliest
// vt of its namespace, or is about to be told. It was in the answer that found nothing; a message that is sent, or due sooner than
// before, is told of; and a claim is of what is due, of which all who wait have been told, so they ask as well, and learn when that lease
// ends. When the connection is lost, all who wait ask as soon as there is another one.
//
// A connection counts only once a notification from the pool has come through it. Behind a transaction pooler none does: then the Stream
// says so in its log, tries again every few seconds, and whoever waits asks once in FallbackInterval; Config.ListenConfig goes around it.
// Its session has no idle_session_timeout, whatever the role's is.
//
// Anybody who may connect to the database can notify. None of that is believed: it has those ask who wait, 500 times at once and 50 times a
// second at most, or once a second each if there are more of them. What is more than that is put off for a second at most, not dropped, and
// takes no memory. Each answer with a message allows for ten more.
//
// Leases are as long as pgmq has it, in whole seconds, rounded up. A receipt is for one read of a message: what was read again
// meanwhile cannot be acknowledged with it. Dead letters are in pgmq's archive, with reason, cause and the msg_id that they had in the header
// "pgwake". Where the archive has another message by that id, as it may where a sequence is behind after logical replication, they are there by a negative one. If the
// connection breaks while a Receive is at it, what that may have claimed comes again when its lease ends.
//
// Verbs are READ COMMITTED, and take one round trip, or three where the default isolation level, which New asks for, is another.
package pgmq
