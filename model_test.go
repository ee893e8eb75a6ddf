package pgwake_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: do all verbs together do what the specification says, one call after the other?
//
// contractModel is both queues and what instances remember, in memory. TestModel_… draws verbs at random, for both
// queues, several instances and namespaces, with tokens that hold and tokens that do not, and compares every answer
// with the model's, and after every step the tables with the model's rows. What goroutines do at once is for
// model_concurrent_test.go.

// modelRow is a work item or a message. It has no id: rows are in the order in which they were added, and that must
// be the order of their ids.
type modelRow struct {
	place     int // among all rows ever added to its queue
	work      pgwake.WorkItem
	message   pgwake.Message
	namespace string
	priority  int
	key       string
	visible   time.Duration
	attempt   int
	token     pgwake.LockToken // of the latest claim, unless that was given back
	held      bool             // waits behind the lock of its instance, until that ends
	owner     string           // whom it is sticky to; visible is then when that ends
	own       time.Duration    // when it is due for owner
	id        int64            // once it is known
}

// due is when somebody may have it.
func (r *modelRow) due() time.Duration {
	if r.owner != "" {
		return r.own
	}
	return r.visible
}

// dueFor is when whoever fetches as owner may have it.
func (r *modelRow) dueFor(owner string) time.Duration {
	if r.owner == owner {
		return r.due()
	}
	return r.visible
}

// stick makes it the owner's alone until then, unless it is not due before.
func (r *modelRow) stick(owner string, until time.Duration) {
	if owner != "" && r.visible < until {
		r.owner, r.own, r.visible = owner, r.visible, until
	}
}

// restick is stick after a turn. What is the owner's already becomes anybody's no later than that.
func (r *modelRow) restick(owner string, until time.Duration) {
	if owner != "" && r.owner == owner && r.own < until {
		r.visible = min(r.visible, until)
		return
	}
	r.unstick()
	r.stick(owner, until)
}

// unstick makes it anybody's.
func (r *modelRow) unstick() { r.visible, r.owner = r.due(), "" }

// modelInstance is what acknowledged turns left.
type modelInstance struct {
	namespace, name, version string
	execution                int64
	statuses                 map[int64]pgwake.Status
	history                  map[int64][]pgwake.Event
	owner                    string // whom it is sticky to, until then
	until                    time.Duration
}

type modelLock struct {
	token pgwake.LockToken
	until time.Duration
	holds int // how often messages were held behind it
}

// contractModel is the specification. Its clock ticks at every instant that a verb takes from the server's, so that
// the order of instants is that of the verbs, and travel moves it by far more than a verb takes.
type contractModel struct {
	clock     time.Duration
	places    int
	work      []*modelRow
	messages  []*modelRow
	locks     map[string]*modelLock
	instances map[string]*modelInstance
}

func newContractModel() *contractModel {
	return &contractModel{locks: make(map[string]*modelLock), instances: make(map[string]*modelInstance)}
}

// now is an instant of its own.
func (m *contractModel) now() time.Duration {
	m.clock += time.Microsecond
	return m.clock
}

// add adds rows to a queue, except those whose key is queued. For each it returns the row that is queued now.
func (m *contractModel) add(queue *[]*modelRow, rows []*modelRow) (queued []*modelRow) {
	for _, r := range rows {
		m.places++
		r.place = m.places
		at := slices.IndexFunc(*queue, func(o *modelRow) bool { return r.key != "" && o.key == r.key && o.namespace == r.namespace })
		if at >= 0 {
			queued = append(queued, (*queue)[at])
			continue
		}
		*queue = append(*queue, r)
		queued = append(queued, r)
	}
	return queued
}

func (m *contractModel) enqueueWork(batch []pgwake.WorkEnqueue) (added, queued []*modelRow) {
	now := m.now()
	for _, e := range batch {
		added = append(added, &modelRow{
			work: e.WorkItem, namespace: cmp.Or(e.Namespace, pgwake.DefaultNamespace), priority: e.Priority, key: e.DedupKey, visible: now + e.Delay,
		})
	}
	return added, m.add(&m.work, added)
}

