package pgwake

import (
	"context"
	crand "crypto/rand"
	"encoding/json"
	"iter"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how are the nodes of other processes? They say so when they are asked, and only then: who is not asked pays nothing.
//
// The question comes on a channel on which every node listens anyway, and the answer goes to the channel that it names. Invariant: a
// question costs a node one statement on its LISTEN connection at most, and wakes no dispatcher. Without credit (trust.go) the answer comes
// later, and of many questions at once some get none.

// NodeReport is what a node says of itself.
type NodeReport struct {
	Key      int32  // NodeInfo.Key
	Host     string // of the process, as its operating system has it
	PID      int    // of the process
	Schema   string
	At       time.Time // when it said so, server time
	Stats    Stats     // Breaker.Err is not among it
	Problems []Problem // of Provider.Health
}

const (
	askPrefix    = "pgwake report to "
	followPrefix = "pgwake follow to " // and say when you have done something; see followers.go
	replyPrefix  = "pgwake_report_"

	// reportPatience is how long nodes are waited for that are there and do not answer.
	reportPatience = time.Second

	// mostQuestions is how many channels may wait for an answer: more than there are consoles.
	mostQuestions = 8

	// maxProblem keeps a report within the 8,000 bytes of a notification: the counters take up to 4,000.
	maxProblem = 300
)

var replyChannel = regexp.MustCompile(`^` + replyPrefix + `[0-9a-z]{1,40}$`)

// questions are those that are to be answered: the channels where to. They are for the goroutine of run alone.
type questions struct {
	replies  []string
	answerAt time.Time // local: when to, without credit; zero: at once
}

// questionIn reads a question: the channel where the answer goes, and whether whoever asks wants to hear of what the node does from now on.
func questionIn(payload string) (reply string, follows, ok bool) {
	if reply, ok = strings.CutPrefix(payload, askPrefix); !ok {
		reply, follows = strings.CutPrefix(payload, followPrefix)
		ok = follows
	}
	return reply, follows, ok && replyChannel.MatchString(reply)
}

// note has run answer there next. Of too many at once some get no answer.
func (a *questions) note(reply string) {
	if len(a.replies) < mostQuestions && !slices.Contains(a.replies, reply) {
		a.replies = append(a.replies, reply)
	}
}

// untilAnswer returns when to answer; zero: there is nothing.
func (l *listener) untilAnswer() (at time.Time) {
	switch {
	case len(l.replies) == 0:
	case l.answerAt.IsZero():
		at = time.Now()
	default:
		at = time.Now().Add(l.answerAt.Sub(l.e.clock.Now()))
	}
	return at
}

// answer says how the node is to those who have asked. The error is that of a connection that broke.
func (l *listener) answer(ctx context.Context, conn *pgx.Conn) error {
	if len(l.replies) == 0 || l.e.trust.putOff(&l.answerAt) && l.e.clock.Now().Before(l.answerAt) {
		return nil
	}
	replies := l.replies
	l.questions = questions{}
	report, ok := l.e.reportJSON()
	if !ok {
		return nil
	}
	for range replies {
		l.e.trust.spend() // the server has as many to deliver
	}
	return tellingOf(replies, report).run(ctx, conn)
}

// tellingOf is a notification to some channels.
func tellingOf(channels []string, payload string) *job {
	const notify = "SELECT pg_catalog.pg_notify(reply, $2) FROM pg_catalog.unnest($1::text[]) AS reply"
	return &job{sql: notify, args: []any{channels, payload}, dest: new(any), done: make(chan error, 1)}
}

// reportJSON is the report as a notification has it.
func (e *engine) reportJSON() (string, bool) {
	report, err := json.Marshal(e.report())
	if err != nil {
		e.log().Error("pgwake: a report of this node cannot be written", "error", err)
	}
	return string(report), err == nil
}

// report is what the node says of itself.
func (e *engine) report() NodeReport {
	r := NodeReport{Key: e.node, PID: os.Getpid(), Schema: e.cfg.Schema, At: e.clock.Server(e.clock.Now()), Stats: e.snapshot()}
	r.Host, _ = os.Hostname()
	r.Stats.Breaker.Err = nil // an error of any type
	for _, p := range e.health().Problems {
		if len(p.Text) > maxProblem {
			p.Text = strings.ToValidUTF8(p.Text[:maxProblem], "") + "…"
		}
		r.Problems = append(r.Problems, p)
	}
	return r
}

// NodeReports asks the nodes that listen on the schema how they are, this one included, at once and then every so often, and yields what
// they say, by key: when all of them have, or a second after the question. So a node that does not answer, or that is of a version that
// does not know the question, or that gets more notifications than there is work, is missing. It ends with ctx, with the Provider, when the
// loop does, and after an error. While it goes on it has a connection of its own (Config.ListenConfig); behind a transaction pooler nothing
// comes. A node pays a statement for each question. Whoever may connect to the database can forge what a node says.
func (p *Provider) NodeReports(ctx context.Context, every time.Duration) iter.Seq2[[]NodeReport, error] {
	return func(yield func([]NodeReport, error) bool) {
		const op = "ask nodes"
		if every <= 0 {
			yield(nil, failed(op, invalid("%v between two questions is not possible", every)))
			return
		}
		_, done, err := p.begin(ctx)
		if err != nil {
			yield(nil, failed(op, err))
			return
		}
		done() // Close is not to wait for it
		ctx, end := context.WithCancel(ctx)
		defer end()
		defer context.AfterFunc(p.engine.ctx, end)()
		preparing, cancel := context.WithTimeout(ctx, p.direct.patience(ctx))
		defer cancel()
		conn, err := p.direct.connect(preparing)
		if err != nil {
			if p.engine.ctx.Err() == nil {
				yield(nil, failed(op, err))
			}
			return
		}
		defer hangUp(ctx, conn)
		reply := replyPrefix + strings.ToLower(crand.Text())
		if err := execAll(preparing, conn, "LISTEN "+quoted(reply)); err != nil {
			yield(nil, failed(op, err))
			return
		}
		for {
			next := time.NewTimer(every)
			reports, err := p.askNodes(ctx, conn, reply)
			if ctx.Err() != nil || !yield(reports, err) || err != nil {
				next.Stop()
				return
			}
			select {
			case <-ctx.Done():
				next.Stop()
				return
			case <-next.C:
			}
		}
	}
}

// askNodes asks once. Late answers to a question before are as good.
func (p *Provider) askNodes(ctx context.Context, conn *pgx.Conn, reply string) ([]NodeReport, error) {
	nodes, err := p.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	missing := make(map[int32]bool)
	for _, n := range nodes {
		if n.Listening {
			missing[n.Key] = true
		}
	}
	asked := maps.Clone(missing)
	err = p.do(ctx, "ask nodes", func(ctx context.Context, q querier) error {
		_, err := q.Exec(ctx, p.sql.askNodes, reply, false)
		return err
	})
	if err != nil {
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, reportPatience)
	defer cancel()
	said := make(map[int32]NodeReport)
	for len(missing) > 0 {
		n, err := conn.WaitForNotification(waiting)
		if waiting.Err() != nil {
			break
		}
		if err != nil {
			return nil, failed("ask nodes", err)
		}
		var r NodeReport
		if json.Unmarshal([]byte(n.Payload), &r) == nil && asked[r.Key] { // anybody can notify, of any number of nodes
			said[r.Key] = r
			delete(missing, r.Key)
		}
	}
	return sortedReports(said), nil
}
