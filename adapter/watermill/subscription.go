package watermill

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: what happens between a delivery and the ack of its message?
//
// A subscription is a node with one handler, which hands out the message and waits for the ack or the nack. So leases, retries, dead letters and
// the order of keys are those of any handler. It has a node of its own since a receiver that is slow is then in nobody else's way: what it does
// not receive fills its own places.

// subscription is a channel of messages.
type subscription struct {
	ctx    context.Context // of Subscribe
	node   *eventbus.Node
	out    chan *message.Message
	ending chan struct{} // is closed when nothing more is to be sent
	ended  chan struct{} // is closed when out is
	err    error         // of the end, once it has ended

	mu         sync.Mutex
	over       bool
	delivering sync.WaitGroup // deliver is at work, and may send
}

var errNacked = errors.New("the message was nacked")

// settleTime is how long the receiver of a message with a transaction has to notice that its context has ended. It is shorter than what a
// Node gives its handlers for that.
const settleTime = time.Second

// deliver is the handler of the node. tx is nil if there is no transaction.
func (s *subscription) deliver(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
	if !s.begin() {
		return dispatch.Snooze(0)
	}
	defer s.delivering.Done()
	m, err := newMessage(e)
	if err != nil {
		return eventbus.DeadLetter(err)
	}
	own, end := context.WithCancel(context.WithValue(trace.ContextWithSpan(s.ctx, trace.SpanFromContext(ctx)), deliveryKey{}, delivered{e, tx}))
	defer end()
	defer context.AfterFunc(ctx, end)()
	m.SetContext(own)
	select {
	case s.out <- m:
	case <-s.ending: // nobody has seen it
		return dispatch.Snooze(0)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	var late <-chan time.Time
	ended := ctx.Done()
	for {
		select {
		case <-m.Acked():
			return nil
		case <-m.Nacked():
			return errNacked
		case <-ended:
			if tx == nil {
				return unlessAcked(m, context.Cause(ctx))
			}
			// The transaction is the receiver's until it says that it has done with it, or has had time to.
			ended, late = nil, time.After(settleTime)
		case <-late:
			return unlessAcked(m, context.Cause(ctx))
		}
	}
}

// unlessAcked returns why a message is not acknowledged, if it is not.
func unlessAcked(m *message.Message, why error) error {
	select {
	case <-m.Acked():
		return nil
	default:
		return why
	}
}

func (s *subscription) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.over {
		s.delivering.Add(1)
	}
	return !s.over
}

// end ends the subscription, whose receivers have some time for acks, and closes the channel. Invariant: nothing is sent to a channel that is closed, since begin lets nobody pass
// from then on, and those who have passed have returned: the end of the node ends their contexts.
func (s *subscription) end(patience time.Duration) {
	close(s.ending)
	ctx, cancel := context.WithTimeout(context.Background(), patience+verbTimeout)
	defer cancel()
	err := s.node.Stop(ctx)
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.delivering.Wait()
	s.err = err
	close(s.out)
	close(s.ended)
}

type deliveryKey struct{}

// delivered is what the context of a message has.
type delivered struct {
	event *eventbus.Event
	tx    pgx.Tx
}

// EventFrom returns the event that a message is, by its context: its id, key, headers, and how often it came before. Nil if the context is none
// of a message from here.
func EventFrom(ctx context.Context) *eventbus.Event {
	d, _ := ctx.Value(deliveryKey{}).(delivered)
	return d.event
}

// TxFrom returns the transaction that ends with the ack of a message, by its context; see SubscriberConfig.Transactional. Nil if there is none.
func TxFrom(ctx context.Context) pgx.Tx {
	d, _ := ctx.Value(deliveryKey{}).(delivered)
	return d.tx
}
