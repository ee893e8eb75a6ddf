// Package model is an explicit-state model of the protocol by which due items wake dispatchers: quiescent notify and
// directed wake. Its tests visit every state that can be reached, in every order of steps.
//
// # The property
//
// Steps are of two kinds. Some are owed: the protocol takes them by itself and in its own time, as soon as it can. A
// request is executed, a transaction of the engine commits, a notification arrives, a token is taken or bounced, a wait
// for K that nothing blocks is granted. All others happen if the world pleases: a producer's next statement, its commit
// or rollback, a handler's return, a new call of Fetch, the end of a wait by timeout, a node that leaves, dies, or
// fails. The fallback, and the scout of trouble, are not modelled.
//
// A state is quiet if no step that is owed is possible. The tests show, for each configuration:
//
//  1. In no quiet state is an item due and free, of a tag that a lane of a live node takes, while a dispatcher of
//     that lane is parked, because its last query found nothing.
//  2. No owed steps lead from a state back to it.
//
// Free means committed and not claimed; a row that an open claim has locked is not free. The only excuse is a sweep
// that waits for K, since how long a death goes unnoticed is bounded by the fallback anyway.
//
// # Why it implies the promise
//
// The promise is that no due item waits while a live dispatcher that may take it is parked, beyond the latency of
// a wake-up. Take any moment at which it does wait, and let the world stand still: producers stay open, handlers
// do not return. There are finitely many states, and by (2) no cycle of owed steps, so owed steps end in a quiet state;
// by (1) the item is not free there any more, or nobody waits who could take it. So at each moment finitely many
// steps, each of the length of a query or a notification, are all that keeps the item: nobody has to wait for the
// world, however long a transaction or a handler takes. Nor does it help the world to move on: wherever it leads, the
// same holds from there. Only a world that makes a new step in less time than it takes to deliver a wake-up, again
// and again and each time the one that hurts, could put it off; whether it could for ever is not examined.
//
// The model shows this for the sizes that are explored. That it holds beyond is not proved, but no rule counts
// nodes, dispatchers or producers.
//
// # Once nothing can be stranded
//
// Once all producers have ended, and somebody is on the way for each item that is due, nothing can be stranded any more,
// and (2) is shown for each node by itself: covered.go says why that is enough, and Config.Whole does without.
//
// # Order
//
// Order is kept by ranks and bits, never by counters that grow: a sequence number is a rank among those that are in use
// (machine.number), a notification is one of those under way to a lane, and items are as many as are due. So the space
// is finite although dispatchers fetch for ever.
package model
