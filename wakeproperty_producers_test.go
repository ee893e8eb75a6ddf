package pgwake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: how do the producers of wakeproperty_test.go add items, and what became of each?

var psqlPath = sync.OnceValue(func() string {
	path, _ := exec.LookPath("psql")
	return path
})

// propertyItem is what became of an item. The world's mutex guards it.
type propertyItem struct {
	drawnItem
	name      string
	committed bool
	unsure    bool // nobody knows
	fetched   int
	abandoned int
	held      int
}

// propertyProducer is a connection, and the transaction that is open on it. Its goroutine does one thing after another.
type propertyProducer struct {
	conn   *pgx.Conn
	simple bool
	todo   chan func()
	tx     pgx.Tx
	inside []*propertyItem // of the transaction
	doomed bool            // the server has refused it
	open   bool            // these are the schedule's
	rc     bool            // READ COMMITTED
	added  bool            // something, and so may keep lanes from settling
}

// make takes items down that are about to be added.
func (w *world) make(all []drawnItem) []*propertyItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	var made []*propertyItem
	for _, d := range all {
		i := &propertyItem{drawnItem: d, name: fmt.Sprintf("i%d", len(w.items))}
		w.items = append(w.items, i)
		w.byName[i.name] = i
		made = append(made, i)
	}
	return made
}

func (i *propertyItem) String() string {
	return fmt.Sprintf("%s (%v): committed %v, unsure %v, fetched %d, abandoned %d, held %d",
		i.name, i.drawnItem, i.committed, i.unsure, i.fetched, i.abandoned, i.held)
}

func (w *world) commit(items []*propertyItem) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range items {
		i.committed = true
	}
}

// of splits the items by queue, in their order.
func of(items []*propertyItem) (work, messages []*propertyItem) {
	for _, i := range items {
		if i.Queue == Worker {
			work = append(work, i)
		} else {
			messages = append(messages, i)
		}
	}
	return work, messages
}

// insertSQL is what a producer in any language sends, a statement for each queue. Names are our own and need no quotes.
func insertSQL(items []*propertyItem, byFunction bool) (statements []string) {
	for at, all := range [2][]*propertyItem{} {
		work, messages := of(items)
		worker := at == 0
		if all = messages; worker {
			all = work
		}
		if len(all) == 0 {
			continue
		}
		var names, namespaces, tags, delays, rows, kinds []string
		for _, i := range all {
			delay := fmt.Sprintf("%dms", i.delay.Milliseconds())
			names, namespaces = append(names, i.name), append(namespaces, i.namespace)
			tags, delays, kinds = append(tags, strconv.Quote(i.tag)), append(delays, delay), append(kinds, "start")
			if worker {
				rows = append(rows, fmt.Sprintf("('%s', '%s', '%s', clock_timestamp() + interval '%s')", i.name, i.namespace, i.tag, delay))
			} else {
				rows = append(rows, fmt.Sprintf("('%s', 'start', 'flow', '%s', clock_timestamp() + interval '%s')", i.name, i.namespace, delay))
			}
		}
		array := func(all []string) string { return "'{" + strings.Join(all, ",") + "}'" }
		switch {
		case worker && byFunction:
			statements = append(statements, fmt.Sprintf("SELECT count(*) FROM enqueue_work_many(%s, NULL, %s, p_delays => %s, p_tags => %s)",
				array(names), array(namespaces), array(delays), array(tags)))
		case worker:
			statements = append(statements, "INSERT INTO worker_queue (name, namespace, tag, visible_at) VALUES "+strings.Join(rows, ", "))
		case byFunction:
			flows := slices.Repeat([]string{"flow"}, len(names))
			statements = append(statements, fmt.Sprintf("SELECT count(*) FROM enqueue_message_many(%s, %s, NULL, %s, p_namespaces => %s, p_delays => %s)",
				array(names), array(kinds), array(flows), array(namespaces), array(delays)))
		default:
			statements = append(statements, "INSERT INTO orchestrator_queue (instance_id, kind, name, namespace, visible_at) VALUES "+strings.Join(rows, ", "))
		}
	}
	return statements
}

