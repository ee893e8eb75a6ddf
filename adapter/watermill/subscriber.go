package watermill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: what can be subscribed to, and how does that end?

// SubscriberConfig holds every setting of a Subscriber. The zero value means the defaults, and so does a nil *SubscriberConfig.
type SubscriberConfig struct {
	// Node says how each subscription handles its messages: it is a node of the bus. Some things are otherwise than there:
	//
	//   - Group is the consumer group. All subscribers of a group share the messages of a topic; each group gets all of them.
	//   - Concurrency is how many messages a subscription has at one time: at work, or waiting to be received. With 1 the next one comes
	//     after the ack.
	//   - MaxAttempts defaults to dispatch.Unlimited: messages are for Watermill's middleware to give up, such as PoisonQueue.
	//   - Retry says how long to wait after a nack. It defaults to no time.
	//   - Timeout is for the ack: a message that has neither that nor a nack by then comes again.
	//   - StopTimeout is how long Close waits for the acks of messages that were received. It defaults to 5 s.
	//   - ID has the topic after it.
	Node eventbus.NodeConfig

	// FromBeginning has a group that is new get also what was published to the topic before; see eventbus.SubscribeOptions. So it is for one
	// topic: for others there are Subscribers of other groups. A group that gets the topic already goes on as it does; one that does not is
	// refused (pgwake.ErrInvalid). Defaults to false: a group gets what is published from the first Subscribe or SubscribeInitialize on.
	FromBeginning bool

	// Transactional has each message come with a transaction, TxFrom(m.Context()), that commits with the ack and is rolled back by a nack: what
	// is done by it happens exactly once. It is not to be used after either. Each message that a subscription has holds a connection of the
	// Provider's pool, which needs the sum of all Concurrency and four more. Defaults to false.
	Transactional bool
}

// Subscriber subscribes to topics. It implements message.Subscriber and message.SubscribeInitializer; safe for concurrent use.
type Subscriber struct {
	bus *eventbus.Bus
	cfg SubscriberConfig

	closing chan struct{}

	mu     sync.Mutex
	closed bool
	open   map[*subscription]struct{}
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// defaultStopTimeout is short of what systems give a process to end, and of the patience of a message.Router.
const defaultStopTimeout = 5 * time.Second

// verbTimeout bounds what is said to the database without a context of the caller's.
const verbTimeout = 30 * time.Second

// NewSubscriber returns a Subscriber in the Bus's namespace. A nil config means the defaults. Fails with pgwake.ErrConfig, and with
// pgwake.ErrInvalid for a group that there cannot be; what else is wrong with SubscriberConfig.Node is an error of Subscribe.
func NewSubscriber(bus *eventbus.Bus, config *SubscriberConfig) (*Subscriber, error) {
	if bus == nil {
		return nil, fmt.Errorf("%w: there is no Bus", pgwake.ErrConfig)
	}
	s := &Subscriber{bus: bus, closing: make(chan struct{}), open: make(map[*subscription]struct{})}
	if config != nil {
		s.cfg = *config
	}
	n := &s.cfg.Node
	n.Group = cmp.Or(n.Group, eventbus.DefaultGroup)
	n.MaxAttempts = cmp.Or(n.MaxAttempts, dispatch.Unlimited)
	n.StopTimeout = cmp.Or(n.StopTimeout, defaultStopTimeout)
	if n.Retry == nil {
		n.Retry = func(int, error) time.Duration { return 0 }
	}
	return s, eventbus.CheckGroup(n.Group)
}

// SubscribeInitialize declares the topic for the consumer group, for good, without receiving anything: from now on the group misses nothing.
// Subscribe does the same.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), verbTimeout)
	defer cancel()
	if _, err := s.declare(ctx, topic); err != nil {
		return fmt.Errorf("declare topic %.200q: %w", topic, err)
	}
	return nil
}

// declare subscribes the group to the type of a topic, and returns that.
func (s *Subscriber) declare(ctx context.Context, topic string) (eventType string, err error) {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return "", errClosed
	}
	if eventType, err = EventType(topic); err != nil {
		return "", err
	}
	// Of a group that is there the bus would leave out what was published before.
	return eventType, s.bus.Subscribe(ctx, s.cfg.Node.Group, []string{eventType}, &eventbus.SubscribeOptions{MissNothing: s.cfg.FromBeginning})
}

// Subscribe returns the messages of a topic that the group gets from now on, and those that it has not acknowledged yet. The group gets them
// also while nobody subscribes: until eventbus.Bus.DeleteGroup, or Unsubscribe.
//
// A message that was received is its receiver's until the ack or the nack; a nack has it come again. Its context has the values of ctx, and ends
// with either, with ctx, and when the message is somebody else's. See [EventFrom] and [TxFrom].
//
// When ctx ends, so does the subscription, as by Close, and the channel is closed. It is closed as well if the Provider is closed, or does
// not let this process have any messages.
//
// Errors are those of eventbus, and pgwake.ErrClosed after Close.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	out, err := s.subscribe(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("subscribe to %.200q: %w", topic, err)
	}
	return out, nil
}

func (s *Subscriber) subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	eventType, err := s.declare(ctx, topic)
	if err != nil {
		return nil, err
	}
	how := s.cfg.Node
	if how.ID != "" {
		how.ID += ":" + topic
	}
	node, err := s.bus.Node(ctx, &how)
	if err != nil {
		return nil, err
	}
	sub := &subscription{ctx: ctx, node: node, out: make(chan *message.Message), ending: make(chan struct{}), ended: make(chan struct{})}
	if s.cfg.Transactional {
		err = node.On(ctx, eventType, sub.deliver)
	} else {
		err = node.OnPlain(ctx, eventType, func(ctx context.Context, e *eventbus.Event) error { return sub.deliver(ctx, e, nil) })
	}
	if err == nil {
		err = node.Start(ctx)
	}
	if err == nil && !s.add(sub) {
		err = errClosed
	}
	if err != nil {
		sub.end(s.cfg.Node.StopTimeout)
		return nil, errors.Join(err, sub.err)
	}
	go func() {
		select {
		case <-ctx.Done():
		case <-s.closing:
		case <-node.Done():
		}
		sub.end(s.cfg.Node.StopTimeout)
		s.remove(sub)
	}()
	return sub.out, nil
}

func (s *Subscriber) add(sub *subscription) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.open[sub] = struct{}{}
	}
	return !s.closed
}

func (s *Subscriber) remove(sub *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && sub.err == nil { // or else Close tells what came of it
		delete(s.open, sub)
	}
}

// Close ends all subscriptions: nothing more is received, what was waiting for that goes back at once, and what was received has
// SubscriberConfig.Node.StopTimeout for its ack before it goes back, and its context ends. All channels are closed when it returns. It may be called again.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	var errs []error
	for sub := range s.open { // nobody changes it any more
		<-sub.ended
		errs = append(errs, sub.err)
	}
	return errors.Join(errs...)
}
