package providertest_test

import (
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/providertest"
)

// This file answers: in which ways can a Provider break the contract, and which rows notice? The numbers are those of
// the rules.

var faults = []fault{
	// 1, 2, 5, 6: what a turn does is done by its holder, as a whole, or not at all.
	{
		name: "ack of a turn does not look at the token",
		rows: []string{"instance_locking/invalid_lock_token_rejection", "lock_expiration/lock_expires_after_timeout"},
		sql:  []edit{{"hold_instance_lock", " AND l.lock_token = p_token", ""}},
	},
	{
		name: "ack of a turn does not look at the end of the lease",
		rows: []string{"error_handling/lock_expiration_during_ack", "lock_expiration/orchestration_lock_renewal_after_expiration"},
		sql:  []edit{{"hold_instance_lock", "v_until <= clock_timestamp()", "false"}},
	},
	{
		name: "two acks of a turn do not exclude each other",
		rows: []string{"atomicity/concurrent_ack_prevention"},
		sql: []edit{{"hold_instance_lock", "        FOR UPDATE;", "        ;\n    IF FOUND THEN PERFORM pg_sleep(0.3); END IF;"},
			{"release_instance", "DELETE FROM instance_locks l WHERE l.instance_id = p_instance;", "PERFORM pg_sleep(0.5); DELETE FROM instance_locks l WHERE l.instance_id = p_instance;"}},
	},
	{
		name: "event with an id that is taken is swallowed",
		rows: []string{"pgwake/history_is_appended_without_a_turn", "atomicity/atomicity_failure_rollback", "error_handling/duplicate_event_id_rejection"},
		sql:  []edit{{"append_history", "AS e (event_id, type, data);", "AS e (event_id, type, data) ON CONFLICT DO NOTHING;"}},
	},
	{
		name: "event with an id that is taken replaces the other",
		rows: []string{"error_handling/duplicate_event_id_rejection"},
		sql: []edit{{"append_history", "AS e (event_id, type, data);",
			"AS e (event_id, type, data) ON CONFLICT (instance_id, execution_id, event_id) DO UPDATE SET type = excluded.type, data = excluded.data;"}},
	},
	{
		name: "work items of an ack that fails stay",
		rows: []string{"atomicity/atomicity_failure_rollback"},
		verb: func(n node) providertest.Provider { return eagerAck{n} },
	},
	{
		name: "ack that fails gives the turn back",
		rows: []string{"atomicity/atomicity_failure_rollback", "atomicity/lock_released_only_on_successful_ack"},
		verb: func(n node) providertest.Provider { return dropsTurn{n} },
	},
	{
		name: "ack that loses its lock is no error",
		rows: []string{"error_handling/invalid_lock_token_on_ack", "instance_locking/invalid_lock_token_rejection",
			"error_handling/lock_expiration_during_ack", "deletion/force_delete_prevents_ack_recreation"},
		verb: func(n node) providertest.Provider { return forgivesAck{n} },
	},
	{
		name: "messages of an ack are lost",
		rows: []string{"atomicity/multi_operation_atomic_ack", "instance_creation/sub_orchestration_instance_creation"},
		sql:  []edit{{"ack_orchestration", "IF cardinality(p_message_instances) > 0 THEN", "IF false THEN"}},
	},

	// 3: instances.
	{
		name: "instance appears when a message is sent",
		rows: []string{"instance_creation/no_instance_creation_on_enqueue", "instance_creation/instance_creation_via_metadata",
			"instance_creation/sub_orchestration_instance_creation"},
		sql: []edit{{"enqueue_message_many", "v_before := quiet(p_quiet);",
			"v_before := quiet(p_quiet); INSERT INTO instances (instance_id, namespace, name) SELECT DISTINCT unnest(p_instances), 'default', 'flow' ON CONFLICT DO NOTHING;"}},
	},
	{
		name: "instance appears when its turn is taken",
		rows: []string{"instance_creation/instance_creation_via_metadata"},
		sql: []edit{{"fetch_orchestration", "SELECT * INTO v_known FROM",
			"INSERT INTO instances (instance_id, namespace, name) VALUES (v_instance, 'default', 'flow') ON CONFLICT DO NOTHING; SELECT * INTO v_known FROM"}},
	},
	{
		name: "name and version come from the message",
		rows: []string{"instance_creation/instance_creation_via_metadata", "instance_creation/null_version_handling"},
		sql: []edit{{"ack_orchestration", "coalesce(v_namespace, 'default'), p_name, p_version,",
			"coalesce(v_namespace, 'default'), coalesce((SELECT max(q.name) FROM orchestrator_queue q WHERE q.lock_token = p_token), p_name), (SELECT max(q.version) FROM orchestrator_queue q WHERE q.lock_token = p_token),"}},
	},
	{
		name: "version of an instance is that of its first ack for ever",
		rows: []string{"instance_creation/null_version_handling"},
		sql:  []edit{{"ack_orchestration", "p_sticky_owner, clock_timestamp() + p_sticky_for);", "p_sticky_owner, clock_timestamp() + p_sticky_for);\n        UPDATE instances i SET version = NULL WHERE i.instance_id = p_instance;"}},
	},

	{
		name: "payloads are rewritten",
		rows: []string{"error_handling/corrupted_serialization_data"},
		sql:  []edit{{"enqueue_message_many", "i.data::json", "i.data::jsonb::json"}},
	},
	{
		name: "history of an unknown instance is an error",
		rows: []string{"error_handling/missing_instance_metadata", "deletion/delete_terminal_instances"},
		sql: []edit{{"read_history", "BEGIN\n", `BEGIN
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
`}},
	},

	// 4: taking a turn.
	{
		name: "leased instance can be taken",
		rows: []string{"instance_locking/completions_arriving_during_lock_blocked", "instance_locking/ack_only_affects_locked_messages",
			"lock_expiration/lock_renewal_on_ack"},
		sql: []edit{{"lock_due_instance", "IF FOUND AND v_lock_end > p_now THEN", "IF FOUND AND v_lock_end < p_now THEN"}},
	},
	{
		name: "messages of a leased turn stay visible, and its lock is none",
		rows: []string{"instance_locking/exclusive_instance_lock", "instance_locking/multi_threaded_lock_contention",
			"instance_locking/multi_threaded_no_duplicate_processing", "instance_locking/concurrent_instance_fetching",
			"instance_locking/multi_threaded_lock_expiration_recovery", "lock_expiration/concurrent_lock_attempts_respect_expiration",
			"capability_filtering/concurrent_filtered_fetch_no_double_lock"},
		sql: []edit{{"lock_due_instance", "IF FOUND AND v_lock_end > p_now THEN", "IF FOUND AND v_lock_end < p_now THEN"},
			{"fetch_orchestration", "SET lock_token = p_token, visible_at = v_until,", "SET lock_token = p_token,"}},
	},
	{
		name: "leased instance blocks the others",
		rows: []string{"instance_locking/cross_instance_lock_isolation", "instance_locking/lock_token_uniqueness"},
		sql:  []edit{{"lock_due_instance", "WHERE l.instance_id = p_instance FOR UPDATE SKIP LOCKED;", "ORDER BY l.locked_until DESC LIMIT 1;"}},
	},
	{
		name: "every turn has the token of the first",
		rows: []string{"instance_locking/lock_token_uniqueness", "lock_expiration/abandon_releases_lock_immediately"},
		verb: func(n node) providertest.Provider { return &oneToken{node: n} },
	},
	{
		name: "messages of a turn come in the wrong order",
		rows: []string{"atomicity/multi_operation_atomic_ack", "instance_locking/completions_arriving_during_lock_blocked"},
		sql:  []edit{{"fetch_orchestration", "q.lock_token = p_token ORDER BY q.instance_id, q.id;", "q.lock_token = p_token ORDER BY q.id DESC;"}},
	},
	{
		name: "turn has its first message only",
		rows: []string{"atomicity/multi_operation_atomic_ack", "instance_locking/message_tagging_during_lock"},
		sql:  []edit{{"fetch_orchestration", "q.lock_token = p_token ORDER BY q.instance_id, q.id;", "q.lock_token = p_token ORDER BY q.id LIMIT 1;"}},
	},
	{
		name: "ack removes messages that came later",
		rows: []string{"instance_locking/message_tagging_during_lock", "instance_locking/ack_only_affects_locked_messages",
			"lock_expiration/lock_renewal_on_ack"},
		sql: []edit{{"ack_orchestration", "DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.lock_token = p_token;",
			"DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.created_at < v_now; DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND (q.lock_token = p_token OR q.held OR cardinality(p_message_instances) IS NULL);"}},
	},
	{
		name: "ack leaves the messages of the turn",
		rows: []string{"queue_semantics/worker_ack_atomicity", "instance_locking/ack_only_affects_locked_messages"},
		sql: []edit{{"ack_orchestration", "DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.lock_token = p_token;",
			"UPDATE orchestrator_queue q SET held = true, lock_token = NULL WHERE q.instance_id = p_instance AND q.lock_token = p_token;"}},
	},
	{
		name: "lock of an instance is not released",
		rows: []string{"lock_expiration/lock_renewal_on_ack", "lock_expiration/abandon_releases_lock_immediately"},
		sql:  []edit{{"release_instance", "DELETE FROM instance_locks l WHERE l.instance_id = p_instance;", ""}},
	},
	{
		name: "history is that of all executions",
		rows: []string{"multi_execution/execution_isolation", "multi_execution/latest_execution_detection", "multi_execution/execution_history_persistence"},
		sql:  []edit{{"read_history", "AND h.execution_id = v_execution", ""}},
	},
	{
		name: "history is that of the first execution",
		rows: []string{"multi_execution/execution_isolation", "multi_execution/latest_execution_detection", "multi_execution/continue_as_new_creates_new_execution"},
		sql:  []edit{{"read_history", "coalesce(p_execution,", "coalesce(p_execution, 1,"}},
	},
	{
		name: "history does not begin at the event that was asked for",
		rows: []string{"multi_execution/execution_isolation", "capability_filtering/ack_appends_event_to_corrupted_history"},
		sql:  []edit{{"read_history", "coalesce(p_from_event_id, '-9223372036854775808')", "'-9223372036854775808'"}},
	},
	{
		name: "turn comes with the history of all executions",
		rows: []string{"multi_execution/execution_id_sequencing"},
		sql:  []edit{{"fetch_orchestration", "WHERE p_history AND h.instance_id = v_instance AND h.execution_id = v_execution ORDER", "WHERE p_history AND h.instance_id = v_instance ORDER"}},
	},
	{
		name: "current execution stays the first",
		rows: []string{"multi_execution/execution_id_sequencing", "multi_execution/continue_as_new_creates_new_execution", "management/get_instance_info"},
		sql:  []edit{{"ack_orchestration", "greatest(i.current_execution, p_execution)", "i.current_execution"}},
	},
	{
		name: "new execution overwrites the one before",
		rows: []string{"multi_execution/execution_history_persistence", "multi_execution/execution_isolation", "management/list_executions"},
		sql: []edit{{"append_history", "BEGIN\n", `BEGIN
    DELETE FROM history h WHERE h.instance_id = p_instance AND h.execution_id < p_execution;
    DELETE FROM executions h WHERE h.instance_id = p_instance AND h.execution_id < p_execution;
`}},
	},

	// 6, 8: leases of work.
	{
		name: "ack of work does not look at the token",
		rows: []string{"pgwake/batch_of_acks_reports_leases_that_are_lost", "sessions/both_locks_expire_different_worker_claims"},
		sql:  []edit{{"ack_work_many", "AND q.lock_token = done.token", ""}},
	},
	{
		name: "ack of work does not look at the end of the lease",
		rows: []string{"lock_expiration/worker_ack_fails_after_lock_expiry"},
		sql:  []edit{{"ack_work_many", "AND (q.visible_at > clock_timestamp() AND v_archived IS NULL OR", "AND (v_archived IS NULL OR"}},
	},
	{
		name: "abandon of work does not look at the token",
		rows: []string{"lock_expiration/abandon_work_item_releases_lock"},
		sql:  []edit{{"abandon_work", "q.id = p_id AND q.lock_token = p_token AND q.visible_at > v_now", "q.id = p_id"}},
	},
	{
		name: "abandon with a token that is lost is no error",
		rows: []string{"lock_expiration/abandon_work_item_releases_lock", "queue_semantics/worker_peek_lock_semantics",
			"instance_locking/invalid_lock_token_rejection", "deletion/force_delete_prevents_ack_recreation"},
		verb: func(n node) providertest.Provider { return forgivesAbandon{n} },
	},
	{
		name: "renewal revives a lease of work that has ended",
		rows: []string{"lock_expiration/worker_lock_renewal_after_expiration"},
		sql:  []edit{{"renew_work", "AND q.visible_at > clock_timestamp() AND before.id", "AND before.id"}},
	},
	{
		name: "renewal of work extends nothing",
		rows: []string{"lock_expiration/worker_lock_renewal_success", "lock_expiration/worker_lock_renewal_extends_timeout", "pgwake/wake_when_renewed_lease_of_work_ends"},
		sql:  []edit{{"renew_work", "SET visible_at = v_until", "SET visible_at = q.visible_at"}},
	},
	{
		name: "renewal of work with a token that is lost is no error",
		rows: []string{"lock_expiration/worker_lock_renewal_invalid_token", "lock_expiration/worker_lock_renewal_after_ack",
			"lock_expiration/worker_lock_renewal_after_expiration", "cancellation/renew_fails_when_entry_deleted"},
		verb: func(n node) providertest.Provider { return forgivesRenewal{n} },
	},
	{
		name: "renewal of a turn extends nothing",
		rows: []string{"pgwake/wake_when_renewed_lease_of_turn_ends"},
		sql: []edit{{"renew_orchestration", "SET locked_until = v_until", "SET locked_until = l.locked_until"},
			{"renew_orchestration", "SET visible_at = v_until", "SET visible_at = q.visible_at"}},
	},
	{
		name: "claimed work stays visible",
		rows: []string{"queue_semantics/worker_queue_fifo_ordering", "queue_semantics/worker_peek_lock_semantics", "queue_semantics/lost_lock_token_handling"},
		sql:  []edit{{"fetch_work", "SET visible_at = v_until, lock_token = p_token", "SET lock_token = p_token"}},
	},
	{
		name: "lease of work does not end when it says",
		rows: []string{"queue_semantics/lost_lock_token_handling", "poison_message/worker_attempt_count_increments_on_lock_expiry"},
		sql:  []edit{{"fetch_work", "SET visible_at = v_until, lock_token = p_token", "SET visible_at = v_now + p_lock_timeout / 2, lock_token = p_token"}},
	},
	{
		name: "fetch gives no new token",
		rows: []string{"lock_expiration/abandon_work_item_releases_lock", "queue_semantics/lost_lock_token_handling", "tag_filtering/tag_survives_abandon_and_refetch"},
		verb: func(n node) providertest.Provider { return &oneWorkToken{node: n} },
	},
	{
		name: "work comes in the wrong order",
		rows: []string{"queue_semantics/worker_queue_fifo_ordering", "atomicity/multi_operation_atomic_ack"},
		sql: []edit{{"pick_work", "ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR UPDATE SKIP LOCKED", "ORDER BY q.visible_at DESC, q.id DESC\n                    LIMIT p_limit FOR UPDATE SKIP LOCKED"},
			{"fetch_work", "ORDER BY d.visible_at, d.id", "ORDER BY d.visible_at DESC, d.id DESC"}},
	},
	{
		name: "completion is sent although the lease is lost",
		rows: []string{"queue_semantics/worker_ack_atomicity", "cancellation/ack_work_item_fails_when_entry_deleted",
			"lock_expiration/worker_ack_fails_after_lock_expiry", "deletion/stale_activity_after_delete_recreate"},
		verb: func(n node) providertest.Provider { return eagerCompletion{n} },
	},
	{
		name: "completion is lost",
		rows: []string{"queue_semantics/worker_ack_atomicity", "deletion/stale_activity_after_delete_recreate", "pgwake/tx_completion"},
		sql:  []edit{{"ack_work", "IF p_instance IS NOT NULL THEN", "IF false THEN"}},
	},
	{
		name: "ack without a completion sends one",
		rows: []string{"cancellation/ack_work_item_none_deletes_without_enqueue"},
		verb: func(n node) providertest.Provider { return chattyAck{n} },
	},
	{
		name: "new work is not due at once",
		rows: []string{"queue_semantics/worker_item_immediate_visibility", "queue_semantics/worker_queue_fifo_ordering"},
		sql: []edit{{"enqueue_work_item", "coalesce(p_visible_at, now_at + p_delay, now_at)", "coalesce(p_visible_at, now_at + p_delay, now_at + interval '1s')"},
			{"enqueue_work_many", "coalesce(i.visible_at, v_now + i.delay, v_now)", "coalesce(i.visible_at, v_now + i.delay, v_now + interval '1s')"}},
	},

	// 5, 7: delays.
	{
		name: "delay of abandoned work is ignored",
		rows: []string{"lock_expiration/abandon_work_item_with_delay", "queue_semantics/worker_delayed_visibility_skips_future_items"},
		sql:  []edit{{"abandon_work", "ELSE v_now + p_delay END", "ELSE v_now END"}},
	},
	{
		name: "delay of an abandoned turn is ignored",
		rows: []string{"pgwake/wake_when_turn_is_abandoned_with_delay"},
		sql:  []edit{{"give_back_turn", "SET visible_at = v_now + p_delay", "SET visible_at = v_now"}},
	},
	{
		name: "timer fires at once",
		rows: []string{"queue_semantics/timer_delayed_visibility", "pgwake/wake_when_timer_of_turn_fires", "management/get_queue_depths"},
		sql:  []edit{{"enqueue_message_many", "coalesce(i.visible_at, v_now + i.delay, v_now)", "v_now"}},
	},

	// 10: attempts.
	{
		name: "attempt of work is not counted",
		rows: []string{"poison_message/worker_attempt_count_increments_on_lock_expiry", "poison_message/attempt_count_is_per_message",
			"sessions/abandoned_session_item_retryable", "tag_filtering/tag_survives_abandon_and_refetch"},
		sql: []edit{{"fetch_work", "attempt_count = q.attempt_count + 1", "attempt_count = 1"}},
	},
	{
		name: "attempts of work begin at 0",
		rows: []string{"poison_message/worker_attempt_count_starts_at_one"},
		verb: func(n node) providertest.Provider { return fromZero{n} },
	},
	{
		name: "attempt of a turn is not counted",
		rows: []string{"poison_message/orchestration_attempt_count_increments_on_refetch", "poison_message/max_attempt_count_across_message_batch",
			"capability_filtering/fetch_deserialization_error_increments_attempt_count"},
		sql: []edit{{"fetch_orchestration", "attempt_count = q.attempt_count + 1", "attempt_count = 1"}},
	},
	{
		name: "attempts of turns begin at 0",
		rows: []string{"poison_message/orchestration_attempt_count_starts_at_one"},
		verb: func(n node) providertest.Provider { return fromZero{n} },
	},
	{
		name: "attempt of a turn is that of its newest message",
		rows: []string{"poison_message/max_attempt_count_across_message_batch"},
		sql:  []edit{{"fetch_orchestration", "max(q.attempt_count), NULL::jsonb, min(q.created_at)", "min(q.attempt_count), NULL::jsonb, min(q.created_at)"}},
	},
	{
		name: "attempts are counted for all items together",
		rows: []string{"poison_message/attempt_count_is_per_message"},
		sql:  []edit{{"fetch_work", "attempt_count = q.attempt_count + 1", "attempt_count = (SELECT max(a.attempt_count) + 1 FROM worker_queue a)"}},
	},
	{
		name: "ignore_attempt is ignored for work",
		rows: []string{"poison_message/abandon_work_item_ignore_attempt_decrements", "poison_message/ignore_attempt_never_goes_negative",
			"sessions/abandoned_session_item_ignore_attempt"},
		sql: []edit{{"abandon_work", "q.attempt_count - p_ignore_attempt::integer", "q.attempt_count"}},
	},
	{
		name: "ignore_attempt is ignored for turns",
		rows: []string{"poison_message/abandon_orchestration_item_ignore_attempt_decrements", "poison_message/ignore_attempt_never_goes_negative"},
		sql:  []edit{{"give_back_turn", "q.attempt_count - p_ignore_attempt::integer", "q.attempt_count"}},
	},
	{
		name: "ignore_attempt goes below zero",
		rows: []string{"poison_message/ignore_attempt_never_goes_negative"},
		sql:  []edit{{"abandon_work", "greatest(q.attempt_count - p_ignore_attempt::integer, 0)", "q.attempt_count - 2 * p_ignore_attempt::integer"}},
	},

	// 9: cancellation.
	{
		name: "cancellation of activities is not applied",
		rows: []string{"cancellation/cancelled_activities_deleted_from_worker_queue", "cancellation/batch_cancellation_deletes_multiple_activities",
			"cancellation/ack_work_item_fails_when_entry_deleted", "cancellation/renew_fails_when_entry_deleted"},
		sql: []edit{{"ack_orchestration", "IF cardinality(p_cancel_activities) > 0 THEN", "IF false THEN"}},
	},
	{
		name: "activities are cancelled before the inserts",
		rows: []string{"cancellation/same_activity_in_worker_items_and_cancelled_is_noop"},
		sql:  []edit{{"ack_orchestration", "IF cardinality(p_cancel_activities) > 0 AND cardinality(p_work_names) > 0 THEN", "IF false THEN"}},
	},
	{
		name: "cancellation takes all activities of the instance",
		rows: []string{"cancellation/cancelled_activities_deleted_from_worker_queue", "cancellation/same_activity_in_worker_items_and_cancelled_is_noop",
			"cancellation/cancelling_nonexistent_activities_is_idempotent"},
		sql: []edit{{"cancel_activities", "AND w.execution_id = c.execution_id AND w.activity_id = c.activity_id", ""},
			{"cancel_activities", "ORDER BY q.id FOR UPDATE));", "ORDER BY q.id));"}},
	},
	{
		name: "cancellation takes one activity only",
		rows: []string{"cancellation/batch_cancellation_deletes_multiple_activities"},
		sql:  []edit{{"cancel_activities", "ORDER BY q.id FOR UPDATE));", "ORDER BY q.id LIMIT 1));"}},
	},
	{
		name: "cancellation of an activity that is gone is an error",
		rows: []string{"cancellation/cancelling_nonexistent_activities_is_idempotent"},
		sql:  []edit{{"cancel_activities", "    PERFORM remove_work(ARRAY(", "    IF NOT EXISTS (SELECT FROM unnest(p_executions, p_activities) AS c (execution_id, activity_id) JOIN worker_queue q ON q.instance_id = p_instance AND q.execution_id = c.execution_id AND q.activity_id = c.activity_id) THEN RAISE EXCEPTION 'nothing to cancel' USING ERRCODE = 'PW002'; END IF;\n    PERFORM remove_work(ARRAY("}},
	},
	{
		name: "activity of an instance that does not run is not fetched",
		rows: []string{"cancellation/fetch_returns_terminal_state_when_orchestration_completed", "cancellation/fetch_returns_terminal_state_when_orchestration_failed",
			"cancellation/fetch_returns_terminal_state_when_orchestration_continued_as_new", "cancellation/fetch_returns_missing_state_when_instance_deleted"},
		sql: []edit{{"pick_work", "-q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now",
			`-q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now
                      AND (q.instance_id IS NULL OR EXISTS (SELECT FROM instance_info i WHERE i.instance_id = q.instance_id AND i.status = 'Running'))`},
			{"fetch_work", "d.visible_at <= v_now\n", "d.visible_at <= v_now AND (d.instance_id IS NULL OR EXISTS (SELECT FROM instance_info i WHERE i.instance_id = d.instance_id AND i.status = 'Running'))\n"}},
	},
	{
		name: "activity of a running instance is not fetched",
		rows: []string{"cancellation/fetch_returns_running_state_for_active_orchestration", "cancellation/renew_returns_running_when_orchestration_active"},
		sql: []edit{{"pick_work", "-q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now",
			`-q.priority = -level.priority AND q.tag = '' AND q.session_id IS NULL AND q.visible_at <= p_now
                      AND NOT EXISTS (SELECT FROM instance_info i WHERE i.instance_id = q.instance_id AND i.status = 'Running')`},
			{"fetch_work", "d.visible_at <= v_now\n", "d.visible_at <= v_now AND NOT EXISTS (SELECT FROM instance_info i WHERE i.instance_id = d.instance_id AND i.status = 'Running')\n"}},
	},
	{
		name: "activity of an instance that does not run is not renewed",
		rows: []string{"cancellation/renew_returns_terminal_when_orchestration_completed", "cancellation/renew_returns_missing_when_instance_deleted"},
		sql: []edit{{"renew_work", "AND before.id = ANY (ARRAY[held.id])", `AND before.id = ANY (ARRAY[held.id])
           AND (q.instance_id IS NULL OR EXISTS (SELECT FROM instance_info i WHERE i.instance_id = q.instance_id AND i.status = 'Running'))`}},
	},

	// 11: damaged history.
	{
		name: "damaged history loses events in silence",
		rows: []string{"capability_filtering/fetch_corrupted_history_filtered_vs_unfiltered", "capability_filtering/fetch_deserialization_error_increments_attempt_count"},
		verb: func(n node) providertest.Provider { return hidesDamage{n} },
	},
	{
		name: "turn with a damaged history is an error of the fetch",
		rows: []string{"capability_filtering/fetch_corrupted_history_filtered_vs_unfiltered", "capability_filtering/ack_appends_event_to_corrupted_history"},
		verb: func(n node) providertest.Provider { return refusesDamage{n} },
	},
	{
		name: "fetch of a damaged history is not counted",
		rows: []string{"capability_filtering/fetch_deserialization_error_increments_attempt_count",
			"capability_filtering/fetch_deserialization_error_eventually_reaches_poison"},
		sql: []edit{{"fetch_orchestration", "attempt_count = q.attempt_count + 1",
			"attempt_count = q.attempt_count + (q.attempt_count = 0 OR NOT EXISTS (SELECT FROM history h WHERE h.instance_id = v_instance AND h.type = 'damaged'))::integer"}},
	},
	{
		name: "damaged history takes no event",
		rows: []string{"capability_filtering/ack_appends_event_to_corrupted_history"},
		sql: []edit{{"append_history", "BEGIN\n", `BEGIN
    IF EXISTS (SELECT FROM history h WHERE h.instance_id = p_instance AND h.type = 'damaged') THEN
        RAISE EXCEPTION 'damaged' USING ERRCODE = 'PW003';
    END IF;
`}},
	},
	{
		name: "ack removes the damaged events",
		rows: []string{"capability_filtering/ack_appends_event_to_corrupted_history"},
		sql: []edit{{"append_history", "BEGIN\n", `BEGIN
    DELETE FROM history h WHERE h.instance_id = p_instance AND h.type = 'damaged';
    UPDATE executions x SET event_count = 0 WHERE x.instance_id = p_instance AND x.event_count = 1;
`}},
	},

	// 12: versions.
	{
		name: "version filter is ignored",
		rows: []string{"capability_filtering/fetch_with_incompatible_filter_skips_item", "capability_filtering/fetch_filter_skips_incompatible_selects_compatible",
			"capability_filtering/fetch_filter_applied_before_history_deserialization", "capability_filtering/filter_with_empty_supported_versions_returns_nothing"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { o.Versions = nil }}
		},
	},
	{
		name: "version filter locks what it skips",
		rows: []string{"capability_filtering/fetch_filter_does_not_lock_skipped_instances", "capability_filtering/fetch_with_incompatible_filter_skips_item"},
		verb: func(n node) providertest.Provider { return locksSkipped{n} },
	},
	{
		name: "version filter leaves out what has a version",
		rows: []string{"capability_filtering/fetch_with_compatible_filter_returns_item", "capability_filtering/concurrent_filtered_fetch_no_double_lock"},
		sql:  []edit{{"message_lists", "l.pin BETWEEN p_min_pin AND p_max_pin", "false"}},
	},
	{
		name: "fetch without a version filter leaves out what has a version",
		rows: []string{"capability_filtering/fetch_with_filter_none_returns_any_item"},
		sql:  []edit{{"fetch_orchestration", "-q.priority = -level.priority AND q.visible_at <= v_now", "-q.priority = -level.priority AND q.visible_at <= v_now AND q.pin = 0"}},
	},
	{
		name: "version filter leaves out what has no version",
		rows: []string{"capability_filtering/fetch_filter_null_pinned_version_always_compatible", "capability_filtering/ack_stores_pinned_version_via_metadata_update"},
		sql:  []edit{{"message_lists", "p_min_pin IS NULL OR l.pin = 0 OR l.pin", "p_min_pin IS NULL OR l.pin"}},
	},
	{
		name: "version filter leaves out its highest version",
		rows: []string{"capability_filtering/fetch_filter_boundary_versions"},
		sql:  []edit{{"message_lists", "l.pin BETWEEN p_min_pin AND p_max_pin", "l.pin >= p_min_pin AND l.pin < p_max_pin"}},
	},
	{
		name: "version filter leaves out its lowest version",
		rows: []string{"capability_filtering/fetch_filter_boundary_versions"},
		sql:  []edit{{"message_lists", "l.pin BETWEEN p_min_pin AND p_max_pin", "l.pin > p_min_pin AND l.pin <= p_max_pin"}},
	},
	{
		name: "version filter has no upper end",
		rows: []string{"capability_filtering/fetch_filter_boundary_versions", "capability_filtering/fetch_with_incompatible_filter_skips_item"},
		sql: []edit{{"message_lists", "l.pin BETWEEN p_min_pin AND p_max_pin", "l.pin >= p_min_pin"},
			{"lock_due_instance", "x.pin NOT BETWEEN p_min_pin AND p_max_pin", "x.pin < p_min_pin"}},
	},
	{
		name: "version filter without a range matches everything",
		rows: []string{"capability_filtering/filter_with_empty_supported_versions_returns_nothing"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) {
				if o.Versions != nil && len(o.Versions.Ranges) == 0 {
					o.Versions = nil
				}
			}}
		},
	},
	{
		name: "version filter uses its second range",
		rows: []string{"capability_filtering/fetch_single_range_only_uses_first_range"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) {
				if o.Versions != nil && len(o.Versions.Ranges) > 1 {
					o.Versions = &pgwake.VersionFilter{Ranges: []pgwake.VersionRange{{Min: o.Versions.Ranges[0].Min, Max: o.Versions.Ranges[1].Max}}}
				}
			}}
		},
	},
	{
		name: "pinned version is not stored",
		rows: []string{"capability_filtering/pinned_version_stored_via_ack_metadata", "capability_filtering/ack_stores_pinned_version_via_metadata_update",
			"capability_filtering/provider_updates_pinned_version_when_told"},
		sql: []edit{{"ack_orchestration", "coalesce(p_pin, 0)", "0"}, {"ack_orchestration", "pin = coalesce(p_pin, x.pin)", "pin = x.pin"}},
	},
	{
		name: "pinned version is stored with the first ack only",
		rows: []string{"capability_filtering/ack_stores_pinned_version_via_metadata_update", "capability_filtering/provider_updates_pinned_version_when_told"},
		sql:  []edit{{"ack_orchestration", "pin = coalesce(p_pin, x.pin)", "pin = x.pin"}},
	},
	{
		name: "pinned version is never overwritten",
		rows: []string{"capability_filtering/provider_updates_pinned_version_when_told"},
		sql:  []edit{{"ack_orchestration", "pin = coalesce(p_pin, x.pin)", "pin = coalesce(nullif(x.pin, 0), p_pin, 0)"}},
	},
	{
		name: "pinned version is forgotten by an ack without one",
		rows: []string{"capability_filtering/pinned_version_immutable_across_ack_cycles"},
		sql:  []edit{{"ack_orchestration", "pin = coalesce(p_pin, x.pin)", "pin = coalesce(p_pin, 0)"}},
	},
	{
		name: "pinned version is inherited",
		rows: []string{"capability_filtering/continue_as_new_execution_gets_own_pinned_version"},
		sql:  []edit{{"ack_orchestration", "coalesce(p_pin, 0)", "coalesce(p_pin, (SELECT max(y.pin) FROM executions y WHERE y.instance_id = p_instance), 0)"}},
	},
	{
		name: "pinned version of an instance is that of its first execution",
		rows: []string{"capability_filtering/continue_as_new_execution_gets_own_pinned_version"},
		sql:  []edit{{"ack_orchestration", "coalesce(p_pin, 0)", "coalesce((SELECT min(y.pin) FROM executions y WHERE y.instance_id = p_instance), p_pin, 0)"}},
	},
	{
		name: "messages that are queued keep the version from before the pin",
		rows: []string{"capability_filtering/ack_stores_pinned_version_via_metadata_update"},
		sql: []edit{{"align_messages", "pin = v_pin,", "pin = q.pin,"},
			{"lock_due_instance", "IF (p_namespaces IS NOT NULL", "IF false AND (p_namespaces IS NOT NULL"}},
	},

	// 13: tags.
	{
		name: "fetch without a tag filter takes tagged work",
		rows: []string{"tag_filtering/default_only_fetches_untagged", "tag_filtering/tag_survives_abandon_and_refetch"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) {
				if labelled(o.Tags, pgwake.DefaultOnly()) {
					o.Tags = pgwake.AnyTag()
				}
			}}
		},
	},
	{
		name: "tag filter is ignored",
		rows: []string{"tag_filtering/tags_fetches_only_matching", "tag_filtering/multi_tag_filter", "tag_filtering/multi_runtime_tag_isolation"},
		sql:  []edit{{"asked_lists", "ELSIF p_tags IS NULL THEN", "ELSIF p_tags <> ARRAY[''] THEN"}},
	},
	{
		name: "only the first tag of a filter counts",
		rows: []string{"tag_filtering/multi_tag_filter", "tag_filtering/multi_runtime_tag_isolation"},
		sql:  []edit{{"asked_lists", "FROM space s CROSS JOIN unnest(p_tags) AS", "FROM space s CROSS JOIN unnest(p_tags[1:1]) AS"}},
	},
	{
		name: "filter with tags leaves out untagged work",
		rows: []string{"tag_filtering/default_and_fetches_untagged_and_matching", "tag_filtering/multi_runtime_tag_isolation"},
		sql:  []edit{{"pick_work", "WHERE p_namespaces IS NULL AND (p_tags IS NULL OR '' = ANY (p_tags))", "WHERE p_namespaces IS NULL AND p_tags IS NULL"}},
	},
	{
		name: "any tag leaves out tagged work",
		rows: []string{"tag_filtering/any_filter_fetches_everything", "tag_filtering/tag_round_trip_preservation"},
		sql:  []edit{{"asked_lists", "FROM work_lists(NULL, NULL) AS l WHERE", "FROM work_lists(NULL, NULL) AS l WHERE p_tags IS NOT NULL AND"}},
	},
	{
		name: "filter for no tag takes untagged work",
		rows: []string{"tag_filtering/none_filter_returns_nothing"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) {
				if labelled(o.Tags, pgwake.NoTag()) {
					o.Tags = pgwake.DefaultOnly()
				}
			}}
		},
	},
	{
		name: "tag is lost when work is abandoned",
		rows: []string{"tag_filtering/tag_survives_abandon_and_refetch"},
		sql:  []edit{{"abandon_work", "lock_token = NULL,", "lock_token = NULL, tag = '',"}},
	},
	{
		name: "tag is lost when a turn schedules work",
		rows: []string{"tag_filtering/tag_preserved_through_ack_orchestration_item"},
		sql:  []edit{{"ack_orchestration", "p_work_activities, p_work_tags, p_work_sessions", "p_work_activities, NULL::text[], p_work_sessions"}},
	},
	{
		name: "tag is changed when work is enqueued",
		rows: []string{"tag_filtering/tag_round_trip_preservation"},
		sql: []edit{{"enqueue_work_item", "coalesce(p_tag, '')", "coalesce(lower(p_tag), '')"},
			{"enqueue_work_many", "coalesce(i.tag, '')", "coalesce(lower(i.tag), '')"}},
	},

	// 14: sessions.
	{
		name: "session belongs to everybody",
		rows: []string{"sessions/session_affinity_blocks_other_worker", "sessions/concurrent_session_claim_only_one_wins",
			"sessions/mixed_session_and_non_session_items", "sessions/different_sessions_different_workers",
			"sessions/shared_worker_id_any_caller_can_fetch_owned_session", "sessions/activity_lock_expires_session_lock_valid_same_worker_refetches"},
		sql: []edit{{"lock_session", "RETURN v_session.owner = p_owner OR v_session.locked_until <= p_now;", "RETURN true;"},
			{"session_lists", "CASE WHEN s.owner <> p_owner AND s.locked_until > p_now THEN s.locked_until END", "NULL::timestamptz"}},
	},
	{
		name: "session is closed to its owner",
		rows: []string{"sessions/session_affinity_same_worker", "sessions/session_items_processed_in_order",
			"sessions/original_worker_reclaims_expired_session", "sessions/session_lock_expires_same_worker_reacquires",
			"sessions/abandoned_session_item_retryable"},
		sql: []edit{{"lock_session", "RETURN v_session.owner = p_owner OR v_session.locked_until <= p_now;", "RETURN v_session.owner <> p_owner;"}},
	},
	{
		name: "session never ends",
		rows: []string{"sessions/session_takeover_after_lock_expiry", "sessions/session_lock_expires_activity_lock_valid_ack_succeeds",
			"sessions/session_claimable_after_lock_expiry", "sessions/renew_session_lock_after_expiry_returns_zero"},
		sql: []edit{{"lock_session", "v_session.owner = p_owner OR v_session.locked_until <= p_now", "v_session.owner = p_owner"},
			{"session_lists", "s.owner <> p_owner AND s.locked_until > p_now", "s.owner <> p_owner"}},
	},
	{
		name: "session is claimed for an item that is put aside",
		rows: []string{"sessions/poisoned_item_claims_no_session"},
		sql: []edit{{"fetch_work", "v_poison := ARRAY(",
			"PERFORM claim_sessions(v_picked, p_owner, p_token, v_now, v_now + p_session_timeout); v_poison := ARRAY("}},
	},
	{
		name: "session that another took over stays with the first",
		rows: []string{"sessions/session_takeover_after_lock_expiry", "sessions/session_lock_expires_new_owner_gets_redelivery",
			"sessions/both_locks_expire_different_worker_claims"},
		sql: []edit{{"claim_sessions", "SET owner = p_owner, last_activity_at", "SET last_activity_at"}},
	},
	{
		name: "fetch without an owner takes the work of sessions",
		rows: []string{"sessions/none_session_skips_session_items"},
		sql: []edit{{"pick_work", "q.session_id IS NULL AND q.visible_at <= p_now\n                    ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR",
			"q.visible_at <= p_now\n                    ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR"},
			{"fetch_work", "d.session_id IS NULL AND ", ""}},
	},
	{
		name: "fetch with an owner takes only the work of sessions",
		rows: []string{"sessions/non_session_items_returned_with_session_config", "sessions/some_session_returns_all_items",
			"sessions/mixed_session_and_non_session_items", "sessions/non_session_items_fetchable_by_any_worker"},
		sql: []edit{{"pick_work", "WHERE p_namespaces IS NULL AND (p_tags IS NULL OR '' = ANY (p_tags))",
			"WHERE p_owner IS NULL AND p_namespaces IS NULL AND (p_tags IS NULL OR '' = ANY (p_tags))"}},
	},
	{
		name: "session is lost when work is enqueued",
		rows: []string{"sessions/session_item_claimable_when_no_session", "sessions/none_session_skips_session_items"},
		sql: []edit{{"enqueue_work_item", "coalesce(p_tag, ''), p_session", "coalesce(p_tag, ''), NULL"},
			{"enqueue_work_many", "coalesce(i.tag, ''), i.session_id", "coalesce(i.tag, ''), NULL::text"}},
	},
	{
		name: "work of a session comes in the wrong order",
		rows: []string{"sessions/session_items_processed_in_order", "sessions/some_session_returns_all_items"},
		sql:  []edit{{"pick_work", "ORDER BY c.priority DESC, c.visible_at, c.id", "ORDER BY c.priority DESC, c.visible_at DESC, c.id DESC"}},
	},
	{
		name: "renewal revives a session that has ended",
		rows: []string{"sessions/renew_session_lock_after_expiry_returns_zero"},
		sql:  []edit{{"renew_sessions", "AND r.locked_until > clock_timestamp() AND", "AND"}, {"renew_sessions", " AND s.locked_until > clock_timestamp());", ");"}},
	},
	{
		name: "renewal keeps idle sessions",
		rows: []string{"sessions/renew_session_lock_skips_idle", "sessions/ack_updates_session_last_activity", "sessions/renew_work_item_updates_session_last_activity"},
		sql:  []edit{{"renew_sessions", "AND r.last_activity_at > clock_timestamp() - p_idle", ""}},
	},
	{
		name: "renewal of sessions extends nothing",
		rows: []string{"sessions/session_lock_renewal_extends_past_original_timeout"},
		sql:  []edit{{"renew_sessions", "SET locked_until = v_until", "SET locked_until = s.locked_until"}},
	},
	{
		name: "renewal of sessions is for all owners",
		rows: []string{"sessions/renew_session_lock_active"},
		sql:  []edit{{"renew_sessions", "r.owner = ANY (p_owners) AND", ""}, {"renew_sessions", "s.owner = ANY (p_owners) AND", ""}},
	},
	{
		name: "renewal of sessions counts one",
		rows: []string{"sessions/renew_session_lock_active"},
		sql:  []edit{{"renew_sessions", "QUERY SELECT v_renewed,", "QUERY SELECT least(v_renewed, 1),"}},
	},
	{
		name: "renewal of sessions counts one too many",
		rows: []string{"sessions/renew_session_lock_no_sessions"},
		sql:  []edit{{"renew_sessions", "QUERY SELECT v_renewed,", "QUERY SELECT v_renewed + 1,"}},
	},
	{
		name: "ack and renewal of work are no activity of its session",
		rows: []string{"sessions/ack_updates_session_last_activity", "sessions/renew_work_item_updates_session_last_activity"},
		sql: []edit{{"touch_sessions", "WHERE s.session_id = ANY (ARRAY[touched.id])", "WHERE false"},
			{"renew_work", "WHERE s.session_id = ANY (ARRAY[touched.session_id])", "WHERE false"}},
	},
	{
		name: "cleanup removes sessions with work",
		rows: []string{"sessions/cleanup_keeps_sessions_with_pending_items"},
		sql:  []edit{{"cleanup_sessions", "AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = r.session_id OFFSET 0)", ""}},
	},
	{
		name: "cleanup takes claimed work for none",
		rows: []string{"sessions/cleanup_keeps_sessions_with_pending_items"},
		sql:  []edit{{"cleanup_sessions", "WHERE q.session_id = r.session_id OFFSET 0)", "WHERE q.session_id = r.session_id AND q.visible_at <= clock_timestamp())"}},
	},
	{
		name: "cleanup removes sessions that have not ended",
		rows: []string{"sessions/cleanup_keeps_active_sessions"},
		sql:  []edit{{"cleanup_sessions", "r.locked_until <= clock_timestamp()", "true"}},
	},
	{
		name: "cleanup removes nothing",
		rows: []string{"sessions/cleanup_removes_expired_no_items", "sessions/cleanup_then_new_item_recreates_session"},
		sql:  []edit{{"cleanup_sessions", "r.locked_until <= clock_timestamp()", "false"}},
	},

	{
		name: "work that was not begun goes to the end",
		rows: []string{"pgwake/work_that_was_not_begun_keeps_its_place"},
		sql:  []edit{{"abandon_work", "WHEN p_due_at < v_now AND", "WHEN false AND"}},
	},
	{
		name: "release leaves sessions as they are",
		rows: []string{"sessions/released_session_is_anybody_s", "sessions/release_of_a_session_wakes_whoever_waits"},
		sql:  []edit{{"release_sessions", "v_now      timestamptz := clock_timestamp();", "v_now      timestamptz := 'infinity';"}},
	},
	{
		name: "release is of the sessions of all owners",
		rows: []string{"sessions/released_session_is_anybody_s"},
		sql:  []edit{{"release_sessions", "s.owner = ANY (p_owners) AND s.locked_until > v_now);", "s.locked_until > v_now);"}, {"release_sessions", "s.session_id = ANY (v_owned) AND s.owner = ANY (p_owners) AND", "s.session_id = ANY (v_owned) AND"}},
	},
	{
		name: "release takes sessions of which an item is leased",
		rows: []string{"sessions/release_leaves_a_session_of_which_an_item_is_leased"},
		sql: []edit{{"release_sessions", "           AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = s.session_id AND q.visible_at > v_now AND q.lock_token IS NOT NULL OFFSET 0)\n         ORDER", "         ORDER"},
			{"release_sessions", "       AND NOT EXISTS (SELECT FROM worker_queue q WHERE q.session_id = s.session_id AND q.visible_at > v_now AND q.lock_token IS NOT NULL OFFSET 0);", ";"}},
	},
	{
		name: "release of sessions tells nobody",
		rows: append(inBothTx("release_of_sessions"), "sessions/release_of_a_session_wakes_whoever_waits"),
		sql:  []edit{{"release_sessions", "PERFORM notify_queue('worker', v_released, NULL);", ""}},
	},

	// 15: custom status.
	{
		name: "custom status is not stored",
		rows: []string{"custom_status/custom_status_set", "custom_status/custom_status_polling_no_change", "custom_status/custom_status_none_preserves"},
		sql:  []edit{{"apply_custom_status", "SET custom_status = CASE WHEN NOT p_clear THEN p_value END,", "SET custom_status = '',"}},
	},
	{
		name: "version of the custom status does not count clearing",
		rows: []string{"custom_status/custom_status_clear", "custom_status/custom_status_version_increments"},
		sql:  []edit{{"apply_custom_status", "i.custom_status_version + 1", "i.custom_status_version + (NOT p_clear)::integer"}},
	},
	{
		name: "version of the custom status counts once",
		rows: []string{"custom_status/custom_status_version_increments"},
		sql:  []edit{{"apply_custom_status", "i.custom_status_version + 1", "1"}},
	},
	{
		name: "clearing keeps the custom status",
		rows: []string{"custom_status/custom_status_clear", "custom_status/custom_status_version_increments"},
		sql:  []edit{{"apply_custom_status", "CASE WHEN NOT p_clear THEN p_value END", "coalesce(p_value, i.custom_status)"}},
	},
	{
		name: "ack without a custom status clears it",
		rows: []string{"custom_status/custom_status_none_preserves"},
		sql: []edit{{"ack_orchestration", "    IF p_custom_status IS NOT NULL OR p_clear_custom_status THEN\n        PERFORM apply_custom_status(p_instance, p_clear_custom_status, p_custom_status, p_quiet);",
			"    IF v_known.instance_id IS NOT NULL THEN\n        PERFORM apply_custom_status(p_instance, p_custom_status IS NULL, p_custom_status);"}},
	},
	{
		name: "custom status comes to those who have seen it",
		rows: []string{"custom_status/custom_status_polling_no_change", "custom_status/custom_status_default_on_new_instance"},
		sql:  []edit{{"get_custom_status", "i.custom_status_version > p_last_seen", "i.custom_status_version >= p_last_seen"}},
	},
	{
		name: "custom status of an unknown instance is one",
		rows: []string{"custom_status/custom_status_nonexistent_instance"},
		sql:  []edit{{"get_custom_status", "i.custom_status_version > p_last_seen;", "i.custom_status_version > p_last_seen UNION ALL SELECT '', 1::bigint WHERE NOT EXISTS (SELECT FROM instances j WHERE j.instance_id = p_instance);"}},
	},
	{
		name: "changes of instances are told nobody",
		rows: []string{"pgwake/other_node_wait_for_status_ends_with_the_change", "pgwake/other_node_wait_for_instance_ends_with_its_outcome"},
		sql:  []edit{{"notify_queues", "FROM unnest(p_instances)", "FROM unnest('{}'::text[])"}},
	},
	{
		name: "wait for a custom status ends without a new one",
		rows: []string{"pgwake/wait_for_status_ends_with_the_change"},
		sql: []edit{{"look_at_instances", "i.custom_status_version > asked.last_seen, x", "i.custom_status_version >= asked.last_seen, x"},
			{"look_at_instances", "OR i.custom_status_version > asked.last_seen OR", "OR i.custom_status_version >= asked.last_seen OR"}},
	},
	{
		name: "wait for an instance ends when that continues as new",
		rows: []string{"pgwake/wait_for_instance_ends_with_its_outcome", "pgwake/other_node_wait_for_instance_ends_with_its_outcome"},
		sql:  []edit{{"look_at_instances", "x.status IN ('Completed',", "x.status IN ('ContinuedAsNew', 'Completed',"}},
	},

	// 16: key-value pairs.
	{
		name: "turn sees the pairs of its own execution",
		rows: []string{"kv_store/kv_delta_snapshot_excludes_current_execution", "kv_store/kv_snapshot_cross_execution", "kv_store/kv_delta_tombstone_overrides_store"},
		sql: []edit{{"kv_snapshot", "json_object_agg(s.key, s.value ORDER BY s.key), '{}') FROM kv_store s WHERE s.instance_id = p_instance);",
			"json_object_agg(s.key, s.value ORDER BY s.key), '{}') FROM list_kv(p_instance) s);"}},
	},
	{
		name: "turn sees a pair that nobody wrote",
		rows: []string{"kv_store/kv_snapshot_empty", "kv_store/kv_snapshot_after_clear_all"},
		sql:  []edit{{"kv_snapshot", "'{}'", `'{"x": ""}'`}},
	},
	{
		name: "turn sees no pairs",
		rows: []string{"kv_store/kv_snapshot_in_fetch", "kv_store/kv_delta_snapshot_includes_completed_execution", "kv_store/kv_prune_preserves_all_keys"},
		sql:  []edit{{"kv_snapshot", "WHERE s.instance_id = p_instance", "WHERE false"}},
	},
	{
		name: "turn sees the pairs of other instances",
		rows: []string{"kv_store/kv_instance_isolation"},
		sql: []edit{{"kv_snapshot", "SELECT coalesce(json_object_agg(s.key, s.value ORDER BY s.key), '{}') FROM kv_store s WHERE s.instance_id = p_instance",
			"SELECT coalesce(json_object_agg(s.key, s.value ORDER BY s.key), '{}') FROM kv_store s"}},
	},
	{
		name: "client does not see what was written now",
		rows: []string{"kv_store/kv_set_and_get", "kv_store/kv_overwrite", "kv_store/kv_delta_client_reads_merged", "kv_store/kv_cross_execution_overwrite",
			"kv_store/kv_special_chars_in_key", "kv_store/kv_empty_value"},
		sql: []edit{{"get_kv", "CASE WHEN d.key IS NULL THEN s.value ELSE d.value END", "s.value"}},
	},
	{
		name: "client does not see what earlier executions left",
		rows: []string{"kv_store/kv_delta_client_reads_merged", "kv_store/kv_execution_id_tracking", "kv_store/kv_delta_merged_on_completion"},
		sql:  []edit{{"get_kv", "CASE WHEN d.key IS NULL THEN s.value ELSE d.value END", "d.value"}},
	},
	{
		name: "tombstone is lost for a client",
		rows: []string{"kv_store/kv_delta_tombstone_overrides_store", "kv_store/kv_delta_clear_all_tombstones_store", "kv_store/kv_cross_execution_remove_readd"},
		sql:  []edit{{"get_kv", "CASE WHEN d.key IS NULL THEN s.value ELSE d.value END", "coalesce(d.value, s.value)"}},
	},
	{
		name: "tombstone is lost at the merge",
		rows: []string{"kv_store/kv_cross_execution_remove_readd", "kv_store/kv_snapshot_after_clear_single", "kv_store/kv_snapshot_after_clear_all"},
		sql:  []edit{{"merge_kv", "s.key = ANY (v_cleared)", "false"}},
	},
	{
		name: "list of pairs shows what was cleared",
		rows: []string{"kv_store/kv_delta_tombstone_overrides_store", "kv_store/kv_clear_isolation"},
		sql:  []edit{{"list_kv", "WHERE d.instance_id = p_instance AND d.key = s.key OFFSET 0)", "WHERE d.instance_id = p_instance AND d.key = s.key AND d.value IS NOT NULL)"}},
	},
	{
		name: "pairs are not merged at completion",
		rows: []string{"kv_store/kv_delta_merged_on_completion", "kv_store/kv_snapshot_in_fetch", "kv_store/kv_delta_merged_on_can"},
		sql:  []edit{{"ack_orchestration", "IF p_status <> 'Running' THEN\n        PERFORM merge_kv(p_instance);", "IF false THEN\n        PERFORM merge_kv(p_instance);"}},
	},
	{
		name: "pairs are merged before the writes of the last turn",
		rows: []string{"kv_store/kv_delta_merged_on_completion", "kv_store/kv_delta_merged_on_can"},
		sql: []edit{{"ack_orchestration", "IF p_status <> 'Running' THEN\n        PERFORM merge_kv(p_instance);", "IF false THEN\n        PERFORM merge_kv(p_instance);"},
			{"ack_orchestration", "IF v_before.current_execution < p_execution THEN", "IF v_before.current_execution < p_execution OR p_status <> 'Running' THEN"}},
	},
	{
		name: "pairs are merged with every turn",
		rows: []string{"kv_store/kv_delta_snapshot_excludes_current_execution", "kv_store/kv_delta_merged_on_can", "kv_store/kv_delta_prune_untouched_key_survives"},
		sql:  []edit{{"ack_orchestration", "IF p_status <> 'Running' THEN\n        PERFORM merge_kv(p_instance);", "IF true THEN\n        PERFORM merge_kv(p_instance);"}},
	},
	{
		name: "merge loses the pairs that were not written again",
		rows: []string{"kv_store/kv_delta_prune_untouched_key_survives", "kv_store/kv_execution_id_tracking"},
		sql:  []edit{{"merge_kv", "s.key = ANY (v_cleared)", "NOT EXISTS (SELECT FROM taken t WHERE t.key = s.key)"}},
	},
	{
		name: "clearing a key does nothing",
		rows: []string{"kv_store/kv_clear_single", "kv_store/kv_snapshot_after_clear_single"},
		sql:  []edit{{"apply_kv", "WHERE u.ord > v_cleared", "WHERE u.ord > v_cleared AND u.op <> 'clear'"}},
	},
	{
		name: "clearing a key that is not there is an error",
		rows: []string{"kv_store/kv_clear_nonexistent_key"},
		sql: []edit{{"apply_kv", "    IF v_cleared > 0 THEN", `    IF EXISTS (SELECT FROM unnest(p_ops, p_keys) AS u (op, key) WHERE u.op = 'clear' AND get_kv(p_instance, u.key) IS NULL) THEN
        RAISE EXCEPTION 'no such key' USING ERRCODE = 'PW002';
    END IF;
    IF v_cleared > 0 THEN`}},
	},
	{
		name: "clearing all clears what was stored before only",
		rows: []string{"kv_store/kv_clear_all", "kv_store/kv_set_after_clear", "kv_store/kv_snapshot_after_clear_all"},
		sql:  []edit{{"apply_kv", "DELETE FROM kv_delta d WHERE d.instance_id = p_instance;", ""}, {"apply_kv", "FROM kv_store s WHERE s.instance_id = p_instance;", "FROM kv_store s WHERE s.instance_id = p_instance ON CONFLICT DO NOTHING;"}},
	},
	{
		name: "clearing all leaves what was stored before",
		rows: []string{"kv_store/kv_delta_clear_all_tombstones_store"},
		sql:  []edit{{"apply_kv", "FROM kv_store s WHERE s.instance_id = p_instance;", "FROM kv_store s WHERE false;"}},
	},
	{
		name: "clearing all clears other instances",
		rows: []string{"kv_store/kv_clear_isolation"},
		sql:  []edit{{"apply_kv", "DELETE FROM kv_delta d WHERE d.instance_id = p_instance;", "DELETE FROM kv_delta d;"}},
	},
	{
		name: "clearing all comes after the writes",
		rows: []string{"kv_store/kv_set_after_clear"},
		sql:  []edit{{"apply_kv", "WHERE u.ord > v_cleared\n", "WHERE v_cleared = 0\n"}},
	},
	{
		name: "first write of a key counts",
		rows: []string{"kv_store/kv_overwrite"},
		sql:  []edit{{"apply_kv", "ORDER BY u.key, u.ord DESC", "ORDER BY u.key, u.ord"}},
	},
	{
		name: "empty value is none",
		rows: []string{"kv_store/kv_empty_value"},
		sql:  []edit{{"apply_kv", "CASE u.op WHEN 'set' THEN u.value END", "CASE u.op WHEN 'set' THEN nullif(u.value, '') END"}},
	},
	{
		name: "large value is cut off",
		rows: []string{"kv_store/kv_large_value"},
		sql:  []edit{{"apply_kv", "CASE u.op WHEN 'set' THEN u.value END", "CASE u.op WHEN 'set' THEN left(u.value, 65000) END"}},
	},
	{
		name: "key is changed",
		rows: []string{"kv_store/kv_special_chars_in_key"},
		sql:  []edit{{"apply_kv", "p_instance, u.key, CASE", "p_instance, btrim(u.key), CASE"}},
	},
	{
		name: "key is looked for without its case",
		rows: []string{"kv_store/kv_get_nonexistent"},
		sql:  []edit{{"get_kv", "d.key = asked.key", "lower(d.key) = lower(asked.key)"}},
	},
	{
		name: "pairs of other instances are seen",
		rows: []string{"kv_store/kv_instance_isolation"},
		sql:  []edit{{"list_kv", "WHERE d.instance_id = p_instance AND d.value IS NOT NULL", "WHERE d.value IS NOT NULL"}},
	},
	{
		name: "pairs of an unknown instance are an error",
		rows: []string{"kv_store/kv_get_unknown_instance"},
		sql: []edit{{"get_kv", "BEGIN\n", `BEGIN
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN
        RAISE EXCEPTION 'there is no instance %', p_instance USING ERRCODE = 'PW002';
    END IF;
`}},
	},
	{
		name: "prune takes the pairs of the executions with it",
		rows: []string{"kv_store/kv_prune_preserves_all_keys", "kv_store/kv_execution_id_tracking", "kv_store/kv_delta_prune_untouched_key_survives"},
		sql: []edit{{"prune", "), gone AS (", `), pairs AS (
        DELETE FROM kv_store k USING doomed d WHERE k.instance_id = d.instance_id AND k.execution_id = d.execution_id RETURNING 1
    ), gone AS (`}},
	},
	{
		name: "prune takes all pairs with it",
		rows: []string{"kv_store/kv_prune_preserves_overwritten", "kv_store/kv_prune_current_execution_protected"},
		sql:  []edit{{"prune_executions", "    RETURN QUERY", "    DELETE FROM kv_store k WHERE k.instance_id = p_instance; DELETE FROM kv_delta k WHERE k.instance_id = p_instance;\n    RETURN QUERY"}},
	},
	{
		name: "deletion leaves what was stored",
		rows: []string{"kv_store/kv_delete_instance_with_children", "kv_store/kv_delete_instance_cascades"},
		sql:  []edit{{"remove_instances", "DELETE FROM kv_store k WHERE k.instance_id = ANY (p_instances);", ""}},
	},
	{
		name: "deletion leaves what was written and not merged",
		rows: []string{"kv_store/kv_delta_delete_instance_cascades", "kv_store/kv_delete_instance_with_children", "deletion/delete_cleans_queues_and_locks"},
		sql:  []edit{{"remove_instances", "DELETE FROM kv_delta k WHERE k.instance_id = ANY (p_instances);", ""}},
	},

	// 17: orphans.
	{
		name: "message for nobody is kept",
		rows: []string{"queue_semantics/orphan_queue_messages_dropped"},
		sql:  []edit{{"lock_due_instance", "<= p_now AND q.kind = 'queue_message')", "<= p_now AND false)"}},
	},
	{
		name: "message for a known instance is dropped",
		rows: []string{"queue_semantics/orphan_queue_messages_dropped"},
		sql: []edit{{"lock_due_instance", "IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance)", "IF true"},
			{"lock_due_instance", "AND NOT EXISTS (SELECT FROM history h WHERE h.instance_id = p_instance)", ""}},
	},
	{
		name: "message for an instance that is opened now is dropped",
		rows: []string{"queue_semantics/orphan_queue_messages_dropped"},
		sql:  []edit{{"lock_due_instance", "AND q.kind IN ('start', 'continue_as_new')", "AND false"}},
	},

	// 18: management, deletion and pruning.
	{
		name: "list of instances ignores the status",
		rows: []string{"management/list_instances_by_status"},
		sql:  []edit{{"pick_instances", "x.status = p_status AND", ""}},
	},
	{
		name: "list of instances does not go on after one",
		rows: []string{"management/list_instances"},
		sql:  []edit{{"pick_instances", "i.instance_id > coalesce(p_after, '')", "true"}},
	},
	{
		name: "info of an unknown instance is no error",
		rows: []string{"management/get_instance_info", "deletion/delete_terminal_instances"},
		verb: func(n node) providertest.Provider { return knowsAll{n} },
	},
	{
		name: "list of executions shows the current one only",
		rows: []string{"management/list_executions", "prune/prune_options_combinations"},
		sql: []edit{{"list_executions", "WHERE x.instance_id = p_instance AND",
			"WHERE x.instance_id = p_instance AND (p_execution IS NOT NULL OR x.execution_id = (SELECT i.current_execution FROM instances i WHERE i.instance_id = p_instance)) AND"}},
	},
	{
		name: "output of an execution is lost",
		rows: []string{"management/get_execution_info", "pgwake/wait_for_instance_ends_with_its_outcome"},
		sql: []edit{{"ack_orchestration", "output = coalesce(p_output, x.output)", "output = x.output"},
			{"ack_orchestration", "coalesce(p_status, 'Running'), p_output,", "coalesce(p_status, 'Running'), NULL,"}},
	},
	{
		name: "metrics do not grow",
		rows: []string{"management/get_system_metrics"},
		sql:  []edit{{"system_metrics", "count(*) FROM history", "0::bigint"}},
	},
	{
		name: "depth of the queue of messages does not grow",
		rows: []string{"management/get_queue_depths"},
		sql:  []edit{{"queue_depths", "FROM orchestrator_queue m)", "FROM orchestrator_queue m WHERE false)"}},
	},
	{
		name: "running instance is deleted without force",
		rows: []string{"deletion/delete_running_rejected_force_succeeds", "deletion/delete_instances_atomic_force"},
		sql:  []edit{{"check_deletion", "i.status IN ('Running', 'ContinuedAsNew') AND NOT p_force", "false"}},
	},
	{
		name: "running instance is not deleted with force",
		rows: []string{"deletion/delete_running_rejected_force_succeeds", "deletion/delete_instances_atomic_force"},
		sql:  []edit{{"check_deletion", "i.status IN ('Running', 'ContinuedAsNew') AND NOT p_force", "i.status IN ('Running', 'ContinuedAsNew')"}},
	},
	{
		name: "instance between two executions is deleted without force",
		rows: []string{"deletion/delete_between_executions_needs_force"},
		sql:  []edit{{"check_deletion", "i.status IN ('Running', 'ContinuedAsNew')", "i.status = 'Running'"}},
	},
	{
		name: "bulk deletion takes instances between two executions",
		rows: []string{"bulk_deletion/delete_instance_bulk_skips_what_is_between_executions"},
		sql: []edit{{"delete_instances_bulk", "AND x.status IN ('Completed', 'Failed', 'Cancelled')", ""},
			{"delete_instances_bulk", "m.status IN ('Running', 'ContinuedAsNew')", "m.status = 'Running'"},
			{"delete_instances_bulk", "going.status IN ('Running', 'ContinuedAsNew')", "going.status = 'Running'"}},
	},
	{
		name: "wait outlives the instance",
		rows: []string{"pgwake/wait_ends_with_the_instance", "pgwake/other_node_wait_ends_with_the_instance"},
		sql: []edit{{"look_at_instances", "asked.ord::integer, i.incarnation,", "asked.ord::integer, i.incarnation * 0 + 1,"},
			{"remove_instances", "PERFORM notify_instance(gone.id) FROM unnest(p_instances) AS gone (id);", ""}},
	},
	{
		name: "activity 0 is none",
		rows: []string{"cancellation/cancelled_activity_may_have_the_id_0"},
		sql: []edit{{"enqueue_work_item", "p_instance, p_execution, p_activity,", "p_instance, p_execution, nullif(p_activity, 0),"},
			{"enqueue_work_many", "i.instance_id, i.execution_id, i.activity_id,", "i.instance_id, i.execution_id, nullif(i.activity_id, 0),"}},
	},
	{
		name: "unknown instance is deleted",
		rows: []string{"deletion/delete_nonexistent_instance"},
		sql:  []edit{{"check_deletion", "WHERE NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = asked.id OFFSET 0) LIMIT 1;", "WHERE false LIMIT 1;"}},
	},
	{
		name: "child is deleted alone",
		rows: []string{"deletion/cascade_delete_hierarchy"},
		sql:  []edit{{"check_deletion", "WHERE r.instance_id = above.parent_id OFFSET 0) p LIMIT 1;", "WHERE r.instance_id = above.parent_id OFFSET 0) p LIMIT 0;"}},
	},
	{
		name: "child is deleted alone with force",
		rows: []string{"deletion/cascade_delete_hierarchy"},
		sql:  []edit{{"check_deletion", "WHERE r.instance_id = above.parent_id OFFSET 0) p LIMIT 1;", "WHERE r.instance_id = above.parent_id AND NOT p_force OFFSET 0) p LIMIT 1;"}},
	},
	{
		name: "parent is deleted without its child",
		rows: []string{"deletion/delete_instances_atomic_orphan_detection"},
		sql:  []edit{{"check_deletion", "EXCEPT SELECT unnest(p_instances) LIMIT 1;", "EXCEPT SELECT unnest(p_instances) LIMIT 0;"}},
	},
	{
		name: "deletion of several is not one",
		rows: []string{"deletion/delete_instances_atomic_force", "deletion/delete_instances_atomic_orphan_detection"},
		verb: func(n node) providertest.Provider { return oneByOne{n} },
	},
	{
		name: "tree ends with the children",
		rows: []string{"deletion/delete_get_instance_tree", "deletion/cascade_delete_hierarchy"},
		sql:  []edit{{"instance_trees", "WHERE c.parent_id = above.id OFFSET 0", "WHERE c.parent_id = above.id AND v_seen_ids = p_roots OFFSET 0"}},
	},
	{
		name: "children are all descendants",
		rows: []string{"deletion/list_children"},
		sql: []edit{{"list_children", "WHERE i.parent_id = p_instance ORDER",
			"WHERE i.instance_id <> p_instance AND i.instance_id IN (SELECT t.instance_id FROM instance_trees(ARRAY[p_instance]) t) ORDER"}},
	},
	{
		name: "parent of an unknown instance is no error",
		rows: []string{"deletion/delete_get_parent_id"},
		sql:  []edit{{"get_parent", "IF NOT FOUND THEN", "IF false THEN"}},
	},
	{
		name: "deletion leaves the history",
		rows: []string{"deletion/delete_terminal_instances", "deletion/delete_cleans_queues_and_locks", "deletion/stale_activity_after_delete_recreate"},
		sql:  []edit{{"remove_instances", "DELETE FROM history h WHERE h.instance_id = ANY (p_instances);", "PERFORM FROM history h WHERE h.instance_id = ANY (p_instances);"}},
	},
	{
		name: "deletion leaves the messages",
		rows: []string{"deletion/delete_cleans_queues_and_locks"},
		sql:  []edit{{"remove_instances", "DELETE FROM orchestrator_queue q WHERE q.instance_id = ANY (p_instances);", "PERFORM FROM orchestrator_queue q WHERE q.instance_id = ANY (p_instances);"}},
	},
	{
		name: "deletion leaves the work",
		rows: []string{"deletion/delete_cleans_queues_and_locks", "deletion/stale_activity_after_delete_recreate", "deletion/delete_instances_atomic"},
		sql:  []edit{{"remove_instances", "queue_items := remove_work(v_work);", "queue_items := cardinality(v_work);"}},
	},
	{
		name: "deletion leaves the lock",
		rows: []string{"deletion/delete_cleans_queues_and_locks", "deletion/force_delete_prevents_ack_recreation"},
		sql:  []edit{{"remove_instances", "DELETE FROM instance_locks l WHERE l.instance_id = ANY (p_instances);", ""}},
	},
	{
		name: "deletion leaves an activity in hand that nobody can finish",
		rows: []string{"cancellation/orphan_activity_after_instance_force_deletion"},
		sql:  []edit{{"remove_instances", "queue_items := remove_work(v_work);", "queue_items := cardinality(v_work); UPDATE worker_queue q SET lock_token = gen_random_uuid(), visible_at = clock_timestamp(), instance_id = 'i' WHERE q.id = ANY (v_work); INSERT INTO orchestrator_queue (instance_id, kind, namespace, visible_at) VALUES ('i', 'stale', 'default', clock_timestamp());"}},
	},
	{
		name: "deletion counts what it did not delete",
		rows: []string{"deletion/delete_terminal_instances", "deletion/delete_instances_atomic"},
		sql:  []edit{{"remove_instances", "GET DIAGNOSTICS events = ROW_COUNT;", "events := 0;"}},
	},
	{
		name: "bulk deletion takes running instances",
		rows: []string{"bulk_deletion/delete_instance_bulk_safety_and_limits", "bulk_deletion/delete_instance_bulk_filter_combinations"},
		sql: []edit{{"delete_instances_bulk", "AND x.status IN ('Completed', 'Failed', 'Cancelled')", ""},
			{"delete_instances_bulk", "x.completed_at < coalesce(p_completed_before, 'infinity')", "coalesce(x.completed_at, '-infinity') < coalesce(p_completed_before, 'infinity')"},
			{"delete_instances_bulk", "m.status IN ('Running', 'ContinuedAsNew')", "false"},
			{"delete_instances_bulk", "going.status IN ('Running', 'ContinuedAsNew')", "false"}},
	},
	{
		name: "bulk deletion has no limit",
		rows: []string{"bulk_deletion/delete_instance_bulk_safety_and_limits"},
		sql:  []edit{{"delete_instances_bulk", "LIMIT p_limit", ""}},
	},
	{
		name: "bulk deletion ignores the ids",
		rows: []string{"bulk_deletion/delete_instance_bulk_filter_combinations"},
		verb: func(n node) providertest.Provider {
			return bulk{n, func(f *pgwake.BulkFilter) { f.Instances = nil }}
		},
	},
	{
		name: "bulk deletion with ids ignores the time",
		rows: []string{"bulk_deletion/delete_instance_bulk_completed_before_filter"},
		verb: func(n node) providertest.Provider {
			return bulk{n, func(f *pgwake.BulkFilter) {
				if f.Instances != nil {
					f.CompletedBefore = time.Time{}
				}
			}}
		},
	},
	{
		name: "bulk deletion takes children",
		rows: []string{"bulk_deletion/delete_instance_bulk_cascades_to_children"},
		sql:  []edit{{"delete_instances_bulk", "AND NOT EXISTS (SELECT FROM instances p WHERE p.instance_id = i.parent_id OFFSET 0)", ""}},
	},
	{
		name: "bulk deletion leaves children",
		rows: []string{"bulk_deletion/delete_instance_bulk_cascades_to_children"},
		sql:  []edit{{"delete_instances_bulk", "v_going := ARRAY(SELECT DISTINCT t.instance_id FROM instance_trees(v_roots) t);", "v_going := v_roots;"}},
	},
	{
		name: "prune takes the current execution",
		rows: []string{"prune/prune_safety"},
		sql: []edit{{"prunable_executions", "AND x.execution_id <> (SELECT i.current_execution FROM instances i WHERE i.instance_id = p_instance)", ""},
			{"prunable_executions", "OFFSET greatest(p_keep_last, 1) - 1 LIMIT 1)", "OFFSET greatest(p_keep_last, 1) - 1 LIMIT 1) + 1"}},
	},
	{
		name: "prune keeps one more",
		rows: []string{"prune/prune_options_combinations", "prune/prune_safety"},
		sql:  []edit{{"prunable_executions", "OFFSET greatest(p_keep_last, 1) - 1", "OFFSET greatest(p_keep_last, 1)"}},
	},
	{
		name: "prune ignores how many to keep",
		rows: []string{"prune/prune_options_combinations", "prune/prune_bulk", "kv_store/kv_execution_id_tracking"},
		sql:  []edit{{"prunable_executions", "OFFSET greatest(p_keep_last, 1) - 1", "OFFSET 0"}},
	},
	{
		name: "prune ignores the time",
		rows: []string{"prune/prune_options_combinations"},
		sql:  []edit{{"prunable_executions", "AND (p_completed_before IS NULL OR x.completed_at < p_completed_before)", ""}},
	},
	{
		name: "prune takes either criterion",
		rows: []string{"prune/prune_options_combinations"},
		verb: func(n node) providertest.Provider { return prunesEither{n} },
	},
	{
		name: "prune of an unknown instance is no error",
		rows: []string{"prune/prune_safety"},
		sql:  []edit{{"prune_executions", "IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_instance) THEN", "IF false THEN"}},
	},
	{
		name: "prune leaves the history",
		rows: []string{"prune/prune_options_combinations"},
		sql:  []edit{{"prune", "DELETE FROM history h USING doomed d\n         WHERE h", "DELETE FROM history h USING doomed d\n         WHERE false AND h"}},
	},
	{
		name: "bulk prune ignores the ids",
		rows: []string{"prune/prune_bulk"},
		sql:  []edit{{"prune_executions_bulk", "IF p_instances IS NULL THEN", "IF true THEN"}},
	},
	{
		name: "bulk prune passes over running instances",
		rows: []string{"prune/prune_bulk_includes_running_instances"},
		sql: []edit{{"prune_executions_bulk", "AND EXISTS (SELECT FROM prunable_executions(",
			"AND EXISTS (SELECT FROM instance_info r WHERE r.instance_id = i.instance_id AND r.status <> 'Running') AND EXISTS (SELECT FROM prunable_executions("}},
	},

	// 19: long polling.
	{
		name: "fetch does not wait",
		rows: []string{"long_polling/long_poll_waits_for_timeout", "long_polling/long_poll_work_item_waits_for_timeout",
			"pgwake/wake_when_work_is_enqueued", "pgwake/wake_when_message_is_sent"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { o.PollTimeout, o.NoWait = 0, true }}
		},
	},
	{
		name: "fetch gives up early",
		rows: []string{"long_polling/long_poll_waits_for_timeout", "long_polling/long_poll_work_item_waits_for_timeout",
			"pgwake/long_poll_of_work_never_ends_early", "pgwake/long_poll_of_turns_never_ends_early"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { o.PollTimeout = o.PollTimeout * 4 / 10 }}
		},
	},
	{
		name: "fetch takes too long",
		rows: []string{"long_polling/fetch_respects_timeout_upper_bound", "long_polling/short_poll_returns_immediately", "long_polling/short_poll_work_item_returns_immediately"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { time.Sleep(300 * time.Millisecond) }}
		},
	},
	{
		name: "fetch that waits takes too long",
		rows: []string{"pgwake/long_poll_of_work_ends_soon_after_its_timeout", "pgwake/long_poll_of_turns_ends_soon_after_its_timeout",
			"long_polling/fetch_respects_timeout_upper_bound"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) {
				if !o.NoWait {
					o.PollTimeout += 400 * time.Millisecond
				}
			}}
		},
	},
	{
		name: "fetch that waits ignores its context",
		rows: []string{"pgwake/long_poll_ends_with_its_context"},
		verb: func(n node) providertest.Provider { return deafToContext{n} },
	},

	// The wake-ups.
	{
		name: "nodes are not told of work that is due",
		rows: []string{"pgwake/other_node_wakes_when_work_is_enqueued", "pgwake/other_node_wakes_when_work_is_abandoned",
			"pgwake/other_node_wakes_when_turn_schedules_work", "pgwake/other_node_wakes_when_work_is_redriven",
			"pgwake/tx_enqueue_of_work", "pgwake/tx_turn_schedules_work"},
		sql: []edit{{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'worker' AND p_due > 0 THEN RETURN; END IF;\n"},
			{"wake", "BEGIN\n", "BEGIN\n    IF p_queue = 'worker' THEN RETURN; END IF;\n"}},
	},
	{
		name: "nodes are not told of messages that are due",
		rows: []string{"pgwake/other_node_wakes_when_message_is_sent", "pgwake/other_node_wakes_when_turn_is_abandoned",
			"pgwake/other_node_wakes_when_completion_is_sent", "pgwake/other_node_wakes_when_turn_sends_message",
			"pgwake/other_node_wakes_when_ack_frees_instance_with_held_message", "pgwake/other_node_wakes_when_message_is_redriven",
			"pgwake/other_node_wakes_when_abandon_frees_instance_with_held_message",
			"pgwake/other_node_wakes_when_dead_letter_frees_instance_with_held_message",
			"pgwake/tx_enqueue_of_message", "pgwake/tx_completion", "pgwake/tx_ack_frees_instance"},
		sql: []edit{{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'orchestrator' AND p_due > 0 THEN RETURN; END IF;\n"},
			{"wake", "BEGIN\n", "BEGIN\n    IF p_queue = 'orchestrator' THEN RETURN; END IF;\n"}},
	},
	{
		name: "nodes are not told when work becomes due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_work_ends", "pgwake/other_node_wakes_when_work_is_abandoned_with_delay",
			"pgwake/other_node_wakes_when_lease_of_work_is_cut_short", "pgwake/tx_renewal_of_work"},
		sql: []edit{{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'worker' AND p_due = 0 THEN RETURN; END IF;\n"}},
	},
	{
		name: "nodes are not told when messages become due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_message_ends",
			"pgwake/other_node_wakes_when_lease_of_turn_is_cut_short", "pgwake/tx_renewal_of_turn"},
		sql: []edit{{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'orchestrator' THEN p_next := NULL; IF p_due = 0 THEN RETURN; END IF; END IF;\n"}},
	},
	{
		name: "fetch does not know when the next work is due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_work_from_before_ends", "pgwake/wake_when_delay_of_work_from_before_ends"},
		sql: []edit{{"earliest_work", "RETURN v_earliest;", "RETURN CASE WHEN v_earliest <= v_now THEN v_earliest END;"},
			{"fetch_work", "v_until, v_earliest, clock", "v_until, CASE WHEN v_earliest <= v_now THEN v_earliest END, clock"}},
	},
	{
		name: "fetch does not know when the next message is due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_message_from_before_ends", "pgwake/wake_when_delay_of_message_from_before_ends"},
		sql:  []edit{{"earliest_message", "RETURN v_earliest;", "RETURN CASE WHEN v_earliest <= clock_timestamp() THEN v_earliest END;"}},
	},
	{
		name: "node does not know when the work of another is due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_work_from_before_ends", "pgwake/other_node_wakes_when_lease_of_work_ends",
			"pgwake/other_node_wakes_when_renewed_lease_of_work_ends"},
		sql: []edit{{"earliest_work", "RETURN v_earliest;", "RETURN CASE WHEN v_earliest <= v_now THEN v_earliest END;"},
			{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'worker' AND p_due = 0 THEN RETURN; END IF;\n"},
			{"fetch_work", "v_until, v_earliest, clock", "v_until, CASE WHEN v_earliest <= v_now THEN v_earliest END, clock"}},
	},
	{
		name: "node does not know when the message of another is due",
		rows: []string{"pgwake/other_node_wakes_when_delay_of_message_from_before_ends", "pgwake/other_node_wakes_when_lease_of_turn_ends",
			"pgwake/other_node_wakes_when_renewed_lease_of_turn_ends"},
		sql: []edit{{"earliest_message", "RETURN v_earliest;", "RETURN CASE WHEN v_earliest <= clock_timestamp() THEN v_earliest END;"},
			{"notify_queue", "BEGIN\n", "BEGIN\n    IF p_queue = 'orchestrator' AND p_due = 0 THEN RETURN; END IF;\n"}},
	},
	{
		name: "messages that are held are not brought back",
		rows: []string{"pgwake/wake_when_ack_frees_instance_with_held_message", "pgwake/wake_when_abandon_frees_instance_with_held_message",
			"pgwake/wake_when_dead_letter_frees_instance_with_held_message", "instance_locking/ack_only_affects_locked_messages"},
		sql: []edit{{"release_instance", "WHERE q.instance_id = p_instance AND q.held;", "WHERE false;"}},
	},
	{
		name: "renewal in a transaction does not tell of an earlier end (work)",
		rows: []string{"pgwake/tx_batch_of_renewals", "pgwake/tx_renewal_of_work"},
		sql:  []edit{{"renew_work", "IF v_sooner THEN", "IF false THEN"}},
	},
	{
		name: "renewal in a transaction does not tell of an earlier end (turn)",
		rows: []string{"pgwake/tx_renewal_of_turn"},
		sql:  []edit{{"renew_orchestration", "IF v_until < v_before THEN", "IF false THEN"}},
	},
	{
		name: "abandon in a transaction tells nobody (work)",
		rows: []string{"pgwake/tx_abandon_of_work"},
		sql:  []edit{{"abandon_work", "IF NOT p_quiet THEN", "IF false THEN"}},
	},
	{
		name: "abandon in a transaction tells nobody (turn)",
		rows: []string{"pgwake/tx_abandon_of_turn"},
		sql:  []edit{{"give_back_turn", "IF NOT p_quiet THEN", "IF false THEN"}},
	},
	{
		name: "ack in a transaction does not tell of the instance",
		rows: []string{"pgwake/tx_ack_frees_instance"},
		sql:  []edit{{"ack_orchestration", "IF NOT p_quiet THEN", "IF false THEN"}},
	},
	{
		name: "enqueue in a transaction is not told of",
		rows: []string{"pgwake/tx_batch_of_work", "pgwake/tx_batch_of_messages", "pgwake/tx_redrive_of_work", "pgwake/sql_tx_enqueue_of_work", "pgwake/sql_tx_enqueue_of_message", "pgwake/tx_enqueue_of_work", "pgwake/tx_enqueue_of_message", "pgwake/tx_turn_schedules_work", "pgwake/tx_completion"},
		sql:  []edit{{"notify_inserted", "BEGIN\n", "BEGIN\n    RETURN NULL;\n"}},
	},

	// Namespaces and transactions.
	{
		name: "namespace of work is ignored",
		rows: []string{"pgwake/namespaces_of_work_are_apart"},
		sql:  []edit{{"asked_lists", "FROM unnest(p_namespaces) AS n (name) CROSS JOIN", "FROM namespaces AS n CROSS JOIN"}},
	},
	{
		name: "namespace of turns is ignored",
		rows: []string{"pgwake/namespaces_of_turns_are_apart"},
		sql:  []edit{{"message_lists", "FROM unnest(p_namespaces) AS served (name)", "FROM namespaces AS served"}},
	},
	{
		name: "fetch serves all namespaces",
		rows: []string{"pgwake/namespaces_of_work_are_apart", "pgwake/namespaces_of_turns_are_apart", "pgwake/namespaces_of_waiting_fetches_are_apart"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { o.Namespaces = nil }}
		},
	},
	{
		name: "fetch of all namespaces serves the default one",
		rows: []string{"pgwake/namespaces_of_work_are_apart"},
		sql: []edit{{"pick_work", "q.session_id IS NULL AND q.visible_at <= p_now\n                    ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR",
			"q.session_id IS NULL AND q.visible_at <= p_now AND q.namespace = 'default'\n                    ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR"},
			{"fetch_work", "d.visible_at <= v_now\n", "d.visible_at <= v_now AND d.namespace = 'default'\n"}},
	},
	{
		name: "message of an instance goes to another namespace",
		rows: []string{"pgwake/namespaces_of_turns_are_apart"},
		sql: []edit{{"enqueue_message_many", "coalesce(known.namespace, queued.namespace,", "coalesce("},
			{"align_messages", "THEN coalesce(v_home.namespace, q.namespace) ELSE", "THEN q.namespace ELSE"}},
	},
	{
		name: "verb in a transaction is not part of it",
		rows: inBothTx("enqueue_of_work", "batch_of_work", "abandon_of_work", "renewal_of_work", "batch_of_renewals", "turn_schedules_work",
			"redrive_of_work", "enqueue_of_message", "batch_of_messages", "completion", "abandon_of_turn", "renewal_of_turn",
			"ack_frees_instance", "dead_letter_frees_instance", "redrive_of_message", "ack_of_work", "batch_of_acks", "dead_letter_of_work",
			"dead_letter_of_turn", "purge_of_dead_letters", "append_of_history", "cleanup_of_sessions", "renewal_of_session", "release_of_sessions", "release_of_sticky_instances", "deletion",
			"deletion_of_several", "deletion_in_bulk", "prune", "prune_in_bulk", "verb_that_fails"),
		verb: func(n node) providertest.Provider { return outsideTx{n} },
	},
	{
		name: "dead letter in a transaction does not tell of the instance",
		rows: inBothTx("dead_letter_frees_instance"),
		sql:  []edit{{"dead_letter_orchestration", "IF NOT p_quiet THEN", "IF false THEN"}},
	},
	{
		name: "transaction goes on after a verb that failed",
		rows: inBothTx("verb_that_fails"),
		verb: func(n node) providertest.Provider { return savesTx{n} },
	},
	{
		name: "transaction ends with a verb that was refused",
		rows: inBothTx("verb_that_fails"),
		verb: func(n node) providertest.Provider { return abortsTx{n} },
	},

	// Dedup keys, priorities, due times and delays.
	{
		name: "dedup key of work is ignored",
		rows: []string{"pgwake/dedup_key_of_work_is_queued_once", "pgwake/batch_of_work_is_told_in_its_order"},
		sql:  []edit{{"enqueue_work_many", "v_now), i.dedup_key, i.instance_id", "v_now), NULL::text, i.instance_id"}},
	},
	{
		name: "dedup key of messages is ignored",
		rows: []string{"pgwake/dedup_key_of_messages_is_queued_once", "pgwake/batch_of_messages_is_told_in_its_order"},
		sql:  []edit{{"enqueue_message_many", "END, i.dedup_key, i.queue", "END, NULL::text, i.queue"}},
	},
	{
		name: "dedup key is free once its work is claimed",
		rows: []string{"pgwake/dedup_key_of_work_is_queued_once"},
		sql:  []edit{{"fetch_work", "SET visible_at = v_until, lock_token = p_token", "SET dedup_key = NULL, visible_at = v_until, lock_token = p_token"}},
	},
	{
		name: "dedup key is free once its message is claimed",
		rows: []string{"pgwake/dedup_key_of_messages_is_queued_once"},
		sql:  []edit{{"fetch_orchestration", "SET lock_token = p_token, visible_at = v_until,", "SET dedup_key = NULL, lock_token = p_token, visible_at = v_until,"}},
	},
	{
		name: "dedup key of work holds in all namespaces",
		rows: []string{"pgwake/dedup_key_of_work_is_queued_once"},
		sql: []edit{{"enqueue_work_many", "WHERE i.id <> ALL (v_taken) AND i.id <> ALL (v_settled)\n",
			"WHERE i.id <> ALL (v_taken) AND i.id <> ALL (v_settled) AND NOT EXISTS (SELECT FROM worker_queue d WHERE d.dedup_key = i.dedup_key)\n"}},
	},
	{
		name: "duplicate does not say what is queued",
		rows: []string{"pgwake/dedup_key_of_work_is_queued_once", "pgwake/batch_of_work_is_told_in_its_order"},
		sql:  []edit{{"enqueue_work_many", "coalesce(added.id, queued.id)", "i.id"}},
	},
	{
		name: "priority of work is ignored",
		rows: []string{"pgwake/priority_of_work_comes_first"},
		sql: []edit{{"pick_work", "generate_series(9, 0, -1)", "generate_series(0, 9)"},
			{"fetch_work", "generate_series(9, 0, -1)", "generate_series(0, 9)"},
			{"fetch_work", "ORDER BY c.priority DESC, c.was_due", "ORDER BY c.priority, c.was_due"}},
	},
	{
		name: "priority of work is ignored by a fetch of some namespaces",
		rows: []string{"pgwake/priority_of_work_comes_first"},
		sql:  []edit{{"pick_work", "ORDER BY q.priority DESC, q.visible_at, q.id", "ORDER BY q.visible_at, q.id"}},
	},
	{
		name: "priority of turns is ignored",
		rows: []string{"pgwake/priority_of_messages_comes_first"},
		sql:  []edit{{"fetch_orchestration", "generate_series(9, 0, -1)", "generate_series(0, 9)"}},
	},
	{
		name: "priority of turns is ignored by a fetch of some namespaces",
		rows: []string{"pgwake/priority_of_messages_comes_first"},
		sql:  []edit{{"fetch_orchestration", "ORDER BY priority DESC, visible_at, id", "ORDER BY visible_at, id"}},
	},
	{
		name: "order of work is that of the ids",
		rows: []string{"pgwake/due_time_of_work_decides_within_a_priority"},
		sql: []edit{{"pick_work", "ORDER BY q.visible_at, q.id\n                    LIMIT p_limit FOR", "ORDER BY q.id\n                    LIMIT p_limit FOR"},
			{"fetch_work", "ORDER BY d.visible_at, d.id", "ORDER BY d.id"},
			{"fetch_work", "ORDER BY c.priority DESC, c.was_due, c.id", "ORDER BY c.priority DESC, c.id"}},
	},
	{
		name: "order of turns is that of the ids of their messages",
		rows: []string{"pgwake/due_time_of_messages_decides_within_a_priority"},
		sql:  []edit{{"fetch_orchestration", "ORDER BY q.visible_at, q.id) head", "ORDER BY q.id) head"}},
	},
	{
		name: "delay of work is half as long",
		rows: []string{"pgwake/wake_when_delay_of_work_ends", "pgwake/other_node_wakes_when_delay_of_work_ends",
			"pgwake/wake_when_delay_of_work_from_before_ends", "pgwake/other_node_wakes_when_delay_of_work_from_before_ends"},
		sql: []edit{{"enqueue_work_item", "now_at + p_delay", "now_at + p_delay / 2"},
			{"enqueue_work_many", "v_now + i.delay", "v_now + i.delay / 2"}},
	},
	{
		name: "delay of messages is half as long",
		rows: []string{"pgwake/wake_when_delay_of_message_ends", "pgwake/other_node_wakes_when_delay_of_message_ends",
			"pgwake/wake_when_delay_of_message_from_before_ends", "pgwake/other_node_wakes_when_delay_of_message_from_before_ends",
			"pgwake/wake_when_timer_of_turn_fires"},
		sql: []edit{{"enqueue_message_many", "v_now + i.delay", "v_now + i.delay / 2"}},
	},
	{
		name: "delay of abandoned work is half as long",
		rows: []string{"pgwake/wake_when_work_is_abandoned_with_delay", "pgwake/other_node_wakes_when_work_is_abandoned_with_delay"},
		sql:  []edit{{"abandon_work", "v_now + p_delay", "v_now + p_delay / 2"}},
	},
	{
		name: "delay of an abandoned turn is half as long",
		rows: []string{"pgwake/wake_when_turn_is_abandoned_with_delay", "pgwake/other_node_wakes_when_turn_is_abandoned_with_delay"},
		sql:  []edit{{"give_back_turn", "v_now + p_delay", "v_now + p_delay / 2"}},
	},

	// Several at once.
	{
		name: "what is to be done at once is done one by one",
		rows: []string{"pgwake/batch_of_work_is_all_or_none", "pgwake/batch_of_messages_is_all_or_none", "pgwake/history_is_appended_without_a_turn"},
		verb: func(n node) providertest.Provider { return piecemeal{n} },
	},
	{
		name: "outcomes of a batch are in the wrong order",
		rows: []string{"pgwake/batch_of_work_is_told_in_its_order", "pgwake/batch_of_messages_is_told_in_its_order"},
		verb: func(n node) providertest.Provider { return backwards{n} },
	},
	{
		name: "fetch of several claims one",
		rows: []string{"pgwake/batch_of_claims_is_what_is_due_up_to_its_size"},
		sql: []edit{{"pick_work", "LIMIT p_limit", "LIMIT 1"},
			{"fetch_work", "LIMIT p_limit", "LIMIT 1"}},
	},
	{
		name: "fetch of several claims one more",
		rows: []string{"pgwake/batch_of_claims_is_what_is_due_up_to_its_size"},
		verb: func(n node) providertest.Provider { return claims{n, oneMore} },
	},
	{
		name: "fetch of several is empty when nothing is due",
		rows: []string{"pgwake/batch_of_claims_is_what_is_due_up_to_its_size"},
		verb: func(n node) providertest.Provider { return claims{n, maybeNone} },
	},
	{
		name: "fetch of several gives all the same token",
		rows: []string{"pgwake/batch_of_claims_is_what_is_due_up_to_its_size"},
		verb: func(n node) providertest.Provider { return claims{n, sharesToken} },
	},
	{
		name: "fetch of several waits for all of them",
		rows: []string{"pgwake/batch_of_claims_waits_for_the_first_alone"},
		verb: func(n node) providertest.Provider { return claims{n, fills} },
	},
	{
		name: "lost lease of a batch is no error",
		rows: []string{"pgwake/batch_of_acks_reports_leases_that_are_lost", "pgwake/batch_of_renewals_reports_leases_that_are_lost"},
		verb: func(n node) providertest.Provider { return forgivesBatch{n} },
	},
	{
		name: "lost lease of a batch stops the others",
		rows: []string{"pgwake/batch_of_acks_reports_leases_that_are_lost", "pgwake/batch_of_renewals_reports_leases_that_are_lost",
			"pgwake/fetch_that_acknowledges_a_lost_lease_claims_nothing"},
		verb: func(n node) providertest.Provider { return allOrNone{n} },
	},
	{
		name: "renewal of several leases does not look at the token",
		rows: []string{"pgwake/batch_of_renewals_reports_leases_that_are_lost"},
		sql: []edit{{"renew_work", "AND q.lock_token = held.token AND", "AND"},
			{"renew_work", "WHERE q.lock_token = asked.token AND q.visible_at > clock_timestamp()\n                 ORDER BY", "WHERE q.visible_at > clock_timestamp() ORDER BY"}},
	},
	{
		name: "fetch does not acknowledge",
		rows: []string{"pgwake/fetch_acknowledges_before_it_claims", "pgwake/fetch_that_acknowledges_a_lost_lease_claims_nothing",
			"pgwake/asynchronous_ack_is_an_ack"},
		verb: func(n node) providertest.Provider {
			return asks{n, func(o *pgwake.FetchOptions) { o.Ack = nil }}
		},
	},
	{
		name: "fetch that acknowledges a lost lease claims all the same",
		rows: []string{"pgwake/fetch_that_acknowledges_a_lost_lease_claims_nothing"},
		verb: func(n node) providertest.Provider { return claimsAnyway{n} },
	},

	// How far a turn reaches, and what is written without one.
	{
		name: "current execution goes down",
		rows: []string{"pgwake/current_execution_never_goes_down"},
		sql:  []edit{{"ack_orchestration", "greatest(i.current_execution, p_execution)", "p_execution"}},
	},
	{
		name: "cancellation of activities ignores the execution",
		rows: []string{"pgwake/cancellation_is_of_one_execution_of_one_instance"},
		sql:  []edit{{"cancel_activities", "AND w.execution_id = c.execution_id AND w.activity_id", "AND w.activity_id"}},
	},
	{
		name: "cancellation of activities reaches other instances",
		rows: []string{"pgwake/cancellation_is_of_one_execution_of_one_instance"},
		sql:  []edit{{"cancel_activities", "w.instance_id = p_instance AND w.execution_id = c.execution_id", "w.execution_id = c.execution_id"}},
	},
	{
		name: "cancellation of messages is not applied",
		rows: []string{"pgwake/cancelled_messages_are_removed"},
		sql:  []edit{{"ack_orchestration", "IF cardinality(p_cancel_messages) > 0 THEN", "IF false THEN"}},
	},
	{
		name: "cancellation of messages takes all of the instance",
		rows: []string{"pgwake/cancelled_messages_are_removed"},
		sql:  []edit{{"ack_orchestration", " AND coalesce(q.dedup_key, '') = ANY (p_cancel_messages)", ""}},
	},
	{
		name: "cancellation of messages reaches other instances",
		rows: []string{"pgwake/cancelled_messages_are_removed"},
		sql:  []edit{{"ack_orchestration", "q.instance_id = p_instance AND coalesce(q.dedup_key, '') = ANY", "q.dedup_key = ANY"}},
	},
	{
		name: "history that is appended makes its execution the current one",
		rows: []string{"pgwake/history_is_appended_without_a_turn"},
		sql: []edit{{"append_history", "BEGIN\n", `BEGIN
    UPDATE instances i SET current_execution = p_execution WHERE i.instance_id = p_instance AND i.current_execution < p_execution;
`}},
	},
	{
		name: "ack that fails leaves its timers",
		rows: []string{"deletion/force_delete_prevents_ack_recreation"},
		verb: func(n node) providertest.Provider { return eagerTimers{n} },
	},
	{
		name: "deletion leaves the pairs of children",
		rows: []string{"kv_store/kv_delete_instance_with_children"},
		sql: []edit{{"remove_instances", "DELETE FROM kv_store k WHERE k.instance_id = ANY (p_instances);",
			"DELETE FROM kv_store k USING instances i WHERE k.instance_id = ANY (p_instances) AND i.instance_id = k.instance_id AND i.parent_id IS NULL;"}},
	},
	{
		name: "deletion takes the pairs of all instances",
		rows: []string{"kv_store/kv_delete_instance_with_children"},
		sql:  []edit{{"remove_instances", "DELETE FROM kv_delta k WHERE k.instance_id = ANY (p_instances);", "DELETE FROM kv_delta k;"}},
	},

	// Dead letters.
	{
		name: "dead letters are listed whatever their reason",
		rows: []string{"pgwake/dead_letters_are_listed_by_filter"},
		sql:  []edit{{"list_dead_letters", "(p_reason IS NULL OR d.reason = p_reason)", "true"}},
	},
	{
		name: "dead letters are listed whenever they died",
		rows: []string{"pgwake/dead_letters_are_listed_by_filter"},
		sql:  []edit{{"list_dead_letters", "(p_died_before IS NULL OR d.died_at < p_died_before)", "true"}},
	},
	{
		name: "list of dead letters begins anew",
		rows: []string{"pgwake/dead_letters_are_listed_by_filter"},
		sql:  []edit{{"list_dead_letters", "d.id > p_after", "true"}},
	},
	{
		name: "purge and redrive take dead letters of all namespaces",
		rows: []string{"pgwake/dead_letters_are_purged_by_filter", "pgwake/dead_letters_are_redriven_by_filter"},
		sql:  []edit{{"pick_dead_letters", "(p_namespace IS NULL OR d.namespace = p_namespace)", "true"}},
	},
	{
		name: "purge and redrive without ids take all dead letters",
		rows: []string{"pgwake/dead_letters_are_purged_by_filter", "pgwake/dead_letters_are_redriven_by_filter"},
		sql:  []edit{{"pick_dead_letters", "p_ids IS NULL OR", "coalesce(cardinality(p_ids), 0) = 0 OR"}},
	},
	{
		name: "purge and redrive have no limit",
		rows: []string{"pgwake/dead_letters_are_purged_by_filter", "pgwake/dead_letters_are_redriven_by_filter"},
		sql:  []edit{{"pick_dead_letters", "LIMIT p_limit", ""}},
	},
	{
		name: "dead letter forgets what went wrong",
		rows: []string{"pgwake/dead_letter_of_work_comes_back_as_it_was"},
		sql:  []edit{{"bury_work", "coalesce(p_error, d.last_error)", "p_error"}},
	},
	{
		name: "work that is redriven loses its tag",
		rows: []string{"pgwake/dead_letter_of_work_comes_back_as_it_was"},
		sql:  []edit{{"redrive_dead_letters", "d.dedup_key, d.tag, d.session_id", "d.dedup_key, '', d.session_id"}},
	},
	{
		name: "message that is redriven loses its data",
		rows: []string{"pgwake/dead_letter_of_message_comes_back_as_it_was"},
		sql:  []edit{{"redrive_dead_letters", "d.execution_id, d.data, d.dedup_key", "d.execution_id, NULL::json, d.dedup_key"}},
	},

	{
		name: "end of a session comes sooner and nobody is told",
		rows: []string{"pgwake/other_node_wakes_when_session_is_cut_short"},
		sql:  []edit{{"renew_sessions", "IF v_sooner THEN", "IF false THEN"}},
	},

	{
		name: "acks that share a commit report what was lost as done",
		rows: []string{"pgwake/acks_at_the_same_moment_have_outcomes_of_their_own"},
		sql:  []edit{{"ack_work_group", "NOT asked.held", "false"}, {"ack_work_group", "WHERE asked.held", "WHERE true"}},
	},
	{
		name: "acks that share a commit send for what was lost",
		rows: []string{"pgwake/acks_at_the_same_moment_have_outcomes_of_their_own"},
		sql:  []edit{{"ack_work_group", "WHERE m.held AND m.instance", "WHERE m.instance"}},
	},
	{
		name: "acks that share a commit send nothing",
		rows: []string{"pgwake/acks_at_the_same_moment_have_outcomes_of_their_own"},
		sql:  []edit{{"ack_work_group", "m.instance IS NOT NULL", "false"}},
	},

	// What fetches select an instance by.
	{
		name: "change of an instance leaves no note for messages that meet it",
		rows: []string{"pgwake/message_committed_after_a_new_pin_is_found", "pgwake/message_committed_after_a_new_queue_name_is_found",
			"pgwake/message_committed_after_stickiness_ended_is_anybody_s"},
		sql: []edit{{"lock_homes", "WHERE NOT", "WHERE false AND NOT"}},
	},
	{
		name: "message that meets a change of its instance is not announced to that",
		rows: []string{"pgwake/message_committed_after_a_new_pin_is_found", "pgwake/message_committed_after_a_new_queue_name_is_found",
			"pgwake/message_committed_after_stickiness_ended_is_anybody_s"},
		sql: []edit{{"share_homes", "WHERE NOT pg_try_advisory", "WHERE false AND NOT pg_try_advisory"}},
	},
	{
		name: "nobody reads the notes of messages that met a change",
		rows: []string{"pgwake/message_committed_after_a_new_pin_is_found", "pgwake/message_committed_after_a_new_queue_name_is_found",
			"pgwake/message_committed_after_stickiness_ended_is_anybody_s", "pgwake/message_committed_after_the_start_is_where_that_is"},
		sql: []edit{{"fetch_orchestration", "IF EXISTS (SELECT FROM realignments) THEN", "IF false THEN"}},
	},
	{
		name: "nobody is told of the timers of an instance that moves",
		rows: []string{"pgwake/timer_follows_the_queue_name", "pgwake/timer_follows_the_pin"},
		sql:  []edit{{"ack_orchestration", "IF v_aligned.moved OR v_before.instance_id IS NOT NULL THEN", "IF false THEN"}},
	},
	{
		name: "timers stay behind when an instance moves",
		rows: []string{"pgwake/timer_follows_the_queue_name", "pgwake/timer_follows_the_pin"},
		sql:  []edit{{"align_messages", "WHERE m.instance_id = p_instance", "WHERE false"}},
	},
	{
		name: "timer that fires keeps its key",
		rows: []string{"pgwake/timer_is_set_again_in_its_own_turn"},
		sql:  []edit{{"ack_orchestration", "AND q.lock_token = p_token AND coalesce(q.dedup_key, '') <> ''", "AND false"}},
	},
	{
		name: "messages are cancelled after the inserts",
		rows: []string{"pgwake/timer_is_reset_by_cancelling_it_in_the_same_ack"},
		sql: []edit{{"ack_orchestration", "DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND q.lock_token = p_token;",
			"DELETE FROM orchestrator_queue q WHERE q.instance_id = p_instance AND (q.lock_token = p_token OR q.dedup_key = ANY (p_cancel_messages));"}},
	},
	{
		name: "activities are cancelled after the inserts alone",
		rows: []string{"pgwake/activity_replaces_a_cancelled_one_of_the_same_key"},
		sql: []edit{{"ack_orchestration", "IF cardinality(p_cancel_activities) > 0 THEN", "IF false THEN"},
			{"ack_orchestration", "IF cardinality(p_cancel_activities) > 0 AND cardinality(p_work_names) > 0 THEN", "IF cardinality(p_cancel_activities) > 0 THEN"}},
	},

	{
		name: "message for an instance whose start waits is dropped",
		rows: []string{"pgwake/queue_message_waits_for_a_start_that_was_given_back"},
		sql:  []edit{{"lock_due_instance", "IF v_opens IS NOT NULL THEN", "IF false THEN"}},
	},

	// Sticky instances.
	{
		name: "messages of a sticky instance are anybody's",
		rows: []string{"sticky/turn_goes_to_owner", "sticky/others_are_woken_when_it_ends"},
		sql:  []edit{{"enqueue_message_many", "THEN known.sticky_owner END", "THEN NULL END"}},
	},
	{
		name: "shorter stickiness leaves what sticks already as it is",
		rows: []string{"sticky/shorter_while_counts_for_what_waits"},
		sql:  []edit{{"ack_orchestration", " OR q.visible_at > v_known.sticky_until", ""}},
	},
	{
		name: "owner of a sticky instance is anybody with a name",
		rows: []string{"sticky/turn_goes_to_owner", "sticky/ack_makes_it_another_s"},
		sql: []edit{{"fetch_orchestration", "WHERE q.sticky_owner = p_owner AND", "WHERE p_owner IS NOT NULL AND q.sticky_owner IS NOT NULL AND"},
			{"sticky_lists", "q.sticky_owner = p_owner", "q.sticky_owner IS NOT NULL"},
			{"lock_due_instance", "q.sticky_owner = p_owner AND", "q.sticky_owner IS NOT NULL AND"}},
	},
	{
		name: "owner gets nothing but what is sticky",
		rows: []string{"sticky/owner_gets_other_turns_too", "sticky/order_is_that_of_all_turns"},
		sql:  []edit{{"fetch_orchestration", "WHERE NOT v_selects", "WHERE false"}},
	},
	{
		name: "owner waits like the others",
		rows: []string{"sticky/turn_goes_to_owner", "sticky/owner_is_woken", "sticky/owner_is_woken_on_another_node", "sticky/message_of_a_turn_under_way_follows"},
		sql:  []edit{{"fetch_orchestration", "WHERE q.sticky_owner = p_owner AND", "WHERE false AND"}},
	},
	{
		name: "owner gets what is not due",
		rows: []string{"sticky/owner_is_woken_when_a_delay_ends"},
		sql: []edit{{"fetch_orchestration", "AND q.sticky_due <= v_now", ""}, {"lock_due_instance", "AND q.sticky_due <= p_now", ""},
			{"fetch_orchestration", "coalesce(q.sticky_due, q.visible_at) <= v_now", "true"}},
	},
	{
		name: "owner is told nothing in a transaction",
		rows: []string{"sticky/owner_is_woken_by_a_transaction"},
		sql:  []edit{{"enqueue_message_many", "IF NOT p_quiet AND", "IF false AND"}},
	},
	{
		name: "due instant of a sticky message is that for others",
		rows: []string{"sticky/owner_is_woken", "sticky/owner_is_woken_on_another_node", "sticky/owner_is_woken_when_a_delay_ends"},
		sql:  []edit{{"enqueue_message_many", "added.sticky_due, ", ""}},
	},
	{
		name: "owner does not know when its next message is due",
		rows: []string{"sticky/owner_is_woken_when_a_delay_ends"},
		sql: []edit{{"earliest_message", "WHERE q.sticky_owner = p_owner AND", "WHERE false AND"},
			{"enqueue_message_many", "added.sticky_due, ", ""}},
	},
	{
		name: "instance is sticky for ever",
		rows: []string{"sticky/others_are_woken_when_it_ends"},
		sql:  []edit{{"ack_orchestration", "clock_timestamp() + p_sticky_for", "clock_timestamp() + p_sticky_for + interval '1 day'"}},
	},
	{
		name: "instance is sticky for a moment",
		rows: []string{"sticky/turn_goes_to_owner", "sticky/others_are_woken_when_it_ends"},
		sql:  []edit{{"ack_orchestration", "clock_timestamp() + p_sticky_for", "clock_timestamp()"}},
	},
	{
		name: "what is queued does not become sticky",
		rows: []string{"sticky/message_of_a_turn_under_way_follows", "sticky/ack_makes_it_another_s"},
		sql:  []edit{{"ack_orchestration", "THEN q.sticky_owner IS DISTINCT FROM v_known.sticky_owner OR q.visible_at > v_known.sticky_until ELSE", "THEN false ELSE"}},
	},
	{
		name: "what is queued stays sticky",
		rows: []string{"sticky/ack_without_it_ends_it", "sticky/shorter_one_brings_delayed_messages_forward"},
		sql: []edit{{"ack_orchestration", "ELSE coalesce(q.sticky_owner, '') <> '' END", "ELSE false END"},
			{"align_messages", "OR m.sticky_owner <> coalesce", "OR false AND m.sticky_owner <> coalesce"}},
	},
	{
		name: "ack without a preference leaves the one before",
		rows: []string{"sticky/ack_without_it_ends_it", "sticky/shorter_one_brings_delayed_messages_forward"},
		sql: []edit{{"ack_orchestration", "sticky_owner = p_sticky_owner, sticky_until = clock_timestamp() + p_sticky_for",
			"sticky_owner = coalesce(p_sticky_owner, i.sticky_owner), sticky_until = coalesce(clock_timestamp() + p_sticky_for, i.sticky_until)"}},
	},
	{
		name: "message is late that is due after the preference",
		rows: []string{"sticky/delay_beyond_its_end_is_anybody_s"},
		sql: []edit{{"enqueue_message_many", "i.sticky_owner IS NOT NULL AND d.at < i.sticky_until AS sticks", "i.sticky_owner IS NOT NULL AS sticks"},
			{"enqueue_message_many", "THEN i.sticky_until ELSE due.at END", "THEN greatest(i.sticky_until, due.at) + interval '1 day' ELSE due.at END"}},
	},
	{
		name: "turn takes what is anybody's and leaves the rest",
		rows: []string{"sticky/turn_whose_lease_ended_is_anybody_s"},
		sql:  []edit{{"fetch_orchestration", "coalesce(q.sticky_due, q.visible_at) <= v_now", "(q.visible_at <= v_now OR q.sticky_owner = p_owner AND q.sticky_due <= v_now)"}},
	},
	{
		name: "owner does not look at priorities",
		rows: []string{"sticky/order_is_that_of_all_turns"},
		sql:  []edit{{"fetch_orchestration", "ORDER BY priority DESC, visible_at, id", "ORDER BY visible_at, id"}},
	},
	{
		name: "owner gets what it has not asked for",
		rows: []string{"sticky/filters_hold_for_the_owner"},
		sql: []edit{{"sticky_lists", "(p_namespaces IS NULL OR l.namespace = ANY (p_namespaces)) AND (p_queues IS NULL OR l.queue = ANY (p_queues))", "true"},
			{"lock_due_instance", "IF (p_namespaces IS NOT NULL", "IF false AND (p_namespaces IS NOT NULL"}},
	},
	{
		name: "sticky messages count as delayed",
		rows: []string{"sticky/depths_count_it_as_due"},
		sql:  []edit{{"queue_depths", "coalesce(m.sticky_due, m.visible_at) AS", "m.visible_at AS"}},
	},
	{
		name: "release leaves sticky instances as they are",
		rows: append(inBothTx("release_of_sticky_instances"), "sticky/released_instance_is_anybody_s", "sticky/release_wakes_whoever_waits"),
		sql:  []edit{{"release_sticky", "r.sticky_until > v_now", "false"}},
	},
	{
		name: "release is of the sticky instances of all owners",
		rows: []string{"sticky/released_instance_is_anybody_s"},
		sql:  []edit{{"release_sticky", "r.sticky_owner = ANY (p_owners) AND ", ""}},
	},
	{
		name: "release of a sticky instance leaves its messages to the owner",
		rows: []string{"sticky/released_instance_is_anybody_s", "sticky/release_wakes_whoever_waits"},
		sql:  []edit{{"release_sticky", "WHERE message.due IS NOT NULL;", "WHERE false;"}},
	},
	{
		name: "release of sticky instances tells nobody",
		rows: append(inBothTx("release_of_sticky_instances"), "sticky/release_wakes_whoever_waits"),
		sql:  []edit{{"release_sticky", "PERFORM notify_queue('orchestrator', 1, NULL);", ""}},
	},
}

// inBothTx are the rows about verbs in transactions, those of database/sql as well.
func inBothTx(names ...string) (rows []string) {
	for _, name := range names {
		rows = append(rows, "pgwake/tx_"+name, "pgwake/sql_tx_"+name)
	}
	return rows
}
