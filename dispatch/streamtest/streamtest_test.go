package streamtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/streamtest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: does the suite pass what keeps the contract, and does each of its rows fail what does not?

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// queue is one in memory, which all streams on it share.
type queue struct {
	defect string // which rule it breaks; "": none

	mu       sync.Mutex
	changed  chan struct{} // closed with each change
	messages []*message    // in the order in which they were published
	known    map[string]bool
	dead     map[string][]string // names of dead letters, by namespace
	count    int                 // of messages and claims
}

type message struct {
	dispatch.StreamDelivery
	due    time.Time // or the end of the lease
	former []pgwake.LockToken
}

func newQueue(defect string) *queue {
	return &queue{defect: defect, changed: make(chan struct{}), known: make(map[string]bool), dead: make(map[string][]string)}
}

// change is called with mu held.
func (q *queue) change() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// of returns the message of a receipt that holds. It is called with mu held.
func (q *queue) of(receipt pgwake.LockToken) (m *message, err error) {
	for _, m := range q.messages {
		if m.Receipt == receipt && m.due.After(time.Now()) || q.defect == "receipts outlive their leases" && slices.Contains(m.former, receipt) {
			return m, nil
		}
	}
	return nil, pgwake.ErrLockLost
}

func (q *queue) remove(m *message) {
	q.messages = slices.DeleteFunc(q.messages, func(o *message) bool { return o == m })
}

// all does the same to the messages of several receipts.
func (q *queue) all(receipts []pgwake.LockToken, do func(*message)) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	var lost []pgwake.LockToken
	for _, r := range receipts {
		if m, err := q.of(r); err == nil {
			do(m)
		} else {
			lost = append(lost, r)
		}
	}
	q.change()
	if lost != nil && q.defect != "nobody is told what is lost" {
		return &pgwake.LostLocksError{Tokens: lost}
	}
	return nil
}

// stream is a process on a queue.
type stream struct {
	*queue
	mu     sync.Mutex
	broken chan struct{} // closed when its connection breaks
}

func open(q *queue) *stream { return &stream{queue: q, broken: make(chan struct{})} }

func (s *stream) breaks() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.broken)
	s.broken = make(chan struct{})
}

func (s *stream) connection() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

var errBroken = errors.New("the connection is broken")

