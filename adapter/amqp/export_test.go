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
	h := &held{Delivery: all[0], attempt: 1, until: time.Now(), lease: time.NewTimer(0)}
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
