package pgmq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/dbclock"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: how do pgmq's queues do what an EventStream does?

// Config is for New. The zero value means the defaults, and so does a nil one.
type Config struct {
	// ListenConfig is for the connection that listens, which cannot go through a transaction pooler: the Stream finds out, and does not
	// count on it. Defaults to the pool's settings.
	ListenConfig *pgx.ConnConfig

	// FallbackInterval is how often a Receive that waits asks without being told, in case that somebody has changed a message behind
	// the triggers. At least 1 s. Defaults to 1 min.
	FallbackInterval time.Duration

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

// answerDeadline bounds the silence of the server: a statement that claims is not cancelled when its caller is gone, since nobody would know
// what it has claimed.
const answerDeadline = 5 * time.Second

// mostAnswer is what an answer of the server has at most, unless it is one message (pgwake_pgmq.receive).
const mostAnswer = 64 << 20

// longestSilence bounds what answerDeadline becomes for the messages of a namespace, if those take longer.
const longestSilence = 2 * time.Minute

// acquireGrace is how much longer than its time a Receive waits for a connection: it may have been told of a message at the end of that,
// and a pool of which all connections are in use, or are tried before they are handed out, is no database that does not answer.
const acquireGrace = 200 * time.Millisecond

// Stream is a dispatch.EventStream of all queues of a database. All methods are safe for concurrent use.
type Stream struct {
	pool   *pgxpool.Pool
	cfg    Config
	clock  *dbclock.Clock
	credit credit // for what notifications call for

	patience time.Duration // with a statement that claims

	readCommitted bool // by default, where the pool leads to

	closed chan struct{}
	close  func()
	ears   sync.WaitGroup // the goroutine that listens

	mu     sync.Mutex
	parked map[*parked]bool
	habits map[string]habit // by namespace; others have the usual one
}

var (
	_ dispatch.EventStream   = (*Stream)(nil)
	_ dispatch.LeaseExtender = (*Stream)(nil)
	_ dispatch.DeadLetterer  = (*Stream)(nil)
)

// New returns a Stream on the database of a pool, which stays the caller's. It has one more connection, which listens; while that is to be
// had the Stream pushes, and otherwise it polls once in FallbackInterval. If a connection of the pool gives a Receive no answer for 5 s, the
// pool is reset: connections are then closed when nobody uses them, and made anew. Fails with pgwake.ErrConfig for a Config that is unusable,
// if Install has not been called, and if the pool's sessions have a DateStyle or a client_encoding that cannot be read, as pgwake.New does (TunePool).
func New(ctx context.Context, pool *pgxpool.Pool, config *Config) (*Stream, error) {
	const op = "new"
	s := &Stream{pool: pool, clock: dbclock.New(nil), patience: answerDeadline, closed: make(chan struct{}), parked: make(map[*parked]bool),
		habits: make(map[string]habit)}
	if config != nil {
		s.cfg = *config
	}
	if s.cfg.FallbackInterval == 0 {
		s.cfg.FallbackInterval = time.Minute
	}
	if s.cfg.Logger == nil {
		s.cfg.Logger = slog.Default()
	}
	if pool == nil || s.cfg.FallbackInterval < time.Second {
		return nil, failed(op, fmt.Errorf("%w: the pool is nil, or FallbackInterval %v is less than a second", pgwake.ErrConfig, s.cfg.FallbackInterval))
	}
	if err := s.askIsolation(ctx); err != nil {
		return nil, failed(op, err)
	}
	if _, err := s.namespaces(ctx); err != nil {
		return nil, failed(op, err)
	}
	listening, end := context.WithCancel(context.Background())
	s.close = sync.OnceFunc(func() {
		close(s.closed)
		end()
	})
	s.ears.Go(func() { s.listen(listening) })
	return s, nil
}

// Close returns every Receive that waits, with pgwake.ErrClosed, and ends the connection that listens. What was received can still be
// acknowledged and given back. Safe to call twice.
func (s *Stream) Close() {
	s.close()
	s.ears.Wait()
}

// Receive reads from the queues of a namespace, oldest first in each. Invariant: when its time is over it says so, by the error of its context,
// only if it was waiting to be told then, and not for the database. From that Coordinators take it that the database is there, and the
// queues are empty.
func (s *Stream) Receive(ctx context.Context, namespace string, most int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	const op = "receive"
	if namespace == "" || most < 1 || most > pgwake.MaxFetch || lease <= 0 || lease > pgwake.MaxLockTimeout {
		return nil, failed(op, fmt.Errorf("%w: %d messages of namespace %q for %v", pgwake.ErrInvalid, most, namespace, lease))
	}
	var got []dispatch.StreamDelivery
	err := s.await(ctx, namespace, func() (next time.Time, found bool, err error) {
		got, next, err = s.claim(ctx, namespace, most, lease)
		return next, len(got) > 0, noAnswer(err)
	})
	if err != nil { // also of half an answer, which comes again: the statement was rolled back, or its leases end
		return nil, failed(op, err)
	}
	return got, nil
}

// noAnswer is an error of a statement, or of having a connection for it.
func noAnswer(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer: %v", err)
	}
	return err
}

