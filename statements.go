package pgwake

import "github.com/jackc/pgx/v5"

// This file answers: what does the library say to the database? Every statement but one is a call of one
// function of the wire contract (migrations); only the schema varies, and it is quoted here, once.

type statements struct {
	channels, session, look, tell, asyncCommit string

	enqueueWork, fetchWork, ackWork, ackWorkMany, abandonWork, renewWork, undoWork string

	enqueueMessages, fetchOrchestration, ackOrchestration, abandonOrchestration, renewOrchestration, undoOrchestration string

	readHistory, appendHistory string
}

func newStatements(schema string) *statements {
	in := pgx.Identifier{schema}.Sanitize() + "."
	return &statements{
		channels:             "SELECT " + in + "channel('orchestrator'), " + in + "channel('worker')",
		session:              "SELECT * FROM " + in + "listen_session()",
		look:                 "SELECT * FROM " + in + "look($1, $2)",
		tell:                 "SELECT " + in + "notify_queues($1, $2, $3, $4)",
		asyncCommit:          "SELECT pg_catalog.set_config('synchronous_commit', 'off', true)",
		enqueueWork:          "SELECT * FROM " + in + "enqueue_work_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
		fetchWork:            "SELECT * FROM " + in + "fetch_work($1, $2, $3, $4, $5)",
		ackWork:              "SELECT " + in + "ack_work($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		ackWorkMany:          "SELECT * FROM " + in + "ack_work_many($1, $2)",
		abandonWork:          "SELECT * FROM " + in + "abandon_work($1, $2, $3, $4, $5)",
		renewWork:            "SELECT * FROM " + in + "renew_work($1, $2, $3)",
		undoWork:             "SELECT " + in + "undo_work_claim($1, $2)",
		enqueueMessages:      "SELECT * FROM " + in + "enqueue_message_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
		fetchOrchestration:   "SELECT * FROM " + in + "fetch_orchestration($1, $2, $3, $4)",
		ackOrchestration:     "SELECT * FROM " + in + "ack_orchestration($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32)",
		abandonOrchestration: "SELECT * FROM " + in + "abandon_orchestration($1, $2, $3, $4, $5)",
		renewOrchestration:   "SELECT " + in + "renew_orchestration($1, $2, $3)",
		undoOrchestration:    "SELECT " + in + "undo_orchestration_claim($1)",
		readHistory:          "SELECT * FROM " + in + "read_history($1, $2, $3)",
		appendHistory:        "SELECT " + in + "append_history($1, $2, $3, $4, $5)",
	}
}
