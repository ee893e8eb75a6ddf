package amqp

import (
	"context"
	"sync"

	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how much of messages does a Stream have in memory, and what happens when that is too much?
//
// A message that was received is held until it is settled, since it can be given back only as a copy (lane.go). What is published is
// under way until it is confirmed (publish.go). Each of the two has a budget of bytes, of which a message takes what it has, and something
// for itself, so that there is a bound of their number as well. Who finds it spent waits.
//
// Invariant: who waits for room to publish has nothing under way himself, so all who do so wait for RabbitMQ alone.

const (
	receivedAtOnce = 64 << 20 // what a Receive holds of one queue, unless that is one message
	publishedAhead = 64 << 20 // what is under way on a connection
	publishedPart  = 16       // a call sends no more than such a part of that at once, and waits for it to be confirmed
	ownWeight      = 1 << 10  // of a message, whatever it says
)

type budget struct {
	mu     sync.Mutex
	most   int64
	used   int64
	shut   bool          // there is no room, however little is used
	change chan struct{} // closed when that may be otherwise; nil: nobody waits
}

// take waits for room, and takes something of it, which may be more than there is: else what is large would wait for ever. Invariant: it is
// exceeded by what was taken last.
func (b *budget) take(ctx context.Context, weight int64) error {
	for {
		b.mu.Lock()
		if !b.shut && b.used < b.most {
			b.used += weight
			b.mu.Unlock()
			return nil
		}
		if b.change == nil {
			b.change = make(chan struct{})
		}
		change := b.change
		b.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// add takes something for which nobody waits, or gives it back if it is negative.
func (b *budget) add(weight int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used += weight
	b.changed()
}

// close has there be no room until it is opened.
func (b *budget) close(shut bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut = shut
	b.changed()
}

// changed is called with mu held.
func (b *budget) changed() {
	if b.change != nil && !b.shut && b.used < b.most {
		close(b.change)
		b.change = nil
	}
}

// try takes something if there is room for all of it.
func (b *budget) try(weight int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+weight > b.most {
		return false
	}
	b.used += weight
	return true
}

// room is how much there is left, or less than nothing.
func (b *budget) room() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most - b.used
}

// weigh is what a message takes.
func weigh(body []byte, headers amqp091.Table) int64 {
	return ownWeight + int64(len(body)) + weightOf(headers)
}

func weightOf(v any) (all int64) {
	const each = 16
	switch v := v.(type) {
	case amqp091.Table:
		for name, value := range v {
			all += each + int64(len(name)) + weightOf(value)
		}
	case []any:
		for _, value := range v {
			all += weightOf(value)
		}
	case string:
		all = int64(len(v))
	case []byte:
		all = int64(len(v))
	}
	return all + each
}
