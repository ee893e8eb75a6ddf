package model

// This file answers: which transitions are there, and what implements each?

// Transition is a kind of step.
type Transition uint8

const (
	ProducerBegin Transition = iota
	ProducerInsert
	ProducerReadArmed
	ProducerCommit
	ProducerRollback
	CoalescerChooses
	CoalescerCommits

	FetchParks
	FetchBegins
	FetchClaims
	FetchReports
	FetchCommits
	FetchReturns
	FetchRollsBack
	FetchTimesOut

	SettleClaims
	SettleTakenOver
	SettleScouts
	ScoutLooks

	NotificationArrives
	BounceBegins
	BounceChooses
	BounceCommits

	LeaveBegins
	LeaveDisarms
	LeaveGranted
	LeaveUnlistens
	NodeDies
	SweepBegins
	SweepCommits

	transitionCount = iota
)

var transitionNames = [transitionCount]string{
	"begin", "insert", "read armed", "commit", "rollback", "choose for coalescer", "commit of coalescer",
	"park at once", "begin fetch", "claim", "report", "commit fetch", "return", "fetch fails", "time out",
	"K granted, claim", "take settling over", "scout while waiting for K", "scout",
	"notification", "begin bounce", "choose for bounce", "commit bounce",
	"begin to leave", "disarm", "K granted", "pass on, UNLISTEN", "die", "begin sweep", "sweep",
}

func (t Transition) String() string { return transitionNames[t] }

// Implementation names the SQL function, or the Go function, that a transition stands for. Who implements the
// protocol keeps it true.
var Implementation = map[Transition]string{
	ProducerBegin:     "BEGIN of a transaction that is not READ COMMITTED",
	ProducerInsert:    "SQL notify_inserted: pg_try_advisory_xact_lock_shared",
	ProducerReadArmed: "SQL notify_inserted: somebody_waits, pg_notify",
	ProducerCommit:    "COMMIT of the caller, or of enqueue_for_worker and the like",
	ProducerRollback:  "ROLLBACK of the caller",

	CoalescerChooses: "Go (*coalescer).flush, SQL notify_queues: somebody_waits",
	CoalescerCommits: "SQL notify_queues: pg_notify",

	FetchParks:     "Go (*engine).fetch: (*lane).isEmpty, (*lane).park",
	FetchBegins:    "Go (*lane).beginLook",
	FetchClaims:    "SQL fetch_work: claim",
	FetchReports:   "SQL fetch_work: report what is due, chain",
	FetchCommits:   "SQL arm, and the end of fetch_work; Go (*lane).beginWrite",
	FetchReturns:   "Go (*lane).endLook",
	FetchRollsBack: "Go (*lane).unanswered, SQL undo_work_claims",

	FetchTimesOut: "Go (*lane).park: ErrNoWork, or the end of the caller's context",

	SettleClaims:    "SQL wait_for_producers; Go (*lane).settleSince, and the look that it causes",
	SettleTakenOver: "Go (*settler).run: whoever is parked takes the token",
	SettleScouts:    "Go (*lane).fire: scoutAt",
	ScoutLooks:      "Go (*lane).fire: retryAt",

	NotificationArrives: "Go (*listener).handle, (*lane).signal",
	BounceBegins:        "Go (*lane).beginBounce",
	BounceChooses:       "SQL pass_on: choose",
	BounceCommits:       "SQL pass_on: disarm, pg_notify; Go (*lane).endBounce",

	LeaveBegins:    "Go (*engine).leave: (*waiters).close",
	LeaveDisarms:   "SQL disarm",
	LeaveGranted:   "Go (*engine).leave: SQL wait_for_producers, a notification to itself",
	LeaveUnlistens: "SQL pass_on, UNLISTEN",
	NodeDies:       "the end of the LISTEN session, or of the process",
	SweepBegins:    "Go (*engine).sweep: SQL wait_for_producers",
	SweepCommits:   "SQL sweep: pass_on, delete from waiters",
}
