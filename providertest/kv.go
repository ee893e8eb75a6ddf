package providertest

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: which key-value pairs does an instance have, for clients and for its next turn?

var kvStore = group{"kv_store", slices.Concat(kvOperations, kvExecutions, kvDeltas)}

// kvOperations are the rows about a single execution.
var kvOperations = []row{
	{"kv_set_and_get", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "value"))
		n.requireKV(t, "i", pairs{"key": "value"})
	}},
	{"kv_overwrite", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "1"), set("a", "2"))
		n.requireKV(t, "i", pairs{"a": "2", "b": "1"})
		n.write(t, "i", 1, set("b", "2"))
		n.requireKV(t, "i", pairs{"a": "2", "b": "2"})
	}},
	{"kv_clear_single", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "2"))
		n.write(t, "i", 1, clearKey("a"))
		n.requireNoKV(t, "i", "a")
		n.requireKV(t, "i", pairs{"b": "2"})
	}},
	{"kv_clear_all", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "2"))
		n.write(t, "i", 1, clearAll)
		n.requireNoKV(t, "i", "a", "b")
		n.requireKV(t, "i", nil)
	}},
	{"kv_get_nonexistent", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "value"))
		n.requireNoKV(t, "i", "other", "KEY", "ke", "key ")
	}},
	{"kv_clear_nonexistent_key", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, clearKey("never set"))
		n.write(t, "i", 1, set("key", "value"), clearKey("never set"))
		n.requireNoKV(t, "i", "never set")
		n.requireKV(t, "i", pairs{"key": "value"})
	}},
	{"kv_get_unknown_instance", func(t *testing.T, n *node) {
		n.requireNoKV(t, "unknown", "key")
		n.requireKV(t, "unknown", nil)
	}},
	{"kv_set_after_clear", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("old", "1"), set("both", "1"))
		n.write(t, "i", 1, set("before", "1"), clearAll, set("new", "2"), set("both", "2"))
		n.requireNoKV(t, "i", "old", "before")
		n.requireKV(t, "i", pairs{"new": "2", "both": "2"})
	}},
	{"kv_empty_value", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", ""))
		n.requireKV(t, "i", pairs{"key": ""})
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireKV(t, "i", pairs{"key": ""})
		n.requireSnapshot(t, "i", pairs{"key": ""})
	}},
	{"kv_large_value", func(t *testing.T, n *node) {
		large := strings.Repeat("0123456789abcdef", 64<<10/16)
		n.start(t, "i")
		n.write(t, "i", 1, set("key", large))
		n.requireKV(t, "i", pairs{"key": large})
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"key": large})
	}},
	{"kv_special_chars_in_key", func(t *testing.T, n *node) {
		want := make(pairs)
		for _, key := range []string{
			"with spaces ", "größe 大小 🔑", "a.b.c", "a/b\\c", `"quoted'`, "%_*?", "tab\tand\nline", "{}[],:", "-1", "NULL",
		} {
			want[key] = "value of " + key
		}
		n.start(t, "i")
		for _, key := range slices.Sorted(maps.Keys(want)) {
			n.write(t, "i", 1, set(key, want[key]))
		}
		n.requireKV(t, "i", want)
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", want)
		n.write(t, "i", 1, clearKey("a.b.c"))
		delete(want, "a.b.c")
		n.requireKV(t, "i", want)
	}},
	{"kv_instance_isolation", func(t *testing.T, n *node) {
		n.start(t, "a", "b")
		n.write(t, "a", 1, set("key", "of a"))
		n.requireNoKV(t, "b", "key")
		n.write(t, "b", 1, set("key", "of b"))
		n.requireKV(t, "a", pairs{"key": "of a"})
		n.requireKV(t, "b", pairs{"key": "of b"})
		n.end(t, "a", 1, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "a", pairs{"key": "of a"})
		n.requireSnapshot(t, "b", nil)
	}},
	{"kv_clear_isolation", func(t *testing.T, n *node) {
		for _, remove := range []pgwake.KVUpdate{clearKey("key"), clearAll} {
			n.start(t, "a", "b")
			n.write(t, "a", 1, set("key", "of a"))
			n.write(t, "b", 1, set("key", "of b"))
			n.continueAsNew(t, "a", 2)
			n.continueAsNew(t, "b", 2)
			n.write(t, "a", 2, set("key", "of a"))
			n.write(t, "b", 2, set("other", "of b"))
			n.write(t, "a", 2, remove)
			n.requireKV(t, "a", nil)
			n.requireKV(t, "b", pairs{"key": "of b", "other": "of b"})
			n.continueAsNew(t, "a", 3)
			n.requireKV(t, "b", pairs{"key": "of b", "other": "of b"})
			n.requireSnapshot(t, "b", pairs{"key": "of b"})
			_, err := n.DeleteInstances(t.Context(), []string{"a", "b"}, force)
			require.NoError(t, err)
		}
	}},
	{"kv_delete_instance_cascades", func(t *testing.T, n *node) {
		n.start(t, "i", "other")
		n.write(t, "i", 1, set("key", "value"))
		n.write(t, "other", 1, set("key", "value"))
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireDelete(t, "i", nil, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1})
		n.requireNoKV(t, "i", "key")
		n.requireKV(t, "other", pairs{"key": "value"})
		n.start(t, "i")
		n.requireNoKV(t, "i", "key")
		n.requireSnapshot(t, "i", nil)
	}},
	{"kv_delete_instance_with_children", func(t *testing.T, n *node) {
		n.completed(t, "root", "other")
		n.completedChild(t, "root", "child")
		n.completedChild(t, "child", "grandchild")
		for _, instance := range []string{"other", "child", "grandchild"} {
			n.turn(t, instance, pgwake.OrchestrationAck{
				KV:       []pgwake.KVUpdate{set("stored", "1")},
				Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted},
			})
			n.write(t, instance, 1, set("written", "2"))
			n.requireSnapshot(t, instance, pairs{"stored": "1"})
			n.requireKV(t, instance, pairs{"stored": "1", "written": "2"})
		}
		n.requireDelete(t, "root", nil, pgwake.Deleted{Instances: 3, Executions: 3, Events: 3})
		for _, instance := range []string{"child", "grandchild"} {
			n.requireNoKV(t, instance, "stored", "written")
			n.start(t, instance)
			n.requireKV(t, instance, nil)
			n.requireSnapshot(t, instance, nil)
		}
		n.requireKV(t, "other", pairs{"stored": "1", "written": "2"})
	}},
}

