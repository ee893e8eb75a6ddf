package watermill

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: how are messages published?

// PublisherConfig holds every setting of a Publisher. The zero value means the defaults, and so does a nil *PublisherConfig.
type PublisherConfig struct {
	// Key returns by what messages belong together; "": by nothing. Of the messages of a key, whatever their topics, a consumer group gets
	// one at a time and in order (see eventbus.EmitOptions.Key). [KeyOfTopic] keeps the order of each topic as a whole. It is called by
	// several goroutines at a time. Defaults to nil: no order.
	Key func(topic string, m *message.Message) string

	// DedupFor has a message not be published if one with its UUID was, to the topic, less than this ago: for whoever publishes again
	// because he does not know whether he has. A message without a UUID is refused then. Not for messages that come back to a topic on
	// purpose, as from a queue of poisoned ones. Defaults to 0: all are published.
	DedupFor time.Duration

	// JSON has payloads be those of the events as they are: JSON, which handlers of package eventbus can decode and SQL can look into.
	// Others are refused, and subscribers get them as jsonb writes them: equal, not byte for byte. Defaults to false: any bytes, see the
	// package.
	JSON bool
}

// KeyOfTopic is a PublisherConfig.Key: the messages of a topic come one after the other, in the order in which they were published.
func KeyOfTopic(topic string, _ *message.Message) string {
	key, _ := EventType(topic) // without one there is nothing to publish
	return key
}

// Publisher publishes messages as events. It implements message.Publisher; safe for concurrent use as far as the transaction of WithTx is.
type Publisher struct {
	bus    *eventbus.Bus
	cfg    PublisherConfig
	closed *atomic.Bool
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a Publisher of the Bus's namespace. A nil config means the defaults. Fails with pgwake.ErrConfig.
func NewPublisher(bus *eventbus.Bus, config *PublisherConfig) (*Publisher, error) {
	if bus == nil {
		return nil, fmt.Errorf("%w: there is no Bus", pgwake.ErrConfig)
	}
	p := &Publisher{bus: bus, closed: new(atomic.Bool)}
	if config != nil {
		p.cfg = *config
	}
	if p.cfg.DedupFor < 0 {
		return nil, fmt.Errorf("%w: DedupFor %v is negative", pgwake.ErrConfig, p.cfg.DedupFor)
	}
	return p, nil
}

// WithTx returns a Publisher whose messages are published if, and only if, a transaction on the database of the Bus commits: an outbox. It is to
// be READ COMMITTED. Close of one of the two closes both.
func (p *Publisher) WithTx(tx pgx.Tx) *Publisher {
	in := *p
	in.bus = p.bus.WithTx(tx)
	return &in
}

var errClosed = fmt.Errorf("%w: it was closed before", pgwake.ErrClosed)

// Publish publishes messages to a topic: all or none, in one round trip, and in this order. When it returns they are in the database, or part
// of the transaction. The context is that of the first message, and so is the trace that they belong to.
//
// Errors are those of eventbus.Bus.EmitMany, such as pgwake.ErrInvalid and pgwake.ErrPayloadTooLarge, and pgwake.ErrClosed after Close. If one
// is Unknown (pgwake.Error), they may have been published all the same; see PublisherConfig.DedupFor.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if err := p.publish(topic, messages); err != nil {
		return fmt.Errorf("publish to %.200q: %w", topic, err)
	}
	return nil
}

func (p *Publisher) publish(topic string, messages []*message.Message) error {
	if p.closed.Load() {
		return errClosed
	}
	eventType, err := EventType(topic)
	if err != nil || len(messages) == 0 {
		return err
	}
	events := make([]eventbus.Emission, len(messages))
	for i, m := range messages {
		if events[i], err = emission(eventType, m, p.cfg.JSON); err != nil {
			return err
		}
		if p.cfg.Key != nil {
			events[i].Key = p.cfg.Key(topic, m)
		}
		if p.cfg.DedupFor > 0 {
			if m.UUID == "" {
				return fmt.Errorf("%w: without a UUID nobody knows whether message %d was published before", pgwake.ErrInvalid, i)
			}
			events[i].DedupKey, events[i].DedupFor = eventType+"|"+m.UUID, p.cfg.DedupFor // a type has no '|'
		}
	}
	_, err = p.bus.EmitMany(messages[0].Context(), events)
	return err
}

// Close has Publish fail from now on. What was published is in the database; there is nothing to wait for. It may be called again.
func (p *Publisher) Close() error {
	p.closed.Store(true)
	return nil
}
