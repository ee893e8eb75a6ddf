package model

// This file answers: what can be varied, and which rules can be taken away?

// Tags is a set of tags; an item has one. A lane takes the items whose tag is in its set.
type Tags uint8

// The two tags of the model: two are enough for lanes that overlap, and for lanes that do not.
const (
	TagA Tags = 1 << iota
	TagB

	tagCount = 2
)

// Lane is the dispatchers of a node that fetch the same thing.
type Lane struct {
	Takes       Tags
	Dispatchers int
}

// Node is its lanes.
type Node []Lane

// Producer is a transaction that inserts due items.
type Producer struct {
	Tag         Tags
	OldSnapshot bool // its isolation is not READ COMMITTED
	Coalesced   bool // the library's own: it commits in silence, and the coalescer notifies after
	Node        int  // whose, if it is the library's own
	Items       int  // how many it inserts; 0: 1
}

// Config is a system to explore. At most 3 nodes, 4 lanes, 4 dispatchers, 2 of a lane, 3 producers and 3 items.
type Config struct {
	Name      string
	Nodes     []Node
	Producers []Producer
	Fanout    int // how many lanes a producer tells, of which all but one stand by; 0: 1

	// TimeOuts lets a dispatcher that waits give up, as its user pleases: the poll timeout, or the end of a context.
	TimeOuts bool

	// StayArmed keeps finds from disarming: no lane is ever hot.
	StayArmed bool

	// Absences lets a lane disarm whenever all its dispatchers are in handlers: its user may have stopped calling Fetch.
	Absences bool

	Leaves int // how many nodes may leave
	Deaths int // how many may die
	Losses int // how many nodes may lose their LISTEN session, once each, and come back
	Faults int // how many fetches, bounces, and long waits for producers may fail after they began
	Joins  int // how many nodes, the last ones, do not listen at the start, and join
	Lapses int // how many lanes may retire

	// RetriesStaySole has each scout of a lane that met locked rows have a sole token, once one had, until a look leaves
	// nothing; otherwise that which follows a look by a sole token, or by one that comes after.
	RetriesStaySole bool

	// Patience lets a wait for producers take long: then it asks now and again for how many it waits.
	Patience bool

	// Parked starts where every dispatcher is parked, armed, and settled, and the lanes are known empty.
	Parked bool

	// Bounced items are due at the start, with one notification under way to the first lane that was passed on once: by a
	// node that is not modelled, all of whose dispatchers are in handlers. Together with Parked.
	Bounced int

	// NoRollback keeps producers from rolling back, for traces with fewer branches.
	NoRollback bool

	// Split takes no two steps as one where Config's zero value does because it makes no difference, and forgets nothing of a
	// state that makes none: to see that.
	Split bool

	// Whole explores what comes once nothing can be stranded like all the rest, and not node by node: see covered.go.
	Whole bool

	Without Rule
}

// Rule is a set of rules of the protocol. "Rule 1" to "rule 5" are those of directed wake: chain, bounce, broadcast when
// unsure, lanes, leaving. Config.Without takes them away.
type Rule uint64

const (
	// The rules of the specification.

	SettleWaits          Rule = 1 << iota // settling waits for K; without: it tries, and goes on all the same
	SettleLooks                           // after K was granted somebody looks once more
	Settle                                // a lane that is armed has to settle
	SettleVoid                            // a disarm that begins voids the settling under way
	EmptyIfSettled                        // only a look that began settled makes the lane known empty
	FreshRead                             // a producer reads who is armed in a snapshot taken after it tried K
	UnlockedTells                         // a producer without K that sees nobody armed notifies all
	OldSnapshotTellsAll                   // a producer that is not READ COMMITTED notifies all
	Chain                                 // rule 1: who finds work by a token while more is due leaves another
	ChainKeepsSole                        // … of which nobody else knows, if nobody knew of the first
	Bounce                                // rule 2: a token does not stay where everybody is in a handler
	BounceAfterFetch                      // … but does while anybody is inside a fetch
	BounceAgain                           // what arrives while a bounce is under way bounces in its turn
	BounceToOwnLanes                      // a bounce may go to another lane of the same node
	HopLimit                              // what was passed on once goes to all the next time, and is nobody's alone any more
	HopTellsOwnLanes                      // … the lanes of the same node included
	ContendedKeepsSole                    // the scout of contended rows has a sole token if that of the look was
	AloneAmongLanes                       // a node keeps a sole token only if it has no other lane either
	GreetingFrees                         // … and until another node says that it has begun to listen
	UnknownTellsAll                       // what comes for a lane that has retired goes to all
	OverflowKeepsSole                     // a token that makes room leaves its being sole to those that stay
	SkipByMemory                          // the arm write is skipped by memory; without: by reading the row
	ArmByMemory                           // the same; without, a lane whose write is skipped settles all the same
	Sequence                              // the row keeps the newest write by sequence numbers
	LaneMatch                             // rule 4: a token goes only to a lane that can use it
	LeaveWaits                            // rule 5: who leaves waits for K
	LeavePassesOn                         // rule 5: who leaves passes on
	SweepSettles                          // rule 5: after a sweep somebody waits for K and looks
	Contended                             // a fetch that met locked rows does not say "nothing"
	FailedFetchTells                      // the token of a fetch that failed is handed back
	HotAlone                              // a find disarms only where nobody else is parked or inside a fetch
	ReturnLooks                           // who listens again looks once more in each lane
	ReconnectSole                         // … with a token that is sole
	CoalescerTellsOthers                  // the coalescer spares the others only if somebody here is parked
	SoleIfAlone                           // … and then its token is sole

	// The mends: what the specification lacked when it was modelled.

	UnlockedTellsAll  // a producer without K notifies all, whoever it sees armed
	PassOnByDueRows   // who leaves passes on what is due, not only the tokens it holds
	SweepPassesOn     // the sweeper waits for K itself and passes on what is due, with the row's deletion
	ScoutWhileWaiting // while the settler waits for K somebody looks now and then
	ScoutGoesOn       // … also after a scout has left with an item
	AloneLooks        // … until a look began that knew the wait, which is for the lane too, to be for one producer
	AsksWhileWaiting  // which the settler asks while it waits
	ScoutAfterFailure // … also after a wait that failed
	DisarmPause       // between two times that a lane disarms it has found something
	SweepHoldsK       // the sweeper holds K until the rows are gone
	DeadStayDead      // who tests whether a node is dead does not make it look alive
	LeaveIsLast       // no write of the row is newer than that of who leaves
	NoRowTellsOwn     // a bounce of a lane whose row is gone tells the other lanes of the node as well

	allRules Rule = 1<<iota - 1
)