// kvExecutions are the rows about what an execution leaves to the ones after it.
var kvExecutions = []row{
	{"kv_snapshot_in_fetch", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "2"))
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"a": "1", "b": "2"})
	}},
	{"kv_snapshot_after_clear_single", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "2"), set("c", "3"))
		n.write(t, "i", 1, clearKey("a"))
		n.continueAsNew(t, "i", 2)
		n.requireSnapshot(t, "i", pairs{"b": "2", "c": "3"})
		n.write(t, "i", 2, clearKey("b"))
		n.end(t, "i", 2, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"c": "3"})
	}},
	{"kv_snapshot_after_clear_all", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("b", "2"))
		n.write(t, "i", 2, clearAll)
		n.end(t, "i", 2, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", nil)
	}},
	{"kv_snapshot_empty", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		require.Empty(t, turn.KV)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
		n.requireSnapshot(t, "i", nil)
	}},
	{"kv_snapshot_cross_execution", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("before", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("now", "2"))
		n.requireSnapshot(t, "i", pairs{"before": "1"})
	}},
	{"kv_cross_execution_overwrite", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.continueAsNew(t, "i", 2)
		n.requireKV(t, "i", pairs{"key": "1"})
		n.write(t, "i", 2, set("key", "2"))
		n.requireKV(t, "i", pairs{"key": "2"})
		n.end(t, "i", 2, pgwake.StatusCompleted, "done")
		n.requireKV(t, "i", pairs{"key": "2"})
	}},
	{"kv_cross_execution_remove_readd", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, clearKey("key"))
		n.requireNoKV(t, "i", "key")
		n.continueAsNew(t, "i", 3)
		n.requireNoKV(t, "i", "key")
		n.write(t, "i", 3, set("key", "3"))
		n.requireKV(t, "i", pairs{"key": "3"})
		n.end(t, "i", 3, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"key": "3"})
	}},
	{"kv_execution_id_tracking", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"), set("old", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("key", "2"))
		n.continueAsNew(t, "i", 3)
		n.requirePrune(t, "i", &pgwake.PruneOptions{KeepLast: 2}, 1)
		n.requireKV(t, "i", pairs{"key": "2", "old": "1"})
		n.requireSnapshot(t, "i", pairs{"key": "2", "old": "1"})
	}},
	{"kv_prune_preserves_overwritten", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("key", "2"))
		n.requirePrune(t, "i", nil, 1)
		n.requireKV(t, "i", pairs{"key": "2"})
		n.end(t, "i", 2, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"key": "2"})
	}},
	{"kv_prune_preserves_all_keys", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("c", "2"))
		n.requirePrune(t, "i", nil, 1)
		n.requireKV(t, "i", pairs{"a": "1", "b": "1", "c": "2"})
		n.requireSnapshot(t, "i", pairs{"a": "1", "b": "1"})
	}},
	{"kv_prune_current_execution_protected", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.requirePrune(t, "i", nil, 0)
		n.requireKV(t, "i", pairs{"key": "1"})
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requirePrune(t, "i", nil, 0)
		n.requireKV(t, "i", pairs{"key": "1"})
		n.requireSnapshot(t, "i", pairs{"key": "1"})
	}},
}