// claim asks once. next is when to ask again, local; zero: when somebody is told of something.
func (s *Stream) claim(ctx context.Context, namespace string, most int, lease time.Duration) (got []dispatch.StreamDelivery, next time.Time, err error) {
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, next, err
	}
	defer conns.Release(conn)
	habit := s.habitOf(namespace)
	most = min(most, habit.most)
	silence := habit.silence + time.Duration(most)*time.Millisecond
	bounded, heard, end := conns.Silence(context.WithoutCancel(ctx), silence)
	defer end()
	bytes := 0
	defer func() {
		switch {
		case err != nil && bounded.Err() != nil:
			err = fmt.Errorf("no answer within %v: %v", silence, err) // nobody asked for this to end: it is not to say so
			s.pool.Reset()
			habit.silence = min(2*habit.silence, longestSilence)
		case err == nil && (len(got) > 0 || !due(next)): // else what is due is locked, perhaps by what took too long, until the server has noticed
			habit.silence = s.patience
			habit.adjust(most, len(got), bytes)
		}
		s.keep(namespace, habit)
	}()
	err = s.atReadCommitted(bounded, conn, func(q querier) error {
		heard()
		got, next, bytes, err = s.read(bounded, q, namespace, most, lease, heard)
		return err
	})
	return got, next, err
}

// read is the statement that claims. It says that something came.
func (s *Stream) read(ctx context.Context, q querier, namespace string, most int, lease time.Duration, heard func()) (got []dispatch.StreamDelivery, next time.Time, bytes int, err error) {
	sent := time.Now()
	rows, err := q.Query(ctx, `SELECT queue_name, msg_id, read_ct, enqueued_at, message, headers, next_vt, answered_at FROM pgwake_pgmq.receive($1, $2, $3)`,
		namespace, int32(math.Ceil(lease.Seconds())), most)
	if err != nil {
		return nil, next, 0, err
	}
	defer rows.Close()
	for rows.Next() {
		heard()
		var queue *string
		var id *int64
		var reads *int32
		var enqueued, nextVT, answered *time.Time
		var message, headers []byte
		if err := rows.Scan(&queue, &id, &reads, &enqueued, &message, &headers, &nextVT, &answered); err != nil {
			return nil, next, bytes, err
		}
		if id == nil { // the last row
			s.clock.Observe(sent, time.Now(), *answered)
			if nextVT != nil {
				next = s.clock.Local(*nextVT)
			}
			continue
		}
		d := dispatch.StreamDelivery{ID: *id, Namespace: namespace, EnqueuedAt: s.clock.Local(*enqueued), LeasedUntil: sent.Add(lease),
			Receipt: receipt{*queue, *id, *reads}.token()}
		d.Name = *queue
		if string(message) != "null" {
			d.Payload = message
		}
		d.Attempt = max(int(*reads), 1) // whoever inserts it may begin anywhere
		addHeaders(&d, headers)
		bytes += len(message) + len(headers)
		got = append(got, d)
	}
	return got, next, bytes, rows.Err()
}

