package model

// This file answers: what is a state?

const (
	maxNodes       = 3
	maxLanes       = 4
	maxDispatchers = 4
	maxProducers   = 3
	maxOfLane      = 2 // dispatchers of a lane
)

// laneSet is a set of lanes, by their number.
type laneSet uint8

type state struct {
	due         [tagCount]uint8 // items that are committed, due, and free, by tag
	losses      uint8           // sessions that may still be lost
	faults      uint8           // fetches, bounces and waits that may still fail
	lapses      uint8           // lanes that may still retire
	producers   [maxProducers]producer
	nodes       [maxNodes]node
	lanes       [maxLanes]lane
	dispatchers [maxDispatchers]dispatcher
}

type producerPhase uint8

const (
	notBegun producerPhase = iota
	begun                  // has its snapshot
	inserted               // has inserted its items and tried K; of the library's own: has committed
	told                   // of the library's own: its lanes know, the other nodes do not
	open                   // has decided whom to notify; nobody knows when it ends
	ended                  // committed, or rolled back
)

// producer is a transaction that makes items due: by inserting them, or by undoing their claim.
type producer struct {
	phase  producerPhase
	locked bool    // holds K, shared
	seen   laneSet // who was armed when it began, if that matters; later: those it tells who stand by
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
	sweeping  // … and was granted it
	sweptSoon // … and has chosen whom to tell
	swept
	deaf    // has lost its LISTEN session, and not its wits
	absent  // has not begun to listen
	joining // has asked who else there is; its row is not committed
)

// node is what a node is, and what its settler does.
type node struct {
	status  nodeStatus
	settler settlerPhase
	alone   bool // believes that no other node listens
	greets  bool // its greeting is on its way to the others
}

// listens reports whether notifications reach the node.
func (n node) listens() bool { return n.status <= leavingOut }

// runs reports whether its dispatchers go on.
func (n node) runs() bool { return n.listens() || n.status == deaf }

// settlerPhase is what the goroutine does that waits for producers on behalf of the lanes.
type settlerPhase uint8

const (
	idle        settlerPhase = iota
	waits                    // for K
	pauses                   // … for so long that it goes on on another connection: for a moment it does not
	waitsAlone               // for K, and has asked: one producer holds it
	pausesAlone              // … if it asks before it waits
	granted                  // the answer is under way
)

// forOne reports whether the settler says that its wait is for one producer.
func (n node) forOne() bool { return n.settler == waitsAlone || n.settler == pausesAlone }

// token is the duty to look once.
type token uint8

const (
	noToken token = iota
	plain         // others were told as well, or need not be
	sole          // nobody else was told
	passed        // sole, and was passed on once
)

// isSole reports whether nobody else was told.
func (t token) isSole() bool { return t >= sole }

// lane is what the database and a node know of a lane.
type lane struct {
	armed     bool  // the row in waiters, as committed
	row       bool  // there is one; kept only if it may go
	stale     bool  // it is that of a session that has ended
	directed  uint8 // notifications to this lane alone that were committed and not received
	handed    uint8 // … of a bounce
	standBys  uint8 // … by which it stands by
	broadcast uint8 // those to all

	// The node's memory.

	tokens    [maxOfLane]token // in store, oldest first
	settle    settlePhase
	settled   bool // armed and settled since, and nothing that may disarm was begun
	empty     bool // known empty
	contended bool // a fetch met locked rows: the scout has to look again
	alone     bool // … and what it will have is sole
	scout     bool // a scout looks now and then while the settler waits
	lastOne   bool // the settler waits on its behalf, for one producer only
	hot       bool // has found something since it began to disarm
	standsBy  bool // somebody is to look, after a while
	retired   bool

	pending bounce  // a bounce that was begun, and is not under way yet
	said    bounce  // one that is under way
	tells   laneSet // whom it notifies, if it is not all
	unused  bool    // a write is under way by which the lane disarms that nobody uses
	rank    uint8   // … and its number
}

// bounce is a token on its way to others.
type bounce uint8

const (
	noBounce bounce = iota
	toOne           // for each kind of what is due
	toAll
)

// settlePhase is how far a lane has come that was armed and is not settled.
type settlePhase uint8

const (
	noSettle settlePhase = iota
	wanted               // the settler has to wait for K, and has not begun
	inWait               // it waits, or was granted K
)

type phase uint8

const (
	outside phase = iota // in a handler, or between two calls of Fetch
	parked
	begunFetch // the request is under way
	foundNone  // the server found nothing; the arm write is to come
	claimed    // the server claimed an item; not committed
	reported   // … and has read what more is due
	answered   // the transaction has ended; the answer is under way
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
	phase   phase
	answer  answer
	by      token // what demanded the fetch
	arms    bool  // writes armed = true if it finds nothing; unless skipped
	disarms bool  // writes armed = false if it finds something: the lane is hot
	clean   bool  // the lane was settled when it began, and no signal has come since, nor a disarm, nor an answer with more
	void    bool  // a disarm of somebody else has begun since
	passed  bool  // an answer with more has come since
	lastOne bool  // it began after the settler knew that its wait is for one producer, and that wait goes on
	old     bool  // it began in a session that has ended
	stands  bool  // it began after the lane was told to stand by
	fresh   bool  // the token in its hand is newer than the fetch that another is in
	newer   uint8 // stored tokens that came after it began
	rank    uint8 // order of the sequence number, see machine.begin
	tag     uint8 // of the item that it found
	more    Tags  // what else it reported to be due
}

// inside reports whether the dispatcher is inside a fetch: neither parked nor in a handler.
func (d *dispatcher) inside() bool { return d.phase >= begunFetch && d.phase <= answered }

// waits reports whether the dispatcher waits because its last query found nothing.
func (d *dispatcher) waits() bool { return d.phase == parked }

// locks reports whether the dispatcher's transaction holds an item that it has not committed to.
func (d *dispatcher) locks() bool { return d.phase == claimed || d.phase == reported }
