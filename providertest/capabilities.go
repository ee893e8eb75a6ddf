package providertest

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: who is given the turns of an execution that is pinned to a version, or whose history is damaged?

var capabilityFiltering = group{"capability_filtering", []row{
	{"fetch_with_filter_none_returns_any_item", func(t *testing.T, n *node) {
		n.startPinned(t, "pinned", version(99, 1, 2))
		n.start(t, "unpinned")
		n.send(t, "pinned", "poke")
		n.send(t, "unpinned", "poke")
		n.sendWith(t, startMessage("new"), nil)
		require.Equal(t, version(99, 1, 2), n.takeTurnOf(t, "pinned").PinnedVersion)
		require.Nil(t, n.takeTurnOf(t, "unpinned").PinnedVersion)
		require.Nil(t, n.takeTurnOf(t, "new").PinnedVersion)
	}},
	{"fetch_with_compatible_filter_returns_item", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(1, 2, 3))
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, major(1))
		require.Equal(t, "i", turn.Instance)
		require.Equal(t, version(1, 2, 3), turn.PinnedVersion)
		requireHistory(t, events(1), turn.History)
	}},
	{"fetch_with_incompatible_filter_skips_item", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(2, 0, 0))
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		n.requireNoTurnWith(t, major(3))
		n.takeTurnOf(t, "i")
	}},
	{"fetch_filter_skips_incompatible_selects_compatible", func(t *testing.T, n *node) {
		n.startPinned(t, "two", version(2, 0, 0))
		n.startPinned(t, "one", version(1, 0, 0))
		n.send(t, "two", "poke")
		n.send(t, "one", "poke")
		require.Equal(t, "one", n.takeTurnWith(t, major(1)).Instance)
		n.requireNoTurnWith(t, major(1))
		n.takeTurnOf(t, "two")
	}},
	{"fetch_filter_does_not_lock_skipped_instances", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(2, 0, 0))
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		turn := n.takeTurnWith(t, major(2))
		require.Equal(t, "i", turn.Instance)
		require.Equal(t, 1, turn.Attempt)
	}},
	{"fetch_filter_null_pinned_version_always_compatible", func(t *testing.T, n *node) {
		for _, o := range []*pgwake.FetchOptions{major(0), major(1), major(99)} {
			n.start(t, "i")
			n.send(t, "i", "poke")
			turn := n.takeTurnWith(t, o)
			require.Equal(t, "i", turn.Instance)
			require.Nil(t, turn.PinnedVersion)
			n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1, QueueItems: 1})
			n.sendWith(t, startMessage("new"), nil) // nothing has pinned it yet
			n.ackTurn(t, n.takeTurnWith(t, o), pgwake.OrchestrationAck{})
		}
	}},
	{"fetch_filter_boundary_versions", func(t *testing.T, n *node) {
		pins := map[string]*pgwake.Version{
			"below": version(0, 99, 99), "lowest": version(1, 0, 0), "highest": version(1, 9, 99), "after": version(1, 9, 100),
			"minor": version(1, 10, 0), "above": version(2, 0, 0),
		}
		for instance, pin := range pins {
			n.startPinned(t, instance, pin)
		}
		for instance := range pins {
			n.send(t, instance, "poke")
		}
		o := supporting(pgwake.VersionRange{Min: *version(1, 0, 0), Max: *version(1, 9, 99)})
		got := []string{n.takeTurnWith(t, o).Instance, n.takeTurnWith(t, o).Instance}
		require.ElementsMatch(t, []string{"lowest", "highest"}, got)
		n.requireNoTurnWith(t, o)
	}},
	{"pinned_version_stored_via_ack_metadata", func(t *testing.T, n *node) {
		m := startMessage("i")
		m.Version = "1.0.0"
		n.sendWith(t, m, nil)
		turn := n.takeTurnOf(t, "i")
		require.Nil(t, turn.PinnedVersion)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pinnedTo(version(3, 1, 4))})
		n.requirePin(t, "i", 1, version(3, 1, 4))
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		require.Equal(t, version(3, 1, 4), n.takeTurnWith(t, major(3)).PinnedVersion)
	}},
	{"pinned_version_immutable_across_ack_cycles", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(1, 2, 3))
		for id := int64(2); id <= 4; id++ {
			n.send(t, "i", "poke")
			n.requireNoTurnWith(t, major(2))
			turn := n.takeTurnWith(t, major(1))
			require.Equal(t, version(1, 2, 3), turn.PinnedVersion)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{History: events(id), Metadata: running})
			n.requirePin(t, "i", 1, version(1, 2, 3))
		}
	}},
	{"continue_as_new_execution_gets_own_pinned_version", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(1, 0, 0))
		n.turn(t, "i", pgwake.OrchestrationAck{
			Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{
				Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", Version: "2.0.0", ExecutionID: 2}}},
			Metadata: pgwake.Metadata{Status: pgwake.StatusContinuedAsNew},
		})
		n.ackTurn(t, n.takeTurnOf(t, "i"), pgwake.OrchestrationAck{ExecutionID: 2, History: events(1), Metadata: pinnedTo(version(2, 0, 0))})
		n.requirePin(t, "i", 2, version(2, 0, 0))
		require.Equal(t, version(1, 0, 0), n.execution(t, "i", 1).PinnedVersion)
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		turn := n.takeTurnWith(t, major(2))
		require.EqualValues(t, 2, turn.ExecutionID)
		require.Equal(t, version(2, 0, 0), turn.PinnedVersion)

		n.startPinned(t, "not inherited", version(1, 0, 0))
		n.continueAsNew(t, "not inherited", 2)
		n.requirePin(t, "not inherited", 2, nil)
		n.send(t, "not inherited", "poke")
		require.Nil(t, n.takeTurnWith(t, major(99)).PinnedVersion)
	}},
	{"filter_with_empty_supported_versions_returns_nothing", func(t *testing.T, n *node) {
		n.startPinned(t, "pinned", version(1, 0, 0))
		n.start(t, "unpinned")
		n.send(t, "pinned", "poke")
		n.send(t, "unpinned", "poke")
		n.sendWith(t, startMessage("new"), nil)
		n.requireNoTurnWith(t, supporting())
		n.takeTurnOf(t, "pinned")
		n.takeTurnOf(t, "unpinned")
		n.takeTurnOf(t, "new")
	}},
	{"concurrent_filtered_fetch_no_double_lock", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(1, 0, 0))
		n.send(t, "i", "poke")
		o := major(1)
		o.NoWait, o.PollTimeout = false, aWhile.PollTimeout
		turns := n.fetchTogether(t, 4, o)
		require.Len(t, turns, 1)
		n.requireNoTurnWith(t, major(1))
		n.ackTurn(t, turns[0], pgwake.OrchestrationAck{History: events(2)})
	}},
	{"ack_stores_pinned_version_via_metadata_update", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.requirePin(t, "i", 1, nil)
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, major(1))
		n.send(t, "i", "from before the pin")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{PinnedVersion: version(4, 0, 0)}})
		n.requirePin(t, "i", 1, version(4, 0, 0))
		n.requireNoTurnWith(t, major(1))
		require.Equal(t, version(4, 0, 0), n.takeTurnWith(t, major(4)).PinnedVersion)
	}},
	{"provider_updates_pinned_version_when_told", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(1, 0, 0))
		for _, pin := range []*pgwake.Version{version(2, 0, 0), version(1, 5, 0), version(1, 0, 0), version(3, 0, 0)} {
			n.turn(t, "i", pgwake.OrchestrationAck{Metadata: pgwake.Metadata{PinnedVersion: pin}})
			n.requirePin(t, "i", 1, pin)
		}
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		turn := n.takeTurnWith(t, major(3))
		require.Equal(t, version(3, 0, 0), turn.PinnedVersion)
		n.send(t, "i", "from before the pin")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{PinnedVersion: version(2, 0, 0)}})
		require.Equal(t, version(2, 0, 0), n.takeTurnWith(t, major(2)).PinnedVersion)
	}},
	{"fetch_corrupted_history_filtered_vs_unfiltered", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(2, 0, 0))
		n.corrupt(t, "i")
		n.send(t, "i", "poke")
		n.requireNoTurnWith(t, major(1))
		turn := n.takeCorrupted(t, now)
		require.Equal(t, []pgwake.MessageKind{"poke"}, kinds(turn))
		n.requireNoTurn(t) // it is locked
	}},
	{"fetch_deserialization_error_increments_attempt_count", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.corrupt(t, "i")
		n.send(t, "i", "poke")
		for attempt := 1; attempt <= 3; attempt++ {
			turn := n.takeCorrupted(t, now)
			require.Equal(t, attempt, turn.Attempt)
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil))
		}
	}},
	{"fetch_deserialization_error_eventually_reaches_poison", func(t *testing.T, n *node) {
		const limit = 6
		n.start(t, "i")
		n.corrupt(t, "i")
		n.send(t, "i", "poke")
		attempt := 0
		for range limit { // nobody gives it back
			turn := n.takeCorrupted(t, patiently(&pgwake.FetchOptions{LockTimeout: moment}))
			require.Greater(t, turn.Attempt, attempt)
			attempt = turn.Attempt
		}
		require.GreaterOrEqual(t, attempt, limit)
	}},
	{"fetch_filter_applied_before_history_deserialization", func(t *testing.T, n *node) {
		n.startPinned(t, "i", version(2, 0, 0))
		n.startPinned(t, "sound", version(1, 0, 0))
		n.corrupt(t, "i")
		n.send(t, "i", "poke")
		n.send(t, "sound", "poke")
		turn := n.takeTurnWith(t, major(1))
		require.Equal(t, "sound", turn.Instance)
		require.NoError(t, turn.HistoryError)
		requireHistory(t, events(1), turn.History)
		n.requireNoTurnWith(t, major(1))
		require.Equal(t, 1, n.takeCorrupted(t, now).Attempt)
	}},
	{"fetch_single_range_only_uses_first_range", func(t *testing.T, n *node) {
		n.startPinned(t, "two", version(2, 0, 0))
		n.startPinned(t, "one", version(1, 0, 0))
		n.send(t, "two", "poke")
		n.send(t, "one", "poke")
		o := supporting(major(1).Versions.Ranges[0], major(2).Versions.Ranges[0])
		require.Equal(t, "one", n.takeTurnWith(t, o).Instance)
		n.requireNoTurnWith(t, o)
		n.takeTurnOf(t, "two")
	}},
	{"ack_appends_event_to_corrupted_history", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.corrupt(t, "i")
		n.send(t, "i", "poke")
		failure := events(99999)
		n.ackTurn(t, n.takeCorrupted(t, now), pgwake.OrchestrationAck{
			History:  failure,
			Metadata: pgwake.Metadata{Status: pgwake.StatusFailed, Output: "the history is damaged"},
		})
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, pgwake.StatusFailed, info.Status)
		require.Equal(t, "the history is damaged", info.Output)
		got, err := n.ReadHistoryExecution(t.Context(), "i", 1, failure[0].ID)
		require.NoError(t, err)
		requireHistory(t, failure, got)
		require.EqualValues(t, 2, n.execution(t, "i", 1).Events, "the damaged event stays")
		n.requireNoTurn(t)
	}},
}}

