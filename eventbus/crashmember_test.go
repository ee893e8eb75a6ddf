package eventbus_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the processes do that TestCrash kills?

// memberVariable has the test binary be a member, and tells it which.
const memberVariable = "PGWAKE_TEST_EVENTBUS"

const crashSchema = "crash"

// memberVisibility is the shortest that a node can have.
const memberVisibility = time.Second

// member is what a process is told. Without a group it emits, and otherwise it is a node that handles these patterns.
type member struct {
	URL      string
	ID       string
	Group    string
	Patterns []string
	Ledger   string // file to which those that emit append
	Seed     uint64
}

// entry is a line of the ledger. One that an event is tried is written before anything is sent, and one that it is told after the answer. All
// append to one file: so what is told in a line was committed before what is tried in a later one was begun.
type entry struct {
	What  string // tried, told, or back: it is rolled back
	How   string // a batch of this way is all or nothing
	Batch string
	Name  string // which the payload has as well
	Type  string
	Key   string
	ID    int64 // of what is told
}

const (
	tried = "tried"
	told  = "told"
	back  = "back"

	inTx = "in a transaction with an order"
)

// note is the payload of all events.
type note struct{ Name string }

// beMember is a process until SIGTERM.
func beMember(told string) error {
	var m member
	if err := json.Unmarshal([]byte(told), &m); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	for began := time.Now(); ; doze(ctx, 50*time.Millisecond) {
		err := m.run(ctx)
		if err == nil || ctx.Err() != nil || time.Since(began) > patience { // until then the server may just have crashed
			return err
		}
	}
}

func (m *member) run(ctx context.Context) error {
	silent := slog.New(slog.DiscardHandler)
	p, err := pgwake.Open(ctx, m.URL+"&pool_max_conns=10", &pgwake.Config{Schema: crashSchema, SkipMigrate: true, Logger: silent})
	if err != nil {
		return err
	}
	defer p.Close(context.Background())
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Logger: silent})
	if err != nil {
		return err
	}
	if m.Group == "" {
		return m.emit(ctx, p, bus)
	}
	return m.handle(ctx, bus)
}

