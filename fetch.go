package pgwake

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file answers: what can a fetch ask for?

// FetchOptions says what to fetch and how long to wait. Nil means the zero value.
type FetchOptions struct {
	// LockTimeout is how long the claim holds unless it is renewed. From 10 ms to 24 h.
	// Defaults to DefaultLockTimeout, 30 s.
	LockTimeout time.Duration

	// PollTimeout is how long to wait for work. A fetch never gives up earlier, and at most 200 ms and a query
	// in flight later, or a second more if the pool is making a connection. If it is still waiting for one then, the error is
	// context.DeadlineExceeded, and ErrNoWork otherwise. Defaults to Config.MaxWait.
	PollTimeout time.Duration

	// NoWait makes the fetch ask once and return; for a connection of the pool it waits as long as its context
	// lets it. Not together with PollTimeout. Defaults to false.
	NoWait bool

	// Namespaces limits the fetch to these. Defaults to all.
	Namespaces []string

	// Tags limits a fetch of work items to those with, or without, certain tags. Defaults to DefaultOnly.
	Tags TagFilter

	// Session lets a fetch of work items claim those that belong to a session as well, and says for whom.
	// Defaults to nil: only items without a session.
	Session *SessionOptions

	// Fair has the namespaces take turns that have work items due, by their Limits.Weight, so that a flood in one keeps no
	// other waiting; priority and due time are the order within each. It costs about 60 µs for each namespace with items.
	// Defaults to false: one order for all.
	Fair bool

	// MaxAttempts makes a fetch of work items put those aside that were claimed so often before: they become dead
	// letters, with the reason "max attempts". Up to 2,147,483,647. Defaults to 0: no limit.
	MaxAttempts int

	// Ack has a fetch of work items acknowledge others first, in the same round trip and transaction. If the lease of
	// one has ended, the others are acknowledged, nothing is claimed, and the error is a *LostLocksError. After any
	// other error but ErrNoWork nobody knows. Defaults to none.
	Ack []LockToken

	// AckAsync has the acks of Ack committed asynchronously, as claims are: the fetch does not wait for the disk. If the
	// server crashes within a fraction of a second, what it loses comes again, unless Flush returned before. Defaults to
	// false.
	AckAsync bool

	// Queues limits a fetch of turns to instances with these queue names; "" stands for those without one. Nil means
	// all, and an empty slice that is not nil means none. Defaults to all.
	Queues []string

	// Owner is who fetches turns: for it, instances that are sticky to it (OrchestrationAck.Sticky) are due too. At most
	// 255 bytes. Fetches with the same owner, on whatever node, are alike; each owner is a lane of its own on a node,
	// so have one for a node, not one for a dispatcher. Defaults to "": no turn of an instance while it is sticky.
	Owner string

	// Versions limits a fetch of turns to executions that this node supports. Defaults to nil: any.
	Versions *VersionFilter

	// WithoutHistory leaves OrchestrationItem.History empty: LastEventID tells how far it goes. Defaults to false.
	WithoutHistory bool
}

// SessionOptions is for items that belong together and are to be handled in one place, one owner at a time.
type SessionOptions struct {
	// Owner is who claims: the first to claim an item of a session owns it, and nobody else gets one until the
	// session's lock ends. Fetches with the same owner, on whatever node, share it. Required; at most 255 bytes.
	Owner string

	// LockTimeout is how long a claim makes the session its owner's, from then on. It does not depend on the lease of
	// the item. From 10 ms to 24 h. Defaults to DefaultLockTimeout, 30 s.
	LockTimeout time.Duration
}

// TagFilter selects work items by their tag. The zero value is DefaultOnly.
type TagFilter struct {
	mode tagMode
	tags []string
}

type tagMode int

const (
	tagsListed tagMode = iota // the zero TagFilter lists none, which stands for DefaultOnly
	tagsAny
	tagsNone
)

// MaxTags is the most tags that a TagFilter may list.
const MaxTags = 100

// DefaultOnly selects items without a tag.
func DefaultOnly() TagFilter { return TagFilter{} }

// Tags selects items with one of these tags; without any, none.
func Tags(tags ...string) TagFilter {
	if len(tags) == 0 {
		return NoTag()
	}
	return TagFilter{tags: tags}
}

// DefaultAnd selects items without a tag and those with one of these.
func DefaultAnd(tags ...string) TagFilter { return TagFilter{tags: append([]string{""}, tags...)} }

