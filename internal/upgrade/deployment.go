package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	events "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testroles"
	root "github.com/pgwake/pgwake/migrations"
	graph "github.com/pgwake/pgwake/taskgraph/migrations"
)

// This file answers: which nodes run when, and was all done?

// patience is for a node to come up, and to end, and for what was sent to be done.
const patience = time.Minute

type deployment struct {
	conn   *pgx.Conn
	url    string
	schema string
	ledger string // quoted
	page   string // docs/security.md, by which the roles are made
	nodes  map[string]*node
}

// The nodes that migrate are the owner, and all others workers. Those of the earlier state go on before anybody has repeated the grants, which is done
// before the first worker of this state starts.
func (d *deployment) owner() string  { return d.schema + "_owner" }
func (d *deployment) worker() string { return d.schema + "_worker" }

// node is a process.
type node struct {
	cmd   *exec.Cmd
	input io.WriteCloser
	said  bytes.Buffer // what it warned of; to be read when it has ended
}

func newDeployment(ctx context.Context, conn *pgx.Conn, url, schema, page string) (*deployment, error) {
	d := &deployment{conn, url, schema, pgx.Identifier{schema + "_ledger"}.Sanitize(), page, map[string]*node{}}
	made, err := testroles.Statements(page, testroles.Owner, d.owner(), schema)
	if err != nil {
		return nil, err
	}
	_, err = conn.Exec(ctx, made+`CREATE ROLE `+d.worker()+` LOGIN; CREATE SCHEMA `+d.ledger+`; CREATE TABLE `+d.ledger+`.sent (kind text, id text, PRIMARY KEY (kind, id));
		CREATE TABLE `+d.ledger+`.done (kind text, id text, node text);
		GRANT USAGE ON SCHEMA `+d.ledger+` TO `+d.owner()+`, `+d.worker()+`; GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA `+d.ledger+` TO `+d.owner()+`, `+d.worker())
	return d, err
}

// grant gives the worker the rights of the page, to what is there now.
func (d *deployment) grant(ctx context.Context) error {
	sql, err := testroles.Statements(d.page, testroles.Worker, d.worker(), d.schema, "taskgraph", "eventbus")
	if err == nil {
		_, err = d.conn.Exec(ctx, strings.Replace(sql, `CREATE ROLE `+d.worker()+` LOGIN;`, ``, 1))
	}
	return err
}

func (d *deployment) close(ctx context.Context) error {
	for _, n := range d.nodes {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	}
	_, err := d.conn.Exec(ctx, `DROP SCHEMA IF EXISTS `+d.ledger+` CASCADE; DROP OWNED BY `+d.owner()+`, `+d.worker()+` CASCADE; DROP ROLE `+d.owner()+`, `+d.worker())
	return err
}

