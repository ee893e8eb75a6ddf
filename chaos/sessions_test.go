package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ofSession is an item of a session, due at that time.
func (s *story) ofSession(key string, id int64, due int) *story {
	s.line(due-5, sending, entry{Key: key, Do: doAck, Session: "s"})
	return s.line(due+1, sent, entry{Key: key, ID: id, Due: at(due)})
}

// owned has an owner claim it, and acknowledge it at once. due is since when it could be claimed, as the server says.
func (s *story) owned(ms int, owner, key string, id int64, due int) *story {
	from := len(s.lines)
	token := key + at(ms).Format(time.StampMilli)
	s.line(ms, got, entry{Key: key, ID: id, Token: token, Due: at(due), Until: at(ms).Add(lease)}).ends(ms+1, key, token, acking, acked)
	for i := range s.lines[from:] {
		s.lines[from+i].process = owner
	}
	return s
}

func TestCheckSessions_OrderAndOwners(t *testing.T) {
	two := func() *story { return new(story).ofSession("a", 1, 10).ofSession("b", 2, 20) }
	lost := func(e entry) bool { return e.Key == "a" && e.What != sending && e.What != sent }
	for name, c := range map[string]struct {
		*story
		violation string
	}{
		"in order":                        {two().owned(100, "p", "a", 1, 10).owned(200, "p", "b", 2, 20), ""},
		"out of order":                    {two().owned(100, "p", "b", 2, 20).owned(200, "p", "a", 1, 10), "s: item b (ack, id 2) was handed out to p at Jan  1 00:00:00.100000, before item a (ack, id 1), which was due before it"},
		"out of order, by two owners":     {two().owned(100, "p", "b", 2, 20).owned(2200, "q", "a", 1, 10), "which was due before it"},
		"out of order by id":              {new(story).ofSession("a", 1, 10).ofSession("b", 2, 10).owned(100, "p", "b", 2, 10).owned(200, "p", "a", 1, 10), "which was due before it"},
		"due before it by then":           {two().owned(18, "p", "b", 2, 9).owned(200, "p", "a", 1, 10), ""},
		"not there by then":               {new(story).ofSession("b", 2, 20).ofSession("a", 1, 150).owned(100, "p", "b", 2, 20).owned(200, "p", "a", 1, 150), ""},
		"delivered again, so due later":   {two().owned(100, "p", "b", 2, 20).owned(200, "p", "a", 1, 110), ""},
		"its enqueue is unknown":          {two().drop(func(e entry) bool { return e.Key == "a" && e.What == sent }).owned(100, "p", "b", 2, 20).owned(200, "p", "a", 1, 10), ""},
		"a crash took the claims back":    {(&story{crashes: []span{{at(120), at(150)}}}).ofSession("a", 1, 10).ofSession("b", 2, 20).owned(100, "p", "b", 2, 20).owned(200, "p", "a", 1, 10), ""},
		"of another session":              {new(story).ofSession("a", 1, 10).line(15, sending, entry{Key: "b", Do: doAck, Session: "t"}).line(21, sent, entry{Key: "b", ID: 2, Due: at(20)}).owned(100, "p", "b", 2, 20).owned(200, "q", "a", 1, 10), ""},
		"another owner, after the lock":   {two().owned(100, "p", "a", 1, 10).owned(2100, "q", "b", 2, 20), ""},
		"another owner, within the lock":  {two().owned(100, "p", "a", 1, 10).owned(2000, "q", "b", 2, 20), "s: item b (ack, id 2) was handed out to q 100ms before the lock of p ended"},
		"the lock runs from the last":     {two().owned(100, "p", "a", 1, 10).ofSession("c", 3, 30).owned(1000, "p", "b", 2, 20).owned(2900, "q", "c", 3, 30), "was handed out to q 100ms before the lock of p ended"},
		"a crash took the session back":   {(&story{crashes: []span{{at(200), at(300)}}}).ofSession("a", 1, 10).ofSession("b", 2, 20).owned(100, "p", "a", 1, 10).owned(400, "q", "b", 2, 20), ""},
		"lost, which others have to find": {two().owned(100, "p", "a", 1, 10).drop(lost).owned(200, "p", "b", 2, 20), "is lost"},
	} {
		t.Run(name, func(t *testing.T) {
			found := c.violations()
			if c.violation == "" {
				assert.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			assert.Contains(t, found[0], c.violation)
		})
	}
	v := new(chaos).judge(two().owned(100, "p", "a", 1, 10).owned(2100, "q", "b", 2, 20).lines, tables{}, nil)
	assert.Equal(t, []int{2, 1}, []int{v.sessions, v.takeovers})
	assert.Contains(t, v.String(), "sessions: 2 claims in order; 1 times another owner took over")
}
