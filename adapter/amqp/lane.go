package amqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
)

// This file answers: how are messages claimed, and how do leases end?
//
// A lane is the channel on which a queue is received from. Its deliveries are numbered, so a receipt is the lane and such a number, and
// is good for nothing when the channel is gone: RabbitMQ has put back all that it had not acknowledged.
//
// Invariant: a delivery of a lane is in held until it is acknowledged, or was given back; whoever takes it out of held does that. Once the
// channel is closed nothing is added to held, and nothing copied: RabbitMQ redelivers all of that, and a copy would be a second message.
//
// RabbitMQ may send as many messages as it was asked for, and their size it does not ask about. What is too much for one Receive is spare: it is for
// the next one of the lane. RabbitMQ would mark it as redelivered if it were given back as it is, and so it would have had an attempt that
// nobody made, and with MaxAttempts 1 be a dead letter that nobody saw. It goes back, if at all, as a copy.
//
// Invariant: what a Receive leaves as spare is no more than a Receive may return, in number and size, and goes back after spareFor: others want it,
// too. Only what could not be given back, since nothing can be published, is beyond that.
//
// Invariant: what is in held or spare counts in the Stream's budget (budget.go), and so does what was taken out of it until that is settled.

type lane struct {
	s     *Stream
	id    uint64
	queue string
	name  string // of the namespace
	link  *link
	ch    *amqp091.Channel

	rpc sync.Mutex // of calls that RabbitMQ answers, one at a time

	mu   sync.Mutex
	last int   // consumer
	pace int   // how many messages to ask for, since so many were not too large lately
	size int64 // the largest of those that came last
	held map[uint64]*held

	spare []amqp091.Delivery // in their order
	idle  *time.Timer        // of the time for which there is something spare; nil: there never was
}

// firstPace is that of a lane of which nobody knows how large its messages are.
const firstPace = 1

// spareFor is how long something is spare that no Receive takes.
const spareFor = 5 * time.Second

// held is a delivery.
type held struct {
	amqp091.Delivery
	weight  int64
	attempt int
	until   time.Time // end of the lease
	lease   *time.Timer
}

func newHeld(d amqp091.Delivery) *held {
	return &held{Delivery: d, weight: weigh(d.Body, d.Headers), attempt: attemptOf(&d)}
}

// lane returns the one of a namespace, on a connection that was open a moment ago.
func (s *Stream) lane(ctx context.Context, namespace string) (*lane, error) {
	l, err := s.in.connect(ctx)
	if err != nil {
		return nil, err
	}
	queue := s.cfg.Prefix + namespace
	if err := l.declareNamespace(ctx, queue, 0); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if known := l.lanes[queue]; known != nil && !known.ch.IsClosed() {
		return known, nil
	}
	ch, err := l.conn.Channel()
	if err != nil {
		return nil, err
	}
	a := &lane{s: s, id: s.lastLane.Add(1), queue: queue, name: namespace, link: l, ch: ch, pace: firstPace, held: make(map[uint64]*held)}
	l.lanes[queue] = a
	s.mu.Lock()
	s.lanes[a.id] = a
	s.mu.Unlock()
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	go func() {
		for range closed { // until the channel is
		}
		a.over()
	}()
	return a, nil
}

// over is the end of all its leases.
func (a *lane) over() {
	a.s.mu.Lock()
	delete(a.s.lanes, a.id)
	a.s.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range a.held {
		h.lease.Stop()
		a.settled(h)
	}
	clear(a.held)
	if a.idle != nil {
		a.idle.Stop()
	}
	a.s.received.add(-weightOfAll(a.spare))
	a.spare = nil
}

var errLaneClosed = errors.New("the channel was closed")

// receive waits for messages as a consumer. None: ctx has ended, the Stream is closed, or the channel is.
func (a *lane) receive(ctx context.Context, most int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	all, err := a.claim(ctx, most)
	if err != nil {
		return nil, err
	}
	return a.hold(all, time.Now().Add(lease))
}

// claimed is what comes to one Receive. All of it but what is to go back counts in the budget.
type claimed struct {
	s                            *Stream
	all, spare, back             []amqp091.Delivery
	weight, spareWeight, largest int64
}

// add has a message be part of the answer as far as there is room for that, be spare if it is too much for that, or go back if there is no room at all.
func (c *claimed) add(d amqp091.Delivery) {
	w := weigh(d.Body, d.Headers)
	c.largest = max(c.largest, w)
	switch {
	case len(c.all) == 0:
		c.s.received.add(w)
		c.all, c.weight = append(c.all, d), w
	case len(c.back) > 0 || c.spareWeight+w > receivedAtOnce || !c.s.received.try(w):
		c.back = append(c.back, d)
	case len(c.spare) > 0 || c.weight+w > receivedAtOnce:
		c.spare, c.spareWeight = append(c.spare, d), c.spareWeight+w
	default:
		c.all, c.weight = append(c.all, d), c.weight+w
	}
}

