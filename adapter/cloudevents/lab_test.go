package cloudevents_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/cloudevents/sdk-go/v2/types"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: what do the tests have in common?

func TestMain(m *testing.M) { testschema.Main(m) }

// patience is far more than anything here should take.
const patience = 30 * time.Second

// schemas are those of all tests.
var schemas = testschema.With(migrations.Layer())

// lab is a bus on a schema of its own, with a node that passes on what is emitted.
type lab struct {
	*eventbus.Bus
	events chan *eventbus.Event
}

func newLab(t *testing.T) *lab {
	t.Helper()
	bus, err := eventbus.New(t.Context(), schemas.New(t, nil), &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	l := &lab{bus, make(chan *eventbus.Event, 100)}
	node, err := bus.Node(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, node.On(t.Context(), "#", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		l.events <- e
		return nil
	}))
	require.NoError(t, node.Start(t.Context()))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, node.Stop(ctx))
	})
	return l
}

// emit emits, and returns the event as a handler gets it.
func (l *lab) emit(t require.TestingT, emission eventbus.Emission) *eventbus.Event {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	emitted, err := l.EmitMany(ctx, []eventbus.Emission{emission})
	require.NoError(t, err)
	require.False(t, emitted[0].Duplicate)
	select {
	case e := <-l.events:
		require.Equal(t, emitted[0].ID, e.ID)
		return e
	case <-ctx.Done():
		require.Fail(t, "the event did not come")
		return nil
	}
}

// asJSON is a CloudEvent in the JSON format, and one that was read from that.
func asJSON(t require.TestingT, ce event.Event) (string, event.Event) {
	data, err := json.Marshal(ce)
	require.NoError(t, err)
	var read event.Event
	require.NoError(t, json.Unmarshal(data, &read), "%s", data)
	return string(data), read
}

// The generators are of what can be said on both sides.

// text is a string of CloudEvents.
func text(least, most int) *rapid.Generator[string] {
	return rapid.StringOfN(rapid.OneOf(rapid.RuneFrom([]rune(`ab7 "'\/<&%=?#:|*.{}[]`)), rapid.RuneFrom([]rune("éß語😀\u00a0\u200b\ufffd\u2028"))), least, most, -1)
}

// visible is a text that is not only spaces.
func visible(most int) *rapid.Generator[string] {
	return text(1, most).Filter(func(s string) bool { return strings.TrimSpace(s) != "" })
}

var (
	eventType = rapid.StringMatching(`[A-Za-z0-9_/:-]{1,8}(\.[A-Za-z0-9_é-]{1,8}){0,3}`)
	// extensionName is none of those that have a meaning.
	extensionName = rapid.OneOf(rapid.StringMatching(`x[a-z0-9]{0,12}`), rapid.SampledFrom([]string{"traceparent", "tracestate", "scheduledtaskid", "0"}))
	instant       = rapid.Custom(func(t *rapid.T) time.Time {
		return time.Unix(rapid.Int64Range(-62_000_000_000, 253_402_300_799).Draw(t, "second"), rapid.Int64Range(0, 999_999_999).Draw(t, "nanosecond"))
	})
	uri = rapid.Custom(func(t *rapid.T) url.URL {
		return url.URL{Scheme: "https", Host: "shop.example", Path: "/" + text(0, 10).Draw(t, "path"), Fragment: text(0, 5).Draw(t, "fragment")}
	})
)

// value is what JSON can be, and jsonb can hold.
func value(depth int) *rapid.Generator[any] {
	scalar := rapid.OneOf(rapid.Just[any](nil), rapid.Bool().AsAny(), rapid.IntRange(-1e6, 1e6).AsAny(), rapid.SampledFrom([]float64{0.5, -1e-7, 1e20}).AsAny(),
		text(0, 10).AsAny(), rapid.SampledFrom([]string{"\t\n", "\x01"}).AsAny())
	if depth == 0 {
		return scalar
	}
	return rapid.OneOf(scalar, rapid.SliceOfN(value(depth-1), 0, 3).AsAny(), rapid.MapOfN(text(0, 5), value(depth-1), 0, 3).AsAny())
}

var payload = rapid.Custom(func(t *rapid.T) json.RawMessage {
	data, _ := json.Marshal(value(3).Draw(t, "value"))
	return data
})

