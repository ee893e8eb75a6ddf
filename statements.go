package pgwake

import (
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// This file answers: what does the library say to the database? Every statement but asyncCommit and atWork calls the functions of
// the wire contract (migrations); only the schema varies, and it is quoted here, once. What a Provider asks when it opens
// is in provider.go, and LISTEN in listener.go. Whatever is not of the contract is named in full: nobody's search_path diverts it.

type statements struct {
	waiters string // the table

	channels, session, hearAll, observe, look, earliestOfLanes, tell, asyncCommit, atWork, flush, waitForProducers, producers, arm, disarmNode, removeWaiters string

	enqueueWork, enqueueWorkItem, fetchWork, ackWork, ackWorkGroup, ackWorkMany, abandonWork, renewWork, undoWork string

	enqueueMessages, fetchOrchestration, ackOrchestration, abandonOrchestration, renewOrchestration, undoOrchestration string

	readHistory, resumeHistory, appendHistory string

	renewSessions, releaseSessions, releaseSticky, cleanupSessions string

	getCustomStatus, lookAtInstances, getKV, listKV string

	deadLetterWork, deadLetterTurn, listDeadLetters, countDeadLetters, redriveDeadLetters, purgeDeadLetters, listArchive, purgeArchive string

	listInstances, getInstanceInfo, listExecutions, listChildren, getParent, getInstanceTree string

	setLimits, listLimits, pause, listPaused string
	registerNamespace, listNamespaces        string
	newNamespaces                            string

	deleteInstance, deleteInstances, deleteInstancesBulk, pruneExecutions, pruneExecutionsBulk, systemMetrics, queueDepths, peek, listNodes, askNodes string
}

// readOn has the server forget the notifications that everybody has read. By itself it does so only while somebody notifies, and when its queue of
// them is full nobody can: the queue would stay full when whoever had not read has read on, or is gone.
const readOn = "pg_catalog.pg_notification_queue_usage()"

// atWork says for how many seconds a statement that has one of these in its text has run at most, of those that do not wait for their clients or for
// other sessions; and which processes have a snapshot and wait for no lock, of the sessions of which the server does not say what they do.
const atWork = `SELECT coalesce(pg_catalog.date_part('epoch', pg_catalog.max(pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) a.query_start) FILTER (
    WHERE a.state OPERATOR(pg_catalog.=) 'active' AND coalesce(a.wait_event_type, '') OPERATOR(pg_catalog.<>) ALL ('{Client,Lock,IPC}'::pg_catalog.text[])
      AND EXISTS (SELECT FROM pg_catalog.unnest($1::pg_catalog.text[]) AS n (name) WHERE pg_catalog.strpos(a.query, n.name) OPERATOR(pg_catalog.>) 0))), 0),
  coalesce(pg_catalog.array_agg(a.pid::pg_catalog.int8) FILTER (WHERE coalesce(a.state, 'disabled') OPERATOR(pg_catalog.=) 'disabled'
    AND a.backend_xmin IS NOT NULL AND coalesce(a.wait_event_type, '') OPERATOR(pg_catalog.<>) ALL ('{Client,Lock,IPC}'::pg_catalog.text[]) AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.pid OPERATOR(pg_catalog.=) a.pid AND NOT l.granted)), '{}')
  FROM pg_catalog.pg_stat_activity AS a WHERE a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database() AND a.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()`

func newStatements(schema string) *statements {
	in := pgx.Identifier{schema}.Sanitize() + "."
	call := func(function string, args int) string {
		placeholders := make([]string, args)
		for i := range placeholders {
			placeholders[i] = "$" + strconv.Itoa(i+1)
		}
		return in + function + "(" + strings.Join(placeholders, ", ") + ")"
	}
	scalar := func(function string, args int) string { return "SELECT " + call(function, args) }
	rows := func(function string, args int) string { return "SELECT * FROM " + call(function, args) }
	columns := func(names, function string, args int) string {
		return "SELECT " + names + " FROM " + call(function, args)
	}
	// Which namespaces there are is known by this. Their number does not tell, nor does the sum of their ids: after some were removed, others may
	// make it what it was.
	ids := "(SELECT coalesce(pg_catalog.bit_xor(pg_catalog.hashint8extended(id, 0)), 0) AS ids FROM " + in + "namespaces)"
	nodes := "(SELECT pg_catalog.count(*) FROM " + in + "waiters AS w WHERE w.lane OPERATOR(pg_catalog.=) 0 AND w.node OPERATOR(pg_catalog.<>) 0)"
	may := func(right string) string {
		return "pg_catalog.has_table_privilege($8::pg_catalog.text, '" + right + "')"
	}
	// Whoever may write it has a row there while it listens, see listen_session.
	forgotten := "(" + may("INSERT") + " AND " + may("UPDATE") + " AND " + may("DELETE") +
		" AND NOT EXISTS (SELECT FROM " + in + "waiters AS w WHERE w.node OPERATOR(pg_catalog.=) $3 AND w.lane OPERATOR(pg_catalog.=) 0))"
	return &statements{
		channels: "SELECT " + in + "channel('orchestrator'), " + in + "channel('worker'), " + in + "node_channel('orchestrator', $1), " +
			in + "node_channel('worker', $1), " + in + "channel('instance')",
		session:              "SELECT s.*, " + nodes + " FROM " + call("listen_session", 3) + " AS s",
		hearAll:              scalar("hear_all", 3),
		observe:              scalar("observe", 2),
		waiters:              in + "waiters",
		look:                 "SELECT l.lane, l.earliest_at, l.now_at, l.alone, l.dead, " + nodes + ", " + ids + ", l.news, " + forgotten + " FROM " + call("look", 7) + " AS l, " + readOn + " AS kept",
		earliestOfLanes:      rows("earliest_of_lanes", 2),
		tell:                 scalar("notify_queues", 9),
		asyncCommit:          "SELECT pg_catalog.set_config('synchronous_commit', 'off', true)",
		atWork:               atWork,
		flush:                scalar("flush", 0),
		waitForProducers:     scalar("wait_for_producers", 2),
		producers:            scalar("producers", 2),
		arm:                  scalar("arm", 10),
		disarmNode:           scalar("disarm_node", 1),
		removeWaiters:        scalar("remove_waiters", 4),
		enqueueWork:          rows("enqueue_work_many", 17),
		enqueueWorkItem:      rows("enqueue_work_item", 14),
		fetchWork:            rows("fetch_work", 20),
		ackWork:              scalar("ack_work", 12),
		ackWorkGroup:         rows("ack_work_group", 12),
		ackWorkMany:          rows("ack_work_many", 3),
		abandonWork:          rows("abandon_work", 7),
		renewWork:            rows("renew_work", 3),
		undoWork:             scalar("undo_work_claim", 2),
		enqueueMessages:      rows("enqueue_message_many", 14),
		fetchOrchestration:   rows("fetch_orchestration", 16),
		ackOrchestration:     rows("ack_orchestration", 54),
		abandonOrchestration: rows("abandon_orchestration", 5),
		renewOrchestration:   scalar("renew_orchestration", 3),
		undoOrchestration:    scalar("undo_orchestration_claim", 1),
		readHistory:          rows("read_history", 4),
		resumeHistory:        rows("resume_history", 3),
		appendHistory:        scalar("append_history", 5),
		renewSessions:        rows("renew_sessions", 3),
		releaseSessions:      scalar("release_sessions", 1),
		releaseSticky:        scalar("release_sticky", 1),
		cleanupSessions:      scalar("cleanup_sessions", 0),
		getCustomStatus:      rows("get_custom_status", 2),
		lookAtInstances:      rows("look_at_instances", 3),
		getKV:                scalar("get_kv", 2),
		listKV:               rows("list_kv", 1),
		deadLetterWork:       scalar("dead_letter_work", 4),
		deadLetterTurn:       rows("dead_letter_orchestration", 5),
		listDeadLetters:      columns(letterColumns, "list_dead_letters", 11),
		countDeadLetters:     rows("count_dead_letters", 8),
		redriveDeadLetters:   rows("redrive_dead_letters", 10),
		purgeDeadLetters:     scalar("purge_dead_letters", 9),
		listArchive:          columns(archiveColumns, "list_archive", 6),
		purgeArchive:         scalar("purge_archive", 1),
		listInstances:        columns(instanceColumns+", attributes_cut, output_cut, custom_status_cut", "list_instances", 7),
		getInstanceInfo:      columns(instanceColumns, "get_instance_info", 1),
		listExecutions:       rows("list_executions", 2),
		listChildren:         scalar("list_children", 1),
		getParent:            scalar("get_parent", 1),
		getInstanceTree:      scalar("get_instance_tree", 1),
		registerNamespace:    scalar("register_namespace", 1),
		listNamespaces:       rows("list_namespaces", 0),
		newNamespaces:        "SELECT n.name, s.ids FROM " + ids + " AS s, " + in + "new_namespaces(-1) AS n WHERE s.ids OPERATOR(pg_catalog.<>) $1",
		setLimits:            scalar("set_limits", 6),
		listLimits:           rows("list_limits", 0),
		pause:                scalar("pause", 3),
		listPaused:           scalar("list_paused", 1),
		deleteInstance:       rows("delete_instance", 2),
		deleteInstances:      rows("delete_instances", 2),
		deleteInstancesBulk:  rows("delete_instances_bulk", 3),
		pruneExecutions:      rows("prune_executions", 3),
		pruneExecutionsBulk:  rows("prune_executions_bulk", 5),
		systemMetrics:        rows("system_metrics", 0),
		queueDepths:          rows("queue_depths", 0),
		peek:                 columns(queuedColumns, "peek", 7),
		listNodes:            rows("listening_nodes", 0),
		askNodes:             scalar("ask_nodes", 2),
	}
}
