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
	SettleFails
	SettleGranted
	SettleReturns
	SettleScouts
	ScoutLooks
	RetryFires

	NotificationArrives
	StandByEnds
	BounceBegins
	BounceChooses
	BounceTells
	BounceCommits
	BounceFails
	DisarmUnused
	DisarmCommits
	LaneRetires
	LaneRowGoes

	LeaveBegins
	LeaveDisarms
	LeaveGranted
	LeaveGivesUp
	LeaveUnlistens
	NodeDies
	SessionLost
	NodeJoins
	SessionBack
	GreetingArrives
	SweepBegins
	SweepGranted
	SweepChooses
	SweepCommits

	transitionCount = iota
)

var transitionNames = [transitionCount]string{
	"begin", "insert", "read armed", "commit", "rollback", "tell the node itself", "choose for coalescer", "commit of coalescer",
	"park at once", "begin fetch", "claim", "report", "commit fetch", "return", "fetch fails", "time out",
	"settler waits for K", "settler waits anew", "settler asks for whom it waits", "the wait for K breaks off", "K granted to settler", "settled", "scout while settling", "scout", "retry",
	"notification", "end of stand-by", "begin bounce", "choose for bounce", "bounce to all", "commit bounce", "bounce fails", "disarm, unused", "commit disarm", "retire", "row of what retired goes",
	"begin to leave", "disarm", "K granted", "leave without K", "pass on, UNLISTEN", "die", "lose its session", "begin to listen", "listening", "greeting", "begin sweep", "K granted to sweeper", "delete rows, choose", "commit sweep",
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

	SettleBegins:  {SQL: []string{"wait_for_producers"}, Go: []string{"(*settler).run", "(*settler).unsettled", "(*settler).waitForProducers"}},
	SettlePauses:  {Go: []string{"(*settler).waitLong"}},
	SettleAsks:    {SQL: []string{"producers"}, Go: []string{"(*settler).waitLong", "(*settler).join", "(*settler).blocked"}},
	SettleGranted: {SQL: []string{"wait_for_producers"}},
	SettleReturns: {Go: []string{"(*lane).settleSince"}},
	SettleFails:   {Go: []string{"(*settler).waitLong", "(*settler).blocked", "(*lane).waitsForOne"}},
	SettleScouts:  {Go: []string{"(*lane).fire", "(*lane).planScout", "(*lane).poll"}, Note: "scoutAt"},
	ScoutLooks:    {Go: []string{"(*lane).fire"}, Note: "retryAt"},
	RetryFires:    {Go: []string{"(*lane).fire"}, Note: "retryAt, where nobody waits"},

	NotificationArrives: {Go: []string{"(*listener).handle", "(*engine).heard", "(*lane).signal", "(*engine).called", "(*lane).called", "(*lane).emit", "(*lane).heardSignal"}},
	StandByEnds:         {Go: []string{"(*lane).fire"}, Note: "standByAt"},
	BounceBegins:        {Go: []string{"(*lane).bounce", "(*coalescer).passOn"}},
	BounceChooses:       {SQL: []string{"notify_queues", "pass_on", "due_lists", "wake"}, Go: []string{"(*coalescer).flush"}},
	BounceTells:         {Go: []string{"(*coalescer).flush", "(*engine).signal"}},
	BounceCommits:       {SQL: []string{"notify_queues", "notify_queue", "somebody_waits"}},
	BounceFails:         {Go: []string{"(*coalescer).putBack"}},
	DisarmUnused:        {Go: []string{"(*disarmer).run", "(*lane).disarmUnused"}},
	DisarmCommits:       {SQL: []string{"arm"}, Go: []string{"(*disarmer).run"}},
	LaneRetires:         {Go: []string{"(*waiters).retireIdle", "(*lane).retire"}},
	LaneRowGoes:         {SQL: []string{"look"}, Go: []string{"(*listener).fallback"}},

	LeaveBegins:     {Go: []string{"(*engine).close", "(*engine).endWaits"}},
	LeaveDisarms:    {SQL: []string{"disarm_node"}, Go: []string{"(*engine).leave"}},
	LeaveGranted:    {SQL: []string{"remove_waiters", "wait_for_producers"}, Go: []string{"(*engine).leaveBy"}},
	LeaveGivesUp:    {Go: []string{"(*engine).leave"}, Note: "leavePatience"},
	LeaveUnlistens:  {SQL: []string{"remove_waiters", "pass_on"}, Note: "UNLISTEN, by closing the connection"},
	NodeDies:        {Note: "the end of the LISTEN session, or of the process"},
	SessionLost:     {Go: []string{"(*listener).lost", "(*engine).listenerLost", "(*lane).forget"}},
	NodeJoins:       {SQL: []string{"listen_session"}, Go: []string{"(*listener).listen", "(*listener).prepare", "(*engine).learnOf"}},
	SessionBack:     {SQL: []string{"listen_session"}, Go: []string{"(*listener).up", "(*engine).listenerUp", "(*lane).reconnected", "(*coalescer).join"}},
	GreetingArrives: {Go: []string{"(*engine).inCompany", "(*lane).reconsider"}},
	SweepBegins:     {SQL: []string{"dead_queues", "remove_waiters", "wait_for_producers"}, Go: []string{"(*engine).learnOf", "(*sweeper).sweep", "(*sweeper).run"}},
	SweepGranted:    {SQL: []string{"remove_waiters", "wait_for_producers"}},
	SweepChooses:    {SQL: []string{"remove_waiters", "pass_on"}},
	SweepCommits:    {SQL: []string{"remove_waiters"}, Go: []string{"(*sweeper).removeDead"}},
}

// Code is the functions that a transition stands for: none for what the world does.
type Code struct {
	SQL  []string // in migrations/
	Go   []string // of the root package, methods as (*lane).park
	Note string
}
