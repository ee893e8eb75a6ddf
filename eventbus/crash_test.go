package eventbus_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
)

// This file answers: what is left of the promises of the bus when processes and the server crash at any moment?

// fromEnvironment is a number that a variable of the environment has.
func fromEnvironment(t *testing.T, name string, unless uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return unless
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, name)
	return n
}

// crash is a server of its own, with processes on it.
type crash struct {
	t        *testing.T
	random   *rand.Rand
	server   *devpg.Server
	emitters []*process
	nodes    []*process
	ledger   string
	conn     *pgx.Conn // for the test's own questions; nil: there was none
}

// Of one group each node handles everything; of the other each has handlers of its own. Two processes emit and four handle, and whenever some more events are handled, something crashes: PGWAKE_ROUNDS times, or four. PGWAKE_SEED draws the same
// faults and events once more; how they meet is the machine's.
func TestCrash_AtRandomMoments_EachEventIsLoggedOnceAndHandledOnceByEachGroupInOrder(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	seed := fromEnvironment(t, "PGWAKE_SEED", uint64(time.Now().UnixNano()))
	t.Logf("PGWAKE_SEED=%d", seed)
	c := newCrash(t, seed,
		member{ID: "audit-1", Group: "audit", Patterns: []string{"#"}},
		member{ID: "audit-2", Group: "audit", Patterns: []string{"#"}},
		member{ID: "shop-orders", Group: "shop", Patterns: []string{"order.*"}},
		member{ID: "shop-mail", Group: "shop", Patterns: []string{"invoice.sent", "mail.#"}},
		member{ID: "emits-1"},
		member{ID: "emits-2"})
	faults := []struct {
		name  string
		occur func()
	}{
		{"a node is killed", c.killNode}, {"an emitter is killed", c.killEmitter}, {"a node freezes", c.freezeNode}, {"a node is replaced", c.replaceNode},
		{"a backend is killed", c.killBackend}, {"the server is killed", c.killServer}, {"the server crashes", c.crashServer},
	}
	var order []int // so that each comes as often as the others
	for range fromEnvironment(t, "PGWAKE_ROUNDS", 4) {
		if len(order) == 0 {
			order = c.random.Perm(len(faults))
		}
		began := time.Now()
		c.handles(1 + c.random.IntN(60))
		flowed := time.Now()
		faults[order[0]].occur()
		t.Logf("after %v, %s: %v", flowed.Sub(began), faults[order[0]].name, time.Since(flowed))
		order = order[1:]
	}
	c.handles(1)
	for _, p := range c.emitters {
		require.NoError(t, p.stop(), p.ID)
	}
	c.none("deliveries and lines are left", `SELECT (SELECT count(*) FROM crash.worker_queue) + (SELECT count(*) FROM crash.event_lines)`)
	for _, p := range c.nodes {
		require.NoError(t, p.stop(), p.ID)
	}
	c.check()
}

// newCrash boots a server, and starts these members.
func newCrash(t *testing.T, seed uint64, members ...member) *crash {
	t.Helper()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true, Fsync: true})
	if errors.Is(err, devpg.ErrNoServer) {
		t.Skipf("breaks a server, and none can be booted here: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	p, err := pgwake.Open(t.Context(), server.URL, &pgwake.Config{Schema: crashSchema})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	// Nothing of an event is unique: what is done twice is there twice.
	_, err = p.Pool().Exec(t.Context(), `
		CREATE TABLE crash.effects (place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, by text, event bigint, key text, node text,
			done_at timestamptz DEFAULT clock_timestamp());
		CREATE TABLE crash.orders (batch text)`)
	require.NoError(t, err)
	c := &crash{t: t, random: rand.New(rand.NewPCG(seed, 0)), server: server, ledger: filepath.Join(t.TempDir(), "ledger")}
	for _, m := range members {
		m.URL, m.Ledger, m.Seed = server.URL, c.ledger, c.random.Uint64()
		if m.Group != "" {
			require.NoError(t, bus.Subscribe(t.Context(), m.Group, m.Patterns, nil))
			c.nodes = append(c.nodes, &process{member: m})
		} else {
			c.emitters = append(c.emitters, &process{member: m})
		}
	}
	t.Cleanup(func() {
		if c.conn != nil {
			_ = c.conn.Close(context.Background())
		}
		for _, p := range slices.Concat(c.nodes, c.emitters) {
			if p.Cmd != nil && p.ProcessState == nil {
				p.kill()
			}
		}
	})
	for _, p := range slices.Concat(c.nodes, c.emitters) {
		p.start(t)
	}
	return c
}

// query reads rows. It asks again while the server does not answer.
func (c *crash) query(sql string, each func(pgx.CollectableRow) error, args ...any) {
	c.t.Helper()
	var err error
	c.eventually(patience, func() bool {
		// One connection for all questions: to begin one takes the server as long as what the members have it do in that time.
		if c.conn == nil || c.conn.IsClosed() {
			if c.conn, err = pgx.Connect(c.t.Context(), c.server.URL); err != nil {
				return false
			}
		}
		var rows pgx.Rows
		if rows, err = c.conn.Query(c.t.Context(), sql, args...); err != nil {
			return false
		}
		_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (none struct{}, err error) { return none, each(row) })
		return err == nil
	}, func() string { return fmt.Sprintf("%s: %v", sql, err) })
}