// kvDeltas are the rows about the writes of an execution that has not ended.
var kvDeltas = []row{
	{"kv_delta_snapshot_excludes_current_execution", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.requireKV(t, "i", pairs{"key": "1"})
		n.requireSnapshot(t, "i", nil)
		n.requireKV(t, "i", pairs{"key": "1"})
	}},
	{"kv_delta_snapshot_includes_completed_execution", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"))
		n.requireSnapshot(t, "i", nil)
		n.continueAsNew(t, "i", 2)
		n.requireSnapshot(t, "i", pairs{"key": "1"})
	}},
	{"kv_delta_client_reads_merged", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("stored", "1"), set("overwritten", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("overwritten", "2"), set("new", "2"))
		n.requireKV(t, "i", pairs{"stored": "1", "overwritten": "2", "new": "2"})
		n.requireNoKV(t, "i", "neither")
		n.requireSnapshot(t, "i", pairs{"stored": "1", "overwritten": "1"})
	}},
	{"kv_delta_tombstone_overrides_store", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("key", "1"), set("other", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, clearKey("key"))
		n.requireNoKV(t, "i", "key")
		n.requireKV(t, "i", pairs{"other": "1"})
		n.requireSnapshot(t, "i", pairs{"key": "1", "other": "1"})
	}},
	{"kv_delta_clear_all_tombstones_store", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("c", "2"))
		n.write(t, "i", 2, clearAll)
		n.requireNoKV(t, "i", "a", "b", "c")
		n.requireKV(t, "i", nil)
		n.write(t, "i", 2, set("a", "2"))
		n.requireKV(t, "i", pairs{"a": "2"})
		n.requireSnapshot(t, "i", pairs{"a": "1", "b": "1"})
		n.continueAsNew(t, "i", 3)
		n.requireSnapshot(t, "i", pairs{"a": "2"})
	}},
	{"kv_delta_merged_on_completion", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "1"))
		n.turn(t, "i", pgwake.OrchestrationAck{
			KV:       []pgwake.KVUpdate{set("a", "2"), clearKey("b"), set("c", "2")},
			Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted, Output: "done"},
		})
		n.requireKV(t, "i", pairs{"a": "2", "c": "2"})
		n.requireSnapshot(t, "i", pairs{"a": "2", "c": "2"})
	}},
	{"kv_delta_merged_on_can", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("a", "1"), set("b", "1"))
		n.turn(t, "i", pgwake.OrchestrationAck{
			KV: []pgwake.KVUpdate{set("a", "2"), clearKey("b"), set("c", "2")},
			Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{
				Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", Version: "1.0.0", ExecutionID: 2}}},
			Metadata: pgwake.Metadata{Status: pgwake.StatusContinuedAsNew},
		})
		turn := n.takeTurnOf(t, "i")
		require.EqualValues(t, 2, turn.ExecutionID)
		requirePairs(t, pairs{"a": "2", "c": "2"}, turn.KV)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 2, Metadata: running, KV: []pgwake.KVUpdate{set("a", "3")}})
		n.requireSnapshot(t, "i", pairs{"a": "2", "c": "2"})
		n.requireKV(t, "i", pairs{"a": "3", "c": "2"})
	}},
	{"kv_delta_delete_instance_cascades", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("stored", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("written", "2"), clearKey("stored"))
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 2, Events: 2})
		n.requireNoKV(t, "i", "stored", "written")
		n.start(t, "i")
		n.write(t, "i", 1, set("stored", "new"))
		n.requireKV(t, "i", pairs{"stored": "new"})
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.requireSnapshot(t, "i", pairs{"stored": "new"})
	}},
	{"kv_delta_prune_untouched_key_survives", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.write(t, "i", 1, set("untouched", "1"), set("key", "1"))
		n.continueAsNew(t, "i", 2)
		n.write(t, "i", 2, set("key", "2"))
		n.continueAsNew(t, "i", 3)
		n.write(t, "i", 3, set("key", "3"))
		n.requirePrune(t, "i", nil, 2)
		n.requireKV(t, "i", pairs{"untouched": "1", "key": "3"})
		n.requireSnapshot(t, "i", pairs{"untouched": "1", "key": "2"})
	}},
}