// AnyTag selects all items.
func AnyTag() TagFilter { return TagFilter{mode: tagsAny} }

// NoTag selects nothing: such a fetch waits for its poll timeout and never claims.
func NoTag() TagFilter { return TagFilter{mode: tagsNone} }

// labels returns the tags as a filter takes them.
func (f TagFilter) labels() ([]string, error) {
	switch {
	case f.mode == tagsAny:
		return nil, nil
	case f.mode == tagsNone:
		return []string{}, nil
	case len(f.tags) == 0:
		return []string{""}, nil
	case len(f.tags) > MaxTags+1:
		return nil, invalid("%d tags are more than %d", len(f.tags), MaxTags)
	}
	for _, tag := range f.tags {
		if err := checkText("tag", tag, false); err != nil {
			return nil, err
		}
	}
	return sortedSet(f.tags), nil
}

// Version of an orchestration's code, in the order major, minor, patch.
type Version struct{ Major, Minor, Patch int }

// The bits of a part of a version. A version that is stored is 1 more, and 0 means none.
const (
	partBits  = 20
	majorBits = 22
)

// ParseVersion reads "1.2.3", where a missing part means 0.
func ParseVersion(text string) (v Version, err error) {
	parts := strings.Split(text, ".")
	if len(parts) > 3 {
		return v, invalid("version %s has more than 3 parts", quote(text))
	}
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, majorBits)
		if err != nil || strings.HasPrefix(part, "+") {
			return Version{}, invalid("version %s is not like 1.2.3", quote(text))
		}
		*[]*int{&v.Major, &v.Minor, &v.Patch}[i] = int(n)
	}
	return v, v.check()
}

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch) }

func (v Version) check() error {
	if v.Major < 0 || v.Major >= 1<<majorBits || v.Minor < 0 || v.Minor >= 1<<partBits || v.Patch < 0 || v.Patch >= 1<<partBits {
		return invalid("version %v: a part is negative, or too large", v)
	}
	return nil
}

// pin is the version as it is stored: pins are in the order of their versions.
func (v Version) pin() int64 {
	return 1 + int64(v.Major)<<(2*partBits) + int64(v.Minor)<<partBits + int64(v.Patch)
}

// pinned returns the version of a pin; nil: none.
func pinned(pin int64) *Version {
	if pin == 0 {
		return nil
	}
	const part = 1<<partBits - 1
	pin--
	return &Version{int(pin >> (2 * partBits)), int(pin >> partBits & part), int(pin & part)}
}

// VersionRange is the versions from Min to Max, both included.
type VersionRange struct{ Min, Max Version }

// VersionFilter selects executions by their pinned version. An execution without one matches any filter; a filter
// without a range matches nothing, not even that.
type VersionFilter struct {
	Ranges []VersionRange // only the first one counts
}

// fetchPlan is a FetchOptions that was checked and completed.
type fetchPlan struct {
	lock        time.Duration
	poll        time.Duration
	noWait      bool
	items       int // at most so many
	filter      filter
	session     time.Duration
	maxAttempts int
	ack         []lease
	ackAsync    bool
	history     bool

	giveUp time.Time // waiting for a connection of the pool; zero: with the caller's context
}

// poolGrace is how much longer than its poll timeout a fetch waits for a connection: its last wake-up may have
// come with the timeout.
const poolGrace = 200 * time.Millisecond

func (p *Provider) plan(q Queue, o *FetchOptions) (plan fetchPlan, err error) {
	if o == nil {
		o = &FetchOptions{}
	}
	plan = fetchPlan{poll: cmp.Or(o.PollTimeout, p.cfg.MaxWait), noWait: o.NoWait, items: 1, maxAttempts: o.MaxAttempts, history: !o.WithoutHistory}
	if plan.lock, err = lockTimeout(o.LockTimeout); err != nil {
		return plan, err
	}
	switch {
	case o.PollTimeout < 0:
		return plan, invalid("poll timeout %v is negative", o.PollTimeout)
	case o.NoWait && o.PollTimeout > 0:
		return plan, invalid("NoWait contradicts the poll timeout %v", o.PollTimeout)
	case o.MaxAttempts < 0 || o.MaxAttempts > math.MaxInt32:
		return plan, invalid("at most %d attempts is not between 0 and %d", o.MaxAttempts, math.MaxInt32)
	case q == Orchestrator && (o.Tags.mode != tagsListed || o.Tags.tags != nil || o.Session != nil || o.Fair || o.MaxAttempts != 0 || o.Ack != nil || o.AckAsync):
		return plan, invalid("Tags, Session, Fair, MaxAttempts, Ack and AckAsync are for work items")
	case q == Worker && (o.Queues != nil || o.Owner != "" || o.Versions != nil || o.WithoutHistory):
		return plan, invalid("Queues, Owner, Versions and WithoutHistory are for turns")
	}
	if !plan.noWait && plan.poll < maxDelay {
		plan.giveUp = time.Now().Add(plan.poll + poolGrace)
	}
	if plan.filter.Namespaces, err = namespaceSet(o.Namespaces); err != nil {
		return plan, err
	}
	if q == Worker {
		return plan, plan.ofWork(o)
	}
	return plan, plan.ofTurns(o)
}

