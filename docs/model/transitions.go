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
	CoalescerTells
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

	SettleBegins
	SettlePauses
	SettleAsks
	SettleGranted
	SettleReturns
	SettleScouts
	ScoutLooks

	NotificationArrives
	BounceBegins
	BounceChooses
	BounceCommits
	BounceFails
	DisarmUnused

	LeaveBegins
	LeaveDisarms
	LeaveGranted
	LeaveGivesUp
	LeaveUnlistens
	NodeDies
	SessionLost
	SessionBack
	SweepBegins
	SweepCommits

	transitionCount = iota
)

var transitionNames = [transitionCount]string{
	"begin", "insert", "read armed", "commit", "rollback", "tell the node itself", "choose for coalescer", "commit of coalescer",
	"park at once", "begin fetch", "claim", "report", "commit fetch", "return", "fetch fails", "time out",
	"settler waits for K", "settler waits anew", "settler asks for whom it waits", "K granted to settler", "settled", "scout while settling", "scout",
	"notification", "begin bounce", "choose for bounce", "commit bounce", "bounce fails", "disarm, unused",
	"begin to leave", "disarm", "K granted", "leave without K", "pass on, UNLISTEN", "die", "lose its session", "listen again", "begin sweep", "sweep",
}

func (t Transition) String() string { return transitionNames[t] }

// Implementation names the functions that a transition stands for. A test looks them up.
var Implementation = map[Transition]Code{
	ProducerBegin:     {Note: "BEGIN of a transaction that is not READ COMMITTED"},
	ProducerInsert:    {SQL: []string{"notify_inserted"}, Note: "pg_try_advisory_xact_lock_shared"},
	ProducerReadArmed: {SQL: []string{"notify_inserted", "wake"}},
	ProducerCommit:    {SQL: []string{"enqueue_work", "enqueue_message"}, Note: "COMMIT, the caller's or that of a statement alone"},
	ProducerRollback:  {Note: "ROLLBACK of the caller"},

	CoalescerTells:   {Go: []string{"(*engine).tell", "(*engine).signal"}},
	CoalescerChooses: {SQL: []string{"notify_queues", "wake"}, Go: []string{"(*coalescer).flush"}},
	CoalescerCommits: {SQL: []string{"notify_queues"}, Go: []string{"(*coalescer).flush"}},

	FetchParks:     {Go: []string{"(*engine).fetch", "(*lane).isEmpty", "(*lane).park"}},
	FetchBegins:    {Go: []string{"(*lane).beginLook", "(*lane).beginWrite"}},
	FetchClaims:    {SQL: []string{"fetch_work", "fetch_orchestration"}},
	FetchReports:   {SQL: []string{"earliest_work", "earliest_message"}},
	FetchCommits:   {SQL: []string{"arm"}, Note: "and COMMIT"},
	FetchReturns:   {Go: []string{"(*lane).endLook", "(*lane).found", "(*lane).foundNone"}},
	FetchRollsBack: {SQL: []string{"undo_work_claim", "undo_orchestration_claim"}, Go: []string{"(*lane).unanswered"}},
	FetchTimesOut:  {Go: []string{"(*lane).park"}, Note: "ErrNoWork, or the end of the caller's context"},

	SettleBegins:  {SQL: []string{"wait_for_producers"}, Go: []string{"(*settler).run", "(*settler).unsettled", "(*engine).waitForProducers"}},
	SettlePauses:  {Go: []string{"(*settler).waitLong"}},
	SettleAsks:    {SQL: []string{"producers"}, Go: []string{"(*settler).blocked"}},
	SettleGranted: {SQL: []string{"wait_for_producers"}},
	SettleReturns: {Go: []string{"(*lane).settleSince"}},
	SettleScouts:  {Go: []string{"(*lane).fire", "(*lane).poll"}, Note: "scoutAt"},
	ScoutLooks:    {Go: []string{"(*lane).fire"}, Note: "retryAt"},

	NotificationArrives: {Go: []string{"(*listener).handle", "(*engine).heard", "(*lane).signal"}},
	BounceBegins:        {Go: []string{"(*passer).run", "(*lane).beginBounce"}},
	BounceChooses:       {SQL: []string{"pass_on"}},
	BounceCommits:       {SQL: []string{"pass_on"}, Go: []string{"(*lane).endBounce"}},
	BounceFails:         {Go: []string{"(*lane).endBounce"}},
	DisarmUnused:        {SQL: []string{"arm"}, Go: []string{"(*disarmer).run", "(*lane).disarmUnused"}},

	LeaveBegins:    {Go: []string{"(*engine).leave", "(*engine).endWaits"}},
	LeaveDisarms:   {SQL: []string{"disarm_node"}, Go: []string{"(*engine).leave"}},
	LeaveGranted:   {SQL: []string{"wait_for_producers"}, Go: []string{"(*engine).leave"}},
	LeaveGivesUp:   {Go: []string{"(*engine).leave"}},
	LeaveUnlistens: {SQL: []string{"remove_waiters"}, Note: "UNLISTEN, by closing the connection"},
	NodeDies:       {Note: "the end of the LISTEN session, or of the process"},
	SessionLost:    {Go: []string{"(*listener).lost", "(*engine).listenerLost", "(*lane).forget"}},
	SessionBack:    {SQL: []string{"listen_session"}, Go: []string{"(*listener).up", "(*engine).listenerUp"}},
	SweepBegins:    {SQL: []string{"wait_for_producers"}, Go: []string{"(*sweeper).run"}},
	SweepCommits:   {SQL: []string{"remove_waiters"}, Go: []string{"(*sweeper).run"}},
}

// Code is the functions that a transition stands for: none for what the world does.
type Code struct {
	SQL  []string // in migrations/
	Go   []string // of the root package, methods as (*lane).park
	Note string
}