// enqueueMessages puts each message where its instance is: where it was acknowledged, or where its first message
// waits, or where the first message of the batch that says so wants it.
func (m *contractModel) enqueueMessages(batch []pgwake.MessageEnqueue) (added, queued []*modelRow) {
	now := m.now()
	namespace := func(instance string) string {
		if known := m.instances[instance]; known != nil {
			return known.namespace
		}
		for _, r := range m.messages {
			if r.message.Instance == instance {
				return r.namespace
			}
		}
		for _, e := range batch {
			if e.Instance == instance && e.Namespace != "" && e.Namespace != pgwake.DefaultNamespace {
				return e.Namespace
			}
		}
		return pgwake.DefaultNamespace
	}
	for _, e := range batch {
		row := &modelRow{message: e.Message, namespace: namespace(e.Instance), priority: e.Priority, key: e.DedupKey, visible: now + e.Delay}
		if known := m.instances[e.Instance]; known != nil && now < known.until {
			row.stick(known.owner, known.until)
		}
		added = append(added, row)
	}
	return added, m.add(&m.messages, added)
}

// due returns the rows that are due for the owner in the namespaces (none: all), in the order of claiming.
func due(rows []*modelRow, now time.Duration, namespaces []string, owner string) (due []*modelRow) {
	for _, r := range rows {
		if r.dueFor(owner) <= now && (len(namespaces) == 0 || slices.Contains(namespaces, r.namespace)) {
			due = append(due, r)
		}
	}
	slices.SortFunc(due, func(a, b *modelRow) int {
		return cmp.Or(-cmp.Compare(a.priority, b.priority), cmp.Compare(a.dueFor(owner), b.dueFor(owner)), cmp.Compare(a.place, b.place))
	})
	return due
}

// fetchWork claims up to n items. Their token is still to be told.
func (m *contractModel) fetchWork(n int, lease time.Duration, namespaces []string) []*modelRow {
	now := m.now()
	rows := due(m.work, now, namespaces, "")
	rows = rows[:min(n, len(rows))]
	for _, r := range rows {
		r.attempt++
		r.visible = now + lease
	}
	return rows
}

// workOf returns the item that the token has under lease, or nil.
func (m *contractModel) workOf(token pgwake.LockToken, now time.Duration) *modelRow {
	for _, r := range m.work {
		if r.token == token && r.visible > now {
			return r
		}
	}
	return nil
}

func (m *contractModel) ackWork(r *modelRow, completion *pgwake.Message) {
	m.work = slices.DeleteFunc(m.work, func(o *modelRow) bool { return o == r })
	if completion != nil {
		m.enqueueMessages([]pgwake.MessageEnqueue{{Message: *completion}})
	}
}

// giveBack is the end of a claim that did not finish it.
func (r *modelRow) giveBack(now time.Duration, o *pgwake.AbandonOptions) {
	r.visible, r.token = now+o.Delay, ""
	if o.IgnoreAttempt {
		r.attempt = max(r.attempt-1, 0)
	}
}

// fetchTurn takes the turn of the first instance that is free, and holds what it meets of those that are not, and what
// came after that, until their lease ends; each 16th time all of it. The rows of the turn are in the order of their ids.
func (m *contractModel) fetchTurn(lease time.Duration, namespaces []string, owner string) (lock *modelLock, turn []*modelRow) {
	now := m.now()
	for _, r := range due(m.messages, now, namespaces, owner) {
		instance := r.message.Instance
		if r.dueFor(owner) > now {
			continue // held a moment ago
		}
		l := m.locks[instance]
		leased := l != nil && l.until > now
		if !leased {
			l = &modelLock{until: now + lease}
			m.locks[instance] = l
		}
		first := 0
		if leased {
			if l.holds%16 != 15 {
				first = slices.Index(m.messages, r)
			}
			l.holds++
		}
		for _, o := range m.messages[first:] {
			if o.message.Instance != instance || o.due() > now {
				continue
			}
			o.visible, o.held, o.owner = l.until, leased, ""
			if !leased {
				o.attempt++
				turn = append(turn, o)
			}
		}
		if !leased {
			return l, turn
		}
	}
	return nil, nil
}