func (plan *fetchPlan) ofWork(o *FetchOptions) (err error) {
	plan.filter.nothing, plan.filter.Fair = o.Tags.mode == tagsNone, o.Fair
	if plan.filter.Labels, err = o.Tags.labels(); err != nil {
		return err
	}
	if o.Session != nil {
		if err := checkText("session owner", o.Session.Owner, true); err != nil {
			return err
		}
		plan.filter.Owner = o.Session.Owner
		if plan.session, err = lockTimeout(o.Session.LockTimeout); err != nil {
			return err
		}
	}
	plan.ack, plan.ackAsync = slices.Grow(plan.ack, len(o.Ack)), o.AckAsync
	for _, token := range o.Ack {
		l, err := token.splitWork()
		if err != nil {
			return &LostLocksError{Tokens: []LockToken{token}} // at least; the others are yet to be acknowledged
		}
		plan.ack = append(plan.ack, l)
	}
	return nil
}

func (plan *fetchPlan) ofTurns(o *FetchOptions) error {
	for _, queue := range o.Queues {
		if err := checkText("queue name", queue, false); err != nil {
			return err
		}
	}
	plan.filter.Labels = sortedSet(o.Queues)
	plan.filter.nothing = o.Queues != nil && len(o.Queues) == 0
	if err := checkText("sticky owner", o.Owner, false); err != nil {
		return err
	}
	plan.filter.Owner = o.Owner
	switch {
	case o.Versions == nil:
		return nil
	case len(o.Versions.Ranges) == 0:
		plan.filter.nothing, plan.filter.Labels = true, []string{}
		return nil
	}
	r := o.Versions.Ranges[0]
	if err := r.Min.check(); err != nil {
		return err
	}
	if err := r.Max.check(); err != nil {
		return err
	}
	if r.Max.pin() < r.Min.pin() {
		return invalid("the versions from %v to %v are none", r.Min, r.Max)
	}
	plan.filter.MinPin, plan.filter.MaxPin = r.Min.pin(), r.Max.pin()
	return nil
}

// sortedSet returns the strings in order, each once; nil for nil.
func sortedSet(texts []string) []string {
	if texts == nil {
		return nil
	}
	texts = slices.Clone(texts)
	slices.Sort(texts)
	return slices.Compact(texts)
}

// filter is what a fetch asks for: dispatchers with the same filter share a lane. As JSON it is what the SQL function
// look takes.
type filter struct {
	Namespaces []string `json:"namespaces,omitempty"` // sorted; nil: all
	Labels     []string `json:"labels,omitempty"`     // tags of work items, queue names of instances, sorted; nil: all
	Owner      string   `json:"owner,omitempty"`      // of sessions, or to whom instances are sticky; "": what has none alone
	MinPin     int64    `json:"min,omitempty"`        // of the pinned version; 0: any
	MaxPin     int64    `json:"max,omitempty"`
	Fair       bool     `json:"fair,omitempty"` // of no concern to look

	nothing   bool     // it matches nothing
	unfetched []string // namespaces that were asked for as well, and that are not fetched in the mode that they have; "": all
	manner    manner   // how the lane learns of what matches
}

// text is what the SQL function look takes.
func (f filter) text() string {
	text, _ := json.Marshal(f) // strings and numbers
	return string(text)
}

// key is the filter's canonical form.
func (f filter) key() string {
	return fmt.Sprint(f.nothing, f.unfetched, f.manner, f.text())
}