// handle is a node that notes in its transaction what it handled. Some deliveries fail the first time; each order.created is followed by an
// invoice, which is emitted in the same transaction.
func (m *member) handle(ctx context.Context, bus *eventbus.Bus) error {
	n, err := bus.Node(ctx, &eventbus.NodeConfig{ID: m.ID, Group: m.Group, Concurrency: 5, Visibility: memberVisibility, Heartbeat: 200 * time.Millisecond,
		MaxAttempts: 50, Retry: dispatch.Backoff(time.Millisecond, 50*time.Millisecond)})
	if err != nil {
		return err
	}
	handler := func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var what note
		if err := e.Decode(&what); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO crash.effects (by, event, key, node) VALUES ($1, $2, $3, $4)`, m.Group, e.ID, e.Key, m.ID); err != nil {
			return err
		}
		if m.Group == "shop" && e.Type == "order.created" {
			if _, err := n.WithTx(tx).Emit(ctx, "invoice.sent", note{"of " + what.Name}, &eventbus.EmitOptions{Key: e.Key}); err != nil {
				return err
			}
		}
		switch {
		case e.Redelivery > 0:
		case e.ID%11 == 0:
			return errors.New("not yet")
		case e.ID%13 == 0:
			panic("not yet")
		}
		return nil
	}
	for _, pattern := range m.Patterns {
		if err := n.On(ctx, pattern, handler); err != nil {
			return err
		}
	}
	if err := n.Start(ctx); err != nil {
		return err
	}
	fmt.Println("ready")
	<-ctx.Done()
	return n.Stop(context.Background())
}

// emitter emits one batch after the other.
type emitter struct {
	*member
	p      *pgwake.Provider
	bus    *eventbus.Bus
	ledger io.Writer
	random *rand.Rand
}

func (m *member) emit(ctx context.Context, p *pgwake.Provider, bus *eventbus.Bus) error {
	ledger, err := os.OpenFile(m.Ledger, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer ledger.Close()
	e := &emitter{m, p, bus, ledger, rand.New(rand.NewPCG(m.Seed, 0))}
	fmt.Println("ready")
	for i := 0; ctx.Err() == nil; i++ {
		if err := e.batch(ctx, fmt.Sprintf("%s-%d", m.ID, i)); err != nil {
			return err
		}
		doze(ctx, rand.N(30*time.Millisecond))
	}
	return nil
}

// batch emits some events. What it was told, or not, is in the ledger; its error is of that alone.
func (e *emitter) batch(ctx context.Context, batch string) error {
	types := []string{"order.created", "order.paid", "invoice.sent", "mail.out.new", "mail.in", "other"}
	how := []string{"one", "dedup", "sql", "many", inTx, "rolled back"}[e.random.IntN(6)]
	size := 1
	if how == "many" || how == inTx || how == "rolled back" {
		size = 1 + e.random.IntN(4)
	}
	entries, events := make([]entry, size), make([]eventbus.Emission, size)
	for i := range entries {
		n := &entries[i]
		*n = entry{What: tried, How: how, Batch: batch, Name: fmt.Sprintf("%s-%d", batch, i), Type: types[e.random.IntN(len(types))]}
		if e.random.IntN(2) == 0 {
			n.Key = fmt.Sprintf("key-%d", e.random.IntN(8))
		}
		events[i] = eventbus.Emission{Type: n.Type, Payload: note{n.Name}, EmitOptions: eventbus.EmitOptions{Key: n.Key}}
		if how == "dedup" {
			events[i].DedupKey = n.Name
		}
		if how == "rolled back" {
			n.What = back
		}
	}
	if err := e.write(entries); err != nil {
		return err
	}
	var ids []int64
	var err error
	switch how {
	case "dedup": // over again, until somebody says that it is there
		for {
			if ids, err = e.many(ctx, events); err == nil || ctx.Err() != nil {
				break
			}
			doze(ctx, 5*time.Millisecond)
		}
	case "sql":
		var id int64
		err = e.p.Pool().QueryRow(ctx, `SELECT crash.emit('default', $1, $2, nullif($3, ''))`, events[0].Type, events[0].Payload, events[0].Key).Scan(&id)
		ids = []int64{id}
	case inTx, "rolled back":
		err = pgx.BeginFunc(ctx, e.p.Pool(), func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO crash.orders VALUES ($1)`, batch); err != nil {
				return err
			}
			// One after the other, so that keys are in any order.
			for i := range events {
				id, err := e.bus.WithTx(tx).Emit(ctx, events[i].Type, events[i].Payload, &events[i].EmitOptions)
				if err != nil {
					return err
				}
				ids = append(ids, id)
			}
			if how != inTx {
				return errors.New("no")
			}
			return nil
		})
	default:
		ids, err = e.many(ctx, events)
	}
	if err != nil {
		return nil
	}
	for i := range entries {
		entries[i].What, entries[i].ID = told, ids[i]
	}
	return e.write(entries)
}

func (e *emitter) many(ctx context.Context, events []eventbus.Emission) (ids []int64, err error) {
	emitted, err := e.bus.EmitMany(ctx, events)
	for _, one := range emitted {
		ids = append(ids, one.ID)
	}
	return ids, err
}

// write appends lines by one call to the system: they are there if the process is killed after it.
func (e *emitter) write(entries []entry) error {
	var lines bytes.Buffer
	for _, n := range entries {
		if err := json.NewEncoder(&lines).Encode(n); err != nil {
			return err
		}
	}
	_, err := e.ledger.Write(lines.Bytes())
	return err
}

// doze waits for d, or until ctx ends.
func doze(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// process is a member that runs, or did.
type process struct {
	member
	*exec.Cmd
	incarnation int
}

// start starts a process, or the next incarnation of one, and waits until it is ready. It has an id of its own each time.
func (p *process) start(t *testing.T) {
	t.Helper()
	p.incarnation++
	m := p.member
	m.ID = fmt.Sprintf("%s-%d", m.ID, p.incarnation)
	m.Seed += uint64(p.incarnation)
	told, err := json.Marshal(m)
	require.NoError(t, err)
	p.Cmd = exec.Command(os.Args[0])
	p.Env = append(os.Environ(), memberVariable+"="+string(told), "GORACE=atexit_sleep_ms=0") // which is a second
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.Cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err, m.ID)
	require.Equal(t, "ready\n", line)
}

// kill ends a process as if by the kernel.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

// stop has a process end as it should, and returns what it makes of that.
func (p *process) stop() error {
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return p.Wait()
}