// turnOf returns the rows of the turn that the token has under lease, or nil.
func (m *contractModel) turnOf(instance string, token pgwake.LockToken, now time.Duration) (turn []*modelRow) {
	if l := m.locks[instance]; l == nil || l.token != token || l.until <= now {
		return nil
	}
	for _, r := range m.messages {
		if r.message.Instance == instance && r.token == token {
			turn = append(turn, r)
		}
	}
	return turn
}

// release frees an instance. What was held behind its lock is due now.
func (m *contractModel) release(instance string) {
	now := m.now()
	delete(m.locks, instance)
	for _, r := range m.messages {
		if r.message.Instance == instance && r.held {
			r.visible, r.held = now, false
		}
	}
}

// ackTurn does what a turn decided, or says why not.
func (m *contractModel) ackTurn(instance string, turn []*modelRow, ack pgwake.OrchestrationAck) error {
	known := m.instances[instance]
	execution := max(ack.ExecutionID, 1)
	if known == nil && ack.Metadata.Name == "" && (len(ack.History) > 0 || ack.Metadata.Status != "" || ack.Metadata.Version != "" || ack.Sticky != nil) {
		return pgwake.ErrInvalid
	}
	if known != nil {
		for _, e := range ack.History {
			if slices.ContainsFunc(known.history[execution], func(old pgwake.Event) bool { return old.ID == e.ID }) {
				return pgwake.ErrDuplicateEvent
			}
		}
	}
	if known == nil && ack.Metadata.Name != "" {
		known = &modelInstance{namespace: turn[0].namespace, statuses: make(map[int64]pgwake.Status), history: make(map[int64][]pgwake.Event)}
		m.instances[instance] = known
	}
	if known != nil {
		known.name, known.version = cmp.Or(ack.Metadata.Name, known.name), cmp.Or(ack.Metadata.Version, known.version)
		known.execution = max(known.execution, execution)
		known.statuses[execution] = cmp.Or(ack.Metadata.Status, known.statuses[execution], pgwake.StatusRunning)
		known.history[execution] = append(known.history[execution], ack.History...)
		slices.SortFunc(known.history[execution], func(a, b pgwake.Event) int { return cmp.Compare(a.ID, b.ID) })
		known.owner = ""
		if ack.Sticky != nil {
			known.owner, known.until = ack.Sticky.Owner, m.now()+ack.Sticky.For
		}
	}
	for _, r := range turn {
		r.key = "" // free for what the turn enqueues
	}
	m.enqueueWork(ack.WorkItems)
	m.enqueueMessages(ack.Messages)
	m.messages = slices.DeleteFunc(m.messages, func(r *modelRow) bool { return slices.Contains(turn, r) })
	m.release(instance)
	for _, r := range m.messages {
		if known != nil && r.message.Instance == instance {
			r.restick(known.owner, known.until)
		}
	}
	return nil
}

// rows is what the tables must hold, a line for each row.
func (m *contractModel) rows() []string {
	rows := []string{}
	for queue, all := range map[string][]*modelRow{"work": m.work, "message": m.messages} {
		for _, r := range all {
			rows = append(rows, fmt.Sprintf("%s %s for %q in %s priority %d key %q attempt %d due %t own %s %t",
				queue, r.work.Name+string(r.message.Kind), r.work.Instance+r.message.Instance, r.namespace, r.priority, r.key, r.attempt, r.visible <= m.clock,
				r.owner, r.owner != "" && r.own <= m.clock))
		}
	}
	for id, i := range m.instances {
		rows = append(rows, fmt.Sprintf("instance %s in %s %s %q execution %d", id, i.namespace, i.name, i.version, i.execution))
		for execution, status := range i.statuses {
			rows = append(rows, fmt.Sprintf("execution %s %d %s", id, execution, status))
		}
		for execution, events := range i.history {
			for _, e := range events {
				rows = append(rows, fmt.Sprintf("event %s %d %d %s %s", id, execution, e.ID, e.Type, e.Data))
			}
		}
	}
	slices.Sort(rows)
	return rows
}

