package main

// mutant is one hole, opened again.
type mutant struct {
	name    string
	file    string
	patches []patch
	pkg     string // of the test
	test    string // that must fail
}

// patch replaces the one place that reads old.
type patch struct{ old, new string }

const (
	root = "."

	// conservation is the promise itself, on a simulated database.
	conservation = "TestWorkConservation_AnythingGoes_NoDueItemWaitsForAParkedDispatcher"

	// deployment is the same for several nodes, which are deaf at times and die.
	deployment = "TestDeployment_NodesGoDeafAndDie_NoDueItemWaitsForAParkedDispatcher"

	// settling is the promise for a lane that has producers fall silent whenever it can.
	settling = "TestSettle_LaneDisarmsAndArms_NoDueItemWaitsForAParkedDispatcher"
)

var mutants = []mutant{
	{
		name:    "01 timer forgotten when it fires",
		file:    "wakechain.go",
		patches: []patch{{"	if latest && l.heardOf == k.heardOf {\n		l.earliest = r.earliest", "	if latest && l.heardOf == k.heardOf {\n		l.earliest = time.Time{}"}},
		pkg:     root, test: "TestHole01_SecondEarliestTimer_FiresOnTime",
	},
	{
		name:    "02 no seed at the start",
		file:    "wakechain.go",
		patches: []patch{{"	l.learn(k, r)\n", ""}},
		pkg:     root, test: "TestHole02_TimerScheduledBeforeTheStart_FiresOnTime",
	},
	{
		name:    "03 no look after a reconnect",
		file:    "engine.go",
		patches: []patch{{"			l.reconnected()\n", "			_ = l\n"}},
		pkg:     root, test: "TestHole03_EnqueuedWhileNotListening_FoundOnReconnect",
	},
	{
		name:    "04 nobody is told when a lease ends (work)",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"    IF v_claims > 0 AND p_announce THEN\n", "    IF false THEN\n"}},
		pkg:     root, test: "TestHole04_ProcessKilledWithItsLease_RedeliversWhenTheLeaseEnds",
	},
	{
		name:    "04 nobody is told when a lease ends (turn)",
		file:    "migrations/00004_orchestrator.sql",
		patches: []patch{{"        IF p_announce THEN\n", "        IF false THEN\n"}},
		pkg:     root, test: "TestHole04_ProcessKilledWithItsLease_RedeliversWhenTheLeaseEnds",
	},
	{
		name:    "04 an instant that was told is forgotten",
		file:    "engine.go",
		patches: []patch{{"		l.keep(next)\n", "		_ = next\n"}},
		pkg:     root, test: "TestHole04_InstantThatWasTold_IsLookedAtWhateverAnAnswerSays",
	},
	{
		name:    "05 abandon notifies nobody (work)",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"    PERFORM notify_queue('worker', (p_delay <= interval '0')::integer,\n", "    PERFORM concat('worker', (p_delay <= interval '0')::integer,\n"}},
		pkg:     root, test: "TestHole05_AbandonedItem_WakesAnotherNode",
	},
	{
		name:    "05 abandon notifies nobody (turn)",
		file:    "migrations/00004_orchestrator.sql",
		patches: []patch{{"    PERFORM notify_queue('orchestrator', 1, CASE", "    PERFORM concat('orchestrator', 1, CASE"}},
		pkg:     root, test: "TestHole05_AbandonedItem_WakesAnotherNode",
	},
	{
		name:    "05 ack tells nobody of the instance",
		file:    "engine.go",
		patches: []patch{{"	e.tell(due, quiet)\n	e.released(freed, quiet)\n", ""}},
		pkg:     root, test: "TestHole05_AckReleasesInstanceWithNewMessage_WakesAnotherNode",
	},
	{
		name: "05 ack in a caller's transaction trusts its snapshot",
		file: "migrations/00004_orchestrator.sql",
		patches: []patch{{"    IF NOT p_quiet THEN\n        PERFORM notify_queue('orchestrator', 1, NULL, v_scope);\n", "    IF false THEN\n        NULL;\n"},
			{"            RETURN false;\n        END IF;\n        INSERT INTO instance_locks", "            UPDATE orchestrator_queue q SET visible_at = p_now + interval '30s', held = true WHERE q.id = p_id;\n            RETURN false;\n        END IF;\n        INSERT INTO instance_locks"}},
		pkg: root, test: "TestHole05_MessageCommitsWhileAckIsUncommitted_IsDelivered",
	},
	{
		name:    "06 no due time for work items",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"PERFORM %1$I.notify_queue(TG_ARGV[0], v_due, v_next,", "PERFORM %1$I.notify_queue(TG_ARGV[0], v_due, CASE TG_ARGV[0] WHEN 'orchestrator' THEN v_next END,"}},
		pkg:     root, test: "TestHole06_DelayedWorkItem_FiresOnTime",
	},
	{
		name:    "06 a later timer is kept",
		file:    "wakechain.go",
		patches: []patch{{"(l.earliest.IsZero() || at.Before(l.earliest))", "(l.earliest.IsZero())"}},
		pkg:     root, test: "TestHole06_EarlierTimer_ReplacesALaterOne",
	},
	{
		name: "07 one notification per row",
		file: "migrations/00002_notify.sql",
		patches: []patch{
			{"CREATE TRIGGER worker_queue_notify AFTER INSERT ON worker_queue\n    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT", "CREATE TRIGGER worker_queue_notify AFTER INSERT ON worker_queue\n    FOR EACH ROW"},
			{"FROM inserted i GROUP BY i.namespace, i.tag)", "FROM (SELECT NEW.visible_at, NEW.namespace, NEW.tag, NEW.session_id) AS i GROUP BY i.namespace, i.tag)"},
		},
		pkg: root, test: "TestHole07_BatchOf1000Rows_SendsOneNotification",
	},
	{
		name:    "08 channel named after the schema",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"'pgwake_' || substr(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 1, 16) || '_' || p_queue", "current_schema() || '_' || p_queue"}},
		pkg:     root, test: "TestHole08_SchemaNameAtTheLimit_IsNotified",
	},
	{
		name:    "09 clocks are taken to agree",
		file:    "internal/dbclock/dbclock.go",
		patches: []patch{{"return c.base.Add(clamp(server.Sub(c.base)) - low)", "_ = low\n	return c.base.Add(clamp(server.Sub(c.base)))"}},
		pkg:     root, test: "TestHole09_ClocksHoursApart_ChangeNothing",
	},
	{
		name:    "10 every dispatcher polls",
		file:    "timer.go",
		patches: []patch{{"	if len(l.waiting) > 0 && len(l.tokens) == 0 {", "	for range len(l.waiting) {"}},
		pkg:     root, test: "TestHole10_AggressiveMode_OneDispatcherPollsForAll",
	},
	{
		name:    "12 settling does not wait for producers",
		file:    "settle.go",
		patches: []patch{{"		if err := s.wait(ctx); err != nil {\n", "		if err := ctx.Err(); err != nil {\n"}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 nobody looks once the lane has settled",
		file:    "settle.go",
		patches: []patch{{"		l.emit(token{reason: WakeSettle})\n", "		_ = l\n"}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 nobody looks while the settler waits",
		file:    "settle.go",
		patches: []patch{{"		l.planScout()\n		l.moved()\n", ""}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 an empty answer counts before the lane has settled",
		file:    "wakechain.go",
		patches: []patch{{" || listening != 0 && !(k.settled && l.disarms == k.disarms)", ""}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 a lane that disarms stays settled",
		file:    "settle.go",
		patches: []patch{{"	l.settled, l.settling, l.empty = false, false, false\n", "	l.empty = false\n"}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 a lane disarms although others of it wait",
		file:    "settle.go",
		patches: []patch{{"	alone := l.inside <= 1 && len(l.waiting) == 0\n", "	const alone = true\n"}},
		pkg:     root, test: settling,
	},
	{
		name:    "12 settled although it has disarmed meanwhile",
		file:    "settle.go",
		patches: []patch{{"	if l.settling && l.disarms == disarms {\n", "	if disarms <= l.disarms {\n"}},
		pkg:     root, test: "TestSettle_LaneDisarmsMeanwhile_IsNotSettled",
	},
	{
		name:    "12 a write that is late counts",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{" WHERE w.number < p_number;", ";"}},
		pkg:     root, test: "TestArm_LateWrite_ChangesNothing",
	},
	{
		name:    "12 the fallback takes a new lane for one that has retired",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"w.lane BETWEEN 1 AND p_newest AND", "w.lane > 0 AND"}},
		pkg:     root, test: "TestSettle_LaneIsNewWhileTheFallbackLooks_KeepsItsRow",
	},
	{
		name:    "12 a producer without the lock is silent",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"TG_RELID::integer)\n       AND current", "TG_RELID::integer) IS NOT NULL\n       AND current"}},
		pkg:     root, test: "TestQuiescent_ProducerThatCannotBeSure_Notifies",
	},
	{
		name:    "12 an old snapshot is trusted",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"       AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN\n        -- In", "       THEN\n        -- In"}},
		pkg:     root, test: "TestQuiescent_ProducerThatCannotBeSure_Notifies",
	},
	{
		name:    "11 all nodes are told",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"        EXIT WHEN cardinality(v_told) >= v_wanted;\n", ""}},
		pkg:     root, test: "TestHole11_OneItemTenNodes_TwoLook",
	},
	{
		name:    "11 the coalescer tells all",
		file:    "coalescer.go",
		patches: []patch{{"	case n.forAny && n.label != nil && n.namespace != \"\":\n		return \"one kind\"\n	case n.forAny:\n		return \"any\"\n", ""}},
		pkg:     root, test: "TestHole11_OneItemTenNodes_TwoLook",
	},
	{
		name:    "11 who cannot come keeps it",
		file:    "bounce.go",
		patches: []patch{{"	l.passOn(l, hop)\n", ""}},
		pkg:     root, test: "TestBounce_NodeWasToldAloneAndIsBusy_PassesItOn",
	},
	{
		name:    "11 a token of a lane that has retired is dropped",
		file:    "engine.go",
		patches: []patch{{"	e.signal(q, n, WakeNotify)\n	e.coalescer.tell(q, n)\n", "	_ = n\n"}},
		pkg:     root, test: "TestBounce_LaneHasRetired_OthersAreTold",
	},
	{
		name:    "11 nobody reconsiders when another joins",
		file:    "engine.go",
		patches: []patch{{"			l.reconsider()\n", "			_ = l\n"}},
		pkg:     root, test: "TestBounce_AnotherNodeJoins_GetsWhatWasKept",
	},
	{
		name:    "11 what was missed while not listening is kept",
		file:    "bounce.go",
		patches: []patch{{"token{reason: WakeReconnect, sole: true}", "token{reason: WakeReconnect}"}},
		pkg:     root, test: "TestBounce_NodeReconnectsAndIsBusy_PassesOnWhatItMissed",
	},
	{
		name:    "11 who leaves passes on nothing",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"        IF FOUND AND v_row.lane > 0 THEN\n", "        IF FOUND AND v_row.lane > 0 AND NOT p_own THEN\n"}},
		pkg:     root, test: "TestLeave_ProducerHasChosenTheNode_ItsItemIsPassedOn",
	},
	{
		name:    "11 who leaves does not wait for producers",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{"    IF NOT reads_committed() OR NOT wait_for_producers(p_queue, p_patience) THEN\n", "    IF false THEN\n"}},
		pkg:     root, test: "TestSweep_NodeHasEnded_WhatItWasToldOfIsPassedOn",
	},
	{
		name:    "hibernating nodes do not poll",
		file:    "hibernate.go",
		patches: []patch{{"					ln.pollAsleep()\n", "					_ = ln\n"}},
		pkg:     root, test: "TestHibernate_PlainSQLAddsAnItem_NextPollFindsItAndTheNodeListensAgain",
	},
	{
		name:    "hibernating nodes do not wake up",
		file:    "hibernate.go",
		patches: []patch{{"	if h.on.Load() { // who sets it looks at lastWork afterwards\n", "	if false {\n"}},
		pkg:     root, test: "TestHibernate_SomethingIsDoneHere_WakesAtOnce",
	},
	{
		name:    "who hibernates passes on nothing",
		file:    "hibernate.go",
		patches: []patch{{"left := e.leaveBy(ctx, exec); conn", "left := true; conn"}},
		pkg:     root, test: "TestHibernate_ProducerHasChosenTheNode_ItsItemIsPassedOn",
	},
	{
		name:    "a lane is armed after its node has left",
		file:    "settle.go",
		patches: []patch{{"	if s.epoch <= l.overEpoch || l.filter.nothing {", "	if s.epoch == 0 || l.filter.nothing {"}},
		pkg:     root, test: "TestHibernate_EpochEnds_NoRowIsWrittenAnyMore",
	},
	{
		name:    "11 nobody sweeps",
		file:    "bounce.go",
		patches: []patch{{"	if len(o.dead) > 0 {\n", "	if false {\n"}},
		pkg:     root, test: "TestSweep_NodeHasEnded_WhatItWasToldOfIsPassedOn",
	},
	{
		name:    "11 a lane is told what it cannot take",
		file:    "migrations/00002_notify.sql",
		patches: []patch{{" AND (w.labels IS NULL OR p_label = ANY (w.labels))", ""}},
		pkg:     root, test: "TestWake_ItemsOfAllKinds_GoToWhoeverCanTakeThem",
	},
	{
		name:    "chain: the one who found more calls nobody",
		file:    "wakechain.go",
		patches: []patch{{"		defer l.emit(token{reason: WakeChain, path: pathOf(by), sole: sole}) // invariant (4)\n", "		_ = WakeChain\n"}},
		pkg:     root, test: conservation,
	},
	{
		name:    "chain: the token of a failed query is gone",
		file:    "engine.go",
		patches: []patch{{"			l.unanswered(k, by) // also when ask panics\n", ""}},
		pkg:     root, test: conservation,
	},
	{
		name:    "chain: the token of a dispatcher that left is gone",
		file:    "wakechain.go",
		patches: []patch{{"		l.handBack(<-self.wake)\n", "		<-self.wake\n"}},
		pkg:     root, test: "TestLane_TokenToDispatcherThatLeaves_IsNotLost",
	},
	{
		name: "empty: a signal during the query is overlooked",
		file: "wakechain.go",
		patches: []patch{{"l.empty = l.empty || l.signals == k.signals && !missed", "l.empty = l.empty || !missed"},
			{"return t.signal <= k.signals", "return true"}},
		pkg: root, test: "TestLane_EmptyAnswer_PaysForOlderTokensOnly",
	},
	{
		name:    "empty: an instant heard during the query is overwritten",
		file:    "wakechain.go",
		patches: []patch{{"	if latest && l.heardOf == k.heardOf {\n", "	if latest {\n"}},
		pkg:     root, test: "TestLane_InstantHeardDuringAQuery_SurvivesItsAnswer",
	},
	{
		name:    "empty: an answer that another overtook counts",
		file:    "wakechain.go",
		patches: []patch{{"	latest := l.answers == k.answers\n", "	latest := true\n"}},
		pkg:     root, test: "TestLane_AnswerThatAnotherOvertook_ReplacesNothing",
	},
	{
		name:    "chain: a full lane drops the newest token",
		file:    "wakechain.go",
		patches: []patch{{"		l.tokens = slices.Delete(l.tokens, 0, 1)\n	}\n	l.bounce()\n", "		l.tokens = l.tokens[:len(l.tokens)-1]\n	}\n	l.bounce()\n"}},
		pkg:     root, test: "TestLane_SignalDuringAQueryOfAFullLane_IsKept",
	},
	{
		name:    "close: the last word is said too early",
		file:    "provider.go",
		patches: []patch{{"	case err == nil:\n		tell()\n", "	case err == nil:\n		go tell()\n"}},
		pkg:     root, test: "TestClose_VerbHasCommittedAndNotTold_WaitsForIt",
	},
	{
		name:    "release: nobody here is called",
		file:    "timer.go",
		patches: []patch{{"	if comes(&l.call) {\n", "	if comes(&l.call) && false {\n"}},
		pkg:     root, test: deployment,
	},
	{
		name:    "release: the other nodes are not asked",
		file:    "timer.go",
		patches: []patch{{"	if comes(&l.relay) {\n", "	if comes(&l.relay) && false {\n"}},
		pkg:     root, test: deployment,
	},
	{
		name:    "leases: a claim is never announced",
		file:    "leases.go",
		patches: []patch{{"	return s.joins[q], !slices.ContainsFunc(known", "	return s.joins[q], false && !slices.ContainsFunc(known"}},
		pkg:     root, test: deployment,
	},
	{
		name:    "leases: a deaf node counts on others",
		file:    "engine.go",
		patches: []patch{{"		announce = true // who may have joined since, this node has not heard\n", ""}},
		pkg:     root, test: "TestDeployment_NodeJoinsWhileAnotherIsDeaf_IsToldOfItsLeases",
	},
	{
		name:    "doubt: one look is enough",
		file:    "engine.go",
		patches: []patch{{"		e.doubts[q] = doubt{next: e.clock.Now().Add(doubtPauses[0])}\n", ""}},
		pkg:     root, test: "TestDoubt_EnqueueCommitsAfterItsSenderGaveUp_EveryNodeFindsIt",
	},
	{
		name:    "coalescer: what panics is not said",
		file:    "coalescer.go",
		patches: []patch{{"			c.putBack(taken) // also when something panics\n", "			_ = c\n"}},
		pkg:     root, test: "TestCoalescer_PanicWhileItSpeaks_SaysItAfterwards",
	},
	{
		name:    "reconnect: nobody looks",
		file:    "engine.go",
		patches: []patch{{"			l.reconnected()\n", "			_ = l\n"}},
		pkg:     root, test: conservation,
	},
	{
		name:    "batch: one that is full says that nothing is left",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"        v_earliest := v_now;\n", "        v_earliest := NULL;\n"}},
		pkg:     root, test: "TestFetchWorkItems_FullBatch_AnotherLooksWhatIsLeft",
	},
	{
		name:    "batch: what somebody locked once is left aside",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"       AND (d.xmax = 0 OR d.xmax <> ALL (v_moving))", "       AND d.xmax = 0"}},
		pkg:     root, test: "TestFetchWorkItems_OthersHadLockedIt_IsInItsPlace",
	},
	{
		name:    "limits: nobody is told of a place that is free",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"        IF somebody_waits('worker') THEN\n            PERFORM wake", "        IF false THEN\n            PERFORM wake"}},
		pkg:     root, test: "TestLimits_PlaceBecomesFree_WhoeverWaitsIsTold",
	},
	{
		name:    "limits: claims of a namespace do not wait for each other",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"    IF pg_try_advisory_xact_lock(hashtext('pgwake limits of ' || current_schema()), hashtext(p_namespace)) THEN\n", "    IF true THEN\n"}},
		pkg:     root, test: "TestLimits_FiveNodes_NeverTooMany_AndNoPlaceIdle",
	},
	{
		name:    "limits: claims of a key take without counting",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"                               OFFSET v_most)\n", "                               OFFSET 1000000)\n"}},
		pkg:     root, test: "TestLimits_KeyIsFull_NextOfAnotherComesAtOnce",
	},
	{
		name:    "limits: claims of a key do not wait for those that are being counted",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"    IF NOT lock_namespace(p_namespace, '200ms') THEN -- there", "    IF false THEN -- there"}},
		pkg:     root, test: "TestLimits_AnotherClaimOfTheKeyIsUnderWay_OnlyOthersAreTaken",
	},
	{
		name:    "limits: what may begin at once does not pay",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"FROM clock c WHERE c.may ORDER BY c.key\n", "FROM clock c WHERE false ORDER BY c.key\n"}},
		pkg:     root, test: "TestLimits_RatePerKey_OneByOne_EachPays",
	},
	{
		name:    "limits: places of keys that are released are left to others",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"       AND NOT EXISTS (SELECT FROM releases r WHERE r.namespace = p_namespace) -- which pick_limited takes up\n", ""}},
		pkg:     root, test: "TestLimits_ReleasesAreNoted_WhileItemsAreHeld",
	},
	{
		name:    "limits: places are handed on though too many are taken",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"CASE WHEN v_limit.over THEN 0 ELSE", "CASE WHEN false THEN 0 ELSE"}},
		pkg:     root, test: "TestLimits_AckedWithAFetch_ItsPlaceIsHandedOn",
	},
	{
		name:    "limits: a place is free when its lease ends, whoever renews that",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"q.namespace = p_namespace AND q.visible_at <= p_now\n         ORDER BY q.visible_at DESC LIMIT p_most", "false LIMIT 1"}},
		pkg:     root, test: "TestLimits_LeaseEndsBeforeACommit_PlaceIsStillTaken",
	},
	{
		name:    "limits: what is at work when they are set does not count",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"     WHERE q.id = ANY (v_free) AND q.visible_at > p_now AND", "     WHERE false AND"}},
		pkg:     root, test: "TestLimits_SetWhileItemsAreAtWork_TheyCount",
	},
	{
		name:    "limits: what is at work and locked when they are set does not count",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"WHERE m.namespace = p_namespace)) AND NOT q.slot) INTO v_count;", "WHERE m.namespace = p_namespace)) AND false) INTO v_count;"}},
		pkg:     root, test: "TestLimits_SetWhileALeaseIsRenewed_ItCounts",
	},
	{
		name:    "limits: claims under way when they are set do not count",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"    IF v_left = '{}' AND v_items = '{}' THEN\n", "    IF v_items = '{}' THEN\n"}},
		pkg:     root, test: "TestLimits_SetWhileAClaimIsUnderWay_ItCounts",
	},
	{
		name:    "limits: the first items of a namespace are not counted",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{" AND (w.namespace = ANY (v_locked) OR l.holds IS NOT TRUE)\n", "\n"}},
		pkg:     root, test: "TestLimits_FirstItemsComeDuringAClaim_TheyCount",
	},
	{
		name:    "limits: shares that nobody took in time are saved up",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"CASE WHEN d.late > d.lag + d.step / 2 THEN make_interval(secs => extract(epoch FROM d.late)::float8) ELSE d.lag END AS lag", "d.lag AS lag"}},
		pkg:     root, test: "TestLimits_RatePerKey_NobodyClaimsForLong_NoMoreThanABurstBegins",
	},
	{
		name:    "limits: who waits for the clock of a key is early after that",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"v_now := greatest(p_now, clock_timestamp());", "v_now := p_now;"}},
		pkg:     root, test: "TestLimits_RatePerKey_OthersPayWhileItWaits_BeginsAllTheSame",
	},
	{
		name:    "limits: acks with a claim are not flushed",
		file:    "work.go",
		patches: []patch{{"if err == nil && plan.ack != nil && async && !plan.ackAsync {", "if false {"}},
		pkg:     root, test: "TestLimits_AckedWithAFetch_IsFlushedAfterTheCommit",
	},
	{
		name:    "dispatch: what is locked is waited for",
		file:    "dispatch/apart.go",
		patches: []patch{{"direct := len(a.items) == 1 && !a.items[batch[0]].tried", "direct := true"}},
		pkg:     "./dispatch", test: "TestRun_FailedItemsAreLocked_OthersAreSettled",
	},
	{
		name:    "dispatch: who ends soon leaves what was done",
		file:    "dispatch/settle.go",
		patches: []patch{{"w.waitFor(max(w.d.cfg.CancelTimeout, settlePatience), taken)", "w.waitFor(w.d.cfg.CancelTimeout, taken)"}},
		pkg:     "./dispatch", test: "TestStop_HandlersHaveNoTime_WhatTheyDidIsAcknowledged",
	},
	{
		name:    "limits: a place is forgotten since the item that it is for is locked",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"CASE WHEN v_back < cardinality(v_free.ids) AND EXISTS (", "CASE WHEN false AND EXISTS ("}},
		pkg:     root, test: "TestLimits_HeldItemIsLockedWhenItsPlaceIsTakenUp_ComesAfterThat",
	},
	{
		name:    "limits: what nobody takes up is looked for",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"l.max_running_per_key IS NOT NULL AND NOT l.paused AND (p_namespaces", "l.holds AND NOT l.paused AND (p_namespaces"}},
		pkg:     root, test: "TestLimits_ReleaseOfAKeyComesAfterItsLimit_NobodyPolls",
	},
	{
		name:    "dedup: who waits is claimed before the change is there to be seen",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"ORDER BY w.dedup_key LIMIT 1 FOR KEY SHARE) holder", "ORDER BY w.dedup_key LIMIT 1) holder"}},
		pkg:     root, test: "TestDedupWaiting_InATransaction_ItemIsNotClaimedBeforeItsEnd",
	},
	{
		name:    "limits: what is early is put off one by one",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"FROM unnest(v_chosen[p_limit + 1:]) WITH", "FROM unnest(v_chosen[:0]) WITH"}},
		pkg:     root, test: "TestLimits_RatePerKey_ManyAreEarly_ClaimOfOnePutsThemOffTogether",
	},
	{
		name:    "limits: a rate goes past the end of time",
		file:    "migrations/00008_limits.sql",
		patches: []patch{{"'9999-12-30 00:00:00+00'; -- or", "'250000-12-30 00:00:00+00'; -- or"}},
		pkg:     root, test: "TestLimits_RatePerKey_SlowestThatThereIs_OthersAreClaimed",
	},
	{
		name: "plans: a message joins what is believed to be empty",
		file: "migrations/00004_orchestrator.sql",
		patches: []patch{{"known.instance_id = ANY (ARRAY[i.instance_id]) -- as in ack_work_many", "known.instance_id = i.instance_id"},
			{"current.instance_id = ANY (ARRAY[known.instance_id]) AND", "current.instance_id = known.instance_id AND"}},
		pkg: "./migrations", test: "TestVerbs_TablesAnalyzedWhenEmpty_ReadHardlyMoreThanWhatTheyAreFor",
	},
	{
		name:    "plans: deletions walk over what is believed to be empty",
		file:    "migrations/00006_management.sql",
		patches: []patch{{"CROSS JOIN LATERAL (SELECT r.* FROM instances r WHERE r.instance_id = root.id OFFSET 0) i", "JOIN instances i ON i.instance_id = root.id"}},
		pkg:     "./migrations", test: "TestVerbs_TablesAnalyzedWhenEmpty_ReadHardlyMoreThanWhatTheyAreFor",
	},
	{
		name:    "dedup: who waited for the key does not look again",
		file:    "migrations/00003_worker.sql",
		patches: []patch{{"    IF v_kept OR 'dead' = ANY (p_dedup_scopes) THEN\n", "    IF false THEN\n"}},
		pkg:     root, test: "TestDedupQueuedOrDead_DiesMeanwhile_IsInTheWay",
	},
	{
		name:    "group: what one did wrong is everybody's fault",
		file:    "groups.go",
		patches: []patch{{"		if len(members) > 1 && refusedForOne(err) {\n", "		if false {\n"}},
		pkg:     root, test: "TestEnqueueForWorker_ServerRefusesOneOfAGroup_TheOthersLand",
	},
	{
		name:    "group: whoever leaves ends it for all",
		file:    "groups.go",
		patches: []patch{{"	if m.group.wanted--; m.group.wanted == 0 {\n", "	if m.group.wanted--; true {\n"}},
		pkg:     root, test: "TestAckGroups_CallersLeave_GroupGoesOnForTheOthers",
	},
	{
		name:    "group: after a panic its place is taken for good",
		file:    "groups.go",
		patches: []patch{{"		defer g.ended(&g.singles)\n		return g.alone(ctx, call)\n", "		err := g.alone(ctx, call)\n		g.ended(&g.singles)\n		return err\n"}},
		pkg:     root, test: "TestEnqueueGroups_PanicOfOneAlone_GivesItsPlaceBack",
	},
	{
		name:    "group: each enqueue is told of the first",
		file:    "enqueuegroup.go",
		patches: []patch{{"			c.added = added[i]\n", "			c.added = added[i*0]\n"}},
		pkg:     root, test: "TestEnqueueForWorker_ManyShareACommit_EachHearsOfItsOwn",
	},
	{
		name:    "breaker: polls are made all the same",
		file:    "breaker.go",
		patches: []patch{{"		b.skipped++\n		return false\n", "		b.skipped++\n"}},
		pkg:     root, test: "TestBreaker_Protocol",
	},
	{
		name:    "breaker: an answer is no sign",
		file:    "breaker.go",
		patches: []patch{{"	if b.state == breakerOpen {\n		b.halfOpen()\n	}\n	if b.state == breakerHalfOpen", "	if b.state == breakerHalfOpen"}},
		pkg:     root, test: "TestT58_QueriesForWorkFail_PollsAreSkipped_NothingElseIs",
	},
	{
		name:    "breaker: a poll that fails goes from one to the next",
		file:    "wakechain.go",
		patches: []patch{{"		if !by.again {", "		if true {"}},
		pkg:     root, test: "TestT58_QueriesForWorkFail_PollsAreSkipped_NothingElseIs",
	},
	{
		name:    "breaker: a fallback that fails costs the connection",
		file:    "listener.go",
		patches: []patch{{"	if err != nil && !conn.IsClosed() {", "	if false {"}},
		pkg:     root, test: "TestBreaker_FallbackFails_TheListenConnectionIsKept",
	},
	{
		name:    "paths: what the chain finds is an event",
		file:    "wakechain.go",
		patches: []patch{{"path: pathOf(by), sole: sole}", "sole: sole}"}},
		pkg:     root, test: "TestT58_QueriesForWorkFail_PollsAreSkipped_NothingElseIs",
	},
	{
		name:    "modes: who waited goes on waiting",
		file:    "modes.go",
		patches: []patch{{"	for _, l := range e.waiters.drop(concerned) {", "	for _, l := range e.waiters.drop(func(filter) bool { return false }) {\n		_ = concerned"}},
		pkg:     root, test: "TestSetModes_ListenConnection_ComesAndGoes",
	},
	{
		name:    "namespaces: a fallback asks for them whatever it counts",
		file:    "waits.go",
		patches: []patch{{"	more := namespaces != w.namespaces\n", "	more := true\n"}},
		pkg:     "./dispatch", test: "TestCoordinators_ThousandIdleNamespaces_CostNoQueries",
	},
	{
		name:    "coordinators: what was told while nobody listened is not served",
		file:    "waits.go",
		patches: []patch{{"	w.lookAtThose(func(*waiting) bool { return true })\n", ""}},
		pkg:     "./dispatch", test: "TestT37_NamespaceCreatedWhileTheListenerIsDown_IsServedAfterwards",
	},
}
