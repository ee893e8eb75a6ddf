package pgwake

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: how does somebody who takes nothing learn that something has happened, whoever did it, and without asking for it?
//
// The nodes say so (followers.go). What is inserted by those who are no nodes the database tells, as it tells a node whose dispatchers wait: while
// nothing happens the observer has a row among the waiters, which says that it wants to hear everything. The first thing that it hears takes that
// row away, so producers that are busy do not pay for somebody who looks; it is back after a while without news.

// Observation is what Observe has heard. The zero value says: look once.
type Observation struct {
	// For is for how long more of it may happen without another Observation. Who shows what there is looks at once, and then again and again for so
	// long.
	For time.Duration

	// Reports are of nodes that have said how they are. If Asked, all of those that listen have been asked: those who did not answer within a second
	// are among Nodes alone.
	Reports []NodeReport
	Asked   bool
	Nodes   []NodeInfo
}

const (
	// observedFor is longer than it takes a node that is at work to say so again.
	observedFor = reportEvery * 3 / 2

	// askAgain is how often nodes are asked how they are that have nothing to tell. It is shorter than followedFor.
	askAgain = 30 * time.Second

	// mostReplies is how many replies are kept until they are looked at: more than there are nodes.
	mostReplies = 1000

	// afterHearing is how long what was inserted just before the observer began to hear takes to be committed, as a rule.
	afterHearing = 2 * time.Second
)

// Observe tells when something happens in the schema, whoever does it: an item is enqueued, fetched or ended, an event emitted, a turn taken. It is
// for those who show people what there is, and says when to look, not at what. It does not say what becomes due by itself if no node fetches it, what
// nodes do that do not listen, and what changes no queue and is done outside this library; and of what another transaction inserted before the observer heard
// it, it may say nothing. So look now and then all the same. It ends with ctx, with the Provider, when the loop does, and after an error. While the body
// of the loop runs nothing is read, and the server keeps what there is to say: let it be quick.
//
// While it goes on it has a connection of its own (Config.ListenConfig), and fails behind a transaction pooler. Every 30 seconds it takes two statements,
// and each node that listens one; a node that is at work takes another one every 4 seconds; and where work comes and goes by turns, the observer
// takes two whenever it begins.
func (p *Provider) Observe(ctx context.Context) iter.Seq2[Observation, error] {
	return func(yield func(Observation, error) bool) {
		const op = "observe"
		_, done, err := p.begin(ctx)
		if err != nil {
			yield(Observation{}, failed(op, err))
			return
		}
		done() // Close is not to wait for it
		outer := ctx
		ctx, cancel := context.WithCancel(outer)
		defer cancel()
		defer context.AfterFunc(p.engine.ctx, cancel)()
		o := &observer{p: p, key: 1 + rand.Int32N(1_000_000_000), reply: replyPrefix + strings.ToLower(crand.Text()), yield: yield}
		err = o.run(ctx)
		switch {
		case o.ended || outer.Err() != nil:
		case ctx.Err() != nil:
			yield(Observation{}, failed(op, ErrClosed))
		case err != nil:
			yield(Observation{}, failed(op, err))
		}
	}
}

// observer is one Observe.
type observer struct {
	p        *Provider
	conn     *pgx.Conn
	key      int32
	reply    string // the channel of answers
	channels []string
	yield    func(Observation, error) bool
	ended    bool // the loop

	hearing bool      // of what is inserted
	quietAt time.Time // when to hear again
	askedAt time.Time
	nextAsk time.Time

	// What has come and was not looked at: not a list, since anybody can notify, at any rate.
	stirred, joined bool     // by what is said to all: something has happened, a node has begun to listen
	replies         []string // no more than mostReplies

	// While answers come in:
	answersBy time.Time // zero: none do
	came      bool      // the question
	nodes     []NodeInfo
	missing   map[int32]bool
	said      map[int32]NodeReport
}

