package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	mostSpare  = 24  // sessions that wait for a client
	mostUses   = 100 // a session remembers what each of its clients planned
	patience   = time.Minute
	frameHead  = 5 // type and length
	bufferSize = 32 << 10
)

// afresh leaves nothing of one client to the next but what the server knows by heart: catalogs, functions and their plans.
const afresh = `RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; CLOSE ALL; UNLISTEN *; SELECT pg_advisory_unlock_all();
	DEALLOCATE ALL; DISCARD SEQUENCES; DISCARD TEMP; SET application_name = 'withpg: spare'`

// sessions stands before a server, and gives the session of a client that has ended to the next one that would have had the same.
// To begin one takes the server longer than most tests do with it: to start a process, to read the catalogs, to plan the functions.
//
// A client sees a session that has just begun. Only one that says goodbye between two transactions leaves its session to another;
// it ends with any other client. So does each of another database or user than the URL's. The next one has the same application_name:
// whoever terminates sessions of a name may still be at it when one of them says goodbye, and meets nobody else's then.
type sessions struct {
	listener       net.Listener
	server         string // its address
	database, user string
	ctx            context.Context
	end            context.CancelFunc
	clients        sync.WaitGroup

	mu    sync.Mutex
	spare []*session // the one that ended last is at the end
}

// session is one of the server, which one goroutine has at a time, or which is spare.
type session struct {
	conn   net.Conn
	in     *bufio.Reader
	wanted string // by its startup message
	uses   int
	key    []byte            // the message with which it can be cancelled
	status map[string]string // parameters that the server reports
}

// keepSessions listens on a port of this machine, and returns the URL of it.
func keepSessions(serverURL string) (*sessions, string, error) {
	u, err := url.Parse(serverURL)
	if err != nil {
		return nil, "", err
	}
	if _, has := u.User.Password(); has {
		return nil, "", errors.New("the server asks for a password")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	s := &sessions{listener: l, server: u.Host, database: strings.TrimPrefix(u.Path, "/"), user: u.User.Username()}
	s.ctx, s.end = context.WithCancel(context.Background())
	u.Host = l.Addr().String()
	s.clients.Go(s.accept)
	return s, u.String(), nil
}

func (s *sessions) close() {
	s.end()
	s.listener.Close()
	s.clients.Wait()
	for _, one := range s.spare {
		one.conn.Close()
	}
}

func (s *sessions) accept() {
	for {
		client, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.clients.Go(func() {
			defer context.AfterFunc(s.ctx, func() { client.Close() })()
			defer client.Close()
			s.serve(client)
		})
	}
}

func (s *sessions) serve(client net.Conn) {
	in := bufio.NewReaderSize(client, bufferSize)
	for {
		var head [8]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return
		}
		size, code := binary.BigEndian.Uint32(head[:4]), binary.BigEndian.Uint32(head[4:])
		if code == 80877103 || code == 80877104 { // TLS or GSS, if possible
			if _, err := client.Write([]byte("N")); err != nil {
				return
			}
			continue
		}
		if size < 8 || size > 10000 {
			return
		}
		body := make([]byte, size-4)
		copy(body, head[4:])
		if _, err := io.ReadFull(in, body[4:]); err != nil {
			return
		}
		var startup pgproto3.StartupMessage
		if code != pgproto3.ProtocolVersionNumber || startup.Decode(body) != nil ||
			startup.Parameters["user"] != s.user || cmp.Or(startup.Parameters["database"], s.user) != s.database || startup.Parameters["replication"] != "" {
			s.passThrough(client, in, append(head[:4], body...))
			return
		}
		s.converse(client, in, startup.Parameters)
		return
	}
}

// passThrough lets client and server speak for themselves: of a request to cancel, or a session that is not kept.
func (s *sessions) passThrough(client net.Conn, in *bufio.Reader, startup []byte) {
	conn, err := net.Dial("tcp", s.server)
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err := conn.Write(startup); err != nil {
		return
	}
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, conn)
		client.Close()
	})
	_, _ = io.Copy(conn, in)
	conn.Close()
	back.Wait()
}

func (s *sessions) converse(client net.Conn, in *bufio.Reader, parameters map[string]string) {
	one, refusal := s.begin(parameters)
	if one == nil {
		_, _ = client.Write(refusal)
		return
	}
	defer func() {
		if one != nil {
			one.conn.Close()
		}
	}()
	if _, err := client.Write(one.greeting()); err != nil {
		return
	}
	if one.relay(client, in) && one.uses < mostUses && one.exec(afresh) == nil {
		s.give(one)
		one = nil
	}
}

// begin returns a session, or what the server says instead.
func (s *sessions) begin(parameters map[string]string) (*session, []byte) {
	wanted := fmt.Sprint(parameters) // in order
	for one := s.take(wanted); one != nil; one = s.take(wanted) {
		if one.uses++; one.exec("RESET application_name") == nil {
			return one, nil
		}
		one.conn.Close() // terminated, or the server was begun anew
	}
	one, refusal := s.connect(parameters)
	if strings.Contains(string(refusal), "C53300\x00") { // too many connections: those that are spare are in the way
		s.mu.Lock()
		spare := s.spare
		s.spare = nil
		s.mu.Unlock()
		for _, other := range spare {
			other.conn.Close()
		}
		for deadline := time.Now().Add(time.Second); one == nil && time.Now().Before(deadline) && len(spare) > 0; {
			time.Sleep(10 * time.Millisecond) // each try costs the server a fork
			one, refusal = s.connect(parameters)
		}
	}
	if one == nil {
		return nil, refusal
	}
	one.wanted = wanted
	return one, nil
}

func (s *sessions) take(wanted string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, one := range slices.Backward(s.spare) {
		if one.wanted == wanted {
			s.spare = slices.Delete(s.spare, i, i+1)
			return one
		}
	}
	return nil
}

