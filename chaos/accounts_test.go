package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// soaked is a delivery of an item that was due at some time.
func (s *story) soaked(ms int, key, token string, due int) *story {
	return s.line(ms, got, entry{Key: key, ID: 1, Token: token, Due: at(due), Until: at(ms).Add(soakLease)})
}

// soakItem is an item that is sent, and delivered under token t1.
func (s *story) soakItem(key string) *story {
	s.line(0, sending, entry{Key: key, Do: doAck}).line(10, sent, entry{Key: key, ID: 1, Due: at(5)})
	return s.soaked(20, key, "t1", 5)
}

// settled has the lines come at once, and then nothing for a while.
func (s *story) settled(stalls ...span) *accounts {
	a := newAccounts("", time.Second)
	a.pending = slices.Clone(s.lines)
	a.take(at(60_000), stalls)
	return a
}

func TestAccounts_WhatMayHappen_IsNoViolationAndForgotten(t *testing.T) {
	for name, s := range map[string]*story{
		"acknowledged":                      new(story).soakItem("a").ends(30, "a", "t1", acking, acked),
		"acknowledged before it was sent":   new(story).line(0, sending, entry{Key: "a"}).soaked(5, "a", "t1", 4).ends(6, "a", "t1", acking, acked).line(20, sent, entry{Key: "a", ID: 1, Due: at(4)}),
		"rolled back":                       new(story).line(0, sending, entry{Key: "a"}).line(1, revoked, entry{Key: "a"}),
		"a duplicate":                       new(story).line(0, sending, entry{Key: "a", Dedup: "d"}).line(1, sent, entry{Key: "a", Duplicate: true}),
		"given back, and due a while later": new(story).soakItem("a").ends(30, "a", "t1", returning, returned).soaked(5000, "a", "t2", 4900).ends(5010, "a", "t2", acking, acked),
		"renewed":                           new(story).soakItem("a").line(25, renewed, entry{Key: "a", Token: "t1", Until: at(40_000)}).ends(30, "a", "t1", acking, acked),
		"in hand at its commit, long after it was due": new(story).line(0, sending, entry{Key: "a"}).line(2000, sent, entry{Key: "a", ID: 1, Due: at(1990)}).
			soaked(2005, "a", "t1", 5).ends(2010, "a", "t1", acking, acked),
	} {
		t.Run(name, func(t *testing.T) {
			a := s.settled()
			assert.Empty(t, a.j.v.violations)
			assert.Empty(t, a.j.fates)
			assert.Empty(t, a.j.claims)
			require.NoError(t, a.finish(nil))
			assert.Empty(t, a.j.v.violations)
		})
	}
}

func TestAccounts_WhatMustNotHappen_IsAViolation(t *testing.T) {
	for want, s := range map[string]*story{
		"is lost: sent at":          new(story).line(0, sending, entry{Key: "a"}).line(1, sent, entry{Key: "a", ID: 1}),
		"is lost: delivered 1":      new(story).soakItem("a").ends(30, "a", "t1", acking, refused),
		"exists a second time":      new(story).soakItem("a").ends(30, "a", "t1", acking, acked).line(40, got, entry{Key: "a", ID: 2, Token: "t2"}),
		"before the lease of":       new(story).soakItem("a").soaked(25_000, "a", "t2", 5).ends(25_010, "a", "t2", acking, acked),
		"was acknowledged twice":    new(story).soakItem("a").ends(30, "a", "t1", acking, acked).soaked(31_000, "a", "t2", 31_000).ends(31_010, "a", "t2", acking, acked),
		"rolled back":               new(story).line(0, sending, entry{Key: "a"}).line(1, revoked, entry{Key: "a"}).soaked(20, "a", "t1", 1).ends(30, "a", "t1", acking, acked),
		"was late":                  new(story).line(0, sending, entry{Key: "a"}).line(1, sent, entry{Key: "a", ID: 1, Due: at(1)}).soaked(1100, "a", "t1", 1).ends(1110, "a", "t1", acking, acked),
		"came in hand in p after 1": new(story).soakItem("a").ends(30, "a", "t1", returning, returned).soaked(2000, "a", "t2", 500).ends(2010, "a", "t2", acking, acked),
		"wait for x":                new(story).line(0, wrong, entry{Err: "wait for x"}),
	} {
		t.Run(want, func(t *testing.T) {
			a := s.settled()
			require.NoError(t, a.finish(nil))
			require.NotEmpty(t, a.j.v.violations)
			assert.Contains(t, strings.Join(a.j.v.violations, "\n"), want)
		})
	}
}

func TestAccounts_MessageGivenBack_IsLateByItsDelay(t *testing.T) {
	s := new(story).line(0, sending, entry{Key: "a", Do: doTurn, Instance: "i"}).line(5, sent, entry{Key: "a", ID: 1, Due: at(1)}).
		line(10, got, entry{Key: "a", ID: 1, Token: "t1", Until: at(10).Add(soakLease)}).
		line(20, returning, entry{Key: "a", Token: "t1", Delay: 3 * time.Second}).line(30, returned, entry{Key: "a", Token: "t1"}).
		line(3040, got, entry{Key: "a", ID: 1, Token: "t2", Until: at(3040).Add(soakLease)}).ends(3050, "a", "t2", acking, acked)
	a := s.settled()
	assert.Empty(t, a.j.v.violations)
	assert.Equal(t, []time.Duration{9 * time.Millisecond, 10 * time.Millisecond}, a.waits)
}

func TestAccounts_LateWhileTheMachineStalled_IsNotLate(t *testing.T) {
	s := new(story).line(0, sending, entry{Key: "a"}).line(1, sent, entry{Key: "a", ID: 1, Due: at(1)}).
		soaked(1500, "a", "t1", 1).ends(1510, "a", "t1", acking, acked)
	assert.Empty(t, s.settled(span{at(200), at(900)}).j.v.violations)
	assert.Len(t, s.settled().j.v.violations, 1)
}

func TestAccounts_DoneAgainAfterItWasForgotten_IsAViolation(t *testing.T) {
	a := new(story).soakItem("a").ends(30, "a", "t1", acking, acked).settled()
	a.pending = new(story).soaked(61_000, "a", "t2", 60_900).lines
	a.take(at(120_000), nil)
	require.Len(t, a.j.v.violations, 1)
	assert.Contains(t, a.j.v.violations[0], `got of "a", which nobody sent`)
}

func TestAccounts_LinesThatAreStillToCome_AreWaitedFor(t *testing.T) {
	dir := t.TempDir()
	early, err := openLedger(filepath.Join(dir, "node-0-0.ledger"))
	require.NoError(t, err)
	defer early.file.Close()
	early.write(got, entry{Key: "a", ID: 1, Token: "t1"})
	a := newAccounts(dir, time.Second)
	defer a.close()
	require.NoError(t, a.update(time.Now(), nil))
	assert.Empty(t, a.j.v.violations, "who has sent it may not have written so yet")

	late, err := os.Create(filepath.Join(dir, "node-1-0.ledger"))
	require.NoError(t, err)
	defer late.Close()
	_, err = late.WriteString(`{"what":"sending","key":"a"}` + "\n" + `{"what":"sent","k`)
	require.NoError(t, err)
	require.NoError(t, a.update(time.Now(), nil))
	_, err = late.WriteString(`ey":"a","id":1}` + "\n")
	require.NoError(t, err)
	require.NoError(t, a.finish(nil))
	require.Len(t, a.j.v.violations, 1)
	assert.Contains(t, a.j.v.violations[0], "a (, id 1) is lost: delivered 1 times")
}