// enqueues are the items as arguments of the library.
func enqueues(items []*propertyItem) (work []WorkEnqueue, messages []MessageEnqueue) {
	for _, i := range items {
		o := EnqueueOptions{Namespace: i.namespace, Delay: i.delay}
		if i.Queue == Worker {
			work = append(work, WorkEnqueue{WorkItem: WorkItem{Name: i.name, Tag: i.tag}, EnqueueOptions: o})
		} else {
			messages = append(messages, MessageEnqueue{Message: Message{Instance: i.name, Kind: MessageStart, Name: "flow"}, EnqueueOptions: o})
		}
	}
	return work, messages
}

func (w *world) connect(p *propertyProducer) {
	config, err := pgx.ParseConfig(testdbURL)
	if err == nil {
		config.RuntimeParams["search_path"] = pgx.Identifier{w.schema}.Sanitize()
		if p.simple {
			config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		}
		p.conn, err = pgx.ConnectConfig(tctx, config)
	}
	if err != nil {
		w.problem("connect a producer: %v", err)
	}
}

// sever ends the connection of a producer, and with it the transaction.
func (w *world) sever(p *propertyProducer) {
	if p.conn != nil {
		_ = p.conn.PgConn().Conn().Close()
		_ = p.conn.Close(tctx)
	}
	p.tx, p.inside, p.doomed = nil, nil, false
}

// refused takes the error of a statement. The server may refuse a SERIALIZABLE transaction.
func (w *world) refused(p *propertyProducer, err error) bool {
	if err == nil {
		return false
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "25P02") || errors.Is(err, pgx.ErrTxCommitRollback) {
		p.doomed = true
	} else {
		w.problem("produce: %v", err)
	}
	return true
}

// produce has a producer do something after what it does now.
func (w *world) produce(p *propertyProducer, do func()) {
	w.pending.Add(1)
	p.todo <- do
}

// querierTx is what a producer inserts with.
type querierTx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func (w *world) insert(p *propertyProducer, as querierTx, twin *propertyNode, step drawnStep, items []*propertyItem) (ok bool) {
	if tx, is := as.(pgx.Tx); is && twin != nil {
		work, messages := enqueues(items)
		if len(work) > 0 {
			if _, err := twin.EnqueueForWorkerManyTx(tctx, tx, work); w.refused(p, err) {
				return false
			}
		}
		if len(messages) > 0 {
			if _, err := twin.EnqueueForOrchestratorManyTx(tctx, tx, messages); w.refused(p, err) {
				return false
			}
		}
		return true
	}
	for _, statement := range insertSQL(items, step.by != "rows") {
		if _, err := as.Exec(tctx, statement); w.refused(p, err) {
			return false
		}
	}
	return true
}

// endTx ends the transaction of a producer.
func (w *world) endTx(p *propertyProducer, fate string) {
	p.open = false
	w.produce(p, func() {
		if p.tx == nil {
			return
		}
		switch {
		case fate == "dies":
			w.sever(p)
			w.connect(p)
		case fate == "rollback" || p.doomed:
			if err := p.tx.Rollback(tctx); err != nil {
				w.problem("roll back: %v", err)
			}
		default:
			if !w.refused(p, p.tx.Commit(tctx)) {
				w.commit(p.inside)
			}
		}
		p.tx, p.inside, p.doomed = nil, nil, false
	})
}

func (w *world) psql(step drawnStep, items []*propertyItem) {
	half := len(items) / 2 // these are rolled back to a savepoint
	kept, undone := items[half:], items[:half]
	script := []string{"BEGIN ISOLATION LEVEL " + string(step.isolation)}
	script = append(script, insertSQL(kept, step.by != "rows")...)
	script = append(script, "SAVEPOINT s")
	script = append(script, insertSQL(undone, step.by != "rows")...)
	script = append(script, "ROLLBACK TO s", map[bool]string{true: "COMMIT", false: "ROLLBACK"}[step.fate == "commit"], "")
	cmd := exec.Command(psqlPath(), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.DevNull, "-d", testdbURL)
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+w.schema)
	cmd.Stdin = strings.NewReader(strings.Join(script, ";\n"))
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil && !strings.Contains(string(out), "could not serialize"):
		w.problem("psql: %v: %s", err, out)
	case err == nil && step.fate == "commit":
		w.commit(kept)
	}
}