// anyCloudEvent is one with any attributes, extensions and data.
var anyCloudEvent = rapid.Custom(func(t *rapid.T) event.Event {
	c := &event.EventContextV1{Type: eventType.Draw(t, "type"), ID: visible(300).Draw(t, "id")}
	c.Source = types.URIRef{URL: rapid.OneOf(uri, rapid.Custom(func(t *rapid.T) url.URL { return url.URL{Path: "/p" + text(0, 10).Draw(t, "path")} }),
		rapid.SampledFrom([]url.URL{{Opaque: "a:b", Scheme: "urn"}, {Opaque: "someone@shop.example", Scheme: "mailto"}, {Path: "1-555-123-4567"}})).Draw(t, "source")}
	if rapid.Bool().Draw(t, "has subject") {
		c.Subject = new(visible(50).Draw(t, "subject"))
	}
	if rapid.Bool().Draw(t, "has time") {
		c.Time = &types.Timestamp{Time: instant.Draw(t, "time")}
	}
	if rapid.Bool().Draw(t, "has schema") {
		c.DataSchema = &types.URI{URL: uri.Draw(t, "schema")}
	}
	ce := event.Event{Context: c}
	for name, v := range rapid.MapOfN(extensionName, rapid.OneOf(text(0, 20).AsAny(), rapid.Bool().AsAny(), rapid.Int32().AsAny(),
		rapid.SliceOfN(rapid.Byte(), 0, 8).AsAny()), 0, 4).Draw(t, "extensions") {
		ce.SetExtension(name, v)
	}
	const anyBytes = 12
	switch rapid.SampledFrom([]string{"none", "JSON", "JSON of a vendor", "JSON by default", "text", "bytes", "bytes that are no text", "bytes for JSON"}).Draw(t, "data") {
	case "none":
	case "JSON":
		c.DataContentType = new(rapid.SampledFrom([]string{"application/json", "text/json; charset=utf-8"}).Draw(t, "content type"))
		ce.DataEncoded = payload.Draw(t, "payload")
	case "JSON of a vendor":
		c.DataContentType = new("application/vnd.shop+json")
		ce.DataEncoded = payload.Draw(t, "payload")
	case "JSON by default":
		ce.DataEncoded = payload.Draw(t, "payload")
	case "text":
		c.DataContentType = new("text/plain")
		ce.DataEncoded = []byte(text(0, 20).Draw(t, "text"))
	case "bytes":
		c.DataContentType = new("application/octet-stream")
		ce.DataEncoded, ce.DataBase64 = rapid.SliceOfN(rapid.Byte(), 0, anyBytes).Draw(t, "bytes"), true
	case "bytes that are no text": // as they come by HTTP, where nothing says so
		c.DataContentType = new("image/png")
		ce.DataEncoded, ce.DataBase64 = append([]byte{0xFF, 0}, rapid.SliceOfN(rapid.Byte(), 0, anyBytes).Draw(t, "bytes")...), true
	case "bytes for JSON":
		c.DataContentType = new("application/json")
		ce.DataEncoded, ce.DataBase64 = append([]byte{'{', 0}, rapid.SliceOfN(rapid.Byte(), 0, anyBytes).Draw(t, "bytes")...), true
	}
	return ce
})

// anyEvent is one that did not come as a CloudEvent.
var anyEvent = rapid.Custom(func(t *rapid.T) *eventbus.Event {
	e := &eventbus.Event{
		ID: rapid.Int64Range(1, 1<<62).Draw(t, "id"), Namespace: "shop", Type: eventType.Draw(t, "type"), Payload: payload.Draw(t, "payload"),
		EmittedAt: instant.Draw(t, "emitted at").Truncate(time.Microsecond), Producer: text(0, 10).Draw(t, "producer"), Metadata: json.RawMessage(`{}`),
		Headers: rapid.MapOfN(extensionName.Filter(func(s string) bool { return s != "scheduledtaskid" }), text(0, 20), 0, 4).Draw(t, "headers"),
	}
	if rapid.Bool().Draw(t, "has key") {
		e.Key = visible(50).Draw(t, "key")
	}
	if rapid.Bool().Draw(t, "is scheduled") {
		e.ScheduledTaskID = fmt.Sprintf("%08x-0000-4000-8000-000000000000", rapid.Uint32().Draw(t, "task"))
	}
	if rapid.Bool().Draw(t, "has metadata") {
		e.Metadata, _ = json.Marshal(rapid.MapOfN(text(0, 5), value(2), 0, 3).Draw(t, "metadata"))
	}
	return e
})