// modelRowsSQL is the same of the tables.
const modelRowsSQL = `
	SELECT format('work %s for "%s" in %s priority %s key "%s" attempt %s due %s own  false',
	       name, instance_id, namespace, priority, dedup_key, attempt_count, (visible_at <= clock_timestamp())::text) FROM worker_queue
	UNION ALL
	SELECT format('message %s for "%s" in %s priority %s key "%s" attempt %s due %s own %s %s',
	       kind, instance_id, namespace, priority, dedup_key, attempt_count, (visible_at <= clock_timestamp())::text,
	       sticky_owner, coalesce(sticky_due <= clock_timestamp(), false)::text) FROM orchestrator_queue
	UNION ALL
	SELECT format('instance %s in %s %s "%s" execution %s', instance_id, namespace, name, version, current_execution) FROM instances
	UNION ALL
	SELECT format('execution %s %s %s', instance_id, execution_id, status) FROM executions
	UNION ALL
	SELECT format('event %s %s %s %s %s', instance_id, execution_id, event_id, type, data) FROM history`

// modelToken is the token of a claim, of whatever became of it.
type modelToken struct {
	token    pgwake.LockToken
	instance string // of a turn
}

// modelRun draws calls, makes them, and compares.
type modelRun struct {
	*node
	model  *contractModel
	serial int
	work   []modelToken
	turns  []modelToken

	arrived time.Time // when it last travelled
}

var (
	modelNamespaces = []string{"", "default", "a", "b-1"}
	modelInstances  = []string{"i", "i", "i", "j", "k/1"} // mostly one, so that much happens to it
	modelOwners     = []string{"A", "A", "B"}
	modelLease      = 100 * time.Second // see travel
)

// name is one that nothing else has.
func (r *modelRun) name() string {
	r.serial++
	return strconv.Itoa(r.serial)
}

func (r *modelRun) drawOptions(t *rapid.T) (o pgwake.EnqueueOptions) {
	o.Namespace = rapid.SampledFrom(modelNamespaces).Draw(t, "namespace")
	o.Priority = rapid.SampledFrom([]int{0, 0, 1, 9}).Draw(t, "priority")
	o.Delay = time.Duration(rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "minutes")) * time.Minute
	if rapid.IntRange(0, 3).Draw(t, "keyed") == 0 {
		o.DedupKey = rapid.SampledFrom([]string{"k1", "k2"}).Draw(t, "key")
	}
	return o
}

func (r *modelRun) drawWork(t *rapid.T, least, most int) (batch []pgwake.WorkEnqueue) {
	for range rapid.IntRange(least, most).Draw(t, "items") {
		e := pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: r.name()}, EnqueueOptions: r.drawOptions(t)}
		if rapid.Bool().Draw(t, "scheduled") {
			e.Instance = rapid.SampledFrom(modelInstances).Draw(t, "instance")
			e.ExecutionID, e.ActivityID, e.Input = 1, int64(r.serial), json.RawMessage(`{"n": `+e.Name+`}`)
		}
		batch = append(batch, e)
	}
	return batch
}

