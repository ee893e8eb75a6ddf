package providertest

import (
	"errors"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: who is given work that has a tag?

var tagFiltering = group{"tag_filtering", []row{
	{"default_only_fetches_untagged", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "gpu", "", "cpu")
		require.Equal(t, []string{"untagged"}, n.drain(t)) // by the zero value
		n.enqueueTagged(t, "")
		n.requireDrained(t, pgwake.DefaultOnly(), "untagged")
	}},
	{"tags_fetches_only_matching", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "", "cpu", "gpu", "gp", "gpu2")
		n.requireDrained(t, pgwake.Tags("gpu"), "gpu")
	}},
	{"default_and_fetches_untagged_and_matching", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "cpu", "gpu", "", "gpu")
		n.requireDrained(t, pgwake.DefaultAnd("gpu"), "gpu", "untagged", "gpu")
		n.requireDrained(t, pgwake.AnyTag(), "cpu")
	}},
	{"none_filter_returns_nothing", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "gpu", "")
		n.requireNoWorkWith(t, tagged(pgwake.NoTag()))
		n.requireNoWorkWith(t, &pgwake.FetchOptions{Tags: pgwake.NoTag(), PollTimeout: 50 * time.Millisecond})
		n.requireDrained(t, pgwake.AnyTag(), "gpu", "untagged")
	}},
	{"multi_tag_filter", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "tpu", "cpu", "", "gpu", "cpu")
		n.requireDrained(t, pgwake.Tags("gpu", "cpu"), "cpu", "gpu", "cpu")
		n.requireDrained(t, pgwake.AnyTag(), "tpu", "untagged")
	}},
	{"tag_round_trip_preservation", func(t *testing.T, n *node) {
		for _, tag := range []string{"gpu", "GPU", " v 1.0/größe,'x' "} {
			n.enqueueWith(t, pgwake.WorkItem{Name: "work", Tag: tag}, nil)
			item := n.takeWith(t, tagged(pgwake.AnyTag()))
			require.Equal(t, tag, item.Tag)
			require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
			item = n.takeWith(t, tagged(pgwake.Tags(tag)))
			require.Equal(t, tag, item.Tag)
			n.ack(t, item)
		}
		_, err := n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{
			{WorkItem: pgwake.WorkItem{Name: "a", Tag: "one"}},
			{WorkItem: pgwake.WorkItem{Name: "b"}},
			{WorkItem: pgwake.WorkItem{Name: "c", Tag: "two"}},
		})
		require.NoError(t, err)
		for _, tag := range []string{"one", "", "two"} {
			require.Equal(t, tag, n.takeWith(t, tagged(pgwake.AnyTag())).Tag)
		}
	}},
	{"any_filter_fetches_everything", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "gpu", "", "cpu")
		n.requireDrained(t, pgwake.AnyTag(), "gpu", "untagged", "cpu")
	}},
	{"tag_survives_abandon_and_refetch", func(t *testing.T, n *node) {
		n.enqueueTagged(t, "gpu")
		item := n.takeWith(t, tagged(pgwake.Tags("gpu")))
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
		n.requireNoWork(t)
		again := n.takeWith(t, tagged(pgwake.Tags("gpu")))
		require.Equal(t, item.ID, again.ID)
		require.Equal(t, "gpu", again.Tag)
		require.Equal(t, 2, again.Attempt)
		require.NotEqual(t, item.LockToken, again.LockToken)
	}},
	{"multi_runtime_tag_isolation", func(t *testing.T, n *node) {
		all := []string{"gpu", "cpu", "", "tpu"}
		n.enqueueTagged(t, all...) // disjoint
		n.requireDrained(t, pgwake.Tags("cpu"), "cpu")
		n.requireDrained(t, pgwake.Tags("gpu"), "gpu")
		n.requireDrained(t, pgwake.DefaultAnd("tpu"), "untagged", "tpu")

		n.enqueueTagged(t, all...) // overlapping: what both may have, the first one has
		n.requireDrained(t, pgwake.Tags("cpu", "tpu"), "cpu", "tpu")
		n.requireDrained(t, pgwake.Tags("cpu", "gpu"), "gpu")
		n.requireDrained(t, pgwake.DefaultOnly(), "untagged")

		n.enqueueTagged(t, all...) // a superset has what the subset leaves
		n.requireDrained(t, pgwake.Tags("gpu"), "gpu")
		n.requireDrained(t, pgwake.Tags("gpu", "cpu", "tpu"), "cpu", "tpu")
		n.requireDrained(t, pgwake.AnyTag(), "untagged")
		n.requireNoWorkWith(t, tagged(pgwake.AnyTag()))
	}},
	{"tag_preserved_through_ack_orchestration_item", func(t *testing.T, n *node) {
		scheduled := activities("i", 1, 2)
		scheduled[0].Tag = "gpu"
		n.startWith(t, "i", pgwake.OrchestrationAck{WorkItems: scheduled, Metadata: running})
		item := n.takeWith(t, tagged(pgwake.Tags("gpu")))
		require.Equal(t, scheduled[0].WorkItem, item.WorkItem)
		n.requireNoWorkWith(t, tagged(pgwake.Tags("gpu")))
		require.Equal(t, scheduled[1].WorkItem, n.take(t).WorkItem)
	}},
}}

func tagged(filter pgwake.TagFilter) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Tags: filter}
}

// enqueueTagged adds an item for each tag, with its name.
func (n *node) enqueueTagged(t *testing.T, tags ...string) {
	t.Helper()
	for _, tag := range tags {
		name := tag
		if tag == "" {
			name = "untagged"
		}
		n.enqueueWith(t, pgwake.WorkItem{Name: name, Tag: tag}, nil)
	}
}

// requireDrained takes and finishes every item that is due and selected, and asserts their names in order.
func (n *node) requireDrained(t *testing.T, filter pgwake.TagFilter, want ...string) {
	t.Helper()
	var got []string
	for {
		item, err := n.FetchWorkItem(t.Context(), tagged(filter))
		if errors.Is(err, pgwake.ErrNoWork) {
			break
		}
		require.NoError(t, err)
		n.ack(t, item)
		got = append(got, item.Name)
	}
	require.Equal(t, want, got)
}