// due reports whether next, which is local, has come; zero: never.
func due(next time.Time) bool { return !next.IsZero() && !next.After(time.Now()) }

// keep takes note of a habit, unless it is that of all namespaces.
func (s *Stream) keep(namespace string, h habit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h == s.usual() {
		delete(s.habits, namespace)
		return
	}
	s.habits[namespace] = h
}

func (s *Stream) habitOf(namespace string) habit {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h, ok := s.habits[namespace]; ok {
		return h
	}
	return s.usual()
}

func (s *Stream) usual() habit { return habit{silence: s.patience, most: pgwake.MaxFetch} }

// habit is how to ask for the messages of a namespace.
type habit struct {
	// silence is for how long the server may be silent, from when it is asked to the first message, or from one to the next. It is so while it
	// takes messages apart, or one is on its way; so if that was too short it is doubled the next time, or what is large would be asked for in
	// vain for ever.
	silence time.Duration

	most int // messages, since the server puts back those that are too many for an answer
}

// adjust learns from an answer of so many messages, of those that were asked for.
func (h *habit) adjust(asked, came, bytes int) {
	switch {
	case came < asked && bytes > mostAnswer/2: // it may have been cut; if not, there are no more for now
		h.most = came
	case came == asked && bytes <= mostAnswer/2:
		h.most = min(max(h.most, 2*asked), pgwake.MaxFetch)
	}
}

// acquire waits for a connection until ctx is cancelled, or its time has been over for a while.
func (s *Stream) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	longer := ctx
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		longer, cancel = context.WithDeadline(context.WithoutCancel(ctx), end.Add(acquireGrace))
		defer cancel()
		defer context.AfterFunc(ctx, func() {
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				cancel()
			}
		})()
	}
	for {
		bounded, cancel := context.WithTimeout(longer, answerDeadline)
		conn, err := conns.Acquire(bounded, s.pool)
		over := bounded.Err() != nil && longer.Err() == nil
		cancel()
		if err == nil || !over {
			return conn, err
		}
		if n := s.pool.Stat(); n.AcquiredConns() < n.MaxConns() && !errors.Is(err, conns.ErrMaking) {
			s.pool.Reset() // a connection that was tried gave no sign, and so will the others that went the same way
		}
	}
}

// Ack deletes messages.
func (s *Stream) Ack(ctx context.Context, tokens []pgwake.LockToken) error {
	return failed("ack", s.onLeases(ctx, tokens, `SELECT id, reads, true FROM pgwake_pgmq.ack($1, $2, $3)`))
}

// Extend makes their vt later, or sooner. Of several those that another transaction has locked are not waited for, and told by a
// *dispatch.NotExtendedError.
func (s *Stream) Extend(ctx context.Context, tokens []pgwake.LockToken, lease time.Duration) error {
	const waiting = `SELECT id, reads, true FROM pgwake_pgmq.extend($1, $2, $3, $4)`
	if len(tokens) == 1 {
		return failed("extend", s.onLeases(ctx, tokens, waiting, lease))
	}
	err := s.onLeases(ctx, tokens, `SELECT id, reads, extended FROM pgwake_pgmq.extend_free($1, $2, $3, $4)`, lease)
	var server *pgconn.PgError
	if errors.As(err, &server) && server.Code == "42883" { // Install was last called by a version that had none
		err = s.onLeases(ctx, tokens, waiting, lease)
	}
	return failed("extend", err)
}