func (r *modelRun) drawMessage(t *rapid.T) pgwake.Message {
	m := pgwake.Message{Instance: rapid.SampledFrom(modelInstances).Draw(t, "instance"), Kind: pgwake.MessageKind(r.name())}
	m.Data = json.RawMessage(`[ ` + string(m.Kind) + ` ]`)
	if rapid.IntRange(0, 2).Draw(t, "opens") == 0 { // its kind is then one of two, and it is told from others by its data
		m.Name, m.Version = "named-by-"+string(m.Kind), rapid.SampledFrom([]string{"", "1.0.0"}).Draw(t, "version")
		m.ExecutionID = rapid.Int64Range(0, 2).Draw(t, "execution")
		m.Kind = rapid.SampledFrom([]pgwake.MessageKind{pgwake.MessageStart, pgwake.MessageContinueAsNew}).Draw(t, "kind")
	}
	return m
}

func (r *modelRun) drawMessages(t *rapid.T, least, most int) (batch []pgwake.MessageEnqueue) {
	for range rapid.IntRange(least, most).Draw(t, "messages") {
		batch = append(batch, pgwake.MessageEnqueue{Message: r.drawMessage(t), EnqueueOptions: r.drawOptions(t)})
	}
	return batch
}

func (r *modelRun) drawToken(t *rapid.T, tokens []modelToken) modelToken {
	if len(tokens) == 0 {
		t.Skip("nothing was claimed yet")
	}
	last := len(tokens) - 1 // holds, most of the time
	return tokens[max(0, last-rapid.SampledFrom([]int{0, 0, 0, 1, 2, 3, 4}).Draw(t, "token"))]
}

func (r *modelRun) drawFilter(t *rapid.T) (namespaces []string) {
	if rapid.Bool().Draw(t, "all") {
		return nil
	}
	return rapid.SliceOfNDistinct(rapid.SampledFrom(modelNamespaces[1:]), 0, 3, rapid.ID).Draw(t, "filter")
}

func (r *modelRun) drawAbandon(t *rapid.T) *pgwake.AbandonOptions {
	return &pgwake.AbandonOptions{
		Delay:         time.Duration(rapid.IntRange(0, 2).Draw(t, "minutes")) * time.Minute,
		IgnoreAttempt: rapid.Bool().Draw(t, "ignore attempt"),
	}
}

// requireAdded compares the outcomes of an enqueue with what the model added and with what it found queued.
func (r *modelRun) requireAdded(t *rapid.T, got []pgwake.Enqueued, added, queued []*modelRow) {
	require.Len(t, got, len(added))
	for i, g := range got {
		require.Equal(t, added[i] != queued[i], g.Duplicate, "element %d", i)
		require.NotZero(t, g.ID)
		if queued[i].id == 0 {
			queued[i].id = g.ID
		}
		require.Equal(t, queued[i].id, g.ID)
	}
}

// learn notes the id of a row, or compares it, and makes sure that ids are in the order of adding.
func (r *modelRun) learn(t *rapid.T, rows []*modelRow, row *modelRow, id int64) {
	if row.id == 0 {
		row.id = id
	}
	require.Equal(t, row.id, id)
	for _, o := range rows {
		if o.id != 0 && o != row {
			require.Equal(t, row.place < o.place, id < o.id, "ids are in the order of adding")
		}
	}
}

func (r *modelRun) enqueueMessages(t *rapid.T) {
	batch := r.drawMessages(t, 1, 3)
	got, err := r.EnqueueForOrchestratorMany(tctx, batch)
	require.NoError(t, err)
	added, queued := r.model.enqueueMessages(batch)
	r.requireAdded(t, got, added, queued)
}

