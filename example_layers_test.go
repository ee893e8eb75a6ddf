package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/migrations"
)

// Whoever has a Provider can begin transactions on its database.
func ExampleProvider_Pool() {
	ctx, p, end := openProvider()
	defer end()
	check(pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `CREATE TEMPORARY TABLE orders ON COMMIT DROP AS SELECT 7 AS id`); err != nil { // whatever else belongs together
			return err
		}
		_, err := p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "ship", Input: []byte(`{"order":7}`)}, nil)
		return err
	}))
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Printf("%s %s\n", item.Name, item.Input)
	// Output: ship {"order":7}
}

// An SQL function has its schema before it.
func ExampleProvider_Schema() {
	ctx, p, end := openProvider()
	defer end()
	enqueue := "SELECT " + pgx.Identifier{p.Schema(), "enqueue_work"}.Sanitize() + "($1)" // SELECT pgwake.enqueue_work($1)
	_, err := p.Pool().Exec(ctx, enqueue, "email.send")
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output: email.send
}

// What is put into a queue by SQL nobody checks: so do.
func ExampleProvider_MaxPayload() {
	_, p, end := openProvider()
	defer end()
	input := []byte(`"` + strings.Repeat("x", p.MaxPayload()) + `"`)
	err := pgwake.CheckJSON("the report", input, p.MaxPayload())
	fmt.Println(errors.Is(err, pgwake.ErrInvalid))
	// Output: true
}

// A statement of a layer's own that acknowledges keeps what the Provider would.
func ExampleProvider_ArchiveFor() {
	tb := &exampletb.TB{}
	defer tb.End()
	ctx, p := context.Background(), newNode(tb, &pgwake.Config{ArchiveFor: time.Hour}).Provider
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	id, token, err := item.LockToken.WorkItem()
	check(err)
	ack := pgx.Identifier{p.Schema(), "ack_work"}.Sanitize()
	_, err = p.Pool().Exec(ctx, "SELECT "+ack+"($1, $2, p_archive_for => nullif($3, interval '0'))", id, token, p.ArchiveFor())
	check(err)
	archived, err := p.ListArchive(ctx, nil)
	check(err)
	fmt.Println(archived[0].Name)
	// Output: email.send
}

// A statement of one's own, with all that a verb has.
func ExampleProvider_Do() {
	ctx, p, end := openProvider()
	defer end()
	var first, second int64
	err := p.Do(ctx, "enqueue in order", func(ctx context.Context, q pgwake.Querier) error {
		enqueue := pgx.Identifier{p.Schema(), "enqueue_work"}.Sanitize()
		return q.QueryRow(ctx, "SELECT "+enqueue+"('first'), "+enqueue+"('second')").Scan(&first, &second)
	}, pgwake.Worker)
	check(err)
	fmt.Println(second - first)
	// Output: 1
}

// It takes effect when the transaction commits.
func ExampleProvider_DoTx() {
	ctx, p, end := openProvider()
	defer end()
	tx, err := p.Pool().Begin(ctx)
	check(err)
	err = p.DoTx(ctx, tx, "enqueue twice", func(ctx context.Context, q pgwake.Querier) error {
		enqueue := pgx.Identifier{p.Schema(), "enqueue_work"}.Sanitize()
		_, err := q.Exec(ctx, "SELECT "+enqueue+"(name) FROM unnest($1::text[]) AS name", []string{"a", "b"})
		return err
	})
	check(err)
	check(tx.Commit(ctx))
	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	fmt.Println(len(items))
	// Output: 2
}

// A layer that keeps settings beside the queues sees at once what others change in them, for no statement while nobody does.
func ExampleProvider_Watch() {
	ctx, p, end := openProvider()
	defer end()
	schema := pgx.Identifier{p.Schema()}.Sanitize()
	_, err := p.Pool().Exec(ctx, `CREATE TABLE `+schema+`.settings (colour text);
		CREATE FUNCTION `+schema+`.look_at_settings(node integer, about text) RETURNS boolean LANGUAGE sql AS 'SELECT false'`) // never missed
	check(err)
	w, err := p.Watch(ctx, pgwake.WatchOptions{Topic: "settings", Beat: "look_at_settings"})
	check(err)
	defer w.Close()

	_, err = p.Pool().Exec(ctx, `INSERT INTO `+schema+`.settings VALUES ('green'); SELECT `+schema+`.notify_instance('settings')`) // by anybody
	check(err)
	var colour string
	for colour == "" { // there may be a token for which nothing has changed
		<-w.C
		check(p.Pool().QueryRow(ctx, `SELECT coalesce(max(colour), '') FROM `+schema+`.settings`).Scan(&colour))
	}
	fmt.Println(colour)
	// Output: green
}

