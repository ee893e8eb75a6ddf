package pgwake_test

import (
	"context"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how does an item come to its trace, and what of SQL do headers bear? How they travel is in
// providertest.

// inTrace returns a context with a span, and what the headers say of it.
func inTrace(ctx context.Context) (context.Context, string) {
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	return trace.ContextWithSpanContext(ctx, span), "00-01000000000000000000000000000000-0200000000000000-01"
}

func TestHeaders_ContextWithASpan_EverythingEnqueuedCarriesIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Propagator: propagation.TraceContext{}})
	ctx, parent := inTrace(t.Context())
	traced := map[string]string{"traceparent": parent}
	own := map[string]string{"a": "b"}

	_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Headers: own}, nil)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a": "b"}, own, "the caller's map is his")
	item := n.take(t)
	require.Equal(t, map[string]string{"a": "b", "traceparent": parent}, item.Headers)
	_, err = n.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}, {WorkItem: pgwake.WorkItem{Name: "w"}}})
	require.NoError(t, err)
	for range 2 {
		require.Equal(t, traced, n.take(t).Headers)
	}
	require.NoError(t, n.AckBatched(ctx, item.LockToken, &pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}))
	_, err = n.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: "k"}, nil)
	require.NoError(t, err)
	turn, err := n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	for _, m := range turn.Messages {
		require.Equal(t, traced, m.Headers, m.Kind)
	}
	require.NoError(t, n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Name: "flow"}, WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}}}))
	require.Equal(t, traced, n.take(t).Headers)
}

func TestHeaders_CallerSaysWhichTrace_Prevails(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Propagator: propagation.TraceContext{}})
	ctx, _ := inTrace(t.Context())
	for _, own := range []map[string]string{{"traceparent": "mine"}, {"tracestate": "mine"}} { // nothing is mixed
		_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Headers: own}, nil)
		require.NoError(t, err)
		require.Equal(t, own, n.take(t).Headers)
	}
}

// flooding is a propagator with more to say than there is room for.
type flooding struct{ propagation.TraceContext }

func (flooding) Inject(_ context.Context, to propagation.TextMapCarrier) {
	to.Set("baggage", strings.Repeat("x", pgwake.MaxHeaderBytes))
}

func TestHeaders_TooMuchToPropagate_ItemGoesWithoutIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Propagator: flooding{}})
	own := map[string]string{"a": "b"}
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Headers: own}, nil)
	require.NoError(t, err)
	require.Equal(t, own, n.take(t).Headers)
}

func TestHeaders_MoreThanTheLimit_TooLarge(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	headers := map[string]string{"a": strings.Repeat("x", pgwake.MaxHeaderBytes-1)}
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Headers: headers}, nil)
	require.NoError(t, err)
	require.Equal(t, headers, n.take(t).Headers)
	headers["b"] = ""
	_, err = n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Headers: headers}, nil)
	require.Empty(t, requireError(t, err, pgwake.ErrPayloadTooLarge).SQLState, "it was sent")
}

// SQL may insert what the functions refuse. That is no reason for a fetch to fail.
func TestHeaders_NoStrings_ComeAsJSON(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO worker_queue (name, headers) VALUES ('w', '{"a": "b", "c": [1, null], "d": null}')`)
	require.Equal(t, map[string]string{"a": "b", "c": "[1, null]", "d": ""}, n.take(t).Headers)
}