func (r *modelRun) fetchWork(t *rapid.T) {
	filter, n := r.drawFilter(t), rapid.IntRange(1, 5).Draw(t, "n")
	o := &pgwake.FetchOptions{LockTimeout: modelLease, NoWait: true, Namespaces: filter}
	var got []*pgwake.ClaimedWorkItem
	var err error
	if n == 1 {
		var one *pgwake.ClaimedWorkItem
		if one, err = r.FetchWorkItem(tctx, o); err == nil {
			got = append(got, one)
		}
	} else {
		got, err = r.FetchWorkItems(tctx, n, o)
	}
	want := r.model.fetchWork(n, modelLease, filter)
	if len(want) == 0 {
		requireError(t, err, pgwake.ErrNoWork)
		return
	}
	require.NoError(t, err)
	require.Len(t, got, len(want))
	for i, w := range want {
		g := got[i]
		require.Equal(t, w.work, g.WorkItem, "place %d", i)
		require.Equal(t, []any{w.namespace, w.priority, w.attempt}, []any{g.Namespace, g.Priority, g.Attempt})
		r.learn(t, r.model.work, w, g.ID)
		require.NotContains(t, r.work, modelToken{token: g.LockToken})
		w.token = g.LockToken
		r.work = append(r.work, modelToken{token: g.LockToken})
	}
}

func (r *modelRun) fetchTurn(t *rapid.T) {
	filter := r.drawFilter(t)
	owner := rapid.SampledFrom(append([]string{""}, modelOwners...)).Draw(t, "owner")
	got, err := r.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: modelLease, NoWait: true, Namespaces: filter, Owner: owner})
	lock, want := r.model.fetchTurn(modelLease, filter, owner)
	if lock == nil {
		requireError(t, err, pgwake.ErrNoWork)
		require.Nil(t, got)
		return
	}
	require.NoError(t, err)
	instance := want[0].message.Instance
	turn := pgwake.OrchestrationItem{Instance: instance, Namespace: want[0].namespace, ExecutionID: 1}
	var next int64 // the execution that the turn opens
	if at := slices.IndexFunc(want, func(w *modelRow) bool { return w.message.Name != "" }); at >= 0 {
		opening := want[at].message
		turn.Name, turn.Version, turn.ExecutionID = opening.Name, opening.Version, max(opening.ExecutionID, 1)
	}
	for _, w := range want {
		if w.message.Kind == pgwake.MessageContinueAsNew {
			next = max(next, w.message.ExecutionID)
		}
	}
	if known := r.model.instances[instance]; known != nil {
		turn.Name, turn.Version = known.name, cmp.Or(known.version, turn.Version)
		turn.Namespace, turn.ExecutionID = known.namespace, max(known.execution, next)
		turn.History = known.history[turn.ExecutionID]
	}
	require.Len(t, got.Messages, len(want), "messages of a turn for %s", instance)
	for i, w := range want {
		turn.Attempt = max(turn.Attempt, w.attempt)
		require.Equal(t, w.message, got.Messages[i].Message, "place %d", i)
		require.Equal(t, w.attempt, got.Messages[i].Attempt)
		r.learn(t, r.model.messages, w, got.Messages[i].ID)
		w.token = got.LockToken
	}
	require.Equal(t, []any{turn.Instance, turn.Namespace, turn.Name, turn.Version, turn.ExecutionID, turn.Attempt},
		[]any{got.Instance, got.Namespace, got.Name, got.Version, got.ExecutionID, got.Attempt})
	require.Equal(t, len(turn.History), len(got.History))
	for i, e := range turn.History {
		g := got.History[i]
		require.Equal(t, e, pgwake.Event{ID: g.ID, Type: g.Type, Data: g.Data})
	}
	lock.token = got.LockToken
	token := modelToken{got.LockToken, instance}
	require.NotContains(t, r.turns, token)
	r.turns = append(r.turns, token)
}

