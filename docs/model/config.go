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

// Producer is a transaction that inserts one due item.
type Producer struct {
	Tag         Tags
	OldSnapshot bool // its isolation is not READ COMMITTED
	Coalesced   bool // the library's own: it commits in silence, and the coalescer notifies after
}

// Config is a system to explore. At most 3 nodes, 4 lanes, 4 dispatchers and 3 producers.
type Config struct {
	Name      string
	Nodes     []Node
	Producers []Producer
	Fanout    int // how many lanes a producer tells; 0: 1

	// TimeOuts lets a dispatcher that waits give up, as its user pleases: the poll timeout, or the end of a context.
	TimeOuts bool

	// Absences lets a lane disarm, and bounce what it holds if anything, whenever all its dispatchers are in handlers: its
	// user may have stopped calling Fetch.
	Absences bool

	Leaves int // how many nodes may leave
	Deaths int // how many may die
	Faults int // how many fetches may fail after they began

	// Parked starts where every dispatcher is parked, armed, and settled, and the lanes are known empty.
	Parked bool

	// Bounced items are due at the start, with one notification under way to the first lane: a node that is not
	// modelled, all of whose dispatchers are in handlers, has bounced its tokens. Together with Parked.
	Bounced int

	// NoRollback keeps producers from rolling back, for traces with fewer branches.
	NoRollback bool

	// Split takes no two steps as one where Config's zero value does because it makes no difference: to see that.
	Split bool

	Without Rule
}

// Rule is a set of rules of the protocol. "Rule 1" to "rule 5" are those of directed wake: chain, bounce, broadcast when
// unsure, lanes, leaving. Config.Without takes them away.
type Rule uint32

const (
	// The rules of the specification.

	SettleWaits         Rule = 1 << iota // settling waits for K; without: it tries, and parks all the same
	SettleSnapshot                       // settling reads in a snapshot taken after K was granted
	Settle                               // whoever armed looks once more
	FreshRead                            // a producer reads who is armed in a snapshot taken after it tried K
	UnlockedTells                        // a producer without K that sees nobody armed notifies all
	OldSnapshotTellsAll                  // a producer that is not READ COMMITTED notifies all
	Chain                                // rule 1: who finds work while more is due calls another node
	Bounce                               // rule 2: a token does not stay where everybody is in a handler
	BounceAfterFetch                     // … but does while anybody is inside a fetch
	BounceDisarms                        // a bounce disarms its own lane
	SkipByMemory                         // the arm write is skipped by memory; without: by reading the row
	ArmByMemory                          // the same; without, a lane whose write is skipped settles all the same
	Sequence                             // the row keeps the newest write by sequence numbers
	LaneMatch                            // rule 4: a token goes only to a lane that can use it
	LeaveWaits                           // rule 5: who leaves waits for K
	LeavePassesOn                        // rule 5: who leaves passes tokens on
	SweepSettles                         // rule 5: after a sweep somebody waits for K and looks
	Contended                            // a fetch that met locked rows does not say "nothing"
	FailedFetchTells                     // the lane of a fetch that failed gets a token
	TakeOver                             // settling that ended with a find is taken over by whoever is parked
	HotAlone                             // a find disarms only where nobody else is parked or inside a fetch
	FirstFind                            // a find without a token has the duty to chain, if somebody was parked
	ChainStays                           // a chain token that nobody here takes any more stays, and bounces
	BounceAgain                          // what arrives while a bounce is under way bounces in its turn

	// The mends: what the specification lacked when it was modelled.

	UnlockedTellsAll  // a producer without K notifies all, whoever it sees armed
	PassOnByDueRows   // who leaves passes on what is due, not only the tokens it holds
	SweepPassesOn     // the sweeper waits for K itself and passes on what is due, with the row's deletion
	ScoutWhileWaiting // who waits for K looks again every now and then

	allRules Rule = 1<<iota - 1
)