func version(first, second, third int) *pgwake.Version {
	return &pgwake.Version{Major: first, Minor: second, Patch: third}
}

// supporting are options for the turns that are due to a node that supports these versions.
func supporting(ranges ...pgwake.VersionRange) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Versions: &pgwake.VersionFilter{Ranges: ranges}}
}

// major is supporting for all versions with this first part.
func major(first int) *pgwake.FetchOptions {
	return supporting(pgwake.VersionRange{Min: *version(first, 0, 0), Max: *version(first, 999, 999)})
}

// pinnedTo is the metadata of an instance as startPinned makes it.
func pinnedTo(pin *pgwake.Version) pgwake.Metadata {
	m := running
	m.PinnedVersion = pin
	return m
}

// startPinned is start for an execution that is pinned. Nothing else may be due.
func (n *node) startPinned(t *testing.T, instance string, pin *pgwake.Version) {
	t.Helper()
	n.startWith(t, instance, pgwake.OrchestrationAck{History: events(1), Metadata: pinnedTo(pin)})
}

// requirePin asserts the pinned version of the current execution.
func (n *node) requirePin(t *testing.T, instance string, execution int64, want *pgwake.Version) {
	t.Helper()
	info, err := n.GetInstanceInfo(t.Context(), instance)
	require.NoError(t, err)
	require.Equal(t, execution, info.ExecutionID)
	require.Equal(t, want, info.PinnedVersion)
	require.Equal(t, want, n.execution(t, instance, execution).PinnedVersion)
}

// takeCorrupted takes a turn of the instance "i", whose history must be damaged.
func (n *node) takeCorrupted(t *testing.T, o *pgwake.FetchOptions) *pgwake.OrchestrationItem {
	t.Helper()
	turn := n.takeTurnWith(t, o)
	require.Equal(t, "i", turn.Instance)
	require.Error(t, turn.HistoryError)
	require.Empty(t, turn.History)
	require.NotEmpty(t, turn.LockToken)
	return turn
}