func (r *modelRun) ackTurn(t *rapid.T) {
	token := r.drawToken(t, r.turns)
	turn := r.model.turnOf(token.instance, token.token, r.model.now())
	ack := pgwake.OrchestrationAck{ExecutionID: 1, WorkItems: r.drawWork(t, 0, 2), Messages: r.drawMessages(t, 0, 2)}
	known := r.model.instances[token.instance]
	if known != nil {
		ack.ExecutionID = known.execution + rapid.SampledFrom([]int64{0, 0, 0, 0, 1}).Draw(t, "continue")
	}
	if rapid.IntRange(0, 3).Draw(t, "named") > 0 {
		ack.Metadata.Name = rapid.SampledFrom([]string{"flow", "other"}).Draw(t, "name")
	}
	ack.Metadata.Version = rapid.SampledFrom([]string{"", "1.0.0", "1.1.0"}).Draw(t, "version")
	ack.Metadata.Status = rapid.SampledFrom([]pgwake.Status{"", "", pgwake.StatusCompleted, pgwake.StatusFailed}).Draw(t, "status")
	if rapid.Bool().Draw(t, "sticky") {
		ack.Sticky = &pgwake.Sticky{Owner: rapid.SampledFrom(modelOwners).Draw(t, "owner"),
			For: rapid.SampledFrom([]time.Duration{65, 428}).Draw(t, "seconds") * time.Second}
	}
	next := int64(1)
	if known != nil {
		next = int64(len(known.history[ack.ExecutionID])) + 1
	}
	for i := range rapid.SampledFrom([]int64{0, 1, 2, 2}).Draw(t, "events") {
		ack.History = append(ack.History, pgwake.Event{ID: next + i, Type: "e", Data: json.RawMessage(`"` + r.name() + `"`)})
	}
	if next > 1 && rapid.IntRange(0, 2).Draw(t, "duplicate") == 0 {
		ack.History = append(ack.History, pgwake.Event{ID: rapid.Int64Range(1, next-1).Draw(t, "id"), Type: "again"})
	}
	err := r.AckOrchestrationItem(tctx, token.token, ack)
	if turn == nil {
		requireError(t, err, pgwake.ErrLockLost)
		return
	}
	if want := r.model.ackTurn(token.instance, turn, ack); want != nil {
		requireError(t, err, want)
		return
	}
	require.NoError(t, err)
}

func (r *modelRun) renewTurn(t *rapid.T) {
	m := r.model
	token := r.drawToken(t, r.turns)
	extend := time.Duration(rapid.SampledFrom([]int{1, 2, 4, 4}).Draw(t, "minutes")) * time.Minute
	now := m.now()
	turn := m.turnOf(token.instance, token.token, now)
	_, err := r.RenewOrchestrationItemLock(tctx, token.token, extend)
	if turn == nil {
		requireError(t, err, pgwake.ErrLockLost)
		return
	}
	require.NoError(t, err)
	m.locks[token.instance].until = now + extend
	for _, row := range m.messages {
		if row.message.Instance == token.instance && (row.held || slices.Contains(turn, row)) {
			row.visible = now + extend
		}
	}
}

// travel goes by a quarter of a minute more than whole ones: what waits for an instant of the model is never so close to
// it that the time of the calls themselves would matter. What those have taken since the last one is part of the way, so that they may take long
// altogether.
//
// Nor do two instants coincide that were set before and after it, of which the model would not know the order: delays are whole minutes, what is
// travelled are quarters, leases and stickiness neither, and each in its own way.
func (r *modelRun) travel(t *rapid.T) {
	d := time.Duration(rapid.IntRange(1, 3).Draw(t, "minutes"))*time.Minute + 15*time.Second
	r.node.travel(t, d-time.Since(r.arrived))
	r.arrived = time.Now()
	r.model.clock += d
}