// give makes it spare. If there are too many, the first to go are those that nobody has had again: many a client wants what no other does.
func (s *sessions) give(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spare) == mostSpare {
		i := max(0, slices.IndexFunc(s.spare, func(other *session) bool { return other.uses == 0 }))
		s.spare[i].conn.Close()
		s.spare = slices.Delete(s.spare, i, i+1)
	}
	s.spare = append(s.spare, one)
}

func (s *sessions) connect(parameters map[string]string) (one *session, refusal []byte) {
	conn, err := net.Dial("tcp", s.server)
	if err != nil {
		return nil, nil
	}
	defer func() {
		if one == nil {
			conn.Close()
		}
	}()
	startup, err := (&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersionNumber, Parameters: parameters}).Encode(nil)
	if err != nil {
		return nil, nil
	}
	if _, err := conn.Write(startup); err != nil {
		return nil, nil
	}
	begun := &session{conn: conn, in: bufio.NewReaderSize(conn, bufferSize), status: map[string]string{}}
	if refusal, err := begun.await(); err != nil {
		return nil, refusal
	}
	return begun, nil
}

// greeting is what a server answers to a startup message.
func (one *session) greeting() []byte {
	greeting, _ := (&pgproto3.AuthenticationOk{}).Encode(nil)
	for _, name := range slices.Sorted(maps.Keys(one.status)) {
		greeting, _ = (&pgproto3.ParameterStatus{Name: name, Value: one.status[name]}).Encode(greeting)
	}
	greeting = append(greeting, one.key...)
	greeting, _ = (&pgproto3.ReadyForQuery{TxStatus: 'I'}).Encode(greeting)
	return greeting
}

func (one *session) exec(sql string) error {
	query, err := (&pgproto3.Query{String: sql}).Encode(nil)
	if err != nil {
		return err
	}
	if _, err := one.conn.Write(query); err != nil {
		return err
	}
	_, err = one.await()
	return err
}

// await reads until the server is ready for a query, or says why it is not: in the message that it returns then.
func (one *session) await() (refusal []byte, err error) {
	_ = one.conn.SetReadDeadline(time.Now().Add(patience))
	for {
		var head [frameHead]byte
		if _, err := io.ReadFull(one.in, head[:]); err != nil {
			return refusal, err
		}
		body := make([]byte, max(4, binary.BigEndian.Uint32(head[1:]))-4)
		if _, err := io.ReadFull(one.in, body); err != nil {
			return refusal, err
		}
		switch head[0] {
		case 'E':
			refusal = append(head[:], body...)
		case 'R':
			if len(body) < 4 || binary.BigEndian.Uint32(body) != 0 {
				return nil, errors.New("the server asks for a password")
			}
		case 'S':
			if name, value, ok := strings.Cut(strings.TrimSuffix(string(body), "\x00"), "\x00"); ok {
				one.status[name] = value
			}
		case 'K':
			one.key = append(head[:], body...)
		case 'Z':
			if refusal != nil || string(body) != "I" {
				return refusal, errors.New("it is not ready")
			}
			return nil, one.conn.SetReadDeadline(time.Time{})
		}
	}
}

// relay passes messages on until one of them ends, and reports whether the client said goodbye when the server owed it nothing, and
// no transaction was open.
func (one *session) relay(client net.Conn, in *bufio.Reader) bool {
	var owed atomic.Int64 // times that the server has yet to say that it is ready
	var open atomic.Bool  // a transaction
	whole := make(chan bool, 1)
	go func() {
		err := pass(one.in, client, func(kind byte, status byte) bool {
			if kind == 'Z' {
				open.Store(status != 'I')
				owed.Add(-1)
			}
			return true
		})
		// Between two messages, by the deadline below, if nothing was read of one.
		timedOut := errors.Is(err, errBetween)
		if !timedOut {
			client.Close()
		}
		whole <- timedOut
	}()
	unfinished, goodbye := false, false
	_ = pass(in, one.conn, func(kind byte, _ byte) bool {
		switch kind {
		case 'X':
			goodbye = true
			return false
		case 'Q', 'F', 'S':
			unfinished = false
			owed.Add(1)
		case 'P', 'B', 'D', 'E', 'C', 'H': // until the next Sync
			unfinished = true
		}
		return true
	})
	clean := goodbye && !unfinished && owed.Load() == 0 && !open.Load()
	if !clean {
		one.conn.Close()
	}
	_ = one.conn.SetReadDeadline(time.Unix(1, 0))
	return <-whole && clean
}

var errBetween = errors.New("time is up between two messages")

// pass copies messages as long as see says so, which is told the type of each, and the first byte of those that are not empty.
func pass(from *bufio.Reader, to io.Writer, see func(kind, first byte) bool) error {
	out := bufio.NewWriterSize(to, bufferSize)
	for {
		head, err := from.Peek(frameHead)
		if err != nil {
			if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() && from.Buffered() == 0 && out.Buffered() == 0 {
				return errBetween
			}
			return err
		}
		size := 1 + int64(binary.BigEndian.Uint32(head[1:]))
		kind, first := head[0], byte(0)
		if size < frameHead {
			return errors.New("a message without a length")
		}
		if size > frameHead {
			if head, err = from.Peek(frameHead + 1); err != nil {
				return err
			}
			first = head[frameHead]
		}
		if !see(kind, first) {
			return out.Flush()
		}
		for size > 0 {
			part, err := from.Peek(int(min(size, int64(max(1, from.Buffered())))))
			if err != nil {
				return err
			}
			if _, err := out.Write(part); err != nil {
				return err
			}
			size -= int64(len(part))
			_, _ = from.Discard(len(part))
		}
		if from.Buffered() == 0 {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}