// roll deploys: the old state alone, the new one beside it, which migrates, the new one alone, and the old one again on the newer schema.
func (d *deployment) roll(ctx context.Context, old, now string, length time.Duration) error {
	phase := func(what string, changes ...error) error {
		if err := errors.Join(changes...); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		select {
		case <-time.After(length):
		case <-ctx.Done():
			return ctx.Err()
		}
		var sent, done int
		err := d.conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM `+d.ledger+`.sent), (SELECT count(*) FROM `+d.ledger+`.done)`).Scan(&sent, &done)
		fmt.Printf("%-38s %6d sent, %6d done\n", what, sent, done)
		return err
	}
	if err := phase("old nodes", d.start("old-1", old, d.owner()), d.grant(ctx), d.start("old-2", old, d.worker())); err != nil {
		return err
	}
	before, err := d.versions(ctx)
	if err != nil {
		return err
	}
	if err := phase("a new one beside them, which migrates", d.start("new-1", now, d.owner())); err != nil {
		return err
	}
	after, err := d.versions(ctx)
	if err != nil {
		return err
	}
	for set := range before {
		if after[set] <= before[set] {
			return fmt.Errorf("nothing was migrated: the versions were %v, and are %v", before, after)
		}
	}
	if err := phase("new nodes", d.grant(ctx), d.start("new-2", now, d.worker()), d.stop("old-1"), d.stop("old-2")); err != nil {
		return err
	}
	if err := d.keepsRows(ctx); err != nil {
		return err
	}
	if err := phase("back: old nodes on the newer schema", d.start("old-3", old, d.worker()), d.start("old-4", old, d.worker()), d.stop("new-1"), d.stop("new-2")); err != nil {
		return err
	}
	for _, n := range d.nodes {
		if _, err := io.WriteString(n.input, "enough\n"); err != nil {
			return err
		}
	}
	return errors.Join(d.settled(ctx), d.stop("old-3"), d.stop("old-4"))
}

// versions are those of the migrations, of each set.
func (d *deployment) versions(ctx context.Context) (of [3]int64, err error) {
	in := pgx.Identifier{d.schema}.Sanitize()
	err = d.conn.QueryRow(ctx, fmt.Sprintf(`SELECT (SELECT max(version_id) FROM %[1]s.schema_migrations), (SELECT max(version_id) FROM %[1]s.taskgraph_migrations),
		(SELECT max(version_id) FROM %[1]s.eventbus_migrations)`, in)).Scan(&of[0], &of[1], &of[2])
	return of, err
}

// keepsRows fails unless to take the migrations back is refused, while the nodes go on with what is there.
func (d *deployment) keepsRows(ctx context.Context) error {
	for name, down := range map[string]func(context.Context, *pgx.ConnConfig, string) error{"eventbus": events.Down, "taskgraph": graph.Down, "pgwake": root.Down} {
		err := down(ctx, d.conn.Config(), d.schema)
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != "PW006" {
			return fmt.Errorf("the migrations of %s were to stay while there are rows: %v", name, err)
		}
	}
	return nil
}

// start starts a node as a role.
func (d *deployment) start(name, binary, role string) error {
	cmd := exec.Command(binary, testroles.As(d.url, role), d.schema, name)
	n := &node{cmd: cmd}
	cmd.Stderr = &n.said
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	n.input, d.nodes[name] = input, n
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	if line, err := bufio.NewReader(output).ReadString('\n'); line != "ready\n" {
		return fmt.Errorf("%s did not come up: %w", name, errors.Join(err, d.stop(name)))
	}
	return nil
}

// stop ends a node as a deployment does, and fails if it warned of anything.
func (d *deployment) stop(name string) error {
	n := d.nodes[name]
	delete(d.nodes, name)
	late := time.AfterFunc(patience, func() { _ = n.cmd.Process.Kill() })
	defer late.Stop()
	err := errors.Join(n.input.Close(), n.cmd.Wait())
	if said := strings.TrimSpace(n.said.String()); said != "" {
		err = errors.Join(err, errors.New(said))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// settled waits until all that was sent is done, and fails if something was done twice that is to be done once, or was never sent.
func (d *deployment) settled(ctx context.Context) error {
	var lost, alien, repeated, open, dead int
	for until := time.Now().Add(patience); ; {
		err := d.conn.QueryRow(ctx, fmt.Sprintf(`
			SELECT (SELECT count(*) FROM %[1]s.sent s WHERE NOT EXISTS (SELECT FROM %[1]s.done d WHERE d.kind = s.kind AND d.id = s.id)),
			       (SELECT count(*) FROM %[1]s.done d WHERE NOT EXISTS (SELECT FROM %[1]s.sent s WHERE s.kind = d.kind AND s.id = d.id)),
			       (SELECT count(*) FROM (SELECT FROM %[1]s.done WHERE kind <> 'step' GROUP BY kind, id HAVING count(*) > 1) AS r),
			       (SELECT count(*) FROM %[2]s.tasks WHERE state <> 'complete'),
			       (SELECT count(*) FROM %[2]s.dead_letters)`, d.ledger, pgx.Identifier{d.schema}.Sanitize())).Scan(&lost, &alien, &repeated, &open, &dead)
		if err != nil {
			return err
		}
		if lost+open == 0 || time.Now().After(until) || alien+repeated+dead > 0 {
			break
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fmt.Printf("not done %d, never sent %d, done twice %d, tasks that are not complete %d, dead letters %d\n", lost, alien, repeated, open, dead)
	if lost+alien+repeated+open+dead > 0 {
		return errors.New("the ledger does not agree")
	}
	return nil
}