// tell says something to the loop. What came meanwhile has not been read, and is not late.
func (o *observer) tell(what Observation) {
	if o.ended {
		return
	}
	began := time.Now()
	o.ended = !o.yield(what, nil)
	if !o.answersBy.IsZero() {
		o.answersBy = o.answersBy.Add(time.Since(began))
	}
}

func (o *observer) run(ctx context.Context) (err error) {
	connecting, cancel := context.WithTimeout(ctx, o.p.direct.patience(ctx))
	defer cancel()
	o.conn, err = o.p.direct.connect(connecting, func(config *pgx.ConnConfig) {
		config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { o.take(n) } // see listener.serve
	})
	if err != nil {
		return err
	}
	defer hangUp(ctx, o.conn)
	keepAlive(o.conn.PgConn().Conn())
	defer o.leave(ctx)
	if err := o.listen(ctx); err != nil {
		return err
	}
	for !o.ended && ctx.Err() == nil {
		if err := o.act(ctx, time.Now()); err != nil {
			return err
		}
		if o.ended {
			break
		}
		if err := o.wait(ctx); err != nil {
			return err
		}
		if err := o.heard(ctx); err != nil {
			return err
		}
	}
	return nil
}

// act does what is to be done by now.
func (o *observer) act(ctx context.Context, now time.Time) error {
	asking := !o.answersBy.IsZero()
	switch {
	case asking && (o.came && len(o.missing) == 0 || !now.Before(o.answersBy)):
		if !o.came {
			return errDeaf
		}
		o.answersBy = time.Time{}
		o.tell(Observation{Reports: sortedReports(o.said), Asked: true, Nodes: o.nodes})
	case !asking && !now.Before(o.nextAsk):
		return o.ask(ctx, now)
	case !asking && !o.hearing && !now.Before(o.quietAt):
		if err := o.hear(ctx, true); err != nil {
			return err
		}
		o.tell(Observation{For: afterHearing})
	}
	return nil
}

// listen begins to listen: to what all are told once a notification has come, and so it is certain that the session is the observer's own.
func (o *observer) listen(ctx context.Context) error {
	if err := o.exec(ctx, "LISTEN "+quoted(o.reply)); err != nil {
		return err
	}
	err := o.p.do(ctx, "test LISTEN", func(ctx context.Context, q querier) error {
		_, err := q.Exec(ctx, testLISTEN, o.reply)
		return err
	})
	if err != nil {
		return err
	}
	testing, cancel := context.WithTimeout(ctx, selfTestDeadline)
	defer cancel()
	if err := o.waitUntil(testing); err != nil || ctx.Err() != nil {
		return cmp.Or(err, ctx.Err())
	}
	if len(o.replies) == 0 {
		_ = o.exec(ctx, "UNLISTEN "+quoted(o.reply)) // on a session that is shared: as good as one can
		return errDeaf
	}
	if err := o.hear(ctx, false); err != nil {
		return err
	}
	var listen []string
	for _, c := range o.channels {
		listen = append(listen, "LISTEN "+quoted(c))
	}
	return o.exec(ctx, listen...)
}

// exec runs statements that return nothing.
func (o *observer) exec(ctx context.Context, statements ...string) error {
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	return execAll(bounded, o.conn, statements...)
}

// hear has producers tell of what they insert, or not.
func (o *observer) hear(ctx context.Context, all bool) error {
	bounded, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	if err := o.conn.QueryRow(bounded, o.p.sql.observe, o.key, all).Scan(&o.channels); err != nil {
		return fmt.Errorf("have producers tell: %w", err)
	}
	o.hearing = all
	return nil
}

// leave takes the observer's row away.
func (o *observer) leave(ctx context.Context) {
	if o.hearing && !o.conn.IsClosed() {
		_ = o.hear(context.WithoutCancel(ctx), false) // otherwise a node clears it away
	}
}