// onLeases runs a statement for each queue that returns those of which the lease holds, and whether that was done. The queues are independent: the same
// call may be made again after an error, but what had its end is lost then.
func (s *Stream) onLeases(ctx context.Context, tokens []pgwake.LockToken, sql string, args ...any) error {
	done := make(map[receipt]bool, len(tokens)) // of those that hold
	for queue, r := range byQueue(tokens) {
		err := s.do(ctx, func(q querier) error {
			rows, _ := q.Query(ctx, sql, append([]any{queue, r.ids, r.reads}, args...)...) // its error is that of the rows
			_, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (_ struct{}, err error) {
				held, is := receipt{queue: queue}, false
				err = row.Scan(&held.id, &held.reads, &is)
				done[held] = is
				return struct{}{}, err
			})
			return err
		})
		if err != nil {
			return err
		}
	}
	var lost, locked []pgwake.LockToken
	for _, t := range tokens {
		r, ok := parse(t)
		switch is, holds := done[r]; {
		case !ok || !holds:
			lost = append(lost, t)
		case !is:
			locked = append(locked, t)
		}
	}
	var errs []error
	if lost != nil {
		errs = append(errs, &pgwake.LostLocksError{Tokens: lost})
	}
	if locked != nil {
		errs = append(errs, &dispatch.NotExtendedError{Receipts: locked})
	}
	return errors.Join(errs...)
}

// Nack gives a message back. It keeps its place: pgmq has messages in the order of their ids.
func (s *Stream) Nack(ctx context.Context, token pgwake.LockToken, o pgwake.AbandonOptions) error {
	return failed("nack", s.onLease(ctx, token, func(q querier, r receipt) pgx.Row {
		return q.QueryRow(ctx, `SELECT pgwake_pgmq.nack($1, $2, $3, $4, $5, nullif($6, ''))`, r.queue, r.id, r.reads, o.Delay, o.IgnoreAttempt, o.Error)
	}))
}

// DeadLetter archives a message.
func (s *Stream) DeadLetter(ctx context.Context, token pgwake.LockToken, reason, cause string) error {
	return failed("dead letter", s.onLease(ctx, token, func(q querier, r receipt) pgx.Row {
		return q.QueryRow(ctx, `SELECT pgwake_pgmq.dead_letter($1, $2, $3, $4, $5)`, r.queue, r.id, r.reads, reason, cause)
	}))
}

func (s *Stream) onLease(ctx context.Context, token pgwake.LockToken, call func(querier, receipt) pgx.Row) error {
	r, held := parse(token)
	if held {
		if err := s.do(ctx, func(q querier) error { return call(q, r).Scan(&held) }); err != nil {
			return err
		}
	}
	if !held {
		return pgwake.ErrLockLost
	}
	return nil
}

// MaxPayload bounds the payload of a message, in bytes, and its headers together. The server works with several copies of a value, each of
// which has to stay under 1 GB.
const MaxPayload = 100 << 20

// Publish sends messages, all or none. Payloads and headers are what pgwake.CheckJSON allows, of at most MaxPayload bytes each, also once
// their numbers are written out, or it is a pgwake.ErrInvalid, and nothing was sent: the same call would never succeed.
func (s *Stream) Publish(ctx context.Context, namespace string, messages ...dispatch.StreamMessage) error {
	const op = "publish"
	payloads, headers, delays := make([]string, len(messages)), make([]string, len(messages)), make([]time.Duration, len(messages))
	for i, m := range messages {
		if _, own := m.Headers[ownHeader]; own || m.Delay < 0 {
			return failed(op, fmt.Errorf("%w: message %d has a header %q, or a delay of %v", pgwake.ErrInvalid, i, ownHeader, m.Delay))
		}
		if name := noText(&m); name != "" { // encoding/json would write something else
			return failed(op, fmt.Errorf("%w: %.100q of message %d is not UTF-8", pgwake.ErrInvalid, name, i))
		}
		headers[i] = headersOf(&messages[i])
		err := cmp.Or(pgwake.CheckJSON(fmt.Sprintf("the payload of message %d", i), m.Payload, MaxPayload),
			pgwake.CheckJSON(fmt.Sprintf("what the headers of message %d come to", i), []byte(headers[i]), MaxPayload))
		if err == nil && jsonvalue.Zeros(m.Payload) > MaxPayload { // headers are texts
			err = fmt.Errorf("%w: the payload of message %d has numbers that are more than %d bytes when they are written out", pgwake.ErrInvalid, i, MaxPayload)
		}
		if err != nil {
			return failed(op, err)
		}
		payloads[i], delays[i] = "null", m.Delay
		if len(m.Payload) > 0 {
			payloads[i] = string(m.Payload)
		}
	}
	if len(messages) == 0 {
		return nil
	}
	return failed(op, s.do(ctx, func(q querier) error {
		_, err := q.Exec(ctx, `SELECT pgwake_pgmq.send($1, $2::text[]::jsonb[], $3::text[]::jsonb[], $4)`, namespace, payloads, headers, delays)
		return err
	}))
}

