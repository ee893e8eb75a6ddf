package pgwake

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"go.opentelemetry.io/otel/propagation"
)

// This file answers: what travels with an item beside its payload?

// MaxHeaderBytes bounds the headers of an item: their names and values together. It leaves room for the context of a trace
// and a few labels; what is larger is payload.
const MaxHeaderBytes = 8 << 10

// CheckHeaders fails with ErrInvalid unless an item may have these headers: see WorkItem.Headers.
func CheckHeaders(headers map[string]string) error {
	for name, value := range headers {
		if err := checkText("header name", name, true); err != nil {
			return err
		}
		if err := checkUTF8("header "+quote(name), value); err != nil {
			return err
		}
	}
	if size := headerBytes(headers); size > MaxHeaderBytes {
		return fmt.Errorf("%w: headers are %d bytes, more than %d", ErrPayloadTooLarge, size, MaxHeaderBytes)
	}
	return nil
}

func headerBytes(headers map[string]string) (size int) {
	for name, value := range headers {
		size += len(name) + len(value)
	}
	return size
}

// withTrace returns the headers and, with them, what the context has to propagate: all of it, or nothing if the caller has set
// a part, which may be of another trace. What is too much, or what PostgreSQL cannot hold, is left out: it is no reason to
// refuse an item.
func (p *Provider) withTrace(ctx context.Context, headers map[string]string) map[string]string {
	for _, field := range p.cfg.Propagator.Fields() {
		if _, own := headers[field]; own {
			return headers
		}
	}
	added := propagation.MapCarrier{}
	p.cfg.Propagator.Inject(ctx, added)
	if len(added) == 0 {
		return headers
	}
	maps.Copy(added, headers)
	if CheckHeaders(added) != nil {
		return headers
	}
	return added
}

// headersArg returns checked headers as an argument: NULL if there are none.
func headersArg(headers map[string]string) *string {
	if len(headers) == 0 {
		return nil
	}
	text, _ := json.Marshal(headers) // strings
	return new(string(text))
}

// headersOf reads headers; nil for NULL. What is no string, as SQL may insert it, comes as its JSON.
func headersOf(object []byte) map[string]string {
	if object == nil {
		return nil
	}
	headers := map[string]string{}
	if json.Unmarshal(object, &headers) == nil {
		return headers
	}
	clear(headers)
	raw := map[string]json.RawMessage{}
	_ = json.Unmarshal(object, &raw) // it is an object, by a constraint
	for name, value := range raw {
		var text string
		if json.Unmarshal(value, &text) != nil {
			text = string(value)
		}
		headers[name] = text
	}
	return headers
}