// full reports whether another message like the largest would be too much.
func (c *claimed) full(most int) bool {
	return len(c.all) >= most || len(c.spare)+len(c.back) > 0 || c.largest > min(receivedAtOnce-c.weight, c.s.received.room())
}

// claim takes one message, and what comes with it.
//
// A quorum queue takes back what it has sent, and the consumer has not seen, when that is cancelled, and counts a delivery: with a busy queue each
// third message had one more attempt than anybody had made. So its messages are got one by one, and its consumer is sent one message: when that is
// there, nothing else is on its way.
func (a *lane) claim(ctx context.Context, most int) ([]amqp091.Delivery, error) {
	c := &claimed{s: a.s}
	var err error
	if a.s.cfg.Quorum {
		if err = a.get(ctx, c, most); err == nil && len(c.all) == 0 {
			err = a.await(ctx, c, 1)
		}
	} else {
		err = a.await(ctx, c, a.ask(most))
	}
	if err != nil {
		a.link.forget(a.queue) // that may be why
		a.s.received.add(-c.weight - c.spareWeight)
		return nil, err // and all of it is put back
	}
	a.learn(c)
	a.keepSpare(c.spare)
	if len(c.back) > 0 {
		bounded, cancel := context.WithTimeout(context.Background(), putBackFor)
		defer cancel()
		left := a.giveBack(bounded, c.back)
		a.s.received.add(weightOfAll(left))
		a.keepSpare(left)
	}
	return c.all, nil
}

// get takes what is in the queue, one by one.
func (a *lane) get(ctx context.Context, c *claimed, most int) error {
	for len(c.all) == 0 || !c.full(most) {
		if a.s.ready(ctx) != nil {
			return nil
		}
		a.rpc.Lock()
		d, ok, err := a.ch.Get(a.queue, false)
		a.rpc.Unlock()
		if err != nil || !ok {
			return err
		}
		c.add(d)
	}
	return nil
}

// await takes what a consumer is sent until it has a message, and has heard that it is sent no more.
func (a *lane) await(ctx context.Context, c *claimed, ask int) error {
	consumer, deliveries, err := a.consume(ask)
	if err != nil {
		return err
	}
	select {
	case d, ok := <-deliveries:
		if !ok {
			return errLaneClosed
		}
		c.add(d)
	case <-ctx.Done():
	case <-a.s.closed:
	}
	cancelled := make(chan error, 1)
	go func() { // what comes meanwhile is to be taken as it comes
		a.rpc.Lock()
		defer a.rpc.Unlock()
		cancelled <- a.ch.Cancel(consumer, false)
	}()
	// What RabbitMQ sends before it knows of this has come when the call returns, and is claimed.
	for d := range deliveries {
		c.add(d)
	}
	return <-cancelled
}

// ask is how many messages to ask for: so many as there is likely room for.
func (a *lane) ask(most int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	fit := min(receivedAtOnce, a.s.received.room()) / max(a.size, ownWeight)
	return max(1, min(most, a.pace, int(fit)))
}

// learn has the next Receive ask for fewer, if some of what came was too much, or for more.
func (a *lane) learn(c *claimed) {
	if len(c.all) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case len(c.spare)+len(c.back) > 0:
		a.pace = len(c.all)
	case len(c.all) == a.pace && c.weight <= receivedAtOnce/2:
		a.pace = min(2*a.pace, a.s.cfg.Prefetch)
	}
	a.size = c.largest
}

// keepSpare has something be spare, which counts in the budget already, unless the channel was closed since it came: it is put back then.
func (a *lane) keepSpare(all []amqp091.Delivery) {
	if len(all) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ch.IsClosed() {
		a.s.received.add(-weightOfAll(all))
		return
	}
	a.spare = append(a.spare, all...)
	slices.SortFunc(a.spare, func(x, y amqp091.Delivery) int { return cmp.Compare(x.DeliveryTag, y.DeliveryTag) })
	if a.idle == nil {
		a.idle = time.AfterFunc(a.s.spareFor, func() {
			bounded, cancel := context.WithTimeout(context.Background(), putBackFor)
			defer cancel()
			a.giveBackSpare(bounded)
		})
		return
	}
	a.idle.Reset(a.s.spareFor)
}

// takeSpare begins leases of what is spare, as far as that is for one Receive.
func (a *lane) takeSpare(most int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	a.mu.Lock()
	var weight int64
	n := 0
	for n < min(most, len(a.spare)) {
		next := weigh(a.spare[n].Body, a.spare[n].Headers)
		if n > 0 && weight+next > receivedAtOnce {
			break
		}
		n, weight = n+1, weight+next
	}
	all := slices.Clone(a.spare[:n])
	a.spare = slices.Delete(a.spare, 0, n)
	a.mu.Unlock()
	return a.hold(all, time.Now().Add(lease))
}

// giveBackSpare has nothing be spare but what cannot be given back now, of which it is tried again.
func (a *lane) giveBackSpare(ctx context.Context) {
	a.mu.Lock()
	all := a.spare
	a.spare = nil
	a.mu.Unlock()
	before := weightOfAll(all)
	left := a.giveBack(ctx, all)
	a.s.received.add(weightOfAll(left) - before)
	a.keepSpare(left)
}