// Whatever is called, in whatever order, with good tokens and with old ones: every answer and every row is the
// model's.
func TestModel_AllVerbsInAnyOrder_AnswerAsTheModelDoes(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	rapid.Check(t, func(t *rapid.T) {
		n.exec(t, `WITH w AS (DELETE FROM worker_queue), o AS (DELETE FROM orchestrator_queue), l AS (DELETE FROM instance_locks),
		                h AS (DELETE FROM history) DELETE FROM instances`)
		r := &modelRun{node: n, model: newContractModel(), arrived: time.Now()}
		m := r.model
		verbs := map[string]func(*rapid.T){
			"enqueue work": func(t *rapid.T) {
				batch := r.drawWork(t, 1, 4)
				got, err := r.EnqueueForWorkerMany(tctx, batch)
				require.NoError(t, err)
				added, queued := m.enqueueWork(batch)
				r.requireAdded(t, got, added, queued)
			},
			"enqueue messages": r.enqueueMessages,
			"fetch work":       r.fetchWork,
			"ack work": func(t *rapid.T) {
				token := r.drawToken(t, r.work).token
				var completion *pgwake.Message
				if rapid.Bool().Draw(t, "completion") {
					completion = new(r.drawMessage(t))
				}
				held := m.workOf(token, m.now())
				err := r.AckWorkItem(tctx, token, completion)
				if held == nil {
					requireError(t, err, pgwake.ErrLockLost)
					return
				}
				require.NoError(t, err)
				m.ackWork(held, completion)
			},
			"ack work items": func(t *rapid.T) {
				var tokens, lost []pgwake.LockToken
				var held []*modelRow
				now := m.now()
				for range rapid.IntRange(1, 3).Draw(t, "tokens") {
					token := r.drawToken(t, r.work).token
					if slices.Contains(tokens, token) {
						continue
					}
					tokens = append(tokens, token)
					if row := m.workOf(token, now); row != nil {
						held = append(held, row)
					} else {
						lost = append(lost, token)
					}
				}
				err := r.AckWorkItems(tctx, tokens)
				for _, row := range held {
					m.ackWork(row, nil)
				}
				if len(lost) == 0 {
					require.NoError(t, err)
					return
				}
				requireError(t, err, pgwake.ErrLockLost)
				var which *pgwake.LostLocksError
				require.ErrorAs(t, err, &which)
				require.Equal(t, lost, which.Tokens)
			},
			"abandon work": func(t *rapid.T) {
				token, o := r.drawToken(t, r.work).token, r.drawAbandon(t)
				now := m.now()
				held := m.workOf(token, now)
				err := r.AbandonWorkItem(tctx, token, o)
				if held == nil {
					requireError(t, err, pgwake.ErrLockLost)
					return
				}
				require.NoError(t, err)
				held.giveBack(now, o)
			},
			"renew work": func(t *rapid.T) {
				token := r.drawToken(t, r.work).token
				extend := time.Duration(rapid.IntRange(1, 3).Draw(t, "minutes")) * time.Minute
				now := m.now()
				held := m.workOf(token, now)
				_, err := r.RenewWorkItemLock(tctx, token, extend)
				if held == nil {
					requireError(t, err, pgwake.ErrLockLost)
					return
				}
				require.NoError(t, err)
				held.visible = now + extend
			},
			"fetch turn": r.fetchTurn,
			"ack turn":   r.ackTurn,
			"abandon turn": func(t *rapid.T) {
				token, o := r.drawToken(t, r.turns), r.drawAbandon(t)
				now := m.now()
				turn := m.turnOf(token.instance, token.token, now)
				err := r.AbandonOrchestrationItem(tctx, token.token, o)
				if turn == nil {
					requireError(t, err, pgwake.ErrLockLost)
					return
				}
				require.NoError(t, err)
				for _, row := range turn {
					row.giveBack(now, o)
				}
				m.release(token.instance)
			},
			"renew turn": r.renewTurn,
			"travel":     r.travel,
			"": func(t *rapid.T) {
				got := query[string](t, n, modelRowsSQL)
				slices.Sort(got)
				require.Equal(t, m.rows(), got)
			},
		}
		// As often as they lead to something.
		verbs["fetch work again"], verbs["fetch turn again"], verbs["ack turn again"] = r.fetchWork, r.fetchTurn, r.ackTurn
		verbs["enqueue messages again"], verbs["ack turn once more"] = r.enqueueMessages, r.ackTurn
		verbs["renew turn again"], verbs["fetch turn once more"], verbs["travel again"] = r.renewTurn, r.fetchTurn, r.travel
		t.Repeat(verbs)
	})
}
