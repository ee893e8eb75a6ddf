package amqp

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
)

// This file answers: what is a message in terms of AMQP, and which errors are which?

// The headers that are this package's.
const (
	headerPrefix  = "pgwake-"
	headerAttempt = headerPrefix + "attempt" // attempts of the messages that this is a copy of
	headerError   = headerPrefix + "error"   // of the latest one that gave one
	headerReason  = headerPrefix + "reason"  // of a dead letter
	headerCause   = headerPrefix + "cause"
	headerLeftOut = headerPrefix + "left-out" // how many headers a copy has no room for
	headerNumber  = headerPrefix + "number"   // by which a message that is returned is known: RabbitMQ tells no delivery tag then
)

// deliveryCount is how often a quorum queue has delivered a message before.
const deliveryCount = "x-delivery-count"

// brokers reports whether a header is one that RabbitMQ adds, or takes for queues that are to have a copy of the message.
func brokers(header string) bool {
	if header == "CC" || header == "BCC" {
		return true
	}
	for _, prefix := range []string{deliveryCount, "x-acquired-count", "x-death", "x-first-death-", "x-last-death-", "x-opt-rabbitmq-"} {
		if strings.HasPrefix(header, prefix) {
			return true
		}
	}
	return false
}

// longestShortText is what AMQP has for the name of a header and for the property "type".
const longestShortText = 255

// The headers of a message are in one frame, of 128 KiB unless the broker is configured otherwise. One that is longer ends the connection, and with
// it all that others are publishing. The half is left for what Nack and DeadLetter add.
const (
	longestHeaders = 64 << 10
	headerOverhead = 6 // bytes beside the name and the text
)

func checkMessage(m *dispatch.StreamMessage) error {
	bad := len(m.Name) > longestShortText || !utf8.ValidString(m.Name) || m.Delay < 0 || m.Delay > longestDelay
	all := 0
	for name, value := range m.Headers {
		if strings.HasPrefix(name, headerPrefix) || brokers(name) {
			return fmt.Errorf("%w: message %.60q has a header %.60q, which is not for it to set", pgwake.ErrInvalid, m.Name, name)
		}
		bad = bad || name == "" || len(name) > longestShortText || !utf8.ValidString(name) || !utf8.ValidString(value)
		all += len(name) + len(value) + headerOverhead
	}
	if bad || all > longestHeaders {
		return fmt.Errorf("%w: message %.60q has a name or a header that is too long or no UTF-8, headers of %d bytes, or a delay of %v", pgwake.ErrInvalid, m.Name, all, m.Delay)
	}
	return nil
}

// publishing makes a message.
func publishing(m *dispatch.StreamMessage) amqp091.Publishing {
	headers := make(amqp091.Table, len(m.Headers))
	for name, value := range m.Headers {
		headers[name] = value
	}
	return amqp091.Publishing{
		Type: m.Name, Headers: headers, Body: m.Payload, DeliveryMode: amqp091.Persistent, Timestamp: time.Now(),
		MessageId: strconv.FormatInt(rand.N(int64(math.MaxInt64)), 10),
	}
}

// copy makes a message like one that was delivered, with what is known of its attempts. It is no dead letter, unless more says so.
func (h *held) copy(attempts int, cause string, more amqp091.Table) amqp091.Publishing {
	headers := make(amqp091.Table, len(h.Headers)+2)
	for name, value := range h.Headers {
		if !brokers(name) && name != headerReason && name != headerCause {
			headers[name] = value
		}
	}
	headers[headerAttempt] = int64(attempts)
	if cause != "" {
		headers[headerError] = cause
	}
	for name, value := range more {
		headers[name] = value
	}
	return amqp091.Publishing{
		Type: h.Type, Headers: headers, Body: h.Body, DeliveryMode: amqp091.Persistent, Timestamp: h.Timestamp, MessageId: h.MessageId,
		ContentType: h.ContentType, ContentEncoding: h.ContentEncoding, CorrelationId: h.CorrelationId, ReplyTo: h.ReplyTo, AppId: h.AppId,
		Priority: h.Priority,
	}
}

const (
	leastText = 256     // what remains of an error, cause or reason before a header of the message is left out
	brokersOf = 4 << 10 // room for what RabbitMQ adds, such as x-death after a delay: amqp091 ends its connection for a frame that is larger than was agreed
)

