package model

// This file answers: what is a state?

const (
	maxNodes       = 3
	maxLanes       = 4
	maxDispatchers = 4
	maxProducers   = 3
)

// laneSet is a set of lanes, by their number.
type laneSet uint8

type state struct {
	due         [tagCount]uint8 // items that are committed, due, and free, by tag
	faults      uint8           // fetches that may still fail
	producers   [maxProducers]producer
	nodes       [maxNodes]nodeStatus
	lanes       [maxLanes]lane
	dispatchers [maxDispatchers]dispatcher
}

type producerPhase uint8

const (
	notBegun producerPhase = iota
	begun                  // has its snapshot
	inserted               // has inserted its item and tried K
	open                   // has decided whom to notify; nobody knows when it ends
	ended                  // committed, or rolled back
)

// producer is a transaction that makes one item due: by inserting it, or by undoing its claim.
type producer struct {
	phase  producerPhase
	locked bool    // holds K, shared
	seen   laneSet // who was armed when it began; kept only if it matters
	tells  laneSet // whom its commit notifies
	all    bool    // its commit notifies all
}

type nodeStatus uint8

const (
	live       nodeStatus = iota
	leaving               // takes no more work; still armed
	leavingK              // has disarmed, and waits for K
	leavingOut            // was granted K; its last fetches end
	left
	dead      // its LISTEN session has ended, and with it its liveness lock; its rows are there
	sweepingK // another node is about to sweep its rows, and waits for K
	swept
)

// listens reports whether notifications reach the node.
func (n nodeStatus) listens() bool { return n <= leavingOut }

// lane is what the database and a node know of a lane.
type lane struct {
	armed    bool  // the row in waiters, as committed
	inFlight uint8 // notifications that were committed and not received

	// The node's memory.

	tokens    uint8
	settled   bool // armed and settled since, and nothing that may disarm was begun
	empty     bool // known empty
	contended bool // a fetch met locked rows: the scout has to look again

	bounce bouncePhase
	stay   bool    // of a bounce that chose: some due row has nowhere to go
	stuck  bool    // a bounce brought the token back, and nothing has changed since
	rank   uint8   // of the bounce
	tells  laneSet // whom the bounce notifies
}

type bouncePhase uint8

const (
	noBounce bouncePhase = iota
	bounceBegun
	bounceChose
)

type phase uint8

const (
	outside phase = iota // in a handler, or between two calls of Fetch
	parked
	begunFetch // the request is under way
	foundNone  // the server found nothing; the arm write is to come
	claimed    // the server claimed an item; not committed
	reported   // … and has read what more is due, and chosen whom to tell
	answered   // the transaction has ended; the answer is under way
	waitingK   // settling: waits for K
	gone
)

type answer uint8

const (
	none      answer = iota
	contended        // nothing that it could have, but rows that others hold
	found
	failed // rolled back, or nobody knows
)

type dispatcher struct {
	phase    phase
	answer   answer
	settling bool  // the fetch is that of a settle; it holds K until it commits
	arms     bool  // writes armed = true if it finds nothing; unless skipped
	disarms  bool  // writes armed = false if it finds something: the lane is hot
	duty     bool  // has to pass on a token if more is due
	remote   bool  // … in its own fetch, since nobody here was parked when it began
	clean    bool  // the lane was settled when it began, or is by it, and no signal has come since
	rank     uint8 // order of the sequence number, see machine.begin
	tag      uint8 // of the item that it found
	more     Tags  // what else it reported to be due
	tells    laneSet
}

// holdsK reports whether the dispatcher's transaction has K, exclusively.
func (d *dispatcher) holdsK() bool {
	return d.settling && (d.phase == claimed || d.phase == reported)
}

// inside reports whether the dispatcher is inside a fetch: neither parked nor in a handler.
func (d *dispatcher) inside() bool { return d.phase >= begunFetch && d.phase <= waitingK }

// waits reports whether the dispatcher waits because its last query found nothing.
func (d *dispatcher) waits() bool { return d.phase == parked || d.phase == waitingK }

// locks reports whether the dispatcher's transaction holds an item that it has not committed to.
func (d *dispatcher) locks() bool { return d.phase == claimed || d.phase == reported }