// pairs are what an instance has.
type pairs = map[string]string

var clearAll = pgwake.KVUpdate{Op: pgwake.KVClearAll}

func set(key, value string) pgwake.KVUpdate { return pgwake.KVUpdate{Key: key, Value: value} }

func clearKey(key string) pgwake.KVUpdate { return pgwake.KVUpdate{Op: pgwake.KVClear, Key: key} }

// write has an instance change its pairs in a turn of its own. Nothing else may be due.
func (n *node) write(t *testing.T, instance string, execution int64, updates ...pgwake.KVUpdate) {
	t.Helper()
	n.turn(t, instance, pgwake.OrchestrationAck{ExecutionID: execution, KV: updates})
}

// requireKV asserts which pairs a client sees, by whichever verb.
func (n *node) requireKV(t *testing.T, instance string, want pairs) {
	t.Helper()
	all, err := n.ListKV(t.Context(), instance)
	require.NoError(t, err)
	requirePairs(t, want, all)
	for key, value := range want {
		got, found, err := n.GetKV(t.Context(), instance, key)
		require.NoError(t, err)
		require.True(t, found, key)
		require.Equal(t, value, got, key)
	}
}

// requireNoKV asserts that a client sees none of these keys.
func (n *node) requireNoKV(t *testing.T, instance string, keys ...string) {
	t.Helper()
	all, err := n.ListKV(t.Context(), instance)
	require.NoError(t, err)
	for _, key := range keys {
		value, found, err := n.GetKV(t.Context(), instance, key)
		require.NoError(t, err)
		require.False(t, found, key)
		require.Empty(t, value, key)
		require.NotContains(t, all, key)
	}
}

// requireSnapshot has an instance take a turn, in which nothing changes, and asserts which pairs it sees. Nothing
// else may be due.
func (n *node) requireSnapshot(t *testing.T, instance string, want pairs) {
	t.Helper()
	n.send(t, instance, "poke")
	turn := n.takeTurnOf(t, instance)
	requirePairs(t, want, turn.KV)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: turn.ExecutionID})
}

// requirePairs asserts equality, where nil is as good as empty.
func requirePairs(t *testing.T, want, got pairs) {
	t.Helper()
	if len(want) == 0 {
		require.Empty(t, got)
		return
	}
	require.Equal(t, want, got)
}
