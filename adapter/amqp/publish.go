package amqp

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how are messages published, and when is it certain that they are in a queue?
//
// RabbitMQ confirms what it has no queue for as well: it returns that before, since it is published as mandatory. What was declared once may
// have been deleted, or have expired, so that is no rare thing to be told of.
//
// Invariant: a message is taken for published when it is confirmed and was not returned.
//
// What is under way is bounded (budget.go). It is so until it is confirmed, or the channel is closed, also if nobody waits for that any more. While
// RabbitMQ says that it takes nothing, since it has no memory or disk left, nothing is sent: it does not read, so whoever wrote to it
// would have to wait for it, and not only as long as his context.

// publisher is the channel on which a link publishes. Safe for concurrent use.
type publisher struct {
	ch     *amqp091.Channel
	budget budget
	noted  chan struct{} // whoever receives from it knows by under of all that was returned before

	mu    sync.Mutex
	last  int64
	under map[int64]*underway // by number
}

// underway is a message that was published and not yet confirmed.
type underway struct {
	*amqp091.DeferredConfirmation
	number   int64
	to       string // queue
	returned bool   // by publisher.mu
}

func newPublisher(conn *amqp091.Connection, ahead int64) (*publisher, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	p := &publisher{ch: ch, budget: budget{most: ahead}, noted: make(chan struct{}), under: make(map[int64]*underway)}
	go func(blocked <-chan amqp091.Blocking) {
		for b := range blocked { // until the connection ends
			p.budget.close(b.Active)
		}
		p.budget.close(false)
	}(conn.NotifyBlocked(make(chan amqp091.Blocking, 1)))
	// Without a buffer: amqp091 goes on to the confirmation when note has the return in its hand.
	go p.note(ch.NotifyReturn(make(chan amqp091.Return)))
	return p, ch.Confirm(false)
}

// note marks what is returned, until the channel is closed. It never waits for RabbitMQ: amqp091 reads nothing while it waits for note.
func (p *publisher) note(returns <-chan amqp091.Return) {
	defer close(p.noted)
	for {
		select {
		case r, ok := <-returns:
			if !ok {
				return
			}
			n, _ := number(r.Headers[headerNumber])
			p.mu.Lock()
			if u := p.under[n]; u != nil {
				u.returned = true
			}
			p.mu.Unlock()
		case p.noted <- struct{}{}:
		}
	}
}

// publish is followed by end.
func (p *publisher) publish(ctx context.Context, to string, m amqp091.Publishing) (*underway, error) {
	u := &underway{to: to}
	p.mu.Lock()
	p.last++
	u.number = p.last
	p.under[u.number] = u
	p.mu.Unlock()
	m.Headers[headerNumber] = u.number
	var err error
	u.DeferredConfirmation, err = p.ch.PublishWithDeferredConfirmWithContext(ctx, "", to, true, false, m)
	if err != nil {
		p.end(u)
	}
	return u, err
}

var errNotConfirmed = errors.New("the broker has not confirmed a message")

// wait returns when a message is confirmed. False: there is no such queue.
func (p *publisher) wait(ctx context.Context, u *underway) (arrived bool, err error) {
	confirmed, err := u.WaitContext(ctx)
	if err == nil && !confirmed {
		err = errNotConfirmed
	}
	if err != nil {
		return false, err
	}
	<-p.noted
	p.mu.Lock()
	defer p.mu.Unlock()
	return !u.returned, nil
}

func (p *publisher) end(u *underway) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.under, u.number)
}

// free gives back what messages took of the budget, when all are confirmed, or the channel is closed.
func (p *publisher) free(under []*underway, weight int64) {
	for _, u := range under {
		<-u.Done()
	}
	p.budget.add(-weight)
}

// sending is a message on its way to a queue, or to what belongs to that.
type sending struct {
	delay   time.Duration
	dead    bool
	copied  bool // it is to fit into a frame
	message amqp091.Publishing
}

var errNoQueue = errors.New("the queue of a message was deleted while that was published")

// send publishes, and waits until all is confirmed.
func (s *Stream) send(ctx context.Context, queue string, all []sending) error {
	for len(all) > 0 {
		n, weight := part(all, s.publishedAhead/publishedPart)
		returned, err := s.sendOnce(ctx, queue, all[:n], weight)
		if err == nil && len(returned) > 0 {
			returned, err = s.sendOnce(ctx, queue, returned, weight)
		}
		if err == nil && len(returned) > 0 {
			err = errNoQueue
		}
		if err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// part is how many messages to send at once, and what they take.
func part(all []sending, most int64) (n int, weight int64) {
	for n < len(all) {
		next := weigh(all[n].message.Body, all[n].message.Headers)
		if n > 0 && weight+next > most {
			break
		}
		n, weight = n+1, weight+next
	}
	return n, weight
}

// sendOnce returns those that RabbitMQ had no queue for. It is declared when they are sent the next time.
func (s *Stream) sendOnce(ctx context.Context, queue string, all []sending, weight int64) (returned []sending, err error) {
	l, err := s.out.connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := l.publisher.budget.take(ctx, weight); err != nil {
		return nil, err
	}
	under := make([]*underway, 0, len(all))
	defer func() {
		for _, u := range under {
			l.publisher.end(u)
		}
		if err != nil { // and so some may not be confirmed
			go l.publisher.free(under, weight)
			return
		}
		l.publisher.free(under, weight)
	}()
	for _, m := range all {
		to, err := l.declareFor(ctx, queue, &m)
		if err != nil {
			return nil, err
		}
		if m.copied {
			m.message.Headers[headerNumber] = int64(0) // which has the size of any
			fit(&m.message, l.conn.Config.FrameSize)
		}
		u, err := l.publisher.publish(ctx, to, m.message)
		if err != nil {
			l.broken()
			return nil, err
		}
		under = append(under, u)
	}
	for i, u := range under {
		arrived, err := l.publisher.wait(ctx, u)
		if err != nil {
			l.broken()
			return nil, err
		}
		if !arrived {
			l.forget(u.to)
			returned = append(returned, all[i])
		}
	}
	return returned, nil
}

// declareFor declares what a message needs, and returns the queue to publish it to.
func (l *link) declareFor(ctx context.Context, queue string, m *sending) (string, error) {
	switch {
	case m.dead:
		return deadQueue(queue), l.declareNamespace(ctx, queue, 0)
	case m.delay > 0:
		if err := l.declareNamespace(ctx, queue, delayTrust); err != nil {
			return "", err
		}
		return l.declareDelay(ctx, queue, m.delay)
	}
	return queue, l.declareNamespace(ctx, queue, 0)
}

// broken ends a connection whose channel for publishing is gone: another one has another.
func (l *link) broken() {
	if l.publisher.ch.IsClosed() {
		_ = l.conn.CloseDeadline(time.Now().Add(time.Second))
	}
}