func (o *observer) ask(ctx context.Context, now time.Time) (err error) {
	if o.nodes, err = o.p.ListNodes(ctx); err != nil {
		return err
	}
	o.missing, o.said, o.came = make(map[int32]bool), make(map[int32]NodeReport), false
	for _, n := range o.nodes {
		if n.Listening {
			o.missing[n.Key] = true
		}
	}
	err = o.p.do(ctx, "ask nodes", func(ctx context.Context, q querier) error {
		_, err := q.Exec(ctx, o.p.sql.askNodes, o.reply, true)
		return err
	})
	o.askedAt, o.nextAsk, o.answersBy = now, now.Add(askAgain), time.Now().Add(reportPatience)
	return err
}

// take keeps what a notification says; of many that are not looked at yet, that there was one. It is called while the connection is read, also during a statement.
func (o *observer) take(n *pgconn.Notification) {
	switch {
	case n.Channel == o.reply && len(o.replies) < mostReplies:
		o.replies = append(o.replies, n.Payload)
	case n.Channel != o.reply && (strings.HasPrefix(n.Payload, askPrefix) || strings.HasPrefix(n.Payload, followPrefix)): // somebody else looks
	default:
		o.stirred, o.joined = true, o.joined || strings.HasPrefix(n.Payload, "0 0 ")
	}
}

// wait returns when something has come, or there is something to do.
func (o *observer) wait(ctx context.Context) error {
	until := o.nextAsk
	switch asking := !o.answersBy.IsZero(); {
	case asking && o.came && len(o.missing) == 0:
		return nil
	case asking:
		until = o.answersBy
	case !o.hearing && o.quietAt.Before(until):
		until = o.quietAt
	}
	waiting, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	return o.waitUntil(waiting)
}

// waitUntil returns when something has come, or when ctx ends, which is an error only if it has closed the connection.
func (o *observer) waitUntil(ctx context.Context) error {
	for !o.stirred && len(o.replies) == 0 && ctx.Err() == nil {
		if err := o.conn.PgConn().WaitForNotification(ctx); err != nil && (ctx.Err() == nil || o.conn.IsClosed()) {
			return err
		}
	}
	return nil
}

// heard takes in what has come.
func (o *observer) heard(ctx context.Context) error {
	stirred, replies := o.stirred, o.replies
	if o.joined {
		o.nextAsk = o.askedAt.Add(reportPatience) // or many would have all be asked all the time
	}
	o.stirred, o.joined, o.replies = false, false, nil
	if stirred {
		if err := o.news(ctx, Observation{For: observedFor}); err != nil {
			return err
		}
	}
	for _, payload := range replies {
		if o.ended {
			break
		}
		if err := o.answered(ctx, payload); err != nil {
			return err
		}
	}
	return nil
}

// answered takes in a reply: to a question, or from a node that is at work and says so unasked.
func (o *observer) answered(ctx context.Context, payload string) error {
	if payload == "asked" {
		o.came = true
		return nil
	}
	text, unasked := strings.CutPrefix(payload, stirs)
	var r NodeReport
	if text != "" && (json.Unmarshal([]byte(text), &r) != nil || !o.knows(r.Key)) { // anybody can notify, of any number of nodes
		return nil
	}
	if !o.answersBy.IsZero() && text != "" {
		o.said[r.Key] = r
		delete(o.missing, r.Key)
	}
	if !unasked {
		return nil
	}
	what := Observation{For: observedFor}
	if text != "" {
		what.Reports = []NodeReport{r}
	}
	return o.news(ctx, what)
}

// knows reports whether a node was there when nodes were asked last. One that comes begins with a notification for which they are asked again.
func (o *observer) knows(key int32) bool {
	return slices.ContainsFunc(o.nodes, func(n NodeInfo) bool { return n.Key == key })
}

// news tells of something, and has producers that go on be silent.
func (o *observer) news(ctx context.Context, what Observation) error {
	o.quietAt = time.Now().Add(what.For)
	o.tell(what)
	if o.hearing && !o.ended {
		return o.hear(ctx, false)
	}
	return nil
}

func sortedReports(by map[int32]NodeReport) (all []NodeReport) {
	for _, key := range slices.Sorted(maps.Keys(by)) {
		all = append(all, by[key])
	}
	return all
}