// fit has a copy fit into a frame, or RabbitMQ would end the connection, and with it what everybody else is publishing, as often as it were sent again.
// Others may send as much as a frame holds, and a copy has more. First the texts of this package are cut. Then headers of the message are left out, the
// smallest one that makes room, or else the largest ones; how many is in headerLeftOut. Nothing else of the message changes. A frame of 0 is one of any size.
func fit(m *amqp091.Publishing, frame int) {
	over := frameOf(m) + brokersOf - frame
	if frame == 0 || over <= 0 {
		return
	}
	for _, name := range []string{headerError, headerCause, headerReason} {
		text, _ := m.Headers[name].(string)
		if over > 0 && len(text) > leastText {
			short := strings.ToValidUTF8(text[:max(len(text)-over, leastText)], "")
			m.Headers[name] = short
			over -= len(text) - len(short)
		}
	}
	left, counted := number(m.Headers[headerLeftOut]) // of what this is a copy of
	if left = upTo(left); !counted {
		delete(m.Headers, headerLeftOut)
		over = frameOf(m) + brokersOf - frame
	}
	size := func(name string) int { return fieldOf(name, m.Headers[name]) }
	var theirs []string
	for name, value := range m.Headers {
		_, text := value.(string)
		if own := name == headerAttempt || name == headerNumber || name == headerLeftOut || text && (name == headerError || name == headerCause || name == headerReason); !own {
			theirs = append(theirs, name)
		}
	}
	slices.SortFunc(theirs, func(x, y string) int { return cmp.Compare(size(x), size(y)) })
	for over > 0 && len(theirs) > 0 {
		least := over
		if !counted {
			least += fieldOf(headerLeftOut, left)
		}
		i := min(sort.Search(len(theirs), func(i int) bool { return size(theirs[i]) >= least }), len(theirs)-1)
		delete(m.Headers, theirs[i])
		theirs = slices.Delete(theirs, i, i+1)
		left, counted = left+1, true
		m.Headers[headerLeftOut] = left
		over = frameOf(m) + brokersOf - frame
	}
}

// frameOf is how many bytes the frame with the properties of a message has, at most.
func frameOf(m *amqp091.Publishing) int {
	const (
		frame  = 8                 // beside what is in it
		header = 2 + 2 + 8 + 2     // class, weight, size of the body, flags
		fixed  = 1 + 1 + 8 + 8 + 4 // delivery mode, priority, timestamp, and those that are empty
	)
	all := frame + header + fixed
	for _, text := range []string{m.ContentType, m.ContentEncoding, m.CorrelationId, m.ReplyTo, m.Expiration, m.MessageId, m.Type, m.UserId, m.AppId} {
		all += 1 + len(text)
	}
	return all + valueOf(m.Headers)
}

func fieldOf(name string, value any) int { return 1 + len(name) + valueOf(value) }

// valueOf is how many bytes a value has in a frame, at most, its type included.
func valueOf(v any) int {
	all := 1 + 4
	switch v := v.(type) {
	case amqp091.Table:
		for name, value := range v {
			all += fieldOf(name, value)
		}
	case []any:
		for _, value := range v {
			all += valueOf(value)
		}
	case string:
		all += len(v)
	case []byte:
		all += len(v)
	default:
		return 1 + 8
	}
	return all
}

// wasDead reports whether a message was a dead letter: somebody has sent it again, with the headers that it had there.
func wasDead(d *amqp091.Delivery) bool { return d.Headers[headerReason] != nil }

// attemptOf is the number of a delivery, from 1. What was a dead letter begins anew, or it would be one again at once.
func attemptOf(d *amqp091.Delivery) int {
	var before int64
	if !wasDead(d) {
		before, _ = number(d.Headers[headerAttempt])
	}
	redelivered, known := number(d.Headers[deliveryCount])
	if !known && d.Redelivered {
		redelivered = 1
	}
	return int(min(upTo(before)+upTo(redelivered), math.MaxInt32-1)) + 1
}

// upTo is a count that anybody may have set, within what can be counted on from.
func upTo(n int64) int64 { return min(max(n, 0), math.MaxInt32) }

// number reads a header, which may be of any size.
func number(v any) (int64, bool) {
	switch n := v.(type) {
	case int64:
		return n, true
	case int32:
		return int64(n), true
	case int16:
		return int64(n), true
	case int8:
		return int64(n), true
	case byte:
		return int64(n), true
	case int:
		return int64(n), true
	}
	return 0, false
}

// delivery is a message as an EventStream has it, but for the lease.
func delivery(h *held) dispatch.StreamDelivery {
	m := dispatch.StreamDelivery{ID: idOf(&h.Delivery), Attempt: h.attempt, EnqueuedAt: h.Timestamp}
	m.Name, m.Payload = h.Type, h.Body
	if m.Name == "" {
		m.Name = h.RoutingKey
	}
	if m.EnqueuedAt.IsZero() {
		m.EnqueuedAt = time.Now()
	}
	if !wasDead(&h.Delivery) {
		m.LastError, _ = h.Headers[headerError].(string)
	}
	for name, value := range h.Headers {
		if brokers(name) || strings.HasPrefix(name, headerPrefix) {
			continue
		}
		if m.Headers == nil {
			m.Headers = make(map[string]string, len(h.Headers))
		}
		m.Headers[name] = fmt.Sprint(value)
	}
	return m
}

// idOf is a number for logs: that of the message's id, or one that is made of it.
func idOf(d *amqp091.Delivery) int64 {
	if id, err := strconv.ParseInt(d.MessageId, 10, 64); err == nil {
		return id
	}
	if d.MessageId == "" {
		return int64(d.DeliveryTag)
	}
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(d.MessageId))
	return int64(hash.Sum64() >> 1)
}

// failed wraps an error as one of those that an EventStream has.
func failed(op string, err error) error {
	var answer *amqp091.Error
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &answer):
	case answer.Code == amqp091.AccessRefused, answer.Code == amqp091.NotAllowed:
		err = fmt.Errorf("%w: %w", pgwake.ErrPermission, err)
	case answer.Code == amqp091.PreconditionFailed:
		err = fmt.Errorf("%w: %w", pgwake.ErrConfig, err)
	}
	return fmt.Errorf("amqp: %s: %w", op, err)
}