// A program that keeps receipts beside the queue, in the same schema.
func ExampleProvider_Migrate() {
	ctx, p, end := openProvider()
	defer end()
	files := fstest.MapFS{"00001_receipts.sql": {Data: []byte(`-- +goose Up
CREATE TABLE receipts (item bigint PRIMARY KEY, sent_at timestamptz NOT NULL DEFAULT now());
-- +goose StatementBegin
CREATE FUNCTION require_no_receipts() RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM receipts) THEN
        RAISE EXCEPTION 'there are receipts' USING ERRCODE = 'PW006';
    END IF;
END $$;
-- +goose StatementEnd
-- +goose Down
LOCK TABLE receipts IN ACCESS EXCLUSIVE MODE;
SELECT require_no_receipts();
DROP FUNCTION require_no_receipts;
DROP TABLE receipts;`)}} // or an embed.FS
	check(p.Migrate(ctx, migrations.Layer{Files: files, Table: "receipts_migrations", Empty: "require_no_receipts"}))
	_, err := p.Pool().Exec(ctx, "INSERT INTO "+pgx.Identifier{p.Schema(), "receipts"}.Sanitize()+" VALUES (7)")
	fmt.Println(err)
	// Output: <nil>
}

// One statement keeps the receipt and acknowledges the item: both, or neither.
func ExampleLockToken_WorkItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.Pool().Exec(ctx, "CREATE TABLE "+pgx.Identifier{p.Schema(), "receipts"}.Sanitize()+" (item bigint PRIMARY KEY)")
	check(err)
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)

	id, token, err := item.LockToken.WorkItem()
	check(err)
	receipts, ack := pgx.Identifier{p.Schema(), "receipts"}.Sanitize(), pgx.Identifier{p.Schema(), "ack_work"}.Sanitize()
	for range 2 {
		// WITH kept AS (INSERT INTO pgwake.receipts VALUES ($1)) SELECT pgwake.ack_work($1, $2)
		_, err = p.Pool().Exec(ctx, "WITH kept AS (INSERT INTO "+receipts+" VALUES ($1)) SELECT "+ack+"($1, $2)", id, token)
		fmt.Println(pgwake.WrapError("keep receipt", err) == nil, errors.Is(pgwake.WrapError("keep receipt", err), pgwake.ErrLockLost))
	}
	// Output:
	// true false
	// false true
}

// The turn of an instance, acknowledged by SQL.
func ExampleLockToken_Turn() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "order"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)

	instance, token, err := turn.LockToken.Turn()
	check(err)
	ack := pgx.Identifier{p.Schema(), "ack_orchestration"}.Sanitize()
	_, err = p.Pool().Exec(ctx, "SELECT "+ack+"($1, $2, $3, p_name => 'order', p_status => 'Completed', p_output => 'shipped')",
		instance, token, turn.ExecutionID)
	check(err)
	outcome, err := p.WaitForInstance(ctx, instance)
	check(err)
	fmt.Println(outcome.Status, outcome.Output)
	// Output: Completed shipped
}

// The same, and this node is the first to hear of what it made due: here of the next order, which waits for nobody to be notified.
func ExampleProvider_DoAck() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "order"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)

	instance, token, err := turn.LockToken.Turn()
	check(err)
	function := pgx.Identifier{p.Schema(), "ack_orchestration"}.Sanitize()
	err = p.DoAck(ctx, "end order", turn.LockToken, func(ctx context.Context, q pgwake.Querier, quiet bool) (pgx.Rows, error) {
		return q.Query(ctx, "SELECT * FROM "+function+`($1, $2, $3, p_name => 'order', p_status => 'Completed', p_message_instances => ARRAY['order-8'],
			p_message_kinds => ARRAY['start'], p_message_names => ARRAY['order'], p_quiet => $4)`, instance, token, turn.ExecutionID, quiet)
	})
	check(err)
	next, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println(next.Instance)
	// Output: order-8
}

// What a statement of one's own enqueues goes to this node without a notification, if somebody waits here.
func ExampleProvider_DoEnqueue() {
	ctx, p, end := openProvider()
	defer end()
	function := pgx.Identifier{p.Schema(), "enqueue_work_many"}.Sanitize()
	err := p.DoEnqueue(ctx, "add parcels", func(ctx context.Context, q pgwake.Querier, quiet bool) ([]pgwake.Due, error) {
		_, err := q.Exec(ctx, "SELECT "+function+"(ARRAY['weigh', 'ship'], ARRAY['7', '7'], p_tags => ARRAY['parcels', 'parcels'], p_quiet => $1)", quiet)
		return []pgwake.Due{{Namespace: pgwake.DefaultNamespace, Tag: "parcels"}, {Namespace: pgwake.DefaultNamespace, Tag: "parcels"}}, err
	})
	check(err)
	items, err := p.FetchWorkItems(ctx, 2, &pgwake.FetchOptions{Tags: pgwake.Tags("parcels")})
	check(err)
	for _, item := range items {
		fmt.Println(item.Name)
	}
	// Output:
	// weigh
	// ship
}

// What a statement of one's own returned is told apart as what a verb returned.
func ExampleWrapError() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.Pool().Exec(ctx, "SELECT "+pgx.Identifier{p.Schema(), "enqueue_work"}.Sanitize()+"('')")
	err = pgwake.WrapError("enqueue by hand", err)
	var failed *pgwake.Error
	fmt.Println(errors.Is(err, pgwake.ErrInvalid), errors.As(err, &failed), failed.Op, failed.Retryable)
	// Output: true true enqueue by hand false
}