// giveBack gives back messages of which nobody had a lease, and so none of them has an attempt more. It returns those that it could not.
func (a *lane) giveBack(ctx context.Context, all []amqp091.Delivery) (left []amqp091.Delivery) {
	for i, d := range all {
		h := newHeld(d)
		if a.ch.IsClosed() || a.exchange(ctx, h, sending{message: h.copy(h.attempt-1, "", nil)}) != nil {
			return all[i:]
		}
	}
	return nil
}

func weightOfAll(all []amqp091.Delivery) (weight int64) {
	for _, d := range all {
		weight += weigh(d.Body, d.Headers)
	}
	return weight
}

// consume begins a consumer that gets most messages, at most.
func (a *lane) consume(most int) (consumer string, deliveries <-chan amqp091.Delivery, err error) {
	a.rpc.Lock()
	defer a.rpc.Unlock()
	a.last++
	consumer = fmt.Sprintf("pgwake-%d-%d", a.id, a.last)
	if err := a.ch.Qos(most, 0, false); err != nil { // of consumers that begin from now on
		return "", nil, err
	}
	deliveries, err = a.ch.Consume(a.queue, consumer, false, false, false, false, nil)
	return consumer, deliveries, err
}

// hold begins leases, unless the channel was closed since these came: all of it is put back then.
func (a *lane) hold(all []amqp091.Delivery, until time.Time) ([]dispatch.StreamDelivery, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ch.IsClosed() {
		a.s.received.add(-weightOfAll(all))
		return nil, errLaneClosed
	}
	got := make([]dispatch.StreamDelivery, len(all))
	for i, d := range all {
		h := newHeld(d)
		h.until = until
		a.held[d.DeliveryTag] = h
		h.lease = time.AfterFunc(time.Until(until), func() { a.expire(d.DeliveryTag, h) })
		m := delivery(h)
		m.Namespace, m.LeasedUntil = a.name, until
		m.Receipt = pgwake.LockToken(fmt.Sprintf("%d/%d", a.id, d.DeliveryTag))
		got[i] = m
	}
	return got, nil
}

// expire gives back what nobody has settled in time.
func (a *lane) expire(tag uint64, h *held) {
	a.mu.Lock()
	mine := a.held[tag] == h && !time.Now().Before(h.until) && !a.ch.IsClosed() // or it was extended, or put back, at this moment
	if mine {
		delete(a.held, tag)
	}
	a.mu.Unlock()
	if !mine {
		return
	}
	defer a.settled(h)
	if !a.s.cfg.Quorum { // which would not count this attempt
		bounded, cancel := context.WithTimeout(context.Background(), putBackFor)
		defer cancel()
		if a.exchange(bounded, h, sending{message: h.copy(h.attempt, "", nil)}) == nil {
			return
		}
	}
	_ = a.ch.Nack(tag, false, true) // or the channel is gone, and it is given back
}

// exchange sends a message in the place of one that was taken.
func (a *lane) exchange(ctx context.Context, h *held, by sending) error {
	by.copied = true
	if err := a.s.send(ctx, a.queue, []sending{by}); err != nil {
		return err
	}
	_ = a.ch.Ack(h.DeliveryTag, false) // or the channel is gone, and there are two of it
	return nil
}

// take ends a lease; nil: it is lost. Whoever takes it settles the message, and says so by settled, or puts it back.
func (a *lane) take(tag uint64) *held {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.holds(tag)
	if h != nil {
		h.lease.Stop()
		delete(a.held, tag)
	}
	return h
}

func (a *lane) settled(h *held) { a.s.received.add(-h.weight) }

// putBack goes on with a lease that was taken, for a moment: whoever has it tries again, or the message is given back.
func (a *lane) putBack(tag uint64, h *held) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ch.IsClosed() {
		a.settled(h)
		return
	}
	a.held[tag] = h
	h.until = time.Now().Add(putBackFor)
	h.lease.Reset(putBackFor)
}

const putBackFor = 5 * time.Second

// extend has a lease end so much later than now. False: it is lost.
func (a *lane) extend(tag uint64, lease time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.holds(tag)
	if h == nil {
		return false
	}
	h.until = time.Now().Add(lease)
	h.lease.Reset(lease)
	return true
}

// holds returns what there is a lease of; nil: it is lost. It is called with mu held.
func (a *lane) holds(tag uint64) *held {
	h := a.held[tag]
	if h == nil || a.ch.IsClosed() || !time.Now().Before(h.until) {
		return nil
	}
	return h
}

// find returns what a receipt is of; nil: it is lost.
func (s *Stream) find(r pgwake.LockToken) (*lane, uint64) {
	id, number, _ := strings.Cut(string(r), "/")
	n, err1 := strconv.ParseUint(id, 10, 64)
	tag, err2 := strconv.ParseUint(number, 10, 64)
	if err1 != nil || err2 != nil {
		return nil, 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lanes[n], tag
}
