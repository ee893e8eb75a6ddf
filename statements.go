package pgwake

import "github.com/jackc/pgx/v5"

// This file answers: what does the library say to the database? Every statement but one is a call of one
// function of the wire contract (migrations); only the schema varies, and it is quoted here, once.

type statements struct {
	channels, session, look, tell, asyncCommit string

	enqueueWork, fetchWork, ackWork, ackWorkGroup, ackWorkMany, abandonWork, renewWork, undoWork string

	enqueueMessages, fetchOrchestration, ackOrchestration, abandonOrchestration, renewOrchestration, undoOrchestration string

	readHistory, resumeHistory, appendHistory string

	renewSessions, cleanupSessions string

	getCustomStatus, lookAtInstances, getKV, listKV string

	deadLetterWork, deadLetterTurn, listDeadLetters, redriveDeadLetters, purgeDeadLetters, listArchive, purgeArchive string

	listInstances, getInstanceInfo, listExecutions, listChildren, getParent, getInstanceTree string

	deleteInstance, deleteInstances, deleteInstancesBulk, pruneExecutions, pruneExecutionsBulk, systemMetrics, queueDepths string
}

func newStatements(schema string) *statements {
	in := pgx.Identifier{schema}.Sanitize() + "."
	return &statements{
		channels:             "SELECT " + in + "channel('orchestrator'), " + in + "channel('worker'), " + in + "channel('instance')",
		session:              "SELECT * FROM " + in + "listen_session()",
		look:                 "SELECT * FROM " + in + "look($1, $2)",
		tell:                 "SELECT " + in + "notify_queues($1, $2, $3, $4, $5)",
		asyncCommit:          "SELECT pg_catalog.set_config('synchronous_commit', 'off', true)",
		enqueueWork:          "SELECT * FROM " + in + "enqueue_work_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
		fetchWork:            "SELECT * FROM " + in + "fetch_work($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
		ackWork:              "SELECT " + in + "ack_work($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
		ackWorkGroup:         "SELECT * FROM " + in + "ack_work_group($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
		ackWorkMany:          "SELECT * FROM " + in + "ack_work_many($1, $2, $3)",
		abandonWork:          "SELECT * FROM " + in + "abandon_work($1, $2, $3, $4, $5, $6)",
		renewWork:            "SELECT * FROM " + in + "renew_work($1, $2, $3)",
		undoWork:             "SELECT " + in + "undo_work_claim($1, $2)",
		enqueueMessages:      "SELECT * FROM " + in + "enqueue_message_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
		fetchOrchestration:   "SELECT * FROM " + in + "fetch_orchestration($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		ackOrchestration:     "SELECT * FROM " + in + "ack_orchestration($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41, $42, $43, $44, $45, $46, $47, $48, $49)",
		abandonOrchestration: "SELECT * FROM " + in + "abandon_orchestration($1, $2, $3, $4, $5)",
		renewOrchestration:   "SELECT " + in + "renew_orchestration($1, $2, $3)",
		undoOrchestration:    "SELECT " + in + "undo_orchestration_claim($1)",
		readHistory:          "SELECT * FROM " + in + "read_history($1, $2, $3)",
		resumeHistory:        "SELECT * FROM " + in + "resume_history($1, $2, $3)",
		appendHistory:        "SELECT " + in + "append_history($1, $2, $3, $4, $5)",
		renewSessions:        "SELECT * FROM " + in + "renew_sessions($1, $2, $3)",
		cleanupSessions:      "SELECT " + in + "cleanup_sessions()",
		getCustomStatus:      "SELECT * FROM " + in + "get_custom_status($1, $2)",
		lookAtInstances:      "SELECT * FROM " + in + "look_at_instances($1, $2, $3)",
		getKV:                "SELECT " + in + "get_kv($1, $2)",
		listKV:               "SELECT * FROM " + in + "list_kv($1)",
		deadLetterWork:       "SELECT " + in + "dead_letter_work($1, $2, $3, $4)",
		deadLetterTurn:       "SELECT * FROM " + in + "dead_letter_orchestration($1, $2, $3, $4, $5)",
		listDeadLetters:      "SELECT * FROM " + in + "list_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		redriveDeadLetters:   "SELECT * FROM " + in + "redrive_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
		purgeDeadLetters:     "SELECT " + in + "purge_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		listArchive:          "SELECT * FROM " + in + "list_archive($1, $2, $3, $4, $5)",
		purgeArchive:         "SELECT " + in + "purge_archive($1)",
		listInstances:        "SELECT * FROM " + in + "list_instances($1, $2, $3, $4, $5, $6)",
		getInstanceInfo:      "SELECT * FROM " + in + "get_instance_info($1)",
		listExecutions:       "SELECT * FROM " + in + "list_executions($1, $2)",
		listChildren:         "SELECT " + in + "list_children($1)",
		getParent:            "SELECT " + in + "get_parent($1)",
		getInstanceTree:      "SELECT " + in + "get_instance_tree($1)",
		deleteInstance:       "SELECT * FROM " + in + "delete_instance($1, $2)",
		deleteInstances:      "SELECT * FROM " + in + "delete_instances($1, $2)",
		deleteInstancesBulk:  "SELECT * FROM " + in + "delete_instances_bulk($1, $2, $3)",
		pruneExecutions:      "SELECT * FROM " + in + "prune_executions($1, $2, $3)",
		pruneExecutionsBulk:  "SELECT * FROM " + in + "prune_executions_bulk($1, $2, $3, $4, $5)",
		systemMetrics:        "SELECT * FROM " + in + "system_metrics()",
		queueDepths:          "SELECT * FROM " + in + "queue_depths()",
	}
}
