package watermill

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what is a message as an event, and an event as a message?

// The headers that are this package's.
const (
	// HeaderUUID is the UUID of the message.
	HeaderUUID = "watermill-uuid"
	// HeaderPayload says what the payload of the event is: PayloadText or PayloadBase64. Without it, it is the message's as it is.
	HeaderPayload = "watermill-payload"

	PayloadText   = "text"   // a string, which is the message's payload
	PayloadBase64 = "base64" // a string, which is that in base64: it is not UTF-8, or has a NUL
)

// emission makes an event of a message. Any payload comes back as the same bytes, unless it is to be JSON.
func emission(eventType string, m *message.Message, asJSON bool) (e eventbus.Emission, err error) {
	if !isText(m.UUID) {
		return e, fmt.Errorf("%w: UUID %.100q is not UTF-8 without NUL", pgwake.ErrInvalid, m.UUID)
	}
	e.Type = eventType
	e.Headers = map[string]string{HeaderUUID: m.UUID}
	if asJSON {
		e.Payload = json.RawMessage(m.Payload)
		if len(m.Payload) == 0 { // which package eventbus takes for null
			return e, fmt.Errorf("%w: message %.100q has no payload, which is to be JSON", pgwake.ErrInvalid, m.UUID)
		}
	} else if text := string(m.Payload); isText(text) {
		e.Headers[HeaderPayload], e.Payload = PayloadText, text
	} else {
		e.Headers[HeaderPayload], e.Payload = PayloadBase64, m.Payload // encoding/json writes bytes so
	}
	if len(m.Metadata) == 0 {
		return e, nil
	}
	for name, value := range m.Metadata { // encoding/json would write something else
		if !isText(name) || !isText(value) {
			return e, fmt.Errorf("%w: metadata %.100q of message %.100q is not UTF-8 without NUL", pgwake.ErrInvalid, name, m.UUID)
		}
	}
	e.Metadata = m.Metadata
	return e, nil
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// newMessage makes a message of an event, whoever emitted it.
func newMessage(e *eventbus.Event) (*message.Message, error) {
	uuid, given := e.Headers[HeaderUUID]
	if !given {
		uuid = strconv.FormatInt(e.ID, 10)
	}
	m := message.NewMessage(uuid, message.Payload(e.Payload))
	if kind := e.Headers[HeaderPayload]; kind == PayloadText || kind == PayloadBase64 {
		var text string
		err := jsonvalue.Unmarshal(e.Payload, &text)
		m.Payload = message.Payload(text)
		if err == nil && kind == PayloadBase64 {
			m.Payload, err = base64.StdEncoding.DecodeString(text)
		}
		if err != nil {
			return nil, fmt.Errorf("event %d has no %s as its payload: %w", e.ID, kind, err)
		}
	}
	var metadata map[string]json.RawMessage
	if err := jsonvalue.Unmarshal(e.Metadata, &metadata); err != nil {
		return nil, fmt.Errorf("metadata of event %d: %w", e.ID, err)
	}
	for name, value := range metadata {
		var text string
		if json.Unmarshal(value, &text) != nil { // of an event that did not come from here
			text = string(value)
		}
		m.Metadata.Set(name, text)
	}
	return m, nil
}