// eventually is for what may take so long. It asks in the goroutine of the test, which alone may end it, and so seldom that the members come to
// their work.
func (c *crash) eventually(within time.Duration, so func() bool, otherwise func() string) {
	c.t.Helper()
	for end := time.Now().Add(within); !so(); doze(c.t.Context(), 50*time.Millisecond) {
		if time.Now().After(end) {
			require.Fail(c.t, "not within "+within.String(), otherwise())
		}
	}
}

// none waits until a number is 0.
func (c *crash) none(what, sql string) {
	c.t.Helper()
	var left int64
	c.eventually(10*patience, func() bool {
		left = c.ask(sql)
		return left == 0
	}, func() string { return fmt.Sprintf("%d %s", left, what) })
}

// ask reads a number.
func (c *crash) ask(sql string, args ...any) (n int64) {
	c.t.Helper()
	c.query(sql, func(row pgx.CollectableRow) error { return row.Scan(&n) }, args...)
	return n
}

// handles waits until so many more effects are there, as long as there are ever more.
func (c *crash) handles(n int) {
	c.t.Helper()
	from := c.ask(`SELECT coalesce(max(place), 0) FROM crash.effects`)
	for was, is := int64(0), int64(0); is < int64(n); was = is {
		c.eventually(patience, func() bool {
			is = c.ask(`SELECT count(*) FROM crash.effects WHERE place > $1`, from)
			return is > was
		}, func() string { return "nothing is handled any more" })
	}
}

func (c *crash) one(of []*process) *process { return of[c.random.IntN(len(of))] }

func (c *crash) killNode() {
	p := c.one(c.nodes)
	p.kill()
	p.start(c.t)
}

func (c *crash) killEmitter() {
	p := c.one(c.emitters)
	p.kill()
	p.start(c.t)
}

// freezeNode has a node lose its leases and not know it.
func (c *crash) freezeNode() {
	p := c.one(c.nodes)
	require.NoError(c.t, p.Process.Signal(syscall.SIGSTOP))
	doze(c.t.Context(), memberVisibility+time.Duration(c.random.Int64N(int64(memberVisibility))))
	require.NoError(c.t, p.Process.Signal(syscall.SIGCONT))
}

// replaceNode ends a node as a deployment does.
func (c *crash) replaceNode() {
	p := c.one(c.nodes)
	_ = p.stop() // the server may be away
	p.start(c.t)
}

// killBackend kills the process of a session, upon which the server ends all others and recovers.
func (c *crash) killBackend() {
	c.eventually(patience, func() bool { // the session may just have ended
		return kill(c.ask(`SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1`)) == nil
	}, func() string { return "no session is there" })
}

// killServer kills the postmaster. Its children notice, or are stopped.
func (c *crash) killServer() {
	require.NoError(c.t, kill(int64(c.server.PostmasterPID())))
	require.NoError(c.t, c.server.Resume(c.t.Context()))
}

// kill sends SIGKILL to one process: 0 would be this one and all of its group.
func kill(pid int64) error {
	if pid <= 1 {
		return os.ErrProcessDone
	}
	return syscall.Kill(int(pid), syscall.SIGKILL)
}

func (c *crash) crashServer() {
	require.NoError(c.t, c.server.Restart(c.t.Context(), devpg.Immediate))
}

// inLog is an event of the log.
type inLog struct {
	id              int64
	name, kind, key string
}

// groups say of each group which types it gets.
var groups = map[string]func(kind string) bool{
	"audit": func(string) bool { return true },
	"shop":  func(kind string) bool { return kind != "other" },
}

// check compares what the ledger says with what the database has.
func (c *crash) check() {
	t := c.t
	var events []inLog
	c.query(`SELECT event_id, payload ->> 'Name', event_type, coalesce(key, '') FROM crash.event_log ORDER BY event_id`, func(row pgx.CollectableRow) error {
		var e inLog
		events = append(events, e)
		return row.Scan(&events[len(events)-1].id, &events[len(events)-1].name, &events[len(events)-1].kind, &events[len(events)-1].key)
	})
	byName, byID := map[string]inLog{}, map[int64]inLog{}
	for _, e := range events {
		require.Zero(t, byName[e.name], "the log has %+v twice", e)
		byName[e.name], byID[e.id] = e, e
	}
	ledger := c.readLedger()
	c.checkLog(ledger, byName)
	handled := map[string][]int64{}
	c.query(`SELECT by, event FROM crash.effects ORDER BY place`, func(row pgx.CollectableRow) error {
		var by string
		var id int64
		err := row.Scan(&by, &id)
		handled[by] = append(handled[by], id)
		return err
	})
	for group, takes := range groups {
		times := map[int64]int{}
		for _, id := range handled[group] {
			times[id]++
		}
		for _, e := range events {
			want := 0
			if takes(e.kind) {
				want = 1
			}
			require.Equal(t, want, times[e.id], "how often group %s handled %+v", group, e)
		}
		c.checkOrder(group, handled[group], byID, ledger)
	}
	shops := func(id int64) bool { return !groups["shop"](byID[id].kind) || byID[id].key == "" }
	require.Equal(t, byKey(slices.DeleteFunc(slices.Clone(handled["audit"]), shops), byID), byKey(slices.DeleteFunc(handled["shop"], shops), byID), "both groups have one order")
	require.Zero(t, c.ask(`SELECT count(*) FROM crash.dead_letters`))
	require.Zero(t, c.ask(`SELECT count(*) FROM crash.event_keys`))
	t.Logf("%d events, %d handled", len(events), len(handled["audit"])+len(handled["shop"]))
}