func (s *stream) Receive(ctx context.Context, namespace string, most int, lease time.Duration) ([]dispatch.StreamDelivery, error) {
	for broken := s.connection(); ; {
		s.queue.mu.Lock()
		got, next := s.claim(namespace, most, lease)
		changed := s.changed
		s.queue.mu.Unlock()
		if len(got) > 0 {
			if s.defect == "what is claimed for somebody who leaves is stranded" && s.count%3 == 0 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return got, nil
		}
		timer := time.NewTimer(next)
		select {
		case <-changed:
		case <-timer.C:
		case <-broken:
			return nil, errBroken
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		timer.Stop()
	}
}

// claim returns what is due, or how long nothing is. It is called with the queue's mu held.
func (s *stream) claim(namespace string, most int, lease time.Duration) (got []dispatch.StreamDelivery, next time.Duration) {
	now, next := time.Now(), time.Hour
	for _, m := range s.messages {
		switch left := m.due.Sub(now); {
		case m.Namespace != namespace:
		case left > 0:
			next = min(next, left)
		case len(got) < most || s.defect == "more is claimed than was asked for":
			s.count++
			m.Attempt++
			m.former = append(m.former, m.Receipt)
			m.Receipt = pgwake.LockToken(fmt.Sprint(s.count))
			m.LeasedUntil = now.Add(lease)
			if s.defect != "several get the same" {
				m.due = m.LeasedUntil
			}
			got = append(got, m.StreamDelivery)
		}
	}
	return got, next
}

func (s *stream) Ack(_ context.Context, receipts []pgwake.LockToken) error {
	return s.all(receipts, s.remove)
}

func (s *stream) Extend(_ context.Context, receipts []pgwake.LockToken, lease time.Duration) error {
	return s.all(receipts, func(m *message) {
		if s.defect != "leases are not extended" {
			m.due = time.Now().Add(lease)
		}
	})
}

func (s *stream) Nack(_ context.Context, receipt pgwake.LockToken, o pgwake.AbandonOptions) error {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	m, err := s.of(receipt)
	if err != nil {
		return err
	}
	m.Receipt, m.LastError, m.due = "", o.Error, time.Now().Add(o.Delay)
	if o.IgnoreAttempt && s.defect != "what is given back costs an attempt" {
		m.Attempt--
	}
	if s.defect == "nobody waits for what is given back" {
		m.due = time.Now()
	}
	s.change()
	return nil
}

func (s *stream) DeadLetter(_ context.Context, receipt pgwake.LockToken, _, _ string) error {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	m, err := s.of(receipt)
	if err != nil {
		return err
	}
	s.remove(m)
	s.dead[m.Namespace] = append(s.dead[m.Namespace], m.Name)
	s.change()
	return nil
}

func (s *stream) Publish(_ context.Context, namespace string, messages ...dispatch.StreamMessage) error {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	s.known[namespace] = true
	for _, published := range messages {
		s.count++
		m := &message{StreamDelivery: dispatch.StreamDelivery{StreamMessage: published, ID: int64(s.count), Namespace: namespace, EnqueuedAt: time.Now()}}
		if m.due = m.EnqueuedAt.Add(published.Delay); s.defect == "delays are forgotten" {
			m.due = m.EnqueuedAt
		}
		if m.Delay = 0; s.defect == "headers are forgotten" {
			m.Headers = nil
		}
		s.messages = append(s.messages, m)
	}
	s.change()
	return nil
}

func (s *stream) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	for broken := s.connection(); ; {
		s.queue.mu.Lock()
		added, changed := slices.Sorted(maps.Keys(s.known)), s.changed
		s.queue.mu.Unlock()
		if s.defect != "namespaces are told again" {
			added = slices.DeleteFunc(added, func(name string) bool { return slices.Contains(known, name) })
		}
		if len(added) > 0 {
			return added, nil
		}
		select {
		case <-changed:
		case <-broken:
			return nil, errBroken
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

const defectVariable = "PGWAKE_STREAM_DEFECT"

func TestRun_StreamThatKeepsTheContract_Passes(t *testing.T) {
	streamtest.Run(t, factory(os.Getenv(defectVariable),
		func(s *stream) dispatch.EventStream { return s },
		func(s dispatch.EventStream) *stream { return s.(*stream) }))
}

func TestRun_StreamWithoutExtend_Passes(t *testing.T) {
	streamtest.Run(t, factory("",
		func(s *stream) dispatch.EventStream { return unextended{s, s} },
		func(s dispatch.EventStream) *stream { return s.(unextended).EventStream.(*stream) }))
}

// unextended is a stream whose leases end when they end: it is no LeaseExtender.
type unextended struct {
	dispatch.EventStream
	dispatch.DeadLetterer
}

// factory makes streams on queues of their own, as they are shown to the suite.
func factory(defect string, show func(*stream) dispatch.EventStream, of func(dispatch.EventStream) *stream) streamtest.Factory {
	return streamtest.Factory{
		New:     func(testing.TB) dispatch.EventStream { return show(open(newQueue(defect))) },
		Another: func(_ testing.TB, s dispatch.EventStream) dispatch.EventStream { return show(open(of(s).queue)) },
		Break:   func(_ testing.TB, s dispatch.EventStream) { of(s).breaks() },
		DeadLetters: func(_ testing.TB, s dispatch.EventStream, namespace string) []string {
			q := of(s).queue
			q.mu.Lock()
			defer q.mu.Unlock()
			return slices.Clone(q.dead[namespace])
		},
	}
}

// Each defect is tried in a process of its own, since what fails there is to fail.
func TestRun_StreamWithADefect_TheRowForThatFails(t *testing.T) {
	const passing = "TestRun_StreamThatKeepsTheContract_Passes"
	for defect, row := range map[string]string{
		"headers are forgotten":                               "Publish_AMessage_IsHandledOnceAndAcknowledged",
		"delays are forgotten":                                "Publish_WithDelay_IsNotDueBefore",
		"several get the same":                                "Receive_TwoProcesses_Compete",
		"more is claimed than was asked for":                  "Receive_AtMost_LeavesTheRestToOthers",
		"nobody waits for what is given back":                 "Nack_WithDelay_IsDueThen",
		"what is given back costs an attempt":                 "Nack_IgnoreAttempt_DoesNotCount",
		"receipts outlive their leases":                       "Lease_Ends_IsRedelivered",
		"nobody is told what is lost":                         "Lease_Ends_IsRedelivered",
		"leases are not extended":                             "Lease_IsExtended_Holds",
		"namespaces are told again":                           "Namespace_Known_IsNotTold",
		"what is claimed for somebody who leaves is stranded": "Receive_ContextEnds_StrandsNothing",
	} {
		t.Run(defect, func(t *testing.T) {
			t.Parallel()
			test := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+passing+"$/^stream$/^"+row+"$")
			test.Env = append(os.Environ(), defectVariable+"="+defect)
			said, err := test.CombinedOutput()
			require.Error(t, err, "%s", said)
			require.True(t, strings.Contains(string(said), "--- FAIL: "+passing+"/stream/"+row), "%s", said)
		})
	}
}