// WaitForNamespaces tells of those that have a queue.
func (s *Stream) WaitForNamespaces(ctx context.Context, known []string) (added []string, err error) {
	err = s.await(ctx, "", func() (next time.Time, found bool, err error) {
		all, err := s.namespaces(ctx)
		added = slices.DeleteFunc(all, func(name string) bool { return slices.Contains(known, name) })
		return next, len(added) > 0, err
	})
	if err != nil {
		return nil, failed("wait for namespaces", err)
	}
	return added, nil
}

func (s *Stream) namespaces(ctx context.Context) (all []string, err error) {
	err = s.do(ctx, func(q querier) error {
		rows, _ := q.Query(ctx, `SELECT pgwake_pgmq.namespaces()`) // its error is that of the rows
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return all, err
}

// ownHeader is that of which the rest is this package's.
const ownHeader = "pgwake"

// note is what it says.
type note struct {
	Name  string `json:"name,omitempty"`
	Free  int    `json:"free,omitempty"` // attempts that do not count
	Error string `json:"error,omitempty"`
}

// noText returns what of a message's name and headers is no UTF-8; "": all is.
func noText(m *dispatch.StreamMessage) string {
	if !utf8.ValidString(m.Name) {
		return m.Name
	}
	for name, value := range m.Headers {
		if !utf8.ValidString(name) {
			return name
		}
		if !utf8.ValidString(value) {
			return value
		}
	}
	return ""
}

func headersOf(m *dispatch.StreamMessage) string {
	all := make(map[string]any, len(m.Headers)+1)
	for name, value := range m.Headers {
		all[name] = value
	}
	all[ownHeader] = note{Name: m.Name}
	text, _ := json.Marshal(all) // of strings
	return string(text)
}

// addHeaders completes a message by its headers. Those that are no text are given as JSON.
func addHeaders(d *dispatch.StreamDelivery, headers []byte) {
	var all map[string]json.RawMessage
	if json.Unmarshal(headers, &all) != nil {
		return // somebody else's
	}
	n := noteOf(all[ownHeader])
	delete(all, ownHeader)
	for name, value := range all {
		if d.Headers == nil {
			d.Headers = make(map[string]string, len(all))
		}
		var text string
		if json.Unmarshal(value, &text) != nil {
			text = string(value)
		}
		d.Headers[name] = text
	}
	if n.Name != "" {
		d.Name = n.Name
	}
	if n.Free > 0 && n.Free < d.Attempt { // this attempt counts, whatever is said
		d.Attempt -= n.Free
	}
	d.LastError = n.Error
}

// noteOf reads a note of which nobody knows who wrote it: as the functions in the database do, by names to the letter, and one by one,
// so that what is of another type is as if it were not there.
func noteOf(text json.RawMessage) (n note) {
	var all map[string]json.RawMessage
	_ = json.Unmarshal(text, &all)
	_ = json.Unmarshal(all["name"], &n.Name)
	_ = json.Unmarshal(all["free"], &n.Free)
	_ = json.Unmarshal(all["error"], &n.Error)
	return n
}
