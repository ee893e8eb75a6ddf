package amqp

import (
	"context"
	"time"

	"github.com/pgwake/pgwake/dispatch"
)

// ReceiveOne is a Receive in which something happens after RabbitMQ has ended the consumer, and before the lease begins.
func (s *Stream) ReceiveOne(ctx context.Context, namespace string, happens func()) ([]dispatch.StreamDelivery, error) {
	a, err := s.lane(ctx, namespace)
	if err != nil {
		return nil, err
	}
	all, err := a.claim(ctx, 1)
	if err != nil {
		return nil, err
	}
	happens()
	return a.hold(all, time.Now().Add(time.Hour))
}

// ExpireOne has a lease end after something has happened that the lane has not yet been told of.
func (s *Stream) ExpireOne(ctx context.Context, namespace string, happens func()) error {
	a, err := s.lane(ctx, namespace)
	if err != nil {
		return err
	}
	all, err := a.claim(ctx, 1)
	if err != nil {
		return err
	}
	happens()
	h := &held{Delivery: all[0], weight: weigh(all[0].Body, all[0].Headers), attempt: 1, until: time.Now(), lease: time.NewTimer(0)}
	a.mu.Lock()
	a.held[h.DeliveryTag] = h
	a.mu.Unlock()
	a.expire(h.DeliveryTag, h)
	return nil
}

// Lanes is the number of channels that are received from.
func (s *Stream) Lanes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.lanes)
}

// Held is what of messages is in memory that were received and are not settled.
func (s *Stream) Held() int64 {
	s.received.mu.Lock()
	defer s.received.mu.Unlock()
	return s.received.used
}

// SpareFor has what is too much for one Receive be kept so long for another one.
func (s *Stream) SpareFor(d time.Duration) { s.spareFor = d }

// PublishAhead has no more be under way on connections that are to be made.
func (s *Stream) PublishAhead(most int64) { s.publishedAhead = most }

// Underway is how many messages were published and are not confirmed, and whether another one would wait.
func (s *Stream) Underway(ctx context.Context) (n int, full bool, err error) {
	l, err := s.out.connect(ctx)
	if err != nil {
		return 0, false, err
	}
	p := l.publisher
	p.mu.Lock()
	defer p.mu.Unlock()
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	return len(p.under), p.budget.shut || p.budget.used >= p.budget.most, nil
}

// OwnWeight is what a message takes of a budget, whatever it says.
const OwnWeight = ownWeight
