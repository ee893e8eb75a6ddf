package model

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: what is each rule for? Each is taken away in the smallest system that suffers from it.

var rules = []struct {
	name    string
	without Rule
	fault   Fault
	in      Config
}{
	{"SettleWaits", SettleWaits, Stranded, Config{Nodes: alike(1, 1), Producers: one}},
	{"SettleLooks", SettleLooks, Stranded, Config{Nodes: alike(1, 1), Producers: one}},
	{"Settle", Settle, Stranded, Config{Nodes: alike(1, 1), Producers: one}},
	{"SettleVoid", SettleVoid, Stranded, Config{Nodes: alike(1, 1), Producers: two}},
	{"EmptyIfSettled", EmptyIfSettled, Stranded, Config{Nodes: alike(1, 1), Producers: two}},
	{"FreshRead", FreshRead, Stranded, Config{Nodes: alike(1, 1), Producers: one}},
	{"UnlockedTells", UnlockedTells | UnlockedTellsAll, Stranded, Config{Nodes: alike(1, 1), Producers: two}},
	{"OldSnapshotTellsAll", OldSnapshotTellsAll, Stranded, Config{Nodes: alike(1, 1), Producers: []Producer{{Tag: TagA, OldSnapshot: true}}}},
	{"SkipByMemory", SkipByMemory, Stranded, Config{Nodes: alike(1, 1), Producers: two}},
	{"ArmByMemory", ArmByMemory, Stranded, Config{Nodes: alike(1, 2), Producers: two, Parked: true, TimeOuts: true}},
	{"Sequence", Sequence, Stranded, Config{Nodes: alike(1, 2), Producers: two}},
	{"HotAlone", HotAlone, Stranded, Config{Nodes: alike(1, 2), Producers: two, Parked: true}},
	{"Contended", Contended, Stranded, Config{Nodes: alike(2, 1), Producers: one, Deaths: 1, Parked: true}},
	{"FailedFetchTells", FailedFetchTells, Stranded, Config{Nodes: alike(1, 2), Producers: one, Faults: 1, Parked: true}},

	{"Chain", Chain, Stranded, Config{Nodes: alike(2, 1), Producers: batch, Parked: true}},
	{"ChainKeepsSole", ChainKeepsSole, Stranded, Config{Nodes: alike(2, 1), Producers: batch, Parked: true}},
	{"Bounce", Bounce, Stranded, Config{Nodes: alike(2, 1), Producers: one, Parked: true, TimeOuts: true}},
	{"BounceAfterFetch", BounceAfterFetch, Stranded, Config{Nodes: alike(2, 1), Producers: two}},
	{"BounceToOwnLanes", BounceToOwnLanes, Stranded, Config{Nodes: overlapping, Producers: one, Parked: true, TimeOuts: true}},
	{"HopLimit", HopLimit, Endless, Config{Nodes: alike(2, 1), Producers: one, Parked: true, TimeOuts: true}},
	{"HopTellsOwnLanes", HopTellsOwnLanes, Stranded, Config{Nodes: overlapping, Bounced: 1, Parked: true, TimeOuts: true}},
	{"ContendedKeepsSole", ContendedKeepsSole, Stranded, Config{Nodes: alike(3, 1), Producers: one, Deaths: 1, Parked: true, TimeOuts: true, NoRollback: true, StayArmed: true}},
	{"AloneAmongLanes", AloneAmongLanes, Stranded, Config{Nodes: overlapping, Producers: one, Parked: true, TimeOuts: true}},
	{"GreetingFrees", GreetingFrees, Stranded, Config{Nodes: alike(2, 1), Producers: one, Joins: 1, Parked: true, TimeOuts: true}},
	{"UnknownTellsAll", UnknownTellsAll, Stranded, Config{Nodes: alike(2, 1), Producers: one, Lapses: 1, Parked: true, TimeOuts: true}},
	{"BounceAgain", BounceAgain, Stranded, Config{Nodes: alike(2, 1), Producers: two, Parked: true, TimeOuts: true, NoRollback: true, StayArmed: true}},
	{"OverflowKeepsSole", OverflowKeepsSole, Stranded, Config{Nodes: alike(2, 1), Producers: two, Parked: true, TimeOuts: true, NoRollback: true}},
	{"LaneMatch", LaneMatch, Stranded, Config{Nodes: []Node{{{TagA, 1}, {TagB, 1}}}, Producers: one, Parked: true}},
	{"LeaveWaits", LeaveWaits, Stranded, Config{Nodes: alike(2, 1), Producers: one, Leaves: 1, Parked: true}},
	{"LeavePassesOn", LeavePassesOn, Stranded, Config{Nodes: alike(2, 1), Producers: one, Leaves: 1, Parked: true}},
	{"SweepSettles", SweepSettles, Stranded, Config{Nodes: alike(2, 1), Producers: one, Deaths: 1, Parked: true}},
	{"CoalescerTellsOthers", CoalescerTellsOthers, Stranded, Config{Nodes: alike(2, 1), Producers: home, Parked: true, TimeOuts: true}},
	{"SoleIfAlone", SoleIfAlone, Stranded, Config{Nodes: alike(2, 1), Producers: homeBatch, Parked: true}},

	{"ReturnLooks", ReturnLooks, Stranded, Config{Nodes: alike(1, 1), Producers: one, Losses: 1, Parked: true}},
	{"ReconnectSole", ReconnectSole, Stranded, Config{Nodes: alike(2, 1), Producers: two, Losses: 1, Parked: true}},

	// The mends: the protocol as it was first specified, or implemented.
	{"UnlockedTellsAll", UnlockedTellsAll, Stranded, Config{Nodes: alike(2, 1), Producers: one, Leaves: 1}},
	{"UnlockedTellsAll, death", UnlockedTellsAll, Stranded, Config{Nodes: alike(2, 1), Producers: one, Deaths: 1}},
	{"PassOnByDueRows", PassOnByDueRows, Stranded, Config{Nodes: alike(3, 1), Producers: batch, Leaves: 1, Parked: true, NoRollback: true}},
	{"SweepPassesOn", SweepPassesOn, Stranded, Config{Nodes: alike(3, 1), Producers: batch, Deaths: 1, Parked: true, NoRollback: true}},
	{"ScoutWhileWaiting", ScoutWhileWaiting, Stranded, Config{Nodes: alike(1, 1), Producers: two}},
	{"ScoutGoesOn", ScoutGoesOn, Stranded, Config{Nodes: alike(1, 2), Producers: three, NoRollback: true}},
	{"AloneLooks", AloneLooks, Stranded, Config{Nodes: alike(1, 1), Producers: two, Patience: true}},
	{"AsksWhileWaiting", AsksWhileWaiting, Stranded, Config{Nodes: alike(1, 1), Producers: two, Patience: true}},
	{"ScoutAfterFailure", ScoutAfterFailure, Stranded, Config{Nodes: alike(1, 1), Producers: two, Patience: true, Faults: 1, NoRollback: true}},
	{"DisarmPause", DisarmPause, Endless, Config{Nodes: alike(1, 1), Producers: one}},
	{"SweepHoldsK", SweepHoldsK, Stranded, Config{Nodes: alike(3, 1), Producers: one, Deaths: 2, Parked: true}},
	{"DeadStayDead", DeadStayDead, Stranded, Config{Nodes: alike(3, 1), Producers: home, Deaths: 1, Parked: true, TimeOuts: true, StayArmed: true}},
	{"DeadStayDead, SweepHoldsK", DeadStayDead | SweepHoldsK, Stranded, Config{Nodes: alike(2, 1), Producers: one, Deaths: 1, Parked: true}},
	{"LeaveIsLast", LeaveIsLast, Stranded, Config{Nodes: alike(2, 1), Producers: one, Leaves: 1}},
	{"NoRowTellsOwn", NoRowTellsOwn, Stranded, Config{Nodes: overlapping, Producers: one, Lapses: 1, Parked: true, TimeOuts: true}},
}

var (
	batch       = []Producer{{Tag: TagA, Items: 2}}
	home        = []Producer{{Tag: TagA, Coalesced: true}}
	overlapping = []Node{{{TagA, 1}, {TagA | TagB, 1}}}
	homeBatch   = []Producer{{Tag: TagA, Coalesced: true, Items: 2}}
)

func TestRules_EachTakenAway_HasACounterExample(t *testing.T) {
	notWithDetector(t)
	var shown Rule
	for _, rule := range rules {
		shown |= rule.without
		t.Run(rule.name, func(t *testing.T) {
			rule.in.Without = rule.without
			r, err := Explore(rule.in, 2_000_000)
			require.NoError(t, err)
			t.Logf("%v after %d steps, among %d states:\n%s", r.Fault, len(r.Trace)-1, r.States, strings.Join(r.Trace, "\n"))
			require.Equal(t, rule.fault, r.Fault)

			rule.in.Without = 0
			r, _ = Explore(rule.in, 20_000) // those with more are among the sizes
			require.Equal(t, Nothing, r.Fault, "with the rule:\n%s", strings.Join(r.Trace, "\n"))
		})
	}
	require.Equal(t, allRules, shown)
}