// byKey are the ids of each key, in their order.
func byKey(ids []int64, events map[int64]inLog) map[string][]int64 {
	keys := map[string][]int64{}
	for _, id := range ids {
		keys[events[id].key] = append(keys[events[id].key], id)
	}
	return keys
}

// lines are where the ledger says of an event that it is tried, and told.
type lines struct {
	entry
	tried, told int // math.MaxInt: it does not
}

func (c *crash) readLedger() (ledger map[string]*lines) {
	ledger = map[string]*lines{}
	file, err := os.Open(c.ledger)
	require.NoError(c.t, err)
	defer file.Close()
	scan := bufio.NewScanner(file)
	for i := 0; scan.Scan(); i++ {
		var e entry
		require.NoError(c.t, json.Unmarshal(scan.Bytes(), &e))
		if e.What == told {
			ledger[e.Name].told, ledger[e.Name].ID = i, e.ID
		} else {
			ledger[e.Name] = &lines{e, i, math.MaxInt}
		}
	}
	require.NoError(c.t, scan.Err())
	return ledger
}

// checkLog asserts that what was told is in the log, what was rolled back is not, and that batches are whole.
func (c *crash) checkLog(ledger map[string]*lines, events map[string]inLog) {
	t := c.t
	orders := map[string]bool{}
	c.query(`SELECT batch FROM crash.orders`, func(row pgx.CollectableRow) error {
		var batch string
		err := row.Scan(&batch)
		require.False(t, orders[batch], "order %s is there twice", batch)
		orders[batch] = true
		return err
	})
	batches := map[string][]bool{}
	for name, l := range ledger {
		e, is := events[name]
		batches[l.Batch] = append(batches[l.Batch], is)
		require.False(t, l.What == back && is, "%+v is rolled back", l)
		require.False(t, l.told < math.MaxInt && !is, "%+v is lost", l)
		require.False(t, l.told < math.MaxInt && e.id != l.ID, "%+v is event %d", l, e.id)
		require.False(t, l.How == inTx && is != orders[l.Batch], "%+v is there, or its order, and not both", l)
		if is {
			require.Equal(t, []string{l.Type, l.Key}, []string{e.kind, e.key}, name)
		}
	}
	for batch, is := range batches {
		require.Len(t, slices.Compact(is), 1, "batch %s is there in part", batch)
	}
	followers := 0
	for name, e := range events {
		if of, follows := strings.CutPrefix(name, "of "); follows {
			followers++
			require.Equal(t, "order.created", events[of].kind, name)
			require.Equal(t, e.key, events[of].key, name)
		} else {
			require.NotNil(t, ledger[name], "nobody emitted %+v", e)
			if e.kind == "order.created" {
				require.NotZero(t, events["of "+name], "what the handler of %s emits is lost", name)
			}
		}
	}
	require.Positive(t, followers)
}

// checkOrder asserts that a group handled the events of each key in the order of their commits, as far as that shows from outside: none that
// was told before another was tried comes after that; those of a batch come in their order; and what a handler emits comes after what it handled.
func (c *crash) checkOrder(group string, handled []int64, events map[int64]inLog, ledger map[string]*lines) {
	for key, ids := range byKey(handled, events) {
		if key == "" {
			continue
		}
		seen, latest := map[string]bool{}, map[string]int{}
		for _, id := range ids {
			name := events[id].name
			seen[name] = true
			if of, follows := strings.CutPrefix(name, "of "); follows {
				require.True(c.t, seen[of], "group %s handled %s first", group, name)
				continue
			}
			l := ledger[name]
			require.GreaterOrEqual(c.t, l.tried, latest[l.Batch], "group %s handled %s after others of its batch", group, name)
			latest[l.Batch] = l.tried
		}
		told := math.MaxInt // the first line in which one that comes later is told
		for _, id := range slices.Backward(ids) {
			if l := ledger[events[id].name]; l != nil {
				require.Less(c.t, l.tried, told, "group %s handled %s before one that had been committed", group, l.Name)
				told = min(told, l.told)
			}
		}
	}
}
